"""`mup-megatron prepare`: train the tokenizer, write megatron-core's indexed dataset. Done once, then found again.

Public names: `prepare`, `still_there`, `prepared_tokenizer`, `tokenizer_file`, `known_vocab_size`.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from mup_megatron.config import Config
from mup_megatron.data.corpus import Corpus
from mup_megatron.data.corpus import data_directory as data_directory
from mup_megatron.data.fetched import FETCHED
from mup_megatron.data.index import check_indexed_dataset
from mup_megatron.data.record import (
    LOCK,
    RECORD,
    TRAINED,
    Prepared,
    begin_record,
    read_record,
    refuse_other_data,
    write_record,
)
from mup_megatron.data.tokenizer import load_tokenizer, tokenizer_digest, train_sentencepiece
from mup_megatron.data.whole import partial_name, problem, put_in_place, remove_partials
from mup_megatron.util.disk import full_disk
from mup_megatron.util.errors import UserError, no_such_file, shown
from mup_megatron.util.files import read_object, sha256_of
from mup_megatron.util.locks import hold

_TOKENS = 1  # of the digest: changes when the same input gives other tokens
_TOKENS_OF_CUT_FILES = 2


def prepare(
    config: Config, say: Callable[[str], None] = lambda _line: None, *, verified: Path | None = None
) -> Prepared:
    """Prepares the config's data, or finds that it is prepared.

    Any number of processes may call it for one folder: one prepares, the others wait and say for whom. Files are
    written under names of their own and renamed; the record with their checksums comes last. What does not match it
    is made again.

    Args:
        config: the run.
        say: takes a line of progress.
        verified: file of the run that remembers what was verified. Where it is given, files are read and compared with
            their checksums, unless they were before and have not changed since; otherwise sizes are compared.

    Raises:
        UserError: a file is missing, empty, truncated or foreign, or the tokenizer does not fit the config.
    """
    corpus = Corpus(config)
    directory = corpus.directory
    if corpus.fetched is not None and not corpus.fetched.is_file():
        _fetch(corpus, corpus.fetched, say)
    digest = _digest(corpus)
    found = read_record(corpus, digest)
    if found and problem(directory, found.files, verified) is None:
        return found
    corpus.check_encoding()
    _make_directory(directory)
    try:
        with hold(directory / LOCK, say, f"prepares {directory}"):
            found = read_record(corpus, digest)
            if found:
                if (damage := problem(directory, found.files, verified)) is None:
                    return found
                say(f"warning: {directory}: {damage}; the data is prepared anew")
            else:
                refuse_other_data(corpus, digest)
            remove_partials(directory)
            with full_disk(directory, "the tokens of the corpus", lambda: _tokens_bytes(corpus)):
                return _make(corpus, digest, say)
    except OSError as error:
        if error.filename != str(directory / LOCK):
            raise
        raise UserError(f"data.dir: cannot write to {directory}: {error.strerror}") from None


def _fetch(corpus: Corpus, path: Path, say: Callable[[str], None]) -> None:
    """Has the corpus in the folder; one process fetches, the others wait."""
    directory = corpus.directory
    _make_directory(directory)
    try:
        with hold(directory / LOCK, say, f"fetches text into {directory}"):
            if not path.is_file():
                refuse_other_data(corpus)
                FETCHED[corpus.config.data.corpus].fetch(corpus.config, directory, say)
    except OSError as error:
        raise UserError(f"data.dir: cannot write to {directory}: {error.strerror}") from None


def _make(corpus: Corpus, digest: str, say: Callable[[str], None]) -> Prepared:
    """Prepares the data; this process holds the folder."""
    config, directory, section = corpus.config, corpus.directory, corpus.config.data.tokenizer
    trained = None
    partials: dict[str, Path] = {}

    def partial(name: str) -> Path:
        return partials.setdefault(name, directory / partial_name(name))

    try:
        if section.library == "sentencepiece" and section.path is None and section.vocab_size is not None:
            trained = directory / TRAINED
            say(f"training a SentencePiece model of {section.vocab_size} pieces")
            train_sentencepiece(_non_empty(corpus), section.vocab_size, partial(trained.name))
        tokenizer = load_tokenizer(config, partials.get(TRAINED))
        vocab_size = _checked_vocab_size(config, tokenizer)
        if config.data.data_path:
            counts = [check_indexed_dataset(prefix, vocab_size) for prefix in corpus.blend[0]]
            written, tokens = sum(count[0] for count in counts), sum(count[1] for count in counts)
        else:
            paths = partial("corpus.bin"), partial("corpus.idx")
            written, tokens = _write_indexed_dataset(corpus, tokenizer, vocab_size, *paths, say)
        begin_record(directory, digest)
        prepared = Prepared(
            corpus=corpus,
            tokenizer=str(trained) if trained else None,
            vocab_size=vocab_size,
            documents=written,
            tokens=tokens,
            digest=digest,
            files=put_in_place(directory, partials),
        )
        write_record(prepared)
    finally:
        for path in partials.values():
            with suppress(OSError):
                path.unlink(missing_ok=True)
    say(f"{tokens:,} tokens of {written:,} documents in {directory}")
    return prepared


def _tokens_bytes(corpus: Corpus) -> int:
    """What the tokens take, at a guess: three bytes of text are a token of two."""
    return 0 if corpus.config.data.data_path else sum(path.stat().st_size for path in corpus.files) * 2 // 3


def still_there(prepared: Prepared) -> None:
    """Asked once the files are open: whether they are those that were prepared.

    Raises:
        UserError: another run has prepared the folder for other settings meanwhile.
    """
    if read_record(prepared.corpus, prepared.digest) is None:
        raise UserError(
            f"data.dir: {prepared.corpus.directory} was prepared for other settings while this run started; expected a "
            "data.dir of its own for each of them"
        )


def prepared_tokenizer(config: Config, digest: str | None) -> Any:
    """The tokenizer that a run was trained with. Prepares nothing: the corpus may be gone.

    Args:
        config: the run.
        digest: of the data that it was trained on, as its checkpoints record it.

    Raises:
        UserError: the tokenizer is gone, or the folder was prepared anew for other data.
    """
    section = config.data.tokenizer
    if section.library != "sentencepiece" or section.path is not None:
        return load_tokenizer(config)
    directory = data_directory(config)
    trained, record = directory / TRAINED, directory / RECORD
    found = read_object(record).get("digest")
    if found is None or not trained.is_file():
        raise UserError(
            f"{trained}: the tokenizer that the run trained, with {RECORD} beside it, is gone; expected the run's "
            "data folder where it was, or a copy of it"
        )
    if found != digest:
        raise UserError(f"{record}: prepared anew for other data than the checkpoint was trained on")
    return load_tokenizer(config, trained)


def tokenizer_file(config: Config) -> Path | None:
    """What the run's tokenizer is read from: a file, a folder of transformers, or None for one that needs neither."""
    section = config.data.tokenizer
    if section.path is not None:
        return Path(section.path)
    return data_directory(config) / TRAINED if section.library == "sentencepiece" else None


def known_vocab_size(config: Config) -> int:
    """Entries of the tokenizer: from the config, else from prepared data, else from the tokenizer's own files.

    Raises:
        ConfigError: none of them tells it.
    """
    if config.vocab_size is not None:
        return config.vocab_size
    if config.data.tokenizer.path or config.data.tokenizer.library == "byte-level":
        return int(load_tokenizer(config).vocab_size)
    raise config.error("model.vocab_size", "missing; neither the config nor a tokenizer file tells the vocabulary")


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"data.dir: cannot write to {directory}: {error.strerror}") from None


def _digest(corpus: Corpus) -> str:
    """Hash of what decides the tokens: the data section, and name, size and time of change of every source file.

    Where the files lie is no part of it, so that the same data is found from every working directory.
    """
    config = corpus.config
    data = config.data.model_dump(exclude={"dir", "cache_dir", "split", "files", "data_path"})
    data["weights"] = corpus.blend[1]
    data["pairs"] |= dict.fromkeys(config.data.pairs.named, True)
    if path := config.data.tokenizer.path:
        if not Path(path).exists():
            raise config.error("data", no_such_file(Path(path)))
        data["tokenizer"]["path"] = tokenizer_digest(Path(path))
    stamps: list[tuple[str, int | str, int]] = []
    for file in corpus.files:
        try:
            stat = file.stat()
        except OSError:
            raise config.error("data", no_such_file(file)) from None
        stamps.append((file.name, stat.st_size, stat.st_mtime_ns if not config.data.corpus else 0))
    if corpus.fetched is not None:  # whichever Python read the packages
        stamps = [(corpus.fetched.name, sha256_of(corpus.fetched), 0)]
    version = sys.version if config.data.corpus == "stdlib" else ""
    tokens = _TOKENS_OF_CUT_FILES if corpus.cuts else _TOKENS
    return hashlib.sha256(json.dumps([tokens, data, stamps, version]).encode()).hexdigest()


def _non_empty(corpus: Corpus) -> list[str]:
    texts = [text for document in corpus.sequences() for text in document]
    if not texts:
        raise corpus.config.error("data", "the corpus is empty: no document has any text")
    return texts


def _checked_vocab_size(config: Config, tokenizer: Any) -> int:
    """The tokenizer's size, which a size in the config must equal: the record and `explain` rely on it."""
    size = int(tokenizer.vocab_size)
    for key, given in (
        ("model.vocab_size", config.model.vocab_size),
        ("data.tokenizer.vocab_size", config.data.tokenizer.vocab_size),
    ):
        if given is not None and given != size:
            raise config.error(key, f"{given} is not the tokenizer's {size}")
    if not isinstance(tokenizer.eod, int) or tokenizer.eod < 0:
        raise config.error("data.tokenizer", "the tokenizer has no end-of-document token")
    return size


def _write_indexed_dataset(
    corpus: Corpus, tokenizer: Any, vocab_size: int, data: Path, index: Path, say: Callable[[str], None]
) -> tuple[int, int]:
    """Writes the two files; returns documents and tokens. A pair is a document of two sequences."""
    import torch
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(data), dtype=DType.optimal_dtype(vocab_size))
    count = tokens = 0
    told = time.monotonic()
    with builder.data_file:  # upstream closes it in `finalize` alone
        for texts in corpus.sequences():
            found = [_tokens(corpus.config, tokenizer, text, vocab_size, count) for text in texts]
            ids = [token for sequence in found for token in sequence]
            builder.add_document(torch.tensor(ids, dtype=torch.int64), [len(sequence) for sequence in found])
            count, tokens = count + 1, tokens + len(ids)
            if time.monotonic() - told > 5:
                told = time.monotonic()
                say(f"tokenized {count:,} documents, {tokens:,} tokens")
        if not count:
            raise corpus.config.error("data", "the corpus is empty: no document has any text")
        builder.finalize(str(index))
    return count, tokens


def _tokens(config: Config, tokenizer: Any, text: str, vocab_size: int, number: int) -> list[int]:
    """A document's tokens and the one that ends it. Raises ConfigError where the tokenizer cannot read it."""
    try:
        ids = [*map(int, tokenizer.tokenize(text)), tokenizer.eod]
    except Exception as error:  # the libraries raise whatever they like; the null tokenizer reads numbers alone
        raise config.error(
            "data.tokenizer",
            f"{config.data.tokenizer.library} cannot read document {number}, which begins {shown(text[:40])} ({error})",
        ) from None
    if min(ids) < 0 or max(ids) >= vocab_size:
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise config.error(
            "data.tokenizer", f"makes token {wrong} of document {number}, and its vocabulary has {vocab_size} entries"
        )
    return ids
