"""The sections that say what the model is: `model:`, and the sizes of `base:` and `proxy:`.

Keys are megatron-core's TransformerConfig names. Numbers that follow from others (head size, padded vocabulary) are
properties, never keys.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from mup_megatron.config.section import Count, Fraction, NonNegativeFloat, Positive, PositiveFloat, Section, Width

# TransformerConfig's own names for the architectures; every one can be overridden in `model:`.
_LAYER_NORM: dict[str, Any] = {
    "normalization": "LayerNorm",
    "activation_func": "gelu",
    "gated_linear_unit": False,
    "position_embedding_type": "learned_absolute",
    "add_bias_linear": True,
    "share_embeddings_and_output_weights": True,
}
PRESETS: dict[str, dict[str, Any]] = {
    "gpt3": _LAYER_NORM,
    "llama": {
        "normalization": "RMSNorm",
        "activation_func": "silu",
        "gated_linear_unit": True,
        "position_embedding_type": "rope",
        "add_bias_linear": False,
        "share_embeddings_and_output_weights": False,
    },
    "t5": _LAYER_NORM,
    "bert": _LAYER_NORM,
}


Family = Literal["gpt", "t5", "bert"]
FAMILIES: dict[str, Family] = {"gpt3": "gpt", "llama": "gpt", "t5": "t5", "bert": "bert"}
"""What megatron-core class an architecture is: architectures/ and data/ have a module for each family."""

Balancing = Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"]


class Model(Section):
    """The target model, in TransformerConfig's field names. Sizes are global (unsharded).

    Where a default names the architectures, the chosen one decides.
    """

    architecture: Literal["gpt3", "llama", "t5", "bert"]
    """Chooses defaults: `gpt3` is LayerNorm, GELU, learned positions, biases, a tied head; `llama` is RMSNorm, SwiGLU,
    RoPE, no biases, a head of its own; `t5` is an encoder and a decoder (megatron-core's T5Model) with gpt3's defaults;
    `bert` is an encoder that predicts masked tokens (megatron-core's BertModel) with gpt3's defaults. Every one of them
    can be set by itself."""
    as_built: str | None = None
    """Digest of the layers that a script of megatron.training builds in the place of megatron-core's own. `tune
    --megatron` and checkpoints hold it; it is not written by hand. If unset: the layers are megatron-core's own."""
    num_layers: Count
    """Transformer layers of the target. A number other than the base's needs `parametrization.depth`. Unit: layers."""
    encoder_num_layers: Count | None = None
    """Layers of the encoder (t5), whose decoder has num_layers. If unset: as many as the decoder's. Unit: layers."""
    hidden_size: Width
    """Width of the residual stream of the target. Unit: elements."""
    num_attention_heads: Width
    """Query heads of the target. Unit: heads."""
    ffn_hidden_size: Width | None = None
    """Hidden size of the dense MLP; with a gated unit, of each of its two halves. If unset: 4 · hidden_size.
    Unit: elements."""
    num_query_groups: Width | None = None
    """Key/value heads (grouped-query attention). If unset: as many as query heads. Unit: heads."""
    kv_channels: Width | None = None
    """Head size d of queries, keys and values. If unset: hidden_size / num_attention_heads. Unit: elements."""
    max_position_embeddings: Width | None = None
    """Positions that the model has; rows of the learned position embedding. If unset: training.seq_length.
    Unit: tokens."""
    num_moe_experts: Count | None = None
    """Experts per mixture-of-experts layer. If unset: every MLP is dense. Unit: experts."""
    moe_ffn_hidden_size: Width | None = None
    """Hidden size of one expert's MLP. If unset: that of the dense MLP. Unit: elements."""
    moe_layer_freq: Positive | list[Literal[0, 1]] = 1
    """Which layers hold experts: every n-th from the first on, or a list with 1 (experts) or 0 (dense) per layer.
    Unit: layers."""
    moe_router_topk: Positive = 2
    """Experts that each token is sent to. Unit: experts."""
    moe_router_load_balancing_type: Balancing | Annotated[list[Balancing], Field(min_length=1)] = "aux_loss"
    """Over what the auxiliary loss balances experts: a micro-batch, a sequence, the global batch; `none`: no such
    loss; `sinkhorn`: no loss either, experts are chosen by Sinkhorn's balanced assignment. `aux_loss` depends on
    micro_batch_size. A list names several losses, whose sum is taken."""
    moe_aux_loss_coeff: NonNegativeFloat | list[NonNegativeFloat] = 0.0
    """Weight of the auxiliary load-balancing loss beside the language-model loss; a list where
    moe_router_load_balancing_type is one, in its order. Unit: a factor."""
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    """Function that makes scores of the router's logits."""
    moe_router_pre_softmax: bool = False
    """Whether the softmax is taken over all experts, before the best are chosen, instead of over the chosen ones."""
    moe_router_topk_scaling_factor: PositiveFloat | None = None
    """Factor on the scores of the chosen experts. If unset: 1. Unit: a factor."""
    moe_router_num_groups: Positive | None = None
    """Groups of experts for group-limited routing. If unset: routing is not limited by groups. Unit: groups."""
    moe_router_group_topk: Positive | None = None
    """Groups that each token may be routed to; needs moe_router_num_groups. If unset: all. Unit: groups."""
    moe_router_enable_expert_bias: bool = False
    """Whether a bias per expert, moved by load instead of by gradient, takes part in the choice of experts (balancing
    without an auxiliary loss)."""
    moe_router_bias_update_rate: NonNegativeFloat = 1e-3
    """Change of an expert's bias per optimizer step. Unit: score per step."""
    moe_router_dtype: Literal["fp32", "fp64"] | None = None
    """Precision of the router's scores. If unset: the model's."""
    moe_shared_expert_intermediate_size: Width | None = None
    """Hidden size of the MLP that every token passes beside its experts. If unset: there is none. Unit: elements."""
    moe_shared_expert_gate: bool = False
    """Whether a learned sigmoid gate per token scales the shared expert's output."""
    moe_token_dispatcher_type: Literal["allgather", "alltoall"] = "allgather"  # noqa: S105
    """How tokens reach their experts on other ranks; no effect on the result."""
    multi_latent_attention: bool = False
    """Whether attention is DeepSeek's multi-latent attention (MLA), whose keys and values come from a small latent."""
    q_lora_rank: Width | None = None
    """Size of the latent that queries are made from (MLA). If unset: queries are not compressed. Unit: elements."""
    kv_lora_rank: Width | None = None
    """Size of the latent that keys and values are made from (MLA needs it). If unset: no MLA. Unit: elements."""
    qk_head_dim: Width | None = None
    """Part of a query/key head without positions (MLA needs it). If unset: no MLA. Unit: elements."""
    qk_pos_emb_head_dim: Width | None = None
    """Part of a query/key head that RoPE rotates (MLA needs it). If unset: no MLA. Unit: elements."""
    v_head_dim: Width | None = None
    """Size of a value head (MLA needs it). If unset: no MLA. Unit: elements."""
    rope_type: Literal["rope", "yarn"] = "rope"
    """Rotary embedding under MLA: plain, or YaRN's for contexts longer than those trained on. Elsewhere YaRN is a
    position_embedding_type."""
    rotary_scaling_factor: PositiveFloat = 40.0
    """YaRN: new context length over the original one. Unit: a ratio."""
    original_max_position_embeddings: Positive = 4096
    """YaRN: context length before it was extended. Unit: tokens."""
    beta_fast: PositiveFloat = 32.0
    """YaRN: dimensions that rotate more often than this over the original context are not interpolated.
    Unit: rotations."""
    beta_slow: PositiveFloat = 1.0
    """YaRN: dimensions that rotate less often than this are interpolated fully. Unit: rotations."""
    mscale: NonNegativeFloat = 1.0
    """YaRN: scales the rotary part of queries and keys with the logarithm of the context's growth. Unit: a factor."""
    mscale_all_dim: NonNegativeFloat = 0.0
    """YaRN: the same for all dimensions, through the softmax scale (under MLA) or through queries and keys.
    Unit: a factor."""
    correction_range_round_to_int: bool = True
    """YaRN outside MLA: whether the range of dimensions that are partly interpolated begins and ends at whole
    dimensions."""
    mtp_num_layers: Annotated[int, Field(gt=0, le=64)] | None = None
    """Layers of multi-token prediction, each of which predicts one token further ahead. If unset: none.
    Unit: layers."""
    mtp_loss_scaling_factor: NonNegativeFloat = 0.1
    """Weight of the multi-token prediction loss, the mean over its layers. Unit: a factor."""
    vocab_size: Width | None = None
    """Entries of the vocabulary before padding; must equal the tokenizer's. If unset: the tokenizer's. Unit: tokens."""
    make_vocab_size_divisible_by: Width = 128
    """The vocabulary is padded to a multiple of this, whatever the tensor-parallel size. Unit: tokens."""
    share_embeddings_and_output_weights: bool
    """Whether the readout is tied to the word embedding."""
    normalization: Literal["LayerNorm", "RMSNorm"]
    """Kind of all norms."""
    layernorm_epsilon: PositiveFloat = 1e-5
    """Added to the variance (mean square) in every norm. Unit: activation squared."""
    layernorm_zero_centered_gamma: bool = False
    """Whether norms scale by 1 + gain, with gains that start at 0, instead of by gains that start at 1."""
    activation_func: Literal["gelu", "silu", "relu", "squared_relu", "quick_gelu"]
    """Activation of the MLP; `quick_gelu` is x · sigmoid(1.702 · x)."""
    gated_linear_unit: bool
    """Whether the MLP multiplies the activated half with a second one (SwiGLU where the activation is silu)."""
    glu_linear_offset: float = 0.0
    """Added to the second half of a gated unit before the product. Unit: that of an activation."""
    activation_func_clamp_value: PositiveFloat | None = None
    """Where a gated unit's halves are cut off: the activated one above it, the other on both sides. If unset: nowhere.
    Unit: that of an activation."""
    position_embedding_type: Literal["learned_absolute", "rope", "yarn", "relative", "alibi", "none"]
    """How the model knows positions; `yarn` is RoPE for contexts longer than those trained on (outside MLA).
    `relative` adds T5's trained bias to attention logits, by distance and head, one table for all layers; `alibi` adds
    minus the distance times a fixed slope per head (Press et al.), which is another one where heads are more."""
    relative_attention_num_buckets: Annotated[int, Field(ge=2, le=65536)] = 32
    """Rows of the table of relative positions: the first half are distances, the others ranges of distances that grow
    with the logarithm. Unit: buckets."""
    relative_attention_max_distance: Positive = 128
    """Distance from which on all keys share the last bucket of relative positions. Unit: tokens."""
    rotary_base: Positive = 10000
    """Base of RoPE's wavelengths. Unit: a ratio."""
    rotary_percent: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of a head's dimensions that RoPE rotates. Unit: a fraction."""
    rope_scaling: bool = False
    """Whether RoPE's wavelengths are stretched as those of Llama 3 (only with `rope`, and not under MLA)."""
    rope_scaling_factor: PositiveFloat = 8.0
    """How far rope_scaling stretches the longest wavelengths. Unit: a ratio."""
    bert_binary_head: bool = False
    """Whether the model also predicts if the second half of a sequence follows the first (BERT's next-sentence
    prediction), by a pooler, a head of two classes and token types. Only with `architecture: bert`."""
    add_bias_linear: bool
    """Whether linear layers have biases."""
    add_qkv_bias: bool = False
    """Whether the QKV projection has a bias where add_bias_linear is false."""
    hidden_dropout: Fraction = 0.0
    """Probability of dropout on embeddings and residual branches. Unit: a probability."""
    attention_dropout: Fraction = 0.0
    """Probability of dropout on attention weights. Unit: a probability."""
    qk_layernorm: bool = False
    """Whether queries and keys are normed per head (under MLA, the latents). Their rows then take the hidden-like init,
    since a norm removes scale."""
    qk_l2_norm: bool = False
    """Whether queries and keys are divided by their root mean square per head, without gains. Not under MLA."""
    attention_output_gate: bool = False
    """Whether each head's output is multiplied with the sigmoid of a gate, rows of its own in the fused QKV. Not under
    MLA."""
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = "vanilla"
    """Softmax of attention: over the keys alone, or with one more term in the denominator, whose logit is 0 for every
    head (`off-by-one`) or trained for each (`learnable`, an attention sink)."""
    norm_gains: Literal["trained", "frozen", "none"] = "trained"
    """Whether norms have gains: trained ones, ones that stay at 1, or none at all."""
    without_norms: list[Literal["input_layernorm", "pre_mlp_layernorm", "final_layernorm"]] = []
    """Norms that the model does not have."""
    transformer_impl: Literal["local", "transformer_engine"] = "local"
    """Whose linear layers compute: megatron-core's or NVIDIA Transformer Engine's (CUDA only); same result."""
    norm_implementation: Literal["auto", "torch", "apex", "transformer_engine"] = "auto"
    """Whose norms compute. `auto`: Transformer Engine's with its linear layers, Apex's for LayerNorm on CUDA where it
    is installed, else torch's."""
    moe_grouped_gemm: Literal["auto"] | bool = "auto"
    """Whether one kernel computes all experts of a layer that a rank holds (Transformer Engine's grouped matrix
    product); same tensors. `auto`: with transformer_impl: transformer_engine."""
    core_attention: Literal["auto", "megatron", "sdpa", "transformer_engine"] = "auto"
    """Whose attention kernel computes: megatron-core's unfused one, torch's scaled_dot_product_attention or Transformer
    Engine's. `auto` chooses by what is installed, is resolved once, printed and recorded."""

    # Keys that say which kernels compute, not what: torch's and megatron-core's, which are everywhere.
    PLAIN_KERNELS: ClassVar[dict[str, str | bool]] = {
        "transformer_impl": "local",
        "norm_implementation": "torch",
        "moe_grouped_gemm": False,
        "core_attention": "sdpa",
    }

    @property
    def family(self) -> Family:
        """Which of megatron-core's classes the model is: `gpt` is GPTModel, which predicts the next token, `t5` is
        T5Model, which turns a sequence into another one, `bert` is BertModel, which predicts masked tokens."""
        return FAMILIES[self.architecture]

    @property
    def stacks(self) -> dict[str, int]:
        """Number of transformer layers in each stack of the model, by megatron-core's name of the stack."""
        if self.family == "t5":
            return {"encoder": self.encoder_num_layers or self.num_layers, "decoder": self.num_layers}
        return {"encoder" if self.family == "bert" else "decoder": self.num_layers}

    @property
    def added_tokens(self) -> int:
        """Entries of the vocabulary after the tokenizer's own: of `bert` one, the token that masks others."""
        return 1 if self.family == "bert" else 0

    @property
    def head_size(self) -> int:
        """Size of a query/key head, d; under MLA its part without positions and its part with them."""
        if self.multi_latent_attention:
            return (self.qk_head_dim or 0) + (self.qk_pos_emb_head_dim or 0)
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def query_groups(self) -> int:
        """Number of key/value heads; as many as heads unless `num_query_groups` is set."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        """FFN hidden size; TransformerConfig's 4·hidden_size unless `ffn_hidden_size` is set."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def moe_ffn_size(self) -> int:
        """FFN hidden size of one expert; the dense one's unless `moe_ffn_hidden_size` is set."""
        return self.moe_ffn_hidden_size or self.ffn_size

    @property
    def biases_attention(self) -> bool:
        """Whether positions are a bias on the attention logits."""
        return self.position_embedding_type in ("relative", "alibi")

    @property
    def drops(self) -> bool:
        """Whether there is any dropout."""
        return bool(self.hidden_dropout or self.attention_dropout)

    @property
    def expert_layers(self) -> list[bool]:
        """Which decoder layers hold experts; every `moe_layer_freq`-th from the first, or as it lists them."""
        if self.num_moe_experts is None:
            return [False] * self.num_layers
        if isinstance(self.moe_layer_freq, list):
            return [bool(layer) for layer in self.moe_layer_freq]
        return [layer % self.moe_layer_freq == 0 for layer in range(self.num_layers)]

    def padded_vocab_size(self, vocab_size: int) -> int:
        """`vocab_size` and `added_tokens`, rounded up to a multiple that does not depend on the layout.

        It is part of the global shape.
        """
        multiple = self.make_vocab_size_divisible_by
        return -(-(vocab_size + self.added_tokens) // multiple) * multiple

    def resized(self, growth: Growth) -> Model:
        """This model with the sizes that `growth` names replaced: what shapes are read from, no config."""
        return self.model_copy(update=growth.sizes)

    @property
    def with_plain_kernels(self) -> Model:
        """This model computed by torch's and megatron-core's own kernels."""
        attention = {} if self.softmax_type == "vanilla" else {"core_attention": "megatron"}
        return self.model_copy(update={**self.PLAIN_KERNELS, **attention})


OF_EXPERTS = ("num_moe_experts", "moe_router_topk")
"""Sizes that are numbers of experts: no tensor of an expert has a dimension for them."""


class Growth(Section):
    """Sizes that grow from proxy to target; under `base:` they are the sizes where hyperparameters are defined."""

    hidden_size: Width | None = None
    """Width of the residual stream. If unset: the size does not grow, unless it follows from one that does.
    Unit: elements."""
    ffn_hidden_size: Width | None = None
    """Hidden size of the dense MLP. If unset: fixed where `model:` names it, else 4 · hidden_size. Unit: elements."""
    num_attention_heads: Width | None = None
    """Query heads. If unset: the number does not grow; the head size then grows with hidden_size unless
    model.kv_channels is set. Unit: heads."""
    num_query_groups: Width | None = None
    """Key/value heads. If unset: fixed where `model:` names them, else as many as query heads. Unit: heads."""
    kv_channels: Width | None = None
    """Head size; the softmax scale follows its growth. If unset: fixed where `model:` names it, else hidden_size /
    num_attention_heads. Unit: elements."""
    moe_ffn_hidden_size: Width | None = None
    """Hidden size of one expert's MLP. If unset: fixed where `model:` names it, else the dense MLP's.
    Unit: elements."""
    moe_shared_expert_intermediate_size: Width | None = None
    """Hidden size of the shared expert's MLP. If unset: the size does not grow. Unit: elements."""
    q_lora_rank: Width | None = None
    """Size of the queries' latent (MLA). If unset: the size does not grow. Unit: elements."""
    kv_lora_rank: Width | None = None
    """Size of the latent of keys and values (MLA). If unset: the size does not grow. Unit: elements."""
    qk_head_dim: Width | None = None
    """Part of a query/key head without positions (MLA). If unset: the size does not grow. Unit: elements."""
    qk_pos_emb_head_dim: Width | None = None
    """Part of a query/key head that RoPE rotates (MLA). If unset: the size does not grow. Unit: elements."""
    v_head_dim: Width | None = None
    """Size of a value head (MLA). If unset: the size does not grow. Unit: elements."""
    num_layers: Count | None = None
    """Transformer layers. Another number than the target's needs `parametrization.depth`. If unset: the target's.
    Unit: layers."""
    num_moe_experts: Count | None = None
    """Experts per mixture-of-experts layer. Needs `parametrization.experts`. If unset: the number does not grow.
    Unit: experts."""
    moe_router_topk: Count | None = None
    """Experts that each token is sent to. Needs `parametrization.experts`. If unset: the number does not grow.
    Unit: experts."""

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that are named, width and depth."""
        return {name: getattr(self, name) for name in type(self).model_fields if getattr(self, name) is not None}

    @property
    def width(self) -> Growth:
        """The same without the depth and without numbers of experts: the sizes of a tensor's dimensions."""
        others = ("num_layers", *OF_EXPERTS)
        return Growth(**{name: size for name, size in self.sizes.items() if name not in others})

    @property
    def experts(self) -> dict[str, int]:
        """The numbers of experts that are named: in a layer, and per token."""
        return {name: size for name, size in self.sizes.items() if name in OF_EXPERTS}

    def enlarged(self) -> Growth:
        """Every named width doubled: what then changes in a tensor's shape is what grows (see rules/shapes.py)."""
        return Growth().model_copy(update={name: 2 * size for name, size in self.width.sizes.items()})


class Base(Growth):
    """Base sizes, or a saved .bsh file (microsoft/mup's format) that holds the base shapes of every tensor.

    What is named here grows from base to target; what is not named is the same in both. Never guessed.
    """

    file: str | None = None
    """Path of a .bsh file with the base shape of every tensor, instead of sizes; `mup-megatron explain CONFIG
    --save-base-shapes FILE` writes one. If unset: the sizes of this section tell the base."""

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that are named, width and depth."""
        return {name: size for name, size in super().sizes.items() if name != "file"}
