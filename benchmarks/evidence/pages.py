"""What is made of the records on pages, and which numbers in prose are marked.

Public names: `MADE`, `PAGES`, `made`, `page`, `parts`, `write`, `wrong_marks`, `unmarked`, `prose`.

- **A made part** stands between `<!-- made: NAME -->` and `<!-- end -->`: a table, or a paragraph whose comparatives
  are chosen by its numbers.
- **A mark** stands right behind a number, or a word of a verdict, that is written by hand:
  `0.55<!--stability-lr-width/lr-width:lines.mup.rows.32.drift.octaves-->`. It names record and field. The number is
  the field's, to as many digits as are written, times 100 before a per cent sign, and without its sign where none is
  written.
- **What needs one**: every decimal number and every percentage in prose, outside of made parts and of code (blocks,
  and what stands in backticks, as a setting does), but for versions of Python. Whole numbers need none: those written
  by hand are settings, such as 200 steps. On the pages of evidence that holds of every paragraph; elsewhere of
  paragraphs, items and rows of tables that link to the evidence.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from benchmarks import journal
from benchmarks.evidence import (
    coordinates,
    families,
    forecast,
    growth,
    ladders,
    limit,
    overview,
    plane,
    records,
    searches,
    wide,
    width,
)
from benchmarks.evidence.records import Rows

_PART = re.compile(r"(<!-- made: ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_MARKED = re.compile(r"([-+]?\d+(?:\.\d+)?(?: %)?|\b(?:pass|fail)\w*)(?:\*\*)?<!--([\w/-]+):([^<>]+)-->")
_MARK = re.compile(r"<!--[\w/-]+:[^<>]+-->")
_NUMBER = re.compile(r"(?<![\w.-])(?<!Python\s)[-+]?(?:\d+\.\d+(?![\w.]*\d)(?: %)?+|\d+ %)(?!\*{0,2}<!--)")
_CODE = re.compile(r"^```.*?^```|^(?: {4}[^\n]*\n?)+|`[^`\n]+`", re.DOTALL | re.MULTILINE)
_ROOT = records.FOLDER.parents[1]

MADE: dict[str, Callable[[], Rows | str]] = {
    "claims": overview.claims,
    "records": overview.every_record,
    "said-of-records": overview.verdicts,
    "coordinates": coordinates.coordinates,
    "coordinates-experts": coordinates.coordinates_of_experts,
    "said-of-logits": coordinates.logits,
    "said-of-fan-in": coordinates.said_of_fan_in,
    "said-of-layouts": coordinates.layouts,
    "said-of-controls": coordinates.controls,
    "ranges": coordinates.ranges,
    "said-of-ranges": coordinates.ranges_of_all,
    "rates-english": partial(width.rates, width.ENGLISH),
    "rates-embedding": partial(width.rates, width.APART),
    "said-of-english": width.said_of_english,
    "laws-width": partial(width.laws, width.LAWS),
    "rates": partial(width.rates, width.MAIN),
    "rates-fan-in": partial(width.rates, width.FAIR),
    "rates-512": partial(width.rates, width.FAR),
    "does-it-stay": wide.does_it_stay,
    "plane": plane.plane,
    "said-of-plane": plane.said_of_plane,
    "limit": limit.limit,
    "said-of-limit": limit.said_of_limit,
    "forecast": forecast.forecast,
    "said-of-forecast": forecast.said_of_forecast,
    "said-of-outcome": forecast.said_of_outcome,
    "rates-bert": partial(width.rates, "bert/lr-width.json"),
    "said-of-bert": width.said_of_bert,
    "others": width.others,
    "others-from-128": width.others_from_128,
    "said-of-std": width.said_of_std,
    "schedules": width.schedules,
    "mixed-growth": width.mixed,
    "said-of-mixed": width.said_of_mixed,
    "rates-one-ratio": partial(width.rates, width.ONE_RATIO["auto"]),
    "rates-one-ratio-128": partial(width.rates, "mixed-growth/one-ratio-128.json"),
    "said-of-one-ratio-128": partial(width.said_of_one_ratio, "mixed-growth/one-ratio-128.json"),
    "rates-one-ratio-kv": partial(width.rates, "mixed-growth/one-ratio-kv.json"),
    "said-of-one-ratio-kv": partial(width.said_of_one_ratio, "mixed-growth/one-ratio-kv.json"),
    "rates-one-ratio-ffn-8": partial(width.rates, "mixed-growth/one-ratio-ffn-8.json"),
    "said-of-one-ratio-ffn-8": partial(width.said_of_one_ratio, "mixed-growth/one-ratio-ffn-8.json"),
    "rates-one-ratio-experts": partial(width.rates, "mixed-growth/one-ratio-experts.json"),
    "said-of-one-ratio-experts": partial(width.said_of_one_ratio, "mixed-growth/one-ratio-experts.json"),
    "said-of-journal": journal.said,
    "said-of-wide": wide.said_of_rates,
    "rates-wide": partial(width.rates, wide.RATES),
    "rates-4096": partial(width.rates, wide.FARTHEST),
    "rivals-wide": wide.rivals,
    "said-of-rivals": wide.said_of_rivals,
    "direct": partial(wide.directly, wide.DIRECT),
    "direct-128": partial(wide.directly, wide.DIRECT_128),
    "norm-gains": width.gains,
    "said-of-gains": width.said_of_gains,
    "clip-norm": partial(width.beside, "`training.clip_norm`", width.CLIPPING),
    "positions": partial(width.beside, "positions", width.POSITIONS),
    "said-of-positions": width.said_of_positions,
    "depth": growth.depth,
    "said-of-depth": growth.said_of_depth,
    "experts": growth.experts,
    "optimizers": partial(growth.optimizers, "optimizers"),
    "optimizers-64": partial(growth.optimizers, "optimizers-64"),
    "momentum": partial(growth.optimizers, "momentum"),
    "said-of-optimizers": growth.said_of_optimizers,
    "decay": partial(growth.decay, "stability-decay", ("independent", "coupled"), "32, 64, 128"),
    "decay-epochs": partial(growth.decay, "decay-epochs", ("independent", "sqrt", "coupled"), "32, 64, 128"),
    "said-of-decay": growth.said_of_decay,
    "decay-tokens": partial(growth.decay, "decay-epochs", ("independent", "timescale"), "6, 12, 24 epochs", "tokens-"),
    "decay-few": partial(growth.decay, "decay-epochs", ("timescale",), "1.5, 3, 6 epochs", "tokens-few-"),
    "said-of-tokens": growth.said_of_tokens,
    "images": growth.images,
    "said-of-images": growth.said_of_images,
    "searches-from-known-values": searches.from_known_values,
    "families": families.arrivals,
    "said-of-families": families.said_of_families,
    "sixteen": families.of_sixteen,
    "said-of-sixteen": families.said_of_sixteen,
    "said-of-telescoping": families.said_of_telescoping,
    "known-values": families.said_of_known_values,
    "gaussian-process": families.gaussian_process,
    "quality": searches.quality,
    "said-of-quality": searches.said_of_quality,
    "ladder": ladders.ladder,
    "exponents": ladders.exponents,
    "beta2": partial(ladders.ladder, ladders.BETA),
    "one-at-a-time": growth.one_at_a_time,
    "said-of-ladder": ladders.said_of_ladder,
    "reverse": searches.reverse,
    "said-of-reverse": searches.said_of_reverse,
    "searches": searches.searching,
    "said-of-searches": searches.said_of_searching,
    "halving-ends": searches.halving_ends,
    "figure-5": searches.figure_5,
    "figure-6": searches.figure_6,
    "searches-target": partial(searches.judged_by_target, searches.TARGET, (1.1, 0.9)),
    "said-of-target": searches.said_of_target,
    "searches-translation": partial(searches.judged_by_target, searches.TRANSLATION, (5, 2.5, 1)),
    "said-of-translation": searches.said_of_translation,
    "bleu": searches.bleu,
    "said-of-bleu": searches.said_of_bleu,
}
"""By name, what makes the part: rows of a table, its head first, or a paragraph."""

PAGES = (*sorted(records.FOLDER.glob("*.md")), _ROOT / "README.md", *sorted((_ROOT / "docs").glob("*.md")))
"""The pages that quote records: those of evidence first."""


def made(name: str) -> str:
    """One part in Markdown."""
    found = MADE[name]()
    if isinstance(found, str):
        return "\n".join(textwrap.wrap(found, 120, break_long_words=False, break_on_hyphens=False)) + "\n"
    head, *rows = found
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)) + "\n"


def parts(text: str) -> dict[str, str]:
    """What stands between the markers of a page, by name."""
    return {name: body for _, name, body, _ in _PART.findall(text)}


def page(text: str) -> str:
    """The page with every part made anew."""
    return _PART.sub(lambda found: f"{found[1]}{made(found[2])}{found[4]}", text)


def write() -> None:
    """Makes every page's parts anew."""
    for path in PAGES:
        path.write_text(page(path.read_text(encoding="utf-8")), encoding="utf-8")


def wrong_marks(text: str) -> list[str]:
    """Marks whose number, or word of a verdict, is not what their record holds; and those that stand behind neither."""
    found = [problem for said, name, path in _MARKED.findall(text) if (problem := _problem(said, name, path))]
    loose = len(_MARK.findall(text)) - len(_MARKED.findall(text))
    return [*found, *[f"{loose} marks stand behind no number and no verdict"] * bool(loose)]


def _problem(said: str, name: str, path: str) -> str | None:
    value: Any = records.field(records.record(f"{name}.json"), path)
    if isinstance(value, bool | str):
        held = "passed" if value is True else "failed" if value is False else value
        return None if held[:4] == said[:4] else f"{said}: {name} {path} is {held}"
    number, _, percent = said.partition(" ")
    value = 100 * value if percent else value
    shown = f"{value if number[0] in '+-' else abs(value):{'+' if number[0] == '+' else ''}.{_digits(number)}f}"
    return None if shown == number else f"{said}: {name} {path} is {shown}"


def _digits(number: str) -> int:
    return len(number.partition(".")[2])


def unmarked(text: str, *, everywhere: bool) -> list[str]:
    """Decimal numbers and percentages that stand in prose without a mark.

    Args:
        text: of a page.
        everywhere: also in paragraphs that do not link to the evidence.
    """
    plain = _CODE.sub("", _PART.sub("", text))
    paragraphs = re.split(r"\n\s*\n|\n(?=- |\| |\d+\. )", plain)
    asked = (each for each in paragraphs if everywhere or re.search(r"\]\((?:docs/)?evidence/", each))
    return [number for each in asked for number in _NUMBER.findall(_without_targets(each))]


def _without_targets(text: str) -> str:
    """Links without where they lead: paths hold numbers."""
    return re.sub(r"\]\([^)]*\)", "]", text)


def prose(text: str) -> Iterator[str]:
    """The words of a page: what is no code, no table and no mark. Made paragraphs are prose."""
    plain = re.sub(r"<!--.*?-->", "", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
    for line in plain.splitlines():
        if not line.startswith(("    ", "|")):
            yield from line.split()
