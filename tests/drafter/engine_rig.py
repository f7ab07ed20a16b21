"""An engine over a tiny head, features from a real ring, and the gateway's side of the bookkeeping."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from cpukernels.ports import Kernels
from drafter.device.model import DeviceModel
from drafter.device.runner import DeviceRunner
from drafter.engine import DraftEngine, EngineLimits
from drafter.head.loader import load_head
from drafter.host_runner import HostRunner
from drafter.model import DraftModel, suitable_kernels
from drafter.policy import Waiting, merge_waiting
from drafter.ports import DraftRunner
from drafter.ring import RingFeatures
from tests.drafter.heads import FEATURES, VOCAB, TinyHead
from tests.drafter.reference import ReferenceHead
from wire.messages import DraftExtend, DraftFailed, DraftProposal, FeatureSpan
from wire.sampling import SamplingParams
from wire.tensor_ring import TensorRingWriter

GREEDY = SamplingParams(temperature=0.0)


class Story:
    """One request as the target sees it: fixed ids and features, of which ever more are committed."""

    def __init__(self, request_id: str, length: int, *, seed: int | None = None) -> None:
        generator = torch.Generator().manual_seed(zlib.crc32(request_id.encode()) if seed is None else seed)
        self.request_id = request_id
        self.ids = torch.randint(VOCAB, (length,), generator=generator).tolist()
        self.features = torch.randn(length, FEATURES, generator=generator)
        self.round_id = 0

    def message(
        self,
        ring: TensorRingWriter,
        base_len: int,
        *,
        start: int = 0,
        features_from: int | None = None,
        num_draft_tokens: int = 3,
        sampling: SamplingParams | None = GREEDY,
        num_rejected: int = 0,
    ) -> DraftExtend:
        """Ids start .. base_len - 1 and features from ``features_from`` (default: start - 1) on, in two spans."""
        self.round_id += 1
        begin = max(0, start - 1) if features_from is None else features_from
        end = base_len - 1 + num_rejected
        middle = (begin + end) // 2
        parts = [(b, e) for b, e in ((begin, middle), (middle, end)) if b < e]
        spans = tuple(FeatureSpan(start=b, ref=ring.write(self.features[b:e].numpy())) for b, e in parts)
        return DraftExtend(
            request_id=self.request_id,
            round_id=self.round_id,
            base_len=base_len,
            start=start,
            token_ids=tuple(self.ids[start:base_len]),
            spans=spans,
            num_draft_tokens=num_draft_tokens,
            sampling=sampling,
        )

    def expected(self, reference: ReferenceHead, base_len: int, num_draft_tokens: int = 3) -> tuple[int, ...]:
        """What a drafter without any history would propose."""
        return tuple(reference.draft(self.features, self.ids[:base_len], num_draft_tokens)[0])


class Rig:
    """An engine with its ring. device: run the device's implementation there, in ``dtype``, instead of ``kernels``."""

    def __init__(
        self,
        tiny: TinyHead,
        kernels: Kernels | None,
        ring_path: Path,
        *,
        device: str | None = None,
        dtype: torch.dtype = torch.float32,
        **limits: int | bool,
    ) -> None:
        self.reference = tiny.reference
        self.ring_path = ring_path
        self.ring = TensorRingWriter(ring_path, num_slots=64, slot_bytes=256 * FEATURES * 4)
        head = load_head(tiny.head_dir, target_model_dir=tiny.target_dir)
        known = {"max_draft_tokens": 8, "max_context_len": 256, "max_requests": 8, "shared_noise": True} | limits
        self.limits = EngineLimits(**known)  # type: ignore[arg-type]
        num_positions = self.limits.max_context_len + 8
        self.model: DraftModel | DeviceModel
        if device is None:
            assert kernels is not None
            chosen = suitable_kernels(kernels, head, lambda _message: None)
            self.model = DraftModel(head, chosen, num_positions=num_positions)
            self.runner: DraftRunner = HostRunner(self.model)
        else:
            self.model = DeviceModel(head, device=torch.device(device), dtype=dtype, num_positions=num_positions)
            self.runner = DeviceRunner(self.model)
        self.engine = DraftEngine(self.runner, RingFeatures(ring_path), self.limits)

    def run(self, *messages: DraftExtend) -> list[DraftProposal | DraftFailed]:
        """One batch; replies in the order of the messages."""
        outcome = self.engine.run(merge_waiting([Waiting(peer=b"gateway", message=message) for message in messages]))
        assert all(reply.peer == b"gateway" for reply in outcome.replies)
        found = {(reply.message.request_id, reply.message.round_id): reply.message for reply in outcome.replies}
        assert len(outcome.replies) == len(messages)
        return [found[message.request_id, message.round_id] for message in messages]

    def ids(self, *messages: DraftExtend) -> list[tuple[int, ...]]:
        """Proposed ids of one batch in which nothing fails."""
        replies = self.run(*messages)
        assert all(isinstance(reply, DraftProposal) for reply in replies), replies
        return [reply.draft_ids for reply in replies if isinstance(reply, DraftProposal)]

    def codes(self, *messages: DraftExtend) -> list[str]:
        """Failure codes of one batch, "ok" for proposals."""
        return [reply.code if isinstance(reply, DraftFailed) else "ok" for reply in self.run(*messages)]


def stale_all(rig: Rig, messages: Sequence[DraftExtend]) -> Sequence[DraftExtend]:
    """Overwrite every slot of the ring, so that the messages' features are gone."""
    for _ in range(64):
        rig.ring.write(np.zeros((1, FEATURES), np.float32))
    return messages
