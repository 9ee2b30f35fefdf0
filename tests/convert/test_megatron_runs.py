"""Checkpoints of `mup-megatron run`: generate and export read them, transformers computes what Megatron computed."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from mup_megatron import cli
from mup_megatron.config import derive
from mup_megatron.convert import export
from mup_megatron.convert.export import export_hugging_face, export_megatron, open_source
from mup_megatron.convert.saved_run import find_checkpoint, open_run
from mup_megatron.evaluate.generate import generate, load_model
from mup_megatron.parallel import runtime, upstream
from mup_megatron.patches import trees
from mup_megatron.util.errors import UserError
from tests.convert.sources import deviation
from tests.convert.test_hugging_face import load
from tests.helpers import bodies, megatron_runs
from tests.helpers.distributed import Ranks
from tests.helpers.installed import needs_training
from tests.helpers.megatron_runs import SCRIPT
from tests.megatron_training.test_megatron_training import copy_of_megatron, saw

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    needs_training,
]
ENTRIES = 100
TOKENS = torch.randint(ENTRIES, (4, 16), generator=torch.Generator().manual_seed(5))
# Every multiplier other than 1: hidden ×2, FFN ×2, head size ×2, layers ×2.
BASE = "hidden_size: 32\nffn_hidden_size: 64\nkv_channels: 8\nnum_layers: 1\n"
MUP = {
    "parametrization": {"depth": "completep"},
    "hparams": {
        "attention_multiplier": 1.75,
        "output_multiplier": 3.0,
        "embedding_multiplier": 0.3,
        "residual_multiplier": 5.0,
    },
}
LLAMA = (
    *("--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights", "--group-query-attention"),
    *("--normalization", "RMSNorm", "--position-embedding-type", "rope"),
)
MIXTRAL = (*LLAMA, "--num-experts", "4", "--moe-router-topk", "2")
# A layer of experts after a dense one; heads 12 + 8 over 8 + 4.
DEEPSEEK = (
    *("--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights", "--normalization", "RMSNorm"),
    *("--position-embedding-type", "rope", "--multi-latent-attention", "--qk-layernorm", "--rope-type", "rope"),
    *("--q-lora-rank", "24", "--kv-lora-rank", "32", "--qk-head-dim", "12", "--qk-pos-emb-head-dim", "8"),
    *("--v-head-dim", "16", "--num-experts", "4", "--moe-router-topk", "2", "--moe-layer-freq", "[0,1]"),
    *("--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias", "--moe-ffn-hidden-size", "128"),
    *("--moe-router-bias-update-rate", "0.1", "--moe-shared-expert-intermediate-size", "128"),
    *("--moe-router-topk-scaling-factor", "2.5", "--moe-router-dtype", "fp32"),
)
OF_DEEPSEEK = """
hidden_size: 32
ffn_hidden_size: 64
kv_lora_rank: 16
qk_head_dim: 8
qk_pos_emb_head_dim: 4
moe_ffn_hidden_size: 64
moe_shared_expert_intermediate_size: 64
"""
# Name: ranks, options, keyword arguments, the class of transformers.
RUNS: dict[str, tuple[int, tuple[str, ...], dict[str, Any], str]] = {
    "gpt3": (1, (), {}, "GPT2LMHeadModel"),
    "llama": (1, LLAMA, {"num_query_groups": 2}, "LlamaForCausalLM"),
    "llama, TP 2": (2, LLAMA, {"num_query_groups": 2, "tensor_model_parallel_size": 2}, "LlamaForCausalLM"),
    "gpt3, TP 2": (2, (), {"tensor_model_parallel_size": 2}, "GPT2LMHeadModel"),
    "gpt3, distributed optimizer": (2, ("--use-distributed-optimizer",), {}, "GPT2LMHeadModel"),
    "mixtral": (1, MIXTRAL, {"num_query_groups": 2, "moe_ffn_hidden_size": 128}, "MixtralForCausalLM"),
    "deepseek": (1, DEEPSEEK, {"kv_channels": None}, "DeepseekV3ForCausalLM"),
    "mixtral, EP 2": (
        2,
        MIXTRAL,
        {"num_query_groups": 2, "moe_ffn_hidden_size": 128, "expert_model_parallel_size": 2},
        "MixtralForCausalLM",
    ),
}
QUICK = ("llama",)


FUSED = "gpt3, bias and GELU in one kernel"
RUNS[FUSED] = RUNS["gpt3"]


@dataclasses.dataclass(frozen=True)
class SavedRun:
    """A run of megatron.training in µP that has ended: where it was saved, and the logits of its model."""

    saved: Path
    words: list[str]
    logits: torch.Tensor


def words_of(folder: Path, name: str) -> list[str]:
    """The command line of a run, without where it is saved."""
    _, options, changed, _ = RUNS[name]
    # A list of layers with experts is of one depth.
    mup = {"hparams": MUP["hparams"]} if name == "deepseek" else MUP
    (folder / "mup.yaml").write_text(yaml.safe_dump(mup))
    base = BASE + ("moe_ffn_hidden_size: 64\n" if "mixtral" in name else "")
    base = OF_DEEPSEEK if name == "deepseek" else base
    valued = {"init_method_std": 0.15, "make_vocab_size_divisible_by": 64, "global_batch_size": 4, **changed}
    words = megatron_runs.words(folder, *options, "--mup-config", str(folder / "mup.yaml"), base=base, **valued)
    return [word for word in words if (name, word) != (FUSED, "--no-bias-gelu-fusion")]


def without(words: list[str], *names: str) -> list[str]:
    """A command line without some options and their values."""
    return [
        word
        for before, word in zip(["", *words], words, strict=False)
        if not {before, word} & {f"--{n}" for n in names}
    ]


@pytest.fixture(scope="module")
def ran(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], SavedRun]:
    upstream.prepare_process()
    made: dict[str, SavedRun] = {}

    def run(name: str) -> SavedRun:
        if name not in made:
            folder, count = tmp_path_factory.mktemp("runs"), RUNS[name][0]
            words = words_of(folder, name)
            told = [*words, "--save", str(folder / "saved"), "--save-interval", "100", "--train-iters", "3"]
            found = ranks.run(count, megatron_runs.train, words=told, tokens=TOKENS)[-1]
            assert found["status"] == 0, found["said"]
            made[name] = SavedRun(folder / "saved", words, found["logits"][..., :ENTRIES])
        return made[name]

    return run


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in RUNS]
)
def test_transformers_computes_what_megatron_computed(
    ran: Callable[[str], SavedRun], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 1e-5; with nothing folded the logits are others by far."""
    one = ran(name)
    export_hugging_face(open_source(one.saved), tmp_path / "hf")
    model = load(tmp_path / "hf")
    assert type(model).__name__ == RUNS[name][3]
    with torch.no_grad():
        assert deviation(model(TOKENS).logits, one.logits) < 1e-5
    monkeypatch.setattr(export, "fold", lambda _parametrization: {})
    export_hugging_face(open_source(one.saved), tmp_path / "bare")
    with torch.no_grad():
        assert deviation(load(tmp_path / "bare")(TOKENS).logits, one.logits) > 1e-2


@pytest.mark.slow
def test_gelu_as_the_run_computed_it(ran: Callable[[str], SavedRun], tmp_path: Path) -> None:
    """Of one kernel with the bias it is the tanh approximation, which the manifest remembers."""
    for name, expected in (("gpt3", "gelu"), (FUSED, "gelu_new")):
        export_hugging_face(open_source(ran(name).saved), tmp_path / expected)
        assert json.loads((tmp_path / expected / "config.json").read_text())["activation_function"] == expected


def test_generate_has_the_same_model(ran: Callable[[str], SavedRun]) -> None:
    one = ran("llama")
    try:
        run = open_run(one.saved)
        model, tokenizer = load_model(run, torch.device("cpu")), run.tokenizer
        assert tokenizer.vocab_size == ENTRIES
        assert deviation(megatron_runs._logits(model, TOKENS)[..., :ENTRIES], one.logits) < 1e-6
        said = [token.id for token in generate(model, tokenizer, "3 14 15", max_new_tokens=4)]
    finally:
        runtime.stop_distributed()
    assert len(said) == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama, TP 2", "mixtral, EP 2"])
def test_evaluate_has_the_same_model_in_any_layout(
    ran: Callable[[str], SavedRun], ranks: Ranks, name: str, tmp_path: Path
) -> None:
    """Of numbers as text, from Megatron's own logits; in one process, and split over two ranks, experts and all."""
    one = ran(name)
    lines = [{"text": " ".join(map(str, row[1:].tolist()))} for row in TOKENS]
    (tmp_path / "numbers.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    words = ["evaluate", str(one.saved), "--perplexity", str(tmp_path / "numbers.jsonl"), "--json", "--window", "16"]
    parts = ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"]
    if "mixtral" in name:
        parts = ["parallel.expert_model_parallel_size=2"]
    found = []
    for count, given in ((1, []), (2, parts)):
        status, out, err = ranks.run(count, bodies.command, arguments=[*words, *given])[0]
        assert status == 0, err
        found.append(json.loads(out)["results"][0]["metrics"])
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    # Each document begins after the last entry, which ends others.
    run = open_run(one.saved)
    model, told = load_model(run, torch.device("cpu")), run.tokenizer
    try:
        begun = torch.cat([torch.full((4, 1), told.eod), TOKENS[:, 1:]], dim=1)
        logits = megatron_runs._logits(model, begun)[:, :-1, :ENTRIES].double()
    finally:
        runtime.stop_distributed()
    expected = logits.log_softmax(-1).gather(-1, begun[:, 1:, None]).sum().item()
    assert found[0]["log_likelihood"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama, TP 2"])
def test_fine_tuning_begins_with_its_weights(
    ran: Callable[[str], SavedRun], ranks: Ranks, name: str, tmp_path: Path
) -> None:
    """In one process and at TP 2: the first step has rate 0, so that what is saved is what was read."""
    run = open_run(ran(name).saved)
    line = json.dumps({"text": " ".join(map(str, range(97)))})
    (tmp_path / "numbers.jsonl").write_text(f"{line}\n" * 40)
    keys = {
        "data": {"files": [str(tmp_path / "numbers.jsonl")], "tokenizer": {"library": "null", "vocab_size": ENTRIES}},
        "training.train_steps": 1,
        "training.lr_warmup_steps": 4,
        "training.lr_decay_steps": 9,
        "training.checkpoint_interval": 1,
        "training.eval_interval": None,
    }
    for count in (1, 2):
        folder = tmp_path / f"tuned-{count}"
        folder.mkdir()
        given = {**keys, "run.dir": str(folder / "run"), "parallel.tensor_model_parallel_size": count}
        (folder / "run.yaml").write_text(yaml.safe_dump(derive(run.config, given).model_dump()))
        words = ["train", str(folder / "run.yaml"), "--init-from", str(run.path)]
        status, _, err = ranks.run(count, bodies.command, arguments=words)[0]
        assert status == 0, err
        tuned = open_run(folder / "run").weights()
        theirs = run.weights()
        assert all(torch.equal(tuned.read(key), theirs.read(key)) for key in tuned.shapes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt3", "llama, TP 2"])
def test_plain_megatron_goes_on_from_it(
    ran: Callable[[str], SavedRun], ranks: Ranks, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without µP its first loss is that of the run in µP, both from the first data on; with nothing folded another."""
    one = ran(name)
    (own,) = ranks.run(
        1,
        megatron_runs.train,
        words=[
            *without(one.words, "tensor-model-parallel-size"),
            "--load",
            str(one.saved),
            "--finetune",
            "--train-iters",
            "3",
        ],
    )
    assert own["status"] == 0, own["said"]
    losses = {}
    for kind in ("folded", "bare"):
        if kind == "bare":
            monkeypatch.setattr(export, "fold", lambda _parametrization: {})
        export_megatron(open_source(one.saved), tmp_path / kind)
        told = (tmp_path / kind / "megatron_options.txt").read_text().split()
        words = without(one.words, "mup-base", "mup-config", "tensor-model-parallel-size")
        (plain,) = ranks.run(
            1, megatron_runs.train, words=[*words, *told, "--load", str(tmp_path / kind)], plainly=True
        )
        assert plain["status"] == 0, plain["said"]
        losses[kind] = plain["steps"][0]
    assert losses["folded"] == pytest.approx(own["steps"][0], rel=1e-6)
    assert abs(losses["bare"] - own["steps"][0]) > 1e-2


@pytest.mark.slow
def test_a_patched_trees_checkpoint(ran: Callable[[str], SavedRun], tmp_path: Path) -> None:
    """The same run from a tree that `mup-megatron patch` changed: export and generate read what it saved.

    That both runs are one to the last bit is tested in tests/megatron_training; so are their checkpoints' exports, and
    Megatron's own logits are transformers' of the tree's.
    """
    one = ran("llama")
    tree = copy_of_megatron(tmp_path)
    trees.apply_tree(tree)
    saved = tmp_path / "saved"
    told = [*one.words, "--save", str(saved), "--save-interval", "100", "--train-iters", "3"]
    status, said, found = saw(tmp_path, str(tree), str(SCRIPT), *told)
    assert status == 0, said[-4000:]
    assert found["file"].startswith(str(tree))
    export_hugging_face(open_source(saved), tmp_path / "hf")
    export_hugging_face(open_source(one.saved), tmp_path / "run")
    own, runs = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "run"))
    assert set(own) == set(runs)
    assert all(torch.equal(own[name], runs[name]) for name in own)
    with torch.no_grad():
        assert deviation(load(tmp_path / "hf")(TOKENS).logits, one.logits) < 1e-5
    try:
        run = open_run(saved)
        model, tokenizer = load_model(run, torch.device("cpu")), run.tokenizer
        assert deviation(megatron_runs._logits(model, TOKENS)[..., :ENTRIES], one.logits) < 1e-6
        assert len(list(generate(model, tokenizer, "3 14 15", max_new_tokens=4))) == 4
    finally:
        runtime.stop_distributed()


def test_it_is_not_rebased(ran: Callable[[str], SavedRun], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its optimizer's state is Megatron's: refused in one sentence, and no folder is made."""
    saved = ran("llama").saved
    (tmp_path / "base.yaml").write_text("hidden_size: 16\nffn_hidden_size: 64\nkv_channels: 8\nnum_layers: 1\n")
    capfd.readouterr()
    assert cli.run(["rebase", str(saved), str(tmp_path / "out"), "--base", str(tmp_path / "base.yaml")]) == 2
    found = capfd.readouterr().err.strip().splitlines()
    sentence = "written by megatron.training; expected a checkpoint of mup-megatron train"
    assert found == [f"mup-megatron: error: {saved / 'iter_0000003'}: {sentence}"]
    assert [path.name for path in tmp_path.iterdir()] == ["base.yaml"]


# --- which checkpoint, whose tokenizer ---


def test_which_checkpoint(ran: Callable[[str], SavedRun], tmp_path: Path) -> None:
    saved = ran("llama").saved
    assert find_checkpoint(saved) == find_checkpoint(saved / "iter_0000003") == saved / "iter_0000003"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    with pytest.raises(UserError, match=r"iter_0000007: has no mup\.json, so it was not written in µP; expected"):
        find_checkpoint(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    with pytest.raises(UserError, match=r"iteration\.txt: expected the number of an iteration, found 'release'"):
        find_checkpoint(tmp_path)


def edited(saved: Path, folder: Path, **parts: Any) -> Path:
    """A copy of the checkpoint whose manifest says otherwise."""
    copy = folder / "iter_0000003"
    shutil.copytree(saved / "iter_0000003", copy)
    manifest = json.loads((copy / "mup.json").read_text())
    (copy / "mup.json").write_text(json.dumps({**manifest, **parts}))
    return copy


def test_a_tokenizer_that_is_not_known(ran: Callable[[str], SavedRun], tmp_path: Path) -> None:
    """Megatron's own are files that no library of megatron-core reads alone; the option names another form of it."""
    copy = edited(ran("llama").saved, tmp_path, tokenizer_type="GPT2BPETokenizer")
    with pytest.raises(
        UserError, match=r"its tokenizer, Megatron's GPT2BPETokenizer, is not known here; expected --tok"
    ):
        open_run(copy)
    assert open_run(copy, "null:100").tokenizer.vocab_size == ENTRIES
    with pytest.raises(
        UserError, match=r"has 128 rows, and the tokenizer's 300 entries make 320 of them; expected the"
    ):
        open_run(copy, "null:300")
    for text in ("words", "words:here", "sentencepiece:", "sentencepiece"):
        with pytest.raises(UserError, match=f"--tokenizer: expected LIBRARY:PATH with one of .*, found '{text}'"):
            open_run(copy, text)
    with pytest.raises(UserError, match=r"data\.tokenizer\.path: no such file: .*gone\.model"):
        open_run(copy, f"sentencepiece:{tmp_path / 'gone.model'}")


@pytest.mark.parametrize("what", ["index", "file", "format", "tensor"])
def test_what_is_damaged(
    ran: Callable[[str], SavedRun], what: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Megatron's checkpoints have no checksums; what cannot be read is refused all the same."""
    copy = edited(ran("llama").saved, tmp_path)
    data = copy / "__0_0.distcp"
    if what == "index":
        (copy / ".metadata").write_bytes((copy / ".metadata").read_bytes()[:500])
        said = "cannot read the index of the checkpoint"
    elif what == "file":
        data.write_bytes(data.read_bytes()[:2000])
        said = "damaged ("
    elif what == "format":
        (copy / ".metadata").unlink()
        said = "expected one written with --ckpt-format torch_dist"
    else:
        manifest = json.loads((copy / "mup.json").read_text())
        manifest["config"]["model"]["add_qkv_bias"] = True
        (copy / "mup.json").write_text(json.dumps(manifest))
        said = "self_attention.linear_qkv.bias"
    assert cli.run(["export", str(copy), str(tmp_path / "out")]) == 2
    found = capfd.readouterr().err.strip().splitlines()[-1]
    assert found.startswith("mup-megatron: error: ")
    assert said in found
    assert not (tmp_path / "out").exists()
