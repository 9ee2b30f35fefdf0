"""The schema of a run's config: proxy, target, data, tuning and launch in a single YAML file.

Its sections are in model.py, training.py and study.py; section.py says how a key is described.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

from pydantic import PrivateAttr

from mup_megatron.config.model import FAMILIES, PRESETS, Base, Growth, Model
from mup_megatron.config.section import Section
from mup_megatron.config.study import Data, Range, Run, Slurm, Tokenizer, Tuning, Watch
from mup_megatron.config.training import Hparams, Optimizer, Parallel, ParametrizationSection, Training
from mup_megatron.util.errors import ConfigError

__all__ = [
    "PRESETS",
    "Base",
    "Config",
    "Data",
    "Growth",
    "Hparams",
    "Model",
    "Optimizer",
    "Parallel",
    "ParametrizationSection",
    "Range",
    "Run",
    "Section",
    "Slurm",
    "Tokenizer",
    "Training",
    "Tuning",
    "Watch",
]


class Config(Section):
    """A whole run."""

    run: Run
    """Where the run lives."""
    model: Model
    """The target model."""
    base: Base = Base()
    """The sizes where hyperparameters are defined; what is named here grows."""
    proxy: Growth = Growth()
    """The sizes of the model that is tuned, where they differ from the base's; only keys of `base:`."""
    parametrization: ParametrizationSection = ParametrizationSection()
    """Which rules scale init, rates, epsilon, decay and multipliers with the sizes."""
    hparams: Hparams
    """Hyperparameters at the base; tuning replaces those that it searches."""
    training: Training
    """Batch, length, schedule, precision and intervals."""
    optimizer: Optimizer = Optimizer()
    """The update rule."""
    parallel: Parallel = Parallel()
    """The engine, and how it splits the model over ranks."""
    data: Data = Data(corpus="stdlib")
    """Text and tokenizer."""
    tuning: Tuning = Tuning()
    """The search for hyperparameters on the proxy."""
    watch: Watch = Watch()
    """What is done when a run does not look as its proxy did."""
    slurm: Slurm = Slurm()
    """What jobs ask SLURM for."""
    _source: str | None = PrivateAttr(default=None)
    _overrides: frozenset[str] = PrivateAttr(default=frozenset())

    @property
    def num_layers_base(self) -> int:
        """Depth of the base model; the target's own unless `base.num_layers` is declared."""
        return self.base.num_layers or self.model.num_layers

    @property
    def proxy_model(self) -> Model:
        """The model that is tuned: the base, with the sizes that `proxy:` names."""
        return self.model.resized(self.base).resized(self.proxy)

    @property
    def max_position_embeddings(self) -> int:
        """Positions of the model: the sequence length unless set, of two the longer."""
        training = self.training
        return self.model.max_position_embeddings or max(training.seq_length, training.decoder_length)

    @property
    def weighs_gradients(self) -> bool:
        """Whether the norm that clips is not the plain one of the gradients that an engine has, but weighted."""
        return self.training.clip_norm == "invariant" or self.parametrization.scaling == "unit"

    @property
    def weighing_key(self) -> str:
        """The key that asks for it, with its value, for messages."""
        return "training.clip_norm: invariant" if self.training.clip_norm == "invariant" else "scaling: unit"

    @property
    def experts_ratio(self) -> Fraction:
        """Experts in a layer over the base's; 1 where their number does not grow."""
        base = self.base.num_moe_experts
        return Fraction(self.model.num_moe_experts or base, base) if base is not None else Fraction(1)

    @property
    def steps_matrices(self) -> bool:
        """Whether the optimizer is one of megatron-core's for matrices inside the blocks alone; AdamW steps the rest.

        DeepSpeed's Lion steps every tensor.
        """
        name, engine = self.optimizer.name, self.parallel.engine
        return name in ("muon", "soap") or (name == "lion" and engine == "megatron")

    @property
    def batch_ratio(self) -> Fraction:
        """Tokens of a step over those of a trial's step, where hyperparameters are found."""
        tuning, training = self.tuning, self.training
        sequences = tuning.global_batch_size or training.global_batch_size
        sample = self._sample_tokens(tuning.seq_length or training.seq_length)
        return Fraction(training.global_batch_size * self.sample_tokens, sequences * sample)

    @property
    def tokens_ratio(self) -> Fraction:
        """Tokens of the run over those of a trial."""
        steps = self.tuning.train_steps or self.training.train_steps
        return self.batch_ratio * Fraction(self.training.train_steps, steps)

    @property
    def sample_tokens(self) -> int:
        """Tokens of a sample: of a sequence, or of a source and its target, what pads included."""
        return self._sample_tokens(self.training.seq_length)

    def _sample_tokens(self, length: int) -> int:
        """The same where sequences, or sources, are of another length."""
        return length + ((self.training.decoder_seq_length or length) if self.data.of_pairs else 0)

    @property
    def vocab_size(self) -> int | None:
        """Vocabulary before padding, as far as the config itself tells it."""
        return self.model.vocab_size or self.data.tokenizer.vocab_size

    @property
    def record_path(self) -> Path:
        """Where the transfer record lies: `tuning.record`, else transfer.json in the run's folder."""
        return Path(self.tuning.record or Path(self.run.dir) / "transfer.json")

    @property
    def band_path(self) -> Path:
        """Where the band lies: `watch.band`, else beside the transfer record."""
        return Path(self.watch.band) if self.watch.band else self.record_path.with_suffix(".band.json")

    @property
    def source(self) -> str | None:
        """The file that this was read from, for messages and relative paths."""
        return self._source

    def is_overridden(self, key: str) -> bool:
        """Whether a dotted key was given beside the file (`key.path=value`), by itself or with its section."""
        return any(key == given or key.startswith(given + ".") for given in self._overrides)

    def needs_gpt(self, what: str) -> None:
        """Refuses a model that does not predict the next token, for what only such a model has.

        Args:
            what: that only such a model has; the subject of the message.

        Raises:
            ConfigError: the model is of another family.
        """
        if self.model.family != "gpt":
            architectures = " or ".join(name for name, family in FAMILIES.items() if family == "gpt")
            raise self.error(
                "model.architecture",
                f"{what} needs a model that predicts the next token, and {self.model.architecture} does not; "
                f"expected {architectures}",
            )

    def needs_plain_weights(self, what: str) -> None:
        """Refuses weights that are stored at unit scale, for what knows no such weights.

        Args:
            what: that knows none; the subject of the message.

        Raises:
            ConfigError: they are.
        """
        if self.parametrization.scaling != "none":
            raise self.error(
                "parametrization.scaling",
                f"{what} knows no weights that are stored at {self.parametrization.scaling} scale; expected none",
            )

    def error(self, key: str, problem: str) -> ConfigError:
        """The error to raise for `key` of this config."""
        return ConfigError(key, problem, self._source)
