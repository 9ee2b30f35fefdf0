"""Whether the best hyperparameter stays put while the model, the batch or the run grows.

Public names: `stability`, `question`, `Question`, `lines`, `write`. After Tensor Programs V, figures 1 to 4. Every size
is trained with every value and seed, in the config's parametrization and in those that are drawn beside it; each run is
one process (grid.py), as a tuning trial is.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from mup_megatron import upstream
from mup_megatron.config import Config, Hparams
from mup_megatron.data.prepare import prepare
from mup_megatron.errors import ConfigError, UserError
from mup_megatron.proof.family import default_factors, members
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
from mup_megatron.ranks import Rank
from mup_megatron.run_directory import write_whole
from mup_megatron.tuning.space import stretched

Across = Literal["width", "depth", "batch", "sequence", "tokens"]
ACROSS: tuple[Across, ...] = get_args(Across)
"""What grows: the sizes that `base:` names, layers, sequences per step, tokens per sequence, steps."""

OVER = (*Hparams.model_fields, "lr_schedule")
"""What is varied."""

BOUNDS = {"octaves": 0.5, "cost": 0.005}
"""A judged parametrization passes where the smallest size's optimum is at most so far from the largest's (or within two
standard errors), and its best value costs the largest at most this share of its loss."""

_OCTAVES = 4
_GROWS = {"batch": "training.global_batch_size", "sequence": "training.seq_length"}


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked.

    Args:
        over: hyperparameter that is varied.
        across: what grows.
        values: that are tried, ascending; names of schedules for `lr_schedule`.
        factors: sizes over the base's (width, depth), else over the config's own.
        seeds: repetitions, with seeds from the config's on.
        least: smallest factor that is judged; all are drawn.
        beside: whether others are drawn too: standard and fan_in beside µP, µP beside these.
    """

    over: str
    across: Across
    values: Sequence[float | str]
    factors: Sequence[int]
    seeds: int
    least: int
    beside: bool

    @property
    def name(self) -> str:
        """Of its files."""
        return f"{self.over}-{self.across}"


@dataclass(frozen=True, kw_only=True)
class _Run:
    """One cell of the grid."""

    line: str
    factor: int
    value: float | str
    seed: int
    job: Job


def question(
    config: Config,
    *,
    over: str,
    across: str,
    values: str = "",
    factors: Sequence[int] = (),
    seeds: int = 3,
    least: int | None = None,
    beside: bool = True,
) -> Question:
    """Reads what is asked, and fills in what is not said.

    Args:
        config: the run.
        over: see `Question`.
        across: see `Question`.
        values: separated by commas; powers of two about the config's own value unless given.
        factors: see `Question`; from the base to the config's own size unless given.
        seeds: see `Question`.
        least: see `Question`; the smallest unless given.
        beside: see `Question`.

    Raises:
        UserError: no such hyperparameter, values that are none, fewer than two sizes.
    """
    if over not in OVER:
        raise UserError(f"--over: {over}: no hyperparameter; expected one of {', '.join(OVER)}")
    if across not in ACROSS:
        raise UserError(f"--across: {across}: expected one of {', '.join(ACROSS)}")
    if seeds < 1:
        raise UserError(f"--seeds: {seeds}: expected 1 or more")
    known: Across = across
    sizes = sorted(set(factors)) or _factors(config, known)
    if len(sizes) < 2 or sizes[0] < 1:
        raise UserError(f"--sizes: {','.join(map(str, sizes))}: expected two different factors or more, from 1 on")
    if least is not None and least not in sizes[:-1]:
        raise UserError(f"--from: {least}: expected one of the factors below the largest, {sizes[:-1]}")
    return Question(
        over=over,
        across=known,
        values=_values(config, over, values),
        factors=sizes,
        seeds=seeds,
        least=least or sizes[0],
        beside=beside,
    )


def _factors(config: Config, across: Across) -> list[int]:
    return default_factors(config, across) if across in ("width", "depth") else [1, 2, 4, 8]


def _values(config: Config, over: str, values: str) -> list[float | str]:
    words = [word.strip() for word in values.split(",") if word.strip()]
    if over == "lr_schedule":
        training = config.training
        if words:
            return list(dict.fromkeys(words))
        there = ["linear", "cosine", "inverse-square-root", "constant"]
        there += ["multi-step"] if training.lr_milestones else []
        return [*there, *(["WSD"] if training.lr_wsd_decay_steps else [])]
    if not words:
        own = getattr(config.hparams, over)
        if not own:
            raise UserError(f"--values: missing; hparams.{over} is {own}, about which there are no powers of two")
        return [own * 2.0**power for power in range(-_OCTAVES, _OCTAVES + 1)]
    try:
        numbers = sorted({float(word) for word in words})
    except ValueError:
        numbers = []
    if not all(math.isfinite(number) and number > 0 for number in numbers) or len(numbers) < 3:
        raise UserError(f"--values: {values}: a minimum needs three different positive numbers or more")
    return list(numbers)


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
            prepare(each, say)
    outcomes = run_grid([run.job for run in runs], directory / "runs", rank, workers, say)
    return _result(config, asked, runs, outcomes)


def grid(config: Config, asked: Question) -> list[_Run]:
    """Every run, those of the first seed first.

    Raises:
        UserError: a size or a value makes no config; names it.
    """
    lines = [config.parametrization.name]
    if asked.beside:
        lines += ["standard", "fan_in"] if lines == ["mup"] else ["mup"]
    sized = dict(zip(asked.factors, _sized(config, asked), strict=True))
    section = "training" if asked.over == "lr_schedule" else "hparams"
    runs = []
    for seed in range(config.run.seed, config.run.seed + asked.seeds):
        for factor, sizes in sized.items():
            for value in asked.values:
                for line in lines:
                    keys = {f"{section}.{asked.over}": value, "parametrization.name": line, "run.seed": seed}
                    try:
                        made = sizes.derive(keys)
                    except ConfigError as error:
                        raise UserError(f"--values: {value}: {error}") from None
                    shown = value if isinstance(value, str) else f"{value:.6g}"
                    name = f"{line}-{asked.across}-{factor}-{asked.over}-{shown}-seed-{seed}"
                    job = Job(name=name, config=made)
                    runs.append(_Run(line=line, factor=factor, value=value, seed=seed, job=job))
    return runs


def _sized(config: Config, asked: Question) -> list[Config]:
    """The config at every size."""
    if asked.across in ("width", "depth"):
        try:
            found = [member.config for member in members(config, asked.factors, 1, asked.across)]
        except UserError as error:
            raise UserError(str(error).replace("--widths", "--sizes")) from None
    elif asked.across == "tokens":
        found = [stretched(config, config.training.train_steps * factor) for factor in asked.factors]
    else:
        key = _GROWS[asked.across]
        own = getattr(config.training, key.removeprefix("training."))
        found = [config.derive({key: own * factor}) for factor in asked.factors]
    return [comparable(each) for each in found]


def size_of(config: Config, across: Across) -> int:
    """What a size is called: hidden size, layers, sequences, tokens of a sequence, tokens of the run."""
    training = config.training
    return {
        "width": config.model.hidden_size,
        "depth": config.model.num_layers,
        "batch": training.global_batch_size,
        "sequence": training.seq_length,
        "tokens": training.train_steps * training.global_batch_size * training.seq_length,
    }[across]


def _result(config: Config, asked: Question, runs: Sequence[_Run], outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    sizes = {run.factor: size_of(run.job.config, asked.across) for run in runs}
    lines = list(dict.fromkeys(run.line for run in runs))
    curves = {
        line: {
            factor: Curve(
                values=asked.values,
                losses=[
                    {
                        run.seed: outcomes[run.job.name].loss
                        for run in runs
                        if (run.line, run.factor, run.value) == (line, factor, value)
                    }
                    for value in asked.values
                ],
            )
            for factor in sizes
        }
        for line in lines
    }
    for line, held in curves.items():
        for factor, curve in held.items():
            if not math.isfinite(min(curve.means)):
                raise UserError(
                    f"{line}, {asked.across} {sizes[factor]}: no value of {asked.over} has a finite loss with every "
                    "seed; expected --values with smaller ones"
                )
    found = {line: _line(held, sizes, asked) for line, held in curves.items()}
    judged = lines[0]
    result = {
        "judged": judged,
        "over": asked.over,
        "across": asked.across,
        "verdict": (verdict := _verdict(found[judged])),
        "passed": verdict == "passed",
        "bounds": BOUNDS,
        "values": asked.values,
        "sizes": [{"factor": factor, "size": size} for factor, size in sizes.items()],
        "seeds": asked.seeds,
        "from": sizes[asked.least],
        "lines": found,
        "failed": [f"{name}: {each.reason}" for name, each in outcomes.items() if each.state == "failed"],
        "seconds": sum(each.seconds for each in outcomes.values()),
        "config": config.model_dump(),
    }
    return _plain(result)


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


def _plain(value: Any) -> Any:
    """The same as JSON has it: null for what is no finite number, names as keys."""
    if isinstance(value, dict):
        return {str(key): _plain(held) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(held) for held in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
