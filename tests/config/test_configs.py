"""Every shipped config, dry: DeepSpeed reads its JSON, its model is built in its own layout, explain tells the same."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mup_megatron.config import load_config
from mup_megatron.data.prepare import known_vocab_size
from mup_megatron.engines.setup import resolve_auto
from mup_megatron.engines.setup.deepspeed import deepspeed_config
from mup_megatron.model.build import dry_run, parametrize
from mup_megatron.model.explain import explain
from mup_megatron.model.global_names import named_parameters
from mup_megatron.parallel import runtime, upstream
from mup_megatron.parallel.layout import Layout, resolve_layout
from mup_megatron.tuning.space import proxy_config, values_of
from mup_megatron.util.errors import UserError

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").rglob("*.yaml"))


def world_size(config: Any) -> int:
    """The processes that its SLURM section asks for; two for the demo, which fits itself to any number."""
    automatic = config.parallel.tensor_model_parallel_size == "auto"
    return 2 if automatic else config.slurm.nodes * config.slurm.gpus_per_node


@contextlib.contextmanager
def groups(layout: Layout, rank: int) -> Iterator[None]:
    """Process groups of torch's `fake` backend: the real parallel_state and DeepSpeed over them, nothing sent."""
    import deepspeed.comm
    import torch.distributed
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=rank, world_size=layout.world_size, store=FakeStore())
    try:
        deepspeed.comm.init_distributed(dist_backend="fake", verbose=False)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
            context_parallel_size=layout.context,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=layout.expert_tensor,
            create_gloo_process_groups=False,
        )
        yield
    finally:
        runtime.stop_distributed()


def test_every_family_is_there() -> None:
    sizes = {
        "gpt3": ("125m", "350m", "760m", "1.3b", "2.7b", "6.7b", "13b", "175b", "125m-relative", "6.7b-relative"),
        "llama": ("1b", "8b", "70b", "1t"),
        "deepseek": ("v3-671b",),
        "mixtral": ("8x7b",),
        "qwen3": ("30b-a3b",),
        "nemotron": ("15b",),
        "bert": ("demo", "proxy-13m", "base", "large"),
        "t5": ("iwslt-like", "wmt14-base", "wmt14-big"),
        "proof": (
            "gpt3",
            "english",
            "wide",
            "llama",
            "moe",
            "experts",
            "mla",
            "tuning-cost",
            "tuning-cost-llama",
            "tuning-cost-moe",
            "translation-cost",
            "quality",
            "t5",
            "bert",
        ),  # of docs/evidence
    }
    names = {str(path.relative_to(path.parents[1])) for path in CONFIGS if path.parent.name != "configs"}
    assert names == {f"{family}/{size}.yaml" for family, of_family in sizes.items() for size in of_family}


@pytest.mark.parametrize(
    ("name", "layout", "billions"),
    [
        ("gpt3/175b", "TP 8, PP 16, DP 8, SP, distributed optimizer", 174.6),
        # 671.0 without multi-token prediction, whose layer is 11.6 (arXiv 2412.19437, section 4.2: 14 B with the head).
        ("deepseek/v3-671b", "TP 4, PP 16, EP 64, ETP 1, DP 32, SP, distributed optimizer", 682.6),
        ("llama/1t", "TP 8, PP 64, DP 4, SP, distributed optimizer", 998.9),
        # What their papers say: 46.7 (mistral.ai), 30.5, and 12.5 beside 3.1 of embeddings.
        ("mixtral/8x7b", "TP 2, PP 4, EP 8, ETP 1, DP 32, SP, distributed optimizer", 46.7),
        ("qwen3/30b-a3b", "TP 1, PP 4, EP 16, DP 64, distributed optimizer", 30.5),
        ("nemotron/15b", "TP 8, DP 48, SP, ZeRO 1", 15.6),
        ("t5/wmt14-base", "TP 1, DP 8, ZeRO 1", 0.1),
        ("t5/wmt14-big", "TP 1, DP 8, ZeRO 1", 0.2),
    ],
)
def test_published_parameters(name: str, layout: str, billions: float) -> None:
    upstream.prepare_process()
    config = load_config(next(path for path in CONFIGS if path.with_suffix("").as_posix().endswith(name)))
    assert str(resolve_layout(config, world_size(config))) == layout
    shapes = parametrize(config, known_vocab_size(config)).shapes.values()
    assert round(sum(math.prod(shape.spec.shape) for shape in shapes) / 1e9, 1) == billions


@pytest.mark.parametrize(
    ("name", "millions", "proxy"),
    [
        # 1706.03762, Table 3, and 2203.03466, appendix F.2; positions are learned here, and other vocabularies vary.
        ("t5/wmt14-base", 65, 15),
        ("t5/wmt14-big", 213, 15),
    ],
)
def test_published_translation_models(name: str, millions: float, proxy: float) -> None:
    upstream.prepare_process()
    config = load_config(next(path for path in CONFIGS if path.with_suffix("").as_posix().endswith(name)))
    small = proxy_config(config, values_of(config), seed=1, directory=Path("unused"))
    for each_config, published in ((config, millions), (small, proxy)):
        shapes = parametrize(each_config, known_vocab_size(config)).shapes.values()
        assert sum(math.prod(shape.spec.shape) for shape in shapes) / 1e6 == pytest.approx(published, rel=0.07)


QUICK = {"configs/demo", "gpt3/6.7b", "deepseek/v3-671b", "llama/70b"}


def each(path: Path) -> Any:
    name = f"{path.parent.name}/{path.stem}"
    return pytest.param(path, id=name, marks=() if name in QUICK else pytest.mark.slow)


@pytest.mark.parametrize("path", [each(path) for path in CONFIGS])
def test_dry_run(path: Path) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    from mup_megatron.engines.deepspeed_mpu import Mpu

    upstream.prepare_deepspeed()
    config = resolve_auto(load_config(path))
    layout = resolve_layout(config, world_size(config))
    parametrization = parametrize(config, known_vocab_size(config))
    for rank in (0, layout.world_size - 1):
        with groups(layout, rank):
            chunks = dry_run(parametrization, layout, rank)
            built = dict(named_parameters(chunks))
            assert all(parameter.device.type == "meta" for parameter in built.values())
            deepspeed = config.parallel.engine == "deepspeed"
            parsed = DeepSpeedConfig(deepspeed_config(config, layout), mpu=Mpu()) if deepspeed else None
        held = explain(parametrization, layout, rank)["parameters"]
        assert {name: list(parameter.shape) for name, parameter in built.items()} == {
            parameter["name"]: parameter["local_shape"] for parameter in held
        }
        if parsed is None:
            continue
        assert parsed.train_batch_size == config.training.global_batch_size
        assert parsed.gradient_accumulation_steps == layout.micro_batches
        assert parsed.zero_optimization_stage == config.parallel.zero_stage
    explained = explain(parametrization, layout)
    assert len(explained["parameters"]) == len(parametrization.shapes)
    for parameter in explained["parameters"]:
        assert parameter["lr"] > 0
        assert len(parameter["growing"]) == len(parameter["global_shape"])
    assert bool(config.tuning.search) == bool(config.proxy.sizes)
    assert config.tuning.search or path.parent.name == "proof"


def test_a_dry_run_can_fail() -> None:
    config = resolve_auto(load_config(next(path for path in CONFIGS if path.stem == "125m")))
    layout = resolve_layout(config, 8)
    parametrization = parametrize(config, known_vocab_size(config))
    del parametrization.tensors["decoder.final_layernorm.weight"]
    with groups(layout, 0), pytest.raises(UserError, match=r"final_layernorm.weight: on rank 0 it is TensorSpec"):
        dry_run(parametrization, layout, 0)
