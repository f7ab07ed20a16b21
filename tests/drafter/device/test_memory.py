"""Caches on the device, windows over them, and how a batch is shared out."""

from __future__ import annotations

import torch

from drafter.device.memory import DeviceCache, PlaneShape, collect, round_up, share_out, store

SHAPE = PlaneShape(num_layers=2, num_planes=2, num_heads=3, width=4)


def cache_of(length: int, *, seed: int = 0) -> DeviceCache:
    cache = DeviceCache(SHAPE, device=torch.device("cpu"), dtype=torch.float32)
    cache.reserve(length)
    cache.data[..., :length, :] = torch.randn(2, 2, 3, length, 4, generator=torch.Generator().manual_seed(seed))
    cache.length = length
    return cache


def test_an_empty_cache_takes_no_memory() -> None:
    assert cache_of(0).data.numel() == 0


def test_growing_keeps_what_is_valid_and_clears_the_rest() -> None:
    cache = cache_of(10)
    before = cache.data[..., :7, :].clone()
    cache.data[..., 7:, :] = torch.nan
    cache.length = 7
    cache.reserve(cache.capacity + 1)
    assert torch.equal(cache.data[..., :7, :], before)
    assert not cache.data[..., 7:, :].any()


def test_capacities_grow_by_halves_in_whole_pieces() -> None:
    assert [round_up(n) for n in (1, 256, 257, 2048, 2049, 5000)] == [256, 256, 512, 2048, 3072, 5120]
    cache = cache_of(4000)
    assert cache.capacity == 4096
    cache.reserve(4097)
    assert cache.capacity == 6144


def test_a_window_over_one_cache_is_the_cache() -> None:
    cache = cache_of(5)
    window = collect([cache], 9)
    window[:, :, 0, :, 5:7] = 1
    store(window, [cache], [2], is_copy=False)
    assert cache.length == 7
    assert bool((cache.data[..., 5:7, :] == 1).all())


def test_a_window_over_several_is_a_copy_that_is_stored() -> None:
    caches = [cache_of(5, seed=1), cache_of(300, seed=2)]
    copies = [cache.data[..., : cache.length, :].clone() for cache in caches]
    window = collect(caches, 310)
    assert window.shape == (2, 2, 2, 3, 512, 4)
    assert torch.equal(window[:, :, 0, :, :5], copies[0])
    assert not window[:, :, 0, :, 5:].any()
    window[:, :, 0, :, 5] = 1
    window[:, :, 1, :, 300:303] = 2
    store(window, caches, [1, 3], is_copy=True)
    assert [cache.length for cache in caches] == [6, 303]
    assert bool((caches[0].data[..., 5, :] == 1).all())
    assert bool((caches[1].data[..., 300:303, :] == 2).all())
    assert torch.equal(caches[1].data[..., :300, :], copies[1])


def test_a_batch_is_shared_out_by_length() -> None:
    assert share_out([10, 5000, 20, 4900], max_positions=10_240) == [[1, 3], [2, 0]]
    assert share_out([10, 5000, 20, 4900], max_positions=1 << 20) == [[1, 3, 2, 0]]
    # Alone, although it is too long for the bound.
    assert share_out([9000, 10], max_positions=1000) == [[0], [1]]
