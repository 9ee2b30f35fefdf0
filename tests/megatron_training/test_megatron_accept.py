"""`--mup-accept`: an option that no table has is taken where the user names it, recorded, and told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mup_megatron.megatron_training.field_table import FIELDS
from mup_megatron.megatron_training.option_check import check_config, check_options, refused_in_a_run
from mup_megatron.megatron_training.option_table import OPTIONS
from mup_megatron.megatron_training.options import known, read_options
from mup_megatron.parallel.ranks import Rank
from mup_megatron.util.errors import UserError
from tests.helpers import megatron_runs
from tests.helpers.distributed import Ranks
from tests.megatron_training.test_megatron_elsewhere import elsewhere
from tests.megatron_training.test_megatron_options import needs_training, parsed
from tests.megatron_training.test_megatron_table import LOCAL, transformer_config

pytestmark = needs_training

# In no table, as upstream's next option will be; the real one of the same name changes no value and no loss.
NOVEL = "log-throughput"
TOLD = "accepted by name, without knowing what it does to the rules: "


@pytest.fixture
def novel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(OPTIONS, NOVEL)


def read(folder: Path, *words: str) -> Any:
    (folder / "base.yaml").write_text("hidden_size: 64\n")
    args = parsed(*LOCAL, "--lr", "1", "--mup-base", str(folder / "base.yaml"), *words)
    return args, read_options(args)


@pytest.mark.usefixtures("novel")
@pytest.mark.parametrize("name", [NOVEL, f"--{NOVEL}", NOVEL.replace("-", "_")])
def test_an_option_that_no_table_has(name: str, tmp_path: Path) -> None:
    """Refused with the way out in the sentence, and taken under that name; one that is not given is not told."""
    args, settings = read(tmp_path, f"--{NOVEL}")
    with pytest.raises(UserError) as problem:
        check_options(args, {}, known())
    assert str(problem.value) == (
        f"--{NOVEL}: not under µP here (mup-megatron does not know what it does to the rules); expected none, or "
        f"--mup-accept {NOVEL} where you know that it changes none of them"
    )
    assert settings.accepted == ()
    args, settings = read(tmp_path, f"--{NOVEL}", f"--mup-accept={name}")
    check_options(args, {}, known())
    assert refused_in_a_run(args, {}, known()) == []
    assert settings.accepted == (f"--{NOVEL}",)


def test_a_field_that_no_option_says(tmp_path: Path) -> None:
    assert "tp_only_amax_red" not in FIELDS
    config = transformer_config(tp_only_amax_red=True)
    read(tmp_path)
    with pytest.raises(UserError, match=r"or --mup-accept tp_only_amax_red where you know"):
        check_config(config, known())
    _, settings = read(tmp_path, "--mup-accept", "tp_only_amax_red")
    check_config(config, known())
    assert settings.accepted == ("tp_only_amax_red",)


def test_what_is_known_is_not_silenced(tmp_path: Path) -> None:
    """An option or field that a table refuses stays refused; one that it takes needs no acceptance, and has none."""
    for name in ("use-kitchen-attention", "--use-mup", "softmax_scale"):
        with pytest.raises(UserError) as problem:
            read(tmp_path, f"--mup-accept={name}")
        assert str(problem.value).startswith(f"--mup-accept {name}: it is known what this does, and it is refused (")
    with pytest.raises(UserError, match=r"^--mup-accept no-such: this Megatron has no such option, and its configs"):
        read(tmp_path, "--mup-accept", "no-such")
    args, settings = read(tmp_path, "--mup-accept", "moe-grouped-gemm", "--moe-grouped-gemm")
    assert settings.accepted == ()
    with pytest.raises(UserError, match="--moe-grouped-gemm: computes on CUDA alone"):
        check_options(args, {}, known())


@pytest.mark.usefixtures("novel")
def test_explain_and_the_config_for_tuning_tell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a machine that cannot run the command line; the proxy's file says that it trains without the option."""
    from mup_megatron.megatron_training.elsewhere import show

    words = f"--hidden-size 128 --num-attention-heads 4 --{NOVEL} --mup-accept {NOVEL}"
    path = tmp_path / "tune.yaml"
    common = "--num-layers 2 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 64 "
    common += "--train-iters 20 --lr 1e-3 --data-path data/text_document --vocab-size 1000"
    found, settings = elsewhere(f"{words} --mup-write-config {path}", tmp_path, common=common, settled=True)
    show(*found, settings=settings)
    assert f"{TOLD}--{NOVEL}" in capsys.readouterr().out.replace("\n", "")
    assert f"for which a config has no key: --{NOVEL}." in path.read_text().replace("\n# ", " ")


def without_its_rule(rank: Rank, words: list[str]) -> dict[str, Any]:
    """A run where the table does not know `NOVEL`."""
    rule = OPTIONS.pop(NOVEL)
    try:
        return megatron_runs.train(rank, words=words)
    finally:
        OPTIONS[NOVEL] = rule


def test_a_run_records_it(ranks: Ranks, tmp_path: Path) -> None:
    """In mup.json of the checkpoint, and on stderr; without the acceptance the run is refused."""
    saved = ["--save", str(tmp_path / "saved"), "--save-interval", "2"]
    words = [*megatron_runs.words(tmp_path), f"--{NOVEL}", *saved]
    (refused,) = ranks.run(1, without_its_rule, words=words)
    assert refused["status"] == 2
    assert f"--{NOVEL}: not under µP here (mup-megatron does not know" in refused["said"]
    (taken,) = ranks.run(1, without_its_rule, words=[*words, "--mup-accept", NOVEL])
    assert taken["status"] == 0, taken["said"]
    assert f"mup-megatron: {TOLD}--{NOVEL}" in taken["said"]
    record = json.loads((tmp_path / "saved" / "iter_0000002" / "mup.json").read_text())
    assert record["accepted"] == [f"--{NOVEL}"]
