"""The target as plain batched tensor code: features for training, KV-cached decoding for generation.

transformers would do, but training needs the inputs of three layers without keeping all thirty, and generation needs
one CUDA-graph-able step over thousands of ragged rows. A test holds this against transformers.
Shape letters: B rows, T positions, H hidden, N query heads, M key-value heads, D head dim, V vocabulary.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tools.eagle.decode_attention import decode_attention

__all__ = ["KVCache", "Target", "TargetConfig", "apply_rope", "load_target", "rope_tables", "save_weights"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetConfig:
    """The numbers of a Llama-style target that the code needs."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int

    @property
    def aux_layers(self) -> tuple[int, int, int]:
        """Layers whose INPUT is a feature: (2, n // 2, n - 3), i.e. transformers' hidden_states indices."""
        return 2, self.num_layers // 2, self.num_layers - 3


@dataclass(slots=True)
class KVCache:
    """Keys and values of all layers, [L, B, M, T, D] each, rows filled to their own length."""

    keys: Tensor
    values: Tensor

    @classmethod
    def empty(cls, config: TargetConfig, rows: int, max_len: int, like: Tensor) -> KVCache:
        """Room for ``rows`` sequences of ``max_len`` tokens, of ``like``'s dtype and device."""
        shape = (config.num_layers, rows, config.num_kv_heads, max_len, config.head_dim)
        return cls(keys=like.new_zeros(shape), values=like.new_zeros(shape))


def rope_tables(head_dim: int, theta: float, max_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, [max_len, D] float32, halves repeated as in transformers' Llama."""
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angles = torch.arange(max_len, device=device, dtype=torch.float32)[:, None] * frequencies[None, :]
    return torch.cat([angles.cos()] * 2, dim=-1), torch.cat([angles.sin()] * 2, dim=-1)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # x [..., D]; cos, sin broadcast to it
    """Rotates pairs (i, i + D/2) of the last axis; computes in the tables' dtype and returns x's."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


class Target:
    """A Llama target holding its weights on one device in one dtype."""

    def __init__(self, config: TargetConfig, weights: dict[str, Tensor], *, device: str, dtype: torch.dtype) -> None:
        self.config, self.device, self.dtype = config, torch.device(device), dtype
        get = {name.removeprefix("model."): w.to(self.device, dtype) for name, w in weights.items()}
        self.embed = get["embed_tokens.weight"]  # [V, H], also the output projection (tied)
        self.norm = get["norm.weight"]
        self.layers = [self._layer(get, i) for i in range(config.num_layers)]
        cos, sin = rope_tables(config.head_dim, config.rope_theta, config.max_position_embeddings, self.device)
        self.cos, self.sin = cos.to(dtype), sin.to(dtype)

    @staticmethod
    def _layer(get: dict[str, Tensor], index: int) -> dict[str, Tensor]:
        prefix = f"layers.{index}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        return {
            "norm1": get[prefix + "input_layernorm.weight"],
            "norm2": get[prefix + "post_attention_layernorm.weight"],
            "qkv": torch.cat([get[f"{attention}{x}_proj.weight"] for x in "qkv"]),
            "o": get[attention + "o_proj.weight"],
            "gate_up": torch.cat([get[mlp + "gate_proj.weight"], get[mlp + "up_proj.weight"]]),
            "down": get[mlp + "down_proj.weight"],
        }

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (self.config.hidden_size,), weight, self.config.rms_norm_eps)

    def _qkv(self, x: Tensor, layer: dict[str, Tensor], cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, H] -> q [B, N, T, D], k and v [B, M, T, D], rotated; cos and sin [B or 1, 1, T, D]."""
        c = self.config
        mixed = F.linear(self._norm(x, layer["norm1"]), layer["qkv"])
        heads = mixed.view(*mixed.shape[:-1], -1, c.head_dim).transpose(1, 2)
        q, rest = heads[:, : c.num_heads], heads[:, c.num_heads :]
        k, v = rest[:, : c.num_kv_heads], rest[:, c.num_kv_heads :]
        return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v

    def _mlp(self, x: Tensor, layer: dict[str, Tensor]) -> Tensor:
        gate, up = F.linear(self._norm(x, layer["norm2"]), layer["gate_up"]).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, layer["down"])

    def logits(self, hidden: Tensor) -> Tensor:  # [..., H] post-norm
        """Next-token logits over the full vocabulary, in the target's dtype."""
        return F.linear(hidden, self.embed)

    @torch.no_grad()
    def forward(
        self, ids: Tensor, cache: KVCache | None = None, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:  # ids [B, T]
        """Runs whole right-padded sequences from position 0 (causal, so the padding harms nothing before it).

        Args:
            ids: [B, T] int64 token ids.
            cache: If given, keys and values of all T positions are written to its rows ``rows`` [B].

        Returns:
            aux [B, T, 3H], the inputs of ``aux_layers`` low to high, and the post-norm hidden states [B, T, H].
        """
        steps = ids.shape[1]
        cos, sin = self.cos[None, None, :steps], self.sin[None, None, :steps]
        x, aux = F.embedding(ids, self.embed), []
        for index, layer in enumerate(self.layers):
            if index in self.config.aux_layers:
                aux.append(x)
            x, k, v = self._block(x, layer, cos, sin)
            if cache is not None:
                assert rows is not None
                cache.keys[index][rows, :, :steps] = k
                cache.values[index][rows, :, :steps] = v
        return torch.cat(aux, dim=-1), self._norm(x, self.norm)

    def _block(self, x: Tensor, layer: dict[str, Tensor], cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One layer over whole sequences; also returns its keys and values."""
        q, k, v = self._qkv(x, layer, cos, sin)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self._mlp(x + F.linear(attended.transpose(1, 2).flatten(2), layer["o"]), layer), k, v

    @torch.no_grad()
    def decode(self, tokens: Tensor, positions: Tensor, cache: KVCache) -> Tensor:  # [B], [B]
        """One token a row at its own position; writes its keys and values, returns post-norm hidden states [B, H]."""
        rows = torch.arange(tokens.shape[0], device=self.device)
        cos, sin = self.cos[positions][:, None, None], self.sin[positions][:, None, None]
        x = F.embedding(tokens, self.embed)[:, None]
        for index, layer in enumerate(self.layers):
            q, k, v = self._qkv(x, layer, cos, sin)
            cache.keys[index][rows, :, positions] = k[:, :, 0]
            cache.values[index][rows, :, positions] = v[:, :, 0]
            attended = decode_attention(q[:, :, 0], cache.keys[index], cache.values[index], positions + 1)
            x = self._mlp(x + F.linear(attended.flatten(1), layer["o"])[:, None], layer)
        return self._norm(x[:, 0], self.norm)


def _config_of(config: Any) -> TargetConfig:
    rope = getattr(config, "rope_parameters", None) or {"rope_theta": getattr(config, "rope_theta", 10_000.0)}
    return TargetConfig(
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        rope_theta=float(rope["rope_theta"]),
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
    )


def load_target(path: Path, *, device: str, dtype: torch.dtype) -> Target:
    """Loads a transformers folder, a GGUF file (dequantised by transformers) or a ``save_weights`` file."""
    if path.suffix == ".pt":
        saved = torch.load(path, weights_only=True)
        return Target(TargetConfig(**saved["config"]), saved["weights"], device=device, dtype=dtype)
    config, weights = _read_model(path)
    return Target(config, weights, device=device, dtype=dtype)


def _read_model(path: Path) -> tuple[TargetConfig, dict[str, Tensor]]:
    from transformers import AutoModelForCausalLM  # lazy: seconds to import, and the smoke runs don't need it

    folder, extra = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (path, {})
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, **extra)
    return _config_of(model.config), {n: t for n, t in model.state_dict().items() if n != "lm_head.weight"}


def save_weights(model: Path, out: Path) -> None:
    """Dequantises once, so that the many processes of a training session start in seconds."""
    config, weights = _read_model(model)
    torch.save({"config": asdict(config), "weights": weights}, out)


def main() -> None:
    """``python -m tools.eagle.target MODEL OUT.pt``."""
    save_weights(Path(sys.argv[1]), Path(sys.argv[2]))


if __name__ == "__main__":
    main()
