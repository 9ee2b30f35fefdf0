"""Faults of the training loop."""

from __future__ import annotations

from tests.mutants.mutant import mutant

MUTANTS = (
    mutant(
        "loop: the last step is not saved",
        "a run whose length is no multiple of the interval ends without evaluation and checkpoint",
        "train.loop.Loop._is_due",
        "done == self._training.train_steps",
        "False",
        "train/test_loop.py::test_hooks_hear_everything_in_order[None]",
    ),
    mutant(
        "loop: goes on with a loss that is no number",
        "a run that diverged writes its weights over the last good checkpoint",
        "train.loop.Loop._tell",
        "math.isfinite(step.loss)",
        "True",
        "train/test_train.py::test_divergence_is_said",
    ),
    mutant(
        "loop: a checkpoint before its step is looked at",
        "weights of a loss that is no number are written over the last good checkpoint",
        "train.loop.Loop.run",
        "evaluates or saves or done == self._training.train_steps",
        "False",
        "train/test_loop.py::test_hooks_hear_everything_in_order[None]",
    ),
    mutant(
        "loop: each step waits for its loss",
        "a GPU stands still between two steps",
        "engines.megatron.MegatronEngine._run",
        "total / (layout.data * layout.context)",
        "torch.as_tensor(float(total) / (layout.data * layout.context))",
        "train/test_loop.py::test_no_step_waits_for_the_device[megatron-changed2]",
    ),
)
