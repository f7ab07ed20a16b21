"""The client with the plugin's draws, over real HTTP: the fake engine runs the plugin's own hooks."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio

from tests.verifier.sglang import toy_model
from verifier.embedded.sampling import TokenSampler
from verifier.sglang.plugin.draws import TargetDraws
from verifier.sglang.plugin.lane_messages import LaneAnswers, LaneCall, unpack_ids
from verifier.sglang.plugin.orders import PluginReport
from wire.messages import VerifyFailed, VerifyResult
from wire.sampling import Grammar, SamplingParams

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=11)
PENALISED = SamplingParams(
    temperature=1.4, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2, logit_bias=((7, 1.5),), seed=8
)


def plugin(**report: Any) -> TargetDraws:
    return TargetDraws(lambda: PluginReport(**({"on": ("tap", "target_ids")} | report)))


def expected(params: SamplingParams, num: int) -> list[int]:
    """What the embedded engine would write: its sampler on the same model."""
    sampler = TokenSampler(params, vocab_size=toy_model.VOCAB_SIZE, prompt_len=len(PROMPT))
    ids = list(PROMPT)
    while len(ids) < len(PROMPT) + num:
        ids += sampler.choose(np.stack([toy_model.logits(ids)]), ids, ())
    return ids


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SAMPLED, PENALISED], ids=["greedy", "T", "penal"])
async def test_one_seed_one_text_drafted_plain_and_mixed_and_the_embedded_engines(
    make_rig: Any, params: SamplingParams
) -> None:
    rig = await make_rig(draws=plugin())
    text = expected(params, 30)
    assert rig.client.can_verify(params) is None
    for name, widths in (("plain", [0]), ("drafted", [3]), ("mixed", [0, 0, 2, 5, 0])):
        rig.open(name, PROMPT, params)
        await rig.one(name, features_from=0 if name != "plain" else None)
        turn = 0
        while len(rig.ids[name]) < len(text):
            at, width = len(rig.ids[name]), widths[turn % len(widths)]
            drafts = text[at : at + width]
            if len(drafts) > 1 and turn % 2:
                drafts[-1] = (drafts[-1] + 1) % toy_model.VOCAB_SIZE  # a wrong one
            await rig.one(name, drafts)
            turn += 1
        assert rig.ids[name][: len(text)] == text
        rig.client.close_request(name)
    counters = rig.client.counters
    assert counters["drawn_ids"] > 30
    assert (counters["widened_positions"], counters["cut_rounds"]) == (0, 0)
    assert all(top == 0 for body in rig.engine.posts for top in body["top_logprobs_num"])


async def test_logprobs_are_raw_in_every_kind_of_round(make_rig: Any) -> None:
    rig = await make_rig(draws=plugin())
    rig.open("a", PROMPT, SAMPLED)
    for num_top in (0, 2):
        for drafts in ([], [5, 5]):
            before = list(rig.ids["a"])
            (result,) = await rig.verify(rig.item("a", drafts, num_logprobs=num_top))
            assert isinstance(result, VerifyResult)
            assert result.logprobs is not None
            for index, entry in enumerate(result.logprobs):
                raw = toy_model.logprobs(before + drafts[:index])
                assert entry.token_id == result.target_ids[index]
                assert entry.logprob == pytest.approx(raw[entry.token_id], abs=1e-5)
                assert len(entry.top) == num_top
            rig.commit(result, drafts)


async def test_drafts_cut_into_two_passes_are_asked_again(make_rig: Any) -> None:
    rig = await make_rig(draws=plugin())
    rig.open("a", PROMPT, SAMPLED)
    await rig.one("a", features_from=0)
    text = expected(SAMPLED, 12)
    at = len(rig.ids["a"])
    rig.engine.cuts_after = at + 1
    # Features from far back make the extend a long one.
    result = await rig.one("a", text[at : at + 3], features_from=2)
    assert rig.ids["a"] == text[: at + 4]
    assert rig.client.counters["cut_rounds"] == 1
    assert sum(span.ref.shape[0] for span in result.spans) == at + 3 - 2


async def test_a_grammar_stays_with_the_engine(make_rig: Any) -> None:
    rig = await make_rig(draws=plugin())
    params = SamplingParams(temperature=0.8, grammar=Grammar(kind="regex", text="x"))
    assert rig.client.can_verify(params) == "grammar"
    rig.open("a", PROMPT, params)
    await rig.one("a")
    assert "custom_params" not in rig.engine.streams[0]["sampling_params"]


@pytest.mark.parametrize("drafts", [[], [1, 2]], ids=["stream", "post"])
async def test_draws_that_ended_are_an_error_and_never_taken_for_draws(make_rig: Any, drafts: list[int]) -> None:
    rig = await make_rig(draws=plugin())
    rig.open("a", PROMPT, SAMPLED)
    await rig.one("a", features_from=0)
    rig.engine.draws._is_broken = True
    (result,) = await rig.verify(rig.item("a", drafts))
    assert isinstance(result, VerifyFailed)
    assert (result.code, "did not draw" in result.message) == ("target_error", True)


@pytest.mark.parametrize(
    ("draws", "sglang"),
    [(None, {}), (plugin(on=("tap",)), {}), (plugin(), {"target_ids": "off"})],
    ids=["no plugin", "hook gone", "not wanted"],
)
async def test_without_the_capability_ids_are_chosen_from_lists(make_rig: Any, draws: Any, sglang: Any) -> None:
    rig = await make_rig(draws=draws, sglang=sglang)
    assert rig.client.can_verify(PENALISED) == "logit_bias"
    rig.open("a", PROMPT, SAMPLED)
    await rig.one("a", features_from=0)
    await rig.one("a", [1, 2])
    assert "custom_params" not in rig.engine.posts[-1]["sampling_params"][0]
    assert rig.engine.posts[-1]["top_logprobs_num"] == [64]


async def test_an_engine_without_the_flag_gives_features_by_the_plugin(make_rig: Any) -> None:
    rig = await make_rig(draws=plugin(on=("target_ids", "aux_capture")), has_aux_flag=False, version="0.5.17")
    status = await rig.client.status(timeout_s=2.0)
    assert status.verifier.aux_layer_ids == (2, 6, 9)
    rig.open("a", PROMPT)
    assert sum(span.ref.shape[0] for span in (await rig.one("a", features_from=0)).spans) == len(PROMPT)


async def test_a_capability_that_is_off_is_said(make_rig: Any) -> None:
    rig = await make_rig(draws=plugin(off={"all_reduce": "sglang.x is not there"}))
    assert any("all_reduce is off: sglang.x" in text for text in rig.client._engine.missing)


async def relay(socket: zmq.asyncio.Socket, url: str) -> None:
    """The plugin's end of the fast lane, with the fake engine behind it by HTTP."""
    async with aiohttp.ClientSession() as session:
        while True:
            caller, data = await socket.recv_multipart()
            call = msgspec.msgpack.decode(data, type=LaneCall)
            body = {
                "rid": [item.rid for item in call.items],
                "input_ids": [unpack_ids(item.ids) for item in call.items],
                "sampling_params": [item.sampling for item in call.items],
                "return_logprob": [item.return_logprob for item in call.items],
                "logprob_start_len": [item.logprob_start_len for item in call.items],
                "top_logprobs_num": [item.top_logprobs_num for item in call.items],
                "return_hidden_states": [item.return_hidden_states for item in call.items],
                "extra_key": [item.extra_key or None for item in call.items],
            }
            async with session.post(f"{url}/generate", json=body) as response:
                answers = await response.json()
            found = []
            for answer in answers:
                del answer["meta_info"]["weight_version"]
                found.append((answer["meta_info"]["id"], msgspec.Raw(msgspec.msgpack.encode(answer))))
            await socket.send_multipart([caller, msgspec.msgpack.encode(LaneAnswers(found))])


@pytest.mark.parametrize(
    ("is_announced", "is_reachable"), [(True, True), (False, True), (True, False)], ids=["", "unannounced", "elsewhere"]
)
async def test_rounds_go_over_the_lane_where_the_plugin_announces_one(
    make_rig: Any, tmp_path: Path, is_announced: bool, is_reachable: bool
) -> None:
    """Elsewhere: the engine runs in a container that shares no folder with the gateway."""
    endpoint = f"ipc://{tmp_path}/lane.sock"
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(endpoint if is_reachable else f"{endpoint}.other")
    on = ("tap", "target_ids", "fast_lane") if is_announced else ("tap", "target_ids")
    rig = await make_rig(sglang={"lane_endpoint": endpoint}, draws=plugin(on=on))
    relaying = asyncio.create_task(relay(socket, rig.engine.url))
    try:
        text = expected(SAMPLED, 12)
        rig.open("a", PROMPT, SAMPLED)
        await rig.one("a")
        while len(rig.ids["a"]) < len(text):
            at = len(rig.ids["a"])
            await rig.one("a", text[at : at + 2])
        assert rig.ids["a"][: len(text)] == text
        counters = rig.client.counters
        assert (counters["lane_posts"] > 2) == (is_announced and is_reachable)
        assert (counters["lane_refusals"], counters["weight_changes"]) == (0, 0)
    finally:
        relaying.cancel()
        socket.close()
        context.term()
