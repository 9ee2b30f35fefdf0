"""Which parametrizations have a limit of infinite width in which features are learned: `python -m benchmarks.limit`.

Trains one family at several widths in each parametrization, on the same batches in the same order. Measured are the
loss of every step, and the kernel of the features before the first step and after the last: x · x' / width between the
positions of one batch of the evaluation data, where x is what the final norm gives to the head. A kernel has the same
size at every width, so the kernels of two widths can be compared. What is done is kept, and the same command goes on.
Writes limit.json and limit.png.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.evidence.limit import LINES
from mup_megatron.config import Config, derive, load_config, parse_overrides
from mup_megatron.data.batch import Batch
from mup_megatron.data.batches import Batches, build_datasets
from mup_megatron.data.prepare import prepare
from mup_megatron.engines import Engine, build_engine
from mup_megatron.engines.optim import LearningRateSchedule
from mup_megatron.engines.setup import resolve_auto
from mup_megatron.model.build import build_model, parametrize
from mup_megatron.parallel import runtime, upstream
from mup_megatron.parallel.ranks import Rank
from mup_megatron.proof.family import Member, members
from mup_megatron.report.pictures import load_pyplot, save_figure
from mup_megatron.util.files import write_whole
from mup_megatron.util.provenance import provenance

_LAST = 10
"""Steps whose mean loss stands for the end of a run."""


def measure(config: Config, factors: Sequence[int], seeds: int, folder: Path) -> dict[str, Any]:
    """Trains what is missing in the folder, and compares."""
    upstream.prepare_process()
    config = resolve_auto(derive(config, {"training.eval_interval": config.training.train_steps}))
    family = members(config, factors, 1)
    prepared = prepare(config, print)
    device = runtime.start_distributed(family[0].layout, Rank(), config.run.seed)
    try:
        for number, member, name in itertools.product(range(seeds), family, LINES):
            path = _path(folder, name, member.size, number)
            if not path.exists():
                keys = {"parametrization.name": name, "run.seed": config.run.seed + number}
                found = _train(dataclasses.replace(member, config=derive(member.config, keys)), device)
                path.parent.mkdir(parents=True, exist_ok=True)
                torch.save(found, path)
                print(f"{path.stem}: loss {found['losses'][-1]:.4f}", flush=True)
    finally:
        runtime.stop_distributed()
    sizes = [member.size for member in family]
    held = {
        name: {
            size: [torch.load(_path(folder, name, size, number), weights_only=True) for number in range(seeds)]
            for size in sizes
        }
        for name in LINES
    }
    return {
        "sizes": [{"size": size, "factor": factor} for size, factor in zip(sizes, factors, strict=True)],
        "seeds": seeds,
        "steps": config.training.train_steps,
        "kernels": {name: compared(runs) for name, runs in held.items()},
        "config": config.model_dump(mode="json"),
        "provenance": provenance(prepared.digest),
    }


def _path(folder: Path, name: str, size: int, number: int) -> Path:
    return folder / f"{name}-{size}-seed-{number}.pt"


def _train(member: Member, device: torch.device) -> dict[str, Any]:
    """Losses (nats per token) of every step, and the kernel of the features before the first and after the last."""
    config, prepared, rank = member.config, prepare(member.config), 0
    parametrization = parametrize(config, prepared.vocab_size)
    chunks = build_model(parametrization, member.layout, rank, device)
    engine = build_engine(member.setup, parametrization, chunks)
    batches, evaluation = (
        Batches(dataset, config, member.layout, rank, device) for dataset in build_datasets(config, prepared)
    )
    schedule = LearningRateSchedule(config.training, config.hparams.lr)
    try:
        before = _kernel(chunks[0], engine, evaluation[0])
        losses = [engine.step(batches[step], schedule(step)).loss for step in range(config.training.train_steps)]
        return {"losses": losses, "before": before, "after": _kernel(chunks[0], engine, evaluation[0])}
    finally:
        engine.close()


def _kernel(model: Any, engine: Engine, batch: Sequence[Batch]) -> torch.Tensor:
    """Products of features over the width, between the positions of a batch, [positions, positions]."""
    features: list[torch.Tensor] = []
    hook = model.decoder.final_layernorm.register_forward_hook(lambda _module, _input, x: features.append(x))
    engine.evaluate(batch)
    hook.remove()
    x = torch.cat([each.detach().flatten(0, 1) for each in features]).double()
    return (x @ x.T / x.shape[1]).float().cpu()


def compared(runs: Mapping[int, Sequence[Mapping[str, Any]]]) -> dict[str, list[float]]:
    """What moves at each width, and how far each width is from the next one.

    Args:
        runs: `losses`, `before` and `after` of every seed, by width, ascending.

    Returns:
        By width, means over seeds: `loss` of the last steps (nats per token), and `moved`, how far the kernel after
        training is apart from that before it. By pair of neighbors: `kernels`, how far the trained kernels are apart,
        mean over seeds; `curves`, how far the mean losses are apart, mean over steps (nats).
    """
    curves = {size: torch.tensor([run["losses"] for run in each]).mean(0) for size, each in runs.items()}
    pairs = list(itertools.pairwise(runs))
    return {
        "loss": [float(curve[-_LAST:].mean()) for curve in curves.values()],
        "moved": [statistics.fmean(apart(run["after"], run["before"]) for run in each) for each in runs.values()],
        "kernels": [
            statistics.fmean(apart(a["after"], b["after"]) for a, b in zip(runs[one], runs[two], strict=True))
            for one, two in pairs
        ],
        "curves": [float((curves[one] - curves[two]).abs().mean()) for one, two in pairs],
    }


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """How far two kernels are apart, 0 to 1: 1 less their centered alignment (Kornblith et al., 1905.00414).

    Neither a factor on all features nor what all positions have in common counts.
    """
    one, other = (_centered(each.double()) for each in (one, other))
    return 1.0 - float((one * other).sum() / (one.norm() * other.norm()))


def _centered(kernel: torch.Tensor) -> torch.Tensor:
    return kernel - kernel.mean(0) - kernel.mean(1)[:, None] + kernel.mean()


_PANELS = {
    "moved": "kernel of the features: before and after training",
    "kernels": "kernel after training: this width and the next",
    "curves": "losses: this width and the next (nats)",
}


def draw(result: Mapping[str, Any], path: Path) -> None:
    """One panel each: what moves, how far the kernels of neighboring widths are apart, and how far the losses."""
    pyplot = load_pyplot()
    figure, panels = pyplot.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
    sizes = [each["size"] for each in result["sizes"]]
    for panel, (key, label) in zip(panels, _PANELS.items(), strict=True):
        for number, name in enumerate(LINES):
            values = result["kernels"][name][key]
            panel.plot(sizes[: len(values)], values, "o-", color=f"C{number}", label=LINES[name])
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks(sizes, [str(size) for size in sizes])
        panel.set_xlabel("hidden size")
        panel.set_title(label, fontsize=9)
        panel.grid(alpha=0.25, which="both")
    panels[0].legend()
    save_figure(figure, path)
    pyplot.close(figure)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="KEY.PATH=VALUE")
    parser.add_argument("--sizes", default="1,2,4,8", help="factors of the base")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("runs/limit"))
    asked = parser.parse_intermixed_args()
    config = load_config(asked.config, parse_overrides(asked.overrides))
    result = measure(config, [int(each) for each in asked.sizes.split(",")], asked.seeds, asked.output / "runs")
    write_whole(asked.output / "limit.json", json.dumps(result, indent=1))
    draw(result, asked.output / "limit.png")


if __name__ == "__main__":
    main()
