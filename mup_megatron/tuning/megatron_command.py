"""The command line of a run of megatron.training: its parts, and the same one for another run of the family.

Public names: `MegatronCommand`, `megatron_options`, `replaced`, `given_options`, `WATCHED`, `PLACES`. `tuning.command`
of a config is such a command line, as a user types it:

    torchrun --nproc-per-node 8 -m mup_megatron.run pretrain_gpt.py --mup-base base.yaml --num-layers 24 ...
    mup-megatron run pretrain_gpt.py ...
    pretrain_gpt.py ...

A trial, or a model of a check, is this one with the options below put in the place of the user's. Imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mup_megatron.config import Config
from mup_megatron.util.errors import UserError

WATCHED = "--watched"
"""Option of `mup-megatron run`, before the script: a file that says what is asked of the run."""

_MODULE = "mup_megatron.run"
_EXPECTED = (
    "expected SCRIPT ARGS..., mup-megatron run SCRIPT ARGS... or LAUNCHER -m mup_megatron.run SCRIPT ARGS..., for "
    "example torchrun --nproc-per-node 2 -m mup_megatron.run pretrain_gpt.py --mup-base base.yaml ..."
)
# Of a launch on one node, whose port two launches at once would share.
_MEETING = ("--standalone", "--rdzv", "--master", "--nnodes", "--node")
_PROCESSES = ("--nproc-per-node", "--nproc_per_node", "--num_gpus", "-np", "-n")

# Keys of a config that are one option of Megatron's each. A key that is null has no option.
_OPTIONS = {
    "model.num_layers": "num-layers",
    "model.hidden_size": "hidden-size",
    "model.ffn_hidden_size": "ffn-hidden-size",
    "model.num_attention_heads": "num-attention-heads",
    "model.num_query_groups": "num-query-groups",
    "model.kv_channels": "kv-channels",
    "model.num_moe_experts": "num-experts",
    "model.moe_ffn_hidden_size": "moe-ffn-hidden-size",
    "model.hidden_dropout": "hidden-dropout",
    "model.attention_dropout": "attention-dropout",
    "hparams.lr": "lr",
    "hparams.init_method_std": "init-method-std",
    "hparams.embedding_init_method_std": "embedding-init-method-std",
    "hparams.weight_decay": "weight-decay",
    "training.global_batch_size": "global-batch-size",
    "training.micro_batch_size": "micro-batch-size",
    "training.seq_length": "seq-length",
    "training.train_steps": "train-iters",
    "training.lr_schedule": "lr-decay-style",
    "training.lr_warmup_steps": "lr-warmup-iters",
    "training.lr_warmup_init": "lr-warmup-init",
    "training.lr_decay_steps": "lr-decay-iters",
    "training.lr_wsd_decay_steps": "lr-wsd-decay-iters",
    "training.clip_grad": "clip-grad",
    "training.eval_interval": "eval-interval",
    "run.seed": "seed",
}
_OF_ADAM = {"optimizer.eps": "adam-eps"}
_OF_LATENT_ATTENTION = {
    f"model.{name}": name.replace("_", "-")
    for name in ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
}
PLACES = ("tensorboard-dir", "wandb-exp-name", "wandb-save-dir")
"""Options that say where a run reports to."""

# What a trial says in another way, or what is the target's alone: its checkpoints, its end, its growing batch.
_LEFT_OUT = (
    *("mup-base", "mup-config", "mup-hparams", "mup-explain", "mup-write-config", "mup-allow-change"),
    *("train-samples", "lr-decay-samples", "lr-warmup-samples", "lr-warmup-fraction", "lr-wsd-decay-samples"),
    *("rampup-batch-size", "step-batch-size-schedule", "decrease-batch-size-if-needed"),
    *("load", "save", "save-interval", "save-retain-interval", "pretrained-checkpoint", "finetune", "ckpt-step"),
    *("non-persistent-save-interval", "non-persistent-ckpt-type", "non-persistent-global-ckpt-dir"),
    *("no-save-optim", "no-save-rng", "no-load-optim", "no-load-rng", "async-save"),
    *("exit-interval", "exit-duration-in-mins", "exit-signal-handler", "skip-train", "start-eval-at-iter"),
    *("eval-global-batch-size", "eval-micro-batch-size", "no-check-for-nan-in-loss-and-grad"),
)


@dataclass(frozen=True, kw_only=True)
class MegatronCommand:
    """A command line in parts.

    Args:
        launcher: the words before the script, `-m mup_megatron.run` included.
        script: the user's.
        arguments: the script's.
    """

    launcher: tuple[str, ...]
    script: str
    arguments: tuple[str, ...]

    @classmethod
    def read(cls, words: Sequence[str]) -> MegatronCommand:
        """The parts of a command line as it was typed.

        Raises:
            UserError: no script is found in it.
        """
        launcher, rest = _split(list(words))
        own: list[str] = []
        while rest and rest[0].startswith("-"):
            word = rest.pop(0)
            name, equals, value = word.partition("=")
            if name != "--config" or not (equals or rest):
                raise UserError(f"{word}: unknown word before the script; {_EXPECTED}")
            own = ["--mup-config", value if equals else rest.pop(0)]
        if not rest or not rest[0].endswith(".py"):
            raise UserError(f"{' '.join(rest[:1]) or 'no command line'}: not a script; {_EXPECTED}")
        return cls(launcher=tuple(launcher), script=rest[0], arguments=(*rest[1:], *own))

    @property
    def processes(self) -> int | None:
        """Of one run, as the launcher's own option says; None where it says no number."""
        for place, word in enumerate(self.launcher):
            name, equals, value = word.partition("=")
            if name in _PROCESSES:
                value = value if equals else (*self.launcher, "")[place + 1]
                return int(value) if value.isdigit() else None
        plain = self.launcher[0] == sys.executable or Path(self.launcher[0]).name.startswith("python")
        return 1 if plain else None

    @property
    def is_srun(self) -> bool:
        """Whether SLURM's variables are the launcher's own."""
        return Path(self.launcher[0]).name == "srun"

    def words(self, arguments: Sequence[str], task: Path | None = None) -> list[str]:
        """The command line with other arguments.

        Args:
            arguments: of the script.
            task: what `WATCHED` names; None as a user would type it.
        """
        watched = [] if task is None else [WATCHED, str(task)]
        return [*self.launcher, *watched, self.script, *arguments]


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """The launcher, and what comes behind it."""
    for place, word in enumerate(words[:-1]):
        if word in ("-m", "--module") and words[place + 1] == _MODULE:
            launcher = words[: place + 2] if place else [sys.executable, *words[:2]]
            if Path(launcher[0]).name == "torchrun" and not any(each.startswith(_MEETING) for each in launcher):
                launcher.insert(1, "--standalone")
            return launcher, words[place + 2 :]
    if words[1:2] == ["run"] and Path(words[0]).name == "mup-megatron":
        words = words[2:]
    return [sys.executable, "-m", _MODULE], words


def without(arguments: Sequence[str], options: Sequence[str]) -> list[str]:
    """Arguments without some options and their values. Megatron's parser takes no option by a part of its name.

    Args:
        arguments: of a script.
        options: names without dashes.
    """
    kept, dropping = [], False
    for word in arguments:
        if word.startswith("--"):
            dropping = word[2:].partition("=")[0].replace("_", "-") in options
        if not dropping:
            kept.append(word)
    return kept


def megatron_options(config: Config) -> dict[str, str]:
    """Megatron's options that make a run of the family another one, by name without dashes.

    The four multipliers, the base and the parametrization are not among them: `--mup-config` says them.

    Args:
        config: of the run that is wanted.
    """
    table = {**_OPTIONS, **(_OF_LATENT_ATTENTION if config.model.multi_latent_attention else {})}
    table |= _OF_ADAM if config.optimizer.name in ("adam", "adamw") else {}
    found = {}
    for key, option in table.items():
        section, name = key.split(".")
        value = getattr(getattr(config, section), name)
        if value is not None:
            found[option] = _word(value)
    found["min-lr"] = _word(config.training.min_lr_ratio * config.hparams.lr)
    optimizer = config.optimizer
    if not optimizer.lacks("one_minus_beta1"):
        found["adam-beta1"], found["adam-beta2"] = map(_word, optimizer.betas)
    if not optimizer.lacks("one_minus_momentum"):
        found[f"{optimizer.name}-momentum"] = _word(optimizer.momentum)
    found["max-position-embeddings"] = _word(config.max_position_embeddings)
    return found


def replaced(
    command: MegatronCommand, options: Mapping[str, str], flags: Sequence[str] = (), dropped: Sequence[str] = ()
) -> list[str]:
    """The command's arguments with options in the place of its own.

    Args:
        command: the user's.
        options: name to value.
        flags: options without a value.
        dropped: further options that are left out.
    """
    every = (*_OPTIONS.values(), *_OF_LATENT_ATTENTION.values())
    kept = without(command.arguments, (*_LEFT_OUT, *every, *options, *flags, *dropped))
    return [
        *kept,
        *(word for name, value in options.items() for word in (f"--{name}", value)),
        *map("--{}".format, flags),
    ]


def given_options(command: MegatronCommand, options: Sequence[str]) -> list[str]:
    """Those of some options that a command line has."""
    names = {word[2:].partition("=")[0] for word in command.arguments if word.startswith("--")}
    return [option for option in options if option in names]


def _word(value: Any) -> str:
    return repr(value) if isinstance(value, float) else str(value)
