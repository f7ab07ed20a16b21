"""The attention of one draft layer on the device, grouped or latent.

Rotations are one complex multiplication of neighbouring numbers: the rows of query and key weights are brought into
that order at load (latent attention's are in it already), which no score notices.

Latent attention is absorbed: the cache holds what DeepSeek's holds, ``kv_lora + rope`` numbers a position (1.1 KB in
bfloat16 for Kimi-K2.5, where expanded keys and values are 49 KB), and queries go into that space. Only prompts are read
with expanded keys and values, a few heads at a time: many rows share their cost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from drafter.device.memory import SPLIT, PlaneShape
from drafter.device.rows import PaddedRows
from drafter.head.config import HeadConfig, MlaShape
from drafter.head.weights import AttentionWeights, GqaWeights, MlaWeights
from drafter.rope import rope_attention_scale, rope_tables

__all__ = ["MAX_SHORT_ROWS", "DeviceAttention", "build_device_attention", "turn_table"]

# Rows per request up to which scores of a whole batch are one product; longer stretches go request by request.
MAX_SHORT_ROWS = 16
_EXPANDED_HEADS = 16

Put = Callable[[torch.Tensor], torch.Tensor]


class DeviceAttention(Protocol):
    """One layer's attention. output: [H, Hq * Dv]."""

    shape: PlaneShape
    output: torch.Tensor
    output_bias: torch.Tensor | None

    def project(self, x: torch.Tensor, rows: PaddedRows, layer: int) -> torch.Tensor:  # [B, R, in] -> [B, R, Hq, D]
        """Rotated queries; what the rows add to the memory is written."""
        ...

    def attend(
        self, queries: torch.Tensor, rows: PaddedRows, layer: int
    ) -> torch.Tensor:  # [B, R, Hq, D] -> [B, R, Hq * Dv]
        """Every row over what it sees of its own request's memory."""
        ...


def build_device_attention(
    config: HeadConfig, weights: AttentionWeights, put: Put, *, num_layers: int
) -> DeviceAttention:
    """Bring one layer's attention to the device; ``put`` converts a tensor and copies it there."""
    if isinstance(weights, MlaWeights):
        assert config.mla is not None
        return _Latent(config, config.mla, weights, put, num_layers)
    return _Grouped(config, weights, put, num_layers)


def turn_table(config: HeadConfig, *, num_positions: int) -> torch.Tensor:
    """[num_positions, rotary / 2] complex64, on the CPU."""
    rotary = config.head_dim if config.mla is None else config.mla.qk_rope_head_dim
    if config.mla is not None and not config.mla.is_rotated:
        return torch.ones(num_positions, rotary // 2, dtype=torch.complex64)
    return torch.complex(*rope_tables(config.rope, rotary_dim=rotary, num_positions=num_positions))


class _Grouped:
    def __init__(self, config: HeadConfig, weights: GqaWeights, put: Put, num_layers: int) -> None:
        self.shape = PlaneShape(
            num_layers=num_layers, num_planes=2, num_heads=config.num_kv_heads, width=config.head_dim
        )
        self._num_heads, self._eps, self._scale = config.num_heads, config.rms_norm_eps, config.head_dim**-0.5
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        rows = torch.arange(queries + 2 * keys)
        half = config.head_dim // 2
        # Half-split rotation pairs number i with i + half; neighbours instead.
        pairs = torch.arange(config.head_dim).view(2, half).T.flatten()
        rows[: queries + keys] = rows[: queries + keys].view(-1, config.head_dim)[:, pairs].flatten()
        self._qkv = put(torch.cat((weights.q, weights.k, weights.v))[rows])
        self._bias = None if weights.qkv_bias is None else put(weights.qkv_bias[rows])
        self._q_norm = None if weights.q_norm is None else put(weights.q_norm[pairs])
        self._k_norm = None if weights.k_norm is None else put(weights.k_norm[pairs])
        self.output = put(weights.o)
        self.output_bias = None if weights.o_bias is None else put(weights.o_bias)

    def project(self, x: torch.Tensor, rows: PaddedRows, layer: int) -> torch.Tensor:
        """See DeviceAttention."""
        width, heads = self.shape.width, self._num_heads
        qkv = torch.unflatten(F.linear(x, self._qkv, self._bias), 2, (-1, width))
        first_value = heads + self.shape.num_heads
        turned = qkv[:, :, :first_value]
        if self._q_norm is not None and self._k_norm is not None:
            queries = F.rms_norm(qkv[:, :, :heads], (width,), self._q_norm, self._eps)
            turned = torch.cat(
                (queries, F.rms_norm(qkv[:, :, heads:first_value], (width,), self._k_norm, self._eps)), 2
            )
        turned = _turn(turned, rows.turns)
        rows.write(layer, torch.cat((turned[:, :, heads:], qkv[:, :, first_value:]), dim=2))
        return turned[:, :, :heads]

    def attend(self, queries: torch.Tensor, rows: PaddedRows, layer: int) -> torch.Tensor:
        """See DeviceAttention."""
        keys, values = rows.memory[layer]
        if rows.num_rows <= MAX_SHORT_ROWS:
            return _attend_short(queries, keys, values, rows.is_hidden, self._scale).flatten(2)
        assert len(queries) == 1
        groups = self._num_heads // self.shape.num_heads
        seen = rows.num_seen
        # A group's queries share keys and values: as heads of one batch entry per key head, without a copy.
        split = torch.unflatten(queries[0], 1, (-1, groups)).permute(1, 2, 0, 3)
        out = F.scaled_dot_product_attention(
            split,
            keys[0, :, None, :seen].expand(-1, groups, -1, -1),
            values[0, :, None, :seen].expand(-1, groups, -1, -1),
            attn_mask=~rows.is_hidden[:, None, :, :seen],
            scale=self._scale,
        )
        return out.permute(2, 0, 1, 3).reshape(1, rows.num_rows, -1)


class _Latent:
    def __init__(self, config: HeadConfig, mla: MlaShape, weights: MlaWeights, put: Put, num_layers: int) -> None:
        self.shape = PlaneShape(
            num_layers=num_layers, num_planes=1, num_heads=1, width=mla.kv_lora_rank + mla.qk_rope_head_dim
        )
        self._mla, self._num_heads, self._eps = mla, config.num_heads, config.rms_norm_eps
        nope = mla.qk_nope_head_dim
        self._scale = rope_attention_scale(config.rope) * (nope + mla.qk_rope_head_dim) ** -0.5
        # Queries' and latents' first projections read the same rows: one product.
        self._down = put(torch.cat((weights.q_b if weights.q_a is None else weights.q_a, weights.kv_a)))
        self._q_a_norm = None if weights.q_a_norm is None else put(weights.q_a_norm)
        self._q_b = None if weights.q_a is None else put(weights.q_b)
        self._kv_a_norm = put(weights.kv_a_norm)
        expand = weights.kv_b.view(config.num_heads, nope + mla.v_head_dim, mla.kv_lora_rank)
        self._to_keys, self._to_values = put(expand[:, :nope]), put(expand[:, nope:])
        self.output = put(weights.o)
        self.output_bias: torch.Tensor | None = None

    def project(self, x: torch.Tensor, rows: PaddedRows, layer: int) -> torch.Tensor:
        """See DeviceAttention."""
        mla = self._mla
        down = F.linear(x, self._down)
        queries = down[..., : -self.shape.width]
        if self._q_b is not None and self._q_a_norm is not None:
            queries = F.linear(F.rms_norm(queries, self._q_a_norm.shape, self._q_a_norm, self._eps), self._q_b)
        queries = torch.unflatten(queries, 2, (self._num_heads, -1))
        latents = down[..., -self.shape.width :].unsqueeze(2)
        normed = F.rms_norm(latents[..., : mla.kv_lora_rank], self._kv_a_norm.shape, self._kv_a_norm, self._eps)
        rows.write(layer, torch.cat((normed, _turn(latents[..., mla.kv_lora_rank :], rows.turns)), dim=3))
        nope = mla.qk_nope_head_dim
        return torch.cat((queries[..., :nope], _turn(queries[..., nope:], rows.turns)), dim=3)

    def attend(self, queries: torch.Tensor, rows: PaddedRows, layer: int) -> torch.Tensor:
        """See DeviceAttention."""
        memory = rows.memory[layer, 0]
        if rows.num_rows > MAX_SHORT_ROWS:
            assert len(queries) == 1
            return self._attend_expanded(queries, memory[0, 0, : rows.num_seen], ~rows.is_hidden[0, :, : rows.num_seen])
        nope = self._mla.qk_nope_head_dim
        absorbed = _per_head(queries[..., :nope], self._to_keys)
        queries = torch.cat((absorbed, queries[..., nope:]), dim=3)
        mixed = _attend_short(queries, memory, memory[..., : self._mla.kv_lora_rank], rows.is_hidden, self._scale)
        return _per_head(mixed, self._to_values.transpose(1, 2)).flatten(2)

    def _attend_expanded(
        self, queries: torch.Tensor, memory: torch.Tensor, is_seen: torch.Tensor
    ) -> torch.Tensor:  # [1, R, heads, nope + rope], [T, lora + rope], [R, T] -> [1, R, heads * v]
        latents, turned = memory[:, : self._mla.kv_lora_rank], memory[:, self._mla.kv_lora_rank :]
        parts = []
        for first in range(0, self._num_heads, _EXPANDED_HEADS):
            heads = slice(first, first + _EXPANDED_HEADS)
            expanded = torch.matmul(latents, self._to_keys[heads].transpose(1, 2))
            keys = torch.cat((expanded, turned.expand(len(expanded), -1, -1)), dim=2)
            values = torch.matmul(latents, self._to_values[heads].transpose(1, 2))
            out = F.scaled_dot_product_attention(
                queries[:, :, heads].transpose(1, 2), keys[None], values[None], attn_mask=is_seen, scale=self._scale
            )
            parts.append(out.transpose(1, 2))
        return torch.cat(parts, dim=2).flatten(2)


def _turn(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:  # [B, R, heads, D], [B, R, 1, D / 2]
    """Rotate neighbouring numbers, in float32."""
    wide = x.to(torch.float32, memory_format=torch.contiguous_format)
    pairs = torch.view_as_complex(torch.unflatten(wide, 3, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(3).to(x.dtype)


def _per_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # [B, R, heads, m], [heads, m, n] -> [.., n]
    batch, rows, heads, _ = x.shape
    return torch.bmm(x.flatten(0, 1).transpose(0, 1), weight).transpose(0, 1).view(batch, rows, heads, -1)


def _attend_short(
    queries: torch.Tensor,  # [B, R, Hq, D]
    keys: torch.Tensor,  # [B, H, T, D]
    values: torch.Tensor,  # [B, H, T, Dv]
    is_hidden: torch.Tensor,  # [B, R, T]
    scale: float,
) -> torch.Tensor:  # [B, R, Hq, Dv]
    """A whole batch in three launches. Scores and sums are float32 whatever the weights are.

    The sum over positions is cut into pieces of SPLIT: as one product it would keep few of a GPU's processors busy.
    """
    batch, rows, num_q_heads, _ = queries.shape
    heads, capacity = keys.shape[1:3]
    groups = num_q_heads // heads
    grouped = torch.unflatten(queries * scale, 2, (heads, groups)).transpose(1, 2)
    flat = grouped.reshape(batch * heads, rows * groups, -1)
    scores = _product(flat, keys.flatten(0, 1).transpose(1, 2)).view(batch, heads, rows, groups, capacity)
    scores.masked_fill_(is_hidden[:, None, :, None], -torch.inf)
    probs = scores.softmax(dim=4)
    pieces = max(1, capacity // SPLIT) if capacity % SPLIT == 0 else 1
    probs = probs.view(batch * heads, rows * groups, pieces, -1).transpose(1, 2).to(values.dtype).flatten(0, 1)
    split = torch.unflatten(values.flatten(0, 1), 1, (pieces, -1)).flatten(0, 1)
    out = _product(probs, split).view(batch, heads, pieces, rows, groups, -1)
    out = out.sum(dim=2, dtype=torch.float32) if pieces > 1 else out.squeeze(2)
    return out.to(values.dtype).transpose(1, 2).reshape(batch, rows, num_q_heads, -1)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Batched product in float32; only CUDA can do that without converting its operands first."""
    if a.dtype == torch.float32:
        return torch.bmm(a, b)
    if a.is_cuda:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())
