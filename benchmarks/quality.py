"""What transferred values are worth on a task: figure 6 of Tensor Programs V in small.

    python -m benchmarks.quality --output docs/evidence/quality        (configs/proof/quality.yaml; runs/quality)

Three models train on the same text, for as many steps: the target in µP with the values that a search on the proxy
found; the same target in the standard parametrization with the values that GPT-3 used for its smallest model (table
2.1 and appendix B of arXiv 2005.14165); and a model of twice the parameters with those. Each is judged with
`mup-megatron evaluate` on documents that none has read. The text is `data.corpus: english`; every 15th of its documents
is held out, and the tasks are made of those. Runs that were stopped go on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mup_megatron.config import load_config
from mup_megatron.data.english import ENGLISH
from mup_megatron.report.pictures import load_pyplot, save_figure
from mup_megatron.util.files import sha256_of
from mup_megatron.util.provenance import provenance

CONFIG = "configs/proof/quality.yaml"
RUNS = Path("runs/quality")
HELD_OUT = 15
GPT3 = {"hparams.lr": 6.0e-4, "hparams.init_method_std": 0.02, "hparams.weight_decay": 0.1}
"""Of GPT-3's smallest model. Betas, clipping and the cosine to a tenth are the config's own, which are GPT-3's too."""
TWICE = {"model.hidden_size": 192, "model.num_attention_heads": 6}
"""With the embedding of 2,048 tokens and 4 layers, 2.05 times the parameters."""
MODELS: dict[str, dict[str, Any]] = {
    "transferred": {},
    "defaults": {"parametrization.name": "standard", **GPT3},
    "defaults, twice the parameters": {"parametrization.name": "standard", **GPT3, **TWICE},
}
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


def _mup_megatron(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "mup_megatron", *arguments], check=True)  # noqa: S603


def judge(name: str, keys: dict[str, Any], seed: int) -> dict[str, Any]:
    """Trains one model, unless that was done, and gives the figures of `mup-megatron evaluate`."""
    run = RUNS / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}"
    values = _transferred() if name == "transferred" else keys
    given = {**values, "run.dir": str(run), "run.seed": seed}
    _mup_megatron("train", CONFIG, *(f"{key}={value}" for key, value in given.items()))
    figures = run / "figures.json"
    if not figures.exists():
        files = [
            text for option, file in TASKS.items() for text in (f"--{option}", str(RUNS / "text" / f"{file}.jsonl"))
        ]
        _mup_megatron("evaluate", str(run), *files, "--batch-size", "32", "--output", str(figures))
    found: dict[str, Any] = json.loads(figures.read_text(encoding="utf-8"))
    return {"model": name, "seed": seed, "values": values, "figures": found}


def _transferred() -> dict[str, Any]:
    """The values of the search on the proxy, which is made first."""
    record = RUNS / "mup" / "transfer.json"
    if not record.is_file():
        _mup_megatron("tune", CONFIG)
    found: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
    return {f"hparams.{name}": found["values"][name] for name in found["tuned"]}


FIGURES = {
    "bits per byte": ("perplexity", "bits_per_byte", -1),
    "last word, %": ("last_word", "accuracy", 1),
    "multiple choice, %": ("choice", "accuracy_per_character", 1),
}
"""What is compared: task, figure, and whether more (1) or less (-1) is better."""


def figure_of(run: dict[str, Any], name: str) -> float:
    """One figure of one run."""
    task, metric, _ = FIGURES[name]
    value: float = next(found["metrics"][metric] for found in run["figures"]["results"] if found["task"] == task)
    return value if metric == "bits_per_byte" else 100 * value


def means(runs: Sequence[dict[str, Any]], name: str) -> dict[str, float]:
    """A figure of each model, the mean over seeds."""
    return {model: statistics.fmean(figure_of(run, name) for run in runs if run["model"] == model) for model in MODELS}


def reasons(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Where the transferred values are not better than either of the others; empty where they are on every figure."""
    found = []
    for name, (_, _, sign) in FIGURES.items():
        mean = means(runs, name)
        for other in list(MODELS)[1:]:
            if sign * mean["transferred"] <= sign * mean[other]:
                found.append(f"{name}: {mean['transferred']:.2f}, and {mean[other]:.2f} with {other}")
    return found


def draw(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Every figure of every model, the mean over seeds as a bar and each seed as a point."""
    pyplot = load_pyplot()
    figure, places = pyplot.subplots(1, len(FIGURES), figsize=(9, 3.2), layout="constrained")
    colors = pyplot.get_cmap("tab10")
    for axes, (name, (_, _, sign)) in zip(places, FIGURES.items(), strict=True):
        for at, (model, mean) in enumerate(means(runs, name).items()):
            seeds = [figure_of(run, name) for run in runs if run["model"] == model]
            axes.bar(at, mean, color=colors(at), alpha=0.75, label=model)
            axes.plot([at] * len(seeds), seeds, "o", color="0.2", ms=3.5)
        axes.set_title(f"{name} ({'more' if sign > 0 else 'less'} is better)", loc="left", fontsize=9)
        axes.set_xticks([])
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        *places[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=9
    )
    save_figure(figure, path)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains, evaluates, prints, writes quality.json and quality.png."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--tasks", type=int, default=1000, help="passages that the tasks are made of")
    parser.add_argument("--output", type=Path, required=True)
    asked = parser.parse_args(arguments)
    make_text(RUNS / "text", asked.tasks)
    runs = [judge(name, keys, seed) for seed in range(1, asked.seeds + 1) for name, keys in MODELS.items()]
    found = reasons(runs)
    result = {
        "provenance": provenance(sha256_of(RUNS / "text" / "train.jsonl")),
        "seeds": asked.seeds,
        "steps": load_config(CONFIG).training.train_steps,
        "passed": not found,
        "reasons": found,
        "runs": runs,
    }
    for name in FIGURES:
        print(f"{name}: " + ", ".join(f"{model} {mean:.3f}" for model, mean in means(runs, name).items()))
    print("passed" if not found else f"failed: {'; '.join(found)}")
    asked.output.mkdir(parents=True, exist_ok=True)
    (asked.output / "quality.json").write_text(json.dumps(result) + "\n", encoding="utf-8")
    draw(runs, asked.output / "quality.png")
    return 0 if not found else 1


if __name__ == "__main__":
    sys.exit(main())
