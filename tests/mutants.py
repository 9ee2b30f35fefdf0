"""Small faults that somebody could make, and the tests that must notice each; `./dev mutants` runs them (mutate.py).

A mutant is a text that stands once in a file, what stands there instead, and the tests that must fail then. One that
survives is a hole in the tests: mend the tests, never this list.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One fault.

    Args:
        name: kind of code, then what is lost: `rule: ...`, `shim: ...`, `guard: ...`.
        what: the fault, in words.
        file: where, from the repository's root.
        old: text that stands there once.
        new: what stands there instead.
        tests: pytest's words; one of these tests must fail.
    """

    name: str
    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def _mutant(name: str, what: str, file: str, old: str, new: str, *tests: str) -> Mutant:
    return Mutant(name=name, what=what, file=file, old=old, new=new, tests=tuple(f"tests/{test}" for test in tests))


_RULES = "mup_megatron/rules.py"
_SHAPES = "mup_megatron/shapes.py"
_TABLE = "mup_megatron/parametrization.py"
_APPLY = "mup_megatron/apply_rules.py"
_OPTIM = "mup_megatron/optim.py"
_INIT = "mup_megatron/init.py"
_LAYOUT = "mup_megatron/layout.py"
_GROWTH_CHECKS = "mup_megatron/config/growth_checks.py"
_RUN_CHECKS = "mup_megatron/config/run_checks.py"
_CHECKPOINT = "mup_megatron/checkpoint.py"
_MANIFEST = "mup_megatron/manifest.py"
_STATE = "mup_megatron/engines/state.py"
_NORM = "mup_megatron/engines/gradient_norm.py"
_STUDY = "mup_megatron/tuning/study.py"
_STORAGE = "mup_megatron/tuning/storage.py"
_OUTCOME = "mup_megatron/tuning/outcome.py"
_RECORD = "mup_megatron/tuning/record.py"

RULES = (
    _mutant(
        "rule: init without g",
        "an output-like tensor starts as a hidden one does",
        _RULES,
        "float(1 / (forward * m_in)) if output_like",
        "float(1 / forward) / math.sqrt(m_in) if output_like",
        "test_rules.py",
    ),
    _mutant(
        "rule: init without A",
        "the readout starts as a hidden tensor does",
        _RULES,
        "else float(1 / forward) / math.sqrt(m_in)",
        "else 1.0 / math.sqrt(m_in)",
        "test_rules.py",
    ),
    _mutant(
        "rule: Adam's rate without A",
        "the readout's rate falls with width",
        _RULES,
        'return 1 / (forward * m_in)\n    if rule == "sgd"',
        'return 1 / m_in\n    if rule == "sgd"',
        "test_rules.py",
    ),
    _mutant(
        "rule: SGD's rate with A once",
        "m_out/(A m_in) instead of m_out/(A² m_in)",
        _RULES,
        "return m_out / (forward**2 * m_in)\n    return math.sqrt",
        "return m_out / (forward * m_in)\n    return math.sqrt",
        "test_rules.py",
    ),
    _mutant(
        "rule: SGD's rate without m_out",
        "vectors keep their rate",
        _RULES,
        "return m_out / (forward**2 * m_in)\n    return math.sqrt",
        "return 1 / (forward**2 * m_in)\n    return math.sqrt",
        "test_rules.py",
    ),
    _mutant(
        "rule: Muon's rate without m_out",
        "1/sqrt(m_in) instead of sqrt(m_out/m_in)",
        _RULES,
        "return math.sqrt(m_out / m_in) / float(forward)",
        "return math.sqrt(1 / m_in) / float(forward)",
        "test_rules.py",
    ),
    _mutant(
        "rule: epsilon without A",
        "the readout's epsilon does not follow its gradient",
        _RULES,
        "return forward / m_out",
        "return 1 / m_out",
        "test_rules.py",
    ),
    _mutant(
        "rule: epsilon does not scale",
        "every tensor has the base's epsilon",
        _RULES,
        "return forward / m_out",
        "return forward / 1",
        "test_rules.py",
    ),
    _mutant(
        "rule: decay is coupled",
        "lr·λ falls with width although the rule is independent",
        _RULES,
        'return 1 / lr_multiplier if rule == "independent" else ONE',
        "return ONE",
        "test_rules.py",
    ),
    _mutant(
        "rule: invariant norm with A once",
        "m_out/(A m_in) weighs |grad|²",
        _RULES,
        '6)."""\n    return m_out / (forward**2 * m_in)',
        '6)."""\n    return m_out / (forward * m_in)',
        "test_rules.py",
    ),
    _mutant(
        "rule: attention at 1/sqrt(d)",
        "attention logits grow with the head size",
        _RULES,
        "return attention_multiplier * scale * math.sqrt(base_head_size / head_size)",
        "return attention_multiplier * scale",
        "test_rules.py",
    ),
    _mutant(
        "rule: YaRN's factor once",
        "mscale instead of mscale² in attention",
        _RULES,
        "scale = yarn_mscale * yarn_mscale / math.sqrt(head_size)",
        "scale = yarn_mscale / math.sqrt(head_size)",
        "layers/test_architecture_rules.py",
    ),
    _mutant(
        "rule: depth factor of the branch",
        "branches are added whole at any depth",
        _RULES,
        "return DepthFactors(branch=m**-exponent,",
        "return DepthFactors(branch=1.0,",
        "test_rules.py",
    ),
    _mutant(
        "rule: depth factor of SGD's rate",
        "SGD takes Adam's exponent",
        _RULES,
        'lr = m ** (2 * exponent - 1) if rule == "sgd" else m ** (exponent - 1)',
        "lr = m ** (exponent - 1)",
        "test_rules.py",
    ),
    _mutant(
        "rule: depth factor of epsilon",
        "epsilon does not follow the branches' gradients",
        _RULES,
        "lr=lr, eps=m**-exponent)",
        "lr=lr, eps=1.0)",
        "test_rules.py",
    ),
)

SHAPES = (
    _mutant(
        "shapes: growth by comparison",
        "a growing dimension whose ratio is 1 counts as fixed",
        _SHAPES,
        'with the family."""\n        return self.base_dim is not None',
        'with the family."""\n        return self.base_dim is not None and self.base_dim != self.dim',
        "test_shapes.py",
    ),
    _mutant(
        "shapes: undeclared growth",
        "a size that nobody declared may differ from the base's",
        _SHAPES,
        "if not dim.grows and size != small:",
        "if False:",
        "test_shapes.py",
    ),
    _mutant(
        "shapes: vectors decay",
        "gains and biases are decayed",
        _SHAPES,
        "return len(self.shape) > 1",
        "return True",
        "test_parametrization.py",
        "layers/test_architecture_rules.py",
    ),
    _mutant(
        "shapes: MTP counts as the decoder",
        "multi-token prediction's layers take the decoder's depth factor",
        _SHAPES,
        'if parts[:2] == ["decoder", "layers"] else None',
        'if parts[1:2] == ["layers"] else None',
        "test_shapes.py",
    ),
    _mutant(
        "shapes: a .bsh file's blocks are guessed",
        "blocks of different sizes are split evenly in the base",
        _SHAPES,
        "if len(set(fused.fan_outs.values())) == 1 and whole.base_dim is not None",
        "if whole.base_dim is not None",
        "test_shapes.py",
    ),
    _mutant(
        "shapes: a .bsh file of another model",
        "tensors that the file lacks are let through",
        _SHAPES,
        "if set(target) != set(base.dims):",
        "if False:",
        "test_shapes.py",
    ),
)

TABLE = (
    _mutant(
        "table: depth factors everywhere",
        "embedding, final norm and readout take the factors of the blocks",
        _APPLY,
        "depth = self._depth if shape.layer is not None else rules.DepthFactors()",
        "depth = self._depth",
        "test_parametrization.py",
    ),
    _mutant(
        "table: epsilon of the smallest block",
        "a fused tensor's epsilon exceeds the gradient of its larger block",
        _RULES,
        "return max(self.m_outs.values())",
        "return min(self.m_outs.values())",
        "test_parametrization.py",
    ),
    _mutant(
        "table: frozen gains have a rate",
        "frozen parameters get the base's rate",
        _APPLY,
        "if spec.frozen:",
        "if False:",
        "layers/test_architecture_rules.py",
    ),
    _mutant(
        "table: output projections by their own depth",
        "the init of output projections moves with the target's depth",
        _APPLY,
        "layers = config.num_layers_base if _is_mup(config) else config.model.num_layers",
        "layers = config.model.num_layers",
        "test_parametrization.py",
    ),
    _mutant(
        "table: the embedding's own init",
        "embedding_init_method_std is not read",
        _APPLY,
        "hparams.embedding_init_method_std or hparams.init_method_std",
        "hparams.init_method_std",
        "test_parametrization.py",
    ),
    _mutant(
        "table: a tied head without A",
        "tied logits are not divided by m",
        _APPLY,
        "return rules.Ratios(m_in=self._ratios(embedding).m_out, readout=True)",
        "return rules.Ratios(m_in=self._ratios(embedding).m_out)",
        "test_parametrization.py",
    ),
    _mutant(
        "table: Muon takes embeddings",
        "an embedding's rate is Muon's",
        _APPLY,
        "or spec.init is Init.EMBEDDING or spec.readout):",
        "or spec.readout):",
        "test_parametrization.py",
    ),
    _mutant(
        "table: SGD on blocks that grow apart",
        "one rate for blocks that need several",
        _APPLY,
        'if rule == "sgd" and len(set(ratios.m_outs.values())) > 1:',
        "if False:",
        "test_parametrization.py",
    ),
    _mutant(
        "table: zero query zeroes keys and values",
        "the whole of QKV starts from zero",
        _APPLY,
        "(config.zero_init_query and spec.is_query(block))",
        "(config.zero_init_query and spec.query)",
        "layers/test_architecture_rules.py",
    ),
    _mutant(
        "table: the measured rule for a fixed FFN",
        "`auto` is output_like in an MLP too",
        _APPLY,
        '"hidden_like" if ".mlp." in shape.name else "output_like"',
        '"output_like"',
        "test_parametrization.py",
    ),
    _mutant(
        "table: the base's decay",
        "weight decay is the base's on every tensor",
        _TABLE,
        "return self.base.weight_decay * self.weight_decay_multiplier",
        "return self.base.weight_decay",
        "test_parametrization.py",
    ),
    _mutant(
        "table: the output multiplier in A's place",
        "the tuned constant overwrites 1/m_in",
        _APPLY,
        "readout=hparams.output_multiplier * float(self._readout().forward),",
        "readout=hparams.output_multiplier,",
        "test_parametrization.py",
    ),
)

OPTIMIZER = (
    _mutant(
        "groups: epsilon is lost",
        "every group has the optimizer's own epsilon",
        _OPTIM,
        'if tensor.eps is not None:\n                group["eps"] = tensor.eps',
        'if tensor.eps is not None:\n                group["eps"] = parametrization.config.optimizer.eps',
        "test_optim.py",
    ),
    _mutant(
        "groups: one rate",
        "the schedule sets the base's rate on every group",
        _OPTIM,
        'group["lr"] = base_lr * group["lr_multiplier"]',
        'group["lr"] = base_lr',
        "test_optim.py",
    ),
    _mutant(
        "groups: Megatron's decay",
        "megatron-core decays every group by the base's decay",
        _OPTIM,
        '"wd_mult": tensor.weight_decay_multiplier,',
        '"wd_mult": 1.0,',
        "engines/test_parity.py::test_layout_changes_nothing",
    ),
    _mutant(
        "groups: frozen parameters are stepped",
        "frozen gains reach the optimizer",
        _OPTIM,
        "if tensor.shape.spec.frozen:\n            continue",
        "if False:\n            continue",
        "test_optim.py::test_frozen_gains_have_no_group",
    ),
    _mutant(
        "groups: Adam's decay is L2",
        "adamw builds torch's Adam",
        _OPTIM,
        "kind = torch.optim.AdamW if is_adamw else torch.optim.Adam",
        "kind = torch.optim.Adam",
        "test_optim.py",
    ),
    _mutant(
        "schedule: milestones",
        "multi-step decay drops one step late",
        _OPTIM,
        "bisect.bisect_right(self._training.lr_milestones, step)",
        "bisect.bisect_left(self._training.lr_milestones, step)",
        "test_optim.py",
    ),
)

INIT = (
    _mutant(
        "init: the name does not matter",
        "all tensors of one size start with the same numbers",
        _INIT,
        'f"{seed}/{name}/{number}"',
        'f"{seed}/{number}"',
        "test_init.py",
    ),
    _mutant(
        "init: the seed does not matter",
        "every run starts from the same weights",
        _INIT,
        'f"{seed}/{name}/{number}"',
        'f"{name}/{number}"',
        "test_init.py",
    ),
    _mutant(
        "init: chunks repeat",
        "every chunk of a large tensor holds the same numbers",
        _INIT,
        'f"{seed}/{name}/{number}"',
        'f"{seed}/{name}"',
        "test_init.py",
    ),
    _mutant(
        "init: stride is ignored",
        "gate|up is sliced as one block",
        _INIT,
        "return [(piece * (rank + i * ranks), piece * (rank + i * ranks + 1)) for i in range(stride)]",
        "return [(piece * (rank * stride + i), piece * (rank * stride + i + 1)) for i in range(stride)]",
        "test_init.py",
    ),
    _mutant(
        "init: one standard deviation for all blocks",
        "every block takes the first one's",
        _INIT,
        "return period[rows % len(period)]",
        "return period[rows * 0]",
        "test_init.py",
    ),
)

SHIMS = (
    _mutant(
        "shim: rows of QKV in another order",
        "all queries, then all keys, then all values",
        "mup_megatron/layers/linear.py",
        'return Fused(runs=(("query", query), *gate, ("key", head_size), ("value", head_size)), repeats=groups)',
        'runs = (("query", query * groups), ("key", head_size * groups), ("value", head_size * groups))\n'
        "        return Fused(runs=runs)",
        "layers/test_architecture_rules.py",
    ),
    _mutant(
        "shim: residual multiplier on the bias",
        "a branch's bias is added whole",
        "mup_megatron/layers/residual.py",
        "scaled_bias = None if bias is None else bias * multiplier",
        "scaled_bias = bias",
        "layers/test_architecture_rules.py",
    ),
    _mutant(
        "shim: the router is hidden-like",
        "the router's init loses g",
        "mup_megatron/layers/moe.py",
        'TensorSpec(shape=(experts, hidden), fan_in=1, fan_out=0, init=Init.WEIGHT, fixed_fan_out="output_like"),',
        'TensorSpec(shape=(experts, hidden), fan_in=1, fan_out=0, init=Init.WEIGHT, fixed_fan_out="hidden_like"),',
        "layers/test_architecture_rules.py",
    ),
    _mutant(
        "shim: the shared experts' gate is hidden-like",
        "the gate's init loses g",
        "mup_megatron/layers/moe.py",
        'TensorSpec(shape=shape, fan_in=1, fan_out=0, init=Init.WEIGHT, fixed_fan_out="output_like"),',
        'TensorSpec(shape=shape, fan_in=1, fan_out=0, init=Init.WEIGHT, fixed_fan_out="hidden_like"),',
        "layers/test_architecture_rules.py",
    ),
    _mutant(
        "shim: the readout is hidden",
        "the head's record does not say that it is the readout",
        "mup_megatron/layers/embedding.py",
        "readout=True,",
        "readout=False,",
        "test_parametrization.py",
    ),
    _mutant(
        "shim: positions are hidden",
        "the position embedding's fan-in and fan-out are swapped",
        "mup_megatron/layers/embedding.py",
        "fan_in=0, fan_out=1, init=Init.EMBEDDING))",
        "fan_in=1, fan_out=0, init=Init.EMBEDDING))",
        "test_parametrization.py",
    ),
    _mutant(
        "shim: QK-norm gains are summed over heads",
        "each tensor-parallel rank keeps the gradient of its own heads",
        "mup_megatron/layers/norm.py",
        "parameter.sequence_parallel = sequence_parallel or per_head",
        "parameter.sequence_parallel = sequence_parallel",
        "layers/test_architectures.py::test_layout_changes_nothing",
    ),
    _mutant(
        "shim: the readout's multiplier",
        "the head's input is not scaled",
        "mup_megatron/layers/embedding.py",
        "return (inputs[0] * multiplier, *inputs[1:])",
        "return inputs",
        "tuning/test_values_reach.py",
    ),
    _mutant(
        "shim: the embedding's multiplier",
        "the embedding's output is not scaled",
        "mup_megatron/layers/embedding.py",
        "lambda _module, _inputs, output: output * multiplier",
        "lambda _module, _inputs, output: output",
        "tuning/test_values_reach.py",
    ),
    _mutant(
        "shim: the sink's length is fixed",
        "the learnable softmax offset has no growing fan-out",
        "mup_megatron/layers/attention.py",
        "spec = TensorSpec(shape=heads, fan_in=None, fan_out=0, init=Init.WEIGHT, partition_dim=0)",
        "spec = TensorSpec(shape=heads, fan_in=0, fan_out=0, init=Init.WEIGHT, partition_dim=0)",
        "layers/test_architecture_rules.py",
    ),
    _mutant(
        "shim: QK-norm and g",
        "queries under QK-norm start output-like",
        "mup_megatron/layers/linear.py",
        "if config.qk_layernorm or config.qk_l2_norm:",
        "if False:",
        "layers/test_architecture_rules.py",
    ),
)

LAYOUT = (
    _mutant(
        "layout: data rank under context parallelism",
        "context-parallel ranks read data of their own",
        _LAYOUT,
        "return rank // (self.tensor * self.context * stages) % self.data",
        "return rank // self.tensor % self.data",
        "setup/test_layout.py",
    ),
    _mutant(
        "layout: optimizer offload under Megatron's engine",
        "is accepted and ignored",
        _LAYOUT,
        "elif parallel.offload_optimizer:",
        "elif False:",
        "setup/test_layout.py",
    ),
    _mutant(
        "layout: experts under ZeRO 3",
        "reach DeepSpeed, which has no such thing",
        _LAYOUT,
        "and expert > 1 and parallel.zero_stage == 3:",
        "and expert > 1 and False:",
        "setup/test_layout.py",
    ),
    _mutant(
        "layout: experts that cannot be shared",
        "an expert-parallel size that does not divide the experts",
        _LAYOUT,
        "if model.num_moe_experts % expert:",
        "if False:",
        "setup/test_layout.py",
    ),
    _mutant(
        "layout: experts without sequence parallelism",
        "TP with experts reaches upstream without it",
        _LAYOUT,
        "if model.num_moe_experts is not None and tensor > 1 and not config.parallel.sequence_parallel:",
        "if False:",
        "setup/test_layout.py",
    ),
    _mutant(
        "layout: uneven batches",
        "a batch that the ranks cannot share",
        _LAYOUT,
        "if config.training.global_batch_size % samples:",
        "if False:",
        "setup/test_layout.py",
        "test_train.py::test_bad_input",
    ),
)

GUARDS = (
    _mutant(
        "guard: Adam with L2",
        "weight decay under Adam is added to the gradient",
        _RUN_CHECKS,
        'if optimizer.name == "adam" and hparams.weight_decay > 0:',
        "if False:",
        "config/test_config.py",
    ),
    _mutant(
        "guard: zero readout with a tied head",
        "the embedding starts from zero",
        _GROWTH_CHECKS,
        "if parametrization.zero_init_readout and model.share_embeddings_and_output_weights:",
        "if False:",
        "layers/test_architecture_rules.py",
        "config/test_config.py",
    ),
    _mutant(
        "guard: zero query under QK-norm",
        "the query's gradient has no bound",
        _GROWTH_CHECKS,
        "if parametrization.zero_init_query and getattr(model, norm) and not model.multi_latent_attention:",
        "if False:",
        "layers/test_architecture_rules.py",
        "config/test_config.py",
    ),
    _mutant(
        "guard: a checkpoint of another run",
        "a changed hyperparameter goes on as if it were the same run",
        _MANIFEST,
        "    if differences:\n        raise UserError(",
        "    if False:\n        raise UserError(",
        "test_checkpoint.py",
    ),
    _mutant(
        "guard: a checkpoint's checksum",
        "a flipped bit is loaded",
        _CHECKPOINT,
        "if _sha256(path / name) != sums[name]:",
        "if False:",
        "test_checkpoint.py",
    ),
    _mutant(
        "guard: only tensors",
        "a checkpoint's index may name other things than tensors",
        _STATE,
        "if not isinstance(entry, TensorStorageMetadata):",
        "if False:",
        "test_checkpoint.py",
        "test_bad_checkpoints.py",
    ),
    _mutant(
        "guard: the index imports what it likes",
        "a pickle in the index is executed",
        _STATE,
        "if (module, name) in self._ALLOWED or",
        "if True or",
        "test_checkpoint.py",
        "test_bad_checkpoints.py",
    ),
    _mutant(
        "guard: a record of another family",
        "values of another family are transferred",
        _RECORD,
        'if record["digest"] == digest(settings):',
        "if True:",
        "tuning/test_record.py",
    ),
    _mutant(
        "guard: a record edited by hand",
        "its checksum is not compared",
        _RECORD,
        'if record.get("checksum") != digest(',
        "if False and digest(",
        "tuning/test_record.py",
    ),
    _mutant(
        "guard: a patch on another signature",
        "a symbol that upstream changed is wrapped all the same",
        "patches/patch.py",
        "if found != self.parameters:",
        "if False:",
        "patches/test_patches.py",
    ),
    _mutant(
        "guard: generated padding",
        "tokens of the vocabulary's padding may be chosen",
        "mup_megatron/generate.py",
        "sampling.choose(logits[: int(tokenizer.vocab_size)], generator)",
        "sampling.choose(logits, generator)",
        "test_generate.py",
    ),
)

RECOVERY = (
    _mutant(
        "recovery: checkpoints are written in place",
        "a half-written checkpoint bears the name of a whole one",
        _CHECKPOINT,
        'return self.directory / f"step_{step:08d}.partial"',
        'return self.directory / f"step_{step:08d}"',
        "test_checkpoint.py",
    ),
    _mutant(
        "recovery: the oldest are kept",
        "the newest checkpoints are removed",
        _CHECKPOINT,
        "for old in self._whole()[: -self._kept]:",
        "for old in self._whole()[self._kept :]:",
        "test_checkpoint.py",
    ),
    _mutant(
        "recovery: strided slices of a checkpoint",
        "gate|up is saved under another layout's offsets",
        _STATE,
        "offsets = [(spec.partition_dim, own + number * slices, spec.partition_stride * slices)]",
        "offsets = [(spec.partition_dim, own * spec.partition_stride + number, spec.partition_stride * slices)]",
        "engines/test_resume.py",
    ),
    _mutant(
        "recovery: halving by arrival",
        "a trial is compared with whoever is there",
        _STUDY,
        "if all(step in other.reports or other.state in FINISHED for other in earlier):",
        "if True:",
        "tuning/test_study.py",
    ),
    _mutant(
        "recovery: a lost trial is retried for ever",
        "a trial that kills its workers never fails",
        _STORAGE,
        "if times < most:",
        "if True:",
        "tuning/test_study.py",
    ),
    _mutant(
        "recovery: a study of other settings",
        "goes on with this config's",
        _STUDY,
        "if found is not None and found != decided:",
        "if False:",
        "tuning/test_study.py",
    ),
    _mutant(
        "tuning: repetitions do not count",
        "the candidate with the best single loss is chosen",
        _OUTCOME,
        "candidates.sort(key=lambda candidate: (candidate.mean, candidate.slot))",
        "candidates.sort(key=lambda candidate: (candidate.losses[0], candidate.slot))",
        "tuning/test_study.py",
    ),
    _mutant(
        "tuning: a sampler that never learns",
        "TPE is not given the trials that ended",
        _STORAGE,
        "study = self._load(sampler(self._config, trial.slot)) if learns else self._study",
        "study = self._study",
        "tuning/test_study.py",
    ),
)

NORM = (
    _mutant(
        "norm: a replicated gradient counts twice",
        "every tensor-parallel rank adds the gains' gradients",
        _NORM,
        "if spec.partition_dim is None and own != 0:",
        "if False:",
        "engines/test_layout_invariance.py::test_layout_changes_nothing",
        "proof/test_negative_controls.py::test_the_unbroken_model_equals_one_process",
    ),
    _mutant(
        "norm: never clipped",
        "gradients are not scaled down",
        _NORM,
        "if limit and factor < 1.0:",
        "if False:",
        "engines/test_engine.py::test_clipping_limits_the_update",
    ),
    _mutant(
        "norm: a partition without its place",
        "a partition's rows are weighted as the tensor's first ones",
        _NORM,
        "rows = local_rows(spec, weights, rank, ranks, squares.device)[first:last].double()",
        "rows = local_rows(spec, weights, rank, ranks, squares.device)[: last - first].double()",
        "engines/test_gradient_norm.py::test_a_part_is_weighted_by_its_place",
    ),
    _mutant(
        "norm: the invariant norm without the readout's A",
        "an untied readout's gradient is weighted as a tensor's without a multiplier",
        _APPLY,
        "rules.gradient_norm(m_in=ratios.m_in, m_out=m_out, forward=ratios.forward)",
        "rules.gradient_norm(m_in=ratios.m_in, m_out=m_out)",
        "engines/test_gradient_norm.py::test_weights_of_an_untied_readout",
    ),
    _mutant(
        "norm: a control is clipped by µP's weights",
        "the weights are those of the shapes, in the standard parametrization too",
        _APPLY,
        "rules.gradient_norm(m_in=ratios.m_in, m_out=m_out, forward=ratios.forward)",
        "rules.gradient_norm(m_in=shape.ratios.m_in, m_out=m_out, forward=ratios.forward)",
        "engines/test_gradient_norm.py::test_weights_of_an_untied_readout",
    ),
)

BASE = (
    _mutant(
        "guard: a depth rule without the base's depth",
        "each model takes its own depth for the base's, and the rule vanishes",
        _GROWTH_CHECKS,
        "if config.base.num_layers is None:",
        "if False:",
        "config/test_config.py::test_bad",
    ),
    _mutant(
        "guard: sizes beside a file of base shapes",
        "they are ignored in silence",
        _GROWTH_CHECKS,
        "        if beside:",
        "        if False:",
        "config/test_base_file.py::test_sizes_beside_the_file_are_refused",
    ),
    _mutant(
        "guard: a head size that a .bsh file does not tell",
        "the target's own is taken for the base's",
        "mup_megatron/base_file.py",
        "head_size = named or told",
        "head_size = named or told or config.model.head_size",
        "config/test_base_file.py::test_a_growing_head_size_that_the_file_does_not_tell_is_refused",
    ),
    _mutant(
        "guard: the depth that a .bsh file was written for",
        "a file of another base serves",
        "mup_megatron/base_file.py",
        "if layers is not None and layers != config.num_layers_base:",
        "if False:",
        "config/test_base_file.py::test_what_contradicts_the_file_is_refused",
    ),
    _mutant(
        "record: what grows without being named",
        "the digest does not hold an FFN size that is left out",
        "mup_megatron/tuning/family.py",
        "**{name: size.base for name, size in growth.items()}",
        "**{}",
        "tuning/test_record.py::test_the_digest_holds_what_grows_without_being_named",
    ),
    _mutant(
        "table: Muon takes every tensor block by block",
        "MLA's projections are scaled by blocks that upstream does not take apart",
        _APPLY,
        '[("", shape.fan_out)]',
        '(list(blocks.items()) or [("", shape.fan_out)])',
        "test_parametrization.py::test_muon_takes_any_other_tensor_whole",
        "test_parametrization.py::test_muon_on_a_query_projection_whose_blocks_are_smaller_than_its_input",
    ),
)

_DEEPSPEED = "mup_megatron/deepspeed"
TORCH = (
    _mutant(
        "torch: MuReadout without A",
        "logits are not divided by the width ratio",
        "mup_megatron/mup/layer.py",
        "return super().forward(self.output_mult * x / self.width_mult())",
        "return super().forward(self.output_mult * x)",
        "mup/test_mup.py",
    ),
    _mutant(
        "torch: the readout's default init",
        "torch's init of the readout keeps falling with width",
        "mup_megatron/mup/layer.py",
        "            scale_(self.bias, factor)\n        scale_(self.weight, factor)",
        "            scale_(self.bias, factor)",
        "mup/test_mup.py",
    ),
    _mutant(
        "torch: MuSGD's vectors",
        "vectors keep the base's rate under SGD",
        "mup_megatron/mup/infshape.py",
        "return Ratios(m_outs={None: self.main.ratio})",
        "return Ratios()",
        "mup/test_mup.py",
    ),
    _mutant(
        "torch: decay in MuAdam",
        "decay is not multiplied back",
        "mup_megatron/mup/optim.py",
        'group["weight_decay"] = scaled(base["weight_decay"], rules.weight_decay("independent", lr))',
        'group["weight_decay"] = base["weight_decay"]',
        "mup/test_mup.py",
    ),
)

_MUP = "mup_megatron/mup"
SCRIPTS = (
    _mutant(
        "script: another spec is replaced in silence",
        "the shims take the place of what a script put into its layer spec",
        "mup_megatron/layers/given.py",
        """raise _differs(f"{where}: {path or 'module'}", found, expected)""",
        "pass",
        "layers/test_given_spec.py::test_what_the_shims_would_undo_is_refused",
    ),
    _mutant(
        "script: norms come back",
        "norms that a script left out are built",
        "mup_megatron/layers/spec.py",
        "IdentityOp if place in model.without_norms else norm()",
        "norm()",
        "layers/test_given_spec.py::test_without_norms_is_built_and_parametrised",
    ),
    _mutant(
        "shim: multi-token prediction with the decoder's depth",
        "its branches are scaled by the decoder's depth factor",
        "mup_megatron/model.py",
        "residual_multiplier=config.hparams.residual_multiplier",
        "residual_multiplier=forward.residual",
        "layers/test_architecture_rules.py::test_branches_of_multi_token_prediction_keep_their_depth",
    ),
    _mutant(
        "torch: a gate of deepspeed.moe as a readout",
        "its init and rate are those of a layer with a multiplier",
        f"{_MUP}/foreign.py",
        "of_gate.output_like = of_gate[1].grows and not of_gate[0].grows",
        "of_gate.output_like = False",
        "deepspeed/test_deepspeed_initialize.py::test_a_gate_of_deepspeeds_experts",
    ),
    _mutant(
        "torch: a gate that is a MuReadout",
        "its multiplier is lost in silence",
        f"{_MUP}/foreign.py",
        "if isinstance(gate, MuReadout):",
        "if False:",
        "deepspeed/test_deepspeed_initialize.py::test_a_gate_that_is_a_readout",
    ),
    _mutant(
        "torch: init that knows no width is not said",
        "activations grow with width without a word",
        f"{_MUP}/drawn.py",
        "if suspects:",
        "if False:",
        "mup/test_mup_foreign.py::test_what_looks_drawn_without_width",
    ),
    _mutant(
        "torch: init that knows no width is kept",
        "matrices inside keep their deviation where they are to be rescaled",
        f"{_MUP}/drawn.py",
        "if infshape.ninf() == 2 or infshape.output_like:",
        "if infshape.output_like:",
        "mup/test_mup_foreign.py::test_rescaled_from_a_constant_by_hand",
    ),
)

MUTANTS: tuple[Mutant, ...] = (
    *RULES,
    *SHAPES,
    *TABLE,
    *OPTIMIZER,
    *INIT,
    *SHIMS,
    *LAYOUT,
    *GUARDS,
    *RECOVERY,
    *NORM,
    *BASE,
    *TORCH,
    *SCRIPTS,
)
