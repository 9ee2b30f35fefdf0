"""`python -m tests.telemetry.watched`: plants every fault into small targets, and writes who named it, and when.

A target is trained with the band of its proxy, four times as wide. The audit looks at its first step and the alarms at
the rest. A run counts where one of them named a tensor that the fault is in, or a module with it, within 50 steps.
Writes docs/reports/alarms.md.
"""

from __future__ import annotations

import datetime
import json
import platform
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from mup_megatron.data.prepare import prepare
from mup_megatron.engines.setup import resolve
from mup_megatron.model.build import parametrize
from mup_megatron.proof.controls import control
from tests.helpers.distributed import RankError, Ranks
from tests.telemetry import alarm_bodies
from tests.telemetry.alarm_bodies import EMBEDDING, FC1, QKV
from tests.telemetry.test_alarms import BEGINS, config_of

_SEEDS = (21, 22, 23)
_WITHIN = 50
_ARCHITECTURES = ("gpt3", "llama")
_ATTENTION, _MLP = "decoder.layers.0.self_attention", "decoder.layers.1.mlp"
FAULTS: dict[str, tuple[str, ...]] = {
    "matrices at twice the rate": (FC1,),
    "matrices at half the rate": (FC1,),
    "the embedding at four times the rate": (EMBEDDING,),
    "a frozen matrix": (FC1,),
    "queries and keys eight times as large": (QKV, _ATTENTION),
    "a matrix of a tenth": (FC1, _MLP),
    "a matrix of a hundredth": (FC1, _MLP),
    "a matrix with one infinity": (FC1, _MLP),
    "decay of a norm": ("decoder.final_layernorm.weight",),
    "a group without decay": (FC1,),
    "a tensor that is put back": (QKV,),
    "one rank with another matrix": (FC1,),
    "a matrix without bounds": (FC1, _MLP),
    "a shard of noise": ("run",),
}
"""Names that each may bear, of `alarm_bodies.FAULTS`."""
RULES = ("embedding_rate", "hidden_init", "hidden_rate", "readout_multiplier", "eps", "decay")
"""Of `--break`, those that these targets have."""
HEALTHY = "nothing"


class Seen(NamedTuple):
    """One run.

    Args:
        fault: planted.
        by: who named it first; empty where nobody did.
        steps: from the fault on.
        quantity: that was said.
    """

    fault: str
    by: str
    steps: int
    quantity: str


def changed_by(config: Any, rule: str) -> tuple[str, ...]:
    """Tensors and modules that a rule is about."""
    table = parametrize(config, prepare(config).vocab_size)
    other = control(rule).break_(table, resolve(config, 1).layout)
    names = [name for name, row in table.tensors.items() if row != other.tensors[name]]
    return tuple(names) if table.forward == other.forward else ("output_layer", "embedding.word_embeddings")


def _is_of(name: str, wanted: Sequence[str]) -> bool:
    return any(name == each or each.startswith(f"{name}.") for each in wanted)


def run(ranks: Ranks, folder: Path, band: Path, architecture: str, seed: int, fault: str) -> Seen:
    """Trains one target; who named its fault."""
    count = 2 if fault == "one rank with another matrix" else 1
    keys = {
        "run__seed": seed,
        "watch__band": str(band),
        "run__audit": "warn",
        "parallel__tensor_model_parallel_size": 1,
        "training__micro_batch_size": 8 // count,
    }
    config = config_of(folder, architecture, **keys)
    broken, begins = (fault, 0) if fault in RULES else (None, BEGINS)
    planted: dict[str, Any] = {"broken": broken} if broken else {"fault": fault, "begins": begins}
    try:
        ranks.run(count, alarm_bodies.target, config=config, **({} if fault == HEALTHY else planted))
    except RankError as error:
        if "Diverged" not in str(error):
            raise
    wanted = changed_by(config, fault) if broken else FAULTS.get(fault, ())
    audit = json.loads((folder / "audit.json").read_text())
    for finding in audit["findings"]:
        if not finding["right"] and (not wanted or _is_of(finding["tensor"], wanted)):
            return Seen(fault, "audit", 1, finding["quantity"])
    path = folder / "alarms.jsonl"
    alarms = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for alarm in alarms:
        if alarm["step"] - begins <= _WITHIN and (not wanted or _is_of(alarm["name"], wanted)):
            return Seen(fault, "alarm", alarm["step"] - begins, alarm["quantity"])
    return Seen(fault, "", 0, "")


def measured() -> Iterator[Seen]:
    """Every fault, in every architecture, with every seed."""
    ranks = Ranks()
    with tempfile.TemporaryDirectory() as name:
        for architecture in _ARCHITECTURES:
            folder = Path(name) / architecture
            config = config_of(folder, architecture)
            ranks.run(1, alarm_bodies.band, config=config, folder=folder, seeds=(11, 12, 13))
            for fault in (HEALTHY, *RULES, *FAULTS):
                for seed in _SEEDS:
                    at = folder / f"{fault}-{seed}"
                    yield run(ranks, at, folder / "transfer.band.json", architecture, seed, fault)
    ranks.close()


def page(found: Sequence[Seen]) -> str:
    """docs/reports/alarms.md."""
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "megatron-core", "deepspeed"))
    planted = [each for each in found if each.fault != HEALTHY]
    named = sum(bool(each.by) for each in planted)
    healthy = [each for each in found if each.fault == HEALTHY]
    rows = []
    for fault in dict.fromkeys(each.fault for each in planted):
        runs = [each for each in planted if each.fault == fault]
        told = [each for each in runs if each.by]
        what = ", ".join(dict.fromkeys(f"{each.by}: {each.quantity}" for each in told))
        steps = (
            f"{statistics.median(each.steps for each in told):g} ({max(each.steps for each in told)})" if told else ""
        )
        label = f"without the rule `{fault}`" if fault in RULES else fault
        rows.append(f"| {label} | {len(told)} of {len(runs)} | {what} | {steps} |")
    return "\n".join(
        [
            "# Faults that the audit and the alarms name",
            "",
            "Made by `python -m tests.telemetry.watched` on "
            f"{datetime.datetime.now(tz=datetime.UTC).date()} (Python {platform.python_version()}, {versions}).",
            "",
            f"Targets of {' and '.join(_ARCHITECTURES)}, four times as wide as the proxy whose band watches them, with "
            f"{len(_SEEDS)} seeds each. A rule is missing from the",
            f"first step on; other faults begin behind step {BEGINS}. A run counts where the audit or an alarm names a "
            "tensor that the fault is in, or",
            f"a module with it, within {_WITHIN} steps.",
            "",
            f"Named: {named} of {len(planted)} runs. Healthy runs with an alarm: {sum(bool(e.by) for e in healthy)} of "
            f"{len(healthy)}.",
            "",
            "| fault | named | by, and what it said | steps, the middle (the most) |",
            "| --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )


def main() -> None:
    """The command."""
    found = []
    for each in measured():
        found.append(each)
        print(each, flush=True)
    Path("docs/reports/alarms.md").write_text(page(found), encoding="utf-8")


if __name__ == "__main__":
    main()
