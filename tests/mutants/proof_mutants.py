"""Faults of what the coordinate check expects and compares, and of what it has to see (mutants.py)."""

from __future__ import annotations

from tests.mutants.mutant import mutant as _mutant

_CHECK = "proof/test_coord_check.py"
_PLANTED = "proof/test_planted_faults.py::test_a_planted_fault_is_seen"
_SLOPES = "mup_megatron/proof/slopes.py"

PROOF = (
    _mutant(
        "decay: sqrt is 1/r",
        "decay of the rule sqrt is divided by the rate's multiplier and not by its root",
        "mup_megatron/rules/formulas.py",
        "return ONE if lr_multiplier == 1 else 1 / math.sqrt(lr_multiplier)",
        "return 1 / lr_multiplier",
        f"{_PLANTED}[sqrt_as_independent]",
    ),
    _mutant(
        "check: sqrt is judged as independent",
        "the coordinate check expects the same rate times decay at every width under sqrt",
        "mup_megatron/proof/theory.py",
        '"sqrt": 0.5,',
        '"sqrt": 0.0,',
        f"{_CHECK}::test_decay_by_its_rule",
    ),
    _mutant(
        "check: the regime of decay has a rule of its own",
        "coord-check --thorough looks at independent decay whatever the config says",
        "mup_megatron/proof/regimes.py",
        '"hparams.weight_decay": decay}',
        '"hparams.weight_decay": decay, "parametrization.weight_decay": "independent"}',
        f"{_CHECK}::test_the_regime_of_decay_keeps_the_rule",
    ),
    _mutant(
        "guard: sqrt under another optimizer",
        "decay of the rule sqrt is m^1/4 under Muon and 1 under SGD",
        "mup_megatron/config/run_checks.py",
        'if optimizer not in ("adamw", "adam"):',
        "if False:",
        "rules/test_horizon.py::test_bad_input",
    ),
    _mutant(
        "per_tensor: init twice",
        "a factor on initial values is applied twice, alike at every width",
        "mup_megatron/rules/table.py",
        "_scaled(std, factors.init[block])",
        "_scaled(std, factors.init[block] ** 2)",
        f"{_PLANTED}[init_factor_twice]",
    ),
    _mutant(
        "check: initial sizes by slopes alone",
        "initial values are not compared with what the config says",
        _SLOPES,
        "(each := _drawn(by_seed, name, theory)) is not None",
        "(each := _drawn(by_seed, name, theory)) is None and each",
        f"{_PLANTED}[init_factor_twice]",
    ),
    _mutant(
        "check: output projections as other matrices",
        "initial values of output projections are expected without the root of the base's layers",
        "mup_megatron/proof/sizes.py",
        "std /= math.sqrt(2 * config.num_layers_base)",
        "std /= 1",
        f"{_CHECK}::test_initial_sizes_by_hand",
    ),
    _mutant(
        "check: SOAP's epsilon is far below",
        "updates under an epsilon of 3 are expected to have a spectral norm of their own",
        "mup_megatron/proof/theory.py",
        "_ABOVE = 1.0",
        "_ABOVE = 9.0",
        f"{_CHECK}::test_soap_s_epsilon_by_hand",
    ),
    _mutant(
        "check: what was not run does not count",
        "the total of coord-check --thorough leaves out regimes that were not run",
        "mup_megatron/proof/told.py",
        "{passed} of {len(result['regimes'])} regimes",
        "{passed} of {passed} regimes",
        f"{_CHECK}::test_what_was_not_run_counts",
    ),
    _mutant(
        "check: copies are not compared",
        "copies of a parameter on tensor-parallel ranks may drift apart",
        "mup_megatron/proof/coordinates.py",
        "if spec.partition_dim is not None or self._layout.slice_of(spec, 0)[1] == 1:",
        "if spec is not None:",
        f"{_CHECK}::test_copies_that_differ_are_seen",
    ),
    _mutant(
        "shim: a norm is not marked sequence-parallel",
        "each tensor-parallel rank steps gains by the gradient of its own part of the tokens",
        "mup_megatron/model/layers/norm.py",
        "parameter.sequence_parallel = sequence_parallel or per_head",
        "parameter.sequence_parallel = per_head",
        f"{_CHECK}::test_copies_that_differ_are_seen[nothing]",
    ),
)
