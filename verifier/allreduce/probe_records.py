"""What probing a machine finds. Absent tools and refused reads leave fields empty and a note, never an exception."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Bandwidth", "Gpu", "Host", "Machine", "Matrix", "PciDevice"]

# (row GPU, column GPU) to the tool's word for it.
Matrix = dict[tuple[int, int], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as nvidia-smi numbers it.

    Fields:
        bus_id: PCI address, "0000:c1:00.0". capability: (12, 0) is SM120. memory_mib, bar1_mib: 0 = unknown.
        link_gen, link_width: (now, at most); 0 = unknown; links sleep at a lower generation when idle.
    """

    index: int
    name: str
    uuid: str
    bus_id: str
    capability: tuple[int, int]
    memory_mib: int
    bar1_mib: int
    link_gen: tuple[int, int]
    link_width: tuple[int, int]
    driver: str

    @property
    def has_resizable_bar(self) -> bool:
        """BAR1 shows all of its memory: peers reach it without a moving window."""
        return self.bar1_mib >= self.memory_mib > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PciDevice:
    """One function on the bus.

    Fields:
        parent: the port above it, "" at the root. kind: "gpu", "bridge" or "other".
        numa_node: -1 = unknown. redirects: ACS sends peer traffic up to the root; None = not readable or no ACS.
    """

    address: str
    parent: str
    kind: str
    vendor: str
    numa_node: int
    speed: str
    width: int
    redirects: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The machine around the GPUs.

    Fields:
        iommu: "off", "passthrough", "translating" or "unknown". registry_dwords: of the NVIDIA driver.
        kernel_flags: those of the command line that matter for peer traffic.
    """

    processor: str
    cores: int
    numa_nodes: int
    iommu: str
    registry_dwords: str
    kernel_flags: tuple[str, ...]
    aspm: str
    has_hmm: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """Measured, in GB/s.

    Fields:
        load, store, copy: by (GPU that acts, GPU whose memory it is): SM loads, SM stores, copy engine.
        ring_load, ring_store: the slowest GPU's when all act at once, each on its next neighbour.
        collapse_store, collapse_load: two neighbours acting on two far GPUs at once, the slower one.
        wrong: pairs whose memory did not hold what was written.
    """

    load: dict[tuple[int, int], float] = field(default_factory=dict)
    store: dict[tuple[int, int], float] = field(default_factory=dict)
    copy: dict[tuple[int, int], float] = field(default_factory=dict)
    ring_load: float = 0.0
    ring_store: float = 0.0
    collapse_store: float = 0.0
    collapse_load: float = 0.0
    wrong: tuple[tuple[int, int], ...] = ()

    @property
    def is_staged(self) -> bool:
        """The driver carries SM accesses through system memory: copies are far faster than loads of the same pair."""
        pairs = [pair for pair in self.copy if self.load.get(pair)]
        return bool(pairs) and max(self.copy[pair] / self.load[pair] for pair in pairs) > _STAGED_RATIO

    @property
    def stores_collapse(self) -> bool:
        """Several writers to several targets fall far below one writer, as on some PCIe switches."""
        alone = max(self.store.values(), default=0.0)
        return 0.0 < self.collapse_store < alone / _COLLAPSE_RATIO

    @property
    def loads_collapse(self) -> bool:
        """The same for reads."""
        alone = max(self.load.values(), default=0.0)
        return 0.0 < self.collapse_load < alone / _COLLAPSE_RATIO


# rtx6kpro: staged peers load at 1.4 GB/s where copies run at 50; healthy ones are within a factor of 1.3.
_STAGED_RATIO = 5.0
# 36.8 to 2.7 GB/s on PEX890xx; two healthy streams over one uplink still have half each.
_COLLAPSE_RATIO = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """All of it.

    Fields:
        links: nvidia-smi topo -m. p2p: "read", "write", "atomics" to the matrix of nvidia-smi topo -p2p.
        bandwidth: None if not measured. versions: of the engine's packages. notes: what could not be found, and why.
    """

    gpus: tuple[Gpu, ...]
    links: Matrix
    numa_of_gpu: dict[int, int]
    p2p: dict[str, Matrix]
    pci: tuple[PciDevice, ...]
    host: Host
    bandwidth: Bandwidth | None
    versions: dict[str, str]
    notes: tuple[str, ...]

    @property
    def has_full_nvlink(self) -> bool:
        """Every pair is joined by NVLink."""
        pairs = [(i.index, j.index) for i in self.gpus for j in self.gpus if i.index != j.index]
        return bool(pairs) and all(self.links.get(pair, "").startswith("NV") for pair in pairs)

    @property
    def majors(self) -> frozenset[int]:
        """Major compute capabilities present."""
        return frozenset(gpu.capability[0] for gpu in self.gpus)

    def p2p_ok(self, access: str) -> bool | None:
        """Every pair may do ``access``; None if unknown."""
        matrix = self.p2p.get(access)
        if not matrix:
            return None
        return all(state == "OK" for (i, j), state in matrix.items() if i != j)

    @property
    def islands(self) -> tuple[tuple[int, ...], ...]:
        """GPUs grouped by what joins them closer than a trip between host bridges or sockets."""
        groups: list[set[int]] = []
        for gpu in self.gpus:
            near = {
                j.index
                for j in self.gpus
                if j is gpu or self.links.get((gpu.index, j.index), "SYS") in ("PIX", "PXB", "PHB", "NODE")
            }
            for group in [group for group in groups if group & near]:
                near |= group
                groups.remove(group)
            groups.append(near)
        return tuple(tuple(sorted(group)) for group in sorted(groups, key=min))
