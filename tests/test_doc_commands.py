"""Every command line of the pages is one that its program takes, every config one that the loader takes."""

from __future__ import annotations

import atexit
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from mup_megatron import cli
from mup_megatron.config import Config, load_config, parse_config, parse_overrides, parse_yaml
from mup_megatron.config.load import override
from mup_megatron.util.errors import UserError
from tests.helpers.doc_commands import ALL_PAGES, FOREIGN, blocks, commands, configs, keys
from tests.helpers.installed import HAS_TRAINING
from tests.helpers.links import ROOT

PAGE = pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: str(page.relative_to(ROOT)))

# What `mup-megatron new` writes, in whose folder the commands that name it are typed.
MADE = "config.yaml"


@cache
def made_config() -> Path:
    """That file, in a folder of its own."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    assert cli.run(["new", str(folder)]) == 0
    return folder / MADE


@cache
def program() -> Any:
    """`mup-megatron`, as typer makes it."""
    return typer.main.get_command(cli.app)


def ours(words: list[str]) -> None:
    """`mup-megatron WORDS`: the real parser, and where it takes a config the real loader."""
    known = program()
    if words[0].startswith("--"):
        assert words[0] in {option for each in known.params for option in each.opts}, words[0]
        return
    assert words[0] in known.commands, f"{words[0]}: no command"
    if words[1:] == ["--help"]:
        return
    if "--megatron" in words:  # what stands behind -- is a run of megatron.training, from which the config is written
        from mup_megatron.tuning.megatron_command import MegatronCommand

        place = words.index("--")
        command = MegatronCommand.read(words[place + 1 :])
        megatrons([command.script, *command.arguments])
        parsed = known.commands[words[0]].make_context(words[0], words[1:place]).params
        assert parsed["megatron"]
        parse_overrides(list(parsed["overrides"] or []))
        return
    parsed = known.commands[words[0]].make_context(words[0], words[1:]).params
    if words[0] == "run":
        megatrons(parsed["arguments"])
    elif "config" in parsed:
        loads(parsed["config"], tuple(parsed["overrides"] or []))


@cache
def loads(config: str, overrides: tuple[str, ...]) -> None:
    """The real loader takes a config; once, for a synopsis has hundreds of variants."""
    load_config(ROOT / config if config != MADE else made_config(), parse_overrides(list(overrides)))


def megatrons(words: list[str]) -> None:
    """`SCRIPT ARGS...` of a Megatron script in µP; Megatron's own parser where it is installed."""
    from argparse import ArgumentParser

    from mup_megatron.megatron_training.options import add_options
    from mup_megatron.megatron_training.script import _split

    script, arguments, _ = _split(words)
    assert script.name == "pretrain_gpt.py"
    parser = ArgumentParser(allow_abbrev=False)
    if not HAS_TRAINING:
        _, unknown = add_options(parser).parse_known_args(arguments)
        assert not [word for word in unknown if word.startswith("--mup")], unknown
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what makes Megatron's parser reads source in a way that Python deprecates
        from megatron.training.arguments import add_megatron_arguments

        add_options(add_megatron_arguments(parser))
    parser.parse_args(arguments)


def launched(script: str, words: list[str]) -> None:
    """What launch/*.sh and launch/slurm/*.sbatch hand on."""
    path = ROOT / script
    assert path.is_file(), script
    named = re.search(r"mup_megatron slurm (\w+)|launched\([\"'](\w+)[\"']", path.read_text())
    assert named, script
    words = words if words and "=" not in words[0] else ["configs/demo.yaml", *words]
    ours(["slurm", named[1], *words] if named[1] else [named[2], *words])


def deepspeeds(words: list[str]) -> None:
    from deepspeed.launcher.runner import parse_args

    parsed = parse_args(words)
    if parsed.module:
        assert parsed.user_script == "mup_megatron.run"
        megatrons(parsed.user_args)
    else:
        launched(parsed.user_script, parsed.user_args)


def torchruns(words: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    parsed = get_args_parser().parse_args(words)
    if parsed.module and parsed.training_script == "mup_megatron.run":
        megatrons(parsed.training_script_args)
    else:
        # On a patched tree the script is Megatron's own.
        megatrons([parsed.training_script, *parsed.training_script_args])


def pythons(words: list[str]) -> None:
    if words[:2] == ["-m", "mup_megatron.run"]:
        megatrons(words[2:])
        return
    source = ROOT / (words[1].replace(".", "/") + ".py" if words[0] == "-m" else words[0])
    assert source.is_file(), words
    options = {word for word in words[1:] if word.startswith("--")}
    assert all(f'"{option}"' in source.read_text() for option in options), options


def devs(words: list[str]) -> None:
    assert re.search(rf"^  {words[0]}\)", (ROOT / "dev").read_text(), re.MULTILINE), words


TAKES: dict[str, Callable[[list[str]], None]] = {
    "mup-megatron": ours,
    "deepspeed": deepspeeds,
    "torchrun": torchruns,
    "sbatch": lambda words: launched(words[0], words[1:]),
    "bash": lambda words: launched(words[0], words[1:]),
    "python": pythons,
    "./dev": devs,
}


def refusal(words: list[str]) -> str | None:
    """What is wrong with a command line."""
    if words[0] in FOREIGN:
        return None
    try:
        TAKES[words[0]](words[1:])
    except (UserError, AssertionError, typer.TyperException, KeyError) as error:
        said = error.format_message() if isinstance(error, typer.TyperException) else str(error)
        return f"{' '.join(words)}: {said or type(error).__name__}"
    except SystemExit as error:
        # The words are said again, so that what argparse did not know is among them.
        return f"{' '.join(words)}: exit status {error.code}"
    return None


@PAGE
def test_command_lines_are_taken(page: Path) -> None:
    assert not [problem for words in commands(page) if (problem := refusal(words))]


def test_nothing_is_overlooked() -> None:
    """Every program, and most commands of ours, stand on some page; every synopsis became lines that can be typed."""
    found = [words for page in ALL_PAGES for words in commands(page)]
    assert {words[0] for words in found} >= set(TAKES)
    ours: Any = typer.main.get_command(cli.app)
    assert {words[1] for words in found if words[0] == "mup-megatron"} >= set(ours.commands)
    assert len(found) > 80
    assert not [words for words in found if {"[", "|", "CONFIG"} & set(words)]


def test_a_run_that_takes_a_record_leaves_out_what_it_says() -> None:
    """docs/megatron.md's last command of each way of tuning is the one that was tuned, without the record's options."""
    lines = commands(ROOT / "docs" / "megatron.md")
    tuned = [words for words in lines if "--mup-write-config" in words or words[1:3] == ["tune", "--megatron"]]
    taking = [words for words in lines if "--mup-hparams" in words]
    assert len(tuned) == len(taking) == 2
    for before, after in zip(tuned, taking, strict=True):
        given, left = (set(words[words.index("--mup-base") :: 2]) for words in (before, after))
        assert given - left - {"--mup-write-config"} == {"--lr", "--init-method-std", "--weight-decay"}
        assert left - given == {"--mup-hparams"}


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ("mup-megatron explian CONFIG", "explian"),
        ("mup-megatron explain CONFIG --rnak 1", "--rnak"),
        ("mup-megatron train CONFIG [hparams.learning_rate=1e-3]", "hparams.learning_rate: unknown key"),
        ("deepspeed launch/pretrain.sh CONFIG", "launch/pretrain.sh"),
        ("./dev tset", "tset"),
        ("mup-megatron run pretrain_gpt.py --mup-bsae x.yaml", "--mup-bsae"),
    ],
)
def test_a_wrong_command_line_shows(tmp_path: Path, block: str, said: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"So:\n\n    {block}      # or so\n\nand so on\n")
    problems = [problem for words in commands(page) if (problem := refusal(words))]
    assert problems
    assert said in problems[0]


def example(sections: dict[str, Any]) -> Config:
    """A piece of a config, completed by what it does not say of the demo's; of pairs, of an encoder-decoder's."""
    of_pairs = "pairs" in sections.get("data", {})
    data = parse_yaml((ROOT / "configs" / ("t5/iwslt-like.yaml" if of_pairs else "demo.yaml")).read_text(), "demo")
    if of_pairs:
        del data["data"]["corpus"]
    if "model" in sections:
        data.pop("proxy")
        data["tuning"].pop("search")
    for name, section in sections.items():
        if "model" in sections:
            data[name] = section
        else:
            for key, value in section.items():
                override(data, f"{name}.{key}", value, "page")
    return parse_config(data, "page")


@PAGE
def test_configs_are_taken(page: Path) -> None:
    for sections in configs(page):
        if "file" not in sections.get("base", {}):  # a base that lies in a file: tests/rules/test_base_file.py
            example(sections)


USAGE = ROOT / "docs" / "usage.md"


def test_a_page_shows_a_config() -> None:
    (shown,) = configs(USAGE)
    assert set(shown) == {"model", "base", "hparams"}
    assert any("num_attention_heads" in block for block in blocks(USAGE))


def test_a_wrong_config_shows(tmp_path: Path) -> None:
    """KV heads fixed at 8 while the base has 2 heads: what README once said."""
    page = tmp_path / "page.md"
    text = USAGE.read_text()
    page.write_text(re.sub(r"^    base: .*$", "    base: {hidden_size: 256, num_attention_heads: 2}", text, flags=re.M))
    (shown,) = configs(page)
    with pytest.raises(UserError, match=r"base.num_query_groups: 8 does not divide num_attention_heads 2"):
        example(shown)


@PAGE
def test_keys_are_the_schemas(page: Path) -> None:
    unknown = [f"{s}.{key}" for s, key in keys(page) if key not in Config.model_fields[s].annotation.model_fields]
    assert not unknown
