"""The plugin's tap without SGLang: which rows are tapped, and that they arrive at the gateway's end."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from verifier.sglang.answers import Answer, MetaInfo
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


async def test_a_pass_of_many_sequences_is_told_whole(tmp_path: Path) -> None:
    """Linux queues ten datagrams at a socket: one for each of 40 sequences would lose thirty."""
    source = TapSource(tmp_path / "tap.sock", timeout_s=0.5)
    source.open()
    tap = FeatureTap(dataclasses.replace(config(tmp_path), ring_slots=64))
    try:
        rids = [new_rid(9) for _ in range(40)]
        result = SimpleNamespace(logits_output=SimpleNamespace(hidden_states=torch.zeros(40, 3)))
        tap.around_forward(lambda worker, given: result, None, batch("extend", [(rid, 9, 1) for rid in rids]))
        assert tap._num_dropped == 0
        for rid in rids:
            assert await source.spans(rid, ANSWER, first=9, last=9) is not None
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
