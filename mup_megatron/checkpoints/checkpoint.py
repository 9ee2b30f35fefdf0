"""The folder of a checkpoint, written whole or not at all, and what a run's folder holds of its target.

Public names: `Checkpoints`, `check_folder`, `is_complete`, `hash_files`, `read_sums`, `mismatch`, `SUMS`.

A checkpoint is a folder `step_00000100/`: weights and optimizer (engines/state.py), random states, `mup.json`
(manifest.py) and `SHA256SUMS` of all of them, which `sha256sum -c` reads. It is written under another name and renamed
when every rank is done.
"""

from __future__ import annotations

import errno
import json
import math
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mup_megatron.checkpoints.manifest import MANIFEST, CheckpointManifest, check_settings, listed_files, settings_of
from mup_megatron.config import Config
from mup_megatron.util.errors import UserError
from mup_megatron.util.files import json_object, read_object, read_text, sha256_of, write_whole

SUMS = "SHA256SUMS"
METRICS = "metrics.jsonl"
"""File, in a run's folder, of its steps and evaluations."""
SAMPLES = "samples.jsonl"
"""File, in a run's folder, of the text that the model wrote at evaluations."""
AUDIT = "audit.json"
"""File, in a run's folder, of what its first step was found to be."""

TELEMETRY = "telemetry.jsonl"
"""File, in a run's folder, of what its tensors and modules were like every so many steps."""

ALARMS = "alarms.jsonl"
"""File, in a run's folder, of what its readings were not as they should be."""


def check_folder(config: Config, allowed: Iterable[str] = ()) -> bool:
    """Before a command writes anything: what a run's folder holds of its target is this config's, or stays as it is.

    A target that did not end, and has no checkpoint, starts again from step 0.

    Args:
        config: the run, `auto` resolved, with the values that it is to train with.
        allowed: keys whose change is deliberate (`--allow-change`).

    Returns:
        Whether a target is there.

    Raises:
        UserError: it was trained with other settings, or with nobody knows which, or further than this config goes.
    """
    directory, training = Path(config.run.dir), config.training
    checkpoints = Checkpoints(directory / "checkpoints", training.checkpoints_kept)
    for path in checkpoints.newest_first():
        sums = read_sums(path) or {}
        try:
            manifest = CheckpointManifest.read(path)
        except UserError:  # it is damaged; what loads it says so
            continue
        if mismatch(path, {MANIFEST: sums.get(MANIFEST, "")}):  # a flipped bit may have made another setting of one
            continue
        settings, step, where = manifest.config, manifest.step, path
        break
    else:
        begun = _begun(directory)
        if begun is None:
            return False
        settings, step, where = begun.settings, begun.steps if begun.ended else 0, directory / METRICS
    check_settings(settings, settings_of(config.model_dump()), where, allowed)
    if step > training.train_steps:
        raise config.error(
            "training.train_steps", f"{training.train_steps}, but {where} holds {step} steps of this run"
        )
    return True


def is_complete(config: Config) -> bool:
    """Whether a run's folder holds the whole run of a config, but no checkpoint of its last step.

    Training it again would write over its result. With a checkpoint of the last step the run goes on from there, which
    is nothing. A run that writes such a checkpoint, and lost it, goes on from an earlier one, and has it again.

    Args:
        config: the run, after `check_folder`.

    Raises:
        UserError: the folder holds a whole run with other settings, and no checkpoint from which these could go on.
    """
    directory, steps = Path(config.run.dir), config.training.train_steps
    whole = Checkpoints(directory / "checkpoints", config.training.checkpoints_kept).newest_first()
    saves = config.training.steps_between_checkpoints > 0
    if whole and (saves or int(whole[0].name.removeprefix("step_")) >= steps):
        return False
    begun = _begun(directory, *whole[:1])
    if begun is None or not begun.ended:
        return False
    now = settings_of(config.model_dump())
    changed = [key for key, _, _ in check_settings(begun.settings, now, directory, allowed=now)]
    if not changed and begun.steps == steps:
        return True
    if whole:
        return False
    other = ", ".join(changed) or f"training.train_steps {steps}"
    raise UserError(
        f"{directory / METRICS}: this run is complete, and kept no checkpoint from which it could go on with "
        f"{other}; expected another run.dir, or that file removed to train it anew"
    )


class _Begun(NamedTuple):
    """A target that took steps: its settings, how many steps, and whether it ended, its last evaluation included."""

    settings: dict[str, Any]
    steps: int
    ended: bool


def _begun(directory: Path, checkpoint: Path | None = None) -> _Begun | None:
    """What metrics.jsonl is of; None where it holds nothing.

    Args:
        directory: of the run.
        checkpoint: of the target; it knows the settings where explain.json does not.

    Raises:
        UserError: nobody knows the settings.
    """
    path, explanation = directory / METRICS, directory / "explain.json"
    try:
        text = read_text(path, errors="replace", most=None)
    except OSError:
        return None
    if not text.strip():
        return None
    settings: Any = read_object(explanation).get("config")
    try:
        if settings is None and checkpoint is not None:
            settings = CheckpointManifest.read(checkpoint).config
        settings, training = settings_of(settings), settings["training"]
        wanted, steps = ("loss", "eval_loss") if training["eval_interval"] else ("loss",), int(training["train_steps"])
    except (LookupError, TypeError, ValueError):
        raise UserError(
            f"{path}: holds steps of a run whose settings are gone ({explanation.name} beside it is missing or "
            "damaged); expected another run.dir, or that file removed to train anew"
        ) from None
    lines = [line for line in map(json_object, text.splitlines()) if isinstance(line.get("step"), int)]
    last = max((line["step"] for line in lines), default=0)
    found = {key: line[key] for line in lines if line["step"] == last for key in wanted if key in line}
    ended = last >= steps and all(
        isinstance(found.get(key), int | float) and math.isfinite(found[key]) for key in wanted
    )
    return _Begun(settings, last, ended)


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

    def problem(self, path: Path, share: tuple[int, int] = (0, 1)) -> str | None:
        """What is wrong with a checkpoint's files, by their checksums; None if nothing is.

        Every file that is there has a checksum, and every one that the manifest lists is there, so that none is loaded
        unverified.

        Args:
            path: the checkpoint.
            share: (i, n): only every n-th file, from the i-th on, so that n ranks check a checkpoint together.
        """
        sums = read_sums(path)
        if sums is None:
            return f"{SUMS} cannot be read, or is cut short"
        if MANIFEST not in sums:
            return f"{SUMS} is cut short"
        try:
            unlisted = {entry.name for entry in path.iterdir()} - {SUMS} - set(sums)
            listed = listed_files(path)
        except (OSError, UserError):
            return f"{MANIFEST} cannot be read"
        if unlisted:
            return f"{min(unlisted)} is not in {SUMS}"
        if lost := [name for name in listed if name not in sums]:
            return f"{min(lost)}, which {MANIFEST} lists, is not in {SUMS}"
        return mismatch(path, {name: sums[name] for name in sorted(sums)[share[0] :: share[1]]})

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

    def commit(self, manifest: CheckpointManifest, sums: dict[str, str]) -> Path:
        """Makes the checkpoint of a step whole, then removes the oldest beyond those kept. Rank 0 calls it.

        Those of later steps do not count: the run went on from before them, because they are damaged.

        Args:
            manifest: of that step.
            sums: of every other file in the folder, from `hash_files`.
        """
        partial = self.partial(manifest.step)
        final = partial.with_suffix("")
        said = json.dumps(manifest.replaced(files=sorted(sums)).as_json(), indent=1)
        write_whole(partial / MANIFEST, said, sync=True)
        sums = {**sums, MANIFEST: sha256_of(partial / MANIFEST)}
        write_whole(partial / SUMS, "".join(f"{sums[name]}  {name}\n" for name in sorted(sums)), sync=True)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        whole = self._whole()
        for old in whole[: whole.index(final) + 1][: -self._kept]:
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


def hash_files(directory: Path, known: Mapping[str, str] | None = None) -> dict[str, str]:
    """SHA-256 of the files in a folder, by name.

    Args:
        directory: the folder.
        known: of files that were hashed before.
    """
    sums = dict(known or {})
    left = (path for path in directory.iterdir() if path.is_file() and path.name not in sums)
    return sums | {path.name: sha256_of(path) for path in left}


def read_sums(folder: Path) -> dict[str, str] | None:
    """The checksums in a folder's SHA256SUMS by name; None where that cannot be read, or a line of it is none."""
    try:
        lines = read_text(folder / SUMS).removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError):
        return None
    sums = {name: digest for digest, _, name in (line.partition("  ") for line in lines) if name}
    return sums if len(sums) == len(lines) else None


def mismatch(folder: Path, sums: Mapping[str, str]) -> str | None:
    """The first file of a folder that is not as its checksum says, and why; None if there is none."""
    for name, digest in sorted(sums.items()):
        # What stands elsewhere is no file of the folder.
        if not (folder / name).is_file() or {"..", "/"} & set(Path(name).parts):
            return f"{name} is missing"
        if sha256_of(folder / name) != digest:
            return f"{name} does not match its checksum"
    return None
