"""The moving window of features against a plain list."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from drafter.features import FeatureStore


def block(begin: int, end: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    return np.arange(begin, end, dtype=np.float32)[:, None] + np.zeros((1, 4), np.float32)


def test_forgetting_frees_memory() -> None:
    store = FeatureStore(4)
    store.append(block(0, 10_000))
    large = store.num_bytes
    store.forget(9_999)
    assert store.num_bytes < large / 100
    assert np.array_equal(store.rows(9_999, 10_000), block(9_999, 10_000))


def test_truncating_before_the_window_empties_it_there() -> None:
    store = FeatureStore(4)
    store.append(block(0, 1000))
    store.forget(900)
    store.truncate(500)
    assert (store.first, store.end) == (500, 500)
    store.append(block(500, 510))
    assert np.array_equal(store.rows(500, 510), block(500, 510))


@given(st.lists(st.tuples(st.sampled_from(["append", "truncate", "forget"]), st.integers(0, 400))))
def test_rows_are_always_those_of_their_positions(steps: list[tuple[str, int]]) -> None:
    store, end = FeatureStore(4), 0
    for step, number in steps:
        match step:
            case "append":
                store.append(block(end, end + number))
                end += number
            case "truncate":
                end = min(end, number)
                store.truncate(end)
            case _:
                store.forget(min(number, end))
        assert store.end == end
        assert store.first <= end
        assert np.array_equal(store.rows(store.first, end), block(store.first, end))
