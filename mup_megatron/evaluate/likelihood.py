"""How likely tokens are, by a model in any layout. Public names: `Scorer`, `MaskedScorer`, `target_scores`.

megatron-core's own schedules run the forward pass, so pipelines, tensor, context and expert parallelism work as in
training, without an engine, its optimizer and their memory. Each data-parallel replica scores its share.

A token's probability is that among the tokenizer's entries: what pads the vocabulary has weights that no text trained,
and counts neither here nor in `generate` nor in an export. A training loss counts it.

Shapes: b micro-batch size, s padded length of a micro-batch's sequences (under context parallelism this rank's part),
v entries of the vocabulary that a tensor-parallel rank holds, n scored tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from mup_megatron.data.gpt import sequence_part
from mup_megatron.evaluate.replica import Replica, gathered
from mup_megatron.evaluate.requests import Request
from mup_megatron.evaluate.scores import DIVERGED, Answer
from mup_megatron.util.errors import UserError

_ROWS = 1024
"""Tokens whose logits are taken as float32 at once."""
_SAY_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class _MicroBatch:
    """Sequences on this rank's device.

    Args:
        tokens: [b, s] int64, what is fed.
        positions: [b, s] int64, no larger than the model has.
        places: [b, s] int64, where in the whole sequence each token stands.
        targets: [b, s] int64, the token after each.
        scored: [b, s] bool, whether that token counts.
        present: [b, s] int64, 1 where a token is and 0 where the sequence is filled up.
        mask: [1, 1, s, s] bool, True where causal attention is masked; None under context parallelism.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    places: torch.Tensor
    targets: torch.Tensor
    scored: torch.Tensor
    present: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, kw_only=True)
class _Row:
    """A sequence that is fed, and what is scored in it.

    Args:
        fed: tokens.
        targets: the token that is asked for at each of them.
        scored: places of those that count.
    """

    fed: Sequence[int]
    targets: Sequence[int]
    scored: range


class Scorer:
    """Scores requests. Collective: every rank makes it and calls it with the same requests.

    Args:
        replica: this rank's part of the model.
    """

    def __init__(self, replica: Replica) -> None:
        layout = replica.layout
        self._chunks, self._layout, self._positions = list(replica.chunks), layout, replica.positions
        self._rank, self._size, self._say = replica.asked.rank.rank, replica.asked.batch_size, replica.asked.say
        self._device = next(replica.chunks[0].parameters()).device
        self._vocabulary = int(replica.tokenizer.vocab_size)
        self._pad = int(replica.tokenizer.eod)  # fills up shorter sequences; nothing attends to it
        # As many micro-batches as keep the pipeline's stages busy, and as the interleaved schedule asks for.
        self._count = layout.micro_batch_group if layout.virtual_pipeline > 1 else layout.pipeline

    def __call__(self, requests: Sequence[Request]) -> list[Answer]:
        """An answer per request, on every rank.

        Raises:
            UserError: the model's logits are not finite numbers.
        """
        asked = [(number, place) for number, request in enumerate(requests) for place in self._places(request)]
        order = sorted(range(len(asked)), key=lambda number: -len(requests[asked[number][0]].tokens))
        step = self._size * self._count * self._layout.data
        own: dict[int, Answer] = {}
        told = time.monotonic()
        for first in range(0, len(order), step):
            numbers = order[first : first + step]
            rows = [self._row(requests[asked[number][0]], asked[number][1]) for number in numbers]
            own.update((numbers[place], answer) for place, answer in self._answers(rows))
            if time.monotonic() - told > _SAY_SECONDS:
                told = time.monotonic()
                self._say(f"{min(first + step, len(order)):,} of {len(order):,} sequences, the longest first")
        answers: list[list[Answer]] = [[] for _ in requests]
        for (number, _), answer in zip(asked, gathered(own, self._layout), strict=True):
            if not answer.log_likelihood > float("-inf"):
                raise UserError(DIVERGED)
            answers[number].append(answer)
        return [_together(of_request) for of_request in answers]

    def _places(self, request: Request) -> Sequence[int]:
        """What tells the rows of a request apart; of this model it has one."""
        del request
        return [0]

    def _row(self, request: Request, place: int) -> _Row:
        """One of the sequences that a request is answered by."""
        del place
        fed = len(request.tokens) - 1
        return _Row(fed=request.tokens[:-1], targets=request.tokens[1:], scored=range(fed - request.scored, fed))

    def _answers(self, rows: Sequence[_Row]) -> Iterator[tuple[int, Answer]]:
        """Answers of this rank's share of some rows, by number."""
        size, layout = self._size, self._layout
        length = self._padded(max(len(row.fed) for row in rows))
        replica = layout.data_rank(self._rank)
        starts = [(k * layout.data + replica) * size for k in range(self._count)]
        # A slot without a row is computed too: every rank takes part in each call.
        shares = [range(start, min(start + size, len(rows))) for start in starts]
        micro_batches = [self._micro_batch([rows[number] for number in share], rows[0], length) for share in shares]
        found = self._run(micro_batches, length)
        for k, share in enumerate(shares):
            for row, number in enumerate(share):
                scored = rows[number].scored
                likelihoods, likeliest = found[k * size + row, scored.start : scored.stop].unbind(-1)
                yield (
                    number,
                    Answer(log_likelihood=float(likelihoods.sum()), tokens=len(scored), greedy=bool(likeliest.all())),
                )

    def _padded(self, length: int) -> int:
        """What context and sequence parallelism can split."""
        layout = self._layout
        unit = (2 * layout.context if layout.context > 1 else 1) * (layout.tensor if layout.sequence_parallel else 1)
        return -(-length // unit) * unit

    def _micro_batch(self, own: Sequence[_Row], filler: _Row, length: int) -> _MicroBatch:
        rows = [*own, *[filler] * (self._size - len(own))]
        tokens = torch.full((len(rows), length), self._pad)
        targets, scored, present = tokens.clone(), torch.zeros_like(tokens, dtype=torch.bool), torch.zeros_like(tokens)
        for number, row in enumerate(rows):
            fed = len(row.fed)
            tokens[number, :fed] = torch.tensor(row.fed)
            targets[number, :fed] = torch.tensor(row.targets)
            present[number, :fed] = 1
            if number < len(own):
                scored[number, row.scored.start : row.scored.stop] = True
        places = torch.arange(length).expand_as(tokens)
        positions = places if self._positions is None else places.clamp(max=self._positions - 1)
        whole = self._layout.context == 1
        mask = torch.ones(length, length, dtype=torch.bool, device=self._device).triu(1)[None, None] if whole else None
        return _MicroBatch(
            tokens=self._part(tokens),
            positions=self._part(positions),
            places=self._part(places),
            targets=self._part(targets),
            scored=self._part(scored),
            present=self._part(present),
            mask=mask,
        )

    def _part(self, sequences: torch.Tensor) -> torch.Tensor:
        layout = self._layout
        return sequence_part(sequences, layout.context_rank(self._rank), layout.context).contiguous().to(self._device)

    # Not inference_mode: megatron-core's global memory buffer outlives the call, and training could not use it then.
    @torch.no_grad()
    def _run(self, micro_batches: Sequence[_MicroBatch], length: int) -> torch.Tensor:
        """Log-probability of each target, and whether it is the most likely: [micro-batches · b, length, 2] float64."""
        iterators = [iter(micro_batches) for _ in self._chunks]
        several = len(iterators) > 1
        scores = get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=iterators if several else iterators[0],
            model=self._chunks if several else self._chunks[0],
            num_microbatches=len(micro_batches),
            seq_length=length,
            micro_batch_size=self._size,
            forward_only=True,
            collect_non_loss_data=True,
        )
        found = torch.zeros(len(micro_batches) * self._size, length, 2, dtype=torch.float64, device=self._device)
        for number, score in enumerate(scores):  # none but on the last pipeline stage
            rows = found[number * self._size : (number + 1) * self._size]
            rows.scatter_(1, micro_batches[number].places[..., None].expand_as(score), score)
        # Each position is one context-parallel rank's, of the last pipeline stage.
        torch.distributed.all_reduce(found, group=parallel_state.get_context_parallel_group())
        torch.distributed.all_reduce(found, group=parallel_state.get_pipeline_model_parallel_group())
        return found.cpu()

    def _forward(self, batches: Iterator[_MicroBatch], model: Any) -> tuple[torch.Tensor, Any]:
        batch = next(batches)
        return model(batch.tokens, batch.positions, batch.mask), partial(self._score, batch)

    def _score(self, batch: _MicroBatch, logits: torch.Tensor, *, non_loss_data: bool) -> torch.Tensor:
        """[b, s, 2] float64, zeros where nothing is scored.

        Args:
            batch: what was fed.
            logits: [b, s, v].
            non_loss_data: what megatron-core's schedule says to a function that it asks for no loss.
        """
        del non_loss_data
        found = torch.zeros(*batch.targets.shape, 2, dtype=torch.float64, device=self._device)
        rows, targets = logits[batch.scored], batch.targets[batch.scored]
        pieces = zip(rows.split(_ROWS), targets.split(_ROWS), strict=True)
        if len(rows):
            found[batch.scored] = torch.cat([target_scores(*piece, self._vocabulary) for piece in pieces])
        return found


class MaskedScorer(Scorer):
    """Scores requests by a model that predicts masked tokens: each scored token is masked alone, all others are seen.

    The sum of these is the pseudo-log-likelihood of Salazar et al. (arXiv 1910.14659, section 2). It is no probability
    of the text, and no number of a model that predicts the next token can be compared with it.
    """

    def _places(self, request: Request) -> Sequence[int]:
        """Each scored token has a sequence of its own."""
        end = len(request.tokens) - request.after
        return range(end - request.scored, end)

    def _row(self, request: Request, place: int) -> _Row:
        tokens = list(request.tokens)
        tokens[place] = self._vocabulary  # the mask is the entry after the tokenizer's
        return _Row(fed=tokens, targets=request.tokens, scored=range(place, place + 1))

    def _forward(self, batches: Iterator[_MicroBatch], model: Any) -> tuple[torch.Tensor, Any]:
        batch = next(batches)
        types = torch.zeros_like(batch.tokens) if model.add_binary_head else None
        output = model(batch.tokens, batch.present, tokentype_ids=types)
        return output[0] if model.post_process else output, partial(self._score, batch)


def _together(answers: Sequence[Answer]) -> Answer:
    """Several answers as one."""
    return Answer(
        log_likelihood=math.fsum(answer.log_likelihood for answer in answers),
        tokens=sum(answer.tokens for answer in answers),
        greedy=all(answer.greedy for answer in answers),
    )


def target_scores(logits: torch.Tensor, targets: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Log-probability of each target, and whether it is the most likely (the first of equals): [n, 2] float64.

    Args:
        logits: [n, v] of this tensor-parallel rank.
        targets: [n], the same on all of them.
        vocabulary: entries that count.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    first = torch.distributed.get_rank(group) * logits.shape[-1]
    columns = torch.arange(first, first + logits.shape[-1], device=logits.device)
    logits = logits.float().masked_fill(columns >= vocabulary, float("-inf"))
    highest, place = logits.max(-1)
    peak = _reduced(highest.clone(), torch.distributed.ReduceOp.MAX, group)
    total = _reduced((logits - peak[:, None]).exp().sum(-1, dtype=torch.float64), torch.distributed.ReduceOp.SUM, group)
    inside = (targets >= first) & (targets < first + logits.shape[-1])
    own = logits.gather(-1, torch.where(inside, targets - first, 0)[:, None])[:, 0]
    own = _reduced(torch.where(inside, own, 0.0).double(), torch.distributed.ReduceOp.SUM, group)
    likeliest = torch.where(highest == peak, place + first, vocabulary)
    likeliest = _reduced(likeliest, torch.distributed.ReduceOp.MIN, group)
    return torch.stack([own - peak.double() - total.log(), (likeliest == targets).double()], dim=-1)


def _reduced(value: torch.Tensor, operation: Any, group: Any) -> torch.Tensor:
    torch.distributed.all_reduce(value, op=operation, group=group)
    return value
