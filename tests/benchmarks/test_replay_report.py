"""What the reports make of the answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.controller.live import LiveAnswer, count_differing, summarise
from benchmarks.controller.replay_report import CaseRun, length_case, merge_results, shift_case
from benchmarks.controller.replay_stack import ReplayCosts
from benchmarks.controller.timed_stream import TimedAnswer
from benchmarks.controller.timeline import Timeline, TracedRound


def answer(*, round_s: float, per_round: int, num_rounds: int, k: int = 0, ids: int = 7) -> TimedAnswer:
    """A prompt's token, then rounds of one length."""
    times = [10.0 + round_s * index for index in range(num_rounds + 1)]
    spent = {
        "num_spec_steps": num_rounds if k else 0,
        "num_plain_steps": 0 if k else num_rounds,
        "num_draft_tokens": k * num_rounds,
        "num_accepted_draft_tokens": (per_round - 1) * num_rounds,
        "draft_ms": 1.5 * k * num_rounds,
        "verify_ms": 1e3 * round_s * num_rounds - 2.0 * k * num_rounds,
    }
    counts = [1, *[per_round] * num_rounds]
    return TimedAnswer(begin_s=9.5, times_s=times, counts=counts, token_ids=[ids] * sum(counts), speculation=spent)


def traced(position: int, state: str, k: int) -> TracedRound:
    return TracedRound(
        request=1,
        position=position,
        now_s=position * 0.012,
        round_s=0.012,
        state=state,
        reason=state.lower(),
        is_shadow=False,
        is_resync=False,
        num_draft_tokens=k,
        num_committed_tokens=10,
    )


def case(timeline: Timeline) -> CaseRun:
    return CaseRun(
        costs=ReplayCosts(),
        answers={
            "plain": [answer(round_s=0.0122, per_round=1, num_rounds=100)] * 2,
            "static": [answer(round_s=0.035, per_round=2, num_rounds=50, k=3)] * 2,
            "auto": [answer(round_s=0.0124, per_round=1, num_rounds=100)] * 2,
        },
        passes={},
        stats={"speculation": {"num_shadows": 3, "fallbacks": {}}, "verifier": {"counters": {}}},
        timeline=timeline,
        num_wrong_texts=0,
    )


def test_a_case_compares_with_the_better_mode() -> None:
    found = length_case(case(Timeline(rounds=[traced(0, "OFF", 0)])), length=2.0)
    modes = found["modes"]
    assert modes["plain"]["tok_per_s"] == pytest.approx(1 / 0.0122, abs=0.01)
    assert modes["plain"]["overhead_ms_per_round"] == pytest.approx(0.0, abs=0.001)
    assert modes["static"]["tok_per_s"] == pytest.approx(2 / 0.035, abs=0.01)
    assert modes["static"]["acceptance_length"] == 2.0
    # 35 ms of which 30 + 3 are scripted: 1.5 in drafting, -1 in verifying, 1.5 elsewhere.
    assert modes["static"]["overhead_ms_per_round"] == pytest.approx(2.0, abs=0.01)
    assert modes["static"]["overhead_parts_ms_per_round"] == {"draft": 1.5, "verify": -1.0, "rest": 1.5}
    assert found["over_better_mode"] == pytest.approx(0.0122 / 0.0124, abs=0.001)


def test_a_shift_says_when_speculation_came_back() -> None:
    rounds = [traced(0, "OFF", 0), traced(10, "PROBE", 3), traced(20, "OFF", 0), traced(30, "PROBE", 3)]
    found = shift_case(case(Timeline(rounds=[*rounds, traced(40, "ON", 3)])), shift_at=21)
    assert found["first_drafts_after_tokens"] == 10
    assert found["reenabled_after_tokens"] == 20
    never = shift_case(case(Timeline(rounds=rounds)), shift_at=21)
    assert never["reenabled_after_tokens"] is None


def test_results_are_a_collection(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "seed_replay.json"
    timeline = Timeline(rounds=[traced(0, "OFF", 0)])
    case_a, case_b = length_case(case(timeline), length=2.0), shift_case(case(timeline), shift_at=5)
    merge_results(path, {"b": case_a, "a": case_a}, provenance={"git_sha": "1"}, settings={})
    merge_results(path, {"b": case_b}, provenance={"git_sha": "2"}, settings={"x": 1})
    kept = json.loads(path.read_text())
    assert kept["settings"] == {"x": 1}
    assert [(name, entry["provenance"]["git_sha"]) for name, entry in kept["cases"].items()] == [("a", "1"), ("b", "2")]
    assert kept["cases"]["b"]["shift_at_token"] == 5
    lines = path.with_suffix(".md").read_text().splitlines()
    assert lines[2] == "| a | 82.0 | 57.1 | 80.6 | 0.984 | 2.00 |  |"
    assert len(lines) == 4


def test_live_rows_compare_within_a_text() -> None:
    def live(mode: str, text: str, **fields: Any) -> LiveAnswer:
        return LiveAnswer(kind="code", text=text, temperature=0.0, repeat=0, mode=mode, answer=answer(**fields))

    answers = [
        *(live("off", text, round_s=0.02, per_round=1, num_rounds=20) for text in "ab"),
        live("on", "a", round_s=0.03, per_round=2, num_rounds=10, k=3),
        live("on", "b", round_s=0.03, per_round=1, num_rounds=20, k=3),
        live("auto", "a", round_s=0.03, per_round=2, num_rounds=10, k=3),
        live("auto", "b", round_s=0.02, per_round=1, num_rounds=20, ids=8),
    ]
    rows = {(row["kind"], row["mode"]): row for row in summarise(answers)}
    assert rows["code", "on"]["ratio_min"] == pytest.approx(2 / 3, abs=0.001)
    assert rows["code", "on"]["ratio_max"] == pytest.approx(4 / 3, abs=0.001)
    assert rows["all", "auto"]["plain_share_of_rounds"] == pytest.approx(2 / 3, abs=0.001)
    assert rows["all", "off"]["acceptance_length"] is None
    assert count_differing(answers) == 1
