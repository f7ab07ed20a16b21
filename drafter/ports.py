"""What the engine asks of the rest of the process: features, and something that computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from wire.messages import TensorRef
from wire.sampling import SamplingParams

__all__ = ["DraftCache", "DraftRunner", "DraftWish", "FeatureSource", "Stretch"]


class FeatureSource(Protocol):
    """Where references to features lead."""

    def read(self, ref: TensorRef) -> npt.NDArray[np.float32]:
        """A copy of the tensor, owned by the caller.

        Raises:
            StaleTensor: its data is gone. RingError: malformed reference.
        """
        ...


class DraftCache(Protocol):
    """A request's keys and values, wherever they are. ``length`` slots are valid; setting it lower rolls back."""

    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """The next slots of one request, from ``cache.length`` on.

    features: [n, F] float32 of the slots' positions, borrowed until the call returns.
    token_ids: [n], the token after each slot's position.
    """

    cache: DraftCache
    features: npt.NDArray[np.float32]
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftWish:
    """What a request wants drafted: at least one token, the first of them at ``position`` in prompt + output."""

    num_draft_tokens: int
    position: int
    sampling: SamplingParams


class DraftRunner(Protocol):
    """A head on some device, as the engine uses it. Not thread-safe: one engine thread's.

    feature_size: F, numbers per position that the target must send. vocab_size: target ids it can embed.
    num_positions: slots a cache may hold, chains included.
    """

    feature_size: int
    num_positions: int

    @property
    def vocab_size(self) -> int:
        """See above."""
        ...

    def new_cache(self) -> DraftCache:
        """An empty cache of this head's shape."""
        ...

    def read(self, stretch: Stretch) -> None:
        """Compute the stretch's keys and values, and count them in ``cache.length``.

        Raises:
            OutOfDeviceMemory: the caches that took part are of no use any more. DeviceLost: nor is this process.
        """
        ...

    def draft(self, stretches: Sequence[Stretch], wishes: Sequence[DraftWish]) -> list[list[int]]:
        """Target ids of one chain per request, all requests together.

        Args:
            stretches: at least one slot of each request. They are counted in ``cache.length``, the chain's own are not.
            wishes: one per stretch.

        Raises:
            OutOfDeviceMemory, DeviceLost: see ``read``.
        """
        ...
