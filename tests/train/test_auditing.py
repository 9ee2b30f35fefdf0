"""`run.audit`: what a run writes and says of its first step, again after a resume, and where it stops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.commands import metrics
from tests.helpers.configs import HEAD_SIZE
from tests.helpers.distributed import RankError, Ranks
from tests.train.two_ranks import train, without_times


def audit_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "audit.json").read_text())


def test_it_looks_and_changes_nothing(ranks: Ranks, tmp_path: Path) -> None:
    """The first step of a warm-up has the rate 0: the second is looked at. The losses are those without an audit."""
    (tmp_path / "off").mkdir()
    on, off = train(ranks, tmp_path), train(ranks, tmp_path / "off", run__audit="off")
    found = audit_of(on)
    assert found["right"]
    assert found["unseen"] == []
    quantities = {each["quantity"] for each in found["findings"]}
    assert {
        "initial mean",
        "learning rate",
        "epsilon",
        "weight decay",
        "softmax scale",
        "update over the table's",
    } <= quantities
    rates = {each["expected"] for each in found["findings"] if each["quantity"] == "learning rate"}
    assert max(rates) == pytest.approx(8e-3 / 2)  # half of the warm-up's two steps
    assert not (off / "audit.json").exists()
    assert without_times(on) == without_times(off)


def test_a_resumed_run_is_looked_at_again(ranks: Ranks, tmp_path: Path) -> None:
    """Its initial values are gone; its third update has moments of two before it."""
    decay: dict[str, Any] = {"training__lr_decay_steps": 4, "training__lr_warmup_steps": 1}
    run = train(ranks, tmp_path, training__train_steps=2, **decay)
    first = audit_of(run)
    (run / "audit.json").unlink()
    train(ranks, tmp_path, parallel__engine="megatron", **decay)
    again = audit_of(run)
    assert again["right"]
    assert any("initial" in each["quantity"] for each in first["findings"])
    assert not any("initial" in each["quantity"] for each in again["findings"])
    assert {each["tensor"] for each in again["findings"]} == {each["tensor"] for each in first["findings"]}


@pytest.mark.slow
def test_another_optimizer_counts_its_own_updates(ranks: Ranks, tmp_path: Path) -> None:
    """After two updates of SGD, AdamW's averages begin with the third, and so does their correction."""
    keys: dict[str, Any] = {"growth": HEAD_SIZE, "training__lr_decay_steps": 4}
    train(ranks, tmp_path, training__train_steps=2, optimizer__name="sgd", **keys)
    run = train(ranks, tmp_path, allowed=["optimizer.name", "optimizer.implementation"], **keys)
    found = audit_of(run)
    assert found["right"]
    assert any(each["quantity"] == "update over the table's" for each in found["findings"])


WRONG = "width_from_local_shape"
"""Matrices that read hidden vectors in slices have the rate of a narrower model."""


def test_a_wrong_rate_stops_the_run(ranks: Ranks, tmp_path: Path) -> None:
    """Before the step after the first one that moves anything."""
    tensor = r"decoder\.layers\.0\.self_attention\.linear_proj\.weight"
    said = rf"audit: 28 tensors, 24 right; 8 multipliers, 8 right; {tensor}: learning r"
    with pytest.raises(RankError, match=said):
        train(ranks, tmp_path, WRONG)
    assert [line["step"] for line in metrics(tmp_path / "run") if "loss" in line] == [1, 2]
    wrong = {(each["tensor"], each["quantity"]) for each in audit_of(tmp_path / "run")["findings"] if not each["right"]}
    assert wrong == {
        (f"decoder.layers.{layer}.{name}.weight", quantity)
        for layer in (0, 1)
        for name in ("self_attention.linear_proj", "mlp.linear_fc2")
        for quantity in ("learning rate", "update over the table's")
    }


def test_a_wrong_rate_is_told(ranks: Ranks, tmp_path: Path) -> None:
    """Where `run.audit` is `warn`, and the run goes on to its end."""
    run = train(ranks, tmp_path, WRONG, run__audit="warn")
    assert [line["step"] for line in metrics(run) if "loss" in line] == [1, 2, 3, 4]
    assert not audit_of(run)["right"]
