"""Random tiny Hugging Face models on disk, one per architecture, and the engine over them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from cpukernels.ports import Kernels
from verifier.embedded.engine import EmbeddedEngine
from verifier.embedded.model import TargetModel, load_target
from wire.tensor_ring import TensorRingWriter

VOCAB, HIDDEN = 96, 64
_SHARED: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_SHARED),
    "llama tied": lambda: LlamaConfig(**_SHARED, tie_word_embeddings=True),
    "llama biased": lambda: LlamaConfig(**_SHARED, attention_bias=True),
    "llama3 rope": lambda: LlamaConfig(**_SHARED, rope_parameters=_LLAMA3),
    "llama linear rope": lambda: LlamaConfig(
        **_SHARED, rope_parameters={"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
    ),
    "llama wide heads": lambda: LlamaConfig(**{**_SHARED, "num_hidden_layers": 3}, head_dim=48),
    "qwen2": lambda: Qwen2Config(**_SHARED),
    "qwen3": lambda: Qwen3Config(**_SHARED, head_dim=32),
    "mistral": lambda: MistralConfig(**_SHARED, sliding_window=None),
}


def write_model(model_dir: Path, config: PretrainedConfig, *, seed: int = 0, spread: float = 4.0) -> Path:
    """A random model as transformers saves it; every bias and norm is random too.

    spread: scale of the output layer, so that neither argmax nor sampling is nearly uniform.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.randn_like(parameter) * 0.3 + (1.0 if "norm" in name else 0.0))
            else:
                parameter.copy_(torch.randn_like(parameter) * (2.0 / parameter.shape[-1] ** 0.5))
        model.lm_head.weight.mul_(spread / 4)
    model.save_pretrained(model_dir)
    (model_dir / "tokenizer.json").write_text("{}")
    return model_dir


def write_sharded(model_dir: Path, whole: Path) -> Path:
    """The same model in two shards with an index."""
    model_dir.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (model_dir / name).write_text((whole / name).read_text())
    tensors = load_file(whole / "model.safetensors")
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, own in files.items():
        save_file({name: tensors[name] for name in own}, model_dir / file)
    index = {"weight_map": {name: file for file, own in files.items() for name in own}}
    (model_dir / "model.safetensors.index.json").write_text(json.dumps(index))
    return model_dir


def load(model_dir: Path, kernels: Kernels, **options: Any) -> TargetModel:
    """The target of a directory."""
    return load_target(model_dir, kernels=kernels, progress=lambda _phase, _share: None, **options)


def new_engine(model: TargetModel, ring: TensorRingWriter, **options: Any) -> EmbeddedEngine:
    """An engine with small limits and a clock that counts its readings."""
    ticks = itertools.count()
    settings = {"slot_rows": 8, "max_requests": 64, "prefill_chunk_tokens": 32, "prefix_cache_tokens": 4096}
    return EmbeddedEngine(model, ring, clock=lambda: float(next(ticks)), **{**settings, **options})
