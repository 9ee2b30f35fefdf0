"""The audit of a plain torch model's first step: groups, updates and readouts against its infinite shapes.

Public names: `audit`, `ModelAudit`, `steps_of`. What is asked is what the optimizer's groups hold and what its step
did, on this rank; nothing is read from what somebody asked for.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from mup_megatron.audit.findings import Audit, Finding
from mup_megatron.audit.first_steps import FirstSteps
from mup_megatron.audit.multiple import Measured, multiple
from mup_megatron.audit.update import (
    ERROR,
    WEIGHT,
    Rates,
    Sample,
    expected_update,
    judged_update,
    share_of_update,
)
from mup_megatron.config.per_tensor import PerTensor
from mup_megatron.mup.in_place import adds_l2, rule_of
from mup_megatron.mup.layer import MuReadout
from mup_megatron.mup.optim import MULTIPLIER, SCALES_EPS, SOURCE
from mup_megatron.mup.parameters import clean_names
from mup_megatron.rules import formulas
from mup_megatron.util.errors import UserError

Action = Literal["stop", "warn", "off"]
Group = Mapping[str, Any]

_GRADIENT = "gradient"
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""Of torch's names, what an update is recomputed from."""
_UPDATES: dict[str, formulas.UpdateRule] = {
    **dict.fromkeys(("Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam"), "adam"),
    **dict.fromkeys(("Lion", "FusedLion", "DeepSpeedCPULion"), "lion"),
    "SGD": "sgd",
}
"""Classes of optimizers whose updates are recomputed, by name: Apex's and DeepSpeed's need not be importable."""
_AGREES = 1e-6
"""Relative, of what a group holds."""
_NAMES = {"lr": "learning rate", "weight_decay": "weight decay", "eps": "epsilon"}
_CALLS, _ROWS = 4, 32
"""Calls of a readout that are looked at, and rows of each."""


def audit(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    parameters: Iterable[torch.nn.Parameter] | None = None,
    action: Action = "stop",
    say: Callable[[str], None] = print,
) -> Audit:
    """Looks at the first step that moves anything, and at the groups once more before the step behind it.

    Call it before the first step, on every rank. Each rank looks at what it holds.

    Args:
        model: its parameters carry infinite shapes, or the optimizer's groups their multipliers.
        optimizer: steps it; one of `MuAdam`, `MuAdamW`, `MuSGD`, or split by `split_in_place`.
        parameters: of the model, that this optimizer is to step; None takes all that require a gradient.
        action: `stop` raises UserError from the step where something is wrong, before a second step; `warn` says it;
            `off` does nothing.
        say: takes a line for the screen, on the first rank.

    Returns:
        What is found, which is empty until the first step is done.
    """
    questions = ModelAudit(model, optimizer, parameters)
    if action != "off":
        # GradScaler has a fused optimizer step on gradients that are no numbers, which then changes nothing.
        steps = first_steps(
            questions,
            optimizer,
            action=action,
            say=say,
            took=lambda: not float(getattr(optimizer, "found_inf", 0) or 0),
        )
        optimizer.register_step_pre_hook(lambda *_: steps.before())
        optimizer.register_step_post_hook(lambda *_: steps.behind())
    return questions.audit


def first_steps(
    questions: ModelAudit,
    optimizer: torch.optim.Optimizer,
    *,
    action: Action,
    say: Callable[[str], None],
    took: Callable[[], bool] = lambda: True,
) -> FirstSteps:
    """The questions in their order, around the optimizer's step.

    Args:
        questions: about the model.
        optimizer: that counts its steps.
        action: what becomes of something wrong, as of `audit`.
        say: takes a line for the screen, on the first rank.
        took: whether a step changed the weights.
    """
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    first = not distributed or torch.distributed.get_rank() == 0
    questions.watch_multipliers()

    def tell(found: Audit) -> None:
        if found.wrong and action == "stop":
            raise UserError(f"{found.line}; audit with action 'warn' goes on all the same")
        if first or found.wrong:
            say(f"{'warning: ' if found.wrong else ''}{found.line}")

    def give_up(error: Exception) -> None:
        if first:
            say(f"warning: audit: could not look at this run ({type(error).__name__}: {error})".splitlines()[0])

    return FirstSteps(questions, updates=lambda: steps_of(optimizer), took=lambda _: took(), tell=tell, give_up=give_up)


def steps_of(optimizer: torch.optim.Optimizer) -> int:
    """How many steps an optimizer counts; 0 at first, and where it counts none."""
    held: list[Any] = [*optimizer.param_groups, *optimizer.state.values()]
    return max([0, *(int(each.get("step", 0)) for each in held)])


class _Multipliers(NamedTuple):
    """What multiplies base values for one tensor; None where the rules are not known.

    Args:
        lr: of the learning rate.
        weight_decay: of the decay.
        eps: of Adam's epsilon.
    """

    lr: float
    weight_decay: float | None
    eps: float | None


class _Look:
    """A hook that looks; copies of the model, and files, have one that does not.

    Args:
        see: takes the call; None does not look.
    """

    def __init__(self, see: Callable[..., None] | None) -> None:
        self._see = see

    def __call__(self, *call: Any) -> None:
        if self._see is not None and not torch.compiler.is_compiling():
            self._see(*call)

    def __deepcopy__(self, memo: Any) -> _Look:
        return _Look(None)

    def __reduce__(self) -> Any:
        return _Look, (None,)


class ModelAudit:
    """`Questions` about a plain torch model, each asked of what this rank holds.

    Args:
        model: to be trained.
        optimizer: that has the groups; torch's own, or what another one wraps.
        parameters: that it is to step; None takes all that require a gradient.
        gather: a parameter's weight and moments by kind; may be collective. None takes the optimizer's state.
        groups: the groups that hold a parameter. None takes the optimizer's.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        parameters: Iterable[torch.nn.Parameter] | None = None,
        gather: Callable[[torch.nn.Parameter], dict[str, torch.Tensor]] | None = None,
        groups: Callable[[torch.nn.Parameter], Sequence[Group]] | None = None,
    ) -> None:
        clean = clean_names(name for name, _ in model.named_parameters())
        wanted = None if parameters is None else set(map(id, parameters))
        self._named = [
            (clean[name], each)
            for name, each in model.named_parameters()
            if (each.requires_grad if wanted is None else id(each) in wanted)
        ]
        self._model, self._optimizer = model, optimizer
        self._gather, self._groups = (
            gather or self._held,
            groups or (lambda parameter: self._by_id.get(id(parameter), [])),
        )
        self._samples: list[tuple[str, torch.nn.Parameter, Sample]] = []
        self._expected: dict[str, dict[str, float]] = {}
        self._readouts: dict[str, list[tuple[float, Measured]]] = {}
        self._handles: list[Any] = []
        self._by_id: dict[int, list[Group]] = {}
        self.audit = Audit()

    def watch_multipliers(self) -> None:
        """From now on, calls of readouts are looked at; not of compiled models, which hooks would compile again."""
        modules = dict(self._model.named_modules())
        compiled = any(hasattr(each, "_orig_mod") or each._compiled_call_impl is not None for each in modules.values())
        for name, module in modules.items():
            if not isinstance(module, MuReadout):
                continue
            if compiled:
                self.audit.unseen.append(f"multiplier of {name}, which is compiled")
                continue
            self._readouts[name] = []
            # Before ZeRO 3's own hook takes the weight away again.
            hook = module.register_forward_hook(_Look(functools.partial(self._see, name)), prepend=True)
            self._handles.append(hook)

    def ask_multipliers(self) -> None:
        """What the readouts that were looked at multiply with."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        clean = clean_names(f"{name}." for name in self._readouts)
        for name, calls in self._readouts.items():
            told = [(expected, Measured(*map(float, measured))) for expected, measured in calls]
            label = clean[f"{name}."].removesuffix(".")
            found = list(_judged_readout(label, told))
            self.audit.add(found)
            self.audit.unseen += [] if found else [f"multiplier of {label}"]
        self._readouts.clear()

    def begin_step(self, done: int) -> None:
        """Before a step, behind so many updates: keeps a few elements of every tensor that is in one group."""
        self._look()
        one = [(name, parameter) for name, parameter in self._named if len(self._groups(parameter)) == 1]
        self._samples = [(name, parameter, Sample.of(self._gather(parameter))) for name, parameter in one]

    def ask_groups(self) -> Rates:
        """Every tensor that has a gradient is in one group, and the groups are in µP's ratios.

        Returns:
            The base rate that most tensors have, as `lr`.
        """
        self._look()
        held = {name: (parameter, self._groups(parameter)) for name, parameter in self._named}
        counts = [
            _finding(name, "optimizer groups that hold it", 1.0, float(len(groups)), "exactly")
            for name, (_, groups) in held.items()
        ]
        one = {name: (parameter, groups[0]) for name, (parameter, groups) in held.items() if len(groups) == 1}
        self._expected = _expected(one, self._rows(one), self._optimizer.defaults)
        rate = max((expected.get("lr", 0.0) for expected in self._expected.values()), default=0.0)
        if rate:  # otherwise nothing moves yet, and nothing is told apart
            self.audit.add(counts)
            for name, expected in self._expected.items():
                for quantity, value in expected.items():
                    found = float(one[name][1][quantity])
                    self.audit.add([_finding(name, _NAMES[quantity], value, found, f"{_AGREES:g} of it")])
        return Rates(rate)

    def end_step(self, rates: Rates, done: int) -> None:
        """Behind a step, which makes so many updates: every tensor moved by its rate, epsilon and decay."""
        for name, parameter, sample in self._samples:
            whole, groups = self._gather(parameter), self._groups(parameter)
            if len(groups) != 1 or not whole[WEIGHT].numel():
                continue
            after = sample.taken(whole)
            group = {**groups[0], **self._expected.get(name, {})}
            updates = int(self._optimizer.state.get(parameter, {}).get("step", done))
            expected = self._expected_update(group, sample.values, after, updates)
            if expected is None:
                self.audit.unseen.append(f"update of {name}")
                continue
            if not after[WEIGHT].isfinite().all():
                self.audit.unseen.append(f"update of {name}, which is no number")
                continue
            masters, moments = self._rounding(parameter, whole)
            error = max(ERROR, 4 * moments)
            sums = share_of_update(
                expected,
                sample.values[WEIGHT],
                after[WEIGHT],
                error=error,
                rounding=masters,
            )
            self.audit.add([judged_update(name, sums, error)])
        self._samples = []

    def _rounding(self, parameter: torch.nn.Parameter, whole: Mapping[str, torch.Tensor]) -> tuple[float, float]:
        """Of weights and of moments, relative. What DeepSpeed puts together is float32, whatever it was."""
        optimizer = self._optimizer
        state = optimizer.state.get(parameter)
        weights = [whole[WEIGHT]] if state else [each for group in optimizer.param_groups for each in group["params"]]
        kept = [value for each in ([state] if state else optimizer.state.values()) for value in _moments_of(each)]
        return _coarsest([whole[WEIGHT], *weights]), _coarsest(kept)

    def _expected_update(
        self, group: Group, before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor], updates: int
    ) -> torch.Tensor | None:
        rule, lr, decay = _UPDATES.get(type(self._optimizer).__name__), float(group["lr"]), _decay(group)
        if rule is None or group.get("amsgrad") or group.get("nesterov"):
            return None
        if rule == "sgd" and not group.get("momentum"):
            gradient, sign = after.get(_GRADIENT), -1.0 if group.get("maximize") else 1.0
            return None if gradient is None else -lr * (sign * gradient + decay * before[WEIGHT])
        return expected_update(
            rule,
            before,
            after,
            lr=lr,
            eps=float(group.get("eps", 0.0)),
            decay=0.0 if rule == "adam" and adds_l2(self._optimizer, group) else decay,
            betas=group.get("betas", (0.0, 0.0)),
            updates=updates if group.get("bias_correction", True) else 2**31,
        )

    def _held(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """What torch's optimizers keep of a parameter: this rank's part."""
        state = self._optimizer.state.get(parameter, {})
        found = {
            WEIGHT: parameter.detach(),
            **{kind: state[kind] for kind in MOMENTS if torch.is_tensor(state.get(kind))},
        }
        if parameter.grad is not None:
            found[_GRADIENT] = parameter.grad
        return {kind: each.to_local() if isinstance(each, DTensor) else each for kind, each in found.items()}

    def _look(self) -> None:
        """Which groups hold what, now."""
        self._by_id.clear()
        for group in self._optimizer.param_groups:
            for each in group["params"]:
                self._by_id.setdefault(id(each), []).append(group)

    def _rows(self, held: Mapping[str, tuple[torch.nn.Parameter, Group]]) -> dict[str, _Multipliers]:
        """By the rule of the optimizer's class; where that is not known, by the one that fits more groups."""
        known = rule_of(self._optimizer)
        rules: Iterable[formulas.UpdateRule] = ("adam", "sgd") if known is None else (known,)
        found = [{name: _multipliers(rule, *each) for name, each in held.items()} for rule in rules]

        def fitting(rows: Mapping[str, _Multipliers]) -> int:
            said = {name: float(group.get(MULTIPLIER, 1.0)) for name, (_, group) in held.items()}
            return sum(_same(row.lr, said[name]) for name, row in rows.items())

        return max(found, key=fitting)

    def _see(self, name: str, module: MuReadout, inputs: Any, output: torch.Tensor) -> None:
        """One call of a readout; what is not understood is not judged."""
        seen = self._readouts.get(name)
        if seen is None or len(seen) >= _CALLS or isinstance(module.weight, DTensor):
            return
        with torch.no_grad(), contextlib.suppress(Exception):
            rows = inputs[0].detach().flatten(0, -2)[:_ROWS].to(output.dtype).double()
            found = output.detach().flatten(0, -2)[:_ROWS]
            bias = 0.0 if module.bias is None else module.bias.detach().double()
            reference = F.linear(rows, module.weight.detach().to(output.dtype).double())
            measured = multiple(found.double() - bias, reference, rounded=found)
            seen.append((module.output_mult * float(_forward(module)), measured))


def _moments_of(state: Mapping[str, Any]) -> list[torch.Tensor]:
    return [state[kind] for kind in MOMENTS if torch.is_tensor(state.get(kind))]


def _coarsest(tensors: Iterable[torch.Tensor]) -> float:
    return max((torch.finfo(each.dtype).eps for each in tensors), default=0.0)


def _forward(module: MuReadout) -> float:
    """A of a readout, from its weight's infinite shape; the module's own note where a tracer has taken that away."""
    infshape = getattr(module.weight, "infshape", None)
    return 1.0 / module.width_mult() if infshape is None else float(infshape.readout.forward)


def _multipliers(rule: formulas.UpdateRule, parameter: torch.nn.Parameter, group: Group) -> _Multipliers:
    infshape = getattr(parameter, "infshape", None)
    if infshape is None or (MULTIPLIER in group and SOURCE not in group):  # of another model's, or by other rules
        return _Multipliers(float(group.get(MULTIPLIER, 1.0)), None, None)
    ratios, own = infshape.ratios, infshape.per_tensor or PerTensor()
    lr = formulas.learning_rate(rule, m_in=ratios.m_in, m_out=ratios.m_out, forward=ratios.forward)
    decay = float(formulas.weight_decay("independent", lr)) * own.weight_decay if SOURCE in group else None
    # MuAdam leaves epsilon alone, as microsoft/mup does.
    eps = float(formulas.epsilon(m_out=ratios.m_out, forward=ratios.forward)) if group.get(SCALES_EPS) else 1.0
    return _Multipliers(float(lr) * own.lr, decay, eps if SCALES_EPS in group else None)


def _expected(
    held: Mapping[str, tuple[torch.nn.Parameter, Group]], rows: Mapping[str, _Multipliers], defaults: Group
) -> dict[str, dict[str, float]]:
    """What each tensor's group should hold: its multiplier times the base value, each source's own.

    A base value is the optimizer's default where any group agrees with that, as a schedule moves rates alone; otherwise
    the one that the middle tensor has.
    """
    expected: dict[str, dict[str, float]] = {name: {} for name in held}
    for source in {group.get(SOURCE) for _, group in held.values()}:
        names = [name for name, (_, group) in held.items() if group.get(SOURCE) == source]
        for quantity in _NAMES:
            factors = {name: getattr(rows[name], quantity) for name in names if quantity in held[name][1]}
            factors = {name: factor for name, factor in factors.items() if factor is not None}
            bases = [float(held[name][1][quantity]) / factor for name, factor in factors.items() if factor]
            base, default = statistics.median_low(bases or [0.0]), float(defaults.get(quantity) or 0.0)
            if quantity != "lr" and any(_same(default, each) for each in bases):
                base = default
            for name, factor in factors.items():
                expected[name][quantity] = base * factor
    return expected


def _same(expected: float, found: float) -> bool:
    return abs(found - expected) <= _AGREES * abs(expected)


def _decay(group: Group) -> float:
    return float(group.get("weight_decay", 0.0))


def _finding(name: str, quantity: str, expected: float, found: float, within: str) -> Finding:
    return Finding(
        tensor=name, quantity=quantity, expected=expected, found=found, within=within, right=_same(expected, found)
    )


def _judged_readout(name: str, calls: Sequence[tuple[float, Measured]]) -> Iterator[Finding]:
    """Of the calls that tell something, the one that is the farthest off."""
    told = [
        (abs(measured.found - expected) - ERROR * abs(expected) - 2 * measured.noise, expected, measured)
        for expected, measured in calls
        if measured.found == measured.found and measured.noise < 0.1 * abs(measured.found) and measured.strange < 0.05
    ]
    for off, expected, measured in sorted(told, key=lambda each: each[0])[-1:]:
        yield Finding(
            tensor=name,
            quantity="readout multiplier",
            expected=expected,
            found=measured.found,
            within=f"{ERROR * abs(expected) + 2 * measured.noise:.3g}",
            right=off <= 0,
            of="module",
        )
