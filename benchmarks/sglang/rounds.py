"""One measured round each: verify as the gateway's client does it, plain decode by the engine, an empty call."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from verifier.sglang.answers import Answer
from verifier.sglang.counters import Counters
from verifier.sglang.fast_lane import FastLane
from verifier.sglang.http import EngineHttp
from verifier.sglang.indexing import Ask, batch_payload, drawn_ids, position_lists
from verifier.sglang.plugin.announcement import new_rid
from verifier.sglang.plugin.orders import DrawOrder
from verifier.sglang.posting import BatchPoster
from verifier.sglang.tap import TapSource
from wire.errors import PeerRefused
from wire.sampling import SamplingParams
from wire.tensor_ring import TensorRingReader

__all__ = ["Plain", "Round", "Sequences", "check_features", "measure_empty", "measure_plain", "verify_round"]


@dataclass(slots=True)
class Sequences:
    """B growing contexts of random ids, each with a cache namespace of its own."""

    ids: list[list[int]]
    vocab_size: int
    draw: random.Random
    keys: list[str] = field(default_factory=list)
    prompt_len: int = 0

    @classmethod
    def fresh(cls, count: int, length: int, *, vocab_size: int, seed: int) -> Sequences:
        """``count`` contexts of ``length`` ids."""
        draw = random.Random(seed)  # noqa: S311 - ids to compute on
        top = vocab_size - 10
        ids = [[draw.randrange(10, top) for _ in range(length)] for _ in range(count)]
        return cls(ids, vocab_size, draw, [uuid.uuid4().hex for _ in range(count)], length)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One verify round of all sequences. begin_s, end_s: CLOCK_MONOTONIC. cached_differ: prefixes not found whole."""

    begin_s: float
    end_s: float
    engine_s: float
    cached_differ: int
    features_missing: int = 0

    @property
    def ms(self) -> float:
        """What the client waited."""
        return (self.end_s - self.begin_s) * 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """Plain decode of all sequences at once: time between two chunks, and between two tokens of one stream."""

    step_ms: list[float]
    token_ms: list[float]


async def verify_round(
    http: EngineHttp,
    sequences: Sequences,
    num_drafts: int,
    *,
    has_logprobs: bool = True,
    tap: TapSource | None = None,
    lane: FastLane | None = None,
    drawn: SamplingParams | None = None,
) -> Round:
    """Verify ``num_drafts`` random drafts of each sequence; its first target id is committed.

    ``drawn``: the plugin draws the ids so, and no lists are asked for.

    Timed is what the gateway's client does: building the request, the POST, reading the lists, waiting for the tap.
    """
    drafts = [
        [sequences.draw.randrange(10, sequences.vocab_size - 10) for _ in range(num_drafts)] for _ in sequences.ids
    ]
    poster = BatchPoster(http, Counters(), overload_retries=0)
    begin_s = time.monotonic()
    asks = [
        Ask(
            rid=new_rid(len(ids) - 1) if tap is not None else uuid.uuid4().hex,
            input_ids=[*ids, *drafted],
            base_len=len(ids),
            start_len=len(ids) - 1,
            num_top=1 if drawn is None else 0,
            wants_hidden=False,
            cache_key=key,
            order=None
            if drawn is None
            else DrawOrder(sampling=drawn, base_len=len(ids), prompt_len=sequences.prompt_len),
        )
        for ids, drafted, key in zip(sequences.ids, drafts, sequences.keys, strict=True)
    ]
    missing = 0
    answers: Sequence[Answer | PeerRefused]
    if lane is not None:
        answers = await lane.generate(batch_payload(asks))
    elif has_logprobs:
        answers = await poster.post(asks)
    else:
        answers = await http.generate(_without_logprobs(asks))
    chosen = []
    for ask, answer in zip(asks, answers, strict=True):
        if isinstance(answer, PeerRefused):
            raise answer
        chosen.append(_chosen(ask, answer, has_logprobs=has_logprobs))
        if tap is not None:
            spans = await tap.spans(ask.rid, answer, first=ask.base_len - 1, last=len(ask.input_ids) - 1)
            tap.forget(ask.rid)
            missing += spans is None
    end_s = time.monotonic()
    differ = 0
    engine_s = 0.0
    for index, (ask, answer) in enumerate(zip(asks, answers, strict=True)):
        assert not isinstance(answer, PeerRefused)
        differ += answer.meta_info.cached_tokens != ask.base_len - 1
        engine_s = max(engine_s, answer.meta_info.e2e_latency)
        sequences.ids[index].append(min(chosen[index], sequences.vocab_size - 1))
    return Round(begin_s=begin_s, end_s=end_s, engine_s=engine_s, cached_differ=differ, features_missing=missing)


def _chosen(ask: Ask, answer: Answer, *, has_logprobs: bool) -> int:
    """The id at the first draft's position."""
    if ask.order is not None:
        found = drawn_ids(ask, answer)
        assert found is not None
        return found.ids[0]
    return position_lists(ask, answer)[0][0][0] if has_logprobs else answer.output_ids[0]


async def measure_plain(http: EngineHttp, sequences: Sequences, num_tokens: int) -> Plain:
    """Stream ``num_tokens`` ids of each sequence at once; the ids are not kept. The chunk of prefill is left out."""

    async def stream(ids: Sequence[int], key: str) -> tuple[list[float], list[int]]:
        times: list[float] = []
        counts: list[int] = []
        payload: dict[str, Any] = {
            "rid": uuid.uuid4().hex,
            "input_ids": list(ids),
            "sampling_params": {"max_new_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True},
            "stream": True,
            "extra_key": key,
        }
        async for chunk in http.stream(payload):
            times.append(time.monotonic())
            counts.append(chunk.meta_info.completion_tokens)
        return times, counts

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(stream(ids, key)) for ids, key in zip(sequences.ids, sequences.keys, strict=True)]
    steps: list[float] = []
    tokens: list[float] = []
    for times, counts in (task.result() for task in tasks):
        # The first decode steps wait for the other sequences' prefills; the last chunk may be cut short.
        skipped = max(1, len(times) // 4)
        gaps = [(b - a) * 1e3 for a, b in zip(times[skipped:-2], times[skipped + 1 : -1], strict=True)]
        steps += gaps
        if counts[-2] > counts[skipped]:
            tokens.append((times[-2] - times[skipped]) * 1e3 / (counts[-2] - counts[skipped]))
    return Plain(step_ms=steps, token_ms=tokens)


async def measure_empty(http: EngineHttp) -> float:
    """Milliseconds of a call that reaches no model: what HTTP itself costs."""
    begin_s = time.monotonic()
    await http.get("/model_info", timeout_s=10.0)
    return (time.monotonic() - begin_s) * 1e3


async def check_features(
    http: EngineHttp, tap: TapSource, ring_path: Path, *, lengths: Sequence[int], vocab_size: int
) -> dict[str, Any]:
    """Ask for the same rows by JSON and by the tap, whole prompts and verify rows in one batch; they must be equal.

    Returns:
        rows compared, width, largest difference, and mean absolute value (so that zeros can't pass for features).
    """
    sequences = Sequences.fresh(len(lengths), max(lengths), vocab_size=vocab_size, seed=7)
    rows, worst, size, width = 0, 0.0, 0.0, 0
    for cached in (False, True):
        asks = []
        for ids, length, key in zip(sequences.ids, lengths, sequences.keys, strict=True):
            first = length - 4 if cached else 0
            part = ids[:length]
            if cached:
                part = [*part[:-3], *(7 + i for i in range(3))]
            asks.append(
                Ask(
                    rid=new_rid(first),
                    input_ids=part,
                    base_len=length - 3 if cached else length,
                    start_len=first if cached else length - 1,
                    num_top=1,
                    wants_hidden=True,
                    cache_key=key,
                )
            )
        answers = await http.generate(batch_payload(asks))
        for ask, answer in zip(asks, answers, strict=True):
            by_json = np.asarray(_rows(bytes(answer.meta_info.hidden_states)), dtype=np.float32)
            begin = answer.meta_info.prompt_tokens - len(by_json)
            spans = await tap.spans(ask.rid, answer, first=begin, last=len(ask.input_ids) - 1)
            if spans is None:
                return {"rows": rows, "error": f"no announcement of {ask.rid}, positions {begin} on"}
            with TensorRingReader(ring_path) as ring:
                by_tap = np.concatenate([_as_float32(ring.read(span.ref)) for span in spans])
            rows, width = rows + len(by_json), by_json.shape[1]
            worst = max(worst, float(np.abs(by_json - by_tap).max()))
            size = max(size, float(np.abs(by_json).mean()))
    return {"rows": rows, "width": width, "max_abs_diff": worst, "mean_abs": size}


def _as_float32(rows: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """uint16 are the bits of bfloat16."""
    if rows.dtype == np.uint16:
        return (rows.astype(np.uint32) << 16).view(np.float32)
    return rows.astype(np.float32)


def _rows(raw: bytes) -> list[list[float]]:
    entries: list[list[list[float]]] = orjson.loads(raw)
    return entries[0]


def _without_logprobs(asks: list[Ask]) -> dict[str, Any]:
    payload = batch_payload(asks)
    for name in ("return_logprob", "logprob_start_len", "top_logprobs_num"):
        del payload[name]
    return payload
