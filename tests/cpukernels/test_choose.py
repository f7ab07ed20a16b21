"""Which kernels are taken, and that a machine without a compiler still works and says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpukernels.choose import choose_kernels
from cpukernels.native import KernelBuildError, NativeKernels
from cpukernels.reference import TorchKernels


def _never(message: str) -> None:
    raise AssertionError(f"warned: {message}")


@pytest.mark.parametrize("choice", ["auto", "native"])
def test_native_where_it_can_be_built(kernel_dir: Path, choice: str) -> None:
    assert isinstance(choose_kernels(choice, cache_dir=kernel_dir, warn=_never), NativeKernels)


def test_torch_needs_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "")
    assert isinstance(choose_kernels("torch", cache_dir=tmp_path, warn=_never), TorchKernels)


def test_auto_falls_back_and_warns_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "")
    warnings: list[str] = []
    assert isinstance(choose_kernels("auto", cache_dir=tmp_path, warn=warnings.append), TorchKernels)
    assert len(warnings) == 1
    assert "no C compiler" in warnings[0]


def test_native_that_was_demanded_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(KernelBuildError):
        choose_kernels("native", cache_dir=tmp_path, warn=_never)


def test_auto_falls_back_where_the_cache_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    warnings: list[str] = []
    kernels = choose_kernels("auto", cache_dir=tmp_path / "file" / "kernels", warn=warnings.append)
    assert isinstance(kernels, TorchKernels)
    assert warnings


def test_auto_falls_back_where_the_library_can_not_be_loaded(kernel_dir: Path, tmp_path: Path) -> None:
    from cpukernels.native import build_library

    broken = tmp_path / build_library(kernel_dir).name
    broken.write_bytes(b"not a library")
    warnings: list[str] = []
    assert isinstance(choose_kernels("auto", cache_dir=tmp_path, warn=warnings.append), TorchKernels)
    assert warnings
