"""What a run of megatron.training calls to be in µP: six decorators on symbols of upstream's.

`mup-megatron run` puts them on at run time (patches/megatron_training.py), a patched tree has them in its source
(patches/megatron-lm-*/): both build the same model and the same groups, for both call this and nothing else. Without
`--mup-base` and `--mup-config` on the command line every one of them is upstream's function and nothing more.

Public names: `adds_arguments`, `reads_arguments`, `builds_model`, `builds_optimizer`, `saves_checkpoint`,
`loads_checkpoint`; `current` and `end` (the run at hand), for tests and for `mup-megatron run`.

Importing this imports nothing heavy: upstream's files import it while they are being imported themselves.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mup_megatron.util.errors import UserError

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from mup_megatron.megatron_training.megatron_run import MegatronRun

Function = Callable[..., Any]
_MARK = "__mup_megatron_training__"

_current: MegatronRun | None = None


def _once(decorator: Callable[[Function], Function]) -> Callable[[Function], Function]:
    """A decorator that leaves alone what it has decorated (`mup-megatron run` on a script of a patched tree).

    Where the user is wrong, the process says so in one sentence and ends with its status, whoever started it.
    """

    @functools.wraps(decorator)
    def decorate(function: Function) -> Function:
        if getattr(function, _MARK, None) == decorator.__name__:
            return function
        decorated = decorator(function)

        @functools.wraps(decorated)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return decorated(*args, **kwargs)
            except UserError as error:
                from mup_megatron.parallel.ranks import say_error

                say_error(str(error))
                sys.exit(error.status)

        setattr(call, _MARK, decorator.__name__)
        return call

    return decorate


def current() -> MegatronRun | None:
    """The run in µP that this process is in, from the moment its arguments are read."""
    return _current


def end() -> None:
    """Forgets the run at hand."""
    global _current
    _current = None


@_once
def adds_arguments(add_megatron_arguments: Function) -> Function:
    """On `megatron.training.arguments.add_megatron_arguments`: the options of µP in Megatron's own parser.

    It is the first that upstream calls, so the patches that this machine needs are applied here.
    """

    @functools.wraps(add_megatron_arguments)
    def add(parser: ArgumentParser) -> ArgumentParser:
        from mup_megatron.megatron_training.options import add_options, prepare

        prepare()
        return add_options(add_megatron_arguments(parser))

    return add


@_once
def reads_arguments(validate_args: Function) -> Function:
    """On `megatron.training.arguments.validate_args`: reads what the options name, before upstream derives from it.

    Ends the process where an option is refused or a file cannot be used.
    """

    @functools.wraps(validate_args)
    def validate(args: Namespace, defaults: Any = {}) -> Any:  # noqa: B006  (upstream's signature)
        from mup_megatron.megatron_training.option_check import check_options, check_table
        from mup_megatron.megatron_training.options import known, read_options

        global _current
        settings = read_options(args, defaults)
        if settings is not None:
            import megatron.core

            from mup_megatron.megatron_training.elsewhere import cannot_run, explain_elsewhere, show

            check_table(known(), megatron.core.__version__)
            if settings.command and cannot_run(args):
                raise UserError(
                    "this machine cannot run the command line (no CUDA, or fewer processes than its layout needs), and "
                    "trials are runs of it; expected a launcher with enough processes, or options of another layout"
                )
            if settings.explain and cannot_run(args):
                show(*explain_elsewhere(validate_args, args, defaults, settings), settings=settings)
                sys.exit(0)
            check_options(args, defaults, known())
        result = validate_args(args, defaults)
        _current = None
        if settings is not None:
            from mup_megatron.megatron_training.megatron_run import MegatronRun

            _current = MegatronRun(args, settings)
        return result

    return validate


@_once
def builds_model(init: Function) -> Function:
    """On `megatron.core.models.gpt.gpt_model.GPTModel.__init__`: records, multipliers and initial values.

    Ends the process where the model has no rules here, or does not belong to the base.
    """

    @functools.wraps(init)
    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        run = _current
        if run is None or run.building:
            init(self, *args, **kwargs)
        else:
            run.build(init, self, *args, **kwargs)

    return build


@_once
def builds_optimizer(get_megatron_optimizer: Function) -> Function:
    """On `megatron.core.optimizer.get_megatron_optimizer`, whoever's loop calls it: groups by rule.

    Ends the process where the model that is trained was built without µP.
    """

    @functools.wraps(get_megatron_optimizer)
    def build(config: Any, model_chunks: Any, *args: Any, **kwargs: Any) -> Any:
        if _current is not None:
            from mup_megatron.megatron_training.option_check import check_optimizer
            from mup_megatron.megatron_training.options import known

            check_optimizer(config, model_chunks, kwargs.get("config_overrides"), known())
            kwargs["config_overrides"] = _current.overrides(model_chunks, config.optimizer)
        optimizer = get_megatron_optimizer(config, model_chunks, *args, **kwargs)
        if _current is not None:
            _current.tell(model_chunks, optimizer)
            _current.audit(model_chunks, optimizer)
            _current.read(model_chunks, optimizer)
        return optimizer

    return build


@_once
def saves_checkpoint(save_checkpoint: Function) -> Function:
    """On `megatron.training.checkpointing.save_checkpoint`: the record beside the weights."""

    @functools.wraps(save_checkpoint)
    def save(iteration: int, *args: Any, **kwargs: Any) -> Any:
        result = save_checkpoint(iteration, *args, **kwargs)
        if _current is not None:
            _current.write_record(iteration)
        return result

    return save


@_once
def loads_checkpoint(load_checkpoint: Function) -> Function:
    """On `megatron.training.checkpointing.load_checkpoint`: the guard on resume, before anything is read.

    Ends the process where the checkpoint has no record, or one of another run.
    """

    @functools.wraps(load_checkpoint)
    def load(ddp_model: Any, *args: Any, **kwargs: Any) -> Any:
        if _current is not None:
            _current.check_checkpoint()
        try:
            return load_checkpoint(ddp_model, *args, **kwargs)
        except ValueError as error:  # rates tell groups apart there
            if _current is None or "Could not find parameter group" not in str(error):
                raise
            raise UserError(
                "the checkpoint's optimizer has groups of other rates or decays, which megatron-core does not take; "
                "expected --no-load-optim for a fresh optimizer, --finetune for a new run from these weights, or the "
                "options of the checkpoint"
            ) from error

    return load
