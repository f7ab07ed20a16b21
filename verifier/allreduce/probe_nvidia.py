"""Parsers of nvidia-smi's output. Pure: text in, records out; unknown lines are passed over."""

from __future__ import annotations

import re

from verifier.allreduce.probe_records import Gpu, Matrix

__all__ = ["GPU_FIELDS", "bar1_of", "parse_gpus", "parse_p2p", "parse_query", "parse_topology", "short_address"]

# nvidia-smi --query-gpu=... --format=csv,noheader,nounits
GPU_FIELDS = (
    "index",
    "name",
    "uuid",
    "pci.bus_id",
    "compute_cap",
    "memory.total",
    "pcie.link.gen.current",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "driver_version",
)


def parse_gpus(text: str, *, bar1_mib: dict[str, int]) -> tuple[Gpu, ...]:
    """GPUs of the csv query; ``bar1_mib`` by bus id, from ``parse_query``."""
    gpus = []
    for line in text.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) != len(GPU_FIELDS) or not values[0].isdigit():
            continue
        row = dict(zip(GPU_FIELDS, values, strict=True))
        bus_id = short_address(row["pci.bus_id"])
        major, _, minor = row["compute_cap"].partition(".")
        gpus.append(
            Gpu(
                index=int(row["index"]),
                name=row["name"],
                uuid=row["uuid"],
                bus_id=bus_id,
                capability=(_number(major), _number(minor)),
                memory_mib=_number(row["memory.total"]),
                bar1_mib=bar1_mib.get(bus_id, 0),
                link_gen=(_number(row["pcie.link.gen.current"]), _number(row["pcie.link.gen.max"])),
                link_width=(_number(row["pcie.link.width.current"]), _number(row["pcie.link.width.max"])),
                driver=row["driver_version"],
            )
        )
    return tuple(sorted(gpus, key=lambda gpu: gpu.index))


def parse_query(text: str) -> dict[str, dict[str, str]]:
    """``nvidia-smi -q``: bus id to {"Section/Key": value}, indentation giving the sections."""
    found: dict[str, dict[str, str]] = {}
    gpu: dict[str, str] | None = None
    stack: list[tuple[int, str]] = []
    for line in text.splitlines():
        head = re.match(r"GPU ([0-9A-Fa-f]{4,8}:[0-9A-Fa-f:.]+)\s*$", line)
        if head:
            gpu = found.setdefault(short_address(head.group(1)), {})
            stack = []
            continue
        if gpu is None or not line.strip():
            continue
        depth = len(line) - len(line.lstrip())
        key, colon, value = line.strip().partition(" : ")
        stack = [(d, name) for d, name in stack if d < depth]
        if colon:
            gpu["/".join([*(name for _, name in stack), key.strip()])] = value.strip()
        else:
            stack.append((depth, line.strip()))
    return found


def bar1_of(query: dict[str, dict[str, str]]) -> dict[str, int]:
    """Bus id to BAR1's size in MiB."""
    return {bus_id: _number(values.get("BAR1 Memory Usage/Total", "")) for bus_id, values in query.items()}


def parse_topology(text: str) -> tuple[Matrix, dict[int, int]]:
    """``nvidia-smi topo -m``: links between GPUs (PIX, PXB, PHB, NODE, SYS, NV#), and each GPU's NUMA node."""
    links: Matrix = {}
    numa: dict[int, int] = {}
    header: list[str] = []
    for line in text.splitlines():
        if line.strip().startswith("Legend"):
            break
        # Columns are tabs in the original and runs of blanks where it was copied; "CPU Affinity" is one column.
        cells = re.split(r"\s*\t\s*|\s{2,}", line.strip())
        if "GPU0" in line and "GPU0" in cells and not re.match(r"GPU0\s+X\b", line.strip()):
            header = [cell for cell in cells if cell]
            continue
        words = line.split()
        if not header or not words or not re.fullmatch(r"GPU\d+", words[0]):
            continue
        row = int(words[0][3:])
        columns = [cell for cell in header if re.fullmatch(r"(GPU|NIC|mlx|ibp|bnxt|rocep|irdma)\S*", cell)]
        for column, state in zip(columns, words[1:], strict=False):
            if re.fullmatch(r"GPU\d+", column) and state != "X":
                links[row, int(column[3:])] = state
        rest = words[1 + len(columns) :]
        if "NUMA Affinity" in line or any(cell.startswith("NUMA Aff") for cell in header):
            numeric = [word for word in rest if re.fullmatch(r"\d+", word)]
            # CPU affinity has a dash or comma; the next bare number is the NUMA node.
            if numeric:
                numa[row] = int(numeric[0])
    return links, numa


def parse_p2p(text: str) -> Matrix:
    """``nvidia-smi topo -p2p r|w|a``: OK, NS, CNS, GNS, TNS, DR or U for each pair."""
    matrix: Matrix = {}
    columns: list[int] = []
    for line in text.splitlines():
        if line.strip().startswith("Legend"):
            break
        words = line.split()
        if words and all(re.fullmatch(r"GPU\d+", word) for word in words):
            columns = [int(word[3:]) for word in words]
        elif words and columns and re.fullmatch(r"GPU\d+", words[0]):
            for column, state in zip(columns, words[1:], strict=False):
                if state != "X":
                    matrix[int(words[0][3:]), column] = state
    return matrix


def short_address(text: str) -> str:
    """PCI address as /sys writes it: "00000000:C1:00.0" is "0000:c1:00.0"."""
    domain, _, rest = text.strip().lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _number(text: str) -> int:
    found = re.match(r"\s*(\d+)", text)
    return int(found.group(1)) if found else 0
