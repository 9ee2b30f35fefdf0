"""`python -m mup_megatron` is `mup-megatron`. Public name: `main`."""

from typing import NoReturn

from mup_megatron.parallel.ranks import at_once


def main() -> NoReturn:
    """`mup_megatron.cli.main`; Ctrl-C while that is imported ends the process without a traceback."""
    with at_once():
        from mup_megatron import cli
    cli.main()


if __name__ == "__main__":
    main()
