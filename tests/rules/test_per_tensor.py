"""`hparams.per_tensor`: which tensors each kind holds, numbers by hand, what is refused, both engines, the search."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from mup_megatron.config import Config, derive, load_config
from mup_megatron.config.load import parse_overrides
from mup_megatron.config.per_tensor import KINDS
from mup_megatron.data.prepare import prepare
from mup_megatron.model.build import parametrize
from mup_megatron.model.explain import explain, print_table
from mup_megatron.parallel.layout import resolve_layout
from mup_megatron.parallel.upstream import prepare_process
from mup_megatron.rules.kinds import kinds_of
from mup_megatron.tuning.decide import apply_record
from mup_megatron.tuning.record import write_record
from mup_megatron.tuning.recording import make_record
from mup_megatron.tuning.space import distributions, key_of, proxy_config, values_of, with_values
from mup_megatron.util.errors import ConfigError, UserError
from tests.helpers import bodies
from tests.helpers.configs import MIXED, MLA, MOE, VOCABULARY, make
from tests.helpers.distributed import Ranks
from tests.helpers.records import BUDGET, study_of

LAYER = "decoder.layers.0."


@pytest.fixture(autouse=True, scope="module")
def _patched() -> None:
    prepare_process()


def table(entries: dict[str, Any], growth: dict[str, Any] = MIXED, architecture: str = "gpt3", **more: Any) -> Any:
    return parametrize(make(growth, architecture, hparams__per_tensor=entries, **more), VOCABULARY).tensors


def test_where_each_tensor_belongs() -> None:
    """By hand, for a mixture of experts and for multi-latent attention; no kind is left without a tensor."""
    found = {
        (name.removeprefix("decoder.layers."), block): " ".join(sorted(kinds_of(row.shape, block)))
        for growth, architecture in ((MOE, "llama"), (MLA, "llama"), (MIXED, "gpt3"))
        for name, row in table({}, growth, architecture).items()
        for block in row.shape.fan_outs
        if ".1." in name or "layers" not in name or "local_experts" not in name
    }
    expected = {
        ("embedding.word_embeddings.weight", None): "embedding",
        ("embedding.position_embeddings.weight", None): "embedding",
        ("output_layer.weight", None): "readout",
        ("final_layernorm.weight", None): "gains",
        ("0.input_layernorm.weight", None): "gains",
        ("0.input_layernorm.bias", None): "biases",
        ("0.self_attention.linear_qkv.weight", "query"): "attention attention_q hidden",
        ("0.self_attention.linear_qkv.weight", "key"): "attention attention_k hidden",
        ("0.self_attention.linear_qkv.weight", "value"): "attention attention_v hidden",
        ("0.self_attention.linear_qkv.bias", "value"): "biases",
        ("0.self_attention.linear_proj.weight", None): "attention attention_o hidden",
        ("0.self_attention.linear_q_down_proj.weight", None): "attention attention_q hidden",
        ("0.self_attention.linear_q_up_proj.weight", "rope"): "attention attention_q hidden",
        ("0.self_attention.linear_kv_down_proj.weight", "rank"): "attention hidden",
        ("0.self_attention.linear_kv_up_proj.weight", "nope"): "attention attention_k hidden",
        ("0.self_attention.linear_kv_up_proj.weight", "value"): "attention attention_v hidden",
        ("0.self_attention.q_layernorm.weight", None): "gains",
        ("0.mlp.linear_fc1.weight", "gate"): "ffn_gate hidden mlp",
        ("0.mlp.linear_fc1.weight", "up"): "ffn_up hidden mlp",
        ("0.mlp.linear_fc1.weight", None): "ffn_up hidden mlp",
        ("0.mlp.linear_fc1.bias", None): "biases",
        ("0.mlp.linear_fc2.weight", None): "ffn_down hidden mlp",
        ("1.mlp.router.weight", None): "router",
        ("1.mlp.experts.local_experts.1.linear_fc1.weight", "gate"): "experts ffn_gate hidden",
        ("1.mlp.experts.local_experts.1.linear_fc2.weight", None): "experts ffn_down hidden",
        ("1.mlp.shared_experts.gate_weight", None): "router",
        ("1.mlp.shared_experts.linear_fc1.weight", "up"): "ffn_up hidden shared_experts",
    }
    found = {(name.removeprefix("decoder."), block): kinds for (name, block), kinds in found.items()}
    for key, kinds in expected.items():
        assert found[key] == kinds, key
    assert {kind for kinds in expected.values() for kind in kinds.split()} == set(KINDS)


def test_rates_decays_and_deviations_by_hand() -> None:
    """Hidden ×3/2, FFN ×5/2, heads ×2; lr 8e-3, std 0.05, decay 0.1 at the base; a product where two entries meet."""
    entries = {
        "embedding": {"lr": 4.0, "init": 0.5},
        "hidden": {"weight_decay": 3.0, "lr": 2.0},
        "mlp": {"lr": 0.25},
        "attention_q": {"init": 0.5},
        "gains": {"lr": 3.0},
        "*.linear_fc2.bias": {"lr": 7.0},
    }
    rows = table(entries)
    embedding = rows["embedding.word_embeddings.weight"]
    assert embedding.lr == pytest.approx(8e-3 * 4)
    assert embedding.init_std == {None: pytest.approx(0.025)}
    assert embedding.weight_decay == pytest.approx(0.1)
    qkv = rows[f"{LAYER}self_attention.linear_qkv.weight"]
    assert qkv.lr == pytest.approx(8e-3 / 1.5 * 2)
    assert qkv.weight_decay == pytest.approx(0.1 * 1.5 * 3)
    std = 0.05 * 1.5**-0.5  # query, key and value all grow
    assert qkv.init_std == {"query": pytest.approx(std / 2), "key": pytest.approx(std), "value": pytest.approx(std)}
    assert rows[f"{LAYER}mlp.linear_fc1.weight"].lr == pytest.approx(8e-3 / 1.5 * 2 * 0.25)
    fc2 = rows[f"{LAYER}mlp.linear_fc2.weight"]
    assert fc2.lr == pytest.approx(8e-3 / 2.5 * 2 * 0.25)
    assert fc2.weight_decay == pytest.approx(0.1 * 2.5 * 3)
    assert rows[f"{LAYER}input_layernorm.weight"].lr == pytest.approx(8e-3 * 3)
    assert rows[f"{LAYER}input_layernorm.bias"].lr == pytest.approx(8e-3)
    assert rows[f"{LAYER}mlp.linear_fc2.bias"].lr == pytest.approx(8e-3 * 7)
    assert rows[f"{LAYER}mlp.linear_fc1.bias"].lr == pytest.approx(8e-3)
    # Epsilon and the gradient norm's weight are the rule's own.
    plain = table({})
    assert all(row.eps == plain[name].eps for name, row in rows.items())
    assert all(row.gradient_norm == plain[name].gradient_norm for name, row in rows.items())


def test_gains_that_decay_can_have_a_factor() -> None:
    """Megatron's apply_wd_to_qk_layernorm: the norms of queries and keys decay, others do not; refused before."""
    keys = {"model__qk_layernorm": True, "optimizer__apply_wd_to_qk_layernorm": True}
    tensors = table({"gains": {"weight_decay": 2.0}}, MIXED, "llama", **keys)
    assert tensors[f"{LAYER}self_attention.q_layernorm.weight"].weight_decay == pytest.approx(2 * 0.1)
    assert tensors["decoder.final_layernorm.weight"].weight_decay == 0
    with pytest.raises(UserError, match=r"gains.weight_decay: 2: they have no weight decay"):
        table({"gains": {"weight_decay": 2.0}}, MIXED, "llama", model__qk_layernorm=True)


def test_experts_router_and_readout_by_hand() -> None:
    """Hidden ×3/2, expert FFN ×5/2, one growing fan-in for the router; an untied readout's rate is its own."""
    entries = {
        "experts": {"lr": 2.0},
        "router": {"lr": 0.5, "init": 2.0},
        "readout": {"lr": 3.0},
        "ffn_gate": {"init": 4.0},
    }
    rows, plain = table(entries, MOE, "llama"), table({}, MOE, "llama")
    expert = "decoder.layers.1.mlp.experts.local_experts.2."
    assert rows[f"{expert}linear_fc1.weight"].lr == pytest.approx(8e-3 / 1.5 * 2)
    assert rows[f"{expert}linear_fc2.weight"].lr == pytest.approx(8e-3 / 2.5 * 2)
    gate, up = rows[f"{expert}linear_fc1.weight"].init_std.values()
    assert (gate, up) == (pytest.approx(0.05 * 1.5**-0.5 * 4), pytest.approx(0.05 * 1.5**-0.5))
    router = rows["decoder.layers.1.mlp.router.weight"]
    assert router.lr == pytest.approx(8e-3 / 1.5 / 2)
    assert router.init_std == {None: pytest.approx(0.05 / 1.5 * 2)}
    assert rows["output_layer.weight"].lr == pytest.approx(8e-3 * 3)
    untouched = "decoder.layers.1.mlp.shared_experts.linear_fc2.weight"
    assert rows[untouched].group == plain[untouched].group


def test_factors_of_one_change_nothing() -> None:
    """Not a bit of any row, and not the name by which a checkpoint knows a group."""
    plain = table({})
    ones = table({"hidden": {"lr": 1.0, "init": 1.0}, "embedding": {"weight_decay": 1.0}, "*": {}})
    for name, row in ones.items():
        assert (row.group, str(row.group)) == (plain[name].group, str(plain[name].group)), name
        assert (row.init_std, row.gradient_norm, row.lr) == (
            plain[name].init_std,
            plain[name].gradient_norm,
            plain[name].lr,
        )


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        (
            {"embeding": {"lr": 2.0}},
            "hparams.per_tensor.embeding: no kind of tensor, and no pattern with a star; did you mean embedding?",
        ),
        ({"router": {"lr": 2.0}}, "hparams.per_tensor.router: names no tensor of this model"),
        (
            {"readout": {"lr": 2.0}},
            "hparams.per_tensor.readout: names no tensor of this model; a tied head is the embedding",
        ),
        ({"*.linear_fc3.*": {"lr": 2.0}}, "hparams.per_tensor.*.linear_fc3.*: names no tensor of this model"),
        ({"gains": {"init": 2.0}}, "hparams.per_tensor.gains.init: 2: their initial values are constants; expected 1"),
        ({"biases": {"weight_decay": 2.0}}, "hparams.per_tensor.biases.weight_decay: 2: they have no weight decay"),
        (
            {"attention_q": {"lr": 2.0}},
            "hparams.per_tensor.attention_q.lr: decoder.layers.0.self_attention.linear_qkv.weight holds its parts in "
            "one tensor, which an optimizer steps at one rate and one decay (×2 for the query, ×1 for the key, ×1 for",
        ),
        ({"attention_k": {"weight_decay": 0.5}}, "hparams.per_tensor.attention_k.weight_decay: decoder.layers.0"),
        ({"embedding": {"lr": -1.0}}, "hparams.per_tensor.embedding.lr: expected a number > 0"),
        ({"embedding": {"rate": 2.0}}, "hparams.per_tensor.embedding.rate: unknown key"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_what_is_refused(entries: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as error:
        table(entries)
    assert sentence in str(error.value)


def test_parts_that_agree_are_one_rate() -> None:
    rows = table({"attention_q": {"lr": 2.0}, "attention_k": {"lr": 2.0}, "attention_v": {"lr": 2.0}})
    assert rows[f"{LAYER}self_attention.linear_qkv.weight"].lr == pytest.approx(8e-3 / 1.5 * 2)
    assert rows[f"{LAYER}self_attention.linear_proj.weight"].lr == pytest.approx(8e-3 / 2)


ENTRIES = {
    "embedding": {"lr": 2.0, "init": 0.5},
    "mlp": {"lr": 0.5},
    "attention_q": {"init": 0.25},
    "biases": {"lr": 3.0},
}


def prepared(**overrides: Any) -> Config:
    config = make(MIXED, "gpt3", **{"hparams__per_tensor": ENTRIES, **overrides})
    prepare(config)
    return config


_MEGATRON = {"parallel__engine": "megatron", "parallel__use_distributed_optimizer": False}


@pytest.mark.parametrize(
    "engine",
    [{"parallel__zero_stage": 0}, pytest.param({"parallel__zero_stage": 2}, marks=pytest.mark.slow), _MEGATRON],
    ids=["ZeRO 0", "ZeRO 2", "Megatron"],
)
def test_the_first_update_of_each_kind(ranks: Ranks, engine: dict[str, Any]) -> None:
    """AdamW's first step moves a coordinate by its rate: by hand, the real optimizers, TP 2."""
    config = prepared(hparams__weight_decay=0.0, optimizer__eps=1e-20, parallel__tensor_model_parallel_size=2, **engine)
    expected = {
        "embedding.word_embeddings.weight": 8e-3 * 2,
        f"{LAYER}mlp.linear_fc1.weight": 8e-3 / 1.5 / 2,
        f"{LAYER}mlp.linear_fc2.weight": 8e-3 / 2.5 / 2,
        f"{LAYER}mlp.linear_fc2.bias": 8e-3 * 3,
        f"{LAYER}self_attention.linear_qkv.weight": 8e-3 / 1.5,
        f"{LAYER}input_layernorm.weight": 8e-3,
    }
    for result in ranks.run(2, bodies.first_update, config=config):
        for name, rate in expected.items():
            assert result[name][0] == pytest.approx(rate, rel=1e-3), name


def test_initial_values_in_every_layout(ranks: Ranks) -> None:
    """The plain run's, times the factor of each row, to rounding; TP 2 holds slices of the same, to the last bit."""
    plain = ranks.run(1, bodies.initial, config=prepared(hparams__per_tensor={}))[0]
    whole = ranks.run(1, bodies.initial, config=prepared(parallel__tensor_model_parallel_size=1))[0]
    qkv = f"{LAYER}self_attention.linear_qkv.weight"
    groups = plain[qkv].reshape(4, 32, 96).copy()  # four groups of 16 query, 8 key and 8 value rows
    groups[:, :16] *= 0.25
    np.testing.assert_allclose(whole[qkv], groups.reshape(128, 96), rtol=1e-6)
    word = "embedding.word_embeddings.weight"
    np.testing.assert_allclose(whole[word], plain[word] / 2, rtol=1e-6)
    np.testing.assert_array_equal(whole[f"{LAYER}mlp.linear_fc1.weight"], plain[f"{LAYER}mlp.linear_fc1.weight"])
    split = ranks.run(2, bodies.initial, config=prepared(parallel__tensor_model_parallel_size=2))
    np.testing.assert_array_equal(np.concatenate([rank[qkv] for rank in split]), whole[qkv])


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {"parallel__tensor_model_parallel_size": 2, "parallel__zero_stage": 1, "training__micro_batch_size": 2},
        {**_MEGATRON, "parallel__tensor_model_parallel_size": 2, "parallel__sequence_parallel": True},
        {"parallel__engine": "megatron", "parallel__tensor_model_parallel_size": 1, "training__micro_batch_size": 2},
    ],
    ids=["TP 2, ZeRO 1", "TP 2, SP, Megatron", "DP 2, Megatron, distributed"],
)
def test_layouts_and_resuming(ranks: Ranks, layout: dict[str, Any], tmp_path: Path) -> None:
    """The curve of one process, and, saved at step 5 in this layout, the same again from there in another."""
    one = prepared(parallel__zero_stage=0, parallel__tensor_model_parallel_size=1)
    whole = ranks.run(1, bodies.train, config=one, steps=9)[0]["losses"]
    config = prepared(**layout)
    count = 2 * layout["parallel__tensor_model_parallel_size"] if "ZeRO" in str(layout) else 2
    legs = ranks.run(count, bodies.leg, config=config, start_at=0, stop_at=5, save=str(tmp_path))[0]["losses"]
    legs += ranks.run(1, bodies.leg, config=one, start_at=5, stop_at=9, load=str(tmp_path))[0]["losses"]
    np.testing.assert_allclose(legs, whole, rtol=2e-5)
    without = prepared(hparams__per_tensor={}, parallel__zero_stage=0, parallel__tensor_model_parallel_size=1)
    other = ranks.run(1, bodies.train, config=without, steps=9)[0]["losses"]
    assert abs(other[-1] / whole[-1] - 1) > 1e-3  # they do matter


SEARCH = {
    "lr": {"log_uniform": [1e-3, 1e-2]},
    "per_tensor.embedding.lr": {"log_uniform": [0.25, 16.0]},
    "per_tensor.*.mlp.*weight.init": {"choice": [0.5, 1.0]},
}


def searching(folder: Path, **overrides: Any) -> Config:
    return make(MIXED, "gpt3", run__dir=str(folder), tuning__search=SEARCH, **overrides)


def test_they_are_searched_recorded_and_applied(tmp_path: Path) -> None:
    """Trial, record and target have the values; what is fixed in the config stays, and is in the record too."""
    config = searching(tmp_path, hparams__per_tensor={"biases": {"lr": 3.0}})
    assert list(distributions(config)) == list(SEARCH)
    found = {"lr": 5e-3, "per_tensor.embedding.lr": 8.0, "per_tensor.*.mlp.*weight.init": 0.5}
    trial = proxy_config(config, found, seed=1, directory=tmp_path / "trial")
    proxy = parametrize(trial, VOCABULARY).tensors
    # The proxy has the base's sizes: every rule's factor is 1.
    assert proxy["embedding.word_embeddings.weight"].lr == pytest.approx(5e-3 * 8)
    assert proxy[f"{LAYER}mlp.linear_fc1.weight"].init_std == {None: pytest.approx(0.025)}
    values = {**values_of(config), **found}
    assert values.get("per_tensor.biases.lr") == 3.0
    target = with_values(config, values)
    rows = parametrize(target, VOCABULARY)
    assert rows.tensors["embedding.word_embeddings.weight"].lr == pytest.approx(5e-3 * 8)
    assert rows.tensors[f"{LAYER}mlp.linear_fc2.bias"].lr == pytest.approx(5e-3 * 3)
    record = make_record(rows, resolve_layout(target, 1), values, study=study_of(), budget=BUDGET)
    assert record.values["per_tensor.embedding.lr"] == 8.0
    assert "per_tensor.embedding.lr" in record.tuned
    assert record.target.becomes["tensors"]["embedding.word_embeddings.weight"]["lr"] == pytest.approx(0.04)


def test_a_record_that_is_silent_means_one(tmp_path: Path) -> None:
    """The target takes what the trials had; a factor on the command line that the record would drop is refused."""
    tuned = make(MIXED, "gpt3", run__dir=str(tmp_path))
    rows = parametrize(tuned, VOCABULARY)
    record = make_record(rows, resolve_layout(tuned, 1), values_of(tuned), study=study_of(), budget=BUDGET)
    write_record(tmp_path / "transfer.json", record)
    config = make(MIXED, "gpt3", run__dir=str(tmp_path), hparams__per_tensor={"embedding": {"lr": 2.0}})
    taken, _ = apply_record(config)
    assert taken.hparams.per_tensor["embedding"].lr == 1.0
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(tuned.model_dump()))
    given = load_config(path, {"hparams.per_tensor.embedding.lr": 2.0})
    with pytest.raises(ConfigError, match=r"hparams\.per_tensor\.embedding\.lr: 2\.0 is given, and .* says 1\.0"):
        apply_record(given)


def test_without_an_entry_the_values_are_what_they_were(tmp_path: Path) -> None:
    """A record that says nothing of kinds has no such names."""
    assert not [name for name in values_of(make(MIXED, "gpt3")) if name.startswith("per_tensor")]
    assert values_of(searching(tmp_path))["per_tensor.embedding.lr"] == 1.0


@pytest.mark.parametrize(
    ("search", "sentence"),
    [
        ({"per_tensor.embeding.lr": [0.5, 2.0]}, "0.5 is no value of per_tensor.embeding.lr: no kind of tensor"),
        ({"per_tensor.embedding.rate": [0.5, 2.0]}, "unknown hyperparameter"),
        (
            {"per_tensor.embedding.lr": [-1.0, 2.0]},
            "-1.0 is no value of per_tensor.embedding.lr: Input should be greater than 0",
        ),
    ],
)
def test_searches_that_are_refused(search: dict[str, Any], sentence: str) -> None:
    dimensions = {name: {"uniform": bounds} for name, bounds in search.items()}
    with pytest.raises(ConfigError) as error:
        make(MIXED, "gpt3", tuning__search=dimensions)
    assert sentence in str(error.value)


def test_keys_on_the_command_line() -> None:
    """What has dots of its own stands in quotes where a key is shown; below it is taken without."""
    assert key_of("per_tensor.embedding.lr") == "hparams.per_tensor.embedding.lr"
    key = key_of("per_tensor.*.mlp.*.lr")
    assert key == 'hparams.per_tensor."*.mlp.*".lr'
    overrides = parse_overrides([f"{key}=2.0", "hparams.per_tensor.gains.lr=0.5"])
    config = derive(make(MIXED, "gpt3"), overrides)
    assert {entry: said.lr for entry, said in config.hparams.per_tensor.items()} == {"*.mlp.*": 2.0, "gains": 0.5}


def test_explain_shows_them() -> None:
    from rich.console import Console

    config = make(MIXED, "gpt3", hparams__per_tensor=ENTRIES)
    rows = parametrize(config, VOCABULARY)
    layout = resolve_layout(config, 1)
    said = {row["name"]: row["per_tensor"] for row in json.loads(json.dumps(explain(rows, layout)))["parameters"]}
    assert said["embedding.word_embeddings.weight"] == {"lr": 2.0, "weight_decay": 1.0, "init": 0.5}
    assert said[f"{LAYER}self_attention.linear_qkv.weight"]["init"] == {"query": 0.25, "key": 1.0, "value": 1.0}
    assert said[f"{LAYER}input_layernorm.weight"] is None
    text = io.StringIO()
    print_table(rows, layout, Console(file=text, markup=False, width=300))
    shown = [line for line in text.getvalue().splitlines() if "word_embeddings" in line]
    assert shown[0].rstrip().endswith("lr ×2, init ×0.5")
    plain = io.StringIO()
    print_table(parametrize(make(MIXED, "gpt3"), VOCABULARY), layout, Console(file=plain, markup=False, width=300))
    assert "per_tensor" in text.getvalue()
    assert "per_tensor" not in plain.getvalue()
