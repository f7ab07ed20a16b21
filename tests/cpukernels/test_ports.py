"""ragged_rows describes which request and position every row belongs to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpukernels.kv_cache import KvCache
from cpukernels.ports import ragged_rows


def _cache(length: int) -> KvCache:
    cache = KvCache(num_layers=3, num_kv_heads=2, head_dim=16, capacity=length)
    cache.length = length
    return cache


@given(sizes=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 30)), min_size=1, max_size=6))
def test_rows_follow_their_caches(sizes: list[tuple[int, int]]) -> None:
    caches = [_cache(length) for length, _ in sizes]
    rows = ragged_rows(caches, [count for _, count in sizes])
    expected = [(index, length + i) for index, (length, count) in enumerate(sizes) for i in range(count)]
    assert rows.num_rows == len(expected)
    assert rows.positions.tolist() == [position for _, position in expected]
    assert rows.lengths.tolist() == [position + 1 for _, position in expected]
    assert rows.capacities.tolist() == [caches[index].capacity for index, _ in expected]
    for layer in range(3):
        assert rows.key_ptrs[layer].tolist() == [caches[i].keys[layer].data_ptr() for i, _ in expected]
        assert rows.value_ptrs[layer].tolist() == [caches[i].values[layer].data_ptr() for i, _ in expected]
    assert rows.starts == tuple(sum(count for _, count in sizes[:i]) for i in range(len(sizes) + 1))
    for (length, count), cache in zip(sizes, caches, strict=True):
        assert cache.length == length
        assert cache.capacity >= length + count


def test_pointers_are_taken_after_growing() -> None:
    cache = _cache(64)
    rows = ragged_rows([cache], [1])
    assert cache.capacity == 128
    assert rows.key_ptrs[0, 0] == cache.keys.data_ptr()


def test_no_caches_are_no_rows() -> None:
    assert ragged_rows([], []).num_rows == 0


def test_every_cache_needs_a_count() -> None:
    with pytest.raises(ValueError, match="zip"):
        ragged_rows([_cache(1)], [])
