"""The wheel, installed outside a checkout: it holds what the checkout holds, and its commands run from anywhere.

The sdist makes the same wheel.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.helpers.commands import environment

FOLDERS = {"patches": "mup_megatron/patches", "configs": "mup_megatron/util/shipped/configs"} | {
    "launch": "mup_megatron/util/shipped/launch",
    "mup_megatron": "mup_megatron",
}


@pytest.fixture(scope="module")
def checkout(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a wheel is made from: building leaves files behind."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in FOLDERS:
        shutil.copytree(repository / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(repository / name, copy)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel_of(checkout, tmp_path_factory.mktemp("wheel"))


def wheel_of(source: Path, folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    built = subprocess.run([*pip, "-w", folder, source], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    return path


def test_it_holds_every_file_once(checkout: Path, wheel: Path) -> None:
    """No link, which a zip or Windows loses, and nothing that is not in the checkout."""
    expected = {
        f"{inside}/{path.relative_to(checkout / folder)}"
        for folder, inside in FOLDERS.items()
        for path in (checkout / folder).rglob("*")
        if path.is_file() and path.name != "README.md" and "build" not in path.parts
    }
    assert not [path for path in checkout.rglob("*") if path.is_symlink()]
    with zipfile.ZipFile(wheel) as archive:
        found = [name for name in archive.namelist() if ".dist-info/" not in name]
        licences = [name for name in archive.namelist() if name.endswith("/LICENSE")]
    assert set(found) ^ expected == set()
    assert len(found) == len(expected)
    assert len(licences) == 1


def test_the_sdist_makes_the_same_wheel(checkout: Path, wheel: Path, tmp_path: Path) -> None:
    """To the last byte of every file."""
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    built = subprocess.run([sys.executable, "-c", code], cwd=checkout, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    (sdist,) = tmp_path.glob("*.tar.gz")
    (tmp_path / "unpacked").mkdir()
    subprocess.run(["tar", "xf", str(sdist), "-C", str(tmp_path / "unpacked")], check=True)
    (source,) = (tmp_path / "unpacked").iterdir()
    again = wheel_of(source, tmp_path / "again")
    assert again.name == wheel.name
    assert contents(again) == contents(wheel)


def contents(wheel: Path) -> dict[str, bytes]:
    """Every file but the list of them, whose order is the file system's."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}


def outside_a_checkout() -> dict[str, str]:
    return {key: value for key, value in environment().items() if key != "PYTHONPATH"}


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of its own: the wheel's files first, then what it requires, as this environment has it."""
    target = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", target], check=True)
    python = target / "bin" / "python"
    where = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(pip, check=True, capture_output=True, env=outside_a_checkout())
    # A folder that a .pth file names is looked up after the environment's own site-packages.
    Path(where, "required.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return target


def run(installed: Path, cwd: Path, *words: str) -> str:
    names = outside_a_checkout() | {"PATH": f"{installed / 'bin'}:{environment()['PATH']}"}
    result = subprocess.run(words, cwd=cwd, env=names, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    return result.stdout


@pytest.mark.slow
def test_its_commands_run_outside_a_checkout(installed: Path, tmp_path: Path) -> None:
    python = str(installed / "bin" / "python")
    where = run(installed, tmp_path, python, "-c", "import mup_megatron.patches as p; print(p.__file__)")
    assert Path(where.strip()).is_relative_to(installed)
    run(installed, tmp_path, "mup-megatron", "new", "mine", "--hidden-size", "128", "--num-layers", "1")
    folder = tmp_path / "mine"
    assert run(installed, folder, "mup-megatron", "--version") == "mup-megatron 0.1.0\n"  # of no checkout
    explained = run(installed, folder, "mup-megatron", "explain", "config.yaml")
    assert "embedding.word_embeddings.weight" in explained
    page = run(installed, folder, "mup-megatron", "explain", "config.yaml", "--html", "page.html").strip()
    assert "function valuesAt" in (folder / page).read_text()
    jobs = run(installed, folder, "mup-megatron", "slurm", "pipeline", "config.yaml", "--dry-run")
    assert "sbatch" in jobs
    code = "from mup_megatron.patches import trees; print({k: len(v) for k, v in trees.source_patches().items()})"
    assert "'megatron-lm-core_v0.19': 4" in run(installed, folder, python, "-c", code)


@pytest.mark.slow
def test_without_a_config_the_shipped_demo_is_taken(installed: Path, tmp_path: Path) -> None:
    code = "from pathlib import Path; from mup_megatron.cli import default_config; print(default_config(Path('x/y')))"
    path = Path(run(installed, tmp_path, str(installed / "bin" / "python"), "-c", code).strip())
    assert path.is_relative_to(installed)
    assert path.name == "demo.yaml"
    assert path.read_text().startswith("# yaml-language-server:")
