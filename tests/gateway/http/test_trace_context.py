from __future__ import annotations

import pytest

from gateway.http.trace_context import parse_traceparent

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("header", "is_sampled"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-02", False),
        (f"00-{TRACE}-{SPAN}-ff", True),
        (f" 00-{TRACE}-{SPAN}-01 ", True),
        (f"01-{TRACE}-{SPAN}-01", True),
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-brings", True),
    ],
)
def test_good_headers(header: str, is_sampled: bool) -> None:
    context = parse_traceparent(header)
    assert context is not None
    assert (f"{context.trace_id:032x}", f"{context.span_id:016x}") == (TRACE, SPAN)
    assert context.is_sampled is is_sampled


@pytest.mark.parametrize(
    "header",
    [
        None, "", "00", f"00-{TRACE}-{SPAN}", f"00-{TRACE}-{SPAN}-01-x", f"ff-{TRACE}-{SPAN}-01",
        f"0-{TRACE}-{SPAN}-01", f"00-{TRACE.upper()}-{SPAN}-01", f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE[1:]}-{SPAN}-01", f"00-{TRACE}-{SPAN}g-01", f"00_{TRACE}_{SPAN}_01",
        f"00-{TRACE}-{SPAN}-1",
        f"cc-{TRACE}-{SPAN}-01x", f"00-{TRACE}-{SPAN}-01\n0",
    ],
)  # fmt: skip
def test_broken_headers_are_no_context(header: str | None) -> None:
    assert parse_traceparent(header) is None


def test_the_state_is_passed_on_unless_it_is_too_long() -> None:
    good = f"00-{TRACE}-{SPAN}-01"
    for state, kept in (("a=1,b=2", "a=1,b=2"), (None, ""), ("x" * 513, "")):
        context = parse_traceparent(good, state)
        assert context is not None
        assert context.state == kept
