"""What the tests of an encoder-decoder run on ranks."""

from __future__ import annotations

from typing import Any

import torch

from mup_megatron.config import Config
from mup_megatron.data.batches import Batches, build_datasets
from mup_megatron.data.prepare import prepare
from mup_megatron.engines.optim import LearningRateSchedule
from mup_megatron.parallel.ranks import Rank
from tests.helpers import bodies
from tests.helpers.breakages import break_


def _batches(rank: Rank, config: Config, layout: Any) -> Batches:
    return Batches(build_datasets(config, prepare(config))[0], config, layout, rank.rank, torch.device("cpu"))


def trajectory(rank: Rank, *, config: Config, steps: int) -> dict[str, Any]:
    """Weights before and after some steps, losses, this rank's batches, and the schedule's share of the peak rate."""
    config, layout, parametrization, model = bodies.start(rank, config)
    batches = _batches(rank, config, layout)
    initial = bodies.values(model)
    engine = bodies.build_engine(config, parametrization, model, layout)
    schedule = LearningRateSchedule(config.training, config.hparams.lr)
    losses = [engine.step(batches[step], schedule(step)).loss for step in range(steps)]
    final = bodies.values(engine.chunks)
    engine.close()
    seen = [[vars(batch) for batch in batches[step]] for step in range(steps)]
    return {
        "initial": initial,
        "final": final,
        "losses": losses,
        "batches": seen,
        "rates": [schedule(step) / config.hparams.lr for step in range(steps)],
    }


def attention(rank: Rank, *, config: Config) -> dict[str, Any]:
    """What goes into three core attentions of an initial model and what comes out, in float64, with the masks."""
    config, layout, _, (model,) = bodies.start(rank, config)
    seen: dict[str, Any] = {}

    def keep(name: str) -> Any:
        def hook(_module: Any, inputs: Any, keys: Any, output: torch.Tensor) -> None:
            given = dict(zip(("query", "key", "value", "mask"), inputs, strict=False))
            seen[name] = {part: tensor.detach().double().numpy() for part, tensor in given.items()}
            seen[name]["context"] = output.detach().double().numpy()

        return hook

    places = {
        "encoder": model.encoder.layers[-1].self_attention,
        "decoder": model.decoder.layers[-1].self_attention,
        "cross": model.decoder.layers[-1].cross_attention,
    }
    for name, module in places.items():
        module.core_attention.register_forward_hook(keep(name), with_kwargs=True)
    batch = _batches(rank, config, layout)[0][0]
    batch.forward(model)
    return seen


def initial(rank: Rank, *, config: Config, broken: str = "nothing") -> dict[str, Any]:
    """This rank's initial values; `broken` names what is wrong meanwhile (breakages.py)."""
    with break_(broken):
        return bodies.values(bodies.start(rank, config)[3])


def branches(rank: Rank, *, config: Config) -> dict[str, float]:
    """What each residual branch of the model adds for an output of 1 and a bias of 2, by stack, layer and branch."""
    (model,) = bodies.start(rank, config)[3]
    one, two, nothing = (torch.full((1, 1, 4), value) for value in (1.0, 2.0, 0.0))
    return {
        f"{stack} {number} {branch}": getattr(layer, branch)(True, False)((one, two), nothing, 0.0)[0, 0, 0].item()
        for stack in ("encoder", "decoder")
        for number, layer in enumerate(getattr(model, stack).layers)
        for branch in ("self_attn_bda", *(["cross_attn_bda"] if stack == "decoder" else []), "mlp_bda")
    }
