"""The GPU's side of the bandwidth probes: a process of its own, killed by its parent if a peer access hangs.

    python -m verifier.allreduce.probe_worker NAME      prints one JSON line

It runs in the engine's interpreter: torch with CUDA, and of breakeven only this file. Kernels are compiled by NVRTC at
run time, so no toolkit is needed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["KERNELS", "main"]

# 16-byte accesses by 2 x 188 blocks; volatile loads, so that none is dropped. acts on n packs of 16 bytes.
KERNELS = """
extern "C" __global__ void fill(uint4* to, int n, int seed) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        to[i] = make_uint4(i ^ seed, i + seed, seed, i);
}
extern "C" __global__ void drain(const uint4* from, int n, unsigned* sink) {
    unsigned sum = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        unsigned a, b, c, d;
        asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "l"(from + i));
        sum += a ^ b ^ c ^ d;
    }
    if (sum == 0x12345678u) *sink = sum;
}
extern "C" __global__ void check(const uint4* at, int n, int seed, int* wrong) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        uint4 v = at[i];
        if (v.x != (unsigned)(i ^ seed) || v.y != (unsigned)(i + seed) || v.z != (unsigned)seed || v.w != (unsigned)i)
            atomicAdd(wrong, 1);
    }
}
"""
_PACK_BYTES = 16
_BYTES = 64 << 20
_GRID, _BLOCK = (376, 1, 1), (256, 1, 1)
_REPEATS = 5


class _Bench:
    """Buffers and kernels on every GPU, with peer access both ways."""

    def __init__(self) -> None:
        import torch  # lazy: only this process has CUDA

        self.torch = torch
        self.count = torch.cuda.device_count()
        self.num_packs = _BYTES // _PACK_BYTES
        self.buffers, self.sinks, self.kernels = [], [], []
        for i in range(self.count):
            with torch.cuda.device(i):
                self.buffers.append(torch.zeros(_BYTES, dtype=torch.uint8, device=f"cuda:{i}"))
                self.sinks.append(torch.zeros(1, dtype=torch.int32, device=f"cuda:{i}"))
                names = ("fill", "drain", "check")
                self.kernels.append({name: torch.cuda._compile_kernel(KERNELS, name) for name in names})
        for i, j in self.pairs():
            if torch.cuda.can_device_access_peer(i, j):
                self.buffers[j][:16].copy_(self.buffers[i][:16])  # torch enables peer access at the first copy

    def pairs(self) -> list[tuple[int, int]]:
        """Ordered pairs that may reach each other."""
        can = self.torch.cuda.can_device_access_peer
        return [(i, j) for i in range(self.count) for j in range(self.count) if i != j and can(i, j)]

    def fill(self, actor: int, owner: int, seed: int = 1) -> None:
        """``actor`` writes ``owner``'s buffer."""
        self._launch(actor, "fill", [self.buffers[owner], self.num_packs, seed])

    def drain(self, actor: int, owner: int) -> None:
        """``actor`` reads ``owner``'s buffer."""
        self._launch(actor, "drain", [self.buffers[owner], self.num_packs, self.sinks[actor]])

    def wrong_packs(self, owner: int, seed: int) -> int:
        """Packs of ``owner``'s buffer that are not what ``fill`` with ``seed`` writes, seen by itself."""
        self.sinks[owner].zero_()
        self._launch(owner, "check", [self.buffers[owner], self.num_packs, seed, self.sinks[owner]])
        self.torch.cuda.synchronize(owner)
        return int(self.sinks[owner].item())

    def copy(self, actor: int, owner: int) -> None:
        """The copy engine moves ``actor``'s buffer to ``owner``."""
        with self.torch.cuda.device(actor):
            self.buffers[owner].copy_(self.buffers[actor], non_blocking=True)

    def rate(self, actions: Sequence[tuple[int, Callable[[], None]]]) -> float:
        """GB/s of the slowest of actions that run at once; each is (GPU whose stream it is in, what to launch)."""
        torch = self.torch
        best = 0.0
        for repeat in range(_REPEATS + 1):
            events = []
            for device in {device for device, _ in actions}:
                torch.cuda.synchronize(device)
            for device, action in actions:
                with torch.cuda.device(device):
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    action()
                    end.record()
                    events.append((device, begin, end))
            for device, _, end in events:
                with torch.cuda.device(device):
                    end.synchronize()
            slowest_ms = max(begin.elapsed_time(end) for _, begin, end in events)
            if repeat:  # the first one maps pages
                best = max(best, _BYTES / slowest_ms / 1e6)
        return best

    def _launch(self, device: int, name: str, arguments: list[Any]) -> None:
        with self.torch.cuda.device(device):
            self.kernels[device][name](grid=_GRID, block=_BLOCK, args=arguments)


def _pairwise(bench: _Bench) -> dict[str, Any]:
    found: dict[str, list[Any]] = {"load": [], "store": [], "copy": [], "wrong": []}
    for number, (i, j) in enumerate(bench.pairs()):
        seed = 1000 + number
        store = bench.rate([(i, lambda i=i, j=j, seed=seed: bench.fill(i, j, seed))])  # type: ignore[misc]
        if bench.wrong_packs(j, seed):
            found["wrong"].append([i, j])
        found["store"].append([i, j, store])
        found["load"].append([i, j, bench.rate([(i, lambda i=i, j=j: bench.drain(i, j))])])  # type: ignore[misc]
        found["copy"].append([i, j, bench.rate([(i, lambda i=i, j=j: bench.copy(i, j))])])  # type: ignore[misc]
    return found


def _all_at_once(bench: _Bench) -> dict[str, Any]:
    n = bench.count
    if len(bench.pairs()) < n * (n - 1):
        return {}
    ring = [(i, (i + 1) % n) for i in range(n)]
    return {
        "ring_store": bench.rate([(i, lambda i=i, j=j: bench.fill(i, j)) for i, j in ring]),  # type: ignore[misc]
        "ring_load": bench.rate([(i, lambda i=i, j=j: bench.drain(i, j)) for i, j in ring]),  # type: ignore[misc]
    }


def _collapse(bench: _Bench) -> dict[str, Any]:
    """Two neighbours act on two far GPUs at once: the pattern that some switches can't carry in writes."""
    n = bench.count
    if n < 4 or len(bench.pairs()) < n * (n - 1):
        return {}
    flows = [(0, n // 2), (1, n // 2 + 1)]
    return {
        "collapse_store": bench.rate([(i, lambda i=i, j=j: bench.fill(i, j)) for i, j in flows]),  # type: ignore[misc]
        "collapse_load": bench.rate([(i, lambda i=i, j=j: bench.drain(i, j)) for i, j in flows]),  # type: ignore[misc]
    }


_PROBES: dict[str, Callable[[_Bench], dict[str, Any]]] = {
    "pairwise": _pairwise,
    "all_at_once": _all_at_once,
    "collapse": _collapse,
}


def main(argv: Sequence[str]) -> int:
    """Run the probe named on the command line."""
    found = _PROBES[argv[0]](_Bench())
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
