from __future__ import annotations

from gateway.speculation.batch_round import BatchRound, BatchRounds


def add(
    rounds: BatchRounds, k: int, tokens: int = 1, *, is_fair: bool = True, is_shadowed: bool = False, is_pinned=False
):
    return rounds.add(
        num_draft_tokens=k,
        tokens=tokens,
        seconds=0.1,
        is_fair=is_fair,
        is_shadowed=is_shadowed,
        is_pinned=is_pinned,
    )


def test_a_single_stream_is_a_batch():
    done = add(BatchRounds(1), 3, 2)
    assert done == BatchRound(mean_k=3.0, tokens=2.0, seconds=0.1, is_fair=True, is_shadowed=False, is_pinned=False)
    assert done.cost_k == 3


def test_a_batch_is_complete_after_a_round_of_each_stream():
    rounds = BatchRounds(4)
    assert [add(rounds, k, k + 1) for k in (1, 2, 3)] == [None, None, None]
    done = add(rounds, 4, 5)
    assert done is not None
    assert (done.mean_k, done.tokens, done.cost_k) == (2.5, 3.5, 2)
    assert add(rounds, 0) is None


def test_one_unclean_shadowed_or_pinned_round_marks_the_batch():
    rounds = BatchRounds(2)
    add(rounds, 0, is_fair=False, is_pinned=True)
    done = add(rounds, 0, is_shadowed=True)
    assert done is not None
    assert (done.is_fair, done.is_shadowed, done.is_pinned) == (False, True, True)
    assert add(rounds, 0) is None
    assert add(rounds, 0).is_pinned is False


def test_few_drafting_streams_are_neither_plain_nor_a_k():
    def batch(mean_k: float) -> BatchRound:
        return BatchRound(mean_k=mean_k, tokens=1, seconds=1, is_fair=True, is_shadowed=False, is_pinned=False)

    assert [batch(k).is_mixed for k in (0.0, 0.5, 1.0)] == [False, True, False]
    assert [batch(k).cost_k for k in (0.0, 0.25, 1.4)] == [0, 1, 1]


def test_clear_forgets():
    rounds = BatchRounds(2)
    add(rounds, 8)
    rounds.clear()
    assert add(rounds, 0) is None
