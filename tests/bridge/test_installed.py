"""`mup_megatron.bridge` on megatron-bridge itself: its container, provider, optimizer and checkpoint manager.

Runs where `import megatron.bridge` works, which needs Transformer Engine (peft/lora_layers.py imports it). A CPU is
enough for the rest: the provider's layers are megatron-core's local ones, and its optimizer is torch's.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mup_megatron.util.errors import UserError
from tests.bridge import bodies
from tests.bridge.importing import with_bridge
from tests.bridge.recipes import BASE, SAME
from tests.helpers.distributed import Ranks


def why_not() -> str | None:
    """Why Bridge cannot be imported here; None where it can."""
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.bridge") is None:
        return "megatron-bridge is not installed"
    try:
        with_bridge()
    except Exception as error:
        return f"megatron-bridge cannot be imported here: {error}"
    return None


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """A pool whose ranks have Bridge."""
    pool = Ranks(with_bridge)
    yield pool
    pool.close()


NOT = why_not()
pytestmark = pytest.mark.skipif(NOT is not None, reason=str(NOT))
MATRIX, WORDS = "decoder.layers.1.mlp.linear_fc1.weight", "embedding.word_embeddings.weight"


def test_at_four_times_the_width(ranks: Ranks) -> None:
    """By hand, and on two ranks as on one; ours over megatron.training's container says the same of every group."""
    (wide,) = ranks.run(1, bodies.trained, recipe="bridge", mup={"base": BASE})
    assert wide["status"] == 0, wide["said"]
    assert wide["groups"][MATRIX]["max_lr"] == pytest.approx(1e-2 / 4)
    assert wide["groups"][MATRIX]["weight_decay"] == pytest.approx(0.1 * 4)
    assert wide["groups"][WORDS]["max_lr"] == pytest.approx(1e-2)
    assert wide["initial"][MATRIX].std() == pytest.approx(0.05 / 4**0.5, rel=0.05)
    for layout in ({}, {"tensor_model_parallel_size": 2}):
        two = ranks.run(2, bodies.trained, recipe="bridge", mup={"base": BASE}, **layout)
        assert [rank["status"] for rank in two] == [0, 0], two[0]["said"]
        if layout:
            assert two[1]["losses"] == pytest.approx(wide["losses"], rel=1e-6)
    (other,) = ranks.run(1, bodies.trained, mup={"base": BASE})
    assert {name: group["max_lr"] for name, group in other["groups"].items()} == {
        name: group["max_lr"] for name, group in wide["groups"].items()
    }
    for name, value in other["initial"].items():
        assert np.array_equal(wide["initial"][name], value), name


def test_at_the_base_it_is_plain_bridge(ranks: Ranks) -> None:
    (ours,) = ranks.run(1, bodies.trained, recipe="bridge", mup={"base": SAME})
    (plain,) = ranks.run(1, bodies.trained, recipe="bridge", initial=ours["initial"])
    assert ours["status"] == plain["status"] == 0, ours["said"]
    assert len(plain["losses"]) == 2 * bodies.STEPS
    assert ours["losses"] == plain["losses"]
    for name, value in plain["final"].items():
        assert np.array_equal(ours["final"][name], value), name


def test_the_guard_on_resume(ranks: Ranks, tmp_path: Path) -> None:
    """The same run goes on; another base, no µP, and a checkpoint without its record do not."""
    folder = str(tmp_path / "checkpoints")
    ways: list[dict[str, Any]] = [
        {"mup": {"base": BASE}},
        {"mup": {"base": BASE}},
        {"mup": {"base": SAME}},
        {"mup": {"base": BASE, "multipliers": {"output_multiplier": 2.0}}},
        {"mup": {"base": BASE, "multipliers": {"output_multiplier": 2.0}, "allow_change": ["hparams"]}},
    ]
    (found,) = ranks.run(1, bodies.resumed, folder=folder, ways=ways)
    assert [status for status, _ in found] == [0, 0, 2, 2, 0], found
    assert "the checkpoint does not belong to this config" in found[2][1]
    assert "hparams.output_multiplier" in found[3][1]
    assert "allow_change=[KEY]" in found[3][1]
    record = tmp_path / "checkpoints" / "iter_0000002" / "mup.json"
    assert '"key_prefix": "mup_megatron."' in record.read_text()
    record.unlink()
    (found,) = ranks.run(
        1, bodies.resumed, folder=folder, ways=[{"mup": None, "skipped": True}, {"mup": {"base": BASE}}]
    )
    assert found[1][0] == 2
    assert "has no mup.json, so it was not written in µP" in found[1][1]
    with pytest.raises(AssertionError, match=r"embedding\.word_embeddings\.weight"):
        ranks.run(1, bodies.resumed, folder=folder, ways=[{"mup": None, "skipped": True}, {"mup": None}])


def test_a_symbol_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    from mup_megatron.bridge import require

    require()
    monkeypatch.delattr("megatron.bridge.training.checkpointing._resolve_checkpoint_iteration")
    with pytest.raises(
        UserError, match=r"checkpointing has no _resolve_checkpoint_iteration, on which mup_megatron\.b"
    ):
        require()


def test_a_provider_that_was_finalized() -> None:
    """What is typed and what is derived cannot be told apart then."""
    from mup_megatron.bridge import apply_mup
    from tests.bridge.recipes import of_bridge

    config = of_bridge()
    config.model.finalize()
    with pytest.raises(UserError, match=r"model\.ffn_hidden_size: the model config was finalized before apply_mup"):
        apply_mup(config, {"hidden_size": 16})
    apply_mup(of_bridge(), {"hidden_size": 16})
