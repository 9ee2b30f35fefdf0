"""The rules on real models: every expected number is worked out by hand in the comment beside it."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest

from mup_megatron.model.build import parametrize
from mup_megatron.parallel import upstream
from mup_megatron.rules import formulas
from mup_megatron.rules.table import Parametrization, TensorHyperparameters
from mup_megatron.util.errors import UserError
from tests.helpers.configs import HEAD_SIZE, MIXED, MLA, VOCABULARY, make

EMBEDDING = "embedding.word_embeddings.weight"
QKV = "decoder.layers.1.self_attention.linear_qkv"
PROJ = "decoder.layers.0.self_attention.linear_proj"
FC1 = "decoder.layers.0.mlp.linear_fc1"
FC2 = "decoder.layers.1.mlp.linear_fc2"


@pytest.fixture(autouse=True, scope="module")
def prepared() -> None:
    upstream.prepare_process()


def apply(growth: dict[str, Any], architecture: str = "gpt3", **overrides: Any) -> Parametrization:
    return parametrize(make(growth, architecture, **overrides), VOCABULARY)


def numbers(tensor: TensorHyperparameters) -> tuple[Any, ...]:
    """lr, eps and decay multipliers."""
    return tensor.lr_multiplier, tensor.eps_multiplier, tensor.weight_decay_multiplier


def test_mixed_growth_gpt3() -> None:
    """hidden ×3/2, FFN ×5/2, heads ×2, query groups ×4, head size 8 fixed; init std 0.05, 2 layers."""
    tensors = apply(MIXED).tensors
    # Input-like: Adam rate 1, eps 1/m_out = 2/3, decayed as in the base.
    assert numbers(tensors[EMBEDDING]) == (1, pytest.approx(2 / 3), 1)
    assert tensors[EMBEDDING].init_std == {None: 0.05}
    assert numbers(tensors["embedding.position_embeddings.weight"]) == (1, pytest.approx(2 / 3), 1)
    # Gains and biases: m_in 1, eps 1/own length's ratio, no decay.
    assert numbers(tensors["decoder.final_layernorm.weight"]) == (1, pytest.approx(2 / 3), 0)
    assert numbers(tensors[FC1 + ".bias"]) == (1, pytest.approx(2 / 5), 0)
    assert numbers(tensors[FC2 + ".bias"]) == (1, pytest.approx(2 / 3), 0)
    # fc1: m_in 3/2, m_out 5/2.
    assert numbers(tensors[FC1 + ".weight"]) == (pytest.approx(2 / 3), pytest.approx(2 / 5), 1.5)
    assert tensors[FC1 + ".weight"].init_std == {None: pytest.approx(0.05 / math.sqrt(1.5))}
    # fc2: m_in 5/2, m_out 3/2; Megatron's 1/sqrt(2·2 layers) = 1/2.
    assert numbers(tensors[FC2 + ".weight"]) == (pytest.approx(2 / 5), pytest.approx(2 / 3), 2.5)
    assert tensors[FC2 + ".weight"].init_std == {None: pytest.approx(0.025 / math.sqrt(2.5))}
    # Attention output: fan-in heads·d, ×2.
    assert numbers(tensors[PROJ + ".weight"]) == (0.5, pytest.approx(2 / 3), 2)
    assert tensors[PROJ + ".weight"].init_std == {None: pytest.approx(0.025 / math.sqrt(2))}
    # QKV: m_in 3/2 for all blocks; fan-outs ×2 (query) and ×4 (key, value): eps is the smallest, 1/4.
    assert numbers(tensors[QKV + ".weight"]) == (pytest.approx(2 / 3), 0.25, 1.5)
    assert tensors[QKV + ".weight"].init_std == {
        block: pytest.approx(0.05 / math.sqrt(1.5)) for block in ("query", "key", "value")
    }
    assert {block: float(dim.ratio) for block, dim in tensors[QKV + ".weight"].shape.blocks.items()} == {
        "query": 2,
        "key": 4,
        "value": 4,
    }
    assert numbers(tensors[QKV + ".bias"]) == (1, 0.25, 0)


def test_forward_multipliers() -> None:
    forward = apply(
        MIXED,
        hparams__output_multiplier=6.0,
        hparams__embedding_multiplier=5.0,
        hparams__attention_multiplier=3.0,
        hparams__residual_multiplier=0.5,
    ).forward
    assert forward.readout == pytest.approx(4.0)  # 6 · 64/96
    assert forward.embedding == 5.0
    assert forward.softmax_scale == pytest.approx(3 / math.sqrt(8))  # head size 8 in the base too
    assert forward.residual == 0.5


@pytest.mark.parametrize("tied", [True, False])
def test_the_table_takes_a_from_one_place(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A = 1/7 instead of 64/96, from the one place that works A out: everything that A is in follows."""
    a_seventh = property(lambda ratios: Fraction(1, 7 if ratios.readout else 1))
    monkeypatch.setattr(formulas.Ratios, "forward", a_seventh)
    parametrization = apply(
        MIXED, "llama", model__share_embeddings_and_output_weights=tied, hparams__output_multiplier=2.0
    )
    assert parametrization.forward.readout == pytest.approx(2 / 7)
    if tied:
        return
    head = parametrization.tensors["output_layer.weight"]
    assert head.forward_multiplier == pytest.approx(2 / 7)
    assert head.init_std == {None: pytest.approx(0.05 * 7 / 1.5)}  # (1/A) / m_in
    assert numbers(head) == (
        pytest.approx(7 / 1.5),
        pytest.approx(1 / 7),
        pytest.approx(1.5 / 7),
    )  # 1/(A m_in), A, A m_in
    assert head.gradient_norm == {None: pytest.approx(49 / 1.5)}  # 1/(A² m_in)


def test_other_rules_for_the_same_model() -> None:
    """`replaced` changes what it is told, rows and forward multipliers together, and leaves the original alone."""
    whole = apply(MIXED, "llama", hparams__output_multiplier=6.0)
    other = whole.replaced(lambda tensor: tensor.retuned(lr=0.25, decay=3.0), readout=6.0)
    assert whole.forward.readout == whole.tensors["output_layer.weight"].forward_multiplier == pytest.approx(4.0)
    assert other.forward.readout == other.tensors["output_layer.weight"].forward_multiplier == 6.0
    assert other.forward.residual == whole.forward.residual
    # Gains are not decayed; everything else has one rate now, so that two groups are left.
    assert numbers(other.tensors[FC2 + ".weight"]) == (0.25, pytest.approx(2 / 3), 3.0)
    assert numbers(other.tensors["decoder.final_layernorm.weight"]) == (0.25, pytest.approx(2 / 3), 0)
    assert (other.tensors[FC2 + ".weight"].lr, other.tensors[FC2 + ".weight"].weight_decay) == (
        2e-3,
        pytest.approx(0.3),
    )
    assert {key.lr for key in other.groups} == {0.25}
    assert {key.lr for key in whole.groups} > {Fraction(2, 3), Fraction(2, 5)}


def test_growing_head_size() -> None:
    """Head size 16 to 24: 1/sqrt(24) · sqrt(16/24) = 4/24; heads fixed at 4, so QKV grows ×3/2 on ×2 hidden."""
    parametrization = apply(HEAD_SIZE)
    assert parametrization.forward.softmax_scale == pytest.approx(4 / 24)
    qkv = parametrization.tensors[QKV + ".weight"]
    assert numbers(qkv) == (0.5, pytest.approx(2 / 3), 2)
    assert {dim.ratio for dim in qkv.shape.blocks.values()} == {1.5}


def test_untied_readout_in_llama() -> None:
    parametrization = apply(HEAD_SIZE, "llama", hparams__output_multiplier=4.0)
    readout = parametrization.tensors["output_layer.weight"]
    # hidden ×2: A = 1/2, so init and rate stay, eps is A/m_out = 1/2.
    assert numbers(readout) == (1, 0.5, 1)
    assert readout.init_std == {None: 0.05}
    assert readout.forward_multiplier == parametrization.forward.readout == 2.0
    fc1 = parametrization.tensors[FC1 + ".weight"]
    assert {block: dim.ratio for block, dim in fc1.shape.blocks.items()} == {"gate": 3, "up": 3}
    assert numbers(fc1) == (0.5, pytest.approx(1 / 3), 2)


def test_fixed_ffn() -> None:
    """FFN 128 in base and target, hidden 32 to 128 (×4): fc1's fan-out is fixed, fc2 is input-like."""
    growth = {
        "model": {"num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 128, "num_attention_heads": 4},
        "base": {"hidden_size": 32, "num_attention_heads": 1},
    }
    tensors = apply(growth, parametrization__fixed_fan_out_init="output_like").tensors
    assert tensors[FC1 + ".weight"].init_std == {None: pytest.approx(0.05 / 4)}  # 1/m_in
    assert numbers(tensors[FC1 + ".weight"]) == (0.25, 1, 4)
    assert tensors[FC2 + ".weight"].init_std == {None: pytest.approx(0.025)}  # not the half that native MuP gives
    assert numbers(tensors[FC2 + ".weight"]) == (1, 0.25, 1)
    for rule in ("hidden_like", "auto"):
        tensors = apply(growth, parametrization__fixed_fan_out_init=rule).tensors
        assert tensors[FC1 + ".weight"].init_std == {None: pytest.approx(0.05 / 2)}  # m_in^-1/2


def test_fixed_kv_heads() -> None:
    """Heads 2 to 8, one KV head in both, hidden ×4: queries are hidden-like, keys and values output-like."""
    growth = {
        "model": {
            "num_layers": 2,
            "hidden_size": 128,
            "ffn_hidden_size": 512,
            "num_attention_heads": 8,
            "num_query_groups": 1,
        },
        "base": {"hidden_size": 32, "ffn_hidden_size": 128, "num_attention_heads": 2},
    }
    parametrization = apply(growth, "llama")  # by default K and V take g
    qkv = parametrization.tensors[QKV + ".weight"]
    assert qkv.init_std == {
        "query": pytest.approx(0.05 / 2),
        "key": pytest.approx(0.05 / 4),
        "value": pytest.approx(0.05 / 4),
    }
    assert numbers(qkv) == (0.25, 0.25, 4)
    assert any("linear_qkv" in line for line in parametrization.clip_warnings())
    hidden_like = apply(growth, "llama", parametrization__fixed_fan_out_init="hidden_like")
    assert set(hidden_like.tensors[QKV + ".weight"].init_std.values()) == {0.025}


def test_narrower_than_the_base() -> None:
    """Base twice as wide as the target."""
    growth = {
        "model": {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 2},
        "base": {"hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4},
    }
    parametrization = apply(growth)
    assert numbers(parametrization.tensors[FC1 + ".weight"]) == (2, 2, 0.5)
    assert parametrization.tensors[FC1 + ".weight"].init_std == {None: pytest.approx(0.05 * math.sqrt(2))}
    assert parametrization.forward.readout == 2


def test_at_the_base_everything_is_one() -> None:
    base = {**MIXED, "model": {**MIXED["model"], **MIXED["base"]}}
    parametrization = apply(base)
    for tensor in parametrization.tensors.values():
        assert numbers(tensor)[:2] == (1, 1)
        assert tensor.forward_multiplier == 1
    assert len(parametrization.groups) == 2  # decayed and not, as Megatron has them


def test_standard_parametrization() -> None:
    parametrization = apply(MIXED, parametrization__name="standard")
    assert {numbers(tensor)[:2] for tensor in parametrization.tensors.values()} == {(1, 1)}
    assert parametrization.tensors[FC1 + ".weight"].init_std == {None: 0.05}
    assert parametrization.forward.readout == 1
    assert parametrization.forward.softmax_scale == 1 / math.sqrt(8)


@pytest.mark.parametrize(
    ("depth", "branch", "lr", "eps", "decay"),
    [("completep", 0.5, 1.0, 0.5, 1.0), ("depth_mup", 2**-0.5, 2**-0.5, 2**-0.5, 2**0.5)],
)
def test_depth_rules(depth: str, branch: float, lr: float, eps: float, decay: float) -> None:
    """Two layers on a base of one: factors inside the blocks, none outside, 1/sqrt(2L) of the base depth."""
    growth = {"model": MIXED["model"], "base": {**MIXED["base"], "num_layers": 1}}
    parametrization = apply(growth, parametrization__depth=depth)
    assert parametrization.forward.residual == pytest.approx(branch)
    fc1, final = (parametrization.tensors[name] for name in (FC1 + ".weight", "decoder.final_layernorm.weight"))
    assert numbers(fc1) == (pytest.approx(lr * 2 / 3), pytest.approx(eps * 2 / 5), pytest.approx(decay * 3 / 2))
    assert numbers(final) == (1, pytest.approx(2 / 3), 0)
    assert numbers(parametrization.tensors[EMBEDDING]) == (1, pytest.approx(2 / 3), 1)
    gain = parametrization.tensors["decoder.layers.0.input_layernorm.weight"]
    assert numbers(gain) == (pytest.approx(lr), pytest.approx(eps * 2 / 3), 0)
    assert parametrization.tensors[FC2 + ".weight"].init_std == {
        None: pytest.approx(0.05 / math.sqrt(2 * 1) / math.sqrt(2.5))
    }


def test_sgd() -> None:
    growth = {
        "model": {"num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 384, "num_attention_heads": 4},
        "base": {"hidden_size": 32, "ffn_hidden_size": 32, "num_attention_heads": 1},
    }
    tensors = apply(growth, optimizer__name="sgd", optimizer__implementation="torch").tensors
    assert tensors[EMBEDDING].lr_multiplier == 4  # m_out
    assert tensors[FC1 + ".weight"].lr_multiplier == 3  # 12/4
    assert tensors[FC2 + ".weight"].lr_multiplier == pytest.approx(1 / 3)  # 4/12
    assert tensors[FC1 + ".bias"].lr_multiplier == 12
    assert tensors[FC2 + ".weight"].weight_decay_multiplier == pytest.approx(3)
    assert tensors[FC2 + ".weight"].eps is None


@pytest.mark.parametrize(("depth", "factor"), [("completep", 4.0), ("depth_mup", 1.0), (0.75, 2.0)])
def test_sgd_under_a_depth_rule(depth: str | float, factor: float) -> None:
    """Four layers on a base of one: SGD's rates inside the blocks times 4^(2α - 1); Adam's would be 4^(α - 1)."""
    growth = {"model": {**HEAD_SIZE["model"], "num_layers": 4}, "base": {**HEAD_SIZE["base"], "num_layers": 1}}
    sgd: dict[str, Any] = {"optimizer__name": "sgd", "optimizer__implementation": "torch"}
    tensors = apply(growth, **sgd, parametrization__depth=depth).tensors
    expected = {
        FC1 + ".weight": 3 / 2,  # FFN ×3, hidden ×2
        FC2 + ".weight": 2 / 3,
        QKV + ".weight": 3 / 4,  # head size ×3/2, hidden ×2
        FC1 + ".bias": 3.0,
        "decoder.layers.3.input_layernorm.weight": 2.0,
    }
    for name, width in expected.items():
        assert tensors[name].lr_multiplier == pytest.approx(width * factor), name
        if name.endswith("fc1.weight"):
            assert tensors[name].weight_decay_multiplier == pytest.approx(1 / (width * factor))
    for name in (EMBEDDING, "decoder.final_layernorm.weight"):
        assert tensors[name].lr_multiplier == 2.0, name  # m_out; outside the blocks


def test_muon_on_grouped_queries() -> None:
    """Query rows 64 to 128, key and value rows 32 to 64, hidden 64 to 256: sqrt(2/4) over sqrt(256/64), block by block.

    Of the whole tensor, 128 to 256 rows, the larger side would only double: sqrt(2/4) over sqrt(256/128).
    """
    growth = {
        "model": {
            "num_layers": 2,
            "hidden_size": 256,
            "num_attention_heads": 8,
            "num_query_groups": 4,
            "kv_channels": 16,
        },
        "base": {"hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2},
    }
    tensors = apply(growth, optimizer__name="muon", parallel__engine="megatron").tensors
    assert tensors[QKV + ".weight"].lr_multiplier == pytest.approx(math.sqrt(2 / 4) / 2)


def test_muon() -> None:
    """Matrices in the blocks: sqrt(m_out/m_in) over the growth of sqrt(larger side), megatron-core's own factor."""
    growth = {
        "model": {"num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 384, "num_attention_heads": 4},
        "base": {"hidden_size": 32, "ffn_hidden_size": 32, "num_attention_heads": 1},
    }
    muon: dict[str, Any] = {"optimizer__name": "muon", "parallel__engine": "megatron"}
    tensors = apply(growth, **muon).tensors
    # Query, key and value by themselves: sqrt(4/4) / sqrt(128/32).
    assert tensors[QKV + ".weight"].lr_multiplier == tensors[PROJ + ".weight"].lr_multiplier == 1 / 2
    assert tensors[FC1 + ".weight"].lr_multiplier == pytest.approx(1 / 2)  # sqrt(12/4) / sqrt(384/32)
    assert tensors[FC2 + ".weight"].lr_multiplier == pytest.approx(1 / 6)  # sqrt(4/12) / sqrt(384/32)
    assert tensors[FC2 + ".weight"].weight_decay_multiplier == pytest.approx(6)
    assert tensors[FC2 + ".weight"].eps is None
    # AdamW's: what is no matrix, embeddings and the readout.
    assert numbers(tensors[FC1 + ".bias"]) == (1, pytest.approx(1 / 12), 0)
    for name in (EMBEDDING, "embedding.position_embeddings.weight"):
        assert numbers(tensors[name]) == (1, 1 / 4, 1)
    readout = apply(growth, "llama", **muon).tensors["output_layer.weight"]
    assert (readout.lr_multiplier, readout.eps_multiplier) == (1, 1 / 4)
    standard = apply(growth, **muon, parametrization__name="standard").tensors
    assert {tensor.lr_multiplier for tensor in standard.values()} == {1}


def test_soap() -> None:
    """Matrices in the blocks: rate sqrt(m_out/m_in), epsilon sqrt(m_in/m_out); AdamW's rows are its own."""
    growth = {
        "model": {"num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 384, "num_attention_heads": 4},
        "base": {"hidden_size": 32, "ffn_hidden_size": 32, "num_attention_heads": 1},
    }
    soap: dict[str, Any] = {"optimizer__name": "soap", "parallel__engine": "megatron"}
    tensors = apply(growth, **soap).tensors
    for name in (QKV, PROJ):  # hidden ×4 on both sides
        assert numbers(tensors[f"{name}.weight"]) == (1, 1, 1)
    # FFN ×12 rows on hidden ×4, and the other way round.
    assert numbers(tensors[FC1 + ".weight"]) == pytest.approx((3**0.5, 3**-0.5, 3**-0.5))
    assert numbers(tensors[FC2 + ".weight"]) == pytest.approx((3**-0.5, 3**0.5, 3**0.5))
    assert numbers(tensors[FC1 + ".bias"]) == (1, pytest.approx(1 / 12), 0)
    assert numbers(tensors[EMBEDDING]) == (1, 1 / 4, 1)
    readout = apply(growth, "llama", **soap).tensors["output_layer.weight"]
    assert (readout.lr_multiplier, readout.eps_multiplier) == (1, 1 / 4)
    # Query ×2, key and value ×4: SOAP does not take the fused matrix apart.
    with pytest.raises(UserError, match=r"optimizer.name: soap needs one learning rate per tensor, .*linear_qkv"):
        apply(MIXED, **soap)


def test_lion_steps_every_tensor_under_deepspeed_and_matrices_under_megatron() -> None:
    """Adam's rates, no epsilon; under Megatron AdamW steps embedding and gain, with theirs."""
    every = apply(MIXED, optimizer__name="lion").tensors
    assert {tensor.group.update_rule for tensor in every.values()} == {"lion"}
    assert numbers(every[EMBEDDING]) == (1, None, 1)
    assert numbers(every[FC1 + ".weight"]) == (pytest.approx(2 / 3), None, 1.5)  # m_in 3/2
    assert numbers(every[FC2 + ".weight"]) == (pytest.approx(2 / 5), None, 2.5)  # m_in 5/2
    matrices = apply(MIXED, optimizer__name="lion", parallel__engine="megatron").tensors
    assert numbers(matrices[EMBEDDING]) == (1, pytest.approx(2 / 3), 1)  # m_out 3/2
    assert numbers(matrices[FC1 + ".weight"]) == numbers(every[FC1 + ".weight"])
    assert matrices["decoder.final_layernorm.weight"].group.update_rule == "adam"


MUON: dict[str, Any] = {"optimizer__name": "muon", "parallel__engine": "megatron"}


def test_muon_takes_query_key_and_value_each_for_itself() -> None:
    """Query ×2, key and value ×4, hidden ×3/2: what counts is the rate that each would need."""
    # MIXED: hidden is the larger side of all blocks, 64 to 96: sqrt(2 / 1.5 / 1.5) and sqrt(4 / 1.5 / 1.5).
    with pytest.raises(UserError) as error:
        apply(MIXED, **MUON)
    assert str(error.value) == (
        "optimizer.name: muon needs one learning rate per tensor, but those of "
        "decoder.layers.0.self_attention.linear_qkv.weight would be ×0.9428 for the query, ×1.333 for the key, ×1.333 "
        "for the value; expected adamw, or blocks that grow together"
    )
    # Rows are the larger side of all blocks, 64 to 128 and 64 to 256 on hidden 16 to 24: the growth of the rows and of
    # the factor that upstream puts on it cancel, and sqrt(1 / 1.5) is left of either.
    growth = {
        "model": {**MIXED["model"], "hidden_size": 24, "num_attention_heads": 16, "num_query_groups": 8},
        "base": {**MIXED["base"], "hidden_size": 16, "num_attention_heads": 8, "num_query_groups": 2},
    }
    growth["model"]["kv_channels"] = 32
    assert apply(growth, **MUON).tensors[QKV + ".weight"].lr_multiplier == pytest.approx((1 / 1.5) ** 0.5)


def test_muon_takes_any_other_tensor_whole() -> None:
    """sqrt(m_out / m_in / growth of the larger side), of the whole tensor, whatever blocks it holds."""
    tensors = apply(MLA, "llama", **MUON).tensors
    attention = "decoder.layers.0.self_attention."
    expected = {
        # 4 heads of 8 | 4 to 8 heads of 12 | 8: 48 to 160 rows on a rank of 24.
        "linear_q_up_proj": (160 / 48) / (160 / 48),
        # 16 | 4 to 48 | 8 rows on hidden 64 to 96, which is the larger.
        "linear_kv_down_proj": (56 / 20) / (96 / 64) / (96 / 64),
        # 4 heads of 8 | 4 to 8 heads of 12 | 14: 48 to 208 rows on a rank of 16 to 48.
        "linear_kv_up_proj": (208 / 48) / (48 / 16) / (208 / 48),
        # hidden 64 to 96 rows on 4 heads of 4 to 8 heads of 14 columns: the larger side goes from 64 to 112.
        "linear_proj": (96 / 64) / (112 / 16) / (112 / 64),
        # hidden ×3/2, the larger side in both, on a fixed rank of 24 rows.
        "linear_q_down_proj": 1 / (96 / 64) / (96 / 64),
    }
    for name, square in expected.items():
        assert tensors[f"{attention}{name}.weight"].lr_multiplier == pytest.approx(square**0.5), name


def test_muon_on_a_query_projection_whose_blocks_are_smaller_than_its_input() -> None:
    """4 heads of 16 | 16 to 12: 128 to 384 rows on hidden 96 to 384; by blocks of 64 rows it would be sqrt(3)/4."""
    model = {**MLA["model"], "hidden_size": 384, "num_attention_heads": 12, "q_lora_rank": None}
    heads = {"qk_head_dim": 16, "qk_pos_emb_head_dim": 16}
    base = {"hidden_size": 96, "num_attention_heads": 4, "ffn_hidden_size": 64}
    tensors = apply({"model": {**model, **heads}, "base": base}, "llama", **MUON).tensors
    rate = tensors["decoder.layers.0.self_attention.linear_q_proj.weight"].lr_multiplier
    assert rate == pytest.approx(1 / 2)  # sqrt(3 / 4 / 3)


def test_sgd_with_blocks_that_grow_apart_is_refused() -> None:
    with pytest.raises(UserError, match=r"linear_qkv\.weight grow by different factors \(query 2, key 4, value 4\)"):
        apply(MIXED, optimizer__name="sgd", optimizer__implementation="torch")


def test_coupled_decay() -> None:
    assert apply(MIXED, parametrization__weight_decay="coupled").tensors[FC1 + ".weight"].weight_decay == 0.1
    assert apply(MIXED).tensors[FC1 + ".weight"].weight_decay == pytest.approx(0.15)


def test_embedding_std_of_its_own() -> None:
    tensors = apply(MIXED, hparams__embedding_init_method_std=0.2).tensors
    assert tensors[EMBEDDING].init_std == {None: 0.2}
    assert tensors[FC1 + ".weight"].init_std == {None: pytest.approx(0.05 / math.sqrt(1.5))}


def test_base_change_symmetry() -> None:
    """Base → target equals base → middle → target, when the middle takes the base's values per tensor.

    Except epsilon where blocks of one tensor grow apart: the largest m_out of a product is not the product of the
    largest, here max(2, 4) against max(1/2, 2) · max(4, 2).
    """
    middle_sizes = {"hidden_size": 32, "ffn_hidden_size": 320, "num_attention_heads": 2, "num_query_groups": 2}
    middle = {"model": {**MIXED["model"], **middle_sizes}, "base": MIXED["base"]}
    last = {"model": MIXED["model"], "base": middle_sizes}
    direct, first, second = (apply(growth).tensors for growth in (MIXED, middle, last))
    for name, tensor in direct.items():
        product = [a * b for a, b in zip(numbers(first[name]), numbers(second[name]), strict=True)]
        if "linear_qkv" in name:
            assert (product[1], tensor.eps_multiplier) == (1 / 8, 1 / 4)
            product[1] = tensor.eps_multiplier
        assert product == pytest.approx(list(numbers(tensor))), name


def test_an_undeclared_size_is_refused() -> None:
    growth = {"model": {**MIXED["model"], "ffn_hidden_size": None}, "base": {"num_query_groups": 1}}
    shrunk = apply(growth)  # FFN follows hidden, which nobody declared: the base has it too
    assert shrunk.tensors[FC1 + ".weight"].lr_multiplier == 1
    assert {block: float(dim.ratio) for block, dim in shrunk.tensors[QKV + ".weight"].shape.blocks.items()} == {
        "query": 1,
        "key": 4,
        "value": 4,
    }
