"""Whether the best hyperparameter stays put while the model, the batch or the run grows.

Public names: `stability`, `judge`, `as_json`, `lines`, `write`. After Tensor Programs V, figures 1 to 4. A question
(question.py) names what is varied and what grows. Every size is trained with every value and seed, in the config's
parametrization and in those that it is compared with; each run is one process (grid.py), as a tuning trial is.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mup_megatron.checkpoints.run_directory import write_whole
from mup_megatron.config import Config, derive
from mup_megatron.data.prepare import prepare
from mup_megatron.parallel import upstream
from mup_megatron.parallel.ranks import Rank
from mup_megatron.proof.family import members
from mup_megatron.proof.grid import Job, Outcome, alone, comparable, run_grid
from mup_megatron.proof.optimum import (
    Curve,
    drift,
    minimum,
    moves_at_least,
    pooled_noise,
    transfer_cost,
    wider_is_worse,
)
from mup_megatron.proof.question import Across, Question
from mup_megatron.tuning.megatron_command import MegatronCommand
from mup_megatron.tuning.space import key_of, stretched
from mup_megatron.util.errors import ConfigError, UserError
from mup_megatron.util.files import as_json

BOUNDS = {"octaves": 0.5, "cost": 0.005}
"""A judged parametrization passes where the smallest size's optimum is at most so far from the largest's (or within two
standard errors), and its best value costs the largest at most this share of its loss."""

_GROWS = {"batch": "training.global_batch_size", "sequence": "training.seq_length"}


@dataclass(frozen=True, kw_only=True)
class _Run:
    """One run of the grid."""

    parametrization: str
    factor: int
    value: float | str
    seed: int
    job: Job


def stability(
    config: Config,
    asked: Question,
    directory: Path,
    rank: Rank,
    *,
    workers: int,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Trains the grid, or what is missing of it, and says where the minima lie.

    Args:
        config: the run.
        asked: the question.
        directory: of the grid; what is there already is not trained again.
        rank: this process; several may share the folder.
        workers: runs at a time in this process.
        say: takes lines of progress.

    Returns:
        What is written as JSON.

    Raises:
        UserError: bad input, or no run of a curve came to an end.
        Stopped: SIGTERM; the same command goes on.
    """
    upstream.prepare_process()
    runs = grid(config, asked)
    say(f"{len(runs)} runs: {asked.over} over {asked.across}, {workers} at a time")
    with alone(directory):
        for each in {run.factor: run.job.config for run in runs}.values():
            if not config.tuning.command:
                prepare(each, say)
    outcomes = run_grid([run.job for run in runs], directory / "runs", rank, workers, say)
    return _result(config, asked, runs, outcomes)


def grid(config: Config, asked: Question) -> list[_Run]:
    """Every run, those of the first seed first.

    Raises:
        UserError: a size or a value makes no config; names it.
    """
    parametrizations = [config.parametrization.name, *asked.compare_with]
    sized = dict(zip(asked.factors, _sized(config, asked), strict=True))
    runs = []
    for seed in range(config.run.seed, config.run.seed + asked.seeds):
        for factor, sizes in sized.items():
            for value in asked.values:
                for parametrization in parametrizations:
                    keys = {key_of(asked.over): value, "parametrization.name": parametrization}
                    try:
                        made = derive(sizes, {**keys, "run.seed": seed})
                    except ConfigError as error:
                        raise UserError(f"--values: {value}: {error}") from None
                    shown = value if isinstance(value, str) else f"{value:.6g}"
                    name = f"{parametrization}-{asked.across}-{factor}-{asked.over}-{shown}-seed-{seed}"
                    job = Job(name=name, config=made)
                    runs.append(_Run(parametrization=parametrization, factor=factor, value=value, seed=seed, job=job))
    return runs


def _sized(config: Config, asked: Question) -> list[Config]:
    """The config at every size."""
    command = config.tuning.command
    ranks = (MegatronCommand.read(command).processes or max(1, torch.cuda.device_count())) if command else 1
    if asked.across in ("width", "depth", "experts"):
        try:
            found = [member.config for member in members(config, asked.factors, ranks, asked.across)]
        except UserError as error:
            raise UserError(str(error).replace("--widths", "--sizes")) from None
    elif asked.across == "tokens":
        found = [stretched(_as_trials(config), config.training.train_steps * factor) for factor in asked.factors]
    else:
        key = _GROWS[asked.across]
        own = getattr(config.training, key.removeprefix("training."))
        found = [derive(_as_trials(config), {key: own * factor}) for factor in asked.factors]
    return [comparable(each) for each in found]


def _as_trials(config: Config) -> Config:
    """The config with its own batch and length as the trials', so that a rule over them has ratios to work with."""
    tuning, training = config.tuning, config.training
    own = ("global_batch_size", "seq_length", "train_steps")
    return derive(config, {f"tuning.{name}": getattr(tuning, name) or getattr(training, name) for name in own})


def size_of(config: Config, across: Across) -> int:
    """What a size is called: hidden size, layers, experts, sequences, tokens of a sequence, tokens of the run."""
    training = config.training
    return {
        "width": config.model.hidden_size,
        "depth": config.model.num_layers,
        "experts": config.model.num_moe_experts or 0,
        "batch": training.global_batch_size,
        "sequence": training.seq_length,
        "tokens": training.train_steps * training.global_batch_size * training.seq_length,
    }[across]


def _result(config: Config, asked: Question, runs: Sequence[_Run], outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    sizes = {run.factor: size_of(run.job.config, asked.across) for run in runs}
    parametrizations = list(dict.fromkeys(run.parametrization for run in runs))
    curves = {
        parametrization: {
            factor: Curve(
                values=asked.values,
                losses=[
                    {
                        run.seed: outcomes[run.job.name].loss
                        for run in runs
                        if (run.parametrization, run.factor, run.value) == (parametrization, factor, value)
                    }
                    for value in asked.values
                ],
            )
            for factor in sizes
        }
        for parametrization in parametrizations
    }
    result = {
        **judge(curves, sizes, asked),
        "failed": [f"{name}: {each.reason}" for name, each in outcomes.items() if each.state == "failed"],
        "seconds": sum(each.seconds for each in outcomes.values()),
        "config": config.model_dump(),
    }
    return as_json(result)


def judge(curves: Mapping[str, Mapping[int, Curve]], sizes: Mapping[int, int], asked: Question) -> dict[str, Any]:
    """Where the minima of measured curves lie, and whether the first parametrization's stays.

    Args:
        curves: by parametrization, the judged one first, and by factor.
        sizes: what each factor's size is called.
        asked: the question that the curves answer.

    Returns:
        What `lines` and the picture (report.stability) read, but for `failed` and `seconds`.

    Raises:
        UserError: a curve has no finite loss.
    """
    for parametrization, held in curves.items():
        for factor, curve in held.items():
            if not math.isfinite(min(curve.means)):
                raise UserError(
                    f"{parametrization}, {asked.across} {sizes[factor]}: no value of {asked.over} has a finite loss "
                    "with every seed; expected --values with smaller ones"
                )
    found = {parametrization: _line(held, sizes, asked) for parametrization, held in curves.items()}
    judged = next(iter(curves))
    verdict = _verdict(found[judged])
    return {
        "judged": judged,
        "over": asked.over,
        "across": asked.across,
        "verdict": verdict,
        "passed": verdict == "passed",
        "bounds": BOUNDS,
        "values": asked.values,
        "sizes": [{"factor": factor, "size": size} for factor, size in sizes.items()],
        "seeds": asked.seeds,
        "from": sizes[asked.least],
        "lines": found,
    }


def _line(held: Mapping[int, Curve], sizes: Mapping[int, int], asked: Question) -> dict[str, Any]:
    """A parametrization's curves, minima, drifts and costs, and why it does not pass."""
    noise = pooled_noise(list(held.values()))
    largest = max(held)
    least = {factor: minimum(curve) for factor, curve in held.items()}
    rows = []
    for factor, curve in held.items():
        moved = drift(least[factor], least[largest])
        rows.append(
            {
                "size": sizes[factor],
                "losses": [list(losses.values()) for losses in curve.losses],
                "minimum": dataclasses.asdict(least[factor]),
                "drift": None if moved is None else {"octaves": moved[0], "error": moved[1]},
                "cost": transfer_cost(curve, held[largest]),
            }
        )
    order = sorted(held)
    worse = {
        sizes[large]: wider_is_worse(held[small], held[large], noise) for small, large in itertools.pairwise(order)
    }
    judged = rows[order.index(asked.least)]
    return {
        "noise": noise,
        "rows": rows,
        "larger_is_worse": worse,
        "reasons": _reasons(judged, rows[-1], asked, moves_at_least(least[asked.least], least[largest])),
        "open": _open(judged, rows[-1], asked),
    }


def _verdict(line: Mapping[str, Any]) -> str:
    """Failed where the optimum moves, undecided where it may lie beyond what was tried, else passed."""
    return "failed" if line["reasons"] else "undecided" if line["open"] else "passed"


def _open(small: Mapping[str, Any], large: Mapping[str, Any], asked: Question) -> list[str]:
    """At which of the two sizes the optimum lies beyond what was tried."""
    ends = {"low": "lowest", "high": "highest"}
    return [
        f"{row['size']}: the {ends[row['minimum']['edge']]} {asked.over} that was tried is the best; expected --values "
        "beyond"
        for row in (small, large)
        if row["minimum"]["edge"]
    ]


def _reasons(
    small: Mapping[str, Any], large: Mapping[str, Any], asked: Question, least_move: float | None
) -> list[str]:
    """Why the optimum does not transfer from one size to the largest; empty where it does."""
    found = []
    if small["cost"] > BOUNDS["cost"]:
        found.append(
            f"the best {asked.over} of {small['size']} costs {large['size']} {_percent(small['cost'])} of loss"
        )
    moved = small["drift"]
    if moved is None and least_move is not None and abs(least_move) > BOUNDS["octaves"]:
        found.append(f"the best {asked.over} moves by {least_move:+.2f} octaves or more to {large['size']}")
    if moved is not None and abs(moved["octaves"]) > max(BOUNDS["octaves"], 2 * moved["error"]):
        found.append(f"the best {asked.over} moves by {moved['octaves']:+.2f} octaves to {large['size']}")
    return found


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %" if math.isfinite(share) else "everything (it diverges)"


def lines(result: Mapping[str, Any]) -> list[str]:
    """A result for people."""
    across, over = result["across"], result["over"]
    said = [f"{over} over {across}, {result['seeds']} seeds, {result['seconds'] / 60:.0f} minutes of one process"]
    for name, line in result["lines"].items():
        noise = line["noise"]
        said.append(f"{name}{f' (noise of a loss {noise:.4f})' if noise is not None else ''}:")
        for row in line["rows"]:
            least = row["minimum"]
            where = least["tried"] if isinstance(least["tried"], str) else f"{least['value'] or least['tried']:.3g}"
            if least["edge"]:
                where += f", at the {least['edge']} end of what was tried"
            error = f" ± {least['error']:.2f} octaves" if least["error"] is not None else ""
            moved = f", {row['drift']['octaves']:+.2f} octaves to the largest" if row["drift"] else ""
            cost = math.inf if row["cost"] is None else row["cost"]
            said.append(
                f"  {across} {row['size']}: loss {least['loss']:.4f} at {over} {where}{error}{moved}; its best value "
                f"costs the largest {_percent(cost)}"
            )
        for size, values in line["larger_is_worse"].items():
            if values:
                shown = ", ".join(value if isinstance(value, str) else f"{value:.3g}" for value in values)
                said.append(f"  {across} {size} is worse than the size before at {over} {shown}")
    said += [f"failed: {line}" for line in result["failed"]]
    judged = result["lines"][result["judged"]]
    said += [f"{result['judged']}: {reason}" for reason in (*judged["reasons"], *judged.get("open", ()))]
    # Results of earlier versions name no verdict.
    verdict = result.get("verdict") or ("passed" if result["passed"] else "failed")
    best = f"{result['judged']}'s best {over}"
    return [
        *said,
        {
            "passed": f"passed: {best} stays",
            "failed": f"failed: {best} does not stay",
            "undecided": f"undecided: {best} lies beyond the values that were tried, so whether it stays is not known",
        }[verdict],
    ]


def write(result: Mapping[str, Any], directory: Path) -> Path:
    """Writes a result as JSON; returns the file."""
    path = directory / f"{result['over']}-{result['across']}.json"
    write_whole(path, json.dumps(result, indent=1, allow_nan=False) + "\n")
    return path
