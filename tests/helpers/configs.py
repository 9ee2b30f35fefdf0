"""Configs that tests share: small models whose sizes grow by different ratios, none of them 1."""

from __future__ import annotations

import copy
import json
import os
import platform
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import yaml

from mup_megatron.config import Config, parse_config
from mup_megatron.config.load import override
from mup_megatron.data.record import FORMAT

_TRAINING = {
    "global_batch_size": 8,
    "micro_batch_size": 4,
    "seq_length": 32,
    "train_steps": 20,
    "lr_schedule": "cosine",
    "lr_warmup_steps": 2,
    "min_lr_ratio": 0.1,
    "precision": "fp32",
    "checkpoint_interval": 0,  # a test that looks at checkpoints asks for them
}

# hidden ×3/2, FFN ×5/2, heads ×2, query groups ×4; head size fixed.
MIXED = {
    "model": {
        "num_layers": 2,
        "hidden_size": 96,
        "ffn_hidden_size": 160,
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "kv_channels": 8,
    },
    "base": {"hidden_size": 64, "ffn_hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 1},
}
# hidden ×2, FFN ×3, heads ×1 (4 heads in both), head size ×3/2.
HEAD_SIZE = {
    "model": {
        "num_layers": 2,
        "hidden_size": 64,
        "ffn_hidden_size": 144,
        "num_attention_heads": 4,
        "num_query_groups": 4,
        "kv_channels": 24,
    },
    "base": {"hidden_size": 32, "ffn_hidden_size": 48, "kv_channels": 16},
}
# hidden ×3/2, expert FFN ×5/2, dense FFN ×4, shared FFN ×3, heads ×2; four experts, the first layer dense.
MOE = {
    "model": {
        "num_layers": 2,
        "hidden_size": 96,
        "ffn_hidden_size": 128,
        "num_attention_heads": 8,
        "kv_channels": 8,
        "num_moe_experts": 4,
        "moe_ffn_hidden_size": 80,
        "moe_layer_freq": [0, 1],
        "moe_shared_expert_intermediate_size": 48,
        "moe_shared_expert_gate": True,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 0.01,
    },
    "base": {
        "hidden_size": 64,
        "ffn_hidden_size": 32,
        "num_attention_heads": 4,
        "moe_ffn_hidden_size": 32,
        "moe_shared_expert_intermediate_size": 16,
    },
}
# hidden ×3/2, FFN ×5/2, heads ×2, query rank fixed, key/value rank ×3, head: nope ×3/2, rope ×2, value ×7/2.
MLA = {
    "model": {
        "num_layers": 2,
        "hidden_size": 96,
        "ffn_hidden_size": 160,
        "num_attention_heads": 8,
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": 24,
        "kv_lora_rank": 48,
        "qk_head_dim": 12,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 14,
    },
    "base": {
        "hidden_size": 64,
        "ffn_hidden_size": 64,
        "num_attention_heads": 4,
        "kv_lora_rank": 16,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 4,
    },
}

# An encoder of three layers and a decoder of two: hidden ×3/2, FFN ×5/2, heads ×2, head size ×3/2.
T5 = {
    "model": {
        "num_layers": 2,
        "encoder_num_layers": 3,
        "hidden_size": 96,
        "ffn_hidden_size": 160,
        "num_attention_heads": 8,
        "kv_channels": 12,
    },
    "base": {"hidden_size": 64, "ffn_hidden_size": 64, "num_attention_heads": 4, "kv_channels": 8},
}


# Real text, small: files of the running interpreter's standard library.
TEXT = ("argparse.py", "ast.py", "inspect.py", "typing.py", "turtle.py")
VOCABULARY = 375  # padded to 384: padding is part of what is tested
_SHARED = str(Path(tempfile.gettempdir()) / f"mup-megatron-tests-{os.getuid()}-{platform.python_version()}-{FORMAT}")


def make(growth: dict[str, Any], architecture: str = "gpt3", **overrides: Any) -> Config:
    """A config; keyword arguments are dotted keys with `__` for the dot."""
    data = {
        "run": {"dir": "unused", "seed": 7},
        "model": {"architecture": architecture, **growth["model"]},
        "base": growth["base"],
        "hparams": {"lr": 8e-3, "init_method_std": 0.05, "weight_decay": 0.1},
        "training": _TRAINING,
        "data": {
            "files": [str(Path(sysconfig.get_paths()["stdlib"]) / name) for name in TEXT],
            "tokenizer": {"library": "sentencepiece", "vocab_size": VOCABULARY},
            "split": "100,0,0",
            "dir": _SHARED,
        },
    }
    data = copy.deepcopy(data)
    for key, value in overrides.items():
        override(data, key.replace("__", "."), value, "test")
    return parse_config(data, "test")


def make_t5(growth: dict[str, Any] = T5, /, **overrides: Any) -> Config:
    """An encoder-decoder, with pairs of its own."""
    data = {
        "pairs": {"jsonl": str(pairs_file()), "source_key": "line", "target_key": "turned"},
        "tokenizer": {"library": "sentencepiece", "vocab_size": VOCABULARY},
        "split": "100,0,0",
        "dir": f"{_SHARED}-pairs",
    }
    return make(growth, "t5", **{"data": data, **overrides})


def pairs_file() -> Path:
    """Lines of the standard library of at most 40 characters, each beside its words in the other order: 1500 of them.

    Written once. Every process that writes it writes the same, to the time of change, which data are known by.
    """
    path = Path(f"{_SHARED}.jsonl")
    if not path.exists():
        texts = [(Path(sysconfig.get_paths()["stdlib"]) / name).read_text() for name in TEXT]
        lines = [
            line.strip() for text in texts for line in text.splitlines() if len(line.split()) > 1 and len(line) < 40
        ]
        pairs = [json.dumps({"line": line, "turned": " ".join(line.split()[::-1])}) for line in lines[:1500]]
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text("\n".join(pairs) + "\n")
        os.utime(partial, ns=(0, 0))
        partial.replace(path)
    return path


SEARCH = {"lr": {"log_uniform": [1e-3, 3e-2]}, "output_multiplier": {"log_uniform": [0.25, 4.0]}}
SIZES = {"hidden_size": 64, "ffn_hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 1}


def pipeline_file(folder: Path, **overrides: Any) -> Path:
    """Five trials of 8 steps, halved at 2 and 4, two repetitions of the best, a target of 8 steps at TP 2."""
    keys = {
        "run__dir": str(folder / "run"),
        "data__split": "80,20,0",
        "training__train_steps": 8,
        "training__eval_interval": 4,
        "training__eval_steps": 2,
        "training__checkpoint_interval": 4,
        "tuning__trials": 5,
        "tuning__repeat_best": 1,
        "tuning__max_compute_share": 10.0,
        "tuning__search": SEARCH,
        "proxy": SIZES,
        **overrides,
    }
    config = make(MIXED, "gpt3", **keys)
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config.model_dump()))
    return path
