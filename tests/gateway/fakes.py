"""A scripted engine and a byte-level codec, for tests of the HTTP edge: no clock, no model, no sleeps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from gateway.errors import GatewayError, InvalidRequest
from gateway.ports import (
    ChatMessage,
    GenerationDelta,
    GenerationFinished,
    GenerationRequest,
    LoadPhase,
    ModelCard,
    PromptScored,
    RequestSpeculation,
    TokenLogprob,
    Usage,
)
from gateway.stats import (
    BucketStats,
    CostStats,
    DraftCostStats,
    LatencyStats,
    PeerStats,
    RequestStats,
    SpeculationStats,
    StatsSnapshot,
    TokenStats,
)
from gateway.text.stream import TextStream

BOS, EOS = 256, 257
CONTEXT_LEN = 256
SPECIAL_TEXTS = {BOS: "<s>", EOS: "</s>"}


class ByteCodec:
    """A toy ``TextCodec``: ids 0..255 are bytes, 256 is BOS, 257 is EOS."""

    eos_ids = frozenset({EOS})
    special_ids = frozenset({BOS, EOS})

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return ([BOS] if add_special_tokens else []) + list(text.encode("utf-8"))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        skipped = self.special_ids if skip_special_tokens else frozenset()
        joined = b"".join(self.token_bytes(token_id) for token_id in token_ids if token_id not in skipped)
        return joined.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return SPECIAL_TEXTS[token_id].encode() if token_id in SPECIAL_TEXTS else bytes([token_id])

    def render_chat(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True) -> list[int]:
        if any(message.role == "function" for message in messages):
            raise InvalidRequest("The model's chat template refuses these messages.", param="messages")
        text = "".join(f"{message.role}:{message.content}\n" for message in messages)
        return [BOS, *self.encode(text + ("assistant:" if add_generation_prompt else ""))]


@dataclass
class Script:
    """What one generation does.

    Fields:
        text: what the model would write; followed by EOS.
        block_lens: how many tokens each event commits, repeated; speculation commits several at once.
        error: raised after ``error_after`` events.
        hold_after: events after which the generation waits until it is released or closed; None = never.
        top: logprobs reported as alternatives for every token.
    """

    text: str | bytes = "Hello world"
    block_lens: tuple[int, ...] = (1,)
    error: Exception | None = None
    error_after: int = 0
    hold_after: int | None = None
    logprob: float = -0.5
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class FakeEngine:
    """A scripted ``Engine``; choice i runs ``scripts[i % len(scripts)]``.

    It keeps what a test wants to see: the requests it got, what is admitted, how many generations were closed early.
    """

    scripts: list[Script] = field(default_factory=lambda: [Script()])
    admit_error: GatewayError | None = None
    phase: LoadPhase = field(default_factory=lambda: LoadPhase(is_ready=True, is_draining=False, phase="ready"))
    codec: ByteCodec = field(default_factory=ByteCodec)
    snapshot: StatsSnapshot | None = None
    requests: list[GenerationRequest] = field(default_factory=list)
    is_size_known: bool = True
    num_admitted: int = 0
    num_running: int = 0
    num_closed_early: int = 0

    def __post_init__(self) -> None:
        self.hold = asyncio.Event()
        self.closed = asyncio.Event()
        self.held = asyncio.Event()

    def admit(self, num_choices: int) -> None:
        if self.admit_error is not None:
            raise self.admit_error
        self.num_admitted += num_choices

    def release(self, num_choices: int) -> None:
        self.num_admitted -= num_choices

    def stats(self) -> StatsSnapshot:
        return self.snapshot or make_snapshot()

    def load_phase(self) -> LoadPhase:
        return self.phase

    def model_card(self) -> ModelCard:
        return ModelCard(
            name="toy/model",
            aliases=("toy",),
            context_len=CONTEXT_LEN if self.is_size_known else 0,
            vocab_size=258 if self.is_size_known else 0,
            created_s=1_700_000_000,
        )

    async def generate(
        self, request: GenerationRequest
    ) -> AsyncGenerator[PromptScored | GenerationDelta | GenerationFinished, None]:
        script = self.scripts[len(self.requests) % len(self.scripts)]
        self.requests.append(request)
        self.num_running += 1
        is_finished = False
        try:
            num_events = 0
            async for event in self._events(request, script):
                if script.hold_after == num_events:
                    self.held.set()
                    await self.hold.wait()
                if script.error is not None and script.error_after == num_events:
                    raise script.error
                num_events += 1
                is_finished = isinstance(event, GenerationFinished)
                yield event
        finally:
            self.num_running -= 1
            if not is_finished:
                self.num_closed_early += 1
                self.closed.set()

    async def _events(
        self, request: GenerationRequest, script: Script
    ) -> AsyncGenerator[PromptScored | GenerationDelta | GenerationFinished, None]:
        if request.score_prompt:
            entries = [None, *(_logprob(token_id, script) for token_id in request.prompt_ids[1:])]
            yield PromptScored(logprobs=tuple(entries))
        raw = script.text.encode("utf-8") if isinstance(script.text, str) else script.text
        stream = TextStream(
            self.codec,
            stop_strings=request.stop_strings,
            include_stop_string=request.include_stop_string,
            skip_special_tokens=request.skip_special_tokens,
            shown_ids=request.shown_ids,
        )
        run = _Run(request=request, script=script, stream=stream, ids=[*raw, EOS])
        for delta in run.deltas():
            yield delta
        yield run.finished()


@dataclass
class _Run:
    """Cuts a scripted answer the way the real loop must: the first of stop id, stop string and budget wins."""

    request: GenerationRequest
    script: Script
    stream: TextStream
    ids: list[int]
    num_tokens: int = 0
    finish_reason: str | None = None
    matched_stop: str | int | None = None

    def deltas(self) -> list[GenerationDelta]:
        deltas = []
        block = 0
        position = 0
        while self.finish_reason is None:
            size = self.script.block_lens[block % len(self.script.block_lens)]
            deltas.append(self._block(self.ids[position : position + size]))
            position += size
            block += 1
        return deltas

    def finished(self) -> GenerationFinished:
        return GenerationFinished(
            finish_reason=self.finish_reason,
            matched_stop=self.matched_stop,
            usage=Usage(prompt_tokens=len(self.request.prompt_ids), completion_tokens=self.num_tokens, cached_tokens=2),
            speculation=RequestSpeculation(
                num_rounds=4,
                num_plain_rounds=1,
                num_draft_tokens=12,
                num_accepted_tokens=6,
                draft_s=0.004,
                verify_s=0.02,
            ),
        )

    def _block(self, token_ids: list[int]) -> GenerationDelta:
        text = ""
        kept: list[int] = []
        if self.request.max_new_tokens == 0:
            self.finish_reason = "length"
        for token_id in [] if self.finish_reason else token_ids:
            if token_id in self.request.stop_token_ids:
                self.finish_reason, self.matched_stop = "stop", token_id
                break
            kept.append(token_id)
            self.num_tokens += 1
            piece, stop = self.stream.push(token_id)
            text += piece
            if stop is not None:
                self.finish_reason, self.matched_stop = "stop", stop
                break
            if self.num_tokens == self.request.max_new_tokens:
                self.finish_reason = "length"
                break
        if self.finish_reason is not None:
            text += self.stream.finish()
        elif not token_ids:
            self.finish_reason = "length"
            text += self.stream.finish()
        logprobs = tuple(_logprob(token_id, self.script) for token_id in kept)
        return GenerationDelta(
            text=text,
            token_ids=tuple(kept),
            logprobs=None if self.request.num_logprobs is None else logprobs,
        )


def _logprob(token_id: int, script: Script) -> TokenLogprob:
    return TokenLogprob(token_id=token_id, logprob=script.logprob, top=script.top)


def make_snapshot() -> StatsSnapshot:
    """A snapshot with every kind of value in it, also ones not measured yet."""
    latency = LatencyStats(count=10, p50=12.5, p95=20.0, ewma=13.0)
    bucket = BucketStats(
        batch_size=1,
        state="ON",
        reason="speedup 1.31",
        num_draft_tokens=3,
        plain_ms=20.0,
        break_even_length=1.9,
        acceptance_length=2.5,
        speedup=1.31,
        speedup_se=0.02,
        next_probe_in_tokens=None,
        num_switches=1,
        break_even_lengths={"3": 1.9},
        verify_costs=(CostStats(num_draft_tokens=3, verify_ms=30.0, count=7),),
        draft_costs=(DraftCostStats(num_draft_tokens=3, draft_ms=4.0, count=7),),
    )
    peer = PeerStats(state="ready", phase="serving", pid=42, restarts=1, last_error=None, counters={"resyncs": 2})
    speculation = SpeculationStats(
        state="ON",
        reason="pays",
        break_even_length=1.9,
        acceptance_length=2.5,
        acceptance_rate=0.5,
        acceptance_rate_per_position=(0.7, 0.5, 0.3),
        num_rounds=40,
        num_plain_rounds=3,
        num_draft_tokens=120,
        num_accepted_tokens=60,
        num_committed_tokens=100,
        num_drafts_per_position=(40, 40, 40),
        num_accepted_per_position=(28, 20, 12),
        num_shadows=4,
        num_shadow_draft_tokens=12,
        num_shadow_accepted_tokens=6,
        fallbacks={"drafter_late": 2},
        buckets=(bucket,),
    )
    return StatsSnapshot(
        version="0.1.0",
        model="toy/model",
        uptime_s=12.0,
        requests=RequestStats(running=1, waiting=0, finished={"stop": 5}, failed={"TargetFailed": 1}, client_closed=2),
        tokens=TokenStats(prompt_tokens=100, cached_tokens=40, completion_tokens=200),
        speculation=speculation,
        plain_ms=latency,
        verify_ms=latency,
        draft_ms=latency,
        overhead_ms=None,
        ttft_ms=latency,
        tpot_ms=LatencyStats(count=0, p50=None, p95=None, ewma=None),
        verifier=peer,
        drafter=peer,
    )
