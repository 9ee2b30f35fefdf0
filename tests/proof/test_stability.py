"""Stable optima and reverse transfer: grids of real runs, what is trained once only, what a grid says."""

from __future__ import annotations

import json
import math
import signal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml
from matplotlib import image

from mup_megatron import cli
from mup_megatron.config import Config, derive, load_config
from mup_megatron.engines.setup.megatron import emerging_missing
from mup_megatron.model.build import parametrize
from mup_megatron.parallel.ranks import Rank
from mup_megatron.proof import grid, stability
from mup_megatron.proof.grid import Grid, Outcome
from mup_megatron.proof.optimum import Curve
from mup_megatron.proof.question import Question
from mup_megatron.proof.question import question as ask_question
from mup_megatron.proof.reverse import rise, small_model
from mup_megatron.report.stability import draw_stability, title
from mup_megatron.tuning.space import one_process
from mup_megatron.util.errors import ConfigError, UserError
from mup_megatron.util.provenance import KEYS
from tests.helpers import bodies
from tests.helpers.commands import Background, losses, metrics, mup, until
from tests.helpers.configs import MIXED, make
from tests.helpers.distributed import Ranks

# Of MIXED's base: hidden 64, FFN 64, 4 heads, one query group.
SMALL = {"data__split": "80,20,0", "training__train_steps": 6, "training__eval_steps": 2}


def config_of(folder: Path, **keys: Any) -> Config:
    return make(MIXED, "gpt3", run__dir=str(folder / "run"), **{**SMALL, **keys})


def asked(config: Config, **keys: Any) -> Question:
    return ask_question(config, **{"over": "lr", "across": "width", **keys})


def ask(config: Config, folder: Path, **keys: Any) -> tuple[dict[str, Any], list[str]]:
    said: list[str] = []
    grid = Grid(directory=folder, rank=Rank(), workers=1, say=said.append)
    return stability.stability(config, asked(config, **keys), grid), said


def test_what_is_not_said(tmp_path: Path) -> None:
    question = asked(config_of(tmp_path))
    assert question.values == [8e-3 * 2.0**power for power in range(-4, 5)]
    assert question.factors == [1, 2, 4, 8]
    assert (question.least, question.seeds, question.compare_with) == (1, 3, ["standard", "fan_in"])
    schedules = asked(config_of(tmp_path), over="lr_schedule").values
    assert schedules == ["linear", "cosine", "inverse-square-root", "constant"]


def test_what_a_beta_varies_by(tmp_path: Path) -> None:
    """Of 1 - 0.95 and 1 - 0.9 the octaves up to 1; by hand: 1 - 0.05 / 4 = 0.9875."""
    over = {"over": "one_minus_beta2", "others": [], "seeds": 1, "factors": [1, 2]}
    question = asked(config_of(tmp_path), **over)
    assert question.values == [0.05 * 2.0**power for power in range(-4, 5)]
    first = asked(config_of(tmp_path), over="one_minus_beta1")
    assert first.values == [0.1 * 2.0**power for power in range(-4, 4)]
    jobs = stability.jobs_of(config_of(tmp_path), asked(config_of(tmp_path), **over, values="0.0125,0.05,0.2"))
    assert {run.value: job.config.optimizer.betas for run, job in jobs.items()} == {
        0.0125: [0.9, 0.9875],
        0.05: [0.9, 0.95],
        0.2: [0.9, 0.8],
    }


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"over": "one_minus_momentum"},
            "--over: one_minus_momentum: moves nothing: optimizer.name adamw has no momentum",
        ),
        ({"over": "beta"}, "--over: beta: no hyperparameter; expected one of lr, init_method_std"),
        ({"across": "time"}, "--across: time: expected one of width, depth, experts, batch, sequence, tokens"),
        ({"factors": [2]}, "--sizes: 2: expected two different factors"),
        ({"factors": [0, 1]}, "--sizes: 0,1: expected two different factors or more, from 1 on"),
        ({"least": 8}, "--from: 8: expected one of the factors below the largest, [1, 2, 4]"),
        ({"values": "1e-3,2e-3"}, "--values: 1e-3,2e-3: a minimum needs three"),
        ({"values": "1,x,3"}, "--values: 1,x,3: a minimum needs three different positive numbers"),
        ({"values": "0,1,2"}, "--values: 0,1,2: a minimum needs three different positive numbers"),
        ({"over": "weight_decay"}, "--values: missing; hparams.weight_decay is 0.0"),
        ({"seeds": 0}, "--seeds: 0: expected 1 or more"),
        (
            {"growth": {"hidden_size": [1, 2]}, "factors": [1, 2]},
            "--growth: says how each width grows; expected",
        ),
        ({"growth": {"hidden_size": [1, 2]}, "across": "depth"}, "expected no --sizes, and --across width"),
        ({"growth": {"hidden_size": [2, 1]}}, "the size that grows most has to grow with every model"),
        ({"growth": {"hidden_size": [1, Fraction(3, 2)]}}, "--growth hidden_size: grows most; expected whole factors"),
        ({"growth": {"num_layers": [1, 2]}}, "--growth num_layers: base: does not name it; expected one of"),
        ({"others": ["mup", "between"]}, "--compare: test: parametrization.name: expected one of 'mup', "),
    ],
)
def test_bad_questions(tmp_path: Path, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        asked(config_of(tmp_path, hparams__weight_decay=0.0), **keys)
    assert said in str(error.value)


def test_a_size_or_value_that_makes_no_config(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--values: triangle"):
        stability.jobs_of(config_of(tmp_path), asked(config_of(tmp_path), over="lr_schedule", values="linear,triangle"))
    fixed = make({"model": MIXED["model"], "base": {}}, "gpt3", parametrization__name="standard", **SMALL)
    with pytest.raises(UserError, match="names no size that grows"):
        stability.jobs_of(fixed, asked(fixed, factors=[1, 2]))
    unsplit = config_of(tmp_path, data__split="100,0,0")
    with pytest.raises(UserError, match=r"data\.split.*nothing to validate on"):
        stability.jobs_of(unsplit, asked(unsplit))


@pytest.mark.skipif(emerging_missing("muon") is None, reason="muon is there, so that nothing of it is refused")
def test_what_every_run_would_refuse_is_refused_before_the_first(tmp_path: Path) -> None:
    muon = config_of(
        tmp_path, optimizer={"name": "muon"}, parallel={"engine": "megatron", "use_distributed_optimizer": False}
    )
    with pytest.raises(ConfigError) as error:
        stability.jobs_of(muon, asked(muon))
    assert (error.value.key, error.value.problem) == ("optimizer.name", emerging_missing("muon"))


@pytest.mark.parametrize(
    ("across", "sizes"),
    [
        ("width", {1: 64, 4: 256}),
        ("depth", {1: 2, 4: 8}),
        ("batch", {1: 8, 4: 32}),
        ("sequence", {1: 32, 4: 128}),
        ("tokens", {1: 6 * 8 * 32, 4: 24 * 8 * 32}),
    ],
)
def test_what_grows_and_nothing_else(tmp_path: Path, across: Any, sizes: dict[int, int]) -> None:
    config = config_of(tmp_path, training__lr_warmup_steps=2, parallel__zero_stage=3)
    jobs = stability.jobs_of(config, asked(config, across=across, factors=[1, 4], seeds=2, others=()))
    assert {run.factor: stability.size_of(job.config, across) for run, job in jobs.items()} == sizes
    assert len({job.name for job in jobs.values()}) == len(jobs) == 2 * 9 * 2
    for run, job in jobs.items():
        made = job.config
        assert (made.hparams.lr, made.run.seed, made.parametrization.name) == (run.value, run.seed, run.parametrization)
        assert made.training.eval_interval == made.training.train_steps
        assert made.training.lr_warmup_steps == (8 if across == "tokens" and run.factor == 4 else 2)
        assert made.parallel == one_process(config).parallel
        for other in ("width", "depth", "batch", "sequence"):
            if other != across:  # the config's own, which for the width is no multiple of the base
                assert stability.size_of(made, other) == stability.size_of(config, other)


def test_sizes_that_grow_by_factors_of_their_own(tmp_path: Path) -> None:
    """The FFN grows 8 times where the hidden size doubles; what is not named stays at its base."""
    config = config_of(tmp_path)
    question = asked(config, growth=growth_of("hidden_size=1,2", "ffn_hidden_size=1,8"), seeds=1, others=())
    assert (question.factors, question.least, question.name) == ([1, 8], 1, "lr-growth")
    jobs = stability.jobs_of(config, question)
    models = {run.factor: job.config.model for run, job in jobs.items()}
    assert {by: (model.hidden_size, model.ffn_hidden_size) for by, model in models.items()} == {
        1: (64, 64), 8: (128, 512),
    }  # fmt: skip
    assert [(model.num_attention_heads, model.num_query_groups) for model in models.values()] == [(4, 1)] * 2
    name = jobs[stability.Run("mup", 8, 8e-3, config.run.seed)].name
    assert name == f"mup-hidden_size-2-ffn_hidden_size-8-lr-0.008-seed-{config.run.seed}"
    found = result_of(config, question, bowl({"mup": 0}))
    assert [size["size"] for size in found["sizes"]] == [64, 128]
    assert found["growth"] == {"hidden_size": ["1", "2"], "ffn_hidden_size": ["1", "8"]}
    assert stability.lines(found)[1:3] == ["hidden_size grows by 1, 2", "ffn_hidden_size grows by 1, 8"]
    # Where the hidden size does not grow each time, models are told apart by what grows most.
    narrow = asked(config, growth=growth_of("hidden_size=1,1,3/2", "ffn_hidden_size=1,2,8"), seeds=1, others=())
    found = result_of(config, narrow, bowl({"mup": 0}))
    assert ([size["size"] for size in found["sizes"]], found["axis"]) == ([64, 128, 512], "ffn hidden size")
    assert {job.name.partition("-lr")[0] for job in stability.jobs_of(config, narrow).values()} == {
        "mup-hidden_size-1-ffn_hidden_size-1",
        "mup-hidden_size-1-ffn_hidden_size-2",
        "mup-hidden_size-3_2-ffn_hidden_size-8",
    }


def growth_of(*words: str) -> dict[str, list[Fraction]]:
    return {key: [Fraction(by) for by in factors.split(",")] for key, _, factors in (w.partition("=") for w in words)}


def test_parametrizations_share_what_is_the_same_run(tmp_path: Path) -> None:
    """At the base all three say the same of every tensor, so its runs are µP's alone; elsewhere each has its own."""
    config = config_of(tmp_path)
    jobs = stability.jobs_of(config, asked(config, factors=[1, 2, 4], seeds=2))
    at_base = {run: job for run, job in jobs.items() if run.factor == 1}
    assert {job.name.partition("-")[0] for job in at_base.values()} == {"mup"}
    for run, job in jobs.items():
        assert job.name.startswith("mup" if run.factor == 1 else run.parametrization)
        assert job.config.parametrization.name == job.name.partition("-")[0]
    assert len(jobs) == 3 * 9 * 2 * 3
    assert len({job.name for job in jobs.values()}) == len(jobs) - 2 * 9 * 2
    # Of points of the plane, (1, 1) is µP's.
    plane = [f"interpolate:{init},{lr}" for init in (0.5, 1) for lr in (0, 1)]
    jobs = stability.jobs_of(config, asked(config, factors=[1, 2], seeds=1, others=["mup", *plane]))
    names = [run.parametrization for run in jobs if (run.factor, run.value) == (2, 8e-3)]
    assert names == ["mup", *plane]
    own = {job.config.parametrization.name for run, job in jobs.items() if run.factor == 2}
    assert own == set(names) - {"interpolate:1,1"}
    # Of a size that is not the base none is shared: under batch, the model is the config's own.
    jobs = stability.jobs_of(config, asked(config, across="batch", factors=[1, 2], seeds=1))
    assert len({job.name for job in jobs.values()}) == len(jobs)


@pytest.mark.slow
def test_a_shared_run_is_each_ones_own(tmp_path: Path, ranks: Ranks) -> None:
    """The run at the base trained under each of the parametrizations by itself: the same losses to the last bit."""
    config = config_of(tmp_path, training__train_steps=4)
    jobs = stability.jobs_of(config, asked(config, factors=[1, 2], seeds=1))
    shared = jobs[stability.Run("standard", 1, 8e-3, config.run.seed)].config
    found = []
    for name in ("mup", "standard", "fan_in"):
        given = derive(shared, {"parametrization.name": name, "run.dir": str(tmp_path / name)}).model_dump()
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(given))
        ((status, _, err),) = ranks.run(1, bodies.command, arguments=["train", str(tmp_path / f"{name}.yaml")])
        assert status == 0, err
        found.append(losses(tmp_path / name))
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 4


def outcome(loss: float) -> Outcome:
    return Outcome(
        state="complete" if math.isfinite(loss) else "diverged", loss=loss, seconds=1.0, reason="loss is inf"
    )


def result_of(config: Config, question: Question, loss: Any) -> dict[str, Any]:
    jobs = stability.jobs_of(config, question)
    return stability._result(config, question, jobs, {job.name: outcome(loss(run)) for run, job in jobs.items()})


def bowl(moves: dict[str, float]) -> Any:
    """Losses least at the config's own rate, which moves by some octaves per doubling of the size."""

    def loss(run: Any) -> float:
        off = math.log2(run.value / 8e-3) - moves.get(run.parametrization, 0.0) * math.log2(run.factor)
        return 3 - 0.1 * math.log2(run.factor) + 0.02 * off**2 + 0.001 * (run.seed % 3)

    return loss


def test_a_verdict_and_its_control(tmp_path: Path) -> None:
    """Minima that stay pass, and those that move by an octave per doubling fail, by drift and by cost."""
    config = config_of(tmp_path)
    still = result_of(config, asked(config), bowl({"mup": 0.1, "standard": -1}))
    assert (still["verdict"], still["passed"]) == ("passed", True)
    rows = still["lines"]["mup"]["rows"]
    assert rows[0]["drift"]["octaves"] == pytest.approx(0.3)
    assert rows[0]["cost"] == 0
    assert not any(still["lines"]["mup"]["larger_is_worse"].values())
    other = still["lines"]["standard"]
    assert other["rows"][0]["drift"]["octaves"] == pytest.approx(-3)
    assert other["rows"][0]["cost"] == pytest.approx(0.02 * 9 / 2.701, rel=1e-3)
    assert len(other["reasons"]) == 2
    assert json.loads(json.dumps(still)) == still
    assert "passed: mup's best lr stays" in stability.lines(still)

    assert list(still["lines"]) == ["mup", "standard", "fan_in"]
    assert title(still, "mup") == ("mup: passes (3 seeds)", "64's best costs 0.00 % at 512, moves +0.30 octaves")
    assert title(still, "standard")[0] == "standard: does not pass (3 seeds)"

    moved = result_of(config, asked(config), bowl({"mup": -1, "standard": 0}))
    assert not moved["passed"]
    assert moved["lines"]["mup"]["reasons"][1] == "the best lr moves by -3.00 octaves to 512"
    # From a size on, within which it moves by less.
    near = result_of(config, asked(config, least=4), bowl({"mup": -0.4, "standard": 0}))
    assert near["passed"]
    assert near["from"] == 256
    assert title(near, "mup")[1].startswith("256's best costs")
    assert not result_of(config, asked(config), bowl({"mup": -0.4, "standard": 0}))["passed"]


def test_a_picture_of_many_parametrizations(tmp_path: Path) -> None:
    """Five panels abreast; of more, the judged one stands in a row of its own, so that those of seven need three."""
    config = config_of(tmp_path)
    many = [f"interpolate:{init},0.5" for init in (0, 0.25, 0.5, 0.75, 1, 2)]
    found = result_of(config, asked(config, factors=[1, 2], seeds=1, others=many), bowl({}))
    height, width, _ = image.imread(draw_stability(found, tmp_path / "many.png")).shape
    assert height / width == pytest.approx(3 * 3.7 / (5 * 4.3), rel=0.01)


@pytest.mark.slow
def test_edges_and_divergence(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    edge = result_of(config, asked(config, values="1e-3,2e-3,4e-3"), bowl({"mup": 0, "standard": 0}))
    assert (edge["verdict"], edge["passed"], edge["lines"]["mup"]["reasons"]) == ("undecided", False, [])
    assert [line[:47] for line in edge["lines"]["mup"]["open"]] == [
        "64: the highest lr that was tried is the best; ",
        "512: the highest lr that was tried is the best;",
    ]
    said = stability.lines(edge)
    assert said[-1] == "undecided: whether mup's best lr stays is not known"
    assert not any("does not stay" in line for line in said)
    # The small model's best is 8e-3; the large one's is 1.6e-2 or beyond, an octave higher at least.
    beyond = result_of(config, asked(config, values="4e-3,8e-3,1.6e-2"), bowl({"mup": 1, "standard": 0}))
    assert beyond["verdict"] == "failed"
    assert "the best lr moves by +1.00 octaves or more to 512" in beyond["lines"]["mup"]["reasons"]
    assert stability.lines(beyond)[-1] == "failed: mup's best lr does not stay"
    assert title(edge, "mup")[1].endswith(", may lie beyond what was tried")

    def diverges(run: Any) -> float:
        return math.inf if run.value > 8e-3 and run.factor == 8 else bowl({"mup": 0, "standard": 0})(run)

    partly = result_of(config, asked(config), diverges)
    assert partly["lines"]["mup"]["open"] == [
        "512: a run beside the best lr (0.008) diverged or failed; expected --values nearer to it"
    ]
    # Of values a quarter of an octave apart the best is known well enough: it is between those beside it.
    near = ",".join(f"{8e-3 * 2 ** (step / 4):.9g}" for step in range(-4, 5))
    assert result_of(config, asked(config, values=near), diverges)["passed"]
    assert partly["lines"]["mup"]["rows"][-1]["losses"][-1] == [None] * 3
    with pytest.raises(UserError, match="mup, width 512: no value of lr has a finite loss"):
        result_of(config, asked(config), lambda run: math.inf if run.factor == 8 else 3.0)


@pytest.mark.parametrize(
    ("moves", "values", "status"),
    [*(pytest.param(*each, marks=pytest.mark.slow) for each in ((0, "", 0), (-1, "", 1))), (0, "1e-3,2e-3,4e-3", 3)],
)
def test_the_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moves: float, values: str, status: int
) -> None:
    """Passed, failed, undecided: of losses that are given, so that nothing trains."""
    config = config_of(tmp_path)
    found = result_of(config, asked(config, values=values), bowl({"mup": moves, "standard": 0}))
    compared: list[Any] = []

    def given(_config: Config, question: Question, _grid: Grid) -> dict[str, Any]:
        compared.append((question.compare_with, question.growth))
        return found

    monkeypatch.setattr(stability, "stability", given)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config.model_dump()))
    words = ["stability", str(tmp_path / "run.yaml"), "--output", str(tmp_path / "out"), "--workers", "1"]
    (tmp_path / "out").mkdir()
    assert cli.run([*words, "--compare", "ntk", "--compare=interpolate:1,0.5"]) == status
    assert compared == [(["ntk", "interpolate:1,0.5"], {})]
    assert cli.run([*words, "--growth=hidden_size=1,2", "--growth", "ffn_hidden_size=1,8", "--no-beside"]) == status
    assert compared[1:] == [([], growth_of("hidden_size=1,2", "ffn_hidden_size=1,8"))]
    written = json.loads((tmp_path / "out" / "lr-width.json").read_text())
    assert written["verdict"] == {0: "passed", 1: "failed", 3: "undecided"}[status]
    assert set(KEYS) <= set(written["provenance"])
    assert (tmp_path / "out" / "lr-width.png").stat().st_size > 10_000


def test_over_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An unset variable of a shell: nothing ran, and nothing passed."""
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config_of(tmp_path).model_dump()))
    assert cli.run(["stability", str(tmp_path / "run.yaml"), "--over", ""]) == 2
    assert "--over: names nothing; expected a hyperparameter or several" in capsys.readouterr().err


def test_a_run_is_of_its_command(tmp_path: Path) -> None:
    """Options of a script that no key of the config says make other runs; an objective of the search does not."""
    config = config_of(tmp_path)
    digests = [
        grid._digest(grid.Job(name="run", config=derive(config, {"tuning.command": command})))
        for command in ([], ["pretrain_gpt.py"], ["pretrain_gpt.py", "--reset-position-ids"])
    ]
    assert len(set(digests)) == 3
    pairs = load_config("configs/t5/iwslt-like.yaml", {"training.eval_translations": 8, "tuning.objective": "bleu"})
    assert grid.comparable(pairs).tuning.objective == "loss"


@pytest.mark.slow
def test_a_grid_is_trained_once(tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run is `train` on one process with that config; then nothing runs again; other settings are refused."""
    unset: dict[str, Any] = {"training__checkpoint_interval": None}
    config = config_of(tmp_path, **unset)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    keys = {"factors": [1, 2], "values": "4e-3,8e-3,1e30", "seeds": 1, "others": ()}
    result, said = ask(config, tmp_path / "grid", **keys)
    assert sum("/6 mup-width-" in line for line in said) == 6
    assert result["lines"]["mup"]["rows"][0]["losses"][2] == [None]  # diverged
    assert any("lr-1e+30-seed-7: diverged" in line for line in said)
    again, said = ask(config, tmp_path / "grid", **keys)
    assert again == result
    assert said[1:] == ["6 of 6 runs are there already"]
    _, said = ask(config_of(tmp_path, run__audit="off", **unset), tmp_path / "grid", **keys)  # its runs look at nothing
    assert said[1:] == ["6 of 6 runs are there already"]
    with pytest.raises(UserError, match="was run with other settings"):
        ask(config_of(tmp_path, training__clip_grad=0.5), tmp_path / "grid", **keys)

    jobs = stability.jobs_of(config, asked(config, **keys))
    (job,) = [job for run, job in jobs.items() if (run.factor, run.value) == (2, 8e-3)]
    alone = job.config.model_dump()
    alone["run"]["dir"] = str(tmp_path / "alone")
    (tmp_path / "alone.yaml").write_text(yaml.safe_dump(alone))
    ((status, _, err),) = ranks.run(1, bodies.command, arguments=["train", str(tmp_path / "alone.yaml")])
    assert status == 0, err
    assert metrics(tmp_path / "alone")[-1]["eval_loss"] == result["lines"]["mup"]["rows"][1]["losses"][1][0]
    there = tmp_path / "grid" / "runs" / job.name
    assert losses(tmp_path / "alone") == losses(there)
    assert list(tmp_path.glob("alone/checkpoints/step_*"))
    assert load_config(there / "config.yaml").training.checkpoint_interval == 0  # nobody goes on from its last step


@pytest.mark.slow
def test_two_commands_share_a_grid_and_one_is_ended(tmp_path: Path) -> None:
    """SIGTERM saves the run at hand; the others' command and a later one end with what an undisturbed one finds."""
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config_of(tmp_path, training__train_steps=60).model_dump()))
    words = ["--sizes", "1,2", "--values", "4e-3,8e-3,1.6e-2", "--seeds", "1", "--workers", "1"]

    def start(folder: str) -> Background:
        return Background("stability", path, *words, "--output", tmp_path / folder)

    first = start("shared")
    until(lambda: list((tmp_path / "shared" / "runs").glob("*/metrics.jsonl")))
    second = start("shared")
    until(lambda: len(list((tmp_path / "shared" / "runs").glob("*.json"))) >= 2)
    first.process.send_signal(signal.SIGTERM)
    _, err = first.process.communicate(timeout=120)
    assert first.process.returncode == 143, err
    out, err = second.process.communicate(timeout=240)
    assert second.process.returncode in (0, 1, 3), err  # any verdict; one seed may leave it undecided
    assert "lr over width, 1 seeds" in out
    whole = mup("stability", path, *words, "--output", tmp_path / "whole")
    assert whole.returncode == second.process.returncode
    ours, theirs = (json.loads((tmp_path / name / "lr-width.json").read_text()) for name in ("shared", "whole"))
    assert ours["lines"] == theirs["lines"]
    assert (tmp_path / "whole" / "lr-width.png").stat().st_size > 10_000
    assert not list((tmp_path / "shared" / "runs").glob("*/checkpoints"))


@pytest.mark.slow
def test_a_run_that_fails_is_said(tmp_path: Path) -> None:
    """And has another chance with the next command."""
    config = config_of(tmp_path)
    keys = {"factors": [1, 2], "values": "4e-3,8e-3,1.6e-2", "seeds": 1, "others": ()}
    runs = tmp_path / "grid" / "runs"
    blocked = runs / "mup-width-1-lr-0.004-seed-7"
    blocked.mkdir(parents=True)
    (blocked / "metrics.jsonl").mkdir()
    result, _ = ask(config, tmp_path / "grid", **keys)
    assert [line.split(":")[0] for line in result["failed"]] == [blocked.name]
    (blocked / "metrics.jsonl").rmdir()
    result, said = ask(config, tmp_path / "grid", **keys)
    assert not result["failed"]
    assert said[1] == "5 of 6 runs are there already"


def test_reversing_swaps_model_and_base(tmp_path: Path) -> None:
    """The small model's rules at the large one's sizes are the standard parametrization's."""
    large = config_of(tmp_path, parametrization__name="standard")
    small = small_model(large)
    assert small.base.width.sizes == {name: MIXED["model"][name] for name in MIXED["base"]}
    assert {name: getattr(small.model, name) for name in MIXED["base"]} == MIXED["base"]
    assert small.parametrization.name == "mup"
    grown = small_model(derive(small, {"parametrization.name": "mup"}))  # twice is where it began
    ours, theirs = parametrize(grown, 375), parametrize(derive(large, {"parametrization.name": "mup"}), 375)
    assert ours.tensors == theirs.tensors
    at_base = derive(small, {f"model.{name}": size for name, size in small.base.width.sizes.items()})
    assert [(each.lr, each.init_std) for each in parametrize(at_base, 375).tensors.values()] == [
        (each.lr, each.init_std) for each in parametrize(large, 375).tensors.values()
    ]


def test_a_minimum_beside_a_run_that_diverged_is_not_known(tmp_path: Path) -> None:
    """The same minima with a finite loss beside the small one's: by hand it moves by more than an octave, and fails."""
    values, asks = (1e-3, 4e-3, 1.6e-2, 6.4e-2), "1e-3,4e-3,1.6e-2,6.4e-2"
    config = config_of(tmp_path)
    question = asked(config, values=asks, factors=[1, 4], seeds=1, others=[])

    def found(highest: float) -> dict[str, Any]:
        small, large = (5.0, 4.5, 4.0, highest), (5.0, 3.5, 3.51, 4.0)
        held = {
            factor: Curve(values=values, losses=[{7: loss} for loss in losses])
            for factor, losses in ((1, small), (4, large))
        }
        return stability.judge({"mup": held}, {1: 64, 4: 256}, question)

    open_ = found(math.inf)
    assert (open_["verdict"], open_["lines"]["mup"]["reasons"]) == ("undecided", [])
    assert open_["lines"]["mup"]["open"] == [
        "64: a run beside the best lr (0.016) diverged or failed; expected --values nearer to it"
    ]
    assert found(4.2)["lines"]["mup"]["reasons"] == ["the best lr moves by -1.44 octaves to 256"]


def test_reversing_leaves_no_rule_over_layers(tmp_path: Path) -> None:
    """The small model has the large one's layers: by hand its branches are multiplied by 1, at any base.num_layers."""
    deep = {"model__num_layers": 8, "base": {**MIXED["base"], "num_layers": 2}, "parametrization__depth": "completep"}
    large = config_of(tmp_path, parametrization__name="standard", **deep)
    assert parametrize(derive(large, {"parametrization.name": "mup"}), 375).forward.residual == 0.25  # control
    small = small_model(large)
    assert small.base.num_layers == 8
    assert parametrize(small, 375).forward.residual == parametrize(large, 375).forward.residual == 1.0


def test_how_far_a_curve_rises_above_its_lowest_point() -> None:
    assert rise([5, 4, 3, 2, 1, 0.5]) == 0
    assert rise([3.0] * 10 + [4.0] * 10) == pytest.approx(1)
    assert rise([1.0]) == 0


@pytest.mark.slow
def test_the_reverse_command(tmp_path: Path) -> None:
    path = tmp_path / "large.yaml"
    path.write_text(yaml.safe_dump(config_of(tmp_path, parametrization__name="standard").model_dump()))
    result = mup("reverse", path, "--rates", "4e-3,1e30", "--beside", "--output", tmp_path / "out")
    assert result.returncode == 0, result.stderr
    assert "small, reversed, lr 0.004, seed 7: rises by" in result.stdout
    assert "large, standard, lr 1e+30, seed 7: diverged after" in result.stdout
    found = json.loads((tmp_path / "out" / "reverse.json").read_text())
    assert [len(curve["losses"]) for curve in found["curves"] if curve["lr"] == 4e-3] == [6, 6, 6]
    assert set(KEYS) <= set(found["provenance"])
    assert (tmp_path / "out" / "reverse.png").stat().st_size > 10_000
    again = mup("train", tmp_path / "out" / "reverse.yaml", "hparams.lr=4e-3")
    assert again.returncode == 0, again.stderr
    assert losses(tmp_path / "run" / "reverse" / "small") == pytest.approx(found["curves"][0]["losses"], rel=1e-5)


@pytest.mark.parametrize(("words", "said"), [(["--rates", "x"], "--rates: x: expected positive numbers")])
def test_bad_reversal(tmp_path: Path, words: list[str], said: str) -> None:
    path = tmp_path / "large.yaml"
    path.write_text(yaml.safe_dump(config_of(tmp_path).model_dump()))
    result = mup("reverse", path, *words)
    assert result.returncode == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr
