"""What every section of a config is made of: strict types, numbers with bounds, a description beside every key.

The text under a key is its description (pydantic's attribute docstrings). `mup-megatron config`, docs/reports/config.md
and the JSON schema show it. The description of a number ends with "Unit: ...", that of a key whose default is null says
what "If unset: ..." holds; tests/config/test_config_reference.py fails where either is missing.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

# Bounds are far beyond what anybody trains; past them numbers overflow, and tables fill the memory.
Positive = Annotated[int, Field(gt=0, le=2**53)]
NonNegative = Annotated[int, Field(ge=0, le=2**53)]
PositiveFloat = Annotated[float, Field(gt=0, le=1e30, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
WIDEST = 2**24
Width = Annotated[int, Field(gt=0, le=WIDEST)]
"""Of a dimension of a tensor."""
Count = Annotated[int, Field(gt=0, le=10_000)]
"""Of layers and experts: what is gone through one by one."""
Ranks = Annotated[int, Field(gt=0, le=1_000_000)]
"""Also trials and nodes."""
Repetitions = Annotated[int, Field(ge=0, le=1_000_000)]
Seed = Annotated[int, Field(ge=0, le=2**31 - 1)]
"""NumPy's end at 2**32; repetitions count up from the run's."""
Size = Ranks | Literal["auto"]
OFF = BeforeValidator(lambda value: "off" if value is False else value)
"""Beside a Literal with `off`, which YAML reads as false where it has no quotes."""


class Section(BaseModel):
    """A part of the config: strict types, no unknown keys, immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)
