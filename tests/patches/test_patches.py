"""Patches: effects at the consumer, versions, signatures, twice is once, undo restores."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo

from mup_megatron import megatron_training, patches
from mup_megatron.megatron_training import watched, watched_coordinates
from mup_megatron.parallel import runtime
from mup_megatron.parallel.ranks import Rank
from mup_megatron.patches import ALL_PATCHES, Patch, PatchError, active_patches, apply_patches, revert_patches
from mup_megatron.patches.cpu import for_cpu
from mup_megatron.patches.megatron_training import TRAINING_PATCHES, entry_patches, watch_patches
from tests.helpers import patch_tables
from tests.helpers.breakages import break_
from tests.helpers.commands import run
from tests.helpers.distributed import Ranks
from tests.helpers.installed import HAS_TRAINING, NO_TRAINING

BY_NAME = {patch.name: patch for patch in ALL_PATCHES}
RUN_PATCHES = (*TRAINING_PATCHES, *entry_patches(megatron_training), *watch_patches(watched, watched_coordinates))
NEEDED = {name: patch for name, patch in BY_NAME.items() if patch.is_needed(cuda=False)}


@pytest.fixture(autouse=True)
def _unpatched() -> Iterator[None]:
    """Also without those of `mup-megatron run`, which other tests of this process apply when they read its options."""
    every_patch = (*ALL_PATCHES, *RUN_PATCHES)
    revert_patches(every_patch)
    yield
    revert_patches(every_patch)


def fork_draws(rank: Rank, broken: str = "nothing") -> dict[str, Any]:
    """What dropout on a CPU sees inside and outside megatron-core's RNG fork."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    from mup_megatron.parallel.layout import resolve_layout
    from tests.helpers.configs import MIXED, make

    config = make(MIXED, parallel__tensor_model_parallel_size=2)
    with break_(broken):
        runtime.start_distributed(resolve_layout(config, rank.world_size), rank, seed=5)
        before = torch.get_rng_state()
        inside = []
        for _ in range(2):
            with get_cuda_rng_tracker().fork():
                inside.append(torch.rand(4).tolist())
        return {"inside": inside, "restored": torch.equal(torch.get_rng_state(), before)}


def test_rng_fork_on_a_cpu(ranks: Ranks) -> None:
    """Inside the fork each tensor-parallel rank draws its own numbers, which go on; outside nothing moved."""
    first, second = ranks.run(2, fork_draws)
    assert first["restored"]
    assert second["restored"]
    assert first["inside"][0] != first["inside"][1]
    assert first["inside"] != second["inside"]


def test_rng_fork_without_the_patch(ranks: Ranks) -> None:
    """Negative control: without cpu-set-rng-state the fork never takes effect."""
    first, second = ranks.run(2, fork_draws, broken="patch:cpu-set-rng-state")
    assert not first["restored"] or first["inside"] == second["inside"]


def test_current_device_at_the_consumer() -> None:
    from megatron.core.utils import GlobalMemoryBuffer

    if torch.cuda.is_available():
        pytest.skip("a CUDA device is there")
    with pytest.raises((RuntimeError, AssertionError)):
        GlobalMemoryBuffer().get_tensor((2,), torch.float32, "x")
    BY_NAME["cpu-current-device"].apply()
    assert GlobalMemoryBuffer().get_tensor((2,), torch.float32, "x").device.type == "cpu"


def test_no_shm_build_at_the_consumer() -> None:
    BY_NAME["deepspeed-no-shm-build"].apply()
    assert importlib.import_module("deepspeed.comm.torch").build_shm_op() is None


def in_a_new_process(code: str) -> str:
    result = run(sys.executable, "-c", code)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.slow
def test_megatron_core_is_imported_without_the_compiler() -> None:
    """The patch spares every process the import of torch's compiler; without it megatron-core imports it."""
    ends = "import megatron.core.models.gpt.gpt_model, sys; print('torch._inductor.compile_fx' in sys.modules)"
    prepared = "from mup_megatron.parallel import upstream; upstream.prepare_process(); import mup_megatron.train.run;"
    assert in_a_new_process(prepared + ends) == "False"
    assert in_a_new_process(ends) == "True"


@torch._dynamo.config.patch(disable=False)  # which the quick suite sets
def test_compiled_at_the_first_call() -> None:
    """Once, with its options, and as part of a compiled function that calls it; a module is compiled at once."""
    BY_NAME["cpu-compile-at-first-call"].apply()
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        compiled.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return graph.forward

    @torch.compile(backend=backend)
    def double(x: torch.Tensor) -> torch.Tensor:
        """Twice."""
        return x * 2

    def twice(x: torch.Tensor) -> torch.Tensor:
        return double(double(x)) + 1

    outer = torch.compile(twice, backend=backend, fullgraph=True)
    assert (double.__name__, double.__doc__) == ("double", "Twice.")
    assert compiled == []
    assert double(torch.ones(2)).tolist() == [2, 2]
    assert double(torch.ones(2)).tolist() == [2, 2]
    assert compiled == [1]
    assert outer(torch.ones(2)).tolist() == [5, 5]
    assert compiled == [1, 3]  # both products and the sum in one graph
    assert isinstance(torch.compile(torch.nn.Identity()), torch._dynamo.OptimizedModule)


def originals() -> dict[str, Any]:
    return {name: patch._target()[2] for name, patch in NEEDED.items()}


def test_twice_is_once_and_undo_restores() -> None:
    before = originals()
    apply_patches(ALL_PATCHES, cuda=False)
    once = originals()
    apply_patches(ALL_PATCHES, cuda=False)
    assert originals() == once
    assert all(once[name] is not before[name] for name in before)
    assert sorted(active_patches()) == sorted(before)
    revert_patches(ALL_PATCHES)
    assert all(original is before[name] for name, original in originals().items())
    assert active_patches() == []


def test_those_of_run_twice_and_undone() -> None:
    """Also where a class has its method from another: undoing leaves it inherited."""
    if not HAS_TRAINING:
        pytest.skip(NO_TRAINING)
    needed = [patch for patch in RUN_PATCHES if patch.is_needed(cuda=False)]
    before = [patch._target()[2] for patch in needed]
    for _ in range(2):
        apply_patches(RUN_PATCHES, cuda=False)
        once = [patch._target()[2] for patch in needed]
        assert all(now is not original for now, original in zip(once, before, strict=True))
    assert torch.ones(2).cuda(non_blocking=True).device.type == "cpu"
    revert_patches(RUN_PATCHES)
    assert all(patch._target()[2] is original for patch, original in zip(needed, before, strict=True))
    assert "cuda" not in vars(torch.Tensor)


def test_none_of_these_is_applied_where_cuda_is() -> None:
    apply_patches(ALL_PATCHES, cuda=True)
    assert active_patches() == [patch.name for patch in ALL_PATCHES if patch.is_needed(cuda=True)]
    assert set(active_patches()) <= {patch.name for patch in ALL_PATCHES if patch.when == "always"}


def test_a_function_said_for_the_cpu() -> None:
    """Literals, nested functions, names and class methods; one that names no CUDA is an error."""

    class Holder:
        @classmethod
        def kind(cls) -> str:
            return "torch.cuda.FloatTensor"

    def body(x: Any, *, size: int = 2) -> Any:
        def inner() -> Any:
            return torch.zeros(size, device="cuda")

        torch.cuda.synchronize()
        return x.cuda() + inner()

    assert for_cpu(body)(torch.ones(3), size=3).tolist() == [1, 1, 1]
    assert for_cpu(vars(Holder)["kind"]).__get__(None, Holder)() == "torch.FloatTensor"
    with pytest.raises(PatchError, match="does not name CUDA any more"):
        for_cpu(altered)


def test_a_version_without_the_defect_is_left_alone() -> None:
    for needed, applied in ((">=0.16.1", True), ("<0.16", False)):
        patch = altered(needed=needed)
        apply_patches([patch], cuda=False)
        assert (patch.name in active_patches()) is applied
        patch.revert()


def altered(**changes: Any) -> Patch:
    return dataclasses.replace(BY_NAME["cpu-get-rng-state"], **changes)


def test_another_version_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The local part, a commit where the wheel lies in somebody's git repository, is no part of the version."""
    version = importlib.metadata.version("megatron-core")
    monkeypatch.setattr("megatron.core.package_info.__version__", f"{version}+0123abc")
    with pytest.raises(PatchError, match=rf"written for megatron-core <0\.1, but {version} is installed; install"):
        altered(versions="<0.1").apply()
    exact = altered(versions=f"<={version}")
    exact.apply()
    exact.revert()


def test_a_moved_symbol_is_an_error() -> None:
    with pytest.raises(PatchError, match="it has moved"):
        altered(symbol="megatron.core.tensor_parallel.random:_no_such_name").apply()


def test_a_changed_signature_is_an_error() -> None:
    with pytest.raises(PatchError, match=r"takes \('device', 'clone', 'graph_safe'\), but the patch was written for"):
        altered(parameters=("device",)).apply()


def test_failing_patches_change_nothing() -> None:
    before = originals()
    for bad in (altered(versions="<0.1"), altered(parameters=())):
        with pytest.raises(PatchError):
            bad.apply()
    assert originals() == before


def test_every_record_says_why() -> None:
    everywhere = (*ALL_PATCHES, *RUN_PATCHES)
    assert len({patch.name for patch in everywhere}) == len(everywhere)
    for patch in everywhere:
        for text in (patch.why, patch.lower_rung, patch.until):
            assert len(text) > 5, patch.name


def test_the_page_is_made_from_the_records() -> None:
    text = patch_tables.PAGE.read_text(encoding="utf-8")
    assert patch_tables.page(text) == text, "run python -m tests.helpers.patch_tables"
    assert re.findall(r"<!-- made: (\w+) -->", text) == list(patch_tables.TABLES)
    for patch in (*ALL_PATCHES, *RUN_PATCHES):
        assert text.count(f"| `{patch.name}` | `{patch.symbol}` |") == 1
    assert patches.__doc__
