"""The coordinate check: µP passes, everything else fails, and the layout is not seen."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from mup_megatron import cli
from mup_megatron.config import Config, load_config
from mup_megatron.engines.megatron_config import muon_missing
from mup_megatron.errors import UserError
from mup_megatron.proof.controls import CONTROLS
from mup_megatron.proof.family import changed, default_factors, members
from mup_megatron.proof.verdict import slope
from tests import bodies, proof_bodies
from tests.configs import make
from tests.distributed import Ranks

# Everything grows together; 16 tokens of hidden size 32 to 512.
SIZES = {"hidden_size": 32, "ffn_hidden_size": 128, "num_attention_heads": 2}
PLAIN = {"model": {"num_layers": 2, **SIZES}, "base": SIZES}
RATE = {"hparams__lr": 2e-3, "hparams__weight_decay": 0.0}
FACTORS = (1, 4, 16)
DEPTHS = (1, 2, 4)

# Whose gradient is zero in exact arithmetic: the key's bias moves by rounding noise under Adam.
ROUNDING = ("linear_qkv.bias",)
FIVE_DIGITS = 2e-5


def config_of(architecture: str = "gpt3", **keys: Any) -> Config:
    return make(PLAIN, architecture, **{**RATE, **keys})


def check(ranks: Ranks, config: Config, count: int = 1, **options: Any) -> dict[str, Any]:
    defaults = {"factors": FACTORS, "steps": 3, "seeds": 1, "beside": False}
    return ranks.run(count, proof_bodies.check, config=config, options={**defaults, **options})[0]


@pytest.mark.parametrize("architecture", ["gpt3", pytest.param("llama", marks=pytest.mark.slow)])
def test_mup_passes_and_standard_fails(ranks: Ranks, architecture: str) -> None:
    result = check(ranks, config_of(architecture), beside=True)
    assert result["passed"], result["out_of_bounds"]
    assert not result["silent"]
    assert not result["not_finite"]
    standard = [name for name, each in result["verdicts"]["standard"].items() if each["verdict"] == "out of bounds"]
    assert {"output_layer", "decoder.layers.1.mlp", "decoder.layers.1.self_attention"} <= set(standard)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt3", "llama", "moe", "mla"])
def test_the_families_of_the_evidence(ranks: Ranks, repository: Path, tmp_path: Path, name: str) -> None:
    """Widths 32 to 512: fixed key/value heads, experts, latent attention whose ranks grow."""
    path = repository / "configs" / "proof" / f"{name}.yaml"
    keys = {"data.dir": str(tmp_path), "hparams.lr": 2e-3, "hparams.output_multiplier": 1.0}
    config = changed(load_config(path), keys)
    result = check(ranks, config, factors=(1, 2, 4, 8, 16), steps=3, seeds=2)
    assert result["passed"], result["out_of_bounds"]


@pytest.mark.slow
def test_attention_that_grows_twice(ranks: Ranks, repository: Path, tmp_path: Path) -> None:
    """Heads and head sizes grow under MLA: the size of attention's output goes as width squared."""
    heads = {"qk_head_dim": 4, "qk_pos_emb_head_dim": 2, "v_head_dim": 4}
    keys = {f"base.{name}": size for name, size in heads.items()}
    keys |= {f"model.{name}": 16 * size for name, size in heads.items()}
    config = load_config(repository / "configs" / "proof" / "mla.yaml")
    result = check(ranks, changed(config, {"data.dir": str(tmp_path), **keys}))
    assert result["passed"], result["out_of_bounds"]
    value = "decoder.layers.0.self_attention.core_attention.value"
    expected = {each["expected"] for each in result["slopes"]["mup"] if each["name"] == value}
    assert sorted(expected) == [pytest.approx(-1.5), 0.0]


def broken(ranks: Ranks, rule: str, architecture: str = "gpt3") -> None:
    """The check fails without the rule, and in the same regime passes with it."""
    if rule == "muon_rate" and muon_missing():
        pytest.skip(str(muon_missing()))
    factors = DEPTHS if CONTROLS[rule].axis == "depth" else CONTROLS[rule].factors or FACTORS
    count = max(factors) if CONTROLS[rule].growing_tensor else 1
    keys = {"model__num_attention_heads": 4, "base__num_attention_heads": 4} if count > 1 else {}
    config = config_of(architecture, **keys)
    result = check(ranks, config, count, factors=factors, broken=rule, beside=True)
    assert not result["passed"]
    whole = [name for name, each in result["verdicts"]["mup"].items() if each["verdict"] == "out of bounds"]
    assert not whole


@pytest.mark.parametrize("rule", ["attention_scale", "decay"])
def test_a_broken_rule_fails(ranks: Ranks, rule: str) -> None:
    broken(ranks, rule)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["gpt3", "llama"])
@pytest.mark.parametrize("rule", list(CONTROLS))
def test_every_broken_rule_fails(ranks: Ranks, rule: str, architecture: str) -> None:
    broken(ranks, rule, architecture)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["standard", "interpolate:0,0", "interpolate:0,1", "interpolate:1,0"])
@pytest.mark.parametrize("architecture", ["gpt3", "llama"])
def test_other_points_of_the_plane_fail(ranks: Ranks, point: str, architecture: str) -> None:
    assert not check(ranks, config_of(architecture), point=point)["passed"]


def sizes(result: dict[str, Any]) -> dict[tuple[Any, ...], list[float]]:
    return {
        (cell["factor"], quantity, name): values
        for cell in result["cells"]
        for quantity, table in {**cell["coordinates"]["modules"], "update": cell["coordinates"]["updates"]}.items()
        for name, values in table.items()
    }


def compare(one: dict[str, Any], other: dict[str, Any], exempt: tuple[str, ...]) -> float:
    """The largest relative difference of any size; nothing may be missing on either side."""
    ours, theirs = sizes(one), sizes(other)
    assert set(ours) == set(theirs)
    worst = 0.0
    for key, values in ours.items():
        if str(key[2]).endswith(exempt):
            continue
        for here, there in zip(values, theirs[key], strict=True):
            assert (here is None) == (there is None), key
            if here is not None and there != here:
                worst = max(worst, abs(here - there) / max(abs(here), abs(there)))
    return worst


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"parallel__tensor_model_parallel_size": 2},
    "tp2_sp": {"parallel__tensor_model_parallel_size": 2, "parallel__sequence_parallel": True},
    "pp2": {"parallel__engine": "megatron", "parallel__pipeline_model_parallel_size": 2},
}


@pytest.mark.parametrize(
    ("architecture", "layouts"),
    [("llama", ("tp2", "pp2")), pytest.param("gpt3", tuple(LAYOUTS), marks=pytest.mark.slow)],
)
def test_the_check_does_not_see_the_layout(ranks: Ranks, architecture: str, layouts: tuple[str, ...]) -> None:
    options: dict[str, Any] = {"factors": (1, 2), "steps": 2}
    whole = check(ranks, config_of(architecture), **options)
    exempt = ROUNDING if architecture == "gpt3" else ()
    for name in layouts:
        split = check(ranks, config_of(architecture, **LAYOUTS[name]), 2, **options)
        assert compare(whole, split, exempt) < FIVE_DIGITS, name


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {"parallel__zero_stage": 3, "training__micro_batch_size": 2},
        {"parallel__engine": "megatron", "training__micro_batch_size": 2},
        {"parallel__engine": "megatron", "parallel__context_parallel_size": 2},
    ],
    ids=["zero3", "distributed_optimizer", "cp2"],
)
def test_nor_data_and_context_parallelism(ranks: Ranks, layout: dict[str, Any]) -> None:
    options: dict[str, Any] = {"factors": (1, 2), "steps": 2}
    whole = check(ranks, config_of("llama"), **options)
    split = check(ranks, config_of("llama", **layout), 2, **options)
    for cell in whole["cells"]:  # not looked at where a rank holds part of the keys
        for table in cell["coordinates"]["modules"].values() if "parallel__context_parallel_size" in layout else ():
            for name in [name for name in table if name.endswith("core_attention.logits")]:
                del table[name]
    assert compare(whole, split, ()) < FIVE_DIGITS


def test_a_size_of_one_rank_alone_is_seen(ranks: Ranks) -> None:
    """The comparison of layouts can fail: sums that are not added over ranks."""
    options: dict[str, Any] = {"factors": (1, 2), "steps": 2}
    whole = check(ranks, config_of("llama"), **options)
    split = ranks.run(
        2,
        proof_bodies.check,
        config=config_of("llama", **LAYOUTS["tp2"]),
        options={"seeds": 1, "beside": False, **options},
        alone=True,
    )[0]
    assert compare(whole, split, ()) > 1e-3


def test_slopes_by_hand() -> None:
    fitted, confidence = slope([1, 2, 4], [[3.0, 6.0, 12.0], [1.0, 1.0, 1.0]])
    assert fitted == pytest.approx(0.5)
    # Slopes 1 and 0: standard deviation 1/sqrt(2), of the mean 1/2, times Student's 12.71.
    assert confidence == pytest.approx(12.71 / 2)
    assert slope([1, 4], [[8.0, 4.0]]) == (pytest.approx(-0.5), None)
    assert math.isnan(slope([1, 2], [[1.0, math.nan]])[0])
    assert math.isnan(slope([1, 2], [[0.0, 1.0]])[0])


@pytest.mark.slow
def test_the_plane_s_corners(ranks: Ranks) -> None:
    """(1, 1) is µP and (0, 0) standard, of an untied head by abc-symmetry, which clipping by the plain norm breaks."""
    for architecture in ("gpt3", "llama"):
        size = {"model__hidden_size": 64, "model__num_attention_heads": 4}
        losses, clipped = (
            ranks.run(1, proof_bodies.corners, config=config_of(architecture, training__clip_grad=clip, **size))[0]
            for clip in (0.0, 1.0)
        )
        assert losses["interpolate:1,1"] == losses["mup"]
        assert losses["interpolate:0,0"] == losses["standard"]
        assert losses["mup"] != pytest.approx(losses["standard"], rel=1e-3)
        assert (clipped["interpolate:1,1"] == clipped["mup"]) == (architecture == "gpt3")


def test_the_family() -> None:
    config = config_of()
    assert default_factors(config) == [1, 2, 4, 8]
    assert default_factors(changed(config, {"model.hidden_size": 1024, "model.num_attention_heads": 64})) == [
        *(1, 2, 4, 8, 16),
        32,
    ]
    found = members(config, [4, 1], 1)
    assert [(member.factor, member.config.model.ffn_size) for member in found] == [(1, 128), (4, 512)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--widths", "2"], "two different widths"),
        (["--widths", "1,x"], "expected whole factors"),
        (["--widths", "0,1"], "expected whole factors"),
        (["--steps", "0"], "--steps: 0"),
        (["--seeds", "0"], "--seeds: 0"),
        (["--break", "everything"], "expected one of embedding_rate"),
        (["--parametrization", "interpolate:1"], "expected mup, standard, fan_in, or interpolate"),
        (["--parametrization", "standard", "--break", "eps"], "takes a rule out of mup"),
        (["optimizer.name=sgd", "--break", "eps"], "optimizer.name"),
    ],
)
def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config_of().model_dump()))
    assert cli.run(["coord-check", str(path), *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_widths_that_do_not_divide() -> None:
    config = config_of(parallel__tensor_model_parallel_size=4)
    with pytest.raises(UserError, match=r"--widths: 1 times the base: .*num_attention_heads"):
        members(config, [1, 2], 4)


@pytest.mark.slow
def test_the_command(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config_of(run__dir=str(tmp_path)).model_dump()))
    arguments = ["coord-check", str(path), "--widths", "1,2,4", "--steps", "1", "--seeds", "2", "--json"]
    (result,) = ranks.run(1, bodies.command, arguments=[*arguments, "--parametrization", "standard", "--no-beside"])
    status, out, _ = result
    assert status == 1
    told = json.loads(out)
    assert told["judged"] == "standard"
    assert "output_layer" in told["out_of_bounds"]
    assert told["verdicts"]["standard"]["output_layer"]["confidence"] is not None
    assert json.loads((tmp_path / "coord-check" / "standard.json").read_text()) == told
    assert (tmp_path / "coord-check" / "standard.png").read_bytes().startswith(b"\x89PNG")


def test_a_cell_that_is_no_number_is_said(ranks: Ranks) -> None:
    config = config_of(hparams__lr=1e30, training__clip_grad=0.0)
    result = check(ranks, config, factors=(1, 2), steps=2)
    assert not result["passed"]
    assert any(where.startswith("mup: 2 x base") for where in result["not_finite"])


def test_nothing_is_left_of_a_control(ranks: Ranks) -> None:
    """A control changes a copy: the rules themselves stay as they are."""
    config = config_of()
    before, after = ranks.run(1, proof_bodies.rules_around_controls, config=config)[0]
    assert before == after
