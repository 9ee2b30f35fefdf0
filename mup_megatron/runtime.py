"""Process start: which rank this is, which device it has, patches, process groups. The one place that applies patches.

Public names: `Rank`, `read_rank`, `say_error`, `Meeting`, `sigterm`, `prepare_process`, `start_distributed`,
`stop_distributed`, `save_random_state`, `load_random_state`, `resolve_auto`.
"""

from __future__ import annotations

import datetime
import gc
import importlib.util
import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from mup_megatron.config import Config
from mup_megatron.errors import UserError, masked
from mup_megatron.layout import Layout

if TYPE_CHECKING:
    import torch

# Variables that name (rank, world size, local rank), in the order in which they are believed.
_LAUNCHERS = (
    ("torchrun or deepspeed", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("SLURM", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
)

# What megatron-core and DeepSpeed warn of at import and construction whatever one does.
UPSTREAM_WARNINGS = (
    "Apex is not installed",
    "Transformer Engine and Apex are not installed",
    "full scope is deprecated",
    "Could not determine rank from torch.distributed",
    "If you are using transformer_engine as the transformer implementation",
    "`load_state_dict` is deprecated and will be removed",  # dist_checkpointing's own call
)


_TE = "transformer_engine"
_CUDA_ONLY = (_TE, "transformer_engine_torch", "apex", "amp_C")

# Launchers end the other ranks within so long of the first failure.
_SPEECHLESS_SECONDS = 10.0
_PATIENCE = datetime.timedelta(minutes=30)
"""How long a rank waits for the others to come, and in a collective."""


_set_variables: set[str] = set()
"""What DeepSpeed reads of a launcher and this process has set for want of one."""


@dataclass(frozen=True, kw_only=True)
class Rank:
    """This process among those of the run."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    launched: bool = False

    @property
    def is_first(self) -> bool:
        """Whether this process speaks for all."""
        return self.rank == 0


def read_rank(environment: Mapping[str, str] = os.environ) -> Rank:
    """Reads rank, world size and local rank from torchrun's variables, else SLURM's, else Open MPI's.

    SLURM's count only inside srun with several tasks or with an address to meet at: a plain `sbatch` script sets them
    too, and is no launcher.

    Raises:
        UserError: the variables contradict each other.
    """
    for launcher, rank_name, world_name, local_name in _LAUNCHERS:
        if rank_name not in environment or world_name not in environment:
            continue
        try:
            rank, world_size = int(environment[rank_name]), int(environment[world_name])
            local_rank = int(environment.get(local_name, rank))
        except ValueError:
            raise UserError(
                f"{rank_name}, {world_name}, {local_name}: expected whole numbers from {launcher}"
            ) from None
        if world_size == 1 and launcher == "SLURM":
            continue
        if not 0 <= rank < world_size:
            raise UserError(f"{rank_name}={rank} is not below {world_name}={world_size}, as {launcher} should have it")
        return Rank(rank=rank, world_size=world_size, local_rank=local_rank, launched=True)
    return Rank()


def say_error(message: str, rank: Rank, *, same: bool = False) -> None:
    """Says what is wrong, once where all ranks say the same, as they do before they have met.

    Args:
        message: one sentence.
        rank: this process.
        same: whether all say the same although they have met.

    Then the first rank speaks, and the others wait for their launcher to end them: one that ended at once could have
    the first ended before it speaks. Whoever is still there after that was wrong alone, and says so.
    """
    torch = sys.modules.get("torch")
    met = torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()
    alone = (same or not met) and not rank.is_first
    if alone:
        time.sleep(_SPEECHLESS_SECONDS)
    where = f" (rank {rank.rank})" if rank.world_size > 1 and (met or alone) else ""
    print(f"mup-megatron: error{where}: {masked(message)}", file=sys.stderr, flush=True)


def prepare_process() -> None:
    """Quiets upstream and applies the patches that this machine needs. Idempotent; call before building anything.

    Without CUDA, packages that compute on CUDA alone are as good as not installed: megatron-core takes their optimizer
    and norm kernels where it can import them.
    """
    import torch

    cuda = torch.cuda.is_available()
    if not cuda:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        for package in _CUDA_ONLY:
            sys.modules.setdefault(package, None)  # type: ignore[arg-type]  # an import of it raises ImportError
    quiet_upstream()
    from mup_megatron.patches import ALL_PATCHES, apply_patches

    apply_patches(ALL_PATCHES, cuda=cuda)


def quiet_upstream() -> None:
    """Silences what upstream prints at import and on every rank; its errors stay."""
    for logger in ("DeepSpeed", "megatron", "megatron.core"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    for message in UPSTREAM_WARNINGS:
        warnings.filterwarnings("ignore", message=f".*{message}.*")


def device_of(rank: Rank) -> torch.device:
    """This process's device: its GPU where there is one, else the CPU."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.set_device(rank.local_rank % torch.cuda.device_count())
        return torch.device("cuda", torch.cuda.current_device())
    if "OMP_NUM_THREADS" not in os.environ:
        # torchrun shares the cores among its ranks; the deepspeed launcher leaves every rank to take them all.
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or rank.world_size)
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // max(1, local_ranks)))
    return torch.device("cpu")


class Meeting:
    """Where the ranks of a launch have met, before any process group: a store that they share.

    It outlasts what a collective would not: ranks may wait here for days while others tune.

    Args:
        rank: this process.

    Raises:
        UserError: a launcher started several processes and did not say where they meet.
    """

    def __init__(self, rank: Rank) -> None:
        import torch.distributed

        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if rank.launched and missing:
            raise UserError(
                f"{' and '.join(missing)}: not set, so {rank.world_size} processes cannot meet; start them with "
                "torchrun or deepspeed, or export both"
            )
        self._groups = 0
        self.store = torch.distributed.HashStore()
        if rank.launched:
            url = f"env://?rank={rank.rank}&world_size={rank.world_size}"
            self.store, _, _ = next(torch.distributed.rendezvous(url, timeout=_PATIENCE))

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


@contextmanager
def sigterm() -> Iterator[Callable[[], bool]]:
    """Yields a function that tells whether SIGTERM came; it may come twice (launchers send it so)."""
    received = False

    def handle(_signal: int, _frame: FrameType | None) -> None:
        nonlocal received
        received = True

    previous = signal.signal(signal.SIGTERM, handle)
    try:
        yield lambda: received
    finally:
        signal.signal(signal.SIGTERM, previous)


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
    prepare_process()
    import deepspeed.comm
    import torch
    import torch.distributed
    from megatron.core import parallel_state

    device = device_of(rank)
    if not torch.distributed.is_initialized():
        meeting = meeting or Meeting(rank)
    variables = {"RANK": rank.rank, "WORLD_SIZE": rank.world_size, "LOCAL_RANK": rank.local_rank}
    for name, value in variables.items():
        if name not in os.environ:
            _set_variables.add(name)
        os.environ[name] = str(value)
    if layout.tensor > 1:
        # megatron-core overlaps the reduction of input gradients with weight gradients only if kernels queue in order.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
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
        create_gloo_process_groups=False,  # a second set beside NCCL's, for the Megatron engine's checkpoints
    )
    _seed_forward(seed, layout, rank.rank)
    return device


def _seed_forward(seed: int, layout: Layout, rank: int) -> None:
    """Seeds the generators that dropout draws from, with megatron-core's own offsets (tensor_parallel/random.py)."""
    import torch
    from megatron.core.tensor_parallel import random as megatron_random

    seed += 100 * (layout.data_rank(rank) + layout.data * layout.pipeline_rank(rank))
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        megatron_random.model_parallel_cuda_manual_seed(seed)
        return
    # The same states, through the tracker's public set_states: its add() asks CUDA for a generator.
    names = {
        megatron_random.get_data_parallel_rng_tracker_name(): seed,
        megatron_random._MODEL_PARALLEL_RNG_TRACKER_NAME: seed + 2718 + layout.tensor_rank(rank),
        megatron_random.get_expert_parallel_rng_tracker_name(): seed
        + 1024
        + 100 * layout.expert_rank(rank)
        + layout.expert_tensor_rank(rank),
    }
    states = {name: torch.Generator().manual_seed(value).get_state() for name, value in names.items()}
    megatron_random.get_cuda_rng_tracker().set_states(states)


def save_random_state(directory: Path, rank: int) -> None:
    """Writes the states of the generators that dropout draws from, of this rank, as safetensors."""
    from safetensors.torch import save

    # Not save_file, which leaves a file that its owner alone may read, whatever the umask says.
    (directory / _random_file(rank)).write_bytes(save(_random_states()))


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


def stop_distributed() -> None:
    """Ends the process groups, so that another layout, or a process of its own, can start from this one."""
    import deepspeed.comm
    import torch
    from megatron.core import parallel_state

    gc.collect()  # engines hold groups in cycles, and every gloo group holds threads
    parallel_state.destroy_model_parallel()
    # A script of megatron.training starts the groups without DeepSpeed.
    (deepspeed.comm if deepspeed.comm.is_initialized() else torch.distributed).destroy_process_group()
    gc.collect()
    while _set_variables:
        os.environ.pop(_set_variables.pop(), None)


def resolve_auto(config: Config) -> Config:
    """Replaces every `auto` implementation by what it means on this machine, once.

    That a package happens to be importable never changes a model silently: the result is printed and recorded.

    Raises:
        ConfigError: an implementation is asked for that is not installed.
    """
    import torch

    cuda = torch.cuda.is_available()
    training, optimizer, model = config.training, config.optimizer, config.model
    precision = training.precision
    if precision == "auto":
        precision = "bf16" if cuda else "fp32"
    implementation: str = optimizer.implementation
    if config.parallel.engine == "megatron":
        implementation = _megatron_optimizer(config)
    elif implementation == "auto":
        offload = config.parallel.offload_optimizer
        implementation = "deepspeed_cpu_adam" if offload and optimizer.name != "sgd" else "torch"
        if cuda and implementation == "torch":
            implementation = "torch_fused"
    if config.run.wandb_project is not None and not importable("wandb"):
        raise config.error("run.wandb_project", "wandb is not installed; expected pip install wandb, or null")
    kernels = _kernels(config, cuda)
    for key, value in (("optimizer.implementation", implementation), *kernels.items()):
        if value in _CUDA_ONLY and not cuda:
            raise config.error(key, f"{value} computes on CUDA alone, and none is here; expected auto")
        if value in _CUDA_ONLY and not importable(value):
            raise config.error(
                key, f"{value} is not installed; expected auto, or one that is (see mup-megatron doctor)"
            )
    if kernels["model.norm_implementation"] == "apex" and model.normalization != "LayerNorm":
        raise config.error("model.norm_implementation", f"apex has no {model.normalization}; expected torch")
    return config.derive(
        {"training.precision": precision, "optimizer.implementation": implementation, **kernels},
    )


def _kernels(config: Config, cuda: bool) -> dict[str, str]:
    """Which kernels compute the model, by key, every `auto` replaced."""
    model = config.model
    norm: str = model.norm_implementation
    attention: str = model.core_attention
    if norm == "auto":
        norm = "torch"
        if model.norm_gains != "none" and model.transformer_impl == _TE:
            norm = _TE
        elif cuda and model.normalization == "LayerNorm" and model.norm_gains != "none" and importable("apex"):
            norm = "apex"
    if attention == "auto":
        attention = "sdpa" if cuda or config.parallel.context_parallel_size > 1 else "megatron"
        if model.transformer_impl == _TE:
            attention = _TE
    return {
        "model.transformer_impl": model.transformer_impl,
        "model.norm_implementation": norm,
        "model.core_attention": attention,
    }


def _megatron_optimizer(config: Config) -> str:
    """Whose optimizer megatron-core has taken at its import: Transformer Engine's, else Apex's, else torch's.

    Raises:
        ConfigError: the config asks for another.
    """
    from megatron.core.optimizer import Adam

    module = Adam.__module__.partition(".")[0]
    asked = config.optimizer.implementation
    if asked not in ("auto", module):
        raise config.error(
            "optimizer.implementation",
            f"{asked} under parallel.engine: megatron, where megatron-core takes {module}'s; expected auto or {module}",
        )
    return module


def importable(package: str) -> bool:
    """Whether the package is there; for `apex`, whether it is NVIDIA's (PyPI's apex is another project)."""
    if importlib.util.find_spec(package) is None:
        return False
    return package != "apex" or importlib.util.find_spec("apex.normalization") is not None
