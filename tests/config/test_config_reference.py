"""Every config key is described, and what is made from the descriptions is what the schema gives."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from mup_megatron import cli
from mup_megatron.config import Config, load_config, parse_yaml, reference
from mup_megatron.config.section import Positive, Section
from tests.config.test_configs import CONFIGS

KEYS = {key.path: key for key in reference.described()}


def undescribed(keys: dict[str, reference.Key]) -> list[str]:
    """What a description lacks, per key."""
    return [
        f"{path}: {lacks}"
        for path, key in keys.items()
        for lacks, is_lacking in (
            ("a description", not key.text),
            ("Unit: ...", key.is_number and not key.unit),
            ("If unset: ...", key.default == "null" and "If unset: " not in key.text),
        )
        if is_lacking
    ]


def test_every_key_is_described() -> None:
    assert len(KEYS) > 150
    assert not undescribed(KEYS)


def test_a_key_without_description_is_seen() -> None:
    class Bare(Section):
        steps: Positive
        other: Positive | None = None
        """Something. Unit: steps."""

    found = {key.path: key for key in reference.described(Bare)}
    assert undescribed(found) == ["steps: a description", "steps: Unit: ...", "other: If unset: ..."]


def test_keys_are_the_schemas() -> None:
    """Counted by pydantic's own dump of a config, not by the walk that makes the reference."""

    def paths(data: dict[str, Any], prefix: str = "") -> Iterator[str]:
        for name, value in data.items():
            yield prefix + name
            if isinstance(value, dict) and prefix + name != "tuning.search":
                yield from paths(value, f"{prefix}{name}.")

    dumped = set(paths(load_config(CONFIGS[0]).model_dump()))
    assert {path for path in KEYS if ".NAME." not in path} == dumped
    assert {path for path in KEYS if path.startswith("hparams.per_tensor.")} == {
        f"hparams.per_tensor.NAME.{factor}" for factor in ("lr", "weight_decay", "init")
    }
    assert {path for path in KEYS if path.startswith("tuning.search.")} == {
        f"tuning.search.NAME.{kind}" for kind in ("log_uniform", "uniform", "choice")
    }


@pytest.mark.parametrize(
    ("path", "values", "default", "unit"),
    [
        ("training.lr_warmup_steps", "whole number >= 0", "0", "optimizer steps"),
        (
            "model.normalization",
            "LayerNorm, RMSNorm",
            "gpt3: LayerNorm, llama: RMSNorm, t5: LayerNorm, bert: LayerNorm",
            "",
        ),
        ("parallel.tensor_model_parallel_size", "whole number > 0 or auto", "auto", "ranks"),
        ("optimizer.betas", "list of number >= 0, < 1", "[0.9, 0.95]", "a factor"),
        ("run.dir", "text", "required", ""),
    ],
)
def test_keys_say(path: str, values: str, default: str, unit: str) -> None:
    assert KEYS[path][1:4] == (values, default, unit)


def test_a_default_that_one_architecture_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have the schema's; the page showed that one alone."""
    monkeypatch.setitem(reference.PRESETS, "qwen3", {**reference.PRESETS["llama"], "qk_layernorm": True})
    keys = {key.path: key.default for key in reference.described()}
    assert keys["model.qk_layernorm"] == "gpt3: false, llama: false, t5: false, bert: false, qwen3: true"
    assert keys["model.add_qkv_bias"] == "false"


def test_the_page_is_made_from_the_schema(repository: Path) -> None:
    page = (repository / "docs" / "reports" / "config.md").read_text()
    assert page == reference.markdown(), "run python -m mup_megatron.config.reference"
    assert "| `hparams.lr` | number > 0 | `required` |" in page


def test_the_json_schema_is_made_from_the_schema(repository: Path) -> None:
    shipped = json.loads((repository / "configs" / reference.SCHEMA_FILE).read_text())
    assert shipped == reference.json_schema(), "run python -m mup_megatron.config.reference"


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["config", "training.lr_warmup_steps"]) == 0
    out = capsys.readouterr().out
    assert "whole number >= 0; default 0; unit: optimizer steps" in out
    assert "rises linearly from 0 to its peak" in out
    assert cli.run(["config", "optimizer"]) == 0
    assert capsys.readouterr().out.count("optimizer.") == 9
    assert cli.run(["config", "lr"]) == 0
    assert capsys.readouterr().out.startswith("hparams.lr\n")
    assert cli.run(["config", "tuning.search.lr.choice"]) == 0
    assert "grid sampler" in capsys.readouterr().out
    assert cli.run(["config"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 2 * len(KEYS)


def test_command_for_editors(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["config", "--json-schema"]) == 0
    assert json.loads(capsys.readouterr().out) == reference.json_schema()
    assert cli.run(["config", "lr", "--json-schema"]) == 2
    assert "--json-schema: expected no key beside it, found lr" in capsys.readouterr().err


def test_keys_to_start_with(capsys: pytest.CaptureFixture[str]) -> None:
    """Ten of them, each on a line with its default and what it says."""
    assert cli.run(["config", "--start"]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["model.architecture", "required"],
        ["model.num_layers", "required"],
        ["model.hidden_size", "required"],
        ["base.hidden_size", "null"],
        ["training.global_batch_size", "required"],
        ["training.seq_length", "required"],
        ["training.train_steps", "required"],
        ["data.files", "[]"],
        ["data.tokenizer.vocab_size", "null"],
        ["tuning.trials", "16"],
    ]
    assert lines[2].rstrip().endswith("  width of the target")
    assert cli.run(["config", "lr", "--start"]) == 2
    assert "--start: expected no key beside it, found lr" in capsys.readouterr().err


def test_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["config", "training.warmup_steps"]) == 2
    assert (
        "'training.warmup_steps': no such config key; did you mean training.lr_warmup_steps?" in capsys.readouterr().err
    )
    assert cli.run(["config", "model.lr"]) == 2
    assert "did you mean hparams.lr?" in capsys.readouterr().err


class Validator:
    """The part of JSON Schema that pydantic writes, checked by hand: an oracle beside the loader."""

    ANNOTATIONS: ClassVar = {"title", "description", "default", "$defs", "$schema"}
    TYPES: ClassVar[dict[str, Any]] = {
        "object": dict,
        "array": list,
        "string": str,
        "boolean": bool,
        "null": type(None),
    }

    def __init__(self, schema: dict[str, Any]) -> None:
        self.root = schema

    def problems(self, value: Any, schema: dict[str, Any] | None = None, path: str = "") -> list[str]:
        schema = self.root if schema is None else schema
        found: list[str] = []
        for word, said in schema.items():
            if word not in self.ANNOTATIONS:
                found += getattr(self, "_" + word.removeprefix("$"))(value, said, schema, path)
        return found

    def _ref(self, value: Any, said: str, _: Any, path: str) -> list[str]:
        return self.problems(value, self.root["$defs"][said.removeprefix("#/$defs/")], path)

    def _anyOf(self, value: Any, said: list[Any], _: Any, path: str) -> list[str]:
        return [] if any(not self.problems(value, kind, path) for kind in said) else [f"{path}: none of anyOf"]

    def _type(self, value: Any, said: str, _: Any, path: str) -> list[str]:
        numbers = {"integer": int, "number": int | float}
        if said in numbers:
            right = isinstance(value, numbers[said]) and not isinstance(value, bool)
        else:
            right = isinstance(value, self.TYPES[said])
        return [] if right else [f"{path}: no {said}"]

    def _properties(self, value: Any, said: dict[str, Any], _: Any, path: str) -> list[str]:
        inner = value if isinstance(value, dict) else {}
        return [
            each for name in said.keys() & inner for each in self.problems(inner[name], said[name], f"{path}.{name}")
        ]

    def _additionalProperties(self, value: Any, said: Any, schema: Any, path: str) -> list[str]:
        others = value.keys() - schema.get("properties", {}) if isinstance(value, dict) else ()
        if said is False:
            return [f"{path}.{name}: unknown" for name in others]
        return [each for name in others for each in self.problems(value[name], said, f"{path}.{name}")]

    def _required(self, value: Any, said: list[str], _: Any, path: str) -> list[str]:
        return [f"{path}.{name}: missing" for name in said if isinstance(value, dict) and name not in value]

    def _items(self, value: Any, said: Any, _: Any, path: str) -> list[str]:
        return [each for item in (value if isinstance(value, list) else ()) for each in self.problems(item, said, path)]

    def _holds(self, value: Any, right: bool, path: str, what: str) -> list[str]:
        return [] if right else [f"{path}: {value!r} is not {what}"]

    def _enum(self, value: Any, said: list[Any], _: Any, path: str) -> list[str]:
        return self._holds(value, value in said, path, f"in {said}")

    def _const(self, value: Any, said: Any, _: Any, path: str) -> list[str]:
        return self._holds(value, value == said, path, f"{said}")

    def _minimum(self, value: Any, said: float, _: Any, path: str) -> list[str]:
        return self._holds(value, not isinstance(value, int | float) or value >= said, path, f">= {said}")

    def _maximum(self, value: Any, said: float, _: Any, path: str) -> list[str]:
        return self._holds(value, not isinstance(value, int | float) or value <= said, path, f"<= {said}")

    def _exclusiveMinimum(self, value: Any, said: float, _: Any, path: str) -> list[str]:
        return self._holds(value, not isinstance(value, int | float) or value > said, path, f"> {said}")

    def _exclusiveMaximum(self, value: Any, said: float, _: Any, path: str) -> list[str]:
        return self._holds(value, not isinstance(value, int | float) or value < said, path, f"< {said}")

    def _minItems(self, value: Any, said: int, _: Any, path: str) -> list[str]:
        return self._holds(value, not isinstance(value, list) or len(value) >= said, path, f"of {said} items")

    def _maxItems(self, value: Any, said: int, _: Any, path: str) -> list[str]:
        return self._holds(value, not isinstance(value, list) or len(value) <= said, path, f"of {said} items")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_shipped_configs_are_valid(repository: Path, path: Path) -> None:
    """Against the shipped JSON schema, which the first line of each names for editors."""
    first = path.read_text().splitlines()[0]
    named = os.path.relpath(repository / "configs" / reference.SCHEMA_FILE, path.parent)
    assert first == f"# yaml-language-server: $schema={named}"
    schema = json.loads((path.parent / named).read_text())
    assert not Validator(schema).problems(parse_yaml(path.read_text(), str(path)))


@pytest.mark.parametrize(
    ("section", "key", "value", "problem"),
    [
        ("model", "hiden_size", 64, ".model.hiden_size: unknown"),
        ("hparams", "lr", -1.0, ".hparams.lr: -1.0 is not > 0"),
        ("training", "train_steps", "many", ".training.train_steps: no integer"),
        ("optimizer", "betas", [0.9], ".optimizer.betas: [0.9] is not of 2 items"),
        ("parallel", "zero_stage", 4, ".parallel.zero_stage: 4 is not <= 3"),
        ("parallel", "engine", "horovod", ".parallel.engine: 'horovod' is not in ['deepspeed', 'megatron']"),
    ],
)
def test_the_json_schema_refuses(section: str, key: str, value: Any, problem: str) -> None:
    data = parse_yaml(CONFIGS[0].read_text(), "config")
    data[section] = {**data.get(section, {}), key: value}
    assert Validator(reference.json_schema()).problems(data) == [problem]


def test_the_json_schema_knows_what_is_required() -> None:
    missing = Validator(reference.json_schema()).problems({"model": {"architecture": "llama"}})
    assert ".run: missing" in missing
    assert ".model.hidden_size: missing" in missing
    assert not [problem for problem in missing if "normalization" in problem]  # the architecture tells it
    assert Config.model_fields["run"].is_required()


def test_what_is_left_at_its_default(repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All that neither the file nor the command line gives, and nothing else."""
    path = repository / "configs" / "demo.yaml"
    given = parse_yaml(path.read_text(), "demo")
    words = ["explain", str(path), "--defaults", "--json"]
    assert cli.run(words) == 0
    left = json.loads(capsys.readouterr().out)
    assert not [key for section, keys in given.items() for key in keys or () if f"{section}.{key}" in left]
    assert left["training.lr_warmup_init"] == 0.0
    assert cli.run([*words, "training.lr_warmup_init=1e-6"]) == 0
    assert left.keys() - json.loads(capsys.readouterr().out).keys() == {"training.lr_warmup_init"}
    assert cli.run(words[:-1]) == 0
    assert "training.lr_warmup_init: 0.0\n" in capsys.readouterr().out
    assert cli.run(["explain", str(path)]) == 0
    said = " ".join(capsys.readouterr().out.split("by default: ")[1].split())
    assert "training.clip_norm global, " in said
    assert "training.lr_warmup_steps" not in said
    shown = said.split("; ")[0].count(", ") + 1
    assert "none" not in said
    assert said.endswith(f"; {len(left) - shown} more with --defaults")
    whole = tmp_path / "whole.yaml"
    whole.write_text(load_config(path).model_dump_json())
    assert cli.run(["explain", str(whole)]) == 0
    assert "by default: nothing that trains the model; 0 more with --defaults\n" in capsys.readouterr().out
