"""Which all-reduce can run on a machine, and why not. Pure: a Machine in, one verdict per strategy out.

Every rule carries its source, so that a "no" can be checked and, with a newer version, be taken back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from verifier.allreduce.probe_records import Machine

__all__ = ["STRATEGIES", "Capability", "Strategy", "capabilities"]

Possible = Literal["yes", "no", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One way to reduce.

    Fields:
        enable: the launch setting that selects it. since: first version that has it. source: where that is known from.
        note: what is known of it on PCIe, whether or not it can run here.
    """

    name: str
    title: str
    enable: str
    since: str
    source: str
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """The verdict on one strategy here. reasons: what stands against it, or what is not known; empty if nothing."""

    strategy: Strategy
    possible: Possible
    reasons: tuple[str, ...]


# A rule: what stands against the strategy on this machine ("no"), what would have to be known ("unknown"), or None.
Rule = Callable[[Machine], tuple[Possible, str] | None]


def capabilities(machine: Machine) -> tuple[Capability, ...]:
    """Judge every strategy, in the table's order."""
    return tuple(_judge(strategy, rules, machine) for strategy, rules in STRATEGIES)


def _judge(strategy: Strategy, rules: tuple[Rule, ...], machine: Machine) -> Capability:
    found = [answer for rule in rules if (answer := rule(machine)) is not None]
    possible: Possible = "yes"
    if any(verdict == "no" for verdict, _ in found):
        possible = "no"
        found = [(verdict, reason) for verdict, reason in found if verdict == "no"]
    elif found:
        possible = "unknown"
    return Capability(strategy=strategy, possible=possible, reasons=tuple(reason for _, reason in found))


# ---------------------------------------------------------------- rules


def _several_gpus(machine: Machine) -> tuple[Possible, str] | None:
    if len(machine.gpus) > 1:
        return None
    return "no", "one GPU here, nothing to reduce between" if machine.gpus else "no NVIDIA GPU here"


def _world(*sizes: int) -> Rule:
    def rule(machine: Machine) -> tuple[Possible, str] | None:
        count = len(machine.gpus)
        if count < 2 or count in sizes:
            return None
        return "no", f"{count} GPUs; it is built for {', '.join(map(str, sizes))}"

    return rule


def _majors(allowed: tuple[int, ...], source: str) -> Rule:
    def rule(machine: Machine) -> tuple[Possible, str] | None:
        other = sorted(machine.majors - set(allowed))
        if not other:
            return None
        return "no", f"compute capability {other[0]}.x is not in its table {allowed} ({source})"

    return rule


def _peer(access: str) -> Rule:
    def rule(machine: Machine) -> tuple[Possible, str] | None:
        if len(machine.gpus) < 2:
            return None
        ok = machine.p2p_ok(access)
        if ok is None:
            return "unknown", f"peer {access} unknown: nvidia-smi topo -p2p gave nothing"
        if ok:
            return None
        (i, j), state = next((pair, s) for pair, s in sorted(machine.p2p[access].items()) if s != "OK")
        return "no", f"no peer {access} between GPU{i} and GPU{j} ({state})"

    return rule


def _peer_data(machine: Machine) -> tuple[Possible, str] | None:
    if machine.bandwidth is None or not machine.bandwidth.wrong:
        return None
    i, j = machine.bandwidth.wrong[0]
    return "no", f"GPU{j} does not hold what GPU{i} wrote: this driver's peer access returns wrong data"


def _full_nvlink(machine: Machine) -> tuple[Possible, str] | None:
    if len(machine.gpus) < 3 or machine.has_full_nvlink:
        return None
    return "no", "not every pair is joined by NVLink, and it is gated on that"


def _nvlink(machine: Machine) -> tuple[Possible, str] | None:
    if len(machine.gpus) < 2 or machine.has_full_nvlink:
        return None
    return "no", "it needs NVLink between every pair (multicast or direct symmetric access)"


def _version(package: str, least: tuple[int, ...]) -> Rule:
    def rule(machine: Machine) -> tuple[Possible, str] | None:
        text = machine.versions.get(package)
        wanted = ".".join(map(str, least))
        if text is None:
            return "unknown", f"{package} not found in the engine's environment; it needs {wanted}"
        have = tuple(int(part) for part in text.split("+")[0].split(".") if part.isdigit())
        return None if have >= least else ("no", f"{package} {text} here, it came with {wanted}")

    return rule


# ---------------------------------------------------------------- the table

_SYMM = _majors((9, 10), "sglang srt/distributed/device_communicators/all_reduce_utils.py 0.5.23, sglang#30364")

STRATEGIES: Final[tuple[tuple[Strategy, tuple[Rule, ...]], ...]] = (
    (
        Strategy(
            name="nccl",
            title="NCCL as it comes",
            enable="--disable-custom-all-reduce",
            since="in every version",
            source="NCCL 2.30.7 paths.cc",
            note="default P2P level is PXB: GPUs on separate root ports go through host memory, 200 us a call",
        ),
        (_several_gpus,),
    ),
    (
        Strategy(
            name="nccl_p2p_level",
            title="NCCL with peer access across root complexes",
            enable="NCCL_P2P_LEVEL=SYS",
            since="in NCCL 2.30.7, older not looked at",
            source="NCCL paths.cc; rtx6kpro",
            note="17-27 us at 14-16 KiB on healthy 8-GPU hosts; worth most of the gain, so it comes first",
        ),
        (_several_gpus, _peer("read"), _peer("write"), _peer_data),
    ),
    (
        Strategy(
            name="nccl_tuned",
            title="NCCL with channels, buffer, threads, protocol set",
            enable="NCCL_MAX_NCHANNELS, NCCL_BUFFSIZE, NCCL_NTHREADS, NCCL_PROTO, NCCL_ALGO",
            since="in NCCL 2.30.7, older not looked at",
            source="NCCL #2113, #2127, #1530",
            note="no public evidence that few channels help; NCCL reads these once, so each set needs its own start",
        ),
        (_several_gpus,),
    ),
    (
        Strategy(
            name="sglang_custom_v1",
            title="SGLang custom all-reduce v1 (pull)",
            enable="SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2=0",
            since="in SGLang 0.5.23, older not looked at",
            source="sglang custom_all_reduce.py 0.5.23; vllm#47979",
            note="forced on PCIe it gave 38 tok/s in the founding case: loads staged through system memory",
        ),
        (_several_gpus, _world(2, 4, 6, 8), _full_nvlink, _peer("read"), _peer_data),
    ),
    (
        Strategy(
            name="sglang_custom_v2",
            title="SGLang custom all-reduce v2 (push, pull)",
            enable="default where NVLink is",
            since="in SGLang 0.5.23, older not looked at",
            source="sglang#19880, #31049, #35735",
            note="its pull variant needs native atomics on peers and hangs without; tuned for SM90, 100, 107 only",
        ),
        (_several_gpus, _world(2, 4, 6, 8), _full_nvlink, _peer("read"), _peer("write"), _peer_data),
    ),
    (
        Strategy(
            name="sglang_pcie_ipc",
            title="SGLang pcie_ipc (FlashInfer)",
            enable="SGLANG_ENABLE_PCIE_IPC_ALLREDUCE=1",
            since="SGLang 0.5.23, FlashInfer 0.7.2",
            source="sglang#34528, flashinfer#4393",
            note="5.3 us at 12 KiB against NCCL's 205 on an 8-GPU SM120 host; takes ranks 0-3 and 4-7 for the islands",
        ),
        (
            _several_gpus,
            _world(2, 4, 8),
            _peer("read"),
            _peer("write"),
            _peer_data,
            _version("sglang", (0, 5, 23)),
            _version("flashinfer-python", (0, 7, 2)),
        ),
    ),
    (
        Strategy(
            name="flashinfer_fusion",
            title="FlashInfer TRT-LLM all-reduce fusion",
            enable="--flashinfer-allreduce-fusion-backend trtllm",
            since="FlashInfer 0.7.2 at the latest for SM120, 0.5.3 for SM90 and SM100",
            source="flashinfer/jit/comm.py of 0.7.2 and 0.7.4; sglang#15650",
            note="SGLang never turns it on by itself on SM120; pushes unstaged, so measure before trusting",
        ),
        (_several_gpus, _world(2, 4, 8), _peer("write"), _peer_data, lambda machine: _fusion_version(machine)),
    ),
    (
        Strategy(
            name="torch_symm_mem",
            title="torch symmetric memory",
            enable="--enable-torch-symm-mem",
            since="in SGLang 0.5.23, older not looked at",
            source="sglang#30364; vllm#47979; pytorch#189228",
            note="its barrier is a compare-and-swap on a peer: without native PCIe atomics it wedges, so don't pursue",
        ),
        (_several_gpus, _SYMM, _nvlink, _peer("atomics")),
    ),
    (
        Strategy(
            name="mscclpp",
            title="MSCCL++",
            enable="--enable-mscclpp",
            since="in SGLang 0.5.23, older not looked at",
            source="sglang pymscclpp.py; mscclpp 1f5f065",
            note="packet kernels, legal on PCIe; no published number on PCIe SM120",
        ),
        (_several_gpus, _world(4, 8, 16), _peer("write"), _peer_data),
    ),
    (
        Strategy(
            name="expert_parallel",
            title="expert parallelism",
            enable="--ep-size N",
            since="in SGLang 0.5.23, older not looked at",
            source="rtx6kpro; sglang pcie_ipc_ar.py",
            note="reduces or exchanges all the same; pcie_ipc serves no group of its kind",
        ),
        (_several_gpus,),
    ),
    (
        Strategy(
            name="ours",
            title="breakeven's own kernels",
            enable="not wired into SGLang yet",
            since="unreleased",
            source="verifier/allreduce",
            note="for what pcie_ipc lacks: other topologies, time limits, a deterministic mode, no peer access",
        ),
        (_several_gpus, _world(2, 4, 8)),
    ),
)


def _fusion_version(machine: Machine) -> tuple[Possible, str] | None:
    # Majors 9, 10, 12 in the wheels of 0.7.2 and 0.7.4, 9 and 10 in that of 0.5.3; what is between was not read.
    least = (0, 7, 2) if 12 in machine.majors else (0, 5, 3)
    return _version("flashinfer-python", least)(machine)
