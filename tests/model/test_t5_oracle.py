"""Identity 5 for an encoder-decoder: a plain torch one in float64 under microsoft/mup trains as ours does.

It is written from the paper's rules and microsoft/mup's classes alone: MuReadout's multiplier, MuAdamW's rates, 1/d in
every attention. It starts from our initial values and gets our batches, masks included.
"""

from __future__ import annotations

import math
from typing import Any

import mup
import numpy as np
import pytest
import torch
import torch.nn.functional as F  # torch's own name for it
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mup_megatron.config import Config
from mup_megatron.data.prepare import prepare
from mup_megatron.model.build import parametrize
from mup_megatron.tuning.budget import flops_per_token, plan
from tests.helpers import t5_bodies
from tests.helpers.configs import make_t5
from tests.helpers.distributed import Ranks

STEPS = 8
# MuAdamW scales no epsilon and decays every tensor; clipping by a global norm is no part of it.
KEYS = {
    "optimizer__eps": 1e-15,
    "hparams__weight_decay": 0.0,
    "training__clip_grad": 0.0,
    "hparams__lr": 2e-3,
    "hparams__output_multiplier": 3.0,
    "hparams__attention_multiplier": 2.0,
    "model__core_attention": "megatron",
    "parallel__zero_stage": 0,
}
# All keys of a query share it and softmax does not see it: its gradient is rounding noise, which Adam makes a step of.
KEY_BIAS = ("linear_qkv.bias", "linear_kv.bias")


class Attention(nn.Module):
    """Multi-head attention whose logits are multiplied with α · sqrt(d_base)/d."""

    def __init__(self, width: int, heads: int, head: int, scale: float) -> None:
        super().__init__()
        self.heads, self.head, self.scale = heads, head, scale
        self.query, self.key, self.value = (nn.Linear(width, heads * head) for _ in range(3))
        self.out = nn.Linear(heads * head, width)

    def forward(self, x: torch.Tensor, context: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
        query = self.query(x).unflatten(-1, (self.heads, self.head))
        key, value = (layer(context).unflatten(-1, (self.heads, self.head)) for layer in (self.key, self.value))
        logits = torch.einsum("bqad,bkad->baqk", query, key) * self.scale
        weights = logits.masked_fill(masked, float("-inf")).softmax(-1)
        return self.out(torch.einsum("baqk,bkad->bqad", weights, value).flatten(2))


class Layer(nn.Module):
    def __init__(self, width: int, ffn: int, cross: bool, **attention: Any) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, **attention)
        if cross:
            self.norm2, self.cross = nn.LayerNorm(width), Attention(width, **attention)
        self.norm3, self.fc1, self.fc2 = nn.LayerNorm(width), nn.Linear(width, ffn), nn.Linear(ffn, width)

    def forward(self, x: torch.Tensor, masked: torch.Tensor, context: Any = None, hidden: Any = None) -> torch.Tensor:
        normed = self.norm1(x)
        x = x + self.attention(normed, normed, masked)
        if context is not None:
            x = x + self.cross(self.norm2(x), context, hidden)
        return x + self.fc2(F.gelu(self.fc1(self.norm3(x))))


class EncoderDecoder(nn.Module):
    def __init__(self, config: Config, vocabulary: int, width: int, ffn: int, heads: int, head: int) -> None:
        super().__init__()
        model = config.model
        # Definition 4.1 of Tensor Programs V, in the form that is 1/sqrt(d) at the base.
        scale = config.hparams.attention_multiplier * math.sqrt(config.base.width.kv_channels or 0) / head
        attention = {"heads": heads, "head": head, "scale": scale}
        self.words = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(config.max_position_embeddings, width)
        self.encoder = nn.ModuleList(
            Layer(width, ffn, False, **attention) for _ in range(model.encoder_num_layers or 0)
        )
        self.decoder = nn.ModuleList(Layer(width, ffn, True, **attention) for _ in range(model.num_layers))
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        # Its own bias would be as long as the model is wide (mup 1.0).
        self.readout = mup.MuSharedReadout(self.words.weight, bias=False, output_mult=config.hparams.output_multiplier)
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Logits, [b, t, v]."""
        context = self._embed(batch["encoder_tokens"])
        for layer in self.encoder:
            context = layer(context, batch["encoder_mask"])
        context = self.encoder_norm(context)
        x = self._embed(batch["decoder_tokens"])
        for layer in self.decoder:
            x = layer(x, batch["decoder_mask"], context, batch["cross_mask"])
        return self.readout(self.decoder_norm(x)) + self.bias

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.words(tokens) + self.positions(torch.arange(tokens.shape[1]))


def build(config: Config, vocabulary: int) -> EncoderDecoder:
    """With base shapes, as microsoft/mup is told them."""

    def of(sizes: Any) -> EncoderDecoder:
        return EncoderDecoder(
            config, vocabulary, sizes.hidden_size, sizes.ffn_hidden_size, sizes.num_attention_heads, sizes.kv_channels
        )

    model = of(config.model)
    mup.set_base_shapes(model, of(config.base.width), delta=of(config.base.enlarged()), rescale_params=False)
    return model.double()


def theirs_of(ours: dict[str, np.ndarray], config: Config) -> dict[str, torch.Tensor]:
    """Our tensors as the torch model has them: Megatron's fused rows, head by head, taken apart by hand."""
    heads, head = config.model.num_attention_heads, config.model.head_size
    names = {"input_layernorm": "norm1", "pre_cross_attn_layernorm": "norm2", "pre_mlp_layernorm": "norm3"}
    names |= {"self_attention": "attention", "cross_attention": "cross", "linear_proj": "out", "linear_q": "query"}
    names |= {"mlp.linear_fc1": "fc1", "mlp.linear_fc2": "fc2", "encoder.final_layernorm": "encoder_norm"}
    names |= {"decoder.final_layernorm": "decoder_norm", "lm_head.output_layer.bias": "bias"}
    names |= {"embedding.word_embeddings": "words", "embedding.position_embeddings": "positions", ".layers.": "."}
    found = {}
    for name, value in ours.items():
        tensor = torch.from_numpy(value).double()
        parts = ("query", "key", "value") if "linear_qkv" in name else ("key", "value") if "linear_kv" in name else ()
        for part, rows in zip(parts or ("",), _apart(tensor, heads, head, len(parts)), strict=True):
            other = name.replace("linear_qkv", part).replace("linear_kv", part)
            for old, new in names.items():
                other = other.replace(old, new)
            found[other] = rows
    found["readout.weight"] = found["words.weight"]
    return found


def _apart(tensor: torch.Tensor, heads: int, head: int, parts: int) -> list[torch.Tensor]:
    if not parts:
        return [tensor]
    rows = tensor.view(heads, parts, head, *tensor.shape[1:])
    return [rows[:, part].reshape(heads * head, *tensor.shape[1:]) for part in range(parts)]


@pytest.fixture(scope="module")
def trained(ranks: Ranks) -> tuple[Config, dict[str, Any]]:
    config = make_t5(**KEYS)
    prepare(config)
    return config, ranks.run(1, t5_bodies.trajectory, config=config, steps=STEPS)[0]


def train(config: Config, ours: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of the torch model, and its weights in the end."""
    model = build(config, len(ours["initial"]["embedding.word_embeddings.weight"]))
    model.load_state_dict(theirs_of(ours["initial"], config))
    optimizer = mup.MuAdamW(
        model.parameters(), lr=config.hparams.lr, betas=tuple(config.optimizer.betas), eps=1e-15, weight_decay=0.0
    )
    peaks = [group["lr"] for group in optimizer.param_groups]
    losses = []
    for micro_batches, rate in zip(ours["batches"], ours["rates"], strict=True):
        optimizer.zero_grad()
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * rate
        # Over every label of the global batch at once.
        labels = torch.cat([batch["labels"].flatten() for batch in micro_batches])
        counted = torch.cat([batch["loss_mask"].flatten() for batch in micro_batches]).bool()
        logits = torch.cat([model(batch).flatten(0, 1) for batch in micro_batches])
        loss = F.cross_entropy(logits[counted], labels[counted])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def test_training_is_microsoft_mup_s(trained: tuple[Config, dict[str, Any]]) -> None:
    config, ours = trained
    losses, weights = train(config, ours)
    assert losses[0] - losses[-1] > 0.3
    np.testing.assert_allclose(ours["losses"], losses, rtol=1e-5)
    compared = 0
    for name, tensor in theirs_of({n: w for n, w in ours["final"].items() if not n.endswith(KEY_BIAS)}, config).items():
        moved = (weights[name] - theirs_of(ours["initial"], config)[name]).abs().max()
        assert moved > 0, name
        assert (weights[name] - tensor).abs().max() < 2e-2 * moved, name
        compared += 1
    assert compared == 89  # of 83 tensors, fused ones taken apart


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "step"),
    [("standard rates", 2), ("1/sqrt(d) in cross-attention", 0), ("no multiplier of the readout", 0)],
)
def test_the_comparison_can_fail(trained: tuple[Config, dict[str, Any]], wrong: str, step: int) -> None:
    """Negative control: the first step whose loss differs tells forward pass from rates, which are 0 in step 0."""
    config, ours = trained
    with pytest.MonkeyPatch.context() as patch:
        if wrong == "standard rates":
            patch.setattr(mup, "MuAdamW", torch.optim.AdamW)
        elif wrong == "no multiplier of the readout":
            patch.setattr(mup.MuSharedReadout, "width_mult", lambda _self: 1.0)
        else:
            made = Layer.__init__

            def init(self: Layer, *args: Any, **keys: Any) -> None:
                made(self, *args, **keys)
                if hasattr(self, "cross"):
                    self.cross.scale = config.hparams.attention_multiplier / self.cross.head**0.5

            patch.setattr(Layer, "__init__", init)
        losses, _ = train(config, ours)
    off = np.abs(np.array(losses) / ours["losses"] - 1) > 1e-5
    assert off.argmax() == step
    assert off[step]


def test_flops_are_those_of_the_torch_model() -> None:
    """Forward and backward are three forwards; half of the decoder's own scores are masked."""
    config = make_t5(training__decoder_seq_length=24)
    batch = {
        "encoder_tokens": torch.zeros(1, 32, dtype=torch.int64),
        "decoder_tokens": torch.zeros(1, 24, dtype=torch.int64),
        **{f"{name}_mask": torch.zeros(1, dtype=torch.bool) for name in ("encoder", "decoder", "cross")},
    }
    with FlopCounterMode(display=False) as counter:
        build(config, 384)(batch)
    masked = 6 * 2 * 24**2 * 8 * 12
    assert flops_per_token(parametrize(config, 375)) * (32 + 24) == 3 * counter.get_total_flops() - masked


def test_tokens_of_a_pair_are_both_sides() -> None:
    config = make_t5(training__decoder_seq_length=24, tuning__search={"lr": {"log_uniform": [1e-3, 1e-1]}})
    assert config.sample_tokens == 56
    assert plan(config, 375, 1).target.tokens == 20 * 8 * 56
