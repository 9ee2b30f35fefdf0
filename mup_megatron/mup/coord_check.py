"""The coordinate check with microsoft/mup's names: sizes of activations over width, after a few steps.

For plain torch models on one process; proof/coord_check.py is the check of megatron-core models under any layout.
Public names: `get_coord_data`, `plot_coord_data`, `FDICT`. In µP the sizes do not depend on width; in the standard
parametrization they grow with width (Tensor Programs V, appendix D.1).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # torch's own name for it

from mup_megatron.mup.optim import MuAdam, MuAdamW, MuSGD
from mup_megatron.util.errors import UserError

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped]

Statistic = Callable[[torch.Tensor], torch.Tensor]


def _gram(x: torch.Tensor) -> torch.Tensor:
    """Inner products of all pairs of vectors (the last dimension), divided by the size of that dimension."""
    x = x.reshape(1, 1) if x.numel() == 1 else x.reshape(-1, x.shape[-1])
    return x @ x.T / x.shape[-1]


def _off_diagonal(x: torch.Tensor) -> torch.Tensor:
    gram = _gram(x)
    return gram[~torch.eye(len(gram), dtype=torch.bool, device=gram.device)]


FDICT: dict[str, Statistic] = {
    "l1": lambda x: x.abs().mean(),
    "l2": lambda x: (x**2).mean() ** 0.5,
    "mean": lambda x: x.mean(),
    "std": lambda x: x.std(),
    "covl1": lambda x: _gram(x).abs().mean(),
    "covl2": lambda x: (_gram(x) ** 2).mean() ** 0.5,
    "covoffdiagl1": lambda x: _off_diagonal(x).abs().mean(),
    "covoffdiagl2": lambda x: (_off_diagonal(x) ** 2).mean() ** 0.5,
}
"""Statistics by name."""

_OPTIMIZERS = {
    "sgd": (MuSGD, torch.optim.SGD),
    "adam": (MuAdam, torch.optim.Adam),
    "adamw": (MuAdamW, torch.optim.AdamW),
}
_LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "xent": F.cross_entropy,
    "nll": F.nll_loss,
    "mse": lambda output, target: F.mse_loss(output, F.one_hot(target, output.shape[-1]).float()),
}


def get_coord_data(
    models: Mapping[Any, Callable[[], torch.nn.Module]],
    dataloader: Iterable[Any],
    optimizer: str | Callable[[torch.nn.Module], Any] = "sgd",
    lr: float | None = None,
    mup: bool = True,
    filter_trainable_by_name: Callable[[str], bool] | None = None,
    *,
    nsteps: int = 3,
    dict_in_out: bool = False,
    flatten_input: bool = False,
    flatten_output: bool = False,
    output_name: str = "loss",
    lossfn: str = "xent",
    filter_module_by_name: Callable[[str], bool] | None = None,
    fix_data: bool = True,
    cuda: bool = True,
    nseeds: int = 1,
    output_fdict: Mapping[str, Statistic | str] | None = None,
    input_fdict: Mapping[str, Statistic | str] | None = None,
    param_fdict: Mapping[str, Statistic | str] | None = None,
    show_progress: bool = True,
) -> pandas.DataFrame:
    """Trains a model of each width for a few steps and records the size of every module's output.

    Args:
        models: width to a function that makes a model, base shapes set.
        dataloader: (input, label) pairs, or dictionaries of the model's arguments with `dict_in_out`.
        optimizer: sgd, adam or adamw; or a function that makes the optimizer of a model.
        lr: learning rate; unless given, 0.1 for sgd and 1e-3 for the others.
        mup: True takes µP's optimizer, False torch's.
        filter_trainable_by_name: whether a parameter of this name is trained; all unless given.
        nsteps: optimizer steps.
        dict_in_out: the model takes and returns dictionaries; the loss is the entry `output_name` of the output, or the
            first element if the output is a tuple.
        flatten_input: the input becomes (samples, everything else).
        flatten_output: the output becomes (samples · positions, classes).
        output_name: name of the loss in the output; see `dict_in_out`.
        lossfn: xent, mse or nll.
        filter_module_by_name: whether a module of this name is measured; all unless given.
        fix_data: take the first batch for every step.
        cuda: train on a GPU, where there is one.
        nseeds: repetitions, each with another seed.
        output_fdict: statistics of outputs: column to a name of `FDICT` or a function; {"l1": "l1"} unless given.
        input_fdict: statistics of inputs; none unless given.
        param_fdict: statistics of parameters; none unless given.
        show_progress: show a bar.

    Returns:
        A pandas DataFrame with the columns width, module, t (from 1), the statistics, optimizer and lr.

    Raises:
        UserError: an optimizer or loss that is not known, no batch, or pandas is not installed.
    """
    pandas = _pandas()
    if lossfn not in _LOSSES:
        raise UserError(f"lossfn: {lossfn!r}; expected {', '.join(_LOSSES)}")
    make_optimizer, rate = _optimizer(optimizer, lr, mup, filter_trainable_by_name)
    device = torch.device("cuda" if cuda and torch.cuda.is_available() else "cpu")
    statistics = [_statistics(given) for given in (output_fdict or {"l1": "l1"}, input_fdict, param_fdict)]
    batches = list(itertools.islice(dataloader, 1)) * nsteps if fix_data else list(itertools.islice(dataloader, nsteps))
    if not batches:
        raise UserError("dataloader: it has no batch; expected at least one, and nsteps of 1 or more")

    def loss_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        if dict_in_out:
            outputs = model(**{key: _to(value, device) for key, value in batch.items()})
            return outputs[output_name] if isinstance(outputs, dict) else outputs[0]
        data, target = (_to(value, device) for value in batch)
        output = model(data.view(len(data), -1) if flatten_input else data)
        return _LOSSES[lossfn](output.view(-1, output.shape[-1]) if flatten_output else output, target)

    rows: list[dict[str, Any]] = []
    runs = [(seed, *item) for seed in range(nseeds) for item in models.items()]
    previous = None
    for seed, width, make in _progress(runs) if show_progress else runs:
        if seed != previous:
            torch.manual_seed(seed)
        previous = seed
        model = make().train().to(device)
        stepper = make_optimizer(model)
        for t, batch in enumerate(batches, start=1):
            hooks = [
                module.register_forward_hook(_recorder(rows, {"width": width, "module": name, "t": t}, statistics))
                for name, module in model.named_modules()
                if filter_module_by_name is None or filter_module_by_name(name)
            ]
            loss = loss_of(model, batch)
            stepper.zero_grad()
            loss.backward()
            stepper.step()
            for hook in hooks:
                hook.remove()
    data = pandas.DataFrame(rows)
    data["optimizer"] = optimizer if isinstance(optimizer, str) else "custom"
    data["lr"] = rate
    return data


def plot_coord_data(
    df: pandas.DataFrame,
    y: str = "l1",
    save_to: str | Path | None = None,
    suptitle: str | None = None,
    x: str = "width",
    hue: str = "module",
    legend: Any = "full",
    name_contains: str | None = None,
    name_not_contains: str | None = None,
    loglog: bool = True,
    logbase: int = 2,
    face_color: str | None = None,
) -> Any:
    """Draws what `get_coord_data` returned: a panel per step, a line per module, averaged over seeds.

    Args:
        df: the data.
        y: column on the vertical axis.
        save_to: file to be written.
        suptitle: title.
        x: column on the horizontal axis.
        hue: column whose every value is a line.
        legend: False or None leaves it out.
        name_contains: draw only modules whose name contains this text.
        name_not_contains: leave out modules whose name contains this text.
        loglog: whether both axes are logarithmic.
        logbase: base of the logarithmic axes.
        face_color: background.

    Returns:
        The Matplotlib figure.
    """
    from matplotlib.figure import Figure

    df = df[df["module"] != ""]
    if name_contains is not None:
        df = df[df["module"].str.contains(name_contains)]
    if name_not_contains is not None:
        df = df[~df["module"].str.contains(name_not_contains)]
    steps = sorted(df["t"].unique())
    figure = Figure(figsize=(5 * len(steps), 4), layout="constrained")
    if face_color is not None:
        figure.patch.set_facecolor(face_color)
    for panel, t in zip(figure.subplots(1, len(steps), squeeze=False)[0], steps, strict=True):
        for name, lines in df[df["t"] == t].groupby(hue, sort=False):
            means = lines.groupby(x)[y].mean()
            panel.plot(means.index, means.values, marker=".", label=str(name))
        panel.set(title=f"t={t}", xlabel=x, ylabel=y if t == steps[0] else "")
        if loglog:
            panel.set_xscale("log", base=logbase)
            panel.set_yscale("log", base=logbase)
        if legend and t == steps[0]:
            panel.legend(fontsize="small")
    if suptitle:
        figure.suptitle(suptitle)
    if save_to is not None:
        figure.savefig(save_to)
    return figure


def _optimizer(
    optimizer: Any, lr: float | None, mup: bool, trains: Callable[[str], bool] | None
) -> tuple[Callable[[torch.nn.Module], Any], float | None]:
    if callable(optimizer):
        return optimizer, lr
    if optimizer not in _OPTIMIZERS:
        raise UserError(f"optimizer: {optimizer!r}; expected {', '.join(_OPTIMIZERS)}, or a function of the model")
    kind = _OPTIMIZERS[optimizer][0 if mup else 1]
    rate = lr if lr is not None else 0.1 if optimizer == "sgd" else 1e-3

    def make(model: torch.nn.Module) -> Any:
        return kind([p for name, p in model.named_parameters() if trains is None or trains(name)], lr=rate)

    return make, rate


def _statistics(given: Mapping[str, Statistic | str] | None) -> dict[str, Statistic]:
    return {name: FDICT[f] if isinstance(f, str) else f for name, f in (given or {}).items()}


def _recorder(rows: list[dict[str, Any]], row: dict[str, Any], statistics: list[dict[str, Statistic]]) -> Any:
    """A forward hook that appends a row per tensor of the output, of the input, and per parameter."""
    of_outputs, of_inputs, of_parameters = statistics

    @torch.no_grad()
    def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
        tensors = list(_tensors(row["module"], output, ":out"))
        kinds = [(tensors, of_outputs)]
        if of_inputs:
            named = [part for i, arg in enumerate(args) for part in _tensors(f"{row['module']}:in[{i}]", arg, "")]
            kinds.append((named, of_inputs))
        if of_parameters:
            named = [(f"{row['module']}:param[{name}]", p) for name, p in module.named_parameters()]
            kinds.append((named, of_parameters))
        for named, functions in kinds:
            for name, tensor in named:
                rows.append({**row, "module": name, **{key: f(tensor).item() for key, f in functions.items()}})

    return hook


def _tensors(name: str, value: Any, mark: str) -> Iterable[tuple[str, torch.Tensor]]:
    """The floating-point tensors of a value that may be nested; a value that is a tensor keeps the given name."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield name, value
        return
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (tuple, list)) else ()
    for key, part in parts:
        yield from _tensors(f"{name}{mark}[{key}]", part, "")


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _progress(runs: list[Any]) -> Iterable[Any]:
    from rich.progress import track

    return track(runs, description="coordinates")


def _pandas() -> Any:
    try:
        import pandas
    except ImportError:
        raise UserError("the coordinate check's table needs pandas; pip install pandas") from None
    return pandas
