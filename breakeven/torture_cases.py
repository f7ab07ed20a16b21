"""The checks of ``breakeven torture``: the stream contract every OpenAI client relies on, one function a rule.

Each check names the rule (C-1 to C-24 of the contract in docs/conformance.md) and which clients break on it. A check
returns None if all is well, else one sentence. What a server is free to do (keep-alive comments, nulls beside the
usage chunk) is a warning, not a failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from breakeven.torture_probe import Exchange, Probe

__all__ = ["CASES", "Case", "Skipped"]

Check = Callable[[Probe], Awaitable[str | None]]

_FINISH_REASONS = {"stop", "length", "tool_calls", "content_filter", "function_call"}
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class Skipped(Exception):
    """The server does not offer what the check needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One check.

    Fields:
        rule: of the contract, or "errors", "input".
        breaks: the clients that break on the defect.
        level: what a failed check means.
    """

    name: str
    rule: str
    breaks: str
    level: Literal["required", "advised"]
    check: Check


CASES: list[Case] = []


def _case(rule: str, breaks: str, *, level: Literal["required", "advised"] = "required") -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        name = getattr(check, "__name__", "").replace("_", " ")
        CASES.append(Case(name=name, rule=rule, breaks=breaks, level=level, check=check))
        return check

    return register


async def _stream(probe: Probe, **fields: Any) -> Exchange:
    exchange = await probe.chat(stream=True, **fields)
    if exchange.status != 200:
        raise Skipped(f"the stream was refused with {exchange.status}")
    return exchange


# ---------------------------------------------------------------- head and framing


@_case("C-1", "proxies, openai-node")
async def a_stream_has_the_right_head(probe: Probe) -> str | None:
    headers = (await _stream(probe)).headers
    if not headers.get("content-type", "").startswith("text/event-stream"):
        return f"content type {headers.get('content-type')!r}"
    return "has a Content-Length" if "content-length" in headers else None


@_case("C-1", "nginx buffering", level="advised")
async def proxies_are_told_not_to_buffer_or_cache(probe: Probe) -> str | None:
    headers = (await _stream(probe)).headers
    missing = [name for name in ("cache-control", "x-accel-buffering") if name not in headers]
    return f"no {', '.join(missing)}" if missing else None


@_case("C-2", "sglang bench, LangChain, openai-python")
async def events_are_single_data_lines_with_the_space(probe: Probe) -> str | None:
    for block in (await _stream(probe)).blocks:
        lines = [line for line in block.lines if not line.startswith(":")]
        if len(lines) > 1 or any(not line.startswith("data: ") or line == "data: " for line in lines):
            return f"event {block.lines!r:.80}"
    return None


@_case("C-2", "openai-python and LangChain, together with comments")
async def no_event_carries_an_id(probe: Probe) -> str | None:
    lines = [line for block in (await _stream(probe)).blocks for line in block.lines]
    return "an id: field" if any(line.startswith("id:") for line in lines) else None


@_case("C-13", "sglang bench", level="advised")
async def a_busy_stream_has_no_comments(probe: Probe) -> str | None:
    lines = [line for block in (await _stream(probe)).blocks for line in block.lines]
    return "comment lines in a stream that is not idle" if any(line.startswith(":") for line in lines) else None


@_case("C-11", "clients that wait for it")
async def the_stream_ends_with_done_and_nothing_after(probe: Probe) -> str | None:
    raw = (await _stream(probe)).raw
    if raw.count(b"data: [DONE]") != 1:
        return f"{raw.count(b'data: [DONE]')} times [DONE]"
    return None if raw.endswith((b"data: [DONE]\n\n", b"data: [DONE]\r\n\r\n")) else "bytes after [DONE]"


# ---------------------------------------------------------------- chunks


@_case("C-3", "openai-python helper")
async def the_role_comes_first_and_once_a_choice(probe: Probe) -> str | None:
    exchange = await _stream(probe)
    roles = [choice.get("delta", {}).get("role") for choice in exchange.choices]
    if not roles or roles[0] != "assistant":
        return "the first chunk has no role"
    return f"{len(roles) - roles.count(None)} roles" if roles.count(None) != len(roles) - 1 else None


@_case("C-3", "openai-python helper (IndexError)")
async def roles_of_several_choices_come_in_index_order(probe: Probe) -> str | None:
    exchange = await probe.chat(stream=True, n=3, temperature=1, max_tokens=8)
    if exchange.status != 200:
        raise Skipped(f"n = 3 was refused with {exchange.status}")
    firsts = list(dict.fromkeys(choice.get("index") for choice in exchange.choices))
    return None if firsts == [0, 1, 2] else f"first chunks of choices came in the order {firsts}"


@_case("C-5", "all")
async def head_fields_are_equal_in_every_chunk(probe: Probe) -> str | None:
    events = (await _stream(probe)).events
    for name in ("id", "created", "model", "object"):
        values = {event.get(name) for event in events}
        if len(values) != 1 or None in values:
            return f"{name} is {values!r:.80}"
    return None if events[0]["object"] == "chat.completion.chunk" else f"object is {events[0]['object']}"


@_case("C-5", "strict schemas (Vercel AI SDK, aiperf)")
async def every_choice_has_index_and_finish_reason(probe: Probe) -> str | None:
    for choice in (await _stream(probe)).choices:
        missing = [name for name in ("index", "finish_reason", "delta") if name not in choice]
        if missing:
            return f"a choice without {', '.join(missing)}"
    return None


@_case("C-6", "LangChain joins finish reasons")
async def exactly_one_finish_chunk_without_text(probe: Probe) -> str | None:
    finishes = [choice for choice in (await _stream(probe)).choices if choice.get("finish_reason")]
    if len(finishes) != 1:
        return f"{len(finishes)} finish chunks"
    return "the finish chunk carries text" if finishes[0].get("delta", {}).get("content") else None


@_case("C-7", "LiteLLM raises on abort")
async def the_finish_reason_is_one_of_the_known(probe: Probe) -> str | None:
    reasons = {choice.get("finish_reason") for choice in (await _stream(probe)).choices} - {None}
    return None if reasons <= _FINISH_REASONS else f"finish reasons {reasons}"


@_case("C-8", "openai-python helper loses usage, LiteLLM recounts")
async def usage_is_the_last_event_with_no_choices(probe: Probe) -> str | None:
    events = (await _stream(probe, stream_options={"include_usage": True})).events
    with_usage = [index for index, event in enumerate(events) if event.get("usage")]
    if with_usage != [len(events) - 1]:
        return f"usage in events {with_usage} of {len(events)}"
    return None if events[-1].get("choices") == [] else "the usage event has choices"


@_case("C-8", "none known", level="advised")
async def other_events_have_usage_null(probe: Probe) -> str | None:
    events = (await _stream(probe, stream_options={"include_usage": True})).events
    return None if all("usage" in event for event in events) else "events without a usage key"


@_case("C-8", "cost accounting")
async def no_usage_unless_asked(probe: Probe) -> str | None:
    events = (await _stream(probe)).events
    return "usage although not asked for" if any(event.get("usage") for event in events) else None


@_case("C-9", "guidellm, aiperf", level="advised")
async def continuous_usage_grows_to_the_final_usage(probe: Probe) -> str | None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    exchange = await probe.chat(stream=True, stream_options=options)
    if exchange.status != 200:
        raise Skipped(f"continuous_usage_stats was refused with {exchange.status}")
    counts = [event["usage"]["completion_tokens"] for event in exchange.events if event.get("usage")]
    if len(counts) < 2:
        raise Skipped("not offered")
    return None if counts == sorted(counts) else f"counts {counts}"


@_case("C-22", "none known", level="advised")
async def no_empty_reasoning_in_every_delta(probe: Probe) -> str | None:
    deltas = [choice.get("delta", {}) for choice in (await _stream(probe)).choices]
    nulls = [name for name in ("reasoning_content", "reasoning") if any(d.get(name, "x") is None for d in deltas)]
    return f"{nulls[0]}: null beside the text" if nulls else None


@_case("C-23", "evaluation and load tools")
async def streamed_logprobs_hold_every_token_of_an_event(probe: Probe) -> str | None:
    exchange = await probe.chat(stream=True, logprobs=True, stream_options={"include_usage": True})
    if exchange.status != 200:
        raise Skipped(f"logprobs were refused with {exchange.status}")
    entries = [e for choice in exchange.choices for e in (choice.get("logprobs") or {}).get("content") or []]
    num_tokens = exchange.events[-1]["usage"]["completion_tokens"]
    return None if len(entries) in (num_tokens, num_tokens - 1) else f"{len(entries)} entries for {num_tokens} tokens"


@_case("C-10", "none known", level="advised")
async def stream_options_without_stream_are_refused(probe: Probe) -> str | None:
    exchange = await probe.chat(stream_options={"include_usage": True})
    return None if exchange.status == 400 else f"status {exchange.status}"


# ---------------------------------------------------------------- text, stops, budgets


@_case("C-14", "openai-python (UnicodeDecodeError), every reader")
async def the_stream_is_utf8_without_broken_characters(probe: Probe) -> str | None:
    messages = [{"role": "user", "content": "Repeat exactly: 🙂🙂 삼겹살 ďábelské 𠮷"}]
    exchange = await _stream(probe, messages=messages, max_tokens=48)
    try:
        exchange.raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"not UTF-8 at byte {error.start}"
    whole = (await probe.chat(messages=messages, max_tokens=48)).json
    text = whole["choices"][0]["message"]["content"] or ""
    if exchange.text().count("\ufffd") > text.count("\ufffd"):
        return "the stream holds U+FFFD where the whole answer does not"
    return None


@_case("C-14", "every reader")
async def deltas_join_to_the_whole_answer(probe: Probe) -> str | None:
    streamed = (await _stream(probe, seed=1)).text()
    whole = (await probe.chat(seed=1)).json["choices"][0]["message"]["content"] or ""
    return None if streamed == whole else f"stream {streamed!r:.50}, whole {whole!r:.50}"


@_case("C-15", "agents, RAG")
async def nothing_of_a_stop_string_is_sent(probe: Probe) -> str | None:
    text = (await _stream(probe)).text()
    if len(text) < 12:
        raise Skipped("the model says too little")
    stop = text[6:10]
    got = (await _stream(probe, stop=[stop])).text()
    wanted = text[: text.find(stop)]
    return None if got == wanted else f"stop {stop!r}: got {got!r:.60} instead of {wanted!r:.60}"


@_case("C-15", "agents")
async def text_that_only_begins_a_stop_string_is_flushed(probe: Probe) -> str | None:
    text = (await _stream(probe)).text()
    stop = text[-3:] + "\x01never"
    got = (await _stream(probe, stop=[stop])).text()
    return None if got == text else f"ended with {got[-12:]!r} instead of {text[-12:]!r}"


@_case("C-16", "budgets, cost accounting")
async def max_tokens_is_exact_and_usage_agrees(probe: Probe) -> str | None:
    for budget in (1, 7, 8):
        exchange = await _stream(probe, max_tokens=budget, stream_options={"include_usage": True})
        usage = exchange.events[-1].get("usage") or {}
        reasons = [choice["finish_reason"] for choice in exchange.choices if choice.get("finish_reason")]
        num_tokens = usage.get("completion_tokens", -1)
        if num_tokens > budget or (reasons == ["length"] and num_tokens != budget):
            return f"max_tokens {budget}: {num_tokens} tokens, finish {reasons}"
    return None


@_case("C-17", "langchain-openai")
async def max_completion_tokens_is_understood(probe: Probe) -> str | None:
    exchange = await probe.chat(max_tokens="omit", max_completion_tokens=3)
    if exchange.status != 200:
        return f"status {exchange.status}"
    num_tokens = exchange.json["usage"]["completion_tokens"]
    return None if num_tokens <= 3 else f"{num_tokens} tokens"


@_case("C-18", "evaluation tools")
async def one_logprob_a_token_and_bytes_that_join_to_the_text(probe: Probe) -> str | None:
    exchange = await probe.chat(logprobs=True, top_logprobs=2, max_tokens=12)
    if exchange.status != 200:
        raise Skipped(f"logprobs were refused with {exchange.status}")
    answer = exchange.json
    choice = answer["choices"][0]
    entries = (choice.get("logprobs") or {}).get("content") or []
    num_tokens = answer["usage"]["completion_tokens"]
    if len(entries) not in (num_tokens, num_tokens - 1):  # the end token may have none
        return f"{len(entries)} entries for {num_tokens} tokens"
    if any(not isinstance(entry.get("logprob"), int | float) for entry in entries):
        return "a logprob that is no number"
    joined = b"".join(bytes(entry["bytes"]) for entry in entries if entry.get("bytes"))
    text = (choice["message"]["content"] or "").encode()
    return None if joined.startswith(text) or text.startswith(joined) else "the bytes are not those of the text"


@_case("C-19", "lm-eval")
async def completions_logprobs_have_text_offsets(probe: Probe) -> str | None:
    exchange = await probe.complete(logprobs=1, echo=True, max_tokens=1)
    if exchange.status != 200:
        raise Skipped(f"echo with logprobs was refused with {exchange.status}")
    logprobs = exchange.json["choices"][0].get("logprobs") or {}
    offsets = logprobs.get("text_offset") or []
    if len({len(logprobs.get(name) or []) for name in ("tokens", "token_logprobs", "text_offset")}) != 1:
        return "lists of different lengths"
    if offsets != sorted(offsets) or (offsets and offsets[0] != 0):
        return f"offsets {offsets}"
    return None if logprobs["token_logprobs"][0] is None else "the first prompt token has a logprob"


@_case("C-20", "clients that ask for 0", level="advised")
async def logprobs_0_means_the_tokens_own(probe: Probe) -> str | None:
    exchange = await probe.complete(logprobs=0, max_tokens=2)
    if exchange.status != 200:
        raise Skipped(f"logprobs were refused with {exchange.status}")
    return None if exchange.json["choices"][0].get("logprobs") else "no logprobs"


@_case("C-21", "openai-python, LangChain, AI SDK (doubled names, two calls)")
async def tool_deltas_have_index_and_names_once(probe: Probe) -> str | None:
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    exchange = await probe.chat(messages=messages, tools=[_TOOL], tool_choice="required", stream=True, max_tokens=200)
    if exchange.status != 200:
        raise Skipped(f"tools were refused with {exchange.status}")
    fragments = [part for c in exchange.choices for part in c.get("delta", {}).get("tool_calls") or []]
    if not fragments:
        return "no call although one was required"
    if any(not isinstance(part.get("index"), int) for part in fragments):
        return "a fragment without index"
    first_of: dict[int, int] = {}
    for position, part in enumerate(fragments):
        is_first = first_of.setdefault(part["index"], position) == position
        has_name = bool(part.get("id")) or bool(part.get("function", {}).get("name"))
        if has_name is not is_first:
            return "id or name missing in the first fragment" if is_first else "id or name repeated"
    reasons = [choice["finish_reason"] for choice in exchange.choices if choice.get("finish_reason")]
    return None if reasons in (["tool_calls"], ["stop"], ["length"]) else f"finish {reasons}"


# ---------------------------------------------------------------- errors


async def _error_problem(exchange: Exchange, statuses: set[int]) -> str | None:
    if exchange.status not in statuses:
        return f"status {exchange.status}, wanted {' or '.join(map(str, sorted(statuses)))}"
    body = exchange.json
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return f"no nested error object: {exchange.raw[:60]!r}"
    missing = {"message", "type", "param", "code"} - error.keys()
    if missing:
        return f"error without {', '.join(sorted(missing))}"
    return "the error code is no string" if not isinstance(error["code"], str | None) else None


@_case("errors", "openai-node 6, AI SDK: no message")
async def bad_json_is_a_nested_400(probe: Probe) -> str | None:
    return await _error_problem(await probe.post("/v1/chat/completions", b'{"messages": ['), {400})


@_case("errors", "openai-node 6, AI SDK")
async def a_wrong_type_is_a_nested_400(probe: Probe) -> str | None:
    return await _error_problem(await probe.chat(temperature="hot"), {400})


@_case("errors", "typos in model names")
async def an_unknown_model_is_a_nested_404(probe: Probe) -> str | None:
    return await _error_problem(await probe.chat(model="no-such-model-anywhere"), {404})


@_case("errors", "every client's message")
async def an_unknown_url_is_a_nested_404(probe: Probe) -> str | None:
    return await _error_problem(await probe.request("GET", "/v1/no/such/url"), {404})


@_case("errors", "every client's message")
async def a_wrong_method_is_a_nested_405(probe: Probe) -> str | None:
    return await _error_problem(await probe.request("GET", "/v1/chat/completions"), {405})


@_case("C-12", "all: a 200 with an error inside")
async def too_long_a_prompt_is_a_real_400_also_when_streamed(probe: Probe) -> str | None:
    exchange = await probe.chat(stream=True, max_tokens=99_999_999)
    return await _error_problem(exchange, {400})


@_case("errors", "JavaScript clients that cut strings")
async def a_lone_surrogate_is_no_500(probe: Probe) -> str | None:
    body = b'{"model":"%b","messages":[{"role":"user","content":"\\ud83d"}],"max_tokens":1}' % probe.model.encode()
    exchange = await probe.post("/v1/chat/completions", body)
    return None if exchange.status < 500 else f"status {exchange.status}"


@_case("input", "agents with tool turns")
async def an_assistant_turn_with_null_content_is_accepted(probe: Probe) -> str | None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    exchange = await probe.chat(messages=messages, max_tokens=2)
    return None if exchange.status == 200 else f"status {exchange.status}"


@_case("input", "clients that send unset fields as null")
async def null_fields_are_absent_fields(probe: Probe) -> str | None:
    exchange = await probe.chat(stop=None, logit_bias=None, seed=None, n=None, stream=None, max_tokens=2, user=None)
    return None if exchange.status == 200 else f"status {exchange.status}"


# ---------------------------------------------------------------- life of a stream


@_case("C-24", "cost: work for nobody")
async def the_server_lives_after_clients_left(probe: Probe) -> str | None:
    await asyncio.gather(*(probe.leave_early() for _ in range(4)))
    exchange = await probe.chat(max_tokens=4)
    return None if exchange.status == 200 else f"status {exchange.status}"


@_case("B-25", "load")
async def many_streams_at_once_all_end_well(probe: Probe) -> str | None:
    exchanges = await asyncio.gather(*(probe.chat(stream=True, max_tokens=4) for _ in range(24)))
    refused = [exchange.status for exchange in exchanges if exchange.status not in (200, 429, 503)]
    if refused:
        return f"statuses {refused}"
    cut = [e for e in exchanges if e.status == 200 and not e.raw.rstrip().endswith(b"data: [DONE]")]
    return f"{len(cut)} streams without an end" if cut else None


@_case("errors", "support requests", level="advised")
async def a_request_id_is_answered(probe: Probe) -> str | None:
    return None if "x-request-id" in (await probe.chat(max_tokens=1)).headers else "no x-request-id"
