"""A run that goes on reads on where it stopped, in the order that it has begun with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from mup_megatron.checkpoints.manifest import CheckpointManifest
from mup_megatron.config import derive, load_config
from mup_megatron.data.batches import Batches
from mup_megatron.parallel.ranks import Rank
from tests.helpers import bodies
from tests.helpers.commands import metrics
from tests.helpers.distributed import RankError, Ranks
from tests.train.two_ranks import train

FOUR: dict[str, Any] = {"training__checkpoint_interval": 4, "training__lr_decay_steps": 8}


def read(rank: Rank, *, path: Path, allowed_changes: list[str]) -> list[int]:
    """Trains; the samples that this rank's replica read of the training data, in their order."""
    found: list[int] = []
    sample = Batches._sample

    def noted(self: Batches, index: int) -> Any:
        found.append(index)
        return sample(self, index)

    Batches._sample = noted  # type: ignore[method-assign]
    try:
        bodies.train_file(rank, path=path, allowed_changes=allowed_changes)
    finally:
        Batches._sample = sample  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize(("batch", "steps"), [(8, 6), (2, 12)])
def test_another_batch_reads_on_where_the_one_before_stopped(
    ranks: Ranks, tmp_path: Path, batch: int, steps: int
) -> None:
    """4 steps of 4 samples, then 16 more in steps of 8 or of 2. Counts go on, and so does another resume."""
    run = train(ranks, tmp_path, **FOUR, training__global_batch_size=4)
    key, path = "training.global_batch_size", tmp_path / "run.yaml"
    config = derive(load_config(path), {key: batch, "training.micro_batch_size": 2, "training.train_steps": steps})
    path.write_text(yaml.safe_dump(config.model_dump()))
    assert ranks.run(2, read, path=path, allowed_changes=[key])[0] == list(range(16, 32))
    tokens = [line["tokens"] // config.training.seq_length for line in metrics(run) if "loss" in line]
    assert tokens == [4, 8, 12, 16, *range(16 + batch, 33, batch)]
    manifest = CheckpointManifest.read(max((run / "checkpoints").iterdir()))
    assert (manifest.step, manifest.samples) == (steps, 32)
    path.write_text(yaml.safe_dump(derive(config, {"training.train_steps": steps + 1}).model_dump()))
    assert ranks.run(2, read, path=path, allowed_changes=[])[0] == list(range(32, 32 + batch))


def test_another_length_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    train(ranks, tmp_path, **FOUR)
    with pytest.raises(RankError, match=r"training.seq_length was \d+ and is 8; the text is cut into samples"):
        train(ranks, tmp_path, allowed=["training.seq_length"], **FOUR, training__seq_length=8)
