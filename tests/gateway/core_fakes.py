"""A toy language model and fakes of everything a request runs on: no process, no clock, no sleeps.

The toy target's choice is a fixed function of the whole context, so whatever a drafter does, the right answer to every
request is known (``plain_answer``).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.batcher import VerifyBatcher
from gateway.engine_config import SpeculationConfig
from gateway.ports import TextCodec
from gateway.recorder import Recorder
from gateway.request_run import RunParts
from gateway.speculation.controller import Controller, ControllerLimits
from gateway.stats import PeerStats
from wire.errors import PeerError, PeerLate, PeerLost, PeerRefused
from wire.messages import (
    DraftExtend,
    DraftProposal,
    FeatureSpan,
    PositionLogprobs,
    TensorRef,
    TopLogprob,
    VerifierInfo,
    VerifyFailed,
    VerifyItem,
    VerifyReply,
    VerifyResult,
)
from wire.sampling import SamplingParams

TOY_VOCAB = 26  # lower-case letters as byte ids, see toy_target


def toy_target(context: Sequence[int], salt: int = 0) -> int:
    """The toy model's next id: a letter of ASCII, so that answers are readable text for a byte codec."""
    digest = hashlib.blake2b(repr((salt, tuple(context))).encode(), digest_size=2).digest()
    return ord("a") + int.from_bytes(digest) % TOY_VOCAB


def plain_answer(prompt_ids: Sequence[int], length: int, salt: int = 0) -> tuple[int, ...]:
    """What plain decoding gives."""
    ids = list(prompt_ids)
    for _ in range(length):
        ids.append(toy_target(ids, salt))
    return tuple(ids[len(prompt_ids) :])


def toy_span(start: int, stop: int) -> tuple[FeatureSpan, ...]:
    """Features of positions start..stop-1, three numbers each."""
    if stop <= start:
        return ()
    ref = TensorRef(
        ring_id=1, slot=start % 7, generation=2, shape=(stop - start, 3), dtype="float32", nbytes=(stop - start) * 12
    )
    return (FeatureSpan(start=start, ref=ref),)


class ToyTarget:
    """The verifier's side of the contract: keeps the committed ids of every request and checks what it is sent."""

    def __init__(self, salt: int = 0) -> None:
        self.salt = salt
        self.ids: dict[str, list[int]] = {}

    def verify(self, item: VerifyItem) -> VerifyResult:
        """One item's result."""
        if item.start == 0:
            assert item.sampling is not None or item.request_id in self.ids
        ids = self.ids.setdefault(item.request_id, [])
        assert item.start <= len(ids), "ids were skipped"
        ids[item.start :] = item.token_ids
        assert len(ids) == item.base_len
        targets = tuple(toy_target([*ids, *item.draft_ids[:i]], self.salt) for i in range(len(item.draft_ids) + 1))
        spans = () if item.features_from is None else toy_span(item.features_from, len(ids) + len(item.draft_ids))
        logprobs = prompt_logprobs = None
        if item.num_logprobs is not None:
            logprobs = tuple(_logprob(token_id, item.num_logprobs) for token_id in targets)
        if item.score_prompt:
            prompt_logprobs = tuple(_logprob(token_id, item.num_logprobs or 0) for token_id in item.token_ids[1:])
        return VerifyResult(
            request_id=item.request_id,
            round_id=item.round_id,
            base_len=item.base_len,
            target_ids=targets,
            spans=spans,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )


def _logprob(token_id: int, num_top: int) -> PositionLogprobs:
    top = tuple(TopLogprob(token_id + i, -0.5 - i) for i in range(num_top))
    return PositionLogprobs(token_id=token_id, logprob=-0.5, top=top)


class ToyDrafter:
    """The drafter's side of the contract: checks that ids and features continue what it holds, without a gap.

    is_strict: a gap is a fault of the session; otherwise it is refused, as the real one does.
    """

    def __init__(self) -> None:
        self.is_strict = True
        self.ids: dict[str, list[int]] = {}
        self.features: dict[str, int] = {}

    def forget(self) -> None:
        """The process died."""
        self.ids.clear()
        self.features.clear()

    def align(self, message: DraftExtend) -> None:
        """Take the committed ids and features; fails as the real one does."""
        if message.start == 0:
            assert message.sampling is not None
            self.features[message.request_id] = 0
            self.ids[message.request_id] = []
        if message.request_id not in self.ids:
            raise PeerRefused("unknown_request", "never heard of it")
        ids = self.ids[message.request_id]
        self._check(message.start <= len(ids), "ids were skipped")
        ids[message.start :] = message.token_ids
        assert len(ids) == message.base_len
        held = min(self.features[message.request_id], message.base_len - 1)
        for span in message.spans:
            self._check(span.start <= held, "features were skipped")
            held = max(held, span.start + span.ref.shape[0])
        self._check(held == message.base_len - 1, "every position but the newest needs features")
        self.features[message.request_id] = held

    def _check(self, is_right: bool, what: str) -> None:
        if not is_right and not self.is_strict:
            raise PeerRefused("feature_gap", what)
        assert is_right, what


class FakeClock:
    """Time that moves only when told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class FakeVerifier:
    """A VerifierPort over the toy target. Set ``gate`` to hold replies back, ``fail`` to make calls fail."""

    def __init__(self, clock: FakeClock | None = None, salt: int = 0) -> None:
        self.target = ToyTarget(salt)
        self.batches: list[tuple[VerifyItem, ...]] = []
        self.closed: list[str] = []
        self.gate: asyncio.Event | None = None
        self.fail: Callable[[VerifyItem], PeerError | VerifyFailed | None] = lambda _item: None
        self.num_prefill_rows = 0
        self.mixes_plain_rounds = True
        self.unverifiable: str | None = None
        self.clock = clock

    async def verify(self, items: Sequence[VerifyItem], *, timeout_s: float) -> VerifyReply:
        """See VerifierPort.verify."""
        self.batches.append(tuple(items))
        if self.gate is not None:
            async with asyncio.timeout(5.0):
                await self.gate.wait()
        else:
            await asyncio.sleep(0)
        if self.clock is not None:
            self.clock.now_s += 0.01
        results: list[VerifyResult | VerifyFailed] = []
        for item in items:
            failure = self.fail(item)
            if isinstance(failure, PeerError):
                raise failure
            if isinstance(failure, VerifyFailed):
                results.append(failure)
            elif item.request_id not in self.closed:
                results.append(self.target.verify(item))
        return VerifyReply(
            results=tuple(reversed(results)),  # in no particular order
            forward_s=0.005,
            num_rows=sum(len(item.draft_ids) + 1 for item in items),
            num_prefill_rows=self.num_prefill_rows,
            num_forwards=len(self.batches),
        )

    def can_verify(self, sampling: SamplingParams) -> str | None:
        """See VerifierPort.can_verify."""
        return self.unverifiable

    def close_request(self, request_id: str) -> None:
        """See VerifierPort.close_request."""
        self.closed.append(request_id)


def failed(item: VerifyItem, code: str = "internal") -> VerifyFailed:
    """A refusal of this item."""
    return VerifyFailed(
        request_id=item.request_id, round_id=item.round_id, base_len=item.base_len, code=code, message="toy trouble"
    )


class ScriptedDrafter:
    """A DrafterPort. ``script`` names what each call does, the last entry for ever.

    right = all drafts right; wrong = none; half = the first half; short = one right id; empty = no ids;
    late, dead, refused, stale_features = as the real one fails (the dead one has forgotten everything).
    """

    def __init__(self, *script: str, salt: int = 0) -> None:
        self.script = list(script or ["right"])
        self.messages: list[DraftExtend] = []
        self.closed: list[str] = []
        self.side = ToyDrafter()
        self._salt = salt

    async def extend(self, message: DraftExtend, *, timeout_s: float) -> DraftProposal:
        """See DrafterPort.extend."""
        self.messages.append(message)
        action = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        await asyncio.sleep(0)
        if action == "late":
            raise PeerLate("no draft in time")
        if action == "dead":
            self.side.forget()
            raise PeerLost("the drafter is gone")
        self.side.align(message)
        if action in ("refused", "stale_features"):
            raise PeerRefused("overloaded" if action == "refused" else action, "toy trouble")
        drafts = propose(self.side.ids[message.request_id], message.num_draft_tokens, action, self._salt)
        return DraftProposal(
            request_id=message.request_id, round_id=message.round_id, base_len=message.base_len, draft_ids=drafts
        )

    def close(self, request_id: str) -> None:
        """See DrafterPort.close."""
        self.closed.append(request_id)


def propose(context: Sequence[int], num_draft_tokens: int, action: str, salt: int = 0) -> tuple[int, ...]:
    """Draft ids of that quality."""
    right = plain_answer(context, num_draft_tokens, salt)
    wrong = tuple(ord("Z") for _ in right)
    half = len(right) // 2
    return {
        "right": right,
        "wrong": wrong,
        "half": right[:half] + wrong[half:],
        "short": right[:1],
        "empty": (),
    }[action]


@dataclass
class FakePeer:
    """A PeerView."""

    is_up: bool = True
    phase: str = "ready"
    progress: float = 1.0

    def stats(self) -> PeerStats:
        """See PeerView.stats."""
        state = "up" if self.is_up else "starting"
        return PeerStats(state=state, phase=self.phase, pid=1, restarts=0, last_error=None, counters={})


@dataclass
class Rig:
    """Everything a request runs on, wired; ``async with`` runs the batcher."""

    mode: str = "on"
    num_draft_tokens: int = 3
    verifier: FakeVerifier = field(default_factory=FakeVerifier)
    drafter: ScriptedDrafter = field(default_factory=ScriptedDrafter)
    clock: FakeClock = field(default_factory=FakeClock)
    codec: TextCodec | None = None

    async def __aenter__(self) -> Rig:
        from tests.gateway.fakes import ByteCodec

        self.verifier.clock = self.clock  # every pass takes 10 ms
        self.group = asyncio.TaskGroup()
        await self.group.__aenter__()
        candidates = (1, 2, 3, 4, 5, 6, 8)
        speculation = SpeculationConfig(mode=self.mode, num_draft_tokens=self.num_draft_tokens, candidates=candidates)
        self.recorder = Recorder(max_draft_tokens=8)
        self.controller = Controller(
            ControllerLimits(mode=self.mode, candidates=candidates, default_num_draft_tokens=self.num_draft_tokens)
        )
        self.controller.set_drafter(is_up=True, reason="connected")
        self.batcher = VerifyBatcher(
            self.verifier,
            decode_timeout_s=5.0,
            prompt_timeout_s=5.0,
            clock=self.clock,
            on_batch=self.recorder.batch_done,
        )
        self.parts = RunParts(
            speculation=speculation,
            verifier=self.verifier,
            drafter=self.drafter,
            batcher=self.batcher,
            controller=self.controller,
            recorder=self.recorder,
            codec=self.codec or ByteCodec(),
            clock=self.clock,
            spawn=self._spawn,
        )
        self._loop = self.group.create_task(self.batcher.run())
        return self

    async def __aexit__(self, *error: Any) -> None:
        self._loop.cancel()
        await self.group.__aexit__(*error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self.group.create_task(work)


TOY_INFO = VerifierInfo(
    model_dir="toy",
    model_type="llama",
    context_len=64,
    vocab_size=258,
    hidden_size=1,
    num_layers=4,
    aux_layer_ids=(1, 2, 3),
    is_row_invariant=True,
    kernels="toy",
)
