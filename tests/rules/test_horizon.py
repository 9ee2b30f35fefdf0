"""Rules over batch and tokens: numbers by hand, a simulation as oracle, and every place that must take them."""

from __future__ import annotations

import json
import math
from fractions import Fraction as F
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mup_megatron import cli
from mup_megatron.checkpoints.manifest import check_resume, make_manifest
from mup_megatron.config import Config, derive
from mup_megatron.engines.megatron_config import optimizer_config
from mup_megatron.engines.optim import build_optimizer
from mup_megatron.engines.setup import resolve
from mup_megatron.model.build import parametrize
from mup_megatron.model.explain import explain
from mup_megatron.proof.stability import _as_trials
from mup_megatron.rules import formulas, horizon
from mup_megatron.rules.horizon_rules import PUBLISHED
from mup_megatron.tuning.record import TransferRecord, write_record
from mup_megatron.tuning.recording import make_record
from mup_megatron.tuning.space import proxy_config, stretched, values_of
from mup_megatron.util.errors import ConfigError, UserError
from tests.helpers.configs import MIXED, make, make_t5, pipeline_file
from tests.helpers.records import BUDGET, study_of

ratios = st.fractions(F(1, 64), F(64), max_denominator=64)
SDE = {"parametrization.batch": "sqrt_sde", "tuning.global_batch_size": 2, "tuning.micro_batch_size": 2}
"""The tests' configs take 8 sequences a step, their trials here 2: a ratio of 4."""


def config_of(**keys: Any) -> Config:
    """The config of sizes that grow by different ratios, with dotted keys replaced."""
    return derive(make(MIXED, "gpt3"), keys)


def test_by_hand() -> None:
    sde = formulas.horizon_factors(m_batch=F(4), m_tokens=F(4), batch="sqrt_sde")
    assert (sde.lr, sde.eps, sde.forgetting, sde.weight_decay) == (2.0, 0.5, 4.0, 1.0)
    longer = formulas.horizon_factors(m_batch=F(1), m_tokens=F(16), tokens=-0.5)
    assert (longer.lr, longer.eps, longer.forgetting, longer.weight_decay) == (0.25, 1.0, 1.0, 1.0)
    # 4 times the batch and 16 times the tokens are 4 times the steps: 2 · 1/4 · decay · 4 = 1.
    both = formulas.horizon_factors(m_batch=F(4), m_tokens=F(16), batch=0.5, tokens=-0.5, keeps_timescale=True)
    assert (both.lr, both.weight_decay, both.forgetting) == (0.5, 0.5, 1.0)


@pytest.mark.parametrize(
    ("batch", "tokens", "factors"), [(4, 16, (1 / 2, 2.0, 1 / 2, 1 / 4)), (16, 4, (2.0, 1 / 2, 2.0, 4.0))]
)
def test_complete_d_by_hand(batch: int, tokens: int, factors: tuple[float, ...]) -> None:
    """Of m_B / m_D: rate and decay by its root, epsilon by the root of its inverse, 1 - beta by itself.

    In 2512.22382's table as two transcriptions have it: xiaol827/ELO, src/parameterization.py, and "rig".
    """
    found = formulas.horizon_factors(m_batch=F(batch), m_tokens=F(tokens), batch="complete_d")
    assert (found.lr, found.eps, found.weight_decay, found.forgetting) == pytest.approx(factors, rel=1e-15)
    at_equal_tokens = {"m_batch": F(batch), "m_tokens": F(1)}
    sde, both = (formulas.horizon_factors(**at_equal_tokens, batch=rule) for rule in ("sqrt_sde", "complete_d"))  # type: ignore[arg-type]
    assert (sde.lr, sde.eps, sde.forgetting) == (both.lr, both.eps, both.forgetting)


def test_the_step_from_a_proxy_to_deepseek_v3() -> None:
    """120 times the batch and 3,700 times the tokens: 120^(1/2) · 3700^(-0.32) = 10.954 · 0.07212."""
    found = formulas.horizon_factors(m_batch=F(120), m_tokens=F(3700), batch=0.5, tokens=-0.32)
    assert found.lr == pytest.approx(0.790, abs=0.001)


def test_decay_over_width_by_hand() -> None:
    assert formulas.weight_decay("sqrt", F(1, 16)) == 4.0
    assert formulas.weight_decay("timescale", F(1, 16)) == 16
    assert formulas.weight_decay("sqrt", F(1)) == 1


@given(ratios, ratios, ratios, ratios)
def test_one_step_is_two(batch: F, tokens: F, more: F, longer: F) -> None:
    """From the trials to the target in one step as in two."""
    rule: Any = {"batch": "sqrt_sde", "tokens": -0.32, "keeps_timescale": True}
    one = formulas.horizon_factors(m_batch=batch * more, m_tokens=tokens * longer, **rule)
    first = formulas.horizon_factors(m_batch=batch, m_tokens=tokens, **rule)
    second = formulas.horizon_factors(m_batch=more, m_tokens=longer, **rule)
    for name in ("lr", "eps", "weight_decay", "forgetting"):
        assert getattr(one, name) == pytest.approx(getattr(first, name) * getattr(second, name), rel=1e-12)


@given(st.floats(-2, 2), st.floats(-2, 2))
def test_at_ratio_one_every_rule_is_exactly_nothing(batch: float, tokens: float) -> None:
    rule: Any = {"m_batch": F(1), "m_tokens": F(1), "keeps_timescale": True}
    assert formulas.horizon_factors(batch="sqrt_sde", **rule) == formulas.HorizonFactors()
    assert formulas.horizon_factors(batch=batch, tokens=tokens, **rule) == formulas.HorizonFactors()


# --- the oracle: Adam on noise alone, where the square root rule is exact in the limit of small rates ---

_SAMPLES, _LR, _EPS, _DECAY, _BETAS = 2048, 1e-3, 0.5, 1.0, (0.98, 0.99)


def _walk(m: int, factors: formulas.HorizonFactors, *, longer: int = 1, eps: float = _EPS) -> tuple[float, float]:
    """Spread of weights that saw noise alone, and what decay left of the mean, after so many times the samples.

    A gradient is the mean of m samples of variance 1, for so many weights that the spread is known to a percent.
    """
    generator = torch.Generator().manual_seed(m)
    weights = torch.ones(4096, dtype=torch.float64, requires_grad=True)
    one, other = (1 - factors.forgetting * (1 - beta) for beta in _BETAS)
    optimizer = torch.optim.AdamW(
        [weights],
        lr=_LR * factors.lr,
        betas=(one, other),
        eps=eps * factors.eps,
        weight_decay=_DECAY * factors.weight_decay,
    )
    for _ in range(longer * _SAMPLES // m):
        weights.grad = torch.randn(weights.shape, generator=generator, dtype=torch.float64) / math.sqrt(m)
        optimizer.step()
    found = weights.detach()
    return float(found.std()), float(found.mean())


def test_the_square_root_rule_is_adam_on_noise() -> None:
    """After as many samples weights are spread as far and have decayed as much, under `timescale` at equal tokens.

    Controls: each of the three factors left out, and the linear rule of SGD, is seen.
    """
    # 8 sequences a step for 20 steps, of trials that take 2 for 80.
    equal_tokens = config_of(**SDE, **{"tuning.train_steps": 80, "parametrization.weight_decay": "timescale"})
    assert (equal_tokens.batch_ratio, equal_tokens.tokens_ratio) == (4, 1)
    rule = horizon.horizon(equal_tokens)
    spread, left = _walk(1, formulas.HorizonFactors())
    assert left == pytest.approx(math.exp(-_LR * _DECAY * _SAMPLES), rel=0.01)
    found, remains = _walk(4, rule)
    assert found == pytest.approx(spread, rel=0.03)
    assert remains == pytest.approx(left, rel=0.01)

    def without(**changed: float) -> tuple[float, float]:
        return _walk(4, formulas.HorizonFactors(**{**vars(rule), **changed}))

    # By another rule of decay: a quarter of the steps, of twice the rate times decay. a = rate · decay · steps is half
    # of what it was, and steps of noise that decay have the variance (1 - exp(-2a)) / 2a of what they have without.
    other = horizon.horizon(derive(equal_tokens, {"parametrization.weight_decay": "independent"}))
    moved, kept = _walk(4, other)
    one, half = (_LR * _DECAY * _SAMPLES / part for part in (1, 2))
    assert kept == pytest.approx(math.exp(-half), rel=0.01)
    farther = math.sqrt((1 - math.exp(-2 * half)) / half / ((1 - math.exp(-2 * one)) / one))
    assert moved == pytest.approx(farther * spread, rel=0.03)

    assert without(lr=1.0)[0] < 0.7 * spread
    assert without(lr=4.0, weight_decay=0.25)[0] > 1.5 * spread
    assert without(eps=1.0)[0] < 0.85 * spread
    assert abs(without(weight_decay=1.0)[1] - left) > 0.1 * left


@pytest.mark.slow
def test_complete_d_is_adam_on_noise_over_any_number_of_samples() -> None:
    """Of an epsilon that is small: a run of four times the samples spreads and decays as far, with a batch of two too.

    Controls: the rule over batch alone, and each of rate and decay left out.
    """
    spread, left = _walk(1, formulas.HorizonFactors(), eps=1e-8)
    for batch in (1, 2):
        rule = formulas.horizon_factors(m_batch=F(batch), m_tokens=F(4), batch="complete_d")
        found, remains = _walk(batch, rule, longer=4, eps=1e-8)
        assert found == pytest.approx(spread, rel=0.03)
        assert remains == pytest.approx(left, rel=0.01)
    for changed in ({"lr": 1.0}, {"weight_decay": 1.0}):
        found, remains = _walk(2, formulas.HorizonFactors(**{**vars(rule), **changed}), longer=4, eps=1e-8)
        assert abs(remains - left) > 0.1 * left
    alone = formulas.horizon_factors(m_batch=F(2), m_tokens=F(4), batch="sqrt_sde")
    assert _walk(2, alone, longer=4, eps=1e-8)[0] > 1.1 * spread


# --- where the numbers go ---


def test_the_table_takes_them() -> None:
    """A matrix of twice its base's width: 1/2 by width, 2 by the batch."""
    config = config_of(**SDE)
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    plain = parametrize(config_of(), 256).tensors[name]
    tensor = parametrize(config, 256).tensors[name]
    assert tensor.lr_multiplier == pytest.approx(2 * plain.lr_multiplier, rel=1e-15)
    assert tensor.eps_multiplier == pytest.approx((plain.eps_multiplier or 0) / 2, rel=1e-15)
    assert tensor.weight_decay_multiplier == plain.weight_decay_multiplier
    assert tensor.init_std == plain.init_std
    timescale = parametrize(derive(config, {"parametrization.weight_decay": "timescale"}), 256).tensors[name]
    # 4 times the tokens in as many steps: lr · decay · steps stays if decay is halved.
    assert timescale.weight_decay_multiplier == pytest.approx(plain.weight_decay_multiplier / 2, rel=1e-15)


def test_both_engines_take_the_betas() -> None:
    config = config_of(**SDE, **{"optimizer.betas": [0.9, 0.95], "optimizer.implementation": "torch"})
    optimizer = build_optimizer(config, [{"params": [torch.nn.Parameter(torch.zeros(2))]}])
    assert optimizer.defaults["betas"] == pytest.approx((0.6, 0.8))
    assert horizon.betas(config) == pytest.approx((0.6, 0.8))
    setup = resolve(derive(config, {"parallel.engine": "megatron"}), 1)
    made = optimizer_config(setup.config, setup.layout)
    assert (made.adam_beta1, made.adam_beta2) == pytest.approx((0.6, 0.8))


def test_the_same_batch_and_length_change_nothing() -> None:
    """Every row of the table, and the betas, to the last bit."""
    rule = {"parametrization.batch": "sqrt_sde", "parametrization.tokens": "power:-0.32"}
    config = config_of(**rule, **{"parametrization.weight_decay": "timescale"})
    assert parametrize(config, 256).tensors == parametrize(config_of(), 256).tensors
    assert horizon.betas(config) == tuple(config.optimizer.betas)


def test_a_trial_has_the_values_as_they_are(tmp_path: Path) -> None:
    config = config_of(**{"tuning.train_steps": 3, "tuning.seq_length": 8, "parametrization.tokens": "power:-1"})
    assert (config.batch_ratio, config.tokens_ratio) == (4, F(4 * 20, 3))  # 32 tokens a sequence, 20 steps
    trial = proxy_config(config, values_of(config), seed=1, directory=tmp_path)
    assert (trial.training.seq_length, trial.batch_ratio, trial.tokens_ratio) == (8, 1, 1)
    assert trial.max_position_embeddings == config.max_position_embeddings


def test_tokens_of_pairs_are_those_of_both_sides(tmp_path: Path) -> None:
    """Sources of 64, targets of 32 tokens, trials of 32: 96 over 64. Targets as long as sources: 128 over 64."""
    keys = {"training__seq_length": 64, "tuning__seq_length": 32}
    for length, ratio in ((32, F(3, 2)), (None, F(2))):
        config = make_t5(training__decoder_seq_length=length, **keys)
        trial = proxy_config(config, values_of(config), seed=1, directory=tmp_path)
        assert config.batch_ratio == F(config.sample_tokens, trial.sample_tokens) == ratio


def test_a_longer_run_is_longer_than_its_own_trials() -> None:
    """stability --across tokens: the ratio is the factor, since the trials' length is pinned before it grows."""
    config = config_of(**{"parametrization.tokens": "power:-0.5"})
    longer = stretched(_as_trials(config), 4 * config.training.train_steps)
    assert (longer.tokens_ratio, horizon.horizon(longer).lr) == (4, 0.5)
    assert stretched(config, 4 * config.training.train_steps).tokens_ratio == 1


def test_explain_tells_them() -> None:
    setup = resolve(config_of(**SDE), 1)
    told = explain(setup.parametrization(256), setup.layout)["horizon"]
    assert told == {"lr": 2.0, "eps": 0.5, "weight_decay": 1.0, "forgetting": 4.0, "betas": pytest.approx([0.6, 0.8])}
    assert "a step has 4 times a trial's tokens" in (horizon.said(setup.config) or "")


# --- what would be silently wrong ---


def test_another_trial_is_refused_on_resume(tmp_path: Path) -> None:
    """`tuning:` may change in a run that goes on, unless a rule counts from it."""
    config = config_of(**SDE)
    setups = [_manifest(each) for each in (config, derive(config, {"tuning.global_batch_size": 4}))]
    with pytest.raises(UserError) as refused:
        check_resume(setups[0], setups[1], tmp_path)
    assert any("horizon.lr" in line for line in str(refused.value).splitlines())
    free = config_of()
    assert check_resume(_manifest(free), _manifest(derive(free, {"tuning.global_batch_size": 4})), tmp_path) == []


def _manifest(config: Config) -> Any:
    setup = resolve(config, 1)
    return make_manifest(setup.parametrization(256), setup.layout, "data", step=1)


def test_a_record_of_other_trials_is_refused(tmp_path: Path) -> None:
    def record_of(config: Config) -> TransferRecord:
        setup = resolve(config, 1)
        return make_record(setup.parametrization(256), setup.layout, values_of(config), study=study_of(), budget=BUDGET)

    config = config_of(**SDE, **{"parametrization.tokens": "power:-0.32"})
    path = tmp_path / "transfer.json"
    write_record(path, record_of(config))
    assert TransferRecord.read(path, config) is not None
    with pytest.raises(UserError, match=r"found at global_batch_size 2.*expected tuning.global_batch_size: 2"):
        TransferRecord.read(path, derive(config, {"tuning.global_batch_size": 4}))


SQRT = {"parametrization.weight_decay": "sqrt"}
COMPLETE = {"parametrization.batch": "complete_d"}
COMMAND = {"tuning.command": ["pretrain_gpt.py"]}


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"parametrization.batch": "power:x"}, "parametrization.batch"),
        ({"parametrization.tokens": "fitted:10"}, "parametrization.tokens"),  # a rate times 10^30 overflows
        ({**SDE, "optimizer.name": "sgd"}, "sqrt_sde is derived for Adam, not for sgd"),
        ({**SQRT, "optimizer.name": "sgd"}, "weight_decay: sqrt is known of AdamW alone .*not of sgd; expected indep"),
        ({**SQRT, "optimizer.name": "muon", "parallel.engine": "megatron"}, "sqrt is known of AdamW alone .* of muon;"),
        (
            {**SQRT, "parametrization.depth": "depth_mup", "base.num_layers": 1},
            "sqrt is known over width alone .*depth_mup also moves the ra",
        ),
        ({**SDE, "optimizer.betas": [0.7, 0.95]}, "leaves none of beta 0.7"),
        ({**SDE, "training.global_batch_size": 20}, "leaves none of beta 0.9"),  # 10 (1 - 0.9) is 1, of floats less
        # What a search may find is told before it is paid for.
        (
            {**SDE, "tuning.search": {"one_minus_beta2": {"log_uniform": [0.01, 0.3]}}},
            "parametrization.batch: sqrt_sde .* leaves none of beta 0.7",
        ),
        ({**SDE, **COMPLETE, "optimizer.name": "sgd"}, "complete_d is derived for Adam, not for sgd"),
        ({**SDE, **COMPLETE, "parametrization.tokens": "power:-0.3"}, "beside batch: complete_d, which is over tokens"),
        # 4 times the batch in a quarter of the steps: as many tokens.
        (
            {**SDE, **COMPLETE, "tuning.train_steps": 80, "optimizer.betas": [0.7, 0.95]},
            "that of the tokens, 4, which leaves none of beta 0.7",
        ),
        ({"tuning.seq_length": 4096}, "tuning.seq_length"),
        # 2^53 steps for a trial's one are 53 octaves, times 9.
        (
            {"parametrization.tokens": "power:9", "tuning.train_steps": 1, "training.train_steps": 2**53},
            r"2\^477, since",
        ),
        (
            {"parametrization.batch": "power:0.5", **COMMAND},
            "parametrization.batch: power:0.5 is of this project's own",
        ),
        ({"parametrization.weight_decay": "timescale", **COMMAND}, "weight_decay: timescale .*expected independent"),
    ],
)
def test_bad_input(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        config_of(**keys)


# --- side by side ---


def test_rules_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """4 times the batch and 16 times the tokens, by hand; the config's own rules come first."""
    keys: dict[str, Any] = {"tuning__global_batch_size": 2, "tuning__micro_batch_size": 2, "tuning__train_steps": 5}
    path = pipeline_file(tmp_path, training__train_steps=20, training__global_batch_size=8, **keys)
    assert cli.run(["horizon", str(path), "--json", "parametrization.batch=power:0.5"]) == 0
    found = {row["rule"]: row["factors"] for row in json.loads(capsys.readouterr().out)}
    assert next(iter(found)) == "the config's own"
    assert {rule: row["lr"] for rule, row in found.items()} == pytest.approx(
        {
            "the config's own": 2.0,
            "none": 1.0,
            "batch: sqrt_sde": 2.0,
            "tokens: power:-0.32": 0.4118,
            "batch: sqrt_sde, tokens: power:-0.32": 0.8236,
            "batch: complete_d": 0.5,
            "batch: power:0.5, tokens: power:-0.32": 0.8236,
            "batch: power:0.5, tokens: power:-0.3": 0.8706,
            "batch: power:0.5, tokens: power:-0.2813": 0.9169,
            "batch: power:0.5, tokens: power:-0.395": 0.6690,
            "tokens: power:-0.3509": 0.3780,
            "tokens: power:0.307": 2.342,
            "weight_decay: timescale": 1.0,
        },
        rel=1e-3,
    )
    assert found["weight_decay: timescale"]["weight_decay"] == 0.25
    assert found["batch: complete_d"] == {"lr": 0.5, "eps": 2.0, "weight_decay": 0.5, "forgetting": 0.25}
    assert cli.run(["horizon", str(path), "optimizer.betas=[0.7, 0.95]"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("a step has 4 times a trial's tokens, the run 16 times, in 4 times the steps\n")
    assert "leaves none of beta 0.7" in said  # of the square root rule
    assert "at the batch that it tells, 4.87 times a trial's (here 4)" in said
    assert "rates are 2.6 octaves apart, from 0.378 to 2.342" in said


def test_a_rule_is_what_the_config_takes() -> None:
    """Every published rule, copied into `parametrization:`, gives the factors that stand beside it."""
    for each in PUBLISHED:
        chosen = dict(part.split(": ") for part in each.rule.split(", ")) if each.rule != "none" else {}
        keys = {f"parametrization.{axis}": chosen.get(axis, "none") for axis in ("batch", "tokens")}
        config = config_of(**{**SDE, **keys, "tuning.train_steps": 5, "training.train_steps": 20})
        said = each.factors(m_batch=config.batch_ratio, m_tokens=config.tokens_ratio)
        assert horizon.horizon(config) == said
        assert said.lr == pytest.approx(4.0**each.batch * 16.0**each.tokens)
