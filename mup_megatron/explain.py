"""What the parametrization does to every tensor, under the config's layout: for people a table, for programs JSON.

Public names: `explain`, `print_table`, `family`. No process group is started and no weight is allocated.
"""

from __future__ import annotations

from typing import Any

from mup_megatron.config import Config
from mup_megatron.init import local_shape
from mup_megatron.layout import Layout
from mup_megatron.parametrization import Parametrization, TensorHyperparameters
from mup_megatron.shapes import InfDim, expert_number


def explain(config: Config, parametrization: Parametrization, layout: Layout, rank: int = 0) -> dict[str, Any]:
    """Every parameter that `rank` holds, as plain data (ARCHITECTURE: explain --json).

    Where a tensor holds several blocks, `fan_out`, `m_out` and `init_std` are told per block and null at the top.
    """
    forward = parametrization.forward
    return {
        "config": config.model_dump(),
        "layout": {
            "engine": config.parallel.engine,
            "world_size": layout.world_size,
            "rank": rank,
            "tensor_model_parallel_size": layout.tensor,
            "tensor_model_parallel_rank": layout.tensor_rank(rank),
            "data_parallel_size": layout.data,
            "sequence_parallel": layout.sequence_parallel,
            "zero_stage": layout.zero_stage,
        },
        "forward": {
            "softmax_scale": forward.softmax_scale,
            "readout": forward.readout,
            "embedding": forward.embedding,
            "residual": forward.residual,
        },
        "parameters": [
            _parameter(name, tensor, layout, rank)
            for name, tensor in parametrization.tensors.items()
            if _is_on(name, config, layout, rank)
        ],
    }


def _is_on(name: str, config: Config, layout: Layout, rank: int) -> bool:
    """Whether `rank` holds the parameter, as far as expert parallelism decides it."""
    number, experts = expert_number(name), config.model.num_moe_experts
    return number is None or experts is None or number * layout.expert // experts == layout.expert_rank(rank)


def _parameter(name: str, tensor: TensorHyperparameters, layout: Layout, rank: int) -> dict[str, Any]:
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
        "local_shape": list(local_shape(shape.spec, layout.slice_of(shape.spec, rank)[1])),
        "base_shape": list(shape.base_shape),
        "growing": [dim.grows for dim in shape.infshape],
        "fan_in": shape.fan_in.dim,
        "fan_out": None if blocks else shape.fan_out.dim,
        "m_in": float(shape.fan_in.ratio),
        "m_out": None if blocks else float(shape.fan_out.ratio),
        "blocks": blocks,
        "forward_multiplier": tensor.forward_multiplier,
        "init_std": None if blocks else tensor.init_std[None],
        "lr": tensor.lr,
        "lr_multiplier": tensor.lr_multiplier,
        "eps": tensor.eps,
        "eps_multiplier": tensor.eps_multiplier,
        "weight_decay": tensor.weight_decay,
        "weight_decay_multiplier": tensor.weight_decay_multiplier,
    }


def print_table(config: Config, parametrization: Parametrization, layout: Layout, console: Any) -> None:
    """The same for people: forward multipliers, then tensors grouped by rule; repeated layers are one row.

    Args:
        config: the run.
        parametrization: of the same config.
        layout: for local shapes.
        console: a rich Console.
    """
    from rich.table import Table

    forward, hparams = parametrization.forward, config.hparams
    console.print(
        f"[bold]{config.run.name}[/]: {config.model.architecture}, {_count(parametrization):,} parameters, "
        f"{config.parametrization.name} parametrization, {layout}"
    )
    console.print(
        f"forward: logits = {forward.readout:.6g} · W h, attention logits = {forward.softmax_scale:.6g} · q·k, "
        f"embedding × {forward.embedding:.6g}, residual branches × {forward.residual:.6g}"
    )
    console.print(
        f"base: lr {hparams.lr:.6g}, init std {hparams.init_method_std:.6g}, weight decay {hparams.weight_decay:.6g}, "
        f"{config.optimizer.name}" + (f" eps {config.optimizer.eps:.6g}" if parametrization.rule == "adam" else "")
    )
    for warning in sorted({family(line) for line in parametrization.clip_warnings()}):
        console.print(f"[yellow]warning[/] {warning}", highlight=False)
    for key, tensors in parametrization.groups.items():
        first = tensors[0]
        decay = f"weight decay {first.weight_decay:.4g}" if key.weight_decay else "no weight decay"
        eps = f", eps {first.eps:.4g}" if first.eps is not None else ""
        table = Table(
            title=f"lr {first.lr:.4g} ({_times(first.lr_multiplier)}){eps}, {decay}", title_justify="left", box=None
        )
        for column in ("tensor", "global", "local", "base", "m_in", "m_out", "init std", "forward"):
            table.add_column(column, justify="left" if column == "tensor" else "right", no_wrap=True)
        for rows in _rows(tensors, layout):
            table.add_row(*rows)
        console.print(table)
    console.print(
        "sizes in elements, fan-out × fan-in (embeddings the other way round); m_in, m_out: size / base size; init std "
        "of a normal distribution; lr at the schedule's peak; weight decay decoupled, per step and unit of lr",
        style="dim",
        highlight=False,
    )


def _rows(tensors: list[TensorHyperparameters], layout: Layout) -> list[tuple[str, ...]]:
    families: dict[tuple[str, ...], int] = {}
    for tensor in tensors:
        shape = tensor.shape
        cells = (
            _times(float(shape.fan_in.ratio)) if shape.fan_in.grows else "fixed",
            _blocks({block: _ratio(dim) for block, dim in shape.fan_outs.items()}),
            _blocks({block: f"{std:.4g}" for block, std in tensor.init_std.items()})
            if any(tensor.init_std.values())
            else shape.spec.init.value,
            _times(tensor.forward_multiplier),
        )
        row = (
            family(shape.name),
            _sizes(shape.spec.shape),
            _sizes(local_shape(shape.spec, layout.slice_of(shape.spec, 0)[1])),
            _sizes(shape.base_shape),
            *cells,
        )
        families[row] = families.get(row, 0) + 1
    return [(f"{row[0]} ({count}×)" if count > 1 else row[0], *row[1:]) for row, count in families.items()]


def family(name: str) -> str:
    """A parameter's name with the layer number left out."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


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


def _count(parametrization: Parametrization) -> int:
    import math

    return sum(math.prod(shape.spec.shape) for shape in parametrization.shapes.values())
