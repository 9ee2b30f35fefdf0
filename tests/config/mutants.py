"""Faults of what a config may ask for."""

from __future__ import annotations

from tests.mutants.mutant import mutant

MUTANTS = (
    mutant(
        "guard: Adam with L2",
        "weight decay under Adam is added to the gradient",
        "config.run_checks._check_optimizer",
        "optimizer.name == 'adam' and hparams.weight_decay > 0",
        "False",
        "config/test_config.py::test_bad",
    ),
    mutant(
        "guard: a depth rule without the base's depth",
        "each model takes its own depth for the base's, and the rule vanishes",
        "config.growth_checks._check_depth",
        "config.base.num_layers is None",
        "False",
        "config/test_config.py::test_bad",
    ),
    mutant(
        "guard: a falling share of experts",
        "fixed_share, the rule of the paper, is applied where the share of experts falls",
        "config.expert_checks._check_share",
        "config.parametrization.experts == 'fixed_share'",
        "False",
        "model/test_experts.py::test_what_has_no_rule_is_refused",
    ),
)
