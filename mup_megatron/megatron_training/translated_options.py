"""Options of megatron.training's parser that are translated into the config, and those that it has no key for.

Public names: `TRANSLATED` (option_table.py makes rules of them), `UNSAID`.
"""

from __future__ import annotations

# Names, section of the config.
TRANSLATED: tuple[tuple[str, str], ...] = (
    (
        "num-layers encoder-num-layers hidden-size ffn-hidden-size num-attention-heads group-query-attention "
        "num-query-groups kv-channels max-position-embeddings make-vocab-size-divisible-by padded-vocab-size "
        "no-pad-vocab-size untie-embeddings-and-output-weights normalization norm-epsilon swiglu squared-relu "
        "disable-bias-linear add-qkv-bias position-embedding-type use-rotary-position-embeddings rotary-base "
        "rotary-percent hidden-dropout attention-dropout qk-layernorm multi-latent-attention q-lora-rank "
        "kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim rope-type rotary-scaling-factor mscale "
        "mscale-all-dim mtp-num-layers mtp-loss-scaling-factor num-experts moe-ffn-hidden-size moe-layer-freq "
        "moe-router-topk moe-router-load-balancing-type moe-aux-loss-coeff moe-router-score-function "
        "moe-router-pre-softmax moe-router-topk-scaling-factor moe-router-num-groups moe-router-group-topk "
        "moe-router-enable-expert-bias moe-router-bias-update-rate moe-router-dtype "
        "moe-shared-expert-intermediate-size moe-shared-expert-gate moe-token-dispatcher-type "
        "apply-layernorm-1p attention-output-gate qk-l2-norm softmax-type quick-geglu glu-linear-offset "
        "activation-func-clamp-value use-rope-scaling rope-scaling-factor yarn-original-max-position-embeddings "
        "yarn-beta-fast yarn-beta-slow no-yarn-correction-range-round-to-int",
        "model",
    ),
    (
        "lr weight-decay weight-decay-incr-style start-weight-decay end-weight-decay init-method-std "
        "embedding-init-method-std",
        "hparams",
    ),
    (
        "global-batch-size micro-batch-size seq-length encoder-seq-length train-iters train-samples lr-decay-style "
        "lr-warmup-fraction lr-warmup-iters lr-warmup-samples lr-decay-iters lr-decay-samples lr-wsd-decay-iters "
        "lr-wsd-decay-samples lr-wsd-decay-style min-lr clip-grad bf16 fp16 lr-warmup-init",
        "training",
    ),
    (
        "adam-beta1 adam-beta2 adam-eps sgd-momentum muon-momentum decoupled-lr decoupled-min-lr "
        "apply-wd-to-qk-layernorm no-weight-decay-cond-type",
        "optimizer",
    ),
    (
        "tensor-model-parallel-size pipeline-model-parallel-size num-layers-per-virtual-pipeline-stage "
        "num-virtual-stages-per-pipeline-rank microbatch-group-size-per-virtual-pipeline-stage "
        "decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers "
        "expert-model-parallel-size expert-tensor-parallel-size context-parallel-size sequence-parallel "
        "use-distributed-optimizer use-torch-fsdp2 use-tp-pp-dp-mapping pipeline-model-parallel-layout "
        "account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split",
        "parallel",
    ),
    ("data-path split mock-data tokenizer-type tokenizer-model vocab-size", "data"),
    ("seed save", "run"),
)

UNSAID = (
    "fp32-residual-connection fp16-lm-cross-entropy moe-apply-probs-on-input muon-use-nesterov muon-nesterov "
    "muon-num-ns-steps muon-coefficient-type muon-extra-scale-factor window-size window-attn-skip-freq "
    "rotary-interleaved rotary-seq-len-interpolation-factor no-rope-freq reset-attention-mask reset-position-ids "
    "eod-mask-loss dataloader-inter-document-masking moe-z-loss-coeff moe-input-jitter-eps moe-expert-capacity-factor "
    "moe-pad-expert-input-to-capacity moe-token-drop-policy weight-decay-incr-style start-weight-decay "
    "end-weight-decay rampup-batch-size step-batch-size-schedule fim-data train-data-path valid-data-path "
    "per-split-data-args-path data-args-path moe-router-force-load-balancing moe-router-force-biased "
    "apply-residual-connection-post-layernorm mtp-detach-heads fp8-format fp4-format qk-clip"
)
"""Names of options that change what is trained, and for which a config of this project has no key."""
