"""A drafter with a script instead of a head: a process on the real link, right as often as the prompt asks for.

    python -m benchmarks.controller.scripted_drafter --endpoint ipc:///tmp/d.sock --ring RING --draft-ms 1.0

It keeps its side of the contract: committed ids and features must continue what it holds, and the features must still
lie in the ring, or it refuses. A proposal of
K tokens takes K times the cost of one, counted from the arrival of the message.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.controller.scripted_text import VOCAB_SIZE, text_of_prompt
from wire.codec import DRAFTER_CODEC
from wire.errors import StaleTensor
from wire.link import ServerLink, answer_hello
from wire.messages import (
    DraftClose,
    DrafterInfo,
    DraftExtend,
    DraftFailed,
    DraftProposal,
    DraftReplies,
    Hello,
    Status,
    StatusRequest,
    ToDrafter,
)
from wire.process import die_with_parent
from wire.tensor_ring import TensorRingReader

__all__ = ["HIDDEN_SIZE", "MAX_DRAFT_TOKENS", "ScriptedDrafter", "main"]

HIDDEN_SIZE = 8
MAX_DRAFT_TOKENS = 8


@dataclass(slots=True)
class _Held:
    ids: list[int] = field(default_factory=list)
    features_len: int = 0


class ScriptedDrafter:
    """Answers messages of one link. ``ring_path``: the engine's. ``draft_s``: seconds of one draft token."""

    def __init__(self, link: ServerLink[ToDrafter], *, ring_path: Path, draft_s: float) -> None:
        self._link = link
        self._ring = TensorRingReader(ring_path)
        self._draft_s = draft_s
        self._held: dict[str, _Held] = {}
        self._counters = {"drafts": 0, "draft_tokens": 0, "refused": 0}

    async def run(self) -> None:
        """Serve until cancelled."""
        while True:
            peer, message = await self._link.receive()
            arrived_s = time.monotonic()
            match message:
                case Hello():
                    self._link.send(peer, answer_hello(message, role="drafter"))
                case StatusRequest():
                    self._link.send(peer, self._status(message.request_number))
                case DraftClose():
                    self._held.pop(message.request_id, None)
                case DraftExtend():
                    reply = self._answer(message)
                    # Blocking is right here: one forward after another, and asyncio's timers are coarse.
                    due_s = arrived_s + self._draft_s * message.num_draft_tokens
                    while (left_s := due_s - time.monotonic()) > 0:
                        time.sleep(left_s)  # noqa: ASYNC251 - see above
                    replies = DraftReplies(replies=(reply,), draft_s=due_s - arrived_s, num_rows=1)
                    self._link.send(peer, replies)

    def _answer(self, message: DraftExtend) -> DraftProposal | DraftFailed:
        problem = self._align(message)
        if problem is not None:
            self._counters["refused"] += 1
            return DraftFailed(
                request_id=message.request_id,
                round_id=message.round_id,
                base_len=message.base_len,
                code=problem,
                message="the message does not continue what is held",
            )
        self._counters["drafts"] += 1
        self._counters["draft_tokens"] += message.num_draft_tokens
        text = text_of_prompt(self._held[message.request_id].ids)
        return DraftProposal(
            request_id=message.request_id,
            round_id=message.round_id,
            base_len=message.base_len,
            draft_ids=text.drafts(message.base_len, message.num_draft_tokens),
        )

    def _align(self, message: DraftExtend) -> str | None:
        if message.start == 0:
            self._held[message.request_id] = _Held()
        held = self._held.get(message.request_id)
        if held is None or message.start > len(held.ids):
            return "unknown_request"
        held.ids[message.start :] = message.token_ids
        held.features_len = min(held.features_len, message.base_len - 1)
        for span in message.spans:
            if span.start > held.features_len:
                return "feature_gap"
            try:
                self._ring.read(span.ref)
            except StaleTensor:
                return "stale_features"
            held.features_len = max(held.features_len, span.start + span.ref.shape[0])
        return None if held.features_len >= message.base_len - 1 else "feature_gap"

    def _status(self, request_number: int) -> Status:
        info = DrafterInfo(
            head_dir="script",
            head_format="script",
            target_vocab_size=VOCAB_SIZE,
            draft_vocab_size=VOCAB_SIZE,
            feature_size=3 * HIDDEN_SIZE,
            aux_layer_ids=(),
            max_draft_tokens=MAX_DRAFT_TOKENS,
        )
        return Status(
            request_number=request_number,
            phase="ready",
            progress=1.0,
            is_ready=True,
            counters=dict(self._counters),
            drafter=info,
        )


async def _serve(endpoint: str, ring_path: Path, draft_s: float) -> None:
    link = ServerLink(endpoint, DRAFTER_CODEC)
    serving = asyncio.ensure_future(ScriptedDrafter(link, ring_path=ring_path, draft_s=draft_s).run())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, serving.cancel)
    print("ready", flush=True)
    try:
        await asyncio.wait([serving])
        if not serving.cancelled():
            serving.result()
    finally:
        link.close()


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until SIGTERM or the parent's end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--ring", type=Path, required=True, help="must exist")
    parser.add_argument("--draft-ms", type=float, default=1.0, help="of one draft token")
    options = parser.parse_args(argv)
    die_with_parent(os.getppid())
    asyncio.run(_serve(options.endpoint, options.ring, options.draft_ms * 1e-3))


if __name__ == "__main__":
    main()
