"""docs/evidence/README.md: every table is made from the records, and every record's verdict is in it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import evidence

PAGE = (evidence.FOLDER / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", evidence.TABLES)
def test_a_table_is_what_its_records_give(name: str) -> None:
    assert evidence.parts(PAGE)[name] == evidence.table(name), "run python -m benchmarks.evidence"


def test_every_table_is_made() -> None:
    """None of a page of evidence is written by hand: every row lies between markers."""
    whole = PAGE
    for body in evidence.parts(PAGE).values():
        whole = whole.replace(body, "")
    assert not [line for line in whole.splitlines() if line.lstrip().startswith("|")]


def test_every_record_stands_beside_its_verdict() -> None:
    """Read here from the files themselves: passed or not, seeds, and the reasons of what did not pass."""
    rows = {line.split("](")[1].split(")")[0]: line for line in evidence.parts(PAGE)["records"].splitlines()[2:]}
    files = {str(path.relative_to(evidence.FOLDER)): path for path in evidence.FOLDER.glob("*/*.json")}
    assert set(rows) == set(files)
    for name, path in files.items():
        found = json.loads(path.read_text(encoding="utf-8"))
        seeds = found["seeds"] if "seeds" in found else len({curve["seed"] for curve in found["curves"]})
        assert f"| {seeds}" in rows[name], name
        if "passed" in found:
            assert ("**passed**" in rows[name]) == found["passed"], name
            assert ("**passed**" in rows[name]) != ("**failed**" in rows[name] or "**undecided**" in rows[name]), name
        if "lines" in found:
            for reason in found["lines"][found["judged"]]["reasons"]:
                assert reason in rows[name], name


def test_every_picture_has_a_record() -> None:
    for picture in evidence.FOLDER.glob("*/*.png"):
        assert picture.with_suffix(".json").is_file(), picture


def test_another_number_in_a_record_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a loss that changes in its record changes the table, in that cell and its verdict's row."""
    name = "stability-depth/none.json"
    for path in evidence.FOLDER.glob("*/*.json"):
        copy = tmp_path / path.relative_to(evidence.FOLDER)
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(path.read_bytes())
    found = json.loads((tmp_path / name).read_text())
    found["lines"]["mup"]["rows"][0]["minimum"]["loss"] += 0.001
    found["lines"]["mup"]["reasons"] = ["it moves"]
    found["passed"], found["verdict"] = False, "failed"
    (tmp_path / name).write_text(json.dumps(found))
    before = {table: evidence.table(table) for table in evidence.TABLES}
    monkeypatch.setattr(evidence, "FOLDER", tmp_path)
    changed = {table for table in evidence.TABLES if evidence.table(table) != before[table]}
    assert changed == {"depth", "records"}
    assert "| 32 | none | 2, 4, 8, 16 | 4.560, 4.636" in evidence.table("depth")
    assert "**failed**: it moves" in evidence.table("records")


def test_numbers_of_the_page_stand_beside_the_verdict(repository: Path) -> None:
    """verification.md shows a picture of stable optima: what the command said of it stands there too."""
    text = (repository / "docs" / "verification.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"\(evidence/([\w-]+/[\w.-]+)\.png\)", text))
    assert shown
    for name in shown:
        found = evidence.record(f"{name}.json")
        for reason in found["lines"][found["judged"]]["reasons"]:
            assert reason in text, f"{name}: {reason}"
        assert f"{found['seeds']} seed" in text
        for line in found["lines"].values():
            smallest = line["rows"][0]
            assert f"{100 * smallest['cost']:.2f} %" in text
            assert f"{smallest['drift']['octaves']:.2f}" in text
    for folder, size in (("stability-lr-width", 32), ("stability-lr-width-512", 64)):
        found = evidence.record(f"{folder}/lr-width.json")
        row = next(row for row in found["lines"]["mup"]["rows"] if row["size"] == size)
        assert f"moves by {row['drift']['octaves']:.2f}" in text
