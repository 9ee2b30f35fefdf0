"""The page of `mup-megatron explain --html`: sizes are moved by hand, and every number of the table follows.

Public names: `explorer_page`, `notebook_of`, `RULES`. explorer.js draws the page; what it computes with are the laws of
the run's own tables (rules/measured_laws.py), and what it says of a rule is the table at the head of rules/formulas.py.
"""

from __future__ import annotations

import dataclasses
import html
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mup_megatron.config import Config, derive
from mup_megatron.report.document import document
from mup_megatron.rules import formulas
from mup_megatron.rules.laws import Laws
from mup_megatron.rules.measured_laws import TableOf, laws_of
from mup_megatron.util.errors import ConfigError
from mup_megatron.util.files import read_text

_NAMES = {
    "mup": "µP",
    "standard": "standard: one init std, one rate",
    "fan_in": "1/sqrt(fan-in) init, one rate",
    "per_layer": "1/sqrt(fan-in) init, a rate per layer",
    "one_ratio": "megatron-core's MuP: one ratio, hidden size / base hidden size",
    "ntk": "neural tangent",
}
_FORWARD = {
    "embedding": "embedding's output",
    "softmax_scale": "attention logits",
    "residual": "residual branches",
    "readout": "trunk's output before the head",
}
RULES = {
    "init": {"": "init standard deviation"},
    "lr": {
        **dict.fromkeys(("adam", "lion"), "learning rate, Adam, AdamW, Lion"),
        "sgd": "learning rate, SGD",
        **dict.fromkeys(("muon", "soap"), "learning rate, Muon, SOAP"),
    },
    "eps": {"adam": "Adam's epsilon", "soap": "SOAP's epsilon"},
    "weight_decay": {"": "decoupled weight decay"},
    "forward": {"": "readout's output"},
}
"""Which line of the formulas' table tells the rule of each number, by update rule where it depends on that."""
_STYLE = """
body { max-width: 1500px } .wide { font-size: 13.5px } .wide td, .wide th { padding-right: 0.5em }
.wide td:first-child { white-space: normal; overflow-wrap: anywhere; min-width: 8em }
select { max-width: 100% } h3 { overflow-wrap: anywhere }
#sizes { display: grid; grid-template-columns: repeat(auto-fill, minmax(20em, 1fr)); gap: 0.4em 1.5em }
#sizes label { display: grid; grid-template-columns: 1fr 6.5em; gap: 0 0.6em; align-items: center }
#sizes span, #sizes small { grid-column: 1 / 3 } #sizes span { font-weight: 600 }
small { color: var(--dim) } .other { color: light-dark(#a33, #f99); font-size: 0.85em }
#tensors td { vertical-align: top; cursor: pointer } #tensors td:focus { outline: 2px solid #4878a8 }
#tensors td > div { padding: 0 0.3em; border-radius: 3px } button, select { font: inherit }
#chosen { background: var(--block); padding: 0.1em 0.9em; overflow-x: auto }
#chosen td { white-space: normal; text-align: left; background: none }
@media print { #sizes input, button, select { display: none } }
"""


def explorer_page(config: Config, table_of: TableOf) -> str:
    """The page as text: one file that opens from disk and needs no network.

    Args:
        config: the run.
        table_of: makes the table of a run.

    Raises:
        UserError: the table of this run cannot be made, or a file has its base.
    """
    if config.base.file is not None:
        raise config.error(
            "base.file", "tells tensor by tensor what grows; --html moves sizes: expected them under base:"
        )
    laws = _laws(config, table_of)
    own = next(iter(laws))
    moving = set(_ratios([dataclasses.asdict(found) for found in laws.values()]))
    sizes = {name: dataclasses.asdict(size) for name, size in laws[own].sizes.items() if name in moving}
    script = read_text(Path(__file__).with_suffix(".js"))
    data = {
        "own": own,
        "names": {name: _NAMES[name] for name in laws},
        "laws": {name: dataclasses.asdict(found) for name, found in laws.items()},
        "sizes": sizes,
        "forward": _FORWARD,
        "rules": _rules() if own == "mup" else {number: {} for number in RULES},
    }
    written = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    still = [name for name in laws[own].sizes if name not in moving]
    body = f"<style>{_STYLE}</style>{_body(config, still)}<script>const DATA = {written};\n{script}</script>"
    return document(f"{config.run.name}: what µP does to every tensor", [body], {}, "")


def notebook_of(page: str, words: Sequence[str]) -> str:
    """A Jupyter notebook (nbformat 4.5) whose one cell makes the page, and shows it as it was made.

    Args:
        page: of `explorer_page`.
        words: of `explain`: the config and its overrides.
    """
    frame = f'<iframe srcdoc="{html.escape(page)}" width="100%" height="900" style="border: 0"></iframe>'
    command = ["mup-megatron", "explain", *words, "--html", "explain.html"]
    source = ["import subprocess\n", "\n", "from IPython.display import IFrame\n", "\n"]
    source += [f"subprocess.run({command!r}, check=True)\n", 'IFrame("explain.html", width="100%", height=900)']
    shown = {"output_type": "execute_result", "execution_count": 1, "metadata": {}, "data": {"text/html": frame}}
    cell = {"cell_type": "code", "id": "explain", "execution_count": 1, "metadata": {}, "source": source}
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    about = {"metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps({"cells": [{**cell, "outputs": [shown]}], **about}, indent=1) + "\n"


def _laws(config: Config, table_of: TableOf) -> dict[str, Laws]:
    """Of the run's own parametrization first, then of those that it is compared with."""
    plain = derive(config, {"parametrization.scaling": "none"})
    found: dict[str, Laws] = {config.parametrization.name: laws_of(plain, table_of)}
    for name in ("mup", "standard", "fan_in", "per_layer", "one_ratio"):
        if name not in found:
            with suppress(ConfigError):  # the last two are for Adam alone, one_ratio for a hidden size that grows
                found[name] = laws_of(derive(plain, {"parametrization.name": name}), table_of)
    return found


def _ratios(found: Any) -> Iterator[str]:
    """The ratios that laws depend on, from their plain data."""
    if isinstance(found, dict):
        yield from found.get("powers", ())
    if isinstance(found, dict | list):
        for part in found.values() if isinstance(found, dict) else found:
            yield from _ratios(part)


def _rules() -> dict[str, dict[str, dict[str, str]]]:
    """What the formulas' own table says, by number and update rule."""
    lines = dict(_lines())
    return {number: {rule: _line(lines, begin) for rule, begin in of.items()} for number, of in RULES.items()}


def _line(lines: dict[str, dict[str, str]], begin: str) -> dict[str, str]:
    return next(said for quantity, said in lines.items() if quantity.startswith(begin))


def _lines() -> list[tuple[str, dict[str, str]]]:
    """The rows of the table at the head of formulas.py."""
    rows = re.findall(r"^\| (.+?) +\| (.+?) +\| `(\w+)` +\| (.+?) +\|$", formulas.__doc__ or "", re.MULTILINE)
    names = ("multiplier", "function", "source")
    return [(quantity, dict(zip(names, said, strict=True))) for quantity, *said in rows]


def _sources() -> str:
    """Where the rules come from, as formulas.py names them."""
    return next(part for part in (formulas.__doc__ or "").split("\n\n") if part.startswith("Sources:"))


def _body(config: Config, still: list[str]) -> str:
    heads = ("tensor", "fan-out × fan-in", "m_in", "m_out", "init std", "rate", "epsilon", "decay", "multiplier")
    head = "".join(f"<th>{html.escape(name)}</th>" for name in heads)
    unit = (
        " The run stores its weights at unit scale; the numbers here are those of the weights as they are."
        if config.parametrization.scaling == "unit"
        else ""
    )
    ruled = "; rules over depth, batch and tokens are chosen by parametrization.depth, batch and tokens"
    unmoved = f"<p><small>Nothing depends on {', '.join(still)} here{ruled}.</small></p>" if still else ""
    return (
        f"<h1>{html.escape(config.run.name)}: what µP does to every tensor</h1>"
        "<p>Move a size: every number follows. Small numbers are the factor on the value at the base, where "
        "hyperparameters are defined; blue is below it, orange above. m_in and m_out are size / base size of fan-in "
        f"and fan-out; a size that is fixed has no ratio. Rates are those at the schedule's peak.{unit}</p>"
        f'<div id="sizes"></div>{unmoved}<p><button id="to base">all at the base</button> '
        '<button id="to target">all at the target</button> '
        '<label class="other">beside it: <select id="beside"></select></label></p>'
        '<div id="chosen"></div><h2>Tensors</h2>'
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody id="tensors"></tbody></table></div>'
        '<h2>Forward pass</h2><ul id="forward"></ul>'
        f"<p><small>{html.escape(_sources())} The rules are in mup_megatron/rules/formulas.py.</small></p>"
    )
