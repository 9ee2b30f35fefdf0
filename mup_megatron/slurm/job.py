"""The batch step of a job: one srun, the signal before the time limit, requeueing. Public names: `run_job`, `is_ours`.

The batch step outlives what it starts. SIGUSR1, which SLURM sends it before the time limit, becomes SIGTERM to the step
(never to srun, which would kill its tasks at once); when the ranks have saved, the job requeues itself. A step that
failed is requeued too, a few times in a row without progress, since a lost node often shows in its peers first.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from mup_megatron.config import Config
from mup_megatron.parallel.launch import LOGS
from mup_megatron.slurm import node
from mup_megatron.slurm.submit import STAGE, call, container, logs_directory, processes
from mup_megatron.util.errors import UserError
from mup_megatron.util.files import read_text, write_whole

_FINAL = (2, 4, 5)
"""Exit statuses behind which a job does not go on by itself: bad input, an alarm that stops the run, a loss that is no
number, which the same steps from the last checkpoint would bring again."""
_POLL_SECONDS = 0.2
_ASK_SECONDS = 5.0
_PAUSE_SECONDS = 120.0
"""Per failure before: SLURM takes some minutes (SlurmdTimeout) to notice that a node is gone."""


def is_ours(stage: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is the batch step of a job that was submitted to run a stage."""
    return environment.get(STAGE) == stage and "SLURM_JOB_ID" in environment


def run_job(stage: str, config: Config, arguments: list[str]) -> int:
    """Runs a stage on this job's nodes; its exit status.

    Args:
        stage: tune or pretrain.
        config: the run.
        arguments: CONFIG [KEY.PATH=VALUE]...

    Raises:
        UserError: bad input.
    """
    job = _job()
    name = f"{stage}-{job}"
    logs = logs_directory(config) / f"{name}.{os.environ.get('SLURM_RESTART_COUNT', '0')}"
    logs.mkdir(parents=True, exist_ok=True)
    command = _tune(config, arguments) if stage == "tune" else _pretrain(config, arguments, logs)
    print(f"{name}: on {os.environ.get('SLURM_JOB_NODELIST')}; logs of its ranks: {logs}", flush=True)
    status, signals = _run(command, job, logs)
    done = stage == "tune" and config.record_path.exists()
    if not status or done:
        return 0
    if signal.SIGTERM in signals:  # cancelled, or SLURM requeues it itself
        return status
    failures = _count_failure(logs_directory(config) / f"{name}.failures.json", _progress(config, stage))
    if signal.SIGUSR1 in signals and failures <= config.slurm.retries:
        _requeue(job, "stopped before the time limit")
        return status
    status = _failure(logs).get("status", status)
    if stage == "tune":
        _show_errors(logs)
    if status in _FINAL or failures > config.slurm.retries:
        why = "" if status in _FINAL else f" after {failures} ends without a new checkpoint or trial"
        print(f"{name}: exit status {status}; not requeued{why}", flush=True)
        return status
    pause = _PAUSE_SECONDS * (failures - 1)
    print(
        f"{name}: exit status {status}, failure {failures} since it last got on; requeued in {pause:.0f} s", flush=True
    )
    time.sleep(pause)
    _requeue(job, "failed")
    return status


def _job(environment: Mapping[str, str] = os.environ) -> str:
    """This job, as SLURM's commands take it: the number of an array's last job is that of the whole array, too."""
    if array := environment.get("SLURM_ARRAY_JOB_ID"):
        return f"{array}_{environment['SLURM_ARRAY_TASK_ID']}"
    return environment["SLURM_JOB_ID"]


def _srun(config: Config) -> list[str]:
    # Without a binding a task has all cores of its share, which its ranks, or workers, and their threads divide.
    return ["srun", "--cpu-bind=none", *container(config, os.environ)]


def _python(config: Config) -> str:
    """The interpreter of the tasks; a container has its own."""
    return "python3" if container(config, os.environ) else sys.executable


def _tune(config: Config, arguments: list[str]) -> list[str]:
    """Workers that come and go by themselves: one that dies takes no other with it."""
    workers = processes(config)
    tasks = [f"--ntasks={workers}", f"--ntasks-per-node={workers}", "--overcommit"]
    program = [_python(config), "-m", "mup_megatron", "tune", *arguments, "--join"]
    return [*_srun(config), *tasks, "--kill-on-bad-exit=0", "--wait=0", *program]


def _pretrain(config: Config, arguments: list[str], logs: Path) -> list[str]:
    """A task per node, which starts the node's ranks; if one fails, all end."""
    hosts = call("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]).stdout.split()
    # Another one at every start: the last may be held by another program, or by a rank that was left behind.
    start = int(os.environ["SLURM_JOB_ID"]) + 1009 * int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    port = 20000 + start % 10000
    tasks = [f"--ntasks={len(hosts)}", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    program = [
        _python(config),
        "-m",
        "mup_megatron.slurm.node",
        _address(hosts[0]),
        str(port),
        str(processes(config)),
        str(logs),
    ]
    return [*_srun(config), *tasks, *program, "pipeline", *arguments]


def _address(node: str) -> str:
    """A node's name; where that resolves to nothing, the address at which SLURM itself reaches the node."""
    try:
        socket.gethostbyname(node)
    except OSError:
        found = re.search(r"NodeAddr=(\S+)", call("scontrol", "-o", "show", "node", node).stdout)
        return found[1] if found else node
    return node


def _run(command: list[str], job: str, logs: Path) -> tuple[int, set[int]]:
    """Runs the step; its exit status, and the signals that came meanwhile."""
    came: set[int] = set()

    def note(number: int, _frame: FrameType | None) -> None:
        came.add(number)

    signal.signal(signal.SIGUSR1, note)
    signal.signal(signal.SIGTERM, note)  # the ranks have it too; what they save takes its time
    environment = {name: value for name, value in os.environ.items() if name != STAGE}
    step = subprocess.Popen(command, env={**environment, LOGS: str(logs)})  # noqa: S603
    told, tried = False, 0.0
    while step.poll() is None:
        if signal.SIGUSR1 in came and not told and time.monotonic() - tried > _ASK_SECONDS:
            tried = time.monotonic()
            print("SIGUSR1: asking every rank to save and stop", flush=True)
            told = not call("scancel", "--signal=TERM", f"{job}.0").returncode
        time.sleep(_POLL_SECONDS)
    status = step.returncode
    return (status if status >= 0 else 128 - status), came


def _failure(logs: Path) -> dict[str, int]:
    try:
        return json.loads(read_text(logs / node.FAILURE))
    except (OSError, ValueError):
        return {}


def _show_errors(logs: Path) -> None:
    """Of a worker that died: its error; the first worker's is on the screen already."""
    for path in sorted(logs.glob("*-rank-*.log")):
        if not path.name.endswith("-rank-0.log") and (error := node.first_error(path)).startswith("Traceback"):
            print(f"{path}:\n{error}", flush=True)
            return


def _progress(config: Config, stage: str) -> str:
    """What changes when a stage gets on: the trials that have begun, which `pretrain` may have too, and checkpoints."""
    directory = Path(config.run.dir)
    trials = ("tuning/trial-*", "tuning/trial-*/*/step_*[0-9]")
    patterns = (*trials, "checkpoints/step_*[0-9]") if stage == "pretrain" else trials
    names = sorted(str(path.relative_to(directory)) for pattern in patterns for path in directory.glob(pattern))
    return hashlib.sha256("\n".join(names).encode()).hexdigest()


def _count_failure(path: Path, progress: str) -> int:
    """Failures in a row without progress, this one included."""
    try:
        before = json.loads(read_text(path))
    except (OSError, ValueError):
        before = {"progress": None, "failures": 0}
    failures = before["failures"] + 1 if before["progress"] == progress else 1
    write_whole(path, json.dumps({"progress": progress, "failures": failures}))
    return failures


def _requeue(job: str, why: str) -> None:
    """Puts this job back into the queue, which ends this process.

    Raises:
        UserError: SLURM refused.
    """
    print(f"job {job}: {why}; requeueing", flush=True)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    result = call("scontrol", "requeue", job)
    if result.returncode:
        raise UserError(f"job {job}: scontrol requeue refused: {result.stderr.strip()}; submit it again, it goes on")
    time.sleep(60)
