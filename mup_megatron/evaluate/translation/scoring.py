"""`mup-megatron evaluate --translation`: how likely references are, and BLEU of translations.

Public names: `evaluate_pairs`, `pairs_named`. The loss of a reference counts its tokens and its end, among the
tokenizer's entries, as evaluation of text does (likelihood.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mup_megatron.config import Config
from mup_megatron.config.study import Pairs
from mup_megatron.data.corpus import pairs_of
from mup_megatron.data.pairs import Pair, read_pairs
from mup_megatron.data.t5 import pair_masks
from mup_megatron.evaluate.replica import Replica, gathered
from mup_megatron.evaluate.requests import tokens_of
from mup_megatron.evaluate.scores import DIVERGED, Metrics, perplexity
from mup_megatron.evaluate.translation.bleu import bleu
from mup_megatron.evaluate.translation.decoder import padded, translate
from mup_megatron.evaluate.translation.search import Search
from mup_megatron.util.errors import UserError


def pairs_named(config: Config, given: str) -> Pairs:
    """What `--translation` names: a file of JSON lines with the run's keys, or two text files, SOURCE:TARGET."""
    if not Path(given).exists() and ":" in given:
        source, _, target = given.partition(":")
        if not source or not target:
            raise UserError(f"--translation: {given}; expected a file of pairs, or two text files, SOURCE:TARGET")
        return Pairs(source=source, target=target)
    own = pairs_of(config)
    return Pairs(jsonl=given, source_key=own.source_key, target_key=own.target_key)


def read_tokens(
    pairs: Pairs, tokenizer: Any, positions: int | None
) -> tuple[list[Pair], list[tuple[list[int], list[int]]]]:
    """Pairs of a file, and the tokens of both sides, each with its end.

    Raises:
        UserError: a side is empty, the tokenizer cannot read it, or it is longer than the model's positions.
    """
    found, tokens = list(read_pairs(pairs, "--translation")), []
    if not found:
        raise UserError(f"--translation: {pairs.jsonl or pairs.source} holds no pairs")
    for pair in found:
        sides = []
        for name, text, path in (("source", pair.source, pairs.source), ("target", pair.target, pairs.target)):
            place = f"{path or pairs.jsonl}, line {pair.line}"
            if not text.strip():
                raise UserError(f"{place}: the {name} is empty; expected a text and its translation")
            side = [*tokens_of(tokenizer, text, place), int(tokenizer.eod)]
            if positions is not None and len(side) > positions:
                raise UserError(
                    f"{place}: the {name} has {len(side)} tokens with its end, but the model learned {positions} "
                    "positions (model.max_position_embeddings); expected a shorter text"
                )
            sides.append(side)
        tokens.append((sides[0], sides[1]))
    return found, tokens


def evaluate_pairs(
    replica: Replica, pairs: Sequence[Pair], tokens: Sequence[tuple[list[int], list[int]]], settings: Search
) -> tuple[Metrics, str, list[str]]:
    """Figures of a file, BLEU's signature, and the translations. Collective.

    Args:
        replica: this rank's part of the model.
        pairs: text of source and target, from `read_tokens`.
        tokens: of the same pairs, from `read_tokens`.
        settings: how to search.
    """
    layout, tokenizer = replica.layout, replica.tokenizer
    own = range(layout.data_rank(replica.asked.rank.rank), len(pairs), layout.data)
    share = [tokens[number] for number in own]

    def say(count: int) -> None:
        replica.asked.say(f"{count * layout.data:,} of {len(pairs):,} sentences translated")

    likelihoods, sources = _likelihoods(replica, share), [source for source, _ in share]
    translated = translate(replica.chunks[0], sources, tokenizer, settings, replica.asked.batch_size, say)
    texts = [str(tokenizer.detokenize(sequence)) for sequence in translated]
    found = gathered(dict(zip(own, zip(likelihoods, texts, strict=True), strict=True)), layout)
    total = math.fsum(likelihood for likelihood, _ in found)
    if not math.isfinite(total):
        raise UserError(DIVERGED)
    translations, targets = [text for _, text in found], [pair.target for pair in pairs]
    count = sum(len(target) for _, target in tokens)
    words, size = sum(len(text.split()) for text in targets), sum(len(text.encode()) for text in targets)
    score = bleu(translations, targets)
    figures: Metrics = {
        "bleu": score.score,
        "brevity_penalty": score.brevity_penalty,
        "length_ratio": score.length_ratio,
        "token_loss": -total / count,
        **perplexity(total, count, words, size),
    }
    return figures, score.signature, translations


@torch.no_grad()
def _likelihoods(replica: Replica, tokens: Sequence[tuple[list[int], list[int]]]) -> list[float]:
    """Log-probability of each target and its end, natural logarithm."""
    from mup_megatron.evaluate.likelihood import target_scores

    (model,), size = replica.chunks, replica.asked.batch_size
    device = next(model.parameters()).device
    found = []
    for first in range(0, len(tokens), size):
        batch = tokens[first : first + size]
        sources, present = (each.to(device) for each in padded([source for source, _ in batch]))
        labels, counted = (each.to(device) for each in padded([target for _, target in batch]))
        fed, _ = padded([[target[-1], *target[:-1]] for _, target in batch])
        logits = model(sources, fed.to(device), *pair_masks(present, labels.shape[1]))
        scores = target_scores(logits.flatten(0, 1), labels.flatten(), int(replica.tokenizer.vocab_size))[:, 0].view(
            labels.shape
        )
        found += torch.where(counted, scores, 0.0).sum(-1).tolist()
    return found
