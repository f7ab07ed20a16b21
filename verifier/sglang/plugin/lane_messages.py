"""What goes over the fast lane, between the gateway's client and the plugin in SGLang's scheduler. MessagePack.

A call carries the columns of a POST /generate, so the lane knows no parameter by name; ids travel as raw int64, since
lists of a long context are most of what a call costs. An answer has the fields of the reply that ``answers`` reads.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

__all__ = ["LANE_VERSION", "LaneAnswers", "LaneCall", "LaneItem", "pack_ids", "unpack_ids"]

# A call of another version is refused.
LANE_VERSION = 1


class LaneItem(msgspec.Struct, frozen=True, array_like=True):
    """One sequence. ids: ``pack_ids``. sampling: SGLang's sampling_params by name. extra_key: "" = none."""

    rid: str
    ids: bytes
    sampling: dict[str, Any]
    return_logprob: bool
    logprob_start_len: int
    top_logprobs_num: int
    return_hidden_states: bool
    extra_key: str


class LaneCall(msgspec.Struct, frozen=True, array_like=True):
    """One batch, to run as one."""

    version: int
    items: list[LaneItem]


class LaneAnswers(msgspec.Struct, frozen=True, array_like=True):
    """Finished sequences of one or more calls: (rid, the reply as MessagePack). A refusal has an ``error``."""

    answers: list[tuple[str, msgspec.Raw]]
    error: str = ""


def pack_ids(ids: list[int]) -> bytes:
    """Token ids as little-endian int64."""
    return np.asarray(ids, dtype="<i8").tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """What ``pack_ids`` packed."""
    found: list[int] = np.frombuffer(data, dtype="<i8").tolist()
    return found
