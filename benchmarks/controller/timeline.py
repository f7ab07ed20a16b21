"""What a recorded trace of decisions shows over time: state, acceptance length, delivered rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

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
    """Draw K over the gate's state, the acceptance length and the delivered rate, over seconds.

    Args:
        rates: horizontal lines in tok/s, such as plain decode's. length: a horizontal line in the middle panel.
    """
    # matplotlib takes a second to load and smoke runs do not draw.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import patches, pyplot

    rounds = timeline.rounds
    begin_s = rounds[0].now_s - rounds[0].round_s
    figure, axes = pyplot.subplots(3, 1, figsize=(11, 7.5), sharex=True)
    for first, last in _stretches(rounds):
        edges = (rounds[first].now_s - rounds[first].round_s - begin_s, rounds[last].now_s - begin_s)
        axes[0].axvspan(*edges, color=_COLOURS[rounds[first].state], linewidth=0)
    axes[0].step(
        [r.now_s - begin_s for r in rounds],
        [r.num_draft_tokens for r in rounds],
        where="pre",
        linewidth=0.8,
        color="0.2",
    )
    axes[0].set_ylabel("K verified")
    axes[0].set_title(title)
    seen = {r.state for r in rounds}
    axes[0].legend(
        handles=[patches.Patch(facecolor=c, edgecolor="0.6", label=s) for s, c in _COLOURS.items() if s in seen],
        loc="upper right",
        ncols=5,
        fontsize=8,
    )
    axes[1].plot(
        *_lengths(rounds, begin_s), color="tab:green", linewidth=1.2, label=f"{_LENGTH_ROUNDS} verified rounds"
    )
    if timeline.shadows:
        times = [now_s - begin_s for now_s, _, _ in timeline.shadows]
        axes[1].plot(times, [1 + a for _, _, a in timeline.shadows], ".", color="0.6", markersize=2, label="a shadow")
    if length is not None:
        axes[1].axhline(length, color="0.5", linestyle="--", linewidth=0.8, label="of the text, K = 3")
    axes[1].set_ylabel("acceptance length")
    axes[1].legend(loc="upper right", fontsize=8)
    axes[2].plot(*_rates(rounds, begin_s), color="tab:blue", linewidth=1.0, label="delivered")
    for (name, rate), style in zip((rates or {}).items(), ("--", ":", "-."), strict=False):
        axes[2].axhline(rate, color="0.3", linestyle=style, linewidth=0.9, label=f"{name}, {rate:.1f}")
    axes[2].set_ylabel("tok/s")
    axes[2].set_xlabel("seconds")
    axes[2].legend(loc="upper right", fontsize=8)
    for mark in marks:
        for axis in axes:
            axis.axvline(mark.now_s - begin_s, color="tab:red", linewidth=0.9)
        axes[1].annotate(
            mark.label, (mark.now_s - begin_s, axes[1].get_ylim()[1]), fontsize=8, color="tab:red", va="top"
        )
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def _stretches(rounds: Sequence[TracedRound]) -> list[tuple[int, int]]:
    """First and last index of each run of rounds of one request in one state."""
    found: list[tuple[int, int]] = []
    for index, r in enumerate(rounds):
        if found and (rounds[found[-1][0]].state, rounds[found[-1][0]].request) == (r.state, r.request):
            found[-1] = (found[-1][0], index)
        else:
            found.append((index, index))
    return found


def _lengths(rounds: Sequence[TracedRound], begin_s: float) -> tuple[list[float], list[float]]:
    verified = [r for r in rounds if r.num_draft_tokens > 0]
    times: list[float] = []
    values: list[float] = []
    for index, r in enumerate(verified):
        window = verified[max(0, index + 1 - _LENGTH_ROUNDS) : index + 1]
        is_gap = bool(times) and r.now_s - begin_s - times[-1] > 2.0
        if is_gap:
            times.append(r.now_s - begin_s)
            values.append(float("nan"))
        times.append(r.now_s - begin_s)
        values.append(sum(w.num_committed_tokens for w in window) / len(window))
    return times, values


def _rates(rounds: Sequence[TracedRound], begin_s: float) -> tuple[list[float], list[float]]:
    times: list[float] = []
    values: list[float] = []
    tokens, seconds, request = 0, 0.0, rounds[0].request
    for r in rounds:
        if r.request != request:
            tokens, seconds, request = 0, 0.0, r.request
            times.append(r.now_s - begin_s)
            values.append(float("nan"))
        tokens += r.num_committed_tokens
        seconds += r.round_s
        if tokens >= _RATE_TOKENS:
            times.append(r.now_s - begin_s)
            values.append(tokens / seconds)
            tokens, seconds = 0, 0.0
    return times, values
