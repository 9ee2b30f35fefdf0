"""Megatron-LM's own functional tests as users of µP: `--mup-explain` takes their options as they are written."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from mup_megatron.util.errors import UserError
from tests.helpers import megatron_runs
from tests.helpers.distributed import Ranks
from tests.helpers.installed import needs_training
from tests.megatron_training.test_megatron_elsewhere import DATA, elsewhere, recipe

pytestmark = needs_training

# What no table of µP can be made of, by a part of the recipe's name, with what the sentence says.
REFUSED = {
    "_gdn": "--experimental-attention-variant gated_delta_net: such a model is parametrised as it is built",
    "_dsa": "--experimental-attention-variant dsa: such a model is parametrised as it is built",
    "nemotron3_super": "--spec: such a model is parametrised as it is built",
    "tp1_pp1_mup": "--use-mup: megatron-core's native MuP cannot be combined with this project's; remove --use-mup",
    # Megatron itself refuses these, here or everywhere.
    "fim_dataset": "Mock dataset is not supported with FIM dataset",
    "fsdp2_resume_torch_dist_te": "--use-torch-fsdp2 requires --untie-embeddings-and-output-weights",
    "native_fp8_tp_pp_sp_tp_overlap": "--deterministic-mode requires: tp_comm_overlap=False",
    "fsdp2_ep_overlap": "overlap_grad_reduce is only supported with TE",
}
# Options that another program than megatron.training's parser adds.
OTHERS = ("modelopt",)
# Multiplied by a hidden vector: fan-in is the hidden size, which is twice the base's.
FROM_HIDDEN = ("linear_qkv.weight", "linear_q_proj.weight", "linear_q_down_proj.weight", "linear_kv_down_proj.weight")


def recipes() -> dict[str, list[str]]:
    """Options by the name of the first recipe that has them; its others have the same."""
    found: dict[str, list[str]] = {}
    for paragraph in (DATA / "functional_tests_0.19.0.txt").read_text().split("\n\n")[1:]:
        lines = paragraph.splitlines()
        names = [line.removeprefix("## ") for line in lines if line.startswith("## ")]
        if names:
            found[" ".join(names)] = shlex.split(" ".join(lines[len(names) :]))
    return found


RECIPES = recipes()


def refusal(names: str) -> str | None:
    return next((sentence for part, sentence in REFUSED.items() if part in names), None)


def test_how_many_are_taken() -> None:
    """Of 222 recipes 206: the others ask for layers of the model as built, or are refused by Megatron."""
    taken = [
        name
        for names in RECIPES
        for name in names.split()
        if not refusal(names) and not any(part in name for part in OTHERS)
    ]
    assert sum(len(names.split()) for names in RECIPES) == 222
    assert len(taken) == 206


@pytest.mark.slow
@pytest.mark.parametrize("names", [pytest.param(names, id=names.split()[0]) for names in RECIPES])
def test_a_functional_test_is_explained(names: str, tmp_path: Path) -> None:
    """From half the hidden size: what reads hidden vectors gets half the rate under Adam; the embedding does not."""
    words = RECIPES[names]
    hidden = int(words[words.index("--hidden-size") + 1]) if "--hidden-size" in words else 0
    base = {"hidden_size": hidden // 2} if hidden else None
    if any(part in names for part in OTHERS):
        with pytest.raises(SystemExit):
            elsewhere(words, tmp_path, base, common="--mock-data --tokenizer-type NullTokenizer --vocab-size 1000")
        return
    if sentence := refusal(names):
        with pytest.raises(UserError) as error:
            elsewhere(words, tmp_path, base, common="--mock-data --tokenizer-type NullTokenizer --vocab-size 1000")
        assert sentence in str(error.value)
        return
    _, parametrization, _, _ = elsewhere(
        words, tmp_path, base, common="--mock-data --tokenizer-type NullTokenizer --vocab-size 1000"
    )
    tensors = parametrization.tensors
    read = {name: tensor.lr_multiplier for name, tensor in tensors.items() if name.endswith(FROM_HIDDEN)}
    assert read
    # Under Muon rows and columns double, and sqrt(larger side) with them.
    assert set(read.values()) == {2**-0.5 if "muon" in names else 0.5}
    assert tensors["embedding.word_embeddings.weight"].lr_multiplier == 1


# What makes a published command line small enough for a CPU, where it says the option at all.
SMALLER = {
    "num-layers": 2,
    "hidden-size": 64,
    "ffn-hidden-size": 128,
    "num-attention-heads": 4,
    "kv-channels": 16,
    "num-query-groups": 2,
    "seq-length": 16,
    "max-position-embeddings": 16,
    "yarn-original-max-position-embeddings": 8,
    "q-lora-rank": 24,
    "kv-lora-rank": 16,
    "qk-head-dim": 16,
    "qk-pos-emb-head-dim": 8,
    "v-head-dim": 16,
    "num-experts": 16,
    "moe-ffn-hidden-size": 48,
    "moe-shared-expert-intermediate-size": 48,
    "moe-layer-freq": "([0]*1+[1]*1)",
    "micro-batch-size": 2,
    "global-batch-size": 4,
    "train-iters": 2,
    "num-workers": 0,
    "make-vocab-size-divisible-by": 128,
}
# A CPU has one process here and fp32, and neither Transformer Engine nor grouped matrix products; torch's own norms
# have no gains around zero.
ELSEWHERE = {
    *(
        "bf16",
        "fp16",
        "fp8-format",
        "grad-reduce-in-bf16",
        "moe-grouped-gemm",
        "attention-backend",
        "sequence-parallel",
        "apply-layernorm-1p",
    ),
    *("pipeline-model-parallel-layout", "use-distributed-optimizer", "overlap-grad-reduce", "overlap-param-gather"),
    *(f"{axis}-model-parallel-size" for axis in ("tensor", "pipeline", "expert")),
    *("window-size", "window-attn-skip-freq"),  # upstream makes the mask of a window on CUDA
    *("lr-warmup-iters", "lr-warmup-init"),  # two steps of a warm-up over 200 move nothing
}
# From half of every size that is the model's own here; heads keep their size.
HALF = "hidden_size: 32\nnum_attention_heads: 2\nffn_hidden_size: 64\n"
OF_EXPERTS = "moe_ffn_hidden_size: 24\n"


def small(words: Iterable[str]) -> dict[str, str]:
    """The options of a command line as name and value ("" for a switch), made small."""
    found: dict[str, str] = {}
    last = ""
    for word in words:
        if word.startswith("--"):
            last = word.removeprefix("--")
            found[last] = ""
        else:
            found[last] = f"{found[last]} {word}".strip()
    return {option: str(SMALLER.get(option, value)) for option, value in found.items() if option not in ELSEWHERE}


PUBLISHED = ("gpt3_175b", "llama3_8b", "mixtral_8x7b", "gpt_oss_20b", "deepseek_v3", "qwen3_30b_a3b", "nemotron4_15b")


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_small_copy_of_a_published_command_line_trains(name: str, ranks: Ranks, tmp_path: Path) -> None:
    trains({**small(shlex.split(recipe(name)[0]))}, ranks, tmp_path)


def trains(options: dict[str, str | None], ranks: Ranks, tmp_path: Path) -> None:
    """Two steps in µP: every tensor moves, losses are finite, and rates are the rule's. None takes an option out."""
    experts = "num-experts" in options
    base = HALF + (OF_EXPERTS if "moe-ffn-hidden-size" in options else "")
    base += "num_query_groups: 1\n" if "num-query-groups" in options else ""
    base += "moe_shared_expert_intermediate_size: 24\n" if "moe-shared-expert-intermediate-size" in options else ""
    switches = [f"--{option}" for option, value in options.items() if value == ""]
    valued: dict[str, Any] = {option: value for option, value in options.items() if value != ""}
    valued |= {"lr": "1e-2", "lr-decay-style": "constant", "min-lr": None, "lr-warmup-fraction": None}
    words = megatron_runs.words(tmp_path, *switches, base=base, **valued)
    found = ranks.run(1, megatron_runs.train, words=words)[0]
    assert found["status"] == 0, found["said"]
    assert len(found["losses"]) == 2
    assert all(0 < loss < 8 for loss in found["losses"]), found["losses"]
    still = [name for name, value in found["initial"].items() if (found["final"][name] == value).all()]
    assert still == []
    rates = {tensor: group["max_lr"] for tensor, group in found["groups"].items()}
    first = "decoder.layers.0."
    read = [tensor for tensor in rates if tensor.startswith(first) and tensor.endswith(FROM_HIDDEN)]
    assert read
    assert {rates[tensor] for tensor in read} == {0.005}
    assert rates["decoder.final_layernorm.weight"] == 0.01
    assert experts == any("experts" in tensor for tensor in rates)
