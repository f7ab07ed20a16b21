"""Parts of a round from the probe's events."""

from __future__ import annotations

import pytest

from benchmarks.sglang.parts import read_events, round_parts

TOKENIZER = "1000000000 tokenizer_in\n1001000000 scheduler_sent\n1020000000 tokenizer_out\n"
SCHEDULER = (
    "1002000000 scheduler_in\n1003000000 batch_begin\n1004000000 pass_begin\n1010000000 pass_launched\n"
    "1012000000 pass_done\n1015000000 reply_sent\n1015100000 pass_gpu_ms 7.5\n1016"  # killed within a line
)


def test_parts_add_up_to_the_round() -> None:
    events = read_events([TOKENIZER, SCHEDULER])
    parts = round_parts(events, 0.999, 1.022)
    assert (parts.pop("gpu"), parts.pop("passes")) == (7.5, 1.0)
    assert parts == {
        "http_in": pytest.approx(1.0),
        "tokenizer_manager": pytest.approx(1.0),
        "to_scheduler": pytest.approx(1.0),
        "queue": pytest.approx(2.0),
        "launch": pytest.approx(6.0),
        "wait_gpu": pytest.approx(2.0),
        "results": pytest.approx(3.0),
        "detokenizer": pytest.approx(5.0),
        "http_out": pytest.approx(2.0),
    }
    assert sum(parts.values()) == pytest.approx(23.0)


def test_a_station_that_is_not_there_adds_to_the_next() -> None:
    parts = round_parts(read_events([SCHEDULER]), 1.0, 1.016)
    assert parts["to_scheduler"] == pytest.approx(2.0)
    assert parts["http_out"] == pytest.approx(1.0)
    assert "http_in" not in parts


def test_events_outside_the_round_are_not_its() -> None:
    parts = round_parts(read_events([TOKENIZER, SCHEDULER]), 2.0, 2.5)
    assert parts == {"http_out": pytest.approx(500.0), "passes": 0.0}
