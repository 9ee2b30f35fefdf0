"""What the jobs of launch/slurm ask for, and what they refuse; no SLURM needed."""

from __future__ import annotations

import os
import shlex
import socket
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mup_megatron import cli
from mup_megatron.config import load_config, parse_overrides
from mup_megatron.parallel import launch
from mup_megatron.slurm import job as batch
from mup_megatron.slurm import node
from mup_megatron.slurm.submit import STAGE, Job, jobs
from mup_megatron.util.errors import ConfigError
from tests.helpers.commands import environment
from tests.helpers.configs import pipeline_file


def planned(folder: Path, stage: Any = "pipeline", variables: dict[str, str] | None = None, **keys: Any) -> list[Job]:
    path = pipeline_file(folder, **keys)
    return jobs(stage, load_config(path), [str(path)], variables or {})


def option(job: Job, name: str) -> str | None:
    return next((word.partition("=")[2] for word in job.options if word.startswith(f"{name}=")), None)


def test_jobs_that_the_trials_keep_busy(tmp_path: Path) -> None:
    """32 trials on nodes of eight GPUs: four jobs of eight at a time; one where each GPU takes four."""
    slurm = {"nodes": 8, "gpus_per_node": 8}
    for number, array in ((1, "0-3"), (4, "0-0"), ("auto", "0-3")):
        (tmp_path / str(number)).mkdir()
        keys: dict[str, Any] = {
            "tuning__trials": 32,
            "tuning__trials_per_device": number,
            "training__global_batch_size": 64,
        }
        tune, _ = planned(tmp_path / str(number), slurm=slurm, **keys)
        assert option(tune, "--array") == array


def test_what_a_config_asks_for(tmp_path: Path) -> None:
    slurm = {"nodes": 2, "gpus_per_node": 4, "partition": "big", "account": "us", "time": "2-12", "signal_seconds": 90}
    tune, pretrain = planned(tmp_path, slurm=slurm, tuning__trials=6)
    wanted = {"--partition": "big", "--account": "us", "--time": "2-12", "--gpus-per-node": "4"}
    for job in (tune, pretrain):
        assert {name: option(job, name) for name in wanted} == wanted
        assert option(job, "--signal") == "B:USR1@90"
    assert (option(tune, "--nodes"), option(tune, "--array")) == ("1", "0-1")
    assert option(pretrain, "--nodes") == "2"
    # The target takes what the array found, or says that it is not there.
    assert pretrain.arguments[1:] == ["tuning.run=never", f'tuning.record="{tmp_path}/run/transfer.json"']
    assert "--dependency=afterany:7" in pretrain.command("7")


def test_the_records_path_is_read_as_it_is(tmp_path: Path) -> None:
    """The word that the job gets is an override, which is YAML; JSON's own form of this sign is no YAML."""
    folder = tmp_path / "a 'b' \U0001f600"
    folder.mkdir()
    _, pretrain = planned(folder, slurm={"nodes": 2, "gpus_per_node": 4})
    given = parse_overrides(pretrain.arguments[1:])
    assert given["tuning.record"] == f"{folder}/run/transfer.json"


def test_the_environment_comes_before_the_config(tmp_path: Path) -> None:
    variables = {"SBATCH_PARTITION": "other", "SBATCH_TIMELIMIT": "50", "SBATCH_GPUS_PER_NODE": "h100:2"}
    slurm = {"nodes": 1, "gpus_per_node": 8, "partition": "big", "account": "us"}
    for job in planned(tmp_path, variables=variables, slurm=slurm):
        assert (option(job, "--partition"), option(job, "--time"), option(job, "--account")) == (None, None, "us")
        assert option(job, "--gpus-per-node") == "h100:2"


@pytest.mark.parametrize(
    ("limit", "refused"),
    [("5", True), ("4:59", True), ("0:05:00", True), ("6", False), ("5:01", False), ("0:5:1", False), ("1-0", False)],
)
def test_a_time_limit_within_the_time_to_save(tmp_path: Path, limit: str, refused: bool) -> None:
    """A job that is asked to save as it begins never trains. By hand against 300 s, in sbatch's forms."""
    cases: list[dict[str, Any]] = [{"variables": {"SBATCH_TIMELIMIT": limit}, "slurm": {}}, {"slurm": {"time": limit}}]
    for given in cases:
        folder = tmp_path / next(iter(given))
        folder.mkdir()
        if not refused:
            assert len(planned(folder, **given)) == 2
            continue
        with pytest.raises(ConfigError, match=rf"slurm\.signal_seconds: 300 s before a time limit of {limit} no job"):
            planned(folder, **given)
    (tmp_path / "none").mkdir()
    assert planned(tmp_path / "none", slurm={"time": "UNLIMITED"})


def test_what_there_is_nothing_to_do_for_is_left_out(tmp_path: Path) -> None:
    slurm = {"gpus_per_node": 2}
    assert [job.stage for job in planned(tmp_path, slurm=slurm, tuning__run="never")] == ["pretrain"]
    assert [job.stage for job in planned(tmp_path, slurm=slurm, tuning__run="only")] == ["tune"]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "transfer.json").touch()
    assert [job.stage for job in planned(tmp_path, slurm=slurm)] == ["pretrain"]


def test_a_dry_run_shows_commands_and_scripts(
    tmp_path: Path, repository: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A name that a shell would run arrives as one word, here and in the command that is shown."""
    name = "a; touch oops $(touch oops) `touch oops` %j"
    path = pipeline_file(tmp_path, slurm={"gpus_per_node": 2}, run__name=name)
    assert cli.run(["slurm", "pipeline", str(path), "--dry-run"]) == 0
    out = capfd.readouterr().out
    commands = [shlex.split(line) for line in out.splitlines() if line.startswith("sbatch ")]
    assert [f"--job-name={name}-{stage}" in words for words, stage in zip(commands, ("tune", "pretrain"), strict=True)]
    for script in ("tune_proxy", "pretrain_gpt"):
        assert (repository / "launch" / "slurm" / f"{script}.sbatch").read_text() in out
    assert not (tmp_path / "run").exists()


def test_scripts_pass_on_what_they_are_given(tmp_path: Path, repository: Path) -> None:
    """Each script, run for real, with another python3 on the PATH that says what it got."""
    python = tmp_path / "python3"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    words = ["a b.yaml", "run.name=$(touch oops)`touch oops`; touch oops", "x.y='*'"]
    for script in sorted((repository / "launch" / "slurm").glob("*.sbatch")):
        variables = {**environment(), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        result = subprocess.run(
            ["bash", script, *words], cwd=tmp_path, env=variables, capture_output=True, text=True, check=True
        )
        assert result.stdout.splitlines()[4:] == words
    assert not (tmp_path / "oops").exists()


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("time", "tomorrow", "slurm.time: expected a time as sbatch takes it, such as \"24:00:00\", found 'tomorrow'"),
        ("partition", "a b", "slurm.partition: expected a name of letters"),
        ("modules", ["cuda/12", "$(reboot)"], "slurm.modules: expected a name of letters"),
        ("container_mounts", ["/a:/b"], "slurm.container_mounts: without slurm.container_image"),
        ("gpus_per_node", -1, "slurm.gpus_per_node: expected a number >= 0"),
        ("container_image", "/none/image.sqsh", "slurm.container_image: no such file: /none/image.sqsh"),
    ],
)
def test_bad_input(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    key: str,
    value: Any,
    sentence: str,
) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    path = pipeline_file(tmp_path, slurm={"gpus_per_node": 2})
    assert cli.run(["slurm", "pipeline", str(path), f"slurm.{key}={value}"]) == 2
    error = capfd.readouterr().err
    assert sentence in error
    assert len(error.strip().splitlines()) == 1


def test_no_slurm_on_the_machine(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.run(["slurm", "pipeline", str(pipeline_file(tmp_path, slurm={"gpus_per_node": 2}))]) == 2
    assert "sbatch: not on the PATH, so there is no SLURM here" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


def test_nodes_that_the_layout_does_not_fit(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = pipeline_file(tmp_path, slurm={"gpus_per_node": 3}, parallel__tensor_model_parallel_size=2)
    assert cli.run(["slurm", "pipeline", str(path), "--dry-run"]) == 2
    said = "parallel.tensor_model_parallel_size: 2 does not divide the 3 processes"
    assert said in capfd.readouterr().err


def test_what_no_engine_trains_does_not_wait_in_the_queue(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = pipeline_file(tmp_path, slurm={"gpus_per_node": 2})
    assert cli.run(["slurm", "pretrain", str(path), "training.precision=fp16", "--dry-run"]) == 2
    found = capfd.readouterr()
    assert "training.precision: fp16 is trained by mup-megatron run" in found.err
    assert "sbatch" not in found.out


def test_a_stage_is_run_only_in_a_job_of_its_own() -> None:
    assert batch.is_ours("tune", {STAGE: "tune", "SLURM_JOB_ID": "3"})
    assert not batch.is_ours("pretrain", {STAGE: "tune", "SLURM_JOB_ID": "3"})
    assert not batch.is_ours("tune", {"SLURM_JOB_ID": "3"})
    assert not batch.is_ours("tune", {STAGE: "tune"})


def test_the_number_of_an_array_s_last_job_is_the_whole_array_s() -> None:
    variables = {"SLURM_JOB_ID": "2", "SLURM_ARRAY_JOB_ID": "2", "SLURM_ARRAY_TASK_ID": "1"}
    assert batch._job(variables) == "2_1"
    assert batch._job({"SLURM_JOB_ID": "2"}) == "2"


def test_failures_count_until_something_was_done(tmp_path: Path) -> None:
    path = tmp_path / "failures.json"
    counts = [batch._count_failure(path, progress) for progress in ("", "", "step_10", "step_10", "step_20")]
    assert counts == [1, 2, 1, 2, 1]


@pytest.mark.parametrize("stage", ["tune", "pretrain"])
def test_a_trial_is_progress(tmp_path: Path, stage: str) -> None:
    """Of a pretrain job too, which tunes first where no record is there; a checkpoint of the target is pretrain's."""
    config, seen = load_config(pipeline_file(tmp_path)), []
    trial = "tuning/trial-000"
    for name in ("tuning", trial, f"{trial}/checkpoints/step_00000004", "checkpoints/step_00000008"):
        (Path(config.run.dir) / name).mkdir(parents=True, exist_ok=True)
        seen.append(batch._progress(config, stage))
    assert len(set(seen)) == (4 if stage == "pretrain" else 3)


def test_a_port_that_another_program_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is one sentence, behind which the job goes on; and the next start meets at another port."""
    monkeypatch.setenv("SLURM_NODEID", "0")
    monkeypatch.setenv("SLURM_NNODES", "1")
    for variable in (launch.LOGS, "MUP_MEGATRON_LAUNCHER", "OMP_NUM_THREADS"):
        monkeypatch.setenv(variable, "")  # so that it is as before afterwards
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status = node.main(["127.0.0.1", str(port), "1", str(tmp_path), "--version"])
    assert status == 75
    assert status not in batch._FINAL
    said = capfd.readouterr().err
    assert said == f"mup-megatron: error: 127.0.0.1:{port}: another program uses this port, at which the nodes meet\n"
    monkeypatch.setattr(batch, "call", lambda *_words: subprocess.CompletedProcess([], 0, "localhost\n", ""))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "localhost")
    config, ports = load_config(pipeline_file(tmp_path)), []
    for start in ("0", "1", "2"):
        monkeypatch.setenv("SLURM_RESTART_COUNT", start)
        words = batch._pretrain(config, [], tmp_path)
        ports.append(int(words[words.index("mup_megatron.slurm.node") + 2]))
    assert ports == [20007, 21016, 22025]


def test_the_first_error_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("step 1\nTraceback (most recent call last):\n  File\nValueError: x\n")
    assert node.first_error(log).splitlines() == ["Traceback (most recent call last):", "  File", "ValueError: x"]
    assert node.first_error(tmp_path / "none") == ""
