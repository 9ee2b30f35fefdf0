"""What the tests of Muon run on ranks, and its update worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mup_megatron.config import Config
from mup_megatron.data.batches import Batches, build_datasets
from mup_megatron.data.prepare import prepare
from mup_megatron.model.build import build_model
from mup_megatron.model.global_names import named_parameters
from mup_megatron.parallel.ranks import Rank
from tests.helpers.bodies import build_engine, start
from tests.helpers.breakages import break_

# Of the five steps, (a, b, c) of a X + b X Xᵀ X + c X (Xᵀ X)²: github.com/KellerJordan/modded-nanogpt.
_STEPS = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


def orthogonalised(matrix: np.ndarray) -> np.ndarray:
    """Newton and Schulz's iteration on the singular values, one by one: no matrix product of megatron-core's."""
    left, values, right = np.linalg.svd(matrix.astype(np.float64), full_matrices=False)
    values = values / np.linalg.norm(values)
    for a, b, c in _STEPS:
        values = a * values + b * values**3 + c * values**5
    return (left * values) @ right


def first_step(rank: Rank, *, config: Config, broken: str = "nothing") -> dict[str, dict[str, Any]]:
    """One step; each matrix's change over its rate on this rank, and on one process its whole gradient."""
    with break_(broken):
        config, layout, parametrization, model = start(rank, config)
        before = {name: parameter.detach().clone() for name, parameter in named_parameters(model)}
        engine = build_engine(config, parametrization, model, layout)
        batches = Batches(build_datasets(config, prepare(config))[0], config, layout, rank.rank, torch.device("cpu"))
        engine.step(batches[0], config.hparams.lr)
        rates = {name: tensor.lr for name, tensor in parametrization.tensors.items()}
        changes = {
            name: ((before[name] - parameter.detach()).double() / rates[name]).numpy()
            for name, parameter in named_parameters(engine.chunks)
            if parametrization.tensors[name].group.update_rule == "muon"
        }
        engine.close()
    gradients = {}
    if rank.world_size == 1:
        (fresh,) = build_model(parametrization, layout, rank.rank, torch.device("cpu"))
        for batch in batches[0]:
            (batch.loss(batch.forward(fresh)) / len(batches[0])).backward()
        gradients = {name: parameter.grad.numpy() for name, parameter in named_parameters(fresh) if name in changes}
    return {"changes": changes, "gradients": gradients}
