"""The page of `explain --html`: what it computes is the table's, in a real browser; what it shows fits a screen."""

from __future__ import annotations

import json
import random
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from mup_megatron import cli
from mup_megatron.config import PARAMETRIZATIONS, Config, derive
from mup_megatron.model.build import parametrize
from mup_megatron.parallel import upstream
from mup_megatron.report.explorer import _NAMES, RULES, explorer_page
from mup_megatron.rules import formulas
from mup_megatron.rules.laws import Laws
from mup_megatron.rules.measured_laws import laws_of
from tests.helpers.browser import look, measure, needs_browser
from tests.helpers.configs import MIXED, VOCABULARY, make
from tests.rules.test_laws import CONFIGS, FACTORS, heads_under_muon

COMMAND = (
    "explain configs/qwen3/30b-a3b.yaml base.num_query_groups=2 base.num_layers=48 parametrization.depth=completep "
    "base.num_moe_experts=64 parametrization.experts=any_share parametrization.batch=power:0.5 "
    "parametrization.tokens=power:-0.32 --html docs/examples/explain.html"
)
"""How the committed page is made: everything that may grow does, and batch and tokens have a rule."""

SEEN = """
  const seen = document.createElement("pre");
  seen.id = "seen";
  seen.textContent = JSON.stringify({result, errors, fetched: performance.getEntriesByType("resource").length});
  document.body.appendChild(seen);
</script></body>"""


@pytest.fixture(autouse=True, scope="module")
def prepared() -> None:
    upstream.prepare_process()


table_of = partial(parametrize, vocab_size=VOCABULARY)


def page_of(config: Config, folder: Path) -> Path:
    page = folder / "page.html"
    page.write_text(explorer_page(config, table_of))
    return page


def data_of(page: Path) -> dict[str, Any]:
    """What the page computes with."""
    line = next(line for line in page.read_text().splitlines() if "const DATA = " in line)
    data: dict[str, Any] = json.loads(line.partition("const DATA = ")[2].rstrip(";"))
    return data


@needs_browser
@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt3", "Muon", "experts")),
        "depth, batch and tokens",
    ],
)
def test_the_page_computes_the_table(case: str, tmp_path: Path) -> None:
    """Every number of every parametrization at 100 random sizes, as rules/laws.py has it, which is the table."""
    config = CONFIGS[case]()
    page, rng = page_of(config, tmp_path), random.Random(0)
    sizes = laws_of(config, table_of).sizes
    draws = [{size: float(rng.choice(FACTORS)) for size in sizes} for _ in range(100)]
    script = (
        f"<script>const draws = {json.dumps(draws)};\n"
        "const result = Object.fromEntries(Object.entries(DATA.laws).map(([name, laws]) =>\n"
        "  [name, draws.map((ratios) => laws.tensors.map((tensor) => valuesAt(tensor, ratios)))]));" + SEEN
    )
    seen = look(page, tmp_path, script)
    assert seen["errors"] == []
    assert seen["fetched"] == 0
    names = ["mup", "standard", "fan_in"] + (["per_layer", "one_ratio"] if config.optimizer.name == "adamw" else [])
    assert list(seen["result"]) == names
    for name in names:
        laws = laws_of(derive(config, {"parametrization.name": name}), table_of)
        for ratios, found in zip(draws, seen["result"][name], strict=True):
            check(laws, ratios, found)


def check(laws: Laws, ratios: dict[str, float], found: list[dict[str, Any]]) -> None:
    for tensor, values in zip(laws.tensors, found, strict=True):
        assert values["refused"] == tensor.is_refused(ratios)
        for name, value in tensor.at(ratios).items():
            assert values[name] == pytest.approx(value, rel=1e-12), (tensor.name, name, ratios)


@needs_browser
def test_a_size_is_moved(tmp_path: Path) -> None:
    """By hand: FFN 160 to 320 beside a base of 64: the second layer's rate is 8e-3 / 5, its init 0.05 / 2 / sqrt(5)."""
    script = (
        """<script>
  const slider = document.getElementById("model.ffn_hidden_size number");
  slider.value = 320;
  slider.dispatchEvent(new Event("change"));
  const rows = [...document.querySelectorAll("#tensors tr")];
  const row = rows.find((row) => row.textContent.includes("linear_fc2.weight"));
  row.querySelector("td[data-quantity=lr]").click();
  const result = {
    cells: [...row.querySelectorAll("td")].map((cell) => cell.innerText),
    chosen: document.getElementById("chosen").innerText,
    hover: row.querySelector("td[data-quantity=lr]").title,
  };"""
        + SEEN
    )
    seen = look(page_of(make(MIXED), tmp_path), tmp_path, script)
    assert seen["errors"] == []
    name, shape, m_in, m_out, init, rate, eps, decay, multiplier = seen["result"]["cells"]
    assert (name, shape, m_in, m_out) == ("decoder.layers.*.mlp.linear_fc2.weight", "96 × 320", "×5", "×1.5")
    assert init.split() == ["0.01118", "×0.4472", "0.025"]  # and standard's below
    assert rate.split() == ["0.0016", "×0.2", "0.008"]
    assert eps.split() == ["6.667e-9", "×0.6667", "1e-8"]
    assert decay.split() == ["0.5", "×5", "0.1"]
    assert multiplier == "1"
    assert seen["result"]["hover"].startswith("η · 1 / (A m_in)   (TP V, table 8; formulas.learning_rate)")
    assert "goes as ffn_hidden_size^-1" in seen["result"]["chosen"]
    assert (
        "megatron-core's MuP: one ratio, hidden size / base hidden size\t0.005333\tgoes as hidden_size^-1"
        in (seen["result"]["chosen"])
    )


@needs_browser
def test_blocks_that_would_need_rates_of_their_own(tmp_path: Path) -> None:
    script = (
        """<script>
  const said = () => document.getElementById("tensors").innerText.split("refused: its blocks would need rates").length;
  const before = said() - 1;
  set("model.kv_channels", 32);
  const result = [before, said() - 1];"""
        + SEEN
    )
    assert look(page_of(heads_under_muon(), tmp_path), tmp_path, script)["result"] == [0, 1]


@needs_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_fits_the_screen(repository: Path, tmp_path: Path, width: int) -> None:
    seen = measure(repository / "docs" / "examples" / "explain.html", tmp_path, width)
    assert seen["wide"] == []
    if width == 1280:
        assert seen["scrolled"] == []


def test_the_rules_are_the_formulas_own() -> None:
    """Every rule that a cell may name stands once in the table of formulas.py, with a function that is there."""
    lines = [line for line in (formulas.__doc__ or "").splitlines() if line.startswith("|")]
    for of in RULES.values():
        for begin in of.values():
            (line,) = [line for line in lines if line.startswith(f"| {begin}")]
            assert hasattr(formulas, line.split("`")[-2])
            assert re.search(r"\| (TP V, .+|\d{4}\.\d{5}|derived) +\|$", line), line
    assert _NAMES.keys() == set(PARAMETRIZATIONS)


def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(json.loads(make(MIXED, run__name="a </script> b").model_dump_json())))
    page = tmp_path / "page.html"
    assert cli.run(["explain", str(config), "model.vocab_size=384", "--html", str(page)]) == 0
    assert capfd.readouterr().out.strip() == str(page)
    assert page.read_text().count("</script>") == 3  # of the head, the page and the figures, none of a name
    assert cli.run(["explain", str(config), "model.vocab_size=384", "--html", str(tmp_path / "no" / "page.html")]) == 2
    assert "page.html: cannot write the page" in capfd.readouterr().err
    shapes = tmp_path / "base.bsh"
    assert cli.run(["explain", str(config), "model.vocab_size=384", "--save-base-shapes", str(shapes)]) == 0
    base = f"base={{file: {shapes}}}"
    assert cli.run(["explain", str(config), "model.vocab_size=384", base, "--html", str(page)]) == 2
    assert "base.file: tells tensor by tensor what grows" in capfd.readouterr().err


@pytest.mark.parametrize("option", ["--html", pytest.param("--notebook", marks=pytest.mark.slow)])
def test_it_takes_the_place_of_a_page_alone(option: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The config, or a text, that is named by mistake stays as it is; a page of before is written anew."""
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(json.loads(make(MIXED).model_dump_json())))
    before = config.read_text()
    assert cli.run(["explain", str(config), "model.vocab_size=384", option, str(config)]) == 2
    assert "config.yaml: is there already and is no such page; expected the name of another" in capfd.readouterr().err
    assert config.read_text() == before
    assert cli.run(["explain", str(config), "model.vocab_size=384", option, ""]) == 2
    assert ".: cannot write the page: it is a folder; expected the name of a file" in capfd.readouterr().err
    for _ in range(2):
        assert cli.run(["explain", str(config), "model.vocab_size=384", option, str(tmp_path / "page")]) == 0


@needs_browser
def test_a_notebook_shows_the_page(tmp_path: Path) -> None:
    """A cell of its own words makes it again, and what it shows is the page, with all numbers in it."""
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(json.loads(make(MIXED).model_dump_json())))
    words = [str(config), "model.vocab_size=384"]
    written = tmp_path / "page.ipynb"
    assert cli.run(["explain", *words, "--notebook", str(written)]) == 0
    found = json.loads(written.read_text())
    assert (found["nbformat"], found["nbformat_minor"]) == (4, 5)
    (cell,) = found["cells"]
    (ran,) = [line for line in cell["source"] if line.startswith("subprocess")]
    assert ran == f"subprocess.run({['mup-megatron', 'explain', *words, '--html', 'explain.html']!r}, check=True)\n"
    compile("".join(cell["source"]), "cell", "exec")
    outer = tmp_path / "outer.html"
    outer.write_text(f"<html><head></head><body>{cell['outputs'][0]['data']['text/html']}</body></html>")
    script = (
        "<script>addEventListener('load', () => {"
        "const inside = document.querySelector('iframe').contentDocument;"
        "const count = (what) => inside.querySelectorAll(what).length;"
        "const result = [count('#tensors tr'), count('#sizes input')];"
        + SEEN.replace("</script></body>", "});</script></body>")
    )
    rows, inputs = look(outer, tmp_path, script)["result"]
    assert rows == len(laws_of(make(MIXED), table_of).tensors)
    assert inputs > 4


def test_the_committed_page(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repository)
    committed = repository / "docs" / "examples" / "explain.html"
    command = [*COMMAND.split()[:-1], str(tmp_path / "page.html")]
    assert cli.run(command) == 0
    assert data_of(tmp_path / "page.html") == data_of(committed)
    assert (tmp_path / "page.html").read_text() == committed.read_text()
