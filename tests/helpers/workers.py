"""Which tests share a pytest-xdist worker (`./dev test` starts as many workers as there are cores, at most four)."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

TOGETHER = {
    # These start DeepSpeed's or torch's launcher, whose port is the same for everyone, or use the fixture `whole`.
    **dict.fromkeys(("hostfile", "new", "pipeline", "report", "shown", "slurm", "train"), "one after another"),
    # These use the fixture `bands`.
    **dict.fromkeys(("alarms", "live"), "bands"),
}
"""By a file's name: which run in one worker, for what they use takes long to make."""


class ByFile(LoadScopeScheduling):
    """A file's tests run in one worker: they share its fixtures and its ranks."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return TOGETHER.get(file.rpartition("/test_")[2].removesuffix(".py"), file)
