"""The noise is Gumbel, depends on nothing but (seed, position, id), and never changes between versions."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.noise import gumbel_noise

EULER_GAMMA = 0.5772156649015329


def _chi_square_limit(degrees: int, sigmas: float = 4.0) -> float:
    """Upper limit of a chi-square variable, by the Wilson-Hilferty approximation: exceeded once in about 30,000."""
    return degrees * (1 - 2 / (9 * degrees) + sigmas * math.sqrt(2 / (9 * degrees))) ** 3


# Changing any of these changes every seeded answer ever given: a new seed contract, not a refactoring.
GOLDEN: dict[tuple[int, int, int], float] = {
    (0, 0, 0): -0.6016784145199809,
    (0, 0, 1): 0.09884165168562259,
    (0, 1, 0): -0.46353750131921656,
    (1, 0, 0): -0.41780764655969854,
    (42, 17, 49151): -0.14626206863896873,
    (9223372036854775807, 8191, 151935): -1.1252254803145556,
}


def _splitmix(z: int) -> int:
    mask = 2**64 - 1
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def _reference(seed: int, position: int, token_id: int) -> float:
    """The documented formula in plain integers."""
    mask, gamma = 2**64 - 1, 0x9E3779B97F4A7C15
    key = _splitmix((seed + gamma) & mask)
    key = _splitmix(key ^ ((position * gamma + 0x94D049BB133111EB) & mask))
    bits = _splitmix(((token_id + 1) * gamma + key) & mask)
    return -math.log(-math.log(((bits >> 11) + 0.5) * 2.0**-53))


@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**40), token_id=st.integers(0, 2**40))
def test_equals_the_formula_in_plain_integers(seed: int, position: int, token_id: int) -> None:
    noise = gumbel_noise(seed, position, np.array([token_id]))
    assert noise[0] == pytest.approx(_reference(seed, position, token_id), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(("key", "value"), GOLDEN.items())
def test_golden_values(key: tuple[int, int, int], value: float) -> None:
    seed, position, token_id = key
    assert gumbel_noise(seed, position, np.array([token_id]))[0] == pytest.approx(value, rel=1e-12)


@given(
    seed=st.integers(0, 2**63 - 1),
    position=st.integers(0, 10**6),
    ids=st.lists(st.integers(0, 10**6), min_size=1, max_size=50),
)
def test_an_id_gets_the_same_noise_in_any_company(seed: int, position: int, ids: list[int]) -> None:
    together = gumbel_noise(seed, position, np.array(ids))
    alone = [gumbel_noise(seed, position, np.array([token_id]))[0] for token_id in ids]
    assert together.tolist() == alone


def test_arguments_are_not_changed() -> None:
    ids = np.arange(100)
    gumbel_noise(3, 4, ids)
    assert (ids == np.arange(100)).all()


def test_no_ids_give_no_noise() -> None:
    assert gumbel_noise(1, 2, np.empty(0, dtype=np.int64)).shape == (0,)


@pytest.mark.parametrize("axis", ["token_id", "position", "seed"])
def test_mean_variance_and_shape_along_every_argument(axis: str) -> None:
    n = 20_000
    if axis == "token_id":
        noise = gumbel_noise(11, 5, np.arange(n))
    else:
        values = [gumbel_noise(*((11, i) if axis == "position" else (i, 11)), np.array([7]))[0] for i in range(n)]
        noise = np.array(values)
    assert np.isfinite(noise).all()
    spread = math.pi / math.sqrt(6)
    assert abs(noise.mean() - EULER_GAMMA) < 4 * spread / math.sqrt(n)
    # Var of the sample variance of a Gumbel: kurtosis 5.4.
    assert abs(noise.var() - spread**2) < 4 * spread**2 * math.sqrt(4.4 / n)
    # Kolmogorov-Smirnov against exp(-exp(-x)); 2.2/sqrt(n) is exceeded once in about 8,000.
    uniform = np.sort(np.exp(-np.exp(-noise)))
    distance = np.abs(uniform - (np.arange(n) + 0.5) / n).max()
    assert distance < 2.2 / math.sqrt(n)


@pytest.mark.parametrize("step", [(1, 0), (0, 1), (1, 1), (1, -1)])
def test_neighbouring_keys_are_not_correlated(step: tuple[int, int]) -> None:
    ids = np.arange(20_000)
    left, right = gumbel_noise(100, 100, ids), gumbel_noise(100 + step[0], 100 + step[1], ids)
    assert abs(np.corrcoef(left, right)[0, 1]) < 4 / math.sqrt(len(ids))
    assert abs(np.corrcoef(left[:-1], left[1:])[0, 1]) < 4 / math.sqrt(len(ids))


@pytest.mark.parametrize("axis", ["position", "seed"])
def test_argmax_draws_follow_the_softmax(axis: str) -> None:
    logits = np.log(np.array([0.4, 0.25, 0.15, 0.1, 0.06, 0.04]))
    n, ids = 20_000, np.arange(6)
    counts = np.zeros(6)
    for i in range(n):
        seed, position = (9, i) if axis == "position" else (i, 9)
        counts[(logits + gumbel_noise(seed, position, ids)).argmax()] += 1
    expected = np.exp(logits) * n
    assert ((counts - expected) ** 2 / expected).sum() < _chi_square_limit(5)


def test_successive_draws_are_independent() -> None:
    # Contingency table of (draw at p, draw at p + 1) over a uniform toy vocabulary.
    ids, n = np.arange(4), 20_000
    draws = [int(gumbel_noise(1234, p, ids).argmax()) for p in range(n)]
    table = np.zeros((4, 4))
    for left, right in itertools.pairwise(draws):
        table[left, right] += 1
    expected = table.sum(1, keepdims=True) * table.sum(0, keepdims=True) / table.sum()
    assert ((table - expected) ** 2 / expected).sum() < _chi_square_limit(9)
