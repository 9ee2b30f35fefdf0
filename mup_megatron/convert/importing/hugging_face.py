"""A folder of Hugging Face, read as weights of this project's model, every factor of the new base divided out.

Public names: `read_hugging_face`, `is_tanh_gelu`. It reads convert/export/hugging_face.py's places backwards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from mup_megatron.config import Config
from mup_megatron.convert.export.architecture import Architecture
from mup_megatron.convert.export.deepseek import DEEPSEEK
from mup_megatron.convert.export.fold import Factors, FoldedWeights, expert_biases, fold, row_factors
from mup_megatron.convert.export.folder import Part
from mup_megatron.convert.export.hugging_face import activation_name, architecture_of
from mup_megatron.convert.importing.config_json import check_config, read_json
from mup_megatron.convert.importing.weights import Weights, check_sums, finite
from mup_megatron.engines import WEIGHT
from mup_megatron.engines.saved_weights import BUFFER, Tensor
from mup_megatron.model.transformer_config import fuses_activation
from mup_megatron.rules.shapes import TensorSpec
from mup_megatron.rules.table import Parametrization
from mup_megatron.util.errors import UserError, shown

_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
_DTYPES = ("F64", "F32", "F16", "BF16")
"""Of weights, as safetensors names them; bytes of another one are no weights, or packed ones."""
# Buffers that older versions of transformers saved beside the weights.
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


def read_hugging_face(folder: Path, parametrization: Parametrization, vocabulary: int, stack: ExitStack) -> Weights:
    """Step 0 and weights.

    Args:
        folder: of safetensors and config.json.
        parametrization: of the run.
        vocabulary: entries of its tokenizer; the rows that pad them are the source's, or become zeros.
        stack: closes the files.

    Raises:
        UserError: a file is damaged, or of another model; names it and the key or the tensor.
    """
    config = parametrization.config
    if config.model.norm_gains != "trained" or config.model.layernorm_zero_centered_gamma:
        key = "norm_gains" if config.model.norm_gains != "trained" else "layernorm_zero_centered_gamma"
        raise config.error(
            f"model.{key}", "the source's norms have gains around 1; expected trained ones, kept as they are"
        )
    architecture = architecture_of(config, keep_multipliers=False)
    made = architecture.config(parametrization, activation_name(config.model, fused=is_tanh_gelu(folder, config)))
    names = _names(folder)
    check_sums(folder, ["config.json", *names, *([_INDEX] if (folder / _INDEX).is_file() else [])])
    rows = _rows(folder / "config.json", config, vocabulary)
    check_config(folder / "config.json", {**made, "vocab_size": rows}, config)
    biases = expert_biases(parametrization)
    specs = {**{name: shape.spec for name, shape in parametrization.shapes.items()}, **biases}
    numbered = _Numbered({name: spec.shape for name, spec in specs.items()})
    parts = architecture.parts(FoldedWeights(numbered, parametrization, {}, rows), config)  # type: ignore[arg-type]
    files = _tensors(folder, names, stack)
    _check_names(folder, set(files), {part.name for part in parts}, config, architecture)
    _check_tensors(folder, files, parts, config)
    factors = fold(parametrization) | architecture.factors(parametrization)
    made_of: dict[str | None, list[Part]] = {}
    for part in parts:
        made_of.setdefault(part.source, []).append(part)
    tensors = {}
    for name, spec in specs.items():
        filled = partial(_filled, folder, files, made_of.get(name, []), spec, factors.get(name, {None: 1.0}))
        tensors[f"{BUFFER if name in biases else WEIGHT}.{name}"] = Tensor(shape=spec.shape, make=filled)
    return 0, tensors


def is_tanh_gelu(folder: Path, config: Config) -> bool:
    """Whether a source's GELU is the tanh approximation, and that of the run too, where one kernel adds the bias."""
    said = read_json(folder / "config.json")
    names = {said.get(key) for key in ("activation_function", "hidden_act") if isinstance(said.get(key), str)}
    return "gelu_new" in names and config.model.activation_func == "gelu" and fuses_activation(config.model, cuda=True)


def _rows(path: Path, config: Config, vocabulary: int) -> int:
    """Rows of the source's embedding: the tokenizer's entries, or these and what pads them, where the config says so.

    Published models pad theirs (Qwen3: 151,669 entries, 151,936 rows). Rows that nobody asked for may be the entries of
    another tokenizer.

    Raises:
        UserError: it has more rows than the tokenizer has entries, and not as many as the config pads them to.
    """
    rows, padded = read_json(path).get("vocab_size"), config.model.padded_vocab_size(vocabulary)
    if not isinstance(rows, int) or rows <= vocabulary or rows == padded:
        return rows if rows == padded else vocabulary
    raise UserError(
        f"{path}: vocab_size is {rows}, and the tokenizer of {config.source} has {vocabulary} entries, padded to "
        f"{padded}; expected the source's tokenizer and, if the other rows only pad its entries, "
        f"model.make_vocab_size_divisible_by={rows}"
    )


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


def _check_tensors(folder: Path, files: Mapping[str, Any], parts: Sequence[Part], config: Config) -> None:
    """Whether tensors are weights of the config's shapes, and are zeros where it has none.

    Raises:
        UserError: one is otherwise; names it.
    """
    for part in parts:
        stored = files[part.name].get_slice(part.name)
        found = list(stored.get_shape())
        if stored.get_dtype() not in _DTYPES:
            raise UserError(f"{folder}: {part.name} is of {stored.get_dtype()}; expected one of {', '.join(_DTYPES)}")
        if found != list(part.shape):
            raise UserError(f"{folder}: {part.name} is of shape {found}; expected {list(part.shape)} by the config")
        if part.source is None and _given(folder, files, part.name).count_nonzero():
            of_experts = part.name.endswith("e_score_correction_bias")
            key = "moe_router_enable_expert_bias" if of_experts else "add_bias_linear"
            raise config.error(f"model.{key}", f"{part.name} of {folder} is not zero; expected biases")
    _check_tied(folder, files, parts, config)


def _check_tied(folder: Path, files: Mapping[str, Any], parts: Sequence[Part], config: Config) -> None:
    """Whether a head that is there beside a tied embedding is that. Raises UserError."""
    head, embedding = "lm_head.weight", parts[0].name
    if config.model.share_embeddings_and_output_weights and head in files:
        stored = files[head].get_slice(head)
        same = list(stored.get_shape()) == list(parts[0].shape) and stored.get_dtype() in _DTYPES
        if not same or not torch.equal(_given(folder, files, head), _given(folder, files, embedding)):
            raise UserError(f"{folder}: {head} is another tensor than {embedding}; expected the same, or no tied head")


def _given(folder: Path, files: Mapping[str, Any], name: str) -> torch.Tensor:
    """A tensor of the folder, float32. Raises UserError where it is damaged, or no numbers."""
    try:
        given: torch.Tensor = files[name].get_tensor(name).float()
    except SafetensorError as error:
        raise UserError(f"{folder}: {name}: damaged ({error})") from None
    return finite(given, f"{folder}: {name}")


def _names(folder: Path) -> list[str]:
    """The files that hold tensors. Raises UserError."""
    index = folder / _INDEX
    if not index.is_file():
        if not (folder / _WHOLE).is_file():
            raise UserError(f"{folder}: no {_WHOLE} is here; expected weights in safetensors")
        return [_WHOLE]
    names = sorted(set(_places(folder).values()))
    if (folder / _WHOLE).is_file() and _WHOLE not in names:
        raise UserError(f"{folder}: holds {_WHOLE} and {_INDEX}, which names other files; expected one of the two")
    for name in names:
        if "/" in name or not (folder / name).is_file():
            raise UserError(f"{folder / name} is missing; {_INDEX} lists it")
    return names


def _places(folder: Path) -> dict[str, str]:
    """Names of files by names of tensors, as the index says; none where there is none."""
    if not (folder / _INDEX).is_file():
        return {}
    places = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise UserError(f"{folder / _INDEX}: expected a weight_map from tensors to files")
    return places


def _tensors(folder: Path, names: Sequence[str], stack: ExitStack) -> dict[str, Any]:
    """Open files by the names of the tensors in them. Raises UserError: one is damaged, or not as the index says."""
    found: dict[str, Any] = {}
    held: dict[str, str] = {}
    for name in names:
        try:
            file = stack.enter_context(safe_open(str(folder / name), framework="pt"))
            keys = list(file.keys())
        except (OSError, SafetensorError) as error:
            raise UserError(f"{folder / name}: damaged ({error})") from None
        if twice := found.keys() & set(keys):
            raise UserError(f"{folder}: {min(twice)} is in {held[min(twice)]} and in {name}; expected it once")
        found |= dict.fromkeys(keys, file)
        held |= dict.fromkeys(keys, name)
    for tensor, place in _places(folder).items():
        if held.get(tensor) != place:
            raise UserError(f"{folder / _INDEX}: places {shown(tensor)} in {shown(place)}, which does not hold it")
    return found
