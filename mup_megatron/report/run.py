"""What a run's folder holds, read. Public names: `Run`, `Curve`, `read_run`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mup_megatron.errors import UserError
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
    from mup_megatron.tuning.record import read_record

    config_path = directory / "config.yaml"
    config: dict[str, Any] = {}
    if config_path.is_file():
        config = yaml.safe_load(config_path.read_text(encoding="utf-8"))
    own, named = directory / "transfer.json", (config.get("tuning") or {}).get("record")
    record = read_record(own, None) or (read_record(Path(named), None) if named else None)
    target = _curve(directory, CONTROLS.get(_parametrization(config), "µP"))
    if target is None and record is None and not result_files(directory):
        raise UserError(
            f"{directory}: neither metrics.jsonl nor transfer.json is there, and no check; expected the folder of a run"
        )
    return Run(
        directory=directory,
        config=config,
        explanation=_json(directory / "explain.json"),
        record=record,
        plan=_json(directory / PLAN),
        target=target,
        versions=_versions(directory) or (record or {}).get("versions", {}),
        controls={
            name: curve for name, said in CONTROLS.items() if (curve := _curve(directory / name, said)) is not None
        },
    )


def _versions(directory: Path) -> dict[str, str]:
    """Of the newest checkpoint's record."""
    newest = max((directory / "checkpoints").glob("step_*/mup.json"), default=None)
    return json.loads(newest.read_text(encoding="utf-8"))["versions"] if newest else {}


def _parametrization(config: dict[str, Any]) -> str:
    return (config.get("parametrization") or {}).get("name", "mup")


def _json(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _curve(directory: Path, name: str) -> Curve | None:
    path = directory / "metrics.jsonl"
    if not path.is_file():
        return None
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    return Curve(
        name=name,
        steps=[line for line in lines if "loss" in line],
        evaluations=[line for line in lines if "eval_loss" in line],
    )
