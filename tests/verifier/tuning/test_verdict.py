"""Gain or noise: pure arithmetic over trial results."""

from __future__ import annotations

import math
import random

import pytest

from verifier.tuning.break_even import best_num_draft_tokens, draft_costs, expected_length
from verifier.tuning.plan import Objective
from verifier.tuning.records import Series, TrialResult
from verifier.tuning.verdict import agreement, compare, log_score, metric_medians, noise
from verifier.tuning.workload import rate_together

OBJECTIVE = Objective()


def trial(tok_per_s: float, verify_ms: float, *, batch_size: int = 1) -> TrialResult:
    series = (
        Series(metric="plain_tok_per_s", batch_size=batch_size, num_draft_tokens=0, values=(tok_per_s,)),
        Series(metric="verify_ms", batch_size=batch_size, num_draft_tokens=3, values=(verify_ms,)),
    )
    return TrialResult(outcome="measured", series=series)


def noisy(rng: random.Random, factor: float, sigma: float, count: int) -> list[TrialResult]:
    return [
        trial(80.0 * factor * math.exp(rng.gauss(0, sigma)), 30.0 / factor * math.exp(rng.gauss(0, sigma)))
        for _ in range(count)
    ]


def test_score_is_a_geometric_mean_in_which_both_directions_count() -> None:
    base = log_score(trial(80.0, 30.0), OBJECTIVE)
    assert log_score(trial(88.0, 30.0), OBJECTIVE) - base == pytest.approx(math.log(1.1) / 2)
    assert log_score(trial(80.0, 30.0 / 1.1), OBJECTIVE) - base == pytest.approx(math.log(1.1) / 2)
    only_plain = Objective(plain=1.0, verify=0.0)
    assert log_score(trial(88.0, 99.0), only_plain) == pytest.approx(math.log(88.0))


def test_noise_is_that_between_neighbours_so_drift_does_not_count() -> None:
    sigma, degrees = noise([[0.00, 0.01, 0.02, 0.03, 0.04]])
    assert sigma == pytest.approx(0.01 / math.sqrt(2))
    assert degrees == 2  # 2 * 16 / 11
    assert noise([[1.0], []]) == (math.inf, 0)


def judged(factor: float, sigma: float, seed: int, pairs: int = 3, known: int = 6) -> str:
    rng = random.Random(seed)
    base, changed = noisy(rng, 1.0, sigma, pairs), noisy(rng, factor, sigma, pairs)
    history = [log_score(each, OBJECTIVE) for each in noisy(rng, 1.0, sigma, known)]
    groups = [history, *([log_score(each, OBJECTIVE) for each in side] for side in (base, changed))]
    found, degrees = noise(groups)
    return compare(
        base, changed, objective=OBJECTIVE, sigma=found, degrees=degrees, min_gain=0.01, resolution=0.05
    ).verdict


def test_equal_settings_are_rarely_called_different() -> None:
    verdicts = [judged(1.0, 0.03, seed) for seed in range(400)]
    assert verdicts.count("faster") + verdicts.count("slower") < 400 * 0.06


@pytest.mark.parametrize(("factor", "verdict"), [(1.15, "faster"), (0.85, "slower")])
def test_a_difference_far_above_the_noise_is_found(factor: float, verdict: str) -> None:
    verdicts = [judged(factor, 0.02, seed) for seed in range(100)]
    assert verdicts.count(verdict) > 90


def test_noise_that_hides_the_answer_is_said() -> None:
    assert judged(1.0, 0.2, seed=1) == "undecided"
    assert judged(1.0, 0.005, seed=1) == "same"


def test_a_gain_below_the_least_is_none() -> None:
    base, changed = [trial(80.0, 30.0)] * 3, [trial(80.4, 29.9)] * 3
    found = compare(base, changed, objective=OBJECTIVE, sigma=1e-4, degrees=20, min_gain=0.01, resolution=0.05)
    assert found.verdict == "same"
    assert found.gain == pytest.approx(0.0042, abs=1e-3)


def test_details_say_what_moved() -> None:
    found = compare(
        [trial(80.0, 30.0)] * 2,
        [trial(88.0, 24.0)] * 2,
        objective=OBJECTIVE,
        sigma=0.001,
        degrees=5,
        min_gain=0.01,
        resolution=0.05,
    )
    assert found.by_metric["plain_tok_per_s", 1, 0] == pytest.approx(0.1)
    assert found.by_metric["verify_ms", 1, 3] == pytest.approx(-0.2)
    assert found.low < found.gain < found.high
    assert metric_medians(trial(1.0, 2.0))["verify_ms", 1, 3] == 2.0


def test_wrong_output_is_a_short_common_beginning() -> None:
    assert agreement([], [1, 2]) == 1.0
    assert agreement([[1, 2, 3, 4]], [1, 2, 3, 4]) == 1.0
    assert agreement([[1, 2, 9, 4], [1, 2, 3, 9]], [1, 2, 3, 4]) == 0.75
    assert agreement([[5, 6]], [1, 2]) == 0.0
    assert agreement([[1, 2]], []) == 1.0


def test_break_even_of_the_founding_case() -> None:
    (cost,) = draft_costs([trial(82.0, 30.0)])
    assert cost.break_even_length == pytest.approx(2.46)
    assert expected_length(3, 0.5) == 1.875
    assert cost.speedup(0.0) == pytest.approx(1 / 2.46)
    assert best_num_draft_tokens([cost], 0.3) == 0
    assert best_num_draft_tokens([cost], 0.9) == 3


def test_rate_counts_only_while_all_streams_run() -> None:
    assert rate_together([[0.0, 1.0, 2.0, 3.0]]) == 1.0
    assert rate_together([[0.0, 1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0, 5.0]]) == 2.0
    # The second got its place only when the first had ended.
    assert rate_together([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]) == 1.0
