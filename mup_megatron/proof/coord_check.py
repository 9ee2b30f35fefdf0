"""The coordinate check: sizes of activations, gradients and updates over width, after a few steps, in any layout.

Public name: `coord_check`. Every model of the family is trained for some steps on one batch, once per seed, in the
parametrization that is judged and in one to compare it with (Tensor Programs V, appendix D.1).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state

from mup_megatron.config import Config, derive
from mup_megatron.data.batches import Batches, build_datasets
from mup_megatron.data.prepare import prepare
from mup_megatron.data.record import tokens_digest
from mup_megatron.engines.optim import LearningRateSchedule
from mup_megatron.engines.setup import refuse, resolve_auto
from mup_megatron.model.build import parametrize
from mup_megatron.parallel import runtime, upstream
from mup_megatron.parallel.layout import Layout, resolve_layout
from mup_megatron.parallel.ranks import Rank
from mup_megatron.proof.check import Check, MeasuredParametrization
from mup_megatron.proof.coordinates import measure
from mup_megatron.proof.family import Axis, Member, Point, default_factors, grown, models, own_path, scaled
from mup_megatron.proof.megatron import megatron_measure
from mup_megatron.proof.regimes import REGIMES
from mup_megatron.proof.slopes import Measurement, slopes_of
from mup_megatron.proof.sums import COLUMNS
from mup_megatron.proof.theory import Theory
from mup_megatron.proof.verdict import BOUNDS, Slope, judge, overall
from mup_megatron.rules.horizon import applied
from mup_megatron.rules.table import Parametrization
from mup_megatron.util.errors import UserError
from mup_megatron.util.files import as_json
from mup_megatron.util.provenance import provenance

_TOKENS = 16
"""Of a sequence, in the check's own batch."""
_DIGITS = 7
"""Of a number in the JSON."""


def coord_check(
    config: Config,
    rank: Rank,
    asked: Check,
    *,
    folder: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Runs the check. Collective.

    Args:
        config: the run; its `base:` is the family's smallest model, and its layout that of all.
        rank: this process.
        asked: sizes, steps, seeds, and what is judged.
        folder: of runs of megatron.training, where the config has a `tuning.command`; it is then not collective, and
            `rank` counts the processes of such a run.
        say: takes lines of progress.

    Returns:
        What is written as JSON, the same on every rank.

    Raises:
        UserError: bad input.
    """
    upstream.prepare_process()
    measured = asked.measured(config)
    judged, regime = measured[0], REGIMES[asked.in_regime]
    keys, family = _asked(config, rank, asked)
    if config.tuning.command:
        growing = asked.control is not None and asked.control.growing_tensor
        if regime.resumes or growing or (judged.break_ is not None and judged.broken is None):
            raise UserError(
                f"coord-check --megatron: {judged.label} in the regime {asked.in_regime} is measured by this project's "
                "engines; expected no --megatron"
            )
        measurements, tables = megatron_measure(family, measured, asked, folder or Path(config.run.dir), say)
    else:
        for member in family:
            refuse(member.config, member.layout)
        measurements, tables = _measure(family, measured, rank, asked, say)
    theory = Theory(tables, [member.size for member in family], regime.axis)
    slopes = {each.label: slopes_of(measurements, each.label, family, theory, regime.axis) for each in measured}
    said = {**_result(asked, keys, family, measurements, slopes), "config": config.model_dump()}
    return as_json({**said, "provenance": provenance(tokens_digest(config))}, _DIGITS)


def _result(
    asked: Check,
    keys: Mapping[str, Any],
    family: Sequence[Member],
    measurements: Sequence[Measurement],
    slopes: Mapping[str, Sequence[Slope]],
) -> dict[str, Any]:
    """What the JSON file tells, but for the config; of the parametrizations the judged one comes first."""
    judged, first = next(iter(slopes)), family[0]
    verdicts = {label: judge(held) for label, held in slopes.items()}
    verdict = overall(verdicts[judged])
    named = {
        state: [name for name, each in verdicts[judged].items() if each["verdict"] == state]
        for state in ("out of bounds", "undecided")
    }
    return {
        "judged": judged,
        "regime": asked.in_regime,
        "passed": verdict == "passed",
        "verdict": verdict,
        "out_of_bounds": named["out of bounds"],
        "undecided": named["undecided"],
        "axis": REGIMES[asked.in_regime].axis,
        "over": first.over,
        "sizes": [
            {"factor": member.factor, "size": member.size, "sizes": member.sizes, "layout": str(member.layout)}
            for member in family
        ],
        "steps": asked.steps,
        "seeds": asked.seeds,
        "lr": first.config.hparams.lr,
        "tokens": first.config.training.global_batch_size * first.config.training.seq_length,
        "set": keys,
        "bounds": BOUNDS,
        "silent": sorted({name for each in measurements for name in each.coordinates.silent}),
        "not_finite": [where for each in measurements for where in each.not_finite],
        "verdicts": verdicts,
        "slopes": {label: [dataclasses.asdict(each) for each in held] for label, held in slopes.items()},
        **({"range_columns": COLUMNS} if asked.ranges else {}),
        "cells": [each.as_written() for each in measurements],
    }


def _asked(config: Config, rank: Rank, asked: Check) -> tuple[dict[str, Any], list[Member]]:
    """Config keys that the check's regime sets, and its family, smallest model first."""
    regime, broken = REGIMES[asked.in_regime], asked.control
    if broken is not None and broken.grows and broken.grows not in asked.growth:
        raise UserError(
            f"--break: {broken.taken_out} matters only where experts become more; expected --growth "
            f"{broken.grows}=1,2,4,8"
        )
    # Rules over batch and tokens count from the run's own, and the check has others.
    config = derive(config, {**applied(config), "tuning.seq_length": None})
    points = _points(config, rank, asked, regime.axis)
    small = {f"model.{key}": size for key, size in {**config.base.width.sizes, **config.base.experts}.items()}
    alike = derive(config, {**_alike(config, asked), **small})
    keys = regime.keys(alike, asked.steps)
    if keys is None and broken is None:
        raise UserError(f"{regime.what}: the config is that already")
    alike = resolve_auto(derive(alike, keys or {}))
    if regime.regrows and regime.axis == "width":
        over = max(points[-1].sizes, key=lambda key: points[-1].sizes[key] / config.base.width.sizes[key])
        ratios = [point.sizes[over] / config.base.width.sizes[over] for point in points]
        points = scaled(alike, [max(1, round(ratio)) for ratio in ratios])
    growing = broken is not None and broken.growing_tensor
    if not asked.own_batch:
        alike = derive(alike, _few_tokens(alike, rank.world_size, growing=growing))
    return keys or {}, models(alike, points, rank.world_size, regime.axis, growing_tensor=growing)


def _points(config: Config, rank: Rank, asked: Check, axis: Axis) -> list[Point]:
    """Sizes of the family, before a regime changes what grows."""
    if asked.growth and asked.factors:
        raise UserError("--growth: says how each size grows; expected no --widths")
    if asked.growth:
        return grown(config, asked.growth)
    if factors := asked.factors or (asked.control.factors if asked.control else ()):
        return scaled(config, factors, axis)
    if axis == "depth":
        return scaled(config, default_factors(config, "depth")[:3], "depth")
    return own_path(config, rank.world_size)


def _alike(config: Config, asked: Check) -> dict[str, Any]:
    """Keys with which all sizes are trained alike: nothing random or recomputed, a rate from the first step on."""
    keys: dict[str, Any] = {
        "model.hidden_dropout": 0.0,
        "model.attention_dropout": 0.0,
        "training.recompute_granularity": None,
        "training.recompute_method": None,
        "training.recompute_num_layers": None,
        "training.lr_schedule": "constant",
        "training.lr_warmup_steps": 0,
        "training.train_steps": asked.steps + 1,
        "training.eval_interval": None,
        "run.samples": [],
        "parametrization.name": "mup",
    }
    if config.training.lr_warmup_steps > asked.steps and not asked.own_batch:
        keys["hparams.lr"] = LearningRateSchedule(config.training, config.hparams.lr)(asked.steps)
    if config.optimizer.name == "sgd":
        # Clipping by the plain norm, which falls with width early on, is part of SGD's rate.
        keys["training.clip_grad"] = 0.0
    return keys


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
    asked: Check,
    say: Callable[[str], None],
) -> tuple[list[Measurement], list[Parametrization]]:
    """Every measurement, and µP's own table of every size. Sizes of one layout follow each other."""
    meeting = None if torch.distributed.is_initialized() else runtime.Meeting(rank)
    if rank.is_first:
        prepare(family[0].config, say)
    if meeting is not None:
        meeting.follow_first(rank)
    measurements: list[Measurement] = []
    tables: list[Parametrization] = []
    datasets: dict[int, Any] = {}
    started: Layout | None = None
    first = family[0].config.run.seed
    try:
        for member in family:
            if started is None or _groups(started) != _groups(member.layout):
                if started is not None:
                    parallel_state.destroy_model_parallel()
                device = runtime.start_distributed(member.layout, rank, first, meeting)
                started = member.layout
            prepared = prepare(member.config)
            tables.append(parametrize(member.config, prepared.vocab_size))
            for seed in range(first, first + asked.seeds):
                seeded = derive(member.config, {"run.seed": seed})
                if seed not in datasets:
                    datasets[seed] = build_datasets(seeded, prepared)[0]
                batch = Batches(datasets[seed], seeded, member.layout, rank.rank, device)[0]
                for each in measured:
                    config = derive(seeded, {"parametrization.name": each.name})
                    parametrization = parametrize(config, prepared.vocab_size)
                    if each.break_ is not None:
                        parametrization = each.break_(parametrization, member.layout)
                    whole = dataclasses.replace(member, config=config)
                    found = measure(whole, parametrization, rank.rank, device, batch, asked)
                    measurements.append(
                        Measurement(label=each.label, seed=seed, factor=member.factor, coordinates=found)
                    )
                    say(str(measurements[-1]))
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
