"""Identity 2 (docs/parametrization.md, section 7) across engines, pipelines and experts: the matrix of `./dev parity`.

As in tests/engines/test_layout_invariance.py: every cell against the same model in one process under the DeepSpeed
engine, 20 steps in fp32 on real text, data-parallel ranks with data of their own.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import numpy as np
import pytest

from mup_megatron.data.prepare import prepare
from mup_megatron.patches import ALL_PATCHES
from tests.engines.test_layout_invariance import STEPS
from tests.helpers import bodies
from tests.helpers.comparison import Difference, compare_curves, compare_groups, compare_initial
from tests.helpers.configs import HEAD_SIZE, MIXED, MLA, MOE, T5, make, make_t5
from tests.helpers.distributed import RankError, Ranks
from tests.helpers.parity import Page

_DEEP = {"model__num_layers": 4, "hparams__lr": 3e-3}
_BIAS = {
    "model__moe_router_score_function": "sigmoid",
    "model__moe_router_enable_expert_bias": True,
    "model__moe_router_bias_update_rate": 0.01,
}
_HORIZON = {
    "parametrization__batch": "sqrt_sde",
    "parametrization__tokens": "fitted:-0.32",
    "parametrization__weight_decay": "timescale",
    "tuning__global_batch_size": 4,
    "tuning__train_steps": 10,
}
_EXPERTS = {"model__num_moe_experts": 8, "base__num_moe_experts": 4, "parametrization__experts": "any_share"}
_PER_TENSOR = {
    "embedding": {"lr": 2.0, "init": 0.5},
    "attention_q": {"init": 0.25},
    "mlp": {"lr": 0.5},
    "biases": {"lr": 3.0},
}
# Few buckets, so that a sequence of 24 has distances of all of them; a bias of the size of the logits.
_RELATIVE = {
    "model__position_embedding_type": "relative",
    "model__relative_attention_num_buckets": 8,
    "model__relative_attention_max_distance": 20,
    "hparams__relative_bias_multiplier": 8.0,
}
# architecture, growth, overrides; four layers, so that they can be four stages.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gpt3": ("gpt3", MIXED, _DEEP),
    "llama": ("llama", HEAD_SIZE, _DEEP),
    "llama tied": ("llama", MIXED, {**_DEEP, "model__share_embeddings_and_output_weights": True}),
    "moe": ("llama", MOE, {**_DEEP, "model__moe_layer_freq": [0, 1, 1, 1]}),
    "moe bias": ("llama", MOE, {**_DEEP, **_BIAS, "model__moe_layer_freq": [0, 1, 1, 1]}),
    "moe alltoall": (
        "llama",
        MOE,
        {**_DEEP, "model__moe_layer_freq": 2, "model__moe_token_dispatcher_type": "alltoall"},
    ),
    "mla": ("llama", MLA, _DEEP),
    "mla yarn": ("llama", MLA, {**_DEEP, "model__rope_type": "yarn"}),
    "mla moe": (
        "llama",
        {
            "model": {**MLA["model"], **{k: v for k, v in MOE["model"].items() if k.startswith(("moe_", "num_moe"))}},
            "base": {**MLA["base"], **{k: v for k, v in MOE["base"].items() if k.startswith("moe_")}},
        },
        {**_DEEP, "model__moe_layer_freq": [0, 1, 1, 1]},
    ),
    "mtp": ("llama", MIXED, {**_DEEP, "model__mtp_num_layers": 1}),
    "qk-norm": ("llama", MIXED, {**_DEEP, "model__qk_layernorm": True}),
    "batch and tokens": ("llama", MIXED, {**_DEEP, **_HORIZON}),
    "unit scale": ("gpt3", MIXED, {**_DEEP, "parametrization__scaling": "unit"}),
    "per tensor": ("gpt3", MIXED, {**_DEEP, "hparams__per_tensor": _PER_TENSOR}),
    "more experts": ("llama", MOE, {**_DEEP, **_EXPERTS, "model__moe_layer_freq": [0, 1, 1, 1]}),
    "every rule": (
        "llama",
        MOE,
        {
            **_DEEP,
            **_HORIZON,
            **_EXPERTS,
            "model__moe_layer_freq": 2,
            "base__num_layers": 2,
            "parametrization__depth": "completep",
            "parametrization__scaling": "unit",
            "hparams__per_tensor": {"embedding": {"lr": 2.0}, "experts": {"init": 0.5}, "router": {"lr": 0.5}},
        },
    ),
    "t5": ("t5", T5, {"hparams__lr": 3e-3, "training__decoder_seq_length": 24}),
    "t5 rope": (
        "t5",
        T5,
        {
            "hparams__lr": 3e-3,
            "model__position_embedding_type": "rope",
            "model__share_embeddings_and_output_weights": False,
            "model__core_attention": "sdpa",
        },
    ),
    "t5 relative": ("t5", T5, {"hparams__lr": 3e-3, "training__decoder_seq_length": 24, **_RELATIVE}),
}
UNGATED = ("gpt3", "unit scale", "per tensor", "t5", "t5 rope", "t5 relative")


@dataclasses.dataclass(frozen=True)
class Split:
    """A layout; `state` is the ZeRO stage, or "plain" or "distributed" for Megatron's optimizer, or "fsdp2"."""

    state: int | str
    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    group: int | None = None
    expert: int = 1
    expert_tensor: int | None = None
    context: int = 1
    data: int = 1
    sequence: bool = False
    overlap: bool = False
    last: int | None = None
    laid_out: str | None = None
    stages_first: bool = False

    @property
    def processes(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def overrides(self) -> dict[str, Any]:
        state = (
            {"zero_stage": self.state}
            if isinstance(self.state, int)
            else {"engine": "megatron", "use_distributed_optimizer": self.state == "distributed"}
            | ({"use_torch_fsdp2": True} if self.state == "fsdp2" else {})
        )
        keys = {
            **state,
            "tensor_model_parallel_size": self.tensor,
            "pipeline_model_parallel_size": self.pipeline,
            "virtual_pipeline_model_parallel_size": self.virtual if self.virtual > 1 else None,
            "microbatch_group_size_per_virtual_pipeline_stage": self.group,
            "expert_model_parallel_size": self.expert,
            "expert_tensor_parallel_size": self.expert_tensor,
            "context_parallel_size": self.context,
            "sequence_parallel": self.sequence,
            "overlap_grad_reduce": self.overlap,
            "overlap_param_gather": self.overlap and self.state == "distributed",
            "num_layers_in_last_pipeline_stage": self.last,
            "pipeline_model_parallel_layout": self.laid_out,
            "use_tp_pp_dp_mapping": self.stages_first,
        }
        # Two micro-batches each, or four where the interleaved schedule wants a multiple of the stages.
        return {f"parallel__{key}": value for key, value in keys.items()} | {
            "training__micro_batch_size": 4 // self.data if self.virtual == 1 else 2 // self.data
        }

    def __str__(self) -> str:
        parts = [f"TP {self.tensor}"] if self.tensor > 1 else []
        parts += [f"PP {self.pipeline}"] if self.pipeline > 1 else []
        parts += [f"VPP {self.virtual}"] if self.virtual > 1 else []
        parts += [f"groups of {self.group}"] if self.group else []
        parts += [f"last stage {self.last}"] if self.last else []
        parts += [f"stages {self.laid_out}"] if self.laid_out else []
        parts += ["stages before replicas"] if self.stages_first else []
        parts += [f"EP {self.expert}"] if self.expert > 1 else []
        parts += [f"ETP {self.expert_tensor}"] if self.expert_tensor else []
        parts += [f"CP {self.context}"] if self.context > 1 else []
        parts += [f"DP {self.data}"] if self.data > 1 else []
        parts += ["SP"] if self.sequence else []
        state = f"ZeRO {self.state}" if isinstance(self.state, int) else f"Megatron, {self.state} optimizer"
        return ", ".join([*parts, state, *(["overlap"] if self.overlap else [])])


DENSE = [
    Split("plain"),
    Split("plain", data=2),
    Split("distributed", data=2),
    Split("distributed", data=4, overlap=True),
    Split("plain", data=2, overlap=True),
    Split("plain", tensor=2),
    Split("distributed", tensor=2, data=2, sequence=True),
    Split("plain", tensor=4, sequence=True),
    Split("plain", pipeline=2),
    Split("plain", pipeline=4),
    Split("distributed", pipeline=2, data=2),
    Split("distributed", pipeline=2, data=2, overlap=True),
    Split("plain", pipeline=2, virtual=2),
    Split("distributed", pipeline=2, virtual=2, data=2),
    Split("plain", pipeline=2, virtual=2, group=4),
    Split("plain", pipeline=2, tensor=2, sequence=True),
    Split("plain", pipeline=2, virtual=2, tensor=2, sequence=True),
    Split("plain", pipeline=2, last=1),
    Split("plain", pipeline=2, laid_out="Ettt|tL"),
    Split("plain", pipeline=2, laid_out="E|(t|)*2ttL", data=2),
    Split("distributed", pipeline=2, data=2, stages_first=True),
    Split("plain", pipeline=2, data=2, laid_out="Et|tttL", stages_first=True),
]
EXPERTS = [
    Split("plain", expert=2, data=2),
    Split("distributed", expert=2, data=2),
    Split("distributed", expert=2, data=4),
    Split("plain", expert=4, data=4),
    Split("plain", tensor=2, expert=2, expert_tensor=1, sequence=True),
    Split("distributed", tensor=2, expert=2, expert_tensor=2, data=2, sequence=True),
    Split("distributed", tensor=2, expert=4, expert_tensor=1, data=2, sequence=True),
    Split("distributed", pipeline=2, expert=2, data=2),
    Split("plain", pipeline=2, virtual=2, expert=2, data=2),
    *(Split(stage, expert=2, data=2) for stage in (0, 1, 2)),
    *(Split(stage, expert=2, data=4) for stage in (1, 2)),
    Split(1, tensor=2, expert=2, data=2, sequence=True),
]
FEW = [
    Split("distributed", tensor=2, data=2, sequence=True),
    Split("distributed", pipeline=2, data=2),
    Split("plain", pipeline=2, virtual=2, tensor=2, sequence=True),
]
EXPERTS_FEW = [
    Split("distributed", expert=2, data=2),
    Split("distributed", pipeline=2, expert=2, data=2),
    Split(1, expert=2, data=2),
]
EXPERTS_OF_FOUR = [
    Split("plain", expert=4, data=4),
    Split("distributed", tensor=2, expert=4, expert_tensor=1, data=2, sequence=True),
]
FULLY_SHARDED = [
    ("gpt3", Split("fsdp2", data=2)),  # a tied head
    ("gpt3", Split("fsdp2", data=4)),
    ("gpt3", Split("fsdp2", tensor=2, data=2, sequence=True)),
    ("llama", Split("fsdp2", data=2)),
    ("llama", Split("fsdp2", context=2, data=2)),
    ("qk-norm", Split("fsdp2", tensor=2, data=2)),
    ("moe", Split("fsdp2", data=2)),  # the shared experts' gate has one row, which one rank holds
    ("moe bias", Split("fsdp2", tensor=2, data=2, sequence=True)),
    ("mla", Split("fsdp2", tensor=2, data=2, sequence=True)),
    ("mtp", Split("fsdp2", data=2)),
]
# Upstream's T5 has no pipeline; half of the labels of its micro-batches pad.
T5_SPLITS = [
    Split("plain"),
    Split("distributed", data=2),
    Split("distributed", data=4, overlap=True),
    Split("plain", tensor=2),
    Split("distributed", tensor=2, data=2, sequence=True),
    Split("plain", tensor=4, sequence=True),
    *(Split(stage, data=2) for stage in (0, 1, 2, 3)),
    *(Split(stage, tensor=2, data=2, sequence=True) for stage in (1, 3)),
    Split(0, tensor=2),
]
T5_RELATIVE = [
    Split("plain", tensor=2),
    Split("distributed", tensor=2, data=2, sequence=True),
    *(Split(stage, data=2) for stage in (1, 3)),
    *(Split(stage, tensor=2, data=2, sequence=True) for stage in (1, 3)),
    Split(0, tensor=2),
]
CONTEXT = [
    ("llama", Split("plain", context=2)),
    ("llama", Split("plain", context=4)),
    ("llama", Split("distributed", context=2, data=2)),
    ("gpt3", Split("plain", tensor=2, context=2, sequence=True)),
    ("llama tied", Split("plain", pipeline=2, context=2)),
    ("llama tied", Split("plain", pipeline=2, virtual=2, context=2)),
    ("moe", Split("distributed", context=2, expert=2)),
    ("moe bias", Split("distributed", context=2, expert=2, data=2)),
    ("mla", Split("plain", context=2)),
    ("mla yarn", Split("plain", context=2)),
    ("qk-norm", Split("plain", context=2)),
]
MATRIX = [
    *(("gpt3", split) for split in DENSE),
    *(("llama", split) for split in FEW),
    *(("llama tied", split) for split in (*FEW, Split("plain", pipeline=4))),
    *(("moe", split) for split in EXPERTS),
    *((model, split) for model in ("moe bias", "moe alltoall", "mla moe") for split in EXPERTS_FEW),
    *((model, split) for model in ("mla", "mtp", "qk-norm") for split in FEW),
    # A stage without experts, with the distributed optimizer of those that have some; and ZeRO 3's hooks on both kinds.
    *(("moe", split) for split in (Split("plain", pipeline=4), Split("distributed", pipeline=4), Split(3, data=2))),
    ("mla moe", Split(3, data=2)),
    *(("batch and tokens", split) for split in (*FEW, Split(1, tensor=2), Split(3, data=2))),
    *(("unit scale", split) for split in (*FEW, Split(1, tensor=2), Split(3, data=2))),
    *(("per tensor", split) for split in (*FEW, Split(1, tensor=2), Split(3, data=2))),
    *((model, split) for model in ("more experts", "every rule") for split in (*EXPERTS_FEW, *EXPERTS_OF_FOUR)),
    *CONTEXT,
    *FULLY_SHARDED,
    *(("t5", split) for split in T5_SPLITS),
    *(("t5 rope", split) for split in (T5_SPLITS[4], T5_SPLITS[-2])),
    *(("t5 relative", split) for split in T5_RELATIVE),
]
QUICK = {
    ("gpt3", Split("plain", pipeline=2, virtual=2)),
    ("llama", Split("plain", context=2)),
    ("gpt3", Split("fsdp2", data=2)),
    ("t5", Split(1, tensor=2, data=2, sequence=True)),
}


def config_of(model: str, split: Split | None = None, **overrides: Any) -> Any:
    architecture, growth, own = MODELS[model]
    layout = split.overrides if split else {"parallel__zero_stage": 0}
    keys = {**own, **layout, **overrides}
    return make_t5(**keys) if architecture == "t5" else make(growth, architecture, **keys)


@pytest.fixture(scope="module")
def reference(ranks: Ranks) -> Any:
    """Runs of the unsharded models, made when first asked for."""

    @cache
    def run(model: str) -> dict[str, Any]:
        config = config_of(model)
        prepare(config)
        return ranks.run(1, bodies.train, config=config, steps=STEPS)[0]

    return run


def check(results: list[dict[str, Any]], whole: dict[str, Any], split: Split, gated: bool = True) -> None:
    """Names, initial values, groups, losses and norms of all ranks against one process."""
    if missing := set(whole["initial"]) - set().union(*(result["initial"] for result in results)):
        raise Difference(f"no rank holds {', '.join(sorted(missing))}")
    compare_groups(results, whole)
    compare_initial(results, whole, lambda name, value, rank: slices(name, value, split, rank, gated))
    compare_curves(results, whole)


def slices(name: str, whole: np.ndarray, split: Split, rank: int, gated: bool) -> np.ndarray:
    """What a rank must hold, worked out by hand."""
    ranks = split.tensor
    if ".local_experts." in name:
        ranks = split.expert_tensor or split.tensor
    own = rank % ranks
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return np.split(whole, ranks, axis=1)[own]
    if "linear_fc1" in name and gated:
        return split_gated(whole, ranks)[own]
    split_rows = (
        "linear_qkv",
        "linear_q_",
        "linear_kv_",
        "linear_q.",
        "linear_kv.",
        "linear_fc1",
        "eh_proj",
        "word_embeddings",
        "output_layer",
    )
    return np.split(whole, ranks)[own] if any(part in name for part in split_rows) else whole


def split_gated(whole: np.ndarray, ranks: int) -> list[np.ndarray]:
    gate, up = np.split(whole, 2)
    return [np.concatenate(pair) for pair in zip(np.split(gate, ranks), np.split(up, ranks), strict=True)]


@pytest.mark.parametrize(
    ("model", "split"),
    [
        pytest.param(model, split, id=f"{model}: {split}", marks=() if (model, split) in QUICK else pytest.mark.slow)
        for model, split in MATRIX
    ],
)
def test_layout_changes_nothing(ranks: Ranks, reference: Any, parity: Page, model: str, split: Split) -> None:
    with parity.cell(model, "mixed" if MODELS[model][1] is not HEAD_SIZE else "head_size", str(split)) as cell:
        whole = reference(model)
        results = ranks.run(split.processes, bodies.train, config=config_of(model, split), steps=STEPS)
        cell.add(results, whole)
        check(results, whole, split, gated=model not in UNGATED)


EP2_TP2 = Split(1, tensor=2, expert=2, data=2, sequence=True)


@pytest.mark.parametrize("model", [pytest.param(m, marks=() if m == "gpt3" else pytest.mark.slow) for m in MODELS])
def test_the_regime_can_tell(reference: Any, model: str) -> None:
    """The loss falls by half a nat and stays above one: neither memorised nor at the edge of divergence."""
    losses = reference(model)["losses"]
    assert losses[0] - losses[-1] > 0.5
    assert losses[-1] > 1.0


def test_the_matrix_is_large_enough() -> None:
    assert len(set(MATRIX)) == len(MATRIX) >= 40
    assert set(MATRIX) >= QUICK


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
        check(
            ranks.run(split.processes, bodies.train, config=config_of(model, split), steps=STEPS, broken=broken),
            whole,
            split,
            gated=model not in UNGATED,
        )


@pytest.mark.slow
@pytest.mark.parametrize("split", [Split(1, expert=2, data=2), EP2_TP2])
def test_deepspeed_s_own_norm_of_experts_is_ours(ranks: Ranks, reference: Any, split: Split) -> None:
    """An oracle for `clip`: what DeepSpeed 0.19 works out for itself where experts are spread over ranks."""
    whole = reference("moe")
    config = config_of("moe", split)
    check(
        ranks.run(split.processes, bodies.train, config=config, steps=STEPS, broken="clipped_by_deepspeed_s_own_norm"),
        whole,
        split,
    )


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
