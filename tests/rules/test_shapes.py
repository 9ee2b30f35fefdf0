"""Joining shapes with their base, and the .bsh file, both ways with microsoft/mup."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from mup_megatron.rules.base_shapes import BaseShapes, join_base_shapes, load_base_shapes, save_base_shapes
from mup_megatron.rules.shapes import Fused, InfDim, Init, TensorSpec, join_shapes, layer_number
from mup_megatron.util.errors import UserError


def weight(rows: int, columns: int, fused: Fused | None = None) -> TensorSpec:
    return TensorSpec(shape=(rows, columns), fan_in=1, fan_out=0, init=Init.WEIGHT, partition_dim=0, fused=fused)


def qkv(groups: int, query: int, head: int) -> Fused:
    return Fused(runs=(("query", query), ("key", head), ("value", head)), repeats=groups)


def test_growth_is_what_the_enlarged_base_moves() -> None:
    shapes = join_shapes({"w": weight(64, 48)}, {"w": weight(64, 16)}, {"w": weight(64, 32)})
    assert shapes["w"].infshape == (InfDim(None, 64), InfDim(16, 48))
    assert shapes["w"].fan_in.ratio == 3
    assert shapes["w"].fan_out.ratio == 1
    assert not shapes["w"].fan_out.grows


def test_a_growing_dimension_may_have_ratio_one() -> None:
    shape = join_shapes({"w": weight(64, 16)}, {"w": weight(64, 16)}, {"w": weight(128, 16)})["w"]
    assert shape.fan_out.grows
    assert shape.fan_out.ratio == 1
    assert not shape.fan_in.grows


def test_an_undeclared_difference_is_refused() -> None:
    with pytest.raises(UserError, match="no key declared under base: moves"):
        join_shapes({"w": weight(64, 48)}, {"w": weight(64, 16)}, {"w": weight(128, 16)})


def test_other_tensors_are_refused() -> None:
    with pytest.raises(UserError, match="no tensor v"):
        join_shapes({"v": weight(2, 2)}, {"w": weight(2, 2)}, {"w": weight(2, 2)})
    with pytest.raises(UserError, match="no tensor w"):
        join_shapes({}, {"w": weight(2, 2)}, {"w": weight(2, 2)})


def test_blocks_have_fan_outs_of_their_own() -> None:
    """Heads 4 to 8 with d = 8, query groups 2 in both: queries double, keys and values stay."""
    target = weight(96, 64, qkv(2, 32, 8))
    base = weight(64, 32, qkv(2, 16, 8))
    enlarged = weight(96, 64, qkv(2, 32, 8))
    blocks = join_shapes({"w": target}, {"w": base}, {"w": enlarged})["w"].blocks
    assert blocks == {"query": InfDim(32, 64), "key": InfDim(None, 16), "value": InfDim(None, 16)}
    assert blocks["query"].ratio == Fraction(2)


def test_blocks_must_fill_their_dimension() -> None:
    with pytest.raises(ValueError, match="do not add up"):
        weight(97, 64, qkv(2, 32, 8))


def test_layer_number() -> None:
    assert layer_number("decoder.layers.12.mlp.linear_fc1.weight") == 12
    assert layer_number("mtp.layers.0.transformer_layer.mlp.linear_fc1.weight") is None  # its depth is its own
    assert layer_number("decoder.final_layernorm.weight") is None
    assert layer_number("embedding.word_embeddings.weight") is None


def family() -> dict[str, TensorSpec]:
    return {
        "embedding": TensorSpec(shape=(128, 64), fan_in=0, fan_out=1, init=Init.EMBEDDING),
        "qkv": weight(96, 64, qkv(2, 32, 8)),
        "gain": TensorSpec(shape=(64,), fan_in=None, fan_out=0, init=Init.ONES),
    }


def joined() -> dict:
    base = {**family(), "embedding": TensorSpec(shape=(128, 16), fan_in=0, fan_out=1, init=Init.EMBEDDING)}
    base["qkv"], base["gain"] = (
        weight(40, 16, qkv(1, 24, 8)),
        TensorSpec(shape=(16,), fan_in=None, fan_out=0, init=Init.ONES),
    )
    enlarged = {**family(), "qkv": weight(80, 32, qkv(2, 24, 8))}
    return join_shapes(family(), base, enlarged)


def test_bsh_round_trip(tmp_path: Path) -> None:
    save_base_shapes(tmp_path / "a.bsh", joined(), {"kv_channels": 8})
    loaded = load_base_shapes(tmp_path / "a.bsh")
    assert loaded.extra == {"kv_channels": 8}
    assert join_base_shapes(family(), loaded, "a.bsh") == joined()


def test_microsofts_mup_reads_our_bsh(tmp_path: Path) -> None:
    from mup.shape import load_base_shapes as mup_load

    save_base_shapes(tmp_path / "a.bsh", joined(), {})
    read = mup_load(str(tmp_path / "a.bsh"))
    assert {name: shape.base_shape() for name, shape in read.items()} == {
        "embedding": [None, 16],
        "qkv": [40, 16],
        "gain": [16],
    }


def test_we_read_microsofts_bsh(tmp_path: Path) -> None:
    import torch
    from mup import make_base_shapes

    def model(width: int) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Embedding(10, width), torch.nn.Linear(width, 2 * width, bias=False))

    make_base_shapes(model(8), model(16), savefile=str(tmp_path / "b.bsh"))
    loaded = load_base_shapes(tmp_path / "b.bsh")
    assert loaded.dims == {"0.weight": [None, 8], "1.weight": [16, 8]}
    specs = {
        "0.weight": TensorSpec(shape=(10, 32), fan_in=0, fan_out=1, init=Init.EMBEDDING),
        "1.weight": weight(64, 32),
    }
    shapes = join_base_shapes(specs, loaded, "b.bsh")
    assert shapes["1.weight"].fan_in.ratio == 4
    assert shapes["1.weight"].fan_out.ratio == 4


def test_blocks_of_one_size_follow_from_a_bsh_without_blocks() -> None:
    fused = Fused(runs=(("gate", 48), ("up", 48)))
    shapes = join_base_shapes({"w": weight(96, 64, fused)}, BaseShapes({"w": [32, 16]}, {}, {}), "x.bsh")
    assert shapes["w"].blocks == {"gate": InfDim(16, 48), "up": InfDim(16, 48)}


def test_blocks_of_several_sizes_do_not() -> None:
    with pytest.raises(UserError, match="does not tell their base sizes"):
        join_base_shapes({"w": weight(96, 64, qkv(2, 32, 8))}, BaseShapes({"w": [48, 16]}, {}, {}), "x.bsh")


@pytest.mark.parametrize(
    "content",
    [
        "[1, 2]",
        "a: 1",
        "a: [x]",
        "a: [0]",
        "a: [1.5]",
        "a: [true]",
        "a: [",
        "1: [2]",
        "!!python/object/apply:os.system ['x']",
    ],
)
def test_files_that_are_no_bsh(tmp_path: Path, content: str) -> None:
    (tmp_path / "bad.bsh").write_text(content)
    with pytest.raises(UserError, match=r"bad\.bsh: not a base shape file"):
        load_base_shapes(tmp_path / "bad.bsh")


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read base shapes"):
        load_base_shapes(tmp_path / "none.bsh")
    (tmp_path / "cut.bsh").write_text('# mup-megatron: {"blocks": \na: [1]\n')
    with pytest.raises(UserError, match="damaged"):
        load_base_shapes(tmp_path / "cut.bsh")


def test_a_bsh_of_another_model() -> None:
    with pytest.raises(UserError, match="gain is missing"):
        join_base_shapes(family(), BaseShapes({"embedding": [None, 16], "qkv": [40, 16]}, {}, {}), "x.bsh")
    with pytest.raises(UserError, match="has 1 dimensions"):
        join_base_shapes({"w": weight(2, 2)}, BaseShapes({"w": [2]}, {}, {}), "x.bsh")
