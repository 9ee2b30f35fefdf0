"""What the parametrization does to every tensor, under the config's layout: for people a table, for programs JSON.

Public names: `explain`, `holds`, `parameters_on`, `print_table`, `shown_init`. No process group is
started, no weight allocated.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mup_megatron.config import Config, growing_sizes
from mup_megatron.parallel.layout import Layout
from mup_megatron.rules import horizon
from mup_megatron.rules.shapes import InfDim, Init, expert_number, layer_number, without_numbers
from mup_megatron.rules.table import Parametrization, TensorHyperparameters, is_copied


def explain(parametrization: Parametrization, layout: Layout, rank: int | None = None) -> dict[str, Any]:
    """Every parameter that `rank` holds, as plain data (ARCHITECTURE: explain --json).

    `growth` holds every size that grows, including sizes that follow from others and are not named (`GrowingSize`).
    `init` is normal, ones or zeros. Where a tensor holds several blocks, each block has its own `fan_out`, `m_out` and
    `init_std`, and those of the tensor are null.

    Args:
        parametrization: of the run's config.
        layout: how ranks split the model.
        rank: global rank; None tells every parameter of the model, with the shape that it has where it is held.
    """
    config, forward = parametrization.config, parametrization.forward
    return {
        "config": config.model_dump(),
        "layout": _layout(config, layout, rank),
        "growth": {name: size._asdict() for name, size in growing_sizes(config).items()},
        "forward": {
            "softmax_scale": forward.softmax_scale,
            "readout": forward.readout,
            "embedding": forward.embedding,
            "residual": forward.residual,
            "relative_bias": forward.relative_bias,
        },
        "experts": {"rule": config.parametrization.experts, "m_experts": float(config.experts_ratio)},
        "horizon": {**dataclasses.asdict(horizon.horizon(config)), "betas": list(horizon.betas(config))},
        "moved": {name: list(ends) for name, ends in horizon.moved(config).items()},
        "parameters": [
            _parameter(name, tensor, layout)
            for name, tensor in parametrization.tensors.items()
            if rank is None or holds(config, layout, rank, name)
        ],
    }


def holds(config: Config, layout: Layout, rank: int, name: str) -> bool:
    """Whether a global rank holds (its share of) the parameter of that global name."""
    stage, model = layout.pipeline_rank(rank), config.model
    first, last = stage == 0, stage == layout.pipeline - 1
    layer, expert = layer_number(name), expert_number(name)
    if expert is not None and expert not in _experts(config, layout, rank):
        return False
    if layer is not None and len(model.stacks) > 1:
        return True  # no pipeline splits several stacks
    if layer is not None:
        return any(layer in chunk for chunk in layout.stages[stage])
    if name.startswith("embedding."):
        # Multi-token prediction embeds again, on the last stage; a tied head is the word embeddings' copy there.
        tied = model.share_embeddings_and_output_weights and name == "embedding.word_embeddings.weight"
        return first or (last and (tied or model.mtp_num_layers is not None))
    return last or is_copied(name)


def parameters_on(parametrization: Parametrization, layout: Layout, rank: int) -> int:
    """How many parameters a rank holds, whole ones where ZeRO splits them further."""
    return sum(
        math.prod(shape.spec.local_shape(layout.slice_of(shape.spec, rank)[1]))
        for name, shape in parametrization.shapes.items()
        if holds(parametrization.config, layout, rank, name)
    )


def _experts(config: Config, layout: Layout, rank: int) -> range:
    """Global numbers of the experts that a rank holds in every layer of experts."""
    local = (config.model.num_moe_experts or 0) // layout.expert
    return range(layout.expert_rank(rank) * local, (layout.expert_rank(rank) + 1) * local)


def _layout(config: Config, layout: Layout, rank: int | None) -> dict[str, Any]:
    """Sizes, and a rank's own coordinates, layers and experts; these are null without a rank."""

    def of_rank(coordinate: Callable[[int], Any]) -> Any:
        return None if rank is None else coordinate(rank)

    return {
        "engine": config.parallel.engine,
        "world_size": layout.world_size,
        "rank": rank,
        "tensor_model_parallel_size": layout.tensor,
        "tensor_model_parallel_rank": of_rank(layout.tensor_rank),
        "pipeline_model_parallel_size": layout.pipeline,
        "pipeline_model_parallel_rank": of_rank(layout.pipeline_rank),
        "virtual_pipeline_model_parallel_size": layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        "context_parallel_size": layout.context,
        "context_parallel_rank": of_rank(layout.context_rank),
        "expert_model_parallel_size": layout.expert,
        "expert_model_parallel_rank": of_rank(layout.expert_rank),
        "expert_tensor_parallel_size": layout.expert_tensor,
        "expert_tensor_parallel_rank": of_rank(layout.expert_tensor_rank),
        "data_parallel_size": layout.data,
        "data_parallel_rank": of_rank(layout.data_rank),
        "sequence_parallel": layout.sequence_parallel,
        "zero_stage": layout.zero_stage,
        "layers": of_rank(lambda rank: [list(chunk) for chunk in layout.stages[layout.pipeline_rank(rank)]]),
        "experts": of_rank(lambda rank: list(_experts(config, layout, rank))),
    }


def _parameter(name: str, tensor: TensorHyperparameters, layout: Layout) -> dict[str, Any]:
    shape = tensor.shape
    blocks = None
    if shape.blocks:
        blocks = [
            {"name": block, "fan_out": dim.dim, "m_out": float(dim.ratio), "init_std": tensor.init_std[block]}
            for block, dim in shape.blocks.items()
        ]
    return {
        "name": name,
        "global_shape": list(shape.spec.shape),
        "local_shape": list(shape.spec.local_shape(layout.slice_of(shape.spec, 0)[1])),
        "base_shape": list(shape.base_shape),
        "growing": [dim.grows for dim in shape.infshape],
        "fan_in": shape.fan_in.dim,
        "fan_out": None if blocks else shape.fan_out.dim,
        "m_in": float(shape.fan_in.ratio),
        "m_out": None if blocks else float(shape.fan_out.ratio),
        "blocks": blocks,
        "forward_multiplier": tensor.forward_multiplier * float(tensor.theta),
        "theta": float(tensor.theta),
        "init": _init(tensor),
        "init_std": None if blocks else tensor.init_std[None],
        "lr": tensor.lr,
        "lr_multiplier": tensor.lr_multiplier,
        "eps": tensor.eps,
        "eps_multiplier": tensor.eps_multiplier,
        "weight_decay": tensor.weight_decay,
        "weight_decay_multiplier": tensor.weight_decay_multiplier,
        "per_tensor": _factors(tensor),
    }


def _factors(tensor: TensorHyperparameters) -> dict[str, Any] | None:
    """What `hparams.per_tensor` says of a tensor; None where it says nothing that is not 1."""
    said = tensor.factors
    if said is None or {said.lr, said.weight_decay, *said.init.values()} == {1.0}:
        return None
    init = said.init[None] if None in said.init else {str(block): factor for block, factor in said.init.items()}
    return {"lr": said.lr, "weight_decay": said.weight_decay, "init": init}


def print_table(parametrization: Parametrization, layout: Layout, console: Any, rank: int = 0) -> None:
    """Prints what `explain` says: forward multipliers, then tensors by rule; repeated layers and experts are one row.

    Args:
        parametrization: of the run.
        layout: how ranks split the model.
        console: a rich Console without markup.
        rank: whose tensors are shown.
    """
    for line, highlight in _head(parametrization, layout, rank):
        console.print(line, highlight=highlight)
    for warning in sorted({without_numbers(line) for line in parametrization.clip_warnings()}):
        console.print(f"warning {warning}", style="yellow", highlight=False)
    for group in parametrization.groups.values():
        tensors = [tensor for tensor in group if holds(parametrization.config, layout, rank, tensor.shape.name)]
        if tensors:
            _print_whole(_table(parametrization.config, tensors, layout), console)
    console.print(
        "sizes in elements, fan-out × fan-in (embeddings the other way round); m_in, m_out: size / base size; init std "
        "of a normal distribution; lr at the schedule's peak; weight decay decoupled, per step and unit of lr",
        style="dim",
        highlight=False,
    )


def _head(parametrization: Parametrization, layout: Layout, rank: int) -> Iterator[tuple[str, bool]]:
    """Lines above the tables (model, layout, forward multipliers, base, rules), and whether rich highlights numbers."""
    config, forward, hparams = parametrization.config, parametrization.forward, parametrization.config.hparams
    yield (
        f"{config.run.name}: {config.model.architecture}, {parametrization.size:,} parameters, "
        f"{config.parametrization.name} parametrization, {layout}",
        True,
    )
    if layout.world_size > 1:
        yield _where(parametrization, layout, rank), False
    yield (
        f"forward: logits = {forward.readout:.6g} · W h, attention logits = {forward.softmax_scale:.6g} · q·k, "
        f"embedding × {forward.embedding:.6g}, residual branches × {forward.residual:.6g}"
        + (f", position bias × {forward.relative_bias:.6g}" if config.model.biases_attention else ""),
        True,
    )
    yield (
        f"base: lr {hparams.lr:.6g}, init std {hparams.init_method_std:.6g}, weight decay {hparams.weight_decay:.6g}, "
        f"{config.optimizer.name}"
        + (f" eps {config.optimizer.eps:.6g}" if parametrization.update_rule != "sgd" else "")
        + (f" ({config.optimizer.soap_eps:.6g} of matrices)" if parametrization.update_rule == "soap" else ""),
        True,
    )
    yield _growth(config), False
    if config.parametrization.experts != "none":
        yield _experts_rule(config), False
    if _is_unit(config):
        yield _UNIT, False
    if over := horizon.said(config):
        yield over, False


def _table(config: Config, tensors: list[TensorHyperparameters], layout: Layout) -> Any:
    """A table of tensors with one rate, epsilon and decay."""
    from rich.table import Table

    first = tensors[0]
    decay = f"weight decay {first.weight_decay:.4g}" if first.group.weight_decay else "no weight decay"
    eps = f", eps {first.eps:.4g}" if first.eps is not None else ""
    title = f"lr {first.lr:.4g} ({_times(first.lr_multiplier)}){eps}, {decay}"
    table = Table(title=title, title_justify="left", box=None)
    further = [*(["θ"] if _is_unit(config) else []), *(["per_tensor"] if config.hparams.per_tensor else [])]
    for column in (*_COLUMNS, *further):
        table.add_column(column, justify="left" if column == "tensor" else "right", no_wrap=True)
    for row in _rows(tensors, layout, unit=_is_unit(config)):
        table.add_row(*row)
    return table


def _print_whole(table: Any, console: Any) -> None:
    """Prints a table with everything in it where there is no screen that its lines would have to fit on."""
    before = console.width
    if not console.file.isatty():
        needed = console.measure(table, options=console.options.update_width(_WIDEST)).maximum
        console.width = max(before, needed)
    console.print(table)
    console.width = before


_WIDEST = 10_000
"""Characters of a line that no table of tensors reaches."""
_UNIT = (
    "scaling: unit: init std, lr, eps and weight decay are those of the stored weights, which are the weights divided "
    "by θ; θ is part of the forward multiplier"
)
_COLUMNS = ("tensor", "global", "local", "base", "m_in", "m_out", "init std", "forward")


def _shown_factors(tensor: TensorHyperparameters) -> str:
    """The factors of `hparams.per_tensor` that are not 1."""
    found = _factors(tensor) or {}
    said = [f"{what} {_times(found[what])}" for what in ("lr", "weight_decay") if found.get(what, 1.0) != 1.0]
    init = tensor.factors.init if found and tensor.factors else {}
    if set(init.values()) - {1.0}:
        said.append(f"init {_blocks({block: _times(factor) for block, factor in init.items()})}")
    return ", ".join(said)


def _growth(config: Config) -> str:
    """What grows, in words: what `base:` names, then what follows from it without being named."""
    if config.base.file is not None:
        return f"grows: what {config.base.file} says, tensor by tensor"
    sizes = growing_sizes(config)
    named = ", ".join(f"{name} {size.base} to {size.target}" for name, size in sizes.items() if not size.follows)
    following = "".join(
        f"; {name} {size.base} to {size.target}, which is {size.follows} where nothing else is said"
        for name, size in sizes.items()
        if size.follows
    )
    return f"grows: {named or 'nothing'}{following}"


def _experts_rule(config: Config) -> str:
    """What the rule for more experts does, in words."""
    many = float(config.experts_ratio)
    return (
        f"experts: {config.parametrization.experts}, {_times(many)} experts: their epsilon and the router's "
        f"{_times(1 / many)}, rate under SGD and weight in the invariant gradient norm {_times(many)}"
    )


def _is_unit(config: Config) -> bool:
    return config.parametrization.scaling == "unit"


def _rows(tensors: list[TensorHyperparameters], layout: Layout, *, unit: bool) -> list[tuple[str, ...]]:
    families: dict[tuple[str, ...], int] = {}
    for tensor in tensors:
        shape = tensor.shape
        cells = (
            _times(float(shape.fan_in.ratio)) if shape.fan_in.grows else "fixed",
            _blocks({block: _ratio(dim) for block, dim in shape.fan_outs.items()}),
            _blocks({block: f"{std:.4g}" for block, std in tensor.init_std.items()})
            if any(tensor.init_std.values())
            else _init(tensor),
            _times(tensor.forward_multiplier * float(tensor.theta)),
            *([f"2^{round(math.log2(tensor.theta))}" if tensor.theta != 1 else "1"] if unit else []),
            *([] if tensor.factors is None else [_shown_factors(tensor)]),
        )
        row = (
            without_numbers(shape.name),
            _sizes(shape.spec.shape),
            _sizes(shape.spec.local_shape(layout.slice_of(shape.spec, 0)[1])),
            _sizes(shape.base_shape),
            *cells,
        )
        families[row] = families.get(row, 0) + 1
    return [(f"{row[0]} ({count}×)" if count > 1 else row[0], *row[1:]) for row, count in families.items()]


def _init(tensor: TensorHyperparameters) -> str:
    """What a tensor starts as."""
    if tensor.shape.spec.init is Init.OWN:
        return "its own"
    return "ones" if tensor.shape.spec.init is Init.ONES else "normal" if any(tensor.init_std.values()) else "zeros"


def shown_init(parameter: Mapping[str, Any]) -> str:
    """A parameter's initial values in words: the standard deviation, of every block its own, else ones or zeros."""
    std = parameter["init_std"]
    if parameter.get("blocks"):
        std = {block["name"]: block["init_std"] for block in parameter["blocks"]}
    if isinstance(std, Mapping) and any(std.values()):
        return _blocks({block: f"{value:.4g}" for block, value in std.items()})
    return f"{std:.4g}" if std and not isinstance(std, Mapping) else parameter.get("init", "0")


def _ratio(dim: InfDim) -> str:
    return _times(float(dim.ratio)) if dim.grows else "fixed"


def _blocks(values: dict[str | None, str]) -> str:
    if len(set(values.values())) == 1:
        return next(iter(values.values()))
    return " ".join(f"{block} {value}" for block, value in values.items())


def _times(factor: float) -> str:
    return f"×{factor:.4g}"


def _sizes(shape: tuple[int, ...]) -> str:
    return "×".join(str(size) for size in shape)


def _where(parametrization: Parametrization, layout: Layout, rank: int) -> str:
    """What a rank holds, in words: `rank 40 of 1024 holds layers 8-11, experts 40-43: 1,234 parameters`."""
    config = parametrization.config
    held = [
        " ".join(["layers", *(_span(chunk) for chunk in layout.stages[layout.pipeline_rank(rank)] if chunk)]),
        *([f"experts {_span(_experts(config, layout, rank))}"] if config.model.num_moe_experts else []),
    ]
    parameters = parameters_on(parametrization, layout, rank)
    return f"rank {rank} of {layout.world_size} holds {', '.join(held)}: {parameters:,} parameters, below"


def _span(numbers: Sequence[int]) -> str:
    return f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}"
