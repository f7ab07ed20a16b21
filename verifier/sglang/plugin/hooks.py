"""Every place where the plugin reaches into SGLang, with the versions it was tested on.

A target that is absent or whose parameters changed switches its capability off; the engine starts all the same.
"""

from __future__ import annotations

import inspect
import logging
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from verifier.sglang.plugin.config import PluginConfig, read_plugin_config
from verifier.sglang.plugin.tap import FeatureTap

__all__ = ["HOOKS", "Hook", "register"]

log = logging.getLogger("breakeven.plugin")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """One target. kind: SGLang's HookType. parameters: names the target must have, in this order, at its start."""

    name: str
    target: str
    kind: str
    parameters: tuple[str, ...]
    tested_on: tuple[str, ...]
    is_wanted: Callable[[PluginConfig], bool]
    make: Callable[[PluginConfig], Callable[..., Any]]


def _identity(config: PluginConfig) -> Callable[..., Any]:
    return lambda value, *args, **kwargs: value


HOOKS: Final[tuple[Hook, ...]] = (
    Hook(
        name="tap of aux hidden states",
        target="sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation",
        kind="AROUND",
        parameters=("self", "batch"),
        tested_on=("0.5.23 (CPU)",),
        is_wanted=lambda config: config.ring_path is not None,
        make=lambda config: FeatureTap(config).around_forward,
    ),
    Hook(
        # Captured inputs of prefill graph segments are weak references in 0.5.23: sglang#37606, fix #37448.
        name="kept inputs of breakable CUDA graphs",
        target="sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph._weak_ref_if_tensor",
        kind="REPLACE",
        parameters=(),
        tested_on=(),
        is_wanted=lambda config: config.keeps_graph_inputs,
        make=_identity,
    ),
)


def register() -> None:
    """Entry point, group ``sglang.srt.plugins``: called once in every process of SGLang."""
    registry = pkgutil.resolve_name("sglang.srt.plugins.hook_registry")
    config = read_plugin_config()
    for hook in HOOKS:
        if not hook.is_wanted(config):
            continue
        problem = _problem(hook)
        if problem is not None:
            log.warning("breakeven: %s is off: %s", hook.name, problem)
            continue
        registry.HookRegistry.register(hook.target, hook.make(config), registry.HookType[hook.kind])
        log.info("breakeven: %s is on", hook.name)


def _problem(hook: Hook) -> str | None:
    try:
        target = pkgutil.resolve_name(hook.target)
    except (ImportError, AttributeError) as error:
        return f"{hook.target} is not there: {error}"
    names = tuple(inspect.signature(target).parameters)[: len(hook.parameters)]
    if names != hook.parameters:
        return f"{hook.target} takes {names}, not {hook.parameters}"
    return None
