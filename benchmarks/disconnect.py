"""How long after a client has left its generation ends: over real sockets, for streams, silence and whole answers.

The time runs from the close of the client's socket to the moment the engine's generator is closed, both in one process
and on one clock. That is what the engine's own abort waits for; everything after it is the engine's time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.edge import FastEngine, NullCodec, stream_request
from benchmarks.provenance import provenance
from gateway.config import GatewayConfig
from gateway.http import create_app, start_server
from gateway.ports import GenerationDelta, GenerationFinished, GenerationRequest, PromptScored

__all__ = ["main"]

_GOAL_MS = 100.0


@dataclass(slots=True, kw_only=True)
class _WatchedEngine(FastEngine):
    """Says when a generation has begun and when it was closed. ``is_silent``: it never commits anything."""

    is_silent: bool = False
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    closed_s: float = 0.0

    async def generate(
        self, request: GenerationRequest
    ) -> AsyncGenerator[PromptScored | GenerationDelta | GenerationFinished, None]:
        """See Engine."""
        try:
            self.begun.set()
            while True:
                await asyncio.sleep(3600.0 if self.is_silent else 0.01)
                yield GenerationDelta(text="word", token_ids=(97,))
        finally:
            self.closed_s = time.perf_counter()
            self.closed.set()


async def _abort_ms(engine: _WatchedEngine, port: int, *, stream: bool) -> float:
    engine.begun.clear()
    engine.closed.clear()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(stream_request(1000, stream=stream))
    await asyncio.wait_for(engine.begun.wait(), 10)
    if stream and not engine.is_silent:
        await reader.read(1)
    else:
        await asyncio.sleep(0.005)
    left_s = time.perf_counter()
    writer.transport.abort()
    await asyncio.wait_for(engine.closed.wait(), 30)
    return (engine.closed_s - left_s) * 1000


async def _run(options: argparse.Namespace) -> dict[str, Any]:
    cases = {"stream": (True, False), "silent prefill": (True, True), "not streamed": (False, False)}
    results = {}
    for name, (stream, is_silent) in cases.items():
        engine = _WatchedEngine(is_silent=is_silent)
        config = GatewayConfig(port=0)
        runner = await start_server(create_app(engine, NullCodec(), config), config)
        port = runner.addresses[0][1]
        times = [await _abort_ms(engine, port, stream=stream) for _ in range(options.repeats)]
        await runner.cleanup()
        results[name] = {
            "p50_ms": round(statistics.median(times), 3),
            "p99_ms": round(statistics.quantiles(times, n=100)[98], 3),
            "max_ms": round(max(times), 3),
        }
        row = results[name]
        print(f"{name:<16} p50 {row['p50_ms']:>8} ms   p99 {row['p99_ms']:>8} ms   max {row['max_ms']:>8} ms")
    return results


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--output", type=Path, help="write the result with its provenance here")
    options = parser.parse_args(argv)
    results = uvloop.run(_run(options))
    record = {
        "benchmark": "disconnect",
        "goal_ms": _GOAL_MS,
        "config": {"repeats": options.repeats},
        "results": results,
        "provenance": provenance(sys.argv),
    }
    print(json.dumps(record))
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
