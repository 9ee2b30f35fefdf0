"""Checkpoints to export, trained for a few steps in a layout, and what their own models compute."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml

from mup_megatron.config import Config, derive
from mup_megatron.convert.export import Source
from mup_megatron.engines.state import load_weights
from mup_megatron.evaluate.generate import generate
from mup_megatron.model.build import build_model
from mup_megatron.parallel import runtime
from mup_megatron.parallel.layout import resolve_layout
from mup_megatron.parallel.ranks import Rank
from mup_megatron.rules.table import Parametrization
from tests.helpers import bodies
from tests.helpers.configs import VOCABULARY, make
from tests.helpers.distributed import Ranks

# Every multiplier other than 1 and other than its inverse: hidden ×2, FFN ×3, head size ×3/2, layers ×2.
MULTIPLIERS = {
    "hparams__attention_multiplier": 1.75,
    "hparams__output_multiplier": 3.0,
    "hparams__embedding_multiplier": 0.3,
    "hparams__residual_multiplier": 5.0,
    "parametrization__depth": "completep",
    "base__num_layers": 1,
}
LLAMA = {
    "model": {
        "num_layers": 2,
        "hidden_size": 64,
        "ffn_hidden_size": 144,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 24,
    },
    "base": {"hidden_size": 32, "ffn_hidden_size": 48, "kv_channels": 16},
}
# As GPT-2 has them, heads that together are as wide as the hidden size: head size 24 over 12.
GPT = {
    "model": {"num_layers": 2, "hidden_size": 96, "ffn_hidden_size": 144, "num_attention_heads": 4},
    "base": {"hidden_size": 48, "ffn_hidden_size": 48},
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "TP 2": (2, {"parallel__tensor_model_parallel_size": 2}),
    "PP 2": (2, {"parallel__engine": "megatron", "parallel__pipeline_model_parallel_size": 2}),
    "ZeRO 1": (2, {"parallel__zero_stage": 1}),
    "ZeRO 3": (2, {"parallel__zero_stage": 3}),
    "EP 2": (2, {"parallel__expert_model_parallel_size": 2}),
}
POSITIONS = 128
# Name: architecture, whether its head is tied, layout. Among the quick ones every kind of source once.
QUICK = {
    "llama, tied": ("llama", True, "ZeRO 1"),
    "llama, untied": ("llama", False, "TP 2"),
    "gpt3, tied": ("gpt3", True, "PP 2"),
    "gpt3, untied": ("gpt3", False, "ZeRO 3"),
}
SLOW = {
    f"{architecture}, {'tied' if tied else 'untied'}, {layout}": (architecture, tied, layout)
    for architecture in ("llama", "gpt3")
    for tied in (True, False)
    for layout in list(LAYOUTS)[:5]  # without experts
}


@dataclasses.dataclass(frozen=True)
class Trained:
    """A checkpoint that was opened, and the logits of its own model."""

    source: Source
    logits: torch.Tensor


def config_of(architecture: str, tied: bool, **overrides: Any) -> Config:
    """A model with every multiplier, whose weights are large enough that its logits tell tokens apart."""
    keys: dict[str, Any] = {
        **MULTIPLIERS,
        "model__share_embeddings_and_output_weights": tied,
        "model__max_position_embeddings": POSITIONS,
        "hparams__init_method_std": 0.15,
        "training__train_steps": 3,
        "training__lr_warmup_steps": 1,
        "training__checkpoint_interval": 3,
        "parallel__tensor_model_parallel_size": 1,
        **overrides,
    }
    return make(LLAMA if architecture == "llama" else GPT, architecture, **keys)


def train(ranks: Ranks, folder: Path, config: Config, layout: str = "one rank") -> Path:
    """Three steps, so that no gain is 1 and no bias 0; the run's folder."""
    count, keys = LAYOUTS[layout]
    config = derive(config, {"run.dir": str(folder / "run"), **{k.replace("__", "."): v for k, v in keys.items()}})
    (folder / "run.yaml").write_text(yaml.safe_dump(config.model_dump()))
    ranks.run(count, bodies.train_file, path=folder / "run.yaml")
    return folder / "run"


TOKENS = torch.randint(VOCABULARY, (4, 64), generator=torch.Generator().manual_seed(3))
PROMPT = "def main("


@contextlib.contextmanager
def own_model(source: Source, parametrization: Parametrization | None = None, *, load: bool = True) -> Iterator[Any]:
    """The checkpoint's model, whole, through this project's own layers; under other multipliers where given.

    Without `load` its weights are initial ones.
    """
    parametrization = parametrization or source.parametrization
    layout = resolve_layout(source.run.config, 1)
    runtime.start_distributed(layout, Rank(), 0)
    try:
        (model,) = build_model(parametrization, layout, 0, torch.device("cpu"))
        if load:
            load_weights([model], parametrization, layout, 0, source.run.path)
        model.mtp_process, model.config.mtp_num_layers = False, None  # as `generate` has it
        yield model.eval()
    finally:
        runtime.stop_distributed()


def logits_of(model: Any) -> torch.Tensor:
    """Of 4 x 64 tokens, without what pads the vocabulary: [4, 64, v]."""
    positions = torch.arange(64)[None].expand(4, 64)
    mask = torch.ones(64, 64, dtype=torch.bool).triu(1)[None, None]
    with torch.no_grad():
        return model(TOKENS, positions, mask)[..., :VOCABULARY]


def own_logits(source: Source, parametrization: Parametrization | None = None) -> torch.Tensor:
    """The same of the checkpoint."""
    with own_model(source, parametrization) as model:
        return logits_of(model)


def own_tokens(source: Source) -> list[int]:
    """The 64 most likely tokens after the prompt, one after another."""
    with own_model(source) as model:
        return [token.id for token in generate(model, source.run.tokenizer, PROMPT, max_new_tokens=64)]


def deviation(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference of a logit over the largest logit."""
    assert found.shape == expected.shape
    return float((found - expected).abs().max() / expected.abs().max())
