"""Factors of single tensors of a plain torch model: rates, decays, initial values by hand; in DeepSpeed; bad input."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
from torch import nn

from mup_megatron import mup
from mup_megatron.mup import init
from mup_megatron.mup.in_place import split_in_place
from mup_megatron.util.errors import UserError
from tests.helpers import torch_bodies as bodies
from tests.helpers.distributed import Ranks
from tests.helpers.torch_bodies import DECAY, EPS, LR

pytestmark = pytest.mark.usefixtures("one_thread")

FACTORS: dict[str, Any] = {
    "embedding": {"lr": 4.0},
    "hidden": {"lr": 0.5, "init": 2.0},
    "fc1.*": {"weight_decay": 3.0, "lr": 8.0},
    "readout": {"init": 0.25},
    "gains": {"lr": 2.0},
    "biases": {"weight_decay": 0.0},
}
# Width 32 over 8 (4), inner 96 over 32 (3): Adam's rate 1/m_in for matrices inside, decay the inverse of that.
RULES = {
    "embedding.weight": (4 * LR, DECAY),
    "fc1.weight": (8 * 0.5 * LR / 4, 3 * DECAY * 4),
    "fc1.bias": (8 * LR, 0.0),
    "fc2.weight": (0.5 * LR / 3, DECAY * 3),
    "fc2.bias": (LR, 0.0),
    "norm.weight": (2 * LR, DECAY),
    "norm.bias": (LR, 0.0),
    "readout.weight": (LR, DECAY),
    "readout.bias": (LR, 0.0),
}


def optimizer_of(net: nn.Module, how: str) -> Any:
    keys: dict[str, Any] = {"lr": LR, "weight_decay": DECAY, "eps": EPS}
    if how == "MuAdamW":
        return mup.MuAdamW(net.parameters(), **keys)
    optimizer = torch.optim.AdamW(net.parameters(), **keys)
    split_in_place(net, optimizer)
    return optimizer


def check_rates(net: nn.Module, optimizer: Any) -> None:
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in net.named_parameters():
        group = groups[id(parameter)]
        assert (group["lr"], group["weight_decay"]) == pytest.approx(RULES[name]), f"{name}: another rate than by hand"
        assert group["lr_multiplier"] == pytest.approx(RULES[name][0] / LR)


@pytest.mark.parametrize("how", ["MuAdamW", "in place"])
def test_rates_and_decays_by_hand(how: str) -> None:
    net = bodies.model()
    found = mup.set_per_tensor(net, FACTORS)
    check_rates(net, optimizer_of(net, how))
    assert (found["fc1.weight"].lr, found["fc1.weight"].weight_decay, found["fc1.weight"].init) == (4.0, 3.0, 2.0)
    assert set(found) == set(RULES)


def test_factors_that_are_dropped_are_noticed() -> None:
    """Negative control: the groups of a model without them; the first tensor that is wrong is named."""
    net = bodies.model()
    optimizer = optimizer_of(net, "MuAdamW")
    with pytest.raises(AssertionError, match=r"embedding\.weight: another rate than by hand"):
        check_rates(net, optimizer)


def test_sgd_by_hand() -> None:
    """A hidden matrix has m_out/m_in, 3/4 and 4/3; vectors their own ratio."""
    net = bodies.model()
    mup.set_per_tensor(net, {"fc?.weight": {"lr": 2.0}, "norm.*": {"lr": 0.5}})
    rates = {id(p): group["lr"] for group in mup.MuSGD(net.parameters(), lr=0.1).param_groups for p in group["params"]}
    found = {name: rates[id(p)] for name, p in net.named_parameters()}
    assert found["fc1.weight"] == pytest.approx(0.1 * 3 / 4 * 2)
    assert found["fc2.weight"] == pytest.approx(0.1 * 4 / 3 * 2)
    assert found["norm.weight"] == found["norm.bias"] == pytest.approx(0.1 * 4 * 0.5)
    assert found["embedding.weight"] == pytest.approx(0.1 * 4)


def test_initial_values() -> None:
    """Those that are there are multiplied, and those that are drawn again have the deviation."""
    plain, net = bodies.model(), bodies.model()
    mup.set_per_tensor(net, FACTORS)
    factors = {"fc1.weight": 2.0, "fc2.weight": 2.0, "readout.weight": 0.25}
    for (name, theirs), ours in zip(plain.named_parameters(), net.parameters(), strict=True):
        assert torch.equal(ours, theirs * factors.get(name, 1.0)), name
    drawn = []
    for each in (plain, net):
        torch.manual_seed(5)
        drawn.append(init.normal_(each.get_parameter("fc2.weight"), std=0.5).detach().clone())
    assert torch.equal(drawn[1], 2 * drawn[0])


def test_weights_of_a_checkpoint_stay() -> None:
    net = bodies.model()
    before = copy.deepcopy(net.state_dict())
    mup.set_per_tensor(net, FACTORS, rescale=False)
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    check_rates(net, optimizer_of(net, "MuAdamW"))


def test_at_one_nothing_changes() -> None:
    """To the last bit, and in the same groups."""
    plain, net = bodies.model(), bodies.model()
    mup.set_per_tensor(net, {"hidden": {}, "*": {"lr": 1.0}})
    ours, theirs = optimizer_of(net, "MuAdamW"), optimizer_of(plain, "MuAdamW")
    kept = ("lr", "weight_decay", "lr_multiplier")
    assert [[g[key] for key in kept] for g in ours.param_groups] == [
        [g[key] for key in kept] for g in theirs.param_groups
    ]
    assert bodies.train(net, ours, 4) == bodies.train(plain, theirs, 4)


def test_they_stay_when_the_model_is_copied() -> None:
    net = bodies.model()
    mup.set_per_tensor(net, FACTORS)
    copied = copy.deepcopy(net)
    copied.to_empty(device="cpu")
    check_rates(copied, optimizer_of(copied, "in place"))


@pytest.mark.parametrize(("stage", "how"), [(1, "config"), pytest.param(3, "optimizer", marks=pytest.mark.slow)])
def test_in_deepspeed(ranks: Ranks, stage: int, how: str) -> None:
    """On two ranks of the real engine: one process's losses, and first updates of each tensor's own rate.

    Adam's first update is the rate, since its epsilon is far below the largest gradient; decay adds rate · decay ·
    value to it, and values are below 4.
    """
    net = bodies.model()
    mup.set_per_tensor(net, FACTORS)
    losses = bodies.train(net, optimizer_of(net, "in place"), 6)
    for result in ranks.run(2, bodies.in_deepspeed, stage=stage, how=how, factors=FACTORS):
        assert result["losses"] == pytest.approx(losses, rel=1e-5)
        for name, update in result["updates"].items():
            lr, decay = RULES[name]
            assert lr * 0.9 < update < lr * (1 + 4 * decay) * 1.01, name
    plain = ranks.run(2, bodies.in_deepspeed, stage=stage, how=how)[0]
    assert plain["losses"] != pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        ({"attention": {"lr": 2.0}}, "per_tensor.attention: expected one of embedding, hidden, .* no kind of a plain"),
        (
            {"hiden": {"lr": 2.0}},
            "per_tensor.hiden: expected one of embedding, hidden, readout, router, gains, biases, or a",
        ),
        ({"*.query.*": {"lr": 2.0}}, r"per_tensor.\*.query.\*: names no parameter of this model"),
        ({"hidden": {"lr": -1.0}}, "per_tensor.hidden.lr: Input should be greater than 0; expected numbers above 0"),
        ({"hidden": {"rate": 1.0}}, "per_tensor.hidden.rate: Extra inputs are not permitted"),
        ({"hidden": 2.0}, "per_tensor.hidden: expected numbers above 0"),
        ({"gains": {"init": 2.0}}, "per_tensor.gains.init: 2: their initial values are constants; expected 1"),
        ({"norm.*": {"init": 2.0}}, r"per_tensor.norm.\*.init: 2: their initial values are constants; expected 1"),
    ],
)
def test_bad_input(entries: dict[str, Any], sentence: str) -> None:
    """Nothing has been changed then."""
    net = bodies.model()
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(UserError, match=sentence):
        mup.set_per_tensor(net, {"fc1.weight": {"init": 2.0}, **entries})
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert mup.get_infshapes(net)["fc1.weight"].per_tensor is None


def test_bad_moments() -> None:
    with pytest.raises(UserError, match="no infinite shape"):
        mup.set_per_tensor(nn.Linear(2, 2), {"*": {"lr": 2.0}})
    net = bodies.model()
    mup.set_per_tensor(net, {"hidden": {"init": 2.0}})
    with pytest.raises(UserError, match=r"fc1\.weight has factors already; expected one call, with every entry"):
        mup.set_per_tensor(net, {"embedding": {"lr": 2.0}})


def test_a_tied_readout_is_the_embedding() -> None:
    class Tied(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.embedding = nn.Embedding(16, width)
            self.readout = mup.MuSharedReadout(cast(nn.Parameter, self.embedding.weight), bias=False)

    net = Tied(32)
    mup.set_base_shapes(net, Tied(8), delta=Tied(16))
    with pytest.raises(
        UserError, match=r"per_tensor\.readout: names no parameter of this model; a tied head is the embed"
    ):
        mup.set_per_tensor(net, {"readout": {"lr": 2.0}})
    assert set(mup.set_per_tensor(net, {"embedding": {"lr": 2.0}})) == {"embedding.weight"}
