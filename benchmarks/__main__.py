"""`./dev bench`: ours against plain megatron-core and its native MuP. Writes benchmarks/results/; about 20
minutes, once the machine is quiet.

`--quick` sees whether it works, and writes nothing; `--explain` measures that command alone; `--table` only makes the
table anew from the JSON files.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any, NamedTuple

from benchmarks import table
from benchmarks.harness import absent, has_plain_experts, path_of, wait_for_quiet, write
from benchmarks.start import explain, first_steps, imports, in_child
from mup_megatron.util.provenance import machine


class Cell(NamedTuple):
    """What steps are compared on.

    Args:
        architecture: `gpt3`, `llama` or `moe`.
        engine: `deepspeed` or `megatron`.
        vocabulary: before padding.
        tensor: tensor-parallel ranks, each with one thread.
        share: of the rounds; a large vocabulary's steps are long, and alike.
    """

    architecture: str
    engine: str
    vocabulary: int
    tensor: int
    share: float = 1.0


CELLS = (
    Cell("gpt3", "deepspeed", 4096, 1),
    Cell("gpt3", "deepspeed", 50304, 1, 0.4),
    Cell("gpt3", "deepspeed", 4096, 2),
    Cell("gpt3", "megatron", 4096, 1),
    Cell("gpt3", "megatron", 4096, 2),
    Cell("llama", "deepspeed", 4096, 1),
    Cell("moe", "megatron", 4096, 1),
)


def main() -> None:
    """Measures, writes, prints."""
    parser = argparse.ArgumentParser(
        prog="./dev bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=100, help="rounds of steps (default 100)")
    parser.add_argument("--rounds", type=int, default=3, help="processes for each start-up, `explain` too (default 3)")
    parser.add_argument("--quick", action="store_true", help="2 runs, 1 round, two cells; writes nothing")
    parser.add_argument("--explain", action="store_true", help="measure `explain` alone, beside the other results")
    parser.add_argument("--table", action="store_true", help="measure nothing; make the table from the JSON files")
    arguments = parser.parse_args()
    if arguments.table:
        print(table.write())
        return
    if arguments.explain:
        _explain_anew(arguments.rounds)
        return
    runs, rounds = (2, 1) if arguments.quick else (arguments.runs, arguments.rounds)
    asked = CELLS[3:5] if arguments.quick else CELLS
    cells = [cell for cell in asked if cell.architecture != "moe" or has_plain_experts()]
    vocabularies = (4096,) if arguments.quick else (4096, 50304)
    before = wait_for_quiet(0.0 if arguments.quick else 1200.0)
    began = time.monotonic()
    measured = {
        "absent": absent(),
        "steps": [_steps(cell, runs) for cell in cells],
        "first_steps": [first_steps(vocabulary, rounds) for vocabulary in vocabularies],
        "init": in_child("draw", str(min(runs, 11))),
        "explain": explain(rounds),
        "imports": imports(rounds),
    }
    result = {
        "machine": machine(),
        "busy": {"before": before, "after": wait_for_quiet(0.0)},
        "seconds": round(time.monotonic() - began),
        **measured,
    }
    print(table.one(result))
    if not arguments.quick:
        print(f"{write(result)}, {table.write()}")


def _explain_anew(rounds: int) -> None:
    """Puts what `explain` takes now, with its date, into the result that is there."""
    wait_for_quiet(1200.0)
    measured = {"explain": explain(rounds), "imports": imports(rounds)}
    here = machine()  # which imports torch: a child's peak of memory begins with its parent's
    result = json.loads(path_of({"machine": here}).read_text(encoding="utf-8"))
    print(f"{write({**result, **measured, 'explain_date': here['date']})}, {table.write()}")


def _steps(cell: Cell, runs: int) -> Any:
    print(f"steps: {cell.architecture}, {cell.engine}, vocabulary {cell.vocabulary}, TP {cell.tensor}", flush=True)
    words = (cell.architecture, cell.engine, str(cell.vocabulary), str(max(2, round(runs * cell.share))))
    return in_child("steps", *words, ranks=cell.tensor)


if __name__ == "__main__":
    main()
