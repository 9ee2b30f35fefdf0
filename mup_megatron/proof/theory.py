"""What the slopes of a family should be, written out by hand: nothing here calls the rules that are under test.

That A = 1/n_in for the readout is therefore said here a second time, on purpose: a verdict that read the table
(rules/table.py) would agree with whatever the table says. roles.py says what modules are, by their names.

Public names: `Theory`, `Expected`. Expected is what Tensor Programs V says of a tensor whose dimensions are those of
the models at hand, n_in by n_out (arXiv 2203.03466, Table 8 and appendix D.1):

| quantity of a parameter | hidden | output-like, no multiplier | readout (A = 1/n_in) | embedding, gain, bias |
| --- | --- | --- | --- | --- |
| initial values | n_in^-1/2 | 1/n_in | 1 | 1 |
| update: Adam, SGD | 1/n_in | 1/n_in | 1 | 1 |
| update: Muon, full rank to rank 1 | (n_out/(n_in max(n_in, n_out)))^1/2 to 1/n_in | as hidden | Adam's | Adam's |

Activations and their changes keep their size; the gradient with respect to the residual stream goes as 1/hidden size,
that with respect to logits as 1. Each dimension has a slope of its own over the family, which is 1 only for the
dimension that slopes are taken over. There are two exceptions (docs/proof.md):

- The output of an output-like tensor falls as n_in^-1/2 in the first steps. So does everything in the same branch that
  is computed from it: logits, router logits, k and v of fixed KV heads and their attention, an FFN of fixed size, and
  attention logits where the head size grows. Before the first step the output of such a tensor must have that slope.
  Later, and in the rest of the branch, an output has an upper bound only, a gradient is not judged, and a change may
  fall. The change of a module whose input includes such a branch may fall too. The change of a router's probabilities,
  and of what the experts give, may rise as width^1/2 (`_RISE`).
- Some quantities are zero by construction: `Theory.vanishes`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from mup_megatron.config import Config
from mup_megatron.proof import roles
from mup_megatron.proof import sizes as said
from mup_megatron.proof.family import Axis
from mup_megatron.proof.names import branch, in_experts, in_whole_model, named, part_name
from mup_megatron.proof.routed import routed
from mup_megatron.proof.sizes import Size
from mup_megatron.proof.verdict import BOUNDS, slope_of
from mup_megatron.rules.shapes import STACKS, Init, TensorShape, stack_of
from mup_megatron.rules.table import Parametrization

_FALL = 0.5 + BOUNDS["change"]
"""How far below 0 the slope of a change may be where a branch shrinks with width: in that branch, and in modules whose
residual input includes it. Such an input is the sum of a part that falls as width^-1/2 and a part that does not, so its
slope lies between the two."""

_RISE = 0.5 + BOUNDS["change"]
"""How far above 0 the slope of a change may be where a router has chosen experts. A token gets another expert when the
logits change by more than they differ. At first they differ by what falls as width^-1/2, and their change keeps its
size, so the number of such tokens rises as width^1/2 until most tokens have changed."""

_DECAYS = 10.0
"""Where weight decay changes a weight by at least this many times what its gradient does, the update has the slope of
the initial values."""

_KEEPS_OF_RATE = {"independent": 0.0, "timescale": 0.0, "sqrt": 0.5, "coupled": 1.0}
"""Share of the rate's slope that lr λ has, by `parametrization.weight_decay`. Where the rate goes as r, λ goes as 1/r
under `independent` (and `timescale`, over width), as r^-1/2 under `sqrt` and as 1 under `coupled`; so lr λ goes as 1,
r^1/2 and r."""

_FADES = 0.15
"""Where width has a part in lr λ, matrices shrink by other shares at other widths, and embeddings by the same. What
that changes of a sum of both is no power of width, and is not judged; nor are sizes once the base has lost this share
(lr λ times steps)."""

_LITTLE = 0.05
"""The first update is compared with the rate only where weight decay is at most this share of it."""

_SMALL_EPS = 1e-6
"""An epsilon of Adam up to this size is taken to be far below the gradients."""

_ABOVE = 1.0
"""An epsilon of SOAP from this size on is taken to be above the singular values of gradients."""

_DEEPEST = tuple(f"{stack}.layers.last" for stack in STACKS)

Shapes = Mapping[str, TensorShape]


class Expected(NamedTuple):
    """A slope, and how far below and above it may be; None: as far as it likes."""

    slope: float
    low: float | None
    high: float | None


_NOT_JUDGED = Expected(0.0, None, None)


class _Part(NamedTuple):
    """A parameter, or a block of one, on every model.

    Args:
        tensor: name of the parameter in the family.
        block: None where the parameter is one block.
        shapes: of the parameter, smallest model first.
    """

    tensor: str
    block: str | None
    shapes: list[TensorShape]

    @property
    def largest(self) -> TensorShape:
        """The parameter's shape on the largest model."""
        return self.shapes[-1]


class Theory:
    """What the slopes of a family should be.

    Args:
        parametrizations: of the family's models, smallest first; looked at are config and shapes alone.
        sizes: what slopes are taken over, a number per model.
        axis: what grows.
    """

    def __init__(self, parametrizations: Sequence[Parametrization], sizes: Sequence[float], axis: Axis) -> None:
        self._models = [(each.config, each.shapes) for each in parametrizations]
        self._sizes, self._axis, self._ratio = sizes, axis, sizes[-1] / sizes[0]
        self._config, self._shapes = self._models[-1]
        self._layers, self._roles = self._config.model.num_layers, roles.ROLES[self._config.model.family]
        # Branches, and modules outside them, that an output-like tensor feeds.
        self._falling = {
            branch(name)
            for name, shape in self._shapes.items()
            # A gate's sigmoid is 1/2 where its logits are 0.
            if not name.endswith(roles.GATE) and any(self._has_g(shape, block) for block in shape.fan_outs)
        }
        self._routed = routed([(config, frozenset(shapes)) for config, shapes in self._models], sizes)
        self._hidden = self._over(lambda config, _: config.model.hidden_size)
        self._head = self._over(lambda config, _: config.model.head_size)
        hparams = self._config.hparams
        felt = any(self._decay(shape, 0.0)[1] > 1 / _DECAYS for shape in self._shapes.values())
        kept = _KEEPS_OF_RATE[self._config.parametrization.weight_decay]
        self._shrinks = hparams.lr * hparams.weight_decay if kept and felt else 0.0
        self._key_value = next((name for name in self._shapes if name.endswith(roles.KEY_VALUE)), None)

    def expected(self, name: str, quantity: str, step: int) -> Expected:
        """Slope and bounds of one quantity of a module or of a part of a parameter."""
        bound = BOUNDS[quantity]
        if self.vanishes(name, quantity, step):
            return _NOT_JUDGED
        if quantity in ("initial", "update"):
            part = self._part(name)
            if quantity == "initial":
                return Expected(self._initial(part), bound, bound)
            found = self._update(part)
            if self._routed is None or found.low is None or not self._gradient_decides():
                return found
            fall, rise = self._routed.update(part.tensor)
            return found._replace(low=found.low + fall, high=None if found.high is None else found.high + rise)
        if self._shrinks and (quantity == "change" or self._shrinks * step > _FADES):
            return _NOT_JUDGED
        if self._axis == "depth" and stack_of(name) and name not in _DEEPEST:
            # Half of all branches come before it in a model of two layers, most in a deep one.
            return _NOT_JUDGED
        of_experts = None if self._routed is None else self._routed.expected(name, quantity, step)
        if of_experts is not None:
            return Expected(*of_experts)
        if quantity == "change":
            low = _FALL if self._falls(name) or self._is_fed(name) else bound
            return Expected(0.0, low, _RISE if self._is_chosen(name) else bound)
        if quantity == "output":
            first = self._first(name) if step == 0 else None
            if first is not None:
                return Expected(first, bound, bound)
            return Expected(0.0, None if self._falls(name) else bound, bound)
        return self._gradient(name)

    def vanishes(self, name: str, quantity: str, step: int) -> bool:
        """Whether a quantity is on the list of what is zero by construction, or a rounding error, and so is not judged.

        A parameter that is not on the list, has a rate and does not move is out of bounds. An expert's parameter is
        out of bounds too, unless no token came to that expert (slopes.py).
        """
        if quantity == "update" and name.endswith(roles.KEY_BIAS):
            return True
        config = self._config.parametrization
        if config.zero_init_readout:
            logits = name.startswith(self._roles.logits[0])
            if quantity in ("initial", "output") and step == 0 and logits:
                return True
            if (quantity, step) in (("gradient", 0), ("update", 0), ("change", 1)) and not logits:
                return True
        return config.zero_init_query and step == 0 and name.endswith(roles.WITHOUT_QUERY.get(quantity, ()))

    def first_update(self, name: str) -> tuple[list[float], float | None] | None:
        """The size that Adam's first update should have: the learning rate, wherever there is a gradient.

        Returns:
            The size on each model, and by which share the update may be smaller. None instead of a share means by any:
            rows of an embedding that are not in the batch do not move, nor those of distances that it does not have.
            None instead of both where weight decay, another optimizer or a zero gradient decides the update.
        """
        config = self._config
        if config.optimizer.name not in ("adamw", "adam") or self.vanishes(name, "update", 0):
            return None
        part = self._part(name)
        further = (_KEEPS_OF_RATE[config.parametrization.weight_decay] - 1) * self._rate(part)
        if self._decay(part.largest, self._initial(part) + further)[1] > _LITTLE:
            return None
        sizes = [said.first_rate(model, shape) for (model, _), shape in zip(self._models, part.shapes, strict=True)]
        sparse = part.largest.spec.is_lookup or (
            f"{roles.FEED_FORWARD}." in name and "relu" in config.model.activation_func
        )
        return sizes, None if sparse or config.optimizer.eps > _SMALL_EPS else 0.5

    def drawn(self, name: str) -> list[Size] | None:
        """The size that the initial values of a part of a parameter should have on each model.

        Returns:
            None where a layer draws values of its own.
        """
        part, zero = self._part(name), self.vanishes(name, "initial", 0)
        sizes = []
        for (model, _), shape in zip(self._models, part.shapes, strict=True):
            size = said.initial_size(model, shape, part.block, output_like=self._has_g(shape, part.block))
            if size is None:
                return None
            sizes.append(Size(0.0) if zero else size)
        return sizes

    # --- parameters ---

    def _part(self, name: str) -> _Part:
        tensor, block = named(name)
        shapes = [shapes[in_whole_model(tensor, config.model.num_layers)] for config, shapes in self._models]
        return _Part(tensor, block, shapes)

    def _initial(self, part: _Part) -> float:
        """Table 8: a readout with A = 1/n_in, embeddings, gains and biases are as large at every width."""
        spec = part.largest.spec
        if spec.readout or spec.fan_in is None or spec.init is Init.EMBEDDING:
            return 0.0
        fan_in = self._fan_in(part)
        return -fan_in if self._has_g(part.largest, part.block) else -fan_in / 2

    def _gradient_decides(self) -> bool:
        """Whether the size of a gradient decides that of its update."""
        optimizer = self._config.optimizer
        return optimizer.name == "sgd" or optimizer.eps > _SMALL_EPS

    def _update(self, part: _Part) -> Expected:
        optimizer, bound, rate = self._config.optimizer, BOUNDS["update"], self._rate(part)
        initial = self._initial(part)
        decayed = rate * _KEEPS_OF_RATE[self._config.parametrization.weight_decay]
        least, most = self._decay(part.largest, initial + decayed - rate)
        if most > 1 / _DECAYS:
            if least < _DECAYS or self.vanishes(part_name(part.tensor, part.block), "initial", 0):
                return _NOT_JUDGED
            return Expected(initial + decayed, bound, bound)
        fan_in, fan_out = self._fan_in(part), self._fan_out(part, part.block)
        if not said.is_orthogonal(self._config, part.largest):
            # One epsilon serves all blocks, the smallest: one that grows less than others leaves it with width.
            has_epsilon = optimizer.name != "lion" and optimizer.eps > _SMALL_EPS
            slowest = has_epsilon and any(fan_out < self._fan_out(part, other) for other in part.largest.fan_outs)
            return Expected(rate, bound, None if slowest else bound)
        if optimizer.name == "soap" and optimizer.soap_eps >= _ABOVE:
            # The gradient over epsilon: 1/(n_in · own size) times m_out, as under SGD. Where the own size stays, a
            # gradient goes through initial weights as 1/sqrt(hidden · own size), which is less.
            return Expected(rate, bound + max(0.0, (self._hidden - fan_out) / 2), bound)
        # An orthogonal matrix has coordinates of 1/sqrt(longer side), one of rank 1 of 1/sqrt(n_in n_out); its rate
        # goes as sqrt(n_out/n_in). The gradient of a few tokens is between the two.
        further = (fan_in + fan_out - max(fan_in, fan_out)) / 2
        return Expected(rate + further, bound + further, bound)

    def _decay(self, shape: TensorShape, growth: float) -> tuple[float, float]:
        """How many times what a gradient moves decay does (lr λ w over lr), on the smallest and the largest model."""
        config = self._config
        if config.optimizer.name not in ("adamw", "muon", "lion", "soap") or not shape.spec.is_decayed:
            return 0.0, 0.0
        std = max(said.drawn_std(config, shape, block) for block in shape.fan_outs)
        std *= said.factor(config, shape, next(iter(shape.fan_outs)), "weight_decay")
        ends = config.hparams.weight_decay * std, config.hparams.weight_decay * std * self._ratio**growth
        return min(ends), max(ends)

    def _rate(self, part: _Part) -> float:
        """Slope of 1/n_in, 1 for a readout with A = 1/n_in; inside the blocks times m_L^(α-1)."""
        rate = 0.0 if part.largest.spec.readout or part.largest.spec.fan_in is None else -self._fan_in(part)
        exponent = self._config.parametrization.depth_exponent
        if said.of_layers(part.largest) and exponent is not None:
            rate += self._over(lambda config, _: config.model.num_layers) * (exponent - 1)
        return rate

    def _has_g(self, shape: TensorShape, block: str | None) -> bool:
        """Whether initial values fall as 1/n_in: the fan-in grows, the fan-out does not, and the rule is output-like.

        Declared growth counts, not that of the models at hand.
        """
        spec, config = shape.spec, self._config
        if spec.readout or spec.fan_in is None or not shape.fan_in.grows or shape.fan_outs[block].grows:
            return False
        if shape.name.endswith(roles.CLASSIFIERS):
            return True
        rule = config.parametrization.fixed_fan_out_init
        if rule == "auto":
            rule = "hidden_like" if f"{roles.FEED_FORWARD}." in shape.name else "output_like"
        normed = config.model.qk_layernorm and part_name(shape.name, block).endswith(roles.NORMED)
        return rule == "output_like" and not normed

    # --- modules ---

    def _first(self, name: str) -> float | None:
        """Slope of an output before the first step, where random weights decide it and it is not 0; None elsewhere."""
        if name in self._roles.logits:
            # 1/n_in times a sum of n_in random terms.
            return -self._hidden / 2
        before, router_logits, _ = f"{name}.".partition(f"{roles.ROUTER}.logits.")
        if router_logits:
            biased = in_whole_model(f"{before}{roles.ROUTER}.bias", self._layers) in self._shapes
            return None if biased else -self._hidden / 2
        of_attention = name.partition(".core_attention.")[2]
        if of_attention not in ("key", "value", "logits"):
            return None
        if self._key_value is None and branch(name) in self._falling:
            return None
        fall = self._key_value_fall("value" if of_attention == "value" else "key")
        # Logits: 1/d times a sum of d random terms.
        return fall - self._head / 2 if of_attention == "logits" else fall

    def _key_value_fall(self, block: str) -> float:
        """Slope of keys or values before the first step."""
        if self._key_value is None or not self._has_g(self._shapes[self._key_value], block):
            return 0.0
        return -self._fan_in(self._part(self._key_value)) / 2

    def _gradient(self, name: str) -> Expected:
        bound, of_logits = BOUNDS["gradient"], name in self._roles.logits
        if (
            self._axis == "depth"
            or (self._falls(name) and not of_logits)
            or (self._head and name.endswith(roles.SCORED))
        ):
            return _NOT_JUDGED
        if of_logits:
            return Expected(0.0, bound, bound)
        feeds = name.endswith(self._roles.before_attention) and any(
            each.endswith(roles.ATTENTION) for each in self._falling
        )
        # Through initial weights as 1/sqrt(own size · next size), through what was learned as 1/(own size).
        further = (self._over(lambda config, shapes: said.output_size(name, config, shapes)) - self._hidden) / 2
        low = None if feeds else bound + max(0.0, further)
        return Expected(-self._hidden - further, low, bound + max(0.0, -further))

    def _falls(self, name: str) -> bool:
        """Whether the output may fall with width in the first steps."""
        return name in self._roles.logits or self._is_score(name) or branch(name) in self._falling

    def _is_fed(self, name: str) -> bool:
        """Whether a branch that falls is added to what the module sees or gives."""
        falls = any(each.endswith((*roles.ATTENTION, roles.FEED_FORWARD)) for each in self._falling)
        return falls and name.startswith((*(f"{stack}." for stack in STACKS), *self._roles.behind))

    def _is_chosen(self, name: str) -> bool:
        """Whether the output changes where a token gets another expert: of a router, the experts, an MLP of experts."""
        place = in_experts(name, self._layers, self._shapes)
        return place is not None and place[1] in ("", "router.", "experts.")

    def _is_score(self, name: str) -> bool:
        """Whether it is made of two activations that learn to agree, or of an output-like tensor's alone."""
        return name.endswith((roles.ROUTER, f"{roles.ROUTER}.logits")) or (
            bool(self._head) and ".core_attention.logits" in name
        )

    # --- dimensions ---

    def _over(self, size: Callable[[Config, Shapes], float]) -> float:
        """Slope of some size over the family."""
        return slope_of(self._sizes, [size(config, shapes) for config, shapes in self._models])

    def _fan_in(self, part: _Part) -> float:
        return slope_of(self._sizes, [shape.fan_in.dim for shape in part.shapes])

    def _fan_out(self, part: _Part, block: str | None) -> float:
        return slope_of(self._sizes, [shape.fan_outs[block].dim for shape in part.shapes])
