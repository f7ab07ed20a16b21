"""Any body gets an answer of the right kind: never a 500, never a hang, and room is always given back."""

from __future__ import annotations

import json
import random
from typing import Any

from gateway.openai.field_rules import CHAT_FIELDS, COMPLETION_FIELDS, IGNORED_FIELDS, REFUSED_FIELDS, RESPONSES_FIELDS
from tests.gateway.conftest import StartEdge
from tests.gateway.fakes import FakeEngine, Script

NAMES = sorted(CHAT_FIELDS | COMPLETION_FIELDS | RESPONSES_FIELDS | IGNORED_FIELDS.keys() | REFUSED_FIELDS.keys())
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 5, 16, 2**31, 2**63, -(2**63), 2**64, 2**70, 0.5, 1.0, -0.0, 1e308, "", "x", "toy",
    "auto", "é🙂", "\ud83d", "x" * 3000, [], {}, [1], ["a"], [[1]], [None], [{}], [258], [-1], {"a": 1}, {"5": 1},
    {"mode": "on"}, {"type": "text"}, {"include_usage": True}, {"role": "user", "content": "x"},
    [{"role": "user", "content": "x"}], [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
    [{"role": "assistant", "tool_calls": [{"id": 1}]}], [{"role": "assistant"}], [[[]]],
    [{"type": "function", "function": {"name": "f"}}], [{"type": "function", "name": "f"}], {"type": "json_object"},
    {"format": {"type": "json_object"}}, {"type": "json_schema", "json_schema": {"schema": {}}}, "required", "a|b",
    {"a": {"b": [1, {"c": None}]}},
]  # fmt: skip
NUM_BODIES = 600
URLS = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize"]


def any_body(dice: random.Random) -> bytes:
    body: dict[str, Any] = {}
    if dice.random() < 0.7:
        body = {"model": "toy", "messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi", "input": "Hi"}
    for name in dice.sample(NAMES, dice.randrange(6)):
        body[name] = dice.choice(VALUES)
    raw = bytearray(json.dumps(body).encode())
    for _ in range(dice.choice([0, 0, 0, 1, 3])):
        raw[dice.randrange(len(raw))] = dice.randrange(256)
    return bytes(raw)


async def test_any_body_gets_an_answer(start_edge: StartEdge) -> None:
    dice = random.Random(5)
    engine = FakeEngine([Script(text="ok")])
    client = await start_edge(engine)
    statuses = set()
    for _ in range(NUM_BODIES):
        raw = any_body(dice)
        url = dice.choice(URLS)
        response = await client.post(url, data=raw, headers={"Content-Type": "application/json"})
        statuses.add(response.status)
        assert response.status in (200, 400, 404), (url, raw, await response.text())
        if response.status != 200:
            assert set((await response.json())["error"]) == {"message", "type", "param", "code"}
        await response.read()
        assert (engine.num_admitted, engine.num_running) == (0, 0), raw
    assert statuses >= {200, 400}
