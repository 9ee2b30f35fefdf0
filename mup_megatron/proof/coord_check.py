"""The coordinate check: sizes of activations, gradients and updates over width, after a few steps, in any layout.

Public names: `coord_check`, `lines`, `write`. Every model of the family is trained for some steps on one batch, once
per seed, in the parametrization that is judged and in one that is drawn beside it (Tensor Programs V, appendix D.1).
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state

from mup_megatron import runtime
from mup_megatron.config import Config
from mup_megatron.data.batches import Batches, build_datasets
from mup_megatron.data.prepare import prepare
from mup_megatron.engines import refuse
from mup_megatron.errors import UserError
from mup_megatron.layout import Layout
from mup_megatron.model import parametrize
from mup_megatron.parametrization import Parametrization
from mup_megatron.proof.controls import Break, control, interpolate
from mup_megatron.proof.coordinates import QUANTITIES, Coordinates, measure
from mup_megatron.proof.family import Axis, Member, changed, default_factors, members
from mup_megatron.proof.verdict import BOUNDS, Slope, Theory, in_family, judge, slope
from mup_megatron.run_directory import write_whole


@dataclass(frozen=True, kw_only=True)
class Line:
    """One parametrization that is measured.

    Args:
        label: for people.
        name: of the config's `parametrization.name`.
        break_: what is done to its rules.
    """

    label: str
    name: str = "mup"
    break_: Break | None = None


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One model of the family, one seed, one line."""

    line: str
    seed: int
    factor: int
    coordinates: Coordinates


MUP = Line(label="mup")
STANDARD = Line(label="standard", name="standard")
FAN_IN = Line(label="fan_in", name="fan_in")


def parse_line(point: str | None, broken: str | None, config: Config) -> Line:
    """What is judged.

    Args:
        point: mup, standard, fan_in or interpolate:INIT,LR; the config's own unless given.
        broken: name of a control; µP without that rule.
        config: the run.

    Raises:
        UserError: neither of these, or both.
    """
    if broken is not None:
        if point not in (None, "mup"):
            raise UserError(f"--break {broken}: takes a rule out of mup; expected no --parametrization {point}")
        return Line(label=f"mup without {control(broken).rule}", break_=control(broken).break_)
    point = point or config.parametrization.name
    for line in (MUP, STANDARD, FAN_IN):
        if point == line.label:
            return line
    kind, _, numbers = point.partition(":")
    try:
        init, lr = (float(number) for number in numbers.split(","))
        if kind != "interpolate" or not (math.isfinite(init) and math.isfinite(lr)):
            raise ValueError
    except ValueError:
        raise UserError(f"--parametrization {point}: expected mup, standard, fan_in, or interpolate:0.5,1") from None
    return Line(label=point, break_=interpolate(init, lr))


def coord_check(
    config: Config,
    rank: runtime.Rank,
    *,
    factors: Sequence[int] = (),
    steps: int = 4,
    seeds: int = 3,
    point: str | None = None,
    broken: str | None = None,
    beside: bool = True,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Runs the check. Collective.

    Args:
        config: the run; its `base:` is the family's smallest model, and its layout that of all.
        rank: this process.
        factors: sizes over the base's; from the base to the config's own model unless given.
        steps: optimizer steps.
        seeds: repetitions, with seeds from the config's on.
        point: the parametrization that is judged; see `parse_line`.
        broken: a rule to take out (`controls.CONTROLS`), in the regime that excites it.
        beside: also measure another parametrization, for the picture: standard beside µP, µP beside all others.
        say: takes lines of progress.

    Returns:
        What is written as JSON, the same on every rank.

    Raises:
        UserError: bad input.
    """
    if steps < 1:
        raise UserError(f"--steps: {steps}: nothing changes in no steps; expected 1 or more")
    if seeds < 1:
        raise UserError(f"--seeds: {seeds}: expected 1 or more")
    runtime.prepare_process()
    judged = parse_line(point, broken, config)
    drawn = [judged, *([STANDARD if judged is MUP else MUP] if beside else [])]
    axis: Axis = "width"
    growing = False
    regime: dict[str, Any] = {}
    if broken is not None:
        chosen = control(broken)
        axis, growing, regime = chosen.axis, chosen.growing_tensor, chosen.regime(config, steps)
        factors = factors or chosen.factors
    # Alike at every size, and nothing random or recomputed between the steps; a rate from the first step on.
    plain = {
        "model.hidden_dropout": 0.0,
        "model.attention_dropout": 0.0,
        "training.recompute_granularity": None,
        "training.recompute_method": None,
        "training.recompute_num_layers": None,
        "training.lr_schedule": "constant",
        "training.lr_warmup_steps": 0,
        "training.train_steps": steps + 1,
        "training.eval_interval": None,
        "parametrization.name": "mup",
    }
    small = {f"model.{name}": size for name, size in config.base.width.sizes.items()}
    config = changed(config, {**plain, **small, **regime})
    config = runtime.resolve_auto(config)
    family = members(config, factors or default_factors(config, axis), rank.world_size, axis, growing_tensor=growing)
    for member in family:
        refuse(member.config, member.layout)
    cells, rules = _measure(family, drawn, rank, steps, seeds, say)
    theory = Theory(rules, axis)
    sizes = [member.size for member in family]
    slopes = {line.label: _slopes(cells, line.label, family, steps, theory, axis) for line in drawn}
    verdicts = {label: judge(held) for label, held in slopes.items()}
    failed = [name for name, verdict in verdicts[judged.label].items() if verdict["verdict"] == "out of bounds"]
    result = {
        "judged": judged.label,
        "passed": not failed,
        "out_of_bounds": failed,
        "axis": axis,
        "sizes": [
            {"factor": member.factor, "size": size, "layout": str(member.layout)}
            for member, size in zip(family, sizes, strict=True)
        ],
        "steps": steps,
        "seeds": seeds,
        "regime": regime,
        "bounds": BOUNDS,
        "silent": sorted({name for cell in cells for name in cell.coordinates.silent}),
        "not_finite": _not_finite(cells),
        "verdicts": verdicts,
        "slopes": {label: [dataclasses.asdict(each) for each in held] for label, held in slopes.items()},
        "cells": [dataclasses.asdict(cell) for cell in cells],
        "config": config.model_dump(),
    }
    return {key: _plain(value) for key, value in result.items()}


def _measure(
    family: Sequence[Member],
    drawn: Sequence[Line],
    rank: runtime.Rank,
    steps: int,
    seeds: int,
    say: Callable[[str], None],
) -> tuple[list[Cell], list[Parametrization]]:
    """Every cell, and the whole rules of every size. Sizes of one layout follow each other."""
    if rank.is_first:
        prepare(family[0].config, say)  # the others wait for rank 0 where the process groups start
    meeting = None if torch.distributed.is_initialized() else runtime.Meeting(rank)
    cells: list[Cell] = []
    rules: list[Parametrization] = []
    datasets: dict[int, Any] = {}
    started: Layout | None = None
    seed = family[0].config.run.seed
    try:
        for member in family:
            if started is None or _groups(started) != _groups(member.layout):
                if started is not None:
                    parallel_state.destroy_model_parallel()
                device = runtime.start_distributed(member.layout, rank, seed, meeting)
                started = member.layout
            prepared = prepare(member.config)
            rules.append(parametrize(member.config, prepared.vocab_size))
            for number in range(seeds):
                seeded = dataclasses.replace(member, config=changed(member.config, {"run.seed": seed + number}))
                if number not in datasets:
                    datasets[number] = build_datasets(seeded.config, prepared)[0]
                batch = Batches(datasets[number], seeded.config, member.layout, rank.rank, device)[0]
                for line in drawn:
                    config = changed(seeded.config, {"parametrization.name": line.name})
                    parametrization = parametrize(config, prepared.vocab_size)
                    if line.break_ is not None:
                        parametrization = line.break_(parametrization, member.layout)
                    whole = dataclasses.replace(seeded, config=config)
                    coordinates = measure(whole, parametrization, rank.rank, device, batch, steps)
                    cells.append(
                        Cell(line=line.label, seed=seed + number, factor=member.factor, coordinates=coordinates)
                    )
                    say(
                        f"{line.label}: {member.factor} x base, seed {seed + number}: loss "
                        + " ".join(f"{loss:.4f}" for loss in coordinates.losses)
                    )
    finally:
        parallel_state.destroy_model_parallel()
    return cells, rules


def _groups(layout: Layout) -> tuple[int, ...]:
    """What decides the process groups."""
    return (
        layout.tensor,
        layout.pipeline,
        layout.virtual_pipeline,
        layout.context,
        layout.expert,
        layout.expert_tensor,
    )


def _slopes(
    cells: Sequence[Cell], label: str, family: Sequence[Member], steps: int, theory: Theory, axis: Axis
) -> list[Slope]:
    """Every slope of a line. What has no coordinates at all at some step (a change at step 0) has none there."""
    by_cell = {
        (cell.seed, cell.factor): _tables(cell.coordinates, member.config.model.num_layers, axis)
        for member in family
        for cell in cells
        if cell.line == label and cell.factor == member.factor
    }
    names = set.intersection(*({(*key,) for key in tables} for tables in by_cell.values()))
    seeds = sorted({seed for seed, _ in by_cell})
    order = [key for key in next(iter(by_cell.values())) if key in names]
    sizes = [member.size for member in family]
    found = []
    for quantity, name in order:
        for step in range(steps if quantity == "update" else steps + 1):
            if quantity == "change" and step == 0:
                continue
            values = [[by_cell[seed, member.factor][quantity, name][step] for member in family] for seed in seeds]
            if all(value == 0.0 for seed in values for value in seed):
                continue  # a zero-initialised readout's logits, what a frozen tensor does
            fitted, confidence = slope(sizes, values)
            expected, low, high = theory.bounds(name, quantity, step)
            found.append(
                Slope(
                    name=name,
                    quantity=quantity,
                    step=step,
                    slope=fitted,
                    confidence=confidence,
                    expected=expected,
                    low=low,
                    high=high,
                )
            )
    return found


def _tables(coordinates: Coordinates, layers: int, axis: Axis) -> dict[tuple[str, str], list[float]]:
    """(quantity, name) to sizes per step; by names that all depths have where depth grows."""
    tables: Mapping[str, Mapping[str, list[float]]] = {**coordinates.modules, "update": coordinates.updates}
    found = {}
    for quantity in (*QUANTITIES, "update"):
        for name, values in tables[quantity].items():
            common = in_family(name, layers) if axis == "depth" else name
            if common is not None:
                found[quantity, common] = values
    return found


def _not_finite(cells: Sequence[Cell]) -> list[str]:
    """Where a loss was no finite number."""
    return [
        f"{cell.line}: {cell.factor} x base, seed {cell.seed}, step {step}"
        for cell in cells
        for step, loss in enumerate(cell.coordinates.losses)
        if not math.isfinite(loss)
    ]


def lines(result: Mapping[str, Any]) -> list[str]:
    """A result for people."""
    sizes = ", ".join(f"{size['size']}" for size in result["sizes"])
    layouts = "; ".join(dict.fromkeys(size["layout"] for size in result["sizes"]))
    what = "layers" if result["axis"] == "depth" else "hidden size"
    said = [
        f"coordinate check of {result['judged']}: {what} {sizes}, {result['steps']} steps, seeds {result['seeds']}, "
        f"{layouts}"
    ]
    said += [f"set for this control: {key} = {value}" for key, value in result["regime"].items()]
    said += [f"never ran: {name}" for name in result["silent"]]
    said += [f"not a finite loss: {where}" for where in result["not_finite"]]
    verdicts = result["verdicts"][result["judged"]]
    for name in result["out_of_bounds"]:
        worst = verdicts[name]
        spread = "" if worst["confidence"] is None else f" ± {worst['confidence']:.2f}"
        goes = "is no number at some size" if worst["slope"] is None else f"goes as size^{worst['slope']:.2f}{spread}"
        said.append(
            f"out of bounds: {name}: {worst['quantity']} at step {worst['step']} {goes}, "
            f"expected {worst['expected']:.2f}"
        )
    judged = [verdict for verdict in verdicts.values() if verdict["verdict"] != "not judged"]
    said.append(
        f"{'passed' if result['passed'] else 'failed'}: {len(judged) - len(result['out_of_bounds'])} of {len(judged)} "
        "modules and parameters are within bounds"
    )
    return said


def write(result: Mapping[str, Any], directory: Path) -> Path:
    """Writes a result as JSON, under the name of what was judged; numbers that are none as null.

    Args:
        result: of `coord_check`.
        directory: is made.

    Returns:
        The file.

    Raises:
        UserError: the folder cannot be written to.
    """
    path = directory / f"{re.sub(r'[^a-z0-9.,_-]+', '-', result['judged'].lower())}.json"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lines_ = (f"{json.dumps(key)}: {_compact(value)}" for key, value in result.items())
        write_whole(path, "{\n" + ",\n".join(lines_) + "\n}\n")
    except OSError as error:
        raise UserError(f"--output: cannot write to {directory}: {error.strerror}") from None
    return path


def _compact(value: Any) -> str:
    """JSON, an item of a list on a line."""
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(json.dumps(item, allow_nan=False) for item in value) + "\n]"
    return json.dumps(value, allow_nan=False)


def _plain(value: Any) -> Any:
    """The same with null for what is no finite number, which JSON does not have; floats with six digits."""
    if isinstance(value, dict):
        return {key: _plain(held) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(held) for held in value]
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    return value
