"""Rolling back ids, features and stable slots together."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cpukernels.kv_cache import KvCache
from drafter.state import RequestState


def settled(num_ids: int) -> RequestState:
    """A state whose slots are all stable."""
    state = RequestState(feature_size=4, cache=KvCache(num_layers=1, num_kv_heads=1, head_dim=16))
    state.replace_ids(0, list(range(num_ids)))
    state.features.append(np.zeros((num_ids - 1, 4), np.float32))
    state.cache.reserve(num_ids)
    state.settle(num_ids - 1)
    return state


def test_appending_rolls_nothing_back() -> None:
    state = settled(10)
    state.replace_ids(10, [10, 11])
    assert (len(state.ids), state.features.end, state.cache.length, state.num_slots) == (12, 9, 9, 9)


def test_unchanged_ids_roll_nothing_back() -> None:
    state = settled(10)
    state.replace_ids(4, [4, 5, 6, 7, 8, 9, 10])
    assert (len(state.ids), state.features.end, state.cache.length) == (11, 9, 9)


def test_a_changed_id_drops_its_own_features_and_the_slot_that_embeds_it() -> None:
    state = settled(10)
    state.replace_ids(4, [4, 5, 60])
    # Feature rows 0..5 rest on ids 0..5; slots 0..4 embed ids 1..5.
    assert (state.ids, state.features.end, state.cache.length) == ([0, 1, 2, 3, 4, 5, 60], 6, 5)


def test_a_shorter_commit_is_a_rollback_too() -> None:
    state = settled(10)
    state.replace_ids(3, [3, 4])
    assert (state.ids, state.features.end, state.cache.length) == ([0, 1, 2, 3, 4], 5, 4)


@given(st.lists(st.tuples(st.integers(0, 30), st.lists(st.integers(0, 2), max_size=6), st.booleans()), max_size=20))
def test_invariants_hold_under_any_history(steps: list[tuple[int, list[int], bool]]) -> None:
    state = settled(20)
    for start, ids, settles in steps:
        begin = min(start, len(state.ids))
        kept = state.ids[:begin]
        state.replace_ids(begin, ids)
        assert state.ids == kept + ids
        missing = max(0, len(state.ids) - 1 - state.features.end)
        state.features.append(np.zeros((missing, 4), np.float32))
        if settles and state.num_slots:
            state.settle(state.num_slots)
        assert state.features.first <= max(0, state.cache.length) <= state.features.end <= max(1, len(state.ids))
        assert state.cache.length <= max(0, len(state.ids) - 1)
