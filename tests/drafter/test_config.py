"""Settings: defaults, ranges, sources; and that the gateway's imports load no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drafter.config import DrafterConfig
from wire.settings import ConfigError, build_section


def build(**profile: Any) -> DrafterConfig:
    return build_section(DrafterConfig, "drafter", profile=profile, environ={})


def test_defaults_are_valid() -> None:
    assert build() == DrafterConfig()


def test_sources_convert() -> None:
    config = build_section(
        DrafterConfig,
        "drafter",
        profile={"head_dir": "heads/x", "max_draft_tokens": 4},
        environ={"BREAKEVEN_DRAFTER_AUX_LAYER_IDS": "2,15,27"},
        flags={"max_draft_tokens": "6", "shared_noise": "false", "ring_path": None},
    )
    assert config.head_dir == Path("heads/x")
    assert (config.max_draft_tokens, config.shared_noise, config.aux_layer_ids) == (6, False, (2, 15, 27))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("endpoint", "http://x"),
        ("num_threads", 0),
        ("max_draft_tokens", 65),
        ("max_context_len", 1),
        ("max_requests", 0),
        ("max_waiting", 0),
        ("parent_pid", -1),
        ("rope_theta", -1.0),
        ("rope_theta", float("nan")),
        ("aux_layer_ids", [-1]),
        ("kernels", "cuda"),
        ("device", "gpu"),
        ("device", "cuda:"),
        ("device", "cuda:-1"),
        ("norm_before_residual", "maybe"),
        ("no_such_setting", 1),
    ],
)
def test_bad_values_name_their_key(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"drafter\.{key}"):
        build(**{key: value})


@pytest.mark.slow
def test_client_and_config_load_no_torch() -> None:
    modules = "drafter.client, drafter.config, drafter.policy, drafter.head.config"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
