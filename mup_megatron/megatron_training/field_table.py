"""Fields of TransformerConfig, OptimizerConfig and DistributedDataParallelConfig that no option of the parser sets.

Public name: `FIELDS` (rules by a field's name). What is in no table is taken.
"""

from __future__ import annotations

from mup_megatron.megatron_training.option_table import rules_of

_REFUSED: tuple[tuple[str, str], ...] = (
    ("softmax_scale", "the softmax scale is the rules'; tune hparams.attention_multiplier instead"),
    ("fp8_param fp4_param fp8_dot_product_attention fp8_multi_head_attention", "the rules for it are not tested"),
    ("use_kitchen quant_recipe", "the rules for it are not tested"),
    ("gtp_weight_remat_size expert_gtp_weight_remat_size", "weights are split over tensor-parallel ranks alone"),
    ("grad_norm_skip_threshold", "plain norms move with width, so no threshold holds for two sizes"),
)
_TRANSLATED: tuple[tuple[str, str], ...] = (
    ("num_moe_experts gated_linear_unit activation_func", "model"),
    ("original_max_position_embeddings beta_fast beta_slow", "model"),
    ("params_dtype", "training"),
    ("decoupled_weight_decay", "optimizer"),
    ("num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage", "parallel"),
    ("virtual_pipeline_model_parallel_size", "parallel"),
)
_VERSIONS = {
    "grad_norm_skip_threshold": ">=0.18",
    "gtp_weight_remat_size": ">=0.19",
    "expert_gtp_weight_remat_size": ">=0.19",
    "fp4_param": ">=0.17",
}

FIELDS = rules_of({"unsupported": _REFUSED, "translated": _TRANSLATED}, _VERSIONS)
