"""Assemble a head from its files. Every tensor is asked for by name, so a missing or an unused one is an error.

Servers of these heads mostly drop unknown tensors and leave missing ones random; lossless verification then hides the
broken drafter behind a low acceptance rate. Here both are errors at load.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from drafter.errors import HeadConfigError, MissingTensor, TensorMismatch, UnusedTensors
from drafter.head.config import (
    HeadConfig,
    HeadOverrides,
    MlaShape,
    apply_overrides,
    default_aux_layer_ids,
    read_head_config,
)
from drafter.head.names import canonical_names, count_layers
from drafter.head.target import TargetFiles
from drafter.head.tensors import read_tensors
from drafter.head.weights import AttentionWeights, GqaWeights, HeadWeights, LayerWeights, MlaWeights

__all__ = ["load_head"]

_WEIGHT_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


def load_head(
    head_path: Path, *, target_model_dir: Path | None = None, overrides: HeadOverrides | None = None
) -> HeadWeights:
    """Load a head of any public layout from a directory or weight file.

    Args:
        target_model_dir: the target in Hugging Face layout; needed where the head ships no embedding or no lm_head.

    Raises:
        HeadError: one of its kinds, naming the file, field or tensor.
    """
    config = apply_overrides(read_head_config(head_path), overrides or HeadOverrides())
    target = None if target_model_dir is None else TargetFiles(target_model_dir)
    if not config.aux_layer_ids and target is not None and (num_target_layers := target.num_layers()):
        config = replace(config, aux_layer_ids=default_aux_layer_ids(num_target_layers))
    bag = _TensorBag(read_tensors(head_path))
    fc = bag.take("fc.weight", (config.hidden_size, None))
    fc_norms, input_norm = _feature_norms(bag, config, fc.shape[1])
    num_layers = count_layers(bag.names)
    hidden_norm = bag.take("layers.0.hidden_norm.weight", (config.hidden_size,))
    layers = tuple(_layer(bag, config, index) for index in range(num_layers))
    norm = bag.take("norm.weight", (config.hidden_size,))
    target_ids = _target_ids(bag, config)
    embedding = _embedding(bag, config, target)
    lm_head = _lm_head(bag, config, target, target_ids)
    bag.finish()
    return HeadWeights(
        config=config,
        head_format=_describe(config, num_layers),
        fc=fc,
        fc_norms=fc_norms,
        input_norm=input_norm,
        hidden_norm=hidden_norm,
        layers=layers,
        norm=norm,
        lm_head=lm_head,
        embedding=embedding,
        target_ids=target_ids,
    )


def _describe(config: HeadConfig, num_layers: int) -> str:
    parts = [config.dialect, "latent attention" if config.mla else config.model_type]
    return ", ".join([*parts, f"{num_layers} layer" + "s" * (num_layers > 1)])


class _TensorBag:
    """The file's tensors under our names; remembers which were taken."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._left = canonical_names(tensors)
        self.names = frozenset(self._left)

    def take_stored(self, name: str, shape: tuple[int | None, ...], why: str = "") -> torch.Tensor:
        """A tensor that must be there, in its stored dtype; None in ``shape`` is any size."""
        if name not in self._left:
            raise MissingTensor(name, why)
        tensor = self._tensors[self._left.pop(name)]
        fits = tensor.dim() == len(shape) and all(
            want is None or want == size for want, size in zip(shape, tensor.shape, strict=True)
        )
        if not fits:
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            raise TensorMismatch(name, f"has shape {list(tensor.shape)}, config.json makes it [{wanted}]")
        return tensor

    def take(self, name: str, shape: tuple[int | None, ...], why: str = "") -> torch.Tensor:
        """A tensor that must be there, in fp32."""
        tensor = self.take_stored(name, shape, why)
        if tensor.dtype not in _WEIGHT_DTYPES:
            raise TensorMismatch(name, f"has dtype {tensor.dtype}; quantised heads are not supported")
        return tensor.to(torch.float32).contiguous()

    def take_optional(self, name: str, shape: tuple[int | None, ...]) -> torch.Tensor | None:
        """A tensor in fp32, or None."""
        return self.take(name, shape) if name in self._left else None

    def finish(self) -> None:
        """Raise if anything is left."""
        if self._left:
            raise UnusedTensors(self._left.values())


def _feature_norms(
    bag: _TensorBag, config: HeadConfig, feature_size: int
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
    num_norms = sum(name.startswith("fc_norm.") for name in bag.names)
    if config.fc_norm and num_norms == 0:
        raise MissingTensor("fc_norm.0.weight", "config.json says fc_norm")
    if num_norms and feature_size % num_norms:
        raise TensorMismatch("fc.weight", f"takes {feature_size} features, not a multiple of {num_norms} fc_norms")
    fc_norms = tuple(bag.take(f"fc_norm.{i}.weight", (feature_size // num_norms,)) for i in range(num_norms))
    if config.norm_before_fc:
        return fc_norms, bag.take("input_norm.weight", (feature_size,), "config.json says norm_before_fc")
    return fc_norms, bag.take_optional("input_norm.weight", (feature_size,))


def _layer(bag: _TensorBag, config: HeadConfig, index: int) -> LayerWeights:
    prefix, hidden = f"layers.{index}.", config.hidden_size
    in_size = 2 * hidden if index == 0 else hidden
    return LayerWeights(
        input_layernorm=bag.take(prefix + "input_layernorm.weight", (hidden,)),
        post_attention_layernorm=bag.take(prefix + "post_attention_layernorm.weight", (hidden,)),
        attention=_attention(bag, config, prefix + "self_attn.", in_size),
        gate=bag.take(prefix + "mlp.gate_proj.weight", (config.intermediate_size, hidden)),
        up=bag.take(prefix + "mlp.up_proj.weight", (config.intermediate_size, hidden)),
        down=bag.take(prefix + "mlp.down_proj.weight", (hidden, config.intermediate_size)),
    )


def _attention(bag: _TensorBag, config: HeadConfig, prefix: str, in_size: int) -> AttentionWeights:
    is_latent = any(name.startswith(prefix + "kv_a_proj_with_mqa") for name in bag.names)
    if is_latent and config.mla is None:
        raise HeadConfigError("kv_lora_rank", "is missing, but the tensors are those of latent attention")
    if config.mla is not None and is_latent:
        return _latent_attention(bag, config, config.mla, prefix, in_size)
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    has_norm = prefix + "q_norm.weight" in bag.names or config.model_type == "qwen3"
    has_bias = prefix + "q_proj.bias" in bag.names or config.attention_bias
    sizes = {"q": queries, "k": keys, "v": keys}
    biases = [bag.take(f"{prefix}{key}_proj.bias", (size,)) for key, size in sizes.items() if has_bias]
    return GqaWeights(
        q=bag.take(prefix + "q_proj.weight", (queries, in_size)),
        k=bag.take(prefix + "k_proj.weight", (keys, in_size)),
        v=bag.take(prefix + "v_proj.weight", (keys, in_size)),
        o=bag.take(prefix + "o_proj.weight", (config.hidden_size, queries)),
        qkv_bias=torch.cat(biases) if has_bias else None,
        o_bias=bag.take_optional(prefix + "o_proj.bias", (config.hidden_size,)),
        q_norm=bag.take(prefix + "q_norm.weight", (config.head_dim,)) if has_norm else None,
        k_norm=bag.take(prefix + "k_norm.weight", (config.head_dim,)) if has_norm else None,
    )


def _latent_attention(bag: _TensorBag, config: HeadConfig, mla: MlaShape, prefix: str, in_size: int) -> MlaWeights:
    query_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    queries = config.num_heads * query_dim
    q_a: torch.Tensor | None = None
    q_a_norm: torch.Tensor | None = None
    if mla.q_lora_rank:
        q_a = bag.take(prefix + "q_a_proj.weight", (mla.q_lora_rank, in_size))
        q_a_norm = bag.take(prefix + "q_a_layernorm.weight", (mla.q_lora_rank,))
        q_b = bag.take(prefix + "q_b_proj.weight", (queries, mla.q_lora_rank))
    else:
        q_b = bag.take(prefix + "q_proj.weight", (queries, in_size))
    value_rows = config.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return MlaWeights(
        q_a=q_a,
        q_a_norm=q_a_norm,
        q_b=q_b,
        kv_a=bag.take(prefix + "kv_a_proj_with_mqa.weight", (mla.kv_lora_rank + mla.qk_rope_head_dim, in_size)),
        kv_a_norm=bag.take(prefix + "kv_a_layernorm.weight", (mla.kv_lora_rank,)),
        kv_b=bag.take(prefix + "kv_b_proj.weight", (value_rows, mla.kv_lora_rank)),
        o=bag.take(prefix + "o_proj.weight", (config.hidden_size, config.num_heads * mla.v_head_dim)),
    )


def _target_ids(bag: _TensorBag, config: HeadConfig) -> torch.Tensor:
    """[draft vocab] int64. d2t holds OFFSETS: target id = draft id + d2t[draft id]; t2d masks the vocabulary."""
    if "d2t" not in bag.names:
        draft_size = config.draft_vocab_size or config.vocab_size
        if draft_size != config.vocab_size:
            raise MissingTensor("d2t", f"the draft vocabulary has {draft_size} of {config.vocab_size} ids")
        ids = torch.arange(draft_size)
    else:
        offsets = bag.take_stored("d2t", (config.draft_vocab_size,))
        if offsets.is_floating_point():
            raise TensorMismatch("d2t", f"has dtype {offsets.dtype}; ids above 256 don't survive a cast to bf16")
        draft_size = len(offsets)
        ids = torch.arange(draft_size) + offsets.to(torch.int64)
    if ids.min() < 0 or ids.max() >= config.vocab_size:
        raise TensorMismatch("d2t", f"maps outside the vocabulary of {config.vocab_size}; are these ids, not offsets?")
    if len(torch.unique(ids)) != len(ids):
        raise TensorMismatch("d2t", "maps two draft ids to the same target id")
    if "t2d" in bag.names:
        mask = bag.take_stored("t2d", (config.vocab_size,)).to(torch.bool)
        if int(mask.sum()) != draft_size or not bool(mask[ids].all()):
            raise TensorMismatch("t2d", "marks other ids than d2t maps to; one of them was not saved with the head")
    return ids


def _embedding(bag: _TensorBag, config: HeadConfig, target: TargetFiles | None) -> torch.Tensor:
    name = "embed_tokens.weight"
    if name in bag.names:
        return bag.take_stored(name, (None, config.hidden_size))
    if target is None:
        raise MissingTensor(name, "and no target_model_dir is set to take the target's")
    embedding = target.embedding()
    if embedding.shape[1] != config.hidden_size:
        raise MissingTensor(name, f"the target's has width {embedding.shape[1]}, the head needs {config.hidden_size}")
    return embedding


def _lm_head(bag: _TensorBag, config: HeadConfig, target: TargetFiles | None, target_ids: torch.Tensor) -> torch.Tensor:
    """[draft vocab, H]: the file's; else the target's rows, which heads trained with a frozen lm_head leave out.

    tie_word_embeddings is believed only where the file has no lm_head: some public heads say true and have both.
    """
    name = "lm_head.weight"
    if name in bag.names:
        return bag.take(name, (len(target_ids), config.hidden_size))
    if target is None:
        raise MissingTensor(name, "and no target_model_dir is set to take the target's rows")
    full = target.embedding() if config.ties_lm_head else target.lm_head()
    if full.shape[1] != config.hidden_size:
        raise MissingTensor(name, f"the target's has width {full.shape[1]}, the head needs {config.hidden_size}")
    if full.shape[0] <= int(target_ids.max()):
        raise TensorMismatch("d2t", f"maps to ids beyond the target's {full.shape[0]} rows")
    return full[target_ids].to(torch.float32).contiguous()
