"""Faults of the audit: what it would not see."""

from __future__ import annotations

from tests.mutants.mutant import decorated, mutant

MUTANTS = (
    decorated(
        "audit: updates are not compared",
        "any update is right",
        "audit.update.judged_update",
        "lambda f: lambda *a: __import__('dataclasses').replace(f(*a), right=True)",
        "train/test_auditing.py::test_a_wrong_rate_stops_the_run",
    ),
    decorated(
        "audit: initial values of any size",
        "what a layer starts with may be twice as large",
        "audit.initial._bounds",
        "lambda f: lambda count: (0.0, 100.0)",
        "audit/test_audit.py::test_a_planted_fault_is_named[twice the size: TP 2, ZeRO 0]",
    ),
    decorated(
        "audit: multipliers of any size",
        "any forward multiplier is right",
        "audit.at_work._off",
        "lambda f: lambda *a: 0.0",
        "audit/test_at_work.py::test_a_planted_fault_is_named[some-TP 2]",
    ),
    decorated(
        "audit: matrices are not seen",
        "steps of Muon and SOAP are not compared",
        "audit.auditor.Auditor._direction",
        "lambda f: lambda *a: None",
        "audit/test_matrices.py::test_no_false_alarm[muon-llama-TP 2, Megatron, plain optimizer-{}]",
    ),
    mutant(
        "audit: query, key and value as one matrix",
        "a healthy step of Muon is called wrong",
        "audit.auditor.Auditor._direction",
        'getattr(parameter, "is_qkv", False)',
        "False",
        "audit/test_matrices.py::test_no_false_alarm[muon-llama-TP 2, Megatron, plain optimizer-{}]",
    ),
    decorated(
        "audit: inner layers are not seen",
        "a layer may lose what it multiplies with under unit scaling",
        "audit.at_work.AtWork._watch_layer_of",
        "lambda f: lambda *a: None",
        "audit/test_at_work.py::test_a_planted_fault_of_a_layer_is_named",
    ),
)
