"""What the soak found: outcomes, times inside and outside faults, recovery, memory."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.soak.clients import Outcome, Record
from benchmarks.soak.faults import Fault, MemorySample

__all__ = ["draw", "is_passed", "percentile", "report", "table"]

_WRONG = (Outcome.WRONG_TEXT, Outcome.NO_END, Outcome.NOT_REFUSED)
# A fault's effects reach the requests that wait behind it: they count as "beside a fault" up to here after its end.
_AFTER_S = 5.0
_MIB = 1 << 20


def report(
    begin_s: float, records: Sequence[Record], faults: Sequence[Fault], memory: Sequence[MemorySample]
) -> dict[str, Any]:
    """Everything as JSON values; times in ms unless the key says otherwise."""
    beside = [record for record in records if _is_beside(record, faults)]
    calm = [record for record in records if not _is_beside(record, faults)]
    errors_in_calm = [r.detail for r in calm if r.outcome is Outcome.TYPED_ERROR]
    wrong = [
        {
            "task": r.task,
            "behaviour": r.behaviour,
            "outcome": r.outcome,
            "at_s": r.begin_s - begin_s,
            "detail": r.detail,
        }
        for r in records
        if r.outcome in _WRONG
    ]
    return {
        "requests": len(records),
        "outcomes": dict(Counter(str(r.outcome) for r in records)),
        "by_behaviour": {
            behaviour: dict(Counter(str(r.outcome) for r in records if r.behaviour == behaviour))
            for behaviour in sorted({str(r.behaviour) for r in records})
        },
        "typed_errors": dict(Counter(r.detail for r in records if r.outcome is Outcome.TYPED_ERROR).most_common(20)),
        "typed_errors_without_fault": errors_in_calm[:20],
        "wrong": wrong,
        "faults": {
            f"{kind} {process}": {
                "count": len(times),
                "up_again_s_median": round(statistics.median(times), 2),
                "up_again_s_max": round(max(times), 2),
            }
            for (kind, process), times in _fault_times(faults).items()
        },
        "times": {"without_fault": _times(calm), "beside_a_fault": _times(beside)},
        "memory": _memory(memory),
    }


def is_passed(summary: dict[str, Any]) -> bool:
    """Nothing lost, doubled or untyped, and no error but beside a fault."""
    return not summary["wrong"] and not summary["typed_errors_without_fault"] and summary["requests"] > 0


def percentile(values: Sequence[float], share: float) -> float | None:
    """Nearest-rank percentile; None of nothing."""
    if not values:
        return None
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def table(summary: dict[str, Any]) -> str:
    """A short text of it."""
    lines = [f"{summary['requests']} requests: {summary['outcomes']}", f"faults: {summary['faults']}"]
    lines += [f"{where}: {times}" for where, times in summary["times"].items()]
    lines += [f"memory {process}: {row}" for process, row in summary["memory"].items()]
    lines += [f"WRONG {entry}" for entry in summary["wrong"][:10]]
    lines += [f"ERROR WITHOUT FAULT {detail}" for detail in summary["typed_errors_without_fault"][:10]]
    return "\n".join(lines)


def draw(
    begin_s: float,
    records: Sequence[Record],
    faults: Sequence[Fault],
    memory: Sequence[MemorySample],
    path: Path,
) -> None:
    """Memory and time to first token over the soak, faults as lines."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (upper, lower) = plt.subplots(2, 1, figsize=(10, 6), sharex=True)
    for process in ("gateway", "verifier", "drafter"):
        own = [sample for sample in memory if sample.process == process]
        upper.plot([(s.at_s - begin_s) / 60 for s in own], [s.rss_bytes / _MIB for s in own], ".", ms=2, label=process)
    upper.set_ylabel("resident memory, MiB")
    upper.set_ylim(bottom=0)
    upper.legend(loc="upper right")
    timed = [record for record in records if record.ttft_s is not None]
    lower.plot([(r.begin_s - begin_s) / 60 for r in timed], [1e3 * (r.ttft_s or 0) for r in timed], ".", ms=2)
    lower.set_ylabel("time to first token, ms")
    lower.set_yscale("log")
    lower.set_xlabel("minutes")
    for fault in faults:
        colour = "tab:red" if fault.process == "verifier" else "tab:orange"
        for axes in (upper, lower):
            axes.axvline((fault.begin_s - begin_s) / 60, color=colour, lw=0.5, alpha=0.6)
    figure.suptitle("soak: red lines are faults of the verifier, orange ones of the drafter")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _is_beside(record: Record, faults: Sequence[Fault]) -> bool:
    return any(fault.begin_s < record.end_s and record.begin_s < fault.end_s + _AFTER_S for fault in faults)


def _fault_times(faults: Sequence[Fault]) -> dict[tuple[str, str], list[float]]:
    found: dict[tuple[str, str], list[float]] = {}
    for fault in faults:
        found.setdefault((fault.kind, fault.process), []).append(fault.end_s - fault.begin_s)
    return dict(sorted(found.items()))


def _times(records: Sequence[Record]) -> dict[str, float | int | None]:
    first = [1e3 * record.ttft_s for record in records if record.ttft_s is not None]
    gaps = [1e3 * gap for record in records for gap in record.gaps_s]

    def rounded(value: float | None) -> float | None:
        return None if value is None else round(value, 1)

    return {
        "requests": len(records),
        "ttft_ms_p50": rounded(percentile(first, 0.5)),
        "ttft_ms_p99": rounded(percentile(first, 0.99)),
        "gap_ms_p50": rounded(percentile(gaps, 0.5)),
        "gap_ms_p99": rounded(percentile(gaps, 0.99)),
    }


def _memory(samples: Sequence[MemorySample]) -> dict[str, Any]:
    """Per process: medians of the first and the last third of all samples, over all its incarnations, and the peak."""
    found: dict[str, Any] = {}
    for process in ("gateway", "verifier", "drafter"):
        own = [sample.rss_bytes / _MIB for sample in samples if sample.process == process]
        if not own:
            continue
        third = max(1, len(own) // 3)
        found[process] = {
            "incarnations": len({sample.pid for sample in samples if sample.process == process}),
            "mib_median_first_third": round(statistics.median(own[:third]), 1),
            "mib_median_last_third": round(statistics.median(own[-third:]), 1),
            "mib_max": round(max(own), 1),
        }
    return found
