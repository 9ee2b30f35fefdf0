"""Options of megatron.training's parser that are refused under µP, and those that compute on CUDA alone.

Public names: `IMPOSSIBLE`, `UNSUPPORTED`, `CUDA_ONLY`, `EXPLAINED`. option_table.py makes rules of them.
"""

from __future__ import annotations

# Names, why it cannot be and what to do instead.
IMPOSSIBLE: tuple[tuple[str, str], ...] = (
    ("use-mup", "megatron-core's native MuP cannot be combined with this project's: choose one"),
    (
        "mup-width-mult mup-base-hidden-size mup-embedding-mult mup-output-mult mup-base-head-dim mup-attn-scale-power",
        "it is of megatron-core's native MuP, and does nothing without --use-mup: remove it, and give multipliers "
        "under hparams: of --mup-config",
    ),
    ("freeze-all-layers", "nothing would be trained: start the script without mup-megatron run"),
    (
        "moe-use-upcycling",
        "it copies experts from a dense checkpoint, whose values follow another model's rules: train the mixture from "
        "its own initial values",
    ),
    (
        "init-method-xavier-uniform",
        "initial values are normal, with the rules' standard deviation, and megatron.training 0.19 itself ends in an "
        "error: give --init-method-std",
    ),
    (
        "use-checkpoint-args",
        "the checkpoint's sizes would count as typed, and then do not grow: type the model's options",
    ),
    (
        "heterogeneous-layers-config-encoded-json",
        "megatron.training reads it and builds equal layers all the same: give --heterogeneous-layers-config-path",
    ),
    ("yaml-cfg", "its model is not read here: use command-line options"),
    (
        "muon-no-split-qkv",
        "query, key and value have rates of their own under Muon: leave it out",
    ),
)

# Names, why, values that are taken beside the default.
UNSUPPORTED: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("transformer-impl", "its layers are not tested in µP", ("local",)),
    (
        "use-legacy-models",
        "its models are not megatron-core's; leave it out",
        (),
    ),
    (
        "mtp-hybrid-override-pattern",
        "layers of a hybrid model's token prediction are read off --hybrid-layer-pattern, behind /; give that",
        (),
    ),
    (
        "hybrid-override-pattern hybrid-attention-ratio hybrid-mlp-ratio",
        "layers of a hybrid model are read off --hybrid-layer-pattern, of megatron-core 0.19; give that",
        (),
    ),
    (
        "mla-down-proj-fusion use-kitchen-attention moe-single-grouped-weight moe-single-grouped-bias "
        "moe-use-legacy-grouped-gemm",
        "it builds other modules, which are not tested in µP; leave it out",
        (),
    ),
    (
        "use-te-activation-func use-transformer-engine-op-fuser fused-residual-rmsnorm use-grouped-gemm-for-dense-mlp "
        "use-grouped-gemm-for-shared-expert moe-paged-stash",
        "it builds fused modules, which are not tested in µP, and others compute the same; leave it out",
        (),
    ),
    (
        "attention-backend",
        "megatron-core takes it with --spec local alone",
        ("flash", "fused", "unfused", "none"),  # recipes of Megatron-Bridge leave it to Transformer Engine
    ),
    (
        "dsa-indexer-topk-freq",
        "layers that share an indexer differ by their number alone, and layers of one spec are taken for alike; leave "
        "it out, and each layer has its own",
        (),
    ),
    (
        "fp8-param-gather fp4-param-gather",
        "such a weight is quantized where it is made, and the optimizer's fp32 weights begin at the values that "
        "Transformer Engine drew there (`get_high_precision_init_val`), not at the rules'; leave it out, and weights "
        "are gathered in bf16",
        (),
    ),
    (
        "fp8-output-proj",
        "under mxfp8 it makes the readout a module of Transformer Engine's, in which the readout's multiplier is not "
        "tested; leave it out, and the readout is computed in bf16",
        (),
    ),
    ("te-precision-config-file", "recipes by module are not read here; give --fp8-format or --fp4-format", ()),
    (
        "init-model-with-meta-device",
        "Megatron-FSDP makes each weight behind the model's construction, and its module draws upstream's initial "
        "values into it (`reset_parameters`), over the rules'; leave it out, and ranks hold the whole model for a "
        "moment",
        (),
    ),
    (
        "optimizer",
        "no rule for it is built and tested here; SOAP has one in runs of a config alone, since megatron-core's "
        "checkpoints take no optimizer state of another shape than the weight's",
        ("sgd", "muon", "dist_muon", "lion"),
    ),
    ("muon-scale-mode muon-scalar-optimizer", "Muon's rates are worked out for the default", ()),
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
)

# Names, and why the rules hold there. Where quoted, the call is megatron-core 0.19.2's.
CUDA_ONLY: tuple[tuple[str, str], ...] = (
    (
        "moe-grouped-gemm",
        "the grouped layer holds each expert's weight by itself (`linear_fc1.weight3`), recorded as that expert's",
    ),
    (
        "fp8-format fp4-format",
        "the recipe goes to Transformer Engine as it is: it quantizes operands of matrix products, and rates, "
        "epsilon and decay are those of the optimizer's high-precision weights",
    ),
    (
        "cuda-graph-impl enable-cuda-graph external-cuda-graph",
        "what is captured are layers or the whole pass, with multipliers that never move; the optimizer steps outside",
    ),
    (
        "optimizer-cuda-graph",
        "a captured step reads each group's rate from a tensor, which the schedule fills "
        "(`param_group['lr'].fill_(self.get_lr(param_group))`)",
    ),
    (
        "moe-shared-expert-overlap",
        "the same layers are called on a stream of their own; router and gate have no forward multiplier",
    ),
    (
        "overlap-moe-expert-parallel-comm ep-overlap-early-attn-memory-release",
        "parts of a layer are called one by one, and those with a multiplier among them: `layer.mlp_bda(...)`, "
        "`self.embedding(...)`, `self.output_layer(...)`",
    ),
    (
        "delay-wgrad-compute overlap-dispatch-backward-with-experts-wgrad defer-embedding-wgrad-compute",
        "a weight's gradient is computed later, from the input that its layer was called with, multiplied already",
    ),
    (
        "moe-expert-rank-capacity-factor",
        "how many tokens a rank's experts take",
    ),
    (
        "log-max-attention-logit",
        "it reads what Transformer Engine's attention keeps (2.9 and newer)",
    ),
    (
        "qk-clip",
        "its threshold is one of attention logits, which do not grow with width; Transformer Engine keeps them (2.9 "
        "and newer)",
    ),
    (
        "use-precision-aware-optimizer",
        "Transformer Engine's FusedAdam reads rate, epsilon and decay from each group",
    ),
    (
        "optimizer-cpu-offload",
        "the optimizers on both devices take every key of a group (`new_group.update(update_group_attrs)`)",
    ),
    (
        "overlap-param-gather-with-optimizer-step",
        "it makes an optimizer of the first chunk and one of the others, with the same overrides for both",
    ),
    (
        "use-megatron-fsdp",
        "its parameters know the ones that they took the place of (`orig_param`), and groups are theirs",
    ),
)

# Of the unsupported: what changes no tensor and no rule, only how it is computed. The last two are fields of configs.
EXPLAINED = (
    "fp8-param-gather fp4-param-gather te-precision-config-file moe-paged-stash init-model-with-meta-device "
    "use-te-activation-func use-transformer-engine-op-fuser fused-residual-rmsnorm use-grouped-gemm-for-dense-mlp "
    "use-grouped-gemm-for-shared-expert fp8_param fp4_param"
)
