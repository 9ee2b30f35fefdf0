"""What the schema says of every key, for people and editors: `mup-megatron config`, docs/reports/config.md, a schema.

Public names: `Key`, `described`, `left_at_default`, `find`, `START`, `markdown`, `json_schema`, `schema_text`,
`write_files`. As a program it writes docs/reports/config.md and configs/mup-megatron.schema.json of a checkout anew.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mup_megatron.config.model import PRESETS, Growth, Model
from mup_megatron.config.schema import Config
from mup_megatron.config.training import FORMS
from mup_megatron.util.errors import UserError, shown

SCHEMA_FILE = "mup-megatron.schema.json"

START: dict[str, str] = {
    "model.architecture": "gpt3 or llama",
    "model.num_layers": "depth of the target, the model that you want in the end; the proxy is as deep",
    "model.hidden_size": "width of the target",
    "base.hidden_size": "width of the proxy, the model that is tuned; better 256 or more",
    "training.global_batch_size": "sequences per optimizer step",
    "training.seq_length": "tokens per sequence",
    "training.train_steps": "optimizer steps of the target",
    "data.files": "your own text; files, or folders of .txt, .md and .jsonl",
    "data.tokenizer.vocab_size": "pieces of the tokenizer that is trained on the text",
    "tuning.trials": "proxies that are trained to find the best hyperparameters; more are better",
}
"""Keys to think about before a first run, with what each says: `config --start` shows them, `new` comments them."""

_ANY_NAME = "NAME"
"""Stands in a path for a name that the user chooses: `tuning.search.NAME.choice`."""


class Key(NamedTuple):
    """A key of the config.

    Args:
        path: dotted.
        values: what it takes, in words.
        default: as YAML; in words where it depends on the architecture; "required" where there is none.
        unit: of its number; empty where it is no number.
        text: what it does, in one line, without the unit.
        section: the section that it opens; None for a plain value.
    """

    path: str
    values: str
    default: str
    unit: str
    text: str
    section: type[BaseModel] | None = None

    @property
    def is_number(self) -> bool:
        """Whether it takes a number, alone or in a list."""
        return "number" in self.values


def described(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[Key]:
    """Every key in the order of the schema, each section before its own keys.

    Args:
        section: where to begin.
        prefix: of the paths.
    """
    properties = section.model_json_schema()["properties"]
    for name, field in section.model_fields.items():
        inner, path = _section_of(field), f"{prefix}{name}"
        text, _, unit = " ".join((field.description or "").split()).partition(" Unit: ")
        values = ("keys and values by name" if _is_named(field) else "") if inner else _values(properties[name])
        yield Key(path, values, _default(section, name, field), unit.removesuffix("."), text, inner)
        if inner is not None:
            named = f".{_ANY_NAME}." if _is_named(field) else "."
            yield from described(inner, f"{path}{named}")


def left_at_default(config: Config) -> dict[str, Any]:
    """Every key that neither the file nor the command line gave, with its value as JSON has it, by dotted name.

    Sections that are not there have none, and neither have names that a config chooses (`hparams.per_tensor`).
    """
    return dict(_left(config, ""))


def _left(section: BaseModel, prefix: str) -> Iterator[tuple[str, Any]]:
    values = section.model_dump(mode="json")
    for name in type(section).model_fields:
        inner = getattr(section, name)
        if isinstance(inner, BaseModel):
            yield from _left(inner, f"{prefix}{name}.")
        elif name not in section.model_fields_set:
            yield f"{prefix}{name}", values[name]


def find(path: str) -> list[Key]:
    """A key, or a section with all its keys; every key of that name where a name alone is given.

    Raises:
        UserError: there is no such key; names the nearest.
    """
    known = {key.path: key for key in described()}
    parts = path.split(".")
    if parts[:2] in (["tuning", "search"], ["hparams", "per_tensor"]) and len(parts) > 2:
        parts[2] = _ANY_NAME
    path = ".".join(parts).removesuffix(f".{_ANY_NAME}")
    if path in known:
        return [key for key in known.values() if key.path == path or key.path.startswith(path + ".")]
    same_name = [other for other in known if other.split(".")[-1] == parts[-1]]
    if same_name and len(parts) == 1:
        return [known[other] for other in same_name]
    same_name = [other for other in same_name if _ANY_NAME not in other] or same_name
    close = same_name or difflib.get_close_matches(path, known, n=1, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else f"expected one of {', '.join(Config.model_fields)}"
    raise UserError(f"{shown(path)}: no such config key; {hint}")


def markdown() -> str:
    """docs/reports/config.md."""
    lines = [
        "# Every config key",
        "",
        "<!-- Made by `python -m mup_megatron.config.reference` from the descriptions in mup_megatron/config/. -->",
        "",
        "One YAML file describes a run. `KEY.PATH=VALUE` on a command line replaces a key of it. An unknown key is an",
        "error that names the nearest known one. `mup-megatron config KEY` shows a key or a section in the terminal;",
        '[the JSON schema](../../configs/mup-megatron.schema.json) lets editors complete and check configs. "required"',
        "stands where there is no default.",
        "",
    ]
    for name, field in Config.model_fields.items():
        section = _section_of(field)
        if section is None:
            continue
        lines += [f"## {name}", "", " ".join((section.__doc__ or "").split()), ""]
        if section is Growth:
            lines += ["Takes the keys of [base](#base) but `file`.", ""]
            continue
        lines += ["| key | values | default | unit | what it does |", "| --- | --- | --- | --- | --- |"]
        for key in described(section, f"{name}."):
            if key.section is None or key.values:
                cells = (f"`{key.path}`", key.values, f"`{key.default}`", key.unit, key.text)
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a config file, before the architecture's defaults are filled in."""
    schema = Config.model_json_schema()
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "mup-megatron config"}
    by_architecture = set.intersection(*(set(preset) for preset in PRESETS.values()))
    model = schema["$defs"][Model.__name__]
    model["required"] = [name for name in model["required"] if name not in by_architecture]
    return schema


def schema_text() -> str:
    """The JSON schema as the text of its file."""
    return json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"


def _section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The section that a key opens, also where users name several of its kind (tuning.search)."""
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _is_named(field: FieldInfo) -> bool:
    return _section_of(field) is not field.annotation


def _default(section: type[BaseModel], name: str, field: FieldInfo) -> str:
    if section is Model and any(name in preset for preset in PRESETS.values()):
        values = {architecture: preset.get(name, field.default) for architecture, preset in PRESETS.items()}
        return ", ".join(f"{architecture}: {_yaml(value)}" for architecture, value in values.items())
    if field.is_required():
        return "required"
    return _yaml(field.default)


def _yaml(value: Any) -> str:
    """A default as one would write it in YAML."""
    if isinstance(value, BaseModel):
        return "{}"
    return value if isinstance(value, str) else json.dumps(value)


def _values(schema: dict[str, Any]) -> str:
    """What a key takes, in words, from its part of the JSON schema."""
    if "anyOf" in schema:
        kinds = [_values(kind) for kind in schema["anyOf"] if kind.get("type") != "null"]
        return " or ".join(kinds)
    if "enum" in schema or "const" in schema:
        return ", ".join(str(value) for value in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type")
    if kind == "array":
        return f"list of {_values(schema['items'])}"
    if kind in ("integer", "number"):
        return ("whole number" if kind == "integer" else "number") + _bounds(schema)
    if "pattern" in schema:
        return FORMS.get(schema["pattern"], "text")
    return {"boolean": "true or false", "string": "text"}[str(kind)]


def _bounds(schema: dict[str, Any]) -> str:
    """Bounds that tell something: those that only keep numbers from overflowing are left out."""
    low, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    high, below = schema.get("maximum"), schema.get("exclusiveMaximum")
    words = [f"> {above:g}"] if above is not None else [f">= {low:g}"] if low is not None else []
    if high is not None and high <= 64:
        words.append(f"<= {high:g}")
    if below is not None:
        words.append(f"< {below:g}")
    return f" {', '.join(words)}" if words else ""


def write_files(root: Path) -> None:
    """Writes what is made from the schema into a checkout."""
    (root / "docs" / "reports" / "config.md").write_text(markdown(), encoding="utf-8")
    (root / "configs" / SCHEMA_FILE).write_text(schema_text(), encoding="utf-8")


if __name__ == "__main__":
    write_files(Path(__file__).resolve().parents[2])
