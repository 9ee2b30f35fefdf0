"""A ResNet in µP: `python docs/examples/resnet.py` trains three widths with one learning rate.

Written for microsoft/mup; the import line is all that was changed.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from digits import digits
from torch import nn

from mup_megatron.mup import MuAdam, MuReadout, init, set_base_shapes


class Block(nn.Module):
    """Two convolutions beside a shortcut, which is one by one where the shape changes."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(channels_in, channels, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From (pictures, channels_in, height, width) to (pictures, channels, height/stride, width/stride)."""
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(self.shortcut(x) + y)


class ResNet(nn.Module):
    """Three blocks; channels double as pictures halve."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.Sequential(Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2))
        self.readout = MuReadout(4 * width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of shape (pictures, 10)."""
        return self.readout(self.blocks(F.relu(self.stem(x))).mean((2, 3)))


def train(width: int, steps: int, lr: float = 1e-2, seed: int = 0) -> list[float]:
    """Losses in nats per picture."""
    torch.manual_seed(seed)
    model = ResNet(width)
    set_base_shapes(model, ResNet(4), delta=ResNet(8))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            init.kaiming_normal_(module.weight, nonlinearity="relu")
    optimizer = MuAdam(model.parameters(), lr=lr)
    data = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        pictures, labels = digits(32, data)
        loss = F.cross_entropy(model(pictures), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1e-2)
    arguments = parser.parse_args()
    for width in arguments.widths:
        losses = train(width, arguments.steps, arguments.lr)
        print(f"width {width:5}: loss {losses[0]:.3f} -> {sum(losses[-10:]) / len(losses[-10:]):.3f}")
