"""The source diffs of this folder, put into a Megatron-LM tree and taken out again: all of them or nothing.

`git apply` does it, which checks every hunk of every file before it writes one, inside repositories and outside.
Public names: `SourcePatch`, `source_patches`, `apply_tree`, `check_tree`, `revert_tree`, `State`.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from mup_megatron.util.errors import UserError

_FOLDER = Path(__file__).resolve().parent
_VERSION_FILE = Path("megatron", "core", "package_info.py")
_FIELDS = ("Symbol", "File", "Versions", "Why", "Lower rung", "Upstream", "Until")

State = Literal["applied", "not applied"]


@dataclass(frozen=True, kw_only=True)
class SourcePatch:
    """One diff, with what its head says.

    Args:
        path: the file.
        release: its folder's name.
        subject: the first line.
        head: the fields of its head, by name (Symbol, File, Versions, Why, Lower rung, Upstream, Until).
    """

    path: Path
    release: str
    subject: str
    head: dict[str, str]

    @property
    def versions(self) -> SpecifierSet:
        """Of megatron-core, as the tree's own package_info.py has it."""
        return SpecifierSet(self.head["Versions"].removeprefix("megatron-core "))


def source_patches() -> dict[str, list[SourcePatch]]:
    """Every diff by release, in the order of the release's series file."""
    folders = sorted(path.parent for path in _FOLDER.glob("*/series"))
    return {
        folder.name: [_read(folder / name) for name in (folder / "series").read_text().split()] for folder in folders
    }


def apply_tree(tree: Path) -> bool:
    """Applies the series of the tree's release; False if it was applied already.

    Args:
        tree: the folder that holds `megatron/`.

    Raises:
        UserError: no Megatron tree, one of a version without a series, or one that was changed where a hunk goes.
    """
    series = _series(tree)
    if _state(tree, series) == "applied":
        return False
    _git_apply(tree, series)
    return True


def revert_tree(tree: Path) -> bool:
    """Takes the series out again; False if it was not applied. Raises as `apply_tree`."""
    series = _series(tree)
    if _state(tree, series) == "not applied":
        return False
    _git_apply(tree, series, "--reverse")
    return True


def check_tree(tree: Path) -> tuple[str, State]:
    """The release whose series fits the tree, and whether it is applied. Raises as `apply_tree`."""
    series = _series(tree)
    return series[0].release, _state(tree, series)


def _read(path: Path) -> SourcePatch:
    subject, *lines = path.read_text(encoding="utf-8").partition("\n---\n")[0].splitlines()
    head = dict(re.split(r":\s+", line, maxsplit=1) for line in lines if line)
    if tuple(head) != _FIELDS:
        raise UserError(f"{path}: expected a head of {', '.join(_FIELDS)}")
    return SourcePatch(path=path, release=path.parent.name, subject=subject, head=head)


def _series(tree: Path) -> list[SourcePatch]:
    version, known = _version(tree), source_patches()
    for series in known.values():
        # Without what marks a candidate: tags of releases say 0.17.0rc0 of themselves, and hunks are checked anyway.
        if all(patch.versions.contains(version.base_version) for patch in series):
            return series
    releases = ", ".join(series[0].head["Versions"].partition(" ")[2] for series in known.values())
    raise UserError(f"{tree}: megatron-core {version}, for which there is no series of patches; expected {releases}")


def _version(tree: Path) -> Version:
    """megatron-core's version as the tree says it; its file is read, not run."""
    path = tree / _VERSION_FILE
    try:
        body = ast.parse(path.read_bytes()).body
        said = {
            node.targets[0].id: node.value.value
            for node in body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
        }
        return Version("{MAJOR}.{MINOR}.{PATCH}{PRE_RELEASE}".format_map(said))
    except OSError:
        raise UserError(f"{tree}: holds no {_VERSION_FILE}; expected the folder of a Megatron-LM checkout") from None
    except (SyntaxError, ValueError, KeyError, InvalidVersion, RecursionError):
        raise UserError(f"{path}: names no version; expected MAJOR, MINOR, PATCH and PRE_RELEASE") from None


def _state(tree: Path, series: list[SourcePatch]) -> State:
    """Whether the whole series is in the tree or could go there whole.

    Raises:
        UserError: neither; names the file and the line.
    """
    if _run(tree, series, "--check", "--reverse").returncode == 0:
        return "applied"
    found = _run(tree, series, "--check")
    if found.returncode == 0:
        return "not applied"
    raise _does_not_fit(tree, series, found.stderr)


def _git_apply(tree: Path, series: list[SourcePatch], *options: str) -> None:
    result = _run(tree, series, *options)
    if result.returncode:
        raise _does_not_fit(tree, series, result.stderr)


def _run(tree: Path, series: list[SourcePatch], *options: str) -> subprocess.CompletedProcess[str]:
    """`git apply` of the series as one patch, since git writes nothing of a patch that does not fit whole."""
    git = shutil.which("git")
    if git is None:
        raise UserError("git: not installed; `git apply` puts patches into a tree, and needs no repository")
    ordered = series[::-1] if "--reverse" in options else series
    text = "".join(patch.path.read_text(encoding="utf-8") for patch in ordered)
    root = tree.resolve()
    # No repository, the tree's own or one above it: its config and attributes may name programs (filters, hooks,
    # fsmonitor) that git would start, and git would leave out what it takes to be outside. None is needed.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    none = {
        "GIT_DIR": os.devnull,
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_ATTR_NOSYSTEM": "1",
    }
    environment = {**kept, **none, "LC_ALL": "C"}
    command = [git, "apply", "--whitespace=nowarn", *options, "-"]
    return subprocess.run(  # noqa: S603  (a list of our own words; no shell)
        command, input=text, cwd=root, env=environment, capture_output=True, text=True, check=False
    )


def _does_not_fit(tree: Path, series: list[SourcePatch], said: str) -> UserError:
    """The first hunk that git could not place, in words."""
    place = re.search(r"patch failed: (\S+?):(\d+)", said)
    if place is None:
        return UserError(f"{tree}: git apply: {' '.join(said.split()) or 'failed'}; nothing was changed")
    file, line = place[1], place[2]
    patch = next(patch for patch in series if patch.head["File"] == file)
    return UserError(
        f"{tree / file}: changed near line {line}, where {patch.release}/{patch.path.name} goes; nothing was changed; "
        "undo the change there, or put the patch's lines in by hand"
    )
