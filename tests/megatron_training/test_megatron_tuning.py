"""`--mup-write-config`: a Megatron command line becomes a config, whose tuned record is of its family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from mup_megatron.config import load_config
from mup_megatron.engines.setup import megatron
from mup_megatron.megatron_training.tuning_config import write_tuning_config
from mup_megatron.model.build import parametrize
from mup_megatron.parallel.layout import resolve_layout
from mup_megatron.tuning.family import digested
from mup_megatron.util.errors import UserError
from tests.helpers.commands import next_commands, run
from tests.helpers.installed import needs_training
from tests.helpers.megatron_runs import SCRIPT
from tests.megatron_training.test_megatron_elsewhere import elsewhere, recipe
from tests.megatron_training.test_megatron_recipes import PUBLISHED
from tests.megatron_training.test_megatron_training import STEPS, config, options, without

pytestmark = needs_training
COMMON = "--data-path data/text_document --vocab-size 1000"
# Options of the published command lines that no config says, by hand.
UNSAID = {
    "gpt_oss_20b": "--moe-z-loss-coeff 0.001, --window-size 127,0, --window-attn-skip-freq 2",
    "llama3_8b": "--fp8-format hybrid",
    "gpt3_175b": "",
}


def written(name: str, folder: Path) -> tuple[Any, Any, Path]:
    """What a published command line was read as, its rules, and the file."""
    words, base = recipe(name)
    read, parametrization, _, _ = elsewhere(words, folder, base, common=COMMON)
    path = folder / "tune.yaml"
    write_tuning_config(path, read, ())
    return read, parametrization, path


@pytest.mark.parametrize("name", PUBLISHED)
def test_it_is_the_command_line(name: str, tmp_path: Path) -> None:
    """Read again, it has the family, the same number in every row of the table, and the base's sizes for its proxy."""
    read, parametrization, path = written(name, tmp_path)
    again = load_config(path)
    assert digested(again) == digested(read)
    assert parametrize(again, 1000).tensors == parametrization.tensors
    assert again.training == read.training
    _, base = recipe(name)
    assert {size: getattr(again.proxy_model, size) for size in base} == base
    assert set(again.tuning.search) == {
        *("lr", "init_method_std", "embedding_multiplier", "attention_multiplier", "output_multiplier")
    }


def test_numbers_by_hand(tmp_path: Path) -> None:
    """Llama 3 8B from a quarter of its width: 1000 steps of 512 sequences; tuned on as many steps of 256."""
    _, _, path = written("llama3_8b", tmp_path)
    again = load_config(path)
    assert (again.model.hidden_size, again.base.hidden_size, again.proxy_model.hidden_size) == (4096, 1024, 1024)
    assert (again.model.num_query_groups, again.proxy_model.num_query_groups) == (8, 2)
    assert (again.training.train_steps, again.training.global_batch_size) == (1000, 512)
    assert (again.tuning.train_steps, again.tuning.global_batch_size, again.tuning.micro_batch_size) == (1000, 256, 8)
    assert again.optimizer.decoupled_lr == 6e-4
    assert again.data.data_path == ["data/text_document"]


@pytest.mark.parametrize(("name", "unsaid"), UNSAID.items())
def test_what_it_cannot_say_is_said(name: str, unsaid: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Through the option itself, which explains and leaves."""
    from mup_megatron.megatron_training.elsewhere import show

    words, base = recipe(name)
    path = tmp_path / "tune.yaml"
    found, settings = elsewhere(f"{words} --mup-write-config {path}", tmp_path, base, common=COMMON, settled=True)
    show(*found, settings=settings)
    heading = " ".join(line.removeprefix("# ") for line in path.read_text().splitlines() if line.startswith("#"))
    assert f"to tune its proxy: mup-megatron tune {path} Then start the run with --mup-hparams" in heading
    assert ("for which a config has no key: " in heading) == bool(unsaid)
    assert f"{unsaid}" in heading
    assert f"next: mup-megatron tune {path}" in capsys.readouterr().out.replace("\n", "")


@pytest.mark.parametrize(
    ("common", "base", "there", "said"),
    [
        ("--mock-data --vocab-size 1000", {"hidden_size": 64}, False, "there are no data to tune on; expected --data"),
        (COMMON, {"hidden_size": 64}, True, "is there already; expected a new file"),
    ],
)
def test_bad_input(common: str, base: dict[str, int], there: bool, said: str, tmp_path: Path) -> None:
    words = "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16"
    words += " --micro-batch-size 1 --train-iters 8 --lr 1e-2"
    read, *_ = elsewhere(words, tmp_path, base, common=common)
    path = tmp_path / "tune.yaml"
    if there:
        path.write_text("mine")
    with pytest.raises(UserError) as error:
        write_tuning_config(path, read, ())
    assert str(error.value).startswith(f"--mup-write-config {path}: {said}")
    assert not there or path.read_text() == "mine"


SMALL = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 1 --train-iters 8 --lr 1e-2"
)


@pytest.mark.parametrize(
    ("options", "expected"),
    [("", None), ("--optimizer muon", False), ("--optimizer lion", False), ("--optimizer sgd", False)],
)
def test_whose_distributed_optimizer(options: str, expected: bool | None, tmp_path: Path) -> None:
    """megatron-core's is AdamW's alone; `tune` refuses it for others."""
    read, *_ = elsewhere(f"{SMALL} {options}", tmp_path, {"hidden_size": 64}, common=COMMON)
    path = tmp_path / "tune.yaml"
    write_tuning_config(path, read, ())
    written = yaml.safe_load(path.read_text())["parallel"]
    assert written.get("use_distributed_optimizer") is expected
    megatron.refuse(load_config(path), resolve_layout(load_config(path), 1))


@pytest.mark.parametrize(("split", "expected"), [("100,0,0", "98,2,0"), ("90,10,0", "90,10,0"), ("1", "98,2,0")])
def test_something_to_validate_on(split: str, expected: str, tmp_path: Path) -> None:
    """Trials are compared by it; a split that keeps nothing for it is replaced, and the file says so."""
    read, *_ = elsewhere(f"{SMALL} --split {split}", tmp_path, {"hidden_size": 64}, common=COMMON)
    path = tmp_path / "tune.yaml"
    write_tuning_config(path, read, ())
    assert load_config(path).data.split == expected
    said = " ".join(line.removeprefix("# ") for line in path.read_text().splitlines() if line.startswith("#"))
    assert (f"The run keeps nothing to validate on (--split {split})" in said) == (split != expected)


def test_for_trials_that_are_runs(tmp_path: Path) -> None:
    """With a command line: it, the run's own layout, batch and split, and mock data, which a script may have."""
    options = "--tensor-model-parallel-size 2 --sequence-parallel --split 100,0,0 --global-batch-size 8"
    mock = "--mock-data --vocab-size 1000 --tokenizer-type NullTokenizer"
    read, *_ = elsewhere(f"{SMALL} {options}", tmp_path, {"hidden_size": 64}, common=mock)
    path = tmp_path / "new" / "tune.yaml"
    write_tuning_config(path, read, ("--window-size 8,0",), ["torchrun", "p.py", "--lr", "1"])
    found = load_config(path)
    assert found.tuning.command == ["torchrun", "p.py", "--lr", "1"]
    assert (found.parallel.tensor_model_parallel_size, found.parallel.sequence_parallel) == (2, True)
    assert (found.tuning.global_batch_size, found.training.global_batch_size, found.data.split) == (None, 8, "100,0,0")
    assert "--window-size" not in path.read_text()  # the trials have it


def test_a_file_of_base_shapes_has_no_proxy(tmp_path: Path) -> None:
    read, *_ = elsewhere(
        "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
        "--micro-batch-size 1 --train-iters 8 --lr 1e-2",
        tmp_path,
        {"hidden_size": 64},
        common=COMMON,
    )
    base = read.base.model_copy(update={"file": "x.bsh"})
    with pytest.raises(UserError, match=r"the base is x\.bsh, whose sizes have no names; expected base sizes"):
        write_tuning_config(tmp_path / "tune.yaml", read.model_copy(update={"base": base}), ())


@pytest.mark.slow
def test_from_command_line_to_tuned_run(tmp_path: Path) -> None:
    """The config is written, its proxy tuned, and the same command line trains with the record; another is refused."""
    words = without(options(config(data__split="80,20,0"), tmp_path), "mup-base")
    written, record = tmp_path / "tune.yaml", tmp_path / "tuned.json"
    base = tmp_path / "sizes.yaml"
    base.write_text((tmp_path / "base.yaml").read_text())
    command = ["python", "-m", "mup_megatron", "run", str(SCRIPT)]
    wrote = run(*command, *words, "--mup-base", base, "--mup-write-config", written)
    assert wrote.returncode == 0, wrote.stderr[-3000:]
    settings = [f"run.dir={tmp_path / 'run'}", f"tuning.record={record}", "tuning.trials=2", "tuning.repeat_best=0"]
    settings += ["tuning.max_compute_share=10", "tuning.global_batch_size=8", "tuning.micro_batch_size=4"]
    (following,) = next_commands(wrote.stdout)
    assert following == ["tune", str(written)]
    tuned = run("python", "-m", "mup_megatron", *following, *settings)
    assert tuned.returncode == 0, tuned.stderr[-3000:]
    values = json.loads(record.read_text())["values"]
    told = without(words, "lr", "min-lr", "init-method-std", "weight-decay")
    trained = run(*command, *told, "--log-interval", "1", "--mup-base", base, "--mup-hparams", record)
    assert trained.returncode == 0, trained.stderr[-3000:]
    assert trained.stdout.count("lm loss: ") == STEPS
    explained = run(*command, *told, "--mup-base", base, "--mup-hparams", record, "--mup-explain")
    assert f"base: lr {values['lr']:.6g}, init std {values['init_method_std']:.6g}" in explained.stdout
    deeper = run(
        *command, *without(told, "num-layers"), "--num-layers", "3", "--mup-base", base, "--mup-hparams", record
    )
    assert deeper.returncode == 2
    assert "model.num_layers: 2 in the record, 3 in the config" in deeper.stderr
