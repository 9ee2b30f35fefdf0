"""`mup_megatron.deepspeed.initialize` on two ranks of the real DeepSpeed, ZeRO 0 to 3."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from mup_megatron import mup
from mup_megatron.deepspeed import initialize
from mup_megatron.deepspeed.optimizer import groups_of_config
from mup_megatron.engines.optim import set_learning_rates
from mup_megatron.mup.in_place import split_in_place
from mup_megatron.util.errors import UserError
from tests.helpers import torch_bodies as bodies
from tests.helpers.configs import MIXED, make
from tests.helpers.distributed import RankError, Ranks
from tests.helpers.torch_bodies import ADAMW, DECAY, EPS, LR

STEPS = 6
SLOW = pytest.mark.slow


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """Plain torch, one process, the same groups."""
    net = bodies.model()
    before = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR, weight_decay=DECAY, eps=EPS)
    split_in_place(net, optimizer)
    losses = bodies.train(net, optimizer, 1)
    updates = {name: (p - before[name]).abs().max().item() for name, p in net.named_parameters()}
    net = bodies.model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR, weight_decay=DECAY, eps=EPS)
    split_in_place(net, optimizer)
    losses = bodies.train(net, optimizer, STEPS)
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    rules = {
        n: (groups[id(p)]["lr"], groups[id(p)]["eps"], groups[id(p)]["weight_decay"]) for n, p in net.named_parameters()
    }
    return {"losses": losses, "updates": updates, "rules": rules}


def test_rules_by_hand(alone: dict[str, Any]) -> None:
    """Width 32 over 8 (4), inner 96 over 32 (3): Adam 1/m_in, epsilon A/m_out, decay 1 over the rate's multiplier."""
    expected = {
        "embedding.weight": (LR, EPS / 4, DECAY),
        "fc1.weight": (LR / 4, EPS / 3, DECAY * 4),
        "fc1.bias": (LR, EPS / 3, DECAY),
        "fc2.weight": (LR / 3, EPS / 4, DECAY * 3),
        "fc2.bias": (LR, EPS / 4, DECAY),
        "norm.weight": (LR, EPS / 4, DECAY),
        "norm.bias": (LR, EPS / 4, DECAY),
        "readout.weight": (LR, EPS / 4, DECAY),
        "readout.bias": (LR, EPS, DECAY),
    }
    assert alone["rules"].keys() == expected.keys()
    for name, numbers in expected.items():
        assert alone["rules"][name] == pytest.approx(numbers), name


@pytest.mark.parametrize(("stage", "how"), [(0, "optimizer"), (1, "config"), (2, "function"), (3, "optimizer")])
def test_as_plain_torch(ranks: Ranks, alone: dict[str, Any], stage: int, how: str) -> None:
    for result in ranks.run(2, bodies.in_deepspeed, stage=stage, how=how):
        assert result["losses"] == pytest.approx(alone["losses"], abs=2e-5)
        assert result["updates"] == pytest.approx(alone["updates"], rel=1e-3)
        rules = {(g["lr"], g["eps"], g["weight_decay"]) for g in result["groups"]}
        assert rules == set(alone["rules"].values())
        for rates in result["rates"]:
            assert sorted(set(rates)) == pytest.approx([LR / 4, LR / 3, LR])


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("how", ["optimizer", "function", "config"])
def test_every_way_at_every_stage(ranks: Ranks, alone: dict[str, Any], stage: int, how: str) -> None:
    test_as_plain_torch(ranks, alone, stage, how)


@pytest.mark.parametrize(("stage", "how"), [(1, "MuAdamW"), pytest.param(3, "config's MuAdamW", marks=SLOW)])
def test_groups_that_are_in_mup_already(ranks: Ranks, stage: int, how: str) -> None:
    """Not scaled twice, epsilon as microsoft/mup has it."""
    net = bodies.model()
    losses = bodies.train(net, mup.MuAdamW(net.parameters(), lr=LR, weight_decay=DECAY, eps=EPS), STEPS)
    for result in ranks.run(2, bodies.in_deepspeed, stage=stage, how=how):
        assert result["losses"] == pytest.approx(losses, abs=2e-5)
        assert {group["eps"] for group in result["groups"]} == {EPS}


@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=SLOW)])
def test_deepspeeds_own_loses_the_rates(ranks: Ranks, alone: dict[str, Any], stage: int) -> None:
    """Negative control: the same arguments, without the import changed."""
    for result in ranks.run(2, bodies.in_deepspeed, stage=stage, plain=True):
        assert {rate for rates in result["rates"] for rate in rates} == {LR}
        assert abs(result["losses"][-1] - alone["losses"][-1]) > 1e-2
        assert result["updates"]["fc1.weight"] > 2 * alone["updates"]["fc1.weight"]


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=SLOW)])
def test_rates_survive_a_checkpoint(ranks: Ranks, alone: dict[str, Any], tmp_path: Path, stage: int) -> None:
    """DeepSpeed's own; groups that are not ours are noticed."""
    for result in ranks.run(2, bodies.resumed, stage=stage, folder=str(tmp_path)):
        assert result["losses"] == pytest.approx(alone["losses"][:4], abs=2e-5)
        assert result["rates"] == [pytest.approx([LR / 4, LR / 3, LR])] * 2
        assert "one has no multiplier" in result["said"]


@pytest.mark.parametrize("stage", [1, pytest.param(0, marks=SLOW), pytest.param(3, marks=SLOW)])
def test_a_checkpoint_of_other_base_shapes(ranks: Ranks, tmp_path: Path, stage: int) -> None:
    """The weights fit, and compute something else; a checkpoint says of which base they are."""
    refused = r"embedding.weight: its base shape is \[None, 8\] in the checkpoint and \[None, 16\] in the model"
    for kept, whole, *said in ranks.run(2, bodies.other_base, stage=stage, folder=str(tmp_path)):
        assert (kept, whole) == (["mine"], ["mine"])
        assert [bool(re.search(refused, one)) for one in said] == [True, True], said


# --- schedules ---


def schedule(kind: str, **keys: Any) -> dict[str, Any]:
    return {"type": kind, "params": keys}


SCHEDULES: dict[str, tuple[dict[str, Any], list[float] | None]] = {
    "WarmupLR": ({"warmup_max_lr": LR, "warmup_num_steps": 4, "warmup_type": "linear"}, [0, 0, 1 / 4, 2 / 4, 3 / 4, 1]),
    # As Hugging Face's Trainer fills it: from 0 to the optimizer's rate.
    "auto": (
        {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": 4, "warmup_type": "linear"},
        [0, 0, 1 / 4, 2 / 4, 3 / 4, 1],
    ),
    "WarmupDecayLR": (
        {"warmup_max_lr": LR, "warmup_num_steps": 2, "warmup_type": "linear", "total_num_steps": 6},
        [0, 0, 1 / 2, 1, 3 / 4, 2 / 4],
    ),
    "OneCycle": (
        {"cycle_min_lr": LR / 4, "cycle_max_lr": LR, "cycle_first_step_size": 3, "cycle_momentum": False},
        [1 / 4, 2 / 4, 3 / 4, 1, 3 / 4, 2 / 4],
    ),
    "LRRangeTest": (
        {"lr_range_test_min_lr": LR, "lr_range_test_step_size": 1, "lr_range_test_step_rate": 1.0},
        [1, 2, 3, 4, 5, 6],
    ),
    "WarmupCosineLR": ({"warmup_num_steps": 2, "total_num_steps": 100}, None),
    "StepLR": ({"step_size": 2, "gamma": 0.5}, [1, 1, 1 / 2, 1 / 2, 1 / 4, 1 / 4]),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k in ("WarmupDecayLR", "auto") else SLOW) for k in SCHEDULES]
)
def test_schedules_keep_the_ratios(ranks: Ranks, kind: str) -> None:
    """The rates of each group at each step: its multiplier times what the schedule makes of the base rate."""
    keys, factors = SCHEDULES[kind]
    stage = 0 if kind == "StepLR" else 1  # torch's refuse DeepSpeed's wrapper of the optimizer
    scheduler = schedule("WarmupLR" if kind == "auto" else kind, **keys)
    (result,) = ranks.run(1, bodies.in_deepspeed, stage=stage, how="config", scheduler=scheduler)
    multipliers = [group["lr_multiplier"] for group in result["groups"]]
    assert sorted(set(multipliers)) == pytest.approx([1 / 4, 1 / 3, 1])
    for step, rates in enumerate(result["rates"]):
        base = [rate / multiplier for rate, multiplier in zip(rates, multipliers, strict=True)]
        assert base == pytest.approx([base[0]] * len(base))
        if factors is not None:
            assert base[0] == pytest.approx(LR * factors[step], abs=1e-12)


def test_deepspeeds_own_erases_the_ratios(ranks: Ranks) -> None:
    """Negative control: MuAdamW in DeepSpeed's initialize, under one of its schedules."""
    keys = SCHEDULES["WarmupLR"][0]
    (result,) = ranks.run(
        1, bodies.in_deepspeed, stage=1, how="MuAdamW", plain=True, scheduler=schedule("WarmupLR", **keys)
    )
    assert len({group["lr_multiplier"] for group in result["groups"]}) == 3
    assert len(set(result["rates"][-1])) == 1


def scheduled(rank: Any, *, how: str) -> str:
    """A scheduler of the user's; returns what is said against it."""
    from deepspeed.runtime.lr_schedules import WarmupLR

    net = bodies.model()
    ours = how != "object"
    kind = mup.MuAdamW if ours else torch.optim.AdamW
    alone = how == "one rate, a group per tensor"
    if alone:
        kind = torch.optim.AdamW
    optimizer = kind([{"params": [each]} for each in net.parameters()] if alone else net.parameters(), lr=LR)
    scheduler: Any = {
        "function": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        "object": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
        "object in mup": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        "one rate": lambda optimizer: WarmupLR(optimizer, warmup_min_lr=1e-4, warmup_max_lr=LR),
        "one rate, a group per tensor": lambda optimizer: WarmupLR(optimizer, warmup_min_lr=1e-4, warmup_max_lr=LR),
        "one rate, later": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3, eta_min=5e-3),
    }[how]
    try:
        engine, _, _, returned = initialize(
            model=net, optimizer=optimizer, lr_scheduler=scheduler, config=bodies.settings(1, 1)
        )
        for batch in bodies.batches(4):
            engine.backward(bodies.loss_of(engine, batch))
            engine.step()
    except UserError as error:
        return str(error)
    assert returned is engine.lr_scheduler
    rates = sorted({group["lr"] for group in engine.basic_optimizer.param_groups})
    assert rates == pytest.approx([LR / 4 / 5, LR / 3 / 5, LR / 5])
    return ""


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("function", ""),
        pytest.param("object in mup", "", marks=SLOW),
        ("object", "pass a function of the optimizer"),
        ("one rate", "the learning rates are no longer µP's: a group has 0.0001 where its multiplier makes it"),
        (
            "one rate, a group per tensor",
            "the learning rates are no longer µP's: all groups have 0.0001, and their rates",
        ),
        pytest.param("one rate, later", "the learning rates are no longer µP's", marks=SLOW),
    ],
)
def test_schedulers_of_the_users(ranks: Ranks, how: str, message: str) -> None:
    (said,) = ranks.run(1, scheduled, how=how)
    assert message in said
    assert bool(message) == bool(said)


# --- what is partitioned, split, or megatron-core's ---


def test_born_partitioned(ranks: Ranks) -> None:
    """Under deepspeed.zero.Init a parameter is empty; sizes are global, and what is rescaled is its partition."""
    expected = {name: [tuple(dim) for dim in p.infshape] for name, p in bodies.model().named_parameters()}
    for result in ranks.run(2, bodies.born_partitioned):
        assert set(result["local"].values()) == {(0,)}
        assert result["infshapes"] == expected
        assert all(result["equal"].values())
        assert "fc1.weight: ZeRO 3 has partitioned this parameter" in result["message"]
        assert result["said"][""] == ""
        assert "initial values of fc1.weight, fc2.weight do not shrink with width" in result["said"]["fc1 fc2"]
        assert "initial values of readout.weight do not shrink with width" in result["said"]["readout"]


def megatron(**overrides: Any) -> Any:
    keys = {"parallel__tensor_model_parallel_size": 2, "parallel__sequence_parallel": True, "parallel__zero_stage": 1}
    return make(MIXED, "gpt3", **{**keys, **overrides})


def test_megatrons_layers(ranks: Ranks) -> None:
    """Rates, epsilons and decays are the parametrization's, and losses one process's, under TP 2 with SP."""
    from mup_megatron.data.prepare import prepare

    config = megatron()
    prepare(config)
    whole = megatron(parallel__tensor_model_parallel_size=1, parallel__sequence_parallel=False)
    (one,) = ranks.run(1, bodies.megatrons, config=whole)
    for result in [one, *ranks.run(2, bodies.megatrons, config=config)]:
        assert result["losses"] == pytest.approx(one["losses"], abs=2e-5)
        for name, rule in result["rules"].items():
            assert rule == pytest.approx(result["expected"][name]), name


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"mpu": False}, "mpu: missing; .* split over 2 tensor-parallel"),
        ({"hooked": True}, "has gradient hooks already"),
    ],
)
def test_megatrons_layers_gone_wrong(ranks: Ranks, keys: dict[str, bool], message: str) -> None:
    for result in ranks.run(2, bodies.megatrons, config=megatron(), **keys):
        assert re.search(message, result["said"])


# --- what is refused, before anything is built ---


def parameters_of(net: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in net.parameters()]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"bf16": {"enabled": True}}, r"^zero_optimization\.stage: DeepSpeed's bf16 without ZeRO takes a wrong first"),
        ({"fp16": {"enabled": True}}, r"^zero_optimization\.stage: DeepSpeed's fp16 without ZeRO takes a wrong first"),
        (
            {"torch_autocast": {"enabled": True, "dtype": "float16"}, "zero_optimization": {"stage": 1}},
            r"^torch_autocast\.dtype: at ZeRO 1 DeepSpeed clips gradients that the loss scale is still in",
        ),
        (
            {"optimizer": {"type": "MuAdamW", "params": {"lr": 1.0, "torch_adam": True}}},
            r"^optimizer\.params of MuAdamW: .* unexpected keyword argument 'torch_adam'",
        ),
        (
            {"optimizer": {"type": "Lamb", "params": {"lr": 1.0}}},
            r"^optimizer\.type: there is no rule for 'Lamb'; expec",
        ),
        ({"optimizer": {"type": "AdamW", "params": {}}}, r"^optimizer\.params\.lr: missing"),
        (
            {"optimizer": {"type": "Adam", "params": {"lr": 1.0, "adam_w_mode": False, "weight_decay": 0.1}}},
            r"^optimizer\.params\.adam_w_mode: false adds weight decay",
        ),
        (
            {"optimizer": ADAMW, "scheduler": schedule("CosineAnnealingLR", T_max=3, eta_min=1e-4)},
            r"^scheduler\.params\.eta_min: one rate for all groups",
        ),
        (
            {"optimizer": ADAMW, "scheduler": schedule("WarmupLR", warmup_max_lr=[1.0, 2.0])},
            r"^scheduler\.params\.warmup_max_lr: 2 rates for 1 groups",
        ),
        (
            {"optimizer": ADAMW, "scheduler": schedule("WarmupLR", warmup_num_steps="auto")},
            r"^scheduler\.params\.warmup_num_steps: \"auto\" is for Hugging Face's Trainer, .*; expected the number$",
        ),
        (
            {"optimizer": ADAMW, "scheduler": schedule("StepLR", gamma="auto")},
            r"^scheduler\.params\.gamma: \"auto\" is",
        ),
        (
            {"optimizer": ADAMW, "scheduler": schedule("OneCycle", cycle_min_lr="auto", cycle_max_lr=1.0)},
            r"^scheduler\.params\.cycle_min_lr: \"auto\" is for",
        ),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, r"^optimizer\.params\.lr: \"auto\" is for"),
    ],
)
def test_configs_that_are_refused(keys: dict[str, Any], message: str) -> None:
    config = bodies.settings(0, 1, **keys)
    before = json.dumps(config)
    with pytest.raises(UserError, match=message):
        initialize(model=bodies.model(), config=config)
    assert json.dumps(config) == before


def test_l2_of_a_group_alone_is_refused() -> None:
    net = bodies.model()
    adam = {"type": "Adam", "params": {"lr": 1.0, "adam_w_mode": False}}
    with pytest.raises(UserError, match=r"^optimizer\.params\.adam_w_mode: false adds weight decay"):
        initialize(
            model=net,
            model_parameters=[{"params": list(net.parameters()), "weight_decay": 0.1}],
            config=bodies.settings(0, 1, optimizer=adam),
        )


@pytest.mark.parametrize(
    ("kind", "keys", "decay"),
    [
        ("AdamW", {"torch_adam": True}, 0.01),
        ("Adam", {"torch_adam": True}, 0.01),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, 0.0),
        ("AdamW", {}, 0.0),
        ("AdamW", {"torch_adam": True, "weight_decay": 0.0}, 0.0),
    ],
)
def test_a_decay_that_the_config_does_not_say(kind: str, keys: dict[str, Any], decay: float) -> None:
    """As DeepSpeed would have it: torch.optim.AdamW has a decay where it is told none, DeepSpeed's own have not."""
    assert torch.optim.AdamW([torch.zeros(1)]).defaults["weight_decay"] == 0.01
    settings = {"optimizer": {"type": kind, "params": {"lr": LR, **keys}}}
    _, groups = groups_of_config(bodies.model(), settings, None)
    assert [group["lr"] * group["weight_decay"] for group in groups] == pytest.approx([LR * decay] * len(groups))


@pytest.mark.parametrize("kind", ["AdamW", "MuAdamW"])
def test_groups_of_iterators(kind: str) -> None:
    """`model.parameters()`, as torch's documentation has it, can be gone through once."""
    net = bodies.model()
    rest = [each for name, each in net.named_parameters() if not name.startswith("readout")]
    given = [{"params": iter(rest)}, {"params": net.readout.parameters(), "lr": 2 * LR}]
    settings = {"optimizer": {"type": kind, "params": {"lr": LR}}}
    _, groups = groups_of_config(net, settings, iter(given))
    found = {id(parameter): group["lr"] for group in groups for parameter in group["params"]}
    assert found.keys() == {id(parameter) for parameter in net.parameters()}
    assert found[id(net.readout.weight)] == 2 * LR


@pytest.mark.parametrize(("stage", "client"), [(0, False), (1, False), (1, True), (2, False)])
def test_frozen_parameters_are_in_no_group(ranks: Ranks, stage: int, client: bool) -> None:
    """DeepSpeed leaves them out, and the audit, which stopped the run at ZeRO 1 and above, does not look for them.

    The frozen layer's weight has a rate of its own: a group of it alone, with which ZeRO cannot begin.
    """
    for moved in ranks.run(2, bodies.half_frozen, stage=stage, client=client):
        assert moved == {name: not name.startswith("fc1") for name in moved}


class AdamW(torch.optim.Optimizer):
    """As GaLore's is named, which steps in a subspace of the gradient."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})


def cpu_adagrad(parameters: Any) -> Any:
    """DeepSpeed's, whose kernel adds the decay to the gradient; without building that kernel."""
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad

    optimizer = object.__new__(DeepSpeedCPUAdagrad)
    torch.optim.Optimizer.__init__(optimizer, parameters, {"lr": LR, "eps": 1e-10, "weight_decay": 0.1})
    return optimizer


class Unruly(torch.optim.SGD):
    """Ours has a rule by its parent."""


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda p: torch.optim.Adafactor(p, lr=LR),
            r"^optimizer: there is no rule for Adafactor of torch\..*; expected one of Adagrad",
        ),
        (lambda p: AdamW(p, lr=LR), r"^optimizer: there is no rule for AdamW of tests\..*; expected one of Adagrad"),
        (cpu_adagrad, "^optimizer: DeepSpeedCPUAdagrad adds its weight decay to the gra"),
        (
            lambda p: torch.optim.Adam(p, lr=LR, weight_decay=0.1),
            "^optimizer: Adam adds its weight decay to the gra",
        ),
    ],
)
def test_optimizers_that_are_refused(build: Any, message: str) -> None:
    net = bodies.model()
    optimizer = build(net.parameters())
    with pytest.raises(UserError, match=message):
        initialize(model=net, optimizer=optimizer, config=bodies.settings(0, 1))
    assert len(optimizer.param_groups) == 1
    assert optimizer.param_groups[0]["lr"] == LR


def test_an_optimizer_that_has_stepped() -> None:
    net = bodies.model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR)
    bodies.train(net, optimizer, 1)
    with pytest.raises(UserError, match="AdamW has state already"):
        initialize(model=net, optimizer=optimizer, config=bodies.settings(0, 1))


def test_what_is_split_in_place() -> None:
    """Groups keep their own keys; SGD's rule holds for what derives from it; decoupled Adam decays."""
    net = bodies.model()
    groups = [{"params": net.fc1.parameters(), "lr": 0.5}, {"params": net.readout.parameters()}]
    sgd = Unruly(groups, lr=0.1, momentum=0.9)
    split_in_place(net, sgd)
    assert [(g["lr"], g["source"]) for g in sgd.param_groups] == [
        (0.5 * 3 / 4, 0),
        (0.5 * 3, 0),
        (0.1 * 4, 1),
        (0.1, 1),
    ]
    set_learning_rates(sgd, 1.0)
    assert [g["lr"] for g in sgd.param_groups] == pytest.approx([3 / 4, 3, 4, 1])
    adam = torch.optim.Adam(net.parameters(), lr=0.1, weight_decay=0.1, decoupled_weight_decay=True)
    split_in_place(net, adam)
    assert len(adam.param_groups) > 2


def test_models_without_infinite_shapes() -> None:
    with pytest.raises(
        UserError, match=r"no infinite shape on embedding\.weight, .*, \.\.\.; call mup_megatron\.mup\."
    ):
        initialize(model=bodies.Model(32, 96), config=bodies.settings(0, 1, optimizer=ADAMW))
    with pytest.raises(UserError, match=r"^model: missing"):
        initialize(config={})


def test_config_files(tmp_path: Path) -> None:
    net = bodies.model()
    with pytest.raises(UserError, match=r"^config: missing"):
        initialize(model=net)
    for name, content in (("cut.json", '{"a": '), ("list.json", "[1]"), ("none.json", None)):
        if content is not None:
            (tmp_path / name).write_text(content)
        with pytest.raises(UserError, match=rf"{name}: (cannot read the|not a) DeepSpeed config"):
            initialize(model=net, config=tmp_path / name)


def from_arguments(rank: Any, *, path: Path) -> tuple[int, str]:
    """The config comes from --deepspeed_config."""
    import argparse

    arguments = argparse.Namespace(deepspeed_config=str(path), local_rank=rank.local_rank)
    engine, _, _, _ = initialize(arguments, bodies.model())
    return len(engine.basic_optimizer.param_groups), arguments.deepspeed_config


def test_a_config_by_argument(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(bodies.settings(1, 1, optimizer=ADAMW)))
    assert ranks.run(1, from_arguments, path=path) == [(5, str(path))]


@pytest.mark.parametrize(("stage", "optimizer"), [(0, "SGD"), (1, "AdamW")])
def test_a_gate_of_deepspeeds_experts(ranks: Ranks, stage: int, optimizer: str) -> None:
    """It computes with its layer's weight alone: without a multiplier, init and rate are output-like.

    Width 128 over 32: torch draws 1/sqrt(3 * 128), and 1/m is that of the base, 1/sqrt(3 * 32), over 4. Adam's and
    SGD's rates are over 4 (a readout's with its multiplier would be unchanged, and 4 times).
    """
    for result in ranks.run(2, bodies.with_gate, stage=stage, optimizer=optimizer):
        assert result["std"] == pytest.approx((3 * 32) ** -0.5 / 4, rel=0.05)
        if stage == 0:
            assert result["lr"] == [pytest.approx(LR / 4)]
        else:
            assert result["update"] == pytest.approx(LR / 4, rel=0.01)


@pytest.mark.parametrize("kind", ["AdamW", "MuAdamW"])
@pytest.mark.parametrize(("stage", "named"), [(0, False), (0, True), (1, False), (2, True)])
def test_experts_under_the_configs_optimizer(ranks: Ranks, stage: int, named: bool, kind: str) -> None:
    """Groups of one name were merged: experts had the last group's rate, and without names DeepSpeed ended in KeyError.

    microsoft/mup's optimizers are built here, leave epsilon as it is, and ZeRO takes no group of experts and others.

    Width 128 over 32, by hand: hidden matrices have a quarter of rate and epsilon, the input layer the whole rate and a
    quarter of epsilon. The audit, which stops a run of other values, looks at the first step at every stage.
    """
    small = EPS / 4 if kind == "AdamW" else EPS
    for result in ranks.run(2, bodies.experts_of_config, stage=stage, named=named, kind=kind):
        if stage == 0:
            assert len(result) == 19
            for name, (lr, eps) in result.items():
                if "experts" in name:
                    assert (lr, eps) == (pytest.approx(LR / 4), pytest.approx(small)), name
            assert result["first.weight"] == (pytest.approx(LR), pytest.approx(small))


def test_a_gate_that_is_a_readout() -> None:
    """Its forward never runs, and its multiplier with it."""
    model, base, delta = (bodies.Experts(width, gate=mup.MuReadout) for width in (128, 32, 64))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(
        UserError, match=r"moe\.deepspeed_moe\.gate\.wg: deepspeed\.moe computes with this layer's weight"
    ):
        mup.set_base_shapes(model, base, delta=delta)
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


def test_a_gate_that_became_a_readout(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"UserError: moe\.deepspeed_moe\.gate\.wg: deepspeed\.moe computes with"):
        ranks.run(1, bodies.with_gate, stage=0, optimizer="SGD", late=True)
