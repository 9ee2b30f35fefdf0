"""Lion of every tensor, for DeepSpeed's engine: DeepSpeed's kernels, mended, or torch's operations.

Public name: `build_lion`. Under the Megatron engine Lion is megatron-core's, of matrices alone (engines/megatron.py).
"""

from __future__ import annotations

from typing import Any

import torch

from mup_megatron.util.errors import UserError


def build_lion(
    groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], implementation: str, offloaded: bool
) -> torch.optim.Optimizer:
    """Lion (Chen et al., arXiv 2302.06675) with decoupled decay.

    Args:
        groups: from `optim.parameter_groups`; each has its rate and its decay.
        lr: of groups without one.
        betas: share of the average in an update, and the average's decay.
        implementation: `deepspeed_lion` or `emerging_optimizers`.
        offloaded: whether the state lives on the CPU although there is a GPU.

    Raises:
        UserError: DeepSpeed cannot compile its kernel for CPUs.
    """
    if implementation == "emerging_optimizers":
        from emerging_optimizers.scalar_optimizers import Lion

        return Lion(groups, lr=lr, betas=betas, weight_decay=0.0)
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion

    if torch.cuda.is_available() and not offloaded:
        return _mended(FusedLion)(groups, lr=lr, betas=betas)
    try:
        return _mended(DeepSpeedCPULion)(groups, lr=lr, betas=betas)
    except RuntimeError as error:
        why = str(error.__cause__ or error).partition("\n")[0]
        raise UserError(
            f"optimizer.implementation: DeepSpeed could not compile its Lion for CPUs ({why}); expected a C++ compiler "
            "and ninja, or emerging_optimizers"
        ) from None


def _mended(kind: type[torch.optim.Optimizer]) -> Any:
    """DeepSpeed's class with sign(0) = 0.

    DeepSpeed 0.19 takes a sign bit for the sign (cpu_lion_impl.cpp, copysignf; multi_tensor_lion.cu, `c > 0`). What has
    had no gradient yet, such as an expert without tokens or the row of a token that did not occur, so moves by its rate
    at every step: down on a CPU, up on a GPU. Lion's sign of nothing is 0.
    """

    class Lion(kind):  # type: ignore[misc, valid-type]
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            still = [(p, *_unmoved(p, self.state.get(p, {}), group)) for p, group in _stepped(self.param_groups)]
            loss = super().step(closure)
            for parameter, where, values in still:
                parameter.data[where] = values
            return loss

    return Lion


def _stepped(groups: list[dict[str, Any]]) -> list[tuple[torch.Tensor, dict[str, Any]]]:
    return [(parameter, group) for group in groups for parameter in group["params"] if parameter.grad is not None]


def _unmoved(
    parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which coordinates have had no gradient, and what their decay makes of them."""
    where = torch.eq(torch.as_tensor(parameter.grad), 0)
    if "exp_avg" in state:
        where &= state["exp_avg"] == 0
    return where, parameter.data[where] * (1 - group["lr"] * group["weight_decay"])
