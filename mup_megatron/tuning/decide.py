"""Whether to tune, the checks before tuning starts, and a run with the values of a record.

Public names: `decide`, `apply_record`, `replaced`, `trained_keys`, `refuse_untaken_record`, `told_by_a_ladder`.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mup_megatron.checkpoints.checkpoint import check_folder
from mup_megatron.checkpoints.run_directory import PLAN
from mup_megatron.config import Config
from mup_megatron.config.per_tensor import flat
from mup_megatron.data.parts import check_parts
from mup_megatron.data.prepare import known_vocab_size, prepare
from mup_megatron.engines.setup import resolve
from mup_megatron.model.build import parametrize
from mup_megatron.parallel.ranks import Rank
from mup_megatron.rules.horizon import horizon
from mup_megatron.tuning import budget, prior, record
from mup_megatron.tuning.fitted import Fitted, ladder_of, settled, told
from mup_megatron.tuning.outcome import range_of
from mup_megatron.tuning.predicted import in_words, predicted
from mup_megatron.tuning.recording import extrapolated, other_settings
from mup_megatron.tuning.space import (
    Value,
    check_overrides,
    in_config,
    key_of,
    keys_of,
    proxy_config,
    same,
    short,
    value_of,
    values_of,
    with_values,
)
from mup_megatron.util.errors import UserError, no_such_file
from mup_megatron.util.files import as_yaml, write_whole
from mup_megatron.util.progress import Progress


def decide(config: Config, rank: Rank, progress: Progress, allowed: tuple[str, ...] = ()) -> bool:
    """Whether to tune; the first rank says the plan, and prepares the data for all.

    What the folder holds already is looked at before anything is written, and stays if it is another run's.
    """
    path = config.record_path
    found = record.TransferRecord.read(path, config)
    ladder = ladder_of(config, None if found is None else found.ladder)
    config = settled(config, ladder)
    if config.parametrization.unfitted and config.tuning.run != "only":
        horizon(config)  # says now, not when tuning has been paid for, that there is no ladder
    tune = found is None and config.tuning.run != "never"
    config = prior.with_prior(config) if tune else config
    if tune and not config.tuning.search:
        raise config.error(
            "tuning.search", "missing; expected what to tune, or tuning.run: never to train with the values of hparams:"
        )
    if tune and not config.tuning.command and not float([*config.data.split.split(","), "0"][1]):
        raise config.error(
            "data.split",
            f"{config.data.split} holds nothing to validate on, by which trials are compared; expected 98,2,0",
        )
    if config.tuning.run == "never" and found is None and config.tuning.record is not None:
        raise config.error("tuning.record", no_such_file(path))
    _check_folder(config, found, tune, allowed)
    directory = Path(config.run.dir)
    plan = budget.plan(config, known_vocab_size(config), rank.world_size, measure=tune)
    if tune:
        _check_proxy(config)
        _check_writable(path, config)
        _check_study(config)
        for line in [*budget.lines(config, plan), *filter(None, [prior.told(config)])]:
            progress.say(line)
        budget.check_share(config, plan)
        write_whole(directory / "config.yaml", as_yaml(config.model_dump()))
    elif found is not None:
        progress.say(f"{path}: tuned values of this family, found {found.created}; nothing to tune")
        tried = len({trial.slot for trial in found.study.trials})
        if tried < config.tuning.trials and config.tuning.sampler != "grid":  # a grid has as many as it has
            progress.say(f"it has {tried} trials of tuning.trials={config.tuning.trials}; to add trials, move it away")
        for line in _unsearched(config, found):
            progress.say(f"{line}; to tune anew, move it away")
        for line in other_settings(config, found):
            progress.say(f"extrapolated, {line}")
    else:
        progress.say("tuning.run: never, and no record; training with the values of hparams:")
    if tune or config.tuning.run != "only":
        said: dict[str, Any] = {"extrapolated": extrapolated(config, found), "ladder": told(config, ladder)}
        if (loss := predicted(config, ladder)) is not None:
            said["predicted"] = loss
            progress.say(f"predicted loss of the target: {in_words(loss)}")
        write_whole(directory / PLAN, json.dumps({**plan.as_json(), **said}, indent=1))
    if config.tuning.command:  # the script reads its own data
        return tune
    prepared = prepare(config, progress.say)
    check_parts(config, prepared.blend[0], validation=tune or bool(config.training.eval_interval))
    return tune


def _unsearched(config: Config, found: record.TransferRecord) -> list[str]:
    """What the config would search and the record's study did not, in words."""
    said = []
    for name in config.tuning.search:
        if name not in found.study.values:
            said.append(f"it did not tune {name} (tuning.search.{name})")
        elif (searched := found.study.ranges.get(name)) and searched != (here := range_of(config, name)):
            low, high = short(here.low), short(here.high)
            said.append(
                f"it searched {name} from {short(searched.low)} to {short(searched.high)}, tuning.search.{name} says "
                f"{low} to {high}"
            )
    if config.tuning.descent.trials and found.study.descent is None:
        said.append(f"it has no coordinate descent (tuning.descent.trials={config.tuning.descent.trials})")
    return said


def refuse_untaken_record(config: Config, typed: Sequence[str] = ()) -> str:
    """Refuses a config that has a record of other values, for `train`, which takes none.

    Not where `tuning.run` is `never` and no record is named, nor for a value that was given on the command line: these
    are meant. Nor for a record of another family, where `tuning.run` is `never` or none is named.

    Args:
        config: the run.
        typed: overrides of the command line, which the commands that are named repeat.

    Returns:
        What is to be said where the run trains although its record is not there or not its own; else empty.

    Raises:
        UserError: names what differs, and the command that takes it; or says why the record that is named cannot be.
    """
    tuning, path = config.tuning, config.record_path
    if tuning.run == "never" and tuning.record is None:
        return ""
    words = [str(config.source), *typed]
    plain = [*words, "tuning.run=never", *(["tuning.record=null"] if tuning.record else [])]
    alone = f"{shlex.join(['mup-megatron', 'train', *plain])}, which trains with the values of hparams:"
    try:
        found = record.TransferRecord.read(path, config)
    except UserError as error:
        if tuning.record is not None and tuning.run != "never":
            raise UserError(f"{error}; or {alone}") from None
        return f"not taken: {error}"
    if found is None:
        return "" if tuning.record is None else f"{path} is not there; training with the values of hparams:"
    differing = (key_of(name) for name, value in found.values.items() if not same(name, value_of(config, name), value))
    untaken = [key for key in differing if not config.is_overridden(key)]
    if untaken:
        raise config.error(
            "tuning.record",
            f"{path} has other values of {', '.join(untaken)}, which `train` does not take; expected "
            f"{shlex.join(['mup-megatron', 'pipeline', *words])}, or {alone}",
        )
    return ""


def told_by_a_ladder(config: Config, progress: Progress) -> dict[str, Any]:
    """What the ladder of a config, or of the record that it names, tells of a target that `train` trains.

    Args:
        config: the run, with the values that it trains with.
        progress: hears the loss.

    Returns:
        {"ladder": remarks, "predicted": the loss (`predicted`)}, for explain.json; empty where no ladder belongs to it.
    """
    try:
        ladder = ladder_of(config, None if config.tuning.ladder is not None else _held(config))
    except UserError as error:  # `train` needs no record
        progress.say(f"no predicted loss: {error}")
        return {}
    if (loss := predicted(config, ladder)) is None:
        return {}
    progress.say(f"predicted loss of the target: {in_words(loss)}")
    return {"ladder": told(config, ladder), "predicted": loss}


def _held(config: Config) -> Fitted | None:
    """The ladder that the record of a run keeps; None where there is none. Raises UserError."""
    path = config.record_path
    found = record.TransferRecord.read(path, None)
    if found is None or found.ladder is None:
        return None
    return record.TransferRecord.expect(path, config).ladder


def _check_folder(config: Config, found: record.TransferRecord | None, tune: bool, allowed: tuple[str, ...]) -> None:
    """What the folder holds of a target is of this config. Raises UserError."""
    if found is not None:
        check_folder(with_values(config, _transferred(config, found, allowed)), allowed)
    elif not tune:
        check_folder(config, allowed)
    else:
        check_overrides(config, allowed)
        # More trials for a target that is there already; it stays what it is.
        begun = check_folder(config, (*allowed, *map(key_of, values_of(config))))
        if begun and config.tuning.run != "only":
            raise config.error(
                "run.dir",
                f"{config.run.dir} holds a target that trained with the values of hparams:, and tuning would find "
                "others; expected another run.dir, or `train` to go on with it",
            )


def _check_study(config: Config) -> None:
    """The study that is there, if any, is of this config. Raises UserError."""
    from mup_megatron.tuning.study import Study

    if any((Path(config.run.dir) / "tuning").glob("trial-*")):
        Study(config).check()


def _check_proxy(config: Config) -> None:
    """What each trial would be refused for is said once, before the first: at both ends of every range.

    Raises:
        UserError: the proxy cannot be.
    """
    dimensions = config.tuning.search.items()
    ends = [{**values_of(config), **{name: each.named[end] for name, each in dimensions}} for end in (0, -1)]
    low, _ = [proxy_config(config, values, seed=config.run.seed, directory=Path(config.run.dir)) for values in ends]
    if not config.tuning.command:
        proxy = resolve(low, 1).config
        for values in ends:
            parametrize(with_values(proxy, values), known_vocab_size(config))


def _check_writable(path: Path, config: Config) -> None:
    """Whether the record can be written when tuning has been paid for. Raises ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise config.error("tuning.record", f"cannot write to {path.parent}: {error.strerror}") from None
    if not os.access(path.parent, os.W_OK):
        raise config.error("tuning.record", f"cannot write to {path.parent}: permission denied")


def apply_record(config: Config) -> tuple[Config, record.TransferRecord]:
    """The config with the values of its record.

    Raises:
        UserError: no record, or one that does not belong to this config.
    """
    path = config.record_path
    found = record.TransferRecord.read(path, config)
    if found is None:
        raise config.error("tuning.record", f"{no_such_file(path)}; expected a transfer record (mup-megatron tune)")
    config = settled(config, ladder_of(config, found.ladder))
    return with_values(config, _transferred(config, found)), found


def trained_keys(config: Config, progress: Progress, allowed: tuple[str, ...]) -> dict[str, Any]:
    """What to train with, by the config's keys: the record's values and its ladder's exponents, else the config's.

    Raises:
        UserError: the record that `decide` found, or that was tuned since, is gone.
    """
    path = config.record_path
    found = record.TransferRecord.read(path, config)
    if found is None and config.tuning.run != "never":
        raise config.error(
            "tuning.record",
            f"{no_such_file(path)}, which was there before; expected the record until the target has read it",
        )
    config = settled(config, ladder_of(config, None if found is None else found.ladder))
    keys = {f"parametrization.{axis}": getattr(config.parametrization, axis) for axis in config.parametrization.fitted}
    return keys if found is None else {**keys, **keys_of(_trained_values(config, found, progress, allowed))}


def _trained_values(
    config: Config, found: record.TransferRecord, progress: Progress, allowed: tuple[str, ...]
) -> dict[str, Value]:
    for line in replaced(config, found, allowed):
        progress.say(line)
    return _transferred(config, found, allowed)


def replaced(config: Config, found: record.TransferRecord, allowed: tuple[str, ...] = ()) -> list[str]:
    """Which values of a config and of its record are not alike, and which of the two a transfer takes, in words.

    Args:
        config: as it is written, without the record's values.
        found: its record.
        allowed: keys of the command line that may differ.

    Raises:
        ConfigError: a value that was given on the command line would be dropped.
    """
    values, given, said = _transferred(config, found, allowed), values_of(config), []
    for name in values:
        value = found.values.get(name, 1.0)  # what it does not name of `per_tensor` was 1
        if values[name] != value:
            taken, held = in_config(name, values[name]), in_config(name, value)
            said.append(f"{key_of(name)}: {taken} as given, not {held} of the record (--allow-change)")
        elif name not in found.tuned and given.get(name) not in (None, value):
            said.append(f"{key_of(name)}: {value} as it was while tuning, not {given[name]}")
    return said


def _transferred(config: Config, found: record.TransferRecord, allowed: tuple[str, ...] = ()) -> dict[str, Value]:
    """The record's values, but for those that were given on the command line and may differ.

    What was given as the beginning of the search that wrote the record (`tuning.prior: hparams`) is no other value.

    Raises:
        ConfigError: one that was given on the command line and may not; it would be dropped.
    """
    # What the record does not name of `per_tensor` was 1 while tuning.
    unsaid = {name: 1.0 for name in flat(config.hparams.per_tensor) if name not in found.values}
    values = {**unsaid, **found.values}
    first = prior.first_trial(config) if config.tuning.prior == "hparams" else {}
    for name, value in list(values.items()):
        key, given = key_of(name), value_of(config, name)
        typed, held = in_config(name, given), in_config(name, value)
        if typed == held or not config.is_overridden(key):
            continue
        if name in first and found.study.prior.get(name) == first[name]:
            continue
        if key not in allowed:
            tuned = "tuned" if name in found.tuned else "tuned with"
            raise config.error(
                key,
                f"{typed} is given, and {config.record_path} says {held} ({tuned}), which a transfer takes; "
                "expected no such override, or `train tuning.run=never`, which trains with the values of hparams:, or "
                f"pipeline --allow-change {key}",
            )
        values[name] = given
    return values
