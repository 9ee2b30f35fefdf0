"""What a reader of a transfer record must know of the choice in it, in words. Public names: `remarks`, `to_check`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mup_megatron.tuning.objective import LOSS, Objective, objective_of
from mup_megatron.tuning.outcome import open_sides
from mup_megatron.tuning.record import DescentRecord, MoveRecord, StudyRecord
from mup_megatron.tuning.recording import not_transferred
from mup_megatron.tuning.space import short


def remarks(study: StudyRecord, extrapolated: Sequence[str]) -> list[str]:
    """What a reader of the record must know of the choice, in words.

    Args:
        study: the record's.
        extrapolated: where the target at hand leaves what was tuned on.
    """
    said = [] if study.noise is None else [_noise(study)]
    said += _moves(study.descent, objective_of(study.objective)) if study.descent is not None else []
    return to_check(study, extrapolated) + said


def to_check(study: StudyRecord, extrapolated: Sequence[str]) -> list[str]:
    """Where the choice may be wrong, in words, with the arguments of `remarks`; empty where nothing stands out."""
    said = [line for name in study.interior for line in _open(study, name)]
    said += [_noise(study)] if study.noise is None else []
    said += [f"extrapolated, {line}" for line in extrapolated]
    return said + not_transferred(study.interior)


def _open(study: StudyRecord, name: str) -> list[str]:
    """Where a better value may lie beyond those that were tried, in words."""
    # The record says of each of them that it is a number.
    value, *tried = [
        float(values[name]) for values in (study.values, *(each.values for each in study.trials if each.values))
    ]
    said = []
    for side in open_sides(value, tried, study.ranges[name]):
        adjective = "largest" if side.above else "smallest"
        if side.at_end:
            where = "at the upper end" if side.above else "at the lower end"
            said.append(
                f"{name}: {value:.3g} is {where} of the range that was searched; a wider one may hold better ones"
            )
            continue
        tells = (
            f"is the {adjective} that was tried"
            if side.reach == value
            else f"is next to the {adjective} that was tried, {side.reach:.3g}"
        )
        said.append(f"{name}: {value:.3g} {tells}, and the range goes on to {side.end:.3g}, where nothing was tried")
    return said


def _noise(study: StudyRecord) -> str:
    """Which other trials cannot be told from the chosen one, in words."""
    noise, candidates = study.noise, study.candidates
    if noise is None:
        return "no repetition with other seeds: how much of a difference is noise is not known"
    chosen, repeated = candidates[0], sum(len(candidate.losses) - 1 for candidate in candidates)
    objective = objective_of(study.objective)
    unit = "" if objective is LOSS else f" {objective.name}"
    measured = f"±{noise:.{objective.digits}f}{unit} per run, from {repeated} repetition{'s' if repeated > 1 else ''}"
    among = {candidate.slot for candidate in candidates}
    once = [
        trial for trial in study.trials if trial.state == "complete" and not trial.repeats and trial.slot not in among
    ]
    alike = {candidate.slot for candidate in candidates if candidate.within_noise}
    bound = 2 * noise * math.sqrt(1 + 1 / len(chosen.losses))
    alike |= {trial.slot for trial in once if trial.loss is not None and trial.loss - chosen.mean < bound}
    if len(candidates) == 1 and not once:
        return f"no other trial ran to its end, so none can be told from noise ({measured})"
    single = f"; {len(once)} of those compared ran once" if once else ""
    if alike:
        names = ", ".join(f"trial-{slot:03d}" for slot in sorted(alike))
        return f"within noise of the chosen trial ({measured}{single}): {names}"
    return f"of the trials that ran to their end no other is within noise of the chosen one ({measured}{single})"


def _moves(descent: DescentRecord, objective: Objective) -> list[str]:
    """What coordinate descent moved, in words.

    Args:
        descent: of a record's study.
        objective: what its trials are compared by.
    """
    runs = f"coordinate descent, {descent.count} runs"
    if descent.noise is None:
        return [f"{runs}: no repetition of the best trial ended, so what is beyond noise is not known"]
    said = [
        f"{runs}: {move.name} from {short(move.before)} to {short(move.after)}{_factor(move)}, "
        f"{objective.name} {objective.text(move.loss_before)} to {objective.text(move.loss_after)}"
        for move in descent.moves
    ]
    none = f"{runs}: no single value was better beyond noise (±{descent.noise:.{objective.digits}f} per run)"
    spent = "coordinate descent ended at tuning.descent.trials, before every hyperparameter had its turn"
    return (said or [none]) + [spent] * (descent.ended == "trials")


def _factor(move: MoveRecord) -> str:
    before, after = move.before, move.after
    if isinstance(before, str) or isinstance(after, str) or before <= 0:
        return ""
    return f" (×{after / before:.3g})"
