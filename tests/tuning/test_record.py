"""transfer.json: whole, checked, refused where it does not belong."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from mup_megatron import cli
from mup_megatron.config import Config, derive, load_config, parse_overrides
from mup_megatron.model.build import parametrize
from mup_megatron.parallel.layout import resolve_layout
from mup_megatron.tuning.decide import apply_record, refuse_untaken_record, trained_keys
from mup_megatron.tuning.family import differences, digest, digested
from mup_megatron.tuning.record import TransferRecord, write_record
from mup_megatron.tuning.recording import make_record
from mup_megatron.tuning.space import with_values
from mup_megatron.util.errors import ConfigError, UserError
from mup_megatron.util.progress import Progress
from tests.helpers.configs import MIXED, make
from tests.helpers.records import BUDGET, study_of

VALUES: dict[str, float | str] = {"lr": 0.004, "init_method_std": 0.03, "output_multiplier": 2.0}
STUDY = study_of(VALUES)


def config_in(path: Path, **overrides: Any) -> Config:
    return make(MIXED, "gpt3", run__dir=str(path), tuning__search={"lr": {"log_uniform": [1e-3, 1e-1]}}, **overrides)


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> TransferRecord:
    config = with_values(config_in(tmp_path_factory.mktemp("run")), VALUES)
    parametrization, layout = parametrize(config, 375), resolve_layout(config, 1)
    return make_record(parametrization, layout, VALUES, study=STUDY, budget=BUDGET)


def test_written_and_read(record: TransferRecord, tmp_path: Path) -> None:
    path = tmp_path / "transfer.json"
    assert TransferRecord.read(path, None) is None
    write_record(path, record)
    assert json.loads(path.read_text()) == record.as_json()
    assert TransferRecord.read(path, config_in(tmp_path)) == record
    assert [entry.name for entry in tmp_path.iterdir()] == ["transfer.json"]


def test_what_it_says(record: TransferRecord) -> None:
    assert record.values == VALUES
    assert record.target.sizes == {
        "hidden_size": 96,
        "ffn_hidden_size": 160,
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "num_layers": 2,
    }
    on_target = record.target.becomes
    # Readout: α_output / (96/64) = 2/1.5. fc2: fan-in 160 over 64, so lr 0.004 · 64/160.
    assert on_target["forward"]["readout"] == pytest.approx(4 / 3)
    assert on_target["tensors"]["decoder.layers.*.mlp.linear_fc2.weight"]["lr"] == pytest.approx(0.0016)
    assert on_target["tensors"]["embedding.word_embeddings.weight"]["init_std"] == 0.03
    assert set(record.versions) >= {"python", "torch", "megatron-core", "deepspeed", "optuna"}
    assert record.rules["weight_decay"] == "independent"


def test_train_does_not_pass_over_a_record(
    record: TransferRecord, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It takes no record's values, so it refuses to train with others, and names what takes them. Nothing is begun."""
    write_record(tmp_path / "transfer.json", record)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config_in(tmp_path).model_dump()))
    typed = ["training.train_steps=3", "run.name=a b"]
    assert cli.run(["train", str(path), *typed]) == 2
    (said,) = capfd.readouterr().err.splitlines()
    names = "hparams.lr, hparams.init_method_std, hparams.output_multiplier"
    assert f"tuning.record: {tmp_path / 'transfer.json'} has other values of {names}, which `train` does not" in said
    words = f"{path} training.train_steps=3 'run.name=a b'"
    expected = f"mup-megatron pipeline {words}, or mup-megatron train {words} tuning.run=never, which trains with"
    assert f"expected {expected} the values of hparams:" in said
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["run.yaml", "transfer.json"]


def test_what_train_takes_beside_a_record(record: TransferRecord, tmp_path: Path) -> None:
    """The record's own values, values that were typed, and what a config means that never tunes or is another model."""
    write_record(tmp_path / "transfer.json", record)
    path = tmp_path / "run.yaml"

    def ask(config: Config, *typed: str) -> str:
        path.write_text(yaml.safe_dump(config.model_dump()))
        return refuse_untaken_record(load_config(path, parse_overrides(list(typed))))

    plain = config_in(tmp_path)
    assert ask(with_values(plain, VALUES)) == ""
    ask(with_values(plain, {**VALUES, "lr": 0.1}), "hparams.lr=0.1")
    with pytest.raises(
        ConfigError, match=r"has other values of hparams\.init_method_std, hparams\.output_multiplier, "
    ):
        ask(plain, "hparams.lr=0.1")
    ask(plain, "tuning.run=never")
    named = f"tuning.record={tmp_path / 'transfer.json'}"
    with pytest.raises(ConfigError, match=r"expected .* tuning\.run=never tuning\.record=null, which trains"):
        ask(plain, "tuning.run=never", named)
    # Of another family: refused where it is named to be taken, said elsewhere. So is one that is not there.
    of_another = r"optimizer\.eps: 1e-08 in the record, 1e-06 in the config"
    assert re.match(f"not taken: .*{of_another}", ask(plain, "optimizer.eps=1e-6"))
    assert re.match(f"not taken: .*{of_another}", ask(plain, "optimizer.eps=1e-6", "tuning.run=never", named))
    with pytest.raises(UserError, match=rf"{of_another}.*; or mup-megatron train .* tuning\.record=null, which trains"):
        ask(plain, "optimizer.eps=1e-6", named)
    gone = tmp_path / "none.json"
    assert ask(plain, f"tuning.record={gone}") == f"{gone} is not there; training with the values of hparams:"
    with pytest.raises(ConfigError, match=r"has other values of hparams\.lr, "):
        ask(with_values(plain, {**VALUES, "lr": 0.1}))


def test_values_that_a_file_was_given_after_tuning_are_named(
    record: TransferRecord, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`transfer` takes the trials' value, and says both; a factor of `per_tensor` was 1 for them."""
    write_record(tmp_path / "transfer.json", record)
    path = tmp_path / "run.yaml"

    def shown(**hparams: Any) -> list[str]:
        config = config_in(tmp_path).model_dump()
        path.write_text(yaml.safe_dump(config | {"hparams": config["hparams"] | VALUES | hparams}))
        assert cli.run(["transfer", str(path), "--json"]) == 0
        remarks: list[str] = json.loads(capsys.readouterr().out)["remarks"]
        return [line for line in remarks if "as it was while tuning" in line]

    assert shown() == []
    assert shown(lr=0.5) == []  # which was tuned
    assert shown(init_method_std=0.1) == ["hparams.init_method_std: 0.03 as it was while tuning, not 0.1"]
    assert shown(per_tensor={"embedding": {"lr": 4.0}}) == [
        "hparams.per_tensor.embedding.lr: 1.0 as it was while tuning, not 4.0"
    ]
    assert cli.run(["transfer", str(path)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["lr", "0.004", "tuned"] in rows
    assert ["init_method_std", "0.03", "as", "while", "tuning"] in rows


def test_another_schedule_or_clipping_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Warm-up counts as a share of the run: 4 of 64 steps are 8 of 128, and 1 of 64 is another one (by hand).

    Of what was tuned the record has the value; and a config that agrees hears nothing.
    """
    cosine = {"lr_schedule": "cosine", "lr_warmup_steps": 4, "train_steps": 64, "clip_grad": 1.0, "min_lr_ratio": 0.1}
    given = {f"training__{name}": value for name, value in cosine.items()}

    def record_of(path: Path, search: dict[str, Any]) -> Config:
        path.mkdir()
        config = make(MIXED, "gpt3", run__dir=str(path), tuning__search=search, **given)
        layout = resolve_layout(config, 1)
        made = make_record(parametrize(config, 375), layout, VALUES, study=study_of(VALUES), budget=BUDGET)
        write_record(path / "transfer.json", made)
        return config

    def told(config: Config, **training: Any) -> list[str]:
        path = Path(config.run.dir) / "run.yaml"
        path.write_text(yaml.safe_dump(config.model_dump()))
        words = [f"training.{name}={value}" for name, value in training.items()]
        assert cli.run(["transfer", str(path), "--json", *words]) == 0
        remarks: list[str] = json.loads(capsys.readouterr().out)["remarks"]
        return [line for line in remarks if line.startswith("extrapolated, training.")]

    rate = {"log_uniform": [1e-3, 1e-1]}
    config = record_of(tmp_path / "lr", {"lr": rate})
    assert told(config) == []
    assert told(config, train_steps=128, lr_warmup_steps=8) == []
    assert told(config, lr_warmup_steps=1) == [
        "extrapolated, training.lr_warmup_steps: tuned with 0.0625 of the steps, target with 0.0156 of the steps"
    ]
    assert told(config, lr_schedule="constant", clip_grad=0.0, min_lr_ratio=1.0, lr_warmup_steps=0) == [
        "extrapolated, training.clip_grad: tuned with 1.0, target with 0.0",
        "extrapolated, training.lr_schedule: tuned with cosine, target with constant",
        "extrapolated, training.lr_warmup_steps: tuned with 0.0625 of the steps, target with 0 of the steps",
        "extrapolated, training.min_lr_ratio: tuned with 0.1, target with 1.0",
    ]
    steps = {"lr_schedule": "multi-step", "lr_milestones": [32, 48], "lr_gamma": 0.1}
    given |= {f"training__{name}": value for name, value in steps.items()}
    config = record_of(tmp_path / "steps", {"lr": rate})
    assert told(config, train_steps=128, lr_warmup_steps=8, lr_milestones="[64,98]") == []
    assert told(config, lr_milestones="[8,48]", lr_gamma=0.5, lr_warmup_init=0.001) == [
        "extrapolated, training.lr_gamma: tuned with 0.1, target with 0.5",
        "extrapolated, training.lr_milestones: tuned with 0.5, 0.75 of the steps, target with 0.125, 0.75 of the steps",
        "extrapolated, training.lr_warmup_init: tuned with 0.0, target with 0.001",
    ]
    assert told(config, lr_milestones="[32]") == [
        "extrapolated, training.lr_milestones: tuned with 0.5, 0.75 of the steps, target with 0.5 of the steps"
    ]
    given |= {"training__lr_schedule": "WSD", "training__lr_wsd_decay_steps": 16}
    config = record_of(tmp_path / "wsd", {"lr": rate})
    assert told(config, lr_wsd_decay_style="linear", lr_gamma=0.5) == [
        "extrapolated, training.lr_wsd_decay_style: tuned with exponential, target with linear"
    ]
    given |= {"training__lr_schedule": "cosine"}
    with_schedule = record_of(tmp_path / "schedule", {"lr": rate, "lr_schedule": {"choice": ["cosine", "constant"]}})
    assert told(with_schedule, lr_schedule="constant", clip_norm="invariant") == [
        "extrapolated, training.clip_norm: tuned with global, target with invariant"
    ]


def test_what_the_record_did_not_search_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Another hyperparameter, another range, a further stage: nothing is tuned, so each is a line."""
    config = config_in(tmp_path)
    lr = {"low": 1e-3, "high": 1e-1, "log": True}
    made = study_of(VALUES, ranges={**STUDY["ranges"], "lr": lr})
    parametrization, layout = parametrize(with_values(config, VALUES), 375), resolve_layout(config, 1)
    write_record(config.record_path, make_record(parametrization, layout, VALUES, study=made, budget=BUDGET))
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config.model_dump()))
    assert cli.run(["tune", str(path)]) == 0
    printed = capfd.readouterr().out
    assert "nothing to tune" in printed
    assert "to tune anew" not in printed
    other = ["tuning.search.lr.log_uniform=[0.5e-3,0.5]", "tuning.search.embedding_multiplier.uniform=[1,9]"]
    stage = ["tuning.descent.trials=5", "tuning.repeat_best=1", "tuning.repeat_seeds=1"]
    assert cli.run(["tune", str(path), *other, *stage]) == 0
    said = [line.split("; to tune anew, ")[0] for line in capfd.readouterr().out.splitlines() if "to tune anew" in line]
    assert said == [
        "it searched lr from 0.001 to 0.1, tuning.search.lr says 0.0005 to 0.5",
        "it did not tune embedding_multiplier (tuning.search.embedding_multiplier)",
        "it has no coordinate descent (tuning.descent.trials=5)",
    ]


def test_a_record_that_goes_before_the_target_has_read_it(record: TransferRecord, tmp_path: Path) -> None:
    """Moved away while the data was prepared: the target would train with the values of `hparams:`."""
    config = config_in(tmp_path)
    write_record(config.record_path, record)
    with Progress(False) as progress:
        assert trained_keys(config, progress, ())["hparams.lr"] == 0.004
        config.record_path.rename(tmp_path / "away.json")
        with pytest.raises(ConfigError, match=r"tuning\.record: .*, which was there before; expected the record until"):
            trained_keys(config, progress, ())
        assert trained_keys(config_in(tmp_path, tuning__run="never"), progress, ()) == {}  # no record is meant


def test_a_beta_of_a_record(tmp_path: Path) -> None:
    """It becomes the config's; messages name the config's key, with values of that key. By hand: 1 - 0.02 = 0.98."""
    search = {"one_minus_beta2": {"log_uniform": [0.01, 0.2]}}
    values: dict[str, float | str] = {"lr": 0.004, "one_minus_beta2": 0.02 + 1e-15}
    plain = make(MIXED, "gpt3", run__dir=str(tmp_path), tuning__search=search)
    table = parametrize(with_values(plain, values), 375)
    made = make_record(table, resolve_layout(plain, 1), values, study=study_of(values), budget=BUDGET)
    write_record(tmp_path / "transfer.json", made)
    assert apply_record(plain)[0].optimizer.betas == [0.9, 0.98]
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(plain.model_dump()))
    for key in ("optimizer.betas=[0.9,0.99]", "optimizer.betas.1=0.99"):
        with pytest.raises(ConfigError, match=r"betas\.1: 0\.99 is given, and .* says 0\.98 \(tuned\)"):
            apply_record(load_config(path, parse_overrides([key])))
    with pytest.raises(ConfigError, match=r"other values of hparams\.lr, optimizer\.betas\.1, which `train`"):
        refuse_untaken_record(plain)
    refuse_untaken_record(with_values(plain, values))
    # A target need not search what the record tuned, nor a record have tuned what the config searches.
    assert apply_record(derive(plain, {"tuning.search": {}}))[0].optimizer.betas == [0.9, 0.98]
    untuned = make(MIXED, "gpt3", run__dir=str(tmp_path / "untuned"), tuning__search={"lr": {"uniform": [0.001, 0.1]}})
    made = make_record(parametrize(untuned, 375), resolve_layout(untuned, 1), VALUES, study=STUDY, budget=BUDGET)
    write_record(tmp_path / "untuned.json", made)
    betas = apply_record(derive(plain, {"tuning.record": str(tmp_path / "untuned.json")}))[0].optimizer.betas
    assert betas == untuned.optimizer.betas
    other = {"tuning.record": str(tmp_path / "untuned.json"), "optimizer.betas": [0.9, 0.99]}
    with pytest.raises(
        UserError, match=r"another family .*optimizer\.betas: \[0\.9, 0\.95\] in the record, \[0\.9, 0\.99\]"
    ):
        apply_record(derive(plain, other))


def test_rules_over_batch_and_tokens_are_those_of_the_config(tmp_path: Path) -> None:
    chosen = {"parametrization.batch": "sqrt_sde", "parametrization.tokens": "power:-0.32"}
    config = derive(with_values(config_in(tmp_path), VALUES), chosen)
    layout = resolve_layout(config, 1)
    made = make_record(parametrize(config, 375), layout, VALUES, study=STUDY, budget=BUDGET)
    assert {f"parametrization.{name}": made.rules[name] for name in ("batch", "tokens")} == chosen


def test_a_regulariser_that_was_tuned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The record says so, and the command that shows it; of other values neither says anything."""
    sentence = "weight_decay was tuned: it regularises, and how much of it is best depends on the size of model and"
    for names in (["lr", "weight_decay"], ["lr"]):
        path = tmp_path / "-".join(names)
        path.mkdir()
        search = {name: {"log_uniform": [1e-3, 1e-1]} for name in names}
        config = make(MIXED, "gpt3", run__dir=str(path), tuning__search=search)
        study = study_of(dict.fromkeys(names, 0.1))
        made = make_record(parametrize(config, 375), resolve_layout(config, 1), VALUES, study=study, budget=BUDGET)
        write_record(path / "transfer.json", made)
        (path / "run.yaml").write_text(yaml.safe_dump(config.model_dump()))
        assert cli.run(["transfer", str(path / "run.yaml"), "--json"]) == 0
        said = json.loads(capsys.readouterr().out)["remarks"]
        stored = json.loads((path / "transfer.json").read_text())["target"]["not_transferred"]
        tuned = "weight_decay" in names
        assert [line.startswith(sentence) for line in stored] == [True] * tuned
        assert sum(line.startswith(sentence) for line in said) == tuned


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model__num_layers", 3),
        ("model__activation_func", "silu"),
        ("parametrization__weight_decay", "coupled"),
        ("optimizer__eps", 1e-6),
        ("data__tokenizer__vocab_size", 400),
    ],
)
def test_another_family_is_refused_with_the_keys_that_differ(
    record: TransferRecord, tmp_path: Path, key: str, value: Any
) -> None:
    write_record(tmp_path / "transfer.json", record)
    other = {key: value}
    if key == "model__num_layers":
        other["base"] = {**MIXED["base"]}
    named = {"data__tokenizer__vocab_size": "model.vocab_size"}.get(key, key.replace("__", "."))
    with pytest.raises(
        UserError, match=f"belongs to another family .*{named}: .* in the record, {value!r} in the config"
    ):
        TransferRecord.read(tmp_path / "transfer.json", config_in(tmp_path, **other))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model__hidden_size", 128),
        ("parallel__zero_stage", 2),
        ("optimizer__implementation", "torch"),
        ("hparams__lr", 1.0),
    ],
)
def test_the_same_family_is_not(record: TransferRecord, tmp_path: Path, key: str, value: Any) -> None:
    """Grown sizes, the layout, the implementation and the config's own values are not the family's."""
    write_record(tmp_path / "transfer.json", record)
    assert TransferRecord.read(tmp_path / "transfer.json", config_in(tmp_path, **{key: value})) == record


def test_edited_by_hand(record: TransferRecord, tmp_path: Path) -> None:
    path = tmp_path / "transfer.json"
    path.write_text(json.dumps({**record.as_json(), "values": {**VALUES, "lr": 0.04}}))
    with pytest.raises(UserError, match="checksum: does not match what the record says"):
        TransferRecord.read(path, config_in(tmp_path))


def test_of_a_newer_format(record: TransferRecord, tmp_path: Path) -> None:
    newer = {**record.as_json(), "format": 2}
    write_record(tmp_path / "transfer.json", newer)
    with pytest.raises(UserError, match="format 2; this version of mup-megatron reads format 1"):
        TransferRecord.read(tmp_path / "transfer.json", config_in(tmp_path))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("{", "line 1: not valid JSON"), ("[]", "not a transfer record"), ('{"values": {}}', "not a transfer record")],
)
def test_damaged(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "transfer.json").write_text(text)
    with pytest.raises(UserError, match=sentence):
        TransferRecord.read(tmp_path / "transfer.json", config_in(tmp_path))


def test_one_record_serves_a_family(repository: Path) -> None:
    for family, relative in (("gpt3", False), ("gpt3", True), ("llama", False)):
        files = sorted((repository / "configs" / family).glob("*.yaml"))
        configs = [load_config(path) for path in files if path.stem.endswith("-relative") == relative]
        assert len(configs) > 1
        assert len({digest(digested(config)) for config in configs}) == 1
        assert len({config.tuning.record for config in configs}) == 1


def test_the_command_shows_it(record: TransferRecord, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_in(tmp_path)
    source = tmp_path / "run.yaml"
    source.write_text(yaml.safe_dump(config.model_dump()))
    assert cli.run(["transfer", str(source)]) == 2
    assert f"no such file: {tmp_path / 'transfer.json'}; expected a transfer record" in capsys.readouterr().err
    write_record(tmp_path / "transfer.json", record)
    target = tmp_path / "target.yaml"
    assert cli.run(["transfer", str(source), "--json", "--output", str(target)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["becomes"] == record.target.becomes
    assert load_config(target).hparams.lr == 0.004
    assert cli.run(["transfer", str(source)]) == 0
    assert "output_multiplier" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"proxy": {"trained": "250 steps"}}, "proxy.trained: "),
        ({"proxy": {"trained": [250, 16, 128]}}, "proxy.trained: "),
        ({"proxy": {"trained": {"train_steps": "250"}}}, "proxy.trained.train_steps: "),
        ({"proxy": {"trained": {"num_layers": 0}}}, "proxy.trained.num_layers: "),
        ({"proxy": {"trained": {"tokens": 10**400}}}, "proxy.trained.tokens: "),
        ({"proxy": {"trained": {"seq_length": True}}}, "proxy.trained.seq_length: "),
        (
            {"study": {**STUDY, "candidates": [{"slot": 0, "mean": 1.0, "within_noise": True}]}},
            "study.candidates.0.losses: ",
        ),
        (
            {"study": {**STUDY, "candidates": [{"slot": 0, "losses": [], "mean": 1.0, "within_noise": True}]}},
            "study.candidates.0.losses: ",
        ),
        ({"study": {**STUDY, "trials": [{**STUDY["trials"][0], "loss": "low"}]}}, "study.trials.0.loss: "),
        ({"study": {**STUDY, "trials": [{**STUDY["trials"][0], "values": {}}]}}, "study: "),
    ],
    ids=str,
)
def test_a_part_that_is_of_another_kind(
    record: TransferRecord, tmp_path: Path, capsys: pytest.CaptureFixture[str], part: dict[str, Any], said: str
) -> None:
    """Its checksum is right, as where a script wrote it: `transfer` says which part, and does not raise."""
    source, path = tmp_path / "run.yaml", tmp_path / "transfer.json"
    source.write_text(yaml.safe_dump(config_in(tmp_path).model_dump()))
    changed = {**record.as_json(), **part}
    changed["checksum"] = digest({key: value for key, value in changed.items() if key != "checksum"})
    write_record(path, changed)
    assert cli.run(["transfer", str(source)]) == 2
    err = capsys.readouterr().err
    assert f"{path}: {said}expected " in " ".join(err.split())
    assert "Traceback" not in err


def test_the_digest_holds_the_depth_of_the_base(tmp_path: Path) -> None:
    """Same target, bases of 1 and 2 layers: another family, by that key alone."""
    depth = {"parametrization__depth": "completep"}
    shallow, deep = (
        digested(config_in(tmp_path, **depth, base={**MIXED["base"], "num_layers": layers})) for layers in (1, 2)
    )
    assert differences(shallow, deep, "then", "now") == ["base.num_layers: 1 then, 2 now"]
    target = config_in(tmp_path, **depth, base={**MIXED["base"], "num_layers": 1}, model__num_layers=16)
    assert digest(digested(target)) == digest(shallow)


def test_the_digest_holds_what_grows_without_being_named(tmp_path: Path) -> None:
    """An FFN that is left out is 4 * hidden, 256 in the base: the family of a config that names it, and no other."""
    base = {name: size for name, size in MIXED["base"].items() if name != "ffn_hidden_size"}
    left_out = digested(config_in(tmp_path, model__ffn_hidden_size=None, base=base))
    named = digested(config_in(tmp_path, model__ffn_hidden_size=384, base={**base, "ffn_hidden_size": 256}))
    fixed = digested(config_in(tmp_path, model__ffn_hidden_size=384, base=base))
    assert differences(left_out, named, "", "") == []
    assert left_out["base.ffn_hidden_size"] == 256
    assert differences(left_out, fixed, "then", "now") == [
        "base.ffn_hidden_size: 256 then, null now",
        "model.ffn_hidden_size: null then, 384 now",
    ]


def test_keys_that_came_later_leave_the_digest_of_earlier_records(repository: Path) -> None:
    """Rules over batch and tokens, families, position biases: where they say nothing they are not digested."""
    settings = digested(load_config(repository / "configs" / "demo.yaml"))
    later = ("batch", "tokens", "bert_binary_head", "encoder_num_layers", "relative_attention_num_buckets")
    assert not [key for key in settings if key.rpartition(".")[2] in later]
    chosen = digested(
        make(MIXED, "gpt3", model__position_embedding_type="relative", parametrization__batch="power:0.5")
    )
    assert chosen["model.relative_attention_num_buckets"] == 32
    assert chosen["parametrization.batch"] == "power:0.5"
