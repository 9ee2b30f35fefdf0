"""Asks of one run what its tensors have. Public names: `Auditor`, `Door`, `Group`.

A door hands over how it holds tensors and groups; the questions are the same behind all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from megatron.core import parallel_state
from megatron.core.models.common.language_module.language_module import LanguageModule
from torch.distributed.tensor import DTensor

from mup_megatron.audit.at_work import AtWork
from mup_megatron.audit.findings import Audit, Finding
from mup_megatron.audit.initial import NOT_THE_SEEDS, copies, initial_values
from mup_megatron.audit.matrices import ERROR_OF_SOAP, Orthogonal, muon_direction, soap_direction
from mup_megatron.audit.sums import over_ranks, share_of
from mup_megatron.audit.update import ERROR, WEIGHT, Rates, Sample, expected_update, judged_update, share_of_update
from mup_megatron.model.init import local_rows
from mup_megatron.parallel.layout import Layout
from mup_megatron.rules.table import Parametrization, TensorHyperparameters

_RATE = 1e-6
"""Relative, of what a group says: some optimizers keep it in float32."""

Group = Mapping[str, Any]
"""A group of the optimizer at hand, with `lr`, and `eps`, `weight_decay`, `betas` where it has them."""


@dataclass(frozen=True, kw_only=True)
class Door:
    """How a run holds its tensors.

    Args:
        chunks: this rank's part of the model.
        named: this rank's parameters by global name, in an order that ranks which step one tensor together share.
        gather: this rank's whole slice of a parameter and of its optimizer state by kind; may be collective.
        groups: the optimizer's groups that hold a parameter, which is one if all is well; None where this rank does not
            know, since another one steps the parameter.
        optimizers: of torch's kind, that step on this rank.
    """

    chunks: Sequence[LanguageModule]
    named: Sequence[tuple[str, torch.nn.Parameter]]
    gather: Callable[[torch.nn.Parameter], dict[str, torch.Tensor]]
    groups: Callable[[torch.nn.Parameter], Sequence[Group] | None]
    optimizers: Sequence[Any]


class Auditor:
    """Asks a run at its first step.

    Args:
        door: how the run holds its tensors.
        table: of the run.
        layout: how ranks split the model.
        betas: of the optimizer.
        decoupled: whether Adam's weight decay is not part of the gradient.
        device: where ranks exchange.
    """

    def __init__(
        self,
        door: Door,
        table: Parametrization,
        layout: Layout,
        *,
        betas: tuple[float, float],
        decoupled: bool,
        device: torch.device,
    ) -> None:
        self._door, self._table, self._layout = door, table, layout
        self._betas, self._decoupled, self._device = betas, decoupled, device
        self._given = (*betas, table.config.optimizer.momentum)
        self._samples: list[Sample] = []
        self._at_work: AtWork | None = None
        self._fresh = 0  # updates done when the optimizer had no averages yet
        self._orthogonal = next(filter(None, map(Orthogonal.of, door.optimizers)), None)
        self.audit = Audit()

    def ask_initial_values(self, *, may_be_given: bool = False) -> None:
        """Before the first step of a run that begins. Collective.

        Args:
            may_be_given: whether somebody may have put weights into the model before. Then no tensor has the seed's.
        """
        found = list(initial_values(self._door.named, self._weight, self._table, self._layout, self._device))
        drawn = [finding for finding in found if finding.quantity == NOT_THE_SEEDS]
        if may_be_given and drawn and not any(finding.right for finding in drawn):
            self.audit.unseen.append("initial values, for the weights were given before the optimizer was made")
        else:
            self.audit.add(found)

    def watch_multipliers(self) -> None:
        """From now on, forward passes are looked at."""
        self._at_work = AtWork(self._door.chunks, self._table)

    def ask_multipliers(self) -> None:
        """After forward passes that were looked at: what they multiply with is the table's. Collective."""
        if self._at_work is None:
            return
        self._at_work.close()
        findings, unseen = self._at_work.findings()
        self._at_work = None
        self.audit.add(findings)
        self.audit.unseen += unseen

    def _weight(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """What the forward pass takes, where this rank has it whole; otherwise what is put together."""
        if parameter.numel() and not isinstance(parameter, DTensor):
            return parameter.detach()
        return self._master(parameter)

    def _master(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        return self._door.gather(parameter)[WEIGHT]

    def begin_step(self, done: int) -> None:
        """Before a step: keeps a few elements of every tensor. Collective.

        Args:
            done: updates of the run; an optimizer of another name than the last one's may have made none of them.
        """
        self._samples = [Sample.of(self._door.gather(parameter)) for _, parameter in self._door.named]
        averages = [value for sample in self._samples for kind, value in sample.values.items() if kind != WEIGHT]
        held = {"": [float(sum(int(value.count_nonzero()) for value in averages))]}
        if not over_ranks(held, [""], 1, self._device)[""][0]:
            self._fresh = done

    def ask_groups(self, rates: Rates | None = None) -> Rates:
        """After a step: every trainable tensor is in one group, and that has what the table says. Collective.

        Args:
            rates: of the step; those that most groups have where nobody else knows them. At 0 nothing is asked.

        Returns:
            The rates.
        """
        rank = torch.distributed.get_rank()
        held: dict[str, list[float]] = {}
        for name, parameter in self._door.named:
            row = self._table.tensors[name]
            share = share_of(name, row.shape.spec, self._layout, rank)
            groups = self._door.groups(parameter)
            if share and groups is not None:
                numbers = [1.0, float(len(groups)), *(_said(groups[0]) if groups else [math.nan] * len(_SAID))]
                held[name] = [share * number for number in numbers]
        means = {
            name: [number / known if known else math.nan for number in numbers]
            for name, (known, *numbers) in over_ranks(
                held, list(self._table.tensors), 2 + len(_SAID), self._device
            ).items()
        }
        rates = self._rates_of_most(means) if rates is None else rates
        for name, numbers in means.items() if rates.lr else ():
            self.audit.add(_judged_group(name, self._table.tensors[name], numbers, rates, self._given))
        return rates

    def _rates_of_most(self, groups: Mapping[str, Sequence[float]]) -> Rates:
        """The factors between the table and what groups say that half of the tensors are not above."""

        def factor(quantity: str, *, decoupled: tuple[bool, ...] = (False, True)) -> float | None:
            at, rows = 1 + _SAID.index(quantity), self._table.tensors
            asked = {name: getattr(row, quantity) for name, row in rows.items() if row.group.decoupled in decoupled}
            ratios = [groups[name][at] / expected for name, expected in asked.items() if expected]
            known = sorted(ratio for ratio in ratios if not math.isnan(ratio))
            return known[len(known) // 2] if known else None

        rate, decay, decoupled = (
            factor("lr", decoupled=(False,)),
            factor("weight_decay"),
            factor("lr", decoupled=(True,)),
        )
        return Rates(1.0 if rate is None else rate, 1.0 if decay is None else decay, decoupled)

    def end_step(self, rates: Rates, done: int) -> None:
        """After the step: every tensor moved as the table has it, on all ranks alike. Collective.

        Args:
            rates: of the step.
            done: updates of the run, this one among them.
        """
        rank = torch.distributed.get_rank()
        sums: dict[str, list[float]] = {}
        for (name, parameter), sample in zip(self._door.named, self._samples, strict=True):
            row = self._table.tensors[name]
            whole = self._door.gather(parameter)
            after = sample.taken(whole)
            direction = self._direction(parameter, row, whole, done)
            if row.shape.spec.frozen:
                expected: torch.Tensor | None = torch.zeros_like(after[WEIGHT])
            else:
                expected = expected_update(
                    row.group.update_rule,
                    sample.values,
                    after,
                    lr=rates.rate(row),
                    eps=row.eps or 0.0,
                    decay=row.weight_decay * rates.weight_decay * self._decoupled,
                    betas=self._betas,
                    updates=done - self._fresh,
                    direction=None if direction is None else direction.flatten()[sample.places].double(),
                )
            if expected is None:
                continue
            reached = sum(float(value.count_nonzero()) for kind, value in whole.items() if kind != WEIGHT)
            broken = float((~after[WEIGHT].isfinite()).sum())
            numbers = share_of_update(expected, sample.values[WEIGHT], after[WEIGHT], error=self._error(row))
            share = share_of(name, row.shape.spec, self._layout, rank)
            sums[name] = [share, *(share * number for number in (broken, reached, *numbers))]
        self._samples = []
        found = over_ranks(sums, list(self._table.tensors), 7, self._device)
        if any(broken for _, broken, *_ in found.values()):
            self.audit.unseen.append("updates, for the first step has left weights that are no numbers")
            return
        for name, (known, _, reached, *means) in found.items():
            if not known:
                self.audit.unseen.append(f"update of {name}")
                continue
            self.audit.add([judged_update(name, means, self._error(self._table.tensors[name]))])
            if not (reached or self._may_stand(name)):
                self.audit.add([_still(name)])
        # The optimizer's own weights: what the forward pass takes may be gathered when it begins.
        self.audit.add(copies(self._door.named, self._master, self._table, self._layout, self._device))

    def _direction(
        self, parameter: torch.nn.Parameter, row: TensorHyperparameters, held: Mapping[str, torch.Tensor], done: int
    ) -> torch.Tensor | None:
        """Of Muon's or SOAP's step of a matrix, what the rate multiplies; None where this rank does not know."""
        spec, rule = row.shape.spec, row.group.update_rule
        if rule == "soap":
            return soap_direction(held, eps=row.eps or 0.0, betas=self._betas, updates=done - self._fresh)
        gradient = getattr(parameter, "main_param", parameter).grad  # as the optimizer had it, where this rank steps
        if rule != "muon" or self._orthogonal is None or gradient is None:
            return None
        blocks, (own, slices) = None, self._layout.slice_of(spec, torch.distributed.get_rank())
        if getattr(parameter, "is_qkv", False):  # of all fused matrices, this one alone is taken apart
            numbers = {block: float(number) for number, block in enumerate(row.init_std)}
            blocks = local_rows(spec, numbers, own, slices, gradient.device)
        group = (
            parallel_state.get_expert_tensor_parallel_group()
            if spec.expert
            else parallel_state.get_tensor_model_parallel_group()
        )
        dimension = spec.partition_dim if slices > 1 else None
        return muon_direction(
            held["momentum_buffer"],
            gradient.float(),
            self._orthogonal,
            momentum=self._given[2],
            blocks=blocks,
            dimension=dimension,
            group=group,
        )

    def _error(self, row: TensorHyperparameters) -> float:
        """Share of its update by which a tensor may be off."""
        rule = row.group.update_rule
        if rule == "soap":
            return ERROR_OF_SOAP
        return self._orthogonal.error if self._orthogonal and rule == "muon" else ERROR

    def _may_stand(self, name: str) -> bool:
        """Whether no gradient need have come to a tensor in the first step."""
        config = self._table.config.parametrization
        zero = config.zero_init_readout or config.zero_init_query
        return zero or self._table.tensors[name].shape.spec.expert or self._table.may_stand(name)


def _still(name: str) -> Finding:
    return Finding(tensor=name, quantity="gradient", expected=None, found=0.0, within="any but 0", right=False)


_SAID = ("lr", "eps", "weight_decay", "first beta", "second beta", "momentum")


def _said(group: Group) -> list[float]:
    """What a group says; NaN where it says nothing."""
    betas = group.get("betas", (math.nan, math.nan))
    lr, eps, decay, momentum = (float(group.get(name, math.nan)) for name in ("lr", "eps", "weight_decay", "momentum"))
    return [lr, eps, decay, *map(float, betas), momentum]


def _judged_group(
    name: str,
    row: TensorHyperparameters,
    found: Sequence[float],
    rates: Rates,
    given: tuple[float, float, float],
) -> list[Finding]:
    """What the optimizer's group of a tensor says, against the table, and against the config's betas and momentum."""
    count, *said = found
    expected_count = 0.0 if row.shape.spec.frozen else 1.0
    findings = [
        Finding(
            tensor=name,
            quantity="optimizer groups that hold it",
            expected=expected_count,
            found=count,
            within="exactly",
            right=abs(count - expected_count) < 1e-9,
        )
    ]
    if row.shape.spec.frozen or not findings[0].right:
        return findings
    *betas, momentum = given
    momenta = momentum if row.group.update_rule in ("sgd", "muon") else None
    expected = (rates.rate(row), row.eps, row.weight_decay * rates.weight_decay, *betas, momenta)
    for quantity, value, there in zip(_SAID, expected, said, strict=True):
        if value is None or (math.isnan(there) and quantity not in ("lr", "weight_decay")):
            continue  # an optimizer without an epsilon, without betas, or without a momentum
        findings.append(
            Finding(
                tensor=name,
                quantity={"lr": "learning rate", "eps": "epsilon", "weight_decay": "weight decay"}.get(
                    quantity, quantity
                ),
                expected=value,
                found=there,
                within=f"{_RATE:g} of it",
                right=abs(there - value) <= _RATE * abs(value),
            )
        )
    return findings
