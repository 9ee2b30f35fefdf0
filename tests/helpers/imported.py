"""What ranks import, imported once in the process that they are forked from (distributed.py)."""

import gc

from mup_megatron.parallel import upstream

upstream.quiet()
upstream.prepare_deepspeed()

import megatron.core.tokenizers.text.libraries  # noqa: E402, F401  (transformers, when the first tokenizer is read)
import torch._dynamo  # noqa: E402  (torch's optimizers import it when the first is built)
import torch._inductor.compile_fx  # noqa: E402, F401  (torch.compile, where it is disabled too)

import mup_megatron.engines.deepspeed  # noqa: E402
import mup_megatron.engines.megatron  # noqa: E402, F401
import tests.helpers.bodies  # noqa: E402, F401

# A rank looks for cycles after every body (runtime.stop_distributed). Without this it walks the half million objects of
# the imports each time, which took a third of all ranks' time.
gc.freeze()
