"""A loaded head: the one record that every layout becomes, fp32 on the CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from drafter.head.config import HeadConfig

__all__ = ["AttentionWeights", "GqaWeights", "HeadWeights", "LayerWeights", "MlaWeights"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GqaWeights:
    """Grouped-query attention; biases and q/k norms where the head has them.

    q, k, v: [heads * D, in], in = 2H at layer 0 and H above; o: [H, Hq * D].
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor
    qkv_bias: torch.Tensor | None  # [(Hq + 2 Hkv) * D]
    o_bias: torch.Tensor | None  # [H]
    q_norm: torch.Tensor | None  # [D]
    k_norm: torch.Tensor | None  # [D]


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaWeights:
    """Multi-head latent attention. Without q_a, q_b takes the layer's input itself."""

    q_a: torch.Tensor | None  # [q_lora, in]
    q_a_norm: torch.Tensor | None  # [q_lora]
    q_b: torch.Tensor  # [heads * (nope + rope), q_lora or in]
    kv_a: torch.Tensor  # [kv_lora + rope, in]
    kv_a_norm: torch.Tensor  # [kv_lora]
    kv_b: torch.Tensor  # [heads * (nope + v), kv_lora]
    o: torch.Tensor  # [H, heads * v]


AttentionWeights = GqaWeights | MlaWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One decoder layer."""

    input_layernorm: torch.Tensor  # [H]
    post_attention_layernorm: torch.Tensor  # [H]
    attention: AttentionWeights
    gate: torch.Tensor  # [I, H]
    up: torch.Tensor  # [I, H]
    down: torch.Tensor  # [H, I]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadWeights:
    """Everything the draft forward needs.

    Fields:
        config: with aux_layer_ids resolved where they could be.
        head_format: what the file was, for people, e.g. "speculators, 2 layers".
        fc_norms: one [Ht] per aux layer, or empty; input_norm: [F] over all features, or None.
        fc: [H, F], F = number of aux layers * the target's hidden size.
        hidden_norm: [H], of layer 0.
        embedding: [V, H] in the dtype it was stored in (rows are converted when gathered).
        target_ids: [draft vocab] int64, the target's id of each draft id.
    """

    config: HeadConfig
    head_format: str
    fc: torch.Tensor
    fc_norms: tuple[torch.Tensor, ...]
    input_norm: torch.Tensor | None
    hidden_norm: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    lm_head: torch.Tensor  # [draft vocab, H]
    embedding: torch.Tensor
    target_ids: torch.Tensor

    @property
    def feature_size(self) -> int:
        """F: numbers per position that the target must send."""
        return self.fc.shape[1]
