"""`mup-megatron run` in a gloo rank that is there already: a run costs seconds, not the start of a process."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel
from torch.distributed.tensor import DTensor, distribute_tensor

from mup_megatron.parallel.ranks import Rank
from tests.helpers.commands import mup
from tests.helpers.distributed import Ranks

# Where no folder beside it has the name of a package that it imports, as tests/deepspeed has.
SCRIPT = Path(__file__).parents[1] / "megatron_training" / "pretrain_gpt.py"

SMALL = {
    "num-layers": 2,
    "hidden-size": 64,
    "ffn-hidden-size": 128,
    "num-attention-heads": 4,
    "kv-channels": 16,
    "seq-length": 16,
    "max-position-embeddings": 16,
    "micro-batch-size": 2,
    "global-batch-size": 2,
    "train-iters": 2,
    "lr": 1e-2,
    "lr-decay-style": "constant",
    "init-method-std": 0.05,
    "seed": 7,
    "tokenizer-type": "NullTokenizer",
    "vocab-size": 100,
    "transformer-impl": "local",
    "distributed-backend": "gloo",
    "eval-iters": 0,
    "eval-interval": 1000,
    "hidden-dropout": 0,
    "attention-dropout": 0,
    "num-workers": 0,
    "log-interval": 1,
}
BACKENDS = ("flash", "fused", "unfused")
FLAGS = (
    "mock-data",
    *(f"no-{name}-fusion" for name in ("bias-gelu", "bias-dropout", "masked-softmax", "gradient-accumulation", "rope")),
    "no-bias-swiglu-fusion",
    "no-persist-layer-norm",
)


def words(
    folder: Path, *extra: str, base: str = "hidden_size: 32\nnum_attention_heads: 2\n", **changed: Any
) -> list[str]:
    """A small model's command line on a CPU; keyword arguments replace or (None) remove options."""
    (folder / "base.yaml").write_text(base)
    valued = {**SMALL, "mup-base": folder / "base.yaml", "data-cache-path": folder / "cache"}
    valued |= {name.replace("_", "-"): value for name, value in changed.items()}
    said = [word for name, value in valued.items() if value is not None for word in (f"--{name}", str(value))]
    return [*(f"--{flag}" for flag in FLAGS), *said, *extra]


def run(ranks: Ranks, folder: Path, *extra: str, count: int = 1, **changed: Any) -> list[dict[str, Any]]:
    """A small model's run: what `train` returns on each of so many ranks. What `train` takes no word for is its own."""
    own = {name: changed.pop(name) for name in ("plainly", "initial", "dropout_seed", "script") if name in changed}
    return ranks.run(count, train, words=words(folder, *extra, **changed), **own)


def proof(what: str, command: list[str], folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """`coord-check` or `stability` of a script's command line, one seed.

    Args:
        what: which.
        command: the folder of the config (proxy.yaml), then script and options.
        folder: for run/.
        options: of the command.
    """
    config, *script = command
    where = (Path(config) / "proxy.yaml", f"run.dir={folder / 'run'}")
    return mup(what, "--megatron", *where, "--seeds", "1", "--no-beside", *options, "--", *script)


def assert_same(ours: dict[str, Any], plain: dict[str, Any], steps: int) -> None:
    """The losses of so many micro-batches and the values after them are the same, to the last bit."""
    assert ours["status"] == plain["status"] == 0, ours["said"] + plain["said"]
    assert plain["steps"] == ours["steps"], (plain["steps"], ours["steps"])
    assert len(plain["steps"]) == steps, plain["steps"]
    assert set(plain["final"]) == set(ours["final"]) != set()
    for tensor, value in plain["final"].items():
        assert np.array_equal(ours["final"][tensor], value), tensor


def assert_moved(found: dict[str, Any]) -> None:
    """Every tensor is another at the end than at the start."""
    still = [tensor for tensor, value in found["initial"].items() if np.array_equal(found["final"][tensor], value)]
    assert still == []


def warm(rank: Rank) -> None:
    """Imports what takes longest, so that one rank does not wait in a collective for another that has not."""
    import megatron.training.training  # noqa: F401


def train(
    rank: Rank,
    *,
    words: list[str],
    plainly: bool = False,
    initial: dict[str, np.ndarray] | None = None,
    dropout_seed: int | None = None,
    tokens: torch.Tensor | None = None,
    script: Path = SCRIPT,
) -> dict[str, Any]:
    """Runs a user's script to its end.

    Args:
        rank: where.
        words: its command line.
        plainly: without `mup-megatron run` and its option, as upstream alone runs it.
        initial: values by parameter to start from, instead of those that are drawn.
        dropout_seed: of what is drawn once the model is there. Initial values take their numbers from elsewhere in µP.
        tokens: to compute logits of, once the run has ended.
        script: the user's.

    Returns:
        Exit status, what was said on stderr and what was printed, the losses of micro-batches to the last bit and as
        they were logged, values at the start and at the end by upstream's names, groups by parameter at the start and
        at the end, rows of the vocabulary, what Transformer Engine was told of attention backends, and the logits of
        `tokens`.
    """
    from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
    from megatron.core.rerun_state_machine import destroy_rerun_state_machine
    from megatron.training import global_vars, training

    from mup_megatron import megatron_training
    from mup_megatron.engines.experts import forget_logged_losses
    from mup_megatron.megatron_training.options import prepare
    from mup_megatron.megatron_training.script import run_script
    from mup_megatron.model import build as model
    from mup_megatron.rules import table
    from mup_megatron.util.errors import UserError

    _read_docstrings_once()
    model._SPECS.clear()  # as in a process of its own, shapes are read from models first
    argv, path, environment = list(sys.argv), list(sys.path), dict(os.environ)
    for backend in BACKENDS:  # what another test's model said of it
        os.environ.pop(f"NVTE_{backend.upper()}_ATTN", None)
    out, err = io.StringIO(), io.StringIO()
    found: dict[str, Any] = {"status": 0, "vocabulary": None, "steps": [], "initial": {}, "final": {}, "groups": {}}
    setup = training.setup_model_and_optimizer
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings(action="ignore"):
        try:
            prepare()
            training.setup_model_and_optimizer = _observed(setup, found, initial, dropout_seed)
            if plainly:
                sys.argv = [str(script), *_without_base(words)]
                runpy.run_path(str(script), run_name="__main__")
            else:
                run_script([str(script), *words])
                current = megatron_training.current()
                assert current is not None
                words_of = current.parametrization.tensors[table.WORD_EMBEDDINGS]
                found["vocabulary"] = words_of.shape.spec.shape[0]
        except SystemExit as leaving:
            found["status"] = leaving.code
        except UserError as error:
            found["status"] = 2
            err.write(f"mup-megatron: error: {error}")
        finally:
            training.setup_model_and_optimizer = setup
            found["backends"] = {backend: os.environ.get(f"NVTE_{backend.upper()}_ATTN") for backend in BACKENDS}
            megatron_training.end()
            global_vars.destroy_global_vars()
            destroy_num_microbatches_calculator()
            destroy_rerun_state_machine()
            forget_logged_losses()
            training._STARTUP_TIMESTAMPS.update(dict.fromkeys(training._STARTUP_TIMESTAMPS))
            os.environ.clear()
            os.environ.update(environment)
            sys.argv[:], sys.path[:] = argv, path
    losses = [float(loss) for loss in re.findall(r"lm loss: (\S+)", out.getvalue())]
    if tokens is not None:
        found["logits"] = _logits(found["chunks"][-1], tokens)
    if "chunks" in found:
        found["final"] = _values(found.pop("chunks"))
        found["ended"] = _groups(*found.pop("optimizer"))
    return {**found, "said": err.getvalue(), "printed": out.getvalue(), "losses": losses}


def _read_docstrings_once() -> None:
    """Each parser that upstream builds parses the source of its configs anew, which takes longer than the steps."""
    from megatron.training.argument_utils import ArgumentGroupFactory

    read = ArgumentGroupFactory._get_field_docstrings
    if read.__name__ != "once":
        held: dict[type, dict[str, str]] = {}

        def once(self: Any, config: type) -> dict[str, str]:
            if config not in held:
                held[config] = read(self, config)
            return held[config]

        ArgumentGroupFactory._get_field_docstrings = once


def _without_base(words: list[str]) -> list[str]:
    at = words.index("--mup-base") if "--mup-base" in words else len(words)
    return words[:at] + words[at + 2 :]


def _logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Of a model that is in one stage, [sequences, length, rows of the vocabulary]."""
    count, length = tokens.shape
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    with torch.no_grad():
        return model.eval()(
            tokens, torch.arange(length)[None].expand(count, length), mask, runtime_gather_output=True
        ).float()


def _observed(
    setup: Any, found: dict[str, Any], initial: dict[str, np.ndarray] | None, dropout_seed: int | None
) -> Any:
    """Upstream's setup of model and optimizer, looked at, its parameters at given values."""

    def observed(*args: Any, **kwargs: Any) -> Any:
        model, optimizer, scheduler = setup(*args, **kwargs)
        chunks = [chunk.module for chunk in model]
        named = [pair for chunk in chunks for pair in chunk.named_parameters()]
        if initial is not None:
            assert {name for name, _ in named} == set(initial)
            for name, parameter in named:
                value = torch.from_numpy(initial[name])
                if isinstance(parameter, DTensor):
                    value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
                parameter.data.copy_(value)
            optimizer.reload_model_params()
        names = {id(parameter): name for name, parameter in named}
        found["groups"] = _groups(optimizer, names)
        found["optimizer"] = optimizer, names
        found["initial"], found["chunks"] = _values(chunks), chunks
        hook = lambda _module, _inputs, losses: found["steps"].append(losses.detach().double().mean().item())  # noqa: E731
        chunks[-1].register_forward_hook(hook)
        if dropout_seed is not None:
            tensor_parallel.model_parallel_cuda_manual_seed(dropout_seed)
            torch.manual_seed(dropout_seed)
        return model, optimizer, scheduler

    return observed


def _groups(optimizer: Any, names: dict[int, str]) -> dict[str, dict[str, Any]]:
    """Of every parameter, what its group says."""
    return {
        names[id(parameter)]: {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) in names
    }


def _values(chunks: list[Any]) -> dict[str, np.ndarray]:
    pairs = [pair for chunk in chunks for pair in chunk.named_parameters()]
    return {name: _whole(parameter).float().numpy().copy() for name, parameter in pairs}


def _whole(parameter: torch.nn.Parameter) -> torch.Tensor:
    """What ranks hold of a parameter under FSDP, put together; elsewhere what this rank holds."""
    value = parameter.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value
