"""The command lines of Megatron-LM's functional tests, and what `--mup-explain` says to each of them.

    python -m tests.helpers.functional_recipes TREE RECIPES FOLDER

TREE is a Megatron-LM checkout, whose `megatron/` is imported in the place of the installed one. RECIPES is JSON: words
by name. FOLDER/seen.json gets, by name, `rates` (multipliers of what reads hidden vectors, from half the hidden size),
`refused` (a sentence of ours), `parser` (the last line of the parser's) or `traceback`. All are explained in one
process, because starting one takes longer than explaining.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import tarfile
import traceback
from pathlib import Path
from typing import Any

import yaml

_FAMILIES = ("gpt", "hybrid", "mixtral", "moe", "nemotron")
# What names data, tokenizers and folders of their machines.
_PLACES = {
    *("--data-path", "--vocab-file", "--merge-file", "--tokenizer-model", "--tokenizer-type", "--data-cache-path"),
    *("--save", "--load", "--tensorboard-dir", "--vocab-size", "--mock-data", "--per-split-data-args-path"),
    *("--tiktoken-pattern", "--wandb-project", "--wandb-exp-name", "--wandb-save-dir"),
}
DATA = "--mock-data --tokenizer-type NullTokenizer --vocab-size 1000"


def recipes(repository: str, commit: str) -> dict[str, list[str]]:
    """Words by the name of the first recipe that has them, of those that train a model of the next token.

    Args:
        repository: git's, of Megatron-LM.
        commit: whose tree is read.
    """
    command = ["git", "-C", repository, "archive", commit, "tests/functional_tests/test_cases"]
    packed = subprocess.run(command, capture_output=True, check=True).stdout
    found: dict[tuple[str, ...], str] = {}
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in sorted(archive.getmembers(), key=lambda member: member.name):
            family, test, file = ("", "", *member.name.split("/"))[-3:]
            if family not in _FAMILIES or file != "model_config.yaml" or "inference" in test or "grpo" in test:
                continue
            content = archive.extractfile(member)
            assert content is not None
            arguments = yaml.safe_load(content.read()).get("MODEL_ARGS")
            if isinstance(arguments, dict):
                found.setdefault(tuple(_words(arguments)), f"{family}/{test}")
    return {name: list(words) for words, name in found.items()}


def _words(arguments: dict[str, Any]) -> list[str]:
    """As their own shell script makes them: what stands in brackets is several words."""
    words: list[str] = []
    for option, value in arguments.items():
        if option in _PLACES or value in (False, None, ""):
            continue
        words.append(option)
        text = str(value).strip("'\"").replace("${REPEAT}", "1")
        if isinstance(value, list):
            words += map(str, value)
        elif text.startswith("[") and text.endswith("]") and "]" not in text[:-1]:
            words += text[1:-1].replace(",", " ").split()
        elif text.replace(" ", "").isdigit():
            words += text.split()
        elif value is not True:
            words.append(text)
    return words


def explained(words: list[str], folder: Path) -> dict[str, Any]:
    """What is said to one command line.

    Args:
        words: of the command line.
        folder: for files of the base.
    """
    from mup_megatron.util.errors import UserError
    from tests.megatron_training.test_megatron_elsewhere import elsewhere
    from tests.megatron_training.test_megatron_recipes import FROM_HIDDEN

    base = {"hidden_size": int(words[words.index("--hidden-size") + 1]) // 2} if "--hidden-size" in words else None
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            tensors = elsewhere(words, folder, base, common=DATA)[1].tensors
    except UserError as error:
        return {"refused": str(error)}
    except SystemExit:
        return {"parser": said.getvalue().strip().splitlines()[-1]}
    except Exception:
        return {"traceback": traceback.format_exc()[-2000:]}
    return {"rates": sorted({row.lr_multiplier for name, row in tensors.items() if name.endswith(FROM_HIDDEN)})}


def main(tree: Path, listed: Path, folder: Path) -> None:
    sys.path.insert(0, str(tree))
    import megatron.core

    assert Path(megatron.core.__file__).is_relative_to(tree)
    seen = {name: explained(words, folder) for name, words in json.loads(listed.read_text()).items()}
    (folder / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
