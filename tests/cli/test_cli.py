"""explain, doctor, prepare and the command line itself."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from mup_megatron import cli
from mup_megatron.cli import common, doctor
from tests.helpers.commands import environment
from tests.helpers.configs import HEAD_SIZE, MIXED, make

KEYS = {
    "name",
    "global_shape",
    "local_shape",
    "base_shape",
    "growing",
    "fan_in",
    "fan_out",
    "m_in",
    "m_out",
    "blocks",
    "forward_multiplier",
    "theta",
    "init",
    "init_std",
    "lr",
    "lr_multiplier",
    "eps",
    "eps_multiplier",
    "weight_decay",
    "weight_decay_multiplier",
    "per_tensor",
}


def write(tmp_path: Path, config: Any) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config.model_dump()))
    return str(path)


def explain(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.run(["explain", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def by_name(explained: dict[str, Any]) -> dict[str, Any]:
    return {parameter["name"]: parameter for parameter in explained["parameters"]}


def test_explain_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = make(MIXED, "llama", parallel__tensor_model_parallel_size=2)
    explained = explain(capsys, write(tmp_path, config), "--world-size", "4", "--rank", "3")
    parts = {"config", "layout", "growth", "forward", "horizon", "moved", "experts", "parameters"}
    assert set(explained) == parts
    assert explained["growth"]["ffn_hidden_size"] == {"base": 64, "target": 160, "follows": None}
    assert set(explained["forward"]) == {"softmax_scale", "readout", "embedding", "residual", "relative_bias"}
    assert explained["layout"]["tensor_model_parallel_rank"] == 1
    assert all(set(parameter) == KEYS for parameter in explained["parameters"])
    qkv = by_name(explained)["decoder.layers.0.self_attention.linear_qkv.weight"]
    assert qkv["global_shape"] == [128, 96]
    assert qkv["local_shape"] == [64, 96]
    assert qkv["base_shape"] == [48, 64]
    assert qkv["growing"] == [True, True]
    assert (qkv["fan_in"], qkv["m_in"]) == (96, 1.5)
    assert qkv["fan_out"] is qkv["m_out"] is qkv["init_std"] is None
    assert [(block["name"], block["fan_out"], block["m_out"]) for block in qkv["blocks"]] == [
        ("query", 64, 2.0),
        ("key", 32, 4.0),
        ("value", 32, 4.0),
    ]
    fc1 = by_name(explained)["decoder.layers.0.mlp.linear_fc1.weight"]
    assert [block["name"] for block in fc1["blocks"]] == ["gate", "up"]
    gain = by_name(explained)["decoder.final_layernorm.weight"]
    assert (gain["fan_in"], gain["m_in"], gain["fan_out"], gain["blocks"]) == (1, 1.0, 96, None)


def test_explained_shapes_are_the_models(tmp_path: Path, capsys: pytest.CaptureFixture[str], ranks: Any) -> None:
    """Local shapes, worked out without process groups, against a real model on real ranks."""
    from mup_megatron.data.prepare import prepare
    from tests.helpers import bodies

    config = make(HEAD_SIZE, "llama", parallel__tensor_model_parallel_size=2, training__micro_batch_size=2)
    prepare(config)
    results = ranks.run(2, bodies.train, config=config, steps=1)
    for rank, result in enumerate(results):
        explained = by_name(explain(capsys, write(tmp_path, config), "--world-size", "2", "--rank", str(rank)))
        assert {name: list(value.shape) for name, value in result["initial"].items()} == {
            name: parameter["local_shape"] for name, parameter in explained.items()
        }


def test_a_base_smaller_than_the_tensor_parallel_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Base of 4 heads, target of 64 at TP 8: nothing is read from a shard."""
    growth = {
        "model": {"num_layers": 2, "hidden_size": 1024, "ffn_hidden_size": 4096, "num_attention_heads": 64},
        "base": {"hidden_size": 64, "ffn_hidden_size": 256, "num_attention_heads": 4},
    }
    config = make(growth, parallel__tensor_model_parallel_size=8)
    parameters = by_name(explain(capsys, write(tmp_path, config), "--world-size", "8", "--rank", "7"))
    fc1 = parameters["decoder.layers.1.mlp.linear_fc1.weight"]
    assert (fc1["local_shape"], fc1["base_shape"], fc1["lr_multiplier"]) == ([512, 1024], [256, 64], 1 / 16)


def test_explain_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["explain", write(tmp_path, make(MIXED))]) == 0
    out = capsys.readouterr().out
    assert "decoder.layers.*.mlp.linear_fc1.weight (2×)" in out
    assert "lr 0.008 (×1), eps 6.667e-09, weight decay 0.1" in out
    assert "query ×2 key ×4 value ×4" in out
    assert max(len(line) for line in out.splitlines()) <= 200


def test_explain_names_what_grows_without_being_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write(tmp_path, make(MIXED, model__ffn_hidden_size=None, base={"hidden_size": 64}))
    assert cli.run(["explain", config]) == 0
    said = " ".join(capsys.readouterr().out.split())
    follows = "ffn_hidden_size 256 to 384, which is 4 * hidden_size where nothing else is said"
    assert f"grows: hidden_size 64 to 96; {follows}" in said


def test_explain_saves_base_shapes_that_explain_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write(tmp_path, make(HEAD_SIZE, "llama"))
    bsh = str(tmp_path / "base.bsh")
    assert cli.run(["explain", config, "--save-base-shapes", bsh]) == 0
    capsys.readouterr()
    direct = explain(capsys, config)
    from_file = explain(capsys, config, f"base={{file: {bsh}}}")
    assert from_file["parameters"] == direct["parameters"]
    assert from_file["forward"] == direct["forward"]


@pytest.mark.parametrize("positions", ["learned_absolute", "rope"])
def test_explain_starts_nothing(tmp_path: Path, positions: str) -> None:
    """No process group, no weights, nor what searches, draws, compiles or reads tokens: in a process of its own."""
    heavy = (
        *("deepspeed", "optuna", "pandas", "transformers", "matplotlib", "sentencepiece", "megatron.training"),
        "torch._dynamo",
    )
    sizes = {"num_layers": 96, "hidden_size": 12288, "num_attention_heads": 96}
    growth = {
        "model": {**sizes, "position_embedding_type": positions},
        "base": {"hidden_size": 256, "num_attention_heads": 2},
    }
    config = write(tmp_path, make(growth, parallel__tensor_model_parallel_size=8, training__global_batch_size=32))
    code = (
        "import sys, resource, torch; from mup_megatron import cli; "
        f"status = cli.run(['explain', {config!r}, '--world-size', '8']); "
        "assert not torch.distributed.is_initialized(); "
        f"assert [name for name in {heavy} if name in sys.modules] == []; "
        "print(status, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, file=sys.stderr)"
    )
    began = time.monotonic()
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    status, mebibytes = result.stderr.split()[-2:]
    assert status == "0"
    assert int(mebibytes) < 2048  # the weights alone would be 650 GiB
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["explian"], "No such command 'explian'"),
        (["explain", "none.yaml"], "none.yaml: cannot read the config"),
        (["explain"], "Missing argument 'CONFIG'"),
        (["explain", "{config}", "--rank", "1"], "--rank: 1 is not below the 1 processes"),
        (["explain", "{config}", "--no-such-option"], "No such option"),
        (["explain", "{config}", "hparams"], "expected key.path=value"),
        (["explain", "{config}", "base={file: none.bsh}"], "none.bsh: cannot read base shapes"),
        (
            ["explain", "{config}", "data.tokenizer={library: sentencepiece, path: none.model}"],
            "no such file: none.model",
        ),
    ],
)
def test_bad_command_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    config = write(tmp_path, make(MIXED))
    assert cli.run([argument.replace("{config}", config) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert len(captured.err.strip().splitlines()) == 1


def test_help_is_quick_and_has_examples() -> None:
    """Quick, because nothing heavy is imported."""
    asked = "import sys; from mup_megatron import cli; cli.run(['--help']); print(sorted(sys.modules))"
    result = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert "'mup_megatron.cli'" in result.stdout
    assert not [name for name in ("torch", "deepspeed", "megatron", "numpy") if f"'{name}'" in result.stdout]
    for command in ("prepare", "explain", "train", "generate", "doctor"):
        assert command in result.stdout
        assert cli.run([command, "--help"]) == 0


def test_help_is_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    """Every command that there is, in the panel of its purpose, in the order in which one uses them; `new` first."""
    assert cli.run(["--help"]) == 0
    shown: dict[str, list[str]] = {}
    for line in capsys.readouterr().out.splitlines():
        if title := re.match(r"╭─ ([\w ]+?) ─", line):
            shown[title[1]] = []
        elif command := re.match(r"│ (\w[\w-]*)", line):
            shown[[*shown][-1]].append(command[1])
    shown.pop("Options")
    assert list(shown.items()) == [
        ("Start", ["new", "doctor", "config", "prepare", "explain", "plan"]),
        ("Tune and train", ["pipeline", "tune", "transfer", "train", "slurm"]),
        ("Check", ["coord-check", "stability", "horizon", "ladder", "reverse"]),
        ("Look", ["watch", "report", "diagnose", "generate", "evaluate"]),
        ("Convert", ["import", "export", "rebase"]),
        ("Megatron", ["run", "patch"]),
    ]
    there = typer.main.get_command(common.app).commands
    assert sorted(there) == sorted(name for names in shown.values() for name in names)


@pytest.mark.parametrize("command", ["prepare", "explain", "train", "generate", "evaluate", "doctor"])
def test_every_command_has_an_example(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert cli.run([command, "--help"]) == 0
    assert f"Example: mup-megatron {command}" in " ".join(capsys.readouterr().out.split())


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["doctor", "--json"]) == 0
    examined = json.loads(capsys.readouterr().out)
    assert examined["packages"]["megatron-core"]
    assert examined["problems"] == []
    active = {patch["name"]: patch["active"] for patch in examined["patches"]}
    assert active["cpu-current-device"] == (examined["devices"] == ["CPU"])
    assert all(item["costs"] for item in examined["missing"])
    assert all(item["get"] for item in examined["missing"])
    assert cli.run(["doctor"]) == 0
    screen = capsys.readouterr().out
    assert screen.startswith("ready: what mup-megatron ")
    assert not [patch for patch in active if patch in screen]
    assert cli.run(["doctor", "--all"]) == 0
    everything = capsys.readouterr().out
    assert everything.startswith(screen)
    assert "deepspeed-no-shm-build" in everything
    assert all(f" {package} " in everything for package in examined["packages"])


def test_doctor_is_one_screen_where_everything_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    """80 columns and 24 lines, eight GPUs with long names too; a name, what it costs, and how to get it."""
    missing = [{"name": part.name, "costs": part.costs, "get": part.get} for part in doctor.PARTS]
    for devices in (["CPU"], ["NVIDIA GH200 144G HBM3e MIG 1g.18gb"] * 8):
        packages = dict.fromkeys(doctor.PACKAGES, "0.20.0rc0.dev20260101+cu130.nv26.1")
        found = {"version": "0.1.0", "python": "3.12.1", "packages": packages, "cores": 288, "problems": []}
        doctor.print_examination({**found, "devices": devices, "missing": missing}, common.console(80))
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) <= 24
        assert max(map(len, lines)) <= 80
        assert [f"  {part.name}: {part.costs}" for part in doctor.PARTS] == lines[-17:-1:2]  # none is wrapped
        assert [f"      {part.get}" for part in doctor.PARTS] == lines[-16:-1:2]


@pytest.mark.parametrize(
    ("package", "version", "said"),
    [
        ("deepspeed", "0.18.3", "deepspeed is 0.18.3; expected: pip install 'deepspeed>=0.19'"),
        ("deepspeed", "0.20.1", "patch deepspeed-no-shm-build is written for deepspeed >=0.19,<0.20, but 0.20.1"),
    ],
)
def test_doctor_of_versions_that_do_not_fit(tmp_path: Path, package: str, version: str, said: str) -> None:
    """As Python's own metadata tell it: those of another version lie on the path before the real ones."""
    metadata = tmp_path / f"{package}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    command = [sys.executable, "-m", "mup_megatron", "doctor"]
    own = {**environment(), "PYTHONPATH": str(tmp_path)}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=own)
    assert result.returncode == 1, result.stderr
    assert result.stdout.startswith("not ready: mup-megatron 0.1.0 does not work here\n")
    assert said in " ".join(result.stdout.split())
    assert "Traceback" not in result.stderr


def test_prepare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write(tmp_path, make(MIXED, data__dir=str(tmp_path / "data")))
    assert cli.run(["prepare", config]) == 0
    first = capsys.readouterr().out
    assert "training a SentencePiece model" in first
    assert cli.run(["prepare", config]) == 0
    assert capsys.readouterr().out == first.splitlines()[-1] + "\n"


# Where a number does not do for an option.
_GIVEN = {"--widths": "1,2,4", "--growth": "hidden_size=1,2,4", "--parametrization": "standard", "--output": "folder"}
# What excludes others: --thorough judges mup, breaks no rule and shows no ranges; --join starts no ranks, and
# --megatron needs more words.
_WITHOUT = {"--parametrization", "--break", "--ranges", "--join", "--megatron"}


def every_option(command: str, leave_out: set[str]) -> list[str]:
    """A command line with every option of a command, none at its default."""
    words: list[str] = []
    for parameter in typer.main.get_command(common.app).commands[command].params:
        name = next((name for name in parameter.opts if name.startswith("--")), None)
        if name is None or name in leave_out:
            continue
        if parameter.is_flag:
            words.append(parameter.secondary_opts[0] if parameter.default else name)
        else:
            words += [name, _GIVEN.get(name, "2")]
    return words


@pytest.mark.parametrize("leave_out", [{"--thorough", "--join", "--megatron"}, _WITHOUT], ids=["all", "thorough"])
@pytest.mark.parametrize("command", ["train", "pipeline", "tune", "coord-check"])
def test_every_option_reaches_the_ranks(
    command: str, leave_out: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks are started with the words that were typed: an option that is added tomorrow reaches them too."""
    started: list[tuple[list[str], int]] = []

    def start(words: list[str], ranks: int) -> int:
        started.append((words, ranks))
        return 7

    monkeypatch.setattr("mup_megatron.parallel.launch.start_ranks", start)
    path = write(tmp_path, make(MIXED, "gpt3", run__dir=str(tmp_path / "run")))
    typed = [command, *every_option(command, leave_out), path, "hparams.lr=0.5", "training.clip_grad=2"]
    assert "--nproc-per-node" in typed
    assert cli.run(typed) == 7
    assert started == [(typed, 2)]


@pytest.mark.parametrize("command", ["train", "pipeline", "tune", "coord-check"])
def test_two_launchers(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A cluster's container sets RANK and WORLD_SIZE for nodes; --nproc-per-node would be silently one process."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    path = write(tmp_path, make(MIXED, run__dir=str(tmp_path / "run")))
    assert cli.run([command, path, "--nproc-per-node", "8"]) == 2
    said = "--nproc-per-node 8: a launcher started this process as rank 0 of 2, so the environment says; expected no"
    assert said in capfd.readouterr().err
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")  # as torchrun does: the same number is no contradiction
    assert common.launched_rank(8).world_size == 2
    assert common.launched_rank(None).world_size == 2


def test_a_path_with_an_equals_sign_is_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=3e-3.yaml").write_text("")
    words = ["lr=3e-3.yaml", "runs/lr=3e-3/config.yaml", "hparams.lr=3e-3", "data.paths=[a/b]", "config.yaml"]
    assert [common.is_override(word) for word in words] == [False, False, True, True, False]


@pytest.mark.parametrize(
    ("number", "said"), [("x", "expected whole numbers from torchrun"), ("5", "is not below WORLD_S")]
)
def test_a_launchers_variables_that_contradict_each_other(
    number: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", number)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.run(["train", write(tmp_path, make(MIXED, run__dir=str(tmp_path / "run")))]) == 2
    assert "mup-megatron: error: RANK" in (err := capfd.readouterr().err)
    assert said in err
