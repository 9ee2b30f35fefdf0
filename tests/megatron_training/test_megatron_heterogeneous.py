"""`mup-megatron run` with --heterogeneous-layers-config-path: layers of sizes of their own, parametrised as built."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import megatron_runs
from tests.helpers.distributed import Ranks
from tests.helpers.installed import needs_training

pytestmark = needs_training
# What upstream asks for beside such a file.
LLAMA = (
    "--swiglu --normalization RMSNorm --group-query-attention --num-query-groups 2 --position-embedding-type rope "
    "--use-rope-scaling --use-rotary-position-embeddings --rope-scaling-factor 8.0 --rotary-base 10000 "
    "--untie-embeddings-and-output-weights --disable-bias-linear"
)
OWN = {"no_op": False, "replace_with_linear": False}
# Attention and MLP, no attention and a wide MLP, two matrices, attention alone.
LAYERS: list[dict[str, Any]] = [
    {"attention": {**OWN, "n_heads_in_group": 2}, "ffn": {**OWN, "ffn_mult": 3.0}},
    {"attention": {**OWN, "n_heads_in_group": None, "no_op": True}, "ffn": {**OWN, "ffn_mult": 12.0}},
    {
        "attention": {**OWN, "n_heads_in_group": None, "replace_with_linear": True},
        "ffn": {**OWN, "ffn_mult": None, "replace_with_linear": True},
    },
    {"attention": {**OWN, "n_heads_in_group": 2}, "ffn": {**OWN, "ffn_mult": None, "no_op": True}},
]
BASE = "hidden_size: 64\nnum_attention_heads: 4\n"
# A quarter of the hidden size, half of the heads of 16.
QUARTER = "hidden_size: 16\nnum_attention_heads: 2\n"
DENSE = "decoder.layers.{}.mlp.linear_fc{}.weight"


def layers_file(path: Path, layers: list[dict[str, Any]], hidden: int = 64, heads: int = 4) -> str:
    """A file as upstream reads it."""
    whole = {
        "hidden_act": "silu",
        "num_hidden_layers": len(layers),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "tie_word_embeddings": False,
        "rope_theta": 10000,
        "rope_scaling": {"factor": 8.0},
        "block_configs": layers,
    }
    path.write_text(json.dumps(whole))
    return str(path)


def run(ranks: Ranks, folder: Path, *extra: str, **changed: Any) -> list[dict[str, Any]]:
    path = layers_file(folder / "layers.json", changed.pop("layers", LAYERS))
    own = {"base": BASE, "num_layers": 4, "ffn_hidden_size": 256, "clip_grad": 0, **changed}
    said = (*LLAMA.split(), "--heterogeneous-layers-config-path", path, *extra)
    return megatron_runs.run(ranks, folder, *said, **own)


def rates(found: dict[str, Any]) -> dict[str, float]:
    assert found["status"] == 0, found["said"]
    return {name: group["max_lr"] for name, group in found["groups"].items()}


def test_at_the_base_it_is_the_plain_run(ranks: Ranks, tmp_path: Path) -> None:
    (ours,) = run(ranks, tmp_path)
    assert ours["status"] == 0, ours["said"]
    assert "no key of model: says --heterogeneous-layers-config-path" in ours["said"]
    (plain,) = run(ranks, tmp_path, plainly=True, initial=ours["initial"])
    megatron_runs.assert_same(ours, plain, steps=2)
    megatron_runs.assert_moved(ours)
    assert len(plain["final"]) == 19


def test_relative_sizes_follow(ranks: Ranks, tmp_path: Path) -> None:
    """By hand: hidden 16 to 64. Attention's output is of 2 heads of 16, then 4.

    Upstream makes FFN sizes 2/3 of ffn_mult times the hidden size, up to a multiple of 256: 3 gives 256 in both, 12
    gives 256 and 512. Both grow; the ratio of the first happens to be 1.
    """
    (wide,) = run(ranks, tmp_path, base=QUARTER)
    found = rates(wide)
    linear = {"decoder.layers.2.self_attention.weight", "decoder.layers.2.mlp.weight"}
    by_hidden = {*linear, *(f"decoder.layers.{n}.self_attention.linear_qkv.weight" for n in (0, 3))}
    by_hidden |= {DENSE.format(0, 1), DENSE.format(1, 1)}
    assert {name for name, rate in found.items() if rate == pytest.approx(1e-2 / 4)} == by_hidden
    halved = {DENSE.format(1, 2), *(f"decoder.layers.{n}.self_attention.linear_proj.weight" for n in (0, 3))}
    assert {name for name, rate in found.items() if rate == pytest.approx(1e-2 / 2)} == halved
    assert {found[name] for name in set(found) - by_hidden - halved} == {1e-2}
    first = wide["initial"]
    for name in (*linear, DENSE.format(0, 1), DENSE.format(1, 1)):
        assert first[name].std() == pytest.approx(0.05 / 2, rel=0.05), name
    # Two groups of two queries, a key and a value; with heads, key/value heads grow: no block is output-like.
    qkv = first["decoder.layers.0.self_attention.linear_qkv.weight"].reshape(2, 4, 16, 64)
    for block in range(4):
        assert qkv[:, block].std() == pytest.approx(0.05 / 2, rel=0.1), block
    assert np.isfinite(wide["steps"]).all()


def test_a_file_of_the_bases_own(ranks: Ranks, tmp_path: Path) -> None:
    """Numbers in it grow; what it leaves out is fixed: the second MLP, and key/value heads of the last layer."""
    base = copy.deepcopy(LAYERS)
    base[0]["ffn"] = {**OWN, "ffn_hidden_size": 32}  # to 256
    base[1]["ffn"] = OWN
    base[3]["attention"] = OWN
    path = layers_file(tmp_path / "base.json", base)
    text = f"{QUARTER}num_query_groups: 1\nheterogeneous_layers_config_path: {path}\n"
    (wide,) = run(ranks, tmp_path, base=text)
    found = rates(wide)
    assert found[DENSE.format(0, 2)] == pytest.approx(1e-2 / 8)
    assert found[DENSE.format(1, 2)] == 1e-2
    epsilons = [wide["groups"][DENSE.format(layer, 1)]["eps"] for layer in (0, 1)]
    assert epsilons == pytest.approx([1e-8 / 8, 1e-8])  # by the growth of the fan-out
    last = wide["initial"]["decoder.layers.3.self_attention.linear_qkv.weight"].reshape(2, 4, 16, 64)
    for block, std in enumerate((0.05 / 2, 0.05 / 2, 0.05 / 4, 0.05 / 4)):
        assert last[:, block].std() == pytest.approx(std, rel=0.1), block


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [{"tensor_model_parallel_size": 2, "make_vocab_size_divisible_by": 64}, {"pipeline_model_parallel_size": 2}],
)
def test_layouts(sizes: dict[str, int], ranks: Ranks, tmp_path: Path) -> None:
    """Two ranks start from one rank's values, and have its losses."""
    common: dict[str, Any] = {"base": QUARTER, "global_batch_size": 4, "train_iters": 3}
    (one,) = run(ranks, tmp_path, **common)
    two = run(ranks, tmp_path, count=2, **common, **sizes)
    assert one["status"] == 0, one["said"]
    assert [rank["status"] for rank in two] == [0, 0], two[0]["said"] + two[1]["said"]
    logged = max((rank["losses"] for rank in two), key=len)
    assert len(logged) == len(one["losses"]) == 3
    assert logged == pytest.approx(one["losses"], rel=1e-5)


@pytest.mark.slow
def test_a_run_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    """From its checkpoint to the last bit; with other layers it is refused by the tensors."""
    saves = ("--save", str(tmp_path / "saved"), "--save-interval", "2")
    (whole,) = run(ranks, tmp_path, *saves, train_iters=4)
    loads = ("--load", str(tmp_path / "saved"), "--ckpt-step", "2")
    (rest,) = run(ranks, tmp_path, *loads, train_iters=4)
    assert rest["status"] == whole["status"] == 0, whole["said"] + rest["said"]
    assert rest["steps"] == whole["steps"][2:]
    other = [LAYERS[0], LAYERS[2], LAYERS[1], LAYERS[3]]
    (found,) = run(ranks, tmp_path, *loads, train_iters=4, layers=other)
    assert found["status"] == 2
    assert "base_shapes.decoder.layers.1.self_attention.weight" in found["said"]


def _named(folder: Path, layers: list[dict[str, Any]]) -> str:
    return f"{QUARTER}heterogeneous_layers_config_path: {layers_file(folder / 'base.json', layers)}\n"


def test_refused(ranks: Ranks, tmp_path: Path) -> None:
    """Layers of another kind or number in the base, heads that cannot be shared out, a depth rule, a file alone."""
    swapped = _named(tmp_path, [LAYERS[1], *LAYERS[1:]])
    depth = tmp_path / "mup.yaml"
    depth.write_text("parametrization: {depth: completep}\n")
    for text, words, said in (
        (swapped, (), "base.json: layer 0: attention.no_op: true, but false in the model"),
        ("hidden_size: 16\nnum_attention_heads: 1\n", (), "n_heads_in_group: 2 does not divide the base's 1 heads"),
        (
            BASE + "num_layers: 2\n",
            ("--mup-config", str(depth)),
            "its layers are 4, and no key says which of them a base",
        ),
        (BASE + "moe_latent_size: 16\n", (), "base.moe_latent_size: the model has no such size"),
        (
            BASE,
            ("--heterogeneous-layers-config-encoded-json", "{}"),
            "--heterogeneous-layers-config-encoded-json {}: not under µP here (megatron.training reads it and builds",
        ),
    ):
        (found,) = run(ranks, tmp_path, *words, base=text)
        assert found["status"] == 2, said
        assert said in found["said"], found["said"]
        assert "Traceback" not in found["said"]
