"""What ranks import, imported once in the process that they are forked from (distributed.py)."""

from mup_megatron import upstream

upstream.prepare_process()

import torch._dynamo  # noqa: E402, F401  (torch's optimizers import it when the first is built)

import mup_megatron.engines.deepspeed  # noqa: E402
import mup_megatron.engines.megatron  # noqa: E402, F401
import tests.bodies  # noqa: E402, F401
