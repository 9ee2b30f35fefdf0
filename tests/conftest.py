from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.skipping import evaluate_skip_marks
from hypothesis import settings

from mup_megatron.util import collector
from tests.helpers import layouts, reports
from tests.helpers.commands import BIN, compile_operator, run
from tests.helpers.configs import pipeline_file
from tests.helpers.distributed import Ranks
from tests.helpers.parity import Page
from tests.helpers.slices import Slice, with_row

SKIPPED = Path("docs/reports/skipped-tests.json")
QUICK = pytest.StashKey[list[str]]()
BEGAN = pytest.StashKey[float]()
PARITY = pytest.StashKey[Page]()
SLICE = pytest.StashKey[Slice | None]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all", action="store_true", help="also run tests marked slow; write docs/reports/test-summary-*.md"
    )
    parser.addoption("--slow", action="store_true", help="run tests marked slow alone, otherwise as --all")
    parser.addoption("--slice", metavar="K/N", help="of the tests that run, about one Nth (tests/helpers/slices.py)")
    parser.addoption("--summary", metavar="NAME", help="write docs/reports/test-summary-NAME.md")
    parser.addoption("--parity", metavar="FILE", help="compare layouts alone, slow cells too; write FILE")
    parser.addoption("--since", metavar="DATE", help="of --parity: leave out cells with a row of DATE or later")


def pytest_configure(config: pytest.Config) -> None:
    collector.rarely()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell starts what it puts in the background so, and every command that a test starts would inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Our own warnings are errors; upstream's are not ours to mend.
    for module in ("megatron", "deepspeed", "torch", "optuna", "sentencepiece", "mup", "importlib", "tensorboard"):
        config.addinivalue_line("filterwarnings", rf"ignore:::{module}(\..*)?")
    config.option.all |= config.option.slow or config.option.parity is not None
    # A machine that is busy makes no test fail.
    settings.register_profile("quick", deadline=None)
    settings.register_profile("all", deadline=None, max_examples=500)
    settings.load_profile("all" if config.getoption("--all") else "quick")
    if not config.getoption("--all"):
        # Compiling a function takes longer than training the small models of the quick tests; the slow ones compile.
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    if config.option.parity:
        layouts.STEPS = 20
    config.stash[PARITY] = _page(config.option.parity, config.option.since)
    try:
        config.stash[SLICE] = Slice.read(config.option.slice) if config.option.slice else None
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    config.stash[BEGAN] = time.monotonic()


def _page(path: str | None, since: str | None) -> Page:
    try:
        return Page.read(Path(path), since) if path else Page()
    except ValueError as error:
        raise pytest.UsageError(f"--since: {error}; expected a date as 2026-11-23") from None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--parity"):
        others = [item for item in items if "parity" not in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]
    if config.getoption("--slow"):
        # Quick tests that are skipped here stay, to be counted.
        quick = [
            item for item in items if not {"slow", "more"} & item.keywords.keys() and not evaluate_skip_marks(item)
        ]
        config.stash[QUICK] = [item.nodeid for item in quick]
        config.hook.pytest_deselected(items=quick)
        items[:] = [item for item in items if item not in quick]
    if config.getoption("--slow"):
        # A third of the slow layouts; `./dev parity` goes through all of them.
        others = [item for item in items if "parity" in getattr(item, "fixturenames", ()) and not _is_sampled(item)]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]
    if part := config.stash[SLICE]:
        others = [item for item in items if not part.holds(item.nodeid)]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if part.holds(item.nodeid)]
    if config.getoption("--all"):
        return
    skip = pytest.mark.skip(reason="slow; runs with ./dev test --all")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)


def _is_sampled(item: pytest.Item) -> bool:
    return "slow" not in item.keywords or Slice(1, 3).holds(item.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["quick"] = session.config.stash.get(QUICK, [])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[QUICK] = getattr(node, "workeroutput", {}).get("quick", [])


def pytest_collection_finish() -> None:
    collector.as_usual()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.helpers.workers import ByFile

    return ByFile(config, log)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if path := config.getoption("--parity"):
        terminalreporter.write_line(f"measured deviations: {path}")
    whole = config.getoption("--all") and not config.getoption("--parity") and not config.option.collectonly
    whole = whole and config.args_source.name != "ARGS"
    if whole or config.getoption("--summary"):
        environment = config.getoption("--summary") or f"{sys.version_info.major}.{sys.version_info.minor}"
        path = Path(f"docs/reports/test-summary-{environment}.md")
        command = f"./dev test {'--slow' if config.getoption('--slow') else '--all'}" if whole else "./dev te"
        seconds = time.monotonic() - config.stash[BEGAN]
        stats, part = terminalreporter.stats, config.stash[SLICE]
        quick: list[str] = config.stash.get(QUICK, [])
        known = reports.remember(json.loads(SKIPPED.read_text()), stats, environment, quick)
        if part is None:
            text = reports.summary(stats, command, seconds, known, environment)
        elif not stats.get("failed") and not stats.get("error") and stats.get("passed"):
            text = with_row(path.read_text(), part, len(stats["passed"]), seconds)
        else:
            text = path.read_text()
        SKIPPED.write_text(json.dumps(known, indent=1) + "\n")
        path.write_text(text)
        terminalreporter.write_line(f"summary: {path}")


@pytest.fixture
def parity(request: pytest.FixtureRequest) -> Page:
    """Where cells of the layout matrix put what they measured."""
    return request.config.stash[PARITY]


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """The pool of gloo ranks."""
    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def te_ranks() -> Iterator[Ranks]:
    """A pool whose ranks have Transformer Engine, where it is installed."""
    from tests.helpers.transformer_engine import prepare_with_it

    pool = Ranks(prepare_with_it)
    yield pool
    pool.close()


@pytest.fixture(scope="session", autouse=True)
def _quiet() -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed  # noqa: F401  (its import warns of much)


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """A variable that one test's code sets (RANK, say) is not there in the next test."""
    before = dict(os.environ)
    yield
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Small models are faster so, most of all where others use the machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def repository() -> Path:
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def whole(ranks: Ranks, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline of two ranks from start to end, through the DeepSpeed launcher, the control included.

    The folder holds run.yaml, run/ and out.txt, what the command printed.
    """
    ranks.stop()
    folder = tmp_path_factory.mktemp("whole")
    script = repository / "launch" / "pretrain_gpt.sh"
    result = run(BIN / "deepspeed", "--num_gpus", "2", script, pipeline_file(folder), "--control", cwd=folder)
    assert result.returncode == 0, result.stderr
    (folder / "out.txt").write_text(result.stdout)
    return folder


@pytest.fixture(scope="session")
def cpu_lion() -> None:
    """DeepSpeed's Lion for CPUs."""
    compile_operator("CPULionBuilder")
