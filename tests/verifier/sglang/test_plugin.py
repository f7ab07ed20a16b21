"""The plugin without SGLang: which rows are tapped, and that they arrive at the gateway's end."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from verifier.sglang.answers import Answer, MetaInfo
from verifier.sglang.plugin import hooks
from verifier.sglang.plugin.announcement import first_wanted, new_rid
from verifier.sglang.plugin.config import PluginConfig
from verifier.sglang.plugin.tap import FeatureTap, Piece, wanted_pieces
from verifier.sglang.tap import TapSource
from wire.tensor_ring import TensorRingReader

ANSWER = Answer(meta_info=MetaInfo())


def test_rid_carries_the_first_wanted_position() -> None:
    assert first_wanted(new_rid(17)) == 17
    assert new_rid(1) != new_rid(1)
    assert first_wanted("HEALTH_CHECK_1") is None
    assert first_wanted("be-garbage") is None


def test_rows_of_a_ragged_pass() -> None:
    mine, other, late = new_rid(4), "someone-else", new_rid(20)
    assert wanted_pieces([mine, other, late, new_rid(9)], [3, 0, 10, 9], [3, 5, 4, 2])[0] == Piece(mine, 1, 2, 4)
    pieces = wanted_pieces([mine, other, late, mine], [3, 0, 10, 9], [3, 5, 4, 2])
    assert [(piece.row, piece.count, piece.position) for piece in pieces] == [(1, 2, 4), (12, 2, 9)]


def config(tmp_path: Path) -> PluginConfig:
    return PluginConfig(
        ring_path=tmp_path / "ring",
        socket_path=tmp_path / "tap.sock",
        ring_slots=8,
        ring_slot_rows=4,
        keeps_graph_inputs=False,
    )


def batch(mode: str, requests: list[tuple[str, int, int]]) -> Any:
    return SimpleNamespace(
        reqs=[SimpleNamespace(rid=rid) for rid, _, _ in requests],
        forward_mode=SimpleNamespace(is_extend=lambda: mode == "extend", is_decode=lambda: mode == "decode"),
        prefix_lens=[prefix for _, prefix, _ in requests],
        extend_lens=[length for _, _, length in requests],
        seq_lens_cpu=torch.tensor([prefix + length for _, prefix, length in requests]),
    )


async def test_tapped_rows_arrive(tmp_path: Path) -> None:
    source = TapSource(tmp_path / "tap.sock", timeout_s=0.05)
    source.open()
    try:
        tap = FeatureTap(config(tmp_path))
        hidden = torch.arange(24.0).reshape(8, 3)
        result = SimpleNamespace(logits_output=SimpleNamespace(hidden_states=hidden))
        rid = new_rid(2)
        work = batch("extend", [("other", 0, 1), (rid, 1, 7)])
        assert tap.around_forward(lambda worker, given: result, "worker", work) is result
        spans = await source.spans(rid, ANSWER, first=2, last=7)
        assert spans is not None
        assert [(span.start, span.ref.shape) for span in spans] == [(2, (4, 3)), (6, (2, 3))]
        reader = TensorRingReader(tmp_path / "ring")
        assert reader.read(spans[0].ref).tolist() == hidden[2:6].tolist()
        reader.close()
        tap.around_forward(lambda worker, given: result, "worker", batch("decode", [("x", 3, 1), (rid, 8, 1)]))
        spans = await source.spans(rid, ANSWER, first=8, last=8)
        assert spans is not None
        assert await source.spans(rid, ANSWER, first=1, last=8) is None  # position 1 was not wanted
        assert await source.streamed(rid, first=8, last=8) == spans
        assert await source.spans(rid, ANSWER, first=6, last=7) is None  # a stream never goes back
        source.forget(rid)
        assert await source.streamed(rid, first=8, last=8) is None
    finally:
        source.close()
        assert tap._ring is not None
        tap._ring.close()
        assert tap._socket is not None
        tap._socket.close()


async def test_a_long_prompts_announcements_do_not_overrun_the_socket(tmp_path: Path) -> None:
    # Nobody reads between them: the kernel queues ten datagrams by default.
    source = TapSource(tmp_path / "tap.sock", timeout_s=0.5)
    source.open()
    tap = FeatureTap(config(tmp_path))
    try:
        rid, num_rows = new_rid(0), 4 * 200
        result = SimpleNamespace(logits_output=SimpleNamespace(hidden_states=torch.zeros(num_rows, 3)))
        tap.around_forward(lambda worker, given: result, None, batch("extend", [(rid, 0, num_rows)]))
        assert tap._num_dropped == 0
        spans = await source.spans(rid, ANSWER, first=0, last=num_rows - 1)
        assert spans is not None
        assert sum(span.ref.shape[0] for span in spans) == num_rows
    finally:
        source.close()
        assert tap._ring is not None
        tap._ring.close()
        assert tap._socket is not None
        tap._socket.close()


def test_bfloat16_travels_as_bits(tmp_path: Path) -> None:
    tap = FeatureTap(config(tmp_path))
    hidden = torch.ones(2, 3, dtype=torch.bfloat16)
    result = SimpleNamespace(logits_output=SimpleNamespace(hidden_states=hidden))
    tap.around_forward(lambda worker, given: result, None, batch("extend", [(new_rid(0), 0, 2)]))  # nobody listens
    assert tap._num_dropped == 1
    assert tap._ring is not None
    tap._ring.close()
    assert tap._socket is not None
    tap._socket.close()


def test_a_failing_tap_never_fails_the_pass(tmp_path: Path) -> None:
    tap = FeatureTap(config(tmp_path))
    calls = []
    for _ in range(2):
        assert tap.around_forward(lambda worker, given: calls.append(1) or "result", None, object()) == "result"
    assert len(calls) == 2
    assert tap._is_broken


@pytest.fixture
def fake_sglang(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    registered: list[tuple[str, str]] = []

    class HookRegistry:
        @staticmethod
        def register(target: str, hook: Any, kind: str) -> None:
            registered.append((target, kind))

    module = types.ModuleType("sglang.srt.plugins.hook_registry")
    module.HookRegistry = HookRegistry  # type: ignore[attr-defined]
    module.HookType = {"AROUND": "around", "REPLACE": "replace"}  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        package = types.ModuleType(name)
        package.__path__ = []
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(sys.modules["sglang"], "srt", sys.modules["sglang.srt"], raising=False)
    monkeypatch.setattr(sys.modules["sglang.srt"], "plugins", sys.modules["sglang.srt.plugins"], raising=False)
    monkeypatch.setattr(sys.modules["sglang.srt.plugins"], "hook_registry", module, raising=False)
    return registered


def add_worker(monkeypatch: pytest.MonkeyPatch, method: Any) -> None:
    worker = types.ModuleType("sglang.srt.managers.tp_worker")
    worker.TpModelWorker = type("TpModelWorker", (), {"forward_batch_generation": method})  # type: ignore[attr-defined]
    managers = types.ModuleType("sglang.srt.managers")
    managers.__path__ = []
    managers.tp_worker = worker  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang.srt.managers", managers)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.tp_worker", worker)
    monkeypatch.setattr(sys.modules["sglang.srt"], "managers", managers, raising=False)


def test_registers_what_is_there(
    fake_sglang: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hooks.register()
    assert fake_sglang == []  # nothing was asked for
    monkeypatch.setenv("BREAKEVEN_TAP_RING", str(tmp_path / "ring"))
    monkeypatch.setenv("BREAKEVEN_TAP_SOCKET", str(tmp_path / "socket"))
    hooks.register()
    assert fake_sglang == []  # this SGLang has no such target
    add_worker(monkeypatch, lambda self, something_else: None)
    hooks.register()
    assert fake_sglang == []  # it has another one
    add_worker(monkeypatch, lambda self, batch, *rest: None)
    hooks.register()
    assert fake_sglang == [("sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation", "around")]
