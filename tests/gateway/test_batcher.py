"""What waits becomes one batch; one item's trouble is its own; prompts do not wait for batches."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from gateway.batcher import BatchObserved, VerifyBatcher
from tests.gateway.core_fakes import FakeClock, FakeVerifier, failed, toy_target
from wire.errors import PeerLate, PeerLost, PeerRefused
from wire.messages import VerifyItem, VerifyReply
from wire.sampling import SamplingParams

pytestmark = pytest.mark.timeout(20)


def item(name: str, drafts: tuple[int, ...] = ()) -> VerifyItem:
    return VerifyItem(
        request_id=name,
        round_id=1,
        base_len=2,
        start=0,
        token_ids=(1, 2),
        draft_ids=drafts,
        sampling=SamplingParams(),
        prompt_len=2,
    )


class Running:
    """A batcher that runs while the block lasts."""

    def __init__(self, verifier: FakeVerifier, clock: FakeClock | None = None) -> None:
        self.observed: list[BatchObserved] = []
        self.batcher = VerifyBatcher(
            verifier,
            decode_timeout_s=1.0,
            prompt_timeout_s=2.0,
            clock=clock or FakeClock(),
            on_batch=self.observed.append,
        )

    async def __aenter__(self) -> VerifyBatcher:
        self._task = asyncio.create_task(self.batcher.run())
        return self.batcher

    async def __aexit__(self, *error: object) -> None:
        self._task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await self._task


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_items_that_arrive_during_a_batch_form_the_next_one() -> None:
    verifier = FakeVerifier()
    verifier.gate = asyncio.Event()
    async with Running(verifier) as batcher, asyncio.TaskGroup() as group:
        first = group.create_task(batcher.verify(item("a")))
        await settle()
        later = [group.create_task(batcher.verify(item(name))) for name in "bcd"]
        await settle()
        assert batcher.num_waiting == 3
        verifier.gate.set()
        outcomes = [await task for task in (first, *later)]
    assert [[i.request_id for i in batch] for batch in verifier.batches] == [["a"], ["b", "c", "d"]]
    assert [o.result.request_id for o in outcomes] == ["a", "b", "c", "d"]
    assert all(o.result.target_ids == (toy_target([1, 2]),) for o in outcomes)
    assert batcher.num_waiting == 0


async def test_items_of_one_turn_are_one_batch_and_are_observed() -> None:
    clock = FakeClock()
    running = Running(FakeVerifier(clock), clock)
    async with running as batcher, asyncio.TaskGroup() as group:
        group.create_task(batcher.verify(item("a", (1, 2))))
        group.create_task(batcher.verify(item("b", (3,))))
    assert running.observed == [
        BatchObserved(batch_size=2, num_draft_tokens=3, verify_s=pytest.approx(0.01), forward_s=0.005, is_clean=True)
    ]


async def test_a_batch_beside_a_prompt_is_not_clean() -> None:
    verifier = FakeVerifier()
    verifier.num_prefill_rows = 5
    running = Running(verifier)
    async with running as batcher:
        outcome = await batcher.verify(item("a"))
    assert not outcome.is_clean
    assert not running.observed[0].is_clean


async def test_a_prompt_does_not_wait_for_the_running_batch() -> None:
    verifier = FakeVerifier()
    verifier.gate = asyncio.Event()
    running = Running(verifier)
    async with running as batcher, asyncio.TaskGroup() as group:
        group.create_task(batcher.verify(item("a")))
        await settle()
        group.create_task(batcher.verify_prompt(item("p")))
        await settle()
        assert [len(batch) for batch in verifier.batches] == [1, 1]
        verifier.gate.set()
    assert len(running.observed) == 1  # a prompt is no decode batch


async def test_a_refused_item_fails_alone() -> None:
    verifier = FakeVerifier()
    verifier.fail = lambda i: failed(i, "context_limit") if i.request_id == "bad" else None
    async with Running(verifier) as batcher:
        good, bad = await asyncio.gather(
            batcher.verify(item("good")), batcher.verify(item("bad")), return_exceptions=True
        )
        assert isinstance(bad, PeerRefused)
        assert bad.code == "context_limit"
        assert good.result.request_id == "good"
        with pytest.raises(PeerRefused):
            await batcher.verify_prompt(item("bad"))


@pytest.mark.parametrize("error", [PeerLost("gone"), PeerLate("slow")])
async def test_a_lost_batch_fails_all_its_items_and_the_next_one_works(error: Exception) -> None:
    verifier = FakeVerifier()
    verifier.fail = lambda _item: error
    running = Running(verifier)
    async with running as batcher:
        results = await asyncio.gather(*[batcher.verify(item(n)) for n in "ab"], return_exceptions=True)
        assert results == [error, error]
        with pytest.raises(type(error)):
            await batcher.verify_prompt(item("p"))
        verifier.fail = lambda _item: None
        assert (await batcher.verify(item("c"))).result.request_id == "c"
    assert len(running.observed) == 1


async def test_an_item_that_was_not_answered_is_lost() -> None:
    verifier = FakeVerifier()
    verifier.closed.append("a")  # closed there meanwhile
    async with Running(verifier) as batcher:
        with pytest.raises(PeerLost, match="did not answer"):
            await batcher.verify(item("a"))


async def test_a_cancelled_item_is_not_sent_and_not_answered() -> None:
    verifier = FakeVerifier()
    verifier.gate = asyncio.Event()
    async with Running(verifier) as batcher:
        running = asyncio.create_task(batcher.verify(item("running")))
        await settle()
        waiting = asyncio.create_task(batcher.verify(item("waiting")))
        other = asyncio.create_task(batcher.verify(item("other")))
        await settle()
        running.cancel()
        waiting.cancel()
        await settle()
        verifier.gate.set()
        assert (await other).result.request_id == "other"
        assert running.cancelled()
        assert waiting.cancelled()
    assert [[i.request_id for i in batch] for batch in verifier.batches] == [["running"], ["other"]]


async def test_only_cancelled_items_are_no_batch() -> None:
    verifier = FakeVerifier()
    verifier.gate = asyncio.Event()
    async with Running(verifier) as batcher:
        running = asyncio.create_task(batcher.verify(item("running")))
        await settle()
        waiting = asyncio.create_task(batcher.verify(item("waiting")))
        await settle()
        waiting.cancel()
        verifier.gate.set()
        await running
        await settle()
    assert len(verifier.batches) == 1


async def test_a_target_with_separate_ways_gets_plain_and_drafted_items_apart() -> None:
    verifier = FakeVerifier()
    verifier.mixes_plain_rounds = False
    async with Running(verifier) as batcher:
        asked = (item("a"), item("b", (3,)), item("c"), item("d", (3, 4)))
        outcomes = await asyncio.gather(*(batcher.verify(one) for one in asked))
    assert [outcome.result.request_id for outcome in outcomes] == ["a", "b", "c", "d"]
    names = sorted("".join(one.request_id for one in batch) for batch in verifier.batches)
    assert names == ["ac", "bd"]


async def test_where_the_target_decodes_by_itself_no_plain_round_waits_for_a_verify() -> None:
    class Slow(FakeVerifier):
        async def verify(self, items: Sequence[VerifyItem], *, timeout_s: float) -> VerifyReply:
            if any(one.draft_ids for one in items):
                await free.wait()
            return await super().verify(items, timeout_s=timeout_s)

    free = asyncio.Event()
    verifier = Slow()
    verifier.mixes_plain_rounds = False
    async with Running(verifier) as batcher, asyncio.TaskGroup() as group:
        first = group.create_task(batcher.verify(item("a", (3,))))
        await settle()
        later = [group.create_task(batcher.verify(item(name, (3,)))) for name in "bc"]
        for _ in range(3):
            assert (await batcher.verify(item("plain"))).result.request_id == "plain"
        assert not first.done()
        assert batcher.num_waiting == 2
        free.set()
        await asyncio.gather(first, *later)
    names = ["".join(one.request_id for one in batch) for batch in verifier.batches]
    assert names == ["plain"] * 3 + ["a", "bc"]


async def waiting_for_drafts(batcher: VerifyBatcher, verifier: FakeVerifier) -> asyncio.Task[object]:
    """One pass has been measured; now a's drafts wait for those of b. Returns a's verify."""
    await batcher.verify(item("first", (3,)))
    for name in "ab":
        batcher.expect(name)
    verify = asyncio.create_task(batcher.verify(item("a", (3,))))
    await settle()
    return verify


def served(verifier: FakeVerifier) -> list[str]:
    return ["".join(one.request_id for one in batch) for batch in verifier.batches[1:]]


@pytest.mark.parametrize("mixes", [False, True])
async def test_drafts_on_their_way_join_the_batch_where_a_pass_costs_the_same_for_all(mixes: bool) -> None:
    clock = FakeClock()
    verifier = FakeVerifier(clock)
    verifier.mixes_plain_rounds = mixes
    async with Running(verifier, clock) as batcher:
        first = await waiting_for_drafts(batcher, verifier)
        assert served(verifier) == (["a"] if mixes else [])
        await asyncio.gather(first, batcher.verify(item("b", (3,))))
    assert served(verifier) == (["a", "b"] if mixes else ["ab"])


async def test_a_batch_does_not_wait_for_who_will_not_come() -> None:
    clock = FakeClock()
    verifier = FakeVerifier(clock)
    verifier.mixes_plain_rounds = False
    async with Running(verifier, clock) as batcher:
        first = await waiting_for_drafts(batcher, verifier)
        batcher.forget("b")
        await first
        lost = await waiting_for_drafts(batcher, verifier)
        await batcher.verify(item("b"))  # its drafts were lost: a plain round
        await lost
    assert sorted(served(verifier)) == ["a", "a", "b", "first"]


async def test_a_batch_waits_for_half_a_pass_at_most() -> None:
    clock = FakeClock()  # a pass takes 10 ms by it
    verifier = FakeVerifier(clock)
    verifier.mixes_plain_rounds = False
    async with Running(verifier, clock) as batcher:
        first = await waiting_for_drafts(batcher, verifier)
        clock.now_s += 0.004
        await asyncio.sleep(0.006)  # the timer is the loop's: it looks again, and 1 ms is left
        assert not first.done()
        clock.now_s += 0.002
        await first
    assert served(verifier) == ["a"]
