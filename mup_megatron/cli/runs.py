"""Commands that make runs: prepare, train, pipeline, tune, transfer."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from mup_megatron.cli.common import (
    AllowChange,
    AsJson,
    ConfigPath,
    Control,
    Megatron,
    Overrides,
    Processes,
    WorldSize,
    app,
    aside,
    console,
    gpus,
    laid_out,
    launched_rank,
    read_config,
    show,
    start_typed,
    stopped,
)
from mup_megatron.cli.megatron import default_workers, read_command
from mup_megatron.config import derive
from mup_megatron.util.errors import UserError
from mup_megatron.util.files import as_yaml, write_output


@app.command(epilog="Example: mup-megatron prepare configs/demo.yaml")
def prepare(config: ConfigPath, overrides: Overrides = None) -> None:
    """Train the tokenizer and write the indexed dataset; does nothing where they are there already."""
    from mup_megatron.parallel import upstream

    settings = read_config(config, overrides, takes_ladder=False)
    upstream.prepare_process()
    from mup_megatron.data.parts import check_parts, needs_validation
    from mup_megatron.data.prepare import data_directory
    from mup_megatron.data.prepare import prepare as prepare_data

    say = partial(print, flush=True)  # hours of it may go through a pipe
    prepared = prepare_data(settings, say)
    check_parts(settings, prepared.blend[0], validation=needs_validation(settings), say=say)
    print(f"prepared: {prepared.tokens:,} tokens, vocabulary {prepared.vocab_size}, {data_directory(settings)}")


@app.command(epilog="Example: mup-megatron train configs/demo.yaml training.train_steps=100 --nproc-per-node 2")
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    nproc_per_node: Processes = None,
    allow_change: AllowChange = None,
    init_from: Annotated[
        str | None,
        typer.Option(metavar="CHECKPOINT", help="Begin with its weights: step 0, a fresh optimizer (fine-tuning)."),
    ] = None,
    new_embeddings: Annotated[
        bool, typer.Option("--new-embeddings", help="But for embedding and readout, which another tokenizer needs.")
    ] = False,
) -> int:
    """Train the target with the config's own hyperparameters, from the last checkpoint if there is one."""
    if new_embeddings and init_from is None:
        raise UserError("--new-embeddings: leaves out weights of a checkpoint; expected --init-from CHECKPOINT too")

    def body(settings: Any, rank: Any) -> None:
        from mup_megatron.engines.setup import resolve
        from mup_megatron.train.run import InitFrom  # on ranks alone: it takes seconds to import
        from mup_megatron.train.run import train as train_run
        from mup_megatron.tuning.decide import refuse_untaken_record, told_by_a_ladder
        from mup_megatron.util.progress import Progress

        setup = resolve(settings, rank.world_size)
        untaken = refuse_untaken_record(setup.config, overrides or [])
        with Progress(rank.is_first) as progress:
            if untaken:
                progress.say(untaken)
            told = told_by_a_ladder(setup.config, progress) if rank.is_first else None
        begin = InitFrom(Path(init_from), new_embeddings) if init_from else None
        train_run(setup, rank, allow_change or [], init_from=begin, told=told)

    return _on_ranks(config, overrides, nproc_per_node, body)


@app.command(epilog="Example: mup-megatron pipeline configs/demo.yaml --nproc-per-node 2 --control")
def pipeline(
    config: ConfigPath,
    overrides: Overrides = None,
    nproc_per_node: Processes = None,
    allow_change: AllowChange = None,
    control: Control = False,
) -> int:
    """Tune the proxy if there is no transfer record yet, then train the target with the transferred values."""

    return _pipeline(config, overrides, nproc_per_node, control=control, allowed_changes=tuple(allow_change or ()))


def _pipeline(
    config: str, overrides: list[str] | None, processes: int | None, *, then: str = "", **options: Any
) -> int:
    """`run_pipeline` with these options; `then` as of `_ended`."""

    def body(settings: Any, rank: Any) -> None:
        from mup_megatron.tuning.pipeline import run_pipeline  # on ranks alone: it takes seconds to import

        run_pipeline(settings, rank, **options)

    return _on_ranks(config, overrides, processes, body, then)


@app.command(
    epilog="Example: mup-megatron tune configs/demo.yaml tuning.trials=32 --nproc-per-node 2. With --megatron: "
    "mup-megatron tune --megatron proxy.yaml tuning.trials=32 -- torchrun --nproc-per-node 2 -m mup_megatron.run "
    "pretrain_gpt.py --mup-base base.yaml --num-layers 24 ..."
)
def tune(
    config: ConfigPath,
    overrides: Overrides = None,
    nproc_per_node: Processes = None,
    megatron: Megatron = False,
    join: Annotated[
        bool, typer.Option("--join", help="Be one worker beside others that come and go; makes the study if need be.")
    ] = False,
) -> int:
    """Tune the proxy and write the transfer record; every process is a worker on one shared study."""
    if megatron:
        config, overrides = read_command([config, *(overrides or [])])
    then = "" if megatron else shlex.join(["mup-megatron", "pipeline", config, *(overrides or [])])
    overrides = [*(overrides or []), "tuning.run=only"]
    if join:
        return _join(config, overrides, then)
    return _pipeline(config, overrides, nproc_per_node, then=then, control=False, allowed_changes=())


def _join(config: str, overrides: list[str], then: str) -> int:
    from mup_megatron.parallel.ranks import read_rank

    settings = read_config(config, overrides)

    led = False

    def body(settings: Any, rank: Any) -> None:
        from mup_megatron.tuning.lead import join_study

        nonlocal led
        led = join_study(settings, rank)

    return _ended(settings, read_rank(), body, then, lambda: led)


@app.command(epilog="Example: mup-megatron transfer configs/demo.yaml --output target.yaml")
def transfer(
    config: ConfigPath,
    overrides: Overrides = None,
    output: Annotated[
        str | None, typer.Option(metavar="FILE", help="Also write the config with the values in it, for `train`.")
    ] = None,
    world_size: WorldSize = None,
    as_json: AsJson = False,
) -> None:
    """Show the values of the transfer record, and what each becomes on this config's target."""
    setup = laid_out(config, overrides, world_size)
    settings, layout = setup.config, setup.layout
    from mup_megatron.data.prepare import known_vocab_size
    from mup_megatron.model.build import parametrize
    from mup_megatron.report.summary import print_transfer
    from mup_megatron.rules.horizon import moved
    from mup_megatron.tuning.decide import apply_record, replaced
    from mup_megatron.tuning.fitted import ladder_of, told
    from mup_megatron.tuning.predicted import in_words, predicted
    from mup_megatron.tuning.recording import becomes, extrapolated
    from mup_megatron.tuning.remarks import remarks

    transferred, record = apply_record(settings)
    ladder, over = ladder_of(transferred, record.ladder), moved(transferred)
    on_target = becomes(parametrize(transferred, known_vocab_size(settings)), layout)
    if output is not None:
        never = derive(transferred, {"tuning.run": "never"})
        write_output(Path(output), as_yaml(never.model_dump()), "--output")
    said = [*replaced(settings, record), *remarks(record.study, extrapolated(transferred, record))]
    said += told(transferred, ladder)
    if (loss := predicted(transferred, ladder)) is not None:
        said.append(f"predicted loss of the target: {in_words(loss)}")
    if as_json:
        shown = {"values": record.values, "tuned": record.tuned, "moved": over, "becomes": on_target, "remarks": said}
        show({**shown, "predicted": loss}, as_json, [])
    else:
        print_transfer(record, over, on_target, said, console())


def _on_ranks(
    config: str,
    overrides: list[str] | None,
    processes: int | None,
    body: Callable[[Any, Any], None],
    then: str = "",
) -> int:
    """Runs `body(config, rank)` here if a launcher started us, or one process is enough; else starts the ranks.

    `then` as of `_ended`.
    """
    from mup_megatron.parallel.layout import resolve_layout, smallest_world

    settings = read_config(config, overrides)
    rank = launched_rank(processes)
    if not rank.launched:
        ranks = (
            processes or (default_workers(settings) if settings.tuning.command else gpus()) or smallest_world(settings)
        )
        if ranks > 1:
            if settings.tuning.run != "only":
                resolve_layout(settings, ranks)  # said once, before any rank is started; each resolves its run itself
            return start_typed(ranks)
    return _ended(settings, rank, body, then)


def _ended(
    settings: Any, rank: Any, body: Callable[[Any, Any], None], then: str = "", shows: Callable[[], bool] | None = None
) -> int:
    """Runs `body`; how it ended as an exit status, and, on the first rank or where `shows`, what there is to see.

    `then` is the command that trains the target with what was tuned, where that is what comes next.
    """
    from mup_megatron.parallel import upstream
    from mup_megatron.parallel.ranks import at_once

    with at_once():
        upstream.prepare_process()  # before the next import, which brings megatron-core
        from mup_megatron.checkpoints.checkpoint import ALARMS
        from mup_megatron.train.loop import Alarmed, Diverged, Terminated
        from mup_megatron.tuning import Stopped
        from mup_megatron.util.disk import full_disk

    directory = Path(settings.run.dir)
    status = 0
    try:
        with full_disk(directory, "files of the run"):
            body(settings, rank)
    except Stopped:
        status = stopped(f"the trials at hand are saved in {directory / 'tuning'}")
    except Terminated as saved:
        status = stopped(str(saved))
    except Alarmed as saved:
        status = 4
        if rank.is_first:
            aside(f"mup-megatron: {saved}; {directory / ALARMS} says why; watch.action=warn goes on from there")
    except Diverged as message:
        status = 5
        if rank.is_first:
            aside(f"mup-megatron: {message}; the last checkpoint is untouched")
    if shows() if shows else rank.is_first:
        from mup_megatron.report.summary import summarize

        with full_disk(directory, "pictures of the run"):
            summarize(directory, console(), then)
    return status
