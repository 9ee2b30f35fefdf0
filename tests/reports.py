"""The page that a run of the slow tests writes into docs/."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from typing import Any

_PACKAGES = ("torch", "megatron-core", "deepspeed")


def versions() -> str:
    """Of Python and of what trains."""
    packages = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES)
    return f"Python {platform.python_version()}, {packages}"


def machine() -> str:
    """Cores and kind of processor."""
    return f"{os.cpu_count()} cores, {platform.machine()}"


def summary(stats: dict[str, list[Any]], command: str, seconds: float) -> str:
    """What the last run of the slow tests (with `--all` the quick ones too) did: date, versions, counts, times."""
    counts = {kind: len(stats.get(kind, [])) for kind in ("passed", "failed", "error", "skipped", "xfailed")}
    files: dict[str, list[float]] = {}
    for report in stats.get("passed", []) + stats.get("failed", []):
        files.setdefault(report.nodeid.split("::")[0], []).append(report.duration)
    lines = [
        "# The last run of the slow tests",
        "",
        f"Made by `{command}` on {datetime.date.today()} ({versions()}; {machine()}): "
        + ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
        + f" in {seconds / 60:.1f} minutes.",
        *(
            ()
            if command.endswith("--all")
            else ("The quick tests (`./dev test`) run by themselves before every change is taken.",)
        ),
        "",
        *(f"Failed: `{report.nodeid}`." for report in stats.get("failed", []) + stats.get("error", [])),
        "",
        "| file | tests | seconds |",
        "| --- | --- | --- |",
    ]
    lines += [f"| {name} | {len(times)} | {sum(times):.0f} |" for name, times in sorted(files.items())]
    lines += _mutants(stats)
    skipped = sorted({str(report.longrepr[2]) for report in stats.get("skipped", []) if report.longrepr})
    if skipped:
        lines += ["", "Skipped: " + "; ".join(reason.removeprefix("Skipped: ") for reason in skipped) + "."]
    return "\n".join(lines) + "\n"


def _mutants(stats: dict[str, list[Any]]) -> list[str]:
    """What damage was drawn (tests/damage.py, tests/test_fuzz.py): how often, from which seed."""
    rows = []
    for report in stats.get("passed", []) + stats.get("failed", []):
        said = dict(report.user_properties)
        if "mutants" in said:
            rows.append((report.nodeid.removeprefix("tests/"), said["mutants"], said["seed"]))
    if not rows:
        return []
    total = sum(count for _, count, _ in rows)
    table = [f"| {name} | {count} | {seed} |" for name, count, seed in sorted(rows)]
    return [
        "",
        f"Damaged files and configs: {total:,}.",
        "",
        "| test | mutants | seed |",
        "| --- | --- | --- |",
        *table,
    ]
