"""A checkpoint that is asked something: in which layout, its model on this rank, and how replicas share the work.

Public names: `Evaluation`, `Replica`, `gathered`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed

from mup_megatron.config import Model, derive
from mup_megatron.convert.saved_model import load_saved
from mup_megatron.convert.saved_run import SavedRun, check_same_tokenizer
from mup_megatron.parallel import runtime
from mup_megatron.parallel.layout import Layout, resolve_layout
from mup_megatron.parallel.ranks import Rank
from mup_megatron.util.errors import UserError

Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Which checkpoint is asked, and where.

    Args:
        checkpoint: as for `open_run`.
        rank: this process.
        overrides: of `parallel:` and of the model's kernels, by dotted key: the layout of this evaluation. Several
            ranks take the run's own without them.
        batch_size: sequences that a rank computes at once.
        tokenizer: `LIBRARY:PATH`, where the checkpoint does not tell it; never another one than the checkpoint's.
        say: takes lines of progress.
    """

    checkpoint: Path
    rank: Rank
    overrides: Mapping[str, Any] = field(default_factory=dict)
    batch_size: int = 8
    tokenizer: str | None = None
    say: Callable[[str], None] = lambda _line: None

    def laid_out(self, run: SavedRun, keys: Mapping[str, Any] | None = None) -> tuple[SavedRun, Layout]:
        """The checkpoint in the layout that is asked for, with a batch that any layout can share, and further keys.

        Raises:
            UserError: another tokenizer, or an override that is the checkpoint's own.
        """
        check_same_tokenizer(run)
        allowed = [f"model.{key}" for key in Model.PLAIN_KERNELS]
        for key in self.overrides:
            if not key.startswith("parallel.") and key not in allowed:
                raise UserError(
                    f"{key}: an evaluation takes the checkpoint's; expected a key of parallel:, or "
                    + ", ".join(allowed)
                )
        ranks = self.rank.world_size
        own = run.manifest.config.get("parallel", {}) if ranks > 1 and run.manifest.key_prefix is None else {}
        batch = {"training.micro_batch_size": self.batch_size, "training.global_batch_size": self.batch_size * ranks}
        parallel = {"parallel": {**run.config.parallel.model_dump(), **own}}
        run = replace(run, config=derive(run.config, {**parallel, **batch, **self.overrides, **(keys or {})}))
        return run, resolve_layout(run.config, ranks)

    def load(self, run: SavedRun, layout: Layout, positions: int | None) -> Replica:
        """This rank's part of the model. Collective; starts the process groups."""
        device = runtime.start_distributed(layout, self.rank, run.config.run.seed)
        chunks = load_saved(run, layout, self.rank.rank, device)
        return Replica(asked=self, chunks=chunks, tokenizer=run.tokenizer, positions=positions, layout=layout)


@dataclass(frozen=True, kw_only=True)
class Replica:
    """This rank's part of a model, in evaluation mode. Each data-parallel replica takes its share of what is asked.

    Args:
        asked: how many sequences a rank computes at once, and who is told.
        chunks: a chunk per virtual pipeline stage.
        tokenizer: megatron-core's tokenizer object.
        positions: of the model, where it learned them.
        layout: how ranks split the model.
    """

    asked: Evaluation
    chunks: Sequence[Any]
    tokenizer: Any
    positions: int | None
    layout: Layout


def gathered(own: Mapping[int, Found], layout: Layout) -> list[Found]:
    """What all replicas found of their shares, in the order of its numbers from 0, on every rank. Collective."""
    from megatron.core import parallel_state

    parts: list[Mapping[int, Found]] = [{}] * layout.data
    torch.distributed.all_gather_object(parts, dict(own), group=parallel_state.get_data_parallel_group())
    found = {number: each for part in parts for number, each in part.items()}
    return [found[number] for number in range(len(found))]
