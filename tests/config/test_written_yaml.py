"""What the library writes as YAML is read again as the same data, command lines of a study's trials among it."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mup_megatron.config import load_config
from mup_megatron.megatron_training.tuning_config import write_tuning_config
from mup_megatron.util.errors import UserError
from mup_megatron.util.files import as_yaml, parse_yaml
from tests.helpers.configs import MIXED, make

pytestmark = pytest.mark.more

COUNT = settings.default.max_examples  # 100, and 500 with --all
DRAWN = settings(
    max_examples=COUNT,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)

# Of every kind that Megatron's parser takes: numbers as people spell them, lists, quotes that a shell has left, paths,
# and words that a reader of YAML takes for something else.
ARGUMENTS = (
    *(
        "1e-2",
        "1E-2",
        "3e4",
        "1.e-5",
        ".5e+3",
        "+1e6",
        "-1e-8",
        "1_000",
        "0x1f",
        "0o17",
        "017",
        "1:30",
        ".inf",
        "-.nan",
    ),
    *("0.01", "-1", "007", "99,1,0", "'99,1,0'", "127,0", "([0]*1+[1]*1)", "[1,2]", "{a: b}", "*2+1", "a: b", "# no"),
    *("true", "No", "~", "null", "on", "=", "<<", "!", "&a", "*a", "@", "%", "|", ">", "- ", "? ", "---", "...", ":"),
    *("2001-01-01", "2001-01-01T00:00:00Z", "", " ", " lead", "trail ", "a\nb", "a\n", "\t", "\0", "\x85", "é", "µP"),
    *("s3://bucket/x", "C:\\x", "0.3 a_text_document 0.7 b_text_document", "Et,*M", "'", '"', "''", "x" * 300),
)
NUMBERS = st.builds(
    lambda value, form: format(value, form),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["e", "E", "g", ".0e", "+.3e", "f", ".17g"]),
)
# Halves of characters are no text of YAML: config/checks.py refuses them in a sentence, and so does its reader.
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
WORDS = st.one_of(st.sampled_from(ARGUMENTS), NUMBERS, st.integers().map(str), TEXT)
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), WORDS)
# A config holds no control characters: config/checks.py refuses them in a sentence.
TYPED = WORDS.filter(lambda word: all(unicodedata.category(sign) not in ("Cc", "Zl", "Zp") for sign in word))
DATA = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=4), max_leaves=12
)


@DRAWN
@given(DATA, st.sampled_from([80, 120]), st.booleans())
def test_plain_data(data: Any, width: int, lists_on_a_line: bool) -> None:
    assert parse_yaml(as_yaml(data, width=width, lists_on_a_line=lists_on_a_line), "text") == data


def test_half_a_character_is_refused() -> None:
    """A byte of a command line that is not UTF-8, as Python has it in sys.argv."""
    with pytest.raises(UserError, match=r"^text: line 1: not valid YAML: "):
        parse_yaml(as_yaml("undecodable \udcff"), "text")


def test_every_argument_as_a_key_and_a_value() -> None:
    data = {word: word for word in ARGUMENTS}
    assert parse_yaml(as_yaml(data), "text") == data


@settings(DRAWN, max_examples=COUNT // 5)
@given(st.lists(TYPED, max_size=12))
def test_a_command_line_of_a_study(tmp_path_factory: pytest.TempPathFactory, words: list[str]) -> None:
    """Through the file that `tune --megatron` writes, into the config that it reads."""
    path: Path = tmp_path_factory.getbasetemp() / "proxy.yaml"
    path.unlink(missing_ok=True)
    command = ["p.py", "--lr", "1e-2", *words]
    write_tuning_config(path, make(MIXED), (), command)
    assert load_config(path).tuning.command == command
