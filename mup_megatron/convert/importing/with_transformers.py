"""What the installed transformers makes of a folder: its config, its logits.

Public names: `version`, `keys_of`, `read_config`, `logits`. It is no dependency: nothing here is imported before it is
asked for, and `version` says whether it is there.
"""

from __future__ import annotations

import copy
import importlib.metadata
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

from mup_megatron.parallel.upstream import importable
from mup_megatron.util.errors import UserError


def version() -> str | None:
    """Of transformers; None where it is not installed."""
    return importlib.metadata.version("transformers") if importable("transformers") else None


def keys_of(said: Mapping[str, Any]) -> list[str] | None:
    """The keys of config.json that the class of its `model_type` reads; None where there is no such class here.

    Args:
        said: of config.json. Of the keys that every model's class has, only those that stand in it count.
    """
    if version() is None:
        return None
    import transformers

    if said["model_type"] not in transformers.CONFIG_MAPPING:
        return None
    common = transformers.PretrainedConfig().to_dict()
    own = transformers.CONFIG_MAPPING[said["model_type"]]().to_dict()
    return [key for key in own if key in said or key not in common]


def read_config(path: Path, said: Mapping[str, Any]) -> dict[str, Any]:
    """What the class reads in config.json, with its defaults.

    Args:
        path: for the message.
        said: of the file, with a `model_type` that the class exists of.

    Raises:
        UserError: transformers does not take it.
    """
    import transformers

    with _quiet():
        try:
            made = transformers.CONFIG_MAPPING[said["model_type"]].from_dict(copy.deepcopy(dict(said)))
            found: dict[str, Any] = made.to_dict()
        except Exception as error:  # the file decides what
            raise _not_read(path, error) from None
    return found


def logits(folder: Path, tokens: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Of a folder's model in float32, on the CPU.

    Args:
        folder: of safetensors; nothing of it is executed.
        tokens: [b, s].
        device: where they are computed.

    Returns:
        [b, s, vocabulary].

    Raises:
        UserError: transformers does not take the folder.
    """
    import transformers

    loader: Any = transformers.AutoModelForCausalLM
    dtype = "dtype" if Version(transformers.__version__) >= Version("4.56") else "torch_dtype"
    with _quiet():
        try:
            model = loader.from_pretrained(
                folder,
                **{dtype: torch.float32},
                attn_implementation="eager",
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
            )
            with torch.no_grad():
                found: torch.Tensor = model.to(device).eval()(tokens.to(device)).logits
        except Exception as error:  # the folder decides what
            raise _not_read(folder, error) from None
    return found.float().cpu()


def _not_read(path: Path, error: Exception) -> UserError:
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return UserError(f"{path}: transformers {version()} does not take it ({type(error).__name__}: {said})")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without warnings and progress bars: what is wrong is said in one sentence."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
