from __future__ import annotations

import dataclasses

import pytest
from typer.testing import CliRunner

from breakeven import __version__
from breakeven.cli import app
from breakeven.settings import SECTIONS

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


@pytest.mark.parametrize("switch", ["--gateway", "--verifier", "--drafter"])
def test_health_of_what_does_not_run_is_an_exit_status(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("breakeven.cli._HEALTH_TIMEOUT_S", 0.05)
    flags = ["--gateway.port", "1", "--verifier.endpoint", "ipc:///nonexistent-dir-of-a-test/x"]
    flags += ["--drafter.endpoint", "ipc:///nonexistent-dir-of-a-test/y"]
    assert RUNNER.invoke(app, ["health", switch, *flags]).exit_code == 1
