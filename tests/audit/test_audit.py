"""The audit on this project's engines: no false alarm in any layout, and planted faults named by tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mup_megatron.data.prepare import prepare
from tests.helpers import audit_bodies
from tests.helpers.audit_faults import GROUPS, INITIAL, STEPS, WHOLE_GROUPS, Fault, apart
from tests.helpers.distributed import Ranks
from tests.helpers.layouts import Split
from tests.helpers.matrix import COVER, QUICK, config_of, row

OF_ZEROS = {"llama, zero-init": {"softmax scale", "readout multiplier"}}
"""Multipliers that nobody sees, because what they multiply is 0."""
OF_SUMS = {"unit scale": {"layer multiplier"}}
"""The same under tensor parallelism, because ranks sum what is multiplied."""


@pytest.mark.parametrize(
    ("model", "split"),
    [
        pytest.param(*cell, id=f"{cell[0]}: {row(*cell)[2]}", marks=() if cell in QUICK else pytest.mark.slow)
        for cell in COVER
    ],
)
def test_no_false_alarm(ranks: Ranks, model: str, split: Split) -> None:
    config = config_of(model, split)
    prepare(config)
    results = ranks.run(split.processes, audit_bodies.audited, config=config)
    for found in results:
        assert found["wrong"] == []
        unseen = OF_ZEROS.get(model, set()) | (OF_SUMS.get(model, set()) if split.tensor > 1 else set())
        assert {line.partition(" of ")[0] for line in found["unseen"]} == unseen
        assert found["findings"] >= 3 * found["tensors"]


SGD = {"optimizer__name": "sgd", "parametrization__weight_decay": "independent"}


@pytest.mark.parametrize(
    ("model", "split", "more"),
    [
        pytest.param("gpt3", Split(1, tensor=2, data=2), {"training__precision": "bf16"}, marks=pytest.mark.slow),
        pytest.param("gpt3", Split("distributed", data=2), {"training__precision": "bf16"}, marks=pytest.mark.slow),
        ("mtp", Split("plain", pipeline=2), {"model__share_embeddings_and_output_weights": True}),
        ("gpt3, head_size", Split(2, data=2), SGD),
        pytest.param("gpt3, head_size", Split("plain", tensor=2), SGD, marks=pytest.mark.slow),
        ("gpt3, mixed", Split(0, data=2), {"optimizer__name": "adam", "hparams__weight_decay": 0.0}),
        ("llama, frozen-gains", Split(3, data=2), {}),
        pytest.param("llama, frozen-gains", Split("distributed", data=2), {}, marks=pytest.mark.slow),
        pytest.param("llama, frozen-gains", Split("fsdp2", data=2), {}, marks=pytest.mark.slow),
        ("llama, mtp", Split("plain", tensor=2), {"model__mtp_loss_scaling_factor": 0.0}),
    ],
    ids=str,
)
def test_no_false_alarm_of_others(ranks: Ranks, model: str, split: Split, more: dict[str, Any]) -> None:
    """In bf16, with two copies of an embedding, under other optimizers, with tensors that no gradient reaches."""
    config = config_of(model, split, **more)
    prepare(config)
    for found in ranks.run(split.processes, audit_bodies.audited, config=config):
        assert (found["wrong"], found["unseen"]) == ([], [])


def test_no_false_alarm_where_gradients_are_float32(ranks: Ranks, tmp_path: Path) -> None:
    """For which DeepSpeed has an optimizer of its own, with groups under another name."""
    path = tmp_path / "deepspeed.json"
    path.write_text(json.dumps({"data_types": {"grad_accum_dtype": "fp32"}}))
    keys = {"training__precision": "bf16", "parallel__deepspeed_config": str(path)}
    config = config_of("gpt3, mixed", Split(1, data=2), **keys)
    prepare(config)
    for found in ranks.run(2, audit_bodies.audited, config=config):
        assert (found["wrong"], found["unseen"]) == ([], [])


# Layouts whose engines hold groups and master weights each in a way of its own.
ZERO = [Split(stage, data=2) for stage in range(4)]
MEGATRON = [Split("plain", tensor=2), Split("distributed", data=2), Split("fsdp2", data=2)]
# Where the optimizer steps the model's own parameters, so that a change of these is a change of what it keeps.
OWN = [Split(0, tensor=2), Split("plain", tensor=2)]


# Of a step, however the optimizer holds its weights.
EVERYWHERE = ("decay in the gradient", "undone")


def planted(splits: list[Split], faults: dict[str, Fault], quick: int) -> list[Any]:
    """Every fault in every layout, those of different tensors in one run, which has the first one's name.

    A few runs are quick. Data-parallel ranks get their copies from the first.
    """
    cells = [
        (together, split)
        for split in splits
        for together in apart({name: fault for name, fault in faults.items() if split.tensor > 1 or "rank" not in name})
    ]
    return [
        pytest.param(*cell, id=f"{cell[0][0]}: {cell[1]}", marks=() if number % quick == 0 else pytest.mark.slow)
        for number, cell in enumerate(cells)
    ]


@pytest.mark.parametrize(
    ("faults", "split"),
    [
        *planted([Split(0, tensor=2), Split(1, tensor=2, data=2), *ZERO[1:], *MEGATRON], {**INITIAL}, 8),
        *planted([Split(0, tensor=2), *ZERO, *MEGATRON], {**GROUPS}, 8),
        *planted(OWN, {**STEPS, **WHOLE_GROUPS}, 6),
        *planted([*ZERO[1:], MEGATRON[1]], {name: STEPS[name] for name in (*EVERYWHERE, "no gradient")}, 5),
        # FSDP2 puts other parameters in the place of those whose gradients the fault holds back.
        *planted([MEGATRON[2]], {name: STEPS[name] for name in EVERYWHERE}, 5),
    ],
)
def test_a_planted_fault_is_named(ranks: Ranks, faults: tuple[str, ...], split: Split) -> None:
    """By tensor and quantity, on every rank."""
    config = config_of("gpt3, mixed", split)
    prepare(config)
    for found in ranks.run(split.processes, audit_bodies.audited, config=config, faults=faults):
        for expected in (audit_bodies.FAULTS[fault] for fault in faults):
            said = [
                line for line in found["wrong"] if line.startswith(f"{expected.tensor}: ") and expected.said in line
            ]
            assert said, found["wrong"]
        assert f"; {found['wrong'][0]}" in found["line"]
