"""What a stability check is asked: which hyperparameter, over which size. Public names: `Question`, `question`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal, get_args

from mup_megatron.config import TUNABLE, Config, derive
from mup_megatron.config.per_tensor import split_name
from mup_megatron.proof.family import default_factors, grown, reference
from mup_megatron.tuning.space import check_over, key_of, most, value_of
from mup_megatron.util.errors import ConfigError, UserError

Across = Literal["width", "depth", "experts", "batch", "sequence", "tokens"]
ACROSS: tuple[Across, ...] = get_args(Across)
"""What grows: the widths that `base:` names, layers, experts, sequences per step, tokens per sequence, steps."""

_OCTAVES = 4


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked.

    Args:
        over: hyperparameter that is varied.
        across: what grows.
        values: that are tried, ascending; names of schedules for `lr_schedule`.
        factors: sizes over the base's (width, depth, experts), else over the config's own.
        seeds: repetitions, with seeds from the config's on.
        least: smallest factor that is judged; all are drawn.
        compare_with: parametrizations that are trained and drawn too, and not judged.
        growth: key of `base:` to its factors, where sizes grow by factors of their own; `factors` are then those of
            what grows most.
        called: key of `model:` that tells the widths apart.
    """

    over: str
    across: Across
    values: Sequence[float | str]
    factors: Sequence[int]
    seeds: int
    least: int
    compare_with: Sequence[str]
    growth: Mapping[str, Sequence[Fraction]] = field(default_factory=dict)
    called: str = "hidden_size"

    @property
    def name(self) -> str:
        """Of its files."""
        return f"{self.over}-{'growth' if self.growth else self.across}"

    def sized(self, factor: int) -> str:
        """A size, in the names of its runs."""
        place = list(self.factors).index(factor)
        each = "-".join(f"{key}-{by[place]}" for key, by in self.growth.items())
        return each.replace("/", "_") or f"{self.across}-{factor}"


def question(
    config: Config,
    over: str,
    across: str,
    *,
    values: str = "",
    factors: Sequence[int] = (),
    seeds: int = 3,
    least: int | None = None,
    others: Sequence[str] | None = None,
    growth: Mapping[str, Sequence[Fraction]] | None = None,
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
        others: what it is compared with; µP with standard and fan_in, and what is not µP with that, unless given.
        growth: see `Question`; all widths by the same factors unless given.

    Raises:
        UserError: no such hyperparameter or parametrization, values that are none, fewer than two sizes, a growth that
            is none.
    """
    if over not in TUNABLE and split_name(over) is None:
        raise UserError(f"--over: {over}: no hyperparameter; expected one of {', '.join(TUNABLE)}, per_tensor.KIND.lr")
    check_over(config, over)
    if across not in ACROSS:
        raise UserError(f"--across: {across}: expected one of {', '.join(ACROSS)}")
    if seeds < 1:
        raise UserError(f"--seeds: {seeds}: expected 1 or more")
    known: Across = across
    growth, called = growth or {}, "hidden_size"
    if growth and (factors or known != "width"):
        raise UserError("--growth: says how each width grows; expected no --sizes, and --across width")
    sizes = sorted(set(factors))
    if growth:
        sizes, called = _grown(config, growth)
    if not sizes:
        sizes = default_factors(config, known) if known in ("width", "depth", "experts") else [1, 2, 4, 8]
    if len(sizes) < 2 or sizes[0] < 1:
        raise UserError(f"--sizes: {','.join(map(str, sizes))}: expected two different factors or more, from 1 on")
    if least is not None and least not in sizes[:-1]:
        raise UserError(f"--from: {least}: expected one of the factors below the largest, {sizes[:-1]}")
    own = config.parametrization.name
    for name in others or ():
        try:
            derive(config, {"parametrization.name": name})
        except ConfigError as error:
            raise UserError(f"--compare: {error}") from None
    if others is None:
        others = ("standard", "fan_in") if own == "mup" else ("mup",)
    return Question(
        over=over,
        across=known,
        values=_values(config, over, values),
        factors=sizes,
        seeds=seeds,
        least=least or sizes[0],
        compare_with=[name for name in dict.fromkeys(others) if name != own],
        growth=growth,
        called=called,
    )


def _grown(config: Config, growth: Mapping[str, Sequence[Fraction]]) -> tuple[list[int], str]:
    """The factors of what grows most, and the key that tells the models apart: hidden_size where it grows each time."""
    points = [point.sizes for point in grown(config, growth)]
    most = reference(points)
    if any(factor.denominator != 1 for factor in growth[most]):
        raise UserError(f"--growth {most}: grows most; expected whole factors, for example 1,2,4")
    hidden = [point.get("hidden_size", 0) for point in points]
    called = "hidden_size" if sorted(set(hidden)) == hidden else most
    return [int(factor) for factor in growth[most]], called


def _values(config: Config, over: str, values: str) -> list[float | str]:
    words = [word.strip() for word in values.split(",") if word.strip()]
    if over == "lr_schedule":
        named = {"multi-step": config.training.lr_milestones, "WSD": config.training.lr_wsd_decay_steps}
        there = ["linear", "cosine", "inverse-square-root", "constant", *(name for name, has in named.items() if has)]
        return [*(dict.fromkeys(words) or there)]
    if not words:
        own = value_of(config, over)
        if not own:
            raise UserError(f"--values: missing; {key_of(over)} is {own}, about which there are no powers of two")
        powers = range(-_OCTAVES, _OCTAVES + 1)
        return [value for power in powers if (value := own * 2.0**power) <= most(over)]
    try:
        numbers = sorted({float(word) for word in words})
    except ValueError:
        numbers = []
    if not all(math.isfinite(number) and number > 0 for number in numbers) or len(numbers) < 3:
        raise UserError(f"--values: {values}: a minimum needs three different positive numbers or more")
    return list(numbers)
