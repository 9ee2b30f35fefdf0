"""A script's own loop: megatron-core's optimizer has groups in µP there too, and an optimizer of its own is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mup_megatron.megatron_training.models import needs_groups
from tests.helpers import megatron_runs
from tests.helpers.distributed import Ranks
from tests.helpers.installed import needs_training

SCRIPT = Path(__file__).parent / "own_loop.py"


@needs_training
def test_megatron_cores_optimizer(ranks: Ranks, tmp_path: Path) -> None:
    """By hand at twice the width: matrices inside have half the rate; the audit looks at the loop's first step."""
    (found,) = megatron_runs.run(ranks, tmp_path, script=SCRIPT)
    assert found["status"] == 0, found["said"]
    assert "rates [0.005, 0.01]" in found["printed"]
    assert "audit: 29 tensors, 29 right; 8 multipliers, 8 right" in found["said"] + found["printed"]


@needs_training
def test_an_optimizer_of_the_scripts_own(ranks: Ranks, tmp_path: Path) -> None:
    script = tmp_path / "own_loop.py"
    script.write_text(SCRIPT.read_text().replace('OPTIMIZER = "core"', 'OPTIMIZER = "torch"'))
    (found,) = megatron_runs.run(ranks, tmp_path, script=script)
    assert found["status"] == 2
    assert "the script trains the model with an optimizer of its own, in which all tensors have one" in found["said"]
    assert "rates [" not in found["printed"]


@needs_training
def test_a_second_model(ranks: Ranks, tmp_path: Path) -> None:
    script = tmp_path / "own_loop.py"
    second = "    teacher = get_model(provider, wrap_with_ddp=False)[0]\n"
    script.write_text(SCRIPT.read_text().replace("    model = DistributedData", f"{second}    model = DistributedData"))
    (found,) = megatron_runs.run(ranks, tmp_path, script=script)
    assert found["status"] == 2
    assert "error: the script builds a second model, such as a teacher or a reference" in found["said"]
    assert "Traceback" not in found["said"]


@pytest.mark.slow
@needs_training
def test_a_check_of_it_says_that_nothing_was_measured(tmp_path: Path) -> None:
    """A check measures the steps of megatron.training's own loop."""
    command = [str(tmp_path), str(SCRIPT), *megatron_runs.words(tmp_path, kv_channels=None, ffn_hidden_size=None)]
    found = megatron_runs.proof("coord-check", command, tmp_path, "--widths", "1,2,4", "--steps", "2")
    assert found.returncode == 2
    assert "Traceback" not in found.stderr
    assert "the script ended without a step that was measured; expected one that trains by" in found.stderr


def test_it_is_looked_for_until_groups_are_made(capsys: pytest.CaptureFixture[str]) -> None:
    made: list[bool] = []
    model = torch.nn.Linear(2, 2)
    needs_groups(model, lambda: bool(made))
    with torch.no_grad():
        model(torch.ones(2))  # an evaluation needs no optimizer
    loss = model(torch.ones(2)).sum()
    with pytest.raises(SystemExit) as ended:
        loss.backward()
    assert ended.value.code == 2
    assert "an optimizer of its own, in which all tensors have one learning rate" in capsys.readouterr().err
    made.append(True)
    model(torch.ones(2)).sum().backward()
    assert not model._forward_hooks
