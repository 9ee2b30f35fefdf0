"""What a study's storage bears: `python -m benchmarks.journal`.

Processes that train nothing do all that a tuning worker writes and reads of its trials: claim one, report four losses,
end it (tuning/study.py), as fast as they can. One more plans trials, as the leader does. Counted are trials a second
over all processes, at 1 to 64 of them, in the journal of a run's folder; with `--storage URL` in a database too. Writes
results/journal/cpu-3.12.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.harness import RESULTS, spread, wait_for_quiet, write
from mup_megatron.config import Config, parse_config
from mup_megatron.tuning.study import Study
from mup_megatron.util.provenance import machine

_REPORTS, _PLAN_SECONDS, _START_SECONDS = 4, 0.2, 300.0
_PROCESSES, _SECONDS, _TRIALS = (1, 4, 16, 64), 30.0, 50_000


def measure(storage: str, processes: int, seconds: float) -> dict[str, Any]:
    """Trials a second of so many processes, and the seconds that each of their operations took."""
    with tempfile.TemporaryDirectory() as folder:
        config = _config(folder, f"{storage}-{processes}", storage)
        study = Study.create(config)
        context = multiprocessing.get_context("spawn")
        ready, told = context.Barrier(processes + 1), context.SimpleQueue()
        workers = [context.Process(target=_work, args=(config, ready, told, seconds)) for _ in range(processes)]
        for worker in workers:
            worker.start()
        ready.wait(_START_SECONDS)
        until = time.monotonic() + seconds
        ended = threading.Event()
        threading.Timer(seconds, ended.set).start()
        while not ended.wait(_PLAN_SECONDS):
            study.plan(study.trials())
        spent = [told.get() for _ in workers]
        late = time.monotonic() - until
        for worker in workers:
            worker.join()
        finished = sum(trial.state == "complete" for trial in study.trials())
    if finished != sum(len(each["end"]) for each in spent):
        raise RuntimeError(f"{finished} trials ended in the study, and other numbers of them in its workers")
    return {
        "processes": processes,
        "trials": finished,
        "trials_per_second": finished / (seconds + late),
        "seconds": {name: spread([value for each in spent for value in each[name]]) for name in spent[0]},
    }


def _work(config: Config, ready: Any, told: Any, seconds: float) -> None:
    """One process: trials until the time is over."""
    spent: dict[str, list[float]] = {"claim": [], "report": [], "end": []}
    study = Study(config)
    study.trials()
    ready.wait(_START_SECONDS)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        began = time.perf_counter()
        trial = study.claim()
        if trial is None:  # the leader is behind
            time.sleep(_PLAN_SECONDS)
            continue
        spent["claim"].append(time.perf_counter() - began)
        for step in range(1, _REPORTS + 1):
            began = time.perf_counter()
            study.report(trial, step, 5.0 - step)
            spent["report"].append(time.perf_counter() - began)
        began = time.perf_counter()
        study.finish(trial, "complete", loss=1.0, seconds=1.0)
        spent["end"].append(time.perf_counter() - began)
    told.put(spent)


def _config(folder: str, name: str, storage: str) -> Config:
    sizes = {"hidden_size": 32, "num_attention_heads": 2}
    return parse_config(
        {
            "run": {"name": name, "dir": folder},
            "model": {"architecture": "gpt3", "num_layers": 2, **sizes},
            "base": sizes,
            "hparams": {"lr": 1e-3},
            "training": {"global_batch_size": 8, "micro_batch_size": 8, "seq_length": 64, "train_steps": 100},
            "data": {"corpus": "stdlib", "tokenizer": {"vocab_size": 512}},
            "tuning": {
                "trials": _TRIALS,
                "sampler": "random",
                "pruner": "none",
                "storage": storage,
                "search": {"lr": {"log_uniform": [1e-4, 1e-2]}, "init_method_std": {"log_uniform": [0.01, 0.1]}},
            },
        }
    )


def compare(storages: Sequence[str], processes: Sequence[int], seconds: float) -> list[dict[str, Any]]:
    """Every storage at every number of processes; a database is named by its kind alone."""
    found = []
    for storage in storages:
        for number in processes:
            row = {"storage": storage.partition(":")[0], **measure(storage, number, seconds)}
            print(f"{row['storage']}, {number} processes: {row['trials_per_second']:.1f} trials a second", flush=True)
            found.append(row)
    return found


def said() -> str:
    """What docs/scaling.md tells of the journal: how many trials a second it bears, and how many workers need that."""
    rows = json.loads((RESULTS / "journal" / "cpu-3.12.json").read_text(encoding="utf-8"))["rows"]
    told = ", ".join(f"{row['processes']} ended {row['trials_per_second']:.0f}" for row in rows)
    most, workers, minutes = rows[-1], 1000, 10
    needed = workers / (60 * minutes)
    enough = "is enough" if most["trials_per_second"] > needed else "is not enough"
    return (
        "Processes that train nothing did all that a worker writes and reads of a trial, as fast as they could, on two "
        f"cores: {told} trials a second. The longest wait of {most['processes']} for a trial was "
        f"{most['seconds']['claim']['max']:.0f} s. {workers:,} workers whose trials take {minutes} minutes end "
        f"{needed:.1f} a second, for which a journal {enough}."
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.journal")
    parser.add_argument("--storage", action="append", default=[], metavar="URL", help="A database, besides.")
    parser.add_argument("--seconds", type=float, default=_SECONDS, help="Of each measurement.")
    asked, busy = parser.parse_args(), wait_for_quiet()
    rows = compare(["journal", *asked.storage], _PROCESSES, asked.seconds)
    result: dict[str, Any] = {"machine": machine(), "busy_before": busy, "reports_per_trial": _REPORTS, "rows": rows}
    print(write(result, RESULTS / "journal"))


if __name__ == "__main__":
    main()
