"""Slopes of log size over log width, what they should be, and which are out of bounds.

Public names: `BOUNDS`, `Slope`, `Theory`, `slope`, `judge`, `size_of`, `in_family`, `in_whole_model`. A slope is fitted
by least squares over the sizes of the family, seed by seed; its confidence is the half width of the 95 % interval of
their mean (Student's t).

In µP every activation, and its change since step 0, has slope 0 (Tensor Programs V, appendix D.1); the gradient with
respect to an activation that grows has slope -1, that with respect to logits 0; the update of a tensor goes as 1/(A
m_in) under Adam and SGD, and as its rate under Muon, where the gradient has full rank. Not so, and known here
(docs/parametrization.md, section 7):

- What comes out of output-like tensors falls with width at first, and with it what is made of it in the same branch:
  logits, router logits, k and v of fixed KV heads and their attention, an FFN of fixed size; attention logits where the
  head size grows. Their outputs are judged from above alone, their gradients not at all; their changes, and those of
  what such a branch feeds, may fall.
- Tensors whose gradient is zero in exact arithmetic (the key bias) move by rounding noise alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from mup_megatron import rules
from mup_megatron.parametrization import Parametrization
from mup_megatron.proof.family import Axis

BOUNDS = {"output": 0.25, "change": 0.25, "gradient": 0.4, "update": 0.25}
"""How far a slope may be from what it should be; docs/proof.md says from which noise they were set."""

_FALL = 0.5 + BOUNDS["change"]
_FED = 0.15 + BOUNDS["change"]
"""How far the change of what a falling branch feeds may be below 0: it has that branch's share less."""

_RANK = 0.5
"""How much further Muon's update may fall: a gradient of few tokens has less rank than a wide matrix."""

_DEEPEST = "decoder.layers.last"

_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""0.975 quantiles of Student's t for 1 to 9 degrees of freedom; 2.2 above."""

_SCORED = (".query", ".key", ".q_layernorm", ".k_layernorm", ".linear_q_up_proj", ".linear_q_down_proj")
"""Ends of names of what only attention's logits are made of."""

ZERO_GRADIENT = ("linear_qkv.bias",)
"""Ends of names of parameters that hold one whose gradient is zero in exact arithmetic: the key's bias."""


@dataclass(frozen=True, kw_only=True)
class Slope:
    """One slope and its verdict.

    Args:
        name: module or parameter.
        quantity: output, change, gradient or update.
        step: before which the coordinates were looked at; of an update the one that made it.
        slope: mean over seeds; NaN where some size is no positive number.
        confidence: half width of the 95 % interval; None with one seed.
        expected: what it should be.
        low: how far below that it may be; None: as far as it likes.
        high: how far above; None likewise.
    """

    name: str
    quantity: str
    step: int
    slope: float
    confidence: float | None
    expected: float
    low: float | None
    high: float | None

    @property
    def judged(self) -> bool:
        """Whether there is a bound."""
        return self.low is not None or self.high is not None

    @property
    def excess(self) -> float:
        """How far beyond its bound the slope is; 0 within, infinite where it is no number."""
        if not self.judged:
            return 0.0
        if not math.isfinite(self.slope):
            return math.inf
        off = self.slope - self.expected
        above = off - self.high if self.high is not None else 0.0
        below = -off - self.low if self.low is not None else 0.0
        return max(0.0, above, below)


def slope(sizes: Sequence[float], values: Sequence[Sequence[float]]) -> tuple[float, float | None]:
    """Slope of log(value) over log(size), and its confidence.

    Args:
        sizes: of the family, two or more.
        values: per seed, a value per size.

    Returns:
        Mean over seeds, NaN where a value is not positive and finite; 95 % half width, None with one seed.
    """
    slopes = [_slope(sizes, seed) for seed in values]
    mean = sum(slopes) / len(slopes)
    if len(slopes) < 2 or not math.isfinite(mean):
        return mean, None
    deviation = math.sqrt(sum((each - mean) ** 2 for each in slopes) / (len(slopes) - 1))
    freedom = len(slopes) - 1
    student = _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else 2.2
    return mean, student * deviation / math.sqrt(len(slopes))


def _slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    if any(not math.isfinite(value) or value <= 0 for value in values):
        return math.nan
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in values]
    middle = sum(x) / len(x)
    return sum((a - middle) * b for a, b in zip(x, y, strict=True)) / sum((a - middle) ** 2 for a in x)


class Theory:
    """What the slopes of a family should be.

    Args:
        parametrizations: of the family's models, smallest first, their rules whole.
        axis: what grows.
    """

    def __init__(self, parametrizations: Sequence[Parametrization], axis: Axis) -> None:
        self._rules, self._axis = parametrizations, axis
        self._largest = largest = parametrizations[-1]
        # Branches, and modules outside them, that an output-like tensor feeds.
        self._falling = {_branch(name) for name, shape in largest.shapes.items() if _is_output_like(largest, name)}
        model = largest.config.model
        self._head_grows = model.head_size != largest.base_head_size
        self._layers = model.num_layers
        self._decays = self._decay_dominates()

    def bounds(self, name: str, quantity: str, step: int) -> tuple[float, float | None, float | None]:
        """Expected slope and how far below and above it may be."""
        bound = BOUNDS[quantity]
        if self._axis == "depth" and name.startswith("decoder.layers.") and quantity != "update" and name != _DEEPEST:
            return 0.0, None, None  # half of all branches come before it in a model of two layers, most in a deep one
        if quantity == "update":
            judged = not self._decays and not name.endswith(ZERO_GRADIENT)
            tensor = self._largest.tensors.get(in_whole_model(name, self._layers))
            low = bound + (_RANK if tensor is not None and tensor.group.rule == "muon" else 0.0)
            return self._update(name), *((low, bound) if judged else (None, None))
        if quantity == "change":
            return 0.0, (_FALL if self._falls(name) else _FED if self._is_fed(name) else bound), bound
        if quantity == "output":
            return 0.0, (None if self._falls(name) else bound), bound
        ends = name.endswith("output_layer")
        if self._axis == "depth" or (self._falls(name) and not ends) or (self._head_grows and name.endswith(_SCORED)):
            return 0.0, None, None
        feeds = name.endswith(".input_layernorm") and any(
            branch.endswith(".self_attention") for branch in self._falling
        )
        if ends:
            return 0.0, bound, bound
        # Through initial weights as 1/sqrt(own size · next size), through what was learned as 1/(own size).
        further = (self._growth(name) - 1) / 2
        return -1.0 - further, (None if feeds else bound + max(0.0, further)), bound + max(0.0, -further)

    def _growth(self, name: str) -> float:
        """Slope of the size of a module's output; 1 where it is the trunk's, or grows with it."""
        sizes = [self._output_size(parametrization, name) for parametrization in self._rules]
        return _slope([size_of(rule, self._axis) for rule in self._rules], sizes)

    def _output_size(self, parametrization: Parametrization, name: str) -> int:
        model = parametrization.config.model
        name = in_whole_model(f"{name}.", model.num_layers)
        before, attention, after = name.partition(".self_attention.")
        normed = after.startswith(("q_layernorm", "k_layernorm")) and not model.multi_latent_attention
        if after.startswith("core_attention") or normed:  # of all heads
            shape = parametrization.shapes.get(f"{before}{attention}linear_proj.weight")
            return shape.fan_in.dim if shape is not None else model.hidden_size
        shape = parametrization.shapes.get(f"{name}weight")
        return shape.fan_out.dim if shape is not None else model.hidden_size

    def _falls(self, name: str) -> bool:
        """Whether the output may fall with width in the first steps."""
        return name.endswith("output_layer") or self._is_score(name) or _branch(name) in self._falling

    def _is_fed(self, name: str) -> bool:
        """Whether a branch that falls is added to what the module sees or gives."""
        falls = any(branch.endswith((".self_attention", ".mlp")) for branch in self._falling)
        return falls and name.startswith("decoder.")

    def _is_score(self, name: str) -> bool:
        """Whether it is made of two activations that learn to agree, or of an output-like tensor's alone."""
        if name.endswith(("router", "router.logits")):
            return True
        return self._head_grows and ".core_attention.logits" in name

    def _update(self, name: str) -> float:
        """Slope of 1/(A m_in), of depth's factor, over the family; of Muon's rate."""
        multipliers = []
        for parametrization in self._rules:
            tensor = parametrization.tensors.get(in_whole_model(name, parametrization.config.model.num_layers))
            if tensor is None:
                return 0.0
            if tensor.group.rule == "muon":
                # A coordinate of an orthogonal matrix goes as 1/sqrt(larger side), which is what Muon's scale makes up.
                multipliers.append(tensor.lr_multiplier)
                continue
            shape = tensor.shape
            forward = rules.readout_multiplier(shape.fan_in.ratio) if shape.spec.readout else rules.ONE
            rate = float(rules.learning_rate("adam", m_in=shape.fan_in.ratio, m_out=rules.ONE, forward=forward))
            config = parametrization.config
            if shape.layer is not None:
                ratio = Fraction(config.model.num_layers, config.num_layers_base)
                rate *= rules.depth_factors("adam", ratio, config.parametrization.depth_exponent).lr
            multipliers.append(rate)
        return _slope([size_of(rule, self._axis) for rule in self._rules], multipliers)

    def _decay_dominates(self) -> bool:
        """Whether decay moves weights as much as gradients do, so that updates follow init and not the rate."""
        config = self._largest.config
        per_step = [
            tensor.weight_decay * max(std for std in tensor.init_std.values())
            for tensor in self._largest.tensors.values()
            if tensor.init_std
        ]
        return config.optimizer.name == "adamw" and max(per_step, default=0.0) > 0.1


def size_of(parametrization: Parametrization, axis: Axis) -> float:
    """Size of a model along the axis: hidden size, or layers."""
    model = parametrization.config.model
    return model.num_layers if axis == "depth" else model.hidden_size


def in_family(name: str, layers: int) -> str | None:
    """A name that models of every depth have: of decoder layers the first keeps its number, the last is `last`.

    Returns:
        None for a layer in between.
    """
    parts = name.split(".")
    if parts[:2] != ["decoder", "layers"] or parts[2] == "0":
        return name
    return ".".join([*parts[:2], "last", *parts[3:]]) if int(parts[2]) == layers - 1 else None


def in_whole_model(name: str, layers: int) -> str:
    """The other way round."""
    return name.replace("decoder.layers.last.", f"decoder.layers.{layers - 1}.")


def judge(slopes: Sequence[Slope]) -> dict[str, dict[str, object]]:
    """A verdict per module and parameter: `ok`, `out of bounds` or `not judged`, with the worst slope.

    Args:
        slopes: of one line of a check.
    """
    by_name: dict[str, list[Slope]] = {}
    for each in slopes:
        by_name.setdefault(each.name, []).append(each)
    verdicts: dict[str, dict[str, object]] = {}
    for name, held in by_name.items():
        judged = [each for each in held if each.judged]
        if not judged:
            verdicts[name] = {"verdict": "not judged"}
            continue
        worst = max(judged, key=lambda each: (each.excess, abs(each.slope - each.expected)))
        verdicts[name] = {
            "verdict": "out of bounds" if worst.excess else "ok",
            "quantity": worst.quantity,
            "step": worst.step,
            "slope": worst.slope,
            "confidence": worst.confidence,
            "expected": worst.expected,
        }
    return verdicts


def _branch(name: str) -> str:
    """The residual branch that a module or parameter is in; itself outside of one, and a router."""
    if name.endswith((".router", ".router.logits", ".router.weight", ".router.bias")):
        return name
    for branch in (".self_attention", ".mlp"):
        before, found, _ = f"{name}.".partition(f"{branch}.")
        if found:
            return _any_layer(before) + branch
    return name


def _any_layer(name: str) -> str:
    """All layers are alike in this; `last` too."""
    parts = name.split(".")
    return ".".join(["decoder.layers", *parts[3:]]) if parts[:2] == ["decoder", "layers"] else name


def _is_output_like(parametrization: Parametrization, name: str) -> bool:
    shape = parametrization.shapes[name]
    if shape.spec.readout or not name.endswith("weight"):
        return False
    return any(parametrization.is_output_like(shape, block) for block in shape.fan_outs)
