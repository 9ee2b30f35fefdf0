"""The main job from the command line: real trials in real processes, killed and gone on with, then the target."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mup_megatron import cli
from mup_megatron.checkpoints.run_directory import CONTROLS
from mup_megatron.config import derive, load_config
from mup_megatron.data.prepare import prepare
from mup_megatron.engines.setup import resolve
from mup_megatron.parallel.ranks import Rank
from mup_megatron.tuning import lead
from mup_megatron.tuning.record import TransferRecord
from mup_megatron.tuning.study import Study
from mup_megatron.tuning.trial import is_out_of_memory
from mup_megatron.util.progress import Progress
from tests.helpers import bodies
from tests.helpers.commands import BIN, Background, losses, metrics, mup, run, until
from tests.helpers.configs import SEARCH, SIZES, pipeline_file
from tests.helpers.distributed import Ranks


@pytest.fixture(autouse=True, scope="module")
def _cores_for_these(ranks: Ranks) -> None:
    """These tests start processes of their own; the pool's wait no longer beside them."""
    ranks.stop()


def record(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run" / "transfer.json").read_text())


def outcome(folder: Path) -> list[tuple[Any, ...]]:
    """Every trial: what it was, how it ended, its losses to the last bit."""
    return [
        (trial["slot"], trial["seed"], tuple(trial["values"].items()), trial["state"], tuple(trial["reports"].items()))
        for trial in record(folder)["study"]["trials"]
    ]


def test_what_a_pipeline_does(whole: Path) -> None:
    out, found = (whole / "out.txt").read_text(), record(whole)
    assert out.index("plan: 5 trials of 8 steps on the proxy, halved at 2 and 4") < out.index("trial-000 (")
    trials = found["study"]["trials"]
    assert len(trials) == 7
    assert {trial["state"] for trial in trials} <= {"complete", "stopped"}
    repetitions = [trial for trial in trials if trial["repeats"]]
    assert {trial["seed"] for trial in repetitions} == {8, 9}
    whole_trials = [trial for trial in trials if trial["state"] == "complete" and not trial["repeats"]]
    assert found["study"]["slot"] == min(whole_trials, key=lambda trial: trial["loss"])["slot"]

    # The target trained with what was chosen, and the control with the same.
    for run_folder in (whole / "run", *(whole / "run" / name for name in CONTROLS)):
        resolved = yaml.safe_load((run_folder / "config.yaml").read_text())
        chosen = found["study"]["values"]
        assert {name: resolved["hparams"][name] for name in SEARCH} == chosen
        assert resolved["model"]["hidden_size"] == 96
        assert [line["step"] for line in metrics(run_folder) if "loss" in line] == list(range(1, 9))
    explained = json.loads((whole / "run" / "explain.json").read_text())
    assert explained["layout"]["tensor_model_parallel_size"] == 2
    lr = {parameter["name"]: parameter["lr"] for parameter in explained["parameters"]}
    assert lr["decoder.layers.0.mlp.linear_fc1.weight"] == pytest.approx(chosen["lr"] * 64 / 96)
    stds = {}
    for name in CONTROLS:
        control = json.loads((whole / "run" / name / "explain.json").read_text())
        assert {parameter["lr"] for parameter in control["parameters"]} == {chosen["lr"]}
        stds[name] = {parameter["name"]: parameter["init_std"] for parameter in control["parameters"]}
    fc1 = "decoder.layers.0.mlp.linear_fc1.weight"
    assert (stds["standard"][fc1], stds["fan_in"][fc1]) == (0.05, pytest.approx(0.05 / math.sqrt(96 / 64)))
    for picture in ("search.png", "loss.png"):
        assert (whole / "run" / picture).read_bytes().startswith(b"\x89PNG")
        assert f"picture: {whole / 'run' / picture}" in out
    # Trials ran as processes of their own, and left no weights behind.
    assert sorted(path.name for path in (whole / "run" / "tuning").glob("worker-*.log")) == [
        "worker-0.log",
        "worker-1.log",
    ]
    assert not list((whole / "run" / "tuning").glob("*/checkpoints"))
    rows = ["proxy loss", "target loss", *(f"the same target, {said}" for said in CONTROLS.values())]
    for row in (*rows, "tuning / target compute"):
        assert row in out
    assert sum("nats lower than" in line for line in out.splitlines()) == 2


def test_a_trial_is_the_proxy_trained_alone(whole: Path, tmp_path: Path, ranks: Ranks) -> None:
    """`train` on the proxy, with a trial's values and schedule, gives the trial's losses."""
    trial = next(t for t in record(whole)["study"]["trials"] if t["state"] == "complete" and not t["repeats"])
    sizes = [f"model.{name}={size}" for name, size in SIZES.items()]
    values = [f"hparams.{name}={value!r}" for name, value in trial["values"].items()]
    extra = ["training.eval_interval=2", f"run.dir={tmp_path / 'alone'}", "parallel.tensor_model_parallel_size=1"]
    words = ["train", str(whole / "run.yaml"), *sizes, *values, *extra]
    ((status, _, err),) = ranks.run(1, bodies.command, arguments=words)
    ranks.stop()
    assert status == 0, err
    evaluations = {str(m["step"]): m["eval_loss"] for m in metrics(tmp_path / "alone") if "eval_loss" in m}
    assert evaluations == trial["reports"]


@pytest.mark.slow
def test_killed_again_and_again(whole: Path, tmp_path: Path, start: Callable[..., Background]) -> None:
    """A trial's process, the launcher mid-study, the launcher mid-target: nothing is lost, nothing done twice.

    The outcome is that of the run that nobody disturbed, to the last bit.
    """
    path, trials = pipeline_file(tmp_path), tmp_path / "run" / "tuning"
    first = start("pipeline", path, "--nproc-per-node", "2")
    until(lambda: list(trials.glob("trial-*/metrics.jsonl")))
    os.kill(first.trials()[0], signal.SIGKILL)
    # It goes on by itself; then everything goes, in the middle of the study.
    until(lambda: len(list(trials.glob("trial-*"))) >= 4)
    first.kill()
    assert not (tmp_path / "run" / "transfer.json").exists()

    second = start("pipeline", path, "--nproc-per-node", "2")
    target = tmp_path / "run" / "metrics.jsonl"
    until(lambda: target.exists() and len(target.read_text().splitlines()) >= 3)
    second.kill()
    assert outcome(tmp_path) == outcome(whole)

    tuned = (tmp_path / "run" / "transfer.json").read_bytes()
    third = mup("pipeline", path, "--nproc-per-node", "2")
    assert third.returncode == 0, third.stderr
    assert "nothing to tune" in third.stdout
    assert "to add trials" not in third.stdout
    fourth = mup("tune", path, "tuning.trials=40", "--nproc-per-node", "2")
    assert "it has 5 trials of tuning.trials=40; to add trials, move it away" in fourth.stdout, fourth.stdout
    assert (tmp_path / "run" / "transfer.json").read_bytes() == tuned
    assert losses(tmp_path / "run") == losses(whole / "run")


@pytest.mark.slow
def test_tuning_alone_under_the_deepspeed_launcher(repository: Path, whole: Path, tmp_path: Path) -> None:
    """launch/tune_proxy.sh on two ranks: the record of the whole pipeline, exit status 0 although rank 0 ends first."""
    script, record_file = repository / "launch" / "tune_proxy.sh", tmp_path / "shared" / "transfer.json"
    launch = BIN / "deepspeed", "--num_gpus", "2", script
    result = run(*launch, pipeline_file(tmp_path), f"tuning.record={record_file}", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert json.loads(record_file.read_text())["values"] == record(whole)["values"]
    assert f"record: {record_file}" in result.stdout
    assert f"picture: {tmp_path / 'run' / 'search.png'}" in result.stdout
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert mup("report", tmp_path / "run").returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_while_tuning(
    tmp_path: Path, start: Callable[..., Background], number: signal.Signals, status: int
) -> None:
    """Ctrl-C reaches the trial's process too, which leaves it to its worker."""
    long = {"tuning__train_steps": 4000, "tuning__max_compute_share": 1e4}
    path = pipeline_file(tmp_path, **long, tuning__trials=1, tuning__repeat_best=0)
    command = start("tune", path)
    steps = tmp_path / "run" / "tuning" / "trial-000" / "metrics.jsonl"
    until(lambda: steps.exists() and len(steps.read_text().splitlines()) > 5)
    for process in [command.process.pid, *(command.trials() if number == signal.SIGINT else [])]:
        os.kill(process, number)
    _, err = command.process.communicate(timeout=120)
    assert command.process.returncode == status, err
    assert f"the trials at hand are saved in {tmp_path / 'run' / 'tuning'}; the same command goes on" in err
    assert "Traceback" not in err
    assert list((steps.parent / "checkpoints").glob("step_*"))
    assert [trial.state for trial in Study(load_config(path)).trials()] == ["waiting"]


@pytest.mark.slow
def test_one_bad_trial_costs_that_trial_alone(tmp_path: Path, start: Callable[..., Background]) -> None:
    """A process that hangs, one that is killed each time, a rate that diverges; the rest is as ever."""
    path = pipeline_file(
        tmp_path,
        tuning__sampler="grid",
        tuning__pruner="none",
        tuning__search={"lr": {"choice": [0.005, 0.01, 0.011, 1e30]}},
        tuning__trials=4,
        tuning__hang_timeout=20,
        tuning__repeat_best=0,
        tuning__train_steps=30,
        training__clip_grad=0.0,
    )
    command, trials = start("tune", path), tmp_path / "run" / "tuning"

    def running(slot: int, attempt: int) -> int:
        """The process of a trial, once it has taken a step there."""
        metrics = trials / f"trial-{slot:03d}" / "metrics.jsonl"
        lines = len(metrics.read_text().splitlines()) if attempt else 0
        until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > lines)
        return until(command.trials)[0]

    def ended(process: int) -> None:
        until(lambda: process not in command.trials())

    for slot, how in ((1, signal.SIGSTOP), (2, signal.SIGKILL)):  # slot 0 diverges by itself
        for attempt in range(2):
            victim = running(slot, attempt)
            os.kill(victim, how)
            ended(victim)
    out, err = command.process.communicate(timeout=240)
    assert command.process.returncode == 0, err
    found = Study(load_config(path)).trials()
    assert (found[1].state, found[1].reason) == ("failed", "no step in 20 s (tuning.hang_timeout), twice")
    assert (found[2].state, found[2].reason) == ("failed", "its process died (SIGKILL), twice")
    assert (found[0].values["lr"], found[0].state) == (1e30, "diverged")
    assert found[3].state == "complete"
    assert "trial-001: no step in 20 s (tuning.hang_timeout); it goes on from its last checkpoint" in out
    assert record(tmp_path)["study"]["values"]["lr"] < 1


def test_what_is_out_of_memory() -> None:
    """Torch's own errors: of memory that is not there, and of anything else."""
    with pytest.raises(RuntimeError) as memory:
        torch.empty(2**60)
    with pytest.raises(RuntimeError) as other:
        torch.empty(2) + torch.empty(3)
    assert is_out_of_memory(memory.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(other.value)


@pytest.mark.slow
def test_a_record_that_another_study_wrote_meanwhile_stays(
    whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two configs of one family name one record; a target has read it by then, and goes on with no other values."""
    path = tmp_path / "record.json"
    config = derive(load_config(whole / "run.yaml"), {"tuning.record": str(path)})
    rank, study = Rank(world_size=2), Study(config)
    with Progress(True) as progress:
        lead._write_record(resolve(config, 2), rank, study, progress)
        assert TransferRecord.expect(path, config).values == record(whole)["values"]
        before = path.read_bytes()
        assert "written meanwhile" not in capfd.readouterr().out
        lead._write_record(resolve(config, 2), rank, study, progress)
    assert path.read_bytes() == before
    assert f"written meanwhile, for {config.run.name}; it stays, and its values" in capfd.readouterr().out


@pytest.mark.slow
def test_two_pipelines_on_one_folder(tmp_path: Path, start: Callable[..., Background]) -> None:
    path = pipeline_file(tmp_path, tuning__train_steps=4000)
    start("tune", path)
    until(lambda: (tmp_path / "run" / "tuning" / "journal.log").exists())
    second = mup("pipeline", path)
    assert second.returncode == 75
    assert "run.dir: another run is writing to" in second.stderr


@pytest.mark.slow
def test_a_full_disk(tmp_path: Path) -> None:
    """No file may grow beyond 4 kB, so the study's journal cannot go on: one sentence. With room again, it goes on."""
    path = pipeline_file(tmp_path, tuning__trials=40, tuning__pruner="none")
    prepare(load_config(path))
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)); "
    result = run(sys.executable, "-c", limit + "from mup_megatron.cli import main; main()", "tune", path)
    assert result.returncode == 2, result.stderr
    said = result.stderr.strip().splitlines()[-1]
    assert ": file too large while writing " in said
    assert said.endswith("; what was written before is whole, the same command goes on when there is room")
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "run" / "transfer.json").exists()
    study = Study.create(load_config(path))
    assert [trial.state for trial in study.trials()] == ["waiting"] * 40


@pytest.mark.slow
def test_a_disk_that_fills_up_under_a_trial(tmp_path: Path) -> None:
    """A file system of 1.5 MB: the trial's checkpoint does not fit. Nothing is lost: the trial waits for room."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", small], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a small file system can be mounted by root alone")
    path = pipeline_file(tmp_path, run__dir=str(small / "run"), tuning__trials=2)
    try:
        result = mup("tune", path)
        assert result.returncode == 2, result.stderr
        assert "no space left on device while writing the checkpoint of step" in result.stderr
        assert "; what was written before is whole, the same command goes on when there is room" in result.stderr
        assert "Traceback" not in result.stderr
        assert not (small / "run" / "transfer.json").exists()
        assert [trial.state for trial in Study(load_config(path)).trials()] == ["waiting", "waiting"]
        subprocess.run(["mount", "-o", "remount,size=64m", small], check=True)
        assert mup("tune", path).returncode == 0
    finally:
        subprocess.run(["umount", "-l", small], check=True)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["tuning.search.lr.log_uniform=[1,0.1]"], "tuning.search.lr: low 1.0 is not below high 0.1"),
        (["tuning.search.rate.uniform=[0,1]"], "tuning.search.rate: unknown hyperparameter; known: lr,"),
        (["tuning.search.lr_schedule.choice=[cosin]"], "'cosin' is no value of lr_schedule"),
        (["tuning.search.lr_schedule.choice=[WSD]"], "'WSD' is no value of lr_schedule: missing; the WSD schedule"),
        (
            ["tuning.search.one_minus_beta2.uniform=[0.0,0.2]"],
            "0.0 is no value of one_minus_beta2: expected a number above 0, and at most 1",
        ),
        (
            ["tuning.search.one_minus_beta1.choice=[0.1]", "optimizer.name=sgd"],
            "tuning.search.one_minus_beta1: moves nothing here: sgd has no betas; expected another optimizer.name",
        ),
        (
            ["tuning.search.one_minus_momentum.choice=[0.1]", "optimizer.name=lion"],
            "tuning.search.one_minus_momentum: moves nothing here: lion has no momentum; expected another optimizer",
        ),
        (["optimizer.betas.1=1.0"], "optimizer.betas.1: expected a number < 1.0, found 1.0"),
        (["optimizer.betas.2=0.9"], "optimizer.betas: has 2 entries, so optimizer.betas.2 cannot be set"),
        (["tuning.search.lr.log_uniform=null", "tuning.search.lr.uniform=[-1,1]"], "-1.0 is no value of lr"),
        (
            ["tuning.search.lr.log_uniform=[1e-4,1e-1]", "training.lr_warmup_init=1e-3"],
            "tuning.search.lr: 0.0001 is no value of lr: 0.001 is above the peak, hparams.lr 0.0001",
        ),
        (["proxy.kv_channels=16"], "proxy.kv_channels: kv_channels differs from the base without being declared"),
        (["tuning.micro_batch_size=3"], "tuning.micro_batch_size: 3 does not divide"),
        (["tuning.storage=somewhere"], "tuning.storage: expected journal, or a database such as sqlite:///"),
        (["tuning.search={}"], "tuning.search: missing; expected what to tune"),
        (["tuning.run=never", "tuning.record=none.json"], "tuning.record: no such file: none.json"),
        (["parallel.deepspeed_config=none.json"], "parallel.deepspeed_config: no such file: none.json"),
        (["data.split='100,0,0'"], "data.split: 100,0,0 holds nothing to validate on"),
        (["training.lr_warmup_steps=6", "tuning.train_steps=1"], "training.lr_warmup_steps: 1 leaves nothing of the 1"),
        (["tuning.record=/proc/none/transfer.json"], "tuning.record: cannot write to /proc/none: No such file"),
        (["tuning.max_compute_share=0.01"], "tuning.max_compute_share: tuning would take"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_input(tmp_path: Path, capfd: pytest.CaptureFixture[str], overrides: list[str], sentence: str) -> None:
    status = cli.run(["pipeline", str(pipeline_file(tmp_path)), "parallel.tensor_model_parallel_size=1", *overrides])
    error = capfd.readouterr().err
    assert status == 2, error
    assert sentence in error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "run" / "tuning").exists()


def test_a_control_that_cannot_be_is_refused_first(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A standard run needs no base; the same target in fan_in does, and says so before anything is trained."""
    path = pipeline_file(tmp_path, parametrization__name="standard", base={}, proxy={}, tuning__run="never")
    assert cli.run(["pipeline", str(path), "parallel.tensor_model_parallel_size=1", "--control"]) == 2
    assert f"{path}: base: missing; expected the sizes that grow" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_paper_s_proxy_takes_real_steps(repository: Path, tmp_path: Path) -> None:
    """GPT-3's proxy of 38.7M parameters, 32 layers and 50257 tokens: five steps through the tuning path."""
    import numpy as np
    import torch
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    tokens = np.frombuffer(Path(torch.__file__).read_bytes(), dtype=np.uint8).astype(np.int64) * 190 % 50257
    builder = IndexedDatasetBuilder(str(tmp_path / "text.bin"), dtype=DType.optimal_dtype(50257))
    for document in np.array_split(tokens, 8):
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(str(tmp_path / "text.idx"))
    result = mup(
        "tune",
        repository / "configs" / "gpt3" / "6.7b.yaml",
        f"run.dir={tmp_path / 'run'}",
        f"tuning.record={tmp_path / 'run' / 'transfer.json'}",
        f"data.data_path=[{tmp_path / 'text'}]",
        "data.split=50,50,0",
        "data.tokenizer={library: 'null', vocab_size: 50257}",
        "training.precision=fp32",
        "training.seq_length=64",
        "training.eval_steps=1",
        "tuning.train_steps=5",
        "tuning.trials=1",
        "tuning.repeat_best=0",
        "tuning.global_batch_size=2",
        "tuning.micro_batch_size=2",
    )
    assert result.returncode == 0, result.stderr
    assert "38.7 M" in result.stdout
    steps = [line for line in metrics(tmp_path / "run" / "tuning" / "trial-000") if "loss" in line]
    assert len(steps) == 5
    explained = json.loads((tmp_path / "run" / "tuning" / "trial-000" / "explain.json").read_text())
    assert explained["config"]["model"]["num_layers"] == 32
    assert len(explained["parameters"]) == 388
    assert all(parameter["lr_multiplier"] == 1.0 for parameter in explained["parameters"])
