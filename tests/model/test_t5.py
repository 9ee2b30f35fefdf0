"""The rules on an encoder-decoder, every number worked out by hand; what T5Model does not have is refused by name.

Base init std 0.05; the decoder has two layers, so output projections of both stacks take 0.05/sqrt(2·2) = 0.025.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from mup_megatron.model.build import parametrize
from mup_megatron.model.explain import explain
from mup_megatron.parallel import upstream
from mup_megatron.parallel.layout import resolve_layout
from mup_megatron.rules.table import Parametrization
from mup_megatron.util.errors import ConfigError
from tests.helpers import bias_bodies
from tests.helpers.configs import MIXED, T5, VOCABULARY, make, make_t5
from tests.helpers.distributed import Ranks
from tests.model.layers.test_architectures import softmax
from tests.rules.test_parametrization import EMBEDDING, numbers

CROSS = "decoder.layers.1.cross_attention."
RELATIVE = {"model__position_embedding_type": "relative"}


@pytest.fixture(autouse=True, scope="module")
def prepared() -> None:
    upstream.prepare_process()


def apply(**overrides: Any) -> Parametrization:
    return parametrize(make_t5(**overrides), VOCABULARY)


def close(value: Any) -> Any:
    return pytest.approx(value)


def test_cross_attention() -> None:
    """hidden ×3/2, heads ×2, head size ×3/2: rows of queries, keys and values ×3."""
    tensors = apply().tensors
    query, fused, out = (tensors[f"{CROSS}linear_{name}.weight"] for name in ("q", "kv", "proj"))
    # [heads · d, hidden]: m_in 3/2, m_out 3.
    assert query.shape.spec.shape == (96, 96)
    assert query.shape.base_shape == (32, 64)
    assert numbers(query) == (close(2 / 3), close(1 / 3), 1.5)
    assert query.init_std == {None: close(0.05 / math.sqrt(1.5))}
    # [heads · (d + d), hidden], a head's key rows before its value rows.
    assert fused.shape.spec.shape == (192, 96)
    assert fused.shape.spec.fused is not None
    assert fused.shape.spec.fused.runs == (("key", 12), ("value", 12))
    assert fused.shape.spec.fused.repeats == 8
    assert {block: float(dim.ratio) for block, dim in (fused.shape.blocks or {}).items()} == {"key": 3, "value": 3}
    assert numbers(fused) == (close(2 / 3), close(1 / 3), 1.5)
    assert fused.init_std == dict.fromkeys(("key", "value"), close(0.05 / math.sqrt(1.5)))
    # [hidden, heads · d]: m_in 3, m_out 3/2.
    assert numbers(out) == (close(1 / 3), close(2 / 3), 3)
    assert out.init_std == {None: close(0.025 / math.sqrt(3))}
    for name, rate_eps_decay in (("q", (1, 1 / 3, 0)), ("kv", (1, 1 / 3, 0)), ("proj", (1, 2 / 3, 0))):
        assert numbers(tensors[f"{CROSS}linear_{name}.bias"]) == close(rate_eps_decay)
    norm = tensors["decoder.layers.1.pre_cross_attn_layernorm.weight"]
    assert numbers(norm) == (1, close(2 / 3), 0)


def test_both_stacks_and_what_they_share() -> None:
    """Self-attention and MLP have the same rules in both stacks; they share embeddings; the tied head has a bias."""
    tensors = apply().tensors
    stacks: dict[str, dict[str, Any]] = {"encoder": {}, "decoder": {}}
    for name, tensor in tensors.items():
        stack, _, rest = name.partition(".")
        if stack in stacks:
            stacks[stack][rest] = (numbers(tensor), tensor.init_std)
    assert len({rest.split(".")[1] for rest in stacks["encoder"] if rest.startswith("layers.")}) == 3
    assert len({rest.split(".")[1] for rest in stacks["decoder"] if rest.startswith("layers.")}) == 2
    for rest, found in stacks["encoder"].items():
        assert found == stacks["decoder"][rest.replace("layers.2.", "layers.1.")], rest
    beside = {rest.split(".", 2)[2] for rest in stacks["decoder"].keys() - stacks["encoder"].keys()}
    assert {name.split(".")[0] for name in beside} == {"pre_cross_attn_layernorm", "cross_attention"}
    outside = {name for name in tensors if name.split(".")[0] not in stacks}
    assert outside == {EMBEDDING, "embedding.position_embeddings.weight", "lm_head.output_layer.bias"}
    assert numbers(tensors[EMBEDDING]) == (1, close(2 / 3), 1)
    # The bias of the vocabulary's logits: fixed fan-out.
    assert numbers(tensors["lm_head.output_layer.bias"]) == (1, 1, 0)
    assert tensors["lm_head.output_layer.bias"].init_std == {None: 0}


def test_forward_multipliers() -> None:
    keys = ("output", "embedding", "attention", "residual")
    forward = apply(
        **{f"hparams__{key}_multiplier": value for key, value in zip(keys, (6, 5, 3, 0.5), strict=True)}
    ).forward
    assert forward.readout == close(4)  # 6 · 64/96
    assert forward.embedding == 5
    assert forward.softmax_scale == close(3 * math.sqrt(8) / 12)
    assert forward.residual == 0.5


def test_a_head_of_its_own() -> None:
    """An untied head has no bias, in upstream's T5; its rate is the base's (Table 8)."""
    tensors = apply(model__share_embeddings_and_output_weights=False).tensors
    head = tensors["lm_head.output_layer.weight"]
    assert "lm_head.output_layer.bias" not in tensors
    assert numbers(head) == (1, close(2 / 3), 1)
    assert head.init_std == {None: close(0.05)}
    assert head.forward_multiplier == close(2 / 3)


def test_a_rank_holds_both_stacks() -> None:
    """All layers of both, whatever their numbers; of a vocabulary of 384 and of 8 heads half each."""
    config = make_t5(parallel__tensor_model_parallel_size=2)
    parametrization = parametrize(config, VOCABULARY)
    held = {each["name"]: each for each in explain(parametrization, resolve_layout(config, 2), 1)["parameters"]}
    assert held.keys() == parametrization.tensors.keys()
    assert held[EMBEDDING]["local_shape"] == [192, 96]
    assert held[CROSS + "linear_kv.weight"]["local_shape"] == [96, 96]
    assert held["encoder.layers.2.mlp.linear_fc2.weight"]["local_shape"] == [96, 80]


def test_zero_query_is_of_every_attention() -> None:
    tensors = apply(parametrization__zero_init_query=True).tensors
    assert tensors[CROSS + "linear_q.weight"].init_std == {None: 0}
    assert tensors[CROSS + "linear_kv.weight"].init_std["key"] > 0
    assert tensors["encoder.layers.2.self_attention.linear_qkv.weight"].init_std["query"] == 0


def test_relative_positions_of_both_stacks() -> None:
    """[buckets, heads], heads ×2: init, rate and decay stay, epsilon is 1/2, the multiplier is their own."""
    tensors = apply(**RELATIVE, hparams__relative_bias_multiplier=3.0, hparams__embedding_multiplier=5.0).tensors
    for stack in ("encoder", "decoder"):
        table = tensors[f"{stack}_relative_pos_emb.relative_attention_bias.weight"]
        assert table.shape.spec.shape == (32, 8)
        assert numbers(table) == (1, 0.5, 1)
        assert table.init_std == {None: 0.05}
        assert table.forward_multiplier == 3


@pytest.mark.parametrize("tensor", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("core", ["megatron", "sdpa"])
def test_relative_positions_reach_self_attention_alone(ranks: Ranks, core: str, tensor: int) -> None:
    """The last layers' attention, by hand in float64, with the biases of Hugging Face's T5 times α; cross-attention
    has none. Encoder: 10 tokens, the last two of which are padding; decoder: 7."""
    config = make_t5(
        **RELATIVE,
        model__core_attention=core,
        hparams__relative_bias_multiplier=3.0,
        hparams__init_method_std=0.2,
        parallel__tensor_model_parallel_size=tensor,
    )
    results = ranks.run(tensor, bias_bodies.encoder_decoder, config=config, vocabulary=VOCABULARY)
    for rank, seen in enumerate(results):
        for name, part in seen.items():
            stack, _, kind = name.partition(" ")
            length, keys = part["query"].shape[0], part["key"].shape[0]
            bias = np.zeros((8, length, keys))
            if kind == "self_attention":
                bias = 3.0 * hugging_faces_bias(part["table"], stack == "decoder", length)
            own = np.split(bias, tensor)[rank]
            masked = np.broadcast_to(part["mask"], (2, 1, length, keys))
            query, key, value = (part[each] for each in ("query", "key", "value"))
            logits = np.einsum("sbad,kbad->bask", query, key) * part["scale"] + own
            weights = softmax(np.where(masked, -np.inf, logits))
            expected = np.einsum("bask,kbad->sbad", weights, value).reshape(length, 2, -1)
            np.testing.assert_allclose(part["context"], expected, rtol=1e-4, atol=1e-5, err_msg=name)
            if kind == "self_attention":
                plain = softmax(np.where(masked, -np.inf, logits - own))
                assert np.abs(plain - weights).max() > 1e-2  # the comparison can tell
        assert set(seen) == {"encoder self_attention", "decoder self_attention", "decoder cross_attention"}


def hugging_faces_bias(table: np.ndarray, decoder: bool, length: int) -> np.ndarray:
    import torch
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Attention

    config = T5Config(d_model=64, d_kv=8, num_heads=8, is_decoder=decoder)
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    theirs.relative_attention_bias.weight.data.copy_(torch.tensor(table))
    with torch.no_grad():
        return theirs.compute_bias(length, length)[0].double().numpy()


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (
            {"model__num_query_groups": 8},
            "model.num_query_groups: megatron-core's cross-attention has as many key/value",
        ),
        ({"base__num_query_groups": 4}, "base.num_query_groups: megatron-core's cross-attention has as many"),
        ({"model__num_moe_experts": 4}, "model.num_moe_experts: experts in an encoder-decoder have no rule"),
        ({"model__multi_latent_attention": True}, "model.multi_latent_attention: megatron-core has no cross-attention"),
        ({"model__mtp_num_layers": 1}, "model.mtp_num_layers: megatron-core's T5Model has no multi-token prediction"),
        ({"model__qk_layernorm": True}, "model.qk_layernorm: megatron-core's cross-attention does not norm"),
        ({"model__attention_output_gate": True}, "model.attention_output_gate: megatron-core's cross-attention has no"),
        ({"model__position_embedding_type": "yarn"}, "T5Model has no yarn; expected learned_absolute, rope, relative"),
        (
            {"model__position_embedding_type": "alibi"},
            "T5Model has no alibi; expected learned_absolute, rope, relative",
        ),
        ({**RELATIVE, "model__relative_attention_num_buckets": 2}, "2 buckets are too few for an encoder"),
        ({**RELATIVE, "training__recompute_granularity": "selective"}, "lose the gradient of T5's relative positions"),
        ({"model__rotary_base": 500}, "model.rotary_base: 500 does not reach megatron-core's T5Model; expected 10000"),
        ({"model__core_attention": "transformer_engine"}, "model.core_attention: Transformer Engine takes the masks"),
        (
            {"parametrization__depth": "completep", "base__num_layers": 2},
            "completep is derived for one stack of layers",
        ),
        ({"parallel__pipeline_model_parallel_size": 2}, "megatron-core's T5 has no pipeline parallelism"),
        (
            {
                "parallel__sequence_parallel": True,
                "parallel__tensor_model_parallel_size": 2,
                "training__decoder_seq_length": 25,
            },
            "training.decoder_seq_length: 25 is not divisible by the tensor-parallel size 2",
        ),
        ({"parallel__use_torch_fsdp2": True}, "FSDP2 was not compared with one process on an encoder-decoder"),
        ({"parallel__context_parallel_size": 2}, "padding is not split along the sequence here; expected 1, found 2"),
    ],
)
def test_what_it_does_not_have_is_refused(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve_layout(make_t5(**keys), 2)
    assert sentence in str(error.value)


def test_an_encoder_is_t5_s() -> None:
    with pytest.raises(
        ConfigError, match=r"model\.encoder_num_layers: gpt3 has no encoder; expected model\.architecture: t5"
    ):
        make(MIXED, "gpt3", model__encoder_num_layers=2)
    layers = apply(model__encoder_num_layers=None).tensors
    assert not any(name.startswith("encoder.layers.2") for name in layers)
    assert T5["model"]["encoder_num_layers"] == 3
