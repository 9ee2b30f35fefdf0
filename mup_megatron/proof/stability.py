"""Whether the best hyperparameter stays put while the model, the batch or the run grows.

Public names: `stability`, `judge`, `as_json`, `lines`. After Tensor Programs V, figures 1 to 4. A question
(question.py) names what is varied and what grows. Every size is trained with every value and seed, in the config's
parametrization and in those that it is compared with; each run is one process (grid.py), as a tuning trial is.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from mup_megatron.config import Config, derive
from mup_megatron.data.prepare import known_vocab_size
from mup_megatron.data.record import tokens_digest
from mup_megatron.model.build import parametrize
from mup_megatron.parallel import upstream
from mup_megatron.proof.family import grown, members, models
from mup_megatron.proof.grid import Grid, Job, Outcome, comparable, ended
from mup_megatron.proof.optimum import (
    Curve,
    drift,
    in_words,
    minimum,
    moves_at_least,
    pooled_noise,
    transfer_cost,
    wider_is_worse,
)
from mup_megatron.proof.question import Across, Question
from mup_megatron.proof.verdict import verdict_of
from mup_megatron.rules.table import Parametrization
from mup_megatron.tuning.megatron_command import MegatronCommand
from mup_megatron.tuning.space import keys_of, stretched
from mup_megatron.util.errors import ConfigError, UserError
from mup_megatron.util.files import as_json
from mup_megatron.util.provenance import provenance

BOUNDS = {"octaves": 0.5, "cost": 0.005}
"""A judged parametrization passes where the smallest size's optimum is at most so far from the largest's (or within two
standard errors), and its best value costs the largest at most this share of its loss."""

_GROWS = {"batch": "training.global_batch_size", "sequence": "training.seq_length"}


class Run(NamedTuple):
    """Which one of the grid."""

    parametrization: str
    factor: int
    value: float | str
    seed: int


def stability(config: Config, asked: Question, grid: Grid) -> dict[str, Any]:
    """Trains the grid, or what is missing of it, and says where the minima lie.

    Args:
        config: the run.
        asked: the question.
        grid: where runs are trained.

    Returns:
        What is written as JSON.

    Raises:
        UserError: bad input, or no run of a curve came to an end.
        Stopped: SIGTERM; the same command goes on.
    """
    upstream.prepare_process()
    jobs = jobs_of(config, asked)
    distinct = {job.name: job for job in jobs.values()}
    shared = len(jobs) - len(distinct)
    also = f"; {shared} more curve points are the same runs, of another parametrization" if shared else ""
    grid.say(f"{len(distinct)} runs: {asked.over} over {asked.across}, {grid.workers} at a time{also}")
    sizes = {run.factor: job.config for run, job in jobs.items()}
    grid.prepare([] if config.tuning.command else sizes.values())
    return _result(config, asked, jobs, grid.run(list(distinct.values())))


def jobs_of(config: Config, asked: Question) -> dict[Run, Job]:
    """Every run, those of the first seed first; where parametrizations say the same of every tensor, one run is theirs.

    Raises:
        UserError: a size or a value makes no config; names it.
    """
    seeds = range(config.run.seed, config.run.seed + asked.seeds)
    sized = list(zip(asked.factors, _sized(config, asked), strict=True))
    parametrizations = [config.parametrization.name, *asked.compare_with]
    alike = {factor: _alike(sizes, parametrizations) for factor, sizes in sized}
    jobs = {}
    for seed, (factor, sizes), value, run_as in itertools.product(seeds, sized, asked.values, parametrizations):
        name = alike[factor][run_as]
        try:
            made = derive(sizes, {**keys_of({asked.over: value}), "parametrization.name": name, "run.seed": seed})
        except ConfigError as error:
            raise UserError(f"--values: {value}: {error}") from None
        shown = value if isinstance(value, str) else f"{value:.6g}"
        folder = f"{name}-{asked.sized(factor)}-{asked.over}-{shown}-seed-{seed}"
        jobs[Run(run_as, factor, value, seed)] = Job(name=folder, config=made)
    return jobs


def _alike(config: Config, parametrizations: Sequence[str]) -> dict[str, str]:
    """For each parametrization the first that says the same of every tensor; of a script of the user's own, itself.

    At the base all of them do. What is varied does not matter: multipliers do not depend on what they multiply.
    """
    found: dict[str, str] = {}
    tables: dict[str, Parametrization] = {}
    for name in parametrizations:
        found[name] = name
        if config.tuning.command:
            continue
        table = parametrize(derive(config, {"parametrization.name": name}), known_vocab_size(config))
        found[name] = next((one for one, other in tables.items() if other.says_the_same(table)), name)
        tables.setdefault(found[name], table)
    return found


def _sized(config: Config, asked: Question) -> list[Config]:
    """The config at every size."""
    command = config.tuning.command
    ranks = (MegatronCommand.read(command).processes or max(1, torch.cuda.device_count())) if command else 1
    if asked.growth:
        found = [member.config for member in models(config, grown(config, asked.growth), ranks)]
    elif asked.across in ("width", "depth", "experts"):
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


def size_of(config: Config, across: Across, called: str = "hidden_size") -> int:
    """What a size is called: hidden size, layers, experts, sequences, tokens of a sequence, tokens of the run."""
    training = config.training
    sizes: dict[Across, int] = {
        "width": getattr(config.model, called),
        "depth": config.model.num_layers,
        "experts": config.model.num_moe_experts or 0,
        "batch": training.global_batch_size,
        "sequence": training.seq_length,
        "tokens": training.train_steps * training.global_batch_size * training.seq_length,
    }
    return sizes[across]


def _result(
    config: Config, asked: Question, jobs: Mapping[Run, Job], outcomes: Mapping[str, Outcome]
) -> dict[str, Any]:
    sizes = {run.factor: size_of(job.config, asked.across, asked.called) for run, job in jobs.items()}
    losses: dict[str, dict[int, dict[float | str, dict[int, float]]]] = {}
    for run, job in jobs.items():
        of_size = losses.setdefault(run.parametrization, {}).setdefault(run.factor, {})
        of_size.setdefault(run.value, {})[run.seed] = outcomes[job.name].loss
    curves = {
        name: {factor: Curve(values=asked.values, losses=list(each.values())) for factor, each in held.items()}
        for name, held in losses.items()
    }
    said = {**judge(curves, sizes, asked), **ended(outcomes), "config": config.model_dump()}
    if asked.growth:
        said["growth"] = {key: [str(by) for by in factors] for key, factors in asked.growth.items()}
        said["axis"] = asked.called.replace("_", " ")
    found: dict[str, Any] = as_json({**said, "provenance": provenance(tokens_digest(config))})
    return found


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
    verdict = verdict_of(found[judged]["reasons"], found[judged]["open"])
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
                "losses": curve.by_value,
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


def _open(small: Mapping[str, Any], large: Mapping[str, Any], asked: Question) -> list[str]:
    """At which of the two sizes the optimum is not known: it lies beyond what was tried, or runs beside it diverged."""
    ends = {"low": "lowest", "high": "highest"}
    found = [
        f"{row['size']}: the {ends[row['minimum']['edge']]} {asked.over} that was tried is the best; expected --values "
        "beyond"
        for row in (small, large)
        if row["minimum"]["edge"]
    ]
    beside = [row for row in (small, large) if _is_beside_divergence(row["minimum"])]
    if found or not beside:
        return found
    (low, high), (lowest, highest) = (_between(row["minimum"], asked.values) for row in (small, large))
    if max(abs(math.log2(highest / low)), abs(math.log2(lowest / high))) <= BOUNDS["octaves"]:
        return []
    return [
        f"{row['size']}: a run beside the best {asked.over} ({row['minimum']['tried']:g}) diverged or failed; expected "
        "--values nearer to it"
        for row in beside
    ]


def _is_beside_divergence(least: Mapping[str, Any]) -> bool:
    return least["value"] is None and not least["edge"] and not isinstance(least["tried"], str)


def _between(least: Mapping[str, Any], values: Sequence[Any]) -> tuple[float, float]:
    """What an optimum lies between: itself where it is known, else the values that were tried beside the best one."""
    if not _is_beside_divergence(least):
        return least["value"], least["value"]
    place = values.index(least["tried"])
    return values[place - 1], values[place + 1]


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
    said += [f"{key} grows by {', '.join(factors)}" for key, factors in result.get("growth", {}).items()]
    for name, line in result["lines"].items():
        noise = line["noise"]
        said.append(f"{name}{f' (noise of a loss {noise:.4f})' if noise is not None else ''}:")
        for row in line["rows"]:
            least = row["minimum"]
            moved = f", {row['drift']['octaves']:+.2f} octaves to the largest" if row["drift"] else ""
            cost = math.inf if row["cost"] is None else row["cost"]
            said.append(
                f"  {across} {row['size']}: {in_words(least, over)}{moved}; its best value costs the largest "
                f"{_percent(cost)}"
            )
        for size, values in line["larger_is_worse"].items():
            if values:
                shown = ", ".join(value if isinstance(value, str) else f"{value:.3g}" for value in values)
                said.append(f"  {across} {size} is worse than the size before at {over} {shown}")
    said += [f"failed: {line}" for line in result["failed"]]
    judged = result["lines"][result["judged"]]
    said += [f"{result['judged']}: {reason}" for reason in (*judged["reasons"], *judged["open"])]
    best = f"{result['judged']}'s best {over}"
    return [
        *said,
        {
            "passed": f"passed: {best} stays",
            "failed": f"failed: {best} does not stay",
            "undecided": f"undecided: whether {best} stays is not known",
        }[result["verdict"]],
    ]
