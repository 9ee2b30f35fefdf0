"""What ranks run for the tests of the decoder."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from mup_megatron.config import Config
from mup_megatron.data.t5 import pair_masks
from mup_megatron.evaluate.translation.decoder import Decoder, padded, translate
from mup_megatron.evaluate.translation.search import Search
from mup_megatron.parallel.ranks import Rank
from tests.helpers.bodies import start
from tests.helpers.configs import VOCABULARY

END = 7
ENDING = 12.0
TOKENIZER = SimpleNamespace(eod=END, vocab_size=VOCABULARY)


def models(rank: Rank, config: Config) -> Any:
    _, _, _, (model,) = start(rank, config)
    for parameter in model.parameters():  # biases start at zero, and norms at one
        if parameter.dim() == 1:
            generator = torch.Generator().manual_seed(1)  # the same for shards of equal length
            parameter.data += 0.3 * torch.randn(1, generator=generator)
    bias = getattr(model.lm_head.output_layer, "bias", None)
    if bias is not None and rank.rank == 0:  # which has the first entries; some translations are to end
        bias.data[END] += ENDING
    return model.eval()


@torch.no_grad()
def whole(model: Any, source: list[int], target: list[int]) -> torch.Tensor:
    """Logits after each token of one target by the whole model at once, without a cache: [t, v]."""
    tokens, present = padded([source])
    masks = pair_masks(present, len(target))
    logits = model(tokens, torch.tensor([target]), *masks)
    return gather_from_tensor_model_parallel_region(logits)[0, :, :VOCABULARY]


def cached(rank: Rank, *, config: Config, lost: str = "nothing") -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of three sentences' two sequences that are exchanged on their way, with the cache and without it."""
    model = models(rank, config).double()  # what is the same there differs by rounding alone, on every processor
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.params_dtype = torch.float64  # of the cache
    sources = [[11, 12, 13, 14, END], [21, END], [31, 32, 33, END]]
    decoder = Decoder(model, sources, beams=2, length=6, vocabulary=VOCABULARY)
    if lost == "the exchange":
        StaticInferenceContext.swap_key_value_dict, kept = lambda *_: None, StaticInferenceContext.swap_key_value_dict
    if lost == "the padding":
        decoder._mask = torch.zeros_like(decoder._mask)
    sequences: list[list[int]] = [[] for _ in range(6)]
    generator = torch.Generator().manual_seed(0)
    found, expected = [], []
    for step in range(6):
        parents = torch.arange(6)
        if step:
            parents = torch.tensor([1, 0, 2, 2, 5, 5])
        tokens = torch.randint(VOCABULARY, (6,), generator=generator) if step else torch.full((6,), END)
        sequences = [[*sequences[int(p)], int(t)] for p, t in zip(parents, tokens, strict=True)]
        found.append(decoder(tokens, parents))
        expected.append(torch.stack([whole(model, sources[row // 2], each)[-1] for row, each in enumerate(sequences)]))
    if lost == "the exchange":
        StaticInferenceContext.swap_key_value_dict = kept
    return torch.stack(found), torch.stack(expected)


def translations(rank: Rank, *, config: Config, beams: int) -> tuple[list[list[int]], list[list[int]]]:
    """Translations of eight sentences in batches of three, and, of one beam, by the whole model token by token."""
    model = models(rank, config)
    generator = torch.Generator().manual_seed(0)
    sources = [
        [*torch.randint(VOCABULARY, (size,), generator=generator).tolist(), END] for size in (3, 1, 5, 2, 4, 4, 6, 1)
    ]
    settings = Search(beams=beams, max_length=8)
    found = translate(model, sources, tokenizer=TOKENIZER, settings=settings, batch_size=3)
    greedy = []
    for source in sources:
        target = [END]
        while len(target) < 8 and (token := int(whole(model, source, target)[-1].argmax())) != END:
            target.append(token)
        greedy.append(target[1:])
    return found, greedy
