"""Faults of what follows a joint search: coordinate descent, values of single tensors of torch models, the predicted
loss. mutants.py has the list of all.
"""

from __future__ import annotations

from tests.mutants.mutant import mutant as _mutant

_DESCENT = "mup_megatron/tuning/descent.py"
_PER_TENSOR = "mup_megatron/mup/per_tensor.py"
_PREDICTED = "mup_megatron/tuning/predicted.py"
_LADDER = "mup_megatron/proof/ladder.py"

TUNING = (
    _mutant(
        "descent: every lower loss is taken",
        "a value moves by what is noise of seeds",
        _DESCENT,
        "if not before - after > 2 * self.noise * math.sqrt(2 / len(losses)):",
        "if not before - after > 0:",
        "tuning/test_descent.py::test_what_is_within_noise_does_not_move",
    ),
    _mutant(
        "descent: one seed decides",
        "the better side is not repeated before it takes the place",
        _DESCENT,
        "for seed in self.seeds[1:]]",
        "for seed in self.seeds[:0]]",
        "tuning/test_descent.py::test_the_sequence_by_hand",
    ),
    _mutant(
        "descent: rounds of one step",
        "a second round tries what the first one has tried",
        _DESCENT,
        "self.descent.factor ** (0.5**number)",
        "self.descent.factor",
        "tuning/test_descent.py::test_the_second_round_takes_smaller_steps",
    ),
    _mutant(
        "descent: the embedding's rate waits",
        "the runs are spent on other values before the one that moves a model most",
        _DESCENT,
        "(name != first, split_name(name) is None)",
        "(name == first, split_name(name) is None)",
        "tuning/test_descent.py::test_the_embedding_s_rate_comes_first",
    ),
    _mutant(
        "set_per_tensor: a checkpoint's weights are scaled",
        "`rescale=False` multiplies the values that are there",
        _PER_TENSOR,
        "if rescale and said.init != 1.0:",
        "if said.init != 1.0:",
        "mup/test_per_tensor.py::test_weights_of_a_checkpoint_stay",
    ),
    _mutant(
        "set_per_tensor: the last entry counts",
        "a tensor that two entries name has the factors of one",
        _PER_TENSOR,
        "found[name] = _product(name, found.get(name, PerTensor()), said)",
        "found[name] = said",
        "mup/test_per_tensor.py::test_rates_and_decays_by_hand",
    ),
    _mutant(
        "set_per_tensor: an entry of nothing",
        "a pattern that names no parameter is let through",
        _PER_TENSOR,
        "if not named:",
        "if False:",
        "mup/test_per_tensor.py::test_bad_input",
    ),
    _mutant(
        "predicted: of any text",
        "a loss is told of a target whose text is another than the ladder's",
        _PREDICTED,
        "here = json.loads(json.dumps(measured(config)))",
        "here = found.measured",
        "tuning/test_fitted.py::test_a_loss_that_is_not_comparable_is_not_predicted",
    ),
    _mutant(
        "predicted: counted from the largest rung",
        "the law is asked for a run that is smaller than the target",
        _PREDICTED,
        "getattr(found.span, axis).own)",
        "getattr(found.span, axis).largest)",
        "tuning/test_fitted.py::test_the_loss_is_predicted",
    ),
    _mutant(
        "predicted: one standard error",
        "a loss inside the interval that is shown is said to be outside",
        _PREDICTED,
        "if abs(reached - loss) <= 2 * error",
        "if abs(reached - loss) <= error",
        "tuning/test_fitted.py::test_predicted_beside_measured",
    ),
    _mutant(
        "predicted: of any depth",
        "a loss is told of a target whose layers the ladder never varied",
        _PREDICTED,
        'if {"layers", "power_of_layers"} & law.terms.keys():',
        "if law.terms:",
        "tuning/test_fitted.py::test_a_ladder_over_layers_predicts_another_depth",
    ),
    _mutant(
        "ladder: rates for decays",
        "a ladder over the decay trains each of its values as a rate",
        _LADDER,
        '{f"hparams.{self._over}": value,',
        '{"hparams.lr": value,',
        "proof/test_ladder.py::test_what_is_varied",
    ),
)
