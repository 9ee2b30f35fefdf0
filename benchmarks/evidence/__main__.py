"""`python -m benchmarks.evidence`: makes the parts of every page anew."""

from __future__ import annotations

from benchmarks.evidence.pages import write

if __name__ == "__main__":
    write()
