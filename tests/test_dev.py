"""Which Python `./dev` takes, by PATH and pyenv. The rest of the door is CI's own way in."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

# Answers the question for its version with STATUS, and ends whatever is asked next with 3.
PYTHON = '#!/bin/sh\ncase "$*" in *version_info\\ \\<*) exit {status} ;; esac\nexit 3\n'


def door(repository: Path, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """`./dev setup` in a folder of its own, whose bin/ has the few tools that it needs."""
    shutil.copy(repository / "dev", folder / "dev")
    (folder / "bin").mkdir(exist_ok=True)
    for tool in ("bash", "dirname", "env", "cat", "cksum"):
        (folder / "bin" / tool).symlink_to(shutil.which(tool) or tool)
    return subprocess.run([folder / "dev", "setup"], env=variables, capture_output=True, text=True, check=False)


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("programs", "status", "said"),
    [
        (
            {"pyenv/shims/python3.12": "#!/bin/sh\nexit 127\n", "pyenv/versions/3.12.1/bin/python3.12": 0},
            3,
            "python3.12 is pyenv's, and not active; using {}/pyenv/versions/3.12.1/bin/python3.12",
        ),
        (
            {"pyenv/shims/python3.12": "#!/bin/sh\nexit 127\n", "pyenv/versions/3.9.1/bin/python3.9": 1},
            2,
            "python3.12 is pyenv's shim, of no version that is active or new enough; run: pyenv install 3.12",
        ),
        ({"bin/python3.12": 1}, 2, "needs Python 3.11 or newer; python3.12 is older"),
        ({"bin/python3.9": 1}, 2, "needs Python 3.11 or newer; there is no python3.12"),
        ({"bin/python3.12": 0}, 3, ""),
    ],
    ids=["shim", "shim of nothing", "older", "none", "found"],
)
def test_which_python(repository: Path, tmp_path: Path, programs: dict[str, str | int], status: int, said: str) -> None:
    for name, what in programs.items():
        program(tmp_path / name, what if isinstance(what, str) else PYTHON.format(status=what))
    path = os.pathsep.join(str(tmp_path / folder) for folder in ("pyenv/shims", "bin"))
    ended = door(repository, tmp_path, PATH=path, PYENV_ROOT=str(tmp_path / "pyenv"), PYTHON="python3.12")
    assert ended.returncode == status, ended.stderr
    assert said.format(tmp_path) in ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_environment_of_another_python(repository: Path, tmp_path: Path) -> None:
    """It is named, and stays as it is."""
    program(tmp_path / "bin" / "python3", '#!/bin/sh\ncase "$*" in *%d.%d*) echo 3.13 ;; esac\n')
    (tmp_path / ".venv" / "lib" / "python3.11").mkdir(parents=True)
    ended = door(repository, tmp_path, PATH=str(tmp_path / "bin"), HOME=str(tmp_path))
    assert ended.returncode == 2, ended.stderr
    python = tmp_path / "bin" / "python3"
    said = f".venv is not of Python 3.13, which {python} is; set PYTHON to the one that made it, or remove that folder"
    assert ended.stderr == f"dev: {said}\n"
