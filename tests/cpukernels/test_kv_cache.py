"""The cache grows without losing anything, rolls back in O(1), and forks are independent."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpukernels.kv_cache import LANES, KvCache


def _cache(capacity: int = 0) -> KvCache:
    return KvCache(num_layers=2, num_kv_heads=3, head_dim=4, capacity=capacity)


def _write(cache: KvCache, start: int, stop: int, salt: float = 0.0) -> None:
    """Position t holds t + salt everywhere."""
    cache.reserve(stop)
    for t in range(start, stop):
        cache.keys[:, :, t // LANES, :, t % LANES] = t + salt
        cache.values[:, :, t] = t + salt
    cache.length = stop


def _read(cache: KvCache) -> list[float]:
    """What every position holds; fails if keys, values, layers or heads disagree."""
    found = []
    for t in range(cache.length):
        entry = torch.cat((cache.keys[:, :, t // LANES, :, t % LANES].flatten(), cache.values[:, :, t].flatten()))
        assert (entry == entry[0]).all()
        found.append(float(entry[0]))
    return found


def test_a_new_cache_is_empty_and_has_room() -> None:
    cache = _cache()
    assert cache.length == 0
    assert cache.capacity == 64
    assert cache.num_bytes == 2 * 2 * 3 * 64 * 4 * 4
    assert cache.layer_bytes == cache.keys.stride(0) * 4 == cache.values.stride(0) * 4


@pytest.mark.parametrize(("wanted", "got"), [(1, 64), (64, 64), (65, 80), (100, 112)])
def test_capacity_is_whole_blocks(wanted: int, got: int) -> None:
    assert _cache(wanted).capacity == got


def test_growing_at_least_doubles_and_loses_nothing() -> None:
    cache = _cache()
    _write(cache, 0, 64)
    cache.reserve(65)
    assert cache.capacity == 128
    _write(cache, 64, 65)
    cache.reserve(1000)
    assert cache.capacity == 1008
    assert _read(cache) == list(range(65))


def test_room_that_is_there_costs_nothing() -> None:
    cache = _cache()
    before = cache.keys.data_ptr()
    cache.reserve(64)
    assert cache.keys.data_ptr() == before


@given(steps=st.lists(st.tuples(st.sampled_from(["append", "truncate", "fork"]), st.integers(0, 90)), max_size=12))
def test_any_sequence_of_operations_equals_a_list(steps: list[tuple[str, int]]) -> None:
    cache, model = _cache(), []
    for salt, (action, amount) in enumerate(steps):
        if action == "append":
            start = cache.length
            _write(cache, start, start + amount, salt=salt / 16)
            model += [t + salt / 16 for t in range(start, start + amount)]
        else:
            length = min(amount, cache.length)
            model = model[:length]
            if action == "truncate":
                cache.truncate(length)
            else:
                old, cache = cache, cache.fork(length)
                old.keys.fill_(-1)
                old.values.fill_(-1)
        assert cache.length == len(model)
    assert _read(cache) == model


def test_a_fork_is_independent_both_ways() -> None:
    cache = _cache()
    _write(cache, 0, 40)
    fork = cache.fork(20)
    _write(fork, 20, 30, salt=0.5)
    _write(cache, 40, 41)
    assert _read(cache) == list(range(41))
    assert _read(fork) == [*range(20), *(t + 0.5 for t in range(20, 30))]


@pytest.mark.parametrize("length", [-1, 11])
def test_impossible_lengths_are_refused(length: int) -> None:
    cache = _cache()
    _write(cache, 0, 10)
    with pytest.raises(ValueError, match="10 positions"):
        cache.truncate(length)
    with pytest.raises(ValueError, match="a cache of 10"):
        cache.fork(length)
