"""The draft model's forward over ragged rows: one row per slot, any number of requests in one pass, fp32 on the CPU.

Slot i holds the target's features of position i with the embedding of token i + 1, sits at RoPE position i, and
predicts token i + 2. A chain step is a slot whose features are replaced by the model's own state of the step before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cpukernels.kv_cache import KvCache
from cpukernels.ports import Kernels, PackedWeight, RaggedRows
from cpukernels.reference import TorchKernels
from drafter.attention import Attention, build_attention
from drafter.errors import UnsupportedHead
from drafter.head.config import HeadConfig
from drafter.head.weights import HeadWeights, LayerWeights

__all__ = ["DraftModel", "check_native_shape", "select_rows", "suitable_kernels"]

_LANES = 16
_MAX_NATIVE_HEAD_DIM = 256


def check_native_shape(head: HeadWeights) -> None:
    """Raise unless the native kernels can run this head.

    Raises:
        UnsupportedHead: a size is no multiple of 16, or the attention heads are too large.
    """
    config, sizes = head.config, {"hidden_size": head.config.hidden_size}
    sizes["intermediate_size"] = config.intermediate_size
    sizes["features"] = head.feature_size // max(1, len(head.fc_norms))
    head_dim = config.head_dim
    if config.mla is not None:
        head_dim = config.mla.qk_nope_head_dim + config.mla.qk_rope_head_dim
        sizes["kv_lora_rank"] = config.mla.kv_lora_rank
        sizes["q_lora_rank"] = config.mla.q_lora_rank
    sizes["head_dim"] = head_dim
    for name, size in sizes.items():
        if size % _LANES:
            raise UnsupportedHead(f"{name} {size} is no multiple of {_LANES}")
    if head_dim > _MAX_NATIVE_HEAD_DIM:
        raise UnsupportedHead(f"head_dim {head_dim} is more than {_MAX_NATIVE_HEAD_DIM}")


def suitable_kernels(kernels: Kernels, head: HeadWeights, warn: Callable[[str], None]) -> Kernels:
    """``kernels``, or the torch ones where this head doesn't fit the native ones."""
    if isinstance(kernels, TorchKernels):
        return kernels
    try:
        check_native_shape(head)
    except UnsupportedHead as error:
        warn(f"this head doesn't fit the native kernels, using torch: {error}")
        return TorchKernels()
    return kernels


def select_rows(rows: RaggedRows, wanted: npt.NDArray[np.int64]) -> RaggedRows:
    """Only the rows ``wanted``, at most one per cache and in their order."""
    owner = np.searchsorted(np.asarray(rows.starts), wanted, side="right") - 1
    return RaggedRows(
        caches=tuple(rows.caches[index] for index in owner),
        starts=tuple(range(len(wanted) + 1)),
        positions=np.ascontiguousarray(rows.positions[wanted]),
        lengths=np.ascontiguousarray(rows.lengths[wanted]),
        capacities=np.ascontiguousarray(rows.capacities[wanted]),
        key_ptrs=np.ascontiguousarray(rows.key_ptrs[:, wanted]),
        value_ptrs=np.ascontiguousarray(rows.value_ptrs[:, wanted]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    input_layernorm: torch.Tensor
    post_attention_layernorm: torch.Tensor
    attention: Attention
    gate_up: PackedWeight
    down: PackedWeight


class DraftModel:
    """A head with packed weights. Stateless: caches belong to the requests. Not thread-safe: one engine thread's."""

    def __init__(self, head: HeadWeights, kernels: Kernels, *, num_positions: int) -> None:
        self.head_format = head.head_format
        self.config: HeadConfig = head.config
        self.feature_size = head.feature_size
        self.target_ids: npt.NDArray[np.int64] = head.target_ids.numpy()
        self.num_positions = num_positions
        self._kernels = kernels
        self._embedding = head.embedding
        self._fc_norms, self._input_norm, self._fc = head.fc_norms, head.input_norm, kernels.pack(head.fc)
        self._hidden_norm, self._norm = head.hidden_norm, head.norm
        self._layers = [self._pack_layer(layer) for layer in head.layers]
        self._lm_head = kernels.pack(head.lm_head)

    def _pack_layer(self, layer: LayerWeights) -> _Layer:
        return _Layer(
            input_layernorm=layer.input_layernorm,
            post_attention_layernorm=layer.post_attention_layernorm,
            attention=build_attention(self.config, layer.attention, self._kernels, num_positions=self.num_positions),
            gate_up=self._kernels.pack(torch.cat((layer.gate, layer.up))),
            down=self._kernels.pack(layer.down),
        )

    @property
    def vocab_size(self) -> int:
        """Target ids this model can embed."""
        return self._embedding.shape[0]

    def new_cache(self) -> KvCache:
        """An empty cache of this model's shape."""
        shape = self._layers[0].attention.shape
        return KvCache(num_layers=len(self._layers), num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:  # [M, F] -> [M, H]
        """The target's features to the layer's hidden size. Only for target features, never for chain states."""
        eps = self.config.rms_norm_eps
        if self._fc_norms:
            chunks = features.chunk(len(self._fc_norms), dim=1)
            norms = zip(chunks, self._fc_norms, strict=True)
            features = torch.cat([self._kernels.rms_norm(chunk, weight, eps) for chunk, weight in norms], dim=1)
        if self._input_norm is not None:
            features = self._kernels.rms_norm(features, self._input_norm, eps)
        return self._kernels.linear(features, self._fc)

    def forward(
        self,
        hidden: torch.Tensor,  # [M, H]
        token_ids: torch.Tensor,  # [M] int64
        rows: RaggedRows,
        wanted: npt.NDArray[np.int64],  # [N], at most one row per request
    ) -> torch.Tensor:  # [N, H]
        """Write all rows' keys and values; return the state before the final norm of the rows ``wanted``.

        Args:
            hidden: fused features, or the fed-back states of a chain step; not changed.
            token_ids: the token after each slot's position.

        The last layer runs attention and MLP for ``wanted`` only: nothing else reads the other rows.
        """
        kernels, eps = self._kernels, self.config.rms_norm_eps
        embedded = self._embedding[token_ids].to(torch.float32)
        normed = kernels.rms_norm(hidden, self._hidden_norm, eps)
        residual = normed.clone() if self.config.norm_before_residual else hidden.clone()
        x = torch.cat((kernels.rms_norm(embedded, self._layers[0].input_layernorm, eps), normed), dim=1)
        for index, layer in enumerate(self._layers):
            attention = layer.attention
            if index > 0:
                x = kernels.rms_norm(residual, layer.input_layernorm, eps)
            qkv = attention.project(x)
            kernels.rope_append(qkv, rows, index, attention.shape, attention.cos, attention.sin)
            if index == len(self._layers) - 1 and len(wanted) < rows.num_rows:
                if len(wanted) == 0:
                    return residual[:0]
                chosen = torch.from_numpy(wanted)
                qkv, residual, rows = qkv[chosen], residual[chosen], select_rows(rows, wanted)
            kernels.linear_add(kernels.attention(qkv, rows, index, attention.shape), attention.output, residual)
            if attention.output_bias is not None:
                residual += attention.output_bias
            x = kernels.rms_norm(residual, layer.post_attention_layernorm, eps)
            kernels.linear_add(kernels.silu_mul(kernels.linear(x, layer.gate_up)), layer.down, residual)
        return residual

    def guess(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # [N, H] -> [N, draft vocab], [N, H]
        """Logits over the draft vocabulary, and what the next chain step is fed."""
        normed = self._kernels.rms_norm(states, self._norm, self.config.rms_norm_eps)
        logits = self._kernels.linear(normed, self._lm_head)
        return logits, normed if self.config.feeds_back_normed else states
