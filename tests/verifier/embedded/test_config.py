"""Settings of the embedded verifier: documented, in range, and "auto" resolved."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from verifier.embedded.config import VerifierConfig
from wire.settings import ConfigError


def test_the_defaults_are_valid_and_documented() -> None:
    VerifierConfig().validate()
    for field in dataclasses.fields(VerifierConfig):
        assert field.metadata["help"], field.name


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("ring_slots", 0, "at least 1"),
        ("ring_slot_rows", 0, "at least 1"),
        ("num_threads", 0, "at least 1"),
        ("max_requests", 0, "at least 1"),
        ("prefill_chunk_tokens", 0, "at least 1"),
        ("context_len", -1, "0 or more"),
        ("prefix_cache_tokens", -1, "0 or more"),
        ("aux_layer_ids", (1, 2), "three layers"),
        ("aux_layer_ids", (1, 2, 3, 4), "three layers"),
    ],
)
def test_out_of_range_names_the_key(key: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        VerifierConfig(**{key: value}).validate()
    assert caught.value.key_path == f"verifier.{key}"


@pytest.mark.parametrize(
    ("key", "value"), [("context_len", 0), ("prefix_cache_tokens", 0), ("aux_layer_ids", (1, 2, 3)), ("ring_slots", 1)]
)
def test_the_edges_are_allowed(key: str, value: object) -> None:
    VerifierConfig(**{key: value}).validate()


def test_the_cache_directory() -> None:
    assert VerifierConfig().resolved_cache_dir == Path.home() / ".cache" / "breakeven"
    assert VerifierConfig(cache_dir="/x").resolved_cache_dir == Path("/x")


def test_it_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        VerifierConfig().model = "x"
