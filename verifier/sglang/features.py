"""Aux hidden states that came as JSON, written into the tensor ring by the client itself: the reference path.

One row of a 7168-wide target is 21,504 numbers of JSON, so this is for small models and for checking the plugin.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import orjson

from verifier.sglang.answers import Answer
from wire.errors import PeerRefused
from wire.messages import FeatureSpan
from wire.tensor_ring import TensorRingWriter

__all__ = ["JsonFeatures", "hidden_rows"]


class JsonFeatures:
    """Owns nothing: writes rows into a ring of the given slot size."""

    def __init__(self, ring: TensorRingWriter, *, slot_rows: int, feature_size: int) -> None:
        self._ring = ring
        self._slot_rows = slot_rows
        self._feature_size = feature_size

    def spans(self, rows: npt.NDArray[np.float32], *, start: int) -> tuple[FeatureSpan, ...]:
        """Write ``rows`` [R, 3 * H] of positions ``start`` .. and say where they lie.

        Raises:
            PeerRefused: their width is not the target's.
        """
        if rows.shape[1] != self._feature_size:
            raise PeerRefused("target_error", f"features are {rows.shape[1]} wide, expected {self._feature_size}")
        return tuple(
            FeatureSpan(start=start + at, ref=self._ring.write(rows[at : at + self._slot_rows]))
            for at in range(0, len(rows), self._slot_rows)
        )


def hidden_rows(answer: Answer, *, first: int, last: int) -> npt.NDArray[np.float32] | None:
    """Rows of positions ``first`` .. ``last`` of one reply, or None if it does not hold them all.

    It holds the positions computed in its last chunk of prefill: those after the cached ones, if it was one chunk.
    """
    raw = bytes(answer.meta_info.hidden_states)
    entries = orjson.loads(raw) if raw else None
    if not isinstance(entries, list) or not entries or not entries[0]:
        return None
    prefill = entries[0]
    rows = np.asarray(prefill, dtype=np.float32)
    if rows.ndim != 2:
        return None
    # The last row is the last input's, whatever was dropped before it.
    begin = answer.meta_info.prompt_tokens - len(rows)
    if not begin <= first <= last < answer.meta_info.prompt_tokens:
        return None
    return rows[first - begin : last - begin + 1]
