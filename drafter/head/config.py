"""What a head's config.json says, in one record whatever its dialect. Loads no torch: launchers read it too.

Two dialects: *flat* (SafeAILab, SpecForge, AngelSlim, NVIDIA) has the layer's fields at the top; *speculators* has them
in ``transformer_layer_config``. Traps this module is careful about:

- Aux layers. In ``eagle_config`` an id means the *output* of that layer, at the top level the *input*. The record
  counts inputs (0 = embedding), so nested ids get 1 added.
- RoPE base: the head's own, from ``rope_theta`` or ``rope_parameters``, 10000 if neither; never the target's.
- ``max_position_embeddings`` is often the training length; it is not read, tables are built for the served length.
- ``norm_output`` is read as the servers read it: feed the normed state to the next chain step. SpecForge's trainer uses
  the same key for something else, hence ``HeadOverrides.feeds_back_normed``.
- ``num_hidden_layers`` and ``architectures`` are often the target's; layers are counted in the tensors instead.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from drafter.errors import HeadConfigError, HeadFileError, UnsupportedHead

__all__ = [
    "HeadConfig",
    "HeadOverrides",
    "MlaShape",
    "RopeSettings",
    "apply_overrides",
    "default_aux_layer_ids",
    "parse_head_config",
    "read_head_config",
]

_ROPE_KINDS = {"default", "linear", "llama3", "yarn"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSettings:
    """How positions rotate queries and keys. ``scaling`` holds the numbers of ``kind``, as config.json names them."""

    theta: float
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    scaling: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaShape:
    """Sizes of multi-head latent attention (DeepSeek, Kimi). ``q_lora_rank`` 0: queries are projected directly."""

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    is_rotated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """A head's shape and conventions.

    Fields:
        dialect: "flat" or "speculators".
        draft_vocab_size: None where config.json names none, i.e. the target's whole vocabulary.
        aux_layer_ids: target layers whose inputs are the features; empty where config.json names none.
        norm_before_residual: the residual starts after hidden_norm instead of before.
        norm_before_fc, fc_norm: normalise the features before fc, as one vector or each layer's alone.
        feeds_back_normed: the next chain step gets norm(h) instead of h.
        ties_lm_head: lm_head may be the embedding, but only where the file has none.
        mla: set for multi-head latent attention; head_dim and num_kv_heads mean nothing then.
    """

    dialect: Literal["flat", "speculators"]
    model_type: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeSettings
    vocab_size: int
    draft_vocab_size: int | None
    aux_layer_ids: tuple[int, ...]
    attention_bias: bool
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    feeds_back_normed: bool
    ties_lm_head: bool
    mla: MlaShape | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOverrides:
    """Conventions the user states against config.json; None (or empty) takes config.json's."""

    norm_before_residual: bool | None = None
    feeds_back_normed: bool | None = None
    rope_theta: float | None = None
    aux_layer_ids: tuple[int, ...] = ()


def default_aux_layer_ids(num_target_layers: int) -> tuple[int, ...]:
    """The layers every trainer captures unless told otherwise: inputs of layers 2, n//2 and n-3."""
    return (2, num_target_layers // 2, num_target_layers - 3)


def apply_overrides(config: HeadConfig, overrides: HeadOverrides) -> HeadConfig:
    """``config`` with what the user stated."""
    if overrides.norm_before_residual is not None:
        config = replace(config, norm_before_residual=overrides.norm_before_residual)
    if overrides.feeds_back_normed is not None:
        config = replace(config, feeds_back_normed=overrides.feeds_back_normed)
    if overrides.rope_theta is not None:
        config = replace(config, rope=replace(config.rope, theta=overrides.rope_theta))
    if overrides.aux_layer_ids:
        config = replace(config, aux_layer_ids=overrides.aux_layer_ids)
    return config


def read_head_config(head_path: Path) -> HeadConfig:
    """Read config.json of a head directory, or beside a weight file.

    Raises:
        HeadFileError: no config.json, or not JSON. HeadConfigError, UnsupportedHead: see parse_head_config.
    """
    path = (head_path.parent if head_path.is_file() else head_path) / "config.json"
    try:
        raw = json.loads(path.read_text())
    except OSError as error:
        raise HeadFileError(f"can't read {path}: {error.strerror}") from None
    except ValueError as error:
        raise HeadFileError(f"{path} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise HeadFileError(f"{path} holds no JSON object")
    return parse_head_config(raw)


def parse_head_config(raw: Mapping[str, Any]) -> HeadConfig:
    """The record of one config.json.

    Raises:
        HeadConfigError: a field is missing, of the wrong type, or contradicts another.
        UnsupportedHead: a RoPE scaling or rotation that is not implemented.
    """
    is_speculators = "transformer_layer_config" in raw
    top = _Fields(raw, "")
    layer = _Fields(raw["transformer_layer_config"], "transformer_layer_config.") if is_speculators else top
    if layer.number("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedHead("partial_rotary_factor other than 1")
    hidden_size = layer.size("hidden_size")
    num_heads = layer.size("num_attention_heads")
    vocab_size = top.optional_size("vocab_size") or layer.size("vocab_size")
    return HeadConfig(
        dialect="speculators" if is_speculators else "flat",
        model_type=layer.text("model_type", "llama"),
        hidden_size=hidden_size,
        intermediate_size=layer.size("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=layer.optional_size("num_key_value_heads") or num_heads,
        head_dim=layer.optional_size("head_dim") or hidden_size // num_heads,
        rms_norm_eps=layer.number("rms_norm_eps", 1e-6),
        rope=_rope_settings(layer),
        vocab_size=vocab_size,
        draft_vocab_size=top.optional_size("draft_vocab_size"),
        aux_layer_ids=_aux_layer_ids(top, is_speculators=is_speculators),
        attention_bias=layer.flag("attention_bias", default=False),
        # speculators trains with True unless told otherwise, and its readers default to True; flat heads have no such
        # field and official ones were trained with False.
        norm_before_residual=top.flag("norm_before_residual", default=is_speculators),
        norm_before_fc=top.flag("norm_before_fc", default=False),
        fc_norm=top.flag("fc_norm", default=False),
        feeds_back_normed=top.flag("norm_output", default=False),
        ties_lm_head=top.flag("tie_word_embeddings", default=False),
        mla=_mla_shape(layer),
    )


def _aux_layer_ids(top: _Fields, *, is_speculators: bool) -> tuple[int, ...]:
    key = "eagle_aux_hidden_state_layer_ids"
    nested = top.raw.get("eagle_config")
    if isinstance(nested, Mapping) and nested.get(key) is not None and not is_speculators:
        return tuple(layer + 1 for layer in _Fields(nested, "eagle_config.").integers(key))
    return top.integers(key)


def _rope_settings(layer: _Fields) -> RopeSettings:
    # transformers 4: rope_theta and rope_scaling side by side; transformers 5: all in rope_parameters.
    parameters: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        value = layer.raw.get(key)
        if isinstance(value, Mapping):
            parameters.update(value)
        elif value is not None:
            raise HeadConfigError(layer.prefix + key, "must be an object or null")
    fields = _Fields(parameters, layer.prefix + "rope_parameters.")
    flat, inner = layer.number("rope_theta", None), fields.number("rope_theta", None)
    if flat is not None and inner is not None and flat != inner:
        raise HeadConfigError(layer.prefix + "rope_theta", f"is {flat:g}, but rope_parameters says {inner:g}")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in _ROPE_KINDS:
        raise UnsupportedHead(f"RoPE scaling {kind!r}; implemented are {', '.join(sorted(_ROPE_KINDS))}")
    scaling = {
        key: float(value)
        for key, value in parameters.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and key != "rope_theta"
    }
    theta = inner if inner is not None else flat
    return RopeSettings(theta=10_000.0 if theta is None else theta, kind=kind, scaling=scaling)


def _mla_shape(layer: _Fields) -> MlaShape | None:
    if layer.raw.get("kv_lora_rank") is None:
        return None
    return MlaShape(
        q_lora_rank=layer.optional_size("q_lora_rank") or 0,
        kv_lora_rank=layer.size("kv_lora_rank"),
        qk_nope_head_dim=layer.size("qk_nope_head_dim"),
        qk_rope_head_dim=layer.size("qk_rope_head_dim"),
        v_head_dim=layer.size("v_head_dim"),
        is_rotated=not layer.flag("mla_use_nope", default=False),
    )


class _Fields:
    """Typed access to a JSON object; every error names the key."""

    def __init__(self, raw: Any, prefix: str) -> None:
        if not isinstance(raw, Mapping):
            raise HeadConfigError(prefix.rstrip("."), "must be an object")
        self.raw = raw
        self.prefix = prefix

    def size(self, key: str) -> int:
        """A whole number >= 1."""
        value = self.optional_size(key)
        if value is None:
            raise HeadConfigError(self.prefix + key, "is missing")
        return value

    def optional_size(self, key: str) -> int | None:
        """A whole number >= 1, or None where the key is absent or null."""
        value = self.raw.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise HeadConfigError(self.prefix + key, f"must be a whole number of at least 1, not {value!r}")
        return value

    def number(self, key: str, default: Any) -> Any:
        """A number."""
        value = self.raw.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise HeadConfigError(self.prefix + key, f"must be a number, not {value!r}")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        """True or false."""
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise HeadConfigError(self.prefix + key, f"must be true or false, not {value!r}")
        return value

    def text(self, key: str, default: str) -> str:
        """A string."""
        value = self.raw.get(key, default)
        return value if isinstance(value, str) else default

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers; empty where the key is absent or null."""
        value = self.raw.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise HeadConfigError(self.prefix + key, "must be a list of whole numbers")
        return tuple(value)
