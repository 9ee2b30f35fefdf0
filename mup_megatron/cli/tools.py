"""Commands about what is there.

They are report, watch, diagnose, generate, evaluate, run, patch and slurm.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mup_megatron.cli.common import (
    AsJson,
    Checkpoint,
    ConfigPath,
    Overrides,
    TokenizerOf,
    app,
    aside,
    console,
    launched_rank,
    one_process,
    read_config,
    show,
    start_typed,
)
from mup_megatron.util.errors import UserError, shown

if TYPE_CHECKING:
    from mup_megatron.convert.saved_run import SavedRun


@app.command(epilog="Example: mup-megatron report runs/demo")
def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Folders of runs (run.dir).")],
    compare: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write one page that compares the runs' targets instead.")
    ] = None,
) -> None:
    """Write report.html into each run's folder: pictures, tables, config, record; opens from disk, needs no network."""
    if compare is not None:
        from mup_megatron.report.comparison import write_comparison

        print(write_comparison([Path(run) for run in runs], Path(compare)))
        return
    from mup_megatron.report.page import write_page

    for run in runs:
        print(write_page(Path(run)))


@app.command(epilog="Example: mup-megatron watch runs/demo")
def watch(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Folder of a run (run.dir, or --save of a Megatron run).")],
    html: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write a page instead, which loads itself again.")
    ] = None,
    every: Annotated[float, typer.Option(min=0.5, help="Seconds between two looks at the run's files.")] = 5.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, and leave.")] = False,
) -> None:
    """Follow a run: loss, the series nearest to the bounds of their band, alarms, speed, time left. Ctrl-C leaves."""
    import shutil
    import sys
    import time

    from mup_megatron.report.document import write_document
    from mup_megatron.report.live import Watched, lines_of, page_of

    watched = Watched(Path(run))
    follows = not once and (html is not None or sys.stdout.isatty())
    while True:
        live = watched.now()
        if html is not None:
            write_document(Path(html), page_of(live, every))
        else:
            text = "\n".join(lines_of(live, shutil.get_terminal_size().columns))
            print(f"\x1b[H\x1b[2J{text}" if follows else text, flush=True)
        if not follows:
            return
        try:
            time.sleep(every)
        except KeyboardInterrupt:
            return


@app.command(epilog="Example: mup-megatron diagnose runs/demo")
def diagnose(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Folder of a run (run.dir).")],
    proxy: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Folder of the proxy's run; the chosen trial unless given."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say why a transfer may have failed, by the run's files: the strongest suspect first, and what would decide it."""
    from mup_megatron.report.diagnosis import lines_of, suspects

    found = suspects(Path(run), None if proxy is None else Path(proxy))
    show([asdict(suspect) for suspect in found], as_json, lines_of(found))


@app.command(epilog='Example: mup-megatron generate runs/demo "def main(" --temperature 0.8 --top-p 0.95')
def generate(
    checkpoint: Checkpoint,
    prompt: Annotated[
        str,
        typer.Argument(
            metavar="PROMPT",
            help="Text to go on from; '' begins a document. Of T5 the source; of BERT a text with [MASK] in it.",
        ),
    ],
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="128, or as many as the model has positions for, unless given.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0: the most likely token. Unless given, 1 beside another of these, else 0.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Draw among the k most likely tokens; of BERT how many are named, 5.")
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw among the most likely tokens that make up p.")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**63 - 1, help="Of the draws; another one each time unless given.")
    ] = None,
    tokenizer: TokenizerOf = None,
    as_json: AsJson = False,
) -> None:
    """Text of a checkpoint's model: go on from a prompt, write a source's target, or fill masks. In one process."""
    one_process("generate")
    from mup_megatron.convert.saved_run import open_run
    from mup_megatron.evaluate import generate as generation
    from mup_megatron.parallel.ranks import Rank, device_of

    run = open_run(Path(checkpoint), tokenizer)
    if run.config.model.family == "bert":
        others = {
            "--max-new-tokens": max_new_tokens,
            "--temperature": temperature,
            "--top-p": top_p,
            "--seed": seed,
        }
        _fill_masks(run, prompt, top_k, others, as_json)
        return
    draws = any(option is not None for option in (top_k, top_p, seed))
    given: dict[str, Any] = {"temperature": float(draws) if temperature is None else temperature}
    if seed is not None:
        given["seed"] = seed
    sampling = generation.Sampling(top_k=top_k, top_p=top_p, **given)
    model = generation.load_model(run, device_of(Rank()))
    tokens = generation.generate(model, run.tokenizer, prompt, sampling=sampling, max_new_tokens=max_new_tokens)
    if not as_json:
        if run.config.model.family == "gpt":
            print(prompt, end="", flush=True)
        for token in tokens:
            print(token.text, end="", flush=True)
        print()
        return
    said = list(tokens)
    ended = bool(said) and said[-1].id == run.tokenizer.eod
    result = {
        "prompt": prompt,
        "text": "".join(token.text for token in said),
        "tokens": [token.id for token in said],
        "ended": "end_of_document" if ended else "max_new_tokens",
        "sampling": asdict(sampling),
    }
    show(result, as_json, [])


def _fill_masks(run: SavedRun, prompt: str, top_k: int | None, others: Mapping[str, Any], as_json: bool) -> None:
    """What `generate` does with a model that predicts masked tokens."""
    from mup_megatron.evaluate import masks
    from mup_megatron.evaluate.generate import load_model
    from mup_megatron.parallel.ranks import Rank, device_of

    for option, value in others.items():
        if value is not None:
            raise UserError(f"{option}: {run.config.model.architecture} draws no tokens, it fills masks; remove it")
    masks.masked_tokens(run.tokenizer, prompt, "PROMPT")  # before weights are read
    model = load_model(run, device_of(Rank()))
    found = masks.fill(model, run.tokenizer, prompt, candidates=top_k or masks.CANDIDATES)
    lines = [found.text]
    for number, candidates in enumerate(found.masks, start=1):
        named = ", ".join(f"{shown(each.text)} {each.probability:.1%}" for each in candidates)
        lines.append(f"mask {number}: {named}")
    show({"prompt": prompt, **asdict(found)}, as_json, lines)


Perplexity = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FILE",
        help='{"text": ...}, or a .txt or .md, which is one document: exp of the mean negative log-likelihood per '
        "token of the tokenizer, per word (between white space) and per byte (of UTF-8).",
    ),
]
LastWord = Annotated[
    list[str] | None,
    typer.Option(metavar="FILE", help='{"text": ...}: is the last word the most likely one? LAMBADA\'s form.'),
]
Choice = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FILE",
        help='{"context": ..., "endings": [...], "label": 0}: the likeliest ending, as it is, per character of it, '
        "per token of it. HellaSwag's form.",
    ),
]
Cloze = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FILE",
        help='{"text": "a ___ in it", "options": [...], "label": 0}: the option with which the text is likeliest.',
    ),
]
Translation = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FILE",
        help="Pairs for an encoder-decoder, JSON lines with the run's keys, or two text files, SOURCE:TARGET: loss "
        "of the targets, and BLEU by sacrebleu.",
    ),
]


@app.command(
    epilog="A FILE holds JSON lines, an example each, but for a .txt or .md of --perplexity; every option of files can "
    "be repeated (docs/evaluate.md). "
    "Example: mup-megatron evaluate runs/demo --perplexity corpus.jsonl --choice hellaswag.jsonl --output figures.json"
)
def evaluate(
    checkpoint: Checkpoint,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY.PATH=VALUE]...", help="Of parallel:, the layout here; the run's own unless given."
        ),
    ] = None,
    perplexity: Perplexity = None,
    last_word: LastWord = None,
    choice: Choice = None,
    cloze: Cloze = None,
    translation: Translation = None,
    beams: Annotated[int, typer.Option(min=1, help="Of the search for a translation; one is greedy.")] = 1,
    length_penalty: Annotated[
        float, typer.Option(min=0, help="Power of the length that a translation's log-probability is divided by.")
    ] = 1.0,
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a translation; the run's decoder length unless given.")
    ] = None,
    window: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a document at once; the run's sequence length unless given.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences that a process computes at once.")] = 8,
    nproc_per_node: Annotated[
        int | None, typer.Option(min=1, help="Processes to start where no launcher did; one unless given.")
    ] = None,
    tokenizer: TokenizerOf = None,
    output: Annotated[
        str | None, typer.Option(metavar="FILE", help="Also write the figures as JSON; not there yet.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Score a checkpoint: perplexity, last words, multiple choice, cloze, translation, each from local files."""
    from mup_megatron.config import parse_overrides
    from mup_megatron.parallel import upstream
    from mup_megatron.util.files import write_output

    rank = launched_rank(nproc_per_node)
    asked = {"perplexity": perplexity, "last_word": last_word, "choice": choice, "cloze": cloze}
    if not any(asked.values()) and not translation:
        raise UserError("no task; expected --perplexity, --last-word, --choice, --cloze or --translation with a FILE")
    if any(asked.values()) and translation:
        raise UserError("--translation: is of an encoder-decoder alone; expected no other task beside it")
    if translation and window:
        raise UserError("--window: is of the tasks of a decoder; expected none beside --translation")
    if output is not None and Path(output).exists():
        raise UserError(f"--output: {output} is there already; expected the name of a file that is not there yet")
    if not rank.launched and (nproc_per_node or 1) > 1:
        return start_typed(nproc_per_node or 1)
    upstream.prepare_process()
    from mup_megatron.evaluate.evaluation import Evaluation, Task, evaluate_translations
    from mup_megatron.evaluate.evaluation import evaluate as score
    from mup_megatron.evaluate.table import print_results

    tasks = [Task(kind=kind, path=Path(file)) for kind, files in asked.items() for file in files or ()]
    where = Evaluation(
        checkpoint=Path(checkpoint),
        rank=rank,
        overrides=parse_overrides(overrides or []),
        batch_size=batch_size,
        tokenizer=tokenizer,
        say=aside if rank.is_first else lambda line: None,
    )
    if translation:
        search: dict[str, Any] = {"beams": beams, "length_penalty": length_penalty, "max_length": max_length}
        found = evaluate_translations(where, translation, **search)
    else:
        found = score(where, tasks, window)
    if rank.is_first and output is not None:
        write_output(Path(output), json.dumps(found, indent=1) + "\n", "--output")
    if rank.is_first and as_json:
        show(found, as_json, [])
    elif rank.is_first:
        print_results(found, console())
    return 0


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

    settings, arguments = read_config(config, overrides), [config, *(overrides or [])]
    if job.is_ours(stage):
        return job.run_job(stage, settings, arguments)
    submit.submit(settings, submit.jobs(stage, settings, arguments, os.environ), dry_run=dry_run)
    return 0
