"""docs/reports/scaling.md: an optimizer step of shipped configs on paper, and steps of their small copies, measured.

    python -m tests.helpers.scaling_page       # measures the copies, and writes the page anew

Public names: `COPIES`, `PAGE`, `SHIPPED`, `copy`, `compare`, `measured_rows`, `rows_of`, `number`, `page`.
tests/tuning/test_scaling.py holds that the page is what the model gives, and that what is measured is what it says.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mup_megatron.config import Config, derive, load_config
from mup_megatron.data.prepare import known_vocab_size, prepare
from mup_megatron.engines.setup import Setup, resolve
from mup_megatron.model.build import parametrize
from mup_megatron.parallel.layout import Layout
from mup_megatron.tuning.better_layout import choices
from mup_megatron.tuning.budget import attention_flops
from mup_megatron.tuning.memory import activation_bytes, state_bytes
from mup_megatron.tuning.scaling import KINDS, Device, Stage, step_of
from mup_megatron.tuning.shares import shares
from mup_megatron.util.progress import short_bytes
from tests.helpers import traffic
from tests.helpers.configs import MIXED, VOCABULARY, make
from tests.helpers.distributed import Ranks
from tests.helpers.links import ROOT

PAGE = ROOT / "docs" / "reports" / "scaling.md"
SHIPPED = {"gpt3/6.7b": 128, "llama/70b": 1024, "gpt3/175b": 1024, "deepseek/v3-671b": 2048}
"""Processes of each, as its SLURM section asks for."""
MEMORY = 80
"""Of an H100, in GB."""
_COPY = {
    "model.num_layers": 2,
    "model.vocab_size": None,
    "model.core_attention": "megatron",
    "training.seq_length": 64,
    "training.global_batch_size": 8,
    "training.micro_batch_size": 1,
    "training.train_steps": 20,
    "training.lr_warmup_steps": 2,
    "training.lr_decay_steps": None,
    "training.eval_interval": None,
    "training.recompute_granularity": None,
    "parallel.tensor_model_parallel_size": 2,
}
_EXPERTS = {
    "model.num_layers": 3,
    "model.moe_layer_freq": [0, 1, 1],
    "model.num_moe_experts": 8,
    "model.moe_router_num_groups": 4,
    "model.moe_router_group_topk": 2,
    "model.moe_router_topk": 2,
    "parallel.pipeline_model_parallel_size": 2,
    "parallel.expert_model_parallel_size": 2,
}
COPIES: dict[str, tuple[int, dict[str, Any]]] = {
    "gpt3/6.7b": (4, {"base.num_layers": 2}),
    "llama/70b": (4, {"base.num_layers": 2}),
    "gpt3/175b": (8, {"base.num_layers": 2, "parallel.pipeline_model_parallel_size": 2}),
    "deepseek/v3-671b": (8, _EXPERTS),
}
"""Processes of a copy, and what its config has beside the sizes of its base."""
# DeepSpeed keeps what is this small together else; of a large model it keeps as little.
_ZERO3 = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
}


def copy(name: str, folder: Path) -> Config:
    """A shipped config as large as its base, in two or three layers and a small copy of its layout.

    Args:
        name: of the config.
        folder: for a DeepSpeed JSON file.
    """
    config, settings = load_config(ROOT / "configs" / f"{name}.yaml"), folder / "zero3.json"
    settings.write_text(json.dumps({"zero_optimization": _ZERO3}))
    keys = {**{f"model.{key}": value for key, value in config.base.sizes.items()}, **_COPY, **COPIES[name][1]}
    keys["data"] = make(MIXED).data.model_dump()
    if config.parallel.zero_stage == 3:
        keys["parallel.deepspeed_config"] = str(settings)
    return derive(config, keys)


Told = list[tuple[dict[str, float], float]]
"""Of each rank: bytes that it sends, by kind, and operations."""


def compare(ranks: Ranks, config: Config, processes: int) -> tuple[Told, Told, Layout]:
    """What the model says of each rank, what is measured there, and the layout.

    As torch counts operations, which does not leave out the half of the scores that is masked.
    """
    setup = resolve(config, processes)
    prepare(setup.config)
    on_paper, parametrization = [], parametrize(setup.config, VOCABULARY)
    held = shares(parametrization)
    for rank in range(processes):
        number = setup.layout.pipeline_rank(rank)
        stage = Stage(parametrization, setup.layout, number, held)
        on_paper.append((stage.sent, stage.flops + _masked(setup, number)))
    measured = [(sent, float(flops)) for sent, flops in ranks.run(processes, traffic.step, config=setup.config)]
    return on_paper, measured, setup.layout


def _masked(setup: Setup, stage: int) -> float:
    """Operations on scores that are masked, as many as on the others."""
    config, layout, model = setup.config, setup.layout, setup.config.model
    layers = sum(len(chunk) for chunk in layout.stages[stage])
    layers += (model.mtp_num_layers or 0) if stage == layout.pipeline - 1 else 0
    samples = layout.micro_batches * config.training.micro_batch_size
    tokens = samples * config.training.seq_length / (layout.context * layout.tensor)
    return layers * tokens * attention_flops(config)


def measured_rows(ranks: Ranks, folder: Path) -> list[list[str]]:
    """A row for each kind of each copy, over all of its ranks."""
    rows = []
    for name, (processes, _) in COPIES.items():
        on_paper, measured, layout = compare(ranks, copy(name, folder), processes)
        for kind in KINDS:
            said, found = (sum(sent.get(kind, 0) for sent, _ in told) for told in (on_paper, measured))
            if said or found:
                rows.append([name, str(layout), f"{kind}, bytes", f"{said:,.0f}", f"{found:,.0f}"])
        said, found = (sum(flops for _, flops in told) for told in (on_paper, measured))
        rows.append([name, str(layout), "FLOPs", f"{said:,.0f}", f"{found:,.0f}"])
    return [[*row, "none" if row[3] == row[4] else f"{number(row[4]) / number(row[3]) - 1:+.2%}"] for row in rows]


def number(cell: str) -> float:
    """A count as a table has it."""
    return float(cell.replace(",", ""))


@functools.cache
def _shipped(name: str) -> tuple[list[str], list[str]]:
    """Rows of a shipped config: its own step, and the quickest layout."""
    setup = resolve(load_config(ROOT / "configs" / f"{name}.yaml"), SHIPPED[name], trains=False)
    parametrization, layout = setup.parametrization(known_vocab_size(setup.config)), setup.layout
    held = shares(parametrization)
    step = step_of(parametrization, layout, Device(), held)
    memory = state_bytes(parametrization, layout, held), activation_bytes(parametrization, layout)
    sent = [short_bytes(step.sent[kind]) if step.sent[kind] else "" for kind in KINDS[:-1]]
    times = [f"{seconds:.2f}" for seconds in (step.computing, step.sending, step.waiting, step.reducing, step.seconds)]
    own = [name, str(layout), *map(short_bytes, memory), f"{step.flops:.3g}", *sent, *times]
    found = choices(parametrization, layout.world_size, Device())
    best = next(choice for choice in found if choice.memory <= MEMORY * 1e9)
    other = [str(best.layout), f"{best.step.seconds:.2f}", short_bytes(best.memory)]
    return own, [name, str(len(found)), f"{step.seconds:.2f}", *other]


def page(measured: Sequence[Sequence[str]]) -> str:
    """The page.

    Args:
        measured: rows of `measured_rows`.
    """
    device = Device()
    own, best = zip(*(_shipped(name) for name in SHIPPED), strict=True)
    heads = ["config", "layout", "state", "activations", "FLOPs", *KINDS[:-1]]
    times = ["computing, s", "sending, s", "in the bubble, s", "reducing, s", "step, s"]
    return f"""\
# An optimizer step on paper

Made by `python -m tests.helpers.scaling_page`. [scaling.md](../scaling.md) says what is counted, and what is not.

The device: {device.tflops:g} TFLOP/s, of which computing reaches {device.utilization:.0%}; {device.within / 1e9:g} GB/s
to others of its node of {device.node}, {device.between / 1e9:g} GB/s to other nodes.

## Shipped configs

Of a process of the stage that takes longest; state and activations of the fullest.

{_table([heads + times, *own])}
## Quickest layouts in {MEMORY} GB

Of as many processes, with the config's micro-batch; memory is state and activations. `tried`: layouts that the config's
checks accept.

{_table([["config", "tried", "own, s", "quickest", "step, s", "memory"], *best])}
## Small copies, measured

Each config as large as its base, in two or three layers and in bf16, on gloo ranks of a CPU: the second optimizer step,
over all ranks.

{_table([["copy of", "layout", "what", "on paper", "measured", "difference"], *measured])}"""


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *others = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([head, f"|{' --- |' * len(rows[0])}", *others]) + "\n"


def rows_of(text: str) -> list[list[str]]:
    """The measured rows of a page."""
    lines = text.split("## Small copies, measured")[1].splitlines()
    return [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")][2:]


def main() -> None:
    """Writes the page."""
    ranks = Ranks()
    with tempfile.TemporaryDirectory() as folder:
        measured = measured_rows(ranks, Path(folder))
    ranks.close()
    PAGE.write_text(page(measured))


if __name__ == "__main__":
    main()
