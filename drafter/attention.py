"""The attention of one draft layer, brought into the shape the row kernels know: one [q | k | v] row per slot.

Latent attention (DeepSeek, Kimi) becomes plain multi-head attention at load, by three exact rearrangements of weights:

- A head's q and k have ``nope`` unrotated and ``rope`` rotated numbers, the latter as interleaved pairs. Scores are
  sums in any order, so rows are permuted to [even rope | half of nope | odd rope | other half of nope]; the kernel's
  half-split rotation with angle 0 for the nope numbers is then exactly the original one.
- Values are shorter than keys; they get zeros behind, and o_proj zero columns there.
- Yarn's factor on the scores goes into the query weights.

The cache holds expanded keys and values, not latents: right, but larger than an absorbed implementation's.
"""

from __future__ import annotations

from typing import Protocol

import torch

from cpukernels.ports import AttentionShape, Kernels, PackedWeight
from drafter.head.config import HeadConfig, MlaShape
from drafter.head.weights import AttentionWeights, GqaWeights, MlaWeights
from drafter.rope import rope_attention_scale, rope_tables

__all__ = ["Attention", "build_attention"]


class Attention(Protocol):
    """One layer's projections. ``cos`` and ``sin``: [positions, D / 2]; ``output``: [H, Hq * D]."""

    shape: AttentionShape
    cos: torch.Tensor
    sin: torch.Tensor
    output: PackedWeight
    output_bias: torch.Tensor | None

    def project(self, x: torch.Tensor) -> torch.Tensor:  # [M, in] -> [M, (Hq + 2 Hkv) * D]
        """Queries, keys and values of every row, not rotated yet."""
        ...


def build_attention(
    config: HeadConfig, weights: AttentionWeights, kernels: Kernels, *, num_positions: int
) -> Attention:
    """Pack one layer's attention for ``num_positions`` positions."""
    if isinstance(weights, MlaWeights):
        assert config.mla is not None
        return _LatentAttention(config, config.mla, weights, kernels, num_positions)
    return _GroupedAttention(config, weights, kernels, num_positions)


class _GroupedAttention:
    def __init__(self, config: HeadConfig, weights: GqaWeights, kernels: Kernels, num_positions: int) -> None:
        self.shape = AttentionShape(
            num_q_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim
        )
        self.cos, self.sin = rope_tables(config.rope, rotary_dim=config.head_dim, num_positions=num_positions)
        self.output = kernels.pack(weights.o)
        self.output_bias = weights.o_bias
        self._kernels = kernels
        self._eps = config.rms_norm_eps
        self._qkv = kernels.pack(torch.cat((weights.q, weights.k, weights.v)))
        self._bias = weights.qkv_bias
        self._q_norm, self._k_norm = weights.q_norm, weights.k_norm

    def project(self, x: torch.Tensor) -> torch.Tensor:  # [M, in] -> [M, (Hq + 2 Hkv) * D]
        """See Attention.project."""
        qkv = self._kernels.linear(x, self._qkv)
        if self._bias is not None:
            qkv += self._bias
        first_key = self.shape.num_q_heads
        if self._q_norm is not None:
            self._normalise(qkv, 0, first_key, self._q_norm)
        if self._k_norm is not None:
            self._normalise(qkv, first_key, first_key + self.shape.num_kv_heads, self._k_norm)
        return qkv

    def _normalise(self, qkv: torch.Tensor, first: int, last: int, weight: torch.Tensor) -> None:
        heads = qkv.view(len(qkv), -1, self.shape.head_dim)[:, first:last]
        flat = heads.reshape(-1, self.shape.head_dim)
        heads.copy_(self._kernels.rms_norm(flat, weight, self._eps).view(heads.shape))


class _LatentAttention:
    def __init__(
        self, config: HeadConfig, mla: MlaShape, weights: MlaWeights, kernels: Kernels, num_positions: int
    ) -> None:
        heads, dim = config.num_heads, mla.qk_nope_head_dim + mla.qk_rope_head_dim
        self.shape = AttentionShape(num_q_heads=heads, num_kv_heads=heads, head_dim=dim)
        self.cos, self.sin = _latent_tables(config, mla, num_positions)
        self.output_bias: torch.Tensor | None = None
        self._mla, self._kernels, self._eps = mla, kernels, config.rms_norm_eps
        order = _head_order(mla)
        queries = weights.q_b.view(heads, dim, -1)[:, order] * rope_attention_scale(config.rope)
        self._q_b = kernels.pack(queries.reshape(heads * dim, -1))
        self._q_a = None if weights.q_a is None else kernels.pack(weights.q_a)
        self._q_a_norm = weights.q_a_norm
        self._kv_a = kernels.pack(weights.kv_a)
        self._kv_a_norm = weights.kv_a_norm
        self._kv_b = kernels.pack(weights.kv_b)
        # Where the permuted key finds its numbers in [nope | rope].
        self._order = order
        padded = torch.zeros(config.hidden_size, heads, dim)
        padded[:, :, : mla.v_head_dim] = weights.o.view(-1, heads, mla.v_head_dim)
        self.output = kernels.pack(padded.view(config.hidden_size, -1))

    def project(self, x: torch.Tensor) -> torch.Tensor:  # [M, in] -> [M, 3 * heads * D]
        """See Attention.project."""
        rows, heads, mla = len(x), self.shape.num_q_heads, self._mla
        linear, norm = self._kernels.linear, self._kernels.rms_norm
        latent = x
        if self._q_a is not None and self._q_a_norm is not None:
            latent = norm(linear(x, self._q_a), self._q_a_norm, self._eps)
        out = torch.zeros(rows, 3, heads, self.shape.head_dim)
        out[:, 0] = linear(latent, self._q_b).view(rows, heads, -1)
        compressed = linear(x, self._kv_a)
        expanded = linear(norm(compressed[:, : mla.kv_lora_rank], self._kv_a_norm, self._eps), self._kv_b)
        expanded = expanded.view(rows, heads, -1)
        rotated = compressed[:, None, mla.kv_lora_rank :].expand(-1, heads, -1)
        out[:, 1] = torch.cat((expanded[:, :, : mla.qk_nope_head_dim], rotated), dim=2)[:, :, self._order]
        out[:, 2, :, : mla.v_head_dim] = expanded[:, :, mla.qk_nope_head_dim :]
        return out.view(rows, -1)


def _head_order(mla: MlaShape) -> torch.Tensor:  # [nope + rope] indexes into [nope | rope]
    nope, rope, half = mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.qk_nope_head_dim // 2
    even = torch.arange(nope, nope + rope, 2)
    return torch.cat((even, torch.arange(half), even + 1, torch.arange(half, nope)))


def _latent_tables(config: HeadConfig, mla: MlaShape, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    half = (mla.qk_nope_head_dim + mla.qk_rope_head_dim) // 2
    cos, sin = torch.ones(num_positions, half), torch.zeros(num_positions, half)
    if mla.is_rotated:
        rotated = mla.qk_rope_head_dim // 2
        cos[:, :rotated], sin[:, :rotated] = rope_tables(
            config.rope, rotary_dim=mla.qk_rope_head_dim, num_positions=num_positions
        )
    return cos, sin
