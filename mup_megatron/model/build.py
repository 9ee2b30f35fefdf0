"""From a config to megatron-core's own model in µP: its shapes, its parametrization, its weights on this rank.

Public names: `parametrize` (shapes and rules of the whole model, nothing in memory), `build_model` (this rank's part:
a list of model chunks, one unless the pipeline is interleaved), `dry_run` (a rank's part on the meta device),
`unsharded_model`; for a model that somebody else builds, `check_specs` and `initialise`. The model of a family is built
in architectures/. Global names are global_names.py's, megatron-core's config of a model is transformer_config.py's.

Shapes are found by building the model with megatron-core itself on the meta device, unsharded, whatever the layout of
the real model is: the target, the base, and the base with every declared key enlarged, which tells what grows. Of each
kind of layer one is built, and one expert (representatives.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule

from mup_megatron.config import Config, Model
from mup_megatron.model import init
from mup_megatron.model.architectures import Part, architecture_of, layers_of
from mup_megatron.model.global_names import named_modules, named_parameters
from mup_megatron.model.layers.tensor_spec import spec_of
from mup_megatron.model.layers.unit_scaling import multiply_back
from mup_megatron.model.representatives import layer_kinds, replicate, representatives
from mup_megatron.model.unsharded import unsharded
from mup_megatron.parallel.layout import Layout
from mup_megatron.rules.apply import apply_rules
from mup_megatron.rules.base_file import shapes_from_file
from mup_megatron.rules.shapes import TensorShape, TensorSpec, join_shapes
from mup_megatron.rules.table import WORD_EMBEDDINGS, ForwardMultipliers, Parametrization
from mup_megatron.util.errors import UserError


def parametrize(config: Config, vocab_size: int, names: Collection[str] = ()) -> Parametrization:
    """The rules for every tensor of the whole, unsharded model. Needs no process group and no memory for weights.

    Args:
        config: the run.
        vocab_size: entries of the tokenizer, before padding.
        names: only these tensors, which hold the embedding and the head, of a run whose whole table was made; all
            unless given.

    Raises:
        UserError: base and target do not belong to one family.
    """
    if config.model.as_built is not None:
        raise config.error(
            "model.as_built",
            "the layers of this model are a script's own, which mup-megatron run alone builds; expected that, or none",
        )
    vocabulary = config.model.padded_vocab_size(vocab_size)

    def specs(model: Model) -> Mapping[str, TensorSpec]:
        found = _specs(config, model, vocabulary)
        return {name: found[name] for name in names if name in found} if names else found

    if config.base.file is not None:
        shapes, base_head_size, carried = shapes_from_file(config, specs(config.model), config.base.file)
        return apply_rules(config, shapes, base_head_size=base_head_size, carried=carried)
    base = config.model.resized(config.base.width)
    enlarged = base.resized(config.base.enlarged())
    shapes = join_shapes(specs(config.model), specs(base), specs(enlarged))
    return apply_rules(config, shapes, base_head_size=base.head_size, whole=not names)


def build_model(
    parametrization: Parametrization, layout: Layout, rank: int, device: torch.device
) -> list[LanguageModule]:
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


def dry_run(parametrization: Parametrization, layout: Layout, rank: int) -> list[LanguageModule]:
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
        if tuple(parameter.shape) != spec.local_shape(layout.slice_of(spec, rank)[1]):
            raise UserError(f"{name}: {tuple(parameter.shape)} on rank {rank} is no share of {spec.shape}")
    return chunks


def _chunks(parametrization: Parametrization, layout: Layout, rank: int, device: torch.device) -> list[LanguageModule]:
    """This rank's chunks, not initialised; every TensorSpec is that of the unsharded model."""
    config, forward = parametrization.config, parametrization.forward
    vocabulary, architecture = _vocabulary(parametrization), architecture_of(config.model)
    stage = layout.pipeline_rank(rank)
    with device if device.type == "meta" else contextlib.nullcontext():
        chunks = [
            architecture.build(
                config, config.model, vocabulary, forward, layout, _part(config.model, layout, stage, chunk, device)
            )
            for chunk in range(layout.virtual_pipeline)
        ]
    for chunk, model in enumerate(chunks):
        check_specs(model, parametrization, layout, rank, chunk)
        _multiply_back(model, parametrization)
    return chunks


def _multiply_back(model: LanguageModule, parametrization: Parametrization) -> None:
    """Has the layers of a chunk multiply by what was divided out of their weights.

    Raises:
        UserError: no known layer has such a weight; names it.
    """
    thetas = {name: float(tensor.theta) for name, tensor in parametrization.tensors.items() if tensor.theta != 1}
    if not thetas:
        return
    reached = multiply_back(named_modules(model), thetas, tied=model.share_embeddings_and_output_weights)
    for name, _ in named_parameters(model):
        if name in thetas and name not in reached:
            raise UserError(
                f"{name}: no layer is known to multiply by it, so it cannot be stored at unit scale; expected "
                "parametrization.scaling: none"
            )


def _part(model: Model, layout: Layout, stage: int, chunk: int, device: torch.device) -> Part:
    return Part(
        layers=layers_of(model, layout, stage, chunk),
        device=device,
        first=(stage, chunk) == (0, 0),
        last=(stage, chunk) == (layout.pipeline - 1, layout.virtual_pipeline - 1),
        chunk=chunk if layout.virtual_pipeline > 1 else None,
    )


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
    for stack, layers in layers_of(parametrization.config.model, layout, stage, chunk).items():
        built = [layer.layer_number - 1 for layer in getattr(model, stack).layers]
        if built != list(layers):
            raise UserError(
                f"rank {rank}: megatron-core numbers the layers of chunk {chunk} of stage {stage} {built}, the layout "
                f"{list(layers)}"
            )
    for name, parameter in named_parameters(model):
        tensor = parametrization.tensors.get(name)
        if tensor is None or spec_of(parameter) != tensor.shape.spec:
            raise UserError(f"{name}: on rank {rank} it is {spec_of(parameter)}, but the unsharded model has {tensor}")


def unsharded_model(
    config: Config, model: Model, vocabulary: int, layers: Mapping[str, Sequence[int]] | None = None
) -> LanguageModule:
    """The whole of `model` on the meta device: shapes without memory, without process groups, whatever the layout.

    Args:
        config: the run; its sequence length gives the positions.
        model: sizes, which need not be the config's own.
        vocabulary: padded.
        layers: only these layers of each stack, by global number, and of experts only the first.
    """
    built = {stack: range(count) for stack, count in model.stacks.items()} if layers is None else layers
    layout = Layout(
        world_size=1,
        tensor=1,
        data=1,
        sequence_parallel=False,
        zero_stage=0,
        micro_batches=1,
        stages=((list(built.values())[-1],),),
    )
    neutral = ForwardMultipliers(softmax_scale=1.0, readout=1.0, embedding=1.0, residual=1.0)
    # GPTModel hands its groups to all of its layers; parts of the other models ask parallel_state for theirs.
    with unsharded(groups=model.family != "gpt"):
        part = Part(layers=built, device=torch.device("meta"), unsharded=True, one_expert=layers is not None)
        return architecture_of(model).build(config, model, vocabulary, neutral, layout, part)


def _specs(config: Config, model: Model, vocabulary: int) -> dict[str, TensorSpec]:
    """What the shims record in an unsharded build of `model`. The models that were asked for last are remembered.

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
        if len(_SPECS) == _REMEMBERED:
            del _SPECS[next(iter(_SPECS))]
        _SPECS[key] = replicate(built, kinds, model.num_moe_experts or 1)
    return _SPECS[key]


_REMEMBERED = 64
"""More than the models of a coordinate check, each asked for again and again."""
_SPECS: dict[tuple[str, int, int], dict[str, TensorSpec]] = {}


def _vocabulary(parametrization: Parametrization) -> int:
    shapes: list[TensorShape] = list(parametrization.shapes.values())
    return next(shape.spec.shape[0] for shape in shapes if shape.name == WORD_EMBEDDINGS)
