"""A random tiny target and a random EAGLE-3 head for it on disk: right in every shape, wrong in every word."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

__all__ = ["write_head", "write_target"]

HIDDEN = 64
AUX = (2, 3, 4)
SPECIAL = ("<s>", "</s>")
CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def write_target(
    model_dir: Path, *, max_positions: int = 512, num_layers: int = 7, num_heads: int = 4, num_kv_heads: int = 2
) -> Path:
    """A random llama over single bytes. Its logits are flat, so sampled drafts with shared noise are often right."""
    model_dir.mkdir(parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(model_dir / "tokenizer.json"))
    (model_dir / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE})
    )
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=len(vocab),
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=16,
        max_position_embeddings=max_positions,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    model.save_pretrained(model_dir)
    return model_dir


def write_head(head_dir: Path, target_dir: Path, *, aux: tuple[int, ...] = AUX) -> Path:
    """A random head in the flat layout of SpecForge; the embedding and the positions are the target's.

    aux: the layers whose inputs it reads.
    """
    head_dir.mkdir(parents=True)
    target = json.loads((target_dir / "config.json").read_text())
    vocab = target["vocab_size"]
    draft_vocab, heads, kv_heads, head_dim = 200, 4, 2, 16
    generator = torch.Generator().manual_seed(12)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / math.sqrt(shape[-1])

    ids = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values
    tensors = {
        "fc.weight": weight(HIDDEN, 3 * HIDDEN),
        "norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": weight(draft_vocab, HIDDEN),
        "midlayer.hidden_norm.weight": torch.ones(HIDDEN),
        "midlayer.input_layernorm.weight": torch.ones(HIDDEN),
        "midlayer.post_attention_layernorm.weight": torch.ones(HIDDEN),
        "midlayer.mlp.gate_proj.weight": weight(128, HIDDEN),
        "midlayer.mlp.up_proj.weight": weight(128, HIDDEN),
        "midlayer.mlp.down_proj.weight": weight(HIDDEN, 128),
        "midlayer.self_attn.q_proj.weight": weight(heads * head_dim, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": weight(kv_heads * head_dim, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": weight(kv_heads * head_dim, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": weight(HIDDEN, heads * head_dim),
        "d2t": ids - torch.arange(draft_vocab),
        "t2d": torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, value=True),
    }
    save_file(tensors, head_dir / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-6,
        "vocab_size": vocab,
        "draft_vocab_size": draft_vocab,
        "max_position_embeddings": target["max_position_embeddings"],
        # In eagle_config an id names a layer's output, hence one less than the inputs we want.
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [i - 1 for i in aux], "use_aux_hidden_state": True},
    }
    (head_dir / "config.json").write_text(json.dumps(config))
    return head_dir
