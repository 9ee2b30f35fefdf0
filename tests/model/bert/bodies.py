"""What the tests of BERT run on ranks."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import mup
import torch

from mup_megatron.config import Config
from mup_megatron.data.batches import Batches, build_datasets
from mup_megatron.data.prepare import prepare
from mup_megatron.engines.optim import LearningRateSchedule
from mup_megatron.model import build as models
from mup_megatron.model.architectures import bert
from mup_megatron.model.layers.tensor_spec import set_spec
from mup_megatron.parallel.ranks import Rank
from mup_megatron.rules.shapes import Init, TensorSpec
from tests.helpers import bodies
from tests.helpers.breakages import replaced
from tests.model.bert.plain import PlainBert, load

Broken = contextlib.AbstractContextManager[Any]


def _pooler_as_a_vector() -> Broken:
    """The pooler keeps the base's rate and init at every width, as a vector does."""
    original = bert.attach

    def attach(built: Any, *arguments: Any) -> None:
        original(built, *arguments)
        if built.post_process and built.add_binary_head:
            weight = built.pooler.dense.weight
            set_spec(weight, TensorSpec(shape=tuple(weight.shape), fan_in=None, fan_out=0, init=Init.WEIGHT))

    return replaced(bert, "attach", attach)


def _head_not_marked() -> Broken:
    """The linear layer of the language-model head is not marked as one that sees a part of the sequence."""
    original = bert.attach

    def attach(built: Any, *arguments: Any) -> None:
        original(built, *arguments)
        if built.post_process:
            for parameter in built.lm_head.dense.parameters():
                parameter.sequence_parallel = False

    return replaced(bert, "attach", attach)


BROKEN: dict[str, Callable[[], Broken]] = {
    "nothing": contextlib.nullcontext,
    "readout multiplier": lambda: replaced(bert, "scale_input", lambda module, multiplier: None),
    "embedding multiplier": lambda: replaced(bert, "scale_output", lambda module, multiplier: None),
    "linear records": lambda: replaced(bert, "set_linear_specs", lambda linear, **keys: None),
    "readout record": lambda: replaced(bert, "set_readout_spec", lambda layer, **keys: None),
    "embedding record": lambda: replaced(bert, "set_embedding_specs", lambda embedding: None),
    "pooler as a vector": _pooler_as_a_vector,
    "head not marked": _head_not_marked,
}


@contextlib.contextmanager
def broken_by(name: str) -> Any:
    """The breakage; TensorSpecs set before or meanwhile are forgotten."""
    models._SPECS.clear()
    try:
        with BROKEN[name]():
            yield
    finally:
        models._SPECS.clear()


def train(rank: Rank, *, config: Config, steps: int, broken: str = "nothing") -> dict[str, Any]:
    """As bodies.train, with one of `BROKEN`."""
    with broken_by(broken):
        return bodies.train(rank, config=config, steps=steps)


def _loss(batch: Any, losses: torch.Tensor, binary: torch.Tensor | None) -> torch.Tensor:
    """As upstream's pretrain_bert.py: the mean over masked tokens, and the classes' cross entropy."""
    mask = batch.loss_mask
    loss = (losses.float() * mask).sum() / mask.sum()
    if binary is not None:
        loss = loss + torch.nn.functional.cross_entropy(binary.view(-1, 2).float(), batch.is_random.view(-1))
    return loss


def plain_and_ours(rank: Rank, *, config: Config, steps: int) -> dict[str, Any]:
    """Trains megatron-core's own BertModel, and ours from the same weights, both in DeepSpeed engines."""
    import deepspeed

    from benchmarks.plain import plain_bert, plain_groups
    from mup_megatron.engines.deepspeed_mpu import Mpu
    from mup_megatron.engines.setup.deepspeed import deepspeed_config

    config, layout, parametrization, model = bodies.start(rank, config)
    hparams = config.hparams
    plain = plain_bert(config, prepare(config).vocab_size, layout, torch.device("cpu"))
    plain.load_state_dict(model[0].state_dict())
    betas = (config.optimizer.betas[0], config.optimizer.betas[1])
    optimizer = torch.optim.AdamW(plain_groups(plain, config), lr=hparams.lr, betas=betas, eps=config.optimizer.eps)
    settings = deepspeed_config(config, layout)
    theirs, _, _, _ = deepspeed.initialize(model=plain, optimizer=optimizer, mpu=Mpu(), config=settings)
    ours = bodies.build_engine(config, parametrization, model, layout)

    batches: Any = Batches(build_datasets(config, prepare(config))[0], config, layout, rank.rank, torch.device("cpu"))
    schedule = LearningRateSchedule(config.training, hparams.lr)
    losses: dict[str, list[float]] = {"plain": [], "ours": []}
    for step in range(steps):
        losses["ours"].append(ours.step(batches[step], schedule(step)).loss)
        for group in optimizer.param_groups:
            group["lr"] = schedule(step)
        total = torch.zeros(())
        for batch in batches[step]:
            types = {} if batch.types is None else {"tokentype_ids": batch.types}
            loss = _loss(batch, *theirs(batch.tokens, batch.attention_mask, lm_labels=batch.labels, **types))
            theirs.backward(loss)
            total += loss.detach() / len(batches[step])
            theirs.step()
        torch.distributed.all_reduce(total)
        losses["plain"].append(float(total / layout.data))
    named = {name: parameter.detach().numpy().copy() for name, parameter in plain.named_parameters()}
    weights = {"plain": named, "ours": bodies.values(model)}
    ours.close()
    theirs.destroy()
    return {"losses": losses, "weights": weights}


def oracle(rank: Rank, *, config: Config, steps: int, broken: str = "nothing") -> dict[str, Any]:
    """Losses of ours and of a plain torch BERT under microsoft/mup (MuAdam), from the same initial values."""
    with broken_by(broken):
        config, layout, parametrization, model = bodies.start(rank, config)
    vocabulary = model[0].output_layer.output_size

    def plain_of(sizes: Any) -> PlainBert:
        return PlainBert(
            layers=sizes.num_layers,
            vocabulary=vocabulary,
            positions=config.max_position_embeddings,
            output_mult=config.hparams.output_multiplier,
            hidden=sizes.hidden_size,
            ffn=sizes.ffn_size,
            heads=sizes.num_attention_heads,
            head_size=sizes.head_size,
            attn_mult=parametrization.base_head_size**0.5 * config.hparams.attention_multiplier,
        )

    base = config.model.resized(config.base.width)
    theirs = plain_of(config.model)
    delta = plain_of(base.resized(config.base.enlarged()))
    mup.set_base_shapes(theirs, plain_of(base), delta=delta, rescale_params=False, do_assert=False)
    values = {name: parameter.detach().clone() for name, parameter in model[0].named_parameters()}
    load(theirs, values, config.model.hidden_size / base.hidden_size)
    optimizer = mup.MuAdam(
        theirs.parameters(), lr=config.hparams.lr, betas=config.optimizer.betas, eps=config.optimizer.eps
    )
    engine = bodies.build_engine(config, parametrization, model, layout)
    batches: Any = Batches(build_datasets(config, prepare(config))[0], config, layout, rank.rank, torch.device("cpu"))
    losses: dict[str, list[float]] = {"ours": [], "theirs": []}
    for step in range(steps):
        losses["ours"].append(engine.step(batches[step], config.hparams.lr).loss)
        (batch,) = batches[step]
        logits, binary = theirs(batch.tokens, batch.types)
        each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch.labels, reduction="none")
        loss = _loss(batch, each, binary)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses["theirs"].append(float(loss))
    engine.close()
    return losses


def padded(rank: Rank, *, config: Config) -> dict[str, Any]:
    """Losses [b, s] of a batch, of it with other tokens at its end, and the same where the end is padding."""
    config, layout, _, (model,) = bodies.start(rank, config)
    batches: Any = Batches(build_datasets(config, prepare(config))[0], config, layout, rank.rank, torch.device("cpu"))
    batch = batches[0][0]
    tokens = batch.tokens.clone()
    tokens[:, -5:] = (tokens[:, -5:] + 1) % 300
    mask = batch.attention_mask.clone()
    mask[:, -5:] = 0
    found = {}
    for name, keys in {
        "seen": {},
        "seen, other": {"tokens": tokens},
        "padding": {"attention_mask": mask},
        "padding, other": {"attention_mask": mask, "tokens": tokens},
    }.items():
        changed = dataclasses.replace(batch, **keys)
        losses, _ = changed.forward(model)
        model.zero_grad()
        losses[:, :-5].sum().backward()
        finite = all(parameter.grad.isfinite().all() for parameter in model.parameters())
        found[name] = (losses.detach().numpy().copy(), bool(finite))
    return found
