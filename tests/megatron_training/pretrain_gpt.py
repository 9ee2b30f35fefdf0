"""A script as people have them, written against megatron.training alone: upstream's pretrain_gpt.py, shortened.

Calls are upstream's of core_v0.19 (its file is not in the wheel). Nothing in it knows of this project.
"""

from functools import partial

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset, MockGPTLowLevelDataset
from megatron.core.enums import ModelType
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
from megatron.training import get_args, get_timers, pretrain, print_rank_0
from megatron.training.argument_utils import (
    core_transformer_config_from_args,
    gpt_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

# Documents of --mock-data, in every process that runs this script: a cache holds indices of so many. Shuffling the
# sequences of upstream's 100,000 takes longer than the steps.
MockGPTLowLevelDataset.size = 1000
KEYS = ("attention_mask", "labels", "loss_mask", "position_ids", "tokens")


def predicts_ahead(vp_stage=None):
    """Whether multi-token prediction is on this stage."""
    args = get_args()
    return mtp_on_this_rank(
        layout=core_transformer_config_from_args(args).pipeline_model_parallel_layout,
        mtp_num_layers=args.mtp_num_layers,
        ignore_virtual=False,
        vp_stage=vp_stage,
    )


def get_batch(data_iterator, vp_stage=None):
    """This rank's part of a micro-batch."""
    args = get_args()
    predicts = predicts_ahead(vp_stage)
    if not is_first_or_last_pipeline_stage(vp_stage) and not predicts:
        return [None for _ in KEYS]
    batch = {}
    if mpu.get_tensor_model_parallel_rank() == 0:
        data = next(data_iterator)
        batch = {key: data[key].cuda(non_blocking=True) if data.get(key) is not None else None for key in KEYS}
    batch = get_batch_on_this_tp_rank(
        batch,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        cp_size=args.context_parallel_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=predicts,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())
    return [batch[key] for key in KEYS]


def loss_func(loss_mask, output_tensor):
    """Sum of the losses, number of tokens, what is logged."""
    losses = output_tensor.view(-1).float()
    loss_mask = loss_mask.view(-1).float()
    loss = torch.sum(losses * loss_mask)
    num_tokens = loss_mask.sum().clone().detach().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.cat([loss.clone().detach().view(1), num_tokens.view(1)])}


def forward_step(data_iterator, model):
    """Forward pass of one micro-batch."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    attention_mask, labels, loss_mask, position_ids, tokens = get_batch(data_iterator, vp_stage)
    timers("batch-generator").stop()
    output_tensor = model(tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask)
    return output_tensor, partial(loss_func, loss_mask)


def train_valid_test_datasets_provider(train_val_test_num_samples, vp_stage=None):
    """The three datasets."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )
    print_rank_0("> building train, validation, and test datasets for GPT ...")
    return BlendedMegatronDatasetBuilder(
        MockGPTDataset if args.mock_data else GPTDataset,
        train_val_test_num_samples,
        lambda: (
            (is_first_or_last_pipeline_stage(vp_stage) or predicts_ahead(vp_stage))
            and mpu.get_tensor_model_parallel_rank() == 0
        ),
        config,
    ).build()


def embedding_ranks(pp_ranks):
    """Ranks of a pipeline that hold the word embeddings: the first, those that predict ahead, the last if tied."""
    args = get_args()
    ranks = {pp_ranks[0], *get_mtp_ranks(pp_ranks, core_transformer_config_from_args(args))}
    if not args.untie_embeddings_and_output_weights:
        ranks.add(pp_ranks[-1])
    return sorted(ranks)


if __name__ == "__main__":
    train_valid_test_datasets_provider.is_distributed = True
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    full_config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(
        full_config,
        train_valid_test_datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        get_embedding_ranks=embedding_ranks,
    )
