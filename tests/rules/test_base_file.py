"""A file of base shapes as the base: what it does not tell, what may stand beside it, what contradicts it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from mup_megatron.config import Config
from mup_megatron.model.build import parametrize
from mup_megatron.parallel import upstream
from mup_megatron.rules.base_file import beside_shapes
from mup_megatron.rules.base_shapes import load_base_shapes, save_base_shapes
from mup_megatron.tuning.family import differences, digested
from mup_megatron.util.errors import ConfigError, UserError
from tests.helpers.configs import HEAD_SIZE, MIXED, MLA, VOCABULARY, make

QKV = "decoder.layers.0.self_attention.linear_qkv.weight"


def microsofts(growth: dict[str, Any], path: Path) -> str:
    """The file as microsoft/mup writes it: shapes and nothing else."""
    shapes = parametrize(make(growth), VOCABULARY).shapes
    path.write_text(yaml.safe_dump({name: [dim.base_dim for dim in shape.infshape] for name, shape in shapes.items()}))
    return str(path)


def based_on(growth: dict[str, Any], file: str, **keys: Any) -> Config:
    return make({**growth, "base": {"file": file}}, **keys)


def test_a_growing_head_size_that_the_file_does_not_tell_is_refused(tmp_path: Path) -> None:
    """Four heads in both, head size 16 to 24: without it the scale would be 1/sqrt(24), not sqrt(16)/24."""
    file = microsofts(HEAD_SIZE, tmp_path / "base.bsh")
    with pytest.raises(UserError) as error:
        parametrize(based_on(HEAD_SIZE, file), VOCABULARY)
    assert str(error.value) == (
        f"{file}: does not tell the base's head size, and the query rows of {QKV} grow (64 to 96), by more heads or by "
        "larger ones; expected base.kv_channels beside base.file"
    )
    named = parametrize(based_on(HEAD_SIZE, file, base__kv_channels=16), VOCABULARY)
    assert named.forward.softmax_scale == pytest.approx(math.sqrt(16) / 24)


def test_a_head_size_that_does_not_divide_the_rows_is_refused(tmp_path: Path) -> None:
    file = microsofts(HEAD_SIZE, tmp_path / "base.bsh")
    with pytest.raises(UserError, match=r"64 query rows of .*linear_qkv.weight are no number of heads of size 24"):
        parametrize(based_on(HEAD_SIZE, file, base__kv_channels=24), VOCABULARY)


def test_where_no_query_row_grows_nothing_need_be_told(tmp_path: Path) -> None:
    """Only the FFN grows, 64 to 160: the head size is the target's own 8."""
    growth = {"model": MIXED["model"], "base": {"ffn_hidden_size": 64}}
    file = microsofts(growth, tmp_path / "base.bsh")
    assert parametrize(based_on(growth, file), VOCABULARY).forward.softmax_scale == 1 / math.sqrt(8)


def test_latent_attention(tmp_path: Path) -> None:
    """Query heads of 8 + 4 in the base and 12 + 8 in the target; the file of this project tells it."""
    upstream.prepare_process()
    parametrization = parametrize(make(MLA, "llama"), VOCABULARY)
    file = tmp_path / "base.bsh"
    save_base_shapes(file, parametrization.shapes, {})
    model = {**MLA, "base": {"file": str(file)}}
    with pytest.raises(UserError, match=r"expected base.qk_head_dim beside base.file"):
        parametrize(make(model, "llama"), VOCABULARY)
    named = make(model, "llama", base__qk_head_dim=8, base__qk_pos_emb_head_dim=4)
    assert parametrize(named, VOCABULARY).forward.softmax_scale == pytest.approx(math.sqrt(12) / 20)
    save_base_shapes(file, parametrization.shapes, beside_shapes(parametrization))
    assert parametrize(make(model, "llama"), VOCABULARY).forward.softmax_scale == pytest.approx(math.sqrt(12) / 20)


def test_sizes_beside_the_file_are_refused() -> None:
    with pytest.raises(ConfigError) as error:
        based_on(MIXED, "base.bsh", base__hidden_size=64, base__num_query_groups=1, base__kv_channels=8)
    assert str(error.value) == (
        "test: base.hidden_size: base.file tells the base size of every tensor; expected one of the two (remove "
        "hidden_size, num_query_groups, or file)"
    )
    with pytest.raises(ConfigError, match=r"base.v_head_dim: base.file tells the base size of every tensor"):
        make({**MLA, "base": {"file": "base.bsh", "qk_head_dim": 8, "v_head_dim": 4}}, "llama")


def test_what_contradicts_the_file_is_refused(tmp_path: Path) -> None:
    """A base of one layer and head size 16."""
    growth = {**HEAD_SIZE, "base": {**HEAD_SIZE["base"], "num_layers": 1}}
    depth: dict[str, Any] = {"parametrization__depth": "completep"}
    parametrization = parametrize(make(growth, **depth), VOCABULARY)
    file = tmp_path / "base.bsh"
    save_base_shapes(file, parametrization.shapes, beside_shapes(parametrization))
    assert load_base_shapes(file).extra == {"kv_channels": 16, "num_layers": 1}
    with pytest.raises(UserError, match=r"was written for a head size of 16, and base.kv_channels makes it 8"):
        parametrize(based_on(growth, str(file), base__kv_channels=8, base__num_layers=1, **depth), VOCABULARY)
    with pytest.raises(UserError, match=r"was written for a base of 1 layers, and base.num_layers is 2; expected 1"):
        parametrize(based_on(growth, str(file), base__num_layers=2, **depth), VOCABULARY)
    with pytest.raises(UserError, match=r"was written for a base of 1 layers, and base.num_layers is missing"):
        parametrize(based_on(growth, str(file)), VOCABULARY)
    right = parametrize(based_on(growth, str(file), base__num_layers=1, **depth), VOCABULARY)
    assert right.forward.residual == 1 / 2  # two layers on a base of one
    assert right.tensors[QKV].eps_multiplier == parametrization.tensors[QKV].eps_multiplier


def test_the_family_is_the_files_content(tmp_path: Path) -> None:
    """Moved it is the same base; with another base size in it, another."""
    one, other = tmp_path / "one.bsh", tmp_path / "other.bsh"
    microsofts(HEAD_SIZE, one)
    other.write_bytes(one.read_bytes())
    families = [digested(based_on(HEAD_SIZE, str(path))) for path in (one, other)]
    assert families[0] == families[1]
    other.write_text(one.read_text().replace("48", "36"))
    changed = digested(based_on(HEAD_SIZE, str(other)))
    assert [line.partition(":")[0] for line in differences(families[0], changed, "", "")] == ["base.file"]
    with pytest.raises(UserError, match=r"none.bsh: cannot read base shapes: No such file"):
        digested(based_on(HEAD_SIZE, "none.bsh"))
