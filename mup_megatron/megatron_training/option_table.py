"""Options of megatron.training's parser, 0.16.1 to 0.19, that µP refuses, or that the config has.

Public names: `Rule`, `OPTIONS` (rules by an option's first name, without its dashes), `rules_of`, `exists`,
`as_markdown`. Fields of configs that are no option's: field_table.py.

The names stand in refused_options.py and translated_options.py. An option is known by what a user types, for its
destination has other names in other versions. What is in no table is taken and told, and the audit of the run's first
step judges what it did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from mup_megatron.megatron_training.refused_options import CUDA_ONLY, EXPLAINED, IMPOSSIBLE, UNSUPPORTED
from mup_megatron.megatron_training.translated_options import TRANSLATED

Kind = Literal["impossible", "unsupported", "cuda", "translated"]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What a value other than the default means.

    Args:
        kind: `impossible` under µP, or not yet `unsupported`: both are refused; `cuda`, taken where there is CUDA;
            `translated` into a section of the config.
        why: the reason, or the section.
        taken: values beside the default that are not refused.
        explained: whether `--mup-explain` takes it, for it changes no row of the table, although a run refuses it.
        versions: PEP 440 specifiers of the megatron-core that has it; empty is all.
    """

    kind: Kind
    why: str
    taken: tuple[str, ...] = ()
    explained: bool = False
    versions: str = ""

    @property
    def is_refused(self) -> bool:
        """Whether no machine takes it."""
        return self.kind in ("impossible", "unsupported")


# Versions of refused and translated options that not all of 0.16.1 to 0.19 have.
_VERSIONS: tuple[tuple[str, str], ...] = (
    ("hybrid-attention-ratio hybrid-mlp-ratio moe-use-legacy-grouped-gemm", "<0.17"),
    ("use-legacy-models", "<0.18"),
    (
        "hybrid-layer-pattern mtp-hybrid-override-pattern mla-down-proj-fusion fused-residual-rmsnorm "
        "mtp-use-repeated-layer moe-router-force-biased optimizer-cuda-graph use-mup muon-scalar-optimizer "
        "mup-width-mult mup-base-hidden-size mup-embedding-mult mup-output-mult mup-base-head-dim mup-attn-scale-power",
        ">=0.17",
    ),
    (
        "use-transformer-engine-op-fuser use-grouped-gemm-for-dense-mlp moe-single-grouped-weight "
        "moe-single-grouped-bias moe-mlp-glu-interleave-size overlap-dispatch-backward-with-experts-wgrad "
        "moe-paged-stash moe-expert-rank-capacity-factor no-pad-vocab-size fp8-output-proj",
        ">=0.18",
    ),
    (
        "use-grouped-gemm-for-shared-expert mtp-detach-heads moe-router-quantile-balancing-ema "
        "moe-shared-expert-glu-interleave-size freeze-all-layers tensor-parallel-num-weight-shards "
        "expert-tensor-parallel-num-weight-shards logits-load-dir yarn-original-max-position-embeddings "
        "yarn-beta-fast yarn-beta-slow no-yarn-correction-range-round-to-int dsa-indexer-topk-freq",
        ">=0.19",
    ),
)


def rules_of(
    tables: Mapping[Kind, Sequence[tuple[str, str] | tuple[str, str, tuple[str, ...]]]], versions: Mapping[str, str]
) -> dict[str, Rule]:
    """Rules by name.

    Args:
        tables: by kind: names, why (or the section of the config), values taken beside the default.
        versions: PEP 440 specifiers, by name, where not every version has it.
    """
    rules: dict[str, Rule] = {}
    for kind, entries in tables.items():
        for names, why, *taken in entries:
            for name in names.split():
                if name in rules:
                    raise ValueError(f"{name} is in the table twice")
                values = tuple(taken[0]) if taken else ()
                rules[name] = Rule(
                    kind=kind,
                    why=why,
                    taken=values,
                    explained=kind == "cuda" or name in EXPLAINED.split(),
                    versions=versions.get(name, ""),
                )
    return rules


OPTIONS = rules_of(
    {
        "impossible": IMPOSSIBLE,
        "unsupported": UNSUPPORTED,
        "cuda": CUDA_ONLY,
        "translated": TRANSLATED,
    },
    {name: versions for names, versions in _VERSIONS for name in names.split()},
)


def exists(rule: Rule, version: str) -> bool:
    """Whether a version of megatron-core has what the rule is about.

    Args:
        rule: of either table.
        version: as `megatron.core.__version__` says; one before a release counts as the release.
    """
    return SpecifierSet(rule.versions).contains(Version(version).base_version)


def as_markdown() -> str:
    """The options as tables, refused ones first: what docs/reports/megatron-options.md holds."""
    lines = ["| impossible | why, and what to do instead |", "| --- | --- |"]
    lines += [f"| {_spelled(names)} | {why} |" for names, why in IMPOSSIBLE]
    lines += ["", "| not supported | why |", "| --- | --- |"]
    for names, why, taken in UNSUPPORTED:
        values = f"; taken: the default, {', '.join(f'`{value}`' for value in taken)}" if taken else ""
        words, explained_too = names.split(), EXPLAINED.split()
        taken_too = [name for name in words if name in explained_too]
        for part in ([name for name in words if name not in explained_too], taken_too):
            if part:
                explained = "; `--mup-explain` takes it, for no row changes" if part is taken_too else ""
                lines.append(f"| {_spelled(' '.join(part))} | {why}{values}{explained} |")
    lines += ["", "| CUDA only | why the rules hold there |", "| --- | --- |"]
    lines += [f"| {_spelled(names)} | {why} |" for names, why in CUDA_ONLY]
    lines += ["", "| translated | into |", "| --- | --- |"]
    lines += [f"| {_spelled(names)} | `{section}:` |" for names, section in TRANSLATED]
    return "\n".join(lines) + "\n"


def _spelled(names: str) -> str:
    return " ".join(f"`--{name}`" for name in names.split())


if __name__ == "__main__":
    print(as_markdown(), end="")
