"""`mup-megatron`: the command line. Commands are thin; what they do lives in the module of the same name."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NoReturn

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
    from mup_megatron.launch import end_with_launcher

    end_with_launcher()
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Runs a command line; returns its exit status."""
    from mup_megatron.runtime import read_rank

    # Ranks whose first one left say so themselves; torch's own account of it is a page long.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        result = app(arguments, standalone_mode=False)
        return int(result or 0)
    except UserError as error:
        _say_error(str(error), read_rank())
        return 2
    except typer.TyperException as error:  # unknown command or option
        _say_error(error.format_message(), read_rank())
        return 2
    except KeyboardInterrupt:
        return 130


def _say_error(message: str, rank: Any) -> None:
    """On rank 0; elsewhere only once ranks have met, for before that all say the same."""
    torch = sys.modules.get("torch")
    met = torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()
    if rank.is_first or met:
        where = f" (rank {rank.rank})" if rank.world_size > 1 and met else ""
        print(f"mup-megatron: error{where}: {message}", file=sys.stderr, flush=True)


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
def tune(config: ConfigPath, overrides: Overrides = None, nproc_per_node: Processes = None) -> int:
    """Tune the proxy and write the transfer record; every process is a worker on one shared study."""
    overrides = [*(overrides or []), "tuning.run=only"]
    return pipeline(config, overrides, nproc_per_node, None, False)


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
    config: ConfigPath, overrides: Overrides = None, world_size: WorldSize = None, as_json: AsJson = False
) -> None:
    """Show what tuning and pretraining will cost: trials, tokens, FLOPs, share, time. Trains nothing."""
    from mup_megatron import runtime
    from mup_megatron.layout import resolve_layout, smallest_world

    settings = _config(config, overrides)
    runtime.prepare_process()
    settings = runtime.resolve_auto(settings)
    ranks = world_size or smallest_world(settings)
    resolve_layout(settings, ranks)
    from mup_megatron.data.prepare import known_vocab_size
    from mup_megatron.tuning import budget

    planned = budget.plan(settings, known_vocab_size(settings), ranks, measure=True)
    if as_json:
        print(json.dumps(planned.as_json(), indent=1))
        return
    print("\n".join(budget.lines(settings, planned)))
    budget.check_share(settings, planned)


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
    try:
        _, model, tokenizer = generation.load_model(Path(checkpoint), runtime.device_of(runtime.Rank()))
        tokens = generation.generate(model, tokenizer, prompt, sampling=sampling, max_new_tokens=max_new_tokens)
        said = []
        if not as_json:
            print(prompt, end="", flush=True)
        for token in tokens:
            said.append(token)
            if not as_json:
                print(token.text, end="", flush=True)
    finally:
        torch = sys.modules["torch"]
        if torch.distributed.is_initialized():
            runtime.stop_distributed()
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


def _ended(settings: Any, rank: Any, body: Callable[[Any, Any], None]) -> int:
    """Runs `body`; how it ended as an exit status, and what the run has to show for it."""
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
    if rank.is_first:
        from mup_megatron.report.summary import summarize

        with full_disk(directory):
            summarize(directory, _console())
    return status


def _console() -> Any:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 140)


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
