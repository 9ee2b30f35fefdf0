"""What a run of megatron.training in µP refuses of a script's model and of its checkpoints."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from mup_megatron.megatron_training.family import check_family
from mup_megatron.megatron_training.megatron_run import MegatronRun
from mup_megatron.megatron_training.models import KEY_PREFIX
from mup_megatron.megatron_training.options import Settings
from mup_megatron.megatron_training.script import run_script
from mup_megatron.model.as_built.chunks import BuiltModel
from mup_megatron.model.build import parametrize
from mup_megatron.parallel import upstream
from mup_megatron.parallel.layout import resolve_layout
from mup_megatron.tuning.record import write_record
from mup_megatron.tuning.recording import make_record
from mup_megatron.tuning.space import values_of
from mup_megatron.util.errors import UserError
from tests.helpers.configs import MIXED, make
from tests.helpers.installed import HAS_TRAINING, needs_training
from tests.helpers.records import BUDGET, study_of

SETTINGS = Settings(base={}, parametrization={}, hparams={}, record=None, explain=False, allowed=(), sizes={})


def run_of(**args: Any) -> MegatronRun:
    data = dict.fromkeys(("data_path", "split", "seq_length", "mock_data"))
    options = {"transformer_impl": "local", "optimizer": "adam", "use_torch_fsdp2": False}
    return MegatronRun(Namespace(**{**options, **data, **args}), SETTINGS)


def test_no_model_was_built() -> None:
    with pytest.raises(UserError, match="the script built no GPTModel before it was asked for, nor a Hyb"):
        _ = run_of().parametrization


def test_a_model_that_is_no_gptmodel() -> None:
    with pytest.raises(UserError, match="the script trains a Linear; mup-megatron run knows megatron-core's GPTModel"):
        run_of().overrides([torch.nn.Linear(2, 2)], "adam")
    wrapped = torch.nn.Module()
    wrapped.module = torch.nn.Embedding(2, 2)
    with pytest.raises(UserError, match="the script trains a Embedding"):
        run_of().overrides([wrapped], "adam")


def test_an_optimizer_that_the_options_do_not_name() -> None:
    """Rates are worked out from the options, before the script makes its OptimizerConfig."""
    with pytest.raises(UserError, match="OptimizerConfig has the optimizer sgd, Megatron's options adam; rates depend"):
        run_of().overrides([torch.nn.Linear(2, 2)], "sgd")


def test_other_norms_in_another_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first chunk has left out none."""
    upstream.prepare_process()
    config = make(MIXED)
    run = run_of()
    run._made = (config, parametrize(config, 384), resolve_layout(config, 1))
    run._built = BuiltModel(config)
    # What megatron-core's specs ask of the pipeline, without process groups.
    monkeypatch.setattr(parallel_state, "_MPU_PIPELINE_MODEL_PARALLEL_RANK", 0)
    monkeypatch.setattr(parallel_state, "_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", 1)
    transformer = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4)
    spec = get_gpt_decoder_block_spec(transformer, use_transformer_engine=False)
    spec.layer_norm = None
    said = r"layer specs differ from one virtual stage to another \(they leave out other norms\); expected the same"
    with pytest.raises(UserError, match=said):
        run.build(GPTModel.__init__, GPTModel.__new__(GPTModel), transformer, spec, 384, 32, vp_stage=1)


def test_a_record_of_another_family(tmp_path: Path) -> None:
    """Of a tokenizer that tuning trained itself the record knows no path, and none is asked for."""
    upstream.prepare_process()
    config = make(MIXED)
    record = make_record(
        parametrize(config, 384), resolve_layout(config, 1), values_of(config), study=study_of(), budget=BUDGET
    )
    write_record(tmp_path / "transfer.json", record)
    check_family(tmp_path / "transfer.json", make(MIXED, data__tokenizer__path="trained.model"))
    with pytest.raises(
        UserError, match=r"belongs to another family .*model\.kv_channels: 8 in the record, 16 in the c"
    ):
        check_family(tmp_path / "transfer.json", make(MIXED, model__kv_channels=16))


def test_a_record_of_a_vocabulary_padded_otherwise(tmp_path: Path) -> None:
    """375 entries are 384 rows by multiples of 128 and of 64, and 512 by multiples of 256."""
    upstream.prepare_process()
    config = make(MIXED)
    record = make_record(
        parametrize(config, 384), resolve_layout(config, 1), values_of(config), study=study_of(), budget=BUDGET
    )
    write_record(tmp_path / "transfer.json", record)
    check_family(tmp_path / "transfer.json", make(MIXED, model__make_vocab_size_divisible_by=64))
    with pytest.raises(UserError, match=r"model\.make_vocab_size_divisible_by: 128 in the record, 256 in the config"):
        check_family(tmp_path / "transfer.json", make(MIXED, model__make_vocab_size_divisible_by=256))


@needs_training
@pytest.mark.parametrize(
    ("record", "said"),
    [
        (None, r"iter_0000003: has no mup\.json, so it was not written in µP; expected a checkpoint that"),
        ({"format": 2, "step": 3}, r"mup\.json: config is missing"),
        (
            {"format": 2, "step": 3, "config": {}, "base_shapes": {}, "data_digest": ""},
            rf"iter_0000003: names tensors without '{KEY_PREFIX}', as earlier versions",
        ),
    ],
)
@pytest.mark.parametrize("option", ["load", "pretrained_checkpoint"])
def test_checkpoints_that_are_not_this_runs(option: str, record: Any, said: str, tmp_path: Path) -> None:
    (tmp_path / "iter_0000003").mkdir()
    if record is not None:
        (tmp_path / "iter_0000003" / "mup.json").write_text(json.dumps(record))
    named = dict.fromkeys(("load", "pretrained_checkpoint"))
    run = run_of(**{**named, option: str(tmp_path)}, ckpt_step=None)
    run.check_checkpoint()  # without Megatron's tracker there is no checkpoint, and the run starts anew
    if option == "load":  # unless a step is named, which upstream loads without a tracker
        with pytest.raises(UserError, match=said):
            run_of(**{**named, option: str(tmp_path)}, ckpt_step=3).check_checkpoint()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    with pytest.raises(UserError, match=said):
        run.check_checkpoint()


@needs_training
def test_the_checkpoint_that_upstream_chooses(tmp_path: Path) -> None:
    """`load` where it holds one, else `pretrained_checkpoint`, whose step may be named too."""
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    for folder, step in ((mine, 3), (theirs, 5)):
        (folder / f"iter_000000{step}").mkdir(parents=True)
        (folder / "latest_checkpointed_iteration.txt").write_text(str(step))
    both: dict[str, Any] = {"load": str(mine), "pretrained_checkpoint": str(theirs)}
    with pytest.raises(UserError, match=r"mine/iter_0000003: has no mup\.json"):
        run_of(**both, ckpt_step=None).check_checkpoint()
    (mine / "latest_checkpointed_iteration.txt").unlink()
    for named in (None, 5):
        with pytest.raises(UserError, match=r"theirs/iter_0000005: has no mup\.json"):
            run_of(**both, ckpt_step=named).check_checkpoint()


@pytest.mark.skipif(HAS_TRAINING, reason="megatron.training is installed")
def test_without_megatron_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.write_text("import megatron.training")
    monkeypatch.setattr("sys.argv", ["mup-megatron"])
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"script\.py: megatron\.training is not installed, nor beside the script"):
        run_script([str(script), "--mup-base", "base.yaml"])
