"""The page that a run of the slow tests writes into docs/."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from collections.abc import Iterable
from typing import Any

from tests.helpers.slices import commit

_PACKAGES = ("torch", "megatron-core", "deepspeed")


def versions() -> str:
    """Of Python and of what trains."""
    packages = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES)
    return f"Python {platform.python_version()}, {packages}"


def machine() -> str:
    """Cores and kind of processor."""
    return f"{os.cpu_count()} cores, {platform.machine()}"


def remember(
    known: dict[str, Any], stats: dict[str, list[Any]], environment: str, quick: Iterable[str] = ()
) -> dict[str, Any]:
    """The record of tests that some environment skips, after a run: why it is skipped there, and where it last ran.

    Args:
        known: the record before, by test: `skipped` (environment: reason) and `ran` (environment: date).
        stats: of the run.
        environment: such as 3.12 or 3.12-te.
        quick: tests that run here before every change, and were left out of this run.

    Returns:
        The record; tests that no environment skips are not in it.
    """
    found = {name: {key: dict(value) for key, value in entry.items()} for name, entry in known.items()}
    today = str(datetime.date.today())
    for report in stats.get("skipped", []):
        reason = str(report.longrepr[2]).removeprefix("Skipped: ") if report.longrepr else ""
        if not reason.startswith("slow; "):
            found.setdefault(report.nodeid, {"skipped": {}, "ran": {}})["skipped"][environment] = reason
    passed = [(report, _known_as(report.nodeid, found)) for report in stats.get("passed", []) if report.when == "call"]
    ran = [name for report, name in passed if "skipif" in report.keywords or name in found]
    for name in [*ran, *(name for name in quick if name in found)]:
        entry = found.setdefault(name, {"skipped": {}, "ran": {}})
        entry["ran"][environment] = today
        entry["skipped"].pop(environment, None)
    return dict(sorted(found.items()))


def _known_as(name: str, known: dict[str, Any]) -> str:
    """A test over what is installed has one name in the record: pytest's, where nothing is."""
    without = name.partition("[")[0] + "[NOTSET]"
    return without if without in known else name


def skips(known: dict[str, Any], environment: str) -> list[str]:
    """What an environment skips, by reason: how many tests, and when and where the one that waits longest last ran."""
    reasons: dict[str, list[dict[str, str]]] = {}
    for entry in known.values():
        if environment in entry["skipped"]:
            reasons.setdefault(entry["skipped"][environment], []).append(entry["ran"])
    if not reasons:
        return []
    table = ["", "Skipped:", "", "| why | tests | the oldest last ran | never ran |", "| --- | --- | --- | --- |"]
    for reason, places in sorted(reasons.items()):
        last = [max((date, where) for where, date in ran.items()) for ran in places if ran]
        oldest = "{} ({})".format(*min(last)) if last else ""
        table.append(f"| {reason} | {len(places)} | {oldest} | {len(places) - len(last) or ''} |")
    return table


def summary(stats: dict[str, list[Any]], command: str, seconds: float, known: dict[str, Any], environment: str) -> str:
    """What the last run of the slow tests (with `--all` the quick ones too) did: date, versions, counts, times."""
    counts = {kind: len(stats.get(kind, [])) for kind in ("passed", "failed", "error", "skipped", "xfailed")}
    files: dict[str, list[float]] = {}
    for report in stats.get("passed", []) + stats.get("failed", []):
        files.setdefault(report.nodeid.split("::")[0], []).append(report.duration)
    lines = [
        f"# The last run of {'the slow tests' if command.startswith('./dev test') else f'`{command}`'}",
        "",
        f"Made by `{command}` on {datetime.date.today()} at commit {commit()} ({versions()}; {machine()}): "
        + ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
        + f" in {seconds / 60:.1f} minutes.",
        *(
            ()
            if "--slow" not in command
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
    lines += skips(known, environment)
    return "\n".join(lines) + "\n"


def _mutants(stats: dict[str, list[Any]]) -> list[str]:
    """What damage was drawn (tests/helpers/damage.py, tests/test_fuzz.py): how often, from which seed."""
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
