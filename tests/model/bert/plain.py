"""A BERT in plain torch under microsoft/mup, by its own rules: what ours must train as. Nothing of this project in it.

Its layers are megatron-core's (pre-LN), its multipliers those of microsoft/mutransformers' modeling_bert.py:
`MuReadout` for the language-model head (line 673) and for next-sentence prediction (line 700), attention scores divided
by the head size and multiplied with `attn_mult` (line 330), which is the root of the base's head size.

    b batch   s sequence   h hidden   a heads   d head size   v vocabulary
"""

from __future__ import annotations

from typing import Any

import mup
import torch
from torch import nn
from torch.nn import functional


class PlainLayer(nn.Module):
    def __init__(self, hidden: int, ffn: int, heads: int, head_size: int, attn_mult: float) -> None:
        super().__init__()
        self.heads, self.head_size, self.attn_mult = heads, head_size, attn_mult
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.query, self.key, self.value = (nn.Linear(hidden, heads * head_size) for _ in range(3))
        self.out = nn.Linear(heads * head_size, hidden)
        self.fc1, self.fc2 = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm1(x)
        query, key, value = (
            layer(normed).unflatten(-1, (self.heads, self.head_size)).transpose(1, 2)  # [b, a, s, d]
            for layer in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(-1, -2) / self.head_size * self.attn_mult
        x = x + self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))
        return x + self.fc2(functional.gelu(self.fc1(self.norm2(x))))


class PlainBert(nn.Module):
    """Sizes by keyword: hidden, ffn, heads, head_size, layers, vocabulary, positions, attn_mult, output_mult."""

    def __init__(self, *, layers: int, vocabulary: int, positions: int, output_mult: float, **sizes: Any) -> None:
        super().__init__()
        hidden = sizes["hidden"]
        self.words, self.types = nn.Embedding(vocabulary, hidden), nn.Embedding(2, hidden)
        self.positions = nn.Embedding(positions, hidden)
        self.layers = nn.ModuleList(PlainLayer(**sizes) for _ in range(layers))
        self.norm, self.head_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, hidden)
        self.decoder = mup.MuSharedReadout(self.words.weight, bias=False, output_mult=output_mult)
        self.decoder.bias = nn.Parameter(torch.zeros(vocabulary))  # as there, line 678; mup makes one of another size
        self.pooler = nn.Linear(hidden, hidden)
        self.seq_relationship = mup.MuReadout(hidden, 2)

    def forward(self, tokens: torch.Tensor, types: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [b, s, v] and [b, 2]."""
        x = self.words(tokens) + self.positions.weight[: tokens.shape[1]] + self.types(types)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        logits = self.decoder(self.head_norm(functional.gelu(self.head(x))))
        return logits, self.seq_relationship(torch.tanh(self.pooler(x[:, 0])))


def load(plain: PlainBert, ours: dict[str, torch.Tensor], readout_growth: float) -> None:
    """Fills it with the values of megatron-core's model, by upstream's names.

    Args:
        plain: with as many query groups as heads.
        ours: parameters by name.
        readout_growth: hidden size over the base's. mutransformers has a multiplier of its inverse on next-sentence
            logits, where ours has it in the weight and its rate: the same function, and the same training under Adam.
    """
    values = {
        "words.weight": ours["embedding.word_embeddings.weight"],
        "decoder.weight": ours["embedding.word_embeddings.weight"],
        "positions.weight": ours["embedding.position_embeddings.weight"],
        "types.weight": ours["embedding.tokentype_embeddings.weight"],
        "decoder.bias": ours["output_layer.bias"],
        "seq_relationship.weight": readout_growth * ours["binary_head.weight"],
        "seq_relationship.bias": ours["binary_head.bias"],
    }
    pairs = {"norm": "encoder.final_layernorm", "head": "lm_head.dense", "head_norm": "lm_head.layer_norm"}
    pairs["pooler"] = "pooler.dense"
    for number, layer in enumerate(plain.layers):
        there = f"encoder.layers.{number}"
        pairs |= {
            f"layers.{number}.norm1": f"{there}.input_layernorm",
            f"layers.{number}.norm2": f"{there}.pre_mlp_layernorm",
            f"layers.{number}.out": f"{there}.self_attention.linear_proj",
            f"layers.{number}.fc1": f"{there}.mlp.linear_fc1",
            f"layers.{number}.fc2": f"{there}.mlp.linear_fc2",
        }
        for kind in ("weight", "bias"):
            fused = ours[f"{there}.self_attention.linear_qkv.{kind}"]
            parts = fused.unflatten(0, (layer.heads, 3, layer.head_size)).transpose(0, 1).flatten(1, 2)
            for name, part in zip(("query", "key", "value"), parts, strict=True):
                values[f"layers.{number}.{name}.{kind}"] = part
    values |= {
        f"{here}.{kind}": ours[f"{there}.{kind}"] for here, there in pairs.items() for kind in ("weight", "bias")
    }
    plain.load_state_dict(values)
