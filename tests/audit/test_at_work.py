"""Forward multipliers, measured in a forward pass: planted faults named by module, and the measurements by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mup_megatron.audit import softmax_scale as scales
from mup_megatron.audit.multiple import multiple
from mup_megatron.data.prepare import prepare
from tests.helpers import audit_bodies
from tests.helpers.audit_faults import MULTIPLIERS, apart
from tests.helpers.distributed import Ranks
from tests.helpers.layouts import Split
from tests.helpers.matrix import config_of

KEYS: dict[str, Any] = {
    "hparams__embedding_multiplier": 2.0,
    "hparams__residual_multiplier": 0.5,
    "training__recompute_granularity": "full",
    "training__recompute_method": "uniform",
    "training__recompute_num_layers": 1,
}
SPLITS = {
    "TP 2": Split(0, tensor=2),
    "SP": Split("plain", tensor=2, sequence=True),
    "ZeRO 3": Split(3, data=2),
    "PP 2": Split("distributed", pipeline=2),
    "FSDP2": Split("fsdp2", data=2),
}


@pytest.mark.parametrize("split", ["TP 2", *(pytest.param(name, marks=pytest.mark.slow) for name in list(SPLITS)[1:])])
@pytest.mark.parametrize("faults", [(), *apart(MULTIPLIERS)], ids=["none", "some", "the others"])
def test_a_planted_fault_is_named(ranks: Ranks, faults: tuple[str, ...], split: str) -> None:
    """By module and quantity, on every rank, and nothing else is."""
    config = config_of("gpt3, mixed", SPLITS[split], **KEYS)
    prepare(config)
    planted = [audit_bodies.FAULTS[fault] for fault in faults]
    expected = {f"{fault.tensor}: {fault.said}" for fault in planted}
    for found in ranks.run(2, audit_bodies.audited, config=config, faults=faults):
        said = [line for line in found["wrong"] if "multiplier" in line or "softmax" in line]
        assert {line.partition(" multiplier")[0].partition(" scale")[0] for line in said} == expected
        assert found["unseen"] == []


RELATIVE = {
    "model__position_embedding_type": "relative",
    "model__relative_attention_num_buckets": 8,
    "model__relative_attention_max_distance": 20,
    "hparams__relative_bias_multiplier": 8.0,
}
UNIT = {"parametrization__scaling": "unit"}


@pytest.mark.parametrize(
    ("split", "keys", "fault"),
    [
        pytest.param(Split(3, data=2), RELATIVE, "no position bias multiplier", marks=pytest.mark.slow),
        pytest.param(Split("plain", tensor=2), RELATIVE, "no position bias multiplier", marks=pytest.mark.slow),
        pytest.param(Split("fsdp2", data=2), RELATIVE, "no position bias multiplier", marks=pytest.mark.slow),
        (Split("plain", data=2), UNIT, "no multiplier of fc1"),
        pytest.param(Split(3, data=2), UNIT, "no multiplier of fc2", marks=pytest.mark.slow),
        pytest.param(Split("plain", tensor=2, sequence=True), UNIT, "no multiplier of fc1", marks=pytest.mark.slow),
        pytest.param(Split("plain", pipeline=2), UNIT, "no multiplier of words", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_planted_fault_of_a_layer_is_named(ranks: Ranks, split: Split, keys: dict[str, Any], fault: str) -> None:
    """Under tensor parallelism what ranks sum is not seen: a row-parallel layer, and the word embeddings."""
    config = config_of("gpt3, mixed", split, **keys)
    prepare(config)
    expected = audit_bodies.FAULTS[fault]
    for faults, named in ((), set()), ((fault,), {expected.tensor}):
        for found in ranks.run(2, audit_bodies.audited, config=config, faults=faults):
            assert {line.partition(":")[0] for line in found["wrong"]} == named, found["wrong"]
            assert all(expected.said in line for line in found["wrong"])
            unseen = {line.rpartition(".")[2] for line in found["unseen"]}
            summed = {"linear_proj", "linear_fc2", "word_embeddings"} if split.tensor > 1 and keys is UNIT else set()
            assert unseen == summed


@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_multiple_by_hand(dtype: torch.dtype, dropout: float) -> None:
    """Where the output is a sum with something larger too, whose rounding is the error."""
    draw = torch.Generator().manual_seed(0)
    branch, stream = torch.randn(8, 4, 64, generator=draw), 10 * torch.randn(8, 4, 64, generator=draw)
    kept = torch.rand(8, 4, 64, generator=draw) >= dropout
    after = (stream.to(dtype) + 0.3 * branch * kept / (1 - dropout)).to(dtype)
    before = stream.to(dtype)
    found, noise, strange = multiple(after.double() - before.double(), branch, dropout=dropout, rounded=after)
    assert abs(found - 0.3) < noise
    assert 1e-8 < noise < (1e-5 if dtype is torch.float32 else 0.05)
    assert strange < 0.05


def test_dropout_rounds_its_own_factor() -> None:
    """torch's own, in bf16 on a CPU: by hand 1.109375 in place of 1 / 0.9, 0.998438 of it. Control: 2 % are wrong."""
    torch.manual_seed(0)
    plain = torch.randn(8, 4, 256).bfloat16()
    output = torch.nn.functional.dropout(plain, 0.1)
    found, noise, _ = multiple(output, plain, dropout=0.1)
    assert found == pytest.approx(1.109375 * 0.9, abs=2e-4)
    assert abs(found - 1) < noise < 4e-3
    found, noise, _ = multiple(1.02 * output.float(), plain, dropout=0.1, dropped_in=torch.bfloat16)
    assert abs(found - 1) > noise + 0.01
    assert multiple(torch.nn.functional.dropout(plain.float(), 0.1), plain, dropout=0.1).noise < 1e-5


def test_what_is_no_multiple() -> None:
    draw = torch.Generator().manual_seed(0)
    assert multiple(torch.randn(64, generator=draw), torch.randn(64, generator=draw)).strange > 0.9
    assert math.isnan(multiple(torch.zeros(4), torch.zeros(4)).found)


@pytest.mark.parametrize("scale", [1 / 32, 1 / math.sqrt(32)], ids=["1/d", "1/sqrt(d)"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_softmax_scale_by_hand(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, dropout: float, scale: float
) -> None:
    """From outputs of attention in float32, rounded; 1/d is expected, whatever is there."""
    monkeypatch.setattr(scales.parallel_state, "get_context_parallel_rank", lambda: 0)
    torch.manual_seed(0)
    query, key = (0.3 * torch.randn(128, 4, heads, 32).to(dtype) for heads in (8, 2))
    value = torch.randn(128, 4, 2, 32).to(dtype)
    logits = torch.einsum("sbad,kbad->bask", query.float(), key.repeat_interleave(4, 2).float()) * scale
    weights = logits.masked_fill(torch.ones(128, 128).triu(1).bool(), -math.inf).softmax(-1)
    weights = torch.nn.functional.dropout(weights, dropout).to(dtype).float()
    output = torch.einsum("bask,kbad->sbad", weights, value.repeat_interleave(4, 2).float()).to(dtype).flatten(2)
    config = SimpleNamespace(attention_dropout=dropout, context_parallel_size=1)
    module = SimpleNamespace(config=config, training=True, attn_mask_type=SimpleNamespace(name="causal"))
    measured = scales.softmax_scale(module, (query, key, value, None), {}, output, 1 / 32)
    assert measured is not None
    assert abs(measured.found - scale) < measured.noise + 1e-6
    assert measured.noise < (1e-6 if dtype is torch.float32 else 0.2 / 32)
    assert measured.strange == 0
