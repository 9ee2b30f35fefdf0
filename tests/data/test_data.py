"""Corpus to tokens to batches: real text, every tokenizer library, damaged files, an order that depends on the step."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mup_megatron.config import Config, derive
from mup_megatron.data.batches import Batches, build_datasets
from mup_megatron.data.corpus import Corpus
from mup_megatron.data.index import check_indexed_dataset
from mup_megatron.data.order import Order, ordered_datasets
from mup_megatron.data.prepare import known_vocab_size, prepare
from mup_megatron.data.tokenizer import load_tokenizer
from mup_megatron.parallel import runtime
from mup_megatron.parallel.layout import Layout, resolve_layout
from mup_megatron.parallel.ranks import Rank
from mup_megatron.util.errors import UserError
from tests.helpers import bodies
from tests.helpers.configs import MIXED, make
from tests.helpers.distributed import Ranks


def config(tmp_path: Path, **overrides: Any) -> Config:
    return make(MIXED, "gpt3", data__dir=str(tmp_path / "data"), **overrides)


def ids(text: str) -> list[int]:
    return [int(word) for word in text.split()]


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    """Text of the null tokenizer: numbers below 200, 40 documents of 50."""
    generator = np.random.default_rng(0)
    path = tmp_path / "numbers.jsonl"
    lines = (json.dumps({"text": " ".join(map(str, generator.integers(0, 199, 50)))}) for _ in range(40))
    path.write_text("\n".join(lines) + "\n")
    return path


def null(tmp_path: Path, numbers: Path, **overrides: Any) -> Config:
    return config(
        tmp_path, data__files=[str(numbers)], data__tokenizer={"library": "null", "vocab_size": 200}, **overrides
    )


def test_the_default_corpus_is_on_every_machine(tmp_path: Path) -> None:
    files = Corpus(config(tmp_path, data__files=[], data__corpus="stdlib")).files
    assert len(files) > 300
    assert sum(path.stat().st_size for path in files) > 5_000_000
    assert files == sorted(files)
    for path in files:
        assert not {"site-packages", "dist-packages", "test", "tests"} & set(path.parts[-4:])


def test_sentencepiece_is_trained_and_loses_nothing(tmp_path: Path) -> None:
    settings = config(tmp_path)
    prepared = prepare(settings)
    assert prepared.vocab_size == 375
    tokenizer = load_tokenizer(settings, Path(str(prepared.tokenizer)))
    text = "def f(x):\n    return  x + 1\n\n\tpass  # é ☃ \n"
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
    assert prepared.documents == 5
    written = sum(len(tokenizer.tokenize(text)) + 1 for text in Corpus(settings).documents())
    assert prepared.tokens == written


def test_prepared_once(tmp_path: Path, numbers: Path) -> None:
    said: list[str] = []
    first = prepare(null(tmp_path, numbers), said.append)
    assert said
    stamp = (tmp_path / "data" / "corpus.bin").stat().st_mtime_ns
    said.clear()
    assert prepare(null(tmp_path, numbers), said.append) == first
    assert not said
    assert (tmp_path / "data" / "corpus.bin").stat().st_mtime_ns == stamp


def test_data_of_another_run_are_not_replaced(tmp_path: Path, numbers: Path) -> None:
    """Other settings, or a source file that has changed: one sentence, and the data stay."""
    first = prepare(null(tmp_path, numbers))
    written = {path.name: path.read_bytes() for path in (tmp_path / "data").iterdir()}
    other = null(tmp_path, numbers, data__json_key="other")
    numbers.write_text(numbers.read_text() + '{"text": "1 2 3", "other": "4"}\n')
    for changed in (null(tmp_path, numbers), other):
        with pytest.raises(UserError, match=r"data\.dir: .*data holds data that were prepared with other settings"):
            prepare(changed)
    assert {path.name: path.read_bytes() for path in (tmp_path / "data").iterdir()} == written
    shutil.rmtree(tmp_path / "data")
    assert prepare(null(tmp_path, numbers)).documents == first.documents + 1


def test_a_damaged_record_may_be_another_runs(tmp_path: Path, numbers: Path) -> None:
    """Whose the data are, nobody can tell: they stay. Without the folder they are made again."""
    first = prepare(null(tmp_path, numbers))
    written = {path.name: path.read_bytes() for path in (tmp_path / "data").iterdir()}
    for damage in ("", "{", "[]", '{"format": 99}'):
        (tmp_path / "data" / "prepared.json").write_text(damage)
        with pytest.raises(
            UserError, match=r"data\.dir: .*data holds a prepared\.json that is damaged; expected another"
        ):
            prepare(null(tmp_path, numbers))
        there = {path.name: path.read_bytes() for path in (tmp_path / "data").iterdir()}
        assert there == {**written, "prepared.json": damage.encode()}
    shutil.rmtree(tmp_path / "data")
    assert prepare(null(tmp_path, numbers)) == first


def test_text_files_and_json_lines(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1 2 3\n4")
    (tmp_path / "b.jsonl").write_text('{"body": "5 6"}\n\n{"body": "  "}\n{"body": "7"}\n')
    files = [str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")]
    assert list(Corpus(config(tmp_path, data__files=files, data__json_key="body")).documents()) == [
        "1 2 3\n4",
        "5 6",
        "7",
    ]


@pytest.mark.parametrize("line", ["{", '{"body": 1}', '{"other": "x"}', "3", '["text"]'])
def test_bad_json_lines(tmp_path: Path, line: str) -> None:
    (tmp_path / "b.jsonl").write_text(f'{{"text": "1"}}\n{line}\n')
    with pytest.raises(UserError, match=r"b\.jsonl, line 2: "):
        list(Corpus(config(tmp_path, data__files=[str(tmp_path / "b.jsonl")])).documents())


def test_files_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(UserError, match=r"a\.txt, line 1: not UTF-8 text: byte 0 is the mark of UTF-16, convert it"):
        list(Corpus(config(tmp_path, data__files=[str(tmp_path / "a.txt")])).documents())


def test_empty_corpus(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("  \n")
    with pytest.raises(UserError, match="the corpus is empty"):
        prepare(config(tmp_path, data__files=[str(tmp_path / "a.txt")]))
    assert not (tmp_path / "data" / "prepared.json").exists()


def test_vocabulary_that_is_not_the_tokenizers(tmp_path: Path, numbers: Path) -> None:
    with pytest.raises(UserError, match=r"model\.vocab_size: 100 is not the tokenizer's 200"):
        prepare(null(tmp_path, numbers, model__vocab_size=100))


def test_existing_datasets_and_blends(ranks: Ranks, tmp_path: Path, numbers: Path) -> None:
    prepare(null(tmp_path, numbers))
    prefix = str(tmp_path / "data" / "corpus")
    tokenizer = {"library": "null", "vocab_size": 200}
    plain = config(tmp_path / "x", data__files=[], data__data_path=[prefix], data__tokenizer=tokenizer)
    assert prepare(plain).blend == ([prefix], None)
    assert prepare(plain).tokens == 40 * 51
    blend = config(
        tmp_path / "y", data__files=[], data__data_path=[0.7, prefix, 0.3, prefix], data__tokenizer=tokenizer
    )
    prepared = prepare(blend)
    assert prepared.blend == ([prefix, prefix], [0.7, 0.3])
    first, second = ranks.run(2, bodies.batch_sums, config=blend, steps=20)
    assert first == second


@pytest.mark.parametrize("path", [[0.5, "a", "b"], ["a", 0.5], [-1.0, "a"], [0.5]])
def test_blends_that_are_none(tmp_path: Path, path: list[Any]) -> None:
    with pytest.raises(UserError, match="expected prefixes, or alternating positive weights and prefixes"):
        prepare(config(tmp_path, data__files=[], data__data_path=path))


@pytest.fixture
def dataset(tmp_path: Path, numbers: Path) -> str:
    prepare(null(tmp_path, numbers))
    return str(tmp_path / "data" / "corpus")


def damage(prefix: str, suffix: str, content: bytes) -> str:
    Path(prefix + suffix).write_bytes(content)
    return prefix


def test_damaged_datasets(dataset: str) -> None:
    assert check_indexed_dataset(dataset, 200) == (40, 40 * 51)
    with pytest.raises(UserError, match="holds token 199, but the tokenizer has 150 entries"):
        check_indexed_dataset(dataset, 150)
    index, data = Path(dataset + ".idx").read_bytes(), Path(dataset + ".bin").read_bytes()
    for suffix, content, sentence in (
        (".idx", index[:20], "truncated"),
        (".idx", index[:-1], "truncated"),
        (".idx", b"", "foreign header"),
        (".idx", b"PK\x03\x04" + index[4:], "foreign header"),
        (".idx", index[:9] + struct.pack("<Q", 7) + index[17:], "version 7"),
        (".idx", index[:17] + b"\xff" + index[18:], "dtype code 255"),
        (".bin", data[:-2], "truncated"),
        (".bin", b"", "truncated"),
    ):
        damage(dataset, suffix, content)
        with pytest.raises(UserError, match=sentence):
            check_indexed_dataset(dataset, 200)
        Path(dataset + ".idx").write_bytes(index)
        Path(dataset + ".bin").write_bytes(data)
    Path(dataset + ".idx").unlink()
    with pytest.raises(UserError, match="no such file"):
        check_indexed_dataset(dataset, 200)


def test_a_split_without_text_is_refused(tmp_path: Path, numbers: Path) -> None:
    """megatron-core would loop for ever over it."""
    settings = null(tmp_path, numbers, data__split="99,1,0", training__eval_interval=5)
    with pytest.raises(UserError, match="99,1,0 leaves no validation text of the 40 documents"):
        build_datasets(settings, prepare(settings))
    unused = null(tmp_path, numbers, data__split="99,1,0")
    assert build_datasets(unused, prepare(unused))[1] is None


def batches(settings: Config, layout: Layout, rank: int) -> Batches:
    train, _ = build_datasets(settings, prepare(settings))
    return Batches(train, settings, layout, rank, torch.device("cpu"))


def test_global_batches_do_not_depend_on_the_layout(tmp_path: Path, numbers: Path) -> None:
    def samples(processes: int, micro: int, step: int) -> list[list[int]]:
        settings = null(
            tmp_path,
            numbers,
            training__micro_batch_size=micro,
            parallel__tensor_model_parallel_size=1,
        )
        layout = resolve_layout(settings, processes)
        rows = [
            row.tolist()
            for rank in range(processes)
            for batch in batches(settings, layout, rank)[step]
            for row in batch.tokens
        ]
        return sorted(rows)

    for step in (0, 3):
        whole = samples(1, 8, step)
        assert len(whole) == 8
        assert samples(2, 2, step) == whole
        assert samples(4, 1, step) == whole
    assert samples(1, 8, 0) != samples(1, 8, 1)


def test_a_batch(tmp_path: Path, numbers: Path) -> None:
    settings = null(tmp_path, numbers)
    batch = batches(settings, resolve_layout(settings, 1), 0)[0][0]
    assert batch.tokens.shape == batch.labels.shape == batch.loss_mask.shape == (4, 32)
    assert torch.equal(batch.tokens[:, 1:], batch.labels[:, :-1])
    assert batch.loss_mask.min() == 1.0
    assert batch.position_ids[0].tolist() == list(range(32))
    assert batch.attention_mask is not None
    assert batch.attention_mask[0, 0, 0].tolist() == [False] + [True] * 31
    assert batch.attention_mask[0, 0, 31].sum() == 0


def test_context_parallel_ranks_share_a_batch(tmp_path: Path, numbers: Path) -> None:
    """Two ranks of TP 1, CP 2: each has one part of every sequence from either end; together they have all of it."""
    settings = null(tmp_path, numbers, parallel={"engine": "megatron", "context_parallel_size": 2})
    layout = resolve_layout(settings, 2)
    whole = batches(null(tmp_path, numbers), resolve_layout(null(tmp_path, numbers), 1), 0)[0][0]
    parts = [batches(settings, layout, rank)[0][0] for rank in range(2)]
    assert [part.position_ids[0].tolist() for part in parts] == [[*range(8), *range(24, 32)], [*range(8, 24)]]
    for name in ("tokens", "labels"):
        ours = torch.cat([getattr(part, name) for part in parts], dim=1)
        assert torch.equal(ours[:, [*range(8), *range(16, 32), *range(8, 16)]], getattr(whole, name))


def test_tensor_parallel_ranks_see_the_same_data(tmp_path: Path, numbers: Path) -> None:
    settings = null(tmp_path, numbers, parallel__tensor_model_parallel_size=2, training__micro_batch_size=2)
    layout = resolve_layout(settings, 4)
    first = [batches(settings, layout, rank)[0][0].tokens.tolist() for rank in range(4)]
    assert first[0] == first[1]
    assert first[2] == first[3]
    assert first[0] != first[2]


def test_byte_level(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("héllo " * 100)
    settings = config(tmp_path, data__files=[str(tmp_path / "a.txt")], data__tokenizer={"library": "byte-level"})
    prepared = prepare(settings)
    assert prepared.vocab_size > 256
    assert known_vocab_size(settings) == prepared.vocab_size
    tokenizer = load_tokenizer(settings)
    assert tokenizer.detokenize(tokenizer.tokenize("héllo")) == "héllo"
    # An entry that is no byte, which a model may give, is no text.
    assert tokenizer.detokenize([104, 300, 105, 511]) == "hi"


def test_huggingface(tmp_path: Path) -> None:
    """A tokenizer made here; megatron-core loads it through transformers."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    raw = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    raw.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<eos>"])
    raw.train_from_iterator(["some text to learn from, and some more"] * 50, trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", eos_token="<eos>")
    fast.save_pretrained(str(tmp_path / "hf"))
    (tmp_path / "a.txt").write_text("some text to learn from " * 50)
    settings = config(
        tmp_path,
        data__files=[str(tmp_path / "a.txt")],
        data__tokenizer={"library": "huggingface", "path": str(tmp_path / "hf")},
    )
    prepared = prepare(settings)
    assert prepared.vocab_size == len(fast)
    assert known_vocab_size(settings) == len(fast)


def test_tiktoken(tmp_path: Path) -> None:
    """Its file in megatron-core's format: a JSON list of rank and base64 bytes."""
    import base64

    pytest.importorskip("tiktoken")
    pieces = [bytes([byte]) for byte in range(256)] + [b"so", b"me", b"some", b" text"]
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": ""}
        for rank, piece in enumerate(pieces)
    ]
    (tmp_path / "tik.json").write_text(json.dumps(entries))
    (tmp_path / "a.txt").write_text("some text " * 50)
    settings = config(
        tmp_path,
        data__files=[str(tmp_path / "a.txt")],
        data__tokenizer={"library": "tiktoken", "path": str(tmp_path / "tik.json"), "vocab_size": 1260},
    )
    prepared = prepare(settings)
    assert prepared.vocab_size == 1260
    assert prepared.documents == 1


@pytest.mark.parametrize("library", ["sentencepiece", "huggingface", "tiktoken"])
def test_tokenizer_files_that_are_missing_or_damaged(tmp_path: Path, library: str) -> None:
    missing = config(tmp_path, data__tokenizer={"library": library, "path": "none.model"})
    with pytest.raises(UserError, match=r"no such file: none\.model"):
        prepare(missing)
    (tmp_path / "bad.model").write_text("no tokenizer")
    bad = config(tmp_path, data__tokenizer={"library": library, "path": str(tmp_path / "bad.model")})
    with pytest.raises(UserError, match=rf"{library} cannot read .*bad\.model"):
        prepare(bad)


# 40 documents of 51 tokens, 38 of them for training: 121 samples of 16 tokens and one more.
SHORT: dict[str, Any] = {"training__seq_length": 16, "training__global_batch_size": 4, "training__train_steps": 25}


def rows(dataset: Any, indices: range) -> list[list[int]]:
    return [dataset[index % len(dataset)]["tokens"].tolist() for index in indices]


def silent(line: str) -> None:
    raise AssertionError(line)


def test_a_longer_run_keeps_the_order_that_it_has_begun_with(tmp_path: Path, numbers: Path) -> None:
    """100 samples, then 200: what is left of the first pass, and the same pass again. Drawn anew it is another."""
    short = null(tmp_path, numbers, **SHORT)
    prepared, order = prepare(short), Order.of_run(short)
    (begun, _), same = ordered_datasets(short, prepared, order, 0, silent)
    assert same == order == Order(batch=4, drawn=100)
    longer = derive(short, {"training.train_steps": 50})
    (again, _), same = ordered_datasets(longer, prepared, Order.of_resumed(longer, 25, 100, 100), 25, silent)
    assert same == order
    whole = len(begun)
    assert 100 < whole < 200
    assert rows(again, range(whole)) == rows(begun, range(whole))
    assert rows(again, range(whole, 200)) == rows(begun, range(200 - whole))
    anew, _ = build_datasets(longer, prepared)
    assert rows(anew, range(100)) != rows(begun, range(100))


def lengthened(rank: Rank, *, config: Config, steps: int) -> tuple[Order, list[str]]:
    """The order of a run of 25 steps that goes on to others, and what is said of it."""
    runtime.start_distributed(resolve_layout(config, rank.world_size), rank, config.run.seed)
    said: list[str] = []
    longer = derive(config, {"training.train_steps": steps})
    _, order = ordered_datasets(longer, prepare(config), Order.of_resumed(longer, 25, 100, 100), 25, said.append)
    return order, said


def test_a_blend_that_is_drawn_anew_says_so(ranks: Ranks, tmp_path: Path, numbers: Path) -> None:
    """Where a part is read once more, and not before."""
    written = prepare(null(tmp_path / "part", numbers, **SHORT)).blend[0][0]
    datasets = {"data__files": [], "data__data_path": [0.5, written, 0.5, written]}
    blend = config(tmp_path, data__tokenizer={"library": "null", "vocab_size": 200}, **datasets, **SHORT)
    assert ranks.run(1, lengthened, config=blend, steps=40) == [(Order(batch=4, drawn=160), [])]
    ((order, (line,)),) = ranks.run(1, lengthened, config=blend, steps=150)
    assert order == Order(batch=4, drawn=600)
    assert line.startswith("warning: a run of 600 samples has another order than one of 100: from step 26 on")
