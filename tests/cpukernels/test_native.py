"""The C kernels: right against torch in float64, and bit for bit the same for a row in any batch."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cpukernels.native import KernelBuildError, NativeKernels, build_library
from cpukernels.ports import AttentionShape
from tests.cpukernels.rig import new_cache, plain_attention, random, run

shared_fixture = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
SHAPES = [(4, 4, 16), (4, 2, 32), (6, 2, 64), (8, 1, 64), (4, 2, 128), (2, 1, 48), (2, 2, 256)]


def _attention_shape(values: tuple[int, int, int]) -> AttentionShape:
    return AttentionShape(num_q_heads=values[0], num_kv_heads=values[1], head_dim=values[2])


def _close(got: torch.Tensor, expected: torch.Tensor, *, tolerance: float = 2e-5) -> None:
    assert torch.allclose(got.double(), expected, rtol=tolerance, atol=tolerance), (got.double() - expected).abs().max()


def test_it_says_that_it_is_row_invariant(native: NativeKernels) -> None:
    assert (native.name, native.is_row_invariant) == ("native", True)


# ---------------------------------------------------------------- linear


@shared_fixture
@given(rows=st.integers(1, 40), columns=st.integers(1, 100), inner=st.integers(1, 96), seed=st.integers(0, 99))
def test_linear_equals_float64(native: NativeKernels, rows: int, columns: int, inner: int, seed: int) -> None:
    x, weight = random(seed, rows, inner), random(seed + 100, columns, inner)
    packed = native.pack(weight)
    expected = x.double() @ weight.double().T
    got = native.linear(x, packed)
    assert got.shape == (rows, columns)
    _close(got, expected)
    residual = random(seed + 200, rows, columns)
    added = residual.clone()
    native.linear_add(x, packed, added)
    _close(added, residual.double() + expected)


@pytest.mark.parametrize("columns", [1, 31, 32, 33, 64, 65, 100])
def test_linear_is_row_invariant_for_every_row_count(native: NativeKernels, columns: int) -> None:
    x, packed = random(1, 40, 80), native.pack(random(2, columns, 80))
    alone = torch.cat([native.linear(x[i : i + 1].contiguous(), packed) for i in range(40)])
    added_alone = torch.ones(40, columns)
    for i in range(40):
        row = added_alone[i : i + 1].clone()
        native.linear_add(x[i : i + 1].contiguous(), packed, row)
        added_alone[i] = row
    for rows in range(1, 41):
        part = x[:rows].contiguous()
        assert torch.equal(native.linear(part, packed), alone[:rows]), rows
        residual = torch.ones(rows, columns)
        native.linear_add(part, packed, residual)
        assert torch.equal(residual, added_alone[:rows]), rows


@shared_fixture
@given(order=st.permutations(range(13)), rows=st.integers(1, 13))
def test_linear_does_not_depend_on_neighbours_or_place(native: NativeKernels, order: list[int], rows: int) -> None:
    x, packed = random(5, 13, 64), native.pack(random(6, 70, 64))
    whole = native.linear(x, packed)
    chosen = order[:rows]
    assert torch.equal(native.linear(x[chosen].contiguous(), packed), whole[chosen])


def test_no_rows_are_fine(native: NativeKernels) -> None:
    assert native.linear(torch.empty(0, 32), native.pack(random(1, 40, 32))).shape == (0, 40)


def test_a_neighbour_of_nans_and_infinities_changes_nothing(native: NativeKernels) -> None:
    x, packed = random(7, 5, 32), native.pack(random(8, 40, 32))
    alone = native.linear(x[:1].contiguous(), packed)
    x[1], x[2], x[3] = float("nan"), float("inf"), 1e38
    assert torch.equal(native.linear(x, packed)[:1], alone)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_pack_takes_any_float_and_any_stride(native: NativeKernels, dtype: torch.dtype) -> None:
    weight = random(9, 32, 40).to(dtype).T
    x = random(10, 3, 32)
    _close(native.linear(x, native.pack(weight)), x.double() @ weight.float().double().T)


# ---------------------------------------------------------------- norms and activation


@shared_fixture
@given(
    rows=st.integers(1, 40), blocks=st.integers(1, 12), seed=st.integers(0, 99), scale=st.sampled_from([1e-4, 1, 50])
)
def test_rms_norm_equals_float64_and_is_row_invariant(
    native: NativeKernels, rows: int, blocks: int, seed: int, scale: float
) -> None:
    width = 16 * blocks
    x, weight = random(seed, rows, width) * scale, random(seed + 1, width)
    got = native.rms_norm(x, weight, 1e-6)
    wide = x.double()
    _close(got, wide * (wide.square().mean(1, keepdim=True) + 1e-6).rsqrt() * weight.double())
    assert torch.equal(got, torch.cat([native.rms_norm(x[i : i + 1], weight, 1e-6) for i in range(rows)]))


def test_rms_norm_takes_strided_rows(native: NativeKernels) -> None:
    wide, weight = random(3, 6, 96), random(4, 32)
    assert torch.equal(
        native.rms_norm(wide[:, 32:64], weight, 1e-5), native.rms_norm(wide[:, 32:64].contiguous(), weight, 1e-5)
    )


@shared_fixture
@given(rows=st.integers(1, 40), blocks=st.integers(1, 8), seed=st.integers(0, 99), scale=st.sampled_from([1, 10, 60]))
def test_silu_mul_equals_float64_and_is_row_invariant(
    native: NativeKernels, rows: int, blocks: int, seed: int, scale: float
) -> None:
    gate_up = random(seed, rows, 32 * blocks) * scale
    got = native.silu_mul(gate_up)
    gate, up = gate_up.double().chunk(2, dim=1)
    _close(got, gate * torch.sigmoid(gate) * up)
    assert torch.equal(got, torch.cat([native.silu_mul(gate_up[i : i + 1]) for i in range(rows)]))


@pytest.mark.parametrize("value", [-1e4, -100.0, -88.5, -87.0, -1e-30, 0.0, 1e-30, 87.0, 88.5, 100.0, 1e4])
def test_silu_at_the_edges_of_exp(native: NativeKernels, value: float) -> None:
    gate_up = torch.cat((torch.full((1, 16), value), torch.ones(1, 16)), dim=1)
    _close(native.silu_mul(gate_up), torch.nn.functional.silu(gate_up[:, :16].double()), tolerance=1e-6)


# ---------------------------------------------------------------- attention


@pytest.mark.parametrize("values", SHAPES, ids=str)
@pytest.mark.parametrize("steps", [(1,), (5,), (40,), (7, 1, 1, 20, 3), (16, 16, 16), (15, 1, 1, 70)], ids=str)
def test_attention_equals_float64(native: NativeKernels, values: tuple[int, int, int], steps: tuple[int, ...]) -> None:
    shape = _attention_shape(values)
    qkv = random(sum(steps), sum(steps), (values[0] + 2 * values[1]) * values[2])
    cache = new_cache(shape)
    for layer in range(2):
        cache.length = 0
        got = torch.cat([run(native, shape, [cache], [part], layer=layer)[0] for part in qkv.split(steps)])
        _close(got, plain_attention(shape, qkv))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=5),
    new=st.lists(st.integers(1, 9), min_size=5, max_size=5),
    values=st.sampled_from([(4, 2, 16), (6, 2, 64), (2, 1, 128)]),
)
def test_attention_rows_are_the_same_alone_and_in_any_batch(
    native: NativeKernels, lengths: list[int], new: list[int], values: tuple[int, int, int]
) -> None:
    shape = _attention_shape(values)
    width = (values[0] + 2 * values[1]) * values[2]
    prompts = [random(i, length, width) for i, length in enumerate(lengths)]
    steps = [random(100 + i, new[i], width) for i in range(len(lengths))]

    together = [new_cache(shape) for _ in lengths]
    run(native, shape, together, prompts)
    batched = run(native, shape, together, steps)
    for index, (prompt, step) in enumerate(zip(prompts, steps, strict=True)):
        # Alone, position by position, in a cache of another capacity.
        cache = new_cache(shape, capacity=200)
        for row in prompt.split(1):
            run(native, shape, [cache], [row])
        alone = torch.cat([run(native, shape, [cache], [row])[0] for row in step.split(1)])
        assert torch.equal(alone, batched[index])


def test_attention_after_rollback_equals_never_having_drafted(native: NativeKernels) -> None:
    shape = _attention_shape((4, 2, 32))
    width = 8 * 32
    prompt, drafts, real = random(1, 30, width), random(2, 9, width), random(3, 6, width)
    rolled, plain = new_cache(shape), new_cache(shape)
    for cache in (rolled, plain):
        run(native, shape, [cache], [prompt])
    run(native, shape, [rolled], [drafts])
    rolled.truncate(30)
    assert torch.equal(run(native, shape, [rolled], [real])[0], run(native, shape, [plain], [real])[0])


def test_uninitialised_cache_memory_is_never_read(native: NativeKernels) -> None:
    shape = _attention_shape((4, 2, 32))
    qkv = random(1, 21, 8 * 32)
    clean, dirty = new_cache(shape), new_cache(shape)
    clean.keys.zero_(), clean.values.zero_()
    dirty.keys.fill_(float("nan")), dirty.values.fill_(float("nan"))
    assert torch.equal(run(native, shape, [dirty], [qkv])[0], run(native, shape, [clean], [qkv])[0])


def test_large_scores_do_not_overflow(native: NativeKernels) -> None:
    shape = _attention_shape((2, 1, 16))
    qkv = random(4, 20, 4 * 16) * 100
    got = run(native, shape, [new_cache(shape)], [qkv])[0]
    _close(got, plain_attention(shape, qkv), tolerance=5e-3)
    assert torch.isfinite(got).all()


# ---------------------------------------------------------------- building


def _compiler(path: Path, script: str) -> None:
    path.mkdir()
    (path / "cc").write_text(f"#!/bin/sh\n{script}\n")
    (path / "cc").chmod(0o755 | stat.S_IXUSR)


def test_a_built_library_is_used_again(kernel_dir: Path, native: NativeKernels) -> None:
    assert native.name
    first = build_library(kernel_dir)
    before = first.stat()
    assert build_library(kernel_dir) == first
    assert (first.stat().st_mtime_ns, first.stat().st_ino) == (before.st_mtime_ns, before.st_ino)
    assert [path.name for path in kernel_dir.glob("*.so")] == [first.name]


@pytest.mark.slow
def test_a_new_cache_directory_is_made_and_filled(tmp_path: Path) -> None:
    library = build_library(tmp_path / "deep" / "er")
    assert library.is_file()
    assert NativeKernels(library).linear(torch.ones(1, 4), NativeKernels(library).pack(torch.ones(2, 4))).tolist() == [
        [4.0, 4.0]
    ]


def test_no_compiler_is_a_typed_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KernelBuildError, match="no C compiler"):
        build_library(tmp_path)


def test_a_failing_compiler_is_a_typed_error_with_its_last_lines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _compiler(tmp_path / "bin", 'case "$*" in *version*|*help*) echo toy 1.0;; *) echo boom >&2; exit 3;; esac')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    with pytest.raises(KernelBuildError, match="status 3: boom"):
        build_library(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_another_compiler_is_another_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = shutil.which("cc") or shutil.which("gcc")
    names = set()
    for version in ("1", "2"):
        script = f'case "$*" in --version) echo toy {version};; *) exec {real} "$@";; esac'
        _compiler(tmp_path / version, script)
        monkeypatch.setenv("PATH", f"{tmp_path / version}:/usr/bin:/bin")
        names.add(build_library(tmp_path / "cache").name)
    assert len(names) == 2
