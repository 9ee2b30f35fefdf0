"""From a config to megatron-core's own GPTModel in µP: its shapes, its parametrization, its weights on this rank.

Public names: `parametrize` (shapes and rules of the whole model, nothing in memory), `build_model` (this rank's part:
a list of model chunks, one unless the pipeline is interleaved), `dry_run` (a rank's part on the meta device),
`unsharded_model`; for a model that somebody else builds, `attach`, `check_specs` and `initialise`. Global names are
global_names.py's, megatron-core's config of a model is transformer_config.py's.

Shapes are found by building the model with megatron-core itself on the meta device, unsharded, whatever the layout of
the real model is: the target, the base, and the base with every declared key enlarged, which tells what grows. Of each
kind of layer one is built, and one expert (representatives.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection

from mup_megatron import init
from mup_megatron.apply_rules import apply_rules
from mup_megatron.base_file import shapes_from_file
from mup_megatron.config import Config, Model
from mup_megatron.errors import UserError
from mup_megatron.global_names import named_parameters
from mup_megatron.layers.embedding import scale_input, scale_output, set_embedding_specs, set_readout_spec
from mup_megatron.layers.spec import block_spec, mtp_spec
from mup_megatron.layers.tensor_spec import spec_of
from mup_megatron.layout import Layout
from mup_megatron.parametrization import WORD_EMBEDDINGS, ForwardMultipliers, Parametrization
from mup_megatron.representatives import layer_kinds, replicate, representatives
from mup_megatron.shapes import TensorShape, TensorSpec, join_shapes
from mup_megatron.transformer_config import core_config
from mup_megatron.unsharded import one_rank_groups, unsharded


def parametrize(config: Config, vocab_size: int) -> Parametrization:
    """The rules for every tensor of the whole, unsharded model. Needs no process group and no memory for weights.

    Args:
        config: the run.
        vocab_size: entries of the tokenizer, before padding.

    Raises:
        UserError: base and target do not belong to one family.
    """
    if config.model.as_built is not None:
        raise config.error(
            "model.as_built",
            "the layers of this model are a script's own, which mup-megatron run alone builds; expected that, or none",
        )
    vocabulary = config.model.padded_vocab_size(vocab_size)
    target = _specs(config, config.model, vocabulary)
    if config.base.file is not None:
        shapes, base_head_size, carried = shapes_from_file(config, target, config.base.file)
        return apply_rules(config, shapes, base_head_size=base_head_size, carried=carried)
    base = config.model.resized(config.base.width)
    enlarged = base.resized(config.base.enlarged())
    shapes = join_shapes(target, _specs(config, base, vocabulary), _specs(config, enlarged, vocabulary))
    return apply_rules(config, shapes, base_head_size=base.head_size)


def build_model(parametrization: Parametrization, layout: Layout, rank: int, device: torch.device) -> list[GPTModel]:
    """This rank's part of the model, initialised, multipliers in place: a chunk per virtual pipeline stage.

    Needs megatron-core's parallel_state (runtime.start_distributed).

    Args:
        parametrization: of the run's config, every `auto` resolved.
        layout: how ranks split the model.
        rank: global rank of this process.
        device: where the weights live.

    Raises:
        UserError: a parameter without a TensorSpec, or with another one than in the unsharded build.
    """
    chunks = _chunks(parametrization, layout, rank, device)
    initialise(chunks, parametrization, layout, rank)
    return chunks


def initialise(
    model: LanguageModule | Sequence[LanguageModule], parametrization: Parametrization, layout: Layout, rank: int
) -> None:
    """Fills this rank's part of the model with its initial values.

    Args:
        model: this rank's part, or its chunks, whose TensorSpecs were checked (`check_specs`).
        parametrization: of the same model.
        layout: how ranks split the model.
        rank: global rank of this process.
    """
    for name, parameter in named_parameters(model):
        tensor = parametrization.tensors[name]
        slice_rank, slices = layout.slice_of(tensor.shape.spec, rank)
        init.fill(
            parameter.data,
            seed=parametrization.config.run.seed,
            name=name,
            spec=tensor.shape.spec,
            std=tensor.init_std,
            rank=slice_rank,
            ranks=slices,
        )


def dry_run(parametrization: Parametrization, layout: Layout, rank: int) -> list[GPTModel]:
    """Builds this rank's part on the meta device: does the model come about in this layout?

    Needs megatron-core's parallel_state, whose groups may be torch's `fake` ones: nothing is sent.

    Args:
        parametrization: of the run's config, every `auto` resolved.
        layout: how ranks split the model.
        rank: global rank of this process.

    Raises:
        UserError: a parameter without a TensorSpec, or one whose shape on this rank is not its share of the whole.
    """
    chunks = _chunks(parametrization, layout, rank, torch.device("meta"))
    for name, parameter in named_parameters(chunks):
        spec = parametrization.tensors[name].shape.spec
        if tuple(parameter.shape) != init.local_shape(spec, layout.slice_of(spec, rank)[1]):
            raise UserError(f"{name}: {tuple(parameter.shape)} on rank {rank} is no share of {spec.shape}")
    return chunks


def _chunks(parametrization: Parametrization, layout: Layout, rank: int, device: torch.device) -> list[GPTModel]:
    """This rank's chunks, not initialised; every TensorSpec is that of the unsharded model."""
    config, forward = parametrization.config, parametrization.forward
    vocabulary = _vocabulary(parametrization)
    stage = layout.pipeline_rank(rank)
    with device if device.type == "meta" else contextlib.nullcontext():
        chunks = [
            _gpt_model(config, config.model, vocabulary, forward, layout, device, stage=stage, chunk=chunk)
            for chunk in range(layout.virtual_pipeline)
        ]
    for chunk, model in enumerate(chunks):
        check_specs(model, parametrization, layout, rank, chunk)
    return chunks


def check_specs(model: LanguageModule, parametrization: Parametrization, layout: Layout, rank: int, chunk: int) -> None:
    """Whether a chunk holds the layers that the layout says, and every TensorSpec is that of the unsharded model.

    Args:
        model: the chunk.
        parametrization: of the whole model.
        layout: how ranks split the model.
        rank: global rank of this process.
        chunk: its number on this rank.

    Raises:
        UserError: names the layers or the parameter.
    """
    stage = layout.pipeline_rank(rank)
    built = [layer.layer_number - 1 for layer in model.decoder.layers]
    if built != list(layout.stages[stage][chunk]):
        raise UserError(
            f"rank {rank}: megatron-core numbers the layers of chunk {chunk} of stage {stage} {built}, the layout "
            f"{list(layout.stages[stage][chunk])}"
        )
    for name, parameter in named_parameters(model):
        tensor = parametrization.tensors.get(name)
        if tensor is None or spec_of(parameter) != tensor.shape.spec:
            raise UserError(f"{name}: on rank {rank} it is {spec_of(parameter)}, but the unsharded model has {tensor}")


def unsharded_model(config: Config, model: Model, vocabulary: int, layers: Sequence[int] | None = None) -> GPTModel:
    """The whole of `model` on the meta device: shapes without memory, without process groups, whatever the layout.

    Args:
        config: the run; its sequence length gives the positions.
        model: sizes, which need not be the config's own.
        vocabulary: padded.
        layers: only these layers of the decoder, by global number, and of experts only the first.
    """
    layout = Layout(
        world_size=1,
        tensor=1,
        data=1,
        sequence_parallel=False,
        zero_stage=0,
        micro_batches=1,
        stages=((range(model.num_layers) if layers is None else layers,),),
    )
    neutral = ForwardMultipliers(softmax_scale=1.0, readout=1.0, embedding=1.0, residual=1.0)
    with unsharded():
        return _gpt_model(
            config,
            model,
            vocabulary,
            neutral,
            layout,
            torch.device("meta"),
            unsharded=True,
            one_expert=layers is not None,
        )


def _specs(config: Config, model: Model, vocabulary: int) -> dict[str, TensorSpec]:
    """What the shims record in an unsharded build of `model`; each model is built once in a process.

    Built are a layer of each kind and one expert; the others have the same tensors.
    """
    key = (model.model_dump_json(), vocabulary, config.max_position_embeddings)
    if key not in _SPECS:
        kinds = layer_kinds(model)
        try:
            parameters = named_parameters(unsharded_model(config, model, vocabulary, representatives(kinds)))
        except (AssertionError, ValueError, ZeroDivisionError) as error:  # what megatron-core asserts of a config
            raise config.error("model", f"megatron-core cannot build it: {error or type(error).__name__}") from error
        built = {name: spec for name, parameter in parameters if (spec := spec_of(parameter)) is not None}
        _SPECS[key] = replicate(built, kinds, model.num_moe_experts or 1)
    return _SPECS[key]


_SPECS: dict[tuple[str, int, int], dict[str, TensorSpec]] = {}


def _vocabulary(parametrization: Parametrization) -> int:
    shapes: list[TensorShape] = list(parametrization.shapes.values())
    return next(shape.spec.shape[0] for shape in shapes if shape.name == WORD_EMBEDDINGS)


def _gpt_model(
    config: Config,
    model: Model,
    vocabulary: int,
    forward: ForwardMultipliers,
    layout: Layout,
    device: torch.device,
    *,
    stage: int = 0,
    chunk: int = 0,
    unsharded: bool = False,
    one_expert: bool = False,
) -> GPTModel:
    transformer_config = core_config(config, model, forward, layout, device)
    if device.type == "meta":
        # Which kernels compute changes no shape, and on the meta device nothing is computed.
        model = model.with_plain_kernels
    arguments: dict[str, Any] = {}
    if unsharded:
        arguments["pg_collection"] = one_rank_groups()
    elif device.type == "meta":
        groups = ProcessGroupCollection.use_mpu_process_groups()
        groups.embd = None  # whose two ranks would exchange a tied weight, and a dry run has none
        arguments["pg_collection"] = groups
    is_last = (stage, chunk) == (layout.pipeline - 1, layout.virtual_pipeline - 1)
    multi_token_prediction = mtp_spec(
        transformer_config,
        model,
        residual_multiplier=config.hparams.residual_multiplier,
        one_expert=one_expert,
        unsharded=arguments.get("pg_collection"),
    )
    built = GPTModel(
        config=transformer_config,
        transformer_layer_spec=block_spec(
            transformer_config,
            model,
            layers=layout.stages[stage][chunk],
            residual_multiplier=forward.residual,
            one_expert=one_expert,
        ),
        mtp_block_spec=multi_token_prediction if is_last else None,
        pre_process=(stage, chunk) == (0, 0),
        post_process=is_last,
        vp_stage=chunk if layout.virtual_pipeline > 1 else None,
        vocab_size=vocabulary,
        max_sequence_length=config.max_position_embeddings,
        share_embeddings_and_output_weights=model.share_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
        rotary_percent=model.rotary_percent,
        rotary_base=model.rotary_base,
        rope_scaling=model.rope_scaling,
        rope_scaling_factor=model.rope_scaling_factor,
        **arguments,
    )
    attach(built, forward)
    return built.to(device) if device.type == "cuda" else built


def attach(built: LanguageModule, forward: ForwardMultipliers) -> None:
    """Records and scales what no layer spec reaches: embedding and readout."""
    if hasattr(built, "embedding"):
        set_embedding_specs(built.embedding)
        scale_output(built.embedding, forward.embedding)
    if built.post_process:
        set_readout_spec(built.output_layer, tied=built.share_embeddings_and_output_weights)
        scale_input(built.output_layer, forward.readout)
