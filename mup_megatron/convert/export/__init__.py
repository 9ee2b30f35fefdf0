"""`mup-megatron export CHECKPOINT DIR`: a checkpoint that knows nothing of µP, for tools that know nothing of it.

Public names: `export`, `Source`, `open_source`, `check_base`, `export_hugging_face`, `export_safetensors`,
`export_megatron`, `PROVENANCE`. Weights are read and written one by one, so that memory holds a tensor or two and never
the model, except for Megatron. fold.py says which factor goes where, hugging_face.py and megatron_core.py what the
target's tensors are, folder.py writes.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mup_megatron.checkpoints.checkpoint import SUMS
from mup_megatron.checkpoints.manifest import CheckpointManifest
from mup_megatron.convert.export import megatron_core
from mup_megatron.convert.export.fold import Factors, FoldedWeights, fold
from mup_megatron.convert.export.folder import Part, as_bytes, new_folder, refuse_existing
from mup_megatron.convert.export.hugging_face import activation_name, architecture_of
from mup_megatron.convert.export.tokenizer import tokenizer_files
from mup_megatron.convert.saved_run import SavedRun, open_run
from mup_megatron.engines.saved_weights import SavedWeights
from mup_megatron.model.build import parametrize
from mup_megatron.rules.table import Parametrization
from mup_megatron.util.errors import UserError
from mup_megatron.util.files import read_text

PROVENANCE = "mup_export.json"
"""File that says what an export was made of and what was folded."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Source:
    """A checkpoint to export.

    Args:
        run: where it is, its config and tokenizer.
        parametrization: its forward multipliers.
        weights: of the checkpoint.
    """

    run: SavedRun
    parametrization: Parametrization
    weights: SavedWeights

    @property
    def vocabulary(self) -> int:
        """Entries of the tokenizer and the mask that BERT has beside them, without what pads them."""
        return int(self.run.tokenizer.vocab_size) + self.run.config.model.added_tokens


def open_source(path: Path, tokenizer: str | None = None) -> Source:
    """Opens a checkpoint and works out its multipliers. Starts no process group.

    Call `upstream.prepare_process` before.

    Args:
        path: as for `open_run`.
        tokenizer: instead of the checkpoint's own.

    Raises:
        UserError: as `open_run`, or its base is another than its config gives here.
    """
    run = open_run(path, tokenizer)
    parametrization = parametrize(run.config, int(run.tokenizer.vocab_size))
    check_base(run.manifest, parametrization, run.path)
    return Source(run=run, parametrization=parametrization, weights=run.weights())


def check_base(manifest: CheckpointManifest, parametrization: Parametrization, path: Path) -> None:
    """Whether the multipliers are those that the run had: the base may stand in a file that has changed since."""
    for name, shape in parametrization.shapes.items():
        base = [dim.base_dim for dim in shape.infshape]
        if manifest.base_shapes.get(name) != base:
            raise UserError(
                f"{path}: {name} has the base {manifest.base_shapes.get(name)} in the checkpoint, and {base} by its "
                "config; expected the base file of the run"
            )
    if manifest.base_head_size not in (None, parametrization.base_head_size):
        raise UserError(
            f"{path}: the base's head size is {manifest.base_head_size} in the checkpoint, and "
            f"{parametrization.base_head_size} by its config; expected the base file of the run"
        )


def export(
    checkpoint: Path,
    directory: Path,
    to: str = "hf",
    *,
    keep_multipliers: bool = False,
    tokenizer: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Opens a checkpoint and exports it.

    Args:
        checkpoint: as for `open_source`.
        directory: which is not there yet.
        to: hf, safetensors or megatron.
        keep_multipliers: see `export_hugging_face`; of no other target.
        tokenizer: as for `open_source`.
        options: see `export_hugging_face`.

    Returns:
        What PROVENANCE says.

    Raises:
        UserError: as `open_source` and the target's own function.
    """
    refuse_existing(directory)
    if to == "hf":
        source = open_source(checkpoint, tokenizer)
        return export_hugging_face(source, directory, keep_multipliers=keep_multipliers, **options)
    if keep_multipliers:
        raise UserError(f"--keep-multipliers: Granite has multipliers, --to {to} has none; expected --to hf")
    return TARGETS[to](open_source(checkpoint, tokenizer), directory, **options)


def export_hugging_face(
    source: Source,
    directory: Path,
    *,
    dtype: str = "fp32",
    max_shard_size: int = 5 * 10**9,
    keep_multipliers: bool = False,
    say: Callable[[str], None] = lambda _line: None,
) -> dict[str, Any]:
    """Writes a folder that transformers loads: config.json, weights, generation_config.json, the tokenizer.

    Args:
        source: the checkpoint.
        directory: which is not there yet.
        dtype: fp32, or bf16, which rounds each number once, factor and all.
        max_shard_size: bytes of tensors in a file.
        keep_multipliers: leaves the weights as they are, for an architecture that has the multipliers.
        say: takes lines of progress.

    Returns:
        What PROVENANCE says.

    Raises:
        UserError: no architecture computes this model, a factor cannot be folded, a file is damaged, or the folder is
            there or cannot be written.
    """
    config, parametrization = source.run.config, source.parametrization
    architecture = architecture_of(config, keep_multipliers=keep_multipliers)
    factors = ({} if keep_multipliers else fold(parametrization)) | architecture.factors(parametrization)
    weights = FoldedWeights(source.weights, parametrization, factors, source.vocabulary)
    parts = architecture.parts(weights, config)
    files, remark = tokenizer_files(source.run)
    activation = activation_name(config.model, fused=source.run.fused_activation)
    eod = int(source.run.tokenizer.eod)
    # A document begins after the end of another, as in training, and so does what an encoder-decoder writes.
    special = {"bos_token_id": eod, "eos_token_id": eod}
    if config.model.family == "t5":
        special["decoder_start_token_id"] = eod
    made = architecture.config(parametrization, activation)
    name = str(DTYPES[dtype]).removeprefix("torch.")
    made |= {"vocab_size": source.vocabulary, **special, "torch_dtype": name, "dtype": name}
    said = {"to": "hf", "architecture": architecture.name, "dtype": dtype, **provenance(source, weights.factors)}
    for line in filter(None, (remark, architecture.remark(activation))):
        say(line)
    described: dict[str, Any] = {
        "config.json": made,
        "generation_config.json": {**special, "pad_token_id": eod},
        **files,
    }
    return _write(source, directory, described, parts, said, max_shard_size, say)


def export_safetensors(
    source: Source,
    directory: Path,
    *,
    dtype: str = "fp32",
    max_shard_size: int = 5 * 10**9,
    say: Callable[[str], None] = lambda _line: None,
) -> dict[str, Any]:
    """Writes the folded weights under megatron-core's global names, and model.json, which says what model they are.

    Arguments, result and errors as `export_hugging_face`.
    """
    config = source.run.config
    factors = fold(source.parametrization)
    weights = FoldedWeights(source.weights, source.parametrization, factors, source.vocabulary)
    parts = megatron_core.parts(weights)
    said = {"to": "safetensors", "architecture": "megatron-core", "dtype": dtype, **provenance(source, weights.factors)}
    described = {"model.json": megatron_core.plain_model(config, source.vocabulary)}
    return _write(source, directory, described, parts, said, max_shard_size, say)


def _write(
    source: Source,
    directory: Path,
    described: Mapping[str, bytes | dict[str, Any]],
    parts: Sequence[Part],
    said: dict[str, Any],
    max_shard_size: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Writes the folder: its tensors, what describes the model, and PROVENANCE, which is returned.

    The description comes last: without it nobody takes a folder for a model.
    """
    dtype = DTYPES[said["dtype"]]
    contents = [hashlib.sha256(as_bytes(content)).hexdigest() for content in described.values()]
    shapes = [(part.name, part.shape) for part in parts]
    parted = [said, list(described), contents, shapes, max_shard_size, _fingerprint(source.run.path)]
    identity = hashlib.sha256(json.dumps(parted).encode()).hexdigest()
    with new_folder(directory, sum(part.size(dtype) for part in parts), say, identity=identity) as folder:
        folder.write_tensors(parts, dtype, max_shard_size)
        for name, content in described.items():
            folder.write(name, content)
        folder.write(PROVENANCE, said)
    return said


def _fingerprint(checkpoint: Path) -> list[Any]:
    """What changes where a file of the checkpoint does: its checksums, or sizes and times where it has none."""
    if (checkpoint / SUMS).is_file():
        return [read_text(checkpoint / SUMS)]
    files = sorted(path for path in checkpoint.iterdir() if path.is_file())
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]


def export_megatron(
    source: Source,
    directory: Path,
    *,
    dtype: str = "fp32",
    max_shard_size: int = 5 * 10**9,
    say: Callable[[str], None] = lambda _line: None,
) -> dict[str, Any]:
    """Writes a folder that plain megatron.training loads with --load, and megatron_options.txt, which it is told too.

    All weights are in memory at once, float32. Arguments, result and errors as `export_hugging_face`; float32 alone,
    and `max_shard_size` says nothing.

    Raises:
        UserError: also where Megatron has no option for the model.
    """
    config, parametrization = source.run.config, source.parametrization
    config.needs_gpt("export --to megatron")
    if dtype != "fp32":
        raise UserError(
            "--dtype bf16: a Megatron checkpoint is loaded into whatever precision its run has; expected fp32"
        )
    options = megatron_core.megatron_options(config, fused=source.run.fused_activation)
    factors = fold(parametrization)
    rows = config.model.padded_vocab_size(source.vocabulary)
    weights = FoldedWeights(source.weights, parametrization, factors, rows)
    said = {"to": "megatron", "architecture": "megatron-core", "dtype": dtype, **provenance(source, weights.factors)}
    with new_folder(directory, sum(part.numbers for part in megatron_core.parts(weights)) * 4, say) as folder:
        release = folder.path / megatron_core.RELEASE
        release.mkdir()
        megatron_core.save_release(config, source.vocabulary, weights, release)
        folder.add(megatron_core.RELEASE)
        folder.write("latest_checkpointed_iteration.txt", megatron_core.RELEASE)
        folder.write("megatron_options.txt", "".join(f"{option}\n" for option in options))
        folder.write(PROVENANCE, said)
    return said


TARGETS = {"safetensors": export_safetensors, "megatron": export_megatron}


def provenance(source: Source, factors: Mapping[str, Factors]) -> dict[str, Any]:
    """What an export was made of: checkpoint, multipliers, and the factor of every tensor that was changed."""
    run, forward = source.run, source.parametrization.forward
    folded = {
        name: {block or "all": factor for block, factor in by_block.items()}
        for name, by_block in factors.items()
        if name in source.parametrization.shapes and any(factor != 1.0 for factor in by_block.values())
    }
    return {
        "checkpoint": str(run.path),
        "step": run.manifest.step,
        "mup_megatron": importlib.metadata.version("mup-megatron"),
        "vocabulary": source.vocabulary,
        "multipliers": {
            "softmax_scale": forward.softmax_scale,
            "readout": forward.readout,
            "embedding": forward.embedding,
            "residual": forward.residual,
        },
        "folded": folded,
    }
