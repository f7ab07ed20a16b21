"""Is a change a gain, or noise? Pure.

A trial's score is the geometric mean, over its series, of what is to be large: plain tok/s and verify passes per
second, raised to the objective's exponents. Base and changed settings are started in turn, so each changed trial has a
base trial beside it; an experiment's gain is the median of ln(score_changed / score_base) over these pairs.

One start differs from the next by sigma even with equal settings (placement of memory, clocks, other work). sigma is
estimated from everything known: the scatter of all trials of the same settings around each other, neighbours first, so
that a slow drift of the machine does not count as noise that pairing removes. The gain's standard error is then
sigma * sqrt(2 / pairs), or the pairs' own scatter if that is larger. A win needs a gain above min_gain whose two-sided
95 % interval (Student's t, with the degrees of freedom sigma has) lies above 0. "same" needs an interval that ends
before ``resolution``; a wider one around 0 is "undecided", and more repeats decide it.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from verifier.tuning.plan import Objective
from verifier.tuning.records import TrialResult

__all__ = ["Comparison", "agreement", "compare", "log_score", "metric_medians", "noise"]

# Two-sided 95 % points of Student's t by degrees of freedom; above the table the normal one is near enough.
_T95: Final = (
    12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
Metric = tuple[str, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What a series of pairs says.

    Fields:
        gain: relative, 0.05 = 5 % better. low, high: its 95 % interval. noise: sigma of one start, relative.
        by_metric: (metric, B, K) to the relative change of its median; tok/s up is good, verify ms down is good.
    """

    verdict: Literal["faster", "slower", "same", "undecided"]
    gain: float
    low: float
    high: float
    noise: float
    pairs: int
    by_metric: Mapping[Metric, float]


def metric_medians(result: TrialResult) -> dict[Metric, float]:
    """(metric, B, K) to the median of its values in one trial."""
    return {
        (series.metric, series.batch_size, series.num_draft_tokens): statistics.median(series.values)
        for series in result.series
    }


def log_score(result: TrialResult, objective: Objective) -> float:
    """ln of a trial's score; higher is better."""
    total, weights = 0.0, 0.0
    medians = metric_medians(result)
    for metric, sign, weight in (("plain_tok_per_s", 1.0, objective.plain), ("verify_ms", -1.0, objective.verify)):
        values = [value for (name, _, _), value in medians.items() if name == metric]
        if values and weight:
            total += weight * sign * statistics.fmean(math.log(value) for value in values)
            weights += weight
    return total / weights


def noise(groups: Sequence[Sequence[float]]) -> tuple[float, int]:
    """sigma of one trial's ln(score), and its degrees of freedom, from trials of equal settings in order of time.

    Differences of neighbours overlap, so n trials have 2 (n - 1)^2 / (3 n - 4) degrees of freedom (von Neumann), not
    n - 1.

    Args:
        groups: one list of ln(score) per setting; lists of one say nothing.
    """
    squares, count, degrees = 0.0, 0, 0.0
    for group in groups:
        for before, after in itertools.pairwise(group):
            squares += (after - before) ** 2 / 2.0
            count += 1
        if len(group) > 1:
            degrees += 2.0 * (len(group) - 1) ** 2 / (3 * len(group) - 4)
    return (math.sqrt(squares / count), max(1, int(degrees))) if count else (math.inf, 0)


def compare(
    base: Sequence[TrialResult],
    changed: Sequence[TrialResult],
    *,
    objective: Objective,
    sigma: float,
    degrees: int,
    min_gain: float,
    resolution: float,
) -> Comparison:
    """Judge pairs of trials; the i-th of ``base`` ran beside the i-th of ``changed``.

    Args:
        resolution: relative gain that must be told from none to say "same".
    """
    pairs = [
        log_score(after, objective) - log_score(before, objective) for before, after in zip(base, changed, strict=True)
    ]
    gain = statistics.median(pairs)
    own = statistics.stdev(pairs) / math.sqrt(len(pairs)) if len(pairs) > 1 else math.inf
    error = max(own, sigma * math.sqrt(2.0 / len(pairs))) if math.isfinite(sigma) else own
    freedom = max(1, min(degrees or len(pairs) - 1, len(_T95)))
    reach = _T95[freedom - 1] * error
    verdict: Literal["faster", "slower", "same", "undecided"] = "same"
    if gain - reach > 0.0 and gain >= math.log1p(min_gain):
        verdict = "faster"
    elif gain + reach < 0.0 and gain <= -math.log1p(min_gain):
        verdict = "slower"
    elif max(gain + reach, reach - gain) > math.log1p(resolution):
        verdict = "undecided"
    return Comparison(
        verdict=verdict,
        gain=math.expm1(gain),
        low=math.expm1(gain - reach),
        high=math.expm1(gain + reach) if reach < 50 else math.inf,
        noise=sigma,
        pairs=len(pairs),
        by_metric=_by_metric(base, changed),
    )


def agreement(answers: Sequence[Sequence[int]], answer: Sequence[int]) -> float:
    """Longest share of ``answer`` that begins like one of ``answers``; 1 if there is nothing to compare."""
    if not answer or not any(answers):
        return 1.0
    best = 0
    for other in answers:
        length = next((i for i, (a, b) in enumerate(zip(answer, other, strict=False)) if a != b), None)
        best = max(best, min(len(answer), len(other)) if length is None else length)
    return best / len(answer)


def _by_metric(base: Sequence[TrialResult], changed: Sequence[TrialResult]) -> dict[Metric, float]:
    before = [metric_medians(result) for result in base]
    after = [metric_medians(result) for result in changed]
    found = {}
    for metric in before[0]:
        ratios = [b[metric] / a[metric] for a, b in zip(before, after, strict=True) if metric in a and metric in b]
        if ratios:
            found[metric] = statistics.median(ratios) - 1.0
    return found
