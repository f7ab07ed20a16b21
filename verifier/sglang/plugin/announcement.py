"""What the plugin says to the gateway: one datagram for each piece of features it wrote, and the names they share."""

from __future__ import annotations

import uuid

import msgspec

from wire.messages import FeatureSpan

__all__ = ["MAX_SPANS", "Announcement", "first_wanted", "new_rid"]

# Spans in one datagram: at most 60 bytes each, and 64 KiB are read at once.
MAX_SPANS = 512

_PREFIX = "be-"


class Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """Features of one engine request, contiguous; a span's ``start`` is the position of its first row.

    All that a pass brought for a request goes into one datagram: the kernel queues ten of them by default
    (net.unix.max_dgram_qlen), which a long prompt's slots would overrun one by one.
    """

    rid: str
    spans: tuple[FeatureSpan, ...]


def new_rid(first_position: int) -> str:
    """A fresh engine request id, which tells the tap from which position on features are wanted.

    Fresh, because the engine aborts by prefix and refuses an id it still knows.
    """
    return f"{_PREFIX}{uuid.uuid4().hex}-{first_position}"


def first_wanted(rid: str) -> int | None:
    """The position ``new_rid`` was given, or None for requests that are not the gateway's."""
    if not rid.startswith(_PREFIX):
        return None
    number = rid.rpartition("-")[2]
    return int(number) if number.isdecimal() else None
