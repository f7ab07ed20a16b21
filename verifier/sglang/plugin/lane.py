"""The fast lane's end inside SGLang: verify batches come straight to the scheduler, answers leave straight from it.

By-passed are HTTP, pydantic, the tokenizer manager, the detokenizer and their ZeroMQ hops. What arrives is put into the
scheduler's own inbox as its own message, so that queue, prefix cache, other ranks and all that follows see an ordinary
request; what finishes is taken out where the scheduler would send it to the detokenizer. First rank only. A lane that
fails is closed, and the engine goes on: the client falls back to HTTP.
"""

from __future__ import annotations

import logging
import pkgutil
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from verifier.sglang.plugin.lane_messages import LANE_VERSION, LaneAnswers, LaneCall, LaneItem

__all__ = ["SchedulerLane"]

log = logging.getLogger("breakeven.plugin")

_CALLS = msgspec.msgpack.Decoder(LaneCall)
_ENCODER = msgspec.msgpack.Encoder()


class SchedulerLane:
    """One per process; only the scheduler's ever opens the socket.

    Args:
        endpoint: bound when the scheduler first looks into its inbox, e.g. ``ipc:///tmp/breakeven-lane``.
    """

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._socket: zmq.Socket[bytes] | None = None
        self._is_broken = False
        # Of every sequence on its way: who waits for it, and since when.
        self._callers: dict[str, tuple[bytes, float]] = {}

    # ------------------------------------------------------------ hooks

    def after_pull(self, pulled: list[Any] | None, receiver: Any) -> list[Any] | None:
        """AFTER ``SchedulerRequestReceiver._pull_raw_reqs``: add what came over the lane. None on other ranks."""
        if pulled is None or self._is_broken:
            return pulled
        try:
            pulled += self._receive(receiver)
        except Exception:  # a lane that fails must never fail the scheduler's loop
            log.exception("breakeven: the fast lane is off")
            self._is_broken = True
        return pulled

    def around_stream_output(
        self, original: Callable[..., Any], streamer: Any, reqs: list[Any], *args: Any, **kwargs: Any
    ) -> Any:
        """AROUND ``SchedulerOutputStreamer.stream_output``: answer the lane's own, leave the rest to the engine."""
        if not self._callers:
            return original(streamer, reqs, *args, **kwargs)
        own = [request for request in reqs if request.rid in self._callers]
        if not own:
            return original(streamer, reqs, *args, **kwargs)
        self._answer([request for request in own if request.finished() and not request.finished_output])
        others = [request for request in reqs if request.rid not in self._callers and request not in own]
        return original(streamer, others, *args, **kwargs) if others else None

    def after_idle_sleeper(self, result: Any, sleeper: Any, *args: Any, **kwargs: Any) -> Any:
        """AFTER ``IdleSleeper.__init__``: an idle scheduler (--sleep-on-idle) also wakes for the lane."""
        try:
            sleeper.poller.register(self._open(), zmq.POLLIN)
        except zmq.ZMQError:
            log.exception("breakeven: the fast lane is off")
            self._is_broken = True
        return result

    # ------------------------------------------------------------ the lane itself

    def _open(self) -> zmq.Socket[bytes]:
        if self._socket is None:
            if self._endpoint.startswith("ipc://"):
                path = Path(self._endpoint.removeprefix("ipc://"))
                path.parent.mkdir(parents=True, exist_ok=True)
                path.unlink(missing_ok=True)
            made: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
            made.setsockopt(zmq.LINGER, 0)
            try:
                made.bind(self._endpoint)
            except zmq.ZMQError:
                made.close()
                raise
            if self._endpoint.startswith("ipc://"):
                path.chmod(0o600)
            self._socket = made
        return self._socket

    def _receive(self, receiver: Any) -> list[Any]:
        socket = self._open()
        batches: list[Any] = []
        while True:
            try:
                caller, data = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return batches
            try:
                call = _CALLS.decode(data)
                if call.version != LANE_VERSION:
                    raise ValueError(f"the lane speaks version {LANE_VERSION}, not {call.version}")
                batches.append(_engine_batch(call, receiver.model_config.vocab_size))
            except Exception as error:  # noqa: BLE001 - what one caller sends must not close the lane for others
                log.warning("breakeven: a call over the fast lane was refused: %s", error)
                self._send(caller, LaneAnswers([], str(error) or type(error).__name__))
                continue
            now_s = time.monotonic()
            self._callers.update((item.rid, (caller, now_s)) for item in call.items)

    def _answer(self, finished: list[Any]) -> None:
        by_caller: dict[bytes, list[tuple[str, msgspec.Raw]]] = {}
        for request in finished:
            request.finished_output = True
            if request.finished_len is None:
                request.finished_len = len(request.output_ids)
            caller, since_s = self._callers.pop(request.rid)
            answer = engine_answer(request, latency_s=time.monotonic() - since_s)
            by_caller.setdefault(caller, []).append((request.rid, msgspec.Raw(_ENCODER.encode(answer))))
        for caller, answers in by_caller.items():
            self._send(caller, LaneAnswers(answers))

    def _send(self, caller: bytes, answers: LaneAnswers) -> None:
        assert self._socket is not None
        try:
            self._socket.send_multipart([caller, _ENCODER.encode(answers)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.warning("breakeven: an answer over the fast lane was lost: %s", error)


def _engine_batch(call: LaneCall, vocab_size: int) -> Any:
    """The scheduler's own message, as the tokenizer manager would have built it."""
    batch_type = pkgutil.resolve_name("sglang.srt.managers.io_struct.BatchTokenizedGenerateReqInput")
    return batch_type(batch=[_engine_request(item, vocab_size) for item in call.items])


def _engine_request(item: LaneItem, vocab_size: int) -> Any:
    request_type = pkgutil.resolve_name("sglang.srt.managers.io_struct.TokenizedGenerateReqInput")
    params = pkgutil.resolve_name("sglang.srt.sampling.sampling_params.SamplingParams")(**item.sampling)
    params.normalize(None)
    params.verify(vocab_size)
    ids = array("q")
    ids.frombytes(item.ids)
    if not ids or min(ids) < 0 or max(ids) >= vocab_size:
        raise ValueError(f"ids must be between 0 and {vocab_size - 1}")
    return request_type(
        rid=item.rid,
        input_text=None,
        input_ids=ids,
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=params,
        return_logprob=item.return_logprob,
        logprob_start_len=item.logprob_start_len,
        top_logprobs_num=item.top_logprobs_num,
        token_ids_logprob=None,
        stream=False,
        return_hidden_states=item.return_hidden_states,
        extra_key=item.extra_key or None,
    )


def engine_answer(request: Any, *, latency_s: float) -> dict[str, Any]:
    """The reply to one finished request: the fields of /generate's that ``answers`` reads, but the weights' version."""
    reason = request.finished_reason.to_json()
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": {name: reason.get(name) for name in ("type", "message", "status_code")},
        "prompt_tokens": len(request.origin_input_ids),
        "completion_tokens": len(request.output_ids),
        "cached_tokens": request.cached_tokens,
        "e2e_latency": latency_s,
    }
    if request.return_logprob:
        found = request.logprob
        meta |= {
            "input_token_logprobs": _pairs(found.input_token_logprobs_val, found.input_token_logprobs_idx),
            "input_top_logprobs": _lists(found.input_top_logprobs_val, found.input_top_logprobs_idx),
            "output_token_logprobs": _pairs(found.output_token_logprobs_val, found.output_token_logprobs_idx),
            "output_top_logprobs": _lists(found.output_top_logprobs_val, found.output_top_logprobs_idx),
        }
    for name, values in (getattr(request, "customized_info", None) or {}).items():
        meta[name] = values
    return {"output_ids": list(request.output_ids), "meta_info": meta}


def _pairs(values: Any, ids: Any) -> list[tuple[float | None, int, None]]:
    return [(value, token_id, None) for value, token_id in zip(values or (), ids or (), strict=True)]


def _lists(values: Any, ids: Any) -> list[list[tuple[float | None, int, None]] | None]:
    return [None if not own else _pairs(own, own_ids) for own, own_ids in zip(values or (), ids or (), strict=True)]
