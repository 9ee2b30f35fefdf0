"""Faults of readings."""

from __future__ import annotations

from tests.mutants.mutant import decorated, mutant

_CELL = "telemetry/test_reading.py::test_the_same_numbers_in_every_layout"

MUTANTS = (
    mutant(
        "telemetry: copies of one rank",
        "ranks' copies of a weight are not compared",
        "telemetry.reading.Readings._copied",
        "not isinstance(parameter, DTensor)",
        "False",
        "telemetry/test_alarms.py::test_a_rank_with_other_weights_is_named",
    ),
    mutant(
        "forecast: a gap that does not grow",
        "the gap to the proxy stays what it is",
        "telemetry.forecast._forecast",
        "1 + (np.arange(BINS) + 1 - done) / BINS",
        "np.ones(BINS)",
        "telemetry/test_forecast.py::test_the_gap_grows_on_as_time_does",
    ),
    mutant(
        "telemetry: each rank its own",
        "a reading has the sums of one rank alone",
        "telemetry.sums.Exchange.__init__",
        "torch.distributed.all_reduce(self._sums, async_op=True)",
        "torch.distributed.all_reduce(self._sums.clone(), async_op=True)",
        f"{_CELL}[gpt3, mixed-DP 2, ZeRO 3]",
    ),
    mutant(
        "telemetry: part of a sequence",
        "attention of context-parallel ranks is measured over the keys that one of them has",
        "telemetry.reading._whole_sequence",
        "ranks == 1",
        "True",
        f"{_CELL}[llama-CP 2, Megatron, plain optimizer]",
    ),
    mutant(
        "telemetry: gradients behind the update",
        "what is called a gradient is what clipping made of it",
        "engines.deepspeed.DeepSpeedEngine.step",
        "self.before_update()",
        "(self._clip(), self.before_update())",
        "telemetry/test_reading.py::test_a_gradient_is_measured_before_it_is_clipped",
    ),
    mutant(
        "alarms: a group's rate is not compared",
        "a group whose rate was reset is seen by nobody",
        "telemetry.alarms.Alarms._of_group",
        "series not in self._rates",
        "True",
        "telemetry/test_alarms.py::test_a_planted_fault_is_named[matrices at twice the rate-gpt3]",
    ),
    mutant(
        "band: updates of the proxy's size",
        "a wide target's updates are held against those of a narrow proxy",
        "telemetry.band._said",
        "of_target.rate / of_proxy.rate",
        "1.0",
        "telemetry/test_alarms.py::test_an_update_goes_as_the_rate",
    ),
    mutant(
        "alarms: a run that is to stop goes on",
        "a run that does not look as it should trains to its end",
        "train.loop.Loop._save",
        "asked >= Ask.STOP",
        "asked > Ask.STOP",
        "telemetry/test_alarms.py::test_it_stops_behind_a_checkpoint",
    ),
    decorated(
        "band: no exponents of widths",
        "what the parametrization says nothing of is taken to stay as the width grows",
        "telemetry.band.of_widths",
        "lambda f: lambda bands: bands[-1]",
        "telemetry/test_band_of_widths.py::test_exponents_by_hand",
    ),
)
