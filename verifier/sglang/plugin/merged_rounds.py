"""Keeps the path of an answer in SGLang's prefix tree short: its rounds leave one node behind, not one each.

A round is a request of its own, and all that it computed goes into the tree: a leaf of accepted and rejected drafts,
which the next round splits. So the path grew by a node a round, and matching, locking and inserting walk all of it:
11 us for each earlier round of each sequence, on a GPU's host. Here a round leaves only what is committed: the plugin
drew the target's ids itself, so it knows which drafts were accepted before the tree hears of them, and the slots of the
others go back at once. Then, after the reply is on its way, the chain is merged (tree_merging).

Which tree an engine has is known when SGLang has made it. Only exact classes are touched, never one derived from them.
An error ends the capability, not the engine; what is in the tree by then is a normal tree.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from verifier.sglang.plugin.orders import ORDER_NAME, DrawOrder, read_order
from verifier.sglang.plugin.tree_merging import Chain, ChainMerger, CoreChainMerger, NodeChainMerger

__all__ = ["ENDINGS", "MergedRounds", "committed_end"]

log = logging.getLogger("breakeven.plugin")

_CACHE: Final = "sglang.srt.mem_cache."
_RADIX: Final = _CACHE + "radix_cache.RadixCache"
_UNIFIED: Final = _CACHE + "unified_radix_cache.UnifiedRadixCache"
_PYTHON_CORE: Final = _CACHE + "unified_cache.unified_tree_core.UnifiedTreeCore"
_RUST_CORE: Final = _CACHE + "rust_tree_core.adapter.RustUnifiedTreeCore"
# What a tree is told when a request ends, by version: 0.5.22, 0.5.21, older.
ENDINGS: Final[tuple[str, ...]] = ("checkpoint", "insert_req", "cache_finished_req")


def committed_end(order: DrawOrder, input_ids: Any, drawn: Any) -> int:
    """How many of a round's inputs are the answer's: up to the first draft that the target did not draw.

    Args:
        drawn: the round's entry in the reply (orders.Drawn as plain values). Where it says nothing of the drafts, or
            only of some, all inputs count: nothing is known against them.
    """
    drafts = input_ids[order.base_len :]
    if not isinstance(drawn, dict) or drawn.get("first") != order.base_len:
        return len(input_ids)
    ids = drawn.get("ids", ())
    if len(ids) != len(drafts):
        return len(input_ids)
    accepted = 0
    while accepted < len(ids) and drafts[accepted] == ids[accepted]:
        accepted += 1
    return order.base_len + accepted


class MergedRounds:
    """One per process; its methods are hooks.

    Args:
        switch_off: says that the capability is off, and why.
    """

    def __init__(self, switch_off: Callable[[str], None]) -> None:
        self._switch_off = switch_off
        self._is_broken = False
        self._tree: Any = None
        self._merger: ChainMerger | None = None
        self._ends: dict[str, int] = {}

    # ------------------------------------------------------------ hooks

    def after_tree_cache(self, tree: Any, context: Any, *args: Any, **kwargs: Any) -> Any:
        """AFTER ``create_tree_cache``: is this a tree we know?"""
        self._guarded(self._attach, tree, context.params)
        return tree

    def around_batch_result(
        self, original: Callable[..., Any], scheduler: Any, batch: Any, result: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """AROUND ``Scheduler.process_batch_result``: note what was accepted; when all is released and said, merge."""
        chains = self._guarded(self._begin, batch, result) or []
        done = original(scheduler, batch, result, *args, **kwargs)
        if chains:
            self._ends.clear()
            self._guarded(self._merge, chains)
        return done

    # ------------------------------------------------------------ parts

    def _guarded(self, function: Callable[..., Any], *args: Any) -> Any:
        if self._is_broken:
            return None
        try:
            return function(*args)
        except Exception as error:  # a tree that stays long must never fail the engine
            log.exception("breakeven: merged_rounds is off")
            self._is_broken = True
            self._ends.clear()
            self._switch_off(f"an error: {type(error).__name__}")
            return None

    def _attach(self, tree: Any, params: Any) -> None:
        self._tree, self._merger = None, None
        ending = next((name for name in ENDINGS if hasattr(tree, name)), None)
        reason = _obstacle(tree) or ("it has no known ending" if ending is None else None)
        if reason is not None:
            self._switch_off(reason)
            return
        assert ending is not None
        self._tree = tree
        setattr(tree, ending, self._ending(tree, getattr(tree, ending), takes_rest=ending == "cache_finished_req"))
        if _name(tree) == _RADIX:
            self._merger = NodeChainMerger(tree)
        elif _name(tree.tree_core) == _PYTHON_CORE:
            self._merger = NodeChainMerger(tree.tree_core)
        else:
            reason = _rust_obstacle(tree.tree_core, params)
            if reason is None:
                self._merger = CoreChainMerger(tree)
            else:
                self._switch_off(f"rejected drafts are left out of the tree, but {reason}")

    def _ending(self, tree: Any, original: Callable[..., Any], *, takes_rest: bool) -> Callable[..., Any]:
        """The tree's own ending, of which only the committed part of a round is told."""

        def end_up_to(request: Any, *, up_to: int, **kwargs: Any) -> Any:
            kept = self._guarded(self._end, request, up_to)
            return original(request, up_to=up_to if kept is None else kept, **kwargs)  # its caller frees the rest

        def end(request: Any, is_insert: bool = True, *, kv_len_to_handle: int, **kwargs: Any) -> Any:
            kept = self._guarded(self._end, request, kv_len_to_handle) if is_insert else None
            if kept is None:
                return original(request, is_insert, kv_len_to_handle=kv_len_to_handle, **kwargs)
            done = original(request, is_insert, kv_len_to_handle=kept, **kwargs)
            # The original frees a page that is begun; a page is freed once.
            rest = -(-kept // tree.page_size) * tree.page_size
            if rest < kv_len_to_handle:
                self._free(request, rest, kv_len_to_handle)
            return done

        return end if takes_rest else end_up_to

    def _free(self, request: Any, start: int, end: int) -> None:
        tree = self._tree
        if hasattr(tree, "free_kv_row"):
            tree.free_kv_row(request.kv, [(start, end)])
        else:
            row = tree.req_to_token_pool.req_to_token[request.req_pool_idx, start:end]
            tree.token_to_kv_pool_allocator.free_segment(row, start_pos=start)

    def _end(self, request: Any, length: int) -> int:
        end = self._ends.get(request.rid)
        if end is None:
            return length
        protected = getattr(request, "cache_protected_len", None)
        if protected is None:
            protected = request.kv.cache_protected_len
        return min(length, max(end, int(protected)))  # what the tree had before is not ours to leave out

    def _begin(self, batch: Any, result: Any) -> list[Chain]:
        self._ends.clear()
        if self._tree is None or not batch.forward_mode.is_extend():
            return []
        entries = (getattr(getattr(result, "logits_output", None), "customized_info", None) or {}).get(ORDER_NAME)
        chains = []
        for row, request in enumerate(batch.reqs):
            params = getattr(request.sampling_params, "custom_params", None)
            if not isinstance(params, dict) or ORDER_NAME not in params or request.sampling_params.max_new_tokens != 1:
                continue
            order = read_order(params)
            if order is None or request.finished():
                continue
            inputs = request.origin_input_ids
            end = len(inputs)
            if entries is not None and entries[row] is not None and order.base_len < end:
                end = committed_end(order, inputs, entries[row].copy())
                self._ends[request.rid] = end
            chains.append(Chain(request=request, ids=inputs[:end], floor=order.prompt_len))
        return chains

    def _merge(self, chains: list[Chain]) -> None:
        if self._merger is not None:
            self._merger.merge([chain for chain in chains if chain.request.finished()])


def _name(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _obstacle(tree: Any) -> str | None:
    """Why nothing of this tree can be touched, or None."""
    name = _name(tree)
    if name not in (_RADIX, _UNIFIED):
        return f"the prefix tree is a {name}"
    if tree.disable or getattr(tree, "disable_finished_insert", False):
        return "the prefix cache is off"
    if name == _RADIX:
        return None
    components = [type(component).__name__ for component in tree._components_tuple]
    if components != ["FullComponent"]:
        return f"the prefix tree is made of {', '.join(components)}"
    for part in ("cache_controller", "linker", "buffer_pipeline"):
        if getattr(tree, part, None) is not None:
            return f"the prefix tree has a {part}"
    if tree.enable_session_radix_cache:
        return "the prefix tree keeps sessions"
    if _name(tree.tree_core) not in (_PYTHON_CORE, _RUST_CORE):
        return f"the prefix tree is a {_name(tree.tree_core)}"
    return None


def _rust_obstacle(core: Any, params: Any) -> str | None:
    """Why chains in the Rust core can't be merged, or None."""
    if not hasattr(core, "collect_path_info"):
        return "this version's Rust tree does not show its paths"
    if params.enable_kv_cache_events:
        return "KV events would tell every merge as a removal"
    if params.eviction_policy.lower() != "lru":
        return f"a merge in Rust is not kept apart from a new entry by the policy {params.eviction_policy}"
    return None
