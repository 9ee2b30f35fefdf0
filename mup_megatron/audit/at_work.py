"""Forward multipliers as they are at work, measured by hooks in a forward pass. Public name: `AtWork`.

What a module multiplies with is what its output is of what went in. Nothing is read from a config or an attribute.
A few tokens of each call are looked at; calls of recomputation and of every micro-batch count as calls of their own.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed
from megatron.core import parallel_state
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.distributed.tensor import DTensor

from mup_megatron.audit.findings import Finding
from mup_megatron.audit.multiple import Measured, multiple
from mup_megatron.audit.softmax_scale import softmax_scale
from mup_megatron.model.global_names import named_modules
from mup_megatron.rules.shapes import Init
from mup_megatron.rules.table import WORD_EMBEDDINGS, ForwardMultipliers, Parametrization, TensorHyperparameters

_TOKENS = 8
"""Of each call, and of each sequence in it."""
_ROWS = 1024
"""Of a weight."""
_ERROR = 1e-3
"""Relative, beside what the rounding of the tensors explains."""
_STRANGE = 0.05
"""Share of a branch's sum of squares that no multiple of its output explains, from which on it is not judged."""
_UNCLEAR = 0.1
"""Relative uncertainty from which on a multiplier is not judged."""

_LINEAR, _TABLES = (ColumnParallelLinear, RowParallelLinear), (VocabParallelEmbedding, torch.nn.Embedding)


class _Key(NamedTuple):
    module: str
    quantity: str


_EMBEDDING, _READOUT, _SOFTMAX = "embedding multiplier", "readout multiplier", "softmax scale"
_RESIDUAL, _LAYER, _BIAS = "residual multiplier", "layer multiplier", "position bias multiplier"


class AtWork:
    """Looks at a model's forward passes from now on until `close`.

    Args:
        chunks: this rank's part, bare or in what an engine made of it.
        table: of the run.
    """

    def __init__(self, chunks: Sequence[LanguageModule], table: Parametrization) -> None:
        self._expected: dict[_Key, float] = {}
        self._seen: dict[_Key, list[torch.Tensor]] = {}
        self._handles: list[Any] = []
        forward = table.forward
        head = table.tensors.get("output_layer.weight") or table.tensors.get(WORD_EMBEDDINGS)
        for name, module in named_modules(chunks):
            if name == "embedding" and hasattr(module, "word_embeddings"):
                self._watch_embedding(_Key(name, _EMBEDDING), module, forward.embedding)
            elif name == "output_layer" and head is not None:
                self._watch_linear(_Key(name, _READOUT), module, forward.readout * float(head.theta))
            elif (row := table.tensors.get(f"{name}.weight")) is not None:
                self._watch_layer_of(row, name, module, forward)
            elif name.endswith("core_attention") and not isinstance(module, IdentityOp):
                self._watch_attention(_Key(name, _SOFTMAX), module, forward.softmax_scale)
            elif isinstance(module, TransformerLayer | MambaLayer):
                outside = table.config.hparams.residual_multiplier
                self._watch_layer(name, module, outside if name.startswith("mtp.") else forward.residual)

    def close(self) -> None:
        """Takes the hooks out."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def findings(self) -> tuple[list[Finding], list[str]]:
        """What was seen on all ranks, and in words what was not. Collective."""
        own = {key: (self._expected[key], *self._worst(key)) for key in self._expected}
        ranks: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(ranks, own)
        found: dict[_Key, tuple[float, Measured | None]] = {}
        for held in ranks:
            for key, (expected, *numbers) in held.items():
                measured = Measured(*numbers)
                before = found.get(key, (expected, None))[1]
                if math.isnan(measured.found):
                    found.setdefault(key, (expected, None))
                elif before is None or _off(measured, expected) > _off(before, expected):
                    found[key] = expected, measured
        seen = [(key, *value) for key, value in found.items()]
        unseen = [f"{key.quantity} of {key.module}" for key, _, measured in seen if measured is None]
        return [_judged(key, expected, measured) for key, expected, measured in seen if measured is not None], unseen

    def _worst(self, key: _Key) -> Measured:
        """Of this rank's calls that tell something, the one that is the farthest off."""
        calls = torch.stack(self._seen[key]).tolist() if key in self._seen else []
        told = [call for call in map(Measured._make, calls) if _tells(call)]
        return max(told, key=lambda call: _off(call, self._expected[key]), default=Measured(math.nan, 0.0, 0.0))

    def _see(self, key: _Key, measured: Measured) -> None:
        self._seen.setdefault(key, []).append(torch.stack([number.detach() for number in measured]))

    def _on(self, register: Callable[..., Any], hook: Callable[..., None], **how: bool) -> None:
        """One hook, which is no part of what is trained; a module that it does not understand is not seen."""

        @torch.no_grad()
        def see(*call: Any) -> None:
            with contextlib.suppress(Exception):
                hook(*call)

        self._handles.append(register(see, with_kwargs=True, **how))

    def _watch_embedding(self, key: _Key, module: Any, expected: float) -> None:
        """What the whole embedding gives, of the sum of what its tables give."""
        self._expected[key] = expected
        tables: dict[str, torch.Tensor] = {}
        for name in ("word_embeddings", "position_embeddings", "tokentype_embeddings"):
            if (table := getattr(module, name, None)) is not None:
                self._on(table.register_forward_hook, functools.partial(_keep, tables, name))

        def see(module: Any, _args: Any, _kwargs: Any, output: torch.Tensor) -> None:
            summed = sum(tables.values(), torch.zeros((), device=output.device))
            tables.clear()
            if not module.reduce_scatter_embeddings:
                summed = summed.transpose(0, 1)
            summed = summed[_own_rows(output.size(0), summed.size(0))][:_TOKENS]
            dropout = module.config.hidden_dropout if module.training else 0.0
            self._see(key, multiple(output[:_TOKENS], summed, dropout=dropout))

        self._on(module.register_forward_hook, see)

    def _watch_layer_of(self, row: TensorHyperparameters, name: str, module: Any, forward: ForwardMultipliers) -> None:
        """Where a layer multiplies: the table of a position bias, and whatever has its weight stored over θ."""
        theta = float(row.theta)
        if row.shape.spec.init is Init.RELATIVE_BIAS:
            self._watch_table(_Key(name, _BIAS), module, forward.relative_bias * theta)
        elif theta != 1 and isinstance(module, _TABLES):
            self._watch_table(_Key(name, _LAYER), module, theta)
        elif theta != 1 and isinstance(module, _LINEAR):
            self._watch_linear(_Key(name, _LAYER), module, theta)

    def _watch_table(self, key: _Key, module: Any, expected: float) -> None:
        """What a lookup gives, of the rows of its weight."""
        self._expected[key] = expected
        if getattr(module, "num_embeddings_per_partition", module.num_embeddings) != module.num_embeddings:
            return  # its output is a sum over ranks, which have some of the rows each
        held: dict[str, torch.Tensor] = {}

        def between(module: Any, args: Any, _kwargs: Any) -> None:
            """Behind all hooks that put a weight together."""
            if not isinstance(module.weight, DTensor):
                held["rows"] = module.weight[args[0].flatten()[:_ROWS]].double()

        def see(module: Any, args: Any, _kwargs: Any, output: torch.Tensor) -> None:
            if (rows := held.pop("rows", None)) is None:
                return
            if args[0].dim() == 2 and getattr(module, "reduce_scatter_embeddings", False):
                output = output.transpose(0, 1)
            self._see(key, multiple(output.flatten(0, -2)[:_ROWS], rows))

        self._on(module.register_forward_pre_hook, between)
        self._on(module.register_forward_hook, see)

    def _watch_linear(self, key: _Key, module: Any, expected: float) -> None:
        """What a linear layer gives without its bias, of what its weight makes of its input; logits of a head."""
        self._expected[key] = expected
        if isinstance(module, RowParallelLinear) and module.input_size_per_partition != module.input_size:
            return  # its output is a sum over ranks, which have a part of the product each
        held: dict[str, torch.Tensor] = {}

        def before(_module: Any, args: Any, kwargs: Any) -> None:
            held["input"] = (args[0] if args else kwargs["input_"])[:_TOKENS].detach().clone()

        def between(module: Any, args: Any, kwargs: Any) -> None:
            """Behind all hooks that put a weight together."""
            weight = args[1] if len(args) > 1 else kwargs.get("weight")
            weight = module.weight if weight is None else weight
            if not isinstance(weight, DTensor) and weight.numel():
                held["product"] = held["input"].double() @ weight[:_ROWS].double().T

        def see(module: Any, args: Any, _kwargs: Any, output: Any) -> None:
            if (product := held.pop("product", None)) is None:
                return
            logits, bias = output if isinstance(output, tuple) else (output, None)
            rows = module.weight.size(0) if module.weight is not None else logits.size(-1)
            columns = _own_rows(rows, logits.size(-1))
            logits = logits[_own_rows(args[0].size(0), logits.size(0))][:_TOKENS, ..., columns][..., :_ROWS]
            if bias is None and getattr(module, "bias", None) is not None:
                logits = logits - module.bias[:_ROWS]
            self._see(key, multiple(logits, product))

        self._on(module.register_forward_pre_hook, before, prepend=True)
        self._on(module.register_forward_pre_hook, between)
        self._on(module.register_forward_hook, see)

    def _watch_attention(self, key: _Key, module: Any, expected: float) -> None:
        self._expected[key] = expected

        def see(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            measured = softmax_scale(module, args, kwargs, output, expected)
            if measured is not None:
                self._see(key, measured)

        self._on(module.register_forward_hook, see)

    def _watch_layer(self, name: str, layer: Any, expected: float) -> None:
        """What each branch adds to the residual stream, of what it gives."""
        held: dict[str, torch.Tensor] = {}
        keys = {}
        for branch, place in _branches(layer):
            keys[branch] = _Key(f"{name}.{branch}", _RESIDUAL)
            self._expected[keys[branch]] = expected
            self._on(getattr(layer, branch).register_forward_hook, functools.partial(_keep_branch, held, branch))
            if place is not None:
                self._on(getattr(layer, place).register_forward_pre_hook, functools.partial(_keep_input, held, place))
        self._on(layer.register_forward_pre_hook, functools.partial(_keep_input, held, "input"))

        def see(layer: Any, _args: Any, _kwargs: Any, output: Any) -> None:
            stream = held.pop("input", None)
            dropout = layer.config.hidden_dropout if layer.training else 0.0
            places = [place for _, place in _branches(layer)][1:]
            last = (output[0] if isinstance(output, tuple) else output)[:_TOKENS]
            for branch, place in zip(keys, [*places, None], strict=True):
                added, after = held.pop(branch, None), last if place is None else held.pop(place, None)
                if stream is not None and added is not None and after is not None and after.shape == stream.shape:
                    moved, dtype = after.double() - stream.double(), layer.config.params_dtype
                    self._see(keys[branch], multiple(moved, added, dropout=dropout, dropped_in=dtype, rounded=after))
                stream = after

        self._on(layer.register_forward_hook, see)


def _branches(layer: Any) -> list[tuple[str, str | None]]:
    """Branches of upstream's layer, in order, each with the module that takes the residual stream before it."""
    if isinstance(layer, MambaLayer):
        return [("mixer", None)]
    of_layer = {"self_attention": None, "cross_attention": "pre_cross_attn_layernorm", "mlp": "pre_mlp_layernorm"}
    found = [
        (branch, place) for branch, place in of_layer.items() if not isinstance(getattr(layer, branch), IdentityOp)
    ]
    return [(branch, place if number else None) for number, (branch, place) in enumerate(found)]


def _own_rows(own: int, all_rows: int) -> slice:
    """Of what ranks of tensor parallelism hold slices of, this rank's slice."""
    if own == all_rows:
        return slice(None)
    first = parallel_state.get_tensor_model_parallel_rank() * own
    return slice(first, first + own)


def _keep(held: dict[str, Any], name: str, _module: Any, _args: Any, _kwargs: Any, output: torch.Tensor) -> None:
    held[name] = output.detach().clone()


def _keep_branch(held: dict[str, Any], name: str, _module: Any, _args: Any, _kwargs: Any, output: Any) -> None:
    output, bias = output if isinstance(output, tuple) else (output, None)
    held[name] = output[:_TOKENS].double() if bias is None else output[:_TOKENS].double() + bias.double()


def _keep_input(held: dict[str, Any], name: str, _module: Any, args: Any, kwargs: Any) -> None:
    held[name] = (args[0] if args else kwargs["hidden_states"])[:_TOKENS].detach().clone()


def _tells(measured: Measured) -> bool:
    """Whether the numbers are a multiplier: not of zeros, not lost in rounding, not of something else."""
    found, noise, strange = measured
    return math.isfinite(found) and noise <= _UNCLEAR * abs(found) and strange <= _STRANGE


def _off(measured: Measured, expected: float) -> float:
    """How far a multiplier is off, in what it may be."""
    return abs(measured.found - expected) / (_ERROR * abs(expected) + measured.noise)


def _judged(key: _Key, expected: float, measured: Measured) -> Finding:
    return Finding(
        tensor=key.module,
        quantity=key.quantity,
        expected=expected,
        found=measured.found,
        within=f"{_ERROR * abs(expected) + measured.noise:.3g}",
        right=_off(measured, expected) <= 1.0,
        of="module",
    )
