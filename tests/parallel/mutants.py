"""Faults of how ranks share a model and a batch."""

from __future__ import annotations

from tests.mutants.mutant import mutant

_LAYOUT = "engines/setup/test_layout.py"

MUTANTS = (
    mutant(
        "layout: data rank under context parallelism",
        "context-parallel ranks read data of their own",
        "parallel.layout.Layout.data_rank",
        "self.context",
        "1",
        f"{_LAYOUT}::test_context_parallel_ranks_read_the_same_data",
    ),
    mutant(
        "layout: chunks of a stage side by side",
        "interleaved stages hold consecutive layers",
        "parallel.stages._placed",
        "parts[stage::pipeline]",
        "parts[stage * (len(parts) // pipeline) :][: len(parts) // pipeline]",
        f"{_LAYOUT}::test_layers_of_stages_and_chunks",
    ),
    mutant(
        "layout: uneven batches",
        "a batch that the ranks cannot share",
        "parallel.layout._micro_batches",
        "config.training.global_batch_size % samples",
        "False",
        f"{_LAYOUT}::test_refused",
    ),
)
