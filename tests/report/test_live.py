"""`mup-megatron watch`: a run's files, while they are written, for people."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from mup_megatron import cli
from mup_megatron.report.live import Watched, bars, lines_of, page_of
from mup_megatron.util.errors import UserError
from mup_megatron.util.files import cut_lines
from tests.helpers.commands import mup
from tests.helpers.distributed import Ranks
from tests.telemetry.test_alarms import STEPS, alarms_of, bands, config_of

__all__ = ["bands"]


def test_a_run_with_an_alarm(ranks: Ranks, tmp_path: Path, bands: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Step, loss, the tensor that does not move among the series nearest to their bounds, and the alarm."""
    alarms_of(ranks, tmp_path, bands, "gpt3", fault="a frozen matrix", begins=20)
    run = tmp_path / "target"
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 61, "loss": 1.')  # being written
    live = Watched(run).now()
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-2])
    assert (live.step, live.steps, live.read, live.loss) == (STEPS, STEPS, STEPS, last["loss"])
    assert [step for step, _ in live.curve] == list(range(1, STEPS + 1))
    assert live.rows[0].quantity == "update rms"
    assert live.rows[0].name == "decoder.layers.1.mlp.linear_fc1.weight"
    assert live.rows[0].room < 1  # weight decay alone moves it
    assert all(row.room >= 1 for row in live.rows[1:])
    (alarm,) = live.alarms
    assert alarm["name"] == live.rows[0].name
    said = "\n".join(lines_of(live))
    assert alarm["cause"] == "no gradient comes to it"
    assert re.search(r"^! \d.* update rms of decoder\.layers\.1\.mlp\.linear_fc1\.weight$", said, re.M)
    assert "the loss will end" not in said
    cut_lines(run / "metrics.jsonl", 45)
    told = Watched(run).now().forecast
    assert re.fullmatch(r"the loss will end at \d\.\d{3} ± \d\.\d{3} \(90 %, by 3 runs of the proxy\)", told)
    assert abs(float(told.split()[5]) - last["loss"]) < 0.5
    assert_above_in_three_bins(run)
    assert told in "\n".join(lines_of(Watched(run).now()))
    live = Watched(run).now()
    page = page_of(live, 5.0)
    assert f"<p>{told}</p>" in page
    assert '<meta http-equiv="refresh" content="5">' in page
    assert '<tr class="out"><td>update rms</td><td>decoder.layers.1.mlp.linear_fc1.weight</td>' in page
    assert "<polyline" in page
    result = mup("watch", run)
    assert result.returncode == 0, result.stderr
    assert f"step {STEPS}/{STEPS}" in result.stdout
    assert "alarm at step" in result.stdout
    assert_explained(run, alarm, capfd)
    assert cli.run(["watch", str(run), "--once", "--html", str(tmp_path / "live.html")]) == 0
    assert (tmp_path / "live.html").read_text() == page


def test_the_band_is_the_watched_runs_own(bands: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was moved, or is seen from elsewhere: what lies at its old place is another run's."""
    run, old = tmp_path / "moved", tmp_path / "runs" / "target"
    run.mkdir()
    old.mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 5.0, "seconds": 1.0, "tokens_per_second": 10.0}\n')
    (old / "transfer.band.json").write_text("of another run")
    monkeypatch.chdir(tmp_path)

    def said(**keys: Any) -> str:
        config = config_of(run, "gpt3", **keys).model_dump()
        config["run"]["dir"] = "runs/target"
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        return Watched(run).now().no_band

    assert said() == "no band of a proxy"
    shutil.copy(bands("gpt3"), run / "transfer.band.json")
    assert said() == ""
    assert said(watch__band="gone.json") == "its band gone.json is not there"
    assert said(watch__band="moved/transfer.band.json") == ""


def assert_above_in_three_bins(run: Path) -> None:
    """A loss is above its forecast where the alarm would say so, and not in a bin of its own."""
    path = run / "metrics.jsonl"
    kept = path.read_text()
    for first, said in ((44, False), (40, True)):  # of 45 steps, a bin has one or two
        lines = [json.loads(line) for line in kept.splitlines()]
        high = [
            {**line, "loss": line["loss"] + 30 * (line["step"] >= first)} if "loss" in line else line for line in lines
        ]
        path.write_text("".join(f"{json.dumps(line)}\n" for line in high))
        assert ("it is above its forecast" in Watched(run).now().forecast) is said
    path.write_text(kept)


def assert_explained(run: Path, alarm: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    """`explain --band` has the bounds that the alarm was raised by, at the end of the schedule."""
    config = str(run / "config.yaml")
    capfd.readouterr()
    assert cli.run(["explain", config, "--band", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)["band"]
    rows = {(row["name"], row["quantity"]): row["bounds"] for row in found}
    row = next(row for row in Watched(run).now().rows if (row.name, row.quantity) == (alarm["name"], "update rms"))
    assert rows[row.name, row.quantity]["1.0"] == pytest.approx([row.low, row.high])
    assert rows["decoder.layers.0.mlp", "output rms"].keys() == {"0.25", "0.5", "1.0"}
    assert cli.run(["explain", config, "--band"]) == 0
    said = capfd.readouterr().out
    assert re.search(r"^[\d.e-]+ to [\d.e-]+ .* output rms of decoder\.layers\.1\.mlp$", said, re.M)
    assert cli.run(["explain", config, "--band", "parametrization.name=standard"]) == 2
    said = capfd.readouterr().err
    assert "--band: the run is in standard; expected parametrization.name: mup" in said


def test_a_long_run_is_read_at_places(tmp_path: Path) -> None:
    """A million steps take no longer than a thousand; a Megatron run without metrics.jsonl of ours shows its series."""
    line = '{{"step": {0}, "loss": {1}, "seconds": 0.5, "tokens_per_second": 100.0}}\n'
    text = "".join(line.format(step, 3 + 1 / step) for step in range(1, 200_001))
    (tmp_path / "metrics.jsonl").write_text(text)
    live = Watched(tmp_path).now()
    assert live.step == 200_000
    assert 150 <= len(live.curve) <= 200
    assert live.curve[0] == (1, 4.0)
    assert all(loss == 3 + 1 / step for step, loss in live.curve)
    assert "no band" in "\n".join(lines_of(live)) or "no reading yet" in "\n".join(lines_of(live))


def test_the_speed_is_tokens_by_seconds(tmp_path: Path) -> None:
    """Of 100 tokens in a second and 100 in four, 200 in five: 40 tokens/s, and not the mean of 100 and 25."""
    steps = [{"step": n, "loss": 3.0, "seconds": s, "tokens_per_second": 100 / s} for n, s in ((1, 1.0), (2, 4.0))]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(step)}\n" for step in steps))
    live = Watched(tmp_path).now()
    assert live.tokens_per_second == pytest.approx(40.0)
    assert "  40 tokens/s" in "\n".join(lines_of(live))


def test_bars() -> None:
    assert bars([(1, 4.0), (2, 3.0), (3, 2.0)], 10) == "█▅▁"
    assert bars([(1, 4.0), (2, math.nan), (3, 2.0)], 10) == "█x▁"
    assert bars([], 10) == ""
    assert len(bars([(step, float(step)) for step in range(1000)], 10)) == 10


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected the folder of a run"):
        Watched(tmp_path)
    result = mup("watch", tmp_path)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
