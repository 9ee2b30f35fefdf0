"""A checkpoint of plain megatron.training: weights, and the optimizer's state where it is there by tensor.

Public name: `read_megatron`.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from mup_megatron.checkpoints.manifest import MANIFEST
from mup_megatron.convert.export.fold import fold
from mup_megatron.convert.importing.weights import Weights, check_sums, finite
from mup_megatron.convert.saved_run import tracked
from mup_megatron.engines import WEIGHT
from mup_megatron.engines.optim import MOMENTS
from mup_megatron.engines.saved_weights import SavedWeights, Tensor
from mup_megatron.rules.table import Parametrization
from mup_megatron.util.errors import UserError

_MOMENTS = "optimizer.state."


def read_megatron(folder: Path, parametrization: Parametrization, vocabulary: int, stack: ExitStack) -> Weights:
    """The iteration, weights, and the optimizer's state where it is there by tensor.

    Args:
        folder: what `--save` named, or an iteration in it.
        parametrization: of the run.
        vocabulary: of no use here: Megatron keeps the rows that pad it.
        stack: of no use here: files are opened for each tensor.

    Raises:
        UserError: it is damaged, of another model, in µP already, or of another base than the run's.
    """
    path, step = _iteration(folder)
    if not (path / MANIFEST).is_file() and path.is_dir():
        check_sums(path.parent, [f"{path.name}/{file.name}" for file in path.iterdir() if file.is_file()])
    if (path / MANIFEST).is_file():
        raise UserError(f"{path}: written in µP already; expected a checkpoint of plain megatron.training")
    config = parametrization.config
    changed = [
        name
        for name, tensor in parametrization.tensors.items()
        if {tensor.lr_multiplier, tensor.eps_multiplier or 1.0} != {1.0} and not tensor.shape.spec.frozen
    ]
    factors = [name for name, by_block in fold(parametrization).items() if set(by_block.values()) != {1.0}]
    if changed or factors:
        raise config.error(
            "base",
            f"under it {min(changed or factors)} would not go on at the source's rate; expected the model's own sizes "
            "as base (then mup-megatron rebase takes it to another)",
        )
    weights = SavedWeights(path, megatron="")
    kinds = {WEIGHT: weights}
    for kind in dict.fromkeys(kind for kinds in MOMENTS.values() for kind in kinds):
        saved = SavedWeights(path, megatron=f"{_MOMENTS}{kind}.")
        if saved.shapes:
            kinds[kind] = saved
    if step and len(kinds) == 1:
        raise UserError(
            f"{path}: holds no optimizer state by tensor; expected one saved with --dist-ckpt-optim-fully-reshardable, "
            "or without --use-distributed-optimizer"
        )
    tensors: dict[str, Tensor] = {}
    for kind, saved in kinds.items():
        for name, tensor in parametrization.tensors.items():
            shape = tensor.shape.spec.shape
            if kind != WEIGHT and kind not in MOMENTS[tensor.group.update_rule]:
                continue
            if saved.shapes.get(name) != shape:
                what = f"of shape {list(saved.shapes[name])}" if name in saved.shapes else "missing"
                raise UserError(f"{path}: {kind} of {name} is {what}; expected {list(shape)} by the config")
            tensors[f"{kind}.{name}"] = Tensor(shape=shape, make=partial(_read, saved, kind, name))
    _check_known(weights, parametrization, path)
    return step, tensors


def _read(saved: SavedWeights, kind: str, name: str) -> torch.Tensor:
    return finite(saved.read(name), f"{saved.directory}: {kind} of {name}")


def _check_known(weights: SavedWeights, parametrization: Parametrization, path: Path) -> None:
    """Whether the source holds no more than the model has. Raises UserError."""
    own = {name for name in weights.shapes if name.startswith(("embedding.", "decoder.", "output_layer.", "mtp."))}
    if unknown := own - set(parametrization.tensors):
        raise UserError(f"{path}: holds {min(unknown)}, which the model of this config does not have")


def _iteration(folder: Path) -> tuple[Path, int]:
    """The checkpoint that a folder is, or the latest that it holds, and its iteration."""
    folder = tracked(folder, "release") or folder
    if folder.name == "release":
        return folder, 0
    number = folder.name.removeprefix("iter_")
    if not (number.isdecimal() and number.isascii()):
        raise UserError(f"{folder}: expected a folder iter_0000100, or the one that --save named")
    return folder, int(number)
