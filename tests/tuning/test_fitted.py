"""Rules whose exponents are a ladder's: read, applied, written into the record, refused where they do not hold."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from mup_megatron import cli
from mup_megatron.config import Config, derive, load_config
from mup_megatron.megatron_training.family import check_family
from mup_megatron.model.build import parametrize
from mup_megatron.parallel.layout import resolve_layout
from mup_megatron.rules import horizon
from mup_megatron.tuning import decide
from mup_megatron.tuning.family import digest, digested
from mup_megatron.tuning.fitted import Fitted, ladder_of, settled, told
from mup_megatron.tuning.predicted import in_words, predicted
from mup_megatron.tuning.record import TransferRecord, write_record
from mup_megatron.tuning.record_ladder import keep
from mup_megatron.tuning.recording import make_record
from mup_megatron.tuning.space import proxy_config, values_of
from mup_megatron.util.errors import ConfigError, UserError
from mup_megatron.util.progress import Progress
from tests.helpers.configs import MIXED, make, pipeline_file
from tests.helpers.ladders import ladder_file
from tests.helpers.records import BUDGET, study_of

FITTED = {"parametrization.batch": "fitted", "parametrization.tokens": "fitted"}
TRIALS = {"tuning.global_batch_size": 8, "tuning.train_steps": 200}


def config_of(**keys: Any) -> Config:
    """Sequences of 32 tokens, 8 a step, 200 steps, as the ladder's own; with dotted keys replaced."""
    return derive(make(MIXED, "gpt3", training__train_steps=200, data__split="98,2,0"), keys)


def target_of(path: Path | None, **keys: Any) -> Config:
    """Twice the ladder's own batch and four times its tokens, from trials of its own size."""
    larger = {"training.global_batch_size": 16, "training.train_steps": 400}
    named = {"tuning.ladder": None if path is None else str(path)}
    return config_of(**{**FITTED, **TRIALS, **larger, **named, **keys})


@pytest.fixture(scope="module")
def ladder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ladder_file(tmp_path_factory.mktemp("ladder") / "ladder.json", config_of())


def taken(config: Config) -> Config:
    return settled(config, ladder_of(config, None))


def with_exponents(batch: float, tokens: float) -> Config:
    return target_of(None, **{"parametrization.batch": f"fitted:{batch}", "parametrization.tokens": f"fitted:{tokens}"})


# --- the rule ---


def test_by_hand() -> None:
    """2 times the batch and 4 times the tokens: 2^0.4 · 4^-0.3 = 2^-0.2 = 0.87055 on the rate, on nothing else."""
    config = with_exponents(0.4, -0.3)
    assert (config.batch_ratio, config.tokens_ratio) == (2, 4)
    found = horizon.horizon(config)
    assert found.lr == pytest.approx(0.8705506, abs=1e-7)
    assert (found.eps, found.weight_decay, found.forgetting) == (1.0, 1.0, 1.0)
    assert horizon.moved(config) == {"lr": (0.008, pytest.approx(0.008 * 0.8705506, rel=1e-7))}
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    plain = parametrize(target_of(None, **dict.fromkeys(FITTED, "none")), 256).tensors[name]
    tensor = parametrize(config, 256).tensors[name]
    assert tensor.lr_multiplier / plain.lr_multiplier == pytest.approx(0.8705506, abs=1e-7)


def test_at_ratio_one_it_is_nothing() -> None:
    """Every row of the table to the last bit; control: at another ratio it is not."""
    rule = {"parametrization.batch": "fitted:0.4123", "parametrization.tokens": "fitted:-0.3071"}
    assert parametrize(config_of(**rule), 256).tensors == parametrize(config_of(), 256).tensors
    longer = {"tuning.train_steps": 100}
    assert parametrize(config_of(**rule, **longer), 256).tensors != parametrize(config_of(**longer), 256).tensors


@pytest.mark.parametrize("middle", [(16, 200), (8, 1600), (64, 50)])
def test_one_step_is_two(middle: tuple[int, int]) -> None:
    """From trials of 8 sequences and 200 steps to a target of 32 and 800, at once or by way of a run in between."""
    rule = {"parametrization.batch": "fitted:0.4123", "parametrization.tokens": "fitted:-0.3071"}

    def factor(trial: tuple[int, int], run: tuple[int, int]) -> float:
        sizes = {"tuning.global_batch_size": trial[0], "tuning.train_steps": trial[1]}
        sizes |= {"training.global_batch_size": run[0], "training.train_steps": run[1]}
        return horizon.horizon(config_of(**rule, **{**sizes, "training.micro_batch_size": 1})).lr

    once = factor((8, 200), (32, 800))
    assert factor((8, 200), middle) * factor(middle, (32, 800)) == pytest.approx(once, rel=1e-12)


def test_without_a_ladder_it_is_refused() -> None:
    config = target_of(None)
    sentence = (
        "parametrization.batch: fitted takes its exponent from a ladder, and there is none; expected tuning.ladde"
    )
    with pytest.raises(ConfigError, match=sentence):
        parametrize(config, 256)
    # Control: with a number, and without the rule, it is not.
    parametrize(with_exponents(0.4, -0.3), 256)
    parametrize(target_of(None, **dict.fromkeys(FITTED, "none")), 256)


def test_trials_do_not_see_it(tmp_path: Path) -> None:
    """Neither a trial's config nor the family knows whether the number is known already; `power` is of the family."""
    trials = [
        proxy_config(config, values_of(config), seed=1, directory=tmp_path)
        for config in (target_of(None), with_exponents(0.4, -0.3), target_of(None, **dict.fromkeys(FITTED, "none")))
    ]
    assert trials[0] == trials[1]
    assert trials[0].parametrization == trials[2].parametrization
    families = {digest(digested(config)) for config in (target_of(None), with_exponents(0.4, -0.3), config_of())}
    assert len(families) == 1
    assert digest(digested(config_of(**{"parametrization.batch": "power:0.4"}))) not in families


# --- what is taken of a ladder ---


def test_the_ladder_says_the_number(ladder: Path) -> None:
    config = taken(target_of(ladder))
    found = ladder_of(config, None)
    assert found is not None
    exponents = json.loads(ladder.read_text())["rate"]
    for axis in ("batch", "tokens"):
        assert getattr(config.parametrization, axis) == f"fitted:{exponents[axis]['exponent']:.4f}"
        assert exponents[axis]["exponent"] == pytest.approx({"batch": 0.4, "tokens": -0.3}[axis], abs=0.05)
        assert found.exponents[axis].error == exponents[axis]["error"] > 0
    # 8 sequences of 32 tokens; 200 steps of them; MIXED's own width.
    span = found.as_json()["span"]
    assert span["batch"] == {"smallest": 256, "largest": 1024, "own": 256, "factor": 4.0}
    assert span["tokens"] == {"smallest": 51_200, "largest": 409_600, "own": 51_200, "factor": 8.0}
    assert (span["width"]["own"], span["layers"]["own"]) == (96, 2)
    assert taken(config) == config  # what it says already stays
    told_ = told(config, found)
    assert len(told_) == 2
    assert told_[0].startswith("batch: the rate goes as its ratio to the power 0.")
    # Twice the batch: the error of one octave is the exponent's. Four times the tokens: two octaves.
    error = exponents["tokens"]["error"]
    assert told_[1].endswith(f"; here × {4 ** exponents['tokens']['exponent']:.3g} ± {2 * error:.2f} octaves")


def test_horizon_puts_it_beside_the_published_ones(
    ladder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Twice the batch and four times the tokens: 2^0.4 · 4^-0.3 = 0.87, whatever rule the config has itself."""
    source = tmp_path / "run.yaml"
    source.write_text(yaml.safe_dump(target_of(ladder, **dict.fromkeys(FITTED, "none")).model_dump()))
    assert cli.run(["horizon", str(source)]) == 0
    said = capsys.readouterr().out
    row = next(line for line in said.splitlines() if "your ladder" in line)
    assert f"your ladder, {ladder}: passed (batch ± " in row
    assert row.startswith("batch: power:0.")
    assert float(row.split()[4]) == pytest.approx(0.8706, rel=0.04)
    assert "take your ladder's if it passed" in said
    assert cli.run(["horizon", str(source), "tuning.ladder=null"]) == 0
    said = capsys.readouterr().out
    assert "your ladder" not in said
    assert "the default is none; mup-megatron ladder CONFIG measures your own" in said


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        # 128 sequences of 32 tokens are 4 times the ladder's 1024 tokens a step; 264 are 8.25 times.
        (
            {"training.global_batch_size": 264},
            r"target's tokens of a step, 8,448, lie 8.25 times \(3.0 octaves\) above",
        ),
        ({"training.train_steps": 7000}, r"the target's tokens of the run, 3,584,000, lie 8.75 times \(3.1 octaves\)"),
        ({"training.train_steps": 12}, r"target's tokens of the run, 6,144, lie 8.33 times \(3.1 octaves\) below the"),
        ({"tuning.train_steps": 20}, r"a trial's tokens of the run, 5,120, lie 10 times \(3.3 octaves\) below the"),
    ],
)
def test_far_beyond_the_ladder_is_refused(ladder: Path, keys: dict[str, Any], sentence: str) -> None:
    sizes = {"training.micro_batch_size": 1, "tuning.micro_batch_size": 1}
    with pytest.raises(ConfigError, match=f"{sentence}.*or tuning.allow_extrapolated_ladder: true"):
        taken(target_of(ladder, **sizes, **keys))
    allowed = taken(target_of(ladder, **sizes, **keys, **{"tuning.allow_extrapolated_ladder": True}))
    said = told(allowed, ladder_of(allowed, None))
    assert any(line.startswith("extrapolated, ") for line in said)


def test_a_little_beyond_is_said(ladder: Path) -> None:
    """128 sequences are 4096 tokens, 4 times the largest; a width of 192 is twice the ladder's."""
    keys = {"training.global_batch_size": 128, "training.micro_batch_size": 1, "training.train_steps": 100}
    config = taken(target_of(ladder, **keys, **{"model.hidden_size": 192, "model.num_attention_heads": 16}))
    assert told(config, ladder_of(config, None))[2:] == [
        "extrapolated, the target's tokens of a step, 4,096, lie 4 times (2.0 octaves) above the ladder's largest, "
        "1,024",
        "extrapolated, the target's width, 192, lies 2 times (1.0 octaves) above the ladder's largest, 96",
    ]
    # At 8 times it is taken, and no rule that is not fitted is refused.
    taken(target_of(ladder, **{**keys, "training.global_batch_size": 256}))
    further = {**keys, "training.global_batch_size": 512, "training.train_steps": 20}
    taken(target_of(ladder, **further, **{"parametrization.batch": "none"}))
    with pytest.raises(ConfigError, match="lie 16 times"):
        taken(target_of(ladder, **further))


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (
            {"moved": {"octaves": 0.6}},
            r"failed \(batch-4-tokens-8-width-1: the best rate is \+0.* octaves from the predicted one\)",
        ),
        ({"verdict": "undecided"}, "is undecided"),
    ],
)
def test_a_ladder_that_did_not_pass_is_refused(tmp_path: Path, said: dict[str, Any], sentence: str) -> None:
    path = ladder_file(tmp_path / "ladder.json", config_of(), **said)
    with pytest.raises(ConfigError, match=f"a ladder that {sentence}: .* passed, or tuning.allow_failed_ladder: true"):
        taken(target_of(path))
    allowed = taken(target_of(path, **{"tuning.allow_failed_ladder": True}))
    assert not allowed.parametrization.unfitted
    assert any(
        line.startswith(f"the ladder {sentence.partition(' ')[0]}") for line in told(allowed, ladder_of(allowed, None))
    )


def test_another_family_is_refused(ladder: Path, tmp_path: Path) -> None:
    sentence = "belongs to another family than .*optimizer.eps: 1e-08 in the ladder, 1e-06 in the config"
    with pytest.raises(UserError, match=sentence):
        taken(target_of(ladder, **{"optimizer.eps": 1e-6}))
    # Controls: other rules over batch and tokens are none of the ladder's family, whose runs leave them out.
    config = config_of(**{"parametrization.tokens": "power:-0.5", "parametrization.weight_decay": "timescale"})
    timescale = {"parametrization.weight_decay": "timescale"}
    taken(target_of(ladder_file(tmp_path / "ladder.json", config), **timescale))
    taken(target_of(ladder, **timescale))


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"family": None}, "does not say of which family it is"),
        ({"digest": "0"}, "does not say of which family it is, or its digest does not match"),
        ({"rate": None}, "the ladder found no law of the rate; expected one that did"),
        ({"rate": []}, "not a ladder: it names no rate"),
        ({"over": "weight_decay"}, "a ladder over weight_decay, and a config takes exponents of the rate alone"),
        ({"verdict": "great"}, "verdict: expected what mup-megatron ladder writes there"),
        ({"rate": {"tokens": {"exponent": 0.1, "error": 0.1}}}, "has rungs of one batch alone; expected a ladder with"),
        ({"rate": {"batch": {"exponent": "1"}}}, "exponents.batch.exponent: expected what"),
        ({"rate": {"batch": {"exponent": 1e300, "error": 0.1}}}, "exponents.batch.exponent: expected what"),
        ({"loss": {"terms": {}}}, "loss: expected what"),
        ({"span": {"batch": {"smallest": 0}}}, "span.batch.smallest: expected what"),
    ],
    ids=str,
)
def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: dict[str, Any], sentence: str) -> None:
    path = ladder_file(tmp_path / "ladder.json", config_of(), **changed)
    with pytest.raises(UserError, match=sentence):
        taken(target_of(path))
    source = tmp_path / "run.yaml"
    source.write_text(yaml.safe_dump(target_of(path).model_dump()))
    assert cli.run(["plan", str(source)]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_no_such_ladder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tuning.ladder: no such file: .*expected the ladder.json"):
        taken(target_of(tmp_path / "none.json"))
    (tmp_path / "text.json").write_text("{")
    with pytest.raises(UserError, match=r"not valid JSON; expected the ladder.json"):
        taken(target_of(tmp_path / "text.json"))


def test_a_number_that_is_not_the_ladders_is_refused(ladder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"parametrization.tokens: fitted:0.5, but .* says fitted:-0.[0-9]{4}; expect"
    ):
        taken(target_of(ladder, **{"parametrization.tokens": "fitted:0.5"}))


# --- the record ---


def record_in(folder: Path, config: Config) -> Path:
    """A record of values found with this config."""
    layout = resolve_layout(config, 1)
    with_numbers = config if not config.parametrization.unfitted else derive(config, dict.fromkeys(FITTED, "none"))
    table = dataclasses.replace(parametrize(with_numbers, 375), config=config)
    made = make_record(table, layout, {"lr": 0.004}, study=study_of(), budget=BUDGET, ladder=ladder_of(config, None))
    write_record(folder / "transfer.json", made)
    return folder / "transfer.json"


def test_the_record_takes_and_gives_it(ladder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Written with the ladder's config, applied by a config that names none, shown before and after."""
    path = record_in(tmp_path, taken(target_of(ladder)))
    stored = json.loads(path.read_text())
    rate = json.loads(ladder.read_text())["rate"]
    for axis in ("batch", "tokens"):
        assert stored["ladder"]["exponents"][axis] == rate[axis]
        assert stored["rules"][axis] == f"fitted:{rate[axis]['exponent']:.4f}"
    assert (stored["ladder"]["verdict"], stored["ladder"]["span"]["tokens"]["factor"]) == ("passed", 8.0)
    assert stored["ladder"]["loss"] == json.loads(ladder.read_text())["loss"]

    config = target_of(None, **{"run.dir": str(tmp_path)})
    transferred, record = decide.apply_record(config)
    assert transferred.parametrization.batch == stored["rules"]["batch"]
    factor = 2 ** rate["batch"]["exponent"] * 4 ** rate["tokens"]["exponent"]
    source, output = tmp_path / "run.yaml", tmp_path / "target.yaml"
    source.write_text(yaml.safe_dump(config.model_dump()))
    assert cli.run(["transfer", str(source), "--json", "--output", str(output)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["moved"] == {"lr": [0.004, pytest.approx(0.004 * factor, rel=1e-4)]}
    assert load_config(output).parametrization.tokens == stored["rules"]["tokens"]
    on_target = shown["becomes"]["tensors"]["embedding.word_embeddings.weight"]
    assert on_target["lr"] == pytest.approx(0.004 * factor, rel=1e-4)
    assert cli.run(["transfer", str(source)]) == 0
    out = capsys.readouterr().out
    assert "over batch and tokens: lr 0.004 → 0.0034" in out
    assert "tokens: the rate goes as its ratio to the power -0.3" in " ".join(out.split())
    # The record's own ladder is asked as the file is: too far, another number.
    with pytest.raises(ConfigError, match=r"lie 17.5 times"):
        decide.apply_record(derive(config, {"training.train_steps": 14_000}))
    with pytest.raises(ConfigError, match=r"fitted:0.1, but .* says fitted:0"):
        decide.apply_record(derive(config, {"parametrization.batch": "fitted:0.1"}))
    assert TransferRecord.read(path, config) == record


def test_a_record_without_a_ladder(tmp_path: Path, ladder: Path) -> None:
    """Tuned before there was a ladder: the record says `fitted` and shows no factor; the target is refused."""
    config = target_of(None, **{"run.dir": str(tmp_path)})
    stored = json.loads(record_in(tmp_path, config).read_text())
    assert "ladder" not in stored
    assert stored["rules"]["batch"] == "fitted"
    assert stored["target"]["becomes"]["tensors"]["embedding.word_embeddings.weight"]["lr"] == 0.008
    transferred, _ = decide.apply_record(config)
    with pytest.raises(ConfigError, match="fitted takes its exponent from a ladder, and there is none"):
        parametrize(transferred, 375)
    transferred, _ = decide.apply_record(derive(config, {"tuning.ladder": str(ladder)}))
    parametrize(transferred, 375)


def test_a_record_takes_a_ladder_later(tmp_path: Path, ladder: Path) -> None:
    """`ladder --record`: the record is then what it would be, had its config named the ladder."""
    config = target_of(None, **{"run.dir": str(tmp_path)})
    path = record_in(tmp_path, config)
    before = json.loads(path.read_text())
    assert (before["rules"]["batch"], before.get("ladder")) == ("fitted", None)
    # The ladder's own config has another batch and length than the trials.
    said = keep(path, config_of(**FITTED, **{"training.train_steps": 100}), ladder)
    assert said == f"{path}: holds the ladder now; configs of its family need not name it (tuning.ladder)"
    (tmp_path / "named").mkdir()
    named = json.loads(record_in(tmp_path / "named", taken(target_of(ladder))).read_text())
    after = json.loads(path.read_text())
    assert {key: after[key] for key in ("ladder", "rules")} == {key: named[key] for key in ("ladder", "rules")}
    changed = ("ladder", "rules", "checksum")
    assert {**before, **{key: after[key] for key in changed}} == after
    transferred, _ = decide.apply_record(config)
    assert transferred.parametrization.batch == named["rules"]["batch"]


def test_what_a_record_does_not_take(tmp_path: Path, ladder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = target_of(None, **{"run.dir": str(tmp_path)})
    path = record_in(tmp_path, config)
    before = path.read_text()
    failed = ladder_file(tmp_path / "failed.json", config_of(), moved={"octaves": 0.6})
    assert keep(path, config, failed).startswith(f"{path}: stays as it was, since the ladder did not pass")
    assert path.read_text() == before
    with pytest.raises(UserError, match=r"belongs to another family than .*base.hidden_size: 64 in the record, 32 in"):
        keep(path, derive(config, {"base.hidden_size": 32}), ladder)
    # Said before a rung is trained.
    source = tmp_path / "run.yaml"
    source.write_text(yaml.safe_dump(config.model_dump()))
    assert cli.run(["ladder", str(source), "--record", str(tmp_path / "none.json")]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "--record: no such file" in said
    assert "expected the transfer record of this family" in said
    keep(path, derive(config, {"tuning.allow_failed_ladder": True}), failed)
    assert json.loads(path.read_text())["ladder"]["verdict"] == "failed"


def test_a_script_of_megatron_training_refuses_it(tmp_path: Path, ladder: Path) -> None:
    """It would train with values for the trials' batch and length, since the family's digest leaves `fitted` out."""
    path = record_in(tmp_path, taken(target_of(ladder)))
    with pytest.raises(UserError, match=r"parametrization.batch is fitted:0\.\d+, by which its values move"):
        check_family(path, config_of())
    plain = tmp_path / "plain"
    plain.mkdir()
    check_family(record_in(plain, target_of(None, **dict.fromkeys(FITTED, "none"))), config_of())


def test_a_part_of_another_kind(tmp_path: Path, ladder: Path) -> None:
    path = record_in(tmp_path, taken(target_of(ladder)))
    changed = json.loads(path.read_text())
    del changed["checksum"]
    changed["ladder"]["exponents"]["batch"]["error"] = "small"
    write_record(path, {**changed, "checksum": digest(changed)})
    with pytest.raises(UserError, match=r"ladder.exponents.batch.error: expected what tuning writes there"):
        TransferRecord.read(path, None)


def test_as_json_is_read_again(ladder: Path) -> None:
    found = ladder_of(target_of(ladder), None)
    assert found is not None
    assert Fitted.model_validate(json.loads(json.dumps(found.as_json()))) == found


# --- the loss ---


def test_the_loss_is_predicted(ladder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The rungs' loss is 2 + 2 · tokens^-0.2, whatever the batch: at 4 times the tokens 2 + 2 · 0.757858 = 3.515717."""
    config = taken(target_of(ladder))
    told_ = predicted(config, ladder_of(config, None))
    assert told_ is not None
    assert told_["loss"] == pytest.approx(3.515717, abs=2e-3)
    assert 0 < told_["error"] < 0.02
    # Control: as many tokens as the ladder's own are told another loss, 2 + 2.
    short = taken(target_of(ladder, **{"training.train_steps": 100}))
    assert (predicted(short, ladder_of(short, None)) or {})["loss"] == pytest.approx(4.0, abs=5e-3)
    path = record_in(tmp_path, config)
    assert json.loads(path.read_text())["target"]["predicted"] == told_
    source = tmp_path / "run.yaml"
    source.write_text(yaml.safe_dump(target_of(None, **{"run.dir": str(tmp_path)}).model_dump()))
    assert cli.run(["transfer", str(source), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["predicted"] == told_
    assert any(line.startswith("predicted loss of the target: 3.51") for line in shown["remarks"])


def test_a_ladder_over_layers_predicts_another_depth(tmp_path: Path) -> None:
    """0.1 nats more per doubling of the layers: at 4 layers instead of 2, 3.515717 + 0.1."""
    family = {"base.num_layers": 2, "parametrization.depth": "completep"}
    plain = ladder_file(tmp_path / "plain.json", config_of(**family))
    found = json.loads(plain.read_text())
    law = found["loss"]
    law["terms"]["layers"] = {"value": 0.1, "error": 0.0}
    law["covariance"] = [[*row, 0.0] for row in law["covariance"]] + [[0.0] * (len(law["covariance"]) + 1)]
    deep = tmp_path / "deep.json"
    deep.write_text(json.dumps(found))
    config = taken(target_of(deep, **family, **{"model.num_layers": 4}))
    assert (predicted(config, ladder_of(config, None)) or {})["loss"] == pytest.approx(3.615717, abs=2e-3)
    # Control: a ladder of one depth says nothing of another.
    config = taken(target_of(plain, **family, **{"model.num_layers": 4}))
    assert predicted(config, ladder_of(config, None)) == {
        "why_not": "model.num_layers: 2 in the ladder, 4 in the config"
    }


def test_a_ladder_of_one_width_predicts_no_other(ladder: Path) -> None:
    """Its law has no term of width, and would give every width of the family one loss and one narrow interval."""
    config = taken(target_of(ladder))
    assert "loss" in (predicted(config, ladder_of(config, None)) or {})
    wide = taken(target_of(ladder, **{"model.hidden_size": 2 * config.model.hidden_size}))
    width = config.model.hidden_size
    assert predicted(wide, ladder_of(wide, None)) == {
        "why_not": f"width: {width} in the ladder, {2 * width} in the config"
    }


@pytest.mark.parametrize(
    ("keys", "why_not"),
    [
        ({"training.seq_length": 64}, "training.seq_length: 32 in the ladder, 64 in the config"),
        ({"data.split": "97,3,0"}, "data.split: '98,2,0' in the ladder, '97,3,0' in the config"),
        ({"data.files": ["other.txt"]}, "data.files: ['"),
    ],
)
def test_a_loss_that_is_not_comparable_is_not_predicted(ladder: Path, keys: dict[str, Any], why_not: str) -> None:
    config = taken(target_of(ladder, **keys))
    found = predicted(config, ladder_of(config, None))
    assert found is not None
    assert list(found) == ["why_not"]
    assert found["why_not"].startswith(why_not)
    assert in_words(found).startswith(f"not told by the ladder: {why_not}")


def test_another_schedule_is_told(ladder: Path) -> None:
    """The ladder's runs fall to a tenth by a cosine."""
    config = taken(target_of(ladder, **{"training.lr_schedule": "constant"}))
    found = ladder_of(config, None)
    line = "training.lr_schedule: 'cosine' in the ladder, 'constant' in the config"
    assert told(config, found)[2] == f"{line}, and the ladder's exponents are of runs under its own"
    assert predicted(config, found) == {"why_not": line}


def test_what_train_is_told(ladder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the config that `transfer` writes, by the record's ladder; nothing where there is none, or another's."""
    config = taken(target_of(ladder))
    record_in(tmp_path, config)
    numbers = {f"parametrization.{axis}": getattr(config.parametrization, axis) for axis in ("batch", "tokens")}
    target = target_of(None, **{"run.dir": str(tmp_path), "tuning.run": "never", **numbers})
    found = ladder_of(config, None)
    assert decide.told_by_a_ladder(target, Progress(True)) == {
        "predicted": predicted(config, found),
        "ladder": told(config, found),
    }
    assert "predicted loss of the target: 3.51" in capsys.readouterr().out
    assert decide.told_by_a_ladder(config, Progress(True))["predicted"] == predicted(config, found)
    capsys.readouterr()
    other = derive(target, {"base.hidden_size": 32})
    assert decide.told_by_a_ladder(other, Progress(True)) == {}
    assert "no predicted loss: " in (said := capsys.readouterr().out)
    assert "base.hidden_size" in said
    for silent in ("none", "plain"):
        folder = tmp_path / silent
        folder.mkdir()
        if silent == "plain":
            record_in(folder, target_of(None, **dict.fromkeys(FITTED, "none")))
        assert decide.told_by_a_ladder(derive(target, {"run.dir": str(folder)}), Progress(True)) == {}
        assert capsys.readouterr().out == ""


def test_predicted_beside_measured() -> None:
    told_ = {"loss": 3.5, "error": 0.02}
    assert in_words(told_) == "3.5000 (3.4600 to 3.5400, two standard errors)"
    assert in_words(told_, 3.535).endswith("; 3.5350 measured, +1.00 %, inside that interval")
    assert in_words(told_, 3.43).endswith("; 3.4300 measured, -2.00 %, outside that interval")


@pytest.mark.slow
def test_from_the_ladder_to_the_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Real runs: a ladder, then trials without its exponents, then a target of twice the batch and steps with them."""
    (tmp_path / "rungs").mkdir()
    common = {"training__global_batch_size": 4, "parallel__tensor_model_parallel_size": 1}
    rungs = pipeline_file(tmp_path / "rungs", **common)
    words = ["--batch", "1,2", "--tokens", "1,2,4", "--seeds", "1", "--workers", "2", "--values", "4e-3,8e-3,1.6e-2"]
    assert cli.run(["ladder", str(rungs), *words]) in (0, 1, 3)
    found = tmp_path / "rungs" / "run" / "ladder" / "ladder.json"
    taken_from = {
        "parametrization__batch": "fitted",
        "parametrization__tokens": "fitted",
        "tuning__ladder": str(found),
        "tuning__allow_failed_ladder": True,
        "tuning__global_batch_size": 4,
        "tuning__train_steps": 8,
    }
    larger = {"training__global_batch_size": 8, "training__train_steps": 16}
    path = pipeline_file(tmp_path, **{**common, **taken_from, **larger})
    capsys.readouterr()
    assert cli.run(["pipeline", str(path)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    rate = json.loads(found.read_text())["rate"]
    numbers = {axis: round(rate[axis]["exponent"], 4) for axis in ("batch", "tokens")}
    factor = 2 ** numbers["batch"] * 4 ** numbers["tokens"]
    run = tmp_path / "run"
    record = json.loads((run / "transfer.json").read_text())
    explained = json.loads((run / "explain.json").read_text())
    assert explained["config"]["parametrization"]["batch"] == f"fitted:{numbers['batch']:.4f}"
    before, after = explained["moved"]["lr"]
    assert (before, after) == (record["values"]["lr"], pytest.approx(before * factor, rel=1e-12))
    embedding = next(each for each in explained["parameters"] if "word_embeddings" in each["name"])
    assert embedding["lr"] == pytest.approx(after, rel=1e-12)
    trial = json.loads((run / "tuning" / "trial-000" / "explain.json").read_text())
    assert trial["config"]["parametrization"]["batch"] == "none"
    assert "lr over batch and tokens" in out
    assert out.index("predicted loss of the target:") < out.index("predicted by the ladder")
    assert json.loads((run / "plan.json").read_text())["predicted"]["loss"] == record["target"]["predicted"]["loss"]
    assert f"batch: the rate goes as its ratio to the power {rate['batch']['exponent']:.3f} ±" in out
    # The same target, trained by `train` with the config that `transfer` writes, in a folder without a plan.
    output, again = tmp_path / "target.yaml", tmp_path / "again"
    assert cli.run(["transfer", str(path), "--output", str(output)]) == 0
    capsys.readouterr()
    keys = [f"run.dir={again}", f"tuning.record={run / 'transfer.json'}", "tuning.ladder=null"]
    assert cli.run(["train", str(output), *keys]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert out.index("predicted loss of the target:") < out.index("predicted by the ladder")
    assert json.loads((again / "explain.json").read_text())["predicted"] == record["target"]["predicted"]
    assert not (again / "plan.json").exists()
    assert (
        json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["eval_loss"]
        == (json.loads((again / "metrics.jsonl").read_text().splitlines()[-1])["eval_loss"])
    )
