"""Greedy rounds as CUDA graphs: one launch for all of a round's kernels, where a small head would wait for the host.

A graph repeats its kernels on the same addresses, so these rounds work in buffers of their own: input, and a window
that caches are copied into. A shape that comes up several times gets a graph; rare or large ones run without.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from drafter.device.memory import PlaneShape
from drafter.device.staging import RoundInput

__all__ = ["GraphRounds", "GraphShape"]

_log = logging.getLogger(__name__)
_MEMORY_BYTES = 128 << 20
_MAX_ROWS = 128
_LEAST_CAPACITY = 512
# Capturing takes some ten milliseconds: not for shapes that come once.
_ROUNDS_BEFORE_CAPTURE = 3
_MAX_GRAPHS = 64

Compute = Callable[[RoundInput, torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphShape:
    """What a graph is captured for: B requests, R rows each, room for T positions, K draft tokens."""

    batch: int
    rows: int
    capacity: int
    steps: int


class GraphRounds:
    """Runs ``compute(input, memory, steps) -> ids [B, steps]`` over fixed buffers, captured where that is possible."""

    def __init__(
        self, compute: Compute, plane: PlaneShape, *, feature_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._compute = compute
        self._plane = plane
        self._is_cuda = device.type == "cuda"
        self._memory = torch.zeros(_MEMORY_BYTES // dtype.itemsize, dtype=dtype, device=device)
        self._features = torch.zeros(_MAX_ROWS * feature_size, dtype=torch.float32, device=device)
        self._numbers = torch.zeros(3 * _MAX_ROWS, dtype=torch.int64, device=device)
        self._rounds: Counter[GraphShape] = Counter()
        self._graphs: OrderedDict[GraphShape, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = OrderedDict()
        self._pool = torch.cuda.graph_pool_handle() if self._is_cuda else None

    @property
    def num_graphs(self) -> int:
        """Graphs held."""
        return len(self._graphs)

    def shape_for(self, *, lengths: Sequence[int], counts: Sequence[int], steps: int) -> GraphShape | None:
        """The shape that such a round is padded to, or None if it is too large for the buffers.

        Args:
            lengths: positions that each request's cache holds; counts: its new rows.
        """
        rows = 1 << (max(counts) - 1).bit_length()
        needed = max(_LEAST_CAPACITY, max(lengths) + rows + steps)
        shape = GraphShape(batch=len(lengths), rows=rows, capacity=1 << (needed - 1).bit_length(), steps=steps)
        size = self._plane.num_numbers * shape.batch * shape.capacity
        fits = size <= len(self._memory) and shape.batch * shape.rows <= _MAX_ROWS
        return shape if fits else None

    def memory(self, shape: GraphShape) -> torch.Tensor:  # [L, P, B, H, T, D]
        """The window of a round of this shape; it holds the last round's."""
        plane = self._plane
        sizes = (plane.num_layers, plane.num_planes, shape.batch, plane.num_heads, shape.capacity, plane.width)
        return self._memory[: plane.num_numbers * shape.batch * shape.capacity].view(sizes)

    def buffers(self, shape: GraphShape) -> tuple[torch.Tensor, torch.Tensor]:
        """Where its features [B * R * F] and whole numbers [B * R + 2 B] go."""
        num_rows = shape.batch * shape.rows
        width = len(self._features) // _MAX_ROWS
        return self._features[: num_rows * width], self._numbers[: num_rows + 2 * shape.batch]

    def run(self, shape: GraphShape, given: RoundInput) -> torch.Tensor:  # [B, K]
        """The round, with ``given`` in ``buffers`` and the caches in ``memory``."""
        held = self._graphs.get(shape)
        if held is not None:
            self._graphs.move_to_end(shape)
            held[0].replay()
            return held[1].clone()  # the next replay writes there
        ids = self._compute(given, self.memory(shape), shape.steps)
        self._rounds[shape] += 1
        if self._is_cuda and self._rounds[shape] == _ROUNDS_BEFORE_CAPTURE:
            self._capture(shape, given)
        return ids

    def _capture(self, shape: GraphShape, given: RoundInput) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            # The outer stream is the current one: a capture that fails may leave its own in its place.
            # thread_local: what other threads of the process do meanwhile is no concern of this capture.
            with (
                torch.cuda.stream(torch.cuda.current_stream()),
                torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
            ):
                ids = self._compute(given, self.memory(shape), shape.steps)
        except RuntimeError as error:
            # The shape stays without, its counter is past the mark. A GPU that is lost says so at the next call too.
            _log.warning("event=no_graph shape=%s reason=%r", shape, str(error).partition("\n")[0])
            return
        self._graphs[shape] = graph, ids
        if len(self._graphs) > _MAX_GRAPHS:
            forgotten, _ = self._graphs.popitem(last=False)
            self._rounds[forgotten] = 0
