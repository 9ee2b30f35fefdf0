"""What `mup_megatron.bridge` relies on, in the source of each release of megatron-bridge that is at hand.

Nothing is imported, so neither CUDA nor Transformer Engine is needed. `MEGATRON_BRIDGE` names a folder of unpacked
wheels (one folder of any name each), such as `pip download --no-deps megatron-bridge==0.6.2` and unzip give; without it
the installed package is read.
"""

from __future__ import annotations

import ast
import importlib.metadata
import os
from pathlib import Path

import pytest

from mup_megatron.bridge import SYMBOLS


def trees() -> dict[str, Path]:
    """Folders that hold `megatron/bridge`, by version."""
    if folder := os.environ.get("MEGATRON_BRIDGE"):
        roots = [path.parents[1] for path in sorted(Path(folder).glob("*/megatron/bridge"))]
    else:
        try:
            roots = [Path(str(importlib.metadata.distribution("megatron-bridge").locate_file("")))]
        except importlib.metadata.PackageNotFoundError:
            return {}
    return {_version(root): root for root in roots}


def _version(root: Path) -> str:
    (found,) = root.glob("megatron_bridge-*.dist-info")
    return found.name.removesuffix(".dist-info").partition("-")[2]


TREES = trees()
SUPPORTED = [version for version in TREES if tuple(map(int, version.split("."))) >= (0, 4, 1)]
OLDER = [version for version in TREES if version not in SUPPORTED]
pytestmark = pytest.mark.skipif(
    not TREES, reason="megatron-bridge is not installed, and MEGATRON_BRIDGE names no folder of its unpacked wheels"
)


def module(version: str, name: str) -> ast.Module:
    path = TREES[version].joinpath(*name.split(".")).with_suffix(".py")
    return ast.parse(path.read_bytes(), str(path))


def names_in(tree: ast.Module) -> set[str]:
    """What a module defines or imports."""
    found = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def function(tree: ast.AST, *path: str) -> ast.FunctionDef:
    """A function, or a class's."""
    for name in path:
        (tree,) = (node for node in ast.iter_child_nodes(tree) if getattr(node, "name", None) == name)
    assert isinstance(tree, ast.FunctionDef)
    return tree


def arguments(found: ast.FunctionDef) -> list[str]:
    return [argument.arg for argument in (*found.args.args, *found.args.kwonlyargs)]


def fields(tree: ast.Module, name: str) -> set[str]:
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return {
        node.target.id for node in found.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def text(version: str, name: str, *path: str) -> str:
    return ast.unparse(function(module(version, name), *path))


@pytest.mark.parametrize("version", SUPPORTED)
def test_symbols_are_there(version: str) -> None:
    for name, symbols in SYMBOLS.items():
        assert set(symbols) <= names_in(module(version, name)), name


@pytest.mark.parametrize("version", SUPPORTED)
def test_the_overrides_are_asked_for_the_model(version: str) -> None:
    """Their result is what megatron-core's optimizer is built from, behind native MuP's alone, which is refused."""
    config = module(version, "megatron.bridge.training.config")
    assert "optimizer_config_override_provider" in fields(config, "ConfigContainer")
    assert {"model", "optimizer_config"} <= fields(config, "OptimizerConfigOverrideProviderContext")
    assert arguments(function(config, "OptimizerConfigOverrideProvider", "build_config_overrides")) == [
        "self",
        "context",
    ]
    setup = text(version, "megatron.bridge.training.optim", "setup_optimizer")
    assert "optimizer_config_override_provider.build_config_overrides(" in setup
    assert "config_overrides=config_overrides" in setup
    assert setup.count("config_overrides = ") <= 2
    if setup.count("config_overrides = ") == 2:
        assert "'use_mup', False" in setup


@pytest.mark.parametrize("version", SUPPORTED)
def test_the_checkpoint_manager_is_asked(version: str) -> None:
    checkpointing = module(version, "megatron.bridge.training.checkpointing")
    for method in ("save", "load"):
        assert arguments(function(checkpointing, "DefaultCheckpointManager", method))[:2] == ["self", "ctx"]
    assert arguments(function(checkpointing, "_resolve_checkpoint_iteration")) == ["load_dir", "ckpt_step_override"]
    assert "_DIRECT_ITERATION_DIR_SENTINEL" in ast.unparse(checkpointing)
    assert "custom_manager_class" in fields(module(version, "megatron.bridge.training.config"), "CheckpointConfig")
    for name, call in (("setup", "checkpoint_manager.load("), ("train", "checkpoint_manager.save(")):
        assert call in ast.unparse(module(version, f"megatron.bridge.training.{name}"))
    utils = module(version, "megatron.bridge.training.utils.checkpoint_utils")
    assert arguments(function(utils, "get_checkpoint_name")) == ["checkpoints_path", "iteration", "release"]


@pytest.mark.parametrize("version", SUPPORTED)
def test_the_provider_is_the_models_config(version: str) -> None:
    """The constructor that is wrapped gets the object that carries the run."""
    provide = text(version, "megatron.bridge.models.gpt_provider", "GPTModelProvider", "provide")
    assert "MCoreGPTModel(self, transformer_layer_spec=" in provide.replace("\n", "")
    assert "_pre_wrap_hooks" in ast.unparse(module(version, "megatron.bridge.models.model_provider"))


@pytest.mark.parametrize("version", SUPPORTED)
def test_it_imports_transformer_engine(version: str) -> None:
    """Why Bridge cannot be imported on a machine without it, as docs/bridge.md says."""
    layers = module(version, "megatron.bridge.peft.lora_layers")
    imported = [alias.name for node in layers.body if isinstance(node, ast.Import) for alias in node.names]
    assert "transformer_engine.pytorch" in imported


@pytest.mark.parametrize("version", OLDER)
def test_older_releases_lack_a_symbol(version: str) -> None:
    """So `require` refuses them by name."""
    missing = [
        symbol
        for name, symbols in SYMBOLS.items()
        for symbol in symbols
        if symbol not in names_in(module(version, name))
    ]
    assert missing
