"""What the tests of SOAP run on ranks, and its updates worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mup_megatron.config import Config
from mup_megatron.data.batches import Batches, build_datasets
from mup_megatron.data.prepare import prepare
from mup_megatron.engines.optim import SQUARES
from mup_megatron.model.global_names import named_parameters
from mup_megatron.parallel.ranks import Rank
from mup_megatron.proof.controls import CONTROLS
from tests.helpers.bodies import build_engine, start
from tests.helpers.breakages import break_

Array = np.ndarray[Any, np.dtype[np.float64]]


def by_hand(found: dict[str, Any], *, betas: tuple[float, float]) -> list[dict[str, Any]]:
    """What SOAP takes from a matrix at each step, over its rate: Adam in the eigenbases of averages of G Gᵀ and Gᵀ G.

    Vyas et al. (arXiv 2409.11321), algorithm 3, in float64, with what emerging_optimizers 0.3 adds: both averages are
    corrected for their start, as Adam's are. Adam's first moment is turned into the new basis; the second is not
    turned, and only follows the order of the eigenvectors.

    Args:
        found: of one matrix, from `steps`; its gradients, epsilon and bases are used. Bases are SOAP's own, since
            float32 decides those of tiny eigenvalues (`residual` says whether they are the algorithm's).
        betas: Adam's; the second also of the averages.

    Returns:
        Per step the update (`taken`), the averages L and R, and how far the bases are from being what the algorithm
        says (`residual`): orthonormal; first eigenvectors, then the Q of one power iteration from the last.
    """
    gradients, eps = found["gradients"], found["eps"]
    rows, columns = gradients[0].shape
    factors = {"L": np.zeros((rows, rows)), "R": np.zeros((columns, columns))}
    bases = {"L": np.eye(rows), "R": np.eye(columns)}
    mean, square = np.zeros((rows, columns)), np.zeros((rows, columns))
    result: list[dict[str, Any]] = []
    for step, gradient in enumerate(gradients, start=1):
        share = (1 - betas[1]) / (1 - betas[1] ** step)
        factors = {
            "L": (1 - share) * factors["L"] + share * gradient @ gradient.T,
            "R": (1 - share) * factors["R"] + share * gradient.T @ gradient,
        }
        back = bases["L"] @ mean @ bases["R"].T
        residual = 0.0
        for axis, side in enumerate("LR"):
            order = np.argsort(-np.sum(bases[side] * (factors[side] @ bases[side]), axis=0), kind="stable")
            square = np.take(square, order, axis=axis)
            new, iterated = found[f"Q_{side}"][step - 1], factors[side] @ bases[side][:, order]
            # Q.T A is a triangle where A = Q R, and a diagonal where columns of Q are eigenvectors of A.
            under = (
                np.tril(new.T @ iterated, -1)
                if step > 1
                else (made := new.T @ factors[side] @ new) - np.diag(made.diagonal())
            )
            residual = max(
                residual, np.abs(new.T @ new - np.eye(len(new))).max(), np.abs(under).max() / np.abs(iterated).max()
            )
            bases[side] = new
        turned = bases["L"].T @ gradient @ bases["R"]
        mean = betas[0] * (bases["L"].T @ back @ bases["R"]) + (1 - betas[0]) * turned
        square = betas[1] * square + (1 - betas[1]) * turned**2
        root = np.sqrt(square / (1 - betas[1] ** step))
        update = bases["L"] @ (mean / (1 - betas[0] ** step) / (root + eps)) @ bases["R"].T
        result.append({"taken": update, **factors, "residual": residual})
    return result


def steps(
    rank: Rank, *, config: Config, number: int, broken: str = "nothing", control: str | None = None
) -> dict[str, dict[str, Any]]:
    """Some steps at the full rate, without a rule or with all: of each matrix what every step took, over its rate.

    Beside it the gradient of that step, SOAP's squares after it, the matrix's rate and epsilon.
    """
    with break_(broken):
        config, layout, parametrization, model = start(rank, config)
        if control:
            parametrization = CONTROLS[control].break_(parametrization, layout)
        engine = build_engine(config, parametrization, model, layout)
        batches = Batches(build_datasets(config, prepare(config))[0], config, layout, rank.rank, torch.device("cpu"))
        matrices = {
            name: parameter
            for name, parameter in named_parameters(engine.chunks)
            if parametrization.tensors[name].group.update_rule == "soap"
        }
        found: dict[str, dict[str, Any]] = {
            name: {
                **{kind: [] for kind in ("taken", "gradients", *SQUARES)},
                "rate": parametrization.tensors[name].lr,
                "eps": parametrization.tensors[name].eps,
            }
            for name in matrices
        }
        for step in range(number):
            before = {name: parameter.detach().double().clone() for name, parameter in matrices.items()}
            engine.step(batches[step], config.hparams.lr)
            for name, parameter in matrices.items():
                change = before[name] - parameter.detach()
                found[name]["taken"].append(change.numpy() / found[name]["rate"])
                found[name]["gradients"].append(parameter.main_grad.double().numpy().copy())
                held = engine.gather(parameter)
                for kind in SQUARES:
                    found[name][kind].append(held[kind].double().numpy())
        engine.close()
    return found
