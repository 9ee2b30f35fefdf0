"""One self-contained HTML page of a run. Public names: `write_page`, `page`."""

from __future__ import annotations

import base64
import html
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mup_megatron.model.explain import shown_init
from mup_megatron.report.document import curves, document, layout_of, table, write_document
from mup_megatron.report.opening import made, opening
from mup_megatron.report.pictures import BEYOND, COLORS, MARK, STATES, extent_of, limits, marked
from mup_megatron.report.proofs import Proof, proofs
from mup_megatron.report.run_data import Run, read_run
from mup_megatron.report.summary import summary
from mup_megatron.rules.shapes import without_numbers
from mup_megatron.tuning.objective import objective_of
from mup_megatron.tuning.record import StudyRecord, TrialRecord
from mup_megatron.util.files import as_yaml, read_bytes
from mup_megatron.util.secrets import masked_data

_RING = "worse than is shown"


def write_page(directory: Path) -> Path:
    """Writes report.html into a run's folder.

    Args:
        directory: of the run.

    Returns:
        Path of the page.

    Raises:
        UserError: the folder holds no run, or the page cannot be written.
    """
    import plotly.offline

    return write_document(directory / "report.html", page(read_run(directory), plotly.offline.get_plotlyjs()))


def page(run: Run, plotly: str) -> str:
    """The page as text.

    Args:
        run: to show.
        plotly: Plotly's own code.

    Raises:
        UserError: a check in the run's folder is damaged.
    """
    directory = run.directory
    name = str((run.config.get("run") or {}).get("name", directory.name))
    sections = [f"<h1>{html.escape(name)}</h1>", opening(run)]
    figures: dict[str, dict[str, Any]] = {}
    if run.record is not None or run.curves:
        data = summary(run)
        sections.append("<h2>What was done</h2>")
        sections.append(table(data["columns"], data["values"]))
        sections.append(table((), data["results"], "text"))
        sections.append("<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in data["remarks"]) + "</ul>")
    if run.curves:
        figures["curves"] = curves(run.curves, marked(run))
        sections.append('<h2>The target</h2><div id="curves"></div>')
    if run.samples:
        last = run.samples[-1]["step"]
        rows = [(each["prompt"], each["text"]) for each in run.samples if each["step"] == last]
        sections.append(
            f"<h2>What it wrote at step {last:,}</h2>" + table(("prompt", "most likely text"), rows, "text")
        )
    if run.record is not None:
        name_of = objective_of(run.record.study.objective).name
        searched = {
            f"search-{parameter}": _search(run.record.study, parameter, run.others.get(parameter))
            for parameter in run.record.study.values
        }
        figures |= searched
        sections.append(f"<h2>The proxy's {name_of} over each hyperparameter</h2>")
        if any(each["name"] == _RING for figure in searched.values() for each in figure["data"]):
            sections.append(f"<p>In a ring: {_RING}.</p>")
        sections += [f'<div id="{html.escape(figure)}"></div>' for figure in searched]
        sections.append("<h2>Trials</h2>" + _trials(run.record.study))
    sections += [_proof(proof) for proof in proofs(directory)]
    if run.explanation is not None:
        shown = _explanation(run.explanation, biased=run.has_position_bias)
        sections.append(f"<h2>What the parametrization does to every tensor</h2>{shown}")
    # A run of an older version may hold a password, which this page, made to be shown, must not.
    sections.append(f"<h2>Config, record, environment</h2><p>{html.escape(made(run))}</p>")
    if run.record is not None:
        sections.append(_details("transfer record", json.dumps(masked_data(run.record.as_json()), indent=1)))
    if run.config:
        sections.append(_details("config, resolved", as_yaml(masked_data(run.config))))
    return document(name, sections, figures, plotly)


def _proof(proof: Proof) -> str:
    drawn = ""
    if proof.picture is not None:
        encoded = base64.b64encode(read_bytes(proof.picture)).decode()
        drawn = f'<img alt="{html.escape(proof.title)}" src="data:image/png;base64,{encoded}">'
    said = html.escape("\n".join(proof.lines))
    return f"<h2>{html.escape(proof.title)}</h2>{drawn}<pre>{said}</pre>"


def _details(title: str, text: str) -> str:
    return f"<details><summary>{html.escape(title)}</summary><pre>{html.escape(text)}</pre></details>"


def _search(study: StudyRecord, name: str, trained: Any = None) -> dict[str, Any]:
    objective = objective_of(study.objective)
    trials = [trial for trial in study.trials if trial.values]
    high = limits(trials)[1]

    def points(shown: Sequence[TrialRecord], label: str, marker: dict[str, Any]) -> dict[str, Any]:
        """Trials; one that is worse than is shown, or has no number, stands at the edge."""
        losses = [min(trial.loss, high) if trial.loss is not None else high for trial in shown]
        measured = (objective.text(trial.loss) if trial.loss is not None else "none" for trial in shown)
        return {
            "type": "scatter",
            "mode": "markers",
            "name": label,
            "x": [trial.values[name] for trial in shown],
            "y": [objective.shown(loss) for loss in losses],
            "text": [_hover(trial, f"{objective.name} {loss}") for trial, loss in zip(shown, measured, strict=True)],
            "marker": marker,
            "hovertemplate": "%{text}",
        }

    data = []
    for state, (label, _, color) in STATES.items():
        if shown := [trial for trial in trials if trial.state == state]:
            data.append(points(shown, label, {"color": color, "size": 9}))
    if beyond := [trial for trial in trials if trial.loss is None or trial.loss > high]:
        ring = {"color": BEYOND, "size": 14, "symbol": "circle-open"}
        data.append({**points(beyond, _RING, ring), "hoverinfo": "skip", "showlegend": False})
    chosen, extent = study.values[name], extent_of(study, name)
    layout = layout_of(name, objective.axis, log=extent is not None and extent.log, height=310)
    if extent is not None:
        logarithm = math.log10 if extent.log else float
        low, high = logarithm(extent.low), logarithm(extent.high)
        room = 0.03 * (high - low)
        layout["xaxis"] |= {"range": [low - room, high + room]}
        whole = {"yref": "paper", "y0": 0, "y1": 1}
        empty = {"type": "rect", "fillcolor": "rgba(128,128,128,0.15)", "line": {"width": 0}, "layer": "below"}
        layout["shapes"] = [
            {**whole, "type": "line", "x0": chosen, "x1": chosen, "line": {"dash": "dot", "color": MARK}},
            *({**whole, **empty, "x0": low, "x1": high} for low, high in extent.untried),
        ]
        if trained is not None:
            line = {"type": "line", "x0": trained, "x1": trained, "line": {"dash": "dash", "color": COLORS[1]}}
            layout["shapes"].append({**whole, **line})
            layout["title"] = {"text": f"red: the target trained with {trained:.4g}", "font": {"size": 12}}
    return {"data": data, "layout": layout}


def _hover(trial: TrialRecord, measured: str) -> str:
    values = "<br>".join(
        f"{key} {value if isinstance(value, str) else f'{value:.4g}'}" for key, value in trial.values.items()
    )
    return f"trial {trial.slot}, seed {trial.seed}: {trial.state}<br>{measured}<br>{values}"


def _trials(study: StudyRecord) -> str:
    names, objective = list(study.values), objective_of(study.objective)
    rows = []
    for trial in study.trials:
        loss = objective.text(trial.loss) if trial.loss is not None else ""
        steps = max((int(step) for step in trial.reports), default=0)
        values = [trial.values.get(name, "") for name in names]
        cells = [value if isinstance(value, str) else f"{value:.4g}" for value in values]
        ended = f"{trial.state}: {trial.reason}" if trial.reason and trial.state == "failed" else trial.state
        rows.append([str(trial.slot), trial.seed, ended, steps, loss, *cells, f"{trial.seconds:.0f} s"])
    return table(("trial", "seed", "ended", "step", objective.name, *names, "time"), rows)


def _explanation(explanation: dict[str, Any], *, biased: bool) -> str:
    rows: dict[tuple[str, ...], None] = {}
    for parameter in explanation["parameters"]:
        eps = f"{parameter['eps']:.4g}" if parameter["eps"] is not None else ""
        row = (
            without_numbers(parameter["name"]),
            "×".join(map(str, parameter["global_shape"])),
            "×".join(map(str, parameter["local_shape"])),
            "×".join(map(str, parameter["base_shape"])),
            shown_init(parameter),
            f"{parameter['lr']:.4g}",
            eps,
            f"{parameter['weight_decay']:.4g}",
        )
        rows[row] = None
    head = ("tensor", "global", "on a rank", "base", "init std", "lr", "eps", "weight decay")
    multipliers = {key: value for key, value in explanation["forward"].items() if key != "relative_bias" or biased}
    forward = ", ".join(f"{key} {value:.6g}" for key, value in multipliers.items())
    return f"<p>Forward multipliers: {html.escape(forward)}</p>" + table(head, rows)
