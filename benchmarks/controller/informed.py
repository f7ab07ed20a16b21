"""A bound on causal policies: told both levels of acceptance, how long they last and all costs, it must see changes.

One stream whose acceptance jumps between two levels at unknown times is a partially observed Markov decision process.
Its state is the belief b = P(good level) and whether the drafter is in step with the target. Actions and their cost:

    draft K, in step         C(K)                    a + 1 tokens, a = drafts accepted, seen
    draft K, not in step     t + resync              1 token, then in step
    plain                    t                       1 token, nothing seen
    shadow of K              n * t + shadow          n tokens until its first mismatch or end, a seen

Times between changes are taken as geometric with the trace's means, so the value iteration

    V(b, s) = min over actions of  cost + E[gamma^tokens * V(b', s')]        gamma = 1 - 1 / 2000

is two-dimensional. The table is optimal for such changes; on a trace with periodic ones a policy that also knew the
period could do better, but no controller may count on that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.controller.simulator import Plan, Step, StreamRound
from benchmarks.controller.workloads import CostModel, Workload

__all__ = ["Informed", "Regimes", "regimes_of"]

_GRID = 601
_MAX_LOGIT = 9.0
_PLAIN_STEP = 4  # plain tokens a move of the table: single ones move the belief by less than the grid can hold
_GAMMA = 1.0 - 1.0 / 2000.0
_SWEEPS = 1200
_SHADOW_K = 4

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Regimes:
    """Two levels of acceptance and the mean tokens that each lasts."""

    good: float
    bad: float
    good_tokens: float
    bad_tokens: float

    @property
    def share_good(self) -> float:
        """Of all tokens."""
        return self.good_tokens / (self.good_tokens + self.bad_tokens)

    def moved(self, belief: Floats, tokens: int) -> Floats:
        """P(good) after so many tokens in which nothing was seen."""
        stays = (1.0 - 1.0 / self.good_tokens - 1.0 / self.bad_tokens) ** tokens
        moved: Floats = self.share_good + (belief - self.share_good) * stays
        return moved

    def outcomes(self, belief: Floats, k: int) -> list[tuple[int, Floats, Floats]]:
        """For each number of accepted drafts: it, its probability, and P(good) given it, both per belief."""
        seen = []
        for accepted in range(k + 1):
            good = self.good**accepted * (1.0 - self.good if accepted < k else 1.0)
            bad = self.bad**accepted * (1.0 - self.bad if accepted < k else 1.0)
            chance = belief * good + (1.0 - belief) * bad
            seen.append((accepted, chance, belief * good / chance))
        return seen


def regimes_of(workload: Workload) -> Regimes | None:
    """The two levels of a workload and how long they last on average; None if it is not of that kind."""
    phases = workload.phases
    if any(phase.batch_size > 1 or phase.costs != phases[0].costs for phase in phases):
        return None
    visits = [(level, float(phase.tokens)) for phase in phases for level in phase.acceptance]
    if len(phases) == 1:
        visits = [(level, float(workload.answer_len)) for level in phases[0].acceptance]
    bad, good = min(visits)[0], max(visits)[0]
    if {level for level, _ in visits} != {bad, good} or bad == good:
        return None

    def mean_tokens(wanted: float) -> float:
        tokens = [count for level, count in visits if level == wanted]
        return sum(tokens) / len(tokens)

    return Regimes(good=good, bad=bad, good_tokens=mean_tokens(good), bad_tokens=mean_tokens(bad))


class Informed:
    """The best policy for ``regimes``, by value iteration. See Policy.

    Args:
        is_per_answer: the level belongs to the answer, so that each answer starts from the mean.
        sweeps: of the value iteration; the policy settles long before the values do.
    """

    def __init__(
        self,
        regimes: Regimes,
        costs: CostModel,
        candidates: tuple[int, ...],
        *,
        is_per_answer: bool,
        sweeps: int = _SWEEPS,
    ) -> None:
        self._regimes = regimes
        self._is_per_answer = is_per_answer
        self._grid = 1.0 / (1.0 + np.exp(-np.linspace(-_MAX_LOGIT, _MAX_LOGIT, _GRID)))
        self._actions: list[tuple[str, int]] = [
            ("plain", 0),
            ("shadow", _SHADOW_K),
            *(("draft", k) for k in candidates),
        ]
        self._best = self._solve(costs, sweeps)
        self._start()

    def _start(self) -> None:
        self._belief = np.array([self._regimes.share_good])
        self._is_synced = self._in_shadow = False
        self._request = 1
        self._last = self._switches = 0

    def fresh(self) -> Informed:
        """This one, ready for another run: its table is what takes time."""
        self._start()
        return self

    def _solve(self, costs: CostModel, sweeps: int) -> NDArray[np.int64]:
        """Best action per (not in step, in step) and belief."""
        plain = costs.plain_ms
        moves: list[list[tuple[Any, ...]]] = [[], []]
        once = self._gather(self._regimes.moved(self._grid, 1))
        rest = self._gather(self._regimes.moved(self._grid, _PLAIN_STEP))
        for name, k in self._actions:
            for synced in (0, 1):
                if name == "plain":
                    moves[synced].append((_PLAIN_STEP * plain, [(np.ones(_GRID), _PLAIN_STEP, rest, 0)]))
                elif name == "draft" and not synced:
                    moves[synced].append((plain + costs.resync_ms, [(np.ones(_GRID), 1, once, 1)]))
                else:
                    moves[synced].append(self._seen(name, k, costs))
        value = np.zeros((2, _GRID))
        best = np.zeros((2, _GRID), dtype=np.int64)
        for _ in range(sweeps):
            scores = np.array([[self._score(move, value) for move in moves[synced]] for synced in (0, 1)])
            best, value = scores.argmin(axis=1), scores.min(axis=1)
        return best

    def _seen(self, name: str, k: int, costs: CostModel) -> tuple[Any, ...]:
        branches, mean_tokens = [], np.zeros(_GRID)
        for accepted, chance, after in self._regimes.outcomes(self._grid, k):
            tokens = accepted + 1 if name == "draft" else min(accepted + 1, k) + 1
            branches.append((chance, tokens, self._gather(self._regimes.moved(after, tokens)), int(name == "draft")))
            mean_tokens += chance * tokens
        if name == "draft":
            return costs.step_ms(k, 1), branches
        return mean_tokens * costs.plain_ms + costs.shadow_ms, branches

    def _gather(self, belief: Floats) -> tuple[NDArray[np.int64], Floats]:
        inside = np.clip(belief, self._grid[0], self._grid[-1])
        place = (np.log(inside / (1.0 - inside)) / _MAX_LOGIT + 1.0) * (_GRID - 1) / 2.0
        low = np.clip(place.astype(np.int64), 0, _GRID - 2)
        part: Floats = place - low
        return low, part

    def _score(self, move: tuple[Any, ...], value: Floats) -> Floats:
        cost, branches = move
        total: Floats = np.zeros(_GRID) + cost
        for chance, tokens, (low, part), synced in branches:
            after = value[synced]
            total += chance * _GAMMA**tokens * (after[low] * (1.0 - part) + after[low + 1] * part)
        return total

    def plan(self, step: Step) -> list[Plan]:
        """See Policy."""
        stream = step.streams[0]
        if self._is_per_answer and stream.request != self._request:
            self._request = stream.request
            self._belief = np.array([self._regimes.share_good])
            self._is_synced = self._in_shadow = False
        name, k = self._actions[self._best[int(self._is_synced), self._gather(self._belief)[0][0]]]
        if self._in_shadow:
            name, k = "plain", 0
        self._in_shadow = self._in_shadow or name == "shadow"
        drafts = k if name == "draft" else 0
        self._switches += (drafts > 0) != (self._last > 0)
        self._last = drafts
        return [Plan(k, name == "shadow")]

    def observe(self, step: Step, rounds: list[StreamRound]) -> None:
        """See Policy."""
        done = rounds[0]
        if done.num_draft_tokens and not done.is_cut:
            self._see(done.num_draft_tokens, done.num_accepted_tokens)
        self._belief = self._regimes.moved(self._belief, done.num_committed_tokens)
        self._is_synced = done.num_draft_tokens > 0 or done.is_resync

    def observe_shadow(self, step: Step, index: int, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """See Policy."""
        self._in_shadow = False
        self._see(num_draft_tokens, num_accepted_tokens)

    def _see(self, k: int, accepted: int) -> None:
        self._belief = self._regimes.outcomes(self._belief, k)[accepted][2]

    @property
    def state(self) -> str:
        """See Policy."""
        return "ON" if self._last else "OFF"

    @property
    def num_switches(self) -> int:
        """See Policy."""
        return self._switches
