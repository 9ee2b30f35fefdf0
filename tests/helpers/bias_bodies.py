"""What tests of position biases run on ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention

from mup_megatron.config import Config, derive
from mup_megatron.data.batches import Batches, build_datasets
from mup_megatron.data.prepare import prepare
from mup_megatron.engines.optim import LearningRateSchedule
from mup_megatron.engines.setup import resolve_auto
from mup_megatron.model.build import build_model, parametrize
from mup_megatron.model.global_names import named_parameters
from mup_megatron.parallel import runtime
from mup_megatron.parallel.layout import resolve_layout
from mup_megatron.parallel.ranks import Rank
from tests.helpers.bodies import build_engine, start, values


def whole_model(rank: Rank, *, config: Config) -> dict[str, Any]:
    """Weights and logits of a model, in float64, and what its core attention is of."""
    config, _, parametrization, (model,) = start(rank, config)
    model.double()
    tokens = torch.randint(300, (2, config.training.seq_length), generator=torch.Generator().manual_seed(5))
    positions = torch.arange(tokens.shape[1])[None]
    mask = torch.ones(1, 1, tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
    with torch.no_grad():
        logits = model(tokens, positions, mask)
    return {
        "weights": {name: held.detach().clone().numpy() for name, held in named_parameters(model)},
        "tokens": tokens.numpy(),
        "logits": logits.numpy(),
        "scale": parametrization.forward.softmax_scale,
        "readout": parametrization.forward.readout,
        "core": {type(layer.self_attention.core_attention).__name__ for layer in model.decoder.layers},
    }


class PlainBiasedAttention(DotProductAttention):
    """What upstream's DotProductAttention would compute if it took a bias: its own steps, with one addition."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor,
        attn_mask_type: Any = None,
        attention_bias: Any = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        repeat = self.num_attention_heads_per_partition // self.num_query_groups_per_partition
        if repeat > 1:
            key, value = key.repeat_interleave(repeat, dim=2), value.repeat_interleave(repeat, dim=2)
        length, batch, heads, size = query.shape
        query, key, value = (tensor.reshape(length, batch * heads, size) for tensor in (query, key, value))
        query, key = query.transpose(0, 1), key.transpose(0, 1).transpose(1, 2)
        nothing = torch.empty(batch * heads, length, length)
        scores = torch.baddbmm(nothing, query, key, beta=0.0, alpha=self.softmax_scale).view(batch, heads, length, -1)
        scores = (scores + attention_bias).masked_fill(attention_mask, -10000.0)
        context = torch.bmm(scores.softmax(-1).view(batch * heads, length, length), value.transpose(0, 1))
        return context.view(batch, heads, length, size).permute(2, 0, 1, 3).reshape(length, batch, -1)


def plain_and_ours(rank: Rank, *, config: Config, steps: int) -> dict[str, Any]:
    """Losses and weights of upstream's GPTModel with upstream's RelativePositionEmbedding beside it, and of ours.

    Both in DeepSpeed engines, from the same weights. Upstream's bias is made as its T5Model makes it, and handed to
    GPTModel by its own argument.
    """
    import deepspeed
    from megatron.core.models.common.embeddings.relative_pos_embedding import RelativePositionEmbedding
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from benchmarks import plain
    from mup_megatron.engines.deepspeed_mpu import Mpu
    from mup_megatron.engines.setup.deepspeed import deepspeed_config
    from tests.helpers.breakages import replaced

    ours_config, layout, parametrization, ours = start(rank, config)
    keys = ("position_embedding_type", "relative_attention_num_buckets", "relative_attention_max_distance")
    without = dict(zip((f"model.{key}" for key in keys), ("none", 32, 128), strict=True))
    bare = resolve_auto(derive(config, {**without, "hparams.relative_bias_multiplier": 1.0}))

    def spec(**arguments: Any) -> Any:
        made = get_gpt_layer_local_spec(**arguments)
        made.submodules.self_attention.submodules.core_attention = PlainBiasedAttention
        return made

    with replaced(plain, "get_gpt_layer_local_spec", spec):
        theirs = plain.plain_model(bare, prepare(config).vocab_size, layout, torch.device("cpu"))

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gpt = theirs
            self.positions = RelativePositionEmbedding(
                False, torch.nn.init.zeros_, config.model.num_attention_heads, 8, 20
            )

        def forward(self, batch: Any) -> torch.Tensor:
            length = batch.tokens.shape[1]
            bias = {"attention_bias": self.positions(length, length)}
            arguments = (batch.tokens, batch.position_ids, batch.attention_mask)
            return self.gpt(*arguments, labels=batch.labels, extra_block_kwargs=bias).float().mean()

    whole = Model()
    table = "decoder_relative_pos_emb.relative_attention_bias.weight"
    weights = copy.deepcopy(ours[0].state_dict())
    whole.positions.relative_attention_bias.weight.data.copy_(weights.pop(table))
    theirs.load_state_dict(weights)
    hparams = config.hparams
    optimizer = torch.optim.AdamW(
        plain.plain_groups(whole, config), lr=hparams.lr, betas=(0.9, 0.95), eps=config.optimizer.eps
    )
    engine, _, _, _ = deepspeed.initialize(
        model=whole, optimizer=optimizer, mpu=Mpu(), config=deepspeed_config(ours_config, layout)
    )
    own = build_engine(ours_config, parametrization, ours, layout)
    batches = Batches(build_datasets(config, prepare(config))[0], ours_config, layout, 0, torch.device("cpu"))
    schedule = LearningRateSchedule(config.training, hparams.lr)
    losses: dict[str, list[float]] = {"plain": [], "ours": []}
    for step in range(steps):
        losses["ours"].append(own.step(batches[step], schedule(step)).loss)
        for group in optimizer.param_groups:
            group["lr"] = schedule(step)
        total = torch.zeros(())
        for batch in batches[step]:
            loss = engine(batch)
            engine.backward(loss)
            total += loss.detach() / len(batches[step])
            engine.step()
        losses["plain"].append(float(total))
    result = {
        "losses": losses,
        "tables": [values(ours)[table], whole.positions.relative_attention_bias.weight.detach().numpy().copy()],
    }
    own.close()
    engine.destroy()
    return result


def encoder_decoder(rank: Rank, *, config: Config, vocabulary: int) -> dict[str, Any]:
    """What goes into core attention of an encoder-decoder's last layers and comes out, and the tables, as arrays."""
    config = resolve_auto(config)
    layout = resolve_layout(config, rank.world_size)
    device = runtime.start_distributed(layout, rank, config.run.seed)
    parametrization = parametrize(config, vocabulary)
    (model,) = build_model(parametrization, layout, rank.rank, device)
    seen: dict[str, dict[str, Any]] = {}

    def watch(name: str, attention: Any) -> None:
        def keep(_module: Any, inputs: Any, output: torch.Tensor) -> None:
            names = ("query", "key", "value", "mask")
            seen[name] = {each: tensor.detach().numpy().copy() for each, tensor in zip(names, inputs, strict=False)}
            seen[name] |= {"context": output.detach().numpy().copy(), "scale": parametrization.forward.softmax_scale}
            stack = name.partition(" ")[0]
            table = getattr(model, f"{stack}_relative_pos_emb").relative_attention_bias.weight
            seen[name]["table"] = table.detach().numpy().copy()

        attention.core_attention.register_forward_hook(keep)

    for stack, kind in (("encoder", "self_attention"), ("decoder", "self_attention"), ("decoder", "cross_attention")):
        watch(f"{stack} {kind}", getattr(getattr(model, stack).layers[-1], kind))
    generator = torch.Generator().manual_seed(2)
    source, target = (torch.randint(300, (2, size), generator=generator) for size in (10, 7))
    padding = torch.zeros(2, 10, dtype=torch.bool)
    padding[:, 8:] = True
    inside = padding[:, None, None, :].expand(2, 1, 10, 10)
    later = torch.ones(7, 7, dtype=torch.bool).triu(1).expand(2, 1, 7, 7)
    across = padding[:, None, None, :].expand(2, 1, 7, 10)
    model(source, target, inside, later, across)
    return seen
