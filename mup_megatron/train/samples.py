"""Text that a model writes while it trains (`run.samples`), in the run's own layout. Public name: `Samples`.

Each token is the most likely one. It is found by an evaluation pass of the engine over whole sequences, whose logits a
hook on the readout reads: no other path of megatron-core runs under every layout (tensor, sequence, pipeline and
context parallelism, ZeRO 3), and no weight has to be gathered. `mup-megatron generate`, on one process, keeps keys and
values instead.

Shapes: m micro-batches, b micro-batch size, s sequence length (under context parallelism this rank's part), v entries
of the vocabulary that a tensor-parallel rank holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed

from mup_megatron.data.gpt import GPTBatch, GPTMaker
from mup_megatron.data.tokenizer import prompt_tokens
from mup_megatron.engines import Engine
from mup_megatron.engines.setup import Setup
from mup_megatron.train.hooks import Evaluation, Hook
from mup_megatron.train.metrics import Metrics
from mup_megatron.util.errors import UserError, shown
from mup_megatron.util.progress import Progress

NEW_TOKENS = 32
"""How many tokens follow a prompt, at most."""


class Samples(Hook):
    """Writes after evaluations how the model goes on from each prompt of `run.samples`. Collective.

    Args:
        setup: the run.
        engine: that trains it.
        maker: makes batches of this rank.
        tokenizer: megatron-core's tokenizer object.
        metrics: where the texts are written.
        progress: where they are shown.

    Raises:
        UserError: the tokenizer cannot read a prompt, or a prompt leaves no room for an answer.
    """

    def __init__(
        self, setup: Setup, engine: Engine, maker: GPTMaker, tokenizer: Any, metrics: Metrics, progress: Progress
    ) -> None:
        self._engine, self._maker, self._tokenizer = engine, maker, tokenizer
        self._training, self._layout = setup.config.training, setup.layout
        self._metrics, self._progress = metrics, progress
        self._texts = setup.config.run.samples
        self._prompts = [
            _tokens(self._tokenizer, prompt, number, self._training.seq_length)
            for number, prompt in enumerate(self._texts)
        ]

    def after_evaluation(self, evaluation: Evaluation) -> bool:
        """Writes and shows a text for each prompt."""
        for prompt, text in zip(self._texts, self._written(), strict=True):
            self._metrics.sample(evaluation.step, prompt, text)
            self._progress.say(f"step {evaluation.step}: {shown(prompt + text)}")
        return True

    def _written(self) -> list[str]:
        """What follows each prompt, on every rank."""
        length = self._training.seq_length
        written = [list(prompt) for prompt in self._prompts]
        open_ends = set(range(len(written)))
        for _ in range(NEW_TOKENS):
            open_ends -= {number for number in open_ends if len(written[number]) == length}
            if not open_ends:
                break
            likeliest = self._most_likely(written)
            for number in sorted(open_ends):
                token = int(likeliest[number, len(written[number]) - 1])
                if token == self._tokenizer.eod:
                    open_ends.discard(number)
                else:
                    written[number].append(token)
        return [
            str(self._tokenizer.detokenize(tokens))[len(str(self._tokenizer.detokenize(prompt))) :]
            for tokens, prompt in zip(written, self._prompts, strict=True)
        ]

    def _most_likely(self, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        """The most likely token after each position of each sequence: [sequences, whole sequence length]."""
        size, length, group = self._training.micro_batch_size, self._training.seq_length, self._layout.micro_batch_group
        rows = -(-len(sequences) // (size * group)) * size * group
        # What follows a sequence does not reach back to it: attention is causal.
        padded = [[*tokens, *[self._tokenizer.eod] * (length - len(tokens))] for tokens in sequences]
        padded += [padded[0]] * (rows - len(padded))
        micro_batches = [self._maker.of(torch.tensor(padded[first : first + size])) for first in range(0, rows, size)]
        return _find(self._engine, micro_batches, int(self._tokenizer.vocab_size), length)[: len(sequences)]


def _tokens(tokenizer: Any, prompt: str, number: int, length: int) -> list[int]:
    found = prompt_tokens(tokenizer, prompt, f"run.samples.{number}")
    if len(found) >= length:
        raise UserError(
            f"run.samples.{number}: {len(found)} tokens leave no room for an answer; expected fewer than "
            f"training.seq_length, {length}"
        )
    return found


def _find(engine: Engine, micro_batches: Sequence[GPTBatch], vocabulary: int, length: int) -> torch.Tensor:
    """The most likely token after each position, on every rank: [m · b, whole sequence length] int64."""
    from megatron.core import parallel_state

    best: list[tuple[torch.Tensor, torch.Tensor]] = []
    group = parallel_state.get_tensor_model_parallel_group()

    def read(_module: Any, _inputs: Any, output: Any) -> None:
        logits = output[0].detach()  # [s, b, v]
        first = torch.distributed.get_rank(group) * logits.shape[-1]
        # What pads the vocabulary has weights that no text ever trained.
        pads = torch.arange(first, first + logits.shape[-1], device=logits.device) >= vocabulary
        value, index = logits.float().masked_fill(pads, float("-inf")).max(-1)
        best.append((value, index + first))

    last = engine.chunks[-1]
    hook = last.output_layer.register_forward_hook(read) if last.post_process else None
    try:
        engine.evaluate(micro_batches)
    finally:
        if hook is not None:
            hook.remove()
    size = micro_batches[0].tokens.shape[0]
    found = torch.zeros(len(micro_batches) * size, length, dtype=torch.int64, device=micro_batches[0].tokens.device)
    # Heads that predict further ahead go through the readout too, before the one for the next token.
    calls = len(best) // len(micro_batches)
    for number, batch in enumerate(micro_batches if best else ()):
        value, index = best[(number + 1) * calls - 1]
        values = [torch.empty_like(value) for _ in range(torch.distributed.get_world_size(group))]
        indices = [torch.empty_like(index) for _ in values]
        torch.distributed.all_gather(values, value, group=group)
        torch.distributed.all_gather(indices, index, group=group)
        winner = torch.stack(values).max(0, keepdim=True).indices
        token = torch.stack(indices).gather(0, winner)[0].t()  # [b, s]
        found[number * size : (number + 1) * size].scatter_(1, batch.position_ids, token)
    # Each position is one context-parallel rank's, of the last pipeline stage.
    torch.distributed.all_reduce(found, group=parallel_state.get_context_parallel_group())
    torch.distributed.all_reduce(found, group=parallel_state.get_pipeline_model_parallel_group())
    return found
