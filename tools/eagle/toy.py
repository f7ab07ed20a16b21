"""A tiny random target, for ``--smoke`` and the tests: right in every shape, wrong in every word."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tools.eagle.chat import ByteTokenizer, FileTokenizer, Tokenizer
from tools.eagle.target import Target, TargetConfig, load_target

__all__ = ["TOY_CONFIG", "add_model_arguments", "open_model", "toy_target"]

TOY_CONFIG = TargetConfig(
    hidden_size=48, num_layers=8, num_heads=3, num_kv_heads=1, head_dim=16, intermediate_size=64,
    vocab_size=ByteTokenizer.vocab_size, rope_theta=10_000.0, rms_norm_eps=1e-5, max_position_embeddings=512,
)  # fmt: skip


def toy_target(seed: int = 0, config: TargetConfig = TOY_CONFIG) -> Target:
    """A random Llama in float32 on the CPU; the embedding is scaled so that its output is not flat."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 0.15) -> Tensor:
        return torch.randn(shape, generator=generator) * scale

    width, kv = config.hidden_size, config.num_kv_heads * config.head_dim
    weights = {"embed_tokens.weight": draw(config.vocab_size, width, scale=0.5), "norm.weight": torch.ones(width)}
    for i in range(config.num_layers):
        at = f"layers.{i}."
        weights |= {
            at + "input_layernorm.weight": torch.ones(width),
            at + "post_attention_layernorm.weight": torch.ones(width),
            at + "self_attn.q_proj.weight": draw(config.num_heads * config.head_dim, width),
            at + "self_attn.k_proj.weight": draw(kv, width),
            at + "self_attn.v_proj.weight": draw(kv, width),
            at + "self_attn.o_proj.weight": draw(width, config.num_heads * config.head_dim),
            at + "mlp.gate_proj.weight": draw(config.intermediate_size, width),
            at + "mlp.up_proj.weight": draw(config.intermediate_size, width),
            at + "mlp.down_proj.weight": draw(width, config.intermediate_size),
        }
    return Target(config, weights, device="cpu", dtype=torch.float32)


def add_model_arguments(parser: object) -> None:
    """--model, --tokenizer, --device and --smoke, the same for generate, train and eval."""
    add = parser.add_argument  # type: ignore[attr-defined]
    add("--model", type=Path, help="target: a transformers folder or a .gguf file")
    add("--tokenizer", type=Path, help="tokenizer.json of the target")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--smoke", action="store_true", help="tiny random target on the CPU; checks the wiring in seconds")


def open_model(
    model: Path | None, tokenizer: Path | None, *, device: str, dtype: torch.dtype, smoke: bool
) -> tuple[Target, Tokenizer]:
    """The target and its tokenizer, or the toy ones for a smoke run."""
    if smoke:
        torch.set_num_threads(1)
        return toy_target(), ByteTokenizer()
    if model is None or tokenizer is None:
        raise SystemExit("--model and --tokenizer are needed without --smoke")
    return load_target(model, device=device, dtype=dtype), FileTokenizer(tokenizer)
