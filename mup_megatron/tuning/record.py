"""transfer.json: the tuned values, what each becomes on the target, and what they were found with.

Public names: `make_record`, `write_record`, `read_record`, `record_path`, `becomes`, `remarks`.

A record belongs to a family (family.py). A config whose digest differs is refused with the keys that differ.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mup_megatron.config import Config
from mup_megatron.errors import UserError
from mup_megatron.explain import explain, family
from mup_megatron.files import open_new
from mup_megatron.layout import Layout
from mup_megatron.parametrization import Parametrization
from mup_megatron.tuning.family import differences, digest, digested
from mup_megatron.tuning.space import Value, proxy_config, values_of, with_values

FORMAT = 1
_MOST_DIFFERENCES = 8
_PARTS = {"created": str, "digest": str, "family": dict, "values": dict, "tuned": list, "study": dict, "budget": dict}
_PACKAGES = ("torch", "megatron-core", "deepspeed", "optuna", "mup-megatron")


def record_path(config: Config) -> Path:
    """`tuning.record`, else transfer.json in the run's folder."""
    return Path(config.record_path)


def becomes(config: Config, parametrization: Parametrization, layout: Layout) -> dict[str, Any]:
    """What the config's hyperparameters are on its model: the forward multipliers, and a row per kind of tensor."""
    explained = explain(config, parametrization, layout)
    rows: dict[str, dict[str, Any]] = {}
    for parameter in explained["parameters"]:
        blocks = parameter["blocks"]
        std = {block["name"]: block["init_std"] for block in blocks} if blocks else parameter["init_std"]
        rows.setdefault(
            family(parameter["name"]),
            {
                "lr": parameter["lr"],
                "lr_multiplier": parameter["lr_multiplier"],
                "init_std": std,
                "eps": parameter["eps"],
                "weight_decay": parameter["weight_decay"],
            },
        )
    return {"forward": explained["forward"], "tensors": rows}


def extrapolated(config: Config) -> list[str]:
    """In what the target lies beyond what the proxy was tuned on, besides width, in words."""
    proxy = proxy_config(config, values_of(config), seed=config.run.seed, directory=Path(config.run.dir))
    said = []
    for name, small, large in (
        ("optimizer steps", proxy.training.train_steps, config.training.train_steps),
        ("global batch size", proxy.training.global_batch_size, config.training.global_batch_size),
        ("layers", proxy.model.num_layers, config.model.num_layers),
    ):
        if small != large:
            said.append(f"{name}: tuned at {small}, target at {large}")
    return said


def make_record(
    config: Config,
    parametrization: Parametrization,
    layout: Layout,
    values: Mapping[str, Value],
    *,
    study: Mapping[str, Any],
    budget: Mapping[str, Any],
) -> dict[str, Any]:
    """The record as plain data.

    Args:
        config: the target's run, `values` in it.
        parametrization: of that config.
        layout: of that config.
        values: every hyperparameter at the base.
        study: what they were found with (outcome.Choice.as_json).
        budget: the plan, and what was spent.
    """
    settings = digested(config)
    record = {
        "format": FORMAT,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "digest": digest(settings),
        "family": settings,
        "values": dict(values),
        "tuned": list(config.tuning.search),
        "target": {
            "name": config.run.name,
            "sizes": {name: getattr(config.model, name) for name in (*config.base.sizes, "num_layers")},
            "becomes": becomes(config, parametrization, layout),
            "extrapolated": extrapolated(config),
        },
        "proxy": {"sizes": {name: getattr(config.proxy_model, name) for name in (*config.base.sizes, "num_layers")}},
        "rules": {
            **config.parametrization.model_dump(),
            "optimizer": parametrization.rule,
            "batch": "none",
            "horizon": "none",
        },
        "study": dict(study),
        "budget": dict(budget),
        "versions": {
            "python": platform.python_version(),
            **{package: importlib.metadata.version(package) for package in _PACKAGES},
        },
    }
    record = json.loads(json.dumps(record))  # as it will be read: keys are text, tuples are lists
    return {**record, "checksum": digest(record)}


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Writes the record whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with open(open_new(partial), "w", encoding="utf-8") as file:
        json.dump(record, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def read_record(path: Path, config: Config | None) -> dict[str, Any] | None:
    """The record of a config, if it is there.

    Args:
        path: of the record.
        config: the run that wants its values; None to read it without asking whom it is for.

    Raises:
        UserError: damaged, edited by hand, of a newer format, or of another family; says which keys differ.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot read the transfer record: {error}") from None
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path}: line {error.lineno}: not valid JSON: {error.msg}; expected a transfer record"
        ) from None
    except (ValueError, RecursionError):
        raise UserError(f"{path}: not valid JSON; expected a transfer record") from None
    if not isinstance(record, dict) or not isinstance(record.get("format"), int):
        raise UserError(f"{path}: not a transfer record: it names no format")
    if record["format"] != FORMAT:
        raise UserError(f"{path}: format {record['format']}; this version of mup-megatron reads format {FORMAT}")
    if record.get("checksum") != digest({key: value for key, value in record.items() if key != "checksum"}):
        raise UserError(
            f"{path}: checksum: does not match what the record says, so it was edited or damaged; move it "
            "away, and tune again, or set values by hand under hparams: with tuning.run: never"
        )
    for key, kind in _PARTS.items():
        if not isinstance(record.get(key), kind):
            raise UserError(f"{path}: {key} is missing or no {kind.__name__}")
    if not _is_study(record["study"]):
        raise UserError(f"{path}: study: expected candidates, noise and interior as tuning writes them")
    if config is not None:
        _check_family(path, record, config)
        try:
            with_values(config, record["values"])
        except (KeyError, ValidationError) as error:
            problem = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error.args[0]
            raise UserError(f"{path}: values: {problem}") from None
    return record


def _is_study(study: Mapping[str, Any]) -> bool:
    """Whether a study says what is read of it, however the target goes on."""
    candidates = study.get("candidates")
    return (
        isinstance(study.get("interior"), dict)
        and isinstance(study.get("noise", ""), float | int | None)
        and isinstance(candidates, list)
        and all(
            isinstance(candidate, dict) and isinstance(candidate.get("slot"), int) and "within_noise" in candidate
            for candidate in candidates
        )
    )


def _check_family(path: Path, record: Mapping[str, Any], config: Config) -> None:
    settings = digested(config)
    if record["digest"] == digest(settings):
        return
    tuned = record["family"]
    # Through JSON, as the record went, so that what is equal there is equal here.
    settings = json.loads(json.dumps(settings))
    differing = differences(tuned, settings, "in the record", "in the config")[:_MOST_DIFFERENCES]
    raise UserError(
        f"{path}: the transfer record belongs to another family than {config.source or 'this config'} "
        f"({'; '.join(differing)}); change the config back, or name another tuning.record or run.dir to tune again"
    )


def remarks(found: Mapping[str, Any], extrapolated: Sequence[str]) -> list[str]:
    """What a reader of the record must know of the choice, in words.

    Args:
        found: the record.
        extrapolated: where the target at hand leaves what was tuned on.
    """
    study, said = found["study"], []
    edge = [name for name, interior in study["interior"].items() if not interior]
    if edge:
        said.append(f"at the edge of the values that were tried: {', '.join(edge)}; a wider range may hold better ones")
    alike = [f"trial-{candidate['slot']:03d}" for candidate in study["candidates"] if candidate["within_noise"]]
    if study["noise"] is None:
        said.append("no repetition with other seeds: how much of a difference is noise is not known")
    elif alike:
        said.append(f"within noise of the chosen trial (±{study['noise']:.4f} per run): {', '.join(alike)}")
    else:
        said.append(f"no other candidate is within noise (±{study['noise']:.4f} per run) of the chosen trial")
    said += [f"extrapolated, {line}" for line in extrapolated]
    return said
