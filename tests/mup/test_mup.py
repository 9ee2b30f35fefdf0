"""mup_megatron.mup against microsoft/mup, whose names it takes: same groups, same init, same losses to the last bit."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import mup as theirs
import mup.coord_check
import mup.init
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import orthogonal, weight_norm

from mup_megatron import mup as ours
from mup_megatron.mup import coord_check
from mup_megatron.rules import formulas
from mup_megatron.util.errors import UserError
from tests.helpers import torch_bodies as bodies

OPTIMIZERS = ["MuAdam", "MuAdamW", "MuSGD"]
RATES = {"MuAdam": 1e-2, "MuAdamW": 1e-2, "MuSGD": 0.1}


pytestmark = pytest.mark.usefixtures("one_thread")


class Convolutions(nn.Module):
    """A convolution, a shared readout, and tensors without a growing dimension."""

    def __init__(self, width: int, mu: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, width)
        self.conv1, self.conv2 = nn.Conv1d(width, 2 * width, 3, padding=1), nn.Conv1d(2 * width, width, 3, padding=1)
        self.readout = mu.MuSharedReadout(self.embedding.weight, bias=False)
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x).transpose(-1, -2)
        return self.temperature * self.readout(self.conv2(torch.tanh(self.conv1(x))).transpose(-1, -2))


def convolutions(mu: Any, width: int = 48) -> nn.Module:
    torch.manual_seed(3)
    result = Convolutions(width, mu)
    mu.set_base_shapes(result, Convolutions(16, mu), delta=Convolutions(32, mu))
    mu.init.normal_(result.embedding.weight, std=0.5)
    return result


MODELS = {"block": bodies.model, "convolutions": convolutions}


def run(mu: Any, kind: str, name: str, build: Any = None) -> tuple[list[float], list[Any], list[np.ndarray]]:
    """Losses of 20 steps, groups, and weights afterwards."""
    net = (build or MODELS[kind])(mu)  # type: ignore[operator]
    decay = 0.0 if name == "MuAdam" else 0.1  # Adam adds it to the gradient, which is refused here
    optimizer = getattr(mu, name)(net.parameters(), lr=RATES[name], weight_decay=decay)
    names = {id(parameter): key for key, parameter in net.named_parameters()}
    groups = [
        (group["lr"], group["weight_decay"], [names[id(p)] for p in group["params"]])
        for group in optimizer.param_groups
    ]
    losses = bodies.train(net, optimizer, 20)
    return losses, groups, [parameter.detach().numpy() for parameter in net.parameters()]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", list(MODELS))
def test_groups_and_losses(kind: str, name: str) -> None:
    """Default init, rescaled; ratios 4 and 3, both growing at rates of their own."""
    ours_losses, ours_groups, ours_weights = run(ours, kind, name)
    losses, groups, weights = run(theirs, kind, name)
    assert ours_groups == groups
    assert ours_losses == losses
    for a, b in zip(ours_weights, weights, strict=True):
        np.testing.assert_array_equal(a, b)
    assert losses[-1] < losses[0]


class _Torchs(ModuleType):
    """A package of torch's own optimizers over our layers: what a script has that forgot one of the three."""

    MuAdam, MuAdamW, MuSGD = torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_losses_see_each_part(name: str) -> None:
    """Negative control: without the optimizer, the readout's multiplier or the rescaled init, other losses."""
    expected = run(theirs, "block", name)[0]
    assert run(_Torchs("torchs"), "block", name, lambda _: bodies.model())[0] != expected

    def no_multiplier(mu: Any) -> nn.Module:
        net = bodies.model(mu)
        net.readout._width_mult = 1.0
        return net

    def no_rescaling(mu: Any) -> nn.Module:
        torch.manual_seed(0)
        small, delta = bodies.Model(8, 32), bodies.Model(16, 64)
        torch.manual_seed(0)
        return mu.set_base_shapes(bodies.Model(32, 96), small, delta=delta, rescale_params=False)

    assert run(ours, "block", name)[0] == expected
    assert run(ours, "block", name, no_multiplier)[0] != expected
    assert run(ours, "block", name, no_rescaling)[0] != expected


def test_groups_given_by_hand() -> None:
    """Groups keep their own rate, decay and other keys, and are split each."""

    def groups(mu: Any) -> list[Any]:
        net = bodies.model(mu)
        parts = [
            {"params": list(net.fc1.parameters()), "lr": 3e-3, "betas": (0.8, 0.9)},
            {"params": [*net.fc2.parameters(), *net.readout.parameters()], "weight_decay": 0.0},
        ]
        optimizer = mu.MuAdamW(parts, lr=1e-3, weight_decay=0.2)
        return [
            (g["lr"], g["weight_decay"], g["betas"], [tuple(p.shape) for p in g["params"]])
            for g in optimizer.param_groups
        ]

    assert groups(ours) == groups(theirs)
    assert groups(ours)[0] == (3e-3 / 4, 0.2 * 4, (0.8, 0.9), [(96, 32)])


@pytest.mark.parametrize(
    ("impl", "keys", "match"),
    [
        (torch.optim.Adam, {"weight_decay": 0.1}, "^optimizer: Adam adds its weight decay to the gradient"),
        (torch.optim.RMSprop, {"weight_decay": 0.1}, "^optimizer: RMSprop adds its weight decay to the gradient"),
        (torch.optim.Adafactor, {}, "^optimizer: the step of Adafactor follows the size of whole tensors"),
    ],
)
def test_what_no_rule_holds_for_is_refused(impl: Any, keys: dict[str, Any], match: str) -> None:
    with pytest.raises(UserError, match=match):
        ours.MuAdam(bodies.model(ours).parameters(), impl, lr=0.1, **keys)
    ours.MuAdam(bodies.model(ours).parameters(), torch.optim.NAdam, lr=0.1, decoupled_weight_decay=True, **keys)


def test_another_optimizer() -> None:
    """`impl` makes a µP optimizer of any that is like Adam or SGD."""

    def rates(mu: Any, name: str, impl: Any) -> list[float]:
        return [g["lr"] for g in getattr(mu, name)(bodies.model(mu).parameters(), impl, lr=0.1).param_groups]

    for name, impl, expected in (
        ("MuAdam", torch.optim.RMSprop, [0.025, 0.1 / 3, 0.1]),
        ("MuSGD", torch.optim.ASGD, [0.1 * 3 / 4, 0.1 * 4 / 3, 0.4, 0.1 * 3, 0.1]),
    ):
        assert rates(ours, name, impl) == rates(theirs, name, impl)
        assert rates(ours, name, impl) == pytest.approx(expected)


# --- init ---


def tensor(mu: Any, base: tuple[int, ...], delta: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    result = nn.Parameter(torch.zeros(shape))
    result.infshape = mu.zip_infshapes(mu.zip_infshapes({"w": base}, {"w": delta}), {"w": shape})["w"]
    return result


TENSORS = {
    "input-like": ((16, 10), (32, 10), (64, 10)),
    "output-like": ((10, 16), (10, 32), (10, 64)),
    "hidden": ((16, 32), (32, 64), (64, 512)),
    "convolution": ((8, 4, 3, 3), (16, 8, 3, 3), (32, 64, 3, 3)),
    "fixed": ((8, 4), (8, 4), (8, 4)),
    "base": ((16, 32), (32, 64), (16, 32)),
}
INITS: dict[str, dict[str, Any]] = {
    "normal_": {"std": 0.3},
    "uniform_": {"a": -0.2, "b": 0.2},
    "trunc_normal_": {"std": 0.3},
    "xavier_normal_": {},
    "xavier_uniform_": {"gain": 2.0},
    "kaiming_normal_": {"nonlinearity": "relu"},
    "kaiming_uniform_": {"mode": "fan_out", "a": 0.1},
}


@pytest.mark.parametrize("kind", list(TENSORS))
@pytest.mark.parametrize("name", list(INITS))
def test_init(name: str, kind: str) -> None:
    drawn = []
    for mu in (ours, theirs):
        torch.manual_seed(5)
        drawn.append(getattr(mu.init, name)(tensor(mu, *TENSORS[kind]), **INITS[name]).detach())
    torch.testing.assert_close(*drawn, rtol=1e-6, atol=0)


def test_init_at_the_base_is_torchs() -> None:
    for name, keys in INITS.items():
        drawn = []
        for module, w in ((ours.init, tensor(ours, *TENSORS["base"])), (nn.init, torch.zeros(16, 32))):
            torch.manual_seed(5)
            drawn.append(getattr(module, name)(w, **keys).detach())
        assert torch.equal(*drawn), name


def test_init_off_the_base_is_not_torchs() -> None:
    """Negative control: 16 times the fan-in is a quarter of the standard deviation."""
    hidden = ours.init.normal_(tensor(ours, *TENSORS["hidden"]))
    assert hidden.std().item() == pytest.approx(0.25, rel=0.05)


def test_ones_and_eye() -> None:
    vector = ours.init.ones_(tensor(ours, (4,), (8,), (12,)))
    assert vector.tolist() == [1.0] * 12
    with pytest.raises(UserError, match="2 dimensions grow"):
        ours.init.ones_(tensor(ours, *TENSORS["hidden"]))
    with pytest.raises(UserError, match="2 dimensions grow"):
        ours.init.normal_(tensor(ours, *TENSORS["hidden"]), mean=1.0)
    torch.testing.assert_close(ours.init.eye_(tensor(ours, (4, 3), (8, 3), (5, 3))), torch.eye(5, 3))


# --- where we disagree on purpose (docs/torch.md) ---


class PerHead(nn.Module):
    """Norms over heads and their size, and an embedding, all of whose dimensions grow."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm((width, 2 * width))
        self.root = nn.RMSNorm((width, 2 * width))
        self.embedding = nn.Embedding(4 * width, width)


@pytest.mark.parametrize("optimizer", ["MuAdamW", "MuSGD"])
def test_over_gains_and_rows_nothing_is_summed(optimizer: str) -> None:
    """Heads and their size both grow 4 times. By hand: Adam's rate is the base's, SGD's times m_out: 16, and 4.

    Theirs takes them for matrices, with a fourth of Adam's rate; an init with a mean of its own is then refused.
    """
    rates = {}
    for mu in (ours, theirs):
        net = PerHead(8)
        mu.set_base_shapes(net, PerHead(2), delta=PerHead(4))
        names = {id(parameter): name for name, parameter in net.named_parameters()}
        groups = getattr(mu, optimizer)(net.parameters(), lr=0.1, weight_decay=0.1).param_groups
        rates[mu] = {names[id(each)]: (g["lr"], g["weight_decay"]) for g in groups for each in g["params"]}
        assert bool((net.norm.weight == 1).all())
    gains, rows = (0.1, 0.1) if optimizer == "MuAdamW" else (1.6, 0.4)
    expected = {"norm.weight": gains, "norm.bias": gains, "root.weight": gains, "embedding.weight": rows}
    assert rates[ours] == {name: pytest.approx((rate, 0.1 * 0.1 / rate)) for name, rate in expected.items()}
    assert rates[theirs]["norm.weight"][0] == (0.025 if optimizer == "MuAdamW" else 0.1)
    net = PerHead(8)
    ours.set_base_shapes(net, PerHead(2), delta=PerHead(4))
    assert bool((ours.init.ones_(net.norm.weight) == 1).all())
    assert ours.init.normal_(net.embedding.weight, std=0.3).std().item() == pytest.approx(0.3, rel=0.1)


def test_a_shared_readout_leaves_the_embedding_alone() -> None:
    """Theirs rescales it to grow as the root of the width (their issue 55); its init is to be constant (Table 8)."""

    def std(mu: Any, width: int) -> float:
        torch.manual_seed(0)
        net = Convolutions(width, mu)
        mu.set_base_shapes(net, Convolutions(16, mu), delta=Convolutions(32, mu))
        return net.embedding.weight.std().item()

    assert [std(ours, width) for width in (16, 256)] == pytest.approx([1.0, 1.0], rel=0.1)
    assert [std(theirs, width) for width in (16, 256)] == pytest.approx([1.0, 4.0], rel=0.1)


class Tied(nn.Module):
    """A readout that is given an embedding's weight, or gives it its own; two layers with one weight and bias."""

    def __init__(self, width: int, *, given: bool) -> None:
        super().__init__()
        self.embedding, self.readout = nn.Embedding(50, width), ours.MuReadout(width, 50, bias=False)
        self.q, self.k = nn.Linear(width, width), nn.Linear(width, width)
        self.k.weight, self.k.bias = self.q.weight, self.q.bias
        if given:
            self.readout.weight = self.embedding.weight
        else:
            self.embedding.weight = self.readout.weight


def test_a_readout_with_an_embeddings_weight() -> None:
    """It would multiply the embedding's values by the root of the width; a layer's are multiplied by that."""
    net = Tied(256, given=True)
    before = net.embedding.weight.detach().clone()
    with pytest.raises(UserError, match=r"^readout: has an embedding's weight, .* MuSharedReadout\(embedding\.weight"):
        ours.set_base_shapes(net, Tied(64, given=True), delta=Tied(128, given=True))
    assert torch.equal(net.embedding.weight, before)
    for width in (256, 768, 1024):  # an embedding of GPT-2's deviation, which at 833 has a layer's mean square
        net = Tied(width, given=True)
        nn.init.normal_(net.embedding.weight, std=0.02)
        with pytest.raises(UserError, match=r"^readout: has an embedding's weight"):
            ours.set_base_shapes(net, Tied(64, given=True), delta=Tied(128, given=True))
    net = Tied(256, given=False)
    before = net.readout.weight.detach().clone()
    ours.set_base_shapes(net, Tied(64, given=False), delta=Tied(128, given=False))
    assert torch.allclose(net.embedding.weight, 2 * before)


@pytest.mark.parametrize("rescale_params", [True, "constant"])
def test_what_two_layers_share_is_rescaled_once(rescale_params: Any) -> None:
    """By hand at a ratio of 4: a bias of torch's times 2; a weight of one deviation divided by 2."""
    net = Tied(256, given=False)
    weight, bias = net.q.weight.detach().clone(), net.q.bias.detach().clone()
    ours.set_base_shapes(net, Tied(64, given=False), rescale_params=rescale_params, delta=Tied(128, given=False))
    factors = (1, 2) if rescale_params is True else (0.5, 1)
    assert torch.allclose(net.k.weight, factors[0] * weight)
    assert torch.allclose(net.k.bias, factors[1] * bias)


LAYERS: dict[str, tuple[Callable[[int], nn.Module], str]] = {
    "GRU": (lambda width: nn.GRU(8, width), "torch draws every tensor of this GRU by a size that grows"),
    "LSTMCell": (lambda width: nn.LSTMCell(8, width), "torch draws every tensor of this LSTMCell"),
    "attention": (lambda width: nn.MultiheadAttention(width, 4, kdim=8), "torch draws every tensor of this Multihead"),
    "added": (lambda width: nn.MultiheadAttention(width, 4, add_bias_kv=True), "torch draws every tensor of this Mul"),
    "projected": (lambda width: nn.LSTM(8, width, proj_size=8), r"weight_hr_l0: its input grows with the family"),
    "GRU of a fixed size": (lambda width: nn.GRU(width, 8), r"weight_ih_l0: its input grows"),
    "RNNCell of a fixed size": (lambda width: nn.RNNCell(width, 8), r"weight_ih: its input grows"),
    "attention of a fixed size": (
        lambda width: nn.MultiheadAttention(8, 2, kdim=width, vdim=width),
        r"k_proj_weight: its input grows",
    ),
    "Bilinear": (lambda width: nn.Bilinear(width, width, 5), "there is no rule for a Bilinear that grows"),
    "weight_norm": (lambda width: weight_norm(nn.Linear(width, width)), "its weight is computed, as by weight_norm"),
    "spectral_norm": (lambda width: nn.utils.spectral_norm(nn.Conv1d(width, 8, 3)), "its weight is computed"),
    "of an embedding": (lambda width: weight_norm(nn.Embedding(8, width)), "its weight is computed"),
    "of attention": (lambda width: weight_norm(nn.MultiheadAttention(width, 4), "in_proj_weight"), "its weight is com"),
    "orthogonal": (lambda width: orthogonal(nn.Linear(width, width)), "its weight is computed"),
    "pruned": (lambda width: prune.identity(nn.Linear(width, width), "weight"), "its weight is computed"),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_layers_that_no_rule_rescales(kind: str) -> None:
    make, said = LAYERS[kind]
    nets = [nn.ModuleDict({"layer": make(width)}) for width in (64, 16, 32)]
    with pytest.raises(UserError, match=rf"^layer(: |\.){said}"):
        ours.set_base_shapes(nets[0], nets[1], delta=nets[2])
    if kind in ("GRU", "LSTMCell", "attention", "added"):  # values of one's own
        ours.set_base_shapes(nets[0], nets[1], rescale_params=False, delta=nets[2])
    same = [nn.ModuleDict({"layer": make(16)}) for _ in range(3)]
    ours.set_base_shapes(same[0], same[1], delta=same[2])


def test_attention_as_torch_has_it_is_taken() -> None:
    nets = [nn.ModuleDict({"layer": nn.MultiheadAttention(width, 4)}) for width in (64, 16, 32)]
    ours.set_base_shapes(nets[0], nets[1], delta=nets[2])


def test_a_shared_readout_has_a_bias_per_logit() -> None:
    """Theirs gives it one per feature, so that it only runs without."""
    weight = nn.Parameter(torch.zeros(16, 48))
    assert ours.MuSharedReadout(weight).bias.shape == (16,)
    assert theirs.MuSharedReadout(weight).bias.shape == (48,)


def test_a_dimension_that_nobody_declared() -> None:
    """Theirs takes a size that delta forgot to move for fixed, and trains it in the standard parametrization."""
    args = (lambda mu: bodies.Model(32, 96, mu)), (lambda mu: bodies.Model(8, 32, mu))
    forgot = lambda mu: bodies.Model(16, 32, mu)  # noqa: E731
    model, base = (make(theirs) for make in args)
    theirs.set_base_shapes(model, base, delta=forgot(theirs), do_assert=False)
    model, base = (make(ours) for make in args)
    with pytest.raises(UserError, match=r"fc1\.weight has shape \[96, 32\] here, but neither base nor delta moves"):
        ours.set_base_shapes(model, base, delta=forgot(ours))


# --- base shapes ---


def test_files_both_ways(tmp_path: Path) -> None:
    """A .bsh file of either is the other's."""
    for name, writer in (("ours", ours), ("theirs", theirs)):
        file = str(tmp_path / f"{name}.bsh")
        writer.make_base_shapes(bodies.Model(8, 32, writer), bodies.Model(16, 64, writer), savefile=file)
        for reader in (ours, theirs):
            net = reader.set_base_shapes(bodies.Model(32, 96, reader), file)
            shapes = {key: [(d.base_dim, d.dim) for d in p.infshape] for key, p in net.named_parameters()}
            assert shapes["fc2.weight"] == [(8, 32), (32, 96)]
            assert shapes["embedding.weight"] == [(None, 16), (8, 32)]


def test_a_saved_model(tmp_path: Path) -> None:
    file = tmp_path / "a.bsh"
    net = bodies.model()
    ours.save_base_shapes(net, file)
    again = ours.set_base_shapes(bodies.Model(64, 32), file)
    assert again.fc1.weight.infshape == ours.zip_infshape([32, 8], [32, 64], fin_if_same=False)
    assert ours.load_base_shapes(file)["fc1.weight"].base_shape() == [32, 8]


def test_without_base_nothing_grows() -> None:
    net = ours.set_base_shapes(bodies.Model(32, 96), None)
    assert {parameter.infshape.ninf() for parameter in net.parameters()} == {0}
    assert [group["lr"] for group in ours.MuAdam(net.parameters(), lr=0.1).param_groups] == [0.1]


def test_serialization() -> None:
    shape = bodies.model().fc1.weight.infshape
    assert shape.serialize() == {"base_shape": [32, 8], "shape": [96, 32]}
    assert ours.InfShape.deserialize(shape.serialize()) == shape


def test_wrapped_names() -> None:
    """Names of a model inside DistributedDataParallel, whatever its modules are called."""
    shapes = {
        f"module.{name}": shape for name, shape in ours.get_shapes(nn.ModuleDict({"mod": nn.Linear(2, 4)})).items()
    }
    net = ours.set_base_shapes(nn.ModuleDict({"mod": nn.Linear(4, 8)}), shapes)
    assert dict(net.named_parameters())["mod.weight"].infshape.base_shape() == [4, 2]


def test_another_models_base() -> None:
    net = bodies.Model(32, 96)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    with pytest.raises(UserError, match=r"the base shapes lack embedding\.weight, fc1\.bias, .*; the model lacks 0\."):
        ours.set_base_shapes(net, nn.Sequential(nn.Linear(8, 8)))
    other = bodies.Model(8, 32)
    other.norm = nn.LayerNorm([2, 8])
    with pytest.raises(UserError, match=r"norm\.weight has shape \[32\] here and 2 dimensions in the base"):
        ours.set_base_shapes(net, other)
    assert not any(hasattr(parameter, "infshape") for parameter in net.parameters())
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), before, strict=True))


def test_a_readout_that_is_none() -> None:
    def build(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4))

    net = build(32)
    with pytest.raises(UserError, match=r"^1: its input grows with the family"):
        ours.set_base_shapes(net, build(8), delta=build(16))
    assert not hasattr(net.get_submodule("0").weight, "infshape")
    ours.set_base_shapes(net, build(8), delta=build(16), do_assert=False)
    with pytest.raises(UserError, match=r"^1: its input grows"):
        ours.assert_hidden_size_inf(net)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (nn.Conv1d, r"^1: its input grows with the family .* make it a MuReadout over the channels"),
        (nn.Conv2d, r"^1: its input grows with the family .* make it a MuReadout over the channels"),
        (nn.ConvTranspose2d, r"^1: channels in grow 4 times and channels out 1 times"),
    ],
)
def test_a_convolution_to_a_fixed_number_of_channels(kind: Any, said: str) -> None:
    """As of a linear layer; without the check it would have the rate of an input, under which its updates grow."""

    def build(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(4, width), kind(width, 3, 1))

    net = build(32)
    with pytest.raises(UserError, match=said):
        ours.set_base_shapes(net, build(8), delta=build(16))
    assert not hasattr(net.get_submodule("0").weight, "infshape")
    ours.set_base_shapes(net, build(8), delta=build(16), do_assert=False)
    assert ours.MuAdam(net.parameters(), lr=1.0).param_groups[0]["lr"] == 1.0


def test_transposed_convolutions() -> None:
    """[fan-in, fan-out, ...]: both readings agree where both grow alike. A depthwise one has a fan-in of 1."""

    def build(width: int, inner: int, groups: int = 1) -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, width, 1), nn.ConvTranspose2d(width, inner, 3, groups=groups))

    net = build(32, 64)
    ours.set_base_shapes(net, build(8, 16), delta=build(16, 32))
    rates = {
        id(p): group["lr"] for group in ours.MuAdam(net.parameters(), lr=1.0).param_groups for p in group["params"]
    }
    assert rates[id(net.get_submodule("1").weight)] == 0.25
    with pytest.raises(UserError, match=r"^1: channels in grow 4 times and channels out 2 times; .* both grow alike"):
        ours.set_base_shapes(build(32, 32), build(8, 16), delta=build(16, 32))
    depthwise = build(32, 32, groups=32)
    ours.set_base_shapes(depthwise, build(8, 8, groups=8), delta=build(16, 16, groups=16))
    groups = ours.MuAdam(depthwise.parameters(), lr=1.0).param_groups
    assert {group["lr"] for group in groups if group["params"]} == {1.0}


def test_rescaled_once() -> None:
    net = bodies.model()
    before = net.readout.weight.detach().clone()
    with pytest.raises(UserError, match=r"^fc1: its init was rescaled .* rescale_params=False"):
        ours.set_base_shapes(net, bodies.Model(8, 32), delta=bodies.Model(16, 64))
    ours.set_base_shapes(net, bodies.Model(8, 32), delta=bodies.Model(16, 64), rescale_params=False)
    assert torch.equal(net.readout.weight, before)


def test_no_base_shapes_yet() -> None:
    net = bodies.Model(32, 96)
    for call in (lambda: net(torch.zeros(1, 2, dtype=torch.long)), lambda: ours.MuAdam(net.parameters(), lr=0.1)):
        with pytest.raises(UserError, match=r"of shape \[16, 32\] has no infinite shape; call"):
            call()
    with pytest.raises(UserError, match=r"carries an infinite shape of mup\.infshape"):
        ours.MuAdam(bodies.model(theirs).parameters(), lr=0.1)


def test_three_growing_dimensions() -> None:
    with pytest.raises(UserError, match="w: 3 dimensions grow"):
        ours.MuAdam([tensor(ours, (2, 2, 2), (3, 3, 3), (4, 4, 4))], lr=0.1)


@pytest.mark.parametrize("content", ["!!python/object/apply:os.system ['touch hacked']", "{}", "a: {b: 1}", "a: [1"])
def test_files_of_strangers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.bsh").write_text(content)
    net = bodies.Model(32, 96)
    with pytest.raises(UserError):
        ours.set_base_shapes(net, "x.bsh")
    assert not (tmp_path / "hacked").exists()
    assert not hasattr(net.fc1.weight, "infshape")


# --- the coordinate check ---


class Flat(nn.Module):
    """Logits of every position as samples, as the coordinate check's losses want them."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).flatten(0, 1)


def table(mu: Any, check: Any, **keys: Any) -> Any:
    def lazy(width: int) -> Any:
        return lambda: Flat(bodies.model(mu, torch.initial_seed(), width, 4 * width))

    data = [(x, y.flatten()) for x, y in bodies.batches(4)]
    return check.get_coord_data(
        {width: lazy(width) for width in (16, 64, 256)}, data, nsteps=4, cuda=False, show_progress=False, **keys
    )


@pytest.mark.parametrize(
    "optimizer", ["adam", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sgd", "adamw"))]
)
def test_coordinates(optimizer: str) -> None:
    """The same table as theirs: columns, rows, numbers."""
    keys = {"optimizer": optimizer, "nseeds": 2, "output_fdict": {"l1": "l1", "covl1": "covl1"}}
    a, b = (table(mu, check, **keys) for mu, check in ((ours, coord_check), (theirs, mup.coord_check)))
    assert list(a.columns) == list(b.columns)
    assert a.equals(b)


def slopes(data: Any) -> dict[str, float]:
    """Slope of log-size over log-width after the last step, by module."""
    last = data[data["t"] == data["t"].max()]
    return {
        name: float(np.polyfit(np.log2(rows["width"]), np.log2(rows["l1"]), 1)[0])
        for name, rows in last.groupby("module")
    }


def test_flat_in_mup_alone(tmp_path: Path) -> None:
    """Negative control: with torch's Adam the readout's coordinates grow with width."""
    keys = {"optimizer": "adam", "lr": 3e-2, "nseeds": 2}
    flat = slopes(table(ours, coord_check, **keys))
    growing = slopes(table(ours, coord_check, mup=False, **keys))
    assert max(flat.values()) < 0.2
    assert growing["net.fc2"] > 0.4
    figure = coord_check.plot_coord_data(table(ours, coord_check, **keys), save_to=tmp_path / "a.png", legend=None)
    assert len(figure.axes) == 4
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_coordinates_of_inputs_and_parameters() -> None:
    data = table(ours, coord_check, input_fdict={"l2": "l2"}, param_fdict={"std": "std"})
    assert {"net.fc1", "net.fc1:in[0]", "net.fc1:param[weight]"} <= set(data["module"])
    with pytest.raises(UserError, match="optimizer: 'lion'; expected sgd, adam, adamw"):
        table(ours, coord_check, optimizer="lion")
    with pytest.raises(UserError, match="lossfn: 'hinge'"):
        table(ours, coord_check, lossfn="hinge")
    for fix_data in (True, False):
        with pytest.raises(UserError, match=r"^dataloader: it has no batch; expected at least one"):
            coord_check.get_coord_data({16: lambda: bodies.model()}, [], fix_data=fix_data, cuda=False)


# --- the examples: written for microsoft/mup, with the import line changed ---

EXAMPLES = {"mlp": (64, 160, 1.3), "resnet": (8, 64, 1.5), "transformer": (32, 64, 2.9)}


def example(repository: Path, folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, package: str) -> Any:
    """The script as a module, written for `package`."""
    (folder / package).mkdir()
    for file in ("digits", name):
        text = (repository / "docs" / "examples" / f"{file}.py").read_text()
        (folder / package / f"{file}.py").write_text(text.replace("from mup_megatron.mup ", f"from {package} "))
        sys.modules.pop(file, None)
    monkeypatch.syspath_prepend(folder / package)
    return importlib.import_module(name)


@pytest.mark.parametrize("name", list(EXAMPLES))
def test_an_example_trains(repository: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a loss that it does not reach without training, and under either package to the last bit."""
    width, steps, expected = EXAMPLES[name]
    script = example(repository, tmp_path, name, monkeypatch, "mup_megatron.mup")
    losses = script.train(width, steps)
    assert np.mean(losses[-8:]) < expected
    assert np.mean(script.train(width, 8, lr=0.0)) > expected + 0.5
    script = example(repository, tmp_path, name, monkeypatch, "mup")
    assert script.train(width, 20) == losses[:20]


@pytest.mark.slow
@pytest.mark.parametrize("name", list(EXAMPLES))
def test_an_example_as_a_command(repository: Path, name: str) -> None:
    """One learning rate for three widths: wider is better."""
    result = subprocess.run(
        [sys.executable, f"docs/examples/{name}.py"],
        cwd=repository,
        env={**os.environ, "PYTHONPATH": str(repository)},
        capture_output=True,
        text=True,
        check=True,
    )
    losses = [float(line.split()[-1]) for line in result.stdout.splitlines()]
    assert len(losses) == 3
    assert losses == sorted(losses, reverse=True)


def test_the_readout_takes_a_from_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """A = 1/7 instead of 1/4, from the one place that works A out."""
    monkeypatch.setattr(formulas.Ratios, "forward", property(lambda ratios: Fraction(1, 7 if ratios.readout else 1)))
    base, delta, readout = (ours.MuReadout(width, 3) for width in (8, 16, 32))
    ours.set_base_shapes(readout, base, delta=delta)
    assert readout.width_mult() == 7
