"""What the composition root decides itself: which heads fit which targets, and private places."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from drafter.config import DrafterConfig
from gateway.compose import GatewaySettings, _mismatch, _private_places
from gateway.config import GatewayConfig
from gateway.engine_config import EngineConfig, SpeculationConfig
from tests.gateway.core_fakes import TOY_INFO
from verifier.embedded.config import VerifierConfig
from wire.messages import DrafterInfo
from wire.settings import ConfigError

TARGET = msgspec.structs.replace(TOY_INFO, hidden_size=64, aux_layer_ids=(2, 3, 4), vocab_size=100)
HEAD = DrafterInfo(
    head_dir="head",
    head_format="flat",
    target_vocab_size=100,
    draft_vocab_size=50,
    feature_size=192,
    aux_layer_ids=(2, 3, 4),
    max_draft_tokens=8,
)


@pytest.mark.parametrize("changes", [{}, {"aux_layer_ids": ()}, {"target_vocab_size": 90}])
def test_a_head_that_fits(changes: dict[str, Any]) -> None:
    assert _mismatch(TARGET, msgspec.structs.replace(HEAD, **changes)) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"aux_layer_ids": (1, 3, 4)}, r"\(1, 3, 4\)"),
        ({"feature_size": 96}, "96"),
        ({"target_vocab_size": 101}, "101"),
    ],
)
def test_a_head_that_does_not_fit_says_why(changes: dict[str, Any], words: str) -> None:
    problem = _mismatch(TARGET, msgspec.structs.replace(HEAD, **changes))
    assert problem is not None
    assert re.search(words, problem)


def settings(**changes: Any) -> GatewaySettings:
    fields: dict[str, Any] = {
        "gateway": GatewayConfig(),
        "engine": EngineConfig(),
        "speculation": SpeculationConfig(),
        "verifier": VerifierConfig(),
        "drafter": DrafterConfig(),
        "version": "1",
    }
    return GatewaySettings(**{**fields, **changes})


def test_auto_places_are_private_shared_by_the_children_and_removed() -> None:
    with _private_places(settings()) as first, _private_places(settings()) as second:
        assert first.verifier.endpoint != second.verifier.endpoint
        assert first.verifier.ring_path != second.verifier.ring_path
        assert Path(first.verifier.ring_path) == first.drafter.ring_path
        directory = Path(first.verifier.endpoint.removeprefix("ipc://")).parent
        assert directory.stat().st_mode & 0o777 == 0o700
        Path(first.verifier.ring_path).write_bytes(b"left by a killed verifier")
    assert not directory.exists()
    assert not Path(first.verifier.ring_path).exists()


def test_named_places_are_kept(tmp_path: Path) -> None:
    ring = tmp_path / "ring"
    ring.write_bytes(b"mine")
    named = settings(
        verifier=VerifierConfig(endpoint="tcp://127.0.0.1:9", ring_path=str(ring)),
        drafter=DrafterConfig(endpoint="tcp://127.0.0.1:8"),
        engine=EngineConfig(spawn_drafter=False),
    )
    with _private_places(named) as resolved:
        assert resolved.verifier == named.verifier
        assert resolved.drafter == named.drafter
    assert ring.exists()


def test_a_ring_too_small_for_the_longest_drafted_context_is_refused() -> None:
    long = DrafterConfig(max_context_len=100_000)
    with pytest.raises(ConfigError, match=r"verifier.ring_slots: must be at least 1563 for .* 100000"):
        settings(drafter=long)
    settings(drafter=long, verifier=VerifierConfig(ring_slots=1563))
    settings(drafter=long, verifier=VerifierConfig(context_len=16_384))
    settings(drafter=long, speculation=SpeculationConfig(mode="off"))
    settings(drafter=long, engine=EngineConfig(backend="sglang"))
