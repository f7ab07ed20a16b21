"""An SGLang server with a script instead of a model: real HTTP, real shared-memory features, given pass times.

    python -m benchmarks.controller.scripted_engine --model-dir DIR --ring RING --socket SOCK --plain-ms 12.2 \
        --verify-ms 30

It speaks what the gateway's client needs of SGLang 0.5.23 (/generate for batches and streams, /abort_request,
/server_info, /model_info) and taps features as the plugin does. Passes run one after another (pass_loop.py): a verify
waits for the decode pass under way, an aborted stream ends with it, and a new stream's first token comes from an extend
pass and takes as long as a verify. The prefix cache holds what was computed of a text, a stream's part only once it has
ended. GET /script/times says what the passes really took, POST starts that count anew.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orjson
import uvloop
from aiohttp import web

from benchmarks.controller.pass_loop import PassCosts, PassLoop, PassTimes
from benchmarks.controller.scripted_drafter import HIDDEN_SIZE
from benchmarks.controller.scripted_text import VOCAB_SIZE, ScriptedText, text_of_prompt
from verifier.sglang.plugin.announcement import Announcement
from verifier.sglang.plugin.tap import wanted_pieces
from wire.messages import FeatureSpan
from wire.process import die_with_parent
from wire.tensor_ring import TensorRingWriter

__all__ = ["CONTEXT_LEN", "ScriptedEngine", "main"]

CONTEXT_LEN = 16_384
_SLOT_ROWS = 64


@dataclass(slots=True, eq=False, kw_only=True)
class _Sequence:
    """One engine request. start_len, num_top: of a batch item. made: tokens of a stream so far."""

    rid: str
    ids: list[int]
    text: ScriptedText
    cache_key: tuple[str, int]
    start_len: int = 0
    num_top: int = 1
    max_new_tokens: int = 1
    is_stream: bool = False
    is_aborted: bool = False
    prompt_len: int = 0
    cached_len: int = 0
    made: int = 0
    answers: asyncio.Queue[dict[str, Any]] = field(default_factory=asyncio.Queue)


class ScriptedEngine:
    """One server. Built inside the event loop that serves it.

    Args:
        model_dir: what /model_info names; holds config.json and tokenizer.json.
        ring_path, socket_path: where features are written and announced.
    """

    def __init__(self, costs: PassCosts, *, model_dir: Path, ring_path: Path, socket_path: Path) -> None:
        self._model_dir = model_dir
        self._loop = asyncio.get_running_loop()
        self._tap = _Tap(ring_path, socket_path)
        self._passes: PassLoop[_Sequence] = PassLoop(costs, self._on_pass)
        self._running: dict[str, _Sequence] = {}
        self._cached: dict[tuple[str, int], int] = {}  # positions held of each text; the pass thread's
        self.app = web.Application(client_max_size=1 << 26)
        self.app.add_routes(
            [
                web.get("/server_info", self._server_info),
                web.get("/model_info", self._model_info),
                web.post("/generate", self._generate),
                web.post("/abort_request", self._abort),
                web.get("/script/times", self._times),
                web.post("/script/times", self._times),
            ]
        )
        self._passes.start()

    def close(self) -> None:
        """End the pass thread and remove the ring."""
        self._passes.stop()
        self._tap.close()

    # ------------------------------------------------------------ HTTP

    async def _server_info(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "version": "0.5.23",
                "page_size": 1,
                "context_length": None,
                "max_total_num_tokens": 4 * CONTEXT_LEN,
                "enable_return_aux_hidden_states": True,
                "return_aux_hidden_state_layer_ids": None,
                "sampling_backend": "pytorch",
                "disable_radix_cache": False,
                "speculative_algorithm": None,
            }
        )

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"model_path": str(self._model_dir), "weight_version": "default", "model_type": "llama"}
        )

    async def _times(self, request: web.Request) -> web.Response:
        if request.method == "POST":
            self._passes.times = {"extend": PassTimes(), "decode": PassTimes()}
        return web.json_response({kind: times.report() for kind, times in self._passes.times.items()})

    async def _abort(self, request: web.Request) -> web.Response:
        rid = orjson.loads(await request.read())["rid"]
        for other, sequence in self._running.items():
            if other.startswith(rid):  # by prefix, as the real one does
                sequence.is_aborted = True
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        if body.get("stream"):
            return await self._stream(request, body)
        keys = [key for key in body if key != "stream"]
        items = [dict(zip(keys, values, strict=True)) for values in zip(*(body[key] for key in keys), strict=True)]
        for item in items:
            if not item["input_ids"] or len(item["input_ids"]) >= CONTEXT_LEN:
                message = f"The input ({len(item['input_ids'])} tokens) is not within the context of {CONTEXT_LEN}."
                return web.json_response({"error": {"message": message}}, status=400)
        sequences = [
            self._sequence(item, start_len=item.get("logprob_start_len", len(item["input_ids"]) - 1)) for item in items
        ]
        try:
            self._passes.extend(sequences)
            answers = [await sequence.answers.get() for sequence in sequences]
        finally:
            for sequence in sequences:
                self._running.pop(sequence.rid, None)
        return _json(answers)

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        sequence = self._sequence(body, max_new_tokens=body["sampling_params"]["max_new_tokens"])
        try:
            self._passes.extend([sequence])
            while True:
                chunk = await sequence.answers.get()
                await response.write(b"data: " + orjson.dumps(chunk) + b"\n\n")
                if chunk["meta_info"]["finish_reason"] is not None:
                    break
            await response.write(b"data: [DONE]\n\n")
        except ConnectionError:
            pass
        finally:
            sequence.is_aborted = True  # a client that left counts as an abort
            self._running.pop(sequence.rid, None)
        return response

    def _sequence(self, item: dict[str, Any], *, start_len: int = 0, max_new_tokens: int | None = None) -> _Sequence:
        ids = list(item["input_ids"])
        text = text_of_prompt(ids)
        sequence = _Sequence(
            rid=item["rid"],
            ids=ids,
            text=text,
            cache_key=(item.get("extra_key", ""), hash(bytes(ids[: text.prompt_len]))),
            start_len=start_len,
            num_top=item.get("top_logprobs_num", 1),
            max_new_tokens=1 if max_new_tokens is None else max_new_tokens,
            is_stream=max_new_tokens is not None,
            prompt_len=len(ids),
        )
        self._running[sequence.rid] = sequence
        return sequence

    # ------------------------------------------------------------ the pass thread

    def _on_pass(self, kind: str, items: Sequence[_Sequence]) -> list[_Sequence]:
        answers = [(sequence, self._step(sequence, is_extend=kind == "extend")) for sequence in items]
        self._tap.announce()
        self._loop.call_soon_threadsafe(_deliver, answers)
        return [s for s, answer in answers if s.is_stream and answer["meta_info"]["finish_reason"] is None]

    def _step(self, sequence: _Sequence, *, is_extend: bool) -> dict[str, Any]:
        ids = sequence.ids
        if sequence.is_aborted:
            self._keep(sequence, len(ids) - 1)
            reason = {"type": "abort", "message": "Abort in running batch", "status_code": None, "err_type": None}
            return self._answer(sequence, reason)
        if is_extend:
            held = self._cached.get(sequence.cache_key, 0)
            limit = len(ids) - 1 if sequence.is_stream else min(len(ids) - 1, sequence.start_len)
            sequence.cached_len = min(held, limit)
            self._tap.write(sequence.rid, first=sequence.cached_len, last=len(ids) - 1)
            if not sequence.is_stream:
                self._keep(sequence, len(ids))
                return self._verified(sequence)
        else:
            self._tap.write(sequence.rid, first=len(ids) - 1, last=len(ids) - 1)
        ids.append(sequence.text.id_at(len(ids)))
        sequence.made += 1
        is_full = sequence.made == sequence.max_new_tokens or len(ids) >= CONTEXT_LEN
        if is_full:
            self._keep(sequence, len(ids) - 1)
        return self._answer(sequence, {"type": "length", "length": sequence.made} if is_full else None)

    def _keep(self, sequence: _Sequence, num_computed: int) -> None:
        held = self._cached.get(sequence.cache_key, 0)
        true = sequence.text.num_true(sequence.ids[:num_computed], since=min(held, num_computed))
        self._cached[sequence.cache_key] = max(held, true)

    def _answer(self, sequence: _Sequence, reason: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "text": "",
            "output_ids": sequence.ids[sequence.prompt_len :],  # all so far, as stock SGLang sends them
            "meta_info": {
                "id": sequence.rid,
                "finish_reason": reason,
                "prompt_tokens": sequence.prompt_len,
                "completion_tokens": sequence.made,
                "cached_tokens": sequence.cached_len,
                "weight_version": "default",
                "e2e_latency": 0.0,
            },
        }

    def _verified(self, sequence: _Sequence) -> dict[str, Any]:
        ids, text, start = sequence.ids, sequence.text, sequence.start_len
        positions = range(start + 1, len(ids))
        answer = self._answer(sequence, {"type": "length", "length": 1})
        next_id = text.id_at(len(ids))
        answer["output_ids"] = [next_id]
        answer["meta_info"] |= {
            "completion_tokens": 1,
            "input_token_logprobs": [[None, ids[start], None], *([-0.1, ids[p], None] for p in positions)],
            "input_top_logprobs": [None, *(self._top(sequence, p) for p in positions)],
            "output_token_logprobs": [[-0.1, next_id, None]],
            "output_top_logprobs": [self._top(sequence, len(ids))],
        }
        return answer

    def _top(self, sequence: _Sequence, position: int) -> list[list[Any]]:
        if position < sequence.text.prompt_len:
            return [[-0.1, sequence.ids[position], None]]
        right = sequence.text.id_at(position)
        others = ((right + n) % VOCAB_SIZE for n in range(1, sequence.num_top))
        return [[-0.1, right, None], *([-4.0 - n, token_id, None] for n, token_id in zip(itertools.count(), others))]


class _Tap:
    """Writes rows of zeros where the plugin would write features, and announces them. The pass thread's."""

    def __init__(self, ring_path: Path, socket_path: Path) -> None:
        self._ring = TensorRingWriter(ring_path, num_slots=512, slot_bytes=_SLOT_ROWS * 3 * HIDDEN_SIZE * 4)
        self._socket_path = str(socket_path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._rows = np.zeros((_SLOT_ROWS, 3 * HIDDEN_SIZE), np.float32)
        self._said: list[Announcement] = []

    def write(self, rid: str, *, first: int, last: int) -> None:
        """The pass computed positions ``first`` .. ``last`` of one request."""
        for piece in wanted_pieces([rid], [first], [last - first + 1]):
            spans = [
                FeatureSpan(
                    start=piece.position + at, ref=self._ring.write(self._rows[: min(_SLOT_ROWS, piece.count - at)])
                )
                for at in range(0, piece.count, _SLOT_ROWS)
            ]
            self._said += [Announcement(rid=rid, span=span) for span in spans]

    def announce(self) -> None:
        """One datagram for the pass, as the plugin does it."""
        said, self._said = self._said, []
        try:
            if said:
                self._socket.sendto(msgspec.msgpack.encode(said), self._socket_path)
        except (BlockingIOError, FileNotFoundError, ConnectionRefusedError):
            return  # nobody listens yet

    def close(self) -> None:
        """Remove the ring."""
        self._socket.close()
        self._ring.close()


def _deliver(answers: Sequence[tuple[_Sequence, dict[str, Any]]]) -> None:
    for sequence, answer in answers:
        sequence.answers.put_nowait(answer)


def _json(body: Any) -> web.Response:
    return web.Response(body=orjson.dumps(body), content_type="application/json")


async def _serve(options: argparse.Namespace) -> None:
    engine = ScriptedEngine(
        PassCosts(plain_s=options.plain_ms * 1e-3, verify_s=options.verify_ms * 1e-3),
        model_dir=options.model_dir,
        ring_path=options.ring,
        socket_path=options.socket,
    )
    runner = web.AppRunner(engine.app, shutdown_timeout=0.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", options.port).start()
    print(json.dumps({"url": f"http://127.0.0.1:{runner.addresses[0][1]}"}), flush=True)
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(15, stopped.set)
    try:
        await stopped.wait()
    finally:
        await runner.cleanup()
        engine.close()


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until SIGTERM or the parent's end; the first line printed says where."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--ring", type=Path, required=True)
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--plain-ms", type=float, default=12.2)
    parser.add_argument("--verify-ms", type=float, default=30.0)
    die_with_parent(os.getppid())
    uvloop.run(_serve(parser.parse_args(argv)))


if __name__ == "__main__":
    main()
