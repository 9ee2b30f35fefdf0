"""What was applied to a run of megatron.training: one line at its start, Megatron's own writers, and mup.json.

Public names: `applied`, `unread_names`, `standard_tensors`, `tell`, `write_scalars`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from mup_megatron.checkpoints.manifest import base_shapes_of
from mup_megatron.model.global_names import named_parameters
from mup_megatron.rules.shapes import without_numbers
from mup_megatron.rules.table import Parametrization
from mup_megatron.tuning.family import digest
from mup_megatron.util.errors import UserError

_DIGITS, _NAMED = 12, 12


def applied(parametrization: Parametrization) -> dict[str, Any]:
    """Tensors, optimizer groups with their rates at the schedule's peak, forward multipliers, digest of the base."""
    groups: dict[str, dict[str, Any]] = {}
    for tensor in parametrization.tensors.values():
        group = groups.setdefault(
            str(tensor.group),
            {
                "tensors": 0,
                "lr": tensor.lr,
                "lr_multiplier": tensor.lr_multiplier,
                "eps": tensor.eps,
                "weight_decay_multiplier": tensor.weight_decay_multiplier,
            },
        )
        group["tensors"] += 1
    forward = dict(vars(parametrization.forward))
    if not parametrization.config.model.biases_attention:
        del forward["relative_bias"]
    return {
        "parametrization": parametrization.config.parametrization.name,
        "tensors": len(parametrization.tensors),
        "groups": groups,
        "forward": forward,
        "base_digest": digest(base_shapes_of(parametrization)),
    }


def standard_tensors(parametrization: Parametrization) -> str:
    """The sentence that names the tensors for which no rule holds; empty where there are none."""
    tensors = parametrization.tensors.items()
    names = list(dict.fromkeys(without_numbers(name) for name, row in tensors if row.shape.spec.standard))
    if not names:
        return ""
    return f"in the standard parametrization, with the base's rates at every width, as asked for: {', '.join(names)}"


def unread_names(names: Sequence[str]) -> str:
    """The sentence that names what no table has; empty where there is nothing."""
    if not names:
        return ""
    more = f" and {len(names) - _NAMED} more (mup.json of a checkpoint)" if len(names) > _NAMED else ""
    return (
        f"not read here: {', '.join(names[:_NAMED])}{more}; the audit judges what they do at the first step, and not "
        "what they do later"
    )


def tell(parametrization: Parametrization, chunks: Sequence[Any], groups: Iterable[Mapping[str, Any]]) -> None:
    """Says what the model and the optimizer at hand have, not what they should have. Collective.

    The line is printed by the first rank; the rates of the groups go to TensorBoard and Weights & Biases where the run
    has them on (Megatron writes both from its last rank).

    Args:
        parametrization: of the run.
        chunks: this rank's part of the model.
        groups: of megatron-core's optimizer, just built; or the overrides that it is built from.

    Raises:
        UserError: no group of the optimizer has a rule.
    """
    names = {name for name, parameter in named_parameters(chunks) if hasattr(parameter, "mup_rule")}
    rates = {group["rule"]: group["max_lr"] for group in groups if "rule" in group}
    ranks: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, (names, rates))
    names, rates = set().union(*(held for held, _ in ranks)), {k: v for _, held in ranks for k, v in held.items()}
    table = applied(parametrization)
    if not rates:
        raise UserError("no optimizer group has a rule of µP; expected megatron-core's optimizer of this run")
    if torch.distributed.get_rank() == 0:
        print(line(table, len(names), rates), flush=True)
    _write(table, rates)


def line(table: dict[str, Any], tensors: int, rates: dict[str, float]) -> str:
    """What was applied, on one line.

    Args:
        table: of `applied`.
        tensors: that an optimizer group was found for, over all ranks.
        rates: of the optimizer's groups, at the schedule's peak, by rule.
    """
    forward = ", ".join(f"{name} {value:.6g}" for name, value in table["forward"].items())
    several = "" if len(set(rates.values())) == 1 else f" to {max(rates.values()):.6g}"
    return (
        f"mup-megatron: {table['parametrization']} applied: {tensors} tensors in {len(rates)} optimizer groups (rates "
        f"{min(rates.values()):.6g}{several}), forward multipliers {forward}; base {table['base_digest'][:_DIGITS]}"
    )


def write_scalars(step: int, found: Mapping[str, float]) -> None:
    """Numbers of a step for TensorBoard and Weights & Biases, where this rank writes them (the last one does)."""
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

    writer, wandb = get_tensorboard_writer(), get_wandb_writer()
    for name, value in found.items() if writer is not None else ():
        writer.add_scalar(f"mup/{name}", value, step)
    if wandb is not None:
        wandb.log({f"mup/{name}": value for name, value in found.items()}, step)


def _write(table: dict[str, Any], rates: dict[str, float]) -> None:
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

    writer, wandb = get_tensorboard_writer(), get_wandb_writer()
    if writer is not None:
        for rule, rate in rates.items():
            writer.add_scalar(f"mup/peak-learning-rate/{rule}", rate, 0)
        for name, value in table["forward"].items():
            writer.add_scalar(f"mup/forward-multiplier/{name}", value, 0)
        writer.add_text("mup/base", table["base_digest"], 0)
    if wandb is not None:
        settings = {"base": table["base_digest"], "forward": table["forward"], "peak_learning_rates": rates}
        wandb.run.config.update({"mup": settings}, allow_val_change=True)
