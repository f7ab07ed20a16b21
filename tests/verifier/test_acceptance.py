"""Acceptance, the reference of every backend: every branch, then properties for any draft."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifier.acceptance import committed_ids, num_accepted

ids = st.lists(st.integers(0, 2), max_size=6)


@pytest.mark.parametrize(
    ("draft_ids", "target_ids", "accepted", "committed"),
    [
        ((), (7,), 0, (7,)),
        ((1,), (1, 9), 1, (1, 9)),
        ((1,), (2, 9), 0, (2,)),
        ((1, 2, 3), (1, 2, 3, 4), 3, (1, 2, 3, 4)),
        ((1, 2, 3), (1, 2, 9, 4), 2, (1, 2, 9)),
        ((1, 2, 3), (9, 2, 3, 4), 0, (9,)),
        ((1, 1, 1), (1, 9, 1, 1), 1, (1, 9)),  # an agreement after the first rejection counts for nothing
        ([5, 6], [5, 6, 0], 2, (5, 6, 0)),
    ],
)
def test_examples(draft_ids: tuple, target_ids: tuple, accepted: int, committed: tuple) -> None:
    assert num_accepted(draft_ids, target_ids) == accepted
    assert committed_ids(draft_ids, target_ids) == committed


@pytest.mark.parametrize(("drafts", "targets"), [(0, 0), (0, 2), (1, 1), (2, 2), (2, 4), (3, 0)])
def test_lengths_that_do_not_belong_together_are_refused(drafts: int, targets: int) -> None:
    for function in (num_accepted, committed_ids):
        with pytest.raises(ValueError, match=f"{drafts} draft ids need {drafts + 1} target ids, got {targets}"):
            function([1] * drafts, [1] * targets)


@given(draft_ids=ids, extra=st.lists(st.integers(0, 2), min_size=7, max_size=7))
def test_committed_ids_are_always_the_targets_own(draft_ids: list[int], extra: list[int]) -> None:
    target_ids = extra[: len(draft_ids) + 1]
    accepted = num_accepted(draft_ids, target_ids)
    committed = committed_ids(draft_ids, target_ids)
    assert committed == tuple(target_ids[: len(committed)])
    assert len(committed) == accepted + 1
    assert list(committed[:-1]) == draft_ids[:accepted]
    assert accepted == len(draft_ids) or draft_ids[accepted] != target_ids[accepted]


@given(draft_ids=ids, seed=st.integers(0, 1000))
def test_any_drafter_gives_what_plain_decoding_gives(draft_ids: list[int], seed: int) -> None:
    def target(context: tuple[int, ...]) -> int:
        return hash((seed, context)) % 3

    plain: tuple[int, ...] = ()
    for _ in range(20):
        plain += (target(plain),)
    text: tuple[int, ...] = ()
    while len(text) < 10:
        targets = [target(text + tuple(draft_ids[:i])) for i in range(len(draft_ids) + 1)]
        text += committed_ids(draft_ids, targets)
    assert text == plain[: len(text)]
