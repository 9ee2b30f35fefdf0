"""What a reading (docs/watching.md) and the audit add to a step, at two sizes: `python -m benchmarks.readings`.

Steps with one, with the other and with neither in turn, in one process; a ratio is taken pair by pair. Writes
results/readings/3.12.json.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks import contenders
from benchmarks.harness import alternate, ratios, spread, write_apart
from mup_megatron.audit.auditor import Auditor
from mup_megatron.audit.update import Rates
from mup_megatron.engines.deepspeed import DeepSpeedEngine
from mup_megatron.engines.optim import LearningRateSchedule
from mup_megatron.engines.setup import resolve
from mup_megatron.model.build import build_model, parametrize
from mup_megatron.parallel import runtime
from mup_megatron.rules.horizon import betas
from mup_megatron.telemetry.reading import Readings, usual_interval
from mup_megatron.train.auditing import door_of
from mup_megatron.util.provenance import machine

_VOCABULARY, _RUNS = 4096, 30
_LONGER = (1, 4)
"""Times the sequence of the other benchmarks."""
_LONG = 10_000


def measure(longer: int, runs: int) -> dict[str, Any]:
    """Seconds of steps with a reading and without, of a model of `benchmarks.contenders`."""
    bench = contenders.start(_VOCABULARY, longer=longer)
    setup = resolve(bench.config, 1)
    table = parametrize(setup.config, _VOCABULARY)
    engine = DeepSpeedEngine(setup, table, build_model(table, setup.layout, 0, bench.device))
    readings = Readings(engine.chunks, engine, table, setup.layout, bench.device)
    rate = LearningRateSchedule(setup.config.training, setup.config.hparams.lr)(1)

    def plain() -> None:
        engine.step([bench.batch], rate)

    door = door_of(engine)

    def audited() -> None:
        """All of its questions. Behind the first step their answers are wrong, and take as long."""
        auditor = Auditor(door, table, setup.layout, betas=betas(setup.config), decoupled=True, device=bench.device)
        auditor.ask_initial_values()
        auditor.watch_multipliers()
        auditor.begin_step(0)
        engine.step([bench.batch], rate)
        auditor.ask_multipliers()
        auditor.ask_groups()
        auditor.end_step(Rates(rate / setup.config.hparams.lr), 1)

    def read() -> None:
        readings.begin()
        engine.before_update = readings.before_update
        engine.step([bench.batch], rate)
        engine.before_update = None
        readings.after_update()
        readings.result()

    seconds = alternate({"read": read, "audited": audited, "plain": plain}, runs, warmup=3)
    engine.close()
    runtime.stop_distributed()
    of_step = ratios(seconds, "read", "plain")
    return {
        **bench.describe(),
        "seconds_per_step": {name: spread(values) for name, values in seconds.items()},
        "read_over_plain": of_step,
        "audited_over_plain": ratios(seconds, "audited", "plain"),
        "share_of_a_run": (of_step["median"] - 1) / usual_interval(_LONG),
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readings")
    parser.add_argument("--runs", type=int, default=_RUNS, help="Rounds of steps.")
    runs = parser.parse_args().runs
    result: dict[str, Any] = {
        "machine": machine(),
        "every": usual_interval(_LONG),
        "sizes": [measure(each, runs) for each in _LONGER],
    }
    print(write_apart(result, "readings"))


if __name__ == "__main__":
    main()
