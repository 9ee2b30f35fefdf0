"""More experts: numbers by hand, a layer of experts in float64, updates of a real model over 4 to 32 experts."""

from __future__ import annotations

import math
from fractions import Fraction as F
from typing import Any

import pytest
import torch

from mup_megatron.config import Config, derive
from mup_megatron.engines.setup import resolve
from mup_megatron.model.build import parametrize
from mup_megatron.model.explain import explain
from mup_megatron.proof.question import question
from mup_megatron.proof.stability import jobs_of
from mup_megatron.rules import formulas
from mup_megatron.tuning.family import digested
from mup_megatron.util.errors import ConfigError
from tests.helpers import bodies
from tests.helpers.configs import MOE, VOCABULARY, make
from tests.helpers.distributed import Ranks
from tests.rules.test_parametrization import numbers

MLP = "decoder.layers.1.mlp."
GROWS = {"base.num_moe_experts": 4, "parametrization.experts": "any_share"}


def config_of(experts: int, topk: int = 2, **keys: Any) -> Config:
    """Hidden size 3/2, FFN of an expert 5/2 of the base's, as in `MOE`; experts grow from 4."""
    sizes = {"model.num_moe_experts": experts, "model.moe_router_topk": topk}
    return derive(make(MOE, "llama"), {**sizes, **GROWS, **keys})


def table(config: Config) -> dict[str, Any]:
    return dict(parametrize(config, VOCABULARY).tensors)


def test_by_hand() -> None:
    """8 times the experts: epsilon of what a token is sent to, and of what sends it, is 1/8; nothing else moves."""
    many, few = table(config_of(32)), table(make(MOE, "llama"))
    close = pytest.approx
    assert numbers(many[MLP + "router.weight"]) == (close(2 / 3), close(1 / 8), 1.5)
    for expert in (0, 31):
        fc1, fc2 = (many[f"{MLP}experts.local_experts.{expert}.linear_fc{layer}.weight"] for layer in (1, 2))
        assert numbers(fc1) == (close(2 / 3), close(2 / 5 / 8), 1.5)
        assert numbers(fc2) == (close(2 / 5), close(2 / 3 / 8), 2.5)
    others = [name for name in few if ".local_experts." not in name and ".router." not in name]
    assert len(others) > 10
    for name in others:
        assert (numbers(many[name]), many[name].gradient_norm) == (numbers(few[name]), few[name].gradient_norm), name
    for name in few:  # initial values of the same experts
        assert many[name].init_std == few[name].init_std, name
    # g, although the router has more rows than the base's.
    assert many[MLP + "router.weight"].init_std == {None: close(0.05 / 1.5)}


def test_under_sgd_by_hand() -> None:
    config = derive(config_of(32), {"optimizer.name": "sgd", "base.ffn_hidden_size": 32})
    found = table(config)
    # m_out · 8 / m_in, which is also the weight in the invariant gradient norm.
    for name, rate in (
        ("router.weight", 8 / 1.5),
        ("experts.local_experts.9.linear_fc1.weight", 2.5 * 8 / 1.5),
        ("experts.local_experts.9.linear_fc2.weight", 1.5 * 8 / 2.5),
        ("shared_experts.linear_fc1.weight", 3 / 1.5),
    ):
        assert found[MLP + name].lr_multiplier == pytest.approx(rate), name
        assert all(norm == pytest.approx(rate) for norm in found[MLP + name].gradient_norm.values()), name


def test_as_many_experts_as_the_base_are_bitwise_nothing() -> None:
    ruled, plain = table(config_of(4)), table(make(MOE, "llama"))
    assert [(row.group, row.init_std, row.gradient_norm) for row in ruled.values()] == [
        (row.group, row.init_std, row.gradient_norm) for row in plain.values()
    ]


@pytest.mark.parametrize("experts", [2, 6, 64])
def test_one_step_is_two(experts: int) -> None:
    """Base 4 to 12 to `experts` is base 4 to `experts`, exactly: also for fewer experts than the base has."""
    first, second, whole = F(12, 4), F(experts, 12), F(experts, 4)
    seen = formulas.Ratios(m_in=F(3, 2), m_outs={"gate": F(5, 2), "up": F(5, 2)})
    one = formulas.of_experts(seen, whole)
    two = formulas.of_experts(formulas.of_experts(seen, first), second)
    assert one == two
    assert formulas.epsilon(m_out=one.m_out) == formulas.epsilon(m_out=two.m_out) == 1 / (F(5, 2) * whole)


def layer(experts: int, topk: int, ffn: int, *, sigmoid: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of the router, the first and the second layers of a layer of experts, in float64, by hand.

    8192 tokens of 8 features; every token is sent to the k best of E experts; a sum with a fixed vector is the loss.
    """
    draw = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64)  # noqa: E731
    h, t, target = 8, 8192, normal(8)
    x = normal(t, h)
    router = (normal(experts, h) / h).requires_grad_()
    first = (normal(experts, ffn, h) / math.sqrt(h)).requires_grad_()
    second = (normal(experts, h, ffn) / math.sqrt(ffn)).requires_grad_()
    logits = x @ router.T
    best = logits.topk(topk, dim=1).indices
    scores = logits.gather(1, best).sigmoid() if sigmoid else logits.gather(1, best).softmax(dim=1)
    scores = scores / scores.sum(dim=1, keepdim=True)
    of_each = torch.einsum("ehf,tef->teh", second, torch.einsum("efh,th->tef", first, x).relu())
    out = (scores[..., None] * of_each.gather(1, best[..., None].expand(-1, -1, h))).sum(dim=1)
    (out @ target).mean().backward()
    assert router.grad is not None
    assert first.grad is not None
    assert second.grad is not None
    return router.grad, first.grad, second.grad


@pytest.mark.parametrize("sigmoid", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("share", "first"), [("fixed", -1.0), ("falls", -1.0), ("finer", -0.5)])
def test_gradients_in_float64_fall_as_one_over_experts(share: str, first: float, sigmoid: bool) -> None:
    """Whatever k does, a gradient's coordinate goes as 1/E from 8 to 32: what epsilon and SGD's rate are made for.

    `finer`: an expert's FFN falls as 1/E. The first layer's gradient comes through second layers that start with the
    standard deviation FFN^-1/2, which rises as E^1/2.
    """
    found = []
    for experts in (8, 32):
        topk = 2 if share == "falls" else experts // 2
        gradients = layer(experts, topk, 256 // experts if share == "finer" else 16, sigmoid=sigmoid)
        found.append([float(each.abs().mean()) for each in gradients])
    slopes = [math.log2(last / start) / 2 for start, last in zip(*found, strict=True)]
    assert slopes == pytest.approx([-1.0, first, -1.0], abs=0.25)


def family(optimizer: str, experts: int, kind: str) -> Config:
    """A model of 64 features and experts in both layers; at the base 4 experts of which 2 serve a token."""
    keys: dict[str, Any] = {
        "model.num_layers": 2,
        "model.hidden_size": 64,
        "model.moe_layer_freq": 1,
        "model.num_moe_experts": experts,
        "model.moe_router_topk": 2 if kind == "falls" else experts // 2,
        "base": {"num_moe_experts": 4, "moe_router_topk": 2},
        "parametrization.experts": "any_share" if kind == "falls" else "fixed_share",
        "training.clip_grad": 0.0,
        "hparams.weight_decay": 0.0,
        "parallel.engine": "megatron",
        "optimizer.name": optimizer,
        "parallel.use_distributed_optimizer": False,
    }
    if optimizer == "adamw":
        keys["optimizer.eps"] = 1e-2  # above the gradients: what it divides by decides the update
    if kind == "shared":
        keys |= {"model.moe_shared_expert_intermediate_size": 32, "model.moe_shared_expert_gate": True}
    else:
        keys |= {"model.moe_shared_expert_intermediate_size": None, "model.moe_shared_expert_gate": False}
    if kind == "finer":
        keys |= {"model.moe_ffn_hidden_size": 256 // experts, "base": {**keys["base"], "moe_ffn_hidden_size": 64}}
    start = make({**MOE, "base": {"num_moe_experts": 4}}, "llama", parametrization__experts="any_share")
    return resolve(derive(start, keys), 1).config


def slopes_of(ranks: Ranks, optimizer: str, kind: str, *, broken: bool) -> dict[str, float]:
    """Slope of the first update's size from 4 to 32 experts, by kind of tensor."""
    each = [
        ranks.run(1, bodies.expert_updates, config=family(optimizer, experts, kind), broken=broken)[0]
        for experts in (4, 32)
    ]
    return {name: math.log2(each[-1][name] / each[0][name]) / 3 for name in each[0]}


CASES = [
    # An update keeps its size: all of an expert's slopes, and the router's, are 0.
    ("sgd", "fixed", 0.0, 0.0),
    ("adamw", "fixed", 0.0, 0.0),
    ("sgd", "shared", 0.0, 0.0),
    ("adamw", "shared", 0.0, 0.0),
    # An expert sees fewer tokens, whose gradients are noise: (kE)^-1/2 instead of 1/E. So the slope is 0 to 1/2.
    ("sgd", "falls", 0.34, 0.34),
    ("adamw", "falls", 0.26, 0.22),
    # An expert's FFN falls as E^-1: its second layer has the rate of its own fan-in, E; its first a gradient through
    # second layers of standard deviation FFN^-1/2.
    ("sgd", "finer", -0.5, 1.0),
    ("adamw", "finer", -0.5, 1.0),
]


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "kind", "first", "second"), CASES)
def test_updates_over_4_to_32_experts(ranks: Ranks, optimizer: str, kind: str, first: float, second: float) -> None:
    """With the rule an update of experts and router has the size that theory says; without it, about 1/E of that."""
    ruled, broken = (slopes_of(ranks, optimizer, kind, broken=each) for each in (False, True))
    assert (ruled["linear_fc1"], ruled["linear_fc2"]) == pytest.approx((first, second), abs=0.1)
    assert -0.1 < ruled["router"] < 0.5
    # Why it fails without: what is not routed is as before, and what is routed has lost about one power of E.
    assert broken["linear_proj"] == ruled["linear_proj"] == pytest.approx(0.0, abs=0.1)
    for name in ("linear_fc1", "linear_fc2", "router"):
        assert ruled[name] - broken[name] == pytest.approx(1.0, abs=0.05 if optimizer == "sgd" else 0.25), name


@pytest.mark.parametrize(
    ("keys", "key", "problem"),
    [
        ({"base.num_moe_experts": None}, "base.num_moe_experts", "missing; parametrization.experts"),
        ({"parametrization.experts": "none"}, "base.num_moe_experts", "has no rule here"),
        ({"parametrization.experts": "fixed_share"}, "model.moe_router_topk", "1/16 of the experts serve a token"),
        ({"base.num_moe_experts": 1}, "base.num_moe_experts", "2 experts per token of 1"),
        ({"base.moe_router_topk": 1}, "base.moe_router_topk", "no gradient"),
        (
            {"base.moe_router_topk": 1, "model.moe_router_score_function": "sigmoid"},
            "model.moe_router_topk",
            "scores add up to 1; in the base 1, whose scores add up to the one expert's own score",
        ),
        ({"model.moe_router_pre_softmax": True}, "parametrization.experts", "has no rule for scores that add up to"),
        ({"proxy.num_moe_experts": 1}, "proxy.num_moe_experts", "2 experts per token of 1"),
        (
            {"model.moe_router_num_groups": 8, "model.moe_router_group_topk": 1},
            "base.num_moe_experts",
            "cannot be taken in equal parts",
        ),
        (
            {"optimizer.name": "muon", "parallel.engine": "megatron", "parallel.use_distributed_optimizer": False},
            "parametrization.experts",
            "has no rule for Muon",
        ),
        (
            {"optimizer.name": "soap", "parallel.engine": "megatron", "parallel.use_distributed_optimizer": False},
            "parametrization.experts",
            "has no rule for SOAP",
        ),
    ],
)
def test_what_has_no_rule_is_refused(keys: dict[str, Any], key: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as error:
        derive(config_of(32), keys)
    assert error.value.key == key


def test_a_share_that_stays_may_have_scores_of_a_share() -> None:
    keys = {"base.moe_router_topk": 2, "model.moe_router_pre_softmax": True, "parametrization.experts": "fixed_share"}
    assert config_of(32, 16, **keys).experts_ratio == 8


def test_it_is_told_and_part_of_the_family() -> None:
    config = config_of(32)
    told = explain(parametrize(config, VOCABULARY), resolve(config, 1).layout)
    assert told["experts"] == {"rule": "any_share", "m_experts": 8.0}
    assert told["growth"]["num_moe_experts"] == {"base": 4, "target": 32, "follows": None}
    router = next(row for row in told["parameters"] if row["name"] == MLP + "router.weight")
    assert router["eps_multiplier"] == 1 / 8
    mine, more = digested(config), digested(config_of(64))
    assert mine == more
    assert mine["parametrization.experts"] == "any_share"
    assert mine["base.num_moe_experts"] == 4
    assert digested(config_of(32, **{"base.num_moe_experts": 8})) != mine


def test_a_family_without_the_rule_keeps_its_digest() -> None:
    """Records of before there was one say nothing of it."""
    found = digested(make(MOE, "llama"))
    assert not [key for key in found if key in ("parametrization.experts", "base.num_moe_experts")]
    assert "base.moe_router_topk" not in found


def test_a_stability_check_grows_experts() -> None:
    config = config_of(32, 16, **{"base.moe_router_topk": 2, "parametrization.experts": "fixed_share"})
    config = derive(config, {"data.split": "98,2,0"})
    asked = question(config, over="lr", across="experts", values="1e-3,2e-3,4e-3", factors=[1, 4], seeds=1)
    runs = [job.config for job in jobs_of(config, asked).values()]
    assert {(run.model.num_moe_experts, run.model.moe_router_topk) for run in runs} == {(4, 2), (16, 8)}
    assert {run.model.hidden_size for run in runs} == {96}


@pytest.mark.slow
def test_expert_parallel_is_one_process(ranks: Ranks) -> None:
    """Two ranks with half of 16 experts each train as one process with all of them, 4 being the base's."""
    config = derive(config_of(16), {"parallel.engine": "megatron", "training.micro_batch_size": 4})
    alone = ranks.run(1, bodies.train, config=config, steps=10)[0]
    both = ranks.run(2, bodies.train, config=derive(config, {"parallel.expert_model_parallel_size": 2}), steps=10)
    assert both[0]["losses"] == pytest.approx(alone["losses"], abs=2e-5)
    assert both[0]["grad_norms"] == pytest.approx(alone["grad_norms"], rel=1e-4)
    held = {**both[0]["initial"], **both[1]["initial"]}
    assert set(held) == set(alone["initial"])
    assert all(
        torch.equal(torch.as_tensor(held[name]), torch.as_tensor(value)) for name, value in alone["initial"].items()
    )
    groups = {**both[0]["groups"], **both[1]["groups"]}
    assert groups == alone["groups"]
    assert (
        groups[MLP + "experts.local_experts.15.linear_fc2.weight"][1]
        != groups[MLP + "shared_experts.linear_fc2.weight"][1]
    )
