"""What goes wrong on the user's side: one clear sentence, exit status 2, no traceback.

Public names: `UserError`, `ConfigError`, `Held`, `DiskFull`; for what stands in sentences `shown`, `one_line`,
`no_such_file`.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from pathlib import Path, PurePath

from mup_megatron.util.secrets import masked, masked_value

_LONGEST = 2000
_MOST_LINES = 60


def one_line(text: str) -> str:
    """Text from a file as it can stand in a sentence: what is not printable is escaped."""
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


class _Short(reprlib.Repr):
    """Never longer than a line, whatever an anchor of YAML, or a list of a thousand, makes of a value."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict, self.maxlist, self.maxtuple, self.maxset = 2, 3, 4, 4, 4
        self.maxstring = self.maxother = 80

    def repr_str(self, x: str, level: int) -> str:
        """What may be a password must not be cut off before the sign that ends it."""
        return super().repr_str(masked_value(x), level)

    def repr_int(self, x: int, level: int) -> str:
        """Python itself refuses to write a number of more than 4300 digits."""
        return f"a number of {x.bit_length()} bits" if x.bit_length() > 128 else repr(x)

    def repr_bool(self, x: bool, level: int) -> str:
        """As YAML has it."""
        return "true" if x else "false"

    def repr_NoneType(self, x: None, level: int) -> str:
        """As YAML has it."""
        return "null"


_SHORT = _Short()


def shown(value: object) -> str:
    """A value in a sentence: as Python writes it, or YAML (null, true), cut short, escaped, secrets masked."""
    return one_line(_SHORT.repr(value))


def _cut(line: str) -> str:
    """The beginning, and the end, where often stands what was expected."""
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST * 3 // 4]} ... {line[-_LONGEST // 4 :]}"


class UserError(Exception):
    """Bad input.

    Whatever a file puts into it, it is short, control characters in it are escaped, and secrets are masked.

    Args:
        message: one sentence that names the file, the key and what was expected.
        table: further lines.
    """

    status = 2
    """Exit status of the command that it ends."""

    def __init__(self, message: str, table: Sequence[str] = ()) -> None:
        lines = [message, *table[:_MOST_LINES]]
        super().__init__("\n".join(_cut(one_line(masked(line))) for line in lines))


def no_such_file(path: str | PurePath, *others: Path) -> str:
    """A problem: the file is missing. A relative path is said with the folders that it was looked for in.

    Args:
        path: as it was given.
        others: folders that were tried after the working directory.
    """
    folders = () if PurePath(path).is_absolute() else (Path.cwd(), *others)
    return f"no such file: {path}" + (f" in {', '.join(map(str, folders))}" if folders else "")


class ConfigError(UserError):
    """A config that cannot be used.

    Args:
        key: dotted path of the offending key, e.g. ``model.hidden_size``; empty for the whole file.
        problem: what is wrong with it and what was expected.
        source: the config's file, when it is known where the error is raised.
    """

    def __init__(self, key: str, problem: str, source: str | None = None) -> None:
        self.key, self.problem, self.source = key, problem, source
        super().__init__(": ".join(part for part in (source, key, problem) if part))


class Held(UserError):
    """Another process holds what the command needs: nothing is wrong with the command, which works later."""

    status = 75  # EX_TEMPFAIL of sysexits.h: "the user is invited to retry"


class DiskFull(UserError):
    """Nothing more could be written. The message says what, where, and how much is missing (disk.py)."""
