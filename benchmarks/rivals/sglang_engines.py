"""SGLang three times beside each other: plain, with its own EAGLE-3, and with our plugin as breakeven's target."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from benchmarks.sglang.engines import Engine, Variant, lane_endpoint, ring_path, sglang_version, spawn_engine
from benchmarks.sglang.entry_points import PLUGIN, plugin_python_path
from verifier.sglang.command import render_command
from verifier.sglang.config import SGLangConfig, engine_environ

__all__ = [
    "OWN_EAGLE3",
    "PLAIN_ENGINE",
    "TARGET_ENGINE",
    "SGLangEngines",
    "SGLangSetup",
    "engine_configs",
    "sglang_engines",
]

PLAIN_ENGINE: Final = "SGLang"
OWN_EAGLE3: Final = "SGLang, own EAGLE-3"
TARGET_ENGINE: Final = "SGLang under breakeven"


@dataclass(frozen=True, slots=True, kw_only=True)
class SGLangSetup:
    """What all three share.

    Fields:
        python: interpreter that has SGLang. args: of all three. target_args: further ones of breakeven's target.
        port: the first of three. num_drafts: K of EAGLE-3. directory: of logs and sockets.
    """

    python: str
    model_dir: Path
    head_dir: Path
    args: tuple[str, ...]
    target_args: tuple[str, ...]
    port: int
    num_drafts: int
    start_timeout_s: float
    directory: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class SGLangEngines:
    """Those that came up, their settings, and the last words of those that did not."""

    engines: dict[str, Engine]
    configs: dict[str, SGLangConfig]
    failed: dict[str, str]


def engine_configs(setup: SGLangSetup, *, captures_by_flag: bool) -> dict[str, SGLangConfig]:
    """Settings of the three engines.

    Args:
        captures_by_flag: this SGLang has --enable-return-aux-hidden-states (0.5.23).
    """
    own = (
        *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(setup.head_dir)),
        *("--speculative-num-steps", str(setup.num_drafts), "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", str(setup.num_drafts + 1)),
    )
    bare = SGLangConfig(
        python=setup.python,
        url=f"http://127.0.0.1:{setup.port}",
        model_dir=str(setup.model_dir),
        args=setup.args,
        env=("SGLANG_RETURN_ORIGINAL_LOGPROB=1",),
        features="off",
        target_ids="off",
    )
    directory = setup.directory / "target"
    return {
        PLAIN_ENGINE: bare,
        OWN_EAGLE3: replace(bare, url=f"http://127.0.0.1:{setup.port + 1}", args=(*setup.args, *own)),
        TARGET_ENGINE: replace(
            bare,
            url=f"http://127.0.0.1:{setup.port + 2}",
            args=(*setup.args, *setup.target_args),
            features="tap",
            target_ids="auto",
            tap_ring_path=str(ring_path(directory)),
            tap_socket_path=str(directory / "tap.sock"),
            lane_endpoint=lane_endpoint(directory),
            aux_capture="flag" if captures_by_flag else "plugin",
        ),
    }


@asynccontextmanager
async def sglang_engines(setup: SGLangSetup) -> AsyncIterator[SGLangEngines]:
    """Start all at once; yields when each serves or has failed."""
    version = await asyncio.to_thread(sglang_version, setup.python)
    configs = engine_configs(setup, captures_by_flag=version >= (0, 5, 23))
    engines: dict[str, Engine] = {}
    try:
        for name, config in configs.items():
            engines[name] = _start(name, config, setup)
        limit_s = setup.start_timeout_s
        ready = await asyncio.gather(*(engine.wait_ready(timeout_s=limit_s) for engine in engines.values()))
        up = {name for name, is_ready in zip(engines, ready, strict=True) if is_ready}
        yield SGLangEngines(
            engines={name: engine for name, engine in engines.items() if name in up},
            configs=configs,
            failed={name: engine.log_tail() for name, engine in engines.items() if name not in up},
        )
    finally:
        await asyncio.gather(*(asyncio.to_thread(engine.stop) for engine in engines.values()))
        await asyncio.to_thread(Path(configs[TARGET_ENGINE].tap_ring_path).unlink, missing_ok=True)


def _start(name: str, config: SGLangConfig, setup: SGLangSetup) -> Engine:
    directory = setup.directory / {PLAIN_ENGINE: "plain", OWN_EAGLE3: "own", TARGET_ENGINE: "target"}[name]
    directory.mkdir(parents=True, exist_ok=True)
    command = render_command(config, model_path=str(setup.model_dir))
    added = list(command.environ)
    if name == TARGET_ENGINE:
        added.append(("PYTHONPATH", plugin_python_path(directory / "plugins", PLUGIN)))
    return spawn_engine(Variant(name=name), command.argv, engine_environ(added), url=config.url, directory=directory)
