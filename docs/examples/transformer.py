"""A Transformer in µP: `python docs/examples/transformer.py` trains three widths on text with one learning rate.

Written for microsoft/mup; the import line is all that was changed. Heads grow with width, their size does not, so that
attention keeps 1/sqrt(d); where the size grows, the scale is 1/d (Tensor Programs V, definition 4.1).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from mup_megatron.mup import MuAdamW, MuSharedReadout, init, set_base_shapes

LENGTH, HEAD = 32, 8
TEXT = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()


class Layer(nn.Module):
    """Attention and MLP, each after a norm and beside the stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The stream, of shape (samples, length, width)."""
        samples, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(samples, length, 3, width // HEAD, HEAD).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(x.shape))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Transformer(nn.Module):
    """A decoder whose readout shares the embedding's weight."""

    def __init__(self, width: int, layers: int = 2) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        self.layers = nn.Sequential(*(Layer(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.readout = MuSharedReadout(self.words.weight, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of shape (samples, length, 256)."""
        x = self.words(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        return self.readout(self.norm(self.layers(x)))


def train(width: int, steps: int, lr: float = 1e-2, seed: int = 0) -> list[float]:
    """Losses in nats per byte."""
    torch.manual_seed(seed)
    model = Transformer(width)
    set_base_shapes(model, Transformer(16), delta=Transformer(32))
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            init.normal_(parameter, std=0.25 if "layers" in name else 0.1)
    optimizer = MuAdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
    data = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(TEXT) - LENGTH - 1, (16,), generator=data)
        rows = torch.stack([TEXT[start : start + LENGTH + 1] for start in starts])
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=[16, 64, 128])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=1e-2)
    arguments = parser.parse_args()
    for width in arguments.widths:
        losses = train(width, arguments.steps, arguments.lr)
        print(f"width {width:5}: loss {losses[0]:.3f} -> {sum(losses[-10:]) / len(losses[-10:]):.3f}")
