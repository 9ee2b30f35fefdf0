"""The config of a DeepSpeed engine: a user's DeepSpeed JSON, with this project's config on top.

Ours rules: a JSON key that says something else than the config is an error that names both, and blocks that would
undo the parametrization are refused by name. Public names: `deepspeed_config`, `check_settings`, `refuse`,
`half_problem`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mup_megatron.config import Config
from mup_megatron.parallel.layout import Layout
from mup_megatron.util.errors import ConfigError, UserError, no_such_file, shown
from mup_megatron.util.files import read_text

_REFUSED = {
    "scheduler": "DeepSpeed's schedulers set one rate for all groups and so erase the rates of µP; the schedule is "
    "training.lr_schedule; remove the block",
    "optimizer": "DeepSpeed would build its own groups and so lose the rates of µP; the optimizer is optimizer.name; "
    "remove the block",
    "fp16": "fp16's loss scaling is not supported; training.precision is fp32 or bf16; remove the block",
}


def deepspeed_config(config: Config, layout: Layout) -> dict[str, Any]:
    """What `deepspeed.initialize` gets.

    Args:
        config: the run, every `auto` resolved.
        layout: how ranks split the model.

    Raises:
        UserError: the JSON cannot be read.
        ConfigError: it contradicts the config.
    """
    source, given = _read(config)
    for block, problem in _REFUSED.items():
        if block in given and not (block == "fp16" and not given[block].get("enabled", True)):
            raise ConfigError(block, problem, source)
    training = config.training
    stage = layout.zero_stage
    ours = {
        "train_batch_size": (training.global_batch_size, "training.global_batch_size"),
        "train_micro_batch_size_per_gpu": (training.micro_batch_size, "training.micro_batch_size"),
        "gradient_accumulation_steps": (layout.micro_batches, "training.global_batch_size and the layout"),
        "gradient_clipping": (training.clip_grad, "training.clip_grad"),
        "zero_optimization.stage": (stage, "parallel.zero_stage"),
        "bf16.enabled": (training.precision == "bf16", "training.precision"),
    }
    result: dict[str, Any] = json.loads(json.dumps(given))
    for path, (value, key) in ours.items():
        *sections, last = path.split(".")
        target = result
        for section in sections:
            target = target.setdefault(section, {})
        if target.get(last, "auto") not in ("auto", value):
            raise ConfigError(path, f"{shown(target[last])} contradicts {key}, which makes it {value!r}", source)
        target[last] = value
    zero = result["zero_optimization"]
    offloads = (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
    if config.parallel.offload_optimizer and not offloads:
        zero["offload_optimizer"] = {"device": "cpu"}
    elif offloads and not config.parallel.offload_optimizer:
        raise ConfigError(
            "zero_optimization.offload_optimizer",
            "contradicts parallel.offload_optimizer, which is false (it decides which optimizer is built)",
            source,
        )
    device = (zero.get("offload_optimizer") or {}).get("device")
    if device == "nvme" and config.weighs_gradients:
        raise ConfigError(
            "zero_optimization.offload_optimizer.device",
            f"nvme keeps gradients where {config.weighing_key} does not reach them; expected cpu",
            source,
        )
    result.setdefault("steps_per_print", 2**31)
    result.setdefault("zero_allow_untested_optimizer", True)
    result.setdefault("zero_force_ds_cpu_optimizer", False)
    return result


def check_settings(config: Config, settings: dict[str, Any], mpu: Any = None) -> None:
    """Whether DeepSpeed itself can read what it will get; it raises whatever Python does of a value it did not expect.

    Args:
        config: the run.
        settings: of `deepspeed_config`.
        mpu: that the engine gets; None where there are no process groups.

    Raises:
        ConfigError: it cannot.
    """
    from deepspeed.runtime.config import DeepSpeedConfig

    try:
        DeepSpeedConfig(json.loads(json.dumps(settings)), mpu)
    except Exception as error:
        if config.parallel.deepspeed_config is None:
            raise  # our own settings, so our own fault
        why = " ".join((str(error) or type(error).__name__).split())
        raise config.error(
            "parallel.deepspeed_config", f"DeepSpeed cannot read {config.parallel.deepspeed_config}: {why[:400]}"
        ) from None


def half_problem(precision: str, stage: int) -> str | None:
    """What is wrong with a precision at a ZeRO stage; None if nothing is."""
    if precision not in ("bf16", "fp16") or stage > 0:
        return None
    return f"DeepSpeed's {precision} without ZeRO takes a wrong first Adam step (0.75 of it); expected stage 1 to 3"


def refuse(config: Config, layout: Layout) -> None:
    """Refuses what DeepSpeed gets silently wrong, before anything is built.

    Raises:
        ConfigError: names the key and what works.
    """
    if problem := half_problem(config.training.precision, layout.zero_stage):
        raise config.error("parallel.zero_stage", problem)
    if config.parallel.offload_optimizer and layout.zero_stage == 0:
        raise config.error("parallel.offload_optimizer", "ZeRO 0 partitions nothing to offload; expected stage 1 to 3")


def _read(config: Config) -> tuple[str | None, dict[str, Any]]:
    name = config.parallel.deepspeed_config
    if name is None:
        return None, {}
    folders = _folders(config.source)
    path = next((folder / name for folder in (Path(), *folders) if (folder / name).is_file()), None)
    if path is None:
        raise config.error("parallel.deepspeed_config", no_such_file(name, *folders))
    try:
        content = json.loads(read_text(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{name}: cannot read the DeepSpeed config: {error}") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{name}: line {error.lineno}: not valid JSON: {error.msg}") from None
    except (ValueError, RecursionError):
        raise UserError(f"{name}: not valid JSON; expected a DeepSpeed config") from None
    if (
        not isinstance(content, dict)
        or not all(isinstance(content.get(block, {}), dict) for block in ("zero_optimization", "bf16", "fp16"))
        or not isinstance(content.get("zero_optimization", {}).get("offload_optimizer") or {}, dict)
    ):
        raise UserError(f"{name}: expected a DeepSpeed config: a JSON object with blocks such as zero_optimization")
    return name, content


def _folders(config_source: str | None) -> list[Path]:
    """Where a DeepSpeed config is looked for after the working directory: the config's folder, and the one above it."""
    if not config_source:
        return []
    folder = Path(config_source).resolve().parent
    return [folder, folder.parent]
