"""The whole thing with real processes: chat, lossless speculation, a killed drafter, bad input, draining."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.integration.stack import Server, serving, write_head, write_target

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(150)]
# The official client leaves pooled sockets to the garbage collector; nothing of ours is involved.
PROMPTS = [f"Prompt number {i}: {'abcdefghij'[i % 10] * (i % 7)}" for i in range(32)]
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.3, "frequency_penalty": 0.2}
SAMPLED_EXTRA = {"top_k": 150, "min_p": 0.01, "repetition_penalty": 1.1}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("serve")
    target = write_target(root / "target")
    with serving(
        root,
        model=str(target),
        head=str(write_head(root / "head", target)),
        model_name="tiny",
        cache_dir=str(root / "cache"),
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0, timeout=120) as opened:
        yield opened


def complete(client: openai.OpenAI, prompt: str, *, k: int, max_tokens: int = 24, **options: Any) -> str:
    """A completion with K drafts a round; 0 = speculation off."""
    extra = options.pop("extra_body", {})
    speculation = {"mode": "on", "num_draft_tokens": k} if k else {"mode": "off"}
    answer = client.completions.create(
        model="tiny",
        prompt=prompt,
        max_tokens=max_tokens,
        extra_body={"ignore_eos": True, "speculation": speculation, **extra},
        **options,
    )
    return answer.choices[0].text


def test_it_is_ready_and_lists_the_model(server: Server, client: openai.OpenAI) -> None:
    status, body = server.get("/ready")
    assert (status, body["status"]) == (200, "ready")
    assert server.get("/health")[0] == 200
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_a_streaming_chat_through_the_official_client(server: Server, client: openai.OpenAI) -> None:
    before = server.stats()
    messages = [{"role": "user", "content": "Say something."}]
    options = {"model": "tiny", "messages": messages, "max_tokens": 40, "temperature": 0.8, "seed": 4}
    stream = client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}, extra_body={"ignore_eos": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    usage = chunks[-1].usage
    assert [reason for reason in reasons if reason] == ["length"]
    assert usage.completion_tokens == 40
    whole = client.chat.completions.create(**options, extra_body={"ignore_eos": True})
    assert whole.choices[0].message.content == text
    assert whole.usage.completion_tokens == 40

    after = server.stats()
    new = {
        key: after["speculation"][key] - before["speculation"][key]
        for key in ("num_rounds", "num_draft_tokens", "num_accepted_tokens", "num_committed_tokens")
    }
    assert new["num_rounds"] > 0
    assert new["num_draft_tokens"] >= new["num_accepted_tokens"] > 0
    assert new["num_committed_tokens"] <= new["num_accepted_tokens"] + new["num_rounds"]
    assert after["tokens"]["completion_tokens"] - before["tokens"]["completion_tokens"] == 80
    assert after["verify_ms"]["count"] > 0
    assert after["verify_ms"]["p50"] > 0
    assert after["requests"]["running"] == 0


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
def test_greedy_text_is_identical_with_any_draft_length(client: openai.OpenAI, k: int) -> None:
    for prompt in PROMPTS[:4]:
        plain = complete(client, prompt, k=0, temperature=0)
        assert len(plain) > 0
        assert complete(client, prompt, k=k, temperature=0) == plain


@pytest.mark.parametrize("k", [1, 3, 8])
def test_the_same_seed_is_the_same_text_with_and_without_speculation(client: openai.OpenAI, k: int) -> None:
    texts = set()
    for seed, prompt in enumerate(PROMPTS[:4]):
        options = {"seed": seed, "extra_body": SAMPLED_EXTRA, **SAMPLED}
        plain = complete(client, prompt, k=0, **options)
        assert complete(client, prompt, k=k, **options) == plain
        texts.add(plain)
    assert len(texts) == 4


def test_other_seeds_are_other_texts(client: openai.OpenAI) -> None:
    texts = {complete(client, "x", k=2, seed=seed, temperature=1.0) for seed in range(4)}
    assert len(texts) == 4


def test_32_streams_survive_the_drafters_death(server: Server, client: openai.OpenAI) -> None:
    def options(i: int) -> dict[str, Any]:
        return {"max_tokens": 48, "temperature": 0} if i % 2 else {"max_tokens": 48, "seed": i, "temperature": 0.8}

    with ThreadPoolExecutor(32) as pool:
        plain = list(pool.map(lambda i: complete(client, PROMPTS[i], k=0, **options(i)), range(32)))
    before = server.stats()
    first_tokens = threading.Semaphore(0)

    def stream(i: int) -> str:
        text = []
        for chunk in client.completions.create(
            model="tiny",
            prompt=PROMPTS[i],
            stream=True,
            extra_body={"ignore_eos": True, "speculation": {"mode": "on", "num_draft_tokens": 3}},
            **options(i),
        ):
            first_tokens.release()
            text.append(chunk.choices[0].text)
        return "".join(text)

    with ThreadPoolExecutor(32) as pool:
        running = [pool.submit(stream, i) for i in range(32)]
        for _ in range(48):  # well under way
            assert first_tokens.acquire(timeout=60)
        os.kill(before["drafter"]["pid"], signal.SIGKILL)
        drafted = [future.result(timeout=120) for future in running]
    assert drafted == plain
    stats = server.stats()
    fallbacks = {
        reason: count - before["speculation"]["fallbacks"].get(reason, 0)
        for reason, count in stats["speculation"]["fallbacks"].items()
    }
    assert sum(fallbacks.values()) > 0, fallbacks
    stats = server.wait_for("drafter")
    assert stats["drafter"]["restarts"] == before["drafter"]["restarts"] + 1
    assert stats["drafter"]["pid"] != before["drafter"]["pid"]
    assert stats["verifier"]["restarts"] == 0
    rounds = stats["speculation"]["num_rounds"]
    complete(client, "back again", k=3, temperature=0)
    assert server.stats()["speculation"]["num_rounds"] > rounds
    assert server.stats()["requests"]["running"] == 0


CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "x"}]
BAD: dict[str, tuple[bytes | dict[str, Any], int]] = {
    "malformed": (b'{"model": "tiny", ', 400),
    "empty body": (b"", 400),
    "not an object": (b"[1]", 400),
    "not UTF-8": (b'{"model": "\xff"}', 400),
    "wrong type": ({"model": "tiny", "messages": "hello"}, 400),
    "empty messages": ({"model": "tiny", "messages": []}, 400),
    "unknown model": ({"model": "other", "messages": USER}, 404),
    "NaN": (b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}', 400),
    "temperature as text": ({"model": "tiny", "messages": USER, "temperature": "hot"}, 400),
    "negative max_tokens": ({"model": "tiny", "messages": USER, "max_tokens": -1}, 400),
    "over-long prompt": ({"model": "tiny", "messages": [{"role": "user", "content": "x" * 4000}]}, 400),
    "2 MB": ({"model": "tiny", "messages": [{"role": "user", "content": "x" * (2 << 20)}]}, 400),
    "bias outside": ({"model": "tiny", "messages": USER, "logit_bias": {"999999": 1}}, 400),
}


@pytest.mark.parametrize(("body", "status"), BAD.values(), ids=BAD.keys())
def test_bad_input_gets_a_nested_error_and_harms_nothing(
    server: Server, client: openai.OpenAI, body: bytes | dict[str, Any], status: int
) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    got, answer = server.post(CHAT, data)
    assert got == status, answer
    assert set(answer["error"]) >= {"message", "type", "param", "code"}
    assert answer["error"]["message"]
    assert complete(client, "still there", k=2, max_tokens=2, temperature=0)


def test_an_extreme_temperature_ends(server: Server, client: openai.OpenAI) -> None:
    # Dividing by it overflows; the verifier serves everybody, so it must not spin.
    greedy = complete(client, "x", k=0, max_tokens=4, temperature=0)
    assert complete(client, "x", k=3, max_tokens=4, temperature=1e-308, top_p=0.9) == greedy


def test_metrics_show_the_same_numbers(server: Server) -> None:
    with urllib.request.urlopen(server.url + "/metrics", timeout=20) as answer:
        text = answer.read().decode()
    stats = server.stats()
    line = next(line for line in text.splitlines() if line.startswith("breakeven_spec_accepted_tokens_total"))
    assert float(line.split()[-1]) == stats["speculation"]["num_accepted_tokens"]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not (state.exists() and ") Z " in state.read_text())


def test_sigterm_lets_running_streams_finish_and_leaves_nothing_behind(server: Server, tmp_path: Path) -> None:
    root = server.log_path.parent
    with serving(
        tmp_path,
        model=str(root / "target"),
        head=str(root / "head"),
        model_name="tiny",
        cache_dir=str(root / "cache"),
    ) as second:
        stats = second.stats()
        children = [stats["verifier"]["pid"], stats["drafter"]["pid"]]
        second.process.send_signal(signal.SIGHUP)  # keys are read again; nothing else happens
        end = time.monotonic() + 5
        while "api keys reloaded" not in second.log() and time.monotonic() < end:
            time.sleep(0.02)
        assert "api keys reloaded" in second.log()
        with openai.OpenAI(base_url=second.url + "/v1", api_key="unused", max_retries=0, timeout=60) as client:
            stream = client.completions.create(
                model="tiny", prompt="x", max_tokens=300, temperature=0, stream=True, extra_body={"ignore_eos": True}
            )
            chunks = iter(stream)
            next(chunks)
            second.process.send_signal(signal.SIGTERM)
            end = time.monotonic() + 5
            while time.monotonic() < end:
                status, body = second.get("/ready")
                if status == 503:
                    break
            assert (status, body["status"]) == (503, "draining")
            refused, answer = second.post("/v1/completions", json.dumps({"model": "tiny", "prompt": "x"}).encode())
            assert (refused, answer["error"]["code"]) == (503, "draining")
            last = list(chunks)[-1]
            assert last.choices[0].finish_reason == "length"
        assert second.process.wait(30) == 0, second.log()
        end = time.monotonic() + 10
        while any(_is_alive(pid) for pid in children) and time.monotonic() < end:
            time.sleep(0.05)
        assert not any(_is_alive(pid) for pid in children)
