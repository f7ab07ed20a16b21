"""Pick the kernels for this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from cpukernels.native import KernelBuildError, NativeKernels, build_library
from cpukernels.ports import Kernels
from cpukernels.reference import TorchKernels

__all__ = ["KernelChoice", "choose_kernels"]

KernelChoice = Literal["auto", "native", "torch"]


def choose_kernels(
    choice: KernelChoice, *, cache_dir: Path, warn: Callable[[str], None], is_compact: bool = True
) -> Kernels:
    """The kernels for ``choice``; "auto" takes the native ones and says so through ``warn`` where it can't.

    Raises:
        KernelBuildError: "native" was demanded and can't be built.
    """
    if choice == "torch":
        return TorchKernels()
    try:
        return NativeKernels(build_library(cache_dir), is_compact=is_compact)
    except (KernelBuildError, OSError) as error:
        if choice == "native":
            raise
        warn(f"native kernels are not available, using torch (slower, lossless up to ties): {error}")
        return TorchKernels()
