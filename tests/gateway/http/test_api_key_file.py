from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config import GatewayConfig
from gateway.errors import AuthenticationFailed
from gateway.http.key_reload import reload_keys
from gateway.http.key_ring import KeyRing
from wire.settings import ConfigError


@pytest.mark.parametrize(
    ("content", "text"),
    [(b"# nothing\n\n", "holds no key"), (b"good-enough\nshort\n", "line 2"), (b"\xff\xfe", "can't be read")],
)
def test_a_bad_key_file_stops_the_start(tmp_path: Path, content: bytes, text: str) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=text):
        GatewayConfig(api_key_file=path).validate()


def test_a_missing_key_file_does_not_open_the_gateway(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        GatewayConfig(api_key_file=tmp_path / "none").validate()


def accepted(keys: KeyRing, *candidates: str) -> list[str]:
    found = []
    for key in candidates:
        try:
            keys.check(f"Bearer {key}")
        except AuthenticationFailed:
            continue
        found.append(key)
    return found


def test_a_reload_takes_the_new_keys_and_drops_the_old(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("old-key-1\nold-key-2\n", encoding="utf-8")
    config = GatewayConfig(api_keys=("fixed-key",), api_key_file=path)
    keys = KeyRing(config.all_api_keys())
    path.write_text("old-key-2\nnew-key-1\n", encoding="utf-8")
    assert reload_keys(keys, config)
    assert accepted(keys, "fixed-key", "old-key-1", "old-key-2", "new-key-1") == ["fixed-key", "old-key-2", "new-key-1"]


@pytest.mark.parametrize("content", [None, b"", b"good-enough\nshort\n", b"\xff\xfe"])
def test_a_bad_file_keeps_the_old_keys(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "keys"
    path.write_text("old-key-1\n", encoding="utf-8")
    config = GatewayConfig(api_key_file=path)
    keys = KeyRing(config.all_api_keys())
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    assert not reload_keys(keys, config)
    assert accepted(keys, "old-key-1", "good-enough") == ["old-key-1"]


def test_without_a_file_a_reload_changes_nothing() -> None:
    config = GatewayConfig(api_keys=("fixed-key",))
    keys = KeyRing(config.all_api_keys())
    assert reload_keys(keys, config)
    assert accepted(keys, "fixed-key") == ["fixed-key"]
