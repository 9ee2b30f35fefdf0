"""The tables that test runs write into docs/."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from typing import Any

_PACKAGES = ("torch", "megatron-core", "deepspeed")


def _versions() -> str:
    packages = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES)
    return f"Python {platform.python_version()}, {packages}"


def _machine() -> str:
    return f"{os.cpu_count()} cores, {platform.machine()}"


def parity(rows: list[dict[str, Any]]) -> str:
    """Measured deviations of every cell of the layout matrix."""
    lines = [
        "# Layouts against one process",
        "",
        f"Made by `./dev parity` on {datetime.date.today()} ({_versions()}; {_machine()}). Each row is a model trained",
        "for 20 steps in fp32 on real text, a fresh batch each step, under a layout, against the same model in one",
        "process. Initial values are equal to the last bit in every row; rates, epsilons and decays are equal. The",
        "numbers are the largest relative deviations of the 20 losses and of the 20 gradient norms before clipping;",
        "the bound is 2e-5. Growths: `mixed` (hidden x3/2, FFN x5/2, heads x2, query groups x4) and `head_size`",
        "(hidden x2, FFN x3, head size x3/2).",
        "",
        "| architecture | growth | layout | loss | gradient norm |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        cells = (row["architecture"], row["growth"], row["layout"], f"{row['loss']:.1e}", f"{row['gradient norm']:.1e}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def summary(stats: dict[str, list[Any]], command: str, seconds: float) -> str:
    """What the last run of the slow tests (with `--all` the quick ones too) did: date, versions, counts, times."""
    counts = {kind: len(stats.get(kind, [])) for kind in ("passed", "failed", "error", "skipped", "xfailed")}
    files: dict[str, list[float]] = {}
    for report in stats.get("passed", []) + stats.get("failed", []):
        files.setdefault(report.nodeid.split("::")[0], []).append(report.duration)
    lines = [
        "# The last run of the slow tests",
        "",
        f"Made by `{command}` on {datetime.date.today()} ({_versions()}; {_machine()}): "
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
