"""How the best rate, or decay, moves with batch and tokens on a family of one's own: measured, fitted, put to a test.

Public names: `ladder`. Every rung (rungs.py) is a batch, a number of tokens and a width, trained with several rates and
seeds; later seeds train only rates near the minimum (halving.py). Through all rungs but the largest go two laws, of
the best rate and of the loss, with standard errors (laws.py). The largest rung, which neither law has seen, says
whether they hold (ladder_verdict.py). Runs are one process each (grid.py).
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mup_megatron.config import Config, derive
from mup_megatron.data.parts import times_read
from mup_megatron.data.record import Prepared, tokens_digest
from mup_megatron.model.build import parametrize
from mup_megatron.parallel import upstream
from mup_megatron.proof.grid import Grid, Job, Outcome, ended
from mup_megatron.proof.halving import Wanted, wanted
from mup_megatron.proof.ladder_verdict import laws
from mup_megatron.proof.optimum import Curve
from mup_megatron.proof.rungs import Ladder, Over, Rung, cost, rungs
from mup_megatron.telemetry.band import Band, of_widths
from mup_megatron.tuning.fitted import facts
from mup_megatron.tuning.loss_law import AXES
from mup_megatron.tuning.proxy_band import band_of_runs
from mup_megatron.tuning.space import keys_of, most, with_values
from mup_megatron.util.errors import UserError
from mup_megatron.util.files import as_json
from mup_megatron.util.provenance import provenance


def ladder(config: Config, asked: Ladder, grid: Grid) -> dict[str, Any]:
    """Trains the rungs, or what is missing of them, and fits.

    Args:
        config: the run; a rule over batch or tokens that it has is left out.
        asked: the rungs.
        grid: where runs are trained.

    Returns:
        What is written as JSON.

    Raises:
        UserError: a rung makes no config, or a rung has no finite loss.
        Stopped: SIGTERM; the same command goes on.
    """
    upstream.prepare_process()
    if config.tuning.command:
        raise UserError("ladder: trains by this project's engines; expected a config, not --megatron")
    made = rungs(config, asked, grid.say)
    texts = dict(zip(made, grid.prepare(made.values()), strict=True))
    for (rung, each), prepared in zip(made.items(), texts.values(), strict=True):
        if (times := times_read(each, prepared.blend[0])) > 1:
            grid.say(f"warning: {rung.name} reads its text {times:.3g} times; the laws are then of repeated text")
    runs = _Runs(asked.over, asked.values, range(config.run.seed, config.run.seed + asked.seeds))
    grid.say(cost(asked, made))
    while jobs := runs.missing(made):
        grid.say(f"{len(jobs)} runs on {len(made)} rungs, {grid.workers} at a time")
        runs.outcomes |= grid.run(jobs)
    for line in (dropped := runs.dropped(made)):
        grid.say(f"dropped, too far from the minimum: {line}")
    if grid.rank.is_first and (band := runs.band(made, texts, grid.directory / "runs")) is not None:
        path = grid.directory / f"{asked.name}.band.json"
        band.write(path)
        grid.say(f"band: {path}, of hidden sizes {', '.join(map(str, band.widths))}; watch.band={path} takes it")
    result = {
        **laws({rung: runs.curve(rung) for rung in made}, asked.over),
        "seeds": asked.seeds,
        "steps": {rung.name: each.training.train_steps for rung, each in made.items()},
        "dropped": dropped,
        **ended(runs.outcomes),
        "config": config.model_dump(),
        "provenance": provenance(tokens_digest(config)),
        **facts(config, list(made.values()), {name: getattr(next(iter(made)), name) for name in AXES}),
    }
    found: dict[str, Any] = as_json(result)
    return found


class _Runs:
    """The runs of every rung, and what is known of them.

    Args:
        over: the hyperparameter.
        values: of it, to begin with.
        seeds: of the repetitions.
    """

    def __init__(self, over: Over, values: Sequence[float], seeds: Sequence[int]) -> None:
        self._over, self._values, self._seeds = over, values, seeds
        self.outcomes: dict[str, Outcome] = {}
        self._known: dict[Rung, dict[tuple[float, int], str]] = {}

    def missing(self, made: dict[Rung, Config]) -> list[Job]:
        """What every rung wants next, those of the first seed first."""
        jobs = []
        for rung, config in made.items():
            for value, seed in self._wanted(rung).runs:
                name = f"{rung.name}-{self._over}-{value:.6g}-seed-{seed}"
                self._known.setdefault(rung, {})[value, seed] = name
                keys = {**keys_of({self._over: value}), "run.seed": seed}
                jobs.append((seed, Job(name=name, config=derive(config, keys), weight=_weight(config))))
        return [job for _, job in sorted(jobs, key=lambda each: each[0])]

    def curve(self, rung: Rung) -> Curve:
        """Of the rates that have every seed."""
        losses = self._losses(rung)
        values = [value for value in self._wanted(rung).values if self._seeds_of(rung, value) == len(self._seeds)]
        return Curve(values=values, losses=[{seed: losses[value, seed] for seed in self._seeds} for value in values])

    def dropped(self, made: dict[Rung, Config]) -> list[str]:
        """Rates that were not trained with every seed, in words, a line per rung."""
        lines, all_of_them = [], len(self._seeds)
        for rung in made:
            few = {value: self._seeds_of(rung, value) for value in self._wanted(rung).values}
            left = [f"{value:.3g} ({n} of {all_of_them} seeds)" for value, n in few.items() if n < all_of_them]
            lines += [f"{rung.name}: {', '.join(left)}"] if left else []
        return lines

    def band(self, made: dict[Rung, Config], texts: dict[Rung, Prepared], folder: Path) -> Band | None:
        """Of the widest rung's best runs, with exponents from the narrower ones; None where widths are not compared.

        Args:
            made: config of each rung.
            texts: its text, whose vocabulary decides the model.
            folder: that has the runs.
        """
        largest = max(made, key=lambda rung: (rung.batch * rung.tokens, rung.layers, rung.width))
        alike = [rung for rung in made if dataclasses.replace(rung, width=largest.width) == largest]
        alike.sort(key=lambda rung: rung.width)
        bands = []
        for rung in alike if len(alike) > 1 else ():
            best = min(self._wanted(rung).values, key=lambda value: self._mean(rung, value))
            config = with_values(made[rung], {self._over: best})
            names = {run: name for run, name in self._known[rung].items() if self.outcomes[name].state == "complete"}
            bands.append(
                band_of_runs(
                    parametrize(config, texts[rung].vocab_size),
                    {name: folder / name for (value, _), name in names.items() if value == best},
                    {name: folder / name for name in names.values()},
                )
            )
        return of_widths([band for band in bands if band is not None]) if bands and None not in bands else None

    def _mean(self, rung: Rung, value: float) -> float:
        """Of all seeds; infinite for a value that has not all."""
        losses = [loss for (each, _), loss in self._losses(rung).items() if each == value]
        return statistics.mean(losses) if len(losses) == len(self._seeds) else math.inf

    def _losses(self, rung: Rung) -> dict[tuple[float, int], float]:
        return {run: self.outcomes[name].loss for run, name in self._known.get(rung, {}).items()}

    def _wanted(self, rung: Rung) -> Wanted:
        return wanted(self._values, self._seeds, self._losses(rung), most(self._over))

    def _seeds_of(self, rung: Rung, value: float) -> int:
        return sum(each == value for each, _ in self._known[rung])


def _weight(config: Config) -> float:
    """What a run costs beside others: a step costs as much as eight sequences, and its sequences."""
    return config.training.train_steps * (8.0 + config.training.global_batch_size)
