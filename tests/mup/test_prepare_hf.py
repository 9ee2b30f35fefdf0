"""Hugging Face's models in µP: by hand, against microsoft/mup, on disk, over width.

m is the ratio of all widths, d the head size. Factors by hand are powers of two, so that values are equal to the bit.
"""

from __future__ import annotations

import copy
import math
import warnings
from pathlib import Path
from typing import Any

import mup as theirs
import numpy as np
import pytest
import torch
from torch import nn

from mup_megatron import mup as ours
from mup_megatron.mup import coord_check, hugging_face
from mup_megatron.util.errors import UserError

transformers = pytest.importorskip(
    "transformers", minversion="5.0", reason="Hugging Face's transformers 5 is not installed"
)
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore::UserWarning:transformers")]

VOCABULARY, LAYERS = 64, 2
LLAMAS = ("Llama", "Qwen2", "Qwen3", "Mixtral")
KINDS = ("GPT2", *LLAMAS)
SLOW = pytest.mark.slow


def config(kind: str, width: int, heads: int, *, tied: bool = False, **keys: Any) -> Any:
    """FFN of twice the width; key/value heads as many as heads unless said."""
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None, "tie_word_embeddings": tied}
    common = {"vocab_size": VOCABULARY, **ends, **keys}
    if kind == "GPT2":
        off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        sizes = {"n_embd": width, "n_head": heads, "n_inner": 2 * width, "n_layer": LAYERS, "n_positions": 16}
        return transformers.GPT2Config(**{**sizes, **off, **common})
    sizes = {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "num_hidden_layers": LAYERS,
    }
    if kind == "Qwen3":
        sizes["head_dim"] = width // heads
    if kind == "Mixtral":
        sizes["num_local_experts"] = 4
    return getattr(transformers, f"{kind}Config")(**{**sizes, **common})


def build(kind: str, given: Any) -> Any:
    torch.manual_seed(0)
    name = f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    return getattr(transformers, name)(copy.deepcopy(given)).train()


def batches(steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (4, 16), generator=generator) for _ in range(steps)]


def train(model: Any, optimizer: Any, steps: int = 4) -> list[float]:
    losses = []
    for ids in batches(1) * steps:
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def values(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def rates(model: Any, optimizer: Any, key: str = "lr") -> dict[str, float]:
    of = {id(p): group[key] for group in optimizer.param_groups for p in group["params"]}
    return {name: of[id(parameter)] for name, parameter in model.named_parameters()}


# --- the base ---


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_base_is_the_plain_model(kind: str, tied: bool) -> None:
    """Same weights, and the same losses of AdamW, to the last bit; random numbers are not consumed."""
    given = config(kind, 32, 2, tied=tied)
    plain, prepared = build(kind, given), build(kind, given)
    state = torch.get_rng_state()
    assert ours.prepare_hf(prepared, given) is prepared
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), prepared.parameters(), strict=True))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (plain, prepared)]
    ours.split_in_place(prepared, optimizers[1])
    assert len(optimizers[1].param_groups) == 1
    assert train(plain, optimizers[0]) == train(prepared, optimizers[1])


# --- by hand ---

# Suffix of a parameter: its values over transformers', and Adam's rate over the base's. m = 4 and heads of 16 to 64,
# whose softmax factor is sqrt(16/64) = 1/2.
HIDDEN = (1 / 2, 1 / 4)  # m^-1/2, 1/m
LLAMA = {
    "embed_tokens.weight": (1, 1),
    "q_proj.weight": (1 / 2 / 2, 1 / 4 / 2),
    "q_proj.bias": (1 / 2, 1 / 2),  # is zero when drawn
    "k_proj.bias": (1, 1),
    "v_proj.bias": (1, 1),
    **dict.fromkeys(("k_proj.weight", "v_proj.weight", "o_proj.weight"), HIDDEN),
    **dict.fromkeys(("gate_proj.weight", "up_proj.weight", "down_proj.weight"), HIDDEN),
    **dict.fromkeys(("input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight"), (1, 1)),
    "lm_head.weight": (1 / 4, 1 / 4),  # output-like
}
HAND: dict[str, Any] = {
    "Llama": LLAMA,
    "Llama tied": LLAMA | {"model.norm.weight": (1 / 4, 1 / 4)},
    "Qwen2": LLAMA,
    "Qwen3": LLAMA | {"q_proj.weight": HIDDEN, "q_norm.weight": (1 / 2, 1 / 2), "k_norm.weight": (1, 1)},
    "Mixtral": LLAMA | {"mlp.gate.weight": (1 / 4, 1 / 4), "gate_up_proj": HIDDEN, "experts.down_proj": HIDDEN},
    # m = 16 and heads of 4 to 64, whose softmax factor is sqrt(4/64) = 1/4: 1/2 in queries and keys alike, which the
    # values get too; the projection after them takes it back.
    "GPT2 tied": {
        **dict.fromkeys(("wte.weight", "wpe.weight", "ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias"), (1, 1)),
        "c_attn.weight": (1 / 4 / 2, 1 / 16 / 2),
        "c_attn.bias": (1 / 2, 1 / 2),
        "attn.c_proj.weight": (1 / 4 * 2, 1 / 16 * 2),
        **dict.fromkeys(("attn.c_proj.bias", "c_fc.bias", "mlp.c_proj.bias"), (1, 1)),
        **dict.fromkeys(("c_fc.weight", "mlp.c_proj.weight"), (1 / 4, 1 / 16)),
        "ln_f.weight": (1 / 16, 1 / 16),
        "ln_f.bias": (1 / 16, 1 / 16),
    },
}


def by_hand(table: dict[str, Any], name: str) -> tuple[float, float]:
    (found,) = [value for suffix, value in table.items() if f".{name}".endswith(f".{suffix}")]
    return found


def case(label: str) -> tuple[Any, Any, Any]:
    """Model, config and base config of a row of HAND."""
    kind, tied = label.split()[0], label.endswith("tied")
    sizes = ((64, 1), (4, 1)) if kind == "GPT2" else ((128, 2), (32, 2))
    given, base = (config(kind, *size, tied=tied) for size in sizes)
    return build(kind, given), given, base


def wrong(label: str) -> set[str]:
    """Parameters whose values or rates are not those by hand."""
    model, _, base = case(label)
    before = values(model)
    ours.prepare_hf(model, base)
    found = rates(model, torch.optim.AdamW(ours.optim.split_groups(model.parameters(), "adam", {"lr": 1.0}, eps=None)))
    names = set()
    for name, value in values(model).items():
        std, rate = by_hand(HAND[label], name)
        if not torch.equal(value, before[name] * std) or found[name] != rate:
            names.add(name)
    return names


@pytest.mark.parametrize("label", list(HAND))
def test_values_and_rates_by_hand(label: str) -> None:
    assert wrong(label) == set()


@pytest.mark.parametrize(
    ("label", "fold", "suffixes"),
    [
        ("Llama tied", "final_norm", ["norm.weight"]),
        ("Llama", "query", ["q_proj.weight"]),
        ("Qwen3", "query", ["q_norm.weight"]),
        ("GPT2 tied", "root", ["c_attn.weight", "c_attn.bias"]),
        ("GPT2 tied", "inverse_root", ["attn.c_proj.weight"]),
    ],
)
def test_a_factor_left_out_is_named(
    label: str, fold: str, suffixes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: without the factor these tensors alone are wrong, in every layer."""
    made = hugging_face._folded

    def without(tensor: Any, *rest: Any) -> Any:
        return hugging_face.formulas.ONE if tensor.fold == fold else made(tensor, *rest)

    monkeypatch.setattr(hugging_face, "_folded", without)
    names = wrong(label)
    assert names
    expected = {suffix for suffix in (*suffixes, "ln_f.bias") if any(name.endswith(suffix) for name in names)}
    assert all(any(name.endswith(suffix) for suffix in suffixes) for name in names), names
    assert len(expected) == len(suffixes), names


def test_conv1d_read_the_wrong_way_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixed FFN: c_fc has the growing fan-in, m = 4; read the wrong way round it would be c_proj."""

    def ratios() -> dict[str, tuple[float, float]]:
        model = build("GPT2", config("GPT2", 128, 8, n_inner=64))
        before = values(model)
        ours.prepare_hf(model, config("GPT2", 32, 2, n_inner=64))
        found = rates(model, ours.MuAdamW(model.parameters(), lr=1.0))
        names = [f"transformer.h.0.mlp.{name}.weight" for name in ("c_fc", "c_proj")]
        stds = [(values(model)[name].norm() / before[name].norm()).item() for name in names]
        return {name[16:]: (std, found[name]) for name, std in zip(names, stds, strict=True)}

    right = {"mlp.c_fc.weight": (pytest.approx(1 / 2), 1 / 4), "mlp.c_proj.weight": (pytest.approx(1), 1)}
    assert ratios() == right
    monkeypatch.setattr(hugging_face, "is_transposed", lambda _module: False)
    found = ratios()
    assert [name for name in right if found[name] != right[name]] == ["mlp.c_fc.weight", "mlp.c_proj.weight"]


def test_fixed_sizes_by_hand() -> None:
    """m = 4; two key/value heads and the FFN stay. K and V are output-like (under QK-norm K is not), the FFN is not."""
    for kind, k in (("Llama", 1 / 4), ("Qwen3", 1 / 2)):
        fixed: dict[str, Any] = {"num_key_value_heads": 2, "intermediate_size": 64}
        model = build(kind, config(kind, 128, 8, **fixed))
        before = values(model)
        ours.prepare_hf(model, config(kind, 32, 2, **fixed))
        found = rates(model, ours.MuAdamW(model.parameters(), lr=1.0))
        layer, after = "model.layers.1.", values(model)
        expected = {
            "self_attn.q_proj.weight": (1 / 2, 1 / 4),
            "self_attn.k_proj.weight": (k, 1 / 4),
            "self_attn.v_proj.weight": (1 / 4, 1 / 4),
            "mlp.gate_proj.weight": (1 / 2, 1 / 4),
            "mlp.down_proj.weight": (1, 1),  # its fan-in stays
        }
        for name, (std, rate) in expected.items():
            assert torch.equal(after[layer + name], before[layer + name] * std), name
            assert found[layer + name] == rate, name


@pytest.mark.parametrize(
    ("key_value_heads", "size", "std"), [(1, 32, 1 / 2), (2, 32, 1 / 2), (4, 32, 1 / 2), (8, 16, 1 / 2), (4, 16, 1 / 4)]
)
def test_heads_that_move_while_their_product_stays(key_value_heads: int, size: int, std: float) -> None:
    """Four heads of 16 at the base are 64 rows, as two of 32 are: these grow, and four of 16 alone do not."""
    heads = 128 // size
    base = config("Llama", 32, 4, num_key_value_heads=4, head_dim=16)
    model = build("Llama", config("Llama", 128, heads, num_key_value_heads=key_value_heads, head_dim=size))
    before = values(model)
    ours.prepare_hf(model, base)
    after, found = values(model), rates(model, ours.MuAdamW(model.parameters(), lr=1.0))
    for name in ("k_proj", "v_proj"):
        weight = f"model.layers.1.self_attn.{name}.weight"
        assert torch.equal(after[weight], before[weight] * std), weight
        assert found[weight] == 1 / 4


def test_query_heads_that_move_while_their_product_stays() -> None:
    """Two heads of 32 for four of 16: m_in = 4 gives 1/2, and the softmax, whose scale is 16/32 of it, sqrt(1/2)."""
    base = config("Llama", 32, 4, num_key_value_heads=1, head_dim=16)
    model = build("Llama", config("Llama", 128, 2, num_key_value_heads=1, head_dim=32))
    before = values(model)
    after = values(ours.prepare_hf(model, base))
    query = "model.layers.1.self_attn.q_proj.weight"
    torch.testing.assert_close(after[query], before[query] * (1 / 2) * math.sqrt(1 / 2), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["GPT2", "Qwen3", "Mixtral"])
@pytest.mark.parametrize("width", [16, 32, 64])
@pytest.mark.parametrize("fixed", [False, True], ids=["all grow", "fixed"])
def test_kinds_of_tensors_are_the_architectures(kind: str, width: int, fixed: bool) -> None:
    """By hand, for models below, at and above the base, and where key/value heads and the FFN do not grow."""
    keys: dict[str, Any] = {}
    if fixed:
        keys = {"n_inner": 64} if kind == "GPT2" else {"num_key_value_heads": 2, "intermediate_size": 64}
    model = ours.prepare_hf(build(kind, config(kind, width, width // 8, **keys)), config(kind, 32, 4, **keys))
    found = {}
    for name in ("embedding", "hidden", "router", "readout", "gains", "biases"):
        if (name == "router" and kind != "Mixtral") or (name == "biases" and kind != "GPT2"):
            with pytest.raises(UserError, match=f"per_tensor.{name}: names no parameter"):
                ours.set_per_tensor(copy.deepcopy(model), {name: {"lr": 2.0}})
        else:
            for each in ours.set_per_tensor(copy.deepcopy(model), {name: {"lr": 2.0}}):
                found[each] = name
    expected = {
        "wte": "embedding", "wpe": "embedding", "embed_tokens": "embedding", "lm_head": "readout", "gate": "router",
        "ln_1": "gains", "ln_2": "gains", "ln_f": "gains", "norm": "gains", "q_norm": "gains", "k_norm": "gains",
        "input_layernorm": "gains", "post_attention_layernorm": "gains",
    }  # fmt: skip
    for name, _ in model.named_parameters():
        layer = name.removesuffix(".weight").rpartition(".")[2]
        assert found[name] == ("biases" if name.endswith("bias") else expected.get(layer, "hidden")), name


def test_epsilon_decay_and_alphas_by_hand() -> None:
    """epsilon · A/m_out and decay / rate, with the factor that the values hold: A is 1 over it."""
    model, _, base = case("Llama tied")
    before = values(model)
    ours.prepare_hf(model, base, output_mult=8.0, attention_mult=4.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, eps=1e-8, weight_decay=0.5)
    ours.split_in_place(model, optimizer)
    eps, decay = (rates(model, optimizer, key) for key in ("eps", "weight_decay"))
    norm, query, key = (
        "model.norm.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
    )
    assert torch.equal(values(model)[norm], before[norm] * 8 / 4)
    assert torch.equal(values(model)[query], before[query] * (4 / 2) / 2)
    # 1/m_out over the factor: 8/4 in the norm, 4/2 in the queries.
    assert [eps[norm], eps[query], eps[key]] == [1e-8 / 4 / 2, 1e-8 / 4 / 2, 1e-8 / 4]
    assert [decay[norm], decay[query], decay[key]] == [0.5 / 2, 0.5 * 4 / 2, 0.5 * 4]


# --- against microsoft/mup, with readout and attention scale by hand ---


def microsofts(kind: str, prepared: Any, base: Any, tied: bool) -> Any:
    """The same function with a MuReadout and another softmax scale: m and heads' ratio both 4."""
    model = copy.deepcopy(prepared)
    for module in model.modules():  # fresh parameters, without our infinite shapes
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters = dict(module._parameters)
                module._parameters[name] = nn.Parameter(parameter.detach().clone())
    narrow = build(kind, base)
    with torch.no_grad():
        for part, width in ((model, 4), (narrow, 1)):
            head = theirs.MuReadout(part.lm_head.in_features, VOCABULARY, bias=False)
            if tied:
                embedding = part.get_input_embeddings()
                head = theirs.MuSharedReadout(embedding.weight, bias=False)
            else:
                head.weight.copy_(part.lm_head.weight * width)
            part.lm_head = head
        body = model.transformer if kind == "GPT2" else model.model
        if tied:
            for parameter in (body.ln_f if kind == "GPT2" else body.norm).parameters():
                parameter *= 4
        for layer in body.h if kind == "GPT2" else body.layers:
            attention = layer.attn if kind == "GPT2" else layer.self_attn
            attention.scaling = math.sqrt(attention.head_dim / 4) / attention.head_dim
            if kind == "GPT2":
                attention.c_attn.weight /= math.sqrt(0.5)
                attention.c_proj.weight *= math.sqrt(0.5)
            elif kind == "Qwen3":
                attention.q_norm.weight /= 0.5
            else:
                attention.q_proj.weight /= 0.5
    return theirs.set_base_shapes(model, narrow, rescale_params=False)


def against_microsofts(kind: str, tied: bool) -> tuple[list[float], list[float]]:
    given, base = config(kind, 128, 2, tied=tied), config(kind, 32, 2, tied=tied)
    prepared = ours.prepare_hf(build(kind, given), base)
    oracle = microsofts(kind, prepared, base, tied)
    # Their epsilon does not move with the factors; without one nothing has to.
    keys = {"lr": 2e-2, "weight_decay": 0.1, "eps": 1e-20}
    return (
        train(oracle, theirs.MuAdamW(oracle.parameters(), **keys), 8),
        train(prepared, ours.MuAdamW(prepared.parameters(), **keys), 8),
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["GPT2", "Llama", *(pytest.param(kind, marks=SLOW) for kind in ("Qwen2", "Qwen3"))])
def test_trains_as_microsofts(kind: str, tied: bool) -> None:
    """With multipliers in the forward pass or in the weights: the same losses. Mixtral's router has no rule there."""
    expected, found = against_microsofts(kind, tied)
    assert found == pytest.approx(expected, rel=2e-6)
    assert expected[-1] < expected[0] - 0.05  # something was learned, so rates were seen


@pytest.mark.parametrize(("tied", "fold"), [(True, "final_norm"), (False, "query")])
def test_microsofts_sees_a_wrong_rate(tied: bool, fold: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: values are right, but the rate of one kind of tensor is not."""
    groups = ours.optim.split_groups

    def without(params: Any, rule: Any, defaults: Any, *, eps: Any) -> Any:
        params = list(params)
        for parameter in params:
            if parameter.infshape.folded != 1 and (parameter.dim() == 1) == (fold == "final_norm"):
                parameter.infshape.folded = hugging_face.formulas.ONE
        return groups(params, rule, defaults, eps=eps)

    monkeypatch.setattr(ours.optim, "split_groups", without)
    expected, found = against_microsofts("Llama", tied)
    assert found[0] == pytest.approx(expected[0], rel=2e-6)
    assert found[-1] != pytest.approx(expected[-1], rel=1e-4)


# --- on disk ---


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["GPT2", "Llama", *(pytest.param(kind, marks=SLOW) for kind in LLAMAS[1:])])
def test_saved_and_loaded_by_plain_transformers(kind: str, tied: bool, tmp_path: Path) -> None:
    """After training: the same logits to the last bit, and prepared again the same rates."""
    given, base = config(kind, 128, 2, tied=tied), config(kind, 32, 2, tied=tied)
    model = ours.prepare_hf(build(kind, given), base)
    optimizer = ours.MuAdamW(model.parameters(), lr=1e-2)
    train(model, optimizer)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    (ids,) = batches(1)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids).logits, model.eval()(ids).logits)
    assert not any(hasattr(parameter, "infshape") for parameter in loaded.parameters())
    ours.prepare_hf(loaded, base, rescale_params=False)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))
    assert rates(loaded, ours.MuAdamW(loaded.parameters(), lr=1e-2)) == rates(model, optimizer)


@pytest.mark.parametrize(
    ("sizes", "tied", "mult", "match"),
    [
        # α_output of a tied head is in the final norm's gains, and at the base nothing else has moved.
        (((32, 2), (32, 2)), True, 2.0, r"^model\.norm\.weight: a norm's gains are 1 where"),
        # At a ratio of 1.25 matrices are smaller by sqrt(1.25), 26 standard errors of 160² draws.
        (((128, 4), (160, 5)), False, 1.0, r"q_proj\.weight has the standard deviation 0\.018, and transformers"),
    ],
)
def test_what_was_prepared_and_saved_is_not_prepared_twice(
    sizes: Any, tied: bool, mult: float, match: str, tmp_path: Path
) -> None:
    base, given = (config("Llama", *size, tied=tied) for size in sizes)
    prepared = ours.prepare_hf(build("Llama", given), base, output_mult=mult)
    prepared.save_pretrained(tmp_path)
    loaded = type(prepared).from_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"{match}.* rescale_params=False"):
        ours.prepare_hf(loaded, base, output_mult=mult)


def test_a_padding_tokens_row_is_no_sign() -> None:
    """Of 8 rows one of zeros makes the deviation 6.5 % smaller, 8 standard errors of 8 · 1024 draws."""
    base, given = (config("Llama", width, 2, vocab_size=8, pad_token_id=0) for width in (512, 1024))
    model = build("Llama", given)
    assert not model.model.embed_tokens.weight[0].any()
    ours.prepare_hf(model, base)


def test_a_readout_by_hand_is_lost_on_disk(tmp_path: Path) -> None:
    """Negative control: with a MuReadout, as microsoft/mup has it, logits come back m = 4 times as large."""
    given, base = config("Llama", 128, 2), config("Llama", 32, 2)
    prepared = ours.prepare_hf(build("Llama", given), base)
    oracle = microsofts("Llama", prepared, base, tied=False)
    oracle.save_pretrained(tmp_path)
    loaded = type(prepared).from_pretrained(tmp_path)
    (ids,) = batches(1)
    with torch.no_grad():
        for layer in loaded.model.layers:  # the softmax scale is lost as well
            layer.self_attn.scaling = math.sqrt(16) / 64
        torch.testing.assert_close(loaded.eval()(ids).logits, 4 * oracle.eval()(ids).logits)


# --- over width ---

WIDTHS = (64, 128, 256, 512)


def coordinates(kind: str, tied: bool, prepare: bool, heads: int | None = None, split: bool = True) -> dict[str, float]:
    """Slope of log-size over log-width of what layers add and of the logits, after three steps."""

    def lazy(width: int) -> Any:
        def make() -> Any:
            given = config(kind, width, heads or width // 16, tied=tied, use_cache=False)
            model = build(kind, given)
            return ours.prepare_hf(model, config(kind, 64, heads or 4, tied=tied)) if prepare else model

        return make

    def optimizer(model: Any) -> Any:
        made = torch.optim.AdamW(model.parameters(), lr=4e-3, eps=1e-12)
        if prepare and split:
            ours.split_in_place(model, made)
        return made

    (ids,) = batches(1)
    seen = ("o_proj", "attn.c_proj", "mlp", "embed_tokens", "wte", "")
    data = coord_check.get_coord_data(
        {width: lazy(width) for width in WIDTHS},
        [{"input_ids": ids, "labels": ids}],
        optimizer,
        nsteps=4,
        dict_in_out=True,
        cuda=False,
        show_progress=False,
        filter_module_by_name=lambda name: name.endswith(seen[:-1]) or not name,
    )
    last = data[(data["t"] == 4) & ~data["module"].str.contains("loss")]
    return {
        name: float(np.polyfit(np.log2(rows["width"]), np.log2(rows["l1"]), 1)[0])
        for name, rows in last.groupby("module")
    }


@pytest.mark.parametrize(
    ("kind", "tied", "heads"),
    [
        ("GPT2", True, None),
        *(
            pytest.param(kind, tied, None, marks=SLOW)
            for kind in KINDS
            for tied in (False, True)
            if (kind, tied) != ("GPT2", True)
        ),
        *(pytest.param(kind, False, 4, marks=SLOW) for kind in KINDS),
    ],
)
def test_coordinates_are_flat_in_mup_alone(kind: str, tied: bool, heads: int | None) -> None:
    """Widths 64 to 512. Negative controls: as transformers makes it, and with plain rates, logits and MLPs grow."""
    flat = coordinates(kind, tied, prepare=True, heads=heads)
    assert max(map(abs, flat.values())) < 0.25, flat
    growing = coordinates(kind, tied, prepare=False, heads=heads)
    with_plain_rates = coordinates(kind, tied, prepare=True, heads=heads, split=False)
    (logits,) = [name for name in flat if "logits" in name]
    (mlp,) = [name for name in flat if name.endswith("1.mlp")]
    assert [growing[name] > 0.5 for name in (logits, mlp)] == [True, True], growing
    # A tied head moves with the embedding, whose plain rate is the right one.
    for name in (mlp,) if tied else (logits, mlp):
        assert with_plain_rates[name] > 0.4, with_plain_rates


# --- the invariant norm ---


def test_the_invariant_norm_by_hand() -> None:
    """m = 4: |grad|² of a matrix inside counts as it is, of an embedding 4 times, of the output-like head 1/4 times."""
    given, base = config("Llama", 128, 8), config("Llama", 32, 2)
    model = ours.prepare_hf(build("Llama", given), base)
    (ids,) = batches(1)
    model(input_ids=ids, labels=ids).loss.backward()
    squares = {name: p.grad.double().square().sum().item() for name, p in model.named_parameters()}
    weights = {name: 1 / 4 if "lm_head" in name else 4 if "norm" in name or "embed" in name else 1 for name in squares}
    expected = math.sqrt(sum(weights[name] * square for name, square in squares.items()))
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    assert ours.clip_grad_norm_(model.parameters(), 1e-3).item() == pytest.approx(expected, rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, before[name] * 1e-3 / expected, rtol=1e-2, atol=0)
    plain = build("Llama", base)
    plain(input_ids=ids, labels=ids).loss.backward()
    at_base = copy.deepcopy(plain)
    for a, b in zip(at_base.parameters(), plain.parameters(), strict=True):
        a.grad = b.grad.clone()
    ours.prepare_hf(at_base, base)
    assert torch.equal(
        ours.clip_grad_norm_(at_base.parameters(), 0.5), nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    )
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(at_base.parameters(), plain.parameters(), strict=True))


def test_a_norm_of_nothing_and_of_parts_is_none() -> None:
    net = nn.Linear(2, 2)
    with pytest.raises(UserError, match=r"^clip_grad_norm_: no parameter has a gradient; .* DeepSpeed's config"):
        ours.clip_grad_norm_(net.parameters(), 1.0)
    net.weight._fsdp_flattened = True  # as FullyShardedDataParallel(use_orig_params=True) marks what it shards
    with pytest.raises(UserError, match=r"^clip_grad_norm_: parameters are parts under FullyShardedDataParallel"):
        ours.clip_grad_norm_(net.parameters(), 1.0)


# --- refusals ---


class Adapter(nn.Linear):
    """A layer that transformers did not build."""


def refuse(match: str, model: Any, base: Any, **keys: Any) -> None:
    before = values(model) if not next(model.parameters()).is_meta else {}
    with pytest.raises(UserError, match=match):
        ours.prepare_hf(model, base, **keys)
    assert not any(hasattr(parameter, "infshape") for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in values(model).items() if before)


def test_what_is_not_known() -> None:
    given, base = config("Llama", 64, 4), config("Llama", 32, 2)
    refuse(
        "does not know transformers.models.llama.modeling_llama.LlamaModel; expected", build("Llama", given).model, base
    )
    adapted = build("Llama", given)
    adapted.model.layers[1].mlp.up_proj = Adapter(64, 128, bias=False)
    refuse(r"model\.layers\.1\.mlp\.up_proj is a tests\.mup\.test_prepare_hf\.Adapter, which prepare_hf", adapted, base)
    more = build("Llama", given)
    more.model.layers[0].mlp.extra = nn.Linear(64, 64)
    refuse(r"model\.layers\.0\.mlp\.extra\.\w+: prepare_hf does not know this parameter", more, base)
    crossed = build("GPT2", config("GPT2", 64, 4, add_cross_attention=True))
    refuse(r"crossattention\.c_attn\.weight: prepare_hf does not know", crossed, config("GPT2", 32, 2))


@pytest.mark.parametrize(
    ("kind", "keys", "match"),
    [
        ("Llama", {"vocab_size": 128}, r"base_config\.vocab_size is 128 and the model's 64; base and model may differ"),
        ("Llama", {"num_hidden_layers": 1}, r"num_hidden_layers is 1 .*; there is no rule for depth here"),
        ("Llama", {"initializer_range": 0.01}, r"base_config\.initializer_range is 0\.01"),
        ("Llama", {"tie_word_embeddings": True}, r"base_config\.tie_word_embeddings is True"),
        ("Mixtral", {"num_local_experts": 8}, r"base_config\.num_local_experts is 8"),
        ("GPT2", {"n_positions": 32}, r"base_config\.n_positions is 32"),
        ("GPT2", {"n_layer": 1}, r"n_layer is 1 .*; there is no rule for depth here"),
        ("GPT2", {"resid_pdrop": 0.5}, r"base_config\.resid_pdrop is 0\.5"),
        ("Llama", {"rms_norm_eps": 1e-3}, r"base_config\.rms_norm_eps is 0\.001"),
        ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, r"base_config\.rope_parameters is"),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 8}, r"base_config\.sliding_window is 8"),
        ("Mixtral", {"router_aux_loss_coef": 0.5}, r"base_config\.router_aux_loss_coef is 0\.5"),
    ],
)
def test_other_models_base(kind: str, keys: dict[str, Any], match: str) -> None:
    base = config(kind, 32, 2)
    base.update(keys)
    refuse(match, build(kind, config(kind, 64, 4)), base)


@pytest.mark.parametrize("kind", ["GPT2", "Llama", "Qwen2", "Qwen3", "Mixtral"])
def test_what_says_nothing_of_the_model_may_differ(kind: str) -> None:
    base = config(kind, 32, 2)
    base.update({"use_cache": False, "bos_token_id": 3, "_name_or_path": "a base", "architectures": ["another"]})
    ours.prepare_hf(build(kind, config(kind, 64, 4)), base)


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"output_mult": 0}, "^output_mult: 0; expected a number above 0"),
        ({"output_mult": math.nan}, "^output_mult: nan; expected"),
        ({"output_mult": math.inf}, "^output_mult: inf; expected"),
        ({"attention_mult": -1.0}, "^attention_mult: -1.0; expected"),
        ({"attention_mult": "2"}, "^attention_mult: '2'; expected"),
        ({"rescale_params": "constant"}, "^rescale_params: 'constant'; expected True or False"),
    ],
)
def test_arguments_that_are_none(keys: dict[str, Any], match: str) -> None:
    refuse(match, build("GPT2", config("GPT2", 64, 4)), config("GPT2", 32, 2), **keys)


def test_values_that_are_not_transformers() -> None:
    given, base = config("Llama", 64, 4), config("Llama", 32, 2)
    refuse("base_config is a Qwen2Config; expected a LlamaConfig", build("Llama", given), config("Qwen2", 32, 2))
    trained = build("Llama", given)
    with torch.no_grad():
        trained.model.layers[1].mlp.up_proj.weight *= 2
    refuse(r"model\.layers\.1\.mlp\.up_proj\.weight has the standard deviation 0\.04, and transfo", trained, base)
    twice = ours.prepare_hf(build("Llama", given), base)
    with pytest.raises(UserError, match="its init was rescaled to µP's before"):
        ours.prepare_hf(twice, base)
    with torch.device("meta"):
        empty = build("Llama", given)
    refuse("is on the meta device and has no values to rescale", empty, base)


def test_another_head_has_no_rate() -> None:
    """Embeddings resized after it: the new head has no infinite shape, and no optimizer is made in silence."""
    model = ours.prepare_hf(build("Llama", config("Llama", 64, 4)), config("Llama", 32, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.resize_token_embeddings(VOCABULARY + 8)
    with pytest.raises(UserError, match=r"no infinite shape on .*lm_head\.weight"):
        ours.split_in_place(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def test_adafactor_without_the_size_of_the_weights() -> None:
    model = ours.prepare_hf(build("Llama", config("Llama", 64, 4)), config("Llama", 32, 4))
    keys: dict[str, Any] = {"impl": transformers.Adafactor, "lr": 1e-2, "relative_step": False}
    with pytest.raises(UserError, match=r"^optimizer: the step of Adafactor follows the size of whole tensors"):
        ours.MuAdam(model.parameters(), **keys)
    found = rates(model, ours.MuAdam(model.parameters(), scale_parameter=False, **keys))
    assert found["model.layers.0.mlp.up_proj.weight"] == 5e-3
