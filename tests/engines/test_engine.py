"""The DeepSpeed engine on real ranks: rates reach the update, ratios survive, runs stop and go on, norms, precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mup_megatron.data.prepare import prepare
from mup_megatron.engines.setup import refuse, resolve_auto
from mup_megatron.engines.setup.megatron import emerging_missing
from mup_megatron.parallel.layout import resolve_layout
from mup_megatron.util.errors import ConfigError
from tests.helpers import bodies
from tests.helpers.commands import compile_operator
from tests.helpers.configs import MIXED, MLA, make
from tests.helpers.distributed import Ranks

TP2 = {"parallel__tensor_model_parallel_size": 2, "training__micro_batch_size": 2}


def prepared(**overrides: Any) -> Any:
    config = make(MIXED, "gpt3", **overrides)
    prepare(config)
    return config


@pytest.mark.parametrize(
    "stage",
    [0, *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 2)), 3, pytest.param("fsdp2", marks=pytest.mark.slow)],
)
def test_the_first_update_has_the_size_of_the_rate(ranks: Ranks, stage: int | str) -> None:
    """AdamW's first step moves a coordinate by its rate, whatever the gradient; five rates, TP 2 and DP 2."""
    split = FSDP2 if stage == "fsdp2" else {"parallel__zero_stage": stage}
    config = prepared(hparams__weight_decay=0.0, optimizer__eps=1e-20, **split, **TP2)
    rates = set()
    for result in ranks.run(4, bodies.first_update, config=config):
        for name, (change, rate) in result.items():
            # The key bias shifts all attention logits of a query alike, so its gradient is rounding noise; the
            # tensor's other coordinates still move by the rate.
            assert change == pytest.approx(rate, rel=1e-3), name
            rates.add(rate)
    assert len(rates) == 4  # 1, 2/3, 1/2 and 2/5 of the base rate


def test_the_first_update_under_sgd(ranks: Ranks) -> None:
    """SGD without momentum moves by rate times gradient: rates of the rule, gradients of this step."""
    growth = {"model__num_query_groups": 4, "base__num_query_groups": 2, "optimizer__name": "sgd"}
    config = prepared(
        parallel__zero_stage=0, training__clip_grad=0.0, optimizer__momentum=0.0, hparams__weight_decay=0.0, **growth
    )
    updates = ranks.run(1, bodies.first_update, config=config)[0]
    halved = prepared(
        parallel__zero_stage=0,
        training__clip_grad=0.0,
        optimizer__momentum=0.0,
        hparams__weight_decay=0.0,
        hparams__lr=4e-3,
        **growth,
    )
    for name, (change, rate) in ranks.run(1, bodies.first_update, config=halved)[0].items():
        assert change * 2 == pytest.approx(updates[name][0], rel=1e-2, abs=1e-6), name
        assert rate * 2 == updates[name][1]


MUON = {
    "parallel__engine": "megatron",
    "parallel__use_distributed_optimizer": False,
    "optimizer__name": "muon",
    "hparams__weight_decay": 0.0,
    "model__num_query_groups": 4,
    "base__num_query_groups": 2,
}
muon = pytest.mark.skipif(emerging_missing("muon") is not None, reason=str(emerging_missing("muon")))
LION = {
    "optimizer__name": "lion",
    "parallel__engine": "megatron",
    "parallel__use_distributed_optimizer": False,
}
lion = pytest.mark.skipif(emerging_missing("lion") is not None, reason=str(emerging_missing("lion")))


@muon
@pytest.mark.parametrize("rule", ["muon", pytest.param("base", marks=pytest.mark.slow)])
def test_the_first_update_under_muon(ranks: Ranks, rule: str) -> None:
    """Its spectral norm goes as sqrt(m_out/m_in), by the real optimizer; it does not at the base's rate."""
    growth = {
        "model": {"num_layers": 1, "hidden_size": 32, "ffn_hidden_size": 32, "num_attention_heads": 1},
        "base": {"hidden_size": 32, "ffn_hidden_size": 32, "num_attention_heads": 1},
    }
    larger = {"model__hidden_size": 128, "model__ffn_hidden_size": 384, "model__num_attention_heads": 4}
    settings = {key: value for key, value in MUON.items() if "query_groups" not in key}
    configs = [make(growth, "gpt3", **settings, **sizes) for sizes in ({}, larger)]
    for config in configs:
        prepare(config)
    base, wide = (ranks.run(1, bodies.first_update_norms, config=config, rule=rule)[0] for config in configs)
    expected = {"linear_qkv": 1, "linear_proj": 1, "linear_fc1": (12 / 4) ** 0.5, "linear_fc2": (4 / 12) ** 0.5}
    off = {
        name: wide[name] / base[name] / factor
        for layer, factor in expected.items()
        for name in base
        if name.endswith(f"{layer}.weight")
    }
    assert len(off) == 4
    right = {name: 0.8 < ratio < 1.25 for name, ratio in off.items()}  # five Newton-Schulz steps end within that
    assert all(right.values()) if rule == "muon" else not any(right.values()), off


@muon
def test_the_first_update_of_latent_attention_under_muon(ranks: Ranks) -> None:
    """Whole, blocks that grow apart and all: spectral norms go as sqrt(m_out/m_in), worked out by hand."""
    settings = {key: value for key, value in MUON.items() if "query_groups" not in key}
    wide = make(MLA, "llama", **settings, model__num_layers=1)
    base = make({**MLA, "model": {**MLA["model"], **MLA["base"]}}, "llama", **settings, model__num_layers=1)
    prepare(wide)
    small, large = (ranks.run(1, bodies.first_update_norms, config=one, rule="muon")[0] for one in (base, wide))
    expected = {
        "linear_q_up_proj": (160 / 48) ** 0.5,
        "linear_kv_down_proj": (56 / 20 / 1.5) ** 0.5,
        "linear_kv_up_proj": (208 / 48 / 3) ** 0.5,
        "linear_proj": (1.5 / 7) ** 0.5,
    }
    for layer, factor in expected.items():
        name = f"decoder.layers.0.self_attention.{layer}.weight"
        assert 0.8 < large[name] / small[name] / factor < 1.25, (layer, large[name] / small[name], factor)


def go(ranks: Ranks, folder: Path, count: int, config: Any, **settings: Any) -> list[dict[str, Any]]:
    """Steps 0 to 5, saved; then everything is thrown away; then steps 5 to 9 from what was saved."""
    first = ranks.run(count, bodies.leg, config=config, start_at=0, stop_at=5, save=str(folder))
    second = ranks.run(count, bodies.leg, config=config, start_at=5, stop_at=9, load=str(folder), **settings)
    return [{key: one[key] + two[key] for key in ("losses", "rates")} for one, two in zip(first, second, strict=True)]


MEGATRON = {"parallel__engine": "megatron"}
FSDP2 = {**MEGATRON, "parallel__use_distributed_optimizer": False, "parallel__use_torch_fsdp2": True}
STOPS = {
    "zero0": {"parallel__zero_stage": 0},
    "zero1": {"parallel__zero_stage": 1},
    "zero2": {"parallel__zero_stage": 2},
    "zero3": {"parallel__zero_stage": 3},
    "zero1-bf16": {"parallel__zero_stage": 1, "training__precision": "bf16"},
    "zero3-bf16": {"parallel__zero_stage": 3, "training__precision": "bf16"},
    "megatron": {**MEGATRON, "parallel__use_distributed_optimizer": False},
    "megatron-distributed": MEGATRON,
    "megatron-bf16": {**MEGATRON, "training__precision": "bf16", "parallel__use_distributed_optimizer": False},
    "megatron-lion": LION,
    "megatron-muon": MUON,
    "megatron-muon-bf16": {**MUON, "training__precision": "bf16"},
    "megatron-distributed-bf16": {**MEGATRON, "training__precision": "bf16"},
    "megatron-fsdp2": FSDP2,
    "megatron-fsdp2-bf16": {**FSDP2, "training__precision": "bf16"},
    "megatron-fsdp2-sgd": {
        **FSDP2,
        "optimizer__name": "sgd",
        "model__num_query_groups": 4,
        "base__num_query_groups": 2,
        "hparams__weight_decay": 0.0,
    },
}
QUICK_STOPS = ("zero2",)  # tests/engines/test_resume.py has the Megatron engine's


def _marks(name: str) -> list[pytest.MarkDecorator]:
    return [muon] * ("muon" in name) + [lion] * ("lion" in name) + [pytest.mark.slow] * (name not in QUICK_STOPS)


@pytest.mark.parametrize(
    "settings",
    [pytest.param(s, id=n, marks=_marks(n)) for n, s in STOPS.items()],
)
def test_stop_and_go_is_bitwise(ranks: Ranks, settings: dict[str, Any], tmp_path: Path) -> None:
    """Saved and loaded at step 5 of 9: the same losses and rates to the last bit; ratios between groups never move."""
    config = prepared(**settings, **TP2)
    whole = ranks.run(4, bodies.leg, config=config, start_at=0, stop_at=9)
    assert go(ranks, tmp_path, 4, config) == whole
    rates = np.array(whole[0]["rates"])[1:]  # the first is 0, warm-up
    np.testing.assert_allclose(rates / rates[:, :1], np.tile(rates[0] / rates[0, 0], (8, 1)), rtol=1e-12)
    assert len(set(rates[0])) >= 4


@pytest.mark.slow
def test_a_loaded_run_without_optimizer_state_differs(ranks: Ranks, tmp_path: Path) -> None:
    """Negative control: weights alone are not enough."""
    config = prepared(parallel__zero_stage=1)
    whole = ranks.run(2, bodies.leg, config=config, start_at=0, stop_at=9)
    halves = go(ranks, tmp_path, 2, config, broken="load_weights_alone")
    assert halves[0]["losses"][:6] == whole[0]["losses"][:6]
    assert halves[0]["losses"][8] != whole[0]["losses"][8]


def test_clipping_limits_the_update(ranks: Ranks) -> None:
    """SGD: with the norm clipped to a hundredth of what it is, updates are that much smaller."""
    settings = {
        "parallel__zero_stage": 0,
        "optimizer__name": "sgd",
        "optimizer__momentum": 0.0,
        "hparams__weight_decay": 0.0,
        "model__num_query_groups": 4,
        "base__num_query_groups": 2,
    }
    free = ranks.run(1, bodies.first_update, config=prepared(training__clip_grad=0.0, **settings))[0]
    norm = ranks.run(1, bodies.norms, config=prepared(training__clip_grad=0.0, **settings))[0]["plain"]
    clipped = ranks.run(1, bodies.first_update, config=prepared(training__clip_grad=norm / 100, **settings))[0]
    for name, (change, _) in free.items():
        assert clipped[name][0] * 100 == pytest.approx(change, rel=0.02, abs=2e-4), name


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bf16_with_master_weights(ranks: Ranks, stage: int) -> None:
    """Near fp32's losses over 20 steps, and equal under TP 2 and DP 2 within what bf16 resolves."""
    fp32 = ranks.run(1, bodies.train, config=prepared(parallel__zero_stage=0), steps=20)[0]["losses"]
    bf16 = prepared(parallel__zero_stage=stage, training__precision="bf16", **TP2)
    for result in ranks.run(4, bodies.train, config=bf16, steps=20):
        np.testing.assert_allclose(result["losses"], fp32, rtol=0.01)


@pytest.mark.parametrize(
    "recompute",
    [
        {"training__recompute_granularity": "full", "training__recompute_method": "uniform"},
        {"training__recompute_granularity": "full", "training__recompute_method": "block"},
        {"training__recompute_granularity": "selective"},
    ],
    ids=["uniform", "block", "selective"],
)
def test_recomputation_changes_nothing(ranks: Ranks, recompute: dict[str, Any]) -> None:
    plain = ranks.run(1, bodies.train, config=prepared(parallel__zero_stage=1), steps=4)[0]
    if recompute["training__recompute_granularity"] == "full":
        recompute = {**recompute, "training__recompute_num_layers": 1}
    again = ranks.run(1, bodies.train, config=prepared(parallel__zero_stage=1, **recompute), steps=4)[0]
    assert again["losses"] == plain["losses"]
    assert again["grad_norms"] == plain["grad_norms"]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"training__precision": "bf16", "parallel__zero_stage": 0}, "parallel.zero_stage: DeepSpeed's bf16 without"),
        ({"parallel__offload_optimizer": True, "parallel__zero_stage": 0}, "ZeRO 0 partitions nothing to offload"),
        (
            {"parallel__engine": "megatron", "parallel__context_parallel_size": 2, "model__mtp_num_layers": 1},
            "parallel.context_parallel_size: megatron-core takes the mean of multi-token prediction over each rank's",
        ),
        (
            {"model__num_moe_experts": 4, "model__moe_router_topk": 2, "model__transformer_impl": "local"},
            "model.add_bias_linear: megatron-core's local experts add a bias in place",
        ),
        (
            {"parallel__engine": "megatron", "parallel__pipeline_model_parallel_size": 2, "model__mtp_num_layers": 1},
            "model.mtp_num_layers: learned_absolute positions and pipeline stages: megatron-core gives the last stage",
        ),
        (
            {"parallel__engine": "megatron", "optimizer__name": "lion"},
            "parallel.use_distributed_optimizer: megatron-core's distributed optimizer is AdamW's, not lion's",
        ),
        (
            {"parallel__engine": "megatron", "optimizer__name": "muon", "training__precision": "fp32"},
            "parallel.use_distributed_optimizer: Muon's layer-wise optimizer steps in bf16 alone",
        ),
        (
            {
                "parallel__engine": "megatron",
                "optimizer__name": "muon",
                "training__precision": "bf16",
                "parallel__overlap_grad_reduce": True,
                "parallel__overlap_param_gather": True,
            },
            "parallel.use_distributed_optimizer: Muon's layer-wise optimizer is not tested with parallel.overlap_param",
        ),
    ],
)
def test_what_upstream_gets_wrong_is_refused(overrides: dict[str, Any], sentence: str) -> None:
    config = make(MIXED, "gpt3", **overrides)
    ranks = config.parallel.context_parallel_size * config.parallel.pipeline_model_parallel_size
    with pytest.raises(ConfigError) as error:
        refuse(config, resolve_layout(config, ranks))
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    "parallel",
    [
        {**MEGATRON, "parallel__use_distributed_optimizer": False},
        MEGATRON,
        pytest.param(FSDP2, marks=pytest.mark.slow),
    ],
    ids=["plain", "distributed", "fsdp2"],
)
def test_an_ended_engine_leaves_no_threads(ranks: Ranks, parallel: dict[str, Any]) -> None:
    """Each process group has three, and a model that anything still holds keeps some twenty groups."""
    config = make(MIXED, "llama", training__micro_batch_size=4, **parallel)
    prepare(config)
    after = []
    for _ in range(3 if parallel is FSDP2 else 2):  # DTensor's caches keep the first mesh, and its group
        ranks.run(2, bodies.train, config=config, steps=1)
        after.append(ranks.run(1, bodies.threads)[0])
    (process, before), (same, count) = after[-2:]
    assert process == same, f"a process with {before} threads was replaced"  # distributed.py, _MOST_THREADS
    # Less than a group: a single thread of an earlier test may end in between, or one of torch's own begin.
    assert count - before < 3, f"{before} threads, then {count}"


@pytest.fixture(scope="module")
def cpu_adam() -> None:
    """DeepSpeed's Adam for CPUs."""
    compile_operator("CPUAdamBuilder")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offloaded_optimizer(ranks: Ranks, cpu_adam: None, stage: int) -> None:
    """DeepSpeedCPUAdam gives torch's AdamW's losses."""
    whole = ranks.run(1, bodies.train, config=prepared(parallel__zero_stage=0), steps=10)[0]
    config = prepared(parallel__zero_stage=stage, parallel__offload_optimizer=True, **TP2)
    assert resolve_auto(config).optimizer.implementation == "deepspeed_cpu_adam"
    for result in ranks.run(4, bodies.train, config=config, steps=10):
        np.testing.assert_allclose(result["losses"], whole["losses"], rtol=2e-5)


@lion
def test_the_first_update_under_lion(ranks: Ranks) -> None:
    """A sign; and AdamW's first step, for what is no matrix: coordinates move by their rates, under TP 2 and DP 2."""
    config = prepared(hparams__weight_decay=0.0, optimizer__eps=1e-20, **LION, **TP2)
    rates = set()
    for result in ranks.run(4, bodies.first_update, config=config):
        for name, (change, rate) in result.items():
            assert change == pytest.approx(rate, rel=1e-3), name
            rates.add(rate)
    # Fan-in ratios: 3/2 of the hidden size, 5/2 of the FFN's, 2 of the heads', and what reads no growing size.
    assert sorted(rates) == pytest.approx([config.hparams.lr / ratio for ratio in (2.5, 2, 1.5, 1)])


@pytest.mark.slow
@lion
def test_lion_sees_no_layout(ranks: Ranks) -> None:
    """With decay, which is decoupled; negative control: a rate that is 1 % larger shows."""
    settings = {**LION, "hparams__lr": 1e-3, "hparams__weight_decay": 0.3}
    whole = ranks.run(1, bodies.train, config=prepared(**settings), steps=8)[0]
    assert whole["losses"][0] - whole["losses"][-1] > 0.1
    for result in ranks.run(4, bodies.train, config=prepared(**settings, **TP2), steps=8):
        np.testing.assert_allclose(result["losses"], whole["losses"], rtol=2e-5)
    faster = ranks.run(1, bodies.train, config=prepared(**{**settings, "hparams__lr": 1.01e-3}), steps=8)[0]
    assert abs(faster["losses"][-1] / whole["losses"][-1] - 1) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_other_optimizers_see_no_layout_either(ranks: Ranks, name: str) -> None:
    settings = {"optimizer__name": name, "hparams__weight_decay": 0.0, "model__num_query_groups": 4}
    settings |= {"base__num_query_groups": 2, "hparams__lr": 8e-3 if name == "adam" else 0.5}
    whole = ranks.run(1, bodies.train, config=prepared(parallel__zero_stage=0, **settings), steps=12)[0]
    assert whole["losses"][0] - whole["losses"][-1] > 0.1
    for result in ranks.run(4, bodies.train, config=prepared(parallel__zero_stage=1, **TP2, **settings), steps=12):
        np.testing.assert_allclose(result["losses"], whole["losses"], rtol=2e-5)
