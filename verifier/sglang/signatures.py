"""What a dead or stuck SGLang wrote last, and what that means. A table: pattern, cause, remedy, where it is known from.

The first match counts, so special cases stand above general ones.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["SIGNATURES", "Diagnosis", "diagnose"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Why it died. ``evidence``: the line that says so. ``source``: where this failure is described."""

    name: str
    cause: str
    remedy: str
    source: str
    evidence: str


@dataclass(frozen=True, slots=True)
class _Signature:
    name: str
    pattern: str
    cause: str
    remedy: str
    source: str


SIGNATURES: Final[tuple[_Signature, ...]] = (
    _Signature(
        "jit_architecture",
        r"No supported CUDA architectures found for major versions",
        "a JIT-compiled kernel (FlashInfer all-reduce fusion) does not list this GPU's architecture",
        "remove --enable-flashinfer-allreduce-fusion, use SGLANG_ENABLE_PCIE_IPC_ALLREDUCE=1; or FlashInfer >= 0.7.2",
        "sglang#15650; FlashInfer 0.7.2 lists majors 9, 10, 12",
    ),
    _Signature(
        "no_kernel_image",
        r"no kernel image is available for execution on the device",
        "a binary wheel was not built for this GPU's architecture",
        "install the sglang-kernel and torch wheels of this SGLang release for this CUDA version",
        "PyTorch CUDA error 209",
    ),
    _Signature(
        "symm_mem_unsupported",
        r"(SymmMemCommunicator|symmetric memory).*(not supported|unsupported|failed)",
        "torch symmetric memory needs compute capability 9 or 10 and multicast",
        "remove --enable-torch-symm-mem; on PCIe use SGLANG_ENABLE_PCIE_IPC_ALLREDUCE=1",
        "sglang#30364",
    ),
    _Signature(
        "cuda_oom",
        r"(torch\.(cuda\.)?OutOfMemoryError|CUDA out of memory|CUDA error: out of memory)",
        "the GPU's memory is full",
        "lower --mem-fraction-static, --cuda-graph-max-bs-decode, --max-running-requests or --chunked-prefill-size",
        "SGLang server arguments",
    ),
    _Signature(
        "kv_pool_too_small",
        r"Not enough memory\. Please try to (increase --mem-fraction-static|.*)",
        "after the weights no memory is left for the KV cache",
        "raise --mem-fraction-static, use more GPUs (--tp-size) or a smaller --context-length",
        "sglang srt/model_executor/pool_configurator.py",
    ),
    _Signature(
        "host_oom",
        r"(exit code:? -9|SIGKILL|Killed|Exit code -9|MemoryError)",
        "the machine ran out of memory and the kernel killed a process",
        "fewer loader threads (--model-loader-extra-config), more swap, or a smaller model",
        "Linux OOM killer",
    ),
    _Signature(
        "nccl_hang",
        r"(Watchdog caught collective operation timeout|Watchdog timeout|NCCL.*[Tt]imed? ?out)",
        "a collective never finished: P2P over PCIe is broken by IOMMU or ACS, or ranks disagree",
        "switch IOMMU and ACS off in firmware and kernel (amd_iommu=off); to prove it, NCCL_P2P_DISABLE=1",
        "NCCL #1999, #2079; rtx6kpro #15",
    ),
    _Signature(
        "nccl_error",
        r"(ncclSystemError|ncclUnhandledCudaError|ncclInternalError|NCCL error|unhandled system error)",
        "NCCL could not set up its connections",
        "run with NCCL_DEBUG=INFO; check /dev/shm size (docker --shm-size), driver and NCCL_P2P_LEVEL",
        "NCCL troubleshooting",
    ),
    _Signature(
        "custom_allreduce_p2p",
        r"(custom[_ ]all[_ ]?reduce|ca_comm|IPC handle).*(error|fail|invalid)",
        "SGLang's custom all-reduce needs peer access that this PCIe layout does not give",
        "add --disable-custom-all-reduce; use SGLANG_ENABLE_PCIE_IPC_ALLREDUCE=1",
        "vLLM #47751; sglang#34528",
    ),
    _Signature(
        "port_taken",
        r"(address already in use|\[Errno 98\]|port .* is (already )?(in use|occupied|not available))",
        "another process listens on the port",
        "end it, or set another port in sglang.url",
        "errno 98",
    ),
    _Signature(
        "expert_parallel_assertion",
        r"(AssertionError.*(ep_size|moe_ep|num_experts)|(ep_size|expert parallel).*(assert|must|divisible))",
        "expert parallelism does not fit this model, quantization or back-end",
        "remove --ep-size; plain tensor parallelism works everywhere",
        "reference: expert parallelism was a dead end on PCIe",
    ),
    _Signature(
        "wrong_head",
        r"(LlamaForCausalLMEagle3|eagle3?|draft).*(size mismatch|not found in|KeyError|shape)",
        "the draft head belongs to another target or another format",
        "the engine needs no head: remove --speculative-draft-model-path; check drafter.head_dir (breakeven doctor)",
        "sglang#19689",
    ),
    _Signature(
        "aux_flag_unknown",
        r"unrecognized arguments:.*--enable-return-aux-hidden-states",
        "this SGLang has no flag that captures aux hidden states",
        'from 0.5.17 on: sglang.aux_capture = "plugin", with breakeven installed beside SGLang; or use SGLang 0.5.23',
        "in no source of SGLang 0.5.17 to 0.5.22, in that of 0.5.23",
    ),
    _Signature(
        "unknown_flag",
        r"(unrecognized arguments|invalid choice):",
        "this SGLang version does not know an argument of the profile",
        "correct sglang.args for the installed version",
        "argparse",
    ),
    _Signature(
        "config_conflict",
        r"--enable-return-aux-hidden-states (needs|captures|only supports|requires).*",
        "aux hidden state capture excludes a draft model and pipeline parallelism",
        "remove --speculative-draft-model-path and --pp-size",
        "sglang srt/arg_groups/validation_hook.py",
    ),
    _Signature(
        "shared_library",
        r"(lib(cuda|cudart|numa|torch_cuda)\.so[.0-9]*: cannot open shared object|ImportError: lib\w+\.so)",
        "a library of the driver or of CUDA is not on the loader's path",
        "install the driver; on a machine without GPU put a stub libcuda.so.1 on LD_LIBRARY_PATH",
        "docs/sglang.md",
    ),
    _Signature(
        "module_missing",
        r"(No module named '?sglang|ModuleNotFoundError: No module named)",
        "the interpreter lacks SGLang or one of its packages",
        "set sglang.python to the interpreter of the environment SGLang is installed in",
        "Python",
    ),
    _Signature(
        "no_accelerator",
        r"(No CUDA GPUs are available|Failed to infer device type|No accelerator)",
        "no GPU is visible",
        "check nvidia-smi and CUDA_VISIBLE_DEVICES; without GPU use the cpu-smollm2 profile",
        "sglang srt/server_args.py",
    ),
    _Signature(
        "weights_missing",
        r"(Can't load the configuration of|is not a local folder and is not a valid model identifier"
        r"|Cannot find any model weights|No such file or directory: .*(safetensors|config\.json))",
        "the model's files are not where sglang.model_path says",
        "set sglang.model_path to a complete local directory",
        "transformers",
    ),
    _Signature(
        "token_out_of_range",
        r"(index out of range in self|Assertion .*srcIndex < srcSelectDimSize)",
        "somebody sent a token id beyond the vocabulary; SGLang 0.5.23 does not check input_ids and dies of it",
        "let only the gateway reach the engine's port: it checks every id",
        "docs/sglang.md",
    ),
    _Signature(
        "illegal_access",
        r"(illegal memory access|device-side assert triggered|unspecified launch failure)",
        "a kernel read outside its data; the prefill CUDA graph of 0.5.23 can do that across buckets",
        "add --disable-prefill-cuda-graph; find the kernel with CUDA_LAUNCH_BLOCKING=1",
        "sglang#37606, fix #37448",
    ),
)


def diagnose(lines: Sequence[str]) -> Diagnosis | None:
    """The first signature of the table that a line of the log's end matches, or None."""
    for signature in SIGNATURES:
        pattern = re.compile(signature.pattern, re.IGNORECASE)
        for line in lines:
            if pattern.search(line):
                return Diagnosis(
                    name=signature.name,
                    cause=signature.cause,
                    remedy=signature.remedy,
                    source=signature.source,
                    evidence=line.strip()[:400],
                )
    return None
