"""Mutants of what is read from files and shown of them. Public name: `INPUT`."""

from __future__ import annotations

from tests.mutant import mutant as _mutant

_SECRETS = "mup_megatron/secrets.py"
_FILES = "mup_megatron/files.py"

INPUT = (
    _mutant(
        "guard: pipes as files",
        "a pipe is read as a file",
        _FILES,
        "if kind != stat.S_IFREG:",
        "if kind not in (stat.S_IFREG, stat.S_IFIFO):",
        "test_regular_files.py::test_the_command_on_a_pipe",
    ),
    _mutant(
        "guard: sizes of files",
        "a file of any size is read into memory",
        _FILES,
        "if most is not None and size > most:",
        "if False:",
        "test_regular_files.py::test_no_more_than_the_bound_is_read",
    ),
    _mutant(
        "guard: a storage's options",
        "an option of a URL that may hold a secret is accepted, and written into every file of the run",
        _SECRETS,
        "if name not in options:",
        "if False:",
        "test_secrets.py",
    ),
    _mutant(
        "guard: what an option of a storage holds",
        "a harmless option carries a secret behind encoded signs",
        _SECRETS,
        "if not _VALUE.fullmatch(value):",
        "if False:",
        "test_secrets.py",
    ),
    _mutant(
        "guard: malformed URLs are masked whole",
        "the URL of a database in no known form is shown",
        _SECRETS,
        '.replace(":***@", "@")) is not None:',
        '.replace(":***@", "@")) == "":',
        "test_secrets.py",
    ),
    _mutant(
        "guard: masks decode first",
        "a secret behind percent signs is shown",
        _SECRETS,
        "if decoded != text and",
        "if False and",
        "test_secrets.py::test_what_percent_signs_hide_is_masked",
    ),
)
