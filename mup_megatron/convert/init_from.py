"""`train --init-from CHECKPOINT`: the weights that a run begins with, instead of initial values.

Public names: `InitFrom`, `Start`, `check_start`, `load_start`. Weights alone are taken: the run begins at step 0, with
a fresh optimizer and with its data from the start. Rates and multipliers are those of the run's own config under the
checkpoint's base, so model, base and forward multipliers must be the checkpoint's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mup_megatron.checkpoints.manifest import CheckpointManifest, check_settings, settings_of
from mup_megatron.config import Config, Model
from mup_megatron.convert.saved_run import find_checkpoint
from mup_megatron.parallel.layout import Layout
from mup_megatron.rules.table import WORD_EMBEDDINGS, Parametrization
from mup_megatron.util.errors import UserError

if TYPE_CHECKING:
    from megatron.core.models.common.language_module.language_module import LanguageModule

_MULTIPLIERS = (
    *("embedding_multiplier", "attention_multiplier", "output_multiplier", "residual_multiplier"),
    "relative_bias_multiplier",
)
# Keys of the model that the function of trained weights does not depend on, or that a tensor's shape says.
_FREE = (
    *("hidden_dropout", "attention_dropout", "vocab_size", "max_position_embeddings", "make_vocab_size_divisible_by"),
    *("moe_aux_loss_coeff", "moe_router_load_balancing_type", "mtp_loss_scaling_factor", *Model.PLAIN_KERNELS),
)
_READOUT = "output_layer.weight"


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run begins.

    Args:
        path: of the checkpoint.
        asked: what was typed, as an absolute path: the checkpoint, or a folder whose latest it is.
        manifest: its mup.json.
        new_embeddings: whether word embeddings and readout keep their initial values.
    """

    path: Path
    asked: str
    manifest: CheckpointManifest
    new_embeddings: bool

    @property
    def left_out(self) -> frozenset[str]:
        """Tensors that keep their initial values."""
        return frozenset((WORD_EMBEDDINGS, _READOUT)) if self.new_embeddings else frozenset()

    def as_json(self) -> dict[str, Any]:
        """What the run's manifest and explain.json say of it."""
        return {
            "checkpoint": str(self.path.resolve()),
            "asked": self.asked,
            "step": self.manifest.step,
            "new_embeddings": self.new_embeddings,
        }


class InitFrom(NamedTuple):
    """What `--init-from` says.

    Args:
        path: of a checkpoint, or of a folder whose latest counts.
        new_embeddings: whether word embeddings and readout keep their initial values.
    """

    path: Path
    new_embeddings: bool = False

    def find(self) -> Start:
        """The checkpoint, of any layout and engine. Raises UserError where there is none, or it is damaged."""
        path = find_checkpoint(self.path)
        manifest = CheckpointManifest.read(path)
        return Start(path=path, asked=self._asked, manifest=manifest, new_embeddings=self.new_embeddings)

    @property
    def _asked(self) -> str:
        return os.path.abspath(self.path)

    def check_same(self, before: Mapping[str, Any] | None, where: Path) -> None:
        """Whether a run that goes on is the one that began so. The source is not read again, and may be gone.

        Args:
            before: what the run's manifest says of its beginning (`initialised_from`).
            where: its checkpoint or its folder, for the message.

        Raises:
            UserError: it began otherwise.
        """
        if before is None:
            raise UserError(f"--init-from: {where} began with initial values; expected a run.dir without checkpoints")
        if before["asked"] != self._asked or before["new_embeddings"] != self.new_embeddings:
            new = " with --new-embeddings" if before["new_embeddings"] else ""
            raise UserError(
                f"--init-from: {where} began from {before['asked']}{new}; expected the same, or a run.dir without "
                "checkpoints"
            )


def check_start(start: Start, parametrization: Parametrization, current: CheckpointManifest) -> None:
    """Whether the weights compute in this run what they computed in theirs.

    Args:
        start: where the run begins.
        parametrization: of this run.
        current: the manifest that this run would write at step 0.

    Raises:
        UserError: model, base, multipliers or tokenizer are others; says which and what would be right.
    """
    config, found = parametrization.config, start.manifest
    config.needs_plain_weights("--init-from")
    if found.thetas:
        raise UserError(
            f"{start.path}: its weights are stored at unit scale (parametrization.scaling), which --init-from does not "
            "know; expected a checkpoint of scaling: none"
        )
    advice = "it begins a run of the same model and multipliers; rates, data, batch, schedule and optimizer may differ"
    check_settings(_function(found.config), _function(current.config), start.path, advice=advice)
    _check_base(start, current, config)
    if not start.new_embeddings:
        _check_tokenizer(start, current, config)
    if found.key_prefix is not None and config.model.mtp_num_layers:
        raise config.error("model.mtp_num_layers", f"heads of {start.path} are not read; expected none")


def _function(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that decide what a model of given weights computes; a rule over depth reads the base's layers."""
    plain = settings_of(config)
    layers = plain["base"]["num_layers"] or plain["model"]["num_layers"]
    return {
        "base": {"num_layers": layers},
        "model": {key: value for key, value in plain["model"].items() if key not in _FREE},
        "hparams": {key: plain["hparams"].get(key, 1.0) for key in _MULTIPLIERS},
        "parametrization": {key: plain["parametrization"][key] for key in ("name", "depth")},
    }


def _check_base(start: Start, current: CheckpointManifest, config: Config) -> None:
    hint = (
        "expected the checkpoint's base: section, or the checkpoint taken to this base by mup-megatron rebase "
        f"{start.path} DIR --base FILE"
    )
    for name, base in current.base_shapes.items():
        before = start.manifest.base_shapes.get(name)
        if before != base and name not in start.left_out:
            raise UserError(f"{start.path}: {name} has the base {before} there, and {base} by {config.source}; {hint}")
    others = {
        "base_head_size": (start.manifest.base_head_size, current.base_head_size),
        "carried": (start.manifest.carried or {}, current.carried or {}),
    }
    for what, (there, here) in others.items():
        if there is not None and there != here:
            raise UserError(f"{start.path}: {what} is another than by {config.source}; {hint}")


def _check_tokenizer(start: Start, current: CheckpointManifest, config: Config) -> None:
    """Whether tokens mean what they meant, as far as the checkpoint tells."""
    found = start.manifest
    known = found.key_prefix is None  # else Megatron's words for it are not ours; the embedding's rows are compared
    same = found.tokenizer.get("library") in (None, current.tokenizer["library"])
    if known and not (same and found.tokenizer_sha256 in (None, current.tokenizer_sha256)):
        own = _tokenizer_of(start)
        where = f"data.tokenizer.path: {own}" if own is not None and own.exists() else "that one"
        raise config.error(
            "data.tokenizer",
            f"another tokenizer than the one of {start.path}; expected {where}, or --new-embeddings, which leaves "
            "embedding and readout at their initial values",
        )


def _tokenizer_of(start: Start) -> Path | None:
    data, run = start.manifest.config["data"], start.manifest.config["run"]
    if data["tokenizer"]["path"] is not None:
        return Path(data["tokenizer"]["path"])
    inside = start.path.parent.parent if start.path.parent.name == "checkpoints" else Path(run["dir"])
    return inside / (data["dir"] or "data") / "tokenizer.model"


def load_start(
    start: Start, chunks: list[LanguageModule], parametrization: Parametrization, layout: Layout, rank: int
) -> None:
    """Reads the weights into a model that has its initial values. Collective.

    Args:
        start: checked by `check_start`.
        chunks: this rank's part.
        parametrization: of this run.
        layout: of this run.
        rank: of this process.

    Raises:
        UserError: a tensor is missing, of another shape, or damaged.
    """
    if start.manifest.key_prefix is None:
        from mup_megatron.engines.state import load_weights

        load_weights(chunks, parametrization, layout, rank, start.path, start.left_out)
        return
    from mup_megatron.engines.saved_weights import SavedWeights, read_into

    weights = SavedWeights(start.path, megatron=start.manifest.key_prefix)
    read_into(chunks, weights, layout, rank, start.left_out)
