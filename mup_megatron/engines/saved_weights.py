"""What lies in a checkpoint's folder, read without a model and without a process group, whatever layout wrote it.

Public names: `SavedWeights`, `read_into`, `write_tensors`, `Tensor`, `saved_shapes`, `damaged`, `BUFFER`, `COMMON`.
Beside this project's own checkpoints it reads those of megatron.training (`mup-megatron run`, a patched tree): both are
torch's distributed checkpoints, under other names.

megatron.training keeps a tensor of all layers under one key, [layers, ...], and one of all layers' experts as
[layers, experts, ...] (`TransformerBlock.sharded_state_dict`); a norm before a linear bears that linear's name, as
Transformer Engine has it (`sharded_state_dict_keys_map` of the layer specs).
"""

from __future__ import annotations

import enum
import io
import itertools
import json
import pickle
import pickletools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, LoadPlan, load, save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from mup_megatron.engines import WEIGHT
from mup_megatron.model.global_names import named_buffers, named_parameters
from mup_megatron.model.init import local_slice
from mup_megatron.model.layers.tensor_spec import spec_of
from mup_megatron.parallel.layout import Layout
from mup_megatron.util.errors import UserError
from mup_megatron.util.files import check_regular, read_bytes

BUFFER = "buffer"
"""What keys of a model's buffers begin with."""
COMMON = "common.pt"
_INDEX = ".metadata"
# Megatron's name of a module: ours.
_NORMS = {
    ".self_attention.linear_qkv.layer_norm_": ".input_layernorm.",
    ".mlp.linear_fc1.layer_norm_": ".pre_mlp_layernorm.",
    ".self_attention.linear_q_up_proj.layer_norm_": ".self_attention.q_layernorm.",
    ".self_attention.linear_kv_up_proj.layer_norm_": ".self_attention.kv_layernorm.",
}
_EXPERTS = ".experts.experts."


def damaged(directory: Path, error: BaseException) -> UserError:
    """What is said of a folder whose files raised an error while they were read."""
    error = cause(error)
    if isinstance(error, pickle.UnpicklingError):  # torch's words go on for a page
        return UserError(f"{directory}: a file of it holds something else than tensors; it will not be loaded")
    return UserError(f"{directory}: damaged ({(str(error) or type(error).__name__).splitlines()[0]})")


def cause(error: BaseException) -> BaseException:
    """What a rank raised, of the exception that torch makes of it, which is no Exception; any other one itself."""
    failures = error.failures.values() if isinstance(error, CheckpointException) else ()
    return next((failure for failure, _ in failures), error)


def saved_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Keys and global shapes of a checkpoint.

    Raises:
        UserError: its index cannot be read, is none, or names anything but tensors.
    """
    return _shapes(_index(directory), directory)


class SavedWeights:
    """The weights of a checkpoint, and what its model keeps beside them, read one by one in this process.

    Args:
        directory: of the checkpoint.
        megatron: what the names of its tensors begin with where megatron.training wrote it (`mup_megatron.`); None
            for a checkpoint of this project.
        kinds: what is read of a checkpoint of this project; a moment (`exp_avg`) instead of the weights.

    Raises:
        UserError: as for `saved_shapes`.
    """

    def __init__(
        self, directory: Path, *, megatron: str | None = None, kinds: Sequence[str] = (WEIGHT, BUFFER)
    ) -> None:
        prefixes = tuple(f"{kind}." for kind in kinds) if megatron is None else (megatron,)
        self.directory, self._index = directory, _index(directory, megatron)
        keys = _shapes(self._index, directory)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._places: dict[str, tuple[str, tuple[int, ...]]] = {}
        for key, shape in keys.items():
            prefix = next((prefix for prefix in prefixes if key.startswith(prefix)), None)
            if prefix is None:
                continue
            names = {key.removeprefix(prefix): ()} if megatron is None else _unstacked(key.removeprefix(prefix), shape)
            for name, place in names.items():
                self.shapes[name] = shape[len(place) :]
                self._places[name] = key, place

    def read(self, name: str) -> torch.Tensor:
        """The whole of one tensor by its global name, float32. Raises UserError where a file is damaged."""
        key, place = self._places[name]
        tensor = torch.empty(self.shapes[name])
        into = tensor[(None,) * len(place)]
        try:
            reader = _Reader(self.directory, self._index)
            load({key: into}, storage_reader=reader, planner=_Slice(key, into, place), no_dist=True)
        except (Exception, CheckpointException) as error:  # the files decide what
            raise damaged(self.directory, error) from None
        return tensor


@torch.no_grad()
def read_into(
    chunks: Sequence[LanguageModule], weights: SavedWeights, layout: Layout, rank: int, left_out: Collection[str] = ()
) -> None:
    """Reads weights, and what the model keeps beside them, into this rank's part of a model.

    Every rank reads whole tensors and keeps its slices. Multi-token prediction stays as it is.

    Args:
        chunks: this rank's part.
        weights: of the checkpoint.
        layout: how ranks split the model.
        rank: of this process.
        left_out: global names of tensors that stay as they are.

    Raises:
        UserError: the checkpoint lacks a tensor, has another shape, or is damaged.
    """
    for name, parameter in named_parameters(chunks):
        spec = spec_of(parameter)
        if spec is not None and name not in left_out and not name.startswith("mtp."):
            whole = _read(weights, name, spec.shape)
            parameter.copy_(local_slice(whole, spec, *layout.slice_of(spec, rank)))
    for name, buffer in named_buffers(chunks):
        if not name.startswith("mtp."):
            buffer.copy_(_read(weights, name, tuple(buffer.shape)))


def _read(weights: SavedWeights, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    if weights.shapes.get(name) != shape:
        found = f"of shape {list(weights.shapes[name])}" if name in weights.shapes else "missing"
        raise UserError(f"{weights.directory}: {name} is {found}; expected {list(shape)}")
    return weights.read(name)


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor that is made when it is written.

    Args:
        shape: known before.
        make: returns it, float32.
    """

    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]


def write_tensors(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes what `state.load_state` reads, in this process alone, into an existing empty folder, one by one.

    Args:
        directory: of the checkpoint.
        tensors: whole ones by key (`exp_avg.decoder.final_layernorm.weight`).

    Raises:
        Exception: what a tensor's `make` or the file system raised.
    """
    described = {key: torch.empty(tensor.shape, device="meta") for key, tensor in tensors.items()}
    writer = FileSystemWriter(directory, single_file_per_rank=True)
    try:
        save(described, storage_writer=writer, planner=_WhenWritten(tensors), no_dist=True)
    except CheckpointException as error:
        raise cause(error) from None
    # What megatron-core's dist_checkpointing looks for beside it.
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (directory / "metadata.json").write_text(json.dumps(backend), encoding="utf-8")
    torch.save({}, directory / COMMON)


class _WhenWritten(DefaultSavePlanner):
    """Plans with tensors that hold nothing, and makes each when its turn comes."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """The tensor itself."""
        return self._tensors[write_item.index.fqn].make()


def _unstacked(key: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The tensors that Megatron keeps under one key: their global names, and where each stands in the first axes."""
    for theirs, ours in _NORMS.items():
        key = key.replace(theirs, ours)
    stacked = re.match(r"(decoder|mtp)\.layers\.(?!\d)", key)
    axes = (stacked is not None) + (_EXPERTS in key)
    names = {}
    for place in itertools.product(*map(range, shape[:axes])):
        name = key
        if stacked:
            name = name.replace(".layers.", f".layers.{place[0]}.", 1)
        if _EXPERTS in key:
            name = name.replace(_EXPERTS, f".experts.local_experts.{place[-1]}.")
        names[name] = place
    return names


class _Slice(DefaultLoadPlanner):
    """Reads a part of a stored tensor: what stands at one place of its first axes."""

    def __init__(self, key: str, into: torch.Tensor, place: tuple[int, ...]) -> None:
        super().__init__()
        self._key, self._into, self._place = key, into, place

    def create_local_plan(self) -> LoadPlan:
        """The pieces of files that the part lies in."""
        index = cast("Metadata", self.metadata)
        stored = cast("TensorStorageMetadata", index.state_dict_metadata[self._key])  # as _index saw to
        rest = self._into.dim() - len(self._place)
        wanted = ChunkStorageMetadata(torch.Size((*self._place, *[0] * rest)), self._into.shape)
        return LoadPlan(create_read_items_for_chunk_list(self._key, stored, [wanted]))

    def lookup_tensor(self, index: Any) -> torch.Tensor:
        """Where all of it goes."""
        return self._into


class _Reader(FileSystemReader):
    """torch's reader, which takes the index that was read already; its own would unpickle whatever stands there."""

    def __init__(self, directory: Path, index: Metadata) -> None:
        super().__init__(directory)
        self._known = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index."""
        return self._known


def _index(directory: Path, megatron: str | None = None) -> Metadata:
    """The index of a checkpoint, which is a pickle and is read as data alone.

    Args:
        directory: of the checkpoint.
        megatron: see `SavedWeights`. What else Megatron keeps there (random states, arguments) are pickles, which are
            left out, and never read.

    Raises:
        UserError: see `saved_shapes`.
    """
    path = directory / _INDEX
    try:
        content = read_bytes(path, None)
        _check_sizes(content)
        index = _IndexUnpickler(io.BytesIO(content)).load()
    except UserError:
        raise
    except pickle.UnpicklingError as error:
        raise UserError(f"{path}: not an index that can be loaded safely ({error})") from None
    except Exception as error:  # what a damaged pickle raises is of any kind, torch's RuntimeError among them
        raise UserError(f"{path}: cannot read the index of the checkpoint ({type(error).__name__}: {error})") from None
    for held in directory.glob("*.distcp"):  # torch would wait for who writes a pipe
        check_regular(held, None)
    entries = getattr(index, "state_dict_metadata", None)
    if not isinstance(index, Metadata) or not isinstance(entries, dict):
        raise UserError(f"{path}: expected the index of a distributed checkpoint")
    if (directory / COMMON).is_file():
        entries = {key: entry for key, entry in entries.items() if not str(key).startswith("common_state/")}
    if megatron is not None:
        entries = {
            key: entry
            for key, entry in entries.items()
            if str(key).startswith(megatron) and isinstance(entry, TensorStorageMetadata)
        }
    for key, entry in entries.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise UserError(f"{path}: {key} is not a tensor; it will not be loaded")
    index.state_dict_metadata = entries
    return index


def _shapes(index: Metadata, directory: Path) -> dict[str, tuple[int, ...]]:
    try:
        return {key: tuple(entry.size) for key, entry in index.state_dict_metadata.items()}  # type: ignore[union-attr]
    except (AttributeError, TypeError) as error:
        raise UserError(f"{directory / _INDEX}: cannot read the index of the checkpoint ({error})") from None


def _check_sizes(content: bytes) -> None:
    """Whether a pickle asks for more room than it has content. Raises ValueError.

    Python makes room for a memo's entry, or for a string's bytes, by the number that the file names.
    """
    if len(content) > _LOOKED_AT:
        return
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) > len(content):
            raise ValueError(f"entry {argument} of a memo, in a file of {len(content)} bytes")


_LOOKED_AT = 1 << 24  # a second; a longer index is believed that its checksum is its own


class _IndexUnpickler(pickle.Unpickler):
    """Reads an index without letting it import anything but what an index of tensors consists of."""

    _ALLOWED = frozenset(
        {("pathlib", "PosixPath"), ("torch", "Size"), ("torch.serialization", "_get_layout")}
        | {
            ("torch.distributed.checkpoint.metadata", name)
            for name in (
                "Metadata",
                "TensorStorageMetadata",
                "BytesStorageMetadata",
                "TensorProperties",
                "_MEM_FORMAT_ENCODING",
                "ChunkStorageMetadata",
                "MetadataIndex",
                "StorageMeta",
            )
        }
        | {("torch.distributed.checkpoint.filesystem", "_StorageInfo")}
        | {
            ("torch.distributed.checkpoint.planner", name)
            for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        """The class, if it is one of those. Raises pickle.UnpicklingError."""
        if (module, name) in self._ALLOWED or (module == "torch" and _is_dtype(name)):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _member(kind: Any, name: Any) -> Any:
    """A member of an Enum, which the first releases of Python 3.11 (Debian 12's too) pickle as getattr of its class.

    Raises:
        pickle.UnpicklingError: it is anything else's attribute.
    """
    if isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError("it reads an attribute of what is no Enum")


def _is_dtype(name: str) -> bool:
    return isinstance(getattr(torch, name, None), torch.dtype)
