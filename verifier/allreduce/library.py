"""Compile csrc/ with nvcc on first use and call it through ctypes.

Plain C functions instead of a torch extension: no torch headers to parse, no tie to a torch version. The library is
kept in the cache directory under a hash of sources, flags, compiler and GPU architecture.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from verifier.allreduce.errors import KernelBuildFailed, SetupFailed

__all__ = ["Call", "Control", "ErrorWord", "KernelLibrary", "Layout", "RankBuffers", "build_library", "find_nvcc"]

_CSRC = Path(__file__).with_name("csrc")
_SOURCES = ("allreduce.cu", "cpu_rank.cpp")
_HEADERS = ("protocol.h", "numeric.h", "collective.h", "dispatch.h")
_FLAGS = ("-O3", "-std=c++17", "--split-compile", "0", "-shared", "-Xcompiler", "-fPIC")
MAX_WORLD = 8


class Layout(ctypes.Structure):
    """Mirror of ``Layout`` in protocol.h."""

    _fields_ = [("ll_bytes", ctypes.c_uint64), ("bulk_bytes", ctypes.c_uint64), ("world", ctypes.c_uint32)]


class RankBuffers(ctypes.Structure):
    """Mirror of ``RankBuffers`` in collective.h; addresses."""

    _fields_ = [
        ("input", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("residual_input", ctypes.c_void_p),
        ("residual_output", ctypes.c_void_p),
        ("control", ctypes.c_void_p),
    ]


class Call(ctypes.Structure):
    """Mirror of ``Call`` in collective.h."""

    _fields_ = [
        ("slabs", ctypes.c_void_p * MAX_WORLD),
        ("ranks", RankBuffers * MAX_WORLD),
        ("weight", ctypes.c_void_p),
        ("layout", Layout),
        ("num_bytes", ctypes.c_uint64),
        ("slice_packs", ctypes.c_uint32),
        ("num_slices", ctypes.c_uint32),
        ("first_rank", ctypes.c_uint32),
        ("num_ranks", ctypes.c_uint32),
        ("tree_opens", ctypes.c_uint32),
        ("pull", ctypes.c_uint32),
        ("ctas", ctypes.c_uint32),
        ("row_elements", ctypes.c_uint32),
        ("eps", ctypes.c_float),
        ("delay_ns", ctypes.c_uint32),
        ("delay_seed", ctypes.c_uint32),
    ]


class Control(ctypes.Structure):
    """Mirror of ``Control`` in protocol.h."""

    _fields_ = [
        ("epoch", ctypes.c_uint64),
        ("aborted", ctypes.c_uint32),
        ("arrived", ctypes.c_uint32),
        ("timeout_ns", ctypes.c_uint64),
        ("error", ctypes.c_void_p),
    ]


class ErrorWord(ctypes.Structure):
    """Mirror of ``Error`` in protocol.h; lies in mapped host memory."""

    _fields_ = [
        ("code", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
        ("peer", ctypes.c_uint32),
        ("phase", ctypes.c_uint32),
        ("epoch", ctypes.c_uint64),
        ("slice", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    ]


def find_nvcc() -> Path | None:
    """The CUDA compiler: on the PATH, or where toolkits are installed."""
    on_path = shutil.which("nvcc")
    if on_path is not None:
        return Path(on_path)
    return next((path for path in (Path("/usr/local/cuda/bin/nvcc"),) if path.is_file()), None)


def build_library(cache_dir: Path, *, compute_capability: tuple[int, int], defines: tuple[str, ...] = ()) -> Path:
    """Compile unless ``cache_dir`` holds the result already.

    Args:
        cache_dir: created if missing.
        compute_capability: of the GPU, such as (12, 0); 7.0 is the oldest with the memory model the protocol rests on.
        defines: preprocessor names for test builds, such as ``AR_NO_RELEASE``.

    Raises:
        KernelBuildFailed: no nvcc, an architecture too old, or compiler errors (the last lines are in the message).
    """
    if compute_capability < (7, 0):
        raise KernelBuildFailed(
            f"compute capability {compute_capability} is older than 7.0, which has no scoped fences"
        )
    nvcc = find_nvcc()
    if nvcc is None:
        raise KernelBuildFailed("no nvcc on the PATH or in /usr/local/cuda: install the CUDA toolkit, or use NCCL")
    arch = f"{compute_capability[0]}{compute_capability[1]}"
    flags = (*_FLAGS, f"-gencode=arch=compute_{arch},code=sm_{arch}", *(f"-D{name}" for name in defines))
    parts = [(_CSRC / name).read_text() for name in (*_SOURCES, *_HEADERS)]
    key = "\n".join((*parts, _run([str(nvcc), "--version"]), *flags))
    library = cache_dir / f"allreduce-sm{arch}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    if library.exists():
        return library
    cache_dir.mkdir(parents=True, exist_ok=True)
    # Compile beside, then rename: all ranks of a machine start at once.
    handle, name = tempfile.mkstemp(suffix=".so", dir=cache_dir)
    os.close(handle)
    built = Path(name)
    try:
        _run([str(nvcc), *flags, "-o", str(built), *(str(_CSRC / source) for source in _SOURCES)])
        built.replace(library)
    finally:
        built.unlink(missing_ok=True)
    return library


def _run(command: list[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - fixed commands
    if result.returncode != 0:
        tail = "\n".join((result.stderr + result.stdout).strip().splitlines()[-12:])
        raise KernelBuildFailed(f"{command[0]} failed with status {result.returncode}:\n{tail}")
    return result.stdout


class KernelLibrary:
    """The compiled functions. Every method raises SetupFailed with CUDA's own words when CUDA refuses."""

    def __init__(self, path: Path) -> None:
        lib = ctypes.CDLL(str(path))
        pointer, u32, u64 = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64
        lib.ar_error_string.restype = ctypes.c_char_p
        lib.ar_slab_bytes.restype = u64
        lib.ar_slab_bytes.argtypes = [u32, u64, u64]
        signatures = {
            "ar_launch": [ctypes.POINTER(Call), u32, u32, u32, u32, u32, pointer],
            "ar_run_on_cpu": [ctypes.POINTER(Call), u32, u32, u32, u32, u32, u32],
            "ar_launch_empty": [u32, u32, pointer],
            "ar_preload": [u32],
            "ar_device_alloc": [u64, ctypes.POINTER(pointer)],
            "ar_device_free": [pointer],
            "ar_copy": [pointer, pointer, u64],
            "ar_host_alloc": [u64, ctypes.POINTER(pointer)],
            "ar_host_free": [pointer],
            "ar_host_register": [pointer, u64, ctypes.POINTER(pointer)],
            "ar_host_unregister": [pointer],
            "ar_ipc_export": [pointer, ctypes.c_char_p],
            "ar_ipc_open": [ctypes.c_char_p, ctypes.POINTER(pointer)],
            "ar_ipc_close": [pointer],
            "ar_set_device": [ctypes.c_int],
        }
        if hasattr(lib, "ar_jam"):
            signatures["ar_jam"] = [pointer, u32, u32, u32, pointer]
        for name, arguments in signatures.items():
            getattr(lib, name).argtypes = arguments
            getattr(lib, name).restype = ctypes.c_int
        self._lib = lib
        sizes = {"call": Call, "control": Control, "error": ErrorWord}
        for name, mirror in sizes.items():
            compiled = getattr(lib, f"ar_{name}_bytes")()
            if compiled != ctypes.sizeof(mirror):
                raise SetupFailed(f"{path.name}: struct {name} has {compiled} bytes, expected {ctypes.sizeof(mirror)}")

    def _check(self, status: int, what: str) -> None:
        if status != 0:
            raise SetupFailed(f"{what}: {self._lib.ar_error_string(status).decode()}")

    def slab_bytes(self, world: int, ll_bytes: int, bulk_bytes: int) -> int:
        """Size of one rank's slab."""
        return int(self._lib.ar_slab_bytes(world, ll_bytes, bulk_bytes))

    def launch(
        self, call: Call, *, dtype: int, shape: int, bulk: bool, threads: int, stash_bytes: int, stream: int
    ) -> None:
        """Enqueue one call on ``stream``; may be captured."""
        status = self._lib.ar_launch(ctypes.byref(call), dtype, shape, bulk, threads, stash_bytes, stream)
        self._check(status, "launching the all-reduce")

    def run_on_cpu(self, call: Call, *, dtype: int, shape: int, bulk: bool, times: int = 1) -> None:
        """Play a whole rank (one CTA) in this thread, without the interpreter lock; all memory must be the host's."""
        status = self._lib.ar_run_on_cpu(ctypes.byref(call), 0, 0, dtype, shape, bulk, times)
        self._check(status, "running a rank on the CPU")

    def preload(self, world: int) -> None:
        """Load the code of every kernel for ``world`` onto the current GPU, so that no launch has to wait for it."""
        self._check(self._lib.ar_preload(world), "loading the kernels")

    def launch_empty(self, *, grid: int, threads: int, stream: int) -> None:
        """A kernel that does nothing: the floor of any kernel here."""
        self._check(self._lib.ar_launch_empty(grid, threads, stream), "launching an empty kernel")

    def jam(self, memory: int, *, words: int, rounds: int, grid: int, stream: int) -> None:
        """Crowd the way to ``memory`` with stores to ``words`` lines of it; AR_TORTURE builds only."""
        self._check(self._lib.ar_jam(memory, words, rounds, grid, stream), "jamming")

    def set_device(self, device: int) -> None:
        """Make ``device`` current for this thread."""
        self._check(self._lib.ar_set_device(device), f"selecting GPU {device}")

    def device_alloc(self, num_bytes: int) -> int:
        """Zeroed device memory, whole allocations so that IPC handles mean what they say."""
        found = ctypes.c_void_p()
        size = -(-num_bytes // (2 << 20)) * (2 << 20)
        self._check(self._lib.ar_device_alloc(size, ctypes.byref(found)), f"allocating {size} bytes of GPU memory")
        return found.value or 0

    def device_free(self, address: int) -> None:
        """Give device memory back."""
        self._check(self._lib.ar_device_free(address), "freeing GPU memory")

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Copy between any two memories; waits."""
        self._check(self._lib.ar_copy(target, source, num_bytes), "copying")

    def host_alloc(self, num_bytes: int) -> int:
        """Zeroed pinned host memory, at the same address on host and device."""
        found = ctypes.c_void_p()
        self._check(self._lib.ar_host_alloc(num_bytes, ctypes.byref(found)), f"pinning {num_bytes} bytes")
        return found.value or 0

    def host_free(self, address: int) -> None:
        """Give pinned memory back."""
        self._check(self._lib.ar_host_free(address), "freeing pinned memory")

    def host_register(self, address: int, num_bytes: int) -> int:
        """Pin memory that is mapped already (shared memory); returns its address on the device."""
        found = ctypes.c_void_p()
        self._check(
            self._lib.ar_host_register(address, num_bytes, ctypes.byref(found)), f"registering {num_bytes} bytes"
        )
        return found.value or 0

    def host_unregister(self, address: int) -> None:
        """Undo host_register."""
        self._check(self._lib.ar_host_unregister(address), "unregistering host memory")

    def ipc_export(self, address: int) -> bytes:
        """A handle by which another process maps this allocation."""
        handle = ctypes.create_string_buffer(64)
        self._check(self._lib.ar_ipc_export(address, handle), "exporting an IPC handle")
        return handle.raw

    def ipc_open(self, handle: bytes) -> int:
        """Map another process's allocation."""
        found = ctypes.c_void_p()
        self._check(self._lib.ar_ipc_open(handle, ctypes.byref(found)), "opening a peer's IPC handle")
        return found.value or 0

    def ipc_close(self, address: int) -> None:
        """Unmap it."""
        self._check(self._lib.ar_ipc_close(address), "closing a peer's IPC handle")
