"""Commands to start with: config."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from mup_megatron.cli.common import app


@app.command("config", epilog="Example: mup-megatron config training.lr_warmup_steps")
def describe_config(
    key: Annotated[
        str | None, typer.Argument(metavar="[KEY]", help="A key, its last word or a section; all keys if none.")
    ] = None,
    as_schema: Annotated[
        bool, typer.Option("--json-schema", help="The JSON schema instead, for editors and programs.")
    ] = False,
) -> None:
    """Show what a config key does: the values it takes, its default, its unit, its effect."""
    from mup_megatron.config import reference
    from mup_megatron.errors import UserError

    if as_schema:
        if key is not None:
            raise UserError(f"--json-schema: expected no key beside it, found {key}")
        sys.stdout.write(reference.schema_text())
        return
    found = reference.find(key) if key is not None else list(reference.described())
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)
    for each in found:
        console.print(Text(each.path, style="bold"))
        if each.section is None:
            default = each.default if each.default == "required" else f"default {each.default}"
            said = "; ".join([each.values, default, *([f"unit: {each.unit}"] if each.unit else [])])
            console.print(Padding(Text(said), (0, 0, 0, 4)))
        console.print(Padding(Text(each.text), (0, 0, 0, 4)))
