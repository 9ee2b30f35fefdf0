"""What the readouts of a plain torch model multiply with, seen at work. Public name: `Readouts`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from mup_megatron.audit.findings import Audit, Finding
from mup_megatron.audit.multiple import Measured, multiple
from mup_megatron.audit.update import ERROR
from mup_megatron.mup.layer import MuReadout
from mup_megatron.mup.parameters import clean_names

_CALLS, _ROWS = 4, 32
"""Calls of a readout that are looked at, and rows of each."""


class Readouts:
    """Looks at a few calls of every readout of a model.

    Args:
        model: to be trained.
        audit: takes what is found.
    """

    def __init__(self, model: torch.nn.Module, audit: Audit) -> None:
        self._model, self._audit = model, audit
        self._calls: dict[str, list[tuple[float, Measured]]] = {}
        self._handles: list[Any] = []

    def watch(self) -> None:
        """From now on, calls of readouts are looked at; not of compiled models, which hooks would compile again."""
        modules = dict(self._model.named_modules())
        compiled = any(hasattr(each, "_orig_mod") or each._compiled_call_impl is not None for each in modules.values())
        for name, module in modules.items():
            if not isinstance(module, MuReadout):
                continue
            if compiled:
                self._audit.unseen.append(f"multiplier of {name}, which is compiled")
                continue
            self._calls[name] = []
            # Before ZeRO 3's own hook takes the weight away again.
            hook = module.register_forward_hook(_Look(functools.partial(self._see, name)), prepend=True)
            self._handles.append(hook)

    def ask(self) -> None:
        """What the readouts that were looked at multiply with."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        clean = clean_names(f"{name}." for name in self._calls)
        for name, calls in self._calls.items():
            told = [(expected, Measured(*map(float, measured))) for expected, measured in calls]
            label = clean[f"{name}."].removesuffix(".")
            found = list(_judged_readout(label, told))
            self._audit.add(found)
            self._audit.unseen += [] if found else [f"multiplier of {label}"]
        self._calls.clear()

    def _see(self, name: str, module: MuReadout, inputs: Any, output: torch.Tensor) -> None:
        """One call of a readout; what is not understood is not judged."""
        seen = self._calls.get(name)
        if seen is None or len(seen) >= _CALLS or isinstance(module.weight, DTensor):
            return
        with torch.no_grad(), contextlib.suppress(Exception):
            rows = inputs[0].detach().flatten(0, -2)[:_ROWS].to(output.dtype).double()
            found = output.detach().flatten(0, -2)[:_ROWS]
            bias = 0.0 if module.bias is None else module.bias.detach().double()
            reference = F.linear(rows, module.weight.detach().to(output.dtype).double())
            measured = multiple(found.double() - bias, reference, rounded=found)
            seen.append((module.output_mult * float(_forward(module)), measured))


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


def _forward(module: MuReadout) -> float:
    """A of a readout, from its weight's infinite shape; the module's own note where a tracer has taken that away."""
    infshape = getattr(module.weight, "infshape", None)
    return 1.0 / module.width_mult() if infshape is None else float(infshape.readout.forward)


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
