#!/usr/bin/env bash
""":"
# Tunes the proxy and writes the transfer record; every process is a worker on one shared study.
# This file is both shell and Python: the deepspeed launcher runs it with python.
#     deepspeed launch/tune_proxy.sh [CONFIG] [key.path=value ...]
#     bash launch/tune_proxy.sh ...    torchrun --nproc-per-node 2 launch/tune_proxy.sh ...
# Without CONFIG it takes configs/demo.yaml. On a machine without GPUs deepspeed starts one process unless told
# otherwise: deepspeed --num_gpus 2 launch/tune_proxy.sh
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[ -x "$here/.venv/bin/deepspeed" ] && PATH="$here/.venv/bin:$PATH"
command -v deepspeed >/dev/null || { echo "deepspeed is not on the PATH; run ./dev setup, then . .venv/bin/activate" >&2; exit 2; }
exec deepspeed "${BASH_SOURCE[0]}" "$@"
":"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from mup_megatron.cli import launched

    launched("tune", sys.argv[1:])
