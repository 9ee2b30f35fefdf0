"""What plain Megatron says of a checkpoint in µP, beside what docs/megatron-details.md says that it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers import megatron_runs
from tests.helpers.distributed import RankError, Ranks
from tests.helpers.installed import needs_training
from tests.helpers.links import ROOT

pytestmark = needs_training
SIZES = {
    "grown": "hidden_size: 32\nnum_attention_heads: 2\n",
    "at its base": "hidden_size: 64\nnum_attention_heads: 4\n",
}
_PAGE = ROOT / "docs" / "megatron-details.md"
_PART = "\n## Checkpoints and plain Megatron\n"


def ways() -> list[tuple[str, str, str]]:
    """Of each way to load in the table: the checkpoint's name, the options, and what is said of the message."""
    part = _PAGE.read_text(encoding="utf-8").partition(_PART)[2].partition("\n## ")[0]
    found: list[tuple[str, str, str]] = []
    for line in part.splitlines():
        if line.startswith("| `--"):
            left, said = line.strip("| ").split(" | ")
            said = found[-1][2] if said == "the same" else said
            name = next((name for name in SIZES if name in left), "grown")
            found += [(name, options, said) for options in quoted(left)]
    return found


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of two runs in µP, in folders named as in `SIZES`; a third one's in the format `torch`."""
    folder = tmp_path_factory.mktemp("saved")
    runs = {**{name: (base, []) for name, base in SIZES.items()}, "torch": (SIZES["grown"], ["--ckpt-format", "torch"])}
    for name, (base, extra) in runs.items():
        words = megatron_runs.words(folder, "--save", str(folder / name), "--save-interval", "2", *extra, base=base)
        (found,) = ranks.run(1, megatron_runs.train, words=words)
        assert found["status"] == 0, found["said"]
    return folder


def plain(ranks: Ranks, folder: Path, *extra: str) -> list[float]:
    (found,) = megatron_runs.run(ranks, folder, *extra, train_iters=3, plainly=True)
    return found["losses"]


def test_the_table_has_every_way_to_load() -> None:
    options = [options for _, options, _ in ways()]
    assert len(options) == 8
    assert {"--load", "--load --no-load-optim", "--load --finetune", "--pretrained-checkpoint"} < {*options}


@pytest.mark.parametrize(("name", "options", "said"), ways())
def test_its_message_is_the_docs(name: str, options: str, said: str, ranks: Ranks, saved: Path, tmp_path: Path) -> None:
    """Every quoted part of the sentence is in what the real load raises."""
    option, *more = options.split()
    with pytest.raises(RankError) as raised:
        plain(ranks, tmp_path, option, str(saved / name), *more)
    assert all(part in str(raised.value) for part in quoted(said)), (quoted(said), str(raised.value)[-2000:])


def test_the_format_that_has_no_names(ranks: Ranks, saved: Path, tmp_path: Path) -> None:
    """The control: without names of their own the weights are taken, as the page says, and the run goes on."""
    part = _PAGE.read_text(encoding="utf-8").partition(_PART)[2].partition("\n## ")[0]
    assert "It does not stop with `--ckpt-format torch`" in part
    assert len(plain(ranks, tmp_path, "--load", str(saved / "torch"), "--ckpt-format", "torch", "--finetune")) == 3


def test_another_rate_on_resume(ranks: Ranks, saved: Path) -> None:
    """megatron-core tells the groups of an optimizer apart by their rates, and finds none of another: one sentence."""
    words = ["--load", str(saved / "grown"), "--mup-allow-change", "hparams.lr"]
    words += ["--mup-allow-change", "training.lr_decay_steps"]
    for more, status in ((), 2), (("--no-load-optim",), 0):
        (found,) = megatron_runs.run(ranks, saved, *words, *more, lr="0.02", train_iters=3)
        assert found["status"] == status, found["said"]
        assert len(found["losses"]) == (not status)
        asked = "error: the checkpoint's optimizer has groups of other rates or decays, which megatron-core does not"
        assert (asked in found["said"]) == bool(status)
        assert "Traceback" not in found["said"]
