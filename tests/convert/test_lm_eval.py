"""lm-evaluation-harness on an exported folder, offline: docs/export.md's task file over local JSON lines.

The harness has some fifty dependencies and is not installed with the tests; docs/export.md says what it measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mup_megatron.convert.export import export_hugging_face
from tests.convert.sources import Trained, own_model

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # of the harness
    pytest.mark.slow,
]
DOCUMENTS = [
    {"context": "import torch", "continuation": "\nimport sys"},
    {"context": "def main(", "continuation": "self, path):\n    return"},
    {"context": "for name in", "continuation": " names:"},
]


def evaluate(repository: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Log-likelihood of each continuation, by the harness."""
    for variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    lm_eval: Any = pytest.importorskip("lm_eval", reason="lm-evaluation-harness (lm-eval) is not installed")
    from lm_eval.tasks import TaskManager  # type: ignore[import-not-found, import-untyped, unused-ignore]

    tasks = tmp_path / "tasks"
    tasks.mkdir(exist_ok=True)
    data = tasks / "documents.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    _, _, block = (repository / "docs" / "export.md").read_text().partition("<!-- test: lm_eval -->\n\n")
    lines = []
    for line in block.splitlines():
        if line and not line.startswith("    "):
            break
        lines.append(line[4:])
    (tasks / "local.yaml").write_text("\n".join(lines).replace("documents.jsonl", str(data)))
    found = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(folder), "dtype": "float32"},
        tasks=["local_continuations"],
        task_manager=TaskManager(include_path=str(tasks)),
        device="cpu",
        batch_size=1,
        log_samples=True,
        bootstrap_iters=0,
    )
    samples = sorted(found["samples"]["local_continuations"], key=lambda sample: sample["doc_id"])
    assert [sample["doc"] for sample in samples] == DOCUMENTS
    return [float(sample["filtered_resps"][0][0]) for sample in samples]


def own(one: Trained) -> list[float]:
    """The same from the logits of megatron-core's model, without transformers and the harness."""
    tokenizer, result = one.source.run.tokenizer, []
    with own_model(one.source) as model, torch.no_grad():
        for document in DOCUMENTS:
            context = tokenizer.tokenize(document["context"])
            whole = tokenizer.tokenize(document["context"] + document["continuation"])
            assert whole[: len(context)] == context
            size = len(whole)
            mask = torch.ones(size, size, dtype=torch.bool).triu(1)[None, None]
            logits = model(torch.tensor([whole]), torch.arange(size)[None], mask)[0, :, : one.source.vocabulary]
            scores = logits.double().log_softmax(-1)
            result.append(sum(scores[i - 1, whole[i]].item() for i in range(len(context), size)))
    return result


def test_the_harness_computes_what_the_checkpoint_does(
    repository: Path, trained: Callable[[str], Trained], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trained("llama, untied")
    folder = tmp_path / "hf"
    export_hugging_face(one.source, folder)
    expected = own(one)
    found = evaluate(repository, folder, tmp_path, monkeypatch)
    print(found, expected)
    assert found == pytest.approx(expected, rel=1e-5)
    # Negative control: the head without its factor, 3/2, is another model.
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] /= 1.5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    wrong = evaluate(repository, folder, tmp_path, monkeypatch)
    assert all(abs(a / b - 1) > 1e-2 for a, b in zip(wrong, expected, strict=True)), (wrong, expected)
