"""Dashboard and alerts ask only for metrics and labels that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.metrics import METRICS

FOLDER = Path(__file__).parents[3] / "deploy" / "monitoring"
LABELS = {
    metric.name + ("_total" if metric.kind == "counter" else ""): {*metric.labels, "job", "instance"}
    for metric in METRICS
}
_NAME = re.compile(r"\b(?:breakeven_\w+|sglang:\w+|vllm:\w+)")
_SELECTOR = re.compile(r"(\b(?:breakeven_\w+|sglang:\w+|vllm:\w+))\{([^}]*)\}")


def dashboard() -> dict[str, Any]:
    return json.loads((FOLDER / "grafana-dashboard.json").read_text(encoding="utf-8"))


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


PANEL_QUERIES = [
    (panel["title"], target["expr"], target["legendFormat"])
    for panel in dashboard()["panels"]
    for target in panel["targets"]
]
RULE_QUERIES = [(rule["alert"], rule["expr"], " ".join(rule["annotations"].values())) for rule in rules()]


@pytest.mark.parametrize(("title", "query", "text"), [*PANEL_QUERIES, *RULE_QUERIES])
def test_every_name_and_label_of_a_query_exists(title: str, query: str, text: str) -> None:
    names = _NAME.findall(query)
    assert names or query.startswith("up{"), title
    for name in names:
        assert name in LABELS, name
    for name, selector in _SELECTOR.findall(query):
        assert set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector)) <= LABELS[name]
    shown = set(re.findall(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}", text))
    for label in shown:
        assert all(label in LABELS[name] for name in names), label


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    panels = dashboard()["panels"]
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len({panel["id"] for panel in panels}) == len(panels)


def test_every_alert_says_what_to_do() -> None:
    for rule in rules():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert len(rule["annotations"]["description"]) > 20
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text(encoding="utf-8"))
    assert config["rule_files"] == ["alerts.yml"]
