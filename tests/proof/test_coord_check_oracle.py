"""The coordinate check against microsoft/mup's, on a plain torch transformer of the same shape: the same verdicts."""

from __future__ import annotations

import math
from typing import Any

import mup
import mup.coord_check
import numpy as np
import pytest
import torch
import torch.nn.functional as F  # torch's own name for it
from torch import nn

from mup_megatron.proof.verdict import BOUNDS
from tests.helpers import proof_bodies
from tests.helpers.configs import make
from tests.helpers.distributed import Ranks

BASE, HEAD, LAYERS, LENGTH, VOCABULARY, STD, LR = 32, 16, 2, 16, 128, 0.02, 2e-3
FACTORS = (1, 4, 16)
STEPS = 3
SIZES = {"hidden_size": BASE, "ffn_hidden_size": 4 * BASE, "num_attention_heads": BASE // HEAD}

# Their modules by megatron-core's names.
NAMES = {
    "words": "embedding.word_embeddings",
    "positions": "embedding.position_embeddings",
    "norm": "decoder.final_layernorm",
    "readout": "output_layer",
    "norm1": "input_layernorm",
    "qkv": "self_attention.linear_qkv",
    "proj": "self_attention.linear_proj",
    "norm2": "pre_mlp_layernorm",
    "fc1": "mlp.linear_fc1",
    "fc2": "mlp.linear_fc2",
}


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(samples, length, width // HEAD, 3, HEAD).permute(3, 0, 2, 1, 4)
        attended = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(x.shape))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.layers = nn.Sequential(*(Layer(width) for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(width)
        self.readout = mup.MuReadout(width, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.words(x) + self.positions(torch.arange(x.shape[1]))
        return self.readout(self.norm(self.layers(x))).flatten(0, 1)


def model(width: int, *, standard: bool) -> nn.Module:
    """Initialised as megatron-core does it at the base: branches' last layers smaller by sqrt(2 layers)."""
    made = Transformer(width)
    mup.set_base_shapes(
        made, None if standard else Transformer(BASE), delta=None if standard else Transformer(2 * BASE)
    )
    for name, parameter in made.named_parameters():
        if name.endswith("bias"):
            parameter.data.zero_()
        elif parameter.dim() > 1:
            ends = "proj" in name or "fc2" in name
            mup.init.normal_(parameter, std=STD / math.sqrt(2 * LAYERS) if ends else STD)
    return made


def theirs(*, standard: bool) -> dict[str, float]:
    """Slope of every module's mean absolute output that is furthest from flat, over the steps."""
    drawn = torch.randint(VOCABULARY, (8, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    models: dict[int, Any] = {}
    for factor in FACTORS:
        models[factor * BASE] = lambda factor=factor: model(factor * BASE, standard=standard)
    data = mup.coord_check.get_coord_data(
        models,
        [(drawn[:, :-1], drawn[:, 1:].flatten())] * (STEPS + 1),
        mup=not standard,
        optimizer="adam",
        lr=LR,
        nsteps=STEPS + 1,
        nseeds=2,
        cuda=False,
        show_progress=False,
    )
    found: dict[str, list[float]] = {}
    for (module, _), rows in data.groupby(["module", "t"]):
        name = our_name(module)
        if name is not None:
            mean = rows.groupby("width")["l1"].mean()
            found.setdefault(name, []).append(float(np.polyfit(np.log(mean.index), np.log(mean), 1)[0]))
    return {name: max(slopes, key=abs) for name, slopes in found.items()}


def our_name(module: str) -> str | None:
    parts = module.split(".")
    if parts[0] == "layers" and len(parts) > 1:
        return ".".join(["decoder.layers", parts[1], *(NAMES[part] for part in parts[2:])])
    return NAMES.get(module)


def ours(ranks: Ranks) -> dict[str, dict[str, float]]:
    config = make(
        {"model": {"num_layers": LAYERS, **SIZES}, "base": SIZES},
        "gpt3",
        model__share_embeddings_and_output_weights=False,
        hparams__lr=LR,
        hparams__init_method_std=STD,
        hparams__weight_decay=0.0,
        training__seq_length=LENGTH,
    )
    result = ranks.run(1, proof_bodies.check, config=config, options={"factors": FACTORS, "steps": STEPS, "seeds": 2})[
        0
    ]
    found: dict[str, dict[str, float]] = {"mup": {}, "standard": {}}
    for line, slopes in result["slopes"].items():
        for each in slopes:
            if each["quantity"] == "output":
                known = found[line].setdefault(each["name"], 0.0)
                found[line][each["name"]] = max(known, each["slope"], key=abs)
    return found


def verdict(name: str, slope: float) -> str:
    """Of an output; logits may fall with width, as their readout does at first."""
    if slope > BOUNDS["output"]:
        return "grows"
    return "falls" if slope < -BOUNDS["output"] and name != "output_layer" else "ok"


@pytest.mark.slow
@pytest.mark.parametrize("line", ["mup", "standard"])
def test_verdicts_are_microsoft_mup_s(ranks: Ranks, line: str) -> None:
    one, other = ours(ranks)[line], theirs(standard=line == "standard")
    assert len(other) == 4 + LAYERS * 7
    ends = {name: (verdict(name, one[name]), verdict(name, slope)) for name, slope in other.items() if name in one}
    assert len(ends) >= 4 + LAYERS * 6
    differing = {name: (one[name], other[name]) for name, (a, b) in ends.items() if a != b}
    assert not differing, differing
    grows = {name for name, (verdict, _) in ends.items() if verdict == "grows"}
    assert bool(grows) == (line == "standard")
