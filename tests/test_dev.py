"""Which Python `./dev` takes, by PATH and pyenv. The rest of the door is CI's own way in."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

# Answers the question for its version with STATUS, and ends whatever is asked next with 3.
PYTHON = '#!/bin/sh\ncase "$*" in *version_info\\ \\<*) exit {status} ;; esac\nexit 3\n'


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
    shutil.copy(repository / "dev", tmp_path / "dev")
    for tool in ("bash", "dirname", "env", "cat", "cksum"):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool) or tool)
    path = os.pathsep.join(str(tmp_path / folder) for folder in ("pyenv/shims", "bin"))
    variables = {"PATH": path, "PYENV_ROOT": str(tmp_path / "pyenv"), "PYTHON": "python3.12"}
    ended = subprocess.run([tmp_path / "dev", "setup"], env=variables, capture_output=True, text=True, check=False)
    assert ended.returncode == status, ended.stderr
    assert said.format(tmp_path) in ended.stderr
    assert "Traceback" not in ended.stderr
