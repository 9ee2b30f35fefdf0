"""`./dev bench`: ours against plain megatron-core and its native MuP. Writes benchmarks/results/; 4 minutes.

`--quick` sees whether it works, and writes nothing; `--table` only makes the table anew from the JSON files.
"""

from __future__ import annotations

import argparse
import os
import time

from benchmarks import table
from benchmarks.harness import absent, machine, write
from benchmarks.start import explain, first_steps, in_child


def main() -> None:
    """Measures, writes, prints."""
    parser = argparse.ArgumentParser(
        prog="./dev bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=11, help="counted runs of a step, of init (default 11)")
    parser.add_argument("--rounds", type=int, default=3, help="processes for each start-up, `explain` too (default 3)")
    parser.add_argument("--quick", action="store_true", help="2 runs, 1 round, one vocabulary; writes nothing")
    parser.add_argument("--table", action="store_true", help="measure nothing; make the table from the JSON files")
    arguments = parser.parse_args()
    if arguments.table:
        print(table.write())
        return
    runs, rounds = (2, 1) if arguments.quick else (arguments.runs, arguments.rounds)
    began, load = time.monotonic(), os.getloadavg()[0]
    vocabularies = (4096,) if arguments.quick else (4096, 50304)
    measured = {
        "absent": absent(),
        "steps": [in_child("steps", str(vocabulary), str(runs)) for vocabulary in vocabularies],
        "first_steps": [first_steps(vocabulary, rounds) for vocabulary in vocabularies],
        "init": in_child("draw", str(runs)),
        "explain": explain(rounds),
    }
    result = {
        "machine": machine(),
        "load": {"before": load, "after": os.getloadavg()[0]},
        "seconds": round(time.monotonic() - began),
        **measured,
    }
    print(table.one(result))
    if not arguments.quick:
        print(f"{write(result)}, {table.write()}")


if __name__ == "__main__":
    main()
