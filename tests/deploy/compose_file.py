"""docker-compose.yml as typed services: parsed, interpolated, selected by profile and ordered by dependency."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.interpolation import interpolate_tree

ROOT = Path(__file__).parents[2]
COMPOSE_PATH = ROOT / "docker-compose.yml"
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|us|h|m|s)")
_UNIT_S = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}
# Docker's own, where the file says nothing.
_HEALTH_DEFAULTS = {"interval": "30s", "timeout": "30s", "retries": 3, "start_period": "0s", "start_interval": "5s"}
_STOP_GRACE = "10s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Healthcheck:
    """When a container counts as healthy; seconds. start_interval_s: between probes in the start period."""

    test: tuple[str, ...]
    interval_s: float
    timeout_s: float
    start_period_s: float
    start_interval_s: float
    retries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """source: a volume's name, a host path, or "" for a tmpfs."""

    source: str
    target: str
    is_read_only: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One service, resolved. depends_on: service to condition. ports: container port to (host address, host port)."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    healthcheck: Healthcheck | None
    mounts: tuple[Mount, ...]
    depends_on: Mapping[str, str]
    ports: Mapping[int, tuple[str, int]]
    profiles: frozenset[str]
    stop_signal: str
    stop_grace_s: float
    raw: Mapping[str, Any]


def parse_duration_s(text: str) -> float:
    """Seconds of "1h30m", "40s" or "500ms"."""
    parts = _DURATION.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError(f"not a duration: {text!r}")
    return sum(float(number) * _UNIT_S[unit] for number, unit in parts)


def read_raw(path: Path = COMPOSE_PATH) -> dict[str, Any]:
    """The file after YAML's own merging, before interpolation."""
    tree: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return tree


def read_services(environ: Mapping[str, str], path: Path = COMPOSE_PATH) -> dict[str, Service]:
    """All services by name, with ``environ`` (the shell's and .env's variables) filled in."""
    tree = interpolate_tree(read_raw(path), environ)
    return {name: _service(name, raw) for name, raw in tree["services"].items()}


def select(
    services: Mapping[str, Service], *, profiles: Sequence[str] = (), targets: Sequence[str] = ()
) -> list[Service]:
    """What ``up`` starts, dependencies first: the targets and what they need, or everything enabled.

    Raises:
        KeyError: a dependency is missing, or belongs to a profile that is not active.
    """
    active = set(profiles).union(*(services[name].profiles for name in targets))
    enabled = {name: s for name, s in services.items() if not s.profiles or s.profiles & active}
    wanted, open_names = set(), list(targets or enabled)
    while open_names:
        name = open_names.pop()
        if name not in wanted:
            wanted.add(name)
            open_names += enabled[name].depends_on
    order = TopologicalSorter({name: sorted(enabled[name].depends_on) for name in sorted(wanted)})
    return [enabled[name] for name in order.static_order()]


def _service(name: str, raw: Mapping[str, Any]) -> Service:
    command = raw.get("command", [])
    assert isinstance(command, list), f"{name}: a command that is no list goes through a shell"
    depends_on = raw.get("depends_on", {})
    if isinstance(depends_on, list):
        depends_on = {other: {"condition": "service_started"} for other in depends_on}
    mounts = [_mount(text) for text in raw.get("volumes", [])]
    mounts += [Mount(source="", target=text.partition(":")[0], is_read_only=False) for text in raw.get("tmpfs", [])]
    return Service(
        name=name,
        command=tuple(map(str, command)),
        environment={key: "" if value is None else str(value) for key, value in raw.get("environment", {}).items()},
        healthcheck=_healthcheck(raw["healthcheck"]) if "healthcheck" in raw else None,
        mounts=tuple(mounts),
        depends_on={other: entry["condition"] for other, entry in depends_on.items()},
        ports=dict(_port(text) for text in raw.get("ports", [])),
        profiles=frozenset(raw.get("profiles", [])),
        stop_signal=raw.get("stop_signal", "SIGTERM"),
        stop_grace_s=parse_duration_s(raw.get("stop_grace_period", _STOP_GRACE)),
        raw=raw,
    )


def _healthcheck(raw: Mapping[str, Any]) -> Healthcheck:
    entry = {**_HEALTH_DEFAULTS, **raw}
    assert entry["test"][0] == "CMD", "a healthcheck that goes through a shell"
    return Healthcheck(
        test=tuple(entry["test"][1:]),
        interval_s=parse_duration_s(entry["interval"]),
        timeout_s=parse_duration_s(entry["timeout"]),
        start_period_s=parse_duration_s(entry["start_period"]),
        start_interval_s=parse_duration_s(entry["start_interval"]),
        retries=int(entry["retries"]),
    )


def _mount(text: str) -> Mount:
    source, target, *options = text.split(":")
    return Mount(source=source, target=target, is_read_only="ro" in options)


def _port(text: str) -> tuple[int, tuple[str, int]]:
    *address, published, target = text.split(":")
    return int(target), (":".join(address) or "0.0.0.0", int(published))
