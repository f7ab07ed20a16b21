"""The whole product around a scripted engine: engine, drafter and gateway as processes, with everything real between.

HTTP client -> ``breakeven serve`` -> drafter over the wire link, engine over HTTP, features through the plugin's ring.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.controller.scripted_drafter import HIDDEN_SIZE
from benchmarks.controller.scripted_engine import CONTEXT_LEN
from benchmarks.controller.scripted_text import VOCAB_SIZE
from benchmarks.served import served

__all__ = ["MODEL_NAME", "PROFILE", "ReplayCosts", "Stack", "replay_stack", "write_model_dir"]

PROFILE = "kimi-k2.5-8x-rtx-pro-6000"  # the founding case's own
MODEL_NAME = "founding-case"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayCosts:
    """Milliseconds: a plain token, a verify whatever its length, one draft token."""

    plain_ms: float = 12.2
    verify_ms: float = 30.0
    draft_ms: float = 1.0

    def round_ms(self, num_draft_tokens: int) -> float:
        """A round as the costs alone would have it; what is measured beyond it is overhead."""
        return self.verify_ms + self.draft_ms * num_draft_tokens if num_draft_tokens else self.plain_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A running gateway with an engine and a drafter of its own."""

    url: str
    engine_url: str


def write_model_dir(model_dir: Path) -> None:
    """What the gateway reads of a target: a tokenizer whose ids are bytes, and the sizes."""
    model_dir.mkdir(parents=True, exist_ok=True)
    vocab = {char: byte for byte, char in enumerate(_byte_chars())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(model_dir / "tokenizer.json"))
    sizes = {
        "model_type": "llama",
        "num_hidden_layers": 61,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "max_position_embeddings": CONTEXT_LEN,
    }
    (model_dir / "config.json").write_text(json.dumps(sizes))


def _byte_chars() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(hidden)) for byte in range(256)]


@asynccontextmanager
async def replay_stack(
    directory: Path, costs: ReplayCosts, *, mode: str, trace_path: Path | None = None
) -> AsyncIterator[Stack]:
    """Start all three, with sockets and ring in ``directory``.

    Args:
        mode: speculation.mode of the gateway: auto, on (K = 3) or off.
        trace_path: where the controller's decisions are recorded.
    """
    write_model_dir(directory / "model")
    ring, tap, draft = directory / "ring", directory / "tap.sock", directory / "draft.sock"
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(
            _child(
                "scripted_engine",
                *("--model-dir", str(directory / "model"), "--ring", str(ring), "--socket", str(tap)),
                *("--plain-ms", str(costs.plain_ms), "--verify-ms", str(costs.verify_ms)),
            )
        )
        engine_url = str(json.loads(engine)["url"])
        await stack.enter_async_context(
            _child(
                "scripted_drafter",
                *("--endpoint", f"ipc://{draft}", "--ring", str(ring), "--draft-ms", str(costs.draft_ms)),
            )
        )
        flags = {
            "gateway.host": "127.0.0.1",
            "engine.model_name": MODEL_NAME,
            "engine.spawn_drafter": "false",
            "drafter.endpoint": f"ipc://{draft}",
            "sglang.target_ids": "off",  # the scripted engine draws nothing
            "sglang.url": engine_url,
            "sglang.model_dir": str(directory / "model"),
            "sglang.tap_ring_path": str(ring),
            "sglang.tap_socket_path": str(tap),
            "speculation.mode": mode,
            "speculation.candidates": "1,2,3,4,5,6,8",  # as in the simulator
            "speculation.trace_path": "" if trace_path is None else str(trace_path),
        }
        wait_for = ("verifier",) if mode == "off" else ("verifier", "drafter")
        url = await stack.enter_async_context(served(PROFILE, flags, wait_for=wait_for))
        yield Stack(url=url, engine_url=engine_url)


@asynccontextmanager
async def _child(module: str, *arguments: str) -> AsyncIterator[str]:
    """Run a module of this package; yields the first line it prints, which says that it listens."""
    command = [sys.executable, "-m", f"benchmarks.controller.{module}", *arguments]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        line = await process.stdout.readline()
        if not line:
            raise RuntimeError(f"{module} ended at once")
        yield line.decode()
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
