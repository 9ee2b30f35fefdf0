"""The table of a model that a script builds: base, enlarged and target through upstream's constructor, unsharded.

Public names: `Builds`, `builds_of`, `join_builds`, `parametrize_builds`.

The three are built on the meta device with the script's own layer specs, from copies of its TransformerConfig with
other sizes. A pipeline rank knows the specs of its own layers alone, so each builds its part of the model, and the
parts are joined. Of layers with equal specs one is built.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from mup_megatron.config import Config, Model
from mup_megatron.model.as_built.base_sizes import NO_OTHERS, BaseSizes, put_sizes
from mup_megatron.model.as_built.hybrid import PATTERN, hybrid_model, hybrid_parts
from mup_megatron.model.as_built.tensors import Entry, classify
from mup_megatron.model.transformer_config import INIT_METHODS
from mup_megatron.model.unsharded import one_rank_groups, unsharded
from mup_megatron.rules.apply import apply_rules
from mup_megatron.rules.base_file import shapes_from_file
from mup_megatron.rules.shapes import TensorSpec, join_shapes, layer_number
from mup_megatron.rules.table import Parametrization
from mup_megatron.util.errors import UserError

Specs = dict[str, TensorSpec]
_Value = TypeVar("_Value")

# Sizes of a TransformerConfig: its field, and what tells it of a Model.
_SIZES = {
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "ffn_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "query_groups",
    "kv_channels": "head_size",
}
_EXPERT_SIZES = {
    "moe_ffn_hidden_size": "moe_ffn_size",
    "moe_shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
}
_LATENT_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
_ONE_RANK = {
    **dict.fromkeys(
        (
            *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
            *("expert_model_parallel_size", "expert_tensor_parallel_size"),
            *("tensor_parallel_num_weight_shards", "expert_tensor_parallel_num_weight_shards"),
        ),
        1,
    ),
    **dict.fromkeys(
        (
            *("virtual_pipeline_model_parallel_size", "pipeline_model_parallel_layout"),
            *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
        ),
        None,
    ),
    **dict.fromkeys(
        (
            *("sequence_parallel", "tp_comm_overlap"),
            *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
        ),
        False,
    ),
    "use_cpu_initialization": True,
    "perform_initialization": True,  # which marks how tensor parallelism splits a weight, and here draws nothing
    **INIT_METHODS,
}


class Builds(NamedTuple):
    """What the three builds of a part of a model hold, by global name.

    Args:
        target: of the model that is trained.
        base: of the model where hyperparameters are defined; empty where a file tells the base, as `enlarged`.
        enlarged: of the base with every declared key enlarged.
        entries: what says what each tensor is.
    """

    target: Specs
    base: Specs
    enlarged: Specs
    entries: dict[str, Entry]


def builds_of(
    config: Config,
    given: Mapping[str, Any],
    layers: Sequence[int],
    entries: Sequence[Entry] = (),
    base_sizes: BaseSizes = NO_OTHERS,
) -> Builds:
    """Builds a chunk of the model three times.

    Args:
        config: the run in this project's terms.
        given: what the script constructs GPTModel with, by parameter name.
        layers: global numbers of the chunk's layers, from 0.
        entries: a user's own.
        base_sizes: what the base says beside the config's own sizes.

    Raises:
        UserError: a tensor that no entry is about; or upstream cannot build one of the three.
    """
    said: dict[str, Entry] = {}
    built: list[Specs] = []
    for which, core in _configs(config, given["config"], base_sizes).items():
        try:
            found = _build(core, given, layers, entries)
        except (AssertionError, ValueError, TypeError, ZeroDivisionError, RuntimeError) as error:
            reason = (str(error) or type(error).__name__).split("\n", 1)[0]
            raise UserError(
                f"{which} cannot be built on the meta device from the script's layer spec: {reason}; expected modules "
                "that take their sizes from the TransformerConfig that they are handed"
            ) from error
        said |= {name: entry for name, (_, entry) in found.items()} if not built else {}
        built.append({name: spec for name, (spec, _) in found.items()})
    bases = built[1:] or [{}, {}]
    return Builds(built[0], bases[0], bases[1], said)


def _configs(config: Config, core: TransformerConfig, base_sizes: BaseSizes) -> dict[str, TransformerConfig]:
    """The script's config for each build, by what is built."""
    found = {"the model": _one_rank(core, None)}
    if config.base.file is not None:
        return found
    base = config.model.resized(config.base.width)
    models = {"the base": base, "the base with every size under base: doubled": base.resized(config.base.enlarged())}
    for times, (which, model) in enumerate(models.items(), 1):
        made = found[which] = _one_rank(core, model)
        put_sizes(made, core, base_sizes, times=times, hidden=config.base.hidden_size is not None)
    return found


def join_builds(parts: Sequence[Builds]) -> Builds:
    """The whole model from its parts (of pipeline stages and their chunks), in the model's own order."""
    return Builds(
        _joined([part.target for part in parts]),
        _joined([part.base for part in parts]),
        _joined([part.enlarged for part in parts]),
        _joined([part.entries for part in parts]),
    )


def _joined(parts: Iterable[Mapping[str, _Value]]) -> dict[str, _Value]:
    whole: dict[str, _Value] = {}
    for part in parts:
        whole |= {name: value for name, value in part.items() if name not in whole}
    return {name: whole[name] for name in sorted(whole, key=_order)}


def parametrize_builds(config: Config, builds: Builds) -> Parametrization:
    """The rules for every tensor of the model.

    Args:
        config: the run in this project's terms.
        builds: of the whole model.

    Raises:
        UserError: base and target do not belong to one family.
    """
    if config.base.file is not None:
        shapes, base_head_size, carried = shapes_from_file(config, builds.target, config.base.file)
        return apply_rules(config, shapes, base_head_size=base_head_size, carried=carried)
    shapes = join_shapes(builds.target, builds.base, builds.enlarged)
    return apply_rules(config, shapes, base_head_size=config.model.resized(config.base.width).head_size)


def _order(name: str) -> tuple[int, int]:
    """Where a tensor stands in a GPTModel; sorting by it keeps the order of those that stand together."""
    layer = layer_number(name)
    if layer is not None:
        return 1, layer
    places = ("embedding.", "", "decoder.", "mtp.")
    return next((place for place, start in enumerate(places) if start and name.startswith(start)), len(places)), 0


def _one_rank(core: TransformerConfig, model: Model | None) -> TransformerConfig:
    """A copy of the script's config for one rank, with the sizes of `model` if one is given."""
    made = copy.copy(core)
    values: dict[str, Any] = {name: value for name, value in _ONE_RANK.items() if hasattr(core, name)}
    if getattr(core, "moe_token_dispatcher_type", None) == "flex":
        values["moe_token_dispatcher_type"] = "alltoall"  # noqa: S105  (the other wants more ranks)
    if model is not None:
        sizes = dict(_SIZES)
        if model.num_moe_experts is not None:
            sizes |= _EXPERT_SIZES
        values |= {field: getattr(model, attribute) for field, attribute in sizes.items()}
        if model.multi_latent_attention:
            values |= {name: getattr(model, name) for name in _LATENT_SIZES}
    for name, value in values.items():
        setattr(made, name, value)
    return made


def _build(
    core: TransformerConfig, given: Mapping[str, Any], layers: Sequence[int], entries: Sequence[Entry]
) -> dict[str, Any]:
    """The tensors of one build, by the global names that they have in the script's model."""
    is_hybrid = PATTERN in given
    alike, changed = (hybrid_parts if is_hybrid else _gpt_parts)(core, given, layers)
    groups = one_rank_groups()
    if is_hybrid:
        groups.pp = None  # which upstream counts there as one stage
    own = {**given, "config": core, **changed}
    own |= {"pre_process": True, "post_process": True, "vp_stage": None, "pg_collection": groups}
    with unsharded(groups=True):
        model = (hybrid_model() if is_hybrid else GPTModel)(**own)
    found = classify(model, entries)
    here = {name: value for name, value in found.items() if layer_number(name) is None and _holds(name, given, layers)}
    by_kind: list[dict[str, Any]] = [{} for _ in range(core.num_layers)]
    for name, value in found.items():
        number = layer_number(name)
        if number is not None:
            by_kind[number][name.split(".", 3)[3]] = value
    for layer, kind in zip(layers, alike, strict=True):
        here |= {f"decoder.layers.{layer}.{rest}": value for rest, value in by_kind[kind].items()}
    return here


def _gpt_parts(
    core: TransformerConfig, given: Mapping[str, Any], layers: Sequence[int]
) -> tuple[list[int], dict[str, Any]]:
    """As `hybrid_parts`, of a GPTModel: of layers with equal specs one is built."""
    block = _block(given["transformer_layer_spec"], len(layers))
    if len(block.layer_specs) != len(layers):
        raise UserError(
            f"the script's layer spec has {len(block.layer_specs)} layers for this rank, the options give it "
            f"{len(layers)}; expected as many"
        )
    sizes = getattr(core, "per_block_parameters", None)  # of each layer, where they have sizes of their own
    every = [(spec, sizes[layer] if sizes else None) for spec, layer in zip(block.layer_specs, layers, strict=True)]
    kinds: list[Any] = []
    for kind in every:
        if kind not in kinds:
            kinds.append(kind)
    core.num_layers = len(kinds)  # upstream tells the last layer, which the final norm follows, by its number
    if sizes:
        core.per_block_parameters = [size for _, size in kinds]
    changed = {"transformer_layer_spec": _with_layers(block, [spec for spec, _ in kinds])}
    return [kinds.index(kind) for kind in every], changed


def _holds(name: str, given: Mapping[str, Any], layers: Sequence[int]) -> bool:
    """Whether the script's chunk has this tensor outside the layers; the build has them all."""
    if name.startswith("embedding."):
        return bool(given["pre_process"] or given.get("mtp_block_spec") is not None)
    if name.startswith("mtp."):
        return given.get("mtp_block_spec") is not None or bool(PATTERN in given and given["post_process"])
    last = given["config"].num_layers - 1 in layers
    return bool(given["post_process"] or (last and name.startswith("decoder.")))


def _with_layers(block: TransformerBlockSubmodules, layers: list[Any]) -> TransformerBlockSubmodules:
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=block.layer_norm)


def _block(spec: Any, layers: int) -> TransformerBlockSubmodules:
    """A layer spec as that of a block, as megatron-core reads it."""
    if isinstance(spec, TransformerBlockSubmodules):
        return spec
    if isinstance(spec, ModuleSpec) and isinstance(spec.module, type) and issubclass(spec.module, TransformerBlock):
        return spec.submodules
    if isinstance(spec, ModuleSpec):
        from megatron.core.transformer.transformer_block import LayerNormImpl

        return TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=LayerNormImpl)
    name = getattr(spec, "__name__", type(spec).__name__)
    raise UserError(
        f"the script's layer spec is a {name}; expected megatron-core's ModuleSpec of a layer, or of a block"
    )
