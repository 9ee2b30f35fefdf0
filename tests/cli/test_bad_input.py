"""What a user, or somebody who means ill, may type or leave about: one sentence, status 2, nothing lost or run."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from mup_megatron import cli
from mup_megatron.cli.common import console
from mup_megatron.config import load_config
from mup_megatron.data.prepare import prepare
from mup_megatron.model.build import parametrize
from mup_megatron.parallel import upstream
from mup_megatron.parallel.layout import resolve_layout
from mup_megatron.patches import trees
from mup_megatron.report.page import write_page
from mup_megatron.report.summary import summarize
from mup_megatron.slurm import submit
from mup_megatron.tuning.record import write_record
from mup_megatron.tuning.recording import make_record
from mup_megatron.tuning.space import values_of
from mup_megatron.util.errors import UserError, shown
from mup_megatron.util.files import parse_yaml, write_output, write_whole
from tests.helpers.configs import MIXED, MLA, make
from tests.helpers.records import BUDGET, study_of
from tests.test_damaged_files import data_config


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    config = make(MIXED, run__dir=str(tmp_path / "run"))
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config.model_dump()))
    return path


def refused(capfd: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The one sentence of a command that ends with status 2."""
    assert cli.run([str(argument) for argument in arguments]) == 2
    (said,) = capfd.readouterr().err.splitlines()
    assert said.startswith("mup-megatron: error: ")
    assert len(said) < 2100
    assert said.isprintable()
    return said


def test_what_python_calls_things_is_not_said(config_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert ": model: expected keys and values, found null" in refused(capfd, "explain", config_file, "model=")
    assert ": run.seed: expected a whole number, found true" in refused(capfd, "explain", config_file, "run.seed=true")
    said = refused(capfd, "export", config_file, "--to", "onnx")
    assert "'--to': 'onnx' is not one of 'hf', 'safetensors', 'megatron'" in said
    empty = config_file.with_name("empty.yaml")
    empty.touch()
    assert "expected sections such as run:, model: and training:, found null" in refused(capfd, "explain", empty)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--defaults", "--html", "x"], "--defaults: is shown instead of the table; expected no --html beside it"),
        (["--notebook", "x", "--band"], "--notebook: is shown instead of the table; expected no --band beside it"),
        (
            ["--html", "x", "--notebook", "y", "--band", "--save-base-shapes", "z"],
            "--html: is shown instead of the table; expected no --band or --save-base-shapes beside it",
        ),
    ],
)
def test_what_explain_shows_instead_is_alone(
    options: list[str], said: str, config_file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(capfd, "explain", config_file, *options)


# --- values ---

VALUES = {
    "run.seed=4294967296": "run.seed: expected a number <= 2147483647, found 4294967296",
    "model.hidden_size=4611686018427387904": "model.hidden_size: expected a number <= 16777216",
    "hparams.init_method_std=1e300": "hparams.init_method_std: expected a number <= 1e+30",
    "hparams.lr=.nan": "hparams.lr: expected a finite number",
    "training={global_batch_size: 8, micro_batch_size: 4, seq_length: 32, train_steps: 20, "
    "recompute_granularity: full, recompute_method: uniform}": "training.recompute_num_layers: missing",
    "model.num_layers=1000000": "model.num_layers: expected a number <= 10000, found 1000000",
    "model.mtp_num_layers=1000": "model.mtp_num_layers: expected a number <= 64",
    'run.dir="a\\0b"': "run.dir: expected text without control characters, found 'a\\x00b'",
    'data.dir="a\\0b"': "data.dir: expected text without control characters",
    'base.file="a\\0b"': "base.file: expected text without control characters",
    'data.tokenizer.path="a\\0b"': "data.tokenizer.path: expected text without control characters",
    'run.name="a\\nb"': "run.name: expected text without control characters, found 'a\\nb'",
    'run.name="\\e[31mred"': "run.name: expected text without control characters, found '\\x1b[31mred'",
    "data.files=[" + "1," * 1000 + "]": "data.files",
    "run.dir=[" + '"\\e[31m",' * 1000 + "]": "run.dir: expected text, found ['\\x1b[31m', '\\x1b[31m'",
    "model.moe_layer_freq=[" + "7," * 1000 + "]": "model.moe_layer_freq",
    "run.dir=" + "x" * 5000 + "\x1b": "",
    "training.lr_milestones=[" + "3," * 1000 + "]": "training.lr_milestones",
}


def test_what_megatron_core_cannot_build() -> None:
    upstream.prepare_process()
    config = make(MLA, "llama", model__rope_type="yarn", model__rotary_base=1)
    with pytest.raises(UserError, match="model: megatron-core cannot build it: float division by zero"):
        parametrize(config, 375)


@pytest.mark.parametrize("override", VALUES, ids=[re.sub(r"\W+", " ", override)[:40] for override in VALUES])
def test_values(config_file: Path, capfd: pytest.CaptureFixture[str], override: str) -> None:
    began = time.monotonic()
    assert VALUES[override] in refused(capfd, "explain", config_file, override)
    assert time.monotonic() - began < 30  # it took minutes where everything was gone through


ANCHORS = "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in itertools.pairwise("abcdefghij")
)
BOMBS = {
    "values": f"a: &a [x]\n{ANCHORS}model: *j\n",
    "merges": "a: &a {x: 1}\n"
    + "".join(f"{n}: &{n} {{<<: [{', '.join([f'*{b}'] * 9)}]}}\n" for b, n in itertools.pairwise("abcdefghij"))
    + "model: *j\n",
    "itself": "a: &a [*a]\nmodel: *a\n",
}


@pytest.mark.parametrize("kind", BOMBS)
def test_anchors(tmp_path: Path, kind: str) -> None:
    """A few hundred bytes that stand for thousands of millions of values."""
    path = tmp_path / "bomb.yaml"
    path.write_text(BOMBS[kind])
    assert path.stat().st_size < 900
    began = time.monotonic()
    with pytest.raises(
        UserError, match=r"bomb\.yaml: not valid YAML: its anchors stand for more than 1,000,000 values"
    ):
        load_config(path)
    assert time.monotonic() - began < 10


@pytest.mark.skipif(not hasattr(yaml, "CSafeLoader"), reason="this PyYAML has no libyaml")
def test_a_list_of_200_000_layers(
    config_file: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyYAML alone reads twenty thousand values in a second; libyaml, which must have been asked, about all of them."""
    text = config_file.read_text()
    assert "  moe_layer_freq: 1\n" in text
    config_file.write_text(text.replace("moe_layer_freq: 1\n", f"moe_layer_freq: [{', '.join(['1'] * 200_000)}]\n"))
    monkeypatch.delattr(yaml.scanner.Scanner, "fetch_more_tokens")
    with pytest.raises(AttributeError, match="fetch_more_tokens"):
        yaml.load("[1]", yaml.SafeLoader)
    assert "model.moe_layer_freq: belongs to a mixture of experts" in refused(capfd, "explain", config_file)


def test_nesting(tmp_path: Path) -> None:
    """Libyaml's composer calls itself, without a limit: a file of brackets ended the process."""
    for depth, sentence in (
        (100, None),
        (101, "line 1: not valid YAML: lists and mappings are nested more than 100 d"),
    ):
        text = "[" * depth + "]" * depth
        if sentence is None:
            assert parse_yaml(text, "deep.yaml")
            continue
        for worse in (text, "[" * 1_000_000, "{a: " * 1_000_000):
            with pytest.raises(UserError, match=f"^deep\\.yaml: {sentence}eep$"):
                parse_yaml(worse, "deep.yaml")


def test_anchors_that_are_used_as_meant() -> None:
    text = "a: &a {x: 1, y: [1, 2]}\nb: *a\nc: [*a, *a]\n"
    same = {"x": 1, "y": [1, 2]}
    assert parse_yaml(text, "f") == {"a": same, "b": same, "c": [same, same]}


def test_a_value_in_a_sentence_is_short() -> None:
    deep: Any = "x"
    for _ in range(40):
        deep = [deep] * 9
    for value in (deep, "x" * 10**6, list(range(10**6)), {str(n): n for n in range(10**5)}, 2**100_000):
        assert len(shown(value)) < 500
    assert shown("\x1b[2J\n") == r"'\x1b[2J\n'"


# --- files that options name ---


def test_outputs(config_file: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Into a missing folder, onto a folder, over the config, through a link: nothing there is lost."""
    config = load_config(config_file)
    record = make_record(
        parametrize(config, 375), resolve_layout(config, 1), values_of(config), study=study_of(), budget=BUDGET
    )
    write_record(Path(config.record_path), record)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    before = config_file.read_bytes()
    for command, option in (("transfer", "--output"), ("explain", "--save-base-shapes")):
        for name, problem in {
            "missing/file": "No such file or directory",
            "folder": "is there already",
            "run.yaml": "is there already",
            "link": "is there already",
        }.items():
            said = refused(capfd, command, config_file, option, tmp_path / name)
            assert option in said
            assert str(tmp_path / name) in said
            assert problem in said
        assert f"{option}: . is there already" in refused(capfd, command, config_file, option, "")
        again = [command, str(config_file), option, str(tmp_path / f"{command}.out")]
        assert cli.run(again) == cli.run(again) == 0  # the same content may be written again
        capfd.readouterr()
    assert config_file.read_bytes() == before
    assert not (tmp_path / "elsewhere").exists()
    assert load_config(tmp_path / "transfer.out").hparams == config.hparams


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    victim, target = tmp_path / "victim", tmp_path / "config.yaml"
    victim.write_text("mine")
    (tmp_path / "config.yaml.partial").symlink_to(victim)
    write_whole(target, "a: 1\n")
    assert victim.read_text() == "mine"
    assert target.read_text() == "a: 1\n"
    assert not target.is_symlink()
    with pytest.raises(UserError, match=r"--output: .* is there already"):
        write_output(target, "a: 2\n", "--output")


# --- data ---


def test_the_null_tokenizer_on_text(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some words\n")
    config = data_config(tmp_path, files=[str(tmp_path / "text.txt")], tokenizer={"library": "null", "vocab_size": 9})
    with pytest.raises(UserError, match=r"data\.tokenizer: null cannot read document 0, which begins 'some words\\n'"):
        prepare(config)
    (tmp_path / "text.txt").write_text("3 77")
    with pytest.raises(UserError, match=r"data\.tokenizer: makes token 77 of document 0, and its vocabulary has 9"):
        prepare(config)


def test_a_cache_that_is_a_file(tmp_path: Path) -> None:
    from mup_megatron.data.batches import build_datasets

    (tmp_path / "text.txt").write_text("some words\n" * 100)
    (tmp_path / "cache").write_text("")
    config = data_config(tmp_path, files=[str(tmp_path / "text.txt")], cache_dir=str(tmp_path / "cache"))
    with pytest.raises(UserError, match=r"data\.cache_dir: cannot write to .*/cache.*: (File exists|Not a directory)"):
        build_datasets(config, prepare(config))


# --- runs and their names ---


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "a[" / "b]"
    folder.mkdir(parents=True)
    lines = [{"step": n, "loss": 5.0 - n, "lr": 0.1, "seconds": 1.0} for n in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = make(MIXED, run__name="<!--<script>[/b]").model_dump()
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def test_brackets_are_text(run: Path, config_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    summarize(run, console())
    assert f"picture: {run}/loss.png" in capfd.readouterr().out
    assert cli.run(["explain", str(config_file), "run.name=x[/b]"]) == 0
    assert "x[/b]: gpt3" in capfd.readouterr().out


def test_no_text_ends_a_script(run: Path) -> None:
    """`<!--<script>` in a script has a browser wait for a second end."""
    page = write_page(run).read_text()
    scripts = page.split("const figures = ")[1].split("\n")[0]
    assert "<" not in scripts
    assert "<!--<script>[/b]" not in page.split("</style>")[1].split("<script>")[0]


def test_a_page_that_cannot_be_written(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (run / "report.html").mkdir()
    (run / "report.html" / "kept").write_text("")
    said = refused(capfd, "report", run)
    assert f"{run}/report.html: cannot write the page: it is a folder" in said


def test_a_backslash_in_the_name_of_a_job(tmp_path: Path) -> None:
    """sbatch takes it for a sign of its own, and the job ends without a log."""
    config = make(MIXED, run__dir=str(tmp_path / "a\\b"))
    with pytest.raises(UserError, match=r"run\.dir: .* holds a backslash"):
        submit.jobs("pretrain", config, ["run.yaml"], {})


# --- a tree of somebody else's ---


@pytest.mark.parametrize("guarded", [True, False])
def test_a_tree_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guarded: bool) -> None:
    """Its repository names a filter and a monitor, which git would start; without our care it does."""
    tree, pwned = tmp_path / "tree", tmp_path / "pwned"
    release, series = next(iter(trees.source_patches().items()))
    for patch in series:
        path = tree / patch.head["File"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n")
    version = re.search(r"(\d+)\.(\d+)", str(series[0].versions))
    assert version, release
    (tree / "megatron" / "core").mkdir(parents=True, exist_ok=True)
    (tree / "megatron" / "core" / "package_info.py").write_text(
        f"MAJOR = {version[1]}\nMINOR = {version[2]}\nPATCH = 1\nPRE_RELEASE = ''\n"
    )
    subprocess.run(["git", "init", "-q", str(tree)], check=True)
    (tree / ".gitattributes").write_text("* filter=evil\n")
    with (tree / ".git" / "config").open("a") as file:
        file.write(
            f'[core]\n\tfsmonitor = "touch {pwned}; false"\n'
            f'[filter "evil"]\n\tclean = "touch {pwned}; cat"\n\trequired\n'
        )
    if guarded:
        with pytest.raises(UserError, match="nothing was changed"):
            trees.check_tree(tree)
    else:
        text = "".join(patch.path.read_text(encoding="utf-8") for patch in series)
        subprocess.run(
            ["git", "apply", "--check", "-"], input=text, cwd=tree, text=True, capture_output=True, check=False
        )
    assert pwned.exists() is not guarded
