"""Ranges of [engine] and [speculation]."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from gateway.engine_config import EngineConfig, SpeculationConfig
from wire.settings import ConfigError, build_section


@pytest.mark.parametrize("cls", [EngineConfig, SpeculationConfig])
def test_the_defaults_are_valid_and_documented(cls: type) -> None:
    cls().validate()
    for field in dataclasses.fields(cls):
        assert field.metadata["help"].endswith(".")


@pytest.mark.parametrize(
    ("cls", "key", "value"),
    [
        (EngineConfig, "max_running", 0),
        (EngineConfig, "max_waiting", -1),
        (EngineConfig, "verify_timeout_s", 0.0),
        (EngineConfig, "prompt_timeout_s", 1e6),
        (EngineConfig, "request_timeout_s", float("nan")),
        (EngineConfig, "drain_timeout_s", -1.0),
        (EngineConfig, "model_name", ""),
        (SpeculationConfig, "candidates", ()),
        (SpeculationConfig, "candidates", (2, 1)),
        (SpeculationConfig, "candidates", (1, 1)),
        (SpeculationConfig, "candidates", (0, 1)),
        (SpeculationConfig, "candidates", (1, 65)),
        (SpeculationConfig, "num_draft_tokens", 0),
        (SpeculationConfig, "num_draft_tokens", 9),
        (SpeculationConfig, "draft_timeout_s", 0.0),
        (SpeculationConfig, "draft_timeout_s", float("inf")),
    ],
)
def test_out_of_range_names_the_key(cls: type, key: str, value: Any) -> None:
    section = "engine" if cls is EngineConfig else "speculation"
    with pytest.raises(ConfigError) as caught:
        cls(**{key: value}).validate()
    assert caught.value.key_path == f"{section}.{key}"


@pytest.mark.parametrize(
    ("cls", "values"),
    [
        (EngineConfig, {"max_running": 1, "max_waiting": 0}),
        (SpeculationConfig, {"candidates": (64,), "num_draft_tokens": 64}),
    ],
)
def test_the_edges_are_allowed(cls: type, values: dict[str, Any]) -> None:
    cls(**values).validate()


def test_an_unknown_mode_is_refused_by_the_loader() -> None:
    with pytest.raises(ConfigError, match="mode"):
        build_section(SpeculationConfig, "speculation", profile={"mode": "maybe"}, environ={})
