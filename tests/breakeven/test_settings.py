from __future__ import annotations

import dataclasses
import re
from importlib import resources
from pathlib import Path

import pytest

from breakeven.settings import SECTIONS, Settings, bundled_head, find_profile, load_settings
from gateway.config import GatewayConfig
from tools.configuration_docs import render
from verifier.embedded.config import VerifierConfig
from wire.settings import ConfigError, env_name

PROFILES = sorted(Path(str(resources.files("configs"))).glob("*.toml"))


@pytest.mark.parametrize("path", PROFILES, ids=lambda p: p.stem)
def test_every_profile_builds_every_section(path: Path) -> None:
    settings = load_settings(str(path), {})
    for name, cls in SECTIONS.items():
        assert isinstance(settings.section(name, cls), cls)


def test_flag_beats_environment_beats_profile() -> None:
    tables = {"gateway": {"port": 1111, "host": "127.0.0.2"}}
    environ = {"BREAKEVEN_GATEWAY_PORT": "2222", "BREAKEVEN_GATEWAY_KEEP_ALIVE_S": "3.5"}
    config = Settings(tables, environ, {"gateway.port": "3333"}).section("gateway", GatewayConfig)
    assert (config.port, config.host, config.keep_alive_s) == (3333, "127.0.0.2", 3.5)
    config = Settings(tables, environ, {"gateway.port": None}).section("gateway", GatewayConfig)
    assert config.port == 2222


def test_unknown_section_and_key_are_errors() -> None:
    with pytest.raises(ConfigError, match="gatway: unknown section"):
        Settings({"gatway": {}}, {}, {})
    with pytest.raises(ConfigError, match=r"verifier\.modell: unknown setting"):
        Settings({"verifier": {"modell": "x"}}, {}, {}).section("verifier", VerifierConfig)


def test_profiles_are_found_by_name_or_path(tmp_path: Path) -> None:
    assert find_profile("cpu-tiny").name == "cpu-tiny.toml"
    own = tmp_path / "own.toml"
    assert find_profile(str(own)) == own
    with pytest.raises(ConfigError, match="cpu-tiny"):
        find_profile("no-such-profile")


def test_a_bare_head_name_is_looked_up_among_the_shipped_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = bundled_head(Path("smollm2-135m-instruct"))
    assert shipped.parent.name == "heads"
    assert (shipped / "config.json").is_file()
    (tmp_path / "smollm2-135m-instruct").mkdir()
    assert bundled_head(Path("smollm2-135m-instruct")) == Path("smollm2-135m-instruct")


def test_the_configuration_page_is_up_to_date() -> None:
    page = Path(__file__).parents[2] / "docs" / "configuration.md"
    assert page.read_text() == render(), "run: python -m tools.configuration_docs"


def test_every_setting_says_what_it_is_for() -> None:
    for section, cls in SECTIONS.items():
        for field in dataclasses.fields(cls):
            assert len(field.metadata.get("help", "")) > 10, f"{section}.{field.name} has no help"
            assert re.fullmatch(r"BREAKEVEN_[A-Z0-9_]+", env_name(section, field.name))
