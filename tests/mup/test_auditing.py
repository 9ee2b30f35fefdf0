"""The audit of a plain torch model's first step: healthy runs are right, and every planted fault is named by tensor."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from mup_megatron import mup
from mup_megatron.audit.findings import Audit
from mup_megatron.mup.in_place import split_in_place
from mup_megatron.util.errors import UserError
from tests.helpers import torch_bodies as bodies
from tests.helpers.distributed import Ranks
from tests.helpers.plain_faults import FAULTS, PlainFault, one_group_each
from tests.helpers.torch_bodies import DECAY, EPS, LR

pytestmark = pytest.mark.usefixtures("one_thread")

ADAMW: dict[str, Any] = {"lr": LR, "weight_decay": DECAY, "eps": EPS}
TENSORS = 9  # of bodies.Model: embedding, two weights and biases, gain and bias of the norm, readout's two


def split(kind: Any, **keys: Any) -> Callable[[Any], Any]:
    """An optimizer of torch's, split in place."""

    def make(net: Any) -> Any:
        optimizer = kind(net.parameters(), **keys)
        split_in_place(net, optimizer)
        return optimizer

    return make


def mu(kind: Any, **keys: Any) -> Callable[[Any], Any]:
    return lambda net: kind(net.parameters(), **keys)


def two_groups(net: Any) -> Any:
    """Another rate for matrices, and no decay of vectors, as users write it."""
    matrices = [p for p in net.parameters() if p.dim() > 1]
    vectors = [p for p in net.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "lr": 2 * LR}, {"params": vectors, "weight_decay": 0.0}]
    return mup.MuAdamW(groups, lr=LR, weight_decay=DECAY)


HEALTHY: dict[str, tuple[Callable[[Any], Any], int]] = {
    "AdamW": (split(torch.optim.AdamW, **ADAMW), 0),
    "MuAdamW": (mu(mup.MuAdamW, **ADAMW), 0),
    "Adam": (split(torch.optim.Adam, lr=LR, eps=EPS), 0),
    "AdamW, maximizing": (split(torch.optim.AdamW, maximize=True, **ADAMW), 0),
    "AdamW, one tensor after the other": (split(torch.optim.AdamW, foreach=False, **ADAMW), 0),
    "AdamW, fused": (split(torch.optim.AdamW, fused=True, **ADAMW), 0),
    "AdamW, betas": (split(torch.optim.AdamW, betas=(0.8, 0.7), **ADAMW), 0),
    "AMSGrad": (split(torch.optim.AdamW, amsgrad=True, **ADAMW), TENSORS),
    "RMSprop": (split(torch.optim.RMSprop, lr=LR), TENSORS),
    "SGD": (mu(mup.MuSGD, lr=LR), 0),
    "SGD with decay": (mu(mup.MuSGD, lr=LR, weight_decay=DECAY), 0),
    "SGD with momentum": (mu(mup.MuSGD, lr=LR, momentum=0.9, weight_decay=DECAY), 0),
    "SGD with Nesterov's": (mu(mup.MuSGD, lr=LR, momentum=0.9, nesterov=True), TENSORS),
    "two groups": (two_groups, 0),
    "per tensor": (
        lambda net: (
            mup.set_per_tensor(net, {"embedding": {"lr": 4.0}, "hidden": {"weight_decay": 0.0}})
            and mup.MuAdamW(net.parameters(), **ADAMW)
        ),
        0,
    ),
}


def audited(net: Any, optimizer: Any, steps: int = 3, **keys: Any) -> tuple[Audit, list[str]]:
    said: list[str] = []
    found = mup.audit(net, optimizer, say=said.append, **keys)
    bodies.train(net, optimizer, steps)
    return found, said


@pytest.mark.parametrize("how", HEALTHY)
def test_a_healthy_run_is_right(how: str) -> None:
    make, unseen = HEALTHY[how]
    net = bodies.model()
    found, said = audited(net, make(net))
    not_seen = f" ({unseen} not seen)" if unseen else ""
    assert said == [f"audit: {TENSORS} tensors, {TENSORS} right; 1 multipliers, 1 right{not_seen}"]
    assert len({finding.tensor for finding in found.findings if finding.quantity == "update over the table's"}) == (
        TENSORS - unseen
    )
    (readout,) = [finding for finding in found.findings if finding.of == "module"]
    assert (readout.tensor, readout.expected) == ("readout", pytest.approx(2.0 / 4))  # output_mult over 32/8
    assert readout.found == pytest.approx(0.5, rel=1e-5)


def test_a_warm_up_from_nothing_and_a_scheduler() -> None:
    """Steps at a rate of 0 are not judged; rates that a schedule scales together are right."""
    net = bodies.model()
    optimizer = mup.MuAdamW(net.parameters(), **ADAMW)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: [0.0, 0.0, 0.5, 1.0][min(step, 3)])
    said: list[str] = []
    mup.audit(net, optimizer, say=said.append)
    lines = []
    for batch in bodies.batches(4):
        optimizer.zero_grad()
        bodies.loss_of(net, batch).backward()
        optimizer.step()
        schedule.step()
        lines.append(len(said))
    assert lines == [0, 0, 1, 1]
    assert f"{TENSORS} right" in said[0]


def test_a_run_that_goes_on() -> None:
    """An optimizer whose averages are of earlier steps."""
    net = bodies.model()
    optimizer = mup.MuAdamW(net.parameters(), **ADAMW)
    bodies.train(net, optimizer, 3)
    _, said = audited(net, optimizer)
    assert f"{TENSORS} right" in said[0]


def test_a_closure() -> None:
    """The gradient is there when the step is over, and was another one before."""
    for make in (mu(mup.MuSGD, lr=LR, weight_decay=DECAY), mu(mup.MuAdamW, **ADAMW)):
        net = bodies.model()
        optimizer = make(net)
        said: list[str] = []
        mup.audit(net, optimizer, say=said.append)
        for batch in bodies.batches(3):

            def closure(net: Any = net, optimizer: Any = optimizer, batch: Any = batch) -> Any:
                optimizer.zero_grad()
                loss = bodies.loss_of(net, batch)
                loss.backward()
                return loss

            optimizer.step(closure)
        assert said == [f"audit: {TENSORS} tensors, {TENSORS} right (1 not seen)"]  # the readout, called within


def test_a_step_that_a_scaler_leaves_out() -> None:
    """Of a fused optimizer, which is called on gradients that are no numbers too: the next step is looked at."""
    net = bodies.model()
    optimizer: Any = mup.MuAdamW(net.parameters(), fused=True, **ADAMW)
    said: list[str] = []
    mup.audit(net, optimizer, say=said.append)
    for number, batch in enumerate(bodies.batches(3)):
        optimizer.zero_grad()
        bodies.loss_of(net, batch).backward()
        optimizer.found_inf = torch.tensor(float(number == 0))
        optimizer.step()
        assert len(said) == min(number, 1)
    assert f"{TENSORS} right" in said[0]


def test_an_optimizer_that_is_not_in_mup() -> None:
    """torch's own AdamW, of a model that has base shapes: the commonest mistake."""
    net = bodies.model()
    found, said = audited(net, torch.optim.AdamW(net.parameters(), lr=LR), action="warn")
    assert {finding.tensor for finding in found.wrong} == {"fc1.weight", "fc2.weight"}
    assert "fc1.weight: learning rate 0.01, expected 0.0025" in said[0]
    assert len(said) == 1  # and no second time for the same


def test_gradients_that_are_no_numbers() -> None:
    net = bodies.model()
    net.fc1.weight.register_hook(lambda gradient: gradient * math.nan)
    found, said = audited(net, mup.MuAdamW(net.parameters(), **ADAMW), steps=1, action="warn")
    assert "update of fc1.weight, which is no number" in found.unseen
    assert "update over the table's" not in {each.quantity for each in found.findings if each.tensor == "fc1.weight"}
    assert "(1 not seen)" in said[0]


def test_groups_of_an_older_checkpoint() -> None:
    """They do not say whether epsilon is scaled; it is not asked then."""
    net = bodies.model()
    optimizer = HEALTHY["AdamW"][0](net)
    for group in optimizer.param_groups:
        del group["scales_eps"]
    found, said = audited(net, optimizer)
    assert f"{TENSORS} right" in said[0]
    assert "epsilon" not in {finding.quantity for finding in found.findings}


def test_two_optimizers() -> None:
    """Of one model, each with its parameters."""
    net = bodies.model()
    said: list[str] = []
    own: list[Any] = [net.embedding.weight]
    rest = [parameter for parameter in net.parameters() if parameter is not net.embedding.weight]
    first, second = mup.MuSGD(own, lr=LR), mup.MuAdamW(rest, **ADAMW)
    mup.audit(net, first, parameters=own, say=said.append)
    mup.audit(net, second, parameters=rest, say=said.append)
    bodies.loss_of(net, bodies.batches(1)[0]).backward()
    first.step()
    second.step()
    assert said == [f"audit: {n} tensors, {n} right; 1 multipliers, 1 right" for n in (1, TENSORS - 1)]


def test_accelerates_optimizer_is_audited() -> None:
    """It is one of torch's by name alone, and its steps are those of the one that it holds."""
    accelerate: Any = pytest.importorskip("accelerate", reason="accelerate is not installed")
    net = bodies.model()
    prepared, optimizer = accelerate.Accelerator(cpu=True).prepare(net, mup.MuAdamW(net.parameters(), **ADAMW))
    said: list[str] = []
    mup.audit(prepared, optimizer, say=said.append)
    bodies.train(prepared, optimizer, 2)
    assert said == [f"audit: {TENSORS} tensors, {TENSORS} right; 1 multipliers, 1 right"]


def test_copies_of_the_model_do_not_look(tmp_path: Any) -> None:
    """An average of weights that is made before the first step, and is saved."""
    net = bodies.model()
    mup.audit(net, mup.MuAdamW(net.parameters(), **ADAMW), say=lambda line: None)
    copied = copy.deepcopy(net)
    torch.save(copied, tmp_path / "copy.pt")
    bodies.loss_of(copied, bodies.batches(1)[0])
    (hook,) = copied.readout._forward_hooks.values()
    assert hook._see is None


@pytest.mark.slow
def test_a_model_that_is_compiled_later() -> None:
    """The hook on the readout breaks no graph; the readout is not seen."""
    net = bodies.model()
    optimizer = mup.MuAdamW(net.parameters(), **ADAMW)
    said: list[str] = []
    mup.audit(net, optimizer, say=said.append)
    bodies.train(torch.compile(net, backend="aot_eager", fullgraph=True), optimizer, 3)
    assert said == [f"audit: {TENSORS} tensors, {TENSORS} right (1 not seen)"]


def test_half_precision() -> None:
    """Weights and averages in bfloat16 round each step."""
    net = bodies.model().bfloat16()
    found, said = audited(net, mup.MuAdamW(net.parameters(), **ADAMW))
    assert f"{TENSORS} right" in said[0]
    assert not found.unseen


def test_off_does_nothing() -> None:
    net = bodies.model()
    optimizer = mup.MuAdamW(net.parameters(), **ADAMW)
    found, said = audited(net, optimizer, action="off")
    assert said == []
    assert not found.findings


@pytest.mark.parametrize("how", ["ddp", "fully_shard", "tensor", pytest.param("compiled", marks=pytest.mark.slow)])
def test_a_model_that_ranks_share(ranks: Ranks, how: str) -> None:
    """Each rank looks at its part; hooks would compile a compiled model once more, so its readout is not seen."""
    first, second = ranks.run(2, bodies.split, how=how, steps=2, audits=True)
    readout = " (1 not seen)" if how == "compiled" else "; 1 multipliers, 1 right"
    assert first["said"] == [f"audit: {TENSORS} tensors, {TENSORS} right{readout}"]
    assert second["said"] == []


@pytest.mark.parametrize("kind", [mup.MuAdamW, mup.MuSGD])
def test_losses_are_the_same_to_the_bit(kind: Any) -> None:
    losses = []
    for action in ("off", "stop"):
        net = bodies.model()
        optimizer = kind(net.parameters(), lr=LR)
        mup.audit(net, optimizer, action=action, say=lambda line: None)
        losses.append(bodies.train(net, optimizer, 4))
    assert losses[0] == losses[1]


class Raw(nn.Module):
    """A head, an embedding and a matrix that are parameters of a module of its own, and attention of torch's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(bodies.CLASSES, width)
        self.attention = nn.MultiheadAttention(width, 2)
        self.positions = nn.Parameter(torch.zeros(bodies.LENGTH, width))
        self.head = nn.Parameter(torch.randn(bodies.CLASSES, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x) + self.positions
        return (x + self.attention(x, x, x)[0]) @ self.head.T


def test_what_only_their_own_code_tells_is_said() -> None:
    """A head that is a raw parameter has an embedding's rate; nothing of a plain model tells which of the two it is."""
    net = Raw(32)
    mup.set_base_shapes(net, Raw(8), delta=Raw(16))
    found, said = audited(net, mup.MuAdamW(net.parameters(), **ADAMW))
    assert found.assumed == ["positions", "head"]
    assert found.unseen == ["softmax scale of attention"]
    assert said == [
        "audit: 7 tensors, 7 right (1 not seen); read by their sizes alone, as their layers are not known: positions, "
        "head"
    ]
    known = bodies.model()
    assert audited(known, mup.MuAdamW(known.parameters(), **ADAMW))[0].assumed == []


def test_a_weight_that_is_computed_later_is_said() -> None:
    net = bodies.model()
    parametrizations.orthogonal(net.fc1)
    found, _ = audited(net, mup.MuAdamW(net.parameters(), **ADAMW))
    assert "rules of fc1, whose weight is computed" in found.unseen


def test_a_model_without_infinite_shapes_is_refused() -> None:
    """`set_base_shapes` was forgotten, or what is trained was added behind it: there is no rule to be right by."""
    net: Any = bodies.Model(32, 96, SimpleNamespace(MuReadout=lambda width, classes, output_mult: nn.Linear(width, 8)))
    sentence = "^audit: no parameter that is trained has an infinite shape.*call mup_megatron.mup.set_base_shapes"
    with pytest.raises(UserError, match=sentence):
        mup.audit(net, torch.optim.AdamW(net.parameters(), lr=LR))
    late = bodies.model().requires_grad_(False)
    late.adapter = nn.Linear(32, 4)
    with pytest.raises(UserError, match=sentence):
        mup.audit(late, torch.optim.AdamW(late.adapter.parameters(), lr=LR))
    mup.audit(net, torch.optim.AdamW(net.parameters(), lr=LR), action="off")


def test_a_step_without_gradients_is_not_judged() -> None:
    net = bodies.model()
    optimizer = mup.MuAdamW(net.parameters(), **ADAMW)
    said: list[str] = []
    mup.audit(net, optimizer, say=said.append)
    optimizer.step()
    assert said == []
    bodies.train(net, optimizer, 1)
    assert said == [f"audit: {TENSORS} tensors, {TENSORS} right (1 not seen)"]  # the readout, before the first step


def test_an_optimizer_of_another_copy() -> None:
    """It steps nothing of the model: every tensor is in no group, and that is said at the first step."""
    net = bodies.model()
    optimizer = mup.MuAdamW(copy.deepcopy(net).parameters(), **ADAMW)
    sentence = rf"^audit: {TENSORS} tensors, 0 right.*embedding\.weight: optimizer groups that hold"
    with pytest.raises(UserError, match=sentence):
        audited(net, optimizer, steps=1)


@pytest.mark.parametrize("before", [True, False])
def test_an_optimizer_of_before_the_model_was_sharded(ranks: Ranks, before: bool) -> None:
    """`fully_shard` puts other parameters in the place of those that the optimizer holds, also behind the audit."""
    assert ranks.run(2, bodies.stale_optimizer, before=before) == [f"{TENSORS} tensors, 0 right"] * 2


# --- planted ---


def group_with(optimizer: Any, net: Any, name: str) -> Any:
    parameter = dict(net.named_parameters())[name]
    (group,) = [group for group in optimizer.param_groups if any(each is parameter for each in group["params"])]
    return group


def taken(optimizer: Any, net: Any, name: str) -> Any:
    """A parameter, out of the group that it was in."""
    parameter = dict(net.named_parameters())[name]
    group = group_with(optimizer, net, name)
    group["params"] = [each for each in group["params"] if each is not parameter]
    return parameter


class Unknown(torch.optim.Optimizer):
    """A class that nobody here knows: it subtracts the gradient's sign."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * parameter.grad.sign()


@pytest.mark.parametrize("kind", [mup.MuAdam, mup.MuSGD])
def test_groups_of_an_optimizer_that_nobody_knows(kind: Any) -> None:
    """`impl=`: rates are held against the rule that fits, updates are not seen; a rate that is lost is named."""
    for factor in (1.0, 2.0):
        net = bodies.model()
        optimizer = kind(net.parameters(), impl=Unknown, lr=LR / 10)
        group_with(optimizer, net, "fc1.weight")["lr"] *= factor
        found, said = audited(net, optimizer, action="warn")
        assert len(found.unseen) == TENSORS
        assert {finding.tensor for finding in found.wrong} == ({"fc1.weight"} if factor == 2 else set())
    assert "fc1.weight: learning rate" in said[0]


def lost(net: Any, optimizer: Any) -> None:
    taken(optimizer, net, "norm.weight")


def twice(net: Any, optimizer: Any) -> None:
    group_with(optimizer, net, "fc1.weight")["params"].append(net.norm.weight)


def stopped(net: Any, optimizer: Any) -> None:
    group_with(optimizer, net, "fc2.weight")["lr"] = 0.0


def behind(change: Callable[[Any], Any]) -> Callable[[Any, Any], None]:
    """Something that happens within the optimizer's step."""

    def plant(net: Any, optimizer: Any) -> None:
        def hook(*_: Any) -> None:
            with torch.no_grad():
                change(net)

        optimizer.register_step_post_hook(hook)

    return plant


def one_rate(net: Any, optimizer: Any) -> None:
    """A schedule that sets the base's rate on every group, behind the first step."""

    def hook(*_: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = LR

    calls: list[int] = []

    def before(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            hook()

    optimizer.register_step_pre_hook(before)


def planted(named: dict[str, str], plant: Callable[[Any, Any], None]) -> PlainFault:
    return PlainFault(frozenset(named.items()), plant)


PLANTED = {
    **FAULTS,
    "a tensor in no group": planted({"norm.weight": "optimizer groups that hold it"}, lost),
    "a tensor in two groups": planted({"norm.weight": "optimizer groups that hold it"}, twice),
    "no rate": planted({"fc2.weight": "learning rate"}, stopped),
    "a tensor that is stepped twice as far": planted(
        {"fc2.weight": "update over the table's"}, behind(lambda net: net.fc2.weight.mul_(1.01))
    ),
    "a tensor that is put back": planted(
        {"embedding.weight": "update over the table's"},
        behind(lambda net: net.embedding.weight.copy_(bodies.model().embedding.weight)),
    ),
    "a schedule with one rate": planted({"fc1.weight": "learning rate", "fc2.weight": "learning rate"}, one_rate),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_named(fault: str) -> None:
    """By tensor and quantity, and no other tensor, before a second step."""
    named, plant = PLANTED[fault]
    for action in ("warn", "stop"):
        net = bodies.model()
        optimizer = torch.optim.AdamW(net.parameters(), **ADAMW)
        split_in_place(net, optimizer)
        one_group_each(net, optimizer)
        plant(net, optimizer)
        if action == "warn":
            found, said = audited(net, optimizer, steps=2, action="warn")
            assert said[-1].startswith("warning: audit: ")
            wrong = {(finding.tensor, finding.quantity) for finding in found.wrong}
            assert named <= wrong
            assert {tensor for tensor, _ in wrong} == {tensor for tensor, _ in named}
        else:
            with pytest.raises(UserError, match="audit: 9 tensors") as caught:
                audited(net, optimizer, steps=2)
            assert any(f"{tensor}: {quantity}" in str(caught.value) for tensor, quantity in named)
