"""Copies aux hidden states of every forward pass into shared memory, and says so, without touching what SGLang does.

The engine captures them anyway when it was started with --enable-return-aux-hidden-states; its own way out is JSON.
Here the wanted rows are cloned on the device right after the pass, copied to the host beside the next one, and written
to the tensor ring by a thread. Rank 0 only. Nothing here may fail a pass: errors are logged once and end the tap.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from verifier.sglang.plugin.announcement import Announcement, first_wanted
from verifier.sglang.plugin.config import PluginConfig
from wire.messages import FeatureSpan
from wire.tensor_ring import TensorRingWriter

__all__ = ["FeatureTap", "Piece", "wanted_pieces"]

log = logging.getLogger("breakeven.plugin")

_MAX_QUEUED = 256
# A pass is told of in as few datagrams as fit the default send buffer: Linux queues only 10 at a socket
# (net.unix.max_dgram_qlen), so one for each sequence is lost where the gateway does not read at once.
_MAX_TOLD_AT_ONCE = 512


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows ``row`` .. ``row + count - 1`` of a pass, which are one request's positions from ``position`` on."""

    rid: str
    row: int
    count: int
    position: int


def wanted_pieces(rids: list[str], prefix_lens: list[int], lens: list[int]) -> list[Piece]:
    """Which rows of a ragged pass are wanted: each request's own, from the position its rid names."""
    pieces: list[Piece] = []
    row = 0
    for rid, prefix_len, length in zip(rids, prefix_lens, lens, strict=True):
        first = first_wanted(rid)
        if first is not None:
            skipped = max(0, first - prefix_len)
            if skipped < length:
                pieces.append(Piece(rid, row + skipped, length - skipped, prefix_len + skipped))
        row += length
    return pieces


class FeatureTap:
    """One per process; only the scheduler's ever runs a pass."""

    def __init__(self, config: PluginConfig) -> None:
        self._config = config
        self._is_broken = False
        self._ring: TensorRingWriter | None = None
        self._socket: socket.socket | None = None
        self._queue: queue.Queue[tuple[Any, Any, list[Piece]]] = queue.Queue(_MAX_QUEUED)
        self._num_dropped = 0

    def around_forward(
        self, original: Callable[..., Any], worker: Any, batch: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """The hook: run the pass, then tap it."""
        pieces = None
        if batch is not None and not self._is_broken:
            pieces = self._guarded(self._pieces, batch)
        result = original(worker, batch, *args, **kwargs)
        if pieces is not None:
            self._guarded(self._take, result, pieces)
        return result

    def _guarded(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except Exception:  # a tap that fails must never fail the engine's pass
            log.exception("breakeven: the tap of aux hidden states is off")
            self._is_broken = True
            return None

    def _pieces(self, batch: Any) -> list[Piece] | None:
        if not _is_first_rank():
            return None
        rids = [request.rid for request in batch.reqs]
        if batch.forward_mode.is_extend():
            return wanted_pieces(rids, [int(n) for n in batch.prefix_lens], [int(n) for n in batch.extend_lens])
        if batch.forward_mode.is_decode():
            positions = [int(n) - 1 for n in batch.seq_lens_cpu]
            return wanted_pieces(rids, positions, [1] * len(rids))
        return None

    def _take(self, result: Any, pieces: list[Piece]) -> None:
        hidden = getattr(result.logits_output, "hidden_states", None)
        if hidden is None:
            return
        if self._ring is None:
            self._open(hidden)
        if not pieces:
            return
        # Clone: the pass may have run in a CUDA graph, whose output buffer the next pass writes.
        rows = hidden[: pieces[-1].row + pieces[-1].count].detach()
        if not rows.is_cuda:
            self._write(rows, pieces)
            return
        import torch  # lazy: the plugin's modules load without torch

        host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
        host.copy_(rows.clone(), non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        try:
            self._queue.put_nowait((event, host, pieces))
        except queue.Full:
            self._num_dropped += 1  # the gateway misses the features, counts it and goes plain

    def _open(self, hidden: Any) -> None:
        config = self._config
        assert config.ring_path is not None
        width = int(hidden.shape[-1]) * hidden.element_size()
        self._ring = TensorRingWriter(
            config.ring_path, num_slots=config.ring_slots, slot_bytes=config.ring_slot_rows * width
        )
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        if hidden.is_cuda:
            threading.Thread(target=self._write_queued, name="breakeven-tap", daemon=True).start()

    def _write_queued(self) -> None:
        while True:
            event, host, pieces = self._queue.get()
            event.synchronize()
            self._guarded(self._write, host, pieces)

    def _write(self, rows: Any, pieces: list[Piece]) -> None:
        array = _as_array(rows)
        assert self._ring is not None
        said: list[Announcement] = []
        for piece in pieces:
            for at in range(0, piece.count, self._config.ring_slot_rows):
                count = min(self._config.ring_slot_rows, piece.count - at)
                ref = self._ring.write(array[piece.row + at : piece.row + at + count])
                span = FeatureSpan(start=piece.position + at, ref=ref)
                said.append(Announcement(rid=piece.rid, span=span))
        for at in range(0, len(said), _MAX_TOLD_AT_ONCE):
            self._announce(said[at : at + _MAX_TOLD_AT_ONCE])

    def _announce(self, said: list[Announcement]) -> None:
        assert self._socket is not None
        try:
            self._socket.sendto(msgspec.msgpack.encode(said), str(self._config.socket_path))
        except (BlockingIOError, FileNotFoundError, ConnectionRefusedError):
            self._num_dropped += len(said)  # nobody listens, or too slowly


def _as_array(rows: Any) -> np.ndarray[Any, np.dtype[Any]]:
    """[R, 3 * H] on the host; bfloat16 as its 16 bits, which is what the ring calls uint16."""
    name = str(rows.dtype)
    if name == "torch.bfloat16":
        import torch  # lazy, as above

        rows = rows.view(torch.int16)
        return np.asarray(rows.numpy()).view(np.uint16)
    return np.asarray(rows.numpy())


def _is_first_rank() -> bool:
    import torch  # lazy, as above

    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
