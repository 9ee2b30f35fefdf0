"""A script written against megatron.training alone that trains a HybridModel: upstream's pretrain_hybrid.py, shortened.

What is not of the model is pretrain_gpt.py's. Nothing in it knows of this project.
"""

from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import hybrid_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

from tests.megatron_training.pretrain_gpt import forward_step, train_valid_test_datasets_provider

if __name__ == "__main__":
    train_valid_test_datasets_provider.is_distributed = True
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    full_config = pretrain_cfg_container_from_args(args, hybrid_config_from_args(args))
    pretrain(full_config, train_valid_test_datasets_provider, ModelType.encoder_or_decoder, forward_step)
