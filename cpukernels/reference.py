"""The same operations in plain torch: the fallback where there is no C compiler, and the reference in tests.

Not row-invariant: BLAS picks its kernel by the number of rows, so near ties may break differently between a verify
pass and plain decode.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from cpukernels.ports import AttentionShape, PackedWeight, RaggedRows

__all__ = ["TorchKernels"]


class TorchKernels:
    """Plain torch operations on the same cache layout."""

    name = "torch"
    is_row_invariant = False

    def pack(self, weight: torch.Tensor) -> PackedWeight:  # [N, K]
        """Row-major, as torch wants it."""
        weight = weight.detach().to(torch.float32).contiguous()
        return PackedWeight(data=weight, num_rows=weight.shape[0], num_columns=weight.shape[1])

    def linear(self, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:  # [M, K] -> [M, N]
        """See Kernels.linear."""
        return F.linear(x, weight.data)

    def linear_add(self, x: torch.Tensor, weight: PackedWeight, residual: torch.Tensor) -> None:  # [M, K], [M, N]
        """See Kernels.linear_add."""
        residual += F.linear(x, weight.data)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:  # [M, H] -> [M, H]
        """See Kernels.rms_norm."""
        return F.rms_norm(x, (x.shape[1],), weight, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:  # [M, 2I] -> [M, I]
        """See Kernels.silu_mul."""
        gate, up = gate_up.chunk(2, dim=1)
        return F.silu(gate) * up

    def rope_append(
        self,
        qkv: torch.Tensor,
        rows: RaggedRows,
        layer: int,
        shape: AttentionShape,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> None:
        """See Kernels.rope_append."""
        num_rotated = shape.num_q_heads + shape.num_kv_heads
        heads = qkv.view(rows.num_rows, -1, shape.head_dim)
        positions = torch.from_numpy(rows.positions)
        c, s = cos[positions][:, None, :], sin[positions][:, None, :]
        first, second = heads[:, :num_rotated].clone().chunk(2, dim=2)
        heads[:, :num_rotated] = torch.cat((first * c - second * s, second * c + first * s), dim=2)
        keys = heads[:, shape.num_q_heads : num_rotated]
        values = heads[:, num_rotated:]
        for index, cache in enumerate(rows.caches):
            for row in range(rows.starts[index], rows.starts[index + 1]):
                slot = int(rows.positions[row])
                cache.keys[layer, :, slot // 16, :, slot % 16] = keys[row]
                cache.values[layer, :, slot] = values[row]

    def attention(self, qkv: torch.Tensor, rows: RaggedRows, layer: int, shape: AttentionShape) -> torch.Tensor:
        """See Kernels.attention."""
        queries = qkv[:, : shape.num_q_heads * shape.head_dim].view(rows.num_rows, shape.num_q_heads, shape.head_dim)
        out = torch.empty(rows.num_rows, shape.num_q_heads, shape.head_dim)
        for index, cache in enumerate(rows.caches):
            begin, end = rows.starts[index], rows.starts[index + 1]
            if begin == end:
                continue
            length = int(rows.lengths[end - 1])
            keys = cache.keys[layer].transpose(2, 3).reshape(shape.num_kv_heads, -1, shape.head_dim)[:, :length]
            values = cache.values[layer, :, :length]
            mask = torch.arange(length)[None, :] < torch.from_numpy(rows.lengths[begin:end])[:, None]
            out[begin:end] = F.scaled_dot_product_attention(
                queries[begin:end].transpose(0, 1)[None],
                keys[None],
                values[None],
                attn_mask=mask,
                enable_gqa=True,
            )[0].transpose(0, 1)
        return out.reshape(rows.num_rows, -1)
