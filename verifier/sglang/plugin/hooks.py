"""Every place where the plugin reaches into SGLang, with the versions it was tested on.

A capability needs all its targets. One that is absent, or whose parameters changed, switches the capability off with a
reason in the log; the engine starts all the same. ``tests/verifier/sglang/recordings/hook-targets.json`` records the
targets of each version, ``python -m tools.sglang_hooks`` compares a version's source with it.
"""

from __future__ import annotations

import functools
import inspect
import logging
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from verifier.sglang.plugin.all_reduce import AllReduceReplacement
from verifier.sglang.plugin.capture import capture_aux
from verifier.sglang.plugin.config import PluginConfig, read_plugin_config
from verifier.sglang.plugin.draws import TargetDraws
from verifier.sglang.plugin.expansion import BatchExpansion
from verifier.sglang.plugin.finishing import leave_out_finishing
from verifier.sglang.plugin.lane import SchedulerLane
from verifier.sglang.plugin.merged_rounds import MergedRounds
from verifier.sglang.plugin.orders import PluginReport
from verifier.sglang.plugin.tap import FeatureTap

__all__ = ["CAPABILITIES", "FIELDS", "TARGETS", "Capability", "Target", "mismatch", "register"]

log = logging.getLogger("breakeven.plugin")

_SRT: Final = "sglang.srt."
_CPU: Final = ("0.5.17 (CPU)", "0.5.23 (CPU)")
_RAN: Final = (*_CPU, "0.5.17 (H200)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One function of SGLang.

    Fields:
        path: its dotted name. kind: SGLang's HookType.
        parameters: names it must have, in this order, at its start. keywords: names it must have besides.
        tested_on: versions on which the hook ran.
    """

    path: str
    kind: str
    parameters: tuple[str, ...]
    keywords: tuple[str, ...] = ()
    tested_on: tuple[str, ...] = ()


TARGETS: Final[dict[str, Target]] = {
    "forward": Target(
        path=_SRT + "managers.tp_worker.TpModelWorker.forward_batch_generation",
        kind="AROUND",
        parameters=("self", "batch"),
        tested_on=_RAN,
    ),
    "input_logprobs": Target(
        path=_SRT + "layers.logprob_processor.InputLogprobProcessor.forward",
        kind="AROUND",
        parameters=(
            *("self", "pruned_states", "sample_indices", "input_logprob_indices"),
            *("token_to_seq_idx", "lm_head", "get_logits_fn"),
        ),
        tested_on=_RAN,
    ),
    "sample": Target(
        path=_SRT + "model_executor.model_runner.ModelRunner.sample",
        kind="AROUND",
        parameters=("self", "logits_output", "forward_batch"),
        tested_on=_RAN,
    ),
    "model_forward": Target(
        path=_SRT + "model_executor.model_runner.ModelRunner.forward",
        kind="AROUND",
        parameters=("self", "forward_batch"),
        tested_on=_RAN,
    ),
    "aux_config": Target(
        path=_SRT + "model_executor.model_runner_components.spec_aux_hidden_state.resolve_spec_aux_hidden_state_config",
        kind="AFTER",
        parameters=(),
        keywords=("is_draft_worker",),
        tested_on=("0.5.17 (CPU)", "0.5.17 (H200)"),
    ),
    "graph_inputs": Target(
        path=_SRT + "model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph._weak_ref_if_tensor",
        kind="REPLACE",
        parameters=("x",),
        tested_on=("0.5.17 (H200)",),
    ),
    "running_batch": Target(
        path=_SRT + "managers.scheduler.Scheduler.update_running_batch",
        kind="BEFORE",
        parameters=("self", "batch"),
        tested_on=(
            "0.5.17 (CPU)",
            "0.5.17 (H200)",
        ),
    ),
    "inbox": Target(
        path=_SRT + "managers.scheduler_components.request_receiver.SchedulerRequestReceiver._pull_raw_reqs",
        kind="AFTER",
        parameters=("self",),
        tested_on=_RAN,
    ),
    "outbox": Target(
        path=_SRT + "managers.scheduler_components.output_streamer.SchedulerOutputStreamer.stream_output",
        kind="AROUND",
        parameters=("self", "reqs", "return_logprob"),
        tested_on=_RAN,
    ),
    "idle_sleeper": Target(
        path=_SRT + "managers.scheduler_components.idle_sleeper.IdleSleeper.__init__",
        kind="AFTER",
        parameters=("self", "sockets"),
        tested_on=_RAN,
    ),
    "tree_cache": Target(
        path=_SRT + "mem_cache.registry.create_tree_cache",
        kind="AFTER",
        parameters=("ctx",),
        tested_on=_RAN,
    ),
    "batch_result": Target(
        path=_SRT + "managers.scheduler.Scheduler.process_batch_result",
        kind="AROUND",
        parameters=("self", "batch", "result"),
        tested_on=_RAN,
    ),
    "group_init": Target(
        path=_SRT + "distributed.parallel_state.GroupCoordinator.__init__",
        kind="AFTER",
        parameters=("self",),
        keywords=("group_name",),
        tested_on=("0.5.23 (CPU)",),
    ),
    "all_reduce": Target(
        path=_SRT + "distributed.parallel_state.GroupCoordinator.all_reduce",
        kind="AROUND",
        parameters=("self", "input_"),
        tested_on=("0.5.23 (CPU)",),
    ),
}


# What the hooks read of SGLang's own records; looked for by tools.sglang_hooks, not at start.
FIELDS: Final[dict[str, tuple[str, ...]]] = {
    _SRT + "managers.scheduler_components.request_receiver.SchedulerRequestReceiver": ("model_config",),
    _SRT + "managers.schedule_batch.ScheduleBatch": (
        *("reqs", "forward_mode", "prefix_lens", "extend_lens", "seq_lens_cpu"),
    ),
    _SRT + "managers.schedule_batch.Req": (
        *("rid", "origin_input_ids", "output_ids", "sampling_params", "cached_tokens", "customized_info"),
        *("finished_reason", "finished_output", "finished_len", "return_logprob", "logprob"),
        *("extra_key", "last_node", "priority"),
    ),
    _SRT + "model_executor.forward_batch_info.ForwardBatch": (
        *("rids", "forward_mode", "input_ids", "batch_size", "positions", "out_cache_loc", "req_pool_indices"),
        *("seq_lens", "seq_lens_cpu", "seq_lens_sum", "orig_seq_lens", "extend_seq_lens", "extend_seq_lens_cpu"),
        *("extend_prefix_lens_cpu", "extend_logprob_start_lens_cpu", "extend_input_logprob_token_ids_gpu"),
        *("return_logprob", "top_logprobs_nums", "token_ids_logprobs", "lora_ids", "mm_inputs", "spec_info"),
    ),
    _SRT + "layers.logits_processor.LogitsProcessorOutput": (
        *("next_token_logits", "next_token_logprobs", "hidden_states", "input_token_logprobs", "customized_info"),
    ),
    _SRT + "sampling.sampling_params.SamplingParams": ("custom_params",),
    _SRT + "model_executor.model_runner_components.spec_aux_hidden_state.SpecAuxHiddenStateConfig": (
        *("eagle_use_aux_hidden_state", "eagle_aux_hidden_state_layer_ids", "dflash_use_aux_hidden_state"),
    ),
    _SRT + "mem_cache.cache_init_params.CacheInitParams": ("enable_kv_cache_events", "eviction_policy"),
    _SRT + "mem_cache.registry.TreeCacheBuildContext": ("params",),
    _SRT + "mem_cache.radix_cache.RadixCache": (
        *("disable", "page_size", "is_eagle", "root_node", "req_to_token_pool", "token_to_kv_pool_allocator"),
    ),
    _SRT + "mem_cache.radix_cache.TreeNode": (
        *("id", "parent", "children", "key", "value", "lock_ref", "priority"),
        *("hash_value", "hit_count", "last_access_time"),
    ),
    _SRT + "mem_cache.radix_cache.RadixKey": ("token_ids", "extra_key", "is_bigram"),
    _SRT + "mem_cache.unified_radix_cache.UnifiedRadixCache": (
        *("disable", "tree_core", "cache_controller", "enable_session_radix_cache", "_components_tuple"),
    ),
    _SRT + "mem_cache.unified_cache.unified_tree_core.UnifiedTreeCore": (
        *("page_size", "is_eagle", "root_node", "_node_arena"),
    ),
    _SRT + "mem_cache.unified_cache.unified_tree_core.UnifiedTreeNode": (
        *("id", "parent", "children", "key", "component_data", "priority"),
        *("hash_value", "hit_count", "last_access_time", "write_through_pending_id"),
    ),
    _SRT + "distributed.parallel_state.GroupCoordinator": (
        *("unique_name", "rank_in_group", "world_size", "cpu_group", "device_group", "device"),
    ),
}


class LiveReport:
    """What the plugin says of itself; a capability can find out late that this engine has nothing for it."""

    def __init__(self) -> None:
        self.on: list[str] = []
        self.off: dict[str, str] = {}

    def __call__(self) -> PluginReport:
        """As of now."""
        return PluginReport(on=tuple(self.on), off=dict(self.off))

    def switch_off(self, name: str, reason: str) -> None:
        """``name`` is off."""
        self.on = [other for other in self.on if other != name]
        self.off[name] = reason
        log.warning("breakeven: %s is off: %s", name, reason)


class Shared:
    """What several capabilities use.

    Args:
        report: what the plugin says of itself when asked.
    """

    def __init__(self, report: LiveReport) -> None:
        self.report = report

    @functools.cached_property
    def draws(self) -> TargetDraws:
        """The one that knows which orders a pass has."""
        return TargetDraws(self.report)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """What the plugin can do.

    Fields:
        name: as it is announced. targets: keys of TARGETS, all needed.
        is_wanted: it was asked for, or this version needs it.
        make: the hook for each target. needs: another capability that must be on; it stands before this one.
    """

    name: str
    targets: tuple[str, ...]
    is_wanted: Callable[[PluginConfig], bool]
    make: Callable[[PluginConfig, Shared], dict[str, Callable[..., Any]]]
    needs: str = ""


def _tap(config: PluginConfig, shared: Shared) -> dict[str, Callable[..., Any]]:
    return {"forward": FeatureTap(config).around_forward}


def _draws(config: PluginConfig, shared: Shared) -> dict[str, Callable[..., Any]]:
    draws = shared.draws
    return {
        "forward": draws.around_forward,
        "input_logprobs": draws.around_input_logprobs,
        "sample": draws.around_sample,
    }


def _expansion(config: PluginConfig, shared: Shared) -> dict[str, Callable[..., Any]]:
    return {"model_forward": BatchExpansion(shared.draws).around_model_forward}


def _capture(config: PluginConfig, shared: Shared) -> dict[str, Callable[..., Any]]:
    return {"aux_config": capture_aux}


def _kept_inputs(config: PluginConfig, shared: Shared) -> dict[str, Callable[..., Any]]:
    return {"graph_inputs": lambda x: x}


def _finishing(config: PluginConfig, shared: Shared) -> dict[str, Callable[..., Any]]:
    return {"running_batch": leave_out_finishing}


def _merging(config: PluginConfig, shared: Shared) -> dict[str, Callable[..., Any]]:
    merged = MergedRounds(functools.partial(shared.report.switch_off, "merged_rounds"))
    return {"tree_cache": merged.after_tree_cache, "batch_result": merged.around_batch_result}


def _lane(config: PluginConfig, shared: Shared) -> dict[str, Callable[..., Any]]:
    lane = SchedulerLane(config.lane_endpoint)
    return {
        "inbox": lane.after_pull,
        "outbox": lane.around_stream_output,
        "idle_sleeper": lane.after_idle_sleeper,
    }


def _all_reduce(config: PluginConfig, shared: Shared) -> dict[str, Callable[..., Any]]:
    replacement = AllReduceReplacement(config.all_reduce)
    return {"group_init": replacement.after_group_init, "all_reduce": replacement.around_all_reduce}


def _needs_kept_inputs(config: PluginConfig) -> bool:
    """Inputs of eager breaks between prefill graph segments are weak references into memory that later captures reuse:
    sglang#37606, in 0.5.17 to 0.5.23, whose fix #37448 was not in any of them. Strong ones cost graph memory.
    """
    if config.keeps_graph_inputs is not None:
        return config.keeps_graph_inputs
    return config.is_used and (0, 5, 17) <= _engine_version() <= (0, 5, 23)


CAPABILITIES: Final[tuple[Capability, ...]] = (
    Capability(name="tap", targets=("forward",), is_wanted=lambda c: c.ring_path is not None, make=_tap),
    Capability(
        name="target_ids",
        targets=("forward", "input_logprobs", "sample"),
        is_wanted=lambda c: c.draws_target_ids,
        make=_draws,
    ),
    Capability(
        name="batch_expansion",
        targets=("model_forward",),
        is_wanted=lambda c: c.draws_target_ids and c.expands_batches,
        make=_expansion,
        needs="target_ids",
    ),
    Capability(name="aux_capture", targets=("aux_config",), is_wanted=lambda c: c.captures_aux, make=_capture),
    Capability(name="kept_graph_inputs", targets=("graph_inputs",), is_wanted=_needs_kept_inputs, make=_kept_inputs),
    Capability(
        name="skipped_decodes",
        targets=("running_batch",),
        is_wanted=lambda c: c.is_used and _engine_version() < (0, 5, 22),
        make=_finishing,
    ),
    Capability(
        name="merged_rounds",  # it knows what was accepted from the draws
        targets=("tree_cache", "batch_result"),
        is_wanted=lambda c: c.draws_target_ids,
        make=_merging,
    ),
    Capability(
        name="fast_lane",
        targets=("inbox", "outbox", "idle_sleeper"),
        is_wanted=lambda c: bool(c.lane_endpoint),
        make=_lane,
    ),
    Capability(
        name="all_reduce",
        targets=("group_init", "all_reduce"),
        is_wanted=lambda c: bool(c.all_reduce),
        make=_all_reduce,
    ),
)


def register() -> None:
    """Entry point, group ``sglang.srt.plugins``: called once in every process of SGLang."""
    registry = pkgutil.resolve_name("sglang.srt.plugins.hook_registry")
    config = read_plugin_config()
    report = LiveReport()
    shared = Shared(report)
    hooks: dict[str, list[Callable[..., Any]]] = {}
    for capability in CAPABILITIES:
        if not capability.is_wanted(config):
            continue
        problems = [problem for key in capability.targets if (problem := _problem(TARGETS[key])) is not None]
        if capability.needs and capability.needs not in report.on:
            problems.append(f"{capability.needs} is off")
        if problems:
            report.switch_off(capability.name, "; ".join(problems))
            continue
        report.on.append(capability.name)
        made = capability.make(config, shared)
        for key, hook in made.items():
            hooks.setdefault(key, []).append(hook)
    for key, found in hooks.items():
        target = TARGETS[key]
        hook = found[0] if len(found) == 1 else functools.reduce(_nested, found)
        registry.HookRegistry.register(target.path, hook, registry.HookType[target.kind])
    if report.on:
        log.info("breakeven: on are %s", ", ".join(report.on))


def _nested(inner: Callable[..., Any], outer: Callable[..., Any]) -> Callable[..., Any]:
    """Two AROUND hooks of one target as one, since the registry warns of several."""

    def both(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return outer(functools.partial(inner, original), *args, **kwargs)

    return both


def _problem(target: Target) -> str | None:
    try:
        found = pkgutil.resolve_name(target.path)
    except (ImportError, AttributeError, RuntimeError) as error:
        return f"{target.path} is not there: {error}"
    return mismatch(target, tuple(inspect.signature(found).parameters))


def mismatch(target: Target, names: tuple[str, ...]) -> str | None:
    """Why a function with these parameters can't be hooked, or None."""
    if names[: len(target.parameters)] != target.parameters:
        return f"{target.path} takes {names}, not {target.parameters}"
    missing = [name for name in target.keywords if name not in names]
    return f"{target.path} takes no {', '.join(missing)}" if missing else None


def _engine_version() -> tuple[int, ...]:
    version = str(getattr(pkgutil.resolve_name("sglang"), "__version__", "0"))
    return tuple(int(part) for part in version.split(".")[:3] if part.isdecimal())
