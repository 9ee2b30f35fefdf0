"""BERT's tensors, every number worked out by hand; its data; what BertModel does not have is refused by name."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from mup_megatron.config import Config, load_config
from mup_megatron.data.batches import Batches, build_datasets
from mup_megatron.data.masked import mask_tokens
from mup_megatron.data.prepare import prepare
from mup_megatron.model.build import parametrize
from mup_megatron.parallel import upstream
from mup_megatron.parallel.layout import resolve_layout
from mup_megatron.rules.table import Parametrization
from mup_megatron.tuning.budget import flops_per_token
from mup_megatron.tuning.family import digest, digested
from mup_megatron.util.errors import ConfigError
from tests.helpers.configs import HEAD_SIZE, MIXED, VOCABULARY, make
from tests.rules.test_parametrization import EMBEDDING, numbers

MASK = VOCABULARY


@pytest.fixture(autouse=True, scope="module")
def prepared() -> None:
    upstream.prepare_process()


def apply(growth: dict[str, Any] = MIXED, **overrides: Any) -> Parametrization:
    return parametrize(make(growth, "bert", **overrides), VOCABULARY)


def close(value: float) -> Any:
    return pytest.approx(value)


def test_embeddings_and_the_language_model_head() -> None:
    """hidden ×3/2; rate, epsilon and decay multipliers. Base init std 0.05."""
    tensors = apply(model__bert_binary_head=True, model__share_embeddings_and_output_weights=False).tensors
    for name, rows in ((EMBEDDING, 384), ("embedding.position_embeddings.weight", 32)):
        assert tensors[name].shape.spec.shape == (rows, 96)
    types = tensors["embedding.tokentype_embeddings.weight"]  # input-like, as the other embeddings
    assert types.shape.spec.shape == (2, 96)
    assert numbers(types) == numbers(tensors[EMBEDDING]) == (1, close(2 / 3), 1)
    assert types.init_std == {None: 0.05}
    dense = tensors["lm_head.dense.weight"]  # hidden: m_in = m_out = 3/2
    assert numbers(dense) == (close(2 / 3), close(2 / 3), 1.5)
    assert dense.init_std == {None: close(0.05 / math.sqrt(1.5))}
    for name in ("dense.bias", "layer_norm.weight", "layer_norm.bias"):
        assert numbers(tensors[f"lm_head.{name}"]) == (1, close(2 / 3), 0)
    # The readout in the form of Table 8, and its bias, whose one dimension is the vocabulary.
    readout = tensors["output_layer.weight"]
    assert numbers(readout) == (1, close(2 / 3), 1)
    assert readout.init_std == {None: 0.05}
    assert readout.forward_multiplier == close(2 / 3)
    bias = tensors["output_layer.bias"]
    assert bias.shape.spec.shape == bias.shape.base_shape == (384,)
    assert numbers(bias) == (1, 1, 0)
    assert bias.init_std == {None: 0}


def test_pooler_and_binary_head() -> None:
    """The pooler is hidden; the head's fan-in grows and its two classes do not, so its init and rate fall as 1/m_in."""
    tensors = apply(model__bert_binary_head=True).tensors
    pooler = tensors["pooler.dense.weight"]
    assert numbers(pooler) == (close(2 / 3), close(2 / 3), 1.5)
    assert pooler.init_std == {None: close(0.05 / math.sqrt(1.5))}
    assert numbers(tensors["pooler.dense.bias"]) == (1, close(2 / 3), 0)
    head = tensors["binary_head.weight"]
    assert head.shape.spec.shape == (2, 96)
    assert numbers(head) == (close(2 / 3), 1, 1.5)
    assert head.init_std == {None: close(0.05 / 1.5)}
    assert head.forward_multiplier == 1
    assert numbers(tensors["binary_head.bias"]) == (1, 1, 0)


def test_without_next_sentence_prediction() -> None:
    """By default there are no token types, no pooler and no binary head; the tied head has no weight of its own."""
    outside = {name for name in apply().tensors if not name.startswith("encoder.")}
    assert outside == {
        EMBEDDING,
        "embedding.position_embeddings.weight",
        "lm_head.dense.weight",
        "lm_head.dense.bias",
        "lm_head.layer_norm.weight",
        "lm_head.layer_norm.bias",
        "output_layer.bias",
    }


def test_layers_are_those_of_gpt3() -> None:
    """The encoder's layers have the tensors and the rules of a GPT-3's decoder."""
    ours, theirs = apply().tensors, parametrize(make(MIXED, "gpt3"), VOCABULARY).tensors
    layers = [name for name in ours if name.startswith("encoder.")]
    assert len(layers) == 2 * 12 + 2
    for name in layers:
        other = theirs[name.replace("encoder.", "decoder.")]
        assert (numbers(ours[name]), ours[name].init_std) == (numbers(other), other.init_std), name
        assert ours[name].shape.layer == other.shape.layer


def test_multipliers_of_mutransformers() -> None:
    """microsoft/mutransformers, modeling_bert.py: MuReadout divides by the width multiplier (lines 673 and 700); scores
    are divided by the head size and multiplied with attn_mult (line 330), by default the root of the head size of the
    config, which is the base's there (configuration_bert.py, line 164)."""
    forward = apply(HEAD_SIZE, hparams__output_multiplier=3.0, hparams__attention_multiplier=2.0).forward
    assert forward.readout == 3 / 2  # hidden 64 of 32
    assert forward.softmax_scale == close(2 * math.sqrt(16) / 24)  # head size 24 of 16
    assert apply(HEAD_SIZE, parametrization__name="standard").forward.readout == 1


def test_depth_reaches_the_encoder_and_not_the_heads() -> None:
    keys: dict[str, Any] = {
        "parametrization__depth": "completep",
        "base__num_layers": 1,
        "model__bert_binary_head": True,
    }
    deep, flat = apply(**keys), apply(model__bert_binary_head=True)
    assert deep.forward.residual == 1 / 2
    for name in ("lm_head.dense.weight", "pooler.dense.weight", "binary_head.weight", "output_layer.bias"):
        assert numbers(deep.tensors[name]) == numbers(flat.tensors[name])


# --- the mask, and the data ---


def test_the_vocabulary_has_room_for_the_mask() -> None:
    """One entry after the tokenizer's, within what pads it where there is room, else in one more multiple."""
    model = make(MIXED, "bert").model
    assert model.padded_vocab_size(383) == 384
    assert model.padded_vocab_size(384) == 512
    assert make(MIXED, "gpt3").model.padded_vocab_size(384) == 384


def test_masking_by_hand() -> None:
    """15 of 100 tokens; over many sequences 80, 10 and 10 percent; the separator is the last to be chosen."""
    tokens = np.arange(100) % 50 + 10
    fates = np.zeros(3)
    for sample in range(400):
        masked, chosen = mask_tokens(tokens, np.random.RandomState([7, sample]), separator=3, vocabulary=1000)
        assert chosen.sum() == 15
        assert (masked[~chosen] == tokens[~chosen]).all()
        fates += [(masked[chosen] == 1000).sum(), 0, (masked[chosen] == tokens[chosen]).sum()]
    total = 400 * 15
    fates[1] = total - fates.sum()
    for found, share in zip(fates / total, (0.8, 0.1, 0.1), strict=True):
        assert abs(found - share) < 4 * math.sqrt(share * (1 - share) / total)
    few = np.full(20, 3)
    few[5] = few[9] = 11
    _, chosen = mask_tokens(few, np.random.RandomState(1), separator=3, vocabulary=1000)
    assert chosen.sum() == 3
    assert chosen[5]
    assert chosen[9]


def batches(config: Config, processes: int = 1, rank: int = 0) -> Any:
    layout = resolve_layout(config, processes)
    return Batches(build_datasets(config, prepare(config))[0], config, layout, rank, torch.device("cpu"))


def test_a_batch_is_the_corpus_with_masks() -> None:
    """Labels are the tokens that a GPT sees in the same place; masks are the same again, but for another seed."""
    batch = batches(make(MIXED, "bert"))[3][0]
    text = batches(make(MIXED, "gpt3"))[3][0].tokens
    assert torch.equal(batch.labels, text)
    assert batch.loss_mask.sum(1).tolist() == [5.0] * 4  # 15 % of 32
    where = batch.loss_mask == 1
    assert torch.equal(batch.tokens[~where], text[~where])
    assert (batch.tokens[where] == MASK).sum() > 10
    assert batch.attention_mask.tolist() == [[1] * 32] * 4
    assert batch.types is None
    again = batches(make(MIXED, "bert", parallel__tensor_model_parallel_size=1, training__micro_batch_size=2), 2, 0)[3]
    assert torch.equal(again[0].tokens, batch.tokens[:2])
    other = batches(make(MIXED, "bert", run__seed=8))[3][0]
    assert not torch.equal(other.loss_mask, batch.loss_mask)


def test_a_pair_is_two_segments() -> None:
    """Separator, first segment, separator, second segment, separator; half of the second ones come from elsewhere."""
    paired, config = batches(make(MIXED, "bert", model__bert_binary_head=True)), make(MIXED, "gpt3")
    plain, separator = batches(config), build_datasets(config, prepare(config))[0].config.tokenizer.eod
    random = 0
    for number in range(20):
        for batch, text in zip(paired[number], plain[number], strict=True):
            for row in range(4):
                labels, types = batch.labels[row], batch.types[row]
                cut = int((types == 0).sum()) - 2
                assert [int(labels[at]) for at in (0, cut + 1, 31)] == [separator] * 3
                assert torch.equal(labels[1 : cut + 1], text.tokens[row, :cut])
                follows = torch.equal(labels[cut + 2 : 31], text.tokens[row, cut:29])
                assert follows is not bool(batch.is_random[row])
                random += int(batch.is_random[row])
    assert 55 < random < 105  # of 160: four standard deviations


def test_attention_costs_what_both_directions_cost() -> None:
    """6 per weight, and 12·L·a·d·s, where a GPT's scores are masked by half."""
    found = flops_per_token(apply())
    shapes = apply().shapes.values()
    weights = sum(math.prod(s.spec.shape) for s in shapes if s.spec.fan_in == 1) + 384 * 96
    assert found == 6 * weights + 12 * 2 * 8 * 8 * 32


# --- configs and refusals ---


def test_one_record_serves_both_targets() -> None:
    configs = [load_config(f"configs/bert/{name}.yaml") for name in ("proxy-13m", "base", "large")]
    assert len({digest(digested(config)) for config in configs}) == 1
    assert len({config.record_path for config in configs}) == 1


def test_records_of_other_architectures_stay_valid() -> None:
    """The key of BERT is in a digest only where it says something."""
    assert "model.bert_binary_head" not in digested(make(MIXED, "gpt3"))
    assert digested(make(MIXED, "bert", model__bert_binary_head=True))["model.bert_binary_head"] is True


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"model__num_moe_experts": 4}, "model.num_moe_experts: is not supported with architecture: bert; expected"),
        ({"model__mtp_num_layers": 1}, "model.mtp_num_layers: is not supported with architecture: bert"),
        ({"model__qk_layernorm": True}, "model.qk_layernorm: is not supported with architecture: bert; expected false"),
        ({"model__rotary_base": 500}, "model.rotary_base: is not supported with architecture: bert; expected 10000"),
        ({"model__position_embedding_type": "none"}, "BertModel has no none; expected learned_absolute or rope"),
        ({"model__core_attention": "transformer_engine"}, "model.core_attention: transformer_engine is not supported"),
        ({"model__max_position_embeddings": 16}, "model.max_position_embeddings: 16 is less than training.seq_length"),
        ({"parallel": {"engine": "megatron", "context_parallel_size": 2}}, "attention of architecture: bert sees both"),
        (
            {"parallel": {"engine": "megatron", "use_torch_fsdp2": True}},
            "parallel.use_torch_fsdp2: is not supported with",
        ),
        ({"optimizer__name": "muon", "parallel__engine": "megatron"}, "optimizer.name: muon is not supported with"),
        ({"model__bert_binary_head": True, "training__seq_length": 4}, "has no room for two segments and three"),
        (
            {"run__samples": ["def"], "training__eval_interval": 5},
            "model.architecture: run.samples needs a model that predicts the next token, and bert does not; expected "
            "gpt3 or llama",
        ),
        ({"tuning__command": ["x"]}, "tuning.command needs a model that predicts the next token"),
    ],
)
def test_what_is_not_supported_is_refused(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        make(MIXED, "bert", **keys)
    assert sentence in str(error.value)


def test_a_binary_head_belongs_to_bert() -> None:
    with pytest.raises(ConfigError, match=r"model.bert_binary_head: belongs to BERT; expected model.architecture"):
        make(MIXED, "gpt3", model__bert_binary_head=True)
