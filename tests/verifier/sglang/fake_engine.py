"""A fake SGLang over real HTTP, for everything but numerics: same requests, same replies, same ways of saying no.

Checked against recordings of the real one in test_recordings.py.
"""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from tests.verifier.sglang import toy_model
from tests.verifier.sglang.toy_passes import Made, ToyPasses, ToyRequest
from verifier.sglang.plugin.announcement import Announcement
from verifier.sglang.plugin.draws import TargetDraws
from verifier.sglang.plugin.orders import PluginReport
from verifier.sglang.plugin.tap import wanted_pieces
from wire.messages import FeatureSpan
from wire.tensor_ring import TensorRingWriter


@dataclass
class FakeEngine:
    """Knobs are read at each request.

    refusals: (status, body) answered to the next /generate calls instead, in order.
    overloads: so many next sequences are aborted for load; ``overload_form`` says how: "503" or "inside_200".
    draws: the plugin, which runs in this engine's passes. cuts_after: an extend is cut there, once, into two passes.
    reply_delay_s, token_delay_s: before a reply, between stream chunks.
    tap: directory of the plugin's ``ring`` and ``tap.sock``; None = features are in the reply.
    taps_streams: False loses what would be announced of streams.
    """

    context_len: int = 128
    page_size: int = 1
    chunk_len: int = 1 << 20
    captures_aux: bool = True
    has_aux_flag: bool = True
    draws: TargetDraws | None = None
    is_incremental: bool = False
    version: str = "0.5.23"
    weight_version: str = "default"
    refusals: list[tuple[int, Any]] = field(default_factory=list)
    overloads: int = 0
    overload_form: str = "503"
    reply_delay_s: float = 0.0
    token_delay_s: float = 0.0
    break_streams_after: int | None = None
    tap: Path | None = None
    taps_streams: bool = True
    cuts_after: int | None = None
    begun_rids: set[str] = field(default_factory=set)
    posts: list[dict[str, Any]] = field(default_factory=list)
    streams: list[dict[str, Any]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    running: dict[str, asyncio.Event] = field(default_factory=dict)
    cache: list[tuple[str, list[int]]] = field(default_factory=list)
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(5))
    url: str = ""
    _runner: web.AppRunner | None = None
    _is_stopping: asyncio.Event = field(default_factory=asyncio.Event)

    async def _pause(self, duration_s: float) -> None:
        try:
            await asyncio.wait_for(self._is_stopping.wait(), duration_s)
        except TimeoutError:
            return
        await asyncio.sleep(0.02)  # the server is being closed

    async def start(self, model_dir: Path, port: int = 0) -> None:
        self.model_dir = model_dir
        if self.tap is not None:
            self._ring = TensorRingWriter(self.tap / "ring", num_slots=64, slot_bytes=4 * 12 * toy_model.HIDDEN_SIZE)
            self._tap_socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._tap_socket.setblocking(False)
        self._is_stopping.clear()
        (model_dir / "config.json").write_text(
            json.dumps(
                {
                    "model_type": "llama",
                    "num_hidden_layers": 12,
                    "vocab_size": toy_model.VOCAB_SIZE,
                    "hidden_size": toy_model.HIDDEN_SIZE,
                    "max_position_embeddings": self.context_len + 6,
                }
            )
        )
        app = web.Application(client_max_size=1 << 26)
        app.add_routes(
            [
                web.get("/server_info", self._server_info),
                web.get("/model_info", self._model_info),
                web.post("/generate", self._generate),
                web.post("/abort_request", self._abort),
            ]
        )
        self._runner = web.AppRunner(app, shutdown_timeout=0.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    async def stop(self) -> None:
        self._is_stopping.set()
        for event in self.running.values():
            event.set()
        await asyncio.sleep(0.05)  # handlers end by themselves
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
            if self.tap is not None:
                self._ring.close()
                self._tap_socket.close()

    async def _announce(self, rid: str, ids: list[int], begin: int) -> None:
        """Features of the positions from ``begin`` on, as the plugin would tap them."""
        for piece in wanted_pieces([rid], [begin], [len(ids) - begin]) if self.tap is not None else ():
            rows = [
                FeatureSpan(start=p, ref=self._ring.write(np.asarray([toy_model.features(ids, p)], np.float32)))
                for p in range(piece.position, piece.position + piece.count)
            ]
            data = msgspec.msgpack.encode([Announcement(rid=rid, span=span) for span in rows])
            while True:
                try:
                    self._tap_socket.sendto(data, str(self.tap / "tap.sock"))
                    break
                except BlockingIOError:  # the receiver lives in this very loop
                    await asyncio.sleep(0)

    async def _server_info(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "version": self.version,
                "page_size": self.page_size,
                "context_length": None,
                "max_total_num_tokens": 32768,
                "max_req_input_len": self.context_len,  # SGLang keeps six positions to itself
                "enable_return_hidden_states": self.captures_aux,
                **({"enable_return_aux_hidden_states": self.captures_aux} if self.has_aux_flag else {}),
                "return_aux_hidden_state_layer_ids": None,
                "sampling_backend": "pytorch",
                "disable_radix_cache": False,
                "speculative_algorithm": None,
            }
        )

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"model_path": str(self.model_dir), "weight_version": self.weight_version, "model_type": "llama"}
        )

    async def _abort(self, request: web.Request) -> web.Response:
        rid = (await request.json())["rid"]
        self.aborted.append(rid)
        if rid in self.running:  # unknown ids are ignored; known ones abort by prefix, as the scheduler does
            for other, event in self.running.items():
                if other.startswith(rid):
                    event.set()
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body.get("stream"):
            self.streams.append(body)
        else:
            self.posts.append(body)
        if self.refusals:
            status, answer = self.refusals.pop(0)
            return web.json_response(answer, status=status)
        if body.get("stream"):
            return await self._stream(request, body)
        return await self._batch(body)

    async def _batch(self, body: dict[str, Any]) -> web.Response:
        keys = [key for key in body if key != "stream"]
        items = [dict(zip(keys, values, strict=True)) for values in zip(*(body[key] for key in keys), strict=True)]
        for item in items:
            if len(item["input_ids"]) >= self.context_len:
                return _flat_400(
                    f"The input ({len(item['input_ids'])} tokens) is longer than the model's context length "
                    f"({self.context_len} tokens)."
                )
            if item.get("return_hidden_states") and not self.captures_aux:
                return _flat_400("The server is not configured to return hidden states.")
        for item in items:
            if item["rid"] in self.running or item["rid"] in self.begun_rids:
                return _flat_400(f"Duplicate request ID detected: {item['rid']}")
            self.running[item["rid"]] = asyncio.Event()
        try:
            if self.reply_delay_s:
                await self._pause(self.reply_delay_s)
            answers = []
            for item in items:
                if self.overloads > 0:
                    self.overloads -= 1
                    if self.overload_form == "503":
                        # Those before it in the batch run on, and their rids stay taken.
                        self.begun_rids |= {other["rid"] for other in items}
                        return web.json_response({"detail": "The request queue is full."}, status=503)
                    answers.append(self._aborted(item, "The request queue is full.", 503))
                elif self.running[item["rid"]].is_set():
                    answers.append(self._aborted(item, "Abort in waiting queue", None))
                else:
                    answers.append(await self._answer(item))
            return web.json_response(answers)
        finally:
            for item in items:
                self.running.pop(item["rid"], None)

    async def _answer(self, item: dict[str, Any]) -> dict[str, Any]:
        ids, num_top = item["input_ids"], item.get("top_logprobs_num", 0)
        start = item.get("logprob_start_len", len(ids) - 1)
        key = item.get("extra_key", "")
        cached = self._match(ids, limit=min(len(ids) - 1, start), key=key)
        made = self._pass(item, cached, start)
        next_id = made.ids[0]
        self.cache.append((key, [*ids]))
        meta = self._meta(item["rid"], len(ids), 1, cached, {"type": "length", "length": 1})
        meta["input_token_logprobs"] = [
            [float(toy_model.logprobs(ids[:p])[ids[p]]) if p > start else None, ids[p], None]
            for p in range(start, len(ids))
        ]
        meta["input_top_logprobs"] = [_top(ids[:p], num_top) if p > start else None for p in range(start, len(ids))]
        meta["output_token_logprobs"] = [[made.logprobs[0], next_id, None]]
        if self.draws is not None:
            meta["breakeven"] = [made.entries[item["rid"]]]
        meta["output_top_logprobs"] = [_top(ids, num_top)]
        await self._announce(item["rid"], ids, cached)
        if item.get("return_hidden_states"):
            first = cached + max(0, (len(ids) - cached - 1) // self.chunk_len) * self.chunk_len
            meta["hidden_states"] = [[toy_model.features(ids, p) for p in range(first, len(ids))]]
        return {"text": "?", "output_ids": [next_id], "meta_info": meta}

    def _pass(self, item: dict[str, Any], cached: int, start: int) -> Made:
        ids = item["input_ids"]
        request = ToyRequest(item["rid"], ids, item["sampling_params"].get("custom_params"))
        draws = self.draws or TargetDraws(PluginReport)
        if self.draws is None:
            request.sampling_params.custom_params = None
        cut, self.cuts_after = self.cuts_after, None
        passes = ToyPasses(draws)
        if cut is not None and cached < cut < len(ids):
            passes.extend((request, cached, cut, start))
            cached = cut
        return passes.extend((request, cached, len(ids), start))

    def _aborted(self, item: dict[str, Any], message: str, status: int | None) -> dict[str, Any]:
        reason = {"type": "abort", "message": message, "status_code": status, "err_type": None}
        return {
            "text": "",
            "output_ids": [],
            "meta_info": self._meta(item["rid"], len(item["input_ids"]), 0, 0, reason),
        }

    def _match(self, ids: list[int], *, limit: int, key: str) -> int:
        best = 0
        for held_key, held in self.cache:
            if held_key != key:
                continue
            length = 0
            for a, b in zip(held, ids, strict=False):
                if a != b:
                    break
                length += 1
            best = max(best, length)
        return min(best, limit) // self.page_size * self.page_size

    def _meta(self, rid: str, prompt: int, made: int, cached: int, reason: Any) -> dict[str, Any]:
        return {
            "id": rid,
            "finish_reason": reason,
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "cached_tokens": cached,
            "weight_version": self.weight_version,
            "e2e_latency": 0.001,
        }

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        rid, ids, params = body["rid"], list(body["input_ids"]), body["sampling_params"]
        prompt_len = len(ids)
        key = body.get("extra_key", "")
        cached = self._match(ids, limit=len(ids) - 1, key=key)
        stopped = self.running[rid] = asyncio.Event()
        own: list[Any] = []
        tops: list[Any] = []
        entries: list[Any] = []
        request_in_engine = ToyRequest(rid, ids, params.get("custom_params"))
        try:
            if self.overloads > 0:
                self.overloads -= 1
                aborted = self._aborted({"rid": rid, "input_ids": ids}, "The request queue is full.", 503)
                await _send(response, aborted)
                return response
            for made in range(1, params["max_new_tokens"] + 1):
                await self._pause(self.token_delay_s)
                if stopped.is_set():
                    break
                if self.break_streams_after is not None and made > self.break_streams_after:
                    assert request.transport is not None
                    request.transport.abort()
                    return response
                if self.taps_streams:
                    await self._announce(rid, ids, cached if made == 1 else len(ids) - 1)
                token_id, entry = self._sample(ids, params, request_in_engine)
                entries.append(entry)
                own.append([float(toy_model.logprobs(ids)[token_id]), token_id, None])
                tops.append(_top(ids, body.get("top_logprobs_num", 0)))
                ids.append(token_id)
                reason = {"type": "length", "length": made} if made == params["max_new_tokens"] else None
                meta = self._meta(rid, prompt_len, made, cached, reason)
                since = made - 1 if self.is_incremental else 0
                if body.get("return_logprob"):
                    meta |= {"output_token_logprobs": own[since:], "output_top_logprobs": tops[since:]}
                if self.draws is not None:
                    meta["breakeven"] = entries[since:]
                await _send(response, {"text": "?", "output_ids": ids[prompt_len + since :], "meta_info": meta})
            await response.write(b"data: [DONE]\n\n")
        except ConnectionError:
            pass
        finally:
            self.running.pop(rid, None)
            self.cache.append((key, ids))
        return response

    def _sample(self, ids: list[int], params: dict[str, Any], request: ToyRequest) -> tuple[int, Any]:
        if self.draws is not None and request.sampling_params.custom_params is not None:
            passes, size = ToyPasses(self.draws), len(request.origin_input_ids)
            made = passes.extend((request, 0, size, size - 1)) if len(ids) == size else passes.decode(request)
            request.output_ids.append(made.ids[0])
            return made.ids[0], made.entries[request.rid]
        return self._own_sample(ids, params), None

    def _own_sample(self, ids: list[int], params: dict[str, Any]) -> int:
        row = toy_model.logits(ids).astype(np.float64)
        for token_id, bias in params.get("logit_bias", {}).items():
            row[int(token_id)] += bias
        if params["temperature"] == 0.0:
            return int(row.argmax())
        return int((row / params["temperature"] + self.rng.gumbel(size=len(row))).argmax())


def _top(ids: list[int], num: int) -> list[Any]:
    row = toy_model.logprobs(ids)
    order = np.argsort(-row, kind="stable")[:num]
    return [[float(row[i]), int(i), None] for i in order]


def _flat_400(message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=400)


async def _send(response: web.StreamResponse, chunk: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
