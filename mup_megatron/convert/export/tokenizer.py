"""The tokenizer of an export: its own file as it is, and what transformers reads, where that is the same tokenizer.

Public name: `tokenizer_files`. A tokenizer.json is written for SentencePiece's byte-pair models whose text is neither
normalised nor changed at its ends, as `mup-megatron prepare` trains them; of others only the file itself is exact.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mup_megatron.convert.saved_run import SavedRun
from mup_megatron.data.prepare import data_directory
from mup_megatron.data.tokenizer import HUGGING_FACE_FILES, MASK
from mup_megatron.util.files import read_bytes

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def tokenizer_files(run: SavedRun) -> tuple[dict[str, bytes], str | None]:
    """Files by name, and what to say where transformers cannot be given the tokenizer.

    Args:
        run: the checkpoint.
    """
    config = run.config
    library, path = config.data.tokenizer.library, config.data.tokenizer.path
    if library == "sentencepiece":
        content = read_bytes(Path(path) if path else data_directory(config) / "tokenizer.model")
        files = {"tokenizer.model": content}
        masks = bool(config.model.added_tokens)
        made = _as_tokenizers_json(content, int(run.tokenizer.eod), config.max_position_embeddings, masks=masks)
        if made is None:
            return files, (
                "warning: tokenizer.model is copied, but no tokenizer.json made of it: it changes text in ways that "
                "transformers may not; check what transformers makes of it"
            )
        return files | made, None
    if library == "huggingface" and path and Path(path).is_dir():
        found = [Path(path) / name for name in HUGGING_FACE_FILES]
        return {file.name: read_bytes(file) for file in found if file.is_file()}, None
    if library == "tiktoken" and path:
        return {"tokenizer.tiktoken": read_bytes(path)}, (
            "warning: the tokenizer's file is copied as tokenizer.tiktoken, which transformers does not read"
        )
    return {}, f"warning: transformers has no tokenizer of library {library}; the folder holds none"


def _as_tokenizers_json(content: bytes, eod: int, positions: int, *, masks: bool) -> dict[str, bytes] | None:
    """tokenizer.json and tokenizer_config.json of a SentencePiece model; None where they would not be the same.

    Args:
        content: of the .model file.
        eod: the token that ends documents, and after which they begin.
        positions: of the model.
        masks: whether the model has a mask, the entry after the tokenizer's own.
    """
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString(content)
    if not _is_plain(model):
        return None
    unknown, end = model.pieces[model.trainer_spec.unk_id].piece, model.pieces[eod].piece
    vocabulary = {piece.piece: number for number, piece in enumerate(model.pieces)}
    decoders = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(model),
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "unk_token": unknown,
            "byte_fallback": True,
            "fuse_unk": True,
            "vocab": vocabulary,
            "merges": _merges(model, vocabulary),
        },
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end,
        "eos_token": end,
        "unk_token": unknown,
        "model_max_length": positions,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,  # in a text `</s>` is four signs, as it was in training
    }
    if masks:
        # Spaces before a mask are the masked token's own, as in `generate`.
        mask = {**_added(len(model.pieces), MASK, special=True), "lstrip": True}
        tokenizer["added_tokens"] = [*_added_tokens(model), mask]
        tokenizer["post_processor"] = _between_ends(end, eod)
        inputs = ["input_ids", "token_type_ids", "attention_mask"]
        settings |= {"mask_token": MASK, "split_special_tokens": False, "model_input_names": inputs}
    return {"tokenizer.json": _json(tokenizer), "tokenizer_config.json": _json(settings)}


def _between_ends(end: str, eod: int) -> dict[str, Any]:
    """What puts a text, or two segments, between ends of documents, as data/masked.py does."""
    ends = [{"SpecialToken": {"id": end, "type_id": kind}} for kind in (0, 1)]
    first, second = ({"Sequence": {"id": name, "type_id": kind}} for kind, name in enumerate("AB"))
    single = [ends[0], first, ends[0]]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, second, ends[1]],
        "special_tokens": {end: {"id": end, "ids": [eod], "tokens": [end]}},
    }


def _is_plain(model: Any) -> bool:
    """Whether it makes byte pairs of text as it is."""
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    return bool(
        trainer.model_type == trainer.BPE
        and trainer.byte_fallback
        and not trainer.treat_whitespace_as_suffix
        and not normalizer.precompiled_charsmap
        and not normalizer.add_dummy_prefix
        and not normalizer.remove_extra_whitespaces
        and normalizer.escape_whitespaces
    )


def _added_tokens(model: Any) -> list[dict[str, Any]]:
    """The pieces that text is never cut within."""
    kinds = model.SentencePiece
    return [
        _added(number, piece.piece, special=piece.type != kinds.USER_DEFINED)
        for number, piece in enumerate(model.pieces)
        if piece.type in (kinds.UNKNOWN, kinds.CONTROL, kinds.USER_DEFINED)
    ]


def _added(number: int, content: str, *, special: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, "special": special, **plain}


def _merges(model: Any, vocabulary: Mapping[str, int]) -> list[list[str]]:
    """Pairs in the order in which they are merged.

    SentencePiece merges the pair whose union has the highest score, the tokenizers library the pair that comes first in
    a list: unions by score, and of one union the pairs by their parts.
    """
    normal = {piece.piece: piece.score for piece in model.pieces if piece.type == model.SentencePiece.NORMAL}
    merges = []
    for union in sorted((text for text in normal if len(text) > 1), key=lambda text: -normal[text]):
        pairs = [[union[:cut], union[cut:]] for cut in range(1, len(union))]
        known = [pair for pair in pairs if pair[0] in normal and pair[1] in normal]
        merges += sorted(known, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
    return merges


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()
