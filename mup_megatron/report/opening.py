"""The first lines of a run's page, a sentence each: what was tuned, what the target reached, what to check.

Public names: `opening`, `made`.
"""

from __future__ import annotations

import datetime
import html
import math

from mup_megatron.report.run_data import Run
from mup_megatron.report.summary import counted, ended_lower, extrapolated_of
from mup_megatron.tuning.predicted import in_words
from mup_megatron.tuning.remarks import to_check
from mup_megatron.util.progress import short_count

_WORDS = {
    "µP": "the maximal update parametrization (Tensor Programs V, arXiv 2203.03466): init and learning rate of every "
    "tensor follow its width, so that values tuned on the small proxy are right for the large target",
    "standard": "the same target with the same values in Megatron's default parametrization: one init standard "
    "deviation and one learning rate at every width",
    "nats per token": "the loss: minus the natural logarithm of the probability that the model gave to the next token; "
    "exp(loss) is the perplexity",
    "interior": "whether the chosen value lies inside the range that was tried; at an edge, a better one may lie "
    "outside",
}


def opening(run: Run) -> str:
    """The lines as HTML, and what their words mean; what no file of the run tells is left out."""
    sentences = [sentence for sentence in (_proxy(run), _target(run), _check(run)) if sentence]
    terms = "".join(f"<dt>{html.escape(word)}</dt><dd>{html.escape(text)}.</dd>" for word, text in _WORDS.items())
    said = "".join(f"<p>{html.escape(sentence)}</p>" for sentence in sentences)
    return f"{said}<details><summary>What the words on this page mean</summary><dl>{terms}</dl></details>"


def _proxy(run: Run) -> str:
    if run.record is None:
        return ""
    proxy = (run.plan or {}).get("tuning")
    size = f" of {short_count(proxy['parameters'])} parameters" if proxy else ""
    model, proxy = run.config.get("model") or {}, run.config.get("proxy") or {}
    smaller = [f"{name} {size} instead of {model[name]}" for name, size in proxy.items() if size and model.get(name)]
    unlike = f" ({', '.join(smaller)})" if smaller else ""
    spent = run.record.budget.spent.tokens
    return (
        f"Tuned: trials of a proxy{size}{unlike} chose the values that the rules of µP transferred to the target: "
        f"{counted(run.record.study)}; {short_count(spent)} tokens in all."
    )


def _target(run: Run) -> str:
    model, training = run.config.get("model") or {}, run.config.get("training") or {}
    if run.target is None or not model:
        return ""
    parameters = ""
    if run.explanation is not None:
        total = sum(math.prod(parameter["global_shape"]) for parameter in run.explanation["parameters"])
        parameters = f" of {short_count(total)} parameters"
    sizes = f"{model.get('num_layers')} layers, hidden size {model.get('hidden_size')}"
    tokens = run.target.last * (training.get("global_batch_size") or 0) * (training.get("seq_length") or 0)
    reached = f"reached {run.target.result} (nats per token)" if run.target.evaluations else "trained"
    forecast = "nothing had forecast it" if run.predicted is None else f"a ladder had told {in_words(run.predicted)}"
    told = [forecast] if run.target.evaluations else []
    return (
        f"Trained: a {model.get('architecture')} target{parameters} ({sizes}) {reached} in {run.target.last} steps, "
        f"{'; '.join([f'{short_count(tokens)} tokens', *told, *ended_lower(run)])}."
    )


def _check(run: Run) -> str:
    """What may be wrong with the choice."""
    if run.record is None:
        return ""
    found = to_check(run.record.study, extrapolated_of(run))
    return f"To check: {'; '.join(found)}." if found else "To check: nothing of the search stands out."


def made(run: Run) -> str:
    """When the run was tuned and its page made, and with what, in a sentence."""
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    created = run.record.created[:10] if run.record is not None else ""
    tuned = f"tuned on {created}; " if created else ""
    today = datetime.datetime.now(datetime.UTC).date()
    return f"{tuned}page of {today}; {versions}".strip("; ").capitalize() + "."
