"""A checkpoint as one process opens it, whatever wrote it: where it is, its config here, its tokenizer.

Public names: `SavedRun`, `open_run`, `find_checkpoint`. `generate` and `export` begin here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mup_megatron.checkpoint import SUMS, Checkpoints
from mup_megatron.config import Config, Model, parse_config
from mup_megatron.data.prepare import prepared_tokenizer
from mup_megatron.errors import UserError
from mup_megatron.manifest import MANIFEST, CheckpointManifest


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """A checkpoint that was found whole.

    Args:
        path: its folder.
        manifest: its mup.json.
        config: of one rank, whatever the run's layout was, with the run's folder where it is now.
        tokenizer: megatron-core's tokenizer object.
    """

    path: Path
    manifest: CheckpointManifest
    config: Config
    tokenizer: Any


def open_run(path: Path) -> SavedRun:
    """Finds a checkpoint and checks it by its checksums.

    Args:
        path: a checkpoint's folder, the `checkpoints` folder of a run, or the run's folder (then the latest counts).

    Raises:
        UserError: no checkpoint is there, it is damaged, or its tokenizer is gone.
    """
    path = find_checkpoint(path)
    manifest = CheckpointManifest.read(path)
    config = _config_here(manifest, path)
    tokenizer = prepared_tokenizer(config, manifest.data_digest)
    return SavedRun(path=path, manifest=manifest, config=config, tokenizer=tokenizer)


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a folder is, or the latest that it holds; its files match their checksums.

    Raises:
        UserError: there is none, or it is damaged.
    """
    if not path.is_dir():
        raise UserError(f"{path}: no such folder; expected a checkpoint (step_00000100), or a run's folder")
    if (path / SUMS).is_file():
        checkpoints, found = Checkpoints(path.parent, kept=1), [path]
    else:
        folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
        checkpoints = Checkpoints(folder, kept=1)
        found = checkpoints.newest_first()[:1]
    if not found:
        raise UserError(
            f"{path}: no checkpoint is here; expected a folder with {SUMS} in it, a run's folder, or its checkpoints"
        )
    problem = checkpoints.problem(found[0])
    if problem:
        raise UserError(f"{found[0]}: damaged ({problem}); an older checkpoint can be named instead")
    return found[0]


def _config_here(manifest: CheckpointManifest, path: Path) -> Config:
    """The manifest's config for this process: one rank, what is installed here, the run's folder where it is now."""
    # How it was tuned is another run's business, and may hold what is refused today.
    config = parse_config({**manifest.config, "tuning": {}}, str(path / MANIFEST))
    keys: dict[str, Any] = {"parallel": {"engine": config.parallel.engine, "tensor_model_parallel_size": 1}}
    if {"apex", "transformer_engine"} & {getattr(config.model, key) for key in Model.PLAIN_KERNELS}:
        keys["model"] = config.model.with_plain_kernels.model_dump()  # compute the same, everywhere
    if path.resolve().parent.name == "checkpoints":
        keys["run.dir"] = str(path.parent.parent)
    return config.derive(keys)
