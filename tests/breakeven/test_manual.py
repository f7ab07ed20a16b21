from __future__ import annotations

import shlex

import pytest
import typer.main
from typer.testing import CliRunner

from breakeven.cli import app
from breakeven.manual import MANUAL, render_manual
from tools.cli_docs import commands

COMMANDS = dict(commands())


@pytest.mark.parametrize("path", COMMANDS)
def test_every_command_has_a_manual_and_its_help_shows_it(path: str) -> None:
    assert path in MANUAL, f"breakeven {path}: add examples, exit status and environment to breakeven/manual.py"
    result = CliRunner().invoke(app, [*path.split(), "--help"], env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
    assert result.exit_code == 0
    assert render_manual(MANUAL[path]) in result.output
    assert "Exit status" in result.output


EXAMPLES = [line for path, manual in MANUAL.items() if path in COMMANDS for line, _ in manual.examples]


@pytest.mark.parametrize("line", EXAMPLES)
def test_every_example_is_a_command_line_that_parses(line: str) -> None:
    words = shlex.split(line.partition(" > ")[0])
    assert words.pop(0) == "breakeven"
    path = next(path for path in COMMANDS if words[: len(path.split())] == path.split())
    command = COMMANDS[path]
    rest = words[len(path.split()) :]
    typer.main.get_command(app)
    command.make_context(path, rest, resilient_parsing=False)
