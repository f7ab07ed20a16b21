"""What the launcher tells the plugin, through the environment SGLang's processes inherit."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["PluginConfig", "plugin_environ", "read_plugin_config"]

_RING: Final = "BREAKEVEN_TAP_RING"
_SOCKET: Final = "BREAKEVEN_TAP_SOCKET"
_SLOTS: Final = "BREAKEVEN_TAP_SLOTS"
_SLOT_ROWS: Final = "BREAKEVEN_TAP_SLOT_ROWS"
_TARGET_IDS: Final = "BREAKEVEN_TARGET_IDS"
_EXPAND: Final = "BREAKEVEN_EXPAND"
_CAPTURE_AUX: Final = "BREAKEVEN_CAPTURE_AUX"
_KEEP_GRAPH_INPUTS: Final = "BREAKEVEN_KEEP_GRAPH_INPUTS"
_ALL_REDUCE: Final = "BREAKEVEN_ALL_REDUCE"
_LANE: Final = "BREAKEVEN_LANE"


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginConfig:
    """What is wanted of the plugin.

    Fields:
        ring_path, socket_path: None = no tap. ring_slots, ring_slot_rows: size of the ring, in positions.
        draws_target_ids: draw where the gateway orders it.
        expands_batches: run such verify passes as decode rows.
        captures_aux: make an engine without a flag for it capture aux hidden states.
        keeps_graph_inputs: True, False, or None = where the engine's version needs it.
        all_reduce: "module:attribute" of a provider's factory, "" = SGLang's own.
        lane_endpoint: where the fast lane is bound, "" = no lane.
    """

    ring_path: Path | None = None
    socket_path: Path | None = None
    ring_slots: int = 512
    ring_slot_rows: int = 64
    draws_target_ids: bool = False
    expands_batches: bool = True
    captures_aux: bool = False
    keeps_graph_inputs: bool | None = None
    all_reduce: str = ""
    lane_endpoint: str = ""

    @property
    def is_used(self) -> bool:
        """A gateway works with this engine; not so where the plugin is only installed."""
        return self.draws_target_ids or self.ring_path is not None or bool(self.lane_endpoint)


def read_plugin_config() -> PluginConfig:
    """What ``plugin_environ`` wrote; nothing is wanted where it wrote nothing."""
    ring, socket = os.environ.get(_RING), os.environ.get(_SOCKET)
    kept = os.environ.get(_KEEP_GRAPH_INPUTS, "")
    default = PluginConfig()
    return PluginConfig(
        ring_path=Path(ring) if ring and socket else None,
        socket_path=Path(socket) if ring and socket else None,
        ring_slots=int(os.environ.get(_SLOTS, default.ring_slots)),
        ring_slot_rows=int(os.environ.get(_SLOT_ROWS, default.ring_slot_rows)),
        draws_target_ids=os.environ.get(_TARGET_IDS) == "1",
        expands_batches=os.environ.get(_EXPAND) != "0",
        captures_aux=os.environ.get(_CAPTURE_AUX) == "1",
        keeps_graph_inputs={"1": True, "0": False}.get(kept),
        all_reduce=os.environ.get(_ALL_REDUCE, ""),
        lane_endpoint=os.environ.get(_LANE, ""),
    )


def plugin_environ(config: PluginConfig) -> list[tuple[str, str]]:
    """The environment that says what ``config`` says."""
    environ: list[tuple[str, str]] = []
    if config.ring_path is not None and config.socket_path is not None:
        environ += [(_RING, str(config.ring_path)), (_SOCKET, str(config.socket_path))]
    if config.draws_target_ids:
        environ.append((_TARGET_IDS, "1"))
    if not config.expands_batches:
        environ.append((_EXPAND, "0"))
    if config.captures_aux:
        environ.append((_CAPTURE_AUX, "1"))
    if config.keeps_graph_inputs is not None:
        environ.append((_KEEP_GRAPH_INPUTS, str(int(config.keeps_graph_inputs))))
    if config.all_reduce:
        environ.append((_ALL_REDUCE, config.all_reduce))
    if config.lane_endpoint:
        environ.append((_LANE, config.lane_endpoint))
    return environ
