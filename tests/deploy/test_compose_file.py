"""docker-compose.yml, the Dockerfiles and .env.example: valid, pinned, closed, and true to the code they name."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft201909Validator

from breakeven import __version__
from breakeven.cli import app
from breakeven.settings import SECTIONS, Settings, find_profile
from drafter.config import DrafterConfig
from gateway.engine_config import EngineConfig
from tests.deploy.compose_file import COMPOSE_PATH, ROOT, Service, read_raw, read_services, select
from tests.deploy.interpolation import interpolate_tree, read_env_file, variables
from verifier.sglang.command import render_command
from verifier.sglang.config import SGLangConfig
from wire.settings import env_name, load_profile

SERVICES = read_services({})
OURS = [service for service in SERVICES.values() if service.command[:1] == ("breakeven",)]
EXAMPLE = read_env_file((ROOT / ".env.example").read_text(encoding="utf-8"))
every = pytest.mark.parametrize("service", SERVICES.values(), ids=lambda service: service.name)
ours = pytest.mark.parametrize("service", OURS, ids=lambda service: service.name)


def _settings(service: Service) -> Settings:
    profile = service.environment.get("BREAKEVEN_PROFILE", "cpu-tiny")
    return Settings(load_profile(find_profile(profile)), service.environment, {})


@pytest.mark.parametrize("environ", [{}, EXAMPLE], ids=["nothing set", ".env.example"])
def test_it_is_a_valid_compose_file(environ: dict[str, str]) -> None:
    schema = json.loads((Path(__file__).parent / "compose-spec.json").read_text(encoding="utf-8"))
    tree = interpolate_tree(read_raw(), environ)
    # In the specification since 2022 and 2023; the schema at hand is of 2021.
    assert tree.pop("name") == "breakeven"
    for service in tree["services"].values():
        assert service["healthcheck"].pop("start_interval") == "3s"
    Draft201909Validator(schema).validate(tree)


def test_every_variable_has_a_default_and_the_example_repeats_it() -> None:
    used = variables(read_raw())
    assert [name for name, default in used.items() if default is None] == []
    assert used == EXAMPLE


def test_the_header_names_services_and_profiles_that_exist() -> None:
    header = [line for line in COMPOSE_PATH.read_text(encoding="utf-8").splitlines() if line.startswith("# docker")]
    profiles = {profile for service in SERVICES.values() for profile in service.profiles}
    assert profiles == {"sglang", "monitoring"}
    for line in header:
        for profile in re.findall(r"--profile (\S+)", line):
            assert profile in profiles
        for target in re.findall(r" up (\S+)", line):
            assert target in SERVICES
    assert len(header) == 3


def test_what_each_way_of_starting_starts() -> None:
    def names(**choice: list[str]) -> list[str]:
        return [service.name for service in select(SERVICES, **choice)]

    assert names() == ["verifier", "drafter", "gateway"]
    assert names(targets=["sglang-gateway"])[-1] == "sglang-gateway"
    assert set(names(targets=["sglang-gateway"])) == {"sglang", "sglang-drafter", "sglang-gateway"}
    assert set(names(profiles=["monitoring"])) == {*names(), "prometheus", "grafana"}


@every
def test_images_are_pinned(service: Service) -> None:
    image, _, tag = service.raw["image"].partition(":")
    assert image
    assert re.search(r"\d+\.\d+\.\d+", tag), service.raw["image"]
    assert not image.startswith("breakeven") or tag.startswith(__version__)


@every
def test_services_are_closed(service: Service) -> None:
    raw = service.raw
    assert raw["cap_drop"] == ["ALL"]
    assert raw["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in raw
    assert "network_mode" not in raw
    assert all(address == "127.0.0.1" for address, _ in service.ports.values())
    # SGLang's image writes where it likes; everything else has no business to.
    assert raw.get("read_only", False) is (service.name != "sglang")


@ours
def test_our_services_run_as_nobody_in_particular(service: Service) -> None:
    assert service.raw["user"] == "10001:10001"
    assert service.command[1] in {command.name or command.callback.__name__ for command in app.registered_commands}


@every
def test_health_and_shutdown_are_declared(service: Service) -> None:
    check = service.healthcheck
    assert check is not None
    assert check.start_period_s >= 60
    assert check.retries >= 2
    assert check.start_interval_s < check.interval_s
    assert check.timeout_s >= 2 * 3.0  # twice what `breakeven health` itself waits
    assert set(service.depends_on.values()) <= {"service_healthy"}
    assert "stop_grace_period" in service.raw


@pytest.mark.parametrize("name", ["gateway", "sglang-gateway"])
def test_the_grace_is_longer_than_the_drain(name: str) -> None:
    for environ in ({}, EXAMPLE):
        service = read_services(environ)[name]
        drain_s = _settings(service).section("engine", EngineConfig).drain_timeout_s
        assert service.stop_grace_s >= drain_s + 15


@ours
def test_every_setting_in_the_environment_exists_and_is_accepted(service: Service) -> None:
    known = {env_name(section, f.name) for section, cls in SECTIONS.items() for f in dataclasses.fields(cls)}
    given = {name for name in service.environment if name.startswith("BREAKEVEN_")} - {"BREAKEVEN_PROFILE"}
    assert given <= known, given - known
    for section, cls in SECTIONS.items():
        _settings(service).section(section, cls)


@ours
def test_services_share_files_by_volumes_only(service: Service) -> None:
    targets = sorted((mount.target for mount in service.mounts), key=len, reverse=True)
    for name, value in service.environment.items():
        for path in re.findall(r"(?:ipc://)?(/(?:run|var|srv|tmp|dev)/[\w./-]+)", value):
            assert any(path == target or path.startswith(target + "/") for target in targets), (name, value)


@every
def test_bind_mounts_exist(service: Service) -> None:
    for mount in service.mounts:
        if mount.source.startswith(".") and mount.source != "./models":
            assert (ROOT / mount.source).exists(), mount.source
            assert mount.is_read_only


def test_named_volumes_are_declared() -> None:
    volumes = read_raw()["volumes"]
    used = {mount.source for service in SERVICES.values() for mount in service.mounts}
    assert {source for source in used if source and not source.startswith((".", "/"))} == set(volumes)
    for name in ("run", "sglang-run"):
        assert volumes[name]["driver_opts"]["type"] == "tmpfs"


def test_sglang_gets_its_gpus_and_the_profile_s_arguments_and_nccl_environment() -> None:
    service = SERVICES["sglang"]
    (device,) = service.raw["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "8", "capabilities": ["gpu"]}
    config = _settings(service).section("sglang", SGLangConfig)
    command = render_command(config, model_path=config.model_path)
    assert command.argv[command.argv.index("--tp-size") + 1] == device["count"]
    assert command.argv[command.argv.index("--host") + 1] == "0.0.0.0"
    environ = dict(command.environ)
    assert environ["NCCL_P2P_LEVEL"] == "SYS"
    assert environ["BREAKEVEN_TAP_RING"] == SERVICES["sglang-drafter"].environment["BREAKEVEN_DRAFTER_RING_PATH"]
    assert service.raw["ulimits"]["memlock"] == -1


def test_the_drafter_beside_sglang_sees_one_gpu_and_runs_where_torch_has_cuda() -> None:
    service = SERVICES["sglang-drafter"]
    (device,) = service.raw["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "device_ids": ["0"], "capabilities": ["gpu"]}
    assert service.raw["image"] == SERVICES["sglang"].raw["image"]
    assert _settings(service).section("drafter", DrafterConfig).device == "cuda:0"


def test_the_three_of_a_stack_agree_on_where_they_meet() -> None:
    for names in (["gateway", "drafter", "verifier"], ["sglang-gateway", "sglang-drafter", "sglang"]):
        first = SERVICES[names[0]]
        for name in names[1:]:
            for key in first.environment:
                if key.endswith(("_ENDPOINT", "_PATH", "_PROFILE")):
                    assert SERVICES[name].environment[key] == first.environment[key], (name, key)


def test_prometheus_scrapes_the_gateways_and_grafana_shows_the_dashboard() -> None:
    monitoring = ROOT / "deploy" / "monitoring"
    (job,) = yaml.safe_load((monitoring / "prometheus.yml").read_text())["scrape_configs"]
    (names,) = job["dns_sd_configs"]
    assert all(SERVICES[name].ports.keys() == {names["port"]} for name in names["names"])
    mounts = {mount.target: mount.source for mount in (*SERVICES["prometheus"].mounts, *SERVICES["grafana"].mounts)}
    key = Path("/etc/prometheus") / job["authorization"]["credentials_file"]
    assert (ROOT / mounts[str(key)]).read_text() == ""
    (source,) = yaml.safe_load((monitoring / "grafana/datasources/prometheus.yml").read_text())["datasources"]
    host, port = source["url"].removeprefix("http://").split(":")
    assert int(port) in SERVICES[host].ports
    (provider,) = yaml.safe_load((monitoring / "grafana/dashboards/breakeven.yml").read_text())["providers"]
    shown = SERVICES["grafana"].environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert str(Path(shown).parent) == provider["options"]["path"]
    assert (ROOT / mounts[shown]).name == "grafana-dashboard.json"


@pytest.mark.parametrize("path", ["Dockerfile", "deploy/sglang/Dockerfile"])
def test_dockerfiles_pin_their_base_and_drop_root(path: str) -> None:
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    words = [line.split() for line in lines if line and not line[0].isspace() and not line.startswith("#")]
    arguments = dict(parts[1].split("=", 1) for parts in words if parts[0] == "ARG")
    bases = [parts[1] for parts in words if parts[0] == "FROM"]
    for base in bases:
        assert re.search(r":v?\d+\.\d+\.\d+", re.sub(r"\$\{(\w+)\}", lambda m: arguments[m.group(1)], base)), base
    assert [parts[1] for parts in words if parts[0] == "USER"][-1:] == ["10001:10001"]
    assert not any(parts[0] == "ADD" or "latest" in " ".join(parts) for parts in words)
    body = "\n".join(lines)
    assert body.count("apt-get install") == body.count("--no-install-recommends") == body.count("rm -rf /var/lib/apt")


def test_the_image_gets_every_package_and_nothing_else() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = {name.rstrip("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert packages <= kept
    assert {project["project"]["readme"], *project["project"]["license-files"], "pyproject.toml"} <= kept
    assert all((ROOT / name).exists() for name in kept)
    assert "*" in (ROOT / ".dockerignore").read_text().splitlines()
