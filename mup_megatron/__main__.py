"""`python -m mup_megatron` is `mup-megatron`. Public name: `main`."""

import os
import signal
from typing import NoReturn


def main() -> NoReturn:
    """`mup_megatron.cli.main`; Ctrl-C before that is there ends the process without a traceback."""
    keeps = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if keeps:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from mup_megatron import cli

    if keeps:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    cli.main()


if __name__ == "__main__":
    main()
