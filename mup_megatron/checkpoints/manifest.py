"""What a checkpoint says about its weights (mup.json), and the guard on resume.

Public names: `CheckpointManifest`, `Change`, `make_manifest`, `base_shapes_of`, `check_resume`, `check_settings`,
`settings_of`, `listed_files`, `MANIFEST`, `FORMAT`. checkpoint.py writes the folder that the file is in.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, StrictInt, ValidationError

from mup_megatron.config import Config, Model
from mup_megatron.data.prepare import tokenizer_file
from mup_megatron.data.tokenizer import tokenizer_digest
from mup_megatron.parallel.layout import Layout
from mup_megatron.rules.horizon import horizon
from mup_megatron.rules.table import Parametrization
from mup_megatron.util.errors import UserError, shown
from mup_megatron.util.files import read_text

FORMAT = 2
MANIFEST = "mup.json"
_MOST_DIFFERENCES = 20
_PACKAGES = ("torch", "megatron-core", "deepspeed", "mup-megatron")

# Keys whose change leaves the run the same run.
_FREE = (
    "run.name",
    "run.dir",
    "run.samples",
    "run.audit",
    "run.telemetry_interval",
    "proxy",
    "tuning",
    "slurm",
    "watch",
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
    "training.async_save",
    "training.recompute_granularity",
    "training.recompute_method",
    "training.recompute_num_layers",
)
_PATHS = ("data.files", "data.pairs.source", "data.pairs.target", "data.pairs.jsonl")
"""Where text lies, which the digest of the prepared data knows by what it holds."""


class Change(BaseModel):
    """A setting that changed on resume because a person named it (`--allow-change`).

    Args:
        step: updates done when the run went on.
        key: dotted.
        before: its value until then.
        now: its value since.
    """

    model_config = ConfigDict(frozen=True)

    step: StrictInt
    key: str
    before: Any
    now: Any


class CheckpointManifest(BaseModel):
    """What mup.json says. Parts that a reader can do without have a default.

    Args:
        step: updates done.
        config: of the run. It is plain data: a key that is refused today may stand in it.
        layout: how ranks split the model that wrote it.
        data_digest: of the prepared data.
        tokenizer: settings of the tokenizer.
        samples: sequences trained on.
        order_samples: that the order of the data was drawn for; None for train_steps · global_batch_size.
        base_head_size: d of the base model.
        base_shapes: base of every dimension by tensor; null where the dimension does not grow.
        multipliers: of rate, epsilon and weight decay, by tensor.
        versions: of the packages that wrote it.
        changes: of settings on resume; None in a run that was never resumed.
        vocabulary: rows of the embedding; only under `mup-megatron run`.
        key_prefix: what the names of its tensors begin with; only under `mup-megatron run`.
        fused_activation: whether bias and activation were one kernel; None where the random states tell the device.
        carried: factors of tensors on rate, epsilon and decay, beside the rules; only after a rebase.
        tokenizer_sha256: of the tokenizer's files; None where it has none, or where Megatron knows them.
        tokenizer_type: what Megatron calls its tokenizer; only under `mup-megatron run`.
        initialised_from: checkpoint that the weights of step 0 came from; None where they were initial values.
        applied: groups with their rates, forward multipliers, digest of the base; only under `mup-megatron run`.
        unread: options of Megatron's that no table has, as they were given; None where there were none.
        horizon: factors of the rules over batch and tokens; None where none is chosen.
        thetas: what was divided out of the stored weights, by tensor, where it is not 1; None where nothing was.
        as_built: a user's entries about tensors; only of a model that was parametrised as a script builds it.
        files: every other file of the checkpoint; None where Megatron writes it.
    """

    model_config = ConfigDict(frozen=True)

    step: StrictInt
    config: dict[str, Any]
    layout: dict[str, Any] = {}
    data_digest: str
    tokenizer: dict[str, Any] = {}
    samples: StrictInt | None = None
    order_samples: StrictInt | None = None
    base_head_size: int | None = None
    base_shapes: dict[str, list[StrictInt | None]]
    multipliers: dict[str, list[float | None]] = {}
    versions: dict[str, str] = {}
    changes: list[Change] | None = None
    vocabulary: StrictInt | None = None
    key_prefix: str | None = None
    fused_activation: bool | None = None
    tokenizer_sha256: str | None = None
    tokenizer_type: str | None = None
    carried: dict[str, list[float]] | None = None
    horizon: dict[str, float] | None = None
    thetas: dict[str, float] | None = None
    initialised_from: dict[str, Any] | None = None
    applied: dict[str, Any] | None = None
    unread: list[str] | None = None
    as_built: list[str] | None = None
    files: list[str] | None = None

    @classmethod
    def read(cls, folder: Path) -> CheckpointManifest:
        """The manifest of a checkpoint.

        Args:
            folder: of the checkpoint.

        Raises:
            UserError: it is damaged, of another format, or of another step than the folder's name says.
        """
        path = folder / MANIFEST
        found = _plain(path)
        if not isinstance(found, dict) or not {"format", "step"} <= set(found):
            raise UserError(f"{path}: expected a JSON object with format, step and config")
        if found["format"] != FORMAT:
            raise UserError(f"{folder}: written in format {shown(found['format'])}; this version reads format {FORMAT}")
        try:
            manifest = cls.model_validate(found)
        except ValidationError as error:
            raise UserError(f"{path}: {_said(error)}") from None
        named = re.fullmatch(r"step_(\d{8,})", folder.name)
        if manifest.step != (int(named[1]) if named else max(manifest.step, 0)):
            raise UserError(f"{path}: step is {shown(manifest.step)}; expected the folder's")
        return manifest

    def as_json(self) -> dict[str, Any]:
        """As it is written: with its format, and without parts that are None."""
        plain = self.model_dump()
        return {"format": FORMAT, **{name: value for name, value in plain.items() if value is not None}}

    def replaced(self, **parts: Any) -> CheckpointManifest:
        """The same manifest with other parts. Raises pydantic.ValidationError."""
        return type(self).model_validate({**dict(self), **parts})


_KINDS = {"dict_type": "JSON object", "list_type": "list", "int_type": "integer", "string_type": "text"}


def _said(error: ValidationError) -> str:
    """What is wrong with a manifest, in words."""
    first = error.errors()[0]
    where, kind = ".".join(map(str, first["loc"])), first["type"]
    if kind == "missing":
        return f"{where} is missing"
    return f"{where} is missing or no {_KINDS[kind]}" if kind in _KINDS else f"{where}: {first['msg']}"


def _plain(path: Path) -> Any:
    """The JSON of a manifest. Raises UserError."""
    try:
        return json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: damaged ({error})") from None


def listed_files(folder: Path) -> list[str]:
    """The files that the manifest of a checkpoint lists, whatever else it says, and in whichever format.

    Raises:
        UserError: the manifest cannot be read.
    """
    found = _plain(folder / MANIFEST)
    listed = found.get("files", []) if isinstance(found, dict) else None
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise UserError(f"{folder / MANIFEST}: files is no list of names")
    return listed


def base_shapes_of(parametrization: Parametrization) -> dict[str, list[int | None]]:
    """Base of every dimension by tensor; None where the dimension does not grow."""
    return {name: [dim.base_dim for dim in shape.infshape] for name, shape in parametrization.shapes.items()}


def make_manifest(parametrization: Parametrization, layout: Layout, data_digest: str, step: int) -> CheckpointManifest:
    """What is written beside the weights.

    It takes no `Setup`, since `mup-megatron run` has none: there Megatron's own options are the run.

    Args:
        parametrization: of the run; it knows the config.
        layout: how ranks split the model.
        data_digest: of the prepared data.
        step: updates done.
    """
    config = parametrization.config
    made = {
        "step": step,
        "config": _settings_beside(config),
        "layout": {name: value for name, value in dataclasses.asdict(layout).items() if name != "stages"},
        "data_digest": data_digest,
        "tokenizer": config.data.tokenizer.model_dump(),
        "tokenizer_sha256": tokenizer_digest(tokenizer_file(config)),
        "samples": step * config.training.global_batch_size,
        "base_head_size": parametrization.base_head_size,
        "base_shapes": base_shapes_of(parametrization),
        "multipliers": {
            name: [tensor.lr_multiplier, tensor.eps_multiplier, tensor.weight_decay_multiplier]
            for name, tensor in parametrization.tensors.items()
        },
        "horizon": dataclasses.asdict(horizon(config)) if config.parametrization.has_horizon_rule else None,
        "thetas": {n: float(tensor.theta) for n, tensor in parametrization.tensors.items() if tensor.theta != 1}
        or None,
        "carried": {name: list(factors) for name, factors in parametrization.carried.items()} or None,
        "versions": {package: importlib.metadata.version(package) for package in _PACKAGES},
    }
    return CheckpointManifest(**json.loads(json.dumps(made)))  # as it will be read: keys are text, tuples are lists


def _settings_beside(config: Config) -> dict[str, Any]:
    """What a checkpoint keeps of its run's config; a relative `data.dir` as it is seen from the run's folder."""
    settings = settings_of(config.model_dump())
    if config.data.dir is not None and not os.path.isabs(config.data.dir):
        seen = os.path.relpath(os.path.realpath(config.data.dir), os.path.realpath(config.run.dir))
        settings["data"] = {**settings["data"], "dir": seen}
    return settings


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config as a checkpoint keeps it: the schedule's length decides every rate, the number of steps does not."""
    training = config["training"]
    return {**config, "training": {**training, "lr_decay_steps": training["lr_decay_steps"] or training["train_steps"]}}


_ADVICE = "change the config back, choose another run.dir, or name a deliberate change with --allow-change KEY"


def check_resume(
    found: CheckpointManifest,
    current: CheckpointManifest,
    where: Path,
    allowed: Iterable[str] = (),
    advice: str = _ADVICE,
) -> list[Change]:
    """The guard: a checkpoint of another model, parametrization or hyperparameter does not go on as if it were this.

    Args:
        found: the checkpoint's manifest.
        current: the manifest that this run would write.
        where: the checkpoint, for the message.
        allowed: keys whose change is deliberate (`--allow-change`).
        advice: what to do about it, for the message.

    Returns:
        The deliberate changes.

    Raises:
        UserError: a table of the keys that differ, with both values.
    """
    free = (*_FREE, *_PATHS) if found.data_digest == current.data_digest else _FREE
    changed = check_settings(_compared(found), _compared(current), where, allowed, advice, free)
    return [Change(step=found.step, key=key, before=before, now=now) for key, before, now in changed]


def check_settings(
    found: Mapping[str, Any],
    current: Mapping[str, Any],
    where: Path,
    allowed: Iterable[str] = (),
    advice: str = _ADVICE,
    free: Sequence[str] = (*_FREE, *_PATHS),
) -> list[tuple[str, Any, Any]]:
    """The guard of `check_resume` on settings alone, of which there may be no manifest.

    A key that the run does not say came with a later version. By default it leaves runs as they were, so then it is no
    difference.

    Args:
        found: what a run was trained with, from `settings_of`.
        current: what it would go on with.
        where: the run, for the message.
        allowed: keys whose change is deliberate (`--allow-change`).
        advice: what to do about it, for the message.
        free: keys that may change. Paths of text are among them: preparing the data refuses other text, or has.

    Returns:
        The deliberate changes: key, value before, value now.

    Raises:
        UserError: a table of the keys that differ, with both values.
    """
    before, now = _flatten(found), _flatten(current)
    before |= {key: value for key, value in now.items() if key not in before and value == _default(key)}
    changed = [
        key for key in sorted(set(before) | set(now)) if before.get(key) != now.get(key) and not _within(key, free)
    ]
    allowed = tuple(allowed)
    differences = [(key, shown(before.get(key)), shown(now.get(key))) for key in changed if not _within(key, allowed)]
    if differences:
        raise UserError(
            f"{where}: the checkpoint does not belong to this config; {advice}",
            _table([("key", "checkpoint", "config"), *differences[:_MOST_DIFFERENCES]])
            + [f"... and {len(differences) - _MOST_DIFFERENCES} more"] * (len(differences) > _MOST_DIFFERENCES),
        )

    return [(key, before.get(key), now.get(key)) for key in changed]


def _default(key: str) -> Any:
    """Of a config's key; None of what is none, or has no default."""
    section: Any = Config
    *sections, last = key.split(".")
    for name in sections:
        field = getattr(section, "model_fields", {}).get(name)
        section = field.annotation if field is not None else None
    field = getattr(section, "model_fields", {}).get(last)
    return None if field is None or field.is_required() else field.get_default(call_default_factory=True)


def _within(key: str, sections: Iterable[str]) -> bool:
    return any(key == section or key.startswith(section + ".") for section in sections)


def _compared(manifest: CheckpointManifest) -> dict[str, Any]:
    return {
        **manifest.config,
        "data_digest": manifest.data_digest,
        "base_shapes": manifest.base_shapes,
        "carried": manifest.carried or {},
        "horizon": manifest.horizon or {},
        "thetas": manifest.thetas or {},
        **({} if manifest.as_built is None else {"as_built": manifest.as_built}),
        **_lion_steps(manifest.config),
    }


def _lion_steps(config: Mapping[str, Any]) -> dict[str, str]:
    """What Lion steps, which the engine decides, although it is free to change under every other optimizer."""
    flat = _flatten(config)
    if flat.get("optimizer.name") != "lion":
        return {}
    every = flat.get("parallel.engine") == "deepspeed"
    return {"optimizer.steps": "every tensor" if every else "matrices inside the blocks"}


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {prefix: value}
    result: dict[str, Any] = {}
    for key, inner in value.items():
        # Parameter names hold dots of their own; they stay one key.
        result.update(_flatten(inner, f"{prefix}.{key}" if prefix else str(key)))
    return result


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [f"  {line}" for line in lines]
