"""The band of runs that lie in folders: a study's, and a ladder's of several widths.

Public names: `band_of_runs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mup_megatron.checkpoints.checkpoint import METRICS, TELEMETRY
from mup_megatron.rules.table import Parametrization
from mup_megatron.telemetry.band import Band, make_band
from mup_megatron.telemetry.forecast import BINS, bins_of
from mup_megatron.telemetry.series import read_series


def band_of_runs(table: Parametrization, best: Mapping[str, Path], complete: Mapping[str, Path]) -> Band | None:
    """What runs were like while they trained; None where none was read.

    Args:
        table: of their model, with the best values.
        best: folders of the runs with these values, by name.
        complete: of all runs of the model that came to their end, these among them.
    """
    runs = {name: read_series(folder / TELEMETRY) for name, folder in best.items()}
    steps = table.config.training.train_steps
    losses = {name: bins_of(folder / METRICS, steps).full() for name, folder in complete.items()}
    return make_band(
        {name: series for name, series in runs.items() if series.steps},
        table,
        {name: bins for name, bins in losses.items() if len(bins) == BINS},
    )
