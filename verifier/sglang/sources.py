"""Where the aux hidden states of a round come from: the reply itself, or the plugin's shared memory."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from verifier.sglang.answers import Answer
from verifier.sglang.capabilities import EngineCapabilities
from verifier.sglang.config import SGLangConfig
from verifier.sglang.features import JsonFeatures, hidden_rows
from verifier.sglang.tap import TapSource
from wire.messages import FeatureSpan
from wire.tensor_ring import TensorRingWriter

__all__ = ["FeatureSource", "JsonSource", "SourceOwner"]


class FeatureSource(Protocol):
    """Finds features of computed positions."""

    @property
    def in_reply(self) -> bool:
        """The request must ask for them."""
        ...

    @property
    def follows_streams(self) -> bool:
        """A stream's own passes bring them too."""
        ...

    async def spans(self, rid: str, answer: Answer, *, first: int, last: int) -> tuple[FeatureSpan, ...] | None:
        """Features of positions ``first`` .. ``last`` that the engine computed for ``rid``, or None."""
        ...

    async def streamed(self, rid: str, *, first: int, last: int) -> tuple[FeatureSpan, ...] | None:
        """The same for a stream whose id after position ``last`` has come; ``first`` never goes back."""
        ...

    def forget(self, rid: str) -> None:
        """This engine request is over."""
        ...


class JsonSource:
    """Features as JSON in the reply."""

    in_reply = True
    follows_streams = False

    def __init__(self, features: JsonFeatures) -> None:
        self._features = features

    async def spans(self, rid: str, answer: Answer, *, first: int, last: int) -> tuple[FeatureSpan, ...] | None:
        """Rows of the reply, written to the ring."""
        rows = hidden_rows(answer, first=first, last=last)
        return None if rows is None else self._features.spans(rows, start=first)

    async def streamed(self, rid: str, *, first: int, last: int) -> tuple[FeatureSpan, ...] | None:
        """A stream carries none."""
        return None

    def forget(self, rid: str) -> None:
        """Nothing is kept."""


class SourceOwner:
    """Opens the source an engine calls for and owns what belongs to it.

    Args:
        ring_path, ring_slots, ring_slot_rows: the ring for features that come as JSON; the plugin has its own.
    """

    def __init__(self, config: SGLangConfig, *, ring_path: Path, ring_slots: int, ring_slot_rows: int) -> None:
        self.ring_path = str(ring_path)
        self._config = config
        self._path, self._slots, self._slot_rows = ring_path, ring_slots, ring_slot_rows
        self._ring: TensorRingWriter | None = None
        self._tap: TapSource | None = None

    def open(self, engine: EngineCapabilities) -> FeatureSource | None:
        """Close what was open, then open anew; None if the engine gives no features."""
        self.close()
        if engine.features == "tap":
            self._tap = TapSource(Path(self._config.tap_socket_path), timeout_s=self._config.tap_timeout_s)
            self._tap.open()
            self.ring_path = self._config.tap_ring_path
            return self._tap
        if engine.features == "off":
            return None
        size = 3 * engine.info.hidden_size
        self._ring = TensorRingWriter(self._path, num_slots=self._slots, slot_bytes=self._slot_rows * size * 4)
        self.ring_path = str(self._path)
        return JsonSource(JsonFeatures(self._ring, slot_rows=self._slot_rows, feature_size=size))

    def close(self) -> None:
        """Close socket or ring."""
        tap, self._tap = self._tap, None
        if tap is not None:
            tap.close()
        ring, self._ring = self._ring, None
        if ring is not None:
            ring.close()
