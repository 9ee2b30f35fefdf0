"""`--mup-write-config FILE`: a Megatron command line as a config of this project, to tune the proxy of the run with.

The run itself stays a run of megatron.training. `mup-megatron tune FILE` trains the proxy with this project's own
engine, which builds the same model and the same optimizer groups, and writes a transfer record of the run's family.
`--mup-hparams` takes that record.

With a command line (`command`) the config is for trials that are runs of megatron.training themselves
(tuning/megatron.py): `mup-megatron tune --megatron` writes it.

Public names: `write_tuning_config`, `NAME`.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mup_megatron.config import Config, Model, parse_config
from mup_megatron.tuning.family import digested
from mup_megatron.util.errors import UserError
from mup_megatron.util.files import as_yaml, write_whole

NAME = "megatron-proxy"
"""Of the proxy's run, and of its folder under runs/."""

# What a proxy is validated on where the run itself keeps nothing for it.
_SPLIT = "98,2,0"
# Tensor Programs V, appendix D.4: at least 5000 steps. The other numbers are those of the shipped configs.
_LEAST_STEPS = 5000
_MOST_SEQUENCES = 256
_SEARCH = {
    "lr": {"log_uniform": [5.0e-4, 5.0e-2]},
    "init_method_std": {"log_uniform": [0.005, 0.1]},
    "embedding_multiplier": {"log_uniform": [0.5, 32.0]},
    "attention_multiplier": {"log_uniform": [0.25, 8.0]},
    "output_multiplier": {"log_uniform": [0.25, 16.0]},
}


def write_tuning_config(path: Path, config: Config, unsaid: Sequence[str], command: Sequence[str] = ()) -> None:
    """Writes the config. Its proxy has the base's sizes; its layout is left to the machine that tunes.

    Args:
        path: of the file, which is not there yet.
        config: of the run, as its command line was read.
        unsaid: options that change what is trained and that no config says (`option_check.unsaid_options`).
        command: the command line that each trial is, launcher included; empty where this project's engine trains.

    Raises:
        UserError: the base is a file of base shapes, the data are mock data and the engine is this project's, or the
            file cannot be written.
    """
    if config.base.file is not None:
        raise UserError(
            f"--mup-write-config {path}: the base is {config.base.file}, whose sizes have no names; expected base "
            "sizes (hidden_size: 256) in --mup-base, which are the proxy's too"
        )
    if list(config.data.data_path or ()) == ["mock"] and not command:
        raise UserError(f"--mup-write-config {path}: there are no data to tune on; expected --data-path")
    if path.exists():
        raise UserError(f"--mup-write-config {path}: is there already; expected a new file")
    data = _plain(config, command)
    written = parse_config(data, str(path))
    if digested(written) != digested(config):
        raise AssertionError("the config that was written is of another family than the run")
    try:
        heading = _megatron_heading(path) if command else _heading(path, config, unsaid)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, heading + as_yaml(data, width=120))
    except OSError as error:
        raise UserError(f"--mup-write-config {path}: cannot write: {error.strerror}") from None


def _validates(config: Config) -> bool:
    return float([*config.data.split.split(","), "0"][1]) > 0


def _plain(config: Config, command: Sequence[str]) -> dict[str, Any]:
    """The config's sections without what is a default, and what a search needs."""
    training = config.training
    batch = min(training.global_batch_size, _MOST_SEQUENCES)
    sections = {
        name: getattr(config, name).model_dump(mode="json", exclude_defaults=True)
        for name in ("model", "base", "parametrization", "hparams", "training", "optimizer", "data")
    }
    if not command and not _validates(config):
        sections["data"]["split"] = _SPLIT
    parallel: dict[str, Any] = {"engine": "megatron"}
    if command:  # trials have the run's own layout
        parallel = config.parallel.model_dump(mode="json", exclude_defaults=True)
    if config.optimizer.name != "adamw":  # megatron-core's distributed optimizer is AdamW's
        parallel["use_distributed_optimizer"] = False
    for kernel in Model.PLAIN_KERNELS:  # which kernels compute is for the machine to choose that tunes
        if kernel != "transformer_impl":
            sections["model"].pop(kernel, None)
    return {
        "run": {"name": NAME, "dir": f"runs/{NAME}", "seed": config.run.seed},
        **sections,
        "proxy": dict(config.base.sizes),
        "parallel": parallel,
        "tuning": {
            **({"command": list(command)} if command else {}),
            "record": f"runs/{NAME}/transfer.json",
            "trials": 32,
            "sampler": "quasi_random",
            "pruner": "successive_halving",
            "repeat_best": 2,
            "train_steps": min(training.train_steps, max(_LEAST_STEPS, training.train_steps // 10)),
            # A run of megatron.training keeps the batch that its layout shares out.
            **({} if command else {"global_batch_size": batch, "micro_batch_size": math.gcd(batch, 8)}),
            "max_compute_share": 0.5,
            "search": _SEARCH,
        },
    }


def _megatron_heading(path: Path) -> str:
    return _wrapped(
        [
            "A run of megatron.training, to tune its proxy by itself: each trial is tuning.command with the proxy's "
            f"sizes and the trial's values in it. mup-megatron tune {path} goes on with it.",
            f"Then start the run with --mup-hparams runs/{NAME}/transfer.json in place of --lr, --init-method-std and "
            "--weight-decay. model:, base:, training: and data: say what the command line says, and stay as they are; "
            "those under run:, proxy: and tuning: may be changed before the first trial.",
        ]
    )


def _heading(path: Path, config: Config, unsaid: Sequence[str]) -> str:
    lines = [
        f"The family of a run of megatron.training, to tune its proxy: mup-megatron tune {path}",
        f"Then start the run with --mup-hparams runs/{NAME}/transfer.json in place of --lr, --init-method-std "
        "and --weight-decay. What a trial costs: mup-megatron plan. Sizes under base: define the hyperparameters and "
        "stay as they are; those under proxy: may be larger.",
    ]
    if unsaid:
        lines.append(
            f"The proxy trains without these options, for which a config has no key: {', '.join(unsaid)}. Values that "
            "depend on them do not transfer. mup-megatron tune --megatron trains the proxy with them."
        )
    if not _validates(config):
        lines.append(
            f"The run keeps nothing to validate on (--split {config.data.split}), by which trials are compared: the "
            f"proxy's split is {_SPLIT}."
        )
    return _wrapped(lines)


def _wrapped(lines: Sequence[str]) -> str:
    """Comments of a YAML file."""
    return (
        "".join(
            f"# {line}\n"
            for text in lines
            for line in textwrap.wrap(text, 118, break_long_words=False, break_on_hyphens=False)
        )
        + "\n"
    )
