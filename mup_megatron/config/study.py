"""The sections around training: `run:`, `data:`, `tuning:` and `slurm:`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mup_megatron.config.section import (
    OFF,
    NonNegative,
    Positive,
    PositiveFloat,
    Ranks,
    Repetitions,
    Section,
    Seed,
    Size,
    Width,
)


class Run(Section):
    """Where a run lives, which random numbers it draws, and the Weights & Biases project that it also reports to."""

    name: str = "run"
    """Name in pictures, in SLURM's queue and in the study."""
    dir: str
    """Folder of everything that the run writes; the same command in the same folder goes on."""
    seed: Seed = 1234
    """Decides initial weights, order of the text, dropout and trials. Unit: a seed."""
    samples: list[str] = []
    """Prompts that the model goes on from, with the most likely tokens, at every evaluation of the target: printed and
    kept in samples.jsonl. An empty prompt begins a document. A token takes one evaluation pass, for all prompts."""
    audit: Annotated[Literal["stop", "warn", "off"], OFF] = "stop"
    """What is done where a tensor has another initial value, group, rate, epsilon, decay or update than the table says,
    at the first step that moves anything, of the run and after a resume: the run stops before the next step and names
    the tensor (`stop`), or says so and goes on (`warn`); or nobody looks (`off`). audit.json has every number."""
    telemetry_interval: NonNegative | None = None
    """After how many steps sizes of outputs, weights, gradients and updates, attention and routers are measured, beside
    the first step and the last; telemetry.jsonl has them, and TensorBoard. At 0 never. If unset: 100, or a thousandth
    of `training.train_steps` where that is more. Unit: steps."""
    wandb_project: str | None = None
    """Weights & Biases project that curves are also sent to; the key stays in WANDB_API_KEY. If unset: none."""


class Watch(Section):
    """What is done when a run's readings leave the band that the proxy's best runs had (docs/watching.md)."""

    action: Annotated[Literal["warn", "save", "stop", "off"], OFF] = "warn"
    """What an alarm does: it is said (`warn`), said behind a checkpoint of the step (`save`), or the run is saved and
    ends with exit status 4 (`stop`); or nobody looks (`off`). alarms.jsonl has every alarm."""
    band: str | None = None
    """File of the band that tuning wrote beside a transfer record. If unset: the one beside the run's own record, if
    it is there; without one only what is wrong by itself is seen."""


class Tokenizer(Section):
    """A tokenizer of any library that megatron-core knows; SentencePiece is trained when no path is given."""

    library: Literal["sentencepiece", "huggingface", "tiktoken", "byte-level", "null"] = "sentencepiece"
    """Whose tokenizer it is. `byte-level` needs no file; `null` reads numbers as tokens."""
    path: str | None = None
    """File or folder of an existing tokenizer. If unset: SentencePiece is trained on the corpus; huggingface and
    tiktoken need it."""
    vocab_size: Width | None = None
    """Entries of the vocabulary; what SentencePiece is trained to. If unset: what the tokenizer at `path` has.
    Unit: tokens."""


class Pairs(Section):
    """Aligned text, source and target, for an encoder-decoder: two text files, or one of JSON lines."""

    source: str | None = None
    """UTF-8 text that the encoder reads, a sentence per line. If unset: `jsonl` is given."""
    target: str | None = None
    """UTF-8 text that the decoder learns to write, line by line that of `source`. If unset: `jsonl` is given."""
    jsonl: str | None = None
    """File of JSON lines, each with both texts. If unset: `source` and `target` are given."""
    source_key: str = "source"
    """Key of the encoder's text in each line of `jsonl`."""
    target_key: str = "target"
    """Key of the decoder's text in each line of `jsonl`."""

    @property
    def named(self) -> list[str]:
        """Which files are given."""
        return [key for key in ("source", "target", "jsonl") if getattr(self, key) is not None]


class Data(Section):
    """Where the text comes from: one of `files` (your own text), `data_path` (Megatron datasets), `pairs`, `corpus`."""

    corpus: Literal["stdlib", "english", "libreoffice-help"] | None = None
    """A corpus that needs no file of yours: `stdlib` is the Python standard library's source; `english` is a book, a
    dictionary and a program's help from Debian packages, which `apt-get download` fetches (50 MB; needs a network, no
    root); `libreoffice-help` is pairs, German and English paragraphs of two such packages (5 MB). If unset: `files`,
    `data_path` or `pairs` is given; where there is no `data:` section at all, `stdlib`."""
    files: list[str] = []
    """Your own text: UTF-8 files, relative to the working directory, or folders, of which every .txt, .md, .jsonl and
    .json counts, sorted by path. A line of a .jsonl or .json file is a document, any other file is one. Only where that
    leaves a part of `split` empty (a single .txt, a few of them) is each file cut into about a hundred documents, at
    paragraphs, and nothing is lost."""
    json_key: str = "text"
    """Key of the text in each line of a .jsonl file."""
    data_path: list[str | float | int] = []
    """Existing Megatron datasets: path prefixes (without .bin and .idx), or weights and prefixes in turn.
    Unit: a weight."""
    pairs: Pairs = Pairs()
    """Your own aligned text, for an encoder-decoder."""
    split: str = "98,2,0"
    """Shares of the documents, or pairs, for training, validation and test, in the order in which they come."""
    dir: str | None = None
    """Folder of the trained tokenizer and the indexed dataset; runs may share it. If unset: run.dir/data."""
    cache_dir: str | None = None
    """Folder of megatron-core's index of samples. If unset: `cache` in the data folder."""
    tokenizer: Tokenizer = Tokenizer()
    """How text becomes tokens."""

    @property
    def of_pairs(self) -> bool:
        """Whether a document is a source and its target."""
        return bool(self.pairs.named) or self.corpus == "libreoffice-help"


class Range(Section):
    """One dimension of the search space; exactly one of the three keys."""

    log_uniform: Annotated[list[float], Field(min_length=2, max_length=2)] | None = None
    """Smallest and largest value, drawn uniformly in the logarithm. If unset: another key is given.
    Unit: the hyperparameter's."""
    uniform: Annotated[list[float], Field(min_length=2, max_length=2)] | None = None
    """Smallest and largest value, drawn uniformly. If unset: another key is given. Unit: the hyperparameter's."""
    choice: Annotated[list[float | str], Field(min_length=1)] | None = None
    """Values to choose among; the grid sampler tries all. If unset: another key is given.
    Unit: the hyperparameter's."""

    @property
    def named(self) -> list[float] | list[float | str]:
        """The values that it names, ends or choices."""
        return self.log_uniform or self.uniform or self.choice or []


class CoordinateDescent(Section):
    """After the joint search: one hyperparameter after the other is moved around the best trial, and stays where its
    loss is better beyond noise."""

    trials: Repetitions = 0
    """Most trials of this stage, repetitions with other seeds included; 0 leaves the stage out. Unit: trials."""
    factor: Annotated[float, Field(gt=1, le=1e6)] = 2.0
    """What a value of a log_uniform range is multiplied and divided by. The step along a uniform range is an eighth of
    it at 2, two eighths at 4. Of `choice` the next values are tried. Unit: a ratio."""
    rounds: Annotated[int, Field(gt=0, le=20)] = 1
    """How often all hyperparameters are gone through; the second time with the root of `factor`, and so on.
    Unit: rounds."""


class Tuning(Section):
    """How the proxy is tuned: its trials, when they stop early, where the study and its record live."""

    run: Literal["auto", "never", "only"] = "auto"
    """`auto` tunes where the transfer record is missing, `never` takes the record, or `hparams:` where `record` names
    none and none is there, `only` stops after the record."""
    record: str | None = None
    """Path of the transfer record; configs of one family share it. If unset: run.dir/transfer.json."""
    ladder: str | None = None
    """Path of the ladder.json of a ladder over batch and tokens (mup-megatron ladder), from which the rules `fitted`
    of `parametrization:` take their exponents, and the loss of the target is predicted; from the working directory. If
    unset: what the transfer record holds of one, if anything."""
    allow_extrapolated_ladder: bool = False
    """Whether a ladder's exponents are also taken for a target more than 8 times beyond its largest or smallest rung in
    batch or tokens."""
    allow_failed_ladder: bool = False
    """Whether the exponents of a ladder are also taken where its laws did not tell its largest rung."""
    trials: Ranks = 16
    """Points of the search space that are tried, without repetitions. Unit: trials."""
    sampler: Literal["random", "quasi_random", "tpe", "grid"] = "random"
    """How points are chosen: `random` draws, `quasi_random` covers every range evenly (a scrambled Sobol sequence; best
    with 8, 16, 32, ... trials), `tpe` (Tree-structured Parzen Estimator) learns from trials that ended,
    `grid` goes through all combinations of `choice`."""
    objective: Literal["loss", "bleu"] = "loss"
    """What trials are compared by: the evaluation `loss`, or `bleu` of training.eval_translations validation pairs.
    A study looks for the smallest number, so `loss` in its files is then 100 - BLEU; people are shown BLEU."""
    pruner: Literal["hyperband", "successive_halving", "none"] = "successive_halving"
    """When trials stop early: at steps/r², rounded down, and at r times as many, unless among the best 1/r so far
    (`successive_halving`), the same in three brackets (`hyperband`), or never."""
    reduction_factor: Annotated[int, Field(ge=2)] = 2
    """r of the pruner. Unit: a ratio."""
    repeat_best: Repetitions = 2
    """Best trials that are trained again with other seeds. Unit: trials."""
    repeat_seeds: Repetitions = 2
    """Other seeds per repeated trial; the mean over seeds decides. Unit: seeds."""
    descent: CoordinateDescent = CoordinateDescent()
    """Coordinate descent after the joint search: the embedding's rate first, then other kinds of `hparams.per_tensor`,
    then the rest of `search`."""
    train_steps: Positive | None = None
    """Length of a trial; the schedule is stretched to it. If unset: training.train_steps. Unit: optimizer steps."""
    global_batch_size: Positive | None = None
    """Sequences per step of a trial. If unset: training.global_batch_size. Unit: sequences."""
    seq_length: Width | None = None
    """Tokens per sequence of a trial. If unset: training.seq_length. Unit: tokens."""
    micro_batch_size: Positive | None = None
    """Sequences that a trial computes at once. If unset: training.micro_batch_size. Unit: sequences."""
    max_compute_share: PositiveFloat = 0.5
    """Largest compute of tuning over that of the target's training; more is refused. Unit: a ratio of FLOPs."""
    trials_per_device: Size = 1
    """Trials that one worker runs at the same time, on its GPU or its share of the cores. `auto` begins with one and
    doubles as long as all of them together do 1.2 times the steps of before and fit into nine tenths of the memory; on
    CPUs a trial then has one thread. Several on one GPU take turns unless CUDA's Multi-Process Service runs.
    Unit: trials."""
    hang_timeout: Positive = 600
    """A trial whose process takes no step for as long is ended and tried once more. Unit: seconds."""
    lease_timeout: Positive = 60
    """A worker of `tune --join` that is silent for as long loses its trial to the others. Unit: seconds."""
    storage: str = "journal"
    """Where the study is kept: `journal` is a file in run.dir/tuning, else a database's URL without a secret."""
    command: list[str] = []
    """Command line of a run of megatron.training, with its launcher: trials are this one with the proxy's sizes and
    their values in it, as `tune --megatron` writes it. If empty, this project's engine trains the proxy."""
    prior: str | None = None
    """Values to begin at: the path (from the working directory) of the transfer record of an earlier search, of any
    model, or `hparams` for those of `hparams:`, defaults too. They are the first trial. If unset: none."""
    prior_factor: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 16.0
    """How far from the values of `tuning.prior` a log_uniform range goes: down to their value divided by this, up to
    their value times this. Unit: a factor."""
    search: dict[str, Range] = {}
    """What is tuned: names of `hparams:`, lr_schedule, one_minus_beta1, one_minus_beta2 or one_minus_momentum (1 less
    one of optimizer.betas, or optimizer.momentum), each with one of log_uniform, uniform and choice."""


class Slurm(Section):
    """What the jobs of launch/slurm ask for; SBATCH_* variables of the environment come before it, as in SLURM."""

    nodes: Ranks = 1
    """Nodes of the target's job. Unit: nodes."""
    gpus_per_node: Repetitions = 8
    """GPUs that each node gives; 0 on nodes without GPUs. Unit: GPUs."""
    processes_per_node: Ranks | None = None
    """Ranks of the target, and workers of the study, per node. If unset: gpus_per_node. Unit: processes."""
    tuning_jobs: Ranks | None = None
    """Jobs of the tuning array, one node each. If unset: as many as the trials keep busy, at most `nodes`.
    Unit: jobs."""
    time: str = "24:00:00"
    """Time limit of each job, as sbatch takes it; a longer run requeues itself. Unit: hours:minutes:seconds."""
    partition: str | None = None
    """Partition of the jobs. If unset: the cluster's default."""
    account: str | None = None
    """Account of the jobs. If unset: the user's default."""
    container_image: str | None = None
    """Image that the ranks run in (pyxis): a file or a registry's name. If unset: no container."""
    container_mounts: list[str] = []
    """Further mounts of the container, HOST:CONTAINER; the working directory is always mounted."""
    modules: list[str] = []
    """Environment modules that each job loads first."""
    signal_seconds: Positive = 300
    """How long before the time limit a run saves; more than two steps and a checkpoint take. Unit: seconds."""
    retries: NonNegative = 3
    """How often in a row a job requeues itself without a new checkpoint or trial. Unit: times."""
