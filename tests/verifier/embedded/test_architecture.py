"""config.json is read as transformers reads it; what this engine would get wrong is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.verifier.embedded.tiny_models import CONFIGS
from verifier.embedded.architecture import read_architecture, rope_tables
from verifier.embedded.errors import ModelNotFound, UnsupportedModel

BASE: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
}


def _write(path: Path, **changes: Any) -> Path:
    config = {key: value for key, value in {**BASE, **changes}.items() if value is not ...}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("name", CONFIGS)
def test_sizes_equal_transformers_own(tmp_path: Path, name: str) -> None:
    config = CONFIGS[name]()
    config.save_pretrained(tmp_path)
    got = read_architecture(tmp_path)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    assert got.model_type == config.model_type
    assert (got.num_layers, got.hidden_size, got.intermediate_size) == (
        config.num_hidden_layers,
        config.hidden_size,
        config.intermediate_size,
    )
    assert (got.num_q_heads, got.num_kv_heads, got.head_dim) == (
        config.num_attention_heads,
        config.num_key_value_heads,
        head_dim,
    )
    assert (got.vocab_size, got.context_len) == (config.vocab_size, config.max_position_embeddings)
    assert got.is_tied == config.tie_word_embeddings
    assert got.qkv_size == (config.num_attention_heads + 2 * config.num_key_value_heads) * head_dim


@pytest.mark.parametrize("name", ["llama3 rope", "llama linear rope"])
def test_rope_scaling_equals_transformers_own(tmp_path: Path, name: str) -> None:
    config = CONFIGS[name]()
    config.save_pretrained(tmp_path)
    kind = config.rope_parameters["rope_type"]
    expected, scale = ROPE_INIT_FUNCTIONS[kind](config, device=torch.device("cpu"))
    assert scale == 1.0
    torch.testing.assert_close(torch.tensor(read_architecture(tmp_path).inverse_frequencies).float(), expected.float())


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5000.0},
        {"rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"}},
        {"rope_theta": 5000.0, "rope_scaling": None},
        {"rope_theta": 5000.0, "rope_scaling": {"type": "default"}},
    ],
)
def test_every_spelling_of_the_rope_base(tmp_path: Path, rope: dict[str, Any]) -> None:
    frequencies = read_architecture(_write(tmp_path, **rope)).inverse_frequencies
    assert frequencies[:2] == pytest.approx([1.0, 5000.0 ** (-2 / 16)])
    assert len(frequencies) == 8


def test_linear_scaling_in_its_old_spelling(tmp_path: Path) -> None:
    path = _write(tmp_path, rope_theta=5000.0, rope_scaling={"type": "linear", "factor": 4.0})
    assert read_architecture(path).inverse_frequencies[0] == 0.25


def test_defaults_of_missing_keys(tmp_path: Path) -> None:
    got = read_architecture(_write(tmp_path, num_key_value_heads=...))
    assert (got.num_kv_heads, got.is_tied, got.head_dim) == (4, False, 16)
    assert got.inverse_frequencies[1] == pytest.approx(10_000.0 ** (-2 / 16))


@pytest.mark.parametrize(
    ("changes", "context_len"),
    [
        ({"model_type": "mistral", "sliding_window": 32}, 32),
        ({"model_type": "mistral", "sliding_window": 4096}, 128),
        ({"model_type": "mistral", "sliding_window": None}, 128),
        ({"model_type": "qwen2", "sliding_window": 32, "use_sliding_window": False}, 128),
        ({"model_type": "qwen2", "sliding_window": 32, "use_sliding_window": True}, 32),
        ({"model_type": "qwen2", "sliding_window": 32}, 128),
    ],
)
def test_a_sliding_window_bounds_the_context(tmp_path: Path, changes: dict[str, Any], context_len: int) -> None:
    assert read_architecture(_write(tmp_path, **changes)).context_len == context_len


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma2"}, "gemma2"),
        ({"model_type": ...}, "None"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"hidden_size": 72, "head_dim": 16}, "hidden_size 72"),
        ({"intermediate_size": 100}, "intermediate_size 100"),
        ({"head_dim": 24}, "head_dim 24"),
        ({"vocab_size": ...}, "vocab_size"),
        ({"rms_norm_eps": ...}, "rms_norm_eps"),
        ({"max_position_embeddings": ...}, "max_position_embeddings"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read_architecture(_write(tmp_path, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"mlp_bias": True},
        {"partial_rotary_factor": 0.5},
        {"num_key_value_heads": 3},
        {"head_dim": 272},
        {"hidden_size": "many"},
    ],
    ids=str,
)
def test_maths_this_engine_does_not_do_is_refused_too(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel):
        read_architecture(_write(tmp_path, **changes))


@pytest.mark.parametrize("text", [None, "", "{", "[]", "3"])
def test_no_readable_config_is_a_missing_model(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelNotFound):
        read_architecture(tmp_path)


def test_rope_tables(tmp_path: Path) -> None:
    architecture = read_architecture(_write(tmp_path))
    cos, sin = rope_tables(architecture, 128)
    assert cos.shape == sin.shape == (128, 8)
    assert cos.dtype == sin.dtype == torch.float32
    assert (cos[0] == 1).all()
    assert (sin[0] == 0).all()
    angle = torch.tensor(127.0, dtype=torch.float64) * architecture.inverse_frequencies[3]
    assert cos[127, 3].item() == pytest.approx(angle.cos().item(), abs=1e-7)
