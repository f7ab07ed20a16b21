from __future__ import annotations

import dataclasses

import pytest

from gateway.config import GatewayConfig
from wire.settings import ConfigError


def test_the_defaults_are_valid_and_documented() -> None:
    GatewayConfig().validate()
    for field in dataclasses.fields(GatewayConfig):
        assert field.metadata["help"].endswith(".")


def test_keys_are_not_shown() -> None:
    assert "secret-key" not in repr(GatewayConfig(api_keys=("secret-key",)))


@pytest.mark.parametrize(
    ("settings", "key_path", "text"),
    [
        ({"port": 70_000}, "gateway.port", "between 0 and 65535"),
        ({"host": ""}, "gateway.host", "empty"),
        ({"max_body_bytes": 10}, "gateway.max_body_bytes", "between 1024"),
        ({"keep_alive_s": -1.0}, "gateway.keep_alive_s", "between 0 and 3600"),
        ({"keep_alive_s": float("nan")}, "gateway.keep_alive_s", "between"),
        ({"max_choices": 0}, "gateway.max_choices", "between 1 and 128"),
        ({"api_keys": ("good-enough", "short")}, "gateway.api_keys[1]", "at least 8"),
    ],
)
def test_a_setting_out_of_range_is_named(settings: dict[str, object], key_path: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        GatewayConfig(**settings).validate()
    assert caught.value.key_path == key_path
