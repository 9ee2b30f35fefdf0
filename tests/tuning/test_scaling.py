"""An optimizer step on paper: by hand, and against what real ranks send and compute."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from mup_megatron import cli
from mup_megatron.config import Config, derive
from mup_megatron.engines.setup import resolve
from mup_megatron.engines.setup.megatron import emerging_missing
from mup_megatron.model.build import parametrize
from mup_megatron.parallel import upstream
from mup_megatron.parallel.layout import Layout, resolve_layout
from mup_megatron.rules.table import Parametrization
from mup_megatron.tuning.better_layout import choices, on_paper
from mup_megatron.tuning.budget import flops_per_token
from mup_megatron.tuning.scaling import KINDS, Device, Stage, step_of
from mup_megatron.tuning.shares import shares
from tests.helpers import traffic
from tests.helpers.configs import MIXED, MLA, MOE, make, make_t5
from tests.helpers.distributed import Ranks
from tests.helpers.layouts import Split
from tests.helpers.matrix import config_of
from tests.helpers.scaling_page import COPIES, PAGE, compare, copy, number, page, rows_of


@pytest.fixture(autouse=True, scope="module")
def prepared() -> None:
    upstream.prepare_process()  # megatron-core's latent attention asks for CUDA without


def laid_out(config: Config, processes: int) -> tuple[Parametrization, Layout]:
    return parametrize(config, 375), resolve_layout(config, processes)


def stage(config: Config, processes: int, at: int = 0) -> Stage:
    parametrization, layout = laid_out(config, processes)
    return Stage(parametrization, layout, at, shares(parametrization))


# Two stages of two layers, TP 2, DP 2, four micro-batches of a sequence of 32 each, bf16.
STAGED = {
    "model__num_layers": 4,
    "training__micro_batch_size": 1,
    "training__precision": "bf16",
    "parallel__engine": "megatron",
    "parallel__tensor_model_parallel_size": 2,
    "parallel__sequence_parallel": True,
    "parallel__pipeline_model_parallel_size": 2,
}


def test_a_stage_by_hand() -> None:
    """Hidden 96, FFN 160, 8 heads of 8, 4 groups, vocabulary 384, a tied head, biases, learned positions."""
    first, last = (stage(make(MIXED, "gpt3", **STAGED), 8, number) for number in (0, 1))
    tokens, qkv, proj, fc = 4 * 32, 96 * 128, 64 * 96, 96 * 160
    matrices, attention, readout = qkv + proj + 2 * fc, 6 * 64 * 32, 6 * 384 * 96
    assert first.flops == tokens / 2 * 2 * (6 * matrices + attention)
    assert last.flops == first.flops + tokens / 2 * readout
    # Gathered twice and scattered once before each column-parallel matrix; scattered and gathered after each other one.
    layers = 2 * (2 * 3 * 96 + 2 * 2 * 96)
    gains = 2 * (4 * 96 + 2 * 96)
    positions = 96 + 96 + 96  # words all-reduced over the whole sequence, the gradient gathered
    assert first.sent["tensor"] == (tokens * 2 * (layers + positions) + 2 * 4 * gains) / 2
    softmax = 2 * 3 * 4
    assert last.sent["tensor"] == (tokens * (2 * (layers + 3 * 96) + softmax) + 2 * 4 * (gains + 2 * 96)) / 2
    # Half of the sequence, once per micro-batch; and half of the tied embedding's gradient in float32.
    assert first.sent["pipeline"] == last.sent["pipeline"] == tokens / 2 * 2 * 96 + 4 * 384 * 96 / 2
    held = 384 * 96 / 2 + 32 * 96 + gains + 2 * (matrices + 128 + 160) / 2
    assert first.sent["data"] == held * (4 + 2) / 2
    assert first.sent["expert"] == first.sent["context"] == 0


def test_the_middle_of_an_interleaved_pipeline_sends_both_ways() -> None:
    keys = {**STAGED, "model__num_layers": 8, "parallel__virtual_pipeline_model_parallel_size": 2}
    config = make(MIXED, "llama", **{**keys, "parallel__pipeline_model_parallel_size": 4, "training__seq_length": 64})
    parametrization, layout = laid_out(config, 8)
    held = shares(parametrization)
    sent = [Stage(parametrization, layout, number, held).sent["pipeline"] for number in range(4)]
    once = 8 * 64 / 2 * 2 * 96
    assert sent == [3 * once, 4 * once, 4 * once, 3 * once]
    step = step_of(parametrization, layout, Device(), held)
    assert step.bubble == 3 / (2 * 8)


# What of each parameter is sent at ZeRO 0 to 3 and FSDP2, over four ranks with two micro-batches in float32.
STATES: list[tuple[dict[str, Any], float]] = [
    ({"zero_stage": 0}, 2 * 4),
    ({"zero_stage": 1}, 2 * 4 + 4),
    ({"zero_stage": 2}, 2 * 2 * 4 + 4),
    ({"zero_stage": 3}, 2 * 3 * 4),
    ({"engine": "megatron"}, 4 + 4),
    ({"engine": "megatron", "use_distributed_optimizer": False}, 2 * 4),
    ({"engine": "megatron", "use_distributed_optimizer": False, "use_torch_fsdp2": True}, 2 * 3 * 4),
]


@pytest.mark.parametrize(("keys", "each"), STATES, ids=lambda value: str(value))
def test_gradients_and_weights_by_hand(keys: dict[str, Any], each: float) -> None:
    parallel = {f"parallel__{key}": value for key, value in keys.items()}
    config = make(MIXED, "llama", training__micro_batch_size=1, parallel__tensor_model_parallel_size=1, **parallel)
    found = stage(config, 4).sent
    size = 2 * (96 * 128 + 64 * 96 + 3 * 96 * 160 + 2 * 96) + 96 + 2 * 384 * 96
    assert found == {"data": size * each * 3 / 4, "tensor": 0, "pipeline": 0, "expert": 0, "context": 0}


def test_experts_and_parts_of_the_sequence_by_hand() -> None:
    """One layer of four experts of which two see a token, over two ranks; then over two that share each."""
    keys = {**STAGED, "model__num_layers": 2, "parallel__pipeline_model_parallel_size": 1}
    keys |= {"model__moe_token_dispatcher_type": "alltoall"}
    keys["parallel__expert_model_parallel_size"] = 2

    def sent(**split: Any) -> dict[str, float]:
        return stage(make(MOE, "llama", **{**keys, **split}), 4).sent

    routed = 4 * 32 / 2 * 2 * (4 * 2 * 96 + 2 * 4)  # there and back, twice, and probabilities
    assert sent(parallel__expert_tensor_parallel_size=1)["expert"] == routed / 2
    assert sent(parallel__expert_tensor_parallel_size=2)["expert"] == routed / 2 + routed
    gathered = sent(parallel__expert_tensor_parallel_size=1, model__moe_token_dispatcher_type="allgather")["expert"]
    assert gathered == 4 * 32 / 2 * (4 * 2 * 96 + 2 * 4 * 4)
    # Two layers' keys and values of 4 groups, or of 8 heads: gathered, and their gradients scattered.
    split = {"parallel__engine": "megatron", "parallel__context_parallel_size": 2, "model__core_attention": "sdpa"}
    groups = stage(make(MIXED, "llama", training__micro_batch_size=8, **split), 2).sent["context"]
    assert groups == 2 * 2 * 8 * 32 * 4 * (2 * 4 * 8) / 2
    latent = stage(make(MLA, "llama", training__micro_batch_size=8, **split), 2).sent["context"]
    assert latent == 2 * 2 * 8 * 32 * 4 * 8 * (20 + 14) / 2


def test_time_by_hand() -> None:
    """Groups of two are within a node of four; stages are not, and data-parallel ranks of a stage are."""
    parametrization, layout = laid_out(make(MIXED, "llama", **STAGED), 8)
    device = Device(tflops=1e-3, utilization=0.5, node=4, within=1e6, between=1e5)
    step = step_of(parametrization, layout, device)
    assert step.stage == 1  # which has the head
    assert step.computing == step.flops / 0.5e9
    assert step.sending == pytest.approx(step.sent["tensor"] / 1e6 + step.sent["pipeline"] / 1e5)
    assert step.reducing == step.sent["data"] / 1e6
    assert step.waiting == (step.computing + step.sending) * 1 / 4
    assert step.seconds == step.computing + step.sending + step.waiting + step.reducing
    other_nodes = step_of(parametrization, layout, dataclasses.replace(device, node=2))
    assert other_nodes.reducing == step.sent["data"] / 1e5
    neighbours = dataclasses.replace(layout, pipeline_before_data=True)
    assert step_of(parametrization, neighbours, device).sending == pytest.approx(
        step.sent["tensor"] / 1e6 + step.sent["pipeline"] / 1e6
    )


@pytest.mark.parametrize(
    ("keys", "hidden"),
    [
        ({"engine": "megatron", "overlap_grad_reduce": True}, 1 / 2),
        ({"zero_stage": 3}, 1.0),
        ({"zero_stage": 1}, 0.0),
    ],
)
def test_what_is_reduced_meanwhile(keys: dict[str, Any], hidden: float) -> None:
    """Beside one of two micro-batches, beside all of the step, beside nothing."""
    parallel = {f"parallel__{key}": value for key, value in keys.items()}
    config = make(MIXED, "llama", training__micro_batch_size=1, parallel__tensor_model_parallel_size=1, **parallel)
    parametrization, layout = laid_out(config, 4)
    step = step_of(parametrization, layout, Device(tflops=1e-3, within=1e6))
    assert step.reducing == pytest.approx(step.sent["data"] / 1e6 - hidden * step.computing)
    assert step_of(parametrization, layout, Device(tflops=1e-6, within=1e6)).reducing == (
        0.0 if hidden else step.sent["data"] / 1e6
    )


def test_what_traffic_sees(ranks: Ranks) -> None:
    """64 numbers of 4 bytes all-reduced, gathered, scattered, exchanged over two ranks; 96 sent by one."""
    config = make(MIXED, "gpt3", parallel__engine="megatron", parallel__tensor_model_parallel_size=2)
    first, second = ranks.run(2, traffic.known, config=config)
    assert first == {"tensor": (2 + 1 + 1) * 64 * 4 / 2, "expert": 64 * 4 / 2, "pipeline": 96 * 4}
    assert second == {**first, "pipeline": 0}


TOP_4 = {"model__moe_router_topk": 4}  # of four: every expert gets every token, whatever the router says
MUON = {"optimizer__name": "muon", "training__precision": "bf16", "base__num_query_groups": 2}
PADDED = {"data": 0.005}
"""megatron-core's distributed optimizer pads what ranks share."""
ROUTED = {**PADDED, "expert": 0.15}
"""A rank of a model as small as this sends so much more or less than its share of the tokens."""
COUNTED = {"tensor": 0.0005}
"""megatron-core 0.19 gathers the largest logits, to count how many further tokens were right."""
CELLS: list[tuple[str, Split, dict[str, Any], dict[str, float]]] = [
    ("gpt3, mixed", Split(1, tensor=2, data=2, sequence=True), {}, {}),
    ("moe alltoall", Split("distributed", tensor=2, expert=4, expert_tensor=1, data=2, sequence=True), TOP_4, PADDED),
    ("llama, mixed", Split(0, data=2), {}, {}),
    ("llama, mixed", Split(2, tensor=2, data=2), {}, {}),
    ("gpt3", Split("plain", data=2, overlap=True), {}, {}),
    ("gpt3", Split("distributed", data=4, overlap=True), {}, PADDED),
    ("gpt3", Split("fsdp2", data=4), {"training__precision": "bf16"}, {}),
    ("gpt3", Split("plain", tensor=4), {}, {}),
    ("gpt3", Split("plain", pipeline=2, virtual=2, tensor=2, sequence=True), {}, {}),
    ("gpt3", Split("plain", pipeline=2, data=2, laid_out="Et|tttL", stages_first=True), {}, {}),
    ("mla", Split("plain", tensor=2, sequence=True), {}, {}),
    ("llama, mla", Split(0, tensor=2), {}, {}),
    ("mla", Split("plain", context=2), {}, {}),
    ("mtp", Split("plain", tensor=2), {}, COUNTED),
    ("mtp", Split("distributed", pipeline=2, tensor=2, sequence=True), {}, {**COUNTED, **PADDED}),
    ("moe", Split("distributed", tensor=2, data=2, sequence=True), {}, PADDED),
    ("moe", Split("distributed", pipeline=2, expert=2, data=2), {}, PADDED),
    ("moe", Split("distributed", expert=2, data=4, overlap=True), {}, PADDED),
    ("moe", Split(1, expert=2, data=4), {}, {}),
    ("moe alltoall", Split("distributed", tensor=2, expert=2, expert_tensor=2, data=2, sequence=True), TOP_4, PADDED),
    ("moe alltoall", Split("distributed", tensor=2, expert=4, expert_tensor=1, data=2, sequence=True), {}, ROUTED),
]
SLOW = [pytest.param(*cell, id=f"{cell[0]}: {cell[1]}", marks=pytest.mark.slow) for cell in CELLS[1:]]
QUICK = [pytest.param(*cell, id=f"{cell[0]}: {cell[1]}") for cell in CELLS[:1]]


@pytest.mark.parametrize(("model", "split", "keys", "bounds"), [*QUICK, *SLOW])
def test_what_ranks_send_and_compute(
    ranks: Ranks, model: str, split: Split, keys: dict[str, Any], bounds: dict[str, float]
) -> None:
    """To the byte where no bound is given; operations over all ranks to the last one."""
    said, found, _ = compare(ranks, config_of(model, split, **keys), split.processes)
    assert found[0][0], "nothing was sent"
    for (sent, _), (measured, _) in zip(said, found, strict=True):
        for kind in KINDS:
            assert measured.get(kind, 0) == pytest.approx(sent[kind], rel=bounds.get(kind, 0), abs=0), kind
    assert sum(flops for _, flops in found) == pytest.approx(sum(flops for _, flops in said), rel=1e-9)


@pytest.mark.slow
@pytest.mark.skipif(emerging_missing("muon") is not None, reason=str(emerging_missing("muon")))
def test_muon_s_ranks_hand_round_what_each_steps(ranks: Ranks) -> None:
    split = Split("distributed", data=4)
    said, found, _ = compare(ranks, config_of("gpt3", split, **MUON), split.processes)
    assert [sent for sent, _ in said] == [{**dict.fromkeys(KINDS, 0.0), **sent} for sent, _ in found]


@pytest.mark.slow
@pytest.mark.parametrize("name", COPIES)
def test_small_copies_of_shipped_configs(ranks: Ranks, tmp_path: Path, name: str) -> None:
    said, found, _ = compare(ranks, copy(name, tmp_path), COPIES[name][0])
    ranks.stop()  # eight are more than other tests use
    for kind in KINDS:
        paper, measured = (sum(sent.get(kind, 0) for sent, _ in told) for told in (said, found))
        assert measured == pytest.approx(paper, rel=_bound(name, kind), abs=0), kind
    assert sum(flops for _, flops in found) == sum(flops for _, flops in said)


def _bound(name: str, kind: str) -> float:
    """Of a copy's sum over its ranks: none, but for padding, the count of right tokens, and routing."""
    return {"data": 0.001, "tensor": 0.0005, "expert": 0.05}.get(kind, 0.0) if name.startswith("deepseek") else 0.0


def test_the_page_is_what_the_model_gives() -> None:
    """The measured numbers are the page's own, and no further from the model than the slow tests allow."""
    text = PAGE.read_text()
    rows = rows_of(text)
    assert page(rows) == text, "python -m tests.helpers.scaling_page writes it anew"
    assert {row[0] for row in rows} == set(COPIES)
    for name, _, what, paper, measured, _ in rows:
        assert number(measured) == pytest.approx(number(paper), rel=_bound(name, what.split(",")[0]), abs=0)


def test_stages_together_compute_what_the_plan_counts() -> None:
    config = make(MOE, "llama", **{**STAGED, "model__mtp_num_layers": 1, "model__moe_layer_freq": 2})
    parametrization, layout = laid_out(config, 8)
    held = shares(parametrization)
    total = sum(Stage(parametrization, layout, number, held).flops for number in range(2)) * 4
    assert total == pytest.approx(8 * 32 * flops_per_token(parametrization), rel=1e-12)


def test_choices_are_layouts_that_can_be_started() -> None:
    """Each is what its keys make of the config; the own one is among them; of the same model there is no quicker."""
    config = make(MIXED, "llama", **{**STAGED, "run__dir": "unused"})
    parametrization, layout = laid_out(config, 8)
    found = choices(parametrization, 8, Device())
    assert sum(not choice.keys for choice in found) == 1
    assert len({str(choice.layout) for choice in found}) == len(found) > 10
    for choice in found:
        made = resolve(derive(config, choice.keys), 8)
        assert made.layout == choice.layout
        assert step_of(dataclasses.replace(parametrization, config=made.config), choice.layout, Device()) == choice.step
    assert [choice.step.seconds for choice in found] == sorted(choice.step.seconds for choice in found)
    assert next(choice for choice in found if not choice.keys).layout == layout


def test_advice_by_memory() -> None:
    config = make(MIXED, "llama", **STAGED)
    parametrization, layout = laid_out(config, 8)
    found = choices(parametrization, 8, Device())
    plain, (_, _, said) = on_paper(parametrization, layout, Device(), 80e9)
    assert plain["quickest"]["step"] == found[0].step.as_json()
    accepted = f"layout: of {len(found)} that the config's checks accept"
    assert said.startswith(f"{accepted}, {len(found)} fit into 80 GB per process; the config's own is ")
    assert f"% slower than the quickest: {found[0].layout}, " in said
    least = min(choice.memory for choice in found)
    fitting = [choice for choice in found if choice.memory == least]
    plain, (_, _, said) = on_paper(parametrization, layout, Device(), least)
    assert plain["quickest"]["keys"] == fitting[0].keys
    assert f"{accepted}, {len(fitting)} fit into " in said
    assert f"; the config's own is not among them; the quickest: {fitting[0].layout}, " in said
    plain, (_, _, said) = on_paper(parametrization, layout, Device(), least - 1)
    assert plain["quickest"] is None
    assert said.startswith(f"{accepted}, 0 fit into ")


@pytest.mark.slow
def test_plan_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its advice, given back to it as words of the command line, leaves nothing to advise."""
    config = make(MIXED, "llama", **STAGED, run__dir=str(tmp_path), tuning__max_compute_share=100.0)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config.model_dump()))
    words = ["plan", str(path), "--world-size", "8"]
    assert cli.run(words) == 0
    shown = capsys.readouterr().out
    assert "a step, per process at most: " in shown
    assert "on paper" not in shown
    device = ["--device-tflops", "100", "--utilization", "0.5", "--node-bandwidth", "10", "--network-bandwidth", "1"]
    assert cli.run([*words, *device, "--device-memory", "1", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    parametrization, layout = laid_out(config, 8)
    expected = step_of(parametrization, layout, Device(tflops=100, utilization=0.5, within=1e10, between=1e9))
    assert plain["step"] == expected.as_json()
    assert cli.run([*words, *device, "--device-memory", "1"]) == 0
    told = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("layout: "))
    keys = told.rsplit("; ", 1)[1].split()
    assert len(keys) == len(plain["quickest"]["keys"]) > 1
    assert cli.run([*words, *keys, *device, "--device-memory", "1"]) == 0
    assert "; the config's own is within 0.0% of the quickest\n" in capsys.readouterr().out
    assert cli.run([*words, "--device-memory", "1"]) == 2
    assert "--device-memory: layouts are compared by the time of a step; expected" in capsys.readouterr().err


def test_a_device_is_one_with_cuda(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Wherever it is planned: bf16, torch's attention, which keeps no scores. A node of no GPUs has its processes."""
    automatic = {"training__precision": "auto", "model__core_attention": "auto"}
    config = make(MIXED, "llama", run__dir=str(tmp_path), tuning__max_compute_share=100.0, **automatic)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config.model_dump()))

    def planned(*words: str) -> Any:
        assert cli.run(["plan", str(path), "--world-size", "8", "--json", *words]) == 0
        return json.loads(capsys.readouterr().out)

    device = ("--device-tflops", "100", "--device-memory", "1")
    said = ("training.precision=bf16", "model.core_attention=sdpa")
    assert planned(*device) == planned(*device, *said)
    assert planned() != planned(*said)
    cpus = ("slurm.gpus_per_node=0", "slurm.processes_per_node=8")
    assert planned(*device, *cpus)["quickest"] == planned(*device, "slurm.gpus_per_node=8")["quickest"] is not None


def test_nothing_is_said_of_another_kind_of_model() -> None:
    config = make_t5()
    assert on_paper(parametrize(config, 375), resolve_layout(config, 1), Device(), 80e9) == ({}, [])
