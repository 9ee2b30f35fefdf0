"""What must hold between the parametrization, the base and what grows from it. Public name: `CHECKS`."""

from __future__ import annotations

from mup_megatron.config.model import OF_EXPERTS
from mup_megatron.config.schema import Config, Model


def _check_zero_init(config: Config) -> None:
    model, parametrization = config.model, config.parametrization
    norm = "qk_l2_norm" if model.qk_l2_norm else "qk_layernorm"
    if parametrization.zero_init_query and getattr(model, norm) and not model.multi_latent_attention:
        raise config.error(
            "parametrization.zero_init_query",
            f"a norm follows the query (model.{norm}), whose gradient at zero is unbounded; expected false",
        )
    if parametrization.zero_init_readout and model.share_embeddings_and_output_weights:
        raise config.error(
            "parametrization.zero_init_readout",
            "the readout is tied to the embedding (model.share_embeddings_and_output_weights), which would be zero "
            "too; expected false",
        )


def _check_growth(config: Config) -> None:
    if config.parametrization.name != "standard" and not config.base.sizes and config.base.file is None:
        raise config.error("base", "missing; expected the sizes that grow, for example base: {hidden_size: 256}")
    if config.base.file is not None:
        beside = [name for name in config.base.sizes if name not in _beside_a_file(config.model)]
        if beside:
            raise config.error(
                f"base.{beside[0]}",
                f"base.file tells the base size of every tensor; expected one of the two (remove {', '.join(beside)}, "
                "or file)",
            )
    for name in config.proxy.sizes:
        if name not in config.base.sizes and not (name == "num_layers" and config.parametrization.depth != "none"):
            raise config.error(
                f"proxy.{name}",
                f"{name} differs from the base without being declared; expected only keys of base: "
                f"({', '.join(config.base.sizes) or 'none'})",
            )


def _beside_a_file(model: Model) -> set[str]:
    """Base sizes that no tensor's shape tells, so that they may stand beside a file of base shapes."""
    head = {"qk_head_dim", "qk_pos_emb_head_dim"} if model.multi_latent_attention else {"kv_channels"}
    return {"num_layers", *OF_EXPERTS, *head}


def _check_head_size_growth(config: Config) -> None:
    """Whether a head size that follows from two declared sizes moves although nobody declared it."""
    base = config.model.resized(config.base.width)
    enlarged = base.resized(config.base.enlarged())
    for section, model in (("model", config.model), ("proxy", config.proxy_model)):
        if config.base.file is None and base.head_size == enlarged.head_size != model.head_size:
            raise config.error(
                f"{section}.hidden_size",
                f"head size (hidden_size / num_attention_heads) is {model.head_size} here and {base.head_size} in the "
                "base although hidden_size and num_attention_heads grow together; set model.kv_channels to fix it, or "
                "declare base.kv_channels if it grows",
            )


def _check_of_adam(config: Config) -> None:
    name = config.parametrization.name
    if name not in ("one_ratio", "per_layer"):
        return
    if config.optimizer.name not in ("adam", "adamw"):
        raise config.error(
            "optimizer.name", f"{config.optimizer.name}: parametrization.name: {name} is for adam; expected that"
        )
    if name == "one_ratio" and "hidden_size" not in config.base.sizes:
        raise config.error("base.hidden_size", "missing; parametrization.name: one_ratio is its ratio")


def _check_depth(config: Config) -> None:
    depth = config.parametrization.depth
    if not config.parametrization.follows_width:
        return
    if depth != "none":
        if config.base.num_layers is None:
            raise config.error(
                "base.num_layers",
                f"missing; parametrization.depth: {depth} needs the number of layers where hyperparameters are "
                "defined, the same for every model of the family",
            )
        return
    for section, layers in (("model", config.model.num_layers), ("proxy", config.proxy.num_layers)):
        if layers is not None and layers != config.num_layers_base:
            raise config.error(
                f"{section}.num_layers",
                f"{layers} differs from the base's {config.num_layers_base} and depth rules are off; expected equal "
                "depths, or parametrization.depth: completep",
            )


CHECKS = (_check_zero_init, _check_growth, _check_head_size_growth, _check_of_adam, _check_depth)
"""In this order; each takes a config and raises ConfigError."""
