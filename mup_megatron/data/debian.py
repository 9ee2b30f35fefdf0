"""Debian packages as sources of text: fetched and unpacked where a config asks for it, never installed.

Public name: `Fetched`. `apt-get download` gets the packages as an ordinary user, from the mirror that the machine is
configured for, and checks their signatures; `dpkg-deb` unpacks them into a scratch folder.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mup_megatron.config import Config
from mup_megatron.util.disk import full_disk
from mup_megatron.util.errors import ConfigError, shown
from mup_megatron.util.files import write_whole

_SECONDS = 900


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """A corpus that is made of Debian packages: one file of JSON lines in the data folder.

    Args:
        file: its name.
        packages: names, in the order in which they are read.
        what: the corpus, as messages name it.
        unit: lines of the file, as messages name them.
        size: what packages, unpacked, and text take together. Unit: bytes.
        without: what a machine without network or apt-get can use instead, as a message says it.
        read: what a package holds, by key; from its name, and the folder of what it would install.
        lines: the file's, from what each package holds.
    """

    file: str
    packages: tuple[str, ...]
    what: str
    unit: str
    size: int
    without: str
    read: Callable[[str, Path], dict[str, str]]
    lines: Callable[[Sequence[dict[str, str]]], list[str]]

    def fetch(self, config: Config, directory: Path, say: Callable[[str], None]) -> None:
        """Writes the file into a data folder.

        Args:
            config: the run, for messages.
            directory: of the run's data; this process holds it.
            say: takes lines of progress.

        Raises:
            ConfigError: a package cannot be fetched; names it, and what works without a network.
        """
        path, held = directory / self.file, []
        with full_disk(path, self.what, lambda: self.size):
            with self._unpacked(config, directory, say) as folders:
                for package, folder in folders:
                    held.append(self.read(package, folder))
                    if not held[-1]:
                        raise self._unfetched(config, package, "this version of it holds no text where others do")
            lines = self.lines(held)
            if not lines:
                packages = " and ".join(self.packages)
                raise self._unfetched(config, packages, "these versions of them share no paragraph")
            write_whole(path, "".join(f"{line}\n" for line in lines))
        say(f"{path}: {len(lines):,} {self.unit}, {path.stat().st_size / 1e6:.1f} MB")

    @contextmanager
    def _unpacked(
        self, config: Config, directory: Path, say: Callable[[str], None]
    ) -> Iterator[Iterator[tuple[str, Path]]]:
        """Packages and the folders of what each would install, one after the other; gone at the end."""
        for program in ("apt-get", "dpkg-deb"):
            if shutil.which(program) is None:
                raise self._unfetched(config, ", ".join(self.packages), f"this machine has no {program}")
        with tempfile.TemporaryDirectory(prefix=f".{config.data.corpus}-", dir=directory) as scratch:
            yield ((package, self._unpack(config, package, Path(scratch).resolve(), say)) for package in self.packages)

    def _unfetched(self, config: Config, what: str, problem: str) -> ConfigError:
        """The error to raise where a package cannot be had."""
        return config.error(
            "data.corpus",
            f"{config.data.corpus} needs the Debian package {what}, which could not be fetched ({problem}); "
            "expected a network and Debian's or Ubuntu's apt-get with its lists (apt-get update), or what needs "
            f"neither: {self.without}",
        )

    def _unpack(self, config: Config, package: str, scratch: Path, say: Callable[[str], None]) -> Path:
        """The folder that holds what a package would install."""
        say(f"fetching {package} (apt-get download)")
        downloads, folder = scratch / f"{package}.deb", scratch / package
        downloads.mkdir()
        self._run(config, package, ["apt-get", "download", package], downloads)
        archives = sorted(downloads.glob("*.deb"))
        if not archives:
            raise self._unfetched(config, package, "apt-get wrote no package")
        self._run(config, package, ["dpkg-deb", "--extract", str(archives[-1]), str(folder)], scratch)
        return folder

    def _run(self, config: Config, package: str, command: list[str], folder: Path) -> None:
        try:
            ended = subprocess.run(  # noqa: S603  (two programs of Debian's, by their names)
                command, cwd=folder, capture_output=True, text=True, timeout=_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise self._unfetched(config, package, f"{command[0]}: {error}") from None
        if ended.returncode:
            said = [line for line in ended.stderr.splitlines() if line.strip()] or [f"exit status {ended.returncode}"]
            errors = [line for line in said if line.startswith("E:")] or said
            raise self._unfetched(config, package, f"{command[0]}: {shown(errors[0].removeprefix('E: '))}")
