"""`mup-megatron import SOURCE CONFIG`: a standard checkpoint becomes the first checkpoint of a run of this project.

Public name: `import_checkpoint`. SOURCE is a Hugging Face folder of an architecture that `export` writes, or a
checkpoint of plain megatron.training. export/hugging_face.py says where each tensor goes, and is read backwards.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from mup_megatron.checkpoint import Checkpoints, hash_files
from mup_megatron.config import Config
from mup_megatron.data.prepare import prepare
from mup_megatron.disk import full_disk
from mup_megatron.engines import WEIGHT
from mup_megatron.engines.saved_weights import BUFFER, SavedWeights, Tensor, write_tensors
from mup_megatron.errors import UserError, shown
from mup_megatron.export.architecture import Architecture
from mup_megatron.export.deepseek import DEEPSEEK
from mup_megatron.export.fold import Factors, FoldedWeights, expert_biases, fold, row_factors
from mup_megatron.export.folder import Part
from mup_megatron.export.hugging_face import activation_name, architecture_of
from mup_megatron.export.unfinished import LIST
from mup_megatron.layout import smallest_world
from mup_megatron.manifest import MANIFEST, make_manifest
from mup_megatron.optim import MOMENTS
from mup_megatron.parametrization import Parametrization
from mup_megatron.saved_run import TRACKER
from mup_megatron.setup import resolve
from mup_megatron.shapes import TensorSpec

_MOMENTS = "optimizer.state."
# What config.json says that no logit depends on, or that a tensor's shape says.
_FREE = (
    *("architectures", "initializer_range", "use_cache", "max_position_embeddings", "attention_dropout", "head_dim"),
    *("resid_pdrop", "embd_pdrop", "attn_pdrop", "router_aux_loss_coef", "rope_scaling", "rope_parameters"),
    "num_nextn_predict_layers",
)
# What transformers takes where config.json does not say it (modeling_rope_utils.py).
_ROPE = {"rope_type": "default", "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
# Buffers that older versions of transformers saved beside the weights.
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


def import_checkpoint(source: Path, config: Config, say: Callable[[str], None] = lambda _line: None) -> dict[str, Any]:
    """Writes a checkpoint into the run's folder, from which `mup-megatron train` goes on.

    Call `upstream.prepare_process` before. Tensors are read and written one by one. Prepares the run's data, by whose
    tokenizer the vocabulary is known.

    Args:
        source: the folder.
        config: the run: the source's model, under any base. Its folder holds no checkpoint yet.
        say: takes lines of progress.

    Returns:
        `checkpoint`, `step`, `tensors`, and whether the optimizer's state came along (`optimizer`).

    Raises:
        UserError: the source is none, is damaged, or is of another model; the run has a checkpoint.
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
    with ExitStack() as stack:
        step, tensors = read(source, parametrization, prepared.vocab_size, stack)
        begun = checkpoints.begin(step)
        _write(begun, tensors)
    # Random states are not among them, which a manifest without a layout says.
    manifest = make_manifest(parametrization, setup.layout, prepared.digest, step)
    manifest = manifest.replaced(layout={}, fused_activation=False)
    path = checkpoints.commit(manifest, hash_files(begun))
    moments = any(key.partition(".")[0] not in (WEIGHT, BUFFER) for key in tensors)
    return {"checkpoint": str(path), "step": step, "tensors": len(tensors), "optimizer": moments}


def _write(begun: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes the tensors, or nothing that stays."""
    needed = sum(4 * math.prod(tensor.shape) for tensor in tensors.values())
    whole = False
    try:
        with full_disk(begun, "the checkpoint", lambda: needed):
            write_tensors(begun, tensors)
        whole = True
    finally:
        if not whole:
            shutil.rmtree(begun, ignore_errors=True)


Weights = tuple[int, dict[str, Tensor]]
"""A step, and tensors by key, which are read when they are written."""
Read = Callable[[Path, Parametrization, int, ExitStack], Weights]


def _reader(source: Path) -> Read:
    """How a folder is read. Raises UserError where nobody knows."""
    if not source.is_dir():
        raise UserError(f"{source}: no such folder; expected one of Hugging Face, or a checkpoint of megatron.training")
    if (source / LIST).is_file():
        raise UserError(f"{source}: an export that has not ended; expected a whole one, which the same command writes")
    if (source / "config.json").is_file():
        return _hugging_face
    if (source / TRACKER).is_file() or (source / ".metadata").is_file():
        return _megatron
    raise UserError(
        f"{source}: neither config.json nor {TRACKER} is here; expected a folder of Hugging Face, or a checkpoint of "
        "megatron.training"
    )


# --- Hugging Face ---


def _hugging_face(folder: Path, parametrization: Parametrization, vocabulary: int, stack: ExitStack) -> Weights:
    """Step 0 and weights, every factor of the new base divided out of them."""
    config = parametrization.config
    if config.model.norm_gains != "trained" or config.model.layernorm_zero_centered_gamma:
        key = "norm_gains" if config.model.norm_gains != "trained" else "layernorm_zero_centered_gamma"
        raise config.error(
            f"model.{key}", "the source's norms have gains around 1; expected trained ones, kept as they are"
        )
    architecture = architecture_of(config, keep_multipliers=False)
    made = architecture.config(parametrization, activation_name(config.model, fused=False))
    _check_config(folder / "config.json", {**made, "vocab_size": vocabulary}, config)
    biases = expert_biases(parametrization)
    specs = {**{name: shape.spec for name, shape in parametrization.shapes.items()}, **biases}
    numbered = _Numbered({name: spec.shape for name, spec in specs.items()})
    parts = architecture.parts(FoldedWeights(numbered, parametrization, {}, vocabulary), config)  # type: ignore[arg-type]
    files = _tensors(folder, stack)
    _check_names(folder, set(files), {part.name for part in parts}, config, architecture)
    _check_shapes(folder, files, parts, config)
    factors = fold(parametrization) | architecture.factors(parametrization)
    made_of: dict[str | None, list[Part]] = {}
    for part in parts:
        made_of.setdefault(part.source, []).append(part)
    tensors = {}
    for name, spec in specs.items():
        filled = partial(_filled, folder, files, made_of.get(name, []), spec, factors.get(name, {None: 1.0}))
        tensors[f"{BUFFER if name in biases else WEIGHT}.{name}"] = Tensor(shape=spec.shape, make=filled)
    return 0, tensors


def _filled(
    folder: Path, files: Mapping[str, Any], parts: Sequence[Part], spec: TensorSpec, factors: Factors
) -> torch.Tensor:
    """One tensor, from the parts of the source that are made of it."""
    tensor = torch.zeros(spec.shape)
    for part in parts:
        places = part.make().long() - 1
        tensor.view(-1)[places.reshape(-1)] = _given(folder, files, part.name).reshape(-1)
    if set(factors.values()) != {1.0}:
        rows = row_factors(factors, spec, len(tensor))
        tensor.copy_(tensor.double() / rows.view(-1, *[1] * (tensor.dim() - 1)))
    return tensor


class _Numbered:
    """Weights whose elements are their own places, from 1, so that a tensor made of one says where each came from.

    Args:
        shapes: by global name.
    """

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.shapes = shapes

    def read(self, name: str) -> torch.Tensor:
        """A tensor's numbers, float64, which holds them exactly."""
        shape = self.shapes[name]
        return torch.arange(1, math.prod(shape) + 1, dtype=torch.float64).view(shape)


def _check_names(folder: Path, found: set[str], wanted: set[str], config: Config, architecture: Architecture) -> None:
    """Whether the folder holds all that the model has, and no more. Raises UserError with the first name."""
    if missing := wanted - found:
        raise UserError(f"{folder}: {min(missing)} is missing")
    further = f"model.layers.{config.model.num_layers}."  # where DeepSeek keeps multi-token prediction
    for name in sorted(found - wanted):
        tied = name == "lm_head.weight" and config.model.share_embeddings_and_output_weights
        predicts = architecture is DEEPSEEK and name.startswith(further)
        if not name.endswith(_BUFFERS) and not tied and not predicts:
            raise UserError(f"{folder}: holds {name}, which {architecture.name} of this config does not have")


def _check_shapes(folder: Path, files: Mapping[str, Any], parts: Sequence[Part], config: Config) -> None:
    """Whether tensors have the config's shapes, and are zeros where it has none.

    Raises:
        UserError: one is otherwise; names it.
    """
    for part in parts:
        found = list(files[part.name].get_slice(part.name).get_shape())
        if found != list(part.shape):
            raise UserError(f"{folder}: {part.name} is of shape {found}; expected {list(part.shape)} by the config")
        if part.source is None and _given(folder, files, part.name).count_nonzero():
            of_experts = part.name.endswith("e_score_correction_bias")
            key = "moe_router_enable_expert_bias" if of_experts else "add_bias_linear"
            raise config.error(f"model.{key}", f"{part.name} of {folder} is not zero; expected biases")


def _given(folder: Path, files: Mapping[str, Any], name: str) -> torch.Tensor:
    """A tensor of the folder, float32. Raises UserError where it is damaged."""
    try:
        given: torch.Tensor = files[name].get_tensor(name).float()
    except SafetensorError as error:
        raise UserError(f"{folder}: {name}: damaged ({error})") from None
    return given


def _check_config(path: Path, expected: Mapping[str, Any], config: Config) -> None:
    """Whether config.json is of the config's model. Raises UserError with the first key that differs."""
    found = _json(path)
    rope = found.get("rope_parameters") or {}
    theta = found.get("rope_theta", rope.get("rope_theta") if isinstance(rope, dict) else None)
    if isinstance(theta, int | float):
        found["rope_theta"] = float(theta)
    _check_rope(path, found, expected)
    for key, value in expected.items():
        if key not in _FREE and key in found and found[key] != value:
            raise UserError(f"{path}: {key} is {shown(found[key])}, and by {config.source} {shown(value)}")
    if found.get("model_type") != expected["model_type"]:
        raise UserError(f"{path}: model_type is missing; expected {expected['model_type']}")


def _check_rope(path: Path, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Whether RoPE is scaled as the config's, whatever the version of transformers that said so."""
    said = found.get("rope_scaling") or found.get("rope_parameters") or {}
    if not isinstance(said, dict):
        raise UserError(f"{path}: rope_scaling is {shown(said)}; expected a JSON object")
    said = {**({"rope_type": said["type"]} if "type" in said else {}), **said}
    wanted = expected.get("rope_scaling") or {"rope_type": "default"}
    if said.get("attention_factor") is not None:
        wanted = {"attention_factor": None, **wanted}
    for key, value in wanted.items():
        given = said.get(key, _ROPE.get(key))
        if given != value and not (key == "attention_factor" and given is None):
            raise UserError(f"{path}: {key} of its RoPE is {shown(given)}, and by the config {shown(value)}")


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: damaged ({error})") from None
    if not isinstance(found, dict):
        raise UserError(f"{path}: expected a JSON object")
    return found


def _tensors(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Open files by the names of the tensors in them."""
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        places = _json(index).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
            raise UserError(f"{index}: expected a weight_map from tensors to files")
        names = sorted(set(places.values()))
    elif not (folder / names[0]).is_file():
        raise UserError(f"{folder}: no model.safetensors is here; expected weights in safetensors")
    found: dict[str, Any] = {}
    for name in names:
        path = folder / name
        if "/" in name or not path.is_file():
            raise UserError(f"{path} is missing; {index.name} lists it")
        try:
            file = stack.enter_context(safe_open(str(path), framework="pt"))
            found |= dict.fromkeys(file.keys(), file)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: damaged ({error})") from None
    return found


# --- megatron.training ---


def _megatron(folder: Path, parametrization: Parametrization, vocabulary: int, stack: ExitStack) -> Weights:
    """The iteration, weights, and the optimizer's state where it is there by tensor."""
    path, step = _iteration(folder)
    if (path / MANIFEST).is_file():
        raise UserError(f"{path}: written in µP already; expected a checkpoint of plain megatron.training")
    config = parametrization.config
    changed = [
        name
        for name, tensor in parametrization.tensors.items()
        if {tensor.lr_multiplier, tensor.eps_multiplier or 1.0} != {1.0} and not tensor.shape.spec.frozen
    ]
    factors = [name for name, by_block in fold(parametrization).items() if set(by_block.values()) != {1.0}]
    if changed or factors:
        raise config.error(
            "base",
            f"under it {min(changed or factors)} would not go on at the source's rate; expected the model's own sizes "
            "as base (then mup-megatron rebase takes it to another)",
        )
    weights = SavedWeights(path, megatron="")
    kinds = {WEIGHT: weights}
    for kind in dict.fromkeys(kind for kinds in MOMENTS.values() for kind in kinds):
        saved = SavedWeights(path, megatron=f"{_MOMENTS}{kind}.")
        if saved.shapes:
            kinds[kind] = saved
    if step and len(kinds) == 1:
        raise UserError(
            f"{path}: holds no optimizer state by tensor; expected one saved with --dist-ckpt-optim-fully-reshardable, "
            "or without --use-distributed-optimizer"
        )
    tensors: dict[str, Tensor] = {}
    for kind, saved in kinds.items():
        for name, tensor in parametrization.tensors.items():
            shape = tensor.shape.spec.shape
            if kind != WEIGHT and kind not in MOMENTS[tensor.group.update_rule]:
                continue
            if saved.shapes.get(name) != shape:
                what = f"of shape {list(saved.shapes[name])}" if name in saved.shapes else "missing"
                raise UserError(f"{path}: {kind} of {name} is {what}; expected {list(shape)} by the config")
            tensors[f"{kind}.{name}"] = Tensor(shape=shape, make=partial(saved.read, name))
    _check_known(weights, parametrization, path)
    return step, tensors


def _check_known(weights: SavedWeights, parametrization: Parametrization, path: Path) -> None:
    """Whether the source holds no more than the model has. Raises UserError."""
    own = {name for name in weights.shapes if name.startswith(("embedding.", "decoder.", "output_layer.", "mtp."))}
    if unknown := own - set(parametrization.tensors):
        raise UserError(f"{path}: holds {min(unknown)}, which the model of this config does not have")


def _iteration(folder: Path) -> tuple[Path, int]:
    """The checkpoint that a folder is, or the latest that it holds, and its iteration."""
    tracker = folder / TRACKER
    if tracker.is_file():
        said = tracker.read_text(encoding="utf-8", errors="replace").strip()
        if said != "release" and not (said.isdecimal() and said.isascii()):
            raise UserError(f"{tracker}: expected the number of an iteration, found {shown(said)}")
        folder = folder / (said if said == "release" else f"iter_{int(said):07d}")
    if folder.name == "release":
        return folder, 0
    number = folder.name.removeprefix("iter_")
    if not (number.isdecimal() and number.isascii()):
        raise UserError(f"{folder}: expected a folder iter_0000100, or the one that --save named")
    return folder, int(number)
