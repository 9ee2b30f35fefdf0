"""A run of Megatron-Bridge in µP: what `apply_mup` hangs on a recipe, and what it says of itself.

Public names: `BridgeRun`, `put_into`.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import megatron.core
import torch

from mup_megatron.bridge import hooks
from mup_megatron.bridge.refused import refuse
from mup_megatron.bridge.translate import arguments_of, put_values
from mup_megatron.megatron_training.megatron_run import MegatronRun
from mup_megatron.megatron_training.models import chunks_of
from mup_megatron.megatron_training.option_check import (
    check_config,
    check_options,
    check_table,
    unread_options,
    unsaid_options,
)
from mup_megatron.megatron_training.options import (
    DERIVED_SIZES,
    Settings,
    check_keys,
    check_sizes,
    known,
    prepare,
    read_base,
    text_of,
)
from mup_megatron.megatron_training.telemetry import tell
from mup_megatron.model.as_built.ready_made import READY_MADE
from mup_megatron.model.as_built.tensors_file import read_tensors
from mup_megatron.patches import PatchError, apply_patches
from mup_megatron.patches.bridge import bridge_patches
from mup_megatron.tuning.record import TransferRecord
from mup_megatron.util.errors import UserError

MANAGER = "mup_megatron.bridge.checkpoints.GuardedCheckpoints"


class BridgeRun(MegatronRun):
    """One run of Bridge's, from `apply_mup` on. Its options are read when the first model is built.

    Args:
        container: the recipe.
        settings: what `apply_mup` was given.
    """

    advice = 'audit="warn"'

    def __init__(self, container: Any, settings: Settings) -> None:
        super().__init__(Namespace(), settings)
        self._container = container

    def __deepcopy__(self, memo: dict[int, Any]) -> BridgeRun:
        return self

    def check_given(self, given: dict[str, Any]) -> None:
        """Reads the container, which Bridge has finalized by now, and refuses what has no rule here.

        Args:
            given: what GPTModel is constructed with, by parameter name.

        Raises:
            UserError: names the field.
        """
        refuse(self._container, first=False)
        self._args = arguments_of(self._container, given)
        check_table(known(), megatron.core.__version__)
        check_options(self._args, {}, known())
        unsaid, unread = (tuple(options(self._args, {}, known())) for options in (unsaid_options, unread_options))
        self._settings = replace(self._settings, unsaid=unsaid, unread=unread)
        for config in (given["config"], self._container.optimizer, self._container.ddp):
            check_config(config, known(), kind=_upstreams(config))

    def overrides(self, model_chunks: Any, optimizer: str) -> dict[Any, Any]:
        """As of MegatronRun; says what is applied too, for Bridge hands its optimizer to nobody. Collective."""
        made = super().overrides(model_chunks, optimizer)
        tell(self.parametrization, chunks_of(model_chunks), made.values())
        return made

    def write_scalars(self, step: int, found: Mapping[str, float]) -> None:
        """Nothing: Bridge hands its writers to nobody; telemetry.jsonl has the numbers."""


def _upstreams(config: Any) -> type:
    """The class of megatron-core that a config of Bridge's extends."""
    return next(kind for kind in type(config).__mro__ if kind.__module__.startswith("megatron.core."))


def put_into(
    config: Any,
    base: str | Path | Mapping[str, Any],
    *,
    record: Path | None,
    sections: Mapping[str, dict[str, Any]],
    tensors: str | None,
    **further: Any,
) -> None:
    """Puts a run into a container: marks its model config, and takes the places of overrides and checkpoint manager.

    Args:
        config: the container.
        base: sizes, or a file of them.
        record: the transfer record.
        sections: `hparams` (multipliers alone) and `parametrization`.
        tensors: file of a user's entries.
        further: parts of `Settings` that are handed on: `allowed`, `audit`, `telemetry_interval`, `explain` and
            `written`.

    Raises:
        UserError: see `apply_mup`.
    """
    refuse(config, first=True)
    sizes = dict(base) if isinstance(base, Mapping) else read_base(str(base))
    check_sizes("base", {name: size for name, size in sizes.items() if name != "file"})
    check_keys("apply_mup", sections)
    multipliers = dict(sections["hparams"])
    given = _given_sizes(config.model, sizes)
    if record is not None:
        multipliers = _with_record(config, record, multipliers)
    if config.optimizer.lr is None:
        raise UserError("optimizer.lr: missing; expected the learning rate at the base, or hparams with a record")
    settings = Settings(
        base=sizes,
        parametrization=sections["parametrization"],
        hparams=multipliers,
        record=record,
        sizes=given,
        tensors=() if tensors is None else read_tensors(tensors, READY_MADE.get(tensors) or text_of(tensors)),
        **further,
    )
    try:
        prepare()
        apply_patches(bridge_patches(hooks), cuda=torch.cuda.is_available())
    except PatchError as error:
        raise UserError(str(error)) from None
    setattr(getattr(config.model, "transformer", config.model), hooks.MARK, BridgeRun(config, settings))
    config.optimizer_config_override_provider = hooks.MupOverrides()
    config.checkpoint.custom_manager_class = MANAGER


def _given_sizes(model: Any, base: Mapping[str, Any]) -> dict[str, int]:
    """Of the sizes that upstream derives from others, those that the recipe gives.

    Raises:
        UserError: upstream has filled them already, and the base does not say which of them grow.
    """
    found = {name: getattr(model, name) for name in DERIVED_SIZES if getattr(model, name, None) is not None}
    if model.init_method is None or "file" in base:  # upstream fills that too
        return found
    if model.num_moe_experts is None:
        found.pop("moe_ffn_hidden_size", None)
    if model.multi_latent_attention:
        found.pop("kv_channels", None)
    for name in found:
        if name not in base:
            raise UserError(
                f"model.{name}: the model config was finalized before apply_mup, so {found[name]} may be given or "
                f"derived; expected apply_mup before, or {name} among the base sizes"
            )
    return found


def _with_record(config: Any, path: Path, multipliers: dict[str, Any]) -> dict[str, Any]:
    """The multipliers with a record's, whose other values go into the container."""
    found = put_values(config, TransferRecord.expect(path, None).values, str(path))
    for name, value in found.items():
        if multipliers.get(name, value) != value:
            raise UserError(f"multipliers: {name} {multipliers[name]}: {path} says {value}; expected one of them")
    return {**multipliers, **found}
