"""What transferred values are worth on a task: figure 6 of Tensor Programs V in small.

    python -m benchmarks.quality --output docs/evidence/quality        (configs/proof/quality.yaml; runs/quality)

Models of two sizes train on the same text, for as many steps: in µP with the values that a search on the proxy found;
in the standard parametrization with GPT-3's values and the rate that a search of that very model found; and with the
rate that GPT-3 used for its smallest model (table 2.1 and appendix B of arXiv 2005.14165). Each is judged with
`mup-megatron evaluate` on documents that none has read. The text is `data.corpus: english`; every 15th of its documents
is held out, and the tasks are made of those. Runs that were stopped go on.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.evidence.records import Difference, difference
from mup_megatron.config import load_config
from mup_megatron.data.english import ENGLISH
from mup_megatron.report.pictures import load_pyplot, save_figure
from mup_megatron.util.files import sha256_of
from mup_megatron.util.provenance import provenance

CONFIG = "configs/proof/quality.yaml"
RUNS = Path("runs/quality")
HELD_OUT = 15
STANDARD = {"parametrization.name": "standard", "hparams.init_method_std": 0.02, "hparams.weight_decay": 0.1}
"""With GPT-3's values. Betas, clipping and the cosine to a tenth are the config's own, which are GPT-3's too."""
GPT3_RATE = 6.0e-4
RATES = "{lr: {choice: [1.0e-3, 2.0e-3, 4.0e-3, 8.0e-3]}}"
"""What the searches of the models themselves go through."""
KINDS = ("transferred", "tuned", "defaults")
TWICE = ", twice the parameters"
SIZES = {"": (128, 4), TWICE: (192, 6)}
"""Hidden size and heads. With the embedding of 2,048 tokens and 4 layers, the second has 2.05 times the parameters."""
MODELS = tuple(f"{kind}{size}" for size in SIZES for kind in KINDS)
_WORDS, _ENDING, _ENDINGS = 40, 8, 4
"""Words of a passage and of the ending that is asked for, and endings to choose from."""
_CHARACTERS = 240
"""Longer passages are left out, and those with many signs, so that every task fits into the positions of the model."""
TASKS = {"perplexity": "held_out", "last-word": "last_word", "choice": "choice"}
"""Options of `mup-megatron evaluate`, and the file that each reads."""


def passages(documents: Sequence[str]) -> Iterator[list[str]]:
    """Every paragraph cut into passages of as many words; short rests, long words and repeats are left out."""
    seen: set[str] = set()
    for paragraph in (each for document in documents for each in document.split("\n\n")):
        every = paragraph.split()
        for start in range(0, len(every) - _WORDS + 1, _WORDS):
            words = every[start : start + _WORDS]
            text = " ".join(words)
            prose = sum(each.isalpha() or each.isspace() for each in text) >= 0.9 * len(text)
            if len(text) <= _CHARACTERS and prose and text not in seen:
                seen.add(text)
                yield words


def last_words(found: Sequence[list[str]]) -> list[dict[str, Any]]:
    """Each passage up to a last word of letters alone, which is asked for."""
    ends = (max((at for at, word in enumerate(words) if word.isalpha()), default=0) for words in found)
    return [{"text": " ".join(words[: end + 1])} for words, end in zip(found, ends, strict=True) if end >= _WORDS // 2]


def choices(found: Sequence[list[str]]) -> list[dict[str, Any]]:
    """Each passage's own ending among those of the passages after it; its place follows from the text's checksum."""
    endings = [" ".join(words[-_ENDING:]) for words in found]
    lines = []
    for number, words in enumerate(found):
        wrong = [endings[(number + step) % len(found)] for step in range(1, _ENDINGS)]
        context = " ".join(words[:-_ENDING])
        label = hashlib.sha256(context.encode()).digest()[0] % _ENDINGS
        wrong.insert(label, endings[number])
        lines.append({"context": context, "endings": wrong, "label": label})
    return lines


def _write(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """A file that is right already stays as it is: prepared data belong to it."""
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def make_text(folder: Path, tasks: int) -> None:
    """Fetches the corpus, unless it is there, and writes the text to train on and the files of the tasks."""
    folder.mkdir(parents=True, exist_ok=True)
    config = load_config(CONFIG)
    path = folder / ENGLISH.file
    if not path.is_file():
        ENGLISH.fetch(config, folder, print)
    documents = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
    held = documents[::HELD_OUT]
    found = list(passages(held))[:tasks]
    _write(folder / "held_out.jsonl", [{"text": text} for text in held])
    _write(folder / "last_word.jsonl", last_words(found))
    _write(folder / "choice.jsonl", choices(found))
    _write(folder / "train.jsonl", [{"text": text} for at, text in enumerate(documents) if at % HELD_OUT])


def mup_megatron(*arguments: str) -> None:
    """Runs the command line."""
    subprocess.run([sys.executable, "-m", "mup_megatron", *arguments], check=True)  # noqa: S603


def overrides_of(values: Mapping[str, Any]) -> list[str]:
    """Overrides of a config, as the command line takes them."""
    return [f"{key}={value}" for key, value in values.items()]


def _size(model: str) -> tuple[int, int]:
    return SIZES[model[len(model.partition(",")[0]) :]]


def searched(model: str, workers: int) -> dict[str, Any] | None:
    """Values that a search found, which is made first, and its compute; None for the defaults, which no search found.

    The transferred ones, of both sizes, are the proxy's.
    """
    if model.startswith("defaults"):
        return None
    given: dict[str, Any] = {"run.dir": RUNS / "mup"}
    if model.startswith("tuned"):
        hidden, heads = _size(model)
        given = {
            "run.dir": RUNS / f"tuned-{hidden}",
            **STANDARD,
            **{f"{part}.hidden_size": hidden for part in ("model", "proxy")},
            **{f"{part}.num_attention_heads": heads for part in ("model", "proxy")},
            "tuning.sampler": "grid",
            "tuning.trials": 4,
            "tuning.search": RATES,
        }
    record = given["run.dir"] / "transfer.json"
    if not record.is_file():
        mup_megatron("tune", CONFIG, *overrides_of(given), "--nproc-per-node", str(workers))
    found: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
    values = {f"hparams.{name}": found["values"][name] for name in found["tuned"]}
    budget = found["budget"]
    return {
        "values": values,
        "interior": found["study"]["interior"],
        "trials": budget["trials"],
        "flops": budget["spent"]["flops"],
        "flops_of_a_run": budget["target"]["flops"],
    }


def judge(model: str, found: Mapping[str, Any] | None, seed: int) -> dict[str, Any]:
    """Trains one model, unless that was done, and gives the figures of `mup-megatron evaluate`."""
    hidden, heads = _size(model)
    values: dict[str, Any] = {"model.hidden_size": hidden, "model.num_attention_heads": heads}
    values |= {} if model.startswith("transferred") else STANDARD
    values |= {"hparams.lr": GPT3_RATE} if found is None else found["values"]
    run = RUNS / f"{model.replace(', ', '-').replace(' ', '-')}-{seed}"
    figures = run / "figures.json"
    if not figures.exists():
        mup_megatron("train", CONFIG, *overrides_of({**values, "run.dir": run, "run.seed": seed}))
        files = [
            text for option, file in TASKS.items() for text in (f"--{option}", str(RUNS / "text" / f"{file}.jsonl"))
        ]
        mup_megatron("evaluate", str(run), *files, "--batch-size", "32", "--output", str(figures))
    return {
        "model": model,
        "seed": seed,
        "values": values,
        "figures": json.loads(figures.read_text(encoding="utf-8")),
    }


BITS = "bits per byte"
FIGURES = {
    BITS: ("perplexity", "bits_per_byte"),
    "last word, %": ("last_word", "accuracy"),
    "multiple choice, %": ("choice", "accuracy"),
    "per character, %": ("choice", "accuracy_per_character"),
    "per token, %": ("choice", "accuracy_per_token"),
}
"""All that is measured: task and figure. Of bits, less is better; of the others, more."""


def figures_of(runs: Sequence[dict[str, Any]], model: str, name: str) -> list[float]:
    """One figure of a model, of each seed in order."""
    task, metric = FIGURES[name]
    own = sorted((run for run in runs if run["model"] == model), key=lambda run: run["seed"])
    found = (next(each["metrics"] for each in run["figures"]["results"] if each["task"] == task) for run in own)
    return [metrics[metric] * (1 if name == BITS else 100) for metrics in found]


def error_of(runs: Sequence[dict[str, Any]], name: str) -> float:
    """The largest standard error of an accuracy, in points, which comes from its examples."""
    task, metric = FIGURES[name]
    found = (each["metrics"] for run in runs for each in run["figures"]["results"] if each["task"] == task)
    return max(100 * metrics[f"{metric}_error"] for metrics in found)


def ahead(runs: Sequence[dict[str, Any]], one: str, other: str) -> Difference:
    """Bits per byte by which the first model is above the second, over the seeds."""
    return difference(*(figures_of(runs, model, BITS) for model in (one, other)))


def judged(runs: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """By bits per byte: where the transferred values of a size are not better than its others, and what is open."""
    found: dict[str, list[str]] = {"reasons": [], "open": []}
    for size, kind in itertools.product(SIZES, KINDS[1:]):
        apart = ahead(runs, f"transferred{size}", f"{kind}{size}")
        if apart.sign >= 0:
            said = f"transferred{size} against {kind}: {apart} bits per byte"
            found["reasons" if apart.sign else "open"].append(said)
    return found


def draw(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Every figure of every model, the mean over seeds as a bar and each seed as a point."""
    pyplot = load_pyplot()
    figure, places = pyplot.subplots(1, len(FIGURES), figsize=(12, 3.2), layout="constrained")
    colors = pyplot.get_cmap("tab20")
    for axes, name in zip(places, FIGURES, strict=True):
        for at, model in enumerate(MODELS):
            seeds, kind = figures_of(runs, model, name), at % len(KINDS)
            error = None if name == BITS else error_of(runs, name)
            color = colors(2 * kind + at // len(KINDS))
            axes.bar(at, statistics.fmean(seeds), color=color, yerr=error, ecolor="0.6", label=model)
            axes.plot([at] * len(seeds), seeds, "o", color="0.2", ms=3)
        axes.set_title(f"{name} ({'less' if name == BITS else 'more'} is better)", loc="left", fontsize=8)
        axes.set_xticks([])
        axes.spines[["top", "right"]].set_visible(False)
    values = [value for model in MODELS for value in figures_of(runs, model, BITS)]
    places[0].set_ylim(bottom=min(values) - (max(values) - min(values)) / 2)  # none ends at 0
    figure.legend(
        *places[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=9
    )
    save_figure(figure, path)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains, evaluates, prints, writes quality.json and quality.png."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tasks", type=int, default=1000, help="passages that the tasks are made of")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time")
    parser.add_argument("--output", type=Path, required=True)
    asked = parser.parse_args(arguments)
    make_text(RUNS / "text", asked.tasks)
    found = {model: searched(model, asked.workers) for model in MODELS}
    with concurrent.futures.ThreadPoolExecutor(asked.workers) as pool:
        asks = [(model, seed) for seed in range(1, asked.seeds + 1) for model in MODELS]
        runs = list(pool.map(lambda ask: judge(ask[0], found[ask[0]], ask[1]), asks))
    said = judged(runs)
    result = {
        "provenance": provenance(sha256_of(RUNS / "text" / "train.jsonl")),
        "seeds": asked.seeds,
        "steps": load_config(CONFIG).training.train_steps,
        "passed": not said["reasons"] and not said["open"],
        "verdict": "failed" if said["reasons"] else "undecided" if said["open"] else "passed",
        **said,
        "searches": found,
        "runs": runs,
    }
    for name in FIGURES:
        means = (f"{model} {statistics.fmean(figures_of(runs, model, name)):.3f}" for model in MODELS)
        print(f"{name}: {', '.join(means)}")
    print("; ".join([result["verdict"], *said["reasons"], *said["open"]]))
    asked.output.mkdir(parents=True, exist_ok=True)
    (asked.output / "quality.json").write_text(json.dumps(result) + "\n", encoding="utf-8")
    draw(runs, asked.output / "quality.png")
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
