"""torch's FSDP2 in the Megatron engine: rows and their places, what is refused, whole runs from the command line.

Its parity cells, its clipping and its checkpoints stand beside those of other layouts (test_parity.py,
test_gradient_norm.py, test_resume.py, test_engine.py).
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from mup_megatron.parallel.layout import resolve_layout
from mup_megatron.parallel.ranks import Rank
from mup_megatron.util.errors import ConfigError
from tests.helpers import bodies
from tests.helpers.commands import environment, losses, metrics, until
from tests.helpers.configs import MIXED, make
from tests.helpers.distributed import Ranks

FSDP2 = {
    "parallel__engine": "megatron",
    "parallel__use_distributed_optimizer": False,
    "parallel__use_torch_fsdp2": True,
}


def rows(rank: Rank, *, shape: tuple[int, ...]) -> dict[str, Any]:
    """What a rank holds of 0, 1, 2, ... once `fill` has put it there, where it begins, and the whole again."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from mup_megatron.engines.fully_sharded import fill, own_part, whole

    mesh = DeviceMesh("cpu", list(range(rank.world_size)))
    count = int(np.prod(shape))
    held = distribute_tensor(torch.full(shape, -1.0), mesh, [Shard(0)])
    fill(held, torch.arange(float(count)).view(shape))
    part = own_part("it", held)
    return {
        "own": part.values.flatten().tolist(),
        "start": part.start,
        "holders": part.holders,
        "whole": whole(held).flatten().tolist(),
    }


@pytest.mark.parametrize(
    ("shape", "own"),
    [
        ((4, 2), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ((3, 2), [[0, 1, 2, 3], [4, 5]]),  # the first rank has the longer part
        ((1, 3), [[0, 1, 2], []]),
        ((5,), [[0, 1, 2], [3, 4]]),
    ],
    ids=str,
)
def test_rows_of_two_ranks(ranks: Ranks, shape: tuple[int, ...], own: list[list[int]]) -> None:
    """By hand."""
    count = int(np.prod(shape))
    for found, expected in zip(ranks.run(2, rows, shape=shape), own, strict=True):
        assert found["own"] == expected
        assert found["start"] == (expected[0] if expected else count)
        assert found["holders"] == 1
        assert found["whole"] == list(range(count))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            {"parallel__engine": "deepspeed"},
            "parallel.engine: 'deepspeed' with parallel.use_torch_fsdp2: expected mega",
        ),
        ({"parallel__use_distributed_optimizer": True}, "parallel.use_distributed_optimizer: true with"),
        ({"parallel__pipeline_model_parallel_size": 2}, "parallel.pipeline_model_parallel_size: 2 with"),
        ({"parallel__expert_model_parallel_size": 2}, "all ranks share all experts; expected 1"),
        (
            {"parallel__tensor_model_parallel_size": 2, "parallel__expert_tensor_parallel_size": 1},
            "parallel.expert_tensor_parallel_size: 1 with",
        ),
        ({"parallel__overlap_grad_reduce": True}, "parallel.overlap_grad_reduce: true with"),
        ({"optimizer__name": "muon"}, "optimizer.name: muon with parallel.use_torch_fsdp2: it steps whole matrices"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_what_is_refused_beside_it(overrides: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        make(MIXED, "gpt3", **{**FSDP2, **overrides})
    assert sentence in str(error.value)


def test_a_layout_says_so() -> None:
    assert (
        str(resolve_layout(make(MIXED, "gpt3", **FSDP2, parallel__tensor_model_parallel_size=1), 2))
        == "TP 1, DP 2, FSDP2"
    )


@pytest.mark.slow
def test_a_run_evaluates_is_stopped_and_goes_on(tmp_path: Path, ranks: Ranks) -> None:
    """SIGTERM saves; the same command goes on to the losses of a run that nothing stopped, and so does DeepSpeed."""
    config = make(
        MIXED,
        "gpt3",
        **FSDP2,
        run__dir=str(tmp_path / "run"),
        run__samples=["def "],
        data__split="80,20,0",
        training__train_steps=30,
        training__eval_interval=10,
        training__eval_steps=2,
        training__checkpoint_interval=1000,
        parallel__tensor_model_parallel_size=1,
    )
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config.model_dump()))
    whole = ["train", str(path), f"run.dir={tmp_path / 'whole'}"]
    assert [status for status, _, _ in ranks.run(2, bodies.command, arguments=whole)] == [0, 0]
    alone = [
        *("train", str(path), f"run.dir={tmp_path / 'alone'}", "parallel.use_torch_fsdp2=false"),
        *("parallel.engine=deepspeed", "parallel.zero_stage=0"),
    ]
    assert [status for status, _, _ in ranks.run(1, bodies.command, arguments=alone)] == [0]
    ranks.stop()
    command = [sys.executable, "-m", "mup_megatron", "train", str(path), "--nproc-per-node", "2"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), start_new_session=True
    )
    there = tmp_path / "run" / "metrics.jsonl"
    until(lambda: there.exists() and len(there.read_text().splitlines()) >= 5)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 143, err
    done = len(losses(tmp_path / "run"))
    assert 4 <= done < 30
    assert (tmp_path / "run" / "checkpoints" / f"step_{done:08d}").is_dir()
    resumed = ranks.run(2, bodies.command, arguments=["train", str(path)])
    assert [status for status, _, _ in resumed] == [0, 0], resumed
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    np.testing.assert_allclose(losses(tmp_path / "whole"), losses(tmp_path / "alone"), rtol=2e-5)
    evaluations = [
        [line["eval_loss"] for line in metrics(tmp_path / name) if "eval_loss" in line] for name in ("whole", "alone")
    ]
    assert len(evaluations[0]) == 3
    np.testing.assert_allclose(evaluations[0], evaluations[1], rtol=2e-5)
