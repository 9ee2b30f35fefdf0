"""`mup-megatron evaluate CHECKPOINT`: perplexity of corpora, last words, multiple choice and cloze, from local files.

Public names: `evaluate`, `evaluate_translations`, `Task`, `KINDS`. tasks.py reads files, requests.py makes tokens of
them, likelihood.py asks the model, scores.py makes figures of its answers, table.py shows them; translation.py has what
an encoder-decoder is asked.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mup_megatron.config import Config, Model, derive
from mup_megatron.convert.saved_model import load_saved
from mup_megatron.convert.saved_run import SavedRun, check_same_tokenizer, open_run
from mup_megatron.data.pairs import pair_files
from mup_megatron.evaluate import scores
from mup_megatron.evaluate.requests import Request, requests_of
from mup_megatron.evaluate.tasks import KINDS, Example, read_examples
from mup_megatron.parallel import runtime
from mup_megatron.parallel.layout import Layout, resolve_layout
from mup_megatron.parallel.ranks import Rank
from mup_megatron.util.errors import UserError
from mup_megatron.util.files import read_bytes

if TYPE_CHECKING:
    from mup_megatron.evaluate.scores import Answer, Metrics

__all__ = ["KINDS", "Task", "evaluate", "evaluate_translations"]

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Task:
    """One file, and what is asked of it.

    Args:
        kind: of KINDS.
        path: of the file.
    """

    kind: str
    path: Path


def evaluate(
    checkpoint: Path,
    tasks: Sequence[Task],
    rank: Rank,
    overrides: Mapping[str, Any] | None = None,
    *,
    batch_size: int = 8,
    window: int | None = None,
    tokenizer: str | None = None,
    say: Callable[[str], None] = lambda _line: None,
) -> dict[str, Any]:
    """Scores task files by a checkpoint's model. Collective; starts the process groups.

    Call `upstream.prepare_process` before; `runtime.stop_distributed` ends the groups.

    Args:
        checkpoint: as for `open_run`.
        tasks: what is asked.
        rank: this process.
        overrides: of `parallel:` and of the model's kernels, by dotted key: the layout of this evaluation. Several
            ranks take the run's own without them.
        batch_size: sequences that a rank computes at once.
        window: tokens of a document that are fed at once; the run's sequence length unless given.
        tokenizer: `LIBRARY:PATH`, where the checkpoint does not tell it; never another one than the checkpoint's.
        say: takes lines of progress.

    Returns:
        What `--json` shows: checkpoint, step, layout, and per task its figures.

    Raises:
        UserError: bad input; names the file and the line.
    """
    run = open_run(checkpoint, tokenizer)
    run.config.needs_gpt("evaluate")
    check_same_tokenizer(run)
    run = replace(run, config=_config(run, rank.world_size, dict(overrides or {}), batch_size))
    layout = resolve_layout(run.config, rank.world_size)
    window, positions = _lengths(run.config, window)
    examples = [read_examples(task.kind, task.path) for task in tasks]
    asked = [
        [
            requests_of(task.kind, example, run.tokenizer, window=window, positions=positions, where=str(task.path))
            for example in found
        ]
        for task, found in zip(tasks, examples, strict=True)
    ]
    device = runtime.start_distributed(layout, rank, run.config.run.seed)
    from mup_megatron.evaluate.likelihood import Scorer  # which imports megatron-core's parallel_state

    chunks = load_saved(run, layout, rank.rank, device)
    vocabulary, eod = int(run.tokenizer.vocab_size), int(run.tokenizer.eod)
    scorer = Scorer(
        chunks, layout, rank.rank, batch_size=batch_size, vocabulary=vocabulary, pad=eod, positions=positions, say=say
    )
    results = [
        {
            "task": task.kind,
            "file": str(task.path),
            "sha256": hashlib.sha256(read_bytes(task.path, None)).hexdigest(),
            "examples": len(found),
            "metrics": _metrics(task.kind, found, _answers(scorer, requests)),
        }
        for task, found, requests in zip(tasks, examples, asked, strict=True)
    ]
    return {**_about(run, layout), "window": window, "results": results}


def evaluate_translations(
    checkpoint: Path,
    files: Sequence[str],
    rank: Rank,
    overrides: Mapping[str, Any] | None = None,
    *,
    beams: int = 1,
    length_penalty: float = 1.0,
    max_length: int | None = None,
    batch_size: int = 8,
    tokenizer: str | None = None,
    say: Callable[[str], None] = lambda _line: None,
) -> dict[str, Any]:
    """Scores an encoder-decoder on pairs: loss of the references, BLEU of its translations. Collective.

    Starts the process groups; call `upstream.prepare_process` before, `runtime.stop_distributed` ends them.

    Args:
        checkpoint: as for `open_run`.
        files: each JSON lines, with the keys that the run's own pairs have, or two text files, `SOURCE:TARGET`.
        rank: this process.
        overrides: as for `evaluate`.
        beams: of the search; one is greedy decoding.
        length_penalty: power of the length that a translation's log-probability is divided by.
        max_length: tokens of a translation with its end; the run's decoder length unless given.
        batch_size: sentences that a rank computes at once.
        tokenizer: as for `evaluate`.
        say: takes lines of progress.

    Returns:
        What `--json` shows: checkpoint, step, layout, how was searched, and per file figures and translations.

    Raises:
        UserError: bad input; names the file and the line.
    """
    from mup_megatron.evaluate.translation import scoring
    from mup_megatron.evaluate.translation.bleu import check_installed
    from mup_megatron.evaluate.translation.search import Search

    run = open_run(checkpoint, tokenizer)
    if run.config.model.family != "t5":
        raise UserError(
            f"--translation: needs an encoder-decoder, and {run.path} is {run.config.model.architecture}; expected "
            "--perplexity, --last-word, --choice or --cloze"
        )
    check_installed()
    check_same_tokenizer(run)
    keys = {**(overrides or {}), "parallel.sequence_parallel": False}  # a token at a time has no sequence to split
    run = replace(run, config=_config(run, rank.world_size, keys, batch_size))
    layout = resolve_layout(run.config, rank.world_size)
    length, positions = _lengths(run.config, max_length or run.config.training.decoder_length, "--max-length")
    settings = Search(beams=beams, length_penalty=length_penalty, max_length=length)
    named = [scoring.pairs_named(run.config, file) for file in files]
    asked = [scoring.read_tokens(each, run.tokenizer, positions) for each in named]
    device = runtime.start_distributed(layout, rank, run.config.run.seed)
    (model,) = load_saved(run, layout, rank.rank, device)
    results = []
    for file, pairs, (found, tokens) in zip(files, named, asked, strict=True):
        given: dict[str, Any] = {"tokenizer": run.tokenizer, "settings": settings, "layout": layout, "say": say}
        figures, signature, translations = scoring.evaluate_pairs(
            model, found, tokens, rank=rank.rank, batch_size=batch_size, **given
        )
        hashes = [hashlib.sha256(read_bytes(path, None)).hexdigest() for path in pair_files(pairs)]
        about = {"task": "translation", "file": file, "sha256": ":".join(hashes), "examples": len(found)}
        results.append({**about, "metrics": figures, "signature": signature, "translations": translations})
    return {**_about(run, layout), "search": asdict(settings), "results": results}


def _config(run: SavedRun, ranks: int, overrides: dict[str, Any], batch_size: int) -> Config:
    """The run's config in the layout that is asked for, with a batch that any layout can share."""
    allowed = [f"model.{key}" for key in Model.PLAIN_KERNELS]
    for key in overrides:
        if not key.startswith("parallel.") and key not in allowed:
            raise UserError(
                f"{key}: an evaluation takes the checkpoint's; expected a key of parallel:, or " + ", ".join(allowed)
            )
    own = run.manifest.config.get("parallel", {}) if ranks > 1 and run.manifest.key_prefix is None else {}
    batch = {"training.micro_batch_size": batch_size, "training.global_batch_size": batch_size * ranks}
    parallel = {"parallel": {**run.config.parallel.model_dump(), **own}}
    return derive(run.config, {**parallel, **batch, **overrides})


def _lengths(config: Config, window: int | None, option: str = "--window") -> tuple[int, int | None]:
    """Tokens of a window, and positions where the model learned them."""
    learned = config.model.position_embedding_type == "learned_absolute"
    positions = config.max_position_embeddings if learned else None
    window = window or config.training.seq_length
    if positions is not None and window > positions:
        raise UserError(
            f"{option}: {window} tokens, but the model learned {positions} positions (model.max_position_embeddings); "
            f"expected at most {positions}"
        )
    return window, positions


def _answers(scorer: Any, requests: Sequence[Sequence[Request]]) -> list[list[Answer]]:
    """Answers by example, all asked together."""
    flat = iter(scorer([request for of_example in requests for request in of_example]))
    return [[next(flat) for _ in of_example] for of_example in requests]


def _metrics(kind: str, examples: Sequence[Example], answers: Sequence[Sequence[Answer]]) -> Metrics:
    if kind == "perplexity":
        texts = [example.pairs[0][1] for example in examples]
        return scores.perplexity(
            math.fsum(answer.log_likelihood for of_text in answers for answer in of_text),
            sum(answer.tokens for of_text in answers for answer in of_text),
            sum(len(text.split()) for text in texts),
            sum(len(text.encode()) for text in texts),
        )
    if kind == "last_word":
        return scores.last_word([answer for (answer,) in answers])
    return scores.choices(
        [(found, example.answers, example.label) for example, found in zip(examples, answers, strict=True)]
    )


def _about(run: SavedRun, layout: Layout) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "checkpoint": str(run.path),
        "step": run.manifest.step,
        "precision": run.config.training.precision,
        "layout": str(layout),
    }
