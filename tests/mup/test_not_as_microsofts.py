"""Where we disagree with microsoft/mup on purpose (docs/torch.md), and layers that no rule rescales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mup as theirs
import mup.coord_check
import mup.init
import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import orthogonal, weight_norm

from mup_megatron import mup as ours
from mup_megatron.util.errors import UserError
from tests.helpers import torch_bodies as bodies
from tests.mup.test_mup import Convolutions

pytestmark = pytest.mark.usefixtures("one_thread")


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
