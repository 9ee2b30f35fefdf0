"""An estimate, before anything is trained, of what tuning and pretraining cost: tokens, FLOPs, share, time.

Public names: `plan`, `Plan`, `priced`, `flops_per_token`, `attention_flops`, `readout_flops`, `six_nd`, `device_hours`,
`guidance`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mup_megatron.config import Config, derive
from mup_megatron.parallel.layout import Layout
from mup_megatron.rules.shapes import Init
from mup_megatron.rules.table import WORD_EMBEDDINGS, Parametrization
from mup_megatron.tuning.memory import activation_bytes, state_bytes
from mup_megatron.tuning.shares import shares
from mup_megatron.tuning.space import (
    STEPS,
    WIDTH,
    proxy_config,
    rungs,
    trials_by_bracket,
    tuning_steps,
    values_of,
    without_fitted,
)
from mup_megatron.tuning.speed import process_speed
from mup_megatron.util.errors import ConfigError
from mup_megatron.util.progress import short_bytes, short_count

# Share of a device's speed in bare matrix products that training is taken to reach. Some models reach more, and small
# ones, whose steps are mostly overhead, far less: no bound in either direction.
_EFFICIENCY = 0.5
_STEADY = 1.25
"""By how much the slowest products may lag behind the fastest before a time is a range."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a part of the run costs.

    Args:
        parameters: of the model.
        tokens: seen in training.
        flops: floating point operations.
        hours: on the processes at hand; None where their speed is unknown.
        least, most: the same by the fastest and the slowest products that were timed, a tenth of them left out.
    """

    parameters: int
    tokens: int
    flops: float
    hours: float | None = None
    least: float | None = None
    most: float | None = None

    @property
    def six_nd(self) -> float:
        """The same by the rule of thumb."""
        return six_nd(self.parameters, self.tokens)


def six_nd(parameters: float, tokens: float) -> float:
    """6 operations per parameter and token (arXiv 2001.08361, section 2.1): no attention, all parameters."""
    return 6.0 * parameters * tokens


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The whole budget.

    Args:
        trials: planned.
        repetitions: of the best trials, with other seeds.
        steps: of a whole trial.
        rungs: steps at which trials are halved.
        workers: processes that tune.
        tuning: what tuning costs if halving stops the expected share of the trials.
        most: the same if no trial is stopped.
        target: what pretraining costs.
        state: bytes of the target's weights, gradients and optimizer state on the fullest process; None without a
            layout.
        activations: bytes that its backward pass needs, about; None without a layout.
        descent: most trials of coordinate descent, which `tuning` and `most` count whole.
    """

    trials: int
    repetitions: int
    steps: int
    rungs: list[int]
    workers: int
    tuning: Cost
    most: Cost
    target: Cost
    state: int | None = None
    activations: int | None = None
    descent: int = 0

    @property
    def share(self) -> float:
        """Compute of tuning over compute of pretraining."""
        return self.tuning.flops / self.target.flops

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        rule = {name: getattr(self, name).six_nd for name in ("tuning", "target")}
        plain = asdict(self)
        if not self.descent:
            del plain["descent"]
        return {
            **plain,
            "share": self.share,
            "most_share": self.most.flops / self.target.flops,
            "six_nd": {**rule, "share": rule["tuning"] / rule["target"]},
        }


def flops_per_token(parametrization: Parametrization) -> float:
    """Floating point operations of training on one token, forward and backward.

    As megatron-core counts them (megatron.training.training.num_floating_point_operations): 6 per weight of a matrix
    product, the readout included whether tied or not, and 6·L·a·d·s for attention, half of 12·L·a·d·s since half of
    its scores are masked; where values have another head size than queries and keys, d is the mean of the two. Of the
    experts, those count that see a token; multi-token prediction counts its layers, and the readout again for each.
    Recomputation is not counted. Of an encoder-decoder, which megatron-core does not count, see `_flops_of_a_pair`.
    """
    model, config = parametrization.config.model, parametrization.config
    if model.family == "t5":
        return _flops_of_a_pair(parametrization) / config.sample_tokens
    predicted = model.mtp_num_layers or 0
    products = 6.0 * sum(share.products for share in shares(parametrization))
    readouts = (1 + predicted) * readout_flops(parametrization)
    return products + (model.num_layers + predicted) * attention_flops(config) + readouts


def attention_flops(config: Config) -> float:
    """Of one layer's scores and context, on one token; as `flops_per_token`."""
    model = config.model
    value_size = (model.v_head_dim or 0) if model.multi_latent_attention else model.head_size
    flops = 3.0 * model.num_attention_heads * (model.head_size + value_size) * config.training.seq_length
    return 2 * flops if model.family == "bert" else flops  # which masks no score


def readout_flops(parametrization: Parametrization) -> float:
    """Of the logits of one token, tied or not; as `flops_per_token`."""
    return 6.0 * math.prod(parametrization.shapes[WORD_EMBEDDINGS].spec.shape)


def _flops_of_a_pair(parametrization: Parametrization) -> float:
    """Training on one source and its target, as `flops_per_token`.

    Weights of the encoder, and the decoder's that make keys and values of its output, see the source's s tokens, others
    the target's t. Attention's scores are s · s in the encoder, t · s over it, and half of t · t in the decoder.
    """
    config, model = parametrization.config, parametrization.config.model
    source, target = config.training.seq_length, config.training.decoder_length
    products = 0
    for name, shape in parametrization.shapes.items():
        if len(shape.spec.shape) == 2 and shape.spec.init is not Init.EMBEDDING:
            of_source = name.startswith("encoder.") or ".cross_attention.linear_kv." in name
            products += math.prod(shape.spec.shape) * (source if of_source else target)
    if model.share_embeddings_and_output_weights:
        products += math.prod(parametrization.shapes[WORD_EMBEDDINGS].spec.shape) * target
    layers = model.stacks
    scores = layers["encoder"] * source**2 + layers["decoder"] * (target**2 / 2 + target * source)
    return 6.0 * products + 12 * model.num_attention_heads * model.head_size * scores


def plan(config: Config, vocab_size: int, workers: int, *, measure: bool = False, layout: Layout | None = None) -> Plan:
    """The budget of a config.

    Args:
        config: the run.
        vocab_size: entries of the tokenizer, before padding.
        workers: processes that tune, and that then train the target.
        measure: whether to time a matrix product of each model's size on this machine, for hours.
        layout: the target's, for its memory per process.

    A model whose layers are a script's own costs what megatron-core's own of the same sizes would.
    """
    tuning, steps = config.tuning, tuning_steps(config)
    proxy = proxy_config(config, values_of(config), seed=config.run.seed, directory=Path(config.run.dir))
    stops = rungs(config)
    searched = sum(
        count * _expected(stops[bracket:], steps, tuning.reduction_factor)
        for bracket, count in trials_by_bracket(config).items()
    )
    repetitions = tuning.repeat_best * tuning.repeat_seeds
    whole = repetitions + tuning.descent.trials  # of which halving stops none
    proxy_parametrization, target_parametrization = (priced(one, vocab_size) for one in (proxy, config))
    return Plan(
        trials=tuning.trials,
        repetitions=repetitions,
        steps=steps,
        rungs=stops,
        workers=workers,
        tuning=_cost(proxy_parametrization, searched + whole * steps, workers, measure),
        most=_cost(proxy_parametrization, (tuning.trials + whole) * steps, workers, False),
        target=_cost(target_parametrization, config.training.train_steps, workers, measure),
        state=None if layout is None else state_bytes(target_parametrization, layout),
        activations=None if layout is None else activation_bytes(target_parametrization, layout),
        descent=tuning.descent.trials,
    )


def _expected(stops: Sequence[int], steps: int, factor: int) -> float:
    """Steps of a trial on average: of those that reach a rung, a share 1/factor goes on."""
    expected, going = 0.0, 1.0
    for before, step in zip([0, *stops], [*stops, steps], strict=True):
        expected += going * (step - before)
        going /= factor
    return expected


def priced(config: Config, vocab_size: int) -> Parametrization:
    """The model whose cost is counted, as `plan`."""
    from mup_megatron.model.build import parametrize

    return parametrize(derive(config, {"model.as_built": None, **without_fitted(config)}), vocab_size)


def check_share(config: Config, budget: Plan) -> None:
    """Raises ConfigError if tuning is planned to take a larger share of compute than the config allows."""
    allowed = config.tuning.max_compute_share
    if config.tuning.run == "auto" and budget.share > allowed:
        raise ConfigError(
            "tuning.max_compute_share",
            f"tuning would take {budget.share:.2g} of the target's compute, and {allowed:g} is allowed; expected fewer "
            "tuning.trials or tuning.train_steps, a larger tuning.max_compute_share, or tuning.run: never to train "
            "with the values of hparams:",
            config.source,
        )


def _cost(parametrization: Parametrization, steps: float, workers: int, measure: bool) -> Cost:
    config, training = parametrization.config, parametrization.config.training
    tokens = round(steps * training.global_batch_size * config.sample_tokens)
    flops = tokens * flops_per_token(parametrization)
    cost = Cost(parameters=parametrization.size, tokens=tokens, flops=flops)
    if not measure:
        return cost
    speed = process_speed(config, workers)
    least, hours, most = (flops / (each * _EFFICIENCY * workers) / 3600 for each in reversed(speed))
    return replace(cost, hours=hours, least=least, most=most)


def device_hours(budget: Plan, tflops: float, utilization: float) -> dict[str, float]:
    """Device-hours of tuning and of pretraining, at a share of a device's peak.

    Args:
        budget: the plan.
        tflops: peak of one device, TFLOP/s, in the precision that is trained in.
        utilization: share of the peak that training reaches (MFU).
    """
    speed = tflops * 1e12 * utilization * 3600
    return {name: getattr(budget, name).flops / speed for name in ("tuning", "target")}


def lines(config: Config, budget: Plan) -> list[str]:
    """The plan for people."""
    halved = f", halved at {' and '.join(map(str, budget.rungs))}" if budget.rungs else ""
    again = f"; then {budget.repetitions} repetitions of the best with other seeds" if budget.repetitions else ""
    then = f"; then at most {budget.descent} of coordinate descent" if budget.descent else ""
    rows = [
        f"plan: {budget.trials} trials of {budget.steps} steps on the proxy{halved}{again}{then}",
        f"{'':8}{'parameters':>12}{'tokens':>12}{'FLOPs':>12}{'share':>10}{'6ND':>12}{'share':>10}{'time, about':>20}",
    ]
    for name, cost in (("tuning", budget.tuning), ("target", budget.target)):
        share = f"{cost.flops / budget.target.flops:.3g}"
        rule = f"{cost.six_nd:>12.2e}{cost.six_nd / budget.target.six_nd:>10.3g}"
        rows.append(
            f"{name:8}{short_count(cost.parameters):>12}{short_count(cost.tokens):>12}{cost.flops:>12.2e}{share:>10}"
            f"{rule}  {_time(cost):>18}"
        )
    if budget.target.hours is not None:
        rows.append(
            f"time: a guess from matrix products timed on this machine as it is now, {_EFFICIENCY:.0%} of whose speed "
            "training is taken to reach; small models, evaluations and start-up take longer"
        )
    most = budget.most.flops / budget.target.flops
    rows.append(
        f"{budget.workers} process{'es' if budget.workers > 1 else ''}; at most {most:.3g} of the target's compute "
        f"if no trial is stopped early; allowed {config.tuning.max_compute_share:g}"
    )
    if budget.state is not None and budget.activations is not None:
        rows.append(
            f"target, per process: {short_bytes(budget.state)} of weights, gradients and optimizer state at most, "
            f"about {short_bytes(budget.activations)} of activations"
        )
    if below := guidance(config):
        rows.append(f"warning: trials below what Tensor Programs V advises (appendix D): {', '.join(below)}")
    return rows


def guidance(config: Config) -> list[str]:
    """Where trials are smaller than Tensor Programs V, appendix D, advises, such as "width 64 < 256"."""
    training, proxy = config.training, config.proxy_model
    sizes = {
        "width": (proxy.hidden_size, WIDTH),
        "depth": (proxy.num_layers, 4),
        "head size": (proxy.head_size, 32),
        "batch": (config.tuning.global_batch_size or training.global_batch_size, 32),
        "sequence": (training.seq_length, 128),
        "steps": (tuning_steps(config), STEPS),
    }
    return [f"{name} {size} < {least}" for name, (size, least) in sizes.items() if size < least]


def _time(cost: Cost) -> str:
    """A range where the machine's speed varies by more than a quarter."""
    if cost.hours is None or cost.least is None or cost.most is None:
        return "unknown"
    if cost.most <= _STEADY * cost.least:
        return _duration(cost.hours)
    return f"{_duration(cost.least)} to {_duration(cost.most)}"


def _duration(hours: float) -> str:
    if hours >= 48:
        return f"{hours / 24:.3g} days"
    if hours >= 1:
        return f"{hours:.3g} h"
    return f"{hours * 60:.2g} min" if hours * 60 >= 1 else f"{hours * 3600:.2g} s"
