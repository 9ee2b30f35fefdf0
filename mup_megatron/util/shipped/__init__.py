"""Folders that a wheel holds here and a checkout holds at its top: configs and launch.

Public name: `shipped_folder`. setup.py puts the folders into a wheel; no file is there twice, and no link is needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal


def shipped_folder(name: Literal["configs", "launch"]) -> Path:
    """The folder: this one's where the package was installed from a wheel, else the checkout's."""
    here = Path(__file__).resolve().parent
    inside = here / name
    return inside if inside.is_dir() else here.parents[2] / name
