"""Which rank this is, and what `auto` means."""

from __future__ import annotations

import datetime
import os
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mup_megatron.engines.setup import resolve_auto
from mup_megatron.parallel import runtime, upstream
from mup_megatron.parallel.layout import resolve_layout
from mup_megatron.parallel.ranks import Rank, read_rank, say_error
from mup_megatron.parallel.runtime import Meeting
from mup_megatron.util.errors import ConfigError, Held, UserError
from tests.helpers.configs import MIXED, make
from tests.helpers.distributed import Ranks

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "16", "SLURM_LOCALID": "2"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "7", "OMPI_COMM_WORLD_SIZE": "9", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Rank()),
        (TORCHRUN, Rank(rank=3, world_size=8, local_rank=1, launched=True)),
        (SLURM, Rank(rank=5, world_size=16, local_rank=2, launched=True)),
        (OPEN_MPI, Rank(rank=7, world_size=9, local_rank=0, launched=True)),
        ({**SLURM, **TORCHRUN}, Rank(rank=3, world_size=8, local_rank=1, launched=True)),
        ({**SLURM, **OPEN_MPI}, Rank(rank=5, world_size=16, local_rank=2, launched=True)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}, Rank()),  # an sbatch script, no launcher
    ],
)
def test_ranks(environment: dict[str, str], expected: Rank) -> None:
    assert read_rank(environment) == expected


@pytest.mark.parametrize("environment", [{**TORCHRUN, "RANK": "8"}, {**TORCHRUN, "WORLD_SIZE": "many"}])
def test_contradictions(environment: dict[str, str]) -> None:
    with pytest.raises(UserError):
        read_rank(environment)


def test_auto_on_a_cpu() -> None:
    config = resolve_auto(make(MIXED, training__precision="auto"))
    assert (config.training.precision, config.optimizer.implementation, config.model.norm_implementation) == (
        "fp32",
        "torch",
        "torch",
    )
    offloaded = resolve_auto(make(MIXED, parallel__offload_optimizer=True))
    assert offloaded.optimizer.implementation == "deepspeed_cpu_adam"


@pytest.mark.parametrize(
    "overrides",
    [
        {"optimizer__implementation": "apex"},
        {"optimizer__implementation": "transformer_engine"},
        {"model__norm_implementation": "apex"},
    ],
)
def test_what_is_not_there_is_refused(overrides: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="computes on CUDA alone"):
        resolve_auto(make(MIXED, **overrides))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(ConfigError, match="is not installed"):
        resolve_auto(make(MIXED, **overrides))


def test_apex_of_pypi_is_not_nvidias(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyPI's `apex` is another project: a package of that name without NVIDIA's modules does not count."""
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not upstream.importable("apex")
    (tmp_path / "apex" / "normalization.py").write_text("")
    sys.modules.pop("apex")
    assert upstream.importable("apex")
    sys.modules.pop("apex")


def test_a_rank_that_is_wrong_alone_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It waits first: where all are wrong, the first rank speaks and the launcher ends the others meanwhile."""
    waited: list[float] = []
    monkeypatch.setattr("mup_megatron.parallel.ranks.time.sleep", waited.append)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    say_error("no such file")
    assert not waited
    assert capsys.readouterr().err == "mup-megatron: error: no such file\n"
    monkeypatch.setenv("RANK", "1")
    say_error("no such file")
    assert waited == [10.0]
    assert capsys.readouterr().err == "mup-megatron: error (rank 1): no such file\n"


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """A free one, at which ranks meet."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        found: int = free.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(found))
    return found


def test_two_runs_on_one_port(port: int) -> None:
    """Two launches of `deepspeed` on one machine meet at one port; a rank of the second must not join the first."""
    ranks = [Rank(rank=number, world_size=2, local_rank=number, launched=True) for number in range(2)]
    with ThreadPoolExecutor() as pool:
        meetings = list(pool.map(Meeting, ranks))
    meetings[0].tell("word", "said")
    assert meetings[1].told("word") == "said"
    said = f"MASTER_PORT: another run or program uses 127.0.0.1:{port} .*expected a port of its own for each run"
    for rank in ranks:
        with pytest.raises(UserError, match=said):
            Meeting(rank)


@pytest.mark.usefixtures("port")
def test_the_first_rank_may_take_longer_than_a_group_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Preparing a corpus takes hours; the half hour of a process group is for what ranks do together."""
    monkeypatch.setattr(runtime, "_PATIENCE", datetime.timedelta(seconds=1))
    came: list[tuple[int, float]] = []

    def follows(rank: Rank) -> None:
        meeting = Meeting(rank)
        for pause in (3, 0):
            time.sleep(pause if rank.is_first else 0)
            meeting.follow_first(rank)
            came.append((rank.rank, time.monotonic()))
        meeting.part(rank)

    began = time.monotonic()
    with ThreadPoolExecutor() as pool:
        list(pool.map(follows, [Rank(rank=number, world_size=2, launched=True) for number in range(2)]))
    assert sorted(rank for rank, _ in came) == [0, 0, 1, 1]
    assert min(when for _, when in came) - began >= 3


def test_a_port_that_another_program_has(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with pytest.raises(Held, match="another run or program uses"):
            Meeting(Rank(rank=0, world_size=2, local_rank=0, launched=True))


def queues(rank: Rank, tensor: int | None) -> str | None:
    """CUDA_DEVICE_MAX_CONNECTIONS once a layout's process groups are there, if one is given."""
    if tensor is not None:
        config = resolve_auto(make(MIXED, parallel__tensor_model_parallel_size=tensor))
        runtime.start_distributed(resolve_layout(config, rank.world_size), rank, config.run.seed)
    return os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")


def test_a_layout_leaves_no_variable_behind(ranks: Ranks) -> None:
    """What tensor parallelism asks for, FSDP in the same process refuses."""
    assert [ranks.run(2, queues, tensor=tensor) for tensor in (2, None, 1)] == [["1", "1"], [None] * 2, [None] * 2]
