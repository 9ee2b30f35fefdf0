"""What makes two configs one family, between which values transfer, as plain data and as a digest.

Public names: `digested`, `as_read`, `digest`, `differences`. The digest covers the model without the sizes that grow,
the base, the parametrization, the tokenizer and the optimizer. Imports no torch, so that what only shares a study is
light.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from mup_megatron.config import BETAS, OF_EXPERTS, Config, Model, growing_sizes
from mup_megatron.util.errors import UserError, shown
from mup_megatron.util.files import sha256_of


def digested(config: Config, tuned: Collection[str] | None = None) -> dict[str, Any]:
    """What must be equal for values to transfer, by dotted key.

    Under `base:` is every size that grows, also one that grows because another does, so that it makes no difference
    whether a config names it; of a file of base shapes it is the content, wherever the file lies.

    Args:
        config: the run.
        tuned: hyperparameters that a record's study tuned, whose values are its own; None is what the config searches.

    Raises:
        UserError: the file of base shapes cannot be read.
    """
    growth = growing_sizes(config)
    grows = set(growth)
    if config.parametrization.depth != "none":
        grows.add("num_layers")
    # Keys that say nothing here, which records of before they came do not have.
    others = {name for name in ("bert_binary_head", "encoder_num_layers") if not getattr(config.model, name)}
    if config.model.position_embedding_type != "relative":
        others |= {"relative_attention_num_buckets", "relative_attention_max_distance"}
    model = config.model.model_dump(exclude={*Model.PLAIN_KERNELS, "vocab_size", *grows, *others})
    base = {**config.base.model_dump(), **{name: size.base for name, size in growth.items()}}
    base = {name: size for name, size in base.items() if name not in OF_EXPERTS or size is not None}
    if config.base.file is not None:
        base["file"] = _sha256(config.base.file)
    tokenizer, betas = config.data.tokenizer, config.optimizer.betas
    tuned = config.tuning.search if tuned is None else tuned
    settings = {
        "model": {**model, "vocab_size": config.vocab_size},
        "base": base,
        # A rule that is off is left out, so that records from before there was one keep their digest. So is one whose
        # exponent a ladder says: trials do not see it, and the record may get it later.
        "parametrization": {
            name: value
            for name, value in config.parametrization.model_dump().items()
            if name not in ("batch", "tokens", "experts", "scaling") or not value.startswith(("none", "fitted"))
        },
        "data.tokenizer": {
            "library": tokenizer.library,
            "path": Path(tokenizer.path).name if tokenizer.path else None,
        },
        "optimizer": {
            **config.optimizer.model_dump(exclude={"implementation", "soap_eps"}),
            # What is tuned is the record's.
            "betas": [None if name in tuned else beta for name, beta in zip(BETAS, betas, strict=True)],
            "momentum": None if "one_minus_momentum" in tuned else config.optimizer.momentum,
            **_lion_steps(config),
            # Left out elsewhere, so that records from before there was one keep their digest.
            **({"soap_eps": config.optimizer.soap_eps} if config.optimizer.name == "soap" else {}),
        },
    }
    return as_read({f"{section}.{key}": value for section, keys in settings.items() for key, value in keys.items()})


def as_read(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Plain data as a file of JSON gives it back, where tuples are lists: what is equal there is equal here."""
    found: dict[str, Any] = json.loads(json.dumps(settings))
    return found


def _lion_steps(config: Config) -> dict[str, str]:
    """What Lion steps, where it is not what megatron-core's does, whose records keep their digest."""
    return {"steps": "every tensor"} if config.optimizer.name == "lion" and not config.steps_matrices else {}


def _sha256(path: str) -> str:
    try:
        return f"sha256:{sha256_of(path)}"
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot read base shapes: {getattr(error, 'strerror', None) or error}") from None


def digest(settings: Mapping[str, Any]) -> str:
    """SHA-256 of plain data."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def differences(before: Mapping[str, Any], now: Mapping[str, Any], then: str, here: str) -> list[str]:
    """The keys that differ, with both values, in words."""
    return [
        f"{key}: {shown(before.get(key))} {then}, {shown(now.get(key))} {here}"
        for key in sorted(set(before) | set(now))
        if before.get(key) != now.get(key)
    ]
