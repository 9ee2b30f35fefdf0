"""Debian packages as sources of text: fetched and unpacked where a config asks for it, never installed.

Public names: `Debian`, `NO_TEXT`. `apt-get download` gets the packages as an ordinary user, from the mirror that the
machine is configured for, and checks their signatures; `dpkg-deb` unpacks them into a scratch folder.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mup_megatron.config import Config
from mup_megatron.util.errors import ConfigError, shown

NO_TEXT = "this version of it holds no text where others do"
"""What is wrong with a package whose files are other than they were."""
_SECONDS = 900


class Debian:
    """Packages that a corpus is made of.

    Args:
        config: the run; `data.corpus` is said in messages.
        packages: their names.
        without: what a machine without network or apt-get can use instead, as a message says it.
    """

    def __init__(self, config: Config, packages: Sequence[str], without: str) -> None:
        self._config, self._packages, self._without = config, packages, without

    @contextmanager
    def unpacked(self, directory: Path, say: Callable[[str], None]) -> Iterator[Iterator[tuple[str, Path]]]:
        """Packages and the folders of what each would install, one after the other; gone at the end.

        Args:
            directory: the scratch folder is made in it.
            say: takes lines of progress.

        Raises:
            ConfigError: a package cannot be fetched; names it, and what works without a network.
        """
        for program in ("apt-get", "dpkg-deb"):
            if shutil.which(program) is None:
                raise self.unfetched(", ".join(self._packages), f"this machine has no {program}")
        with tempfile.TemporaryDirectory(prefix=f".{self._config.data.corpus}-", dir=directory) as scratch:
            yield ((package, self._unpack(package, Path(scratch).resolve(), say)) for package in self._packages)

    def unfetched(self, what: str, problem: str) -> ConfigError:
        """The error to raise where a package cannot be had."""
        return self._config.error(
            "data.corpus",
            f"{self._config.data.corpus} needs the Debian package {what}, which could not be fetched ({problem}); "
            "expected a network and Debian's or Ubuntu's apt-get with its lists (apt-get update), or what needs "
            f"neither: {self._without}",
        )

    def _unpack(self, package: str, scratch: Path, say: Callable[[str], None]) -> Path:
        """The folder that holds what a package would install."""
        say(f"fetching {package} (apt-get download)")
        downloads, folder = scratch / f"{package}.deb", scratch / package
        downloads.mkdir()
        self._run(package, ["apt-get", "download", package], downloads)
        archives = sorted(downloads.glob("*.deb"))
        if not archives:
            raise self.unfetched(package, "apt-get wrote no package")
        self._run(package, ["dpkg-deb", "--extract", str(archives[-1]), str(folder)], scratch)
        return folder

    def _run(self, package: str, command: list[str], folder: Path) -> None:
        try:
            ended = subprocess.run(  # noqa: S603  (two programs of Debian's, by their names)
                command, cwd=folder, capture_output=True, text=True, timeout=_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise self.unfetched(package, f"{command[0]}: {error}") from None
        if ended.returncode:
            said = [line for line in ended.stderr.splitlines() if line.strip()] or [f"exit status {ended.returncode}"]
            errors = [line for line in said if line.startswith("E:")] or said
            raise self.unfetched(package, f"{command[0]}: {shown(errors[0].removeprefix('E: '))}")
