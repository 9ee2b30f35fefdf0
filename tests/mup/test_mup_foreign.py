"""Layers and initial values that are not torch's own: Hugging Face's, whose init does not depend on width."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mup_megatron import mup
from mup_megatron.util.errors import UserError

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTHS = (32, 128, 512)


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers", reason="Hugging Face's transformers is not installed")


def gpt2(transformers: Any, width: int) -> Any:
    torch.manual_seed(width)
    sizes = {"n_embd": width, "n_head": width // 16, "n_layer": 2, "n_positions": 16, "vocab_size": 64}
    config = transformers.GPT2Config(**sizes, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    return transformers.GPT2Model(config).eval()


def activations(model: Any) -> float:
    """Mean absolute coordinate of what the first block's MLP puts out."""
    seen: list[torch.Tensor] = []
    model.h[0].mlp.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    with torch.no_grad():
        model(torch.arange(16)[None])
    return seen[0].abs().mean().item()


def test_hugging_faces_init_rescaled(transformers: Any) -> None:
    """Matrices are drawn with 0.02 at any width, and what an MLP puts out grows as m; rescaled, it does not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kept = {width: mup.set_base_shapes(gpt2(transformers, width), gpt2(transformers, 32)) for width in WIDTHS}
    grown = [activations(model) for model in kept.values()]
    assert grown[2] / grown[0] > 8  # not by m: the attention output moves too
    rescaled = [
        activations(mup.set_base_shapes(gpt2(transformers, width), gpt2(transformers, 32), rescale_params="constant"))
        for width in WIDTHS
    ]
    assert max(rescaled) / min(rescaled) < 1.3, rescaled
    assert rescaled[0] == pytest.approx(grown[0])  # the base itself is left alone


@pytest.mark.parametrize("base", ["values", "meta"])
def test_hugging_faces_init_is_said(transformers: Any, base: str) -> None:
    with torch.device("meta" if base == "meta" else "cpu"):
        small = gpt2(transformers, 32)
    with pytest.warns(UserWarning, match=r"initial values of h\.0\.attn\.c_attn\.weight, .* do not shrink with width"):
        mup.set_base_shapes(gpt2(transformers, 128), small)


def read_out(width: int, deviation: float | str, outputs: int = 100) -> nn.Sequential:
    """A layer of torch's own init, and a readout whose weights have this deviation, or were drawn by this rule."""
    torch.manual_seed(width)
    model = nn.Sequential(nn.Linear(width, width), mup.MuReadout(width, outputs))
    weight: Any = model[1].weight
    if isinstance(deviation, float):
        nn.init.normal_(weight, std=deviation)
    elif deviation != "torch":
        getattr(nn.init, deviation)(weight, **{"std": width**-0.5} if deviation == "normal_" else {})
    return model


HEADS: list[tuple[float | str, bool]] = [
    (0.02, True),
    (0.3, True),
    ("torch", False),
    ("zeros_", False),
    ("normal_", False),
    ("xavier_uniform_", False),
    ("kaiming_normal_", False),
]


@pytest.mark.parametrize(("deviation", "is_said"), HEADS, ids=[str(deviation) for deviation, _ in HEADS])
@pytest.mark.parametrize("base", ["values", "meta", "file"])
def test_a_readout_of_one_deviation_is_said(deviation: float | str, is_said: bool, base: str, tmp_path: Path) -> None:
    """It would be multiplied by the root of the width as torch's is. At 768 torch's own deviation is 0.0208."""
    small, larger = read_out(64, deviation), read_out(128, deviation)
    given: Any = {"values": small, "meta": small.to("meta") if base == "meta" else None, "file": tmp_path / "x.bsh"}
    if base == "file":
        mup.make_base_shapes(small, larger, tmp_path / "x.bsh")
    for width in (256, 768):
        model = read_out(width, deviation)
        with warnings.catch_warnings(record=True) as came:
            warnings.simplefilter("always")
            mup.set_base_shapes(model, given[base], delta=None if base == "file" else larger)
        said = [str(one.message) for one in came]
        assert len(said) == is_said, said
        if is_said:
            assert said[0].startswith("initial values of 1.weight do not shrink with width as torch's own do, and are")
            assert said[0].endswith("draw them again with mup_megatron.mup.init, after set_base_shapes")


def test_a_readout_of_few_values_is_not_suspected() -> None:
    """Their deviation is known to some percent only; sixteen draws of each rule, none of which is said."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for width in range(32, 64, 2):
            for deviation in ("torch", "normal_", "kaiming_normal_", "xavier_uniform_"):
                with torch.device("meta"):
                    base, larger = (read_out(size, "torch", outputs=2) for size in (8, 16))
                mup.set_base_shapes(read_out(width, deviation, outputs=2), base, delta=larger)


class Own(nn.Module):
    """Experts in one tensor of one deviation, and torch's attention, whose values shrink with width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(width)
        self.experts = nn.Parameter(0.02 * torch.randn(4, 2 * width, width))
        self.attention = nn.MultiheadAttention(width, 4)
        nn.init.normal_(self.attention.out_proj.weight, std=width**-0.5)


@pytest.mark.parametrize(
    ("rescale", "said"),
    [
        (True, r"initial values of experts do not shrink with width as torch's own do"),
        (
            "constant",
            r"initial values of attention\.in_proj_weight, attention\.out_proj\.weight shrink with width already",
        ),
    ],
)
def test_layers_of_any_kind_are_looked_at(rescale: Any, said: str) -> None:
    """Where the base has values: each tensor says by itself whether it was drawn by width."""
    with pytest.warns(UserWarning, match=said) as came:
        mup.set_base_shapes(Own(256), Own(64), rescale_params=rescale, delta=Own(128))
    assert len(came) == 1


def test_conv1d_is_read_fan_in_first(transformers: Any) -> None:
    """Fan-in 8 to 32, fan-out 16 to 32: Adam's rate over 4, SGD's times 2/4; the other way round it would be 2, 4/2."""
    conv1d = transformers.pytorch_utils.Conv1D
    models = [nn.Sequential(conv1d(out, width)) for width, out in ((32, 32), (8, 16), (16, 48))]
    mup.set_base_shapes(models[0], models[1], delta=models[2], rescale_params=False)
    layer: Any = models[0][0]
    weight = layer.weight
    assert tuple(weight.shape) == (32, 32)
    (adam, *_), (sgd, *_) = (
        [
            group["lr"]
            for group in build(models[0].parameters(), lr=1.0).param_groups
            if any(p is weight for p in group["params"])
        ]
        for build in (mup.MuAdam, mup.MuSGD)
    )
    assert (adam, sgd) == (1 / 4, 2 / 4)
    torch.manual_seed(0)
    mup.normal_(weight, std=1.0)
    assert weight.std().item() == pytest.approx(1 / 2, rel=0.05)  # m_in^-1/2
    mup.kaiming_normal_(weight, nonlinearity="linear")
    assert weight.std().item() == pytest.approx(8**-0.5 / 2, rel=0.05)  # of the base's fan-in, 8


def test_conv1d_to_a_fixed_size_is_no_readout(transformers: Any) -> None:
    conv1d = transformers.pytorch_utils.Conv1D
    models = [nn.Sequential(conv1d(4, width)) for width in (32, 8, 16)]
    with pytest.raises(
        UserError, match=r"0: its input grows with the family and its output does not, but it is no MuRe"
    ):
        mup.set_base_shapes(models[0], models[1], delta=models[2])


class Block(nn.Module):
    """Three shapes of matrices inside, as a transformer has them, drawn by `init`."""

    def __init__(self, width: int, init: Any = None) -> None:
        super().__init__()
        self.attention, self.up, self.down = (
            nn.Linear(width, width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )
        self.readout = mup.MuReadout(width, 5)
        for module in self.children():
            if init is not None:
                init(module.weight)


def small_normal(weight: torch.Tensor) -> None:
    nn.init.normal_(weight, std=0.02)


def fan_out(weight: torch.Tensor) -> None:
    nn.init.kaiming_normal_(weight, mode="fan_out")


@pytest.mark.parametrize(
    ("init", "base", "said"),
    [
        (small_normal, "values", "attention"),
        (small_normal, "meta", "attention"),
        (None, "values", ""),
        (None, "meta", ""),
        (fan_out, "values", "readout"),
        (fan_out, "meta", "readout"),
        (nn.init.xavier_normal_, "values", ""),
        (nn.init.xavier_normal_, "meta", ""),
        (nn.init.orthogonal_, "values", ""),
        (nn.init.orthogonal_, "meta", ""),
    ],
)
def test_what_looks_drawn_without_width(init: Any, base: str, said: str) -> None:
    """Every common init that shrinks with width is let be. A readout's fan-out does not grow."""
    torch.manual_seed(0)
    model = Block(128, init)
    with torch.device("meta" if base == "meta" else "cpu"):
        small = Block(32, init if base == "values" else None)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        mup.set_base_shapes(model, small)
    begins = [f"initial values of {said}"] if said else []
    assert [str(one.message)[: len(begin)] for one, begin in zip(found, begins, strict=True)] == begins


def test_rescaled_from_a_constant_by_hand() -> None:
    """m = 4: matrices inside over 2, and everything else as it was drawn; once."""
    torch.manual_seed(0)
    model = Block(128, small_normal)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    mup.set_base_shapes(model, Block(32), rescale_params="constant")
    for name, parameter in model.named_parameters():
        inside = name in ("attention.weight", "up.weight", "down.weight")
        assert torch.equal(parameter, before[name] / (2 if inside else 1)), name
    assert math.isclose(model.up.weight.std().item(), 0.01, rel_tol=0.02)
    with pytest.raises(UserError, match="its init was rescaled to µP's before"):
        mup.set_base_shapes(model, Block(32), rescale_params="constant")
    with pytest.raises(UserError, match="rescale_params: 'const'; expected True, False or 'constant'"):
        mup.set_base_shapes(Block(128), Block(32), rescale_params="const")  # type: ignore[arg-type]
