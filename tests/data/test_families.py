"""What a family of models is trained on: engines ask the batch for forward pass and loss, and know no family."""

from __future__ import annotations

import pytest

from mup_megatron.config.model import FAMILIES
from mup_megatron.data.families import family_of
from mup_megatron.data.prepare import prepare
from tests.helpers import bodies
from tests.helpers.configs import MIXED, make
from tests.helpers.distributed import Ranks


@pytest.mark.parametrize("engine", ["deepspeed", "megatron"])
def test_an_engine_asks_the_batch(ranks: Ranks, engine: str) -> None:
    """A batch whose loss is twice that of its tokens gives twice the loss, to the last bit, by one call for each."""
    config = make(MIXED, "gpt3", parallel__engine=engine, parallel__zero_stage=0)
    prepare(config)
    plain, doubled, asked = ranks.run(1, bodies.doubled, config=config)[0]
    assert doubled == 2 * plain > 0
    micro_batches = config.training.global_batch_size // config.training.micro_batch_size
    assert asked == ["forward", "loss"] * micro_batches


def test_every_architecture_has_a_family() -> None:
    """Each of the config's architectures has its module in data/, whose public functions are there."""
    for architecture in FAMILIES:
        model = make(MIXED, "gpt3").model.model_copy(update={"architecture": architecture})
        family = family_of(model)
        assert callable(family.dataset)
        assert callable(family.maker)
