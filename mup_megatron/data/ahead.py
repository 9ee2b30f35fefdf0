"""What is wrong with a run's data, as far as it shows before anything is prepared: for `plan`.

Public name: `problem_ahead`.
"""

from __future__ import annotations

from mup_megatron.config import Config
from mup_megatron.data.corpus import Corpus
from mup_megatron.data.index import check_indexed_dataset
from mup_megatron.data.parts import empty_part, needs_validation, part_bounds
from mup_megatron.data.prepare import known_vocab_size
from mup_megatron.util.errors import UserError

_READ_BYTES = 64 * 2**20
"""Of text that is read for it; a larger corpus is only looked for."""


def problem_ahead(config: Config) -> str | None:
    """What `prepare`, or the first trial, would refuse; None if nothing shows.

    Reads a small corpus whole, tokenizes and writes nothing.

    Args:
        config: the run; where it tunes or evaluates, there must be validation text.
    """
    corpus = Corpus(config)
    try:
        if config.data.data_path:
            vocab_size = known_vocab_size(config)
            counts = [check_indexed_dataset(prefix, vocab_size)[0] for prefix in corpus.blend[0]]
        else:
            if corpus.fetched is not None and not corpus.fetched.exists():
                return None  # only `prepare` fetches it
            sizes = [path.stat().st_size for path in corpus.files]
            if sum(sizes) > _READ_BYTES:
                return None
            corpus.check_encoding()
            counts = [sum(1 for _ in corpus.sequences())]
    except UserError as error:
        return str(error)
    for count in counts:
        if not count:
            return "data: the corpus is empty: no document has any text"
        bounds = part_bounds(config.data.split, count)
        for name, (start, stop) in list(zip(("training", "validation"), bounds, strict=False))[
            : 1 + needs_validation(config)
        ]:
            if start == stop:
                return f"data.split: {empty_part(config, name, count)}"
    return None
