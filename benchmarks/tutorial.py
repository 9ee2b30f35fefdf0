"""The tutorial's outputs, numbers and pictures, made by typing its commands: `python -m benchmarks.tutorial`.

The commands of docs/tutorial.md that stand before its section 9 run one after the other in an empty folder. What they
print goes to results/tutorial/3.12.json, and from there into the page: each line of a block becomes the line of the
command's output that is most like it, and each sentence with a measured number is written anew. `page` does both, so a
test compares the page with the record (tests/test_tutorial.py).
"""

from __future__ import annotations

import difflib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS
from mup_megatron.util.provenance import commit, machine

_ROOT = Path(__file__).resolve().parents[1]
PAGE = _ROOT / "docs" / "tutorial.md"
RECORD = RESULTS / "tutorial" / "3.12.json"
_END = "\n## 9. "
_PICTURES = {"search.png": "tutorial-search.png", "loss.png": "tutorial-loss.png"}
_BLOCK = re.compile(r"(?<=^```text\n).*?(?=^```$)", re.DOTALL | re.MULTILINE)
_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")

SENTENCES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    r"the project's own documents,\s[\d,]+ kB": lambda of: f"the project's own documents, {of['kilobytes']:,} kB",
    r"tuning took \d+ s and the target \d+ s": lambda of: (
        f"tuning took {of['tuning_seconds']:.0f} s and the target {of['target_seconds']:.0f} s"
    ),
    r"only \w+ of them ran to the end": lambda of: f"only {_WORDS[of['complete']]} of them ran to the end",
    r"logits are multiplied by [\d.]+/4": lambda of: f"logits are multiplied by {of['output_multiplier']:.4g}/4",
    r"has only [\d,]+ tokens and this run sees each of them \w+\stimes": lambda of: (
        f"has only {of['tokens']:,} tokens and this run sees each of them {_WORDS[of['epochs']]} times"
    ),
    r"ends at [\d.]+ nats per token, the proxy at [\d.]+ ± [\d.]+": lambda of: (
        f"ends at {of['target_loss']:.2f} nats per token, the proxy at {of['proxy_loss']:.2f} ± {of['noise']:.2f}"
    ),
}
"""Parts of sentences that hold what was measured, as patterns, and what they become. They may break over a line."""


# --- the record ---


def commands(text: str) -> Iterator[str]:
    """The command lines of the page before its section 9, in order."""
    for line in text[: text.index(_END)].splitlines():
        if re.match(r" {4}(?:mup-megatron|cat|cd) ", line):
            yield line.strip()


def run(folder: Path, *, shrunk: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """Types the commands in an empty folder.

    Args:
        folder: to type them in.
        shrunk: words of the commands and what is typed in their place, for a smaller run.

    Returns:
        By command, `seconds` and `lines` that it printed.

    Raises:
        RuntimeError: a command of the page that is none, or one that fails; with what it printed.
    """
    outputs: dict[str, dict[str, Any]] = {}
    for command in commands(PAGE.read_text(encoding="utf-8")):
        words = [(shrunk or {}).get(word, word) for word in shlex.split(command)]
        if command == "cat docs/*.md > my.txt":
            text = "".join(path.read_text(encoding="utf-8") for path in sorted((_ROOT / "docs").glob("*.md")))
            (folder / "my.txt").write_text(text, encoding="utf-8")
        elif words[0] == "cd":
            folder = folder / words[1]
        else:
            outputs[command] = _type(words, folder)
    return outputs


def _type(words: Sequence[str], folder: Path) -> dict[str, Any]:
    if words[0] != "mup-megatron":
        raise RuntimeError(f"{shlex.join(words)}: the tutorial's commands are mup-megatron, cat and cd")
    began = time.perf_counter()
    environment = os.environ | {"PYTHONPATH": str(_ROOT), "COLUMNS": "200"}
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-m", "mup_megatron", *words[1:]], cwd=folder, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{shlex.join(words)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    lines = [line.rstrip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return {"seconds": round(time.perf_counter() - began, 1), "lines": lines}


def facts(folder: Path, outputs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What the sentences tell, from the transfer record and from what was printed (`run`) in that folder."""
    by_name = {command.split()[1]: output for command, output in outputs.items()}
    record = json.loads((folder / "notes/runs/run/transfer.json").read_text(encoding="utf-8"))
    tuned = "\n".join(by_name["tune"]["lines"])
    target = "\n".join(by_name["pipeline"]["lines"])
    proxy = _numbers(r"proxy loss\s+([\d.]+) ± ([\d.]+) per run", tuned)
    tokens = int(_word(r"([\d,]+) tokens of [\d,]+ documents in", tuned).replace(",", ""))
    trained = float(_numbers(r"target\s+[\d.]+ M\s+([\d.]+) k", "\n".join(by_name["plan"]["lines"]))[0]) * 1000
    return {
        "kilobytes": (folder / "my.txt").stat().st_size // 1000,
        "tuning_seconds": by_name["tune"]["seconds"],
        "target_seconds": by_name["pipeline"]["seconds"],
        "complete": int(_numbers(r"trials\s+\d+ \((\d+) complete", tuned)[0]),
        "output_multiplier": record["values"]["output_multiplier"],
        "tokens": tokens,
        "epochs": round(trained / tokens),
        "target_loss": _numbers(r"evaluation loss ([\d.]+)", target[target.rindex("evaluation loss") :])[0],
        "proxy_loss": proxy[0],
        "noise": proxy[1],
    }


def _word(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"nothing that was printed is like {pattern}")
    return found[1]


def _numbers(pattern: str, text: str) -> list[float]:
    _word(pattern, text)
    return [float(each) for each in re.search(pattern, text).groups()]  # type: ignore[union-attr]


# --- the page ---


def page(text: str, record: Mapping[str, Any]) -> str:
    """The page with every block and every measured number as the record has them."""
    end = text.index(_END)
    text, rest = text[:end], text[end:]
    for block in reversed(list(_BLOCK.finditer(text))):
        command = [each for each in commands(text[: block.start()] + _END) if each in record["outputs"]][-1]
        lines = _chosen(block[0].splitlines(), record["outputs"][command]["lines"])
        text = text[: block.start()] + "".join(f"{line}\n" for line in lines) + text[block.end() :]
    for pattern, sentence in SENTENCES.items():
        text = _replaced(text, pattern.replace(" ", r"\s"), sentence(record["facts"]))
    return text + rest


def _replaced(text: str, pattern: str, said: str) -> str:
    """A sentence in the place of what is like it, broken where that was; the lines are wrapped by hand."""
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"{PAGE.name}: no words like {pattern}")
    breaks = [len(before.split()) for before in re.split(r"\n", found[0])[:-1]]
    words = said.split()
    for place in reversed(list(_running(breaks))):
        words[place - 1 : place + 1] = [f"{words[place - 1]}\n{words[place]}"]
    return text[: found.start()] + " ".join(words) + text[found.end() :]


def _running(counts: Sequence[int]) -> Iterator[int]:
    total = 0
    for count in counts:
        total += count
        yield total


def _chosen(shown: Sequence[str], printed: Sequence[str]) -> list[str]:
    """For each line of a block the printed one that begins with as many of its words, and is most like it."""

    def likeness(line: str, other: str) -> tuple[int, float]:
        same = 0
        for one, two in zip(line.split(), other.split(), strict=False):
            if one != two:
                break
            same += 1
        return same, difflib.SequenceMatcher(None, _skeleton(line), _skeleton(other)).ratio()

    return [line if line == "..." else max(printed, key=lambda other: likeness(line, other)) for line in shown]


def _skeleton(line: str) -> str:
    return re.sub(r"[\d.]+", "#", line)


def main() -> None:
    """Runs, and writes record, page and pictures."""
    with tempfile.TemporaryDirectory() as name:
        outputs = run(Path(name))
        record = {"machine": machine(), "commit": commit(), "outputs": outputs, "facts": facts(Path(name), outputs)}
        for picture, kept in _PICTURES.items():
            shutil.copy(Path(name) / "notes/runs/run" / picture, _ROOT / "docs" / "images" / kept)
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), record), encoding="utf-8")
    print(RECORD, PAGE, sep="\n")


if __name__ == "__main__":
    main()
