"""A run, resolved once: what model, engines, training, tuning and proof are given instead of a bare config.

Public names: `Setup`, `resolve`, `resolve_auto`, `refuse`, `refuse_anywhere`. auto.py says what `auto` means here;
deepspeed.py and megatron.py know what each engine gets wrong or lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mup_megatron.config import Config, derive
from mup_megatron.engines.setup.auto import resolve_auto
from mup_megatron.parallel.layout import Layout, resolve_layout

if TYPE_CHECKING:
    from mup_megatron.rules.table import Parametrization

__all__ = ["Setup", "refuse", "refuse_anywhere", "resolve", "resolve_auto"]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A run that can be built; made by `resolve`.

    Args:
        config: of the run, every `auto` resolved.
        layout: how ranks split the model.
        trains: whether it is trained here, and was checked for what its engine gets wrong or lacks.
        deepspeed: what `deepspeed.initialize` gets; None under another engine, or where it is not trained here.
    """

    config: Config
    layout: Layout
    trains: bool = True
    deepspeed: Mapping[str, Any] | None = None
    _parametrizations: dict[int, Parametrization] = field(default_factory=dict, init=False, repr=False, compare=False)

    def parametrization(self, vocab_size: int) -> Parametrization:
        """The rules of every tensor, worked out when they are first asked for.

        Args:
            vocab_size: entries of the tokenizer, before padding.

        Raises:
            UserError: the config's model cannot be built, or its base does not fit.
        """
        from mup_megatron.model.build import parametrize

        if vocab_size not in self._parametrizations:
            self._parametrizations[vocab_size] = parametrize(self.config, vocab_size)
        return self._parametrizations[vocab_size]

    def derive(self, keys: Mapping[str, Any]) -> Setup:
        """This run with dotted keys replaced, resolved again only where a value differs. Raises ConfigError."""
        config = derive(self.config, keys)
        return self if config == self.config else resolve(config, self.layout.world_size, trains=self.trains)


def resolve(config: Config, world_size: int, *, trains: bool = True) -> Setup:
    """What a config means on so many processes. The one place where a run is refused before anything is built.

    Args:
        config: the run.
        world_size: processes that share the model.
        trains: whether it will be trained here; a run that is only planned or shown may need what this machine lacks.

    Raises:
        ConfigError: an implementation is not installed, a size does not divide, or the engine gets the mix wrong or
            lacks it; names the key.
        UserError: the DeepSpeed JSON cannot be read.
    """
    from mup_megatron.parallel import upstream

    upstream.prepare_process()
    config = resolve_auto(config)
    layout = resolve_layout(config, world_size)
    deepspeed = refuse(config, layout) if trains else None
    return Setup(config=config, layout=layout, trains=trains, deepspeed=deepspeed)


def refuse(config: Config, layout: Layout) -> dict[str, Any] | None:
    """Refuses what the config's engine gets wrong or does not have, before anything is built.

    Returns:
        What `deepspeed.initialize` gets; None under the Megatron engine.

    Raises:
        ConfigError: names the key and what works.
        UserError: the DeepSpeed JSON cannot be read.
    """
    refuse_anywhere(config)
    if config.parallel.engine == "megatron":
        from mup_megatron.engines.setup import megatron

        megatron.refuse(config, layout)
        return None
    from mup_megatron.engines.setup import deepspeed

    deepspeed.refuse(config, layout)
    return deepspeed.deepspeed_config(config, layout)


def refuse_anywhere(config: Config) -> None:
    """Refuses what no engine trains here, on whichever machine.

    Raises:
        ConfigError: names the key and what works.
    """
    if config.training.precision == "fp16":
        raise config.error("training.precision", "fp16 is trained by mup-megatron run; expected bf16, fp32 or auto")
    for name in ("decoupled_lr", "decoupled_min_lr"):
        if getattr(config.optimizer, name) is not None:
            raise config.error(
                f"optimizer.{name}",
                "is Megatron's option, for mup-megatron run; expected null, and hparams.embedding_multiplier or "
                "hparams.output_multiplier tuned instead",
            )
    model = config.model
    if model.num_moe_experts is not None and model.add_bias_linear and model.transformer_impl == "local":
        raise config.error(
            "model.add_bias_linear",
            "megatron-core's local experts add a bias in place to what autograd does not let be changed; expected "
            "false, or transformer_impl: transformer_engine",
        )
