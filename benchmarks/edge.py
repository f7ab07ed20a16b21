"""What the HTTP edge costs: 256 concurrent streams through it, against direct streaming from the same fake engine.

Server and load run in a process each. Two scenarios, each with both servers interleaved in one session:

    saturated   the engine has every token ready: tokens/s is what the edge can relay at most
    paced       a stream gets a block every so often, as from a real engine: time between tokens, and what the edge adds

Beside wall times, the server's own processor time per event is measured: on a machine that others use too, they hardly
change it.

"Direct" is an aiohttp handler that writes the same chunk for each engine event and does nothing else: no parsing, no
admission, no text work, no deadlines, no counters. The ceiling is therefore aiohttp's own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import uvloop
from aiohttp import web

from benchmarks.processor_time import processor_time_s
from benchmarks.provenance import provenance
from gateway.config import GatewayConfig
from gateway.http import create_app, start_server
from gateway.ports import (
    ChatMessage,
    GenerationDelta,
    GenerationFinished,
    GenerationRequest,
    LoadPhase,
    ModelCard,
    PromptScored,
    RequestSpeculation,
    Usage,
)
from gateway.stats import StatsSnapshot
from wire.sampling import SamplingParams

__all__ = ["FastEngine", "NullCodec", "main", "serving", "stream_request"]

_NO_SPECULATION = RequestSpeculation(
    num_rounds=0, num_plain_rounds=0, num_draft_tokens=0, num_accepted_tokens=0, draft_s=0.0, verify_s=0.0
)


class NullCodec:
    """Ids are bytes; nothing is special."""

    eos_ids: frozenset[int] = frozenset()
    special_ids: frozenset[int] = frozenset()

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """See TextCodec."""
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """See TextCodec."""
        return bytes(token_ids).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """See TextCodec."""
        return bytes([token_id])

    def render_chat(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True) -> list[int]:
        """See TextCodec."""
        return self.encode("".join(message.content for message in messages))


@dataclass(slots=True, kw_only=True)
class FastEngine:
    """Commits ``block`` tokens of four characters every ``pace_s`` seconds; 0 = as fast as the loop turns."""

    block: int = 1
    pace_s: float = 0.0
    num_running: int = 0

    async def generate(
        self, request: GenerationRequest
    ) -> AsyncGenerator[PromptScored | GenerationDelta | GenerationFinished, None]:
        """See Engine."""
        delta = GenerationDelta(text="word" * self.block, token_ids=tuple(range(97, 97 + self.block)))
        num_blocks = request.max_new_tokens // self.block
        for _ in range(num_blocks):
            await asyncio.sleep(self.pace_s)
            yield delta
        usage = Usage(prompt_tokens=len(request.prompt_ids), completion_tokens=num_blocks * self.block)
        yield GenerationFinished(finish_reason="length", matched_stop=None, usage=usage, speculation=_NO_SPECULATION)

    def admit(self, num_choices: int) -> None:
        """See Engine."""
        self.num_running += num_choices

    def release(self, num_choices: int) -> None:
        """See Engine."""
        self.num_running -= num_choices

    def stats(self) -> StatsSnapshot:
        """See Engine; not part of this benchmark."""
        raise NotImplementedError

    def load_phase(self) -> LoadPhase:
        """See Engine."""
        return LoadPhase(is_ready=True, is_draining=False, phase="ready")

    def model_card(self) -> ModelCard:
        """See Engine."""
        return ModelCard(name="fake", aliases=(), context_len=1 << 20, vocab_size=256, created_s=0)


# ---------------------------------------------------------------- the two servers


def _direct_app(engine: FastEngine) -> web.Application:
    async def chat(request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        generation = GenerationRequest(
            request_id="x", prompt_ids=(1,), sampling=SamplingParams(), max_new_tokens=body["max_tokens"]
        )
        async for event in engine.generate(generation):
            text = event.text if isinstance(event, GenerationDelta) else ""
            choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
            chunk = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "fake", "choices": [choice]}
            await response.write(b"data: %b\n\n" % orjson.dumps(chunk))
        await response.write_eof(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    return app


async def _serve(kind: str, engine: FastEngine) -> None:
    if kind == "direct":
        runner = web.AppRunner(_direct_app(engine), handler_cancellation=True, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
    else:
        config = GatewayConfig(port=0)
        runner = await start_server(create_app(engine, NullCodec(), config), config)
    print(runner.addresses[0][1], flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


@asynccontextmanager
async def serving(kind: str, *, block: int, pace_s: float) -> AsyncIterator[tuple[int, int]]:
    """A server process; yields its port and process id."""
    command = [sys.executable, "-m", "benchmarks.edge", "--serve", kind, "--block", str(block), "--pace-s", str(pace_s)]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield int(await asyncio.wait_for(process.stdout.readline(), 60)), process.pid
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


# ---------------------------------------------------------------- the load


def stream_request(num_tokens: int, *, stream: bool = True) -> bytes:
    """One whole HTTP request."""
    body = orjson.dumps(
        {
            "model": "fake",
            "messages": [{"role": "user", "content": "Hi"}],
            "stream": stream,
            "max_tokens": num_tokens,
        }
    )
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def _one_stream(port: int, num_tokens: int) -> tuple[float, float]:
    """Seconds until the first and until the last bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        begin_s = time.perf_counter()
        writer.write(stream_request(num_tokens))
        first_s, tail = 0.0, b""
        while b"[DONE]" not in tail:
            chunk = await reader.read(65_536)
            if not chunk:
                raise ConnectionError("the server closed a stream before its end")
            first_s = first_s or time.perf_counter() - begin_s
            tail = (tail + chunk)[-32:]
        return first_s, time.perf_counter() - begin_s
    finally:
        writer.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One repeat: all streams together."""

    tok_per_s: float
    ms_per_token: float  # of one stream, median over the streams, the first block left out
    cpu_us_per_event: float  # of the server, user and system


async def _measure(port: int, pid: int, *, num_streams: int, num_tokens: int, block: int) -> Measured:
    begin_s, begin_cpu_s = time.perf_counter(), processor_time_s(pid)
    times = await asyncio.gather(*(_one_stream(port, num_tokens) for _ in range(num_streams)))
    wall_s = time.perf_counter() - begin_s
    delivered = num_tokens // block * block
    spans = [(last - first) / max(1, delivered - block) for first, last in times]
    cpu_s = processor_time_s(pid) - begin_cpu_s
    return Measured(
        tok_per_s=num_streams * delivered / wall_s,
        ms_per_token=statistics.median(spans) * 1000,
        cpu_us_per_event=cpu_s * 1e6 / (num_streams * delivered / block),
    )


async def _scenario(options: argparse.Namespace, *, pace_s: float) -> dict[str, Any]:
    found: dict[str, list[Measured]] = {"direct": [], "gateway": []}
    load = {"num_streams": options.streams, "num_tokens": options.tokens, "block": options.block}
    async with (
        serving("direct", block=options.block, pace_s=pace_s) as direct,
        serving("gateway", block=options.block, pace_s=pace_s) as gateway,
    ):
        servers = {"direct": direct, "gateway": gateway}
        for repeat in range(options.repeats + 1):
            for kind, (port, pid) in servers.items():
                measured = await _measure(port, pid, **load)
                if repeat > 0:  # the first one warms up
                    found[kind].append(measured)
    return {kind: _summary(runs) for kind, runs in found.items()}


def _summary(runs: list[Measured]) -> dict[str, Any]:
    rates = [run.tok_per_s for run in runs]
    gaps = [run.ms_per_token for run in runs]
    costs = [run.cpu_us_per_event for run in runs]
    return {
        "tok_per_s": round(statistics.median(rates)),
        "tok_per_s_spread": [round(min(rates)), round(max(rates))],
        "ms_per_token": round(statistics.median(gaps), 4),
        "ms_per_token_spread": [round(min(gaps), 4), round(max(gaps), 4)],
        "cpu_us_per_event": round(statistics.median(costs), 1),
        "cpu_us_per_event_spread": [round(min(costs), 1), round(max(costs), 1)],
    }


async def _run(options: argparse.Namespace) -> dict[str, Any]:
    scenarios = {
        "saturated": await _scenario(options, pace_s=0.0),
        "paced": await _scenario(options, pace_s=options.pace_s),
    }
    for name, both in scenarios.items():
        added = both["gateway"]["ms_per_token"] / both["direct"]["ms_per_token"] - 1
        both["added_percent"] = round(added * 100, 1)
        added_cpu = both["gateway"]["cpu_us_per_event"] / both["direct"]["cpu_us_per_event"] - 1
        both["added_cpu_percent"] = round(added_cpu * 100, 1)
        print(f"{name}: {options.streams} streams, {options.tokens} tokens each, {options.block} tokens an event")
        for kind in ("direct", "gateway"):
            row = both[kind]
            gap, cost = row["ms_per_token"], row["cpu_us_per_event"]
            print(f"  {kind:<8} {row['tok_per_s']:>8} tok/s {gap:>9.4f} ms per token of one stream {cost:>7} us cpu")
        print(f"  added    {both['added_percent']:>8} % in time, {both['added_cpu_percent']} % in processor time")
    return scenarios


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark, or one of its servers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--block", type=int, default=3, help="tokens in one event; what a round commits")
    parser.add_argument("--pace-s", type=float, default=0.1, help="seconds between the blocks of a paced stream")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, help="write the result with its provenance here")
    parser.add_argument("--serve", choices=["direct", "gateway"], help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.serve:
        uvloop.run(_serve(options.serve, FastEngine(block=options.block, pace_s=options.pace_s)))
        return
    scenarios = uvloop.run(_run(options))
    config = {key: value for key, value in vars(options).items() if key not in ("serve", "output")}
    record = {"benchmark": "edge", "config": config, "scenarios": scenarios, "provenance": provenance(sys.argv)}
    print(json.dumps(record))
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
