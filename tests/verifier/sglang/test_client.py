"""The client against a faithful fake engine over real HTTP."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.verifier.sglang import toy_model
from verifier.sglang.plugin.announcement import first_wanted
from wire.errors import PeerLate, PeerLost
from wire.messages import VerifyFailed, VerifyResult
from wire.sampling import Grammar, SamplingParams
from wire.tensor_ring import TensorRingReader

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
SAMPLED = SamplingParams(temperature=1.0, seed=11)


async def test_prompt_verify_and_plain_are_the_models_own(make_rig: Any) -> None:
    rig = await make_rig()
    expected = toy_model.greedy(PROMPT, 12)
    rig.open("a", PROMPT)
    await rig.one("a", features_from=0)
    await rig.one("a", expected[1:4], features_from=len(PROMPT))  # three right drafts
    assert rig.ids["a"] == PROMPT + expected[:5]
    await rig.one("a", [expected[5], 0, 0])  # one right draft
    await rig.one("a")
    await rig.one("a")
    assert rig.ids["a"] == PROMPT + expected[:9]
    counters = rig.client.counters
    assert counters["cached_tokens_differ"] == 0
    assert (counters["posts"], counters["streams"]) == (3, 1)


async def test_all_waiting_requests_are_one_post(make_rig: Any) -> None:
    rig = await make_rig()
    prompts = {f"r{i}": [i + 1, 2, 3] for i in range(6)}
    for name, prompt in prompts.items():
        rig.open(name, prompt)
        await rig.one(name, features_from=0)
    before = len(rig.engine.posts)
    drafts = {name: toy_model.greedy(rig.ids[name], 2) for name in prompts}
    results = await rig.verify(*(rig.item(name, drafts[name]) for name in prompts))
    assert len(rig.engine.posts) == before + 1
    for result in results:
        rig.commit(result, drafts[result.request_id])
    for name, prompt in prompts.items():
        assert rig.ids[name] == prompt + toy_model.greedy(prompt, 4)
    body = rig.engine.posts[-1]
    assert body["logprob_start_len"] == [3] * 6
    assert {params["max_new_tokens"] for params in body["sampling_params"]} == {1}
    assert len(set(body["rid"])) == 6


async def test_plain_rounds_read_one_stream_and_a_draft_ends_it(make_rig: Any) -> None:
    rig = await make_rig(token_delay_s=0.001)
    rig.open("a", PROMPT)
    for _ in range(5):
        await rig.one("a")
    assert rig.ids["a"] == PROMPT + toy_model.greedy(PROMPT, 5)
    assert len(rig.engine.streams) == 1
    rid = rig.engine.streams[0]["rid"]
    await rig.one("a", toy_model.greedy(rig.ids["a"], 2))
    await asyncio.sleep(0.05)
    assert rid in rig.engine.aborted
    await rig.one("a")  # plain again: a new stream from where we are
    assert rig.engine.streams[1]["input_ids"] == rig.ids["a"][:-1]
    assert rig.ids["a"] == PROMPT + toy_model.greedy(PROMPT, 9)
    assert rig.client.counters["stream_switches"] == 1
    assert rig.client.counters["cached_tokens_differ"] == 0  # the verify found what the stream had computed


@pytest.mark.parametrize("is_incremental", [False, True])
async def test_stream_chunks_may_be_cumulative_or_not(make_rig: Any, is_incremental: bool) -> None:
    rig = await make_rig(is_incremental=is_incremental)
    rig.open("a", PROMPT)
    for _ in range(20):
        result = await rig.one("a", num_logprobs=2)
        assert result.logprobs is not None
        (entry,) = result.logprobs
        expected = toy_model.logprobs(rig.ids["a"][:-1])
        assert entry.token_id == rig.ids["a"][-1]
        assert entry.logprob == pytest.approx(expected[entry.token_id])
        assert [top.logprob for top in entry.top] == pytest.approx(sorted(expected, reverse=True)[:2])
    assert rig.ids["a"] == PROMPT + toy_model.greedy(PROMPT, 20)


async def test_stream_that_no_longer_continues_is_replaced(make_rig: Any) -> None:
    rig = await make_rig()
    rig.open("a", PROMPT)
    await rig.one("a")
    await asyncio.sleep(0.05)  # it has read ahead
    rig.ids["a"][-1] = (rig.ids["a"][-1] + 1) % toy_model.VOCAB_SIZE  # the gateway committed something else
    await rig.one("a")
    assert rig.ids["a"][-1:] == toy_model.greedy(rig.ids["a"][:-1], 1)
    assert rig.client.counters["streams"] == 2


@pytest.mark.parametrize("token_delay_s", [0.0, 0.002])
async def test_a_used_up_stream_is_followed_by_the_next(make_rig: Any, token_delay_s: float) -> None:
    """The engine admits by what a request may still produce: long streams would keep the others waiting."""
    rig = await make_rig(sglang={"stream_tokens": 4}, token_delay_s=token_delay_s)
    rig.open("a", PROMPT)
    for _ in range(10):
        await rig.one("a")
    assert rig.ids["a"] == PROMPT + toy_model.greedy(PROMPT, 10)
    assert [stream["sampling_params"]["max_new_tokens"] for stream in rig.engine.streams] == [4, 4, 4]
    rig.open("b", PROMPT, SamplingParams(temperature=0.0, frequency_penalty=0.5))
    await rig.one("b")
    room = rig.engine.context_len - len(PROMPT)  # its penalties follow the engine's own output: one stream for all
    assert rig.engine.streams[-1]["sampling_params"]["max_new_tokens"] == room


async def test_closing_a_request_aborts_its_stream_at_once(make_rig: Any) -> None:
    rig = await make_rig(token_delay_s=0.01)
    rig.open("a", PROMPT)
    await rig.one("a")
    rig.client.close_request("a")
    await asyncio.sleep(0.08)
    assert rig.engine.aborted == [rig.engine.streams[0]["rid"]]
    assert not rig.engine.running


async def test_closing_a_request_aborts_its_running_prompt(make_rig: Any) -> None:
    rig = await make_rig(reply_delay_s=0.2)
    rig.open("a", PROMPT)
    waiting = asyncio.create_task(rig.verify(rig.item("a", features_from=0)))
    await asyncio.sleep(0.05)
    rig.client.close_request("a")
    (result,) = await waiting
    assert isinstance(result, VerifyFailed)
    assert result.code == "aborted"
    assert rig.engine.aborted == rig.engine.posts[0]["rid"]


async def test_features_are_those_of_the_positions(make_rig: Any) -> None:
    rig = await make_rig()
    rig.open("a", PROMPT)

    def rows(result: VerifyResult) -> tuple[int, np.ndarray]:
        reader = TensorRingReader(rig.ring_path)
        parts = [reader.read(span.ref) for span in result.spans]
        reader.close()
        return result.spans[0].start, np.concatenate(parts)

    start, features = rows(await rig.one("a", features_from=0))
    assert (start, len(features)) == (0, len(PROMPT))
    np.testing.assert_array_equal(features, [toy_model.features(PROMPT, p) for p in range(len(PROMPT))])
    for _ in range(6):  # a plain stretch, without features
        assert (await rig.one("a")).spans == ()
    base = len(rig.ids["a"])
    result = await rig.one("a", features_from=len(PROMPT))  # re-sync beside the stream
    start, features = rows(result)
    assert (start, start + len(features)) == (len(PROMPT), base)
    assert rig.ids["a"] == PROMPT + toy_model.greedy(PROMPT, 8)
    assert rig.client.counters["streams"] == 1  # it goes on
    start, features = rows(await rig.one("a", [7, 7], features_from=base))
    assert (start, len(features)) == (base, 3)
    assert first_wanted(rig.engine.posts[-1]["rid"][0]) == base


def tapped(tmp_path: Path, **settings: Any) -> dict[str, Any]:
    sglang = {"tap_ring_path": str(tmp_path / "ring"), "tap_socket_path": str(tmp_path / "tap.sock"), **settings}
    return {"tap": tmp_path, "sglang": sglang}


def positions(result: VerifyResult) -> list[int]:
    return [position for span in result.spans for position in range(span.start, span.start + span.ref.shape[0])]


async def test_a_stream_brings_the_plugins_features_without_a_pass_of_their_own(make_rig: Any, tmp_path: Path) -> None:
    rig = await make_rig(**tapped(tmp_path))
    rig.open("a", PROMPT)
    assert positions(await rig.one("a", features_from=0)) == list(range(len(PROMPT)))
    # No stream yet: one is opened, and its first pass computes the newest committed position.
    assert positions(await rig.one("a", features_from=len(PROMPT))) == [len(PROMPT)]
    for _ in range(3):
        assert (await rig.one("a")).spans == ()
    base = len(rig.ids["a"])
    result = await rig.one("a", features_from=len(PROMPT) + 1)
    assert positions(result) == list(range(len(PROMPT) + 1, base))
    reader = TensorRingReader(tmp_path / "ring")
    rows = [reader.read(span.ref)[0].tolist() for span in result.spans]
    reader.close()
    assert rows == [toy_model.features(rig.ids["a"], position) for position in positions(result)]
    assert rig.client.counters["posts"] == 1  # the prompt's
    assert rig.client.counters["streams"] == 1
    # From further back than the stream began: computed again.
    assert positions(await rig.one("a", features_from=0)) == list(range(base + 1))
    assert rig.client.counters["posts"] == 2
    assert rig.ids["a"] == PROMPT + toy_model.greedy(PROMPT, 7)


async def test_while_rounds_are_plain_a_prompt_opens_the_stream_that_goes_on(make_rig: Any, tmp_path: Path) -> None:
    rig = await make_rig(**tapped(tmp_path))
    for name in ("a", "b"):
        rig.open(name, PROMPT)
        assert positions(await rig.one(name, features_from=0)) == list(range(len(PROMPT)))
        await rig.one(name)
        assert positions(await rig.one(name, features_from=len(PROMPT))) == [len(PROMPT), len(PROMPT) + 1]
        assert rig.ids[name] == PROMPT + toy_model.greedy(PROMPT, 3)
    counters = rig.client.counters
    assert (counters["posts"], counters["streams"]) == (1, 2)  # b's prompt, computed whole, was its stream's own
    await rig.one("b", [1, 2], features_from=len(rig.ids["b"]) - 1)
    assert counters["cached_tokens_differ"] == 0
    rig.open("c", PROMPT)
    await rig.one("c", features_from=0)  # the newest round drafted: a stream would be ended at once
    assert (counters["posts"], counters["streams"]) == (3, 2)


async def test_what_a_stream_did_not_bring_is_posted_for_and_the_stream_followed_again(
    make_rig: Any, tmp_path: Path
) -> None:
    rig = await make_rig(taps_streams=False, token_delay_s=0.01, **tapped(tmp_path, tap_timeout_s=0.02))
    rig.open("a", PROMPT)
    await rig.one("a", features_from=0)
    begin = len(PROMPT)
    assert (await rig.one("a", features_from=begin)).spans == ()
    assert rig.client.counters["streamed_feature_gaps"] == 1
    rig.engine.taps_streams = True
    assert positions(await rig.one("a", features_from=begin)) == [begin, begin + 1]
    assert rig.client.counters["posts"] == 2
    await rig.one("a")
    assert positions(await rig.one("a", features_from=begin + 2)) == [begin + 2, begin + 3]
    assert rig.client.counters["posts"] == 2
    assert rig.ids["a"] == PROMPT + toy_model.greedy(PROMPT, 5)


async def test_a_plugin_that_never_taps_streams_is_waited_for_three_times(make_rig: Any, tmp_path: Path) -> None:
    rig = await make_rig(taps_streams=False, **tapped(tmp_path, tap_timeout_s=0.02))
    rig.open("a", PROMPT)
    held = len(positions(await rig.one("a", features_from=0)))
    for _ in range(10):
        held += len(positions(await rig.one("a", features_from=held)))
    assert held >= len(rig.ids["a"]) - 2
    assert rig.client.counters["streamed_feature_gaps"] == 3
    assert rig.ids["a"] == PROMPT + toy_model.greedy(PROMPT, 11)


async def test_prompts_with_features_are_computed_whole_and_others_share_the_cache(make_rig: Any) -> None:
    rig = await make_rig()
    for name in ("a", "b"):
        rig.open(name, PROMPT)
        result = await rig.one(name, features_from=0)
        assert (result.cached_len, sum(span.ref.shape[0] for span in result.spans)) == (0, len(PROMPT))
        await rig.one(name, [1, 2], features_from=len(PROMPT))
    assert rig.engine.posts[0]["logprob_start_len"] == [len(PROMPT) - 1]  # no logits for the whole prompt
    for name, cached in (("c", 0), ("d", len(PROMPT) - 1)):
        rig.open(name, PROMPT)
        assert (await rig.one(name)).cached_len == cached
        rig.client.close_request(name)
        await asyncio.sleep(0.05)
    assert rig.client.counters["cached_tokens_differ"] == 0


async def test_features_lost_in_a_chunked_prompt_are_not_asked_for_again(make_rig: Any) -> None:
    rig = await make_rig(chunk_len=4)
    rig.open("a", PROMPT)
    assert (await rig.one("a", features_from=0)).spans == ()
    assert rig.client.counters["feature_gaps"] == 1
    for _ in range(3):
        await rig.one("a", features_from=0)
    assert rig.client.counters["posts"] == 1
    assert rig.ids["a"] == PROMPT + toy_model.greedy(PROMPT, 4)


async def test_echo_scores_the_prompt(make_rig: Any) -> None:
    rig = await make_rig()
    rig.open("a", PROMPT)
    result = await rig.one("a", score_prompt=True, num_logprobs=1)
    assert result.prompt_logprobs is not None
    own = [entry.logprob for entry in result.prompt_logprobs]
    assert own == pytest.approx([toy_model.logprobs(PROMPT[:p])[PROMPT[p]] for p in range(1, len(PROMPT))])


async def test_one_bad_item_never_fails_the_others(make_rig: Any) -> None:
    rig = await make_rig(context_len=16)
    for name in ("long", "bad", "good"):
        rig.open(name, PROMPT)
        await rig.one(name, features_from=0)
    rig.ids["long"] = rig.ids["long"] + [1] * 5  # 14 committed: room for one draft
    results = await rig.verify(
        rig.item("long", [1, 1]), rig.item("bad", [toy_model.VOCAB_SIZE]), rig.item("good", [1, 1])
    )
    assert isinstance(results[0], VerifyFailed)
    assert results[0].code == "context_limit"
    assert isinstance(results[1], VerifyFailed)
    assert results[1].code == "invalid_token"
    assert isinstance(results[2], VerifyResult)


async def test_a_batch_refused_as_a_whole_is_asked_one_by_one(make_rig: Any) -> None:
    rig = await make_rig()
    for name in ("a", "b"):
        rig.open(name, PROMPT)
        await rig.one(name, features_from=0)
    one_bad: list[tuple[int, Any]] = [(400, {"error": {"message": "token id out of vocabulary"}})]
    rig.engine.refusals = one_bad * 2  # the batch, then one of the two
    results = await rig.verify(rig.item("a", [1]), rig.item("b", [1]))
    assert sorted(type(result).__name__ for result in results) == ["VerifyFailed", "VerifyResult"]
    assert rig.client.counters["batch_splits"] == 1


@pytest.mark.parametrize(("length", "is_ok"), [(14, True), (15, True), (16, False), (17, False)])
async def test_context_limit_to_the_token(make_rig: Any, length: int, is_ok: bool) -> None:
    rig = await make_rig(context_len=16)
    for features_from in (None, 0):
        name = f"r{features_from}"
        rig.open(name, [1] * length)
        (result,) = await rig.verify(rig.item(name, features_from=features_from))
        assert isinstance(result, VerifyResult) == is_ok
        if not is_ok:
            assert isinstance(result, VerifyFailed)
            assert result.code == "context_limit"


@pytest.mark.parametrize("form", ["503", "inside_200"])
@pytest.mark.parametrize("features_from", [None, 0])
async def test_overload_is_tried_again_then_unavailable(make_rig: Any, form: str, features_from: int | None) -> None:
    rig = await make_rig(sglang={"overload_retries": 1}, overload_form=form)
    rig.open("a", PROMPT)
    rig.engine.overloads = 1
    (result,) = await rig.verify(rig.item("a", features_from=features_from))
    if features_from is None:  # a stream is not tried again
        assert isinstance(result, VerifyFailed)
        assert result.code == "unavailable"
    else:
        assert isinstance(result, VerifyResult)
    rig.engine.overloads = 3
    rig.open("b", PROMPT)
    (result,) = await rig.verify(rig.item("b", features_from=0))
    assert isinstance(result, VerifyFailed)
    assert result.code == "unavailable"


async def test_a_batch_refused_for_load_is_asked_again_under_fresh_rids(make_rig: Any) -> None:
    """Of a refused batch some items run on in the engine, which takes none of their rids a second time."""
    rig = await make_rig()
    for name in ("a", "b", "c"):
        rig.open(name, PROMPT)
        await rig.one(name, features_from=0)
    rig.engine.overloads = 1
    results = await rig.verify(*(rig.item(name, [1], features_from=len(PROMPT)) for name in ("a", "b", "c")))
    assert all(isinstance(result, VerifyResult) and result.spans for result in results)
    rids = [rid for body in rig.engine.posts for rid in body["rid"]]
    assert len(set(rids)) == len(rids)
    assert set(rig.engine.aborted) == set(rig.engine.posts[-4]["rid"])
    assert {first_wanted(body["rid"][0]) for body in rig.engine.posts[-3:]} == {len(PROMPT)}


async def test_late_reply_is_late_and_aborted(make_rig: Any) -> None:
    rig = await make_rig(reply_delay_s=0.3)
    rig.open("a", PROMPT)
    with pytest.raises(PeerLate):
        await rig.verify(rig.item("a", features_from=0), timeout_s=0.05)
    await asyncio.sleep(0.05)
    assert rig.engine.aborted == rig.engine.posts[0]["rid"]


async def test_engine_death_and_return(make_rig: Any, tmp_path: Any) -> None:
    rig = await make_rig(reply_delay_s=0.5)
    rig.open("a", PROMPT)
    waiting = asyncio.create_task(rig.verify(rig.item("a", features_from=0)))
    await asyncio.sleep(0.05)
    rig.client.peer_lost("gone")
    with pytest.raises(PeerLost):
        await waiting
    with pytest.raises(PeerLost):
        await rig.verify(rig.item("a"))
    await rig.engine.stop()
    await rig.client.connect(timeout_s=1.0)
    status = await rig.client.status(timeout_s=1.0)
    assert not status.is_ready
    assert "waiting for SGLang" in status.phase
    rig.engine.reply_delay_s = 0.0
    await rig.engine.start(tmp_path, rig.engine.port)
    assert (await rig.client.status(timeout_s=1.0)).is_ready
    rig.open("b", PROMPT)
    await rig.one("b", features_from=0)
    (result,) = await rig.verify(rig.item("a"))  # from before: the new engine knows nothing of it
    assert isinstance(result, VerifyFailed)
    assert result.code == "unknown_request"


async def test_dead_engine_is_noticed_by_status_and_by_verify(make_rig: Any) -> None:
    rig = await make_rig()
    await rig.engine.stop()
    with pytest.raises(PeerLost):
        await rig.client.status(timeout_s=1.0)
    rig.open("a", PROMPT)
    with pytest.raises(PeerLost):
        await rig.verify(rig.item("a", features_from=0))


async def test_death_in_the_middle_of_post_and_streams_is_one_peer_error(make_rig: Any) -> None:
    rig = await make_rig(token_delay_s=0.05)
    for name in ("stream", "post"):
        rig.open(name, PROMPT)
        await rig.one(name, features_from=None if name == "stream" else 0)
    rig.engine.reply_delay_s = rig.engine.token_delay_s = 1.0
    waiting = asyncio.create_task(rig.verify(rig.item("stream"), rig.item("post", [1])))
    await asyncio.sleep(0.1)
    await rig.client._http.close()  # all connections break
    with pytest.raises(PeerLost):
        await waiting


async def test_broken_stream_fails_its_request(make_rig: Any) -> None:
    rig = await make_rig(break_streams_after=2)
    rig.open("a", PROMPT)
    await rig.one("a")
    await rig.one("a")
    with pytest.raises(PeerLost):
        await rig.one("a")


async def test_replaced_weights_fail_old_answers_only(make_rig: Any) -> None:
    rig = await make_rig()
    rig.open("old", PROMPT)
    await rig.one("old", features_from=0)
    rig.engine.weight_version = "v2"
    rig.open("new", PROMPT)
    old, new = await rig.verify(rig.item("old", [1]), rig.item("new", features_from=0))
    assert isinstance(old, VerifyFailed)
    assert old.code == "weights_changed"
    assert isinstance(new, VerifyResult)
    await rig.client.status(timeout_s=1.0)
    assert rig.client.counters["weight_changes"] == 2


async def test_unreadable_reply_is_a_typed_error(make_rig: Any) -> None:
    rig = await make_rig()
    for body in ({"what": 1}, [], [{"meta_info": {}}]):
        rig.engine.refusals = [(200, body)] * 2
        rig.open("a", PROMPT)
        (result,) = await rig.verify(rig.item("a", features_from=0))
        assert isinstance(result, VerifyFailed)
        assert result.code == "target_error"
        rig.engine.refusals = []


async def test_unverifiable_sampling_stays_with_one_stream_and_is_exact_even_with_drafts(make_rig: Any) -> None:
    rig = await make_rig()
    forced = SamplingParams(temperature=0.0, logit_bias=((7, 1000.0),))
    assert rig.client.can_verify(forced) == "logit_bias"
    rig.open("a", PROMPT, forced)
    await rig.one("a", features_from=0)
    result = await rig.one("a", [7, 7, 9], features_from=0)
    assert result.target_ids == (7, 7, 7, 7)
    assert rig.ids["a"] == [*PROMPT, 7, 7, 7, 7]
    await rig.one("a")
    assert len(rig.engine.streams) == 1
    assert not rig.engine.posts
    assert rig.client.counters["plain_logit_bias"] == 1


async def test_a_lost_stream_is_not_taken_up_where_the_output_matters(make_rig: Any) -> None:
    rig = await make_rig()
    rig.open("a", PROMPT, SamplingParams(temperature=0.0, frequency_penalty=0.5))
    await rig.one("a")
    rig.ids["a"][-1] = (rig.ids["a"][-1] + 1) % toy_model.VOCAB_SIZE
    (result,) = await rig.verify(rig.item("a"))
    assert isinstance(result, VerifyFailed)
    assert result.code == "target_error"


@pytest.mark.parametrize(("kind", "is_ok"), [("json_schema", True), ("regex", True), ("lark", False)])
async def test_grammars_go_to_the_engine(make_rig: Any, kind: Any, is_ok: bool) -> None:
    rig = await make_rig()
    rig.open("a", PROMPT, SamplingParams(temperature=0.0, grammar=Grammar(kind=kind, text="x")))
    (result,) = await rig.verify(rig.item("a", features_from=0))
    assert isinstance(result, VerifyResult) == is_ok
    if is_ok:
        assert rig.engine.streams[0]["sampling_params"][kind] == "x"
    else:
        assert result.code == "invalid_grammar"


async def test_same_seed_same_text_whatever_is_drafted(make_rig: Any) -> None:
    rig = await make_rig(sglang={"plain_sampling": "shared_noise", "top_logprobs_num": 8})
    texts = []
    for name, width in (("plain", 0), ("two", 2), ("five", 5)):
        rig.open(name, PROMPT, SAMPLED)
        await rig.one(name, features_from=0)
        while len(rig.ids[name]) < 40:
            await rig.one(name, texts[0][len(rig.ids[name]) :][:width] if texts and width else ())
        texts.append(rig.ids[name][:40])
    assert texts[0] == texts[1] == texts[2]
    assert rig.client.counters["widened_positions"] > 0


async def test_untold_request_is_refused(make_rig: Any) -> None:
    rig = await make_rig()
    rig.open("a", PROMPT)
    item = msgspec.structs.replace(rig.item("a"), start=3, token_ids=tuple(PROMPT[3:]), sampling=None)
    (result,) = await rig.verify(item)
    assert isinstance(result, VerifyFailed)
    assert result.code == "unknown_request"


async def test_old_engine_without_features_says_so(make_rig: Any) -> None:
    rig = await make_rig(captures_aux=False, version="0.5.9")
    status = await rig.client.status(timeout_s=1.0)
    assert status.verifier is not None
    assert status.verifier.aux_layer_ids == ()
    rig.open("a", PROMPT)
    assert (await rig.one("a", features_from=0)).spans == ()
    assert rig.engine.streams  # nothing to fetch, so nothing is posted


async def test_prompts_make_a_pass_unclean(make_rig: Any) -> None:
    rig = await make_rig()
    rig.open("a", PROMPT)
    reply = await rig.client.verify((rig.item("a", features_from=0),), timeout_s=2.0)
    assert reply.num_prefill_rows > 0
    rig.ids["a"].extend(reply.results[0].target_ids)
    reply = await rig.client.verify((rig.item("a", [1, 2]),), timeout_s=2.0)
    assert reply.num_prefill_rows == 0
    assert reply.forward_s > 0
