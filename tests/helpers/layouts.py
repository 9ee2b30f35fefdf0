"""A layout, and how its run is compared with one process: names, initial values, groups, losses, gradient norms."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tests.helpers.comparison import Difference, compare_curves, compare_groups, compare_initial

STEPS = 10
"""Of both runs. `./dev parity` has 20 (tests/conftest.py)."""


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


def check(results: list[dict[str, Any]], whole: dict[str, Any], split: Split, gated: bool = True) -> None:
    """Names, initial values, groups, losses and norms of all ranks against one process. Raises Difference.

    Args:
        results: of every rank (bodies.train).
        whole: of one process.
        split: the layout of `results`.
        gated: whether the MLPs have a gate.
    """
    everywhere = split.pipeline == split.expert == 1
    for part in ("initial", "groups"):
        held = [set(result[part]) for result in results]
        names = set.intersection(*held) if everywhere else set.union(*held)
        if missing := set(whole[part]) - names:
            raise Difference(f"{'not every' if everywhere else 'no'} rank holds {', '.join(sorted(missing))}")
    compare_groups(results, whole)
    compare_initial(results, whole, lambda name, value, rank: slices(name, value, split, rank, gated))
    compare_curves(results, whole)


def slices(name: str, whole: np.ndarray, split: Split, rank: int, gated: bool) -> np.ndarray:
    """What a rank must hold of a tensor, worked out here by hand rather than by the library."""
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
