"""Does the best learning rate stay? An MLP or a ResNet on pictures, every width with every rate, µP and standard.

    python docs/examples/images.py mlp                        # scikit-learn's digits, widths 128 to 1024
    python docs/examples/images.py resnet --widths 4 8 16 32
    python docs/examples/images.py mlp --data fashion-mnist=/usr/share/datasets/fashion-mnist    # Debian's package
    torchrun --nproc-per-node 2 docs/examples/images.py mlp   # each batch split over two processes

After Tensor Programs V, figure 2 (left), whose MLP it is. `standard` has one rate for every layer, and PyTorch's or
1/sqrt(fan-in) initial values; at the smallest width, which is the base, both are the same model. Writes runs.json, and
KIND.json with KIND.png. What is trained already is read from runs.json, so the same command goes on where it was
stopped. Exit status: 0 where µP's optimum stays, 1 where it does not, 3 where it lies beyond the rates that were tried,
2 for bad input. Under torchrun a batch norm of the ResNet sees its own process's share of a batch.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import math
import os
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.nn.functional as F
from resnet import ResNet
from torch import nn

from mup_megatron.checkpoints.run_directory import write_whole
from mup_megatron.mup import MuAdam, MuReadout, MuSGD, set_base_shapes
from mup_megatron.proof.optimum import Curve
from mup_megatron.proof.question import Question
from mup_megatron.proof.stability import as_json, judge, lines
from mup_megatron.report.stability import draw_stability
from mup_megatron.util.errors import UserError
from mup_megatron.util.provenance import provenance

Pictures = tuple[torch.Tensor, torch.Tensor]
"""Of shape (pictures, 1, height, width), mean about 0 and deviation about 1, and the class of each."""

BATCH = 64
_MEASURED = 4096  # pictures on which a trained model's loss is measured
_WIDTHS = {"mlp": [128, 256, 512, 1024], "resnet": [4, 8, 16, 32]}
_RATES = {"mlp": [2.0**k for k in range(-10, -1)], "resnet": [2.0**k for k in range(-11, -3)]}


def load(data: str) -> Pictures:
    """The training set.

    Args:
        data: `digits`, or `fashion-mnist=FOLDER` with the files of Debian's package dataset-fashion-mnist.

    Raises:
        UserError: the package or a file is missing.
    """
    name, _, folder = data.partition("=")
    if name == "digits":
        try:
            from sklearn.datasets import load_digits
        except ImportError:
            raise UserError("--data digits: scikit-learn is missing; expected pip install scikit-learn") from None
        read = load_digits()
        pictures, labels = torch.tensor(read.images, dtype=torch.float32), torch.tensor(read.target)
    elif name == "fashion-mnist" and folder:
        pictures, labels = (_idx(Path(folder), f"train-{part}-ubyte.gz") for part in ("images-idx3", "labels-idx1"))
    else:
        raise UserError(f"--data: {data}; expected digits or fashion-mnist=FOLDER")
    pictures = pictures.float().unsqueeze(1)
    return (pictures - pictures.mean()) / pictures.std(), labels.long()


def _idx(folder: Path, name: str) -> torch.Tensor:
    """A file of bytes in the IDX format: two zeros, a type, the number of dimensions, their sizes, the values."""
    try:
        data = gzip.decompress((folder / name).read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(
            f"{folder / name}: cannot be read ({why}); expected a file of Debian's package dataset-fashion-mnist "
            "(apt-get install dataset-fashion-mnist), or --data digits"
        ) from None
    dimensions = data[3] if len(data) > 4 else 0
    sizes = [int.from_bytes(data[4 + 4 * i : 8 + 4 * i], "big") for i in range(dimensions)]
    if not dimensions or data[:3] != b"\0\0\x08" or len(data) != 4 + 4 * dimensions + math.prod(sizes):
        raise UserError(f"{folder / name}: no whole IDX file of bytes; expected one of dataset-fashion-mnist")
    return torch.frombuffer(bytearray(data[4 + 4 * dimensions :]), dtype=torch.uint8).view(sizes)


class MLP(nn.Module):
    """The MLP of the paper's figure, with its values: microsoft/mup, examples/MLP/main.py, relu and cross entropy."""

    INPUT_MULT, OUTPUT_MULT = 2.0**-8, 32.0

    def __init__(self, width: int, pixels: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(pixels, width, bias=False)
        self.fc2 = nn.Linear(width, width, bias=False)
        self.readout = MuReadout(width, 10, bias=False, output_mult=self.OUTPUT_MULT, readout_zero_init=True)
        nn.init.normal_(self.fc1.weight, std=(pixels * self.INPUT_MULT) ** -0.5)
        nn.init.normal_(self.fc2.weight, std=width**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of shape (pictures, 10)."""
        return self.readout(F.relu(self.fc2(F.relu(self.fc1(x.flatten(1)) * self.INPUT_MULT**0.5))))


def build(kind: str, width: int, base: int, parametrization: str, pixels: int, seed: int) -> nn.Module:
    """A model in µP over the base width, or in the standard parametrization."""

    def make(width: int) -> nn.Module:
        return MLP(width, pixels) if kind == "mlp" else ResNet(width)

    torch.manual_seed(seed)
    model = make(width)
    if parametrization == "mup":
        # The MLP draws its own deviations, which are µP's already; PyTorch's default for the ResNet's readout is not.
        set_base_shapes(model, make(base), delta=make(2 * base), rescale_params=kind == "resnet")
    else:
        set_base_shapes(model, None)
    return model


def train(
    kind: str, width: int, base: int, parametrization: str, lr: float, seed: int, data: Pictures, steps: int
) -> float:
    """Loss in nats per picture over the training set's first pictures, after the last step; infinite if it diverged."""
    pictures, labels = data
    forward: Any = build(kind, width, base, parametrization, pictures[0].numel(), seed)
    model, rank, ranks = forward, 0, 1
    if torch.distributed.is_initialized():
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        forward = nn.parallel.DistributedDataParallel(model)
    parameters = model.parameters()
    if kind == "mlp":
        optimizer = (MuSGD if parametrization == "mup" else torch.optim.SGD)(parameters, lr=lr)
    else:
        optimizer = (MuAdam if parametrization == "mup" else torch.optim.Adam)(parameters, lr=lr)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        chosen = torch.randint(len(labels), (BATCH,), generator=generator)[
            rank * BATCH // ranks : (rank + 1) * BATCH // ranks
        ]
        loss = F.cross_entropy(forward(pictures[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not math.isfinite(loss.item()) and ranks == 1:
            return math.inf
    with torch.no_grad():  # in training mode, so that a batch norm's running averages do not matter
        found = F.cross_entropy(model(pictures[:_MEASURED]), labels[:_MEASURED]).item()
    return found if math.isfinite(found) else math.inf


def main(words: list[str]) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=list(_WIDTHS))
    parser.add_argument("--data", default="digits", help="digits, or fashion-mnist=FOLDER")
    parser.add_argument("--widths", type=int, nargs="+", help="the first is the base")
    parser.add_argument("--rates", type=float, nargs="+", help="of learning, ascending")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--output", type=Path, help="folder; runs/images-KIND unless given")
    asked = parser.parse_args(words)
    asked.widths, asked.rates = asked.widths or _WIDTHS[asked.kind], asked.rates or _RATES[asked.kind]
    asked.output = asked.output or Path(f"runs/images-{asked.kind}")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        torch.distributed.init_process_group("gloo")
    try:
        result = experiment(asked)
    except UserError as error:
        print(f"images: {error}", file=sys.stderr)
        return 2
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    print("\n".join(lines(result)))
    return {"passed": 0, "failed": 1, "undecided": 3}[result["verdict"]]


def experiment(asked: argparse.Namespace) -> dict[str, Any]:
    """Trains what is missing, writes and draws. Raises UserError."""
    if sorted(asked.rates) != asked.rates or len(asked.rates) < 3 or min(asked.rates) <= 0:
        raise UserError("--rates: expected three or more positive numbers, ascending")
    if sorted(set(asked.widths)) != asked.widths or len(asked.widths) < 2 or min(asked.widths) < 1:
        raise UserError("--widths: expected two or more positive numbers, ascending")
    data = load(asked.data)
    asked.output.mkdir(parents=True, exist_ok=True)
    found = _Found(asked.output / "runs.json", f"{asked.kind}, {asked.data.partition('=')[0]}, {asked.steps} steps")
    began = time.monotonic()
    base, seeds, parametrizations = asked.widths[0], range(asked.seeds), ("mup", "standard")

    def key(parametrization: str, width: int, rate: float, seed: int) -> str:
        return f"{parametrization}, width {width} over {base}, rate {rate:.6g}, seed {seed}"

    plan = [
        (parametrization, width, rate, seed)
        for seed, width, rate, parametrization in itertools.product(seeds, asked.widths, asked.rates, parametrizations)
    ]
    for done, run in enumerate(plan, 1):
        if key(*run) not in found.losses:
            parametrization, width, rate, seed = run
            loss = train(asked.kind, width, base, parametrization, rate, seed, data, asked.steps)
            found.add(key(*run), loss)
        if found.writes:
            print(
                f"\r{done} of {len(plan)}: {key(*run)}: {found.losses[key(*run)]:.4f}".ljust(90),
                end="",
                file=sys.stderr,
            )
    curves = {
        parametrization: {
            width: Curve(
                values=asked.rates,
                losses=[{s: found.losses[key(parametrization, width, rate, s)] for s in seeds} for rate in asked.rates],
            )
            for width in asked.widths
        }
        for parametrization in parametrizations
    }
    question = Question(
        over="lr",
        across="width",
        values=asked.rates,
        factors=asked.widths,
        seeds=asked.seeds,
        least=base,
        compare_with=["standard"],
    )
    result = judge(curves, {width: width for width in asked.widths}, question)
    result |= {
        "failed": [],
        "seconds": time.monotonic() - began,
        "measured": "training loss (nats per picture)",
        "axis": "width",
    }
    result |= {
        "of": asked.kind,
        "data": asked.data.partition("=")[0],
        "steps": asked.steps,
        "provenance": provenance(None),
    }
    result = as_json(result)
    if found.writes:
        print(file=sys.stderr)
        record, picture = (asked.output / f"{asked.kind}.{kind}" for kind in ("json", "png"))
        write_whole(record, json.dumps(result, indent=1, allow_nan=False) + "\n")
        draw_stability(result, picture)
        print(f"written: {record}, {picture}", file=sys.stderr)
    return result


class _Found:
    """Losses of the runs so far, in a file that the first process writes after each."""

    def __init__(self, path: Path, of: str) -> None:
        self._path, self._of = path, of
        self.writes = os.environ.get("RANK", "0") == "0"
        self.losses: dict[str, float] = {}
        if path.exists():
            try:
                held = json.loads(path.read_text())
                self.losses = {key: math.inf if loss is None else float(loss) for key, loss in held["losses"].items()}
                found = held["of"]
            except (ValueError, TypeError, KeyError, AttributeError):
                raise UserError(f"{path}: no runs of this script; expected another --output") from None
            if found != of:
                raise UserError(f"{path}: holds runs of {found}; expected those of {of}, or another --output")

    def add(self, key: str, loss: float) -> None:
        """One run's."""
        self.losses[key] = loss
        if self.writes:
            losses = {key: loss if math.isfinite(loss) else None for key, loss in self.losses.items()}
            write_whole(self._path, json.dumps({"of": self._of, "losses": losses}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
