"""Random ragged batches, and the attention they must give computed in float64 without any cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cpukernels.kv_cache import KvCache
from cpukernels.ports import AttentionShape, Kernels, RaggedRows, ragged_rows

MAX_POSITIONS = 600


def random(seed: int, *shape: int) -> torch.Tensor:
    """Standard normal float32."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rope_tables(head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, [MAX_POSITIONS, D/2]."""
    inverse = 10_000.0 ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(MAX_POSITIONS, dtype=torch.float64)[:, None] * inverse
    return angles.cos().float().contiguous(), angles.sin().float().contiguous()


def new_cache(shape: AttentionShape, *, num_layers: int = 2, capacity: int = 0) -> KvCache:
    """An empty cache of that shape."""
    return KvCache(num_layers=num_layers, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, capacity=capacity)


def run(
    kernels: Kernels,
    shape: AttentionShape,
    caches: Sequence[KvCache],
    qkvs: Sequence[torch.Tensor],
    *,
    layer: int = 0,
) -> list[torch.Tensor]:
    """One pass over new rows of every cache; returns each cache's attention output and advances it."""
    rows: RaggedRows = ragged_rows(caches, [len(qkv) for qkv in qkvs])
    cos, sin = rope_tables(shape.head_dim)
    qkv = torch.cat(list(qkvs)).clone()
    kernels.rope_append(qkv, rows, layer, shape, cos, sin)
    out = kernels.attention(qkv, rows, layer, shape)
    for cache, own in zip(caches, qkvs, strict=True):
        cache.length += len(own)
    return list(out.split([len(own) for own in qkvs]))


def plain_attention(shape: AttentionShape, qkv: torch.Tensor) -> torch.Tensor:
    """[T, (Hq + 2 Hkv) D] -> [T, Hq D]: rotary causal attention in float64, one position and head at a time."""
    num_q, num_kv, dim = shape.num_q_heads, shape.num_kv_heads, shape.head_dim
    heads = qkv.double().view(len(qkv), num_q + 2 * num_kv, dim)
    positions = torch.arange(len(qkv), dtype=torch.float64)[:, None]
    angles = positions * 10_000.0 ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)

    def rotate(x: torch.Tensor) -> torch.Tensor:  # [T, D]
        first, second = x[:, : dim // 2], x[:, dim // 2 :]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=1)

    out = torch.empty(len(qkv), num_q, dim, dtype=torch.float64)
    for head in range(num_q):
        kv_head = head // (num_q // num_kv)
        query, key = rotate(heads[:, head]), rotate(heads[:, num_q + kv_head])
        value = heads[:, num_q + num_kv + kv_head]
        scores = query @ key.T / dim**0.5
        future = torch.ones_like(scores, dtype=torch.bool).triu(1)
        out[:, head] = scores.masked_fill(future, float("-inf")).softmax(-1) @ value
    return out.reshape(len(qkv), -1)
