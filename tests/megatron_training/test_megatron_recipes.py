"""Megatron-LM's own functional tests as users of µP: `--mup-explain` takes their options as they are written."""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path

import pytest

from mup_megatron.errors import UserError
from tests.megatron_training.test_megatron_elsewhere import DATA, elsewhere

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron.training") is None,
    reason="megatron.training ships with megatron-core 0.19 and later, which need Python 3.12",
)

# What no table of µP can be made of, by a part of the recipe's name, with what the sentence says.
REFUSED = {
    "_gdn": "--experimental-attention-variant gated_delta_net: not under µP here",
    "_dsa": "--experimental-attention-variant dsa: not under µP here",
    "nemotron3_super": "--moe-latent-size 1024: not under µP here",
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
    """Of 222 recipes 206: the others ask for layers without a rule, or are refused by Megatron."""
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
