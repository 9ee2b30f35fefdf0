"""Diffs for upstream's own trees: on the real tree of the wheel, and on each release of a checkout (MEGATRON_LM)."""

from __future__ import annotations

import ast
import filecmp
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from mup_megatron import cli
from mup_megatron.patches import trees
from mup_megatron.util.errors import UserError
from tests.helpers.installed import HAS_TRAINING, NO_TRAINING

FILES = (
    "training/arguments.py",
    "training/training.py",
    "training/checkpointing.py",
    "core/models/gpt/gpt_model.py",
    "core/package_info.py",
)
SERIES = trees.source_patches()
# Of each release the first and the last tag that is supported; of 0.20, which has none, the commit of main.
TAGS = {
    "megatron-lm-core_v0.16": ("core_v0.16.1",),
    "megatron-lm-core_v0.17": ("core_v0.17.0", "core_v0.17.1"),
    "megatron-lm-core_v0.18": ("core_v0.18.0", "core_v0.18.2"),
    "megatron-lm-core_v0.19": ("core_v0.19.0",),
    "megatron-lm-core_v0.20": ("d98e8a64ddf34856e74b24714e3bedb2f5a39553",),
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What the diffs touch, of the installed wheel."""
    if not HAS_TRAINING:
        pytest.skip(NO_TRAINING)
    core = importlib.util.find_spec("megatron.core.package_info")
    assert core is not None
    assert core.origin is not None
    for name in FILES:
        target = tmp_path / "tree" / "megatron" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(core.origin).parent.parent / name, target)
    return tmp_path / "tree"


def pristine(tree: Path) -> bool:
    """Whether every file is what the wheel has."""
    core = importlib.util.find_spec("megatron.core.package_info")
    assert core is not None
    return all(
        filecmp.cmp(Path(str(core.origin)).parent.parent / name, tree / "megatron" / name, False) for name in FILES
    )


def test_apply_twice_check_revert_twice(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for action, said in (
        ("check", "megatron-lm-core_v0.19: not applied"),
        ("revert", "not applied, so nothing to revert"),
        ("apply", "applied"),
        ("check", "megatron-lm-core_v0.19: applied"),
        ("apply", "applied already"),
    ):
        assert cli.run(["patch", action, str(tree)]) == 0
        assert capsys.readouterr().out == f"{tree}: {said}\n"
    for patch in SERIES["megatron-lm-core_v0.19"]:
        ast.parse((tree / patch.head["File"]).read_text())
        assert "mup_megatron" in (tree / patch.head["File"]).read_text()
    assert cli.run(["patch", "revert", str(tree)]) == 0
    assert pristine(tree)


def test_inside_a_repository(tree: Path) -> None:
    """git leaves out what it takes to lie outside: a tree under somebody's repository is patched all the same."""
    subprocess.run(["git", "init", "-q", str(tree.parent)], check=True)
    assert trees.apply_tree(tree)
    assert not pristine(tree)
    assert trees.revert_tree(tree)
    assert pristine(tree)


def test_a_local_change_where_a_hunk_goes(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence, exit status 2, no file of the four written; elsewhere in the file a change is no matter."""
    path = tree / "megatron/training/checkpointing.py"
    text = path.read_text()
    path.write_text(text.replace("def load_checkpoint(", "def load_our_checkpoint("))
    before = {name: (tree / "megatron" / name).read_bytes() for name in FILES}
    assert cli.run(["patch", "apply", str(tree)]) == 2
    said = capsys.readouterr().err
    assert "checkpointing.py: changed near line" in said
    assert "0004-checkpoint.patch goes; nothing was changed; undo the change there" in said
    assert said.count("\n") == 1
    assert before == {name: (tree / "megatron" / name).read_bytes() for name in FILES}
    path.write_text("# ours\n" * 40 + text)
    assert trees.apply_tree(tree)
    assert path.read_text().count("@loads_checkpoint\ndef load_checkpoint(") == 1


def test_half_a_patch_in_the_tree(tree: Path) -> None:
    """Neither applied nor to be applied: an error both ways, and nothing moves."""
    trees.apply_tree(tree)
    path = tree / "megatron/training/training.py"
    path.write_text(path.read_text().replace("get_megatron_optimizer = builds_optimizer(get_megatron_optimizer)\n", ""))
    before = {name: (tree / "megatron" / name).read_bytes() for name in FILES}
    for action in (trees.apply_tree, trees.revert_tree, trees.check_tree):
        with pytest.raises(UserError, match="nothing was changed"):
            action(tree)
    assert before == {name: (tree / "megatron" / name).read_bytes() for name in FILES}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "MAJOR = 0\nMINOR = 15\nPATCH = 3\nPRE_RELEASE = ''\n",
            r"megatron-core 0\.15\.3, for which there is no series",
        ),
        ("MAJOR = 1\nMINOR = 0\nPATCH = 0\nPRE_RELEASE = ''\n", r"expected >=0\.16\.1,<0\.17, >=0\.17,<0\.18"),
        ("raise SystemExit('run')\n", "names no version"),
        ("MAJOR = (\n", "names no version"),
    ],
)
def test_another_version(tmp_path: Path, text: str, said: str) -> None:
    """The version file of a stranger's tree is read, never run."""
    path = tmp_path / "megatron" / "core" / "package_info.py"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(UserError, match=said):
        trees.apply_tree(tmp_path)


def test_no_tree(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected the folder of a Megatron-LM checkout"):
        trees.check_tree(tmp_path)


def test_an_unknown_action(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["patch", "undo", str(tmp_path)]) == 2
    assert "undo: expected apply, check or revert" in capsys.readouterr().err


def test_every_diff_says_why_and_is_small() -> None:
    """The head of every diff is whole, its lines only add, and each adds calls of the entry library alone."""
    assert set(SERIES) == set(TAGS)
    for series in SERIES.values():
        assert [patch.path.name for patch in series] == sorted(
            path.name for path in series[0].path.parent.glob("*.patch")
        )
        for patch in series:
            lines = patch.path.read_text().partition("\n---\ndiff")[2].splitlines()
            added = [line[1:] for line in lines if line.startswith("+") and not line.startswith("+++")]
            assert not [line for line in lines if line.startswith("-") and not line.startswith("---")]
            assert 0 < len([line for line in added if line.strip()]) <= 3, patch.path
            assert all(len(text) > 5 for text in patch.head.values())


def test_the_table_lists_every_diff(repository: Path) -> None:
    table = (repository / "patches" / "README.md").read_text()
    for release, series in SERIES.items():
        versions = series[0].head["Versions"].partition(" ")[2]
        (row,) = [line for line in table.splitlines() if line.startswith(f"| `{release}/` | {versions} |")]
        assert all(tag[:12] in row for tag in TAGS[release])
        for patch in series:
            assert f"`{patch.path.name}`" in table
            assert patch.head["Why"] in table


@pytest.mark.parametrize("release", TAGS)
def test_every_release(release: str, tmp_path: Path) -> None:
    """On each tag of its release a series applies, twice is once, and reverting restores."""
    repository = os.environ.get("MEGATRON_LM")
    if repository is None:
        pytest.skip("MEGATRON_LM names no git repository of Megatron-LM with its tags")
    for tag in TAGS[release]:
        tree = tmp_path / tag
        for name in FILES:
            path = tree / "megatron" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            command = ["git", "-C", repository, "show", f"{tag}:megatron/{name}"]
            path.write_bytes(subprocess.run(command, capture_output=True, check=True).stdout)
        before = {name: (tree / "megatron" / name).read_bytes() for name in FILES}
        assert trees.check_tree(tree) == (release, "not applied")
        assert trees.apply_tree(tree)
        assert not trees.apply_tree(tree)
        for patch in SERIES[release]:
            ast.parse((tree / patch.head["File"]).read_text())
        assert trees.revert_tree(tree)
        assert before == {name: (tree / "megatron" / name).read_bytes() for name in FILES}
