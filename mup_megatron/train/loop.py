"""The training loop. Public names: `train`, `Watcher`, `Terminated`, `Diverged`.

Files of a run (`run.dir`): config.yaml (resolved), explain.json, metrics.jsonl (a line per step, a line per
evaluation), samples.jsonl (`run.samples`), tensorboard/, checkpoints/, loss.png.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.distributed
from torch.distributed.checkpoint.api import CheckpointException

from mup_megatron.checkpoints.checkpoint import METRICS, Checkpoints, check_folder, hash_files, is_complete
from mup_megatron.checkpoints.manifest import CheckpointManifest, check_resume, make_manifest
from mup_megatron.checkpoints.run_directory import VERIFIED, own_run_directory
from mup_megatron.config import Config
from mup_megatron.convert.init_from import check_same_start, check_start, find_start, load_start
from mup_megatron.data.batches import Batches, build_datasets
from mup_megatron.data.gpt import GPTMaker
from mup_megatron.data.prepare import prepare
from mup_megatron.engines import Engine, build_engine
from mup_megatron.engines.optim import LearningRateSchedule
from mup_megatron.engines.setup import Setup
from mup_megatron.model.explain import explain
from mup_megatron.parallel import runtime
from mup_megatron.parallel.ranks import Rank, stop_signal
from mup_megatron.rules.table import Parametrization
from mup_megatron.train.metrics import Metrics
from mup_megatron.train.samples import Samples
from mup_megatron.util.disk import full_disk, reason, short
from mup_megatron.util.errors import DiskFull, UserError, shown
from mup_megatron.util.files import as_yaml, read_text, write_whole
from mup_megatron.util.progress import Progress


class Terminated(Exception):
    """SIGTERM or Ctrl-C was handled: the run is saved."""


class Diverged(Exception):
    """The loss is not a finite number; the last checkpoint stays as it is."""


class Watcher(Protocol):
    """Who looks on while a run trains, and may stop it. Called on the first rank, which then must be the only one."""

    def step(self, step: int, loss: float) -> None:
        """A step is done."""
        ...

    def evaluated(self, step: int, loss: float) -> bool:
        """An evaluation is done; whether to go on."""
        ...


def train(
    setup: Setup,
    rank: Rank,
    allowed_changes: Sequence[str] = (),
    *,
    watcher: Watcher | None = None,
    meeting: runtime.Meeting | None = None,
    init_from: Path | None = None,
    new_embeddings: bool = False,
    told: Mapping[str, Any] | None = None,
) -> float | None:
    """Trains the run's model from its last checkpoint, or from the start. Collective.

    Args:
        setup: the run.
        rank: this process.
        allowed_changes: keys that may differ from the checkpoint's.
        watcher: looks on; of a run of one process.
        meeting: where the ranks have met already.
        init_from: a checkpoint whose weights the run begins with (convert/init_from.py).
        new_embeddings: whether word embeddings and readout keep their initial values then.
        told: what explain.json says besides.

    Returns:
        The last evaluation's loss (nats per token), None if there was none, or if the run was complete before.

    Raises:
        UserError: bad input.
        Terminated: SIGTERM or Ctrl-C came; the run was saved.
        Diverged: the loss became infinite or no number.
    """
    from mup_megatron.engines.state import load_state, load_weights, save_state, state_bytes
    from mup_megatron.model.build import build_model

    config, layout = setup.config, setup.layout
    directory = Path(config.run.dir)
    with own_run_directory(directory, rank), Progress(rank.is_first and watcher is None) as progress:
        if watcher is None:  # a trial's own study guards it
            check_folder(config, allowed_changes)  # by every rank: one that went on alone would wait for the others
            if is_complete(config):
                if init_from is not None:
                    check_same_start(_beginning(directory), directory, init_from, new_embeddings=new_embeddings)
                progress.say(
                    f"{directory}: this run is complete, {config.training.train_steps} steps; nothing to do. To train "
                    f"it anew, choose another run.dir or remove {directory / METRICS}"
                )
                return None
        if rank.is_first:
            prepare(
                config, progress.say, verified=directory / VERIFIED
            )  # the others wait for rank 0 where the process groups start
        checkpoints = Checkpoints(directory / "checkpoints", config.training.checkpoints_kept)
        begins = init_from is not None and not checkpoints.newest_first()
        begin = find_start(init_from, new_embeddings=new_embeddings) if init_from is not None and begins else None
        device = runtime.start_distributed(layout, rank, config.run.seed, meeting)
        prepared = prepare(config)
        parametrization = setup.parametrization(prepared.vocab_size)
        manifest = make_manifest(parametrization, layout, prepared.digest, step=0)

        latest = _newest_sound(checkpoints, rank, progress)
        found = CheckpointManifest.read(latest) if latest else None
        if latest is not None and found is not None:
            changes = check_resume(found, manifest, latest, allowed_changes)
            manifest = manifest.replaced(
                changes=[*(found.changes or ()), *changes], initialised_from=found.initialised_from
            )
            if init_from is not None:
                check_same_start(found.initialised_from, latest, init_from, new_embeddings=new_embeddings)
        if begin is not None:
            check_start(begin, parametrization, manifest)
            manifest = manifest.replaced(initialised_from=begin.as_json())
        if rank.is_first:
            explanation = explain(parametrization, layout)
            changed = [change.model_dump() for change in manifest.changes or ()]
            began = {"initialised_from": manifest.initialised_from} if manifest.initialised_from else {}
            _describe(directory, config, {**explanation, "changes": changed, **began, **(told or {})})
            progress.say(
                f"{config.run.name}: {config.parametrization.name} parametrization, {layout}, {device.type}, "
                f"{config.training.precision}, {config.optimizer.name} ({config.optimizer.implementation}), "
                f"{config.model.transformer_impl} layers, norms {config.model.norm_implementation}, attention "
                f"{config.model.core_attention}"
            )
            for warning in parametrization.clip_warnings()[:1]:
                progress.say(f"warning: {warning}")

        chunks = build_model(parametrization, layout, rank.rank, device)
        if latest is not None:
            load_weights(chunks, parametrization, layout, rank.rank, latest)
        if begin is not None:
            load_start(begin, chunks, parametrization, layout, rank.rank)
            progress.say(f"begins with the weights of {begin.path}")
        engine = build_engine(setup, parametrization, chunks)
        datasets = build_datasets(config, prepared, progress.say)
        batches, evaluation = (Batches(dataset, config, layout, rank.rank, device) for dataset in datasets)
        start = 0
        if latest is not None and found is not None:
            start = found.step
            load_state(engine, parametrization, layout, rank.rank, latest, start)
            same = found.layout == manifest.layout
            same = runtime.load_random_state(latest, layout, rank.rank, config.run.seed, start, same=same)
            progress.say(
                f"resumed from {latest} at step {start}"
                + ("" if same or not config.model.drops else "; dropout draws anew, since the layout is another")
            )

        def save(directory: Path) -> None:
            save_state(engine, parametrization, layout, rank.rank, directory)
            runtime.save_random_state(directory, rank.rank)

        samples = _samples(setup, engine, evaluation, datasets[0].config.tokenizer)
        loop = _Loop(
            config,
            engine,
            batches,
            evaluation,
            samples,
            _validation(setup, engine, parametrization, datasets[1], rank),
            checkpoints,
            save,
            state_bytes(parametrization, config.optimizer),
            manifest,
            rank,
            progress,
            watcher,
        )
        try:
            return loop.run(start)
        finally:
            engine.close()


def _beginning(directory: Path) -> dict[str, Any] | None:
    """What the weights of a run's folder began from, as explain.json says; None for initial values."""
    explanation: dict[str, Any] = json.loads(read_text(directory / "explain.json"))
    return explanation.get("initialised_from")


def _samples(setup: Setup, engine: Engine, batches: Batches, tokenizer: Any) -> Samples | None:
    """What writes `run.samples`; of a model that predicts the next token (config/run_checks.py)."""
    return Samples(setup, engine, cast(GPTMaker, batches.maker), tokenizer) if setup.config.run.samples else None


def _validation(
    setup: Setup, engine: Engine, parametrization: Parametrization, dataset: Any, rank: Rank
) -> Callable[[], float] | None:
    """What measures BLEU at evaluations, where the config asks for it."""
    if not (setup.config.training.eval_translations and dataset):
        return None
    from mup_megatron.evaluate.translation.validation import Validation

    return Validation(setup, engine, parametrization, dataset, rank.rank)


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


class _Loop:
    """Steps, evaluations, checkpoints and metrics of one run."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        batches: Batches,
        evaluation: Batches,
        samples: Samples | None,
        validation: Callable[[], float] | None,
        checkpoints: Checkpoints,
        save: Callable[[Path], None],
        size: int,
        manifest: CheckpointManifest,
        rank: Rank,
        progress: Progress,
        watcher: Watcher | None,
    ) -> None:
        self._config, self._training = config, config.training
        self._engine, self._batches, self._evaluation, self._samples = engine, batches, evaluation, samples
        self._checkpoints, self._write, self._size, self._manifest = checkpoints, save, size, manifest
        self._rank, self._progress, self._watcher = rank, progress, watcher
        self._validation = validation
        self._schedule = LearningRateSchedule(config.training, config.hparams.lr)

    def run(self, start: int) -> float | None:
        """Steps `start` to `train_steps`; returns the last evaluation's loss; of a trial, what it is judged by."""
        training, watcher = self._training, self._watcher
        saved = start
        with Metrics(self._config, start, self._rank) as metrics, stop_signal() as terminated:
            earlier = {step: self._judged(loss, metrics.bleu.get(step)) for step, loss in metrics.evaluations.items()}
            eval_loss = next(reversed(earlier.values()), None)
            # Whoever looks on may not have heard of an evaluation that an earlier process made and saved behind.
            if watcher is not None and not all(watcher.evaluated(*each) for each in earlier.items()):
                return eval_loss
            for step in range(start, training.train_steps):
                began = time.perf_counter()
                lr = self._schedule(step)
                result = self._engine.step(self._batches[step], lr)
                seconds = time.perf_counter() - began
                done = step + 1
                tokens = training.global_batch_size * self._config.sample_tokens
                metrics.write(
                    step=done,
                    tokens=done * tokens,
                    loss=result.loss,
                    grad_norm=result.grad_norm,
                    lr=lr,
                    seconds=seconds,
                    tokens_per_second=tokens / seconds,
                )
                self._progress.step(done, training.train_steps, result.loss, tokens / seconds, training.log_interval)
                if not math.isfinite(result.loss):
                    raise Diverged(f"loss is {result.loss} at step {done}")
                if watcher is not None:
                    watcher.step(done, result.loss)
                last = done == training.train_steps
                if training.eval_interval and (done % training.eval_interval == 0 or last):
                    loss, bleu = self._evaluate(), self._validation() if self._validation else None
                    metrics.write(step=done, eval_loss=loss, **({} if bleu is None else {"bleu": bleu}))
                    perplexity = math.exp(min(loss, 700.0))  # more would overflow
                    said = "" if bleu is None else f", BLEU {bleu:.2f}"
                    self._progress.say(f"step {done}: evaluation loss {loss:.4f}, perplexity {perplexity:.4g}{said}")
                    self._sample(metrics, done)
                    eval_loss = self._judged(loss, bleu)
                    if watcher is not None and not watcher.evaluated(done, eval_loss):
                        return eval_loss
                interval = training.checkpoint_interval
                stop = self._any_rank(terminated())
                if (interval and (done % interval == 0 or last)) or stop:
                    path = self._save(done)
                    saved = done
                    if stop and not last:
                        raise Terminated(f"saved step {saved} to {path}")
        return eval_loss

    def _judged(self, loss: float, bleu: float | None) -> float:
        """What a trial is compared by (tuning.objective), smaller is better; of any other run the loss."""
        of_bleu = self._watcher is not None and self._config.tuning.objective == "bleu"
        return 100.0 - bleu if of_bleu and bleu is not None else loss

    def _evaluate(self) -> float:
        losses = [self._engine.evaluate(self._evaluation[number]) for number in range(self._training.eval_steps)]
        return sum(losses) / len(losses)

    def _sample(self, metrics: Metrics, step: int) -> None:
        for prompt, text in zip(self._config.run.samples, self._samples() if self._samples else (), strict=True):
            metrics.sample(step, prompt, text)
            self._progress.say(f"step {step}: {shown(prompt + text)}")

    def _save(self, step: int) -> Path:
        """Writes a checkpoint. Raises DiskFull where it does not fit; those before it stay."""
        checkpoints, rank = self._checkpoints, self._rank
        partial, what = checkpoints.partial(step), f"the checkpoint of step {step}"

        def undo() -> None:
            if rank.is_first:
                shutil.rmtree(partial, ignore_errors=True)

        with full_disk(partial, what, lambda: self._size, undo):
            try:
                if rank.is_first:
                    checkpoints.begin(step)
                # Asked before anything is written, so that all ranks stop here together.
                missing = [short(partial, what, self._size) if rank.is_first else None]
                torch.distributed.broadcast_object_list(missing)
                if missing[0] is not None:
                    undo()
                    raise missing[0]
                return self._write_checkpoint(step, partial, what, undo)
            except RuntimeError:
                if rank.is_first or partial.exists() or partial.with_suffix("").exists():
                    raise
                # A quota, or somebody else's files: the first rank saw it while it wrote, and is gone.
                raise DiskFull(f"{partial}: removed by the first rank, which says why") from None

    def _write_checkpoint(self, step: int, partial: Path, what: str, undo: Callable[[], None]) -> Path:
        checkpoints, rank = self._checkpoints, self._rank
        try:
            self._write(partial)
        except CheckpointException as error:  # torch's, and no Exception; every rank raises it, the first knows why
            found = [reason(error, partial, what, lambda: self._size, undo) if rank.is_first else None]
            torch.distributed.broadcast_object_list(found)
            if found[0] is None:
                raise
            raise found[0] from None
        torch.distributed.barrier()
        sums: list[dict[str, str]] = [{}] * rank.world_size
        torch.distributed.all_gather_object(sums, hash_files(partial, (rank.rank, rank.world_size)))
        path = partial.with_suffix("")
        if rank.is_first:
            manifest = self._manifest.replaced(step=step, samples=step * self._training.global_batch_size)
            path = checkpoints.commit(manifest, {name: value for part in sums for name, value in part.items()})
            self._progress.say(f"saved {path}")
        torch.distributed.barrier()
        return path

    @staticmethod
    def _any_rank(flag: bool) -> bool:
        """Whether any rank says yes: all must leave the loop at the same step."""
        device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
        value = torch.tensor(int(flag), device=device)
        torch.distributed.all_reduce(value, op=torch.distributed.ReduceOp.MAX)
        return bool(value)


def _describe(directory: Path, config: Config, explanation: dict[str, Any]) -> None:
    write_whole(directory / "config.yaml", as_yaml(config.model_dump()))
    write_whole(directory / "explain.json", json.dumps(explanation, indent=1))
