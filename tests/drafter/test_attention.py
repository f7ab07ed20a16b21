"""Latent attention after its rearrangement of weights, against the model library's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cpukernels.kv_cache import KvCache
from cpukernels.ports import Kernels, ragged_rows
from drafter.attention import build_attention
from drafter.head.config import parse_head_config
from drafter.head.weights import MlaWeights
from tests.drafter.heads import flat_config

ROWS, HIDDEN = 19, 64
SHAPE = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 16}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 50_000.0,
    "factor": 4.0,
    "beta_fast": 1.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.slow
@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 100.0}, YARN], ids=["default", "yarn"])
def test_latent_attention_agrees_with_transformers(rope: dict[str, Any], kernels: Kernels) -> None:
    modeling = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    torch.manual_seed(0)
    config = modeling.DeepseekV3Config(
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        rope_parameters=rope,
        attn_implementation="eager",
        **SHAPE,
    )
    theirs = modeling.DeepseekV3Attention(config, layer_idx=0).float().eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(1, ROWS, HIDDEN)
    tables = modeling.DeepseekV3RotaryEmbedding(config)(x, torch.arange(ROWS)[None])
    mask = torch.full((ROWS, ROWS), float("-inf")).triu(1)[None, None]
    with torch.inference_mode():
        expected = theirs(x, position_embeddings=tables, attention_mask=mask)[0][0]

    weights = MlaWeights(
        q_a=theirs.q_a_proj.weight.data,
        q_a_norm=theirs.q_a_layernorm.weight.data,
        q_b=theirs.q_b_proj.weight.data,
        kv_a=theirs.kv_a_proj_with_mqa.weight.data,
        kv_a_norm=theirs.kv_a_layernorm.weight.data,
        kv_b=theirs.kv_b_proj.weight.data,
        o=theirs.o_proj.weight.data,
    )
    raw = flat_config(hidden_size=HIDDEN, num_attention_heads=4, rope_theta=None, rope_parameters=rope, **SHAPE)
    attention = build_attention(parse_head_config(raw), weights, kernels, num_positions=64)
    cache = KvCache(num_layers=1, num_kv_heads=4, head_dim=attention.shape.head_dim)
    rows = ragged_rows([cache], [ROWS])
    qkv = attention.project(x[0])
    kernels.rope_append(qkv, rows, 0, attention.shape, attention.cos, attention.sin)
    found = kernels.linear(kernels.attention(qkv, rows, 0, attention.shape), attention.output)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


def test_without_rotation_positions_do_not_matter(kernels: Kernels) -> None:
    config = parse_head_config(flat_config(mla_use_nope=True, **SHAPE))
    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    weights = MlaWeights(
        q_a=None,
        q_a_norm=None,
        q_b=weight(2 * 48, 32),
        kv_a=weight(48, 32),
        kv_a_norm=torch.ones(32),
        kv_b=weight(2 * 48, 32),
        o=weight(32, 2 * 16),
    )
    attention = build_attention(config, weights, kernels, num_positions=8)
    assert torch.equal(attention.cos, torch.ones(8, 24))
    assert torch.equal(attention.sin, torch.zeros(8, 24))
    assert attention.project(weight(3, 32)).shape == (3, 3 * 2 * 48)
