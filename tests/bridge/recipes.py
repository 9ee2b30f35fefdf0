"""Small recipes: in the container of megatron.training that Bridge's extends, and in Bridge's own where it is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig

from tests.model.as_built import own_layers

ROWS = 128
CORE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 256,
    "num_attention_heads": 4,
    "kv_channels": 16,
    "init_method_std": 0.05,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "use_cpu_initialization": True,
    "transformer_impl": "local",
    "gradient_accumulation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
}
BASE = {"hidden_size": 16, "ffn_hidden_size": 64, "kv_channels": 4}
"""A quarter of the width, with as many heads."""
SAME = {name: CORE[name] for name in BASE}
"""The model's own sizes: the run is at its base."""
OPTIMIZER = {"optimizer": "adam", "lr": 1e-2, "min_lr": 1e-3, "weight_decay": 0.5, "adam_eps": 1e-6, "clip_grad": 0.0}
SCHEDULER = {"lr_decay_style": "linear", "start_weight_decay": 0.1, "end_weight_decay": 0.1, "lr_decay_iters": 4}


def of_megatron(save: str | None = None, data: str | None = None, spec: str | None = None, **changed: Any) -> Any:
    """A container of megatron.training's, whose GPTModelConfig is Bridge's too; sizes are given, but finalized.

    Args:
        save: folder of checkpoints, which are loaded too.
        data: prefix of prepared data, in a dataset such as Bridge's containers have.
        spec: name of a layer spec of `tests.model.as_built.own_layers`.
        changed: fields of the TransformerConfig.
    """
    from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.training import config
    from megatron.training.config.container import PretrainConfigContainer
    from megatron.training.models.gpt import GPTModelConfig

    scheduler = config.SchedulerConfig(**SCHEDULER)
    # What Bridge and megatron.training work out of iterations: in samples.
    scheduler.lr_warmup_steps, scheduler.lr_decay_steps, scheduler.wd_incr_steps = 0, 16, 16
    made = PretrainConfigContainer(
        model=GPTModelConfig(
            transformer=TransformerConfig(**{**CORE, **changed}),
            transformer_layer_spec=spec and getattr(own_layers, spec),
            vocab_size=ROWS,
            seq_length=16,
        ),
        train=config.TrainingConfig(micro_batch_size=2, global_batch_size=4, train_iters=4),
        optimizer=OptimizerConfig(**OPTIMIZER),
        scheduler=scheduler,
        ddp=DistributedDataParallelConfig(),
        dist=config.DistributedInitConfig(distributed_backend="gloo"),
        rng=config.RNGConfig(seed=7),
        logger=config.LoggerConfig(),
        checkpoint=config.CheckpointConfig(save=save, load=save),
        tokenizer=config.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=ROWS),
    )
    if data is not None:
        made.dataset = BlendedMegatronDatasetConfig(
            random_seed=7, sequence_length=16, blend=([data], None), split="98,2,0"
        )
    return made


def of_bridge(save: str | None = None, spec: str | None = None, **changed: Any) -> Any:
    """A ConfigContainer of megatron-bridge with a GPTModelProvider, as recipes make one; see `of_megatron`."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider, local_layer_spec
    from megatron.bridge.training import config

    return config.ConfigContainer(
        model=GPTModelProvider(
            **{**CORE, **changed},
            vocab_size=ROWS,
            seq_length=16,
            share_embeddings_and_output_weights=False,
            transformer_layer_spec=getattr(own_layers, spec) if spec else local_layer_spec,
        ),
        train=config.TrainingConfig(micro_batch_size=2, global_batch_size=4, train_iters=4),
        optimizer=config.OptimizerConfig(**OPTIMIZER),
        scheduler=config.SchedulerConfig(**SCHEDULER),
        dataset=config.MockGPTDatasetConfig(
            seq_length=16,
            random_seed=7,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            num_workers=0,
        ),
        ddp=config.DistributedDataParallelConfig(),
        dist=config.DistributedInitConfig(distributed_backend="gloo"),
        rng=config.RNGConfig(seed=7),
        logger=config.LoggerConfig(),
        checkpoint=config.CheckpointConfig(save=save, load=save, save_interval=2, async_save=False),
        tokenizer=config.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=ROWS),
    )


RECIPES: dict[str, Callable[..., Any]] = {"megatron": of_megatron, "bridge": of_bridge}
