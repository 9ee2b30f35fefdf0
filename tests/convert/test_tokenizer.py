"""The exported tokenizer makes the tokens that the model was trained on, and text of them again."""

from __future__ import annotations

import ast
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sentencepiece
import transformers

from mup_megatron.convert.export.tokenizer import tokenizer_files
from mup_megatron.data.tokenizer import load_tokenizer
from tests.helpers.configs import MIXED, make


def run_of(tokenizer: dict[str, Any], folder: Path) -> Any:
    """As much of a checkpoint as the tokenizer needs."""
    config = make(MIXED, data__tokenizer=tokenizer, data__dir=str(folder))
    return SimpleNamespace(config=config, tokenizer=load_tokenizer(config, folder / "tokenizer.model"))


def texts() -> list[str]:
    """Real code, what looks like special tokens and bytes, and 500 mixtures of signs that are in no piece, or many."""
    draw = random.Random(1)
    signs = "ab  \n\t=-_\"'()#.x1é日🙂▁</s><unk>\r\x00"
    mixed = ["".join(draw.choice(signs) for _ in range(draw.randrange(150))) for _ in range(500)]
    edges = ["", " ", "  ", "</s>", "a</s>b", "<0x41>", "<s>hi", " " * 50, "=" * 80 + "-" * 77, "\n\n  x\n"]
    return [Path(ast.__file__).read_text(), *edges, *mixed]


def trained(folder: Path, **options: Any) -> Path:
    """A SentencePiece model; without options as `prepare` trains it."""
    settings = {
        "vocab_size": 400,
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
        "user_defined_symbols": ["\n"],
        "minloglevel": 2,
        **options,
    }
    lines = iter(Path(ast.__file__).read_text().splitlines())
    with (folder / "tokenizer.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines, model_writer=file, **settings)
    return folder / "tokenizer.model"


def write(files: dict[str, bytes], folder: Path) -> Any:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return transformers.AutoTokenizer.from_pretrained(folder)


def test_sentencepiece(tmp_path: Path) -> None:
    """The same tokens of every text, and the same text of them; a `</s>` in a text ends no document."""
    path = trained(tmp_path)
    run = run_of({"library": "sentencepiece", "vocab_size": 400}, tmp_path)
    files, remark = tokenizer_files(run)
    assert remark is None
    assert files["tokenizer.model"] == path.read_bytes()
    theirs = write(files, tmp_path / "hf")
    assert (theirs.eos_token_id, theirs.bos_token_id, len(theirs)) == (run.tokenizer.eod, run.tokenizer.eod, 400)
    for text in texts():
        ids = run.tokenizer.tokenize(text)
        assert theirs(text)["input_ids"] == ids, text
        assert theirs.decode(ids) == run.tokenizer.detokenize(ids), text


@pytest.mark.parametrize(
    "option",
    [
        {"add_dummy_prefix": True},
        {"remove_extra_whitespaces": True},
        {"normalization_rule_name": "nmt_nfkc"},
        {"byte_fallback": False},
        {"model_type": "unigram"},
    ],
    ids=str,
)
def test_a_sentencepiece_model_that_changes_text(tmp_path: Path, option: dict[str, Any]) -> None:
    """Only its file is exact, and that is said."""
    path = trained(tmp_path, **option)
    files, remark = tokenizer_files(run_of({"library": "sentencepiece", "path": str(path)}, tmp_path))
    assert files == {"tokenizer.model": path.read_bytes()}
    assert remark is not None
    assert "no tokenizer.json" in remark


def test_hugging_face(tmp_path: Path) -> None:
    """Its own files, as they are."""
    trained(tmp_path)
    made = tokenizer_files(run_of({"library": "sentencepiece", "vocab_size": 400}, tmp_path))[0]
    write(made, tmp_path / "hf")
    (tmp_path / "hf" / "notes.txt").write_text("mine")
    run = run_of({"library": "huggingface", "path": str(tmp_path / "hf")}, tmp_path)
    files, remark = tokenizer_files(run)
    assert remark is None
    assert files == made
    text = Path(ast.__file__).read_text()
    assert write(files, tmp_path / "again")(text)["input_ids"] == run.tokenizer.tokenize(text)


def test_libraries_that_transformers_lacks(tmp_path: Path) -> None:
    files, remark = tokenizer_files(run_of({"library": "byte-level"}, tmp_path))
    assert files == {}
    assert remark == "warning: transformers has no tokenizer of library byte-level; the folder holds none"
