from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from aiohttp.test_utils import unused_port
from typer.testing import CliRunner

from breakeven import __version__
from breakeven.cli import app, main
from breakeven.settings import SECTIONS
from wire.settings import ConfigError

RUNNER = CliRunner()


def test_every_setting_is_a_flag_of_serve() -> None:
    # Wide, so that no flag is cut in the middle.
    help_text = RUNNER.invoke(app, ["serve", "--help"], env={"COLUMNS": "400", "TERMINAL_WIDTH": "400"}).output
    for section, cls in SECTIONS.items():
        for field in dataclasses.fields(cls):
            assert f"--{section}.{field.name.replace('_', '-')}" in help_text


def test_version() -> None:
    assert RUNNER.invoke(app, ["version"]).output.strip() == __version__


def test_a_bad_value_names_the_setting() -> None:
    result = RUNNER.invoke(app, ["serve", "--gateway.port", "70000"])
    assert result.exit_code != 0
    assert "gateway.port" in str(result.exception)


@pytest.mark.parametrize("switch", ["--gateway", "--verifier", "--drafter", "--sglang"])
def test_health_of_what_does_not_run_is_an_exit_status(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("breakeven.cli._HEALTH_TIMEOUT_S", 0.05)
    flags = [
        "--gateway.port",
        "1",
        "--sglang.url",
        "http://127.0.0.1:1",
        "--verifier.endpoint",
        "ipc:///nonexistent-dir-of-a-test/x",
    ]
    flags += ["--drafter.endpoint", "ipc:///nonexistent-dir-of-a-test/y"]
    assert RUNNER.invoke(app, ["health", switch, *flags]).exit_code == 1


def test_health_of_nothing_is_ready() -> None:
    assert RUNNER.invoke(app, ["health"]).exit_code == 0


def test_torture_of_a_server_that_is_not_there() -> None:
    result = RUNNER.invoke(app, ["torture", f"http://127.0.0.1:{unused_port()}", "--model", "m", "--only", "role"])
    assert result.exit_code == 2
    assert "can't be reached" in result.output


@pytest.mark.parametrize("key", ["endpoint", "ring-path"])
def test_a_verifier_of_its_own_needs_places(key: str) -> None:
    other = {"endpoint": "ring-path", "ring-path": "endpoint"}[key]
    result = RUNNER.invoke(app, ["verifier", f"--verifier.{other}", "ipc:///nonexistent-dir-of-a-test/x"])
    assert isinstance(result.exception, ConfigError)
    assert result.exception.key_path == f"verifier.{key.replace('-', '_')}"


def test_a_bad_profile_names_the_setting(tmp_path: Path) -> None:
    profile = tmp_path / "p.toml"
    profile.write_text("[gateway]\nprot = 8000\n")
    result = RUNNER.invoke(app, ["serve", "--profile", str(profile)])
    assert isinstance(result.exception, ConfigError)
    assert "gateway.prot: unknown setting" in str(result.exception)


def test_main_prints_a_bad_setting_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["breakeven", "serve", "--gateway.port", "70000"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert capsys.readouterr().err == "breakeven: gateway.port: must be between 0 and 65535, not 70000\n"


def test_the_profile_may_come_from_the_environment() -> None:
    result = RUNNER.invoke(app, ["health", "--gateway"], env={"BREAKEVEN_PROFILE": "no-such-profile"})
    assert "no-such-profile" in str(result.exception)
    result = RUNNER.invoke(app, ["health", "--profile", "nor-this"], env={"BREAKEVEN_PROFILE": "no-such-profile"})
    assert "nor-this" in str(result.exception)


def test_profiles_and_commands_are_completed() -> None:
    def completed(line: str) -> list[str]:
        words = line.split(" ")
        environ = {"_BREAKEVEN_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
        return RUNNER.invoke(app, [], prog_name="breakeven", env=environ).output.split()

    assert completed("breakeven serve --profile cpu") == ["cpu-smollm2", "cpu-tiny"]
    assert completed("breakeven ver") == ["verifier", "version"]
    assert "--speculation.mode" in completed("breakeven serve --speculation.m")
