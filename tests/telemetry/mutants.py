"""Faults of readings."""

from __future__ import annotations

from tests.mutants.mutant import mutant

_CELL = "telemetry/test_reading.py::test_the_same_numbers_in_every_layout"

MUTANTS = (
    mutant(
        "telemetry: each rank its own",
        "a reading has the sums of one rank alone",
        "telemetry.sums.Exchange.__init__",
        "torch.distributed.all_reduce(self._sums, async_op=True)",
        "torch.distributed.all_reduce(self._sums.clone(), async_op=True)",
        f"{_CELL}[gpt3-DP 2, Megatron, fsdp2 optimizer]",
    ),
    mutant(
        "telemetry: part of a sequence",
        "attention of context-parallel ranks is measured over the keys that one of them has",
        "telemetry.reading._whole_sequence",
        "ranks == 1",
        "True",
        f"{_CELL}[llama-CP 2, Megatron, plain optimizer]",
    ),
    mutant(
        "telemetry: gradients behind the update",
        "what is called a gradient is what clipping made of it",
        "engines.deepspeed.DeepSpeedEngine.step",
        "self.before_update()",
        "(self._clip(), self.before_update())",
        "telemetry/test_reading.py::test_a_gradient_is_measured_before_it_is_clipped",
    ),
)
