"""µP from a tuned proxy against the standard parametrization tuned at the target: `python -m benchmarks.direct CONFIG`.

"µP transfers but loses" is what its users report. So the target is searched directly, in the standard parametrization,
and the proxy is searched, both over the same random draws of `tuning.search`. Each repetition has draws and a seed of
its own. The best of the proxy's first draws then trains the target in µP, once for each budget. Compared is the
target's loss by the number of draws, with what they cost in runs of the target. What is done is kept, and the same
command goes on. Writes direct.json.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mup_megatron.config import Config, derive, load_config, parse_overrides
from mup_megatron.data.prepare import known_vocab_size
from mup_megatron.data.record import tokens_digest
from mup_megatron.model.build import parametrize
from mup_megatron.parallel import upstream
from mup_megatron.parallel.ranks import Rank
from mup_megatron.proof.family import members
from mup_megatron.proof.grid import Grid, Job, comparable, ended
from mup_megatron.tuning.budget import flops_per_token
from mup_megatron.tuning.space import keys_of
from mup_megatron.util.provenance import provenance

BUDGETS = (1, 4, 16)
"""Draws of a search."""


def draws_of(config: Config, number: int, seed: int) -> list[dict[str, float]]:
    """Random points of the config's search space, log-uniform.

    Args:
        config: the run; `tuning.search` has log-uniform ranges alone.
        number: of points.
        seed: which points.
    """
    drawn, space = random.Random(seed), config.tuning.search  # noqa: S311  (no secret is drawn)
    ranges = {name: dimension.log_uniform for name, dimension in space.items() if dimension.log_uniform}
    if len(ranges) < len(space):
        raise config.error("tuning.search", "has a dimension that is not log_uniform; expected log_uniform alone")
    return [
        {name: math.exp(drawn.uniform(math.log(low), math.log(high))) for name, (low, high) in ranges.items()}
        for _ in range(number)
    ]


def measure(config: Config, factor: int, baseline: str, repetitions: int, grid: Grid) -> dict[str, Any]:
    """Trains what is missing: all draws, then the target with what was chosen; returns what is written as JSON."""
    upstream.prepare_process()
    proxy, target = (comparable(member.config) for member in members(config, [1, factor], 1))
    grid.prepare([proxy, target])
    drawn = [draws_of(config, max(BUDGETS), seed=number) for number in range(repetitions)]
    ways = {"proxy": (proxy, {}), baseline: (target, {"parametrization.name": baseline})}

    def job(name: str, number: int, draw: int, made: Config, keys: Mapping[str, Any]) -> Job:
        own = {**keys_of(drawn[number][draw]), "run.seed": config.run.seed + number, **keys}
        return Job(name=f"{name}-{number}-{draw}", config=derive(made, own))

    places = [(number, draw) for number in range(repetitions) for draw in range(max(BUDGETS))]
    outcomes = grid.run([job(name, *place, *way) for place in places for name, way in ways.items()])
    losses = {
        name: [
            [outcomes[f"{name}-{number}-{draw}"].loss for draw in range(max(BUDGETS))] for number in range(repetitions)
        ]
        for name in ways
    }
    chosen = [[min(range(budget), key=each.__getitem__) for budget in BUDGETS] for each in losses["proxy"]]
    distinct = [(number, draw) for number, each in enumerate(chosen) for draw in sorted(set(each))]
    outcomes |= grid.run([job("mup", *place, target, {}) for place in distinct])
    found = [
        {
            "draws": drawn[number],
            "proxy": _finite(losses["proxy"][number]),
            "direct": _finite(losses[baseline][number]),
            "chosen": chosen[number],
            "transferred": _finite([outcomes[f"mup-{number}-{draw}"].loss for draw in chosen[number]]),
        }
        for number in range(repetitions)
    ]
    cost = [flops_per_token(parametrize(made, known_vocab_size(made))) for made in (proxy, target)]
    return {
        "baseline": baseline,
        "sizes": [proxy.model.hidden_size, target.model.hidden_size],
        "budgets": list(BUDGETS),
        "cost_of_a_proxy_run": cost[0] / cost[1],
        "seeds": repetitions,
        "repetitions": found,
        **ended(outcomes),
        "config": config.model_dump(mode="json"),
        "provenance": provenance(tokens_digest(config)),
    }


def _finite(losses: Sequence[float]) -> list[float | None]:
    return [loss if math.isfinite(loss) else None for loss in losses]


def _known(losses: Sequence[float | None]) -> list[float]:
    """Losses, where what diverged is infinite."""
    return [math.inf if loss is None else loss for loss in losses]


def compared(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """For each budget: what both ways cost in runs of the target, and the target's losses, one of each repetition."""
    rows = []
    for place, budget in enumerate(result["budgets"]):
        direct = [min(_known(each["direct"][:budget])) for each in result["repetitions"]]
        mup = _known([each["transferred"][place] for each in result["repetitions"]])
        rows.append(
            {
                "draws": budget,
                "direct": direct,
                "mup": mup,
                "direct_cost": float(budget),
                "mup_cost": 1 + budget * result["cost_of_a_proxy_run"],
                "difference": statistics.fmean(a - b for a, b in zip(mup, direct, strict=True)),
            }
        )
    return rows


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="KEY.PATH=VALUE")
    parser.add_argument("--factor", type=int, default=4, help="the target's width over the base's")
    parser.add_argument("--baseline", default="standard", help="parametrization of the direct search")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("runs/direct"))
    asked = parser.parse_intermixed_args()
    config = load_config(asked.config, parse_overrides(asked.overrides))
    grid = Grid(directory=asked.output, rank=Rank(), workers=asked.workers, say=lambda line: print(line, flush=True))
    result = measure(config, asked.factor, asked.baseline, asked.repetitions, grid)
    for row in compared(result):
        print(f"{row['draws']} draws: µP - {asked.baseline} {row['difference']:+.4f} nats, cost {row['mup_cost']:.2f}")
    print(grid.write("direct.json", result))


if __name__ == "__main__":
    main()
