"""Infinite shapes survive what splits, wraps and replaces parameters: rates are right and losses one process's.

microsoft/mup loses them (its issues 59 and 60): here that is the negative control.
"""

from __future__ import annotations

import copy
import pickle
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo

from mup_megatron import mup
from tests.helpers import torch_bodies as bodies
from tests.helpers.distributed import RankError, Ranks

SLOW = pytest.mark.slow
WAYS = [
    "ddp",
    "fully_shard",
    "fully_shard from meta",
    "tensor",
    pytest.param("tensor, then shapes", marks=SLOW),
    pytest.param("compiled", marks=SLOW),
]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def alone(ranks: Ranks) -> dict[str, Any]:
    return ranks.run(1, bodies.split, how="alone")[0]


def test_the_documented_start_on_the_meta_device(ranks: Ranks, tmp_path: Path) -> None:
    """docs/torch.md, word for word: every tensor gets a value. By hand, at m = 4: hidden matrices 0.02 / sqrt(m)."""
    page = (Path(__file__).parents[2] / "docs" / "torch.md").read_text()
    (sample,) = re.findall(r"((?:    .*\n)+)", page[page.index('    with torch.device("meta"):') :])[:1]
    base = mup.make_base_shapes(bodies.Model(16, 48), bodies.Model(32, 96), tmp_path / "model.bsh")
    assert set(base) == {name for name, _ in bodies.Model(64, 192).named_parameters()}
    code = textwrap.dedent(sample).replace("model.bsh", str(tmp_path / "model.bsh"))
    first, second = ranks.run(2, bodies.documented, code=code.replace('"cuda"', '"cpu"').replace("4096", "64"))
    assert first[0] == second[0]
    values = first[0]
    assert (values["norm.weight"], values["norm.bias"], values["readout.bias"]) == ((1.0, 0.0), (0.0, 0.0), (0.0, 0.0))
    deviations = {name: std for name, (_, std) in values.items() if name.endswith("weight") and name != "norm.weight"}
    assert deviations == {
        "embedding.weight": pytest.approx(0.02, rel=0.1),
        "fc1.weight": pytest.approx(0.01, rel=0.1),
        "fc2.weight": pytest.approx(0.01, rel=0.1),
        "readout.weight": pytest.approx(0.02, rel=0.1),
    }
    assert first[1] == ["audit: 9 tensors, 9 right; 1 multipliers, 1 right"]


@pytest.mark.parametrize("how", WAYS)
def test_split_as_one_process(ranks: Ranks, alone: dict[str, Any], how: str) -> None:
    for result in ranks.run(1 if how == "compiled" else 2, bodies.split, how=how):
        assert result["groups"] == alone["groups"]
        assert result["infshapes"] == alone["infshapes"]
        assert result["losses"] == pytest.approx(alone["losses"], abs=2e-5)
        if "shard" in how or "tensor" in how:
            assert result["local"]["fc1.weight"] == (48, 32)  # it was split


def test_by_hand(alone: dict[str, Any]) -> None:
    """Width 32 over 8, inner 96 over 32: fc1 has m_in 4, fc2 m_in 3."""
    assert alone["groups"]["fc1.weight"] == (1e-2 / 4, 0.1 * 4)
    assert alone["groups"]["fc2.weight"] == (1e-2 / 3, 0.1 * 3.0)
    assert alone["groups"]["readout.weight"] == alone["groups"]["fc1.bias"] == (1e-2, 0.1)


@pytest.mark.parametrize("how", ["fully_shard", pytest.param("tensor", marks=SLOW)])
def test_microsofts_loses_them(ranks: Ranks, how: str) -> None:
    """Negative control: the same body fails with a package whose infinite shapes do not survive."""
    with pytest.raises(RankError, match="infshape"):
        ranks.run(2, bodies.split, how=how, mu="microsoft's")


def test_losses_see_a_wrong_rate(ranks: Ranks, alone: dict[str, Any]) -> None:
    """Negative control: the tolerance above is far below what a lost rate does."""
    net = bodies.model()
    losses = bodies.train(net, torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1), 6)
    assert max(abs(a - b) for a, b in zip(losses, alone["losses"], strict=True)) > 1e-2


def shapes_of(net: torch.nn.Module) -> list[Any]:
    return [parameter.infshape for parameter in net.parameters()]


@pytest.mark.parametrize(
    "change",
    [
        copy.deepcopy,
        lambda net: pickle.loads(pickle.dumps(net)),  # noqa: S301
        lambda net: net.to(torch.bfloat16),
        lambda net: net.to("meta").to_empty(device="cpu"),
    ],
    ids=["deepcopy", "pickle", "dtype", "to_empty"],
)
def test_replaced_parameters_keep_them(change: Any) -> None:
    net = bodies.model()
    expected = shapes_of(net)
    changed = change(net)
    assert shapes_of(changed) == expected
    assert changed.readout.width_mult() == 4
    assert [group["lr"] for group in mup.MuAdam(changed.parameters(), lr=1.0).param_groups] == [1 / 4, 1 / 3, 1.0]


def test_assigned_weights_keep_them() -> None:
    net = bodies.model()
    old = net.fc1.weight
    net.load_state_dict({name: value.clone() for name, value in net.state_dict().items()}, assign=True)
    assert net.fc1.weight is not old
    assert net.fc1.weight.infshape == old.infshape


def test_a_copy_loses_microsofts() -> None:
    """Negative control."""
    import mup as microsofts

    assert not hasattr(copy.deepcopy(bodies.model(microsofts)).fc1.weight, "infshape")


@torch._dynamo.config.patch(disable=False)  # which the quick suite sets
def test_compiled_without_a_break() -> None:
    """One graph, no recompilation over steps, and the same numbers."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    net = bodies.model()
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    losses = bodies.train(compiled, mup.MuAdamW(net.parameters(), lr=1e-2), 5)
    net = bodies.model()
    assert losses == bodies.train(net, mup.MuAdamW(net.parameters(), lr=1e-2), 5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@torch._dynamo.config.patch(disable=False)  # which the quick suite sets
def test_shapes_of_a_compiled_model() -> None:
    """Names of wrappers do not count."""
    net = bodies.Model(32, 96)
    compiled: Any = torch.compile(net)
    mup.set_base_shapes(compiled, bodies.Model(8, 32), delta=bodies.Model(16, 64))
    assert net.fc1.weight.infshape == bodies.model().fc1.weight.infshape
