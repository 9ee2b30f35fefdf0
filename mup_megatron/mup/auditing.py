"""The audit of a plain torch model's first step: groups, updates and readouts against its infinite shapes.

Public names: `audit`, `ModelAudit`, `steps_of`. What is asked is what the optimizer's groups hold and what its step
did, on this rank; nothing is read from what somebody asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor

from mup_megatron.audit.findings import Audit
from mup_megatron.audit.first_steps import FirstSteps
from mup_megatron.audit.update import (
    ERROR,
    WEIGHT,
    Rates,
    Sample,
    expected_update,
    judged_update,
    share_of_update,
)
from mup_megatron.mup.audited_groups import AGREES, NAMES, Group, compared, decay_of, expected_values
from mup_megatron.mup.audited_readouts import Readouts
from mup_megatron.mup.foreign import has_known_layer, is_computed
from mup_megatron.mup.infshape import InfShape
from mup_megatron.mup.optim import MULTIPLIER, check_decay
from mup_megatron.mup.parameters import clean_names
from mup_megatron.rules import formulas
from mup_megatron.util.errors import UserError

Action = Literal["stop", "warn", "off"]

_GRADIENT = "gradient"
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""Of torch's names, what an update is recomputed from."""
_UPDATES: dict[str, formulas.UpdateRule] = {
    **dict.fromkeys(("Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam"), "adam"),
    **dict.fromkeys(("Lion", "FusedLion", "DeepSpeedCPULion"), "lion"),
    "SGD": "sgd",
}
"""Classes of optimizers whose updates are recomputed, by name: Apex's and DeepSpeed's need not be importable."""


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
        optimizer: steps it; one of `MuAdam`, `MuAdamW`, `MuSGD`, or split by `split_in_place`; or what
            `accelerator.prepare` made of one.
        parameters: of the model, that this optimizer is to step; None takes all that require a gradient.
        action: `stop` raises UserError from the step where something is wrong, before a second step; `warn` says it;
            `off` does nothing.
        say: takes a line for the screen, on the first rank.

    Returns:
        What is found, which is empty until the first step is done.

    Raises:
        UserError: an optimizer of Adam's kind adds a weight decay to the gradient; or no parameter has an infinite
            shape, and no group a multiplier.
    """
    while not hasattr(optimizer, "_optimizer_step_pre_hooks") and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer  # Accelerate's is none of torch's but by name
    questions = ModelAudit(model, optimizer, parameters)
    if action != "off":
        check_decay(optimizer)
        questions.check_shapes()
        # GradScaler has a fused optimizer step on gradients that are no numbers, which then changes nothing.
        steps = first_steps(
            questions,
            optimizer,
            action=action,
            say=say,
            took=lambda: questions.has_gradient() and not float(getattr(optimizer, "found_inf", 0) or 0),
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
        self._wanted = None if parameters is None else set(map(id, parameters))
        self._model, self._optimizer = model, optimizer
        self._gather, self._groups = (
            gather or self._held,
            groups or (lambda parameter: self._by_id.get(id(parameter), [])),
        )
        self._samples: list[tuple[str, torch.nn.Parameter, Sample]] = []
        self._expected: dict[str, dict[str, float]] = {}
        self._by_id: dict[int, list[Group]] = {}
        self.audit = Audit()
        self._readouts = Readouts(model, self.audit)
        self.ask_multipliers = self._readouts.ask

    @property
    def _named(self) -> list[tuple[str, torch.nn.Parameter]]:
        """The model's parameters as they are now, for `fully_shard` and others put new ones in the place of the old."""
        clean = clean_names(name for name, _ in self._model.named_parameters())
        return [
            (clean[name], each)
            for name, each in self._model.named_parameters()
            if (each.requires_grad if self._wanted is None else id(each) in self._wanted)
        ]

    def watch_multipliers(self) -> None:
        """Looks at calls of readouts from now on, and notes what nothing tells of a plain model."""
        self._readouts.watch()
        for name, module in self._model.named_modules():
            own = [each for each in module.parameters() if _infshape(each) is not None]
            grows = any(each.infshape.ninf() for each in own)
            label = clean_names([f"{name}."])[f"{name}."].removesuffix(".")
            if is_computed(module) and grows:
                self.audit.unseen.append(f"rules of {label}, whose weight is computed")
            elif isinstance(module, torch.nn.MultiheadAttention) and grows:
                self.audit.unseen.append(f"softmax scale of {label}")
        owners = {id(each): module for module in self._model.modules() for each in module.parameters(recurse=False)}
        for name, parameter in self._named:
            infshape = _infshape(parameter)
            if infshape is not None and not has_known_layer(owners[id(parameter)], infshape):
                self.audit.assumed.append(name)

    def check_shapes(self) -> None:
        """Refuses a model and an optimizer that say nothing to hold a step against.

        Raises:
            UserError: no parameter has an infinite shape, and no group a multiplier.
        """
        split = any(MULTIPLIER in group for group in self._optimizer.param_groups)
        if not split and all(_infshape(parameter) is None for _, parameter in self._named):
            raise UserError(
                "audit: no parameter that is trained has an infinite shape, so there is no rule to hold a step "
                "against; call mup_megatron.mup.set_base_shapes on the model first"
            )

    def has_gradient(self) -> bool:
        """Whether a step has anything to follow: a gradient of the model's, or of what the optimizer holds."""
        held = (each for group in self._optimizer.param_groups for each in group["params"])
        return any(each.grad is not None for each in (*(each for _, each in self._named), *held))

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
            compared(name, "optimizer groups that hold it", 1.0, float(len(groups)), "exactly")
            for name, (_, groups) in held.items()
        ]
        one = {name: (parameter, groups[0]) for name, (parameter, groups) in held.items() if len(groups) == 1}
        self._expected = expected_values(one, self._optimizer)
        rates = [expected.get("lr", 0.0) for expected in self._expected.values()]
        if not one:  # an optimizer of other tensors, such as those of before `fully_shard`
            rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        rate = max(rates, default=0.0)
        if rate:  # otherwise nothing moves yet, and nothing is told apart
            self.audit.add(counts)
            for name, expected in self._expected.items():
                for quantity, value in expected.items():
                    found = float(one[name][1][quantity])
                    self.audit.add([compared(name, NAMES[quantity], value, found, f"{AGREES:g} of it")])
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
        rule, lr, decay = _UPDATES.get(type(self._optimizer).__name__), float(group["lr"]), decay_of(group)
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
            decay=decay,
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


def _infshape(parameter: torch.nn.Parameter) -> InfShape | None:
    found: InfShape | None = getattr(parameter, "infshape", None)
    return found


def _moments_of(state: Mapping[str, Any]) -> list[torch.Tensor]:
    return [state[kind] for kind in MOMENTS if torch.is_tensor(state.get(kind))]


def _coarsest(tensors: Iterable[torch.Tensor]) -> float:
    return max((torch.finfo(each.dtype).eps for each in tensors), default=0.0)
