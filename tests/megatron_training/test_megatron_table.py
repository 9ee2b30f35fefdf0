"""The table of megatron.training's options: true to the installed version, and every refusal of it."""

from __future__ import annotations

import importlib.metadata
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from mup_megatron.megatron_training import option_table
from mup_megatron.megatron_training.field_table import FIELDS
from mup_megatron.megatron_training.option_check import (
    Known,
    check_config,
    check_optimizer,
    check_options,
    check_table,
    refused_in_a_run,
    unread_options,
)
from mup_megatron.megatron_training.option_table import OPTIONS, Rule
from mup_megatron.megatron_training.options import known
from mup_megatron.util.errors import UserError
from tests.helpers.installed import needs_training
from tests.megatron_training.test_megatron_options import parsed, parser

DATA = Path(__file__).parent
INSTALLED = importlib.metadata.version("megatron-core")


def listed(version: str) -> list[str]:
    """Options of a release's parser, read from its source once."""
    lines = (DATA / f"megatron_options_{version}.txt").read_text().splitlines()
    assert lines[0].startswith("#")
    return lines[1:]


@needs_training
def test_no_rule_is_for_an_option_that_no_release_has() -> None:
    parser()
    released = {name for version in ("0.16.1", "0.17.1", "0.18.2") for name in listed(version)}
    released |= {option.removeprefix("--") for action in known().actions.values() for option in action.option_strings}
    assert set(OPTIONS) <= released


def of_names(names: list[str]) -> Known:
    own = ArgumentParser()
    for name in names:
        own.add_argument(f"--{name}")
    return Known(own._actions)


def options_of_installed() -> Known:
    if Version(INSTALLED) < Version("0.17"):
        return of_names(listed("0.16.1"))
    parser()
    return known()


def test_the_table_is_of_the_installed_version() -> None:
    check_table(options_of_installed(), INSTALLED)


@pytest.mark.parametrize("table", ["options", "fields"])
def test_a_rule_for_a_name_that_is_gone(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal of an option that was renamed would never fire, so start-up fails; versions are heeded."""
    rules, said = {"options": (OPTIONS, "option --old-name"), "fields": (FIELDS, "field old-name")}[table]
    monkeypatch.setitem(rules, "old-name", Rule(kind="unsupported", why="", versions="<0.16"))
    check_table(options_of_installed(), INSTALLED)
    monkeypatch.setitem(rules, "old-name", Rule(kind="unsupported", why=""))
    with pytest.raises(UserError, match=f"has no {said}, for which"):
        check_table(options_of_installed(), INSTALLED)


def test_an_option_that_upstream_renamed() -> None:
    names = [name for name in listed("0.16.1") if name != "apply-layernorm-1p"]
    with pytest.raises(UserError, match=r"megatron-core 0\.16\.1: has no option --apply-layernorm-1p, for which"):
        check_table(of_names([*names, "zero-centered-gamma"]), "0.16.1")


def with_rules() -> list[tuple[str, Rule]]:
    """Options of the installed parser that a table has."""
    return [(name, rule) for name in known().actions if (rule := known().rule(name)) is not None]


LOCAL = ("--transformer-impl", "local", "--distributed-backend", "gloo")


def refusal(*words: str) -> str:
    with pytest.raises(UserError) as problem:
        check_options(parsed(*LOCAL, *words), {}, known())
    assert "\n" not in str(problem.value)
    return str(problem.value)


# Every option that no machine takes in 0.19, as it is typed, with the words that say why.
REFUSED = """
--transformer-impl inference_optimized | not tested in µP
--heterogeneous-layers-config-encoded-json {} | builds equal layers all the same
--hybrid-override-pattern M*M* | give that
--mtp-hybrid-override-pattern MM | behind /; give that
--dsa-indexer-topk-freq 2 | differ by their number alone
--mla-down-proj-fusion | other modules
--use-kitchen-attention | other modules
--use-te-activation-func | others compute the same; leave it out
--use-transformer-engine-op-fuser | others compute the same; leave it out
--fused-residual-rmsnorm | others compute the same; leave it out
--use-grouped-gemm-for-dense-mlp | others compute the same; leave it out
--use-grouped-gemm-for-shared-expert | others compute the same; leave it out
--moe-single-grouped-weight | other modules
--moe-single-grouped-bias | other modules
--attention-backend local | --spec local alone
--moe-paged-stash | others compute the same; leave it out
--fp8-param-gather | quantized where it is made
--fp4-param-gather | quantized where it is made
--fp8-output-proj | makes the readout a module of Transformer Engine's
--te-precision-config-file a.yaml | give --fp8-format
--init-method-xavier-uniform | give --init-method-std
--init-model-with-meta-device | its module draws upstream's initial values into it
--moe-use-upcycling | train the mixture from its own
--freeze-all-layers | nothing would be trained
--optimizer soap | no rule for it is built and tested
--muon-scale-mode unit_rms_norm | worked out for the default
--muon-no-split-qkv | rates of their own
--muon-scalar-optimizer lion | worked out for the default
--optimizer soap | no rule for it is built and tested
--optimizer adaptive_muon | no rule for it is built and tested
--tensor-parallel-num-weight-shards 2 | tensor-parallel ranks alone
--expert-tensor-parallel-num-weight-shards 2 | tensor-parallel ranks alone
--hybrid-context-parallel | split evenly over ranks
--perform-rl-step | the loss is another
--sft | the loss is another
--logits-load-dir a | the loss is another
--non-persistent-save-interval 5 | no record
--ckpt-convert-format torch | no record
--use-checkpoint-args | count as typed
--use-mup | choose one
--mup-width-mult 4 | nothing without --use-mup
--mup-base-hidden-size 64 | nothing without --use-mup
--mup-embedding-mult 10 | under hparams: of --mup-config
--mup-output-mult 2 | under hparams: of --mup-config
--mup-base-head-dim 64 | nothing without --use-mup
--mup-attn-scale-power 0.5 | nothing without --use-mup
--yaml-cfg a.yaml | use command-line options
"""
CASES = [tuple(part.strip() for part in line.rsplit(" | ", 1)) for line in REFUSED.strip().splitlines()]


@needs_training
@pytest.mark.parametrize(("words", "why"), CASES)
def test_refused(words: str, why: str) -> None:
    said = refusal(*words.split())
    assert said.startswith(words.split()[0])
    assert f": not under µP here ({OPTIONS[words.split()[0].removeprefix('--')].why}); expected " in said
    assert why in said


@needs_training
def test_every_refused_option_is_tried() -> None:
    parser()
    there = {known().typed(name) for name, rule in with_rules() if rule.is_refused}
    assert there == {words.split()[0] for words, _ in CASES}


@needs_training
@pytest.mark.parametrize("words", ["--experimental-attention-variant dsa", "--moe-latent-size 8"])
def test_local_layers_that_upstream_does_not_have(words: str) -> None:
    """With a spec of one's own they are taken."""
    assert refusal(*words.split()).startswith(f"{words}: megatron-core builds it of Transformer Engine's layers alone")
    own = ("--spec", "tests.model.as_built.own_layers", "latent_experts")
    check_options(parsed(*LOCAL, *words.split(), *own), {}, known())


# What computes on CUDA alone, as it is typed.
CUDA = """
--moe-grouped-gemm
--fp8-format hybrid
--fp4-format e2m1
--cuda-graph-impl local
--enable-cuda-graph
--external-cuda-graph
--optimizer-cuda-graph
--moe-shared-expert-overlap
--overlap-moe-expert-parallel-comm
--ep-overlap-early-attn-memory-release
--delay-wgrad-compute
--overlap-dispatch-backward-with-experts-wgrad
--defer-embedding-wgrad-compute
--moe-expert-rank-capacity-factor 1.5
--log-max-attention-logit
--qk-clip
--use-precision-aware-optimizer
--optimizer-cpu-offload
--overlap-param-gather-with-optimizer-step
--use-megatron-fsdp
"""


@needs_training
@pytest.mark.parametrize("words", CUDA.strip().splitlines())
def test_cuda_alone(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused where there is no CUDA; taken where there is, and where the run is only explained."""
    assert refusal(*words.split()).startswith(f"{words}: computes on CUDA alone, and none is here; expected ")
    args = parsed(*LOCAL, *words.split())
    check_options(args, {}, known(), here=False)
    assert refused_in_a_run(args, {}, known()) == []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    check_options(args, {}, known())


@needs_training
@pytest.mark.parametrize(
    "words",
    [
        "--fp8-format e4m3 --fp8-recipe delayed --fp8-margin 1 --fp8-amax-history-len 16 --fp8-amax-compute-algo max",
        "--fp8-format hybrid --fp8-recipe tensorwise --first-last-layers-bf16 --num-layers-at-start-in-bf16 1",
        "--fp8-format e4m3 --fp8-recipe blockwise --no-fp8-wgrad",
        "--fp4-format e2m1 --fp4-recipe nvfp4",
    ],
)
def test_recipes_of_low_precision(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What says how a recipe quantizes is taken with it; weights that are quantized themselves are not."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    args = parsed(*LOCAL, *words.split())
    check_options(args, {}, known())
    assert refused_in_a_run(args, {}, known()) == []
    for name in ("--fp8-param-gather", "--fp8-output-proj"):
        assert refusal(*words.split(), name).startswith(f"{name}: ")


@needs_training
def test_everything_of_cuda_alone_is_tried() -> None:
    parser()
    there = {known().typed(name) for name, rule in with_rules() if rule.kind == "cuda"}
    assert there == {words.split()[0] for words in CUDA.strip().splitlines()}


@needs_training
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--window-size 4,0", "--window-size 4,0: megatron-core makes the mask of a window on CUDA"),
        ("--window-size 4,0 --context-parallel-size 2", "--window-size 4,0: under context parallelism"),
        ("--reset-attention-mask --context-parallel-size 2", "--reset-attention-mask: under context parallelism"),
        (
            "--dataloader-inter-document-masking --context-parallel-size 2",
            "--dataloader-inter-document-masking: under context parallelism",
        ),
        ("--moe-token-dispatcher-type flex", "--moe-token-dispatcher-type flex: DeepEP and HybridEP compute on CUDA"),
        ("--distributed-backend nccl", "--distributed-backend nccl: there is no CUDA device"),
        ("--transformer-impl transformer_engine", "transformer_engine computes on CUDA alone"),
        (
            "--spec no_such_module spec",
            "--spec no_such_module spec: No module named 'no_such_module'; expected a module",
        ),
        ("--spec math no_such_spec", "--spec math no_such_spec: math has no no_such_spec; expected a module"),
    ],
)
def test_refused_here(words: str, said: str) -> None:
    assert refusal(*words.split()).startswith(said) or said in refusal(*words.split())


@needs_training
def test_what_upstream_may_add() -> None:
    """An option or a field that no table has is taken; an option is told where it is not its default."""
    args = parsed(*LOCAL)
    args.novel = 3
    own = ArgumentParser()
    own.add_argument("--novel-option", dest="novel", type=int, default=1)
    both = Known([*own._actions, *known().actions.values()])
    check_options(args, {}, both)
    assert unread_options(args, {}, both) == ["--novel-option 3", "--distributed-backend gloo"]
    args.novel = 1
    assert unread_options(args, {}, both) == ["--distributed-backend gloo"]
    assert unread_options(args, {"novel": 4}, both) == ["--distributed-backend gloo"]
    check_config(transformer_config(tp_only_amax_red=True), known())


@needs_training
@pytest.mark.parametrize("words", ["", "--attention-backend flash", "--optimizer sgd --recompute-activations --bf16"])
def test_taken(words: str) -> None:
    check_options(parsed(*LOCAL, *words.split()), {}, known())


@needs_training
def test_defaults_of_the_script_count() -> None:
    with pytest.raises(UserError, match=r"^--use-checkpoint-args: not under µP here"):
        check_options(parsed(*LOCAL), {"use_checkpoint_args": True}, known())


def transformer_config(**fields: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, **fields)


@needs_training
@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        (
            "softmax_scale",
            0.5,
            "TransformerConfig.softmax_scale 0.5: not under µP here (the softmax scale is the rules'",
        ),
        ("gtp_weight_remat_size", 2, "TransformerConfig.gtp_weight_remat_size 2: not under µP here (weights are split"),
        ("init_method", print, "TransformerConfig.init_method: the script's own; initial values are normal"),
    ],
)
def test_what_a_script_sets_itself(field: str, value: Any, said: str) -> None:
    """What no option said and the TransformerConfig says all the same."""
    parser()
    check_config(transformer_config(), known())
    with pytest.raises(UserError) as problem:
        check_config(transformer_config(**{field: value}), known())
    assert str(problem.value).startswith(said)


@needs_training
def test_a_window_that_a_script_sets_under_context_parallelism() -> None:
    parser()
    config = transformer_config(transformer_impl="local", context_parallel_size=2, window_size=(4, 0))
    with pytest.raises(
        UserError, match=r"^TransformerConfig.window_size 4,0: under context parallelism local attention"
    ):
        check_config(config, known())
    config.context_parallel_size = 1
    check_config(config, known())


@needs_training
def test_optimizer_configs() -> None:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import get_standard_config_overrides
    from megatron.core.optimizer.optimizer_config import OptimizerConfig, ParamKey

    class Chunk:
        ddp_config = DistributedDataParallelConfig()

    parser()
    plain = OptimizerConfig(lr=1e-3)
    check_optimizer(plain, [Chunk()], get_standard_config_overrides(plain), known())
    with pytest.raises(UserError, match=r"^OptimizerConfig.optimizer soap: not under µP here \(no rule"):
        check_optimizer(OptimizerConfig(optimizer="soap", lr=1e-3), [Chunk()], None, known())
    with pytest.raises(
        UserError, match=r"^OptimizerConfig.grad_norm_skip_threshold 2.0: not under µP here \(plain norms"
    ):
        check_optimizer(OptimizerConfig(lr=1e-3, grad_norm_skip_threshold=2.0), [Chunk()], None, known())
    with pytest.raises(UserError, match=r"^config_overrides: .*'max_lr': 1.0.*the script's own groups"):
        check_optimizer(plain, [Chunk()], {ParamKey(name="*.bias"): {"max_lr": 1.0}}, known())
    Chunk.ddp_config = DistributedDataParallelConfig(use_megatron_fsdp=True)
    with pytest.raises(UserError, match=r"^DistributedDataParallelConfig.use_megatron_fsdp True: computes on CUDA"):
        check_optimizer(plain, [Chunk()], None, known())


def test_the_documentation_has_the_table(repository: Path) -> None:
    """`python -m mup_megatron.megatron_training.option_table` prints it."""
    text = (repository / "docs" / "reports" / "megatron-options.md").read_text()
    _, _, after = text.partition("<!-- options -->\n")
    table, _, _ = after.partition("<!-- /options -->\n")
    assert table == option_table.as_markdown()
