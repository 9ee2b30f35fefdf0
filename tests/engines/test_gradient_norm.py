"""The invariant gradient norm: weights by hand, and the same norm and the same clipped steps in every layout."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mup_megatron.data.prepare import prepare
from mup_megatron.engines import gradient_norm
from mup_megatron.engines.gradient_norm import _weighted
from mup_megatron.model.build import parametrize
from mup_megatron.model.parts import Part
from tests.helpers import bodies
from tests.helpers.comparison import Difference, compare_curves
from tests.helpers.configs import HEAD_SIZE, MIXED, MOE, VOCABULARY, make
from tests.helpers.distributed import Ranks
from tests.helpers.layouts import Split

STEPS = 5
# Far above Adam's second moments, so that an update goes with its gradient and clipping shows in the losses.
INVARIANT: dict[str, Any] = {"training__clip_norm": "invariant", "training__clip_grad": 0.3, "optimizer__eps": 1e-3}
ONE: dict[str, Any] = {"parallel__zero_stage": 0, "parallel__tensor_model_parallel_size": 1}


def prepared(growth: dict[str, Any] = MIXED, architecture: str = "gpt3", **overrides: Any) -> Any:
    config = make(growth, architecture, **overrides)
    prepare(config)
    return config


def test_weights_of_an_untied_readout() -> None:
    """Hidden ×2, A = 1/2, fan-out fixed: 1 / (1/4 · 2) = 2; the embedding's is its m_out, 2; standard, all are 1."""
    tensors = parametrize(make(HEAD_SIZE, "llama"), VOCABULARY).tensors
    assert tensors["output_layer.weight"].gradient_norm == {None: 2.0}
    assert tensors["embedding.word_embeddings.weight"].gradient_norm == {None: 2.0}
    # FFN ×3 on hidden ×2; heads · head size ×3/2 on hidden ×2.
    assert tensors["decoder.layers.0.mlp.linear_fc1.weight"].gradient_norm == {"gate": 1.5, "up": 1.5}
    assert tensors["decoder.layers.0.self_attention.linear_proj.weight"].gradient_norm == {None: 2 / 1.5}
    standard = parametrize(make(HEAD_SIZE, "llama", parametrization__name="standard"), VOCABULARY).tensors
    assert {weight for tensor in standard.values() for weight in tensor.gradient_norm.values()} == {1.0}


class Largest(TorchDispatchMode):
    """Notes the most elements that a float64 tensor had."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if torch.is_tensor(found) and found.dtype == torch.float64:
            self.elements = max(self.elements, found.numel())
        return found


def clipped(rank: Any, *, config: Any, chunk: int) -> tuple[float, int, list[float]]:
    """The norm of gradients that are cut in pieces, none of them at a row; the largest float64 tensor; what is left."""
    config, layout, table, _ = bodies.start(rank, config)
    generator, parts = torch.Generator().manual_seed(5), []
    for name, row in table.tensors.items():
        whole = torch.randn(math.prod(row.shape.spec.shape), generator=generator)
        parts += [Part(name, whole[:7], 0, 1), Part(name, whole[7:], 7, 1)]
    before, gradient_norm._CHUNK = gradient_norm._CHUNK, chunk
    with Largest() as seen:
        norm = gradient_norm.clip(parts, table, layout, 1.0, torch.device("cpu"))
    gradient_norm._CHUNK = before
    return float(norm), seen.elements, [float(part.values.square().sum()) for part in parts]


@pytest.mark.parametrize("kind", ["invariant", "global"])
def test_in_chunks(ranks: Ranks, kind: str) -> None:
    """The same norm and the same clipped gradients, with no float64 tensor that is larger than a chunk and two rows."""
    config = prepared(**ONE, training__clip_norm=kind)
    ((whole, large, after),) = ranks.run(1, clipped, config=config, chunk=10**9)
    ((norm, small, left),) = ranks.run(1, clipped, config=config, chunk=100)
    assert norm == pytest.approx(whole, rel=1e-12)
    assert left == pytest.approx(after, rel=1e-6)
    widest = max(config.model.hidden_size, config.model.ffn_hidden_size or 0)
    assert small <= 100 + 2 * widest + max(VOCABULARY, 4 * widest) * (kind == "invariant")
    assert large > 20_000


# m_out / (A² m_in) by hand for tensors that are one block: hidden ×3/2, FFN ×5/2, heads ×2.
_WEIGHTS = {
    "word_embeddings.weight": 3 / 2,
    "position_embeddings.weight": 3 / 2,
    "layernorm.weight": 3 / 2,
    "layernorm.bias": 3 / 2,
    "linear_fc1.weight": (5 / 2) / (3 / 2),
    "linear_fc1.bias": 5 / 2,
    "linear_fc2.weight": (3 / 2) / (5 / 2),
    "linear_fc2.bias": 3 / 2,
    "linear_proj.weight": (3 / 2) / 2,
    "linear_proj.bias": 3 / 2,
}


@pytest.mark.parametrize("name", ["mup", "standard"])
def test_the_norm_by_hand(ranks: Ranks, name: str) -> None:
    """From whole gradients, row by row; a control in the standard parametrization is clipped by the plain norm."""
    config = prepared(**ONE, training__clip_norm="invariant", parametrization__name=name)
    result = ranks.run(1, bodies.row_squares, config=config)[0]
    plain = sum(map(sum, result["rows"].values()))
    total = 0.0
    for tensor, rows in result["rows"].items():
        if "linear_qkv" in tensor:
            # Four groups of 16 query, 8 key and 8 value rows; queries ×2, keys and values ×4, on hidden ×3/2.
            m_in = 1.5 if tensor.endswith("weight") else 1.0
            groups = np.array(rows).reshape(4, 32)
            total += (groups[:, :16].sum() * 2 + groups[:, 16:].sum() * 4) / m_in
        else:
            total += sum(rows) * next(weight for end, weight in _WEIGHTS.items() if tensor.endswith(end))
    expected = {"mup": total, "standard": plain}[name]
    assert abs(total / plain - 1) > 0.1
    assert result["reported"] == pytest.approx(expected**0.5, rel=1e-6)


def test_at_the_base_both_norms_are_one(ranks: Ranks) -> None:
    base = {"model": {**MIXED["model"], **MIXED["base"]}, "base": MIXED["base"]}
    result = ranks.run(1, bodies.row_squares, config=prepared(base, **ONE, training__clip_norm="invariant"))[0]
    assert result["reported"] == pytest.approx(sum(map(sum, result["rows"].values())) ** 0.5, rel=1e-6)


def test_the_plain_norm_is_the_gradients(ranks: Ranks) -> None:
    result = ranks.run(1, bodies.row_squares, config=prepared(**ONE))[0]
    assert result["reported"] == pytest.approx(sum(map(sum, result["rows"].values())) ** 0.5, rel=1e-6)


def test_a_part_is_weighted_by_its_place() -> None:
    """QKV of 128 rows and 96 columns, cut at arbitrary elements, whole and as TP rank 1 of 2 holds it."""
    tensor = parametrize(make(MIXED), VOCABULARY).tensors["decoder.layers.0.self_attention.linear_qkv.weight"]
    squares = torch.rand(128, 96, dtype=torch.float64)
    by_block = squares.view(4, 32, 96)
    for ranks, groups in ((1, by_block), (2, by_block[2:])):
        expected = float(groups[:, :16].sum() * 2 / 1.5 + groups[:, 16:].sum() * 4 / 1.5)
        flat = groups.flatten()
        for cuts in ([0], [0, 1], [0, 95, 97], [0, 1000, 1536, 2113, len(flat) - 1]):
            ends = [*cuts[1:], len(flat)]
            parts = [
                _weighted(flat[start:stop], start, tensor, ranks - 1, ranks)
                for start, stop in zip(cuts, ends, strict=True)
            ]
            assert float(sum(parts)) == pytest.approx(expected, rel=1e-6), cuts


MODELS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "gpt3": (MIXED, "gpt3", {}),
    # One period of QKV's blocks, 64 query rows, 8 key rows and 8 value rows, so that a cut leaves other blocks behind.
    "one group": (MIXED, "gpt3", {"model__num_query_groups": 1}),
    "llama": (HEAD_SIZE, "llama", {}),
    "moe": (MOE, "llama", {}),
}
_SLOW = pytest.mark.slow
CELLS = [
    pytest.param("gpt3", Split(0, tensor=2, data=2), marks=_SLOW),
    pytest.param("gpt3", Split(1, tensor=2, data=2, sequence=True), marks=_SLOW),
    pytest.param("gpt3", Split(2, tensor=2, data=2), marks=_SLOW),
    pytest.param("gpt3", Split(3, tensor=2, data=2), marks=_SLOW),
    ("one group", Split(3, data=2)),
    ("gpt3", Split("plain", tensor=2, pipeline=2)),  # a tied head: the embedding is on both stages
    ("gpt3", Split("distributed", tensor=2, data=2, sequence=True)),
    pytest.param("gpt3", Split("distributed", pipeline=2, data=2), marks=_SLOW),
    pytest.param("llama", Split(1, data=4), marks=_SLOW),
    pytest.param("llama", Split("plain", pipeline=2, data=2), marks=_SLOW),
    pytest.param("llama", Split("distributed", data=4, overlap=True), marks=_SLOW),
    pytest.param("moe", Split(0, expert=2, data=2), marks=_SLOW),
    ("moe", Split(2, expert=2, data=2)),
    pytest.param("moe", Split("plain", expert=2, data=2), marks=_SLOW),
    pytest.param("gpt3", Split("fsdp2", tensor=2, data=2, sequence=True), marks=_SLOW),
    pytest.param("one group", Split("fsdp2", data=2), marks=_SLOW),
    pytest.param("llama", Split("fsdp2", data=4), marks=_SLOW),
    pytest.param("moe", Split("fsdp2", data=2), marks=_SLOW),
    pytest.param("moe", Split("distributed", tensor=2, expert=2, expert_tensor=1, data=2, sequence=True), marks=_SLOW),
]
_whole: dict[str, dict[str, Any]] = {}


def config_of(model: str, **overrides: Any) -> Any:
    growth, architecture, more = MODELS[model]
    return prepared(growth, architecture, **{**INVARIANT, **more, **overrides})


def whole(ranks: Ranks, model: str) -> dict[str, Any]:
    """One process, unsplit."""
    if model not in _whole:
        _whole[model] = ranks.run(1, bodies.train, config=config_of(model, **ONE), steps=STEPS)[0]
    return _whole[model]


@pytest.mark.parametrize(("model", "split"), CELLS, ids=str)
def test_every_layout_clips_alike(ranks: Ranks, model: str, split: Split) -> None:
    """Norms and losses of one process; every step is clipped."""
    alone = whole(ranks, model)
    assert min(alone["grad_norms"]) > INVARIANT["training__clip_grad"]
    config = config_of(model, **split.overrides)
    compare_curves(ranks.run(split.processes, bodies.train, config=config, steps=STEPS), alone)


@pytest.mark.parametrize(
    ("broken", "model", "split"),
    [
        ("invariant_norm_without_weights", "gpt3", Split(2, tensor=2, data=2)),
        pytest.param("parts_without_their_place", "one group", Split(3, data=2), marks=_SLOW),
        pytest.param("parts_without_their_place", "one group", Split("fsdp2", data=2), marks=_SLOW),
        ("every_rank_counts", "gpt3", Split("plain", data=2)),
    ],
    ids=str,
)
def test_a_wrong_norm_shows(ranks: Ranks, broken: str, model: str, split: Split) -> None:
    """Negative controls: the loss before the first update is right, the norm at once off by over a thousandth."""
    config = config_of(model, **split.overrides)
    results = ranks.run(split.processes, bodies.train, config=config, steps=STEPS, broken=broken)
    with pytest.raises(Difference, match=r"^grad_norms\[0\] on rank 0"):
        compare_curves(results, whole(ranks, model), tolerance=1e-3)
