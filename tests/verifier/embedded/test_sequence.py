"""A cached sequence is a list of positions: appended, truncated, forked, never mixed up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpukernels.kv_cache import KvCache
from verifier.embedded.sequence import CachedSequence, common_prefix_len

ids = st.lists(st.integers(0, 2), max_size=10)


def _sequence() -> CachedSequence:
    return CachedSequence(KvCache(num_layers=1, num_kv_heads=1, head_dim=16), feature_size=3)


def _append(sequence: CachedSequence, own_ids: list[int]) -> None:
    begin = len(sequence)
    sequence.cache.reserve(begin + len(own_ids))
    features = np.array([[begin + i, token_id, 7] for i, token_id in enumerate(own_ids)], dtype=np.float32)
    sequence.append(own_ids, features.reshape(-1, 3))


def _check(sequence: CachedSequence, model: list[int]) -> None:
    assert len(sequence) == len(model)
    assert sequence.ids.tolist() == model
    expected = [[i, token_id, 7] for i, token_id in enumerate(model)]
    assert sequence.features(0, len(model)).tolist() == expected


@given(left=ids, right=ids)
def test_common_prefix_len(left: list[int], right: list[int]) -> None:
    expected = next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )
    assert common_prefix_len(np.array(left, dtype=np.int64), np.array(right, dtype=np.int64)) == expected


@given(steps=st.lists(st.tuples(st.sampled_from(["append", "truncate", "fork"]), st.integers(0, 150)), max_size=10))
def test_any_sequence_of_operations_equals_a_list(steps: list[tuple[str, int]]) -> None:
    sequence, model = _sequence(), []
    for number, (action, amount) in enumerate(steps):
        if action == "append":
            new = [(number * 31 + i) % 97 for i in range(amount)]
            _append(sequence, new)
            model = model + new
            continue
        length = min(amount, len(sequence))
        model = model[:length]
        if action == "truncate":
            sequence.truncate(length)
        else:
            old, sequence = sequence, sequence.fork(length)
            old.truncate(0)
            _append(old, [96] * 200)
        _check(sequence, model)
    _check(sequence, model)


def test_a_fork_and_its_source_do_not_see_each_other() -> None:
    source = _sequence()
    _append(source, list(range(20)))
    fork = source.fork(10)
    _append(fork, [50, 51])
    _append(source, [60])
    _check(source, [*range(20), 60])
    _check(fork, [*range(10), 50, 51])


def test_features_out_of_range_are_a_bug() -> None:
    sequence = _sequence()
    _append(sequence, [1, 2, 3])
    for start, stop in ((0, 4), (-1, 2), (2, 1)):
        with pytest.raises(AssertionError):
            sequence.features(start, stop)
