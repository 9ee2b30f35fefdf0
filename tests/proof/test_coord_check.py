"""The coordinate check: µP passes, everything else fails, and the layout is not seen."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mup_megatron import cli
from mup_megatron.config import Config, derive, load_config
from mup_megatron.engines.setup.megatron import emerging_missing
from mup_megatron.model.build import parametrize
from mup_megatron.parallel.ranks import Rank
from mup_megatron.proof.check import Check
from mup_megatron.proof.controls import CONTROLS
from mup_megatron.proof.coord_check import _asked
from mup_megatron.proof.family import default_factors, grown, members, models, own_path
from mup_megatron.proof.regimes import REGIMES
from mup_megatron.proof.theory import Theory
from mup_megatron.proof.thorough import _row
from mup_megatron.proof.told import lines
from mup_megatron.proof.verdict import Slope, fit, judge, overall
from mup_megatron.rules import formulas, horizon
from mup_megatron.util.errors import UserError
from mup_megatron.util.provenance import KEYS
from tests.config.test_configs import CONFIGS
from tests.helpers import bodies, proof_bodies
from tests.helpers.configs import MIXED, make
from tests.helpers.distributed import Ranks

# Everything grows together; a few tokens of hidden size 32 to 512.
SIZES = {"hidden_size": 32, "ffn_hidden_size": 128, "num_attention_heads": 2}
PLAIN = {"model": {"num_layers": 2, **SIZES}, "base": SIZES}
RATE = {"hparams__lr": 2e-3, "hparams__weight_decay": 0.0}
FACTORS = (1, 4, 16)
DEPTHS = (1, 2, 4)

# Whose gradient is zero in exact arithmetic: the key's bias moves by rounding noise under Adam.
# Changes of keys and attention logits hold that noise, alike for all keys of a query, which softmax undoes.
ROUNDING = {"update": ("linear_qkv.bias[key]",), "change": ("core_attention.key", "core_attention.logits")}
FIVE_DIGITS = 2e-5


def config_of(architecture: str = "gpt3", **keys: Any) -> Config:
    return make(PLAIN, architecture, **{**RATE, **keys})


def check(ranks: Ranks, config: Config, count: int = 1, **options: Any) -> dict[str, Any]:
    defaults = {"factors": FACTORS, "steps": 3, "seeds": 3, "compare": False}
    return ranks.run(count, proof_bodies.check, config=config, options={**defaults, **options})[0]


@pytest.mark.parametrize("architecture", ["gpt3", pytest.param("llama", marks=pytest.mark.slow)])
def test_mup_passes_and_standard_fails(ranks: Ranks, architecture: str) -> None:
    result = check(ranks, config_of(architecture), compare=True)
    assert result["verdict"] == "passed", lines(result)
    assert set(KEYS) <= set(result["provenance"])
    assert len(result["provenance"]["text"]) == 64
    assert not result["silent"]
    assert not result["not_finite"]
    standard = [name for name, each in result["verdicts"]["standard"].items() if each["verdict"] == "out of bounds"]
    assert {"output_layer", "decoder.layers.1.mlp", "decoder.layers.1.self_attention"} <= set(standard)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt3", "llama", "moe", "mla"])
def test_the_families_of_the_evidence(ranks: Ranks, repository: Path, tmp_path: Path, name: str) -> None:
    """At their own values, over their own path, hidden size 32 to 512."""
    config = derive(load_config(repository / "configs" / "proof" / f"{name}.yaml"), {"data.dir": str(tmp_path)})
    # Eight experts share 16 tokens, so a few tokens decide what one expert's weights get: more seeds.
    options = {"compare": False, "seeds": 6 if name == "moe" else 3}
    result = ranks.run(1, proof_bodies.check, config=config, options=options)[0]
    assert [size["size"] for size in result["sizes"]] == [32, 64, 128, 256, 512]
    assert result["verdict"] == "passed", lines(result)


@pytest.mark.slow
def test_attention_that_grows_twice(ranks: Ranks, repository: Path, tmp_path: Path) -> None:
    """Heads and head sizes grow under MLA: the size of attention's output goes as width squared."""
    heads = {"qk_head_dim": 4, "qk_pos_emb_head_dim": 2, "v_head_dim": 4}
    keys = {f"base.{name}": size for name, size in heads.items()}
    keys |= {f"model.{name}": 16 * size for name, size in heads.items()}
    config = load_config(repository / "configs" / "proof" / "mla.yaml")
    # With 3 seeds four slopes are undecided; with 7 none (Python 3.12, megatron-core 0.19.2) or two (3.11, 0.16.1).
    result = check(ranks, derive(config, {"data.dir": str(tmp_path), **keys}), seeds=7)
    verdicts = {name: each["verdict"] for name, each in result["verdicts"]["mup"].items()}
    assert set(verdicts.values()) <= {"ok", "undecided"}, lines(result)
    assert sum(verdict == "undecided" for verdict in verdicts.values()) <= 2, lines(result)
    value = "decoder.layers.0.self_attention.core_attention.value"
    assert verdicts[value] == "ok"
    expected = {each["expected"] for each in result["slopes"]["mup"] if each["name"] == value}
    assert sorted(expected) == [pytest.approx(-1.5), 0.0]


MEGATRON = {"parallel__engine": "megatron", "parallel__use_distributed_optimizer": False}


@pytest.mark.slow
@pytest.mark.skipif(emerging_missing("lion") is not None, reason=str(emerging_missing("lion")))
@pytest.mark.parametrize("engine", [MEGATRON, {"optimizer__implementation": "emerging_optimizers"}], ids=["m", "d"])
def test_lion(ranks: Ranks, engine: dict[str, Any]) -> None:
    """Its sign takes Adam's rates, of matrices and of every tensor; with the standard parametrization's it fails."""
    config = config_of("gpt3", optimizer__name="lion", hparams__lr=2e-3, **engine)
    result = check(ranks, config, compare=True)
    assert result["verdict"] == "passed", lines(result)
    standard = [name for name, each in result["verdicts"]["standard"].items() if each["verdict"] == "out of bounds"]
    assert {"output_layer", "decoder.layers.1.mlp", "decoder.layers.1.self_attention"} <= set(standard)


def broken(ranks: Ranks, rule: str, architecture: str = "gpt3") -> None:
    """The check fails without the rule, and in the same regime passes with it."""
    optimizer = CONTROLS[rule].regime.removesuffix("_eps")
    if optimizer in ("muon", "soap") and (missing := emerging_missing(optimizer)):
        pytest.skip(missing)
    factors = DEPTHS if REGIMES[CONTROLS[rule].regime].axis == "depth" else CONTROLS[rule].factors or FACTORS
    if optimizer == "soap":
        factors = (1, 2, 4)  # SOAP takes matrices of hidden size 512 apart for minutes
    count = max(factors) if CONTROLS[rule].growing_tensor else 1
    keys = {"model__num_attention_heads": 4, "base__num_attention_heads": 4} if count > 1 else {}
    config = config_of(architecture, **keys)
    result = check(ranks, config, count, factors=factors, broken=rule, compare=True)
    assert result["verdict"] == "failed", lines(result)
    whole = [name for name, each in result["verdicts"]["mup"].items() if each["verdict"] == "out of bounds"]
    assert not whole


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["attention_scale"])
def test_a_broken_rule_fails(ranks: Ranks, rule: str) -> None:
    broken(ranks, rule)


RULES = [rule for rule, control in CONTROLS.items() if not control.grows]


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "architecture"), list(zip(RULES, itertools.cycle(["gpt3", "llama"]), strict=False)))
def test_every_broken_rule_fails(ranks: Ranks, rule: str, architecture: str) -> None:
    broken(ranks, rule, architecture)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "architecture"),
    [("standard", "llama"), ("interpolate:0,0", "gpt3"), ("interpolate:0,1", "llama"), ("interpolate:1,0", "gpt3")],
)
def test_other_points_of_the_plane_fail(ranks: Ranks, point: str, architecture: str) -> None:
    assert check(ranks, config_of(architecture), point=point)["verdict"] == "failed"


def sizes(result: dict[str, Any]) -> dict[tuple[Any, ...], list[float]]:
    return {
        (cell["factor"], quantity, name): values
        for cell in result["cells"]
        for quantity, table in {**cell["coordinates"]["modules"], "update": cell["coordinates"]["updates"]}.items()
        for name, values in table.items()
    }


def compare(one: dict[str, Any], other: dict[str, Any], exempt: dict[str, tuple[str, ...]]) -> float:
    """The largest relative difference of any size; nothing may be missing on either side."""
    ours, theirs = sizes(one), sizes(other)
    assert set(ours) == set(theirs)
    worst = 0.0
    for key, values in ours.items():
        if str(key[2]).endswith(exempt.get(key[1], ())):
            continue
        for here, there in zip(values, theirs[key], strict=True):
            assert (here is None) == (there is None), key
            if here is not None and there != here:
                worst = max(worst, abs(here - there) / max(abs(here), abs(there)))
    return worst


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"parallel__tensor_model_parallel_size": 2},
    "tp2_sp": {"parallel__tensor_model_parallel_size": 2, "parallel__sequence_parallel": True},
    "pp2": {"parallel__engine": "megatron", "parallel__pipeline_model_parallel_size": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "layouts"), [("llama", ("tp2",)), ("gpt3", tuple(LAYOUTS))])
def test_the_check_does_not_see_the_layout(ranks: Ranks, architecture: str, layouts: tuple[str, ...]) -> None:
    options: dict[str, Any] = {"factors": (1, 2), "steps": 2}
    whole = check(ranks, config_of(architecture), **options)
    exempt = ROUNDING if architecture == "gpt3" else {}
    for name in layouts:
        split = check(ranks, config_of(architecture, **LAYOUTS[name]), 2, **options)
        assert compare(whole, split, exempt) < FIVE_DIGITS, name


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {"parallel__zero_stage": 3},
        {"parallel__engine": "megatron"},
        {"parallel__engine": "megatron", "parallel__context_parallel_size": 2},
    ],
    ids=["zero3", "distributed_optimizer", "cp2"],
)
def test_nor_data_and_context_parallelism(ranks: Ranks, layout: dict[str, Any]) -> None:
    options: dict[str, Any] = {"factors": (1, 2), "steps": 2}
    whole = check(ranks, config_of("llama"), **options)
    split = check(ranks, config_of("llama", **layout), 2, **options)
    for cell in whole["cells"]:  # not looked at where a rank holds part of the keys
        for table in cell["coordinates"]["modules"].values() if "parallel__context_parallel_size" in layout else ():
            for name in [name for name in table if name.endswith("core_attention.logits")]:
                del table[name]
    assert compare(whole, split, {}) < FIVE_DIGITS


def test_a_size_of_one_rank_alone_is_seen(ranks: Ranks) -> None:
    """The comparison of layouts can fail: sums that are not added over ranks."""
    options: dict[str, Any] = {"factors": (1, 2), "steps": 2}
    whole = check(ranks, config_of("llama"), **options)
    split = ranks.run(
        2,
        proof_bodies.check,
        config=config_of("llama", **LAYOUTS["tp2"]),
        options={"seeds": 1, "compare": False, **options},
        alone=True,
    )[0]
    assert compare(whole, split, {}) > 1e-3


@pytest.mark.parametrize(
    "broken",
    [
        *("nothing", "no_sequence_parallel_reduction"),
        pytest.param("norms_not_marked_sequence_parallel", marks=pytest.mark.slow),
    ],
)
def test_copies_that_differ_are_seen(ranks: Ranks, broken: str) -> None:
    """Under sequence parallelism each rank has the gradient of a part of the tokens; gains are steps of their sum."""
    options = {"factors": (1, 2), "steps": 2, "seeds": 1, "compare": False}
    config = config_of("llama", **LAYOUTS["tp2_sp"])
    result = ranks.run(2, proof_bodies.check, config=config, options=options, broken=broken)[0]
    apart = {each["name"]: each["slope"] for each in result["slopes"]["mup"] if each["quantity"] == "copies"}
    gains = [f"decoder.layers.{layer}.{norm}_layernorm.weight" for layer in (0, 1) for norm in ("input", "pre_mlp")]
    assert sorted(apart) == sorted([*gains, "decoder.final_layernorm.weight"])
    if broken == "nothing":
        assert set(apart.values()) == {0.0}
        return
    assert result["verdict"] == "failed"
    assert set(apart) <= set(result["out_of_bounds"])
    assert min(apart.values()) > 0.01
    seen = Slope(
        **next(each for each in result["slopes"]["mup"] if each["name"] == gains[0] and each["quantity"] == "copies")
    )
    told = lines({**result, "verdicts": {"mup": judge([seen])}, "out_of_bounds": gains[:1], "undecided": []})
    assert any("its copies on tensor-parallel ranks differ by" in line and gains[0] in line for line in told)


def test_slopes_by_hand() -> None:
    fitted = fit([1, 2, 4], [[3.0, 6.0, 12.0], [1.0, 1.0, 1.0]])
    assert fitted.slope == pytest.approx(0.5)
    # Slopes 1 and 0 about 1/2 leave ±ln2/2 at both ends, twice: ln2² over 3 degrees of freedom; the sizes' squares add
    # up to 2 ln2², twice. 3.18 is Student's t. Seeds bend in opposite ways: nothing in common.
    assert fitted.confidence == pytest.approx(3.18 * math.sqrt(1 / 3 / 4))
    assert fitted.bend == pytest.approx(0.0)
    assert fit([1, 4], [[8.0, 4.0]]) == (pytest.approx(-0.5), None, 0.0)
    assert math.isnan(fit([1, 2], [[1.0, math.nan]]).slope)
    assert math.isnan(fit([1, 2], [[0.0, 1.0]]).slope)
    assert fit([1, 2, 4], [[1.0, 2.0, 1.0], [1.0, 2.0, 1.0]]).bend == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("slope", "confidence", "state"),
    [
        (0.10, 0.10, "ok"),
        (-0.86, 0.91, "undecided"),  # neither within 0.25 nor surely outside
        (0.20, 0.10, "undecided"),
        (0.40, 0.10, "out of bounds"),
        (0.00, None, "undecided"),  # two points and one seed leave nothing to tell an error from
        (math.nan, None, "out of bounds"),
    ],
)
def test_a_verdict_knows_its_error(slope: float, confidence: float | None, state: str) -> None:
    one = Slope(
        name="m", quantity="update", step=1, slope=slope, confidence=confidence, expected=0.0, low=0.25, high=0.25
    )
    verdicts = judge([one])
    assert verdicts["m"]["verdict"] == state
    assert overall(verdicts) == {"ok": "passed", "undecided": "undecided", "out of bounds": "failed"}[state]


def test_soap_s_epsilon_by_hand() -> None:
    """Far above the gradient the update is the gradient over epsilon, as SGD's is: 1/n_in for a hidden matrix.

    Far below it is between a full rank's n^-1/2 and a rank of 1's 1/n.
    """
    soap: dict[str, Any] = {"optimizer__name": "soap", **MEGATRON}
    found = {}
    for eps in (0.01, 3.0):
        config = config_of("gpt3", **soap, optimizer__soap_eps=eps)
        family = models(config, grown(config, {name: list(FACTORS) for name in SIZES}), 1)
        tables = [parametrize(member.config, 384) for member in family]
        theory = Theory(tables, [member.size for member in family], "width")
        found[eps] = theory.expected("decoder.layers.0.mlp.linear_fc2.weight", "update", 0)
    assert found == {0.01: pytest.approx((-0.5, 0.75, 0.25)), 3.0: pytest.approx((-1.0, 0.25, 0.25))}


_PASSED = {"judged": "mup", "verdict": "passed", "out_of_bounds": [], "undecided": []}


def test_what_was_not_run_counts() -> None:
    """The total of `--thorough` is of all regimes: two that passed and one without its package are 2 of 3."""
    ran = {"verdict": "passed", "out_of_bounds": [], "undecided": [], "difference": 0.0, "bound": 1e-3}
    rows = [{"regime": name, **ran} for name in ("recompute", "resume")]
    rows.append({"regime": "muon", "verdict": "not run", "why": "no emerging_optimizers"})
    told = lines({"regimes": rows, "verdict": "passed"})
    assert told[-1] == "passed: 2 of 3 regimes passed, 1 not run: muon (no emerging_optimizers)"
    assert lines({"regimes": rows[:2], "verdict": "passed"})[-1] == "passed: 2 of 2 regimes passed"


def test_the_worst_is_nearest_to_its_own_bound() -> None:
    """A slope 0.2 off of 0.25, and initial values 0.01 off of 0.02: four fifths of a bound are worse than a half."""
    slope = Slope(name="m", quantity="update", step=1, slope=0.2, confidence=0.0, expected=0.0, low=0.25, high=0.25)
    drawn = Slope(name="m", quantity="drawn", step=0, slope=1.01, confidence=0.0, expected=1.0, low=0.02, high=0.02)
    assert judge([slope, drawn])["m"]["quantity"] == "update"
    assert _row("plain", {"verdicts": {"mup": judge([slope]) | {"d": judge([drawn])["m"]}}, **_PASSED})["worst"] == "m"


@pytest.mark.slow
def test_the_plane_s_corners(ranks: Ranks) -> None:
    """(1, 1) is µP and (0, 0) standard, of an untied head by abc-symmetry, which clipping by the plain norm breaks."""
    for architecture in ("gpt3", "llama"):
        size = {"model__hidden_size": 64, "model__num_attention_heads": 4}
        losses, clipped = (
            ranks.run(1, proof_bodies.corners, config=config_of(architecture, training__clip_grad=clip, **size))[0]
            for clip in (0.0, 1.0)
        )
        assert losses["interpolate:1,1"] == losses["mup"]
        assert losses["interpolate:0,0"] == losses["standard"]
        assert losses["mup"] != pytest.approx(losses["standard"], rel=1e-3)
        assert (clipped["interpolate:1,1"] == clipped["mup"]) == (architecture == "gpt3")


RULED: dict[str, Any] = {
    "parametrization__batch": "sqrt_sde",
    "parametrization__tokens": "power:-0.5",
    "parametrization__weight_decay": "timescale",
    "tuning__global_batch_size": 1,
    "tuning__micro_batch_size": 1,
    "tuning__train_steps": 5,
    "optimizer__betas": [0.9, 0.95],
    "hparams__weight_decay": 0.1,
}


def test_rules_over_batch_and_tokens_are_the_run_s_own() -> None:
    """8 times the batch and 32 times the tokens: rate 8^1/2 · 32^-1/2, epsilon 8^-1/2, 1 - beta 8, decay 1/(1/2 · 4).

    The check takes 2 sequences a step and 5 steps. From these the rules would count to other numbers.
    """
    config = config_of(**{**RATE, **RULED}, model__hidden_size=128, model__num_attention_heads=8)
    asked = _asked(config, Rank(), Check(factors=FACTORS))[1]
    for member in asked:
        made = member.config
        assert (made.batch_ratio, made.tokens_ratio) == (2, 2)
        assert horizon.horizon(made) == formulas.HorizonFactors()
        assert made.hparams.lr == pytest.approx(2e-3 / 2)
        assert made.hparams.weight_decay == pytest.approx(0.1 / 2)
        assert made.optimizer.eps == pytest.approx(config.optimizer.eps / 8**0.5)
        assert made.optimizer.betas == pytest.approx([0.2, 0.6])
    # Control: without rules nothing moves.
    _, free = _asked(derive(config, horizon.without_rules(config)), Rank(), Check(factors=FACTORS))
    assert (free[0].config.hparams.lr, free[0].config.optimizer.betas) == (2e-3, [0.9, 0.95])


def test_a_trial_s_length_does_not_stop_it() -> None:
    """Trials of 24 tokens, a check of 16, and as many learned positions: refused before."""
    _, asked = _asked(config_of(tuning__seq_length=24), Rank(), Check(factors=FACTORS))
    assert asked[0].config.training.seq_length == 16


def test_the_config_s_own_path() -> None:
    """hidden ×3/2, FFN ×5/2, heads ×2, query groups ×4, in thirds of their logarithms."""
    points = [point.sizes for point in own_path(make(MIXED), 1)]
    assert [point["hidden_size"] for point in points] == [64, 73, 84, 96]  # 64 · 1.5^(1/3) = 73.3, ^(2/3) = 83.9
    assert [point["ffn_hidden_size"] for point in points] == [64, 87, 118, 160]  # 86.9, 117.9
    assert all(point["num_attention_heads"] % point["num_query_groups"] == 0 for point in points)
    assert (points[0]["num_query_groups"], points[-1]["num_query_groups"]) == (1, 4)
    even = config_of(model__hidden_size=384, model__num_attention_heads=24, model__ffn_hidden_size=1536)
    # ×12 in four steps of 12^(1/4), in proportion: 1.86, 3.46 and 6.45 as halves, since the base has two heads.
    assert [point.sizes["num_attention_heads"] for point in own_path(even, 1)] == [2, 4, 7, 13, 24]
    assert [point.sizes["hidden_size"] for point in own_path(even, 1)] == [32, 64, 112, 208, 384]
    with pytest.raises(UserError, match="own sizes are the base's"):
        own_path(config_of(), 1)


def test_every_tensor_has_a_slope_of_its_own() -> None:
    """Heads ×1, ×4, ×16, hidden ×1, ×2, ×4, FFN fixed: over the heads' logarithm 1, 1/2 and 0."""
    config = make(MIXED)
    growth = {"num_attention_heads": [1, 4, 16], "hidden_size": [1, 2, 4]}
    found = models(config, grown(config, growth), 1)
    assert [(member.over, member.size) for member in found] == [("num_attention_heads", size) for size in (4, 16, 64)]
    theory = Theory([parametrize(member.config, 384) for member in found], [member.size for member in found], "width")
    layer = "decoder.layers.0."
    slopes = {
        "embedding.word_embeddings.weight": (0.0, 0.0),
        f"{layer}self_attention.linear_qkv.weight[query]": (-0.25, -0.5),  # (initial values, update); n_in is hidden
        f"{layer}self_attention.linear_proj.weight": (-0.5, -1.0),  # all heads
        f"{layer}mlp.linear_fc1.weight": (-0.25, -0.5),
        f"{layer}mlp.linear_fc2.weight": (0.0, 0.0),  # the FFN, which is fixed
        f"{layer}mlp.linear_fc2.bias": (0.0, 0.0),
    }
    for name, expected in slopes.items():
        assert tuple(theory.expected(name, quantity, 0).slope for quantity in ("initial", "update")) == pytest.approx(
            expected
        ), name
    assert theory.expected("output_layer", "output", 0).slope == pytest.approx(-0.25)  # sums of hidden/hidden terms
    assert theory.expected("decoder.final_layernorm", "gradient", 1).slope == pytest.approx(-0.5)


@pytest.mark.parametrize(("rule", "kept"), [("independent", 0.0), ("timescale", 0.0), ("sqrt", 0.5), ("coupled", 1.0)])
def test_decay_by_its_rule(rule: str, kept: float) -> None:
    """What decay takes, lr λ w. At m times the width w of a hidden matrix goes as m^-1/2 and lr as 1/m.

    λ goes as m under `independent` (and `timescale`), as m^1/2 under `sqrt` and as 1 under `coupled`: lr λ as 1, m^-1/2
    and 1/m. λ is 3000 and the standard deviation 0.05, so decay takes 150 times what a gradient does at the base, and
    from 4 · 150 to 150/4 times at m = 16.
    """
    decay = {"hparams__weight_decay": 3000.0, "hparams__lr": 8e-5, "parametrization__weight_decay": rule}
    config = config_of("llama", **decay)
    found = models(config, grown(config, {name: list(FACTORS) for name in SIZES}), 1)
    theory = Theory([parametrize(member.config, 384) for member in found], [member.size for member in found], "width")
    hidden = theory.expected("decoder.layers.0.mlp.linear_fc1.weight[gate]", "update", 0)
    assert hidden == (pytest.approx(-0.5 - kept), 0.25, 0.25)
    assert theory.expected("output_layer.weight", "update", 0) == (pytest.approx(0.0), 0.25, 0.25)
    # lr λ is 0.24 at the base, and less on a wider model: its outputs are others after one step already.
    sizes = {theory.expected("decoder.layers.0", quantity, 1) for quantity in ("change", "output")}
    assert sizes == {(0.0, None, None) if kept else (0.0, 0.25, 0.25)}


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["sqrt", "coupled"])
def test_another_rule_of_decay(ranks: Ranks, rule: str) -> None:
    """It passes in the regime of decay, where another rule fails, and at a rate and decay of a config's own."""
    result = check(ranks, config_of(parametrization__weight_decay=rule), broken="decay", compare=True)
    assert result["verdict"] == "failed"
    assert not [name for name, each in result["verdicts"]["mup"].items() if each["verdict"] == "out of bounds"]
    own: dict[str, Any] = {"hparams__lr": 8e-5, "hparams__weight_decay": 3000.0}
    assert check(ranks, config_of(parametrization__weight_decay=rule, **own))["out_of_bounds"] == []


def test_the_regime_of_decay_keeps_the_rule() -> None:
    """It replaced any rule by `independent`, so that another one's was never looked at.

    Output projections start with 0.05 / sqrt(2 · 2) = 0.025; λ is 50 / 0.025, and the rate a tenth of 1 / (4 λ).
    """
    asked = REGIMES["decay"].keys(config_of(parametrization__weight_decay="sqrt"), 4)
    assert asked == {"hparams.lr": pytest.approx(1.25e-5), "hparams.weight_decay": pytest.approx(2000.0)}


def test_shipped_configs_have_the_regimes() -> None:
    """Whatever their proxies name: a regime that a config cannot be in is not run, and nothing looks at its rule."""
    for path in CONFIGS:
        config = load_config(path)
        for name in ("untied", "eps", "decay", "head_size", "sgd", "recompute", "multipliers"):
            if keys := REGIMES[name].keys(config, 4):
                derive(config, keys)


def test_initial_sizes_by_hand() -> None:
    """σ (2/π)^1/2, σ being Megatron's at the base over the root of how the fan-in grows; the error goes as n^-1/2.

    Hidden ×1 and ×4 from 32, FFN ×1 and ×2 from 128, 2 layers, σ 0.05; embeddings 0.04; a factor of 1.5 on the MLP.
    """
    growth = {"hidden_size": [1, 4], "num_attention_heads": [1, 4], "ffn_hidden_size": [1, 2]}
    factors = {"hparams__per_tensor": {"mlp": {"init": 1.5}}, "hparams__embedding_init_method_std": 0.04}
    config = config_of("gpt3", **factors)
    assert (config.hparams.init_method_std, config.model.num_layers, config.num_layers_base) == (0.05, 2, 2)
    found = models(config, grown(config, growth), 1)
    theory = Theory([parametrize(member.config, 384) for member in found], [member.size for member in found], "width")
    layer = "decoder.layers.1."
    stds = {
        "embedding.word_embeddings.weight": (0.04, 0.04, 384 * 32),
        "embedding.position_embeddings.weight": (0.04, 0.04, config.max_position_embeddings * 32),
        f"{layer}self_attention.linear_qkv.weight[query]": (0.05, 0.05 / 2, 32 * 32),
        f"{layer}self_attention.linear_proj.weight": (0.05 / 2, 0.05 / 4, 32 * 32),  # over the root of 2 · 2 layers
        f"{layer}mlp.linear_fc1.weight": (0.075, 0.075 / 2, 128 * 32),
        f"{layer}mlp.linear_fc2.weight": (0.0375, 0.0375 / 2**0.5, 128 * 32),
    }
    for name, (base, grown_std, count) in stds.items():
        sizes = theory.drawn(name)
        assert sizes is not None
        assert [size.mean for size in sizes] == pytest.approx([base * 0.797885, grown_std * 0.797885], rel=1e-5), name
        assert sizes[0].error == pytest.approx(0.755511 / count**0.5, rel=1e-5), name
    constants = {f"{layer}input_layernorm.weight": 1.0, f"{layer}mlp.linear_fc1.bias": 0.0}
    for name, one in constants.items():
        assert theory.drawn(name) == [(one, 0.0)] * 2, name


def test_the_error_of_initial_sizes() -> None:
    """What that is for, without a model: of 4,000 means of 256 sizes each, the spread is (π/2 - 1)^1/2 / 16."""
    values = torch.randn(4000, 256, generator=torch.Generator().manual_seed(1)).abs().mean(1)
    assert values.mean().item() == pytest.approx(0.797885, rel=0.003)
    assert (values.std() / values.mean()).item() == pytest.approx(0.755511 / 16, rel=0.05)


def test_changes_of_experts_may_rise() -> None:
    """Upper bounds, by hand: a quarter, and one half more where tokens get other experts."""
    sizes = {**SIZES, "moe_ffn_hidden_size": 32}
    experts = {"num_moe_experts": 8, "moe_shared_expert_intermediate_size": 32, "moe_layer_freq": [0, 1]}
    config = make({"model": {"num_layers": 2, **sizes, **experts}, "base": sizes}, "llama", **RATE)
    found = models(config, grown(config, {name: [1, 4] for name in sizes}), 1)
    theory = Theory([parametrize(member.config, 384) for member in found], [member.size for member in found], "width")
    above = {
        "decoder.layers.0.mlp": 0.25,  # a dense layer
        "decoder.layers.1.mlp": 0.75,
        "decoder.layers.1.mlp.router": 0.75,
        "decoder.layers.1.mlp.experts": 0.75,
        "decoder.layers.1.mlp.router.logits": 0.25,
        "decoder.layers.1.mlp.shared_experts": 0.25,
        "decoder.layers.1": 0.25,
    }
    assert {name: theory.expected(name, "change", 1).high for name in above} == above


def test_how_many_tokens_get_other_experts() -> None:
    """What that bound is for, without a model: 8 logits that fall as width^-1/2, changed by what keeps its size."""

    def slope(change: float) -> float:
        """Over widths 32 to 512, of the share of 400,000 tokens that have other experts among their best two."""
        generator = torch.Generator().manual_seed(1)
        shares = []
        for width in (32, 512):
            logits = torch.randn(400_000, 8, generator=generator) / width**0.5
            changed = logits + change * torch.randn(400_000, 8, generator=generator)
            best = [values.topk(2).indices.sort().values for values in (logits, changed)]
            shares.append((best[0] != best[1]).any(-1).double().mean().item())
        return math.log(shares[1] / shares[0], 16)

    assert slope(1e-3) == pytest.approx(0.5, abs=0.05)
    assert 0.1 < slope(0.1) < 0.4  # most tokens have changed


def test_growth_of_its_own() -> None:
    points = grown(config_of(), {"hidden_size": [1, 2, 4], "ffn_hidden_size": [1, 1, 2]})
    assert [tuple(point.sizes.values()) for point in points] == [(32, 128, 2), (64, 128, 2), (128, 256, 2)]
    found = models(config_of(model__kv_channels=16, base__kv_channels=16), points, 1)
    assert [(member.over, member.size) for member in found] == [
        ("hidden_size", 32),
        ("hidden_size", 64),
        ("hidden_size", 128),
    ]


def test_the_family() -> None:
    config = config_of()
    assert default_factors(config) == [1, 2, 4, 8]
    assert default_factors(derive(config, {"model.hidden_size": 1024, "model.num_attention_heads": 64})) == [
        *(1, 2, 4, 8, 16),
        32,
    ]
    found = members(config, [4, 1], 1)
    assert [(member.factor, member.config.model.ffn_size) for member in found] == [(1, 128), (4, 512)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--widths", "2"], "two different widths"),
        (["--widths", "1,x"], "expected whole factors"),
        (["--widths", "0,1"], "expected whole factors"),
        (["--steps", "0"], "--steps: 0"),
        (["--growth", "hidden_size"], "expected a key of base:"),
        (["--growth", "depth=1,2"], "base: does not name it"),
        (["--growth", "hidden_size=1,x"], "expected whole factors"),
        (["--growth", "hidden_size=0,1"], "expected factors above 0 that make whole sizes of 32"),
        (["--growth", "hidden_size=1,2", "--growth", "ffn_hidden_size=1"], "as many factors for every key"),
        (["--growth", "hidden_size=2,1"], "has to grow with every model"),
        (["--growth", "hidden_size=1,2", "--widths", "1,2"], "expected no --widths"),
        (["--thorough", "--break", "eps"], "--thorough: judges mup"),
        (["--seeds", "0"], "--seeds: 0"),
        (["--break", "everything"], "expected one of embedding_rate"),
        (["--parametrization", "interpolate:1"], "expected mup, standard, fan_in, per_layer, one_ratio, ntk, or "),
        (["--parametrization", "standard", "--break", "eps"], "takes a rule out of mup"),
        (["optimizer.name=sgd", "--break", "eps", "--widths", "1,2"], "optimizer.name"),
    ],
)
def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config_of().model_dump()))
    assert cli.run(["coord-check", str(path), *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_widths_that_do_not_divide() -> None:
    config = config_of(parallel__tensor_model_parallel_size=4)
    with pytest.raises(UserError, match=r"--widths: 1 times the base: .*num_attention_heads"):
        members(config, [1, 2], 4)


@pytest.mark.slow
def test_the_command(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config_of(run__dir=str(tmp_path)).model_dump()))
    arguments = ["coord-check", str(path), "--widths", "1,2,4", "--steps", "1", "--seeds", "2", "--json"]
    (result,) = ranks.run(1, bodies.command, arguments=[*arguments, "--parametrization", "standard", "--no-beside"])
    status, out, _ = result
    assert status == 1
    told = json.loads(out)
    assert told["judged"] == "standard"
    assert "output_layer" in told["out_of_bounds"]
    assert told["verdicts"]["standard"]["output_layer"]["confidence"] is not None
    assert json.loads((tmp_path / "coord-check" / "standard.json").read_text()) == told
    assert (tmp_path / "coord-check" / "standard.png").read_bytes().startswith(b"\x89PNG")


def test_a_cell_that_is_no_number_is_said(ranks: Ranks) -> None:
    config = config_of(hparams__lr=1e30, training__clip_grad=0.0)
    result = check(ranks, config, factors=(1, 2), steps=2)
    assert result["verdict"] == "failed"
    assert any(where.startswith("mup: 2 x base") for where in result["not_finite"])


def test_nothing_is_left_of_a_control(ranks: Ranks) -> None:
    """A control changes a copy: the rules themselves stay as they are."""
    config = config_of()
    before, after = ranks.run(1, proof_bodies.rules_around_controls, config=config)[0]
    assert before == after
