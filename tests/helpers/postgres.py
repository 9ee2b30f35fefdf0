"""A PostgreSQL server of Debian's package, for as long as a test takes. It refuses to run as root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.helpers.commands import until

_USER = "postgres"


def postgres_programs() -> Path | None:
    """Folder of `initdb` and `postgres`; None where they are not installed."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
    return next((folder for folder in reversed(folders) if (folder / "initdb").exists()), None)


@contextlib.contextmanager
def server(folder: Path, password: str | None = None) -> Iterator[str]:
    """Starts a server on a socket in `folder`, and yields the URL of an empty database.

    Args:
        folder: is made.
        password: that the server asks for; the URL does not hold it.
    """
    programs = postgres_programs()
    if programs is None:
        raise FileNotFoundError("/usr/lib/postgresql/*/bin/initdb")
    data = folder / "data"
    folder.mkdir()
    as_user: list[str] = []
    if os.getuid() == 0:
        as_user = ["runuser", "-u", _USER, "--"]
        shutil.chown(folder, _USER)
        for above in folder.parents:
            if not above.stat().st_mode & 0o001:
                above.chmod(above.stat().st_mode | 0o011)
    ways = ["-A", "trust"]
    if password is not None:
        (folder / "password").write_text(password)
        ways = ["-A", "scram-sha-256", "--pwfile", str(folder / "password")]
    made = [*as_user, str(programs / "initdb"), "-D", str(data), *ways, "-U", "mup", "--no-sync"]
    subprocess.run(made, check=True, capture_output=True, cwd=folder)
    command = [*as_user, str(programs / "postgres"), "-D", str(data), "-k", str(folder), "-h", "", "-F"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        ready = [str(programs / "pg_isready"), "-h", str(folder), "-U", "mup", "-q"]
        until(lambda: subprocess.run(ready, check=False).returncode == 0, 30)
        yield f"postgresql+psycopg://mup@/postgres?host={folder}"
    finally:
        process.terminate()  # runuser passes it on: every client is let finish, then it ends
        process.wait(30)
