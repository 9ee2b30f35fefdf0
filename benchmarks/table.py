"""benchmarks/results/README.md, made from the JSON files beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.harness import LEAST, RESULTS

_HEAD = """# Benchmarks

Made by `./dev bench` (`./dev bench --table` from the JSON files beside this page, which say more). Ours is a model in
this project's µP; plain is megatron-core's model in the standard parametrization; native is the same with `use_mup`,
megatron-core's own MuP. Same sizes, layout, engine and batch.

Steps run in one process in turn, one thread a rank, after the machine was left alone; a ratio is taken pair by pair,
the runs of a round against each other, and stands with the 95 % interval of its median. `plain / plain` is plain
against itself in the same rounds: the noise. The last column says of ours / plain what the interval allows to say.
Start-up, from process start to the end of the first step, and peak memory over two steps are measured in a process for
each; such a cell is a median (least to most). Tensors are counted exactly, whatever the allocator does; the resident
set is what was added to that after the imports. Plain and native are not charged for importing this project.
"""
_GOAL = 1.01
"""Of ours / plain, a step's."""
_START_GOAL, _EXPLAIN_GOAL = 1.05, 3.0
"""Of ours / plain until the first step's end; seconds of CPU of `explain`."""


def write(folder: Path = RESULTS) -> Path:
    """Writes FOLDER/README.md from every JSON file in it."""
    path = folder / "README.md"
    path.write_text(page(folder), encoding="utf-8")
    return path


def page(folder: Path = RESULTS) -> str:
    """The whole page."""
    files = sorted(folder.glob("*.json"))
    parts = [f"## {file.stem}\n\n{one(json.loads(file.read_text(encoding='utf-8')))}" for file in files]
    return "\n".join([_HEAD, *parts, *(_of_script(file) for file in sorted((folder / "script").glob("*.json")))])


def _of_script(file: Path) -> str:
    """The table of `python -m benchmarks.script`."""
    result = json.loads(file.read_text(encoding="utf-8"))
    versions = ", ".join(f"{package} {version}" for package, version in result["machine"]["versions"].items())
    lines = [
        f"## A script under `mup-megatron run`, Python {result['machine']['python']}",
        "",
        f"{result['machine']['date']}; {versions}. Others took {result['busy']:.0%} of the processors before."
        f" {result['num_layers']} layers, hidden size {result['hidden_size']}, vocabulary {result['vocabulary']}. Each"
        f" run is a process of its own, of {result['steps']} steps; audit and readings are at their defaults"
        " (`python -m benchmarks.script`).",
        "",
        *_row("", "runs", "plain, seconds", "ours / plain", "plain / plain", f"at most {_GOAL}?"),
        *_rule(6),
    ]
    for kind, what in (("step", "a step"), ("process", "from start to end")):
        ratio, again = result["ours_over"][kind], result["plain_again_over_plain"][kind]
        plain = f"{result[f'seconds_per_{kind}']['plain']['median']:.3f}"
        said = verdict(ratio) if kind == "step" else ""
        lines += _row(what, str(ratio["runs"]), plain, _with_interval(ratio), _with_interval(again), said)
    return "\n".join(lines) + "\n"


def one(result: dict[str, Any]) -> str:
    """The tables of one result."""
    first = result["steps"][0]
    names = list(result["first_steps"][0]["seconds"])
    others = [name for name in names if name != "ours"]
    versions = ", ".join(f"{package} {version}" for package, version in result["machine"]["versions"].items())
    where = (
        ", ".join(result["machine"]["gpus"]) or f"{result['machine']['cores']} cores, {result['machine']['processor']}"
    )
    lines = [
        f"{result['machine']['date']}; {where}; Python {result['machine']['python']}, {versions}. Others took"
        f" {result['busy']['before']:.0%} of the processors before, {result['busy']['after']:.0%} after."
        f" {first['num_layers']} layers, hidden size {first['hidden_size']} (base {first['base_hidden_size']}),"
        f" sequence {first['seq_length']}, micro-batch {first['micro_batch_size']}, {first['precision']}.",
        *(f"\nNo {name}: {reason}." for name, reason in result["absent"].items()),
        "",
        *_row("a step", "rounds", "plain, seconds", "ours / plain", "CPU time", "plain / plain", f"at most {_GOAL}?"),
        *_rule(7),
    ]
    for steps in result["steps"]:
        ratio, again = steps["ours_over"]["plain"], steps["plain_again_over_plain"]
        cells = (_with_interval(each) for each in (ratio, steps["cpu_ours_over"]["plain"], again))
        what = f"{steps['architecture']}, {steps['engine']}, {steps['layout']}, vocabulary {steps['vocabulary']}"
        plain = f"{steps['seconds_per_step']['plain']['median']:.3f}"
        lines += _row(what, str(ratio["runs"]), plain, *cells, verdict(ratio))
        if "native" in steps["ours_over"]:
            native, cpu = (_with_interval(steps[kind]["native"]) for kind in ("ours_over", "cpu_ours_over"))
            plain = f"{steps['seconds_per_step']['native']['median']:.3f}"
            lines += _row("— against native", str(ratio["runs"]), plain, native, cpu, "", "")
    lines += ["", *_row("", *names, *(f"ours / {name}" for name in others)), *_rule(1 + len(names) + len(others))]
    for start in result["first_steps"]:
        vocabulary = start["vocabulary"]
        for kind, what in (("tensors", "peak of tensors"), ("resident", "peak resident set")):
            lines += _row(
                f"{what}, MiB, vocabulary {vocabulary}",
                *(_cell(start["peak_mebibytes"][kind][name], 0) for name in names),
                *(_cell(start["peak_ours_over"][kind][name], 3) for name in others),
            )
        lines += _row(
            f"seconds to the first step's end, vocabulary {vocabulary}",
            *(_cell(start["seconds"][name]["total"], 2) for name in names),
            *(_cell(start["seconds_ours_over"][name], 3) for name in others),
        )
        for phase in ("upstream_imports", "our_imports", "build", "first_step"):
            cells = (
                "not charged" if phase == "our_imports" and name != "ours" else _cell(start["seconds"][name][phase], 2)
                for name in names
            )
            lines += _row(f"— {phase.replace('_', ' ')}", *cells, *("" for _ in others))
    draw = result["init"]
    dated = f" ({result['explain_date']})" if "explain_date" in result else ""
    lines += [
        "",
        *_row("", "ours", "torch's normal_", "ours / torch's"),
        *_rule(4),
        *_row(
            f"init, seconds for a billion values ({draw['weight']})",
            _cell(draw["seconds_per_billion"]["ours"], 2),
            _cell(draw["seconds_per_billion"]["torch"], 2),
            _cell(draw["ours_over"]["torch"], 2),
        ),
        "",
        *_row(
            f"`mup-megatron explain`, any rank, with imports{dated}", "processes", "seconds", "CPU seconds", "peak MiB"
        ),
        *_rule(5),
    ]
    for config, explain in result["explain"].items():
        spreads = (explain["seconds"], explain["cpu_seconds"])
        peak = _cell(explain["peak_mebibytes"], 0)
        lines += _row(config, str(explain["processes"]), *(_cell(spread, 2) for spread in spreads), peak)
    alone = result["imports"]
    times = (_cell(alone[kind], 2) for kind in ("seconds", "cpu_seconds"))
    lines += _row("torch and megatron-core's GPTModel imported alone", "1", *times, _cell(alone["peak_mebibytes"], 0))
    found = missed(result)
    return "\n".join([*lines, "", "Goals that are missed:" if found else "No goal is missed.", "", *found]) + "\n"


def missed(result: dict[str, Any]) -> list[str]:
    """The goals that a result misses, each with what it is made of."""
    found = []
    for steps in result["steps"]:
        if verdict(ratio := steps["ours_over"]["plain"]) == "no":
            what = f"{steps['architecture']}, {steps['engine']}, {steps['layout']}, vocabulary {steps['vocabulary']}"
            found.append(f"- A step of {what}: {_with_interval(ratio)} of plain's; the goal is {_GOAL}.")
    for start in result["first_steps"]:
        ratio, ours = start["seconds_ours_over"]["plain"], start["seconds"]["ours"]
        if ratio["median"] > _START_GOAL:
            apart = ours["upstream_imports"]["median"] - start["seconds"]["plain"]["upstream_imports"]["median"]
            found.append(
                f"- Start-up with vocabulary {start['vocabulary']}: {_cell(ratio, 3)} of plain's; the goal is"
                f" {_START_GOAL}. Our own imports are {ours['our_imports']['median']:.2f} s of it; the imports of"
                f" upstream, which are the same on both sides, differ by {apart:+.2f} s."
            )
    most = max(explain["cpu_seconds"]["median"] for explain in result["explain"].values())
    if most > _EXPLAIN_GOAL:
        alone = result["imports"]["cpu_seconds"]["median"]
        found.append(
            f"- `explain` takes up to {most:.2f} s of CPU; the goal is {_EXPLAIN_GOAL:g}. It reads the tensors of the"
            f" model that megatron-core builds, and importing what builds it takes {alone:.2f} s by itself."
        )
    return found


def verdict(ratio: dict[str, float]) -> str:
    """Whether a ratio keeps to the goal, as far as its interval tells it from the noise."""
    if ratio["runs"] < LEAST:
        return "too few rounds"
    if ratio["high"] <= _GOAL:
        return "yes"
    return "no" if ratio["low"] > _GOAL else "not told from the noise"


def _with_interval(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"


def _cell(spread: dict[str, float], digits: int = 3) -> str:
    """Median and, of several runs, least to most."""
    median = f"{spread['median']:.{digits}f}"
    if spread["runs"] == 1:
        return median
    return f"{median} ({spread['min']:.{digits}f} to {spread['max']:.{digits}f})"


def _row(*cells: str) -> list[str]:
    return [f"| {' | '.join(cells)} |"]


def _rule(columns: int) -> list[str]:
    return _row(*["---"] * columns)
