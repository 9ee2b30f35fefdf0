"""Damage to files, drawn from a seed: of bytes, of lines, of plain data. For tests that read what comes of it."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest

SEED = 20261122
ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 7, 2**31, 2**63, 2**200, -0.5, 1e-300, 1e300, float("inf"), float("nan")),
    *(
        "",
        " ",
        "auto",
        "null",
        "8",
        "1e3",
        "../..",
        "/",
        "\n",
        "\0",
        "\x1b[31m",
        "é",
        "\ud800",
        "<!--<script>",
        "x" * 3000,
    ),
    *([], {}, [1], {"a": 1}, [[]], {"": {}}, [None] * 1000),
]
_NUMBERS = [
    b"-1",
    b"0",
    b"1e999",
    b"NaN",
    b"99999999999999999999",
    b"1" * 5000,
    b"[" * 3000,
    b'"\\ud800"',
    b"{}",
    b"null",
]


def draws(request: pytest.FixtureRequest, quick: int, whole: int) -> Iterator[random.Random]:
    """A generator of random numbers per mutant, each known by its number; how many there were goes into the summary.

    Args:
        request: of the test.
        quick: mutants in the quick suite.
        whole: with `--all`.
    """
    count = whole if request.config.getoption("--all") else quick
    request.node.user_properties += [("mutants", count), ("seed", SEED)]
    for number in range(count):
        yield random.Random(f"{SEED} {number}")


def bytes_of(content: bytes, draw: random.Random) -> bytes:
    """The content, damaged once or a few times."""
    for _ in range(draw.choice((1, 1, 2, 4))):
        at, length = draw.randrange(len(content) + 1), draw.choice((1, 2, 8, 64, 500))
        kind = draw.choice(("flip", "flip", "cut", "remove", "insert", "zeros", "twice", "line", "number"))
        if kind == "flip" and at < len(content):
            content = content[:at] + bytes([content[at] ^ (1 << draw.randrange(8))]) + content[at + 1 :]
        elif kind == "cut":
            content = content[:at]
        elif kind == "remove":
            content = content[:at] + content[at + length :]
        elif kind == "insert":
            content = content[:at] + draw.randbytes(length) + content[at:]
        elif kind == "zeros":
            content = content[:at] + bytes(length) + content[at + length :]
        elif kind == "twice":
            content = content[:at] + content[at : at + length] * 2 + content[at + length :]
        elif kind == "line":
            lines = content.split(b"\n")
            lines.insert(draw.randrange(len(lines)), lines.pop(draw.randrange(len(lines))))
            content = b"\n".join(lines)
        elif kind == "number":
            content = content[:at] + draw.choice(_NUMBERS) + content[at:]
    return content


def data_of(tree: Any, draw: random.Random) -> Any:
    """Plain data, damaged once or a few times."""
    tree = copy.deepcopy(tree)
    for _ in range(draw.choice((1, 1, 2, 3))):
        places = list(_places(tree))
        if not places:
            return draw.choice(ODD)
        container, key = draw.choice(places)
        other, its_key = draw.choice(places)
        kind = draw.choice(("odd", "odd", "odd", "remove", "swap", "nest", "number"))
        if kind == "remove":
            del container[key]
        elif kind == "swap":
            container[key] = copy.deepcopy(other[its_key])
        elif kind == "nest":
            container[key] = {str(key): container[key]}
        elif kind == "number" and type(container[key]) in (int, float):
            container[key] *= draw.choice((-1, 0, 0.5, 2, 2**40))
        else:
            container[key] = copy.deepcopy(draw.choice(ODD))
    return tree


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    inner = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree)) if isinstance(tree, list) else ()
    for key, value in inner:
        yield tree, key
        yield from _places(value)
