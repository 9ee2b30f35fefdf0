"""`mup-megatron run` and a patched tree: the real megatron.training of the wheel trains in µP, as our engine does."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from mup_megatron.config import Config
from mup_megatron.data.prepare import prepare
from mup_megatron.model.build import parametrize
from mup_megatron.parallel.layout import resolve_layout
from mup_megatron.patches import trees
from mup_megatron.tuning.record import write_record
from mup_megatron.tuning.recording import make_record
from mup_megatron.tuning.space import values_of
from tests.helpers import bodies
from tests.helpers.commands import BIN, environment, run
from tests.helpers.configs import MIXED, make
from tests.helpers.distributed import Ranks
from tests.helpers.installed import needs_training
from tests.helpers.megatron_runs import SCRIPT
from tests.helpers.records import BUDGET, study_of

pytestmark = needs_training
STEPS = 8
# A record and a file say them, and the groups have them.
FACTORS = {"embedding": {"lr": 2.0, "init": 0.5}, "attention_q": {"init": 0.5}, "*.mlp.*.weight": {"lr": 0.5}}


def config(**overrides: Any) -> Config:
    keys = {
        "parallel__engine": "megatron",
        "parallel__use_distributed_optimizer": False,
        "training__train_steps": STEPS,
    }
    return make(MIXED, hparams__output_multiplier=2.0, hparams__embedding_multiplier=3.0, **{**keys, **overrides})


def options(of: Config, folder: Path) -> list[str]:
    """The same run as Megatron's options, and what the wheel needs on a CPU without Transformer Engine and Apex."""
    model, training, hparams = of.model, of.training, of.hparams
    (prefix,) = prepare(of).blend[0]
    (folder / "base.yaml").write_text(yaml.safe_dump(of.base.sizes))
    multipliers = {name: getattr(hparams, name) for name in type(hparams).model_fields if name.endswith("_multiplier")}
    factors = {entry: said.model_dump() for entry, said in hparams.per_tensor.items()}
    (folder / "mup.yaml").write_text(yaml.safe_dump({"hparams": {**multipliers, "per_tensor": factors}}))
    record = make_record(
        parametrize(of, of.vocab_size or 0),
        resolve_layout(of, 1),
        values_of(of),
        study=study_of(),
        budget=BUDGET,
    )
    write_record(folder / "transfer.json", record)
    valued = {
        "num-layers": model.num_layers,
        "hidden-size": model.hidden_size,
        "ffn-hidden-size": model.ffn_size,
        "num-attention-heads": model.num_attention_heads,
        "num-query-groups": model.query_groups,
        "kv-channels": model.kv_channels,
        "seq-length": training.seq_length,
        "max-position-embeddings": training.seq_length,
        "micro-batch-size": training.micro_batch_size,
        "global-batch-size": training.global_batch_size,
        "train-iters": training.train_steps,
        "lr": hparams.lr,
        "min-lr": hparams.lr * training.min_lr_ratio,
        "lr-decay-style": training.lr_schedule,
        "lr-warmup-iters": training.lr_warmup_steps,
        "weight-decay": hparams.weight_decay,
        "init-method-std": hparams.init_method_std,
        "adam-beta2": of.optimizer.betas[1],
        "seed": of.run.seed,
        "data-path": prefix,
        "data-cache-path": folder / "cache",
        "split": of.data.split,
        "tokenizer-type": "SentencePieceTokenizer",
        "tokenizer-model": prepare(of).tokenizer,
        "transformer-impl": "local",
        "distributed-backend": "gloo",
        "eval-iters": 0,
        "eval-interval": 1000,
        "hidden-dropout": 0,
        "attention-dropout": 0,
        "mup-base": folder / "base.yaml",
    }
    no = ("bias-gelu-fusion", "bias-dropout-fusion", "masked-softmax-fusion", "gradient-accumulation-fusion")
    words = ["--group-query-attention", *(f"--no-{name}" for name in (*no, "persist-layer-norm"))]
    return words + [word for name, value in valued.items() for word in (f"--{name}", str(value))]


def without(words: list[str], *options: str) -> list[str]:
    """The command line without some options and their values."""
    kept, skip = [], False
    for word in words:
        if not skip and word.removeprefix("--") not in options:
            kept.append(word)
        skip = word.startswith("--") and word.removeprefix("--") in options
    return kept


def start(folder: Path, name: str, how: str, *arguments: str) -> subprocess.Popen[str]:
    """Starts `tests.helpers.observed`; the two ways run side by side."""
    command = [sys.executable, "-m", "tests.helpers.observed", str(folder / name), how, *arguments]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"} if how != "run" else {}
    root = str(SCRIPT.parents[2])
    return subprocess.Popen(
        command,
        cwd=root,
        env={**environment(), "PYTHONPATH": root, **address},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def seen(process: subprocess.Popen[str], folder: Path, name: str) -> dict[str, Any]:
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said[-4000:]
    found = json.loads((folder / name).with_suffix(".json").read_text())
    with np.load((folder / name).with_suffix(".npz")) as initial:
        return {**found, "initial": dict(initial), "said": said}


def copy_of_megatron(folder: Path) -> Path:
    """The wheel's megatron/ as a tree of its own."""
    source = importlib.util.find_spec("megatron.training")
    assert source is not None
    assert source.origin is not None
    tree = folder / "tree"
    shutil.copytree(Path(source.origin).parent.parent, tree / "megatron")
    return tree


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The unmodified script under `mup-megatron run`, and plainly on a patched tree."""
    folder = tmp_path_factory.mktemp("training")
    words = options(config(hparams__per_tensor=FACTORS), folder)
    tree = copy_of_megatron(folder)
    assert trees.apply_tree(tree)
    # One is told the values, the other takes them from a transfer record.
    told = without(words, "lr", "init-method-std", "weight-decay")
    running = start(folder, "run", "run", str(SCRIPT), *told, "--mup-hparams", str(folder / "transfer.json"))
    patched = start(folder, "tree", str(tree), str(SCRIPT), *words, "--mup-config", str(folder / "mup.yaml"))
    found = {"run": seen(running, folder, "run"), "tree": seen(patched, folder, "tree")}
    assert found["tree"]["file"].startswith(str(tree))
    assert not found["run"]["file"].startswith(str(tree))
    return found


def test_run_and_patched_tree_are_one(both: dict[str, dict[str, Any]]) -> None:
    """The same values, the same groups and the same losses, to the last bit."""
    run, tree = both["run"], both["tree"]
    assert list(run["initial"]) == list(tree["initial"])
    for name, value in run["initial"].items():
        assert np.array_equal(value, tree["initial"][name]), name
    assert run["groups"] == tree["groups"]
    assert run["losses"] == tree["losses"]


def test_both_are_our_engine(both: dict[str, dict[str, Any]], ranks: Ranks) -> None:
    """The Megatron engine on the same config, data and seed: the same values to the last bit, groups and losses."""
    of = config(hparams__per_tensor=FACTORS)
    assert of.hparams.per_tensor["*.mlp.*.weight"].lr == 0.5
    (ours,) = ranks.run(1, bodies.train, config=of, steps=STEPS)
    run = both["run"]
    assert set(run["initial"]) == set(ours["initial"])
    for name, value in run["initial"].items():
        assert np.array_equal(value, ours["initial"][name]), name
    for name, (_, multiplier, max_lr, min_lr, eps, decay) in run["groups"].items():
        assert (multiplier, eps, decay * of.hparams.weight_decay) == ours["groups"][name], name
        assert max_lr == of.hparams.lr * multiplier
        assert min_lr == pytest.approx(0.1 * max_lr, rel=1e-12)
    assert len({tuple(group) for group in run["groups"].values()}) > 4
    per_step = np.array(run["losses"]).reshape(STEPS, -1).mean(axis=1)
    assert np.max(np.abs(per_step - ours["losses"])) < 1e-5, (per_step, ours["losses"])
    assert per_step[-1] < per_step[0] - 0.05


def saw(folder: Path, how: str, *arguments: str) -> tuple[int, str, dict[str, Any]]:
    """Runs `tests.helpers.observed` to its end: exit status, what was said, what was seen if it came so far."""
    name = f"seen-{len(list(folder.iterdir()))}"
    process = start(folder, name, how, *arguments)
    said, _ = process.communicate(timeout=240)
    path = (folder / name).with_suffix(".json")
    return process.returncode, said, json.loads(path.read_text()) if path.exists() else {}


@pytest.mark.slow
def test_undone_is_upstream(tmp_path: Path) -> None:
    """With the patches undone, and in a patched tree without µP's options, losses are upstream's to the last bit."""
    words = without(options(config(), tmp_path), "mup-base")
    tree = copy_of_megatron(tmp_path)
    trees.apply_tree(tree)
    _, _, plain = saw(tmp_path, "plain", str(SCRIPT), *words)
    assert len(plain["losses"]) == 2 * STEPS
    for how in ("undone", str(tree)):
        status, said, found = saw(tmp_path, how, str(SCRIPT), *words)
        assert status == 0, said[-4000:]
        assert found["losses"] == plain["losses"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mup-arguments", "mup-validate", "mup-model", "mup-optimizer", "mup-save"])
def test_without_a_patch(name: str, tmp_path: Path) -> None:
    """Negative control: each patch of `run`, left out alone, is seen."""
    words = [str(SCRIPT), *options(config(training__train_steps=3), tmp_path)]
    save = ["--save", str(tmp_path / "saved"), "--save-interval", "3"] if name == "mup-save" else []
    status, said, _ = saw(tmp_path, f"without:{name}", *words, *save)
    if name == "mup-save":
        assert status == 0
        assert list((tmp_path / "saved").glob("iter_*/.metadata"))
        assert not list((tmp_path / "saved").glob("iter_*/mup.json"))
        return
    expected = {
        "mup-arguments": "unrecognized arguments: --mup-base",
        "mup-validate": "ended without reading Megatron's arguments",
        "mup-model": "the script built no GPTModel",
        "mup-optimizer": "the script trains the model with an optimizer of its own",
    }
    assert status != 0
    assert expected[name] in said


@pytest.mark.slow
def test_resume_and_its_guard(tmp_path: Path) -> None:
    """A run goes on to the last bit; another rate stops it, and so does a checkpoint without a record."""
    words = [str(SCRIPT), *options(config(training__train_steps=6), tmp_path)]
    saves = ["--save", str(tmp_path / "saved"), "--save-interval", "3"]
    loads = ["--load", str(tmp_path / "saved"), "--ckpt-step", "3"]
    _, _, whole = saw(tmp_path, "run", *words, *saves)
    status, said, resumed = saw(tmp_path, "run", *words, *loads)
    assert status == 0, said[-4000:]
    assert resumed["losses"] == whole["losses"][6:]

    record = json.loads((tmp_path / "saved" / "iter_0000003" / "mup.json").read_text())
    assert record["step"] == 3
    assert record["base_shapes"]["decoder.layers.1.mlp.linear_fc2.weight"] == [64, 64]

    # Plain upstream, which knows no multipliers, does not take these weights for its own, fine-tuning included.
    plain = [word for word in without(words, "mup-base") if not word.startswith("--mup")]
    status, said, _ = saw(tmp_path, "plain", *plain, *loads, "--finetune")
    assert status == 1
    asked = r"(?<!mup_megatron\.)(decoder|embedding)\.\S+ from model not in state dict: .*mup_megatron\.decoder"
    assert re.search(asked, said), said[-2000:]

    status, said, _ = saw(tmp_path, "run", *without(words, "lr"), "--lr", "4e-3", *loads)
    assert status == 2
    assert "hparams.lr" in said
    assert "--mup-allow-change KEY" in said

    (tmp_path / "saved" / "iter_0000003" / "mup.json").unlink()
    for how in ("run", "without:mup-load"):
        status, said, _ = saw(tmp_path, how, *words, *loads)
        assert status == (2 if how == "run" else 0), said[-4000:]
        assert ("has no mup.json, so it was not written in µP" in said) == (how == "run")


@pytest.mark.slow
@pytest.mark.parametrize("split", ["tensor", "pipeline", "distributed"])
def test_two_ranks(split: str, tmp_path: Path, both: dict[str, dict[str, Any]]) -> None:
    """Under torchrun, tensor parallel, pipeline parallel, or with the distributed optimizer: the same curve.

    Not in sequence parallel, which upstream's norms of torch refuse, and no other ones compute on a CPU.

    Megatron pads the vocabulary to a multiple of --make-vocab-size-divisible-by (128) times the tensor-parallel size,
    so half of it keeps the softmax over as many rows.
    """
    words = {
        "tensor": ["--tensor-model-parallel-size", "2", "--make-vocab-size-divisible-by", "64"],
        "pipeline": ["--pipeline-model-parallel-size", "2"],
        "distributed": ["--use-distributed-optimizer"],
    }[split]
    command = [BIN / "torchrun", "--nproc-per-node", "2", "-m", "mup_megatron.run", "--config", tmp_path / "mup.yaml"]
    of = config(hparams__per_tensor=FACTORS)  # as of `both`
    result = run(*map(str, command), SCRIPT, *options(of, tmp_path), *words, "--log-interval", "1")
    assert result.returncode == 0, result.stderr[-4000:]
    logged = [float(loss) for loss in re.findall(r"lm loss: (\S+)", result.stdout)]
    expected = np.array(both["run"]["losses"]).reshape(STEPS, -1).mean(axis=1)
    # training_log does not reset its sums after the first iteration, so the second line is a mean of two.
    expected[1] = expected[:2].mean()
    assert np.max(np.abs(np.array(logged) - expected)) < 1e-5, (logged, expected)


@pytest.mark.slow
def test_explain_prints_and_leaves(tmp_path: Path) -> None:
    words = options(config(), tmp_path)
    result = run(sys.executable, "-m", "mup_megatron", "run", SCRIPT, *words, "--mup-explain")
    assert result.returncode == 0, result.stderr[-4000:]
    assert re.search(r"mlp\.linear_fc2\.weight \(2×\) +96×160 +96×160 +64×64 +×2.5", result.stdout)
    assert not re.search(r"iteration +1/", result.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--use-mup", "--mup-base-hidden-size", "64"], "remove --use-mup, --mup-base-hidden-size"),
        (["--transformer-impl", "transformer_engine"], "transformer_engine computes on CUDA alone"),
        (["--qk-clip"], "--qk-clip: computes on CUDA alone, and none is here"),
    ],
)
@pytest.mark.parametrize("how", ["run", "tree"])
def test_refused(how: str, words: list[str], said: str, tmp_path: Path) -> None:
    """One sentence and exit status 2, also where nobody but the patched tree is there to say it."""
    arguments = [*options(config(), tmp_path), *words]
    tree = copy_of_megatron(tmp_path) if how == "tree" else None
    if tree is not None:
        trees.apply_tree(tree)
    status, output, _ = saw(tmp_path, str(tree or "run"), str(SCRIPT), *arguments)
    assert status == 2, output[-4000:]
    assert said in output
    assert "Traceback" not in output


OWN_SPEC = """
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.training import pretrain
from tests.megatron_training.pretrain_gpt import *

def own(config):
    layer = get_gpt_layer_local_spec(normalization=config.normalization).submodules
    {change}
    return ModuleSpec(module=TransformerLayer, submodules=layer)

if __name__ == "__main__":
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer

    args = parse_and_validate_args(args_defaults={{"tokenizer_type": "GPT2BPETokenizer"}})
    model = gpt_config_from_args(args)
    model.transformer_layer_spec = own
    train_valid_test_datasets_provider.is_distributed = True
    full_config = pretrain_cfg_container_from_args(args, model)
    pretrain(full_config, train_valid_test_datasets_provider, ModelType.encoder_or_decoder, forward_step)
"""


def own_spec(folder: Path, change: str) -> str:
    """A script whose model provider makes a layer spec of its own."""
    (folder / "own.py").write_text(OWN_SPEC.format(change=change))
    return str(folder / "own.py")


@pytest.mark.slow
def test_a_spec_without_norms_keeps_none(tmp_path: Path) -> None:
    """What trains is what the script built: norms that it left out are not there, and the rest has its rules."""
    words = options(config(training__train_steps=3), tmp_path)
    script = own_spec(tmp_path, "layer.input_layernorm = layer.pre_mlp_layernorm = IdentityOp")
    status, said, found = saw(tmp_path, "run", script, *words)
    assert status == 0, said[-4000:]
    norms = {name for name in found["groups"] if "layernorm" in name}
    assert norms == {"decoder.final_layernorm.weight", "decoder.final_layernorm.bias"}
    # fc2's fan-in grows from 64 to 160.
    assert found["groups"]["decoder.layers.1.mlp.linear_fc2.weight"][1] == pytest.approx(64 / 160)
    assert np.isfinite(found["losses"]).all()
