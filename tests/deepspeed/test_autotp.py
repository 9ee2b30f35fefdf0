"""DeepSpeed's AutoTP under `mup_megatron.deepspeed`: two ranks share layers, rates and losses are one process's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mup_megatron import mup
from mup_megatron.deepspeed import initialize
from mup_megatron.mup.in_place import split_in_place
from mup_megatron.mup.parameters import infshape_of
from mup_megatron.parallel.ranks import Rank
from mup_megatron.util.errors import UserError
from tests.helpers.distributed import Ranks

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]
WORDS, LENGTH, BATCH, STEPS = 32, 8, 4, 20
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
BASE = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4}


def llama(sizes: dict[str, int]) -> Any:
    from transformers import LlamaConfig

    fixed: dict[str, Any] = {
        "vocab_size": WORDS,
        "num_hidden_layers": 2,
        "max_position_embeddings": LENGTH,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**{**fixed, **sizes, "initializer_range": 0.2, "attn_implementation": "eager"})


def model() -> Any:
    """Four times the base's width, its key/value heads fixed."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    return mup.prepare_hf(LlamaForCausalLM(llama(SIZES)), llama(BASE))


class Readout(torch.nn.Module):
    """Two layers and a readout with a forward multiplier; AutoTP is told which of them to split."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, width)
        self.up = torch.nn.Linear(width, 2 * width, bias=False)
        self.down = torch.nn.Linear(2 * width, width, bias=False)
        self.readout = mup.MuReadout(width, WORDS, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        hidden = self.embedding(x)
        logits = self.readout(hidden + self.down(torch.relu(self.up(hidden))))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return type("Output", (), {"loss": loss})


def small() -> Readout:
    """Width 32 over 8."""
    torch.manual_seed(0)
    made = Readout(32)
    mup.set_base_shapes(made, Readout(8), delta=Readout(16))
    return made


def specs(*split: tuple[str, str]) -> dict[str, Any]:
    """AutoTP's own form of what is split how, all else whole."""
    layers = [{"patterns": [f".*{name}.*"], "partition_type": kind} for name, kind in split]
    return {"use_default_specs": False, "layer_specs": layers}


SPLIT = specs(("up", "column"), ("down", "row"))
WITH_READOUT = specs(("up", "column"), ("down", "row"), ("readout", "column"))


def trained(
    rank: Rank, *, ranks: int, stage: int = 1, partition: dict[str, Any] | None = None, shards: bool = False
) -> dict[str, Any]:
    """Losses of one batch, again and again, each tensor's rate, epsilon and decay, and its share at the start.

    `partition` takes the small model instead of Llama. `shards` has the rules read widths off what a rank holds.
    """
    import deepspeed.comm

    deepspeed.comm.init_distributed("gloo", dist_init_required=False)
    prepared = model() if partition is None else small()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-6, "weight_decay": 0.01, "torch_adam": True}},
    }
    if ranks > 1:
        config["tensor_parallel"] = {"autotp_size": ranks, **({"partition_config": partition} if partition else {})}
    if shards:
        halve(prepared)
    names = {id(parameter): name for name, parameter in prepared.named_parameters()}
    beside = torch.optim.AdamW(prepared.parameters(), lr=1e-2)
    split_in_place(prepared, beside)
    rules = {
        names[id(parameter)]: [group[key] for key in ("lr", "eps", "weight_decay")]
        for group in beside.param_groups
        for parameter in group["params"]
    }
    whole = {name: parameter.detach().clone() for name, parameter in prepared.named_parameters()}
    try:
        engine, optimizer, *_ = initialize(model=prepared, config=config)
    except UserError as error:
        return {"said": str(error)}
    assert {id(parameter) for parameter in engine.module.parameters()} == set(names)
    shares = {name: parameter.detach().clone() for name, parameter in prepared.named_parameters()}
    tokens = torch.randint(WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(3))
    losses = []
    for _ in range(STEPS):
        loss = engine(tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    groups = sorted((group["lr"], group["eps"], group["weight_decay"]) for group in optimizer.param_groups)
    return {"losses": losses, "groups": groups, "rules": rules, "whole": whole, "shares": shares}


def halve(prepared: Any) -> None:
    """What rules would be that read a rank's own shapes: half of the fan-in of a row-parallel matrix."""
    for name, parameter in prepared.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            infshape_of(parameter).folded *= 2


def split_at(whole: torch.Tensor, shares: list[torch.Tensor]) -> int | None:
    """The dimension at which shares make up the whole; None where each is the whole."""
    if shares[0].shape == whole.shape:
        assert all(torch.equal(share, whole) for share in shares)
        return None
    (dim,) = (dim for dim in (0, 1) if shares[0].shape[dim] != whole.shape[dim])
    assert torch.equal(torch.cat(shares, dim), whole)
    return dim


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_two_ranks_are_one(stage: int, ranks: Ranks) -> None:
    """Twenty steps of Llama, four times as wide as its base: one process's losses, rates and initial values."""
    (one,) = ranks.run(1, trained, ranks=1, stage=stage)
    two = ranks.run(2, trained, ranks=2, stage=stage)
    for rank in two:
        assert rank["losses"] == pytest.approx(one["losses"], rel=2e-5)
        assert rank["groups"] == one["groups"]
        assert rank["rules"] == one["rules"]
    assert len(one["groups"]) > 3
    assert one["losses"][-1] < one["losses"][0] / 2
    places = {
        name.rpartition("layers.1.")[2]: split_at(one["whole"][name], [rank["shares"][name] for rank in two])
        for name in one["whole"]
        if "layers.1." in name
    }
    assert {name for name, dim in places.items() if dim == 1} == {"self_attn.o_proj.weight", "mlp.down_proj.weight"}
    assert {name for name, dim in places.items() if dim == 0} == {
        *(f"self_attn.{part}_proj.weight" for part in "qkv"),
        *(f"mlp.{part}_proj.weight" for part in ("gate", "up")),
    }


def test_rules_of_what_a_rank_holds_are_found_out(ranks: Ranks) -> None:
    """The negative control: with half of the fan-in, losses leave those of one process."""
    (one,) = ranks.run(1, trained, ranks=1)
    two = ranks.run(2, trained, ranks=2, shards=True)
    assert two[0]["losses"][0] == pytest.approx(one["losses"][0], rel=2e-5)  # initial values are the same
    assert two[0]["groups"] != one["groups"]
    assert two[0]["losses"][-1] != pytest.approx(one["losses"][-1], rel=1e-3)


def test_a_readout_that_stays(ranks: Ranks) -> None:
    (one,) = ranks.run(1, trained, ranks=1, partition=SPLIT)
    two = ranks.run(2, trained, ranks=2, partition=SPLIT)
    assert two[0]["losses"] == two[1]["losses"] == pytest.approx(one["losses"], rel=2e-5)
    assert two[0]["groups"] == one["groups"]
    assert split_at(one["whole"]["down.weight"], [rank["shares"]["down.weight"] for rank in two]) == 1


def test_a_readout_that_is_replaced_is_refused(ranks: Ranks) -> None:
    """Its multiplier would be gone with it."""
    for found in ranks.run(2, trained, ranks=2, partition=WITH_READOUT):
        assert "put a layer of its own in the place of readout, whose multiplier is lost" in found["said"]
