"""The page of a run, in a real headless browser: no error, as many marks as data, hover shows values, no network."""

from __future__ import annotations

import dataclasses
import html
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from mup_megatron import cli
from mup_megatron.checkpoints.checkpoint import SAMPLES
from mup_megatron.checkpoints.run_directory import CONTROLS
from mup_megatron.report.page import _search, write_page
from mup_megatron.report.run_data import Curve, Run, read_run
from mup_megatron.report.summary import ended_lower
from mup_megatron.tuning.record import StudyRecord
from tests.helpers.browser import DARK as DARK_SCREEN
from tests.helpers.browser import browse, look, measure, needs_browser
from tests.helpers.commands import metrics

# Appended to a copy of the page: hovers over the first trial, then writes down what the browser sees.
PROBE = """
<script>
window.addEventListener("load", () => setTimeout(() => {
  Plotly.Fx.hover("search-lr", [{curveNumber: 0, pointNumber: 0}]);
  setTimeout(() => {
    const marks = {};
    for (const id of Object.keys(figures))
      marks[id] = document.querySelectorAll(`[id="${id}"] .scatterlayer .points path.point`).length;
    const lines = document.querySelectorAll("#curves .scatterlayer path.js-line").length;
    const hover = [...document.querySelectorAll("#search-lr .hoverlayer text")].map((e) => e.textContent).join(" ");
    const seen = document.createElement("pre");
    seen.id = "seen";
    const fetched = performance.getEntriesByType("resource").length;
    seen.textContent = JSON.stringify({marks, lines, hover, errors, fetched});
    document.body.appendChild(seen);
  }, 800);
}, 300));
</script></body>"""


@needs_browser
def test_the_page_in_a_browser(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["report", str(whole / "run")]) == 0
    page = Path(capsys.readouterr().out.strip())
    assert page == whole / "run" / "report.html"
    seen = look(page, tmp_path, PROBE)
    assert seen["errors"] == []
    assert seen["fetched"] == 0
    record = json.loads((whole / "run" / "transfer.json").read_text())
    trials = [trial for trial in record["study"]["trials"] if trial["values"]]
    losses = sorted(trial["loss"] for trial in trials if trial["loss"] is not None)
    edge = losses[0] + 4 * (losses[len(losses) // 2] - losses[0])  # what is worse stands there, in a ring
    ringed = [trial for trial in trials if trial["loss"] is None or trial["loss"] > edge]
    assert seen["marks"]["search-lr"] == seen["marks"]["search-output_multiplier"] == len(trials) + len(ringed)
    curves = [metrics(whole / "run" / folder) for folder in (".", *CONTROLS)]
    assert seen["marks"]["curves"] == sum("eval_loss" in line for curve in curves for line in curve)
    assert seen["lines"] == 6  # training and evaluation of each
    first = next(trial for trial in trials if trial["state"] == "complete")
    assert f"loss {first['loss']:.4f}" in seen["hover"]
    assert f"lr {first['values']['lr']:.4g}" in seen["hover"]
    browse(page, tmp_path, f"--screenshot={tmp_path / 'page.png'}")
    assert (tmp_path / "page.png").stat().st_size > 50_000


def test_a_trial_beyond_the_picture_stands_in_a_ring(whole: Path) -> None:
    """One that is far worse stands at the edge, and one without a loss; what was measured is said where one points."""
    record = read_run(whole / "run").record
    assert record is not None
    data = record.study.model_dump()
    worse, lost, *_ = (trial for trial in data["trials"] if trial["values"])
    worse["loss"] = 99.0
    lost |= {"loss": None, "state": "diverged"}
    *others, ring = _search(StudyRecord.model_validate(data), "lr")["data"]
    assert ring["name"] == "worse than is shown"
    assert sorted(ring["x"]) == sorted(trial["values"]["lr"] for trial in (worse, lost))
    heights = [height for each in others for height in each["y"]]
    assert ring["y"] == [max(heights)] * 2 != [99.0] * 2
    assert any("loss 99.0" in text for each in others for text in each["text"])


# The colors of what is drawn beside the page's, as brightness by W3C's formula (WCAG 2.2, relative luminance).
DARK = """
<script>
window.addEventListener("load", () => setTimeout(() => {
  const light = (color) => { const [r, g, b] = color.match(/[\\d.]+/g).map((c) => { c /= 255;
    return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; }); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const page = light(getComputedStyle(document.body).backgroundColor);
  const contrast = (color) => { const x = light(color);
    return (Math.max(x, page) + 0.05) / (Math.min(x, page) + 0.05); };
  const lines = [...document.querySelectorAll("#search-lr .shapelayer path")].map((e) => getComputedStyle(e))
    .filter((style) => style.strokeWidth !== "0px").map((style) => contrast(style.stroke));
  const text = contrast(getComputedStyle(document.querySelector("p")).color);
  const seen = document.createElement("pre");
  seen.id = "seen";
  seen.textContent = JSON.stringify({page, text, lines});
  document.body.appendChild(seen);
}, 800));
</script></body>"""


@pytest.mark.slow
@needs_browser
def test_it_is_readable_in_the_dark(whole: Path, tmp_path: Path) -> None:
    """Text has a contrast of 7 at least, lines of pictures 3 (WCAG 2.2, 1.4.6 and 1.4.11); by day too."""
    page = write_page(whole / "run")
    for options, dark in (((), False), ((DARK_SCREEN,), True)):
        seen = look(page, tmp_path, DARK, *options)
        assert (seen["page"] < 0.05) == dark
        assert seen["text"] >= 7
        assert seen["lines"]
        assert min(seen["lines"]) >= 3


@needs_browser
def test_it_can_be_printed(whole: Path, tmp_path: Path) -> None:
    browse(write_page(whole / "run"), tmp_path, f"--print-to-pdf={tmp_path / 'page.pdf'}")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
    assert (tmp_path / "page.pdf").stat().st_size > 50_000


@needs_browser
@pytest.mark.parametrize("width", [390, pytest.param(1280, marks=pytest.mark.slow)])
def test_the_page_fits_the_screen(whole: Path, tmp_path: Path, width: int) -> None:
    """On a phone tables may scroll by themselves, with their first column in place; the page never does."""
    seen = measure(write_page(whole / "run"), tmp_path, width)
    assert seen["plots"] >= 3
    assert seen["wide"] == []
    assert seen["covered"] == []
    if width == 1280:
        assert seen["scrolled"] == []


@pytest.mark.slow
@needs_browser
def test_what_does_not_fit_is_seen(whole: Path, tmp_path: Path) -> None:
    """A legend where it once lay, and a line that does not break."""
    text = write_page(whole / "run").read_text()
    broken = tmp_path / "broken.html"
    text = text.replace('"yref": "container", "y": 0, "yanchor": "bottom"', '"y": 1.12, "x": 0.5')
    broken.write_text(text.replace("<h2>Trials", "<h2 style='white-space: nowrap'>" + "Trials " * 60))
    seen = measure(broken, tmp_path, 390)
    assert any(name.startswith("page ") for name in seen["wide"])
    assert "search-lr toolbar" in seen["covered"]


def test_the_first_lines(whole: Path, tmp_path: Path) -> None:
    """Sizes by hand: in tests/helpers/configs.py the target has 96 channels and takes 8 steps of 8 x 32 tokens."""
    text = html.unescape(write_page(whole / "run").read_text())
    explained = json.loads((whole / "run" / "explain.json").read_text())
    total = sum(math.prod(parameter["global_shape"]) for parameter in explained["parameters"])
    opened = [re.sub(r"<[^>]*>", "", line) for line in re.findall(r"<p>.*?</p>", text.partition("<details>")[0])]
    assert [line.partition(":")[0] for line in opened] == ["Tuned", "Trained", "To check"]
    assert [len(re.findall(r"\.(?= |$)", line)) for line in opened] == [1, 1, 1]  # a sentence each
    size, loss = f"{total / 1000:.0f} k parameters", f"{metrics(whole / 'run')[-1]['eval_loss']:.4f}"
    target = f"Trained: a gpt3 target of {size} (2 layers, hidden size 96) reached {loss} (nats per token) in 8 steps, "
    assert opened[1].startswith(f"{target}2.05 k tokens; nothing had forecast it")
    smaller = "hidden_size 64 instead of 96, ffn_hidden_size 64 instead of 160, num_attention_heads 4 instead of 8"
    unlike = rf"\({smaller}, num_query_groups 1 instead of 4\)"
    trials = json.loads((whole / "run" / "transfer.json").read_text())["study"]["trials"]
    own = [trial["state"] for trial in trials if not trial["repeats"]]
    ended = rf"{own.count('complete')} complete, {own.count('stopped')} stopped"
    counted = rf"5 \({ended}[^)]*\), and {len(trials) - 5} repetitions with other seeds"
    chose = "chose the values that the rules of µP transferred to the target"
    tuned = rf"Tuned: trials of a proxy of 54\.4 k parameters {unlike} {chose}: {counted}; [\d.]+ k tokens in all\."
    assert re.fullmatch(tuned, opened[0]), opened[0]
    assert re.search(r"Tuned on \d{4}-\d\d-\d\d; page of \d{4}-\d\d-\d\d; .*megatron-core \d", text)
    for word in ("interior", "standard", "nats per token"):
        assert f"<dt>{word}</dt>" in text


def test_what_it_wrote_is_shown(whole: Path, tmp_path: Path) -> None:
    """Of the last evaluation alone; no run without prompts has that part."""
    heading = "What it wrote at step"
    assert heading not in write_page(whole / "run").read_text()
    other = shutil.copytree(whole / "run", tmp_path / "run")
    written = [{"step": step, "prompt": "if a <", "text": f"b{step}: return"} for step in (4, 8)]
    (other / SAMPLES).write_text("".join(json.dumps(each) + "\n" for each in written))
    text = html.unescape(write_page(other).read_text())
    assert f"<h2>{heading} 8</h2>" in text
    assert "if a <" in text
    assert "b8: return" in text
    assert "b4: return" not in text


def test_a_part_that_the_model_does_not_have_is_not_shown(whole: Path, tmp_path: Path) -> None:
    """Learned positions have no multiplier of a bias. Control: the same files of a model that has one."""
    assert "relative_bias" not in write_page(whole / "run").read_text().partition("<details><summary>transfer")[0]
    other = shutil.copytree(whole / "run", tmp_path / "run")
    explained = json.loads((other / "explain.json").read_text())
    explained["config"]["model"]["position_embedding_type"] = "alibi"
    (other / "explain.json").write_text(json.dumps(explained))
    text = write_page(other).read_text().partition("<details><summary>transfer")[0]
    assert text.count("relative_bias") == 2  # among the values, and of the forward pass


def test_runs_compared(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Curves of both in one figure, and the one setting that differs."""
    other = shutil.copytree(whole / "run", tmp_path / "<other>")
    explained = json.loads((other / "explain.json").read_text())
    explained["config"]["hparams"]["lr"] = 0.5
    (other / "explain.json").write_text(json.dumps(explained))
    path = tmp_path / "both.html"
    assert cli.run(["report", str(whole / "run"), str(other), "--compare", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}\n"
    text = path.read_text()
    assert "<other>" not in text
    differing = text.partition("Settings that differ")[2].partition("</table>")[0]
    assert re.findall(r'<td class="number">(.*?)</td>', differing)[0::3] == ["hparams.lr"]
    assert re.findall(r'<td class="number">(.*?)</td>', differing)[2] == "0.5"
    (figures,) = re.findall(r"const figures = (.*?);\n", text)
    assert len(json.loads(figures)["curves"]["data"]) == 4
    assert cli.run(["report", str(whole / "run"), str(tmp_path), "--compare", str(path)]) == 2


@pytest.mark.slow
@needs_browser
def test_an_error_on_the_page_is_seen(whole: Path, tmp_path: Path) -> None:
    page = write_page(whole / "run")
    broken = tmp_path / "broken.html"
    broken.write_text(page.read_text().replace("Plotly.newPlot(id", "Plotly.newPlots(id"))
    seen = look(
        broken, tmp_path, PROBE.replace('Plotly.Fx.hover("search-lr", [{curveNumber: 0, pointNumber: 0}]);', "")
    )
    assert any("newPlots" in error for error in seen["errors"])
    assert seen["marks"]["search-lr"] == 0


def test_what_the_page_holds(whole: Path) -> None:
    text = write_page(whole / "run").read_text()
    for part in ("tried from", "decoder.layers.*.mlp.linear_fc1.weight", "global_batch_size", "megatron-core", "trial"):
        assert part in text


def test_names_from_a_config_stay_text(whole: Path, tmp_path: Path) -> None:
    run = shutil.copytree(whole / "run", tmp_path / "run")
    explained = json.loads((run / "explain.json").read_text())
    explained["config"]["run"]["name"] = "<script>alert(1)</script>"
    (run / "explain.json").write_text(json.dumps(explained))
    text = write_page(run).read_text()
    assert "<script>alert(1)" not in text
    assert "&lt;script&gt;alert(1)" in text


def test_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["report", str(tmp_path)]) == 2
    assert "neither metrics.jsonl nor transfer.json is there" in capsys.readouterr().err


def test_a_run_that_only_trained(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in ("metrics.jsonl", "explain.json"):
        shutil.copy(whole / "run" / name, run)
    text = write_page(run).read_text()
    assert 'id="curves"' in text
    assert 'id="search' not in text


def test_checks_are_on_the_page(repository: Path, tmp_path: Path) -> None:
    """The folder of checks alone is one of a run too; what the commands said, and the pictures inside the page."""
    shutil.copytree(repository / "docs" / "evidence" / "coord-check-gpt3", tmp_path / "coord-check")
    text = write_page(tmp_path).read_text()
    assert "<h2>Coordinate check of mup</h2><img" in text
    assert "passed: 67 of 67 modules and parameters are within bounds" in text
    assert 'src="data:image/png;base64,' in text


def ended(name: str, loss: float) -> Curve:
    return Curve(name=name, steps=[{"step": 1, "loss": loss}], evaluations=[{"step": 1, "eval_loss": loss}])


def test_who_ended_lower_is_said_of_every_control(tmp_path: Path) -> None:
    controls = {"standard": ended("standard parametrization", math.nan), "fan_in": ended("1/sqrt(fan-in)", 4.0)}
    folder: dict[str, Any] = {"directory": tmp_path, "config": {}, "explanation": None, "record": None, "plan": None}
    run = Run(**folder, target=ended("µP", 4.25), versions={}, controls=controls)
    assert ended_lower(run) == [
        "standard parametrization: diverged with the values that µP transferred",
        "1/sqrt(fan-in) ends 0.2500 nats lower than µP, with the same values",
    ]
    higher = dataclasses.replace(run, controls={"fan_in": ended("1/sqrt(fan-in)", 4.5)})
    assert ended_lower(higher) == ["µP ends 0.2500 nats lower than 1/sqrt(fan-in), with the same values"]
