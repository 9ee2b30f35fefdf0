"""`mup-megatron evaluate CHECKPOINT`: perplexity of corpora, last words, multiple choice and cloze, from local files.

Public names: `evaluate`, `evaluate_translations`, `Evaluation`, `Task`, `KINDS`. replica.py has the model, tasks.py
reads files, requests.py makes tokens of them, likelihood.py asks the model, scores.py makes figures of its answers,
table.py shows them; translation/ has what an encoder-decoder is asked.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mup_megatron.config import Config
from mup_megatron.convert.saved_run import SavedRun, open_run
from mup_megatron.data.pairs import pair_files
from mup_megatron.evaluate import scores
from mup_megatron.evaluate.replica import Evaluation
from mup_megatron.evaluate.requests import Request, requests_of
from mup_megatron.evaluate.tasks import KINDS, Example, read_examples
from mup_megatron.parallel.layout import Layout
from mup_megatron.util.errors import UserError
from mup_megatron.util.files import read_bytes

if TYPE_CHECKING:
    from mup_megatron.evaluate.scores import Answer, Metrics

__all__ = ["KINDS", "Evaluation", "Task", "evaluate", "evaluate_translations"]

FORMAT = 1
_SHORTEST = 3
PSEUDO = "pseudo-log-likelihood: each token is masked alone, and all others are seen"
"""What a model that predicts masked tokens is scored by."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One file, and what is asked of it.

    Args:
        kind: of KINDS.
        path: of the file.
    """

    kind: str
    path: Path


def evaluate(asked: Evaluation, tasks: Sequence[Task], window: int | None = None) -> dict[str, Any]:
    """Scores task files by a checkpoint's model. Collective; starts the process groups.

    Call `upstream.prepare_process` before; `runtime.stop_distributed` ends the groups.

    Args:
        asked: which checkpoint, and where.
        tasks: what is asked.
        window: tokens of a document that are fed at once; the run's sequence length unless given.

    Returns:
        What `--json` shows: checkpoint, step, layout, and per task its figures.

    Raises:
        UserError: bad input; names the file and the line.
    """
    run = open_run(asked.checkpoint, asked.tokenizer)
    masked = _predicts_masks(run, tasks)
    run, layout = asked.laid_out(run)
    window, positions = _lengths(run.config, window)
    if masked and window < _SHORTEST:
        raise UserError(f"--window: {window} has no room for a token between two ends; expected {_SHORTEST} or more")
    lengths: dict[str, Any] = {"window": window, "positions": positions}
    examples = [read_examples(task.kind, task.path) for task in tasks]
    requests = [
        [
            requests_of(task.kind, example, run.tokenizer, where=str(task.path), masked=masked, **lengths)
            for example in found
        ]
        for task, found in zip(tasks, examples, strict=True)
    ]
    replica = asked.load(run, layout, positions)
    from mup_megatron.evaluate.likelihood import MaskedScorer, Scorer  # which import megatron-core's parallel_state

    scorer = (MaskedScorer if masked else Scorer)(replica)
    results = [
        {
            "task": task.kind,
            "file": str(task.path),
            "sha256": _sha256(task.path),
            "examples": len(found),
            "metrics": _metrics(task.kind, found, _answers(scorer, of_task)),
        }
        for task, found, of_task in zip(tasks, examples, requests, strict=True)
    ]
    about = {**_about(run, layout), **({"likelihood": PSEUDO} if masked else {})}
    return {**about, "window": window, "results": results}


def _predicts_masks(run: SavedRun, tasks: Sequence[Task]) -> bool:
    """Whether the model predicts masked tokens. Raises UserError where it cannot be asked what the tasks ask."""
    config = run.config
    if config.model.family == "t5":
        raise config.error(
            "model.architecture", f"evaluate asks {config.model.architecture} for a translation; expected --translation"
        )
    masked = config.model.family == "bert"
    if masked and any(task.kind == "last_word" for task in tasks):
        raise config.error(
            "model.architecture",
            f"--last-word asks for what comes next, and {config.model.architecture} predicts masked tokens; expected "
            "--perplexity, --choice or --cloze",
        )
    return masked


def evaluate_translations(
    asked: Evaluation,
    files: Sequence[str],
    *,
    beams: int = 1,
    length_penalty: float = 1.0,
    max_length: int | None = None,
) -> dict[str, Any]:
    """Scores an encoder-decoder on pairs: loss of the references, BLEU of its translations. Collective.

    Starts the process groups; call `upstream.prepare_process` before, `runtime.stop_distributed` ends them.

    Args:
        asked: which checkpoint, and where.
        files: each JSON lines, with the keys that the run's own pairs have, or two text files, `SOURCE:TARGET`.
        beams: of the search; one is greedy decoding.
        length_penalty: power of the length that a translation's log-probability is divided by.
        max_length: tokens of a translation with its end; the run's decoder length unless given.

    Returns:
        What `--json` shows: checkpoint, step, layout, how was searched, and per file figures and translations.

    Raises:
        UserError: bad input; names the file and the line.
    """
    from mup_megatron.evaluate.translation import scoring
    from mup_megatron.evaluate.translation.bleu import check_installed
    from mup_megatron.evaluate.translation.search import Search

    run = open_run(asked.checkpoint, asked.tokenizer)
    if run.config.model.family != "t5":
        raise UserError(
            f"--translation: needs an encoder-decoder, and {run.path} is {run.config.model.architecture}; expected "
            "--perplexity, --last-word, --choice or --cloze"
        )
    check_installed()
    # A token at a time has no sequence to split.
    run, layout = asked.laid_out(run, {"parallel.sequence_parallel": False})
    length, positions = _lengths(run.config, max_length or run.config.training.decoder_length, "--max-length")
    settings = Search(beams=beams, length_penalty=length_penalty, max_length=length)
    named = [scoring.pairs_named(run.config, file) for file in files]
    tokens = [scoring.read_tokens(each, run.tokenizer, positions) for each in named]
    replica = asked.load(run, layout, positions)
    results = []
    for file, pairs, (found, of_pairs) in zip(files, named, tokens, strict=True):
        figures, signature, translations = scoring.evaluate_pairs(replica, found, of_pairs, settings)
        hashes = ":".join(_sha256(path) for path in pair_files(pairs))
        about = {"task": "translation", "file": file, "sha256": hashes, "examples": len(found)}
        results.append({**about, "metrics": figures, "signature": signature, "translations": translations})
    return {**_about(run, layout), "search": asdict(settings), "results": results}


def _sha256(path: Path) -> str:
    return hashlib.sha256(read_bytes(path, None)).hexdigest()


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
