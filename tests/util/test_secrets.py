"""Secrets: refused in a config, masked in whatever is said; what a run leaves behind holds none and obeys the umask."""

from __future__ import annotations

import importlib.util
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mup_megatron import cli
from mup_megatron.checkpoints.manifest import CheckpointManifest
from mup_megatron.config import load_config, parse_overrides
from mup_megatron.convert.saved_run import config_here
from mup_megatron.parallel import runtime, upstream
from mup_megatron.report.comparison import write_comparison
from mup_megatron.report.page import write_page
from mup_megatron.util.errors import ConfigError, UserError, shown
from mup_megatron.util.secrets import masked, masked_data
from tests.helpers import postgres
from tests.helpers.commands import environment
from tests.helpers.configs import MIXED, make, pipeline_file

MARKER = "s3cr3t-m4rker"

# The server cuts off nothing: what a URL's grammar allows in a password, and what it does not.
URLS = [
    f"postgresql://me:{MARKER}@host/db",
    f"postgresql+psycopg://me:{MARKER}:@/x@host:5432/db",
    f"postgresql://me:a {MARKER}@host/db",
    f"postgresql://:{MARKER}@host/db",
    f"mysql+pymysql://me@host/db?password={MARKER}",
    f"postgresql://me@host/db?sslmode=require&sslpassword={MARKER}",
    f"postgresql://me@host/db?application_name=x&API_KEY={MARKER}",
    # By another name: encoded, once or twice, in a fragment, inside another option.
    f"postgresql://me@host/db?p%61ssword={MARKER}",
    f"postgresql://me@host/db?p%2561ssword={MARKER}",
    f"postgresql://me%3A{MARKER}@host/db",
    f"postgresql://me@host/db#password={MARKER}",
    f"postgresql://me@host/db?sslmode=require%26password={MARKER}",
    f"postgresql://me@host/db?options=-c%20app.key%3D{MARKER}",
    f"mssql+pyodbc:///?odbc_connect=DRIVER%3DFreeTDS%3BUID%3Dme%3BPWD%3D{MARKER}",
    f"mysql+pymysql://me@host/db?init_command=SET%20%40p%3D%27{MARKER}",
    f"mysql+pymysql://me@host/db?auth={MARKER}",
    f"mysql+pymysql://me@host/db?{MARKER}",
    f"sqlite:///study.db?key={MARKER}",
]

# Of no grammar that SQLAlchemy reads.
MALFORMED = [
    f"postgresql:/u:{MARKER}@h/d",
    f"postgresql:u:{MARKER}@h/d",
    f"postgresql:///u:{MARKER}@h/d",
    f"postgres%71l://u:{MARKER}@h/d",
    f"nothing://u:{MARKER}@h/d",
    f"postgresql://u@{MARKER}@h/d",
]


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("command", ["explain", "tune", "report the key", "report another key", "a list", "no key"])
def test_refused_and_never_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str], url: str, command: str) -> None:
    path = pipeline_file(tmp_path)
    override = {
        "report another key": f"data.cache_dir='{url}'",
        "a list": f"tuning.storage=['{url}', '{url}']",
        "no key": url,
    }.get(command, f"tuning.storage='{url}'")
    status = cli.run([command if command == "tune" else "explain", str(path), override])
    out, err = capfd.readouterr()
    assert status == 2
    assert MARKER not in out + err
    assert err.count("mup-megatron: error") == 1
    if command in ("explain", "tune"):
        assert "tuning.storage: may hold a password or another secret" in err
        assert "PGPASSFILE" in err
        assert "?service=NAME" in err
        assert "read_default_file" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("url", [*MALFORMED, f"u:{MARKER}@h/d", f"postgresql:{MARKER}"])
@pytest.mark.parametrize("given", ["{}", "['{}']", "{{url: '{}'}}"])
def test_malformed_and_never_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str], url: str, given: str) -> None:
    value = given.format(url) if given != "{}" else f"'{url}'"
    assert cli.run(["explain", str(pipeline_file(tmp_path)), f"tuning.storage={value}"]) == 2
    out, err = capfd.readouterr()
    assert MARKER not in out + err
    assert "mup-megatron: error" in err
    assert "tuning.storage: " in err


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("init_command=SET", "its option init_command may hold a secret; expected none but read_default_file,"),
        ("p%61ssword=x", "its option password may hold a secret"),
        ("QUtJQQ", "one of its options may hold a secret"),
        ("charset=utf8%26password%3Dx", "its option charset holds more than letters, digits and plain signs"),
    ],
)
def test_an_option_is_refused_by_its_name(tmp_path: Path, query: str, said: str) -> None:
    with pytest.raises(ConfigError, match=r"tuning\.storage: may hold") as error:
        load_config(pipeline_file(tmp_path), {"tuning.storage": f"mysql+pymysql://me@host/db?{query}"})
    assert said in str(error.value)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+psycopg://me@/db?host=/tmp/sockets&passfile=/home/me/.pgpass&sslkey=/home/me/key.pem",
        "mysql+pymysql://me@host:3306/db?read_default_file=/home/me/.my.cnf",
        "sqlite:////tmp/study.db",
        "sqlite:////tmp/my studies (2)/of@nfs.db",
        "postgresql+psycopg:///?service=studies",
        "postgresql+psycopg://me@/db?host=%2Ftmp%2Fsockets",
        "postgresql://[2001:db8::1]:5432/db",
        "postgresql://me@/db?host=a:5432&host=b:5432&target_session_attrs=read-write",
    ],
)
def test_what_names_a_file_is_no_secret(tmp_path: Path, url: str) -> None:
    path = pipeline_file(tmp_path)
    assert load_config(path, {"tuning.storage": url}).tuning.storage == url
    assert masked(f"cannot open {url}: no") == f"cannot open {url}: no"
    assert masked_data({"storage": [url]}) == {"storage": [url]}


@pytest.mark.parametrize("url", [*URLS, *MALFORMED])
def test_masked_and_shown(url: str) -> None:
    for text in (shown(url), shown([url]), shown({"a": {"b": url}}), str(UserError("x: " + shown(url)))):
        assert MARKER not in text
        assert "***" in text
    assert MARKER not in str(masked_data({url: [url, (1, url)]}))
    if " " not in url:  # in the words of a driver
        said = masked(f"(Error) could not connect to {url} (port 5432)")
        assert MARKER not in said
        assert said.endswith(" (port 5432)")
        assert masked(said) == said


@pytest.mark.parametrize("text", [f"password%3D{MARKER}", f"https://host/?a=b%26token%253D{MARKER}"])
def test_what_percent_signs_hide_is_masked(text: str) -> None:
    """Of no database, whose URLs are masked by their form: it is a secret only when it is decoded, twice in one."""
    assert MARKER not in masked(text)
    assert masked(text).endswith("***")
    assert masked(f"the share is 50%25 of {text[:3]}") == f"the share is 50%25 of {text[:3]}"


def test_a_key_of_weights_and_biases_is_no_project(tmp_path: Path) -> None:
    key = "0123456789abcdef" * 2 + "01234567"
    with pytest.raises(ConfigError, match=r"run\.wandb_project: is a key") as error:
        load_config(pipeline_file(tmp_path), parse_overrides([f"run.wandb_project='{key}'"]))
    assert key not in str(error.value)


def test_of_an_older_version(tmp_path: Path) -> None:
    """A run that wrote its password down is shown without it, and its checkpoint can still be asked for text."""
    config = make(MIXED).model_dump()
    config["tuning"]["storage"] = URLS[0]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    metrics = json.dumps({"step": 1, "loss": 2.0, "lr": 0.1, "seconds": 1.0}) + "\n"
    (tmp_path / "metrics.jsonl").write_text(metrics)
    page = write_page(tmp_path).read_text()
    assert MARKER not in page
    assert "postgresql://me:***@host/db" in page
    other = tmp_path / "other"
    other.mkdir()
    for name, text in (("config.yaml", yaml.safe_dump(make(MIXED).model_dump())), ("metrics.jsonl", metrics)):
        (other / name).write_text(text)
    compared = write_comparison([tmp_path, other], tmp_path / "compared.html").read_text()
    assert "tuning.storage" in compared
    assert MARKER not in compared
    manifest = CheckpointManifest(step=1, config=config, data_digest="", base_shapes={})
    assert config_here(manifest, tmp_path).tuning.storage == "journal"


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_random_states_obey_the_umask(tmp_path: Path, umask: int) -> None:
    upstream.prepare_process()
    before = os.umask(umask)
    try:
        runtime.save_random_state(tmp_path, 3)()
    finally:
        os.umask(before)
    (path,) = tmp_path.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


def holding(folder: Path, word: str) -> list[str]:
    """Files below a folder that hold a word, or bear it in their names."""
    return [
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if word in path.name or (path.is_file() and word.encode() in path.read_bytes())
    ]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["PGPASSWORD", "PGPASSFILE", "PGSERVICEFILE"])
def test_a_study_on_a_server_that_asks_for_a_password(tmp_path: Path, way: str) -> None:
    """Everything that a real study and a real run leave behind: files, modes, screen, logs, page."""
    if postgres.postgres_programs() is None or importlib.util.find_spec("psycopg") is None:
        pytest.skip("needs PostgreSQL and psycopg: apt-get install postgresql")
    work = tmp_path / "work"
    work.mkdir()
    given = {"WANDB_API_KEY": f"wandb-{MARKER}", "WANDB_MODE": "offline"}
    file, told = tmp_path / "secret", "postgresql+psycopg://mup@/postgres"
    given[way] = MARKER if way == "PGPASSWORD" else str(file)
    with postgres.server(tmp_path / "server", MARKER) as url:
        file.write_text(f"*:*:*:mup:{MARKER}\n")
        if way == "PGSERVICEFILE":
            file.write_text(f"[studies]\nhost={tmp_path / 'server'}\nuser=mup\npassword={MARKER}\n")
            told = url = "postgresql+psycopg:///postgres?service=studies"
        file.chmod(0o600)
        path = pipeline_file(work, tuning__storage=url, tuning__trials=2, tuning__repeat_best=0, run__dir="run")

        def command(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [sys.executable, "-m", "mup_megatron", *arguments],
                capture_output=True, text=True, cwd=work, env={**environment(), **more}, umask=0o077, check=False,
            )  # fmt: skip

        refused = command("tune", path.name, PGPASSWORD=f"wrong-{MARKER}", PGPASSFILE="/nonexistent")
        assert refused.returncode == 2
        assert f"run.yaml: tuning.storage: cannot open {told}" in refused.stderr
        done = command("pipeline", path.name, **given)
        assert done.returncode == 0, done.stderr
        page = command("report", "run", **given)
        assert page.returncode == 0, page.stderr
    for result in (refused, done, page):
        assert MARKER not in result.stdout + result.stderr
    files = [entry for entry in (work / "run").rglob("*") if entry.is_file()]
    names = {entry.name for entry in files}
    assert {"config.yaml", "explain.json", "mup.json", "report.html", "worker-0.log", "transfer.json"} <= names
    assert holding(work, MARKER) == []
    assert holding(work, told) != []  # the search can find something
    open_to_others = [entry for entry in (work / "run").rglob("*") if entry.lstat().st_mode & 0o077]
    assert [entry for entry in open_to_others if not entry.is_symlink()] == []


def test_what_the_search_for_secrets_finds(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(b"\0x" + MARKER.encode())
    assert holding(tmp_path, MARKER) == ["a/b"]
