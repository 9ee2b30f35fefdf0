"""Tokenizers of any library that megatron-core knows; SentencePiece models can be trained here.

Public names: `train_sentencepiece`, `load_tokenizer`, `prompt_tokens`, `tokenizer_digest`, `HUGGING_FACE_FILES`,
`MASK`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mup_megatron.config import Config
from mup_megatron.util.errors import UserError, no_such_file
from mup_megatron.util.files import check_regular, read_bytes

_TRAINING_CHARACTERS = 4_000_000
_BYTES = 256
HUGGING_FACE_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja"),
)
"""What transformers' own tokenizers keep in their folder."""
MASK = "[MASK]"
"""How a text names the token that masks others, which no tokenizer here has: it is the entry after its last."""


def train_sentencepiece(texts: Iterable[str], vocab_size: int, path: Path) -> None:
    """Trains a byte-pair SentencePiece model that keeps every character (indentation, line ends) and writes it.

    Args:
        texts: documents; the first four million characters are used.
        vocab_size: pieces, special ones included.
        path: of the .model file.

    Raises:
        UserError: the text is too short for the vocabulary.
    """
    import io

    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_lines(texts),
            model_writer=model,
            vocab_size=vocab_size,
            model_type="bpe",
            byte_fallback=True,
            character_coverage=0.9995,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            user_defined_symbols=["\n"],
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise UserError(f"data.tokenizer.vocab_size: {_problem(str(error), vocab_size)}") from None
    path.write_bytes(model.getvalue())


def _problem(error: str, vocab_size: int) -> str:
    """What SentencePiece's error says of the size: it names the largest, or the smallest, that the corpus allows."""
    if largest := re.search(r"size too high .*<= (\d+)", error):
        return f"{vocab_size} is more than the corpus holds; expected at most {largest[1]}, or more text"
    if smallest := re.search(r"smaller than required_chars\D*\d+ vs (\d+)", error):
        return f"{vocab_size} is less than the corpus's characters need; expected at least {smallest[1]}"
    return f"cannot train {vocab_size} pieces on this corpus; expected more text, or another size"


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """Lines of the texts, cut at a length that SentencePiece accepts, until there are enough of them."""
    characters = 0
    for text in texts:
        for line in text.splitlines():
            for start in range(0, len(line), 4000):
                yield line[start : start + 4000]
        characters += len(text)
        if characters > _TRAINING_CHARACTERS:
            return


def load_tokenizer(config: Config, trained: Path | None = None) -> Any:
    """megatron-core's tokenizer object for the config: `tokenize`, `detokenize`, `vocab_size`, `eod`.

    Args:
        config: the run.
        trained: the SentencePiece model that `prepare` trained, used where the config names no path.

    Raises:
        UserError: the file is missing or its library cannot read it.
    """
    from megatron.core.tokenizers import MegatronTokenizer

    section = config.data.tokenizer
    if section.library == "null" and section.vocab_size is not None:
        return _null_tokenizer(section.vocab_size)
    arguments: dict[str, Any] = {}
    if section.library == "tiktoken" and section.vocab_size:
        arguments["vocab_size"] = section.vocab_size
    path = section.path or (str(trained) if trained else None)
    if section.library != "byte-level" and (path is None or not Path(path).exists()):
        raise config.error("data.tokenizer.path", no_such_file(path) if path else "expected the tokenizer's file")
    try:
        for file in _files(Path(path)) if path and section.library != "byte-level" else ():
            check_regular(file)
        tokenizer = MegatronTokenizer.from_pretrained(
            tokenizer_path=path, metadata_path={"library": section.library}, **arguments
        )
    except UserError:
        raise
    except Exception as error:  # the libraries raise whatever they like
        raise config.error("data.tokenizer.path", f"{section.library} cannot read {path}: {error}") from None
    if section.library == "byte-level":
        # Of its 512 entries 256 are bytes. A model may give any of the others, which upstream cannot turn into text.
        tokenizer._tokenizer.special_start = _BYTES
    return tokenizer


def _null_tokenizer(vocab_size: int) -> Any:
    """Numbers as text, the last entry ending documents.

    megatron-core 0.16 calls it `null` and adds the end-of-document token to the size; 0.19 calls it `null-text`, counts
    the token, and asserts a path under the old name.
    """
    from megatron.core.tokenizers import MegatronTokenizer

    try:
        return MegatronTokenizer.from_pretrained(metadata_path={"library": "null"}, vocab_size=vocab_size - 1)
    except AssertionError:
        return MegatronTokenizer.from_pretrained(metadata_path={"library": "null-text"}, vocab_size=vocab_size)


def tokenizer_digest(path: Path | None) -> str | None:
    """SHA-256 of what a tokenizer is read from; None where that is no file.

    Args:
        path: a file, or a folder of transformers, of which only the tokenizer's files count; None has none.
    """
    if path is None:
        return None
    digest, found = hashlib.sha256(), False
    for file in _files(path):
        content = read_bytes(file)
        digest.update(f"{file.name if path.is_dir() else ''} {len(content)}\n".encode() + content)
        found = True
    return digest.hexdigest() if found else None


def _files(path: Path) -> list[Path]:
    """What is there of a tokenizer: the file, or the folder's."""
    files = [path / name for name in HUGGING_FACE_FILES] if path.is_dir() else [path]
    return [file for file in files if file.exists() and not file.is_dir()]


def prompt_tokens(tokenizer: Any, prompt: str, name: str) -> list[int]:
    """The tokens of a prompt; of an empty one the end of a document, after which another begins.

    Args:
        tokenizer: megatron-core's tokenizer object.
        prompt: text.
        name: of the prompt, for the message.

    Raises:
        UserError: the prompt is not text, or the tokenizer cannot read it.
    """
    try:
        prompt.encode()
        return [int(token) for token in tokenizer.tokenize(prompt)] or [int(tokenizer.eod)]
    except ValueError as error:  # UnicodeEncodeError is one; the null tokenizer reads numbers alone
        raise UserError(f"{name}: the tokenizer cannot read it ({error})") from None
