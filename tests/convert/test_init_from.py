"""train --init-from: the source's weights to the last bit, step 0, a fresh optimizer; the source is read once."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mup_megatron import cli
from mup_megatron.checkpoints.manifest import CheckpointManifest, make_manifest
from mup_megatron.config import Config, derive
from mup_megatron.convert.export import open_source
from mup_megatron.convert.init_from import InitFrom, Start, check_start
from mup_megatron.data.batches import Batches, build_datasets
from mup_megatron.data.prepare import prepare
from mup_megatron.engines.saved_weights import SavedWeights
from mup_megatron.engines.setup import resolve_auto
from mup_megatron.model.build import parametrize
from mup_megatron.parallel import upstream
from mup_megatron.parallel.layout import resolve_layout
from mup_megatron.rules.table import Parametrization
from mup_megatron.train.run import train as train_run
from mup_megatron.util.errors import UserError
from tests.convert.sources import own_model
from tests.helpers import bodies
from tests.helpers.commands import losses
from tests.helpers.configs import MIXED, make
from tests.helpers.distributed import Ranks

pytestmark = pytest.mark.usefixtures("one_thread")
MULTIPLIERS = {
    "hparams__attention_multiplier": 2.0,
    "hparams__output_multiplier": 3.0,
    "hparams__embedding_multiplier": 2.0,
    "hparams__residual_multiplier": 0.5,
}
EMBEDDING = "embedding.word_embeddings.weight"
PARTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "TP 2": (2, {"parallel__tensor_model_parallel_size": 2}),
    "ZeRO 3": (2, {"parallel__tensor_model_parallel_size": 1, "parallel__zero_stage": 3}),
    "PP 2": (
        2,
        {
            "parallel__engine": "megatron",
            "parallel__tensor_model_parallel_size": 1,
            "parallel__pipeline_model_parallel_size": 2,
        },
    ),
}


def written(folder: Path, config: Config) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(config.model_dump()))
    return folder / "run.yaml"


def source_of(ranks: Ranks, folder: Path, parts: str = "TP 2", **overrides: Any) -> Path:
    """Three steps, so that weights are no initial values and moments are not zero."""
    count, keys = PARTS[parts]
    steps = {"training__train_steps": 3, "training__lr_warmup_steps": 1, "training__checkpoint_interval": 3}
    config = make(MIXED, "gpt3", run__dir=str(folder / "source"), **{**MULTIPLIERS, **steps, **keys, **overrides})
    ranks.run(count, bodies.train_file, path=written(folder, config))
    return folder / "source"


@pytest.fixture(scope="module")
def source(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return source_of(ranks, tmp_path_factory.mktemp("init-from"))


@pytest.fixture
def tuned(source: Path, tmp_path: Path) -> Callable[..., Config]:
    """A fine-tuning run: other text, other rate and batch; its first step has rate 0."""

    def config(**overrides: Any) -> Config:
        shared = make(MIXED).data
        keys: dict[str, Any] = {
            **MULTIPLIERS,
            "run__dir": str(tmp_path / "run"),
            "run__seed": 11,
            "hparams__lr": 2e-3,
            "training__global_batch_size": 4,
            "training__micro_batch_size": 2,
            "training__train_steps": 1,
            "training__lr_decay_steps": 9,
            "training__lr_warmup_steps": 4,
            "training__checkpoint_interval": 1,
            "data__files": shared.files[:2],
            "data__dir": str(tmp_path / "data"),
            "data__tokenizer": {"library": "sentencepiece", "path": f"{shared.dir}/tokenizer.model"},
            "parallel__tensor_model_parallel_size": 1,
        }
        return make(MIXED, "gpt3", **{**keys, **overrides})

    return config


def checkpoint(run: Path) -> Path:
    return sorted((run / "checkpoints").iterdir())[-1]


def weights(run: Path, kind: str = "weight") -> dict[str, torch.Tensor]:
    saved = SavedWeights(checkpoint(run), kinds=(kind,))
    return {name: saved.read(name) for name in saved.shapes}


def different(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> set[str]:
    assert set(one) == set(other)
    return {name for name in one if not torch.equal(one[name], other[name])}


def begin(config: Config, folder: Path, *words: str) -> int:
    return cli.run(["train", str(written(folder, config)), *words])


def first_loss(config: Config, source: Path) -> float:
    """What the source's own model computes on the first batch of the fine-tuning text, in float64."""
    upstream.prepare_process()
    config = resolve_auto(config)
    opened = open_source(source)
    with own_model(opened) as model, torch.no_grad():
        batches = Batches(
            build_datasets(config, prepare(config))[0], config, resolve_layout(config, 1), 0, torch.device("cpu")
        )
        found = []
        for batch in batches[0]:
            logits = model(batch.tokens, batch.position_ids, batch.attention_mask).double()
            found.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten()))
    return float(torch.stack(found).mean())


def test_it_begins_where_the_source_ended(tuned: Callable[..., Config], source: Path, tmp_path: Path) -> None:
    """Weights, loss, and moments that know one gradient alone: m = 0.1 g and v = 0.05 g², so v = 5 m²."""
    config = tuned()
    assert begin(config, tmp_path, "--init-from", str(source)) == 0
    (line,) = (json.loads(each) for each in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert (line["step"], line["lr"]) == (1, 0.0)
    assert line["loss"] == pytest.approx(first_loss(config, source), rel=1e-6)
    run = tmp_path / "run"
    assert different(weights(run), weights(source)) == set()
    first, second = weights(run, "exp_avg"), weights(run, "exp_avg_sq")
    for name in first:
        torch.testing.assert_close(second[name], 5 * first[name].square(), rtol=1e-5, atol=1e-20)
    # Negative controls: without the source, loss and weights are others; the source's moments know three gradients.
    assert begin(derive(config, {"run.dir": str(tmp_path / "none")}), tmp_path) == 0
    assert abs(losses(tmp_path / "none")[0] / line["loss"] - 1) > 1e-2
    assert EMBEDDING in different(weights(tmp_path / "none"), weights(source))
    old = weights(source, "exp_avg")[EMBEDDING], weights(source, "exp_avg_sq")[EMBEDDING]
    assert not torch.allclose(old[1], 5 * old[0].square(), rtol=1e-2)


def test_where_it_began_is_recorded(tuned: Callable[..., Config], source: Path, tmp_path: Path) -> None:
    assert begin(tuned(), tmp_path, "--init-from", str(source)) == 0
    expected = {
        "checkpoint": str(source / "checkpoints" / "step_00000003"),
        "asked": str(source),
        "step": 3,
        "new_embeddings": False,
    }
    manifest = json.loads((checkpoint(tmp_path / "run") / "mup.json").read_text())
    assert (manifest["step"], manifest["initialised_from"]) == (1, expected)
    assert json.loads((tmp_path / "run" / "explain.json").read_text())["initialised_from"] == expected
    source_manifest = json.loads((checkpoint(source) / "mup.json").read_text())
    assert "initialised_from" not in source_manifest
    assert source_manifest["tokenizer_sha256"] == manifest["tokenizer_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize("again", [True, False])
def test_a_run_that_goes_on_does_not_read_the_source(
    tuned: Callable[..., Config], source: Path, tmp_path: Path, again: bool
) -> None:
    """Whether the option is typed again or not; its losses are those of a run that never stopped, to the last bit."""
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    words = ("--init-from", str(copy))
    config = tuned(training__train_steps=4)
    whole = derive(config, {"run.dir": str(tmp_path / "whole")})
    assert begin(whole, tmp_path, *words) == 0
    assert begin(derive(config, {"training.train_steps": 2}), tmp_path, *words) == 0
    shutil.rmtree(copy)
    assert begin(config, tmp_path, *(words if again else ())) == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert len(losses(tmp_path / "run")) == 4
    assert json.loads((checkpoint(tmp_path / "run") / "mup.json").read_text())["initialised_from"]["asked"] == str(copy)


@pytest.mark.slow
def test_new_embeddings(tuned: Callable[..., Config], source: Path, tmp_path: Path) -> None:
    """Under another vocabulary they have the run's own initial values; everything else is the source's."""
    config = tuned(data__tokenizer={"library": "sentencepiece", "vocab_size": 350})  # 384 rows too
    assert begin(config, tmp_path, "--init-from", str(source), "--new-embeddings") == 0
    assert different(weights(tmp_path / "run"), weights(source)) == {EMBEDDING}
    fresh = derive(config, {"run.dir": str(tmp_path / "fresh")})
    assert begin(fresh, tmp_path) == 0
    assert EMBEDDING not in different(weights(tmp_path / "run"), weights(tmp_path / "fresh"))


CELLS = [("PP 2", "ZeRO 3"), ("ZeRO 3", "PP 2"), ("one process", "TP 2")]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "now"), CELLS)
def test_from_any_layout_into_any(
    ranks: Ranks, tuned: Callable[..., Config], tmp_path: Path, before: str, now: str
) -> None:
    source = source_of(ranks, tmp_path, before)
    count, keys = PARTS[now]
    path = written(tmp_path / "tuned", tuned(**keys))
    ranks.run(count, begin_file, path=path, source=source)
    assert different(weights(tmp_path / "run"), weights(source)) == set()
    one = tuned(run__dir=str(tmp_path / "one"))
    assert begin(one, tmp_path, "--init-from", str(source)) == 0
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


def begin_file(rank: Any, *, path: Path, source: Path) -> float | None:
    from mup_megatron.config import load_config
    from mup_megatron.engines.setup import resolve

    return train_run(resolve(load_config(path), rank.world_size), rank, init_from=InitFrom(source))


# --- what is refused ---

OTHERS: list[tuple[dict[str, Any], str]] = [
    (
        {"base__ffn_hidden_size": 32},
        r"decoder\.layers\.0\.mlp\.linear_fc1\.\w+ has the base \[64.*\] there, and \[32.*\] by .*run\.yaml; expected "
        r"the checkpoint's base: section, or .* mup-megatron rebase .*step_00000003 DIR --base FILE",
    ),
    (
        {"hparams__output_multiplier": 1.0},
        r"step_00000003: the checkpoint does not belong to this config; it begins a run of the same model and multip"
        r"[^\n]*\n +key +checkpoint +config\n +hparams\.output_multiplier +3\.0 +1\.0",
    ),
    ({"model__num_layers": 1}, r"model\.num_layers +2 +1"),
    ({"parametrization__name": "standard"}, r"parametrization\.name +'mup' +'standard'"),
    (
        {"training__seq_length": 48},
        r"embedding\.position_embeddings\.weight is of shape \[32, 96\]; expected \[48, 96\]",
    ),
    (
        {"data__tokenizer": {"library": "sentencepiece", "vocab_size": 375}},
        r"data\.tokenizer: another tokenizer than the one of .*step_00000003; expected data\.tokenizer\.path: "
        r".*tokenizer\.model, or --new-embeddings, which leaves",
    ),
]


_QUICK = ("base__ffn_hidden_size", "hparams__output_multiplier", "data__tokenizer")


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [one if set(one[0]) & set(_QUICK) else pytest.param(*one, marks=pytest.mark.slow) for one in OTHERS],
    ids=lambda value: str(value)[:40],
)
def test_another_model_is_refused(
    tuned: Callable[..., Config],
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    overrides: dict[str, Any],
    sentence: str,
) -> None:
    assert begin(tuned(**overrides), tmp_path, "--init-from", str(source)) == 2
    assert re.search(sentence, capsys.readouterr().err)
    assert not list((tmp_path / "run").glob("checkpoints/*"))


def test_another_base_depth_is_refused(tuned: Callable[..., Config], tmp_path: Path) -> None:
    """By hand: 8 layers from 2, CompleteP: branches take 2/8 there, and 8/8 in a run whose base has 8 layers."""

    def both(base: int | None, depth: str) -> tuple[Parametrization, CheckpointManifest]:
        config = tuned(model__num_layers=8, base__num_layers=base, parametrization__depth=depth)
        rules = parametrize(config, 320)
        return rules, make_manifest(rules, resolve_layout(resolve_auto(config), 1), "", 0)

    def start(manifest: CheckpointManifest) -> Start:
        return Start(path=tmp_path / "step_00000003", asked="source", manifest=manifest, new_embeddings=False)

    (scaled, source), (whole, other) = both(2, "completep"), both(8, "completep")
    assert (scaled.forward.residual, whole.forward.residual) == pytest.approx((0.5 * 2 / 8, 0.5))
    check_start(start(source), scaled, source)
    with pytest.raises(UserError, match="step_00000003") as refused:
        check_start(start(source), whole, other)
    assert re.search(r"^ *base\.num_layers +2 +8$", str(refused.value), re.M)
    whole, other = both(8, "none")
    check_start(start(both(None, "none")[1]), whole, other)  # the model's own, said or not


@pytest.mark.slow
def test_what_may_differ(tuned: Callable[..., Config], source: Path, tmp_path: Path) -> None:
    """Dropout, decay, optimizer, batch, schedule: none of them is part of what the weights compute."""
    config = tuned(
        model__hidden_dropout=0.1,
        hparams__weight_decay=0.3,
        hparams__init_method_std=0.5,
        optimizer__eps=1e-6,
        training__lr_schedule="linear",
        training__clip_grad=0.5,
        parametrization__weight_decay="coupled",
    )
    assert begin(config, tmp_path, "--init-from", str(source)) == 0
    assert different(weights(tmp_path / "run"), weights(source)) == set()


@pytest.mark.slow
def test_a_run_that_began_otherwise(
    tuned: Callable[..., Config], source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    shutil.copytree(source, other)
    assert begin(tuned(), tmp_path) == 0
    assert begin(tuned(), tmp_path, "--init-from", str(source)) == 2
    assert "began with initial values; expected a run.dir without checkpoints" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "run")
    assert begin(tuned(), tmp_path, "--init-from", str(source)) == 0
    for words in (("--init-from", str(other)), ("--init-from", str(source), "--new-embeddings")):
        assert begin(tuned(), tmp_path, *words) == 2
        assert f"began from {source}; expected the same, or a run.dir" in capsys.readouterr().err


def test_no_checkpoint_and_a_damaged_one(
    tuned: Callable[..., Config], source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    (checkpoint(copy) / "mup.json").write_text("{}")
    for words, sentence in (
        (("--init-from", str(tmp_path / "gone")), "gone: no such folder; expected a checkpoint"),
        (("--init-from", str(copy)), "mup.json does not match its checksum"),
        (("--new-embeddings",), "--new-embeddings: leaves out weights of a checkpoint; expected --init-from"),
    ):
        assert begin(tuned(), tmp_path, *words) == 2
        said = capsys.readouterr().err
        assert sentence in said
        assert said.splitlines()[-1].startswith("mup-megatron: error")
