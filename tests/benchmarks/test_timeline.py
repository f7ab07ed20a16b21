"""A trace file becomes a timeline, and a timeline a plot."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.controller.timeline import Mark, plot_timeline, read_timeline
from gateway.speculation.controller import ControllerLimits, Override, RoundObserved
from gateway.speculation.trace import TracedController
from gateway.trace_file import TraceWriter


def recorded(path: Path, num_rounds: int) -> None:
    """One request, half of whose drafts are right, K = 3 pays."""
    with TraceWriter(path) as writer:
        controller = TracedController(ControllerLimits(), writer.write)
        controller.set_drafter(is_up=True, reason="test")
        view, now_s = controller.new_request(), 0.0
        for index in range(num_rounds):
            plan = controller.plan_round(
                view, batch_size=1, max_draft_tokens=8, context_len=100, override=Override(), now_s=now_s
            )
            k = 0 if plan.is_shadow else plan.num_draft_tokens
            accepted = min(k, 3) if index % 2 else 0
            round_s = 0.012 + (0.004 if k else 0.0)
            now_s += round_s
            controller.observe(
                view,
                RoundObserved(
                    batch_size=1,
                    num_draft_tokens=k,
                    num_accepted_tokens=accepted,
                    num_committed_tokens=accepted + 1,
                    round_s=round_s,
                    is_cut=False,
                    is_clean=True,
                    now_s=now_s,
                ),
            )
        controller.observe_shadow(view, batch_size=1, num_draft_tokens=3, num_accepted_tokens=2, now_s=now_s)


def test_rounds_are_joined_with_their_plans(tmp_path: Path) -> None:
    recorded(tmp_path / "trace.jsonl", 60)
    timeline = read_timeline(tmp_path / "trace.jsonl")
    rounds = timeline.rounds
    assert len(rounds) == 60
    assert (rounds[0].state, rounds[0].num_draft_tokens, rounds[0].position) == ("BASE", 0, 0)
    states = list(dict.fromkeys(r.state for r in rounds))
    assert states == ["BASE", "PROBE", "ON"]
    assert rounds[-1].position == sum(r.num_committed_tokens for r in rounds[:-1])
    assert timeline.shadows == [(rounds[-1].now_s, 3, 2)]
    assert timeline.num_changes() >= 1
    first_draft = next(r.position for r in rounds if r.num_draft_tokens)
    assert timeline.first_position(1, since=0, states=("PROBE", "ON")) == first_draft
    assert timeline.first_position(1, since=first_draft + 1, states=("PROBE",)) > first_draft
    assert timeline.first_position(2, since=0, states=("ON",)) is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    recorded(tmp_path / "trace.jsonl", 200)
    timeline = read_timeline(tmp_path / "trace.jsonl")
    path = tmp_path / "plots" / "plot.png"
    plot_timeline(
        timeline,
        path,
        title="test",
        rates={"plain": 82.0},
        length=2.5,
        marks=[Mark(now_s=timeline.rounds[90].now_s, label="shift")],
    )
    assert path.read_bytes().startswith(b"\x89PNG")
