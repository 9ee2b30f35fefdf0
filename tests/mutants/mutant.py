"""What a mutant is, where the lists are, and how one is put into the code: by symbol, whatever the text around it."""

from __future__ import annotations

import ast
import copy
import functools
import importlib
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One fault in one symbol, and the tests that must fail then.

    Args:
        name: kind of code, then what is lost: `rule: ...`, `shim: ...`, `guard: ...`.
        what: the fault, in words.
        symbol: where, as a dotted name from the package on: `rules.formulas.epsilon`, `patches.patch.Patch.apply`.
        old: an expression or a statement that the symbol's definition holds once, however it is written there. Empty
            where `new` decorates the definition.
        new: what stands there instead.
        tests: pytest's words; one of these tests must fail.
    """

    name: str
    what: str
    symbol: str
    old: str = ""
    new: str
    tests: tuple[str, ...]


def mutant(name: str, what: str, symbol: str, old: str, new: str, *tests: str) -> Mutant:
    """A mutant that puts `new` for `old`; its tests are given without `tests/`."""
    return Mutant(name=name, what=what, symbol=symbol, old=old, new=new, tests=tuple(f"tests/{test}" for test in tests))


def decorated(name: str, what: str, symbol: str, decorator: str, *tests: str) -> Mutant:
    """A mutant that puts a decorator right above the symbol's `def`."""
    return mutant(name, what, symbol, "", decorator, *tests)


def all_mutants() -> tuple[Mutant, ...]:
    """Those of every room: tests/ROOM/mutants.py has the room's, as `MUTANTS`."""
    rooms = sorted(path.parent.name for path in (REPOSITORY / "tests").glob("*/mutants.py"))
    lists = [importlib.import_module(f"tests.{room}.mutants").MUTANTS for room in rooms]
    return tuple(each for mutants in lists for each in mutants)


def place(tree: Path, symbol: str) -> tuple[Path, str]:
    """The file that defines a symbol, and the symbol's name in it.

    A symbol that is not where its name says is found where its last names are defined, if only one place defines them.

    Raises:
        ValueError: no place defines it, or several do.
    """
    defined = _defined(tree)
    found = [at for at in defined if f"{at[0]}.{at[2]}" == symbol]
    names = symbol.split(".")
    for first in range(1, len(names)):
        found = found or [at for at in defined if at[2] == ".".join(names[first:])]
    if len(found) != 1:
        raise ValueError(f"{symbol}: defined {len(found)} times; expected once")
    return found[0][1], found[0][2]


@functools.cache
def _defined(tree: Path) -> tuple[tuple[str, Path, str], ...]:
    """Module, file and name of every definition of the package."""
    found = []
    for folder, root in (("mup_megatron", tree / "mup_megatron"), ("patches", tree)):
        for path in sorted((tree / folder).rglob("*.py")):
            module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            found += [(module, path, name) for name, _ in _definitions(ast.parse(path.read_text()))]
    return tuple(found)


def _definitions(node: ast.AST, before: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Functions and classes, also those inside of others, and what modules and classes assign."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield before + child.name, child
            yield from _definitions(child, f"{before}{child.name}.")
        elif isinstance(child, ast.Assign | ast.AnnAssign) and isinstance(node, ast.Module | ast.ClassDef):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            yield from ((before + target.id, child) for target in targets if isinstance(target, ast.Name))
        elif isinstance(child, ast.stmt):
            yield from _definitions(child, before)


def mutated(text: str, name: str, fault: Mutant) -> str:
    """A file's text with the fault in what it defines as `name`; comments are lost.

    Raises:
        ValueError: it does not define that once, or what it defines does not hold `old` once.
    """
    module = ast.parse(text)
    found = [node for defined, node in _definitions(module) if defined == name]
    if len(found) != 1:
        raise ValueError(f"{fault.symbol}: defined {len(found)} times; expected once")
    if fault.old:
        swap = _Swap(_parsed(fault.old), _parsed(fault.new))
        swap.visit(found[0])
        if swap.count != 1:
            raise ValueError(f"{fault.symbol} holds {fault.old!r} {swap.count} times; expected once")
    else:
        assert isinstance(found[0], ast.FunctionDef)
        found[0].decorator_list.append(ast.parse(fault.new, mode="eval").body)
    return ast.unparse(ast.fix_missing_locations(module))


def _parsed(source: str) -> ast.expr | ast.stmt:
    (statement,) = ast.parse(textwrap.dedent(source)).body
    return statement.value if isinstance(statement, ast.Expr) else statement


class _Swap(ast.NodeTransformer):
    """Puts `new` where the tree is `old`, and counts."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._kind, self._old, self._new = type(old), ast.dump(old), new
        self.count = 0

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, self._kind) and ast.dump(node) == self._old:
            self.count += 1
            return copy.deepcopy(self._new)
        return self.generic_visit(node)
