"""`--mup-write-config FILE`: a Megatron command line as a config of this project, to tune the proxy of the run with.

The run itself stays a run of megatron.training. `mup-megatron tune FILE` trains the proxy with this project's own
engine, which builds the same model and the same optimizer groups, and writes a transfer record of the run's family.
`--mup-hparams` takes that record.

Public name: `write_tuning_config`.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from mup_megatron.config import Config, Model, parse_config
from mup_megatron.errors import UserError
from mup_megatron.files import write_whole
from mup_megatron.tuning.family import digested

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


def write_tuning_config(path: Path, config: Config, unsaid: Sequence[str]) -> None:
    """Writes the config. Its proxy has the base's sizes; its layout is left to the machine that tunes.

    Args:
        path: of the file, which is not there yet.
        config: of the run, as its command line was read.
        unsaid: options that change what is trained and that no config says (`option_check.unsaid_options`).

    Raises:
        UserError: the base is a file of base shapes, the data are mock data, or the file cannot be written.
    """
    if config.base.file is not None:
        raise UserError(
            f"--mup-write-config {path}: the base is {config.base.file}, whose sizes have no names; expected base "
            "sizes (hidden_size: 256) in --mup-base, which are the proxy's too"
        )
    if list(config.data.data_path or ()) == ["mock"]:
        raise UserError(f"--mup-write-config {path}: there are no data to tune on; expected --data-path")
    if path.exists():
        raise UserError(f"--mup-write-config {path}: is there already; expected a new file")
    data = _plain(config)
    written = parse_config(data, str(path))
    if digested(written) != digested(config):
        raise AssertionError("the config that was written is of another family than the run")
    try:
        write_whole(path, _heading(path, unsaid) + yaml.safe_dump(data, sort_keys=False, width=120))
    except OSError as error:
        raise UserError(f"--mup-write-config {path}: cannot write: {error.strerror}") from None


def _plain(config: Config) -> dict[str, Any]:
    """The config's sections without what is a default, and what a search needs."""
    training = config.training
    batch = min(training.global_batch_size, _MOST_SEQUENCES)
    sections = {
        name: getattr(config, name).model_dump(mode="json", exclude_defaults=True)
        for name in ("model", "base", "parametrization", "hparams", "training", "optimizer", "data")
    }
    for kernel in Model.PLAIN_KERNELS:  # which kernels compute is for the machine to choose that tunes
        if kernel != "transformer_impl":
            sections["model"].pop(kernel, None)
    return {
        "run": {"name": "megatron-proxy", "dir": "runs/megatron-proxy", "seed": config.run.seed},
        **sections,
        "proxy": dict(config.base.sizes),
        "parallel": {"engine": "megatron"},
        "tuning": {
            "record": "runs/megatron-proxy/transfer.json",
            "trials": 32,
            "sampler": "quasi_random",
            "pruner": "successive_halving",
            "repeat_best": 2,
            "train_steps": min(training.train_steps, max(_LEAST_STEPS, training.train_steps // 10)),
            "global_batch_size": batch,
            "micro_batch_size": math.gcd(batch, 8),
            "max_compute_share": 0.5,
            "search": _SEARCH,
        },
    }


def _heading(path: Path, unsaid: Sequence[str]) -> str:
    lines = [
        f"The family of a run of megatron.training, to tune its proxy: mup-megatron tune {path}",
        "Then start the run with --mup-hparams runs/megatron-proxy/transfer.json in place of --lr, --init-method-std "
        "and --weight-decay. What a trial costs: mup-megatron plan. Sizes under base: define the hyperparameters and "
        "stay as they are; those under proxy: may be larger.",
    ]
    if unsaid:
        lines.append(
            f"The proxy trains without these options, for which a config has no key: {', '.join(unsaid)}. Values that "
            "depend on them do not transfer."
        )
    return (
        "".join(
            f"# {line}\n"
            for text in lines
            for line in textwrap.wrap(text, 118, break_long_words=False, break_on_hyphens=False)
        )
        + "\n"
    )
