"""The imported model's logits beside those of transformers' model of the source. Public names: `compare`, `BOUND`."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch

from mup_megatron.convert.importing import with_transformers
from mup_megatron.convert.importing.config_json import read_json
from mup_megatron.convert.saved_model import load_saved
from mup_megatron.convert.saved_run import SavedRun
from mup_megatron.parallel import runtime
from mup_megatron.parallel.layout import resolve_layout
from mup_megatron.parallel.ranks import Rank, device_of
from mup_megatron.util.errors import UserError

BOUND = 1e-4
"""Largest difference of a logit over the largest logit, in float32.

Both add up the same products in another order. That made 8e-7 to 3e-6 in Llamas of 2 to 80 layers and hidden sizes 256
and 1024 (1e-5 at most in tests/convert); a wrong tensor, base of RoPE or activation makes 1e-2 and more.
"""
_TOKENS = (2, 64)
_BYTES = 5
"""Of memory per weight: float32, and a quarter for what is computed."""


def compare(source: Path, run: SavedRun, say: Callable[[str], None]) -> float | None:
    """Computes both, one model after the other, in this process. Starts and ends the process groups of one rank.

    Args:
        source: the Hugging Face folder.
        run: the checkpoint that was made of it.
        say: takes the line that says why nothing was compared.

    Returns:
        The largest difference of a logit over the largest logit; None where nothing was compared.

    Raises:
        UserError: it is above BOUND, or transformers does not take the source.
    """
    if (why := _obstacle(source, run)) is not None:
        say(f"logits are not compared: {why}")
        return None
    vocabulary = int(run.tokenizer.vocab_size)
    length = min(_TOKENS[1], run.config.max_position_embeddings)
    tokens = torch.randint(vocabulary, (_TOKENS[0], length), generator=torch.Generator().manual_seed(1))
    layout = resolve_layout(run.config, 1)
    try:
        device = runtime.start_distributed(layout, Rank(), run.config.run.seed)
        theirs = with_transformers.logits(source, tokens, device)[..., :vocabulary]
        (model,) = load_saved(run, layout, 0, device)
        positions = torch.arange(length, device=device).expand_as(tokens)
        mask = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)[None, None]
        with torch.no_grad():
            ours = model(tokens.to(device), positions, mask)[..., :vocabulary].float().cpu()
        del model
    finally:
        runtime.stop_distributed()
    found = float((ours - theirs).abs().max() / theirs.abs().max())
    if not found <= BOUND:
        raise UserError(
            f"{source}: logits of the imported model differ from those of transformers {with_transformers.version()} "
            f"by {found:.1e} of the largest; expected at most {BOUND:.0e} (--no-check imports without comparing)"
        )
    return found


def _obstacle(source: Path, run: SavedRun) -> str | None:
    """Why both models cannot be computed here; None if they can."""
    if not (source / "config.json").is_file():
        return "transformers does not read checkpoints of Megatron"
    if with_transformers.version() is None:
        return "transformers is not installed"
    if with_transformers.keys_of(read_json(source / "config.json")) is None:
        return f"transformers {with_transformers.version()} does not know this class"
    needed = _BYTES * sum(math.prod(shape) for shape in run.weights().shapes.values())
    free = _free_memory(device_of(Rank()))
    if needed > free:
        return f"they take {needed / 1e6:,.1f} MB of memory, and {free / 1e6:,.1f} MB are free"
    return None


def _free_memory(device: torch.device) -> int:
    """Bytes that a process can still have, on the CPU and, where that is another place, on the device."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return min(free, torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else free
