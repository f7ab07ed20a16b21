"""Makes one node of the chain that an answer's rounds left in SGLang's prefix tree, without changing what it holds.

Two nodes become one where nobody could tell: the upper has no other child, both are held equally often (so nobody holds
the upper one by itself), and neither has a copy elsewhere. Ids, slots and their order stay, so every match finds what
it found before; what was locked, evictable or counted stays so. Anything else is left as it is.

RadixCache (0.5.17, 0.5.18) and the Python core of UnifiedRadixCache are edited node by node: the lower node absorbs the
upper one and keeps its identity, since locks name it. The Rust core shows no nodes; there the chain is taken out as an
eviction would, its slots kept, and put back as one piece, only where nobody holds any of it.
"""

from __future__ import annotations

import pkgutil
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

__all__ = ["Chain", "ChainMerger", "CoreChainMerger", "NodeChainMerger"]

# In Rust a node costs a round about 1.5 us and a merge 150 us (both on a CPU), so it waits for a few.
_RUST_CHAIN: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Where a finished round's own nodes are.

    Fields:
        request: SGLang's Req. ids: array of the ids it left in the tree. floor: position from which on nodes are the
            answer's; those before it are the prompt's, which other answers share.
    """

    request: Any
    ids: Any
    floor: int


class ChainMerger(Protocol):
    """One tree."""

    def merge(self, chains: Sequence[Chain]) -> None:
        """Shorten the paths of these rounds, all finished and released."""
        ...


class NodeChainMerger:
    """A tree whose nodes are Python objects.

    Args:
        tree: what holds ``root_node`` and ``page_size``: RadixCache, or UnifiedRadixCache's core.
    """

    def __init__(self, tree: Any) -> None:
        self._tree = tree
        self._arena = getattr(tree, "_node_arena", None)  # UnifiedRadixCache: node by id, replaced by a reset

    def merge(self, chains: Sequence[Chain]) -> None:
        """See ChainMerger."""
        self._arena = getattr(self._tree, "_node_arena", None)
        for chain in chains:
            path = self._path(chain)
            floor = _unit_floor(chain.floor, self._tree)
            lower = path.pop()[0] if path else None
            while path and path[-1][1] >= floor:
                upper = path.pop()[0]
                state = _state(upper)
                if len(upper.children) == 1 and state is not None and state == _state(lower):
                    self._absorb(upper, lower)
                else:
                    lower = upper

    # ------------------------------------------------------------ finding

    def _path(self, chain: Chain) -> list[tuple[Any, int]]:
        """(node, position of its first id) along the ids, from the root down."""
        path = self._path_to(chain.request.last_node)
        key = _key_like(self._tree, chain)
        node, at = (path[-1][0], path[-1][1] + len(path[-1][0].key)) if path else (self._tree.root_node, 0)
        page = self._tree.page_size
        while len(key) - at >= page:
            rest = key[at:]
            child = node.children.get(rest.child_key(page))
            if child is None or child.key.match(rest, page_size=page) < len(child.key):
                break
            path.append((child, at))
            node, at = child, at + len(child.key)
        return path

    def _path_to(self, handle: Any) -> list[tuple[Any, int]]:
        """The path to where the request was locked, [] if that node is gone: another round's merge has absorbed it."""
        node = handle if self._arena is None else self._arena.get(handle)
        nodes: list[Any] = []
        while node is not None and node is not self._tree.root_node:
            parent = node.parent
            if parent is None or parent.children.get(node.key.child_key(self._tree.page_size)) is not node:
                return []
            nodes.append(node)
            node = parent
        path: list[tuple[Any, int]] = []
        at = 0
        for node in reversed(nodes):
            path.append((node, at))
            at += len(node.key)
        return path

    # ------------------------------------------------------------ merging

    def _absorb(self, upper: Any, lower: Any) -> None:
        """Everything that can fail comes before the first change."""
        import torch  # lazy: the plugin's modules load without torch

        page = self._tree.page_size
        above, below = _data(upper), _data(lower)
        value = torch.cat([above.value, below.value])
        key = lower.key[: len(lower.key)]
        key.token_ids = upper.key.raw_token_ids()[: len(upper.key)] + lower.key.raw_token_ids()
        place = upper.key.child_key(page)
        if upper.parent.children.get(place) is not upper or len(key) != len(value):
            raise RuntimeError("the tree is not as expected")
        upper.parent.children[place] = lower
        lower.parent = upper.parent
        lower.key = key
        below.value = value
        lower.hit_count = max(upper.hit_count, lower.hit_count)
        lower.last_access_time = max(upper.last_access_time, lower.last_access_time)
        if lower.hash_value is not None:
            lower.hash_value = [*upper.hash_value, *lower.hash_value]
        if getattr(lower, "event_hash_value", None) is not None:
            lower.event_hash_value = [*upper.event_hash_value, *lower.event_hash_value]
        upper.children = {}
        if self._arena is not None:
            self._arena.pop(upper.id, None)


class CoreChainMerger:
    """UnifiedRadixCache over a core that is reached through its interface only."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def merge(self, chains: Sequence[Chain]) -> None:
        """See ChainMerger. All paths are looked up before the first is changed: a merge ends the names of its nodes."""
        core = self._cache.tree_core
        by_leaf = {chain.request.last_node: chain for chain in chains}
        paths = core.collect_path_info(list(by_leaf))
        for chain, path in zip(by_leaf.values(), paths, strict=True):
            if not path or path[-1].num_children or getattr(chain.request, "kv_rotation_base", None) is not None:
                continue
            floor = _unit_floor(chain.floor, core)
            count = 1
            while count < len(path) and path[-count - 1].num_children == 1 and path[-count - 1].path_start >= floor:
                count += 1
            if count >= _RUST_CHAIN:
                self._merge(chain, path[-count:])

    def _merge(self, chain: Chain, nodes: Sequence[Any]) -> None:
        cache, core = self._cache, self._cache.tree_core
        leaf = nodes[-1].node_id
        # A lock says how much of its path nobody else held: the path's end, for who holds a node holds those above it.
        held = core.inc_lock_ref(leaf)
        core.dec_lock_ref(leaf, held.to_dec_params())
        start = nodes[-1].path_end - (held.delta or 0)
        free = [node for node in nodes if node.path_start >= start]
        if len(free) < _RUST_CHAIN:
            return
        start, end = free[0].path_start, free[-1].path_end
        key = _key_like(core, chain)[:end]
        value = core.collect_full_device_indices(leaf, cache.root_node_handle())
        params = _resolve("sglang.srt.mem_cache.base_prefix_cache.InsertParams")(
            key=key, value=value, prev_prefix_len=end, priority=chain.request.priority or 0
        )
        if len(key) != end or len(value) != end:
            raise RuntimeError("the tree is not as expected")
        try:
            for node in reversed(free):
                evicted = core.evict_device_leaf(node.node_id, core.is_write_back)
                evicted.device_frees.clear()  # their slots go back into the tree
                if evicted.host_frees or evicted.cache_actions or evicted.backup_kv is not None:
                    raise RuntimeError("the tree is not as expected")
            cache.insert(params)
        except Exception:
            # What is out of the tree belongs to nobody: as after an eviction.
            found = core.match_full_device_prefix(_key_like(core, chain)[:end])[0]
            cache.token_to_kv_pool_allocator.free_segment(value[found:], start_pos=0)
            raise


def _unit_floor(position: int, tree: Any) -> int:
    """Where nodes of the answer begin at the earliest. A tree of bigrams counts one less than there are ids."""
    unit = position - 1 if tree.is_eagle else position
    return max(0, unit) // int(tree.page_size) * int(tree.page_size)


def _key_like(tree: Any, chain: Chain) -> Any:
    """A RadixKey of the chain's ids in its request's namespace."""
    key_type = _resolve("sglang.srt.mem_cache.radix_cache.RadixKey")
    ids = chain.ids if isinstance(chain.ids, array) else array("q", chain.ids)
    key = key_type(ids, chain.request.extra_key, is_bigram=bool(tree.is_eagle))
    if getattr(chain.request, "cache_salt", None):
        key.cache_salt = chain.request.cache_salt
    return key


def _data(node: Any) -> Any:
    """What holds a node's value and lock: itself, or its data of the only component, which is the first."""
    data = getattr(node, "component_data", None)
    return node if data is None else data[0]


def _state(node: Any) -> tuple[Any, ...] | None:
    """What two nodes must have in common; None for one that is to be left alone: copied, being copied, referred to."""
    data = _data(node)
    if data.value is None or any(getattr(data, name, None) for name in ("host_lock_ref", "session_ref", "metadata")):
        return None
    if getattr(node, "host_ref_counter", 0) or any(
        getattr(owner, name, None) is not None
        for owner in (node, data)
        for name in ("host_value", "write_through_pending_id", "load_back_pending_id", "session_ids")
    ):
        return None
    hashes = node.hash_value is None, getattr(node, "event_hash_value", None) is None
    return (
        data.lock_ref,
        node.priority,
        hashes,
        getattr(node, "rotation_base", None),
        getattr(node, "external_cache_stored", False),
    )


def _resolve(path: str) -> Any:
    return pkgutil.resolve_name(path)  # SGLang is there when this runs, not when it is imported
