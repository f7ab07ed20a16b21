"""The torch kernels compute what the native ones compute, and share their cache layout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cpukernels.native import NativeKernels
from cpukernels.ports import AttentionShape
from cpukernels.reference import TorchKernels
from tests.cpukernels.rig import new_cache, plain_attention, random, run

SHAPES = [(4, 4, 16), (4, 2, 32), (6, 2, 64), (8, 1, 128)]
reference = TorchKernels()


def _shape(values: tuple[int, int, int]) -> AttentionShape:
    return AttentionShape(num_q_heads=values[0], num_kv_heads=values[1], head_dim=values[2])


def test_it_says_that_it_is_not_row_invariant() -> None:
    assert (reference.name, reference.is_row_invariant) == ("torch", False)


@pytest.mark.parametrize("rows", [1, 3, 17, 40])
def test_linear_norm_and_activation(native: NativeKernels, rows: int) -> None:
    x, weight, norm = random(1, rows, 64), random(2, 70, 64), random(3, 64)
    ours, theirs = reference.pack(weight), native.pack(weight)
    torch.testing.assert_close(reference.linear(x, ours), native.linear(x, theirs), rtol=2e-5, atol=2e-5)
    left, right = torch.ones(rows, 70), torch.ones(rows, 70)
    reference.linear_add(x, ours, left)
    native.linear_add(x, theirs, right)
    torch.testing.assert_close(left, right, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(reference.rms_norm(x, norm, 1e-5), native.rms_norm(x, norm, 1e-5), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(reference.silu_mul(x), native.silu_mul(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("values", SHAPES, ids=str)
def test_attention_equals_float64(values: tuple[int, int, int]) -> None:
    shape = _shape(values)
    qkv = random(1, 37, (values[0] + 2 * values[1]) * values[2])
    cache = new_cache(shape)
    got = torch.cat([run(reference, shape, [cache], [part])[0] for part in qkv.split((20, 1, 16))])
    torch.testing.assert_close(got.double(), plain_attention(shape, qkv), rtol=2e-5, atol=2e-5)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(
    prompts=st.lists(st.integers(1, 70), min_size=1, max_size=4),
    steps=st.lists(st.integers(0, 6), min_size=4, max_size=4).filter(any),
    values=st.sampled_from(SHAPES),
)
def test_both_kernels_fill_the_cache_alike_and_read_each_others(
    native: NativeKernels, prompts: list[int], steps: list[int], values: tuple[int, int, int]
) -> None:
    shape = _shape(values)
    width = (values[0] + 2 * values[1]) * values[2]
    first = [random(i, length, width) for i, length in enumerate(prompts)]
    second = [random(50 + i, max(1, steps[i]), width) for i in range(len(prompts))]
    crossed, plain = [new_cache(shape) for _ in prompts], [new_cache(shape) for _ in prompts]
    run(reference, shape, crossed, first, layer=1)
    run(native, shape, plain, first, layer=1)
    for left, right, length in zip(crossed, plain, prompts, strict=True):
        torch.testing.assert_close(left.values[1, :, :length], right.values[1, :, :length])
        keys = [c.keys[1].transpose(2, 3).reshape(shape.num_kv_heads, -1, shape.head_dim) for c in (left, right)]
        torch.testing.assert_close(keys[0][:, :length], keys[1][:, :length], rtol=1e-5, atol=1e-5)
    for got, expected in zip(
        run(native, shape, crossed, second, layer=1), run(reference, shape, plain, second, layer=1), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=5e-5, atol=5e-5)


def test_a_cache_without_new_rows_is_left_alone() -> None:
    shape = _shape((4, 2, 32))
    idle, busy = new_cache(shape), new_cache(shape)
    qkv = random(1, 3, 8 * 32)
    outs = run(reference, shape, [idle, busy], [qkv[:0], qkv])
    assert outs[0].shape == (0, 128)
    assert idle.length == 0
    torch.testing.assert_close(outs[1].double(), plain_attention(shape, qkv), rtol=2e-5, atol=2e-5)
