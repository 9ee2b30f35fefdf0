"""The parametrization as one table of pure functions: numbers in, numbers out.

    m_in, m_out   size / base size of fan-in and fan-out (1 where fixed), global sizes
    A             width-dependent part of the forward multiplier that the layer applies (1 unless stated)
    g             whether the tensor is output-like: its fan-in grows and its fan-out is fixed

| quantity                               | multiplier on the base value       | function             | source         |
| -------------------------------------- | ---------------------------------- | -------------------- | -------------- |
| init standard deviation                | (1/A) m_in^-1/2, with g (1/A)/m_in | `init_std`           | TP V, table 8  |
| learning rate, Adam, AdamW, Lion       | 1 / (A m_in)                       | `learning_rate`      | TP V, table 8  |
| learning rate, SGD                     | m_out / (A² m_in)                  | `learning_rate`      | TP V, table 8  |
| learning rate, Muon, SOAP              | (m_out/m_in)^1/2 / A               | `learning_rate`      | 2310.17813     |
| Adam's epsilon (added to sqrt(v))      | A / m_out                          | `epsilon`            | 2407.05872     |
| SOAP's epsilon, in its eigenbasis      | A (m_in/m_out)^1/2                 | `basis_epsilon`      | derived        |
| decoupled weight decay, by its rule    | (rate's multiplier)^-p             | `weight_decay`       | 2405.13698     |
| weight in the invariant gradient norm  | m_out / (A² m_in)                  | `gradient_norm`      | derived        |
| all of Adam's, over batch and tokens   | powers of their ratios             | `horizon_factors`    | 2205.10287     |
| experts and router, more experts       | m_out counts all experts' rows     | `of_experts`         | 2601.20205     |
| readout's output, A                    | 1 / m_in                           | `readout_multiplier` | TP V, table 8  |
| attention logits                       | sqrt(d_base) / d                   | `softmax_scale`      | TP V, def. 4.1 |
| over depth: branches, rate and epsilon | m_L^-α, m_L^(α-1), m_L^-α          | `depth_factors`      | 2505.01618     |
| `ntk`: logits and epsilon, rate        | m^1/2, m^-1/2 (SGD 1/m)            | `kernel_factors`     | 2308.01814     |

p is 1, 1/2, 0 for a decay that is `independent`, `sqrt`, `coupled`. TP V: Tensor Programs V; numbers are arXiv's.

Sources: Tensor Programs V (arXiv 2203.03466), Table 8 and appendices B and D; the spectral condition (2310.17813) for
Muon; Qiu et al. (2512.05620) for SOAP; Everett et al. (2407.05872) for epsilon; Wang & Aitchison (2405.13698) for
weight decay; CompleteP (2505.01618) for depth; Malladi et al. (2205.10287) for batch; Bjorck et al. (2409.19913) for
tokens; Jiang et al. (2601.20205) for experts; Yang & Littwin (2308.01814) for ntk.

Ratios are exact fractions, so that equal multipliers are equal to the last bit and a model at its base shape is
Megatron's own. This module imports neither torch, nor megatron-core, nor DeepSpeed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Literal

UpdateRule = Literal["adam", "sgd", "muon", "lion", "soap"]
"""How an optimizer's update scales with the gradient. Lion's, a sign, scales as Adam's and has no epsilon; SOAP's has
the spectral norm of Muon's, and an epsilon."""

HAS_EPSILON: tuple[UpdateRule, ...] = ("adam", "soap")
OF_MATRICES: tuple[UpdateRule, ...] = ("muon", "lion", "soap")
"""Rules that step matrices while AdamW steps the rest (Lion's under one engine)."""

ONE = Fraction(1)


def readout_multiplier(m_in: Fraction) -> Fraction:
    """A of the readout, 1/m_in: Table 8's form, which also serves a head tied to the embedding."""
    return 1 / m_in


@dataclass(frozen=True, kw_only=True)
class Ratios:
    """What the rules see of one tensor.

    Args:
        m_in: ratio of the fan-in.
        m_outs: ratio of the fan-out of each block; {None: ratio} for a tensor that is one block.
        readout: whether the layer multiplies the tensor's output with A < 1.
        folded: factor that the values hold in the forward pass's stead. By abc-symmetry (docs/parametrization.md,
            section 7) a tensor that is f times as large, with A/f in the place of A, is the same function and trains
            the same.
    """

    m_in: Fraction = ONE
    m_outs: Mapping[str | None, Fraction] = field(default_factory=lambda: {None: ONE})
    readout: bool = False
    folded: Fraction = ONE

    @property
    def m_out(self) -> Fraction:
        """The largest of the blocks' ratios, which decides what the blocks have in common (`epsilon`)."""
        return max(self.m_outs.values())

    @property
    def forward(self) -> Fraction:
        """A. The library works A out here and nowhere else, except for the verdict of the coordinate check."""
        return (readout_multiplier(self.m_in) if self.readout else ONE) / self.folded


def of_experts(ratios: Ratios, m_experts: Fraction) -> Ratios:
    """Ratios of one expert's tensor, or of the router's, where the number of experts grows.

    With k of E experts per token, and weights of the sum of k outputs that add up to a constant, an expert gets k/E of
    the tokens and 1/k of each token's gradient. So does a row of the router. The gradient falls as 1/E, whatever k
    does, as it would if all experts were one matrix with E times the rows. So the fan-out counts all of them. It
    decides Adam's epsilon, SGD's rate and the weight in the gradient norm. Adam's rate and initial values do not see
    it (in Table 1 of Jiang et al., 2601.20205, neither depends on E).

    Args:
        ratios: of the tensor, in which the number of experts has no part.
        m_experts: experts / base experts.
    """
    return replace(ratios, m_outs={block: m_out * m_experts for block, m_out in ratios.m_outs.items()})


def is_output_like(
    fan_in_grows: bool, fan_out_grows: bool, fixed_fan_out: Literal["output_like", "hidden_like"]
) -> bool:
    """Whether init takes the extra factor g = m_in^-1/2.

    Args:
        fan_in_grows: whether the fan-in is declared to grow (whatever its ratio is here).
        fan_out_grows: whether the fan-out is.
        fixed_fan_out: the rule for a growing fan-in with a fixed fan-out; `hidden_like` means g = 1.
    """
    return fan_in_grows and not fan_out_grows and fixed_fan_out == "output_like"


def init_std(*, m_in: Fraction, forward: Fraction = ONE, output_like: bool = False) -> float:
    """Multiplier of the init standard deviation: (1/A) m_in^-1/2 g."""
    return float(1 / (forward * m_in)) if output_like else float(1 / forward) / math.sqrt(m_in)


def learning_rate(rule: UpdateRule, *, m_in: Fraction, m_out: Fraction, forward: Fraction = ONE) -> Fraction | float:
    """Multiplier of the learning rate.

    For Muon, the update is taken to have unit spectral norm; what an implementation's scale mode applies already is
    the caller's to divide out. SOAP's update has a spectral norm that width has no part in (docs/parametrization.md).
    """
    if rule in ("adam", "lion"):
        return 1 / (forward * m_in)
    if rule == "sgd":
        return m_out / (forward**2 * m_in)
    return math.sqrt(m_out / m_in) / float(forward)


def epsilon(*, m_out: Fraction, forward: Fraction = ONE) -> Fraction:
    """Multiplier of Adam's epsilon: A / m_out, how the gradient of one coordinate scales.

    For a fused tensor take `m_out` as the largest of its blocks: one number serves all, and the smallest epsilon is
    the one that nowhere exceeds the gradient.
    """
    return forward / m_out


def basis_epsilon(*, m_in: Fraction, m_out: Fraction, forward: Fraction = ONE) -> Fraction | float:
    """Multiplier of SOAP's epsilon: A (m_in/m_out)^1/2, how a singular value of the gradient scales.

    SOAP compares epsilon with the gradient in the basis of its own singular vectors. A gradient of few tokens has few
    coordinates there, each as large as a singular value.
    """
    return forward if m_in == m_out else float(forward) * math.sqrt(m_in / m_out)


def weight_decay(
    rule: Literal["independent", "sqrt", "coupled", "timescale"], lr_multiplier: Fraction | float
) -> Fraction | float:
    """Multiplier of decoupled weight decay over width: (1 / multiplier of the rate)^p.

    `independent` and `timescale` (p = 1) keep lr·λ where it was, `coupled` (p = 0) keeps λ, `sqrt` (p = 1/2) lies
    between them (Fan et al., 2510.15262). What `timescale` does over batch and tokens is `horizon_factors`'s.
    """
    if rule == "sqrt":
        return ONE if lr_multiplier == 1 else 1 / math.sqrt(lr_multiplier)
    return ONE if rule == "coupled" else 1 / lr_multiplier


def gradient_norm(*, m_in: Fraction, m_out: Fraction, forward: Fraction = ONE) -> Fraction:
    """Weight of |grad|² in the invariant gradient norm (docs/parametrization.md, section 6)."""
    return m_out / (forward**2 * m_in)


def softmax_scale(
    head_size: int, base_head_size: int, attention_multiplier: float = 1.0, yarn_mscale: float = 1.0
) -> float:
    """Scale of attention logits: α · mscale²/sqrt(d) · sqrt(d_base/d), which is 1/d in d (TP V, definition 4.1).

    Computed in this order, so that it is bit for bit megatron-core's mscale²/sqrt(d) where d = d_base and α = 1.

    Args:
        head_size: d, of queries and keys.
        base_head_size: d of the base model.
        attention_multiplier: α.
        yarn_mscale: of multi-latent attention under YaRN (`yarn_mscale`), 1 elsewhere.
    """
    scale = yarn_mscale * yarn_mscale / math.sqrt(head_size)
    return attention_multiplier * scale * math.sqrt(base_head_size / head_size)


def yarn_mscale(scaling_factor: float, mscale_all_dim: float) -> float:
    """YaRN's magnitude factor (arXiv 2309.00071, section 3.4), as megatron-core's MLA takes it."""
    return 1.0 if scaling_factor <= 1 else 0.1 * mscale_all_dim * math.log(scaling_factor) + 1.0


@dataclass(frozen=True, kw_only=True)
class DepthFactors:
    """Extra factors inside the transformer blocks; all 1 outside them, and where the depth rule is off.

    Args:
        branch: on each residual branch's output.
        lr: on the learning rate.
        eps: on Adam's epsilon.
    """

    branch: float = 1.0
    lr: float = 1.0
    eps: float = 1.0


def depth_factors(rule: UpdateRule, m_layers: Fraction, exponent: float | None) -> DepthFactors:
    """Factors of the depth rule (docs/parametrization.md, section 5).

    Args:
        rule: how the optimizer's update scales.
        m_layers: layers / base layers.
        exponent: α in [1/2, 1]; 1 is CompleteP, 1/2 Depth-µP, None is off.
    """
    if exponent is None:
        return DepthFactors()
    m = float(m_layers)
    lr = m ** (2 * exponent - 1) if rule == "sgd" else m ** (exponent - 1)
    return DepthFactors(branch=m**-exponent, lr=lr, eps=m**-exponent)


@dataclass(frozen=True, kw_only=True)
class KernelFactors:
    """What makes µP the neural tangent parametrization; both 1 in µP.

    Args:
        readout: on the logits. All gradients grow by it, so it is on Adam's epsilon too.
        lr: on the learning rate.
    """

    readout: float = 1.0
    lr: float = 1.0


def kernel_factors(rule: UpdateRule, m: Fraction) -> KernelFactors:
    """Factors of `ntk` (docs/parametrization.md, section 8).

    The logits of µP are made m^1/2 larger, so that they start at one size for all widths. Features may then move by
    m^-1/2 alone, or logits would move by more than a constant. Adam's hidden rate becomes m^-3/2, the others m^-1/2:
    the adaptive form of the neural tangent parametrization (Tensor Programs IVb, 2308.01814, section 2). SGD's gradient
    is m^1/2 larger already, so that its rate takes 1/m.

    Args:
        rule: how the optimizer's update scales.
        m: ratio of the readout's fan-in.
    """
    return KernelFactors(readout=math.sqrt(m), lr=1 / float(m) if rule == "sgd" else 1 / math.sqrt(m))


BatchRule = Literal["sqrt_sde", "complete_d"]
"""Rules over batch, and tokens, that move more than the rate."""


@dataclass(frozen=True, kw_only=True)
class HorizonFactors:
    """What a larger batch and a longer run make of the optimizer's numbers: one factor each, the same on every tensor.

    Args:
        lr: on the learning rate.
        eps: on Adam's epsilon.
        weight_decay: on the decoupled decay.
        forgetting: on 1 - beta, of both of Adam's betas.
    """

    lr: float = 1.0
    eps: float = 1.0
    weight_decay: float = 1.0
    forgetting: float = 1.0


def horizon_factors(
    *,
    m_batch: Fraction,
    m_tokens: Fraction,
    batch: BatchRule | float = 0.0,
    tokens: float = 0.0,
    keeps_timescale: bool = False,
) -> HorizonFactors:
    """Factors of the rules for batch and tokens (docs/parametrization.md, section 9); all 1 at ratio 1.

    Args:
        m_batch: tokens of a step over those of a step where the values were found.
        m_tokens: tokens of the run over those of the run where the values were found.
        batch: `sqrt_sde` is the square root rule for Adam (Malladi et al., 2205.10287, definition 5.3): rate by
            m^(1/2), epsilon by m^(-1/2), 1 - beta by m. `complete_d` is Complete(d)P's (2512.22382, as two
            transcriptions have it): the same with m_batch / m_tokens, by which the root moves decay too. A number is
            the exponent of the rate alone; 0 is no rule.
        tokens: exponent of the rate; -0.32 is what Bjorck et al. measured (2409.19913, section 4).
        keeps_timescale: whether decay makes lr·λ·steps what it was (Wang & Aitchison, 2405.13698).
    """
    m, exponent = Fraction(1), 0.0
    if batch == "sqrt_sde":
        m = m_batch
    elif batch == "complete_d":
        m, keeps_timescale = m_batch / m_tokens, True  # to which decay by the root comes down
    else:
        exponent = batch
    lr = float(m) ** 0.5 * float(m_batch) ** exponent * float(m_tokens) ** tokens
    return HorizonFactors(
        lr=lr,
        eps=float(m) ** -0.5,
        weight_decay=1.0 / (lr * float(m_tokens / m_batch)) if keeps_timescale else 1.0,
        forgetting=float(m),
    )


def shared_depth_factors(rule: UpdateRule, m_layers: Fraction, exponent: float | None) -> DepthFactors:
    """Factors of the depth rule for one tensor that all layers share (a table of relative positions).

    All layers' gradients add up in it, so that its gradient is m_L times as large as one layer's own would be. Adam's
    update does not see that and keeps the rate of the blocks; epsilon and SGD's rate do.
    """
    own = depth_factors(rule, m_layers, exponent)
    if exponent is None:
        return own
    m = float(m_layers)
    return DepthFactors(branch=own.branch, lr=own.lr / m if rule == "sgd" else own.lr, eps=own.eps * m)
