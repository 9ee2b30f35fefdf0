"""The options of µP in Megatron's own parser, the files they name, and what is refused."""

from __future__ import annotations

import functools
import sys
import warnings
from argparse import ArgumentParser, Namespace
from pathlib import Path

import pytest

from mup_megatron import cli, megatron_training
from mup_megatron.megatron_training.options import add_options, read_options
from mup_megatron.util.errors import UserError
from tests.helpers.installed import needs_training
from tests.helpers.records import write_values


@functools.cache
def parser() -> ArgumentParser:
    """Megatron's, with the options of µP; what makes it reads source in a way that Python deprecates."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.training.arguments import add_megatron_arguments

        return add_options(add_megatron_arguments(ArgumentParser(allow_abbrev=False)))


def parsed(*words: str) -> Namespace:
    """What Megatron's parser makes of a command line, nothing derived."""
    return parser().parse_args(words)


@pytest.fixture
def base(tmp_path: Path) -> str:
    path = tmp_path / "base.yaml"
    path.write_text("hidden_size: 64\nnum_attention_heads: 4\n")
    return str(path)


@needs_training
def test_without_options_nothing_is_read() -> None:
    assert read_options(parsed("--lr", "1e-3")) is None
    assert read_options(parsed("--use-mup", "--mup-base-hidden-size", "64")) is None  # megatron-core's own


@needs_training
def test_a_record_becomes_megatrons_options(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "mup.yaml"
    config.write_text("{parametrization: {weight_decay: coupled}, hparams: {residual_multiplier: 0.5}}")
    values = write_values(
        tmp_path / "t.json",
        lr=0.004,
        init_method_std=0.03,
        output_multiplier=2.0,
        lr_schedule="cosine",
        one_minus_beta2=0.02,
    )
    args = parsed("--mup-base", base, "--mup-config", str(config), "--mup-hparams", values, "--kv-channels", "16")
    settings = read_options(args)
    assert settings is not None
    assert (args.lr, args.init_method_std, args.weight_decay, args.lr_decay_style) == (0.004, 0.03, 0.01, "cosine")
    assert (args.adam_beta1, args.adam_beta2) == (0.9, 0.98)
    assert settings.base == {"hidden_size": 64, "num_attention_heads": 4}
    assert settings.hparams == {"residual_multiplier": 0.5, "output_multiplier": 2.0}
    assert settings.parametrization == {"weight_decay": "coupled"}
    assert settings.sizes == {"kv_channels": 16}
    with pytest.raises(UserError, match=r"--adam-beta2 0\.95: .* says 0\.98; remove --adam-beta2, or --mup-hparams"):
        read_options(parsed("--mup-base", base, "--mup-hparams", values, "--adam-beta2", "0.95"))
    # Typed is typed, at Megatron's default too.
    words = ("--mup-base", base, "--mup-hparams", values, "--adam-beta2", "0.999")
    read_options(parsed(*words))
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *words])
    with pytest.raises(UserError, match=r"--adam-beta2 0\.999: .* says 0\.98; remove --adam-beta2, or --mup-hparams"):
        read_options(parsed(*words))


@needs_training
@pytest.mark.parametrize("optimizer", ["sgd", "muon"])
def test_a_record_s_momentum_is_that_of_the_optimizer(base: str, tmp_path: Path, optimizer: str) -> None:
    values = write_values(tmp_path / "t.json", lr=0.004, one_minus_momentum=0.04)
    words = ("--mup-base", base, "--mup-hparams", values, "--optimizer", optimizer)
    args = parsed(*words)
    read_options(args)
    given = {name: getattr(args, f"{name}_momentum") for name in ("sgd", "muon")}
    assert given == {"sgd": 0.9, "muon": 0.9, optimizer: 0.96}
    with pytest.raises(UserError, match=rf"--{optimizer}-momentum 0\.8: .* says 0\.96; remove --{optimizer}-momentum"):
        read_options(parsed(*words, f"--{optimizer}-momentum", "0.8"))


@needs_training
def test_factors_of_kinds_come_from_a_record(base: str, tmp_path: Path) -> None:
    values = write_values(
        tmp_path / "t.json", **{"lr": 0.004, "per_tensor.embedding.lr": 2.0, "per_tensor.*.mlp.*.init": 0.5}
    )
    settings = read_options(parsed("--mup-base", base, "--mup-hparams", values))
    assert settings is not None
    assert settings.hparams == {"per_tensor": {"embedding": {"lr": 2.0}, "*.mlp.*": {"init": 0.5}}}
    config = tmp_path / "mup.yaml"
    config.write_text("{hparams: {per_tensor: {embedding: {lr: 3.0}}}}")
    with pytest.raises(UserError, match=r"hparams.per_tensor: .*3\.0.* in --mup-config, .*2\.0.* expected one of them"):
        read_options(parsed("--mup-base", base, "--mup-config", str(config), "--mup-hparams", values))


@needs_training
@pytest.mark.parametrize(
    ("words", "files", "said"),
    [
        ("--mup-base {}/no.yaml", {}, "no.yaml: cannot be read: No such file"),
        ("--mup-base {}/b.yaml", {"b.yaml": "[1]"}, "b.yaml: expected base sizes such as hidden_size: 256"),
        ("--mup-base {}/b.yaml", {"b.yaml": "hiden_size: 1"}, "b.yaml: hiden_size: unknown size; known here: hidden_"),
        ("--mup-base {}/b.yaml", {"b.yaml": "!!python/object/apply:os.getcwd []"}, "b.yaml: line 1: not valid YAML"),
        ("--mup-base {}/b.yaml", {"b.yaml": "hidden_size: 8"}, "--lr: missing; expected the learning rate at the base"),
        ("--mup-config {}/c.yaml --lr 1", {"c.yaml": "model: {}"}, "c.yaml: model: unknown key; expected base:, param"),
        ("--mup-config {}/c.yaml --lr 1", {"c.yaml": "hparams: {lr: 1}"}, "is Megatron's own option; expected --lr"),
        ("--mup-config {}/c.yaml --lr 1", {"c.yaml": "hparams: {x: 1}"}, "hparams.x: unknown key"),
        ("--mup-config {}/c.yaml --lr 1", {"c.yaml": "parametrization: {x: 1}"}, "parametrization.x: unknown key"),
        ("--mup-hparams {}/no.json", {}, "no.json: cannot read the transfer record"),
        ("--mup-hparams {}/r.json --lr 1", {}, "--lr 1.0: "),
        (
            "--mup-hparams {}/r.json --weight-decay-incr-style linear",
            {},
            "--weight-decay-incr-style linear: {}/r.json holds one weight decay for the whole run; expected constant",
        ),
        ("--mup-explain --use-mup --mup-output-mult 2", {}, "MuP cannot be combined with this project's; remove"),
    ],
)
def test_what_cannot_be_read(words: str, files: dict[str, str], said: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    write_values(tmp_path / "r.json", lr=0.004)
    with pytest.raises(UserError) as problem:
        read_options(parsed(*words.format(tmp_path).split()))
    assert said.format(tmp_path) in str(problem.value)
    assert "\n" not in str(problem.value)


@needs_training
def test_options_are_added_once() -> None:
    add = megatron_training.adds_arguments(lambda parser: parser)
    assert megatron_training.adds_arguments(add) is add
    before = len(parser()._actions)
    assert len(add_options(parser())._actions) == before


@pytest.mark.parametrize(
    ("words", "script", "said"),
    [
        ([], "", "no script was named; expected mup-megatron run [--config mup.yaml] SCRIPT"),
        (["--config"], "", "--config: expected a file"),
        (["--lr", "1"], "", "--lr: unknown option before the script"),
        (["no.py"], "", "no.py: cannot read the script: No such file or directory"),
        (["{}/s.py"], "print('ran')", "s.py: imports megatron.training nowhere; expected a script written against"),
        (["{}/s.py"], "import megatron.core", "s.py: imports megatron.training nowhere"),
        (["{}/s.py"], "x = (", "s.py: not Python"),
        (["{}/s.py"], "from megatron.training import pretrain", "--mup-base: missing"),
        (["{}/s.py", "--mup-base", "b", "--yaml-cfg=a"], "import megatron.training", "--yaml-cfg: not under µP here"),
        (["{}/s.py"], "from helper import go", "--mup-base: missing"),  # helper.py imports it
    ],
)
def test_scripts(words: list[str], script: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence, exit status 2, and nothing of the script has run."""
    (tmp_path / "s.py").write_text(script)
    (tmp_path / "helper.py").write_text("import megatron.training.training")
    assert cli.run(["run", *(word.format(tmp_path) for word in words)]) == 2
    output = capsys.readouterr()
    assert said in output.err
    assert output.err.count("\n") == 1
    assert output.out == ""
