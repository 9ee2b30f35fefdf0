"""Whole runs from the command line: metrics, stop and go, SIGTERM, launch lines, bad input."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import pty
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from mup_megatron import cli
from mup_megatron.config import Config, load_config
from mup_megatron.data.prepare import prepare
from tests.helpers import bodies
from tests.helpers.commands import BIN, environment, losses, metrics, mup, next_commands, run, until
from tests.helpers.configs import MIXED, make, make_t5
from tests.helpers.distributed import Ranks


@pytest.fixture(autouse=True, scope="module")
def _cores_for_these(ranks: Ranks) -> None:
    """These tests start processes of their own; the pool's wait no longer beside them."""
    ranks.stop()


KEYS = {
    "data__split": "80,20,0",
    "training__train_steps": 12,
    "training__eval_interval": 6,
    "training__eval_steps": 2,
    "training__checkpoint_interval": 4,
}
"""A small run of 12 steps with evaluations and checkpoints."""


def written(folder: Path, config: Config) -> Path:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config.model_dump()))
    return path


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    return written(tmp_path, make(MIXED, "gpt3", run__dir=str(tmp_path / "run"), **KEYS))


@pytest.mark.slow
def test_a_run_its_files_and_its_end(config_file: Path, tmp_path: Path, ranks: Ranks) -> None:
    result = mup("train", config_file, "--nproc-per-node", "2")
    assert result.returncode == 0, result.stderr
    directory = tmp_path / "run"
    steps = [line for line in metrics(directory) if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 13))
    assert set(steps[0]) == {"step", "tokens", "loss", "grad_norm", "lr", "seconds", "tokens_per_second"}
    assert steps[-1]["tokens"] == 12 * 8 * 32
    assert steps[0]["lr"] == 0.0
    evaluations = [line for line in metrics(directory) if "eval_loss" in line]
    assert [line["step"] for line in evaluations] == [6, 12]
    for line in evaluations:
        loss = line["eval_loss"]
        assert f"step {line['step']}: evaluation loss {loss:.4f}, perplexity {math.exp(loss):.4g}\n" in result.stdout
    assert re.findall(r"^next: (.*?)  #", result.stdout, re.MULTILINE) == [
        f"mup-megatron report {directory}",
        f"mup-megatron generate {directory} 'Once upon a time'",
    ]
    for words in next_commands(result.stdout):
        done = mup(*words)
        assert (done.returncode, done.stderr) == (0, ""), words
    assert (directory / "report.html").exists()
    for name in ("config.yaml", "explain.json", "loss.png", "tensorboard", "checkpoints/step_00000012/mup.json"):
        assert (directory / name).exists(), name
    kept = sorted(path.name for path in (directory / "checkpoints").iterdir())
    assert kept == ["step_00000008", "step_00000012"]
    explained = json.loads((directory / "explain.json").read_text())
    assert explained["layout"]["tensor_model_parallel_size"] == 2
    resolved = yaml.safe_load((directory / "config.yaml").read_text())
    assert resolved["optimizer"]["implementation"] == "torch"

    # The same command again: nothing is left to do, and nothing is lost.
    before = metrics(directory)
    again = ranks.run(2, bodies.command, arguments=["train", str(config_file)])
    assert [status for status, _, _ in again] == [0, 0], again
    assert metrics(directory) == before

    # Another hyperparameter does not silently go on from this checkpoint.
    (status, _, err), _ = ranks.run(2, bodies.command, arguments=["train", str(config_file), "hparams.lr=1e-3"])
    ranks.stop()
    assert status == 2
    assert "hparams.lr 0.008 0.001" in " ".join(err.split())
    assert "Traceback" not in err
    assert metrics(directory) == before


@pytest.mark.slow
def test_no_command_shows_warnings_of_upstream(config_file: Path, tmp_path: Path) -> None:
    """Each in a process of its own: a warning is shown once in a process, and another test may have had it."""
    found = {
        words: mup(*words.split())
        for words in (
            f"train {config_file} training.train_steps=8 training.lr_decay_steps=12",
            f"train {config_file} training.train_steps=12 training.lr_decay_steps=12",  # resumed
            f"train {config_file} parallel.engine=megatron run.dir={tmp_path}/megatron",
            f"explain {config_file}",
            f"plan {config_file} tuning.max_compute_share=100",
            f"horizon {config_file}",
            f"coord-check {config_file} --widths 1,2 --seeds 1 --steps 2 --no-beside --output {tmp_path}/check",
            f"export {tmp_path}/run {tmp_path}/weights --to safetensors",
            f"diagnose {tmp_path}/run",
            "doctor",
        )
    }
    assert {name: done.stderr for name, done in found.items()} == dict.fromkeys(found, "")
    assert not [name for name, done in found.items() if re.search(r"Warning|site-packages", done.stdout)]


@pytest.mark.parametrize(
    ("number", "status", "name"),
    [
        pytest.param(signal.SIGTERM, 143, "SIGTERM", id="SIGTERM"),
        pytest.param(signal.SIGINT, 130, "Ctrl-C", id="Ctrl-C"),
    ],
)
@pytest.mark.slow
def test_a_signal_saves_and_the_same_command_goes_on(
    config_file: Path, tmp_path: Path, ranks: Ranks, number: signal.Signals, status: int, name: str
) -> None:
    """SIGTERM to our launcher; Ctrl-C, which a terminal sends to the launcher and to every rank."""
    settings = ["training.train_steps=40", "training.lr_decay_steps=40", "training.checkpoint_interval=1000"]
    whole = ["train", str(config_file), *settings, f"run.dir={tmp_path / 'whole'}"]
    assert [status for status, _, _ in ranks.run(2, bodies.command, arguments=whole)] == [0, 0]
    ranks.stop()

    words = ["train", str(config_file), *settings, "--nproc-per-node", "2"]
    command = [sys.executable, "-m", "mup_megatron", *words]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), start_new_session=True
    )
    path = tmp_path / "run" / "metrics.jsonl"
    until(lambda: path.exists() and len(path.read_text().splitlines()) >= 5)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == status, err
    done = len(losses(tmp_path / "run"))
    assert 5 <= done < 40
    folder = tmp_path / "run" / "checkpoints" / f"step_{done:08d}"
    assert folder.is_dir()
    again = shlex.join(["mup-megatron", *words])
    # torch may have warned at start-up, and says nothing of how it ended.
    assert (
        err.splitlines()[-1] == f"{name}: saved step {done} to {folder}; the same command goes on from there: {again}"
    )
    assert "death signal" not in err
    assert "Traceback" not in err

    resumed = ranks.run(2, bodies.command, arguments=["train", str(config_file), *settings])
    ranks.stop()
    assert [status for status, _, _ in resumed] == [0, 0], resumed
    assert f"at step {done}" in resumed[0][1]
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


@pytest.mark.slow  # tests/tuning/test_pipeline.py kills a target too
@pytest.mark.parametrize("model", ["gpt3", "bert", "t5 relative"])
def test_a_crash_loses_nothing_before_the_last_checkpoint(tmp_path: Path, model: str) -> None:
    """kill -9 between checkpoints: the curve is the uninterrupted one, every step there once."""
    keys = {**KEYS, "run__dir": str(tmp_path / "run")}
    if model == "t5 relative":
        config = make_t5(**keys, model__position_embedding_type="relative")
    else:
        config = make(MIXED, model, **keys, **({"model__bert_binary_head": True} if model == "bert" else {}))
    config_file = written(tmp_path, config)
    whole = mup("train", config_file, f"run.dir={tmp_path / 'whole'}")
    assert whole.returncode == 0, whole.stderr
    command = [sys.executable, "-m", "mup_megatron", "train", str(config_file)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
    path = tmp_path / "run" / "metrics.jsonl"
    while process.poll() is None and (not path.exists() or len(path.read_text().splitlines()) < 6):
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "it was done before it could be killed"
    resumed = mup("train", config_file)
    assert resumed.returncode == 0, resumed.stderr
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param("deepspeed", marks=pytest.mark.slow),
        pytest.param("bash", marks=pytest.mark.slow),
        pytest.param("torchrun", marks=pytest.mark.slow),
    ],
)
def test_the_literal_launch_lines(repository: Path, config_file: Path, tmp_path: Path, launcher: str) -> None:
    script = repository / "launch" / "pretrain_gpt.sh"
    lines: dict[str, list[str | Path]] = {
        "deepspeed": [BIN / "deepspeed", script],
        "bash": ["bash", script],
        "torchrun": [BIN / "torchrun", "--nproc-per-node", "2", script],
    }
    result = run(*lines[launcher], config_file, "training.train_steps=3", "tuning.run=never", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert len(losses(tmp_path / "run")) == 3
    ranks = 2 if launcher == "torchrun" else 1
    assert json.loads((tmp_path / "run" / "explain.json").read_text())["layout"]["world_size"] == ranks


@pytest.mark.slow
def test_the_shell_half_hands_over_to_deepspeed(repository: Path, tmp_path: Path) -> None:
    result = run("bash", repository / "launch" / "pretrain_gpt.sh", "none.yaml", cwd=tmp_path)
    assert result.returncode == 2
    assert "none.yaml: cannot read the config: No such file" in result.stderr


@pytest.mark.slow
def test_launched_without_a_config(repository: Path, tmp_path: Path) -> None:
    """configs/demo.yaml, overridden to a moment's length."""
    result = run(
        BIN / "deepspeed",
        repository / "launch" / "pretrain_gpt.sh",
        "training.train_steps=2",
        "training.lr_warmup_steps=0",
        "training.eval_interval=null",
        "tuning.run=never",
        "model.hidden_size=64",
        "model.ffn_hidden_size=256",
        "model.num_attention_heads=2",
        f"data.dir={make(MIXED).data.dir}-demo",
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert len(losses(tmp_path / "runs" / "demo")) == 2


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["model.hidden_sise=3"], "model.hidden_sise: unknown key; did you mean model.hidden_size?"),
        (["parallel.tensor_model_parallel_size=3"], "8 is not divisible by the tensor-parallel size 3"),
        (["--nproc-per-node", "5"], "8 cannot be shared by 5 processes"),
        (["data.files=[none.txt]"], "data.files: no such file: none.txt"),
        (["data.files=[]", "data.data_path=[none]"], "no such file: none.bin"),
        (["parallel.deepspeed_config=none.json"], "parallel.deepspeed_config: no such file: none.json"),
        (["training.precision=bf16", "parallel.zero_stage=0"], "expected stage 1"),
        (
            ["data.tokenizer.vocab_size=9999999"],
            "data.tokenizer.vocab_size: 9999999 is more than the corpus holds; expected at most",
        ),
        (["optimizer.implementation=apex"], "apex computes on CUDA alone"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_input(
    config_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], overrides: list[str], sentence: str
) -> None:
    keys = [word for word in overrides if "=" in word]
    options = [word for word in overrides if "=" not in word]
    status = cli.run(["train", str(config_file), *keys, f"data.dir={tmp_path / 'data'}", *options])
    error = capfd.readouterr().err
    assert status == 2, error
    assert sentence in error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_bad_input_under_a_launcher_is_said_once(config_file: Path) -> None:
    result = run(BIN / "torchrun", "--nproc-per-node", "2", "-m", "mup_megatron", "train", config_file, "hparams.lr=-1")
    assert result.returncode != 0
    assert result.stderr.count("hparams.lr: expected a number > 0") == 1


@pytest.mark.slow
def test_ranks_that_cannot_meet(config_file: Path) -> None:
    """SLURM's variables alone: two tasks, and nobody said where they meet."""
    variables = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
    command = [sys.executable, "-m", "mup_megatron", "train", str(config_file)]
    result = subprocess.run(command, capture_output=True, text=True, env={**environment(), **variables}, check=False)
    assert result.returncode == 2
    assert "MASTER_ADDR and MASTER_PORT: not set" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("waits_for", ["data", pytest.param("a rank", marks=pytest.mark.slow)])
def test_a_signal_before_there_is_anything_to_save(config_file: Path, tmp_path: Path, waits_for: str) -> None:
    """Exit status 143 as later, in Python's code and in torch's, where the second of two ranks never comes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = free.getsockname()
    words, variables = ["train", str(config_file)], {}
    if waits_for == "data":
        words.append(f"data.dir={tmp_path / 'data'}")
    else:
        prepare(load_config(config_file))
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        variables = dict(zip(names, ("0", "2", "0", address[0], str(address[1])), strict=True))
    command = [sys.executable, "-m", "mup_megatron", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**environment(), **variables}) as process:

        def waits() -> bool:
            assert process.poll() is None, process.communicate()
            if waits_for == "data":
                return (tmp_path / "run" / ".lock").exists()
            with socket.socket() as one:
                return one.connect_ex(address) == 0

        until(waits, 100)
        time.sleep(0.5)
        process.terminate()
        assert process.wait(20) == 143
        assert "Traceback" not in process.communicate()[1]


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.3, 0.45, 0.6, 0.8, 1.2])
def test_ctrl_c_while_modules_are_imported(config_file: Path, seconds: float) -> None:
    """Some import swallows KeyboardInterrupt: two ranks were started, and trained, behind it."""
    words = ["train", str(config_file), "training.train_steps=3000", "--nproc-per-node", "2"]
    command = [sys.executable, "-m", "mup_megatron", *words]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=environment(), start_new_session=True
    ) as process:
        time.sleep(seconds)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGINT), err
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_terminal_that_closes(config_file: Path, tmp_path: Path) -> None:
    """SIGHUP to all that runs there, and no screen any more to say it on: the run is saved all the same."""
    settings = ["training.train_steps=3000", "training.checkpoint_interval=0", "--nproc-per-node", "2"]
    command = [sys.executable, "-m", "mup_megatron", "train", str(config_file), *settings]
    process, terminal = pty.fork()
    if not process:
        os.execve(command[0], command, environment())  # noqa: S606
    os.set_blocking(terminal, False)
    path = tmp_path / "run" / "metrics.jsonl"

    def trains() -> bool:
        with contextlib.suppress(BlockingIOError):
            os.read(terminal, 1 << 16)
        return path.exists() and len(losses(tmp_path / "run")) >= 5

    until(trains, 100)
    os.close(terminal)
    _, status = os.waitpid(process, 0)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGHUP
    done = len(losses(tmp_path / "run"))
    assert (tmp_path / "run" / "checkpoints" / f"step_{done:08d}").is_dir()


@pytest.mark.slow  # tests/tuning/test_pipeline.py has two pipelines on one
def test_two_runs_on_one_folder(config_file: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mup_megatron", "train", str(config_file), "training.train_steps=500"]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment())
    try:
        while not (tmp_path / "run" / "metrics.jsonl").exists():
            time.sleep(0.05)
            assert first.poll() is None
        second = mup("train", config_file)
        assert second.returncode == 75
        assert "run.dir: another run is writing to" in second.stderr
    finally:
        first.kill()
        first.wait()


def test_a_folder_that_cannot_be_written(config_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert cli.run(["train", str(config_file), f"run.dir={tmp_path / 'file' / 'run'}"]) == 2
    assert "run.dir: cannot write to" in capfd.readouterr().err
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    for taken in ("file", "link"):
        assert cli.run(["train", str(config_file), f"run.dir={tmp_path / taken}"]) == 2
        said = capfd.readouterr().err
        assert f"run.dir: {tmp_path / taken} is no folder; expected one, or a name that is not taken" in said


@pytest.mark.parametrize(
    "keys", [["lr=1e30"], ["output_multiplier=1e30", "init_method_std=1e30"]], ids=["step 2", "step 1"]
)
def test_divergence_is_said(config_file: Path, ranks: Ranks, keys: list[str]) -> None:
    settings = [*(f"hparams.{key}" for key in keys), "training.lr_warmup_steps=0", "training.clip_grad=0"]
    ((status, _, err),) = ranks.run(1, bodies.command, arguments=["train", str(config_file), *settings])
    assert status == 5, err
    assert "loss is" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_weights_and_biases_offline(config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same run there, interrupted or not; without the package one sentence says so."""
    words = ["train", str(config_file), "run.wandb_project=proxies"]
    if importlib.util.find_spec("wandb") is None:
        result = mup(*words)
        assert result.returncode == 2
        assert "run.wandb_project: wandb is not installed" in result.stderr
        return
    monkeypatch.setenv("WANDB_MODE", "offline")
    for steps in ("6", "12"):
        result = mup(*words, f"training.train_steps={steps}", "training.lr_decay_steps=12")
        assert result.returncode == 0, result.stderr
    kept = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(kept) == 2
    assert len({path.name for path in kept}) == 1
    written = b"".join(path.read_bytes() for path in kept)
    assert len(losses(tmp_path / "run")) == 12
    assert all(json.dumps(loss).encode() in written for loss in losses(tmp_path / "run"))


def test_a_complete_run_without_checkpoints_is_not_trained_again(
    config_file: Path, tmp_path: Path, ranks: Ranks
) -> None:
    """Its metrics are all that is left of it. With the file removed, or its last evaluation missing, it trains."""
    steps = ["training.train_steps=3", "training.eval_interval=3", "training.checkpoint_interval=0"]
    words = ["train", str(config_file), *steps, "parallel.tensor_model_parallel_size=1"]
    path = tmp_path / "run" / "metrics.jsonl"

    def trained(*more: str) -> tuple[int, str, bool]:
        """Exit status, what was said, and whether the file is another one."""
        before = path.stat().st_ino if path.exists() else None
        ((status, out, err),) = ranks.run(1, bodies.command, arguments=[*words, *more])
        return status, out + err, path.stat().st_ino != before

    assert trained()[::2] == (0, True)
    first = path.read_bytes()
    status, said, written_again = trained()
    assert (status, written_again) == (0, False)
    assert (
        f"this run is complete, 3 steps; nothing to do. To train it anew, choose another run.dir or remove {path}"
        in (said.replace("\n", " "))
    )
    for more in (
        ["hparams.lr=1e-3", "--allow-change", "hparams.lr"],
        ["training.train_steps=4", "training.lr_decay_steps=3"],
    ):
        status, said, written_again = trained(*more)
        assert (status, written_again) == (2, False)
        assert f"kept no checkpoint from which it could go on with {more[0].partition('=')[0]}" in said
        assert "expected another run.dir, or that file removed to train it anew" in said
    status, said, written_again = trained("--init-from", str(tmp_path))
    assert (status, written_again) == (2, False)
    assert "began with initial values" in said
    assert path.read_bytes() == first
    explanation = path.parent / "explain.json"
    explained = explanation.read_bytes()
    for damage in ('{"parameters": []}', None):
        explanation.write_text(damage) if damage else explanation.unlink()
        status, said, written_again = trained()
        assert (status, written_again, path.read_bytes()) == (2, False, first)
        assert "run whose settings are gone (explain.json beside it is missing or damaged); expected another" in said

    lines = first.decode().splitlines(keepends=True)
    assert "eval_loss" in lines[-1]
    explanation.write_bytes(explained)
    path.write_text("".join(["{damaged\n", *lines[1:]]))
    assert trained()[::2] == (0, False)
    path.write_text("".join(lines[:-1]))  # as if it had been killed before its last evaluation
    status, said, written_again = trained("hparams.lr=1e-3")
    assert (status, written_again) == (2, False)
    assert "does not belong to this config" in said
    assert trained()[::2] == (0, True)
    assert [line.get("eval_loss") for line in metrics(path.parent)] == [
        json.loads(line).get("eval_loss") for line in lines
    ]
