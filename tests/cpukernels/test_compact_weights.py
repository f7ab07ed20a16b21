"""Weights in 8 bits and bfloat16: taken only where they say every weight exactly, and then no result changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cpukernels.native import NativeKernels, build_library
from tests.cpukernels.rig import random

shared_fixture = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
GROUP = 32


@pytest.fixture
def full(kernel_dir: Path) -> NativeKernels:
    return NativeKernels(build_library(kernel_dir), is_compact=False)


def _q4_1(seed: int, columns: int, inner: int) -> torch.Tensor:
    """What ggml's Q4_1 gives back: float16 scale and minimum, 4 bits, every group reaching both ends."""
    generator = torch.Generator().manual_seed(seed)
    shape = (columns, inner // GROUP, 1)
    scale = (torch.rand(shape, generator=generator) * 0.02).half().float()
    minimum = (-torch.rand(shape, generator=generator) * 0.2).half().float()
    codes = torch.randint(0, 16, (columns, inner // GROUP, GROUP), generator=generator)
    codes[..., 3], codes[..., 17] = 0, 15
    return (scale * codes + minimum).reshape(columns, inner)


def _q8_0(seed: int, columns: int, inner: int) -> torch.Tensor:
    """What ggml's Q8_0 gives back: float16 scale, 8 bits with sign, the largest of every group +-127."""
    generator = torch.Generator().manual_seed(seed)
    scale = (torch.rand((columns, inner // GROUP, 1), generator=generator) * 0.01).half().float()
    codes = torch.randint(-127, 128, (columns, inner // GROUP, GROUP), generator=generator)
    codes[..., 9] = 127 * (1 - 2 * (codes[..., 0] % 2))
    return (scale * codes).reshape(columns, inner)


def _bfloat16(seed: int, columns: int, inner: int) -> torch.Tensor:
    return random(seed, columns, inner).bfloat16().float()


MAKERS = {"grouped": (_q4_1, _q8_0), "half": (_bfloat16,)}


@shared_fixture
@given(
    form=st.sampled_from(["grouped", "half"]),
    which=st.integers(0, 1),
    rows=st.integers(1, 40),
    columns=st.integers(1, 100),
    groups=st.integers(1, 4),
    seed=st.integers(0, 999),
)
def test_the_same_bits_from_fewer_bytes(
    native: NativeKernels,
    full: NativeKernels,
    form: str,
    which: int,
    rows: int,
    columns: int,
    groups: int,
    seed: int,
) -> None:
    makers = MAKERS[form]
    weight = makers[which % len(makers)](seed, columns, groups * GROUP)
    compact, plain = native.pack(weight), full.pack(weight)
    assert (compact.form, plain.form) == (form, "full")
    assert compact.nbytes * 3 < plain.nbytes * (1 if form == "grouped" else 2)
    x, residual = random(seed + 1, rows, groups * GROUP), random(seed + 2, rows, columns)
    assert torch.equal(native.linear(x, compact), full.linear(x, plain))
    added, expected = residual.clone(), residual.clone()
    native.linear_add(x, compact, added)
    full.linear_add(x, plain, expected)
    assert torch.equal(added, expected)


@pytest.mark.parametrize("make", [_q4_1, _q8_0])
@pytest.mark.parametrize("place", [(0, 0), (69, 95), (33, 40)])
def test_one_weight_off_the_grid_keeps_the_matrix_full(native: NativeKernels, make, place: tuple[int, int]) -> None:
    weight = make(3, 70, 96)
    weight[place] = torch.nextafter(weight[place], torch.tensor(9.0))
    assert native.pack(weight).form == "full"


def test_one_number_with_more_bits_than_bfloat16_keeps_the_matrix_full(native: NativeKernels) -> None:
    weight = _bfloat16(4, 70, 96)
    assert native.pack(weight).form == "half"
    weight[69, 95] += 2**-18
    assert native.pack(weight).form == "full"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_is_not_hidden_in_a_code(native: NativeKernels, value: float) -> None:
    weight = _q8_0(5, 40, 64)
    weight[7, 7] = value
    packed = native.pack(weight)
    assert packed.form != "grouped"
    assert not torch.isfinite(native.linear(torch.ones(1, 64), packed)[0, 7])


def test_zeros_and_constant_groups_are_grouped(native: NativeKernels, full: NativeKernels) -> None:
    weight = torch.zeros(40, 64)
    weight[3] = 0.25
    weight[5] = -0.0
    packed = native.pack(weight)
    assert packed.form == "grouped"
    x = random(1, 3, 64)
    assert torch.equal(native.linear(x, packed), full.linear(x, full.pack(weight)))


def test_an_inner_size_that_is_no_multiple_of_a_group_is_never_grouped(native: NativeKernels) -> None:
    weight = _q8_0(6, 40, 64)[:, :40].contiguous()
    assert native.pack(weight).form == "full"


@pytest.mark.parametrize("make", [_q4_1, _q8_0, _bfloat16])
def test_compact_forms_are_row_invariant(native: NativeKernels, make) -> None:
    x, packed = random(1, 40, 96), native.pack(make(2, 70, 96))
    alone = torch.cat([native.linear(x[i : i + 1].contiguous(), packed) for i in range(40)])
    for rows in range(1, 41):
        assert torch.equal(native.linear(x[:rows].contiguous(), packed), alone[:rows]), rows


def test_it_can_be_turned_off(full: NativeKernels) -> None:
    assert full.pack(_q4_1(1, 40, 64)).form == "full"
