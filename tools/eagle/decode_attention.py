"""Attention of one query token a row over a ragged KV cache: a Triton kernel on a GPU, plain torch elsewhere.

The kernel reads each row's own length only. A masked SDPA reads the padded cache, three times as much in our runs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

__all__ = ["decode_attention", "decode_attention_reference"]

_KERNEL: Any = None


def _kernel() -> Any:
    """The compiled kernel; built on first use because CPU-only machines have no triton."""
    global _KERNEL
    if _KERNEL is None:
        from tools.eagle.decode_attention_triton import attend_rows

        _KERNEL = attend_rows
    return _KERNEL


def decode_attention(q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
    """Softmax attention of each row's single query over its first ``lengths`` cached positions.

    Args:
        q: [B, N, D]; query head n reads key-value head n // (N // M).
        keys: [B, M, T, D], contiguous; values likewise.
        lengths: [B] int64, at least 1.

    Returns:
        [B, N, D].
    """
    if not q.is_cuda:
        return decode_attention_reference(q, keys, values, lengths)
    rows, heads, dim = q.shape
    q = q.contiguous()
    out = torch.empty_like(q)
    group = heads // keys.shape[1]
    _kernel()[(rows, keys.shape[1])](
        q,
        keys,
        values,
        lengths,
        out,
        keys.shape[2],
        dim**-0.5,
        GROUP=group,
        KV_HEADS=keys.shape[1],
        DIM=dim,
        BLOCK=64,
        EXACT=q.dtype == torch.float32,
    )
    return out


def decode_attention_reference(q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
    """The same by masked scaled_dot_product_attention; exact in float32."""
    mask = torch.arange(keys.shape[2], device=q.device)[None, :] < lengths[:, None]  # [B, T]
    group = q.shape[1] // keys.shape[1]
    grouped = q.reshape(q.shape[0], keys.shape[1], group, q.shape[2])  # [B, M, group, D]
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask[:, None, None, :])
    return out.flatten(1, 2)
