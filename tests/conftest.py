from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from mup_megatron.runtime import UPSTREAM_WARNINGS
from tests.distributed import Ranks


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also run tests marked slow")


def pytest_configure(config: pytest.Config) -> None:
    # Our own warnings are errors; upstream's are not ours to mend.
    for module in ("megatron", "deepspeed", "torch", "optuna", "sentencepiece", "mup", "importlib", "tensorboard"):
        config.addinivalue_line("filterwarnings", rf"ignore:::{module}(\..*)?")
    for message in UPSTREAM_WARNINGS:
        config.addinivalue_line("filterwarnings", f"ignore:.*{message}.*")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all"):
        return
    skip = pytest.mark.skip(reason="slow; runs with ./dev test --all")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """The pool of gloo ranks."""
    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture(scope="session", autouse=True)
def _quiet() -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed  # noqa: F401  (its import warns of much)


@pytest.fixture(scope="session")
def repository() -> Path:
    return Path(__file__).resolve().parent.parent
