"""Handwriting for those without a data set: the ten digits, moved about, of other strengths, under noise."""

from __future__ import annotations

import torch

SIZE = 12
_FONT = (
    ".###. ..#.. .###. ####. ...#. ##### .###. ##### .###. .###.",
    "#...# .##.. #...# ....# ..##. #.... #.... ....# #...# #...#",
    "#..## ..#.. ....# ....# .#.#. ####. #.... ...#. #...# #...#",
    "#.#.# ..#.. ...#. .###. #..#. ....# ####. ...#. .###. .####",
    "##..# ..#.. ..#.. ....# ##### ....# #...# ..#.. #...# ....#",
    "#...# ..#.. .#... ....# ...#. #...# #...# ..#.. #...# ....#",
    ".###. .###. ##### ####. ...#. .###. .###. ..#.. .###. .###.",
)
_DIGITS = torch.tensor([[[sign == "#" for sign in row.split()[digit]] for row in _FONT] for digit in range(10)])


def digits(samples: int, generator: torch.Generator, noise: float = 0.5) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures of shape (samples, 1, SIZE, SIZE), mean about 0, and which digit each shows."""
    labels = torch.randint(10, (samples,), generator=generator)
    rows = torch.randint(SIZE - 6, (samples, 1, 1), generator=generator) + torch.arange(7).view(1, 7, 1)
    columns = torch.randint(SIZE - 4, (samples, 1, 1), generator=generator) + torch.arange(5)
    pictures = torch.zeros(samples, 1, SIZE, SIZE)
    pictures[torch.arange(samples).view(-1, 1, 1), 0, rows, columns] = _DIGITS[labels].float()
    pictures *= 0.5 + torch.rand(samples, 1, 1, 1, generator=generator)
    return 3 * (pictures - 0.1) + noise * torch.randn(pictures.shape, generator=generator), labels
