"""Lion of every tensor, under DeepSpeed: against float64 by hand, with rates and decay per group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mup_megatron.checkpoints.manifest import check_resume, make_manifest
from mup_megatron.config import derive
from mup_megatron.engines import lion
from mup_megatron.engines.optim import build_optimizer, parameter_groups
from mup_megatron.engines.setup import resolve_auto
from mup_megatron.model.build import parametrize
from mup_megatron.parallel.layout import resolve_layout
from mup_megatron.parallel.upstream import importable
from mup_megatron.tuning.family import differences, digested
from mup_megatron.util.errors import UserError
from tests.helpers.configs import MIXED, VOCABULARY, make

BETAS, STEPS = (0.9, 0.95), 5
ENGINES = ("deepspeed", "megatron")


@pytest.fixture(
    params=[
        pytest.param(
            "emerging_optimizers",
            marks=pytest.mark.skipif(not importable("emerging_optimizers"), reason="it is not installed"),
        ),
        pytest.param("deepspeed_lion", marks=pytest.mark.slow),
    ]
)
def implementation(request: pytest.FixtureRequest) -> str:
    """Whose Lion steps; DeepSpeed's is compiled first."""
    if request.param == "deepspeed_lion":
        request.getfixturevalue("cpu_lion")
    return str(request.param)


def by_hand(value: np.ndarray, gradients: list[np.ndarray], lr: float, decay: float) -> np.ndarray:
    """Chen et al., 2302.06675, algorithm 2, in float64: the sign of an average, then the average; decay decoupled."""
    average = np.zeros_like(value)
    for gradient in gradients:
        update = np.sign(BETAS[0] * average + (1 - BETAS[0]) * gradient)
        value = value - lr * (update + decay * value)
        average = BETAS[1] * average + (1 - BETAS[1]) * gradient
    return value


def trained(implementation: str, broken: str = "") -> dict[str, float]:
    """How far each tensor ends from what its own rate and decay make of it by hand; of a rate unit."""
    config = make(MIXED, "gpt3", optimizer__name="lion", optimizer__implementation=implementation)
    config = resolve_auto(derive(config, {"hparams.lr": 1e-2, "hparams.weight_decay": 0.3}))
    parametrization = parametrize(config, VOCABULARY)
    draw = np.random.default_rng(1)
    start = {name: draw.normal(size=(3, 5)) for name in parametrization.tensors}
    gradients = {name: [draw.normal(size=(3, 5)) for _ in range(STEPS)] for name in start}
    for each in gradients.values():
        for gradient in each:
            gradient[0] = 0  # a row that no token has asked for
    parameters = {name: torch.nn.Parameter(torch.tensor(value, dtype=torch.float32)) for name, value in start.items()}
    groups = parameter_groups(list(parameters.items()), parametrization)
    for group in groups if broken else ():
        group[broken] = groups[0][broken]
    optimizer = build_optimizer(config, groups)
    for step in range(STEPS):
        for name, parameter in parameters.items():
            parameter.grad = torch.tensor(gradients[name][step], dtype=torch.float32)
        optimizer.step()
    off = {}
    for name, tensor in parametrization.tensors.items():
        decay = 0.3 * tensor.weight_decay_multiplier
        expected = by_hand(start[name], gradients[name], 1e-2 * tensor.lr_multiplier, decay)
        off[name] = float(np.abs(parameters[name].detach().double().numpy() - expected).max())
    return off


def test_steps_by_hand(implementation: str) -> None:
    assert max(trained(implementation).values()) < 1e-6


@pytest.mark.parametrize("broken", ["lr", "weight_decay"])
def test_with_one_number_for_all_groups_they_differ(implementation: str, broken: str) -> None:
    """Negative control: of a tensor whose fan-in grows by 5/2, and not of the first group's, the embedding."""
    off = trained(implementation, broken)
    assert off["embedding.word_embeddings.weight"] < 1e-6
    assert off["decoder.layers.0.mlp.linear_fc2.weight"] > 1e-3


@pytest.mark.slow
def test_deepspeed_s_own_moves_what_has_no_gradient(cpu_lion: None) -> None:
    """Why it is mended: a row without gradients goes down by the rate at every step; the others are by hand's."""
    from deepspeed.ops.lion import DeepSpeedCPULion

    moved = {}
    for name, kind in {"own": DeepSpeedCPULion, "mended": lion._mended(DeepSpeedCPULion)}.items():
        parameter = torch.nn.Parameter(torch.ones(3, 5))
        optimizer = kind([parameter], lr=1e-2, betas=BETAS)
        for _ in range(STEPS):
            parameter.grad = torch.tensor([[0.0], [1.0], [-1.0]]).expand(3, 5).contiguous()
            optimizer.step()
        moved[name] = (parameter.detach() - 1)[:, 0].tolist()
    assert moved["own"] == pytest.approx([-0.05, -0.05, 0.05])
    assert moved["mended"] == pytest.approx([0, -0.05, 0.05])


def test_lion_of_one_engine_is_another_than_that_of_the_other(tmp_path: Path) -> None:
    """Neither values nor a checkpoint's state go from one to the other; under AdamW the engine makes no difference."""
    of = {
        name: [resolve_auto(make(MIXED, "gpt3", optimizer__name=name, parallel__engine=e)) for e in ENGINES]
        for name in ("lion", "adamw")
    }
    every, matrices = (digested(config) for config in of["lion"])
    assert differences(every, matrices, "in the record", "here") == [
        "optimizer.steps: 'every tensor' in the record, null here",
    ]
    assert digested(of["adamw"][0]) == digested(of["adamw"][1])
    before, now = (
        make_manifest(parametrize(config, VOCABULARY), resolve_layout(config, 1), "0", 1) for config in of["lion"]
    )
    with pytest.raises(UserError, match="does not belong to this config") as error:
        check_resume(before, now, tmp_path)
    assert [line.split()[0] for line in str(error.value).splitlines()[2:]] == ["optimizer.steps"]


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))  # no lock of a build that was killed lies there
    from deepspeed.ops.op_builder import CPULionBuilder

    def load(self: Any) -> None:
        raise RuntimeError("Ninja is required to load C++ extensions\nand more")

    monkeypatch.setattr(CPULionBuilder, "load", load)
    config = resolve_auto(make(MIXED, "gpt3", optimizer__name="lion"))
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    with pytest.raises(UserError) as error:
        build_optimizer(config, [{"params": parameters, "lr": 1e-3, "weight_decay": 0.0}])
    assert str(error.value) == (
        "optimizer.implementation: DeepSpeed could not compile its Lion for CPUs (Ninja is required to load C++ "
        "extensions); expected a C++ compiler and ninja, or emerging_optimizers"
    )
