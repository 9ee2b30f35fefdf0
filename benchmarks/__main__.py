"""`./dev bench`: runs the benchmarks that this machine can do and writes benchmarks/results/cpu.json or gpu.json."""

from __future__ import annotations

import argparse
import json

import torch

from benchmarks import start, steps
from benchmarks.harness import write


def main() -> None:
    """Measures, writes, prints."""
    parser = argparse.ArgumentParser(prog="./dev bench", description=__doc__)
    parser.add_argument("--runs", type=int, default=7, help="counted runs of each body (default 7)")
    parser.add_argument("--quick", action="store_true", help="two runs, one vocabulary: whether it works at all")
    arguments = parser.parse_args()
    runs = 2 if arguments.quick else arguments.runs
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result = {
        "explain": start.explain(runs),
        "init": start.draw(device, runs),
        "steps": [steps.measure(vocabulary, runs) for vocabulary in ((4096,) if arguments.quick else (4096, 50304))],
    }
    print(json.dumps(result, indent=1))
    if not arguments.quick:
        print(write("gpu" if device.type == "cuda" else "cpu", result))


if __name__ == "__main__":
    main()
