"""Hyperparameters of single kinds of tensors: `hparams.per_tensor:`.

Public names: `KINDS`, `PerTensor`, `is_pattern`, `split_name`, `full_name`, `config_key`, `flat`, `folded`. Which
tensors a kind holds is said in rules/kinds.py. As hyperparameters that can be searched, and in a transfer record, they
have names such as `per_tensor.embedding.lr`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mup_megatron.config.section import NonNegativeFloat, PositiveFloat, Section

KINDS: dict[str, str] = {
    "embedding": "word and position embeddings",
    "hidden": "every matrix between embedding and readout but routers",
    "attention": "every matrix of attention",
    "attention_q": "what makes queries, in a fused tensor its query rows",
    "attention_k": "what makes keys, in a fused tensor its key rows",
    "attention_v": "what makes values, in a fused tensor its value rows",
    "attention_o": "attention's output projection",
    "mlp": "every matrix of a dense MLP",
    "experts": "every matrix of routed experts",
    "shared_experts": "every matrix of shared experts but their gate",
    "ffn_gate": "the gated rows of the first layer of an MLP or expert",
    "ffn_up": "the other rows of that layer, all of them without a gate",
    "ffn_down": "the second layer of an MLP or expert",
    "router": "routers, and shared experts' gates",
    "readout": "the head, where it is not tied to the embedding",
    "gains": "gains of norms",
    "biases": "biases of linear layers and norms",
}
"""The kinds, and what each holds."""

PREFIX = "per_tensor."


class PerTensor(Section):
    """Factors on what the rules give a kind of tensor, the same at every size. All are 1 unless said."""

    lr: PositiveFloat = 1.0
    """Factor on the learning rate. Unit: a factor."""
    weight_decay: NonNegativeFloat = 1.0
    """Factor on the decoupled weight decay. Unit: a factor."""
    init: PositiveFloat = 1.0
    """Factor on the standard deviation of initial values. Unit: a factor."""


_QUANTITIES = tuple(PerTensor.model_fields)
"""What each entry says."""


def is_pattern(entry: str) -> bool:
    """Whether an entry is a pattern of global names, and no kind: it has a star, a question mark or a dot."""
    return any(sign in entry for sign in "*?.")


def split_name(name: str) -> tuple[str, str] | None:
    """The entry and the quantity of `per_tensor.embedding.lr`; None for another name."""
    entry, dot, what = name.removeprefix(PREFIX).rpartition(".")
    return (entry, what) if name.startswith(PREFIX) and dot and entry and what in _QUANTITIES else None


def full_name(entry: str, what: str) -> str:
    """The counterpart of `split_name`."""
    return f"{PREFIX}{entry}.{what}"


def config_key(name: str) -> str:
    """The dotted key of a full name: `hparams.per_tensor.embedding.lr`; an entry with dots stands in quotes."""
    entry, what = split_name(name) or ("", name)
    return f'hparams.{PREFIX}"{entry}".{what}' if "." in entry else f"hparams.{PREFIX}{entry}.{what}"


def flat(entries: Mapping[str, PerTensor]) -> dict[str, float]:
    """Every factor that is not 1, by its full name."""
    return {
        full_name(entry, what): getattr(factors, what)
        for entry, factors in entries.items()
        for what in _QUANTITIES
        if getattr(factors, what) != 1.0
    }


def folded(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Values by full name as `hparams.per_tensor` has them; other names are left out."""
    entries: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        if (parts := split_name(name)) is not None:
            entries.setdefault(parts[0], {})[parts[1]] = value
    return entries
