"""A ladder.json of real rungs' sizes, with curves whose best rates are known: what tests of its readers share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mup_megatron.config import Config
from mup_megatron.proof.ladder_verdict import laws
from mup_megatron.proof.rungs import AXES, Ladder, rungs
from mup_megatron.tuning.fitted import facts
from tests.proof.test_ladder import RUNGS, curves


def ladder_file(path: Path, config: Config, *, moved: dict[str, Any] | None = None, **changed: Any) -> Path:
    """Batch x 1, 2, 4 and tokens x 1, 2, 4, 8 of a config; best rate as batch^0.4 tokens^-0.3.

    Args:
        path: of the file.
        config: of the ladder.
        moved: by what the largest rung leaves the laws (`curves`).
        changed: keys of the file that are replaced.
    """
    asked = Ladder(batch=[1, 2, 4], tokens=[1, 2, 4, 8], width=[], values=[1.0, 2.0, 4.0], seeds=1)
    made = rungs(config, asked, print)
    assert list(made) == RUNGS
    found = {
        **laws(curves(noise=0.05, seeds=3, **(moved or {}))),
        **facts(config, list(made.values()), {name: getattr(RUNGS[0], name) for name in AXES}),
    }
    path.write_text(json.dumps({**found, **changed}))
    return path
