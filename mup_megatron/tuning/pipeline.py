"""The main job: tune the proxy, transfer its values, train the target.

Public name: `run_pipeline`.

Every rank of a launch first works on one shared study, then all train the target. The first rank plans, moves the study
on, chooses, and writes the record; the others hear of it where the ranks have met (runtime.Meeting).
"""

from __future__ import annotations

import json
from pathlib import Path

from mup_megatron.checkpoints.run_directory import CONTROLS, own_run_directory
from mup_megatron.config import Config, derive
from mup_megatron.data.prepare import data_directory
from mup_megatron.engines.setup import resolve
from mup_megatron.parallel import runtime
from mup_megatron.parallel.layout import smallest_world
from mup_megatron.parallel.ranks import Rank
from mup_megatron.train.loop import Diverged
from mup_megatron.train.run import train
from mup_megatron.tuning.decide import decide, trained_keys
from mup_megatron.tuning.lead import tune
from mup_megatron.util.progress import Progress


def run_pipeline(config: Config, rank: Rank, *, control: bool = False, allowed_changes: tuple[str, ...] = ()) -> None:
    """Tunes if there is no record and the config allows it, then trains the target with the transferred values.

    Args:
        config: the run.
        rank: this process.
        control: whether to train the same target in the other parametrizations afterwards, with the same values.
        allowed_changes: keys that may differ from the target's checkpoint.

    Raises:
        UserError: bad input.
        Stopped: SIGTERM while tuning.
        Terminated: SIGTERM while training.
        Diverged: the target's loss is no finite number.
    """
    only = config.tuning.run == "only"
    if config.tuning.command and not only:
        raise config.error(
            "tuning.command",
            "the target is a run of megatron.training, which its own command line starts; expected mup-megatron tune",
        )
    # A tuning job may have any number of processes; what it says of the target is for the fewest that fit.
    setup = resolve(config, smallest_world(config) if only else rank.world_size, trains=not only)
    config = setup.config
    for name in controls(config) if control and not only else ():
        derive(config, control_keys(config, name))  # refused now, not when the target has been paid for
    directory = Path(config.run.dir)
    with own_run_directory(directory, rank, ".pipeline.lock"), Progress(rank.is_first) as progress:
        meeting = runtime.Meeting(rank)
        if rank.is_first:
            meeting.tell("tune", json.dumps(decide(config, rank, progress, allowed_changes)))
        if json.loads(meeting.await_told("tune")):
            tune(setup, rank, meeting, progress)
        if rank.is_first:
            meeting.tell("values", json.dumps(trained_keys(config, progress, allowed_changes)))
        setup = setup.derive(json.loads(meeting.await_told("values")))
        if not only:
            train(setup, rank, allowed_changes, meeting=meeting)
        for name in controls(config) if control and not only else ():
            runtime.stop_distributed()
            progress.say(f"the same target, {CONTROLS[name]}, with the same values")
            try:
                train(setup.derive(control_keys(config, name)), rank, allowed_changes, meeting=meeting)
            except Diverged as diverged:
                progress.say(f"{CONTROLS[name]}: {diverged}")
        meeting.part(rank)  # of a run that was complete there are no process groups in which ranks wait for each other


def controls(config: Config) -> list[str]:
    """The parametrizations that the run is compared with: all that are not µP, and not its own."""
    return [name for name in CONTROLS if name != config.parametrization.name]


def control_keys(config: Config, name: str) -> dict[str, str]:
    """What makes the target one of another parametrization, beside the run and on its data."""
    return {
        "run.name": f"{config.run.name}, {name}",
        "run.dir": str(Path(config.run.dir) / name),
        "parametrization.name": name,
        "data.dir": str(data_directory(config)),
    }
