"""The machine around the GPUs: IOMMU, driver options, kernel flags, NUMA. Reads /proc and /sys only."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

from verifier.allreduce.probe_records import Host

__all__ = ["read_host"]

_FLAGS = r"(?:amd_iommu|intel_iommu|iommu|pcie_aspm|pci|pcie_acs_override|nvidia\S*)=\S+"


def read_host(root: Path = Path("/"), *, gpu_addresses: tuple[str, ...] = ()) -> Host:
    """Look around.

    Args:
        root: for tests. gpu_addresses: whose IOMMU groups count; empty = any.
    """
    command_line = _text(root / "proc/cmdline")
    hmm = _text(root / "sys/module/nvidia_uvm/parameters/uvm_disable_hmm")
    aspm = re.search(r"\[(\w+)\]", _text(root / "sys/module/pcie_aspm/parameters/policy"))
    dwords = re.search(r'RegistryDwords: "(.*)"', _text(root / "proc/driver/nvidia/params"))
    nodes = list((root / "sys/devices/system/node").glob("node[0-9]*"))
    processor = re.search(r"model name\s*: (.+)", _text(root / "proc/cpuinfo"))
    return Host(
        processor=processor.group(1).strip() if processor else platform.processor(),
        cores=os.cpu_count() or 1,
        numa_nodes=max(1, len(nodes)),
        iommu=_iommu(root, command_line, gpu_addresses),
        registry_dwords=dwords.group(1) if dwords else "",
        kernel_flags=tuple(re.findall(_FLAGS, command_line)),
        aspm=aspm.group(1) if aspm else "",
        has_hmm={"Y": False, "1": False, "N": True, "0": True}.get(hmm),
    )


def _iommu(root: Path, command_line: str, gpu_addresses: tuple[str, ...]) -> str:
    """Off without any group; passthrough if the GPUs' groups are identity-mapped."""
    groups = root / "sys/kernel/iommu_groups"
    if not groups.is_dir():
        return "unknown"
    if not any(groups.iterdir()):
        return "off"
    paths = [root / "sys/bus/pci/devices" / address / "iommu_group/type" for address in gpu_addresses]
    kinds = {kind for path in (paths or list(groups.glob("*/type"))) if (kind := _text(path))}
    if kinds:
        return "passthrough" if kinds == {"identity"} else "translating"
    return "passthrough" if "iommu=pt" in command_line else "translating"


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
