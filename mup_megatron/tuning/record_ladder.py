"""A ladder put into a transfer record that was made before it: `ladder --record`. Public names: `record_of`, `keep`."""

from __future__ import annotations

from pathlib import Path

from mup_megatron.config import Config, derive
from mup_megatron.tuning.fitted import ladder_of
from mup_megatron.tuning.record import TransferRecord, write_record
from mup_megatron.util.errors import UserError, no_such_file


def record_of(path: Path, config: Config) -> TransferRecord:
    """The record that a ladder of this config is put into.

    Raises:
        UserError: no such file, damaged, or of another family; says which keys differ.
    """
    # Without the rules that wait for the ladder: the ladder's config need not have the batch and tokens of trials.
    off = {f"parametrization.{axis}": "none" for axis in config.parametrization.fitted}
    found = TransferRecord.read(path, derive(config, off))
    if found is None:
        raise UserError(f"--record: {no_such_file(path)}; expected the transfer record of this family")
    return found


def keep(path: Path, config: Config, measured: Path) -> str:
    """Puts a ladder into a record: exponents, span, verdict, law of the loss, and the numbers of its fitted rules.

    A ladder whose laws did not hold is left out, unless `tuning.allow_failed_ladder`: the record stays as it is.

    Args:
        path: of the record.
        config: of the ladder.
        measured: the ladder.json.

    Returns:
        What was done, in words.

    Raises:
        UserError: of `record_of`, or the file is no ladder of this family.
    """
    record = record_of(path, config)
    ladder = ladder_of(derive(config, {"tuning.ladder": str(measured)}), None)
    if ladder is None:
        raise ValueError(f"{measured}: no ladder")
    if ladder.verdict != "passed" and not config.tuning.allow_failed_ladder:
        return f"{path}: stays as it was, since the ladder did not pass; tuning.allow_failed_ladder=true puts it in"
    rules: dict[str, str] = {
        axis: f"fitted:{ladder.exponents[axis].exponent:.4f}"
        for axis in ("batch", "tokens")
        if axis in ladder.exponents and str(record.rules.get(axis)).startswith("fitted")
    }
    changed = {**dict(record), "ladder": ladder, "rules": {**record.rules, **rules}}
    write_record(path, TransferRecord.model_validate(changed))
    return f"{path}: holds the ladder now; configs of its family need not name it (tuning.ladder)"
