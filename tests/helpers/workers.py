"""Which tests share a pytest-xdist worker (`./dev test` starts as many workers as there are cores, at most four)."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

# These files start DeepSpeed's or torch's launcher, whose port is the same for everyone, or use the pipeline of the
# fixture `whole`, which takes long to make. They run one after another, in one worker.
ONE_AFTER_ANOTHER = ("hostfile", "new", "pipeline", "report", "shown", "slurm", "train")


class ByFile(LoadScopeScheduling):
    """A file's tests run in one worker: they share its fixtures and its ranks."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        name = file.rpartition("/test_")[2].removesuffix(".py")
        return "one after another" if name in ONE_AFTER_ANOTHER else file
