"""What DeepSpeed needs: no compiler at start-up on a CPU."""

from __future__ import annotations

from collections.abc import Callable

from .patch import Patch


def _no_shm_op(_original: Callable[[], object]) -> Callable[[], None]:
    def build_shm_op() -> None:
        return None

    return build_shm_op


DEEPSPEED_PATCHES: tuple[Patch, ...] = (
    Patch(
        name="deepspeed-no-shm-build",
        distribution="deepspeed",
        versions=">=0.19,<0.20",
        symbol="deepspeed.comm.torch:build_shm_op",
        parameters=(),
        why="on a CPU, DeepSpeed compiles a shared-memory all-reduce when its communication starts (half a minute, a "
        "C++ compiler, and a lock that hangs every later run if the build is killed); only its inference layers call "
        "it, training never does",
        lower_rung="no setting skips the build",
        until="DeepSpeed builds the operation where it is first called",
        when="cpu",
        wrap=_no_shm_op,
    ),
)
