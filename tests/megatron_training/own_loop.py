"""A script with a loop of its own on megatron.training's arguments and get_model."""

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import get_megatron_optimizer
from megatron.training import get_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from megatron.training.initialize import initialize_megatron
from megatron.training.training import get_megatron_optimizer_config, get_model, get_optimizer_param_scheduler

OPTIMIZER = "core"


def provider(pre_process=True, post_process=True, **_):
    args = get_args()
    return GPTModel(
        config=core_transformer_config_from_args(args),
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=128,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
    )


def main():
    parse_and_validate_args()
    initialize_megatron(allow_no_cuda=not torch.cuda.is_available())
    args = get_args()
    model = get_model(provider, wrap_with_ddp=False)[0]
    model = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    if OPTIMIZER == "torch":
        optimizer, scheduler = torch.optim.AdamW(model.parameters(), lr=args.lr), None
    else:
        config, overrides = get_megatron_optimizer_config(args)
        optimizer = get_megatron_optimizer(config, [model], config_overrides=overrides)
        scheduler = get_optimizer_param_scheduler(optimizer)
    ids, positions = torch.randint(100, (2, 16)), torch.arange(16)[None].expand(2, -1)
    mask = torch.ones(1, 1, 16, 16, dtype=torch.bool).triu(1)
    for _ in range(3):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        model(ids, positions, mask, labels=ids).mean().backward()
        model.finish_grad_sync()
        optimizer.step()
        if scheduler is not None:
            scheduler.step(increment=2)
    print("rates", sorted({group["lr"] for group in optimizer.param_groups}))


if __name__ == "__main__":
    main()
