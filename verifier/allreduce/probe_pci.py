"""The PCIe tree from /sys, and what lspci adds where /sys is closed: access control (ACS) and link states."""

from __future__ import annotations

import re
import struct
from pathlib import Path

from verifier.allreduce.probe_records import PciDevice

__all__ = ["acs_redirects", "parse_lspci", "read_pci_tree"]

_NVIDIA = "0x10de"
_ACS_CAPABILITY = 0x000D
# Request redirect, completion redirect, upstream forwarding: with these on, peer traffic goes up to the root complex.
_REDIRECT_BITS = 0b0001_1100
_EXTENDED_START = 0x100


def read_pci_tree(root: Path = Path("/sys")) -> tuple[PciDevice, ...]:
    """GPUs and every port above them; all else of the bus is left out."""
    base = root / "bus" / "pci" / "devices"
    if not base.is_dir():
        return ()
    found: dict[str, PciDevice] = {}
    for entry in sorted(base.iterdir()):
        if _text(entry / "vendor") != _NVIDIA or not _text(entry / "class").startswith("0x03"):
            continue
        # The link's real path names every bridge on the way: .../pci0000:60/0000:60:01.1/0000:61:00.0
        addresses = [part for part in entry.resolve().parts if re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:\S+", part)]
        for parent, address in zip(["", *addresses], addresses, strict=False):
            if address not in found:
                kind = "gpu" if address == entry.name else "bridge"
                found[address] = _device(base / address, address, parent, kind)
    return tuple(found.values())


def _device(path: Path, address: str, parent: str, kind: str) -> PciDevice:
    return PciDevice(
        address=address,
        parent=parent,
        kind=kind,
        vendor=_text(path / "vendor"),
        numa_node=_integer(_text(path / "numa_node"), default=-1),
        speed=_text(path / "current_link_speed"),
        width=_integer(_text(path / "current_link_width"), default=0),
        redirects=acs_redirects(_bytes(path / "config")),
    )


def acs_redirects(config: bytes) -> bool | None:
    """Whether a port's ACS redirects peer traffic; None without the capability, or if only root may read so far.

    Args:
        config: its configuration space; the extended part begins at 256 bytes.
    """
    at, visited = _EXTENDED_START, 0
    while at and at + 8 <= len(config) and visited < 64:
        (header,) = struct.unpack_from("<I", config, at)
        if header & 0xFFFF == _ACS_CAPABILITY:
            (control,) = struct.unpack_from("<H", config, at + 6)
            return bool(control & _REDIRECT_BITS)
        at, visited = header >> 20, visited + 1
    return None


def parse_lspci(text: str) -> dict[str, dict[str, str]]:
    """``lspci -D -vvv``: address to {"name", "acs", "link", "region1", "numa"} as far as present.

    "acs" is "redirect" or "direct"; "link" is the state of now, "32GT/s x16".
    """
    found: dict[str, dict[str, str]] = {}
    device: dict[str, str] | None = None
    for line in text.splitlines():
        head = re.match(r"((?:[0-9a-f]{4}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]) (.+)", line)
        if head:
            address = head.group(1) if head.group(1).count(":") == 2 else f"0000:{head.group(1)}"
            device = found.setdefault(address, {"name": head.group(2).strip()})
            continue
        if device is None:
            continue
        text_line = line.strip()
        if text_line.startswith("ACSCtl:"):
            on = [flag for flag in ("ReqRedir+", "CmpltRedir+", "UpstreamFwd+") if flag in text_line]
            device["acs"] = "redirect" if on else "direct"
        elif text_line.startswith("LnkSta:"):
            link = re.search(r"Speed ([\d.]+GT/s).*?Width (x\d+)", text_line)
            if link:
                device["link"] = f"{link.group(1)} {link.group(2)}"
        elif text_line.startswith("Region 1:"):
            size = re.search(r"\[size=(\w+)\]", text_line)
            if size:
                device["region1"] = size.group(1)
        elif text_line.startswith("NUMA node:"):
            device["numa"] = text_line.partition(":")[2].strip()
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _integer(text: str, *, default: int) -> int:
    try:
        return int(text)
    except ValueError:
        return default
