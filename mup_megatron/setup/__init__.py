"""What a run is made of once it is resolved."""

from mup_megatron.setup.auto import resolve_auto

__all__ = ["resolve_auto"]
