"""Tensors that are made when they are written: one at a time, and read back to the last bit."""

from __future__ import annotations

import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as torch_checkpoint

from mup_megatron.engines.saved_weights import SavedWeights, Tensor, write_tensors
from mup_megatron.util.errors import UserError


def test_tensors_are_written_one_by_one(tmp_path: Path) -> None:
    """None is made before the one before it is gone; torch's own reader finds what was made."""
    living: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def make(number: int) -> torch.Tensor:
        nonlocal most
        tensor = torch.full((3, 1000), float(number))
        living.append(weakref.ref(tensor))
        most = max(most, sum(one() is not None for one in living))
        return tensor

    tensors = {f"weight.t{number}": Tensor(shape=(3, 1000), make=partial(make, number)) for number in range(9)}
    write_tensors(tmp_path, tensors)
    assert len(living) == 9
    assert most <= 2  # the last one, until the next has taken its name
    found = SavedWeights(tmp_path)
    assert torch.equal(found.read("t7"), torch.full((3, 1000), 7.0))
    theirs = torch.empty(3, 1000)
    torch_checkpoint.load({"weight.t7": theirs}, checkpoint_id=tmp_path)
    assert torch.equal(theirs, found.read("t7"))


def test_what_a_tensor_says_is_said(tmp_path: Path) -> None:
    """In one sentence: torch would say it in a page of its own."""

    def fails() -> torch.Tensor:
        raise UserError("the source is damaged")

    with pytest.raises(UserError, match=r"^the source is damaged$"):
        write_tensors(tmp_path, {"weight.a": Tensor(shape=(1,), make=fails)})
