"""How many trials an hour one device runs, by how many at a time: `python -m benchmarks.trials CONFIG`.

The trials are those of the config's search (its proxy, its steps), all with the config's values, in processes that live
on from trial to trial, as a tuning worker's do. Of each number at a time, every process runs a first trial, which is
not counted, and then as many as are asked for. Writes trials.json into the folder that is asked for.

A server of CUDA's Multi-Process Service is used where one runs; `--label` is where the result says so.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.harness import spread
from mup_megatron.config import Config, load_config, parse_overrides
from mup_megatron.data.prepare import prepare
from mup_megatron.engines.setup import resolve
from mup_megatron.parallel import upstream
from mup_megatron.parallel.ranks import Rank
from mup_megatron.tuning.process import RunProcess
from mup_megatron.tuning.space import proxy_config, tuning_steps
from mup_megatron.util.files import write_whole
from mup_megatron.util.provenance import provenance


def measure(config: Config, at_once: int, trials: int, folder: Path) -> dict[str, Any]:
    """Trials an hour of so many processes, from the first one's end until the last one's.

    Args:
        config: of the target; `tuning:` says what a trial is.
        at_once: processes.
        trials: of each process, behind its first.
        folder: for their files; empty.

    Raises:
        RuntimeError: a trial did not come to its end.
    """
    ready, seconds, losses, wrong = threading.Barrier(at_once + 1), [], [], []

    def run(number: int) -> None:
        process = RunProcess(Rank(rank=number, local_rank=number, world_size=at_once), folder / f"{number}.log")
        try:
            for trial in range(trials + 1):
                where, began = folder / f"{number}-{trial}", time.monotonic()
                process.start(proxy_config(config, {}, seed=1, directory=where, cache=folder / f"cache-{number}"))
                while (end := process.listen(1.0, config.tuning.hang_timeout)) is None:
                    pass
                if end.loss is None:
                    raise RuntimeError(f"trial {number}-{trial}: {end.state}: {end.reason}")
                if trial == 0:
                    with suppress(threading.BrokenBarrierError):
                        ready.wait()
                else:
                    seconds.append(time.monotonic() - began)
                    losses.append(end.loss)
        except RuntimeError as error:
            wrong.append(error)
            ready.abort()
        finally:
            process.stop()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(at_once)]
    for thread in threads:
        thread.start()
    with suppress(threading.BrokenBarrierError):  # a trial failed; said below
        ready.wait()
    began = time.monotonic()
    for thread in threads:
        thread.join()
    passed = time.monotonic() - began
    if wrong:
        raise wrong[0]
    return {
        "at_once": at_once,
        "trials": len(seconds),
        "trials_per_hour": 3600 * len(seconds) / passed,
        "seconds_of_a_trial": spread(seconds),
        "steps_per_second_of_one": tuning_steps(config) / statistics.median(seconds),
        "losses": sorted(set(losses)),
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="KEY.PATH=VALUE")
    parser.add_argument("--at-once", default="1,2", help="processes at a time, each number in turn")
    parser.add_argument("--trials", type=int, default=2, help="of each process, behind its first")
    parser.add_argument("--label", default="", help="what is particular about this machine")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_intermixed_args()
    upstream.prepare_process()
    config = resolve(load_config(asked.config, parse_overrides(asked.overrides)), 1).config
    prepared = prepare(config, print)
    rows: list[dict[str, Any]] = []
    result = {
        "label": asked.label,
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "rows": rows,
        "config": config.model_dump(mode="json"),
        "provenance": provenance(prepared.digest),
    }
    asked.out.mkdir(parents=True, exist_ok=True)
    for number in [int(each) for each in asked.at_once.split(",")]:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(config, number, asked.trials, Path(folder)))
        print(f"{number} at a time: {rows[-1]['trials_per_hour']:.0f} trials an hour", flush=True)
        write_whole(asked.out / "trials.json", json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
