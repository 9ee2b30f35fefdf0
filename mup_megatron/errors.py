"""What goes wrong on the user's side: one clear sentence, exit status 2, no traceback."""


def one_line(text: str) -> str:
    """Text from a file as it can stand in a sentence: what is not printable is escaped."""
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


class UserError(Exception):
    """Bad input. The message is one sentence that names the file, the key and what was expected."""


class ConfigError(UserError):
    """A config that cannot be used.

    Args:
        key: dotted path of the offending key, e.g. ``model.hidden_size``; empty for the whole file.
        problem: what is wrong with it and what was expected.
        source: the config's file, when it is known where the error is raised.
    """

    def __init__(self, key: str, problem: str, source: str | None = None) -> None:
        self.key, self.problem, self.source = key, problem, source
        super().__init__(one_line(": ".join(part for part in (source, key, problem) if part)))


class DiskFull(UserError):
    """Nothing more could be written.

    Args:
        directory: of the run.
        problem: the operating system's words.
    """

    def __init__(self, directory: object, problem: str) -> None:
        super().__init__(f"run.dir: {directory}: {problem}; what was written before is whole, the same command goes on")
