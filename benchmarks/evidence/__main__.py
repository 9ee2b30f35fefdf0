"""`python -m benchmarks.evidence`: makes the parts of every page anew, and the picture that no command makes."""

from __future__ import annotations

from benchmarks.evidence import wide
from benchmarks.evidence.pages import write

if __name__ == "__main__":
    write()
    wide.draw()
