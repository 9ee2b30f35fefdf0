"""The user's DeepSpeed JSON under this project's config: ours rules, contradictions are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from mup_megatron.config import load_config
from mup_megatron.engines.setup.deepspeed import deepspeed_config
from mup_megatron.parallel.layout import resolve_layout
from mup_megatron.util.errors import ConfigError, UserError
from tests.helpers.configs import MIXED, make


def merged(tmp_path: Path, content: Any, **overrides: Any) -> dict[str, Any]:
    path = tmp_path / "ds.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    config = make(MIXED, "gpt3", parallel__deepspeed_config=str(path), **overrides)
    return deepspeed_config(config, resolve_layout(config, 2))


def test_ours_fills_what_the_json_leaves_open(tmp_path: Path) -> None:
    result = merged(
        tmp_path, {"zero_optimization": {"overlap_comm": True, "stage": "auto"}, "wall_clock_breakdown": True}
    )
    assert result["train_batch_size"] == 8
    assert result["train_micro_batch_size_per_gpu"] == 4
    assert result["gradient_accumulation_steps"] == 2
    assert result["gradient_clipping"] == 1.0
    assert result["zero_optimization"] == {"overlap_comm": True, "stage": 1}
    assert result["bf16"] == {"enabled": False}
    assert result["wall_clock_breakdown"] is True


def test_agreement_is_fine(tmp_path: Path) -> None:
    assert merged(tmp_path, {"train_batch_size": 8, "zero_optimization": {"stage": 1}})["train_batch_size"] == 8


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"train_batch_size": 16}, "train_batch_size: 16 contradicts training.global_batch_size, which makes it 8"),
        ({"train_micro_batch_size_per_gpu": 2}, "contradicts training.micro_batch_size, which makes it 4"),
        ({"gradient_accumulation_steps": 1}, "which makes it 2"),
        ({"gradient_clipping": 0.5}, "contradicts training.clip_grad"),
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage: 3 contradicts parallel.zero_stage"),
        ({"bf16": {"enabled": True}}, "contradicts training.precision"),
        ({"fp16": {"enabled": True}}, "fp16's loss scaling is not supported"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler: DeepSpeed's schedulers set one rate for all groups"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            "zero_optimization.offload_optimizer: contradicts parallel.offload_optimizer",
        ),
        ({"optimizer": {"type": "AdamW"}}, "optimizer: DeepSpeed would build its own groups"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_contradictions_are_named(tmp_path: Path, content: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        merged(tmp_path, content)
    assert sentence in str(error.value)
    assert "ds.json: " in str(error.value)


@pytest.mark.parametrize("content", ["{", "[1]", '{"zero_optimization": 3}', '{"bf16": true}'])
def test_files_that_are_no_deepspeed_config(tmp_path: Path, content: str) -> None:
    with pytest.raises(UserError, match=r"ds\.json: "):
        merged(tmp_path, content)


def test_missing_file(tmp_path: Path) -> None:
    """A relative path is said with every folder that it was looked for in."""
    (tmp_path / "configs").mkdir()
    path = tmp_path / "configs" / "run.yaml"
    path.write_text(yaml.safe_dump(make(MIXED, "gpt3", parallel__deepspeed_config="none.json").model_dump()))
    config = load_config(path)
    with pytest.raises(ConfigError) as error:
        deepspeed_config(config, resolve_layout(config, 1))
    problem = f"no such file: none.json in {Path.cwd()}, {tmp_path / 'configs'}, {tmp_path}"
    assert str(error.value) == f"{path}: parallel.deepspeed_config: {problem}"


def test_offload(tmp_path: Path) -> None:
    assert merged(tmp_path, {}, parallel__offload_optimizer=True)["zero_optimization"]["offload_optimizer"] == {
        "device": "cpu"
    }
