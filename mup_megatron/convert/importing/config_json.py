"""config.json of a source: of the run's model, by its own words and by what the installed transformers makes of them.

Public names: `check_config`, `read_json`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mup_megatron.config import Config
from mup_megatron.convert.importing.with_transformers import keys_of, read_config, version
from mup_megatron.util.errors import UserError, shown
from mup_megatron.util.files import read_text

# What config.json says that no logit depends on, or that a tensor's shape says; RoPE is compared by itself.
_FREE = (
    *("architectures", "dtype", "torch_dtype", "initializer_range", "use_cache", "max_position_embeddings"),
    *("attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "router_aux_loss_coef", "router_jitter_noise"),
    *("output_router_logits", "num_nextn_predict_layers", "pretraining_tp", "max_window_layers"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "rope_theta", "rope_scaling", "rope_parameters"),
    *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
)
_QUANTIZED = ("quantization_config", "compression_config")
# What transformers takes where config.json does not say it (modeling_rope_utils.py).
_ROPE = {"rope_type": "default", "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
_WHOLE_ROPE = {"partial_rotary_factor": 1.0, "truncate": True}
"""What every model here has, and transformers takes too where it is not said."""


def check_config(path: Path, expected: Mapping[str, Any], config: Config) -> None:
    """Whether config.json is of the config's model, by its words and as transformers reads them where it is installed.

    Args:
        path: of it.
        expected: what `export` would write there, with the vocabulary.
        config: of the run.

    Raises:
        UserError: it is damaged, of another model, of quantized weights, contradicts itself, or transformers does not
            read it; names the first key.
    """
    found = read_json(path)
    for key in _QUANTIZED:
        if found.get(key) is not None:
            raise UserError(f"{path}: {key} is there; expected weights that are not quantized")
    if found.get("model_type") is None:
        raise UserError(f"{path}: model_type is missing; expected {expected['model_type']}")
    _check_rope_once(path, found)
    _compare(str(path), found, expected, expected, [key for key in expected if key in found], config)
    if (keys := keys_of(expected)) is not None:
        reading = f"{path} as transformers {version()} reads it"
        _compare(reading, read_config(path, found), read_config(path, expected), expected, keys, config)


def _compare(
    where: str,
    found: Mapping[str, Any],
    expected: Mapping[str, Any],
    made: Mapping[str, Any],
    keys: Sequence[str],
    config: Config,
) -> None:
    """Raises UserError with the first key whose values differ; `made` says which RoPE is expected."""
    for key in keys:
        given, value = (_whole(key, said.get(key), expected) for said in (found, expected))
        if key not in _FREE and given != value:
            raise UserError(f"{where}: {key} is {shown(given)}, and by {config.source} {shown(value)}")
    if "rope_theta" in made:
        _check_rope(where, found, made)


def _whole(key: str, value: Any, expected: Mapping[str, Any]) -> Any:
    """A value, or what transformers takes for null: attention of Llama's kind for head_dim, GPT2MLP for n_inner."""
    if value is None and key == "head_dim":
        return expected["hidden_size"] // expected["num_attention_heads"]
    return 4 * expected["n_embd"] if value is None and key == "n_inner" else value


def _check_rope_once(path: Path, found: Mapping[str, Any]) -> None:
    """Whether what stands in several places is the same: versions of transformers read different ones."""
    places = {"at the top": {key: found[key] for key in ("rope_theta", "partial_rotary_factor") if key in found}}
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(found.get(name), dict | None):
            raise UserError(f"{path}: {name} is {shown(found[name])}; expected a JSON object")
        places[f"in {name}"] = _typed(found.get(name) or {})
    for (one, first), (other, second) in itertools.combinations(places.items(), 2):
        for key in sorted(first.keys() & second.keys()):
            values = first[key], second[key]
            if None not in values and values[0] != values[1]:
                said = f"{shown(values[0])} {one} and {shown(values[1])} {other}"
                raise UserError(f"{path}: {key} is {said}; expected the same in both")


def _check_rope(where: str, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Whether RoPE is the config's, whatever the version of transformers that said so. Raises UserError."""
    top = {key: found[key] for key in ("rope_theta", "partial_rotary_factor") if found.get(key) is not None}
    said = {**top, **_typed(found.get("rope_scaling") or found.get("rope_parameters") or {})}
    wanted = {**_WHOLE_ROPE, **(expected.get("rope_scaling") or {"rope_type": "default"})}
    if said.get("attention_factor") is not None:
        wanted = {"attention_factor": None, **wanted}
    if said.get("rope_theta") is not None:
        wanted["rope_theta"] = expected["rope_theta"]
    for key, value in wanted.items():
        given = said.get(key, (_ROPE | _WHOLE_ROPE).get(key))
        if given != value and not (key == "attention_factor" and given is None):
            raise UserError(f"{where}: {key} of its RoPE is {shown(given)}, and by the config {shown(value)}")


def _typed(rope: Mapping[str, Any]) -> dict[str, Any]:
    """With the type under its present name."""
    return {**({"rope_type": rope["type"]} if "type" in rope else {}), **rope}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises UserError where the file is none."""
    try:
        found = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: damaged ({error})") from None
    if not isinstance(found, dict):
        raise UserError(f"{path}: expected a JSON object")
    return found
