"""Datasets read from open files: the bytes of megatron-core's memory map, and a file that ends early is named."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

from mup_megatron.config import Config
from mup_megatron.data.batches import build_datasets
from mup_megatron.data.exact_reads import _OpenFile, read_exactly
from mup_megatron.data.prepare import prepare
from mup_megatron.parallel import runtime
from mup_megatron.parallel.layout import resolve_layout
from mup_megatron.parallel.ranks import Rank
from mup_megatron.util.errors import UserError
from tests.helpers.configs import MIXED, make
from tests.helpers.distributed import Ranks

LENGTHS = (1, 700, 33, 5000)


@pytest.fixture(params=[200, 100_000], ids=["two bytes a token", "four"])
def prefix(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    generator = np.random.default_rng(3)
    builder = IndexedDatasetBuilder(str(tmp_path / "some.bin"), dtype=DType.optimal_dtype(request.param))
    for length in LENGTHS:
        builder.add_document(torch.from_numpy(generator.integers(request.param, size=length)), [length])
    builder.finalize(str(tmp_path / "some.idx"))
    return str(tmp_path / "some")


def opened(prefix: str) -> IndexedDataset:
    dataset = IndexedDataset(prefix, mmap=False)
    read_exactly(SimpleNamespace(dataset=dataset))
    assert isinstance(dataset.bin_reader, _OpenFile)
    return dataset


def test_it_reads_what_the_map_reads(prefix: str) -> None:
    mapped, ours = IndexedDataset(prefix, mmap=True), opened(prefix)
    for document, length in enumerate(LENGTHS):
        assert np.array_equal(ours[document], mapped[document])
        assert ours[document].dtype == mapped[document].dtype
        for offset, count in ((0, 1), (length // 2, length - length // 2), (length - 1, 1), (length // 3, 0)):
            assert np.array_equal(ours.get(document, offset, count), mapped.get(document, offset, count))


def test_a_read_in_parts(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system may read less than it is asked for; then what is left follows."""
    mapped, system = IndexedDataset(prefix, mmap=True), os.preadv  # its arrays are gone where it is
    monkeypatch.setattr(os, "preadv", lambda file, into, offset: system(file, [into[0][:7]], offset))
    assert np.array_equal(opened(prefix)[3], mapped[3])


def test_a_file_that_ends_early_is_named(prefix: str) -> None:
    """A memory map ends the process with a signal there."""
    ours, path = opened(prefix), Path(f"{prefix}.bin")
    before = ours[0]
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size // 2)
    assert np.array_equal(ours[0], before)
    with pytest.raises(UserError, match=r"some\.bin: ends at byte \d+, before a sample does"):
        ours[3]


def readers(rank: Rank, *, config: Config) -> tuple[list[str], bool]:
    """Classes of what reads each part of a run, and whether a file of tokens is mapped."""
    runtime.start_distributed(resolve_layout(config, rank.world_size), rank, config.run.seed)
    parts = build_datasets(config, prepare(config))
    stored = [each.dataset for part in parts for each in getattr(part, "datasets", [part])]
    return [type(each.bin_reader).__name__ for each in stored], ".bin" in Path("/proc/self/maps").read_text()


def test_every_part_of_a_run_is_read_so(ranks: Ranks, tmp_path: Path) -> None:
    """Of one dataset and of a blend of two, training and validation text; and nothing of it is mapped."""
    keys: dict[str, Any] = {"training__eval_interval": 5, "data__split": "60,40,0"}
    settings = make(MIXED, "gpt3", data__dir=str(tmp_path / "data"), **keys)
    assert ranks.run(1, readers, config=settings) == [(["_OpenFile"] * 2, False)]
    written = prepare(settings).blend[0][0]
    keys |= {"data__files": [], "data__tokenizer": {"library": "null", "vocab_size": 400}}
    parts = [0.3, written, 0.7, written]
    blend = make(MIXED, "gpt3", data__dir=str(tmp_path / "blend"), data__data_path=parts, **keys)
    assert ranks.run(1, readers, config=blend) == [(["_OpenFile"] * 4, False)]


def test_the_page_tells_what_it_costs(repository: Path) -> None:
    """docs/layouts.md, from the benchmark's results."""
    page = " ".join((repository / "docs/layouts.md").read_text().split())
    found = json.loads((repository / "benchmarks/results/loader/3.12.json").read_text())
    ms = {name: f"{1e3 * each['median']:.1f} ms" for name, each in found["seconds"].items()}
    read = {name: each["median"] for name, each in found["disk_bytes_per_batch"].items()}
    assert (
        f"A batch of {found['batch_tokens']:,} tokens takes {ms['cache']} from the page cache and {ms['disk']} from "
        f"the disk ({read['disk'] / 1e3:.0f} kB of it); through megatron-core's memory map {ms['cache, mapped']} and "
        f"{ms['disk, mapped']} ({read['disk, mapped'] / 1e6:.0f} MB), a step {ms['step']}"
    ) in page
