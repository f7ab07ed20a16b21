"""Finds the GPU that ``drafter.device`` names, and says what is wrong with it before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from drafter.errors import DeviceLost, OutOfDeviceMemory
from drafter.head.weights import GqaWeights, HeadWeights
from wire.settings import ConfigError

__all__ = ["check_room", "named_errors", "open_device", "weight_bytes"]

_KEY = "drafter.device"
_SPARE_BYTES = 256 << 20
_LEAST_CAPABILITY = (8, 0)  # the first with bfloat16 products


def open_device(name: str) -> torch.device:
    """The device called "cuda" or "cuda:N".

    Raises:
        ConfigError: no such GPU, or it can't multiply bfloat16.
    """
    if not torch.cuda.is_available():
        build = "this torch is built without CUDA" if torch.version.cuda is None else "torch sees no GPU"
        raise ConfigError(_KEY, f"is {name!r}, but {build}")
    index, count = int(name.partition(":")[2] or 0), torch.cuda.device_count()
    if index >= count:
        raise ConfigError(_KEY, f"is {name!r}, but there are only {count} GPUs, the last one is cuda:{count - 1}")
    if torch.cuda.get_device_capability(index) < _LEAST_CAPABILITY:
        raise ConfigError(_KEY, f"is {name!r}, but {torch.cuda.get_device_name(index)} has no bfloat16 products")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def weight_bytes(head: HeadWeights, dtype: torch.dtype) -> int:
    """Memory that the head's weights take."""
    tensors = [head.fc, head.embedding, head.lm_head]
    for layer in head.layers:
        tensors += [layer.gate, layer.up, layer.down, layer.attention.o]
        weights = layer.attention
        if isinstance(weights, GqaWeights):
            tensors += [weights.q, weights.k, weights.v]
        else:
            tensors += [weights.q_b, weights.kv_a, weights.kv_b, *([] if weights.q_a is None else [weights.q_a])]
    return sum(tensor.numel() for tensor in tensors) * dtype.itemsize


def check_room(head: HeadWeights, device: torch.device, dtype: torch.dtype) -> None:
    """Raise unless the weights, and a little for caches and workspaces, fit into what is free.

    Raises:
        OutOfDeviceMemory: with the numbers.
    """
    free, total = torch.cuda.mem_get_info(device)
    needed = weight_bytes(head, dtype) + _SPARE_BYTES
    if needed > free:
        raise OutOfDeviceMemory(
            f"the head needs {needed / 1e9:.1f} GB on {device}, {free / 1e9:.1f} of {total / 1e9:.1f} GB are free; "
            "leave it room (SGLang: --mem-fraction-static), or take another drafter.device"
        )


@contextmanager
def named_errors(device: torch.device) -> Iterator[None]:
    """Turn torch's errors into ours.

    Raises:
        OutOfDeviceMemory: allocating failed. DeviceLost: a kernel did.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfDeviceMemory(f"{device}: {_first_line(error)}") from error
    except torch.AcceleratorError as error:
        if "out of memory" in str(error):
            raise OutOfDeviceMemory(f"{device}: {_first_line(error)}") from error
        raise DeviceLost(f"{device}: {_first_line(error)}") from error
    except RuntimeError as error:
        # cuBLAS takes its workspace on its own, and says so when there is none.
        if "CUBLAS_STATUS_ALLOC_FAILED" in str(error):
            raise OutOfDeviceMemory(f"{device}: {_first_line(error)}") from error
        raise


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
