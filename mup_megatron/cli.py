"""`mup-megatron`: the command line. Commands are thin; what they do lives in the module of the same name."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

from mup_megatron.errors import UserError

app = typer.Typer(
    name="mup-megatron",
    help="Maximal update parametrization (µP) for megatron-core and DeepSpeed: tune a small proxy, train the target.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigPath = Annotated[str, typer.Argument(metavar="CONFIG", help="YAML file of the run.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY.PATH=VALUE]...", help="Any config key, e.g. hparams.lr=3e-3.")
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on standard output, for programs.")]
WorldSize = Annotated[
    int | None, typer.Option(min=1, help="Processes to lay the model out for; the fewest that fit unless given.")
]
AllowChange = Annotated[
    list[str] | None, typer.Option(metavar="KEY", help="A key that may differ from the checkpoint's; repeatable.")
]


def main() -> NoReturn:
    """Entry point: bad input is one sentence and exit status 2, never a traceback."""
    from mup_megatron.launch import end_with_launcher, keep_log

    end_with_launcher()
    keep_log()
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Runs a command line; returns its exit status. Process groups that it started are ended."""
    others = _has_groups()
    status = _status(arguments)
    if _has_groups() and not others:
        from mup_megatron.runtime import stop_distributed

        stop_distributed()  # a process that leaves while gloo's threads run may abort, with a status of its own
    return status


def _has_groups() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.distributed.is_initialized()


def _status(arguments: list[str]) -> int:
    from mup_megatron.runtime import read_rank, say_error

    # Ranks whose first one left say so themselves; torch's own account of it is a page long.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        result = app(arguments, standalone_mode=False)
        return int(result or 0)
    except UserError as error:
        say_error(str(error), read_rank())
        return 2
    except typer.TyperException as error:  # unknown command or option
        say_error(error.format_message(), read_rank())
        return 2
    except KeyboardInterrupt:
        return 130


def _config(path: str, overrides: list[str] | None) -> Any:
    from mup_megatron.config import load_config, parse_overrides

    return load_config(path, parse_overrides(overrides or []))


@app.command(epilog="Example: mup-megatron prepare configs/demo.yaml")
def prepare(config: ConfigPath, overrides: Overrides = None) -> None:
    """Train the tokenizer and write the indexed dataset; does nothing where they are there already."""
    from mup_megatron import runtime

    settings = _config(config, overrides)
    runtime.prepare_process()
    from mup_megatron.data.prepare import data_directory
    from mup_megatron.data.prepare import prepare as prepare_data

    prepared = prepare_data(settings, print)
    print(f"prepared: {prepared.tokens:,} tokens, vocabulary {prepared.vocab_size}, {data_directory(settings)}")


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
) -> None:
    """Show what the parametrization does to every tensor, under the config's layout. Allocates nothing."""
    from mup_megatron import runtime
    from mup_megatron.layout import resolve_layout, smallest_world

    settings = _config(config, overrides)
    runtime.prepare_process()
    settings = runtime.resolve_auto(settings)
    layout = resolve_layout(settings, world_size or smallest_world(settings))
    if rank >= layout.world_size:
        raise UserError(f"--rank: {rank} is not below the {layout.world_size} processes of the layout")
    from mup_megatron import shapes
    from mup_megatron.data.prepare import known_vocab_size
    from mup_megatron.explain import explain as explain_data
    from mup_megatron.explain import print_table
    from mup_megatron.model import parametrize

    parametrization = parametrize(settings, known_vocab_size(settings))
    if save_base_shapes:
        extra = {"kv_channels": parametrization.base_head_size}
        shapes.save_base_shapes(save_base_shapes, parametrization.shapes, extra)
    if as_json:
        print(json.dumps(explain_data(settings, parametrization, layout, rank), indent=1))
        return
    from rich.console import Console

    width = None if sys.stdout.isatty() else 200
    print_table(settings, parametrization, layout, Console(width=width), rank)


Processes = Annotated[
    int | None, typer.Option(min=1, help="Processes to start where no launcher did; one per GPU unless given.")
]
Workers = Annotated[int | None, typer.Option(min=1, help="Runs at a time; one per GPU, else one per core.")]
Control = Annotated[
    bool, typer.Option(help="Afterwards train the same target in the standard parametrization, with the same values.")
]


@app.command(epilog="Example: mup-megatron train configs/demo.yaml training.train_steps=100 --nproc-per-node 2")
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    nproc_per_node: Processes = None,
    allow_change: AllowChange = None,
) -> int:
    """Train the target with the config's hyperparameters, from the last checkpoint if there is one."""

    def body(settings: Any, rank: Any) -> None:
        from mup_megatron import train as training  # on ranks alone: it takes seconds to import

        training.train(settings, rank, allow_change or [])

    allowed = _allowed(allow_change)
    return _on_ranks(["train", config, *(overrides or []), *allowed], config, overrides, nproc_per_node, body)


@app.command(epilog="Example: mup-megatron pipeline configs/demo.yaml --nproc-per-node 2 --control")
def pipeline(
    config: ConfigPath,
    overrides: Overrides = None,
    nproc_per_node: Processes = None,
    allow_change: AllowChange = None,
    control: Control = False,
) -> int:
    """Tune the proxy if there is no transfer record yet, then train the target with the transferred values."""

    def body(settings: Any, rank: Any) -> None:
        from mup_megatron.pipeline import run_pipeline  # on ranks alone: it takes seconds to import

        run_pipeline(settings, rank, control=control, allowed_changes=tuple(allow_change or ()))

    arguments = ["pipeline", config, *(overrides or []), *_allowed(allow_change), *(["--control"] if control else [])]
    return _on_ranks(arguments, config, overrides, nproc_per_node, body)


@app.command(epilog="Example: mup-megatron tune configs/demo.yaml tuning.trials=32 --nproc-per-node 2")
def tune(
    config: ConfigPath,
    overrides: Overrides = None,
    nproc_per_node: Processes = None,
    join: Annotated[
        bool, typer.Option("--join", help="Be one worker beside others that come and go; makes the study if need be.")
    ] = False,
) -> int:
    """Tune the proxy and write the transfer record; every process is a worker on one shared study."""
    overrides = [*(overrides or []), "tuning.run=only"]
    if join:
        return _join(config, overrides)
    return pipeline(config, overrides, nproc_per_node, None, False)


def _join(config: str, overrides: list[str]) -> int:
    from mup_megatron import runtime

    settings = _config(config, overrides)

    led = False

    def body(settings: Any, rank: Any) -> None:
        from mup_megatron.pipeline import join_study

        nonlocal led
        led = join_study(settings, rank)

    return _ended(settings, runtime.read_rank(), body, lambda: led)


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
    import yaml

    from mup_megatron import runtime
    from mup_megatron.layout import resolve_layout, smallest_world

    settings = _config(config, overrides)
    runtime.prepare_process()
    settings = runtime.resolve_auto(settings)
    layout = resolve_layout(settings, world_size or smallest_world(settings))
    from mup_megatron.data.prepare import known_vocab_size
    from mup_megatron.model import parametrize
    from mup_megatron.pipeline import apply_record
    from mup_megatron.report.summary import print_transfer
    from mup_megatron.tuning.record import becomes

    transferred, record = apply_record(settings)
    on_target = becomes(transferred, parametrize(transferred, known_vocab_size(settings)), layout)
    if output:
        never = transferred.model_copy(update={"tuning": transferred.tuning.model_copy(update={"run": "never"})})
        Path(output).write_text(yaml.safe_dump(never.model_dump(), sort_keys=False), encoding="utf-8")
    if as_json:
        print(json.dumps({"values": record["values"], "tuned": record["tuned"], "becomes": on_target}, indent=1))
        return
    print_transfer(record, on_target, _console())


@app.command(epilog="Example: mup-megatron plan configs/gpt3/6.7b.yaml --world-size 64")
def plan(
    config: ConfigPath,
    overrides: Overrides = None,
    world_size: WorldSize = None,
    device_tflops: Annotated[
        float | None, typer.Option(min=1e-3, help="Peak of one device, TFLOP/s: 989 for an H100 in bf16.")
    ] = None,
    utilization: Annotated[float, typer.Option(min=1e-3, max=1, help="Share of it that training reaches (MFU).")] = 0.4,
    as_json: AsJson = False,
) -> None:
    """Show what tuning and pretraining will cost: trials, tokens, FLOPs, share, memory, time. Trains nothing."""
    from mup_megatron import runtime
    from mup_megatron.layout import resolve_layout, smallest_world

    settings = _config(config, overrides)
    runtime.prepare_process()
    settings = runtime.resolve_auto(settings)
    ranks = world_size or smallest_world(settings)
    layout = resolve_layout(settings, ranks)
    from mup_megatron.data.prepare import known_vocab_size
    from mup_megatron.tuning import budget

    planned = budget.plan(settings, known_vocab_size(settings), ranks, measure=True, layout=layout)
    hours = budget.device_hours(planned, device_tflops, utilization) if device_tflops else None
    if as_json:
        print(json.dumps({**planned.as_json(), **({"device_hours": hours} if hours else {})}, indent=1))
        return
    print("\n".join(budget.lines(settings, planned)))
    if hours:
        print(
            f"device-hours at {utilization:.0%} of {device_tflops:g} TFLOP/s: tuning {hours['tuning']:.3g}, target "
            f"{hours['target']:.3g}"
        )
    budget.check_share(settings, planned)


@app.command("coord-check", epilog="Example: mup-megatron coord-check configs/demo.yaml --widths 1,4,16 --seeds 3")
def coordinate_check(
    config: ConfigPath,
    overrides: Overrides = None,
    widths: Annotated[
        str, typer.Option(metavar="1,2,4,...", help="Factors of the base (of its layers for depth_factor).")
    ] = "",
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 4,
    seeds: Annotated[int, typer.Option(help="Repetitions, each with initial values and text of its own.")] = 3,
    parametrization: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="mup, standard or interpolate:INIT,LR; the config's if none."),
    ] = None,
    broken: Annotated[
        str | None,
        typer.Option("--break", metavar="RULE", help="Take a rule out, where it matters: it must fail."),
    ] = None,
    beside: Annotated[bool, typer.Option(help="Also measure standard beside µP, µP beside all others.")] = True,
    output: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="For picture and JSON; run.dir/coord-check unless given.")
    ] = None,
    nproc_per_node: Processes = None,
    as_json: AsJson = False,
) -> int:
    """Check that activations, gradients and updates keep their size over width, in the config's own layout."""
    from mup_megatron import runtime
    from mup_megatron.layout import smallest_world
    from mup_megatron.proof.controls import processes

    settings = _config(config, overrides)
    factors = _factors(widths)
    rank = runtime.read_rank()
    if not rank.launched:
        ranks = nproc_per_node or processes(broken, factors) or _gpus() or smallest_world(settings)
        if ranks > 1:
            from mup_megatron.launch import start_ranks

            options = {"--parametrization": parametrization, "--break": broken, "--output": output, "--widths": widths}
            given = [word for name, value in options.items() if value for word in (name, value)]
            given += ["--steps", str(steps), "--seeds", str(seeds)]
            given += ["--beside" if beside else "--no-beside", *(["--json"] if as_json else [])]
            return start_ranks(["coord-check", config, *(overrides or []), *given], ranks)
    runtime.prepare_process()
    from mup_megatron.proof.coord_check import coord_check, lines, write

    result = coord_check(
        settings,
        rank,
        factors=factors,
        steps=steps,
        seeds=seeds,
        point=parametrization,
        broken=broken,
        beside=beside,
        say=lambda line: None if as_json or not rank.is_first else print(line, flush=True),
    )
    if rank.is_first:
        from mup_megatron.report.coordinates import draw_coordinates

        path = write(result, Path(output or f"{settings.run.dir}/coord-check"))
        picture = draw_coordinates(result, path.with_suffix(".png"))
        print(json.dumps(result, indent=1) if as_json else "\n".join([*lines(result), f"{path}", f"{picture}"]))
    return 0 if result["passed"] else 1


def _factors(words: str, option: str = "--widths") -> list[int]:
    """`1,2,4` as numbers."""
    try:
        return [int(word) for word in words.split(",") if word]
    except ValueError:
        raise UserError(f"{option}: {words}: expected whole factors, for example 1,2,4,8") from None


@app.command(
    epilog="Example: mup-megatron stability configs/demo.yaml --over lr --across width --sizes 1,2,4 --seeds 3"
)
def stability(
    config: ConfigPath,
    overrides: Overrides = None,
    over: Annotated[
        str, typer.Option(metavar="NAME,...", help="Hyperparameters to vary, each by itself; lr_schedule is one.")
    ] = "lr",
    across: Annotated[str, typer.Option(help="What grows: width, depth, batch, sequence or tokens.")] = "width",
    values: Annotated[
        str, typer.Option(metavar="V,V,...", help="To try; powers of two about the config's own unless given.")
    ] = "",
    sizes: Annotated[
        str, typer.Option(metavar="1,2,4,...", help="Factors of the base (width, depth), else of the config's own.")
    ] = "",
    least: Annotated[
        int | None, typer.Option("--from", metavar="FACTOR", help="Smallest size that is judged; the smallest.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Repetitions.")] = 3,
    workers: Workers = None,
    beside: Annotated[bool, typer.Option(help="Also draw standard beside µP, µP beside standard.")] = True,
    output: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="For runs, picture and JSON; run.dir/stability unless given.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Train a grid of sizes and values: does the optimum stay where it is? Goes on where it was stopped.

    Any number of these commands may work on one folder, on any node that sees it: `srun mup-megatron stability ...`.
    """
    from mup_megatron import runtime

    settings = _config(config, overrides)
    runtime.prepare_process()
    from mup_megatron.proof import stability as proof
    from mup_megatron.report.stability import draw_stability

    asked = [
        proof.question(
            settings,
            over=name,
            across=across,
            values=values,
            factors=_factors(sizes, "--sizes"),
            seeds=seeds,
            least=least,
            beside=beside,
        )
        for name in dict.fromkeys(word.strip() for word in over.split(",") if word.strip())
    ]
    directory, found = Path(output or f"{settings.run.dir}/stability"), []

    def body(rank: Any, workers: int, say: Callable[[str], None]) -> None:
        for each in asked:
            result = proof.stability(settings, each, directory, rank, workers=workers, say=say)
            found.append(result)
            if rank.is_first:
                path = proof.write(result, directory)
                picture = draw_stability(result, path.with_suffix(".png"))
                if not as_json:
                    print("\n".join([*proof.lines(result), f"{path}", f"{picture}"]), flush=True)
        if as_json and rank.is_first:
            print(json.dumps(found, indent=1))

    return _grid(body, workers, as_json) or (0 if all(result["passed"] for result in found) else 1)


def _grid(body: Callable[[Any, int, Callable[[str], None]], None], workers: int | None, as_json: bool) -> int:
    """Runs `body(rank, workers, say)` on many runs of one process each; exit status."""
    from mup_megatron import runtime
    from mup_megatron.tuning import Stopped

    rank = runtime.read_rank()

    def say(line: str) -> None:
        print(line, file=sys.stderr if as_json else sys.stdout, flush=True)

    try:
        body(rank, 1 if rank.launched else workers or _gpus() or os.cpu_count() or 1, say)
    except Stopped:
        say("SIGTERM: the runs at hand are saved; the same command goes on with them")
        return 143
    return 0


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
    """Make and train the small model that is as unstable as this large one in the standard parametrization.

    The config is the large run; `base:` names the small model's sizes.
    """
    from mup_megatron import runtime

    settings = _config(config, overrides)
    numbers = _numbers(rates, "--rates")
    runtime.prepare_process()
    from mup_megatron.proof import reverse as proof
    from mup_megatron.report.reverse import draw_reverse

    directory = Path(output or f"{settings.run.dir}/reverse")

    def body(rank: Any, workers: int, say: Callable[[str], None]) -> None:
        result = proof.reverse(settings, numbers, seeds, directory, rank, beside=beside, workers=workers, say=say)
        if rank.is_first:
            paths = [*proof.write(result, directory), draw_reverse(result, directory / "reverse.png")]
            print(json.dumps(result) if as_json else "\n".join([*proof.lines(result), *map(str, paths)]))

    return _grid(body, workers, as_json)


@app.command(epilog="Example: mup-megatron report runs/demo")
def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Folders of runs (run.dir).")],
) -> None:
    """Write report.html into each run's folder: pictures, tables, config, record; opens from disk, needs no network."""
    from mup_megatron.report.page import write_page

    for run in runs:
        print(write_page(Path(run)))


@app.command(epilog='Example: mup-megatron generate runs/demo "def main(" --temperature 0.8 --top-p 0.95')
def generate(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="A checkpoint's folder, or a run's (then its latest).")
    ],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Text to go on from; '' begins a document.")],
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="128, or as many as the model has positions for, unless given.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0: the most likely token. Unless given, 1 beside another of these, else 0.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Draw among the k most likely tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw among the most likely tokens that make up p.")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**63 - 1, help="Of the draws; another one each time unless given.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Go on from a prompt with a checkpoint's model: the most likely tokens, or drawn ones. In one process."""
    from mup_megatron import runtime

    if runtime.read_rank().world_size > 1:
        raise UserError("generate runs in one process; expected no launcher before it")
    runtime.prepare_process()
    from mup_megatron import generate as generation

    draws = any(option is not None for option in (top_k, top_p, seed))
    given: dict[str, Any] = {"temperature": float(draws) if temperature is None else temperature}
    if seed is not None:
        given["seed"] = seed
    sampling = generation.Sampling(top_k=top_k, top_p=top_p, **given)
    _, model, tokenizer = generation.load_model(Path(checkpoint), runtime.device_of(runtime.Rank()))
    tokens = generation.generate(model, tokenizer, prompt, sampling=sampling, max_new_tokens=max_new_tokens)
    said = []
    if not as_json:
        print(prompt, end="", flush=True)
    for token in tokens:
        said.append(token)
        if not as_json:
            print(token.text, end="", flush=True)
    if not as_json:
        print()
        return
    ended = bool(said) and said[-1].id == tokenizer.eod
    result = {
        "prompt": prompt,
        "text": "".join(token.text for token in said),
        "tokens": [token.id for token in said],
        "ended": "end_of_document" if ended else "max_new_tokens",
        "sampling": asdict(sampling),
    }
    print(json.dumps(result, indent=1))


def _allowed(keys: list[str] | None) -> list[str]:
    return [word for key in keys or [] for word in ("--allow-change", key)]


def _on_ranks(
    arguments: list[str],
    config: str,
    overrides: list[str] | None,
    processes: int | None,
    body: Callable[[Any, Any], None],
) -> int:
    """Runs `body(config, rank)` here if a launcher started us, or one process is enough; else starts the ranks."""
    from mup_megatron import runtime
    from mup_megatron.layout import resolve_layout, smallest_world

    settings = _config(config, overrides)
    rank = runtime.read_rank()
    if not rank.launched:
        ranks = processes or _gpus() or smallest_world(settings)
        if settings.tuning.run != "only":
            resolve_layout(settings, ranks)
        if ranks > 1:
            from mup_megatron.launch import start_ranks

            return start_ranks(arguments, ranks)
    return _ended(settings, rank, body)


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _ended(settings: Any, rank: Any, body: Callable[[Any, Any], None], shows: Callable[[], bool] | None = None) -> int:
    """Runs `body`; how it ended as an exit status, and, on the first rank or where `shows`, what there is to see."""
    from mup_megatron import runtime

    runtime.quiet_upstream()  # the next import brings megatron-core
    from mup_megatron import train as training
    from mup_megatron.run_directory import full_disk
    from mup_megatron.tuning import Stopped

    directory = Path(settings.run.dir)
    status = 0
    try:
        with full_disk(directory):
            body(settings, rank)
    except Stopped:
        status = 143
        if rank.is_first:
            print("SIGTERM: the trials at hand are saved; the same command goes on with the study", flush=True)
    except training.Terminated as message:
        status = 143
        if rank.is_first:
            print(message, flush=True)
    except training.Diverged as message:
        status = 1
        if rank.is_first:
            print(f"mup-megatron: {message}; the last checkpoint is untouched", file=sys.stderr, flush=True)
    if shows() if shows else rank.is_first:
        from mup_megatron.report.summary import summarize

        with full_disk(directory):
            summarize(directory, _console())
    return status


def _console() -> Any:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 140)


@app.command(
    "run",
    context_settings={
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
        "help_option_names": ["-h", "--help"],
    },
    epilog="Example: mup-megatron run pretrain_gpt.py --mup-base base.yaml --num-layers 24 --hidden-size 2048 ...",
)
def run_script(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[--config mup.yaml] SCRIPT ARGS...", help="A script written against megatron.training."
        ),
    ] = None,
) -> None:
    """Run an unmodified Megatron-LM script in µP; `torchrun ... -m mup_megatron.run` does the same on many ranks."""
    from mup_megatron.megatron_training.script import run_script as run_it

    run_it(arguments or [])


@app.command(epilog="Example: mup-megatron patch apply ~/Megatron-LM")
def patch(
    action: Annotated[str, typer.Argument(metavar="apply|check|revert", help="What to do.")],
    tree: Annotated[
        str, typer.Argument(metavar="TREE", help="A Megatron-LM checkout: the folder that holds megatron/.")
    ],
) -> None:
    """Put the few lines that call this library into a Megatron-LM tree, or take them out; all of them or nothing."""
    from mup_megatron.patches import trees

    path = Path(tree)
    if action == "check":
        release, state = trees.check_tree(path)
        print(f"{tree}: {release}: {state}")
    elif action == "apply":
        print(f"{tree}: {'applied' if trees.apply_tree(path) else 'applied already'}")
    elif action == "revert":
        print(f"{tree}: {'reverted' if trees.revert_tree(path) else 'not applied, so nothing to revert'}")
    else:
        raise UserError(f"{action}: expected apply, check or revert")


@app.command(epilog="Example: mup-megatron slurm pipeline configs/demo.yaml --dry-run")
def slurm(
    stage: Annotated[Literal["pipeline", "tune", "pretrain"], typer.Argument(help="What to submit.")],
    config: ConfigPath,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the sbatch commands and the scripts.")] = False,
) -> int:
    """Submit the run to SLURM; what launch/slurm/*.sbatch start, and inside a job of theirs run."""
    from mup_megatron.slurm import job, submit

    settings, arguments = _config(config, overrides), [config, *(overrides or [])]
    if job.is_ours(stage):
        return job.run_job(stage, settings, arguments)
    submit.submit(settings, submit.jobs(stage, settings, arguments, os.environ), dry_run=dry_run)
    return 0


@app.command(epilog="Example: mup-megatron doctor --json")
def doctor(as_json: AsJson = False) -> None:
    """Show what is installed, which patches are active, what is missing and what that costs."""
    from mup_megatron.doctor import examine, print_examination

    examination = examine()
    if as_json:
        print(json.dumps(examination, indent=1))
        return
    from rich.console import Console

    print_examination(examination, Console(width=None if sys.stdout.isatty() else 160))


def launched(command: str, arguments: list[str]) -> NoReturn:
    """What launch/*.sh run: a command, on configs/demo.yaml unless a config is named.

    Args:
        command: pipeline or tune.
        arguments: [CONFIG] [KEY.PATH=VALUE]..., and whatever `--local_rank` a launcher adds.
    """
    arguments = [argument for argument in arguments if not argument.startswith(("--local_rank", "--local-rank"))]
    if not arguments or arguments[0].startswith("-") or "=" in arguments[0]:
        arguments = [str(demo_config()), *arguments]
    sys.exit(run([command, *arguments]))


def demo_config() -> Path:
    """configs/demo.yaml of this checkout.

    Raises:
        UserError: the package is installed without its checkout.
    """
    path = Path(__file__).resolve().parent.parent / "configs" / "demo.yaml"
    if not path.is_file():
        raise UserError("no config was named, and configs/demo.yaml is not beside this installation; name a config")
    return Path(os.path.relpath(path))
