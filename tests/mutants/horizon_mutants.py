"""Faults of rules over batch and tokens where a run's batch is not its own, and of a ladder's verdict."""

from __future__ import annotations

from tests.mutants.mutant import mutant as _mutant

HORIZON = (
    _mutant(
        "horizon: a check counts from its own batch",
        "coord-check multiplies the rate by what a rule says of the check's few tokens",
        "mup_megatron/proof/coord_check.py",
        'derive(config, {**applied(config), "tuning.seq_length": None})',
        'derive(config, {"tuning.seq_length": None})',
        "proof/test_coord_check.py::test_rules_over_batch_and_tokens_are_the_run_s_own",
    ),
    _mutant(
        "horizon: a rebased run forgets the trials",
        "rules over batch and tokens count from the run's own batch after a rebase",
        "mup_megatron/convert/rebase.py",
        '{"tuning": _trials(run.manifest.config), "proxy": {}}',
        '{"tuning": {}, "proxy": {}}',
        "convert/test_rebase.py::test_training_goes_on_as_it_would_have",
    ),
    _mutant(
        "horizon: targets are as long as sources",
        "of an encoder-decoder's tokens the decoder's own length is not counted",
        "mup_megatron/config/schema.py",
        "(self.training.decoder_seq_length or length)",
        "length",
        "rules/test_horizon.py::test_tokens_of_pairs_are_those_of_both_sides",
    ),
    _mutant(
        "ladder: noise passes",
        "a largest rung that is off, but within two large standard errors, passes",
        "mup_megatron/proof/ladder_verdict.py",
        'elif abs(off) > BOUNDS["octaves"]:',
        "elif abs(off) > 9:",
        "proof/test_ladder.py::test_noise_is_no_pass",
    ),
)
