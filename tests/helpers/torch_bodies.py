"""Plain torch models that carry infinite shapes, and what tests run with them on ranks."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
import torch.nn.functional as F
from torch import nn

from mup_megatron import mup
from mup_megatron.parallel.ranks import Rank
from mup_megatron.util.errors import UserError

CLASSES, LENGTH, BATCH = 16, 6, 8


class Model(nn.Module):
    """Embedding, a block that widens, norm, readout: input-like, hidden, output-like and vector-like tensors.

    Args:
        width: of the trunk; it grows.
        inner: of the block; it grows at a rate of its own.
        mu: where the readout comes from.
    """

    def __init__(self, width: int, inner: int, mu: Any = mup) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, width)
        self.fc1 = nn.Linear(width, inner)
        self.fc2 = nn.Linear(inner, width)
        self.norm = nn.LayerNorm(width)
        self.readout = mu.MuReadout(width, CLASSES, output_mult=2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        return self.readout(self.norm(x + self.fc2(F.relu(self.fc1(x)))))


def model(mu: Any = mup, seed: int = 0, width: int = 32, inner: int = 96) -> Model:
    """Width 32 over 8 and inner 96 over 32: ratios 4 and 3."""
    torch.manual_seed(seed)
    result = Model(width, inner, mu)
    mu.set_base_shapes(result, Model(8, 32, mu), delta=Model(16, 64, mu))
    return result


def batches(steps: int, rank: int = 0, world_size: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's part of each global batch: sequences, and a function of them to be learned."""
    generator = torch.Generator().manual_seed(7)
    result = []
    for _ in range(steps):
        x = torch.randint(CLASSES, (BATCH, LENGTH), generator=generator)
        own = slice(rank * BATCH // world_size, (rank + 1) * BATCH // world_size)
        result.append((x[own], (5 * x[own] + 3) % CLASSES))
    return result


def loss_of(forward: Callable[..., torch.Tensor], batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Cross entropy in nats per token."""
    return F.cross_entropy(forward(batch[0]).flatten(0, 1), batch[1].flatten())


def train(forward: Any, optimizer: Any, steps: int, rank: int = 0, world_size: int = 1) -> list[float]:
    """Losses averaged over ranks, before each step."""
    losses = []
    for batch in batches(steps, rank, world_size):
        loss = loss_of(forward, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(mean(loss))
    return losses


def mean(loss: torch.Tensor) -> float:
    """Over ranks, where there are any."""
    loss = loss.detach().clone()
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(loss)
        loss /= torch.distributed.get_world_size()
    return loss.item()


def group_of(optimizer: Any, named: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Rate and decay of every parameter, by name."""
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    return {name: (groups[id(p)]["lr"], groups[id(p)]["weight_decay"]) for name, p in named.items()}


def split(rank: Rank, *, how: str, steps: int = 6, mu: str = "ours", audits: bool = False) -> dict[str, Any]:
    """Trains the model split over the ranks; returns losses, the rates of each parameter and its infinite shape."""
    import deepspeed.comm
    import mup as microsofts

    deepspeed.comm.init_distributed(dist_backend="gloo", verbose=False)  # which the pool ends after each body
    source = mup if mu == "ours" else microsofts
    net: Any = model(source)
    forward: Any = net
    part = (rank.rank, rank.world_size)
    if how == "ddp":
        forward = net = nn.parallel.DistributedDataParallel(net)
    elif how == "fully_shard":
        _fully_shard(net)
    elif how == "fully_shard from meta":
        whole = net.state_dict()
        with torch.device("meta"):
            net = forward = Model(32, 96)
        source.set_base_shapes(net, Model(8, 32), delta=Model(16, 64), rescale_params=False)
        _fully_shard(net)
        net.to_empty(device="cpu")
        _load(net, whole)
    elif how == "tensor":
        _parallelize(net)
        part = (0, 1)
    elif how == "tensor, then shapes":
        whole = net.state_dict()
        net = forward = Model(32, 96)
        net.load_state_dict(whole)
        _parallelize(net)
        source.set_base_shapes(net, Model(8, 32), delta=Model(16, 64), rescale_params=False)
        part = (0, 1)
    elif how == "compiled":
        forward = torch.compile(net, backend="aot_eager", fullgraph=True)
    named = {name.removeprefix("module."): parameter for name, parameter in net.named_parameters()}
    optimizer = source.MuAdamW(net.parameters(), lr=1e-2, weight_decay=0.1)
    groups = group_of(optimizer, named)
    said: list[str] = []
    if audits:
        mup.audit(forward, optimizer, say=said.append)
    losses = train(forward, optimizer, steps, *part)
    named = {name.removeprefix("module."): parameter for name, parameter in net.named_parameters()}
    local = {name: tuple(getattr(p, "to_local", lambda p=p: p)().shape) for name, p in named.items()}
    shapes = {name: [tuple(dim) for dim in parameter.infshape] for name, parameter in named.items()}
    return {"losses": losses, "groups": groups, "infshapes": shapes, "local": local, "said": said}


def stale_optimizer(rank: Rank, *, before: bool) -> str:
    """What the audit says at the first step of an optimizer that holds the parameters of before `fully_shard`.

    Args:
        rank: this one.
        before: whether the audit too was called before.
    """
    net = model()
    optimizer = mup.MuAdamW(net.parameters(), lr=LR)
    if before:
        mup.audit(net, optimizer, say=print)
    _fully_shard(net)
    if not before:
        mup.audit(net, optimizer, say=print)
    loss_of(net, batches(1)[0]).backward()
    try:
        optimizer.step()
    except UserError as error:
        return str(error).removeprefix("audit: ").partition(";")[0]
    return "nothing"


def documented(rank: Rank, *, code: str, steps: int = 2) -> tuple[dict[str, tuple[float, float]], list[str]]:
    """Runs a sample of docs/torch.md that makes `model` and `optimizer` of a `Model`, and trains what it made.

    Returns:
        Mean and deviation of every tensor before the first step, and what the audit says.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    names: dict[str, Any] = {
        "torch": torch,
        "Model": lambda width: Model(width, 3 * width),
        "set_base_shapes": mup.set_base_shapes,
        "fully_shard": functools.partial(fully_shard, mesh=mesh),
        "init": mup.init,
        "MuAdamW": mup.MuAdamW,
    }
    torch.manual_seed(rank.rank)
    exec(code, names)  # noqa: S102  # of our own page
    whole = {name: parameter.full_tensor().detach() for name, parameter in names["model"].named_parameters()}
    said: list[str] = []
    mup.audit(names["model"], names["optimizer"], say=said.append)
    train(names["model"], names["optimizer"], steps, rank.rank, rank.world_size)
    return {name: (float(each.mean()), float(each.std(correction=0))) for name, each in whole.items()}, said


def _fully_shard(net: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for module in (net.fc1, net.fc2, net.readout):
        fully_shard(module, mesh=mesh)
    fully_shard(net, mesh=mesh)


def _load(net: nn.Module, whole: dict[str, torch.Tensor]) -> None:
    from torch.distributed.tensor import distribute_tensor

    for name, parameter in net.named_parameters():
        value = distribute_tensor(whole[name], parameter.device_mesh, parameter.placements)
        parameter.data.copy_(value)


def _parallelize(net: nn.Module) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    parallelize_module(net, mesh, {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()})


# --- mup_megatron.deepspeed.initialize ---

LR, DECAY, EPS = 1e-2, 0.1, 1e-6


def settings(stage: int, world_size: int, **more: Any) -> dict[str, Any]:
    """A DeepSpeed config; at stage 3 nothing is too small to be partitioned."""
    zero = {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})}
    result = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // world_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # which DeepSpeed makes 1.0 where it is not said
        "steps_per_print": 2**31,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
    }
    return {**result, **more}


ADAMW = {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY, "eps": EPS, "torch_adam": True}}


def given(how: str, net: Any, stage: int, world_size: int, more: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `initialize` for each way of naming an optimizer."""
    keys: dict[str, Any] = {"lr": LR, "weight_decay": DECAY, "eps": EPS}
    config = settings(stage, world_size, **more)
    if how == "optimizer":
        return {"optimizer": torch.optim.AdamW(net.parameters(), **keys), "config": config}
    if how == "function":
        return {"optimizer": lambda parameters: torch.optim.AdamW(parameters, **keys), "config": config}
    if how == "config":
        return {"config": {**config, "optimizer": ADAMW}}
    if how == "MuAdamW":
        return {"optimizer": mup.MuAdamW(net.parameters(), **keys), "config": config}
    if how == "config's MuAdamW":
        return {"config": {**config, "optimizer": {"type": "MuAdamW", "params": keys}}}
    raise ValueError(how)


def in_deepspeed(
    rank: Rank,
    *,
    stage: int,
    how: str = "optimizer",
    steps: int = 6,
    plain: bool = False,
    factors: dict[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Trains in a DeepSpeed engine; returns losses, first updates over rates, rates and epsilons at each step.

    `plain` takes DeepSpeed's own initialize, `factors` are of single tensors, and `more` goes into the config.
    """
    import deepspeed

    from mup_megatron.deepspeed import initialize

    net = model()
    mup.set_per_tensor(net, factors or {})
    names = [name for name, _ in net.named_parameters()]
    arguments = given(how, net, stage, rank.world_size, more)
    before = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    engine, _, loader, _ = (deepspeed.initialize if plain else initialize)(model=net, **arguments)
    assert loader is None
    losses, rates = [], []
    updates: dict[str, float] = {}
    for x, y in batches(steps, rank.rank, rank.world_size):
        loss = loss_of(engine, (x, y))
        losses.append(mean(loss))
        engine.backward(loss)
        rates.append([group["lr"] for group in engine.basic_optimizer.param_groups])
        engine.step()
        if not updates:
            updates = {
                name: (full(p) - before[name]).abs().max().item() for name, p in engine.module.named_parameters()
            }
    groups = [{k: v for k, v in group.items() if k != "params"} for group in engine.basic_optimizer.param_groups]
    engine.destroy()
    return {"losses": losses, "updates": updates, "rates": rates, "groups": groups, "names": names}


def resumed(rank: Rank, *, stage: int, folder: str) -> dict[str, Any]:
    """Trains two steps, saves by DeepSpeed's own means, and goes on in another engine; losses of both halves."""
    from mup_megatron.deepspeed import initialize

    losses, rates = [], []
    for half in range(2):
        net = model()
        engine, *_ = initialize(model=net, **given("config", net, stage, rank.world_size, {}))
        if half:
            engine.load_checkpoint(folder)
        for x, y in batches(4, rank.rank, rank.world_size)[2 * half : 2 * half + 2]:
            loss = loss_of(engine, (x, y))
            losses.append(mean(loss))
            engine.backward(loss)
            engine.step()
        rates.append(sorted({group["lr"] for group in engine.basic_optimizer.param_groups}))
        engine.save_checkpoint(folder)
        if half:
            del engine.basic_optimizer.param_groups[0]["lr_multiplier"]
            try:
                engine(x)
            except UserError as error:
                said = str(error)
        engine.destroy()
    return {"losses": losses, "rates": rates, "said": said}


def other_base(rank: Rank, *, stage: int, folder: str) -> list[Any]:
    """What loading a checkpoint, its weights alone or all, returns or says: with its own base shapes, with others."""
    from mup_megatron.deepspeed import initialize

    said: list[Any] = []
    for base in (8, 16):
        net = Model(32, 96)
        mup.set_base_shapes(net, Model(base, 32), delta=Model(2 * base, 64))
        engine, *_ = initialize(model=net, **given("config", net, stage, rank.world_size, {}))
        if base == 8:
            engine.save_checkpoint(folder, client_state={"mine": 7})
        for only in (True, False):
            try:
                state = engine.load_checkpoint(folder, load_module_only=only)[1]
                said.append(sorted({"mine", "mup_megatron_base_shapes"} & state.keys()))
            except UserError as error:
                said.append(str(error))
        engine.destroy()
    return said


def full(parameter: torch.Tensor) -> torch.Tensor:
    """The whole of a parameter that ZeRO 3 may have partitioned. Collective."""
    from deepspeed.utils import safe_get_full_fp32_param

    return safe_get_full_fp32_param(parameter) if hasattr(parameter, "ds_tensor") else parameter.detach()


def born_partitioned(rank: Rank, *, mu: str = "ours") -> dict[str, Any]:
    """Base shapes of a model that ZeRO 3 partitioned as it was built: global sizes, and weights as of the whole."""
    import deepspeed

    whole = model()
    deepspeed.comm.init_distributed(dist_backend="gloo", verbose=False)  # else zero.Init takes the world for one rank
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=settings(3, rank.world_size)):
        net = Model(32, 96)
    local = {name: tuple(parameter.shape) for name, parameter in net.named_parameters()}
    mup.set_base_shapes(net, Model(8, 32), delta=Model(16, 64))
    message = ""
    try:
        mup.init.normal_(net.fc1.weight)
    except UserError as error:
        message = str(error)
    equal = {}
    for (name, ours), (_, theirs) in zip(net.named_parameters(), whole.named_parameters(), strict=True):
        with deepspeed.zero.GatheredParameters(ours):
            equal[name] = torch.allclose(ours.detach(), theirs.detach(), rtol=1e-6)
    shapes = {name: [tuple(dim) for dim in parameter.infshape] for name, parameter in net.named_parameters()}
    said = {}
    for drawn in ("", "fc1 fc2", "readout"):
        with deepspeed.zero.Init(config_dict_or_path=settings(3, rank.world_size)):
            other = Model(32, 96)
        small = Model(8, 32)
        weights = [getattr(model, name).weight for name in drawn.split() for model in (other, small)]
        with deepspeed.zero.GatheredParameters(weights[::2], modifier_rank=0):
            for weight in weights:
                nn.init.normal_(weight, std=0.02)
        with warnings.catch_warnings(record=True) as came:
            warnings.simplefilter("always")
            mup.set_base_shapes(other, small, delta=Model(16, 64))
        said[drawn] = " ".join(str(one.message) for one in came if "initial values" in str(one.message))
    return {"local": local, "equal": equal, "infshapes": shapes, "message": message, "said": said}


def megatrons(rank: Rank, *, config: Any, mpu: bool = True, hooked: bool = False) -> dict[str, Any]:
    """megatron-core's model of the shims, split over the ranks, through `initialize`: rates, and losses of 3 steps."""
    from megatron.core import parallel_state

    from mup_megatron.data.batches import Batches, build_datasets
    from mup_megatron.data.prepare import prepare
    from mup_megatron.deepspeed import initialize
    from mup_megatron.engines.setup.deepspeed import deepspeed_config
    from mup_megatron.model.build import unsharded_model
    from mup_megatron.model.global_names import named_parameters
    from tests.helpers.bodies import start

    config, layout, parametrization, (net,) = start(rank, config)
    sizes = config.model.padded_vocab_size(prepare(config).vocab_size)
    base = config.model.resized(config.base.width)
    mup.set_base_shapes(
        net,
        unsharded_model(config, base, sizes),
        delta=unsharded_model(config, base.resized(config.base.enlarged()), sizes),
        rescale_params=False,
    )
    named = dict(named_parameters(net))
    if hooked:
        for parameter in net.parameters():
            parameter.register_hook(lambda gradient: gradient)
    decays = [[p for p in net.parameters() if (p.dim() > 1) is more] for more in (True, False)]
    groups: list[dict[str, Any]] = [{"params": decays[0]}, {"params": decays[1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups,
        lr=config.hparams.lr,
        betas=tuple(config.optimizer.betas),
        eps=config.optimizer.eps,
        weight_decay=config.hparams.weight_decay,
    )
    ds_config = deepspeed_config(config, layout)
    try:
        engine, *_ = initialize(model=net, optimizer=optimizer, mpu=parallel_state if mpu else None, config=ds_config)
    except UserError as error:
        return {"said": str(error)}
    rules = {
        name: (group["lr"], group["eps"], group["weight_decay"])
        for group in optimizer.param_groups
        for name, p in named.items()
        if any(p is each for each in group["params"])
    }
    expected = {name: (t.lr, t.eps, t.weight_decay) for name, t in parametrization.tensors.items()}
    data = Batches(build_datasets(config, prepare(config))[0], config, layout, rank.rank, torch.device("cpu"))
    losses = []
    for step in range(3):
        for batch in data[step]:
            out = engine(batch.tokens, batch.position_ids, batch.attention_mask, labels=batch.labels)
            loss = (out.float() * batch.loss_mask).sum() / batch.loss_mask.sum()
            engine.backward(loss)
            engine.step()
        losses.append(loss.item())
    engine.destroy()
    return {"rules": rules, "expected": expected, "losses": losses}


def half_frozen(rank: Rank, *, stage: int, client: bool) -> dict[str, bool]:
    """One step of `Model` with a frozen first layer, of whose parameters all are given: which tensors moved."""
    from mup_megatron.deepspeed import initialize

    net = model()
    net.fc1.requires_grad_(False)
    parameters = [*net.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=LR) if client else None
    named = {} if client else {"optimizer": ADAMW}
    engine, *_ = initialize(
        model=net, optimizer=optimizer, model_parameters=parameters, config=settings(stage, rank.world_size, **named)
    )
    before = [parameter.detach().clone() for parameter in net.parameters()]
    (batch,) = batches(1, rank.rank, rank.world_size)
    engine.backward(loss_of(engine, batch))
    engine.step()
    moved = [not torch.equal(*pair) for pair in zip(before, net.parameters(), strict=True)]
    engine.destroy()
    return dict(zip([name for name, _ in net.named_parameters()], moved, strict=True))


class Experts(nn.Module):
    """A layer of deepspeed.moe's experts between two linear ones; returns a loss."""

    def __init__(self, width: int, gate: Any = None) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        self.first, self.readout = nn.Linear(8, width), mup.MuReadout(width, 4)
        expert = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
        self.moe = MoE(width, expert, num_experts=8)
        if gate is not None:
            self.gate.wg = gate(width, 8, bias=False)

    @property
    def gate(self) -> Any:
        """deepspeed.moe's."""
        return self.moe.deepspeed_moe.gate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        output, loss, _ = self.moe(hidden)
        return self.readout(hidden + output).square().mean() + 0.01 * loss


def experts_of_config(rank: Rank, *, stage: int, named: bool, kind: str = "AdamW") -> dict[str, tuple[float, float]]:
    """One step of `Experts` of width 128 over 32 under the config's optimizer: each weight's rate and epsilon.

    Args:
        rank: that runs it.
        stage: of ZeRO.
        named: in two groups of one name, which DeepSpeed asks for where groups are given.
        kind: of the optimizer.
    """
    from deepspeed.utils import groups as deepspeeds

    from mup_megatron.deepspeed import initialize

    torch.manual_seed(0)
    net: Any = mup.set_base_shapes(Experts(128), Experts(32), delta=Experts(64))
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    experts, others = (
        [parameter for name, parameter in net.named_parameters() if ("experts" in name) is of] for of in (True, False)
    )
    given = [{"params": part, "name": "all"} for part in (experts, others)] if named else None
    try:
        keys = {key: value for key, value in ADAMW["params"].items() if kind == "AdamW" or key != "torch_adam"}
        config = settings(stage, rank.world_size, optimizer={"type": kind, "params": keys})
        engine, *_ = initialize(model=net, model_parameters=given, config=config)
        found = {
            names[id(parameter)]: (group["lr"], group["eps"])
            for group in engine.basic_optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) in names
        }
        engine.backward(engine(torch.randn(BATCH // rank.world_size, 8)))
        engine.step()
        engine.destroy()
    finally:
        for kept in (deepspeeds._EXPERT_PARALLEL_GROUP, deepspeeds._EXPERT_DATA_PARALLEL_GROUP):
            kept.clear()
    return {name: pair for name, pair in found.items() if name.endswith(".weight")}


def with_gate(rank: Rank, *, stage: int, optimizer: str, late: bool = False) -> dict[str, Any]:
    """One step of `Experts` of width 128 over 32: what its gate drew, its group (stage 0), its update.

    `late`: its layer becomes a MuReadout between base shapes and initialize.
    """
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
    from deepspeed.utils import groups as deepspeeds

    from mup_megatron.deepspeed import initialize

    torch.manual_seed(0)
    net: Any = mup.set_base_shapes(Experts(128), Experts(32), delta=Experts(64))
    weight = net.gate.wg.weight
    if late:
        net.gate.wg = mup.MuReadout(128, 8, bias=False)
        net.gate.wg.weight = weight
    before = weight.detach().clone()
    groups: Any = {"params": list(net.parameters()), "name": "all"}
    groups = split_params_into_different_moe_groups_for_optimizer(groups) if stage else [groups]
    client = getattr(torch.optim, optimizer)(groups, lr=LR)
    try:
        engine, *_ = initialize(model=net, optimizer=client, config=settings(stage, rank.world_size))
        groups = [group for group in client.param_groups if any(p is weight for p in group["params"])]
        loss = engine(torch.randn(BATCH // rank.world_size, 8))
        engine.backward(loss)
        engine.step()
        engine.destroy()
    finally:
        for kept in (deepspeeds._EXPERT_PARALLEL_GROUP, deepspeeds._EXPERT_DATA_PARALLEL_GROUP):
            kept.clear()
    update = (weight.detach() - before).abs().max().item()
    return {"std": before.std().item(), "lr": [group["lr"] for group in groups], "update": update}
