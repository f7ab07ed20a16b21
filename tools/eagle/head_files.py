"""Reads and writes a head folder in the flat format of SpecForge: config.json and safetensors."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from tools.eagle.head import EagleHead, HeadConfig

MAX_SHARD_BYTES = 16 * 2**20 - 2**16  # a little room for the header

__all__ = ["load_head", "save_head"]


def _config_json(config: HeadConfig) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        # Numbered as SGLang and SpecForge do: the OUTPUT of these layers, i.e. the input of the next ones.
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in config.aux_layers],
            "use_aux_hidden_state": True,
        },
    }


def save_head(head: EagleHead, folder: Path, *, with_lm_head: bool, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes config.json and model.safetensors, or shards under 16 MiB with an index if it doesn't fit one.

    Args:
        head: The head.
        folder: Created if missing; old tensor files in it are removed.
        with_lm_head: False leaves lm_head out: it then equals the target's embedding rows and is rebuilt at load.
        dtype: Of all float tensors; d2t stays int64, t2d bool.
    """
    from safetensors.torch import save_file  # lazy, like every optional package of the tools

    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    state = {**head.state_dict(), "fc.weight": head.folded_fc()}
    tensors = {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).detach().cpu().contiguous()
        for name, tensor in state.items()
        if with_lm_head or name != "lm_head.weight"
    }
    (folder / "config.json").write_text(json.dumps(_config_json(head.config), indent=2) + "\n")
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        if sum(t.nbytes for t in shards[-1].values()) + tensor.nbytes > MAX_SHARD_BYTES and shards[-1]:
            shards.append({})
        shards[-1][name] = tensor
    if len(shards) == 1:
        save_file(shards[0], str(folder / "model.safetensors"), metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for index, shard in enumerate(shards, 1):
        file = f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, str(folder / file), metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index_json = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_json, indent=2) + "\n")


def load_head(folder: Path, embed: Tensor) -> EagleHead:
    """Loads a head this package wrote, in float32 on ``embed``'s device; a missing lm_head is the target's rows."""
    from safetensors.torch import load_file

    raw = json.loads((folder / "config.json").read_text())
    ids = raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    config = HeadConfig(
        hidden_size=raw["hidden_size"], num_heads=raw["num_attention_heads"], num_kv_heads=raw["num_key_value_heads"],
        head_dim=raw["head_dim"], intermediate_size=raw["intermediate_size"], vocab_size=raw["vocab_size"],
        draft_vocab_size=raw["draft_vocab_size"], rope_theta=raw["rope_theta"], rms_norm_eps=raw["rms_norm_eps"],
        max_position_embeddings=raw["max_position_embeddings"], aux_layers=(ids[0] + 1, ids[1] + 1, ids[2] + 1),
    )  # fmt: skip
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        tensors |= load_file(str(file))
    draft_ids = tensors["d2t"] + torch.arange(config.draft_vocab_size)
    head = EagleHead(config, embed, draft_ids.to("cpu"))
    head.to(embed.device)
    tensors.setdefault("lm_head.weight", embed[draft_ids.to(embed.device)])
    state = {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}
    head.load_state_dict(state, strict=True)
    return head
