"""How often the forecast of the loss (docs/watching.md) holds: `python -m benchmarks.forecast`.

Trains the demo's proxy at nine rates and with two more seeds, and targets of twice and four times the width. At shares
of each target's schedule the loss at its end is forecast from what it had done. Writes results/forecast/3.12.json. Runs
that are complete are not trained again.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch.distributed

from benchmarks.harness import write_apart
from mup_megatron.config import Config, derive, load_config
from mup_megatron.data.prepare import prepare
from mup_megatron.engines.setup import resolve
from mup_megatron.parallel import runtime
from mup_megatron.parallel.ranks import Rank
from mup_megatron.telemetry.forecast import BINS, FIRST, Forecast, LossOfProxy, bins_of
from mup_megatron.telemetry.losses import LossAlarms, LossBins
from mup_megatron.train.run import train
from mup_megatron.util.provenance import machine

_STEPS, _RATE, _SEEDS = 200, 0.006, (1235, 1236)
_RATES = [_RATE * 2 ** (octave / 2) for octave in range(-4, 5)]
_WIDTHS = {2: (1, 2, 3, 4), 4: (1, 2, 3)}
"""Seeds of targets, by how many times the proxy's width they have."""
_SHARES = [place / BINS for place in range(FIRST, BINS, 4)]


def _run(config: Config, folder: Path, **changed: Any) -> list[float]:
    """The bins of a run, which is trained unless it is complete."""
    changed = {"run.dir": str(folder), "training.train_steps": _STEPS, **changed}
    config = derive(config, {**changed, "run.telemetry_interval": 0, "run.audit": "off", "watch.action": "off"})
    path = folder / "metrics.jsonl"
    if len(bins_of(path, _STEPS).full()) < BINS:
        prepare(config)
        train(resolve(config, 1), Rank())
        runtime.stop_distributed()
        torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    return bins_of(path, _STEPS).full()


def measure(folder: Path) -> dict[str, Any]:
    """Trains what is not there, and holds every forecast against what came."""
    demo = derive(load_config("configs/demo.yaml"), {"model.num_layers": 4})  # as when the committed result was made
    proxy = derive(demo, {"model": demo.proxy_model.model_dump()})
    found = {rate: _run(proxy, folder / f"rate-{rate:.4g}", **{"hparams.lr": rate}) for rate in _RATES}
    rate = min(found, key=lambda each: sum(found[each][-2:]))
    repeats = {seed: _run(proxy, folder / f"seed-{seed}", **{"hparams.lr": rate, "run.seed": seed}) for seed in _SEEDS}
    forecast = Forecast(
        [
            *(LossOfProxy(run=f"rate {each}", chosen=each == rate, losses=losses) for each, losses in found.items()),
            *(LossOfProxy(run=f"seed {seed}", chosen=True, losses=losses) for seed, losses in repeats.items()),
        ]
    )
    rows, alarms = [], 0
    for times, seeds in _WIDTHS.items():
        heads = times * proxy.model.num_attention_heads
        wide = {
            "model.hidden_size": times * proxy.model.hidden_size,
            "model.ffn_hidden_size": times * (proxy.model.ffn_hidden_size or 0),
            "model.num_attention_heads": heads,
            "hparams.lr": rate,
        }
        for seed in seeds:
            losses = _run(demo, folder / f"wide-{times}-{seed}", **wide, **{"run.seed": seed})
            watch = LossAlarms(LossBins(BINS), forecast)
            alarms += sum(len(watch.see(step, loss)) for step, loss in enumerate(losses, start=1))
            end = sum(losses[-BINS // 20 :]) / (BINS // 20)
            for share in _SHARES:
                if (told := forecast.at_end(losses[: round(share * BINS)])) is not None:
                    of = {"times": times, "seed": seed, "share": share}
                    rows.append({**of, "end": end, "told": told.loss, "half": told.half})
    held = [abs(row["end"] - row["told"]) <= row["half"] for row in rows]
    return {
        "machine": machine(),
        "steps": _STEPS,
        "rate": rate,
        "runs_of_the_proxy": forecast.runs,
        "alarms": alarms,
        "held": sum(held),
        "of": len(held),
        "forecasts": rows,
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.forecast")
    parser.add_argument("--folder", type=Path, default=Path("runs/forecast"), help="Where runs are.")
    folder = parser.parse_args().folder
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    result = measure(folder)
    path = write_apart(result, "forecast")
    print(f"{path}: {result['held']} of {result['of']}")


if __name__ == "__main__":
    main()
