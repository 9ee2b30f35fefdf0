"""The coordinate check: sizes of activations, gradients and updates over width, after a few steps, in any layout.

Public names: `coord_check`, `parse_parametrization`, `MeasuredParametrization`. Every model of the family is trained
for some steps on one batch, once per seed, in the parametrization that is judged and in one to compare it with (Tensor
Programs V, appendix D.1).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state

from mup_megatron.config import Config, derive
from mup_megatron.data.batches import Batches, build_datasets
from mup_megatron.data.prepare import prepare
from mup_megatron.engines.optim import LearningRateSchedule
from mup_megatron.engines.setup import refuse, resolve_auto
from mup_megatron.model.build import parametrize
from mup_megatron.parallel import runtime, upstream
from mup_megatron.parallel.layout import Layout, resolve_layout
from mup_megatron.parallel.ranks import Rank
from mup_megatron.proof.controls import Break, Control, control, interpolate
from mup_megatron.proof.coordinates import measure
from mup_megatron.proof.family import Member, default_factors, grown, models, own_path, scaled
from mup_megatron.proof.megatron import megatron_measure
from mup_megatron.proof.regimes import REGIMES, Regime
from mup_megatron.proof.slopes import Measurement, slopes_of
from mup_megatron.proof.sums import COLUMNS
from mup_megatron.proof.theory import Theory
from mup_megatron.proof.verdict import BOUNDS, judge, overall
from mup_megatron.rules.horizon import applied
from mup_megatron.rules.table import Parametrization
from mup_megatron.util.errors import UserError
from mup_megatron.util.files import as_json


@dataclass(frozen=True, kw_only=True)
class MeasuredParametrization:
    """A parametrization that models of the family are trained in: the one that is judged, or one to compare it with.

    Args:
        label: for people.
        name: of the config's `parametrization.name`.
        break_: what is done to its rules.
    """

    label: str
    name: str = "mup"
    break_: Break | None = None


_TOKENS = 16
"""Of a sequence, in the check's own batch."""
_DIGITS = 7
"""Of a number in the JSON."""

MUP = MeasuredParametrization(label="mup")
STANDARD = MeasuredParametrization(label="standard", name="standard")
FAN_IN = MeasuredParametrization(label="fan_in", name="fan_in")


def parse_parametrization(point: str | None, broken: str | None, config: Config) -> MeasuredParametrization:
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
        return MeasuredParametrization(label=f"mup without {control(broken).taken_out}", break_=control(broken).break_)
    point = point or config.parametrization.name
    for known in (MUP, STANDARD, FAN_IN):
        if point == known.label:
            return known
    kind, _, numbers = point.partition(":")
    try:
        init, lr = (float(number) for number in numbers.split(","))
        if kind != "interpolate" or not (math.isfinite(init) and math.isfinite(lr)):
            raise ValueError
    except ValueError:
        raise UserError(f"--parametrization {point}: expected mup, standard, fan_in, or interpolate:0.5,1") from None
    return MeasuredParametrization(label=point, break_=interpolate(init, lr))


def coord_check(
    config: Config,
    rank: Rank,
    *,
    factors: Sequence[int] = (),
    growth: Mapping[str, Sequence[int | Fraction]] | None = None,
    steps: int = 4,
    seeds: int = 3,
    point: str | None = None,
    broken: str | None = None,
    regime: str = "plain",
    compare: bool = True,
    own_batch: bool = False,
    ranges: bool = False,
    folder: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Runs the check. Collective.

    Args:
        config: the run; its `base:` is the family's smallest model, and its layout that of all.
        rank: this process.
        factors: sizes over the base's; the config's own path from the base to its target unless given.
        growth: key of `base:` to factors of its own, instead.
        steps: optimizer steps.
        seeds: repetitions, with seeds from the config's on.
        point: the parametrization that is judged; see `parse_parametrization`.
        broken: a rule to take out (`controls.CONTROLS`), in the regime that excites it.
        regime: under which µP is judged (`regimes.REGIMES`); the broken rule's own where one is broken.
        compare: also measure another parametrization, for the picture: standard beside µP, µP beside all others.
        own_batch: the config's own batch, length and rate, which may hide what happens as widths grow (`_few_tokens`).
        ranges: also measure the range of values of every tensor, and what formats of lower precision would lose.
        folder: of runs of megatron.training, where the config has a `tuning.command`; it is then not collective, and
            `rank` counts the processes of such a run.
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
    if factors and growth:
        raise UserError("--growth: says how each size grows; expected no --widths")
    upstream.prepare_process()
    judged = parse_parametrization(point, broken, config)
    compare_with = [STANDARD if judged is MUP else MUP] if compare else []
    measured = [judged, *compare_with]
    chosen = control(broken) if broken is not None else None
    asked = _asked(config, rank, chosen, regime, factors, growth or {}, steps, own_batch)
    if config.tuning.command:
        if asked.regime.resumes or (judged.break_ is not None and chosen is None) or (chosen and chosen.growing_tensor):
            raise UserError(
                f"coord-check --megatron: {judged.label} in the regime {asked.name} is measured by this project's "
                "engines; expected no --megatron"
            )
        names = [(each.label, each.name, broken if each is judged else None) for each in measured]
        measurements, tables = megatron_measure(
            asked.family, names, steps, seeds, folder or Path(config.run.dir), say, ranges=ranges
        )
    else:
        for member in asked.family:
            refuse(member.config, member.layout)
        how = {"resumes": asked.regime.resumes, "ranges": ranges}
        measurements, tables = _measure(asked.family, measured, rank, steps, seeds, how, say)
    family, axis = asked.family, asked.regime.axis
    theory = Theory(tables, [member.size for member in family], axis)
    slopes = {each.label: slopes_of(measurements, each.label, family, steps, theory, axis) for each in measured}
    verdicts = {label: judge(held) for label, held in slopes.items()}
    not_finite = _not_finite(measurements)
    verdict = overall(verdicts[judged.label])
    named = {
        state: [name for name, each in verdicts[judged.label].items() if each["verdict"] == state]
        for state in ("out of bounds", "undecided")
    }
    training = family[0].config.training
    result = {
        "judged": judged.label,
        "regime": asked.name,
        "passed": verdict == "passed",
        "verdict": verdict,
        "out_of_bounds": named["out of bounds"],
        "undecided": named["undecided"],
        "axis": axis,
        "over": family[0].over,
        "sizes": [
            {"factor": member.factor, "size": member.size, "sizes": member.sizes, "layout": str(member.layout)}
            for member in family
        ],
        "steps": steps,
        "seeds": seeds,
        "lr": family[0].config.hparams.lr,
        "tokens": training.global_batch_size * training.seq_length,
        "set": asked.keys,
        "bounds": BOUNDS,
        "silent": sorted({name for each in measurements for name in each.coordinates.silent}),
        "not_finite": not_finite,
        "verdicts": verdicts,
        "slopes": {label: [dataclasses.asdict(each) for each in held] for label, held in slopes.items()},
        **({"range_columns": COLUMNS} if ranges else {}),
        "cells": [each.as_written() for each in measurements],
        "config": config.model_dump(),
    }
    found: dict[str, Any] = as_json(result, _DIGITS)
    return found


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What is run: the family, and under what.

    Args:
        name: of the regime.
        regime: the same.
        keys: config keys that the regime sets, for people.
        family: models, smallest first.
    """

    name: str
    regime: Regime
    keys: dict[str, Any]
    family: list[Member]


def _asked(
    config: Config,
    rank: Rank,
    broken: Control | None,
    name: str,
    factors: Sequence[int],
    growth: Mapping[str, Sequence[int | Fraction]],
    steps: int,
    own_batch: bool,
) -> _Asked:
    """The family of a check, in its regime."""
    name = broken.regime if broken is not None else name
    regime = REGIMES[name]
    if broken is not None and broken.grows and broken.grows not in growth:
        raise UserError(
            f"--break: {broken.taken_out} matters only where experts become more; expected --growth "
            f"{broken.grows}=1,2,4,8"
        )
    factors = factors or (broken.factors if broken is not None else ())
    # Rules over batch and tokens count from the run's own, and the check has others.
    config = derive(config, {**applied(config), "tuning.seq_length": None})
    # Alike at every size, and nothing random or recomputed between the steps; a rate from the first step on.
    plain: dict[str, Any] = {
        "model.hidden_dropout": 0.0,
        "model.attention_dropout": 0.0,
        "training.recompute_granularity": None,
        "training.recompute_method": None,
        "training.recompute_num_layers": None,
        "training.lr_schedule": "constant",
        "training.lr_warmup_steps": 0,
        "training.train_steps": steps + 1,
        "training.eval_interval": None,
        "run.samples": [],
        "parametrization.name": "mup",
    }
    warmup = config.training.lr_warmup_steps
    if warmup > steps and not own_batch:
        plain["hparams.lr"] = LearningRateSchedule(config.training, config.hparams.lr)(steps)
    if config.optimizer.name == "sgd":
        # Clipping by the plain norm, which falls with width early on, is part of SGD's rate.
        plain["training.clip_grad"] = 0.0
    if growth:
        points = grown(config, growth)
    elif factors:
        points = scaled(config, factors, regime.axis)
    elif regime.axis == "depth":
        points = scaled(config, default_factors(config, "depth")[:3], "depth")
    else:
        points = own_path(config, rank.world_size)
    small = {f"model.{key}": size for key, size in {**config.base.width.sizes, **config.base.experts}.items()}
    asked = derive(config, {**plain, **small})
    keys = regime.keys(asked, steps)
    if keys is None and broken is None:
        raise UserError(f"{regime.what}: the config is that already")
    keys = keys or {}
    asked = resolve_auto(derive(asked, keys))
    if regime.regrows and regime.axis == "width":
        over = max(points[-1].sizes, key=lambda key: points[-1].sizes[key] / config.base.width.sizes[key])
        ratios = [point.sizes[over] / config.base.width.sizes[over] for point in points]
        points = scaled(asked, [max(1, round(ratio)) for ratio in ratios])
    growing = broken is not None and broken.growing_tensor
    if not own_batch:
        asked = derive(asked, _few_tokens(asked, rank.world_size, growing=growing))
    return _Asked(
        name=name,
        regime=regime,
        keys=keys,
        family=models(asked, points, rank.world_size, regime.axis, growing_tensor=growing),
    )


def _few_tokens(config: Config, world_size: int, *, growing: bool) -> dict[str, Any]:
    """A batch of few tokens: one sequence a micro-batch, two micro-batches where there are, 16 tokens a sequence.

    What n coordinates learn of T tokens together is aligned with any one of them only where n is well above T; below,
    it falls as sqrt(T/n) with width, whatever the parametrization.
    """
    parallel, training = config.parallel, config.training
    if growing:  # with the ranks that are the most, at whose sizes a batch of the config's own may not be shared
        config = derive(config, {"parallel.tensor_model_parallel_size": 1, "training.micro_batch_size": 1})
    layout = resolve_layout(config, world_size)
    least = layout.pipeline if layout.virtual_pipeline > 1 else 1
    micro_batches = min(layout.micro_batches, -(-2 // least) * least)
    unit = 2 * parallel.context_parallel_size * (layout.tensor if parallel.sequence_parallel else 1)
    length = min(training.seq_length, max(unit, _TOKENS // unit * unit))
    few = {
        "training.micro_batch_size": 1,
        "training.global_batch_size": layout.data * micro_batches,
        "training.seq_length": length,
    }
    # A pair's sides are padded, and what pads is measured too: neither side is longer than the other has to be.
    return {**few, "training.decoder_seq_length": min(training.decoder_length, length)} if config.data.of_pairs else few


def _measure(
    family: Sequence[Member],
    measured: Sequence[MeasuredParametrization],
    rank: Rank,
    steps: int,
    seeds: int,
    how: Mapping[str, bool],
    say: Callable[[str], None],
) -> tuple[list[Measurement], list[Parametrization]]:
    """Every measurement, and µP's own table of every size. Sizes of one layout follow each other."""
    if rank.is_first:
        prepare(family[0].config, say)  # the others wait for rank 0 where the process groups start
    meeting = None if torch.distributed.is_initialized() else runtime.Meeting(rank)
    measurements: list[Measurement] = []
    tables: list[Parametrization] = []
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
            tables.append(parametrize(member.config, prepared.vocab_size))
            for number in range(seeds):
                seeded = dataclasses.replace(member, config=derive(member.config, {"run.seed": seed + number}))
                if number not in datasets:
                    datasets[number] = build_datasets(seeded.config, prepared)[0]
                batch = Batches(datasets[number], seeded.config, member.layout, rank.rank, device)[0]
                for each in measured:
                    config = derive(seeded.config, {"parametrization.name": each.name})
                    parametrization = parametrize(config, prepared.vocab_size)
                    if each.break_ is not None:
                        parametrization = each.break_(parametrization, member.layout)
                    whole = dataclasses.replace(seeded, config=config)
                    coordinates = measure(whole, parametrization, rank.rank, device, batch, steps, **how)
                    measurements.append(
                        Measurement(label=each.label, seed=seed + number, factor=member.factor, coordinates=coordinates)
                    )
                    say(
                        f"{each.label}: {member.factor} x base, seed {seed + number}: loss "
                        + " ".join(f"{loss:.4f}" for loss in coordinates.losses)
                    )
    finally:
        parallel_state.destroy_model_parallel()
    return measurements, tables


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


def _not_finite(measurements: Sequence[Measurement]) -> list[str]:
    """Where a loss was no finite number."""
    return [
        f"{each.label}: {each.factor} x base, seed {each.seed}, step {step}"
        for each in measurements
        for step, loss in enumerate(each.coordinates.losses)
        if not math.isfinite(loss)
    ]
