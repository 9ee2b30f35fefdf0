"""SOAP under the Megatron engine: its updates in float64 by hand, no layout in the losses, its state in checkpoints."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mup_megatron.data.prepare import prepare
from mup_megatron.engines.setup.megatron import emerging_missing
from mup_megatron.parallel.layout import resolve_layout
from mup_megatron.util.errors import ConfigError
from tests.helpers import bodies, soap_bodies
from tests.helpers.comparison import Difference
from tests.helpers.configs import MIXED, MOE, make
from tests.helpers.distributed import Ranks
from tests.helpers.layouts import STEPS, Split, check

soap = pytest.mark.skipif(emerging_missing("soap") is not None, reason=str(emerging_missing("soap")))

_OWN = {
    "optimizer__name": "soap",
    "model__num_layers": 2,
    "hparams__lr": 3e-3,
    "hparams__weight_decay": 0.1,
}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (MIXED, {**_OWN, "model__num_query_groups": 4, "base__num_query_groups": 2}),
    "moe": (MOE, _OWN),
}
CELLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama", {"data": 2}),
    ("llama", {"pipeline": 2}),
    ("llama", {"context": 2}),
    ("llama", {"pipeline": 2, "data": 2}),
    ("moe", {"expert": 2, "data": 2}),
)


def config_of(model: str, split: Split, **overrides: Any) -> Any:
    growth, own = MODELS[model]
    config = make(growth, "llama", **{**own, **split.overrides, **overrides})
    prepare(config)
    return config


# In float32 rounding decides the eigenvectors of tiny eigenvalues, and a sum in another order gives others. A large
# epsilon keeps that out of the losses, which then differ by 6e-6 at most in 20 steps; gradient norms still differ by
# 6e-5, and are not compared.
LARGE = {"optimizer__soap_eps": 0.1}


def compare(results: list[dict[str, Any]], whole: dict[str, Any], split: Split) -> None:
    """As tests/engines/test_parity.py does, but for the gradient norms."""
    losses = [{**result, "grad_norms": result["losses"]} for result in results]
    check(losses, {**whole, "grad_norms": whole["losses"]}, split)


@pytest.fixture(scope="module")
def reference(ranks: Ranks) -> Any:
    """Runs of the models in one process, made when first asked for."""

    @cache
    def run(model: str) -> dict[str, Any]:
        return ranks.run(1, bodies.train, config=config_of(model, Split("plain"), **LARGE), steps=STEPS)[0]

    return run


@soap
@pytest.mark.slow
@pytest.mark.parametrize(("model", "split"), CELLS, ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_no_layout_is_in_the_losses(ranks: Ranks, reference: Any, model: str, split: dict[str, Any]) -> None:
    whole, asked = reference(model), Split("plain", **split)
    assert whole["losses"][0] - whole["losses"][-1] > 0.5
    config = config_of(model, asked, **LARGE)
    compare(ranks.run(asked.processes, bodies.train, config=config, steps=STEPS), whole, asked)


@soap
@pytest.mark.slow
def test_without_it_the_losses_differ(ranks: Ranks, reference: Any) -> None:
    """Negative control: each rank steps by its own gradients. The first rate is 0."""
    split = Split("plain", data=2)
    config = config_of("llama", split, **LARGE)
    results = ranks.run(2, bodies.train, config=config, steps=STEPS, broken="no_finalize_model_grads")
    with pytest.raises(Difference, match=re.escape("losses[2] on rank 0")):
        compare(results, reference("llama"), split)


def off(taken: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(taken - expected).max() / np.abs(expected).max())


@soap
def test_the_updates_by_hand(ranks: Ranks) -> None:
    """Four of every matrix, in float64 from the gradients, and the averages whose eigenvectors they are made in.

    Negative control: with megatron-core's defaults, which are KL-Shampoo's, the averages are others.
    """
    config = config_of("llama", Split("plain"), hparams__weight_decay=0.0, training__clip_grad=0.0)
    betas = (config.optimizer.betas[0], config.optimizer.betas[1])
    plain, other = (
        ranks.run(1, soap_bodies.steps, config=config, number=4, broken=broken)[0]
        for broken in ("nothing", "soap_as_megatron_has_it")
    )
    assert len(plain) == 8
    for name, found in plain.items():
        by_hand = soap_bodies.by_hand(found, betas=betas)
        for step, expected in enumerate(by_hand):
            assert expected.pop("residual") < 1e-4, (name, step)
            for kind, value in expected.items():
                assert off(found[kind][step], value) < 1e-4, (name, step, kind)
        for step, expected in enumerate(soap_bodies.by_hand(other[name], betas=betas)):
            assert off(other[name]["L"][step], expected["L"]) > 0.1, (name, step)


@soap
@pytest.mark.parametrize("control", [None, pytest.param("soap_rate", marks=pytest.mark.slow)])
def test_the_first_update_over_width(ranks: Ranks, control: str | None) -> None:
    """Its spectral norm goes as sqrt(m_out/m_in), by the real optimizer; at Adam's rate it goes as 1/m_in instead."""
    growth = {
        "model": {"num_layers": 1, "hidden_size": 32, "ffn_hidden_size": 32, "num_attention_heads": 1},
        "base": {"hidden_size": 32, "ffn_hidden_size": 32, "num_attention_heads": 1},
    }
    larger = {"model__hidden_size": 128, "model__ffn_hidden_size": 384, "model__num_attention_heads": 4}
    configs = [
        make(growth, "gpt3", **{**_OWN, **Split("plain").overrides, "model__num_layers": 1, **sizes})
        for sizes in ({}, larger)
    ]
    for config in configs:
        prepare(config)
    base, wide = (ranks.run(1, soap_bodies.steps, config=config, number=1, control=control)[0] for config in configs)
    expected = {"linear_qkv": 1, "linear_proj": 1, "linear_fc1": (12 / 4) ** 0.5, "linear_fc2": (4 / 12) ** 0.5}
    if control is not None:  # hidden ×4, FFN ×12
        expected = {"linear_qkv": 1 / 4, "linear_proj": 1 / 4, "linear_fc1": 1 / 4, "linear_fc2": 1 / 12}
    ratios = {name: spectral_norm(wide[name]) / spectral_norm(base[name]) for name in base}
    right = {name: 0.8 < ratio / expected[name.split(".")[-2]] < 1.25 for name, ratio in ratios.items()}
    assert len(right) == 4
    assert all(right.values()), ratios


def spectral_norm(found: dict[str, Any]) -> float:
    return found["rate"] * float(np.linalg.norm(found["taken"][0], 2))


def legs(ranks: Ranks, count: int, config: Any, folder: Path) -> list[float]:
    """Losses of steps 0 to 9, thrown away and loaded behind the fifth."""
    first = ranks.run(count, bodies.leg, config=config, start_at=0, stop_at=5, save=str(folder))[0]["losses"]
    return [
        *first,
        *ranks.run(count, bodies.leg, config=config, start_at=5, stop_at=9, load=str(folder))[0]["losses"],
    ]


@soap
def test_it_stops_and_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    """Its four squares too: every loss to the last bit. Negative control: without what SOAP keeps they differ."""
    config = config_of("llama", Split("plain"))
    whole = ranks.run(1, bodies.leg, config=config, start_at=0, stop_at=9)[0]["losses"]
    assert legs(ranks, 1, config, tmp_path) == whole
    lost = ranks.run(
        1, bodies.leg, config=config, start_at=5, stop_at=9, load=str(tmp_path), broken="load_weights_alone"
    )[0]["losses"]
    assert lost[0] == whole[5]
    assert abs(lost[1] - whole[6]) > 1e-3


@soap
@pytest.mark.slow
@pytest.mark.parametrize(("model", "split"), CELLS, ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_another_layout_goes_on(
    ranks: Ranks, reference: Any, tmp_path: Path, model: str, split: dict[str, Any]
) -> None:
    """From what one process saved, and one process from what it saved: losses as if nothing had happened."""
    whole, asked = reference(model)["losses"], Split("plain", **split)
    one, many = config_of(model, Split("plain"), **LARGE), config_of(model, asked, **LARGE)
    for number, ((first, before), (second, after)) in enumerate(
        (((1, one), (asked.processes, many)), ((asked.processes, many), (1, one)))
    ):
        folder = tmp_path / str(number)
        ranks.run(first, bodies.leg, config=before, start_at=0, stop_at=5, save=str(folder))
        losses = ranks.run(second, bodies.leg, config=after, start_at=5, stop_at=9, load=str(folder))[0]["losses"]
        np.testing.assert_allclose(losses, whole[5:9], rtol=2e-5)


SHARED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama", {"data": 2}),
    ("llama", {"pipeline": 2, "data": 2}),
    ("moe", {"expert": 2, "data": 4}),
)


@soap
@pytest.mark.slow
@pytest.mark.parametrize(("model", "split"), SHARED, ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_ranks_that_share_the_steps(ranks: Ranks, tmp_path: Path, model: str, split: dict[str, Any]) -> None:
    """Upstream's layer-wise optimizer in bf16: losses to the last bit, stopped and resumed too; unclipped.

    Negative control: nobody hears of the others' steps. The first rate is 0.
    """
    keys = {"training__precision": "bf16", "training__clip_grad": 0.0}
    each, shared = (config_of(model, Split(state, **split), **keys) for state in ("plain", "distributed"))
    count = Split("plain", **split).processes
    whole = ranks.run(count, bodies.train, config=each, steps=STEPS)[0]["losses"]
    assert whole[0] - whole[-1] > 0.5
    assert ranks.run(count, bodies.train, config=shared, steps=STEPS)[0]["losses"] == whole
    assert legs(ranks, count, shared, tmp_path) == whole[:9]
    alone = ranks.run(count, bodies.train, config=shared, steps=4, broken="layer_wise_steps_stay")[0]["losses"]
    assert [one == other for one, other in zip(alone, whole, strict=False)] == [True, True, False, False]


@pytest.mark.parametrize(
    ("model", "keys", "sentence"),
    [
        (
            "llama",
            {"parallel__tensor_model_parallel_size": 2},
            "parallel.tensor_model_parallel_size: 2 with optimizer.name: soap: megatron-core's SOAP takes what a rank",
        ),
        (
            "moe",
            {"parallel__expert_tensor_parallel_size": 2},
            "parallel.expert_tensor_parallel_size: 2 with optimizer.name: soap: megatron-core's SOAP takes what a rank",
        ),
    ],
)
def test_slices_are_refused(model: str, keys: dict[str, Any], sentence: str) -> None:
    growth, own = MODELS[model]
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        resolve_layout(make(growth, "llama", **{**own, **Split("plain").overrides, **keys}), 2)


def test_auto_leaves_matrices_whole() -> None:
    """Two ranks share the data and not the matrices; AdamW's share both."""
    growth, own = MODELS["llama"]
    keys = {**own, **Split("plain").overrides, "parallel__tensor_model_parallel_size": "auto"}
    found = [
        resolve_layout(make(growth, "llama", **{**keys, "optimizer__name": name}), 2) for name in ("soap", "adamw")
    ]
    assert [(layout.tensor, layout.data) for layout in found] == [(1, 2), (2, 1)]
