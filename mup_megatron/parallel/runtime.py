"""Process groups, where the ranks meet before them, and the random states of the forward pass.

Public names: `Meeting`, `start_distributed`, `stop_distributed`, `point_to_point`, `save_random_state`,
`load_random_state`, `computed_on_cuda`.
"""

from __future__ import annotations

import datetime
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mup_megatron.parallel import upstream
from mup_megatron.parallel.layout import Layout
from mup_megatron.parallel.ranks import Rank, device_of
from mup_megatron.util import collector
from mup_megatron.util.errors import Held, UserError

if TYPE_CHECKING:
    import torch

_PATIENCE = datetime.timedelta(minutes=30)
"""How long a rank waits for the others to come, and in a collective."""

_set_variables: set[str] = set()
"""What DeepSpeed reads of a launcher and this process has set for want of one."""


class Meeting:
    """Where the ranks of a launch have met, before any process group: a store that they share.

    It outlasts what a collective would not: ranks may wait here for days while others tune.

    Args:
        rank: this process.

    Raises:
        UserError: a launcher started several processes and did not say where they meet.
        Held: another run meets there.
    """

    def __init__(self, rank: Rank) -> None:
        import torch.distributed

        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if rank.launched and missing:
            raise UserError(
                f"{' and '.join(missing)}: not set, so {rank.world_size} processes cannot meet; start them with "
                "torchrun or deepspeed, or export both"
            )
        self._groups = self._deeds = 0
        self.store = torch.distributed.HashStore()
        if rank.launched:
            url = f"env://?rank={rank.rank}&world_size={rank.world_size}"
            try:
                self.store, _, _ = next(torch.distributed.rendezvous(url, timeout=_PATIENCE))
            except torch.distributed.DistNetworkError as error:
                if "EADDRINUSE" not in str(error):
                    raise
                raise _port_in_use() from None
            # A port that another run's first rank keeps lets ranks of this run in; each place can be taken once.
            if self.store.add(f"rank-{rank.rank}", 1) > 1:
                raise _port_in_use()

    def tell(self, name: str, value: str) -> None:
        """Says something to every rank."""
        self.store.set(name, value)

    def told(self, name: str) -> str | None:
        """What some rank said; None if none has yet.

        Raises:
            UserError: the first rank, which keeps the store, is gone; it says why.
        """
        import torch.distributed

        try:
            return self.store.get(name).decode() if self.store.check([name]) else None
        except torch.distributed.DistError:
            raise UserError("the first rank ended before the others") from None

    def await_told(self, name: str) -> str:
        """The same, waiting as long as it takes; signals are handled meanwhile."""
        while (value := self.told(name)) is None:
            time.sleep(0.2)
        return value

    def follow_first(self, rank: Rank) -> None:
        """The first rank comes here when it has done something; the others wait for it, as long as it takes."""
        self._deeds += 1
        if rank.is_first:
            self.tell(f"done-{self._deeds}", "")
        self.await_told(f"done-{self._deeds}")

    def part(self, rank: Rank) -> None:
        """Says goodbye; the first rank, which may keep the store, waits a while for the others."""
        until = time.monotonic() + 60
        left = self.store.add("left", 1)
        while rank.is_first and left < rank.world_size and time.monotonic() < until:
            time.sleep(0.1)
            left = self.store.add("left", 0)

    def group_store(self) -> torch.distributed.Store:
        """A fresh part of the store, for the next process group."""
        import torch.distributed

        self._groups += 1
        return torch.distributed.PrefixStore(f"group-{self._groups}", self.store)


def _port_in_use() -> Held:
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    return Held(
        f"MASTER_PORT: another run or program uses {place} (29500 is the launchers' default); expected a port of its "
        "own for each run on a machine, such as deepspeed --master_port 29501"
    )


def start_distributed(layout: Layout, rank: Rank, seed: int, meeting: Meeting | None = None) -> torch.device:
    """Starts the process groups of a layout: NCCL on GPUs, gloo on CPUs; megatron-core's parallel_state over them.

    Args:
        layout: how ranks split the model.
        rank: this process.
        seed: of what is drawn in the forward pass (dropout), per tensor-parallel rank as megatron-core does.
        meeting: where the ranks have met, if they have.

    Returns:
        This process's device.

    Raises:
        UserError: a launcher started several processes and did not say where they meet.
    """
    upstream.prepare_deepspeed()
    import deepspeed.comm
    import torch
    import torch.distributed
    from megatron.core import parallel_state

    collector.as_usual()  # imports are behind, tensors ahead
    device = device_of(rank)
    if not torch.distributed.is_initialized():
        meeting = meeting or Meeting(rank)
    variables: dict[str, object] = {"RANK": rank.rank, "WORLD_SIZE": rank.world_size, "LOCAL_RANK": rank.local_rank}
    if layout.tensor > 1:
        # megatron-core overlaps the reduction of input gradients with weight gradients only if kernels queue in order.
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    for name, value in variables.items():
        if name not in os.environ:
            _set_variables.add(name)
        os.environ[name] = str(value)
    if meeting is not None and not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            backend="nccl" if device.type == "cuda" else "gloo",
            rank=rank.rank,
            world_size=rank.world_size,
            store=meeting.group_store(),
            timeout=_PATIENCE,
        )
    deepspeed.comm.init_distributed(dist_backend=torch.distributed.get_backend(), verbose=False)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        order="tp-cp-ep-pp-dp" if layout.pipeline_before_data else "tp-cp-ep-dp-pp",
        create_gloo_process_groups=False,  # a second set beside NCCL's, for the Megatron engine's checkpoints
    )
    _seed_forward(seed, layout, rank.rank)
    return device


def stop_distributed() -> None:
    """Ends the process groups, so that another layout, or a process of its own, can start from this one."""
    import deepspeed.comm
    import torch
    from megatron.core import parallel_state

    gc.collect()  # engines hold groups in cycles, and every gloo group holds threads
    parallel_state.destroy_model_parallel()
    # A script of megatron.training starts the groups without DeepSpeed.
    if torch.distributed.is_initialized():  # no run began where each was complete
        (deepspeed.comm if deepspeed.comm.is_initialized() else torch.distributed).destroy_process_group()
    gc.collect()
    while _set_variables:
        os.environ.pop(_set_variables.pop(), None)


def _seed_forward(seed: int, layout: Layout, rank: int) -> None:
    """Seeds the generators that dropout draws from, with megatron-core's own offsets (tensor_parallel/random.py)."""
    import torch
    from megatron.core.tensor_parallel import random as megatron_random

    from mup_megatron.patches.cpu import seed_generators

    seed += 100 * (layout.data_rank(rank) + layout.data * layout.pipeline_rank(rank))
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        megatron_random.model_parallel_cuda_manual_seed(seed)
        return
    seed_generators(
        seed,
        tensor=layout.tensor_rank(rank),
        expert=layout.expert_rank(rank),
        expert_tensor=layout.expert_tensor_rank(rank),
    )


def point_to_point(*, split: bool, interleaved: bool, cuda: bool) -> dict[str, bool]:
    """TransformerConfig's flags of how pipeline stages pass tensors on, such that gloo passes them on right.

    Args:
        split: whether there are several stages.
        interleaved: whether there are virtual stages.
        cuda: whether NCCL passes them on.
    """
    return {
        # Interleaved stages of two ranks are each other's next and previous at once; without overlap, gloo mixes the
        # two messages up and the result is silently wrong.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        "batch_p2p_sync": cuda,
        # gloo may still be sending an output when its memory is let go of; CUDA's streams wait.
        "deallocate_pipeline_outputs": cuda and split,
    }


def save_random_state(directory: Path, rank: int) -> Callable[[], Path]:
    """Takes the states of the generators that dropout draws from, of this rank; returns what writes them to a file."""
    from safetensors.torch import save

    path, states = directory / _random_file(rank), save(_random_states())

    def write() -> Path:
        # Not save_file, which leaves a file that its owner alone may read, whatever the umask says.
        path.write_bytes(states)
        return path

    return write


def load_random_state(directory: Path, layout: Layout, rank: int, seed: int, step: int, *, same: bool) -> bool:
    """Restores the generators' states, or, where the checkpoint was written in another layout, seeds them anew.

    Args:
        directory: the checkpoint.
        layout: of this run.
        rank: of this process.
        seed: the run's.
        step: updates done, so that what was drawn before is not drawn again.
        same: whether it was written in this layout.

    Returns:
        Whether the states are those of the run that wrote the checkpoint.

    Raises:
        UserError: a file is damaged.
    """
    import torch
    from megatron.core.tensor_parallel import random as megatron_random
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not same:
        _seed_forward(seed + step, layout, rank)
        return False
    try:
        states = load_file(str(directory / _random_file(rank)))
    except (OSError, SafetensorError) as error:
        raise UserError(f"{directory / _random_file(rank)}: damaged ({error})") from None
    if set(states) != set(_random_states()):
        _seed_forward(seed + step, layout, rank)  # written on another kind of device
        return False
    torch.set_rng_state(states.pop("torch"))
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(states.pop("cuda"))
    megatron_random.get_cuda_rng_tracker().set_states(states)
    return True


def computed_on_cuda(directory: Path) -> bool:
    """Whether the run that wrote a checkpoint computed on GPUs, whose generators' states are then among those saved.

    Raises:
        UserError: the first rank's file is damaged.
    """
    from safetensors import SafetensorError, safe_open

    path = directory / _random_file(0)
    try:
        with safe_open(str(path), framework="pt") as file:
            return "cuda" in file.keys()  # noqa: SIM118  (it is no mapping)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: damaged ({error})") from None


def _random_file(rank: int) -> str:
    return f"random_{rank}.safetensors"


def _random_states() -> dict[str, torch.Tensor]:
    import torch
    from megatron.core.tensor_parallel import random as megatron_random

    states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {
        **states,
        **{name: state.clone() for name, state in megatron_random.get_cuda_rng_tracker().get_states().items()},
    }
