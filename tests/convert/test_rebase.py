"""rebase: the same training from another base. The run that nobody rebased is the oracle."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mup_megatron import cli
from mup_megatron.config import derive
from mup_megatron.convert import rebase as rebasing
from mup_megatron.convert.export import open_source
from mup_megatron.convert.rebase import rebase
from mup_megatron.convert.reexpress import Reexpressed, reexpress
from mup_megatron.engines.saved_weights import SavedWeights
from mup_megatron.engines.setup.megatron import emerging_missing
from mup_megatron.model.build import parametrize
from mup_megatron.parallel import upstream
from mup_megatron.util.errors import DiskFull, UserError
from tests.convert.sources import config_of
from tests.engines.test_full_disk import Disk
from tests.helpers import bodies
from tests.helpers.commands import next_commands
from tests.helpers.configs import VOCABULARY
from tests.helpers.distributed import Ranks

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS, AT = 8, 4
# A rate at which an update is large beside the rounding of the weight that takes it.
ADAM = {"hparams__lr": 0.05, "optimizer__eps": 1e-4, "hparams__weight_decay": 0.3, "training__clip_grad": 0.0}
# The same values for trials of a quarter of the batch: rate 4^1/2 · 4^-1, epsilon 4^-1/2, decay 1/(1/2), 1 - beta 4.
RULED = {
    **ADAM,
    "parametrization__batch": "sqrt_sde",
    "parametrization__tokens": "power:-1",
    "parametrization__weight_decay": "timescale",
    "tuning__global_batch_size": 2,
    "tuning__micro_batch_size": 2,
    "hparams__lr": 0.1,
    "hparams__weight_decay": 0.15,
    "optimizer__eps": 2e-4,
    "optimizer__betas": [0.975, 0.9875],
}
# Name: ranks, keys. Epsilon near the size of the gradients and a decay that is felt, so that each of them counts.
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, RULED),
    "smaller trials": (
        1,
        {**ADAM, "tuning__global_batch_size": 2, "tuning__micro_batch_size": 2, "tuning__train_steps": 4},
    ),
    "clipped": (1, {**ADAM, "training__clip_grad": 1.0}),
    "ZeRO 1": (2, {**ADAM, "parallel__zero_stage": 1}),
    "Megatron": (2, {**ADAM, "parallel__engine": "megatron", "parallel__use_distributed_optimizer": True}),
    "multi-token prediction": (1, {**ADAM, "model__mtp_num_layers": 1}),
    "experts": (
        1,
        {
            **ADAM,
            "model__num_moe_experts": 8,
            "model__moe_router_topk": 4,
            "model__moe_ffn_hidden_size": 32,
            "base__num_moe_experts": 4,
            "base__moe_router_topk": 2,
            "parametrization__experts": "fixed_share",
        },
    ),
    "Muon": (
        1,
        {
            **ADAM,
            "optimizer__name": "muon",
            "parallel__engine": "megatron",
            "parallel__use_distributed_optimizer": False,
        },
    ),
    "SOAP": (
        1,
        {
            **ADAM,
            "hparams__lr": 0.01,
            "optimizer__name": "soap",
            "parallel__engine": "megatron",
            "parallel__use_distributed_optimizer": False,
        },
    ),
    "SGD": (1, {"optimizer__name": "sgd", "hparams__lr": 0.1, "training__clip_grad": 0.0}),
}
OTHER = "hidden_size: 16\nffn_hidden_size: 96\nkv_channels: 8\nnum_layers: 2\n"
EXPERTS = "num_moe_experts: 8\nmoe_router_topk: 4\n"  # as many as the run has: no ratio is left
LEFT_OUT = ("weights", "first moments", "second moments", "rate", "epsilon", "decay")


@pytest.fixture(scope="module")
def ran(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A run of eight steps with a checkpoint after each, by its name; its folder."""
    upstream.prepare_process()
    made: dict[str, Path] = {}

    def run(name: str) -> Path:
        if name not in made:
            count, keys = RUNS[name]
            steps = {
                "training__train_steps": STEPS,
                "training__checkpoint_interval": 1,
                "training__checkpoints_kept": 9,
            }
            folder = tmp_path_factory.mktemp("whole") / "run"
            more = {"model__num_query_groups": 4} if name in ("SGD", "Muon", "SOAP") else {}
            config = derive(config_of("llama", False, **{**steps, **keys, **more}), {"run.dir": str(folder)})
            (folder.parent / "run.yaml").write_text(yaml.safe_dump(config.model_dump()))
            ranks.run(count, bodies.train_file, path=folder.parent / "run.yaml")
            made[name] = folder
        return made[name]

    return run


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step_{step:08d}"


def losses(run: Path) -> dict[int, float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def updates(run: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """What the step after the checkpoint did to every tensor, float64; and how far rounding the weight can move it."""
    before, after = (SavedWeights(checkpoint(run, step)) for step in (AT, AT + 1))
    found = {}
    for name in before.shapes:
        old, new = before.read(name).double(), after.read(name).double()
        found[name] = new - old, (old.abs() + new.abs()) * 2**-24
    return found


def deviations(whole: Path, rebased: Path, weights: Mapping[str, float]) -> dict[str, float]:
    """By tensor, how far the first update after the rebase is from the run's own, over its size.

    Weights are kept as float32 numbers; what rounding them does to their difference is not counted.
    """
    own, result = updates(whole), {}
    for name, (found, rounded) in updates(rebased).items():
        theta = weights.get(name, 1.0)
        off = (found / theta - own[name][0]).abs() - rounded / theta - own[name][1]
        result[name] = float(off.clamp(min=0.0).norm() / own[name][0].norm())
    return result


def go_on(
    ranks: Ranks, whole: Path, folder: Path, name: str, keys: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, float]]:
    """Rebases the fourth checkpoint and trains four steps; what rebase said, and how far first updates are off."""
    depth = 1 if name == "multi-token prediction" else 2  # of which there is no depth rule
    other = OTHER.replace("num_layers: 2", f"num_layers: {depth}") + (EXPERTS if name == "experts" else "")
    (folder / "base.yaml").write_text(other)
    said = rebase(checkpoint(whole, AT), folder / "rebased", folder / "base.yaml", keys)
    ranks.run(RUNS[name][0], bodies.train_file, path=folder / "rebased" / "config.yaml")
    return said, deviations(whole, folder / "rebased", said["weights"])


FORMS: dict[str, dict[str, Any]] = {
    "multipliers kept": {},
    "multipliers of 1": {
        "hparams.output_multiplier": 1.0,
        "hparams.embedding_multiplier": 1.0,
        "hparams.residual_multiplier": 1.0,
    },
    # θ of 4, 1/4 and 2, under which no number is rounded.
    "powers of two": {
        "hparams.output_multiplier": 1.5,
        "hparams.embedding_multiplier": 1.2,
        "hparams.residual_multiplier": 1.25,
    },
    "standard": {"parametrization.name": "standard", "parametrization.depth": "none"},
}
QUICK = ("one rank", "powers of two")
TRAINED = ("multipliers kept", "powers of two", "standard")
KEPT_ALONE = ("multi-token prediction", "experts", "Muon", "SOAP")  # with other multipliers refused, see below
CELLS = [
    (name, form)
    for name in RUNS
    for form in TRAINED
    if name != "smaller trials"
    and (name, form) != ("clipped", "powers of two")
    and (form == "multipliers kept" or name not in KEPT_ALONE)
]


@pytest.mark.parametrize(
    ("name", "form"), [cell if cell == QUICK else pytest.param(*cell, marks=pytest.mark.slow) for cell in CELLS]
)
def test_training_goes_on_as_it_would_have(
    ran: Callable[[str], Path], ranks: Ranks, name: str, form: str, tmp_path: Path
) -> None:
    """Losses of the four steps, and the first update of every tensor."""
    if name in ("Muon", "SOAP") and (why := emerging_missing(name.lower())):
        pytest.skip(why)
    whole = ran(name)
    said, off = go_on(ranks, whole, tmp_path, name, FORMS[form])
    assert said["carried"]
    assert bool(said["weights"]) == (form == "powers of two")
    own, found = losses(whole), losses(tmp_path / "rebased")
    assert set(found) == set(range(AT + 1, STEPS + 1))
    for step, loss in found.items():
        assert loss == pytest.approx(own[step], rel=1e-6)
    assert max(off.values()) < 1e-6, off


# Run, keys, and by hand what becomes of the betas 0.9 and 0.95, and what a gain carries on rate, epsilon and decay (of
# which it has none). The batch is four times a trial's; the tokens are eight times, of the last run four times. By
# itself, a base of half the width makes epsilon twice as large.
HORIZONS: dict[str, tuple[str, dict[str, str], tuple[float, float], tuple[float, float, float]]] = {
    "sqrt_sde": ("smaller trials", {"parametrization.batch": "sqrt_sde"}, (0.975, 0.9875), (1 / 2, 4.0, 1.0)),
    "tokens": ("smaller trials", {"parametrization.tokens": "power:-1"}, (0.9, 0.95), (8.0, 2.0, 1.0)),
    "timescale": ("smaller trials", {"parametrization.weight_decay": "timescale"}, (0.9, 0.95), (1.0, 2.0, 1.0)),
    "none": (
        "one rank",
        {"parametrization.batch": "none", "parametrization.tokens": "none", "parametrization.weight_decay": "coupled"},
        (0.9, 0.95),
        (1 / 2, 1.0, 1.0),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("rule", HORIZONS)
def test_rules_over_batch_and_tokens_may_change(
    ran: Callable[[str], Path], ranks: Ranks, rule: str, tmp_path: Path
) -> None:
    """The new rule's factors are carried, and the betas follow it; the run goes on as it would have."""
    name, keys, betas, gain = HORIZONS[rule]
    whole = ran(name)
    said, off = go_on(ranks, whole, tmp_path, name, keys)
    config = yaml.safe_load((tmp_path / "rebased" / "config.yaml").read_text())
    assert config["optimizer"]["betas"] == pytest.approx(betas, rel=1e-12)
    assert said["carried"].get("decoder.final_layernorm.weight", [1.0] * 3) == pytest.approx(gain, rel=1e-12)
    own, found = losses(whole), losses(tmp_path / "rebased")
    assert set(found) == set(range(AT + 1, STEPS + 1))
    for step, loss in found.items():
        assert loss == pytest.approx(own[step], rel=1e-6)
    assert max(off.values()) < 1e-6, off


def test_by_hand(ran: Callable[[str], Path], tmp_path: Path) -> None:
    """Hidden 64 over 32 becomes 64 over 16, layers 2 over 1 become 2 over 2; α_output 3 · 1/2 becomes 1 · 1/4.

    The head is multiplied with 3/2 · 4 = 6, the embedding with 0.3; branches had 5 / 2 and have 1. Matrices of the
    hidden size had the rate η/2 and would have η/4.
    """
    (tmp_path / "base.yaml").write_text(OTHER)
    said = rebase(
        checkpoint(ran("one rank"), AT), tmp_path / "rebased", tmp_path / "base.yaml", FORMS["multipliers of 1"]
    )
    layers = [f"decoder.layers.{layer}." for layer in (0, 1)]
    projections = {
        f"{layer}{name}.weight": 2.5 for layer in layers for name in ("self_attention.linear_proj", "mlp.linear_fc2")
    }
    expected = {"embedding.word_embeddings.weight": 0.3, "output_layer.weight": 6.0, **projections}
    assert said["weights"] == pytest.approx(expected)
    # The softmax scale was 1.75 · sqrt(16/24), and would be 1.75 · sqrt(8/24).
    assert said["multipliers"]["hparams.attention_multiplier"] == pytest.approx(1.75 * math.sqrt(2))
    carried = said["carried"]
    # Rate 0.3, epsilon 1/0.3, the same lr·λ: its rules had no factor on rates, and epsilon's was 1/2 and is 1/4.
    assert carried["embedding.word_embeddings.weight"] == pytest.approx([0.3, 2 / 0.3, 1 / 0.3])
    assert carried["decoder.layers.0.self_attention.linear_qkv.weight"][0] == pytest.approx(2.0)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["multipliers kept", "powers of two"])
def test_a_full_disk(ran: Callable[[str], Path], form: str, tmp_path: Path) -> None:
    """One sentence, whether files are copied or written anew; no folder that looks whole; then there is room."""
    (tmp_path / "base.yaml").write_text(OTHER)
    source, disk = checkpoint(ran("one rank"), AT), Disk(tmp_path / "disk", 400)
    again = partial(rebase, source, disk.path / "rebased", tmp_path / "base.yaml", FORMS[form])
    try:
        with pytest.raises(DiskFull, match=r"no space left on device while writing the rebased run \(\d"):
            again()
        assert not (disk.path / "rebased").exists()
        disk.resize(100_000)
        assert again()["step"] == AT
    finally:
        subprocess.run(["umount", "-l", str(disk.path)], check=True)


# --- each re-expressed quantity left out ---


def reexpress_of(whole: Path) -> Reexpressed:
    """What becomes of the run in the form without multipliers."""
    before = open_source(checkpoint(whole, AT)).parametrization
    keys = {
        "base": yaml.safe_load(OTHER),
        "hparams.attention_multiplier": 1.75 * math.sqrt(2),
        **FORMS["multipliers of 1"],
    }
    return reexpress(before, parametrize(derive(before.config, keys), VOCABULARY))


def broken(found: Reexpressed, what: str) -> Reexpressed:
    """What is said of the rates, without one of them."""
    field = {"rate": "lr", "epsilon": "eps", "decay": "weight_decay"}[what]
    carried = {name: factors._replace(**{field: 1.0}) for name, factors in found.carried.items()}
    return dataclasses.replace(found, carried=carried)


@pytest.mark.parametrize(
    "what", [what if what == "second moments" else pytest.param(what, marks=pytest.mark.slow) for what in LEFT_OUT]
)
def test_what_is_left_out_is_seen(
    ran: Callable[[str], Path], ranks: Ranks, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the names of the tensors whose first update it decides, and of no others."""
    whole = ran("one rank")
    found = reexpress_of(whole)
    if what in ("rate", "epsilon", "decay"):
        monkeypatch.setattr(rebasing, "reexpress", lambda before, after: broken(reexpress(before, after), what))
    else:
        power = {"weights": "weight", "first moments": "exp_avg", "second moments": "exp_avg_sq"}[what]
        monkeypatch.setitem(rebasing.POWERS, power, 0)
    _, off = go_on(ranks, whole, tmp_path, "one rank", FORMS["multipliers of 1"])
    seen = {name for name, deviation in off.items() if deviation > 1e-4}
    factors = dict(found.carried)
    expected = {
        "rate": {name for name, each in factors.items() if each.lr != 1.0},
        "epsilon": {name for name, each in factors.items() if each.eps != 1.0},
        "decay": {name for name, each in factors.items() if each.weight_decay != 1.0},
        "weights": set(off),  # another function: every gradient is another
        "first moments": set(found.weights),
        "second moments": set(found.weights),
    }[what]
    assert seen == expected


# --- the command ---


def test_what_to_type_next(
    ran: Callable[[str], Path], ranks: Ranks, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The line that `rebase` prints, as a shell reads it, goes on with the rebased run."""
    base, out = tmp_path / "base.yaml", tmp_path / "a rebased run"
    base.write_text(OTHER)
    assert cli.run(["rebase", str(checkpoint(ran("one rank"), AT)), str(out), "--base", str(base)]) == 0
    (words,) = next_commands(capfd.readouterr().out)
    assert words == ["train", str(out / "config.yaml")]
    ((status, said, err),) = ranks.run(1, bodies.command, arguments=words)
    assert status == 0, err
    assert f"resumed from {out / 'checkpoints'}" in said
    assert max(losses(out)) == STEPS


# --- what cannot be kept ---


def test_what_cannot_be_kept(ran: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One sentence that names what stands in the way, exit status 2, and no folder."""
    base = tmp_path / "base.yaml"
    base.write_text(OTHER)
    (tmp_path / "wide.yaml").write_text("hidden_size: 16\n")
    (tmp_path / "text.yaml").write_text("words")
    (tmp_path / "whole.yaml").write_text("run: {dir: runs}\nbase: {hidden_size: 16}\n")
    run = str(ran("one rank"))
    for words, sentence in (
        ([run, str(base), "hparams.attention_multiplier=1.0"], "its blocks would need rates of their own"),
        ([run, str(base), "hparams.lr=1.0"], "hparams.lr: a rebase changes no such key; expected one of"),
        ([run, str(tmp_path / "wide.yaml")], f"error: --base {tmp_path / 'wide.yaml'}: base.num_layers: missing"),
        ([run, str(tmp_path / "text.yaml")], "expected base sizes, such as hidden_size: 256, found 'words'"),
        (
            [run, str(tmp_path / "whole.yaml")],
            "whole.yaml: base: is no base size; expected sizes, such as hidden_size: 256",
        ),
        ([run, str(tmp_path / "gone.yaml")], "cannot read it: No such file"),
        ([str(ran("clipped")), str(base), "hparams.output_multiplier=1.0"], "clips by the plain norm of the gradient"),
    ):
        checkpoint_of, file, *keys = words
        assert cli.run(["rebase", checkpoint_of, str(tmp_path / "out"), "--base", file, *keys]) == 2
        said = capfd.readouterr().err.strip()
        assert sentence in said
        assert len(said.splitlines()) == 1, said
        assert not (tmp_path / "out").exists()
        assert not (tmp_path / "out.partial").exists()


def factors_of(tmp_path: Path, keys: Mapping[str, Any], **overrides: Any) -> Reexpressed:
    """What becomes of a model whose readout loses its multiplier, without a checkpoint."""
    before = parametrize(config_of("llama", **overrides), VOCABULARY)
    after = parametrize(derive(before.config, keys), VOCABULARY)
    return reexpress(before, after)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            {"model__norm_gains": "frozen"},
            r"model\.norm_gains: decoder\.final_layernorm\.weight would .* a frozen constant",
        ),
        (
            {"model__norm_gains": "none"},
            r"model\.norm_gains: decoder\.final_layernorm\.weight would .* and is no weight",
        ),
        ({"model__without_norms": ["final_layernorm"]}, r"model\.without_norms: names the final norm"),
        ({"model__layernorm_zero_centered_gamma": True}, "is kept as its distance from 1"),
    ],
    ids=["frozen", "none", "left out", "around 0"],
)
def test_a_tied_head(overrides: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    """The embedding is the head, so its factor goes into the final norm's gain, if that can take one."""
    keys = {"hparams.output_multiplier": 1.5}
    more = {"tied": True, "training__clip_grad": 0.0}
    assert factors_of(tmp_path, keys, **more).weights == {"decoder.final_layernorm.weight": 2.0}
    with pytest.raises(UserError, match=sentence):
        factors_of(tmp_path, keys, **more, **overrides)


OWN = {"hidden_size": 32, "ffn_hidden_size": 48, "kv_channels": 16, "num_layers": 1}
MTP = {"tied": False, "training__clip_grad": 0.0, "model__mtp_num_layers": 1}
MUON = {
    "tied": False,
    "training__clip_grad": 0.0,
    "optimizer__name": "muon",
    "parallel__engine": "megatron",
    "model__num_query_groups": 4,
}
INVARIANT = {"tied": False, "training__clip_grad": 1.0, "training__clip_norm": "invariant"}


@pytest.mark.parametrize(
    ("overrides", "keys", "sentence"),
    [
        (MTP, {"hparams.output_multiplier": 1.5}, r"hparams\.output_multiplier: multi-token prediction is not re-exp"),
        (
            MTP,
            {"base": {**OWN, "num_layers": 2}, "hparams.residual_multiplier": 2.5},
            r"parametrization\.depth: multi-token prediction knows no depth rule; expected the depth rule of the run",
        ),
        (MUON, {"hparams.residual_multiplier": 2.5}, r"linear_proj\.weight would take the factor 2, under which Muon"),
        (
            {**MUON, "optimizer__name": "soap"},
            {"hparams.residual_multiplier": 2.5},
            r"linear_proj\.weight would take the factor 2, under which SOAP",
        ),
        (INVARIANT, {"base": {**OWN, "hidden_size": 16}}, r"clip_norm: invariant measures .* by the base's sizes"),
        (INVARIANT, {"hparams.output_multiplier": 1.5}, r"clip_norm: invariant measures output_layer\.weight by the"),
    ],
    ids=["MTP", "MTP, depth", "Muon", "SOAP", "invariant, base", "invariant, multiplier"],
)
def test_what_a_run_may_not_change(
    overrides: dict[str, Any], keys: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    """One sentence each; with nothing moved there is nothing to carry."""
    same = factors_of(tmp_path, {}, **overrides)
    assert not same.weights
    assert not same.carried
    with pytest.raises(UserError, match=sentence):
        factors_of(tmp_path, keys, **overrides)


def test_muon_may_move_the_head(tmp_path: Path) -> None:
    """The head is Adam's; Muon's matrices are not touched."""
    assert factors_of(tmp_path, {"hparams.output_multiplier": 1.5}, **MUON).weights == {"output_layer.weight": 2.0}
