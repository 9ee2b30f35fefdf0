"""Options that compute on CUDA alone: what a CPU can see of why the rules hold there."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from typing import Any

import pytest
import torch

from mup_megatron.model.layers.embedding import scale_input
from mup_megatron.model.layers.tensor_spec import set_spec, spec_of
from mup_megatron.parallel.ranks import Rank
from mup_megatron.patches.cpu import for_cpu
from mup_megatron.rules.shapes import Init, TensorSpec
from tests.helpers.distributed import Ranks
from tests.helpers.installed import HAS_TRAINING

pytestmark = pytest.mark.skipif(
    not HAS_TRAINING,
    reason="the calls that are looked at are those of megatron-core 0.19",
)

# Calls that refused_options.py and tensor_spec.py rely on, by the module that makes them.
CALLS = [
    ("models.gpt.fine_grained_callables", "hidden_states = layer.mlp_bda(layer.training, layer.config.bias_dropout_f"),
    ("models.gpt.fine_grained_callables", "layer.mlp.route(pre_mlp_layernorm_output)"),
    ("models.gpt.gpt_model", "decoder_input = self.embedding(input_ids=input_ids, position_ids=position_ids)"),
    ("models.gpt.gpt_model", "logits, _ = self.output_layer("),
    ("models.common.model_chunk_schedule_plan", "``GPTModel._postprocess``"),
    ("optimizer", "all_dense_model_chunks = [[model_chunks[0]], model_chunks[1:]]"),
    ("optimizer_param_scheduler", "param_group['lr'].fill_(self.get_lr(param_group))"),
    ("distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer", 'setattr(dist_param, "orig_param", orig_param)'),
]


@pytest.mark.parametrize(("module", "call"), CALLS)
def test_upstream_still_calls_it(module: str, call: str) -> None:
    assert call in inspect.getsource(importlib.import_module(f"megatron.core.{module}"))


def test_both_devices_step_at_a_groups_own_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """--optimizer-cpu-offload: rate, epsilon and decay of a group reach the optimizer that holds its parameters."""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    monkeypatch.setattr(
        HybridDeviceOptimizer, "_init_sub_optimizers", for_cpu(HybridDeviceOptimizer._init_sub_optimizers)
    )
    parameters = [torch.nn.Parameter(torch.ones(2, 2)) for _ in range(3)]
    groups = [
        {"params": parameters[:2], "lr": 5e-3, "eps": 5e-9, "weight_decay": 0.2},
        {"params": parameters[2:], "lr": 1e-2, "eps": 1e-8, "weight_decay": 0.1},
    ]
    optimizer = HybridDeviceOptimizer(
        groups,
        offload_fraction=1.0,
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=torch.optim.AdamW,
        pin_cpu_grads=False,
        pin_cpu_params=False,
        overlap_cpu_optimizer_d2h_h2d=False,
        lr=1.0,
    )
    for group in optimizer.param_groups:  # what the schedule does before a step
        group["lr"] = group["lr"] / 2
    optimizer._sync_hdo_param_groups_to_sub_optimizers()
    found = {
        id(parameter): (group["lr"], group["eps"], group["weight_decay"])
        for one in optimizer.sub_optimizers
        for group in one.param_groups
        for parameter in group["params"]
    }
    hidden, rest = (2.5e-3, 5e-9, 0.2), (5e-3, 1e-8, 0.1)
    assert [found[id(parameter)] for parameter in parameters] == [hidden, hidden, rest]


def test_a_parameter_in_the_place_of_another() -> None:
    """--use-megatron-fsdp: the optimizer's parameter has the record of the one whose place it took, and no other."""
    spec = TensorSpec(shape=(4, 2), fan_in=1, fan_out=0, init=Init.WEIGHT)
    built, sharded = torch.nn.Parameter(torch.ones(4, 2)), torch.nn.Parameter(torch.ones(4))
    assert spec_of(sharded) is None
    set_spec(built, spec)
    sharded.orig_param = built
    assert spec_of(sharded) == spec


def deferred(rank: Rank, *, multiplier: float) -> dict[str, Any]:
    """What the head keeps for its weight's gradient."""
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer.transformer_config import TransformerConfig

    from mup_megatron.parallel import runtime
    from mup_megatron.parallel.layout import Layout

    layout = Layout(world_size=1, tensor=1, data=1, sequence_parallel=False, zero_stage=0, micro_batches=1)
    runtime.start_distributed(layout, rank, 1)
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, use_cpu_initialization=True)
    kept: list[torch.Tensor] = []
    head = ColumnParallelLinear(
        4,
        8,
        config=config,
        init_method=torch.nn.init.ones_,
        bias=False,
        embedding_activation_buffer=kept,
        grad_output_buffer=[],
    )
    config.defer_embedding_wgrad_compute, config.wgrad_deferral_limit = True, 0
    scale_input(head, multiplier)
    hidden = torch.arange(8.0).view(2, 1, 4)
    head(hidden)
    return {"kept": kept[0].detach().tolist(), "hidden": hidden.tolist()}


def test_a_head_whose_gradient_waits(ranks: Ranks) -> None:
    """--defer-embedding-wgrad-compute: the gradient is computed from the input with its multiplier."""
    found = ranks.run(1, deferred, multiplier=0.25)[0]
    assert torch.equal(torch.tensor(found["kept"]), 0.25 * torch.tensor(found["hidden"]))
