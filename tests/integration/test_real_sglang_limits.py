"""A real, small SGLang under a real gateway: its limits, other weights, and its death.

Runs only where BREAKEVEN_SGLANG_PYTHON is set.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.integration.real_sglang import Engine, Http, gateway, plain_ids, wait_ready

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.skipif("BREAKEVEN_SGLANG_PYTHON" not in os.environ, reason="needs BREAKEVEN_SGLANG_PYTHON"),
]

ON = {"speculation": {"mode": "on", "num_draft_tokens": 3}}
OFF = {"speculation": {"mode": "off"}}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    small = ("--context-length", "256", "--max-running-requests", "2", "--max-queued-requests", "2")
    with Engine(tmp_path_factory.mktemp("sglang"), args=small) as running:
        yield running


@pytest.fixture(scope="module")
def client(engine: Engine) -> Iterator[Http]:
    with gateway(engine.gateway_flags) as running:
        yield running


@pytest.fixture(scope="module")
def prompt(client: Http) -> list[int]:
    return client.tokenize("Write a sentence about the sea.")


def context_len(client: Http) -> int:
    body = {"model": "smollm2-135m-instruct", "prompt": "x"}
    return int(client.post("/tokenize", body)[1]["max_model_len"])


def test_the_context_ends_to_the_token(engine: Engine, client: Http, prompt: list[int]) -> None:
    limit = context_len(client)
    filled = (prompt * 100)[: limit - 1]
    for mode in (ON, OFF):
        assert len(client.ids(filled, max_tokens=1, **mode)) == 1
        status, answer = client.complete((prompt * 100)[:limit], max_tokens=1, **mode)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded"), answer
    # The engine agrees: one more than we take, it refuses.
    params = {"max_new_tokens": 1, "temperature": 0.0}
    body = {"input_ids": (prompt * 100)[:limit], "sampling_params": params}
    assert Http(engine.url).post("/generate", body)[0] == 400


@pytest.mark.parametrize("mode", [ON, OFF], ids=["on", "off"])
def test_answers_run_up_to_the_end_of_the_context(
    engine: Engine, client: Http, prompt: list[int], mode: object
) -> None:
    room = 21
    filled = (prompt * 100)[: context_len(client) - room]
    found = client.ids(filled, max_tokens=room, **mode)
    assert found == plain_ids(Http(engine.url), filled, room)


def test_overload_is_an_answer_and_passes(client: Http, prompt: list[int]) -> None:
    for mode in (ON, OFF):
        with ThreadPoolExecutor(12) as pool:
            answers = list(pool.map(lambda i, m=mode: client.complete([*prompt, i], max_tokens=8, **m), range(12)))
        statuses = [status for status, _ in answers]
        print(mode, statuses, client.get("/stats")["verifier"]["counters"])  # noqa: T201
        assert set(statuses) <= {200, 503}
        assert 200 in statuses
        assert len(client.ids(prompt, max_tokens=8, **mode)) == 8


def test_other_weights_end_running_answers_only(engine: Engine, client: Http, prompt: list[int]) -> None:
    own = Http(engine.url)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(client.complete, prompt, max_tokens=150, **ON)
        deadline = time.monotonic() + 60
        before = client.get("/stats")["speculation"]["num_rounds"]
        while client.get("/stats")["speculation"]["num_rounds"] < before + 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert own.post("/update_weight_version", {"new_version": "v2", "abort_all_requests": False})[0] == 200
        status, answer = running.result()
    assert status == 503, answer
    deadline = time.monotonic() + 10  # the verifier's counters come with its next status
    while not client.get("/stats")["verifier"]["counters"].get("weight_changes") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert client.get("/stats")["verifier"]["counters"]["weight_changes"] >= 1
    assert len(client.ids(prompt, max_tokens=4, **ON)) == 4


def test_a_dead_engine_is_said_and_its_return_noticed(engine: Engine, client: Http, prompt: list[int]) -> None:
    expected = client.ids(prompt, max_tokens=8, **ON)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(client.complete, prompt, max_tokens=200, **ON)
        time.sleep(2)
        engine.stop()
        status, answer = running.result()
    assert status == 503, answer
    status, answer = client.complete(prompt, max_tokens=1)
    assert status == 503, answer
    engine.start()
    wait_ready(client, with_drafter=True)
    assert client.ids(prompt, max_tokens=8, **ON) == expected
