"""Which pipeline stage holds which layers of the decoder.

Public names: `Stages`, `chunks_per_stage`, `stages_of`. There are three ways: even stages, a first or last stage of its
own size, and megatron-core's `pipeline_model_parallel_layout`. No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from mup_megatron.config import Config
from mup_megatron.util.errors import ConfigError, shown

Stages = tuple[tuple[Sequence[int], ...], ...]
"""Layers of the decoder, global numbers from 0: per pipeline stage, per chunk of it."""

_KEY = "parallel.pipeline_model_parallel_layout"
_LONGEST = 1_000_000


def chunks_per_stage(config: Config) -> int:
    """Model chunks of each pipeline stage: 1 unless the schedule is interleaved.

    Raises:
        ConfigError: the layout does not make as many chunks on each stage.
    """
    parallel = config.parallel
    if parallel.pipeline_model_parallel_layout is None:
        return parallel.virtual_pipeline_model_parallel_size or 1
    chunks, pipeline = len(_parts(config)), parallel.pipeline_model_parallel_size
    if chunks % pipeline:
        raise config.error(_KEY, f"{chunks} parts, which {pipeline} pipeline stages cannot share; expected a multiple")
    return chunks // pipeline


def stages_of(config: Config) -> Stages:
    """Layers per stage and chunk, as megatron-core places them.

    Raises:
        ConfigError: the sizes do not divide, or the layout is none of this model.
    """
    parallel, layers = config.parallel, config.model.num_layers
    if parallel.pipeline_model_parallel_layout is not None:
        return _laid_out(config)
    pipeline, virtual = parallel.pipeline_model_parallel_size, chunks_per_stage(config)
    if parallel.num_layers_in_first_pipeline_stage is None and parallel.num_layers_in_last_pipeline_stage is None:
        if layers % (pipeline * virtual):
            raise config.error(
                "parallel.pipeline_model_parallel_size",
                f"model.num_layers {layers} is not divisible by {pipeline} stages"
                + (f" of {virtual} chunks" if virtual > 1 else "")
                + "; expected sizes that divide it, or num_layers_in_first_pipeline_stage / "
                "num_layers_in_last_pipeline_stage",
            )
        return _placed([layers // (pipeline * virtual)] * pipeline * virtual, pipeline)
    return _uneven(config, virtual)


def _placed(sizes: Sequence[int], pipeline: int) -> Stages:
    """Consecutive layers, so many for each part in the order in which a token passes them."""
    parts = [range(sum(sizes[:number]), sum(sizes[: number + 1])) for number in range(len(sizes))]
    return tuple(tuple(parts[stage::pipeline]) for stage in range(pipeline))


def _uneven(config: Config, virtual: int) -> Stages:
    parallel, layers = config.parallel, config.model.num_layers
    pipeline = parallel.pipeline_model_parallel_size
    first, last = parallel.num_layers_in_first_pipeline_stage, parallel.num_layers_in_last_pipeline_stage
    key = f"parallel.num_layers_in_{'last' if first is None else 'first'}_pipeline_stage"
    if pipeline == 1 or virtual > 1:
        raise config.error(key, "uneven stages need pipeline stages, and no virtual ones")
    middle = pipeline - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    if rest < middle or (rest % middle if middle else rest):
        raise config.error(
            key, f"leaves {rest} of {layers} layers for {middle} stages; expected a multiple of {middle or 'nothing'}"
        )
    ends = ([first] if first is not None else []), ([last] if last is not None else [])
    return _placed([*ends[0], *[rest // middle if middle else 0] * middle, *ends[1]], pipeline)


def _laid_out(config: Config) -> Stages:
    """Of the layout; what megatron-core asserts of it while it builds is said here, in a sentence."""
    parallel, model, parts = config.parallel, config.model, _parts(config)
    for name in (
        *("virtual_pipeline_model_parallel_size", "num_layers_in_first_pipeline_stage"),
        "num_layers_in_last_pipeline_stage",
    ):
        if getattr(parallel, name) is not None:
            raise config.error(f"parallel.{name}", "pipeline_model_parallel_layout says it already; expected null")
    order, ahead = "".join(parts), model.mtp_num_layers or 0
    for problem, wrong in (
        ("starts with E, the embedding", not order.startswith("E") or order.count("E") != 1),
        ("ends with L, the loss", not order.endswith("L") or order.count("L") != 1),
        (f"has {model.num_layers} layers t, as model.num_layers says", order.count("t") != model.num_layers),
        (f"has {ahead} of m, as model.mtp_num_layers says", order.count("m") != ahead),
        ("has every m in the last part, before L", not parts[-1].endswith("m" * ahead + "L")),
    ):
        if wrong:
            found = shown(parallel.pipeline_model_parallel_layout)
            raise config.error(_KEY, f"expected one that {problem}; found {found}")
    chunks_per_stage(config)
    return _placed([part.count("t") for part in parts], parallel.pipeline_model_parallel_size)


def _parts(config: Config) -> list[str]:
    """The layout's parts, in the order in which a token passes them, without the abbreviations: `t*2` is `tt`."""
    text = (config.parallel.pipeline_model_parallel_layout or "").replace(",", "").replace(" ", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):  # in upstream's order
        if len(text) + sum(len(what) * int(count) for what, count in re.findall(pattern, text)) > _LONGEST:
            raise config.error(_KEY, f"more than {_LONGEST} letters; expected a layout of this model's layers")
        text = re.sub(pattern, lambda found: found[1] * int(found[2]), text)
    if unknown := re.sub("[EtmL|]", "", text):
        raise _letters(config, unknown[0])
    return text.split("|")


def _letters(config: Config, unknown: str) -> ConfigError:
    return config.error(
        _KEY,
        f"{shown(unknown)} is no letter of it; expected E (embedding), t (a layer), m (multi-token prediction) and L "
        "(loss), | between parts, and (tt|)*3 or t*2 for repetitions, such as Ett|(tt|)*2tL",
    )
