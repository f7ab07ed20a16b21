"""The torture suite: our edge passes it, and a server with the known defects does not."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator

import pytest
from aiohttp import ClientConnectorError, web
from aiohttp.test_utils import TestServer, unused_port
from rich.console import Console

from breakeven.torture import print_outcomes, run_cases
from breakeven.torture_cases import CASES
from tests.gateway.conftest import StartEdge
from tests.gateway.fakes import Script
from tests.gateway.http.wide_engine import WideEngine

# A scripted engine follows no grammar, so it can't be made to call a tool.
NEEDS_A_MODEL = {"tool deltas have index and names once"}


async def test_our_edge_passes(start_edge: StartEdge) -> None:
    client = await start_edge(WideEngine([Script(text="Hello 🙂 world, and more", block_lens=(1, 4, 2))]))
    cases = [case for case in CASES if case.name not in NEEDS_A_MODEL]
    outcomes = await run_cases(str(client.make_url("/")), cases, model="toy", timeout_s=20)
    assert [outcome for outcome in outcomes if outcome.result != "pass"] == []


@pytest.fixture
async def bad_server() -> AsyncIterator[TestServer]:
    """Answers everything with one stream that breaks most rules."""

    async def answer(_: web.Request) -> web.Response:
        chunk = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        delta = {"role": "assistant", "content": "Hello there, world"}
        lines = [
            ": ping\n\n",
            "id: 1\n",
            *(f"data:{json.dumps({**chunk, 'choices': [{'index': i, 'delta': delta}]})}\n\n" for i in (1, 0)),
            f"data: {json.dumps({**chunk, 'id': 'y', 'usage': {'completion_tokens': 99}, 'choices': []})}\n\n",
            f"data: {json.dumps({**chunk, 'choices': [{'index': 0, 'delta': delta, 'finish_reason': 'abort'}]})}\n\n",
            "data: [DONE]\n\n: bye\n\n",
        ]
        return web.Response(text="".join(lines), content_type="text/plain")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    server = TestServer(app)
    await server.start_server()
    yield server
    await server.close()


async def test_a_bad_server_is_found_out(bad_server: TestServer) -> None:
    outcomes = await run_cases(str(bad_server.make_url("/v1")), CASES, model="toy", api_key="k", timeout_s=20)
    failed = {outcome.name for outcome in outcomes if outcome.result == "fail"}
    assert failed >= {
        "a stream has the right head",
        "events are single data lines with the space",
        "no event carries an id",
        "the stream ends with done and nothing after",
        "the role comes first and once a choice",
        "roles of several choices come in index order",
        "head fields are equal in every chunk",
        "every choice has index and finish reason",
        "exactly one finish chunk without text",
        "the finish reason is one of the known",
        "usage is the last event with no choices",
        "no usage unless asked",
        "bad json is a nested 400",
        "an unknown model is a nested 404",
    }
    assert all(outcome.detail for outcome in outcomes if outcome.result == "fail")
    output = io.StringIO()
    print_outcomes(outcomes, console=Console(file=output, width=140), url="http://x")
    record = json.loads(output.getvalue().splitlines()[-1])
    assert record["counts"]["fail"] == len(failed)


async def test_a_server_that_is_not_there() -> None:
    with pytest.raises(ClientConnectorError):
        await run_cases(f"http://127.0.0.1:{unused_port()}", CASES[:1], model="toy")


def test_every_rule_of_the_contract_that_can_be_seen_from_outside_has_a_case() -> None:
    # C-4 is the second half of C-3; C-12 inside a stream needs a server that fails on demand.
    rules = {case.rule for case in CASES}
    assert {f"C-{number}" for number in range(1, 25)} - rules == {"C-4"}
    assert len({case.name for case in CASES}) == len(CASES)
