"""RoPE tables for the served length: default, linear, llama3 and yarn scaling."""

from __future__ import annotations

import math

import torch

from drafter.errors import HeadConfigError
from drafter.head.config import RopeSettings

__all__ = ["rope_attention_scale", "rope_tables"]


def rope_tables(settings: RopeSettings, *, rotary_dim: int, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each [num_positions, rotary_dim / 2] float32, for the half-split convention.

    Raises:
        HeadConfigError: a number of the scaling is missing.
    """
    inverse = _inverse_frequencies(settings, rotary_dim)
    angles = torch.arange(num_positions, dtype=torch.float64)[:, None] * inverse[None, :]
    scale = _table_scale(settings)
    return (angles.cos() * scale).to(torch.float32), (angles.sin() * scale).to(torch.float32)


def rope_attention_scale(settings: RopeSettings) -> float:
    """Extra factor on attention scores of latent-attention models with yarn (DeepSeek's ``mscale_all_dim``)."""
    all_dim = settings.scaling.get("mscale_all_dim", 0.0)
    if settings.kind != "yarn" or not all_dim:
        return 1.0
    return _mscale(_number(settings, "factor"), all_dim) ** 2


def _inverse_frequencies(settings: RopeSettings, dim: int) -> torch.Tensor:  # [dim / 2] float64
    inverse = settings.theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    match settings.kind:
        case "default":
            return inverse
        case "linear":
            return inverse / _number(settings, "factor")
        case "llama3":
            return _llama3(settings, inverse)
        case "yarn":
            return _yarn(settings, inverse, dim)


def _llama3(settings: RopeSettings, inverse: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are stretched by ``factor``, short ones kept, those between interpolated."""
    factor, original = _number(settings, "factor"), _number(settings, "original_max_position_embeddings")
    low, high = _number(settings, "low_freq_factor"), _number(settings, "high_freq_factor")
    wavelength = 2 * math.pi / inverse
    smooth = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * inverse / factor + smooth * inverse


def _yarn(settings: RopeSettings, inverse: torch.Tensor, dim: int) -> torch.Tensor:
    """Peng et al. 2023 (arXiv 2309.00071): a ramp over the dimensions between extrapolation and interpolation."""
    factor, original = _number(settings, "factor"), _number(settings, "original_max_position_embeddings")
    fast, slow = settings.scaling.get("beta_fast", 32.0), settings.scaling.get("beta_slow", 1.0)

    def dimension_of(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(settings.theta))

    low, high = max(math.floor(dimension_of(fast)), 0), min(math.ceil(dimension_of(slow)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 0.001)).clamp(0, 1)
    return inverse / factor * ramp + inverse * (1 - ramp)


def _table_scale(settings: RopeSettings) -> float:
    if settings.kind != "yarn":
        return 1.0
    scaling, factor = settings.scaling, _number(settings, "factor")
    if "attention_factor" in scaling:
        return scaling["attention_factor"]
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return _mscale(factor, scaling["mscale"]) / _mscale(factor, scaling["mscale_all_dim"])
    return _mscale(factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _number(settings: RopeSettings, key: str) -> float:
    if key not in settings.scaling:
        raise HeadConfigError(f"rope_parameters.{key}", f"is missing, {settings.kind} scaling needs it")
    return settings.scaling[key]
