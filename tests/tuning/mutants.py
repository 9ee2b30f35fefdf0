"""Faults of studies, of the transfer record, and of what a ladder tells."""

from __future__ import annotations

from tests.mutants.mutant import mutant

_SCALING = "tuning/test_scaling.py"
_RECORD = "tuning/test_record.py"
_STUDY = "tuning/test_study.py"
_LEASE = "tuning/test_lease.py"

MUTANTS = (
    mutant(
        "plan: a ring sends all of it",
        "that one of n parts is there already is forgotten",
        "tuning.scaling._ring",
        "(ranks - 1) / ranks",
        "1.0",
        f"{_SCALING}::test_what_ranks_send_and_compute",
    ),
    mutant(
        "plan: inputs are gathered once",
        "the backward pass gathers them no second time under sequence parallelism",
        "tuning.scaling.Stage._tensor",
        "(3, 2) if parts else (2, 1)",
        "(2, 2) if parts else (2, 1)",
        f"{_SCALING}::test_what_ranks_send_and_compute",
    ),
    mutant(
        "plan: experts' state over all replicas",
        "ranks that hold other experts share the optimizer's state of these",
        "parallel.layout.Layout.replicas",
        "self.expert * self.expert_tensor if expert else self.tensor",
        "self.tensor",
        "tuning/test_budget.py::test_bytes_of_experts_by_hand",
    ),
    mutant(
        "record: of another family",
        "values of another family are transferred",
        "tuning.record._check_family",
        "record.digest == digest(settings)",
        "True",
        f"{_RECORD}::test_another_family_is_refused_with_the_keys_that_differ",
    ),
    mutant(
        "record: edited by hand",
        "its checksum is not compared",
        "tuning.record._plain",
        "record.get('checksum')",
        "digest({key: value for key, value in record.items() if key != 'checksum'})",
        f"{_RECORD}::test_edited_by_hand",
    ),
    mutant(
        "study: halving by arrival",
        "a trial is compared with whoever is there",
        "tuning.study.Study.survives",
        "all(step in other.reports or other.state in FINISHED for other in earlier)",
        "True",
        f"{_LEASE}::test_nobody_waits_for_a_trial_that_nobody_runs",
    ),
    mutant(
        "study: a lost trial is retried for ever",
        "a trial that kills its workers never fails",
        "tuning.storage.StudyStorage.lose",
        "times < most",
        "True",
        f"{_LEASE}::test_a_trial_that_takes_its_workers_with_it",
    ),
    mutant(
        "study: a lock that was taken already",
        "who replaces a killed writer does not look again whether another has",
        "tuning.journal_lock.JournalLock._replace",
        "self._holders() != [*gone, self._name]",
        "False",
        "tuning/test_journal_lock.py::test_of_two_that_wait_one_at_a_time_holds_it",
    ),
    mutant(
        "study: of other settings",
        "goes on with this config's",
        "tuning.study.Study._check",
        "found != self._decided",
        "False",
        f"{_STUDY}::test_a_study_of_other_settings_is_refused",
    ),
    mutant(
        "study: repetitions do not count",
        "the candidate with the best single loss is chosen",
        "tuning.outcome._in_order",
        "lambda candidate: (len(candidate.losses) < most, candidate.mean, candidate.slot)",
        "lambda candidate: (len(candidate.losses) < most, candidate.losses[0], candidate.slot)",
        "tuning/test_outcome.py::test_the_choice_by_hand",
    ),
    mutant(
        "fitted: a failed ladder",
        "exponents are taken of laws that did not tell the largest rung",
        "tuning.fitted._check_verdict",
        "found.verdict == 'passed'",
        "True",
        "tuning/test_fitted.py::test_a_ladder_that_did_not_pass_is_refused",
    ),
    mutant(
        "predicted: of any text",
        "a loss is told of a target whose text is another than the ladder's",
        "tuning.predicted.predicted",
        "differences(there, here, 'in the ladder', 'in the config')",
        "[]",
        "tuning/test_fitted.py::test_a_loss_that_is_not_comparable_is_not_predicted",
    ),
    mutant(
        "megatron: another run than was asked for",
        "a run of the target's size in a trial's place is not noticed",
        "tuning.megatron_task._same",
        "one == other",
        "True",
        "megatron_training/test_megatron_tune.py::test_another_run_than_was_asked_for",
    ),
    mutant(
        "abreast: whatever it brings",
        "twice as many trials at a time stay although they are no faster together",
        "tuning.abreast.Abreast._decide",
        "(_GAIN - 1) * (count / before[0] - 1)",
        "-1",
        "tuning/test_abreast.py::test_the_number_is_found",
    ),
)
