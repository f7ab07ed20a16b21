"""Which all-reduce is possible where, on machines as they are recorded."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from verifier.allreduce.capabilities import STRATEGIES, Capability, capabilities
from verifier.allreduce.probe import bandwidth_from, probe_machine
from verifier.allreduce.probe_child import Ran, run_limited, run_module
from verifier.allreduce.probe_records import Machine
from verifier.allreduce.probe_report import capability_lines, machine_lines, remedies
from verifier.allreduce.tuner_candidates import candidates_for, cpu_candidates

RECORDINGS = Path(__file__).with_name("recordings")
VERSIONS = {"sglang": "0.5.23", "flashinfer-python": "0.7.4", "torch": "2.14.1"}


def machine(tmp_path: Path, *, topology: str, p2p: str, versions: dict[str, str] | None = None) -> Machine:
    """The 8 GPUs of the recording, connected as ``topology`` and ``p2p`` say."""
    files = {
        "--query-gpu": "smi-gpus-8-rtx-pro-6000.csv",
        "-q": "smi-q-8-rtx-pro-6000.txt",
        "-m": topology,
        "r": p2p,
        "w": p2p,
        "a": "p2p-8-ns.txt",
    }

    def run(command: tuple[str, ...]) -> Ran:
        key = "--query-gpu" if command[1].startswith("--query-gpu") else command[-1]
        return Ran(output=(RECORDINGS / files[key]).read_text(), problem="")

    return probe_machine(run=run, root=tmp_path, versions=VERSIONS if versions is None else versions)


def verdicts(found: tuple[Capability, ...]) -> dict[str, str]:
    return {each.strategy.name: each.possible for each in found}


def test_the_founding_machine(tmp_path: Path) -> None:
    here = machine(tmp_path, topology="topo-8-pcie-two-sockets.txt", p2p="p2p-8-ok.txt")
    assert here.islands == ((0, 1, 2, 3), (4, 5, 6, 7))
    found = capabilities(here)
    assert verdicts(found) == {
        "nccl": "yes",
        "nccl_p2p_level": "yes",
        "nccl_tuned": "yes",
        "sglang_custom_v1": "no",
        "sglang_custom_v2": "no",
        "sglang_pcie_ipc": "yes",
        "flashinfer_fusion": "yes",
        "torch_symm_mem": "no",
        "mscclpp": "yes",
        "expert_parallel": "yes",
        "ours": "yes",
    }
    symmetric = next(each for each in found if each.strategy.name == "torch_symm_mem")
    assert any("12.x is not in its table" in reason for reason in symmetric.reasons)
    assert any("atomics between GPU0 and GPU1 (NS)" in reason for reason in symmetric.reasons)
    tried = candidates_for(here, found, cache_dir=tmp_path)
    assert [candidate.name for candidate in tried][:2] == ["nccl", "nccl P2P SYS"]
    ours = next(candidate for candidate in tried if candidate.name == "ours")
    assert (ours.options["island_size"], ours.options["peer_access"]) == (4, 1)
    assert all(("NCCL_P2P_LEVEL", "SYS") in candidate.env for candidate in tried if candidate.name == "nccl LL")


def test_without_peer_access_only_host_paths_remain(tmp_path: Path) -> None:
    here = machine(tmp_path, topology="topo-8-pcie-two-sockets.txt", p2p="p2p-8-ns.txt")
    found = verdicts(capabilities(here))
    assert [name for name, possible in found.items() if possible == "yes"] == [
        "nccl",
        "nccl_tuned",
        "expert_parallel",
        "ours",
    ]
    tried = candidates_for(here, capabilities(here), cache_dir=tmp_path)
    assert next(each for each in tried if each.name == "ours").options["peer_access"] == 0
    assert not any(("NCCL_P2P_LEVEL", "SYS") in candidate.env for candidate in tried)


def test_nvlink_opens_what_is_gated_on_it(tmp_path: Path) -> None:
    found = verdicts(capabilities(machine(tmp_path, topology="topo-8-nvswitch.txt", p2p="p2p-8-ok.txt")))
    assert (found["sglang_custom_v1"], found["sglang_custom_v2"]) == ("yes", "yes")


@pytest.mark.parametrize(
    ("versions", "ipc", "fusion"),
    [
        ({"sglang": "0.5.22", "flashinfer-python": "0.7.4"}, "no", "yes"),
        ({"sglang": "0.5.23", "flashinfer-python": "0.7.1"}, "no", "no"),
        ({}, "unknown", "unknown"),
    ],
)
def test_versions(tmp_path: Path, versions: dict[str, str], ipc: str, fusion: str) -> None:
    here = machine(tmp_path, topology="topo-8-pcie-two-sockets.txt", p2p="p2p-8-ok.txt", versions=versions)
    found = verdicts(capabilities(here))
    assert (found["sglang_pcie_ipc"], found["flashinfer_fusion"]) == (ipc, fusion)


def test_wrong_data_rules_peer_access_out(tmp_path: Path) -> None:
    here = machine(tmp_path, topology="topo-8-pcie-two-sockets.txt", p2p="p2p-8-ok.txt")
    lying = dataclasses.replace(here, bandwidth=bandwidth_from({"wrong": [[0, 3]]}))
    found = {each.strategy.name: each for each in capabilities(lying)}
    assert found["sglang_pcie_ipc"].possible == "no"
    assert "GPU3 does not hold what GPU0 wrote" in found["sglang_pcie_ipc"].reasons[0]


def test_staging_and_collapse_are_told_and_have_remedies(tmp_path: Path) -> None:
    here = machine(tmp_path, topology="topo-8-pcie-two-sockets.txt", p2p="p2p-8-ok.txt")
    staged = bandwidth_from({"load": [[0, 1, 1.4]], "store": [[0, 1, 1.4]], "copy": [[0, 1, 51.0]]})
    assert staged.is_staged
    healthy = bandwidth_from(
        {
            "load": [[0, 1, 42.9]],
            "store": [[0, 1, 44.7]],
            "copy": [[0, 1, 53.0]],
            "collapse_store": 25.4,
            "collapse_load": 20.6,
        }
    )
    assert (healthy.is_staged, healthy.stores_collapse, healthy.loads_collapse) == (False, False, False)
    switch = bandwidth_from({"load": [[0, 1, 51.0]], "store": [[0, 1, 36.8]], "collapse_store": 2.7})
    assert switch.stores_collapse
    assert any("ForceP2P" in remedy for remedy in remedies(dataclasses.replace(here, bandwidth=staged)))
    text = "\n".join(machine_lines(dataclasses.replace(here, bandwidth=switch)))
    assert "collapse of stores: yes" in text
    assert "36.8" in text


def test_a_machine_without_gpus_prints_and_rules_all_out(tmp_path: Path) -> None:
    def missing(command: tuple[str, ...]) -> Ran:
        return Ran(output="", problem="not installed")

    here = probe_machine(run=missing, root=tmp_path, with_bandwidth=True)
    found = capabilities(here)
    assert {each.possible for each in found} == {"no"}
    text = "\n".join(machine_lines(here) + capability_lines(found))
    assert "gpus       none" in text
    assert "not installed" in text
    assert "no NVIDIA GPU here" in text
    assert [candidate.name for candidate in cpu_candidates()] == ["gloo", "gather"]
    assert candidates_for(here, found, cache_dir=tmp_path) == ()


def test_every_strategy_says_since_when_and_where_it_is_known_from() -> None:
    names = [strategy.name for strategy, _ in STRATEGIES]
    assert len(names) == len(set(names))
    assert all(strategy.since and strategy.source and strategy.note for strategy, _ in STRATEGIES)


@pytest.mark.slow
def test_a_child_that_hangs_is_killed_with_its_children() -> None:
    ran = run_limited(["/bin/sh", "-c", "echo begun; sleep 1000 & sleep 1000"], timeout_s=0.5)
    assert ran.problem == "no end within 0.5 s, killed: begun"
    assert run_limited(["/nowhere/tool"], timeout_s=1.0).problem.startswith("/nowhere/tool can't be run")
    assert run_limited(["/bin/sh", "-c", "echo '{\"a\": 1}'; exit 3"], timeout_s=5.0).problem.startswith(
        "exit status 3"
    )


@pytest.mark.slow
def test_the_bandwidth_worker_says_why_it_can_not_measure_here() -> None:
    ran = run_module("verifier.allreduce.probe_worker", ["no_such_probe"], timeout_s=60.0)
    assert "KeyError" in ran.problem
    assert ran.last_json() is None
