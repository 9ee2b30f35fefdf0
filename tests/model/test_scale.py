"""Models of any size in one process: layers and experts that stand for the others, and what a single rank holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mup_megatron import cli
from mup_megatron.config import Config
from mup_megatron.model import build as model
from mup_megatron.model import representatives
from mup_megatron.model.build import parametrize, unsharded_model
from mup_megatron.model.explain import explain
from mup_megatron.model.global_names import named_parameters
from mup_megatron.model.layers.tensor_spec import spec_of
from mup_megatron.parallel import upstream
from mup_megatron.parallel.layout import resolve_layout
from mup_megatron.patches import ALL_PATCHES, revert_patches
from mup_megatron.rules.apply import Rules
from mup_megatron.rules.shapes import TensorSpec
from tests.cli.test_cli import write
from tests.helpers import bodies
from tests.helpers.configs import HEAD_SIZE, MIXED, MLA, MOE, make
from tests.helpers.distributed import Ranks
from tests.helpers.matrix import CASES

VOCABULARY = 384
_MOE: dict[str, Any] = MOE
_MLA: dict[str, Any] = MLA
MIXTURE: dict[str, Any] = {**_MOE, "model": {**_MOE["model"], "num_layers": 5}}
LATENT_EXPERTS: dict[str, Any] = {
    "model": {**_MOE["model"], **_MLA["model"], "kv_channels": None, "ffn_hidden_size": 128},
    "base": {**_MOE["base"], **_MLA["base"], "ffn_hidden_size": 32},
}
# name: growth, architecture, overrides
MODELS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    **{name: (growth, "llama", overrides) for name, (growth, overrides) in CASES.items()},
    "gpt3": (MIXED, "gpt3", {"model__num_layers": 4}),
    "gpt3-head-size": (HEAD_SIZE, "gpt3", {}),
    "gpt3-mtp": (MIXED, "gpt3", {"model__num_layers": 3, "model__mtp_num_layers": 2}),
    "llama": (MIXED, "llama", {"model__num_layers": 4}),
    "llama-tied": (MIXED, "llama", {"model__share_embeddings_and_output_weights": True}),
    "dense-first-and-last": (MIXTURE, "llama", {"model__moe_layer_freq": [0, 1, 0, 1, 0], "model__mtp_num_layers": 1}),
    "experts-first": (MIXTURE, "llama", {"model__moe_layer_freq": [1, 0, 0, 1, 1], "model__mtp_num_layers": 2}),
    "every-third": (MIXTURE, "llama", {"model__moe_layer_freq": 3}),
    "experts-everywhere": (MIXTURE, "llama", {"model__moe_layer_freq": 1}),
    "expert-biases": (
        {**MIXTURE, "base": {key: size for key, size in _MOE["base"].items() if "shared" not in key}},
        "gpt3",
        {
            "model__moe_layer_freq": 2,
            "model__moe_shared_expert_intermediate_size": None,
            "model__moe_shared_expert_gate": False,
        },
    ),
    "latent-experts": (LATENT_EXPERTS, "llama", {"model__mtp_num_layers": 1}),
}


@pytest.fixture(autouse=True)
def _patched() -> Iterator[None]:
    """MLA's rotary embedding and the expert bias are made on the current device."""
    upstream.prepare_process()
    model._SPECS.clear()
    yield
    model._SPECS.clear()
    revert_patches(ALL_PATCHES)


def whole(config: Config, sizes: Any) -> list[tuple[str, TensorSpec | None]]:
    """Every tensor of the model, each built by megatron-core."""
    return [(name, spec_of(p)) for name, p in named_parameters(unsharded_model(config, sizes, VOCABULARY))]


def replicated(config: Config, sizes: Any) -> list[tuple[str, TensorSpec]]:
    """The same from representatives."""
    return list(model._specs(config, sizes, VOCABULARY).items())


@pytest.mark.parametrize("case", MODELS)
def test_representatives_stand_for_the_whole(case: str) -> None:
    """Names, specs and their order, of the target, the base and the enlarged base."""
    growth, architecture, overrides = MODELS[case]
    config = make(growth, architecture, **overrides)
    base = config.model.resized(config.base.width)
    for sizes in (config.model, base, base.resized(config.base.enlarged())):
        assert replicated(config, sizes) == whole(config, sizes)


@pytest.mark.parametrize("case", ["moe", "every-third", "experts-first"])
def test_a_kind_that_nothing_represents_is_seen(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers with experts and without taken for one kind: the comparison above must fail."""
    growth, architecture, overrides = MODELS[case]
    config = make(growth, architecture, **overrides)
    monkeypatch.setattr(model, "layer_kinds", lambda sizes: {"decoder": ["any"] * sizes.num_layers})
    assert replicated(config, config.model) != whole(config, config.model)


def test_an_expert_that_is_forgotten_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make(MOE, "llama")
    monkeypatch.setattr(model, "replicate", lambda built, kinds, _: representatives.replicate(built, kinds, 3))
    assert replicated(config, config.model) != whole(config, config.model)


def test_only_representatives_are_built() -> None:
    """Of 5 layers of 4 experts: a dense one, one with the first expert."""
    growth, architecture, overrides = MODELS["dense-first-and-last"]
    config = make(growth, architecture, **overrides)
    kinds = representatives.layer_kinds(config.model)
    assert kinds == {"decoder": ["dense", "experts", "dense", "experts", "dense"]}
    assert representatives.representatives(kinds) == {"decoder": [0, 1]}
    built = unsharded_model(config, config.model, VOCABULARY, {"decoder": [0, 1]})
    assert len(built.decoder.layers) == 2
    assert len(built.decoder.layers[1].mlp.experts.local_experts) == 1


def test_rules_are_applied_to_each_tensor_under_its_own_name() -> None:
    parametrization = parametrize(make(MIXTURE, "llama", model__moe_layer_freq=[0, 1, 1, 1, 1]), VOCABULARY)
    assert all(tensor.shape.name == name for name, tensor in parametrization.tensors.items())
    assert {t.shape.layer for t in parametrization.tensors.values()} == {None, 0, 1, 2, 3, 4}
    assert {name: tensor.shape for name, tensor in parametrization.tensors.items()} == parametrization.shapes
    rules = Rules(parametrization.config, parametrization.shapes, parametrization.base_head_size)
    for name, shape in parametrization.shapes.items():
        assert parametrization.tensors[name] == rules.row(shape)


PIPELINE = {
    "parallel__engine": "megatron",
    "parallel__pipeline_model_parallel_size": 2,
    "training__micro_batch_size": 1,
}
TP = {"parallel__tensor_model_parallel_size": 2, "parallel__sequence_parallel": True}
EP = {"parallel__expert_model_parallel_size": 2, "parallel__expert_tensor_parallel_size": 1}
# growth, architecture, overrides: every one on four ranks of two pipeline stages
LAYOUTS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "tied": (MIXED, "gpt3", TP),
    "own-head": (MIXED, "llama", TP),
    "mtp": (MIXED, "llama", {**TP, "model__mtp_num_layers": 1}),
    "tied-mtp": (MIXED, "gpt3", {**TP, "model__mtp_num_layers": 1}),
    "tied-interleaved": (
        MIXED,
        "gpt3",
        {**TP, "model__num_layers": 4, "parallel__virtual_pipeline_model_parallel_size": 2},
    ),
    "uneven": (MIXED, "llama", {**TP, "model__num_layers": 3, "parallel__num_layers_in_last_pipeline_stage": 1}),
    "experts": (MOE, "llama", {**TP, **EP, "model__moe_layer_freq": [1, 1], "model__mtp_num_layers": 1}),
    "split-experts": (MOE, "llama", {**TP, "parallel__expert_tensor_parallel_size": 2}),
    "experts-data": (MOE, "llama", {**EP, "parallel__tensor_model_parallel_size": 1}),
    "latent": (MLA, "llama", TP),
}


_QUICK = ("mtp", "tied-interleaved", "uneven", "experts", "latent")


@pytest.mark.parametrize(
    "case", [case if case in _QUICK else pytest.param(case, marks=pytest.mark.slow) for case in LAYOUTS]
)
def test_a_rank_holds_what_explain_says(ranks: Ranks, case: str) -> None:
    growth, architecture, overrides = LAYOUTS[case]
    config = make(growth, architecture, **PIPELINE, **overrides)
    built = ranks.run(4, bodies.held, config=config, vocabulary=375)
    layout, parametrization = resolve_layout(config, 4), parametrize(config, 375)
    told = [
        {
            parameter["name"]: tuple(parameter["local_shape"])
            for parameter in explain(parametrization, layout, rank)["parameters"]
        }
        for rank in range(4)
    ]
    assert told == built
    assert told[0] != told[2]  # stages differ, so that the comparison can fail
    assert set().union(*told) == set(parametrization.tensors)


def test_layout_of_a_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    growth, architecture, overrides = LAYOUTS["experts"]
    path = write(tmp_path, make(growth, architecture, **PIPELINE, **overrides))
    assert cli.run(["explain", path, "--world-size", "4", "--rank", "3", "--json"]) == 0
    layout = json.loads(capsys.readouterr().out)["layout"]
    assert layout == {
        "engine": "megatron",
        "world_size": 4,
        "rank": 3,
        "tensor_model_parallel_size": 2,
        "tensor_model_parallel_rank": 1,
        "pipeline_model_parallel_size": 2,
        "pipeline_model_parallel_rank": 1,
        "virtual_pipeline_model_parallel_size": None,
        "context_parallel_size": 1,
        "context_parallel_rank": 0,
        "expert_model_parallel_size": 2,
        "expert_model_parallel_rank": 1,
        "expert_tensor_parallel_size": 1,
        "expert_tensor_parallel_rank": 0,
        "data_parallel_size": 1,
        "data_parallel_rank": 0,
        "sequence_parallel": True,
        "zero_stage": 0,
        "layers": [[1]],
        "experts": [2, 3],
    }
    assert cli.run(["explain", path, "--world-size", "4", "--rank", "3"]) == 0
    out = capsys.readouterr().out
    assert "rank 3 of 4 holds layers 1, experts 2-3: " in out
    assert "decoder.layers.*.mlp.experts.local_experts.*.linear_fc1.weight (2×)" in out
    assert "position_embeddings" not in out
