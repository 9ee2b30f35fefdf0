"""Commands that show a run before it begins: explain, horizon, plan."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from mup_megatron.cli.common import (
    AsJson,
    ConfigPath,
    Overrides,
    WorldSize,
    app,
    aside,
    console,
    laid_out,
    read_config,
    show,
)
from mup_megatron.config import Config
from mup_megatron.util.errors import UserError
from mup_megatron.util.files import write_output


@app.command(epilog="Example: mup-megatron explain configs/demo.yaml hparams.lr=1e-3 --world-size 4 --rank 3")
def explain(
    config: ConfigPath,
    overrides: Overrides = None,
    rank: Annotated[int, typer.Option(min=0, help="Rank whose tensors are shown.")] = 0,
    world_size: WorldSize = None,
    as_json: AsJson = False,
    save_base_shapes: Annotated[
        str | None, typer.Option(metavar="FILE", help="Also write the base shapes as a .bsh file.")
    ] = None,
    band: Annotated[bool, typer.Option("--band", help="Also show what the proxy says each series may be.")] = False,
    page: Annotated[
        str | None, typer.Option("--html", metavar="FILE", help="Write a page on which sizes are moved, instead.")
    ] = None,
    notebook: Annotated[
        str | None, typer.Option(metavar="FILE.ipynb", help="Write a notebook with that page in it, instead.")
    ] = None,
    defaults: Annotated[
        bool, typer.Option("--defaults", help="List what the config leaves at its default, with the values, instead.")
    ] = False,
) -> None:
    """Show what the parametrization does to every tensor, under the config's layout. Allocates nothing."""
    instead = {"--defaults": defaults, "--html": page is not None, "--notebook": notebook is not None}
    alone = next((name for name, asked in instead.items() if asked), None)
    given = {**(instead if defaults else {}), "--band": band, "--save-base-shapes": save_base_shapes is not None}
    beside = [name for name, asked in given.items() if asked and name != alone]
    if alone and beside:
        raise UserError(f"{alone}: is shown instead of the table; expected no {' or '.join(beside)} beside it")
    if defaults:
        from mup_megatron.config.reference import left_at_default

        left = left_at_default(read_config(config, overrides))
        show(left, as_json, [f"{key}: {json.dumps(value)}" for key, value in left.items()])
        return
    setup = laid_out(config, overrides, world_size)
    settings, layout = setup.config, setup.layout
    if rank >= layout.world_size:
        raise UserError(f"--rank: {rank} is not below the {layout.world_size} processes of the layout")
    from mup_megatron.data.prepare import known_vocab_size
    from mup_megatron.model.explain import explain as explain_data
    from mup_megatron.model.explain import print_table
    from mup_megatron.report.bands import lines_of, rows_of
    from mup_megatron.rules.base_file import beside_shapes
    from mup_megatron.rules.base_shapes import base_shapes_text
    from mup_megatron.telemetry.band import band_of

    vocabulary = known_vocab_size(settings)
    if page is not None or notebook is not None:
        _write_explorer(page, notebook, settings, vocabulary, [config, *(overrides or [])])
        return
    parametrization = setup.parametrization(vocabulary)
    if save_base_shapes is not None:
        text = base_shapes_text(parametrization.shapes, beside_shapes(parametrization))
        write_output(Path(save_base_shapes), text, "--save-base-shapes")
    on = band_of(parametrization, settings.band_path, given=True) if band else None
    if band and on is None:
        raise UserError(f"--band: the run is in {settings.parametrization.name}; expected parametrization.name: mup")
    if as_json:
        bands = {} if on is None else {"band": list(rows_of(on))}
        show({**explain_data(parametrization, layout, rank), **bands}, as_json, [])
        return
    print_table(parametrization, layout, console(200), rank)
    show(None, False, [_said_defaults(read_config(config, overrides))])
    if on is not None:
        show(None, False, lines_of(on))


def _said_defaults(config: Config) -> str:
    """What trains the model and was not given, and how to see the rest."""
    from mup_megatron.config.reference import left_at_default

    left = left_at_default(config)
    told = {key: value for key, value in left.items() if key.startswith(_TRAINS) and value not in _OFF}
    shown = ", ".join(f"{key} {value if isinstance(value, str) else json.dumps(value)}" for key, value in told.items())
    return f"by default: {shown or 'nothing that trains the model'}; {len(left) - len(told)} more with --defaults"


_TRAINS = ("parametrization.", "training.", "optimizer.")
_OFF: tuple[Any, ...] = (None, False, "none", [], 0)
"""Sections whose defaults `explain` shows under its table, and what a key is where it asks for nothing."""


def _write_explorer(
    page: str | None, notebook: str | None, config: Config, vocabulary: int, words: Sequence[str]
) -> None:
    """Writes the page of `explain --html`, and a notebook that shows it."""
    from mup_megatron.model.build import parametrize
    from mup_megatron.report.document import write_document
    from mup_megatron.report.explorer import explorer_page, notebook_of

    made = explorer_page(config, partial(parametrize, vocab_size=vocabulary))
    if page is not None:
        print(write_document(Path(page), made))
    if notebook is not None:
        print(write_document(Path(notebook), notebook_of(made, words)))


@app.command(epilog="Example: mup-megatron horizon configs/demo.yaml tuning.train_steps=100")
def horizon(config: ConfigPath, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Show what each rule over batch and tokens says of the step from the trials to the run."""
    from mup_megatron.rules.horizon_rules import lines_of, side_by_side
    from mup_megatron.tuning.fitted import beside_others, ladder_of

    settings = read_config(config, overrides)
    ladder = ladder_of(settings, None)
    found = side_by_side(settings, beside_others(ladder) if ladder else None)
    show([each.as_json() for each in found], as_json, lines_of(settings, found, has_ladder=ladder is not None))


@app.command(epilog="Example: mup-megatron plan configs/gpt3/6.7b.yaml --world-size 64")
def plan(
    config: ConfigPath,
    overrides: Overrides = None,
    world_size: WorldSize = None,
    device_tflops: Annotated[
        float | None, typer.Option(min=1e-3, help="Peak of one device, TFLOP/s: 989 for an H100 in bf16.")
    ] = None,
    utilization: Annotated[float, typer.Option(min=1e-3, max=1, help="Share of it that training reaches (MFU).")] = 0.4,
    device_memory: Annotated[
        float | None, typer.Option(min=1e-3, help="Memory of one device, GB: then layouts are compared.")
    ] = None,
    node_bandwidth: Annotated[
        float, typer.Option(min=1e-3, help="What a device sends within its node, GB/s: 450 for an H100's NVLink.")
    ] = 450,
    network_bandwidth: Annotated[
        float, typer.Option(min=1e-3, help="What it sends to other nodes, GB/s: 50 for 400 Gb/s.")
    ] = 50,
    as_json: AsJson = False,
) -> None:
    """Show what tuning and pretraining will cost: trials, tokens, FLOPs, share, memory, time. Trains nothing."""
    if device_memory and not device_tflops:
        raise UserError("--device-memory: layouts are compared by the time of a step; expected --device-tflops too")
    setup = laid_out(config, overrides, world_size, on_cuda=device_tflops is not None)
    settings, layout = setup.config, setup.layout
    from mup_megatron.data.ahead import problem_ahead
    from mup_megatron.data.prepare import known_vocab_size
    from mup_megatron.tuning import better_layout, budget, scaling

    vocab_size = known_vocab_size(settings)
    planned = budget.plan(settings, vocab_size, layout.world_size, measure=True, layout=layout)
    hours = budget.device_hours(planned, device_tflops, utilization) if device_tflops else None
    device = None
    if device_tflops:
        wires = {"within": node_bandwidth * 1e9, "between": network_bandwidth * 1e9}
        node = settings.slurm.gpus_per_node or settings.slurm.processes_per_node or 1
        device = scaling.Device(tflops=device_tflops, utilization=utilization, node=node, **wires)
    memory = device_memory and device_memory * 1e9
    step, said = better_layout.on_paper(budget.priced(settings, vocab_size), layout, device, memory)
    if as_json:
        show({**planned.as_json(), **({"device_hours": hours} if hours else {}), **step}, as_json, [])
        return
    print("\n".join([*budget.lines(settings, planned), *said]))
    if hours:
        print(
            f"device-hours at {utilization:.0%} of {device_tflops:g} TFLOP/s: tuning {hours['tuning']:.3g}, target "
            f"{hours['target']:.3g}"
        )
    if problem := problem_ahead(settings):
        aside(f"warning: {problem}")
    budget.check_share(settings, planned)
