"""An MLP in µP: `python docs/examples/mlp.py` trains three widths with one learning rate.

Written for microsoft/mup; the import line is all that was changed.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from digits import SIZE, digits
from torch import nn

from mup_megatron.mup import MuReadout, MuSGD, make_base_shapes, set_base_shapes


class MLP(nn.Module):
    """Two hidden layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(SIZE * SIZE, width)
        self.fc2 = nn.Linear(width, width)
        self.readout = MuReadout(width, 10, readout_zero_init=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of shape (pictures, 10)."""
        return self.readout(F.relu(self.fc2(F.relu(self.fc1(x.flatten(1))))))


def train(width: int, steps: int, lr: float = 0.1, seed: int = 0) -> list[float]:
    """Losses in nats per picture."""
    torch.manual_seed(seed)
    model = MLP(width)
    set_base_shapes(model, make_base_shapes(MLP(64), MLP(128)))
    optimizer = MuSGD(model.parameters(), lr=lr, momentum=0.9)
    data = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        pictures, labels = digits(64, data)
        loss = F.cross_entropy(model(pictures), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.1)
    arguments = parser.parse_args()
    for width in arguments.widths:
        losses = train(width, arguments.steps, arguments.lr)
        print(f"width {width:5}: loss {losses[0]:.3f} -> {sum(losses[-10:]) / len(losses[-10:]):.3f}")
