"""`mup-megatron tune --megatron`: the proxy is tuned by runs of the user's own script, from command line to target."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from mup_megatron.config import derive, load_config, parse_config
from mup_megatron.parallel.ranks import Rank
from mup_megatron.tuning.megatron import (
    MegatronProcess,
    last_lines,
    own_launch,
    process_for,
    trial_arguments,
)
from mup_megatron.tuning.megatron_command import MegatronCommand, megatron_options, replaced
from mup_megatron.tuning.megatron_task import Task, differing, said_by_options
from mup_megatron.tuning.process import RunProcess
from mup_megatron.tuning.space import proxy_config
from mup_megatron.util.errors import UserError
from tests.helpers import megatron_runs
from tests.helpers.commands import Background, mup, run, until
from tests.helpers.configs import MIXED, make
from tests.helpers.installed import needs_training
from tests.megatron_training.test_megatron_as_built import TENSORS

TORCHRUN = ["torchrun", "--nproc-per-node", "2", "-m", "mup_megatron.run"]


# --- the command line ---


@pytest.mark.parametrize(
    ("words", "launcher", "arguments", "processes"),
    [
        ("p.py --lr 1", [sys.executable, "-m", "mup_megatron.run"], ["--lr", "1"], 1),
        (
            "mup-megatron run --config m.yaml p.py",
            [sys.executable, "-m", "mup_megatron.run"],
            ["--mup-config", "m.yaml"],
            1,
        ),
        (
            "torchrun --nproc-per-node 2 -m mup_megatron.run p.py --lr 1",
            ["torchrun", "--standalone", *TORCHRUN[1:]],
            ["--lr", "1"],
            2,
        ),
        (
            "torchrun --nproc_per_node=4 --master-port 5 -m mup_megatron.run p.py",
            ["torchrun", "--nproc_per_node=4", "--master-port", "5", "-m", "mup_megatron.run"],
            [],
            4,
        ),
        ("deepspeed --module mup_megatron.run p.py", ["deepspeed", "--module", "mup_megatron.run"], [], None),
        ("python -m mup_megatron.run p.py", ["python", "-m", "mup_megatron.run"], [], 1),
    ],
)
def test_a_command_line_in_parts(words: str, launcher: list[str], arguments: list[str], processes: int | None) -> None:
    found = MegatronCommand.read(words.split())
    assert (list(found.launcher), found.script, list(found.arguments)) == (launcher, "p.py", arguments)
    assert found.processes == processes
    assert found.words(["--x"], Path("t.json")) == [*launcher, "--watched", "t.json", "p.py", "--x"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "torchrun --nproc-per-node 2 p.py",
            "torchrun: not a script; expected SCRIPT ARGS..., mup-megatron run SCRIPT",
        ),
        ("--nope p.py", "--nope: unknown word before the script"),
        ("mup-megatron run", "no command line: not a script"),
    ],
)
def test_no_command_line(words: str, said: str) -> None:
    with pytest.raises(UserError) as error:
        MegatronCommand.read(words.split())
    assert str(error.value).startswith(said)


def test_options_take_the_place_of_the_users() -> None:
    """Whichever way a value was typed; what a trial has no use for is left out, the rest stays in its order."""
    typed = "p.py --lr=1 --window-size 127,0 --hidden-size 64 --train-samples 9 --load there --swiglu --lr 2 --seed 3"
    assert replaced(MegatronCommand.read(typed.split()), {"lr": "0.5", "hidden-size": "32"}, ["finetune"]) == (
        ["--window-size", "127,0", "--swiglu", "--lr", "0.5", "--hidden-size", "32", "--finetune"]
    )


def study(folder: Path, **keys: Any) -> Any:
    """A config as `tune --megatron` writes it, of a target twice as wide as its base."""
    return make(
        MIXED,
        **{
            "run__dir": str(folder / "run"),
            "tuning__command": ["p.py", "--hidden-size", "64", "--num-layers", "9", "--log-interval", "1"],
            "parallel__engine": "megatron",
            "training__train_steps": 100,
            "training__lr_warmup_steps": 10,
            "tuning__train_steps": 20,
            **keys,
        },
    )


def test_a_trial_by_hand(tmp_path: Path) -> None:
    """Sizes of the proxy, a fifth of the schedule, an evaluation at every quarter, its values, its folder."""
    config = study(tmp_path)
    values = {"lr": 0.25, "output_multiplier": 3.0}
    trial = proxy_config(config, values, seed=11, directory=tmp_path / "t", cache=None)
    options = megatron_options(trial)
    assert trial.parallel == config.parallel
    base = config.base.sizes
    assert {name: options[name.replace("_", "-")] for name in base} == {name: str(size) for name, size in base.items()}
    expected = {"train-iters": "20", "lr-warmup-iters": "2", "eval-interval": "5", "lr": "0.25", "seed": "11"}
    expected["min-lr"] = repr(0.25 * config.training.min_lr_ratio)
    assert {name: options[name] for name in expected} == expected
    words = trial_arguments(MegatronCommand.read(config.tuning.command), trial)
    assert words[:2] == ["--log-interval", "1"]
    assert words[words.index("--load") + 1] == words[words.index("--save") + 1] == str(tmp_path / "t" / "checkpoints")
    assert words[words.index("--save-interval") + 1] == "5"
    assert words.count("--hidden-size") == 1
    sections = yaml.safe_load((tmp_path / "t" / "mup.yaml").read_text())
    assert sections["hparams"]["output_multiplier"] == 3.0
    assert sections["base"] == base


@pytest.mark.parametrize(("optimizer", "option"), [("sgd", "sgd-momentum"), ("muon", "muon-momentum")])
def test_a_trial_s_momentum(tmp_path: Path, optimizer: str, option: str) -> None:
    """By hand: 1 - 0.04. SGD has no betas, Muon has AdamW's of the other tensors."""
    config = study(tmp_path, optimizer__name=optimizer, tuning__search={"one_minus_momentum": {"choice": [0.04]}})
    options = megatron_options(proxy_config(config, {"one_minus_momentum": 0.04}, seed=1, directory=tmp_path / "t"))
    assert options[option] == "0.96"
    assert [name for name in options if name.endswith("momentum")] == [option]
    assert ("adam-beta1" in options) == (optimizer == "muon")


def test_another_run_than_was_asked_for(tmp_path: Path) -> None:
    """The keys are named; the last digit of a float, which a command line may lose, is none."""
    config = study(tmp_path)
    trial = proxy_config(config, {"lr": 0.25}, seed=11, directory=tmp_path / "t")
    expected = said_by_options(trial)
    assert differing(expected, said_by_options(trial)) == []
    assert differing(expected, {**said_by_options(trial), "hparams.lr": 0.25 * (1 + 1e-15)}) == []
    small, large = trial.model.hidden_size, config.model.hidden_size
    assert small < large
    found = differing(expected, said_by_options(derive(trial, {"model.hidden_size": large})))
    assert found == [f"model.hidden_size: {large} by its options, {small} expected"]
    assert differing(expected, {**expected, "run.seed": 12}) == ["run.seed: 12 by its options, 11 expected"]


def test_whose_process_it_is(tmp_path: Path) -> None:
    assert isinstance(process_for(study(tmp_path), Rank(), tmp_path / "log"), MegatronProcess)
    assert isinstance(process_for(make(MIXED), Rank(), tmp_path / "log"), RunProcess)


def test_the_last_lines(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("one\n\ntwo\nthree\n four \n\n")
    assert last_lines(tmp_path / "log.txt") == "two / three / four"
    assert last_lines(tmp_path / "none") == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tune", "--megatron"], "--megatron: no command line; expected it behind --"),
        (["tune", "--megatron", "a.yaml", "b.yaml", "--", "p.py"], "b.yaml: unexpected; expected one CONFIG"),
        (
            ["tune", "--megatron", "there.yaml", "--", "p.py", "--lr", "1"],
            "tuning.command: is another command line than",
        ),
        (["pipeline", "there.yaml"], "tuning.command: the target is a run of megatron.training, which its own command"),
    ],
)
def test_bad_input(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mup_megatron.cli import run as run_command

    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.yaml").write_text(yaml.safe_dump(study(tmp_path).model_dump()))
    config = ["unused.yaml"] if words == ["tune", "--megatron"] else []
    assert run_command([*words, *config]) == 2
    assert said in capsys.readouterr().err


# --- real runs ---

STEPS = 8


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("script")
    sizes: dict[str, Any] = {
        "train_iters": STEPS,
        "eval_iters": 2,
        "eval_interval": 1000,
        "global_batch_size": 4,
        "weight_decay": 0.01,
        "lr": "1e-2",
    }
    return [str(megatron_runs.SCRIPT), *megatron_runs.words(folder, **sizes), "--eod-mask-loss"]


def tune(folder: Path, command: list[str], *overrides: str) -> list[str | Path]:
    settings = ["tuning.trials=3", "tuning.repeat_best=0", f"run.dir={folder / 'run'}", *overrides]
    return [
        "tune",
        "--megatron",
        folder / "proxy.yaml",
        *settings,
        f"tuning.record={folder / 'tuned.json'}",
        "--",
        *command,
    ]


def losses_of(text: str) -> list[tuple[str, ...]]:
    """What Megatron prints of every step, and of the evaluations between them."""
    return re.findall(r"lm loss: (\S+)|loss at iteration (\d+) \| lm loss value: (\S+)", text)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory, command: list[str]) -> Path:
    """A study from a command line to its record."""
    folder = tmp_path_factory.mktemp("tuned")
    found = mup(*tune(folder, command))
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-3000:]
    assert f"written: {folder / 'proxy.yaml'}" in found.stderr
    return folder


def ends(folder: Path) -> list[Any]:
    record = json.loads((folder / "tuned.json").read_text())
    return [(trial["state"], trial["loss"], trial["reports"], trial["values"]) for trial in record["study"]["trials"]]


@pytest.mark.slow
@needs_training
def test_from_command_line_to_target(tuned: Path, command: list[str]) -> None:
    """Trials are the command line typed by hand, to the last digit; the target takes the record."""
    record = json.loads((tuned / "tuned.json").read_text())
    trials = record["study"]["trials"]
    assert [trial["state"] for trial in trials].count("complete") >= 1
    assert len(trials) == 3
    chosen = tuned / "run" / "tuning" / f"trial-{record['study']['slot']:03d}"
    words = shlex.split((chosen / "command.txt").read_text())
    assert "--eod-mask-loss" in words  # which no config says
    assert words[words.index("--hidden-size") + 1] == "32"
    by_trial = losses_of((chosen / "log.txt").read_text())
    typed = run(*words)
    assert typed.returncode == 0, typed.stderr[-3000:]
    by_hand = losses_of(typed.stdout)
    assert len(by_trial) == STEPS + 4  # an evaluation at each quarter
    assert by_hand[: len(by_trial)] == by_trial
    # What the study compares is what the run printed, with all digits.
    last = json.loads((chosen / "metrics.jsonl").read_text().splitlines()[-1])
    assert by_trial[-1][2] == f"{last['eval_loss']:.6E}"
    assert record["study"]["loss"] == last["eval_loss"]
    target = [
        word for word in command if word not in ("--lr", "1e-2", "0.01", "--init-method-std", "0.05", "--weight-decay")
    ]
    trained = mup("run", *target, "--mup-hparams", tuned / "tuned.json", "--clip-grad", "0.5")
    assert trained.returncode == 0, trained.stderr[-3000:]
    told = [line for line in trained.stderr.splitlines() if line.startswith("mup-megatron: extrapolated, training.")]
    assert told == ["mup-megatron: extrapolated, training.clip_grad: tuned with 1.0, target with 0.5"]
    rates = set(re.findall(r"learning rate: (\S+)", trained.stdout))
    assert rates == {f"{record['values']['lr']:.6E}"}


@pytest.mark.slow
@needs_training
def test_killed_and_started_again(tuned: Path, command: list[str], tmp_path: Path) -> None:
    """Killed while the third trial trains: its processes end too, and the study comes out as if nothing was."""
    background = Background(*tune(tmp_path, command))
    marked = tmp_path / "run" / "tuning" / "trial-002" / "checkpoints" / "latest_checkpointed_iteration.txt"
    until(marked.exists, 200)
    os.kill(background.process.pid, signal.SIGKILL)
    background.process.communicate()
    until(lambda: not background.processes(), 30)
    assert not (tmp_path / "tuned.json").exists()
    again = mup(*tune(tmp_path, command))
    assert again.returncode == 0, again.stdout[-2000:] + again.stderr[-3000:]
    assert "going on with a study of which 2 trials are done" in again.stdout
    assert ends(tmp_path) == ends(tuned)


@pytest.mark.slow
@needs_training
def test_ctrl_c_saves(command: list[str], tuned: Path, tmp_path: Path) -> None:
    """SIGTERM while the first trial trains: it is saved between its evaluations, and goes on from there."""
    background = Background(*tune(tmp_path, command))
    folder = tmp_path / "run" / "tuning" / "trial-000"
    until((folder / "metrics.jsonl").exists, 200, every=0.01)
    background.process.terminate()
    _, said = background.process.communicate(timeout=120)
    assert background.process.returncode == 143, said[-2000:]
    assert not background.processes()
    again = mup(*tune(tmp_path, command))
    assert again.returncode == 0, again.stdout[-2000:] + again.stderr[-3000:]
    assert ends(tmp_path) == ends(tuned)
    steps = [
        line["step"] for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if "loss" in line
    ]
    assert steps == list(range(1, STEPS + 1))  # no step was trained twice


@pytest.mark.slow
@needs_training
def test_two_ranks_and_no_validation(command: list[str], tmp_path: Path) -> None:
    """Under torchrun, tensor-parallel; without validation data a trial's result is its mean training loss."""
    words = [*TORCHRUN, *command, "--tensor-model-parallel-size", "2", "--eval-iters", "0"]
    found = mup(*tune(tmp_path, words, "tuning.trials=1"))
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-3000:]
    ((state, loss, reports, _),) = ends(tmp_path)
    assert (state, list(reports)) == ("complete", ["2", "4", "6", "8"])
    lines = map(json.loads, (tmp_path / "run" / "tuning" / "trial-000" / "metrics.jsonl").read_text().splitlines())
    steps = {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert loss == (steps[7] + steps[8]) / 2
    assert reports["2"] == (steps[1] + steps[2]) / 2


@pytest.mark.slow
@needs_training
def test_layers_of_the_scripts_own(command: list[str], tmp_path: Path) -> None:
    """Proxies have them too: the target takes the record, and a run of megatron-core's own layers does not.

    The record holds no rows of tensors: the engine, which works them out, does not know these layers.
    """
    (tmp_path / "tensors.yaml").write_text(TENSORS)
    own = ["--spec", "tests.model.as_built.own_layers", "extra_mlp", "--mup-tensors", str(tmp_path / "tensors.yaml")]
    found = mup(*tune(tmp_path, [*command, *own], "tuning.trials=1"))
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-3000:]
    record = json.loads((tmp_path / "tuned.json").read_text())
    family = record["family"]["model.as_built"]
    assert re.fullmatch("[0-9a-f]{16}", family)
    assert load_config(tmp_path / "proxy.yaml").model.as_built == family
    assert record["target"]["becomes"]["tensors"] == {}
    target = [
        word for word in command if word not in ("--lr", "1e-2", "0.01", "--init-method-std", "0.05", "--weight-decay")
    ]
    taken = mup("run", *target, *own, "--mup-hparams", tmp_path / "tuned.json")
    assert taken.returncode == 0, taken.stderr[-3000:]
    assert set(re.findall(r"learning rate: (\S+)", taken.stdout)) == {f"{record['values']['lr']:.6E}"}
    other = mup("run", *target, "--mup-hparams", tmp_path / "tuned.json")
    assert other.returncode == 2
    assert f"model.as_built: '{family}' in the record, null in the config" in other.stderr


@pytest.mark.slow
@needs_training
def test_the_targets_size_is_seen(tuned: Path) -> None:
    """Negative control: a run of the target's sizes in a trial's place."""
    config = load_config(tuned / "proxy.yaml")
    trial = proxy_config(config, {"lr": 0.01}, seed=7, directory=tuned / "control")
    large = derive(trial, {"model.hidden_size": 64, "model.num_attention_heads": 4})
    command = MegatronCommand.read(config.tuning.command)
    task = Task(kind="trial", path=str(tuned / "control"), expected=said_by_options(trial), steps=STEPS)
    with pytest.raises(UserError) as error:
        own_launch(command, trial_arguments(command, large), task, tuned / "control")
    assert "model.hidden_size: 64 by its options, 32 expected" in str(error.value)
    assert "model.num_attention_heads: 4 by its options, 2 expected" in str(error.value)


@pytest.mark.slow
@needs_training
def test_a_fault_that_all_trials_share(command: list[str], tmp_path: Path) -> None:
    """Ends the study after three, with what the script said."""
    words = [word for word in command if word != "--mock-data"]
    found = mup(*tune(tmp_path, [*words, "--data-path", str(tmp_path / "nowhere")], "tuning.trials=8"))
    assert found.returncode == 2
    said = found.stderr.strip().splitlines()[-1]
    assert "the first 3 trials all failed with: " in said
    assert "nowhere" in said
    assert "trial-*/log.txt there says more" in said


def test_a_study_knows_its_command_line(tmp_path: Path) -> None:
    """Two command lines are two studies; without one nothing is added, so that studies there are stay what they are."""
    from mup_megatron.tuning.study import _deciding

    config = study(tmp_path)
    assert _deciding(config)["tuning.command"] == config.tuning.command
    plain = parse_config({**config.model_dump(), "tuning": config.tuning.model_dump(exclude={"command"})}, None)
    assert "tuning.command" not in _deciding(plain)
