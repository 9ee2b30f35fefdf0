"""What is asked of a watched run of megatron.training, and the files through which it is asked and answers.

Public names: `Task`, `said_by_options`, `differing`; `SAID`, `ANSWER`, `FAILED`, `PROCESS`, `TASK`, `IDLE`, `NEXT`,
`LOG`. megatron.py is one end, megatron_training/watched.py and forked.py are the other. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from mup_megatron.config import Config, Model

SAID, ANSWER, FAILED, PROCESS, TASK = "said.jsonl", "answer-{}.json", "failed-{}.json", "process-{}", "task.json"
"""Files of a conversation: what was said, the answer after a step, the end of a rank, its process id, the task."""
IDLE, NEXT = "idle-{}.txt", "next.txt"
"""Further ones: a rank whose run is over, with the number of ranks in it; the path of the task that comes next."""
LOG = "log.txt"
"""File in a run's folder: what it printed."""

# What the options of a command line say, by section of a config.
_TRAINING = (
    *("global_batch_size", "micro_batch_size", "seq_length", "train_steps", "lr_schedule", "lr_warmup_init"),
    *("lr_warmup_steps", "lr_decay_steps", "lr_wsd_decay_steps", "lr_wsd_decay_style", "min_lr_ratio", "clip_grad"),
)


class Task(BaseModel):
    """What is asked of a watched run.

    Args:
        kind: `config`: write the run as a config, and leave; `trial`: say losses, and stop where told; `coordinates`:
            measure every module at every step, on one batch, and leave.
        path: of the config that is written, or of the measurements; of a trial its folder.
        expected: what the options have to be read as, by dotted key; a run that is another one fails.
        command: the command line that a config is written for.
        interval: steps between evaluations of a trial.
        steps: of the run.
        broken: the rule that a check takes out.
        ranges: whether a check measures ranges of values too.
        arguments: of the script.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    kind: Literal["config", "trial", "coordinates"]
    path: str
    expected: dict[str, Any] = {}
    command: list[str] = []
    interval: int = 1
    steps: int = 1
    broken: str | None = None
    ranges: bool = False
    arguments: list[str] = []


def said_by_options(config: Config) -> dict[str, Any]:
    """What a command line's options are read as, by dotted key: where two runs agree in it, they are the same run.

    Args:
        config: every `auto` resolved.
    """
    sections = {
        "model": {
            **config.model.model_dump(mode="json", exclude={*Model.PLAIN_KERNELS, "architecture", "vocab_size"}),
            "max_position_embeddings": config.max_position_embeddings,
        },
        "base": config.base.model_dump(mode="json"),
        "parametrization": config.parametrization.model_dump(mode="json"),
        "hparams": config.hparams.model_dump(mode="json"),
        "optimizer": config.optimizer.model_dump(mode="json", exclude={"implementation"}),
        "training": config.training.model_dump(mode="json", include={*_TRAINING}),
        "run": {"seed": config.run.seed},
    }
    return {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}


def differing(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """The keys in which a run is another one than was asked for, in words; floats may differ in their last digit."""
    return [
        f"{key}: {found.get(key)} by its options, {value} expected"
        for key, value in expected.items()
        if not _same(value, found.get(key))
    ]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-12)
    return bool(one == other)
