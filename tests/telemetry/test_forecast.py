"""The forecast of a run's loss and the alarms of its loss, on curves worked out by hand."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from mup_megatron.report.live import _Losses
from mup_megatron.telemetry.forecast import BINS, FIRST, Forecast, LossBins, LossOfProxy, bins_of
from mup_megatron.telemetry.losses import LossAlarms
from mup_megatron.util.files import cut_lines

REFERENCE = [3.0 + math.exp(-place / 10) for place in range(BINS)]


def proxy(run: str, gap: float = 0.0, *, chosen: bool = False, noise: float = 0.0) -> LossOfProxy:
    generator = random.Random(run)
    losses = [each + gap + noise * generator.gauss(0, 1) for each in REFERENCE]
    return LossOfProxy(run=run, chosen=chosen, losses=losses)


def test_bins_by_hand() -> None:
    """80 steps: two a bin; a bin counts when it is over."""
    bins = LossBins(80)
    for step in range(1, 6):
        bins.add(step, float(step))
    assert bins.full() == [1.5, 3.5]
    assert [bins.first_step(place) for place in (0, 1, 39)] == [1, 3, 79]


def test_fewer_steps_than_bins() -> None:
    """20 steps: every second bin has one, and the others lie between."""
    bins = LossBins(20)
    for step in range(1, 21):
        bins.add(step, float(step))
    full = bins.full()
    assert len(full) == BINS
    assert full[:4] == [1.0, 1.5, 2.0, 2.5]
    assert LossBins(20).full() == []


@pytest.mark.parametrize("steps", [37, 40, 41, 99, 1000])
def test_every_step_is_in_the_bin_that_begins_before_it(steps: int) -> None:
    bins = LossBins(steps)
    firsts = [bins.first_step(place) for place in range(BINS)]
    for step in range(1, steps + 1):
        bins.add(step, 1.0)
        place = min(BINS - 1, (step - 1) * BINS // steps)
        assert firsts[place] <= step
        assert place == BINS - 1 or step < max(firsts[place + 1], firsts[place] + 1)


def test_the_gap_grows_on_as_time_does() -> None:
    """At half of the run 0.2 below the proxy: at the middle of the last twentieth half a run and more has gone by."""
    forecast = Forecast([proxy("a", chosen=True), proxy("b", 0.1), proxy("c", -0.1)])
    observed = [each - 0.2 for each in REFERENCE[: BINS // 2]]
    told = forecast.at_end(observed)
    assert told is not None
    grown = 0.2 * (1 + (19 + 20) / 2 / BINS)
    assert told.loss == pytest.approx(np.mean(REFERENCE[-2:]) - grown)
    # Of b and c, whose gap stays 0.1, the same forecast is wrong by what it let the gap grow.
    wrong = 0.1 * (19 + 20) / 2 / BINS
    # 0.5 standard deviations of the growth, to 90 %: the last of the places is half a run ahead.
    growth = 1.6448536 * 0.5 * 0.2 * (38.5 + 1 - 20) / BINS
    assert told.half == pytest.approx(math.hypot(wrong * stats.t.ppf(0.95, 2), growth))


def test_what_is_known_of_the_end_is_taken() -> None:
    forecast = Forecast([proxy("a", chosen=True), proxy("b", 0.1), proxy("c", -0.1)])
    told = forecast.at_end(REFERENCE)
    assert told is not None
    assert told.loss == pytest.approx(np.mean(REFERENCE[-2:]))
    assert told.half == pytest.approx(0.0, abs=1e-12)


def test_no_forecast() -> None:
    """Too early; of two runs of the proxy; of no run that has the record's values."""
    three = [proxy("a", chosen=True), proxy("b", 0.1), proxy("c", -0.1)]
    assert Forecast(three).at_end(REFERENCE[: FIRST - 1]) is None
    assert Forecast(three).at_end(REFERENCE[:FIRST]) is not None
    assert Forecast(three[:2]).at_end(REFERENCE[:FIRST]) is None
    assert Forecast([proxy("b", 0.1), proxy("c"), proxy("d")]).at_end(REFERENCE[:FIRST]) is None
    assert Forecast([]).at_end(REFERENCE) is None


def test_runs_of_the_proxy_that_count() -> None:
    """Those that end within 1.1 of the best, and eight at most."""
    best = float(np.mean(REFERENCE[-2:]))
    near = [proxy(f"near {number}", 0.01 * number) for number in range(1, 10)]
    assert Forecast([proxy("a", chosen=True), *near]).runs == 1 + 8
    assert Forecast([proxy("a", chosen=True), proxy("b", 0.11 * best), *near[:1]]).runs == 2


def test_intervals_hold_of_runs_like_the_proxys() -> None:
    """Of ten runs each of 40 studies, with the noise and the gaps of the proxy's runs: 90 %, within three errors."""
    held: list[bool] = []
    for study in range(40):
        proxies = [proxy(f"{study}: a{number}", chosen=True, noise=0.02) for number in range(3)]
        proxies += [proxy(f"{study}: b{number}", 0.03 * number - 0.1, noise=0.02) for number in range(6)]
        forecast = Forecast(proxies)
        for number in range(10):
            gap = random.Random(f"{study}: {number}").uniform(-0.1, 0.1)
            run = proxy(f"{study}: run {number}", gap, noise=0.02).losses
            told = forecast.at_end(run[: BINS // 2])
            assert told is not None
            held.append(bool(abs(np.mean(run[-2:]) - told.loss) <= told.half))
    assert abs(np.mean(held) - 0.9) < 3 * math.sqrt(0.9 * 0.1 / len(held))


def test_the_page_has_what_was_measured(repository: Path) -> None:
    """docs/watching.md, each number from the benchmark's record."""
    record = json.loads((repository / "benchmarks/results/forecast/3.12.json").read_text())
    rows = record["forecasts"]
    held = [abs(row["end"] - row["told"]) <= row["half"] for row in rows]
    assert (record["held"], record["of"], record["alarms"]) == (sum(held), len(rows), 0)
    ends, halves, shares = ([row[name] for row in rows] for name in ("end", "half", "share"))
    off = max(abs(row["end"] - row["told"]) for row in rows)
    page = " ".join((repository / "docs/watching.md").read_text().split())
    assert (
        f"on {len({(row['times'], row['seed']) for row in rows})} targets of two and four times the proxy's width with "
        f"other seeds: of {len(rows)} forecasts, made at {min(shares):g} to {max(shares):g} of the schedule, "
        f"{sum(held)} held; the losses ended between {min(ends):.2f} and {max(ends):.2f}, at most {off:.2f} from the "
        f"forecast, and the intervals were ± {min(halves):.2f} to {max(halves):.2f}"
    ) in page
    assert {row["times"] for row in rows} == {2, 4}


# --- alarms ---


def seen(losses: list[float], forecast: Forecast | None = None) -> list[tuple[int, int, str]]:
    alarms = LossAlarms(LossBins(len(losses)), forecast)
    return [
        (alarm.step, alarm.since, alarm.cause)
        for step, loss in enumerate(losses, start=1)
        for alarm in alarms.see(step, loss)
    ]


def noisy(steps: int, sigma: float = 0.02) -> list[float]:
    generator = random.Random(3)
    return [3 + 2 * math.exp(-step / 50) + generator.gauss(0, sigma) for step in range(steps)]


def test_noise_does_not_jump() -> None:
    assert seen(noisy(2000)) == []


def test_a_jump_is_said_once() -> None:
    """Five steps of 6 nats where there were 3: once, in the third; again when it comes back and jumps once more."""
    losses = noisy(400)
    losses[199:204] = [6.0] * 5
    losses[299:302] = [6.0] * 3
    assert [(step, since) for step, since, cause in seen(losses) if "jumped" in cause] == [(202, 200), (302, 300)]


def test_two_batches_that_are_unlike_the_others_are_no_jump() -> None:
    losses = noisy(400)
    losses[199:201] = [6.0] * 2
    assert seen(losses) == []


def test_a_loss_that_stays_where_it_jumped_to_is_said_once() -> None:
    assert [step for step, *_ in seen([*noisy(200), *(each + 3 for each in noisy(200))])] == [203]


def test_too_few_losses_tell_no_jump() -> None:
    assert seen([*noisy(19), *[9.0] * 3]) == []
    assert [step for step, *_ in seen([*noisy(20), *[9.0] * 3])] == [23]


STUDY = [proxy("a", chosen=True), *(proxy(f"b{number}", 0.02 * number) for number in range(-3, 4))]


def test_a_loss_that_stays_above_its_forecast() -> None:
    """From bin 24 on 0.5 above what the proxy does: said at the end of the third bin."""
    forecast = Forecast(STUDY)
    curve = [each + 0.5 * (place >= 24) for place, each in enumerate(REFERENCE)]
    losses = [each for each in curve for _ in range(10)]
    found = [alarm for alarm in seen(losses, forecast) if "forecast" in alarm[2]]
    ((step, since, cause),) = found
    assert (step, since) == (270, 241)
    assert re_number(cause) == pytest.approx(0.5, abs=0.02)
    assert seen([each for each in REFERENCE for _ in range(10)], forecast) == []


def re_number(text: str) -> float:
    return float(next(word for word in text.split() if word.replace(".", "").isdigit()))


def test_bins_of_a_file(tmp_path: Path) -> None:
    """Lines behind the last step, evaluations and what is no number do not count."""
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": step, "loss": float(step)} for step in range(1, 7)]
    lines[1] = {"step": 2, "loss": None}  # type: ignore[dict-item]
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"step": 6, "eval_loss": 1.0}]))
    assert bins_of(path, 80, 4).full() == [1.0, 3.5]
    assert bins_of(tmp_path / "none", 80).full() == []


def test_a_file_that_grows_and_is_cut(tmp_path: Path) -> None:
    """What a view adds up is what the whole file has, also of a run that goes on from an earlier step."""
    path = tmp_path / "metrics.jsonl"

    def write(first: int, last: int, scale: float) -> None:
        with path.open("a") as file:
            file.write("".join(json.dumps({"step": s, "loss": scale * s}) + "\n" for s in range(first, last + 1)))

    losses = _Losses(path, 80)
    assert losses.bins().full() == []
    write(1, 40, 1.0)
    assert losses.bins().full() == bins_of(path, 80).full()
    write(41, 60, 1.0)
    with path.open("a") as file:
        file.write('{"step": 61, "lo')
    assert losses.bins().full() == bins_of(path, 80).full()
    cut_lines(path, 20)
    assert losses.bins().full() == bins_of(path, 80).full()
    write(21, 70, 3.0)
    assert losses.bins().full() == bins_of(path, 80).full()
    cut_lines(path, 10)
    write(11, 75, 7.0)  # longer again than it was when it was last looked at
    assert losses.bins().full() == bins_of(path, 80).full()
    assert losses.bins().last == 75


@pytest.mark.parametrize("line", [b"{}", b"[]", b"3", b"null", b"\0\0\0", b'{"step": 61, "lo', b"\xff\xfe garbage"])
def test_what_a_crash_leaves_ends_a_file(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = "".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(1, 61))
    path.write_text(whole)
    expected = bins_of(path, 80).full()
    path.write_bytes(whole.encode() + line + b"\n")
    losses = _Losses(path, 80)
    assert losses.bins().full() == bins_of(path, 80).full() == expected
    assert len(cut_lines(path, 80)) == 60
    assert path.read_text() == whole


# --- what must not be said ---


@pytest.mark.parametrize("gap", [-0.1, -0.3, -0.5, 0.1])
def test_an_advantage_that_does_not_grow_is_no_alarm(gap: float) -> None:
    """A wider run is better by the same at every step, as its loss is by a law with a floor."""
    proxies = [proxy(f"a{number}", chosen=True, noise=0.004) for number in range(3)]
    proxies += [proxy(f"b{number}", 0.02 * number, noise=0.004) for number in range(5)]
    losses = [each + gap for each in proxy("run", noise=0.004).losses for _ in range(10)]
    assert [alarm for alarm in seen(losses, Forecast(proxies)) if "forecast" in alarm[2]] == []


def walk(name: str, gap: float = 0.0) -> list[float]:
    """The reference with noise that adds up."""
    generator, at, found = random.Random(name), gap, []
    for each in REFERENCE:
        at += 0.004 * generator.gauss(0, 1)
        found.append(each + at)
    return found


def test_how_often_a_healthy_run_is_called_too_high() -> None:
    """Of 300 runs like the proxy's, whose noise adds up: one in a hundred at most."""
    said = 0
    for study in range(300):
        losses = [LossOfProxy(run=str(run), chosen=run < 3, losses=walk(f"{study}-{run}")) for run in range(6)]
        said += len(Forecast(losses).above(walk(f"{study}-target"))) >= 3
    assert said <= 3


def test_a_run_that_goes_on_is_not_stopped_again() -> None:
    """Above its forecast since before it was stopped; said again where it was well in between."""
    forecast = Forecast(STUDY)
    curve = [each + 0.5 * (place >= 24) for place, each in enumerate(REFERENCE)]
    bins = LossBins(10 * BINS)
    for step in range(1, 281):
        bins.add(step, curve[(step - 1) // 10])
    alarms = LossAlarms(bins, forecast)
    assert [alarm for step in range(281, 401) for alarm in alarms.see(step, curve[(step - 1) // 10])] == []
