"""The table of a model whose chunks a script builds one after the other, on all ranks of a pipeline at once.

Public names: `BuiltModel`, `digest_of`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.language_module.language_module import LanguageModule

from mup_megatron.config import Config
from mup_megatron.model.as_built.attach import attach_to_built, prepare_config, replaced_attention
from mup_megatron.model.as_built.base_sizes import NO_OTHERS, BaseSizes
from mup_megatron.model.as_built.build import Builds, builds_of, join_builds, parametrize_builds
from mup_megatron.model.as_built.tensors import Entry
from mup_megatron.parallel.layout import Layout
from mup_megatron.rules.shapes import Init, TensorShape
from mup_megatron.rules.table import Parametrization
from mup_megatron.util.errors import UserError

_LAYER = re.compile(r"layers\.\d+\.")
_DIGITS = 16
_SPECS = ("transformer_layer_spec", "mtp_block_spec", "hybrid_stack_spec")


class BuiltModel:
    """Collects what the ranks of a pipeline build.

    Args:
        config: the run in this project's terms.
        entries: a user's own.
        base_sizes: what the base says beside the config's own sizes.
    """

    def __init__(self, config: Config, entries: Sequence[Entry] = (), base_sizes: BaseSizes = NO_OTHERS) -> None:
        self._config, self._entries, self._base_sizes = config, tuple(entries), base_sizes
        self._parts: list[Builds] = []
        self._own: list[Builds] = []
        self._known: dict[str, Entry] = {}

    @property
    def entries(self) -> Mapping[str, Entry]:
        """What says what each tensor is, by global name, as far as chunks were built."""
        return self._known

    def parametrize(self, given: Mapping[str, Any], layers: Sequence[int], *, first: bool) -> Parametrization:
        """The table of the chunks so far: of the first from every rank of the pipeline, of the others from this rank.

        Upstream's constructor of a tied model waits for the other ranks, which build their chunks of it under other
        numbers, so no rank may wait for another here once it has built a chunk. `finish` gathers the rest.

        Args:
            given: what the model is constructed with, by parameter name.
            layers: global numbers of the chunk's layers, from 0.
            first: whether it is the first chunk on this rank; then all ranks of the pipeline are here.

        Raises:
            UserError: on every rank alike where it is the first chunk: one of them cannot build or classify its part.
        """
        if first:
            self._parts += _gathered(lambda: [self._build(given, layers)])
        else:
            part = self._build(given, layers)
            self._own.append(part)
            self._parts.append(part)
        return self._joined()

    def _build(self, given: Mapping[str, Any], layers: Sequence[int]) -> Builds:
        return builds_of(self._config, given, layers, self._entries, self._base_sizes)

    def finish(self) -> Parametrization:
        """The table of the whole model, once every chunk was parametrised; all ranks call it.

        Raises:
            UserError: replicas differ, or one of the user's entries is about no tensor.
        """
        self._parts += _gathered(lambda: self._own)
        self._own = []
        parametrization = self._joined()
        used = set(self._known.values())
        for entry in self._entries:
            if entry not in used:
                raise UserError(f"{entry.source}: {entry.meant}: no tensor of this model is meant; expected one")
        _check_the_same(parametrization)
        return parametrization

    def _joined(self) -> Parametrization:
        whole = join_builds(self._parts)
        self._known = whole.entries
        return parametrize_builds(self._config, whole)

    def construct(
        self,
        init: Any,
        model: LanguageModule,
        given: Mapping[str, Any],
        parametrization: Parametrization,
        layout: Layout,
    ) -> None:
        """Builds a chunk by upstream's constructor, and puts records and multipliers on it.

        Args:
            init: upstream's constructor.
            model: the object under construction.
            given: its arguments.
            parametrization: of every chunk so far.
            layout: how ranks split the model.
        """
        prepare_config(given["config"], parametrization)
        config = given["config"]
        own = dict(given)
        if config.multi_latent_attention or config.context_parallel_size > 1:
            own |= {name: replaced_attention(given[name], config) for name in _SPECS if name in given}
        init(model, **own)
        attach_to_built(model, parametrization, layout, torch.distributed.get_rank())


def digest_of(parametrization: Parametrization, beside: Mapping[str, Any] | None = None) -> str:
    """What the layers of a model as built are, at the base: two runs with one digest are one family.

    Rows of vocabulary and positions are left out, for other keys say them; under a depth rule layers have no numbers.

    Args:
        parametrization: of the whole model.
        beside: what else tells families apart, by name.
    """
    deep = parametrization.config.parametrization.depth != "none"
    rows = {
        repr((_LAYER.sub("layers.*.", name) if deep else name, *_at_base(row.shape)))
        for name, row in parametrization.tensors.items()
    }
    rows |= {repr(pair) for pair in (beside or {}).items()}
    return hashlib.sha256("\n".join(sorted(rows)).encode()).hexdigest()[:_DIGITS]


def _at_base(shape: TensorShape) -> tuple[Any, ...]:
    spec = shape.spec
    blocks = [(name, dim.base_dim or dim.dim) for name, dim in (shape.blocks or {}).items()]
    of_words = spec.readout or spec.init is Init.EMBEDDING
    sizes = [dim.base_dim or (None if of_words else dim.dim) for dim in shape.infshape]
    rules = (spec.fixed_fan_out, spec.block_fixed_fan_out, spec.readout, spec.standard, spec.frozen)
    return sizes, blocks, spec.fan_in, spec.fan_out, spec.init.value, *rules


def _gathered(builds: Callable[[], list[Builds]]) -> list[Builds]:
    """What each rank of the pipeline builds; an error of one of them is everyone's."""
    mine: list[Builds] | str
    try:
        mine = builds()
    except UserError as error:
        mine = str(error)
    group = parallel_state.get_pipeline_model_parallel_group()
    parts: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(parts, mine, group=group)
    for part in parts:
        if isinstance(part, str):
            raise UserError(part)
    return [build for part in parts for build in part]


def _check_the_same(parametrization: Parametrization) -> None:
    """Whether rank 0 reads the same table off what it built."""
    rows = [repr((name, row.shape.infshape, row.shape.spec)) for name, row in parametrization.tensors.items()]
    mine = hashlib.sha256("\n".join(rows).encode()).hexdigest()
    first = [mine]
    torch.distributed.broadcast_object_list(first, src=0)
    if first[0] != mine:
        raise UserError(
            "the script's layer specs are others on this rank than on rank 0; expected the same model in every replica"
        )
