"""What the slopes of a mixture of experts should be where experts become more, written out by hand (theory.py).

Public names: `Routed`, `routed`. E is the number of experts of a layer, k how many see a token. The width of the
residual stream stays; an expert's own FFN may fall (finer experts), for which theory.py's widths hold. megatron-core's
scores of the chosen experts add up to 1, so each goes as 1/k, and an expert's activations are multiplied with it
between its two layers. From that follow, for every token that an expert sees:

| quantity | slope | why |
| --- | --- | --- |
| output of an expert, its second layer, all experts before they are added up; gradient of its first | 1/k | the score |
| output of its first layer; gradient of its second, of itself, of all experts | theory.py's | no score; the stream's |
| output of the MLP before the first step | k^-1/2 | a mean over k random ones |
| the same later, and its change | k^-1/2 to 1 | what experts learn of a token agrees; other experts are random anew |
| gradient of what the MLP reads (the norm before it) | as the MLP's output | the same mean, backwards |
| router: logits and their change | 1 | a row of it does not know of the others |
| router: scores and their change, over all experts | 1/E | they add up to 1 |
| router: gradient of scores, over all experts | k/E | each is what its expert is worth, and 0 for who is not chosen |

Where the share k/E falls, changes of scores, experts and MLP may rise as E^1/2: the gap between the logit of the last
expert that is chosen and the next one narrows, so that more tokens get other experts (from 4 to 32 experts of which 2
are chosen, the share of those replaced by a small change goes as E^0.5; at a fixed share it stays). The change of all
experts' rows may rise at a fixed share too: rows are in the order of experts, so one token that gets another expert
shifts the rows behind it, which are then compared with those of other tokens, and the more rows the more are shifted.

Where the size of a gradient decides an update (SGD, and an Adam whose epsilon is near it), the gain before experts
falls as their mean does. A first layer of ffn rows has a gradient of ffn^-1/2, through second layers that start so, and
the rules for ffn^-1: its update may fall as finer experts' FFN^1/2. Where the share falls, experts and router may rise
as (E/k)^1/2: the rule counts on gradients of 1/E, and those of fewer tokens are mostly noise, (k E)^-1/2.

Shared experts are added to the MLP and see every token. Beside them nothing falls: then both ends are bounds. Initial
values and Adam's updates are as theory.py says, in which no number of experts has a part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mup_megatron.config import Config
from mup_megatron.proof.names import in_experts, in_whole_model
from mup_megatron.proof.verdict import BOUNDS, slope_of

_RISE = 0.5
_SAME = 1e-6


@dataclass(frozen=True, kw_only=True)
class Routed:
    """How the experts of a family grow.

    Args:
        experts: slope of E.
        topk: slope of k.
        ffn: slope of an expert's own FFN.
        layers: of the largest model.
        modules: names of its parameters, to tell layers of experts from dense ones.
    """

    experts: float
    topk: float
    ffn: float
    layers: int
    modules: frozenset[str]

    def expected(self, name: str, quantity: str, step: int) -> tuple[float, float, float] | None:
        """Slope of a module's quantity, and how far it may lie below and above; None where widths alone decide."""
        if quantity == "gradient" and (layer := self._read_by_experts(name)):
            return self._mean(layer, quantity, first=step == 0)
        place = in_experts(name, self.layers, self.modules)
        if place is None or place[1].startswith("shared_experts"):
            return None
        layer, inside = place
        if inside.startswith("router."):
            return self._router(inside.removeprefix("router."), quantity)
        if inside.startswith("experts."):
            return self._expert(inside, quantity)
        if quantity == "gradient":
            return 0.0, BOUNDS[quantity], BOUNDS[quantity]
        return self._mean(layer, quantity, first=(quantity, step) == ("output", 0))

    def update(self, name: str) -> tuple[float, float]:
        """How much further an update may fall and rise where the size of its gradient decides it, as SGD's."""
        if self._read_by_experts(name):
            return max(0.0, self.topk / 2), 0.0
        place = in_experts(name, self.layers, self.modules)
        if place is None or not place[1].startswith(("router.", "experts.")):
            return 0.0, 0.0
        noise = max(0.0, (self.experts - self.topk) / 2)
        further = self.ffn / 2 if ".linear_fc1." in place[1] else 0.0
        return max(0.0, -further), noise + max(0.0, further)

    def _read_by_experts(self, name: str) -> str | None:
        """The layer of the norm that an MLP of experts reads; None of what is something else."""
        layer, reads, _ = in_whole_model(f"{name}.", self.layers).partition(".pre_mlp_layernorm.")
        return layer if reads and f"{layer}.mlp.router.weight" in self.modules else None

    def _mean(self, layer: str, quantity: str, *, first: bool) -> tuple[float, float, float]:
        """Of a mean over k experts, which are random at first."""
        bound, fall = BOUNDS[quantity], self.topk / 2
        if first and f"{layer}.mlp.shared_experts.linear_fc1.weight" not in self.modules:
            return -fall, bound, bound
        return 0.0, bound + max(0.0, fall), bound + max(0.0, -fall, self._rise(quantity))

    def _expert(self, inside: str, quantity: str) -> tuple[float, float, float] | None:
        bound = BOUNDS[quantity]
        if inside == "experts." and quantity == "change":
            return -self.topk, bound, bound + _RISE
        if not inside.endswith("linear_fc1."):
            return None if quantity == "gradient" else (-self.topk, bound, bound)
        if quantity != "gradient":
            return None
        further = self.ffn / 2  # through second layers that start as ffn^-1/2 and learn as 1/ffn
        return -self.topk - further, bound + max(0.0, further), bound + max(0.0, -further)

    def _router(self, inside: str, quantity: str) -> tuple[float, float, float]:
        bound = BOUNDS[quantity]
        if inside == "logits.":
            return 0.0, bound, bound
        slope = self.topk - self.experts if quantity == "gradient" else -self.experts
        return slope, bound, bound + self._rise(quantity)

    def _rise(self, quantity: str) -> float:
        """Of a change where the share of experts falls: the next expert's logit is nearer, so tokens change experts."""
        return _RISE if quantity == "change" and self.topk < self.experts - _SAME else 0.0


def routed(models: Sequence[tuple[Config, frozenset[str]]], sizes: Sequence[float]) -> Routed | None:
    """How experts grow over a family; None where their number, and that per token, stays.

    Args:
        models: config and names of parameters, smallest first.
        sizes: what slopes are taken over.
    """
    counts = [config.model.num_moe_experts or 0 for config, _ in models]
    chosen = [config.model.moe_router_topk for config, _ in models]
    if len(set(counts)) == 1 and len(set(chosen)) == 1:
        return None
    config, modules = models[-1]
    return Routed(
        experts=slope_of(sizes, counts),
        topk=slope_of(sizes, chosen),
        ffn=slope_of(sizes, [config.model.moe_ffn_size or 1 for config, _ in models]),
        layers=config.model.num_layers,
        modules=modules,
    )
