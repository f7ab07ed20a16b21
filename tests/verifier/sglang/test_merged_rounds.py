"""An answer's path in the prefix tree stays short, and nothing else is different: over a toy of SGLang's trees."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from tests.verifier.sglang import toy_tree
from tests.verifier.sglang.test_hooks import FakeSGLang
from tests.verifier.sglang.tree_world import Answer, Plan, Request, World, run_plan
from verifier.sglang.plugin.merged_rounds import MergedRounds, committed_end
from verifier.sglang.plugin.orders import DrawOrder
from wire.sampling import SamplingParams

PARAMS = SimpleNamespace(enable_kv_cache_events=False, eviction_policy="lru")


@pytest.fixture(autouse=True)
def sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """The types the plugin makes itself."""
    fake = FakeSGLang(monkeypatch)
    fake.module("sglang.srt.mem_cache.radix_cache").RadixKey = toy_tree.Key  # type: ignore[attr-defined]
    base = fake.module("sglang.srt.mem_cache.base_prefix_cache")
    base.InsertParams = SimpleNamespace  # type: ignore[attr-defined]


def order(base_len: int, prompt_len: int = 4) -> DrawOrder:
    return DrawOrder(sampling=SamplingParams(), base_len=base_len, prompt_len=prompt_len)


class Writer:
    """Writes one answer over a world, round by round."""

    def __init__(self, world: World, prompt: list[int]) -> None:
        self.world = world
        self.answer = Answer(name="a", prompt_len=len(prompt), ids=[*prompt, 1], namespace=None)
        self.number = 0

    def begin(self, drafts: list[int]) -> Request:
        self.number += 1
        ids = self.answer.ids
        request = Request(
            f"{id(self)}-{self.number}",
            [*ids, *drafts],
            outputs=1,
            order=order(len(ids), self.answer.prompt_len),
            namespace=None,
        )
        self.cached = self.world.admit(request, len(ids) - 1)
        return request

    def end(self, request: Request, drawn: list[int], bonus: int) -> None:
        ids = self.answer.ids
        self.world.finish([request], {request.rid: {"first": len(ids), "ids": tuple(drawn)}})
        accepted = committed_end(
            order(len(ids)), request.origin_input_ids, {"first": len(ids), "ids": tuple(drawn)}
        ) - len(ids)
        self.answer.ids += [*drawn[:accepted], drawn[accepted] if accepted < len(drawn) else bonus]
        self.world.check()

    def round(self, drafts: list[int], drawn: list[int], bonus: int = 7) -> None:
        self.end(self.begin(drafts), drawn, bonus)

    @property
    def path_len(self) -> int:
        key = toy_tree.Key(array("q", self.answer.ids[:-1]))
        return self.world.api.path_len(self.world.tree, key)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("num_slots", [4096, 640])
@pytest.mark.parametrize("make", [toy_tree.radix_api, toy_tree.rust_api])
def test_random_answers_find_what_they_would_find_without_merging(make: Any, num_slots: int, page_size: int) -> None:
    for seed in range(3):
        done = run_plan(make(page_size), Plan(seed=seed, steps=60, num_slots=num_slots, page_size=page_size))
        assert done["rounds"] > 30
        assert done["longest"] <= 16
        assert done["longest"] <= done["longest_without"]


@pytest.mark.parametrize(("make", "bound"), [(toy_tree.radix_api, 2), (toy_tree.rust_api, 9)])
def test_the_path_of_an_answer_does_not_grow(make: Any, bound: int) -> None:
    writer = Writer(World(make(1), is_hooked=True), [9, 8, 7, 6])
    plain = Writer(World(make(1), is_hooked=False), [9, 8, 7, 6])
    for number in range(60):
        drafts = [number, 2, 3, 4]
        for one in (writer, plain):
            one.round(drafts, [number, 2, 30, 4])
            assert one.cached in (0, len(one.answer.ids) - 4)
        assert writer.answer.ids == plain.answer.ids
        assert writer.path_len <= bound
    assert plain.path_len >= 59
    total = writer.world.tree.evictable_size()
    assert total == len(writer.answer.ids) - 1  # rejected drafts are not kept
    assert plain.world.tree.evictable_size() == total + 2 * 60


def test_a_node_that_somebody_holds_stays() -> None:
    writer = Writer(World(toy_tree.radix_api(1), is_hooked=True), [9, 8, 7, 6])
    writer.round([1, 2], [1, 2])
    holder = writer.begin([5])  # locked at the end of what is there: that node must keep its end
    node = holder.last_node
    other = Writer(writer.world, [9, 8, 7, 6])
    other.answer.ids = [*writer.answer.ids]
    other.round([3], [3])
    assert node.lock_ref == 1
    assert node.children
    writer.end(holder, [6], 7)
    writer.world.check()


def test_prompts_are_not_merged_into_answers() -> None:
    world = World(toy_tree.radix_api(1), is_hooked=True)
    prompt = [9, 8, 7, 6]
    asked = Request("prompt", prompt, outputs=1, order=order(4), namespace=None)
    world.admit(asked, 3)
    world.finish([asked], {asked.rid: 1})
    writer = Writer(world, prompt)
    for _ in range(5):
        writer.round([2, 3], [2, 4])
    (node,) = world.tree.root_node.children.values()
    assert list(node.key.token_ids) == prompt
    assert writer.path_len == 2


@pytest.mark.parametrize(
    ("drawn", "end"),
    [
        ({"first": 3, "ids": (4, 5)}, 5),
        ({"first": 3, "ids": (4, 6)}, 4),
        ({"first": 3, "ids": (6, 5)}, 3),
        ({"first": 4, "ids": (5,)}, 5),  # cut into two passes
        ({"first": 3, "ids": (9,)}, 5),
        (1, 5),
        (None, 5),
    ],
)
def test_what_a_round_commits(drawn: Any, end: int) -> None:
    assert committed_end(order(3), [1, 2, 3, 4, 5], drawn) == end


def test_requests_of_others_are_left_alone() -> None:
    world = World(toy_tree.radix_api(1), is_hooked=True)
    for outputs, own in ((1, None), (5, order(3))):
        request = Request(f"r{outputs}", [1, 2, 3, 4], outputs=outputs, order=own, namespace=None)
        world.admit(request, 3)
        world.finish([request], {request.rid: {"first": 3, "ids": (9,)}})
        assert world.tree.evictable_size() == 4


def test_a_tree_that_is_not_known_is_not_touched() -> None:
    class Derived(toy_tree.RadixCache):
        pass

    off: list[str] = []
    merged = MergedRounds(off.append)
    for tree, reason in (
        (Derived(None, None, 1), "the prefix tree is a"),
        (SimpleNamespace(), "the prefix tree is a types.SimpleNamespace"),
    ):
        before = dict(vars(tree))
        assert merged.after_tree_cache(tree, SimpleNamespace(params=PARAMS)) is tree
        assert vars(tree) == before
        assert off.pop().startswith(reason)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"disable": True}, "the prefix cache is off"),
        ({"cache_controller": object()}, "the prefix tree has a cache_controller"),
        ({"enable_session_radix_cache": True}, "the prefix tree keeps sessions"),
        ({"_components_tuple": (object(), object())}, "the prefix tree is made of object, object"),
        ({"tree_core": object()}, "the prefix tree is a builtins.object"),
    ],
)
def test_a_unified_tree_with_more_to_it_is_not_touched(change: dict[str, Any], reason: str) -> None:
    tree = toy_tree.UnifiedRadixCache(None, None, 1)
    for name, value in change.items():
        setattr(tree, name, value)
    off: list[str] = []
    MergedRounds(off.append).after_tree_cache(tree, SimpleNamespace(params=PARAMS))
    assert off == [reason]
    assert "checkpoint" not in vars(tree)


@pytest.mark.parametrize(
    "params",
    [
        SimpleNamespace(enable_kv_cache_events=True, eviction_policy="lru"),
        SimpleNamespace(enable_kv_cache_events=False, eviction_policy="lfu"),
    ],
)
def test_where_rust_can_not_merge_rejected_drafts_are_still_left_out(params: Any) -> None:
    writer = Writer(World(toy_tree.rust_api(1), is_hooked=True), [9, 8, 7, 6])
    off: list[str] = []
    writer.world.tree = writer.world.api.make(writer.world.pages, writer.world.rows)
    writer.world.merged = MergedRounds(off.append)
    writer.world.merged.after_tree_cache(writer.world.tree, SimpleNamespace(params=params))
    assert off[0].startswith("rejected drafts are left out of the tree, but")
    for _ in range(20):
        writer.round([1, 2, 3], [1, 4, 3])
    assert writer.world.tree.evictable_size() == len(writer.answer.ids) - 1
    assert writer.path_len == 20


def test_an_error_ends_the_capability_and_not_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writer = Writer(World(toy_tree.radix_api(1), is_hooked=True), [9, 8, 7, 6])
    writer.round([1, 2], [1, 2])
    monkeypatch.delattr(toy_tree.Key, "raw_token_ids")
    for _ in range(3):
        writer.round([1, 2], [1, 3])
    assert writer.world.off == ["an error: AttributeError"]
    assert caplog.text.count("merged_rounds is off") == 1
    assert writer.path_len == 3


@pytest.mark.parametrize("make", [toy_tree.radix_api, toy_tree.rust_api])
def test_an_error_at_the_end_of_a_request_ends_it_as_ever(make: Any) -> None:
    class Failing(dict[str, int]):
        def get(self, *args: Any) -> Any:
            raise LookupError

    writer = Writer(World(make(1), is_hooked=True), [9, 8, 7, 6])
    writer.world.merged._ends = Failing()
    writer.round([1, 2], [1, 3])
    assert writer.world.off == ["an error: LookupError"]
    assert writer.world.tree.evictable_size() == 7
