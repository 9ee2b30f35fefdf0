"""A measurement in a process of its own: `python -m benchmarks.child OUT steps|first-step|draw WORDS`. OUT gets JSON.

The parent (start.py) imports no torch: a child's figures hold nothing of an earlier one's, nor of the parent's.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def first_step(name: str, vocabulary: int, began: float, tensors: bool = False, tiny: bool = False) -> dict[str, Any]:
    """Seconds from process start to the first step's end, and the memory that it and another step need.

    Args:
        name: the contender.
        vocabulary: before padding.
        began: time.monotonic() of the parent just before it started this process.
        tensors: also count tensors, in a second build and two steps of it; always the same, so once is enough.
        tiny: for tests.

    Returns:
        `seconds`: `upstream_imports` (with the interpreter's own start), `our_imports`, `build`, `first_step`, and
        `total`, from which plain and native are let off `our_imports`: they need them here for the config alone.
        `mebibytes`: `resident`, the peak above what was resident after the imports, and with `tensors`, those.
    """
    marks = [began]
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed  # noqa: F401
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: F401

    marks.append(time.monotonic())
    from benchmarks import contenders
    from benchmarks.memory import clear_resident_peak, resident_peak, tensor_peak

    marks.append(time.monotonic())
    resident = clear_resident_peak()
    bench = contenders.start(vocabulary, tiny=tiny)
    contender = contenders.build(name, bench)
    marks.append(time.monotonic())
    contender.step()
    marks.append(time.monotonic())
    contender.step()  # Adam's state came with the first step: the peak comes with the second
    mebibytes = {"resident": resident_peak() - resident}
    if tensors:
        del contender

        def again() -> None:
            built = contenders.build(name, bench)
            built.step()
            built.step()

        mebibytes["tensors"] = tensor_peak(again)
    names = ("upstream_imports", "our_imports", "build", "first_step")
    seconds = {name: after - before for name, before, after in zip(names, marks, marks[1:], strict=False)}
    total = sum(seconds.values()) - (0 if name == "ours" else seconds["our_imports"])
    return {"seconds": {**seconds, "total": total}, "mebibytes": mebibytes}


def draw(runs: int) -> dict[str, Any]:
    """Seconds for a billion values: our layout-invariant init of a rank's half of a weight, and torch's normal_."""
    import torch

    from benchmarks.harness import alternate, ratios, spread
    from mup_megatron.model import init
    from mup_megatron.rules.shapes import Init, TensorSpec

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    spec = TensorSpec(shape=(4096, 4096), fan_in=1, fan_out=0, init=Init.WEIGHT, partition_dim=0)
    tensor = torch.empty(spec.local_shape(2), device=device)

    def ours() -> None:
        init.fill(tensor, seed=1, name="w", spec=spec, std={None: 0.02}, rank=1, ranks=2)
        if device.type == "cuda":
            torch.cuda.synchronize()

    def theirs() -> None:
        tensor.normal_(std=0.02)
        if device.type == "cuda":
            torch.cuda.synchronize()

    seconds = alternate({"ours": ours, "torch": theirs}, runs)
    billions = tensor.numel() / 1e9
    return {
        "weight": "a rank's half of 4096 x 4096, fp32",
        "seconds_per_billion": {name: spread([s / billions for s in values]) for name, values in seconds.items()},
        "ours_over": {"torch": ratios(seconds, "ours", "torch")},
    }


def main() -> None:
    """Measures what the words say."""
    out, kind, *words = sys.argv[1:]
    if kind == "steps":
        from benchmarks.steps import measure

        result = measure(words[0], words[1], int(words[2]), runs=int(words[3]))
    elif kind == "first-step":
        result = first_step(words[0], int(words[1]), began=float(words[2]), tensors=words[3:] == ["tensors"])
    else:
        result = draw(int(words[0]))
    if os.environ.get("RANK", "0") == "0":
        Path(out).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
