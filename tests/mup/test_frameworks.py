"""The examples of docs/hugging-face.md, run as they stand: Trainer, Accelerate, Lightning.

Each must leave the weights that a plain loop leaves, with the same groups. Batches are all alike, so that no order of
samples matters.
"""

from __future__ import annotations

import runpy
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from mup_megatron import mup as ours

transformers = pytest.importorskip(
    "transformers", minversion="5.0", reason="Hugging Face's transformers 5 is not installed"
)
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # of the frameworks themselves
    pytest.mark.slow,
]

STEPS = 4


def config(width: int) -> Any:
    return transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=width,
        intermediate_size=2 * width,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_hidden_layers=1,
        bos_token_id=0,
        eos_token_id=0,
    )


def build() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config(128)).train()


def sample() -> dict[str, torch.Tensor]:
    ids = torch.randint(64, (16,), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def run(repository: Path, name: str, tmp_path: Path, change: tuple[str, str] = ("", "")) -> dict[str, Any]:
    """The names that a block leaves behind."""
    text = (repository / "docs" / "hugging-face.md").read_text()
    _, _, rest = text.partition(f"<!-- test: {name} -->\n\n")
    lines = []
    for line in rest.splitlines():
        if line and not line.startswith("    "):
            break
        lines.append(line)
    code = textwrap.dedent("\n".join(lines))
    assert change[0] in code
    batches: Any = [sample()] * (8 * STEPS)
    names = {
        "torch": torch,
        "model": build(),
        "base_config": config(32),
        "directory": str(tmp_path),
        "dataset": [sample()] * 32,
        "loader": torch.utils.data.DataLoader(batches, batch_size=8),
    }
    (tmp_path / "example.py").write_text(code.replace(*change))
    return runpy.run_path(str(tmp_path / "example.py"), names)


def by_hand(build_optimizer: Any, schedule: Any) -> dict[str, torch.Tensor]:
    model = ours.prepare_hf(build(), config(32))
    optimizer = build_optimizer(model)
    scheduler = schedule(optimizer)
    batch = {key: value.repeat(8, 1) for key, value in sample().items()}
    for _ in range(STEPS):
        model(**batch).loss.backward()
        ours.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


def linear(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=STEPS)


def trainers_schedule(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (STEPS - step) / STEPS)


def trainers_optimizer(model: Any) -> Any:
    decayed = [p for name, p in model.named_parameters() if "norm" not in name]
    others = [p for name, p in model.named_parameters() if "norm" in name]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(ours.optim.split_groups(groups, "adam", {"lr": 1e-2}, eps=1e-8), lr=1e-2)


def different(found: Any, expected: dict[str, torch.Tensor]) -> list[str]:
    names = dict(found.named_parameters())
    assert names.keys() == expected.keys()
    return [name for name in names if not torch.allclose(names[name], expected[name], rtol=1e-5, atol=1e-7)]


def test_trainer(repository: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate, which is not installed")
    names = run(repository, "trainer", tmp_path)
    trained = names["trainer"].model
    assert different(trained, by_hand(trainers_optimizer, trainers_schedule)) == []
    # m = 4, heads of 16 to 64: 1/m, and half of it in the queries.
    rate = {id(p): group["initial_lr"] for group in names["trainer"].optimizer.param_groups for p in group["params"]}
    rates = {name: rate[id(p)] for name, p in trained.named_parameters()}
    assert rates["lm_head.weight"] == rates["model.layers.0.mlp.up_proj.weight"] == 1e-2 / 4
    assert rates["model.layers.0.self_attn.q_proj.weight"] == 1e-2 / 8
    assert rates["model.embed_tokens.weight"] == 1e-2
    # What it saved is a plain model, and training goes on from it as if it had never stopped.
    saved = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    batch = sample()["input_ids"][None]
    with torch.no_grad():
        assert torch.equal(saved.eval()(batch).logits, trained.eval()(batch).logits)
    again = names["MuTrainer"](
        model=ours.prepare_hf(build(), config(32)), args=names["arguments"], train_dataset=names["dataset"]
    )
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert different(again.model, dict(trained.named_parameters())) == []


def test_trainers_own_groups_are_not_mups(repository: Path, tmp_path: Path) -> None:
    """Negative control: without the split every tensor with another rate is elsewhere."""
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate, which is not installed")
    change = ("            split_in_place(self.model, self.optimizer)\n", "")
    names = run(repository, "trainer", tmp_path, change)
    wrong = different(names["trainer"].model, by_hand(trainers_optimizer, trainers_schedule))
    assert "lm_head.weight" in wrong
    assert "model.layers.0.self_attn.q_proj.weight" in wrong


def test_accelerate(repository: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    names = run(repository, "accelerate", tmp_path)
    unwrapped = names["accelerator"].unwrap_model(names["model"])
    expected = by_hand(lambda model: ours.MuAdamW(model.parameters(), lr=1e-2), linear)
    assert different(unwrapped, expected) == []


def test_lightning(repository: Path, tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed")
    names = run(repository, "lightning", tmp_path)
    groups = [group["initial_lr"] for group in names["trainer"].optimizers[0].param_groups if group["params"]]
    assert max(groups) == 8 * min(groups)
    expected = by_hand(lambda model: ours.MuAdamW(model.parameters(), lr=1e-2), linear)
    assert different(names["module"].model, expected) == []
