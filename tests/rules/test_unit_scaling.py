"""Weights stored at unit scale (docs/parametrization.md, section 11): the same training to the last bit."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mup_megatron import cli
from mup_megatron.checkpoints.manifest import check_resume
from mup_megatron.config import Config
from mup_megatron.convert.init_from import InitFrom, check_start
from mup_megatron.data.prepare import prepare
from mup_megatron.model.build import parametrize
from mup_megatron.parallel import upstream
from mup_megatron.tuning.family import digested
from mup_megatron.util.errors import ConfigError, UserError
from tests.convert import sources
from tests.helpers import bodies, proof_bodies
from tests.helpers.comparison import Difference, compare_curves
from tests.helpers.configs import MIXED, MLA, MOE, VOCABULARY, make
from tests.helpers.distributed import RankError, Ranks
from tests.helpers.layouts import Split

UNIT: dict[str, Any] = {"parametrization__scaling": "unit"}
# Every norm is clipped, epsilon is near the size of the gradients, and decay is felt.
FELT: dict[str, Any] = {"training__clip_grad": 0.3, "optimizer__eps": 1e-3, "hparams__weight_decay": 1.0}
# This project's own in both runs; the plain norm is summed in float32 by engines where nothing is scaled.
INVARIANT: dict[str, Any] = {"training__clip_norm": "invariant"}
SGD: dict[str, Any] = {
    "optimizer__name": "sgd",
    "hparams__lr": 0.3,
    "hparams__weight_decay": 0.01,
    "base__num_query_groups": 2,  # blocks that grow together
}
LION: dict[str, Any] = {"optimizer__name": "lion", "hparams__lr": 1e-3}
GROWTH: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt3": ("gpt3", MIXED),
    "llama": ("llama", MIXED),
    "moe": ("llama", MOE),
    "mla": ("llama", MLA),
}
ALONE = Split(0)
CELLS: list[tuple[str, dict[str, Any], Split]] = [
    ("gpt3", {}, ALONE),  # a tied head, biases, learned positions; the plain norm
    ("gpt3", INVARIANT, Split(1, tensor=2)),
    ("gpt3", INVARIANT, Split(3, data=2)),
    ("gpt3", INVARIANT, Split("plain", tensor=2, sequence=True)),
    ("gpt3", INVARIANT, Split("distributed", pipeline=2)),
    ("gpt3", {**INVARIANT, "training__precision": "bf16"}, Split("plain", tensor=2)),
    ("gpt3", {"training__recompute_granularity": "full", "training__recompute_method": "uniform",
              "training__recompute_num_layers": 1}, ALONE),
    ("llama", INVARIANT, Split(2, tensor=2, sequence=True)),
    ("llama", INVARIANT, Split("fsdp2", data=2)),
    ("llama", SGD, ALONE),
    ("llama", {"model__mtp_num_layers": 1}, ALONE),
    ("moe", INVARIANT, Split(0, expert=2, data=2)),
    ("mla", INVARIANT, Split("plain", tensor=2, sequence=True)),
]  # fmt: skip


def config_of(model: str, split: Split, **overrides: Any) -> Config:
    architecture, growth = GROWTH[model]
    config = make(growth, architecture, **{**FELT, **split.overrides, **overrides})
    prepare(config)
    return config


def trained(
    ranks: Ranks, model: str, split: Split, steps: int, broken: str = "nothing", **overrides: Any
) -> list[dict[str, Any]]:
    config = config_of(model, split, **overrides)
    return ranks.run(split.processes, bodies.train, config=config, steps=steps, broken=broken)


# --- the table ---


def test_by_hand() -> None:
    """Standard deviation 0.05, between 2^-5 and 2^-4 and nearer to 2^-4; fc2's is 0.05 / sqrt(4) / sqrt(5/2)."""
    plain = parametrize(make(MIXED, hparams__weight_decay=0.5), VOCABULARY).tensors
    unit = parametrize(make(MIXED, hparams__weight_decay=0.5, **UNIT), VOCABULARY).tensors
    name = "embedding.word_embeddings.weight"
    assert unit[name].theta == Fraction(1, 16)
    assert unit[name].init_std == {None: 0.05 * 16}
    assert unit[name].lr == plain[name].lr * 16
    assert (unit[name].eps, plain[name].eps) == (1e-8 / 1.5 / 16, 1e-8 / 1.5)
    assert unit[name].weight_decay == plain[name].weight_decay / 16 == 0.5 / 16
    assert unit[name].gradient_norm == {None: 1.5 * 256}  # m_out, hidden ×3/2, over θ²
    assert unit["decoder.layers.1.mlp.linear_fc2.weight"].theta == Fraction(1, 64)  # 0.0158
    assert unit["decoder.layers.0.mlp.linear_fc2.bias"] == plain["decoder.layers.0.mlp.linear_fc2.bias"]
    assert unit["decoder.final_layernorm.weight"].theta == 1


def test_sgd_by_hand() -> None:
    plain, unit = (
        parametrize(make(MIXED, "llama", **SGD, **scale), VOCABULARY).tensors["output_layer.weight"]
        for scale in ({}, UNIT)
    )
    assert unit.theta == Fraction(1, 16)
    assert (unit.lr, unit.weight_decay, unit.eps) == (plain.lr * 256, plain.weight_decay / 256, None)


@pytest.mark.parametrize("model", GROWTH)
def test_every_matrix_begins_near_one(model: str) -> None:
    """Between 2^-1/2 and 2^1/2, which is what a power of two leaves; of fused blocks the mean square is."""
    upstream.prepare_process()  # without which latent attention asks for CUDA
    architecture, growth = GROWTH[model]
    tensors = parametrize(make(growth, architecture, **UNIT), VOCABULARY).tensors
    outside = {name for name, tensor in tensors.items() if tensor.theta == 1 and any(tensor.init_std.values())}
    assert {name.rsplit(".", 2)[-2] + "." + name.rsplit(".", 1)[-1] for name in outside} == (
        {"router.weight", "shared_experts.gate_weight"} if model == "moe" else set()
    )
    for name in set(tensors) - outside:
        tensor = tensors[name]
        rows = {block: dim.dim for block, dim in tensor.shape.fan_outs.items()}
        square = sum(count * tensor.init_std[block] ** 2 for block, count in rows.items()) / sum(rows.values())
        assert not square or 0.5 <= square <= 2.0, name


def test_a_tensor_that_starts_at_zero_is_stored_as_it_is() -> None:
    tensors = parametrize(make(MIXED, "llama", parametrization__zero_init_readout=True, **UNIT), VOCABULARY).tensors
    assert tensors["output_layer.weight"].theta == 1


def test_a_control_changes_the_rules_before_the_scale() -> None:
    """What a negative control makes of the rules is made of the plain table, and θ stays."""
    plain, unit = (parametrize(make(MIXED, **scale), VOCABULARY) for scale in ({}, UNIT))
    without = unit.replaced(lambda row: row.retuned(lr=Fraction(1), eps=Fraction(1))).tensors
    for name, row in plain.replaced(lambda row: row.retuned(lr=Fraction(1), eps=Fraction(1))).tensors.items():
        assert without[name] == row.stored_over(unit.tensors[name].theta)


# --- training ---


@pytest.mark.slow
@pytest.mark.parametrize(("model", "own", "split"), CELLS, ids=str)
def test_twenty_steps_to_the_last_bit(ranks: Ranks, model: str, own: dict[str, Any], split: Split) -> None:
    plain = trained(ranks, model, split, 20, **own)
    unit = trained(ranks, model, split, 20, **own, **UNIT)
    assert plain[0]["losses"][-1] < plain[0]["losses"][0] - 0.05
    same(unit, plain)


def same(unit: list[dict[str, Any]], plain: list[dict[str, Any]]) -> None:
    """Losses and norms to the last bit; initial values are those of the other times a power of two."""
    for found, expected in zip(unit, plain, strict=True):
        assert found["losses"] == expected["losses"]
        assert found["grad_norms"] == expected["grad_norms"]
        assert min(found["grad_norms"]) > FELT["training__clip_grad"]
        scales = [_scale(found["initial"][name], value) for name, value in expected["initial"].items()]
        assert min(scales) > 1 / 2**0.5
        assert max(scales) > 10


def _scale(stored: np.ndarray, plain: np.ndarray) -> float:
    """What `plain` was multiplied with, everywhere the same power of two."""
    if not plain.any():
        return 1.0
    factor = float(np.abs(stored).max() / np.abs(plain).max())
    assert math.frexp(factor)[0] == 0.5
    assert np.array_equal(stored, plain * np.float32(factor))
    return factor


@pytest.fixture(scope="module")
def whole(ranks: Ranks) -> Any:
    """The plain run of a split, four steps."""

    @cache
    def run(split: Split) -> list[dict[str, Any]]:
        return trained(ranks, "gpt3", split, 4, **({} if split is ALONE else INVARIANT))

    return run


@pytest.mark.parametrize("split", [ALONE, Split("plain", tensor=2, sequence=True)], ids=str)
def test_to_the_last_bit(ranks: Ranks, whole: Any, split: Split) -> None:
    same(trained(ranks, "gpt3", split, 4, **({} if split is ALONE else INVARIANT), **UNIT), whole(split))


def test_where_an_engine_sums_the_norm_itself(ranks: Ranks) -> None:
    """The plain run's norm is megatron-core's float32 sum, the other's a float64 one: equal bits only without clipping.

    Float32 rounds each norm by up to 6e-8 of it, over several sums; the docs say 2.3e-6 of the loss.
    """
    split = Split("plain")
    free: dict[str, Any] = {"training__clip_grad": 0.0}
    plain, unit = (trained(ranks, "gpt3", split, 4, **free, **scale)[0] for scale in ({}, UNIT))
    assert unit["losses"] == plain["losses"]
    plain, unit = (trained(ranks, "gpt3", split, 4, **scale)[0] for scale in ({}, UNIT))
    assert unit["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert unit["grad_norms"] != plain["grad_norms"]
    assert unit["grad_norms"] == pytest.approx(plain["grad_norms"], rel=1e-5)


@pytest.mark.parametrize(
    ("broken", "first"),
    [
        ("no_theta_in_the_forward_pass", r"losses\[0\]"),
        ("bias_times_theta", r"grad_norms\[0\]"),  # biases start at 0, so the loss is right
        ("norm_of_stored_gradients", r"grad_norms\[0\]"),
        ("unit_scale_without_epsilon", r"losses\[2\]"),
        ("unit_scale_without_decay", r"losses\[2\]"),
    ],
)
def test_what_is_left_out_shows(ranks: Ranks, whole: Any, broken: str, first: str) -> None:
    """Negative controls: what differs first, where bits are compared."""
    found = trained(ranks, "gpt3", ALONE, 4, broken, **UNIT)
    with pytest.raises(Difference, match=f"^{first} on rank 0"):
        compare_curves(found, whole(ALONE)[0], tolerance=0.0)


def test_a_layer_that_is_not_known_is_told(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"linear_proj\.weight: no layer is known to multiply by it"):
        trained(ranks, "gpt3", ALONE, 1, "row_layers_are_not_known", **UNIT)


@pytest.mark.slow
@pytest.mark.parametrize("split", [Split("plain", tensor=2), Split(1, tensor=2)], ids=str)
def test_lion(ranks: Ranks, split: Split) -> None:
    """Of matrices alone in the Megatron engine, of every tensor under DeepSpeed."""
    pytest.importorskip("emerging_optimizers")
    own = {**LION, **INVARIANT}
    plain, unit = (trained(ranks, "llama", split, 8, **own, **scale) for scale in ({}, UNIT))
    assert unit[0]["losses"] == plain[0]["losses"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [(Split(1, tensor=2), Split("distributed", data=2)), (Split("plain", pipeline=2), Split(3, data=2))],
    ids=str,
)
def test_it_resumes(ranks: Ranks, tmp_path: Path, before: Split, after: Split) -> None:
    """In another layout and engine, as the plain run goes on, to the last bit."""
    curves = []
    for number, scale in enumerate(({}, UNIT)):
        folder = str(tmp_path / str(number))
        first, second = (config_of("gpt3", split, **INVARIANT, **scale) for split in (before, after))
        ranks.run(before.processes, bodies.leg, config=first, start_at=0, stop_at=3, save=folder)
        legs = ranks.run(after.processes, bodies.leg, config=second, start_at=3, stop_at=6, load=folder)
        curves.append(legs[0]["losses"])
    assert curves[0] == curves[1]


@pytest.mark.slow
def test_the_coordinate_check_measures_the_weights(ranks: Ranks) -> None:
    """What it tells of weights, updates and outputs is what it tells of the plain model; and its verdict too."""
    sizes = {"hidden_size": 32, "ffn_hidden_size": 128, "num_attention_heads": 2}
    options = {"factors": (1, 2), "steps": 2, "seeds": 1, "compare": False}
    told = [
        ranks.run(
            1,
            proof_bodies.check,
            config=make({"model": {"num_layers": 2, **sizes}, "base": sizes}, training__clip_grad=0.0, **scale),
            options=options,
        )[0]
        for scale in ({}, UNIT)
    ]
    plain, unit = ([cell["coordinates"] for cell in each["cells"]] for each in told)
    assert unit == plain


# --- what a run leaves ---


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "tied"), [("gpt3", True), ("llama", False)])
def test_an_export_holds_the_plain_weights(ranks: Ranks, tmp_path: Path, architecture: str, tied: bool) -> None:
    """To the last bit those of the run that was not scaled; logits of the checkpoint's own model too."""
    from mup_megatron.convert.export import export_safetensors, open_source
    from mup_megatron.convert.rebase import rebase

    held, logits = [], []
    for number, scale in enumerate(({}, UNIT)):
        folder = tmp_path / str(number)
        folder.mkdir()
        config = sources.config_of(architecture, tied, **INVARIANT, **scale)
        source = open_source(sources.train(ranks, folder, config, "one rank"))
        export_safetensors(source, folder / "out")
        held.append(load_file(folder / "out" / "model.safetensors"))
        logits.append(sources.own_logits(source))
    assert torch.equal(*logits)
    assert held[0].keys() == held[1].keys()
    assert [name for name in held[0] if not torch.equal(held[0][name], held[1][name])] == []
    # What knows no such weights refuses the checkpoint.
    with pytest.raises(UserError, match="rebase knows no weights that are stored at unit scale"):
        rebase(source.run.path, tmp_path / "rebased", tmp_path / "base.yaml")
    begun = parametrize(sources.config_of(architecture, tied), VOCABULARY)
    with pytest.raises(UserError, match="its weights are stored at unit scale"):
        check_start(InitFrom(source.run.path).find(), begun, source.run.manifest)
    with pytest.raises(UserError, match="thetas"):
        check_resume(source.run.manifest, source.run.manifest.replaced(thetas=None), source.run.path)


def test_explain_tells_theta(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["explain", str(repository / "configs/demo.yaml"), "parametrization.scaling=unit"]
    assert cli.run([*arguments, "--json"]) == 0
    told = {row["name"]: row for row in json.loads(capsys.readouterr().out)["parameters"]}
    head = told["embedding.word_embeddings.weight"]
    assert head["theta"] == head["forward_multiplier"] == 2.0 ** round(math.log2(head["init_std"] * head["theta"]))
    assert told["decoder.final_layernorm.weight"]["theta"] == 1.0
    assert cli.run(arguments) == 0
    said = capsys.readouterr().out
    assert "θ" in said
    assert "2^-" in said


def test_old_records_keep_their_digest() -> None:
    assert "parametrization.scaling" not in digested(make(MIXED))
    assert digested(make(MIXED, **UNIT))["parametrization.scaling"] == "unit"


# --- what is refused ---


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"optimizer__name": "muon", "parallel__engine": "megatron"}, "no exact rule for Muon"),
        ({"model__transformer_impl": "transformer_engine"}, "not run with Transformer Engine's layers"),
        ({"tuning__command": ["python", "pretrain.py"]}, "trials that a script runs"),
        ({"model__architecture": "bert"}, "needs a model that predicts the next token"),
    ],
)
def test_refused(keys: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        make(MIXED, **keys, **UNIT)


@pytest.mark.parametrize("what", ["import", "rebase", "--init-from"])
def test_weights_that_are_read_elsewhere(what: str) -> None:
    with pytest.raises(UserError, match=f"parametrization.scaling: {what} knows no weights that are stored at unit"):
        make(MIXED, **UNIT).needs_plain_weights(what)
    make(MIXED).needs_plain_weights(what)
