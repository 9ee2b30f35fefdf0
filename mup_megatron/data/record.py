"""prepared.json: whose data a folder holds, and what its files are.

Public names: `Prepared`, `read_record`, `tokens_digest`, `begin_record`, `write_record`, `refuse_other_data`, `RECORD`,
`TRAINED`, `LOCK`, `FORMAT`. The record names files of its own folder, and no path: what it says is true from every
working directory.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mup_megatron.config import Config
from mup_megatron.data.corpus import Corpus, data_directory
from mup_megatron.data.whole import File, is_partial, write
from mup_megatron.util.errors import UserError
from mup_megatron.util.files import read_object

RECORD = "prepared.json"
TRAINED = "tokenizer.model"
LOCK = ".prepare.lock"
FORMAT = 3


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What `prepare` made or found.

    Args:
        corpus: of the run.
        tokenizer: path of the trained SentencePiece model, as seen from the working directory; None if the config names
            a tokenizer.
        vocab_size: entries of the tokenizer, before padding.
        documents: number of documents written; 0 for existing datasets.
        tokens: number of tokens, end-of-document tokens included.
        digest: of everything that decides which tokens come in which order.
        files: of those written here, size and SHA-256 by name; none of existing datasets, known by size and time.
    """

    corpus: Corpus
    tokenizer: str | None
    vocab_size: int
    documents: int
    tokens: int
    digest: str
    files: dict[str, File] = field(default_factory=dict)

    @property
    def blend(self) -> tuple[list[str], list[float] | None]:
        """megatron-core's prefixes, and weights or None, as seen from the working directory."""
        return self.corpus.blend


def read_record(corpus: Corpus, digest: str) -> Prepared | None:
    """What the folder's record says of these data; None where it is of others, not finished, or a file is gone."""
    record = read_object(corpus.directory / RECORD)
    if record.pop("format", None) != FORMAT or record.get("digest") != digest:
        return None
    try:
        files = {str(name): File(**file) for name, file in record.pop("files").items()}
        trained = str(corpus.directory / TRAINED) if TRAINED in files else None
        prepared = Prepared(corpus=corpus, tokenizer=trained, files=files, **record)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    whole = all(os.path.exists(prefix + suffix) for prefix in prepared.blend[0] for suffix in (".bin", ".idx"))
    return prepared if whole and (trained is None or os.path.exists(trained)) else None


def tokens_digest(config: Config) -> str | None:
    """SHA-256 of the prepared tokens; None of existing datasets, and before they are made."""
    files = read_object(data_directory(config) / RECORD).get("files", {})
    return files["corpus.bin"]["sha256"] if "corpus.bin" in files else None


def begin_record(directory: Path, digest: str) -> None:
    """Makes a folder this run's. The record names no files yet: of two sets of them, neither passes for the other."""
    write(directory / RECORD, json.dumps({"format": FORMAT, "digest": digest}))


def write_record(prepared: Prepared) -> None:
    """Writes what is prepared; without what the config says of it, which are paths."""
    said = {key: getattr(prepared, key) for key in ("vocab_size", "documents", "tokens", "digest")}
    files = {name: asdict(file) for name, file in prepared.files.items()}
    write(prepared.corpus.directory / RECORD, json.dumps({"format": FORMAT, **said, "files": files}, indent=2))


def refuse_other_data(corpus: Corpus, digest: str | None = None) -> None:
    """What a run was trained on is not replaced, nor is anything that `prepare` did not make.

    Args:
        corpus: of the run.
        digest: of its data; None before its text is fetched, when a record may be of the same data.

    Raises:
        UserError: the folder's record is of other data, or damaged; or a file is there, and no record.
    """
    directory, fetched = corpus.directory, corpus.fetched
    begun = (LOCK, *((fetched.name, f"{fetched.name}.partial") if fetched else ()))
    there = sorted(each.name for each in directory.iterdir() if each.is_file() and each.name not in begun)
    record = read_object(directory / RECORD)
    if RECORD not in there:
        strange = next((name for name in there if not is_partial(name)), None)
        if strange is None:
            return
        found = f"{strange}, and no {RECORD} says that it is this run's"
    elif "digest" not in record:
        found = f"a {RECORD} that is damaged"
    elif record.get("format") == FORMAT and digest in (None, record["digest"]):
        return
    else:
        found = "data that were prepared with other settings of data: or from source files that have changed"
    raise UserError(
        f"data.dir: {directory} holds {found}; expected another data.dir or run.dir, or that folder removed if no run "
        "needs it"
    )
