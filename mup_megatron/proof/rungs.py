"""The sizes of a ladder: batch, tokens, width and layers, as factors of a config's own.

Public names: `Ladder`, `Rung`, `rungs`, `varied`, `octaves`, `cost`, `NAMES`, `Over`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from mup_megatron.config import Config, derive
from mup_megatron.proof.family import Axis, members
from mup_megatron.proof.grid import comparable
from mup_megatron.rules.horizon import without_rules
from mup_megatron.tuning.loss_law import AXES
from mup_megatron.tuning.space import check_over, key_of, most, stretched, value_of
from mup_megatron.util.errors import ConfigError, UserError

Over = Literal["lr", "weight_decay", "one_minus_beta2"]

NAMES: dict[Over, str] = {"lr": "rate", "weight_decay": "decay", "one_minus_beta2": "one_minus_beta2"}
"""What the value of a ladder is called in words and in its JSON, by the hyperparameter that it varies."""
_MORE = 4
"""Doublings of an axis that a ladder which is too small is told to add, at most; and one."""
_CLOSE = 0.01
"""Share of a rung's tokens by which rounded steps may miss them without a word."""


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """What is asked. Factors are of the config's own batch and tokens, and of the base's width and layers.

    Args:
        batch: factors, ascending, from 1 on.
        tokens: factors of the run's tokens, ascending, from 1 on.
        width: factors of the base sizes, ascending, from 1 on; empty for the config's own model alone.
        values: to begin with, ascending, three or more.
        seeds: repetitions.
        min_steps: rungs of fewer optimizer steps are left out.
        layers: of the base's, where `base:` names them; empty for the config's own.
        over: which hyperparameter the values are of; the others are the config's own on every rung.
    """

    batch: Sequence[int]
    tokens: Sequence[int]
    width: Sequence[int]
    values: Sequence[float]
    seeds: int
    min_steps: int = 1
    layers: Sequence[int] = ()
    over: Over = "lr"

    def __post_init__(self) -> None:
        """Raises UserError for factors that are none, and for what has no slope, or no minimum."""
        for name in AXES:
            found = getattr(self, name)
            if (not found and name in ("batch", "tokens")) or (found and found[0] < 1):
                raise UserError(f"--{name}: {','.join(map(str, found))}: expected whole factors from 1 on")
        if self.seeds < 1:
            raise UserError(f"--seeds: {self.seeds}: expected 1 or more")
        if not any(len(getattr(self, name)) > 1 for name in AXES):
            raise UserError("ladder: one rung has no slope; expected two factors or more of --batch or --tokens")
        if len(self.values) < 3:
            raise UserError("--values: a minimum needs three different positive numbers or more")

    @property
    def name(self) -> str:
        """Of its files."""
        return "ladder" if self.over == "lr" else f"ladder-{self.over}"


def varied(over: str) -> Over:
    """What `--over` names. Raises UserError."""
    if over not in NAMES:
        raise UserError(f"--over: {over}: expected {' or '.join(NAMES)}")
    return over


def octaves(config: Config, over: Over) -> list[float]:
    """Values to begin with, where none are given: about the config's own. Raises UserError where that is 0."""
    own = value_of(config, over)
    if own <= 0:
        raise UserError(f"--values: {key_of(over)} is {own:g}, so it has no octaves about it; expected values above 0")
    return [value for octave in (-2, -1, 0, 1, 2) if (value := own * 2.0**octave) <= most(over)]


@dataclass(frozen=True)
class Rung:
    """One size of the run.

    Args:
        batch: factor of the config's.
        tokens: factor of the config's.
        width: factor of the base's; 1 where the model's is the config's own.
        layers: factor of the base's; 1 where the model's are the config's own.
    """

    batch: int
    tokens: int
    width: int
    layers: int = 1

    @property
    def name(self) -> str:
        """Of its runs."""
        deeper = f"-layers-{self.layers}" if self.layers > 1 else ""
        return f"batch-{self.batch}-tokens-{self.tokens}-width-{self.width}{deeper}"

    @property
    def octaves(self) -> dict[str, float]:
        """Logarithms of the factors, by axis."""
        return {name: math.log2(getattr(self, name)) for name in AXES}


def rungs(config: Config, asked: Ladder, say: Callable[[str], None]) -> dict[Rung, Config]:
    """Every rung's config, the largest last.

    Rules over batch and tokens are off, and each rung is evaluated on as many sequences as the others: on as many as
    the config says, or more, so that every batch divides them.

    Args:
        config: the run.
        asked: the factors.
        say: takes a line about rungs that are left out, and about those whose steps are not as many tokens as asked.

    Raises:
        UserError: a rung makes no config, or too few are left, or the largest is not, or what is varied moves nothing.
    """
    check_over(config, asked.over)
    found, short, off = {}, [], []
    evaluations = _multiple(config.training.eval_steps, math.lcm(*asked.batch))
    for (width, layers), model in _models(derive(config, without_rules(config)), asked).items():
        for batch in asked.batch:
            for tokens in asked.tokens:
                rung = Rung(batch, tokens, width, layers)
                steps = _steps(config, rung)
                if steps < asked.min_steps:
                    short.append(f"{rung.name} ({steps})")
                else:
                    found[rung] = _sized(model, rung, steps, evaluations)
                    share = steps * batch / (config.training.train_steps * tokens)
                    if abs(share - 1) > _CLOSE:
                        off.append(f"{rung.name} ({steps}, {share:.2f} of its tokens)")
    if short:
        say(f"left out, with fewer than {asked.min_steps} steps: {', '.join(short)}")
    if off:
        say(f"warning: steps are rounded, and the laws take the tokens for whole: {', '.join(off)}; raise --min-steps")
    _check(config, asked, found)
    return found


def _steps(config: Config, rung: Rung) -> int:
    return round(config.training.train_steps * rung.tokens / rung.batch)


def _models(config: Config, asked: Ladder) -> dict[tuple[int, int], Config]:
    """By factor of width and of layers."""
    return {
        (width, layers): deep
        for width, wide in _grown(config, asked.width, "width").items()
        for layers, deep in _grown(wide, asked.layers, "depth").items()
    }


def _grown(config: Config, factors: Sequence[int], axis: Axis) -> dict[int, Config]:
    if not factors:
        return {1: config}
    if len(factors) == 1:
        raise UserError(f"ladder: one {axis} has no slope; expected two factors or more, or none for the config's own")
    found = members(config, factors, 1, axis)
    return dict(zip(factors, (member.config for member in found), strict=True))


def _multiple(number: int, of: int) -> int:
    """The least multiple that is not less."""
    return -(-number // of) * of


def _sized(model: Config, rung: Rung, steps: int, evaluations: int) -> Config:
    size = {
        "training.global_batch_size": model.training.global_batch_size * rung.batch,
        "training.eval_steps": evaluations // rung.batch,
    }
    try:
        return comparable(derive(stretched(model, steps), size))
    except ConfigError as error:
        raise UserError(f"ladder: batch {rung.batch}, tokens {rung.tokens}: {error}") from None


def _check(config: Config, asked: Ladder, found: dict[Rung, Config]) -> None:
    """Raises UserError where the laws would have more unknowns than rungs; names the cheapest ladder that has not."""
    largest = Rung(asked.batch[-1], asked.tokens[-1], *((each or [1])[-1] for each in (asked.width, asked.layers)))
    if largest not in found:
        raise UserError(f"--min-steps {asked.min_steps}: leaves out {largest.name}, on which the laws are tested")
    unknown = _unknown(found)
    if len(found) - 1 <= unknown:
        raise UserError(
            f"ladder: {len(found)} rungs, of which one is kept out, do not determine {unknown} numbers and their "
            f"errors; expected {_enough(config, asked)}"
        )


def _unknown(found: Collection[Rung]) -> int:
    """Numbers of a law: its constant, and an exponent for each axis that varies."""
    return 1 + sum(len({getattr(rung, name) for rung in found}) > 1 for name in AXES)


def _enough(config: Config, asked: Ladder) -> str:
    """The cheapest ladder that determines its laws and goes on from the one that was asked, by batch and tokens."""
    found: list[tuple[dict[str, list[int]], list[Rung]]] = []
    for batches, steps in itertools.product(range(_MORE), repeat=2):
        axes = {"batch": _doubled(asked.batch, batches), "tokens": _doubled(asked.tokens, steps)}
        sizes = itertools.product(asked.width or [1], asked.layers or [1], axes["batch"], axes["tokens"])
        made = [Rung(batch, tokens, width, layers) for width, layers, batch, tokens in sizes]
        kept = [rung for rung in made if _steps(config, rung) >= asked.min_steps]
        if made[-1] in kept and len(kept) - 1 > _unknown(kept):
            found.append((axes, kept))
    if not found:
        return "a smaller --min-steps"
    axes, kept = min(found, key=lambda each: (sum(rung.tokens for rung in each[1]), len(each[1])))
    options = " ".join(f"--{name} {','.join(map(str, factors))}" for name, factors in axes.items())
    return f"{options}, which is enough: {cost(asked, kept)}"


def cost(asked: Ladder, made: Collection[Rung]) -> str:
    """How many runs some rungs are at most, and what they read; those near the minimum alone have every seed."""
    runs = len(asked.values) * asked.seeds
    tokens = runs * sum(rung.tokens for rung in made)
    return f"{len(made)} rungs of at most {runs} runs, which read {tokens:,} times the tokens of the config's own run"


def _doubled(factors: Sequence[int], more: int) -> list[int]:
    return [*factors, *(factors[-1] * 2**octave for octave in range(1, more + 1))]
