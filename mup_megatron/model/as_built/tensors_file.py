"""The file of `--mup-tensors`: what a user says of tensors that no entry of megatron-core's modules is about.

Public names: `read_tensors`, `OWN_KINDS`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError, model_validator

from mup_megatron.model.as_built.tensors import VECTORS, Entry
from mup_megatron.rules.shapes import FixedFanOut, Init
from mup_megatron.util.errors import UserError
from mup_megatron.util.files import parse_yaml

OwnKind = Literal[
    "matrix", "output_projection", "qkv", "gate_up", "embedding", "router", "gain", "bias", "vector", "standard"
]
OWN_KINDS: tuple[str, ...] = OwnKind.__args__  # type: ignore[attr-defined]
"""The kinds that a user may name. The readout is the model's `output_layer`, which carries a forward multiplier."""


class _Said(BaseModel):
    """One entry as it stands in the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    module: str | None = None
    parameter: str | None = None
    name: str | None = None
    kind: OwnKind
    fan_in: StrictInt | None = Field(None, ge=0)
    fan_out: StrictInt | None = Field(None, ge=0)
    init: Literal["weight", "output_projection", "embedding", "zeros", "ones", "own"] | None = None
    blocks: list[str] | None = Field(None, min_length=2)
    fixed_fan_out: FixedFanOut | None = None
    split: StrictInt | None = Field(None, ge=0)

    @model_validator(mode="after")
    def _names_a_tensor(self) -> _Said:
        if (self.name is None) == (self.module is None) or (self.module is None) != (self.parameter is None):
            raise ValueError("expected module and parameter, or name")
        if self.blocks and len(set(self.blocks)) < len(self.blocks):
            raise ValueError("blocks: expected different names")
        return self


def read_tensors(path: str, text: str) -> tuple[Entry, ...]:
    """The entries of a file, in its order.

    Args:
        path: of the file, for messages.
        text: what it holds: a YAML list of mappings.

    Raises:
        UserError: names the entry and the key.
    """
    data: Any = parse_yaml(text, path)
    if not isinstance(data, list) or not data or not all(isinstance(one, dict) for one in data):
        raise UserError(
            f"{path}: expected a list of entries such as - {{module: MyMLP, parameter: extra.weight, kind: matrix}}"
        )
    return tuple(_entry(f"{path}: entry {number}", one) for number, one in enumerate(data, 1))


def _entry(source: str, data: dict[Any, Any]) -> Entry:
    try:
        said = _Said.model_validate({str(key): value for key, value in data.items()})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        known = f"; known here: {', '.join(_Said.model_fields)}" if first["type"] == "extra_forbidden" else ""
        message = "unknown key" if known else first["msg"].removeprefix("Value error, ")
        raise UserError(f"{source}: {f'{where}: ' if where else ''}{message}{known}") from None
    fan_in, fan_out = (0, 1) if said.kind == "embedding" else (None if said.kind in VECTORS else 1, 0)
    fan_in = fan_in if said.fan_in is None else said.fan_in
    fan_out = fan_out if said.fan_out is None else said.fan_out
    if fan_in == fan_out:
        raise UserError(f"{source}: fan_in and fan_out are both {fan_in}; expected two dimensions")
    return Entry(
        module=said.module,
        parameter=said.parameter,
        name=said.name,
        kind=said.kind,
        source=source,
        fan_in=said.fan_in,
        fan_out=said.fan_out,
        init=None if said.init is None else Init(said.init),
        blocks=tuple(said.blocks or ()),
        fixed_fan_out=said.fixed_fan_out,
        split=said.split,
    )
