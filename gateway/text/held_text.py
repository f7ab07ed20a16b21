"""How much of a text's end must wait, because it may be the beginning of a tag."""

from __future__ import annotations

__all__ = ["held_len"]


def held_len(text: str, tag: str) -> int:
    """Length of the longest proper beginning of ``tag`` that ``text`` ends with."""
    longest = min(len(text), len(tag) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(tag[:size])), 0)
