"""import: standard checkpoints become this project's. transformers and plain megatron.training are the oracles."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from mup_megatron import cli
from mup_megatron.checkpoints.checkpoint import SUMS
from mup_megatron.config import Config, derive
from mup_megatron.convert.export import export_hugging_face, open_source
from mup_megatron.convert.importing import import_checkpoint
from mup_megatron.data.corpus import data_directory
from mup_megatron.parallel import upstream
from mup_megatron.util.errors import UserError
from tests.convert.sources import Trained, config_of, deviation, own_logits, train
from tests.convert.test_deepseek import EXPERTS, YARN
from tests.convert.test_deepseek import config_of as deepseek_of
from tests.convert.test_hugging_face import EXPERT_KEYS, logits
from tests.helpers import bodies, megatron_runs
from tests.helpers.commands import next_commands
from tests.helpers.configs import MIXED, make
from tests.helpers.distributed import Ranks
from tests.helpers.installed import needs_training

pytestmark = pytest.mark.usefixtures("one_thread")
ITSELF = {
    "parametrization.depth": "none",
    **{f"hparams.{name}_multiplier": 1.0 for name in ("attention", "output", "embedding", "residual")},
}


def config_for(one: Trained, folder: Path, **keys: Any) -> Config:
    """The source's model with itself as base, and a run's folder of its own; or what the keys say."""
    config = one.source.run.config
    own = {name: getattr(config.model, name) for name in config.base.width.sizes}
    data = {"run.dir": str(folder), "data.dir": str(Path(config.run.dir) / "data")}
    return derive(config, {**data, **(keys or {"base": own, "model.mtp_num_layers": None, **ITSELF})})


@pytest.mark.parametrize("name", ["llama, untied", pytest.param("gpt3, tied", marks=pytest.mark.slow)])
def test_export_import_export_is_the_same(trained: Callable[[str], Trained], name: str, tmp_path: Path) -> None:
    round_trip(trained(name), tmp_path)


def round_trip(one: Trained, tmp_path: Path) -> None:
    """With the model as its own base to the last bit, and its logits are transformers'."""
    export_hugging_face(one.source, tmp_path / "first", max_shard_size=100_000)
    said = import_checkpoint(tmp_path / "first", config_for(one, tmp_path / "imported"))
    assert (said["step"], said["optimizer"]) == (0, False)
    source = open_source(tmp_path / "imported")
    export_hugging_face(source, tmp_path / "second", max_shard_size=100_000)
    files = sorted(path.name for path in (tmp_path / "first").glob("*.safetensors*"))
    assert len(files) > 3
    for file in files:
        assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "second" / file).read_bytes(), file
    assert deviation(own_logits(source), logits(tmp_path / "first")) < 1e-5


def test_rows_that_pad_the_source_come_along(trained: Callable[[str], Trained], tmp_path: Path) -> None:
    """Published models have more rows than their tokenizers have entries: 375 entries, 400 rows.

    They take part in the softmax, so the loss of a token is that of transformers too.
    """
    one, folder = trained("llama, untied"), tmp_path / "padded"
    export_hugging_face(one.source, folder)
    (folder / SUMS).unlink()
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert len(tensors[name]) == 375
        more = torch.randn(25, tensors[name].shape[1], generator=torch.Generator().manual_seed(1))
        tensors[name] = torch.cat([tensors[name], more])
    save_file(tensors, file, {"format": "pt"})
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**said, "vocab_size": 400}))
    config = config_for(one, tmp_path / "imported")
    sentence = r"vocab_size is 400, .* has 375 entries, padded to 384; .* model.make_vocab_size_divisible_by=400"
    with pytest.raises(UserError, match=sentence):
        import_checkpoint(folder, config)
    config = derive(config, {"model.make_vocab_size_divisible_by": 400})
    deviation_found = import_checkpoint(folder, config)["deviation"]
    assert deviation_found is not None
    assert deviation_found < 1e-5
    weights = open_source(tmp_path / "imported").weights
    for ours, theirs in (
        ("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
        ("output_layer.weight", "lm_head.weight"),
    ):
        assert torch.equal(weights.read(ours), tensors[theirs])


def test_the_gelu_of_gpt_2(trained: Callable[[str], Trained], tmp_path: Path) -> None:
    """The tanh approximation, which this project's runs on GPUs have: logits are transformers', and export says so."""
    one, folder = trained("gpt3, tied"), tmp_path / "new"
    export_hugging_face(one.source, folder)
    (folder / SUMS).unlink()
    said = json.loads((folder / "config.json").read_text())
    assert said["activation_function"] == "gelu"
    (folder / "config.json").write_text(json.dumps({**said, "activation_function": "gelu_new"}))
    lines: list[str] = []
    deviation_found = import_checkpoint(folder, config_for(one, tmp_path / "imported"), lines.append)["deviation"]
    assert deviation_found is not None
    assert deviation_found < 1e-5
    assert [line for line in lines if line.startswith("gelu_new is the tanh approximation")]
    assert deviation(own_logits(one.source), logits(folder)) > 1e-5  # the exact GELU
    export_hugging_face(open_source(tmp_path / "imported"), tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["activation_function"] == "gelu_new"


llama_of = functools.partial(config_of, "llama", False)
# Name: config, keys, and a tensor that only this architecture has.
FAMILIES: dict[str, tuple[Callable[..., Config], dict[str, Any], str]] = {
    "Qwen3": (llama_of, {"model__qk_layernorm": True}, "model.layers.1.self_attn.q_norm.weight"),
    "Mixtral": (llama_of, EXPERT_KEYS, "model.layers.1.block_sparse_moe.experts.3.w3.weight"),
    "DeepSeek-V3": (
        functools.partial(deepseek_of, EXPERTS),
        {"model__layernorm_epsilon": 1e-6, **YARN},
        "model.layers.1.mlp.gate.e_score_correction_bias",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_families(ranks: Ranks, name: str, tmp_path: Path) -> None:
    """The same of each, and a declared base; a source that lacks a tensor is refused by its name."""
    config, keys, missing = FAMILIES[name]
    upstream.prepare_process()
    source = open_source(train(ranks, tmp_path, config(**keys)))
    one = Trained(source, own_logits(source))
    round_trip(one, tmp_path)
    import_checkpoint(tmp_path / "first", config_for(one, tmp_path / "declared", **{"training.train_steps": 1}))
    again = open_source(tmp_path / "declared")
    assert again.parametrization.forward == source.parametrization.forward
    assert deviation(own_logits(again), one.logits) < 1e-5
    (tmp_path / "other").mkdir()
    export_hugging_face(source, tmp_path / "other" / "hf")
    weights = tmp_path / "other" / "hf" / "model.safetensors"
    save_file({key: tensor for key, tensor in load_file(weights).items() if key != missing}, weights)
    (weights.parent / SUMS).unlink()  # which would say that first
    with pytest.raises(UserError, match=f"{missing} is missing"):
        import_checkpoint(tmp_path / "other" / "hf", config_for(one, tmp_path / "refused"))


def test_a_declared_base(trained: Callable[[str], Trained], ranks: Ranks, tmp_path: Path) -> None:
    """Every multiplier divided out of the weights again; training begins from there."""
    one = trained("llama, untied")
    export_hugging_face(one.source, tmp_path / "hf")
    config = config_for(one, tmp_path / "run", **{"training.train_steps": 3, "training.lr_decay_steps": 3})
    import_checkpoint(tmp_path / "hf", config)
    source = open_source(tmp_path / "run")
    assert source.parametrization.forward == one.source.parametrization.forward
    assert deviation(own_logits(source), one.logits) < 1e-5
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config.model_dump()))
    ranks.run(1, bodies.train_file, path=tmp_path / "run.yaml")
    assert '"step": 3' in (tmp_path / "run" / "metrics.jsonl").read_text()
    audit = json.loads((tmp_path / "run" / "audit.json").read_text())
    assert audit["right"]
    assert not any("initial" in finding["quantity"] for finding in audit["findings"])


def test_what_to_type_next(
    trained: Callable[[str], Trained], ranks: Ranks, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The line that `import` prints, as a shell reads it, trains the run that was imported, not that of the file."""
    one = trained("llama, untied")
    export_hugging_face(one.source, tmp_path / "hf")
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config_for(one, tmp_path / "of the file").model_dump()))
    own = [f"run.dir={tmp_path / 'own run'}", "training.train_steps=3", "training.lr_decay_steps=3"]
    assert cli.run(["import", str(tmp_path / "hf"), str(path), *own]) == 0
    (words,) = next_commands(capfd.readouterr().out)
    ((status, out, err),) = ranks.run(1, bodies.command, arguments=words)
    assert status == 0, err
    assert f"resumed from {tmp_path / 'own run' / 'checkpoints' / 'step_00000000'} at step 0" in out
    assert '"step": 3' in (tmp_path / "own run" / "metrics.jsonl").read_text()
    assert not (tmp_path / "of the file").exists()


# --- megatron.training ---

MORE = 10


@pytest.mark.slow
@needs_training
def test_ten_more_steps_of_a_plain_run(ranks: Ranks, tmp_path: Path) -> None:
    """With the optimizer's state: the losses of the plain run itself. Without the moments they are others."""
    from tests.megatron_training.test_megatron_training import options, without

    upstream.prepare_process()
    keys: dict[str, Any] = {"parallel__engine": "megatron", "parallel__use_distributed_optimizer": False}
    of = make(MIXED, **keys, training__train_steps=4 + MORE, run__dir=str(tmp_path / "run"))
    own = {name: getattr(of.model, name) for name in of.base.sizes}
    of = derive(of, {"base": own, "training.checkpoint_interval": 0})
    words = without(options(of, tmp_path), "mup-base")
    told = ["--save", str(tmp_path / "plain"), "--save-interval", "4", "--log-interval", "1", "--num-workers", "0"]
    (plain,) = ranks.run(1, megatron_runs.train, words=[*words, *told], plainly=True)
    assert plain["status"] == 0, plain["said"]
    per_step = torch.tensor(plain["steps"]).view(4 + MORE, -1).mean(dim=1).tolist()
    said = import_checkpoint(tmp_path / "plain" / "iter_0000004", of)
    assert (said["step"], said["optimizer"]) == (4, True)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(of.model_dump()))
    ranks.run(1, bodies.train_file, path=tmp_path / "run.yaml")
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert set(losses) == set(range(5, 5 + MORE))
    for step, loss in losses.items():
        assert loss == pytest.approx(per_step[step - 1], rel=1e-6)


def test_data_of_another_run_are_not_replaced(
    trained: Callable[[str], Trained], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a data.dir that is shared, as seen from another folder, and other settings of data."""
    one = trained("llama, untied")
    export_hugging_face(one.source, tmp_path / "first")
    data = tmp_path / "data"
    shutil.copytree(data_directory(one.source.run.config), data)
    before = {path.name: path.read_bytes() for path in data.iterdir() if path.is_file() and path.name[0] != "."}
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    same = derive(config_for(one, tmp_path / "imported"), {"data.dir": "../data"})
    with pytest.raises(UserError, match=r"data\.dir: \.\./data holds data that were prepared with other settings"):
        import_checkpoint(tmp_path / "first", derive(same, {"data.tokenizer.vocab_size": 374}))
    assert {name: (data / name).read_bytes() for name in before} == before
    assert import_checkpoint(tmp_path / "first", same)["step"] == 0
