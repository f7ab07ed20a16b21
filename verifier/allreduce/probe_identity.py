"""Which machine this is, as far as its speed depends on it: the key under which measurements are kept."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

from verifier.allreduce.probe_child import run_limited

__all__ = ["MachineIdentity", "machine_identity", "run_tool"]

_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineIdentity:
    """Equal identities measure alike.

    Fields:
        gpus: "uuid name" in the order of their numbers. driver: of the GPUs, "" without any.
        topology: digest of how they are connected (nvidia-smi topo -m without its legend), "" without any.
        processor, cores, memory_gib, kernel: of the host.
    """

    gpus: tuple[str, ...]
    driver: str
    topology: str
    processor: str
    cores: int
    memory_gib: int
    kernel: str


def machine_identity() -> MachineIdentity:
    """Ask nvidia-smi and /proc; what is not there stays empty."""
    rows = [line.split(", ") for line in (run_tool(_GPU_QUERY) or "").splitlines() if line.count(", ") >= 2]
    topology = (run_tool(("nvidia-smi", "topo", "-m")) or "").partition("Legend")[0].split()
    return MachineIdentity(
        gpus=tuple(f"{uuid} {name}" for uuid, name, *_ in rows),
        driver=rows[0][2].strip() if rows else "",
        topology=hashlib.sha256(" ".join(topology).encode()).hexdigest()[:16] if topology else "",
        processor=_processor(),
        cores=os.cpu_count() or 1,
        memory_gib=_memory_gib(),
        kernel=platform.release(),
    )


_GPU_QUERY = ("nvidia-smi", "--query-gpu=uuid,name,driver_version", "--format=csv,noheader")


def run_tool(command: tuple[str, ...], *, timeout_s: float = _TIMEOUT_S) -> str | None:
    """What a tool prints; None if it is missing, fails, or takes too long (it is killed then)."""
    path = shutil.which(command[0])
    if path is None:
        return None
    ran = run_limited([path, *command[1:]], timeout_s=timeout_s)
    return None if ran.problem else ran.output


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    if path.is_file():
        for line in path.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _memory_gib() -> int:
    path = Path("/proc/meminfo")
    if path.is_file():
        for line in path.read_text().splitlines():
            if line.startswith("MemTotal:"):
                return round(int(line.split()[1]) / (1 << 20))
    return 0
