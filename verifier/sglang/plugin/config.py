"""What the launcher tells the plugin, through the environment SGLang's processes inherit."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PluginConfig", "read_plugin_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginConfig:
    """ring_path, socket_path: None = no tap. ring_slots, ring_slot_rows: size of the ring, in positions."""

    ring_path: Path | None
    socket_path: Path | None
    ring_slots: int
    ring_slot_rows: int
    keeps_graph_inputs: bool


def read_plugin_config() -> PluginConfig:
    """BREAKEVEN_TAP_RING, _SOCKET, _SLOTS, _SLOT_ROWS and BREAKEVEN_KEEP_GRAPH_INPUTS."""
    ring, socket = os.environ.get("BREAKEVEN_TAP_RING"), os.environ.get("BREAKEVEN_TAP_SOCKET")
    return PluginConfig(
        ring_path=Path(ring) if ring and socket else None,
        socket_path=Path(socket) if ring and socket else None,
        ring_slots=int(os.environ.get("BREAKEVEN_TAP_SLOTS", "512")),
        ring_slot_rows=int(os.environ.get("BREAKEVEN_TAP_SLOT_ROWS", "64")),
        keeps_graph_inputs=os.environ.get("BREAKEVEN_KEEP_GRAPH_INPUTS") == "1",
    )
