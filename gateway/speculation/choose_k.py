"""Which K, from measured costs and expected acceptance.

A stream of its own uses the K with the greatest E(K) / C(K). All candidates are scanned: costs are staircases, so a
search that stops at the first decline would miss the far end of a step.

In a batch that speculates anyway, one more draft token of one stream lengthens everybody's round by slope / B, which
costs the fleet B * rate * slope / B tokens, with ``rate`` its delivered tokens per second and stream. So a stream's K
is the one with the greatest

    E(K) - rate * slope * K          tokens a round; K = 0 included

and that gives the batch the greatest expected delivered tokens per second (Dinkelbach's form of the ratio, greedy on
survival per marginal cost).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway.speculation.costs import CostTable

__all__ = [
    "Choice",
    "choose_for_batch",
    "choose_num_draft_tokens",
    "promising_num_draft_tokens",
]

_KEEP = 0.01  # the K in use stays unless another is better by this share: flat optima would flicker


@dataclass(frozen=True, slots=True)
class Choice:
    """The best K >= 1 and its expected delivered tokens per second."""

    num_draft_tokens: int
    tok_per_s: float


def choose_num_draft_tokens(
    costs: CostTable, expected: Sequence[float], candidates: Sequence[int], *, current: int
) -> Choice | None:
    """The measured candidate with the greatest E(K) / C(K).

    Args:
        expected: E(K) of the first candidates; the rest are too long now.
        current: the K in use, which wins near ties; 0 = none. Any other must win by its standard error.

    Returns:
        None if none of them is measured.
    """
    best, best_score, best_rate = 0, 0.0, 0.0
    for k, tokens in zip(candidates, expected, strict=False):
        believed = costs.believed(k)
        if believed is None:
            continue
        seconds, error_s = believed
        rate = tokens / seconds
        score = rate * (1.0 + _KEEP) if k == current else tokens / (seconds + error_s)
        if score > best_score:
            best, best_score, best_rate = k, score, rate
    return Choice(best, best_rate) if best else None


def choose_for_batch(
    expected: Sequence[float], candidates: Sequence[int], *, tokens_per_draft: float, current: int
) -> int:
    """One stream's K in a batch that speculates, 0 included.

    Args:
        tokens_per_draft: what a draft token costs the fleet, rate * slope.
        current: the K in use, which wins near ties.
    """
    best, best_score = 0, 1.0 + (_KEEP if current == 0 else 0.0)
    for k, tokens in zip(candidates, expected, strict=False):
        score = tokens - tokens_per_draft * k + (_KEEP * tokens if k == current else 0.0)
        if score > best_score:
            best, best_score = k, score
    return best


def promising_num_draft_tokens(
    seconds: Callable[[int], float | None],
    expected: Sequence[float],
    candidates: Sequence[int],
    *,
    above_tok_per_s: float,
    current: int,
) -> int | None:
    """The K that would be best if costs were as low as ``seconds`` says, when that beats ``above_tok_per_s``.

    ``current`` is no news and left out. Optimism corrects itself: what it picks is measured and then known, while a K
    whose first samples were unlucky is not written off.
    """
    wanted, wanted_rate = None, above_tok_per_s
    for k, tokens in zip(candidates, expected, strict=False):
        low_s = seconds(k) if k != current else None
        if low_s is not None and tokens / low_s > wanted_rate:
            wanted, wanted_rate = k, tokens / low_s
    return wanted
