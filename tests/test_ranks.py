"""The pool of ranks that tests share (tests/helpers/distributed.py)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from mup_megatron.parallel.ranks import Rank
from tests.helpers.distributed import NoGroupError, Ranks

LEFT = "MUP_TEST_BROKEN_CONNECTIONS"


def broken_at_first() -> None:
    """Every try to connect fails as gloo's do, as long as the file lists one."""
    import torch.distributed

    connect = torch.distributed.init_process_group

    def broken(*arguments: Any, **keywords: Any) -> None:
        left = Path(os.environ[LEFT])
        if count := len(left.read_text()):
            left.write_text("x" * (count - 1))
            raise RuntimeError("Gloo connectFullMesh failed with Connection closed by peer")
        connect(*arguments, **keywords)

    torch.distributed.init_process_group = broken


def number(rank: Rank) -> int:
    return rank.rank


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_ranks_that_do_not_connect_try_again_once(times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "left").write_text("x" * times)
    monkeypatch.setenv(LEFT, str(tmp_path / "left"))
    pool = Ranks(broken_at_first)
    try:
        if times == 1:
            assert pool.run(1, number) == [0]
        else:
            with pytest.raises(NoGroupError, match="number:\nrank 0:"):
                pool.run(1, number)
    finally:
        pool.close()
