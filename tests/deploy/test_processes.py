"""The harness itself: order, health, grace, paths and environment, with processes of a few lines."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import yaml

from tests.deploy.compose_file import Healthcheck, Service, parse_duration_s, read_services, select
from tests.deploy.processes import HealthState, Processes, ServiceFailed

CHECK = Healthcheck(test=("x",), interval_s=30, timeout_s=1, start_period_s=10, start_interval_s=2, retries=3)


def test_failures_count_only_after_the_start_period() -> None:
    state = HealthState(check=CHECK)
    assert [state.observe(is_ok=False, age_s=age) for age in (1, 5, 9.9)] == ["starting"] * 3
    assert (state.pause_s(9.9), state.pause_s(10)) == (2, 30)
    assert [state.observe(is_ok=False, age_s=age) for age in (10, 11)] == ["starting"] * 2
    assert state.observe(is_ok=False, age_s=12) == "unhealthy"
    assert state.observe(is_ok=True, age_s=13) == "healthy"


def test_a_healthy_container_becomes_unhealthy_after_retries_in_a_row_even_in_its_start_period() -> None:
    state = HealthState(check=CHECK)
    state.observe(is_ok=True, age_s=1)
    assert state.pause_s(1) == 30
    assert [state.observe(is_ok=False, age_s=2) for _ in range(2)] == ["healthy"] * 2
    state.observe(is_ok=True, age_s=3)
    assert [state.observe(is_ok=False, age_s=4) for _ in range(3)] == ["healthy", "healthy", "unhealthy"]


def test_durations() -> None:
    assert [parse_duration_s(text) for text in ("1h30m", "40s", "500ms", "1m30.5s")] == [5400, 40, 0.5, 90.5]
    for bad in ("", "5", "5 s", "s"):
        with pytest.raises(ValueError, match="duration"):
            parse_duration_s(bad)


def _services(directory: Path, tree: dict[str, object]) -> dict[str, Service]:
    path = directory / "compose.yml"
    path.write_text(yaml.safe_dump({"services": tree}))
    return read_services({}, path)


# Writes what it sees, and goes on until SIGTERM, after which it takes argv[2] seconds.
PROGRAM = """
import json, os, pathlib, signal, sys, time
out = pathlib.Path(sys.argv[1])
def stop(number, frame):
    time.sleep(float(sys.argv[2]))
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
out.write_text(json.dumps(dict(os.environ)))
signal.pause()
"""


def _entry(name: str, *, lingers_s: float = 0.0, **more: object) -> dict[str, object]:
    return {
        "command": [sys.executable, "-c", PROGRAM, f"/shared/{name}", str(lingers_s)],
        "volumes": ["shared:/shared", "own:/shared/own:ro"],
        "stop_grace_period": "300ms",
        "healthcheck": {
            "test": ["CMD", sys.executable, "-c", f"open('/shared/{name}')"],
            "start_interval": "50ms",
            "start_period": "20s",
        },
        **more,
    }


@pytest.mark.integration
@pytest.mark.slow
def test_order_health_grace_and_mapping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BREAKEVEN_FROM_OUTSIDE", "1")
    needs_first = {"first": {"condition": "service_healthy"}}
    services = _services(
        tmp_path,
        {
            "last": _entry("last", lingers_s=30, depends_on=needs_first, environment={"LISTEN": "http://0.0.0.0:80"}),
            "first": _entry(
                "first",
                environment={
                    "WHERE": "ipc:///shared/own/x,/shared",
                    "N": 5,
                    "NOT": "/sharedx",
                    "URL": "http://last:80/x",
                },
            ),
        },
    )
    with Processes(select(services)) as processes:
        processes.up(patience_s=30)
        assert processes.started == ["first", "last"]
        assert processes.probes("first")[-1]
        seen = yaml.safe_load((processes.root / "shared" / "first").read_text())
        root = processes.root
        assert seen["WHERE"] == f"ipc://{root}/own/x,{root}/shared"
        assert (seen["N"], seen["NOT"]) == ("5", "/sharedx")
        last = yaml.safe_load((processes.root / "shared" / "last").read_text())
        assert seen["URL"] == f"{last['LISTEN']}/x"
        assert seen["URL"].startswith("http://127.0.0.1:")
        assert "BREAKEVEN_FROM_OUTSIDE" not in seen
        stopped = processes.down()
    assert [(end.name, end.exit_code, end.was_killed) for end in stopped] == [("last", -9, True), ("first", 0, False)]
    assert not root.exists()


@pytest.mark.integration
@pytest.mark.slow
def test_what_does_not_become_healthy_stops_the_start(tmp_path: Path) -> None:
    check = {"test": ["CMD", "false"], "interval": "20ms", "retries": 2}
    sleeper = {"command": ["sleep", "60"], "healthcheck": check}
    dependent = {"command": ["sleep", "60"], "depends_on": {"a": {"condition": "service_healthy"}}}
    with Processes(select(_services(tmp_path, {"a": sleeper, "b": dependent}))) as processes:
        with pytest.raises(ServiceFailed, match="a is unhealthy"):
            processes.up(patience_s=20)
        assert processes.probes("a") == [False, False]
        assert processes.started == ["a"]
        pid = processes.pid("a")
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_profiles_and_targets_choose_services(tmp_path: Path) -> None:
    def needs(*names: str) -> dict[str, object]:
        return {"depends_on": {name: {"condition": "service_started"} for name in names}}

    tree = {"c": needs("b"), "b": {}, "gpu": {"profiles": ["gpu"]}, "gpu-front": {"profiles": ["gpu"], **needs("gpu")}}
    services = _services(tmp_path, {name: {"command": ["true"], **entry} for name, entry in tree.items()})

    def names(**choice: list[str]) -> list[str]:
        return [service.name for service in select(services, **choice)]

    assert names() == ["b", "c"]
    assert names(targets=["gpu-front"]) == ["gpu", "gpu-front"]
    assert set(names(profiles=["gpu"])) == {"b", "c", "gpu", "gpu-front"}
    with pytest.raises(KeyError):
        select(_services(tmp_path, {"x": needs("gpu"), "gpu": {"profiles": ["gpu"]}}))
