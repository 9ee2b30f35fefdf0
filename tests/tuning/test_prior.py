"""A search that begins where an earlier one ended: its ranges and its first trial by hand, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from mup_megatron.config import Config, load_config, parse_overrides
from mup_megatron.model.build import parametrize
from mup_megatron.parallel.layout import resolve_layout
from mup_megatron.tuning.decide import apply_record
from mup_megatron.tuning.family import digest
from mup_megatron.tuning.prior import first_trial, told, with_prior
from mup_megatron.tuning.record import write_record
from mup_megatron.tuning.recording import make_record
from mup_megatron.tuning.sampler import points
from mup_megatron.tuning.space import check_overrides, with_values
from mup_megatron.tuning.study import Study
from mup_megatron.util.errors import ConfigError, UserError
from tests.helpers.records import BUDGET, study_of
from tests.helpers.studies import study_config

SEARCH = {
    "lr": {"log_uniform": [1e-4, 1e-1]},
    "init_method_std": {"log_uniform": [0.005, 0.08]},
    "output_multiplier": {"uniform": [1.0, 9.0]},
    "lr_schedule": {"choice": ["cosine", "linear"]},
    "attention_multiplier": {"log_uniform": [0.25, 4.0]},
}
CHOSE = {"lr": 2e-3, "init_method_std": 0.06, "output_multiplier": 12.0, "lr_schedule": "linear"}


def record_of(path: Path, chose: dict[str, Any]) -> str:
    """A record of an earlier search, whose family is nobody's here."""
    said: dict[str, Any] = {"created": "", "digest": "", "family": {}, "values": {}, "tuned": []}
    said |= {"target": {"name": "", "sizes": {}, "becomes": {}, "extrapolated": [], "not_transferred": []}}
    said |= {"proxy": {"trained": {}}, "rules": {}, "study": study_of(chose), "budget": BUDGET, "versions": {}}
    said = {"format": 1, **said}
    write_record(path, {**said, "checksum": digest(said)})
    return str(path)


def config_of(folder: Path, chose: dict[str, Any] | None = None, **changed: Any) -> Any:
    prior = record_of(folder / "earlier.json", chose or CHOSE)
    return study_config(
        folder, **{"tuning__search": SEARCH, "tuning__prior": prior, "tuning__prior_factor": 4.0, **changed}
    )


def test_by_hand(tmp_path: Path) -> None:
    """A quarter to four times, cut to the range; what is uniform, chosen, or was not tuned stays as it was."""
    config = config_of(tmp_path)
    found = {name: each.model_dump(exclude_none=True) for name, each in with_prior(config).tuning.search.items()}
    assert found.pop("lr") == {"log_uniform": pytest.approx([5e-4, 8e-3])}
    assert found.pop("init_method_std") == {"log_uniform": pytest.approx([0.015, 0.08])}
    assert found == {name: SEARCH[name] for name in found}
    assert first_trial(config) == {**CHOSE, "output_multiplier": 9.0}
    assert with_prior(with_prior(config)).tuning.search == with_prior(config).tuning.search


def test_the_configs_own_values(tmp_path: Path) -> None:
    keys = {"hparams__lr": 4e-3, "hparams__init_method_std": 0.02}
    config = study_config(tmp_path, tuning__search=SEARCH, tuning__prior="hparams", **keys)
    assert with_prior(config).tuning.search["lr"].log_uniform == pytest.approx([2.5e-4, 6.4e-2])
    assert first_trial(config)["lr"] == 4e-3
    assert first_trial(config)["init_method_std"] == 0.02


def test_what_says_nothing_is_left_out(tmp_path: Path) -> None:
    """A decay of 0 has no place in a logarithm, a schedule is not among these choices; both are searched as ever."""
    search = {
        "lr": {"log_uniform": [1e-4, 1e-1]},
        "weight_decay": {"log_uniform": [1e-3, 1.0]},
        "lr_schedule": {"choice": ["linear"]},
    }
    keys = {"hparams__weight_decay": 0.0, "training__lr_schedule": "cosine"}
    config = study_config(tmp_path, tuning__search=search, tuning__prior="hparams", **keys)
    assert list(first_trial(config)) == ["lr"]
    assert with_prior(config).tuning.search["weight_decay"].log_uniform == [1e-3, 1.0]


def test_without_one_nothing_changes(tmp_path: Path) -> None:
    config = study_config(tmp_path, tuning__search=SEARCH)
    assert with_prior(config) is config
    assert first_trial(config) == {}


@pytest.mark.parametrize("sampler", ["random", "quasi_random", "tpe"])
def test_a_study_begins_there(tmp_path: Path, sampler: str) -> None:
    """The first trial has the record's values; those behind it are drawn from what is left of the ranges."""
    study = Study.create(with_prior(config_of(tmp_path, tuning__sampler=sampler, tuning__trials=12)))
    drawn = []
    while (trial := study.claim()) is not None:
        drawn.append(dict(trial.values))
        study.finish(trial, "complete", loss=3.0 + 0.01 * len(drawn))
    assert len(drawn) == 12
    assert {name: drawn[0][name] for name in CHOSE} == {**CHOSE, "output_multiplier": 9.0}
    assert all(5e-4 <= values["lr"] <= 8e-3 for values in drawn)
    assert max(values["lr"] for values in drawn) / min(values["lr"] for values in drawn) > 4
    assert all(set(values) == set(SEARCH) for values in drawn)


def test_a_grid_stays_whole(tmp_path: Path) -> None:
    search = {"lr": {"choice": [1e-3, 2e-3, 4e-3]}}
    config = config_of(tmp_path, tuning__sampler="grid", tuning__search=search, tuning__trials=3)
    assert sorted(point["lr"] for point in points(with_prior(config))) == [1e-3, 2e-3, 4e-3]


def test_another_record_is_another_study(tmp_path: Path) -> None:
    Study.create(with_prior(config_of(tmp_path)))
    with pytest.raises(UserError, match=r"started with other settings \(.*tuning\.prior") as error:
        Study.create(with_prior(config_of(tmp_path, {**CHOSE, "lr": 4e-3})))
    assert "tuning.search.lr" in str(error.value)


def test_a_line_says_what_is_taken(tmp_path: Path) -> None:
    search = {name: SEARCH[name] for name in ("lr", "output_multiplier")}
    config = with_prior(config_of(tmp_path, tuning__search=search))
    said = told(config)
    assert said is not None
    assert said.startswith("the first trial has the values of ")
    assert said.endswith("earlier.json: lr 0.002 (then 0.0005 to 0.008), output_multiplier 9")
    assert told(study_config(tmp_path, tuning__search=search)) is None


def test_it_is_read_once(tmp_path: Path) -> None:
    """A worker that comes to lead asks again, when the file has gone; another process is refused (test_refused)."""
    config = config_of(tmp_path)
    first = first_trial(config)
    (tmp_path / "earlier.json").unlink()
    assert first_trial(config) == first


def test_a_value_on_the_command_line_is_the_prior(tmp_path: Path) -> None:
    """Without `tuning.prior` it is refused: tuning would take its place."""
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(study_config(tmp_path, tuning__search=SEARCH).model_dump()))
    with pytest.raises(ConfigError, match=r"hparams\.lr: 0\.004 is given, but tuning would take its place"):
        check_overrides(load_config(path, parse_overrides(["hparams.lr=0.004"])))
    check_overrides(load_config(path, parse_overrides(["hparams.lr=0.004", "tuning.prior=hparams"])))
    # At what is none of the points of a grid, or none of the choices, nothing begins: it would be trained with nowhere.
    grid = ["tuning.sampler=grid", "tuning.search={lr: {choice: [0.001, 0.004]}}"]
    for words in (grid, ["tuning.search.lr={choice: [0.001, 0.003]}"]):
        config = load_config(path, parse_overrides(["hparams.lr=0.004", "tuning.prior=hparams", *words]))
        with pytest.raises(ConfigError, match=r"hparams\.lr: 0\.004 is given, but tuning would take its place"):
            check_overrides(config)


def test_where_a_search_began_is_no_other_value_of_its_record(tmp_path: Path) -> None:
    """The command that tuned goes on to the target, though what was found is not what it was given."""
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(study_config(tmp_path, tuning__search={"lr": SEARCH["lr"]}).model_dump()))

    def given(*words: str) -> Config:
        return load_config(path, parse_overrides(list(words)))

    begun = given("hparams.lr=0.004", "tuning.prior=hparams")
    table = parametrize(with_values(begun, {"lr": 0.005}), 375)
    study = {**study_of({"lr": 0.005}), "prior": first_trial(begun)}
    made = make_record(table, resolve_layout(begun, 1), {"lr": 0.005}, study=study, budget=BUDGET)
    write_record(begun.record_path, made)
    assert apply_record(begun)[0].hparams.lr == 0.005
    for words in (["hparams.lr=0.003", "tuning.prior=hparams"], ["hparams.lr=0.004"]):
        with pytest.raises(
            ConfigError, match=r"hparams\.lr: 0\.00\d is given, and .*transfer\.json says 0\.005 \(tuned\)"
        ):
            apply_record(given(*words))


def test_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"tuning\.prior: .*none\.json: cannot read the transfer record: No such file"
    ):
        with_prior(study_config(tmp_path, tuning__search=SEARCH, tuning__prior=str(tmp_path / "none.json")))
    (tmp_path / "other.json").write_text(json.dumps({"lr": 1e-3}))
    with pytest.raises(ConfigError, match=r"tuning\.prior: .*other\.json: .*expected a transfer record, or hparams"):
        with_prior(study_config(tmp_path, tuning__search=SEARCH, tuning__prior=str(tmp_path / "other.json")))
    said = r"tuning\.search\.lr: 0\.0001 to 0\.1 has nothing of 0\.5 divided and multiplied by 4 .*of .*earlier\.json"
    with pytest.raises(ConfigError, match=said):
        with_prior(config_of(tmp_path, {"lr": 0.5}))
    with pytest.raises(ConfigError, match=r"tuning\.prior: .* says nothing of what is searched \(lr, init_method_std"):
        with_prior(config_of(tmp_path, {"weight_decay": 0.5}))
