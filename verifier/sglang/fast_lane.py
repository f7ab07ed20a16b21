"""The gateway's end of the fast lane: verify batches to the plugin in SGLang's scheduler, past HTTP and tokenizer."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from verifier.sglang.answers import Answer
from verifier.sglang.plugin.lane_messages import LANE_VERSION, LaneAnswers, LaneCall, LaneItem, pack_ids
from wire.errors import PeerLost, PeerRefused

__all__ = ["FastLane"]

_ENCODER = msgspec.msgpack.Encoder()
_ANSWERS = msgspec.msgpack.Decoder(LaneAnswers)
_ANSWER = msgspec.msgpack.Decoder(Answer)


class FastLane:
    """A DEALER to the plugin's ROUTER. Made inside a running event loop; the owner runs ``read`` as a task.

    The plugin refuses a call as a whole and by no name, so a refusal goes to all that wait: they ask again over HTTP.

    Args:
        endpoint: where the plugin is bound; ZeroMQ waits for it.
    """

    def __init__(self, endpoint: str) -> None:
        self.task: asyncio.Task[None] | None = None
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)
        self._is_closed = False
        self._waiting: dict[str, asyncio.Future[Answer]] = {}

    def close(self) -> None:
        """Disconnect and fail whoever waits."""
        self._is_closed = True
        if self.task is not None:
            self.task.cancel()
        self._fail(PeerLost("the fast lane was closed"))
        self._socket.close()
        self._context.term()

    async def generate(self, payload: dict[str, Any]) -> list[Answer]:
        """What ``EngineHttp.generate`` does with the same payload of lists, without the weights' version.

        The caller sets the time limit.

        Raises:
            PeerLost: the lane is closed. PeerRefused: the plugin refused the call.
        """
        if self._is_closed:
            raise PeerLost("the fast lane was closed")
        items = lane_items(payload)
        loop = asyncio.get_running_loop()
        futures = {item.rid: loop.create_future() for item in items}
        self._waiting |= futures
        try:
            await self._socket.send(_ENCODER.encode(LaneCall(LANE_VERSION, items)))
            return [await future for future in futures.values()]
        finally:
            for rid, future in futures.items():
                self._waiting.pop(rid, None)
                future.cancel()

    async def read(self) -> None:
        """Take in answers until cancelled."""
        while True:
            data = await self._socket.recv()
            try:
                said = _ANSWERS.decode(data)
                answers = [(rid, _ANSWER.decode(answer)) for rid, answer in said.answers]
            except msgspec.MsgspecError as error:
                self._fail(PeerRefused("target_error", f"unreadable answer over the fast lane: {error}"))
                continue
            if said.error:
                self._fail(PeerRefused("target_error", said.error))
            for rid, answer in answers:
                future = self._waiting.pop(rid, None)
                if future is not None and not future.done():
                    future.set_result(answer)

    def _fail(self, error: Exception) -> None:
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(error)


def lane_items(payload: dict[str, Any]) -> list[LaneItem]:
    """A batch payload of columns as the lane's rows; missing columns have SGLang's defaults."""
    rids = payload["rid"]
    nothing: list[Any] = [None] * len(rids)
    columns = zip(
        rids,
        payload["input_ids"],
        payload["sampling_params"],
        payload.get("return_logprob", nothing),
        payload.get("logprob_start_len", nothing),
        payload.get("top_logprobs_num", nothing),
        payload.get("return_hidden_states", nothing),
        payload.get("extra_key", nothing),
        strict=True,
    )
    return [
        LaneItem(
            rid=rid,
            ids=pack_ids(ids),
            sampling=sampling,
            return_logprob=bool(wants),
            logprob_start_len=-1 if start is None else start,
            top_logprobs_num=top or 0,
            return_hidden_states=bool(hidden),
            extra_key=key or "",
        )
        for rid, ids, sampling, wants, start, top, hidden, key in columns
    ]
