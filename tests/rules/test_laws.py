"""The table over the sizes: laws that are measured once, against tables that are made at other sizes."""

from __future__ import annotations

import importlib.metadata
import random
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch
from packaging.version import Version

from mup_megatron.config import Config, derive
from mup_megatron.model.build import parametrize
from mup_megatron.parallel import upstream
from mup_megatron.rules.laws import Laws
from mup_megatron.rules.measured_laws import laws_of, size_of
from mup_megatron.rules.shapes import without_numbers
from mup_megatron.rules.table import Parametrization
from mup_megatron.util.errors import ConfigError, UserError
from tests.helpers.configs import HEAD_SIZE, MIXED, MLA, MOE, VOCABULARY, make, make_t5
from tests.rules.test_oracles import PROPORTIONAL

_MEGATRON: dict[str, Any] = {"parallel__engine": "megatron", "parallel__use_distributed_optimizer": False}
_RULES: dict[str, Any] = {
    "parametrization__depth": "completep",
    "base__num_layers": 1,
    "parametrization__batch": "sqrt_sde",
    "parametrization__tokens": "power:-0.32",
    "optimizer__betas": [0.99, 0.999],
    "tuning__global_batch_size": 4,
    "tuning__train_steps": 10,
}
CONFIGS: dict[str, Callable[[], Config]] = {
    "gpt3": lambda: make(MIXED),
    "head size": lambda: make(HEAD_SIZE, "llama"),
    "experts": lambda: make(MOE, "llama", base__num_moe_experts=2, parametrization__experts="any_share"),
    "latent attention": lambda: make(MLA, "llama"),
    "encoder and decoder": make_t5,
    "depth, batch and tokens": lambda: make(MIXED, **_RULES),
    "fan-in": lambda: make(MIXED, parametrization__name="fan_in"),
    "standard": lambda: make(MIXED, parametrization__name="standard"),
    "one ratio": lambda: make(MIXED, parametrization__name="one_ratio"),
    "neural tangent": lambda: make(MIXED, parametrization__name="ntk"),
    "factors by tensor": lambda: make(MIXED, hparams__per_tensor={"attention_q": {"init": 2.0}, "mlp": {"lr": 3.0}}),
    "SGD": lambda: make(PROPORTIONAL, optimizer__name="sgd"),
    "Muon": lambda: make(PROPORTIONAL, optimizer__name="muon", hparams__weight_decay=0.0, **_MEGATRON),
}
FACTORS = [Fraction(n, d) for n, d in ((1, 4), (1, 2), (1, 1), (1, 1), (3, 2), (2, 1), (3, 1), (4, 1), (16, 1))]


@pytest.fixture(autouse=True, scope="module")
def prepared() -> None:
    upstream.prepare_process()


table_of = partial(parametrize, vocab_size=VOCABULARY)


def draw(config: Config, laws: Laws, rng: random.Random) -> tuple[dict[str, float], Parametrization]:
    """Random sizes that the config allows, as ratios to the target's, and the table there."""
    while True:
        factors = {size: rng.choice(FACTORS) for size in laws.sizes}
        factors = {
            size: ratio if not size_of(config, size) * ratio % 1 else Fraction(1) for size, ratio in factors.items()
        }
        keys = {
            key: int(size_of(config, key) * factors[size])
            for size, found in laws.sizes.items()
            for key in (size, *found.along)
        }
        try:
            return {size: float(ratio) for size, ratio in factors.items()}, table_of(derive(config, keys))
        except UserError:
            continue


def compare(laws: Laws, ratios: dict[str, float], table: Parametrization) -> None:
    """Every number of the table against its law."""
    for name, law in laws.forward.items():
        assert law.at(ratios) == pytest.approx(getattr(table.forward, name), rel=1e-12), (name, ratios)
    rows = {without_numbers(name): row for name, row in reversed(list(table.tensors.items()))}
    assert {tensor.name for tensor in laws.tensors} == set(rows)
    for tensor in laws.tensors:
        row, found = rows[tensor.name], tensor.at(ratios)
        expected: dict[str, Any] = {"lr": row.lr, "weight_decay": row.weight_decay, "forward": row.forward_multiplier}
        expected |= {} if row.eps is None else {"eps": row.eps}
        expected["init"] = {block or "": std for block, std in row.init_std.items()}
        assert found == {name: pytest.approx(value, rel=1e-12) for name, value in expected.items()}, (
            tensor.name,
            ratios,
        )


@pytest.mark.parametrize("case", CONFIGS)
def test_laws_are_the_table(case: str) -> None:
    config = CONFIGS[case]()
    laws, rng = laws_of(config, table_of), random.Random(case)
    assert len(laws.sizes) >= 4
    for _ in range(12):
        compare(laws, *draw(config, laws, rng))


@pytest.mark.slow
def test_at_a_thousand_random_sizes() -> None:
    rng = random.Random(0)
    measured = [(config, laws_of(config, table_of)) for config in (build() for build in CONFIGS.values())]
    for number in range(1000):
        config, laws = measured[number % len(measured)]
        compare(laws, *draw(config, laws, rng))


def test_by_hand() -> None:
    """The second layer of an MLP whose FFN grows 5/2 times and hidden size 3/2 times (MIXED), Adam, decay independent.

    Fan-in is the FFN: rate as 1/FFN, init as FFN^-1/2, decay as FFN; epsilon as 1/hidden size.
    """
    laws = laws_of(make(MIXED), table_of)
    fc2 = next(tensor for tensor in laws.tensors if tensor.name == "decoder.layers.*.mlp.linear_fc2.weight")
    assert fc2.fan_in.size.powers == {"model.ffn_hidden_size": 1.0}
    assert fc2.fan_outs[""].size.powers == {"model.hidden_size": 1.0}
    assert fc2.values["lr"].powers == {"m_in": -1.0}
    assert fc2.values["eps"].powers == {"m_out": -1.0}
    assert fc2.values["weight_decay"].powers == {"m_in": 1.0}
    assert fc2.init[""].powers == {"m_in": -0.5, "model.num_layers": -0.5}
    found = fc2.at({**dict.fromkeys(laws.sizes, 1.0), "model.ffn_hidden_size": 4.0, "model.hidden_size": 2.0})
    assert found["lr"] == pytest.approx(8e-3 / 10)
    assert found["eps"] == pytest.approx(1e-8 / 3)
    assert found["init"][""] == pytest.approx(0.05 / 2 / 10**0.5)  # 1/sqrt(2L) of two layers


def heads_under_muon() -> Config:
    """Hidden ×2, head size ×2: query has as many rows as columns, key half as many."""
    sizes = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 64, "num_attention_heads": 4, "kv_channels": 16}
    growth = {"model": {**sizes, "num_query_groups": 2}, "base": {"hidden_size": 32, "kv_channels": 8}}
    return make(growth, optimizer__name="muon", hparams__weight_decay=0.0, **_MEGATRON)


def test_blocks_that_would_need_rates_of_their_own() -> None:
    """Where the table cannot be made because query and key would need two rates, the laws say so, and nowhere else.

    By hand, head size doubled: rows of the query grow ×4 and are the larger side, whose growth Muon's update shows, so
    that nothing is left; rows of the key grow ×4, and the larger side, the columns, ×2.
    """
    config = heads_under_muon()
    laws = laws_of(config, table_of)
    assert laws.sizes["model.kv_channels"].along == []
    found = {}
    for factor in (Fraction(1, 2), Fraction(1), Fraction(2)):
        ratios = {**dict.fromkeys(laws.sizes, 1.0), "model.kv_channels": float(factor)}
        found[float(factor)] = [tensor.name for tensor in laws.tensors if tensor.is_refused(ratios)]
        moved = derive(config, {"model.kv_channels": int(16 * factor)})
        if found[float(factor)]:
            with pytest.raises(UserError, match=r"linear_qkv\.weight would be ×.* for the query, ×.* for the key"):
                table_of(moved)
        else:
            table_of(moved)
    assert found == {0.5: [], 1.0: [], 2.0: ["decoder.layers.*.self_attention.linear_qkv.weight"]}


def test_sizes_that_move_together() -> None:
    """Where the head size is fixed, the config lets hidden size and heads grow together alone; the parts of a head of
    latent attention are a sum in the attention scale."""
    bound = laws_of(make(PROPORTIONAL), table_of).sizes
    assert bound["model.hidden_size"].along == ["model.num_attention_heads"]
    assert "model.num_attention_heads" not in bound
    free = laws_of(make(MIXED), table_of).sizes
    assert [size for size, found in free.items() if found.base] == [
        *("model.hidden_size", "model.ffn_hidden_size", "model.num_attention_heads", "model.num_query_groups")
    ]
    assert all(found.along == [] for found in free.values())


@pytest.mark.skipif(
    Version(importlib.metadata.version("megatron-core")) < Version("0.17"),
    reason="megatron-core has its own MuP from 0.17 on",
)
@pytest.mark.parametrize("growth", [MIXED, MOE], ids=["gpt3", "experts"])
def test_one_ratio_is_megatron_cores(growth: dict[str, Any]) -> None:
    """Rate and epsilon of every tensor, head not tied, from upstream's own function; init from its own methods."""
    from megatron.core.optimizer import OptimizerConfig, get_mup_config_overrides
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = make(growth, "llama", parametrization__name="one_ratio")
    laws = laws_of(config, table_of)
    m = config.model.hidden_size / config.base.sizes["hidden_size"]
    overrides = get_mup_config_overrides(OptimizerConfig(optimizer="adam", lr=8e-3, adam_eps=1e-8), m)
    target = dict.fromkeys(laws.sizes, 1.0)
    specs = {without_numbers(name): shape.spec for name, shape in table_of(config).shapes.items()}
    assert {"readout", "matrix", "vector", "embedding"} == {tensor.kind for tensor in laws.tensors}
    for tensor in laws.tensors:
        parameter = torch.nn.Parameter(torch.empty(specs[tensor.name].shape, device="meta"))
        said = {"max_lr": 8e-3, "eps": 1e-8}
        for key, override in overrides.items():
            said |= override if key.matches(parameter, tensor.name) else {}
        found = tensor.at(target)
        assert found["lr"] == pytest.approx(said["max_lr"]), tensor.name
        assert found["eps"] == pytest.approx(said["eps"]), tensor.name
        assert found["weight_decay"] == (0.1 if len(specs[tensor.name].shape) > 1 else 0.0)
    theirs = TransformerConfig(
        num_layers=config.model.num_layers,
        hidden_size=config.model.hidden_size,
        num_attention_heads=config.model.num_attention_heads,
        kv_channels=config.model.kv_channels,
        init_method_std=0.05,
        use_mup=True,
        mup_base_hidden_size=config.base.sizes["hidden_size"],
        mup_base_head_dim=float(config.model.head_size),
    )
    methods = {
        "decoder.layers.*.self_attention.linear_qkv.weight": theirs.init_method,
        "decoder.layers.*.self_attention.linear_proj.weight": theirs.output_layer_init_method,
        "embedding.word_embeddings.weight": theirs.embedding_init_method,
        "output_layer.weight": theirs.embedding_init_method,
    }
    for tensor in laws.tensors:
        if tensor.name in methods:
            drawn = torch.empty(1000, 1000)
            methods[tensor.name](drawn)
            for std in tensor.at(target)["init"].values():
                assert drawn.std().item() == pytest.approx(std, rel=0.01), tensor.name
    assert theirs.mup_output_mult == pytest.approx(laws.forward["readout"].at(target))
    assert theirs.softmax_scale == pytest.approx(laws.forward["softmax_scale"].at(target))


def test_one_ratio_needs_adam_and_a_hidden_size_that_grows() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.name: sgd: parametrization\.name: one_ratio is for adam"):
        make(PROPORTIONAL, optimizer__name="sgd", parametrization__name="one_ratio")
    with pytest.raises(ConfigError, match=r"base\.hidden_size: missing; parametrization\.name: one_ratio"):
        make(MIXED, parametrization__name="one_ratio", base__hidden_size=None)
