"""µP for plain torch models, by microsoft/mup's names: a script written for that package runs with its import changed.

`from mup import ...` becomes `from mup_megatron.mup import ...`, and `mup.init`, `mup.coord_check` and its other
modules become `mup_megatron.mup.init` and so on. docs/torch.md says what differs on purpose. Infinite shapes stay on
parameters under DistributedDataParallel, fully_shard, tensor parallelism, DeepSpeed's ZeRO and torch.compile.
"""

from mup_megatron.mup.auditing import audit
from mup_megatron.mup.clip import clip_grad_norm_
from mup_megatron.mup.hugging_face import prepare_hf
from mup_megatron.mup.in_place import split_in_place
from mup_megatron.mup.infshape import InfDim, InfShape, zip_infshape
from mup_megatron.mup.init import (
    eye_,
    kaiming_normal_,
    kaiming_uniform_,
    normal_,
    ones_,
    trunc_normal_,
    uniform_,
    xavier_normal_,
    xavier_uniform_,
)
from mup_megatron.mup.layer import MuReadout, MuSharedReadout, rescale_linear_bias
from mup_megatron.mup.optim import MuAdam, MuAdamW, MuSGD
from mup_megatron.mup.per_tensor import set_per_tensor
from mup_megatron.mup.shape import (
    apply_infshapes,
    assert_hidden_size_inf,
    clear_dims,
    get_infshapes,
    get_shapes,
    load_base_shapes,
    make_base_shapes,
    save_base_shapes,
    set_base_shapes,
    zip_infshapes,
)

__all__ = [
    "InfDim",
    "InfShape",
    "MuAdam",
    "MuAdamW",
    "MuReadout",
    "MuSGD",
    "MuSharedReadout",
    "apply_infshapes",
    "assert_hidden_size_inf",
    "audit",
    "clear_dims",
    "clip_grad_norm_",
    "eye_",
    "get_infshapes",
    "get_shapes",
    "kaiming_normal_",
    "kaiming_uniform_",
    "load_base_shapes",
    "make_base_shapes",
    "normal_",
    "ones_",
    "prepare_hf",
    "rescale_linear_bias",
    "save_base_shapes",
    "set_base_shapes",
    "set_per_tensor",
    "split_in_place",
    "trunc_normal_",
    "uniform_",
    "xavier_normal_",
    "xavier_uniform_",
    "zip_infshape",
    "zip_infshapes",
]
