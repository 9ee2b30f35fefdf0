"""A run of megatron.training in µP: what the decorators of this package do, from its arguments on.

Public name: `MegatronRun`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.language_module.language_module import LanguageModule

from mup_megatron.checkpoints.manifest import MANIFEST, CheckpointManifest, make_manifest
from mup_megatron.config import Config, derive
from mup_megatron.engines.optim import megatron_overrides
from mup_megatron.engines.setup import resolve_auto
from mup_megatron.megatron_training import auditing, readings, watched
from mup_megatron.megatron_training.built_alone import built_alone
from mup_megatron.megatron_training.elsewhere import show
from mup_megatron.megatron_training.family import check_family
from mup_megatron.megatron_training.model_section import check_translation
from mup_megatron.megatron_training.models import KEY_PREFIX, chunks_of, name_in_checkpoints, needs_groups, one_model
from mup_megatron.megatron_training.option_check import check_config, check_load
from mup_megatron.megatron_training.options import Settings, known
from mup_megatron.megatron_training.saved import check_saved, read_saved
from mup_megatron.megatron_training.telemetry import applied, standard_tensors, tell, unread_names, write_scalars
from mup_megatron.megatron_training.translate import config_of, stages_of
from mup_megatron.model.as_built.chunks import BuiltModel, digest_of
from mup_megatron.model.as_built.given import OtherLayers, norms_left_out
from mup_megatron.model.as_built.hybrid import PATTERN
from mup_megatron.model.build import check_specs, initialise
from mup_megatron.model.global_names import named_parameters
from mup_megatron.model.transformer_config import core_config
from mup_megatron.parallel.layout import Layout, resolve_layout
from mup_megatron.parallel.runtime import point_to_point
from mup_megatron.rules.table import WORD_EMBEDDINGS, Parametrization
from mup_megatron.telemetry.alarms import Alarms
from mup_megatron.telemetry.band import band_of
from mup_megatron.telemetry.reading import usual_interval
from mup_megatron.tuning.record import write_record
from mup_megatron.tuning.recording import extrapolated
from mup_megatron.util.errors import UserError


class MegatronRun:
    """One run, from the moment Megatron's arguments are read.

    Args:
        args: Megatron's.
        settings: what the options of µP name.
    """

    advice = "--mup-audit warn"
    """How a run goes on although its audit found something."""

    def __init__(self, args: Namespace, settings: Settings) -> None:
        self._args, self._settings = args, settings
        self._made: tuple[Config, Parametrization, Layout] | None = None
        self._fused: bool | None = None
        self._built: BuiltModel | None = None
        self._own_layers = True
        self._beyond: dict[str, Any] = {}
        self._has_optimizer = False
        self.building = False
        """Whether the models at hand are the unsharded ones that shapes are read from."""

    @property
    def config(self) -> Config:
        """The run in this project's terms."""
        return self._parts[0]

    @property
    def parametrization(self) -> Parametrization:
        """The rules for every tensor of the whole model."""
        return self._parts[1]

    @property
    def layout(self) -> Layout:
        """How ranks split the model."""
        return self._parts[2]

    @property
    def _parts(self) -> tuple[Config, Parametrization, Layout]:
        if self._made is None:
            raise UserError(
                "the script built no GPTModel before it was asked for, nor a HybridModel under mup-megatron run; "
                "expected one of them"
            )
        return self._made

    @property
    def _vocabulary(self) -> int:
        """Rows of the embedding."""
        return self.parametrization.tensors[WORD_EMBEDDINGS].shape.spec.shape[0]

    def build(self, init: Callable[..., None], model: LanguageModule, *args: Any, **kwargs: Any) -> None:
        """Builds a chunk of the model as the script asks for it; then records, multipliers and initial values.

        Args:
            init: upstream's.
            model: the object under construction.
            args: upstream's.
            kwargs: upstream's.

        Raises:
            UserError: the model has no rules here, or its sizes do not belong to the base's.
        """
        bound = inspect.signature(init).bind(model, *args, **kwargs)
        bound.apply_defaults()
        given = {name: value for name, value in bound.arguments.items() if name != "self"}
        config, chunk = given["config"], given["vp_stage"] or 0
        built = self._built
        if built is None:
            self.check_given(given)
            built = self._begin(given)
        else:  # the first chunk's tensors came with the run
            one_model(chunk)
            self._check_layers(given)
            table = self._parametrize_chunk(built, given, self.layout)
            self._made = self.config, watched.without_rule(table, self.layout), self.layout
        if self._settings.explain:
            if chunk == self.layout.virtual_pipeline - 1:
                self._explain_and_leave()
            torch.nn.Module.__init__(model)  # an empty chunk: the table needs those that follow, and no weights
            return
        self._fused = bool(config.bias_activation_fusion and (config.gated_linear_unit or config.add_bias_linear))
        built.construct(init, model, given, self.parametrization, self.layout)
        needs_groups(model, lambda: self._has_optimizer)
        rank = torch.distributed.get_rank()
        name_in_checkpoints(model)
        check_specs(model, self.parametrization, self.layout, rank, chunk)
        initialise(model, self.parametrization, self.layout, rank)
        if not torch.cuda.is_available():
            interleaved = config.virtual_pipeline_model_parallel_size is not None
            for flag, value in point_to_point(split=True, interleaved=interleaved, cuda=False).items():
                setattr(config, flag, value)

    def check_given(self, given: dict[str, Any]) -> None:
        """Refuses what the script's TransformerConfig says, before anything is made of it.

        Args:
            given: what GPTModel is constructed with, by parameter name.

        Raises:
            UserError: names the field.
        """
        check_config(given["config"], known())

    def _begin(self, given: dict[str, Any]) -> BuiltModel:
        """Decides whether a config says the script's layers (on all ranks alike), and makes what the run is."""
        from megatron.training.global_vars import get_tokenizer

        self._beyond = built_alone(given["config"])
        everyones: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyones, self._compare(given))
        left_out, reason = next((found for found in everyones if found[1]), everyones[0])
        if any(found[0] != left_out for found in everyones) and not reason:
            reason = "the script's layer specs leave out other norms on some ranks than on others"
        self._own_layers = reason is None
        if reason is not None:
            self._check_other_layers(reason)
        elif named := self._settings.base_sizes.named:
            raise UserError(
                f"base.{named[0]}: the model is megatron-core's own, which has no such size; expected its option, or "
                "no such base size"
            )
        vocab_size = self._args.vocab_size or get_tokenizer().vocab_size
        config = resolve_auto(
            config_of(self._args, given, self._settings, vocab_size, left_out if reason is None else ())
        )
        layout = resolve_layout(config, torch.distributed.get_world_size(), stages=stages_of(given))
        built = self._built = BuiltModel(config, self._settings.tensors, self._settings.base_sizes)
        parametrization = self._named(self._parametrize_chunk(built, given, layout))
        ours = core_config(config, config.model, parametrization.forward, layout, torch.device("cpu"))
        check_translation(given["config"], ours)
        self._made = parametrization.config, watched.without_rule(parametrization, layout), layout
        if not self._in_parts:
            self._check_asked()
        return built

    @property
    def _in_parts(self) -> bool:
        """Whether what tells the model's family is known once every chunk is there, and not before."""
        return not self._own_layers and self.layout.virtual_pipeline > 1

    def _compare(self, given: dict[str, Any]) -> tuple[list[str], str | None]:
        """The norms that the script's layer spec leaves out; or why no config says its layers."""
        if PATTERN in given:
            return [], f"it is a HybridModel, of the layers {given[PATTERN]}"
        if self._beyond:
            return [], f"no key of model: says {next(iter(self._beyond))}"
        try:
            left_out = norms_left_out(
                given["config"],
                given["transformer_layer_spec"],
                given["mtp_block_spec"],
                transformer_engine=self._args.transformer_impl == "transformer_engine",
                stage=given["vp_stage"],
            )
        except OtherLayers as difference:
            return [], str(difference)
        return left_out, "no key of model: says what --mup-tensors does" if self._settings.tensors else None

    def _check_layers(self, given: dict[str, Any]) -> None:
        """Whether a further chunk of a model whose layers a config says is made as the first is."""
        if self._own_layers and (found := self._compare(given)) != (self.config.model.without_norms, None):
            raise UserError(
                "the script's layer specs differ from one virtual stage to another "
                f"({found[1] or 'they leave out other norms'}); expected the same in all of them"
            )

    def _check_other_layers(self, reason: str) -> None:
        """Refuses what knows the model by its options alone, where the script builds another.

        Raises:
            UserError: names the option.
        """
        if self._settings.written is not None and not self._settings.command:
            raise UserError(
                f"--mup-write-config: no config says the script's layers ({reason}); expected none, or mup-megatron "
                "tune --megatron, whose proxies the script builds"
            )
        whole = [name for name in self._beyond if name.startswith("--heterogeneous")]
        if (self._settings.written or watched.task()) and (named := [*whole, *self._settings.base_sizes.named]):
            raise UserError(
                f"{named[0]}: tune --megatron and coord-check --megatron put other sizes in the place of the options', "
                "and do not know this one; expected a proxy that you type as a run of its own"
            )
        if torch.distributed.get_rank() == 0:
            print(f"mup-megatron: no config says the script's layers: {reason}", file=sys.stderr)

    def _check_asked(self) -> None:
        """Whether the run is the one that a study asked for, and of the record's family."""
        watched.check(self.config)
        if self._settings.record is not None:
            record = check_family(self._settings.record, self.config)
            if torch.distributed.get_rank() == 0 and watched.task() is None:
                for said in extrapolated(self.config, record):
                    print(f"mup-megatron: extrapolated, {said}", file=sys.stderr)

    def _named(self, parametrization: Parametrization) -> Parametrization:
        """The table with the digest of the script's layers in its config, where that does not say them."""
        if self._own_layers:
            return parametrization
        config = derive(parametrization.config, {"model.as_built": digest_of(parametrization, self._beyond)})
        return dataclasses.replace(parametrization, config=config)

    def _parametrize_chunk(self, built: BuiltModel, given: dict[str, Any], layout: Layout) -> Parametrization:
        """The table with one more chunk of the model as it is built."""
        stage, chunk = parallel_state.get_pipeline_model_parallel_rank(), given["vp_stage"] or 0
        self.building = True
        try:
            return built.parametrize(given, layout.stages[stage][chunk], first=not chunk)
        finally:
            self.building = False

    def _finish(self) -> None:
        """Makes the table of the model whole; all ranks call it once every chunk is there."""
        if self._built is None:
            return
        table = watched.without_rule(self._named(self._built.finish()), self.layout)
        self._made = table.config, table, self.layout
        if self._in_parts:
            self._check_asked()

    def _explain_and_leave(self) -> None:
        self._finish()
        if torch.distributed.get_rank() == 0:
            built = None if self._own_layers else self._built
            show(self.config, self.parametrization, self.layout, settings=self._settings, built=built)
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        sys.exit(0)

    def overrides(self, model_chunks: Any, optimizer: str) -> dict[Any, Any]:
        """`config_overrides` of megatron-core's optimizers for the model that is trained.

        Args:
            model_chunks: as the script hands them over, in whatever they are wrapped.
            optimizer: its name in the script's OptimizerConfig.

        Raises:
            UserError: they are no GPTModels, or were built without µP; the options name another optimizer.
        """
        if optimizer != self._args.optimizer:
            raise UserError(
                f"the script's OptimizerConfig has the optimizer {optimizer}, Megatron's options "
                f"{self._args.optimizer}; rates depend on it: expected the same"
            )
        self._finish()
        self._has_optimizer = True
        chunks = chunks_of(model_chunks)
        for said in (standard_tensors(self.parametrization), unread_names(self._settings.unread)):
            if said and torch.distributed.get_rank() == 0:
                print(f"mup-megatron: {said}", file=sys.stderr, flush=True)
        overrides = megatron_overrides(list(named_parameters(chunks)), self.parametrization)
        for override in overrides.values():
            # Up to 0.18 megatron-core tells the groups of a checkpoint apart by four keys. `lr_mult` is one of them and
            # has no other effect, so it carries the rule.
            override["lr_mult"] = override["rule"]
            # megatron.training logs the rate of the group with this mark. Without it no rate is logged, because every
            # group has an override here.
            override["default_config"] = override["lr_multiplier"] == 1.0
        return overrides

    def tell(self, model_chunks: Any, optimizer: Any) -> None:
        """Says what was applied to the model and the optimizer. Collective."""
        tell(self.parametrization, chunks_of(model_chunks), optimizer.param_groups)

    def audit(self, model_chunks: Any, optimizer: Any) -> None:
        """Has the run's first step looked at. Collective."""
        asked, action, save = watched.task(), self._settings.audit, getattr(self._args, "save", None)
        if action != "off" and (asked is None or asked.kind == "trial"):
            folder = None if save is None else Path(save)
            parts = chunks_of(model_chunks), optimizer, self.parametrization, self.layout
            auditing.begin(*parts, advice=self.advice if action == "stop" else None, folder=folder)

    def read(self, model_chunks: Any, optimizer: Any) -> None:
        """Has steps read, where they are asked to be. Collective."""
        asked, interval, save = watched.task(), self._settings.telemetry_interval, getattr(self._args, "save", None)
        interval = usual_interval(getattr(self._args, "train_iters", None) or 0) if interval is None else interval
        if interval and (asked is None or asked.kind == "trial"):
            parts = chunks_of(model_chunks), optimizer, self.parametrization, self.layout
            folder = None if (where := save if asked is None else asked.path) is None else Path(where)
            record = self._settings.record
            band = None if record is None else band_of(self.parametrization, record.with_suffix(".band.json"))
            same_decay = getattr(self._args, "weight_decay_incr_style", "constant") == "constant"
            alarms = Alarms(self.parametrization, band, decays=same_decay)
            readings.begin(*parts, interval=interval, folder=folder, write=self.write_scalars, alarms=alarms)

    def write_scalars(self, step: int, found: Mapping[str, float]) -> None:
        """Hands numbers of a step to upstream's own writers."""
        write_scalars(step, found)

    def write_record(self, iteration: int) -> None:
        """Writes what the weights were made with beside a checkpoint."""
        from megatron.training.checkpointing import get_checkpoint_name

        self.record_in(Path(get_checkpoint_name(self._args.save, iteration, return_base_dir=True)), iteration)

    def record_in(self, folder: Path, step: int) -> None:
        """Writes the record of this run into a checkpoint's folder; the first rank does.

        Args:
            folder: of the checkpoint.
            step: updates done.
        """
        if torch.distributed.get_rank() == 0:
            write_record(folder / MANIFEST, self._manifest(step).as_json())

    def check_checkpoint(self) -> None:
        """The guard on resume, on what load_checkpoint chooses; a step that is named needs no tracker there.

        Raises:
            UserError: the checkpoint has no record, or one of another run; says what differs.
        """
        from megatron.training.checkpointing import checkpoint_exists, get_load_checkpoint_path_by_args

        args, name = self._args, "load"
        named = args.load is not None and getattr(args, "ckpt_step", None)
        if args.pretrained_checkpoint is not None and not checkpoint_exists(args.load):
            name, named = "pretrained_checkpoint", None
        if named or checkpoint_exists(getattr(args, name)):
            self.check_record(Path(get_load_checkpoint_path_by_args(args, name)))

    def check_record(self, path: Path) -> None:
        """The guard on one checkpoint.

        Args:
            path: the folder of its weights.

        Raises:
            UserError: it has no record, or one of another run; says what differs.
        """
        check_load(self._args)
        found, ranks = read_saved(path), self._args.tensor_model_parallel_size
        check_saved(path, found, self._manifest(0), self._settings.allowed, ranks)

    def _manifest(self, step: int) -> CheckpointManifest:
        args = self._args
        data = json.dumps([args.data_path, args.split, args.seq_length, args.mock_data], default=str)
        manifest = make_manifest(self.parametrization, self.layout, hashlib.sha256(data.encode()).hexdigest(), step)
        return manifest.replaced(
            vocabulary=self._vocabulary,
            key_prefix=KEY_PREFIX,
            fused_activation=self._fused,
            tokenizer_type=args.tokenizer_type,
            applied=applied(self.parametrization),
            unread=list(self._settings.unread) or None,
            as_built=None if self._own_layers else [str(entry) for entry in self._settings.tensors],
        )
