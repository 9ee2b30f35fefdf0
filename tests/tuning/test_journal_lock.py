"""The journal's lock: of those that wait for a holder that was killed, one at a time takes its place."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from optuna.storages.journal import JournalFileSymlinkLock
from optuna.storages.journal import _file as optunas_module

from mup_megatron.tuning import journal_lock
from mup_megatron.tuning.journal import Journal
from mup_megatron.tuning.journal_lock import JournalLock
from mup_megatron.util.errors import UserError

LOOK = 5.0
PATIENCE = 35.0  # of a waiter: more than the 30 seconds after which a holder counts as gone
CALLS = ("symlink", "readlink", "rename", "replace", "unlink")

Make = Callable[[Path], JournalFileSymlinkLock]


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """A journal whose lock a killed process left."""
    path = tmp_path / "journal.log"
    path.write_bytes(b"")
    Path(f"{path}.lock").symlink_to(path)
    return path


def optunas(path: Path) -> JournalFileSymlinkLock:
    return JournalFileSymlinkLock(str(path))


class Waiter(threading.Thread):
    """Takes a lock, holds it until told otherwise, and lets it go. Its clock ends after `PATIENCE`, or when told to.

    Args:
        lock: of the journal.
        hurry: whether its patience ends at once; otherwise with `go_on`.
    """

    def __init__(self, lock: JournalFileSymlinkLock, *, hurry: bool) -> None:
        super().__init__(daemon=True)
        self._lock, self._hurry, self._now, self.late_looks = lock, hurry, 0.0, 0
        self._gate, self._ends, self._ready = threading.Event(), threading.Event(), threading.Event()
        self.held, self.stays, self.error = threading.Event(), False, ""

    def run(self) -> None:
        """Once."""
        self._lock.acquire()
        self.held.set()
        self._ends.wait()
        try:
            self._lock.release()
        except RuntimeError as error:
            self.error = str(error)

    def monotonic(self) -> float:
        """Its clock (seconds)."""
        return self._now

    def sleep(self, _seconds: float) -> None:
        """Until its next look."""
        if self._now + LOOK < PATIENCE and not self.stays:
            self._now += LOOK
        elif self._now < PATIENCE and not self.stays:
            self._ready.set()
            if not self._hurry:
                self._gate.wait()
            self._now += LOOK
        else:
            self.late_looks += 1
            time.sleep(0.001)

    def wait_until_ready(self) -> None:
        """Until it has seen the killed process's lock for nearly long enough."""
        assert self._ready.wait(10)

    def go_on(self) -> None:
        """Has it lose its patience, and settle."""
        self._gate.set()
        self.settle()

    def settle(self) -> None:
        """Until it holds the lock, or has looked and found that it has to wait."""
        until = time.monotonic() + 10
        while not self.held.is_set() and self.late_looks < 3:
            assert time.monotonic() < until
            time.sleep(0.0005)

    def any_holds(self, other: Waiter) -> bool:
        """Waits for one of two to hold the lock."""
        until = time.monotonic() + 10
        while not (held := self.held.is_set() or other.held.is_set()) and time.monotonic() < until:
            time.sleep(0.001)
        return held

    def end(self) -> None:
        """Has it take the lock, which must be free or its own, and let it go."""
        self._gate.set()
        assert self.held.wait(10)
        self._ends.set()
        self.join(10)
        assert not self.is_alive()


def clocks() -> Any:
    """Of the thread that asks."""
    return SimpleNamespace(
        monotonic=lambda: threading.current_thread().monotonic(),
        sleep=lambda seconds: threading.current_thread().sleep(seconds),
    )


def both_held(make: Make, journal: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, bool, str]]:
    """For every call of one that waits, before which another goes on: its name, whether both held, who complained."""
    for module in (journal_lock, optunas_module):
        monkeypatch.setattr(module, "time", clocks())
    for at in range(100):
        first, second, made = Waiter(make(journal), hurry=True), Waiter(make(journal), hurry=False), []

        def wrapped(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def before(*args: Any, **more: Any) -> Any:
                if threading.current_thread() is first:  # noqa: B023
                    made.append(name)  # noqa: B023
                    if len(made) == at + 1:  # noqa: B023
                        second.go_on()  # noqa: B023
                        first.stays, first.late_looks = second.held.is_set(), 0  # noqa: B023
                return call(*args, **more)

            return before

        with pytest.MonkeyPatch.context() as calls:
            second.start()
            second.wait_until_ready()
            for name in CALLS:
                calls.setattr(os, name, wrapped(name, getattr(os, name)))
            first.start()
            assert first.any_holds(second)
            first.settle()
        both = first.held.is_set() and second.held.is_set()
        for waiter in (first, second) if first.held.is_set() else (second, first):
            waiter.end()
        if len(made) <= at:  # the first had the lock before that call
            return
        yield made[at], both, first.error or second.error
        Path(f"{journal}.lock").symlink_to(journal)


def test_of_two_that_wait_one_at_a_time_holds_it(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(both_held(JournalLock, journal, monkeypatch))
    assert {"symlink", "readlink", "replace"} <= {name for name, _, _ in found}
    assert [(name, error) for name, both, error in found if both or error] == []
    assert os.listdir(journal.parent) == [journal.name]


def test_control_of_two_that_wait_for_optunas_both_hold_it(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second removes the lock that the first has taken; the one that lets go last finds none."""
    found = list(both_held(optunas, journal, monkeypatch))
    assert ("rename", True, "Error: did not possess lock") in found


def alone(journal: Path, monkeypatch: pytest.MonkeyPatch) -> Waiter:
    monkeypatch.setattr(journal_lock, "time", clocks())
    waiter = Waiter(JournalLock(journal), hurry=True)
    waiter.start()
    return waiter


def test_one_that_was_killed_while_it_replaced_another(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(f"{journal}.lock.{journal.name}").symlink_to("an-heir")
    Path(f"{journal}.lock.an-heir").symlink_to("its-heir")
    alone(journal, monkeypatch).end()
    assert os.listdir(journal.parent) == [journal.name]


@pytest.mark.parametrize("writes", [False, True])
def test_a_holder_that_writes_is_not_replaced(journal: Path, monkeypatch: pytest.MonkeyPatch, writes: bool) -> None:
    waiter = Waiter(JournalLock(journal), hurry=False)
    monkeypatch.setattr(journal_lock, "time", clocks())
    waiter.start()
    waiter.wait_until_ready()
    if writes:
        os.utime(journal, ns=(1, 1))
    waiter.go_on()
    assert waiter.held.is_set() is not writes
    if writes:
        Path(f"{journal}.lock").unlink()
    waiter.end()


def test_one_that_was_replaced_leaves_the_lock_to_the_other(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(f"{journal}.lock").unlink()
    slow = JournalLock(journal)
    assert slow.acquire()
    other = alone(journal, monkeypatch)
    assert other.held.wait(10)
    slow.release()
    assert Path(f"{journal}.lock").is_symlink()
    other.end()
    assert not Path(f"{journal}.lock").is_symlink()


def test_the_time_in_which_a_waiter_was_stopped_is_no_silence(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven looks, a quarter of an hour apart: each counts five seconds."""
    now, looks = 0.0, 0

    def sleep(_seconds: float) -> None:
        nonlocal now, looks
        now, looks = now + 900.0, looks + 1
        assert looks < 100

    monkeypatch.setattr(journal_lock, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    assert JournalLock(journal).acquire()
    assert looks == 7


def test_a_journal_that_is_removed_while_one_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal.log"
    journal = Journal(path)
    Path(f"{path}.lock").symlink_to("another")
    monkeypatch.setattr(journal_lock, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: path.unlink()))
    with pytest.raises(UserError, match="the study's journal was removed or replaced while this process used it"):
        journal.append_logs([{}])
    assert os.listdir(tmp_path) == ["journal.log.lock"]
