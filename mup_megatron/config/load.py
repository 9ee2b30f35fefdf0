"""From YAML text and `key.path=value` to a checked Config, with one clear sentence for whatever is wrong."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from mup_megatron.config.checks import check
from mup_megatron.config.per_tensor import PerTensor
from mup_megatron.config.schema import PRESETS, Config
from mup_megatron.config.study import Range
from mup_megatron.config.training import FORMS
from mup_megatron.util.errors import ConfigError, UserError, shown
from mup_megatron.util.files import parse_yaml, read_text

_PART = r'(?:[\w*?][\w*?-]*|"[^"]+")'
"""Of a dotted key; what has dots of its own may stand in quotes: hparams.per_tensor."*.mlp.*".lr."""

_NAMED: dict[str, type[BaseModel]] = {"hparams.per_tensor": PerTensor, "tuning.search": Range}
"""Keys whose own keys are names that may have dots, and the section that each name opens."""

_MOST_BYTES = 1 << 22
"""Of a config: PyYAML reads some hundred thousand bytes a second where it was built without libyaml."""


def parse_overrides(arguments: list[str]) -> dict[str, Any]:
    """`["hparams.lr=1e-3"]` as `{"hparams.lr": 0.001}`; values are read as YAML, names with dots get quotes.

    Raises:
        UserError: an argument is not of the form key.path=value.
    """
    overrides = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or not re.fullmatch(rf"{_PART}(\.{_PART})*", key):
            raise UserError(f"{shown(argument)}: expected key.path=value, for example hparams.lr=3e-3")
        read = parse_yaml(value, key)
        overrides[_with_quotes(key, read)] = read
    return overrides


def _with_quotes(key: str, value: Any) -> str:
    """A dotted key as `per_tensor.config_key` writes it: a name that has dots, where names are free, in quotes.

    Without quotes the last part is a key of the name's section, and all before it the name; where `value` is a mapping
    and the section has no such key, all is the name.
    """
    mapping, rest = ".".join(_split(key)[:2]), _split(key)[2:]
    if mapping not in _NAMED or not rest:
        return key
    if not any(part.startswith('"') for part in rest) and len(rest) > 1:
        is_key = rest[-1] in _NAMED[mapping].model_fields or not isinstance(value, dict)
        rest = [".".join(rest[:-1]), rest[-1]] if is_key else [".".join(rest)]
    names = (part.strip('"') for part in rest)
    return ".".join([mapping, *(f'"{name}"' if "." in name else name for name in names)])


def _split(key: str) -> list[str]:
    """The parts of a dotted key, with their quotes."""
    return re.findall(r'"[^"]*"|[^.]+', key)


def load_config(path: str | Path, overrides: dict[str, Any] | None = None) -> Config:
    """Reads, overrides, validates.

    Args:
        path: a YAML file.
        overrides: dotted keys and values that replace what the file says.

    Raises:
        UserError: the file cannot be read or is not YAML.
        ConfigError: a key is unknown, missing, of the wrong type, or contradicts another.
    """
    source = str(path)
    try:
        text = read_text(path, most=_MOST_BYTES)
    except OSError as error:
        raise UserError(f"{source}: cannot read the config: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UserError(f"{source}: not a text file; expected a YAML config") from None
    data = parse_yaml(text, source)
    if not isinstance(data, dict):
        raise UserError(f"{source}: expected sections such as run:, model: and training:, found {shown(data)}")
    for key, value in (overrides or {}).items():
        override(data, key, value, source)
    config = parse_config(data, source)
    config._overrides = frozenset(overrides or ())
    return config


def parse_config(data: dict[str, Any], source: str | None = None) -> Config:
    """Plain data as a checked Config. Raises ConfigError."""
    model = data.get("model")
    if isinstance(model, dict):
        if "use_mup" in model:
            raise ConfigError(
                "model.use_mup",
                "megatron-core's native MuP cannot be combined with this project's; remove the key "
                "(parametrization.name chooses the parametrization)",
                source,
            )
        preset = PRESETS.get(model.get("architecture", ""), {}) if isinstance(model.get("architecture"), str) else {}
        data = {**data, "model": {**preset, **model}}
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        raise _first_problem(error, source) from None
    config._source = source
    check(config)
    return config


def derive(config: Config, keys: Mapping[str, Any]) -> Config:
    """A config with dotted keys replaced, checked as a whole: the one way to make a config from another.

    Args:
        config: stays as it is.
        keys: such as `{"run.seed": 7}`; a section's name replaces the whole section.

    Raises:
        ConfigError: the result is no config; names the key.
    """
    data = config.model_dump()
    for key, value in keys.items():
        override(data, key, value, config.source)
    derived = parse_config(data, config.source)
    derived._overrides = config._overrides
    return derived


def override(data: dict[str, Any], key: str, value: Any, source: str | None) -> None:
    """Sets a dotted key in plain data; optimizer.betas.1 is a list's second. Raises ConfigError where a path leads
    through a value."""
    *sections, last = [part.strip('"') for part in _split(key)]
    for depth, name in enumerate(sections):
        inner, path = data.get(name), sections[: depth + 1]
        if inner is None:
            listed = _default(path) if last.isdigit() else None
            inner = data[name] = list(listed) if isinstance(listed, list) else {}
        if isinstance(inner, list) and depth == len(sections) - 1 and last.isdigit():
            if int(last) >= len(inner):
                raise ConfigError(".".join(path), f"has {len(inner)} entries, so {key} cannot be set", source)
            data[name] = [value if place == int(last) else each for place, each in enumerate(inner)]
            return
        if not isinstance(inner, dict):
            raise ConfigError(".".join(path), f"has no keys of its own, so {key} cannot be set", source)
        data = inner
    data[last] = value


def _default(path: list[str]) -> Any:
    """What the schema has at a path where nothing is given; None where it has no such key."""
    kind: Any = Config
    for name in path[:-1]:
        known = getattr(kind, "model_fields", {}).get(name)
        kind = known.annotation if known else None
    known = getattr(kind, "model_fields", {}).get(path[-1])
    return known.default if known else None


_HINTS = {"data.corpus": "; text of your own goes under data.files, such as data: {files: [my.txt]} without corpus"}

_NEVER_SHOWN = "tuning.storage"
"""May hold a password in a form that no mask knows."""


def _first_problem(error: ValidationError, source: str | None) -> ConfigError:
    """The first problem that pydantic found, in one sentence."""
    problems = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    problem = problems[0]
    path = [str(part) for part in problem["loc"] if not _is_union_branch(part)]
    key, kind, given = ".".join(path), problem["type"], problem.get("input")
    if kind == "extra_forbidden":
        path = [*(str(part) for part in problem["loc"][:-1] if not _is_union_branch(part)), str(problem["loc"][-1])]
        return ConfigError(".".join(path), f"unknown key; {_nearest(path)}", source)
    if kind == "missing":
        return ConfigError(key, "missing", source)
    same_key = [other for other in problems if [str(p) for p in other["loc"] if not _is_union_branch(p)] == path]
    expected = " or ".join(dict.fromkeys(_expected(other) for other in same_key))
    found = "" if key.startswith(_NEVER_SHOWN) else f", found {shown(given)}"
    return ConfigError(key, f"expected {expected}{found}{_HINTS.get(key, '')}", source)


def _is_union_branch(part: str | int) -> bool:
    """Whether pydantic put this part into a location to name a branch of a union (`int`, `literal['auto']`)."""
    return isinstance(part, str) and re.fullmatch(r"int|float|str|bool|constrained-\w+|.*[\[(].*", part) is not None


def _expected(problem: Any) -> str:
    kind, context = problem["type"], problem.get("ctx", {})
    words = {
        "int_type": "a whole number",
        "int_from_float": "a whole number",
        "float_type": "a number",
        "bool_type": "true or false",
        "string_type": "text",
        "list_type": "a list",
        "dict_type": "keys and values",
        "model_type": "keys and values",
        "model_attributes_type": "keys and values",
        "finite_number": "a finite number",
    }
    bounds = {"greater_than": ("gt", ">"), "greater_than_equal": ("ge", ">=")}
    bounds |= {"less_than": ("lt", "<"), "less_than_equal": ("le", "<=")}
    if kind in words:
        return words[kind]
    if kind == "literal_error":
        return f"one of {context['expected']}" if " or " in context["expected"] else context["expected"]
    if kind == "string_pattern_mismatch":
        return FORMS.get(context["pattern"], problem["msg"])
    if kind in bounds:
        name, sign = bounds[kind]
        return f"a number {sign} {context[name]}"
    if kind in {"too_short", "too_long"}:
        return f"{context.get('min_length', context.get('max_length'))} values"
    return problem["msg"]


def _fields(section: type[BaseModel]) -> dict[str, type[BaseModel] | None]:
    """Keys of a section, with the section that each opens (None for a plain value)."""
    result: dict[str, type[BaseModel] | None] = {}
    for name, field in section.model_fields.items():
        kind = field.annotation
        result[name] = kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None
    return result


def _nearest(path: list[str]) -> str:
    """What an unknown key may have been meant to be."""
    section: type[BaseModel] = Config
    for name in path[:-1]:
        section = _fields(section).get(name) or section
    known = list(_fields(section))
    close = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.6)
    if close:
        return f"did you mean {'.'.join([*path[:-1], close[0]])}?"
    for name, inner in _fields(Config).items():
        if inner is not None and path[-1] in _fields(inner):
            return f"did you mean {name}.{path[-1]}?"
    return f"known here: {', '.join(known)}"
