"""The pipeline on a real SLURM: from one sbatch to the target's last step; workers, jobs and nodes die on the way."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import slurm_cluster
from tests.helpers.commands import losses, metrics, mup, until
from tests.helpers.configs import pipeline_file
from tests.helpers.distributed import Ranks
from tests.helpers.slurm_cluster import Cluster

PATIENCE = 300.0
SLURM = {"nodes": 2, "gpus_per_node": 0, "time": "00:10:00"}


@pytest.fixture(scope="module")
def cluster(ranks: Ranks) -> Iterator[Cluster]:
    if reason := slurm_cluster.missing():
        pytest.skip(reason)
    ranks.stop()
    cluster = Cluster()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
    assert not cluster.processes()


def config_file(folder: Path, **overrides: Any) -> Path:
    folder.mkdir(exist_ok=True)
    return pipeline_file(folder, slurm=SLURM, tuning__lease_timeout=5, **overrides)


def submit(cluster: Cluster, repository: Path, folder: Path, script: str, *arguments: str | Path) -> dict[str, str]:
    """Types sbatch, and nothing else; the numbers of the jobs that came of it, by stage."""
    typed = cluster.run("sbatch", "--parsable", repository / "launch" / "slurm" / script, *arguments, cwd=folder)
    assert typed.returncode == 0, typed.stderr
    until(lambda: cluster.state(typed.stdout.strip()) in ("COMPLETED", "FAILED"))
    screen = next(folder.glob(f"slurm-*-{typed.stdout.strip()}.out")).read_text()
    jobs = {line.split(":")[0]: line.split()[2].rstrip(";") for line in screen.splitlines() if ": job " in line}
    assert jobs, screen
    return jobs


def screens(folder: Path) -> str:
    return "".join(path.read_text() for path in sorted((folder / "run" / "logs").glob("*.out")))


def await_jobs(cluster: Cluster, folder: Path, jobs: dict[str, str], seconds: float = PATIENCE) -> str:
    """Waits for the end of jobs, which must be good; what their screens say."""
    ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
    with contextlib.suppress(AssertionError):
        until(lambda: all(cluster.state(job) in ends for job in jobs.values()), seconds, 0.2)
    text = screens(folder)
    assert {cluster.state(job) for job in jobs.values()} == {"COMPLETED"}, text
    return text


def outcome(folder: Path) -> list[Any]:
    trials = json.loads((folder / "run" / "transfer.json").read_text())["study"]["trials"]
    return [(trial["slot"], trial["seed"], trial["values"], trial["state"], trial["reports"]) for trial in trials]


@pytest.mark.slow
def test_one_sbatch(cluster: Cluster, repository: Path, tmp_path: Path) -> None:
    """Proxy and target from one line: an array of two workers, the record, the target at TP 2 over two nodes."""
    path = config_file(tmp_path, tuning__trials=2, tuning__repeat_best=0)
    jobs = submit(cluster, repository, tmp_path, "pipeline.sbatch", path)
    assert set(jobs) == {"tune", "pretrain"}
    screen = await_jobs(cluster, tmp_path, jobs)
    assert "tuned values of this family, found" in screen
    assert [line["step"] for line in metrics(tmp_path / "run") if "loss" in line] == list(range(1, 9))
    layout = json.loads((tmp_path / "run" / "explain.json").read_text())["layout"]
    assert layout["tensor_model_parallel_size"] == 2
    names = [f"node1-rank-{0}.log", f"node{2 if cluster.separate else 1}-rank-1.log"]
    logs = sorted(path.name for path in (tmp_path / "run" / "logs").glob("pretrain-*.0/*.log"))
    assert len(logs) == 2
    assert not cluster.separate or logs == names
    assert "step 8/8" in (tmp_path / "run" / "logs" / f"pretrain-{jobs['pretrain']}.out").read_text()


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("slurm.nodes=4", "run.yaml: slurm.nodes: 4 nodes, and partition main has 2"),
        ("slurm.gpus_per_node=2", "run.yaml: slurm: sbatch refused the pretrain job: "),
        ("slurm.partition=none", "run.yaml: slurm: sbatch refused the pretrain job: "),
        ("slurm.container_image=docker://x", "run.yaml: slurm.container_image: this SLURM has no --container-image"),
    ],
)
def test_more_than_there_is(cluster: Cluster, tmp_path: Path, setting: str, sentence: str) -> None:
    """One sentence, and nothing is submitted."""
    words = ["slurm", "pretrain", str(config_file(tmp_path, tuning__run="never")), setting]
    result = cluster.run(sys.executable, "-m", "mup_megatron", *words)
    assert result.returncode == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert sentence in result.stderr
    assert not cluster.run("squeue", "-h").stdout.strip()


# Steps enough for a trial to be still running when SLURM has suspended its worker.
STUDY = {"tuning__train_steps": 96, "tuning__trials": 4}


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The outcome of a study that nobody disturbs."""
    folder = tmp_path_factory.mktemp("quiet")
    assert mup("tune", config_file(folder, **STUDY), "--nproc-per-node", "2").returncode == 0
    return outcome(folder)


@pytest.mark.slow
def test_a_worker_is_suspended(cluster: Cluster, repository: Path, tmp_path: Path, quiet: list[Any]) -> None:
    """`scontrol suspend` for longer than the lease: another worker runs its trial, beside the folder that it holds."""
    jobs = submit(cluster, repository, tmp_path, "tune_proxy.sbatch", config_file(tmp_path, **STUDY))
    tuning = tmp_path / "run" / "tuning"
    until(lambda: len(list(tuning.glob("trial-*/metrics.jsonl"))) == 2 and len(metrics_lines(tuning)) > 12, PATIENCE)
    leader = holder(tmp_path / "run" / ".pipeline.lock")
    node = next(n for n in (1, 2) if leader not in cluster.processes(f"node{n}", "mup_megatron tune"))
    (job,) = cluster.run("squeue", "-h", "-r", "-t", "R", "-w", f"node{node}", "-o", "%i").stdout.split()
    assert not cluster.run("scontrol", "suspend", job).returncode
    until(lambda: list(tuning.glob("trial-*-again-1/metrics.jsonl")), PATIENCE)
    assert not cluster.run("scontrol", "resume", job).returncode
    screen = await_jobs(cluster, tmp_path, jobs, 400)
    assert "is held by a worker that is stopped; it starts again beside it" in screen
    assert "this worker had been silent for too long, another one has it now" in screen
    assert outcome(tmp_path) == quiet


def holder(lock: Path) -> int:
    """The process that holds a file (proc(5), /proc/locks)."""
    inode = str(lock.stat().st_ino)
    lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return next(int(line[4]) for line in lines if line[1] == "FLOCK" and line[5].endswith(f":{inode}"))


@pytest.mark.slow
def test_workers_killed_mid_trial(cluster: Cluster, repository: Path, tmp_path: Path, quiet: list[Any]) -> None:
    """Both workers, one after the other, so that whoever leads is among them; the study is that of a quiet run."""
    jobs = submit(cluster, repository, tmp_path, "tune_proxy.sbatch", config_file(tmp_path, **STUDY))
    for node in (1, 2):
        until(lambda: len(metrics_lines(tmp_path / "run" / "tuning")) > 12 * node, PATIENCE)  # noqa: B023
        os.kill(worker_of(cluster, node), signal.SIGKILL)
    screen = await_jobs(cluster, tmp_path, jobs, 400)
    assert screen.count("failure 1 since it last got on; requeued") == 2
    assert "refused" not in screen
    assert outcome(tmp_path) == quiet


def worker_of(cluster: Cluster, node: int) -> int:
    """The process that tunes there. What it starts has its command line too, until it has one of its own."""
    found = partial(cluster.processes, f"node{node}", "mup_megatron tune")
    return int(until(lambda: len(workers := found()) == 1 and workers)[0])


def metrics_lines(directory: Path) -> list[str]:
    return [line for path in directory.glob("trial-*/metrics.jsonl") for line in path.read_text().splitlines()]


STEPS = 60


def target_file(folder: Path, **overrides: Any) -> Path:
    keys = {
        "tuning__run": "never",
        "training__train_steps": STEPS,
        "training__checkpoint_interval": 10,
        "training__eval_interval": 20,
    }
    return config_file(folder, **{**keys, **overrides})


@pytest.fixture(scope="module")
def curve(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[float]]:
    """Losses of the target without SLURM and without a disturbance, by engine."""
    known: dict[str, list[float]] = {}

    def of(engine: str) -> list[float]:
        if engine not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            result = mup("train", target_file(folder, parallel__engine=engine), "--nproc-per-node", "2")
            assert result.returncode == 0, result.stderr
            known[engine] = losses(folder / "run")
        return known[engine]

    return of


def steps(folder: Path) -> int:
    path = folder / "run" / "metrics.jsonl"
    return path.read_text().count('"loss"') if path.exists() else 0


@pytest.mark.slow
def test_the_signal_before_the_time_limit(
    cluster: Cluster, repository: Path, tmp_path: Path, curve: Callable[[str], list[float]]
) -> None:
    """It saves, requeues itself, and goes on where it was. A slurmd that died before left no trace."""
    path = target_file(tmp_path, training__checkpoint_interval=STEPS)  # only the signal saves before the end
    jobs = submit(cluster, repository, tmp_path, "pretrain_gpt.sbatch", path)
    until(lambda: steps(tmp_path) > 5, PATIENCE)
    cluster.kill_daemon(2)
    cluster.start_node(2)
    until(lambda: steps(tmp_path) > 15, PATIENCE)
    assert not cluster.run("scancel", "--batch", "--signal=USR1", jobs["pretrain"]).returncode
    screen = await_jobs(cluster, tmp_path, jobs)
    saved = re.findall(r"SIGTERM: saved step (\d+)", screen)
    assert saved
    assert f"at step {saved[0]}" in screen
    assert int(saved[0]) < STEPS
    assert cluster.restarts(jobs["pretrain"]) == 1
    assert losses(tmp_path / "run") == curve("deepspeed")


@pytest.mark.slow
def test_a_node_that_dies(
    cluster: Cluster, repository: Path, tmp_path: Path, curve: Callable[[str], list[float]]
) -> None:
    """Its slurmd, its step and its rank are gone at once and slurmd comes back: on from the last checkpoint."""
    jobs = submit(
        cluster, repository, tmp_path, "pretrain_gpt.sbatch", target_file(tmp_path, parallel__engine="megatron")
    )
    until(lambda: steps(tmp_path) > 15, PATIENCE)
    cluster.kill_node(2)
    until(lambda: cluster.state(jobs["pretrain"]) != "RUNNING")
    cluster.start_node(2)
    screen = await_jobs(cluster, tmp_path, jobs)
    assert "resumed from" in screen
    assert cluster.restarts(jobs["pretrain"]) >= 1
    assert losses(tmp_path / "run") == curve("megatron")


@pytest.mark.slow
def test_a_rank_that_dies_is_named(cluster: Cluster, repository: Path, tmp_path: Path) -> None:
    """The first failing rank is on the screen with its log, not the others, which then miss it; the job goes on."""
    jobs = submit(cluster, repository, tmp_path, "pretrain_gpt.sbatch", target_file(tmp_path))
    until(lambda: steps(tmp_path) > 15, PATIENCE)
    [victim] = cluster.processes("node2", "mup_megatron pipeline")
    os.kill(victim, signal.SIGKILL)
    screen = await_jobs(cluster, tmp_path, jobs)
    assert re.search(r"rank 1 on \S+ failed first, exit status 137", screen)
    assert screen.count("failed first") == 1
    assert steps(tmp_path) == STEPS


@pytest.mark.slow
def test_a_folder_that_an_orphan_holds(cluster: Cluster, repository: Path, tmp_path: Path) -> None:
    """A job that starts beside ranks which were left behind is no bad input: it comes back when they are gone."""
    path = target_file(tmp_path)
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / ".pipeline.lock").open("w") as orphan:
        fcntl.flock(orphan, fcntl.LOCK_EX)
        jobs = submit(cluster, repository, tmp_path, "pretrain_gpt.sbatch", path)
        until(lambda: "exit status 75, failure 1 since it last got on; requeued" in screens(tmp_path), PATIENCE)
    screen = await_jobs(cluster, tmp_path, jobs)
    assert "run.dir: another run is writing to" in screen
    assert "Traceback" not in screen
    assert steps(tmp_path) == STEPS


@pytest.mark.slow
def test_a_loss_that_is_no_number(cluster: Cluster, repository: Path, tmp_path: Path) -> None:
    """The same steps from the last checkpoint would come to the same: the job ends, and says why."""
    path = target_file(tmp_path, hparams__lr=1e30, training__lr_warmup_steps=0, training__clip_grad=0)
    jobs = submit(cluster, repository, tmp_path, "pretrain_gpt.sbatch", path)
    until(lambda: "not requeued" in screens(tmp_path), PATIENCE)
    screen = screens(tmp_path)
    assert re.search(r"mup-megatron: loss is \S+ at step \d+; the last checkpoint is untouched", screen)
    assert re.search(r"pretrain-\d+: exit status 5; not requeued", screen)
    [job] = jobs.values()
    until(lambda: cluster.state(job) == "FAILED", PATIENCE)
