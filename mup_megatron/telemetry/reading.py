"""One reading of a run: sizes of outputs, weights, gradients and updates, attention and routers, at one step.

Public names: `Readings`, `Held`, `QUANTITIES`, `usual_interval`. A reading is begun before a step, and its sums are on
their way over the ranks when the step ends; nobody waits for them within the step. Between readings nothing hangs on
the model.
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed
from megatron.core import parallel_state
from megatron.core.models.common.language_module.language_module import LanguageModule
from torch.distributed.tensor import DTensor

from mup_megatron.model.global_names import Named, named_modules
from mup_megatron.model.parts import Part, counts
from mup_megatron.parallel.layout import Layout
from mup_megatron.rules.table import Parametrization
from mup_megatron.telemetry.hooks import attention_logits, measured_modules
from mup_megatron.telemetry.series import CLIPPED, SCHEDULE, series_name
from mup_megatron.telemetry.sums import SIGNS, Exchange, Key, Sums, keys_of_all

_SLICE = "slice "
QUANTITIES = {
    "output rms": "root of the mean square of a module's output",
    "largest output": "largest absolute value of a module's output",
    "largest logit": "largest absolute attention logit, of 64 queries of each sequence",
    "attention entropy": "mean entropy of the attention of these queries, in nats",
    "router entropy": "mean entropy of a token's probabilities of experts, over that of equal ones",
    "largest load": "tokens of the expert that has most, over the mean",
    "load entropy": "entropy of the shares of experts in tokens, over that of equal ones",
    "dropped tokens": "share of the tokens' choices of experts that no expert took",
    "weight rms": "root of the mean square of a tensor, as its layer multiplies with it",
    "gradient rms": "root of the mean square of its gradient, before clipping",
    "update over weight": "root of the mean square of what the step added to it, over `weight rms` before",
    "copies apart": "of what several ranks hold: how far apart the sums of it are; told where they are",
    "schedule": "learning rate of the step over the one at the schedule's peak",
    "clipped": "share of the steps since the last reading, this one among them, whose gradient was clipped",
    "rate": "learning rate of the optimizer's group of the tensor",
    "decay": "that times the group's weight decay: the share of a weight that decay takes at the step",
}
"""What a series is of, by the name that it bears in files."""


def usual_interval(steps: int) -> int:
    """Steps between two readings where nobody says it, of a run of so many: 1000 readings of a long run are enough."""
    return max(100, steps // 1000)


class Held(Protocol):
    """What a reading asks of an optimizer; an `Engine` has it, and an `OptimizerState`."""

    @property
    def named(self) -> Named:
        """This rank's parameters by global name."""
        ...

    def gradient_parts(self) -> list[Part]:
        """What this rank has of gradients before the update."""
        ...

    def weight_parts(self) -> list[Part]:
        """Views of what this rank steps."""
        ...

    def groups(self, parameter: torch.nn.Parameter) -> Sequence[Mapping[str, Any]] | None:
        """The optimizer's groups that hold a parameter; None where this rank does not know."""
        ...


class Readings:
    """Takes readings of one run. Every method is collective, and called at the same steps on every rank.

    Args:
        chunks: this rank's part of the model.
        held: the run's optimizer.
        table: of the run.
        layout: how ranks split the model.
        device: where ranks exchange.
    """

    def __init__(
        self,
        chunks: Sequence[LanguageModule],
        held: Held,
        table: Parametrization,
        layout: Layout,
        device: torch.device,
    ) -> None:
        self._chunks, self._held, self._table, self._layout, self._device = chunks, held, table, layout, device
        self._rank = torch.distributed.get_rank()
        self._problem: str | None = None
        self._norms: list[bool] = []
        self._open = False
        self._handles: list[Any] = []
        self._sums = Sums()
        self._parts: list[tuple[Part, torch.Tensor]] = []
        self._exchange: Exchange | None = None
        self._groups: dict[str, Mapping[str, Any]] | None = None  # looked for once: an optimizer has many
        self._peaks: list[tuple[Mapping[str, Any], float]] = []
        self._keys = keys_of_all(self._own_keys())

    @property
    def is_open(self) -> bool:
        """Whether a reading has begun whose step is not over."""
        return self._open

    def problem(self) -> str | None:
        """Why this rank does not measure gradients and updates, once; None where it does. Not collective."""
        problem, self._problem = self._problem, self._problem and ""
        return problem or None

    def begin(self) -> None:
        """Before a step: forward passes are measured from now on."""
        self._sums, self._open = Sums(), True
        for name, module in self._modules():
            if name.endswith("core_attention"):
                self._on(module.register_forward_pre_hook, functools.partial(self._see_attention, name))
            if name.endswith(".router"):
                self._on(module.register_forward_hook, functools.partial(self._see_router, name))
            else:
                self._on(module.register_forward_hook, functools.partial(self._see_output, name))

    def saw(self, grad_norm: float | None) -> None:
        """Of every step, in order, before the `result` of a reading of it: the norm before clipping; None: unknown."""
        limit = self._table.config.training.clip_grad
        if grad_norm is not None and limit:
            self._norms.append(grad_norm > limit)

    @torch.no_grad()
    def before_update(self) -> None:
        """Behind the last backward pass: measures gradients, and keeps the weights that this rank steps."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        with self._understood():
            for part, key, weight, theta in self._counted(self._held.gradient_parts(), "gradient"):
                self._sums.add_squares(key, part.values / theta if theta != 1.0 else part.values, weight)
            self._parts = [(part, part.values.clone()) for part in self._held.weight_parts()]
            for key, parameter in self._copied():
                self._sums.keep_sum(key, parameter)

    @torch.no_grad()
    def after_update(self) -> None:
        """Behind the step: measures weights and updates, and sends all sums on their way."""
        with self._understood():
            self._measure_updates()
        self._parts, self._open = [], False
        self._exchange = Exchange(self._sums, self._keys, self._device)
        self._sums = Sums()

    @contextlib.contextmanager
    def _understood(self) -> Iterator[None]:
        """An optimizer that keeps things elsewhere ends no run; other ranks wait for this one's sums all the same."""
        try:
            yield
        except Exception as error:
            if self._problem is None:
                self._problem = f"{type(error).__name__}: {error}".splitlines()[0]

    def _measure_updates(self) -> None:
        kept = {id(part): before for part, before in self._parts}
        for part, key, weight, theta in self._counted([part for part, _ in self._parts], "weight"):
            before = kept[id(part)]
            self._sums.add_squares(key, before if theta == 1.0 else before * theta, weight)
            change = before.sub_(part.values)  # its sign is not looked at
            self._sums.add_squares(key._replace(quantity="update"), change if theta == 1.0 else change * theta, weight)
        if self._groups is None:
            found = ((name, self._held.groups(parameter)) for name, parameter in self._held.named)
            held = {name: groups[0] for name, groups in found if groups}
            self._groups = {series_name(name): group for name, group in held.items()}
            rows = {name: self._table.tensors[name] for name in held}
            self._peaks = [(held[name], row.lr) for name, row in rows.items() if row.lr and not row.group.decoupled]
        for name, group in self._groups.items():
            rate = float(group["lr"])
            told = {"rate": rate, "decay": rate * float(group.get("weight_decay", 0.0))}
            for quantity, value in told.items():
                self._sums.largest[Key(name, quantity)] = torch.tensor(value, dtype=torch.float64)
        if self._peaks:  # of the groups the middle one: another may have the rate of nobody knows what
            rates = [float(group["lr"]) / peak for group, peak in self._peaks]
            self._sums.largest[Key(*SCHEDULE)] = torch.tensor(statistics.median(rates), dtype=torch.float64)

    def result(self) -> dict[tuple[str, str], float] | None:
        """What the last reading found, by name and quantity (`QUANTITIES`); None where it was told before."""
        if self._exchange is None:
            return None
        exchange, self._exchange = self._exchange, None
        sums = {key[:2]: (numbers, count, most) for key, numbers, count, most in exchange.found()}
        found = dict(_told(sums, self._table.config.model.moe_router_topk))
        if self._norms:
            found[CLIPPED] = sum(self._norms) / len(self._norms)
            self._norms.clear()
        return found

    def _modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Not experts: what goes through them depends on who dispatches tokens; the layer's output has all of it."""
        modules = measured_modules(named_modules(self._chunks))
        return ((name, module) for name, module in modules if ".experts." not in f"{name}.")

    def _own_keys(self) -> Iterator[Key]:
        for name, module in self._modules():
            if name.endswith("core_attention"):
                yield Key(name, "logits")
            if name.endswith(".router"):
                yield Key(name, "entropy")
                config: Any = module.config
                yield Key(name, "tokens", config.num_moe_experts)
            else:
                yield Key(name, "output")
        yield Key(*SCHEDULE)
        for key, _ in self._copied():
            yield from (key._replace(quantity=sign + key.quantity) for sign in SIGNS)
        for name in self._table.tensors:
            for quantity in ("weight", "update", "gradient", "rate", "decay"):
                yield Key(series_name(name), quantity)

    def _copied(self) -> Iterator[tuple[Key, torch.nn.Parameter]]:
        """Slices of tensors that forward passes take whole on this rank, and perhaps on others."""
        for name, parameter in self._held.named:
            spec = self._table.tensors[name].shape.spec
            at = self._layout.slice_of(spec, self._rank)[0] if spec.partition_dim is not None else 0
            if parameter.numel() and not isinstance(parameter, DTensor):
                yield Key(name, f"{_SLICE}{at}"), parameter

    def _counted(self, parts: Sequence[Part], quantity: str) -> Iterator[tuple[Part, Key, float, float]]:
        """Parts that count in sums over ranks: with their key, what each element counts for, and θ."""
        for part in parts:
            row = self._table.tensors[part.name]
            if counts(part.name, row.shape.spec, self._layout, self._rank):
                yield part, Key(series_name(part.name), quantity), 1.0 / part.holders, float(row.theta)

    def _on(self, register: Callable[..., Any], hook: Callable[..., None]) -> None:
        """One hook; what it does not understand is not measured, and the run goes on."""

        def see(*call: Any) -> None:
            if torch.is_grad_enabled():  # not an evaluation, nor what is computed once more in the backward pass
                with torch.no_grad(), contextlib.suppress(Exception):
                    hook(*call)

        self._handles.append(register(see))

    def _see_output(self, name: str, _module: Any, _inputs: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        if torch.is_tensor(tensor) and tensor.is_floating_point():
            self._sums.add_squares(Key(name, "output"), tensor)
            self._sums.keep_largest(Key(name, "output"), tensor)

    def _see_attention(self, name: str, module: Any, inputs: Any) -> None:
        query, key = (_whole_sequence(tensor.detach()) for tensor in inputs[:2])
        logits, mask = attention_logits(module, query, key)
        self._sums.keep_largest(Key(name, "logits"), logits)
        shares = logits.masked_fill(mask == 0, -torch.inf).log_softmax(dim=-1)
        entropy = -(shares.exp() * shares.masked_fill(mask == 0, 0.0)).sum(dim=-1)
        self._sums.add(Key(name, "logits"), entropy.sum(dtype=torch.float64), entropy.numel())

    def _see_router(self, name: str, module: Any, inputs: Any, output: Any) -> None:
        chances = module.gating(inputs[0].detach()).float().log_softmax(dim=-1)
        experts = chances.size(-1)
        entropy = -(chances.exp() * chances).sum(dim=-1) / math.log(experts)
        self._sums.add(Key(name, "entropy"), entropy.sum(dtype=torch.float64), entropy.numel())
        chosen = output[1].view(-1, experts)
        self._sums.add(Key(name, "tokens", experts), chosen.sum(dim=0), chosen.size(0))


def _whole_sequence(tensor: torch.Tensor) -> torch.Tensor:
    """What context-parallel ranks hold of a sequence, [s, b, …], in its order: each holds two of 2n chunks.

    The order is that of megatron-core's get_batch_on_this_cp_rank. Collective over them.
    """
    ranks = parallel_state.get_context_parallel_world_size()
    if ranks == 1:
        return tensor
    held = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(ranks)]
    torch.distributed.all_gather(held, tensor.contiguous(), group=parallel_state.get_context_parallel_group())
    halves = [part.chunk(2) for part in held]
    return torch.cat([first for first, _ in halves] + [last for _, last in reversed(halves)])


def _told(
    found: Mapping[tuple[str, str], tuple[list[float], float, float]], choices: int
) -> Iterator[tuple[tuple[str, str], float]]:
    """Sums to what is told of them."""

    def mean(name: str, quantity: str) -> float:
        (total,), count, _ = found[name, quantity]
        return total / count

    for (name, quantity), (numbers, count, most) in found.items():
        if quantity.startswith(_SLICE):
            # Where no rank has anything else, minus infinity is the largest, and is as good as not there.
            least = -found.get((name, f"-{quantity}"), ([], 0.0, -math.inf))[2]
            if most != least and not math.isnan(most) and not math.isnan(least):
                yield (name, "copies apart"), most - least
        elif quantity.startswith("-"):
            continue
        elif quantity == "output":
            yield (name, "output rms"), math.sqrt(mean(name, quantity))
            yield (name, "largest output"), most
        elif quantity == "logits":
            yield (name, "largest logit"), most
            yield (name, "attention entropy"), mean(name, quantity)
        elif quantity == "entropy":
            yield (name, "router entropy"), mean(name, quantity)
        elif quantity == "tokens":
            yield from _load(name, numbers, count * choices)
        elif quantity == "update":
            if weight := mean(name, "weight"):
                yield (name, "update over weight"), math.sqrt(mean(name, quantity) / weight)
        elif quantity in ("rate", "decay", "schedule"):
            yield (name, quantity), most
        else:
            yield (name, f"{quantity} rms"), math.sqrt(mean(name, quantity))


def _load(name: str, tokens: Sequence[float], choices: float) -> Iterator[tuple[tuple[str, str], float]]:
    taken = sum(tokens)
    if not taken:
        return
    shares = [each / taken for each in tokens]
    yield (name, "largest load"), max(shares) * len(shares)
    entropy = -sum(share * math.log(share) for share in shares if share)
    yield (name, "load entropy"), entropy / math.log(len(shares)) if len(shares) > 1 else 1.0
    yield (name, "dropped tokens"), max(0.0, 1.0 - taken / choices)
