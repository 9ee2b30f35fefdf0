"""What a run's folder holds, read. Public names: `Run`, `Curve`, `read_run`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mup_megatron.errors import UserError
from mup_megatron.files import parse_yaml
from mup_megatron.report.parts import (
    Explanation,
    Made,
    Plan,
    Settings,
    Tuned,
    checked,
    read_json,
    read_lines,
    read_text,
)
from mup_megatron.report.proofs import result_files
from mup_megatron.run_directory import CONTROLS, PLAN


@dataclass(frozen=True, kw_only=True)
class Curve:
    """metrics.jsonl of one training run.

    Args:
        name: what to call it in a legend.
        steps: lines of steps.
        evaluations: lines of evaluations.
    """

    name: str
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]

    @property
    def eval_loss(self) -> float | None:
        """The last evaluation's loss."""
        return self.evaluations[-1]["eval_loss"] if self.evaluations else None

    @property
    def seconds(self) -> float:
        """Spent in steps."""
        return sum(line["seconds"] for line in self.steps)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run's folder.

    Args:
        directory: of the run.
        config: config.yaml, resolved.
        explanation: explain.json.
        record: the transfer record that the run trained with; None without one.
        plan: what tuning and this run's target cost (plan.json); None for a run that only trained.
        target: its training; None before it began.
        versions: of what the target ran with, else of what tuned; empty where nothing tells.
        controls: the same target in other parametrizations (`CONTROLS`), by name; empty without any.
    """

    directory: Path
    config: dict[str, Any]
    explanation: dict[str, Any] | None
    record: dict[str, Any] | None
    plan: dict[str, Any] | None
    target: Curve | None
    versions: dict[str, str]
    controls: dict[str, Curve]

    @property
    def curves(self) -> list[Curve]:
        """Those that are there."""
        return [curve for curve in (self.target, *self.controls.values()) if curve is not None]


def read_run(directory: Path) -> Run:
    """Reads a run's folder, whichever of its parts are there.

    Raises:
        UserError: it is no run's folder.
    """
    config = _settings(directory / "config.yaml")
    own, named = directory / "transfer.json", (config.get("tuning") or {}).get("record")
    record = _record(own) or (_record(Path(named)) if named else None)
    target = _curve(directory, CONTROLS.get(_parametrization(config), "µP"))
    if target is None and record is None and not result_files(directory):
        raise UserError(
            f"{directory}: neither metrics.jsonl nor transfer.json is there, and no check; expected the folder of a run"
        )
    return Run(
        directory=directory,
        config=config,
        explanation=read_json(directory / "explain.json", Explanation),
        record=record,
        plan=read_json(directory / PLAN, Plan),
        target=target,
        versions=_versions(directory) or (record or {}).get("versions", {}),
        controls={
            name: curve for name, said in CONTROLS.items() if (curve := _curve(directory / name, said)) is not None
        },
    )


def _settings(path: Path) -> dict[str, Any]:
    text = read_text(path)
    return {} if text is None else checked(Settings, parse_yaml(text, str(path)), path)


def _record(path: Path) -> dict[str, Any] | None:
    from mup_megatron.tuning.record import read_record

    record = read_record(path, None)
    return None if record is None else checked(Tuned, record, path)


def _versions(directory: Path) -> dict[str, str]:
    """Of the newest checkpoint's record."""
    newest = max((directory / "checkpoints").glob("step_*/mup.json"), default=None)
    return read_json(newest, Made)["versions"] if newest else {}


def _parametrization(config: dict[str, Any]) -> str:
    return (config.get("parametrization") or {}).get("name", "mup")


def _curve(directory: Path, name: str) -> Curve | None:
    found = read_lines(directory / "metrics.jsonl")
    return None if found is None else Curve(name=name, steps=found[0], evaluations=found[1])
