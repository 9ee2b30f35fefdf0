"""BLEU of validation pairs while a model trains (`training.eval_translations`). Public name: `Validation`.

The search feeds the decoder one token at a time, outside of the engine. Where the trained model cannot take that, a
plain copy of it translates, whole on each rank but for tensor parallelism, which takes the trained weights at every
evaluation: under sequence parallelism a single token cannot be split over ranks; under ZeRO stage 3, and where
parameters are gathered while the next forward pass runs, a rank holds the weights only within the engine's own passes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed

from mup_megatron.config import derive
from mup_megatron.engines import WEIGHT, Engine
from mup_megatron.engines.setup import Setup
from mup_megatron.evaluate.replica import gathered
from mup_megatron.evaluate.translation.bleu import bleu, check_installed
from mup_megatron.evaluate.translation.decoder import translate
from mup_megatron.evaluate.translation.search import Search
from mup_megatron.model.build import build_model
from mup_megatron.model.global_names import named_parameters
from mup_megatron.rules.table import Parametrization

_SENTENCES = 32
"""Translated at once."""


class Validation:
    """Translates the first validation pairs, always the same ones, greedily.

    Args:
        setup: the run; data-parallel replicas share the pairs.
        engine: that trains the model.
        parametrization: of the model.
        dataset: the validation pairs (data/pair_dataset.py).
        rank: of this process.

    Raises:
        UserError: sacrebleu is not installed.
    """

    def __init__(self, setup: Setup, engine: Engine, parametrization: Parametrization, dataset: Any, rank: int) -> None:
        check_installed()
        self._setup, self._engine, self._parametrization, self._rank = setup, engine, parametrization, rank
        config, layout = setup.config, setup.layout
        self._tokenizer, self._length = dataset.config.tokenizer, config.training.decoder_length
        count = min(config.training.eval_translations, dataset.pairs)
        self._own = range(layout.data_rank(rank), count, layout.data)
        own = [dataset[index] for index in self._own]
        self._sources = [sample["text_enc"][sample["enc_mask"]].tolist() for sample in own]
        self._targets = [self._text(sample["labels"][sample["dec_mask"]].tolist()[:-1]) for sample in own]

    def __call__(self) -> float:
        """BLEU, 0 to 100, the same on every rank. Collective."""
        model = self._plain_copy() if self._shards else self._engine.chunks[0]
        training = model.training
        model.eval()
        try:
            found = translate(model, self._sources, self._tokenizer, Search(max_length=self._length), _SENTENCES)
        finally:
            model.train(training)
        pairs = zip(map(self._text, found), self._targets, strict=True)
        translations, targets = zip(
            *gathered(dict(zip(self._own, pairs, strict=True)), self._setup.layout), strict=True
        )
        return bleu(translations, targets).score

    @property
    def _gathers(self) -> bool:
        """Whether a rank lacks weights outside of the engine's passes."""
        return self._setup.layout.zero_stage == 3 or self._setup.config.parallel.overlap_param_gather

    @property
    def _shards(self) -> bool:
        """Whether the trained model cannot take one token at a time."""
        return self._setup.layout.sequence_parallel or self._gathers

    def _plain_copy(self) -> Any:
        """The model with the weights of now, for one evaluation. Collective."""
        config = derive(self._setup.config, {"parallel.sequence_parallel": False})
        layout = dataclasses.replace(self._setup.layout, sequence_parallel=False)
        trained = dict(named_parameters(self._engine.chunks))
        device = next(iter(trained.values())).device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):  # upstream draws as it builds
            plain = dataclasses.replace(self._parametrization, config=config)
            (model,) = build_model(plain, layout, self._rank, device)
        if config.training.precision == "bf16":
            model.bfloat16()
        with torch.no_grad():
            for name, parameter in named_parameters(model):
                held = trained[name]
                parameter.copy_(self._engine.gather(held)[WEIGHT] if self._gathers else held)
        return model

    def _text(self, tokens: list[int]) -> str:
        return str(self._tokenizer.detokenize(tokens))
