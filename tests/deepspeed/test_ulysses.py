"""DeepSpeed's Ulysses under `mup_megatron.deepspeed`: ranks share a sequence, rates and losses are one process's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mup_megatron import mup
from mup_megatron.deepspeed import initialize
from mup_megatron.mup.in_place import split_in_place
from mup_megatron.parallel.ranks import Rank
from mup_megatron.util.errors import UserError
from tests.helpers.distributed import Ranks

pytestmark = pytest.mark.usefixtures("one_thread")
CLASSES, LENGTH, BATCH, HEADS, LR, STEPS = 16, 8, 4, 4, 1e-2, 6
SLOW = pytest.mark.slow


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    """Softmax attention over [batch, sequence, heads, head size], logits over the head size times its base's root."""
    logits = torch.einsum("bshd,bthd->bhst", query, key) * (2**0.5 / query.shape[-1])
    return torch.einsum("bhst,bthd->bshd", logits.softmax(-1), value)


class Model(nn.Module):
    """One layer of attention; `distributed` makes the attention that Ulysses splits by heads."""

    def __init__(self, width: int, distributed: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, width)
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)
        self.readout = mup.MuReadout(width, CLASSES)
        self.attention: Any = attend
        if distributed:
            from deepspeed.sequence.layer import DistributedAttention

            local = nn.Module()
            local.forward = attend
            self.attention = DistributedAttention(local, torch.distributed.group.WORLD, scatter_idx=2, gather_idx=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x)
        heads = [part(hidden).unflatten(-1, (HEADS, -1)) for part in (self.query, self.key, self.value)]
        return self.readout(hidden + self.out(self.attention(*heads, 0).flatten(-2)))


def model(distributed: bool = False) -> Model:
    """Width 32 over 8, heads of 8 over 2: ratio 4."""
    torch.manual_seed(0)
    result = Model(32, distributed)
    mup.set_base_shapes(result, Model(8), delta=Model(16))
    return result


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One batch of whole sequences, again and again; each label is its token plus the sequence's first."""
    tokens = torch.randint(CLASSES, (BATCH, LENGTH), generator=torch.Generator().manual_seed(3))
    return [(tokens, (tokens + tokens[:, :1]) % CLASSES)] * STEPS


def share_of_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """What these tokens add to the mean over all tokens of the batch; DeepSpeed sums it over a sequence's ranks."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (BATCH * LENGTH)


def in_deepspeed(
    rank: Rank, *, stage: int, groups: str = "mpu", plain: bool = False, positions: str = "own"
) -> dict[str, Any]:
    """Trains on this rank's part of every sequence; losses, and the rates of the groups.

    `groups` says how DeepSpeed learns which ranks share a sequence, an mpu or a mesh; `plain` takes DeepSpeed's own
    initialize. `positions` is `own`, or `all`: each rank then takes the first part, which is wrong.
    """
    import deepspeed.comm
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    deepspeed.comm.init_distributed(dist_backend="gloo", verbose=False)
    if groups == "mpu":
        parallel_state_sp.initialize_sequence_parallel(rank.world_size)
    net = model(distributed=True)
    settings = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.0, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    split = {"mpu": parallel_state_sp} if groups == "mpu" else {"mesh_param": (1, rank.world_size)}
    engine, *_ = (deepspeed.initialize if plain else initialize)(
        model=net, model_parameters=net.parameters() if plain else None, config=settings, **split
    )
    part = LENGTH // rank.world_size
    first = rank.rank * part if positions == "own" else 0
    losses = []
    for x, y in batches():
        loss = share_of_loss(engine(x[:, first : first + part]), y[:, first : first + part])
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        losses.append(total.item())
        engine.backward(loss)
        engine.step()
    rates = sorted({group["lr"] for group in engine.basic_optimizer.param_groups})
    size = engine.sequence_parallel_size
    embedded = engine.module.embedding.weight.detach().clone()
    engine.destroy()
    return {"losses": losses, "rates": rates, "size": size, "embedding": embedded.numpy()}


@pytest.fixture(scope="module")
def alone() -> list[float]:
    """Plain torch, one process."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR, weight_decay=0.0)
    split_in_place(net, optimizer)
    losses = []
    for x, y in batches():
        loss = share_of_loss(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] - losses[-1] > 0.1
    return losses


@pytest.mark.parametrize(
    ("stage", "groups"),
    [
        pytest.param(0, "mpu", marks=SLOW),
        (1, "mpu"),
        pytest.param(2, "mpu", marks=SLOW),
        pytest.param(3, "mpu", marks=SLOW),
        pytest.param(3, "mesh", marks=SLOW),
    ],
)
def test_a_split_sequence_is_one_process(ranks: Ranks, alone: list[float], stage: int, groups: str) -> None:
    for result in ranks.run(2, in_deepspeed, stage=stage, groups=groups):
        assert result["size"] == 2
        assert result["losses"] == pytest.approx(alone, abs=2e-5)
        assert result["rates"] == pytest.approx([LR / 4, LR])  # hidden matrices, and the rest


@SLOW
def test_the_wrong_part_shows(ranks: Ranks, alone: list[float]) -> None:
    """Negative control: ranks that take the same part of the sequence compute another loss."""
    for result in ranks.run(2, in_deepspeed, stage=1, positions="all"):
        assert abs(result["losses"][0] - alone[0]) > 1e-3


def test_a_mesh_below_stage_3_is_refused() -> None:
    """By the argument and by the config's keys."""
    expected = r": at ZeRO 1 DeepSpeed would not sum gradients over the 2 ranks that share a sequence; expected mpu="
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
    with pytest.raises(UserError, match="mesh_param" + expected):
        initialize(model=model(), config=settings, mesh_param=(1, 2))
    with pytest.raises(UserError, match="sequence_parallel_size" + expected):
        initialize(model=model(), config={**settings, "sequence_parallel_size": 2, "data_parallel_size": 1})


@SLOW
def test_why_a_mesh_is_refused(ranks: Ranks) -> None:
    """DeepSpeed's own initialize leaves ranks that share a sequence with different embeddings."""
    first, second = ranks.run(2, in_deepspeed, stage=1, groups="mesh", plain=True)
    assert abs(first["embedding"] - second["embedding"]).max() > LR
    first, second = ranks.run(2, in_deepspeed, stage=1, groups="mpu", plain=True)
    assert abs(first["embedding"] - second["embedding"]).max() == 0
