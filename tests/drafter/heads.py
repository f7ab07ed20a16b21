"""Writes random tiny heads to disk in every public layout, with the reference that must agree."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.drafter.reference import ReferenceHead

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 32, 48, 2, 1, 16
VOCAB, DRAFT_VOCAB, NUM_AUX = 96, 40, 3
FEATURES = NUM_AUX * HIDDEN
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class TinyHead:
    """A head on disk, and what it must compute. ``target_dir`` is set where the head needs the target's files."""

    head_dir: Path
    target_dir: Path | None
    reference: ReferenceHead


def random_tensors(
    seed: int, *, num_layers: int = 1, draft_vocab: int | None = DRAFT_VOCAB, is_mla: bool = False
) -> Tensors:
    """A plain head under the speculators' names, embedding included."""
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * (1.5 / math.sqrt(shape[-1]))

    def norm(size: int) -> torch.Tensor:
        return 1 + 0.2 * torch.randn(size, generator=generator)

    tensors: Tensors = {
        "fc.weight": weight(HIDDEN, FEATURES),
        "norm.weight": norm(HIDDEN),
        "lm_head.weight": weight(draft_vocab or VOCAB, HIDDEN),
        "embed_tokens.weight": weight(VOCAB, HIDDEN),
        "layers.0.hidden_norm.weight": norm(HIDDEN),
    }
    for index in range(num_layers):
        prefix, width = f"layers.{index}.", HIDDEN * (2 if index == 0 else 1)
        tensors |= {
            prefix + "input_layernorm.weight": norm(HIDDEN),
            prefix + "post_attention_layernorm.weight": norm(HIDDEN),
            prefix + "mlp.gate_proj.weight": weight(INTERMEDIATE, HIDDEN),
            prefix + "mlp.up_proj.weight": weight(INTERMEDIATE, HIDDEN),
            prefix + "mlp.down_proj.weight": weight(HIDDEN, INTERMEDIATE),
        }
        attention = prefix + "self_attn."
        if is_mla:
            tensors |= {
                attention + "q_a_proj.weight": weight(16, width),
                attention + "q_a_layernorm.weight": norm(16),
                attention + "q_b_proj.weight": weight(HEADS * 32, 16),
                attention + "kv_a_proj_with_mqa.weight": weight(16 + 16, width),
                attention + "kv_a_layernorm.weight": norm(16),
                attention + "kv_b_proj.weight": weight(HEADS * 32, 16),
                attention + "o_proj.weight": weight(HIDDEN, HEADS * 16),
            }
        else:
            tensors |= {
                attention + "q_proj.weight": weight(HEADS * HEAD_DIM, width),
                attention + "k_proj.weight": weight(KV_HEADS * HEAD_DIM, width),
                attention + "v_proj.weight": weight(KV_HEADS * HEAD_DIM, width),
                attention + "o_proj.weight": weight(HIDDEN, HEADS * HEAD_DIM),
            }
    if draft_vocab is not None:
        ids = torch.randperm(VOCAB, generator=generator)[:draft_vocab].sort().values
        tensors["d2t"] = ids - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, value=True)
    return tensors


def reference_of(tensors: Tensors, **changes: Any) -> ReferenceHead:
    """The reference over these tensors; ``changes`` are its fields."""
    fields = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM} | changes
    return ReferenceHead(tensors=tensors, **fields)


def layer_config(**changes: Any) -> dict[str, Any]:
    """The decoder layer's part of config.json."""
    return {
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "vocab_size": VOCAB,
        "max_position_embeddings": 8,  # the training length: must not limit serving
    } | changes


def flat_config(**changes: Any) -> dict[str, Any]:
    """config.json as SafeAILab, SpecForge and AngelSlim write it."""
    return (
        layer_config(
            architectures=["LlamaForCausalLM"],
            num_hidden_layers=40,  # Vicuna's head says the target's; tensors decide
            draft_vocab_size=DRAFT_VOCAB,
            eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 4, 7], "use_aux_hidden_state": True},
        )
        | changes
    )


def speculators_config(layer: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """config.json as speculators writes it."""
    return {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "transformer_layer_config": layer_config(**(layer or {})),
        "draft_vocab_size": DRAFT_VOCAB,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [2, 5, 8],
        "speculators_config": {"algorithm": "eagle3", "default_proposal_method": "greedy"},
    } | changes


def to_midlayer(tensors: Tensors) -> Tensors:
    """Flat names of a one-layer head."""
    return {name.replace("layers.0.", "midlayer.", 1): tensor for name, tensor in tensors.items()}


def without(tensors: Tensors, *names: str) -> Tensors:
    """All tensors but some."""
    return {name: tensor for name, tensor in tensors.items() if name not in names}


def write_head(head_dir: Path, config: Mapping[str, Any], tensors: Tensors, *, file: str = "model.safetensors") -> Path:
    """config.json and one weight file."""
    head_dir.mkdir(parents=True, exist_ok=True)
    (head_dir / "config.json").write_text(json.dumps(config))
    if file.endswith(".bin"):
        torch.save(tensors, head_dir / file)
    else:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, head_dir / file)
    return head_dir


def write_sharded(head_dir: Path, config: Mapping[str, Any], tensors: Tensors) -> Path:
    """config.json, two safetensors shards and their index."""
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in parts.items():
        write_head(head_dir, config, {name: tensors[name] for name in part}, file=file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (head_dir / "model.safetensors.index.json").write_text(json.dumps(index))
    return head_dir


def write_target(target_dir: Path, tensors: Mapping[str, torch.Tensor], *, num_layers: int = 10) -> Path:
    """A target directory with only what a head may need of it."""
    target_dir.mkdir(parents=True, exist_ok=True)
    (target_dir / "config.json").write_text(json.dumps({"num_hidden_layers": num_layers}))
    save_file(dict(tensors), target_dir / "model.safetensors")
    return target_dir


def _random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------- one function per layout


def _specforge(path: Path) -> TinyHead:
    tensors = random_tensors(1)
    target = write_target(path / "target", {"model.embed_tokens.weight": tensors["embed_tokens.weight"]})
    head = write_head(path / "head", flat_config(), to_midlayer(without(tensors, "embed_tokens.weight")))
    return TinyHead(head_dir=head, target_dir=target, reference=reference_of(tensors))


def _safeailab_bin(path: Path) -> TinyHead:
    tensors = {name: t.half() if t.is_floating_point() else t for name, t in random_tensors(2).items()}
    stored = {f"model.{name}": tensor for name, tensor in to_midlayer(tensors).items()}
    stored["model.midlayer.self_attn.rotary_emb.inv_freq"] = _random(0, HEAD_DIM // 2)
    head = write_head(path / "head", flat_config(), stored, file="pytorch_model.bin")
    return TinyHead(head_dir=head, target_dir=None, reference=reference_of(tensors))


def _sharded_bf16(path: Path) -> TinyHead:
    tensors = {name: t.bfloat16() if t.is_floating_point() else t for name, t in random_tensors(3).items()}
    head = write_sharded(path / "head", flat_config(tie_word_embeddings=True), to_midlayer(tensors))
    return TinyHead(head_dir=head, target_dir=None, reference=reference_of(tensors))


def _full_vocabulary(path: Path) -> TinyHead:
    tensors = random_tensors(4, draft_vocab=None)
    head = write_head(path / "head", flat_config(draft_vocab_size=None), to_midlayer(tensors))
    return TinyHead(head_dir=head, target_dir=None, reference=reference_of(tensors))


def _frozen_lm_head(path: Path) -> TinyHead:
    tensors = random_tensors(5)
    ids = tensors["d2t"] + torch.arange(DRAFT_VOCAB)
    full = _random(50, VOCAB, HIDDEN)
    tensors["lm_head.weight"] = full[ids]
    target = {"model.embed_tokens.weight": tensors["embed_tokens.weight"], "lm_head.weight": full}
    write_target(path / "target", target)
    stored = to_midlayer(without(tensors, "embed_tokens.weight", "lm_head.weight"))
    head = write_head(path / "head", flat_config(), stored)
    return TinyHead(head_dir=head, target_dir=path / "target", reference=reference_of(tensors))


def _tied_lm_head(path: Path) -> TinyHead:
    tensors = random_tensors(6)
    embedding = tensors["embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding[tensors["d2t"] + torch.arange(DRAFT_VOCAB)]
    write_target(path / "target", {"language_model.model.embed_tokens.weight": embedding})
    stored = to_midlayer(without(tensors, "embed_tokens.weight", "lm_head.weight"))
    head = write_head(path / "head", flat_config(tie_word_embeddings=True), stored)
    return TinyHead(head_dir=head, target_dir=path / "target", reference=reference_of(tensors))


def _eagle31(path: Path) -> TinyHead:
    tensors = random_tensors(7)
    stored = to_midlayer(tensors)
    for index, name in enumerate(("low", "mid", "high")):
        tensors[f"fc_norm.{index}.weight"] = stored[f"aux_norm_{name}.weight"] = 1 + 0.2 * _random(70 + index, HIDDEN)
    head = write_head(path / "head", flat_config(fc_norm=True, norm_output=True), stored)
    return TinyHead(head_dir=head, target_dir=None, reference=reference_of(tensors, feeds_back_normed=True))


def _speculators(path: Path) -> TinyHead:
    tensors = random_tensors(8)
    head = write_head(path / "head", speculators_config(), tensors)
    return TinyHead(head_dir=head, target_dir=None, reference=reference_of(tensors))


def _speculators_defaults(path: Path) -> TinyHead:
    """norm_before_residual is not stated: true, as speculators trains; input_norm over all features."""
    tensors = random_tensors(9)
    tensors["input_norm.weight"] = 1 + 0.2 * _random(90, FEATURES)
    config = speculators_config(norm_before_residual=None, norm_before_fc=True, norm_output=True)
    head = write_head(path / "head", config, tensors)
    reference = reference_of(tensors, norm_before_residual=True, feeds_back_normed=True)
    return TinyHead(head_dir=head, target_dir=None, reference=reference)


def _speculators_deep_qwen3(path: Path) -> TinyHead:
    tensors = random_tensors(10, num_layers=3)
    for index in range(3):
        for name in ("q_norm", "k_norm"):
            tensors[f"layers.{index}.self_attn.{name}.weight"] = 1 + 0.3 * _random(100 + index, HEAD_DIM)
    layer = {
        "model_type": "qwen3",
        "rope_theta": None,
        "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
    }
    head = write_head(path / "head", speculators_config(layer), tensors)
    return TinyHead(head_dir=head, target_dir=None, reference=reference_of(tensors, num_layers=3, theta=500.0))


def _biases(path: Path) -> TinyHead:
    tensors = random_tensors(11)
    sizes = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM, "o": HIDDEN}
    for index, (name, size) in enumerate(sizes.items()):
        tensors[f"layers.0.self_attn.{name}_proj.bias"] = _random(110 + index, size)
    head = write_head(path / "head", speculators_config({"attention_bias": True}), tensors)
    return TinyHead(head_dir=head, target_dir=None, reference=reference_of(tensors))


def _odd_sizes(path: Path) -> TinyHead:
    """head_dim 8: the native kernels can't, the loader falls back to torch."""
    tensors = random_tensors(12)
    tensors = {
        name: t[: t.shape[0] // 2] if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")) else t
        for name, t in tensors.items()
    }
    output = "layers.0.self_attn.o_proj.weight"
    tensors[output] = tensors[output][:, : HEADS * 8].contiguous()
    head = write_head(path / "head", flat_config(head_dim=8), to_midlayer(tensors))
    return TinyHead(head_dir=head, target_dir=None, reference=reference_of(tensors, head_dim=8))


def _linear_rope(path: Path) -> TinyHead:
    tensors = random_tensors(13)
    head = write_head(path / "head", flat_config(rope_scaling={"type": "linear", "factor": 4.0}), tensors)
    inverse = 10_000.0 ** -(torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM) / 4
    return TinyHead(head_dir=head, target_dir=None, reference=reference_of(tensors, inverse=inverse))


def _mla(path: Path) -> TinyHead:
    tensors = random_tensors(14, draft_vocab=None, is_mla=True)
    config = flat_config(
        architectures=["Eagle3DeepseekV2ForCausalLM"], model_type="kimi_k2", draft_vocab_size=None, head_dim=None, **MLA
    )
    head = write_head(path / "head", config, tensors)
    return TinyHead(head_dir=head, target_dir=None, reference=reference_of(tensors, mla=(16, 16, 16, 16)))


LAYOUTS: dict[str, Callable[[Path], TinyHead]] = {
    "specforge, embedding from the target": _specforge,
    "safeailab, pytorch_model.bin": _safeailab_bin,
    "angelslim, sharded bf16, says tied but is not": _sharded_bf16,
    "full vocabulary, no d2t": _full_vocabulary,
    "frozen lm_head, rows from the target": _frozen_lm_head,
    "no lm_head, tied": _tied_lm_head,
    "eagle 3.1, legacy norm names": _eagle31,
    "speculators": _speculators,
    "speculators, defaults and input_norm": _speculators_defaults,
    "speculators, three qwen3 layers": _speculators_deep_qwen3,
    "attention biases": _biases,
    "head_dim 8, torch kernels": _odd_sizes,
    "linear rope": _linear_rope,
    "latent attention": _mla,
}
