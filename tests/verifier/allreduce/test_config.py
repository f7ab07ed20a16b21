"""Settings by environment: defaults, values, and errors that name the variable."""

from __future__ import annotations

from pathlib import Path

import pytest

from verifier.allreduce.config import AllReduceConfig, read_config
from wire.settings import ConfigError


def test_defaults() -> None:
    assert read_config({"PATH": "x"}) == AllReduceConfig()
    assert read_config({}).resolved_cache_dir == Path.home() / ".cache" / "breakeven" / "allreduce"


def test_values() -> None:
    config = read_config(
        {
            "BREAKEVEN_ALLREDUCE_ISLAND_SIZE": "4",
            "BREAKEVEN_ALLREDUCE_PEER_ACCESS": "off",
            "BREAKEVEN_ALLREDUCE_WRITES_COLLAPSE": "1",
            "BREAKEVEN_ALLREDUCE_MAX_BYTES": "65536",
            "BREAKEVEN_ALLREDUCE_TIMEOUT_S": "2",
            "BREAKEVEN_ALLREDUCE_CACHE_DIR": "/somewhere",
        }
    )
    assert (config.island_size, config.peer_access, config.writes_collapse) == (4, "off", True)
    assert (config.max_bytes, config.timeout_s, config.resolved_cache_dir) == (65536, 2, Path("/somewhere"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ISLAND_SIZE", "9"),
        ("ISLAND_SIZE", "four"),
        ("PEER_ACCESS", "yes"),
        ("MAX_BYTES", "100"),
        ("MAX_BYTES", "0"),
        ("MAX_BYTES", "2097152"),
        ("TIMEOUT_S", "0"),
        ("ISLANDSIZE", "4"),
    ],
)
def test_errors_name_the_variable(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"BREAKEVEN_ALLREDUCE_{name}"):
        read_config({f"BREAKEVEN_ALLREDUCE_{name}": value})
