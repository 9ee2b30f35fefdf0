"""A run of the target: found or begun, built, trained. Public name: `train`.

Files of a run (`run.dir`): config.yaml (resolved), explain.json, metrics.jsonl (a line per step, a line per
evaluation), telemetry.jsonl (a line per reading), samples.jsonl (`run.samples`), tensorboard/, checkpoints/, loss.png.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed

from mup_megatron.checkpoints.checkpoint import METRICS, Checkpoints, check_folder, is_complete
from mup_megatron.checkpoints.manifest import CheckpointManifest, check_resume, make_manifest
from mup_megatron.checkpoints.run_directory import VERIFIED, own_run_directory
from mup_megatron.config import Config
from mup_megatron.convert.init_from import InitFrom as InitFrom
from mup_megatron.convert.init_from import Start, check_start, load_start
from mup_megatron.data.batches import Batches
from mup_megatron.data.gpt import GPTMaker
from mup_megatron.data.order import Order, ordered_datasets
from mup_megatron.data.prepare import prepare
from mup_megatron.engines import Engine, build_engine
from mup_megatron.engines.setup import Setup
from mup_megatron.model.explain import explain
from mup_megatron.parallel import runtime
from mup_megatron.parallel.ranks import Rank
from mup_megatron.rules.table import Parametrization
from mup_megatron.train.alarming import Alarming
from mup_megatron.train.auditing import Auditing
from mup_megatron.train.hooks import Hook
from mup_megatron.train.loop import Loop
from mup_megatron.train.metrics import Metrics
from mup_megatron.train.samples import Samples
from mup_megatron.train.saver import Saver
from mup_megatron.train.screen import Screen
from mup_megatron.train.telemetry import Telemetry, interval_of
from mup_megatron.train.watching import Watcher, Watching
from mup_megatron.util.errors import UserError
from mup_megatron.util.files import as_yaml, read_text, write_whole
from mup_megatron.util.progress import Progress

_LENGTHS = ("training.seq_length", "training.decoder_seq_length")


def train(
    setup: Setup,
    rank: Rank,
    allowed_changes: Sequence[str] = (),
    *,
    watcher: Watcher | None = None,
    meeting: runtime.Meeting | None = None,
    init_from: InitFrom | None = None,
    told: Mapping[str, Any] | None = None,
) -> float | None:
    """Trains the run's model from its last checkpoint, or from the start. Collective.

    Args:
        setup: the run.
        rank: this process.
        allowed_changes: keys that may differ from the checkpoint's.
        watcher: looks on; of a run of one process.
        meeting: where the ranks have met already.
        init_from: what the run begins with, where not with initial values.
        told: what explain.json says besides.

    Returns:
        The last evaluation's loss (nats per token), for a watcher what it compares; None if there was none, or if the
        run was complete before.

    Raises:
        UserError: bad input.
        Terminated: SIGTERM or Ctrl-C came; the run was saved.
        Alarmed: it does not look as its proxy did, and `watch.action` is `stop`; the run was saved.
        Diverged: the loss became infinite or no number.
    """
    config, layout, directory = setup.config, setup.layout, Path(setup.config.run.dir)
    with own_run_directory(directory, rank), Progress(rank.is_first and watcher is None) as progress:
        # A trial's own study guards it. Every rank looks: one that went on alone would wait for the others.
        if watcher is None and _is_complete(config, allowed_changes, init_from, progress):
            return None
        if meeting is None and not torch.distributed.is_initialized():
            meeting = runtime.Meeting(rank)
        if rank.is_first:
            prepare(config, progress.say, verified=directory / VERIFIED)
        if meeting is not None:
            meeting.follow_first(rank)
        checkpoints = Checkpoints(directory / "checkpoints", config.training.checkpoints_kept)
        start = None if init_from is None or checkpoints.newest_first() else init_from.find()
        device = runtime.start_distributed(layout, rank, config.run.seed, meeting)
        prepared = prepare(config)
        parametrization = setup.parametrization(prepared.vocab_size)
        latest = _newest_sound(checkpoints, rank, progress)
        manifest = make_manifest(parametrization, layout, prepared.digest, step=0)
        if latest is not None:
            manifest = _continued(manifest, latest, allowed_changes, init_from)
        if start is not None:
            check_start(start, parametrization, manifest)
            manifest = manifest.replaced(initialised_from=start.as_json())
        if rank.is_first:
            _describe(parametrization, setup, manifest, told or {})
            _introduce(parametrization, setup, device, progress)
        run = _Run(setup, parametrization, rank, progress, manifest, begins=latest is None and start is None)
        engine = run.build(device, latest, start)
        done = 0 if latest is None else run.resume(engine, latest)
        order = Order.of_run(config) if latest is None else _order(config, latest)
        datasets, order = ordered_datasets(config, prepared, order, done, progress.say)
        try:
            return run.loop(engine, datasets, order, device, checkpoints, done, watcher)
        finally:
            engine.close()


def _is_complete(
    config: Config, allowed_changes: Sequence[str], init_from: InitFrom | None, progress: Progress
) -> bool:
    """Whether there is nothing left to do; raises UserError where what is there is another run's."""
    check_folder(config, allowed_changes)
    if not is_complete(config):
        return False
    directory = Path(config.run.dir)
    if init_from is not None:
        explanation: dict[str, Any] = json.loads(read_text(directory / "explain.json"))
        init_from.check_same(explanation.get("initialised_from"), directory)
    progress.say(
        f"{directory}: this run is complete, {config.training.train_steps} steps; nothing to do. To train it anew, "
        f"choose another run.dir or remove {directory / METRICS}"
    )
    return True


def _newest_sound(checkpoints: Checkpoints, rank: Rank, progress: Progress) -> Path | None:
    """The newest checkpoint whose files match their checksums, which the ranks check together; None if there is none.

    Raises:
        UserError: there are checkpoints, and every one is damaged.
    """
    whole = checkpoints.newest_first()
    for path in whole:
        problems: list[str | None] = [None] * rank.world_size
        torch.distributed.all_gather_object(problems, checkpoints.problem(path, (rank.rank, rank.world_size)))
        damage = next((problem for problem in problems if problem), None)
        if damage is None:
            return path
        progress.say(f"warning: {path} is damaged ({damage}); trying the one before it")
    if whole:
        raise UserError(f"{checkpoints.directory}: every checkpoint is damaged; remove the folder to start over")
    return None


def _continued(
    manifest: CheckpointManifest, latest: Path, allowed_changes: Sequence[str], init_from: InitFrom | None
) -> CheckpointManifest:
    """The manifest with what the checkpoint says of the run's past. Raises UserError where it is another run's."""
    found = CheckpointManifest.read(latest)
    changes = check_resume(found, manifest, latest, allowed_changes)
    for change in changes:
        if change.key in _LENGTHS:
            raise UserError(
                f"{latest}: {change.key} was {change.before} and is {change.now}; the text is cut into samples of that "
                "length, so the run has no place among the others; expected a run of its own, with --init-from"
            )
    if init_from is not None:
        init_from.check_same(found.initialised_from, latest)
    return manifest.replaced(changes=[*(found.changes or ()), *changes], initialised_from=found.initialised_from)


def _order(config: Config, latest: Path) -> Order:
    """Of the samples of a run that goes on from a checkpoint."""
    found = CheckpointManifest.read(latest)
    before = found.config["training"]
    samples = found.step * before["global_batch_size"] if found.samples is None else found.samples
    drawn = found.order_samples or before["train_steps"] * before["global_batch_size"]
    return Order.of_resumed(config, found.step, samples, drawn)


def _describe(
    parametrization: Parametrization, setup: Setup, manifest: CheckpointManifest, told: Mapping[str, Any]
) -> None:
    """Writes config.yaml and explain.json."""
    directory = Path(setup.config.run.dir)
    explanation = explain(parametrization, setup.layout)
    explanation["changes"] = [change.model_dump() for change in manifest.changes or ()]
    if manifest.initialised_from:
        explanation["initialised_from"] = manifest.initialised_from
    write_whole(directory / "config.yaml", as_yaml(setup.config.model_dump()))
    write_whole(directory / "explain.json", json.dumps({**explanation, **told}, indent=1))


def _introduce(parametrization: Parametrization, setup: Setup, device: torch.device, progress: Progress) -> None:
    config = setup.config
    progress.say(
        f"{config.run.name}: {config.parametrization.name} parametrization, {setup.layout}, {device.type}, "
        f"{config.training.precision}, {config.optimizer.name} ({config.optimizer.implementation}), "
        f"{config.model.transformer_impl} layers, norms {config.model.norm_implementation}, attention "
        f"{config.model.core_attention}"
    )
    for warning in parametrization.clip_warnings()[:1]:
        progress.say(f"warning: {warning}")


@dataclasses.dataclass(frozen=True)
class _Run:
    """What its parts know of a run whose process groups are there."""

    setup: Setup
    parametrization: Parametrization
    rank: Rank
    progress: Progress
    manifest: CheckpointManifest
    begins: bool
    """With initial values; not with weights of a checkpoint, imported ones among them."""

    def build(self, device: torch.device, latest: Path | None, start: Start | None) -> Engine:
        """The engine over the model, with the weights of a checkpoint, if one is given, or of another run's."""
        from mup_megatron.engines.state import load_weights
        from mup_megatron.model.build import build_model

        parametrization, layout, rank = self.parametrization, self.setup.layout, self.rank.rank
        chunks = build_model(parametrization, layout, rank, device)
        if latest is not None:
            load_weights(chunks, parametrization, layout, rank, latest)
        if start is not None:
            load_start(start, chunks, parametrization, layout, rank)
            self.progress.say(f"begins with the weights of {start.path}")
        return build_engine(self.setup, parametrization, chunks)

    def resume(self, engine: Engine, latest: Path) -> int:
        """Loads the optimizer and the random states of a checkpoint; returns the updates done."""
        from mup_megatron.engines.state import load_state

        config, layout, rank = self.setup.config, self.setup.layout, self.rank.rank
        found = CheckpointManifest.read(latest)
        load_state(engine, self.parametrization, layout, rank, latest, found.step)
        same = found.layout == self.manifest.layout
        same = runtime.load_random_state(latest, layout, rank, config.run.seed, found.step, same=same)
        self.progress.say(
            f"resumed from {latest} at step {found.step}"
            + ("" if same or not config.model.drops else "; dropout draws anew, since the layout is another")
        )
        return found.step

    def loop(
        self,
        engine: Engine,
        datasets: tuple[Any, Any],
        order: Order,
        device: torch.device,
        checkpoints: Checkpoints,
        done: int,
        watcher: Watcher | None,
    ) -> float | None:
        """Trains to the last step; returns what `train` does."""
        config = self.setup.config
        batches, evaluation = (
            Batches(dataset, config, self.setup.layout, self.rank.rank, device, shift)
            for dataset, shift in zip(datasets, (order.shift, 0), strict=True)
        )
        metrics = Metrics(config, done, self.rank)
        hooks: list[Hook] = [metrics, Screen(config.training, self.progress)]
        if config.run.audit != "off" and watcher is None:
            auditing = Auditing(
                *(self.setup, engine, self.parametrization),
                begins=self.begins,
                done=done,
                rank=self.rank,
                say=self.progress.say,
            )
            hooks.append(auditing)
        look = None
        if config.watch.action != "off" and watcher is None:
            alarming = Alarming(config, self.parametrization, done, self.rank, self.progress.say)
            hooks.append(alarming)
            look = alarming.look
        if interval_of(config):
            telemetry = Telemetry(
                *(config, engine, self.parametrization, self.setup.layout, done),
                rank=self.rank,
                metrics=metrics,
                say=self.progress.say,
                look=look,
            )
            hooks.append(telemetry)
        if config.training.eval_translations and datasets[1]:
            from mup_megatron.evaluate.translation.validation import Validation
            from mup_megatron.train.bleu import Bleu

            validation = Validation(self.setup, engine, self.parametrization, datasets[1], self.rank.rank)
            hooks.insert(0, Bleu(validation))
        if config.run.samples:  # of a model that predicts the next token (config/run_checks.py)
            maker, tokenizer = cast(GPTMaker, evaluation.maker), datasets[0].config.tokenizer
            hooks.append(Samples(self.setup, engine, maker, tokenizer, metrics, self.progress))
        watching = None if watcher is None else Watching(config, watcher, metrics)
        if watching is not None:
            hooks.append(watching)
        saver = self._saver(engine, checkpoints, order)
        found = Loop(config, engine, batches, order, evaluation, saver, hooks).run(done)
        found = found or (metrics.evaluations[-1] if metrics.evaluations else None)
        if found is None:
            return None
        return found.loss if watching is None else watching.judged(found)

    def _saver(self, engine: Engine, checkpoints: Checkpoints, order: Order) -> Saver:
        from mup_megatron.engines.state import Saving, begin_state, state_bytes

        config, parametrization, rank = self.setup.config, self.parametrization, self.rank

        def begin(folder: Path) -> Saving:
            saving = begin_state(engine, parametrization, self.setup.layout, rank.rank, folder)
            random_state = runtime.save_random_state(folder, rank.rank)
            return dataclasses.replace(saving, write=lambda: [*saving.write(), random_state()])

        size = state_bytes(parametrization, config.optimizer)
        manifest = self.manifest.replaced(order_samples=order.drawn)
        return Saver(checkpoints, begin, size, manifest, order.samples, rank)
