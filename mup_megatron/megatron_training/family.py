"""Whether a transfer record belongs to the family of a run of megatron.training.

Public names: `check_family`, `MULTIPLE`.
"""

from __future__ import annotations

from pathlib import Path

from mup_megatron.config import Config, derive
from mup_megatron.tuning.record import TransferRecord
from mup_megatron.util.errors import UserError

MULTIPLE = "make_vocab_size_divisible_by"
"""The key of `model:` by which the vocabulary is padded."""


def check_family(path: Path, config: Config) -> TransferRecord:
    """Whether a transfer record belongs to the family of this run.

    Two keys may differ. A tokenizer that the tuning run trained has no path in the record. Two values of
    make_vocab_size_divisible_by may pad the vocabulary to the same number of rows.

    Returns:
        The record.

    Raises:
        UserError: the record belongs to another family, and says which keys differ; or a ladder's exponents are to move
            its values, which a script's run does not do.
    """
    record = TransferRecord.expect(path, None)
    for name in ("batch", "tokens"):
        rule = str(record.rules.get(name, "none"))
        if rule.startswith("fitted"):
            raise UserError(
                f"{path}: parametrization.{name} is {rule}, by which its values move with batch and tokens, and a run "
                "of megatron.training does not move them; expected a record that was tuned without that rule"
            )
    loaded = config.data.tokenizer.library in ("huggingface", "tiktoken")
    if not loaded and record.family.get("data.tokenizer.path") is None:
        config = derive(config, {"data.tokenizer.path": None})
    multiple, entries = record.family.get(f"model.{MULTIPLE}"), config.vocab_size or 0
    if isinstance(multiple, int) and multiple > 0:
        padded = derive(config, {f"model.{MULTIPLE}": multiple})
        if padded.model.padded_vocab_size(entries) == config.model.padded_vocab_size(entries):
            config = padded
    return TransferRecord.expect(path, config)
