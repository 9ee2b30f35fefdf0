"""Text from a checkpoint: `mup-megatron generate CHECKPOINT PROMPT`.

Public names: `load_model`, `generate`, `Token`, `Sampling`, `Decoder`, `Reader`. A GPT goes on from the prompt, an
encoder-decoder turns it into its target (translation/decoder.py); what fills masks is in masks.py.

megatron-core's own GPTModel decodes, with its StaticInferenceContext as key-value cache: the one path of upstream's
that keeps µP's softmax scale, because it goes through the same core attention as training. Its others do not:
`flash_decode` hands its kernel no scale (attention.py:667 in megatron-core 0.16.1, :870 in 0.19.2), and dynamic
batching takes 1/sqrt(d) (0.16.1: attention.py:792-795, :859-872; 0.19.2: :1085-1088, :1206-1239). Readout and embedding
multipliers are module hooks (model/layers/embedding.py), which every call passes.

Shapes: s tokens fed at once, v vocabulary, padded.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from mup_megatron.convert.saved_model import load_saved
from mup_megatron.convert.saved_run import SavedRun
from mup_megatron.data.tokenizer import prompt_tokens
from mup_megatron.evaluate.scores import DIVERGED
from mup_megatron.evaluate.translation import decoder as translation
from mup_megatron.parallel import runtime
from mup_megatron.parallel.layout import resolve_layout
from mup_megatron.parallel.ranks import Rank
from mup_megatron.parallel.upstream import inference_mode
from mup_megatron.util.errors import UserError

if TYPE_CHECKING:
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.models.T5 import T5Model

MAX_NEW_TOKENS = 128
"""How many tokens are generated unless told; fewer where learned positions end before."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen among the tokenizer's entries.

    Args:
        temperature: what logits are divided by; 0, the limit, takes the most likely token (the first of equals).
        top_k: only the k most likely tokens; None is all.
        top_p: only the most likely tokens whose probabilities first add up to p (nucleus sampling, arXiv 1904.09751),
            after temperature and top_k; None is all.
        seed: of the draws.

    Raises:
        UserError: a number out of its range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = field(default_factory=lambda: secrets.randbelow(2**32))

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"--temperature: expected a number >= 0, found {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"--top-k: expected a whole number > 0, found {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"--top-p: expected a number > 0 and <= 1, found {self.top_p}")

    def choose(self, logits: torch.Tensor, generator: torch.Generator) -> int:
        """Chooses a token.

        Args:
            logits: of the tokens that may be chosen, one number each.
            generator: on the CPU, where the draw is made, so that equal logits give equal tokens on every device.

        Raises:
            UserError: the logits are not numbers.
        """
        logits = logits.detach().to("cpu", torch.float64)
        if not logits.isfinite().all():
            raise UserError(DIVERGED)
        logits, tokens = logits.sort(descending=True, stable=True)
        if self.temperature == 0:
            return int(tokens[0])
        # Only differences count; from the largest down, a tiny temperature overflows to -inf, never to no number.
        probabilities = ((logits[: self.top_k] - logits[0]) / self.temperature).softmax(0)
        if self.top_p is not None:
            before = probabilities.cumsum(0) - probabilities
            probabilities = probabilities[before < self.top_p]
        return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])


@dataclass(frozen=True, kw_only=True)
class Token:
    """A token that was generated.

    Args:
        id: of the token; the tokenizer's `eod` where the document ends.
        text: what can be read since the token before: nothing within a character of several tokens, or at the end.
    """

    id: int
    text: str


class Decoder:
    """One sequence on its way through a model that keeps keys and values: the prompt at once, then token by token.

    Args:
        model: whole, on one rank, in evaluation mode.
        length: the most tokens that will be fed.

    Raises:
        ValueError: the model is in training mode, in which upstream ignores the cache in part.
    """

    def __init__(self, model: GPTModel, length: int) -> None:
        from megatron.core.inference.contexts import StaticInferenceContext

        if model.training:
            raise ValueError("expected a model in evaluation mode")
        self._model = model
        self._device = next(model.parameters()).device
        self._context = StaticInferenceContext(max_batch_size=1, max_sequence_length=length)

    def prefill(self, tokens: Sequence[int]) -> torch.Tensor:
        """Feeds the prompt, at least one token, and nothing before it; returns the logits after its last token: [v]."""
        # On a CPU upstream cannot make the causal mask itself (transformer/utils.py:35 asks for CUDA).
        mask = torch.ones(len(tokens), len(tokens), dtype=torch.bool, device=self._device).triu(1)[None, None]
        logits = self._forward(tokens, mask)
        self._context.enable_decode_mode()
        return logits

    def step(self, token: int) -> torch.Tensor:
        """Feeds the next token; returns the logits after it: [v]."""
        return self._forward([token], None)

    # Not inference_mode: megatron-core's global memory buffer outlives the call, and training could not use it then.
    @torch.no_grad()
    def _forward(self, tokens: Sequence[int], mask: torch.Tensor | None) -> torch.Tensor:
        start = self._context.sequence_len_offset
        positions = torch.arange(start, start + len(tokens), device=self._device)
        with inference_mode():
            logits = self._model(
                torch.tensor([tokens], device=self._device),
                positions[None],
                mask,
                inference_context=self._context,
                runtime_gather_output=True,
            )
        self._context.increment_sequence_len_offset(len(tokens))
        return logits[0, -1]


class _Target:
    """The target of an encoder-decoder on its way: after the source at once, then token by token.

    Args:
        model: a T5Model; as for `Decoder`.
        length: the most tokens that will be fed to its decoder.
        vocabulary: entries of the tokenizer.
    """

    def __init__(self, model: Any, length: int, vocabulary: int) -> None:
        self._start = partial(translation.Decoder, model, beams=1, length=length, vocabulary=vocabulary)

    def prefill(self, tokens: Sequence[int]) -> torch.Tensor:
        """Reads a source with its end, which begins the target too; returns the logits of its first token: [v]."""
        self._decoder = self._start([tokens])
        return self.step(tokens[-1])

    def step(self, token: int) -> torch.Tensor:
        """Feeds the target's next token; returns the logits after it: [v]."""
        return self._decoder(torch.tensor([token]), torch.tensor([0]))[0]


def generate(
    model: GPTModel | T5Model,
    tokenizer: Any,
    prompt: str,
    *,
    sampling: Sampling | None = None,
    max_new_tokens: int | None = None,
) -> Iterator[Token]:
    """Goes on from a prompt, token by token, until the document ends or `max_new_tokens` are there.

    An encoder-decoder reads the prompt as its source and writes the target.

    Args:
        model: whole, on one rank, in evaluation mode.
        tokenizer: megatron-core's tokenizer object, of the same checkpoint.
        prompt: text; from an empty one (no token) a new document begins, as after the end of another.
        sampling: how tokens are chosen; the most likely one each time unless given.
        max_new_tokens: MAX_NEW_TOKENS, or as many as there are positions for, unless given.

    Raises:
        UserError: prompt and new tokens need more positions than the model learned, or the prompt is not text.
    """
    sampling = sampling or Sampling()
    prompt_ids = prompt_tokens(tokenizer, prompt, "PROMPT")
    if not hasattr(model, "encoder"):
        _check_prompt(model, len(prompt_ids))
        count = _fitting(model, len(prompt_ids), max_new_tokens, f" after a prompt of {len(prompt_ids)} tokens")
        decoder = Decoder(model, len(prompt_ids) + count - 1)  # the last token is never fed
        return _generate(decoder, tokenizer, prompt_ids, prompt_ids, sampling, count)
    source = [*prompt_ids, int(tokenizer.eod)] if prompt else prompt_ids
    _check_prompt(model, len(source))
    count = _fitting(model, 1, max_new_tokens)
    return _generate(_Target(model, count, int(tokenizer.vocab_size)), tokenizer, source, [], sampling, count)


def _generate(
    decoder: Decoder | _Target,
    tokenizer: Any,
    prompt_ids: list[int],
    before: list[int],
    sampling: Sampling,
    count: int,
) -> Iterator[Token]:
    """Tokens after those of `before`, which are what a reader has seen."""
    generator = torch.Generator().manual_seed(sampling.seed)
    reader = Reader(tokenizer, before)
    logits = decoder.prefill(prompt_ids)
    for number in range(1, count + 1):
        # What pads the vocabulary has weights that no text ever trained, and no text of its own.
        token = sampling.choose(logits[: int(tokenizer.vocab_size)], generator)
        ends = token == tokenizer.eod
        yield Token(id=token, text=reader.read([] if ends else [token], last=ends or number == count))
        if ends:
            return
        if number < count:
            logits = decoder.step(token)


def _learned(model: GPTModel | T5Model) -> int | None:
    """Positions, where the model learned them."""
    return int(model.max_sequence_length) if model.position_embedding_type == "learned_absolute" else None


def _check_prompt(model: GPTModel | T5Model, tokens: int) -> None:
    positions = _learned(model)
    if positions is not None and tokens > positions:
        raise UserError(
            f"PROMPT: {tokens} tokens, but the model learned {positions} positions (model.max_position_embeddings); "
            "expected a shorter prompt"
        )


def _fitting(model: GPTModel | T5Model, before: int, max_new_tokens: int | None, after: str = "") -> int:
    """How many tokens to generate after some that have positions before them; `after` says which, for the message."""
    if max_new_tokens is not None and max_new_tokens < 1:
        raise UserError(f"--max-new-tokens: expected a whole number > 0, found {max_new_tokens}")
    positions = _learned(model)
    if positions is None:
        return max_new_tokens or MAX_NEW_TOKENS
    most = positions - before + 1
    if max_new_tokens is not None and max_new_tokens > most:
        raise UserError(
            f"--max-new-tokens: {max_new_tokens}{after} need more than the {positions} positions that the model "
            f"learned (model.max_position_embeddings); expected at most {most}"
        )
    return max_new_tokens or min(most, MAX_NEW_TOKENS)


class Reader:
    """Tokens as text, as they come: what a token adds may depend on those before it (spaces, characters of bytes).

    Args:
        tokenizer: megatron-core's tokenizer object.
        context: tokens that have been read already.
    """

    _CONTEXT = 8

    def __init__(self, tokenizer: Any, context: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._read = list(context[-self._CONTEXT :])
        self._unread: list[int] = []

    def read(self, tokens: Sequence[int], *, last: bool) -> str:
        """Text that the tokens add; a character that is not whole waits for the rest, unless this is the last call."""
        self._unread += tokens
        before = self._tokenizer.detokenize(self._read) if self._read else ""
        text = self._tokenizer.detokenize(self._read + self._unread)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and not last:
            return ""
        self._read = (self._read + self._unread)[-max(self._CONTEXT, len(self._unread)) :]
        self._unread = []
        return text[len(before) :]


# --- a checkpoint's model ---


def load_model(run: SavedRun, device: torch.device) -> Any:
    """The model of a checkpoint, whole on this one rank, in evaluation mode.

    Starts the process groups of one rank; `runtime.stop_distributed` ends them.

    Args:
        run: the checkpoint, from `open_run`.
        device: where the weights go.

    Raises:
        UserError: a file of the checkpoint is damaged.
    """
    layout = resolve_layout(run.config, 1)
    runtime.start_distributed(layout, Rank(), run.config.run.seed)
    (model,) = load_saved(run, layout, 0, device)
    return model
