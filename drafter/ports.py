"""What the engine asks of the rest of the process."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from wire.messages import TensorRef

__all__ = ["FeatureSource"]


class FeatureSource(Protocol):
    """Where references to features lead."""

    def read(self, ref: TensorRef) -> npt.NDArray[np.float32]:
        """A copy of the tensor, owned by the caller.

        Raises:
            StaleTensor: its data is gone. RingError: malformed reference.
        """
        ...
