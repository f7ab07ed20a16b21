"""Parsers on recorded outputs of known machines; what a parser can't read it leaves empty."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from verifier.allreduce.probe_host import read_host
from verifier.allreduce.probe_nvidia import bar1_of, parse_gpus, parse_p2p, parse_query, parse_topology
from verifier.allreduce.probe_pci import acs_redirects, parse_lspci, read_pci_tree

RECORDINGS = Path(__file__).with_name("recordings")


def recorded(name: str) -> str:
    return (RECORDINGS / name).read_text()


def test_nvswitch_with_nics_copied_with_blanks() -> None:
    links, numa = parse_topology(recorded("topo-8-nvswitch.txt"))
    assert len(links) == 56
    assert set(links.values()) == {"NV8"}
    assert numa == {**dict.fromkeys(range(4), 0), **dict.fromkeys(range(4, 8), 1)}


def test_root_ports_of_two_sockets() -> None:
    links, numa = parse_topology(recorded("topo-5-dual-socket.txt"))
    assert len(links) == 20
    assert (links[0, 1], links[1, 2], links[1, 3], links[4, 3]) == ("SYS", "PHB", "NODE", "PHB")
    assert numa == {0: 1, 1: 0, 2: 0, 3: 0, 4: 0}


def test_eight_on_pcie_with_tabs() -> None:
    links, numa = parse_topology(recorded("topo-8-pcie-two-sockets.txt"))
    assert len(links) == 56
    assert (links[0, 3], links[3, 4]) == ("NODE", "SYS")
    assert numa[7] == 1


def test_peer_access() -> None:
    assert parse_p2p(recorded("p2p-2-geforce.txt")) == {(0, 1): "GNS", (1, 0): "GNS"}
    assert set(parse_p2p(recorded("p2p-8-ok.txt")).values()) == {"OK"}
    assert len(parse_p2p(recorded("p2p-8-ns.txt"))) == 56


def test_query_gives_resizable_bar() -> None:
    query = parse_query(recorded("smi-q-8-rtx-pro-6000.txt"))
    assert len(query) == 8
    assert query["0000:c1:00.0"]["PCI/GPU Link Info/PCIe Generation/Max"] == "5"
    assert query["0000:c1:00.0"]["Addressing Mode"] == "HMM"
    gpus = parse_gpus(recorded("smi-gpus-8-rtx-pro-6000.csv"), bar1_mib=bar1_of(query))
    assert [gpu.index for gpu in gpus] == list(range(8))
    gpu = gpus[6]
    assert (gpu.bus_id, gpu.capability, gpu.bar1_mib, gpu.link_gen) == ("0000:c1:00.0", (12, 0), 131072, (1, 5))
    assert gpu.has_resizable_bar


@pytest.mark.parametrize("text", ["", "NVIDIA-SMI has failed because it couldn't communicate with the driver", "\t\n"])
def test_nothing_is_found_in_an_error_message(text: str) -> None:
    assert parse_topology(text) == ({}, {})
    assert parse_p2p(text) == {}
    assert parse_query(text) == {}
    assert parse_gpus(text, bar1_mib={}) == ()
    assert parse_lspci(text) == {}


def test_unknown_values_are_zero() -> None:
    (gpu,) = parse_gpus("0, X, GPU-1, 00000000:01:00.0, [N/A], [N/A], [N/A], 4, 8, 16, 470", bar1_mib={})
    assert (gpu.capability, gpu.memory_mib, gpu.link_gen, gpu.has_resizable_bar) == ((0, 0), 0, (0, 4), False)


def test_lspci_gives_acs_links_and_bar() -> None:
    found = parse_lspci(recorded("lspci-vvv-turin-5090.txt"))
    assert found["0000:c0:01.1"]["acs"] == "redirect"
    assert found["0000:c0:01.1"]["link"] == "32GT/s x16"
    assert found["0000:c1:00.0"]["region1"] == "256M"
    assert found["0000:c1:00.0"]["link"] == "2.5GT/s x16"
    assert "acs" not in found["0000:c1:00.0"]
    assert found["0000:21:00.0"]["acs"] == "direct"


def capability(number: int, following: int, body: bytes = b"") -> bytes:
    return struct.pack("<I", number | 1 << 16 | following << 20) + body


def test_acs_from_configuration_space() -> None:
    aer = capability(0x0001, 0x148).ljust(0x48, b"\0")
    redirecting = capability(0x000D, 0, struct.pack("<HH", 0x5F, 0x1D))
    direct = capability(0x000D, 0, struct.pack("<HH", 0x5F, 0x01))
    head = bytes(256)
    assert acs_redirects(head + aer + redirecting) is True
    assert acs_redirects(head + aer + direct) is False
    assert acs_redirects(head + capability(0x0001, 0).ljust(64, b"\0")) is None
    assert acs_redirects(head[:64]) is None  # all that others than root may read
    assert acs_redirects(head + capability(0x0001, 0x100).ljust(64, b"\0")) is None  # a chain that never ends


def make_device(sys_root: Path, path: list[str], vendor: str, kind: str, **values: str) -> None:
    real = sys_root / "devices" / "pci0000:c0" / Path(*path)
    real.mkdir(parents=True, exist_ok=True)
    for name, value in {"vendor": vendor, "class": kind, **values}.items():
        (real / name).write_text(value + "\n")
    link = sys_root / "bus" / "pci" / "devices" / path[-1]
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(real)


def test_pci_tree_holds_gpus_and_the_ports_above_them(tmp_path: Path) -> None:
    root_port, switch, port = "0000:c0:01.1", "0000:c1:00.0", "0000:c2:04.0"
    make_device(tmp_path, [root_port], "0x1022", "0x060400", numa_node="1")
    make_device(tmp_path, [root_port, switch], "0x1000", "0x060400", numa_node="1")
    make_device(tmp_path, [root_port, switch, port], "0x1000", "0x060400", numa_node="1")
    gpu = [root_port, switch, port, "0000:c5:00.0"]
    speed = {"current_link_speed": "32.0 GT/s PCIe", "current_link_width": "16"}
    make_device(tmp_path, gpu, "0x10de", "0x030000", numa_node="1", **speed)
    make_device(tmp_path, [root_port, "0000:c9:00.0"], "0x15b3", "0x020700")
    found = {device.address: device for device in read_pci_tree(tmp_path)}
    assert set(found) == {root_port, switch, port, "0000:c5:00.0"}
    assert [found[address].parent for address in gpu] == ["", root_port, switch, port]
    assert (found["0000:c5:00.0"].kind, found[switch].kind) == ("gpu", "bridge")
    assert (found["0000:c5:00.0"].width, found["0000:c5:00.0"].numa_node) == (16, 1)
    assert read_pci_tree(tmp_path / "nowhere") == ()


@pytest.mark.parametrize(
    ("group_type", "command_line", "iommu"),
    [("identity", "quiet iommu=pt", "passthrough"), ("DMA-FQ", "quiet amd_iommu=on", "translating"), (None, "", "off")],
)
def test_host(tmp_path: Path, group_type: str | None, command_line: str, iommu: str) -> None:
    groups = tmp_path / "sys/kernel/iommu_groups"
    groups.mkdir(parents=True)
    device = tmp_path / "sys/bus/pci/devices/0000:c5:00.0"
    device.mkdir(parents=True)
    if group_type:
        (groups / "7").mkdir()
        (groups / "7" / "type").write_text(group_type)
        (device / "iommu_group").symlink_to(groups / "7")
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/cmdline").write_text(command_line)
    (tmp_path / "proc/driver/nvidia/params").write_text('EnableMSI: 1\nRegistryDwords: "ForceP2P=0x11"\n')
    parameters = tmp_path / "sys/module/nvidia_uvm/parameters"
    parameters.mkdir(parents=True)
    (parameters / "uvm_disable_hmm").write_text("N\n")
    host = read_host(tmp_path, gpu_addresses=("0000:c5:00.0",))
    assert (host.iommu, host.registry_dwords, host.has_hmm) == (iommu, "ForceP2P=0x11", True)
    assert host.kernel_flags == tuple(word for word in command_line.split() if "=" in word)
