"""Layers that only the model as built knows: rates by hand, sizes of coordinates, and what is refused."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.mlp import MLP as MegatronMLP
from megatron.core.transformer.moe import experts

from mup_megatron.config import Config
from mup_megatron.data.prepare import prepare
from mup_megatron.model.as_built.build import builds_of, join_builds, parametrize_builds
from mup_megatron.model.as_built.chunks import digest_of
from mup_megatron.model.as_built.tensors import Entry, _upstreams_entry
from mup_megatron.model.as_built.tensors_file import read_tensors
from mup_megatron.model.build import parametrize
from mup_megatron.model.unsharded import unsharded
from mup_megatron.parallel import upstream
from mup_megatron.patches import ALL_PATCHES, revert_patches
from mup_megatron.rules.table import Parametrization
from mup_megatron.util.errors import UserError
from tests.helpers.configs import MIXED, MOE, make
from tests.helpers.distributed import Ranks
from tests.model.as_built import bodies, own_layers
from tests.model.as_built.given import given_of

TENSORS = """
- {module: ExtraMLP, parameter: beside.weight, kind: matrix}
- {name: decoder.layers.*.mlp.beside_gain, kind: gain}
"""
MLP = "decoder.layers.1.mlp."
PARTS = ("weight", "bias")


@pytest.fixture(scope="module", autouse=True)
def _patched() -> Any:
    upstream.prepare_process()
    yield
    revert_patches(ALL_PATCHES)


def table(config: Config, spec: Any, entries: tuple[Entry, ...] = ()) -> Parametrization:
    given = given_of(config, 384)
    given["transformer_layer_spec"] = spec(given["config"])
    builds = builds_of(config, given, range(config.model.num_layers), entries)
    return parametrize_builds(config, join_builds([builds]))


def test_rates_of_an_extra_layer() -> None:
    """hidden 64 to 96, FFN 64 to 160: ratios 3/2 and 5/2; base init std 0.05, weights as N(0, 0.05² / m_in)."""
    tensors = table(make(MIXED, "gpt3"), own_layers.extra_mlp, read_tensors("tensors.yaml", TENSORS)).tensors
    extra, gain, fc2 = (tensors[MLP + name] for name in ("beside.weight", "beside_gain", "linear_fc2.weight"))
    assert (extra.group.lr, extra.group.eps, extra.group.weight_decay) == (
        Fraction(2, 3),
        Fraction(2, 3),
        Fraction(3, 2),
    )
    assert extra.init_std == {None: pytest.approx(0.05 / 1.5**0.5)}
    assert (extra.shape.spec.shape, extra.shape.spec.partition_dim) == ((96, 96), 0)
    assert (gain.group.lr, gain.group.eps, gain.group.weight_decay) == (1, Fraction(2, 3), 0)
    assert fc2.group.lr == Fraction(2, 5)
    assert extra.shape.layer == 1


def test_a_digest_tells_one_family_from_another() -> None:
    """The target's width and the seed do not matter; another base, and another kind of one tensor do."""
    entries = read_tensors("tensors.yaml", TENSORS)

    def digest(text: str = TENSORS, **changed: Any) -> str:
        config = make(MIXED, "gpt3", **changed)
        return digest_of(table(config, own_layers.extra_mlp, read_tensors("tensors.yaml", text)))

    first = digest()
    assert digest(model__ffn_hidden_size=256, run__seed=5) == first
    assert digest_of(table(make(MIXED, "gpt3"), own_layers.extra_mlp, entries)) == first
    other_base = {**MIXED["base"], "ffn_hidden_size": 80}
    others = {digest(base=other_base), digest(TENSORS.replace("kind: matrix", "kind: router"))}
    assert len(others | {first}) == 3


def test_norms_that_no_option_says() -> None:
    """Normed queries keep 0.05/sqrt(m_in) where their fan-out is fixed; keys, whose norm is left out, do not."""
    growth = {**MIXED, "base": {"hidden_size": 64}}  # m_in 3/2; heads and their size fixed
    tensors = table(make(growth, "gpt3", model__qk_layernorm=True), own_layers.normed_queries).tensors
    output = 0.05 / 1.5
    expected = {"query": 0.05 / 1.5**0.5, "key": output, "value": output}
    qkv = tensors["decoder.layers.1.self_attention.linear_qkv.weight"]
    assert qkv.init_std == {block: pytest.approx(std) for block, std in expected.items()}
    norms = [name for name in tensors if "q_layernorm" in name or "k_layernorm" in name]
    assert norms == [f"decoder.layers.{layer}.self_attention.q_layernorm.{part}" for layer in (0, 1) for part in PARTS]


def test_a_tensor_without_an_entry_is_refused_by_name() -> None:
    entries = read_tensors("tensors.yaml", "- {module: ExtraMLP, parameter: beside_gain, kind: gain}")
    with pytest.raises(
        UserError, match=r"decoder\.layers\.0\.mlp\.beside\.weight: no entry says .* ExtraMLP is"
    ) as problem:
        table(make(MIXED, "gpt3"), own_layers.extra_mlp, entries)
    assert "{module: ExtraMLP, parameter: beside.weight, kind: matrix}" in str(problem.value)


def test_a_class_of_the_same_name_has_no_entry() -> None:
    """A user's own MLP that only bears the name of megatron-core's is not taken for it."""
    own = type("MLP", (torch.nn.Module,), {"__module__": "users.model"})()
    own.linear_fc2 = torch.nn.Linear(4, 2)
    assert _upstreams_entry([(own.linear_fc2, "weight"), (own, "linear_fc2.weight")]) is None
    made = {"__module__": "users.model", "__init__": torch.nn.Module.__init__}
    theirs = type("MLP", (MegatronMLP,), made)  # a subclass is
    found = _upstreams_entry([(own.linear_fc2, "weight"), (theirs(), "linear_fc2.weight")])
    assert found is not None
    assert found[0].kind == "output_projection"


grouped = pytest.mark.skipif(
    not hasattr(experts, "GroupedMLPSubmodules"),
    reason="before 0.17 megatron-core's grouped experts are built otherwise",
)


@grouped
def test_grouped_experts_have_the_rows_of_single_ones() -> None:
    """Each weight inside a grouped layer has the name and the row that the recorded model has for that expert."""
    config = make(MOE, "llama", model__moe_layer_freq=1)
    built = table(config, own_layers.looped_experts, read_tensors("tensors.yaml", own_layers.LOOPED)).tensors
    recorded = parametrize(config, 384).tensors
    assert sorted(built) == sorted(recorded)
    of_experts = [name for name in recorded if ".local_experts." in name]
    assert len(of_experts) == 2 * config.model.num_layers * (config.model.num_moe_experts or 0)
    for name in of_experts:
        ours, theirs = built[name], recorded[name]
        assert (ours.group, ours.init_std, ours.shape.infshape) == (
            theirs.group,
            theirs.init_std,
            theirs.shape.infshape,
        )
        assert (ours.shape.blocks, ours.shape.spec.expert) == (theirs.shape.blocks, True)


@grouped
def test_split_rows_of_gate_and_up_are_a_ranks_gate_then_its_up() -> None:
    """As the recorded experts have them, whether the layer says so or not."""
    config = make(MOE, "llama", model__moe_layer_freq=1)
    entries = own_layers.LOOPED.replace("kind: gate_up", "kind: gate_up, split: 0")
    built = table(config, own_layers.looped_experts, read_tensors("tensors.yaml", entries)).tensors
    recorded = parametrize(config, 384).tensors
    names = [name for name in recorded if name.endswith("linear_fc1.weight") and ".local_experts." in name]
    assert names
    for name in names:
        assert built[name].shape.spec.partition_stride == recorded[name].shape.spec.partition_stride == 2


def test_a_layer_that_names_its_device_gets_no_memory() -> None:
    """As Transformer Engine's do; the whole model would be in memory, or on the wrong device."""
    with unsharded():
        layer = torch.nn.Linear(4, 4, device="cpu")
        assert layer.weight.is_meta
        assert torch.empty_like(layer.weight, device="cpu").is_meta
        assert torch.linspace(0, 1, 4, device="cpu").is_meta
        assert torch.arange(4).is_meta
        counted = torch.arange(4, device="cpu")  # a rotary embedding's (tests/cli/test_cli.py)
        assert not counted.is_meta
        assert counted.to(device=0).device.type == "cpu"  # YaRN's, on a machine that has a GPU or none
    assert not torch.empty(4, device="cpu").is_meta


@grouped
def test_entries_for_grouped_layers_of_transformer_engine() -> None:
    """How they would be called where Transformer Engine is: the layers are megatron-core's names, none of a user's."""
    known = type("TEGroupedLinear", (torch.nn.Module,), {"__module__": "megatron.core.extensions.transformer_engine"})
    of_experts = type("TEGroupedMLP", (torch.nn.Module,), {"__module__": "megatron.core.transformer.moe.experts"})
    for path, kind in (("linear_fc1.weight12", "grouped_gate_up"), ("linear_fc2.weight0", "grouped_output_projection")):
        found = _upstreams_entry([(known(), path.split(".")[1]), (of_experts(), path)])
        assert found is not None
        assert found[0].kind == kind
    users = type("TEGroupedLinear", (torch.nn.Module,), {"__module__": "users.model"})
    assert _upstreams_entry([(users(), "weight0"), (of_experts(), "linear_fc1.weight0")]) is None


@pytest.mark.skipif(not hasattr(experts, "GroupedMLP"), reason="later releases have no such class")
def test_the_legacy_grouped_experts_cannot_be_built() -> None:
    """Without CUDA's grouped_gemm megatron-core 0.16 does not build them; that is said in a sentence."""

    def spec(core: Any) -> Any:
        return get_gpt_layer_local_spec(
            num_experts=core.num_moe_experts, moe_grouped_gemm=True, moe_use_legacy_grouped_gemm=True
        )

    with pytest.raises(
        UserError, match=r"the model cannot be built on the meta device .*Grouped GEMM is not available"
    ):
        table(make(MOE, "llama"), spec)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{module: A}", "t.yaml: expected a list of entries"),
        ("- {module: A, parameter: b, kind: nothing}", "t.yaml: entry 1: kind: Input should be 'matrix'"),
        ("- {module: A, kind: gain}", "t.yaml: entry 1: expected module and parameter, or name"),
        ("- {name: a, kind: gain, blok: 1}", "t.yaml: entry 1: blok: unknown key; known here: module, parameter, name"),
        ("- {name: a, kind: matrix, fan_in: 0}", "t.yaml: entry 1: fan_in and fan_out are both 0"),
        ("- {name: a, kind: matrix, blocks: [b, b]}", "t.yaml: entry 1: blocks: expected different names"),
        ("- {name: a, kind: readout}", "t.yaml: entry 1: kind: Input should be"),
        ("- [", "t.yaml: line 1: not valid YAML"),
    ],
)
def test_files_that_are_refused(text: str, said: str) -> None:
    with pytest.raises(UserError) as problem:
        read_tensors("t.yaml", text)
    assert said in str(problem.value)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (
            "{name: '*.beside_gain', kind: matrix}",
            "beside_gain: has shape [96]; expected 2 dimensions at least for kind mat",
        ),
        (
            "{name: '*.beside_gain', kind: gain, split: 1}",
            "beside_gain: has shape [96]; expected 2 dimensions at least",
        ),
        ("{name: '*.beside.weight', kind: matrix, blocks: [a, b, c, d, e]}", "96 rows, which are no 5 equal blocks"),
        ("{name: '*.beside.weight', kind: qkv}", "beside.weight: is not of kind qkv as t.yaml: entry 1 says"),
    ],
)
def test_entries_that_do_not_fit(entry: str, said: str) -> None:
    rest = "- {name: '*.beside_gain', kind: gain}\n- {name: '*.beside.weight', kind: matrix}"
    with pytest.raises(UserError) as problem:
        table(make(MIXED, "gpt3"), own_layers.extra_mlp, read_tensors("t.yaml", f"- {entry}\n{rest}"))
    assert said in str(problem.value)


def moved(ranks: Ranks, heads: int, tensors: str) -> float:
    """RMS by which the extra layer's output moves in three steps on one batch, at a multiple of the base's width."""
    sizes = {"hidden_size": 16 * heads, "ffn_hidden_size": 32 * heads, "num_attention_heads": heads}
    growth = {
        "model": {"num_layers": 2, "kv_channels": 16, **sizes},
        "base": {"hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 2},
    }
    config = make(growth, "gpt3", model__core_attention="megatron", training__lr_warmup_steps=0)
    prepare(config)
    entries = read_tensors("tensors.yaml", tensors)
    return ranks.run(1, bodies.moved, config=config, entries=entries, steps=3)[0]


@pytest.mark.slow
def test_coordinates_of_an_extra_layer_stay(ranks: Ranks) -> None:
    """From width 32 to 256 the output moves as far; as a vector, which has no fan-in, it moves further."""
    right = [moved(ranks, heads, TENSORS) for heads in (2, 16)]
    wrong = TENSORS.replace("beside.weight, kind: matrix", "beside.weight, kind: vector")
    control = [moved(ranks, heads, wrong) for heads in (2, 16)]
    assert 0.6 < right[1] / right[0] < 1.6, right
    assert control[1] / control[0] > 3, control
