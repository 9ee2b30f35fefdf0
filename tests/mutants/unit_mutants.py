"""Faults of weights at unit scale, and of the ranges that show them; mutants.py has the list of all."""

from __future__ import annotations

from tests.mutants.mutant import mutant as _mutant

_TABLE = "mup_megatron/rules/table.py"
_LAYER = "mup_megatron/model/layers/unit_scaling.py"
_SUMS = "mup_megatron/proof/sums.py"
_BITS = "rules/test_unit_scaling.py::test_to_the_last_bit"

UNIT = (
    _mutant(
        "unit: no forward multiplier",
        "weights are divided by θ and no linear layer multiplies by it",
        _LAYER,
        "output, bias = result[0] * theta, result[1]",
        "output, bias = result[0], result[1]",
        _BITS,
    ),
    _mutant(
        "unit: a tied head without θ",
        "a head that is the word embeddings is computed from the stored weights",
        _LAYER,
        "weight = WORD_EMBEDDINGS if tied and name == _HEAD else",
        "weight =",
        _BITS,
    ),
    _mutant(
        "unit: epsilon stays",
        "Adam's epsilon does not follow a gradient that is θ times as large",
        _TABLE,
        "eps=group.eps * theta,",
        "eps=group.eps,",
        _BITS,
    ),
    _mutant(
        "unit: decay stays",
        "rate times decay is 1/θ times what it was",
        _TABLE,
        "decay=group.weight_decay * theta**power",
        "decay=group.weight_decay",
        _BITS,
    ),
    _mutant(
        "unit: the norm of stored gradients",
        "clipping sees gradients that are θ times as large",
        "mup_megatron/engines/gradient_norm.py",
        "return squares.sum() / float(tensor.theta**2)",
        "return squares.sum()",
        _BITS,
    ),
    _mutant(
        "unit: SGD's rate with θ once",
        "rate/θ instead of rate/θ²",
        _TABLE,
        'group, power = self.group, 2 if self.group.update_rule == "sgd" else 1',
        "group, power = self.group, 1",
        "rules/test_unit_scaling.py::test_sgd_by_hand",
    ),
    _mutant(
        "ranges: shares of all numbers",
        "numbers that are 0 already make what a format loses look rare",
        _SUMS,
        "*(each / numbers if numbers else 0.0 for each in lost)",
        "*(each / count if count else 0.0 for each in lost)",
        "proof/test_ranges.py::test_shares_by_hand",
    ),
)
