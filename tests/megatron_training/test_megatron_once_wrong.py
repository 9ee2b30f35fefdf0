"""Options of megatron.training that were accepted and then wrong: each is in order now, or refused in a sentence."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mup_megatron.megatron_training.script import _announce_rank
from tests.helpers import megatron_runs
from tests.helpers.distributed import Ranks
from tests.helpers.installed import needs_training

LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 16}


def run(ranks: Ranks, folder: Path, *extra: str, **changed: Any) -> dict[str, Any]:
    """The last rank's, where losses are logged."""
    return megatron_runs.run(ranks, folder, *extra, **changed)[-1]


@pytest.fixture(scope="module")
def plain(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found = run(ranks, tmp_path_factory.mktemp("plain"))
    assert found["status"] == 0, found["said"]
    assert len(found["losses"]) == 2
    return found


@needs_training
@pytest.mark.parametrize(
    "backend", ["flash", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fused", "unfused"))]
)
def test_attention_backends(backend: str, ranks: Ranks, tmp_path: Path, plain: dict[str, Any]) -> None:
    """Shape models leave Transformer Engine's variables to the real one; local attention has one backend."""
    found = run(ranks, tmp_path, "--attention-backend", backend)
    assert (found["status"], found["losses"]) == (0, plain["losses"]), found["said"]
    assert found["backends"] == {name: str(int(name == backend)) for name in ("flash", "fused", "unfused")}


@needs_training
def test_rope_under_latent_attention(ranks: Ranks, tmp_path: Path) -> None:
    """Plain rotary positions under MLA: YaRN's options, which upstream gives other defaults, do not matter."""
    words = ("--multi-latent-attention", "--position-embedding-type", "rope")
    rope = run(ranks, tmp_path, *words, "--rope-type", "rope", kv_channels=None, **LATENT)
    yarn = run(ranks, tmp_path, *words, "--rope-type", "yarn", kv_channels=None, rotary_scaling_factor=8, **LATENT)
    assert (rope["status"], yarn["status"]) == (0, 0), rope["said"] + yarn["said"]
    assert len(rope["losses"]) == 2
    assert rope["losses"] != yarn["losses"]


@needs_training
@pytest.mark.parametrize(("rows", "status"), [(104, 0), pytest.param(100, 0, marks=pytest.mark.slow), (90, 2)])
def test_padded_vocabulary(rows: int, status: int, ranks: Ranks, tmp_path: Path) -> None:
    found = run(ranks, tmp_path, "--padded-vocab-size", str(rows))
    assert found["status"] == status, found["said"]
    if status:
        assert "--padded-vocab-size 90: the tokenizer has 100 entries; expected no fewer rows" in found["said"]
    else:
        assert found["vocabulary"] == rows


@pytest.fixture(scope="module")
def two(ranks: Ranks) -> Ranks:
    ranks.run(2, megatron_runs.warm)
    return ranks


@pytest.mark.slow
@needs_training
def test_resume_with_another_padding(two: Ranks, tmp_path: Path) -> None:
    """Megatron pads 100 entries to 128 rows, and to 256 at TP 2; the guard says so, and what gives 128 there."""
    saved = str(tmp_path / "saved")
    whole = run(two, tmp_path, "--save", saved, "--save-interval", "1", train_iters=3)
    assert whole["status"] == 0, whole["said"]
    loads = {"count": 2, "tensor_model_parallel_size": 2, "train_iters": 3}
    other = run(two, tmp_path, "--load", saved, "--ckpt-step", "2", **loads)
    assert other["status"] == 2
    assert "its embedding has 128 rows for the vocabulary, this run's 256" in other["said"]
    assert "expected --make-vocab-size-divisible-by 64, which gives 128 rows here" in other["said"]
    same = run(two, tmp_path, "--load", saved, "--ckpt-step", "2", make_vocab_size_divisible_by=64, **loads)
    assert same["status"] == 0, same["said"]
    assert same["losses"] == pytest.approx(whole["losses"][2:], abs=1e-5)


@needs_training
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--qk-clip", "--qk-clip: computes on CUDA alone, and none is here; expected none"),
        ("--num-experts 4 --moe-grouped-gemm", "--moe-grouped-gemm: computes on CUDA alone, and none is here"),
        ("--attention-backend local", "--attention-backend local: not under µP here"),
        ("--window-size 4,0", "--window-size 4,0: megatron-core makes the mask of a window on CUDA"),
        (
            "--mtp-num-layers 1 --pipeline-model-parallel-size 2",
            "--mtp-num-layers 1: learned_absolute positions and pipeline stages",
        ),
    ],
)
def test_refused_before_upstream_fails(words: str, said: str, ranks: Ranks, tmp_path: Path) -> None:
    """A sentence and exit status 2, before a check of upstream's ends in a traceback."""
    found = run(ranks, tmp_path, *words.split())
    assert found["status"] == 2
    assert said in found["said"]
    assert found["losses"] == []


def test_a_lone_process_binds_a_free_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port is free until somebody takes it, so none is chosen before the store binds one."""
    from torch.distributed import TCPStore

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    _announce_rank()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    with socket.socket() as taken:  # what another process does between the choice and the binding
        if port:
            taken.bind((address, port))
            taken.listen()
        assert TCPStore(address, port, 1, is_master=True).port > 0


@needs_training
def test_what_was_applied_is_told(ranks: Ranks, tmp_path: Path) -> None:
    """In one line, in TensorBoard and beside the checkpoint: what the optimizer's groups have, and numbers by hand.

    Twice the base's hidden size of 32: hidden matrices have half the rate of 1e-2, the readout half its output; heads
    keep their 16 channels. 2 layers of 12 tensors, two embeddings, the final norm's gain and bias.
    """
    folders: dict[str, Any] = {"tensorboard_dir": tmp_path / "curves", "save": tmp_path / "saved", "save_interval": 2}
    found = run(ranks, tmp_path, **folders)
    assert found["status"] == 0, found["said"]
    rates = {group["rule"]: group["max_lr"] for group in found["groups"].values()}
    assert set(rates.values()) == {0.005, 0.01}
    said, audit = [line for line in found["printed"].splitlines() if line.startswith("mup-megatron: ")]
    assert audit == "mup-megatron: audit: 28 tensors, 28 right; 8 multipliers, 8 right"
    held = json.loads((tmp_path / "saved" / "iter_0000002" / "mup.json").read_text())["applied"]
    assert said == (
        f"mup-megatron: mup applied: 28 tensors in {len(rates)} optimizer groups (rates 0.005 to 0.01), forward "
        f"multipliers softmax_scale 0.25, readout 0.5, embedding 1, residual 1; base {held['base_digest'][:12]}"
    )
    assert {rule: group["lr"] for rule, group in held["groups"].items()} == rates
    assert sum(group["tensors"] for group in held["groups"].values()) == held["tensors"] == 28
    events = EventAccumulator(str(tmp_path / "curves"))
    events.Reload()
    written = {rule: events.Scalars(f"mup/peak-learning-rate/{rule}")[0].value for rule in rates}
    assert written == pytest.approx(rates)
