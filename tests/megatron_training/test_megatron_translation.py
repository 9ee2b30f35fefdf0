"""Megatron's options, translated: the same table as `explain` of the equivalent config, whatever upstream derives."""

from __future__ import annotations

import json
import warnings
from argparse import ArgumentParser
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo

from mup_megatron.config import derive
from mup_megatron.engines.setup import resolve_auto
from mup_megatron.megatron_training.model_section import _yarn, check_translation
from mup_megatron.megatron_training.option_check import check_config
from mup_megatron.megatron_training.options import add_options, known, read_options
from mup_megatron.megatron_training.translate import config_of
from mup_megatron.model.build import parametrize
from mup_megatron.model.explain import explain
from mup_megatron.model.transformer_config import YARN, core_config
from mup_megatron.parallel import upstream
from mup_megatron.parallel.layout import resolve_layout
from mup_megatron.rules.base_shapes import save_base_shapes
from mup_megatron.rules.table import Parametrization
from mup_megatron.util.errors import UserError
from tests.helpers.configs import MIXED, make
from tests.helpers.installed import needs_training

pytestmark = needs_training
PLAIN = (  # noqa: SIM905  (a command line reads as one)
    "--num-layers 2 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 4 --global-batch-size 8 "
    "--train-iters 20 --lr 8e-3 --init-method-std 0.05 --weight-decay 0.1 --transformer-impl local --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 375 --hidden-dropout 0 --attention-dropout 0 --no-bias-gelu-fusion "
    "--no-bias-swiglu-fusion --no-persist-layer-norm --no-gradient-accumulation-fusion --no-rope-fusion "
    "--distributed-backend gloo"
).split()
VOCABULARY = 384

# Every one: options of the model, `model:` of the equivalent config, `base:` of both, and rates (or the softmax scale)
# worked out by hand.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any], dict[str, int], dict[str, Fraction]]] = {
    # Experts' FFN is a copy of the dense one: 64 to 192, and fc2's fan-in with it.
    "experts": (
        "--hidden-size 128 --num-attention-heads 4 --ffn-hidden-size 192 --num-experts 4",
        {"hidden_size": 128, "num_attention_heads": 4, "ffn_hidden_size": 192, "num_moe_experts": 4},
        {"hidden_size": 64, "num_attention_heads": 2, "ffn_hidden_size": 64},
        {
            "decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight": Fraction(1, 3),
            "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight": Fraction(1, 2),
        },
    ),
    # The same where the experts' FFN was typed: a size of its own, which does not grow.
    "experts-typed": (
        "--hidden-size 128 --num-attention-heads 4 --ffn-hidden-size 192 --num-experts 4 --moe-ffn-hidden-size 192",
        {
            "hidden_size": 128,
            "num_attention_heads": 4,
            "ffn_hidden_size": 192,
            "num_moe_experts": 4,
            "moe_ffn_hidden_size": 192,
        },
        {"hidden_size": 64, "num_attention_heads": 2, "ffn_hidden_size": 64},
        {"decoder.layers.0.mlp.experts.local_experts.0.linear_fc2.weight": Fraction(1)},
    ),
    # Nothing typed: 4 * hidden in the dense layer and in the experts. Shared experts have a size of their own.
    "experts-of-hidden": (
        "--hidden-size 96 --num-attention-heads 3 --num-experts 2 --moe-layer-freq ([0,1]) "
        "--moe-shared-expert-intermediate-size 96 --disable-bias-linear",
        {
            "hidden_size": 96,
            "num_attention_heads": 3,
            "num_moe_experts": 2,
            "moe_layer_freq": [0, 1],
            "moe_shared_expert_intermediate_size": 96,
            "add_bias_linear": False,
        },
        {"hidden_size": 64, "num_attention_heads": 2, "moe_shared_expert_intermediate_size": 32},
        {
            "decoder.layers.0.mlp.linear_fc2.weight": Fraction(2, 3),
            "decoder.layers.1.mlp.experts.local_experts.1.linear_fc2.weight": Fraction(2, 3),
            "decoder.layers.1.mlp.shared_experts.linear_fc2.weight": Fraction(1, 3),
        },
    ),
    # Gated, with a projection into further tokens whose layer holds experts too.
    "gated-experts-mtp": (
        "--hidden-size 96 --num-attention-heads 4 --ffn-hidden-size 160 --num-experts 2 --swiglu --mtp-num-layers 1 "
        "--normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
        "--untie-embeddings-and-output-weights",
        {
            "architecture": "llama",
            "hidden_size": 96,
            "num_attention_heads": 4,
            "ffn_hidden_size": 160,
            "num_moe_experts": 2,
            "mtp_num_layers": 1,
        },
        {"hidden_size": 64, "num_attention_heads": 2, "ffn_hidden_size": 64, "kv_channels": 32},
        {"decoder.layers.1.mlp.experts.local_experts.1.linear_fc2.weight": Fraction(2, 5)},
    ),
    # The head size is hidden / heads, and heads do not grow: 8 to 32.
    "head-size": (
        "--hidden-size 128 --num-attention-heads 4",
        {"hidden_size": 128, "num_attention_heads": 4},
        {"hidden_size": 32},
        {
            "decoder.layers.0.mlp.linear_fc2.weight": Fraction(1, 4),
            "decoder.layers.0.self_attention.linear_proj.weight": Fraction(1, 4),
        },
    ),
    # Key/value heads follow the heads where they are not grouped ...
    "ungrouped": (
        "--hidden-size 128 --num-attention-heads 8 --kv-channels 24",
        {"hidden_size": 128, "num_attention_heads": 8, "kv_channels": 24},
        {"hidden_size": 64, "num_attention_heads": 2},
        {"decoder.layers.0.self_attention.linear_proj.weight": Fraction(1, 4)},
    ),
    # ... and are one, which does not grow, where they are and no number was typed.
    "one-group": (
        "--hidden-size 128 --num-attention-heads 8 --group-query-attention",
        {"hidden_size": 128, "num_attention_heads": 8, "num_query_groups": 1},
        {"hidden_size": 64, "num_attention_heads": 4},
        {"decoder.layers.0.self_attention.linear_qkv.weight": Fraction(1, 2)},
    ),
    "latent": (
        "--hidden-size 96 --num-attention-heads 8 --multi-latent-attention --q-lora-rank 24 --kv-lora-rank 48 "
        "--qk-head-dim 12 --qk-pos-emb-head-dim 8 --v-head-dim 14 --rope-type yarn --position-embedding-type rope "
        "--qk-layernorm",
        {
            "hidden_size": 96,
            "num_attention_heads": 8,
            "multi_latent_attention": True,
            "qk_layernorm": True,
            "q_lora_rank": 24,
            "kv_lora_rank": 48,
            "qk_head_dim": 12,
            "qk_pos_emb_head_dim": 8,
            "v_head_dim": 14,
            "position_embedding_type": "rope",
            "rope_type": "yarn",
        },
        {"hidden_size": 64, "num_attention_heads": 4, "kv_lora_rank": 16, "qk_head_dim": 8, "v_head_dim": 4},
        {
            "decoder.layers.0.self_attention.linear_kv_up_proj.weight": Fraction(1, 3),
            "decoder.layers.0.self_attention.linear_proj.weight": Fraction(1, 7),
            "decoder.layers.0.self_attention.linear_q_up_proj.weight": Fraction(1),
            "decoder.layers.0.mlp.linear_fc2.weight": Fraction(2, 3),
        },
    ),
}


def translated(words: str, base: dict[str, int] | Path, folder: Path, **defaults: Any) -> Any:
    """The config that `mup-megatron run` makes of a command line, by upstream's parser, checks and model config."""
    from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.arguments import add_megatron_arguments, validate_args

    if not isinstance(base, Path):
        (folder / "base.json").write_text(json.dumps(base))
        base = folder / "base.json"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parser = add_options(add_megatron_arguments(ArgumentParser(allow_abbrev=False)))
        args = parser.parse_args([*PLAIN, *words.split(), "--mup-base", str(base)])
        args.rank, args.world_size = 0, 1
        settings = read_options(args, defaults)
        assert settings is not None
        validate_args(args, defaults)
        unset_num_microbatches_calculator()
        built = gpt_config_from_args(args)
    return config_of(args, arguments_of(built), settings, 375), args, built, settings


def arguments_of(built: Any) -> dict[str, Any]:
    """What upstream's GPTModelBuilder hands to GPTModel, as far as the translation reads it."""
    names = ["share_embeddings_and_output_weights", "position_embedding_type", "rotary_base", "rotary_percent"]
    names += ["rope_scaling", "rope_scaling_factor"]
    return {
        "config": built.transformer,
        "max_sequence_length": built.seq_length,
        "vocab_size": VOCABULARY,
        **{name: getattr(built, name) for name in names},
    }


def table(parametrization: Parametrization) -> dict[str, Any]:
    """`explain --json` without the config, which names data and tokenizer of its own."""
    config = parametrization.config
    told = explain(parametrization, resolve_layout(config, 1))
    return {"forward": told["forward"], **{tensor["name"]: tensor for tensor in told["parameters"]}}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_translation_is_explain(name: str, tmp_path: Path) -> None:
    """Tensor by tensor: shapes, bases, what grows, init, rates, epsilon, decay; and the forward multipliers."""
    upstream.prepare_process()
    words, model, base, rates = ARCHITECTURES[name]
    ours, *_ = translated(words, base, tmp_path)
    ours = derive(ours, {"training.precision": "fp32"})
    sizes = {key: value for key, value in model.items() if key != "architecture"}
    beta2 = {"optimizer__betas": [0.9, 0.999], "model__core_attention": "megatron"}
    config = make({"model": {"num_layers": 2, **sizes}, "base": base}, model.get("architecture", "gpt3"), **beta2)
    theirs, expected = table(parametrize(ours, VOCABULARY)), table(parametrize(config, VOCABULARY))
    assert theirs.keys() == expected.keys()
    for tensor, row in expected.items():
        assert theirs[tensor] == row, tensor
    for tensor, rate in rates.items():
        assert theirs[tensor]["lr_multiplier"] == float(rate), tensor


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_model_that_is_built_is_the_one_that_was_read(name: str, tmp_path: Path) -> None:
    """Field by field, upstream's TransformerConfig and the one that this project makes of the translation."""
    upstream.prepare_process()
    words, _, base, _ = ARCHITECTURES[name]
    config, _, built, _ = translated(words, base, tmp_path)
    config = resolve_auto(config)
    forward = parametrize(config, VOCABULARY).forward
    ours = core_config(config, config.model, forward, resolve_layout(config, 1), torch.device("cpu"))
    check_config(built.transformer, known())
    check_translation(built.transformer, ours)
    built.transformer.layernorm_epsilon = 1e-3
    with pytest.raises(
        UserError, match=r"^TransformerConfig.layernorm_epsilon: 0.001 in the model that the script builds, 1e-05 by"
    ):
        check_translation(built.transformer, ours)


@pytest.mark.parametrize(
    ("words", "ranks", "rows", "multiple"),
    [
        ("", 1, 384, 128),
        ("--make-vocab-size-divisible-by 64", 1, 384, 64),
        ("", 1, 512, 512),
        ("", 2, 512, 256),
        ("--padded-vocab-size 380", 1, 380, 380),
    ],
)
def test_rows_of_the_vocabulary(words: str, ranks: int, rows: int, multiple: int, tmp_path: Path) -> None:
    """375 entries: what they are padded to a multiple of gives the rows that upstream built, whatever the layout."""
    _, args, built, settings = translated(
        f"--hidden-size 128 --num-attention-heads 4 {words}", {"hidden_size": 64, "num_attention_heads": 2}, tmp_path
    )
    args.tensor_model_parallel_size = ranks
    config = config_of(args, {**arguments_of(built), "vocab_size": rows}, settings, 375)
    assert config.model.make_vocab_size_divisible_by == multiple
    assert config.model.padded_vocab_size(375) == rows


def test_head_size_that_follows_moves_the_softmax(tmp_path: Path) -> None:
    """Head size 32 from 8: 1/sqrt(32) * sqrt(8/32)."""
    upstream.prepare_process()
    words, _, base, _ = ARCHITECTURES["head-size"]
    config, *_ = translated(words, base, tmp_path)
    assert parametrize(config, VOCABULARY).forward.softmax_scale == pytest.approx(32**-0.5 / 2, rel=1e-15)


def test_base_file_without_the_head_size(tmp_path: Path) -> None:
    """A .bsh file as microsoft/mup writes it: an error where query rows grow, and the way out."""
    upstream.prepare_process()
    words, _, base, _ = ARCHITECTURES["head-size"]
    config, *_ = translated(words, base, tmp_path)
    path = tmp_path / "model.bsh"
    save_base_shapes(path, parametrize(config, VOCABULARY).shapes, {})
    path.write_text("".join(line for line in path.read_text().splitlines(True) if not line.startswith("#")))
    of_file, *_ = translated(words, path, tmp_path)
    with pytest.raises(
        UserError, match=r"model\.bsh: does not tell the base's head size, and the query rows of .* grow"
    ):
        parametrize(of_file, VOCABULARY)
    (tmp_path / "mup.yaml").write_text("base: {kv_channels: 8}")
    told, *_ = translated(f"{words} --mup-config {tmp_path / 'mup.yaml'}", path, tmp_path)
    assert parametrize(told, VOCABULARY).forward.softmax_scale == pytest.approx(32**-0.5 / 2, rel=1e-15)


def test_what_the_script_sets_is_a_size(tmp_path: Path) -> None:
    """`args_defaults` of a script, and sizes that its own TransformerConfig has, are its sizes; they do not grow."""
    words = "--hidden-size 128 --num-attention-heads 4 --num-experts 4"
    base = {"hidden_size": 64, "num_attention_heads": 2}
    config, *_ = translated(words, base, tmp_path, moe_ffn_hidden_size=512)
    assert (config.model.ffn_hidden_size, config.model.moe_ffn_hidden_size) == (None, 512)
    _, args, built, settings = translated(words, base, tmp_path)
    built.transformer.moe_ffn_hidden_size, built.transformer.kv_channels = 80, 24
    built.transformer.num_query_groups, built.transformer.ffn_hidden_size = 2, 96
    model = config_of(args, arguments_of(built), settings, 375).model
    assert (model.ffn_size, model.moe_ffn_size, model.head_size, model.query_groups) == (96, 80, 24, 2)


def test_gated_ffn_that_megatron_derives(tmp_path: Path) -> None:
    """Megatron rounds 8/3 of the hidden size down to a multiple of 64, for the base as for the model: 640 from 320."""
    words = "--hidden-size 256 --num-attention-heads 4 --swiglu"
    config, *_ = translated(words, {"hidden_size": 128}, tmp_path)
    assert (config.model.ffn_size, config.base.ffn_hidden_size) == (640, 320)
    tensor = parametrize(config, VOCABULARY).tensors["decoder.layers.0.mlp.linear_fc2.weight"]
    assert tensor.lr_multiplier == 1 / 2
    told, *_ = translated(words, {"hidden_size": 128, "ffn_hidden_size": 160}, tmp_path)
    assert told.base.ffn_hidden_size == 160
    alone, *_ = translated(words, {"num_attention_heads": 2, "kv_channels": 64}, tmp_path)
    assert alone.base.ffn_hidden_size is None  # the hidden size does not grow
    with pytest.raises(UserError, match=r"--ffn-hidden-size: not given, so Megatron makes it 640 .* and 0 of the base"):
        translated(words, {"hidden_size": 16}, tmp_path)


def test_the_batch_that_a_schedule_ends_with(tmp_path: Path) -> None:
    """Megatron's own global batch size is the least that the processes can share."""
    _, args, built, settings = translated("--hidden-size 128 --num-attention-heads 4", {"hidden_size": 64}, tmp_path)
    for schedule in ("0:8 1K:16 2K:24", "0:8,1K:16,2K:24"):
        args.step_batch_size_schedule = schedule
        assert config_of(args, arguments_of(built), settings, 375).training.global_batch_size == 24


def test_the_weight_decay_that_a_schedule_ends_with(tmp_path: Path) -> None:
    """Megatron multiplies what its schedule says with each group's multiplier; a row shows the last."""
    words = "--hidden-size 128 --num-attention-heads 4 --weight-decay 0.3"
    for schedule, decay in (("", 0.3), ("--weight-decay-incr-style linear --start-weight-decay 0.1", 0.4)):
        end = " --end-weight-decay 0.4" if schedule else ""
        config, *_ = translated(f"{words} {schedule}{end}", {"hidden_size": 64}, tmp_path)
        assert config.hparams.weight_decay == decay


@torch._dynamo.config.patch(disable=False)  # which the quick suite sets
def test_an_activation_is_recognised_without_compiling_it(tmp_path: Path) -> None:
    """Fused functions are compared as they were written; compiling them needs a C++ compiler where there is no CUDA."""

    def backend(*_of_compiler: Any) -> Any:
        raise AssertionError("compiled")

    def squared(x: torch.Tensor) -> torch.Tensor:
        return torch.pow(torch.relu(x), 2)

    words, _, base, _ = ARCHITECTURES["head-size"]
    _, args, built, settings = translated(words, base, tmp_path)
    built.transformer.activation_func = torch.compile(squared, backend=backend)
    config = config_of(args, arguments_of(built), settings, VOCABULARY)
    assert config.model.activation_func == "squared_relu"


def test_an_activation_that_is_not_known(tmp_path: Path) -> None:
    words = "--hidden-size 128 --num-attention-heads 4"
    _, args, built, settings = translated(words, {"hidden_size": 64}, tmp_path)
    built.transformer.activation_func = torch.tanh
    with pytest.raises(
        UserError, match=r"activation <.*tanh.*>: not known here; expected one of gelu, silu, relu, squ"
    ):
        config_of(args, arguments_of(built), settings, 375)


def test_arguments_of_a_checkpoint_are_not_typed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--use-checkpoint-args: a checkpoint's arguments hold sizes that were typed"):
        translated("--hidden-size 128 --num-attention-heads 4 --use-checkpoint-args", {"hidden_size": 64}, tmp_path)


def test_relative_positions_are_refused(tmp_path: Path) -> None:
    """megatron.training's parser takes them, with Transformer Engine; its GPTModel then has no positions at all."""
    words = "--hidden-size 128 --num-attention-heads 4"
    _, args, built, settings = translated(words, {"hidden_size": 64}, tmp_path)
    given = {**arguments_of(built), "position_embedding_type": "relative"}
    with pytest.raises(UserError, match=r"--position-embedding-type relative: megatron-core's GPTModel makes no bias"):
        config_of(args, given, settings, 375)


@pytest.mark.parametrize(("mscale", "all_dim"), [(None, None), (None, 0.5), (0.707, None), (0.707, 0.5)])
def test_yarn_without_one_of_its_mscales(mscale: float | None, all_dim: float | None) -> None:
    """Upstream's factor is that of the mscales that are read."""
    from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding as upstreams

    said = dict.fromkeys(YARN, 2.0) | {"mscale": mscale, "mscale_all_dim": all_dim}
    read = _yarn(SimpleNamespace(**{f"yarn_{name}": value for name, value in said.items()}))
    assert {name for name in said if name not in read} == (
        {"mscale", "mscale_all_dim"} if None in (mscale, all_dim) else set()
    )
    model = make(MIXED, "llama").model.model_copy(update=read)
    factor = upstreams._yarn_get_concentration_factor
    assert factor(32.0, model.mscale, model.mscale_all_dim) == factor(32.0, mscale, all_dim)
