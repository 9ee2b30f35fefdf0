"""Secrets in text: what a database's URL may hold, and masks for everything else that may be a secret.

Public names: `url_problem`, `masked`, `masked_value`, `masked_data`.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import parse_qsl, unquote

_DRIVERS = {
    "sqlite": ("pysqlite",),
    "postgresql": ("psycopg", "psycopg2", "pg8000"),
    "mysql": ("pymysql", "mysqldb", "mysqlconnector"),
    "mariadb": ("pymysql", "mysqldb", "mariadbconnector"),
}
_MYSQL = "read_default_file read_default_group unix_socket charset connect_timeout ssl_ca ssl_cert ssl_key"
_OPTIONS = {
    "sqlite": "",
    "postgresql": "host port service passfile sslmode sslrootcert sslcert sslkey connect_timeout target_session_attrs "
    "application_name",
    "mysql": _MYSQL,
    "mariadb": _MYSQL,
}
"""Options of a URL that hold no secret: where the server is, and the names of files. A file can set every other."""

# Without a percent sign, so that nothing is here by another name; of a file's path more is known to be harmless.
_SERVER = re.compile(r"(?:[\w.-]+@)?(?:[\w.-]*|\[[0-9a-fA-F:.]+\])(?::\d{1,5})?(?:/[\w.-]*)?")
_FILE = re.compile(r"/[\w./ ~@,+()\[\]'-]+")
_VALUE = re.compile(r"[\w./ ~,:+-]*")
_OPTION = re.compile(r"[a-z_]{1,40}")


def url_problem(url: str) -> str | None:
    """What of a database's URL is not known to be harmless; None where everything is.

    No part of the URL is in the sentence, except an option's name of small letters.
    """
    scheme, separator, rest = url.partition("://")
    database, plus, driver = scheme.partition("+")
    if not separator or database not in _DRIVERS or (plus and driver not in _DRIVERS[database]):
        known = ", ".join(f"{name} (+{', +'.join(drivers)})" for name, drivers in _DRIVERS.items())
        return f"expected the URL of a database, DRIVER://USER@HOST:PORT/NAME?OPTION=VALUE, with a driver of {known}"
    place, _, query = rest.partition("?")
    if not (_FILE if database == "sqlite" else _SERVER).fullmatch(place):
        return (
            "expected /// and the path of a file, of letters, digits and plain signs"
            if database == "sqlite"
            else "expected USER@HOST:PORT/NAME without a password, each of letters, digits, '_', '.' and '-'"
        )
    options = _OPTIONS[database].split()
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in options:
            called = f"its option {name}" if _OPTION.fullmatch(name) else "one of its options"
            return f"{called} may hold a secret; expected none but {', '.join(options) or 'a path'}"
        if not _VALUE.fullmatch(value):
            return f"its option {name} holds more than letters, digits and plain signs"
    return None


# --- masks ---

_URL = re.compile(r"(?<!\w)(?:postgres(?:ql)?|mysql|mariadb|sqlite|oracle|mssql)(?:\+\w+)?:(?=/|\S*@)", re.IGNORECASE)
"""How the URL of a database begins, well-formed or not."""
_BEHIND = "\\'\"`,;:.)]}>"
"""What may stand behind a URL in a sentence."""

# user:password@ of any URL, and what a query, or a list of options, calls by the name of a secret (sslkey is a file).
_PASSWORD = re.compile(r"(:/{1,3}[^\s:/@]*:)\S*@")
_ANY_PASSWORD = re.compile(r"(:/{1,3}[^:/@]*:).*@", re.DOTALL)
_SECRET = re.compile(
    r"((?:^|[?&;#{(,\s'\"])[\w.-]*"
    r"(?:pass|password|passwd|passphrase|pwd|secret|token|auth|(?<!ssl)key|credential|signature)=)"
    r"[^&;\s'\"#]+",
    re.IGNORECASE,
)


def masked(text: str) -> str:
    """The text without the passwords of URLs and the secrets of their queries: `***` stands where they stood.

    A database's URL that holds anything that is not known to be harmless is masked from its driver on, and so is what
    hides a secret behind percent signs.
    """
    return re.sub(r"\S+", lambda word: _masked(word[0], _PASSWORD), text)


def masked_value(text: str) -> str:
    """`masked` of a text that is nothing but a URL or an option, where a password may hold spaces."""
    return masked(_masked(text, _ANY_PASSWORD))


def masked_data(value: Any) -> Any:
    """Plain data with `masked_value` of every text."""
    if isinstance(value, dict):
        return {masked_data(key): masked_data(held) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [masked_data(held) for held in value]
    return masked_value(value) if isinstance(value, str) else value


def _masked(text: str, password: re.Pattern[str]) -> str:
    if not any(sign in text for sign in ":=%"):  # which every pattern needs
        return text
    plain = _SECRET.sub(r"\1***", password.sub(r"\1***@", text))
    url = _URL.search(plain)
    if url is not None:
        if url_problem(plain[url.start() :].rstrip(_BEHIND).replace(":***@", "@")) is not None:
            return f"{plain[: url.end()]}***"
        return plain
    decoded = _decoded(text)
    if decoded != text and _masked(decoded, password) != decoded:
        scheme = re.match(r"\W*[\w+.-]+://", text)
        return f"{scheme[0] if scheme else ''}***"
    return plain


def _decoded(text: str) -> str:
    """Without percent signs that stand for other signs, however often they were encoded."""
    while (found := unquote(text)) != text:
        text = found
    return text
