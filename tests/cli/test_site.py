"""The offline site's pages: every link of the checkout's pages leads to a page, a picture or a line that is there."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.helpers.links import ROOT


@pytest.fixture(scope="module")
def site() -> ModuleType:
    made = importlib.util.spec_from_file_location("site_pages", ROOT / "docs" / "site.py")
    assert made is not None
    module = importlib.util.module_from_spec(made)
    made.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def staged(site: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("site") / "pages"
    site.stage(folder)
    return folder


def test_every_link_leads_somewhere(staged: Path) -> None:
    links = [
        (page, target, anchor)
        for page in staged.rglob("*.md")
        for target, anchor in re.findall(r"\]\((?!\w+:|#)([^)#\s]+)(?:#([^)\s]*))?\)", page.read_text())
    ]
    assert len(links) > 400
    assert not [(str(page), target) for page, target, _ in links if not (page.parent / target).is_file()]
    lines = [(page.parent / target, anchor) for page, target, anchor in links if anchor.startswith("L-")]
    assert len(lines) > 80
    assert not [(str(page), anchor) for page, anchor in lines if f'id="{anchor}"' not in page.read_text()]


def test_every_module_has_a_page(staged: Path) -> None:
    named = {page.stem for page in (staged / "api").glob("*.md")}
    assert {"mup_megatron.rules.formulas", "mup_megatron.mup.shape", "mup_megatron.patches.patch"} <= named
    assert "::: patches.patch" in (staged / "api" / "mup_megatron.patches.patch.md").read_text()


def test_a_link_to_nothing_stops(site: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "README.md").write_text("[there](docs/nowhere.md)\n")
    monkeypatch.setattr(site, "ROOT", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"README\.md: no such file: docs/nowhere\.md"):
        site.stage(tmp_path / "out")
