"""transfer.json: the tuned values, what each becomes on the target, and what they were found with.

Public names: `TransferRecord`, `make_record`, `write_record`, `read_record`, `record_path`, `becomes`, `remarks`,
`not_transferred`.

A record belongs to a family (family.py). A config whose digest differs is refused with the keys that differ.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from mup_megatron.config import Config, derive
from mup_megatron.config.per_tensor import split_name
from mup_megatron.model.explain import explain, without_numbers
from mup_megatron.parallel.layout import Layout
from mup_megatron.rules.table import Parametrization
from mup_megatron.tuning.descent import moves_told
from mup_megatron.tuning.family import differences, digest, digested
from mup_megatron.tuning.fitted import Fitted, told
from mup_megatron.tuning.objective import LOSS, objective_of
from mup_megatron.tuning.outcome import open_sides
from mup_megatron.tuning.predicted import predicted
from mup_megatron.tuning.record_parts import check_record
from mup_megatron.tuning.space import Value, proxy_config, values_of, with_values, without_fitted
from mup_megatron.util.errors import ConfigError, UserError
from mup_megatron.util.files import open_new, read_text

FORMAT = 1
_MOST_DIFFERENCES = 8

# What a value that is nearer to the end of its range than this share of the range is said to be at.
_NEAR = 0.1
_PACKAGES = ("torch", "megatron-core", "deepspeed", "optuna", "mup-megatron")


def record_path(config: Config) -> Path:
    """`tuning.record`, else transfer.json in the run's folder."""
    return Path(config.record_path)


def becomes(parametrization: Parametrization, layout: Layout) -> dict[str, Any]:
    """What a config's hyperparameters are on its model: the forward multipliers, and a row per kind of tensor."""
    explained = explain(parametrization, layout)
    rows: dict[str, dict[str, Any]] = {}
    for parameter in explained["parameters"]:
        blocks = parameter["blocks"]
        std = {block["name"]: block["init_std"] for block in blocks} if blocks else parameter["init_std"]
        rows.setdefault(
            without_numbers(parameter["name"]),
            {
                "lr": parameter["lr"],
                "lr_multiplier": parameter["lr_multiplier"],
                "init": parameter["init"],
                "init_std": std,
                "eps": parameter["eps"],
                "weight_decay": parameter["weight_decay"],
            },
        )
    return {"forward": explained["forward"], "tensors": rows}


def extrapolated(config: Config, found: TransferRecord | None = None) -> list[str]:
    """In what the target lies beyond what the proxy was tuned on, besides width, in words.

    Args:
        config: the target's run.
        found: the record whose values it takes; None for one that is tuned as the config says.
    """
    tuned = {**_tuned_on(config), **({} if found is None else found.proxy.get("trained", {}))}
    target = _trained(config)
    said = []
    for name in ("train_steps", "global_batch_size", "seq_length", "tokens", "num_layers"):
        small, large = tuned[name], target[name]
        if small != large:
            factor = large / small
            times = f" ({factor:.3g} times)" if factor >= 2 else f" (1/{1 / factor:.3g})" if factor <= 0.5 else ""
            said.append(f"{_MEASURES[name]}: tuned at {small:,}, target at {large:,}{times}")
    return said


_REGULARISERS = ("weight_decay",)
"""Of what can be tuned, what Tensor Programs V (arXiv 2203.03466, table 1 and section 6) counts among regularisers."""


def not_transferred(names: Iterable[str]) -> list[str]:
    """Which of the tuned hyperparameters µTransfer does not move, in words.

    Args:
        names: of what was searched.
    """
    return [
        f"{name} was tuned: it regularises, and how much of it is best depends on the size of model and data, so its "
        "value need not transfer (docs/what-transfers.md)"
        for name in names
        if (split_name(name) or ("", name))[1] in _REGULARISERS
    ]


_MEASURES = {
    "train_steps": "optimizer steps",
    "global_batch_size": "global batch size",
    "seq_length": "tokens per sequence",
    "tokens": "tokens",
    "num_layers": "layers",
}


def _tuned_on(config: Config) -> dict[str, int]:
    return _trained(proxy_config(config, values_of(config), seed=config.run.seed, directory=Path(config.run.dir)))


def _trained(config: Config) -> dict[str, int]:
    training = config.training
    return {
        "train_steps": training.train_steps,
        "global_batch_size": training.global_batch_size,
        "seq_length": training.seq_length,
        "tokens": training.train_steps * training.global_batch_size * config.sample_tokens,
        "num_layers": config.model.num_layers,
    }


@dataclass(frozen=True, kw_only=True)
class TransferRecord:
    """What transfer.json says.

    Args:
        created: when, ISO 8601.
        digest: of `family`.
        family: what must be equal for the values to transfer, by dotted key (family.py).
        values: every hyperparameter at the base, by name.
        tuned: names of those that were searched; the others are as the config had them.
        target: of the run that tuned: its name, its sizes, what the values become there, where it is extrapolated, and
            which of the values µTransfer does not move.
        proxy: its sizes, and on how many steps, tokens and layers it was trained.
        rules: the parametrization and the optimizer's update rule.
        study: what the values were found with (outcome.Choice.as_json).
        budget: the plan, and what was spent.
        versions: of the packages that tuned.
        ladder: what a ladder measured of the family (fitted.Fitted); empty without one.
    """

    created: str
    digest: str
    family: Mapping[str, Any]
    values: Mapping[str, Value]
    tuned: Sequence[str]
    target: Mapping[str, Any] = field(default_factory=dict)
    proxy: Mapping[str, Any] = field(default_factory=dict)
    rules: Mapping[str, Any] = field(default_factory=dict)
    study: Mapping[str, Any]
    budget: Mapping[str, Any]
    versions: Mapping[str, str] = field(default_factory=dict)
    ladder: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, config: Config | None) -> TransferRecord | None:
        """The record in a file; see `read_record`."""
        found = read_record(path, config)
        if found is None:
            return None
        return cls(**{each.name: found[each.name] for each in fields(cls) if each.name in found})

    def as_json(self) -> dict[str, Any]:
        """As it is written: with its format, and a checksum over the rest."""
        plain = {"format": FORMAT, **vars(self)}
        if not self.ladder:
            del plain["ladder"]
        return {**plain, "checksum": digest(plain)}


def make_record(
    parametrization: Parametrization,
    layout: Layout,
    values: Mapping[str, Value],
    *,
    study: Mapping[str, Any],
    budget: Mapping[str, Any],
    ladder: Fitted | None = None,
) -> TransferRecord:
    """The record of what was tuned.

    Args:
        parametrization: of the target's run, `values` in its config.
        layout: of the same run.
        values: every hyperparameter at the base.
        study: what they were found with (outcome.Choice.as_json).
        budget: the plan, and what was spent.
        ladder: of the config; a rule that takes its exponent from one is left out where there is none.
    """
    config = parametrization.config
    chosen = config.parametrization.model_dump()
    if config.parametrization.unfitted:
        config = derive(config, without_fitted(config))
        parametrization = replace(parametrization, config=config)
    settings = digested(config)
    made = {
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "digest": digest(settings),
        "family": settings,
        "values": dict(values),
        "tuned": list(config.tuning.search),
        "target": {
            "name": config.run.name,
            "sizes": {name: getattr(config.model, name) for name in (*config.base.sizes, "num_layers")},
            "becomes": {**becomes(parametrization, layout), **({"tensors": {}} if config.model.as_built else {})},
            "extrapolated": extrapolated(config),
            "not_transferred": not_transferred(config.tuning.search),
            **({} if ladder is None else {"ladder": told(config, ladder), "predicted": predicted(config, ladder)}),
        },
        "proxy": {
            "sizes": {name: getattr(config.proxy_model, name) for name in (*config.base.sizes, "num_layers")},
            "trained": _tuned_on(config),
        },
        "rules": {
            **chosen,
            "optimizer": parametrization.update_rule,
        },
        "study": dict(study),
        "budget": dict(budget),
        "versions": {
            "python": platform.python_version(),
            **{package: importlib.metadata.version(package) for package in _PACKAGES},
        },
        "ladder": {} if ladder is None else ladder.as_json(),
    }
    return TransferRecord(**json.loads(json.dumps(made)))  # as it will be read: keys are text, tuples are lists


def write_record(path: Path, record: TransferRecord | Mapping[str, Any]) -> None:
    """Writes a record, or other plain data, whole or not at all."""
    plain = record.as_json() if isinstance(record, TransferRecord) else record
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with open(open_new(partial), "w", encoding="utf-8") as file:
        json.dump(plain, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def read_record(path: Path, config: Config | None) -> dict[str, Any] | None:
    """The record in a file as plain data, checked; None if there is no file. `TransferRecord.read` gives it types.

    Args:
        path: of the record.
        config: the run that wants its values; None to read it without asking whom it is for.

    Raises:
        UserError: damaged, edited by hand, of a newer format, or of another family; says which keys differ.
    """
    try:
        text = read_text(path)
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
    check_record(path, record)
    if config is not None:
        _check_family(path, record, config)
        _check_trials(path, record, config)
        try:
            with_values(config, record["values"])
        except ConfigError as error:
            raise UserError(f"{path}: values: {error.key}: {error.problem}") from None
        except KeyError as error:
            raise UserError(f"{path}: values: {error.args[0]}") from None
    return record


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


def _check_trials(path: Path, record: Mapping[str, Any], config: Config) -> None:
    """Rules over batch and tokens count from what the record's trials had, which must be what the config says."""
    trained = record.get("proxy", {}).get("trained", {})
    if not config.parametrization.has_horizon_rule:
        return
    for name in ("global_batch_size", "seq_length", "train_steps"):
        here = getattr(config.tuning, name) or getattr(config.training, name)
        if name in trained and trained[name] != here:
            raise UserError(
                f"{path}: its values were found at {name} {trained[name]:,}, from which the rules over batch and "
                f"tokens count, but the config's trials have {here:,}; expected tuning.{name}: {trained[name]}"
            )


def remarks(study: Mapping[str, Any], extrapolated: Sequence[str]) -> list[str]:
    """What a reader of the record must know of the choice, in words.

    Args:
        study: the record's.
        extrapolated: where the target at hand leaves what was tuned on.
    """
    said = [line for name in study["interior"] for line in _open(study, name)]
    said.append(_noise(study))
    said += moves_told(study["descent"], objective_of(study)) if "descent" in study else []
    said += [f"extrapolated, {line}" for line in extrapolated]
    return said + not_transferred(study["interior"])


def _open(study: Mapping[str, Any], name: str) -> list[str]:
    """Where a better value may lie beyond those that were tried, in words."""
    value = study.get("values", {}).get(name)
    tried = [trial["values"][name] for trial in study.get("trials", ()) if name in trial["values"]]
    said = []
    for side in open_sides(value, tried, study.get("ranges", {}).get(name)) if tried else ():
        adjective = "largest" if side.above else "smallest"
        if side.gap < _NEAR:
            where = "at the upper end" if side.above else "at the lower end"
            said.append(
                f"{name}: {value:.3g} is {where} of the range that was searched; a wider one may hold better ones"
            )
            continue
        tells = (
            f"is the {adjective} that was tried"
            if side.reach == value
            else f"is next to the {adjective} that was tried, {side.reach:.3g}"
        )
        said.append(f"{name}: {value:.3g} {tells}, and the range goes on to {side.end:.3g}, where nothing was tried")
    return said


def _noise(study: Mapping[str, Any]) -> str:
    """Which other trials cannot be told from the chosen one, in words."""
    noise, candidates = study["noise"], study["candidates"]
    if noise is None or not candidates:
        return "no repetition with other seeds: how much of a difference is noise is not known"
    chosen, repeated = candidates[0], sum(len(candidate["losses"]) - 1 for candidate in candidates)
    objective = objective_of(study)
    unit = "" if objective is LOSS else f" {objective.name}"
    measured = f"±{noise:.{objective.digits}f}{unit} per run, from {repeated} repetition{'s' if repeated > 1 else ''}"
    among = {candidate["slot"] for candidate in candidates}
    once = [
        trial
        for trial in study.get("trials", ())
        if trial["state"] == "complete" and not trial.get("repeats") and trial["slot"] not in among
    ]
    alike = {candidate["slot"] for candidate in candidates if candidate["within_noise"]}
    bound = 2 * noise * math.sqrt(1 + 1 / len(chosen["losses"]))
    alike |= {trial["slot"] for trial in once if trial["loss"] is not None and trial["loss"] - chosen["mean"] < bound}
    if len(candidates) == 1 and not once:
        return f"no other trial ran to its end, so none can be told from noise ({measured})"
    single = f"; {len(once)} of those compared ran once" if once else ""
    if alike:
        names = ", ".join(f"trial-{slot:03d}" for slot in sorted(alike))
        return f"within noise of the chosen trial ({measured}{single}): {names}"
    return f"of the trials that ran to their end no other is within noise of the chosen one ({measured}{single})"
