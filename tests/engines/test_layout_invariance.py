"""Identity 2 (docs/parametrization.md, section 7): the parametrization does not see the layout.

Every cell is compared with the same model in one process: initial values to the last bit, every tensor's rate, epsilon
and decay, and losses and gradient norms over 20 steps in fp32, a fresh batch of real text each step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest

from mup_megatron.data.prepare import prepare
from tests.helpers import bodies
from tests.helpers.comparison import compare_curves, compare_groups, compare_initial
from tests.helpers.configs import HEAD_SIZE, MIXED, make
from tests.helpers.distributed import Ranks
from tests.helpers.parity import Page

GROWTHS = {"mixed": MIXED, "head_size": HEAD_SIZE}
STEPS = 20

# tensor parallel, data parallel, sequence parallel, ZeRO stage; partitioned optimizers have two data-parallel ranks.
LAYOUTS = [
    *((1, 2, False, stage) for stage in range(4)),
    (1, 4, False, 3),
    (2, 1, False, 0),
    *((2, 2, sequence, stage) for sequence in (False, True) for stage in range(4)),
    (4, 1, False, 0),
    (4, 1, True, 0),
]


def config_of(architecture: str, growth: str, **overrides: Any) -> Any:
    return make(GROWTHS[growth], architecture, **overrides)


@pytest.fixture(scope="module")
def reference(ranks: Ranks) -> Any:
    """Runs of the unsharded models, made when first asked for."""

    @cache
    def run(architecture: str, growth: str) -> dict[str, Any]:
        config = config_of(architecture, growth, parallel__zero_stage=0)
        prepare(config)
        return ranks.run(1, bodies.train, config=config, steps=STEPS)[0]

    return run


def slices(name: str, whole: np.ndarray, tensor: int, rank: int, gated: bool) -> np.ndarray:
    """What a tensor-parallel rank must hold, worked out here by hand rather than by the library."""
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return np.split(whole, tensor, axis=1)[rank]
    if name.endswith("linear_fc1.weight") and gated:
        gate, up = np.split(whole, 2)
        return np.concatenate([np.split(gate, tensor)[rank], np.split(up, tensor)[rank]])
    if "linear_qkv" in name or "linear_fc1" in name or name.endswith(("word_embeddings.weight", "output_layer.weight")):
        return np.split(whole, tensor)[rank]
    return whole


def cells() -> Iterator[Any]:
    """Both architectures and both growths under every layout with --all; without it, the few that differ most."""
    few = {
        ("gpt3", "mixed"): [(1, 2, False, 3)],
        ("gpt3", "head_size"): [],
        ("llama", "mixed"): [(1, 2, False, 2), (2, 2, True, 1)],
        ("llama", "head_size"): [],
    }
    for architecture, growth, layout in itertools.product(("gpt3", "llama"), GROWTHS, LAYOUTS):
        tensor, data, sequence_parallel, stage = layout
        name = f"{architecture}-{growth}-tp{tensor}-dp{data}{'-sp' if sequence_parallel else ''}-zero{stage}"
        quick = layout in few[architecture, growth]
        yield pytest.param(architecture, growth, layout, id=name, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(("architecture", "growth", "layout"), list(cells()))
def test_layout_changes_nothing(
    ranks: Ranks,
    reference: Any,
    parity: Page,
    architecture: str,
    growth: str,
    layout: tuple[int, int, bool, int],
) -> None:
    tensor, data, sequence_parallel, stage = layout
    config = config_of(
        architecture,
        growth,
        parallel__tensor_model_parallel_size=tensor,
        parallel__sequence_parallel=sequence_parallel,
        parallel__zero_stage=stage,
        training__micro_batch_size=4 // data,  # two micro-batches each: gradients are accumulated everywhere
    )
    told = f"TP {tensor}, DP {data}{', SP' if sequence_parallel else ''}, ZeRO {stage}"
    with parity.cell(architecture, growth, told) as cell:
        whole = reference(architecture, growth)
        results = ranks.run(tensor * data, bodies.train, config=config, steps=STEPS)
        cell.add(results, whole)
        for result in results:
            assert result["initial"].keys() == whole["initial"].keys()
            assert result["groups"].keys() == whole["groups"].keys()
        gated = architecture == "llama"
        compare_initial(results, whole, lambda name, value, rank: slices(name, value, tensor, rank % tensor, gated))
        compare_groups(results, whole)
        compare_curves(results, whole)


@pytest.mark.parametrize(("architecture", "tied"), [("gpt3", False), ("llama", True)])
@pytest.mark.slow
def test_the_other_kind_of_head(ranks: Ranks, architecture: str, tied: bool) -> None:
    """GPT-3 style with a head of its own, Llama style with a tied one, under TP 2, sequence parallel, DP 2, ZeRO 1."""
    head = {"model__share_embeddings_and_output_weights": tied}
    whole = ranks.run(1, bodies.train, config=config_of(architecture, "mixed", **head), steps=STEPS)[0]
    assert ("output_layer.weight" in whole["initial"]) is not tied
    config = config_of(
        architecture,
        "mixed",
        parallel__tensor_model_parallel_size=2,
        parallel__sequence_parallel=True,
        training__micro_batch_size=2,
        **head,
    )
    results = ranks.run(4, bodies.train, config=config, steps=STEPS)
    compare_groups(results, whole)
    compare_curves(results, whole)


@pytest.mark.parametrize("growth", list(GROWTHS))
@pytest.mark.parametrize("architecture", ["gpt3", "llama"])
def test_the_regime_can_tell(reference: Any, architecture: str, growth: str) -> None:
    """The loss falls by half a nat and stays above one: neither memorised nor at the edge of divergence."""
    losses = reference(architecture, growth)["losses"]
    assert losses[0] - losses[-1] > 0.5
    assert losses[-1] > 1.0
