"""Faults of layers, of initial values, of names, and of models that are parametrised as built."""

from __future__ import annotations

from tests.mutants.mutant import decorated, mutant

_RULES = "model/layers/test_architecture_rules.py"

MUTANTS = (
    decorated(
        "init: the name does not matter",
        "all tensors of one size start with the same numbers",
        "model.init._standard_normal",
        "lambda f: lambda seed, name, *a: f(seed, '', *a)",
        "model/test_init.py::test_name_and_seed_decide",
    ),
    decorated(
        "init: stride is ignored",
        "gate|up is sliced as one block",
        "model.init.local_ranges",
        "lambda f: lambda size, stride, rank, ranks: f(size, 1, rank, ranks)",
        "model/test_init.py::test_strided_slices",
    ),
    mutant(
        "init: one standard deviation for all blocks",
        "every block takes the first one's",
        "model.init.local_rows",
        "rows % len(period)",
        "rows * 0",
        "model/test_init.py::test_blocks_have_their_own_standard_deviation",
    ),
    mutant(
        "names: layers of a stage",
        "a rank counts its own layers, and not those of the whole model",
        "model.global_names.global_names",
        "getattr(chunk, stack).layers[int(index)].layer_number - 1",
        "int(index)",
        "engines/test_parity.py::test_layout_changes_nothing[gpt3: PP 2, VPP 2, Megatron, plain optimizer]",
    ),
    mutant(
        "shim: rows of QKV in another order",
        "all queries, then all keys, then all values",
        "model.layers.linear.QKV.fused",
        "Fused(runs=(('query', query), *gate, ('key', head_size), ('value', head_size)), repeats=groups)",
        "Fused(runs=(('query', query * groups), ('key', head_size * groups), ('value', head_size * groups)))",
        f"{_RULES}::test_rows_of_fused_qkv",
    ),
    mutant(
        "shim: residual multiplier on the bias",
        "a branch's bias is added whole",
        "model.layers.residual.scaled_branch",
        "bias * multiplier",
        "bias",
        f"{_RULES}::test_a_branch_s_bias_is_multiplied_too",
    ),
    decorated(
        "shim: the readout's multiplier",
        "the head's input is not scaled",
        "model.layers.embedding.scale_input",
        "lambda f: lambda *a: None",
        "tuning/test_values_reach.py::test_the_output_multiplier_doubles_the_logits",
    ),
    mutant(
        "shim: the router is hidden-like",
        "the router's init loses g",
        "model.layers.moe.TopKRouter.__init__",
        "'output_like'",
        "'hidden_like'",
        f"{_RULES}::test_mixture_of_experts",
    ),
    mutant(
        "shim: QK-norm gains are summed over heads",
        "each tensor-parallel rank keeps the gradient of its own heads",
        "model.layers.norm.set_gain_specs",
        "sequence_parallel or per_head",
        "sequence_parallel",
        "engines/test_parity.py::test_layout_changes_nothing[llama, qk-norm: TP 2, DP 1, ZeRO 0]",
    ),
    mutant(
        "unit: no forward multiplier",
        "weights are divided by θ and no linear layer multiplies by it",
        "model.layers.unit_scaling._scale_linear",
        "result[0] * theta",
        "result[0]",
        "rules/test_unit_scaling.py::test_to_the_last_bit[ZeRO 0]",
    ),
    mutant(
        "as built: another spec is taken for megatron-core's own",
        "a config is said to say what a script put into its layer spec",
        "model.as_built.given._left_out",
        "place != 'sharded_state_dict_keys_map' or found",
        "False",
        "model/as_built/test_given_spec.py::test_other_layers",
    ),
    mutant(
        "layers: attention copies keys and values",
        "each layer keeps two more tensors for the backward pass than megatron-core's",
        "model.layers.attention.MegatronAttention.forward",
        "self.config.multi_latent_attention",
        "True",
        "test_benchmarks.py::test_a_step_keeps_no_more_than_plain",
    ),
    mutant(
        "as built: a digest of names alone",
        "values that were tuned with another base of a script's layers are taken",
        "model.as_built.chunks.digest_of",
        "_at_base(row.shape)",
        "()",
        "model/as_built/test_own_layers.py::test_a_digest_tells_one_family_from_another",
    ),
)
