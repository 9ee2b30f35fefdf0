"""The schema, and one clear sentence for whatever is wrong with a config."""

from __future__ import annotations

import ast
import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mup_megatron.config import Config, derive, growing_sizes, load_config, parse_config, parse_overrides, parse_yaml
from mup_megatron.config.load import override
from mup_megatron.config.per_tensor import PerTensor
from mup_megatron.tuning.space import key_of
from mup_megatron.util.errors import ConfigError, UserError
from mup_megatron.util.files import as_yaml

GOOD: dict[str, Any] = {
    "run": {"dir": "runs/x"},
    "model": {"architecture": "gpt3", "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4},
    "base": {"hidden_size": 32, "num_attention_heads": 2},
    "hparams": {"lr": 1e-3},
    "training": {"global_batch_size": 4, "micro_batch_size": 2, "seq_length": 32, "train_steps": 5},
    "data": {"corpus": "stdlib", "tokenizer": {"vocab_size": 512}},
}


def changed(**keys: Any) -> dict[str, Any]:
    data = copy.deepcopy(GOOD)
    for key, value in keys.items():
        override(data, key.replace("__", "."), value, "x.yaml")
    return data


def problem(**keys: Any) -> str:
    with pytest.raises(ConfigError) as error:
        parse_config(changed(**keys), "x.yaml")
    return str(error.value)


def test_good() -> None:
    config = parse_config(GOOD)
    assert config.model.normalization == "LayerNorm"
    assert config.model.head_size == 16
    assert config.model.ffn_size == 256
    assert config.model.padded_vocab_size(500) == 512
    assert config.max_position_embeddings == 32
    assert config.base.sizes == {"hidden_size": 32, "num_attention_heads": 2}
    assert config.base.enlarged().sizes == {"hidden_size": 64, "num_attention_heads": 4}


def test_presets_can_be_overridden() -> None:
    config = parse_config(changed(model__architecture="llama", model__normalization="LayerNorm"))
    assert (config.model.normalization, config.model.gated_linear_unit) == ("LayerNorm", True)


def test_every_shipped_config_is_good(repository: Path) -> None:
    for path in sorted((repository / "configs").rglob("*.yaml")):
        load_config(path)


def test_the_example_of_the_architecture_is_the_schema() -> None:
    """Section and key names are fixed; renaming one breaks users' files."""
    sections = {name: set(kind.annotation.model_fields) for name, kind in Config.model_fields.items()}
    assert {"name", "dir", "seed"} <= sections["run"]
    assert {"hidden_size", "ffn_hidden_size", "num_attention_heads", "num_layers"} <= sections["base"]
    assert {"name", "depth", "weight_decay", "fixed_fan_out_init"} <= sections["parametrization"]
    tuning = {"run", "trials", "sampler", "pruner", "train_steps", "max_compute_share", "storage", "search"}
    assert tuning <= sections["tuning"]
    assert {"nodes", "gpus_per_node", "time", "partition", "account"} <= sections["slurm"]
    assert {"engine", "zero_stage", "deepspeed_config", "sequence_parallel"} <= sections["parallel"]


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"model__hiden_size": 3}, "x.yaml: model.hiden_size: unknown key; did you mean model.hidden_size?"),
        ({"model__seq_length": 3}, "x.yaml: model.seq_length: unknown key; did you mean training.seq_length?"),
        ({"modle": {}}, "x.yaml: modle: unknown key; did you mean model?"),
        ({"model__hidden_size": "wide"}, "x.yaml: model.hidden_size: expected a whole number, found 'wide'"),
        ({"model__hidden_size": 64.5}, "expected a whole number, found 64.5"),
        ({"model__hidden_size": True}, "expected a whole number, found true"),
        ({"model__hidden_size": -64}, "expected a number > 0, found -64"),
        ({"model__hidden_size": 66}, "66 is not divisible by num_attention_heads 4"),
        ({"model__num_query_groups": 3}, "3 does not divide num_attention_heads 4"),
        ({"model__architecture": "gpt5"}, "expected one of 'gpt3', 'llama', 't5' or 'bert', found 'gpt5'"),
        ({"model__use_mup": True}, "megatron-core's native MuP cannot be combined"),
        ({"training": 3}, "training: expected keys and values, found 3"),
        ({"training__seq_length": None}, "training.seq_length: expected a whole number, found null"),
        ({"parallel__tensor_model_parallel_size": "all"}, "expected a whole number or 'auto', found 'all'"),
        ({"parallel__zero_stage": 4}, "parallel.zero_stage: expected a number <= 3, found 4"),
        ({"parallel__sequence_parallel": "yes"}, "expected true or false, found 'yes'"),
        ({"parametrization__depth": 2.0}, "parametrization.depth: expected one of"),
        (
            {"parametrization__depth": "completep"},
            "x.yaml: base.num_layers: missing; parametrization.depth: completep needs the number of layers where",
        ),
        (
            {"parametrization__depth": 0.75, "base": {"file": "base.bsh"}},
            "x.yaml: base.num_layers: missing; parametrization.depth: 0.75 needs",
        ),
        ({"optimizer__betas": [0.9]}, "optimizer.betas: expected 2 values, found [0.9]"),
        ({"optimizer__name": "adam", "hparams__weight_decay": 0.1}, "would be L2 added to the gradient"),
        ({"optimizer__name": "muon"}, "optimizer.name: muon is megatron-core's; expected it with parallel.engine"),
        ({"optimizer__name": "soap"}, "optimizer.name: soap is megatron-core's; expected it with parallel.engine"),
        (
            {"optimizer__name": "soap", "parallel__engine": "megatron", "parametrization__scaling": "unit"},
            "parametrization.scaling: unit has no exact rule for SOAP",
        ),
        ({"optimizer__name": "sgd", "optimizer__implementation": "apex"}, "implements Adam and AdamW, not sgd"),
        (
            {"optimizer__name": "lion", "optimizer__implementation": "torch"},
            "optimizer.implementation: torch implements SGD and Adam, not lion; expected deepspeed_lion or em",
        ),
        ({"optimizer__implementation": "deepspeed_lion"}, "deepspeed_lion implements Lion here, not adamw"),
        ({"hparams__lr": 0}, "hparams.lr: expected a number > 0"),
        ({"hparams__lr": float("nan")}, "hparams.lr"),
        ({"base": {}}, "base: missing; expected the sizes that grow"),
        ({"base__normalization": 3}, "base.normalization: unknown key"),
        ({"base__num_layers": 1}, "2 differs from the base's 1 and depth rules are off"),
        ({"proxy__num_layers": 1}, "num_layers differs from the base without being declared"),
        ({"proxy__kv_channels": 8}, "differs from the base without being declared"),
        (
            {"model__num_attention_heads": 8},
            "head size (hidden_size / num_attention_heads) is 8 here and 16 in the base",
        ),
        ({"training__global_batch_size": 5}, "2 does not divide training.global_batch_size 5"),
        (
            {"tuning__descent": {"trials": 4, "factor": 1.0}},
            "tuning.descent.factor: expected a number > 1.0, found 1.0",
        ),
        ({"tuning__descent": {"trial": 4}}, "tuning.descent.trial: unknown key; did you mean tuning.descent.trials?"),
        (
            {"tuning__descent": {"trials": 4}, "tuning__repeat_seeds": 0},
            "tuning.descent.trials: a value is accepted where its loss is better beyond noise, which repetitions with "
            "other seeds measure; expected tuning.repeat_seeds of 1 or more, found 0",
        ),
        ({"model__max_position_embeddings": 16}, "16 is less than training.seq_length 32"),
        ({"training__lr_warmup_steps": 5}, "5 leaves nothing of the 5 decay steps"),
        ({"training__lr_schedule": "WSD"}, "training.lr_wsd_decay_steps: missing"),
        ({"training__lr_schedule": "multi-step"}, "training.lr_milestones: missing"),
        ({"training__lr_milestones": [3, 2]}, "expected increasing steps"),
        ({"training__recompute_granularity": "full"}, "training.recompute_method: missing"),
        ({"data__corpus": None}, "data: expected one of corpus, files, data_path and pairs, found none"),
        ({"data__pairs": {"jsonl": "a"}}, "found corpus and pairs"),
        ({"data__corpus": "libreoffice-help"}, "data: pairs are an encoder-decoder's, and gpt3 reads text"),
        (
            {"data__corpus": None, "data__pairs": {"source": "a"}},
            "data.pairs: expected source and target, or jsonl alone, found source",
        ),
        ({"training__decoder_seq_length": 32}, "training.decoder_seq_length: is of pairs; expected data.pairs"),
        ({"data__files": ["a.txt"]}, "found corpus and files"),
        ({"data__split": "many"}, "expected train,valid,test shares"),
        ({"data__tokenizer": {"library": "huggingface"}}, "data.tokenizer.path: missing"),
        ({"data__tokenizer": {}}, "data.tokenizer.vocab_size: missing"),
        ({"tuning__search": {"lr": {"log_uniform": [2.0, 1.0]}}}, "low 2.0 is not below high 1.0"),
        ({"tuning__search": {"lr": {"log_uniform": [0.0, 1.0]}}}, "must be above 0"),
        ({"tuning__search": {"lr": {}}}, "expected one of log_uniform, uniform and choice"),
        ({"tuning__search": {"lrr": {"uniform": [1.0, 2.0]}}}, "unknown hyperparameter; did you mean lr?"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_bad(keys: dict[str, Any], sentence: str) -> None:
    assert sentence in problem(**keys)


def test_off_without_quotes(tmp_path: Path) -> None:
    """YAML reads it as false, in a file and on the command line."""
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(changed()) + "watch: {action: off}\n")
    config = load_config(path, parse_overrides(["run.audit=off"]))
    assert (config.run.audit, config.watch.action) == ("off", "off")
    assert "expected one of 'stop', 'warn' or 'off', found true" in problem(run__audit=True)


def test_a_depth_rule_off_or_unused_needs_no_base_depth() -> None:
    assert parse_config(changed()).num_layers_base == 2
    assert parse_config(changed(parametrization={"name": "standard", "depth": "completep"})).num_layers_base == 2


def test_what_grows_without_being_named() -> None:
    """Hidden 32 to 64, heads 2 to 4: FFN 4 * hidden and as many KV heads as heads; the head size, 16, stays."""
    growth = growing_sizes(parse_config(changed()))
    assert growth == {
        "hidden_size": (32, 64, None),
        "num_attention_heads": (2, 4, None),
        "ffn_hidden_size": (128, 256, "4 * hidden_size"),
        "num_query_groups": (2, 4, "num_attention_heads"),
    }
    # Named under model: alone, they are fixed; under base: they are declared.
    fixed = growing_sizes(parse_config(changed(model__ffn_hidden_size=256, model__num_query_groups=2)))
    assert list(fixed) == ["hidden_size", "num_attention_heads"]
    declared = growing_sizes(parse_config(changed(base__ffn_hidden_size=64)))
    assert declared["ffn_hidden_size"] == (64, 256, None)


def test_what_grows_in_experts_and_heads_without_being_named() -> None:
    """Two heads in both, so that the head size follows hidden / heads; an expert's FFN is the dense one's."""
    wide = {"model__num_attention_heads": 2, "base": {"hidden_size": 32}, "model__num_moe_experts": 4}
    assert growing_sizes(parse_config(changed(**wide))) == {
        "hidden_size": (32, 64, None),
        "ffn_hidden_size": (128, 256, "4 * hidden_size"),
        "moe_ffn_hidden_size": (128, 256, "ffn_hidden_size"),
        "kv_channels": (16, 32, "hidden_size / num_attention_heads"),
    }
    assert growing_sizes(parse_config(changed(base={"file": "base.bsh"}))) == {}


def test_missing_key() -> None:
    data = changed()
    del data["hparams"]["lr"]
    with pytest.raises(ConfigError, match=r"x\.yaml: hparams\.lr: missing"):
        parse_config(data, "x.yaml")


def test_numbers_without_a_point_are_numbers() -> None:
    """YAML 1.1 reads 3e-4 as text; nobody means that."""
    assert parse_yaml("[3e-4, 1E3, -2e+1, 1.5e-2, 12, 1e, e3]", "x") == [3e-4, 1e3, -20.0, 0.015, 12, "1e", "e3"]


def test_overrides() -> None:
    assert parse_overrides(["a.b=3e-4", "c=[1, x]", "d=", "e=a=b"]) == {
        "a.b": 3e-4,
        "c": [1, "x"],
        "d": None,
        "e": "a=b",
    }
    for bad in ("a", "=3", "a b=3", "a..b=3", "--a=3"):
        with pytest.raises(UserError, match=r"expected key\.path=value"):
            parse_overrides([bad])


@pytest.mark.parametrize(
    ("typed", "key"),
    [
        ("hparams.per_tensor.embedding.lr=2", "hparams.per_tensor.embedding.lr"),
        ('hparams.per_tensor."embedding".lr=2', "hparams.per_tensor.embedding.lr"),
        ("hparams.per_tensor.embedding={lr: 2}", "hparams.per_tensor.embedding"),
        ("hparams.per_tensor.*.mlp.fc1.weight.lr=2", 'hparams.per_tensor."*.mlp.fc1.weight".lr'),
        ('hparams.per_tensor."*.mlp.fc1.weight".lr=2', 'hparams.per_tensor."*.mlp.fc1.weight".lr'),
        ("hparams.per_tensor.decoder.layers.0.weight={lr: 2}", 'hparams.per_tensor."decoder.layers.0.weight"'),
        ("hparams.per_tensor.decoder.layers.?.weight.init=2", 'hparams.per_tensor."decoder.layers.?.weight".init'),
        ("hparams.per_tensor={a.b: {lr: 2}}", "hparams.per_tensor"),
        ("tuning.search.lr.choice=[1]", "tuning.search.lr.choice"),
        ("tuning.search.per_tensor.gains.lr={choice: [1]}", 'tuning.search."per_tensor.gains.lr"'),
        ("tuning.search.per_tensor.gains.lr.choice=[1]", 'tuning.search."per_tensor.gains.lr".choice'),
    ],
)
def test_names_with_dots_need_no_quotes(typed: str, key: str) -> None:
    """Where names are free the last part is a key of what a name opens, and all before it is the name."""
    assert list(parse_overrides([typed])) == [key]


def test_a_name_with_dots_reaches_the_config(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(as_yaml(GOOD))

    def load(*typed: str) -> Config:
        return load_config(path, parse_overrides(list(typed)))

    found = load("hparams.per_tensor.*.mlp.linear_fc1.weight.lr=2", "tuning.search.per_tensor.gains.lr.choice=[0.5, 1]")
    assert found.hparams.per_tensor == {"*.mlp.linear_fc1.weight": PerTensor(lr=2.0)}
    assert [*found.tuning.search] == ["per_tensor.gains.lr"]
    # What a record would replace without a word, did it not know that it was typed.
    assert found.is_overridden(key_of("per_tensor.*.mlp.linear_fc1.weight.lr"))
    with pytest.raises(ConfigError, match=r"\*\.mlp\.bias\.lrr: unknown key; did you mean .*\.\*\.mlp\.bias\.lr\?"):
        load("hparams.per_tensor.*.mlp.bias.lrr=2")
    with pytest.raises(ConfigError, match=r"hparams\.\*: unknown key"):
        load("hparams.*.lr=2")


def test_override_through_a_value() -> None:
    with pytest.raises(ConfigError, match=r"run\.dir: has no keys of its own"):
        changed(run__dir__x=3)


def test_override_of_one_entry(tmp_path: Path) -> None:
    """Also of a list that the file leaves at its default."""
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump(GOOD))
    assert "betas" not in path.read_text()
    assert load_config(path, {"optimizer.betas.1": 0.5}).optimizer.betas == [0.9, 0.5]
    assert load_config(path).optimizer.betas == [0.9, 0.95]  # the default itself stays
    with pytest.raises(ConfigError, match=r"optimizer\.betas: has 2 entries, so optimizer\.betas\.7 cannot be set"):
        load_config(path, {"optimizer.betas.7": 0.5})
    with pytest.raises(ConfigError, match=r"optimizer\.beta: unknown key; did you mean optimizer\.betas\?"):
        load_config(path, {"optimizer.beta.1": 0.5})


def test_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the config: No such file"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(UserError, match="cannot read the config"):
        load_config(tmp_path)
    for content, sentence in (
        ("a: [1", "line 1: not valid YAML"),
        ("run: {}\nrun: {}", "line 2: not valid YAML: key 'run' is given twice"),
        ("- 1", "expected sections"),
        ("!!python/object/apply:os.system ['true']", "not valid YAML"),
    ):
        (tmp_path / "bad.yaml").write_text(content)
        with pytest.raises(UserError, match=sentence):
            load_config(tmp_path / "bad.yaml")
    (tmp_path / "bad.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not a text file"):
        load_config(tmp_path / "bad.yaml")


_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 2000),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(), max_size=2),
)
_KEYS = st.sampled_from(
    [f"{section}.{key}" for section, kind in Config.model_fields.items() for key in kind.annotation.model_fields]
    + list(Config.model_fields)
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(_KEYS, _LEAVES, max_size=4))
def test_mutated_configs_never_end_in_a_traceback(mutations: dict[str, Any]) -> None:
    data = copy.deepcopy(GOOD)
    try:
        for key, value in mutations.items():
            override(data, key, value, "x.yaml")
        parse_config(data, "x.yaml")
    except UserError as error:
        assert str(error).startswith("x.yaml: ")
        assert "\n" not in str(error)


# --- a config made from another ---


def test_derive_replaces_checks_and_remembers(tmp_path: Path) -> None:
    """Keys and whole sections; the file and what the command line gave stay known, the first config as it was."""
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump(GOOD))
    config = load_config(path, {"hparams.lr": 0.5})
    derived = derive(config, {"run.seed": 7, "model.normalization": "RMSNorm", "optimizer": {"name": "sgd"}})
    assert (derived.run.seed, derived.model.normalization, derived.optimizer.name) == (7, "RMSNorm", "sgd")
    assert (derived.optimizer.momentum, derived.hparams.lr, derived.run.dir) == (0.9, 0.5, "runs/x")
    assert (derived.source, derived.is_overridden("hparams.lr")) == (str(path), True)
    assert (config.run.seed, config.model.normalization, config.optimizer.name) == (1234, "LayerNorm", "adamw")
    assert derive(config, {}) == config


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"run.sed": 7}, "run.sed: unknown key; did you mean run.seed?"),
        ({"training.train_steps": 0}, "training.train_steps: expected a number > 0, found 0"),
        ({"training.micro_batch_size": 3}, "training.micro_batch_size: 3 does not divide"),
        ({"model.num_layers": 3}, "model.num_layers: 3 differs from the base's 2 and depth rules are off"),
        ({"base": {}, "parametrization.name": "fan_in"}, "base: missing; expected the sizes that grow"),
        ({"run.seed.x": 1}, "run.seed: has no keys of its own, so run.seed.x cannot be set"),
    ],
)
def test_derive_refuses_what_a_file_may_not_say(keys: dict[str, Any], sentence: str) -> None:
    config = parse_config({**GOOD, "base": {**GOOD["base"], "num_layers": 2}}, "x.yaml")
    with pytest.raises(ConfigError) as error:
        derive(config, keys)
    assert f"x.yaml: {sentence}" in str(error.value)


_UNCHECKED = {"model_copy", "model_construct", "__replace__"}


def _unchecked(text: str) -> list[str]:
    """Classes in which a pydantic model is made from another without a check; "" outside of any."""
    tree, found = ast.parse(text), []
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in _UNCHECKED:
            found.append(next((c.name for c in classes if node in ast.walk(c)), ""))
    return found


def test_a_config_is_made_from_another_by_derive_alone(repository: Path) -> None:
    """Unchecked copies are of a model's sizes, which shapes are read from; no config or section of one is."""
    assert _unchecked("x = config.model_copy(update={})") == [""]
    found = {}
    for folder in ("mup_megatron", "patches", "benchmarks"):
        for path in (repository / folder).rglob("*.py"):
            if where := _unchecked(path.read_text()):
                found[str(path.relative_to(repository))] = sorted(where)
    assert found == {"mup_megatron/config/model.py": ["Growth", "Model", "Model"]}
