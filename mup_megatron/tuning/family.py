"""What makes two configs one family, between which values transfer, as plain data and as a digest.

Public names: `digested`, `digest`, `differences`. The digest covers the model without the sizes that grow, the base,
the parametrization, the tokenizer and the optimizer. Imports no torch, so that what only shares a study is light.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mup_megatron.config import Config, Model


def digested(config: Config) -> dict[str, Any]:
    """What must be equal for values to transfer, by dotted key."""
    grows = set(config.base.sizes)
    if config.parametrization.depth != "none":
        grows.add("num_layers")
    model = config.model.model_dump(exclude={*Model.PLAIN_KERNELS, "vocab_size", *grows})
    tokenizer = config.data.tokenizer
    settings = {
        "model": {**model, "vocab_size": config.vocab_size},
        "base": config.base.model_dump(),
        "parametrization": config.parametrization.model_dump(),
        "data.tokenizer": {
            "library": tokenizer.library,
            "path": Path(tokenizer.path).name if tokenizer.path else None,
        },
        "optimizer": config.optimizer.model_dump(exclude={"implementation"}),
    }
    return {f"{section}.{key}": value for section, keys in settings.items() for key, value in keys.items()}


def digest(settings: Mapping[str, Any]) -> str:
    """SHA-256 of plain data."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def differences(before: Mapping[str, Any], now: Mapping[str, Any], then: str, here: str) -> list[str]:
    """The keys that differ, with both values, in words."""
    return [
        f"{key}: {before.get(key)!r} {then}, {now.get(key)!r} {here}"
        for key in sorted(set(before) | set(now))
        if before.get(key) != now.get(key)
    ]
