"""`--mup-explain` of recipes for many GPUs, on a machine that has none: sizes of published models, rules by hand."""

from __future__ import annotations

import json
import os
import warnings
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mup_megatron.parallel import upstream
from mup_megatron.util.errors import UserError
from tests.helpers import megatron_runs
from tests.helpers.commands import run
from tests.helpers.installed import needs_training
from tests.megatron_training.test_megatron_table import refusal

pytestmark = needs_training
DATA = Path(__file__).with_name("recipes")
COMMON = (
    "--num-layers 2 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 64 "
    "--train-iters 20 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 375"
)


def elsewhere(
    words: str | Sequence[str],
    folder: Path,
    base: dict[str, int] | None = None,
    common: str = COMMON,
    *,
    settled: bool = False,
) -> Any:
    """What `--mup-explain` prints from, for options that this machine cannot run; where `settled`, the settings too."""
    from megatron.training.arguments import add_megatron_arguments, validate_args

    from mup_megatron.megatron_training.elsewhere import explain_elsewhere
    from mup_megatron.megatron_training.options import add_options, prepare, read_options

    upstream.prepare_process()
    (folder / "base.json").write_text(json.dumps(base or {"hidden_size": 64}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepare()
        parser = add_options(add_megatron_arguments(ArgumentParser(allow_abbrev=False)))
        split = words.split() if isinstance(words, str) else words
        typed = [*common.split(), *split, "--mup-base", str(folder / "base.json"), "--mup-explain"]
        args = parser.parse_args(typed)
        args.rank, args.world_size = 0, 1
        settings = read_options(args)
        assert settings is not None
        found = explain_elsewhere(validate_args, args, {}, settings)
        return (found, settings) if settled else found


def recipe(name: str) -> tuple[str, dict[str, int]]:
    """A recipe's options, and the base that is tried with it."""
    lines = (DATA / f"{name}.txt").read_text().splitlines()
    assert lines[0].startswith("# Sizes of ")
    base = next(line.removeprefix("# Base: ") for line in lines if line.startswith("# Base: "))
    return " ".join(line for line in lines if not line.startswith("#")), json.loads(base)


# Tensors, rates (base over fan-in where it grows) and processes, worked out by hand.
RECIPES: dict[str, tuple[int, dict[str, float], int]] = {
    # Two embeddings, final norm of two, and of each layer two norms of two and four linear layers of two.
    "gpt3_175b": (
        2 + 2 + 96 * 12,
        {"decoder.layers.95.mlp.linear_fc2.weight": 1 / 8, "decoder.layers.0.mlp.linear_fc1.weight": 1 / 8},
        128,
    ),
    # Embedding, head, final norm, and of each layer two norms and four linear layers.
    "llama3_8b": (
        2 + 1 + 32 * 6,
        {"decoder.layers.31.mlp.linear_fc2.weight": 1 / 4, "output_layer.weight": 1.0},
        2,
    ),
    # The same with, instead of two linear layers, a router and eight experts of two.
    "mixtral_8x7b": (
        2 + 1 + 32 * (4 + 1 + 16),
        {
            "decoder.layers.3.mlp.experts.local_experts.7.linear_fc2.weight": 1 / 4,
            "decoder.layers.3.mlp.router.weight": 1 / 4,
        },
        32,
    ),
    # Per layer two norms, QKV with its bias, a projection, a sink, a router, 32 experts of two.
    "gpt_oss_20b": (
        2 + 1 + 24 * (2 + 3 + 1 + 1 + 32 * 2),
        {"decoder.layers.9.self_attention.core_attention.softmax_offset": 1.0},
        8,
    ),
    # Three dense layers of two norms, five linear layers of attention, two norms of latents, two linear layers;
    # experts, router and shared experts in the others; one further layer predicts one token more, with two norms, a
    # projection and a norm at its end.
    "deepseek_v3": (
        2 + 1 + 3 * 11 + 58 * (9 + 1 + 256 * 2 + 2) + (9 + 1 + 256 * 2 + 2) + 4,
        {"decoder.layers.60.mlp.experts.local_experts.255.linear_fc1.weight": 1 / 4},
        1024,
    ),
    # Per layer two norms, QKV, projection, two norms of heads, a router and 128 experts of two.
    "qwen3_30b_a3b": (
        2 + 1 + 48 * (6 + 1 + 128 * 2),
        {"decoder.layers.47.self_attention.linear_proj.weight": 1 / 2},
        8,
    ),
    # Squared ReLU, LayerNorm of two, no biases, grouped queries.
    "nemotron4_15b": (
        2 + 2 + 32 * (4 + 4),
        {"decoder.layers.1.mlp.linear_fc2.weight": 1 / 3},
        8,
    ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_published_sizes(name: str, tmp_path: Path) -> None:
    tensors, rates, processes = RECIPES[name]
    words, base = recipe(name)
    _, parametrization, layout, _ = elsewhere(words, tmp_path, base, common="--mock-data --vocab-size 1000")
    assert len(parametrization.tensors) == tensors
    assert layout.world_size == processes
    for tensor, rate in rates.items():
        assert parametrization.tensors[tensor].lr_multiplier == pytest.approx(rate, rel=1e-15), tensor
    assert parametrization.tensors["embedding.word_embeddings.weight"].lr_multiplier == 1.0


def test_what_a_run_refuses_is_said(tmp_path: Path) -> None:
    """Options that change no row are explained, and named; those that change one stay refused."""
    words = "--hidden-size 128 --num-attention-heads 4 --num-experts 4 --disable-bias-linear"
    plain = elsewhere(words, tmp_path)
    fused = elsewhere(
        f"{words} --moe-grouped-gemm --moe-token-dispatcher-type alltoall --use-te-activation-func", tmp_path
    )
    assert plain[3] == []
    assert [sentence.split(":")[0] for sentence in fused[3]] == ["--use-te-activation-func"]
    rows = [{name: (row.group, row.init_std) for name, row in found[1].tensors.items()} for found in (plain, fused)]
    assert rows[0] == rows[1]
    with pytest.raises(UserError, match=r"^--moe-latent-size: such a model is parametrised as it is built"):
        elsewhere(f"{words} --moe-latent-size 8", tmp_path)
    assert refusal("--moe-grouped-gemm").startswith("--moe-grouped-gemm: computes on CUDA alone")  # in a run here


def test_upstreams_own_refusal_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^Megatron's own checks of these options: "):
        elsewhere("--hidden-size 128 --num-attention-heads 4 --tp-comm-overlap", tmp_path)


def test_a_tokenizer_that_is_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked of the network: a process of its own says so before it imports Hugging Face's client."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    common = COMMON.replace("NullTokenizer --vocab-size 375", "HuggingFaceTokenizer --tokenizer-model no/such")
    with pytest.raises(UserError, match=r"expected its files, or --vocab-size with the number of its entries$"):
        elsewhere("--hidden-size 128 --num-attention-heads 4", tmp_path, common=common)
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_the_table_is_whole_where_nobody_looks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a pipe or a file: no column is cut, whatever the tensors are called."""
    from mup_megatron.megatron_training.elsewhere import show

    words, base = recipe("deepseek_v3")
    found, settings = elsewhere(words, tmp_path, base, common="--mock-data --vocab-size 1000", settled=True)
    show(*found, settings=settings)
    out = capsys.readouterr().out
    assert "…" not in out
    headings = [line.split() for line in out.splitlines() if line.startswith(("tensor ", " tensor "))]
    assert headings
    assert set(map(tuple, headings)) == {
        ("tensor", "global", "local", "base", "m_in", "m_out", "init", "std", "forward")
    }
    name = "decoder.layers.*.mlp.experts.local_experts.*.linear_fc2.weight"
    (row,) = [line for line in out.splitlines() if name in line]
    # Fan-in and fan-out are four times the base's.
    assert row.split(name)[1].split()[1:6] == ["7168×2048", "7168×2048", "1792×512", "×4", "×4"]


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    """A table and exit status 0 for Transformer Engine, NCCL and eight processes, none of which is here."""
    words = megatron_runs.words(tmp_path, "--tensor-model-parallel-size", "4", "--pipeline-model-parallel-size", "2")
    words = [word if word != "gloo" else "nccl" for word in words]
    words = [word if word != "local" else "transformer_engine" for word in words]
    result = run("python", "-m", "mup_megatron", "run", str(megatron_runs.SCRIPT), *words, "--mup-explain")
    assert result.returncode == 0, result.stderr[-3000:]
    assert "TP 4, PP 2, DP 1" in result.stdout
    assert "mlp.linear_fc2.weight" in result.stdout
