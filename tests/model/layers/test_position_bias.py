"""Positions as a bias on attention logits: against Hugging Face's T5, BLOOM and MPT, float64, upstream's own pieces.

Layouts: test_position_bias_layouts.py.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from mup_megatron.data.prepare import prepare
from tests.helpers import bias_bodies
from tests.helpers.configs import HEAD_SIZE, MIXED, make
from tests.helpers.distributed import Ranks
from tests.model.layers.test_architectures import softmax

# Sequences of 32 tokens: 4 distances of their own, 4 ranges, the last one from 20 on.
BUCKETS = {"model__relative_attention_num_buckets": 8, "model__relative_attention_max_distance": 20}
KINDS: dict[str, dict[str, Any]] = {
    "relative": {"model__position_embedding_type": "relative", **BUCKETS},
    "alibi": {"model__position_embedding_type": "alibi"},
}
TABLE = "decoder_relative_pos_emb.relative_attention_bias.weight"


class OneRank:
    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def module(kind: str, heads: int, multiplier: float = 1.0, buckets: int = 8, distance: int = 20) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from mup_megatron.model.layers.position_bias import AlibiBias, RelativeBias

    config = TransformerConfig(num_layers=1, hidden_size=4 * heads, num_attention_heads=heads)
    if kind == "alibi":
        return AlibiBias(config, multiplier, OneRank())
    return RelativeBias(config, buckets, distance, multiplier, OneRank())


def visible(bias: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The bias at the keys that queries see; all others must be -inf."""
    sees = keys[None, :] <= queries[:, None]
    assert torch.all(bias[0, :, ~sees] == -torch.inf)
    return bias[0, :, sees]


# --- the bias itself ---


@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (8, 20), (7, 64)])
@pytest.mark.parametrize(("past", "size"), [(0, 200), (150, 3)])
def test_relative_is_hugging_faces_t5(buckets: int, distance: int, past: int, size: int) -> None:
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Attention

    ours = module("relative", 6, 2.0, buckets, distance)
    config = T5Config(
        d_model=24,
        d_kv=4,
        num_heads=6,
        is_decoder=True,
        relative_attention_num_buckets=buckets,
        relative_attention_max_distance=distance,
    )
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    theirs.relative_attention_bias.weight.data.copy_(ours.relative_attention_bias.weight)
    queries, keys = past + torch.arange(size), torch.arange(past + size)
    expected = 2.0 * theirs.compute_bias(size, past + size, past_seen_tokens=past)
    found = visible(ours(queries, keys), queries, keys)
    assert torch.equal(found, visible_of(expected, queries, keys))
    assert found.unique().numel() > 6 * min(buckets, 5)  # heads and buckets differ


def visible_of(bias: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    return bias[0, :, keys[None, :] <= queries[:, None]]


def test_buckets_by_hand() -> None:
    """Of 8: distances 0 to 3; then 4 + 4·ln(d/4)/ln(20/4): 4 and 5, to 8 (8.94), to 13 (13.37), and the rest."""
    ours = module("relative", 1)
    ours.relative_attention_bias.weight.data.copy_(torch.arange(8.0)[:, None])
    found = ours(torch.tensor([30]), torch.arange(31))[0, 0, 0].flip(0).tolist()
    assert found == [0, 1, 2, 3, 4, 4, *[5] * 3, *[6] * 5, *[7] * 17]


def test_slopes_by_hand() -> None:
    from mup_megatron.model.layers.position_bias import alibi_slopes

    assert alibi_slopes(8) == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]
    assert alibi_slopes(1) == [1 / 256]
    assert alibi_slopes(3) == [1 / 16, 1 / 256, 1 / 4]
    assert alibi_slopes(16)[:2] == [2**-0.5, 2**-1.0]


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 16, 20])
def test_alibi_is_blooms_and_mpts(heads: int) -> None:
    """Theirs count from the first key and from the last; what a query sees differs from ours by a constant."""
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    positions = torch.arange(40)
    ours = module("alibi", heads)(positions, positions)
    bloom = build_alibi_tensor(torch.ones(1, 40), heads, torch.float32)  # [heads, 1, keys]
    mpt = build_mpt_alibi_tensor(heads, 40)
    for theirs in (bloom, mpt):
        whole = theirs.expand(heads, 40, 40) - theirs.transpose(1, 2)  # 0 where the key is the query
        expected = visible_of(whole[None], positions, positions)
        torch.testing.assert_close(visible(ours, positions, positions), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(module("alibi", heads, 3.0)(positions, positions)[0, :, 5, 3], 3.0 * ours[0, :, 5, 3])


# --- core attention ---


def attention_by_hand(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, scale: float, bias: np.ndarray, masked: np.ndarray
) -> np.ndarray:
    """[s, b, a, d], [k, b, g, d], [k, b, g, v] to [s, b, a·v], float64; bias [a, s, k], masked [s, k]."""
    repeat = query.shape[2] // key.shape[2]
    key, value = np.repeat(key, repeat, axis=2), np.repeat(value, repeat, axis=2)
    logits = np.einsum("sbad,kbad->bask", query, key) * scale + bias
    context = np.einsum("bask,kbav->sbav", softmax(np.where(masked, -np.inf, logits)), value)
    return context.reshape(*context.shape[:2], -1)


def test_sdpa_adds_the_bias_to_the_scaled_logits() -> None:
    """Masks given, causal, none and full; a bias with the causal mask in it or not; decoding with a longer bias."""
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from mup_megatron.model.layers.attention import SdpaAttention, mark_causal

    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, num_query_groups=2)
    attention = SdpaAttention(config, 1, AttnMaskType.causal, "self", attention_dropout=0.0, softmax_scale=0.7)
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(6, 2, n, 8, generator=generator, dtype=torch.float64) for n in (4, 2, 2))
    bias = torch.randn(1, 4, 6, 6, generator=generator, dtype=torch.float64)
    later = torch.ones(6, 6, dtype=torch.bool).triu(1)
    window = later | torch.ones(6, 6, dtype=torch.bool).tril(-3)
    inside = mark_causal(bias.masked_fill(later, -torch.inf))

    def hand(masked: torch.Tensor, rows: slice = slice(None)) -> np.ndarray:
        arrays = query[rows].numpy(), key.numpy(), value.numpy()
        return attention_by_hand(*arrays, 0.7, bias[0, :, rows].numpy(), masked[rows].numpy())

    for given, mask in ((bias, None), (bias, later[None, None]), (inside, None), (inside, later[None, None])):
        found = attention(query, key, value, mask, attention_bias=given).numpy()
        np.testing.assert_allclose(found, hand(later), rtol=1e-10)
    for given in (bias, inside):
        found = attention(query, key, value, window[None, None], attention_bias=given).numpy()
        np.testing.assert_allclose(found, hand(window), rtol=1e-10)
    everything = attention(query, key, value, None, AttnMaskType.no_mask, bias).numpy()
    np.testing.assert_allclose(everything, hand(torch.zeros_like(later)), rtol=1e-10)
    for first in (5, 2):
        decoded = attention(query[first:], key, value, None, attention_bias=bias).numpy()
        np.testing.assert_allclose(decoded, hand(later, slice(first, None)), rtol=1e-10)
    assert not np.allclose(hand(later), attention(query, key, value, None).numpy())


def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight


def logits_by_hand(seen: dict[str, Any], bias: np.ndarray) -> np.ndarray:
    """A llama-like model without RoPE, float64: [b, s, vocabulary]; heads 8, groups 4, head size 8."""
    held = seen["weights"]
    x = held["embedding.word_embeddings.weight"][seen["tokens"]].transpose(1, 0, 2)
    length = len(x)
    later = np.triu(np.ones((length, length), dtype=bool), 1)
    for layer in range(2):
        part = {name.removeprefix(f"decoder.layers.{layer}."): value for name, value in held.items()}
        qkv = norm(x, part["input_layernorm.weight"]) @ part["self_attention.linear_qkv.weight"].T
        qkv = qkv.reshape(length, 2, 4, 4, 8)  # groups of 2 query heads, a key, a value
        query = qkv[:, :, :, :2].reshape(length, 2, 8, 8)
        context = attention_by_hand(query, qkv[:, :, :, 2], qkv[:, :, :, 3], seen["scale"], bias, later)
        x = x + context @ part["self_attention.linear_proj.weight"].T
        gate, up = np.split(norm(x, part["pre_mlp_layernorm.weight"]) @ part["mlp.linear_fc1.weight"].T, 2, axis=-1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ part["mlp.linear_fc2.weight"].T
    x = norm(x, held["decoder.final_layernorm.weight"]) * seen["readout"]
    return (x @ held["output_layer.weight"].T).transpose(1, 0, 2)


@pytest.mark.parametrize(
    ("kind", "core"), [("relative", "megatron"), ("relative", "sdpa"), ("alibi", "megatron"), ("alibi", "sdpa")]
)
def test_the_whole_model_by_hand(ranks: Ranks, kind: str, core: str) -> None:
    """Every layer's logits have the bias times α; distances 0 to 31, heads of 8 over a base of 8."""
    more = {"hparams__relative_bias_multiplier": 3.0, "hparams__init_method_std": 0.2, "model__core_attention": core}
    config = make(MIXED, "llama", **KINDS[kind], **more)
    prepare(config)
    seen = ranks.run(1, bias_bodies.whole_model, config=config)[0]
    assert seen["core"] == {"SdpaAttention" if core == "sdpa" else "MegatronAttention"}
    distances = np.maximum(np.arange(32)[:, None] - np.arange(32)[None, :], 0)
    if kind == "alibi":
        bias = -np.array([2.0**-head for head in range(1, 9)])[:, None, None] * distances
    else:
        far = 4 + np.floor(4 * np.log(np.maximum(distances, 1) / 4) / math.log(5)).astype(int)
        table = np.where(distances < 4, distances, np.minimum(far, 7))
        bias = seen["weights"][TABLE][table].transpose(2, 0, 1)
    np.testing.assert_allclose(seen["logits"], logits_by_hand(seen, 3 * bias), rtol=1e-6, atol=1e-7)
    assert np.abs(seen["logits"] - logits_by_hand(seen, bias)).max() > 1e-3  # the comparison can tell


# --- identity 1 ---


def at_base(**overrides: Any) -> Any:
    sizes = {**MIXED["model"], **MIXED["base"]}
    return make({"model": sizes, "base": MIXED["base"]}, "gpt3", **KINDS["relative"], **overrides)


@pytest.mark.parametrize("multiplier", [1.0, 1.001])
def test_base_shape_is_upstreams_own(ranks: Ranks, multiplier: float) -> None:
    """GPTModel, RelativePositionEmbedding and `attention_bias` of upstream, to the last bit; a multiplier breaks it."""
    config = at_base(
        parallel__zero_stage=1,
        parallel__tensor_model_parallel_size=1,
        hparams__relative_bias_multiplier=multiplier,
    )
    prepare(config)
    found = ranks.run(1, bias_bodies.plain_and_ours, config=config, steps=6)[0]
    same = found["losses"]["ours"] == found["losses"]["plain"] and np.array_equal(*found["tables"])
    assert same == (multiplier == 1.0)


# --- the rule ---


def row(growth: dict[str, Any], **overrides: Any) -> Any:
    from mup_megatron.model.build import parametrize

    config = make(growth, "gpt3", hparams__relative_bias_multiplier=2.0, **KINDS["relative"], **overrides)
    return parametrize(config, 375).tensors[TABLE]


def test_the_table_is_input_like() -> None:
    """Heads ×2: init, rate and decay stay; epsilon is 1/2. Its own multiplier, whatever the embedding's is."""
    tensor = row(MIXED, hparams__embedding_multiplier=7.0, hparams__embedding_init_method_std=0.3)
    assert tensor.init_std == {None: 0.05}
    assert (tensor.lr_multiplier, tensor.eps_multiplier, tensor.weight_decay_multiplier) == (1, 0.5, 1)
    assert tensor.forward_multiplier == 2.0
    assert [dim.base_dim for dim in tensor.shape.infshape] == [None, 4]


def test_where_head_sizes_grow_it_is_like_a_scalar() -> None:
    tensor = row(HEAD_SIZE)
    assert [dim.base_dim for dim in tensor.shape.infshape] == [None, None]
    assert (tensor.lr_multiplier, tensor.eps_multiplier, tensor.weight_decay_multiplier) == (1, 1, 1)


def test_sgd_and_muon() -> None:
    """SGD's rate is m_out; Muon leaves a lookup to AdamW."""
    assert row(MIXED, optimizer__name="sgd", base__num_query_groups=2).lr_multiplier == 2
    muon = row(MIXED, optimizer__name="muon", parallel__engine="megatron", base__num_query_groups=2)
    assert muon.group.update_rule == "adam"


def test_all_layers_share_it_under_the_depth_rule() -> None:
    """Two layers over a base of one, α 1/2: the blocks' rate 2^-1/2; the gradient is two layers': epsilon 2^1/2 / m."""
    tensor = row(MIXED, parametrization__depth="depth_mup", base__num_layers=1)
    assert tensor.lr_multiplier == pytest.approx(2**-0.5)
    assert tensor.eps_multiplier == pytest.approx(2**0.5 / 2)
    sgd = row(
        MIXED, parametrization__depth="depth_mup", base__num_layers=1, optimizer__name="sgd", base__num_query_groups=2
    )
    assert sgd.lr_multiplier == pytest.approx(2 / 2)


def test_a_rebase_hands_the_multiplier_to_the_table() -> None:
    """Twice the multiplier is the same function of a table twice as large; ALiBi has no weight to take it."""
    from mup_megatron.convert.reexpress import kept_multipliers, reexpress
    from mup_megatron.model.build import parametrize
    from mup_megatron.util.errors import ConfigError

    def table(kind: str, multiplier: float) -> Any:
        keys = {"hparams__relative_bias_multiplier": multiplier, "training__clip_grad": 0.0}
        return parametrize(make(MIXED, "llama", **KINDS[kind], **keys), 375)

    found = reexpress(table("relative", 2.0), table("relative", 1.0))
    assert found.weights == {TABLE: 2.0}
    assert found.carried[TABLE].lr == 2.0
    assert kept_multipliers(table("relative", 2.0), table("relative", 1.0))["hparams.relative_bias_multiplier"] == 2.0
    with pytest.raises(ConfigError, match=r"hparams\.relative_bias_multiplier: ALiBi has no weight to take it"):
        reexpress(table("alibi", 2.0), table("alibi", 1.0))


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("architecture", ["gpt3", "llama"])
def test_export_is_refused(kind: str, architecture: str) -> None:
    from mup_megatron.convert.export import hugging_face, megatron_core
    from mup_megatron.util.errors import ConfigError

    config = make(HEAD_SIZE, architecture, **KINDS[kind])
    refusals = [lambda: megatron_core._refuse_without_option(config)]
    if architecture == "gpt3":
        refusals.append(lambda: hugging_face._refuse_of_gpt2(config))
    else:
        refusals.append(lambda: hugging_face._refuse_of_llama(config, "LlamaForCausalLM"))
    for refuse in refusals:
        with pytest.raises(ConfigError, match=r"model\.position_embedding_type"):
            refuse()


# --- bad input ---


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"hparams__relative_bias_multiplier": 2.0}, "hparams.relative_bias_multiplier"),
        ({"model__relative_attention_num_buckets": 8}, "model.relative_attention_num_buckets"),
        (
            {"model__position_embedding_type": "relative", "model__relative_attention_max_distance": 16},
            "16 is no more than the 16 distances",
        ),
        (
            {"model__position_embedding_type": "alibi", "model__core_attention": "transformer_engine"},
            "positions alibi were not run with Transformer Engine's attention",
        ),
        (
            {
                "model__position_embedding_type": "relative",
                "parallel__engine": "megatron",
                "parallel__pipeline_model_parallel_size": 2,
                "parallel__virtual_pipeline_model_parallel_size": 2,
            },
            "a table of relative positions of its own",
        ),
        (
            {"tuning__search": {"relative_bias_multiplier": {"log_uniform": [0.5, 2.0]}}},
            "tuning.search.relative_bias_multiplier",
        ),
    ],
)
def test_bad_input(overrides: dict[str, Any], said: str) -> None:
    from mup_megatron.util.errors import ConfigError

    with pytest.raises(ConfigError, match=said):
        make(MIXED, "gpt3", **overrides)


def test_latent_attention_is_refused() -> None:
    from mup_megatron.util.errors import ConfigError
    from tests.helpers.configs import MLA

    with pytest.raises(ConfigError, match="relative under multi-latent attention"):
        make(MLA, "llama", model__position_embedding_type="relative")
