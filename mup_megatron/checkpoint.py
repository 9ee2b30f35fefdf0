"""What a checkpoint holds beyond weights, how it is written whole or not at all, and the guard on resume.

Public names: `Checkpoints`, `make_manifest`, `check_resume`, `check_folder`, `hash_files`.

A checkpoint is a folder `step_00000100/`: weights and optimizer (engines/state.py), random states, `mup.json` (format,
step, config, layout, base shapes, multipliers, data and its position, tokenizer, versions, files) and `SHA256SUMS` of
all of them, which `sha256sum -c` reads. It is written under another name and renamed when every rank is done.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mup_megatron.config import Config, Model
from mup_megatron.errors import UserError, shown
from mup_megatron.layout import Layout
from mup_megatron.parametrization import Parametrization

FORMAT = 2
MANIFEST = "mup.json"
SUMS = "SHA256SUMS"
METRICS = "metrics.jsonl"
"""File, in a run's folder, of its steps and evaluations."""
SAMPLES = "samples.jsonl"
"""File, in a run's folder, of the text that the model wrote at evaluations."""
_MOST_DIFFERENCES = 20
_PACKAGES = ("torch", "megatron-core", "deepspeed", "mup-megatron")

# Keys whose change leaves the run the same run.
_FREE = (
    "run.name",
    "run.dir",
    "run.samples",
    "proxy",
    "tuning",
    "slurm",
    "data.dir",
    "data.cache_dir",
    "parallel",  # the state knows no layout
    "optimizer.implementation",
    *(f"model.{key}" for key in Model.PLAIN_KERNELS),
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


def make_manifest(
    config: Config, parametrization: Parametrization, layout: Layout, data_digest: str, step: int
) -> dict[str, Any]:
    """What is written beside the weights, as plain data."""
    return {
        "format": FORMAT,
        "step": step,
        "config": _settings(config.model_dump()),
        "layout": {name: value for name, value in dataclasses.asdict(layout).items() if name != "stages"},
        "data_digest": data_digest,
        "tokenizer": config.data.tokenizer.model_dump(),
        "samples": step * config.training.global_batch_size,
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


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    """A config as a checkpoint keeps it: the schedule's length decides every rate, the number of steps does not."""
    training = config["training"]
    return {**config, "training": {**training, "lr_decay_steps": training["lr_decay_steps"] or training["train_steps"]}}


_ADVICE = "change the config back, choose another run.dir, or name a deliberate change with --allow-change KEY"


def check_resume(
    found: dict[str, Any], current: dict[str, Any], where: Path, allowed: Iterable[str] = (), advice: str = _ADVICE
) -> list[dict[str, Any]]:
    """The guard: a checkpoint of another model, parametrization or hyperparameter does not go on as if it were this.

    Args:
        found: the checkpoint's manifest.
        current: the manifest that this run would write.
        where: the checkpoint, for the message.
        allowed: keys whose change is deliberate (`--allow-change`).
        advice: what to do about it, for the message.

    Returns:
        The deliberate changes: {"step", "key", "before", "now"}.

    Raises:
        UserError: a table of the keys that differ, with both values.
    """
    before, now = _flatten(_compared(found)), _flatten(_compared(current))
    changed = [
        key for key in sorted(set(before) | set(now)) if before.get(key) != now.get(key) and not _within(key, _FREE)
    ]
    allowed = tuple(allowed)
    differences = [(key, shown(before.get(key)), shown(now.get(key))) for key in changed if not _within(key, allowed)]
    if differences:
        raise UserError(
            f"{where}: the checkpoint does not belong to this config; {advice}",
            _table([("key", "checkpoint", "config"), *differences[:_MOST_DIFFERENCES]])
            + [f"... and {len(differences) - _MOST_DIFFERENCES} more"] * (len(differences) > _MOST_DIFFERENCES),
        )

    return [{"step": found["step"], "key": key, "before": before.get(key), "now": now.get(key)} for key in changed]


def _within(key: str, sections: Iterable[str]) -> bool:
    return any(key == section or key.startswith(section + ".") for section in sections)


def check_folder(config: Config, allowed: Iterable[str] = ()) -> bool:
    """Before a command writes anything: what a run's folder holds of its target is this config's, or stays as it is.

    A target without a checkpoint that did not end is no such thing: it starts again from step 0.

    Args:
        config: the run, `auto` resolved, with the values that it is to train with.
        allowed: keys whose change is deliberate (`--allow-change`).

    Returns:
        Whether a target is there.

    Raises:
        UserError: it was trained with other settings, or further than this config goes.
    """
    directory, training = Path(config.run.dir), config.training
    checkpoints = Checkpoints(directory / "checkpoints", training.checkpoints_kept)
    for path in checkpoints.newest_first():
        try:
            found, where = checkpoints.read(path), path
            break
        except UserError:  # it is damaged; what loads it says so
            continue
    else:
        ended = _ended(directory)
        if ended is None:
            return False
        found, where = ended, directory / METRICS
    current = {**found, "config": _settings(config.model_dump())}
    check_resume(found, current, where, allowed)
    if found["step"] > training.train_steps:
        raise config.error(
            "training.train_steps", f"{training.train_steps}, but {where} holds {found['step']} steps of this run"
        )
    return True


def _ended(directory: Path) -> dict[str, Any] | None:
    """The settings of a target that took all its steps and kept no checkpoint, as a manifest would hold them."""
    try:
        settings = json.loads((directory / "explain.json").read_text(encoding="utf-8"))["config"]
        steps = [json.loads(line)["step"] for line in (directory / METRICS).read_text(encoding="utf-8").splitlines()]
        if max(steps, default=0) < settings["training"]["train_steps"]:
            return None
        return {"config": _settings(settings), "step": max(steps), "data_digest": None, "base_shapes": None}
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [f"  {line}" for line in lines]


def _compared(manifest: dict[str, Any]) -> dict[str, Any]:
    return {
        **manifest["config"],
        "data_digest": manifest["data_digest"],
        "base_shapes": manifest["base_shapes"],
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

    def newest_first(self) -> list[Path]:
        """Whole checkpoints; one that `problem` finds damaged is followed by the one before it."""
        return self._whole()[::-1]

    def read(self, path: Path) -> dict[str, Any]:
        """A checkpoint's manifest.

        Raises:
            UserError: it is damaged, or of another format.
        """
        try:
            manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{path / MANIFEST}: damaged ({error})") from None
        if not isinstance(manifest, dict) or not {"format", "step"} <= set(manifest):
            raise UserError(f"{path / MANIFEST}: expected a JSON object with format, step and config")
        if manifest["format"] != FORMAT:
            raise UserError(
                f"{path}: written in format {shown(manifest['format'])}; this version reads format {FORMAT}"
            )
        parts = {"config": dict, "base_shapes": dict, "data_digest": str, "step": int}
        for key, kind in parts.items():
            if not isinstance(manifest.get(key), kind):
                raise UserError(f"{path / MANIFEST}: {key} is missing or no {kind.__name__}")
        named = re.fullmatch(r"step_(\d{8,})", path.name)
        if manifest["step"] != (int(named[1]) if named else max(manifest["step"], 0)):
            raise UserError(f"{path / MANIFEST}: step is {shown(manifest['step'])}; expected the folder's")
        return manifest

    def problem(self, path: Path, share: tuple[int, int] = (0, 1)) -> str | None:
        """What is wrong with a checkpoint's files, by their checksums; None if nothing is.

        Every file that is there has a checksum, and every one that the manifest lists is there, so that none is loaded
        unverified.

        Args:
            path: the checkpoint.
            share: (i, n): only every n-th file, from the i-th on, so that n ranks check a checkpoint together.
        """
        try:
            lines = (path / SUMS).read_text(encoding="utf-8").removesuffix("\n").split("\n")
        except (OSError, UnicodeDecodeError):
            return f"{SUMS} cannot be read"
        sums = {name: digest for digest, _, name in (line.partition("  ") for line in lines) if name}
        if len(sums) != len(lines) or MANIFEST not in sums:
            return f"{SUMS} is cut short"
        try:
            unlisted = {entry.name for entry in path.iterdir()} - {SUMS} - set(sums)
            listed = json.loads((path / MANIFEST).read_text(encoding="utf-8")).get("files", [])
        except (OSError, ValueError, AttributeError, RecursionError):
            return f"{MANIFEST} cannot be read"
        if unlisted:
            return f"{min(unlisted)} is not in {SUMS}"
        if lost := [str(name) for name in listed if name not in sums]:
            return f"{min(lost)}, which {MANIFEST} lists, is not in {SUMS}"
        for name in sorted(sums)[share[0] :: share[1]]:
            if "/" in name or not (path / name).is_file():
                return f"{name} is missing"
            if _sha256(path / name) != sums[name]:
                return f"{name} does not match its checksum"
        return None

    def begin(self, step: int) -> Path:
        """An empty folder to write into; rank 0 calls it, the others use `partial`."""
        path = self.partial(step)
        for old in self.directory.glob("step_*.partial"):  # of runs that were killed while they saved
            shutil.rmtree(old, ignore_errors=True)
        try:
            path.mkdir(parents=True)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise
            raise UserError(f"run.dir: cannot write a checkpoint to {path}: {error.strerror}") from None
        return path

    def partial(self, step: int) -> Path:
        """Where the checkpoint of a step is written before it is whole."""
        return self.directory / f"step_{step:08d}.partial"

    def commit(self, step: int, manifest: dict[str, Any], sums: dict[str, str]) -> Path:
        """Makes the checkpoint of a step whole, then removes the oldest beyond those kept. Rank 0 calls it.

        Args:
            step: updates done.
            manifest: from `make_manifest`.
            sums: of every other file in the folder, from `hash_files`.
        """
        partial, final = self.partial(step), self.directory / f"step_{step:08d}"
        _write(partial / MANIFEST, json.dumps({**manifest, "files": sorted(sums)}, indent=1))
        sums = {**sums, MANIFEST: _sha256(partial / MANIFEST)}
        _write(partial / SUMS, "".join(f"{sums[name]}  {name}\n" for name in sorted(sums)))
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
            if re.fullmatch(r"step_\d{8,}", path.name) and path.is_dir()
        }
        return [found[step] for step in sorted(found)]


def hash_files(directory: Path, share: tuple[int, int] = (0, 1)) -> dict[str, str]:
    """SHA-256 of the files in a folder, by name.

    Args:
        directory: the folder.
        share: (i, n): only every n-th file, from the i-th on.
    """
    files = sorted(path for path in directory.iterdir() if path.is_file())
    return {path.name: _sha256(path) for path in files[share[0] :: share[1]]}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
