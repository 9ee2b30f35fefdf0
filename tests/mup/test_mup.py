"""mup_megatron.mup against microsoft/mup, whose names it takes: same groups, same init, same losses to the last bit."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
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


@pytest.mark.parametrize("name", list(INITS))
def test_init_of_experts_in_one_tensor(name: str) -> None:
    """[experts, out, in]: torch counts all behind the second dimension as a receptive field, which grows here."""
    base, delta = (4, 32, 64), (4, 64, 128)
    at_base = ours.init.__dict__[name](tensor(ours, base, delta, base), **INITS[name])
    wide = ours.init.__dict__[name](tensor(ours, base, delta, (4, 128, 256)), **INITS[name])
    assert (at_base.std() / wide.std()).item() == pytest.approx(2.0, rel=0.05)  # 4^1/2
    torch.manual_seed(5)
    expected = getattr(nn.init, name)(torch.zeros(base), **INITS[name])
    assert (at_base.std() / expected.std()).item() == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("build", [ours.MuAdam, ours.MuAdamW, ours.MuSGD])
def test_decoupled_wd(build: Any) -> None:
    """Of the head of microsoft/mup's repository: False is what is done here, True is refused."""
    parameter = tensor(ours, *TENSORS["hidden"])
    (group, *_) = build([parameter], lr=0.1, decoupled_wd=False).param_groups
    assert group["lr_multiplier"] == build([parameter], lr=0.1).param_groups[0]["lr_multiplier"]
    with pytest.raises(UserError, match=r"decoupled_wd=True leaves the decay of matrices alone, so that lr · λ falls"):
        build([parameter], lr=0.1, decoupled_wd=True)


def test_ones_and_eye() -> None:
    vector = ours.init.ones_(tensor(ours, (4,), (8,), (12,)))
    assert vector.tolist() == [1.0] * 12
    with pytest.raises(UserError, match="2 dimensions grow"):
        ours.init.ones_(tensor(ours, *TENSORS["hidden"]))
    with pytest.raises(UserError, match="2 dimensions grow"):
        ours.init.normal_(tensor(ours, *TENSORS["hidden"]), mean=1.0)
    torch.testing.assert_close(ours.init.eye_(tensor(ours, (4, 3), (8, 3), (5, 3))), torch.eye(5, 3))


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
