"""Moving small host arrays to the device and picking rows there, without ever waiting for the device.

``tensor[list]``, ``torch.tensor(..., device=...)`` and a copy from pageable memory wait until the device has done all
that was launched before: in the middle of a pass they cost what is left of it, and with the overlap scheduler a whole
step. From pinned memory a copy is only queued.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["pick_rows", "put_rows", "to_device"]


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array as a tensor on ``device``; the copy is queued, not awaited."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def pick_rows(rows: torch.Tensor, index: Sequence[int]) -> torch.Tensor:
    """``rows[index]``; a view where the indices are consecutive.

    Args:
        rows: [R, ...]. index: [N] ascending, N >= 1.
    """
    if index[-1] - index[0] + 1 == len(index):
        return rows[index[0] : index[-1] + 1]
    return rows.index_select(0, to_device(np.array(index, dtype=np.int64), rows.device))


def put_rows(rows: torch.Tensor, index: Sequence[int], values: torch.Tensor) -> None:
    """``rows[index] = values``, converted to the type of ``rows``."""
    values = values.to(rows.dtype)
    if index[-1] - index[0] + 1 == len(index):
        rows[index[0] : index[-1] + 1] = values
    else:
        rows.index_copy_(0, to_device(np.array(index, dtype=np.int64), rows.device), values)
