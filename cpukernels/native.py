"""Compile rowwise.c with the machine's C compiler and call it through ctypes.

Built once per source, compiler and processor into the cache directory; later starts load the file.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from cpukernels.ports import AttentionShape, PackedWeight, RaggedRows, WeightForm

__all__ = ["KernelBuildError", "NativeKernels", "build_library"]

_SOURCE = Path(__file__).with_name("rowwise.c")
_COMPILERS = ("cc", "gcc", "clang")
# No -ffast-math: the order of additions is part of the contract. Contraction to FMA is the same in every tile.
_FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-shared", "-fPIC", "-std=gnu11")
_GROUP = 32  # GROUP in rowwise.c
_LINEAR: dict[WeightForm, str] = {
    "full": "bk_linear",
    "half": "bk_linear_half",
    "grouped": "bk_linear_grouped",
}


class KernelBuildError(RuntimeError):
    """No C compiler, or it failed; the message holds its last lines."""


def build_library(cache_dir: Path) -> Path:
    """Compile rowwise.c unless ``cache_dir`` holds it already.

    Returns:
        Path of the shared library.

    Raises:
        KernelBuildError: no compiler found, or compilation failed.
    """
    compiler = next((found for name in _COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise KernelBuildError(f"no C compiler found (looked for {', '.join(_COMPILERS)})")
    version = _run([compiler, "--version"]).splitlines()[0]
    target = _run([compiler, "-march=native", "-Q", "--help=target"]) if "clang" not in version else ""
    flags = (*_FLAGS, "-mprefer-vector-width=512") if platform.machine() == "x86_64" else _FLAGS
    key = "\n".join((_SOURCE.read_text(), version, target, platform.processor(), *flags))
    library = cache_dir / f"rowwise-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    if library.exists():
        return library
    cache_dir.mkdir(parents=True, exist_ok=True)
    # Compile beside, then rename: two processes may start at once, and a killed one must leave no half file.
    handle, name = tempfile.mkstemp(suffix=".so", dir=cache_dir)
    os.close(handle)
    built = Path(name)
    try:
        _run([compiler, *flags, "-o", str(built), str(_SOURCE), "-lm"])
        built.replace(library)
    finally:
        built.unlink(missing_ok=True)
    return library


def _run(command: list[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - fixed commands
    if result.returncode != 0:
        tail = "\n".join(result.stderr.strip().splitlines()[-8:])
        raise KernelBuildError(f"{' '.join(command[:1])} failed with status {result.returncode}: {tail}")
    return result.stdout


class NativeKernels:
    """The C kernels. Row-invariant; one thread.

    Args:
        is_compact: keep weights in fewer bytes where that loses nothing (the forms in rowwise.c). A pass reads less and
            returns the same bits.
    """

    name = "native"
    is_row_invariant = True

    def __init__(self, library: Path, *, is_compact: bool = True) -> None:
        lib = ctypes.CDLL(str(library))
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        lib.bk_panel_columns.restype = ctypes.c_int
        signatures = {
            "bk_pack": [pointer, pointer, size, size],
            **{name: [pointer] * 3 + [size] * 3 + [ctypes.c_int] for name in _LINEAR.values()},
            "bk_rms_norm": [pointer, size, pointer, pointer, size, size, size, ctypes.c_float],
            "bk_silu_mul": [pointer, pointer, size, size],
            "bk_rope_append": [pointer] * 8 + [size] * 4,
            "bk_attention": [pointer] * 7 + [size] * 4 + [ctypes.c_float],
        }
        for name, argtypes in signatures.items():
            function = getattr(lib, name)
            function.argtypes = argtypes
            function.restype = None
        for name in ("bk_pack_half", "bk_pack_grouped"):
            packer = getattr(lib, name)
            packer.argtypes = [pointer, pointer, size, size]
            packer.restype = ctypes.c_int
        lib.bk_grouped_bytes.restype = ctypes.c_size_t
        lib.bk_grouped_bytes.argtypes = [size, size]
        self._lib = lib
        self._is_compact = is_compact
        self._linears = {form: getattr(lib, name) for form, name in _LINEAR.items()}
        self._has_fast_codes = bool(lib.bk_has_fast_codes())
        self._panel = int(lib.bk_panel_columns())
        self._scores = torch.empty(0)

    def pack(self, weight: torch.Tensor) -> PackedWeight:  # [N, K]
        """Panels of bk_panel_columns() output columns, zero padded; compact: in the smallest form that is exact."""
        weight = weight.detach().to(torch.float32).contiguous()
        num_rows, num_columns = weight.shape
        padded = -(-num_rows // self._panel) * self._panel * num_columns
        if self._is_compact and self._has_fast_codes and num_columns % _GROUP == 0:
            grouped = torch.empty(self._lib.bk_grouped_bytes(num_rows, num_columns), dtype=torch.uint8)
            if self._lib.bk_pack_grouped(weight.data_ptr(), grouped.data_ptr(), num_rows, num_columns):
                return PackedWeight(data=grouped, num_rows=num_rows, num_columns=num_columns, form="grouped")
        if self._is_compact:
            half = torch.empty(padded, dtype=torch.bfloat16)
            if self._lib.bk_pack_half(weight.data_ptr(), half.data_ptr(), num_rows, num_columns):
                return PackedWeight(data=half, num_rows=num_rows, num_columns=num_columns, form="half")
        full = torch.empty(padded)
        self._lib.bk_pack(weight.data_ptr(), full.data_ptr(), num_rows, num_columns)
        return PackedWeight(data=full, num_rows=num_rows, num_columns=num_columns)

    def linear(self, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:  # [M, K] -> [M, N]
        """See Kernels.linear."""
        out = torch.empty(x.shape[0], weight.num_rows)
        self._linear(x, weight, out, 0)
        return out

    def linear_add(self, x: torch.Tensor, weight: PackedWeight, residual: torch.Tensor) -> None:  # [M, K], [M, N]
        """See Kernels.linear_add."""
        self._linear(x, weight, residual, 1)

    def _linear(self, x: torch.Tensor, weight: PackedWeight, out: torch.Tensor, accumulate: int) -> None:
        assert x.is_contiguous()
        assert out.is_contiguous()
        assert x.shape[1] == weight.num_columns
        self._linears[weight.form](
            x.data_ptr(),
            weight.data.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            weight.num_rows,
            weight.num_columns,
            accumulate,
        )

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:  # [M, H] -> [M, H]
        """See Kernels.rms_norm; rows of x may be strided, H must be a multiple of 16."""
        assert x.stride(1) == 1
        out = torch.empty(x.shape)
        rows, width = x.shape
        self._lib.bk_rms_norm(x.data_ptr(), x.stride(0), weight.data_ptr(), out.data_ptr(), width, rows, width, eps)
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:  # [M, 2I] -> [M, I]
        """See Kernels.silu_mul."""
        rows, width = gate_up.shape
        out = torch.empty(rows, width // 2)
        self._lib.bk_silu_mul(gate_up.data_ptr(), out.data_ptr(), rows, width // 2)
        return out

    def rope_append(
        self,
        qkv: torch.Tensor,
        rows: RaggedRows,
        layer: int,
        shape: AttentionShape,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> None:
        """See Kernels.rope_append."""
        self._lib.bk_rope_append(
            qkv.data_ptr(),
            rows.positions.ctypes.data,
            cos.data_ptr(),
            sin.data_ptr(),
            rows.key_ptrs[layer].ctypes.data,
            rows.value_ptrs[layer].ctypes.data,
            rows.positions.ctypes.data,
            rows.capacities.ctypes.data,
            rows.num_rows,
            shape.num_q_heads,
            shape.num_kv_heads,
            shape.head_dim,
        )

    def attention(self, qkv: torch.Tensor, rows: RaggedRows, layer: int, shape: AttentionShape) -> torch.Tensor:
        """See Kernels.attention; D must be a multiple of 16, at most 256."""
        group = shape.num_q_heads // shape.num_kv_heads
        scratch = group * (int(rows.lengths.max()) + 16)
        if self._scores.numel() < scratch:
            self._scores = torch.empty(2 * scratch)
        out = torch.empty(rows.num_rows, shape.num_q_heads * shape.head_dim)
        self._lib.bk_attention(
            qkv.data_ptr(),
            rows.key_ptrs[layer].ctypes.data,
            rows.value_ptrs[layer].ctypes.data,
            rows.lengths.ctypes.data,
            rows.capacities.ctypes.data,
            out.data_ptr(),
            self._scores.data_ptr(),
            rows.num_rows,
            shape.num_q_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.head_dim**-0.5,
        )
        return out
