"""Building says what is missing; a build is kept; what nvcc makes is what the ctypes mirrors expect."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

import pytest
import torch

from tests.verifier.allreduce.memory import aligned_zeros
from verifier.allreduce import library as library_module
from verifier.allreduce.errors import KernelBuildFailed, SetupFailed
from verifier.allreduce.library import Call, Control, ErrorWord, KernelLibrary, RankBuffers, build_library, find_nvcc
from verifier.allreduce.tactics import DTYPES, Tactic, Topology, plan_geometry


def fake_nvcc(monkeypatch: pytest.MonkeyPatch, directory: Path, body: str) -> None:
    script = directory / "nvcc"
    script.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo fake && exit 0\n{body}\n')
    script.chmod(0o755)
    monkeypatch.setattr(library_module, "find_nvcc", lambda: script)


def test_without_nvcc_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library_module, "find_nvcc", lambda: None)
    with pytest.raises(KernelBuildFailed, match="no nvcc"):
        build_library(tmp_path, compute_capability=(12, 0))


def test_an_old_gpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KernelBuildFailed, match=r"older than 7\.0"):
        build_library(tmp_path, compute_capability=(6, 1))


def test_the_compilers_last_words_are_in_the_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_nvcc(monkeypatch, tmp_path, "echo 'Unsupported gpu architecture' >&2; exit 3")
    with pytest.raises(KernelBuildFailed, match=r"(?s)status 3.*Unsupported gpu architecture"):
        build_library(tmp_path / "cache", compute_capability=(12, 0))
    assert list((tmp_path / "cache").iterdir()) == []  # no half-made file is left


def test_a_build_is_kept_per_architecture_and_flags(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_nvcc(monkeypatch, tmp_path, f'echo "$@" >> {tmp_path}/calls')
    first = build_library(tmp_path / "cache", compute_capability=(12, 0))
    assert build_library(tmp_path / "cache", compute_capability=(12, 0)) == first
    other = build_library(tmp_path / "cache", compute_capability=(9, 0))
    test_build = build_library(tmp_path / "cache", compute_capability=(9, 0), defines=("AR_TORTURE",))
    assert len({first, other, test_build}) == 3
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 3
    assert "arch=compute_120,code=sm_120" in calls[0]
    assert "-DAR_TORTURE" in calls[2]


# ---------------------------------------------------------------- with the real compiler


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> KernelLibrary:
    if find_nvcc() is None:
        pytest.skip("no nvcc")
    cache = tmp_path_factory.mktemp("kernels")
    return KernelLibrary(build_library(cache, compute_capability=(12, 0), defines=("AR_ONLY_WORLD=2",)))


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.timeout(300)
def test_nvcc_compiles_it_and_cpu_ranks_run_it(compiled: KernelLibrary) -> None:
    """The same call structure that a GPU launch gets, played by two threads over ordinary memory."""
    topology = Topology(world=2, island_size=2)
    capacity = 4096
    slab_bytes = compiled.slab_bytes(2, capacity, capacity)
    slabs = [aligned_zeros(slab_bytes) for _ in range(2)]
    errors = [ErrorWord() for _ in range(2)]
    controls = [Control(epoch=1, timeout_ns=20_000_000_000, error=ctypes.addressof(error)) for error in errors]
    for dtype, family, shape in ((d, f, s) for d in DTYPES for f in ("ll", "bulk") for s in ("one-shot", "two-shot")):
        tactic = Tactic(family=family, shape=shape, num_ctas=1)  # type: ignore[arg-type]
        inputs = [(torch.randn(500) * 3).to(getattr(torch, dtype)) for _ in range(2)]
        outputs = [torch.full_like(each, float("nan")) for each in inputs]
        num_bytes = inputs[0].numel() * inputs[0].element_size()
        geometry = plan_geometry(topology, tactic, num_bytes)

        def play(rank: int) -> None:
            call = Call(num_bytes=num_bytes, first_rank=rank, num_ranks=1, ctas=1, tree_opens=topology.tree_opens)  # noqa: B023
            call.slabs[0], call.slabs[1] = (slab.address for slab in slabs)
            call.layout.ll_bytes = call.layout.bulk_bytes = capacity
            call.layout.world = 2
            call.slice_packs, call.num_slices = geometry.slice_packs, geometry.num_slices  # noqa: B023
            call.ranks[0] = RankBuffers(
                input=inputs[rank].data_ptr(),  # noqa: B023
                output=outputs[rank].data_ptr(),  # noqa: B023
                control=ctypes.addressof(controls[rank]),
            )
            compiled.run_on_cpu(
                call,
                dtype=DTYPES.index(dtype),  # noqa: B023
                shape=tactic.island_of(topology),  # noqa: B023
                bulk=family == "bulk",  # noqa: B023
            )

        threads = [threading.Thread(target=play, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        expected = (inputs[0].float() + inputs[1].float()).to(inputs[0].dtype)
        assert all(torch.equal(output, expected) for output in outputs), (dtype, family, shape)
    assert [control.epoch for control in controls] == [13, 13]
    assert not any(error.code for error in errors)


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.timeout(300)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_error_is_cudas_own(compiled: KernelLibrary) -> None:
    with pytest.raises(SetupFailed, match=r"allocating \d+ bytes of GPU memory: "):
        compiled.device_alloc(100)
