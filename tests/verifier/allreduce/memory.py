"""Plain memory for what is a GPU's in earnest."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass


@dataclass(frozen=True)
class Block:
    keeper: object
    address: int


def aligned_zeros(num_bytes: int, alignment: int = 64) -> Block:
    raw = (ctypes.c_char * (num_bytes + alignment))()
    start = ctypes.addressof(raw)
    return Block(raw, -(-start // alignment) * alignment)
