"""`mup-megatron rebase CHECKPOINT DIR --base FILE`: the same training from another base, or in another form.

Public name: `rebase`. reexpress.py says what becomes of weights, optimizer state and rates; this module writes a run's
folder that goes on from there: rebased.bsh, config.yaml, and the checkpoint.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mup_megatron.checkpoints.checkpoint import Checkpoints, hash_files
from mup_megatron.checkpoints.manifest import MANIFEST, CheckpointManifest, make_manifest, settings_of
from mup_megatron.config import Config, Growth, derive, parse_config, parse_yaml
from mup_megatron.convert.export import Source, open_source
from mup_megatron.convert.export.folder import new_folder, refuse_existing
from mup_megatron.convert.reexpress import MULTIPLIERS, Reexpressed, kept_multipliers, reexpress
from mup_megatron.data.prepare import data_directory
from mup_megatron.engines import WEIGHT
from mup_megatron.engines.saved_weights import SavedWeights, Tensor, saved_shapes, write_tensors
from mup_megatron.model.build import parametrize
from mup_megatron.parallel.layout import resolve_layout
from mup_megatron.rules.base_file import beside_shapes
from mup_megatron.rules.base_shapes import base_shapes_text
from mup_megatron.rules.horizon import kept_betas
from mup_megatron.rules.table import Parametrization
from mup_megatron.util.errors import ConfigError, UserError, shown
from mup_megatron.util.files import as_yaml, read_text

BASE_FILE = "rebased.bsh"
POWERS = {WEIGHT: 1, "exp_avg": -1, "exp_avg_sq": -2, "momentum_buffer": -1}
"""Of θ, in what is kept of a tensor."""
_FORM = "parametrization."
_OF_THE_BASE = ("base_shapes", "base_head_size", "multipliers", "carried", "horizon")
"""Parts of a manifest that another base changes."""


def rebase(
    checkpoint: Path,
    directory: Path,
    base: Path,
    overrides: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = lambda _line: None,
) -> dict[str, Any]:
    """Writes a run's folder that goes on from a checkpoint under another base.

    Call `upstream.prepare_process` before. Tensors are read and written one by one.

    Args:
        checkpoint: as for `open_run`; of this project.
        directory: of the new run, not there yet.
        base: a file of base sizes (what a config's `base:` holds) or of base shapes (.bsh).
        overrides: of `parametrization:`, or of the tunable multipliers of `hparams:`, by dotted key. A multiplier that
            is not among them becomes what keeps the forward pass.
        say: takes lines of progress.

    Returns:
        `step`, `weights` (factors by name), `carried` (by name), `multipliers` (the tunable constants, by key).

    Raises:
        UserError: the checkpoint cannot be opened, the base is none of its family, or function and updates cannot be
            kept; says what stands in the way.
    """
    refuse_existing(directory)
    overrides = dict(overrides or {})
    source = _open(checkpoint, overrides)
    trials = {"tuning": _trials(source.run.manifest.config)}
    before = parametrize(derive(source.run.config, trials), source.vocabulary)
    try:
        after = _under(before, {"base": _base_section(base), **overrides}, overrides, source.vocabulary)
    except ConfigError as error:
        named = f"--base {base}" if error.key.startswith("base") else "overrides"
        raise ConfigError(error.key, error.problem, named) from None
    found = reexpress(before, after)
    needed = sum(path.stat().st_size for path in source.run.path.iterdir())
    with new_folder(directory, needed, say, what="the rebased run", sums=False) as folder:
        text = base_shapes_text(after.shapes, {**beside_shapes(after), "carried": found.carried})
        folder.write(BASE_FILE, text)
        config = _config(source, after, directory)
        folder.write("config.yaml", as_yaml(config.model_dump()))
        checkpoints = Checkpoints(folder.path / "checkpoints", kept=1)
        begun = checkpoints.begin(source.run.manifest.step)
        _write(source.run.path, begun, found, before)
        checkpoints.commit(_manifest(source, config, folder.path / BASE_FILE), hash_files(begun))
    return {
        "step": source.run.manifest.step,
        "weights": dict(found.weights),
        "carried": {name: list(factors) for name, factors in found.carried.items()},
        "multipliers": {key: getattr(after.config.hparams, key.partition(".")[2]) for key in MULTIPLIERS.values()},
    }


def _open(checkpoint: Path, overrides: Mapping[str, Any]) -> Source:
    """The checkpoint. Raises UserError where it, or what is to change, is nothing that a rebase knows."""
    for key in overrides:
        if not key.startswith(_FORM) and key not in MULTIPLIERS.values():
            raise UserError(
                f"{key}: a rebase changes no such key; expected one of parametrization:, or "
                + ", ".join(MULTIPLIERS.values())
            )
    source = open_source(checkpoint)
    source.run.config.needs_gpt("rebase")
    source.run.config.needs_plain_weights("rebase")
    if source.run.manifest.key_prefix is not None:
        raise UserError(f"{source.run.path}: written by megatron.training; expected a checkpoint of mup-megatron train")
    return source


def _manifest(source: Source, config: Config, base: Path) -> CheckpointManifest:
    """What the checkpoint says now; of the new run's config, whose base's file lies here as yet."""
    written = parametrize(derive(config, {"base.file": str(base)}), source.vocabulary)
    made = make_manifest(written, resolve_layout(source.run.config, 1), "", 0)
    parts = {name: getattr(made, name) for name in _OF_THE_BASE}
    return source.run.manifest.replaced(config=settings_of(config.model_dump()), **parts)


def _base_section(path: Path) -> dict[str, Any]:
    """What `base:` becomes. Raises UserError where the file is none of base sizes or shapes."""
    try:
        found = parse_yaml(read_text(path), str(path))
    except OSError as error:
        raise UserError(f"--base {path}: cannot read it: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"--base {path}: expected YAML") from None
    if isinstance(found, dict) and found and all(isinstance(value, list) for value in found.values()):
        return {"file": str(path.resolve())}
    if not isinstance(found, dict) or not found:
        raise UserError(f"--base {path}: expected base sizes, such as hidden_size: 256, found {shown(found)}")
    if unknown := sorted(map(str, found.keys() - Growth.model_fields.keys())):
        raise UserError(f"--base {path}: {unknown[0]}: is no base size; expected sizes, such as hidden_size: 256")
    return found


def _under(
    before: Parametrization, keys: Mapping[str, Any], overrides: Mapping[str, Any], vocabulary: int
) -> Parametrization:
    """The new base's rules, with the multipliers that were named, and the others such that the forward pass is kept."""
    # Growth that the run declared for its proxy is of the old base; it has been tuned.
    betas = kept_betas(before.config, str(keys.get(f"{_FORM}batch", before.config.parametrization.batch)))
    config = derive(before.config, {"proxy": {}, "optimizer.betas": list(betas), **keys})
    config.needs_plain_weights("rebase")
    rules = parametrize(config, vocabulary)
    if rules.carried:
        raise UserError(
            f"--base {config.base.file}: written by a rebase of one checkpoint; expected a base of a family"
        )
    kept = kept_multipliers(before, rules)
    return parametrize(derive(config, {key: value for key, value in kept.items() if key not in overrides}), vocabulary)


def _config(source: Source, after: Parametrization, directory: Path) -> Config:
    """Of the new run, in the layout of the old one."""
    run, new, files = source.run, after.config, source.run.config.data.files
    kept = {"tuning": _trials(run.manifest.config), "proxy": {}}
    original = parse_config({**run.manifest.config, **kept}, str(run.path / MANIFEST))
    depth = {"num_layers": new.base.num_layers} if new.base.num_layers is not None else {}
    return derive(
        original,
        {
            "run.dir": str(directory.resolve()),
            "data.dir": str(data_directory(run.config).resolve()),
            "data.files": [str(path.resolve()) if path.exists() else str(path) for path in map(Path, files)],
            "base": {"file": str(directory.resolve() / BASE_FILE), **depth, **new.base.experts},
            "parametrization": new.parametrization.model_dump(),
            "hparams": new.hparams.model_dump(),
            "optimizer.betas": list(new.optimizer.betas),
        },
    )


def _trials(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of `tuning:` what rules over batch and tokens count from; the rest is another run's business."""
    tuning = config.get("tuning")
    tuning = tuning if isinstance(tuning, Mapping) else {}
    said = {name: tuning[name] for name in ("global_batch_size", "seq_length", "train_steps") if tuning.get(name)}
    return {**said, "micro_batch_size": 1} if said else {}


def _write(old: Path, new: Path, found: Reexpressed, before: Parametrization) -> None:
    """The checkpoint's files: as they are where no weight takes a factor, else written anew."""
    beside = [path for path in old.iterdir() if path.name.startswith("random_")]
    if not found.weights:
        skipped = {MANIFEST, "SHA256SUMS"}
        beside = [path for path in old.iterdir() if path.name not in skipped]
    for path in beside:
        shutil.copyfile(path, new / path.name)
    if found.weights:
        write_tensors(new, _scaled(old, found, before))


def _scaled(directory: Path, found: Reexpressed, before: Parametrization) -> dict[str, Tensor]:
    """All tensors by key: weights take θ, first moments and momenta 1/θ, second moments 1/θ²."""
    kinds = {key.partition(".")[0] for key in saved_shapes(directory)}
    tensors = {}
    for kind in sorted(kinds):
        saved = SavedWeights(directory, kinds=(kind,))
        for name, shape in saved.shapes.items():
            theta = found.weights.get(name, 1.0)
            tensors[f"{kind}.{name}"] = Tensor(shape=shape, make=partial(_read, saved, name, kind, theta))
    return tensors


def _read(saved: SavedWeights, name: str, kind: str, theta: float) -> torch.Tensor:
    tensor = saved.read(name)
    return tensor if theta == 1.0 else (tensor.double() * theta ** POWERS[kind]).float()
