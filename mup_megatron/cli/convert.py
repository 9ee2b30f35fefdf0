"""Commands that read or write other people's weights, or ours under another base: export, rebase, import."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from mup_megatron.cli.common import (
    AsJson,
    Checkpoint,
    ConfigPath,
    Overrides,
    TokenizerOf,
    app,
    aside,
    one_process,
    read_config,
    show,
)


@app.command(epilog="Example: mup-megatron export runs/demo exported --to hf --dtype bf16")
def export(
    checkpoint: Checkpoint,
    directory: Annotated[str, typer.Argument(metavar="DIR", help="The folder to write; not there yet.")],
    to: Annotated[
        Literal["hf", "safetensors", "megatron"],
        typer.Option(help="Hugging Face transformers; megatron-core's own names; or what plain Megatron loads."),
    ] = "hf",
    dtype: Annotated[
        Literal["fp32", "bf16"], typer.Option(help="Of the weights; bf16 rounds each of them once.")
    ] = "fp32",
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Of the weights in a file, e.g. 200MB.")] = "5GB",
    keep_multipliers: Annotated[
        bool, typer.Option("--keep-multipliers", help="Leave the weights alone: Granite has multipliers (from llama).")
    ] = False,
    tokenizer: TokenizerOf = None,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint's model as other tools read it, every multiplier folded into the weights. In one process."""
    one_process("export")
    from mup_megatron.convert import export as exports
    from mup_megatron.convert.export.folder import size_of

    said = exports.export(
        Path(checkpoint),
        Path(directory),
        to,
        dtype=dtype,
        max_shard_size=size_of(max_shard_size, "--max-shard-size"),
        keep_multipliers=keep_multipliers,
        tokenizer=tokenizer,
        say=aside,
    )
    folded = f"{len(said['folded'])} tensors with a factor folded in"
    show(said, as_json, [f"{directory}: {said['architecture']}, {folded}, {dtype}"])


@app.command(epilog="Example: mup-megatron rebase runs/demo runs/rebased --base base.yaml")
def rebase(
    checkpoint: Checkpoint,
    directory: Annotated[str, typer.Argument(metavar="DIR", help="The run's folder to write; not there yet.")],
    base: Annotated[str, typer.Option(metavar="FILE", help="Base sizes as under base: in a config, or a .bsh file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY.PATH=VALUE]...", help="Of parametrization:, or a multiplier of hparams:."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Go on from a checkpoint under another base: the same function, and the same next update. In one process."""
    one_process("rebase")
    from mup_megatron.config import parse_overrides
    from mup_megatron.convert import rebase as rebasing

    keys = parse_overrides(overrides or [])
    said = rebasing.rebase(Path(checkpoint), Path(directory), Path(base), keys, say=aside)
    told = (
        f"{directory}: step {said['step']}, {len(said['weights'])} tensors with a factor, {len(said['carried'])} that "
        f"carry their rates; next: mup-megatron train {shlex.quote(f'{directory}/config.yaml')}"
    )
    show(said, as_json, [told])


@app.command("import", epilog="Example: mup-megatron import llama-hf my.yaml run.dir=runs/llama")
def import_(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="A Hugging Face folder, or a checkpoint of plain megatron.training.")
    ],
    config: ConfigPath,
    overrides: Overrides = None,
    check: Annotated[
        bool, typer.Option(help="Compare logits with those of transformers' model, where it is installed.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Make a standard checkpoint the first checkpoint of a run, which `train` goes on from. In one process."""
    one_process("import")
    settings = read_config(config, overrides)
    from mup_megatron.convert.importing import import_checkpoint

    said = import_checkpoint(Path(source), settings, say=aside, check=check)
    state = "with the optimizer's state" if said["optimizer"] else "weights alone"
    if said["deviation"] is not None:
        state += f", logits within {said['deviation']:.0e} of transformers'"
    following = shlex.join(["mup-megatron", "train", config, *(overrides or [])])  # without them, of another run
    told = f"{said['checkpoint']}: {said['tensors']} tensors, {state}; next: {following}"
    show(said, as_json, [told])
