from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mup_megatron.parallel import upstream
from tests.helpers.distributed import Ranks


@pytest.fixture(scope="session")
def trained(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """A run by its name in QUICK or SLOW of sources.py, trained when it is first asked for: its `Trained`."""
    upstream.prepare_process()
    from mup_megatron.convert.export import open_source
    from tests.convert.sources import QUICK, SLOW, Trained, config_of, own_logits, train

    made: dict[str, Trained] = {}

    def make_one(name: str) -> Trained:
        if name not in made:
            architecture, tied, layout = (QUICK | SLOW)[name]
            run = train(ranks, tmp_path_factory.mktemp("source"), config_of(architecture, tied), layout)
            source = open_source(run)
            made[name] = Trained(source, own_logits(source))
        return made[name]

    return make_one
