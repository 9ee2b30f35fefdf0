"""Aligned text to padded samples: by hand, beside megatron-core's own masks, in an order that seed and step decide."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset

from mup_megatron import cli
from mup_megatron.config import Config
from mup_megatron.config.study import Pairs
from mup_megatron.data.ahead import problem_ahead
from mup_megatron.data.batches import Batches, build_datasets
from mup_megatron.data.order import Order
from mup_megatron.data.pairs import read_pairs
from mup_megatron.data.prepare import prepare
from mup_megatron.data.t5 import T5Batch, pair_masks
from mup_megatron.data.tokenizer import load_tokenizer
from mup_megatron.parallel.layout import resolve_layout
from mup_megatron.util.errors import UserError
from tests.helpers.configs import make_t5

END = 199
NULL = {"library": "null", "vocab_size": END + 1}


def write(folder: Path, sources: list[str], targets: list[str]) -> dict[str, str]:
    """Two aligned files as the config names them."""
    (folder / "a.de").write_text("".join(f"{line}\n" for line in sources))
    (folder / "a.en").write_text("".join(f"{line}\n" for line in targets))
    return {"source": str(folder / "a.de"), "target": str(folder / "a.en")}


def config(folder: Path, pairs: dict[str, str], **overrides: Any) -> Config:
    data = {"pairs": pairs, "tokenizer": NULL, "dir": str(folder / "data"), "split": "100,0,0"}
    keys = {"training__seq_length": 6, "training__decoder_seq_length": 4, **overrides}
    return make_t5(data=data, run__dir=str(folder / "run"), **keys)


def datasets(settings: Config, say: Callable[[str], None] = lambda _line: None) -> tuple[Any, Any]:
    return build_datasets(settings, prepare(settings), say)


def train(settings: Config, say: Callable[[str], None] = lambda _line: None) -> Any:
    return datasets(settings, say)[0]


@pytest.fixture
def numbered(tmp_path: Path) -> dict[str, str]:
    """40 pairs; pair i is `i` and `i + 100`."""
    return write(tmp_path, [str(i) for i in range(40)], [str(i + 100) for i in range(40)])


def sources(dataset: Any, indices: range) -> list[int]:
    return [int(dataset[index]["text_enc"][0]) for index in indices]


def test_a_sample_by_hand(tmp_path: Path) -> None:
    dataset = train(config(tmp_path, write(tmp_path, ["1 2 3"], ["4 5"])))
    sample = {name: value.tolist() for name, value in dataset[0].items()}
    assert sample == {
        "text_enc": [1, 2, 3, END, END, END],
        "enc_mask": [True, True, True, True, False, False],
        "text_dec": [END, 4, 5, END],  # begins with what ends documents; the last one pads
        "labels": [4, 5, END, END],
        "dec_mask": [True, True, True, False],
        "loss_mask": [1.0, 1.0, 1.0, 0.0],
        "mean_labels": 3.0,
    }
    assert dataset[0]["loss_mask"].dtype == torch.float32


def test_the_decoder_is_as_long_as_the_encoder_unless_said(tmp_path: Path) -> None:
    settings = config(tmp_path, write(tmp_path, ["1"], ["2"]), training__decoder_seq_length=None)
    assert train(settings)[0]["labels"].shape == (6,)
    assert settings.max_position_embeddings == 6
    longer = config(tmp_path, write(tmp_path, ["1"], ["2"]), training__decoder_seq_length=9)
    assert longer.max_position_embeddings == 9
    with pytest.raises(UserError, match=r"model\.max_position_embeddings: 8 is less than training\.decoder_seq_len"):
        config(
            tmp_path, write(tmp_path, ["1"], ["2"]), training__decoder_seq_length=9, model__max_position_embeddings=8
        )


def test_a_document_is_a_pair_of_sequences(tmp_path: Path) -> None:
    """As megatron-core reads it: document i is source and target, each ended."""
    prepared = prepare(config(tmp_path, write(tmp_path, ["1 2", "3"], ["4", "5 6"])))
    indexed = IndexedDataset(prepared.blend[0][0])
    assert [indexed[number].tolist() for number in range(4)] == [[1, 2, END], [4, END], [3, END], [5, 6, END]]
    assert indexed.document_indices.tolist() == [0, 2, 4]
    assert (prepared.documents, prepared.tokens) == (2, 10)


def test_masks_are_megatrons_where_a_token_looks() -> None:
    """megatron-core's takes 0 for what pads; rows of queries that pad it masks whole, ours never."""
    source = torch.tensor([[5, 6, 0, 0], [5, 6, 7, 8]])
    target = torch.tensor([[3, 4, 0], [3, 0, 0]])
    build = T5MaskedWordPieceDataset._build_b1ss_attention_mask
    expected = (build(source, source), build(target, target, make_history_mask=True), build(target, source))
    ours = pair_masks(source > 0, 3)
    for found, theirs, queries in zip(ours, expected, (source, target, target), strict=True):
        found = found.expand_as(theirs)
        assert torch.equal(found[:, 0][queries > 0], theirs[:, 0][queries > 0])
        assert theirs[:, 0][queries == 0].all()
        assert not found.all(dim=-1).any()
    assert not torch.equal(pair_masks(source >= 0, 3)[0], ours[0])


def test_an_epoch_has_every_pair_once_in_an_order_of_its_own(tmp_path: Path, numbered: dict[str, str]) -> None:
    dataset = train(config(tmp_path, numbered))
    first, second = sources(dataset, range(40)), sources(dataset, range(40, 80))
    assert sorted(first) == sorted(second) == list(range(40))
    assert first != second
    assert list(range(40)) not in (first, second)
    pair = dataset[7]
    assert int(pair["labels"][0]) == int(pair["text_enc"][0]) + 100


def test_the_order_is_of_seed_and_step_alone(tmp_path: Path, numbered: dict[str, str]) -> None:
    expected = sources(train(config(tmp_path, numbered)), range(100))
    longer = train(config(tmp_path, numbered, training__train_steps=500))
    assert [sources(longer, range(i, i + 1))[0] for i in reversed(range(100))] == expected[::-1]
    assert len(longer) == 500 * 8
    assert sources(train(config(tmp_path, numbered, run__seed=8)), range(100)) != expected


def test_validation_pairs_are_no_training_pairs(tmp_path: Path, numbered: dict[str, str]) -> None:
    settings = config(tmp_path, numbered, data__split="75,25,0", training__eval_interval=5, training__eval_steps=2)
    learned, valid = datasets(settings)
    assert valid is not None
    assert len(valid) == 2 * 8
    assert sorted(set(sources(learned, range(60)))) == list(range(30))
    assert sorted(set(sources(valid, range(20)))) == list(range(30, 40))
    without = config(tmp_path, numbered, data__split="75,25,0")
    assert datasets(without)[1] is None


def test_long_pairs_are_left_out_and_counted(tmp_path: Path) -> None:
    """6 and 4 tokens with the end: five and three words fit, one more does not."""
    pairs = write(tmp_path, ["1 1 1 1 1", "2 2 2 2 2 2", "3", "4"], ["1 1 1", "2", "3 3 3 3", "4"])
    said: list[str] = []
    dataset = train(config(tmp_path, pairs), said.append)
    assert sorted(sources(dataset, range(2))) == [1, 4]
    assert said[-1].startswith("2 of 4 training pairs are longer than training.seq_length 6 or training.decoder_seq")
    none = config(tmp_path, pairs, training__seq_length=1)
    with pytest.raises(
        UserError,
        match=r"training\.seq_length: every one of the 4 training pairs is longer .*shortest source has 2",
    ):
        train(none)


def test_a_part_without_pairs(tmp_path: Path, numbered: dict[str, str]) -> None:
    settings = config(tmp_path, numbered, data__split="99,1,0", training__eval_interval=5)
    assert "leaves no validation text of the 40 documents" in str(problem_ahead(settings))  # pairs, not sides
    with pytest.raises(UserError, match="99,1,0 leaves no validation text of the 40 documents"):
        datasets(settings)


def test_json_lines_are_the_same_pairs(tmp_path: Path, numbered: dict[str, str]) -> None:
    lines = [json.dumps({"de": str(i), "en": str(i + 100), "more": 1}) for i in range(40)]
    (tmp_path / "a.jsonl").write_text("\n\n".join(lines) + "\n")
    keys = {"jsonl": str(tmp_path / "a.jsonl"), "source_key": "de", "target_key": "en"}
    first, second = prepare(config(tmp_path, numbered)), prepare(config(tmp_path, keys, data__dir=str(tmp_path / "b")))
    assert first.digest != second.digest
    assert [file.sha256 for file in first.files.values()] == [file.sha256 for file in second.files.values()]


def test_lines_end_at_line_ends_alone(tmp_path: Path) -> None:
    """Not at what Python's splitlines takes for one; a byte-order mark and DOS line ends are no text."""
    (tmp_path / "a").write_bytes("\ufeffone\u2028two\r\n\r\nthree".encode())
    (tmp_path / "b").write_bytes(b"1\n2\n3\n")
    found = read_pairs(Pairs(source=str(tmp_path / "a"), target=str(tmp_path / "b")))
    assert [tuple(pair) for pair in found] == [(1, "one\u2028two", "1"), (2, "", "2"), (3, "three", "3")]


def test_a_pair_with_an_empty_side_is_none(tmp_path: Path) -> None:
    prepared = prepare(config(tmp_path, write(tmp_path, ["1", " ", "3"], ["4", "5", ""])))
    assert (prepared.documents, prepared.tokens) == (1, 4)


def test_one_tokenizer_is_trained_on_both_sides(tmp_path: Path) -> None:
    pairs = write(tmp_path, ["доброе утро всем"] * 50, ["good morning to all"] * 50)
    tokenizer = {"library": "sentencepiece", "vocab_size": 320}
    settings = config(tmp_path, pairs, data__tokenizer=tokenizer)
    trained = load_tokenizer(settings, Path(str(prepare(settings).tokenizer)))
    # Of 320 pieces 256 are bytes and four special; a language that was not read would be nothing but bytes.
    for text in ("доброе утро", "good morning"):
        assert len(trained.tokenize(text)) <= 6
        assert trained.detokenize(trained.tokenize(text)) == text


def test_prepared_once_and_made_again_where_damaged(tmp_path: Path, numbered: dict[str, str]) -> None:
    settings = config(tmp_path, numbered)
    said: list[str] = []
    first = prepare(settings)
    assert prepare(settings, said.append) == first
    assert not said
    (tmp_path / "data" / "corpus.bin").write_bytes(b"")
    assert prepare(settings, said.append) == first
    assert "corpus.bin has 0 bytes instead of" in said[0]
    other = write(tmp_path, ["1"] * 40, ["2"] * 40)
    with pytest.raises(UserError, match="holds data that were prepared with other settings of data"):
        prepare(config(tmp_path, other))


BAD = {
    "a.en": ("1\n2\n", r"a\.de has 40 lines and .*a\.en has 2; expected as many in both, each line"),
    "longer": ("1\n" * 41, r"a\.de has 40 lines and .*a\.en has 41; expected as many in both"),
    "missing": (None, r"data\.pairs\.target: no such file: .*a\.en$"),
    "encoding": (
        b"1\n\xff\n",
        r"data\.pairs: .*a\.en, line 2: not UTF-8 text: byte 2 is 0xff; if this is Latin-1, convert",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_text_files_that_are_no_pairs(
    tmp_path: Path, numbered: dict[str, str], capfd: pytest.CaptureFixture[str], case: str
) -> None:
    """By the command itself: one sentence, status 2, and no data are left that could pass for prepared."""
    content, sentence = BAD[case]
    target = Path(numbered["target"])
    if content is None:
        target.unlink()
    else:
        target.write_bytes(content if isinstance(content, bytes) else content.encode())
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config(tmp_path, numbered).model_dump()))
    assert cli.run(["prepare", str(path)]) == 2
    (said,) = capfd.readouterr().err.splitlines()[-1:]
    with pytest.raises(UserError, match=sentence):
        raise UserError(said)
    assert not (tmp_path / "data" / "prepared.json").exists()
    assert not list(tmp_path.glob("data/*.partial"))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "expected a JSON object"),
        ('["a", "b"]', "expected a JSON object"),
        ('{"source": "a"}', r"expected text under 'target' \(data\.pairs\.target_key\), found null"),
        ('{"source": 1, "target": "b"}', r"expected text under 'source' \(data\.pairs\.source_key\), found 1"),
        ('{"source": "a", "target": "\\ud800"}', "holds half a character"),
    ],
)
def test_json_lines_that_are_no_pairs(tmp_path: Path, line: str, problem: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"source": "a", "target": "b"}\n' + line + "\n")
    with pytest.raises(UserError, match=rf"a\.jsonl, line 2: .*{problem}"):
        list(read_pairs(Pairs(jsonl=str(tmp_path / "a.jsonl"))))


@pytest.fixture
def uneven(tmp_path: Path) -> dict[str, str]:
    """30 pairs whose targets have one to three tokens."""
    generator = np.random.RandomState(0)
    return write(tmp_path, [str(i) for i in range(30)], [" ".join("1" * generator.randint(1, 4)) for _ in range(30)])


def test_a_batch(tmp_path: Path, uneven: dict[str, str]) -> None:
    settings = config(tmp_path, uneven)
    dataset = train(settings)
    batch = Batches(dataset, settings, resolve_layout(settings, 1), 0, torch.device("cpu"))[2][1]
    assert isinstance(batch, T5Batch)
    assert batch.encoder_tokens.tolist() == [dataset[index]["text_enc"].tolist() for index in range(20, 24)]
    assert batch.decoder_tokens.shape == batch.labels.shape == batch.loss_mask.shape == (4, 4)
    assert torch.equal(
        batch.labels[:, :-1][batch.loss_mask[:, 1:] > 0], batch.decoder_tokens[:, 1:][batch.loss_mask[:, 1:] > 0]
    )
    masks = (batch.encoder_mask, batch.decoder_mask, batch.cross_mask)
    assert [tuple(mask.shape) for mask in masks] == [(4, 1, 6, 6), (1, 1, 4, 4), (4, 1, 4, 6)]
    assert batch.cross_mask[0, 0, 0].tolist() == [False, False, True, True, True, True]  # one token and its end


@pytest.mark.parametrize(("processes", "micro"), [(1, 8), (2, 2), (4, 1)])
def test_the_loss_is_a_mean_over_the_global_batch(
    tmp_path: Path, uneven: dict[str, str], processes: int, micro: int
) -> None:
    """Whatever the layout, as engines average: over micro-batches and replicas. A mean of means is another number."""
    keys = {"training__micro_batch_size": micro, "parallel__tensor_model_parallel_size": 1}
    settings = config(tmp_path, uneven, **keys)
    dataset, layout = train(settings), resolve_layout(settings, processes)
    values = torch.rand(400, generator=torch.Generator().manual_seed(0))
    for step in (0, 3, 4):  # an epoch ends in the fourth batch
        samples = [dataset[index] for index in range(8 * step, 8 * step + 8)]
        losses = [values[sample["text_enc"][0] + sample["labels"]][sample["loss_mask"] > 0] for sample in samples]
        parts, means = [], []
        for rank in range(processes):
            for batch in Batches(dataset, settings, layout, rank, torch.device("cpu"))[step]:
                output = values[batch.encoder_tokens[:, :1] + batch.labels]
                parts.append(float(batch.loss(output)))
                means.append(float((output * batch.loss_mask).sum() / batch.loss_mask.sum()))
        assert np.mean(parts) == pytest.approx(float(torch.cat(losses).mean()), rel=1e-6)
        assert processes == 1 or np.mean(means) != pytest.approx(np.mean(parts), rel=1e-3)


def test_tokens_that_the_vocabulary_lacks_are_found_on_both_sides(tmp_path: Path, uneven: dict[str, str]) -> None:
    settings = config(tmp_path, uneven)
    dataset = train(settings)
    batches = Batches(dataset, settings, resolve_layout(settings, 1), 0, torch.device("cpu"))
    for name in ("text_enc", "text_dec", "labels"):
        sample = {**dataset[0], name: torch.full_like(dataset[0][name], END + 1)}
        assert int(batches.maker.tokens(sample).max()) == END + 1


def test_a_run_goes_on_with_whole_batches(tmp_path: Path, numbered: dict[str, str]) -> None:
    """The loss is a mean over the global batch, and that of a sample knows its batch by its number."""
    settings = config(tmp_path, numbered, training__global_batch_size=8)
    assert Order.of_resumed(settings, 6, 24, 100) == Order(batch=8, drawn=100, shift=-24)
    with pytest.raises(UserError, match="8 does not divide the 28 pairs that 7 steps read"):
        Order.of_resumed(settings, 7, 28, 100)
