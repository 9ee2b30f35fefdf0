"""What must hold where weights are stored at unit scale (docs/parametrization.md, 11). Public name: `CHECKS`."""

from __future__ import annotations

from mup_megatron.config.schema import Config

_KEY = "parametrization.scaling"


def _check_unit_scale(config: Config) -> None:
    if config.parametrization.scaling == "none":
        return
    if config.model.as_built is not None:
        raise config.error(_KEY, "unit is not known of layers that a script builds itself; expected none")
    config.needs_gpt(f"{_KEY}: unit")
    if config.optimizer.name in ("muon", "soap"):
        raise config.error(
            _KEY,
            f"unit has no exact rule for {'Muon' if config.optimizer.name == 'muon' else 'SOAP'}, whose iteration "
            "makes an update of the same size of any gradient, but not to the last bit; expected none, or "
            "optimizer.name: adamw, adam, sgd or lion",
        )
    if config.model.transformer_impl == "transformer_engine":
        raise config.error(
            _KEY,
            "unit was not run with Transformer Engine's layers; expected none, or model.transformer_impl: local",
        )
    if config.tuning.command:
        raise config.error(_KEY, "unit is not known of trials that a script runs (tuning.command); expected none")


CHECKS = (_check_unit_scale,)
"""In this order; each takes a config and raises ConfigError."""
