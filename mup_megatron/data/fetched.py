"""Corpora that are fetched into the data folder, where a config asks for them. Public name: `FETCHED`."""

from __future__ import annotations

from mup_megatron.data.debian import Fetched
from mup_megatron.data.english import ENGLISH
from mup_megatron.data.libreoffice_help import HELP

FETCHED: dict[str | None, Fetched] = {"english": ENGLISH, "libreoffice-help": HELP}
"""By `data.corpus`."""
