"""What tuning and pretraining cost, by hand."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import yaml

from mup_megatron import cli
from mup_megatron.config import derive, load_config
from mup_megatron.data.prepare import prepare
from mup_megatron.model.build import parametrize
from mup_megatron.parallel import upstream
from mup_megatron.parallel.layout import resolve_layout
from mup_megatron.tuning.budget import device_hours, flops_per_token, guidance, lines, plan, six_nd
from mup_megatron.tuning.memory import activation_bytes, state_bytes
from mup_megatron.tuning.space import proxy_config, rungs, values_of
from tests.helpers import bodies
from tests.helpers.configs import MIXED, MLA, MOE, T5, VOCABULARY, make, make_t5
from tests.helpers.distributed import Ranks
from tests.helpers.installed import needs_training

SEARCH = {"lr": {"log_uniform": [1e-3, 1e-1]}}


@pytest.fixture(autouse=True, scope="module")
def prepared() -> None:
    upstream.prepare_process()  # megatron-core's latent attention asks for CUDA without


def test_flops_per_token_by_hand() -> None:
    """Two layers, hidden 96, FFN 160, 8 heads of 8, 4 groups, padded vocabulary 384, sequence 32."""
    config = make(MIXED, "gpt3")
    qkv, proj, fc1, fc2, readout = 96 * (64 + 32 + 32), 64 * 96, 96 * 160, 160 * 96, 384 * 96
    expected = 6 * (2 * (qkv + proj + fc1 + fc2) + readout) + 6 * 2 * 64 * 32
    assert flops_per_token(parametrize(config, 375)) == expected
    # Llama style: gate and up, a head of its own that counts once, no position table.
    llama = make(MIXED, "llama")
    expected = 6 * (2 * (qkv + proj + 2 * fc1 + fc2) + readout) + 6 * 2 * 64 * 32
    assert flops_per_token(parametrize(llama, 375)) == expected


def test_flops_of_experts_and_further_tokens_by_hand() -> None:
    """Hidden 96: a dense layer (FFN 128), one of 4 experts of 80 of which 2 see a token, a shared one of 48."""
    attention, readout = 96 * 3 * 64 + 64 * 96, 384 * 96
    dense, expert, shared, router, gate = 3 * 96 * 128, 3 * 96 * 80, 3 * 96 * 48, 4 * 96, 96
    experts = 2 * expert + shared + router + gate
    expected = 6 * (2 * attention + dense + experts + readout) + 6 * 2 * 64 * 32
    assert flops_per_token(parametrize(make(MOE, "llama"), 375)) == expected
    # One more token: a projection of 2 x 96 to 96, a layer of the last kind, the readout again.
    expected += 6 * (2 * 96 * 96 + attention + experts + readout) + 6 * 64 * 32
    assert flops_per_token(parametrize(make(MOE, "llama", model__mtp_num_layers=1), 375)) == expected


def test_flops_of_multi_latent_attention_by_hand() -> None:
    """Hidden 96, FFN 160, 8 heads of 12 + 8, values of 14, ranks 24 and 48."""
    upstream.prepare_process()
    q, kv, proj = 96 * 24 + 24 * 8 * 20, 96 * (48 + 8) + 48 * 8 * (12 + 14), 8 * 14 * 96
    expected = 6 * (2 * (q + kv + proj + 3 * 96 * 160) + 384 * 96) + 3 * 2 * 8 * (20 + 14) * 32
    assert flops_per_token(parametrize(make(MLA, "llama"), 375)) == expected


def test_the_plan_by_hand() -> None:
    keys = {"tuning__trials": 8, "tuning__train_steps": 16, "tuning__repeat_best": 2, "tuning__repeat_seeds": 3}
    config = make(MIXED, "gpt3", proxy={"hidden_size": 64}, tuning__search=SEARCH, **keys)
    assert rungs(config) == [4, 8]
    found = plan(config, 375, 2)
    # 4 steps each, the half of them 4 more, a quarter 8 more: 4 + 2 + 2 = 8 steps a trial; 6 repetitions of 16.
    assert found.tuning.tokens == (8 * 8 + 6 * 16) * 8 * 32
    assert found.most.tokens == (8 + 6) * 16 * 8 * 32
    assert found.target.tokens == 20 * 8 * 32
    proxy = proxy_config(config, values_of(config), seed=7, directory=Path("x"))
    assert found.tuning.flops == found.tuning.tokens * flops_per_token(parametrize(proxy, 375))
    assert found.share == found.tuning.flops / found.target.flops
    assert "halved at 4 and 8; then 6 repetitions" in lines(config, found)[0]


def test_the_plan_of_hyperband_by_hand() -> None:
    """Of ten trials of 16 steps four are halved at 4 and 8 (8 steps on average), three at 8 alone (12), three never."""
    keys = {"tuning__trials": 12, "tuning__train_steps": 16, "tuning__repeat_best": 0, "tuning__pruner": "hyperband"}
    config = make(MIXED, "gpt3", proxy={"hidden_size": 64}, tuning__search=SEARCH, **keys)
    found = plan(config, 375, 2)  # the eleventh and the twelfth are as the first two: 8 and 12
    assert found.tuning.tokens == (4 * 8 + 3 * 12 + 3 * 16 + 8 + 12) * 8 * 32


def test_no_pruner_no_rungs() -> None:
    config = make(MIXED, "gpt3", tuning__pruner="none", tuning__search=SEARCH)
    found = plan(config, 375, 1)
    assert rungs(config) == []
    assert found.tuning == found.most


def test_the_paper_s_proxy(repository: Path) -> None:
    """Tensor Programs V, section 7.4: width 256, 32 layers, about 40M parameters; a few percent of the 6.7B run."""
    for path in (repository / "configs" / "gpt3").glob("*.yaml"):
        found = plan(load_config(path), 50257, 8)
        assert 38e6 < found.tuning.parameters < 42e6
    found = plan(load_config(repository / "configs" / "gpt3" / "6.7b.yaml"), 50257, 8)
    assert found.target.parameters == pytest.approx(6.7e9, rel=0.01)
    assert found.share < 0.07


def test_the_paper_s_own_budget() -> None:
    """350 trials of 4B tokens and 117 of 16B of 40M parameters, over 300B of 6.7B: its 7 %, by arithmetic 6.5."""
    share = six_nd(40e6, 350 * 4e9 + 117 * 16e9) / six_nd(6.7e9, 300e9)
    assert share == pytest.approx(0.0651, abs=1e-4)


def test_both_counts_are_shown() -> None:
    config = make(MIXED, "gpt3", proxy={"hidden_size": 64}, tuning__search=SEARCH)
    found = plan(config, 375, 1)
    head, tuning, target = lines(config, found)[1:4]
    assert head.split() == ["parameters", "tokens", "FLOPs", "share", "6ND", "share", "time,", "about"]
    for line, cost in ((tuning, found.tuning), (target, found.target)):
        assert f"{cost.flops:.2e}" in line
        assert f"{6 * cost.parameters * cost.tokens:.2e}" in line
    assert found.as_json()["six_nd"]["target"] == found.target.six_nd


def test_bytes_per_process_by_hand() -> None:
    """The model of `test_flops_per_token_by_hand`, with norms, biases and positions, whole and split."""

    def found(world_size: int, **keys: Any) -> int:
        config = make(MIXED, "gpt3", training__micro_batch_size=1, **keys)
        return state_bytes(parametrize(config, 375), resolve_layout(config, world_size))

    fc, qkv, norms = 2 * 96 * 160, 96 * 128, 4 * 96
    split = 384 * 96 + 2 * (qkv + 128 + 64 * 96 + fc + 160)  # over tensor-parallel ranks
    whole = 32 * 96 + 2 * (norms + 96 + 96) + 2 * 96  # positions, norms, biases of row-parallel layers
    keys = {"parallel__tensor_model_parallel_size": 1, "training__precision": "fp32"}
    assert found(1, **keys) == (split + whole) * 16
    assert found(4, **keys) == (split + whole) * (4 + 4 + 8 / 4)
    assert found(4, **keys, parallel__zero_stage=3) == (split + whole) * 16 / 4
    keys = {"parallel__tensor_model_parallel_size": 2, "training__precision": "bf16"}
    assert found(4, **keys) == (split / 2 + whole) * (2 + 2 + 12 / 2)
    keys["parallel__engine"] = "megatron"
    assert found(4, **keys) == (split / 2 + whole) * (2 + 4 + 12 / 2)
    keys |= {"parallel__use_distributed_optimizer": False, "parallel__use_torch_fsdp2": True}
    assert found(4, **keys) == (split / 2 + whole) * (2 + 2 + 12) / 2  # no buffers of megatron-core's


def test_bytes_of_experts_by_hand() -> None:
    """bf16, two of four experts on each of four ranks: two ranks share an expert's state, four that of the rest."""
    keys = {"parallel__engine": "megatron", "parallel__expert_model_parallel_size": 2, "training__precision": "bf16"}
    config = make(MOE, "llama", training__micro_batch_size=1, parallel__tensor_model_parallel_size=1, **keys)
    attention, readout = 96 * 3 * 64 + 64 * 96, 384 * 96
    dense = 2 * attention + 2 * readout + 3 * 96 * 128 + 3 * 96 * 48 + 4 * 96 + 96 + 5 * 96  # gains of five norms
    experts = 4 * 3 * 96 * 80
    found = state_bytes(parametrize(config, 375), resolve_layout(config, 4))
    assert found == dense * (2 + 4 + 12 / 4) + experts / 2 * (2 + 4 + 12 / 2)


def test_bytes_of_the_fullest_stage_in_either_order_of_ranks() -> None:
    """The last of two stages has three of four layers: also where the next ranks are in the next stage."""
    keys = {"parallel__engine": "megatron", "parallel__pipeline_model_parallel_size": 2, "model__num_layers": 4}
    keys |= {"parallel__tensor_model_parallel_size": 1, "parallel__num_layers_in_last_pipeline_stage": 3}
    config = make(MIXED, "llama", training__micro_batch_size=1, **keys)
    replicas_first, stages_first = (
        state_bytes(parametrize(each, 375), resolve_layout(each, 4))
        for each in (config, derive(config, {"parallel.use_tp_pp_dp_mapping": True}))
    )
    layer = 96 * 128 + 64 * 96 + 3 * 96 * 160 + 2 * 96
    assert replicas_first == stages_first == (3 * layer + 384 * 96 + 96) * (4 + 4 + 8 / 2)


def test_bytes_under_soap_by_hand() -> None:
    """Of each matrix of two layers, two float32 squares over its rows and two over its columns beside two moments."""
    config = make(
        MIXED,
        "gpt3",
        optimizer__name="soap",
        base__num_query_groups=2,
        parallel__engine="megatron",
        parallel__use_distributed_optimizer=False,
    )
    soap, adamw = (
        state_bytes(parametrize(each, 375), resolve_layout(each, 1))
        for each in (config, derive(config, {"optimizer.name": "adamw"}))
    )
    matrices = ((128, 96), (96, 64), (160, 96), (96, 160))  # QKV, projection, fc1, fc2
    assert soap - adamw == 2 * 2 * 4 * sum(rows**2 + columns**2 for rows, columns in matrices)


SPLITS = {
    "one process": (1, {}),
    "TP 2, SP": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "TP 2": (2, {"tensor_model_parallel_size": 2}),
}


@pytest.mark.parametrize(
    "split", ["TP 2, SP", *(pytest.param(name, marks=pytest.mark.slow) for name in ("one process", "TP 2"))]
)
@pytest.mark.parametrize(
    ("model", "keys"),
    [
        pytest.param((MIXED, "gpt3"), {}, id="gpt3"),
        pytest.param((MIXED, "gpt3"), {"training__recompute_granularity": "selective"}, id="gpt3 selective"),
        pytest.param((MIXED, "gpt3"), {"model__core_attention": "sdpa"}, id="gpt3 sdpa", marks=pytest.mark.slow),
        pytest.param((MIXED, "llama"), {"model__normalization": "LayerNorm"}, id="llama"),
        pytest.param((MLA, "llama"), {}, id="mla"),
        pytest.param((T5, "t5"), {"training__decoder_seq_length": 96}, id="t5"),
        pytest.param((T5, "t5"), {"model__core_attention": "sdpa"}, id="t5 sdpa", marks=pytest.mark.slow),
    ],
)
def test_activations_are_what_autograd_keeps(
    ranks: Ranks, split: str, model: tuple[dict[str, Any], str], keys: dict[str, Any]
) -> None:
    """Bytes of every storage that a real forward pass saves for its backward pass, but for parameters.

    Torch's RMSNorm keeps one tensor more on a CPU than where it has a kernel.
    """
    processes, parallel = SPLITS[split]
    layout = {f"parallel__{key}": value for key, value in parallel.items()}
    keys = {"parallel__zero_stage": 0, "training__seq_length": 128, **layout, **keys}
    config = make_t5(**keys) if model[1] == "t5" else make(*model, **keys)
    prepare(config)
    kept = max(ranks.run(processes, bodies.saved_bytes, config=config))
    expected = activation_bytes(parametrize(config, VOCABULARY), resolve_layout(config, processes))
    assert 0.8 < expected / kept < 1.25, (expected, kept)


def test_activations_of_both_stacks_by_hand() -> None:
    """Hidden size 96, FFN 160, 8 heads of 12, three encoder and two decoder layers, fp32, vocabulary 384, no dropout.

    Per token: norm and first projection 2·96, queries, keys, values, context 4·96, FFN 2·96 + 2·160; scores 8 per key.
    A source of 40 tokens, a target of 24, micro-batches of 2.
    """
    shape = {"training__seq_length": 40, "training__decoder_seq_length": 24, "training__micro_batch_size": 2}
    config = make_t5(**shape, training__global_batch_size=8, parallel__tensor_model_parallel_size=1)
    layout = resolve_layout(config, 1)
    token = 2 * 96 + 4 * 96 + 2 * 96 + 2 * 160
    encoder = 40 * (token + 8 * 40)
    cross = (
        24 * (2 * 96 + 2 * 96 + 8 * 40) + 40 * 2 * 96
    )  # norm and projection, query and context, scores; keys, values
    decoder = 24 * (token + 8 * 24) + cross
    ends = 2 * 96 * (40 + 24) + 384 * 24
    parametrization = parametrize(config, VOCABULARY)
    assert activation_bytes(parametrization, layout) == 2 * 4 * (3 * encoder + 2 * decoder + ends)
    # Attention that keeps no scores; then of every layer its input alone, and all of the one that is computed again.
    sdpa = derive(config, {"model.core_attention": "sdpa"})
    scores = 3 * 40 * 8 * 40 + 2 * 24 * 8 * (24 + 40)
    found = activation_bytes(parametrize(sdpa, VOCABULARY), layout)
    assert found == 2 * 4 * (3 * encoder + 2 * decoder + ends - scores)
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    again = derive(config, {f"training.{key}": value for key, value in full.items()})
    inputs = 3 * 40 * 96 + 2 * 24 * 96
    assert activation_bytes(parametrize(again, VOCABULARY), layout) == 2 * 4 * (inputs + max(encoder, decoder) + ends)


def test_chunks_under_way() -> None:
    """1F1B holds as many micro-batches as stages follow, and one; never more than there are."""
    keys = {"parallel__engine": "megatron", "model__num_layers": 8, "training__micro_batch_size": 1}
    base = {"training__seq_length": 1024, "model__core_attention": "sdpa"}

    def found(world_size: int, **split: Any) -> int:
        config = make(MIXED, "llama", **{**keys, **base, **split})
        return activation_bytes(parametrize(config, VOCABULARY), resolve_layout(config, world_size))

    whole, head = found(1), found(1, model__num_layers=2) - found(1, model__num_layers=1)
    layers = 8 * head
    assert whole > layers
    # Four stages of two layers, eight micro-batches: the first stage holds four of its own.
    assert found(4, parallel__pipeline_model_parallel_size=4) == pytest.approx(layers, rel=1e-6)
    few = {"training__global_batch_size": 2}
    halved = found(4, parallel__pipeline_model_parallel_size=4, **few)
    assert layers / 2 <= halved < layers


@pytest.mark.parametrize("each", [1, 2, 5])
def test_what_is_computed_again_is_there_once(each: int) -> None:
    """Eight stages of two layers: the first keeps each group's input for eight micro-batches, and one group whole.

    More layers than a stage has are two.
    """
    keys = {"parallel__engine": "megatron", "training__micro_batch_size": 1, "model__core_attention": "sdpa"}
    keys |= {"training__seq_length": 1024}

    def found(world_size: int, **more: Any) -> int:
        config = make(MIXED, "llama", **{**keys, **more})
        return activation_bytes(parametrize(config, VOCABULARY), resolve_layout(config, world_size))

    layer = found(1, model__num_layers=2) - found(1, model__num_layers=1)
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": each}
    again = {f"training__{key}": value for key, value in full.items()}
    groups = -(-2 // each)
    here = found(8, model__num_layers=16, parallel__pipeline_model_parallel_size=8, **again)
    assert here == 8 * groups * 1024 * 4 * 96 + min(each, 2) * layer


def test_device_hours() -> None:
    found = plan(make(MIXED, "gpt3", tuning__search=SEARCH), 375, 1)
    hours = device_hours(found, 989, 0.4)
    assert hours["target"] == pytest.approx(found.target.flops / (989e12 * 0.4) / 3600)


@needs_training
@pytest.mark.parametrize("name", ["gpt3/175b", "llama/8b", "deepseek/v3-671b"])
def test_flops_are_megatron_s(repository: Path, name: str) -> None:
    """Its own count, with what differs: norms of ranks (counted there), routers and gates (counted here)."""
    from megatron.training.training import num_floating_point_operations

    config = load_config(repository / "configs" / f"{name}.yaml")
    model, vocabulary = config.model, 50257
    args = Namespace(**model.model_dump())
    vars(args).update(
        group_query_attention=not model.multi_latent_attention,
        num_experts=model.num_moe_experts,
        swiglu=model.gated_linear_unit,
        seq_length=config.training.seq_length,
        padded_vocab_size=model.padded_vocab_size(vocabulary),
        moe_latent_size=None,
        experimental_attention_variant=None,
        hybrid_layer_pattern=None,
    )
    args.num_query_groups = model.query_groups
    args.kv_channels = None if model.multi_latent_attention else model.head_size
    args.ffn_hidden_size = model.ffn_size
    if model.multi_latent_attention:
        args.group_query_attention = False
    theirs = num_floating_point_operations(args, 3) / (3 * config.training.seq_length)
    assert flops_per_token(parametrize(config, vocabulary)) == pytest.approx(theirs, rel=5e-3)


def test_trials_smaller_than_the_paper_advises(repository: Path) -> None:
    small = guidance(load_config(repository / "configs" / "demo.yaml"))
    assert small == ["width 64 < 256", "depth 2 < 4", "batch 16 < 32", "steps 120 < 5000"]
    assert guidance(load_config(repository / "configs" / "gpt3" / "6.7b.yaml")) == []


def test_the_share_that_is_allowed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = make(
        MIXED,
        "gpt3",
        run__dir=str(tmp_path),
        tuning__search=SEARCH,
        tuning__max_compute_share=0.1,
        data__split="80,20,0",
    )
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config.model_dump()))
    for command in ("plan", "pipeline"):
        assert cli.run([command, str(path)]) == 2
        shown = capsys.readouterr()
        assert "tuning.max_compute_share: tuning would take" in shown.err
        assert shown.out.startswith("plan: 16 trials")
    assert not (tmp_path / "tuning").exists()
    assert cli.run(["plan", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["most_share"] > 0.1


def test_the_schedule_keeps_its_shape() -> None:
    keys = {
        "training__train_steps": 1000,
        "training__lr_warmup_steps": 50,
        "training__lr_decay_steps": 800,
        "training__lr_milestones": [400, 600],
        "tuning__train_steps": 100,
        "tuning__global_batch_size": 4,
        "tuning__micro_batch_size": 2,
    }
    config = make(
        MIXED, "gpt3", parallel__tensor_model_parallel_size=4, parallel__zero_stage=3, proxy={"hidden_size": 64}, **keys
    )
    proxy = proxy_config(config, {"lr": 0.5}, seed=11, directory=Path("runs/trial-003"))
    training = proxy.training
    assert (training.train_steps, training.lr_warmup_steps, training.lr_decay_steps) == (100, 5, 80)
    assert training.lr_milestones == [40, 60]
    assert (training.global_batch_size, training.micro_batch_size) == (4, 2)
    assert (proxy.model.hidden_size, proxy.model.ffn_hidden_size) == (64, 64)  # unnamed sizes are the base's
    assert (proxy.parallel.tensor_model_parallel_size, proxy.parallel.zero_stage) == (1, 1)
    assert (proxy.hparams.lr, proxy.run.seed, proxy.run.dir) == (0.5, 11, "runs/trial-003")
    assert proxy.base == config.base
