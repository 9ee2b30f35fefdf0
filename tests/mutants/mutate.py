"""`./dev mutants`: breaks the code in one small way after the other, and looks whether the tests notice.

Each mutant of listed.py, and of megatron_mutants.py where there is megatron.training, is put into a copy of the tree,
and the tests that must catch it run there. It is caught where a test that passes on the unbroken tree fails, and
fails because it compared something: a test that dies of AttributeError or the like has compared nothing, and does not
count. Exit status 0 where all are caught, else 1.

    python -m tests.mutants.mutate [NAME-PART ...] [--json FILE] [--write docs/reports/mutants.md]

Why no mutation tool of others: cosmic-ray and mutmut change operators and constants one at a time, some 20,000 in this
package, each with a start-up of torch, megatron-core and DeepSpeed; what a reader wants to know is whether a named rule
can be lost. Processes are forked from one that has imported those three, which makes a mutant cost its tests.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
SECONDS = 240
_LISTS = (
    *(
        "tests.mutants.mutant",
        "tests.mutants.bias_mutants",
        "tests.mutants.unit_mutants",
        "tests.mutants.tuning_mutants",
        "tests.mutants.listed",
    ),
    *(
        "tests.mutants.horizon_mutants",
        "tests.mutants.input_mutants",
        "tests.mutants.proof_mutants",
        "tests.mutants.megatron_mutants",
    ),
)
# What a test raises that has compared nothing: it crashed on the way.
CRASHES = (
    *("AttributeError", "ImportError", "IndexError", "KeyError", "ModuleNotFoundError", "NameError", "SyntaxError"),
    *("TypeError", "UnboundLocalError"),
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
            line = next((line.strip() for line in text.splitlines() if line.strip()), "")
            self.found.append({"test": item.nodeid, "kind": kind, "text": line[:200], "when": call.when})


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
def broken(tree: Path, file: str, old: str, new: str) -> Iterator[None]:
    """Has `file` read `new` where it reads `old`. Raises ValueError where it does not read that once."""
    path = tree / file
    text = path.read_text()
    if text.count(old) != 1:
        raise ValueError(f"{file} reads {old!r} {text.count(old)} times; expected once")
    changed = text.replace(old, new)
    ast.parse(changed)
    path.write_text(changed)
    try:
        yield
    finally:
        path.write_text(text)


def run_tests(tree: Path, tests: Sequence[str], *, first: bool) -> dict[str, Any]:
    """Runs tests of a tree in a forked process; failures, tests passed, seconds. `first` stops at the first failure."""
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as answer:
        process = os.fork()
        if process == 0:
            os.setsid()
            _in_the_fork(tree, tests, first, answer)
        status = _wait(process)
        answer.seek(0)
        text = answer.read()
    seconds = round(time.monotonic() - began, 1)
    if not text:
        why = "took too long" if status is None else f"pytest ended with {status}"
        return {
            "failures": [{"test": "", "kind": "none", "text": why, "when": "call"}],
            "passed": 0,
            "seconds": seconds,
        }
    return {**json.loads(text), "seconds": seconds}


def _in_the_fork(tree: Path, tests: Sequence[str], first: bool, answer: Any) -> None:
    import pytest

    os.chdir(tree)
    sys.path[:] = [str(tree), *(part for part in sys.path if Path(part or ".").resolve() != REPOSITORY)]
    os.environ["PYTHONPATH"] = str(tree)
    sys.dont_write_bytecode = True  # a mutant has the size and, within a second, the time of the file before it
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    silent = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(silent, number)
    plugin = Failures()
    words = [*tests, "-q", "-p", "no:cacheprovider", "--rootdir", str(tree), *(["-x"] if first else [])]
    try:
        ended = pytest.main(words, plugins=[plugin])
        if not plugin.found and ended not in (0, 1):
            plugin.found.append({"test": "", "kind": "none", "text": f"pytest ended with {ended!r}", "when": "call"})
    except BaseException as error:  # the fork must not go on with its parent's work
        plugin.found.append({"test": "", "kind": "none", "text": repr(error), "when": "call"})
    json.dump({"failures": plugin.found, "passed": plugin.passed}, answer)
    answer.flush()
    os._exit(0)


def _wait(process: int) -> int | None:
    """Exit status; None where it was ended for taking too long. Whatever the tests started ends with it."""
    end = time.monotonic() + SECONDS
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
    from tests.mutants.listed import MUTANTS
    from tests.mutants.megatron_mutants import NATIVE

    parser = argparse.ArgumentParser(prog="./dev mutants", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", help="Mutants whose names contain one of these; all if none is given.")
    parser.add_argument("--json", metavar="FILE", help="Write the outcome of each.")
    parser.add_argument(
        "--write", metavar="FILE", help="Write the tables (docs/reports/mutants.md) of what has run whole."
    )
    parsed = parser.parse_args(arguments)
    chosen = [m for m in MUTANTS if not parsed.names or any(part in m.name for part in parsed.names)]
    if importlib.util.find_spec("megatron.training") is None:
        here = [mutant for mutant in chosen if mutant not in NATIVE]
        print(f"left out: {len(chosen) - len(here)} that need megatron.training (Python 3.12, megatron-core 0.19)")
        chosen = here
    if not chosen:
        print("mutants: no mutant has such a name", file=sys.stderr)
        return 2
    _warm()
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="mup-mutants-") as folder:
        tree = copy_of_the_tree(Path(folder) / "tree")
        wanted = sorted({test for mutant in chosen for test in mutant.tests})
        print(f"{len(chosen)} mutants; the unbroken tree first ({len(wanted)} selections of tests)", flush=True)
        before = {test: run_tests(tree, [test], first=False) for test in wanted}
        wrong = {failure["test"] for result in before.values() for failure in result["failures"]}
        for test, result in before.items():
            if not result["passed"]:
                why = next((failure["text"] for failure in result["failures"]), "no test ran")
                print(f"{test}: nothing passes on the unbroken tree: {why}", file=sys.stderr)
                return 2
        for number, mutant in enumerate(chosen, 1):
            with broken(tree, mutant.file, mutant.old, mutant.new):
                result = run_tests(tree, mutant.tests, first=True)
            outcome = {"name": mutant.name, "file": mutant.file, "seconds": result["seconds"], **verdict(result, wrong)}
            outcomes.append(outcome)
            said = "caught by" if outcome["caught"] else "SURVIVES"
            print(
                f"[{number}/{len(chosen)}] {mutant.name}: {said} {outcome['test']} ({outcome['text'][:90]})", flush=True
            )
    survivors = [outcome["name"] for outcome in outcomes if not outcome["caught"]]
    print(f"{len(outcomes) - len(survivors)} of {len(outcomes)} mutants caught")
    for name in survivors:
        print(f"survives: {name}")
    if parsed.json:
        Path(parsed.json).write_text(json.dumps(outcomes, indent=1))
    if parsed.write:
        Path(parsed.write).write_text(page(outcomes, Path(parsed.write).read_text()))
    return 1 if survivors else 0


_NATIVE_HEADING = "\n## `mup-megatron run`\n\n"


def page(outcomes: Sequence[dict[str, Any]], before: str) -> str:
    """docs/reports/mutants.md.

    Args:
        outcomes: of what has run.
        before: the page so far; a list that has not run whole keeps its table.
    """
    from tests.mutants.listed import MUTANTS
    from tests.mutants.megatron_mutants import NATIVE

    lists = ([mutant.name for mutant in MUTANTS if mutant not in NATIVE], [mutant.name for mutant in NATIVE])
    known, _, native = before.partition(_NATIVE_HEADING)
    tables = [known[known.find("Made by ") :], native]
    for number, names in enumerate(lists):
        rows = [outcome for outcome in outcomes if outcome["name"] in names]
        if len(rows) == len(names):
            tables[number] = table(rows)
    return (
        "# Mutants\n\n"
        "Each row is one small fault that somebody could make in the code, put into a copy of the tree; then the "
        "tests that must notice it run.\nA mutant counts as caught where a test that passes on the unbroken tree fails "
        "because it compared something; a test that\ncrashes before it compares does not count. The lists are "
        "[listed.py](../../tests/mutants/listed.py) and\n"
        "[megatron_mutants.py](../../tests/mutants/megatron_mutants.py), whose faults need\n"
        "megatron.training (megatron-core 0.19, Python 3.12).\n\n" + tables[0] + _NATIVE_HEADING + tables[1]
    )


def table(outcomes: Sequence[dict[str, Any]]) -> str:
    """What became of the mutants of a list."""
    import importlib.metadata as metadata
    import platform

    from tests.mutants.listed import MUTANTS

    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "megatron-core", "deepspeed"))
    caught = sum(outcome["caught"] for outcome in outcomes)
    what = {mutant.name: _cell(mutant.what) for mutant in MUTANTS}
    rows = [
        f"| `{o['name']}` | {what[o['name']]} | {o['file']} | "
        + (f"`{o['test']}`: {_cell(o['text'])}" if o["caught"] else f"**survives**: {_cell(o['text'])}")
        + " |"
        for o in outcomes
    ]
    return (
        f"Made by `./dev mutants` on {time.strftime('%Y-%m-%d')} (Python {platform.python_version()}, {versions}): "
        f"{caught} of {len(outcomes)} caught.\n\n"
        "| mutant | what is lost | file | caught by, and what the test said |\n| --- | --- | --- | --- |\n"
        + "\n".join(rows)
        + "\n"
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
    for name in [name for name in sys.modules if name.split(".")[0] == "tests" and name not in _LISTS]:
        del sys.modules[name]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
