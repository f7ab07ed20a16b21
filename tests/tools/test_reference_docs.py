"""Pages that are generated from code are what the code generates now."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.metrics import METRICS
from tools import cli_docs, metrics_docs

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("page", "render", "tool"),
    [("cli.md", cli_docs.render, "cli_docs"), ("metrics.md", metrics_docs.render, "metrics_docs")],
)
def test_the_page_is_up_to_date(page: str, render: Callable[[], str], tool: str) -> None:
    assert (DOCS / page).read_text(encoding="utf-8") == render(), f"run: python -m tools.{tool}, or make reference"


def test_every_metric_and_every_command_is_in_its_page() -> None:
    page = metrics_docs.render()
    assert all(f"`{metric.name}" in page for metric in METRICS)
    assert all(f"\n## breakeven {path}\n" in cli_docs.render() for path, _ in cli_docs.commands())
