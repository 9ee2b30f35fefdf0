"""What `auto` means on this machine, and on one with CUDA. Public names: `resolve_auto`, `as_on_cuda`."""

from __future__ import annotations

from mup_megatron.config import Config, derive
from mup_megatron.parallel.upstream import CUDA_ONLY, importable

_TE = "transformer_engine"


def resolve_auto(config: Config) -> Config:
    """Replaces every `auto` implementation by what it means on this machine, once.

    That a package happens to be importable never changes a model silently: the result is printed and recorded.

    Raises:
        ConfigError: an implementation is asked for that is not installed.
    """
    import torch

    cuda = torch.cuda.is_available()
    training, optimizer, model = config.training, config.optimizer, config.model
    precision = training.precision
    if precision == "auto":
        precision = "bf16" if cuda else "fp32"
    implementation: str = optimizer.implementation
    if config.parallel.engine == "megatron":
        implementation = _megatron_optimizer(config)
    elif implementation == "auto":
        implementation = _deepspeed_optimizer(config, cuda)
    if config.run.wandb_project is not None and not importable("wandb"):
        raise config.error("run.wandb_project", "wandb is not installed; expected pip install wandb, or null")
    kernels = _kernels(config, cuda)
    for key, value in (("optimizer.implementation", implementation), *kernels.items()):
        if value in CUDA_ONLY and not cuda:
            raise config.error(key, f"{value} computes on CUDA alone, and none is here; expected auto")
        if value in (*CUDA_ONLY, "emerging_optimizers") and not importable(value):
            raise config.error(
                key, f"{value} is not installed; expected auto, or one that is (see mup-megatron doctor)"
            )
    if kernels["model.norm_implementation"] == "apex" and model.normalization != "LayerNorm":
        raise config.error("model.norm_implementation", f"apex has no {model.normalization}; expected torch")
    return derive(
        config,
        {"training.precision": precision, "optimizer.implementation": implementation, **kernels},
    )


def as_on_cuda(config: Config) -> Config:
    """Precision and attention as `auto` means them where there is CUDA: of a run that is planned on another machine."""
    keys = {}
    if config.training.precision == "auto":
        keys["training.precision"] = "bf16"
    if config.model.core_attention == "auto":
        keys["model.core_attention"] = _attention(config, cuda=True)
    return derive(config, keys)


def _attention(config: Config, cuda: bool) -> str:
    model = config.model
    if model.transformer_impl == _TE and not model.biases_attention:
        return _TE
    plain = model.softmax_type == "vanilla"  # all that torch's attention has
    return "sdpa" if plain and (cuda or config.parallel.context_parallel_size > 1) else "megatron"


def _kernels(config: Config, cuda: bool) -> dict[str, str | bool]:
    """Which kernels compute the model, by key, every `auto` replaced."""
    model = config.model
    norm: str = model.norm_implementation
    if norm == "auto":
        norm = "torch"
        if model.norm_gains != "none" and model.transformer_impl == _TE:
            norm = _TE
        elif cuda and model.normalization == "LayerNorm" and model.norm_gains != "none" and importable("apex"):
            norm = "apex"
    return {
        "model.transformer_impl": model.transformer_impl,
        "model.norm_implementation": norm,
        "model.core_attention": _attention(config, cuda) if model.core_attention == "auto" else model.core_attention,
        "model.moe_grouped_gemm": _grouped(config),
    }


def _grouped(config: Config) -> bool:
    """Whether experts are computed by Transformer Engine's grouped matrix product."""
    asked, model = config.model.moe_grouped_gemm, config.model
    if asked != "auto":
        return asked
    return model.num_moe_experts is not None and model.transformer_impl == _TE


def _deepspeed_optimizer(config: Config, cuda: bool) -> str:
    """Whose optimizer DeepSpeed is given: torch's, but where that has none or its state is offloaded."""
    name = config.optimizer.name
    if name == "lion":
        return "deepspeed_lion"
    if config.parallel.offload_optimizer and name != "sgd":
        return "deepspeed_cpu_adam"
    return "torch_fused" if cuda else "torch"


def _megatron_optimizer(config: Config) -> str:
    """Whose optimizer megatron-core has taken at its import: Transformer Engine's, else Apex's, else torch's.

    Raises:
        ConfigError: the config asks for another.
    """
    from megatron.core.optimizer import Adam

    module = Adam.__module__.partition(".")[0]
    asked = config.optimizer.implementation
    if asked not in ("auto", module):
        raise config.error(
            "optimizer.implementation",
            f"{asked} under parallel.engine: megatron, where megatron-core takes {module}'s; expected auto or {module}",
        )
    return module
