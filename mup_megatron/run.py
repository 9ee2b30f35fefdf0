"""`python -m mup_megatron.run SCRIPT ARGS...`: what launchers start; `mup-megatron run` is the same.

torchrun --nproc-per-node 8 -m mup_megatron.run [--config mup.yaml] pretrain_gpt.py ARGS...
"""

import sys

from mup_megatron.cli import run

if __name__ == "__main__":
    sys.exit(run(["run", *sys.argv[1:]]))
