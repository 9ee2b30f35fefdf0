"""`python -m tests.helpers.observed OUT HOW SCRIPT ARGS...` runs a script and writes what it saw.

HOW is `run` (through `mup-megatron run`), `run:FOLDER` (the same with that tree first on the path), `without:NAME`
(`run` with one of its patches left out), `plain` (the script alone), `undone` (the same after every patch of `run` was
applied and undone) or a folder (the script alone with that tree first on the path). OUT.json gets the place of
GPTModel, the optimizer's groups by parameter and the loss of every micro-batch; OUT.npz the initial values.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np


def main(out: Path, how: str, arguments: list[str]) -> None:
    kind, _, name = how.partition(":")
    if kind not in ("run", "without", "plain", "undone"):
        sys.path.insert(0, how)
    elif kind == "run" and name:
        sys.path.insert(0, name)
    if kind not in ("run", "without"):
        from mup_megatron.megatron_training.options import prepare

        prepare()  # the script binds `pretrain` before it reads its arguments; with CUDA that does not matter
    if kind == "undone":
        from mup_megatron import megatron_training
        from mup_megatron.patches import apply_patches, revert_patches
        from mup_megatron.patches.megatron_training import entry_patches

        apply_patches(entry_patches(megatron_training), cuda=False)
        revert_patches(entry_patches(megatron_training))
    if kind == "without":
        leave_out(name)
    seen: dict[str, Any] = {"losses": []}
    observe(out, seen)
    if kind in ("run", "without"):
        from mup_megatron.megatron_training.script import run_script

        run_script(arguments)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
    out.with_suffix(".json").write_text(json.dumps(seen))


def leave_out(name: str) -> None:
    """Takes one patch out of what `mup-megatron run` applies."""
    from mup_megatron.patches import megatron_training

    original = megatron_training.entry_patches

    def others(entry: Any) -> Any:
        kept = tuple(patch for patch in original(entry) if patch.name != name)
        assert len(kept) + 1 == len(original(entry))
        return kept

    megatron_training.entry_patches = others


def observe(out: Path, seen: dict[str, Any]) -> None:
    """Looks at the model and the optimizer when upstream has set them up, and at every forward pass."""
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.training import training

    original = training.setup_model_and_optimizer

    def setup(*args: Any, **kwargs: Any) -> Any:
        model, optimizer, scheduler = original(*args, **kwargs)
        chunks = [chunk.module for chunk in model]
        seen["file"] = sys.modules[GPTModel.__module__].__file__
        seen["groups"] = groups(chunks, optimizer)
        arrays = {name: parameter.detach().clone().numpy() for name, parameter in parameters(chunks)}
        np.savez(out.with_suffix(".npz"), **arrays)
        chunks[-1].register_forward_hook(lambda _module, _inputs, losses: seen["losses"].append(float(losses.mean())))
        return model, optimizer, scheduler

    training.setup_model_and_optimizer = setup


def parameters(chunks: list[Any]) -> list[tuple[str, Any]]:
    from mup_megatron import megatron_training
    from mup_megatron.model.global_names import named_parameters

    if megatron_training.current() is None:
        return [pair for chunk in chunks for pair in chunk.named_parameters()]
    return list(named_parameters(chunks))


def groups(chunks: list[Any], optimizer: Any) -> dict[str, Any]:
    names = {id(parameter): name for name, parameter in parameters(chunks)}
    keys = ("rule", "lr_multiplier", "max_lr", "min_lr", "eps", "wd_mult")
    return {
        names[id(parameter)]: [group.get(key) for key in keys]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
