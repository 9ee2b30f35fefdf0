"""What a run writes down step by step: metrics.jsonl, TensorBoard, Weights & Biases. Public name: `Metrics`."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Self, TextIO

from mup_megatron.checkpoints.checkpoint import METRICS, SAMPLES
from mup_megatron.config import Config
from mup_megatron.parallel.ranks import Rank
from mup_megatron.train.hooks import Evaluation, Hook, Step
from mup_megatron.util.disk import full_disk
from mup_megatron.util.files import cut_lines, read_text, write_whole


class Metrics(Hook):
    """metrics.jsonl, TensorBoard and, where `run.wandb_project` says so, Weights & Biases; on rank 0 alone.

    What an interrupted run wrote after its last checkpoint is cut off, so that every step is there once.
    """

    def __init__(self, config: Config, start: int, rank: Rank) -> None:
        self._config, self._start, self._rank = config, start, rank
        directory = Path(config.run.dir)
        self._path, self._samples = directory / METRICS, directory / SAMPLES
        self._file: TextIO | None = None
        self._writer: Any = None
        self._wandb: Any = None
        self._last = config.training.train_steps
        self.evaluations: list[Evaluation] = []
        """Those that earlier processes made, in their order; on rank 0 alone, from the context on."""

    def __enter__(self) -> Self:
        if self._rank.is_first:
            self._open()
        self._hook, threading.excepthook = threading.excepthook, self._in_thread
        return self

    def _open(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.evaluations = [
            Evaluation(step=line["step"], measures={name: value for name, value in line.items() if name != "step"})
            for line in cut_lines(self._path, self._start)
            if "eval_loss" in line
        ]
        self._file = self._path.open("a", encoding="utf-8")
        if self._samples.exists():
            cut_lines(self._samples, self._start)
        directory = self._path.parent
        self._writer = SummaryWriter(str(directory / "tensorboard"), purge_step=self._start + 1)
        if self._config.run.wandb_project is not None:
            self._wandb = _wandb_run(self._config, directory)

    def write(self, **values: float) -> None:
        """One line; `step` is the number of updates done."""
        if self._file is None:
            return
        line = json.dumps(values) + "\n"
        left = max(1, self._last - int(values["step"]))
        with full_disk(self._path, "the run's metrics", lambda: left * len(line)):
            self._file.write(line)
            self._file.flush()
            for name, value in values.items():
                if name != "step":
                    self._writer.add_scalar(name, value, int(values["step"]))
        if self._wandb is not None:
            self._wandb.log({name: value for name, value in values.items() if name != "step"}, step=int(values["step"]))

    def after_step(self, step: Step) -> None:
        """A line of the step."""
        self.write(step=step.number, **{name: value for name, value in vars(step).items() if name != "number"})

    def after_evaluation(self, evaluation: Evaluation) -> bool:
        """A line of the evaluation."""
        self.write(step=evaluation.step, **evaluation.measures)
        return True

    def sample(self, step: int, prompt: str, text: str) -> None:
        """What the model wrote after a prompt."""
        if self._file is None:
            return
        with full_disk(self._samples, "the run's samples"), self._samples.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "prompt": prompt, "text": text}) + "\n")
        self._writer.add_text(f"after {prompt!r}", text, step)

    def readings(self, step: int, found: Mapping[str, float]) -> None:
        """What telemetry found of a step, for TensorBoard and Weights & Biases; it has a file of its own."""
        with full_disk(self._path, "the run's metrics"):
            for name, value in found.items():
                self._writer.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(dict(found))  # under the step at hand: an earlier one is closed

    def _in_thread(self, arguments: threading.ExceptHookArgs) -> None:
        """TensorBoard's thread ends at a full disk with a traceback; its next write, or its end, raises the same."""
        if not (type(arguments.thread).__module__.startswith("tensorboard.") and arguments.exc_type is OSError):
            self._hook(arguments)

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        threading.excepthook = self._hook
        if self._file is not None:
            # What was raised before says more than what cannot be closed for the same reason.
            unsaid = suppress(*[OSError] * (kind is not None))
            with full_disk(self._path, "the run's metrics"), unsaid, closing(self._writer):
                self._file.close()
        if self._wandb is not None:
            self._wandb.finish()


def _wandb_run(config: Config, directory: Path) -> Any:
    """A run of Weights & Biases that goes on under its number; WANDB_MODE=offline keeps it in the run's folder."""
    import wandb

    number = directory / "wandb-id"
    if not number.exists():
        write_whole(number, uuid.uuid4().hex[:12])
    return wandb.init(
        project=config.run.wandb_project,
        name=config.run.name,
        dir=str(directory),
        id=read_text(number),
        resume="allow",
        config=config.model_dump(),
        settings=wandb.Settings(console="off", silent=True),
    )
