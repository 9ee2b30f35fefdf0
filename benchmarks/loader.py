"""What reading a run's batches costs, from the page cache and from the disk: `python -m benchmarks.loader`.

`Batches` reads indexed datasets of megatron-core in the shuffled order of a run. One dataset was read whole before, and
stays in the page cache. The pages of the other are dropped before every batch, so that each sample is read from the
disk: what a file larger than memory costs, without such a file. Both are read as this project reads
(data/exact_reads.py) and through megatron-core's memory map; each way has files of its own, since mapped pages are not
dropped. Beside them stands an optimizer step on as many tokens, of the model of `benchmarks.contenders`. All take
turns. Writes results/loader/3.12.json.
"""

from __future__ import annotations

import argparse
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder, _MMapBinReader

from benchmarks import contenders
from benchmarks.harness import in_turn, ratios, spread, wait_for_quiet, write_apart
from mup_megatron.config import Config, derive
from mup_megatron.data.batches import Batches, build_datasets
from mup_megatron.data.prepare import prepare
from mup_megatron.parallel import runtime
from mup_megatron.util.provenance import machine

_VOCABULARY, _DOCUMENT, _TARGET = 32000, 1000, 0.01
_TOKENS, _RUNS, _WARMUP = 2**28, 60, 3


def measure(tokens: int, runs: int, *, tiny: bool = False) -> dict[str, Any]:
    """Seconds of a batch from the cache and from the disk, and of a step on as many tokens."""
    bench = contenders.start(_VOCABULARY, tiny=tiny)
    kinds = ("cache", "disk", "cache, mapped", "disk, mapped")
    seconds: dict[str, list[float]] = {name: [] for name in (*kinds, "step")}
    read: dict[str, list[int]] = {name: [] for name in kinds if name.startswith("disk")}
    with tempfile.TemporaryDirectory() as folder:
        loaders, drops = {}, {}
        for name in kinds:
            prefix = Path(folder) / name.replace(", ", "-")
            _write_dataset(prefix, tokens)
            config = _config(bench, prefix, _WARMUP + runs)
            train, _ = build_datasets(config, prepare(config))
            if name.endswith("mapped"):
                train.dataset.bin_reader = _MMapBinReader(str(prefix.with_suffix(".bin")))
            loaders[name] = Batches(train, config, bench.layout, 0, bench.device)
            if name in read:
                drops[name] = _dropper(train, prefix.with_suffix(".bin"))
            else:
                with open(prefix.with_suffix(".bin"), "rb") as whole:
                    while whole.read(2**24):
                        pass
        step = contenders.build("ours", bench).step
        for number in range(_WARMUP + runs):
            for name in in_turn(list(seconds), number):
                if name in drops:
                    drops[name]()
                before, began = _bytes_read(), time.perf_counter()
                if name == "step":
                    step()
                else:
                    loaders[name][number]
                if number >= _WARMUP:
                    seconds[name].append(time.perf_counter() - began)
                    if name in read:
                        read[name].append(_bytes_read() - before)
    runtime.stop_distributed()
    batch = bench.batch.tokens.numel()
    over = {name: ratios(seconds, name, "step") for name in kinds}
    return {
        **bench.describe(),
        "dataset_tokens": tokens,
        "batch_tokens": batch,
        "seconds": {name: spread(values) for name, values in seconds.items()},
        "tokens_per_second": {name: spread([batch / each for each in seconds[name]]) for name in kinds},
        "disk_bytes_per_batch": {name: spread([float(each) for each in counts]) for name, counts in read.items()},
        "over_step": over,
        "target_met": {name: each["high"] <= _TARGET for name, each in over.items()},
    }


def _write_dataset(prefix: Path, tokens: int) -> None:
    """Random documents of equal length, two bytes a token."""
    generator = np.random.default_rng(1)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(_VOCABULARY))
    for _ in range(tokens // _DOCUMENT):
        document = generator.integers(_VOCABULARY, size=_DOCUMENT, dtype=np.int32)
        builder.add_document(torch.from_numpy(document), [_DOCUMENT])
    builder.finalize(f"{prefix}.idx")


def _config(bench: contenders.Bench, prefix: Path, batches: int) -> Config:
    data = {
        "data_path": [str(prefix)],
        "tokenizer": {"library": "null", "vocab_size": _VOCABULARY},
        "split": "100,0,0",
        "dir": str(prefix.parent / f"{prefix.name}-data"),
    }
    keys = {"data": data, "training.train_steps": batches, "training.eval_interval": None}
    return derive(bench.config, {**keys, "run.dir": str(prefix.parent)})


def _dropper(dataset: Any, path: Path) -> Callable[[], None]:
    """What drops a file's pages, first from this process's map, then from the cache (madvise(2), posix_fadvise(2))."""
    reader = dataset.dataset.bin_reader
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)

    def drop() -> None:
        if isinstance(reader, _MMapBinReader):
            reader._bin_buffer_mmap._mmap.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)

    return drop


def _bytes_read() -> int:
    """What this process has had read from a disk so far (proc(5), /proc/self/io)."""
    lines = Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loader")
    parser.add_argument("--runs", type=int, default=_RUNS, help="Batches of each kind.")
    runs, busy = parser.parse_args().runs, wait_for_quiet()
    result = {"machine": machine(), "target": _TARGET, "busy_before": busy, **measure(_TOKENS, runs)}
    print(write_apart(result, "loader"))


if __name__ == "__main__":
    main()
