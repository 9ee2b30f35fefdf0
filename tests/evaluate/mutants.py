"""Faults of what a trained model is asked."""

from __future__ import annotations

from tests.mutants.mutant import mutant

MUTANTS = (
    mutant(
        "evaluate: a shifted label",
        "each token is scored by the probability of the one that was fed",
        "evaluate.likelihood.Scorer._row",
        "request.tokens[1:]",
        "request.tokens[:-1]",
        "evaluate/test_evaluate.py::test_transformers_computes_the_same[llama]",
    ),
    mutant(
        "evaluate: a token that is seen",
        "BERT is asked for a token that stands in the text",
        "evaluate.likelihood.MaskedScorer._row",
        "self._vocabulary",
        "tokens[place]",
        "evaluate/test_masks.py::test_pseudo_likelihoods",
    ),
    mutant(
        "generate: the vocabulary's padding",
        "tokens of the vocabulary's padding may be chosen",
        "evaluate.generate._generate",
        "logits[: int(tokenizer.vocab_size)]",
        "logits",
        "evaluate/test_generate.py::test_generation_ends_with_the_document",
    ),
    mutant(
        "translation: the cache stays with its beam",
        "a sequence that goes on from another one keeps its own keys and values",
        "evaluate.translation.decoder.Decoder.__call__",
        "context.swap_key_value_dict(parents.to(self._device))",
        "None",
        "evaluate/translation/test_decoder.py::test_cached_is_uncached[as it comes]",
    ),
)
