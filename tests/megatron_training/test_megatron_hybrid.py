"""`mup-megatron run` with --hybrid-layer-pattern: megatron-core's HybridModel, parametrised as it is built."""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mup_megatron.model.as_built.hybrid import hybrid_stages
from mup_megatron.model.as_built.ready_made import READY_FOR, READY_MADE
from mup_megatron.model.as_built.tensors_file import read_tensors
from mup_megatron.util.errors import UserError
from tests.helpers import megatron_runs
from tests.helpers.distributed import Ranks
from tests.helpers.installed import needs_training

pytestmark = needs_training
SCRIPT = Path(__file__).parent / "pretrain_hybrid.py"
STACK = ("--spec", "tests.model.as_built.hybrid_stack", "local_stack", "--disable-bias-linear")
EXPERTS = ("--num-experts", "4")
PATTERN = "*-E"
BASE = "hidden_size: 64\nnum_attention_heads: 4\nffn_hidden_size: 128\n"
# A quarter of every size; the head size stays.
QUARTER = "hidden_size: 16\nnum_attention_heads: 1\nffn_hidden_size: 32\n"
MIXER = """
- {module: Recurrence, parameter: in_proj.weight, kind: standard, init: weight}
- {module: Recurrence, parameter: out_proj.weight, kind: standard, init: output_projection}
- {module: Recurrence, parameter: '*', kind: standard}
"""


def run(ranks: Ranks, folder: Path, *extra: str, pattern: str = PATTERN, **changed: Any) -> list[Any]:
    own = {"base": BASE, "train_iters": 3, "clip_grad": 0, "num_layers": None, **changed}
    experts = EXPERTS if "E" in pattern else ()
    said = (*STACK, *experts, "--hybrid-layer-pattern", pattern, *extra)
    return megatron_runs.run(ranks, folder, *said, script=SCRIPT, **own)


def entries(folder: Path, text: str = MIXER) -> tuple[str, str]:
    (folder / "tensors.yaml").write_text(text)
    return "--mup-tensors", str(folder / "tensors.yaml")


@pytest.mark.slow
def test_at_the_base_it_is_the_plain_run(ranks: Ranks, tmp_path: Path) -> None:
    """From the same weights the same losses and the same weights after three steps, to the last bit."""
    (ours,) = run(ranks, tmp_path)
    assert ours["status"] == 0, ours["said"]
    assert "no config says the script's layers: it is a HybridModel, of the layers *-E" in ours["said"]
    (plain,) = run(ranks, tmp_path, plainly=True, initial=ours["initial"])
    megatron_runs.assert_same(ours, plain, steps=3)
    megatron_runs.assert_moved(ours)


def test_rates_at_four_times_the_width(ranks: Ranks, tmp_path: Path) -> None:
    """By hand: m_in is 4 but for the embedding; a layer has one branch, so its projection is drawn with std/sqrt(3)."""
    (wide,) = run(ranks, tmp_path, base=QUARTER)
    assert wide["status"] == 0, wide["said"]
    rates = {name: group["max_lr"] for name, group in wide["groups"].items()}
    read = {
        "decoder.layers.0.self_attention.linear_qkv.weight",
        "decoder.layers.0.self_attention.linear_proj.weight",
        "decoder.layers.1.mlp.linear_fc1.weight",
        "decoder.layers.1.mlp.linear_fc2.weight",
        "decoder.layers.2.mlp.router.weight",
        *(f"decoder.layers.2.mlp.experts.local_experts.{n}.linear_fc{k}.weight" for n in range(4) for k in (1, 2)),
    }
    assert {name for name, rate in rates.items() if rate == pytest.approx(1e-2 / 4)} == read
    assert {rate for name, rate in rates.items() if name not in read} == {1e-2}
    assert len(wide["groups"]) == len(wide["initial"])
    first = wide["initial"]
    for name in ("decoder.layers.0.self_attention.linear_proj.weight", "decoder.layers.1.mlp.linear_fc2.weight"):
        assert first[name].std() == pytest.approx(0.05 / 3**0.5 / 4**0.5, rel=0.05)
    assert first["decoder.layers.1.mlp.linear_fc1.weight"].std() == pytest.approx(0.05 / 4**0.5, rel=0.05)
    assert first["decoder.layers.2.mlp.router.weight"].std() == pytest.approx(0.05 / 4, rel=0.2)
    assert np.isfinite(wide["steps"]).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "sizes"),
    [
        ("*-|E-", {"pipeline_model_parallel_size": 2}),
        ("*-E-", {"pipeline_model_parallel_size": 2}),
        ("*-E-", {"pipeline_model_parallel_size": 2, "decoder_last_pipeline_num_layers": 1}),
        ("*-|E-/*-", {"pipeline_model_parallel_size": 2}),
        ("*-*-", {"tensor_model_parallel_size": 2, "make_vocab_size_divisible_by": 64}),
        ("*-E-", {"expert_model_parallel_size": 2}),
    ],
)
def test_layouts(pattern: str, sizes: dict[str, int], ranks: Ranks, tmp_path: Path) -> None:
    """Two ranks start from one rank's values and have its losses.

    Under tensor parallelism experts would need sequence parallelism, which torch's norms do not have.
    """
    common: dict[str, Any] = {"base": QUARTER, "global_batch_size": 4, "micro_batch_size": 2}
    ahead = ("--position-embedding-type", "rope") if "/" in pattern else ()
    (one,) = run(ranks, tmp_path, *ahead, pattern=pattern.replace("|", ""), **common)
    two = run(ranks, tmp_path, *ahead, count=2, pattern=pattern, **common, **sizes)
    assert one["status"] == 0, one["said"]
    assert [rank["status"] for rank in two] == [0, 0], two[0]["said"] + two[1]["said"]
    logged = max((rank["losses"] for rank in two), key=len)
    assert len(logged) == len(one["losses"]) == 3
    assert logged == pytest.approx(one["losses"], rel=1e-5)
    if "pipeline_model_parallel_size" in sizes:
        last = sizes.get("decoder_last_pipeline_num_layers", 2)
        expected = one["initial"]["decoder.layers.3.mlp.linear_fc2.weight"]
        np.testing.assert_array_equal(two[1]["initial"][f"decoder.layers.{last - 1}.mlp.linear_fc2.weight"], expected)


@pytest.mark.slow
def test_a_run_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    """From its checkpoint to the last bit; with another pattern it is refused by the tensors."""
    saves = ("--save", str(tmp_path / "saved"), "--save-interval", "2")
    (whole,) = run(ranks, tmp_path, *saves, train_iters=4)
    assert whole["status"] == 0, whole["said"]
    loads = ("--load", str(tmp_path / "saved"), "--ckpt-step", "2")
    (rest,) = run(ranks, tmp_path, *loads, train_iters=4)
    assert rest["status"] == 0, rest["said"]
    assert rest["steps"] == whole["steps"][2:]
    (other,) = run(ranks, tmp_path, *loads, train_iters=4, pattern="*E-")
    assert other["status"] == 2
    assert "the checkpoint does not belong to this config" in other["said"]
    assert "base_shapes.decoder.layers.1.mlp.linear_fc1.weight" in other["said"]


def test_tensors_in_the_standard_parametrization(ranks: Ranks, tmp_path: Path) -> None:
    """A recurrent layer at four times the base's width keeps the base's rates, and its own values; all else does not.

    Its decay is in [1, 16] as the layer drew it, its input matrix N(0, 0.05²), its output matrix N(0, 0.05²/2).
    """
    own = entries(tmp_path)
    (wide,) = run(ranks, tmp_path, *own, pattern="M-", base=QUARTER)
    assert wide["status"] == 0, wide["said"]
    mixer = "decoder.layers.0.mixer."
    sentence = re.search(r"in the standard parametrization, .*: (.*)", wide["said"])
    assert sentence is not None
    kept = {"in_proj.weight", "out_proj.weight", "A_log", "D"}
    assert set(sentence[1].split(", ")) == {f"decoder.layers.*.mixer.{name}" for name in kept}
    rates = {name: group["max_lr"] for name, group in wide["groups"].items()}
    assert {rates[mixer + name] for name in kept} == {1e-2}
    assert rates["decoder.layers.1.mlp.linear_fc1.weight"] == pytest.approx(1e-2 / 4)
    assert {wide["groups"][mixer + name]["eps"] for name in kept} == {1e-8}
    values = {name: wide["initial"][mixer + name] for name in kept}
    assert values["A_log"].min() >= 0
    assert 1 < values["A_log"].max() <= np.log(16)
    assert np.array_equal(values["D"], np.ones(64))
    assert values["in_proj.weight"].std() == pytest.approx(0.05, rel=0.05)
    assert values["out_proj.weight"].std() == pytest.approx(0.05 / 2**0.5, rel=0.05)


@pytest.mark.slow
def test_a_recurrent_layer_at_the_base(ranks: Ranks, tmp_path: Path) -> None:
    (ours,) = run(ranks, tmp_path, *entries(tmp_path), pattern="M*-")
    assert ours["status"] == 0, ours["said"]
    (plain,) = run(ranks, tmp_path, pattern="M*-", plainly=True, initial=ours["initial"])
    megatron_runs.assert_same(ours, plain, steps=3)


@pytest.mark.parametrize(
    ("words", "pattern", "said"),
    [
        ((), "M-", "decoder.layers.0.mixer.A_log: no entry says what this tensor of Recurrence is"),
        pytest.param(
            ("--hybrid-override-pattern", "*-"),
            PATTERN,
            "--hybrid-override-pattern *-: not under µP here",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_refused(words: tuple[str, ...], pattern: str, said: str, ranks: Ranks, tmp_path: Path) -> None:
    mtp = ("--mtp-num-layers", "1", "--position-embedding-type", "rope") if "/" in pattern else ()
    (found,) = run(ranks, tmp_path, *words, *mtp, pattern=pattern)
    assert found["status"] == 2
    assert said in found["said"]
    assert "Traceback" not in found["said"]


@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None, reason="Transformer Engine is installed"
)
def test_without_transformer_engine_and_spec(ranks: Ranks, tmp_path: Path) -> None:
    """Upstream's own stack has Transformer Engine's layers; where that is not installed, its model has none."""
    words = megatron_runs.words(tmp_path, "--hybrid-layer-pattern", "*-", num_layers=None, base=BASE)
    (found,) = ranks.run(1, megatron_runs.train, words=words, script=SCRIPT)
    assert found["status"] == 2
    assert (
        "--hybrid-layer-pattern *-: the script's stack has layers of Transformer Engine, which is not installed; "
        "expected it, or --spec of a stack of other layers" in found["said"]
    )
    assert "Traceback" not in found["said"]


@pytest.mark.slow
def test_a_pattern_without_a_hybrid_model(ranks: Ranks, tmp_path: Path) -> None:
    """A script of GPTModel would ignore it, but for the initial values of its projections."""
    words = megatron_runs.words(tmp_path, "--hybrid-layer-pattern", "*-", num_layers=None, base=BASE)
    (found,) = ranks.run(1, megatron_runs.train, words=words)
    assert found["status"] == 2
    assert "--hybrid-layer-pattern: the script builds a GPTModel, which has no pattern" in found["said"]


def test_a_linear_layer_cannot_have_values_of_its_own(ranks: Ranks, tmp_path: Path) -> None:
    """What megatron-core draws by the config's init method is drawn by nobody else here."""
    text = "- {module: Recurrence, parameter: '*', kind: standard}"
    (found,) = run(ranks, tmp_path, *entries(tmp_path, text), pattern="M-")
    assert found["status"] == 2
    assert "mixer.in_proj.weight: megatron-core draws it by the config's init_method" in found["said"]
    assert "expected init: weight or init: output_projection beside kind: standard in" in found["said"]


@pytest.mark.slow
def test_a_token_ahead(ranks: Ranks, tmp_path: Path) -> None:
    """At the base the plain run to the last bit; from a quarter of the width the inner layers have the rules too."""
    ahead = ("--position-embedding-type", "rope")
    (ours,) = run(ranks, tmp_path, *ahead, pattern="*-/*-")
    assert ours["status"] == 0, ours["said"]
    (plain,) = run(ranks, tmp_path, *ahead, pattern="*-/*-", plainly=True, initial=ours["initial"])
    megatron_runs.assert_same(ours, plain, steps=3)
    (wide,) = run(ranks, tmp_path, *ahead, pattern="*-/*-", base=QUARTER)
    rates = {name: group["max_lr"] for name, group in wide["groups"].items() if name.startswith("mtp.")}
    read = {name for name, rate in rates.items() if rate == pytest.approx(1e-2 / 4)}
    assert {name.rpartition(".layers.")[2] for name in read if ".mtp_model_layer." in name} == {
        "0.self_attention.linear_qkv.weight",
        "0.self_attention.linear_proj.weight",
        "1.mlp.linear_fc1.weight",
        "1.mlp.linear_fc2.weight",
    }
    assert read - {name for name in read if ".mtp_model_layer." in name} == {"mtp.layers.0.eh_proj.weight"}


@pytest.mark.slow
def test_a_depth_rule(ranks: Ranks, tmp_path: Path) -> None:
    """A pattern of twice the base's layers: rates of hidden matrices stay under completep, epsilon is halved."""
    (tmp_path / "mup.yaml").write_text("parametrization: {depth: completep}\n")
    words = ("--mup-config", str(tmp_path / "mup.yaml"))
    (deep,) = run(ranks, tmp_path, *words, pattern="*-*-", base=f"{BASE}num_layers: 2\n")
    assert deep["status"] == 0, deep["said"]
    epsilon = {name: group["eps"] for name, group in deep["groups"].items()}
    assert epsilon["decoder.layers.3.mlp.linear_fc1.weight"] == pytest.approx(1e-8 / 2)
    assert epsilon["decoder.final_norm.weight"] == epsilon["embedding.word_embeddings.weight"] == 1e-8
    fc2 = deep["initial"]["decoder.layers.3.mlp.linear_fc2.weight"]
    assert fc2.std() == pytest.approx(0.05 / 2**0.5, rel=0.05)  # of the base's depth
    (other,) = run(ranks, tmp_path, *words, pattern="*--*", base=f"{BASE}num_layers: 2\n")
    assert other["status"] == 2
    assert "base.num_layers: 2: --hybrid-layer-pattern *--* does not repeat its first 2 layers" in other["said"]


def test_stages_by_hand() -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    sizes = {"num_layers": 7, "hidden_size": 8, "num_attention_heads": 1, "use_cpu_initialization": True}
    one = TransformerConfig(**sizes)
    assert hybrid_stages(one, "M*-") == ((range(3),),)
    two = TransformerConfig(**sizes, pipeline_model_parallel_size=2, pipeline_dtype=__import__("torch").float32)
    assert hybrid_stages(two, "M*|-") == ((range(2),), (range(2, 3),))
    assert hybrid_stages(two, "M|*-|E|M*-") == ((range(1), range(3, 4)), (range(1, 3), range(4, 7)))
    assert hybrid_stages(two, "M*-*") == ((range(2),), (range(2, 4),))
    assert hybrid_stages(two, "M*/-*/-*") == ((range(1),), (range(1, 2),))
    with pytest.raises(UserError, match=r"M\*-: 3 layers cannot be shared out over 2 pipeline stages"):
        hybrid_stages(two, "M*-")
    three = TransformerConfig(
        **sizes,
        pipeline_model_parallel_size=3,
        pipeline_dtype=__import__("torch").float32,
        num_layers_in_first_pipeline_stage=1,
        num_layers_in_last_pipeline_stage=2,
    )
    assert hybrid_stages(three, "M*-*M*-") == ((range(1),), (range(1, 5),), (range(5, 7),))


@pytest.mark.parametrize("kind", sorted(set(READY_FOR) - {"DSAIndexer"}))
def test_ready_made_entries_are_about_tensors_that_there_are(kind: str) -> None:
    """Their two linear layers and the rest stand in upstream's constructor, which only CUDA can run."""
    from megatron.core.ssm import gated_delta_net, mamba_mixer

    owner = getattr(mamba_mixer if kind == "MambaMixer" else gated_delta_net, kind)
    source = "".join(inspect.getsource(base) for base in owner.mro() if base.__module__.startswith("megatron.core.ssm"))
    found = read_tensors("ready", READY_MADE[READY_FOR[kind]])
    assert [(entry.module, entry.kind) for entry in found] == [(kind, "standard")] * 3
    names = [str(entry.parameter) for entry in found]
    assert names == ["in_proj.weight", "out_proj.weight", "*"]
    for name, method in (("in_proj", "self.config.init_method"), ("out_proj", "self.config.output_layer_init_method")):
        built = source[source.index(f"self.{name} = build_module(") :]
        assert method in built[: built.index("\n        )\n")]
    linear = set(re.findall(r"self\.(\w+) = build_module\(\n\s+submodules\.\1,\n\s+self\.", source))
    assert linear == {"in_proj", "out_proj"}


def test_ready_made_entries_of_an_indexer_are_about_tensors_that_there_are() -> None:
    """The same of sparse attention: three linear layers, which start as the config's init method says."""
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexer

    source = inspect.getsource(DSAIndexer.__init__)
    found = read_tensors("ready", READY_MADE[READY_FOR["DSAIndexer"]])
    assert [(entry.module, entry.kind) for entry in found] == [("DSAIndexer", "standard")] * 4
    linear = [str(entry.parameter).removesuffix(".weight") for entry in found[:-1]]
    assert set(re.findall(r"self\.(linear_\w+) = build_module\(", source)) == set(linear)
    for name in linear:
        built = source[source.index(f"self.{name} = build_module(") :]
        assert "init_method=self.config.init_method" in built[: built.index("\n        )\n")]
