"""`mup-megatron diagnose`: runs whose files say one thing each against them; it is the first or second suspect."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from mup_megatron.report.diagnosis import lines_of, suspects
from mup_megatron.tuning.family import digest
from tests.helpers.commands import mup
from tests.helpers.configs import MIXED, make
from tests.helpers.records import BUDGET, study_of

STEPS = 100
LR = 4e-3
Files = dict[str, Any]


def sound() -> Files:
    """What the folder of a run has that nothing speaks against."""
    keys = {"training__train_steps": STEPS, "hparams__lr": LR, "training__clip_grad": 1.0}
    config = make(MIXED, "gpt3", **keys).model_dump()
    lines = [step_line(step, loss=3.0 + 1 / step, grad_norm=0.3) for step in range(1, STEPS + 1)]
    trials = [trial(slot, lr) for slot, lr in enumerate((LR, 1e-3, 1.6e-2))]
    study = study_of({"lr": LR}, trials=trials, ranges={"lr": {"low": 1e-3, "high": 1.6e-2, "log": True}})
    proxy = {
        "sizes": {"hidden_size": 256, "num_attention_heads": 8},
        "trained": {"train_steps": STEPS, "global_batch_size": 8, "seq_length": 32, "tokens": 1, "num_layers": 2},
    }
    record = {"format": 1, "created": "", "digest": "", "family": {}, "values": {"lr": LR}, "tuned": ["lr"]}
    record |= {"target": {"name": "", "sizes": {}, "becomes": {}, "extrapolated": [], "not_transferred": []}}
    record |= {"proxy": proxy, "rules": {}, "study": study, "budget": BUDGET, "versions": {}}
    return {
        "config": config,
        "lines": [*lines, {"step": STEPS, "eval_loss": 3.0}],
        "record": record,
        "proxy": [*lines, {"step": STEPS, "eval_loss": 3.1}],
        "explanation": {"changes": [], "forward": {}, "parameters": []},
    }


def step_line(step: int, **said: float) -> dict[str, Any]:
    return {"step": step, "tokens": step, "lr": LR, "seconds": 0.1, "tokens_per_second": 1.0, **said}


def trial(slot: int, lr: float) -> dict[str, Any]:
    told = {"slot": slot, "seed": 7, "state": "complete", "repeats": False, "loss": 2.5, "reports": {"8": 2.5}}
    return {**told, "values": {"lr": lr}, "reason": None, "seconds": 0.5}


def written(folder: Path, files: Files) -> Path:
    """The folder of a run."""
    run = folder / "run"
    (run / "tuning" / "trial-000").mkdir(parents=True)
    (run / "config.yaml").write_text(yaml.safe_dump(files["config"]))
    (run / "explain.json").write_text(json.dumps({**files["explanation"], "config": files["config"]}))
    record = files["record"]
    (run / "transfer.json").write_text(json.dumps({**record, "checksum": digest(record)}))
    for path, lines in ((run, files["lines"]), (run / "tuning" / "trial-000", files["proxy"])):
        (path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for name in ("audit.json", "alarms.jsonl", "telemetry.jsonl"):
        if name in files:
            (run / name).write_text(files[name])
    return run


def test_nothing_speaks_against_a_sound_run(tmp_path: Path) -> None:
    run = written(tmp_path, sound())
    assert suspects(run) == []
    assert lines_of([]) == ["nothing in the run's files speaks against its transfer"]


def at_the_edge(files: Files) -> None:
    study = files["record"]["study"]
    study["trials"] = [trial(slot, lr) for slot, lr in enumerate((LR, 2e-3, 3e-3))]


def test_what_the_range_has_room_for_needs_trials_and_not_a_range(tmp_path: Path) -> None:
    files = sound()
    at_the_edge(files)
    lr = next(each for each in suspects(written(tmp_path / "room", files)) if "lr may lie beyond" in each.cause)
    assert lr.decides.startswith("tune with more trials (tuning.trials), as lr has room in its range")
    files["record"]["study"]["ranges"]["lr"]["high"] = LR
    lr = next(each for each in suspects(written(tmp_path / "end", files)) if "lr may lie beyond" in each.cause)
    assert lr.decides.startswith("tune with a range of lr that goes on")


def other_rate(files: Files) -> None:
    files["config"]["hparams"]["lr"] = 2 * LR


def changed(files: Files) -> None:
    files["explanation"]["changes"] = [{"step": 40, "key": "hparams.weight_decay", "before": 0.1, "now": 0.0}]


def longer(files: Files) -> None:
    files["record"]["proxy"]["trained"]["train_steps"] = STEPS // 10


def larger_batch(files: Files) -> None:
    files["record"]["proxy"]["trained"]["global_batch_size"] = 1


def narrow(files: Files) -> None:
    files["record"]["proxy"]["sizes"]["hidden_size"] = 32


def clipped(files: Files) -> None:
    files["lines"] = [{**line, "grad_norm": 3.0} if "loss" in line else line for line in files["lines"]]


def memorising(files: Files) -> None:
    files["proxy"][-1]["eval_loss"] = 4.5


def epsilon(files: Files) -> None:
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    tensor: dict[str, Any] = {"name": name, "eps": 1e-8, "lr": LR, "init": "normal", "init_std": 0.1, "blocks": None}
    tensor |= {"weight_decay": 0.0, **{key: [4, 4] for key in ("global_shape", "local_shape", "base_shape")}}
    files["explanation"]["parameters"] = [tensor]
    series = [{"step": 1, "series": [[name, "gradient rms"]]}, {"step": 1, "values": [2e-9]}]
    files["telemetry.jsonl"] = "".join(f"{json.dumps(line)}\n" for line in series)


def test_epsilon_beside_experts(tmp_path: Path) -> None:
    """The experts of a layer are one series, and a folded rule's epsilon is one of gradients over theta (by hand)."""
    files = sound()
    epsilon(files)
    (tensor,) = files["explanation"]["parameters"]
    name = "decoder.layers.0.mlp.experts.local_experts.{}.linear_fc1.weight"
    tensor |= {"name": name.format(0), "theta": 0.5}
    series = [{"step": 1, "series": [[name.format("*"), "gradient rms"]]}, {"step": 1, "values": [1.5e-7]}]
    files["telemetry.jsonl"] = "".join(f"{json.dumps(line)}\n" for line in series)
    found = suspects(written(tmp_path, files))[0]
    assert found.evidence == f"1 of 1 tensors; {name.format('*')}: gradients 7.5 times epsilon"  # 1.5e-7 / (1e-8 / 0.5)


def test_what_is_clipped_by_the_invariant_norm(tmp_path: Path) -> None:
    """What decides is no setting that the run has."""
    for norm, other in (("global", "training.clip_norm=invariant"), ("invariant", "a larger training.clip_grad")):
        files = sound()
        clipped(files)
        files["config"]["training"]["clip_norm"] = norm
        assert suspects(written(tmp_path / norm, files))[0].decides.startswith(f"train with {other}; ")


def audit_of_wrong() -> str:
    wrong = {"quantity": "learning rate", "tensor": "decoder.final_layernorm.weight", "right": False}
    return json.dumps({"right": False, "findings": [{**wrong, "expected": 1.0, "found": 2.0}]})


def audited(files: Files) -> None:
    files["audit.json"] = audit_of_wrong()


def alarmed(files: Files) -> None:
    said = {"quantity": "rate", "name": "output_layer.weight", "since": 40, "step": 40, "value": 1.0, "cause": "twice"}
    files["alarms.jsonl"] = json.dumps(said) + "\n"


def standard(files: Files) -> None:
    files["config"]["parametrization"]["name"] = "standard"


SPOILT: dict[str, Callable[[Files], None]] = {
    "the best lr may lie beyond": at_the_edge,
    "has not trained with the tuned values": other_rate,
    "settings changed while the target trained": changed,
    "train_steps differs from what was tuned at": longer,
    "global_batch_size differs from what was tuned at": larger_batch,
    "the proxy is narrow": narrow,
    "clipping sets the size of updates": clipped,
    "the proxy memorises its text": memorising,
    "epsilon is not small beside gradients": epsilon,
    "the first step was not the table's": audited,
    "an optimizer group has not had the table's rate": alarmed,
    "the run is not in µP": standard,
}


@pytest.mark.parametrize("cause", SPOILT)
def test_what_spoilt_it_is_first(tmp_path: Path, cause: str) -> None:
    files = sound()
    SPOILT[cause](files)
    found = suspects(written(tmp_path, files))
    assert cause in found[0].cause, found


@pytest.mark.parametrize("second", ["the proxy is narrow", "the proxy memorises its text"])
@pytest.mark.parametrize("first", ["the first step was not the table's", "the best lr may lie beyond"])
def test_the_stronger_of_two_is_first(tmp_path: Path, first: str, second: str) -> None:
    files = sound()
    for cause in (second, first):
        SPOILT[cause](files)
    found = [suspect.cause for suspect in suspects(written(tmp_path, files))]
    assert [first in found[0], second in found[1], len(found)] == [True, True, 2]


def test_what_decides_has_its_cost(tmp_path: Path) -> None:
    """By hand: 100 steps of 0.1 s, trials of 0.5 s, a study of 1.5 s; without them no time is told."""
    costs = {
        other_rate: "the target, about 10 s on the devices that it had",
        changed: "what is left of the target, about 6 s on the devices that it had",
        at_the_edge: "a study, about 2 s of one process, as the last one",
        larger_batch: "12 proxies, about 6 s of one process or more",
        audited: "one step, about 1 s on the devices that it had",
        clipped: "300 steps of the target, about 30 s on the devices that it had",
    }
    for number, (spoil, cost) in enumerate(costs.items()):
        files = sound()
        spoil(files)
        run = written(tmp_path / str(number), files)
        assert suspects(run)[0].decides.endswith(f"; {cost}")
    (run / "metrics.jsonl").unlink()
    (run / "audit.json").write_text(audit_of_wrong())
    assert suspects(run)[0].decides == "mend what the audit names, and start again; one step"


def test_a_rule_over_tokens_answers_for_a_longer_run(tmp_path: Path) -> None:
    files = sound()
    longer(files)
    files["config"]["parametrization"]["tokens"] = "power:-0.32"
    assert suspects(written(tmp_path, files)) == []


def test_the_command(tmp_path: Path) -> None:
    files = sound()
    clipped(files)
    run = written(tmp_path, files)
    result = mup("diagnose", run)
    assert result.returncode == 0, result.stderr
    first, second, *_ = result.stdout.splitlines()
    assert first == "1. clipping sets the size of updates"
    assert second == "   100% of the target's steps are clipped at 1, 0% of the proxy's"
    (found,) = json.loads(mup("diagnose", run, "--json").stdout)
    assert found["weight"] == 0.7
    assert mup("diagnose", tmp_path).returncode == 2
    (run / "audit.json").write_text('{"right": fal')
    damaged = mup("diagnose", run)
    assert damaged.returncode == 2
    assert "audit.json: damaged" in damaged.stderr
