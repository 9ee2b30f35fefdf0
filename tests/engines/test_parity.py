"""Identity 2 (docs/parametrization.md, section 7): the parametrization does not see the layout.

Every cell of the matrix (tests/helpers/matrix.py) is compared with the same model in one process under the DeepSpeed
engine: initial values to the last bit, every tensor's rate, epsilon and decay, and losses and gradient norms over some
steps in fp32, a fresh batch of real text each step. Data-parallel ranks have data of their own.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from mup_megatron.data.prepare import prepare
from mup_megatron.patches import ALL_PATCHES
from tests.helpers import bodies
from tests.helpers.comparison import Difference
from tests.helpers.distributed import RankError, Ranks
from tests.helpers.layouts import STEPS, Split, check
from tests.helpers.matrix import MATRIX, MODELS, QUICK, config_of, is_gated, row
from tests.helpers.parity import Page


@pytest.fixture(scope="module")
def reference(ranks: Ranks) -> Any:
    """Runs of the unsharded models, made when first asked for."""

    @cache
    def run(model: str, **overrides: Any) -> dict[str, Any]:
        config = config_of(model, **overrides)
        prepare(config)
        return ranks.run(1, bodies.train, config=config, steps=STEPS)[0]

    return run


def trained(ranks: Ranks, model: str, split: Split, broken: str = "nothing", **overrides: Any) -> list[dict[str, Any]]:
    config = config_of(model, split, **overrides)
    return ranks.run(split.processes, bodies.train, config=config, steps=STEPS, broken=broken)


@pytest.mark.parametrize(
    ("model", "split"),
    [
        pytest.param(*cell, id=f"{cell[0]}: {row(*cell)[2]}", marks=() if cell in QUICK else pytest.mark.slow)
        for cell in MATRIX
    ],
)
def test_layout_changes_nothing(ranks: Ranks, reference: Any, parity: Page, model: str, split: Split) -> None:
    with parity.cell(*row(model, split)) as cell:
        whole = reference(model)
        results = trained(ranks, model, split)
        cell.add(results, whole)
        check(results, whole, split, is_gated(model))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "tied"), [("gpt3, mixed", False), ("llama, mixed", True)])
def test_the_other_kind_of_head(ranks: Ranks, reference: Any, model: str, tied: bool) -> None:
    """GPT-3 style with a head of its own, Llama style with a tied one."""
    head: dict[str, Any] = {"model__share_embeddings_and_output_weights": tied}
    split = Split(1, tensor=2, data=2, sequence=True)
    whole = reference(model, **head)
    assert ("output_layer.weight" in whole["initial"]) is not tied
    check(trained(ranks, model, split, **head), whole, split, is_gated(model))


QUICK_REGIMES = (
    *("gpt3", "gpt3, mixed", "gpt3, head_size"),
    *("llama, mixed", "llama, head_size", "llama, mla", "llama, qk-norm"),
)


@pytest.mark.parametrize(
    "model", [pytest.param(m, marks=() if m in QUICK_REGIMES else pytest.mark.slow) for m in MODELS]
)
def test_the_regime_can_tell(reference: Any, model: str) -> None:
    """The loss falls by half a nat and stays above one: neither memorised nor at the edge of divergence."""
    losses = reference(model)["losses"]
    assert losses[0] - losses[-1] > 0.5
    assert losses[-1] > 1.0


def test_the_matrix_is_large_enough() -> None:
    assert len({row(*cell) for cell in MATRIX}) == len(MATRIX) >= 200
    assert set(MATRIX) >= QUICK


def test_a_rank_that_lacks_a_tensor_is_told() -> None:
    whole: dict[str, Any] = {"initial": {"weight": 1.0}, "groups": {"weight": ()}}
    with pytest.raises(Difference, match="not every rank holds weight"):
        check([whole, {"initial": {}, "groups": {}}], whole, Split(0, data=2))


@pytest.mark.parametrize(
    ("broken", "model", "split", "why"),
    [
        ("no_finalize_model_grads", "gpt3", Split("plain", data=2), r"grad_norms\[0\] on rank 0"),
        ("no_config_overrides", "gpt3", Split("plain"), "group of .*weight on rank 0"),
        pytest.param(
            *("experts_by_local_number", "moe", Split("plain", expert=2, data=2), r"no rank holds .*local_experts\.2"),
            marks=pytest.mark.slow,
        ),
        ("layers_by_local_number", "gpt3", Split("plain", pipeline=2), r"no rank holds .*decoder\.layers\.2"),
        pytest.param(
            *("mean_of_micro_batches", "t5", Split("plain", data=2), r"losses\[0\] on rank 0"), marks=pytest.mark.slow
        ),
        pytest.param(
            *("t5_bias_gradient_of_own_heads", "t5 relative", Split("plain", tensor=2), r"grad_norms\[0\] on rank 0"),
            marks=pytest.mark.slow,
        ),
        ("sequence_in_order", "gpt3", Split("plain", context=2), r"losses\[0\] on rank 0"),
        ("fsdp2_of_each_rank_alone", "gpt3", Split("fsdp2", data=2), r"grad_norms\[0\] on rank 0"),
        pytest.param(
            *("fsdp2_embedding_alone", "gpt3", Split("fsdp2", data=2), "got mixed torch.Tensor and DTensor"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("no_announced_experts", "moe", Split(1, expert=2, data=2), r"losses\[0\] on rank 0"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_without_it_the_comparison_fails(
    ranks: Ranks, reference: Any, broken: str, model: str, split: Split, why: str
) -> None:
    """`why` is what the comparison says of it: the quantity that differs, and the tensor."""
    whole = reference(model)
    with pytest.raises((Difference, RankError), match=why):
        check(trained(ranks, model, split, broken), whole, split, is_gated(model))


@pytest.mark.slow
@pytest.mark.parametrize("split", [Split(1, expert=2, data=2), Split(1, tensor=2, expert=2, data=2, sequence=True)])
def test_deepspeed_s_own_norm_of_experts_is_ours(ranks: Ranks, reference: Any, split: Split) -> None:
    """An oracle for `clip`: what DeepSpeed 0.19 works out for itself where experts are spread over ranks."""
    whole = reference("moe")
    check(trained(ranks, "moe", split, "clipped_by_deepspeed_s_own_norm"), whole, split)


_PLAIN = ("gpt3", Split("plain"))
PATCHES: dict[str, tuple[str, Split]] = {
    "cpu-schedule": _PLAIN,
    "cpu-schedule-1f1b": ("gpt3", Split("plain", pipeline=2)),
    "cpu-schedule-interleaved": ("gpt3", Split("plain", pipeline=2, virtual=2)),
    "cpu-grad-norm": _PLAIN,
    "cpu-grad-norm-group": _PLAIN,
    "cpu-l2-norm": _PLAIN,
    "cpu-clip-grad": _PLAIN,
    "cpu-fp32-optimizer": _PLAIN,
    "cpu-mixed-precision-optimizer": ("gpt3", Split("distributed")),
    "cpu-distributed-optimizer": ("gpt3", Split("distributed")),
    "cpu-tied-embedding": ("llama tied", Split("plain", pipeline=2)),
    "cpu-gradient-buckets": _PLAIN,
    "cpu-torch-fsdp2": ("gpt3", Split("fsdp2")),
    "cpu-context-parallel-rotary": ("llama", Split("plain", context=2)),
    "cpu-context-parallel-yarn": ("mla yarn", Split("plain", context=2)),
}


@pytest.mark.parametrize(
    "patch", [name for name in PATCHES if next(p for p in ALL_PATCHES if p.name == name).is_needed(cuda=False)]
)
def test_without_the_patch_it_does_not_run(ranks: Ranks, patch: str) -> None:
    """The cells run with it: they are of the matrix, or of one rank of it."""
    model, split = PATCHES[patch]
    config = config_of(model, split)
    prepare(config)
    with pytest.raises(RankError):
        ranks.run(split.processes, bodies.train, config=config, steps=1, broken=f"patch:{patch}")


def test_without_its_patch_bf16_does_not_run(ranks: Ranks) -> None:
    config = config_of("gpt3", Split("plain"), training__precision="bf16")
    prepare(config)
    ranks.run(1, bodies.train, config=config, steps=1)
    with pytest.raises(RankError):
        ranks.run(1, bodies.train, config=config, steps=1, broken="patch:cpu-float16-optimizer")


def test_every_patch_is_taken_out_somewhere() -> None:
    elsewhere = {
        *(
            "cpu-current-device",
            "cpu-get-rng-state",
            "cpu-set-rng-state",
            "deepspeed-no-shm-build",
            "cpu-compile-at-first-call",
        ),  # tests/patches/test_patches.py
        *("cpu-alltoall-stream", "cpu-alltoall-splits"),  # tests/model/layers/test_architectures.py
        *("mla-no-te-linear", "mla-local-attention"),  # there too
        "mtp-no-te-linear",  # tests/megatron_training/test_megatron_development.py
        *(
            "checkpoint-no-server-process",
            "checkpoint-no-server-process-0.16",
            "checkpoint-no-fork",
        ),  # tests/engines/test_resume.py
        *("cpu-checkpoint-preload", "cpu-float16-optimizer"),
        "bert-head-norm",  # tests/model/bert/test_bert_training.py
        "cpu-pipeline-shapes",  # tests/megatron_training/test_megatron_variants.py
        *(f"cpu-layer-wise-{name}" for name in ("norm", "norm-group", "gather")),  # test_megatron_muon.py beside it
    }
    assert {patch.name for patch in ALL_PATCHES} == elsewhere | set(PATCHES)
