"""Base shapes: in files, both ways; of wrapped and of other models; what is refused where they are set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mup as theirs
import mup.coord_check
import mup.init
import pytest
import torch
from torch import nn

from mup_megatron import mup as ours
from mup_megatron.util.errors import UserError
from tests.helpers import torch_bodies as bodies
from tests.mup.test_mup import tensor

pytestmark = pytest.mark.usefixtures("one_thread")


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
