"""The draft model's forward on the device: R rows of each of B requests, padded. drafter/model.py says what a slot is.

Nothing here waits for the device or asks it for a value, so a whole chain can be queued, or captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from drafter.device.attention import DeviceAttention, build_device_attention, turn_table
from drafter.device.memory import PlaneShape
from drafter.device.rows import PaddedRows, padded_rows
from drafter.head.config import HeadConfig
from drafter.head.weights import HeadWeights, LayerWeights

__all__ = ["DeviceModel"]

# Padding behind a request's rows may reach beyond its last position.
_SPARE_POSITIONS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    input_layernorm: torch.Tensor
    post_attention_layernorm: torch.Tensor
    attention: DeviceAttention
    gate_up: torch.Tensor
    down: torch.Tensor


class DeviceModel:
    """A head on ``device`` in ``dtype``. Stateless: memory belongs to the requests."""

    def __init__(self, head: HeadWeights, *, device: torch.device, dtype: torch.dtype, num_positions: int) -> None:
        self.config: HeadConfig = head.config
        self.feature_size = head.feature_size
        self.num_positions = num_positions
        self.device, self.dtype = device, dtype
        self._fc = self._put(head.fc)
        self._fc_norms = [self._put(norm) for norm in head.fc_norms]
        self._input_norm = None if head.input_norm is None else self._put(head.input_norm)
        self._hidden_norm, self._norm = self._put(head.hidden_norm), self._put(head.norm)
        self._layers = [self._put_layer(layer, len(head.layers)) for layer in head.layers]
        self._lm_head = self._put(head.lm_head)
        self._embedding = self._put(head.embedding)
        self.target_ids = head.target_ids.to(device)
        is_whole = bool((head.target_ids == torch.arange(len(head.target_ids))).all())
        self._ids = None if is_whole else self.target_ids
        self._turns = turn_table(head.config, num_positions=num_positions + _SPARE_POSITIONS).to(device)

    def _put(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.dtype).to(self.device).contiguous()

    def _put_layer(self, layer: LayerWeights, num_layers: int) -> _Layer:
        return _Layer(
            input_layernorm=self._put(layer.input_layernorm),
            post_attention_layernorm=self._put(layer.post_attention_layernorm),
            attention=build_device_attention(self.config, layer.attention, self._put, num_layers=num_layers),
            gate_up=torch.cat((self._put(layer.gate), self._put(layer.up))),
            down=self._put(layer.down),
        )

    @property
    def vocab_size(self) -> int:
        """Target ids this model can embed."""
        return self._embedding.shape[0]

    @property
    def plane_shape(self) -> PlaneShape:
        """What a cache holds."""
        return self._layers[0].attention.shape

    def rows_at(self, memory: torch.Tensor, positions: torch.Tensor, *, num_seen: int) -> PaddedRows:
        """Rows at ``positions`` [B, R] of a window over caches."""
        return padded_rows(memory, positions, self._turns, num_seen=num_seen)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:  # [B, R, F] -> [B, R, H]
        """The target's features to the layer's hidden size."""
        features = features.to(self.dtype)
        if self._fc_norms:
            chunks = features.chunk(len(self._fc_norms), dim=2)
            norms = zip(chunks, self._fc_norms, strict=True)
            features = torch.cat([self._norm_of(chunk, weight) for chunk, weight in norms], dim=2)
        if self._input_norm is not None:
            features = self._norm_of(features, self._input_norm)
        return F.linear(features, self._fc)

    def read(self, hidden: torch.Tensor, token_ids: torch.Tensor, rows: PaddedRows) -> None:  # [B, R, H], [B, R]
        """Only write all rows' keys and values."""
        x, residual = self._enter(hidden, token_ids)
        for index, layer in enumerate(self._layers):
            if index > 0:
                x = self._norm_of(residual, layer.input_layernorm)
            queries = layer.attention.project(x, rows, index)
            if index < len(self._layers) - 1:
                residual = self._finish(layer, layer.attention.attend(queries, rows, index), residual)

    def forward(
        self,
        hidden: torch.Tensor,  # [B, R, H]
        token_ids: torch.Tensor,  # [B, R]
        rows: PaddedRows,
        last: torch.Tensor | None,  # [B]
    ) -> torch.Tensor:  # [B, H]
        """Write all rows' keys and values; return the state before the final norm of each request's row ``last``.

        Args:
            hidden: fused features, or the fed-back states of a chain step; not changed.
            last: which row; None where there is only one.
        """
        x, residual = self._enter(hidden, token_ids)
        for index, layer in enumerate(self._layers):
            if index > 0:
                x = self._norm_of(residual, layer.input_layernorm)
            queries = layer.attention.project(x, rows, index)
            if index == len(self._layers) - 1 and last is not None:
                each = torch.arange(len(last), device=last.device)
                queries, residual = queries[each, last].unsqueeze(1), residual[each, last].unsqueeze(1)
                rows = replace(
                    rows,
                    positions=rows.positions.gather(1, last[:, None]),
                    is_hidden=rows.is_hidden[each, last].unsqueeze(1),
                )
            residual = self._finish(layer, layer.attention.attend(queries, rows, index), residual)
        return residual.squeeze(1)

    def guess(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # [B, H] -> [B, draft vocab], [B, H]
        """Logits over the draft vocabulary, and what the next chain step is fed."""
        normed = self._norm_of(states, self._norm)
        return F.linear(normed, self._lm_head), normed if self.config.feeds_back_normed else states

    def best_ids(self, logits: torch.Tensor) -> torch.Tensor:  # [B, draft vocab] -> [B]
        """The target's ids of the likeliest."""
        best = logits.argmax(dim=1)
        return best if self._ids is None else self._ids[best]

    def _enter(self, hidden: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        embedded = F.embedding(token_ids, self._embedding)
        normed = self._norm_of(hidden, self._hidden_norm)
        x = torch.cat((self._norm_of(embedded, self._layers[0].input_layernorm), normed), dim=2)
        return x, normed if self.config.norm_before_residual else hidden

    def _finish(self, layer: _Layer, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        residual = residual + F.linear(attended, layer.attention.output, layer.attention.output_bias)
        gate, up = F.linear(self._norm_of(residual, layer.post_attention_layernorm), layer.gate_up).chunk(2, dim=2)
        return residual + F.linear(F.silu(gate) * up, layer.down)

    def _norm_of(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)
