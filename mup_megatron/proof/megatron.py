"""The coordinate check's measurements from the user's own script: one run of megatron.training per size and seed,
all in one process where it can fork.

Public names: `megatron_measure`, `check_arguments`. The runs are those of `tuning.command` in its own layout, with the
sizes of the family and few steps on one batch; megatron_training/watched_coordinates.py is what looks at them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mup_megatron.config import Config, derive
from mup_megatron.data.prepare import known_vocab_size
from mup_megatron.model.build import parametrize
from mup_megatron.proof.check import Check, MeasuredParametrization
from mup_megatron.proof.coordinates import Coordinates
from mup_megatron.proof.family import Member
from mup_megatron.proof.slopes import Measurement
from mup_megatron.rules.table import Parametrization
from mup_megatron.tuning.megatron import MegatronProcess, own_launch, own_process, write_sections
from mup_megatron.tuning.megatron_command import PLACES, MegatronCommand, megatron_options, replaced
from mup_megatron.tuning.megatron_task import Task, said_by_options
from mup_megatron.util.errors import UserError
from mup_megatron.util.files import read_text

# A hook would see a recomputed module twice, and a parameter that is gathered in the next forward pass too early.
_DROPPED = (
    *("recompute-activations", "recompute-granularity", "recompute-method", "recompute-num-layers"),
    *("recompute-modules", "distribute-saved-activations", "moe-layer-recompute", "overlap-param-gather"),
    *("fine-grained-activation-offloading", "offload-modules", "wandb-project", *PLACES),
)


def megatron_measure(
    family: Sequence[Member],
    measured: Sequence[MeasuredParametrization],
    asked: Check,
    directory: Path,
    say: Callable[[str], None],
) -> tuple[list[Measurement], list[Parametrization]]:
    """Every measurement, and µP's own table of every size.

    Args:
        family: models, smallest first.
        measured: what the models are trained in.
        asked: steps, seeds, and whether ranges of values are measured.
        directory: of the runs' logs.
        say: takes lines of progress.

    Raises:
        UserError: a run failed; says how.
    """
    measurements: list[Measurement] = []
    tables = [parametrize(member.config, known_vocab_size(member.config)) for member in family]
    runs = [
        (member, seed, each)
        for member in family
        for seed in range(member.config.run.seed, member.config.run.seed + asked.seeds)
        for each in measured
    ]
    with own_process() as process:
        for number, (member, seed, each) in enumerate(runs):
            began = time.monotonic()
            config = derive(member.config, {"run.seed": seed, "parametrization.name": each.name})
            folder = directory / f"{each.label.replace(' ', '-')}-{member.factor}-seed-{seed}"
            task = Task(
                kind="coordinates",
                path=str(folder / "coordinates.json"),
                expected=said_by_options(config),
                steps=asked.steps,
                broken=each.broken,
                ranges=asked.ranges,
            )
            found = _run(process, config, task, folder)
            measurements.append(Measurement(label=each.label, seed=seed, factor=member.factor, coordinates=found))
            say(str(measurements[-1]))
            if number == 1 and len(runs) > 2:  # the first one's time has the imports in it
                seconds = time.monotonic() - began
                minutes = seconds * (len(runs) - 2) / 60
                say(f"{len(runs)} runs, about {seconds:.1f} s each at this size: about {minutes:.0f} min left")
    return measurements, tables


def _run(process: MegatronProcess, config: Config, task: Task, folder: Path) -> Coordinates:
    command, path = MegatronCommand.read(config.tuning.command), Path(task.path)
    folder.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    try:
        own_launch(command, check_arguments(command, config, folder), task, folder, process)
    except UserError as error:
        raise UserError(f"{folder}: {error} (log.txt there says more)") from None
    try:
        held = json.loads(read_text(path))
    except FileNotFoundError:
        raise UserError(
            f"{folder}: the script ended without a step that was measured; expected one that trains by "
            "megatron.training's train_step (log.txt there says more)"
        ) from None
    return Coordinates(**{**held, "silent": tuple(held["silent"])})


def check_arguments(command: MegatronCommand, config: Config, folder: Path) -> list[str]:
    """Arguments of the user's script for one model of a check.

    Args:
        command: `tuning.command`.
        config: of the model.
        folder: of the run.
    """
    options = {**megatron_options(config), "mup-config": str(write_sections(folder, config))}
    options |= {"eval-iters": "0", "eval-interval": str(config.training.train_steps)}
    return replaced(command, options, dropped=_DROPPED)
