from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config import GatewayConfig
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
