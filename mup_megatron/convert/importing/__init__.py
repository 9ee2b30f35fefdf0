"""`mup-megatron import SOURCE CONFIG`: a standard checkpoint becomes the first checkpoint of a run of this project.

Public name: `import_checkpoint`. SOURCE is a Hugging Face folder of an architecture that `export` writes
(hugging_face.py, config_json.py), or a checkpoint of plain megatron.training (megatron.py). check.py compares the
logits of what was imported with those of transformers.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from mup_megatron.checkpoints.checkpoint import Checkpoints, hash_files
from mup_megatron.checkpoints.manifest import CheckpointManifest, make_manifest
from mup_megatron.config import Config, derive
from mup_megatron.convert.export.unfinished import LIST
from mup_megatron.convert.importing.check import compare
from mup_megatron.convert.importing.hugging_face import is_tanh_gelu, read_hugging_face
from mup_megatron.convert.importing.megatron import read_megatron
from mup_megatron.convert.importing.weights import Weights
from mup_megatron.convert.saved_run import TRACKER, SavedRun, config_here
from mup_megatron.data.prepare import prepare, prepared_tokenizer
from mup_megatron.engines import WEIGHT
from mup_megatron.engines.saved_weights import BUFFER, Tensor, write_tensors
from mup_megatron.engines.setup import resolve
from mup_megatron.parallel.layout import smallest_world
from mup_megatron.rules.table import Parametrization
from mup_megatron.util.disk import full_disk
from mup_megatron.util.errors import UserError


def import_checkpoint(
    source: Path, config: Config, say: Callable[[str], None] = lambda _line: None, *, check: bool = True
) -> dict[str, Any]:
    """Writes a checkpoint into the run's folder, from which `mup-megatron train` goes on.

    Call `upstream.prepare_process` before. Tensors are read and written one by one. Prepares the run's data, by whose
    tokenizer the vocabulary is known.

    Args:
        source: the folder.
        config: the run: the source's model, under any base. Its folder holds no checkpoint yet.
        say: takes lines of progress.
        check: whether logits are compared with transformers', where that can be done; see `check.compare`.

    Returns:
        `checkpoint`, `step`, `tensors`, whether the optimizer's state came along (`optimizer`), and `deviation` of
        logits, None where they were not compared.

    Raises:
        UserError: the source is none, is damaged, or is of another model; the run has a checkpoint; logits differ.
    """
    config.needs_gpt("import")
    config.needs_plain_weights("import")
    setup = resolve(config, smallest_world(config), trains=False)
    config = setup.config
    checkpoints = Checkpoints(Path(config.run.dir) / "checkpoints", config.training.checkpoints_kept)
    if existing := checkpoints.newest_first():
        raise UserError(f"{existing[0]} is there already; expected a run.dir without checkpoints")
    if config.model.mtp_num_layers:
        raise config.error("model.mtp_num_layers", "standard checkpoints have no such heads; expected none")
    read = _reader(source)
    prepared = prepare(config, say)
    parametrization = setup.parametrization(prepared.vocab_size)
    deviation = None
    with ExitStack() as stack:
        step, tensors = read(source, parametrization, prepared.vocab_size, stack)
        # Random states are not among them, which a manifest without a layout says.
        manifest = make_manifest(parametrization, setup.layout, prepared.digest, step)
        fused = (source / "config.json").is_file() and is_tanh_gelu(source, config)
        manifest = manifest.replaced(layout={}, fused_activation=fused)
        begun = checkpoints.begin(step)
        stack.callback(_remove, begun)  # which is not there any more where all went well
        _write(begun, tensors)
        if check:
            deviation = compare(source, _as_saved(manifest, begun), say)
        path = checkpoints.commit(manifest, hash_files(begun))
    if fused:
        say(
            "gelu_new is the tanh approximation, which megatron-core's kernel of bias and GELU computes on GPUs; on a "
            "CPU `train` computes the exact GELU"
        )
    moments = any(key.partition(".")[0] not in (WEIGHT, BUFFER) for key in tensors)
    said = {"checkpoint": str(path), "step": step, "tensors": len(tensors), "optimizer": moments}
    return {**said, "deviation": deviation}


def _write(begun: Path, tensors: Mapping[str, Tensor]) -> None:
    needed = sum(4 * math.prod(tensor.shape) for tensor in tensors.values())
    with full_disk(begun, "the checkpoint", lambda: needed):
        write_tensors(begun, tensors)


def _as_saved(manifest: CheckpointManifest, begun: Path) -> SavedRun:
    """The checkpoint that is not whole yet as one process opens it, in float32: bf16 would hide what differs."""
    config = derive(config_here(manifest, begun), {"training.precision": "fp32"})
    tokenizer = prepared_tokenizer(config, manifest.data_digest)
    return SavedRun(path=begun, manifest=manifest, config=config, tokenizer=tokenizer)


def _remove(begun: Path) -> None:
    """What an import that failed has written, and the folder that it made for it."""
    shutil.rmtree(begun, ignore_errors=True)
    with suppress(OSError):
        begun.parent.rmdir()  # where it is empty


Read = Callable[[Path, Parametrization, int, ExitStack], Weights]


def _reader(source: Path) -> Read:
    """How a folder is read. Raises UserError where nobody knows."""
    if not source.is_dir():
        raise UserError(f"{source}: no such folder; expected one of Hugging Face, or a checkpoint of megatron.training")
    if (source / LIST).is_file():
        raise UserError(f"{source}: an export that has not ended; expected a whole one, which the same command writes")
    if (source / "config.json").is_file():
        return read_hugging_face
    if (source / TRACKER).is_file() or (source / ".metadata").is_file():
        return read_megatron
    raise UserError(
        f"{source}: neither config.json nor {TRACKER} is here; expected a folder of Hugging Face, or a checkpoint of "
        "megatron.training"
    )
