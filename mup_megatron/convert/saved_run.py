"""A checkpoint as one process opens it, whatever wrote it: where it is, its config here, its tokenizer.

Public names: `SavedRun`, `open_run`, `config_here`, `find_checkpoint`, `tracked`, `check_same_tokenizer`, `TRACKER`.
`generate`, `evaluate` and `export` begin here. What `mup-megatron run` and a patched tree wrote is a checkpoint too:
Megatron's, with mup.json beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from mup_megatron.checkpoints.checkpoint import SUMS, Checkpoints
from mup_megatron.checkpoints.manifest import MANIFEST, CheckpointManifest
from mup_megatron.config import Config, Model, derive, parse_config
from mup_megatron.config.study import Tokenizer
from mup_megatron.data.prepare import prepared_tokenizer, tokenizer_file
from mup_megatron.data.tokenizer import tokenizer_digest
from mup_megatron.model.transformer_config import fuses_activation
from mup_megatron.parallel.runtime import computed_on_cuda
from mup_megatron.util.errors import UserError, shown
from mup_megatron.util.files import read_text

if TYPE_CHECKING:
    from mup_megatron.engines.saved_weights import SavedWeights

TRACKER = "latest_checkpointed_iteration.txt"
"""Where megatron.training says which checkpoint of a folder is the latest."""
_NO_TEXT = ("NullTokenizer", "NullMultimodalTokenizer")


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """A checkpoint that was found whole.

    Args:
        path: its folder.
        manifest: its mup.json.
        config: of one rank, whatever the run's layout was, with the run's folder where it is now.
        tokenizer: megatron-core's tokenizer object.
    """

    path: Path
    manifest: CheckpointManifest
    config: Config
    tokenizer: Any

    @property
    def fused_activation(self) -> bool:
        """Whether it was trained with bias and activation in one kernel, which makes GELU its tanh approximation."""
        if self.manifest.fused_activation is not None:
            return self.manifest.fused_activation
        return fuses_activation(self.config.model, cuda=computed_on_cuda(self.path))

    def weights(self) -> SavedWeights:
        """Its weights, to be read one by one. Raises UserError where its index is damaged."""
        from mup_megatron.engines.saved_weights import SavedWeights  # which imports megatron-core

        return SavedWeights(self.path, megatron=self.manifest.key_prefix)


def open_run(path: Path, tokenizer: str | None = None) -> SavedRun:
    """Finds a checkpoint and checks it by its checksums, which Megatron's checkpoints do not have.

    Args:
        path: a checkpoint's folder, the `checkpoints` folder of a run, or the run's folder (then the latest counts);
            of megatron.training what `--save` named, or an `iter_0000100` in it.
        tokenizer: `LIBRARY:PATH`, instead of the checkpoint's own; None takes that.

    Raises:
        UserError: no checkpoint is there, it is damaged, or its tokenizer is gone or of another vocabulary.
    """
    path = find_checkpoint(path)
    manifest = CheckpointManifest.read(path)
    config = config_here(manifest, path)
    if tokenizer is not None:
        config = derive(config, {"data.tokenizer": _tokenizer_section(tokenizer)})
    elif manifest.tokenizer_type not in (None, *_NO_TEXT) and config.data.tokenizer.library == "null":
        raise UserError(
            f"{path}: its tokenizer, Megatron's {manifest.tokenizer_type}, is not known here; expected "
            f"{_TOKENIZER_OPTION}"
        )
    loaded = prepared_tokenizer(config, manifest.data_digest)
    rows = config.model.padded_vocab_size(int(loaded.vocab_size))
    if manifest.vocabulary not in (None, rows):
        raise UserError(
            f"{path}: its embedding has {manifest.vocabulary} rows, and the tokenizer's {int(loaded.vocab_size)} "
            f"entries make {rows} of them; expected the run's tokenizer ({_TOKENIZER_OPTION})"
        )
    return SavedRun(path=path, manifest=manifest, config=config, tokenizer=loaded)


_TOKENIZER_OPTION = "--tokenizer LIBRARY:PATH"


def _tokenizer_section(text: str) -> dict[str, Any]:
    """What `--tokenizer` names. Raises UserError."""
    libraries = get_args(Tokenizer.model_fields["library"].annotation)
    library, _, path = text.partition(":")
    if library not in libraries or not (path or library == "byte-level"):
        raise UserError(f"--tokenizer: expected LIBRARY:PATH with one of {', '.join(libraries)}, found {shown(text)}")
    if library == "null":
        return {"library": library, "vocab_size": int(path) if path.isdecimal() else None}
    return {"library": library, "path": path or None}


def check_same_tokenizer(run: SavedRun) -> None:
    """Whether the tokenizer is the one that the model was trained with, as far as the checkpoint tells.

    Raises:
        UserError: it is another one; says which was expected.
    """
    trained, section = run.manifest.tokenizer, run.config.data.tokenizer
    if run.manifest.key_prefix is not None:
        return  # Megatron's words for it are not ours; `open_run` compared the vocabularies
    compared = ("library", "vocab_size") if section.library == "null" else ("library",)
    same = all(getattr(section, key) == trained[key] for key in compared if trained.get(key))
    expected = run.manifest.tokenizer_sha256
    file = tokenizer_file(run.config)
    if not same or (expected is not None and tokenizer_digest(file) != expected):
        raise UserError(
            f"{file or section.library}: another tokenizer than the one that {run.path} was trained with "
            f"({shown(trained.get('library'))}, {shown(trained.get('path') or 'trained on its corpus')}); expected that"
        )


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a folder is, or the latest that it holds; its files match their checksums.

    Raises:
        UserError: there is none, or it is damaged.
    """
    if not path.is_dir():
        raise UserError(f"{path}: no such folder; expected a checkpoint (step_00000100), or a run's folder")
    if megatron := _find_megatrons(path):
        return megatron
    if (path / SUMS).is_file():
        checkpoints, found = Checkpoints(path.parent, kept=1), [path]
    else:
        folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
        checkpoints = Checkpoints(folder, kept=1)
        found = checkpoints.newest_first()[:1]
    if not found:
        raise UserError(
            f"{path}: no checkpoint is here; expected a folder with {SUMS} in it, a run's folder, or its checkpoints"
        )
    problem = checkpoints.problem(found[0])
    if problem:
        raise UserError(f"{found[0]}: damaged ({problem}); an older checkpoint can be named instead")
    return found[0]


def tracked(folder: Path, *others: str) -> Path | None:
    """The checkpoint that megatron.training says is the latest of a folder; None where it says nothing.

    Args:
        folder: what `--save` named.
        others: what may stand there instead of a number.

    Raises:
        UserError: it says something else.
    """
    tracker = folder / TRACKER
    if not tracker.is_file():
        return None
    said = read_text(tracker, errors="replace").strip()
    if said in others:
        return folder / said
    if not (said.isdecimal() and said.isascii()):
        raise UserError(f"{tracker}: expected the number of an iteration, found {shown(said)}")
    return folder / f"iter_{int(said):07d}"


def _find_megatrons(path: Path) -> Path | None:
    """The checkpoint of megatron.training in µP that a folder is, or the latest that it holds; None if it is none.

    Raises:
        UserError: it holds one that was not written in µP, or not as torch's distributed checkpoint.
    """
    if (latest := tracked(path)) is not None:
        path = latest
        if not (path / MANIFEST).is_file():
            raise UserError(
                f"{path}: has no {MANIFEST}, so it was not written in µP; expected a checkpoint that mup-megatron run "
                "(or a patched tree) wrote"
            )
    elif not (path / MANIFEST).is_file() or (path / SUMS).exists():
        return None
    if CheckpointManifest.read(path).key_prefix is None:
        return None
    if not (path / ".metadata").is_file():
        raise UserError(
            f"{path}: holds no distributed checkpoint of torch; expected one written with --ckpt-format torch_dist"
        )
    return path


def config_here(manifest: CheckpointManifest, path: Path) -> Config:
    """The manifest's config for this process: one rank, what is installed here, the run's folder where it is now.

    Args:
        manifest: of a checkpoint.
        path: its folder.

    Raises:
        ConfigError: this version does not take it.
    """
    # How it was tuned is another run's business, and may hold what is refused today.
    config = parse_config({**manifest.config, "tuning": {}}, str(path / MANIFEST))
    keys: dict[str, Any] = {"parallel": {"engine": config.parallel.engine, "tensor_model_parallel_size": 1}}
    if {"apex", "transformer_engine"} & {getattr(config.model, key) for key in Model.PLAIN_KERNELS}:
        keys["model"] = config.model.with_plain_kernels.model_dump()  # compute the same, everywhere
    if path.resolve().parent.name == "checkpoints":
        run = path.resolve().parent.parent
        if path.parent.parent.resolve() == run:  # through no link, and not from inside
            run = path.parent.parent
        keys["run.dir"] = str(run)
        keys["data.dir"] = config.data.dir and str(run / config.data.dir)  # as checkpoints/manifest.py keeps it
    return derive(config, keys)
