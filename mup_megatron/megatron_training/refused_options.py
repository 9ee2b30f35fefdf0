"""Options of megatron.training's parser that are refused under µP, with the reason.

Public names: `REFUSED`, `EXPLAINED`. option_table.py makes rules of them.
"""

from __future__ import annotations

# Names, why, values that are taken beside the default.
REFUSED: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("transformer-impl", "no shims are known for its layers", ("local",)),
    ("spec", "the shims bring layer specs of their own", ()),
    (
        "use-legacy-models heterogeneous-layers-config-path heterogeneous-layers-config-encoded-json "
        "hybrid-layer-pattern hybrid-override-pattern is-hybrid-model hybrid-attention-ratio hybrid-mlp-ratio "
        "mtp-hybrid-override-pattern experimental-attention-variant linear-attention-freq moe-latent-size",
        "no shim is known for its layers",
        (),
    ),
    (
        "mla-down-proj-fusion use-kitchen-attention use-te-activation-func use-transformer-engine-op-fuser "
        "fused-residual-rmsnorm use-grouped-gemm-for-dense-mlp use-grouped-gemm-for-shared-expert "
        "moe-single-grouped-weight moe-single-grouped-bias",
        "it asks for other modules than the shims are of",
        (),
    ),
    ("moe-grouped-gemm", "experts are recorded one by one", ()),
    ("attention-backend", "megatron-core takes it with --spec local alone", ("flash", "fused", "unfused")),
    ("qk-clip", "it rescales query and key weights after each step, beside every rule", ()),
    (
        "apply-residual-connection-post-layernorm",
        "scaled residual branches are tested in their usual form alone",
        (),
    ),
    (
        "mtp-use-repeated-layer mtp-detach-heads mtp-standalone",
        "multi-token prediction is tested in its usual form alone",
        (),
    ),
    (
        "moe-router-quantile-balancing-ema moe-mlp-glu-interleave-size moe-shared-expert-glu-interleave-size",
        "experts are tested in their usual form alone",
        (),
    ),
    (
        "moe-router-force-load-balancing moe-router-force-biased moe-enable-routing-replay",
        "the router would not choose the experts",
        (),
    ),
    (
        "moe-shared-expert-overlap overlap-moe-expert-parallel-comm delay-wgrad-compute "
        "overlap-dispatch-backward-with-experts-wgrad ep-overlap-early-attn-memory-release "
        "defer-embedding-wgrad-compute moe-paged-stash moe-expert-rank-capacity-factor",
        "layers are called in another way, and whether every multiplier holds there is not tested",
        (),
    ),
    (
        "cuda-graph-impl enable-cuda-graph external-cuda-graph optimizer-cuda-graph",
        "whether captured graphs keep multipliers, and rates that move, is not tested",
        (),
    ),
    ("log-max-attention-logit", "it reads what only Transformer Engine's own attention keeps", ()),
    (
        "fp8-format fp8-param-gather fp4-format fp4-param-gather te-precision-config-file",
        "the rules for it are not tested",
        (),
    ),
    ("init-method-xavier-uniform", "initial values are normal, with the rules' standard deviation", ()),
    ("init-model-with-meta-device", "initial values are drawn where the model is built", ()),
    ("data-parallel-random-init", "initial values are the same on every replica", ()),
    ("moe-use-upcycling", "it copies weights of another parametrization", ()),
    ("freeze-all-layers", "nothing would be trained", ()),
    ("optimizer", "no rule is known for it", ("sgd", "muon", "dist_muon", "lion")),
    ("muon-scale-mode muon-no-split-qkv muon-scalar-optimizer", "Muon's rates are worked out for the default", ()),
    ("apply-wd-to-qk-layernorm no-weight-decay-cond-type", "weight decay falls on matrices alone", ()),
    (
        "use-precision-aware-optimizer optimizer-cpu-offload overlap-param-gather-with-optimizer-step",
        "whether its groups keep their rates is not tested",
        (),
    ),
    ("use-torch-fsdp2 use-megatron-fsdp", "groups are those of megatron-core's own optimizers", ()),
    (
        "tensor-parallel-num-weight-shards expert-tensor-parallel-num-weight-shards",
        "weights are split over tensor-parallel ranks alone",
        (),
    ),
    ("hybrid-context-parallel", "sequences are split evenly over ranks", ()),
    (
        "perform-rl-step sft logits-load-dir",
        "the loss is another than that of pretraining, on which the rules are tested",
        (),
    ),
    ("non-persistent-save-interval ckpt-convert-format", "such checkpoints get no record", ()),
    ("use-checkpoint-args", "the checkpoint's sizes would count as typed, and then do not grow", ()),
    ("use-mup", "megatron-core's native MuP cannot be combined with this project's", ()),
    ("yaml-cfg", "its model is not read here; use command-line options", ()),
)

# Of the refused: what changes no tensor and no rule, only how it is computed.
EXPLAINED = (
    "moe-grouped-gemm fp8-format fp8-param-gather fp4-format fp4-param-gather te-precision-config-file "
    "moe-shared-expert-overlap overlap-moe-expert-parallel-comm delay-wgrad-compute "
    "overlap-dispatch-backward-with-experts-wgrad ep-overlap-early-attn-memory-release defer-embedding-wgrad-compute "
    "moe-paged-stash moe-expert-rank-capacity-factor cuda-graph-impl enable-cuda-graph external-cuda-graph "
    "optimizer-cuda-graph use-precision-aware-optimizer optimizer-cpu-offload use-torch-fsdp2 use-megatron-fsdp "
    "overlap-param-gather-with-optimizer-step log-max-attention-logit init-model-with-meta-device "
    "use-te-activation-func use-transformer-engine-op-fuser fused-residual-rmsnorm "
    "use-grouped-gemm-for-dense-mlp use-grouped-gemm-for-shared-expert "
    "fp8_param fp4_param"
)
