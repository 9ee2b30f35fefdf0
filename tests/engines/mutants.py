"""Faults of optimizer groups, of gradient norms, and of the state that is saved."""

from __future__ import annotations

from tests.mutants.mutant import mutant

MUTANTS = (
    mutant(
        "groups: epsilon is lost",
        "every group has the optimizer's own epsilon",
        "engines.optim.parameter_groups",
        "group['eps'] = tensor.eps",
        "group['eps'] = parametrization.config.optimizer.eps",
        "engines/test_optim.py::test_groups",
    ),
    mutant(
        "groups: one rate",
        "the schedule sets the base's rate on every group",
        "engines.optim.set_learning_rates",
        "group['lr_multiplier']",
        "1.0",
        "engines/test_optim.py::test_ratios_never_move[cosine]",
    ),
    mutant(
        "groups: Megatron's decay",
        "megatron-core decays every group by the base's decay",
        "engines.optim.megatron_overrides",
        "tensor.weight_decay_multiplier",
        "1.0",
        "engines/test_parity.py::test_layout_changes_nothing[gpt3: PP 2, VPP 2, Megatron, plain optimizer]",
    ),
    mutant(
        "groups: Adam's decay is L2",
        "adamw builds torch's Adam",
        "engines.optim.build_optimizer",
        "torch.optim.AdamW if is_adamw else torch.optim.Adam",
        "torch.optim.Adam",
        "engines/test_optim.py::test_optimizers",
    ),
    mutant(
        "norm: a replicated gradient counts twice",
        "every tensor-parallel rank adds the gains' gradients",
        "model.parts.counts",
        "spec.partition_dim is None and layout.slice_of(spec, rank)[0] != 0",
        "False",
        "engines/test_gradient_norm.py::test_every_layout_clips_alike[gpt3-TP 2, PP 2, Megatron, plain optimizer]",
    ),
    mutant(
        "norm: a partition without its place",
        "a partition's rows are weighted as the tensor's first ones",
        "engines.gradient_norm._weighted",
        "local_rows(spec, weights, rank, ranks, squares.device)[first:last]",
        "local_rows(spec, weights, rank, ranks, squares.device)[: last - first]",
        "engines/test_gradient_norm.py::test_a_part_is_weighted_by_its_place",
    ),
    mutant(
        "fsdp2: rows cut short",
        "the last ranks would take rows of the ranks before them from a checkpoint",
        "engines.fully_sharded._first_row",
        "-(-rows // shared.device_mesh.size())",
        "rows // shared.device_mesh.size()",
        "engines/test_fully_sharded.py::test_rows_of_two_ranks",
    ),
    mutant(
        "checkpoint: strided slices",
        "gate|up is saved under another layout's offsets",
        "engines.state._shards",
        "own + number * slices",
        "own * spec.partition_stride + number",
        "engines/test_resume.py::test_pieces_of_gate_and_up_lie_where_the_whole_has_them",
    ),
    mutant(
        "guard: the index imports what it likes",
        "a pickle in the index of a checkpoint is executed",
        "engines.saved_weights._IndexUnpickler.find_class",
        "(module, name) in self._ALLOWED",
        "True",
        "checkpoints/test_checkpoint.py::test_pickles_of_unknown_origin_are_never_loaded",
    ),
)
