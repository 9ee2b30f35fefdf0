"""Sentences of a page. Public name: `sentences`."""

from __future__ import annotations

import re
from collections.abc import Iterator

_NO_PROSE = re.compile(r"^```[\s\S]*?^```|<!--[\s\S]*?-->|^(?: {4}|\||#|!\[).*$", re.MULTILINE)
_ITEM = re.compile(r"\n\s*\n|\n(?=- |\d+\. )|(?<=\]) ·\s(?=\[)")
_END = re.compile(r"(?<=[.!?])[)*_\"']*\s+(?=\[|[*_\"'(]*[A-Z0-9µ`])")


def sentences(text: str) -> Iterator[str]:
    """Outside of code, tables, headings and pictures. A link counts as its text, code within a sentence as one word.

    Args:
        text: of the page, in Markdown.
    """
    text = re.sub(r"\]\([^)\s]*\)", "]", re.sub(r"`[^`]*`", "`code`", _NO_PROSE.sub("\n", text)))
    for block in _ITEM.split(text):
        yield from (" ".join(sentence.split()) for sentence in _END.split(block) if sentence.strip())
