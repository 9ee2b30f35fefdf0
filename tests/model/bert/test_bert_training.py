"""BERT on ranks: upstream's own at the base, a plain torch BERT under microsoft/mup off the base, and every layout."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from mup_megatron.config import Config
from mup_megatron.data.prepare import prepare
from tests.helpers import bodies as shared
from tests.helpers.comparison import Difference, compare_curves
from tests.helpers.configs import MIXED, make
from tests.helpers.distributed import RankError, Ranks
from tests.helpers.layouts import STEPS, Split, check
from tests.helpers.parity import Page
from tests.model.bert import bodies

NEXT_SENTENCE: dict[str, Any] = {"model__bert_binary_head": True}
MODERN: dict[str, Any] = {
    "model__position_embedding_type": "rope",
    "model__normalization": "RMSNorm",
    "model__activation_func": "silu",
    "model__gated_linear_unit": True,
    "model__add_bias_linear": False,
    "model__share_embeddings_and_output_weights": False,
}
# Everything ×4 but the number of heads.
PROPORTIONAL = {
    "model": {
        "num_layers": 2,
        "hidden_size": 128,
        "ffn_hidden_size": 256,
        "num_attention_heads": 4,
        "kv_channels": 32,
    },
    "base": {"hidden_size": 32, "ffn_hidden_size": 64, "kv_channels": 8},
}


def config_of(growth: dict[str, Any] = MIXED, **overrides: Any) -> Config:
    config = make(growth, "bert", **overrides)
    prepare(config)
    return config


def at_base(**overrides: Any) -> Config:
    sizes = {**MIXED["model"], **MIXED["base"]}
    return config_of({"model": sizes, "base": MIXED["base"]}, parallel__zero_stage=1, **overrides)


@pytest.mark.parametrize(
    ("keys", "ranks_used"),
    [
        (NEXT_SENTENCE, 1),
        pytest.param({}, 2, marks=pytest.mark.slow),
        pytest.param(MODERN, 1, marks=pytest.mark.slow),
    ],
    ids=["next-sentence", "masked", "modern"],
)
def test_at_the_base_it_is_upstreams_to_the_last_bit(ranks: Ranks, keys: dict[str, Any], ranks_used: int) -> None:
    config = at_base(parallel__tensor_model_parallel_size=1, **keys)
    for result in ranks.run(ranks_used, bodies.plain_and_ours, config=config, steps=8):
        assert result["losses"]["ours"] == result["losses"]["plain"]
        assert result["weights"]["ours"].keys() == result["weights"]["plain"].keys()
        for name, value in result["weights"]["plain"].items():
            np.testing.assert_array_equal(result["weights"]["ours"][name], value, err_msg=name)


@pytest.mark.parametrize("key", ["attention", "output", "embedding", "residual"])
@pytest.mark.slow
def test_each_multiplier_breaks_it(ranks: Ranks, key: str) -> None:
    """Negative control: the comparison sees a thousandth of any forward multiplier."""
    config = at_base(**{f"hparams__{key}_multiplier": 1.001}, **NEXT_SENTENCE)
    result = ranks.run(1, bodies.plain_and_ours, config=config, steps=8)[0]
    assert result["losses"]["ours"] != result["losses"]["plain"]


def against_mup(ranks: Ranks, broken: str = "nothing", **overrides: Any) -> list[float]:
    """By how much losses differ from those of the plain BERT under microsoft/mup, step by step."""
    config = config_of(
        PROPORTIONAL,
        parallel__zero_stage=0,
        training__micro_batch_size=8,
        training__clip_grad=0.0,
        optimizer__name="adam",
        optimizer__eps=1e-15,
        hparams__weight_decay=0.0,
        hparams__output_multiplier=2.0,
        hparams__attention_multiplier=1.5,
        **NEXT_SENTENCE,
        **overrides,
    )
    found = ranks.run(1, bodies.oracle, config=config, steps=8, broken=broken)[0]
    assert found["ours"][0] - found["ours"][-1] > 0.3
    return [abs(ours / theirs - 1) for ours, theirs in zip(found["ours"], found["theirs"], strict=True)]


def test_it_trains_as_a_plain_bert_under_microsofts_mup(ranks: Ranks) -> None:
    """At four times the base, with other multipliers than 1: eight steps of MuAdam, in which every rate takes part."""
    assert max(against_mup(ranks)) < 2e-5


@pytest.mark.parametrize(
    ("broken", "from_step"),
    [
        ("readout multiplier", 0),
        pytest.param("pooler as a vector", 1, marks=pytest.mark.slow),
    ],
)
def test_what_the_comparison_with_mup_sees(ranks: Ranks, broken: str, from_step: int) -> None:
    """Negative controls: a forward multiplier differs at once, a rate after the first step."""
    deviations = against_mup(ranks, broken)
    assert max(deviations[:from_step], default=0.0) < 2e-5
    assert max(deviations[from_step:]) > 1e-3


@pytest.fixture(scope="module")
def reference(ranks: Ranks) -> Any:
    """Runs of the unsharded models, made when first asked for."""

    @cache
    def run(*keys: tuple[str, Any]) -> dict[str, Any]:
        config = config_of(parallel__zero_stage=0, hparams__lr=3e-3, **dict(keys))
        return ranks.run(1, bodies.train, config=config, steps=STEPS)[0]

    return run


DEEP: dict[str, Any] = {"model__num_layers": 4}
SEQUENCE = Split(0, tensor=2, sequence=True)
CELLS: list[tuple[dict[str, Any], Split]] = [
    (NEXT_SENTENCE, Split(1, tensor=2, data=2, sequence=True)),
    (NEXT_SENTENCE, Split("plain", pipeline=2, tensor=2, sequence=True)),
    ({}, Split(0, tensor=2)),
    (NEXT_SENTENCE, Split(3, data=2)),
    ({}, Split(3, tensor=2, data=2)),
    ({}, Split("distributed", pipeline=2, data=2)),
    ({**NEXT_SENTENCE, **DEEP}, Split("plain", pipeline=2, virtual=2)),
    (MODERN, Split(2, tensor=2, data=2, sequence=True)),
    (MODERN, Split("plain", pipeline=2, tensor=2)),
]
QUICK = CELLS[:1]
KINDS = {
    (): "bert",
    tuple(NEXT_SENTENCE): "bert, next sentence",
    (*NEXT_SENTENCE, *DEEP): "bert, next sentence",
    tuple(MODERN): "bert, RoPE, RMSNorm, SwiGLU",
}
"""What ./dev parity calls a model, by the keys that it has of its own."""


@pytest.mark.parametrize(
    ("model", "split"),
    [
        pytest.param(
            *(model, split),
            id=f"{KINDS[tuple(model)]}: {split}",
            marks=() if (model, split) in QUICK else pytest.mark.slow,
        )
        for model, split in CELLS
    ],
)
def test_the_layout_changes_nothing(
    ranks: Ranks, reference: Any, parity: Page, model: dict[str, Any], split: Split
) -> None:
    """Initial values to the last bit, groups, and losses and gradient norms within 2e-5 of one process."""
    # Two micro-batches, under the interleaved schedule too: as many as stages.
    keys = {**split.overrides, "training__micro_batch_size": 4 // split.data, "hparams__lr": 3e-3, **model}
    with parity.cell(KINDS[tuple(model)], "mixed", str(split)) as cell:
        whole = reference(*model.items())
        results = ranks.run(split.processes, bodies.train, config=config_of(**keys), steps=STEPS)
        cell.add(results, whole)
        check(results, whole, split, gated=bool(model.get("model__gated_linear_unit")))


def test_the_regime_can_tell(reference: Any) -> None:
    """The loss falls by a quarter of a nat and stays above one."""
    losses = reference(*NEXT_SENTENCE.items())["losses"]
    assert losses[0] - losses[-1] > 0.25
    assert losses[-1] > 1.0


@pytest.mark.slow
def test_a_head_that_is_not_marked_is_seen(ranks: Ranks, reference: Any) -> None:
    """Negative control: under sequence parallelism the head's gradients are then those of a part of the sequence."""
    whole = reference(*NEXT_SENTENCE.items())
    config = config_of(hparams__lr=3e-3, **NEXT_SENTENCE, **SEQUENCE.overrides)
    results = ranks.run(2, bodies.train, config=config, steps=STEPS, broken="head not marked")
    with pytest.raises(Difference, match=r"grad_norms\[0\] on rank 0"):
        compare_curves(results, whole)


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ("linear records", "lm_head.dense.weight"),
        ("readout record", "output_layer.bias"),
        ("embedding record", "embedding.word_embeddings.weight"),
    ],
)
def test_a_shim_that_is_missing_is_named(ranks: Ranks, broken: str, named: str) -> None:
    with pytest.raises(RankError, match=rf"{named}: its layer does not say its global shape"):
        ranks.run(1, bodies.train, config=config_of(parallel__zero_stage=0), steps=1, broken=broken)


@pytest.mark.parametrize("attention", ["megatron", "sdpa"])
def test_padding_is_not_seen_and_the_rest_is(ranks: Ranks, attention: str) -> None:
    """Tokens at the end of a sequence reach every position before it, but not where the mask says padding."""
    config = config_of(parallel__zero_stage=0, model__core_attention=attention)
    found = ranks.run(1, bodies.padded, config=config)[0]
    assert all(finite for _, finite in found.values())
    losses = {name: values[:, :-5] for name, (values, _) in found.items()}
    np.testing.assert_array_equal(losses["padding"], losses["padding, other"])
    assert (losses["seen"] != losses["seen, other"]).all()
    assert (losses["seen"] != losses["padding"]).all()


@pytest.mark.parametrize("state", [1, "plain"], ids=["deepspeed", "megatron"])
@pytest.mark.slow
def test_a_resumed_run_goes_on_to_the_last_bit(ranks: Ranks, tmp_path: Path, state: int | str) -> None:
    config = config_of(**NEXT_SENTENCE, **Split(state, tensor=2).overrides)
    whole = ranks.run(2, shared.leg, config=config, start_at=0, stop_at=6)[0]
    saved = str(tmp_path / "state")
    ranks.run(2, shared.leg, config=config, start_at=0, stop_at=3, save=saved)
    rest = ranks.run(2, shared.leg, config=config, start_at=3, stop_at=6, load=saved)[0]
    assert rest["losses"] == whole["losses"][3:]
    assert rest["rates"] == whole["rates"][3:]


def test_commands_that_need_a_next_token_refuse_it(ranks: Ranks, tmp_path: Path) -> None:
    """A run from the command line; then one sentence and status 2 of what only a GPT has, and nothing written."""
    run, file = tmp_path / "run", tmp_path / "run.yaml"
    keys: dict[str, Any] = {
        "training__train_steps": 2,
        "training__lr_warmup_steps": 1,
        "training__checkpoint_interval": 2,
    }
    file.write_text(yaml.safe_dump(config_of(run__dir=str(run), parallel__zero_stage=0, **keys).model_dump()))
    (status, _, err) = ranks.run(1, shared.command, arguments=["train", str(file)])[0]
    assert status == 0, err
    for what, words in {
        "export": [str(run), str(tmp_path / "exported"), "--to", "megatron"],
        "rebase": [str(run), str(tmp_path / "rebased"), "--base", str(tmp_path / "base.yaml")],
        "import": [str(run), str(file)],
    }.items():
        (status, _, err) = ranks.run(1, shared.command, arguments=[what, *words])[0]
        assert status == 2, (what, err)
        assert "needs a model that predicts the next token, and bert does not; expected gpt3 or llama" in err
        assert "Traceback" not in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.yaml"]


@pytest.mark.slow
def test_the_patch_of_the_heads_norm(ranks: Ranks) -> None:
    """Without it upstream refuses sequence parallelism where Apex is not installed."""
    config = config_of(**SEQUENCE.overrides)
    with pytest.raises(RankError, match="sequence parallel not supported by torch LayerNorm"):
        ranks.run(2, shared.train, config=config, steps=1, broken="patch:bert-head-norm")
