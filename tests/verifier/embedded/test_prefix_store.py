"""Prefix reuse: the longest prefix, least recently finished out first, and nobody's memory is shared."""

from __future__ import annotations

import numpy as np
import pytest

from cpukernels.kv_cache import KvCache
from verifier.embedded.prefix_store import PrefixStore
from verifier.embedded.sequence import CachedSequence


def _sequence(ids: list[int]) -> CachedSequence:
    sequence = CachedSequence(KvCache(num_layers=1, num_kv_heads=1, head_dim=16, capacity=len(ids)), feature_size=1)
    sequence.append(ids, np.array(ids, dtype=np.float32)[:, None])
    return sequence


def _ids(*parts: range | list[int]) -> np.ndarray:
    return np.array([i for part in parts for i in part], dtype=np.int64)


def _taken(store: PrefixStore, ids: np.ndarray, live: tuple[CachedSequence, ...] = ()) -> int:
    found = store.take(ids, live)
    if found is None:
        return 0
    assert found.ids.tolist() == ids[: len(found)].tolist()
    assert found.features(0, len(found))[:, 0].tolist() == found.ids.tolist()
    return len(found)


def test_the_longest_prefix_is_taken_but_never_the_last_id() -> None:
    store = PrefixStore(1000)
    store.put(_sequence([*range(10), 99]))
    store.put(_sequence([*range(20), 99]))
    assert _taken(store, _ids(range(15))) == 14
    assert _taken(store, _ids(range(11))) == 10


def test_the_same_ids_again_compute_the_last_one() -> None:
    store = PrefixStore(1000)
    store.put(_sequence(list(range(30))))
    assert _taken(store, _ids(range(30))) == 29


@pytest.mark.parametrize(("shared", "taken"), [(7, 0), (8, 8)])
def test_short_prefixes_are_not_worth_it(shared: int, taken: int) -> None:
    store = PrefixStore(1000)
    store.put(_sequence([*range(shared), *[99] * 20]))
    assert _taken(store, _ids(range(40))) == taken


def test_nothing_in_common_is_nothing_taken() -> None:
    store = PrefixStore(1000)
    store.put(_sequence(list(range(50, 90))))
    assert store.take(_ids(range(40)), ()) is None
    assert store.num_positions == 40


def test_a_mostly_shared_idle_sequence_is_handed_over() -> None:
    store = PrefixStore(1000)
    sequence = _sequence(list(range(20)))
    store.put(sequence)
    assert store.take(_ids(range(12), [99, 98]), ()) is sequence
    assert store.num_positions == 0
    assert len(sequence) == 12


def test_a_barely_shared_one_is_copied_and_stays() -> None:
    store = PrefixStore(1000)
    sequence = _sequence(list(range(40)))
    store.put(sequence)
    found = store.take(_ids(range(12), [99, 98]), ())
    assert found is not None
    assert found is not sequence
    assert store.num_positions == 40
    found.truncate(0)
    found.append([7] * 30, np.full((30, 1), 7, dtype=np.float32))
    assert _taken(store, _ids(range(40), [1])) == 40


def test_a_running_request_is_copied_never_handed_over() -> None:
    store = PrefixStore(1000)
    live = _sequence(list(range(20)))
    found = store.take(_ids(range(20), [5]), (live,))
    assert found is not None
    assert found is not live
    found.truncate(8)
    assert live.ids.tolist() == list(range(20))
    assert np.shares_memory(found.ids, live.ids) is False
    assert found.cache.keys.data_ptr() != live.cache.keys.data_ptr()


def test_the_oldest_goes_first() -> None:
    store = PrefixStore(30)
    for start in (100, 200, 300):
        store.put(_sequence(list(range(start, start + 10))))
    assert store.num_evicted == 0
    store.put(_sequence(list(range(400, 410))))
    assert (store.num_evicted, store.num_positions) == (1, 30)
    assert store.take(_ids(range(100, 110), [1]), ()) is None
    assert _taken(store, _ids(range(200, 210), [1])) == 10


def test_one_large_sequence_evicts_many() -> None:
    store = PrefixStore(30)
    for start in (100, 200, 300):
        store.put(_sequence(list(range(start, start + 10))))
    store.put(_sequence(list(range(25))))
    assert (store.num_evicted, store.num_positions) == (3, 25)


@pytest.mark.parametrize("length", [0, 7, 31])
def test_what_is_too_short_or_too_long_is_not_kept(length: int) -> None:
    store = PrefixStore(30)
    store.put(_sequence(list(range(20))))
    store.put(
        _sequence(list(range(length)))
        if length
        else CachedSequence(KvCache(num_layers=1, num_kv_heads=1, head_dim=16), feature_size=1)
    )
    assert (store.num_positions, store.num_evicted) == (20, 0)


def test_a_store_of_no_size_keeps_nothing() -> None:
    store = PrefixStore(0)
    store.put(_sequence(list(range(20))))
    assert store.num_positions == 0
    assert store.take(_ids(range(21)), ()) is None
