"""The engine against the history-free reference: whatever came before, a proposal is what the ids and features say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from cpukernels.ports import Kernels
from drafter import engine as engine_module
from drafter import features as features_module
from drafter.errors import DeviceLost
from drafter.model import DraftModel
from tests.drafter.engine_rig import GREEDY, Rig, Story, stale_all
from tests.drafter.heads import FEATURES, LAYOUTS, TinyHead
from wire.messages import DraftExtend, FeatureSpan
from wire.noise import gumbel_noise
from wire.sampling import SamplingParams
from wire.tensor_ring import TensorRingWriter


@pytest.fixture(params=["host", "device"])
def device(request: pytest.FixtureRequest) -> str | None:
    """Where the head runs: the CPU's own path, or the GPU's path on the CPU."""
    return None if request.param == "host" else "cpu"


@pytest.fixture
def rig(tiny_heads: dict[str, TinyHead], kernels: Kernels, tmp_path: Path, device: str | None) -> Iterator[Rig]:
    rig = Rig(tiny_heads["specforge, embedding from the target"], kernels, tmp_path / "ring", device=device)
    yield rig
    rig.ring.close()


def test_first_message_drafts_from_the_prompt(rig: Rig) -> None:
    story = Story("a", 20)
    assert rig.ids(story.message(rig.ring, 12)) == [story.expected(rig.reference, 12)]


def test_rounds_continue_with_a_plus_one_slots(rig: Rig) -> None:
    """Extend + chain equals recomputation from scratch after any number of rounds with any acceptance."""
    story = Story("a", 40)
    known = 0
    for base_len in (5, 6, 9, 10, 14, 15, 16, 30):
        message = story.message(rig.ring, base_len, start=known, num_draft_tokens=4)
        assert rig.ids(message) == [story.expected(rig.reference, base_len, 4)], base_len
        known = base_len


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rounds_of_every_layout(
    layout: str, tiny_heads: dict[str, TinyHead], kernels: Kernels, tmp_path: Path, device: str | None
) -> None:
    rig, story, known = Rig(tiny_heads[layout], kernels, tmp_path / "ring", device=device), Story("a", 24), 0
    for base_len in (7, 8, 12, 20):
        assert rig.ids(story.message(rig.ring, base_len, start=known)) == [story.expected(rig.reference, base_len)]
        known = base_len


def test_plain_stretches_are_only_stored(rig: Rig) -> None:
    story = Story("a", 40)
    rig.ids(story.message(rig.ring, 6))
    rows = rig.engine.counters["rows"]
    for base_len in range(7, 20):
        assert rig.ids(story.message(rig.ring, base_len, start=base_len - 1, num_draft_tokens=0)) == [()]
    assert rig.engine.counters["rows"] == rows
    assert rig.ids(story.message(rig.ring, 20, start=19)) == [story.expected(rig.reference, 20)]
    assert rig.engine.counters["rows"] == rows + 14 + 2  # 14 pending slots, 2 chain steps


def test_a_batch_is_one_forward_and_equals_single_runs(rig: Rig) -> None:
    """Different lengths and K; requests with smaller K drop out of the chain."""
    stories = [Story(name, 40, seed=index) for index, name in enumerate("abcde")]
    lengths, counts = (4, 17, 9, 30, 2), (1, 5, 3, 8, 2)
    messages = [
        story.message(rig.ring, length, num_draft_tokens=count)
        for story, length, count in zip(stories, lengths, counts, strict=True)
    ]
    expected = [
        story.expected(rig.reference, length, count)
        for story, length, count in zip(stories, lengths, counts, strict=True)
    ]
    assert rig.ids(*messages) == expected
    assert rig.engine.counters["rows"] == sum(lengths) - 5 + sum(counts) - 5


def test_rejected_rows_are_cut(rig: Rig) -> None:
    """A verify result's span is forwarded whole: rows past base_len - 2 belong to rejected drafts."""
    story = Story("a", 40)
    message = story.message(rig.ring, 10, num_rejected=3)
    rejected = message.spans[-1]
    rows = story.features[rejected.start : 12].numpy().copy()
    rows[9 - rejected.start :] = 1e6
    spans = (*message.spans[:-1], FeatureSpan(start=rejected.start, ref=rig.ring.write(rows)))
    assert rig.ids(msgspec.structs.replace(message, spans=spans)) == [story.expected(rig.reference, 10)]
    assert rig.ids(story.message(rig.ring, 13, start=10)) == [story.expected(rig.reference, 13)]


def test_overlapping_ids_and_spans_are_fine(rig: Rig) -> None:
    story = Story("a", 40)
    rig.ids(story.message(rig.ring, 10))
    overlapping = story.message(rig.ring, 14, start=6, features_from=3)
    assert rig.ids(overlapping) == [story.expected(rig.reference, 14)]


def test_spans_already_held_are_not_read(rig: Rig) -> None:
    story = Story("a", 40)
    first = story.message(rig.ring, 10)
    rig.ids(first)
    stale_all(rig, [])
    again = story.message(rig.ring, 12, start=10, features_from=9)
    again = msgspec.structs.replace(again, spans=(*first.spans, *again.spans))
    assert rig.ids(again) == [story.expected(rig.reference, 12)]


def test_asking_again_without_news(rig: Rig) -> None:
    story = Story("a", 40)
    rig.ids(story.message(rig.ring, 10, num_draft_tokens=2))
    again = story.message(rig.ring, 10, start=10, features_from=9, num_draft_tokens=6)
    assert rig.ids(again) == [story.expected(rig.reference, 10, 6)]


def test_rollback_of_changed_ids(rig: Rig) -> None:
    """The last ids turn out otherwise: keys, values and features that rested on them are dropped."""
    story, other = Story("a", 40, seed=1), Story("a", 40, seed=2)
    other.ids[:8], other.features[:8] = story.ids[:8], story.features[:8]
    rig.ids(story.message(rig.ring, 12))
    other.round_id = 1
    message = other.message(rig.ring, 11, start=8, features_from=8)
    assert rig.ids(message) == [other.expected(rig.reference, 11)]


def test_rollback_beyond_the_feature_window_is_a_gap(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Features of long-settled slots are forgotten: changing them needs a re-sync, and is never answered wrongly."""
    monkeypatch.setattr(features_module, "_MAX_FORGOTTEN", 16)
    story, other = Story("a", 60, seed=1), Story("a", 60, seed=2)
    rig.ids(story.message(rig.ring, 50))
    other.ids[:20], other.features[:20] = story.ids[:20], story.features[:20]
    other.round_id = 1
    assert rig.codes(other.message(rig.ring, 30, start=20, features_from=20)) == ["feature_gap"]
    assert rig.ids(other.message(rig.ring, 30)) == [other.expected(rig.reference, 30)]


def test_resync_replaces_the_state(rig: Rig) -> None:
    story, other = Story("a", 40, seed=1), Story("a", 40, seed=2)
    rig.ids(story.message(rig.ring, 12))
    other.round_id = 5
    assert rig.ids(other.message(rig.ring, 9)) == [other.expected(rig.reference, 9)]
    assert rig.engine.counters["resyncs"] == 1


def test_stale_features_then_gap_then_resync(rig: Rig) -> None:
    story = Story("a", 40)
    rig.ids(story.message(rig.ring, 10))
    (late,) = stale_all(rig, [story.message(rig.ring, 14, start=10)])
    assert rig.codes(late) == ["stale_features"]
    assert rig.codes(story.message(rig.ring, 16, start=14, features_from=13)) == ["feature_gap"]
    # Features from where the drafter's own end would do as well as a re-sync from 0.
    assert rig.ids(story.message(rig.ring, 17, start=16, features_from=9)) == [story.expected(rig.reference, 17)]
    assert rig.ids(story.message(rig.ring, 18)) == [story.expected(rig.reference, 18)]


def test_replaced_ring_is_reopened(rig: Rig) -> None:
    story = Story("a", 40)
    old = story.message(rig.ring, 10)
    rig.ring.close()
    rig.ring = TensorRingWriter(rig.ring_path, num_slots=64, slot_bytes=256 * FEATURES * 4)
    assert rig.codes(old) == ["stale_features"]
    assert rig.ids(story.message(rig.ring, 10)) == [story.expected(rig.reference, 10)]


def test_gaps_and_unknown_requests(rig: Rig) -> None:
    story = Story("a", 40)
    assert rig.codes(story.message(rig.ring, 10, start=5)) == ["unknown_request"]
    rig.ids(story.message(rig.ring, 10))
    assert rig.codes(story.message(rig.ring, 15, start=12)) == ["feature_gap"]
    assert rig.codes(story.message(rig.ring, 12, start=10, features_from=11)) == ["feature_gap"]
    short = story.message(rig.ring, 12, start=10)
    assert rig.codes(msgspec.structs.replace(short, spans=())) == ["feature_gap"]
    assert rig.ids(story.message(rig.ring, 12, start=12, features_from=9)) == [story.expected(rig.reference, 12)]


def test_malformed_messages_harm_nobody(rig: Rig) -> None:
    """One batch with every kind of bad request and one good one."""
    good = Story("good", 40)
    wrong_width = FeatureSpan(start=0, ref=rig.ring.write(np.zeros((9, 3), np.float32)))
    malformed = Story("malformed", 40).message(rig.ring, 10)
    ref = msgspec.structs.replace(malformed.spans[0].ref, nbytes=7)
    bad = {
        "length": {"base_len": 11},
        "start": {"start": -1},
        "vocabulary": {"token_ids": (96,) * 10},
        "negative": {"token_ids": (-1,) * 10},
        "width": {"spans": (wrong_width,)},
        "ref": {"spans": (FeatureSpan(start=0, ref=ref),)},
    }
    messages = [
        msgspec.structs.replace(Story(name, 40).message(rig.ring, 10), **change)  # type: ignore[arg-type]
        for name, change in bad.items()
    ]
    replies = rig.run(*messages[:3], good.message(rig.ring, 10), *messages[3:])
    assert [getattr(reply, "code", "ok") for reply in replies] == ["internal"] * 3 + ["ok"] + ["internal"] * 3
    assert getattr(replies[3], "draft_ids") == good.expected(rig.reference, 10)  # noqa: B009 - of a union


def test_nan_features_harm_only_their_own_request(rig: Rig) -> None:
    good, bad = Story("good", 40), Story("bad", 40)
    bad.features[:] = torch.nan
    replies = rig.run(bad.message(rig.ring, 10), good.message(rig.ring, 10))
    assert getattr(replies[1], "draft_ids") == good.expected(rig.reference, 10)  # noqa: B009 - of a union


def test_context_limit(rig: Rig) -> None:
    story = Story("a", 300)
    assert len(rig.ids(story.message(rig.ring, 254, num_draft_tokens=8))[0]) == 2
    assert rig.ids(story.message(rig.ring, 256, start=254)) == [()]
    assert rig.codes(story.message(rig.ring, 257, start=256)) == ["context_limit"]


def test_more_drafts_than_allowed_are_cut(rig: Rig) -> None:
    story = Story("a", 40)
    assert rig.ids(story.message(rig.ring, 10, num_draft_tokens=50)) == [story.expected(rig.reference, 10, 8)]


def test_one_committed_token_has_nothing_to_draft_from(rig: Rig) -> None:
    assert rig.ids(Story("a", 40).message(rig.ring, 1)) == [()]


def test_queued_messages_of_one_request_are_all_applied(rig: Rig) -> None:
    story, other = Story("a", 40), Story("b", 40)
    messages = [story.message(rig.ring, 8), story.message(rig.ring, 11, start=8), story.message(rig.ring, 12, start=11)]
    replies = rig.ids(messages[0], other.message(rig.ring, 9), *messages[1:])
    assert replies == [(), other.expected(rig.reference, 9), (), story.expected(rig.reference, 12)]
    assert rig.engine.counters["superseded"] == 2


def test_a_queued_resync_skips_what_came_before(rig: Rig) -> None:
    story = Story("a", 40)
    broken = story.message(rig.ring, 11, start=8)
    sampled = msgspec.structs.replace(broken, sampling=SamplingParams(temperature=0.7, seed=3))
    resync = story.message(rig.ring, 12, sampling=None)
    assert rig.codes(sampled, resync) == ["ok", "ok"]
    assert rig.engine._states["a"].sampling.seed == 3


def test_least_recently_used_states_go_first(rig: Rig) -> None:
    stories = [Story(f"r{index}", 40, seed=index) for index in range(8)]
    rig.ids(*(story.message(rig.ring, 6) for story in stories))
    rig.ids(stories[0].message(rig.ring, 7, start=6))
    rig.ids(Story("new", 40).message(rig.ring, 6), Story("newer", 40).message(rig.ring, 6))
    assert rig.engine.num_requests == 8
    assert rig.engine.counters["evicted"] == 2
    assert rig.codes(stories[1].message(rig.ring, 7, start=6)) == ["unknown_request"]
    assert rig.codes(stories[0].message(rig.ring, 8, start=7)) == ["ok"]


def test_close_frees_the_state(rig: Rig) -> None:
    story = Story("a", 40)
    rig.ids(story.message(rig.ring, 6))
    rig.engine.close("a")
    rig.engine.close("never seen")
    assert rig.engine.num_requests == 0
    assert rig.codes(story.message(rig.ring, 7, start=6)) == ["unknown_request"]


def test_long_prompts_are_read_in_pieces(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "_MAX_ROWS", 16)
    stories = [Story("a", 200, seed=1), Story("b", 60, seed=2)]
    messages = [stories[0].message(rig.ring, 150), stories[1].message(rig.ring, 40)]
    expected = [stories[0].expected(rig.reference, 150), stories[1].expected(rig.reference, 40)]
    assert rig.ids(*messages) == expected
    assert rig.ids(stories[0].message(rig.ring, 151, start=150)) == [stories[0].expected(rig.reference, 151)]


def test_a_failing_forward_answers_everyone_and_recovers(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story("a", 40)
    with monkeypatch.context() as patch:
        patch.setattr(rig.model, "fuse", lambda _features: 1 / 0)
        assert rig.codes(story.message(rig.ring, 6), Story("b", 40).message(rig.ring, 6)) == ["internal", "internal"]
    assert rig.codes(story.message(rig.ring, 7, start=6)) == ["unknown_request"]
    assert rig.ids(story.message(rig.ring, 7)) == [story.expected(rig.reference, 7)]


def test_a_full_gpu_fails_the_batch_and_recovers(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests outside the batch lose their state too: their caches are what there is to free."""
    if isinstance(rig.model, DraftModel):
        pytest.skip("the CPU's own path")
    story, waits = Story("a", 40), Story("waits", 40)
    rig.ids(waits.message(rig.ring, 6))
    with monkeypatch.context() as patch:
        patch.setattr(rig.model, "fuse", _raise(torch.OutOfMemoryError("CUDA out of memory")))
        assert rig.codes(story.message(rig.ring, 6), Story("b", 40).message(rig.ring, 6)) == ["out_of_memory"] * 2
    assert rig.codes(waits.message(rig.ring, 7, start=6)) == ["unknown_request"]
    assert rig.ids(story.message(rig.ring, 7)) == [story.expected(rig.reference, 7)]


def test_a_lost_gpu_ends_the_process(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    if isinstance(rig.model, DraftModel):
        pytest.skip("the CPU's own path")
    monkeypatch.setattr(rig.model, "fuse", _raise(torch.AcceleratorError("CUDA error: an illegal memory access")))
    with pytest.raises(DeviceLost, match="illegal memory access"):
        rig.run(Story("a", 40).message(rig.ring, 6))


def _raise(error: Exception) -> Callable[..., None]:
    def fail(*_arguments: object) -> None:
        raise error

    return fail


def test_shared_noise_is_the_targets_noise_of_the_guessed_position(rig: Rig) -> None:
    story, sampling = Story("a", 40), SamplingParams(temperature=0.8, seed=11)

    def choose(logits: torch.Tensor, position: int) -> int:
        ids = np.asarray(rig.model.target_ids)
        noisy = logits.double().numpy() / 0.8 + gumbel_noise(11, position, ids)
        return int(np.argmax(noisy))

    expected = tuple(rig.reference.draft(story.features, story.ids[:10], 5, choose)[0])
    assert expected != story.expected(rig.reference, 10, 5)
    message = story.message(rig.ring, 10, num_draft_tokens=5, sampling=sampling)
    assert rig.ids(message) == [expected]


def test_without_shared_noise_sampling_requests_get_greedy_guesses(
    tiny_heads: dict[str, TinyHead], kernels: Kernels, tmp_path: Path, device: str | None
) -> None:
    rig = Rig(tiny_heads["speculators"], kernels, tmp_path / "ring", device=device, shared_noise=False)
    story = Story("a", 40)
    message = story.message(rig.ring, 10, sampling=SamplingParams(temperature=0.8, seed=11))
    assert rig.ids(message) == [story.expected(rig.reference, 10)]


def test_random_histories_never_change_a_proposal(rig: Rig) -> None:
    """Three requests, random acceptance, plain stretches, closes and re-syncs: always what the reference says."""
    random = np.random.default_rng(0)
    stories = [Story(name, 90, seed=10 + index) for index, name in enumerate("xyz")]
    known = dict.fromkeys("xyz", 0)
    for _ in range(40):
        messages: list[DraftExtend] = []
        expected: list[tuple[int, ...]] = []
        for story in stories:
            held = known[story.request_id]
            if held == 0 or random.random() < 0.1 or held > 80:
                held, base_len = 0, int(random.integers(2, 12))
            elif random.random() < 0.3:
                continue
            else:
                base_len = held + int(random.integers(1, 5))
            count = int(random.integers(0, 5))
            messages.append(story.message(rig.ring, base_len, start=held, num_draft_tokens=count, sampling=GREEDY))
            expected.append(story.expected(rig.reference, base_len, count))
            known[story.request_id] = base_len
        assert rig.ids(*messages) == expected
