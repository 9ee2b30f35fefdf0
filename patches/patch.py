"""A patch: one wrapped symbol of upstream, where it is, for which versions, why, and how it is undone.

A patch fails loudly when its symbol moved or changed its signature: a patch that hit nothing is an error. Applying
twice is applying once; reverting restores the very object that was there.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from packaging.specifiers import SpecifierSet
from packaging.version import Version

_MARK = "__mup_megatron_patch__"
_applied: dict[str, tuple[Any, str, Any]] = {}
_INHERITED = object()


class PatchError(RuntimeError):
    """Upstream is not what a patch was written for. The message names the patch and says what to do."""


@dataclass(frozen=True, kw_only=True)
class Patch:
    """A symbol of upstream's that is wrapped while this process runs.

    Args:
        name: short and unique, shown by `doctor`.
        distribution: package whose version decides.
        versions: PEP 440 specifiers; outside them the patch is an error, not a guess.
        symbol: where it is used, as `module:attribute.path` (a name re-exported by `from x import y` is patched there).
        parameters: parameter names that the symbol must have; None where the wrapper takes whatever the original does.
        why: what goes wrong without it.
        lower_rung: why no config field, public argument, subclass or hook does.
        until: when it can go.
        when: `cpu` where no CUDA device is there, `always` otherwise.
        needed: PEP 440 specifiers of the versions that have the defect; others are left alone. None: all.
        wrap: the original to what replaces it.
    """

    name: str
    distribution: str
    versions: str
    symbol: str
    parameters: tuple[str, ...] | None
    why: str
    lower_rung: str
    until: str
    when: Literal["cpu", "always"]
    wrap: Callable[[Any], Any]
    needed: str | None = None

    def is_needed(self, *, cuda: bool) -> bool:
        """Whether this machine and the installed version need it.

        Args:
            cuda: whether a CUDA device is there.
        """
        version = _version(self.distribution)
        has_defect = self.needed is None or SpecifierSet(self.needed).contains(version, prereleases=True)
        return has_defect and (self.when == "always" or not cuda)

    def _target(self) -> tuple[Any, str, Any]:
        """The object that holds the symbol, the attribute's name and its value."""
        version = _version(self.distribution)
        if not SpecifierSet(self.versions).contains(version, prereleases=True):
            raise PatchError(
                f"patch {self.name} is written for {self.distribution} {self.versions}, but {version} is installed; "
                f"install a version in that range, or check {self.symbol} and widen the range in patches/"
            )
        module, _, path = self.symbol.partition(":")
        owner: Any = importlib.import_module(module)
        *outer, attribute = path.split(".")
        try:
            for name in outer:
                owner = getattr(owner, name)
            # A class's own entry, so that a static or class method is wrapped as what it is.
            own = vars(owner) if isinstance(owner, type) else {}
            value = own[attribute] if attribute in own else getattr(owner, attribute)
        except AttributeError:
            raise PatchError(
                f"patch {self.name}: {self.symbol} is not in {self.distribution} {version}; it has moved, and the "
                "record in patches/ must follow it"
            ) from None
        return owner, attribute, value

    def apply(self) -> None:
        """Wraps the symbol; does nothing if it is wrapped already. Raises PatchError."""
        owner, attribute, original = self._target()
        if getattr(_inner(original), _MARK, None) == self.name or self.name in _applied:
            return
        if self.parameters is not None:
            found = tuple(inspect.signature(original).parameters)
            if found != self.parameters:
                raise PatchError(
                    f"patch {self.name}: {self.symbol} takes {found}, but the patch was written for {self.parameters}"
                )
        replacement = self.wrap(original)
        if callable(_inner(replacement)):
            setattr(_inner(replacement), _MARK, self.name)
        inherited = isinstance(owner, type) and attribute not in vars(owner)
        setattr(owner, attribute, replacement)
        _applied[self.name] = (owner, attribute, _INHERITED if inherited else original)

    def revert(self) -> None:
        """Puts the original back; does nothing if the patch is not applied."""
        if self.name in _applied:
            owner, attribute, original = _applied.pop(self.name)
            if original is _INHERITED:
                delattr(owner, attribute)
            else:
                setattr(owner, attribute, original)


_installed = functools.cache(importlib.metadata.version)


def _version(distribution: str) -> str:
    """The version that is imported; a Megatron-LM checkout on the path is not the one that is installed.

    Without the local part: megatron-core appends the commit of whatever git repository its files lie in, such as that
    of a virtual environment inside a project.
    """
    if distribution == "megatron-core":
        return Version(importlib.import_module("megatron.core.package_info").__version__).public
    return _installed(distribution)


def _inner(value: Any) -> Any:
    """The function inside a class or static method; anything else is itself."""
    return value.__func__ if isinstance(value, classmethod | staticmethod) else value


def apply_patches(patches: Iterable[Patch], *, cuda: bool) -> None:
    """Applies those that this machine needs.

    Args:
        patches: records.
        cuda: whether a CUDA device is there.
    """
    for patch in patches:
        if patch.is_needed(cuda=cuda):
            patch.apply()


def revert_patches(patches: Iterable[Patch]) -> None:
    """Undoes whatever of them is applied, the last first: two may be on one symbol."""
    for patch in reversed(list(patches)):
        patch.revert()


def active_patches() -> list[str]:
    """Names of the patches that are applied in this process."""
    return list(_applied)
