"""`mup-megatron new`: a folder to start from, with a config whose base and proxy follow the paper's advice.

Public names: `Target`, `proxy_of`, `config_text`, `write_folder`. The advice is that of Tensor Programs V, appendix D:
width 256, depth 4, head size 32, 5000 steps, each at least.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mup_megatron.config import parse_config, parse_yaml
from mup_megatron.config.reference import SCHEMA_FILE, START, schema_text
from mup_megatron.data.corpus import text_files
from mup_megatron.tuning.space import STEPS, WIDTH
from mup_megatron.util.encoding import encoding_problem
from mup_megatron.util.errors import UserError
from mup_megatron.util.files import write_whole
from mup_megatron.util.shipped import shipped_folder

_TUNING_BATCH = 256
_LEAST_SHARE = 0.5


class Target(NamedTuple):
    """The model that is to be trained in the end, and on what.

    Args:
        name: of the run.
        architecture: gpt3 or llama.
        num_layers: transformer layers.
        hidden_size: width.
        num_attention_heads: query heads; their size is hidden_size / heads in the proxy too.
        num_query_groups: key/value heads; as many as query heads where None.
        ffn_hidden_size: of the MLP.
        vocab_size: that a SentencePiece tokenizer is trained to.
        seq_length: tokens per sequence.
        global_batch_size: sequences per step.
        train_steps: optimizer steps.
        files: own text, files or folders, as seen from the new folder; the Python standard library's source where there
            is none.
    """

    name: str
    architecture: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int | None
    ffn_hidden_size: int
    vocab_size: int
    seq_length: int
    global_batch_size: int
    train_steps: int
    files: tuple[str, ...] = ()

    @property
    def head_size(self) -> int:
        """Of queries and keys, the same in proxy and target."""
        return self.hidden_size // self.num_attention_heads


class Proxy(NamedTuple):
    """The model that is tuned: as deep as the target, narrower.

    Args:
        hidden_size: width.
        ffn_hidden_size: of the MLP.
        num_attention_heads: query heads.
        num_query_groups: key/value heads, None as in the target.
    """

    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int | None


def proxy_of(target: Target) -> Proxy:
    """The narrowest model of width 256 or more with the target's head size, heads per KV head and FFN ratio.

    Where the target itself is hardly wider, the narrowest that has a quarter of its width.

    Raises:
        UserError: heads do not divide the width, KV heads not the heads, or nothing narrower is left.
    """
    heads, groups = target.num_attention_heads, target.num_query_groups
    if target.hidden_size % heads:
        raise UserError(f"--heads: {heads} does not divide --hidden-size {target.hidden_size}")
    if groups is not None and heads % groups:
        raise UserError(f"--kv-heads: {groups} does not divide --heads {heads}")
    step = heads // groups if groups else 1
    narrower = [count for count in range(step, heads, step) if heads % count == 0]
    least = WIDTH if target.hidden_size > WIDTH else target.hidden_size / 4
    chosen = next((count for count in narrower if count * target.head_size >= least), None)
    if chosen is None:
        raise UserError(
            f"--heads: no proxy is narrower than {target.hidden_size} with heads of {target.head_size} elements, "
            f"{step} per KV head; expected more heads, or more KV heads"
        )
    size = chosen * target.head_size
    ffn = max(1, round(target.ffn_hidden_size * size / target.hidden_size))
    return Proxy(size, ffn, chosen, None if groups is None else chosen // step)


_CONFIG = """\
# yaml-language-server: $schema={schema}
# The keys with a comment behind them are those to think about first: mup-megatron config --start
# The others follow from them, or are good to begin with. What a key does: mup-megatron config KEY
run: {{name: {target.name}, dir: runs/{target.name}, samples: [The]}}

model:
  architecture: {target.architecture:<21} # {about[model.architecture]}
  num_layers: {target.num_layers:<23} # {about[model.num_layers]}
  hidden_size: {target.hidden_size:<22} # {about[model.hidden_size]}
  ffn_hidden_size: {target.ffn_hidden_size}
  num_attention_heads: {target.num_attention_heads}{groups}

# Base: the sizes where hyperparameters are defined. What is named here grows to the target, what is not is fixed.
#   width  {narrow} (Tensor Programs V, appendix D)
#   heads  of the target's size, {target.head_size}; as many query heads per KV head as there
#   FFN    in the target's ratio to the width
#   depth  the target's, {target.num_layers} layers: transfer over width is proven best.{shallow}
base:
  hidden_size: {proxy.hidden_size:<22} # {about[base.hidden_size]}
  ffn_hidden_size: {proxy.ffn_hidden_size}
  num_attention_heads: {proxy.num_attention_heads}{base_groups}
# Proxy: what is tuned. The base itself: its values then need no conversion.
proxy: {sizes}

# At the base. Tuning replaces what tuning.search names.
hparams: {{lr: 5.0e-3, weight_decay: 0.1}}

training:
  global_batch_size: {target.global_batch_size:<16} # {about[training.global_batch_size]}
  micro_batch_size: {micro}
  seq_length: {target.seq_length:<23} # {about[training.seq_length]}
  train_steps: {target.train_steps:<22} # {about[training.train_steps]}
  lr_warmup_steps: {warm_up}
  min_lr_ratio: 0.1
  log_interval: {log_every}
  eval_interval: {every}
  checkpoint_interval: {every}

# {said}
data:
  {source:<35} # {text}
  tokenizer:
    vocab_size: {target.vocab_size:<21} # {about[data.tokenizer.vocab_size]}

# Trials are {trial}.
tuning:
  trials: 16                          # {about[tuning.trials]}
  sampler: quasi_random{others}
  search:
    lr: {{log_uniform: [5.0e-4, 5.0e-2]}}
    init_method_std: {{log_uniform: [0.005, 0.1]}}
    output_multiplier: {{log_uniform: [0.25, 16]}}
    per_tensor.embedding.lr: {{log_uniform: [1, 32]}}
"""


def config_text(target: Target, max_compute_share: float = _LEAST_SHARE) -> str:
    """The config, commented.

    Args:
        target: what to train.
        max_compute_share: of tuning over the target's training.

    Raises:
        UserError: there is no proxy.
    """
    proxy = proxy_of(target)
    sizes = (f"{name}: {size}" for name, size in proxy._asdict().items() if size is not None)
    steps = min(target.train_steps, max(STEPS, target.train_steps // 10))
    every = max(1, target.train_steps // 10)
    others = _shorter(target, steps)
    if max_compute_share > _LEAST_SHARE:  # the smaller the target, the larger
        others["max_compute_share"] = f"{max_compute_share:g}"
    return _CONFIG.format(
        schema=SCHEMA_FILE,
        target=target,
        groups="" if target.num_query_groups is None else f"\n  num_query_groups: {target.num_query_groups}",
        about=START,
        proxy=proxy,
        base_groups="" if proxy.num_query_groups is None else f"\n  num_query_groups: {proxy.num_query_groups}",
        sizes=f"{{{', '.join(sizes)}}}",
        narrow=f"at least {WIDTH} wide, below which the best values still move with width"
        if proxy.hidden_size >= WIDTH
        else f"below the paper's {WIDTH}, as the target is hardly wider; the best values may still move with width",
        shallow="" if target.num_layers >= 4 else " The paper advises 4 or more.",
        micro=math.gcd(target.global_batch_size, 8),
        warm_up=target.train_steps // 50,
        every=every,
        log_every=max(1, every // 10),
        text=START["data.files"] if target.files else "in place of data.files, your own text",
        source=f"files: {json.dumps(target.files, ensure_ascii=False)}" if target.files else "corpus: stdlib",
        said="Your text: a line of a .jsonl is a document, a single .txt is cut into documents."
        if target.files
        else "The Python standard library's source. For your own text: files: [my.txt] in place of corpus.",
        others="".join(f"\n  {key}: {value}" for key, value in others.items()),
        trial=f"a tenth of the target's length, and not below the paper's {STEPS}"
        if steps < target.train_steps
        else f"as long as the target; the paper advises {STEPS} or more",
    )


def _shorter(target: Target, steps: int) -> dict[str, int | str]:
    """Keys of `tuning:` in which a trial differs from the target's run."""
    found: dict[str, int | str] = {} if steps == target.train_steps else {"train_steps": steps}
    if target.global_batch_size > _TUNING_BATCH:
        found |= {"global_batch_size": _TUNING_BATCH, "micro_batch_size": math.gcd(_TUNING_BATCH, 8)}
    return found


def write_folder(directory: Path, target: Target) -> float:
    """Writes config.yaml, the JSON schema that it names and launch/ into a new folder.

    Args:
        directory: that is not there yet, or empty.
        target: what to train.

    Returns:
        What tuning will cost, over the target's training.

    Raises:
        UserError: there is no proxy, the config is refused, or the folder holds something.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"{directory}: is there already; expected a new or an empty folder")
    share = _share(target)
    allowed = max(_LEAST_SHARE, math.ceil(share * 10) / 10)
    text = config_text(target, allowed)
    parse_config(parse_yaml(text, "config.yaml"), "config.yaml")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_whole(directory / "config.yaml", text)
        write_whole(directory / SCHEMA_FILE, schema_text())
        shutil.copytree(shipped_folder("launch"), directory / "launch", ignore=shutil.ignore_patterns("__*__*"))
    except OSError as error:
        raise UserError(f"{directory}: cannot write: {error.strerror}") from None
    return share


def _share(target: Target) -> float:
    """Compute of tuning over that of the target's training."""
    from mup_megatron.parallel import upstream

    upstream.prepare_process()
    from mup_megatron.engines.setup.auto import resolve_auto
    from mup_megatron.tuning import budget

    config = parse_config(parse_yaml(config_text(target), "config.yaml"), "config.yaml")
    return float(budget.plan(resolve_auto(config), target.vocab_size, workers=1).share)


def seen_from(directory: Path, named: Sequence[str]) -> tuple[str, ...]:
    """Files, or folders of text, as paths from a folder that may not be there yet.

    Raises:
        UserError: one is missing, without text, or text that is no UTF-8; the text is read for it.
    """
    for each in named:
        try:
            files = text_files(Path(each))
            problem = next(filter(None, map(encoding_problem, files)), None)
            if not any(file.stat().st_size for file in files):
                problem = f"{each}: holds no text"
        except UserError as error:
            problem = str(error)
        except OSError as error:
            problem = f"cannot read {error.filename}: {error.strerror}"
        if problem is not None:
            raise UserError(f"--text: {problem}")
    return tuple(os.path.relpath(Path(each).resolve(), directory.resolve()) for each in named)
