"""Files: those that somebody names, read within bounds; files of our own, written whole and never through a link.

Public names: `open_regular`, `check_regular`, `read_bytes`, `read_text`, `read_object`, `json_object`, `sha256_of`,
`MOST_BYTES`, `parse_yaml`, `as_yaml`, `open_new`, `write_whole`, `write_output`, `as_json`.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import math
import os
import re
import stat
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from mup_megatron.util.errors import UserError, shown

MOST_BYTES = 1 << 28
"""Of a file that is read whole, unless its reader says another number. Unit: bytes."""

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: str | Path) -> io.BufferedReader:
    """Opens a regular file for reading, or the one that a link names; what is none neither blocks nor is read.

    Raises:
        OSError: it cannot be opened, or is a folder.
        UserError: it is a pipe, a socket or a device.
    """
    _check_kind(path, os.stat(path).st_mode)  # opening alone makes some devices act, and frees who writes a pipe
    # What is there now may be another file: a pipe must not block here, and what was opened is looked at again.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _check_kind(path, os.fstat(handle).st_mode)
        return open(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def _check_kind(path: str | Path, mode: int) -> None:
    kind = stat.S_IFMT(mode)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if kind != stat.S_IFREG:
        raise UserError(f"{path}: is {_KINDS.get(kind, 'no file')}; expected a regular file")


def check_regular(path: str | Path, most: int | None = MOST_BYTES) -> None:
    """For what another library opens by its name: see `read_bytes`, with the errors that it raises."""
    with open_regular(path) as file:
        _check_size(path, os.fstat(file.fileno()).st_size, most)


def _check_size(path: str | Path, size: int, most: int | None) -> None:
    if most is not None and size > most:
        raise UserError(f"{path}: has {size:,} bytes; expected at most {most:,}")


def read_bytes(path: str | Path, most: int | None = MOST_BYTES) -> bytes:
    """The content of a regular file.

    Args:
        path: of the file.
        most: bytes that it may have; None where any number is right.

    Raises:
        OSError: it cannot be read.
        UserError: it is no regular file, or larger.
    """
    with open_regular(path) as file:
        if most is None:
            return file.read()
        _check_size(path, os.fstat(file.fileno()).st_size, most)
        content = file.read(most + 1)  # what has no size of its own (/proc), or grows meanwhile, may hold more
    _check_size(path, len(content), most)
    return content


def read_text(path: str | Path, errors: str = "strict", most: int | None = MOST_BYTES) -> str:
    """The text of a regular file in UTF-8, with the line ends of Python.

    Args:
        path: of the file.
        errors: what becomes of bytes that are no UTF-8, as `bytes.decode` takes it.
        most: as `read_bytes`.

    Raises:
        OSError: it cannot be read.
        UnicodeDecodeError: it is no UTF-8.
        UserError: it is no regular file, or larger.
    """
    return io.TextIOWrapper(io.BytesIO(read_bytes(path, most)), encoding="utf-8", errors=errors).read()


def json_object(text: str | bytes) -> dict[str, Any]:
    """The JSON object that a text is; an empty one where it is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty one where there is none."""
    try:
        return json_object(read_text(path))
    except (OSError, ValueError):
        return {}


def sha256_of(path: str | Path) -> str:
    """SHA-256 of a regular file of any size, in hexadecimal. Raises as `open_regular`."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_MOST_NODES = 1_000_000
"""Values of a YAML document with every anchor put in; one of a hundred bytes can stand for more than memory holds."""

_DEEPEST = 100
"""Lists and mappings within each other; libyaml's composer would go on until its stack ends."""

if TYPE_CHECKING:
    _Safe = yaml.SafeLoader
else:  # ten times as fast, where PyYAML was built with libyaml
    _Safe = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Safe):
    """yaml.SafeLoader that reads 3e-4 as a number (YAML 1.2 does, PyYAML's 1.1 makes it text), refuses twin keys, and
    anchors that stand for too much.
    """

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None and _expanded(node) > _MOST_NODES:
            raise yaml.MarkedYAMLError(problem=f"its anchors stand for more than {_MOST_NODES:,} values")
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        # Under an explicit tag (`!!map [1]`) the node may be of another kind, which super() refuses.
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.MarkedYAMLError(problem="a key is no plain value", problem_mark=key_node.start_mark)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"key {shown(key)} is given twice", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """yaml.SafeDumper that puts text into quotes where `_Loader` would read a number."""


for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"),
        list("-+.0123456789"),
    )


def _expanded(node: yaml.Node, sizes: dict[int, int] | None = None) -> int:
    """How many values a node stands for, every alias counted as what it names."""
    sizes = {} if sizes is None else sizes
    if id(node) not in sizes:
        sizes[id(node)] = _MOST_NODES + 1  # what holds itself never ends
        inner: list[yaml.Node] = []
        if isinstance(node, yaml.SequenceNode):
            inner = node.value
        elif isinstance(node, yaml.MappingNode):
            inner = [each for pair in node.value for each in pair]
        sizes[id(node)] = 1 + sum(_expanded(each, sizes) for each in inner)
    return sizes[id(node)]


def _check_nesting(text: str) -> None:
    depth = 0
    for event in yaml.parse(text, _Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            mark: Any = event.start_mark
            raise yaml.MarkedYAMLError(
                problem=f"lists and mappings are nested more than {_DEEPEST} deep", problem_mark=mark
            )


def parse_yaml(text: str, source: str) -> Any:
    """YAML text as plain data (safe loader: nothing is ever executed), of a bounded size.

    Raises:
        UserError: the text is not YAML, or its anchors stand for more than a file of settings holds; names the line.
    """
    try:
        _check_nesting(text)
        return yaml.load(text, _Loader)  # noqa: S506  (_Loader is a SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        lines = max(1, len(text.splitlines()))  # libyaml has the end of a text on a line of its own
        where = f"line {min(mark.line + 1, lines)}: " if mark else ""
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise UserError(f"{source}: {where}not valid YAML: {problem}") from None
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        # PyYAML's own constructors raise these: 2001-99-99 is a date to it, `!!int ''` a number.
        raise UserError(f"{source}: not valid YAML: {error}") from None


def as_yaml(value: Any, *, width: int = 80, lists_on_a_line: bool = False) -> str:
    """Plain data as YAML text of which `parse_yaml` makes the same data.

    Args:
        value: of dictionaries, which keep their order, lists, numbers and text.
        width: of a line, in characters, where text can be broken.
        lists_on_a_line: whether a list of plain values is written as [1, 2].
    """
    style = None if lists_on_a_line else False
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=width, default_flow_style=style)


def open_new(path: Path) -> int:
    """Opens a file that is not there yet for writing, with the mode that the umask gives.

    A file or a link that is there is taken away first: what it names is not touched.

    Raises:
        OSError: it cannot be made.
    """
    path.unlink(missing_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def write_whole(path: Path, content: str | bytes, *, sync: bool = False) -> None:
    """Writes a file whole or not at all, whenever the process is killed; through no link that somebody put there.

    Args:
        path: of the file.
        content: text in UTF-8, or bytes. What is no character of Unicode, as JSON can hold it, becomes its escape.
        sync: whether it is on the disk before it has its name.
    """
    partial = path.with_name(path.name + ".partial")
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    try:
        with open(open_new(partial), "wb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)  # on a full disk it would hold what room there is
        raise


def write_output(path: Path, text: str, option: str) -> None:
    """Writes a file that an option of a command names, and never over another one.

    Args:
        path: of the file.
        text: its content; where that is there already, nothing is done.
        option: for the message.

    Raises:
        UserError: something else is there, or nothing can be written.
    """
    try:
        if path.is_symlink() or path.exists():
            if path.is_file() and read_bytes(path) == text.encode("utf-8"):
                return
            raise UserError(f"{option}: {path} is there already; expected the name of a file that is not there yet")
        write_whole(path, text)
    except OSError as error:
        raise UserError(f"{option}: cannot write {path}: {error.strerror}") from None


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file of JSON lines, none where there is no file; one without a `step` ends them.

    A crash cuts a line short, or leaves bytes that are no text.

    Raises:
        UserError: it is no file, or cannot be read.
    """
    if not path.exists():
        return
    try:
        text = read_text(path, errors="replace", most=None)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; expected a file of JSON lines") from None
    for line in text.splitlines():
        if not (found := json_line(line)):
            return
        yield found


def json_line(text: str | bytes) -> dict[str, Any]:
    """The JSON object of a line that has a whole number as its `step`; an empty one where it is none."""
    found = json_object(text)
    return found if isinstance(found.get("step"), int) else {}


def cut_lines(path: Path, last: int) -> list[dict[str, Any]]:
    """Leaves the lines up to a step (their `step`) in a file of JSON lines, and returns them."""
    kept = [line for line in json_lines(path) if line["step"] <= last]
    write_whole(path, "".join(json.dumps(line) + "\n" for line in kept))
    return kept


def as_json(value: Any, digits: int | None = None) -> Any:
    """Plain data as JSON has it: null for what is no finite number, text for keys, lists for tuples.

    Args:
        value: of dictionaries, lists, tuples, numbers and text.
        digits: of floats, significant ones; None keeps all.
    """
    if isinstance(value, dict):
        return {str(key): as_json(held, digits) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(held, digits) for held in value]
    if not isinstance(value, float) or not math.isfinite(value):
        return None if isinstance(value, float) else value
    return value if digits is None else float(f"{value:.{digits}g}")
