"""A small prefix tree with the interface of SGLang's RadixCache, and one behind the interface of its Rust core."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from tests.verifier.sglang.tree_world import Api

__all__ = ["Key", "RadixCache", "RustUnifiedTreeCore", "UnifiedRadixCache", "radix_api", "rust_api"]

_MODULE = "sglang.srt.mem_cache."


class Key:
    """RadixKey without bigrams."""

    def __init__(self, token_ids: array[int], extra_key: str | None = None, is_bigram: bool = False) -> None:
        self.token_ids, self.extra_key, self.is_bigram = token_ids, extra_key, is_bigram

    def __len__(self) -> int:
        return len(self.token_ids)

    def __getitem__(self, part: slice) -> Key:
        return Key(self.token_ids[part], self.extra_key)

    def raw_token_ids(self) -> array[int]:
        return self.token_ids

    def child_key(self, page_size: int) -> Any:
        return self.extra_key, *self.token_ids[:page_size]

    def match(self, other: Key, page_size: int) -> int:
        pairs = zip(self.token_ids, other.token_ids, strict=False)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        return same // page_size * page_size


class Node:
    """One stretch of ids."""

    ids = itertools.count()

    def __init__(self, key: Key, value: torch.Tensor, parent: Node | None) -> None:
        self.id = next(self.ids)
        self.key, self.value, self.parent = key, value, parent
        self.children: dict[Any, Node] = {}
        self.lock_ref, self.priority, self.hit_count = 0, 0, 0
        self.hash_value: list[str] | None = None
        self.last_access_time = next(self.ids)


class RadixCache:
    """Sizes are kept as SGLang keeps them, so that a slip shows."""

    disable, is_eagle = False, False

    def __init__(self, pages: Any, rows: Any, page_size: int) -> None:
        self.token_to_kv_pool_allocator, self.req_to_token_pool, self.page_size = pages, rows, page_size
        self.root_node = Node(Key(array("q")), torch.zeros(0, dtype=torch.int64), None)
        self.root_node.lock_ref = 1
        self._evictable, self._protected = 0, 0

    @property
    def evictable_leaves(self) -> set[Node]:
        return {n for n in self.nodes(self.root_node) if not n.children and not n.lock_ref and n is not self.root_node}

    def nodes(self, node: Node) -> Iterator[Node]:
        yield node
        for child in node.children.values():
            yield from self.nodes(child)

    def evictable_size(self) -> int:
        return self._evictable

    def protected_size(self) -> int:
        return self._protected

    def total_size(self) -> int:
        return sum(len(node.value) for node in self.nodes(self.root_node))

    def all_values_flatten(self) -> torch.Tensor:
        return torch.cat([node.value for node in self.nodes(self.root_node)])

    def match_prefix(self, params: Any) -> Any:
        node, _ = self._walk(self._aligned(params.key))
        return SimpleNamespace(device_indices=self._indices(node), last_device_node=node)

    def insert(self, key: Key, value: torch.Tensor) -> tuple[int, Node]:
        """How much was there, and the node it ends on."""
        node, at = self._walk(key)
        if at < len(key):
            leaf = Node(key[at:], value[at:].clone(), node)
            node.children[leaf.key.child_key(self.page_size)] = leaf
            self._evictable += len(leaf.key)
            node = leaf
        return at, node

    def cache_finished_req(self, request: Any, is_insert: bool = True, *, kv_len_to_handle: int) -> None:
        ids = (request.origin_input_ids + request.output_ids)[:kv_len_to_handle]
        key = self._aligned(Key(ids, request.extra_key))
        row = self.req_to_token_pool.req_to_token[request.req_pool_idx, :kv_len_to_handle].to(torch.int64)
        there, _ = self.insert(key, row[: len(key)]) if is_insert else (len(key), None)
        kept = request.cache_protected_len
        self.token_to_kv_pool_allocator.free_segments([(row[kept:there], kept), (row[len(key) :], len(key))])
        self.dec_lock_ref(request.last_node)

    def inc_lock_ref(self, node: Node) -> Any:
        return self._lock(node, 1)

    def dec_lock_ref(self, node: Node) -> Any:
        return self._lock(node, -1)

    def evict(self, params: Any) -> None:
        freed = 0
        while freed < params.num_tokens and (leaves := self.evictable_leaves):
            leaf = min(leaves, key=lambda node: node.last_access_time)
            self.token_to_kv_pool_allocator.free(self.remove(leaf))
            freed += len(leaf.value)

    def remove(self, leaf: Node) -> torch.Tensor:
        assert not leaf.children
        assert not leaf.lock_ref
        assert leaf.parent is not None
        assert leaf.parent.children.pop(leaf.key.child_key(self.page_size)) is leaf
        self._evictable -= len(leaf.key)
        return leaf.value

    def _aligned(self, key: Key) -> Key:
        return key[: len(key) // self.page_size * self.page_size]

    def _walk(self, key: Key) -> tuple[Node, int]:
        node, at = self.root_node, 0
        while at < len(key):
            child = node.children.get(key[at:].child_key(self.page_size))
            if child is None:
                break
            child.last_access_time = next(Node.ids)
            same = child.key.match(key[at:], self.page_size)
            node = child if same == len(child.key) else self._split(child, same)
            at += same
            if node is not child:
                break
        return node, at

    def _split(self, child: Node, at: int) -> Node:
        assert child.parent is not None
        upper = Node(child.key[:at], child.value[:at].clone(), child.parent)
        upper.lock_ref = child.lock_ref
        child.parent.children[upper.key.child_key(self.page_size)] = upper
        child.key, child.value, child.parent = child.key[at:], child.value[at:].clone(), upper
        upper.children[child.key.child_key(self.page_size)] = child
        return upper

    def _lock(self, node: Node | None, change: int) -> Any:
        delta = 0
        while node is not None and node is not self.root_node:
            before, node.lock_ref = node.lock_ref, node.lock_ref + change
            if 0 in (before, node.lock_ref):
                self._evictable -= change * len(node.key)
                self._protected += change * len(node.key)
                delta += len(node.key)
            node = node.parent
        return SimpleNamespace(delta=delta)

    def _indices(self, node: Node | None) -> torch.Tensor:
        parts = []
        while node is not None:
            parts.append(node.value)
            node = node.parent
        return torch.cat(parts[::-1])


class FullComponent:
    """The only component."""


class RustUnifiedTreeCore:
    """Nodes by number."""

    is_eagle, is_write_back = False, False

    def __init__(self, tree: RadixCache) -> None:
        self.tree, self.page_size = tree, tree.page_size

    def node(self, number: int) -> Node:
        return next(node for node in self.tree.nodes(self.tree.root_node) if node.id == number)

    def path(self, number: int) -> list[Node]:
        node: Node | None = self.node(number)
        path: list[Node] = []
        while node is not None and node is not self.tree.root_node:
            path.insert(0, node)
            node = node.parent
        return path

    def collect_path_info(self, numbers: Sequence[int]) -> list[list[Any]]:
        found = []
        for number in numbers:
            path, at = [], 0
            for node in self.path(number):
                end = at + len(node.key)
                path.append(
                    SimpleNamespace(node_id=node.id, path_start=at, path_end=end, num_children=len(node.children))
                )
                at = end
            found.append(path)
        return found

    def inc_lock_ref(self, number: int) -> Any:
        delta = self.tree.inc_lock_ref(self.node(number)).delta
        return SimpleNamespace(delta=delta, to_dec_params=lambda: None)

    def dec_lock_ref(self, number: int, params: Any) -> None:
        self.tree.dec_lock_ref(self.node(number))

    def collect_full_device_indices(self, number: int, until: int) -> torch.Tensor:
        return torch.cat([node.value for node in self.path(number)])

    def match_full_device_prefix(self, key: Key) -> tuple[int, int, int]:
        node, at = self.tree._walk(key)
        return at, node.id, at

    def evict_device_leaf(self, number: int, is_write_back: bool) -> Any:
        value = self.tree.remove(self.node(number))
        return SimpleNamespace(device_frees={0: [value]}, host_frees={}, cache_actions=[], backup_kv=None)


class UnifiedRadixCache:
    """As of 0.5.22."""

    disable, enable_session_radix_cache, cache_controller, linker, buffer_pipeline = False, False, None, None, None

    def __init__(self, pages: Any, rows: Any, page_size: int) -> None:
        self.tree = RadixCache(pages, rows, page_size)
        self.tree_core = RustUnifiedTreeCore(self.tree)
        self.token_to_kv_pool_allocator, self.req_to_token_pool = pages, rows
        self._components_tuple = (FullComponent(),)

    def __getattr__(self, name: str) -> Any:
        if name in ("evictable_size", "protected_size", "total_size", "all_values_flatten", "evict"):
            return getattr(self.tree, name)
        raise AttributeError(name)

    def match_prefix(self, params: Any) -> Any:
        return SimpleNamespace(last_device_node=self.tree.match_prefix(params).last_device_node.id)

    def path_device_indices(self, number: int) -> torch.Tensor:
        return self.tree._indices(self.tree_core.node(number))

    def root_node_handle(self) -> int:
        return self.tree.root_node.id

    def lock(self, number: int) -> int:
        self.tree_core.inc_lock_ref(number)
        return number

    def unlock(self, number: int) -> None:
        self.tree_core.dec_lock_ref(number, None)

    def insert(self, params: Any) -> Any:
        there, node = self.tree.insert(params.key, params.value)
        if there > params.prev_prefix_len:
            self.token_to_kv_pool_allocator.free(params.value[params.prev_prefix_len : there])
        return SimpleNamespace(last_device_node=node.id)

    def checkpoint(self, request: Any, *, up_to: int) -> None:
        ids = (request.origin_input_ids + request.output_ids)[:up_to]
        key = self.tree._aligned(Key(ids, request.extra_key))
        value = self.req_to_token_pool.req_to_token[request.row, : len(key)].to(torch.int64)
        params = SimpleNamespace(key=key, value=value, prev_prefix_len=request.kv.cache_protected_len)
        found = self.insert(params).last_device_node
        self.unlock(request.lock)
        request.last_node, request.lock = found, self.lock(found)
        request.kv.cache_protected_len = len(key)


for _kind, _path in ((RadixCache, "radix_cache"), (UnifiedRadixCache, "unified_radix_cache")):
    _kind.__module__ = _MODULE + _path
RustUnifiedTreeCore.__module__ = _MODULE + "rust_tree_core.adapter"


def radix_api(page_size: int) -> Api:
    """The toy driven as 0.5.17's."""
    return _api(lambda pages, rows: RadixCache(pages, rows, page_size), lambda tree: tree)


def rust_api(page_size: int) -> Api:
    """The toy driven as 0.5.23's."""
    return _api(lambda pages, rows: UnifiedRadixCache(pages, rows, page_size), lambda cache: cache.tree)


def _api(make: Any, tree_of: Any) -> Api:
    def path_len(made: Any, key: Key) -> int:
        tree = tree_of(made)
        node, at, count = tree.root_node, 0, 0
        while at < len(key):
            node = node.children.get(key[at:].child_key(tree.page_size))
            if node is None or node.key.match(key[at:], tree.page_size) < len(node.key):
                break
            count, at = count + 1, at + len(node.key)
        return count

    return Api(make=make, key=Key, match_params=SimpleNamespace, evict_params=SimpleNamespace, path_len=path_len)
