"""What a recorded trace of decisions shows over time: state, acceptance length, delivered rate."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gateway.speculation.trace import RoundPlanned, RoundSeen, ShadowSeen
from gateway.trace_file import read_trace

__all__ = ["Mark", "Timeline", "TracedRound", "plot_timeline", "read_timeline"]

# What a plan's reason says of the gate; any other is told by what the round did.
_STATES: Final = {
    "base": "BASE",
    "probe": "PROBE",
    "pays": "ON",
    "measuring": "ON",
    "refresh": "ON",
    "below_break_even": "OFF",
    "request_suspended": "OFF",
    "client_on": "PINNED",
    "client_off": "PINNED",
    "pinned": "PINNED",
}
_COLOURS: Final = {"BASE": "0.85", "PROBE": "navajowhite", "ON": "palegreen", "PINNED": "lightblue", "OFF": "white"}
_RATE_TOKENS = 40  # a point of the delivered rate averages over at least so many
_LENGTH_ROUNDS = 25  # a point of the acceptance length over so many
_GAP_S = 2.0  # no line is drawn across more


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRound:
    """One committed round with the plan before it. position: tokens of the answer before it, the prompt's excluded."""

    request: int
    position: int
    now_s: float
    round_s: float
    state: str
    reason: str
    is_shadow: bool
    is_resync: bool
    num_draft_tokens: int
    num_committed_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """All rounds in order, and the shadows as (now_s, drafted, accepted)."""

    rounds: list[TracedRound] = field(default_factory=list)
    shadows: list[tuple[float, int, int]] = field(default_factory=list)

    def num_changes(self) -> int:
        """How often a stream went from plain to speculating or back."""
        is_on: dict[int, bool] = {}
        changes = 0
        for r in self.rounds:
            now = r.num_draft_tokens > 0 or r.is_resync
            changes += now != is_on.get(r.request, now)
            is_on[r.request] = now
        return changes

    def first_position(self, request: int, *, since: int, states: Sequence[str]) -> int | None:
        """Where ``request`` first verified drafts in one of these states, from position ``since`` on."""
        for r in self.rounds:
            if r.request == request and r.position >= since and r.num_draft_tokens > 0 and r.state in states:
                return r.position
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A vertical line in the plot."""

    now_s: float
    label: str


def read_timeline(path: Path) -> Timeline:
    """Join each round of a trace file with its plan.

    Raises:
        TraceFileError: it is no trace of this version.
    """
    timeline = Timeline()
    plans: dict[int, RoundPlanned] = {}
    positions: dict[int, int] = {}
    for record in read_trace(path):
        if isinstance(record, RoundPlanned):
            plans[record.request] = record
        elif isinstance(record, ShadowSeen):
            timeline.shadows.append((record.now_s, record.num_draft_tokens, record.num_accepted_tokens))
        elif isinstance(record, RoundSeen):
            plan, seen = plans[record.request].plan, record.round
            position = positions.get(record.request, 0)
            positions[record.request] = position + seen.num_committed_tokens
            drafts = plan.num_draft_tokens > 0 and not plan.is_shadow
            timeline.rounds.append(
                TracedRound(
                    request=record.request,
                    position=position,
                    now_s=seen.now_s,
                    round_s=seen.round_s,
                    state=_STATES.get(plan.reason, "ON" if drafts else "OFF"),
                    reason=plan.reason,
                    is_shadow=plan.is_shadow,
                    is_resync=seen.is_resync,
                    num_draft_tokens=seen.num_draft_tokens,
                    num_committed_tokens=seen.num_committed_tokens,
                )
            )
    return timeline


def plot_timeline(
    timeline: Timeline,
    path: Path,
    *,
    title: str,
    rates: Mapping[str, float] | None = None,
    length: float | None = None,
    marks: Sequence[Mark] = (),
) -> None:
    """Draw K over the gate's state, the acceptance length and the delivered rate, over seconds of decoding.

    Args:
        rates: horizontal lines in tok/s, such as plain decode's. length: a horizontal line in the middle panel.
    """
    # matplotlib takes a second to load and smoke runs do not draw.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rounds, axis = timeline.rounds, _DecodeTime(timeline.rounds)
    figure, panels = pyplot.subplots(3, 1, figsize=(11, 7.5), sharex=True)
    _draw_states(panels[0], rounds, axis)
    panels[0].set_title(title)
    verified = [(r.now_s, r.num_committed_tokens) for r in rounds if r.num_draft_tokens > 0]
    panels[1].plot(*_means(verified, axis), color="tab:green", label=f"mean of {_LENGTH_ROUNDS} verified rounds")
    scored = [(now_s, 1 + accepted) for now_s, _, accepted in timeline.shadows]
    panels[1].plot(*_means(scored, axis), color="0.6", linewidth=0.8, label=f"mean of {_LENGTH_ROUNDS} shadows")
    if length is not None:
        panels[1].axhline(length, color="0.3", linestyle="--", linewidth=0.8, label="of the text, K = 3")
    panels[1].set_ylabel("acceptance length")
    panels[2].plot(*_rates(rounds, axis), color="tab:blue", linewidth=1.0, label="delivered")
    for (name, rate), style in zip((rates or {}).items(), ("--", ":", "-."), strict=False):
        panels[2].axhline(rate, color="0.3", linestyle=style, linewidth=0.9, label=f"{name}, {rate:.1f}")
    panels[2].set_ylabel("tok/s")
    panels[2].set_xlabel("seconds of decoding; dotted: the next answer")
    for panel in panels:
        for begin_s in axis.answers:
            panel.axvline(begin_s, color="0.7", linestyle=":", linewidth=0.7)
        for mark in marks:
            panel.axvline(axis.at(mark.now_s), color="tab:red", linewidth=0.9, label=mark.label)
        panel.legend(loc="upper right", fontsize=8, ncols=3)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


class _DecodeTime:
    """Seconds spent decoding: what lies between two answers is left out.

    Attributes:
        ends: for each round. answers: where each answer but the first begins.
    """

    def __init__(self, rounds: Sequence[TracedRound]) -> None:
        self.ends = list(itertools.accumulate(r.round_s for r in rounds))
        self.answers = [
            self.ends[index] for index, (a, b) in enumerate(itertools.pairwise(rounds)) if a.request != b.request
        ]
        self._now_s = [r.now_s for r in rounds]

    def at(self, now_s: float) -> float:
        """Of a moment in a trace: the end of the round under way."""
        return self.ends[min(bisect.bisect_left(self._now_s, now_s), len(self.ends) - 1)]


def _draw_states(panel: Any, rounds: Sequence[TracedRound], axis: _DecodeTime) -> None:
    for first, last in _stretches(rounds):
        begin_s = axis.ends[first] - rounds[first].round_s
        panel.axvspan(begin_s, axis.ends[last], color=_COLOURS[rounds[first].state], linewidth=0)
    panel.step(axis.ends, [r.num_draft_tokens for r in rounds], where="pre", linewidth=0.8, color="0.2")
    for state, colour in _COLOURS.items():
        if any(r.state == state for r in rounds):
            panel.fill([], [], facecolor=colour, edgecolor="0.6", label=state)
    panel.set_ylabel("K verified")


def _stretches(rounds: Sequence[TracedRound]) -> list[tuple[int, int]]:
    """First and last index of each run of rounds of one request in one state."""
    found: list[tuple[int, int]] = []
    for index, r in enumerate(rounds):
        if found and (rounds[found[-1][0]].state, rounds[found[-1][0]].request) == (r.state, r.request):
            found[-1] = (found[-1][0], index)
        else:
            found.append((index, index))
    return found


def _means(points: Sequence[tuple[float, int]], axis: _DecodeTime) -> tuple[list[float], list[float]]:
    """Means of the last points, broken where there were none for a while."""
    times: list[float] = []
    values: list[float] = []
    for index, (now_s, _) in enumerate(points):
        window = points[max(0, index + 1 - _LENGTH_ROUNDS) : index + 1]
        if times and axis.at(now_s) - times[-1] > _GAP_S:
            times.append(axis.at(now_s))
            values.append(float("nan"))
        times.append(axis.at(now_s))
        values.append(sum(value for _, value in window) / len(window))
    return times, values


def _rates(rounds: Sequence[TracedRound], axis: _DecodeTime) -> tuple[list[float], list[float]]:
    times: list[float] = []
    values: list[float] = []
    tokens, seconds = 0, 0.0
    for r, end_s in zip(rounds, axis.ends, strict=True):
        tokens += r.num_committed_tokens
        seconds += r.round_s
        if tokens >= _RATE_TOKENS:
            times.append(end_s)
            values.append(tokens / seconds)
            tokens, seconds = 0, 0.0
    return times, values
