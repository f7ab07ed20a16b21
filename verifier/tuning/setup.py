"""What a measurement depends on beside the settings under test, as one key: with another key all is measured anew."""

from __future__ import annotations

import hashlib
import json
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from verifier.allreduce.probe import probe_machine
from verifier.allreduce.probe_identity import MachineIdentity, machine_identity
from verifier.allreduce.probe_records import Machine
from verifier.sglang.command import render_command
from verifier.sglang.config import SGLangConfig, engine_environ
from verifier.tuning.plan import Workload
from wire.settings import ConfigError

__all__ = ["Setup", "describe_setup", "engine_versions"]

_PACKAGES = (
    "sglang",
    "sglang-kernel",
    "torch",
    "triton",
    "flashinfer-python",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "transformers",
    "breakeven",
)
_ASK = """
import importlib.metadata as m, json, sys
found = {"python": sys.version.split()[0]}
for name in sys.argv[1:]:
    try: found[name] = m.version(name)
    except m.PackageNotFoundError: pass
print(json.dumps(found))
"""
_ASK_TIMEOUT_S = 60.0
# Where it listens and how it is reached changes no measurement.
_IRRELEVANT = ("--host", "--port", "--api-key")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """``key`` is the digest of ``facts``."""

    key: str
    facts: dict[str, Any]


def describe_setup(
    config: SGLangConfig, *, model_path: str, workload: Workload, machine: MachineIdentity | None = None
) -> Setup:
    """Look at machine, versions, model and base settings.

    Raises:
        ConfigError: the engine's interpreter can't be run.
    """
    command = render_command(config, model_path=model_path)
    machine = machine or machine_identity()
    facts: dict[str, Any] = {
        "machine": asdict(machine),
        "versions": engine_versions(config),
        "model": {"name": Path(model_path).name, "config_digest": _digest_of(Path(model_path) / "config.json")},
        "args": _relevant(command.argv[command.argv.index("--model-path") + 2 :]),
        "env": sorted(f"{name}={value}" for name, value in command.environ if not name.startswith("BREAKEVEN_TAP")),
        "workload": msgspec.to_builtins(workload),
    }
    if machine.gpus:
        facts["peer_access"] = _peer_access(probe_machine())
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return Setup(key=key, facts=json.loads(json.dumps(facts)))


def engine_versions(config: SGLangConfig) -> dict[str, str]:
    """Versions in the engine's environment, without importing any of it.

    Raises:
        ConfigError: the interpreter can't be run.
    """
    command = [config.python, "-c", _ASK, *_PACKAGES]
    try:
        done = subprocess.run(  # noqa: S603 - the profile's interpreter
            command, env=engine_environ(()), capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=True
        )
        found = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise ConfigError("sglang.python", f"{config.python!r} can't be asked for its versions: {error}") from None
    return {str(name): str(version) for name, version in found.items()}


def _peer_access(machine: Machine) -> dict[str, Any]:
    """What firmware and driver options change without any version changing."""
    return {
        "p2p": {name: sorted(set(matrix.values())) for name, matrix in machine.p2p.items()},
        "acs_redirects": sorted(device.address for device in machine.pci if device.redirects),
        "iommu": machine.host.iommu,
        "registry_dwords": machine.host.registry_dwords,
        "kernel_flags": list(machine.host.kernel_flags),
    }


def _relevant(argv: tuple[str, ...]) -> list[str]:
    kept, skip = [], False
    for arg in argv:
        if skip:
            skip = False
        elif arg in _IRRELEVANT:
            skip = True
        else:
            kept.append(arg)
    return kept


def _digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else ""
