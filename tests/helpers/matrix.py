"""The matrix of `./dev parity`: models, and the layouts that each is split into.

tests/engines/test_parity.py compares every cell with one process. Other tests take its models.
"""

from __future__ import annotations

from typing import Any

from tests.helpers.configs import HEAD_SIZE, MIXED, MLA, MOE, T5, make, make_t5
from tests.helpers.layouts import Split
from tests.helpers.parity import Cell

# A rate without spikes of the gradient: in one, its norm is a thousand times as sensitive to rounding.
_RATE = {"hparams__lr": 3e-3}
# Four layers, so that they can be four stages.
_DEEP = {"model__num_layers": 4, **_RATE}
YARN = {"model__rope_type": "yarn", "model__mscale_all_dim": 1.0, "model__q_lora_rank": None}
BIAS = {
    "model__moe_router_score_function": "sigmoid",
    "model__moe_router_enable_expert_bias": True,
    "model__moe_router_bias_update_rate": 0.01,
}
_GROUPS = {
    "model__moe_router_num_groups": 2,
    "model__moe_router_group_topk": 1,
    "model__moe_router_pre_softmax": True,
    "model__moe_router_topk_scaling_factor": 2.0,
}
# One micro-batch holds what the loss is taken over, so the micro-batch must not follow the layout.
_AUX = {"model__moe_router_load_balancing_type": "aux_loss", "training__global_batch_size": 4}
_ZERO_INIT = {"parametrization__zero_init_readout": True, "parametrization__zero_init_query": True}
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
# Llama in two layers: growth, overrides.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "moe": (MOE, {}),
    "moe-alltoall": (MOE, {"model__moe_token_dispatcher_type": "alltoall"}),
    "moe-expert-bias": (MOE, BIAS),
    "moe-groups": (MOE, _GROUPS),
    "moe-aux-loss": (MOE, _AUX),
    "moe-mtp": (MOE, {"model__mtp_num_layers": 2, "hparams__output_multiplier": 2.0}),
    "mla": (MLA, {}),
    "mla-sdpa": (MLA, {"model__core_attention": "sdpa"}),
    "mla-yarn": (MLA, YARN),
    "mla-learned-positions": (MLA, {"model__position_embedding_type": "learned_absolute"}),
    "mtp": (MIXED, {"model__mtp_num_layers": 1}),
    "qk-norm": (MIXED, {"model__qk_layernorm": True}),
    "sdpa": (MIXED, {"model__core_attention": "sdpa"}),
    "frozen-gains": (MIXED, {"model__norm_gains": "frozen"}),
    "no-gains": (MIXED, {"model__norm_gains": "none"}),
    "zero-init": (MIXED, _ZERO_INIT),
}
# Architecture, growth, overrides.
_TWO_LAYERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gpt3, mixed": ("gpt3", MIXED, {}),
    "gpt3, head_size": ("gpt3", HEAD_SIZE, {}),
    "llama, mixed": ("llama", MIXED, {}),
    "llama, head_size": ("llama", HEAD_SIZE, {}),
    **{f"llama, {case}": ("llama", growth, {**_RATE, **own}) for case, (growth, own) in CASES.items()},
}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    **_TWO_LAYERS,
    "gpt3": ("gpt3", MIXED, _DEEP),
    "llama": ("llama", HEAD_SIZE, _DEEP),
    "llama tied": ("llama", MIXED, {**_DEEP, "model__share_embeddings_and_output_weights": True}),
    "moe": ("llama", MOE, {**_DEEP, "model__moe_layer_freq": [0, 1, 1, 1]}),
    "moe bias": ("llama", MOE, {**_DEEP, **BIAS, "model__moe_layer_freq": [0, 1, 1, 1]}),
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
    "t5": ("t5", T5, {**_RATE, "training__decoder_seq_length": 24}),
    "t5 rope": (
        "t5",
        T5,
        {
            **_RATE,
            "model__position_embedding_type": "rope",
            "model__share_embeddings_and_output_weights": False,
            "model__core_attention": "sdpa",
        },
    ),
    "t5 relative": ("t5", T5, {**_RATE, "training__decoder_seq_length": 24, **_RELATIVE}),
}
# Under DeepSpeed; partitioned optimizers have two data-parallel ranks.
ZERO = [
    *(Split(stage, data=2) for stage in range(4)),
    Split(3, data=4),
    Split(0, tensor=2),
    *(Split(stage, tensor=2, data=2, sequence=sequence) for sequence in (False, True) for stage in range(4)),
    Split(0, tensor=4),
    Split(0, tensor=4, sequence=True),
]
ZERO_FEW = [Split(0, tensor=2, sequence=True), Split(1, tensor=2, data=2, sequence=True)]
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
RULES_FEW = [*FEW, Split(1, tensor=2), Split(3, data=2)]
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
    *((model, split) for model in ("gpt3, mixed", "gpt3, head_size") for split in ZERO),
    *((model, split) for model in ("llama, mixed", "llama, head_size") for split in ZERO),
    # The auxiliary loss of a batch is not the mean of its parts'.
    *((f"llama, {case}", split) for case in CASES for split in ZERO_FEW if (case, split.data) != ("moe-aux-loss", 2)),
    # Without sequence parallelism megatron-core trains no experts; these must sum gradients over heads all the same.
    *((f"llama, {case}", Split(0, tensor=2)) for case in ("mla", "qk-norm")),
    *(("gpt3", split) for split in DENSE),
    *(("llama", split) for split in FEW),
    *(("llama tied", split) for split in (*FEW, Split("plain", pipeline=4))),
    *(("moe", split) for split in EXPERTS),
    *((model, split) for model in ("moe bias", "moe alltoall", "mla moe") for split in EXPERTS_FEW),
    *((model, split) for model in ("mla", "mtp", "qk-norm") for split in FEW),
    # A stage without experts, with the distributed optimizer of those that have some; and ZeRO 3's hooks on both kinds.
    *(("moe", split) for split in (Split("plain", pipeline=4), Split("distributed", pipeline=4), Split(3, data=2))),
    ("mla moe", Split(3, data=2)),
    *((model, split) for model in ("batch and tokens", "unit scale", "per tensor") for split in RULES_FEW),
    *((model, split) for model in ("more experts", "every rule") for split in (*EXPERTS_FEW, *EXPERTS_OF_FOUR)),
    *CONTEXT,
    *FULLY_SHARDED,
    *(("t5", split) for split in T5_SPLITS),
    *(("t5 rope", split) for split in (T5_SPLITS[4], T5_SPLITS[-2])),
    *(("t5 relative", split) for split in T5_RELATIVE),
]
QUICK = {
    ("gpt3, mixed", Split(3, data=2)),
    ("llama, mixed", Split(2, data=2)),
    ("llama, mixed", Split(1, tensor=2, data=2, sequence=True)),
    ("llama, mla", Split(0, tensor=2)),
    ("gpt3", Split("plain", pipeline=2, virtual=2)),
    ("llama", Split("plain", context=2)),
    ("gpt3", Split("fsdp2", data=2)),
}


def _cover() -> list[tuple[str, Split]]:
    """Cells of the matrix in which every model and every layout stands at least once; the quick ones are among them."""
    models: set[str] = set()
    splits: set[Split] = set()
    cells = []
    for cell in sorted(MATRIX, key=lambda cell: cell not in QUICK):
        if cell in QUICK or cell[0] not in models or cell[1] not in splits:
            models.add(cell[0])
            splits.add(cell[1])
            cells.append(cell)
    return cells


COVER = _cover()


def config_of(model: str, split: Split | None = None, **overrides: Any) -> Any:
    """A model's config in a layout; without one, in one process."""
    architecture, growth, own = MODELS[model]
    layout = split.overrides if split else {"parallel__zero_stage": 0}
    keys = {**own, **layout, **overrides}
    return make_t5(**keys) if architecture == "t5" else make(growth, architecture, **keys)


def is_gated(model: str) -> bool:
    """Whether its MLPs have a gate."""
    return MODELS[model][0] == "llama"


def row(model: str, split: Split) -> Cell:
    """Architecture, growth and layout, as docs/reports/parity.md calls them."""
    if model in _TWO_LAYERS:  # their rows say TP and DP of 1 too
        architecture, growth = model.split(", ")
        sequence = ", SP" if split.sequence else ""
        return architecture, growth, f"TP {split.tensor}, DP {split.data}{sequence}, ZeRO {split.state}"
    return model, "head_size" if MODELS[model][1] is HEAD_SIZE else "mixed", str(split)
