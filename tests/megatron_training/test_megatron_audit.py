"""The audit of runs of megatron.training: what it says, planted faults named by tensor, and no bit changed.

Every other test of this folder that trains runs with the audit, which would end a run that it takes for wrong.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import megatron_faults, megatron_runs
from tests.helpers.audit_bodies import FAULTS
from tests.helpers.audit_faults import FIRST_STEPS, GROUPS, INITIAL, MATRICES, MULTIPLIERS, WHOLE_GROUPS, apart
from tests.helpers.distributed import RankError, Ranks
from tests.helpers.installed import needs_training

pytestmark = needs_training

BASE = "hidden_size: 32\nffn_hidden_size: 64\nnum_attention_heads: 2\n"
CONFIG = "hparams:\n  embedding_multiplier: 2.0\n  residual_multiplier: 0.5\n"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
LAYOUTS = {
    "TP 2": "--tensor-model-parallel-size 2",
    "PP 2": "--pipeline-model-parallel-size 2",
    "DP 2": "--use-distributed-optimizer",
    "Muon": "--tensor-model-parallel-size 2 --optimizer muon --muon-tp-mode duplicated --muon-fp32-matmul-prec high"
    " --position-embedding-type rope",
}
OF_MUON = {name: fault for name, fault in MATRICES.items() if "Nesterov" not in name}


def audited(
    ranks: Ranks, folder: Path, *faults: str, layout: str = "TP 2", audit: str = "warn", **changed: Any
) -> list[dict[str, Any]]:
    """Two ranks; what each said, and audit.json."""
    (folder / "mup.yaml").write_text(CONFIG)
    more = [*LAYOUTS[layout].split(), *RECOMPUTED.split(), "--mup-audit", audit, "--save", str(folder / "saved")]
    keys = {
        "mup_config": folder / "mup.yaml",
        "save_interval": 10,
        "weight_decay": 0.1,
        "global_batch_size": 4,
        "adam_beta2": 0.95,
        **changed,
    }
    words = megatron_runs.words(folder, *more, base=BASE, **keys)
    return ranks.run(2, megatron_faults.audited, words=words, faults=faults)


def audit_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "saved" / "audit.json").read_text())


@pytest.mark.parametrize(
    "layout", ["TP 2", *(pytest.param(each, marks=pytest.mark.slow) for each in ("PP 2", "DP 2", "Muon"))]
)
def test_a_healthy_run(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    """Under a warm-up whose first step has the rate 0, so that the second is looked at."""
    first, _ = audited(ranks, tmp_path, layout=layout, audit="stop", train_iters=4, lr_warmup_iters=2)
    assert first["status"] == 0, first["said"]
    found = audit_of(tmp_path)
    assert found["right"]
    assert found["unseen"] == []
    tensors = {each["tensor"] for each in found["findings"] if each["of"] == "tensor"}
    assert (
        f"mup-megatron: audit: {len(tensors)} tensors, {len(tensors)} right; 8 multipliers, 8 right\n"
        in first["printed"]
    )
    rates = {each["expected"] for each in found["findings"] if each["quantity"] == "learning rate"}
    assert max(rates) == pytest.approx(1e-2 / 2)
    assert "could not look" not in first["said"]


PACKS = [
    (layout, faults)
    for layout in ("TP 2", "PP 2", "DP 2")
    for kinds in (INITIAL, GROUPS, MULTIPLIERS, WHOLE_GROUPS, FIRST_STEPS)
    for faults in apart({name: fault for name, fault in kinds.items() if layout == "TP 2" or "rank" not in name})
    if layout == "TP 2" or (kinds in (INITIAL, GROUPS) and "of another layer" not in faults)
] + [("Muon", (fault,)) for fault in OF_MUON]


@pytest.mark.parametrize(
    ("layout", "faults"),
    [
        pytest.param(*pack, id=f"{pack[1][0]}: {pack[0]}", marks=() if number % 24 == 0 else pytest.mark.slow)
        for number, pack in enumerate(PACKS)
    ],
)
def test_a_planted_fault_is_named(ranks: Ranks, tmp_path: Path, layout: str, faults: tuple[str, ...]) -> None:
    """By tensor and quantity."""
    with contextlib.suppress(RankError):  # some of them upstream cannot save, and that at the end
        first, _ = audited(ranks, tmp_path, *faults, layout=layout)
        assert "mup-megatron: warning: audit: " in first["printed"]
    wrong = [each for each in audit_of(tmp_path)["findings"] if not each["right"]]
    for fault in map(FAULTS.__getitem__, faults):
        assert any(each["tensor"] == fault.tensor and fault.said in each["quantity"] for each in wrong), (fault, wrong)


def test_a_scheduler_that_resets_rates_stops_the_run(ranks: Ranks, tmp_path: Path) -> None:
    """It acts behind the first step, and is seen before the second of three."""
    results = audited(ranks, tmp_path, megatron_faults.ONE_RATE, audit="stop", train_iters=3)
    assert [each["status"] for each in results] == [2, 2]
    assert "learning rate 0.001, expected" in results[0]["said"]
    assert "--mup-audit warn goes on all the same" in results[0]["said"]
    assert results[1]["printed"].count("lm loss") == 1
    assert not audit_of(tmp_path)["right"]


@pytest.mark.slow
def test_it_changes_no_bit(ranks: Ranks, tmp_path: Path) -> None:
    losses = {}
    for audit in ("stop", "off"):
        (tmp_path / audit).mkdir()
        losses[audit] = [each["steps"] for each in audited(ranks, tmp_path / audit, audit=audit, train_iters=4)]
    assert losses["stop"] == losses["off"]
    assert not (tmp_path / "off" / "saved" / "audit.json").exists()
