"""Text of one's own: cut into documents so that there is validation text, and checked before anything is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mup_megatron import cli
from mup_megatron.config import Config, derive
from mup_megatron.data.corpus import Corpus, cut
from mup_megatron.data.parts import part_bounds
from mup_megatron.data.prepare import prepare
from mup_megatron.data.tokenizer import train_sentencepiece
from mup_megatron.util.errors import UserError
from tests.helpers.configs import MIXED, make

PARAGRAPH = "A sentence of this text.\nAnother one of it.\n\n"  # 45 characters
BYTES = {"library": "byte-level"}


def own(tmp_path: Path, *texts: str, **overrides: Any) -> Config:
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    files = [str(tmp_path / f"{number}.txt") for number in range(len(texts))]
    settings = {"data__split": "98,2,0", "data__dir": str(tmp_path / "data"), "data__tokenizer": BYTES}
    settings["tuning"] = {"max_compute_share": 1000.0}
    return make(MIXED, "gpt3", **{**settings, "data__files": files, **overrides})


def test_a_text_is_cut_at_paragraphs() -> None:
    pieces = cut(PARAGRAPH * 1000)
    assert 100 <= len(pieces) <= 200
    assert all(piece.endswith("\n\n") and len(piece) % 45 == 0 for piece in pieces)
    # 45,000 characters: a hundredth is 450, which ten paragraphs fill.
    assert pieces == [PARAGRAPH * 10] * 100


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("", [""]),
        ("x" * 200, ["x" * 200]),
        ("x" * 201, ["x" * 200, "x"]),
        ("x" * 150 + " " + "y" * 100, ["x" * 150 + " ", "y" * 100]),
        ("x" * 120 + "\n" + "y" * 50 + " " + "z" * 100, ["x" * 120 + "\n", "y" * 50 + " " + "z" * 100]),
        # An empty line in the first half is too early: documents would be short.
        ("x" * 50 + "\n\n" + "y" * 200, ["x" * 50 + "\n\n" + "y" * 148, "y" * 52]),
    ],
)
def test_where_a_text_is_cut(text: str, pieces: list[str]) -> None:
    assert cut(text) == pieces


@given(st.text(alphabet="ab \n", max_size=4000))
def test_nothing_is_lost(text: str) -> None:
    pieces = cut(text)
    assert "".join(pieces) == text
    assert len(pieces) <= 200


def test_one_file_has_validation_text(tmp_path: Path) -> None:
    settings = own(tmp_path, PARAGRAPH * 1000, training__eval_interval=5)
    prepared = prepare(settings)
    assert prepared.documents == 100
    assert prepared.tokens == 45_000 + 100  # a byte is a token, and one ends each document
    assert part_bounds("98,2,0", prepared.documents) == [(0, 98), (98, 100), (100, 100)]


@pytest.mark.parametrize(
    ("files", "split", "cuts"),
    [(1, "100,0,0", False), (1, "98,2,0", True), (24, "98,2,0", True), (25, "98,2,0", False)],
)
def test_files_are_cut_where_a_part_would_be_empty(tmp_path: Path, files: int, split: str, cuts: bool) -> None:
    """round(0.98 * 24) is 24, round(0.98 * 25) is 24 too: with 25 documents one is for validation."""
    settings = own(tmp_path, *(["A text."] * files), data__split=split)
    assert Corpus(settings).cuts is cuts
    assert list(Corpus(settings).documents()) == ["A text."] * files


def test_many_files_and_json_lines_stay_as_they_are(tmp_path: Path) -> None:
    many = own(tmp_path, *([PARAGRAPH * 100] * 25))
    assert list(Corpus(many).documents()) == [PARAGRAPH * 100] * 25
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    lines = own(tmp_path, PARAGRAPH * 100, data__files=[str(tmp_path / "a.jsonl"), str(tmp_path / "0.txt")])
    assert list(Corpus(lines).documents()) == ["one", PARAGRAPH * 100]


def test_data_of_many_files_are_those_of_earlier_versions(tmp_path: Path) -> None:
    """Their digest does not know that files may be cut; that of a file that is cut does."""
    from mup_megatron.data import prepare as module

    digests = []
    for texts in ([PARAGRAPH] * 25, [PARAGRAPH]):
        settings = own(tmp_path, *texts)
        with pytest.MonkeyPatch.context() as patch:
            before = module._digest(Corpus(settings))
            patch.setattr(module, "_TOKENS_OF_CUT_FILES", "another way to cut")
            digests.append(before == module._digest(Corpus(settings)))
    assert digests == [True, False]


def run(tmp_path: Path, settings: Config, capsys: pytest.CaptureFixture[str], command: str) -> tuple[int, str]:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(settings.model_dump()))
    status = cli.run([command, str(path)])
    return status, capsys.readouterr().err


def test_a_text_that_is_too_short_is_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = own(tmp_path, PARAGRAPH * 20, training__eval_interval=5, run__dir=str(tmp_path / "run"))
    problem = "data.split: 98,2,0 leaves no validation text of the 5 documents"
    remedy = "expected 25 documents or more, or a larger share, such as 90,10,0"
    # 20 paragraphs of 45 characters; four of them fit into the 200 of a document.
    status, said = run(tmp_path, short, capsys, "plan")
    assert status == 0
    assert said.startswith(f"warning: {problem}; {remedy}")
    status, said = run(tmp_path, short, capsys, "prepare")
    assert status == 2
    assert problem in said
    assert remedy in said
    larger = derive(short, {"data.split": "90,10,0", "data.dir": str(tmp_path / "larger")})
    assert run(tmp_path, larger, capsys, "prepare")[0] == 0


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("my.txt", b"caf\xe9\n" * 50, "byte 3 is 0xe9; if this is Latin-1, convert it: iconv -f latin1 -t utf-8 "),
        ("my.txt", "some text".encode("utf-16"), "byte 0 is the mark of UTF-16, convert it: iconv -f utf-16 -t utf-8 "),
        ("my.jsonl", b'{"text": "caf\xe9"}\n', "byte 13 is 0xe9; if this is Latin-1, convert it: iconv -f latin1 "),
    ],
    ids=["latin1", "utf16", "json lines"],
)
def test_text_in_another_encoding_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, said: str
) -> None:
    """With text in UTF-8 before it, of which nothing is made: no data folder, and no folder of `new`."""
    wrong = tmp_path / name
    wrong.write_bytes(content)
    files = [str(tmp_path / "0.txt"), str(wrong)]
    settings = own(tmp_path, PARAGRAPH * 1000, data__files=files, run__dir=str(tmp_path / "run"))
    for command, status in (("prepare", 2), ("plan", 0)):
        found, sentence = run(tmp_path, settings, capsys, command)
        assert found == status
        assert f"data.files: {wrong}, line 1: not UTF-8 text: {said}" in sentence
        assert len(sentence.splitlines()) == 1
    assert not (tmp_path / "data").exists()
    assert not (tmp_path / "run").exists()
    assert cli.run(["new", str(tmp_path / "new"), "--text", files[0], "--text", files[1]]) == 2
    assert f"error: --text: {wrong}, line 1: not UTF-8 text: {said}" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_folder_is_the_text_in_it(tmp_path: Path) -> None:
    """By path, at any depth; of what ends otherwise, and of what is hidden, nothing."""
    folder = tmp_path / "text"
    for name in ("b.md", "a/c.txt", "a/b/d.jsonl", "e.json", "f.csv", ".hidden.txt", ".git/g.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"text": "x"}\n' if ".json" in name else name)
    settings = own(tmp_path, "first", data__files=[str(tmp_path / "0.txt"), str(folder)])
    named = [path.relative_to(tmp_path).as_posix() for path in Corpus(settings).files]
    assert named == ["0.txt", "text/a/b/d.jsonl", "text/a/c.txt", "text/b.md", "text/e.json"]
    assert list(Corpus(settings).documents()) == ["first", "x", "a/c.txt", "b.md", "x"]
    assert not Corpus(settings).cuts  # since there are JSON lines in the folder


def test_a_study_does_not_begin_without_validation_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    search = {"lr": {"log_uniform": [1e-3, 1e-1]}}
    settings = own(
        tmp_path,
        PARAGRAPH * 20,
        run__dir=str(tmp_path / "run"),
        base={"hidden_size": 64},
        proxy={"hidden_size": 64},
        tuning={"search": search, "trials": 2, "train_steps": 4, "max_compute_share": 1000.0},
    )
    status, said = run(tmp_path, settings, capsys, "tune")
    assert status == 2
    assert "leaves no validation text of the 5 documents" in said
    assert not list((tmp_path / "run").glob("tuning/trial-*"))


def test_plan_says_which_file_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = own(tmp_path, PARAGRAPH, run__dir=str(tmp_path / "run"), data__files=["none.txt"])
    status, said = run(tmp_path, settings, capsys, "plan")
    assert status == 0
    assert f"data.files: no such file: none.txt in {Path.cwd()}" in said


def test_a_file_as_corpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = own(tmp_path, PARAGRAPH).model_dump()
    data["data"] = {"corpus": "my.txt", "tokenizer": BYTES}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(data))
    assert cli.run(["plan", str(path)]) == 2
    said = capsys.readouterr().err
    assert (
        "data.corpus: expected one of 'stdlib', 'english' or 'libreoffice-help', found 'my.txt'; text of "
        "your own goes under data.files" in said
    )


@pytest.mark.parametrize(
    ("text", "size", "sentence"),
    [
        ("hello world\n" * 30, 5000, r"5000 is more than the corpus holds; expected at most \d+, or more text$"),
        ("hello world\n" * 30, 100, r"100 is less than the corpus's characters need; expected at least \d+$"),
        ("", 300, r"cannot train 300 pieces on this corpus; expected more text, or another size$"),
    ],
)
def test_a_vocabulary_that_does_not_fit(tmp_path: Path, text: str, size: int, sentence: str) -> None:
    with pytest.raises(UserError, match=rf"^data\.tokenizer\.vocab_size: {sentence}") as raised:
        train_sentencepiece([text], size, tmp_path / "tokenizer.model")
    named = [int(word) for word in str(raised.value).replace(",", " ").split() if word.isdigit()]
    if text:  # the size that it names works, and the next one does not
        train_sentencepiece([text], named[-1], tmp_path / "tokenizer.model")
        with pytest.raises(UserError):
            train_sentencepiece([text], named[-1] + (1 if size > named[-1] else -1), tmp_path / "tokenizer.model")


@pytest.mark.parametrize("text", [PARAGRAPH * 300, "x" * 12_000], ids=["paragraphs", "a line without end"])
def test_a_single_file_trains_and_is_evaluated(tmp_path: Path, text: str) -> None:
    """With the default split: a step, then an evaluation on the text that was kept for it."""
    path = tmp_path / "run.yaml"
    settings = own(
        tmp_path,
        text,
        run__dir=str(tmp_path / "run"),
        training__train_steps=1,
        training__lr_warmup_steps=0,
        training__eval_interval=1,
        training__eval_steps=1,
    )
    path.write_text(yaml.safe_dump(settings.model_dump()))
    assert cli.run(["train", str(path)]) == 0
    found = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [set(line) & {"loss", "eval_loss"} for line in found] == [{"loss"}, {"eval_loss"}]
