"""Passes run one after another, extends before decodes, at absolute deadlines."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from benchmarks.controller.pass_loop import PassCosts, PassLoop, PassTimes


def test_extends_come_first_and_decoding_goes_on_after_them() -> None:
    passes: list[tuple[str, tuple[str, ...]]] = []
    is_done = threading.Event()

    def on_pass(kind: str, items: Sequence[str]) -> Sequence[str]:
        passes.append((kind, tuple(items)))
        if len(passes) == 2:
            loop.extend(["verify"])  # arrives while a stream decodes
        if len(passes) == 5:
            is_done.set()
            return []
        return [item for item in items if item != "verify"]

    loop: PassLoop[str] = PassLoop(PassCosts(plain_s=0.001, verify_s=0.002), on_pass)
    loop.start()
    loop.extend(["stream"])
    assert is_done.wait(5)
    loop.stop()
    decode = ("decode", ("stream",))
    assert passes == [("extend", ("stream",)), decode, ("extend", ("verify",)), decode, decode]
    assert (loop.times["extend"].count, loop.times["decode"].count) == (2, 3)
    assert min(loop.times["decode"].late_s) >= 0.0


def test_the_report_of_no_passes_is_empty() -> None:
    assert PassTimes().report()["count"] == 0
