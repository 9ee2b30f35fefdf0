"""Faults of exports, imports, and of runs that begin with another's weights."""

from __future__ import annotations

from tests.mutants.mutant import mutant

_REFUSED = "convert/test_import_refused.py"

MUTANTS = (
    mutant(
        "export: attention's factor on keys and values",
        "all rows of the fused QKV take the queries' factor",
        "convert.export.fold.fold",
        "query if block == 'query' else 1.0",
        "query",
        "convert/test_fold.py::test_untied",
    ),
    mutant(
        "export: the embedding's factor in a tied head",
        "the head is the embedding, and its factor is not taken out again",
        "convert.export.fold.fold",
        "forward.readout / forward.embedding",
        "forward.readout",
        "convert/test_fold.py::test_tied_with_biases",
    ),
    mutant(
        "export: attention's factor in cross-attention",
        "the queries of an encoder-decoder's cross-attention keep 1/sqrt(d)",
        "convert.export.fold.fold",
        "('.linear_q', '.linear_q_proj', '.linear_q_up_proj')",
        "('.linear_q_proj', '.linear_q_up_proj')",
        "convert/test_encoders.py::test_the_exported_model_is_the_checkpoints[t5]",
    ),
    mutant(
        "export: a factor without a place",
        "a tied head without a final norm loses its factor in silence",
        "convert.export.fold.fold",
        "'final_layernorm' in model.without_norms",
        "False",
        "convert/test_fold.py::test_a_tied_head_without_a_final_norm",
    ),
    mutant(
        "export: a half-written folder",
        "what an export that failed has written stays, and the next one takes it over",
        "convert.export.folder.new_folder",
        "shutil.rmtree(partial, ignore_errors=True)",
        "None",
        "convert/test_folder.py::test_whole_or_not_at_all",
    ),
    mutant(
        "rebase: epsilon",
        "a weight takes a factor, and Adam's epsilon moves the wrong way",
        "convert.reexpress._carried",
        "before.eps / theta",
        "before.eps * theta",
        "convert/test_rebase.py::test_by_hand",
    ),
    mutant(
        "import: tensors too many",
        "a tensor of the source that the model does not have is left out in silence",
        "convert.importing.hugging_face._check_names",
        "name.endswith(_BUFFERS)",
        "True",
        f"{_REFUSED}::test_what_is_refused[more]",
    ),
    mutant(
        "import: checksums",
        "files that are not those that were exported are taken",
        "convert.importing.weights.check_sums",
        "mismatch(folder, sums)",
        "None",
        f"{_REFUSED}::test_checksums_beside_it[flip_a_bit]",
    ),
    mutant(
        "import: logits",
        "a model that computes something else is taken",
        "convert.importing.check.compare",
        "not found <= BOUND",
        "False",
        f"{_REFUSED}::test_logits_are_compared",
    ),
    mutant(
        "init-from: another base",
        "weights go on at the rates of a base that they were not trained with",
        "convert.init_from._check_base",
        "before != base and name not in start.left_out",
        "False",
        "convert/test_init_from.py::test_another_model_is_refused",
    ),
)
