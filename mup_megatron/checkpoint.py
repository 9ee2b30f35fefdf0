"""What a checkpoint records beyond weights, how it is written whole or not at all, and the guard on resume.

Public names: `Checkpoints`, `make_record`, `check_resume`.

A checkpoint is a folder `step_00000100/` with the engine's files and `mup.json`: format, step, config, layout, base
shapes, multipliers, data digest, versions. It is written under another name and renamed when every rank is done.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mup_megatron.config import Config
from mup_megatron.errors import UserError
from mup_megatron.layout import Layout
from mup_megatron.parametrization import Parametrization

FORMAT = 1
RECORD = "mup.json"
_PACKAGES = ("torch", "megatron-core", "deepspeed", "mup-megatron")

# Keys whose change leaves the run the same run.
_FREE = (
    "run.name",
    "run.dir",
    "proxy",
    "tuning",
    "slurm",
    "data.dir",
    "data.cache_dir",
    "parallel.deepspeed_config",
    "training.train_steps",
    "training.micro_batch_size",
    "training.log_interval",
    "training.eval_interval",
    "training.eval_steps",
    "training.checkpoint_interval",
    "training.checkpoints_kept",
    "training.recompute_granularity",
    "training.recompute_method",
    "training.recompute_num_layers",
)


def make_record(
    config: Config, parametrization: Parametrization, layout: Layout, data_digest: str, step: int
) -> dict[str, Any]:
    """What is written beside the weights, as plain data."""
    settings = config.model_dump()
    # The schedule's length decides every rate; the number of steps as such does not.
    settings["training"]["lr_decay_steps"] = config.training.lr_decay_steps or config.training.train_steps
    return {
        "format": FORMAT,
        "step": step,
        "config": settings,
        "layout": {"tensor": layout.tensor, "data": layout.data, "zero_stage": layout.zero_stage},
        "data_digest": data_digest,
        "base_head_size": parametrization.base_head_size,
        "base_shapes": {
            name: [dim.base_dim for dim in shape.infshape] for name, shape in parametrization.shapes.items()
        },
        "multipliers": {
            name: [tensor.lr_multiplier, tensor.eps_multiplier, tensor.weight_decay_multiplier]
            for name, tensor in parametrization.tensors.items()
        },
        "versions": {package: importlib.metadata.version(package) for package in _PACKAGES},
    }


def check_resume(found: dict[str, Any], current: dict[str, Any], where: Path, allowed: Iterable[str] = ()) -> None:
    """The guard: a checkpoint of another model, parametrization or hyperparameter does not go on as if it were this.

    Args:
        found: the checkpoint's record.
        current: the record that this run would write.
        where: the checkpoint, for the message.
        allowed: keys whose change is deliberate (`--allow-change`).

    Raises:
        UserError: lists every key that differs, with both values.
    """
    if found.get("format") != FORMAT:
        raise UserError(f"{where}: written in format {found.get('format')}; this version reads format {FORMAT}")
    allowed = (*_FREE, *allowed)
    before, now = _flatten(_compared(found)), _flatten(_compared(current))
    differences = [
        f"{key}: {before.get(key)!r} in the checkpoint, {now.get(key)!r} now"
        for key in sorted(set(before) | set(now))
        if before.get(key) != now.get(key) and not any(key == free or key.startswith(free + ".") for free in allowed)
    ]
    if differences:
        raise UserError(
            f"{where}: the checkpoint does not belong to this config (" + "; ".join(differences[:12]) + "); "
            "change the config back, choose another run.dir, or name a deliberate change with --allow-change KEY"
        )


def _compared(record: dict[str, Any]) -> dict[str, Any]:
    return {
        **record["config"],
        "layout": record["layout"],
        "data_digest": record["data_digest"],
        "base_shapes": record["base_shapes"],
    }


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    result: dict[str, Any] = {}
    for key, inner in value.items():
        # Parameter names hold dots of their own; they stay one key.
        result.update(_flatten(inner, f"{prefix}.{key}" if prefix else str(key)))
    return result


class Checkpoints:
    """The checkpoints of one run.

    Args:
        directory: `run.dir/checkpoints`.
        kept: how many of the newest are kept.
    """

    def __init__(self, directory: Path, kept: int) -> None:
        self.directory = directory
        self._kept = kept

    def latest(self) -> Path | None:
        """The newest whole checkpoint."""
        whole = self._whole()
        return whole[-1] if whole else None

    def read(self, path: Path) -> dict[str, Any]:
        """A checkpoint's record. Raises UserError if it is damaged."""
        try:
            record = json.loads((path / RECORD).read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{path / RECORD}: damaged ({error})") from None
        if not isinstance(record, dict):
            raise UserError(f"{path / RECORD}: expected a JSON object")
        return record

    def begin(self, step: int) -> Path:
        """An empty folder to write into; rank 0 calls it, the others use `partial`."""
        path = self.partial(step)
        shutil.rmtree(path, ignore_errors=True)
        try:
            path.mkdir(parents=True)
        except OSError as error:
            raise UserError(f"run.dir: cannot write a checkpoint to {path}: {error.strerror}") from None
        return path

    def partial(self, step: int) -> Path:
        """Where the checkpoint of a step is written before it is whole."""
        return self.directory / f"step_{step:08d}.partial"

    def commit(self, step: int, record: dict[str, Any]) -> Path:
        """Makes the checkpoint of a step whole, then removes the oldest beyond those kept. Rank 0 calls it."""
        partial, final = self.partial(step), self.directory / f"step_{step:08d}"
        with (partial / RECORD).open("w", encoding="utf-8") as file:
            json.dump(record, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        for old in self._whole()[: -self._kept]:
            shutil.rmtree(old, ignore_errors=True)
        return final

    def _whole(self) -> list[Path]:
        """Whole checkpoints, oldest first."""
        if not self.directory.is_dir():
            return []
        found = {
            int(path.name.removeprefix("step_")): path
            for path in self.directory.iterdir()
            if re.fullmatch(r"step_\d{8,}", path.name) and (path / RECORD).is_file()
        }
        return [found[step] for step in sorted(found)]
