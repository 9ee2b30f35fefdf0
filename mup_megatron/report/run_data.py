"""What a run's folder holds, read. Public names: `Run`, `Curve`, `read_run`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mup_megatron.checkpoints.checkpoint import SAMPLES
from mup_megatron.checkpoints.run_directory import CONTROLS, PLAN
from mup_megatron.config import ONE_MINUS, one_minus
from mup_megatron.config.per_tensor import full_name
from mup_megatron.report.parts import (
    Explanation,
    Made,
    Plan,
    Settings,
    checked,
    read_json,
    read_lines,
    read_samples,
    read_text,
)
from mup_megatron.report.proofs import result_files
from mup_megatron.tuning.record import TransferRecord
from mup_megatron.tuning.space import same
from mup_megatron.util.errors import UserError
from mup_megatron.util.files import parse_yaml


@dataclass(frozen=True, kw_only=True)
class Curve:
    """metrics.jsonl of one training run.

    Args:
        name: what to call it in a legend.
        steps: lines of steps.
        evaluations: lines of evaluations.
        settings: the config that it trained with; empty where nothing tells.
        changes: of settings, on the way (`--allow-change`): {"step", "key", "before", "now"}.
    """

    name: str
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    settings: dict[str, Any] = field(default_factory=dict)
    changes: list[dict[str, Any]] = field(default_factory=list)

    @property
    def eval_loss(self) -> float | None:
        """The last evaluation's loss."""
        return self.evaluations[-1]["eval_loss"] if self.evaluations else None

    @property
    def last(self) -> int:
        """Steps that it took."""
        return max((line["step"] for line in self.steps), default=0)

    @property
    def whole(self) -> int | None:
        """Steps that it is to take; None where nothing tells."""
        return (self.settings.get("training") or {}).get("train_steps")

    @property
    def unfinished(self) -> str:
        """What is missing of it, in words; empty where nothing is."""
        if self.steps and not math.isfinite(self.steps[-1]["loss"]):
            return f"diverged at step {self.last}"
        return f"unfinished, {self.last} of {self.whole} steps" if self.whole and self.last < self.whole else ""

    @property
    def result(self) -> str:
        """Its last evaluation's loss, and what is missing of the run, in words."""
        if self.evaluations:
            at = self.evaluations[-1]["step"]
            said = f"{self.eval_loss:.4f}" + (f" at step {at}" if at < self.last or self.unfinished else "")
            if "bleu" in self.evaluations[-1]:
                said += f", BLEU {self.evaluations[-1]['bleu']:.2f}"
        else:
            said = "never evaluated" + (f", training loss {self.steps[-1]['loss']:.4f}" if self.steps else "")
        return f"{said}, {self.unfinished}" if self.unfinished else said

    @property
    def values(self) -> dict[str, Any]:
        """The hyperparameters at the base that it trained with; empty where nothing tells."""
        schedule = (self.settings.get("training") or {}).get("lr_schedule")
        optimizer = self.settings.get("optimizer") or {}
        averages = (*(optimizer.get("betas") or (None, None)), optimizer.get("momentum"))
        found = dict(self.settings.get("hparams") or {})
        for entry, factors in (found.pop("per_tensor", None) or {}).items():
            found |= {full_name(entry, what): factor for what, factor in factors.items() if factor != 1.0}
        found |= {name: one_minus(each) for name, each in zip(ONE_MINUS, averages, strict=True) if each is not None}
        return {**found, **({"lr_schedule": schedule} if schedule else {})}

    @property
    def seconds(self) -> float:
        """Spent in steps."""
        return sum(line["seconds"] for line in self.steps)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run's folder.

    Args:
        directory: of the run.
        config: what the target trained with (explain.json), before it began that of tuning (config.yaml).
        explanation: explain.json.
        record: the transfer record that the config names; `others` tells what the run did not take from it.
        plan: what tuning and this run's target cost (plan.json); None for a run that only trained.
        target: its training; None before it began.
        versions: of what the target ran with, else of what tuned; empty where nothing tells.
        controls: the same target in other parametrizations (`CONTROLS`), by name; empty without any.
        samples: what the target wrote at evaluations (`run.samples`): {"step", "prompt", "text"}.
    """

    directory: Path
    config: dict[str, Any]
    explanation: dict[str, Any] | None
    record: TransferRecord | None
    plan: dict[str, Any] | None
    target: Curve | None
    versions: dict[str, str]
    controls: dict[str, Curve]
    samples: list[dict[str, Any]] = field(default_factory=list)

    @property
    def curves(self) -> list[Curve]:
        """Those that are there."""
        return [curve for curve in (self.target, *self.controls.values()) if curve is not None]

    @property
    def has_position_bias(self) -> bool:
        """Whether the model adds a bias to attention, which has a multiplier."""
        return (self.config.get("model") or {}).get("position_embedding_type") in ("relative", "alibi")

    @property
    def predicted(self) -> dict[str, Any] | None:
        """The loss that a ladder told of the target before it was trained (tuning/predicted.py); None without one."""
        said = (self.explanation or {}).get("predicted") or (self.plan or {}).get("predicted")
        return dict(said) if said else None

    @property
    def others(self) -> dict[str, Any]:
        """The hyperparameters that the target trained with and that the record has otherwise."""
        tuned = self.record.values if self.record is not None else {}
        trained = self.target.values if self.target is not None else {}
        return {name: trained[name] for name in tuned if name in trained and not same(name, trained[name], tuned[name])}


def read_run(directory: Path) -> Run:
    """Reads a run's folder, whichever of its parts are there.

    Raises:
        UserError: it is no run's folder.
    """
    explanation = read_json(directory / "explain.json", Explanation)
    config = (explanation or {}).get("config") or _settings(directory / "config.yaml")
    named = (config.get("tuning") or {}).get("record")
    record = TransferRecord.read(Path(named) if named else directory / "transfer.json", None)
    target = _curve(directory, config, explanation)
    if target is None and record is None and not result_files(directory):
        raise UserError(
            f"{directory}: neither metrics.jsonl nor transfer.json is there, and no check; expected the folder of a run"
        )
    return Run(
        directory=directory,
        config=config,
        explanation=explanation,
        record=record,
        plan=read_json(directory / PLAN, Plan),
        target=target,
        versions=_versions(directory) or ({} if record is None else record.versions),
        controls={name: curve for name in CONTROLS if (curve := _control(directory / name, name)) is not None},
        samples=read_samples(directory / SAMPLES),
    )


def _settings(path: Path) -> dict[str, Any]:
    text = read_text(path)
    return {} if text is None else checked(Settings, parse_yaml(text, str(path)), path)


def _versions(directory: Path) -> dict[str, str]:
    """Of the newest checkpoint's record."""
    newest = max((directory / "checkpoints").glob("step_*/mup.json"), default=None)
    return read_json(newest, Made)["versions"] if newest else {}


def _parametrization(config: dict[str, Any]) -> str:
    return (config.get("parametrization") or {}).get("name", "mup")


def _control(directory: Path, name: str) -> Curve | None:
    explanation = read_json(directory / "explain.json", Explanation) or {}
    return _curve(directory, explanation.get("config") or {"parametrization": {"name": name}}, explanation)


def _curve(directory: Path, config: dict[str, Any], explanation: dict[str, Any] | None) -> Curve | None:
    found = read_lines(directory / "metrics.jsonl")
    if found is None:
        return None
    return Curve(
        name=CONTROLS.get(_parametrization(config), "µP"),
        steps=found[0],
        evaluations=found[1],
        settings=config,
        changes=(explanation or {}).get("changes", []),
    )
