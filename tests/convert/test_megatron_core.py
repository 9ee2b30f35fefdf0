"""export --to safetensors and --to megatron: megatron-core's own model, which knows no multiplier, is the oracle."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from megatron.core import dist_checkpointing
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import load_file

from mup_megatron import cli
from mup_megatron.config import derive
from mup_megatron.convert import export
from mup_megatron.convert.export import export_megatron, export_safetensors, open_source
from mup_megatron.convert.export.megatron_core import megatron_options
from mup_megatron.data.prepare import prepare
from mup_megatron.model.transformer_config import ACTIVATIONS
from mup_megatron.parallel import runtime, upstream
from mup_megatron.parallel.layout import resolve_layout
from mup_megatron.parallel.ranks import Rank
from mup_megatron.util.errors import ConfigError, UserError
from tests.convert.sources import MULTIPLIERS, Trained, deviation, logits_of, own_logits, own_model, train
from tests.helpers import bodies, megatron_runs
from tests.helpers.configs import HEAD_SIZE, MLA, MOE, VOCABULARY, make
from tests.helpers.distributed import Ranks
from tests.helpers.installed import needs_training

pytestmark = pytest.mark.usefixtures("one_thread")
NAMES = ("llama, untied", pytest.param("gpt3, tied", marks=pytest.mark.slow))
PADDED = 384


def stock_model(settings: dict[str, Any], rows: int) -> GPTModel:
    """megatron-core's GPTModel of its own local layer spec, as its own users build it."""
    names = (
        *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
        *("normalization", "layernorm_epsilon", "gated_linear_unit", "add_bias_linear", "add_qkv_bias", "qk_layernorm"),
    )
    config = TransformerConfig(
        **{name: settings[name] for name in names},
        activation_func=ACTIVATIONS[settings["activation_func"]],
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_decoder_block_spec(config, use_transformer_engine=False),
        vocab_size=rows,
        max_sequence_length=settings["max_position_embeddings"],
        share_embeddings_and_output_weights=settings["share_embeddings_and_output_weights"],
        position_embedding_type=settings["position_embedding_type"],
        rotary_base=settings["rotary_base"],
    ).eval()


@contextlib.contextmanager
def one_rank(one: Trained) -> Iterator[None]:
    """Process groups of one rank, which megatron-core's own model asks for."""
    runtime.start_distributed(resolve_layout(one.source.run.config, 1), Rank(), 0)
    try:
        yield
    finally:
        runtime.stop_distributed()


@pytest.mark.parametrize("name", NAMES)
def test_safetensors_are_megatron_cores(trained: Callable[[str], Trained], name: str, tmp_path: Path) -> None:
    """Every tensor by its own name, none missing and none too many; the logits are the checkpoint's."""
    one = trained(name)
    export_safetensors(one.source, tmp_path / "out", max_shard_size=100_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    tensors = {key: value for file in set(index.values()) for key, value in load_file(tmp_path / "out" / file).items()}
    with one_rank(one):
        model = stock_model(json.loads((tmp_path / "out" / "model.json").read_text()), VOCABULARY)
        assert {key for key in model.state_dict() if "_extra_state" not in key} == set(tensors)
        model.load_state_dict(tensors, strict=False)
        assert deviation(logits_of(model), one.logits) < 1e-5


@pytest.mark.parametrize("folded", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_a_release_is_loaded_by_megatron_core(
    trained: Callable[[str], Trained], name: str, folded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the stock model's own sharded_state_dict; with nothing folded, its logits are others."""
    one = trained(name)
    settings = {**one.source.run.config.model.model_dump(), "max_position_embeddings": 128}
    settings["kv_channels"] = 24
    if not folded:
        monkeypatch.setattr(export, "fold", lambda _parametrization: {})
    folder = tmp_path / "out"
    export_megatron(one.source, folder)
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "release"
    with one_rank(one):
        model = stock_model(settings, PADDED)
        loaded = dist_checkpointing.load(model.sharded_state_dict(), str(folder / "release"))
        missing, _ = model.load_state_dict({key: value for key, value in loaded.items() if value is not None}, False)
        assert all("_extra_state" in key for key in missing)
        found = deviation(logits_of(model), one.logits)
    assert found < 1e-5 if folded else found > 1e-2
    checked = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=folder, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    listed = {line.split("  ")[1] for line in (folder / "SHA256SUMS").read_text().splitlines()}
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert listed == there - {"SHA256SUMS"}


def plain_words(folder: Path, config: Any, cache: Path) -> list[str]:
    """What a plain run is told: the options of the export, its own data and batch, and what a CPU needs."""
    (prefix,) = prepare(config).blend[0]
    valued = {
        "load": folder,
        "seq-length": 32,
        "micro-batch-size": 4,
        "global-batch-size": 8,
        "train-iters": 3,
        "lr": 1e-3,
        "seed": config.run.seed,
        "data-path": prefix,
        "data-cache-path": cache,
        "split": "100,0,0",
        "tokenizer-type": "SentencePieceTokenizer",
        "tokenizer-model": prepare(config).tokenizer,
        "transformer-impl": "local",
        "distributed-backend": "gloo",
        "eval-iters": 0,
        "eval-interval": 1000,
        "num-workers": 0,
        "log-interval": 1,
    }
    no = (
        *("bias-dropout-fusion", "masked-softmax-fusion", "gradient-accumulation-fusion", "persist-layer-norm"),
        *("bias-swiglu-fusion", "rope-fusion"),
    )
    told = (folder / "megatron_options.txt").read_text().split()
    return [*told, *(f"--no-{name}" for name in no), *(str(w) for n, v in valued.items() for w in (f"--{n}", v))]


@needs_training
@pytest.mark.parametrize("name", NAMES)
def test_a_plain_megatron_run_goes_on_from_it(
    trained: Callable[[str], Trained],
    ranks: Ranks,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """megatron.training with --load and the options that were written: its first loss is the checkpoint's own.

    With nothing folded, the same run begins with another loss.
    """
    source = trained(name).source
    config = source.run.config
    own = ranks.run(1, bodies.leg, config=config, start_at=0, stop_at=1, load=str(source.run.path))[0]["losses"][0]
    export_megatron(source, tmp_path / "out")
    (found,) = ranks.run(
        1, megatron_runs.train, words=plain_words(tmp_path / "out", config, tmp_path / "cache"), plainly=True
    )
    assert found["status"] == 0, found["said"]
    assert sum(found["steps"][:2]) / 2 == pytest.approx(own, rel=1e-6)
    monkeypatch.setattr(export, "fold", lambda _parametrization: {})
    export_megatron(source, tmp_path / "bare")
    (bare,) = ranks.run(
        1, megatron_runs.train, words=plain_words(tmp_path / "bare", config, tmp_path / "cache"), plainly=True
    )
    assert bare["status"] == 0, bare["said"]
    assert abs(sum(bare["steps"][:2]) / 2 - own) > 1e-2


# --- architectures that only this format holds: with the multipliers gone, our own layers are megatron-core's ---

KEYS = {
    **{key: value for key, value in MULTIPLIERS.items() if key not in ("base__num_layers", "parametrization__depth")},
    "hparams__init_method_std": 0.15,
    "training__train_steps": 3,
    "training__lr_warmup_steps": 1,
    "training__checkpoint_interval": 3,
}
# Growth, keys, the softmax scale where nobody scales: 1 / sqrt(head size).
ONLY_HERE: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "experts": (MOE, {}, 8**-0.5),
    "experts with biases": (
        MOE,
        {
            "model__moe_router_enable_expert_bias": True,
            "model__moe_router_bias_update_rate": 0.1,
            "model__moe_router_score_function": "sigmoid",
        },
        8**-0.5,
    ),
    "MLA": (MLA, {}, 20**-0.5),
    "MLA, queries not compressed": ({**MLA, "model": {**MLA["model"], "q_lora_rank": None}}, {}, 20**-0.5),
    "QK-norm": (HEAD_SIZE, {"model__qk_layernorm": True}, 24**-0.5),
    "QK-norm without gains": (HEAD_SIZE, {"model__qk_layernorm": True, "model__norm_gains": "none"}, 24**-0.5),
    "gates and sinks": (
        HEAD_SIZE,
        {"model__attention_output_gate": True, "model__softmax_type": "learnable"},
        24**-0.5,
    ),
    "multi-token prediction": (HEAD_SIZE, {"model__mtp_num_layers": 1}, 24**-0.5),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ONLY_HERE)
def test_other_architectures(ranks: Ranks, name: str, tmp_path: Path) -> None:
    growth, keys, scale = ONLY_HERE[name]
    upstream.prepare_process()
    source = open_source(train(ranks, tmp_path, make(growth, "llama", **KEYS, **keys)))
    export_safetensors(source, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    plain = source.parametrization.replaced(softmax_scale=scale, readout=1.0, embedding=1.0, residual=1.0)
    if keys.get("model__norm_gains") == "none":
        config = derive(source.run.config, {"model.norm_gains": "trained"})
        plain = dataclasses.replace(export.parametrize(config, VOCABULARY), forward=plain.forward)
    expected = own_logits(source)
    with own_model(source, plain, load=False) as model:
        named = {key: value for key, value in model.named_parameters() if not key.startswith("mtp.")}
        named |= {key: value for key, value in model.named_buffers() if key.endswith("expert_bias")}
        assert set(named) == set(tensors)
        for key, tensor in tensors.items():
            named[key].data[: len(tensor)] = tensor
        assert deviation(logits_of(model), expected) < 1e-5


# --- what is refused ---


@pytest.mark.parametrize(
    ("growth", "overrides", "key"),
    [
        (MOE, {}, "num_moe_experts"),
        (MLA, {}, "multi_latent_attention"),
        (HEAD_SIZE, {"model__softmax_type": "learnable"}, "softmax_type"),
        (HEAD_SIZE, {"model__activation_func": "gelu"}, "activation_func"),
        (HEAD_SIZE, {"model__without_norms": ["final_layernorm"]}, "without_norms"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_model_that_megatron_has_no_options_for(growth: Any, overrides: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"model\.{key}: no options are written for it.*--to safetensors"):
        megatron_options(make(growth, "llama", **overrides), fused=False)


def test_options_that_the_target_lacks(
    trained: Callable[[str], Trained], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = str(trained("llama, untied").source.run.path)
    for options, sentence in (
        (["--to", "megatron", "--dtype", "bf16"], "expected fp32"),
        (["--to", "megatron", "--keep-multipliers"], "--keep-multipliers: Granite has multipliers, --to megatron has"),
    ):
        assert cli.run(["export", run, str(tmp_path / "out"), *options]) == 2
        assert sentence in capfd.readouterr().err
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="expected fp32"):
        export_megatron(trained("llama, untied").source, tmp_path / "out", dtype="bf16")
