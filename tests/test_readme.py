"""The first page: short, in the order of a first look, and its table of rules is what the code does."""

from __future__ import annotations

import math
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from mup_megatron import __version__
from mup_megatron.config import load_config
from mup_megatron.model.build import parametrize
from mup_megatron.parallel import upstream
from mup_megatron.rules.table import TensorHyperparameters
from tests.helpers.links import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
# A tensor of each kind in configs/proof/moe.yaml, in which every size that grows is 16 times its base's.
KINDS = {
    "embedding": "embedding.word_embeddings.weight",
    "hidden matrix": "decoder.layers.0.mlp.experts.local_experts.0.linear_fc2.weight",
    "readout": "output_layer.weight",
    "router": "decoder.layers.0.mlp.router.weight",
    "gain, bias": "decoder.final_layernorm.weight",
}
M = 16.0
# Megatron's own share of the init of fc2, 1/sqrt(2 · 2 layers), is no rule of µP's.
OWN_STD = {"hidden matrix": 0.5}


def cells() -> dict[tuple[str, str], str]:
    """The table of rules, by quantity and kind of tensor."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in README.splitlines() if line[:1] == "|"]
    head, _, *body = rows
    return {(row[0], kind): cell for row in body for kind, cell in zip(head[1:-1], row[1:-1], strict=True)}


def number(cell: str) -> float:
    """What a cell makes of a base value of 1."""
    text = re.sub(r"√m", repr(math.sqrt(M)), cell.removeprefix("×").strip())
    text = re.sub(r"[σηελα]", "1.0", text).replace("m", repr(M)).replace("·", "*")
    result = 1.0
    for operator, value in re.findall(r"(^|[*/])\s*([\d.]+)", text):
        result = result / float(value) if operator == "/" else result * float(value)
    return result


def does(kind: str, quantity: str, tensor: TensorHyperparameters) -> float | str | None:
    """What the code does, as a multiple of the base value; in words where it is no multiple."""
    if quantity == "init":
        std = tensor.init_std[None] / 0.05 / OWN_STD.get(kind, 1.0)
        return std or "constant"
    if quantity.startswith("rate"):
        return tensor.lr_multiplier
    if quantity == "Adam's ε":
        return tensor.eps_multiplier
    if quantity == "weight decay":
        return tensor.weight_decay_multiplier or "none"
    return tensor.forward_multiplier


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_table_is_what_the_code_does(optimizer: str) -> None:
    upstream.prepare_process()
    config = load_config(ROOT / "configs" / "proof" / "moe.yaml", {"optimizer.name": optimizer})
    tensors = parametrize(config, 1024).tensors
    assert set(KINDS) == {kind for _, kind in cells()}
    wrong = []
    for (quantity, kind), cell in cells().items():
        if (optimizer == "sgd") != (quantity == "rate, SGD"):
            continue
        expected = cell if cell in ("constant", "none") else number(cell) if cell else 1.0
        found = does(kind, quantity, tensors[KINDS[kind]])
        if found != (expected if isinstance(expected, str) else pytest.approx(expected)):
            wrong.append(f"{quantity} of {kind}: the page says {cell or 'no factor'}, the code does {found}")
    assert not wrong


def test_cells_are_read() -> None:
    assert [number(cell) for cell in ("σ/√m", "η·m", "× α/m", "ε", "1.0")] == [0.25, 16, 1 / 16, 1, 1]


def test_it_is_short_and_in_order() -> None:
    """What it is, the commands, a picture, the rules; 1,831 words had grown there before."""
    assert len(README.split()) <= 620
    places = [README.index(sign) for sign in ("# mup-megatron", "./dev demo ", "./dev test ", "![", "## The rules")]
    assert places == sorted(places)
    assert README.index("## The rules") < README.index("## Three ways in")


def test_every_document_is_in_the_index() -> None:
    """docs/README.md leads to every page of docs/ in one step, the evidence's overview to those of its folder."""
    docs = ROOT / "docs"
    indexes = (docs / "README.md", docs / "evidence" / "README.md")
    reached = {
        (index.parent / target).resolve()
        for index in indexes
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", index.read_text(encoding="utf-8"))
    }
    pages = {path.resolve() for path in docs.rglob("*.md")} - {docs / "README.md"}
    assert not sorted(str(path.relative_to(ROOT)) for path in pages - reached)
    assert docs / "evidence" / "README.md" in reached
    assert "](docs/README.md)" in README


def test_every_picture_is_shown() -> None:
    """A picture that no page shows is forgotten when the demo draws another."""
    pages = [README, *(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))]
    shown = {Path(target).name for page in pages for target in re.findall(r"\]\(([^)]+\.png)\)", page)}
    assert {path.name for path in (ROOT / "docs" / "images").glob("*.png")} <= shown


def test_the_citation_is_of_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (cited["version"], cited["license"]) == (project.get("version", __version__), project["license"])
