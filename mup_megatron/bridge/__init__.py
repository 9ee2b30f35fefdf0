"""Megatron-Bridge (NeMo) in µP: one call on a recipe's ConfigContainer, before `pretrain`.

    from mup_megatron.bridge import apply_mup

    config = llama32_1b_pretrain_config()
    apply_mup(config, {"hidden_size": 256, "ffn_hidden_size": 1024, "num_attention_heads": 4, "num_query_groups": 1})
    pretrain(config, forward_step)

Public names: `apply_mup`, `SYMBOLS`.

Bridge builds its model by a provider and its optimizer by its own `setup_optimizer`, so `mup-megatron run` does not
reach it. Three things of Bridge's do: `ConfigContainer.optimizer_config_override_provider` (hooks.py: groups),
`CheckpointConfig.custom_manager_class` (checkpoints.py: record and guard) and megatron-core's `GPTModel.__init__`,
which a provider calls with itself as the config (hooks.py: records, multipliers, initial values). What the run is in
this project's terms is read from the container (translate.py) and goes on as in `mup-megatron run` (run.py).
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mup_megatron.util.errors import UserError

if TYPE_CHECKING:
    from megatron.bridge.training.config import ConfigContainer

VERSIONS = "0.4.1 to 0.6.2"

SYMBOLS: Mapping[str, tuple[str, ...]] = {
    "megatron.bridge.training.config": ("ConfigContainer", "OptimizerConfigOverrideProvider", "CheckpointConfig"),
    "megatron.bridge.training.optim": ("setup_optimizer",),
    "megatron.bridge.training.checkpointing": (
        "DefaultCheckpointManager",
        "create_checkpoint_manager",
        "_resolve_checkpoint_iteration",
    ),
    "megatron.bridge.training.utils.checkpoint_utils": ("checkpoint_exists", "get_checkpoint_name"),
    "megatron.bridge.utils.instantiate_utils": ("register_allowed_target_prefix",),
    "megatron.bridge.models.gpt_provider": ("GPTModelProvider",),
}
"""What this relies on, by module of megatron-bridge."""


def apply_mup(
    config: ConfigContainer,
    base: str | Path | Mapping[str, Any],
    *,
    hparams: str | Path | None = None,
    multipliers: Mapping[str, float] | None = None,
    parametrization: Mapping[str, Any] | None = None,
    tensors: str | Path | None = None,
    allow_change: Sequence[str] = (),
    audit: str = "stop",
    telemetry_interval: int | None = None,
    explain: bool = False,
    write_config: str | Path | None = None,
) -> None:
    """Puts µP into a recipe: call it once, behind every other change to `config` and before `pretrain`.

    Rate, weight decay, epsilon and initial standard deviation in `config` are values at the base from then on.

    Args:
        config: a ConfigContainer of megatron-bridge whose model is not finalized yet.
        base: sizes where hyperparameters are defined, or a file of them (YAML; or .bsh, of base shapes).
        hparams: a transfer record (transfer.json). Its values take the place of the recipe's; `min_lr` keeps its ratio
            to `lr`.
        multipliers: those of `hparams:` in a config that Megatron has no option for, such as `output_multiplier`.
        parametrization: as `parametrization:` in a config.
        tensors: YAML that says what tensors of layers of your own are.
        allow_change: keys that may differ from the checkpoint's.
        audit: where the first step is not the table's: `stop` ends the run, `warn` goes on, `off` does not look.
        telemetry_interval: steps between two readings of tensors and modules; 0 for none. If None: 100, or a thousandth
            of the steps where that is more.
        explain: print what each tensor gets once the model is to be built, and leave.
        write_config: a new file: as `explain`, and write the run there as a config to tune its proxy with.

    Raises:
        UserError: Bridge lacks something that this relies on; a file cannot be used; the recipe asks for something
            that has no rule here. What is only seen once the model is built ends the process with status 2.
    """
    require()
    from mup_megatron.bridge.run import put_into

    put_into(
        config,
        base,
        record=None if hparams is None else Path(hparams),
        sections={"hparams": dict(multipliers or {}), "parametrization": dict(parametrization or {})},
        tensors=None if tensors is None else str(tensors),
        allowed=tuple(allow_change),
        audit=audit,
        telemetry_interval=telemetry_interval,
        explain=explain or write_config is not None,
        written=None if write_config is None else Path(write_config),
    )
    from megatron.bridge.utils.instantiate_utils import (
        register_allowed_target_prefix,
    )

    register_allowed_target_prefix("mup_megatron")  # for the names that a ConfigContainer holds of this package


def require() -> None:
    """Whether the installed megatron-bridge has what this relies on.

    Raises:
        UserError: names version and symbol.
    """
    try:
        version = importlib.metadata.version("megatron-bridge")
    except importlib.metadata.PackageNotFoundError:
        version = "of unknown version"
    for module, names in SYMBOLS.items():
        try:
            found = importlib.import_module(module)
        except ImportError as error:
            raise UserError(
                f"megatron-bridge {version}: {module} cannot be imported ({error}); expected megatron-bridge "
                f"{VERSIONS} and what it imports itself, Transformer Engine among it (docs/bridge.md)"
            ) from None
        for name in names:
            if not hasattr(found, name):
                raise UserError(
                    f"megatron-bridge {version}: {module} has no {name}, on which mup_megatron.bridge relies; "
                    f"expected megatron-bridge {VERSIONS}"
                )
