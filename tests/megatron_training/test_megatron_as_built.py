"""`mup-megatron run` with the script's own layer spec: --spec, --mup-tensors."""

from __future__ import annotations

import dataclasses
import json
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from mup_megatron.checkpoints.manifest import CheckpointManifest
from mup_megatron.config import derive, parse_config
from mup_megatron.megatron_training.megatron_run import MegatronRun
from mup_megatron.megatron_training.options import Settings
from mup_megatron.model.build import parametrize
from mup_megatron.parallel.layout import resolve_layout
from mup_megatron.tuning.record import write_record
from mup_megatron.tuning.recording import make_record
from mup_megatron.tuning.space import values_of
from mup_megatron.util.errors import UserError
from tests.helpers import megatron_runs
from tests.helpers.distributed import Ranks
from tests.helpers.installed import needs_training
from tests.helpers.records import BUDGET, study_of
from tests.model.as_built.own_layers import LOOPED

pytestmark = needs_training
# Every size of the model; ratios 1.
BASE = "hidden_size: 64\nnum_attention_heads: 4\nffn_hidden_size: 128\n"
EXTRA = ("--spec", "tests.model.as_built.own_layers", "extra_mlp")
TENSORS = """
- {module: ExtraMLP, parameter: beside.weight, kind: matrix}
- {module: ExtraMLP, parameter: beside_gain, kind: gain}
"""
ARCHITECTURES = {
    "gpt3": "",
    "llama": "--swiglu --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights "
    "--disable-bias-linear --group-query-attention --num-query-groups 2",
    "experts": "--num-experts 4 --disable-bias-linear --moe-shared-expert-intermediate-size 64",
    "qk-norm-mtp": "--qk-layernorm --mtp-num-layers 1 --position-embedding-type rope",
    "sinks": "--softmax-type learnable",
    "latent": "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 8 "
    "--v-head-dim 12 --position-embedding-type rope",
}


def run(ranks: Ranks, folder: Path, *extra: str, **changed: Any) -> list[dict[str, Any]]:
    return megatron_runs.run(ranks, folder, *extra, **{"train_iters": 3, "clip_grad": 0, **changed})


def tensors(folder: Path, text: str = TENSORS) -> tuple[str, str]:
    (folder / "tensors.yaml").write_text(text)
    return "--mup-tensors", str(folder / "tensors.yaml")


@pytest.mark.parametrize(
    "name", [name if name == "llama" else pytest.param(name, marks=pytest.mark.slow) for name in ARCHITECTURES]
)
def test_at_the_base_it_is_the_plain_run(name: str, ranks: Ranks, tmp_path: Path) -> None:
    words = ARCHITECTURES[name].split()
    (ours,) = run(ranks, tmp_path, *words, base=BASE)
    (plain,) = run(ranks, tmp_path, *words, base=BASE, plainly=True, initial=ours["initial"])
    megatron_runs.assert_same(ours, plain, steps=3)


# By option: how it is typed, a run without it, and what is named where that run loads a checkpoint of the first.
BEYOND = {
    "--mtp-use-repeated-layer": (
        "--mtp-num-layers 2 --position-embedding-type rope --mtp-use-repeated-layer",
        "--mtp-num-layers 2 --position-embedding-type rope",
        "base_shapes.mtp.layers.1.",
    ),
    "--moe-router-load-balancing-type quantile_balancing": (
        f"{ARCHITECTURES['experts']} --moe-router-load-balancing-type quantile_balancing "
        "--moe-router-quantile-balancing-ema 0.5",
        ARCHITECTURES["experts"],
        "model.as_built",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("option", BEYOND)
def test_what_no_shim_has(option: str, ranks: Ranks, tmp_path: Path) -> None:
    """At the base the plain run to the last bit; at twice its width the rates of what reads hidden vectors are halved.

    A checkpoint of a run without the option is refused.
    """
    words, without, named = BEYOND[option][0].split(), BEYOND[option][1].split(), BEYOND[option][2]
    (ours,) = run(ranks, tmp_path, *words, base=BASE)
    assert ours["status"] == 0, ours["said"]
    assert f"no config says the script's layers: no key of model: says {option}" in ours["said"]
    (plain,) = run(ranks, tmp_path, *words, base=BASE, plainly=True, initial=ours["initial"])
    megatron_runs.assert_same(ours, plain, steps=3)
    (wide,) = run(ranks, tmp_path, *words, "--save", str(tmp_path / "saved"), "--save-interval", "2")
    rates = {name: group["max_lr"] for name, group in wide["groups"].items()}
    read = [name for name in rates if name.endswith(("linear_qkv.weight", "router.weight", "eh_proj.weight"))]
    assert len(read) == 4
    assert {rates[name] for name in read} == {1e-2 / 2}
    (other,) = run(ranks, tmp_path, *without, "--load", str(tmp_path / "saved"), "--ckpt-step", "2")
    assert other["status"] == 2
    assert named in other["said"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt3", "latent"])
def test_sequences_that_ranks_share(name: str, ranks: Ranks, tmp_path: Path) -> None:
    """Under context parallelism, which megatron-core's local attention refuses, one process's losses."""
    words = ARCHITECTURES[name].split()
    (one,) = run(ranks, tmp_path, *words)
    two = run(ranks, tmp_path, *words, count=2, context_parallel_size=2)
    assert [one["status"], *(rank["status"] for rank in two)] == [0, 0, 0], two[0]["said"]
    assert len(one["losses"]) == 3
    assert two[1]["losses"] == pytest.approx(one["losses"], rel=1e-5)


VIRTUAL = {"num_layers": 4, "pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1}


@pytest.mark.parametrize("spec", [pytest.param((), id="own", marks=pytest.mark.slow), pytest.param(EXTRA, id="other")])
def test_virtual_stages_are_explained(spec: tuple[str, ...], ranks: Ranks, tmp_path: Path) -> None:
    """A rank sees one chunk after the other; the table is that of one process."""
    words = (*spec, *(tensors(tmp_path) if spec else ()), "--mup-explain")
    (whole,) = run(ranks, tmp_path, *words, num_layers=4)
    first, second = run(ranks, tmp_path, *words, count=2, global_batch_size=4, **VIRTUAL)
    assert whole["status"] == first["status"] == second["status"] == 0, first["said"]
    assert "decoder.layers" not in second["printed"]
    (whole_rows, rows) = (re.findall(r"decoder\.layers\.\S+.*", found["printed"]) for found in (whole, first))
    assert len(whole_rows) > 8
    assert rows == [row.replace("(4×)", "(2×)") for row in whole_rows]  # two layers of the four are on its stage
    assert ("ExtraMLP" in first["printed"]) is bool(spec)


@pytest.mark.slow
def test_a_record_of_these_layers_under_virtual_stages(ranks: Ranks, tmp_path: Path) -> None:
    """The digest of a script's layers is that of one process, and a record of other layers is refused."""
    words = (*EXTRA, *tensors(tmp_path))
    (saved,) = run(ranks, tmp_path, *words, "--save", str(tmp_path / "saved"), "--save-interval", "3", num_layers=4)
    assert saved["status"] == 0, saved["said"]
    config = parse_config(CheckpointManifest.read(tmp_path / "saved" / "iter_0000003").config, "mup.json")
    assert config.model.as_built is not None
    for digest, status in ((config.model.as_built, 0), ("0" * 16, 2)):
        own = parametrize(derive(config, {"model.as_built": None}), 128)
        table = dataclasses.replace(own, config=derive(config, {"model.as_built": digest}))
        record = make_record(table, resolve_layout(config, 1), values_of(config), study=study_of(), budget=BUDGET)
        write_record(tmp_path / "transfer.json", record)
        taken = ("--mup-hparams", str(tmp_path / "transfer.json"), "--mup-explain")
        sizes = {**VIRTUAL, "lr": None, "init_method_std": None}
        found = run(ranks, tmp_path, *words, *taken, count=2, global_batch_size=4, **sizes)
        assert [rank["status"] for rank in found] == [status] * 2, found[0]["said"]
    assert f"model.as_built: '{'0' * 16}' in the record, '{config.model.as_built}' in the config" in found[0]["said"]


@pytest.mark.slow
def test_a_base_shape_file(ranks: Ranks, tmp_path: Path) -> None:
    """The base as shapes of the model as built gives the rates that it gives as sizes, and the same losses."""
    words = (*EXTRA, *tensors(tmp_path))
    (sizes,) = run(ranks, tmp_path, *words, "--save", str(tmp_path / "saved"), "--save-interval", "3")
    assert sizes["status"] == 0, sizes["said"]
    shapes = json.loads((tmp_path / "saved" / "iter_0000003" / "mup.json").read_text())["base_shapes"]
    (tmp_path / "base.bsh").write_text(yaml.safe_dump(shapes))
    (tmp_path / "mup.yaml").write_text("base: {kv_channels: 16}\n")
    file = ("--mup-config", str(tmp_path / "mup.yaml"))
    (found,) = run(ranks, tmp_path, *words, *file, mup_base=tmp_path / "base.bsh")
    assert found["status"] == 0, found["said"]
    assert found["steps"] == sizes["steps"]
    assert found["groups"] == sizes["groups"]

    name = "decoder.layers.1.mlp.beside.weight"  # negative control: a base of its own, as large as the tensor
    (tmp_path / "base.bsh").write_text(yaml.safe_dump({**shapes, name: [64, 64]}))
    (other,) = run(ranks, tmp_path, *words, *file, mup_base=tmp_path / "base.bsh")
    rates = {tensor: group["max_lr"] for tensor, group in other["groups"].items()}
    assert rates == {tensor: group["max_lr"] for tensor, group in sizes["groups"].items()} | {name: 1e-2}


@pytest.mark.slow
def test_grouped_experts_train_as_single_ones(ranks: Ranks, tmp_path: Path) -> None:
    """megatron-core's TEGroupedMLP over a user's layers: the values, rates and losses of experts that are layers."""
    words = ("--num-experts", "4", "--disable-bias-linear", "--swiglu")
    spec = ("--spec", "tests.model.as_built.own_layers", "looped_experts")
    (grouped,) = run(ranks, tmp_path, *words, *spec, *tensors(tmp_path, LOOPED))
    (single,) = run(ranks, tmp_path, *words)
    assert grouped["status"] == single["status"] == 0, grouped["said"]
    assert grouped["steps"] == pytest.approx(single["steps"], rel=1e-6)
    number = re.compile(r"experts\.(linear_fc[12])\.weight(\d+)")
    names = {number.sub(r"experts.local_experts.\2.\1.weight", name): name for name in grouped["initial"]}
    assert set(names) == set(single["initial"])
    assert sum(name != theirs for theirs, name in names.items()) == 2 * 2 * 4
    for theirs, name in names.items():
        assert np.array_equal(grouped["initial"][name], single["initial"][theirs]), name
        assert grouped["groups"][name]["max_lr"] == single["groups"][theirs]["max_lr"]
        assert np.allclose(grouped["final"][name], single["final"][theirs], atol=1e-5), name


def test_a_spec_of_the_users_own(ranks: Ranks, tmp_path: Path) -> None:
    """At the base the losses of plain Megatron with the same spec; at twice the base's width the rules by hand."""
    words = (*EXTRA, *tensors(tmp_path))
    (ours,) = run(ranks, tmp_path, *words, base=BASE)
    (plain,) = run(ranks, tmp_path, *EXTRA, base=BASE, plainly=True, initial=ours["initial"])
    megatron_runs.assert_same(ours, plain, steps=3)
    assert "no config says the script's layers: the script's layer spec: layer 0: mlp" in ours["said"]

    (wide,) = run(ranks, tmp_path, *words)  # from hidden 32, two heads
    rates = {name: group["max_lr"] for name, group in wide["groups"].items()}
    extra, gain = "decoder.layers.1.mlp.beside.weight", "decoder.layers.1.mlp.beside_gain"
    assert rates[extra] == pytest.approx(1e-2 / 2)
    assert rates[gain] == pytest.approx(1e-2)
    assert wide["groups"][extra]["weight_decay"] == pytest.approx(0.01 * 2)
    assert wide["groups"][gain]["weight_decay"] == 0
    assert wide["initial"][extra].std() == pytest.approx(0.05 / 2**0.5, rel=0.05)
    assert np.isfinite(wide["steps"]).all()


def test_no_config_of_ours_says_these_layers() -> None:
    """A config is written for trials that are runs of the script alone."""
    plain = Settings(base={}, parametrization={}, hparams={}, record=None, explain=False, allowed=(), sizes={})
    run_of = MegatronRun(Namespace(), dataclasses.replace(plain, written=Path("x")))
    said = r"--mup-write-config: no config says the script's layers \(layer 0: mlp is ExtraMLP"
    with pytest.raises(UserError, match=said):
        run_of._check_other_layers("layer 0: mlp is ExtraMLP")


@pytest.mark.parametrize(
    ("words", "text", "said"),
    [
        (EXTRA, "- {name: '*.beside_gain', kind: gain}", "decoder.layers.0.mlp.beside.weight: no entry says what"),
        (
            EXTRA,
            f"{TENSORS}- {{name: '*.nowhere', kind: gain}}",
            "entry 3: *.nowhere: no tensor of this model is meant",
        ),
        ((), TENSORS, "entry 1: ExtraMLP.beside.weight: no tensor of this model is meant"),
    ],
)
def test_refused(words: tuple[str, ...], text: str, said: str, ranks: Ranks, tmp_path: Path) -> None:
    own = tensors(tmp_path, text) if text else ()
    (found,) = run(ranks, tmp_path, *words, *own)
    assert found["status"] == 2
    assert said in found["said"]
    assert "Traceback" not in found["said"]
