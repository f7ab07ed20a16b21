"""The target's forward pass over ragged rows: any mix of requests and row counts in one pass over the weights."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open

from cpukernels.kv_cache import KvCache
from cpukernels.ports import AttentionShape, Kernels, PackedWeight, RaggedRows
from verifier.embedded.architecture import Architecture, read_architecture, rope_tables
from verifier.embedded.errors import ModelNotFound, UnsupportedModel

__all__ = ["TargetModel", "load_target"]

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    input_norm: torch.Tensor
    qkv: PackedWeight
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: PackedWeight
    output_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: PackedWeight
    down: PackedWeight


class TargetModel:
    """Weights and forward pass of one decoder, fp32 on the CPU.

    Not thread-safe: one engine thread owns it.
    """

    def __init__(
        self,
        architecture: Architecture,
        kernels: Kernels,
        layers: Sequence[_Layer],
        *,
        embedding: torch.Tensor,  # [V, H]
        final_norm: torch.Tensor,  # [H]
        lm_head: PackedWeight,  # [V, H]
        aux_layer_ids: tuple[int, ...],
        context_len: int,
    ) -> None:
        self.architecture = architecture
        self.context_len = context_len
        self.aux_layer_ids = aux_layer_ids
        self.kernels = kernels
        self._layers = layers
        self._embedding = embedding
        self._final_norm = final_norm
        self._lm_head = lm_head
        self._shape = AttentionShape(
            num_q_heads=architecture.num_q_heads,
            num_kv_heads=architecture.num_kv_heads,
            head_dim=architecture.head_dim,
        )
        self._cos, self._sin = rope_tables(architecture, context_len)

    @property
    def feature_size(self) -> int:
        """Numbers per position in the drafter's features: three hidden states side by side."""
        return len(self.aux_layer_ids) * self.architecture.hidden_size

    @property
    def num_weight_bytes(self) -> int:
        """Bytes a pass must read at least once: all layers and the output head."""
        packed = [
            self._lm_head,
            *(w for layer in self._layers for w in (layer.qkv, layer.output, layer.gate_up, layer.down)),
        ]
        return sum(weight.nbytes for weight in packed)

    def new_cache(self) -> KvCache:
        """An empty cache for one request."""
        return KvCache(
            num_layers=self.architecture.num_layers,
            num_kv_heads=self.architecture.num_kv_heads,
            head_dim=self.architecture.head_dim,
        )

    def with_aux_layers(self, aux_layer_ids: tuple[int, ...]) -> TargetModel:
        """The same weights, emitting the inputs of other layers; for checking a head's convention."""
        other = copy.copy(self)
        other.aux_layer_ids = aux_layer_ids
        return other

    def forward(
        self, input_ids: npt.NDArray[np.int64], rows: RaggedRows
    ) -> tuple[torch.Tensor, npt.NDArray[np.float32]]:
        """Run all layers over M rows and write their keys and values into the rows' caches.

        Args:
            input_ids: [M] token ids, one per row.
            rows: whose rows these are; positions below context_len.

        Returns:
            hidden [M, H], the residual stream after the last layer, before the final norm; and
            features [M, 3H], the inputs of the layers ``aux_layer_ids`` in that order, low to high.
        """
        kernels, eps = self.kernels, self.architecture.rms_norm_eps
        hidden = self._embedding[torch.from_numpy(input_ids)]
        width = self.architecture.hidden_size
        features = np.empty((len(input_ids), self.feature_size), dtype=np.float32)
        for index, layer in enumerate(self._layers):
            if index in self.aux_layer_ids:
                column = self.aux_layer_ids.index(index) * width
                features[:, column : column + width] = hidden.numpy()
            qkv = kernels.linear(kernels.rms_norm(hidden, layer.input_norm, eps), layer.qkv)
            self._finish_qkv(qkv, layer)
            kernels.rope_append(qkv, rows, index, self._shape, self._cos, self._sin)
            attended = kernels.attention(qkv, rows, index, self._shape)
            kernels.linear_add(attended, layer.output, hidden)
            if layer.output_bias is not None:
                hidden += layer.output_bias
            gate_up = kernels.linear(kernels.rms_norm(hidden, layer.post_norm, eps), layer.gate_up)
            kernels.linear_add(kernels.silu_mul(gate_up), layer.down, hidden)
        return hidden, features

    def logits(self, hidden: torch.Tensor) -> npt.NDArray[np.float32]:  # [R, H] -> [R, V]
        """Raw logits of some rows of ``forward``'s hidden states."""
        normed = self.kernels.rms_norm(hidden, self._final_norm, self.architecture.rms_norm_eps)
        logits: npt.NDArray[np.float32] = self.kernels.linear(normed, self._lm_head).numpy()
        return logits

    def _finish_qkv(self, qkv: torch.Tensor, layer: _Layer) -> None:  # [M, qkv_size], in place
        if layer.qkv_bias is not None:
            qkv += layer.qkv_bias
        if layer.q_norm is not None and layer.k_norm is not None:  # Qwen3 normalises every head before rotating
            heads = qkv.view(qkv.shape[0], -1, self._shape.head_dim)
            num_q, num_k = self._shape.num_q_heads, self._shape.num_kv_heads
            eps = self.architecture.rms_norm_eps
            for part, weight in ((slice(0, num_q), layer.q_norm), (slice(num_q, num_q + num_k), layer.k_norm)):
                flat = heads[:, part].reshape(-1, self._shape.head_dim)
                heads[:, part] = self.kernels.rms_norm(flat, weight, eps).view(qkv.shape[0], -1, self._shape.head_dim)


def load_target(
    model_dir: Path,
    *,
    kernels: Kernels,
    aux_layer_ids: tuple[int, ...] = (),
    context_len: int = 0,
    progress: Progress,
) -> TargetModel:
    """Read a Hugging Face directory.

    Args:
        aux_layer_ids: layers whose inputs are the features; empty = (2, n // 2, n - 3) as EAGLE-3 trains with.
        context_len: 0 = what config.json says; more than that is refused.

    Raises:
        ModelNotFound: a file or tensor is missing. UnsupportedModel: see read_architecture.
    """
    architecture = read_architecture(model_dir)
    layers_n = architecture.num_layers
    # The EAGLE-3 rule names three layers only from seven on; toy targets take first, middle and last.
    default = (2, layers_n // 2, layers_n - 3) if layers_n >= 7 else (0, layers_n // 2, layers_n - 1)
    aux = aux_layer_ids or default
    if any(not 0 <= i < layers_n for i in aux) or len(set(aux)) != len(aux):
        raise UnsupportedModel(f"aux layers {aux} must be three different layers of {layers_n}")
    if context_len > architecture.context_len:
        raise UnsupportedModel(f"context_len {context_len} is over the model's {architecture.context_len}")
    tensors = _Tensors(model_dir)
    layers = []
    for index in range(layers_n):
        progress("loading target", index / layers_n)
        layers.append(_load_layer(tensors, f"model.layers.{index}.", kernels))
    embedding = tensors.get("model.embed_tokens.weight")
    is_tied = architecture.is_tied or not tensors.has("lm_head.weight")
    head = embedding if is_tied else tensors.get("lm_head.weight")
    model = TargetModel(
        architecture,
        kernels,
        layers,
        embedding=embedding,
        final_norm=tensors.get("model.norm.weight"),
        lm_head=kernels.pack(head),
        aux_layer_ids=aux,
        context_len=context_len or architecture.context_len,
    )
    progress("loading target", 1.0)
    return model


def _load_layer(tensors: _Tensors, prefix: str, kernels: Kernels) -> _Layer:
    def stacked(names: Sequence[str], suffix: str) -> torch.Tensor:
        return torch.cat([tensors.get(f"{prefix}{name}.{suffix}") for name in names])

    projections = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    has_bias = tensors.has(f"{prefix}self_attn.q_proj.bias")
    return _Layer(
        input_norm=tensors.get(prefix + "input_layernorm.weight"),
        qkv=kernels.pack(stacked(projections, "weight")),
        qkv_bias=stacked(projections, "bias") if has_bias else None,
        q_norm=tensors.find(prefix + "self_attn.q_norm.weight"),
        k_norm=tensors.find(prefix + "self_attn.k_norm.weight"),
        output=kernels.pack(tensors.get(prefix + "self_attn.o_proj.weight")),
        output_bias=tensors.find(prefix + "self_attn.o_proj.bias"),
        post_norm=tensors.get(prefix + "post_attention_layernorm.weight"),
        gate_up=kernels.pack(stacked(("mlp.gate_proj", "mlp.up_proj"), "weight")),
        down=kernels.pack(tensors.get(prefix + "mlp.down_proj.weight")),
    )


class _Tensors:
    """Tensors of a directory by name, from one safetensors file or a sharded index."""

    def __init__(self, model_dir: Path) -> None:
        index = model_dir / "model.safetensors.index.json"
        names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else None
        self._files: dict[str, Any] = {}
        for name in names or ["model.safetensors"]:
            if not (model_dir / name).is_file():
                raise ModelNotFound(f"{model_dir.name} holds no {name}")
            opened: Any = safe_open(model_dir / name, framework="pt")
            self._files.update(dict.fromkeys(opened.keys(), opened))

    def has(self, name: str) -> bool:
        return name in self._files

    def find(self, name: str) -> torch.Tensor | None:
        return self.get(name) if name in self._files else None

    def get(self, name: str) -> torch.Tensor:
        if name not in self._files:
            raise ModelNotFound(f"the weights hold no tensor {name}")
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor.to(torch.float32).contiguous()
