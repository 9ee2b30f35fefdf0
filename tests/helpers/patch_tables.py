"""The tables of patches/README.md, made from the patch records and from the heads of the diffs.

    python -m tests.helpers.patch_tables       # writes the tables anew, between their markers

Public names: `TABLES`, `page`, `write_page`. A table stands in the page between `<!-- made: NAME -->` and
`<!-- end -->`; what is around them is written by hand. tests/patches/test_patches.py holds that the page is what
the records give.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from mup_megatron import megatron_training
from mup_megatron.bridge import hooks
from mup_megatron.megatron_training import watched, watched_coordinates
from mup_megatron.patches import ALL_PATCHES, Patch
from mup_megatron.patches.bridge import bridge_patches
from mup_megatron.patches.megatron_training import ELSEWHERE_PATCHES, TRAINING_PATCHES, entry_patches, watch_patches
from mup_megatron.patches.torchrun import torchrun_patches
from mup_megatron.patches.trees import source_patches
from tests.helpers.links import ROOT

PAGE = ROOT / "patches" / "README.md"
RUN_PATCHES = (
    *TRAINING_PATCHES,
    *entry_patches(megatron_training),
    *watch_patches(watched, watched_coordinates),
    *torchrun_patches(watched),
    *ELSEWHERE_PATCHES,
    *bridge_patches(hooks),
)
_PART = re.compile(r"(<!-- made: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_WHERE = {"cpu": "without CUDA", "always": "everywhere"}
_REASONS = ("why", "why no gentler way", "until")


def _patches(patches: Iterable[Patch]) -> list[list[str]]:
    """A row per patched symbol."""
    rows = [["patch", "symbol", "versions", "where", *_REASONS]]
    for patch in patches:
        versions = f"{patch.distribution} {patch.versions}" + (f"; needed {patch.needed}" if patch.needed else "")
        names = [f"`{patch.name}`", f"`{patch.symbol}`", versions, _WHERE[patch.when]]
        rows.append([*names, patch.why, patch.lower_rung, patch.until])
    return rows


def _diffs() -> list[list[str]]:
    """A row per diff; one that says other things in another release has a row of its own there."""
    rows = [["diff", "symbol", *_REASONS]]
    for series in source_patches().values():
        for patch in series:
            row = [f"`{patch.path.name}`", f"`{patch.head['Symbol']}`"]
            row += [patch.head[field] for field in ("Why", "Lower rung", "Until")]
            if row not in rows:
                rows.append(row)
    return rows


TABLES: dict[str, Callable[[], list[list[str]]]] = {
    "patches": lambda: _patches(ALL_PATCHES),
    "run": lambda: _patches(RUN_PATCHES),
    "diffs": _diffs,
}
"""Rows of each table, its head first, by the name in the page's marker."""


def page(text: str) -> str:
    """A page with its tables made anew. Raises KeyError for a marker that names no table."""

    def made(match: re.Match[str]) -> str:
        head, *rows = TABLES[match[2]]()
        lines = [head, ["---"] * len(head), *rows]
        table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        return f"{match[1]}{table}\n{match[4]}"

    return _PART.sub(made, text)


def write_page() -> None:
    """Writes patches/README.md."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    write_page()
