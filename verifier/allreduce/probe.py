"""Looks at the whole machine. Every question that may hang is asked in a child with a time limit."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verifier.allreduce.probe_child import Ran, run_limited, run_module
from verifier.allreduce.probe_host import read_host
from verifier.allreduce.probe_nvidia import GPU_FIELDS, bar1_of, parse_gpus, parse_p2p, parse_query, parse_topology
from verifier.allreduce.probe_pci import parse_lspci, read_pci_tree
from verifier.allreduce.probe_records import Bandwidth, Machine, Matrix, PciDevice

__all__ = ["bandwidth_from", "probe_machine"]

_TOOL_TIMEOUT_S = 20.0
_BANDWIDTH_TIMEOUT_S = 180.0
_ACCESSES = {"read": "r", "write": "w", "atomics": "a"}
_WORKER = "verifier.allreduce.probe_worker"

Runner = Callable[[tuple[str, ...]], Ran]


def probe_machine(
    *,
    python: str = "",
    versions: dict[str, str] | None = None,
    with_bandwidth: bool = False,
    run: Runner | None = None,
    root: Path = Path("/"),
) -> Machine:
    """Everything that can be found here; what can't be is a note.

    Args:
        python: interpreter with torch and CUDA, for the bandwidth probes. versions: of the engine's packages.
        with_bandwidth: also measure, about a minute on eight GPUs. run, root: for tests.
    """
    ask = run or _run_tool
    notes: list[str] = []
    query = ("nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits")
    text = _asked(ask, query, notes)
    details = parse_query(_asked(ask, ("nvidia-smi", "-q"), notes)) if text else {}
    gpus = parse_gpus(text, bar1_mib=bar1_of(details))
    links: Matrix = {}
    numa: dict[int, int] = {}
    p2p: dict[str, Matrix] = {}
    if gpus:
        links, numa = parse_topology(_asked(ask, ("nvidia-smi", "topo", "-m"), notes))
        p2p = {
            name: parse_p2p(_asked(ask, ("nvidia-smi", "topo", "-p2p", letter), notes))
            for name, letter in _ACCESSES.items()
        }
    pci = _with_lspci(read_pci_tree(root / "sys"), ask, notes)
    bandwidth = None
    if with_bandwidth and len(gpus) > 1:
        bandwidth = _measure(python, notes)
    elif with_bandwidth:
        notes.append(f"bandwidth between GPUs not measured: GPUs here: {len(gpus)}")
    return Machine(
        gpus=gpus,
        links=links,
        numa_of_gpu=numa,
        p2p=p2p,
        pci=pci,
        host=read_host(root, gpu_addresses=tuple(gpu.bus_id for gpu in gpus)),
        bandwidth=bandwidth,
        versions=dict(versions or {}),
        notes=tuple(notes),
    )


def bandwidth_from(found: dict[str, Any]) -> Bandwidth:
    """The workers' JSON, merged, as a record."""

    def table(name: str) -> dict[tuple[int, int], float]:
        return {(int(i), int(j)): float(rate) for i, j, rate in found.get(name, [])}

    return Bandwidth(
        load=table("load"),
        store=table("store"),
        copy=table("copy"),
        ring_load=float(found.get("ring_load", 0.0)),
        ring_store=float(found.get("ring_store", 0.0)),
        collapse_store=float(found.get("collapse_store", 0.0)),
        collapse_load=float(found.get("collapse_load", 0.0)),
        wrong=tuple((int(i), int(j)) for i, j in found.get("wrong", [])),
    )


def _measure(python: str, notes: list[str]) -> Bandwidth | None:
    merged: dict[str, Any] = {}
    for name in ("pairwise", "all_at_once", "collapse"):
        ran = run_module(_WORKER, [name], python=python, timeout_s=_BANDWIDTH_TIMEOUT_S)
        found = ran.last_json()
        if ran.problem or not isinstance(found, dict):
            # A peer access that hangs is a finding: see IOMMU and ACS.
            notes.append(f"bandwidth probe {name}: {ran.problem or 'no result'}")
        else:
            merged |= found
    return bandwidth_from(merged) if merged else None


def _with_lspci(devices: tuple[PciDevice, ...], ask: Runner, notes: list[str]) -> tuple[PciDevice, ...]:
    """Fill in ACS where /sys did not give it (it needs root either way)."""
    if not devices or all(device.redirects is not None for device in devices):
        return devices
    listed = parse_lspci(_asked(ask, ("lspci", "-D", "-vvv"), notes))
    filled = []
    for device in devices:
        acs = listed.get(device.address, {}).get("acs")
        redirects = device.redirects if acs is None else acs == "redirect"
        filled.append(
            PciDevice(
                address=device.address,
                parent=device.parent,
                kind=device.kind,
                vendor=device.vendor,
                numa_node=device.numa_node,
                speed=device.speed,
                width=device.width,
                redirects=redirects,
            )
        )
    return tuple(filled)


def _asked(ask: Runner, command: tuple[str, ...], notes: list[str]) -> str:
    ran = ask(command)
    if ran.problem:
        note = f"{' '.join(word.partition('=')[0] for word in command[:3])}: {ran.problem}"
        if note not in notes:
            notes.append(note)
        return ""
    return ran.output


def _run_tool(command: tuple[str, ...]) -> Ran:
    path = shutil.which(command[0])
    if path is None:
        return Ran(output="", problem="not installed")
    return run_limited([path, *command[1:]], timeout_s=_TOOL_TIMEOUT_S)
