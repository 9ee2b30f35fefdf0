"""Who may import whom, and what importing the package must not drag in."""

from __future__ import annotations

import ast
import functools
import graphlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# The folders of the package are its rooms. These are their floors, from the top down: a room imports from lower floors
# alone. patches/ lies beside the package.
FLOORS = [
    {"__main__", "run"},
    {"bridge", "cli"},
    {"megatron_training", "report"},
    {"proof", "slurm"},
    {"tuning"},
    {"train"},
    {"evaluate"},
    {"convert", "deepspeed", "telemetry"},
    {"checkpoints", "engines", "mup"},
    {"audit"},
    {"data", "model"},
    {"parallel"},
    {"patches", "rules"},
    {"config"},
    {"util"},
]


def room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


@functools.cache
def imports_in(text: str) -> frozenset[str]:
    """Names that a file imports. patches/ alone imports relatively, as mypy sees it as a top-level package."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level < 2
            module = f"mup_megatron.patches.{node.module}" if node.level else node.module
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def imports_of(path: Path) -> frozenset[str]:
    return imports_in(path.read_text())


def modules(package: Path) -> list[Path]:
    """Every Python file of the package, and those of patches/ beside it."""
    return sorted([*package.rglob("*.py"), *package.with_name("patches").rglob("*.py")])


def floor(name: str) -> int:
    return next(number for number, rooms in enumerate(FLOORS) if name in rooms)


def inside(path: Path, package: Path) -> Path:
    """A file as it is called inside the package."""
    return path.relative_to(package if path.is_relative_to(package) else package.parent)


def room_of(path: Path, package: Path) -> str:
    return inside(path, package).parts[0].removesuffix(".py")


def wrong_imports(package: Path) -> list[str]:
    wrong = []
    for path in modules(package):
        here = room_of(path, package)
        if here == "__init__":
            continue
        for name in imports_of(path):
            if not name.startswith("mup_megatron."):
                continue
            there = room(name)
            if there in ("__version__", here):
                continue
            if floor(there) <= floor(here):
                wrong.append(f"{inside(path, package)} imports {name}")
    return wrong


# Circles on purpose: a factory names what it makes.
FACTORIES = {
    ("mup_megatron.engines", "mup_megatron.engines.megatron"),
    ("mup_megatron.engines", "mup_megatron.engines.deepspeed"),
}


def imported_modules(package: Path) -> dict[str, set[str]]:
    """Every module of the package with those that it imports, also inside of functions."""

    def name_of(path: Path) -> str:
        parts = (package.name, *inside(path, package).with_suffix("").parts)
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    names = {name_of(path) for path in modules(package)}

    def module_of(name: str) -> str:
        return name if name in names or "." not in name else module_of(name.rpartition(".")[0])

    return {name_of(path): {module_of(name) for name in imports_of(path)} & names for path in modules(package)}


def circle(imports: dict[str, set[str]]) -> list[str]:
    """Modules that import each other, or none."""
    edges = {
        name: {other for other in found if other != name and (name, other) not in FACTORIES}
        for name, found in imports.items()
    }
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_each_other(repository: Path) -> None:
    imports = imported_modules(repository / "mup_megatron")
    assert circle(imports) == []
    # Negative control: the norms, which Transformer Engine's shims import, import these.
    norm, engine = "mup_megatron.model.layers.norm", "mup_megatron.model.layers.transformer_engine"
    assert norm in imports[engine]
    imports[norm].add(engine)
    assert set(circle(imports)) == {norm, engine}


def test_every_room_has_a_floor(repository: Path) -> None:
    package = repository / "mup_megatron"
    rooms = {room_of(path, package) for path in modules(package)}
    assert rooms - {"__init__"} == set().union(*FLOORS)


def test_the_page_lists_every_room(repository: Path) -> None:
    """CONTRIBUTING.md, "The rooms": each with the floor it is on, from the ground up, and its own first sentence."""
    rows = []
    for number, rooms in enumerate(FLOORS):
        for name in sorted(rooms - {"__main__", "run"}):
            folder = repository / ("patches" if name == "patches" else f"mup_megatron/{name}")
            said = (ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or "").split("\n\n")[0]
            shown = folder.relative_to(repository)
            rows.append(f"| {len(FLOORS) - number} | [{name}]({shown}) | {' '.join(said.split())} |")
    text = (repository / "CONTRIBUTING.md").read_text()
    assert "\n".join(rows) + "\n\n" in text, "\n".join(rows)


def test_tests_lie_in_the_folder_of_a_room(repository: Path) -> None:
    """But for what they share, and for faults that are put into a copy of the tree."""
    folders = {path.parent.relative_to(repository / "tests") for path in (repository / "tests").rglob("test_*.py")}
    rooms = set().union(*FLOORS) | {"mutants"}
    assert not [str(folder) for folder in folders if folder.parts and folder.parts[0] not in rooms]
    inner = [folder for folder in folders if len(folder.parts) > 1]
    assert inner
    assert not [
        str(folder)
        for folder in inner
        if not (repository / "mup_megatron" / folder).is_dir() and folder != Path("model", "bert")
    ]


def test_no_file_is_longer_than_a_reader_takes_in(repository: Path) -> None:
    """CONTRIBUTING.md, "The rooms": 400 lines at most."""
    package = repository / "mup_megatron"
    lengths = {str(inside(path, package)): len(path.read_text().splitlines()) for path in modules(package)}
    assert len(lengths) > 300
    assert not {path: length for path, length in lengths.items() if length > 400}


def test_directions(repository: Path) -> None:
    assert not wrong_imports(repository / "mup_megatron")


def test_a_wrong_import_is_seen_in_every_room(repository: Path, tmp_path: Path) -> None:
    """In a copy of the package, one file of each room in turn imports the topmost room."""
    shutil.copytree(repository / "patches", tmp_path / "patches", ignore=shutil.ignore_patterns("__pycache__"))
    package = tmp_path / "mup_megatron"
    without = shutil.ignore_patterns("__pycache__")
    shutil.copytree(repository / "mup_megatron", package, ignore=without)
    rooms = {room_of(path, package): path for path in modules(package)}
    assert set(rooms) - {"__init__"} == set().union(*FLOORS)
    for name, path in rooms.items():
        if name not in ("__init__", *FLOORS[0]):
            text = path.read_text()
            path.write_text(f"{text}\nfrom mup_megatron import run\n")
            assert wrong_imports(package) == [f"{inside(path, package)} imports mup_megatron.run"]
            path.write_text(text)


@pytest.mark.parametrize("name", ["rules", "config", "parallel/layout", "util/errors"])
def test_mathematics_without_torch(repository: Path, name: str) -> None:
    heavy = {"torch", "megatron", "deepspeed", "numpy"}
    paths = [repository / "mup_megatron" / f"{name}.py", *(repository / "mup_megatron" / name).glob("*.py")]
    for path in paths:
        if path.exists():
            assert not {module.split(".")[0] for module in imports_of(path)} & heavy, path


@pytest.mark.parametrize(
    "statement",
    [
        "import mup_megatron",
        "import mup_megatron.rules.formulas",
        "import mup_megatron.cli, mup_megatron.config",
        "import mup_megatron.megatron_training.script",
        "import mup_megatron.slurm.job",
        "import mup_megatron.tuning.study",
        "import mup_megatron.report.page",
        "import mup_megatron.report.diagnosis",
        "import mup_megatron.cli.new_run",
        "from mup_megatron import cli; assert cli.run(['watch', 'docs', '--once']) == 2",  # no run there, so no table
    ],
)
def test_light_imports(statement: str) -> None:
    """In a process of its own: torch, megatron and deepspeed stay out."""
    code = f"{statement}; import sys; print([m for m in ('torch', 'megatron', 'deepspeed') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_wrapped_symbols_live_in_patches_alone(repository: Path) -> None:
    """Nothing outside patches/ assigns to an attribute of an upstream module or class."""
    wrong = []
    package = repository / "mup_megatron"
    for path in modules(package):
        if room_of(path, package) == "patches":
            continue
        tree = ast.parse(path.read_text())
        upstream = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("megatron", "deepspeed"):
                upstream |= {alias.asname or alias.name for alias in node.names}
            if isinstance(node, ast.Import):
                upstream |= {
                    (alias.asname or alias.name).split(".")[0]
                    for alias in node.names
                    if alias.name.split(".")[0] in ("megatron", "deepspeed", "torch")
                }
        for node in ast.walk(tree):
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in targets:
                root = target
                while isinstance(root, ast.Attribute):
                    root = root.value
                if isinstance(target, ast.Attribute) and isinstance(root, ast.Name) and root.id in upstream:
                    wrong.append(f"{path.name}:{target.lineno}")
    assert not wrong
