"""Damaged ladder.json files: refused in one sentence, or read with the meaning that they have."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from mup_megatron.tuning.family import digest
from mup_megatron.tuning.fitted import ladder_of, settled, told
from mup_megatron.util.errors import UserError
from tests.helpers.damage import bytes_of, data_of, draws
from tests.helpers.ladders import ladder_file
from tests.tuning.test_fitted import config_of, target_of


def damaged(good: bytes, draw: random.Random) -> bytes:
    """Bytes, or values; of those some under a digest that matches, or in what the reader takes alone."""
    how = draw.choice(("bytes", "data", "signed", "part"))
    if how == "bytes":
        return bytes_of(good, draw)
    content: Any = json.loads(good)
    if how == "part":
        key = draw.choice(("rate", "span", "loss", "verdict", "reasons", "measured"))
        held = data_of([content[key]], draw)
        content[key] = held[0] if isinstance(held, list) and held else None
    else:
        content = data_of(content, draw)
    if how == "signed" and isinstance(content, dict) and isinstance(content.get("family"), dict):
        content["digest"] = digest(content["family"])
    return json.dumps(content).encode("utf-8", "surrogatepass")


def test_ladders(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    path = ladder_file(tmp_path / "ladder.json", config_of())
    good, config = path.read_bytes(), target_of(path)
    refused, taken = 0, 0
    for draw in draws(request, 60, 500):
        path.write_bytes(damaged(good, draw))
        try:
            found = ladder_of(config, None)
            made = settled(config, found)
            assert found is not None
            told(made, found)
        except UserError as error:
            message = str(error)
            assert message.isprintable(), ascii(message)
            assert len(message) < 2100
            assert any(name in message for name in (str(path), "parametrization.", "tuning.", "data.")), message
            refused += 1
            continue
        taken += 1
        said = json.loads(path.read_bytes())
        assert said["verdict"] == "passed"
        for axis in ("batch", "tokens"):
            assert getattr(made.parametrization, axis) == f"fitted:{said['rate'][axis]['exponent']:.4f}"
    assert min(refused, taken) > 5  # both happen
