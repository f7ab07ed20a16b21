"""Settings of the all-reduce inside the target's processes, which an engine starts: they come by environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from wire.settings import ConfigError

__all__ = ["AllReduceConfig", "read_config"]

PREFIX = "BREAKEVEN_ALLREDUCE_"
PeerAccess = Literal["auto", "on", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceConfig:
    """What the kernels are told of the machine. Must be the same on all ranks.

    Fields:
        island_size: neighbouring ranks behind one switch or socket; 0 = no boundary.
        peer_access: "off" = through pinned host memory; "auto" = that only where GPUs don't map each other.
        writes_collapse: fetch across islands instead of writing.
        max_bytes: widest message; larger ones stay NCCL's.
        timeout_s: a rank that waits longer for a peer ends the engine. Covers compilation skew between ranks.
        cache_dir: compiled kernels.
    """

    island_size: int = 0
    peer_access: PeerAccess = "auto"
    writes_collapse: bool = False
    max_bytes: int = 1024 * 1024
    timeout_s: float = 60.0
    cache_dir: str = "auto"

    @property
    def resolved_cache_dir(self) -> Path:
        """``cache_dir`` with "auto" resolved."""
        return Path.home() / ".cache" / "breakeven" / "allreduce" if self.cache_dir == "auto" else Path(self.cache_dir)


def read_config(environ: Mapping[str, str] = os.environ) -> AllReduceConfig:
    """``BREAKEVEN_ALLREDUCE_ISLAND_SIZE=4`` and so on; what is not set keeps its default.

    Raises:
        ConfigError: an unknown name or a value out of range.
    """
    known = {PREFIX + each.name.upper(): each.name for each in fields(AllReduceConfig)}
    given = {name: value for name, value in environ.items() if name.startswith(PREFIX)}
    for name in given:
        if name not in known:
            raise ConfigError(name, f"unknown; known are {', '.join(sorted(known))}")
    default = AllReduceConfig()
    named = {known[name]: value for name, value in given.items()}
    accesses: dict[str, PeerAccess] = {"auto": "auto", "on": "on", "off": "off"}
    access = accesses.get(named.get("peer_access", default.peer_access))
    if access is None:
        raise ConfigError(PREFIX + "PEER_ACCESS", "must be auto, on or off")
    config = AllReduceConfig(
        island_size=_number(named, "island_size", default.island_size, 0, 8),
        peer_access=access,
        writes_collapse=bool(_number(named, "writes_collapse", 0, 0, 1)),
        max_bytes=_number(named, "max_bytes", default.max_bytes, 16, default.max_bytes),
        timeout_s=_number(named, "timeout_s", int(default.timeout_s), 1, 3600),
        cache_dir=named.get("cache_dir", default.cache_dir),
    )
    if config.max_bytes % 16:
        raise ConfigError(PREFIX + "MAX_BYTES", "must be a multiple of 16")
    return config


def _number(named: Mapping[str, str], name: str, default: int, low: int, high: int) -> int:
    try:
        value = int(named.get(name, default))
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise ConfigError(PREFIX + name.upper(), f"must be a whole number from {low} to {high}")
    return value
