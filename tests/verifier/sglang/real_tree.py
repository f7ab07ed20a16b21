"""tree_world's random runs over the classes of an installed SGLang.

    PYTHONPATH=. /path/to/sglang/python -m tests.verifier.sglang.real_tree --kind rust [--seeds 40]

Runs in SGLang's environment, without pytest; ``tests/integration/test_real_sglang_tree.py`` starts it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from array import array
from collections import Counter
from typing import Any

import torch

from tests.verifier.sglang.tree_world import Api, Pages, Plan, run_plan

__all__ = ["main"]


def real_api(kind: str, page_size: int, *, is_eagle: bool) -> Api:
    """The tree ``kind`` of this SGLang: "radix", "python" or "rust" (cores of the unified tree)."""
    from sglang.srt.mem_cache import base_prefix_cache as base  # lazy: only where SGLang is
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

    def make(pages: Pages, rows: Any) -> Any:
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=rows,
            token_to_kv_pool_allocator=pages,  # type: ignore[arg-type]
            page_size=page_size,
            is_eagle=is_eagle,
        )
        if kind == "radix":
            return RadixCache(params)
        from sglang.srt.mem_cache.unified_cache.components import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        params.tree_components = (ComponentType.FULL,)
        tree = UnifiedRadixCache(params)
        assert kind in type(tree.tree_core).__module__ or kind == "python"
        return tree

    def path_len(tree: Any, key: Any) -> int:
        core = getattr(tree, "tree_core", tree)
        key, _ = key.maybe_to_bigram_view(is_eagle)
        if kind == "rust":
            _, node, _ = core.match_full_device_prefix(key)
            return len(core.collect_path_info([node])[0])
        key = key.page_aligned(page_size)
        node, count, at = core.root_node, 0, 0
        while len(key) - at >= page_size:
            node = node.children.get(key[at:].child_key(page_size))
            if node is None or node.key.match(key[at:], page_size=page_size) < len(node.key):
                break
            count, at = count + 1, at + len(node.key)
        return count

    def key(ids: array[int], namespace: str | None) -> Any:
        return RadixKey(ids, namespace)

    return Api(
        make=make, key=key, match_params=base.MatchPrefixParams, evict_params=base.EvictParams, path_len=path_len
    )


def main() -> None:
    """Run them all, print what was done as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("radix", "python", "rust"), required=True)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = options.kind
    torch.set_num_threads(1)
    done: Counter[str] = Counter()
    longest: dict[str, int] = {}
    for page_size, num_slots, is_eagle in (
        (1, 4096, False),
        (1, 640, False),
        (4, 4096, False),
        (4, 1024, False),
        (1, 4096, True),
    ):
        api = real_api(options.kind, page_size, is_eagle=is_eagle)
        for seed in range(options.first, options.first + options.seeds):
            plan = Plan(seed=seed, num_slots=num_slots, page_size=page_size, is_eagle=is_eagle)
            try:
                found = run_plan(api, plan)
            except Exception:
                sys.stdout.write(json.dumps(dataclasses.asdict(plan)) + "\n")
                raise
            done.update({name: count for name, count in found.items() if not name.startswith("longest")})
            for name in ("longest", "longest_without"):
                longest[name] = max(longest.get(name, 0), found[name])
    sys.stdout.write(json.dumps({**done, **longest}) + "\n")


if __name__ == "__main__":
    main()
