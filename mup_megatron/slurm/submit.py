"""A config as sbatch's options, and the submission of its jobs. Public names: `Job`, `jobs`, `submit`, `processes`.

Nothing of a config is ever text for a shell: options are words of an argument list, and the scripts of launch/slurm
expand nothing but their own arguments.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mup_megatron.config import Config
from mup_megatron.engines.setup import refuse_anywhere
from mup_megatron.parallel.layout import resolve_layout
from mup_megatron.tuning.space import check_overrides
from mup_megatron.util.errors import UserError, no_such_file, shown
from mup_megatron.util.shipped import shipped_folder

Stage = Literal["pipeline", "tune", "pretrain"]
STAGE = "MUP_MEGATRON_SLURM_STAGE"
"""Variable that tells a job which stage it was submitted to run."""
MODULES = "MUP_MEGATRON_MODULES"
"""Variable with the environment modules that a job loads, between spaces."""
IMAGE = "MUP_MEGATRON_CONTAINER_IMAGE"
"""Variable that names the container image."""

_SCRIPTS = {"tune": "tune_proxy.sbatch", "pretrain": "pretrain_gpt.sbatch"}


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job to submit.

    Args:
        stage: tune or pretrain.
        options: of sbatch.
        script: of launch/slurm.
        arguments: CONFIG [KEY.PATH=VALUE]...
    """

    stage: str
    options: list[str]
    script: Path
    arguments: list[str]

    def command(self, after: str | None = None) -> list[str]:
        """The sbatch command.

        Args:
            after: the job, if any, that must have ended before.
        """
        dependency = [f"--dependency=afterany:{after}"] if after else []
        return ["sbatch", "--parsable", *self.options, *dependency, str(self.script), *self.arguments]


def processes(config: Config, environment: Mapping[str, str] = os.environ) -> int:
    """Ranks, or workers, per node."""
    return config.slurm.processes_per_node or _gpus(config, environment) or 1


def _gpus(config: Config, environment: Mapping[str, str]) -> int:
    given = environment.get("SBATCH_GPUS_PER_NODE")
    if given is None:
        return config.slurm.gpus_per_node
    count = given.rpartition(":")[2]  # a100:8
    if not count.isdecimal():
        raise UserError(f"SBATCH_GPUS_PER_NODE: expected a number of GPUs, found {shown(given)}")
    return int(count)


def jobs(stage: Stage, config: Config, arguments: Sequence[str], environment: Mapping[str, str]) -> list[Job]:
    """The jobs of a stage, in the order in which they run.

    Args:
        stage: `pipeline` leaves out what there is nothing to do for.
        config: the run.
        arguments: CONFIG [KEY.PATH=VALUE]..., as typed.
        environment: SBATCH_* there come before the config.

    Raises:
        UserError: the layout does not fit the nodes, or a value is given that tuning would replace.
    """
    recorded, tuning = config.record_path.exists(), config.tuning.run
    stages = [stage] if stage != "pipeline" else ["tune", "pretrain"]
    if stage == "pipeline" and (recorded or tuning == "never"):
        stages.remove("tune")
    if stage == "pipeline" and tuning == "only":
        stages.remove("pretrain")
    if "tune" in stages:
        check_overrides(config)
    if "pretrain" in stages:
        refuse_anywhere(config)
        resolve_layout(config, config.slurm.nodes * processes(config, environment))
    if stages == ["tune", "pretrain"]:
        # An array ends well if its record is there, whatever became of a worker; without it the target says so.
        record = ["tuning.run=never", f"tuning.record={json.dumps(str(config.record_path), ensure_ascii=False)}"]
        return [
            _job("tune", config, arguments, environment),
            _job("pretrain", config, [*arguments, *record], environment),
        ]
    return [_job(name, config, arguments, environment) for name in stages]


def _job(stage: str, config: Config, arguments: Sequence[str], environment: Mapping[str, str]) -> Job:
    slurm = config.slurm
    own, name = {"--partition": "SBATCH_PARTITION", "--account": "SBATCH_ACCOUNT", "--time": "SBATCH_TIMELIMIT"}, ""
    values = {"--partition": slurm.partition, "--account": slurm.account, "--time": slurm.time}
    limit = environment.get("SBATCH_TIMELIMIT", slurm.time)
    if (seconds := _seconds(limit)) is not None and seconds <= slurm.signal_seconds:
        raise config.error(
            "slurm.signal_seconds",
            f"{slurm.signal_seconds} s before a time limit of {limit} no job has begun; expected less than the limit",
        )
    options = [f"{key}={value}" for key, value in values.items() if value is not None and own[key] not in environment]
    if gpus := _gpus(config, environment):
        options.append(f"--gpus-per-node={environment.get('SBATCH_GPUS_PER_NODE', gpus)}")
    if stage == "tune":
        abreast = config.tuning.trials_per_device
        at_a_time = processes(config, environment) * (1 if abreast == "auto" else abreast)
        workers = slurm.tuning_jobs or min(slurm.nodes, -(-config.tuning.trials // at_a_time))
        options += ["--nodes=1", f"--array=0-{workers - 1}"]
        name = "tune-%A_%a.out"
    else:
        options.append(f"--nodes={slurm.nodes}")
        name = "pretrain-%j.out"
    logs = str(logs_directory(config)).replace("%", "%%")
    if "\\" in logs:
        raise config.error(
            "run.dir", f"{logs_directory(config)} holds a backslash, at which sbatch changes the log's name"
        )
    return Job(
        stage=stage,
        options=[
            *options,
            "--exclusive",
            "--mem=0",
            f"--job-name={config.run.name}-{stage}",
            f"--signal=B:USR1@{slurm.signal_seconds}",
            f"--chdir={Path.cwd()}",
            f"--output={logs}/{name}",
            "--export=ALL",
        ],
        script=shipped_folder("launch") / "slurm" / _SCRIPTS[stage],
        arguments=list(arguments),
    )


def _seconds(limit: str) -> int | None:
    """Of a time limit as sbatch takes it; None where it has none."""
    days, _, rest = limit.rpartition("-")
    try:
        parts = [int(part) for part in rest.split(":")]
        units = (3600, 60, 1) if days or len(parts) == 3 else (60, 1)
        return int(days or 0) * 24 * 3600 + sum(part * unit for part, unit in zip(parts, units, strict=False))
    except ValueError:
        return None


def logs_directory(config: Config) -> Path:
    """Where the jobs' output goes, and a folder of the ranks' logs per start of a job."""
    return Path(config.run.dir).resolve() / "logs"


def submit(config: Config, planned: Sequence[Job], *, dry_run: bool, say: Callable[[str], None] = print) -> None:
    """Submits jobs, each after the one before it has ended; or says what it would submit, script and all.

    Raises:
        UserError: no SLURM here, a container image that is not there, more nodes than there are, or sbatch refused.
    """
    if not planned:
        say(f"{config.record_path}: there already, and tuning.run: only asks for nothing else")
    if dry_run:
        for number, job in enumerate(planned):
            say(f"# {job.stage}")
            say(shlex.join(job.command(f"<job of {planned[number - 1].stage}>" if number else None)))
            say(job.script.read_text(encoding="utf-8"))
        return
    if shutil.which("sbatch") is None:
        raise UserError(
            "sbatch: not on the PATH, so there is no SLURM here; expected a machine that submits to a cluster"
        )
    container(config, os.environ)
    if any(job.stage == "pretrain" for job in planned):
        _check_nodes(config)
    logs_directory(config).mkdir(parents=True, exist_ok=True)
    after = None
    for job in planned:
        after = _sbatch(config, job, after)
        logs = f"{logs_directory(config)}/{job.stage}-{after}{'_*' if job.stage == 'tune' else ''}.out"
        say(f"{job.stage}: job {after}; its screen: {logs}")


def _check_nodes(config: Config) -> None:
    """Whether the partition has as many nodes; sbatch takes a job that asks for more, and it waits for ever.

    Raises:
        ConfigError: it has fewer.
    """
    asked = os.environ.get("SBATCH_PARTITION") or config.slurm.partition
    rows = call("sinfo", "-h", "-o", "%P %D", *([f"--partition={asked}"] if asked else [])).stdout.splitlines()
    sizes = {name.rstrip("*"): int(count) for name, count in map(str.split, rows) if asked or name.endswith("*")}
    if sizes and config.slurm.nodes > max(sizes.values()):
        name = max(sizes, key=lambda name: sizes[name])
        raise config.error("slurm.nodes", f"{config.slurm.nodes} nodes, and partition {name} has {sizes[name]}")


def _sbatch(config: Config, job: Job, after: str | None) -> str:
    """Submits one job; its number."""
    # What a job that submits has of its own (SLURM_NTASKS, SLURM_MEM_PER_NODE, ...) must not reach the next one.
    kept = {name: value for name, value in os.environ.items() if name == "SLURM_CONF" or not name.startswith("SLURM_")}
    modules = {} if MODULES in os.environ or not config.slurm.modules else {MODULES: " ".join(config.slurm.modules)}
    result = call(*job.command(after), env={**kept, **modules, STAGE: job.stage})
    if result.returncode:
        said = [line.removeprefix("sbatch: error: ") for line in result.stderr.splitlines() if line.strip()]
        waits = f"; job {after} is submitted already, scancel {after} takes it back" if after else ""
        raise config.error("slurm", f"sbatch refused the {job.stage} job: {'; '.join(said)}{waits}")
    return result.stdout.strip().partition(";")[0]


def call(*command: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs one of SLURM's commands, without a shell; its exit status and output."""
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)  # noqa: S603


def container(config: Config, environment: Mapping[str, str]) -> list[str]:
    """Options of srun for the container, if there is one (pyxis: --container-image).

    Raises:
        ConfigError: an image file that is not there, or a SLURM without pyxis.
    """
    image = environment.get(IMAGE) or config.slurm.container_image
    if not image:
        return []
    if image.startswith(("/", "./", "../")) and not Path(image).is_file():
        raise config.error("slurm.container_image", no_such_file(image))
    known = call("srun", "--help").stdout
    if "--container-image" not in known:
        raise config.error(
            "slurm.container_image", "this SLURM has no --container-image (the pyxis plugin); expected null"
        )
    mounts = ",".join([f"{Path.cwd()}:{Path.cwd()}", *config.slurm.container_mounts])
    return [f"--container-image={image}", f"--container-mounts={mounts}", f"--container-workdir={Path.cwd()}"]
