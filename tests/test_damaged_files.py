"""Damaged journals, run folders, data, checkpoints and configs, by the thousand: one sentence that names the file.

`./dev test --all` takes many times as many; the seed and the counts stand in its summary.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch.distributed.checkpoint import metadata as dcp

from mup_megatron import cli
from mup_megatron.config import Config
from mup_megatron.config.schema import Model
from mup_megatron.data.index import check_indexed_dataset
from mup_megatron.data.parts import check_parts
from mup_megatron.data.prepare import prepare
from mup_megatron.engines.saved_weights import saved_shapes
from mup_megatron.engines.setup.deepspeed import check_settings, deepspeed_config
from mup_megatron.model.build import parametrize
from mup_megatron.model.explain import explain
from mup_megatron.parallel import upstream
from mup_megatron.parallel.layout import resolve_layout
from mup_megatron.report import diagnosis, live
from mup_megatron.report.page import page
from mup_megatron.report.run_data import read_run
from mup_megatron.tuning.family import digest
from mup_megatron.tuning.outcome import choose
from mup_megatron.tuning.recording import make_record
from mup_megatron.tuning.space import proxy_config, with_values
from mup_megatron.tuning.study import Study
from mup_megatron.util.errors import UserError
from mup_megatron.util.files import write_whole
from tests.helpers.configs import MIXED, make
from tests.helpers.damage import ODD, bytes_of, data_of, draws
from tests.test_fuzz import CONFIGS, DEEPSPEED

pytestmark = pytest.mark.more

SEARCH = {"lr": {"log_uniform": [1e-3, 1e-1]}, "lr_schedule": {"choice": ["cosine", "linear"]}}


@pytest.fixture(autouse=True, scope="module")
def _patched() -> None:
    upstream.prepare_process()


@contextlib.contextmanager
def one_sentence(*names: str, found: list[str] | None = None) -> Iterator[None]:
    """Whatever goes wrong is a UserError of one short line without control characters, which names one of those."""
    try:
        yield
    except UserError as error:
        message = str(error)
        assert message.isprintable(), ascii(message)
        assert len(message) < 2100, message
        assert any(name in message for name in names), message
        if found is not None:
            found.append(message)


# --- a study's journal ---


def study_config(folder: Path) -> Config:
    keys = {"tuning__search": SEARCH, "tuning__trials": 4, "tuning__train_steps": 8, "tuning__repeat_best": 1}
    return make(MIXED, "gpt3", run__dir=str(folder), proxy={"hidden_size": 64}, **keys)


def run_trials(config: Config, most: int) -> None:
    """A worker's and the leader's way through a study, with made-up losses."""
    study = Study.create(config)
    for _ in range(most):
        trial = study.claim()
        if trial is None:
            break
        job = proxy_config(config, trial.values, seed=trial.seed, directory=Path("t"))
        for step in (2, 4, 8):
            if not study.survives(trial, step, job.hparams.lr + 1 / step, _no_wait):
                study.finish(trial, "stopped", seconds=1.0)
                break
        else:
            study.finish(trial, "complete", loss=job.hparams.lr, seconds=1.0)
    study.plan(study.trials())
    study.repeat_best()
    choose(config, study.trials()).as_json()


class _Waits(Exception):
    """A trial waits for one that nobody here runs."""


def _no_wait() -> None:
    raise _Waits


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Path, bytes]:
    folder = tmp_path_factory.mktemp("study")
    config = study_config(folder)
    run_trials(config, 3)
    path = folder / "tuning" / "journal.log"
    return config, path, path.read_bytes()


def damaged_lines(content: bytes, draw: random.Random) -> bytes:
    """A value in a line, and not the line's form."""
    lines = content.splitlines()
    at = draw.randrange(len(lines))
    lines[at] = json.dumps(data_of(json.loads(lines[at]), draw)).encode()
    return b"\n".join(lines) + b"\n"


def test_journals(request: pytest.FixtureRequest, journal: tuple[Config, Path, bytes]) -> None:
    config, path, good = journal
    found: list[str] = []
    for draw in draws(request, 60, 500):
        damage = draw.choice((bytes_of, damaged_lines, damaged_lines))
        path.write_bytes(damage(good, draw))
        with one_sentence(str(path), str(path.parent), "tuning:", found=found), contextlib.suppress(_Waits):
            run_trials(config, 2)
    assert found  # some damage is seen


def test_a_journal_that_goes_while_it_is_used(tmp_path: Path) -> None:
    study = Study.create(study_config(tmp_path))
    trial = study.claim()
    assert trial is not None
    path = tmp_path / "tuning" / "journal.log"
    path.unlink()
    for use in (study.trials, study.claim, lambda: study.finish(trial, "complete", loss=1.0)):
        with pytest.raises(UserError, match="was removed or replaced while this process used it"):
            use()
    assert not path.exists()  # a new one would hold half a study


# --- a run's folder, under `report`, `watch` and `diagnose` ---


def trial(slot: int, seed: int, state: str, lr: float, loss: float | None) -> dict[str, Any]:
    values = {"lr": lr, "lr_schedule": "cosine"}
    reports = {"2": 5.0, "4": loss}
    how = {"id": slot, "repeats": False, "reason": None, "attempts": 0, "seconds": 3.5}
    return {**how, "slot": slot, "values": values, "seed": seed, "state": state, "loss": loss, "reports": reports}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Path:
    """Every file that is read of a run."""
    folder = tmp_path_factory.mktemp("reported") / "run"
    config = with_values(study_config(folder), {"lr": 0.01})
    parametrization, layout = parametrize(config, 375), resolve_layout(config, 1)
    study = {
        "values": {"lr": 0.01, "lr_schedule": "cosine"},
        "slot": 0,
        "loss": 4.0,
        "noise": 0.01,
        "interior": {"lr": True},
        "ranges": {"lr": {"low": 1e-3, "high": 1e-1, "log": True}},
        "trials": [
            trial(0, 7, "complete", 0.01, 4.0),
            trial(1, 7, "stopped", 0.03, 4.5),
            trial(2, 7, "diverged", 0.1, None),
            trial(3, 7, "failed", 0.02, None),
        ],
        "candidates": [
            {"slot": 0, "values": {"lr": 0.01, "lr_schedule": "cosine"}, "losses": [4.0, 4.02], "mean": 4.01,
             "within_noise": False},
            {"slot": 1, "values": {"lr": 0.03, "lr_schedule": "cosine"}, "losses": [4.0, None], "mean": 4.1,
             "within_noise": True},
        ],
    }  # fmt: skip
    spent = {"tokens": 1000, "flops": 1e9, "share": 0.1, "process_seconds": 12.5}
    record = make_record(parametrization, layout, {"lr": 0.01}, study=study, budget={"spent": spent})
    lines = [{"step": n, "loss": 5 - n / 10, "lr": 0.01, "seconds": 0.1, "tokens_per_second": 9.0} for n in range(1, 5)]
    lines.append({"step": 4, "eval_loss": 4.6})
    (folder / "standard").mkdir(parents=True)
    (folder / "checkpoints" / "step_00000004").mkdir(parents=True)
    for place in (folder, folder / "standard"):
        (place / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    name = "decoder.final_layernorm.weight"
    wrong = {"quantity": "learning rate", "tensor": name, "right": False, "expected": 1.0, "found": 2.0}
    alarm = {"step": 4, "since": 2, "quantity": "rate", "name": name, "value": 1.0, "cause": "twice the table's"}
    readings = [{"step": 2, "series": [["run", "clipped"], [name, "gradient rms"]]}]
    readings += [{"step": step, "values": [0.5, 1e-3]} for step in (2, 4)]
    (folder / "telemetry.jsonl").write_text("".join(json.dumps(line) + "\n" for line in readings))
    (folder / "alarms.jsonl").write_text(json.dumps(alarm) + "\n")
    for name, data in {
        "audit.json": {"findings": [wrong]},
        "transfer.json": record.as_json(),
        "explain.json": explain(parametrization, layout),
        "plan.json": {"target": {"flops": 1e10}, "extrapolated": ["layers: tuned at 2, target at 4"]},
        "checkpoints/step_00000004/mup.json": {"versions": {"torch": "2"}},
    }.items():
        (folder / name).write_text(json.dumps(data))
    (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump()))
    evidence = repository / "docs" / "evidence"
    for kind, source in (
        ("coord-check", "coord-check-gpt3/mup.json"),
        ("stability", "stability-depth/128-depth_mup.json"),
    ):
        (folder / kind).mkdir()
        shutil.copy(evidence / source, folder / kind)
    return folder


def shown(folder: Path) -> str:
    """What `report`, `watch` and `diagnose` make of it, but for Plotly's own four megabytes."""
    return "\n".join([page(read_run(folder), ""), *watched(folder), *diagnosis.lines_of(diagnosis.suspects(folder))])


def watched(folder: Path) -> list[str]:
    return live.lines_of(live.Watched(folder).now())


def test_a_folder_that_is_whole(folder: Path) -> None:
    said = shown(folder)
    for word in ("curves", "search-lr", "linear_qkv", "trial", "within noise", "torch"):
        assert word in said
    assert "alarm at step 4: rate of decoder.final_layernorm.weight is 1" in said  # watch
    assert "1. the first step was not the table's" in said  # diagnose


def test_run_folders(request: pytest.FixtureRequest, folder: Path) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    found: list[str] = []
    for draw in draws(request, 40, 500):
        path = draw.choice(files)
        good = path.read_bytes()
        try:
            path.write_bytes(damaged_file(path.name, good, draw))
            for show in (shown, watched):  # what stops a report need not stop who watches
                with one_sentence(str(path), found=found):
                    write_whole(folder.with_name("page.html"), "".join(show(folder)))
        finally:
            path.write_bytes(good)
    assert found


def damaged_file(name: str, good: bytes, draw: random.Random) -> bytes:
    if draw.random() < 0.4:
        return bytes_of(good, draw)
    if name.endswith(".jsonl"):
        return damaged_lines(good, draw)
    if name.endswith(".yaml"):
        return json.dumps(data_of(yaml.safe_load(good), draw)).encode()
    data = data_of(json.loads(good), draw)
    if name == "transfer.json" and isinstance(data, dict):  # as of another version, or someone's script
        data["checksum"] = digest({key: value for key, value in data.items() if key != "checksum"})
    return json.dumps(data).encode()


# --- data ---


def data_config(folder: Path, **keys: Any) -> Config:
    own = {"tokenizer": {"library": "byte-level"}, "split": "100,0,0", "dir": str(folder / "data"), **keys}
    return make(MIXED, "gpt3", run__dir=str(folder), data=own)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Config]:
    """An indexed dataset of real text, and the config that made it."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text(Path(json.__file__).read_text())
    config = data_config(folder, files=[str(folder / "text.txt"), str(folder / "text.txt")])
    prepare(config)
    return folder / "data" / "corpus", config


def read_all(prefix: Path, config: Config) -> None:
    """As training begins: the check, the split, every document."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    _, tokens = check_indexed_dataset(str(prefix), 257)
    check_parts(config, [str(prefix)], validation=False)
    data = IndexedDataset(str(prefix))
    read = [np.array(data[number]) for number in range(len(data))]
    del data
    assert sum(len(document) for document in read) == tokens
    assert all(document.min() >= 0 and document.max() < 257 for document in read if len(document))


def test_datasets(request: pytest.FixtureRequest, dataset: tuple[Path, Config], tmp_path: Path) -> None:
    prefix, config = dataset
    found: list[str] = []
    read_all(prefix, config)
    for draw in draws(request, 80, 500):
        damaged = draw.choice((".idx", ".idx", ".bin"))
        for suffix in (".idx", ".bin"):
            content = prefix.with_suffix(suffix).read_bytes()
            (tmp_path / f"d{suffix}").write_bytes(bytes_of(content, draw) if suffix == damaged else content)
        with one_sentence(str(tmp_path / "d"), found=found):
            read_all(tmp_path / "d", config)
    assert any("damaged" in message for message in found)


JSONL = b"".join(
    json.dumps({"text": text, "n": 1.5, "more": [1, {"a": None}]}).encode() + b"\n"
    for text in ("one", "zwei é", "3\n4")
)
BAD_LINES = [
    b'{"text": 1e999}', b'{"text": "\\ud800"}', b'{"text": ' + b"[" * 100_000, b'{"text": ' + b"1" * 5000 + b"}",
    b"\xff\xfe", b'{"text": null}', b'["text"]', b"null", b'{"text": "a', b"{}",
]  # fmt: skip


@pytest.mark.parametrize("line", BAD_LINES, ids=range(len(BAD_LINES)))
def test_lines_of_text(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(JSONL + line + b"\n")
    with pytest.raises(UserError, match=r"bad\.jsonl, line 4: ") as error:
        prepare(data_config(tmp_path, files=[str(path)]))
    assert len(str(error.value)) < 400


def test_texts(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """JSONL and plain text, as bytes and as numbers."""
    for number, draw in enumerate(draws(request, 40, 200)):
        path = tmp_path / draw.choice(("a.jsonl", "b.txt"))
        path.write_bytes(bytes_of(JSONL, draw))
        library = draw.choice(("byte-level", "byte-level", "null"))
        tokenizer = {"library": library, **({"vocab_size": 300} if library == "null" else {})}
        with one_sentence(str(path), "data.tokenizer", "the corpus is empty"):
            prepare(data_config(tmp_path / str(number), files=[str(path)], tokenizer=tokenizer))


def test_tokenizers(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    text, good = tmp_path / "text.txt", make(MIXED)
    text.write_text("def main(argument):\n    return argument\n")
    trained = prepare(good).tokenizer
    assert trained is not None
    model = Path(trained).read_bytes()
    for number, draw in enumerate(draws(request, 15, 150)):
        path = tmp_path / "damaged.model"
        path.write_bytes(bytes_of(model, draw))
        tokenizer = {"library": "sentencepiece", "path": str(path)}
        with one_sentence(str(path), "data.tokenizer", "model.vocab_size"):
            prepare(data_config(tmp_path / str(number), files=[str(text)], tokenizer=tokenizer))


# --- a checkpoint's index ---


def index() -> bytes:
    """As torch writes it, of two tensors in two pieces each."""
    entries: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    for name in ("param.decoder.layers.0.mlp.linear_fc1.weight", "exp_avg.output_layer.weight"):
        chunks = [
            dcp.ChunkStorageMetadata(offsets=torch.Size((8 * part, 0)), sizes=torch.Size((8, 4))) for part in (0, 1)
        ]
        entries[name] = dcp.TensorStorageMetadata(
            properties=dcp.TensorProperties(), size=torch.Size((16, 4)), chunks=chunks
        )
        for part in (0, 1):
            key = dcp.MetadataIndex(name, torch.Size((8 * part, 0)), part)
            places[key] = _StorageInfo(relative_path="__0_0.distcp", offset=64 * part, length=64)
    return pickle.dumps(dcp.Metadata(state_dict_metadata=entries, storage_data=places))


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x04r\xff\xff\xff\xff.",  # LONG_BINPUT: a memo of four thousand million entries
        b"\x80\x04N" + b"r\xff\xff\xff\x3f.",
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",  # BINBYTES8
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",  # a FRAME
        b"\x80\x04\x96\xff\xff\xff\xff\x0f\x00\x00\x00.",  # BYTEARRAY8, which is made before it is read
        b"\x80\x04" + b"(" * 100_000 + b".",
    ],
    ids=range(6),
)
def test_an_index_that_says_it_is_huge(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(UserError, match=r"\.metadata: "):
        saved_shapes(tmp_path)


def test_indexes(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    good, path = index(), tmp_path / ".metadata"
    path.write_bytes(good)
    assert set(saved_shapes(tmp_path).values()) == {(16, 4)}
    for draw in draws(request, 200, 800):
        path.write_bytes(bytes_of(good, draw))
        with one_sentence(str(path)):
            saved_shapes(tmp_path)


# --- DeepSpeed's JSON, as DeepSpeed reads it ---

MORE = {
    **DEEPSPEED,
    "communication_data_type": "fp32",
    "wall_clock_breakdown": False,
    "comms_logger": {"enabled": False},
    "tensorboard": {"enabled": False},
    "flops_profiler": {"enabled": False},
    "checkpoint": {"tag_validation": "Warn"},
    "data_types": {"grad_accum_dtype": "fp32"},
    "activation_checkpointing": {"partition_activations": False},
    "aio": {"block_size": 1048576},
}


def test_deepspeed_settings(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    path = tmp_path / "deepspeed.json"
    config = make(MIXED, parallel__deepspeed_config=str(path))
    layout = resolve_layout(config, 1)
    found: list[str] = []
    for draw in draws(request, 60, 500):
        kept = {name: value for name, value in MORE.items() if name not in ("optimizer", "scheduler")}
        path.write_text(json.dumps(data_of(kept, draw)))
        with one_sentence(str(path), found=found):
            check_settings(config, deepspeed_config(config, layout))
    assert any("DeepSpeed cannot read" in message for message in found)


# --- configs, through the commands ---


def odd_config(draw: random.Random) -> Any:
    config = data_of(draw.choice(CONFIGS), draw)
    if draw.random() < 0.5 and isinstance(config, dict) and isinstance(config.get("model"), dict):
        config["model"][draw.choice(list(Model.model_fields))] = draw.choice([*ODD, 3, 12, 64, 9999, 10**6])
    return config


def test_configs(
    request: pytest.FixtureRequest, tmp_path: Path, capfd: pytest.CaptureFixture[str], one_thread: None
) -> None:
    path = tmp_path / "run.yaml"
    commands: list[Callable[[], list[str]]] = [lambda: ["explain"], lambda: ["plan"], lambda: ["transfer"]]
    statuses = set()
    for draw in draws(request, 20, 150):
        path.write_text(json.dumps(odd_config(draw)))
        status = cli.run([*draw.choice(commands)(), str(path)])
        _, err = capfd.readouterr()
        statuses.add(status)
        assert status in (0, 2), err
        if status:
            (said,) = [line for line in err.splitlines() if line.startswith("mup-megatron: error")]
            assert len(said) < 2200
            assert said.isprintable()
            assert "run.yaml" in said or "transfer.json" in said or "tuning." in said, said
    assert 2 in statuses
