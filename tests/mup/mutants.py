"""Faults of µP for plain torch models."""

from __future__ import annotations

from tests.mutants.mutant import mutant

_LOSSES = "mup/test_mup.py::test_groups_and_losses"

MUTANTS = (
    mutant(
        "torch: Hugging Face's softmax scale",
        "the head size of the base does not reach the query projection",
        "mup.hugging_face._softmax",
        "base.head_dim / attention.head_dim",
        "attention.scaling / base.scaling",
        "mup/test_prepare_hf.py::test_values_and_rates_by_hand",
    ),
    mutant(
        "torch: MuReadout without A",
        "logits are not divided by the width ratio",
        "mup.layer.MuReadout.forward",
        "self.width_mult()",
        "1.0",
        _LOSSES,
    ),
    mutant(
        "torch: MuSGD's vectors",
        "vectors keep the base's rate under SGD",
        "mup.infshape.InfShape.ratios",
        "Ratios(m_outs={None: self.main.ratio}, folded=self.folded)",
        "Ratios()",
        _LOSSES,
    ),
    mutant(
        "torch: decay in MuAdam",
        "decay is not multiplied back",
        "mup.optim.split_groups",
        "formulas.weight_decay('independent', lr)",
        "formulas.ONE",
        _LOSSES,
    ),
    mutant(
        "audit: a plain model's update is not compared",
        "a step that has a rate of its own passes",
        "mup.auditing.ModelAudit.end_step",
        "judged_update(name, sums, error)",
        "judged_update(name, [0.0, 1.0, 1.0, 1.0])",
        "mup/test_auditing.py::test_a_planted_fault_is_named",
    ),
    mutant(
        "audit: groups behind the first step",
        "a scheduler that sets one rate behind the first step passes",
        "audit.first_steps.FirstSteps._before",
        "questions.ask_groups()",
        "None",
        "mup/test_auditing.py::test_a_planted_fault_is_named",
    ),
    mutant(
        "torch: a gate that is a MuReadout",
        "its multiplier is lost in silence",
        "mup.foreign.check_gates",
        "isinstance(gate, MuReadout)",
        "False",
        "deepspeed/test_deepspeed_initialize.py::test_a_gate_that_is_a_readout",
    ),
)
