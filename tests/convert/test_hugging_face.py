"""export --to hf: transformers is the oracle. Logits, greedy text, hand-worked factors, and each factor left out."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as torch_checkpoint

from mup_megatron import cli
from mup_megatron.convert import export
from mup_megatron.convert.export import Source, export_hugging_face, open_source
from mup_megatron.convert.export.fold import fold
from mup_megatron.convert.export.hugging_face import architecture_of
from mup_megatron.parallel import upstream
from mup_megatron.util.errors import ConfigError
from tests.checkpoints.test_checkpoint import seal
from tests.convert.sources import (
    PROMPT,
    QUICK,
    SLOW,
    TOKENS,
    Trained,
    config_of,
    deviation,
    own_logits,
    own_tokens,
    train,
)
from tests.helpers.configs import HEAD_SIZE, MIXED, MOE, VOCABULARY, make
from tests.helpers.distributed import Ranks

NAMES = {"llama": "LlamaForCausalLM", "gpt3": "GPT2LMHeadModel"}
pytestmark = pytest.mark.usefixtures("one_thread")


def load(folder: Path) -> Any:
    """transformers' model of a folder, every tensor of which it knows, and none of which it misses."""
    loader: Any = transformers.AutoModelForCausalLM
    model, said = loader.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(said.values()), said
    return model.eval()


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return load(folder)(TOKENS).logits


def check(one: Trained, folder: Path, architecture: str) -> None:
    """The exported folder computes what the checkpoint computes, and goes on as it does."""
    model = load(folder)
    assert type(model).__name__ == architecture
    assert len(set(one.logits.argmax(dim=-1).flatten().tolist())) > 3  # of three steps the greedy text may be one word
    with torch.no_grad():
        assert deviation(model(TOKENS).logits, one.logits) < 1e-5
    prompt = transformers.AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt")["input_ids"]
    said = model.generate(prompt, max_new_tokens=64, do_sample=False)[0, prompt.shape[1] :].tolist()
    assert said == own_tokens(one.source)


_AGAIN = ("llama, tied", "gpt3, untied")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in _AGAIN else n for n in QUICK])
def test_the_exported_model_is_the_checkpoints(trained: Callable[[str], Trained], name: str, tmp_path: Path) -> None:
    one = trained(name)
    export_hugging_face(one.source, tmp_path / "hf")
    check(one, tmp_path / "hf", NAMES[QUICK[name][0]])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_from_every_layout(trained: Callable[[str], Trained], name: str, tmp_path: Path) -> None:
    one = trained(name)
    export_hugging_face(one.source, tmp_path / "hf")
    check(one, tmp_path / "hf", NAMES[SLOW[name][0]])


# --- what goes where, by hand ---


def saved(source: Source, name: str, *shape: int) -> torch.Tensor:
    """A tensor of the checkpoint, as torch reads it."""
    tensor = torch.empty(*shape)
    torch_checkpoint.load({f"weight.{name}": tensor}, checkpoint_id=source.run.path)
    return tensor


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-7, atol=0)


def test_factors_of_llama_by_hand(trained: Callable[[str], Trained], tmp_path: Path) -> None:
    """Hidden 64 over 32: A = 1/2, times 3. Head 24 over 16: 1.75 · sqrt(16/24). Two layers over one: 5 / 2."""
    source = trained("llama, untied").source
    export_hugging_face(source, tmp_path / "hf")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    close(found["lm_head.weight"], saved(source, "output_layer.weight", 384, 64)[:375] * 1.5)
    close(found["model.embed_tokens.weight"], saved(source, "embedding.word_embeddings.weight", 384, 64)[:375] * 0.3)
    close(found["model.norm.weight"], saved(source, "decoder.final_layernorm.weight", 64))
    layer, mine = "decoder.layers.1.", "model.layers.1."
    # Two groups of 96 rows: 48 of their two query heads, 24 of the key, 24 of the value.
    qkv = saved(source, f"{layer}self_attention.linear_qkv.weight", 192, 64)
    factor = 1.75 * math.sqrt(16 / 24)
    assert factor == pytest.approx(1.4288690166)
    close(found[f"{mine}self_attn.q_proj.weight"], torch.cat([qkv[:48], qkv[96:144]]) * factor)
    close(found[f"{mine}self_attn.k_proj.weight"], torch.cat([qkv[48:72], qkv[144:168]]))
    close(found[f"{mine}self_attn.v_proj.weight"], torch.cat([qkv[72:96], qkv[168:192]]))
    projection = saved(source, f"{layer}self_attention.linear_proj.weight", 64, 96)
    close(found[f"{mine}self_attn.o_proj.weight"], projection * 2.5)
    fc1 = saved(source, f"{layer}mlp.linear_fc1.weight", 288, 64)
    close(found[f"{mine}mlp.gate_proj.weight"], fc1[:144])
    close(found[f"{mine}mlp.up_proj.weight"], fc1[144:])
    close(found[f"{mine}mlp.down_proj.weight"], saved(source, f"{layer}mlp.linear_fc2.weight", 64, 144) * 2.5)
    close(found[f"{mine}post_attention_layernorm.weight"], saved(source, f"{layer}pre_mlp_layernorm.weight", 64))
    assert len(found) == 3 + 2 * 9


def test_factors_of_gpt2_by_hand(trained: Callable[[str], Trained], tmp_path: Path) -> None:
    """Hidden 96 over 48: A = 1/2, times 3, and the tied head has taken 0.3. Head 24 over 12: 1.75 · sqrt(1/2)."""
    source = trained("gpt3, tied").source
    export_hugging_face(source, tmp_path / "hf")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert "lm_head.weight" not in found
    close(found["transformer.wte.weight"], saved(source, "embedding.word_embeddings.weight", 384, 96)[:375] * 0.3)
    close(found["transformer.wpe.weight"], saved(source, "embedding.position_embeddings.weight", 128, 96) * 0.3)
    for kind in ("weight", "bias"):
        close(found[f"transformer.ln_f.{kind}"], saved(source, f"decoder.final_layernorm.{kind}", 96) * 5.0)
    # Four groups of 72 rows: 24 each of query, key and value.
    rows = saved(source, "decoder.layers.0.self_attention.linear_qkv.weight", 288, 96).view(4, 3, 24, 96)
    biases = saved(source, "decoder.layers.0.self_attention.linear_qkv.bias", 288).view(4, 3, 24)
    factor = 1.75 * math.sqrt(1 / 2)
    for place, scale in enumerate((factor, 1.0, 1.0)):
        columns = slice(96 * place, 96 * (place + 1))
        weight, bias = (found[f"transformer.h.0.attn.c_attn.{kind}"] for kind in ("weight", "bias"))
        close(weight[:, columns], rows[:, place].reshape(96, 96).t() * scale)
        close(bias[columns], biases[:, place].reshape(96) * scale)
    for mine, theirs, shape in (
        ("attn.c_proj", "self_attention.linear_proj", (96, 96)),
        ("mlp.c_proj", "mlp.linear_fc2", (96, 144)),
    ):
        weight = saved(source, f"decoder.layers.0.{theirs}.weight", *shape)
        close(found[f"transformer.h.0.{mine}.weight"], weight.t() * 2.5)
        close(found[f"transformer.h.0.{mine}.bias"], saved(source, f"decoder.layers.0.{theirs}.bias", 96) * 2.5)
    assert len(found) == 4 + 2 * 12


# --- each factor left out ---

NEUTRAL = {"softmax_scale": 24**-0.5, "readout": 1.0, "embedding": 1.0, "residual": 1.0}


# Factors by hand are above; here one of them is enough for the quick tests.
@pytest.mark.parametrize(
    "multiplier", [key if key == "readout" else pytest.param(key, marks=pytest.mark.slow) for key in NEUTRAL]
)
@pytest.mark.parametrize("name", ["llama, untied", pytest.param("gpt3, tied", marks=pytest.mark.slow)])
def test_a_multiplier_left_out_is_seen(
    trained: Callable[[str], Trained], name: str, multiplier: str, tmp_path: Path
) -> None:
    """The logits are others, by far; and they are exactly those of the checkpoint without this multiplier."""
    one = trained(name)
    without = one.source.parametrization.replaced(None, **{multiplier: NEUTRAL[multiplier]})
    export_hugging_face(dataclasses.replace(one.source, parametrization=without), tmp_path / "hf")
    found = logits(tmp_path / "hf")
    assert deviation(found, one.logits) > 1e-2
    assert deviation(found, own_logits(one.source, without)) < 1e-5


PLACES = {
    "llama, untied": (
        *("embedding.word_embeddings.weight", "output_layer.weight", "self_attention.linear_qkv.weight"),
        *("self_attention.linear_proj.weight", "mlp.linear_fc2.weight"),
    ),
    "gpt3, tied": (
        *("embedding.position_embeddings.weight", "decoder.final_layernorm.weight", "decoder.final_layernorm.bias"),
        *("self_attention.linear_qkv.bias", "self_attention.linear_proj.bias", "mlp.linear_fc2.bias"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "place"), [(name, place) for name, places in PLACES.items() for place in places])
def test_a_tensor_left_out_is_seen(
    trained: Callable[[str], Trained], name: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tensor, in the first layer if it is in a layer, does not take its factor."""
    one = trained(name)
    left = next(key for key in fold(one.source.parametrization) if key.endswith(place))
    folded = {key: factors for key, factors in fold(one.source.parametrization).items() if key != left}
    monkeypatch.setattr(export, "fold", lambda _parametrization: folded)
    said = export_hugging_face(one.source, tmp_path / "hf")
    assert left not in said["folded"]
    assert deviation(logits(tmp_path / "hf"), one.logits) > 1e-4


# --- models that are not quite the preset's ---

EXPERT_KEYS = {"model__num_moe_experts": 4, "model__moe_ffn_hidden_size": 80, "base__moe_ffn_hidden_size": 32}
EXPERTS = {
    "model": {**HEAD_SIZE["model"], "num_moe_experts": 4, "moe_ffn_hidden_size": 80},
    "base": {**HEAD_SIZE["base"], "moe_ffn_hidden_size": 32},
}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama with all biases": ("llama", {"model__add_bias_linear": True}),
    "llama with QKV biases": ("llama", {"model__add_qkv_bias": True}),
    "llama, gains around 0": ("llama", {"model__layernorm_zero_centered_gamma": True}),
    "llama, no gains, tied": (
        "llama",
        {"model__norm_gains": "none", "model__share_embeddings_and_output_weights": True},
    ),
    "llama, GELU, stretched RoPE": (
        "llama",
        {"model__activation_func": "gelu", "model__rope_scaling": True, "model__rotary_base": 500000},
    ),
    "gpt3 without biases": ("gpt3", {"model__add_bias_linear": False}),
    "gpt3, no gains, squared ReLU": ("gpt3", {"model__norm_gains": "none", "model__activation_func": "squared_relu"}),
    "gpt3, gains around 0, quick GELU": (
        "gpt3",
        {"model__layernorm_zero_centered_gamma": True, "model__activation_func": "quick_gelu"},
    ),
    "gpt3, another epsilon": ("gpt3", {"model__layernorm_epsilon": 0.1}),
    "llama, another epsilon": ("llama", {"model__layernorm_epsilon": 0.1}),
}


# Architecture of the config, keys, layout, class of transformers.
FAMILIES: dict[str, tuple[dict[str, Any], str, str]] = {
    "Qwen3": ({"model__qk_layernorm": True}, "one rank", "Qwen3ForCausalLM"),
    "Qwen3 with QKV biases": ({"model__qk_layernorm": True, "model__add_qkv_bias": True}, "TP 2", "Qwen3ForCausalLM"),
    "Qwen3 without gains": ({"model__qk_layernorm": True, "model__norm_gains": "none"}, "one rank", "Qwen3ForCausalLM"),
    "Mixtral": (EXPERT_KEYS, "one rank", "MixtralForCausalLM"),
    "Mixtral, EP 2": (EXPERT_KEYS, "EP 2", "MixtralForCausalLM"),
    "Mixtral, three experts per token": (
        {**EXPERT_KEYS, "model__moe_router_topk": 3},
        "one rank",
        "MixtralForCausalLM",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", FAMILIES)
def test_families_like_llama(ranks: Ranks, name: str, tied: bool, tmp_path: Path) -> None:
    """With QK-norm the query norm takes attention's factor: without it there the logits are others."""
    keys, layout, architecture = FAMILIES[name]
    upstream.prepare_process()
    source = open_source(train(ranks, tmp_path, config_of("llama", tied, **keys), layout))
    export_hugging_face(source, tmp_path / "hf", max_shard_size=100_000)
    one = Trained(source, own_logits(source))
    check(one, tmp_path / "hf", architecture)
    bare = dataclasses.replace(source, parametrization=source.parametrization.replaced(None, softmax_scale=24**-0.5))
    export_hugging_face(bare, tmp_path / "bare")
    assert deviation(logits(tmp_path / "bare"), one.logits) > 1e-2
    if source.run.config.model.num_moe_experts:
        experts_with_multipliers(one, tmp_path)


def experts_with_multipliers(one: Trained, folder: Path) -> None:
    """GraniteMoe: weights to the last bit, the experts' in one tensor a layer; each multiplier left out is seen."""
    said = export_hugging_face(one.source, folder / "granite", keep_multipliers=True)
    assert said["folded"] == {}
    check(one, folder / "granite", "GraniteMoeForCausalLM")
    found = load_file(folder / "granite" / "model.safetensors")
    for expert in range(4):
        mine = f"decoder.layers.1.mlp.experts.local_experts.{expert}"
        for name, layer, shape in (("input", "linear_fc1", (160, 64)), ("output", "linear_fc2", (64, 80))):
            stacked = found[f"model.layers.1.block_sparse_moe.{name}_linear.weight"]
            assert torch.equal(stacked[expert], saved(one.source, f"{mine}.{layer}.weight", *shape))
    neutral = {"embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0}
    for key, value in {**neutral, "attention_multiplier": 24**-0.5}.items():
        config = json.loads((folder / "granite" / "config.json").read_text())
        (folder / "granite" / "config.json").write_text(json.dumps({**config, key: value}))
        assert deviation(logits(folder / "granite"), one.logits) > 1e-2, key
        (folder / "granite" / "config.json").write_text(json.dumps(config))


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_variants(ranks: Ranks, name: str, tmp_path: Path) -> None:
    architecture, overrides = VARIANTS[name]
    upstream.prepare_process()
    tied = overrides.get("model__share_embeddings_and_output_weights", architecture == "gpt3")
    source = open_source(train(ranks, tmp_path, config_of(architecture, tied, **overrides)))
    export_hugging_face(source, tmp_path / "hf")
    check(Trained(source, own_logits(source)), tmp_path / "hf", NAMES[architecture])


def test_gelu_of_a_gpu(trained: Callable[[str], Trained], tmp_path: Path) -> None:
    """There megatron-core fuses bias and GELU, and computes the tanh approximation; transformers calls it gelu_new."""
    from megatron.core.fusions.fused_bias_gelu import bias_gelu
    from transformers.activations import ACT2FN

    source = trained("gpt3, tied").source
    export_hugging_face(source, tmp_path / "cpu")
    states = source.run.path / "random_0.safetensors"
    kept = states.read_bytes()
    try:
        save_file({**load_file(states), "cuda": torch.zeros(16, dtype=torch.uint8)}, states)
        seal(source.run.path)
        export_hugging_face(open_source(source.run.path), tmp_path / "cuda")
    finally:
        states.write_bytes(kept)
        seal(source.run.path)
    said = {
        device: json.loads((tmp_path / device / "config.json").read_text())["activation_function"]
        for device in ("cpu", "cuda")
    }
    assert said == {"cpu": "gelu", "cuda": "gelu_new"}
    x = torch.linspace(-5, 5, 1001)
    fused = bias_gelu(torch.zeros(1), x)
    torch.testing.assert_close(ACT2FN["gelu_new"](x), fused, rtol=0, atol=2e-6)
    assert float((ACT2FN["gelu"](x) - fused).abs().max()) > 1e-4


# --- the folder ---


def test_the_command(trained: Callable[[str], Trained], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Shards, checksums, bf16 as the rounded fp32, and what is said."""
    one = trained("llama, untied")
    run = str(one.source.run.path.parent.parent)
    assert cli.run(["export", run, str(tmp_path / "fp32"), "--json"]) == 0
    said = json.loads(capfd.readouterr().out)
    assert (said["architecture"], said["step"], said["vocabulary"]) == ("LlamaForCausalLM", 3, VOCABULARY)
    assert said["multipliers"]["readout"] == 1.5
    assert said["folded"]["decoder.layers.0.self_attention.linear_qkv.weight"] == {
        "query": pytest.approx(1.4288690166),
        "key": 1.0,
        "value": 1.0,
    }
    assert json.loads((tmp_path / "fp32" / "mup_export.json").read_text()) == said
    assert cli.run(["export", run, str(tmp_path / "bf16"), "--dtype", "bf16", "--max-shard-size", "50KB"]) == 0
    assert "LlamaForCausalLM, 8 tensors with a factor folded in, bf16" in capfd.readouterr().out
    shards = sorted((tmp_path / "bf16").glob("model-*-of-*.safetensors"))
    index = json.loads((tmp_path / "bf16" / "model.safetensors.index.json").read_text())
    halves: dict[str, torch.Tensor] = {}
    for shard in shards:
        found = load_file(shard)
        assert {name for name, file in index["weight_map"].items() if file == shard.name} == set(found)
        assert len(found) == 1 or sum(tensor.nbytes for tensor in found.values()) <= 50_000
        halves |= found
    whole = load_file(tmp_path / "fp32" / "model.safetensors")
    assert len(shards) > 3
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in halves.values())
    assert set(halves) == set(whole)
    assert all(torch.equal(halves[name], whole[name].bfloat16()) for name in whole)
    assert 1e-4 < deviation(logits(tmp_path / "bf16"), one.logits) < 0.1  # rounded, which is said
    for folder in ("fp32", "bf16"):
        checked = subprocess.run(
            ["sha256sum", "-c", "SHA256SUMS"], cwd=tmp_path / folder, capture_output=True, text=True
        )
        assert checked.returncode == 0, checked.stderr
        listed = {line.split("  ")[1] for line in (tmp_path / folder / "SHA256SUMS").read_text().splitlines()}
        assert listed == {path.name for path in (tmp_path / folder).iterdir()} - {"SHA256SUMS"}


# The command, which the kernel kills while its third shard is half written.
KILLED = """
import os, signal, sys
from mup_megatron import cli
from mup_megatron.convert.export import folder
whole = folder._safetensors
shards = 0
def half(parts, dtype):
    global shards
    shards += 1
    for number, piece in enumerate(whole(parts, dtype)):
        yield piece
        if shards == 3 and number:
            os.kill(os.getpid(), signal.SIGKILL)
folder._safetensors = half
cli.run(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_killed_export_goes_on(trained: Callable[[str], Trained], tmp_path: Path) -> None:
    """The same command writes the same bytes as one that nobody disturbed, and takes two shards as they are.

    The half of it is no model for transformers or import; another command begins anew.
    """
    run = str(trained("llama, untied").source.run.path)
    whole, out, partial = tmp_path / "whole", tmp_path / "out", tmp_path / "out.partial"
    options = ["--max-shard-size", "60KB"]
    assert cli.run(["export", run, str(whole), *options]) == 0
    for again in (options, ["--max-shard-size", "60KB", "--dtype", "bf16"]):
        killed = subprocess.run([sys.executable, "-c", KILLED, "export", run, str(out), *options], capture_output=True)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert not out.exists()
        shards = sorted(partial.glob("model-*.safetensors"))
        assert len(shards) == 3
        with pytest.raises((OSError, ValueError), match=r"config\.json|model_type"):
            transformers.AutoModelForCausalLM.from_pretrained(partial)
        before = [(path.name, path.stat().st_ino, path.stat().st_mtime_ns) for path in shards]
        assert cli.run(["export", run, str(out), *again]) == 0
        assert not partial.exists()
        after = [(path.name, path.stat().st_ino, path.stat().st_mtime_ns) for path in sorted(out.glob("model-*"))]
        if again is options:
            assert [one for one in before if one in after] == before[:2]
            assert {path.name: path.read_bytes() for path in out.iterdir()} == {
                path.name: path.read_bytes() for path in whole.iterdir()
            }
            shutil.rmtree(out)
        else:
            assert not set(before) & set(after)


@pytest.mark.parametrize("name", [pytest.param("llama, tied", marks=pytest.mark.slow), "llama, untied"])
def test_multipliers_are_kept_by_granite(trained: Callable[[str], Trained], tmp_path: Path, name: str) -> None:
    """The weights are the checkpoint's to the last bit; config.json says the multipliers."""
    folder = tmp_path / name
    one = trained(name)
    said = export_hugging_face(one.source, folder, keep_multipliers=True)
    assert said["folded"] == {}
    check(one, folder, "GraniteForCausalLM")
    found = load_file(folder / "model.safetensors")
    words = saved(one.source, "embedding.word_embeddings.weight", 384, 64)[:375]
    assert torch.equal(found["model.embed_tokens.weight"], words)
    config = json.loads((folder / "config.json").read_text())
    assert config["embedding_multiplier"] == 0.3
    assert config["residual_multiplier"] == 2.5
    assert config["logits_scaling"] == pytest.approx(1 / 1.5)
    assert config["attention_multiplier"] == pytest.approx(1.75 * 4 / 24)  # 1.75 / sqrt(24) · sqrt(16/24)


def edited(path: Path, **changes: Any) -> None:
    """Other parts in a checkpoint's mup.json."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


DAMAGE: dict[str, tuple[bool, str]] = {
    "a shard cut short": (False, "does not match its checksum); an older checkpoint can be named instead"),
    "a shard cut short, checksums anew": (True, "step_00000003: damaged ("),
    "a shard that is gone": (False, "is missing); an older checkpoint can be named instead"),
    "another base": (
        True,
        "output_layer.weight has the base [None, 16] in the checkpoint, and [None, 32] by its config",
    ),
    "another base's head size": (True, "the base's head size is 8 in the checkpoint, and 16 by its config"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_checkpoint(
    trained: Callable[[str], Trained], what: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One sentence, exit status 2, and nothing in the place of the export."""
    sealed, sentence = DAMAGE[what]
    path = shutil.copytree(trained("llama, untied").source.run.path, tmp_path / "step_00000003")
    shard, record = max(path.glob("*.distcp"), key=lambda file: file.stat().st_size), path / "mup.json"
    if "cut short" in what:
        shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 3])
    elif "gone" in what:
        shard.unlink()
    elif "head size" in what:
        edited(record, base_head_size=8)
    else:
        edited(record, base_shapes={**json.loads(record.read_text())["base_shapes"], "output_layer.weight": [None, 16]})
    if sealed:
        seal(path)
    capfd.readouterr()  # what the ranks said that have trained it
    assert cli.run(["export", str(path), str(tmp_path / "out")]) == 2
    said = capfd.readouterr().err
    assert sentence in said
    assert len(said.strip().splitlines()) == 1, said
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_00000003"]


# --- what has no counterpart ---

REFUSED: dict[str, tuple[dict[str, Any], str, dict[str, Any], str]] = {
    "QK-norm with experts": (
        EXPERTS,
        "llama",
        {"model__qk_layernorm": True},
        r"model\.qk_layernorm: a norm of queries and keys, which MixtralForCausalLM does not have",
    ),
    "biases with QK-norm": (
        HEAD_SIZE,
        "llama",
        {"model__qk_layernorm": True, "model__add_bias_linear": True},
        r"model\.add_bias_linear: biases in the MLP, which Qwen3ForCausalLM does not have",
    ),
    "dense layers": (MOE, "llama", {}, r"model\.moe_layer_freq: layers without experts, which MixtralForCausalLM does"),
    "shared experts": (
        EXPERTS,
        "llama",
        {"model__moe_shared_expert_intermediate_size": 48},
        r"model\.moe_shared_expert_intermediate_size: shared experts",
    ),
    "sigmoid": (
        EXPERTS,
        "llama",
        {"model__moe_router_score_function": "sigmoid"},
        r"score_function: scores by sigmoid",
    ),
    "pre-softmax": (EXPERTS, "llama", {"model__moe_router_pre_softmax": True}, r"moe_router_pre_softmax: scores that"),
    "sinkhorn": (
        EXPERTS,
        "llama",
        {"model__moe_router_load_balancing_type": "sinkhorn"},
        r"moe_router_load_balancing_type: experts chosen by sinkhorn",
    ),
    "sinks": (HEAD_SIZE, "llama", {"model__softmax_type": "learnable"}, r"model\.softmax_type: the softmax learnable"),
    "gates": (
        HEAD_SIZE,
        "llama",
        {"model__attention_output_gate": True},
        r"model\.attention_output_gate: gates on the",
    ),
    "norms left out": (HEAD_SIZE, "llama", {"model__without_norms": ["final_layernorm"]}, r"model\.without_norms"),
    "clamped": (HEAD_SIZE, "llama", {"model__activation_func_clamp_value": 7.0}, r"model\.activation_func_clamp_value"),
    "part of RoPE": (HEAD_SIZE, "llama", {"model__rotary_percent": 0.5}, r"model\.rotary_percent: RoPE on a part"),
    "no positions": (HEAD_SIZE, "llama", {"model__position_embedding_type": "none"}, r"positions none, which Llama"),
    "no gate": (HEAD_SIZE, "llama", {"model__gated_linear_unit": False}, r"model\.gated_linear_unit: RMSNorm with an"),
    "gated LayerNorm": (HEAD_SIZE, "llama", {"model__normalization": "LayerNorm"}, r"model\.normalization: LayerNorm"),
    "GPT-2 with RoPE": (
        HEAD_SIZE,
        "gpt3",
        {"model__position_embedding_type": "rope"},
        r"positions rope, which GPT2LMH",
    ),
    "GPT-2 with GQA": (MIXED, "gpt3", {}, r"model\.num_query_groups: key/value heads that several query heads share"),
    "GPT-2's heads": (HEAD_SIZE, "gpt3", {}, r"model\.kv_channels: heads that together are not as wide"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_an_architecture_without_counterpart(what: str) -> None:
    growth, architecture, overrides, sentence = REFUSED[what]
    with pytest.raises(ConfigError, match=sentence):
        architecture_of(make(growth, architecture, **overrides), keep_multipliers=False)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"model__moe_router_pre_softmax": True}, r"moe_router_pre_softmax: scores that .* GraniteMoeForCausalLM does"),
        ({"model__moe_router_score_function": "sigmoid"}, r"score_function: scores by sigmoid, which GraniteMoe"),
        ({"model__qk_layernorm": True}, r"qk_layernorm: a norm of queries and keys, which GraniteMoe"),
        ({"model__add_bias_linear": True}, r"add_bias_linear: biases in the MLP, which GraniteMoe"),
    ],
)
def test_what_granite_with_experts_lacks(overrides: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        architecture_of(make(EXPERTS, "llama", **overrides), keep_multipliers=True)


def test_gpt2_keeps_no_multipliers() -> None:
    with pytest.raises(
        ConfigError, match="GPT2LMHeadModel has no multipliers of its own; expected no --keep-multipliers"
    ):
        architecture_of(config_of("gpt3", True), keep_multipliers=True)
