"""`./dev mutants`: breaks the code in one small way after the other, and looks whether the tests notice.

Each mutant of tests/*/mutants.py is put into a copy of the tree, and the tests that must catch it run there. It is
caught where a test that passes on the unbroken tree fails, and fails because it compared something: a test that dies of
AttributeError or the like has compared nothing, and does not count. A mutant whose tests are all skipped here is left
out. Exit status 0 where all others are caught, else 1.

    python -m tests.mutants.mutate [NAME-PART ...] [--json FILE] [--write docs/reports/mutants.md] [--trust]

Why no mutation tool of others: cosmic-ray and mutmut change operators and constants one at a time, some 20,000 in this
package, each with a start-up of torch, megatron-core and DeepSpeed; what a reader wants to know is whether a named rule
can be lost. Processes are forked from one that has imported those three, which makes a mutant cost its tests.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.mutants.mutant import REPOSITORY, Mutant, all_mutants, mutated, place

SECONDS = 240
# What a test raises that has compared nothing: it crashed on the way.
CRASHES = (
    *("AttributeError", "FileExistsError", "FileNotFoundError", "ImportError", "IndexError", "KeyError"),
    *("ModuleNotFoundError", "NameError", "SyntaxError", "TypeError", "UnboundLocalError"),
)


class Failures:
    """A pytest plugin: what failed, and of what."""

    def __init__(self) -> None:
        self.found: list[dict[str, str]] = []
        self.passed = 0

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        """Notes an exception of a test or of its fixtures."""
        if call.excinfo is None:
            self.passed += call.when == "call"
        elif not call.excinfo.errisinstance(_skipped()):
            kind, text = call.excinfo.type.__name__, str(call.excinfo.value)
            raised = [line for line in text.splitlines() if line.split(":")[0].rpartition(".")[2] in CRASHES]
            if kind == "RankError" and raised:  # a rank's traceback ends with what the rank raised
                kind = raised[0].split(":")[0].rpartition(".")[2]
            lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
            said = lines[-1 if call.excinfo.type.__name__ == "RankError" else 0]
            self.found.append({"test": item.nodeid, "kind": kind, "text": said[:200], "when": call.when})


def _skipped() -> type[BaseException]:
    import pytest

    return pytest.skip.Exception


def copy_of_the_tree(folder: Path) -> Path:
    """Every file that git knows or would take, links as links."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        check=True,
    ).stdout
    for name in filter(None, listed.decode().split("\0")):
        source, target = REPOSITORY / name, folder / name
        if source.is_symlink() or source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    return folder


@contextlib.contextmanager
def broken(tree: Path, fault: Mutant) -> Iterator[None]:
    """Has the tree's code hold a fault."""
    path, name = place(tree, fault.symbol)
    text = path.read_text()
    path.write_text(mutated(text, name, fault))
    try:
        yield
    finally:
        path.write_text(text)


def run_tests(tree: Path, tests: Sequence[str], *, first: bool) -> dict[str, Any]:
    """Runs tests of a tree in a forked process; failures, tests passed, seconds. `first` stops at the first failure.

    Processes of the tests have the tree's code too; what takes longer than SECONDS a selection is ended.
    """
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as answer:
        process = os.fork()
        if process == 0:
            os.setsid()
            _in_the_fork(tree, tests, first, answer)
        status = _wait(process, SECONDS * len(tests))
        answer.seek(0)
        text = answer.read()
    seconds = round(time.monotonic() - began, 1)
    if not text:
        why = "took too long" if status is None else f"pytest ended with {status}"
        return {"failures": [_none(why)], "passed": 0, "seconds": seconds}
    return {**json.loads(text), "seconds": seconds}


def _none(why: str) -> dict[str, str]:
    return {"test": "", "kind": "none", "text": why, "when": "call"}


def _in_the_fork(tree: Path, tests: Sequence[str], first: bool, answer: Any) -> None:
    import pytest

    os.chdir(tree)
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]
    sys.path[:] = [str(tree), *(part for part in sys.path if Path(part or ".").resolve() != REPOSITORY)]
    os.environ["PYTHONPATH"] = str(tree)
    sys.dont_write_bytecode = True  # a mutant has the size and, within a second, the time of the file before it
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    printed = tempfile.TemporaryFile("w+")  # noqa: SIM115
    for number in (1, 2):
        os.dup2(printed.fileno(), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    plugin = Failures()
    words = [*tests, "-q", "-p", "no:cacheprovider", "--rootdir", str(tree), *(["-x"] if first else [])]
    try:
        ended = pytest.main(words, plugins=[plugin])
        if not plugin.found and ended not in (0, 1):
            sys.stdout.flush()
            printed.seek(0)
            wrong = [line for line in printed.read().splitlines() if line.startswith("ERROR")]
            plugin.found.append(_none("; ".join(wrong) or f"pytest ended with {ended!r}"))
    except BaseException as error:  # the fork must not go on with its parent's work
        plugin.found.append(_none(repr(error)))
    json.dump({"failures": plugin.found, "passed": plugin.passed}, answer)
    answer.flush()
    os._exit(0)


def _wait(process: int, seconds: float) -> int | None:
    """Exit status; None where it was ended for taking too long. Whatever the tests started ends with it."""
    end = time.monotonic() + seconds
    status = None
    while time.monotonic() < end:
        ended, code = os.waitpid(process, os.WNOHANG)
        if ended:
            status = os.waitstatus_to_exitcode(code)
            break
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)
    if status is None:
        os.waitpid(process, 0)
    return status


def verdict(result: dict[str, Any], wrong_before: set[str]) -> dict[str, Any]:
    """Whether a mutant was caught: the failure that did, or why none did.

    Args:
        result: of `run_tests` on the mutant.
        wrong_before: tests that fail on the unbroken tree too.
    """
    failures = [failure for failure in result["failures"] if failure["test"] not in wrong_before and failure["test"]]
    compared = [failure for failure in failures if failure["kind"] not in CRASHES and failure["when"] == "call"]
    if compared:
        return {"caught": True, **compared[0]}
    if failures:
        return {"caught": False, **failures[0], "text": f"crashed before it compared: {failures[0]['text']}"}
    said = next((failure["text"] for failure in result["failures"]), f"{result['passed']} tests passed")
    return {"caught": False, "test": "", "kind": "", "text": said}


def main(arguments: Sequence[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="./dev mutants", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", help="Mutants whose names contain one of these; all if none is given.")
    parser.add_argument("--json", metavar="FILE", help="Write the outcome of each.")
    parser.add_argument("--write", metavar="FILE", help="Put the outcomes into a page (docs/reports/mutants.md).")
    parser.add_argument("--trust", action="store_true", help="Do not run the tests on the unbroken tree first.")
    parsed = parser.parse_args(arguments)
    chosen = [each for each in all_mutants() if not parsed.names or any(part in each.name for part in parsed.names)]
    if not chosen:
        print("mutants: no mutant has such a name", file=sys.stderr)
        return 2
    _warm()
    with tempfile.TemporaryDirectory(prefix="mup-mutants-") as folder:
        tree = copy_of_the_tree(Path(folder) / "tree")
        wrong: set[str] = set()
        if not parsed.trust:
            print(f"{len(chosen)} mutants; their tests on the unbroken tree first", flush=True)
            before = run_tests(tree, sorted({test for mutant in chosen for test in mutant.tests}), first=False)
            for failure in before["failures"]:
                print(f"unbroken: {failure['test']}: {failure['text']}", file=sys.stderr)
                if not failure["test"]:
                    return 2
                wrong.add(failure["test"])
        outcomes = []
        for number, mutant in enumerate(chosen, 1):
            with broken(tree, mutant):
                result = run_tests(tree, mutant.tests, first=True)
            outcome = {
                "name": mutant.name,
                "what": mutant.what,
                "symbol": mutant.symbol,
                "seconds": result["seconds"],
                "here": bool(result["passed"] or result["failures"]),
                **verdict(result, wrong),
            }
            outcomes.append(outcome)
            said = ("caught by" if outcome["caught"] else "SURVIVES") if outcome["here"] else "left out: tests skipped"
            print(
                f"[{number}/{len(chosen)}] {mutant.name}: {said} {outcome['test']} ({outcome['text'][:90]})", flush=True
            )
    run = [outcome for outcome in outcomes if outcome["here"]]
    survivors = [outcome["name"] for outcome in run if not outcome["caught"]]
    print(f"{len(run) - len(survivors)} of {len(run)} mutants caught in {sum(each['seconds'] for each in run):.0f} s")
    for name in survivors:
        print(f"survives: {name}")
    if parsed.json:
        Path(parsed.json).write_text(json.dumps(outcomes, indent=1))
    if parsed.write:
        Path(parsed.write).write_text(page(run, Path(parsed.write).read_text()))
    return 1 if survivors else 0


ROW = re.compile(r"^\| `(.*?)` \| .* \| (.*?) \| .* \| ([\d.]+) s, .* \|$", re.MULTILINE)
"""A mutant of the page: its name, its symbol, its seconds."""


def page(outcomes: Sequence[dict[str, Any]], before: str) -> str:
    """docs/reports/mutants.md.

    Args:
        outcomes: of what has run.
        before: the page so far, whose rows of other mutants stay.
    """
    import importlib.metadata as metadata
    import platform

    when = f"{time.strftime('%Y-%m-%d')}, Python {'.'.join(platform.python_version_tuple()[:2])}"
    rows = {found[1]: found[0] for found in ROW.finditer(before)}
    for one in outcomes:
        said = f"`{one['test']}`: {_cell(one['text'])}" if one["caught"] else f"**survives**: {_cell(one['text'])}"
        shown = (f"`{one['name']}`", _cell(one["what"]), one["symbol"], said, f"{one['seconds']} s, {when}")
        rows[one["name"]] = f"| {' | '.join(shown)} |"
    kept = [rows[mutant.name] for mutant in all_mutants() if mutant.name in rows]
    caught = sum("**survives**" not in row for row in kept)
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "megatron-core", "deepspeed"))
    return (
        "# Mutants\n\n"
        "Each row is one small fault that somebody could make in the code, put into a copy of the tree; then the "
        "tests that must notice it run.\nA mutant counts as caught where a test that passes on the unbroken tree fails "
        "because it compared something; a test that\ncrashes before it compares does not count. The faults are in "
        "mutants.py of the tests' folder of each room;\n"
        "[mutate.py]"
        "(../../tests/mutants/mutate.py) runs them, and says in the last column when it did, and how long "
        f"the tests took.\n\nMade by `./dev mutants` ({versions}): {caught} of {len(kept)} caught.\n\n"
        "| mutant | what is lost | symbol | caught by, and what the test said | seconds |\n"
        "| --- | --- | --- | --- | --- |\n" + "".join(f"{row}\n" for row in kept)
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")[:140]


def _warm() -> None:
    """Imports what takes long, and nothing of this package, which every mutant has a version of."""
    import warnings

    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed  # noqa: F401
        import megatron.core.models.gpt.gpt_model  # noqa: F401
        import optuna  # noqa: F401
        import pytest  # noqa: F401
    wrong = [name for name in sys.modules if name.split(".")[0] == "mup_megatron"]
    assert not wrong, wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
