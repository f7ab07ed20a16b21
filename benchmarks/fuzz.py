"""Any body gets an answer of the right kind: never a 500, never a hang, room always given back, memory flat.

Bodies are made of known field names and odd values, with broken bytes here and there, over every route that takes one;
between them, stored responses are read, listed, cancelled and forgotten. Everything goes over a real socket, to a
scripted engine, so that what is tried is the edge.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from benchmarks.edge import FastEngine, NullCodec
from benchmarks.provenance import provenance
from gateway.config import GatewayConfig
from gateway.http import create_app, start_server
from gateway.openai.field_rules import CHAT_FIELDS, COMPLETION_FIELDS, IGNORED_FIELDS, REFUSED_FIELDS, RESPONSES_FIELDS
from gateway.ports import (
    GenerationDelta,
    GenerationFinished,
    GenerationRequest,
    ModelCard,
    PromptScored,
    RequestSpeculation,
    TokenLogprob,
    Usage,
)

__all__ = ["BODY_URLS", "any_body", "main", "stored_request"]

BODY_URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize")
_NAMES = sorted(CHAT_FIELDS | COMPLETION_FIELDS | RESPONSES_FIELDS | IGNORED_FIELDS.keys() | REFUSED_FIELDS.keys())
_VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 5, 16, 2**31, 2**63, -(2**63), 2**64, 2**70, 0.5, 1.0, -0.0, 1e308, "", "x", "toy",
    "auto", "é🙂", "\ud83d", "x" * 3000, [], {}, [1], ["a"], [[1]], [None], [{}], [258], [-1], {"a": 1}, {"5": 1},
    {"mode": "on"}, {"type": "text"}, {"include_usage": True}, {"role": "user", "content": "x"},
    [{"role": "user", "content": "x"}], [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
    [{"role": "assistant", "tool_calls": [{"id": 1}]}], [{"role": "assistant"}], [[[]]],
    [{"role": "assistant", "content": None, "reasoning_content": "x"}], [{"type": "reasoning", "content": [{}]}],
    [{"type": "function", "function": {"name": "f"}}], [{"type": "function", "name": "f"}], {"type": "json_object"},
    {"format": {"type": "json_object"}}, {"type": "json_schema", "json_schema": {"schema": {}}}, "required", "a|b",
    {"a": {"b": [1, {"c": None}]}}, ["message.output_text.logprobs"], "resp_1",
]  # fmt: skip
_STATUSES = frozenset({200, 400, 404})
_PATIENCE_S = 20.0


def any_body(dice: random.Random) -> bytes:
    """One body: mostly a good request with some odd fields, sometimes with broken bytes."""
    body: dict[str, Any] = {}
    if dice.random() < 0.7:
        body = {"model": "toy", "messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi", "input": "Hi"}
    for name in dice.sample(_NAMES, dice.randrange(6)):
        body[name] = dice.choice(_VALUES)
    raw = bytearray(json.dumps(body).encode())
    for _ in range(dice.choice([0, 0, 0, 1, 3])):
        raw[dice.randrange(len(raw))] = dice.randrange(256)
    return bytes(raw)


def stored_request(dice: random.Random, known_ids: Sequence[str]) -> tuple[str, str]:
    """Method and path of something done with a stored response, or with one that never was."""
    odd = ["resp_1", "x" * 300, "%00", "..", "é", "a b"]
    response_id = dice.choice(known_ids) if known_ids and dice.random() < 0.7 else dice.choice(odd)
    method, tail = dice.choice(
        [("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items"), ("GET", "?stream=true")]
    )
    values = ["", "0", "1", "-1", "101", "x", "asc", "desc", "9" * 40, "é", "msg_1"]
    query = "&".join(f"{name}={dice.choice(values)}" for name in dice.sample(["limit", "order", "after"], 2))
    if tail == "/input_items":
        tail += f"?{query}"
    elif tail:
        tail += f"&starting_after={dice.choice(values)}" if tail.startswith("?") else ""
    return method, f"/v1/responses/{response_id}{tail}"


class _ShortEngine(FastEngine):
    """Says two tokens, with what was asked about them."""

    async def generate(
        self, request: GenerationRequest
    ) -> AsyncGenerator[PromptScored | GenerationDelta | GenerationFinished, None]:
        entry = TokenLogprob(token_id=97, logprob=-0.5)
        if request.score_prompt:
            yield PromptScored(logprobs=(None, *(entry for _ in request.prompt_ids[1:])))
        num_tokens = min(2, request.max_new_tokens)
        for _ in range(num_tokens):
            await asyncio.sleep(0)
            yield GenerationDelta(
                text="a", token_ids=(97,), logprobs=None if request.num_logprobs is None else (entry,)
            )
        yield GenerationFinished(
            finish_reason="stop",
            matched_stop=None,
            usage=Usage(prompt_tokens=len(request.prompt_ids), completion_tokens=num_tokens),
            speculation=RequestSpeculation(
                num_rounds=1, num_plain_rounds=0, num_draft_tokens=1, num_accepted_tokens=1, draft_s=0.0, verify_s=0.0
            ),
        )

    def model_card(self) -> ModelCard:
        """See Engine."""
        return ModelCard(name="toy", aliases=(), context_len=4096, vocab_size=256, created_s=0)


def _resident_mb() -> float:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return round(int(line.split()[1]) / 1024, 1)
    raise OSError("/proc/self/status has no VmRSS")


async def _run(options: argparse.Namespace) -> dict[str, Any]:
    dice = random.Random(options.seed)  # noqa: S311 # repeatable on purpose
    engine, config = _ShortEngine(), GatewayConfig(port=0, max_stored_responses=200)
    runner = await start_server(create_app(engine, NullCodec(), config), config)
    base = f"http://127.0.0.1:{runner.addresses[0][1]}"
    statuses: Counter[int] = Counter()
    known_ids: list[str] = []
    memory: dict[int, float] = {}
    slowest_s = 0.0
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_PATIENCE_S)) as session:
        for number in range(1, options.bodies + 1):
            method, url, raw = "POST", dice.choice(BODY_URLS), any_body(dice)
            if dice.random() < 0.1:
                (method, url), raw = stored_request(dice, known_ids), b""
            begin_s = time.perf_counter()
            headers = {"Content-Type": "application/json"}
            async with session.request(method, base + url, data=raw or None, headers=headers) as response:
                text = await response.text()
            slowest_s = max(slowest_s, time.perf_counter() - begin_s)
            statuses[response.status] += 1
            if response.status not in _STATUSES:
                raise AssertionError(f"status {response.status} for {method} {url} {raw!r}: {text[:500]}")
            if response.status != 200 and set(json.loads(text)["error"]) != {"message", "type", "param", "code"}:
                raise AssertionError(f"no error object for {method} {url} {raw!r}: {text[:500]}")
            if '"resp_' in text:
                known_ids = [*known_ids[-50:], "resp_" + text.partition('"resp_')[2].partition('"')[0]]
            if number % max(1, options.bodies // 5) == 0:
                memory[number] = _resident_mb()
    await asyncio.sleep(0.2)  # background responses end
    await runner.cleanup()
    if engine.num_running:
        raise AssertionError(f"{engine.num_running} generations never gave their room back")
    return {
        "statuses": {str(status): count for status, count in sorted(statuses.items())},
        "resident_mb_after": {str(number): size for number, size in memory.items()},
        "slowest_ms": round(slowest_s * 1000, 1),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Run it; any wrong answer ends it with the body that got it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bodies", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--output", type=Path, help="write the result with its provenance here")
    options = parser.parse_args(argv)
    results = uvloop.run(_run(options))
    for name, value in results.items():
        print(f"{name}: {value}")
    record = {
        "benchmark": "fuzz",
        "config": {"bodies": options.bodies},
        "results": results,
        "provenance": provenance(sys.argv, seed=options.seed),
    }
    print(json.dumps(record))
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
