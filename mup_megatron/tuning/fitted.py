"""What a ladder has measured, as a config and a transfer record take it: exponents, span, verdict, law of the loss.

Public names: `Fitted`, `facts`, `measured`, `sizes_of`, `SIZES`, `ladder_of`, `beside_others`, `settled`, `told`.

`mup-megatron ladder` (proof/) writes ladder.json, with `facts` of the runs in it. A config names the file
(`tuning.ladder`), or takes the record's copy. `settled` puts the numbers in the place of `fitted`. It refuses a ladder
of another family, one whose laws did not hold, and a target far beyond what the ladder spanned.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, field_validator

from mup_megatron.config import Config, derive, growing_sizes
from mup_megatron.rules.horizon import without_rules
from mup_megatron.rules.horizon_rules import Published
from mup_megatron.tuning.family import as_read, differences, digest, digested
from mup_megatron.tuning.loss_law import AXES, read_loss_law
from mup_megatron.util.errors import UserError, no_such_file
from mup_megatron.util.files import read_text

MOST_BEYOND = 8.0
"""How many times the largest rung, or below the smallest, an exponent is taken for without being asked."""

_MOST_DIFFERENCES = 8
SIZES = {"batch": "tokens of a step", "tokens": "tokens of the run", "width": "width", "layers": "layers"}
"""What the sizes of `sizes_of` are, in words."""
_SCHEDULE = ("training.lr_schedule", "training.min_lr_ratio")
_Size = Annotated[int, Field(gt=0, le=2**63)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class Exponent(_Part):
    """Of the best rate, with its standard error."""

    exponent: Annotated[FiniteFloat, Field(gt=-9, lt=9)]
    error: Annotated[FiniteFloat, Field(ge=0)]


class Reach(_Part):
    """What the rungs of a ladder had of one thing: the smallest, the largest, and the ladder's own config."""

    smallest: _Size
    largest: _Size
    own: _Size


class Span(_Part):
    """The reach in tokens of a step, tokens of the run, width (hidden_size, or another size that grows) and layers."""

    batch: Reach
    tokens: Reach
    width: Reach
    layers: Reach


class Fitted(_Part):
    """What is read of a ladder.json, and kept in a transfer record as `ladder`.

    Args:
        path: of the ladder.json.
        digest: of the family that it is of (`horizon.without_rules`).
        exponents: of the best rate, by axis.
        span: what its rungs were.
        verdict: whether its laws told the largest rung.
        reasons: why they did not, in words.
        measured: what must be equal for losses to be comparable, by dotted key.
        loss: the law of the loss (loss_law.LossLaw.as_json).
    """

    path: str
    digest: str
    exponents: dict[Literal["batch", "tokens", "width", "layers"], Exponent]
    span: Span
    verdict: Literal["passed", "failed", "undecided"]
    reasons: list[str]
    measured: dict[str, Any]
    loss: dict[str, Any]

    @field_validator("loss")
    @classmethod
    def _is_a_law(cls, loss: dict[str, Any]) -> dict[str, Any]:
        try:
            read_loss_law(loss).at({})
        except (KeyError, TypeError, AttributeError, ArithmeticError) as error:
            raise ValueError(f"no law: {error}") from None
        return loss

    def as_json(self) -> dict[str, Any]:
        """Plain data; each reach also as a factor."""
        plain = self.model_dump()
        for reach in plain["span"].values():
            reach["factor"] = reach["largest"] / reach["smallest"]
        return plain


def facts(config: Config, rungs: Sequence[Config], factors: Mapping[str, float]) -> dict[str, Any]:
    """What a ladder.json says of its runs beside what they measured.

    Args:
        config: that the ladder was asked for.
        rungs: of every rung, smallest first.
        factors: of the first rung over the ladder's own config, by axis.
    """
    family = _family(config)
    sizes = [sizes_of(rung) for rung in rungs]
    span = {
        name: {
            "smallest": min(each[name] for each in sizes),
            "largest": max(each[name] for each in sizes),
            "own": round(sizes[0][name] / factors.get(name, 1)),
        }
        for name in SIZES
    }
    return {"digest": digest(family), "family": family, "span": span, "measured": measured(config)}


def measured(config: Config) -> dict[str, Any]:
    """What decides which text a validation loss is of, how the rate falls, and how deep the model is, by dotted key."""
    data = config.data.model_dump(exclude={"dir", "cache_dir"})
    model = config.model
    found = {
        **{f"data.{key}": value for key, value in data.items()},
        "training.seq_length": config.training.seq_length,
        "training.decoder_seq_length": config.training.decoder_length if config.data.of_pairs else None,
        **{key: getattr(config.training, key.removeprefix("training.")) for key in _SCHEDULE},
        "model.num_layers": model.num_layers,
        "model.num_moe_experts": model.num_moe_experts,
    }
    return as_read(found)


def ladder_of(config: Config, held: Fitted | None) -> Fitted | None:
    """The ladder that a config takes its exponents from: that of `tuning.ladder`, else its record's; None without.

    Args:
        config: the run.
        held: what the record has under `ladder`; None where it has none.

    Raises:
        UserError: no such file, damaged, or of another family; says which keys differ.
    """
    if config.tuning.ladder is not None:
        return _read(config, Path(config.tuning.ladder))
    return None if held is None else _of_family(config, held, None)


def beside_others(found: Fitted) -> Published:
    """A ladder's exponents of batch and tokens as they stand beside published ones (`horizon_rules.side_by_side`)."""
    power = {axis: found.exponents[axis] for axis in ("batch", "tokens") if axis in found.exponents}
    errors = ", ".join(f"{axis} ± {each.error:.2g}" for axis, each in power.items())
    batch, tokens = (round(power[axis].exponent, 3) if axis in power else 0.0 for axis in ("batch", "tokens"))
    return Published(batch=batch, tokens=tokens, source=f"your ladder, {found.path}: {found.verdict}", remark=errors)


def _read(config: Config, path: Path) -> Fitted:
    try:
        found = json.loads(read_text(path))
    except FileNotFoundError:
        problem = f"{no_such_file(path)}; expected the ladder.json that mup-megatron ladder writes"
        raise config.error("tuning.ladder", problem) from None
    except OSError as error:
        raise UserError(f"{path}: cannot read the ladder: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path}: not valid JSON; expected the ladder.json that mup-megatron ladder writes") from None
    if isinstance(found, dict) and found.get("over", "lr") != "lr":
        raise UserError(
            f"{path}: a ladder over {found['over']}, and a config takes exponents of the rate alone; expected "
            "what mup-megatron ladder --over lr writes"
        )
    if isinstance(found, dict) and "rungs" in found and found.get("rate", "") is None:
        raise UserError(f"{path}: the ladder found no law of the rate; expected one that did; `open` says why not")
    if not isinstance(found, dict) or not isinstance(found.get("rate"), dict):
        raise UserError(f"{path}: not a ladder: it names no rate; expected what mup-megatron ladder writes")
    if not isinstance(family := found.get("family"), dict) or found.get("digest") != digest(family):
        raise UserError(
            f"{path}: does not say of which family it is, or its digest does not match; expected mup-megatron ladder "
            "with the same options and --output again, which takes the runs that are there"
        )
    exponents = {name: found["rate"][name] for name in AXES if name in found["rate"]}
    try:
        fitted = Fitted.model_validate({**found, "path": str(path), "exponents": exponents})
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise UserError(f"{path}: {where}: expected what mup-megatron ladder writes there") from None
    return _of_family(config, fitted, family)


def _family(config: Config) -> dict[str, Any]:
    return digested(derive(config, without_rules(config)))


def _of_family(config: Config, found: Fitted, family: Mapping[str, Any] | None) -> Fitted:
    """The ladder, if it is of the config's family. Raises UserError."""
    here = _family(config)
    if found.digest == digest(here):
        return found
    differing = differences(family, here, "in the ladder", "in the config")[:_MOST_DIFFERENCES] if family else []
    raise UserError(
        f"{found.path}: the ladder belongs to another family than {config.source or 'this config'}"
        f"{_inside(differing)}; expected a ladder of this one (mup-megatron ladder), or the config changed back"
    )


def _inside(reasons: Sequence[str]) -> str:
    """Reasons in brackets; nothing where there are none."""
    return f" ({'; '.join(reasons)})" if reasons else ""


def settled(config: Config, found: Fitted | None) -> Config:
    """The config with a ladder's numbers in the place of `fitted`; as it is where no rule is fitted.

    Raises:
        ConfigError: the ladder does not know an exponent, or knows another one than the config; its laws did not hold,
            or the run lies too far beyond it, and `tuning:` does not allow that.
    """
    axes = config.parametrization.fitted
    if found is None or not axes:
        return config
    keys = {f"parametrization.{axis}": _rule(config, found, axis) for axis in axes}
    _check_verdict(config, found)
    for beyond in _beyond(config, found):
        if beyond.axis in axes and beyond.times > MOST_BEYOND and not config.tuning.allow_extrapolated_ladder:
            raise config.error(
                f"parametrization.{beyond.axis}",
                f"{beyond.said}, to which {found.path} does not tell the exponent; expected at most {MOST_BEYOND:g} "
                "times beyond it, a ladder that goes further, or tuning.allow_extrapolated_ladder: true",
            )
    return derive(config, keys)


def _rule(config: Config, found: Fitted, axis: str) -> str:
    key, given = f"parametrization.{axis}", getattr(config.parametrization, axis)
    if axis not in found.exponents:
        raise config.error(
            key, f"{given}, but {found.path} has rungs of one {axis} alone; expected a ladder with --{axis} 1,2,4"
        )
    rule = f"fitted:{found.exponents[axis].exponent:.4f}"
    if given != "fitted" and float(given.partition(":")[2]) != float(rule.partition(":")[2]):
        raise config.error(key, f"{given}, but {found.path} says {rule}; expected fitted, which takes the ladder's")
    return rule


_VERDICTS = {"passed": "passed", "failed": "failed", "undecided": "is undecided"}


def _check_verdict(config: Config, found: Fitted) -> None:
    if found.verdict == "passed" or config.tuning.allow_failed_ladder:
        return
    raise config.error(
        f"parametrization.{config.parametrization.fitted[0]}",
        f"{found.path} is of a ladder that {_VERDICTS[found.verdict]}{_inside(found.reasons)}: its laws are not known "
        "to tell a run that they have not seen; expected one that passed, or tuning.allow_failed_ladder: true",
    )


class _Beyond(NamedTuple):
    """By how much something of the run lies beyond a ladder's rungs.

    Args:
        axis: of it.
        times: the factor, above 1.
        said: the same in words.
    """

    axis: str
    times: float
    said: str


def sizes_of(config: Config) -> dict[str, int]:
    """Tokens of a step and of the run, width and layers."""
    growing = growing_sizes(config)
    grows = [growing[name].target for name in ("hidden_size", *config.base.width.sizes) if name in growing]
    step = config.training.global_batch_size * config.sample_tokens
    return {
        "batch": step,
        "tokens": step * config.training.train_steps,
        "width": grows[0] if grows else config.model.hidden_size,
        "layers": config.model.num_layers,
    }


def _beyond(config: Config, found: Fitted) -> Iterator[_Beyond]:
    """Everything in which the target, or the trials from which a rule counts, lie beyond the ladder's rungs."""
    target = sizes_of(config)
    trials = {"batch": target["batch"] / config.batch_ratio, "tokens": target["tokens"] / config.tokens_ratio}
    for who, sizes in (("the target's", target), ("a trial's", trials)):
        for axis, size in sizes.items():
            reach = getattr(found.span, axis)
            above, below = float(size) / reach.largest, reach.smallest / float(size)
            if (times := max(above, below)) > 1.0:
                where = f"above the ladder's largest, {reach.largest:,}"
                where = where if above > 1.0 else f"below the ladder's smallest, {reach.smallest:,}"
                by = f"{times:.3g} times ({math.log2(times):.1f} octaves)"
                yield _Beyond(axis, times, f"{who} {SIZES[axis]}, {round(size):,}, {_LIE[axis]} {by} {where}")


_LIE = {"batch": "lie", "tokens": "lie", "width": "lies", "layers": "lie"}


def told(config: Config, found: Fitted | None) -> list[str]:
    """What a reader must know of a ladder's part in a run, in words.

    Args:
        config: the run, settled.
        found: its ladder.
    """
    if found is None:
        return []
    axes, lines = config.parametrization.fitted, []
    for axis in axes:
        exponent = found.exponents[axis]  # type: ignore[index]
        octaves = math.log2(config.batch_ratio if axis == "batch" else config.tokens_ratio)
        here = f"× {2 ** (octaves * exponent.exponent):.3g} ± {abs(octaves * exponent.error):.2f} octaves"
        lines.append(
            f"{axis}: the rate goes as its ratio to the power {exponent.exponent:.3f} ± {exponent.error:.3f}, by "
            f"{found.path}; here {here}"
        )
    lines += [
        f"{line}, and the ladder's exponents are of runs under its own" for line in _other_schedule(config, found)
    ]
    if found.verdict != "passed":
        lines.append(f"the ladder {_VERDICTS[found.verdict]}{_inside(found.reasons)}")
    if not axes:
        lines.append(f"{found.path}: no rule takes its exponents; expected parametrization.batch or .tokens: fitted")
    return lines + [f"extrapolated, {beyond.said}" for beyond in _beyond(config, found)]


def _other_schedule(config: Config, found: Fitted) -> list[str]:
    """In what the rate falls otherwise than in the ladder's runs, in words."""
    there, here = ({key: said.get(key) for key in _SCHEDULE} for said in (found.measured, measured(config)))
    return differences(there, here, "in the ladder", "in the config")
