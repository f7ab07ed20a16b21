"""The pure policy: merging, batching, evicting. Nothing lost, nothing doubled, nothing reordered."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from drafter.policy import Waiting, choose_evictions, drop_request, merge_waiting, plan_batch
from wire.messages import DraftExtend
from wire.sampling import SamplingParams


def waiting(request_id: str, round_id: int, *, start: int = 5, seed: int | None = None) -> Waiting:
    message = DraftExtend(
        request_id=request_id,
        round_id=round_id,
        base_len=start + 1,
        start=start,
        token_ids=(1,),
        spans=(),
        num_draft_tokens=2,
        sampling=None if seed is None else SamplingParams(seed=seed),
    )
    return Waiting(peer=b"peer", message=message)


queues = st.lists(
    st.builds(
        lambda request_id, start, seed: (request_id, start, seed),
        st.sampled_from("abcd"),
        st.sampled_from([0, 3, 7]),
        st.none() | st.integers(0, 3),
    )
).map(
    lambda entries: [
        waiting(request_id, number, start=start, seed=seed) for number, (request_id, start, seed) in enumerate(entries)
    ]
)


def test_an_empty_queue_is_no_work() -> None:
    plan = plan_batch([], max_requests=4)
    assert plan.works == ()
    assert plan.left == ()


def test_messages_of_one_request_become_one_work() -> None:
    first, other, second = waiting("a", 1), waiting("b", 1), waiting("a", 2)
    works = merge_waiting([first, other, second])
    assert [work.request_id for work in works] == ["a", "b"]
    assert works[0].applied == (first, second)
    assert works[0].skipped == ()


def test_a_resync_skips_what_came_before_but_keeps_the_sampling() -> None:
    first, resync, after = waiting("a", 1, seed=7), waiting("a", 2, start=0), waiting("a", 3)
    (work,) = merge_waiting([first, resync, after])
    assert work.skipped == (first,)
    assert work.applied == (resync, after)
    assert work.sampling == SamplingParams(seed=7)


def test_the_newest_sampling_holds() -> None:
    (work,) = merge_waiting([waiting("a", 1, start=0, seed=1), waiting("a", 2, start=0, seed=2)])
    assert work.sampling == SamplingParams(seed=2)


@given(queues)
def test_merging_loses_doubles_and_reorders_nothing(queue: list[Waiting]) -> None:
    works = merge_waiting(queue)
    assert len({work.request_id for work in works}) == len(works)
    for work in works:
        of_request = [entry for entry in queue if entry.message.request_id == work.request_id]
        assert list(work.skipped + work.applied) == of_request
        assert all(entry.message.start != 0 for entry in work.applied[1:])
        assert work.applied[-1] is of_request[-1]
        assert not work.skipped or work.applied[0].message.start == 0
    first_seen = list(dict.fromkeys(entry.message.request_id for entry in queue))
    assert [work.request_id for work in works] == first_seen


@given(queues, st.integers(1, 4))
def test_repeated_plans_serve_everyone_in_order(queue: list[Waiting], max_requests: int) -> None:
    left, served = list(queue), []
    while left:
        plan = plan_batch(left, max_requests=max_requests)
        assert 1 <= len(plan.works) <= max_requests
        served += [entry for work in plan.works for entry in work.skipped + work.applied]
        assert len(plan.left) < len(left)
        left = list(plan.left)
    assert sorted(entry.message.round_id for entry in served) == list(range(len(queue)))


@given(queues, st.sampled_from("abcd"))
def test_a_closed_request_waits_no_longer(queue: list[Waiting], request_id: str) -> None:
    kept = drop_request(queue, request_id)
    assert kept == [entry for entry in queue if entry.message.request_id != request_id]


def test_nothing_is_evicted_while_there_is_room() -> None:
    assert choose_evictions(["a", "b"], max_requests=2, needed=set()) == []


def test_the_least_recently_used_goes_first() -> None:
    assert choose_evictions(["a", "b", "c", "d"], max_requests=2, needed={"a"}) == ["b", "c"]


@given(st.lists(st.text("abcdefgh", min_size=1), unique=True), st.integers(1, 5), st.sets(st.text("abcdefgh")))
def test_evictions_never_touch_the_running_batch(held: list[str], max_requests: int, needed: set[str]) -> None:
    evicted = choose_evictions(held, max_requests=max_requests, needed=needed)
    assert not set(evicted) & needed
    assert len(evicted) == min(max(0, len(held) - max_requests), len(set(held) - needed))
    assert evicted == [request_id for request_id in held if request_id in evicted]
