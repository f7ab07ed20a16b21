"""Counter-based Gumbel noise: a pure function of (seed, position, token id).

The target draws a token as argmax(logits / T + noise) over the ids that survive filtering, which is an exact draw from
the softmax (Gumbel-max). Because the noise of an id at a position never depends on how the position was reached, the
same seed gives the same text with speculation on or off, in any batch. The drafter may add the same noise to its own
logits: its guess then agrees with the target's draw more often, and the target's draw is not touched.

The hash is the finaliser of SplitMix64 (Steele, Lea & Flood 2014) applied to a Weyl sequence; position and seed are
mixed first, so that neighbouring positions have unrelated streams.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["gumbel_noise"]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * _MIX1
    z = (z ^ (z >> np.uint64(27))) * _MIX2
    return z ^ (z >> np.uint64(31))


def gumbel_noise(seed: int, position: int, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Standard Gumbel noise for each id.

    Args:
        seed: 0 <= seed < 2**64, from the request.
        position: index in prompt + output of the token being drawn.
        token_ids: [N] ids in the target's vocabulary.

    Returns:
        [N] float64, finite.
    """
    with np.errstate(over="ignore"):  # wrapping multiplication is the point
        key = _mix(np.array([seed], dtype=np.uint64) + _GAMMA)
        key = _mix(key ^ (np.array([position], dtype=np.uint64) * _GAMMA + _MIX2))
        bits = _mix(key + (token_ids.astype(np.uint64) + np.uint64(1)) * _GAMMA)
    # 53 random bits, centred in their cell so that neither 0 nor 1 can occur.
    uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return -np.log(-np.log(uniform))
