"""What no single key of a config can tell, and what no text of a config may hold. Public name: `check`.

Each check is a function that says one thing that must hold, and raises ConfigError: of the model (model_checks.py,
t5_checks.py, bert_checks.py), of what grows (growth_checks.py, expert_checks.py), of the scale of weights
(scaling_checks.py), of rules over batch and tokens (horizon_checks.py), of training, data, tuning and SLURM
(run_checks.py), of every text (here).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

from mup_megatron.config import (
    bert_checks,
    expert_checks,
    growth_checks,
    horizon_checks,
    model_checks,
    run_checks,
    scaling_checks,
    t5_checks,
)
from mup_megatron.config.schema import Config
from mup_megatron.util.errors import shown
from mup_megatron.util.secrets import masked_value, url_problem


def check(config: Config) -> None:
    """Runs every check. Raises ConfigError."""
    of_models = (t5_checks, bert_checks, model_checks, expert_checks, growth_checks, scaling_checks)
    rooms = (*of_models, run_checks, horizon_checks)
    for must_hold in (_check_storage, _check_texts, *(each for room in rooms for each in room.CHECKS)):
        must_hold(config)


_WITHOUT_PASSWORD = {"slurm.container_image": "enroot takes it from its credentials file"}

_OTHER_WAYS = (
    "PostgreSQL takes a password from PGPASSWORD, ~/.pgpass or the file that PGPASSFILE names, and every other option "
    "from a service file (postgresql+psycopg:///?service=NAME), MySQL both from an option file "
    "(mysql+pymysql://user@host/name?read_default_file=/home/user/.my.cnf)"
)

# What Weights & Biases gives out as keys.
_WANDB_KEY = r"(local-)?[0-9a-f]{40}|wandb_v\d_\w+"


def _check_storage(config: Config) -> None:
    """A database's URL holds what is known to be harmless: every file of the run shows it.

    Raises:
        ConfigError: it holds something else, or is no URL; nothing of it is shown.
    """
    storage = config.tuning.storage
    if storage == "journal":
        return
    if "://" not in storage:
        raise config.error("tuning.storage", "expected journal, or a database such as sqlite:///study.db")
    if (problem := url_problem(storage)) is not None:
        raise config.error(
            "tuning.storage",
            f"may hold a password or another secret, which the run's files would show: {problem}; {_OTHER_WAYS}",
        )


def _check_texts(config: Config) -> None:
    """What is in no text of a config: secrets, which every file of the run would hold; control characters.

    Raises:
        ConfigError: names the key and never shows a secret.
    """
    for key, text in _texts(config.model_dump(), ""):
        if masked_value(text) != text:
            way = _WITHOUT_PASSWORD.get(key, "expected it in the environment or in a file of its own")
            raise config.error(key, f"holds a password or another secret, which the run's files would show; {way}")
        # Cc and Cs: control characters, and halves of characters that no file can hold.
        if not text.isprintable() and any(unicodedata.category(sign) in ("Cc", "Cs", "Zl", "Zp") for sign in text):
            raise config.error(key, f"expected text without control characters, found {shown(text)}")
    if config.run.wandb_project is not None and re.fullmatch(_WANDB_KEY, config.run.wandb_project):
        raise config.error(
            "run.wandb_project", "is a key, not a project's name; expected the key in WANDB_API_KEY, or wandb login"
        )


def _texts(value: object, key: str) -> Iterator[tuple[str, str]]:
    """Every text of plain data with its dotted key; keys are texts too."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield key, name
            yield from _texts(inner, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner, key)
