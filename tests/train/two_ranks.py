"""A run on two ranks, from its config file, as several tests have it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.helpers import bodies
from tests.helpers.commands import metrics
from tests.helpers.configs import MIXED, make
from tests.helpers.distributed import Ranks

KEYS: dict[str, Any] = {
    "training__train_steps": 4,
    "training__checkpoint_interval": 2,
    "training__lr_warmup_steps": 2,
    "parallel__tensor_model_parallel_size": 2,
}


def train(
    ranks: Ranks,
    folder: Path,
    broken: str = "nothing",
    *,
    growth: dict[str, Any] = MIXED,
    allowed: Sequence[str] = (),
    **changed: Any,
) -> Path:
    """Trains on two ranks; the folder of the run."""
    folders = {"run__dir": str(folder / "run"), "data__dir": str(folder / "data")}
    config = make(growth, "gpt3", **{**KEYS, **folders, **changed})
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config.model_dump()))
    ranks.run(2, bodies.train_file, path=path, broken=broken, allowed_changes=allowed)
    return folder / "run"


def without_times(run: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl, to the last bit, but for how long steps took."""
    return [
        {key: value for key, value in line.items() if key not in ("seconds", "tokens_per_second")}
        for line in metrics(run)
    ]
