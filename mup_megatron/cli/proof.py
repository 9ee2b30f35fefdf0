"""Commands that prove: coord-check, stability, reverse."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mup_megatron.cli.common import (
    AsJson,
    ConfigPath,
    Megatron,
    Overrides,
    Processes,
    Workers,
    app,
    gpus,
    launched_rank,
    read_config,
    show,
    start_typed,
    stopped,
)
from mup_megatron.cli.megatron import default_workers, processes_of, read_command
from mup_megatron.util.errors import UserError

if TYPE_CHECKING:
    from mup_megatron.config import Config
    from mup_megatron.parallel.ranks import Rank
    from mup_megatron.proof.check import Check
    from mup_megatron.proof.grid import Grid

_STATUS = {"passed": 0, "failed": 1, "undecided": 3}

Growth = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=1,2,4,...", help="Factors of one base size; repeatable. What is not named stays at its base."
    ),
]


@app.command(
    "coord-check",
    epilog="Exit status: 0 passed, 1 failed, 3 undecided (the error of a slope reaches its bound; what decides it is "
    "said), 2 bad input. Example: mup-megatron coord-check configs/demo.yaml --widths 1,4,16 --seeds 3",
)
def coordinate_check(
    config: ConfigPath,
    overrides: Overrides = None,
    widths: Annotated[
        str,
        typer.Option(
            metavar="1,2,4,...",
            help="Factors of all base sizes (of layers for depth); the config's own path to its target unless given.",
        ),
    ] = "",
    growth: Growth = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 4,
    seeds: Annotated[int, typer.Option(help="Repetitions, each with initial values and text of its own.")] = 3,
    parametrization: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A parametrization.name; the config's if none."),
    ] = None,
    broken: Annotated[
        str | None, typer.Option("--break", metavar="RULE", help="Take a rule out, where it matters: it must fail.")
    ] = None,
    thorough: Annotated[
        bool, typer.Option("--thorough", help="Every regime in which some rule matters, and one table.")
    ] = False,
    own_batch: Annotated[
        bool, typer.Option("--own-batch", help="The config's own batch, length and peak rate, not a few tokens.")
    ] = False,
    ranges: Annotated[
        bool, typer.Option("--ranges", help="Also the range of values, and what bf16, e4m3 and e5m2 would lose of it.")
    ] = False,
    beside: Annotated[bool, typer.Option(help="Also measure standard beside µP, µP beside all others.")] = True,
    output: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="For picture and JSON; run.dir/coord-check unless given.")
    ] = None,
    nproc_per_node: Processes = None,
    megatron: Megatron = False,
    as_json: AsJson = False,
) -> int:
    """Check that activations, gradients and updates keep their size over width, in the config's own layout."""
    from mup_megatron.parallel.layout import smallest_world
    from mup_megatron.parallel.ranks import Rank
    from mup_megatron.proof.check import Check

    if megatron:
        config, overrides = read_command([config, *(overrides or [])])
    settings = read_config(config, overrides)
    asked = Check(
        factors=_factors(widths, "--widths"),
        growth=_growth(growth or []),
        steps=steps,
        seeds=seeds,
        point=parametrization,
        broken=broken,
        compare=beside,
        own_batch=own_batch,
        ranges=ranges,
    )
    if thorough:
        asked.refuse_thorough(settings)
    rank = launched_rank(nproc_per_node)
    if settings.tuning.command:
        rank = Rank(world_size=processes_of(settings))
    elif not rank.launched:
        ranks = nproc_per_node or asked.processes or gpus() or smallest_world(settings)
        if ranks > 1:
            return start_typed(ranks)
    return _check(settings, rank, asked, Path(output or f"{settings.run.dir}/coord-check"), thorough, as_json)


def _check(settings: Config, rank: Rank, asked: Check, folder: Path, thorough: bool, as_json: bool) -> int:
    """Runs a coordinate check on this rank; writes and shows its result on the first; exit status."""
    from mup_megatron.parallel import upstream

    upstream.prepare_process()
    from mup_megatron.proof.coord_check import coord_check
    from mup_megatron.proof.thorough import thorough as check_thoroughly
    from mup_megatron.proof.told import lines, write

    def say(line: str) -> None:
        if rank.is_first and not as_json:
            print(line, flush=True)

    if thorough:
        result, plain = check_thoroughly(settings, rank, asked, folder, say)
    else:
        result = plain = coord_check(settings, rank, asked, folder=folder / "runs", say=say)
    if rank.is_first:
        from mup_megatron.report.coordinates import draw_coordinates

        path = write(result, folder)
        said = [*lines(result), path, draw_coordinates(plain, path.with_suffix(".png"))]
        if asked.ranges:
            from mup_megatron.proof.ranges import range_lines
            from mup_megatron.report.ranges import draw_ranges

            said = [*range_lines(result), *said, draw_ranges(result, path.with_name(f"{path.stem}-ranges.png"))]
        show(result, as_json, said)
    return _STATUS[result["verdict"]]


def _growth(options: list[str]) -> dict[str, list[Fraction]]:
    """`hidden_size=1,2,4` as a key and its factors, which may fall: `moe_ffn_hidden_size=1,1/2,1/4`."""
    found: dict[str, list[Fraction]] = {}
    for option in options:
        key, sign, words = option.partition("=")
        if not sign or key in found:
            raise UserError(f"--growth {option}: expected a key of base: and its factors once, as hidden_size=1,2,4")
        try:
            found[key] = [Fraction(word) for word in words.split(",") if word]
        except (ValueError, ZeroDivisionError):
            raise UserError(
                f"--growth {key}: {words}: expected whole factors, for example 1,2,4,8, or shares such as 1,1/2,1/4"
            ) from None
    return found


def _factors(words: str, option: str) -> list[int]:
    """`1,2,4` as numbers, ascending."""
    try:
        return sorted({int(word) for word in words.split(",") if word})
    except ValueError:
        raise UserError(f"{option}: {words}: expected whole factors, for example 1,2,4,8") from None


@app.command(
    epilog="Exit status: 0 passed, 1 failed, 3 undecided (the best value lies beyond those tried, or beside a run that "
    "diverged), 2 bad input. "
    "Example: mup-megatron stability configs/demo.yaml --over lr --across width --sizes 1,2,4 --seeds 3"
)
def stability(
    config: ConfigPath,
    overrides: Overrides = None,
    over: Annotated[
        str,
        typer.Option(
            metavar="NAME,...", help="Hyperparameters to vary, each by itself, as in tuning.search; lr_schedule is one."
        ),
    ] = "lr",
    across: Annotated[
        str, typer.Option(help="What grows: width, depth, experts, batch, sequence or tokens.")
    ] = "width",
    values: Annotated[
        str, typer.Option(metavar="V,V,...", help="To try; powers of two about the config's own unless given.")
    ] = "",
    sizes: Annotated[
        str,
        typer.Option(
            metavar="1,2,4,...", help="Factors of the base (width, depth, experts), else of the config's own."
        ),
    ] = "",
    growth: Growth = None,
    least: Annotated[
        int | None, typer.Option("--from", metavar="FACTOR", help="Smallest size that is judged; the smallest.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Repetitions.")] = 3,
    workers: Workers = None,
    beside: Annotated[bool, typer.Option(help="Also draw standard and fan_in beside µP, µP beside others.")] = True,
    compare: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A parametrization.name to draw in place of those; repeatable."),
    ] = None,
    megatron: Megatron = False,
    output: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="For runs, picture and JSON; run.dir/stability unless given.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Train a grid of sizes and values: does the optimum stay where it is? Goes on where it was stopped.

    Any number of these commands may work on one folder, on any node that sees it: `srun mup-megatron stability ...`.
    """
    from mup_megatron.parallel import upstream

    if megatron:
        config, overrides = read_command([config, *(overrides or [])])
    settings = read_config(config, overrides)
    if settings.tuning.command and not workers:
        workers = default_workers(settings)
    upstream.prepare_process()
    from mup_megatron.proof import stability as proof
    from mup_megatron.proof.question import question
    from mup_megatron.proof.verdict import together
    from mup_megatron.report.stability import draw_stability

    factors, grows, others = _factors(sizes, "--sizes"), _growth(growth or []), compare or (None if beside else ())
    names = dict.fromkeys(word.strip() for word in over.split(",") if word.strip())
    if not names:
        raise UserError("--over: names nothing; expected a hyperparameter or several, e.g. lr,init_method_std")
    asked = [
        question(
            settings, name, across,
            values=values, factors=factors, seeds=seeds, least=least, others=others, growth=grows,
        )
        for name in names
    ]  # fmt: skip

    def body(grid: Grid) -> str:
        found = []
        for each in asked:
            result = proof.stability(settings, each, grid)
            found.append(result)
            if grid.rank.is_first:
                path = grid.write(f"{each.name}.json", result)
                picture = draw_stability(result, path.with_suffix(".png"))
                if not as_json:
                    show(result, as_json, [*proof.lines(result), path, picture])
        if as_json and grid.rank.is_first:
            show(found, as_json, [])
        return together(result["verdict"] for result in found)

    return _on_grid(body, Path(output or f"{settings.run.dir}/stability"), workers, as_json)


@app.command(
    epilog="Exit status: 0 passed (the laws tell the largest rung, which they have not seen), 1 failed, 3 undecided, "
    "2 bad input. Example: mup-megatron ladder configs/demo.yaml --batch 1,2,4 --tokens 1,2,4 --seeds 3"
)
def ladder(
    config: ConfigPath,
    overrides: Overrides = None,
    batch: Annotated[str, typer.Option(metavar="1,2,4,...", help="Factors of the config's own batch.")] = "1,2,4",
    tokens: Annotated[str, typer.Option(metavar="1,2,4,...", help="Factors of the config's own tokens.")] = "1,2,4",
    width: Annotated[
        str, typer.Option(metavar="1,2,...", help="Factors of all base sizes; the config's own model unless given.")
    ] = "",
    layers: Annotated[
        str, typer.Option(metavar="1,2,...", help="Factors of the base's layers; the config's own unless given.")
    ] = "",
    over: Annotated[
        str, typer.Option(metavar="lr|weight_decay|one_minus_beta2", help="What every rung varies.")
    ] = "lr",
    values: Annotated[
        str, typer.Option(metavar="V,V,...", help="Values to begin with; octaves about the config's own unless given.")
    ] = "",
    seeds: Annotated[int, typer.Option(help="Repetitions; later ones of rates near the minimum alone.")] = 3,
    min_steps: Annotated[int, typer.Option(min=1, help="Leave out rungs of fewer optimizer steps.")] = 1,
    workers: Workers = None,
    output: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="For runs, picture and JSON; run.dir/ladder unless given.")
    ] = None,
    record: Annotated[
        str | None, typer.Option(metavar="FILE", help="Put the ladder into this transfer record, if its laws hold.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Measure how the best rate (or decay) moves with batch and tokens, fit it, test it on the largest. Goes on."""
    from mup_megatron.parallel import upstream

    settings = read_config(config, overrides, takes_ladder=False)
    upstream.prepare_process()
    from mup_megatron.proof.ladder import ladder as measure
    from mup_megatron.proof.ladder_told import lines
    from mup_megatron.proof.rungs import Ladder, octaves, varied
    from mup_megatron.report.ladder import draw_ladder
    from mup_megatron.tuning.record_ladder import keep, record_of

    factors = {"batch": batch, "tokens": tokens, "width": width, "layers": layers}
    asked = Ladder(
        **{name: _factors(words, f"--{name}") for name, words in factors.items()},
        values=sorted(set(_numbers(values, "--values"))) or octaves(settings, varied(over)),
        seeds=seeds,
        min_steps=min_steps,
        over=varied(over),
    )
    if record is not None:
        if over != "lr":
            raise UserError(f"--record: takes exponents of the rate alone; expected --over lr, not {over}")
        record_of(Path(record), settings)  # says now, not when the rungs have been paid for, what is wrong with it

    def body(grid: Grid) -> str:
        result = measure(settings, asked, grid)
        if grid.rank.is_first:
            path = grid.write(f"{asked.name}.json", result)
            show(result, as_json, [*lines(result), path, draw_ladder(result, path.with_suffix(".png"))])
            if record is not None:
                grid.say(keep(Path(record), settings, path))
        return result["verdict"]

    return _on_grid(body, Path(output or f"{settings.run.dir}/ladder"), workers, as_json)


def _on_grid(body: Callable[[Grid], str], directory: Path, workers: int | None, as_json: bool) -> int:
    """Runs `body` on many runs of one process each, which says a verdict; exit status."""
    from mup_megatron.parallel.ranks import read_rank
    from mup_megatron.proof.grid import Grid
    from mup_megatron.tuning import Stopped

    rank = read_rank()

    def say(line: str) -> None:
        print(line, file=sys.stderr if as_json else sys.stdout, flush=True)

    at_a_time = 1 if rank.launched else workers or gpus() or os.cpu_count() or 1
    try:
        return _STATUS[body(Grid(directory=directory, rank=rank, workers=at_a_time, say=say))]
    except Stopped:
        return stopped("the runs at hand are saved")


def _numbers(words: str, option: str) -> list[float]:
    """`1e-3,2e-3` as positive numbers."""
    try:
        numbers = [float(word) for word in words.split(",") if word]
    except ValueError:
        numbers = [0.0]
    if not all(math.isfinite(number) and number > 0 for number in numbers):
        raise UserError(f"{option}: {words}: expected positive numbers, for example 1e-3,4e-3")
    return numbers


@app.command(epilog="Example: mup-megatron reverse large.yaml --rates 1e-3,4e-3,1.6e-2 --beside")
def reverse(
    config: ConfigPath,
    overrides: Overrides = None,
    rates: Annotated[str, typer.Option(metavar="LR,LR,...", help="To try; the config's own unless given.")] = "",
    seeds: Annotated[int, typer.Option(help="Repetitions.")] = 1,
    beside: Annotated[bool, typer.Option(help="Also train the large model, and the small one unreversed.")] = False,
    workers: Workers = None,
    output: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="For runs, config, picture, JSON; run.dir/reverse unless given."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Make and train a small model for which a rate is too high where it is for this large standard one.

    The config is the large run; `base:` names the small model's sizes.
    """
    from mup_megatron.parallel import upstream

    settings = read_config(config, overrides)
    numbers = _numbers(rates, "--rates")
    upstream.prepare_process()
    from mup_megatron.proof import reverse as proof
    from mup_megatron.report.reverse import draw_reverse

    def body(grid: Grid) -> str:
        result = proof.reverse(settings, numbers, seeds, grid, compare=beside)
        if grid.rank.is_first:
            paths = [*proof.write(result, grid.directory), draw_reverse(result, grid.directory / "reverse.png")]
            print(json.dumps(result) if as_json else "\n".join([*proof.lines(result), *map(str, paths)]))
        return "passed"

    return _on_grid(body, Path(output or f"{settings.run.dir}/reverse"), workers, as_json)
