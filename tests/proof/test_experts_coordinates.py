"""The coordinate check over the number of experts: theory by hand, real models of 4 to 32 experts, a rule taken out."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mup_megatron import cli
from mup_megatron.config import Config
from mup_megatron.model.build import parametrize
from mup_megatron.proof.family import grown, models
from mup_megatron.proof.theory import Expected, Theory
from mup_megatron.proof.told import lines
from tests.helpers import proof_bodies
from tests.helpers.configs import make
from tests.helpers.distributed import Ranks

SIZES = {"hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "kv_channels": 16}
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 64, "moe_layer_freq": [0, 1]}
MLP = "decoder.layers.1.mlp."
EXPERT = f"{MLP}experts.local_experts.0"


def config_of(rule: str, **keys: Any) -> Config:
    """A dense layer and one of experts; at the base 4 experts of which 2 see a token."""
    base = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 64}
    sizes = {"model": {"num_layers": 2, **SIZES, **EXPERTS}, "base": base}
    return make(sizes, "llama", parametrization__experts=rule, hparams__weight_decay=0.0, hparams__lr=2e-3, **keys)


def theory_of(growth: dict[str, list[Any]], **keys: Any) -> Theory:
    found = models(config_of("any_share", **keys), grown(config_of("any_share", **keys), growth), 1)
    return Theory([parametrize(member.config, 384) for member in found], [member.size for member in found], "width")


FIXED = {"num_moe_experts": [1, 2, 8], "moe_router_topk": [1, 2, 8]}
FALLING = {"num_moe_experts": [1, 2, 8]}
FINER: dict[str, list[Any]] = {**FIXED, "moe_ffn_hidden_size": [1, Fraction(1, 2), Fraction(1, 8)]}


@pytest.mark.parametrize(
    ("growth", "name", "quantity", "expected"),
    [
        # Each of k scores is about 1/k, and multiplies what is between an expert's two layers.
        (FIXED, EXPERT, "output", (-1.0, 0.25)),
        (FIXED, f"{EXPERT}.linear_fc2", "output", (-1.0, 0.25)),
        (FIXED, f"{EXPERT}.linear_fc1", "output", (0.0, 0.25)),
        (FIXED, f"{EXPERT}.linear_fc1", "gradient", (-1.0, 0.4)),
        (FIXED, f"{EXPERT}.linear_fc2", "gradient", (0.0, 0.4)),
        (FALLING, EXPERT, "output", (0.0, 0.25)),
        (FALLING, f"{EXPERT}.linear_fc1", "gradient", (0.0, 0.4)),
        (FIXED, f"{MLP}experts", "output", (-1.0, 0.25)),
        (FIXED, f"{MLP}experts", "gradient", (0.0, 0.4)),
        # A mean over k random outputs; what they learn of a token agrees, so only one side is left open.
        (FIXED, "decoder.layers.1.mlp", "output", (0.0, 0.75)),
        (FALLING, "decoder.layers.1.mlp", "output", (0.0, 0.25)),
        (FIXED, "decoder.layers.1.mlp", "change", (0.0, 0.75)),
        (FIXED, "decoder.layers.1.mlp", "gradient", (0.0, 0.4)),
        (FIXED, "decoder.layers.1.pre_mlp_layernorm", "gradient", (0.0, 0.9)),
        (FIXED, "decoder.layers.0.pre_mlp_layernorm", "gradient", (0.0, 0.4)),
        (FIXED, "decoder.layers.1.pre_mlp_layernorm", "output", (0.0, 0.25)),
        (FIXED, f"{MLP}router.logits", "output", (0.0, 0.25)),
        (FIXED, f"{MLP}router.logits", "change", (0.0, 0.25)),
        # Scores of all experts add up to 1, however many are not 0.
        (FIXED, f"{MLP}router", "output", (-1.0, 0.25)),
        (FALLING, f"{MLP}router", "output", (-1.0, 0.25)),
        (FIXED, f"{MLP}router", "gradient", (0.0, 0.4)),
        (FALLING, f"{MLP}router", "gradient", (-1.0, 0.4)),
        # Neither Adam's updates nor initial values have a number of experts in them.
        (FIXED, f"{EXPERT}.linear_fc1.weight[gate]", "update", (0.0, 0.25)),
        (FALLING, f"{EXPERT}.linear_fc2.weight", "update", (0.0, 0.25)),
        (FALLING, f"{MLP}router.weight", "update", (0.0, 0.25)),
        (FIXED, f"{EXPERT}.linear_fc2.weight", "initial", (0.0, 0.2)),
        # Finer experts: a fan-in that falls as 1/E.
        (FINER, f"{EXPERT}.linear_fc2.weight", "initial", (0.5, 0.2)),
        (FINER, f"{EXPERT}.linear_fc2.weight", "update", (1.0, 0.25)),
        (FINER, EXPERT, "output", (-1.0, 0.25)),
        # 1/k, times E^1/2 through second layers that start as ffn^-1/2; what they learn may make that E.
        (FINER, f"{EXPERT}.linear_fc1", "gradient", (-0.5, 0.4)),
        # Dense layers, attention and the residual stream do not know of experts.
        (FIXED, "decoder.layers.0.mlp", "output", (0.0, 0.25)),
        (FIXED, "decoder.layers.1", "change", (0.0, 0.25)),
    ],
)
def test_by_hand(growth: dict[str, list[Any]], name: str, quantity: str, expected: tuple[float, float]) -> None:
    found = theory_of(growth).expected(name, quantity, 1)
    assert isinstance(found, Expected)
    assert (found.slope, found.low) == (pytest.approx(expected[0], abs=1e-9), pytest.approx(expected[1]))


def test_before_the_first_step() -> None:
    """A mean over k random experts goes as k^-1/2; beside shared experts, which stay, it may not."""
    mlp = "decoder.layers.1.mlp"
    plain = theory_of(FIXED)
    assert tuple(plain.expected(mlp, "output", 0)) == pytest.approx((-0.5, 0.25, 0.25))
    assert tuple(plain.expected("decoder.layers.1.pre_mlp_layernorm", "gradient", 0)) == pytest.approx((-0.5, 0.4, 0.4))
    shared = theory_of(FIXED, model__moe_shared_expert_intermediate_size=32)
    assert tuple(shared.expected(mlp, "output", 0)) == pytest.approx((0.0, 0.75, 0.25))
    assert shared.expected(f"{MLP}shared_experts", "output", 0).slope == 0.0


def test_how_many_experts_a_small_change_replaces() -> None:
    """What may rise at a falling share, without a model: 2 of E, or half, chosen by logits that change a bit."""

    def replaced(experts: int, topk: int) -> float:
        generator = torch.Generator().manual_seed(1)
        logits = torch.randn(100_000, experts, generator=generator)
        changed = logits + 0.1 * torch.randn(100_000, experts, generator=generator)
        one, other = (torch.zeros_like(logits).scatter_(1, z.topk(topk).indices, 1.0) for z in (logits, changed))
        return float((one - other).abs().sum() / topk)

    assert math.log2(replaced(32, 2) / replaced(4, 2)) / 3 == pytest.approx(0.5, abs=0.1)
    assert math.log2(replaced(32, 16) / replaced(4, 2)) / 3 == pytest.approx(0.0, abs=0.05)
    above = [theory_of(growth).expected(f"{MLP}router", "change", 1).high for growth in (FALLING, FIXED)]
    assert above == pytest.approx([0.75, 0.25])


def test_where_epsilon_decides() -> None:
    """The gain before the experts has a gradient that falls as k^-1/2, and so has its update; others do not."""
    gain = "decoder.layers.{}.pre_mlp_layernorm.weight"
    theory = theory_of(FIXED, optimizer__eps=1e-2)
    assert [theory.expected(gain.format(layer), "update", 1).low for layer in (0, 1)] == pytest.approx([0.25, 0.75])
    assert theory.expected(f"{EXPERT}.linear_fc2.weight", "update", 1).low == 0.25
    assert theory_of(FIXED).expected(gain.format(1), "update", 1).low == 0.25


@pytest.mark.parametrize("felt", [{"optimizer__name": "sgd"}, {"optimizer__eps": 1e-2}])
def test_where_gradients_decide(felt: dict[str, Any]) -> None:
    """Under SGD too: gradients of fewer tokens are noise, (k E)^-1/2 for 1/E; a first layer's go as its FFN^-1/2."""

    def bounds(growth: dict[str, list[Any]], name: str, **keys: Any) -> tuple[float | None, ...]:
        found = theory_of(growth, **keys).expected(name, "update", 1)
        return found.slope, found.low, found.high

    first, second, router = (f"{EXPERT}.linear_fc1.weight[up]", f"{EXPERT}.linear_fc2.weight", f"{MLP}router.weight")
    for name in (first, second, router):
        assert bounds(FIXED, name, **felt) == pytest.approx((0.0, 0.25, 0.25))
        assert bounds(FALLING, name, **felt) == pytest.approx((0.0, 0.25, 0.75))
        assert bounds(FALLING, name) == pytest.approx((0.0, 0.25, 0.25))
    assert bounds(FINER, first, **felt) == pytest.approx((0.0, 0.75, 0.25))
    assert bounds(FINER, second, **felt) == pytest.approx((1.0, 0.25, 0.25))
    assert bounds(FIXED, "decoder.layers.1.pre_mlp_layernorm.weight", **felt) == pytest.approx((0.0, 0.75, 0.25))
    dense = "decoder.layers.0.mlp.linear_fc1.weight[up]"
    assert bounds(FALLING, dense, **felt) == pytest.approx((0.0, 0.25, 0.25))


def test_widths_alone_are_as_before() -> None:
    """Theory of a mixture of experts whose number stays says what it said."""
    theory = theory_of({"moe_ffn_hidden_size": [1, 2, 4]})
    assert theory._routed is None


# Real models


def check(ranks: Ranks, config: Config, **options: Any) -> dict[str, Any]:
    growth = {"num_moe_experts": [1, 2, 4, 8], "moe_router_topk": [1, 2, 4, 8]}
    asked = {"growth": growth, "steps": 3, "seeds": 6, "compare": False, **options}
    return ranks.run(1, proof_bodies.check, config=config, options=asked)[0]


@pytest.mark.slow
@pytest.mark.parametrize("shared", [None, 64])
def test_4_to_32_experts(ranks: Ranks, shared: int | None) -> None:
    """At a fixed share every module and parameter is within its bounds; experts 4 to 31 are not in every model."""
    config = config_of("fixed_share", model__moe_shared_expert_intermediate_size=shared)
    result = check(ranks, config)
    assert not result["out_of_bounds"], lines(result)
    judged = {name for name, each in result["verdicts"]["mup"].items() if each["verdict"] != "not judged"}
    assert {f"{MLP}router", f"{MLP}experts", f"{EXPERT}.linear_fc2.weight", "decoder.layers.1.mlp"} <= judged
    assert not any(f"local_experts.{number}." in name for name in judged for number in range(4, 32))


@pytest.mark.slow
def test_the_rule_taken_out_is_seen(ranks: Ranks) -> None:
    """With epsilon near the gradients, updates of experts and router fall with their number, and nothing else does."""
    config = config_of("fixed_share")
    result = check(ranks, config, broken="experts", seeds=3)
    assert result["verdict"] == "failed"
    (label,) = result["slopes"]
    fallen = [
        each
        for each in result["slopes"][label]
        if each["name"] in result["out_of_bounds"] and each["quantity"] == "update" and each["step"] == 0
    ]
    assert {each["name"] for each in fallen} >= {f"{MLP}router.weight", f"{EXPERT}.linear_fc2.weight"}
    assert all(each["slope"] < -0.5 for each in fallen if each["name"].startswith(MLP))
    dense = [name for name in result["out_of_bounds"] if ".mlp." not in name and name.endswith("weight")]
    assert not dense
    assert not check(ranks, config, regime="eps", seeds=3)["out_of_bounds"]


@pytest.mark.slow
def test_under_sgd(ranks: Ranks) -> None:
    """With the rule every update is within bounds, at a fixed share, a falling one and with finer experts.

    With a rate that does not follow the number of experts, what a token is sent to and what sends it learn 1/E as fast.
    """
    fixed = {"num_moe_experts": [1, 2, 4, 8], "moe_router_topk": [1, 2, 4, 8]}
    finer = {**fixed, "moe_ffn_hidden_size": [1, Fraction(1, 2), Fraction(1, 4), Fraction(1, 8)]}
    falling = {"num_moe_experts": [1, 2, 4, 8]}
    for growth, rule in ((finer, "fixed_share"), (falling, "any_share")):
        result = check(ranks, config_of(rule), growth=growth, regime="sgd", seeds=3)
        assert not result["out_of_bounds"], lines(result)
    right = check(ranks, config_of("fixed_share"), growth=fixed, regime="sgd", seeds=3)
    assert not right["out_of_bounds"], lines(right)
    result = check(ranks, config_of("fixed_share"), growth=fixed, broken="experts_sgd_rate", seeds=3)
    assert result["verdict"] == "failed"
    out = set(result["out_of_bounds"])
    assert out >= {f"{MLP}router.weight", f"{EXPERT}.linear_fc1.weight[up]", f"{EXPERT}.linear_fc2.weight"}
    assert all(name.startswith((f"{MLP}router", f"{MLP}experts")) for name in out), out
    # The first gradient is the same, so the first update is smaller by the number of experts, whatever its own slope.
    with_rule, without = first_updates(right), first_updates(result)
    assert {name: without[name] - with_rule[name] for name in out} == pytest.approx(dict.fromkeys(out, -1.0), abs=1e-3)


def first_updates(result: dict[str, Any]) -> dict[str, float]:
    """Slopes of the first update, by parameter."""
    (found,) = result["slopes"].values()
    return {each["name"]: each["slope"] for each in found if (each["quantity"], each["step"]) == ("update", 0)}


def test_it_needs_experts_that_grow(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config_of("fixed_share").model_dump()))
    assert cli.run(["coord-check", str(path), "--break", "experts", "--widths", "1,2"]) == 2
    said = " ".join(capfd.readouterr().err.split())
    assert "matters only where experts become more; expected --growth num_moe_experts=1,2,4,8" in said
