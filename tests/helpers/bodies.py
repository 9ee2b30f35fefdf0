"""What tests run on ranks: module-level functions, since ranks import them by name."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from mup_megatron import engines
from mup_megatron.config import Config, load_config
from mup_megatron.data.batches import Batches, build_datasets
from mup_megatron.data.gpt import GPTBatch
from mup_megatron.data.prepare import prepare
from mup_megatron.engines.optim import LearningRateSchedule
from mup_megatron.engines.setup import Setup, refuse, resolve, resolve_auto
from mup_megatron.engines.state import load_state, load_weights, save_state
from mup_megatron.model.build import build_model, parametrize
from mup_megatron.model.global_names import named_parameters
from mup_megatron.parallel import runtime
from mup_megatron.parallel.layout import Layout, resolve_layout
from mup_megatron.parallel.ranks import Rank
from mup_megatron.proof.controls import CONTROLS
from mup_megatron.rules.table import Parametrization, TensorHyperparameters
from tests.helpers.breakages import break_, replaced


def build_engine(config: Config, parametrization: Any, chunks: list[Any], layout: Layout) -> Any:
    """The engine of a model that `start` made; refused where the library refuses it."""
    setup = Setup(config=config, layout=layout, deepspeed=refuse(config, layout))
    return engines.build_engine(setup, parametrization, chunks)


def start(rank: Rank, config: Config) -> tuple[Config, Layout, Parametrization, Any]:
    """Process groups, parametrization and this rank's model chunks."""
    config = resolve_auto(config)
    layout = resolve_layout(config, rank.world_size)
    device = runtime.start_distributed(layout, rank, config.run.seed)
    parametrization = parametrize(config, prepare(config).vocab_size)
    return config, layout, parametrization, build_model(parametrization, layout, rank.rank, device)


def values(model: Any) -> dict[str, Any]:
    """This rank's parameters by global name, as arrays."""
    return {name: parameter.detach().float().cpu().clone().numpy() for name, parameter in named_parameters(model)}


def held(rank: Rank, *, config: Config, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters that build_model makes on this rank, by global name."""
    config = resolve_auto(config)
    layout = resolve_layout(config, rank.world_size)
    device = runtime.start_distributed(layout, rank, config.run.seed)
    chunks = build_model(parametrize(config, vocabulary), layout, rank.rank, device)
    return {name: tuple(parameter.shape) for name, parameter in named_parameters(chunks)}


def train(rank: Rank, *, config: Config, steps: int, broken: str = "nothing") -> dict[str, Any]:
    """Trains for some steps on real text; returns initial values, losses, norms and the optimizer's groups.

    `broken` names what is taken out of the library meanwhile (breakages.py).
    """
    with break_(broken):
        return _train(rank, config, steps)


def train_file(rank: Rank, *, path: Path, broken: str = "nothing", allowed_changes: Sequence[str] = ()) -> float | None:
    """`mup-megatron train` on a config file, but for the command line, with something taken out of the library."""
    from mup_megatron.train.run import train

    with break_(broken):
        return train(resolve(load_config(path), rank.world_size), rank, allowed_changes=allowed_changes)


def command(rank: Rank, *, arguments: list[str]) -> tuple[int, str, str]:
    """`mup-megatron ARGUMENTS` on ranks that are there already; exit status, standard output and error."""
    from mup_megatron import cli

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.run(arguments)
    if not torch.distributed.is_initialized():  # the command ended what the pool will end again
        torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    return status, out.getvalue(), err.getvalue()


def _train(rank: Rank, config: Config, steps: int) -> dict[str, Any]:
    config, layout, parametrization, model = start(rank, config)
    initial = values(model)
    engine = build_engine(config, parametrization, model, layout)
    rules = {
        group["rule"]: (group["lr_multiplier"], group.get("eps"), group["weight_decay"])
        for group in engine.optimizer.param_groups
    }
    tensors = {name: parametrization.tensors[name] for name in initial}
    groups = {name: rules[str(tensor.group)] for name, tensor in tensors.items() if not tensor.shape.spec.frozen}
    batches = Batches(build_datasets(config, prepare(config))[0], config, layout, rank.rank, torch.device("cpu"))
    schedule = LearningRateSchedule(config.training, config.hparams.lr)
    results = [engine.step(batches[step], schedule(step)) for step in range(steps)]
    engine.close()
    return {
        "initial": initial,
        "losses": [result.loss for result in results],
        "grad_norms": [result.grad_norm for result in results],
        "groups": groups,
    }


class Doubled(GPTBatch):
    """A batch of a family of its own: the loss is twice that of the tokens, and its calls are counted."""

    asked: ClassVar[list[str]] = []

    def forward(self, model: Any) -> Any:
        self.asked.append("forward")
        return super().forward(model)

    def loss(self, output: Any) -> torch.Tensor:
        self.asked.append("loss")
        return 2 * super().loss(output)


def doubled(rank: Rank, *, config: Config) -> tuple[float, float, list[str]]:
    """Loss of a batch, loss of the same batch as a `Doubled`, and what the engine asked this one."""
    config, layout, parametrization, model = start(rank, config)
    engine = build_engine(config, parametrization, model, layout)
    batches = Batches(build_datasets(config, prepare(config))[0], config, layout, rank.rank, torch.device("cpu"))[0]
    Doubled.asked.clear()
    losses = [engine.evaluate(each) for each in (batches, [Doubled(**vars(batch)) for batch in batches])]
    engine.close()
    return losses[0], losses[1], Doubled.asked


def initial(rank: Rank, *, config: Config) -> dict[str, Any]:
    """Initial values of this rank's parameters, by global name."""
    return values(start(rank, config)[-1])


def threads(rank: Rank) -> tuple[int, int]:
    """This process, and how many threads it has, most of them process groups'."""
    return os.getpid(), len(os.listdir("/proc/self/task"))


def plain_and_ours(rank: Rank, *, config: Config, steps: int) -> dict[str, Any]:
    """Trains megatron-core's own GPTModel or T5Model, and ours from the same weights, both in DeepSpeed engines."""
    import deepspeed

    from benchmarks.plain import plain_groups, plain_model, plain_t5
    from mup_megatron.engines.deepspeed_mpu import Mpu
    from mup_megatron.engines.setup.deepspeed import deepspeed_config

    config, layout, parametrization, model = start(rank, config)
    hparams = config.hparams
    build = plain_t5 if config.model.family == "t5" else plain_model
    plain = build(config, prepare(config).vocab_size, layout, torch.device("cpu"))
    plain.load_state_dict(model[0].state_dict())
    betas = (config.optimizer.betas[0], config.optimizer.betas[1])
    optimizer = torch.optim.AdamW(plain_groups(plain, config), lr=hparams.lr, betas=betas, eps=config.optimizer.eps)
    settings = deepspeed_config(config, layout)
    theirs, _, _, _ = deepspeed.initialize(model=plain, optimizer=optimizer, mpu=Mpu(), config=settings)
    ours = build_engine(config, parametrization, model, layout)

    batches = Batches(build_datasets(config, prepare(config))[0], config, layout, rank.rank, torch.device("cpu"))
    schedule = LearningRateSchedule(config.training, hparams.lr)
    losses: dict[str, list[float]] = {"plain": [], "ours": []}
    for step in range(steps):
        losses["ours"].append(ours.step(batches[step], schedule(step)).loss)
        for group in optimizer.param_groups:
            group["lr"] = schedule(step)
        total = torch.zeros(())
        for batch in batches[step]:
            loss = batch.loss(batch.forward(theirs))
            theirs.backward(loss)
            total += loss.detach() / len(batches[step])
            theirs.step()
        torch.distributed.all_reduce(total)
        losses["plain"].append(float(total / layout.data))
    weights = {"plain": {n: p.detach().numpy().copy() for n, p in plain.named_parameters()}, "ours": values(model)}
    ours.close()
    theirs.destroy()
    return {"losses": losses, "weights": weights}


def first_update(rank: Rank, *, config: Config) -> dict[str, tuple[float, float]]:
    """One step; per parameter of this rank the largest change of a coordinate and the rate that the rule says."""
    from deepspeed.utils import safe_get_full_fp32_param

    config, layout, parametrization, model = start(rank, config)
    before = {name: parameter.detach().float().clone() for name, parameter in named_parameters(model)}
    engine = build_engine(config, parametrization, model, layout)
    batches = Batches(build_datasets(config, prepare(config))[0], config, layout, rank.rank, torch.device("cpu"))
    engine.step(batches[0], config.hparams.lr)
    result = {}
    for name, parameter in named_parameters(engine.chunks):
        after = safe_get_full_fp32_param(parameter) if layout.zero_stage else parameter.detach()
        if layout.fully_sharded:
            after = after.full_tensor()
        change = (after.float().reshape(-1) - before[name].reshape(-1)).abs().max()
        result[name] = (float(change), parametrization.tensors[name].lr)
    engine.close()
    return result


def first_update_norms(rank: Rank, *, config: Config, rule: str) -> dict[str, float]:
    """Spectral norms of what the first step adds to each matrix; `rule` base: with the base's rate."""
    config, layout, parametrization, model = start(rank, config)
    if rule == "base":
        parametrization = CONTROLS["muon_rate"].break_(parametrization, layout)
    before = {name: parameter.detach().clone() for name, parameter in named_parameters(model)}
    engine = build_engine(config, parametrization, model, layout)
    batches = Batches(build_datasets(config, prepare(config))[0], config, layout, rank.rank, torch.device("cpu"))
    engine.step(batches[0], config.hparams.lr)
    changes = {name: parameter.detach() - before[name] for name, parameter in named_parameters(engine.chunks)}
    engine.close()
    found = {}
    for name, change in changes.items():
        if change.dim() == 2:
            # Query, key and value are orthogonalised by themselves: the query of each head's rows.
            part = change.view(-1, 3, config.model.head_size, change.shape[1])[:, 0] if "qkv" in name else change
            found[name] = float(torch.linalg.matrix_norm(part.reshape(-1, change.shape[1]), 2))
    return found


def leg(
    rank: Rank,
    *,
    config: Config,
    start_at: int,
    stop_at: int,
    load: str | None = None,
    save: str | None = None,
    broken: str = "nothing",
) -> dict[str, Any]:
    """Trains from step `start_at`, on what `load` holds, to `stop_at`, and saves there; losses and rates."""
    with break_(broken):
        config, layout, parametrization, chunks = start(rank, config)
        if load:
            load_weights(chunks, parametrization, layout, rank.rank, Path(load))
        engine = build_engine(config, parametrization, chunks, layout)
        if load:
            load_state(engine, parametrization, layout, rank.rank, Path(load), start_at)
        batches = Batches(build_datasets(config, prepare(config))[0], config, layout, rank.rank, torch.device("cpu"))
        schedule = LearningRateSchedule(config.training, config.hparams.lr)
        losses, rates = [], []
        for step in range(start_at, stop_at):
            losses.append(engine.step(batches[step], schedule(step)).loss)
            rates.append([group["lr"] for group in engine.optimizer.param_groups])
        if save:
            Path(save).mkdir(exist_ok=True)
            save_state(engine, parametrization, layout, rank.rank, Path(save))
        engine.close()
    return {"losses": losses, "rates": rates}


def norms(rank: Rank, *, config: Config) -> dict[str, float]:
    """The gradient norm that a step reports, and both norms worked out here from whole gradients (one rank)."""
    config, layout, parametrization, model = start(rank, config)
    engine = build_engine(config, parametrization, model, layout)
    batches = Batches(build_datasets(config, prepare(config))[0], config, layout, rank.rank, torch.device("cpu"))
    reported = engine.step(batches[0], 0.0).grad_norm
    engine.close()
    (fresh,) = build_model(parametrization, layout, rank.rank, torch.device("cpu"))
    loss = torch.zeros(())
    for batch in batches[0]:
        losses = fresh(batch.tokens, batch.position_ids, batch.attention_mask, labels=batch.labels)
        loss = loss + losses.mean() / len(batches[0])
    loss.backward()
    gradients = {name: parameter.grad.double() for name, parameter in named_parameters(fresh)}
    return {
        "reported": reported,
        "plain": sum(float(gradient.square().sum()) for gradient in gradients.values()) ** 0.5,
        **{name: float(gradient.square().sum()) for name, gradient in gradients.items()},
    }


def row_squares(rank: Rank, *, config: Config) -> dict[str, Any]:
    """Sums of squares of each row of every whole gradient, and the norm that a step reports (one rank)."""
    config, layout, parametrization, model = start(rank, config)
    engine = build_engine(config, parametrization, model, layout)
    batches = Batches(build_datasets(config, prepare(config))[0], config, layout, rank.rank, torch.device("cpu"))
    reported = engine.step(batches[0], 0.0).grad_norm
    engine.close()
    (fresh,) = build_model(parametrization, layout, rank.rank, torch.device("cpu"))
    for batch in batches[0]:
        losses = fresh(batch.tokens, batch.position_ids, batch.attention_mask, labels=batch.labels)
        (losses.mean() / len(batches[0])).backward()
    rows = {name: parameter.grad.double().square() for name, parameter in named_parameters(fresh)}
    return {
        "reported": reported,
        "rows": {name: row.reshape(len(row), -1).sum(dim=1).tolist() for name, row in rows.items()},
    }


def batch_sums(rank: Rank, *, config: Config, steps: int) -> list[int]:
    """Sums of the global batches' tokens, over ranks."""
    layout = resolve_layout(config, rank.world_size)
    runtime.start_distributed(layout, rank, config.run.seed)
    batches: Any = Batches(build_datasets(config, prepare(config))[0], config, layout, rank.rank, torch.device("cpu"))
    sums = torch.tensor([sum(int(batch.tokens.sum()) for batch in batches[step]) for step in range(steps)])
    torch.distributed.all_reduce(sums)
    return sums.tolist()


def rescaled(
    rank: Rank, *, config: Config, tensor: str, theta: float, powers: dict[str, int], steps: int
) -> list[float]:
    """Losses when one tensor takes (A·θ, init/θ) and its lr, eps and weight decay θ to the given powers."""
    from mup_megatron.engines import deepspeed as engine_module

    config, layout, parametrization, chunks = start(rank, config)
    (model,) = chunks
    modules = {"word_embeddings": [model.embedding.word_embeddings], "output_layer": [model.output_layer]}
    layer = model.decoder.layers[0]
    for name, module in (("linear_qkv", layer.self_attention), ("linear_proj", layer.self_attention)):
        modules[name] = [getattr(module, name)]
    for name in ("linear_fc1", "linear_fc2"):
        modules[name] = [getattr(layer.mlp, name)]
    if tensor == "word_embeddings" and config.model.share_embeddings_and_output_weights:
        modules[tensor].append(model.output_layer)  # a tied weight takes θ in both uses
    for module in modules[tensor]:
        module.register_forward_hook(
            lambda _module, _inputs, out: (out[0] * theta, *out[1:]) if isinstance(out, tuple) else out * theta
        )
    weight = modules[tensor][0].weight
    weight.data.div_(theta)

    original = engine_module.parameter_groups

    def parameter_groups(named: Any, of: Parametrization) -> list[dict[str, Any]]:
        groups = original(named, of)
        for group in groups:
            kept = [(n, p) for n, p in zip(group["names"], group["params"], strict=True) if p is not weight]
            if len(kept) < len(group["params"]):
                own = {**group, "params": [weight], "names": [tensor]}
                group["names"], group["params"] = [n for n, _ in kept], [p for _, p in kept]
                own["lr_multiplier"] *= theta ** powers["lr"]
                own["weight_decay"] *= theta ** powers["weight_decay"]
                if "eps" in own:
                    own["eps"] *= theta ** powers["eps"]
                return [*(g for g in groups if g["params"]), own]
        raise AssertionError(tensor)

    with replaced(engine_module, "parameter_groups", parameter_groups):
        engine = build_engine(config, parametrization, chunks, layout)
    batches = Batches(build_datasets(config, prepare(config))[0], config, layout, rank.rank, torch.device("cpu"))
    losses = [engine.step(batches[step], config.hparams.lr).loss for step in range(steps)]
    engine.close()
    return losses


def first_step(rank: Rank, *, config: Config) -> dict[str, Any]:
    """What flows through an untrained model, in its first block and out of it, and what one step changes (one rank)."""
    config, layout, parametrization, chunks = start(rank, config)
    (model,) = chunks
    weights = values(model)
    seen: dict[str, Any] = {}
    layer = model.decoder.layers[0]

    def keep(name: str) -> Any:
        def hook(_module: Any, inputs: Any, output: Any) -> None:
            seen.setdefault(f"{name} in", [x.detach().clone() for x in inputs if isinstance(x, torch.Tensor)])
            outputs = output if isinstance(output, tuple) else (output,)
            seen.setdefault(f"{name} out", [x.detach().clone() for x in outputs if isinstance(x, torch.Tensor)])

        return hook

    parts = {"core": layer.self_attention.core_attention, "attention": layer.self_attention, "mlp": layer.mlp}
    handles = [module.register_forward_hook(keep(name)) for name, module in parts.items()]
    handles.append(model.decoder.final_layernorm.register_forward_hook(keep("trunk")))
    handles.append(model.embedding.register_forward_hook(keep("embedding")))
    handles.append(model.decoder.layers[0].register_forward_hook(keep("layer")))
    batches = Batches(build_datasets(config, prepare(config))[0], config, layout, rank.rank, torch.device("cpu"))
    batch = batches[0][0]
    with torch.no_grad():
        logits = model(batch.tokens, batch.position_ids, batch.attention_mask)
    for handle in handles:
        handle.remove()
    seen = {name: [x.double().numpy() for x in tensors] for name, tensors in seen.items()}
    engine = build_engine(config, parametrization, chunks, layout)
    schedule = LearningRateSchedule(config.training, config.hparams.lr)
    loss = engine.step(batches[0], schedule(5)).loss
    updated = values(engine.chunks)
    engine.close()
    labels = torch.cat([part.labels for part in batches[0]])
    return {
        "weights": weights,
        "seen": seen,
        "logits": logits.double().numpy(),
        "labels": labels.numpy(),
        "loss": loss,
        "update": {name: updated[name].astype(float) - weights[name] for name in weights},
    }


def _batch(config: Config, layout: Layout, rank: int) -> Any:
    return Batches(build_datasets(config, prepare(config))[0], config, layout, rank, torch.device("cpu"))[0]


def saved_bytes(rank: Rank, *, config: Config) -> int:
    """Bytes of the storages that a forward pass with its loss keeps for the backward pass, parameters left out."""
    config, layout, _, (model,) = start(rank, config)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # else its address could be another's next
        return tensor

    batch = _batch(config, layout, rank.rank)[0]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        batch.forward(model)
    return sum(kept.values())


def core_attention(rank: Rank, *, config: Config) -> dict[str, Any]:
    """What goes into the last layer's core attention and what comes out, in float64."""
    config, layout, _, (model,) = start(rank, config)
    seen: dict[str, Any] = {"layers": len(model.decoder.layers)}

    def keep(_module: Any, inputs: Any, output: torch.Tensor) -> None:
        for name, tensor in zip(("query", "key", "value"), inputs, strict=False):
            seen[name] = tensor.detach().double().numpy()
        seen["context"] = output.detach().double().numpy()

    model.decoder.layers[-1].self_attention.core_attention.register_forward_hook(keep)
    batch = _batch(config, layout, rank.rank)[0]
    model(batch.tokens, batch.position_ids, batch.attention_mask)
    return seen


def multi_token_calls(rank: Rank, *, config: Config) -> dict[str, list[float]]:
    """How much the readout and the embedding multiply, at each of their calls in a forward pass."""
    config, layout, _, (model,) = start(rank, config)
    calls: dict[str, list[float]] = {"readout": [], "embedding": []}

    def readout(_module: Any, inputs: Any, keys: Any, output: Any) -> None:
        weight = keys.get("weight")
        plain = inputs[0] @ (model.output_layer.weight if weight is None else weight).T
        calls["readout"].append(float(output[0].norm() / plain.norm()) * float(inputs[0].norm() / given.pop(0)))

    given: list[torch.Tensor] = []
    embedded: list[torch.Tensor] = []
    # Registered first of all, these see what the multiplier has not touched yet.
    model.output_layer.register_forward_pre_hook(lambda _m, inputs: given.append(inputs[0].norm()), prepend=True)
    model.output_layer.register_forward_hook(readout, with_kwargs=True)
    model.embedding.register_forward_hook(lambda _m, _i, output: embedded.append(output.norm()), prepend=True)
    model.embedding.register_forward_hook(
        lambda _m, _i, output: calls["embedding"].append(float(output.norm() / embedded.pop(0)))
    )
    batch = _batch(config, layout, rank.rank)[0]
    model(batch.tokens, batch.position_ids, batch.attention_mask, labels=batch.labels)
    return calls


def branches(rank: Rank, *, config: Config) -> dict[str, float]:
    """What each residual branch of the built model adds for an output of 1 and a bias of 2, by layer and branch."""
    _, _, _, model = start(rank, config)
    (chunk,) = model
    layers = {f"decoder {i}": layer for i, layer in enumerate(chunk.decoder.layers)}
    for number, layer in enumerate(chunk.mtp.layers):
        # megatron-core 0.16 and 0.19 name it differently.
        layers[f"mtp {number}"] = getattr(layer, "mtp_model_layer", None) or layer.transformer_layer
    numbers = {
        name: torch.full((1, 1, 4), value) for name, value in (("output", 1.0), ("bias", 2.0), ("residual", 0.0))
    }
    return {
        f"{name} {branch}": getattr(layer, branch)(True, False)(
            (numbers["output"], numbers["bias"]), numbers["residual"], 0.0
        )[0, 0, 0].item()
        for name, layer in layers.items()
        for branch in ("self_attn_bda", "mlp_bda")
    }


def expert_bias(rank: Rank, *, config: Config) -> list[tuple[Any, Any]]:
    """Each router's expert bias after a step, and how many tokens the experts got in it."""
    from mup_megatron.engines import deepspeed as engine_module

    config, layout, parametrization, chunks = start(rank, config)
    engine = build_engine(config, parametrization, chunks, layout)
    routers = [module for module in engine.module.modules() if hasattr(module, "expert_bias")]
    tokens: list[Any] = []
    original = engine_module.update_expert_bias

    def update(module: Any) -> None:
        tokens.extend(router.local_tokens_per_expert.numpy().copy() for router in routers)
        original(module)

    with replaced(engine_module, "update_expert_bias", update):
        engine.step(_batch(config, layout, rank.rank), config.hparams.lr)
    biases = [router.expert_bias.numpy().copy() for router in routers]
    engine.close()
    return list(zip(biases, tokens, strict=True))


def decode(
    rank: Rank, *, configs: dict[str, Config], vocabulary: int, positions: int, ways: dict[str, dict[str, Any]]
) -> dict[str, dict[str, float]]:
    """Logits of cached decoding against the full forward pass: largest difference over the largest logit.

    `ways` are arguments of `_decode`, by name; the result is by name of the config and of the way.
    """
    result: dict[str, dict[str, float]] = {}
    for name, config in configs.items():
        config = resolve_auto(config)
        layout = resolve_layout(config, rank.world_size)
        if not result:
            device = runtime.start_distributed(layout, rank, config.run.seed)
        parametrization = parametrize(config, vocabulary)
        tokens = torch.randint(vocabulary, (positions,), generator=torch.Generator().manual_seed(4))
        result[name] = {}
        for way, arguments in ways.items():
            (model,) = build_model(parametrization, layout, rank.rank, device)
            model.eval()
            result[name][way] = _decode(model, config.model.head_size, tokens, **arguments)
    return result


def _decode(
    model: Any, head_size: int, tokens: torch.Tensor, *, prefill: int = 1, dtype: str = "float32", lost: str = "nothing"
) -> float:
    """`lost` names what is lost once the prompt is in: softmax_scale, readout, embedding, positions."""
    from mup_megatron.evaluate.generate import Decoder

    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():  # as after training: no gain is 1, no bias is 0
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    model.to(getattr(torch, dtype))
    positions = torch.arange(len(tokens))
    mask = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)[None, None]
    with torch.no_grad():
        full = model(tokens[None], positions[None], mask)[0, prefill - 1 :]
    decoder = Decoder(model, len(tokens))
    cached = [decoder.prefill(tokens[:prefill].tolist())]
    if lost == "softmax_scale":
        for layer in model.decoder.layers:
            layer.self_attention.core_attention.softmax_scale = head_size**-0.5
    elif lost == "readout":
        model.output_layer._forward_pre_hooks.clear()
    elif lost == "embedding":
        model.embedding._forward_hooks.clear()
    elif lost == "positions":
        model.embedding.register_forward_pre_hook(
            lambda _module, _inputs, keys: ((), {**keys, "position_ids": keys["position_ids"] * 0}), with_kwargs=True
        )
    cached += [decoder.step(token) for token in tokens[prefill:].tolist()]
    return float((torch.stack(cached) - full).abs().max() / full.abs().max())


def expert_updates(rank: Rank, *, config: Config, broken: bool = False) -> dict[str, float]:
    """Mean size of what the first step adds to experts, by layer of an MLP, to routers, and to attention.

    Args:
        rank: the only one.
        config: of a model with experts in every layer.
        broken: whether the rule for more experts is taken out.
    """
    config, layout, parametrization, model = start(rank, config)
    if broken:
        many = config.experts_ratio

        def change(tensor: TensorHyperparameters) -> TensorHyperparameters:
            if ".local_experts." not in tensor.shape.name and ".router." not in tensor.shape.name:
                return tensor
            sgd = tensor.group.update_rule == "sgd"
            return tensor.retuned(eps=tensor.group.eps * many, lr=tensor.group.lr / many if sgd else None)

        parametrization = parametrization.replaced(change)
    before = {name: parameter.detach().clone() for name, parameter in named_parameters(model)}
    engine = build_engine(config, parametrization, model, layout)
    batches = Batches(build_datasets(config, prepare(config))[0], config, layout, rank.rank, torch.device("cpu"))
    engine.step(batches[0], config.hparams.lr)
    sizes: dict[str, list[float]] = {}
    for name, parameter in named_parameters(engine.chunks):
        kinds = ("linear_fc1", "linear_fc2", "router", "linear_proj")
        for kind in (kind for kind in kinds if f"{kind}.weight" in name and "shared" not in name):
            sizes.setdefault(kind, []).append(float((parameter.detach() - before[name]).abs().mean()))
    engine.close()
    return {kind: sum(found) / len(found) for kind, found in sizes.items()}
