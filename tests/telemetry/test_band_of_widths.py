"""Bands of several widths: measured exponents of what the parametrization says nothing of, and a ladder's."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from mup_megatron import cli
from mup_megatron.config import derive
from mup_megatron.model.build import parametrize
from mup_megatron.rules.table import Parametrization
from mup_megatron.telemetry.band import POINTS, UPDATE, Band, make_band, of_widths
from mup_megatron.telemetry.series import SCHEDULE, Series
from tests.helpers.configs import make, pipeline_file
from tests.telemetry.test_alarms import GROWN

FC2, MLP = "decoder.layers.0.mlp.linear_fc2.weight", "decoder.layers.0.mlp"
VOCABULARY = 256


def table_of(times: int, optimizer: str) -> Parametrization:
    """A model so many times as wide as the base of 32."""
    sizes = {name: times * value for name, value in GROWN["base"].items()}
    config = make(GROWN, "llama", optimizer__name=optimizer, hparams__weight_decay=0.0)
    return parametrize(derive(config, {f"model.{name}": value for name, value in sizes.items()}), VOCABULARY)


def band_at(times: int, optimizer: str, *, update: float, output: float) -> Band:
    """Two runs, whose numbers are the same in all readings but for 10 % between the runs."""
    table, runs = table_of(times, optimizer), {}
    for run, share in (("a", 0.95), ("b", 1.05)):
        values = {
            SCHEDULE: 1.0,
            (FC2, "weight rms"): 1.0,
            (FC2, "update over weight"): share * update,
            (MLP, "output rms"): share * output,
        }
        steps = [1, table.config.training.train_steps]
        runs[run] = Series(steps, {name: [value, value] for name, value in values.items()})
    band = make_band(runs, table)
    assert band is not None
    return band


def test_exponents_by_hand() -> None:
    """SGD's updates, of which no rule is known here, fall with the width to the power of 3/2."""
    bands = [band_at(times, "sgd", update=times**-1.5, output=1.0) for times in (1, 2, 4)]
    band = of_widths(bands)
    assert band.widths == [32, 64, 128]
    found = {(each.name, each.quantity): each.exponent for each in band.series}
    assert found == {(FC2, UPDATE): pytest.approx(-1.5), (MLP, "output rms"): None}
    # Times 8 the width of the base, once more 2^-1.5; a quarter of the least and five times the greatest are left.
    bounds = band.on(table_of(8, "sgd"))(FC2, UPDATE, 0.5)
    assert bounds is not None
    assert bounds.low == pytest.approx(0.95 * 8**-1.5 / 4)
    assert bounds.high == pytest.approx(1.05 * 8**-1.5 * 5)
    assert bands[-1].on(table_of(8, "sgd"))(FC2, UPDATE, 0.5) is None  # one width says nothing of it


def test_what_the_parametrization_says_is_not_measured() -> None:
    """AdamW's updates go as its rate, and outputs stay, whatever runs of few seeds look like."""
    band = of_widths([band_at(times, "adamw", update=1.0, output=times**0.4) for times in (1, 2)])
    assert {each.exponent for each in band.series} == {None}
    updates = band.on(table_of(4, "adamw"))(FC2, UPDATE, 0.5)
    outputs = band.on(table_of(4, "adamw"))(MLP, "output rms", 0.5)
    assert updates is not None
    assert outputs is not None
    assert updates.expected == pytest.approx(0.5)  # a rate of 1/4 after one of 1/2
    assert outputs.expected == pytest.approx(2**0.4)


@pytest.mark.parametrize("longer", [True, False])
def test_attention_over_other_sequences(longer: bool) -> None:
    """Uniform attention sees (log 1 + ... + log n)/n: 2.55 nats at 32 tokens, 4.56 at 256, far beyond 1.5 times 2.55.

    Attention to a few tokens has what it had. So the bounds become wider, on the side of the sequences.
    """
    module = "decoder.layers.0.self_attention.core_attention"
    config = make(GROWN, "llama", hparams__weight_decay=0.0)
    short, long = (parametrize(derive(config, {"training.seq_length": length}), VOCABULARY) for length in (32, 256))
    proxy, target = (short, long) if longer else (long, short)
    steps = [1, config.training.train_steps]
    runs = {
        name: Series(steps, {(module, "attention entropy"): [value] * 2}) for name, value in (("a", 2.0), ("b", 2.2))
    }
    band = make_band(runs, proxy)
    assert band is not None
    uniform = [sum(math.log(n) for n in range(1, length + 1)) / length for length in (32, 256)]
    assert uniform == [pytest.approx(2.549, abs=1e-3), pytest.approx(4.560, abs=1e-3)]
    same, other = (band.on(table)(module, "attention entropy", 0.5) for table in (proxy, target))
    assert same is not None
    assert other is not None
    assert (same.low, same.high) == (pytest.approx(2.0 / 1.5), pytest.approx(2.2 * 1.5))
    ratio = uniform[1] / uniform[0]
    assert other.low == pytest.approx(same.low / (1 if longer else ratio))
    assert other.high == pytest.approx(same.high * (ratio if longer else 1))


def test_a_series_that_a_width_lacks_has_no_exponent(tmp_path: Path) -> None:
    wide, narrow = (band_at(times, "sgd", update=1.0, output=1.0) for times in (2, 1))
    outputs = [each for each in narrow.series if each.quantity != UPDATE]
    band = of_widths([narrow.model_copy(update={"series": outputs}), wide])
    assert {each.exponent for each in band.series} == {None}
    band.write(tmp_path / "band.json")
    assert Band.read(tmp_path / "band.json") == band


@pytest.mark.slow
def test_a_ladder_of_widths_leaves_a_band(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of real runs; a target that takes it is told what its updates may be."""
    keys: dict[str, Any] = {
        "optimizer__name": "sgd",
        "model__num_query_groups": 4,
        "base__num_query_groups": 2,
        "hparams__weight_decay": 0.0,
        "training__train_steps": 8,
        "training__global_batch_size": 4,
        "training__micro_batch_size": 4,
        "run__telemetry_interval": 1,
    }
    path = pipeline_file(tmp_path, **keys)
    words = [
        "--batch",
        "1",
        "--tokens",
        "1",
        "--width",
        "1,2,3,4",
        "--seeds",
        "1",
        "--values",
        "0.2,0.4,0.8",
        "--workers",
        "2",
        "--output",
    ]
    assert cli.run(["ladder", str(path), *words, str(tmp_path / "ladder")]) in (0, 1, 3)
    said = capsys.readouterr().out
    band = Band.read(tmp_path / "ladder" / "ladder.band.json")
    assert f"watch.band={tmp_path / 'ladder' / 'ladder.band.json'} takes it" in said
    assert (band.widths, band.hidden_size, len(band.runs)) == ([64, 128, 192, 256], 256, 1)
    exponents = {each.name: each.exponent for each in band.series if each.quantity == UPDATE}
    assert exponents
    assert all(each is not None and math.isfinite(each) for each in exponents.values())
    assert all(len(each.low) == POINTS for each in band.series)
    named = f"watch.band={tmp_path / 'ladder' / 'ladder.band.json'}"
    assert cli.run(["explain", str(path), "--band", "--json", named]) == 0
    rows = json.loads(capsys.readouterr().out)["band"]
    assert {row["name"] for row in rows if row["quantity"] == UPDATE} == set(exponents)
