"""Faults of positions as a bias on attention logits; mutants.py has the list of all."""

from __future__ import annotations

from tests.mutants.mutant import mutant as _mutant

_BIAS = "mup_megatron/model/layers/position_bias.py"
_ATTENTION = "mup_megatron/model/layers/attention.py"
_TESTS = "model/layers/test_position_bias.py"

BIAS = (
    _mutant(
        "bias: without its multiplier",
        "hparams.relative_bias_multiplier moves nothing",
        _BIAS,
        "scale_output(self.relative_attention_bias, multiplier)",
        "scale_output(self.relative_attention_bias, 1.0)",
        f"{_TESTS}::test_relative_is_hugging_faces_t5",
    ),
    _mutant(
        "bias: the table takes the embedding's init",
        "embedding_init_method_std moves the bias",
        "mup_megatron/rules/apply.py",
        "Init.RELATIVE_BIAS: hparams.init_method_std,",
        "Init.RELATIVE_BIAS: hparams.embedding_init_method_std or hparams.init_method_std,",
        f"{_TESTS}::test_the_table_is_input_like",
    ),
    _mutant(
        "bias: Muon takes the table",
        "a lookup is orthogonalised",
        "mup_megatron/rules/shapes.py",
        "return self.init in (Init.EMBEDDING, Init.RELATIVE_BIAS)",
        "return self.init is Init.EMBEDDING",
        f"{_TESTS}::test_sgd_and_muon",
    ),
    _mutant(
        "bias: epsilon of one layer",
        "epsilon of a table that all layers share does not follow the sum of their gradients",
        "mup_megatron/rules/formulas.py",
        "else own.lr, eps=own.eps * m)",
        "else own.lr, eps=own.eps)",
        "rules/test_rules.py::test_depth_of_a_table_that_all_layers_share",
    ),
    _mutant(
        "bias: decoding begins anew",
        "a token behind a cache has the bias of the first position",
        _BIAS,
        "size, before = tokens.size(1), 0 if context is None else context.sequence_len_offset",
        "size, before = tokens.size(1), 0",
        "evaluate/test_generate.py::test_cached_logits_are_the_full_forwards[llama relative]",
    ),
    _mutant(
        "bias: torch's attention sees what comes later",
        "a bias takes the causal mask's place",
        _ATTENTION,
        "if is_causal and not masks:",
        "if False:",
        f"{_TESTS}::test_sdpa_adds_the_bias_to_the_scaled_logits",
    ),
    _mutant(
        "bias: the first rows of a longer bias",
        "a query behind a cache has the bias of the first one",
        _ATTENTION,
        "bias[..., columns - rows : columns, :columns]",
        "bias[..., :rows, :columns]",
        f"{_TESTS}::test_sdpa_adds_the_bias_to_the_scaled_logits",
    ),
)
