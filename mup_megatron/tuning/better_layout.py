"""Whether the same processes would take an optimizer step sooner in another layout, by the model of scaling.py.

Public names: `Choice`, `choices`, `on_paper`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mup_megatron.config import Config, derive
from mup_megatron.engines.setup import refuse
from mup_megatron.parallel.layout import Layout, resolve_layout
from mup_megatron.rules.table import Parametrization
from mup_megatron.tuning.memory import activation_bytes, state_bytes
from mup_megatron.tuning.scaling import Device, Step, step_of
from mup_megatron.tuning.shares import shares
from mup_megatron.util.errors import UserError
from mup_megatron.util.progress import short_bytes

_CLOSE = 0.05
"""Of the quickest layout's time: the model sees no difference that is smaller."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A layout that the config's checks accept.

    Args:
        keys: of `parallel:`, dotted, that make it of the config.
        layout: what they make.
        step: a step in it.
        memory: bytes on the fullest process, as `plan` counts them.
    """

    keys: dict[str, Any]
    layout: Layout
    step: Step
    memory: int


def on_paper(
    parametrization: Parametrization, layout: Layout, device: Device | None, memory: float | None
) -> tuple[dict[str, Any], list[str]]:
    """A step of the target and the quickest layout, as plain data and as lines; nothing but of the next token's models.

    Args:
        parametrization: of the run.
        layout: the config's.
        device: what each process runs on; None tells no time.
        memory: of a device, in bytes; None compares no layouts.
    """
    if parametrization.config.model.family != "gpt":
        return {}, []
    step = step_of(parametrization, layout, device or Device())
    if device is None:
        return {"step": {"flops": step.flops, "sent": step.sent, "bubble": step.bubble}}, [step.counts]
    plain: dict[str, Any] = {"step": step.as_json()}
    if memory is None:
        return plain, [step.counts, step.times]
    found = choices(parametrization, layout.world_size, device)
    fitting = [choice for choice in found if choice.memory <= memory]
    fits = state_bytes(parametrization, layout) + activation_bytes(parametrization, layout) <= memory
    best = fitting[0] if fitting else None
    plain["quickest"] = best and {"layout": str(best.layout), "keys": best.keys, "step": best.step.as_json()}
    said = f"of {len(found)} that the config's checks accept, {len(fitting)} fit into {short_bytes(memory)} per process"
    return plain, [step.counts, step.times, f"layout: {said}{_advice(step, fits, best) if best else ''}"]


def _advice(own: Step, fits: bool, best: Choice) -> str:
    """How the config's own layout compares with the quickest that fits, as the end of a sentence."""
    slower = own.seconds / best.step.seconds - 1
    if fits and slower < _CLOSE:
        return f"; the config's own is within {max(slower, 0.0):.1%} of the quickest"
    keys = " ".join(f"{key}={str(value).lower()}" for key, value in best.keys.items())
    how = f"{slower:.0%} slower than the quickest" if fits else "not among them; the quickest"
    seconds = f"{best.step.seconds:.3g} s on paper"
    return f"; the config's own is {how}: {best.layout}, {seconds}, {short_bytes(best.memory)}; {keys}"


def choices(parametrization: Parametrization, world_size: int, device: Device) -> list[Choice]:
    """Every layout of so many processes that the config's checks accept, the quickest first, of equals the nearest.

    Tensor parallelism stays within a node, with sequence parallelism. The context-parallel size, the interleaving, the
    micro-batch and all that is outside of `parallel:` are the config's.
    """
    held, found = shares(parametrization), []
    for keys in _keys(parametrization.config, world_size, device.node):
        try:
            config = derive(parametrization.config, {f"parallel.{key}": value for key, value in keys.items()})
            layout = resolve_layout(config, world_size)
            refuse(config, layout)
        except UserError:
            continue
        other = dataclasses.replace(parametrization, config=config)
        step = step_of(other, layout, device, held)
        memory = state_bytes(other, layout, held) + activation_bytes(other, layout)
        own = parametrization.config.parallel
        changed = {f"parallel.{key}": value for key, value in keys.items() if value != getattr(own, key)}
        found.append(Choice(keys=changed, layout=layout, step=step, memory=memory))
    return sorted(found, key=lambda choice: (choice.step.seconds, len(choice.keys)))


_STATES: tuple[dict[str, Any], ...] = (
    *({"engine": "deepspeed", "zero_stage": stage} for stage in (1, 2, 3)),
    {"engine": "megatron", "use_distributed_optimizer": False, "use_torch_fsdp2": True},
    {"engine": "megatron", "use_distributed_optimizer": True, "use_torch_fsdp2": False},
)


def _keys(config: Config, world_size: int, node: int) -> Iterator[dict[str, Any]]:
    """Keys of `parallel:` for each layout that the sizes alone allow."""
    training, context = config.training, config.parallel.context_parallel_size
    stages = [size for size in _divisors(world_size) if size <= config.model.num_layers]
    experts = _divisors(config.model.num_moe_experts or 1)
    for state, tensor, pipeline, expert in itertools.product(_STATES, _divisors(node), stages, experts):
        data, rest = divmod(world_size, tensor * pipeline * context)
        if rest or training.global_batch_size % (data * training.micro_batch_size):
            continue
        if pipeline == 1 or state.get("use_distributed_optimizer"):  # which alone has stages
            yield {
                **state,
                "tensor_model_parallel_size": tensor,
                "sequence_parallel": tensor > 1,
                "pipeline_model_parallel_size": pipeline,
                "expert_model_parallel_size": expert,
            }


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
