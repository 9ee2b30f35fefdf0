"""Training, validation and test text: which documents each takes by `data.split`, and whether each has enough.

Public names: `part_bounds`, `is_left_empty`, `empty_part`, `needs_validation`, `pairs_that_fit`, `check_parts`,
`times_read`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate

import numpy as np

from mup_megatron.config import Config

_NAMES = ("training", "validation", "test")


def part_bounds(split: str, documents: int) -> list[tuple[int, int]]:
    """First document of each part and the one after its last, as megatron-core rounds them.

    Args:
        split: shares of training, validation and test, such as "98,2,0".
        documents: of the data set.
    """
    shares = _shares(split)
    shares += [0.0] * (len(_NAMES) - len(shares))
    ends = [round(end * documents) for end in accumulate(share / sum(shares) for share in shares)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def is_left_empty(split: str, documents: int) -> bool:
    """Whether a part that has a share gets no document."""
    bounds = part_bounds(split, documents)
    return any(share and start == stop for share, (start, stop) in zip(_shares(split), bounds, strict=False))


def _shares(split: str) -> list[float]:
    return [float(share) for share in split.split(",")]


def needs_validation(config: Config) -> bool:
    """Whether anything is evaluated: the target, or trials."""
    return bool(config.training.eval_interval or (config.tuning.search and config.tuning.run != "never"))


def pairs_that_fit(lengths: np.ndarray, source: int, target: int) -> np.ndarray:
    """Which pairs are no longer than the model's sequences: [n] bool.

    Args:
        lengths: [2n] tokens of sources and targets in turn, each with its end.
        source: training.seq_length.
        target: training.decoder_length.
    """
    return np.all(lengths.reshape(-1, 2) <= (source, target), axis=1)


def check_parts(
    config: Config, prefixes: Iterable[str], *, validation: bool, say: Callable[[str], None] = lambda _line: None
) -> None:
    """Whether every data set has training text, and validation text where it is needed.

    Args:
        config: the run.
        prefixes: of its data sets (`Prepared.blend[0]`).
        validation: whether anything is evaluated.
        say: takes a line about pairs that are left out.

    Raises:
        ConfigError: names the part and what would be enough.
    """
    for prefix in prefixes:
        lengths = _lengths(prefix)
        documents = lengths.reshape(-1, 2).sum(axis=1) if config.data.of_pairs else lengths
        for name, (start, stop) in zip(_NAMES, part_bounds(config.data.split, len(documents)), strict=True):
            if name == "test" or (name == "validation" and not validation):
                continue
            if not documents[start:stop].sum():
                raise config.error("data.split", empty_part(config, name, len(documents), f" in {prefix}"))
            if config.data.of_pairs:
                _check_lengths(config, lengths[2 * start : 2 * stop], name, say)


def times_read(config: Config, prefixes: Iterable[str]) -> float:
    """How often a run reads its training text: its tokens, or pairs, over those that there are.

    Args:
        config: the run.
        prefixes: of its data sets (`Prepared.blend[0]`), of which every one is taken to be read as often.
    """
    training, there = config.training, 0
    for prefix in prefixes:
        lengths = _lengths(prefix)
        documents = len(lengths) // 2 if config.data.of_pairs else len(lengths)
        start, stop = part_bounds(config.data.split, documents)[0]
        there += stop - start if config.data.of_pairs else int(lengths[start:stop].sum())
    samples = training.train_steps * training.global_batch_size
    return samples * (1 if config.data.of_pairs else training.seq_length) / max(1, there)


def _lengths(prefix: str) -> np.ndarray:
    """Tokens of every sequence of a data set."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(prefix)
    return dataset.sequence_lengths.copy()  # the dataset unmaps its file when it goes


def _check_lengths(config: Config, lengths: np.ndarray, name: str, say: Callable[[str], None]) -> None:
    """Whether any pair of a part fits, and how many do not."""
    limits = (config.training.seq_length, config.training.decoder_length)
    fits = pairs_that_fit(lengths, *limits)
    what = f"longer than training.seq_length {limits[0]} or training.decoder_seq_length {limits[1]} tokens"
    if not fits.any():
        source, target = lengths.reshape(-1, 2).min(axis=0)
        raise config.error(
            "training.seq_length",
            f"every one of the {len(fits):,} {name} pairs is {what}; the shortest source has {source}, the shortest "
            f"target {target}",
        )
    if not fits.all():
        say(f"{int((~fits).sum()):,} of {len(fits):,} {name} pairs are {what}, and left out")


def empty_part(config: Config, name: str, documents: int, where: str = "") -> str:
    """The sentence about a part that gets no text, with what would give it some."""
    number, split = _NAMES.index(name), config.data.split
    shares = _shares(split)

    def is_empty(count: int) -> bool:
        start, stop = part_bounds(split, count)[number]
        return start == stop

    if number >= len(shares) or not shares[number]:
        way = "a share for it, such as 98,2,0"
    else:
        enough = next((count for count in range(1, 10_000) if not is_empty(count)), documents)
        way = f"{enough} documents or more" if enough > documents else "documents that hold text"
        if 1 < documents < enough and name == "validation":
            larger = ("95,5,0", "90,10,0", "80,20,0", "50,50,0")  # the first with a document or more in both parts
            way += f", or a larger share, such as {next(one for one in larger if not is_left_empty(one, documents))}"
    return f"{split} leaves no {name} text of the {documents} documents{where}; expected {way}"
