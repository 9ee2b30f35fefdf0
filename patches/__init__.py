"""Everything that touches upstream's insides: one `Patch` per wrapped symbol. README.md in this folder lists them.

Public names: `Patch`, `apply_patches`, `revert_patches`, `active_patches`, `ALL_PATCHES`. Patches are applied in one
place, parallel/upstream.py, at process start. This package imports nothing of mup_megatron but `errors`.
"""

from .bert import BERT_PATCHES
from .checkpoint import CHECKPOINT_PATCHES
from .cpu import CPU_PATCHES
from .deepspeed import DEEPSPEED_PATCHES
from .moe import MOE_PATCHES
from .patch import Patch, PatchError, active_patches, apply_patches, revert_patches

ALL_PATCHES: tuple[Patch, ...] = (*CPU_PATCHES, *CHECKPOINT_PATCHES, *DEEPSPEED_PATCHES, *MOE_PATCHES, *BERT_PATCHES)

__all__ = ["ALL_PATCHES", "Patch", "PatchError", "active_patches", "apply_patches", "revert_patches"]
