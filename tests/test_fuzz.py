"""Mutated configs and records by the thousand: whatever a file says, what comes out is one sentence, no traceback.

`./dev test --slow` takes three times as many examples (the profile `all` of conftest.py).
"""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from mup_megatron.checkpoints.manifest import MANIFEST, CheckpointManifest, check_resume, listed_files, make_manifest
from mup_megatron.config import Config, load_config, parse_config
from mup_megatron.convert.saved_run import config_here
from mup_megatron.engines.setup import refuse
from mup_megatron.engines.setup.deepspeed import deepspeed_config
from mup_megatron.model.build import parametrize
from mup_megatron.parallel import upstream
from mup_megatron.parallel.layout import resolve_layout, smallest_world
from mup_megatron.report.summary import print_transfer
from mup_megatron.rules import horizon
from mup_megatron.rules.base_shapes import save_base_shapes
from mup_megatron.tuning.family import digest
from mup_megatron.tuning.record import TransferRecord
from mup_megatron.tuning.recording import extrapolated
from mup_megatron.tuning.remarks import remarks
from mup_megatron.tuning.space import with_values
from mup_megatron.util.errors import UserError
from tests.helpers.configs import MIXED, MLA, MOE, VOCABULARY, make
from tests.tuning import test_record

pytestmark = pytest.mark.more

record = test_record.record  # the fixture
# Factor on the counts below: a sixth in the quick suite (with --all conftest.py sets max_examples to 500).
TIMES = 1 if settings.default.max_examples > 100 else 1 / 6


@pytest.fixture(autouse=True, scope="module")
def _patched() -> None:
    """As every command begins."""
    upstream.prepare_process()


@pytest.fixture(autouse=True)
def _counted(request: pytest.FixtureRequest) -> None:
    """For the summary; hypothesis draws from the test itself (`derandomize`)."""
    request.node.user_properties += [("mutants", request.function.mutants), ("seed", "the test's own text")]


def examples(count: int) -> Callable[[Any], Any]:
    drawn = settings(
        max_examples=int(count * TIMES),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
    )

    def of(test: Any) -> Any:
        test = drawn(test)
        test.mutants = int(count * TIMES)
        return test

    return of


# --- mutations of a tree of plain data ---

NUMBERS = [0, -1, 1, 2, 3, 7, 2**31, 2**63, 2**200, -0.5, 0.5, 1e-300, 1e300, float("inf"), float("-inf"), float("nan")]
WORDS = ["", " ", "auto", "none", "null", "true", "8", "1e3", "a.b", "../..", "/", "\n", "\0", "é", "\ud7ff", "x" * 300]
LEAVES = st.one_of(
    st.none(), st.booleans(), st.sampled_from(NUMBERS), st.sampled_from(WORDS), st.integers(), st.floats(), st.text()
)
VALUES = st.one_of(
    LEAVES,
    st.recursive(
        LEAVES,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
        max_leaves=6,
    ),
)
KINDS = st.sampled_from(["replace", "replace", "replace", "delete", "add", "nest", "swap", "number"])
MUTATION = st.tuples(KINDS, st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True), VALUES)
MUTATIONS = st.lists(MUTATION, min_size=1, max_size=4)


def places(tree: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything in a tree."""
    found = []
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(inner):
        found.append((tree, key))
        found += places(value)
    return found


def mutate(tree: Any, mutations: list[tuple[str, float, float, Any]]) -> Any:
    """A copy of plain data, changed somewhere, again and again."""
    tree = copy.deepcopy(tree)
    for kind, where, other, value in mutations:
        known = places(tree)
        if not known:
            return value
        container, key = known[int(where * len(known))]
        elsewhere, its_key = known[int(other * len(known))]
        if kind == "delete":
            del container[key]
        elif kind == "nest":
            container[key] = {key: container[key]}
        elif kind == "add" and isinstance(container, dict):
            container[value if isinstance(value, str | int) else str(key)] = copy.deepcopy(elsewhere[its_key])
        elif kind == "swap":
            container[key] = copy.deepcopy(elsewhere[its_key])
        elif kind == "number" and type(container[key]) in (int, float):
            container[key] *= NUMBERS[int(other * len(NUMBERS))]
        else:
            container[key] = value
    return tree


def said(error: UserError, *names: str) -> None:
    """It is one line, which names one of those."""
    message = str(error)
    assert len(message.splitlines()) == 1, ascii(message)
    assert any(name in message for name in names), message


# --- configs ---


def plain(growth: dict[str, Any], architecture: str = "gpt3", **keys: Any) -> dict[str, Any]:
    """As a user writes it: what is given, and nothing else."""
    return make(growth, architecture, **keys).model_dump(exclude_unset=True)


SEARCH = {"lr": {"log_uniform": [1e-3, 1e-1]}, "lr_schedule": {"choice": ["cosine", "linear"]}}
CONFIGS = [
    plain(MIXED, tuning__search=SEARCH, training__eval_interval=5),
    plain(MIXED, "llama", parallel__engine="megatron", parallel__pipeline_model_parallel_size=2),
    plain(MOE, "llama", parallel__sequence_parallel=True),
    plain(MLA, "llama", proxy={"hidden_size": 64}),
    plain(
        MIXED,
        parametrization={"batch": "sqrt_sde", "tokens": "power:-0.32", "weight_decay": "timescale", "scaling": "unit"},
        hparams__per_tensor={"embedding": {"lr": 2.0}, "*.linear_fc1.weight": {"weight_decay": 0.5}},
        tuning={
            "global_batch_size": 4,
            "seq_length": 16,
            "train_steps": 5,
            "descent": {"trials": 4, "factor": 2.0, "rounds": 1},
            "search": {"per_tensor.embedding.lr": {"log_uniform": [0.5, 8.0]}},
        },
    ),
]


def use(config: Config, *, build: bool) -> None:
    """What every command does with a config before it starts anything."""
    layout = resolve_layout(config, smallest_world(config))
    refuse(config, layout)
    horizon.moved(config)
    if build and not too_large(config):
        parametrize(config, VOCABULARY)


def too_large(config: Config) -> bool:
    """Whether megatron-core would build for longer than a test may take; nothing is refused for its size."""
    model = config.model
    layers = max(model.num_layers, config.num_layers_base) + (model.mtp_num_layers or 0)
    return layers * (1 + (model.num_moe_experts or 0)) > 40 or (config.max_position_embeddings or 0) > 10**6


def try_config(path: Path, *, build: bool = False) -> bool:
    try:
        use(load_config(path), build=build)
    except UserError as error:
        said(error, path.name)
        return False
    return True


@examples(3000)
@given(st.sampled_from(CONFIGS), MUTATIONS)
def test_mutated_configs(config: Any, mutations: Any) -> None:
    """What a file may say; that it is read from one is left to the tests below, since YAML takes most of the time."""
    try:
        use(parse_config(mutate(config, mutations), "run.yaml"), build=False)
    except UserError as error:
        said(error, "run.yaml")


SIZES = st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12, 16, 31, 32, 48, 64, 96, 128, 160])
SIZE_KEYS = sorted({key for config in CONFIGS for key in config["model"] if type(config["model"][key]) is int})


@examples(120)
@given(
    st.sampled_from(CONFIGS),
    st.dictionaries(
        st.tuples(st.sampled_from(["model", "base", "proxy"]), st.sampled_from(SIZE_KEYS)), SIZES, max_size=3
    ),
    MUTATIONS,
    st.booleans(),
)
def test_mutated_configs_that_are_built(
    tmp_path_factory: pytest.TempPathFactory, config: Any, sizes: Any, mutations: Any, further: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "built.yaml"
    config = copy.deepcopy(config)
    for (section, key), size in sizes.items():
        config.setdefault(section, {})[key] = size
    path.write_text(json.dumps(mutate(config, mutations[:1]) if further else config), encoding="utf-8")
    try_config(path, build=True)


@examples(400)
@given(st.one_of(VALUES.map(lambda value: yaml.safe_dump(value, allow_unicode=True)), st.text()))
def test_any_document(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "document.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    assert not try_config(path)


@examples(400)
@given(
    st.binary(max_size=60),
    st.sampled_from([b"", b"run: ", b"? ", b"&a [*a", b"<<: ", b"!!", b"1_:", b"2001-01-01 ", b"{", b"- -", b"!!set "]),
    st.floats(0, 1),
)
def test_any_bytes(tmp_path_factory: pytest.TempPathFactory, content: bytes, start: bytes, where: float) -> None:
    """Alone, and in the middle of a good config."""
    path = tmp_path_factory.getbasetemp() / "bytes.yaml"
    path.write_bytes(start + content)
    assert not try_config(path)
    good = yaml.safe_dump(CONFIGS[0], sort_keys=False).encode()
    at = int(where * len(good))
    path.write_bytes(good[:at] + start + content + good[at:])
    try_config(path)


# --- manifests of checkpoints ---


def checkpoint_manifest() -> dict[str, Any]:
    config = make(MIXED)
    made = make_manifest(parametrize(config, VOCABULARY), resolve_layout(config, 1), "digest", step=4)
    change = {"step": 2, "key": "hparams.lr", "before": 0.1, "now": 0.2}
    return made.replaced(changes=[change], files=["weights"]).as_json()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    path = tmp_path_factory.mktemp("checkpoints") / "step_00000004"
    path.mkdir()
    return checkpoint_manifest(), path


def try_checkpoint(path: Path, current: dict[str, Any]) -> None:
    try:
        listed_files(path)
    except UserError as error:
        said(error, str(path))
    try:
        found = CheckpointManifest.read(path)
    except UserError as error:
        return said(error, str(path))
    try:
        check_resume(found, CheckpointManifest(**current), path)
    except UserError as error:
        assert str(path) in str(error).splitlines()[0]
    try:
        config_here(found, path)
    except UserError as error:
        said(error, str(path))


@examples(1500)
@given(
    MUTATIONS,
    st.sampled_from([None, None, "config", "base_shapes", "step", "data_digest", "layout", "changes", "files"]),
)
def test_mutated_manifests(checkpoint: Any, mutations: Any, part: str | None) -> None:
    record, path = checkpoint
    changed = mutate(record, mutations) if part is None else {**record, part: mutate({part: record[part]}, mutations)}
    (path / MANIFEST).write_text(json.dumps(changed), encoding="utf-8")
    try_checkpoint(path, record)


@examples(400)
@given(st.one_of(st.binary(max_size=60), VALUES.map(lambda value: json.dumps(value).encode())))
def test_any_manifest(checkpoint: Any, content: bytes) -> None:
    record, path = checkpoint
    (path / MANIFEST).write_bytes(content)
    try_checkpoint(path, record)


# --- base shapes ---


@pytest.fixture(scope="module")
def base_shapes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    path = tmp_path_factory.mktemp("shapes") / "base.bsh"
    parametrization = parametrize(make(MIXED), VOCABULARY)
    save_base_shapes(path, parametrization.shapes, {"kv_channels": parametrization.base_head_size})
    return path, path.read_text()


def try_base_shapes(path: Path) -> None:
    config = make({**MIXED, "base": {}}, base__file=str(path))
    try:
        parametrize(config, VOCABULARY)
    except UserError as error:
        said(error, str(path))


@examples(120)
@given(MUTATIONS, st.booleans())
def test_mutated_base_shapes(base_shapes: tuple[Path, str], mutations: Any, in_comment: bool) -> None:
    path, text = base_shapes
    comment = next(line for line in text.splitlines() if line.startswith("# mup-megatron: "))
    if in_comment:
        extra = mutate(json.loads(comment.removeprefix("# mup-megatron: ")), mutations)
        text = text.replace(comment, "# mup-megatron: " + json.dumps(extra))
    else:
        text = comment + "\n" + json.dumps(mutate(yaml.safe_load(text), mutations))
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try_base_shapes(path)


@examples(100)
@given(st.binary(max_size=60))
def test_any_base_shapes(base_shapes: tuple[Path, str], content: bytes) -> None:
    path, _ = base_shapes
    for prefix in (b"", b"# mup-megatron: "):
        path.write_bytes(prefix + content)
        try_base_shapes(path)


# --- transfer records ---


def try_transfer(path: Path, config: Config) -> None:
    """As `transfer` and `train` read and show it."""
    try:
        found = TransferRecord.read(path, config)
        assert found is not None
        with_values(config, found.values)
    except UserError as error:
        return said(error, str(path))
    told = remarks(found.study, extrapolated(config, found))
    print_transfer(found, {}, {"forward": FORWARD, "tensors": {}}, told, Console(file=io.StringIO()))


FORWARD = dict.fromkeys(("readout", "softmax_scale", "embedding", "residual"), 1.0)
TRIAL = test_record.STUDY["trials"][0]
TRIALS = [
    {**TRIAL, "slot": slot, "repeats": slot == 2, "values": {**test_record.VALUES, "lr": 0.001 * slot}}
    for slot in (1, 2, 3)
]
NOISY: dict[str, Any] = {
    **test_record.STUDY,
    "noise": 0.01,
    "ranges": {"lr": {"low": 1e-3, "high": 1e-1, "log": True}},
    "candidates": [
        {"slot": 1, "losses": [2.5, 2.51], "mean": 2.505, "within_noise": False},
        {"slot": 2, "losses": [2.5, None], "mean": 2.5, "within_noise": True},
    ],
    "trials": TRIALS,
}
"""A study of which there is more to say: with repetitions, so that noise is known."""


@examples(800)
@given(MUTATIONS, st.booleans(), st.sampled_from([None, "study", "proxy", "values"]))
def test_mutated_transfer_records(
    record: TransferRecord, tmp_path_factory: pytest.TempPathFactory, mutations: Any, sealed: bool, part: str | None
) -> None:
    """Also with a checksum that agrees, as of a record that another version, or someone's script, wrote."""
    path = tmp_path_factory.getbasetemp() / "transfer.json"
    good = {**record.as_json(), "study": NOISY}
    changed = mutate(good, mutations) if part is None else {**good, part: mutate(good[part], mutations)}
    changed = json.loads(json.dumps(changed))  # keys are text then
    if sealed and isinstance(changed, dict):
        changed["checksum"] = digest({key: value for key, value in changed.items() if key != "checksum"})
    path.write_text(json.dumps(changed), encoding="utf-8")
    try_transfer(path, test_record.config_in(path.parent))


@examples(300)
@given(st.one_of(st.binary(max_size=60), VALUES.map(lambda value: json.dumps(value).encode())))
def test_any_transfer_record(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "transfer.json"
    path.write_bytes(content)
    try_transfer(path, test_record.config_in(path.parent))


# --- DeepSpeed's JSON ---

DEEPSPEED: dict[str, Any] = {
    "train_batch_size": "auto",
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "none"}, "reduce_bucket_size": 1000},
    "bf16": {"enabled": False},
    "fp16": {"enabled": False},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "scheduler": {"type": "WarmupLR"},
}


def try_deepspeed(path: Path) -> None:
    config = make(MIXED, parallel__deepspeed_config=str(path))
    try:
        deepspeed_config(config, resolve_layout(config, 1))
    except UserError as error:
        said(error, str(path))


@examples(1500)
@given(MUTATIONS, st.sets(st.sampled_from(sorted(DEEPSPEED)), min_size=1))
def test_mutated_deepspeed_configs(tmp_path_factory: pytest.TempPathFactory, mutations: Any, kept: set[str]) -> None:
    path = tmp_path_factory.getbasetemp() / "deepspeed.json"
    changed = mutate({key: DEEPSPEED[key] for key in sorted(kept)}, mutations)
    path.write_text(json.dumps(changed), encoding="utf-8")
    try_deepspeed(path)


@examples(300)
@given(st.one_of(st.binary(max_size=60), VALUES.map(lambda value: json.dumps(value).encode())))
def test_any_deepspeed_config(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "deepspeed.json"
    path.write_bytes(content)
    try_deepspeed(path)
