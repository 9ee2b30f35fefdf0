"""Faults of text, of batches, and of the loss over them."""

from __future__ import annotations

from tests.mutants.mutant import mutant

MUTANTS = (
    mutant(
        "data: a short read goes on where it began",
        "a sample that the system reads in two parts has the first one twice",
        "data.exact_reads._OpenFile.read",
        "offset + read",
        "offset",
        "data/test_exact_reads.py::test_a_read_in_parts",
    ),
    mutant(
        "data: a cut loses a character",
        "where a text is cut into documents, the first character of the next one is gone",
        "data.corpus.cut",
        "start = end",
        "start = end + 1",
        "cli/test_own_text.py::test_where_a_text_is_cut",
    ),
    mutant(
        "data: replicas read the same samples",
        "every data-parallel rank trains on the first one's samples",
        "data.batches.Batches._micro_batch",
        "self._data_rank",
        "0",
        "data/test_data.py::test_global_batches_do_not_depend_on_the_layout",
    ),
    mutant(
        "data: loss averaged by micro-batch",
        "of pairs, a micro-batch with fewer labels weighs as much as one with more",
        "data.t5.T5Batch.loss",
        "len(self.labels) * self.mean_labels",
        "self.loss_mask.sum()",
        "data/test_pairs.py::test_the_loss_is_a_mean_over_the_global_batch",
    ),
)
