"""`mup_megatron.bridge` on megatron-core's own builder, container and optimizer, which Bridge's recipes are made of.

Bridge itself is in test_installed.py. Here a container of megatron.training's stands where Bridge's ConfigContainer,
its subclass's sibling, would; the model, its groups and its training are upstream's own.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mup_megatron.bridge import hooks
from mup_megatron.patches import revert_patches
from mup_megatron.patches.bridge import bridge_patches
from mup_megatron.util.errors import UserError
from tests.bridge import bodies
from tests.bridge.recipes import BASE, CORE, SAME, of_megatron
from tests.helpers.distributed import Ranks
from tests.helpers.installed import needs_training

pytestmark = needs_training
MATRIX, GAIN, WORDS = (
    "decoder.layers.1.mlp.linear_fc1.weight",
    "decoder.layers.1.input_layernorm.weight",
    "embedding.word_embeddings.weight",
)


@pytest.fixture(scope="module", autouse=True)
def _unpatched() -> Iterator[None]:
    """Other tests of this process see the constructor as it was."""
    yield
    revert_patches(bridge_patches(hooks))


def put(config: Any, base: Any = BASE, **options: Any) -> None:
    from mup_megatron.bridge.run import put_into

    given: dict[str, Any] = {"record": None, "tensors": None, "allowed": (), "audit": "stop"}
    given |= {"explain": False, "written": None, "sections": {"hparams": {}, "parametrization": {}}}
    put_into(config, base, **{**given, **options})


def test_at_four_times_the_width(ranks: Ranks) -> None:
    """Rates, epsilon, decay and initial values by hand; the schedule moves every group by the same factor."""
    (wide,) = ranks.run(1, bodies.trained, mup={"base": BASE})
    assert wide["status"] == 0, wide["said"]
    assert re.search(
        r"^mup-megatron: audit: (\d+) tensors, \1 right; (\d+) multipliers, \2 right$", wide["printed"], re.M
    )
    groups, initial = wide["groups"], wide["initial"]
    assert groups[MATRIX]["max_lr"] == pytest.approx(1e-2 / 4)
    assert groups[MATRIX]["min_lr"] == pytest.approx(1e-3 / 4)
    assert groups[MATRIX]["eps"] == pytest.approx(1e-6 / 4)
    # Bridge's scheduler sets the decay, 0.1, whatever the optimizer's config says: AdamW multiplies it with the rate.
    assert groups[MATRIX]["weight_decay"] == pytest.approx(0.1 * 4)
    assert groups[WORDS]["max_lr"] == groups[GAIN]["max_lr"] == pytest.approx(1e-2)
    assert groups[WORDS]["weight_decay"] == pytest.approx(0.1)
    assert groups[GAIN]["weight_decay"] == 0
    assert initial[MATRIX].std() == pytest.approx(0.05 / 4**0.5, rel=0.05)
    assert initial[WORDS].std() == pytest.approx(0.05, rel=0.05)
    for step, rates in enumerate(wide["rates"]):  # linear from the peak to a tenth of it over four updates
        assert rates[MATRIX] == pytest.approx((1e-2 - 9e-3 * step / 4) / 4)
        assert rates[WORDS] == pytest.approx(4 * rates[MATRIX])
    assert "readout 0.25" in wide["printed"]  # 1/4 forward
    assert "softmax_scale 0.125" in wide["printed"]  # 1/16 of queries times keys, relative to 1/4**0.5 at the base


def test_what_a_recipe_leaves_unsaid(ranks: Ranks) -> None:
    """Bridge's recipes say no attention backend, and keep the coefficient of a balancing loss that there is not."""
    unbalanced = {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 1e-3}
    experts = {"num_moe_experts": 4, "moe_ffn_hidden_size": 128, "add_bias_linear": False, **unbalanced}
    base = {**BASE, "moe_ffn_hidden_size": 128}
    (ours,) = ranks.run(1, bodies.trained, mup={"base": base}, attention_backend=None, **experts)
    assert ours["status"] == 0, ours["said"]
    assert ours["groups"]["decoder.layers.1.mlp.router.weight"]["max_lr"] == pytest.approx(1e-2 / 4)


def test_at_the_base_it_is_the_plain_recipe(ranks: Ranks) -> None:
    (ours,) = ranks.run(1, bodies.trained, mup={"base": SAME})
    (plain,) = ranks.run(1, bodies.trained, initial=ours["initial"])
    assert ours["status"] == plain["status"] == 0, ours["said"]
    assert len(plain["losses"]) == 2 * bodies.STEPS
    assert ours["losses"] == plain["losses"]
    for name, value in plain["final"].items():
        assert np.array_equal(ours["final"][name], value), name
    assert "rule" not in plain["groups"][MATRIX]  # the plain one had no group of ours


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"tensor_model_parallel_size": 2},
        pytest.param({"pipeline_model_parallel_size": 2, "pipeline_dtype": "float32"}, marks=pytest.mark.slow),
        pytest.param(
            {
                "pipeline_model_parallel_size": 2,
                "virtual_pipeline_model_parallel_size": 2,
                "pipeline_dtype": "float32",
                "num_layers": 4,
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=["data", "tensor", "pipeline", "interleaved"],
)
def test_two_ranks_are_one(layout: dict[str, Any], ranks: Ranks) -> None:
    import torch

    changed = {**layout, **({"pipeline_dtype": torch.float32} if "pipeline_dtype" in layout else {})}
    (one,) = ranks.run(1, bodies.trained, mup={"base": BASE}, num_layers=layout.get("num_layers", 2))
    two = ranks.run(2, bodies.trained, mup={"base": BASE}, **changed)
    assert [rank["status"] for rank in two] == [0, 0], two[0]["said"]
    losses = (
        two[1]["losses"]
        if layout
        else [loss for pair in zip(two[0]["losses"], two[1]["losses"], strict=True) for loss in pair]
    )
    assert losses == pytest.approx(one["losses"], rel=1e-6)
    for rank in two:
        for name, group in rank["groups"].items():
            if not name.startswith("decoder.layers.0") or "pipeline_dtype" not in layout:
                assert group["max_lr"] == one["groups"][name]["max_lr"], name


@pytest.mark.slow
def test_a_layer_spec_of_the_recipes_own(ranks: Ranks, tmp_path: Path) -> None:
    """A layer that only the recipe knows, said in a file; rates by hand."""
    (tmp_path / "tensors.yaml").write_text(
        "- {module: ExtraMLP, parameter: beside.weight, kind: matrix}\n"
        "- {module: ExtraMLP, parameter: beside_gain, kind: gain}\n"
    )
    way = {"base": BASE, "tensors": str(tmp_path / "tensors.yaml")}
    (ours,) = ranks.run(1, bodies.trained, mup=way, spec="extra_mlp")
    assert ours["status"] == 0, ours["said"]
    assert "no config says the script's layers: the script's layer spec: layer 0: mlp" in ours["said"]
    assert ours["groups"]["decoder.layers.1.mlp.beside.weight"]["max_lr"] == pytest.approx(1e-2 / 4)
    assert ours["groups"]["decoder.layers.1.mlp.beside_gain"]["max_lr"] == pytest.approx(1e-2)
    (unsaid,) = ranks.run(1, bodies.trained, mup={"base": BASE}, spec="extra_mlp")
    assert unsaid["status"] == 2
    assert "no entry says what this tensor of ExtraMLP is" in unsaid["said"]
    assert "expected one in tensors FILE" in unsaid["said"]


@pytest.mark.slow
def test_it_draws_what_the_native_path_draws(ranks: Ranks, tmp_path: Path) -> None:
    """The same sizes and seed as Megatron's options: the same initial values and rates."""
    from tests.helpers import megatron_runs

    (tmp_path / "cache").mkdir()
    words = megatron_runs.words(
        tmp_path,
        "--untie-embeddings-and-output-weights",
        base="".join(f"{name}: {size}\n" for name, size in BASE.items()),
        ffn_hidden_size=256,
        vocab_size=127,
        make_vocab_size_divisible_by=128,
        min_lr=1e-3,
        weight_decay=0.1,
        adam_eps=1e-6,
        clip_grad=0,
    )
    (theirs,) = ranks.run(1, megatron_runs.train, words=words)
    (ours,) = ranks.run(1, bodies.trained, mup={"base": BASE})
    assert theirs["status"] == ours["status"] == 0, theirs["said"]
    assert theirs["initial"].keys() == ours["initial"].keys()
    for name, value in theirs["initial"].items():
        assert np.array_equal(ours["initial"][name], value), name
        assert ours["groups"][name]["max_lr"] == theirs["groups"][name]["max_lr"], name
        assert ours["groups"][name]["rule"] == theirs["groups"][name]["rule"], name


def test_the_recipes_model_was_replaced_afterwards(ranks: Ranks) -> None:
    """A provider without the run builds a plain model, whose optimizer is not made."""
    (found,) = ranks.run(1, replaced)
    assert found[0] == 2
    assert "TransformerConfig: is not the model config that apply_mup was called on" in found[1]
    assert "Traceback" not in found[1]


def replaced(rank: Any) -> tuple[int, str]:
    import contextlib
    import io

    err = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        config = bodies.start(rank, "megatron", {"base": BASE})
        config.model.transformer = of_megatron().model.transformer
        try:
            bodies.build(config, "megatron")
        except SystemExit as leaving:
            return int(leaving.code or 0), err.getvalue()
    return 0, err.getvalue()


@pytest.mark.slow
def test_a_config_for_tuning(ranks: Ranks, tmp_path: Path) -> None:
    """What `write_config` writes is the run, with the base's sizes as the proxy's."""
    from mup_megatron.config import load_config

    path = tmp_path / "proxy.yaml"
    (found,) = ranks.run(1, bodies.trained, mup={"base": BASE, "explain": True, "written": path}, data="corpus")
    assert found["status"] == 0, found["said"]
    assert "losses" not in found
    config = load_config(path)
    assert config.model.hidden_size == CORE["hidden_size"]
    assert config.proxy.sizes["hidden_size"] == BASE["hidden_size"]
    assert config.hparams.weight_decay == 0.1


@pytest.mark.parametrize(
    ("section", "name", "value", "sentence"),
    [
        (
            "transformer",
            "use_mup",
            True,
            r"model\.use_mup: with it Bridge adds the overrides of megatron-core's native",
        ),
        ("", "peft", object(), r"^peft: adapters are added once the rules are applied"),
        ("model", "restore_modelopt_state", True, r"^model\.restore_modelopt_state: values come from elsewhere"),
        ("model", "pre_wrap_hooks", [len], r"^model: has pre-wrap hooks"),
        ("optimizer", "optimizer", "muon", r"^optimizer: OptimizerConfig with muon: .*expected one of adam, sgd"),
        ("optimizer", "lr", None, r"^optimizer\.lr: missing; expected the learning rate at the base"),
        ("scheduler", "no_weight_decay_cond_type", "qwen3_next", r"^scheduler\.no_weight_decay_cond_type: its groups"),
        ("dist", "use_decentralized_pg", True, r"^dist\.use_decentralized_pg: .*expected False"),
        ("checkpoint", "also_save_hf_checkpoint", True, r"^checkpoint\.also_save_hf_checkpoint: those files hold no"),
        ("checkpoint", "non_persistent_ckpt_type", "local", r"^checkpoint\.non_persistent_ckpt_type: no record"),
        ("checkpoint", "save", "msc://bucket", r"^checkpoint\.save msc://bucket: expected a folder of a file system"),
        ("checkpoint", "custom_manager_class", "a.B", r"^checkpoint\.custom_manager_class a\.B: .*expected None"),
        ("", "optimizer_config_override_provider", object(), r"^optimizer_config_override_provider: is object"),
    ],
)
def test_refused(section: str, name: str, value: Any, sentence: str) -> None:
    config = of_megatron()
    put(of_megatron())  # nothing else is wrong with it
    owner = {"": config, "transformer": config.model.transformer}.get(section) or getattr(config, section)
    setattr(owner, name, value)
    with pytest.raises(UserError, match=sentence):
        put(config)
    assert not hasattr(config.model.transformer, "_mup_megatron_run")


def test_another_model_is_refused() -> None:
    config = of_megatron()
    with pytest.raises(
        UserError, match=r"^config: GPTModelConfig has no model; expected a ConfigContainer of megatron-"
    ):
        put(config.model)
    config.model = SimpleNamespace(transformer=config.model.transformer)
    with pytest.raises(UserError, match=r"^model: SimpleNamespace does not build its model as GPTModelProvider"):
        put(config)


def test_what_is_seen_once_the_model_is_built(ranks: Ranks) -> None:
    """A field with a rule in the tables of `mup-megatron run`; the sentence has the container's names."""
    (found,) = ranks.run(1, bodies.trained, mup={"base": BASE}, softmax_scale=0.5)
    assert found["status"] == 2
    assert "TransformerConfig.softmax_scale 0.5: not under µP here" in found["said"]
    assert "Traceback" not in found["said"]


@pytest.mark.filterwarnings("ignore:.*is deprecated as of Python 3.12:DeprecationWarning")  # upstream's parser
def test_sentences_have_the_containers_names() -> None:
    from mup_megatron.bridge import translate

    config = of_megatron()
    given = {"config": config.model.transformer, "seq_len_interpolation_factor": None, "transformer_layer_spec": None}
    args = translate.arguments_of(config, given)
    assert (args.lr, args.weight_decay, args.transformer_impl, args.seed) == (1e-2, 0.1, "local", 7)
    said = translate.in_fields("--lr-decay-style a: b; --save, --hidden-size or --mup-hparams; --unknown-option")
    assert said == "scheduler.lr_decay_style a: b; checkpoint.save, model.hidden_size or hparams; --unknown-option"


@pytest.mark.parametrize(
    ("base", "sentence"),
    [
        ({"hidden_sizes": 16}, r"^base: hidden_sizes: unknown size; known here: hidden_size"),
        (
            {"hidden_size": 16, "kv_channels": 4},
            r"^model\.ffn_hidden_size: .*finalized before apply_mup, so 256 may be",
        ),
        ("nowhere.yaml", r"^nowhere\.yaml: cannot be read: No such file or directory"),
    ],
)
def test_base_sizes_that_cannot_be_used(base: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        put(of_megatron(), base)


def test_keys_that_are_not_known() -> None:
    for sections, sentence in (
        ({"hparams": {"lr": 1.0}, "parametrization": {}}, "apply_mup: hparams.lr: is Megatron's own option"),
        ({"hparams": {}, "parametrization": {"deep": 1}}, "apply_mup: parametrization.deep: unknown key"),
    ):
        with pytest.raises(UserError, match=sentence):
            put(of_megatron(), sections=sections)


def test_values_of_a_record(tmp_path: Path) -> None:
    """They take the place of the recipe's; the last rate keeps its ratio to the peak."""
    from mup_megatron.bridge.translate import put_values

    config = of_megatron()
    values = {
        "lr": 2e-2,
        "weight_decay": 0.3,
        "init_method_std": 0.1,
        "embedding_init_method_std": 0.2,
        "lr_schedule": "cosine",
        "one_minus_beta1": 0.2,
        "one_minus_beta2": 0.02,
        "output_multiplier": 2.0,
    }
    assert put_values(config, values, "transfer.json") == {"output_multiplier": 2.0}
    assert (config.optimizer.lr, config.optimizer.min_lr) == (2e-2, pytest.approx(2e-3))
    assert config.scheduler.start_weight_decay == config.scheduler.end_weight_decay == 0.3
    assert (config.model.transformer.init_method_std, config.model.transformer.embedding_init_method_std) == (0.1, 0.2)
    assert config.scheduler.lr_decay_style == "cosine"
    assert (config.optimizer.adam_beta1, config.optimizer.adam_beta2) == (0.8, 0.98)
    for name in ("sgd", "muon"):
        config.optimizer.optimizer = name
        put_values(config, {"one_minus_momentum": 0.04}, "transfer.json")
    assert (config.optimizer.sgd_momentum, config.optimizer.muon_momentum) == (0.96, 0.96)
    with pytest.raises(UserError, match=r"^transfer\.json: values: dropout: not a hyperparameter that is known here"):
        put_values(config, {"dropout": 0.1}, "transfer.json")
    with pytest.raises(UserError, match=r"cannot read the transfer record: No such file"):
        put(of_megatron(), record=tmp_path / "transfer.json")
    (tmp_path / "transfer.json").write_text(json.dumps([1]))
    with pytest.raises(UserError, match="not a transfer record"):
        put(of_megatron(), record=tmp_path / "transfer.json")


def test_a_copy_of_the_recipe_has_the_same_run() -> None:
    """As where Bridge, or a launcher, copies a container; a container goes on as plain data."""
    config = of_megatron()
    put(config)
    run = config.model.transformer._mup_megatron_run
    assert copy.deepcopy(config.model.transformer)._mup_megatron_run is run
    assert copy.copy(config.model.transformer)._mup_megatron_run is run
    kept = config.to_dict()
    assert kept["checkpoint"]["save"] is None
    assert "_mup_megatron_run" not in kept["model"]["transformer"]


@pytest.mark.skipif(importlib.util.find_spec("megatron.bridge") is not None, reason="megatron-bridge is installed")
def test_without_bridge() -> None:
    from mup_megatron.bridge import apply_mup

    with pytest.raises(
        UserError, match=r"^megatron-bridge of unknown version: megatron\.bridge\.training\.config cannot"
    ):
        apply_mup(of_megatron(), BASE)
