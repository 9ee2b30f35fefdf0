"""Faults of what is read from files, and of what is shown of them."""

from __future__ import annotations

from tests.mutants.mutant import mutant

MUTANTS = (
    mutant(
        "guard: pipes as files",
        "a pipe is read as a file",
        "util.files._check_kind",
        "kind != stat.S_IFREG",
        "kind not in (stat.S_IFREG, stat.S_IFIFO)",
        "util/test_regular_files.py::test_the_command_on_a_pipe",
    ),
    mutant(
        "secret: a storage's options",
        "an option of a URL that may hold a secret is accepted, and written into every file of the run",
        "util.secrets.url_problem",
        "name not in options",
        "False",
        "util/test_secrets.py::test_an_option_is_refused_by_its_name",
    ),
    mutant(
        "secret: behind percent signs",
        "a secret behind percent signs is shown",
        "util.secrets._masked",
        "decoded != text",
        "False",
        "util/test_secrets.py::test_what_percent_signs_hide_is_masked",
    ),
)
