"""Commands to start with: new, doctor, config."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from mup_megatron.cli.common import AsJson, app, console, show
from mup_megatron.config.section import WIDEST


@app.command(epilog="Example: mup-megatron new my-run --architecture llama --hidden-size 4096 --num-layers 32")
def new(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="Folder to make.")],
    architecture: Annotated[Literal["gpt3", "llama"], typer.Option(help="Of the target.")] = "llama",
    num_layers: Annotated[int, typer.Option(min=1, help="Of target and proxy.")] = 4,
    hidden_size: Annotated[int, typer.Option(min=2, max=WIDEST, help="Width of the target.")] = 1024,
    heads: Annotated[
        int | None, typer.Option(min=1, help="Query heads of the target; hidden size / 128, or / 64 below 2048.")
    ] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="KV heads of the target; as many as heads.")] = None,
    ffn_hidden_size: Annotated[
        int | None, typer.Option(min=1, help="Of the target; 4 times the width, or 8/3 (llama) to a multiple of 64.")
    ] = None,
    vocab_size: Annotated[int, typer.Option(min=1, help="Of the tokenizer that is trained on the text.")] = 4096,
    seq_length: Annotated[int, typer.Option(min=1, help="Tokens per sequence.")] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Sequences per optimizer step.")] = 32,
    train_steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of the target.")] = 1000,
    text: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH", help="Your own text: a file, or a folder of .txt, .md, .jsonl; repeatable."),
    ] = None,
) -> None:
    """Write a folder to start from: a commented config that runs, with base and proxy by the paper's advice."""
    from mup_megatron.cli.new_run import Target, proxy_of, seen_from, write_folder

    path = Path(directory)
    head_size = 128 if hidden_size >= 2048 else 64
    ffn = 64 * max(1, round(8 * hidden_size / 3 / 64)) if architecture == "llama" else 4 * hidden_size
    target = Target(
        name="run",
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_attention_heads=heads or max(1, hidden_size // head_size),
        num_query_groups=kv_heads,
        ffn_hidden_size=ffn_hidden_size or ffn,
        vocab_size=vocab_size,
        seq_length=seq_length,
        global_batch_size=batch,
        train_steps=train_steps,
        files=seen_from(path, text or ()),
    )
    share = write_folder(path, target)
    print(f"{path / 'config.yaml'}: width {hidden_size}, tuned at width {proxy_of(target).hidden_size};")
    print(f"tuning will cost {share:.2g} times the target's training. Next:")
    print(f"  cd {shlex.quote(str(path))}")
    for command, what in (
        ("plan config.yaml", "what it costs, in time too"),
        ("explain config.yaml", "every tensor, its multipliers and rates"),
        ("pipeline config.yaml", "tune, transfer, train"),
    ):
        print(f"  mup-megatron {command:<24} # {what}")


@app.command(epilog="Exit status: 0 ready, 1 not ready. Example: mup-megatron doctor --all")
def doctor(
    everything: Annotated[bool, typer.Option("--all", help="Also every package and every patch.")] = False,
    as_json: AsJson = False,
) -> int:
    """Say whether this machine is ready, what is missing, what that costs, and how to get it."""
    from mup_megatron.cli.doctor import examine, print_everything, print_examination

    examination = examine()
    if as_json:
        show(examination, as_json, [])
    else:
        print_examination(examination, console(80))
        if everything:
            print_everything(examination, console(160))
    return 1 if examination["problems"] else 0


@app.command("config", epilog="Example: mup-megatron config training.lr_warmup_steps, mup-megatron config --start")
def describe_config(
    key: Annotated[
        str | None, typer.Argument(metavar="[KEY]", help="A key, its last word or a section; all keys if none.")
    ] = None,
    as_schema: Annotated[
        bool, typer.Option("--json-schema", help="The JSON schema instead, for editors and programs.")
    ] = False,
    start: Annotated[
        bool, typer.Option("--start", help="The keys to think about before a first run, and no others.")
    ] = False,
) -> None:
    """Show what a config key does: the values it takes, its default, its unit, its effect."""
    from mup_megatron.config import reference
    from mup_megatron.util.errors import UserError

    if as_schema or start:
        if key is not None:
            raise UserError(f"{'--json-schema' if as_schema else '--start'}: expected no key beside it, found {key}")
        if as_schema:
            sys.stdout.write(reference.schema_text())
        else:
            _show_start()
        return
    found = reference.find(key) if key is not None else list(reference.described())
    from rich.padding import Padding
    from rich.text import Text

    shown = console(100)
    for each in found:
        shown.print(Text(each.path, style="bold"))
        if each.section is None:
            default = each.default if each.default == "required" else f"default {each.default}"
            said = "; ".join([each.values, default, *([f"unit: {each.unit}"] if each.unit else [])])
            shown.print(Padding(Text(said), (0, 0, 0, 4)))
        shown.print(Padding(Text(each.text), (0, 0, 0, 4)))


def _show_start() -> None:
    """A line per key of `START`: its name, its default, what it says."""
    from rich.table import Table

    from mup_megatron.config.reference import START, find

    table = Table("key", "default", "what it says", box=None)
    for path, meaning in START.items():
        table.add_row(path, find(path)[0].default, meaning)
    console(120).print(table)
