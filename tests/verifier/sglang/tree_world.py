"""Random rounds, streams and evictions over a prefix tree of SGLang's, with the plugin's merging and without.

The trees are given: a toy (toy_tree), and the real classes where SGLang is installed (real_tree).

Slots hold what was computed into them, the ids up to their position, so a wrong slot in any match is seen. After every
step: no slot is free, in the tree or owned by a request twice, none is lost, and the tree's own sums are right.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from verifier.sglang.plugin.merged_rounds import MergedRounds
from verifier.sglang.plugin.orders import ORDER_NAME, DrawOrder, custom_params
from wire.sampling import SamplingParams

__all__ = ["Api", "Pages", "Plan", "World", "run_plan"]


class Pages:
    """SGLang's allocator as far as a tree uses it. Freeing what is free is an error."""

    device = "cpu"

    def __init__(self, num_slots: int, page_size: int) -> None:
        self.page_size, self.size_full, self.size = page_size, num_slots, num_slots
        self.free_pages = set(range(num_slots // page_size))

    def available_size(self) -> int:
        return len(self.free_pages) * self.page_size

    def alloc(self, count: int) -> list[int]:
        """``count`` slots at the begin of pages of their own."""
        pages = sorted(self.free_pages)[: -(-count // self.page_size)]
        self.free_pages -= set(pages)
        return [page * self.page_size + i for page in pages for i in range(self.page_size)][:count]

    def free(self, indices: torch.Tensor) -> None:
        for page in {int(slot) // self.page_size for slot in indices}:
            if page in self.free_pages:
                raise AssertionError(f"page {page} was freed twice")
            self.free_pages.add(page)

    def free_segment(self, indices: torch.Tensor, start_pos: int = 0) -> None:
        self.free(indices)

    def free_segments(self, segments: list[tuple[torch.Tensor, int]]) -> None:
        parts = [part for part, _ in segments if len(part)]
        if parts:
            self.free(torch.cat(parts))

    def mamba_full_cache_donor(self) -> None:
        return None

    def evict_to_free_tokens(self, tree: Any, count: int) -> None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """How one version of SGLang is driven.

    Fields:
        make: (pages, rows) to a tree. key, match_params, evict_params: its types.
        path_len: nodes on the path of a key in a tree, which it leaves as it is.
    """

    make: Callable[[Pages, Any], Any]
    key: Callable[..., Any]
    match_params: Callable[..., Any]
    evict_params: Callable[..., Any]
    path_len: Callable[[Any, Any], int]


class Request:
    """SGLang's Req, as far as a tree and the plugin look at it."""

    def __init__(
        self, rid: str, ids: list[int], *, outputs: int, order: DrawOrder | None, namespace: str | None
    ) -> None:
        self.rid = rid
        self.origin_input_ids = array("q", ids)
        self.output_ids = array("q")
        params = None if order is None else custom_params(order)
        self.sampling_params = SimpleNamespace(custom_params=params, max_new_tokens=outputs)
        self.extra_key, self.cache_salt, self.priority, self.session_id, self.session = namespace, None, 0, None, None
        self.kv_rotation_base, self.swa_prefix_lock_released, self.finished_reason = None, False, None
        self.mamba_pool_idx, self.last_node, self.lock, self.lock_receipt = None, None, None, None
        self.swa_uuid_for_lock, self.skip_lock_node_ids = None, {}  # up to 0.5.19
        self.row = 0
        self.is_done = False
        self.kv = SimpleNamespace(
            req_pool_idx=0, cache_protected_len=0, cache_inserted_len=0, swa_evicted_seqlen=0, kv_committed_len=0
        )
        self.cache_protected_len = 0  # 0.5.17
        self.slots: list[int] = []

    @property
    def req_pool_idx(self) -> int:
        return self.row

    @property
    def full_untruncated_fill_ids(self) -> Any:
        return self.origin_input_ids + self.output_ids

    def finished(self) -> bool:
        return self.is_done


@dataclass(slots=True, kw_only=True)
class Answer:
    """One text being written. ``pending``: its round or stream in flight."""

    name: str
    prompt_len: int
    ids: list[int]
    namespace: str | None
    pending: Any = None
    num_rounds: int = 0


@dataclass
class World:
    """One engine's tree, allocator and rows."""

    api: Api
    is_hooked: bool
    num_slots: int = 4096
    page_size: int = 1
    off: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pages = Pages(self.num_slots, self.page_size)
        self.rows = SimpleNamespace(req_to_token=torch.zeros(64, 2048, dtype=torch.int32), write=self._write)
        self.free_rows = list(range(64))
        self.tree = self.api.make(self.pages, self.rows)
        self.content: dict[int, int] = {}
        self.running: list[Request] = []
        self.merged = MergedRounds(self.off.append)
        if self.is_hooked:
            params = SimpleNamespace(enable_kv_cache_events=False, eviction_policy="lru")
            self.merged.after_tree_cache(self.tree, SimpleNamespace(params=params))

    def _write(self, place: Any, values: torch.Tensor) -> None:
        self.rows.req_to_token[place] = values.to(torch.int32)

    # ------------------------------------------------------------ a request's life

    def admit(self, request: Request, match_up_to: int) -> int:
        """Match, lock, take slots for the rest. Returns what was cached."""
        ids = request.origin_input_ids
        found = self.tree.match_prefix(self.api.match_params(key=self.key(request, ids[:match_up_to])))
        slots = self._matched(found)
        self._check(slots, ids)
        request.last_node = found.last_device_node
        request.cache_protected_len = request.kv.cache_protected_len = len(slots)
        if hasattr(self.tree, "lock"):
            request.lock = self.tree.lock(request.last_node)
        else:
            receipt = self.tree.inc_lock_ref(request.last_node)
            request.lock_receipt = getattr(receipt, "to_dec_params", lambda: None)()
        self._make_room(len(ids) - len(slots))
        request.slots = [*slots, *self.pages.alloc(len(ids) - len(slots))]
        request.row = request.kv.req_pool_idx = self.free_rows.pop()
        self.rows.req_to_token[request.row, : len(request.slots)] = torch.tensor(request.slots, dtype=torch.int32)
        self._compute(request, len(slots))
        self.running.append(request)
        return len(slots)

    def extend(self, request: Request, token_id: int) -> None:
        """A decode step: the newest id's KV."""
        at = len(request.slots)
        request.output_ids.append(token_id)
        ids = request.origin_input_ids + request.output_ids
        if at % self.page_size:
            slot = request.slots[-1] + 1
        else:
            self._make_room(1)
            slot = self.pages.alloc(1)[0]
        request.slots.append(slot)
        self.rows.req_to_token[request.row, at] = slot
        self.content[slot] = hash(tuple(ids[: at + 1]))

    def finish(self, requests: list[Request], drawn: dict[str, Any]) -> None:
        """The end of a pass in which these ended."""
        entries = [SimpleNamespace(copy=lambda request=request: drawn.get(request.rid)) for request in requests]
        batch = SimpleNamespace(reqs=requests, forward_mode=SimpleNamespace(is_extend=lambda: True))
        result = SimpleNamespace(logits_output=SimpleNamespace(customized_info={ORDER_NAME: entries}))
        if self.is_hooked:
            self.merged.around_batch_result(lambda *_: self._release_all(requests), None, batch, result)
        else:
            self._release_all(requests)

    def _release_all(self, requests: list[Request]) -> None:
        for request in requests:
            request.is_done = True
            self._release(request)
            self.running.remove(request)
            self.free_rows.append(request.row)

    def _release(self, request: Request) -> None:
        tree, length = self.tree, len(request.slots)
        if hasattr(tree, "checkpoint") or hasattr(tree, "insert_req"):
            (tree.checkpoint if hasattr(tree, "checkpoint") else tree.insert_req)(request, up_to=length)
            rest = request.slots[request.kv.cache_protected_len : length]
            if rest:
                self.pages.free(torch.tensor(rest))
            if hasattr(tree, "unlock"):
                tree.unlock(request.lock)
            else:
                tree.unpin(request)
        else:
            tree.cache_finished_req(request, kv_len_to_handle=length)

    # ------------------------------------------------------------ pieces

    def key(self, request: Request, ids: Any) -> Any:
        return self.api.key(array("q", ids), request.extra_key)

    def _matched(self, found: Any) -> list[int]:
        if hasattr(found, "device_indices"):
            return [int(slot) for slot in found.device_indices]
        return [int(slot) for slot in self.tree.path_device_indices(found.last_device_node)]

    def _compute(self, request: Request, start: int) -> None:
        for at in range(start, len(request.slots)):
            self.content[request.slots[at]] = hash(tuple(request.origin_input_ids[: at + 1]))

    def _check(self, slots: list[int], ids: Any) -> None:
        for at, slot in enumerate(slots):
            assert self.content[slot] == hash(tuple(ids[: at + 1])), f"slot {slot} is not position {at}'s"

    def _make_room(self, count: int) -> None:
        wanted = -(-count // self.page_size) * self.page_size
        if self.pages.available_size() < wanted:
            self.tree.evict(self.api.evict_params(num_tokens=wanted - self.pages.available_size()))
        assert self.pages.available_size() >= wanted, "the pool is too small for what runs"

    def evict(self, count: int) -> None:
        self.tree.evict(self.api.evict_params(num_tokens=count))

    def check(self) -> None:
        """Every slot is in one place, and the tree's sums are right."""
        tree = self.tree
        sizes = tree.evictable_size() + tree.protected_size()
        held = [int(slot) for slot in tree.all_values_flatten()] if sizes else []
        assert sizes == len(held) == len(set(held)), (
            f"the tree says it holds {sizes} slots, and holds {len(held)}, {len(set(held))} of them different"
        )
        total = tree.total_size()
        assert (total[0] if isinstance(total, tuple) else total) == sizes
        pages = {slot // self.page_size for slot in held}
        assert not pages & self.pages.free_pages, "a free page is in the tree"
        for request in self.running:
            own = {slot // self.page_size for slot in request.slots[self._protected(request) :]}
            assert not own & pages, "a request's page is in the tree"
            assert not own & self.pages.free_pages, "a request's page is free"
            pages |= own
        assert len(pages) + len(self.pages.free_pages) == self.num_slots // self.page_size, "pages were lost"
        if hasattr(tree, "sanity_check"):
            tree.sanity_check()
        if hasattr(tree, "evictable_leaves"):
            nodes = [node for node in _nodes(tree.root_node) if node is not tree.root_node]
            leaves = {id(node) for node in nodes if not node.children and not node.lock_ref}
            assert {id(node) for node in tree.evictable_leaves} == leaves
            assert tree.evictable_size() == sum(len(node.key) for node in nodes if not node.lock_ref)
            for node in nodes:
                assert len(node.key) == len(node.value)
                assert node.parent.children[node.key.child_key(self.page_size)] is node
                assert node.lock_ref >= sum(child.lock_ref for child in node.children.values())

    def _protected(self, request: Request) -> int:
        kept = request.kv.cache_protected_len
        return -(-kept // self.page_size) * self.page_size


def _nodes(node: Any) -> Iterator[Any]:
    yield node
    for child in node.children.values():
        yield from _nodes(child)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A random run. ``num_slots``: small, so that it evicts."""

    seed: int
    steps: int = 120
    num_slots: int = 4096
    page_size: int = 1
    is_eagle: bool = False
    vocab: int = 3


def run_plan(api: Api, plan: Plan) -> dict[str, int]:
    """Run it with and without merging. Returns what it did; raises AssertionError on any difference."""
    rng = random.Random(plan.seed)
    worlds = [World(api, hooked, plan.num_slots, plan.page_size) for hooked in (True, False)]
    evicts = plan.num_slots < 2048
    prompts = [[100 + i for i in range(rng.randrange(5, 30))], [200 + i for i in range(12)]]
    answers: list[Answer] = []
    done = {"rounds": 0, "streams": 0, "answers": 0, "evictions": 0, "longest": 0, "longest_without": 0}

    def step(answer: Answer) -> None:
        if answer.pending is None:
            _start(rng, plan, worlds, answer, evicts)
        else:
            kind = answer.pending[0]
            together = [a for a in answers if a is not answer and a.pending and a.pending[0] == "round" == kind]
            group = [answer, *rng.sample(together, rng.randrange(len(together) + 1))]
            _end(rng, plan, worlds, group, done)
        for world in worlds:
            world.check()

    for _ in range(plan.steps):
        if len(answers) < 4 and rng.random() < 0.2:
            twin = rng.choice(answers) if answers and rng.random() < 0.3 else None
            prompt = rng.choice(prompts)[: rng.randrange(4, 13)] if twin is None else twin.ids[: twin.prompt_len]
            namespace = rng.choice([None, "other"]) if twin is None else twin.namespace
            name = f"{plan.seed}-{done['answers']}"
            answers.append(Answer(name=name, prompt_len=len(prompt), ids=[*prompt], namespace=namespace))
            done["answers"] += 1
        if answers and rng.random() < 0.02:
            answer = rng.choice(answers)
            if answer.pending is None:
                answers.remove(answer)
        if rng.random() < 0.03 and evicts:
            count = rng.randrange(1, 40)
            for world in worlds:
                world.evict(count)
            done["evictions"] += 1
        for answer in rng.sample(answers, min(len(answers), 2)):
            step(answer)
    for answer in [a for a in answers if a.pending is not None]:
        _end(rng, plan, worlds, [answer], done)
    for world in worlds:
        world.check()
        assert not world.off, world.off
    while answers:  # everything can be evicted in the end
        answer = answers.pop()
        lengths = [_probe(world, answer) for world in worlds]
        assert evicts or lengths[0] == lengths[1], (answer.name, lengths)
    for world in worlds:
        world.evict(plan.num_slots)
        assert world.pages.available_size() == plan.num_slots // plan.page_size * plan.page_size
    return done


def _start(rng: random.Random, plan: Plan, worlds: list[World], answer: Answer, evicts: bool) -> None:
    kind = "prompt" if len(answer.ids) == answer.prompt_len else rng.choices(("round", "stream"), (9, 1))[0]
    drafts = [rng.randrange(plan.vocab) for _ in range(rng.randrange(0, 5))] if kind == "round" else []
    order = DrawOrder(sampling=SamplingParams(), base_len=len(answer.ids), prompt_len=answer.prompt_len)
    cached, requests = [], []
    for world in worlds:
        outputs = 1 if kind != "stream" else 8
        request = Request(
            f"{answer.name}-{answer.num_rounds}",
            [*answer.ids, *drafts],
            outputs=outputs,
            order=order,
            namespace=answer.namespace,
        )
        cached.append(world.admit(request, len(answer.ids) - 1))
        requests.append(request)
    assert evicts or cached[0] == cached[1], f"{cached[0]} cached, without merging {cached[1]}"
    if kind == "round" and not evicts and not plan.is_eagle:
        aligned = (len(answer.ids) - 1) // plan.page_size * plan.page_size
        assert cached[0] == aligned, "a round computes more than its newest id"
    answer.pending = (kind, requests, drafts, order)
    answer.num_rounds += 1


def _end(rng: random.Random, plan: Plan, worlds: list[World], group: list[Answer], done: dict[str, int]) -> None:
    drawn: dict[str, Any] = {}
    for answer in group:
        kind, requests, drafts, order = answer.pending
        if kind == "stream":
            newest = rng.randrange(plan.vocab)
            produced = [newest]
            for _ in range(rng.randrange(0, 6)):
                for world, request in zip(worlds, requests, strict=True):
                    world.extend(request, produced[-1])
                produced.append(rng.randrange(plan.vocab))
            for request in requests:
                request.output_ids.append(produced[-1])
            answer.ids += produced
            done["streams"] += 1
            continue
        targets = [rng.randrange(plan.vocab) if rng.random() < 0.4 else draft for draft in drafts]
        if drafts:
            drawn[requests[0].rid] = {"first": order.base_len, "ids": tuple(targets)}
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == targets[accepted]:
            accepted += 1
        bonus = targets[accepted] if accepted < len(drafts) else rng.randrange(plan.vocab)
        answer.ids += [*drafts[:accepted], bonus]
        for request in requests:
            request.output_ids.append(bonus)
        done["rounds"] += kind == "round"
    for index, world in enumerate(worlds):
        world.finish([answer.pending[1][index] for answer in group], drawn)
    for answer in group:
        request = answer.pending[1][0]
        ids = request.origin_input_ids
        lengths = [world.api.path_len(world.tree, world.key(request, ids)) for world in worlds]
        done["longest"] = max(done["longest"], lengths[0])
        done["longest_without"] = max(done["longest_without"], lengths[1])
        answer.pending = None


def _probe(world: World, answer: Answer) -> int:
    request = Request("probe", answer.ids, outputs=1, order=None, namespace=answer.namespace)
    found = world.tree.match_prefix(world.api.match_params(key=world.key(request, answer.ids[:-1])))
    slots = world._matched(found)
    world._check(slots, answer.ids)
    return len(slots)
