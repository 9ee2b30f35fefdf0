"""Faults of `mup-megatron run`; they need megatron.training."""

from __future__ import annotations

from tests.mutants.mutant import decorated, mutant

_TESTS = "megatron_training/test_megatron"

MUTANTS = (
    mutant(
        "translation: the base's gated FFN",
        "the FFN size that Megatron derives is not derived for the base",
        "megatron_training.translate._base",
        "base['ffn_hidden_size'] = derived",
        "base['ffn_hidden_size'] = config.ffn_hidden_size",
        f"{_TESTS}_translation.py::test_gated_ffn_that_megatron_derives",
    ),
    decorated(
        "translation: the model as built is not compared",
        "a field that the script sets beside its options is not noticed",
        "megatron_training.translate.check_translation",
        "lambda f: lambda *a: None",
        f"{_TESTS}_translation.py::test_the_model_that_is_built_is_the_one_that_was_read",
    ),
    mutant(
        "megatron: another optimizer than the options'",
        "a script that builds SGD trains with Adam's rates",
        "megatron_training.megatron_run.MegatronRun.overrides",
        "optimizer != self._args.optimizer",
        "False",
        f"{_TESTS}_run.py::test_an_optimizer_that_the_options_do_not_name",
    ),
    mutant(
        "megatron: a checkpoint without a record",
        "weights of plain Megatron go on in µP",
        "megatron_training.saved.read_saved",
        "(path / MANIFEST).is_file()",
        "True",
        f"{_TESTS}_run.py::test_checkpoints_that_are_not_this_runs",
    ),
    mutant(
        "megatron: a record of another family",
        "values that were tuned for another family are taken",
        "megatron_training.family.check_family",
        "TransferRecord.expect(path, config)",
        "None",
        f"{_TESTS}_run.py::test_a_record_of_another_family",
    ),
    decorated(
        "refusal: Muon on slices",
        "each tensor-parallel rank orthogonalises its slice by itself",
        "megatron_training.option_check._check_muon",
        "lambda f: lambda *a, **k: None",
        f"{_TESTS}_muon.py::test_slices_are_refused",
    ),
    mutant(
        "refusal: a script's own groups",
        "a script's config_overrides are replaced in silence",
        "megatron_training.option_check.check_optimizer",
        "dict(override) not in upstreams",
        "False",
        f"{_TESTS}_table.py::test_optimizer_configs",
    ),
    decorated(
        "refusal: a field that no table knows",
        "a field that upstream adds is taken for harmless",
        "megatron_training.option_check._check",
        "lambda f: lambda name, value, defaults, rule, **k: rule and f(name, value, defaults, rule, **k)",
        f"{_TESTS}_table.py::test_what_upstream_may_add",
    ),
)
