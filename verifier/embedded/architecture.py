"""Read a Hugging Face config.json into the numbers the forward pass needs; refuse what it would get wrong.

Covers decoders of the Llama family: llama, mistral, qwen2, qwen3. Whatever changes the maths
and is not implemented is an error, never ignored.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from verifier.embedded.errors import ModelNotFound, UnsupportedModel

__all__ = ["Architecture", "read_architecture", "rope_tables"]

_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_LANES = 16  # the kernels work on vectors of 16 floats
_MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Sizes and switches of one decoder.

    inverse_frequencies: [D/2], angle per position of each rotated pair.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    context_len: int
    is_tied: bool
    inverse_frequencies: tuple[float, ...]

    @property
    def qkv_size(self) -> int:
        """Columns of the fused query, key and value projection."""
        return (self.num_q_heads + 2 * self.num_kv_heads) * self.head_dim


def read_architecture(model_dir: Path) -> Architecture:
    """Parse config.json.

    Raises:
        ModelNotFound: no readable config.json. UnsupportedModel: it asks for something this engine does not compute.
    """
    try:
        config = json.loads((model_dir / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"config.json of {model_dir.name} can't be read: {error}") from None
    if not isinstance(config, dict):
        raise ModelNotFound(f"config.json of {model_dir.name} holds no object")
    model_type = config.get("model_type")
    if model_type not in _MODEL_TYPES:
        raise UnsupportedModel(f"model_type {model_type!r} is not one of {', '.join(_MODEL_TYPES)}")
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"hidden_act {config['hidden_act']!r}; only silu")
    if config.get("mlp_bias", False):
        raise UnsupportedModel("mlp_bias")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(f"partial_rotary_factor {config['partial_rotary_factor']!r}; only 1")
    try:
        heads = int(config["num_attention_heads"])
        head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
        architecture = Architecture(
            model_type=model_type,
            num_layers=int(config["num_hidden_layers"]),
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            num_q_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=head_dim,
            vocab_size=int(config["vocab_size"]),
            rms_norm_eps=float(config["rms_norm_eps"]),
            context_len=_context_len(config),
            is_tied=bool(config.get("tie_word_embeddings", False)),
            inverse_frequencies=tuple(_rope(config, head_dim).tolist()),
        )
    except KeyError as error:
        raise UnsupportedModel(f"config.json has no {error.args[0]!r}") from None
    except (TypeError, ValueError) as error:
        raise UnsupportedModel(f"config.json holds a value of the wrong type: {error}") from None
    for name in ("hidden_size", "intermediate_size", "head_dim"):
        if getattr(architecture, name) % _LANES:
            raise UnsupportedModel(f"{name} {getattr(architecture, name)} is not a multiple of {_LANES}")
    if architecture.head_dim > _MAX_HEAD_DIM:
        raise UnsupportedModel(f"head_dim {architecture.head_dim} is over {_MAX_HEAD_DIM}")
    if architecture.num_q_heads % architecture.num_kv_heads:
        raise UnsupportedModel(
            f"{architecture.num_q_heads} query heads do not share {architecture.num_kv_heads} evenly"
        )
    return architecture


def _context_len(config: dict[str, Any]) -> int:
    length = int(config["max_position_embeddings"])
    window = config.get("sliding_window")
    # Inside the window, sliding and full attention are the same; beyond it this engine would differ.
    if window is not None and config.get("use_sliding_window", config["model_type"] == "mistral"):
        return min(length, int(window))
    return length


def _rope(config: dict[str, Any], head_dim: int) -> torch.Tensor:
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    rope["rope_theta"] = theta
    default = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if kind == "default":
        return default
    if kind == "linear":
        return default / float(rope["factor"])
    if kind == "llama3":
        return _llama3(default, rope)
    raise UnsupportedModel(f"rope type {kind!r}; only default, linear and llama3")


def _llama3(inverse: torch.Tensor, rope: dict[str, Any]) -> torch.Tensor:
    # Llama 3.1: long wavelengths are stretched by ``factor``, short ones kept, those between interpolated.
    factor, original = float(rope["factor"]), float(rope["original_max_position_embeddings"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    wavelength = 2 * torch.pi / inverse
    smooth = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth) * inverse / factor + smooth * inverse


def rope_tables(architecture: Architecture, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine tables, each [num_positions, D/2] float32."""
    inverse = torch.tensor(architecture.inverse_frequencies, dtype=torch.float64)
    angles = torch.arange(num_positions, dtype=torch.float64)[:, None] * inverse[None, :]
    return angles.cos().float().contiguous(), angles.sin().float().contiguous()
