"""Command lines and configs of the pages, as a reader would type them.

Public names: `blocks`, `commands`, `configs`. A block is what Markdown shows as code: indented by four spaces, or
fenced. A synopsis is expanded to lines that can be typed: CONFIG is a config, `a | b` is one of the two, what is in
brackets may be left out, `...` stands for nothing.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mup_megatron.config import Config, parse_yaml
from mup_megatron.util.errors import UserError
from tests.helpers.links import PAGES, ROOT

ALL_PAGES = (*PAGES, ROOT / "patches" / "README.md")
PROGRAMS = ("mup-megatron", "deepspeed", "torchrun", "sbatch", "bash", "python", "./dev")
# Other people's programs, whose command lines are theirs.
FOREIGN = ("optuna-dashboard", "tensorboard", "pip", "sudo", "git", "apt-get")
_STANDS_FOR = {
    "CONFIG": "configs/demo.yaml",
    "LARGE": "configs/demo.yaml",
    "RUN": "runs/demo",
    "CHECKPOINT": "runs/demo",
    "PROMPT": "'def main('",
    "TREE": "~/Megatron-LM",
    "SCRIPT": "pretrain_gpt.py",
    "RULE": "readout_multiplier",
    "KEY": "hparams.lr",
    "KEY=1,2,4": "hidden_size=1,2,4",
    "K": "0",
    "key.path=value": "hparams.lr=1e-3",
}


def blocks(page: Path) -> Iterator[str]:
    """The code blocks of a page, without their indent."""
    lines = page.read_text(encoding="utf-8").splitlines()
    block: list[str] = []
    fenced = False
    for line in [*lines, ""]:
        if line.startswith("```"):
            if block:
                yield "\n".join(block)
            block, fenced = [], not fenced
        elif fenced or line.startswith("    "):
            block.append(line if fenced else line[4:])
        elif block and line.strip():
            yield "\n".join(block)
            block = []
        elif block:
            block.append("")
    if block:
        yield "\n".join(block)


def spans(page: Path) -> Iterator[str]:
    """Code within sentences."""
    yield from re.findall(r"(?<!`)`([^`\n]+)`(?!`)", page.read_text(encoding="utf-8"))


def commands(page: Path) -> list[list[str]]:
    """Every command line of a page, word by word, as a shell hands them over."""
    found = []
    for block in blocks(page):
        if _first(block) in (*PROGRAMS, "for") or re.match(r"[A-Z_]+=", block):
            found += _typed(block)
    for span in spans(page):
        if _first(span) in ("mup-megatron", "./dev") and len(span.split()) > 1:
            # Two words alone name a command in a sentence.
            found += _typed(span if len(span.split()) > 2 or _first(span) == "./dev" else f"{span} --help")
    return found


def _first(text: str) -> str:
    return (text.split() or [""])[0]


def _typed(block: str) -> list[list[str]]:
    """What bash makes of a block in which every program only tells its words."""
    lines: list[str] = []
    for line in re.sub(r"\\\n\s*", " ", block).splitlines():
        line = re.sub(r"(^|\s+)#.*$", "", line)
        lines += _variants(line) if _is_synopsis(line) else [line]
    tell = "\n".join(f'{program}() {{ printf "%s\\0" {program} "$@"; printf "\\n"; }}' for program in PROGRAMS[:-1])
    script = "\n".join(lines).replace("./dev ", "dev ") + "\n"
    tell += '\ncd() { :; }\ndev() { printf "%s\\0" ./dev "$@"; printf "\\n"; }\n'
    result = subprocess.run(["bash", "-ec", tell + script], capture_output=True, text=True, check=False)
    if result.returncode:
        raise AssertionError(f"{block!r} cannot be typed: {result.stderr}")
    return [told.split("\0")[:-1] for told in re.split(r"(?<=\0)\n", result.stdout) if told]


def _is_synopsis(line: str) -> bool:
    """Whether a line says what may be typed, and is no line that could be."""
    signs = ("...", "|", "[", *_STANDS_FOR)
    return "'" not in line and any(sign in re.split(r"[\s\]]+|(?<=\w)(?=\|)|(?<=\[)", line) for sign in signs)


def _variants(line: str) -> list[str]:
    """The lines that a synopsis stands for."""
    optional = re.search(r"\[([^\[\]]*)\]", line)
    if optional:
        before, after = line[: optional.start()], line[optional.end() :]
        return [variant for given in ("", *optional[1].split(" | ")) for variant in _variants(before + given + after)]
    alternatives = re.search(r"[\w-]+(\s*\|\s*[\w-]+)+", line)
    if alternatives:
        before, after = line[: alternatives.start()], line[alternatives.end() :]
        return [
            variant for word in re.split(r"\s*\|\s*", alternatives[0]) for variant in _variants(before + word + after)
        ]
    return [" ".join(_STANDS_FOR.get(word, word) for word in line.split() if word not in ("...", ",..."))]


def configs(page: Path) -> list[dict[str, Any]]:
    """Every piece of a config on a page: blocks and spans that are sections of one."""
    found = []
    for text in (*blocks(page), *spans(page)):
        try:
            data = parse_yaml(text, str(page))
        except UserError:
            continue
        if isinstance(data, dict) and data and set(data) <= set(Config.model_fields):
            sections = {name: section for name, section in data.items() if isinstance(section, dict)}
            found += [sections] if sections else []
    return found


def keys(page: Path) -> set[tuple[str, str]]:
    """(section, key) of every key of a config that a page names by its dotted path."""
    sections = "|".join(Config.model_fields)
    return {
        (section, key)
        for span in spans(page)
        for section, key in re.findall(rf"(?<![\w./-])({sections})\.([a-z_]+)(?![\w./(-])", span)
        if key not in ("yaml", "json", "py", "md")
    }
