"""Options of megatron.training's parser that are translated into the config, and those that change no rule of µP.

Public names: `TRANSLATED`, `HARMLESS`, `UNSAID`. option_table.py makes rules of them.
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

HARMLESS: tuple[tuple[str, str], ...] = (
    (
        "fp16-lm-cross-entropy loss-scale initial-loss-scale min-loss-scale loss-scale-window hysteresis",
        "how a loss in fp16 is scaled: gradients are scaled back before norms, moments and epsilon see them",
    ),
    (
        "spec hybrid-layer-pattern is-hybrid-model heterogeneous-layers-config-path experimental-attention-variant "
        "linear-attention-freq moe-latent-size",
        "the script's own layers, which are kept and parametrised as they are built",
    ),
    (
        "mtp-use-repeated-layer moe-router-quantile-balancing-ema",
        "no key of a config says them: with them the model is parametrised as it is built",
    ),
    (
        "mamba-state-dim mamba-head-dim mamba-num-groups mamba-num-heads mamba-inference-conv-states-dtype "
        "mamba-inference-ssm-states-dtype mamba-training-ssm-states-dtype disable-mamba-mem-eff-path "
        "linear-conv-kernel-dim linear-key-head-dim linear-value-head-dim linear-num-key-heads linear-num-value-heads",
        "sizes and kernels of Mamba layers and gated delta nets in a hybrid model, which are kept as they are built",
    ),
    (
        "dsa-indexer-n-heads dsa-indexer-head-dim dsa-indexer-topk dsa-indexer-loss-coeff dsa-indexer-use-sparse-loss "
        "dsa-kernel-backend dsa-indexer-rope-interleaved no-dsa-indexer-rotate-activation no-dsa-indexer-scoring-relu "
        "dsa-indexer-k-norm-epsilon dsa-indexer-k-norm-fp32",
        "the indexer of sparse attention, which is kept as it is built",
    ),
    ("fp32-residual-connection", "the precision of the residual stream"),
    (
        "muon-use-nesterov muon-nesterov muon-fp32-matmul-prec muon-num-ns-steps muon-coefficient-type "
        "muon-extra-scale-factor muon-tp-mode",
        "how Muon orthogonalises a matrix, and one factor on all its updates",
    ),
    (
        "moe-apply-probs-on-input",
        "the router's probabilities multiply an expert's input instead of its output; they do not change with width",
    ),
    (
        "apply-query-key-layer-scaling",
        "logits of attention are divided by the layer's number and multiplied with it again, against overflow",
    ),
    (
        "fp8-recipe fp8-quantizer-factory fp8-margin fp8-interval fp8-amax-history-len fp8-amax-compute-algo "
        "no-fp8-wgrad fp4-recipe fp4-quantizer-factory first-last-layers-bf16 num-layers-at-start-in-bf16 "
        "num-layers-at-end-in-bf16",
        "read beside --fp8-format and --fp4-format: how operands of matrix products are quantized, and in which layers",
    ),
    (
        "qk-clip-alpha qk-clip-threshold moe-upcycling-granularity dsa-indexer-skip-topk-offset "
        "relative-attention-num-buckets relative-attention-max-distance "
        "mrope-section mup-width-mult mup-base-hidden-size mup-embedding-mult mup-output-mult mup-base-head-dim "
        "mup-attn-scale-power "
        "lion-beta1 lion-beta2 kitchen-attention-backend keep-fp8-transpose-cache reuse-grad-buf-for-mxfp8-param-ag "
        "fsdp-manual-registration fsdp-double-buffer "
        "fsdp-db-use-persist-buf-on-alloc-fail megatron-fsdp-main-params-dtype megatron-fsdp-main-grads-dtype "
        "megatron-fsdp-grad-comm-dtype megatron-fsdp-enable-fine-grained-param-gather "
        "megatron-fsdp-max-pool-double-buffer torch-fsdp2-no-reshard-after-forward no-strict-fsdp-dtensor-load "
        "data-parallel-sharding-strategy outer-dp-sharding-strategy enable-full-sharding-in-hsdp "
        "create-all-gather-group no-use-layer-wise-param-layout main-grads-dtype main-params-dtype exp-avg-dtype "
        "exp-avg-sq-dtype optimizer-offload-fraction use-torch-optimizer-for-cpu-offload "
        "overlap-cpu-optimizer-d2h-h2d no-pin-cpu-grads no-pin-cpu-params wgrad-deferral-limit "
        "cuda-graph-warmup-steps cuda-graph-scope cuda-graph-modules inference-cuda-graph-scope "
        "moe-paged-stash-page-size moe-paged-stash-buffer-size-factor-cuda moe-paged-stash-buffer-size-factor-cpu "
        "moe-extended-tp moe-ncclep-static-shape moe-ncclep-zero-copy "
        "moe-pad-experts-for-cuda-graph-inference max-seqlen-per-dp-cp-rank "
        "non-persistent-ckpt-type non-persistent-global-ckpt-dir non-persistent-local-ckpt-dir "
        "non-persistent-local-ckpt-algo replication replication-jump replication-factor ckpt-convert-save "
        "ckpt-convert-update-legacy-dist-opt-format logits-load-decode-threads logits-load-prefetch-factor "
        "logits-load-msc-prefetch-depth logits-load-kd-loss-alpha logits-load-ignore-errors "
        "sft-tokenizer-prompt-format rl-prompts-per-eval rl-default-temperature rl-default-top-p rl-default-top-k "
        "rl-offload-optimizer-during-inference rl-offload-kv-cache-during-training "
        "rl-remove-kv-cache-during-training rl-reset-cuda-graphs rl-partial-rollouts "
        "rl-inference-logprobs-is-correction rl-importance-sampling-truncation-coef rl-use-sequence-packing "
        "rl-sequence-packing-max-sequences-per-bin rl-sequence-packing-algo rl-training-cuda-graphs "
        "rl-inference-tensor-model-parallel-size rl-inference-pipeline-model-parallel-size "
        "rl-inference-expert-model-parallel-size rl-inference-expert-tensor-model-parallel-size "
        "rl-inference-model-unified-memory-level rl-offload-inference-model-weights-when-idle "
        "rl-verify-model-weights-swap rl-parallel-generation-tasks rl-skip-bos-token rl-num-parallel-generations "
        "rl-num-parallel-generation-batches rl-generation-batch-size rl-kv-cache-management-mode "
        "rl-persist-cuda-graphs rl-inference-parsers rl-generation-lag rl-submission-granularity "
        "rl-consumption-granularity rl-profile rl-profile-dir grpo-prompts-per-step grpo-group-size grpo-iterations "
        "grpo-clamp-eps-lower grpo-clamp-eps-upper grpo-kl-beta grpo-entropy-term-weight "
        "grpo-filter-groups-with-same-reward langrl-inference-server-type "
        "langrl-inference-server-conversation-template langrl-external-server langrl-env-config refit-method",
        "read only beside an option that is refused",
    ),
    (
        "ict-head-size biencoder-projection-dim biencoder-shared-query-context-model ict-load bert-load "
        "titles-data-path query-in-block-prob use-one-sent-docs evidence-data-path retriever-report-topk-accuracies "
        "retriever-score-scaling block-data-path embedding-path indexer-batch-size indexer-log-interval num-classes "
        "img-h img-w num-channels patch-dim classes-fraction data-per-class-fraction no-data-sharding head-lr-mult "
        "vision-pretraining vision-pretraining-type vision-backbone-type swin-backbone-type mask-type mask-factor "
        "iter-per-epoch dino-local-img-size dino-local-crops-number dino-head-hidden-size dino-bottleneck-size "
        "dino-freeze-last-layer dino-norm-last-layer dino-warmup-teacher-temp dino-teacher-temp "
        "dino-warmup-teacher-temp-epochs disable-msc decoder-num-layers decoder-seq-length bert-no-binary-head "
        "output-bert-embeddings bert-embedder-type mask-prob short-seq-prob sample-rate vocab-extra-ids onnx-safe "
        "openai-gelu no-position-embedding use-mcore-models use-flash-attn checkpoint-activations batch-size warmup "
        "model-parallel-size use-dist-ckpt dist-ckpt-format ckpt-fully-parallel-save "
        "no-async-tensor-model-parallel-allreduce no-scatter-gather-tensors-in-pipeline lazy-mpu-init local-rank "
        "legacy-tokenizer",
        "of other models' scripts, or of none any more",
    ),
    (
        "window-size window-attn-skip-freq rotary-interleaved rotary-seq-len-interpolation-factor no-rope-freq "
        "reset-attention-mask reset-position-ids eod-mask-loss dataloader-inter-document-masking "
        "no-create-attention-mask-in-dataloader",
        "where layers attend and which positions they see, read by upstream's own code; no tensor, no rule",
    ),
    (
        "moe-router-padding-for-quantization moe-router-padding-for-fp8 moe-z-loss-coeff moe-input-jitter-eps "
        "moe-expert-capacity-factor moe-pad-expert-input-to-capacity moe-token-drop-policy",
        "how the router is balanced and how many tokens an expert takes, on quantities that do not grow with width",
    ),
    (
        "moe-router-force-load-balancing moe-router-force-biased moe-enable-routing-replay",
        "benchmarks and replays of routing: who chooses the experts; weights and rules are the same",
    ),
    (
        "moe-mlp-glu-interleave-size moe-shared-expert-glu-interleave-size",
        "which rows of a gated unit are which half's: both halves have one rule",
    ),
    (
        "apply-residual-connection-post-layernorm mtp-detach-heads",
        "where the residual stream goes on, and how far back a loss reaches: no tensor, and under no depth rule any "
        "rule",
    ),
    ("data-parallel-random-init", "initial values are the same on every replica before they are sent around"),
    (
        "deterministic-mode batch-invariant-mode disable-bf16-reduced-precision-matmul "
        "no-masked-softmax-fusion no-bias-gelu-fusion no-bias-swiglu-fusion no-bias-dropout-fusion no-rope-fusion "
        "no-persist-layer-norm no-gradient-accumulation-fusion attention-softmax-in-fp32 cross-entropy-loss-fusion "
        "cross-entropy-fusion-impl calculate-per-token-loss flash-attention-version use-fused-weighted-squared-relu "
        "moe-permute-fusion moe-router-fusion mlp-chunks-for-training disable-jit-fuser "
        "no-clone-scatter-output-in-embedding test-mode enable-experimental te-rng-tracker no-initialization "
        "use-cpu-initialization",
        "which kernels compute, and in which order and precision of a sum",
    ),
    (
        "recompute-activations recompute-granularity recompute-method recompute-num-layers recompute-modules "
        "distribute-saved-activations moe-layer-recompute cpu-offloading-num-layers "
        "cpu-offloading-retain-pinned-cpu-buffers fine-grained-activation-offloading "
        "fine-grained-offloading-max-inflight-offloads offload-modules min-offloaded-tensor-size "
        "delay-offload-until-cuda-graph delta-offload-bytes-across-pp-ranks activation-offload-fraction "
        "empty-unused-memory-level",
        "what is kept, computed anew or moved to the CPU between forward and backward",
    ),
    (
        "mtp-standalone "
        "tp-comm-overlap no-tp-comm-bulk-wgrad no-tp-comm-bulk-dgrad no-tp-comm-overlap-ag no-tp-comm-overlap-rs "
        "tp-comm-overlap-rs-dgrad no-tp-comm-split-ag no-tp-comm-split-rs tp-comm-bootstrap-backend "
        "tp-comm-overlap-cfg pipeline-model-parallel-comm-backend hierarchical-context-parallel-sizes cp-comm-type "
        "use-ring-exchange-p2p no-overlap-p2p-communication overlap-p2p-communication-warmup-flush "
        "high-priority-a2a-comm-stream symmetric-ar-type moe-enable-deepep moe-deepep-num-sms "
        "moe-flex-dispatcher-backend moe-flex-dispatcher-num-sms moe-hybridep-num-sms moe-hybridep-num-blocks-permute "
        "moe-hybridep-num-blocks-unpermute moe-hybridep-num-sms-preprocessing moe-hybridep-pad-uneven-dispatch-inputs "
        "moe-permute-fusion-into-hybridep "
        "no-gradient-reduce-div-fusion suggested-communication-unit-size use-nccl-ub nccl-communicator-config-path "
        "nccl-all-reduce-for-prefill disable-symmetric-registration overlap-grad-reduce overlap-param-gather "
        "no-align-grad-reduce no-align-param-gather ddp-num-buckets ddp-bucket-size "
        "ddp-pad-buckets-for-high-nccl-busbw ddp-reduce-scatter-with-fp32-accumulation ddp-average-in-collective "
        "ddp-param-name-patterns-for-fp32-local-accumulation num-distributed-optimizer-instances grad-reduce-in-bf16 "
        "accumulate-allreduce-grads-in-fp32 distributed-backend distributed-timeout-minutes "
        "distributed-timeout-seconds-after-init disable-gloo-process-groups use-sharp sharp-enabled-group "
        "high-priority-stream-groups flight-recorder-dump-path flight-recorder-trace-buffer-size "
        "no-flight-recorder-dump-on-timeout flight-recorder-include-stack-trace "
        "no-flight-recorder-include-only-active no-flight-recorder-extra-dump-on-exec fake-process-group",
        "how ranks talk to each other, and when",
    ),
    (
        "profile profile-step-start profile-step-end use-pytorch-profiler profile-ranks record-memory-history "
        "memory-snapshot-path eval-iters eval-interval skip-train full-validation multiple-validation-sets "
        "adlr-autoresume adlr-autoresume-interval log-straggler straggler-ctrlr-port straggler-minmax-count "
        "disable-straggler-on-startup run-workload-inspector-server no-one-logger one-logger-project "
        "one-logger-run-name one-logger-async app-tag-run-name app-tag-run-version inprocess-restart "
        "inprocess-max-iterations inprocess-monitor-thread-interval inprocess-monitor-process-interval "
        "inprocess-progress-watchdog-interval inprocess-heartbeat-interval inprocess-soft-timeout "
        "inprocess-hard-timeout inprocess-heartbeat-timeout inprocess-barrier-timeout inprocess-completion-timeout "
        "inprocess-last-call-wait inprocess-termination-grace-time inprocess-granularity inprocess-active-world-size "
        "inprocess-empty-cuda-cache enable-ft-package calc-ft-timeouts ft-num-warmup-iters error-injection-rate "
        "error-injection-type rerun-mode check-for-spiky-loss pytorch-profiler-collect-shapes "
        "pytorch-profiler-collect-callstack pytorch-profiler-collect-chakra record-shapes nvtx-ranges "
        "start-eval-at-iter eval-global-batch-size eval-micro-batch-size validation-set-names fault-injector-ranks "
        "fault-injector-num-ranks fault-injector-fault-types fault-injector-fault-probabilities "
        "fault-injector-fault-delay fault-injector-delay-start-iteration fault-injector-mtti-seconds "
        "fault-injector-offset-seconds fault-injector-seed rampup-batch-size step-batch-size-schedule "
        "decrease-batch-size-if-needed check-weight-hash-across-dp-replicas-interval gpu-sniff-test-interval "
        "train-sync-interval exit-interval exit-duration-in-mins exit-signal-handler exit-signal "
        "exit-signal-handler-for-dataloader exit-on-missing-checkpoint exit-signal-handler-for-training manual-gc "
        "manual-gc-interval no-manual-gc-eval iterations-to-skip no-check-for-nan-in-loss-and-grad "
        "check-for-large-grads result-rejected-tracker-filename dump-param-to-param-group-map "
        "phase-transition-iterations",
        "how long training goes on, by which batches, and when it is watched or ends",
    ),
    (
        "train-data-path valid-data-path test-data-path data-args-path per-split-data-args-path "
        "per-dataset-sequences-path dataloader-fast-cache-load dataloader-defer-npy-index-mmap data-cache-path "
        "no-mmap-bin-files num-workers num-dataset-builder-threads object-storage-cache-path "
        "mid-level-dataset-surplus allow-ambiguous-pad-tokens fim-data fim-rate fim-spm-rate fim-split-sample "
        "fim-fragment-rate fim-no-prefix fim-prefix-token fim-middle-token fim-suffix-token fim-pad-token "
        "fim-eod-token vocab-file merge-file tokenizer-metadata tokenizer-special-tokens tiktoken-pattern "
        "tiktoken-num-special-tokens tiktoken-special-tokens tokenizer-sentencepiece-legacy tokenizer-hf-use-fast "
        "tokenizer-hf-include-special-tokens trust-remote-code enable-msc tokenizer-hf-no-use-fast "
        "tokenizer-hf-no-include-special-tokens no-tokenizer-sentencepiece-ignore-extra-whitespaces "
        "null-tokenizer-eod-id null-tokenizer-pad-id chat-template dataloader-type",
        "which data are read, and how",
    ),
    (
        "logits-save-top-k logits-save-top-p logits-save-top-p-min-k logits-save-dir logits-save-dtype log-interval "
        "log-params-norm log-throughput log-progress timing-log-level timing-log-option tensorboard-dir "
        "tensorboard-log-interval tensorboard-queue-size log-timers-to-tensorboard no-log-loss-scale-to-tensorboard "
        "log-validation-ppl-to-tensorboard log-memory-to-tensorboard log-memory-interval log-device-memory-used "
        "log-num-zeros-in-grad no-barrier-with-level-1-timing log-world-size-to-tensorboard wandb-project "
        "wandb-exp-name wandb-save-dir wandb-entity logging-level log-energy moe-routing-trace-path "
        "moe-routing-trace-max-training-iters moe-routing-trace-capture-logits "
        "moe-routing-trace-capture-hidden-states moe-routing-trace-dump-weights config-logger-dir "
        "moe-per-layer-logging",
        "what is logged",
    ),
    (
        "save-interval save-wgrads-interval save-dgrads-interval save-retain-interval load "
        "load-main-params-from-ckpt finetune pretrained-checkpoint ckpt-step use-mp-args-from-checkpoint-args "
        "no-use-tokenizer-model-from-checkpoint-args ckpt-format auto-detect-ckpt-format no-ckpt-fully-parallel-save "
        "async-save use-persistent-ckpt-worker ckpt-fully-parallel-load ckpt-assume-constant-structure "
        "dist-ckpt-strictness dist-ckpt-save-pre-mcore-014 dist-ckpt-optim-fully-reshardable "
        "distrib-optim-fully-reshardable-mem-efficient no-save-optim no-save-rng no-load-optim no-load-rng "
        "async-strategy async-ckpt-cpu-priority async-ckpt-io-priority ckpt-fully-parallel-load-exchange-algo "
        "ckpt-fully-parallel-save-process-group ckpt-fully-parallel-load-process-group verify-integrity "
        "dist-ckpt-workers save-params-interval save-activations-interval save-tokens-per-expert-interval "
        "async-ckpt-use-cpu-shm no-ckpt-load-validate-sharding-integrity no-stream-ckpt-dequant "
        "override-ckpt-iteration override-opt_param-scheduler use-checkpoint-opt_param-scheduler",
        "what checkpoints hold and how they are written; the guard reads their record before a load",
    ),
    (
        "inference-batch-times-seqlen-threshold max-tokens-to-oom use-legacy-static-engine inference-max-batch-size "
        "inference-max-seq-length inference-dynamic-batching inference-dynamic-batching-buffer-size-gb "
        "inference-dynamic-batching-paused-buffer-size-gb inference-dynamic-batching-block-size "
        "inference-dynamic-batching-max-requests inference-dynamic-batching-max-tokens "
        "inference-dynamic-batching-num-cuda-graphs inference-dynamic-batching-track-paused-request-events "
        "decode-only-cuda-graphs inference-dynamic-batching-unified-memory-level disable-chunked-prefill "
        "inference-dynamic-batching-cuda-graph-max-tokens inference-dynamic-batching-cuda-graph-mixed-prefill-count "
        "inference-logging-step-interval inference-wandb-logging inference-coordinator-port inference-max-requests "
        "inference-dynamic-batching-mamba-memory-ratio inference-dynamic-batching-track-generated-token-events "
        "enable-chunked-prefill num-speculative-tokens inference-dynamic-batching-prefix-caching "
        "inference-dynamic-batching-prefix-caching-eviction-policy "
        "inference-dynamic-batching-prefix-caching-coordinator-policy "
        "inference-dynamic-batching-prefix-caching-routing-alpha inference-dynamic-batching-prefix-caching-mamba-gb "
        "inference-text-gen-server-logging inference-use-synchronous-zmq-collectives "
        "inference-cuda-graph-all-prefills inference-dynamic-batching-sampling-backend "
        "inference-disable-ep-consensus inference-cuda-graph-max-tokens "
        "inference-dynamic-batching-cuda-graph-sizing-distribution use-same-sampling-seed-across-dp-ranks "
        "inference-dynamic-batching-async-sched-mode inference-dynamic-batching-logprobs-mode inference-shards "
        "flash-decode inference-fuse-tp-communication inference-rng-tracker inference-disable-triton-nvls-kernels "
        "inference-grouped-gemm-backend inference-moe-disable-fused-quant-kernels "
        "inference-moe-token-dispatcher-type mlp-chunks-for-prefill cache-mla-latents",
        "of generation",
    ),
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
"""Names of accepted options that change what is trained, and for which a config of this project has no key."""
