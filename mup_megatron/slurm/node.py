"""One node's part of the target: `srun python -m mup_megatron.slurm.node ADDRESS PORT RANKS LOGS ARGUMENTS...`.

srun starts it once per node; it starts the node's ranks as torchrun does with --nnodes, --node-rank, --master-addr and
--master-port, of which SLURM's variables of this task tell the first two. The first node of a job on which a rank fails
says so on the screen; what others say afterwards, that their peer is gone, stays in their logs.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

from mup_megatron.parallel.launch import LOGS, Nodes, log_path, start_ranks
from mup_megatron.util.errors import Held
from mup_megatron.util.files import read_text

FAILURE = "first-failure.json"
"""In the folder of the logs: {"node", "rank", "status"} of the rank that failed first."""
_LINES = 40


def main(arguments: list[str]) -> int:
    """Starts the ranks of this node; their exit status."""
    address, port, ranks, logs, *command = arguments
    nodes = Nodes(
        rank=int(os.environ["SLURM_NODEID"]), count=int(os.environ["SLURM_NNODES"]), address=address, port=int(port)
    )
    os.environ[LOGS] = logs
    try:
        return start_ranks(command, int(ranks), nodes, lambda rank, status: _failed(Path(logs), rank, status))
    except Held as held:
        print(f"mup-megatron: error: {held}", file=sys.stderr, flush=True)
        return held.status


def _failed(logs: Path, rank: int, status: int) -> None:
    host = socket.gethostname()
    try:
        with (logs / FAILURE).open("x", encoding="utf-8") as file:
            file.write(json.dumps({"node": host, "rank": rank, "status": status}))
    except FileExistsError:
        return  # another node's was the first
    path = log_path(logs, host, rank)
    print(f"mup-megatron: rank {rank} on {host} failed first, exit status {status}; its log: {path}", flush=True)
    if rank:  # rank 0 is on the screen already
        print(first_error(path), flush=True)


def first_error(path: Path) -> str:
    """A log from its first error on; its last lines if there is none."""
    try:
        lines = read_text(path, errors="replace", most=None).splitlines()
    except OSError:
        return ""
    for number, line in enumerate(lines):
        if line.startswith(("Traceback", "mup-megatron: error")):
            return "\n".join(lines[number : number + _LINES])
    return "\n".join(lines[-_LINES // 4 :])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
