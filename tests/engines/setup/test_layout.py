"""Fitting a config's layout to a number of processes, and refusing what does not fit."""

from __future__ import annotations

from typing import Any

import pytest

from mup_megatron.config import load_config
from mup_megatron.parallel.layout import resolve_layout, smallest_world
from mup_megatron.parallel.stages import _parts
from mup_megatron.util.errors import ConfigError
from tests.helpers.configs import MIXED, MOE, make


def config(**overrides: Any) -> Any:
    return make(MIXED, "gpt3", training__micro_batch_size=1, **overrides)


@pytest.mark.parametrize(
    ("processes", "tensor", "data"), [(1, 1, 1), (2, 2, 1), (3, 1, 3), (4, 4, 1), (8, 4, 2), (16, 4, 4)]
)
def test_auto_takes_the_largest_that_divides(processes: int, tensor: int, data: int) -> None:
    """8 heads, 4 query groups, FFN 160, 384 entries: 4 is the largest; 24 samples a step."""
    layout = resolve_layout(config(training__global_batch_size=24 if processes < 16 else 48), processes)
    assert (layout.tensor, layout.data) == (tensor, data)
    assert layout.micro_batches * data == (24 if processes < 16 else 48)


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_the_demo_fits_itself(repository: Any, processes: int) -> None:
    layout = resolve_layout(load_config(repository / "configs" / "demo.yaml"), processes)
    assert layout.world_size == processes
    assert layout.tensor == processes


def test_ranks_are_ordered_as_megatron_orders_them() -> None:
    layout = resolve_layout(config(parallel__tensor_model_parallel_size=2), 4)
    assert [(layout.tensor_rank(rank), layout.data_rank(rank)) for rank in range(4)] == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_sequence_parallel_needs_tensor_parallel() -> None:
    assert not resolve_layout(config(parallel__sequence_parallel=True), 1).sequence_parallel
    assert resolve_layout(config(parallel__sequence_parallel=True), 2).sequence_parallel


PP = {"model__num_layers": 4, "parallel__engine": "megatron", "parallel__pipeline_model_parallel_size": 2}
GROUP = "parallel__microbatch_group_size_per_virtual_pipeline_stage"
VPP = {**PP, "parallel__virtual_pipeline_model_parallel_size": 2}
LAID = "parallel__pipeline_model_parallel_layout"


@pytest.mark.parametrize(
    ("overrides", "placed"),
    [
        (PP, (((0, 1),), ((2, 3),))),
        (VPP, (((0,), (2,)), ((1,), (3,)))),
        ({**PP, "parallel__num_layers_in_last_pipeline_stage": 1}, (((0, 1, 2),), ((3,),))),
        ({**PP, LAID: "Ettt|tL"}, (((0, 1, 2),), ((3,),))),
        ({**PP, LAID: "E|t*4, L"}, (((),), ((0, 1, 2, 3),))),
        ({**PP, LAID: "Et|(t|)*2tL"}, (((0,), (2,)), ((1,), (3,)))),
        ({**PP, LAID: "E|tt|t|tL"}, (((), (2,)), ((0, 1), (3,)))),
        ({**PP, LAID: "Ett|ttmmL", "model__mtp_num_layers": 2}, (((0, 1),), ((2, 3),))),
    ],
)
def test_layers_of_stages_and_chunks(overrides: dict[str, Any], placed: Any) -> None:
    """Whether megatron-core agrees is checked whenever a model is built (model.py)."""
    stages = resolve_layout(config(**overrides), 2).stages
    assert tuple(tuple(tuple(chunk) for chunk in stage) for stage in stages) == placed


@pytest.mark.parametrize("text", ["E|t*4, L", "Et|(t|)*2tL", "E(tt|)*2 t*0 L", "(E)*1t|ttt(L)*1", "E,t|t,t|t|L"])
def test_letters_are_read_as_megatron_core_reads_them(text: str) -> None:
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    text = text.replace(" ", "")
    theirs = PipelineParallelLayerLayout.parse_str_to_list(text)
    letters = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
    ours = _parts(config(**{LAID: text}))
    assert ours == ["".join(letters[kind.name] for kind in part) for part in theirs]


def test_ranks_are_ordered_as_megatron_core_orders_them() -> None:
    layout = resolve_layout(config(**PP, parallel__tensor_model_parallel_size=2), 8)
    assert [layout.tensor_rank(rank) for rank in range(8)] == [0, 1] * 4
    assert [layout.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1] * 2
    assert [layout.pipeline_rank(rank) for rank in range(8)] == [0] * 4 + [1] * 4


def test_context_parallel_ranks_read_the_same_data() -> None:
    """megatron-core's order: tensor, then context, then data."""
    keys = {"parallel__engine": "megatron", "parallel__context_parallel_size": 2, "model__core_attention": "sdpa"}
    layout = resolve_layout(config(**keys, parallel__tensor_model_parallel_size=2), 8)
    assert [layout.context_rank(rank) for rank in range(8)] == [0, 0, 1, 1] * 2
    assert [layout.data_rank(rank) for rank in range(8)] == [0] * 4 + [1] * 4


@pytest.mark.parametrize(
    ("overrides", "processes", "sentence"),
    [
        ({"parallel__tensor_model_parallel_size": 8}, 8, "model.num_query_groups: 4 is not divisible by the tensor-"),
        ({"parallel__tensor_model_parallel_size": 3}, 3, "model.num_attention_heads: 8 is not divisible by"),
        (
            {"parallel__tensor_model_parallel_size": 2, "model__ffn_hidden_size": 165, "base__ffn_hidden_size": 66},
            2,
            "model.ffn_hidden_size: 165 is not divisible",
        ),
        (
            {"parallel__tensor_model_parallel_size": 2, "model__make_vocab_size_divisible_by": 1},
            2,
            "padded vocabulary 375 is not divisible by the tensor-parallel size 2",
        ),
        (
            {
                "parallel__tensor_model_parallel_size": 4,
                "parallel__sequence_parallel": True,
                "training__seq_length": 30,
            },
            4,
            "training.seq_length: 30 is not divisible",
        ),
        ({"parallel__tensor_model_parallel_size": 2}, 3, "2 does not divide the 3 processes"),
        ({}, 5, "8 cannot be shared by 5 processes"),
        ({"parallel__pipeline_model_parallel_size": 2}, 2, "engine deepspeed has no pipeline parallelism"),
        ({"parallel__context_parallel_size": 2}, 2, "engine deepspeed has no context parallelism"),
        (
            {"parallel__engine": "megatron", "parallel__context_parallel_size": 2, "model__core_attention": "megatron"},
            2,
            "model.core_attention: megatron-core's own has no context parallelism",
        ),
        (
            {"parallel__engine": "megatron", "parallel__context_parallel_size": 2, "training__seq_length": 30},
            2,
            "training.seq_length: 30 is not divisible by 4",
        ),
        ({**PP, "parallel__pipeline_model_parallel_size": 3}, 3, "model.num_layers 4 is not divisible by 3 stages"),
        ({**PP, "parallel__pipeline_model_parallel_size": 4}, 6, "TP 1 x PP 4 x CP 1 does not divide the 6 processes"),
        ({**PP, "parallel__offload_optimizer": True}, 2, "parallel.offload_optimizer: is DeepSpeed's"),
        ({**PP, "parallel__overlap_param_gather": True}, 2, "needs use_distributed_optimizer and overlap_grad_reduce"),
        ({**VPP, "parallel__pipeline_model_parallel_size": 1}, 1, "2 chunks per stage need stages"),
        (
            {**VPP, "training__global_batch_size": 3},
            2,
            "takes micro-batches in groups of 2, of which the last has at least 2 (pipeline stages); 3 makes 3",
        ),
        (
            {**VPP, GROUP: 3, "training__global_batch_size": 4},
            2,
            "takes micro-batches in groups of 3, of which the last has at least 2 (pipeline stages); 4 makes 4",
        ),
        ({**VPP, GROUP: 5, "training__global_batch_size": 4}, 2, "in groups of 5, of which the last has at least 2"),
        ({**VPP, GROUP: 1}, 2, "stage: 1; expected at least the 2 pipeline stages"),
        ({**PP, GROUP: 2}, 2, "stage: 2; expected at least the 2 pipeline stages, and virtual_pipeline_model"),
        (
            {**VPP, "parallel__num_layers_in_first_pipeline_stage": 1},
            2,
            "uneven stages need pipeline stages, and no virtual ones",
        ),
        ({**PP, "parallel__num_layers_in_last_pipeline_stage": 4}, 2, "leaves 0 of 4 layers for 1 stages"),
        ({"parallel__expert_model_parallel_size": 2}, 2, "2, but the model has no experts"),
        ({**PP, LAID: "tt|ttL"}, 2, "layout: expected one that starts with E, the embedding; found 'tt|ttL'"),
        ({**PP, LAID: "Ett|tt"}, 2, "expected one that ends with L, the loss"),
        ({**PP, LAID: "Ett|tL"}, 2, "expected one that has 4 layers t, as model.num_layers says"),
        ({**PP, LAID: "Ett|ttmL"}, 2, "expected one that has 0 of m, as model.mtp_num_layers says"),
        ({**PP, LAID: "Ett|mttL", "model__mtp_num_layers": 1}, 2, "has every m in the last part, before L"),
        ({**PP, LAID: "Ett|tt|m|L", "model__mtp_num_layers": 1}, 2, "has every m in the last part, before L"),
        ({**PP, LAID: "Ett|t|tL"}, 2, "3 parts, which 2 pipeline stages cannot share; expected a multiple"),
        ({**PP, LAID: "Ett|xttL"}, 2, "'x' is no letter of it; expected E (embedding)"),
        ({**PP, LAID: "E(t|)*999999999L"}, 2, "more than 1000000 letters"),
        ({**VPP, LAID: "Et|t|t|tL"}, 2, "virtual_pipeline_model_parallel_size: pipeline_model_parallel_layout says it"),
        ({**PP, LAID: "EttttL"}, 2, "1 parts, which 2 pipeline stages cannot share"),
        ({LAID: "Ett|ttL"}, 1, "pipeline_model_parallel_layout: engine deepspeed has no pipeline parallelism"),
        ({**PP, LAID: "Ett|ttL", "parallel__pipeline_model_parallel_size": 1}, 1, "2 chunks per stage need stages"),
        ({"parallel__use_tp_pp_dp_mapping": True}, 2, "use_tp_pp_dp_mapping: is the Megatron engine's"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refused(overrides: dict[str, Any], processes: int, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve_layout(config(**overrides), processes)
    assert sentence in str(error.value)


EP = "parallel__expert_model_parallel_size"


@pytest.mark.parametrize(
    ("overrides", "processes", "sentence"),
    [
        ({EP: 3}, 3, "3 does not divide model.num_moe_experts 4"),
        ({EP: 4}, 2, "EP 4 x ETP 1 does not divide the 2 processes of a pipeline stage"),
        ({EP: 2, "parallel__zero_stage": 3}, 2, "DeepSpeed has no ZeRO 3 with expert parallelism; expected 0, 1 or 2"),
        (
            {"parallel__tensor_model_parallel_size": 2, "parallel__sequence_parallel": False},
            2,
            "megatron-core trains experts under tensor parallelism only with it; expected true",
        ),
    ],
)
def test_experts_that_are_refused(overrides: dict[str, Any], processes: int, sentence: str) -> None:
    keys = {
        "training__global_batch_size": 12,
        "training__micro_batch_size": 1,
        "parallel__tensor_model_parallel_size": 1,
    }
    with pytest.raises(ConfigError) as error:
        resolve_layout(make(MOE, "llama", **{**keys, **overrides}), processes)
    assert sentence in str(error.value)


def test_more_ranks_than_the_batch_has_samples_names_what_works() -> None:
    with pytest.raises(ConfigError, match="expected a multiple of 5, or 1, 2, 4, 8"):
        resolve_layout(config(), 5)


def test_smallest_world() -> None:
    assert smallest_world(config()) == 1
    assert smallest_world(config(parallel__tensor_model_parallel_size=4)) == 4
