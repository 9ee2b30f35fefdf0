"""How megatron-core's model of each family is built, a module per family (gpt.py).

Public names: `Architecture`, `Part`, `architecture_of`. A module has one public object that follows `Architecture`. It
constructs upstream's own model from a layer spec with the shims in it, and attaches what no layer spec reaches (the
embedding, the readout). What a family is trained on, what its model is called with, and how the loss is made from what
the model returns are said in data/ (data/families.py), because the engines see batches and no architecture.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.process_groups_config import ProcessGroupCollection

from mup_megatron.config import Config, Model
from mup_megatron.model.unsharded import one_rank_groups
from mup_megatron.parallel.layout import Layout
from mup_megatron.rules.table import ForwardMultipliers


@dataclass(frozen=True, kw_only=True)
class Part:
    """Which part of the model is built, and where.

    Args:
        layers: global numbers from 0 of the layers of each stack (`Model.stacks`).
        device: where the weights live; `meta` has none.
        first: whether the embedding is in it.
        last: whether the readout is in it.
        chunk: its number on this rank where the pipeline is interleaved, else None.
        unsharded: built whole, without process groups.
        one_expert: of experts only the first is built; such a model has every shape, and cannot run.
    """

    layers: Mapping[str, Sequence[int]]
    device: torch.device
    first: bool = True
    last: bool = True
    chunk: int | None = None
    unsharded: bool = False
    one_expert: bool = False

    @property
    def groups(self) -> ProcessGroupCollection | None:
        """The process groups that upstream's constructor is handed; None where it takes parallel_state's own."""
        if self.unsharded:
            return one_rank_groups()
        if self.device.type != "meta":
            return None
        groups = ProcessGroupCollection.use_mpu_process_groups()
        groups.embd = None  # whose two ranks would exchange a tied weight, and a dry run has none
        return groups

    def kernels(self, model: Model) -> Model:
        """`model` with kernels that the device has: on the meta device nothing is computed, and no shape depends on
        the kernel."""
        return model.with_plain_kernels if self.device.type == "meta" else model


class Architecture(Protocol):
    """What a family's module says."""

    def build(
        self,
        config: Config,
        model: Model,
        vocabulary: int,
        forward: ForwardMultipliers,
        layout: Layout,
        part: Part,
    ) -> LanguageModule:
        """megatron-core's model with the shims, not initialised, on `part.device` or the CPU.

        Args:
            config: the run.
            model: sizes, which need not be the config's own.
            vocabulary: padded.
            forward: multipliers.
            layout: how ranks split the model.
            part: which part of it.
        """
        ...


def architecture_of(model: Model) -> Architecture:
    """The module of the model's family."""
    return cast(Architecture, importlib.import_module(f"{__name__}.{model.family}"))


def layers_of(model: Model, layout: Layout, stage: int, chunk: int) -> dict[str, Sequence[int]]:
    """Global numbers of the layers that a chunk holds, by stack.

    The layout splits the one stack of a model; of several, which no pipeline splits, every rank holds all layers.
    """
    if len(model.stacks) > 1:
        return {stack: range(layers) for stack, layers in model.stacks.items()}
    return dict.fromkeys(model.stacks, layout.stages[stage][chunk])
