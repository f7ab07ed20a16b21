"""A probed machine and its capabilities, as text for people. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from verifier.allreduce.capabilities import Capability
from verifier.allreduce.probe_records import Bandwidth, Machine

__all__ = ["capability_lines", "machine_lines", "remedies"]


def machine_lines(machine: Machine) -> list[str]:
    """Sections with a heading each; the same on a machine without GPUs."""
    host = machine.host
    lines = [f"host       {host.processor}, {host.cores} cores, {host.numa_nodes} NUMA node(s)"]
    lines.append(f"iommu      {host.iommu}{_flags(host.kernel_flags)}")
    if host.aspm:
        lines.append(f"aspm       {host.aspm}")
    if host.registry_dwords:
        lines.append(f"driver     registry dwords: {host.registry_dwords}")
    if not machine.gpus:
        lines.append("gpus       none")
    for gpu in machine.gpus:
        bar = "resizable BAR" if gpu.has_resizable_bar else f"BAR1 {gpu.bar1_mib} MiB of {gpu.memory_mib}"
        capability = f"SM{gpu.capability[0]}{gpu.capability[1]}"
        link = f"Gen{gpu.link_gen[0]} x{gpu.link_width[0]} (at most Gen{gpu.link_gen[1]} x{gpu.link_width[1]})"
        numa = machine.numa_of_gpu.get(gpu.index)
        lines.append(
            f"GPU{gpu.index:<8}{gpu.name}, {capability}, {gpu.bus_id}, {link}, {bar}, "
            f"NUMA {'?' if numa is None else numa}, driver {gpu.driver}"
        )
    if machine.gpus:
        lines += ["", *_matrix("links", machine.links, len(machine.gpus))]
        lines.append("islands    " + "  ".join("+".join(map(str, island)) for island in machine.islands))
    for access, matrix in machine.p2p.items():
        lines += ["", *_matrix(f"p2p {access}", matrix, len(machine.gpus))]
    if machine.pci:
        lines += ["", "pci tree"]
        lines += [_tree_line(machine, device.address) for device in machine.pci]
    if machine.bandwidth is not None:
        lines += ["", *_bandwidth(machine.bandwidth, len(machine.gpus))]
    lines += ["", *(f"note       {note}" for note in machine.notes)] if machine.notes else []
    found = remedies(machine)
    lines += ["", *(f"remedy     {remedy}" for remedy in found)] if found else []
    return lines


def capability_lines(found: tuple[Capability, ...]) -> list[str]:
    """A Markdown table."""
    lines = ["| strategy | possible here | why | since | source |", "| --- | --- | --- | --- | --- |"]
    for each in found:
        why = "; ".join(each.reasons) or each.strategy.note
        lines.append(
            f"| {each.strategy.title} (`{each.strategy.enable}`) | {each.possible} | {why} | {each.strategy.since} "
            f"| {each.strategy.source} |"
        )
    return lines


def remedies(machine: Machine) -> list[str]:
    """What stands between this machine and direct peer access, most valuable first."""
    if len(machine.gpus) < 2:
        return []
    found = []
    if machine.host.iommu == "translating":
        found.append("the IOMMU translates: amd_iommu=off or intel_iommu=off (or iommu=pt with ACS off)")
    redirecting = [device.address for device in machine.pci if device.redirects]
    if redirecting:
        found.append(f"ACS redirects peer traffic at {', '.join(redirecting)}: switch it off on root and switch ports")
    if machine.bandwidth is not None and machine.bandwidth.is_staged:
        found.append(
            "peer loads are staged through system memory: NVreg_RegistryDwords="
            '"ForceP2P=0x11;RMForceP2PType=1;RMPcieP2PType=2;GrdmaPciTopoCheckOverride=1;EnableResizableBar=1"'
        )
    if machine.bandwidth is not None and machine.bandwidth.stores_collapse:
        found.append("writes to several GPUs collapse on this switch: pull across it, or stage one stream at a time")
    small = [gpu.index for gpu in machine.gpus if gpu.bar1_mib and not gpu.has_resizable_bar]
    if small:
        found.append(f"GPU {small} without resizable BAR: switch on Above 4G decoding and ReBAR in the firmware")
    if machine.host.has_hmm:
        found.append("uvm_disable_hmm=1 for nvidia_uvm")
    if machine.host.aspm not in ("", "performance"):
        found.append("pcie_aspm=off: links that sleep add microseconds")
    slow = [gpu.index for gpu in machine.gpus if 0 < gpu.link_width[0] < gpu.link_width[1]]
    if slow:
        found.append(f"GPU {slow} runs on fewer lanes than it has: check slot and riser")
    return found


def _flags(flags: tuple[str, ...]) -> str:
    return f" ({' '.join(flags)})" if flags else ""


def _matrix(title: str, matrix: Mapping[tuple[int, int], object], count: int) -> list[str]:
    head = f"{title:<11}" + "".join(f"{j:>6}" for j in range(count))
    rows = []
    for i in range(count):
        cells = "".join(f"{'-' if i == j else str(matrix.get((i, j), '?')):>6}" for j in range(count))
        rows.append(f"{i:<11}{cells}")
    return [head, *rows]


def _tree_line(machine: Machine, address: str) -> str:
    devices = {device.address: device for device in machine.pci}
    device, depth = devices[address], 0
    while device.parent in devices:
        device, depth = devices[device.parent], depth + 1
    device = devices[address]
    acs = {True: ", ACS redirects", False: "", None: ", ACS unknown" if device.kind == "bridge" else ""}
    return f"  {'  ' * depth}{address} {device.kind} {device.speed} x{device.width}{acs[device.redirects]}"


def _bandwidth(found: Bandwidth, count: int) -> list[str]:
    lines: list[str] = []
    for name, table in (("store GB/s", found.store), ("load GB/s", found.load), ("copy GB/s", found.copy)):
        lines += [*_matrix(name, {pair: f"{rate:.1f}" for pair, rate in table.items()}, count), ""]
    lines.append(f"all at once: stores {found.ring_store:.1f}, loads {found.ring_load:.1f} GB/s, the slowest GPU")
    lines.append(f"two to two far ones: stores {found.collapse_store:.1f}, loads {found.collapse_load:.1f} GB/s")
    lines.append(f"staged through system memory: {'yes' if found.is_staged else 'no'}")
    lines.append(f"collapse of stores: {_yes(found.stores_collapse)}, of loads: {_yes(found.loads_collapse)}")
    lines += [f"WRONG DATA between GPU{i} and GPU{j}" for i, j in found.wrong]
    return lines


def _yes(value: bool) -> str:
    return "yes" if value else "no"
