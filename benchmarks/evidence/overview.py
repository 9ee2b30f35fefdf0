"""The overview's tables: every claim with its verdict, what fails first, and every record."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from benchmarks.evidence import families, forecast, growth, ladders, limit, plane, searches, wide, width
from benchmarks.evidence.records import (
    LINES,
    LOWER,
    Rows,
    asked,
    difference,
    judged_from,
    lacks,
    line_verdict,
    record,
    records,
    seeds,
    steps,
    verdict,
)
from benchmarks.quality import TWICE
from benchmarks.translation import OWN, TUNED


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What somebody claims, and the record that speaks of it.

    Args:
        what: is claimed.
        whose: the claim is.
        page: of the figure, with an anchor where it has several.
        path: of the record.
        line: a parametrization of the record that is not the judged one; its own verdict counts.
        said: words the verdict of a record that has none.
    """

    what: str
    whose: str
    page: str
    path: str
    line: str | None = None
    said: Callable[[], str] | None = None

    @property
    def verdict(self) -> str:
        """In words."""
        found = record(self.path)
        if self.said is not None:
            return self.said()
        return verdict(found) if self.line is None else line_verdict(found["lines"][self.line])


_PAPER = "Tensor Programs V"


def _cheaper(path: str, goals: tuple[float, float]) -> str:
    """Whether random search on the proxy stays within a goal for less than on the target, at each of two goals."""
    said = []
    for goal in goals:
        names = ("random", "random, on the target")
        proxy, target = (searches.stays_within(path, name, goal / 100) for name in names)
        cheaper = proxy is not None and target is not None and proxy < target
        costs = " against ".join("never" if each is None else f"{each:.0f} runs" for each in (proxy, target))
        said.append(f"{'holds' if cheaper else 'fails'} within {goal:g} % ({costs})")
    word = "failed" if any(each.startswith("fails") for each in said) else "passed"
    return f"**{word}**: {', '.join(said)}; the target's loss ended the searches"


def _as_low(path: str) -> str:
    """Whether TPE with halving on the proxy ends as low as random search on the target."""
    proxy, target = (searches.ends(path, name) for name in ("TPE, halving", "random, on the target"))
    said = "failed" if proxy > target else "passed"
    return f"**{said}**: {100 * proxy:.2f} % above the best there is, against {100 * target:.2f} %"


def _published() -> str:
    """How many powers that others publish come within the ladder's bound at its largest rung, and how far off the rest.

    Having no rule is none of them.
    """
    found = record(ladders.RATE)
    bound = found["bounds"]["octaves"]
    off = {name: each["octaves"] for name, each in ladders.of_others(found).items() if name != "no rule"}
    near = [f"{name} by {octaves:+.2f}" for name, octaves in off.items() if abs(octaves) <= bound]
    far = [octaves for octaves in off.values() if abs(octaves) > bound]
    word = "failed" if len(near) <= len(far) else "passed"
    named = f" ({', '.join(near)})" if near else ""
    return (
        f"**{word}**: {len(near)} of {len(off)} come within {bound:g} octaves at the largest rung{named}, "
        f"the others are off by {min(far):+.2f} to {max(far):+.2f}"
    )


def _kept_against_tuned() -> str:
    """What µP's kept rate gives at the largest width, and the best of all rates there in the standard one."""
    found = record(width.MAIN)
    small, large = (found["lines"]["mup"]["rows"][at] for at in (0, -1))
    kept = large["losses"][found["values"].index(small["minimum"]["tried"])]
    tuned = width.ends(width.MAIN)["standard"]
    apart = difference(kept, tuned)
    return (
        f"**{LOWER[apart.sign]}**: {statistics.fmean(kept):.2f} nats against {statistics.fmean(tuned):.2f} ({apart}), "
        f"the best of {len(found['values'])} rates there (the rate alone was tuned)"
    )


def _per_tensor(path: str) -> str:
    """Which ends lower at the largest width, each at its best tried rate."""
    at_end = width.ends(path)
    means = [statistics.fmean(at_end[name]) for name in ("mup", "one_ratio")]
    found = difference(at_end["mup"], at_end["one_ratio"])
    return f"**{LOWER[found.sign]}**: {means[0]:.2f} nats against {means[1]:.2f} ({found}), each at its best rate"


def _ends_lower(one: str, other: str) -> str:
    """Whether a model of figure 6 ends lower than another."""
    found = searches.compared(one, other)
    return f"**{LOWER[found.sign]}**: {found} bits per byte"


def _translates_better(other: str) -> str:
    """Whether the proxy's values end with more BLEU than another model."""
    found = searches.in_bleu(other)
    return f"**{LOWER[-found.sign]}**: {found} BLEU"


def _same_order() -> str:
    told = searches.said_of_reverse().split(",")[0]
    return f"none: a measurement. {told}"


CLAIMS = (
    Claim(what="The best rate of hidden size 256 is that of 2,048", whose=f"{_PAPER}, figure 1", page="wide.md",
          path=wide.RATES),
    Claim(what="The best rate of hidden size 256 is that of 4,096", whose=f"{_PAPER}, figure 1", page="wide.md",
          path=wide.FARTHEST),
    *(Claim(what=f"{what}, tuned at 2,048, ends lower than µP", whose=whose, page="wide.md#against-rivals",
            path=path, said=partial(wide.ends_lower, name))
      for name, path, what, whose in (
          ("standard", wide.RIVALS, "One initial deviation", "Megatron's defaults"),
          ("fan_in", wide.RIVALS, "1/sqrt(fan-in)", "torch's defaults"),
          ("per_layer", wide.PER_LAYER, "1/sqrt(fan-in) with a rate per layer", "Everett et al."))),
    Claim(what="One rate serves every width with a rate per layer", whose="Everett et al.",
          page="wide.md#against-rivals", path=wide.PER_LAYER),
    *(Claim(what=f"A proxy's values in µP end lower than a search of hidden size {size} (\"µP transfers but loses\")",
            whose="nanochat issue 644, mamba.py issue 48", page="wide.md#against-a-search-of-the-target",
            path=path, said=partial(wide.transfers_and_loses, path))
      for size, path in (("1,024", wide.DIRECT), ("512", wide.DIRECT_128))),
    Claim(what="The best rate of hidden size 128 is that of 1,024", whose=f"{_PAPER}, figure 1", page="width.md",
          path=width.ENGLISH),
    Claim(what="The same, where the embedding has a rate of its own", whose="this project", page="width.md",
          path=width.APART),
    Claim(what="128 to 1,024 tell the loss and the best rate of 2,048", whose="this project, before its runs",
          page="forecast.md", path=forecast.AFTER, said=forecast.verdict),
    Claim(what="The same from 512 to 2,048", whose="this project", page="forecast.md", path=forecast.AFTER),
    Claim(what="The best rate of hidden size 32 is that of 256", whose=f"{_PAPER}, figure 1", page="width.md",
          path="stability-lr-width/lr-width.json"),
    Claim(what="The best rate of hidden size 64 is that of 512", whose=f"{_PAPER}, figure 1",
          page="width.md#to-hidden-size-512", path="stability-lr-width-512/lr-width.json"),
    Claim(what="One rate serves every width with 1/sqrt(fan-in) initial values", whose="torch's defaults",
          page="width.md#against-a-fair-baseline", path="stability-fan-in/lr-width.json", line="fan_in"),
    Claim(what="One rate serves every width with one initial deviation", whose="Megatron's defaults",
          page="width.md#against-a-fair-baseline", path="stability-fan-in/lr-width.json", line="standard"),
    Claim(what="No point between standard and µP ends lower at 512 with the rate of 64",
          whose="the µTransfer blog post", page="plane.md", path=plane.PATH, said=plane.verdict),
    Claim(what="µP at a kept rate ends lower than the standard one tuned at the target (\"µP transfers but loses\")",
          whose="nanochat issue 644, mamba.py issue 48", page="width.md#against-a-fair-baseline", path=width.MAIN,
          said=_kept_against_tuned),
    Claim(what="The best rate stays over width, for BERT", whose=_PAPER, page="bert.md", path="bert/lr-width.json"),
    Claim(what="The best rate stays over width, for an MLP", whose=f"{_PAPER}, figure 2", page="images.md",
          path="images/mlp.json"),
    Claim(what="The best rate stays over width, for a ResNet that learns its pictures by heart", whose=_PAPER,
          page="images.md", path="images/resnet.json"),
    Claim(what="The best rate stays over width, for a ResNet that sees hardly a picture twice", whose=_PAPER,
          page="images.md", path="images/resnet-fashion.json"),
    Claim(what="The best output multiplier stays over width", whose=f"{_PAPER}, table 2", page="multipliers.md",
          path="stability-width/output_multiplier-width.json"),
    Claim(what="The best initial deviation stays over width", whose=f"{_PAPER}, table 2", page="multipliers.md",
          path="stability-width/init_method_std-width.json"),
    Claim(what="The best rate stays where KV heads are fixed", whose="this project", page="mixed-growth.md",
          path="mixed-growth/kv-output_like.json"),
    Claim(what="The best rate stays where the FFN is fixed", whose="this project", page="mixed-growth.md",
          path="mixed-growth/ffn-hidden_like.json"),
    *(Claim(what=f"A ratio per tensor ends lower than one ratio, the FFN fixed (`{rule}`)", whose="this project",
            page="mixed-growth.md#against-one-ratio", path=path, said=partial(_per_tensor, path))
      for rule, path in width.ONE_RATIO.items()),
    *(Claim(what=f"A ratio per tensor ends lower than one ratio on natural text from 128, {what}",
            whose="this project", page="mixed-growth.md#against-one-ratio", path=path, said=partial(_per_tensor, path))
      for what, path in width.ONE_RATIO_128.items()),
    *(Claim(what=f"The best {what} stays over width on natural text, from 128", whose=f"{_PAPER}, table 2",
            page="multipliers.md", path=path)
      for what, path in width.FROM_128.items()),
    Claim(what="The best schedule stays over width on natural text, from 128", whose=f"{_PAPER}, table 2",
          page="multipliers.md#schedules-from-hidden-size-128", path=width.SCHEDULES),
    *(Claim(what=f"The best rate stays over {what} at width 128 on natural text", whose=f"{_PAPER}, table 1",
            page="ladder.md#one-at-a-time-at-hidden-size-128-on-natural-text", path=path)
      for what, path in growth.ONE_AT_A_TIME.items()),
    Claim(what="The best rate stays from 2 to 32 layers at width 256", whose="CompleteP (Dey et al.)", page="depth.md",
          path="stability-depth/256-completep.json"),
    Claim(what="The best rate stays from 2 to 32 layers at width 256", whose="Depth-µP (Tensor Programs VI)",
          page="depth.md", path="stability-depth/256-depth_mup.json"),
    *(Claim(what="The best rate stays from 2 to 32 layers at width 256, rates half an octave apart", whose=whose,
            page="depth.md", path=growth.HALF_AN_OCTAVE[rule])
      for rule, whose in (("completep", "CompleteP (Dey et al.)"), ("depth_mup", "Depth-µP (Tensor Programs VI)"))),
    Claim(what="A rule over depth is needed (2 to 16 layers at width 32)", whose="Tensor Programs VI, CompleteP",
          page="depth.md", path="stability-depth/none.json",
          said=lambda: f"not shown: without a rule the rate **{_word('stability-depth/none.json')}** too"),
    Claim(what="The best rate stays over the number of experts, half of them used", whose="this project",
          page="experts.md", path="experts/fixed_share.json"),
    Claim(what="The best rate stays over the number of experts, 2 of them used", whose="this project",
          page="experts.md", path="experts/any_share.json"),
    *(Claim(what=f"{name}'s best rate stays over width", whose="this project",
            page="optimizers.md#from-hidden-size-64", path=f"optimizers/{name.lower()}-64.json")
      for name in ("Muon", "Lion", "SOAP")),
    Claim(what="Muon's best 1 - momentum stays over width", whose=f"{_PAPER}, table 2",
          page="optimizers.md#muons-momentum", path="optimizers/muon-momentum.json"),
    Claim(what="The best decay stays over width in fresh text (`independent`)", whose="Wang & Aitchison",
          page="weight-decay.md", path="stability-decay/independent.json"),
    Claim(what="The best decay stays over width in repeated text (`independent`)", whose="Wang & Aitchison",
          page="weight-decay.md#where-text-is-repeated", path="decay-epochs/independent.json"),
    Claim(what="The best decay falls as 1/steps (`timescale`)", whose="Wang & Aitchison",
          page="weight-decay.md#over-tokens", path="decay-epochs/tokens-timescale.json"),
    Claim(what="Without trained gains the best rate stays", whose="Lingle", page="norm-gains.md",
          path="norm-gains/lr-width.json"),
    Claim(what="The best rate stays under the plain norm's clipping", whose="common use", page="clipping.md",
          path="clip-norm/global.json"),
    Claim(what="The best rate stays under the invariant norm's clipping", whose="this project", page="clipping.md",
          path="clip-norm/invariant.json"),
    *(Claim(what=f"The best rate stays with {what} positions", whose="this project", page="positions.md",
            path=width.POSITIONS[kind])
      for kind, what in {"absolute": "learned", "relative": "relative"}.items()),
    *(Claim(what=f"Transferred values end lower than {what}", whose=f"{_PAPER}, figure 6", page="quality.md",
            path=searches.QUALITY, said=partial(_ends_lower, *models))
      for what, models in {
          "GPT-3's, which are not tuned": ("transferred", "defaults"),
          "a rate tuned on the target": ("transferred", "tuned"),
          "a rate tuned on the target, both of twice the parameters":
              (f"transferred{TWICE}", f"tuned{TWICE}"),
          "a rate tuned on twice the parameters": ("transferred", f"tuned{TWICE}")}.items()),
    Claim(what="Tuning a proxy is cheaper than tuning the target, on translation", whose=f"{_PAPER}, figure 5",
          page="translation.md", path=searches.TRANSLATION,
          said=partial(_cheaper, searches.TRANSLATION, (5, 1))),
    *(Claim(what=f"A proxy's values translate better than {what}", whose=f"{_PAPER}, figure 5",
            page="translation.md#bleu-after-longer-runs", path=searches.BLEU, said=partial(_translates_better, model))
      for what, model in {"a standard parametrization tuned on the target": TUNED, "the target's own": OWN}.items()),
    Claim(what="Tuning a proxy is cheaper than tuning the target, on code", whose=f"{_PAPER}, figure 5",
          page="tuning-cost.md#against-tuning-the-target-directly", path=searches.TARGET,
          said=partial(_cheaper, searches.TARGET, (1.1, 0.5))),
    Claim(what="TPE with halving on a proxy is cheaper than on a target whose runs cost sixteen times as much",
          whose=f"{_PAPER}, figure 5", page="tuning-cost.md#a-target-of-sixteen-times-the-cost", path=families.SIXTEEN,
          said=families.cheaper_by_the_proxy),
    Claim(what="TPE with halving on a proxy ends as low as random search on the target, on translation",
          whose="this project's configs", page="translation.md", path=searches.TRANSLATION,
          said=partial(_as_low, searches.TRANSLATION)),
    Claim(what="TPE with halving on a proxy ends as low as random search on the target, on code",
          whose="this project's configs", page="tuning-cost.md#against-tuning-the-target-directly",
          path=searches.TARGET, said=partial(_as_low, searches.TARGET)),
    Claim(what="In µP alone do features move at infinite width, and have a limit", whose="Tensor Programs IV",
          page="limit.md", path=limit.PATH, said=limit.only_mup),
    Claim(what="A rate that is too high for a large model is too high for the reversed one",
          whose=f"{_PAPER}, appendix I", page="reverse.md", path="reverse/reverse.json", said=_same_order),
    Claim(what="A fitted law tells rate and loss of a larger rung", whose="this project", page="ladder.md",
          path="ladder/ladder.json"),
    Claim(what="A fitted law tells the best 1 - β2 over batch and tokens", whose="this project",
          page="ladder.md#adams-second-beta-apart", path=ladders.BETA),
    Claim(what="Published powers of batch and tokens tell the rate", whose="others", page="ladder.md",
          path="ladder/ladder.json", said=_published),
    *(Claim(what=f"Outputs, gradients and updates keep their size over width ({name})",
            whose=_PAPER, page="coordinates.md", path=f"coord-check-{folder}/mup.json")
      for folder, name in {"gpt3": "GPT-3 style", "llama": "fixed KV heads", "moe": "eight experts",
                           "mla": "latent attention", "t5": "encoder and decoder", "bert": "BERT"}.items()),
    Claim(what="They keep their size over the number of experts, half of them used", whose="this project",
          page="experts.md#every-module-over-4-to-32-experts", path="coord-check-experts/mup.json"),
    Claim(what="They keep their size over the number of experts, 2 of them used", whose="this project",
          page="experts.md#every-module-over-4-to-32-experts", path="coord-check-experts-any/mup.json"),
    Claim(what="They keep their size with 1/sqrt(fan-in) initial values and one rate", whose="torch's defaults",
          page="coordinates.md#beside-1sqrtfan-in-from-hidden-size-128", path="coord-check-fan-in/fan_in.json"),
    Claim(what="They keep their size at unit scale", whose="u-µP (Blake et al.)", page="ranges.md",
          path="ranges/unit.json"),
)  # fmt: skip


def _word(path: str) -> str:
    return "stays" if record(path)["passed"] else "moves"


def claims() -> Rows:
    """Every claim: what fails first, then what is undecided, what has no verdict, and what passes."""
    rows = [["claim", "whose", "figure", "verdict", "setting", "seeds"]]
    order = ("**failed**", "**undecided**", "n", "**passed**")
    found = [(claim, claim.verdict) for claim in CLAIMS]
    for claim, said in sorted(
        found, key=lambda pair: next(at for at, start in enumerate(order) if pair[1].startswith(start))
    ):
        held = record(claim.path)
        long = f", {steps(held)} steps" if steps(held) else ""
        figure = f"[{claim.page.partition('.')[0]}]({claim.page})"
        rows.append([claim.what, claim.whose, figure, said, f"{asked(held)}{long}", seeds(held)])
    return rows


def every_record() -> Rows:
    """Every record: what was asked, how often, from which size it is judged, the command's verdict, what it lacks."""
    columns = ["record", "asked", "of", "steps", "seeds", "judged from", "verdict of the command", "provenance"]
    rows = [columns]
    for path, found in records():
        of = LINES.get(found.get("judged", ""), found.get("judged", "")).replace("mup", "µP")
        if "runs" in found or "rungs" in found:
            of = "µP"
        start = str(judged_from(found)) if "lines" in found else ""
        link = f"[{path.removesuffix('.json')}]({path})"
        rows.append([link, asked(found), of, steps(found), seeds(found), start, verdict(found), lacks(found)])
    return rows


def verdicts() -> str:
    """How many records passed, and how many tell where they come from."""
    found = [each for _, each in records()]
    said = [verdict(each) for each in found]
    count = {word: sum(each.startswith(f"**{word}**") for each in said) for word in ("failed", "undecided", "passed")}
    whole = sum(not lacks(each) for each in found)
    return (
        f"Of {len(found)} records {count['failed']} failed, {count['undecided']} are undecided, {count['passed']} "
        f"passed, and {len(found) - sum(count.values())} have no verdict. {whole} of them tell all of their "
        "provenance."
    )
