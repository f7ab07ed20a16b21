"""From what was measured in a replay to the numbers that are reported and kept."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.controller.replay_stack import ReplayCosts
from benchmarks.controller.timed_stream import TimedAnswer
from benchmarks.controller.timeline import Timeline

__all__ = ["CaseRun", "length_case", "markdown", "merge_results", "shift_case"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseRun:
    """One case, measured.

    Fields:
        answers: by mode, in the order of the texts. passes: by mode, what the engine says its passes took.
        stats, timeline: /stats and the trace of the auto gateway. num_wrong_texts: answers that are not the known text.
    """

    costs: ReplayCosts
    answers: dict[str, list[TimedAnswer]]
    passes: dict[str, Any]
    stats: dict[str, Any]
    timeline: Timeline
    num_wrong_texts: int

    def tok_per_s(self, mode: str) -> float:
        """Delivered rate over all answers of a mode."""
        answers = self.answers[mode]
        return sum(a.num_tokens for a in answers) / sum(a.decode_s for a in answers)

    @property
    def request(self) -> int:
        """Number of the last request in the trace."""
        return self.timeline.rounds[-1].request


def length_case(run: CaseRun, *, length: float) -> dict[str, Any]:
    """A case of one acceptance length, as plain JSON values."""
    return {"length": length, **_case(run)}


def shift_case(run: CaseRun, *, shift_at: int) -> dict[str, Any]:
    """A case whose length changes at token ``shift_at`` of its one answer."""
    # The trace does not see the prompt's own token.
    first = run.timeline.first_position(run.request, since=shift_at - 1, states=("PROBE", "ON"))
    again = run.timeline.first_position(run.request, since=shift_at - 1, states=("ON",))
    return {
        "shift_at_token": shift_at,
        "first_drafts_after_tokens": None if first is None else first + 1 - shift_at,
        "reenabled_after_tokens": None if again is None else again + 1 - shift_at,
        **_case(run),
    }


def _case(run: CaseRun) -> dict[str, Any]:
    rates = {mode: run.tok_per_s(mode) for mode in run.answers}
    num_rounds = len(run.timeline.rounds)
    return {
        "costs_ms": {"plain": run.costs.plain_ms, "verify": run.costs.verify_ms, "draft": run.costs.draft_ms},
        "modes": {mode: _mode(run, mode) for mode in run.answers},
        "over_better_mode": round(rates["auto"] / max(rates["plain"], rates["static"]), 4),
        "over_plain": round(rates["auto"] / rates["plain"], 4),
        "wrong_texts": run.num_wrong_texts,
        "changes_per_200_rounds": round(200 * run.timeline.num_changes() / max(1, num_rounds), 3),
        "auto": {
            "shadows": run.stats["speculation"]["num_shadows"],
            "fallbacks": run.stats["speculation"]["fallbacks"],
            "engine_counters": run.stats["verifier"]["counters"],
            "round_ms_by_k": _round_ms_by_k(run.timeline),
        },
        "passes": run.passes,
    }


def _mode(run: CaseRun, mode: str) -> dict[str, Any]:
    answers = run.answers[mode]
    each = [a.tok_per_s for a in answers]
    drafted = sum(a.speculation["num_draft_tokens"] for a in answers)
    accepted = sum(a.speculation["num_accepted_draft_tokens"] for a in answers)
    rounds = sum(a.speculation["num_spec_steps"] for a in answers)
    plain_rounds = sum(a.speculation["num_plain_steps"] for a in answers)
    costs = run.costs
    nominal_ms = rounds * costs.verify_ms + drafted * costs.draft_ms + plain_rounds * costs.plain_ms
    spent_ms = 1e3 * sum(a.decode_s for a in answers)
    waited_ms = sum(a.speculation["verify_ms"] for a in answers)
    drafting_ms = sum(a.speculation["draft_ms"] for a in answers)
    found = {
        "tok_per_s": round(run.tok_per_s(mode), 3),
        "tok_per_s_of_answers": [round(rate, 2) for rate in each],
        "tok_per_s_median": round(statistics.median(each), 3),
        "ttft_ms_median": round(statistics.median(a.ttft_ms for a in answers), 1),
        "tokens": sum(a.num_tokens for a in answers),
        "rounds": rounds,
        "plain_rounds": plain_rounds,
        "acceptance_length": round(1 + accepted / rounds, 4) if rounds else None,
        # Beyond what passes and drafts are scripted to take; in auto this holds re-syncs and re-opened streams too.
        "overhead_ms_per_round": round((spent_ms - nominal_ms) / (rounds + plain_rounds), 3),
    }
    if mode == "static":
        found["overhead_parts_ms_per_round"] = {
            "draft": round((drafting_ms - drafted * costs.draft_ms) / rounds, 3),
            "verify": round((waited_ms - rounds * costs.verify_ms - plain_rounds * costs.plain_ms) / rounds, 3),
            "rest": round((spent_ms - drafting_ms - waited_ms) / rounds, 3),
        }
    return found


def _round_ms_by_k(timeline: Timeline) -> dict[str, dict[str, float]]:
    """Median wall time of a round by K, of shadowed plain rounds and of re-syncs."""
    found: dict[str, list[float]] = {}
    for r in timeline.rounds:
        kind = "resync" if r.is_resync else "plain, shadow" if r.is_shadow else str(r.num_draft_tokens)
        found.setdefault(kind, []).append(1e3 * r.round_s)
    return {
        kind: {
            "rounds": len(times),
            "median_ms": round(statistics.median(times), 2),
            "mean_ms": round(statistics.mean(times), 2),
        }
        for kind, times in sorted(found.items())
    }


def markdown(cases: dict[str, dict[str, Any]]) -> str:
    """The table of all cases."""
    head = ["case", "plain tok/s", "static K=3", "auto", "auto / better mode", "length of static", "on again after"]
    lines = ["| " + " | ".join(head) + " |", "|" + "--|" * len(head)]
    for name, case in cases.items():
        modes, again = case["modes"], case.get("reenabled_after_tokens")
        cells = [name, *(f"{modes[mode]['tok_per_s']:.1f}" for mode in ("plain", "static", "auto"))]
        cells += [f"{case['over_better_mode']:.3f}", f"{modes['static']['acceptance_length']:.2f}"]
        cells.append("" if again is None else f"{again} tokens")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def merge_results(
    path: Path, cases: dict[str, dict[str, Any]], *, provenance: dict[str, Any], settings: dict[str, Any]
) -> None:
    """Add the cases to the file, each with the provenance of its run; cases of the same name are replaced.

    The table of all goes beside it, as .md.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    kept: dict[str, Any] = json.loads(path.read_text())["cases"] if path.is_file() else {}
    kept |= {name: {"provenance": provenance, **case} for name, case in cases.items()}
    kept = dict(sorted(kept.items()))
    path.write_text(json.dumps({"settings": settings, "cases": kept}, indent=1) + "\n")
    path.with_suffix(".md").write_text(markdown(kept) + "\n")
