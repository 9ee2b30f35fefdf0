"""The ladder: laws of curves whose minima are known, planted faults, and real runs on a few rungs."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from mup_megatron import cli
from mup_megatron.config import derive
from mup_megatron.data.parts import times_read
from mup_megatron.data.prepare import prepare
from mup_megatron.proof.halving import wanted
from mup_megatron.proof.ladder import _Runs
from mup_megatron.proof.ladder_told import lines
from mup_megatron.proof.ladder_verdict import laws
from mup_megatron.proof.laws import bends, fit
from mup_megatron.proof.optimum import Curve
from mup_megatron.proof.rungs import Ladder, Over, Rung, rungs
from mup_megatron.report.ladder import draw_ladder
from mup_megatron.tuning.loss_law import AXES
from mup_megatron.util.errors import UserError
from mup_megatron.util.provenance import KEYS
from tests.helpers.configs import MIXED, make, pipeline_file

BATCH, TOKENS, START = 0.4, -0.3, 2.0**-8
RUNGS = [Rung(batch, tokens, 1) for batch in (1, 2, 4) for tokens in (1, 2, 4, 8)]


def curves(noise: float = 0.0, seeds: int = 1, octaves: float = 0.0, share: float = 0.0) -> dict[Rung, Curve]:
    """Parabolas in log2 of the rate, least at START · batch^0.4 · tokens^-0.3, where the loss is 2 + 2 · tokens^-0.2.

    Args:
        noise: standard deviation of a seed's minimum, in octaves.
        seeds: of each.
        octaves: by which the last rung's best rate leaves the law.
        share: of loss, by which its loss does.
    """
    generator = random.Random(1)
    made = {}
    for rung in RUNGS:
        best = math.log2(START) + BATCH * math.log2(rung.batch) + TOKENS * math.log2(rung.tokens)
        least = 2.0 + 2.0 * rung.tokens**-0.2
        if rung == RUNGS[-1]:
            best, least = best + octaves, least * (1 + share)
        places = [best + generator.gauss(0, noise) for _ in range(seeds)]
        grid = [START * 2.0**octave for octave in range(-4, 5)]
        losses = [
            {n: least + 0.02 * (math.log2(value) - place) ** 2 for n, place in enumerate(places)} for value in grid
        ]
        made[rung] = Curve(values=grid, losses=losses)
    return made


def test_exponents_that_were_put_in_come_out() -> None:
    found = laws(curves())
    assert found["rate"]["batch"]["exponent"] == pytest.approx(BATCH, abs=1e-9)
    assert found["rate"]["tokens"]["exponent"] == pytest.approx(TOKENS, abs=1e-9)
    assert 2 ** found["rate"]["constant"] == pytest.approx(START)
    # Every parabola's least lies on the law, so the law is exact. Batch has no part in it, so steps have power 0, and
    # what they hold then is a part of the floor.
    terms = {name: number["value"] for name, number in found["loss"]["terms"].items()}
    assert terms["floor"] + terms["steps"] == pytest.approx(2.0, abs=1e-3)
    assert terms["steps_exponent"] == pytest.approx(0.0, abs=1e-3)
    assert terms["data"] == pytest.approx(2.0, abs=1e-3)
    assert terms["data_exponent"] == pytest.approx(0.2, abs=1e-4)
    assert found["held_out"]["loss"]["predicted"] == pytest.approx(2 + 2 * 8**-0.2, abs=1e-4)
    assert found["verdict"] == "passed"
    assert found["keys"] == {"parametrization.batch": "power:0.40", "parametrization.tokens": "power:-0.30"}
    # From batch 1, tokens 1 to batch 4, tokens 8: 2 · 0.4 - 3 · 0.3 = -0.1; the square root rule says 1 - 0.96 = 0.04.
    assert found["published"]["no rule"]["octaves"] == pytest.approx(-0.1)
    assert found["published"]["batch^0.5 tokens^-0.32"]["octaves"] == pytest.approx(-0.14)
    assert found["published"]["batch^0.5 tokens^-0.5"]["octaves"] == pytest.approx(-0.1 + 0.5)
    # What is left is -0.1 per octave of batch (0, 1, 2: variance 2/3) and 0.2 per octave of tokens (0 to 3: 5/4), on a
    # grid of 12: sum of squares 12 · (0.01 · 2/3 + 0.04 · 5/4) over 11.
    left = math.sqrt(12 * (0.01 * 2 / 3 + 0.04 * 5 / 4) / 11)
    assert found["published"]["batch^0.5 tokens^-0.5"]["scatter"] == pytest.approx(left)


def test_errors_are_of_the_size_of_what_scatters() -> None:
    """Of 200 draws, the true exponent lies within two standard errors about as often as it should."""
    points = [rung.octaves for rung in RUNGS[:-1]]
    generator, within = random.Random(2), 0
    for _ in range(200):
        values = [BATCH * point["batch"] + TOKENS * point["tokens"] + generator.gauss(0, 0.2) for point in points]
        law = fit(points, values, noise=0.0)
        within += abs(law.coefficients[1] - BATCH) < 2 * law.errors[1]
    assert law.names == ["batch", "tokens"]
    assert 0.86 < within / 200 < 0.98  # Student's t with 8 degrees of freedom: 0.92


def test_noise_of_seeds_is_the_least_error() -> None:
    """Points that lie on a line by chance are no surer than their seeds."""
    points = [rung.octaves for rung in RUNGS[:-1]]
    values = [BATCH * point["batch"] for point in points]
    assert fit(points, values, noise=0.0).errors[1] == pytest.approx(0.0, abs=1e-12)
    assert fit(points, values, noise=0.3).errors[1] > 0.05


def test_a_bend_that_was_put_in_comes_out() -> None:
    """0.05 octaves per squared doubling of the tokens, of which a ladder of 8 times has 3² · 0.05 = 0.45 at its end."""
    points = [rung.octaves for rung in RUNGS[:-1]]
    straight = [BATCH * point["batch"] + TOKENS * point["tokens"] for point in points]
    bent = [value + 0.05 * point["tokens"] ** 2 for value, point in zip(straight, points, strict=True)]
    found = bends(points, bent, noise=0.01)
    assert found["tokens"]["octaves"] == pytest.approx(0.05)
    assert found["tokens"]["told"]
    assert not found["batch"]["told"]
    # Two sizes have no bend, and neither have three with no point to spare.
    assert set(bends([point for point in points if point["batch"] < 2], straight[:8], noise=0.0)) == {"tokens"}
    assert not bends([{"tokens": float(octave)} for octave in range(3)], [0.0, 1.0, 4.0], noise=0.0)


def test_noise_is_no_bend() -> None:
    """Of 200 straight laws with noise about one in twelve is said to bend (Student's t with 7 degrees of freedom)."""
    points = [rung.octaves for rung in RUNGS[:-1]]
    generator, told = random.Random(4), 0
    for _ in range(200):
        values = [BATCH * point["batch"] + generator.gauss(0, 0.2) for point in points]
        told += bends(points, values, noise=0.0)["tokens"]["told"]
    assert 0.03 < told / 200 < 0.15


def test_a_ladder_says_whether_its_law_bends() -> None:
    found = laws(curves()) | {"seeds": 1, "seconds": 1.0, "dropped": [], "failed": []}
    straight = "rate: no bend is told from the noise over batch (+0.00 ± 0.00), tokens (+0.00 ± 0.00)"
    assert found["bends"]["tokens"]["octaves"] == pytest.approx(0.0, abs=1e-9)
    assert not any("bends" in line for line in lines({**found, "bends": {}}))
    found["bends"] = {axis: {"octaves": 0.0, "error": 0.0, "told": False} for axis in ("batch", "tokens")}
    assert straight in lines(found)
    found["bends"]["tokens"] = {"octaves": -0.05, "error": 0.02, "told": True}
    said = "rate: bends downward over tokens, -0.05 ± 0.02 octaves per squared doubling: farther out, what the law says"
    assert f"{said} is too high" in lines(found)


@pytest.mark.parametrize(
    ("moved", "reason"),
    [
        ({"octaves": 0.6}, "the best rate is +0.60 octaves from the predicted one"),
        ({"octaves": -0.6}, "the best rate is -0.60 octaves from the predicted one"),
        ({"share": 0.03}, "% from the predicted one"),
    ],
)
def test_a_largest_rung_off_the_law_fails(moved: dict[str, Any], reason: str) -> None:
    """Negative control: the laws are those of the other rungs, and the verdict names what is off."""
    found = laws(curves(**moved))
    assert found["rate"]["batch"]["exponent"] == pytest.approx(BATCH, abs=1e-9)
    assert (found["verdict"], len(found["reasons"])) == ("failed", 1)
    assert reason in found["reasons"][0]
    assert lines(json.loads(json.dumps(found | {"seeds": 1, "seconds": 1.0, "dropped": [], "failed": []})))[
        -1
    ].startswith("failed")


def test_noise_is_no_pass() -> None:
    """Where minima scatter by an octave, 0.7 octaves off neither holds the law nor breaks it."""
    found = laws(curves(noise=1.0, octaves=0.7))
    off, error = found["held_out"]["rate"]["octaves"], found["held_out"]["rate"]["error"]
    assert 0.25 < abs(off) < 2 * error
    assert (found["verdict"], found["reasons"]) == ("undecided", [])
    assert found["open"][0].startswith(
        f"batch-4-tokens-8-width-1: the best rate is {off:+.2f} octaves from the predicted"
    )
    # Control: as far off, where the laws are sure, they fail; near by, noise or not, they pass.
    assert laws(curves(octaves=off))["verdict"] == "failed"
    assert laws(curves(noise=0.05, seeds=3))["verdict"] == "passed"


def test_a_largest_rung_beside_whose_best_a_run_diverged_is_undecided() -> None:
    held = curves()
    largest = list(held)[-1]
    place = held[largest].best
    losses = [dict(each) for each in held[largest].losses]
    losses[place + 1] = dict.fromkeys(losses[place + 1], math.inf)
    held[largest] = Curve(values=held[largest].values, losses=losses)
    found = laws(held)
    assert found["open"] == [
        f"{largest.name}: a run beside the best rate ({held[largest].values[place]:g}) diverged or failed; expected "
        "--values nearer to it"
    ]
    assert found["verdict"] != "passed"


def test_a_largest_rung_beyond_what_was_tried_is_undecided() -> None:
    found = laws(curves(octaves=9.0))
    assert found["open"] == ["batch-4-tokens-8-width-1: the best rate lies beyond those tried"]
    assert found["verdict"] != "passed"


def test_how_flat_it_is_at_the_ends_where_no_law_can_be_fitted() -> None:
    """By hand: of losses 4.2, 4.1 and 4 the last is 2.44 % below the one before; of the flat ones 0.025 %."""
    values = [1.0, 2.0, 4.0]
    steep, flat = [4.2, 4.1, 4.0], [4.0, 4.001, 4.002]
    made = {rung: Curve(values=values, losses=[{1: loss} for loss in steep]) for rung in RUNGS}
    made |= {rung: Curve(values=values, losses=[{1: loss} for loss in flat]) for rung in RUNGS[:2]}
    found = laws(made)
    assert found["open"] == [
        f"no law of batch and tokens: only 0 of the {len(RUNGS) - 1} rungs below the largest have their best rate "
        "between others that were tried; at 2 it is the lowest, 0.025 % of loss below the next at most, at "
        f"{len(RUNGS) - 3} it is the highest, 2.4 % of loss below the next at most; expected --values nearer to it"
    ]
    assert (found["verdict"], found["reasons"]) == ("undecided", [])
    assert [rung["edge"] for rung in found["rungs"]] == ["low"] * 2 + ["high"] * (len(RUNGS) - 2)
    assert [found[name] for name in ("rate", "loss", "held_out")] == [None] * 3


def test_rungs_beside_a_run_that_diverged_are_counted_where_no_law_can_be_fitted() -> None:
    losses = [4.1, 4.0, math.inf]
    curve = Curve(values=[1.0, 2.0, 4.0], losses=[{1: loss} for loss in losses])
    assert laws(dict.fromkeys(RUNGS, curve))["open"] == [
        f"no law of batch and tokens: only 0 of the {len(RUNGS) - 1} rungs below the largest have their best rate "
        f"between others that were tried; at {len(RUNGS) - 1} a run beside it diverged or failed; expected --values "
        "nearer to it"
    ]


def test_no_law_leaves_an_axis_out(tmp_path: Path) -> None:
    """Three rungs with a known best rate, all of the fewest tokens, do not tell what more tokens do to rate and loss.

    Control: with the best rate of one rung of more tokens, they do, and the largest rung lies on the laws.
    """
    high = slice(4, None)  # from the rate on that is best at the first rung: more tokens want less
    some = curves()
    cut = {rung: Curve(values=curve.values[high], losses=curve.losses[high]) for rung, curve in some.items()}
    found = laws({rung: some[rung] if rung.tokens == 1 else cut[rung] for rung in RUNGS})
    assert found["open"][0].startswith(
        f"no law of batch and tokens: only 3 of the {len(RUNGS) - 1} rungs below the largest"
    )
    assert (found["verdict"], found["rate"]) == ("undecided", None)
    known = {rung: some[rung] if rung.tokens == 1 or rung.batch == 1 else cut[rung] for rung in RUNGS[:-1]}
    control = laws(known | {RUNGS[-1]: some[RUNGS[-1]]})
    assert control["verdict"] == "passed"
    assert control["held_out"]["rate"]["octaves"] == pytest.approx(0.0, abs=1e-9)
    # What there is is told and drawn.
    result = json.loads(json.dumps(found | {"seeds": 1, "seconds": 60.0, "dropped": [], "failed": []}))
    said = lines(result)
    assert said[2] == "  batch × 1, tokens × 2, width × 1: loss 3.7429 at lr 0.00391, at the low end of what was tried"
    assert said[-2:] == [found["open"][0], "undecided: whether there is a law of the best rate is not known"]
    assert not any("held out" in line for line in said)
    assert draw_ladder(result, tmp_path / "ladder.png").stat().st_size > 10_000


GRID, SEEDS = [1.0, 2.0, 4.0, 8.0, 16.0], [7, 8, 9]


def trained(
    least: float, level: dict[int, float], bend: float = 0.1, most: float = math.inf, cliff: float = math.inf
) -> dict[tuple[float, int], float]:
    """What halving trains of parabolas in log2 of the rate, least at `least`; from `cliff` on runs diverge.

    A seed's level moves all of its curve.
    """
    known: dict[tuple[float, int], float] = {}
    while runs := wanted(GRID, SEEDS, known, most).runs:
        assert not set(runs) & set(known)
        known |= {
            (rate, seed): level[seed] + bend * (math.log2(rate) - least) ** 2 if rate < cliff else math.inf
            for rate, seed in runs
        }
    return known


def test_later_seeds_train_what_is_near() -> None:
    """Best at 4: 2 and 8 beside it have every seed, 1 and 16 cost 0.4 of 4 (10 %) and have the first alone.

    A seed that lies 20 % higher changes nothing: seeds are compared with themselves.
    """
    known = trained(2.0, {7: 4.0, 8: 4.8, 9: 4.0})
    assert sorted(known) == sorted([(rate, 7) for rate in GRID] + [(r, s) for r in (2.0, 4.0, 8.0) for s in (8, 9)])
    # Negative control: of a flat curve nothing is hopeless (0.04 of 4 is 1 %).
    assert len(trained(2.0, dict.fromkeys(SEEDS, 4.0), bend=0.01)) == len(GRID) * len(SEEDS)


def test_the_next_rate_is_tried_at_either_end() -> None:
    level = dict.fromkeys(SEEDS, 4.0)
    assert max(trained(5.0, level)) == (64.0, 9)  # best is 32, so 64 is tried, and is beside it
    assert min(trained(-1.0, level)) == (0.25, 7)
    assert max(trained(40.0, level)) == (256.0, 9)  # four beyond those asked for, and no more
    assert max(trained(40.0, level, most=63.0)) == (32.0, 9)  # where there is no larger one
    assert {rate for rate, _ in trained(2.0, level)} == set(GRID)


def test_beside_a_rate_that_diverged_one_between_is_tried() -> None:
    """Best at 4, and 8 diverges: the rate half an octave below 8 is tried, and then those beside the best are known.

    Where nothing between trains, it ends at a quarter of an octave from what diverged, after two rates.
    """
    level = dict.fromkeys(SEEDS, 4.0)
    found = {rate: loss for (rate, seed), loss in trained(2.0, level, cliff=8.0).items() if seed == SEEDS[-1]}
    assert sorted(found) == pytest.approx([2.0, 4.0, 2**2.5])
    assert math.isfinite(sum(found.values()))
    near = {rate for rate, _ in trained(2.0, level, cliff=4.5)} - set(GRID)
    assert sorted(near) == pytest.approx([2**2.25, 2**2.5])
    # Negative control: a rate far above the best may diverge, and no more are tried.
    assert {rate for rate, _ in trained(2.0, level, cliff=16.0)} == set(GRID)


def test_a_best_rate_that_moves_is_followed() -> None:
    """The first seed is best at 2; with the second, 8 is: 16 beside it then has both seeds too."""
    first = {1.0: 4.1, 2.0: 4.0, 4.0: 4.03, 8.0: 4.03, 16.0: 4.9}
    second = {1.0: 9.0, 2.0: 5.0, 4.0: 4.2, 8.0: 4.0, 16.0: 4.5}
    known: dict[tuple[float, int], float] = {}
    while runs := wanted(GRID, [1, 2], known).runs:
        known |= {(rate, seed): (first if seed == 1 else second)[rate] for rate, seed in runs}
    assert (16.0, 2) in known


def test_short_rungs_are_left_out_and_all_see_as_much_of_the_evaluation(config_of_ladder: Any) -> None:
    """200 steps of 8: batch x 4 has 50 steps at tokens x 1, 200 at x 4; each is evaluated on 16 · 8 sequences."""
    asked = Ladder(batch=[1, 2, 4], tokens=[1, 2, 4], width=[], values=[1.0, 2.0, 4.0], seeds=1, min_steps=100)
    said: list[str] = []
    made = rungs(config_of_ladder, asked, said.append)
    assert said == ["left out, with fewer than 100 steps: batch-4-tokens-1-width-1 (50)"]
    assert len(made) == 8
    assert list(made)[-1] == Rung(4, 4, 1)
    for rung, config in made.items():
        training = config.training
        assert training.train_steps * training.global_batch_size == 200 * 8 * rung.tokens
        assert training.eval_steps * training.global_batch_size == 16 * 8
    with pytest.raises(UserError, match="--min-steps 201: leaves out batch-4-tokens-4-width-1"):
        rungs(config_of_ladder, Ladder(**{**vars(asked), "min_steps": 201}), said.append)


def test_every_batch_divides_what_is_evaluated(config_of_ladder: Any) -> None:
    """By hand: 5 batches of 8 are 40 sequences, which batches of 24 do not divide; 6 of 8 are 2 of 24."""
    config = derive(config_of_ladder, {"training.eval_steps": 5})
    asked = Ladder(batch=[1, 3], tokens=[1, 3, 9], width=[], values=[1.0, 2.0, 4.0], seeds=1)
    made = rungs(config, asked, lambda _line: None)
    assert {rung.batch: each.training.eval_steps for rung, each in made.items()} == {1: 6, 3: 2}


def test_rounded_steps_are_told(config_of_ladder: Any) -> None:
    """Of 10 steps a batch x 4 takes 2.5: 2 are 0.8 of the tokens, and 5 of 5 all of them."""
    config = derive(config_of_ladder, {"training.train_steps": 10})
    asked = Ladder(batch=[1, 2, 4], tokens=[1, 2, 4], width=[], values=[1.0, 2.0, 4.0], seeds=1)
    said: list[str] = []
    rungs(config, asked, said.append)
    (line,) = said
    assert line == (
        "warning: steps are rounded, and the laws take the tokens for whole: batch-4-tokens-1-width-1 (2, 0.80 of its "
        "tokens); raise --min-steps"
    )


@pytest.fixture
def config_of_ladder(tmp_path: Path) -> Any:
    keys = {
        "training.train_steps": 200,
        "training.eval_steps": 16,
        "training.global_batch_size": 8,
        "data.split": "98,2,0",
    }
    return derive(make(MIXED, "gpt3"), {**keys, "run.dir": str(tmp_path), "parametrization.tokens": "power:-0.3"})


def test_repeated_text_is_known() -> None:
    """Three times the tokens of every file of the corpus, counted one by one."""
    config = make(MIXED, "gpt3")
    prefixes = prepare(config).blend[0]
    dataset = IndexedDataset(prefixes[0])
    tokens = sum(len(dataset[number]) for number in range(len(dataset)))
    steps = round(3 * tokens / (8 * 32))
    assert times_read(derive(config, {"training.train_steps": steps}), prefixes) == pytest.approx(3, rel=1e-3)
    half = derive(config, {"training.train_steps": steps, "data.split": "50,50,0"})
    assert times_read(half, prefixes) > 3.5


def test_the_picture(tmp_path: Path) -> None:
    result = json.loads(json.dumps(laws(curves(noise=0.1, seeds=3)) | {"seeds": 3, "seconds": 1.0, "failed": []}))
    assert draw_ladder(result, tmp_path / "ladder.png").stat().st_size > 10_000
    decay = json.loads(json.dumps(laws(curves(noise=0.1, seeds=3), "weight_decay") | {"seeds": 3}))
    assert draw_ladder(decay, tmp_path / "decay.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"batch": [1], "tokens": [1], "width": []}, "one rung has no slope"),
        ({"batch": [1, 2], "tokens": [1, 2, 4], "width": [], "values": [1.0, 2.0]}, "three different positive numbers"),
    ],
)
def test_too_little_is_refused(asked: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Ladder(**{"values": [1.0, 2.0, 4.0], "seeds": 1, **asked})


# --- over layers ---


def test_rungs_of_several_depths(config_of_ladder: Any) -> None:
    """A base of 2 layers under CompleteP, times 1 and 4, and widths times 1 and 2; the largest of all comes last."""
    rule = {"base.num_layers": 2, "model.num_layers": 8, "parametrization.depth": "completep"}
    asked = Ladder(batch=[1], tokens=[1, 2], width=[1, 2], layers=[1, 4], values=[1.0, 2.0, 4.0], seeds=1)
    made = rungs(derive(config_of_ladder, rule), asked, print)
    base = config_of_ladder.base.hidden_size
    sizes = {rung.name: (each.model.hidden_size / base, each.model.num_layers) for rung, each in made.items()}
    assert sizes == {
        "batch-1-tokens-1-width-1": (1, 2),
        "batch-1-tokens-2-width-1": (1, 2),
        "batch-1-tokens-1-width-1-layers-4": (1, 8),
        "batch-1-tokens-2-width-1-layers-4": (1, 8),
        "batch-1-tokens-1-width-2": (2, 2),
        "batch-1-tokens-2-width-2": (2, 2),
        "batch-1-tokens-1-width-2-layers-4": (2, 8),
        "batch-1-tokens-2-width-2-layers-4": (2, 8),
    }
    assert list(made)[-1] == Rung(1, 2, 2, 4)


def test_layers_have_an_exponent(tmp_path: Path) -> None:
    """Best rate as batch^0.4 tokens^-0.3 layers^-0.1, loss 0.05 higher per doubling of the layers."""
    made = {}
    for rung, curve in curves().items():
        for layers in (1, 2, 4):
            values = [float(value) * layers**-0.1 for value in curve.values]
            losses = [{seed: loss + 0.05 * math.log2(layers) for seed, loss in each.items()} for each in curve.losses]
            made[Rung(rung.batch, rung.tokens, 1, layers)] = Curve(values=values, losses=losses)
    found = laws(made)
    exponents = {axis: found["rate"][axis]["exponent"] for axis in ("batch", "tokens", "layers")}
    assert exponents == pytest.approx({"batch": BATCH, "tokens": TOKENS, "layers": -0.1}, abs=1e-9)
    assert found["loss"]["terms"]["layers"]["value"] == pytest.approx(0.05, abs=1e-6)
    assert found["verdict"] == "passed"
    # Another constant per depth is no scatter about a rule over batch and tokens; here 0.1 of tokens and batch is.
    one_depth = laws(curves())["published"]["no rule"]["scatter"]
    assert found["published"]["no rule"]["scatter"] == pytest.approx(one_depth, rel=0.1)
    result = json.loads(json.dumps(found | {"seeds": 1, "seconds": 60.0, "failed": [], "dropped": []}))
    assert lines(result)[1].startswith("  batch × 1, tokens × 1, width × 1, layers × 1: ")
    assert draw_ladder(result, tmp_path / "ladder.png").stat().st_size > 10_000
    # Control: where layers do not vary nothing speaks of them.
    plain = json.loads(json.dumps(laws(curves()) | {"seeds": 1, "seconds": 60.0, "failed": [], "dropped": []}))
    assert "layers" not in plain["rate"].keys() | plain["loss"]["terms"].keys()
    assert "layers" not in "".join(lines(plain))


# --- over weight decay ---


def test_a_ladder_over_a_beta() -> None:
    """By hand, from the first rung to the last (batch x 4, tokens x 8): sqrt_sde's 1 - beta2 moves by 2 octaves."""
    found = laws(curves(), "one_minus_beta2")
    assert {name: each["octaves"] for name, each in found["published"].items()} == {
        "no rule": pytest.approx(-0.1),
        "batch": pytest.approx(-0.1 - 2),
        "batch / tokens": pytest.approx(-0.1 - 2 + 3),
    }
    said = lines({**found, "seeds": 1, "seconds": 60.0, "failed": [], "dropped": []})
    assert said[-1].endswith(
        "no config takes these exponents; parametrization.batch: sqrt_sde has batch, complete_d has batch / tokens"
    )


def test_a_ladder_over_the_decay() -> None:
    """The same curves, of decays. By hand, to the last rung (batch x 4, tokens x 8): 0.4 * 2 - 0.3 * 3 = -0.1 octaves.

    No rule says 0 there, and batch / tokens says 2 - 3 = -1.
    """
    found = laws(curves(), "weight_decay")
    assert found["over"] == "weight_decay"
    assert "rate" not in found
    assert found["decay"]["batch"]["exponent"] == pytest.approx(BATCH, abs=1e-9)
    assert found["held_out"]["decay"]["octaves"] == pytest.approx(0.0, abs=1e-9)
    assert {name: each["octaves"] for name, each in found["published"].items()} == {
        "no rule": pytest.approx(-0.1),
        "batch / tokens": pytest.approx(0.9),
    }
    assert found["keys"] == {}
    said = lines({**found, "seeds": 1, "seconds": 60.0, "failed": [], "dropped": []})
    assert said[-1].endswith(
        "no config takes these exponents; parametrization.weight_decay: timescale has batch / tokens"
    )
    assert sum(line.startswith("decay: ") and "spread" in line for line in said) == 1
    assert laws(curves(octaves=0.6), "weight_decay")["reasons"] == [
        "batch-4-tokens-8-width-1: the best decay is +0.60 octaves from the predicted one"
    ]


@pytest.mark.parametrize(
    ("over", "varied"),
    [
        ("lr", [(0.5, 0.1, 0.95), (1.0, 0.1, 0.95), (2.0, 0.1, 0.95)]),
        ("weight_decay", [(0.008, 0.5, 0.95), (0.008, 1.0, 0.95), (0.008, 2.0, 0.95)]),
        ("one_minus_beta2", [(0.008, 0.1, 0.875), (0.008, 0.1, 0.75), (0.008, 0.1, 0.5)]),
    ],
)
def test_what_is_varied(config_of_ladder: Any, over: Over, varied: list[tuple[float, ...]]) -> None:
    """Rate, decay and beta2 of the first rung's runs; the others are the config's own."""
    config = derive(config_of_ladder, {"hparams.lr": 0.008, "hparams.weight_decay": 0.1})
    values = [0.125, 0.25, 0.5] if over == "one_minus_beta2" else [0.5, 1.0, 2.0]
    asked = Ladder(batch=[1, 2], tokens=[1, 2, 4], width=[], values=values, seeds=1, over=over)
    made = rungs(config, asked, lambda line: None)
    jobs = _Runs(over, asked.values, [1]).missing(made)[:3]
    found = [
        (each.config.hparams.lr, each.config.hparams.weight_decay, each.config.optimizer.betas[1]) for each in jobs
    ]
    assert found == varied
    assert [job.name for job in jobs] == [f"batch-1-tokens-1-width-1-{over}-{value:g}-seed-1" for value in values]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--over", "momentum"], "--over: momentum: expected lr or weight_decay or one_minus_beta2"),
        (
            ["--over", "weight_decay"],
            "--values: hparams.weight_decay is 0, so it has no octaves about it; expected values",
        ),
        (
            ["--over", "one_minus_beta2", "optimizer.name=sgd"],
            "--over: one_minus_beta2: moves nothing: optimizer.name sgd has no betas",
        ),
        (
            ["--over", "weight_decay", "--values", "0.1,1,2", "--record", "r.json"],
            "--record: takes exponents of the rate",
        ),
    ],
)
def test_bad_options(tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], sentence: str) -> None:
    path = pipeline_file(tmp_path, hparams__weight_decay=0.0)
    assert cli.run(["ladder", str(path), *options]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "least", "sentence"),
    [
        # Nine times the tokens for three values: batch 1, 2 and 4 with the tokens once and twice.
        ({}, 1, "--batch 1,2,4 --tokens 1,2, which is enough: 6 rungs of at most 3 runs, which read 27 times"),
        ({"tokens": [1]}, 1, "--batch 1,2,4,8 --tokens 1, which is enough: 4 rungs of at most 3 runs, which read 12 t"),
        # Of a run of 200 steps, batch 2 has 100 with the tokens once, and batch 4 with them twice.
        ({}, 150, "--batch 1,2 --tokens 1,2,4, which is enough: 5 rungs of at most 3 runs, which read 39 times"),
    ],
)
def test_too_few_rungs_are_refused(config_of_ladder: Any, given: Any, least: int, sentence: str) -> None:
    """And the smallest ladder that is enough is named, and what it costs; it is taken."""
    asked = Ladder(
        **{"batch": [1, 2], "tokens": [1, 2], "width": [], "values": [1.0, 2.0, 4.0], "seeds": 1, **given},
        min_steps=least,
    )
    with pytest.raises(UserError, match=r"rungs, of which one is kept out, do not determine [23]") as error:
        rungs(config_of_ladder, asked, lambda line: None)
    assert sentence in str(error.value)
    words = str(error.value).partition("expected ")[2].partition(", which")[0].replace(" --", "|").strip("-").split("|")
    named: dict[str, Any] = {word.split()[0]: list(map(int, word.split()[1].split(","))) for word in words}
    assert rungs(config_of_ladder, replace(asked, **named), lambda line: None)


@pytest.mark.slow
def test_real_runs_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Six rungs of a small model: every run ends, a second command finds them all, batch and steps are the rungs'."""
    path = pipeline_file(tmp_path, training__train_steps=8, training__global_batch_size=4, training__micro_batch_size=4)
    command = ["ladder", str(path), "--batch", "1,2", "--tokens", "1,2,4", "--seeds", "1", "--workers", "2", "--json"]
    assert cli.run(command) in (0, 1, 3)
    first = json.loads(capsys.readouterr().out)
    assert [[rung[name] for name in AXES] for rung in first["rungs"]][-1] == [2, 4, 1, 1]
    assert first["steps"]["batch-2-tokens-4-width-1"] == 16
    assert first["failed"] == []
    assert set(KEYS) <= set(first["provenance"])
    assert cli.run(command) in (0, 1, 3)
    again = json.loads(capsys.readouterr().out)
    assert again == first
