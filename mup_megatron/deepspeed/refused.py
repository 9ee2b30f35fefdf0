"""What DeepSpeed would get silently wrong (docs/upstream.md). Public names: `refuse`, `Replaced`."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from mup_megatron.engines.deepspeed_mpu import tensor_parallel_size
from mup_megatron.engines.setup.deepspeed import half_problem
from mup_megatron.mup.foreign import check_gates
from mup_megatron.mup.layer import MuReadout
from mup_megatron.util.errors import UserError

_FLOAT16 = ("float16", "fp16", "half", "torch.float16")
"""Names that DeepSpeed takes (runtime/config_utils.py, DtypeEnum)."""


def refuse(model: torch.nn.Module, settings: dict[str, Any], mpu: Any, mesh: Any = None) -> None:
    """Refuses a combination before anything is built.

    Args:
        model: to be trained.
        settings: DeepSpeed's config.
        mpu: as DeepSpeed wants it; None without model parallelism.
        mesh: `mesh_param` of deepspeed.initialize.

    Raises:
        UserError: names the key or parameter, and what works.
    """
    stage = (settings.get("zero_optimization") or {}).get("stage", 0)
    for precision in ("bf16", "fp16"):
        if _enabled(settings, precision) and (problem := half_problem(precision, stage)):
            raise UserError(f"zero_optimization.stage: {problem}")
    if _enabled(settings, "torch_autocast") and settings["torch_autocast"].get("dtype") in _FLOAT16 and stage > 0:
        raise UserError(
            f"torch_autocast.dtype: at ZeRO {stage} DeepSpeed clips gradients that the loss scale is still in, and "
            "does not lower the scale where they overflow; expected bfloat16, or the fp16 block"
        )
    _refuse_mesh(settings, mesh, mpu, stage)
    check_gates(model)
    parameters = dict(model.named_parameters())
    size = tensor_parallel_size()
    for name, parameter in parameters.items():
        if isinstance(parameter, DTensor):
            raise UserError(f"{name}: is a DTensor, which DeepSpeed does not know; expected fully_shard for the rest")
        if size > 1 and mpu is None and getattr(parameter, "tensor_model_parallel", False):
            raise UserError(
                f"mpu: missing; {name} is split over {size} tensor-parallel ranks, whose first DeepSpeed would "
                "broadcast over all; expected mpu=megatron.core.parallel_state"
            )
        if not getattr(parameter, "allreduce", True):
            _refuse_experts(name, parameter, stage)
    pipeline = getattr(mpu, "get_pipeline_model_parallel_world_size", lambda: 1)()
    if pipeline > 1:
        raise UserError(f"mpu: {pipeline} pipeline stages, which DeepSpeed's engine does not run; expected 1")


class Replaced:
    """What AutoTP may not replace: it puts layers of its own in the place of the model's, and keeps Parameters mostly.

    A Parameter that it keeps has its infinite shape, which is of the whole tensor, and its place in the optimizer's
    groups. A layer with a forward multiplier would lose it.

    Args:
        model: before deepspeed.initialize.
        settings: DeepSpeed's config.
    """

    def __init__(self, model: torch.nn.Module, settings: dict[str, Any]) -> None:
        self._size = (settings.get("tensor_parallel") or {}).get("autotp_size", 0)
        self._parameters = dict(model.named_parameters())
        self._readouts = {name: module for name, module in model.named_modules() if isinstance(module, MuReadout)}

    def check(self, model: torch.nn.Module) -> None:
        """Raises UserError where a tensor or a readout of the model is another one now."""
        if self._size < 2:
            return
        parameters, modules = dict(model.named_parameters()), dict(model.named_modules())
        for name, readout in self._readouts.items():
            if modules.get(name) is not readout:
                raise UserError(
                    f"tensor_parallel.autotp_size: DeepSpeed put a layer of its own in the place of {name}, whose "
                    "multiplier is lost; expected a model of mup_megatron.mup.prepare_hf, or a partition_config that "
                    f"skips {name}"
                )
        for name, parameter in self._parameters.items():
            if parameters.get(name) is not parameter:
                raise UserError(
                    f"tensor_parallel.autotp_size: DeepSpeed put a Parameter of its own in the place of {name}, which "
                    f"no optimizer group of µP's has; expected a partition_config that skips it"
                )


def _refuse_mesh(settings: dict[str, Any], mesh: Any, mpu: Any, stage: int) -> None:
    """Below ZeRO 3 DeepSpeed averages gradients over the mesh's data-parallel ranks alone (utils/groups.py)."""
    key = "mesh_param" if mesh else "sequence_parallel_size"
    size = mesh[1] if mesh else settings.get(key, 1) if "data_parallel_size" in settings else 1
    if size > 1 and stage < 3 and not hasattr(mpu, "get_sequence_data_parallel_group"):
        raise UserError(
            f"{key}: at ZeRO {stage} DeepSpeed would not sum gradients over the {size} ranks that share a sequence; "
            "expected mpu=deepspeed.runtime.sequence_parallel.parallel_state_sp, or zero_optimization.stage 3"
        )


def _refuse_experts(name: str, parameter: Any, stage: int) -> None:
    if stage == 3:
        raise UserError(
            f"zero_optimization.stage: {name} is an expert's, which ZeRO 3 would treat as all ranks'; expected 0 to 2"
        )
    if not hasattr(parameter, "group_name"):
        raise UserError(
            f"{name}: is an expert's, and DeepSpeed was not told over which ranks (no group_name), so that it would "
            "average it over all; expected deepspeed.moe layers (their gates as deepspeed.moe makes them), or "
            "parallel.engine: deepspeed of this project"
        )


def _enabled(settings: dict[str, Any], block: str) -> bool:
    return bool((settings.get(block) or {}).get("enabled", False))
