"""RoPE tables against the model library's own, where it is installed, and their errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from drafter.errors import HeadConfigError
from drafter.head.config import RopeSettings
from drafter.rope import rope_attention_scale, rope_tables

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64.0}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64.0}


def test_default_tables() -> None:
    cos, sin = rope_tables(RopeSettings(theta=100.0, scaling={}), rotary_dim=4, num_positions=3)
    assert cos.shape == sin.shape == (3, 2)
    torch.testing.assert_close(cos[2], torch.tensor([2.0, 0.2]).cos())
    torch.testing.assert_close(sin[2], torch.tensor([2.0, 0.2]).sin())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "scaling"),
    [("linear", {"factor": 2.0}), ("llama3", LLAMA3), ("yarn", YARN), ("yarn", YARN | {"attention_factor": 1.5})],
)
def test_scaled_tables_agree_with_transformers(kind: Any, scaling: dict[str, float]) -> None:
    modeling = pytest.importorskip("transformers.modeling_rope_utils")
    transformers = pytest.importorskip("transformers")
    parameters = {"rope_type": kind, "rope_theta": 5000.0, **scaling}
    config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=2, max_position_embeddings=256, rope_parameters=parameters
    )
    inverse, factor = modeling.ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    angles = torch.arange(50).double()[:, None] * inverse.double()[None, :]
    settings = RopeSettings(theta=5000.0, kind=kind, scaling=scaling)
    cos, sin = rope_tables(settings, rotary_dim=32, num_positions=50)
    torch.testing.assert_close(cos, (angles.cos() * factor).float(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(sin, (angles.sin() * factor).float(), atol=1e-5, rtol=1e-5)


def test_deepseek_yarn_scales_scores_instead_of_tables() -> None:
    scaling = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}
    settings = RopeSettings(theta=5000.0, kind="yarn", scaling=scaling)
    cos, _ = rope_tables(settings, rotary_dim=32, num_positions=1)
    torch.testing.assert_close(cos, torch.ones(1, 16))
    assert rope_attention_scale(settings) == pytest.approx((0.1 * math.log(4) + 1) ** 2)
    assert rope_attention_scale(RopeSettings(theta=5000.0, kind="yarn", scaling=YARN)) == 1.0


def test_a_missing_number_is_named() -> None:
    with pytest.raises(HeadConfigError, match=r"rope_parameters\.factor"):
        rope_tables(RopeSettings(theta=1e4, kind="linear", scaling={}), rotary_dim=4, num_positions=1)
