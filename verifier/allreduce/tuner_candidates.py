"""What the tuner tries on a machine: one candidate per strategy that is possible there. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from verifier.allreduce.capabilities import Capability
from verifier.allreduce.probe_records import Machine
from verifier.allreduce.tuner_records import Candidate

__all__ = ["candidates_for", "cpu_candidates"]

_HERE = "verifier.allreduce.tuner_backends"
# Settings NCCL reads once; each is one change against its defaults with peer access on.
_NCCL_SETS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("nccl LL", (("NCCL_PROTO", "LL"),)),
    ("nccl tree", (("NCCL_ALGO", "Tree"),)),
    ("nccl 2 channels", (("NCCL_MAX_NCHANNELS", "2"),)),
    ("nccl 8 channels", (("NCCL_MIN_NCHANNELS", "8"),)),
    ("nccl buffer 128K", (("NCCL_BUFFSIZE", "131072"),)),
    ("nccl 64 threads", (("NCCL_NTHREADS", "64"),)),
)
_PEER = ("NCCL_P2P_LEVEL", "SYS")


def cpu_candidates() -> tuple[Candidate, ...]:
    """For a machine without GPUs: the same machinery over host memory."""
    return (
        Candidate(name="gloo", backend=f"{_HERE}:GlooBackend"),
        Candidate(name="gather", backend=f"{_HERE}:GatherBackend"),
    )


def candidates_for(machine: Machine, found: Sequence[Capability], *, cache_dir: Path) -> tuple[Candidate, ...]:
    """Simplest first: an earlier one keeps its place unless a later one is clearly faster."""
    possible = {each.strategy.name for each in found if each.possible != "no"}
    candidates: list[Candidate] = []
    if "nccl" in possible:
        candidates.append(Candidate(name="nccl", backend=f"{_HERE}:NcclBackend"))
    if "nccl_p2p_level" in possible:
        candidates.append(Candidate(name="nccl P2P SYS", backend=f"{_HERE}:NcclBackend", env=(_PEER,)))
    if "nccl_tuned" in possible:
        first = (_PEER,) if "nccl_p2p_level" in possible else ()
        candidates += [
            Candidate(name=name, backend=f"{_HERE}:NcclBackend", env=(*first, *env)) for name, env in _NCCL_SETS
        ]
    if "sglang_pcie_ipc" in possible:
        candidates.append(Candidate(name="pcie_ipc", backend=f"{_HERE}:PcieIpcBackend"))
    if "ours" in possible:
        candidates.append(Candidate(name="ours", backend=f"{_HERE}:OursBackend", options=_ours(machine, cache_dir)))
    return tuple(candidates)


def _ours(machine: Machine, cache_dir: Path) -> dict[str, str | int]:
    sizes = {len(island) for island in machine.islands}
    island = sizes.pop() if len(sizes) == 1 else len(machine.gpus)
    reachable = machine.p2p_ok("read") is True and machine.p2p_ok("write") is True
    collapses = machine.bandwidth is not None and machine.bandwidth.stores_collapse
    return {
        "cache_dir": str(cache_dir),
        "island_size": island,
        "peer_access": int(reachable),
        "writes_collapse": int(collapses),
    }
