"""Faults of the training loop."""

from __future__ import annotations

from tests.mutants.mutant import mutant

MUTANTS = (
    mutant(
        "loop: cycles wait",
        "what reference cycles hold of a step's tensors is not freed before a million new objects",
        "parallel.runtime.start_distributed",
        "collector.as_usual()",
        "None",
        "train/test_loop.py::test_hooks_hear_everything_in_order[None]",
    ),
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
    mutant(
        "saver: what is written is no copy",
        "a checkpoint in the background holds what later steps made of the weights",
        "engines.state._copy",
        'value.detach().to("cpu", copy=True)',
        "value.detach().cpu()",
        "train/test_saving.py::test_it_is_what_a_run_that_waits_writes[deepspeed, one process]",
    ),
    mutant(
        "loop: the end does not wait for the checkpoint",
        "a run ends, and the checkpoint that is being written never becomes whole",
        "train.loop.Loop.run",
        "stack.enter_context(self._finishing())",
        "None",
        "train/test_saving.py::test_a_run_ends_with_its_checkpoints_whole[goes on]",
    ),
)
