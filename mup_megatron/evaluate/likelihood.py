"""How likely tokens are, by a model in any layout. Public name: `Scorer`.

megatron-core's own schedules run the forward pass, so pipelines, tensor, context and expert parallelism work as in
training, without an engine, its optimizer and their memory. Each data-parallel replica scores its share.

A token's probability is that among the tokenizer's entries: what pads the vocabulary has weights that no text trained,
and counts neither here nor in `generate` nor in an export. A training loss counts it.

Shapes: b micro-batch size, s padded length of a micro-batch's sequences (under context parallelism this rank's part),
v entries of the vocabulary that a tensor-parallel rank holds, n scored tokens.
"""

from __future__ import annotations

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
        mask: [1, 1, s, s] bool, True where attention is masked; None under context parallelism.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    places: torch.Tensor
    targets: torch.Tensor
    scored: torch.Tensor
    mask: torch.Tensor | None


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
        order = sorted(range(len(requests)), key=lambda number: -len(requests[number].tokens))
        step = self._size * self._count * self._layout.data
        own: dict[int, Answer] = {}
        told = time.monotonic()
        for first in range(0, len(order), step):
            own.update(self._answers(requests, order[first : first + step]))
            if time.monotonic() - told > _SAY_SECONDS:
                told = time.monotonic()
                self._say(f"{min(first + step, len(order)):,} of {len(order):,} sequences, the longest first")
        answers = gathered(own, self._layout)
        if not all(answer.log_likelihood > float("-inf") for answer in answers):
            raise UserError(DIVERGED)
        return answers

    def _answers(self, requests: Sequence[Request], numbers: Sequence[int]) -> Iterator[tuple[int, Answer]]:
        """Answers of this rank's share of some requests, by number."""
        size, layout = self._size, self._layout
        length = self._padded(max(len(requests[number].tokens) for number in numbers) - 1)
        replica = layout.data_rank(self._rank)
        starts = [(k * layout.data + replica) * size for k in range(self._count)]
        # A slot without a request is computed too: every rank takes part in each call.
        shares = [[*numbers[start : start + size]] for start in starts]
        micro_batches = [
            self._micro_batch([requests[number] for number in share], requests[numbers[0]], length) for share in shares
        ]
        found = self._run(micro_batches, length)
        for k, share in enumerate(shares):
            for row, number in enumerate(share):
                tokens, scored = len(requests[number].tokens) - 1, requests[number].scored
                likelihoods, likeliest = found[k * size + row, tokens - scored : tokens].unbind(-1)
                yield (
                    number,
                    Answer(log_likelihood=float(likelihoods.sum()), tokens=scored, greedy=bool(likeliest.all())),
                )

    def _padded(self, length: int) -> int:
        """What context and sequence parallelism can split."""
        layout = self._layout
        unit = (2 * layout.context if layout.context > 1 else 1) * (layout.tensor if layout.sequence_parallel else 1)
        return -(-length // unit) * unit

    def _micro_batch(self, requests: Sequence[Request], filler: Request, length: int) -> _MicroBatch:
        rows = [*requests, *[filler] * (self._size - len(requests))]
        tokens = torch.full((len(rows), length), self._pad)
        targets, scored = tokens.clone(), torch.zeros_like(tokens, dtype=torch.bool)
        for number, request in enumerate(rows):
            fed = len(request.tokens) - 1
            tokens[number, :fed] = torch.tensor(request.tokens[:-1])
            targets[number, :fed] = torch.tensor(request.tokens[1:])
            if number < len(requests):
                scored[number, fed - request.scored : fed] = True
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
