"""What the plugin says to the gateway: datagrams listing the pieces of features it wrote, and the names they share."""

from __future__ import annotations

import uuid

import msgspec

from wire.messages import FeatureSpan

__all__ = ["Announcement", "first_wanted", "new_rid"]

_PREFIX = "be-"


class Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """Features of one engine request. ``span.start`` is the position of its first row."""

    rid: str
    span: FeatureSpan


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
