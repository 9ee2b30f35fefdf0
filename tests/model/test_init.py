"""Layout-invariant initialisation: distribution, slices, independence of chunks and names."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mup_megatron.model import init
from mup_megatron.rules.shapes import Fused, Init, TensorSpec


def spec(
    shape: tuple[int, ...], dim: int | None, stride: int = 1, fused: Fused | None = None, kind: Init = Init.WEIGHT
) -> TensorSpec:
    return TensorSpec(
        shape=shape, fan_in=1, fan_out=0, init=kind, partition_dim=dim, partition_stride=stride, fused=fused
    )


def filled(s: TensorSpec, rank: int = 0, ranks: int = 1, name: str = "w", seed: int = 1, std: dict | None = None):
    tensor = torch.empty(s.local_shape(ranks))
    init.fill(tensor, seed=seed, name=name, spec=s, std=std or {None: 0.5}, rank=rank, ranks=ranks)
    return tensor.numpy()


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("shape", [(64, 24), (1000, 1000), (8, 200_000)])
def test_slices_of_either_dimension(shape: tuple[int, int], ranks: int) -> None:
    whole = filled(spec(shape, None))
    for rank in range(ranks):
        np.testing.assert_array_equal(filled(spec(shape, 0), rank, ranks), np.split(whole, ranks, axis=0)[rank])
        np.testing.assert_array_equal(filled(spec(shape, 1), rank, ranks), np.split(whole, ranks, axis=1)[rank])


def test_strided_slices() -> None:
    """gate|up: rank r holds piece r of the gate, then piece r of the up."""
    fused = Fused(runs=(("gate", 32), ("up", 32)))
    whole = filled(spec((64, 24), None, fused=fused), std={"gate": 1.0, "up": 3.0})
    for rank in range(4):
        expected = np.concatenate([np.split(whole[:32], 4)[rank], np.split(whole[32:], 4)[rank]])
        got = filled(spec((64, 24), 0, stride=2, fused=fused), rank, 4, std={"gate": 1.0, "up": 3.0})
        np.testing.assert_array_equal(got, expected)


def test_a_slice_that_ignores_the_stride_differs() -> None:
    """Negative control of the one above."""
    whole = filled(spec((64, 24), None))
    contiguous = np.split(whole, 4)[1]
    assert (filled(spec((64, 24), 0, stride=2), 1, 4) != contiguous).any()


def test_blocks_have_their_own_standard_deviation() -> None:
    fused = Fused(runs=(("query", 200), ("key", 100), ("value", 100)), repeats=4)
    values = filled(spec((1600, 300), 0, fused=fused), std={"query": 1.0, "key": 2.0, "value": 4.0})
    groups = values.reshape(4, 400, 300)
    assert groups[:, :200].std() == pytest.approx(1.0, rel=0.01)
    assert groups[:, 200:300].std() == pytest.approx(2.0, rel=0.01)
    assert groups[:, 300:].std() == pytest.approx(4.0, rel=0.01)


def test_distribution() -> None:
    values = filled(spec((1200, 1000), None)) / 0.5
    assert values.mean() == pytest.approx(0.0, abs=0.003)
    assert values.std() == pytest.approx(1.0, abs=0.003)
    assert (values**4).mean() == pytest.approx(3.0, abs=0.03)  # a normal distribution's


def test_rows_and_chunks_are_independent() -> None:
    values = filled(spec((4000, 100), None))
    assert abs(np.corrcoef(values[:2000].ravel(), values[2000:].ravel())[0, 1]) < 0.01
    assert len(np.unique(values)) > 0.99 * values.size


def test_name_and_seed_decide() -> None:
    base = filled(spec((64, 24), None))
    assert (filled(spec((64, 24), None), name="v") != base).mean() > 0.99
    assert (filled(spec((64, 24), None), seed=2) != base).mean() > 0.99
    np.testing.assert_array_equal(filled(spec((64, 24), None)), base)


def test_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    filled(spec((64, 24), None))
    assert torch.equal(torch.rand(3), expected)


def test_powers_of_two_scale_bitwise() -> None:
    """What makes abc-symmetry exact (section 7.3)."""
    np.testing.assert_array_equal(
        filled(spec((64, 24), None), std={None: 0.03}) * 4, filled(spec((64, 24), None), std={None: 0.12})
    )


def test_constants() -> None:
    gain = TensorSpec(shape=(8,), fan_in=None, fan_out=0, init=Init.ONES)
    bias = TensorSpec(shape=(8,), fan_in=None, fan_out=0, init=Init.ZEROS, partition_dim=0)
    assert (filled(gain, 1, 2) == 1).all()
    assert filled(bias, 1, 2).tolist() == [0.0] * 4


def test_half_precision_is_the_rounded_single() -> None:
    s = spec((64, 24), None)
    tensor = torch.empty(64, 24, dtype=torch.bfloat16)
    init.fill(tensor, seed=1, name="w", spec=s, std={None: 0.5})
    assert torch.equal(tensor, torch.from_numpy(filled(s)).bfloat16())


def test_a_wrong_slice_is_refused() -> None:
    with pytest.raises(ValueError, match="has local shape"):
        init.fill(torch.empty(3, 3), seed=1, name="w", spec=spec((64, 24), 0), std={None: 1.0})
