"""A target watched by the band of its proxy: healthy runs raise no alarm, and planted faults are named by tensor."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from mup_megatron.data.prepare import prepare
from mup_megatron.model.build import parametrize
from mup_megatron.telemetry.alarms import READINGS, Alarms
from mup_megatron.telemetry.band import JUDGED, UPDATE, Band
from mup_megatron.util.errors import UserError
from tests.helpers.configs import make
from tests.helpers.distributed import RankError, Ranks
from tests.telemetry import alarm_bodies
from tests.telemetry.alarm_bodies import EMBEDDING, FC1, QKV

# Four times as wide as the proxy, with heads of the same size.
GROWN: dict[str, Any] = {
    "model": {
        "num_layers": 2,
        "hidden_size": 128,
        "ffn_hidden_size": 256,
        "num_attention_heads": 8,
        "num_query_groups": 8,
        "kv_channels": 16,
    },
    "base": {"hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 2, "num_query_groups": 2},
}
STEPS, EVERY, BEGINS = 60, 3, 20
KEYS: dict[str, Any] = {
    "training__train_steps": STEPS,
    "training__lr_warmup_steps": 6,
    "training__micro_batch_size": 8,
    "run__telemetry_interval": EVERY,
    "run__audit": "off",  # it would end what is wrong from the first step on
    "parallel__zero_stage": 0,
}


def config_of(folder: Path, architecture: str, **changed: Any) -> Any:
    config = make(GROWN, architecture, **{**KEYS, "run__dir": str(folder), **changed})
    prepare(config)
    return config


BANDS: dict[str, Path] = {}


@pytest.fixture(scope="module")
def bands(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of three runs of the proxy, by architecture; made once for all files that have the fixture."""

    def of(architecture: str) -> Path:
        if architecture not in BANDS:
            folder = tmp_path_factory.mktemp(architecture)
            ranks.run(1, alarm_bodies.band, config=config_of(folder, architecture), folder=folder, seeds=(11, 12, 13))
            BANDS[architecture] = folder / "transfer.band.json"
        return BANDS[architecture]

    return of


def alarms_of(
    ranks: Ranks, folder: Path, bands: Any, architecture: str, seed: int = 3, changed: Any = None, **planted: Any
) -> list[dict[str, Any]]:
    keys = {"run__seed": seed, "watch__band": str(bands(architecture)), **(changed or {})}
    config = config_of(folder / "target", architecture, **keys)
    return ranks.run(1, alarm_bodies.target, config=config, **planted)[0]


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 11))])
@pytest.mark.parametrize("architecture", ["gpt3", pytest.param("llama", marks=pytest.mark.slow)])
def test_a_healthy_run_raises_no_alarm(ranks: Ranks, tmp_path: Path, bands: Any, architecture: str, seed: int) -> None:
    assert alarms_of(ranks, tmp_path, bands, architecture, seed) == []


NAMED: dict[str, tuple[str, set[str]]] = {
    "matrices at twice the rate": (FC1, {"rate"}),
    "matrices at half the rate": (FC1, {"rate"}),
    "the embedding at four times the rate": (EMBEDDING, {"rate"}),
    "a frozen matrix": (FC1, {UPDATE}),
    "queries and keys eight times as large": (
        QKV.replace("linear_qkv.weight", "core_attention"),
        {"largest logit", "attention entropy"},
    ),
    "a matrix of a hundredth": (FC1.replace(".linear_fc1.weight", ""), {"output rms"}),
}
QUICK_FAULTS = ["matrices at twice the rate"]  # a frozen matrix is in tests/report/test_live.py


@pytest.mark.parametrize("architecture", ["gpt3", pytest.param("llama", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK_FAULTS)) for name in NAMED]
)
def test_a_planted_fault_is_named(ranks: Ranks, tmp_path: Path, bands: Any, architecture: str, fault: str) -> None:
    """The tensor, or the module behind it, with the right quantity, within 50 steps."""
    name, quantities = NAMED[fault]
    alarms = alarms_of(ranks, tmp_path, bands, architecture, fault=fault, begins=BEGINS)
    of_it = [alarm for alarm in alarms if alarm["name"] == name]
    assert {alarm["quantity"] for alarm in of_it} >= quantities
    assert all(BEGINS < alarm["since"] <= alarm["step"] <= BEGINS + 50 for alarm in of_it)
    if "rate" in fault:  # whatever has another rate than the table, and nothing else, is named at once
        exact = [alarm for alarm in alarms if alarm["quantity"] == "rate"]
        assert {alarm["step"] for alarm in exact} == {BEGINS + 1}
        config = config_of(tmp_path, architecture)
        tensors = parametrize(config, prepare(config).vocab_size).tensors
        same = {each for each, row in tensors.items() if row.group == tensors[name].group}
        assert {alarm["name"] for alarm in exact} == same


@pytest.mark.parametrize("architecture", ["gpt3", pytest.param("llama", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("rule", "quantity"),
    [
        *(pytest.param(f"{which}_rate", "rate", marks=pytest.mark.slow) for which in ("hidden", "embedding")),
        ("decay", "decay"),
    ],
)
def test_a_rule_that_the_optimizer_lacks_is_named(
    ranks: Ranks, tmp_path: Path, bands: Any, architecture: str, rule: str, quantity: str
) -> None:
    """At the first reading whose rate is not 0."""
    alarms = alarms_of(ranks, tmp_path, bands, architecture, broken=rule)
    assert {alarm["step"] for alarm in alarms if alarm["quantity"] == quantity} == {EVERY}


def test_a_rank_with_other_weights_is_named(ranks: Ranks, tmp_path: Path, bands: Any) -> None:
    """Of two data-parallel ranks, at the first reading behind it; the other tensors follow in the steps after it."""
    keys: dict[str, Any] = {"run__seed": 3, "watch__band": str(bands("gpt3")), "training__micro_batch_size": 4}
    keys["parallel__tensor_model_parallel_size"] = 1
    config = config_of(tmp_path / "target", "gpt3", **keys)
    alarms, _ = ranks.run(2, alarm_bodies.target, config=config, fault="one rank with another matrix", begins=BEGINS)
    apart = [alarm for alarm in alarms if alarm["quantity"] == "copies apart"]
    assert [(alarm["name"], alarm["step"]) for alarm in apart][:1] == [(FC1, BEGINS + 1)]
    assert {alarm["step"] for alarm in apart} == {BEGINS + 1}


@pytest.mark.slow
def test_a_shard_of_noise_is_noticed(ranks: Ranks, tmp_path: Path, bands: Any) -> None:
    """The loss jumps in its first steps, whether they are read or not."""
    alarms = alarms_of(ranks, tmp_path, bands, "gpt3", fault="a shard of noise", begins=BEGINS + 1)
    jumps = [alarm for alarm in alarms if alarm["name"] == "run"]
    assert [(alarm["quantity"], alarm["since"], alarm["step"]) for alarm in jumps][:1] == [
        ("loss", BEGINS + 2, BEGINS + 4)
    ]
    assert "it jumped" in jumps[0]["cause"]


@pytest.mark.slow
def test_it_stops_behind_a_checkpoint(ranks: Ranks, tmp_path: Path, bands: Any) -> None:
    """`watch.action: stop`; with `warn` the same run goes on to its end."""
    fault: dict[str, Any] = {"fault": "matrices at twice the rate", "begins": BEGINS}
    with pytest.raises(RankError, match="Alarmed: saved step 23"):  # told behind 22, agreed on behind 23
        alarms_of(ranks, tmp_path, bands, "gpt3", changed={"watch__action": "stop"}, **fault)
    assert (tmp_path / "target" / "checkpoints" / "step_00000023" / "mup.json").exists()
    went_on = alarms_of(ranks, tmp_path, bands, "gpt3", changed={"watch__action": "warn"})
    assert [alarm["step"] for alarm in went_on] == [21] * len(went_on)  # those before it stopped are kept
    assert went_on


def test_a_band_that_is_none(ranks: Ranks, tmp_path: Path, bands: Any) -> None:
    path = tmp_path / "other.json"
    for text, said in (("{}", "format: None, expected 1"), (json.dumps({"format": 1}), "is no band")):
        path.write_text(text)
        with pytest.raises(UserError, match=said):
            Band.read(path)
    with pytest.raises(RankError, match=r"other\.json: is no band"):
        alarms_of(ranks, tmp_path, bands, "gpt3", changed={"watch__band": str(path)})


def test_a_series_is_said_once_and_again_when_it_was_well(bands: Any) -> None:
    config = config_of(Path("unused"), "gpt3")
    table = parametrize(config, prepare(config).vocab_size)
    band = Band.read(bands("gpt3")).on(table)
    alarms, module = Alarms(table, band), "decoder.layers.0.mlp"
    bounds = band(module, "output rms", 0.5)
    assert bounds is not None

    def said(*values: float) -> list[int]:
        return [len(alarms.see(STEPS // 2, {(module, "output rms"): value}, 0.5)) for value in values]

    wrong = bounds.high * 1.01
    assert said(*[wrong] * (READINGS + 2)) == [0] * (READINGS - 1) + [1, 0, 0]
    assert said(*[bounds.expected] * READINGS, *[wrong] * READINGS) == [0] * (2 * READINGS - 1) + [1]
    assert said(math.nan) == [0]  # it has been said


def test_far_outside_is_said_at_once(bands: Any) -> None:
    """Ten times outside, on either side; what is less so must be so in three readings. So must an update."""
    config = config_of(Path("unused"), "gpt3")
    table = parametrize(config, prepare(config).vocab_size)
    band, module = Band.read(bands("gpt3")).on(table), "decoder.layers.0.mlp"
    bounds = band(module, "output rms", 0.5)
    assert bounds is not None
    for value, said in ((bounds.low / 11, 1), (bounds.low / 9, 0), (bounds.high * 9, 0), (bounds.high * 11, 1)):
        assert len(Alarms(table, band).see(STEPS // 2, {(module, "output rms"): value}, 0.5)) == said
    update = band(FC1, UPDATE, 0.5)
    assert update is not None
    found = {(FC1, "update over weight"): update.high * 50, (FC1, "weight rms"): 1.0, ("run", "schedule"): 0.5}
    assert Alarms(table, band).see(STEPS // 2, found, 0.5) == []


def test_a_band_of_one_run_is_wider(bands: Any) -> None:
    """25 times the proxy's instead of 5, for nobody knows how far seeds are apart."""
    config = config_of(Path("unused"), "gpt3")
    table = parametrize(config, prepare(config).vocab_size)
    band, module = Band.read(bands("gpt3")), "decoder.layers.0.mlp"
    one = band.model_copy(update={"runs": band.runs[:1]})
    three, single = (each.on(table)(module, "output rms", 0.5) for each in (band, one))
    assert three is not None
    assert single is not None
    assert (single.low, single.high) == pytest.approx((three.low / 5, three.high * 5))


def test_layers_at_the_same_share_of_the_depth(bands: Any) -> None:
    """Of three layers the middle one is the proxy's first of two, as the share is rounded to an even number."""
    deep = make({**GROWN, "model": {**GROWN["model"], "num_layers": 3}}, "gpt3", **KEYS)
    band = Band.read(bands("gpt3"))
    on = band.on(parametrize(deep, prepare(deep).vocab_size))
    series = {each.name: each for each in band.series if each.quantity == "output rms"}
    for layer, of_proxy in ((0, 0), (1, 0), (2, 1)):
        bounds = on(f"decoder.layers.{layer}.mlp", "output rms", 1.0)
        assert bounds is not None
        assert bounds.high == pytest.approx(5 * series[f"decoder.layers.{of_proxy}.mlp"].high[-1])


def test_an_update_goes_as_the_rate(bands: Any) -> None:
    """A matrix that is four times as wide has a quarter of the rate; the embedding the same."""
    config = config_of(Path("unused"), "gpt3")
    band = Band.read(bands("gpt3"))
    on = band.on(parametrize(config, prepare(config).vocab_size))
    series = {each.name: each for each in band.series if each.quantity == UPDATE}
    for name, ratio in ((FC1, 1 / 4), (EMBEDDING, 1.0)):
        bounds = on(name, UPDATE, 1.0)
        assert bounds is not None
        assert bounds.high == pytest.approx(5 * ratio * series[name].high[-1])


def test_the_page_has_the_bounds(repository: Path) -> None:
    """docs/watching.md, each as the code has it."""
    rows = re.findall(r"^\| `([a-z ]+)` \|(.*)\|(.*)\|$", (repository / "docs/watching.md").read_text(), re.M)

    def factor(cell: str) -> float:
        return float(re.sub(r"^1/", "", cell.split()[0])) if cell.strip() else math.inf

    bounds = {name: (factor(low), factor(high)) for name, low, high in rows if "proxy" in low + high}
    assert bounds == JUDGED


@pytest.mark.parametrize("fault", ["a matrix without bounds", "a matrix with one infinity"])
def test_the_first_module_that_is_no_number_is_named(ranks: Ranks, tmp_path: Path, bands: Any, fault: str) -> None:
    """Of a run that ends with it: somebody wrote infinity into a matrix before step 21, which is read."""
    with pytest.raises(RankError, match=r"Diverged: loss is nan at step 21"):
        alarms_of(ranks, tmp_path, bands, "gpt3", fault=fault, begins=BEGINS)
    lines = (tmp_path / "target" / "alarms.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["name"] == "decoder.layers.1.mlp.linear_fc1"
    assert json.loads(lines[0])["cause"] == "the first module whose output is no number is named first"


def test_decay_of_a_tensor_that_the_table_does_not_decay() -> None:
    """A norm's gain, whose group decays it: said at once, and of nothing else."""
    config = config_of(Path("unused"), "gpt3")
    table, gain = parametrize(config, prepare(config).vocab_size), "decoder.final_layernorm.weight"
    found = {(gain, "rate"): 0.5 * table.tensors[gain].lr, (gain, "decay"): 1e-4}
    (alarm,) = Alarms(table, None).see(10, found, 0.5)
    assert (alarm.name, alarm.quantity, alarm.high, alarm.cause) == (gain, "decay", 0.0, "it should be 0")
    assert "more than 0" in alarm.line


def said(changed: dict[str, Any], found: dict[tuple[str, str], float], readings: int = READINGS) -> list[Any]:
    """What some equal readings say without a band."""
    config = config_of(Path("unused"), "gpt3", **changed)
    alarms = Alarms(parametrize(config, prepare(config).vocab_size), None)
    return [alarm for step in range(readings) for alarm in alarms.see(STEPS // 2 + step, found, 0.5)]


def test_predictions_that_the_loss_leaves_out_may_stand() -> None:
    """A layer of multi-token prediction whose loss counts for nothing; where it counts, it must move."""
    name = "mtp.layers.0.eh_proj.weight"
    still = {(name, "update over weight"): 0.0, (name, "weight rms"): 1.0, ("run", "schedule"): 0.5}
    mtp = {"model__mtp_num_layers": 1}
    assert said({**mtp, "model__mtp_loss_scaling_factor": 0.0}, still) == []
    (alarm,) = said({**mtp, "model__mtp_loss_scaling_factor": 0.1}, still)
    assert (alarm.name, alarm.quantity, alarm.value) == (name, UPDATE, 0.0)


def test_a_gradient_that_is_no_number_is_told_as_that() -> None:
    """At once, and before what it made of weights; beside an output, the output is told."""
    gradient, weight = (FC1, "gradient rms"), (EMBEDDING, "weight rms")
    (alarm,) = said({}, {gradient: math.nan}, 1)
    assert (alarm.name, alarm.quantity) == gradient
    assert alarm.cause == "a gradient is no number, although outputs are; it comes from modules behind it"
    (alarm,) = said({}, {gradient: math.inf, weight: math.nan}, 1)
    assert (alarm.name, alarm.quantity) == weight
    assert alarm.cause == "a weight is no number, although outputs were"
    output = ("decoder.layers.0.mlp", "output rms")
    (alarm,) = said({}, {gradient: math.inf, output: math.nan}, 1)
    assert (alarm.name, alarm.quantity) == output


def test_copies_that_are_no_numbers_are_told_beside_the_outputs() -> None:
    """One rank's infinity; what is not said in that reading may be said in the next."""
    copies, output, decay = (FC1, "copies apart"), ("decoder.layers.0.mlp", "output rms"), (FC1, "decay")
    found = {copies: math.inf, output: math.nan, decay: 1.0, (FC1, "rate"): 1e-3}
    config = config_of(Path("unused"), "gpt3")
    alarms = Alarms(parametrize(config, prepare(config).vocab_size), None)
    first = [(alarm.name, alarm.quantity) for alarm in alarms.see(10, found, 0.5)]
    assert first == [copies, output]
    assert decay in [(alarm.name, alarm.quantity) for alarm in alarms.see(13, found, 0.5)]


def test_gradients_near_epsilon_are_the_cause(bands: Any) -> None:
    """Updates a tenth of the proxy's: epsilon is the cause where gradients are within ten times of it."""
    config = config_of(Path("unused"), "gpt3")
    table = parametrize(config, prepare(config).vocab_size)
    band = Band.read(bands("gpt3")).on(table)
    bounds, eps = band(FC1, UPDATE, 0.5), table.tensors[FC1].eps
    assert bounds is not None
    assert eps is not None
    for gradient, cause in ((5 * eps, f"near epsilon ({eps:.2g})"), (20 * eps, "its gradients, epsilon, or the data")):
        found = {
            (FC1, "update over weight"): 0.05 * bounds.expected,
            (FC1, "weight rms"): 1.0,
            (FC1, "gradient rms"): gradient,
            ("run", "schedule"): 0.5,
        }
        alarms = Alarms(table, band)
        (alarm,) = [alarm for step in range(READINGS) for alarm in alarms.see(STEPS // 2 + step, found, 0.5)]
        assert alarm.quantity == UPDATE
        assert cause in alarm.cause
