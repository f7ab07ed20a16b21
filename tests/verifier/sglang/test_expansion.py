"""Verify passes as decode rows: draws, logits and logprobs of an extend pass, and only where rows can carry it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from enum import Enum, auto
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.verifier.sglang import toy_model
from tests.verifier.sglang.toy_passes import ToyRequest, ordered
from verifier.embedded.sampling import TokenSampler
from verifier.sglang.plugin.draws import TargetDraws
from verifier.sglang.plugin.expansion import BatchExpansion
from verifier.sglang.plugin.orders import ORDER_NAME, DrawOrder, PluginReport
from wire.sampling import SamplingParams

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
GREEDY = SamplingParams(temperature=0.0)
PARAMS = [GREEDY, SamplingParams(temperature=0.8, seed=3), SamplingParams(temperature=1.1, top_p=0.9, seed=4)]


class Mode(Enum):
    """SGLang's ForwardMode, as far as it matters."""

    EXTEND = auto()
    DECODE = auto()
    MIXED = auto()

    def is_extend(self) -> bool:
        return self is not Mode.DECODE

    def is_decode(self) -> bool:
        return self is Mode.DECODE


class ReqToTokenPool:
    """Its name is what counts."""


class HybridReqToTokenPool:
    """That of a model with recurrent layers."""


@dataclass
class Engine:
    """A ModelRunner whose cache holds ids, so a row's logits are those of the ids that it sees.

    Fields:
        cache: ids by request slot and position; kept: extend passes that ran as such.
    """

    max_bs: int | None = 16
    max_running_requests: int = 32
    fails_on_decode: bool = False
    cache: dict[int, dict[int, int]] = field(default_factory=dict)
    modes: list[Mode] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.req_to_token_pool: Any = ReqToTokenPool()
        self.decode_cuda_graph_runner = None if self.max_bs is None else SimpleNamespace(max_bs=self.max_bs)

    def forward(self, runner: Any, batch: Any) -> Any:
        """As ModelRunner.forward: writes all rows, then reads."""
        assert runner is self
        self.modes.append(batch.forward_mode)
        if batch.forward_mode is Mode.DECODE:
            if self.fails_on_decode:
                raise RuntimeError("The size of tensor a (2) must match the size of tensor b (4)")
            assert batch.batch_size == len(batch.input_ids) == len(batch.seq_lens) == len(batch.out_cache_loc)
            assert batch.seq_lens.tolist() == batch.seq_lens_cpu.tolist() == (batch.positions + 1).tolist()
            assert batch.seq_lens_sum == sum(batch.seq_lens.tolist())
            assert batch.extend_seq_lens is None
            assert not batch.return_logprob
            slots = batch.req_pool_indices.tolist()
        else:
            slots = batch.req_pool_indices.repeat_interleave(batch.extend_seq_lens).tolist()
        for slot, position, token_id in zip(slots, batch.positions.tolist(), batch.input_ids.tolist(), strict=True):
            self.cache[slot][position] = token_id
        seen = [
            [self.cache[slot][i] for i in range(position + 1)]
            for slot, position in zip(slots, batch.positions.tolist(), strict=True)
        ]
        self.rows += seen
        logits = torch.from_numpy(np.stack([toy_model.logits(ids) for ids in seen]))
        if batch.forward_mode is not Mode.DECODE:
            logits = logits[batch.extend_seq_lens.cumsum(0) - 1]
        output = SimpleNamespace(next_token_logits=logits, input_token_logprobs=None, customized_info=None)
        return SimpleNamespace(logits_output=output)


def verify_pass(parts: list[tuple[ToyRequest, int]], engine: Engine, **changes: Any) -> tuple[Any, Any]:
    """SGLang's batches of one extend pass: each part is a request and how many of its ids are cached."""
    ids = [list(request.origin_input_ids) for request, _ in parts]
    prefix_lens = [cached for _, cached in parts]
    lens = [len(own) - cached for own, cached in zip(ids, prefix_lens, strict=True)]
    for slot, (own, cached) in enumerate(zip(ids, prefix_lens, strict=True)):
        engine.cache[slot + 5] = dict(enumerate(own[:cached]))
    positions = [p for cached, own in zip(prefix_lens, ids, strict=True) for p in range(cached, len(own))]
    scheduled = SimpleNamespace(
        reqs=[request for request, _ in parts], forward_mode=Mode.EXTEND, prefix_lens=prefix_lens, extend_lens=lens
    )
    following = [
        own[p + 1] if p + 1 < len(own) else 0
        for own, c in zip(ids, prefix_lens, strict=True)
        for p in range(c, len(own))
    ]
    batch = SimpleNamespace(
        forward_mode=Mode.EXTEND,
        batch_size=len(parts),
        rids=[request.rid for request, _ in parts],
        input_ids=torch.tensor([own[p] for own, c in zip(ids, prefix_lens, strict=True) for p in range(c, len(own))]),
        positions=torch.tensor(positions),
        req_pool_indices=torch.arange(5, 5 + len(parts)),
        seq_lens=torch.tensor([len(own) for own in ids]),
        seq_lens_cpu=torch.tensor([len(own) for own in ids]),
        seq_lens_sum=sum(map(len, ids)),
        orig_seq_lens=torch.tensor([len(own) for own in ids], dtype=torch.int32),
        out_cache_loc=torch.arange(100, 100 + len(positions)),
        extend_seq_lens=torch.tensor(lens, dtype=torch.int32),
        extend_prefix_lens=torch.tensor(prefix_lens, dtype=torch.int32),
        extend_seq_lens_cpu=lens,
        extend_prefix_lens_cpu=prefix_lens,
        extend_logprob_start_lens_cpu=[0] * len(parts),
        extend_input_logprob_token_ids_gpu=torch.tensor(following),
        return_logprob=True,
        top_logprobs_nums=[0] * len(parts),
        token_ids_logprobs=[None] * len(parts),
        is_extend_in_batch=True,
        lora_ids=[None] * len(parts),
        mm_inputs=[None] * len(parts),
        spec_info=None,
    )
    vars(batch).update(changes)
    return scheduled, batch


def run(draws: TargetDraws, expansion: BatchExpansion, engine: Engine, scheduled: Any, batch: Any) -> Any:
    """One pass through the worker; its output."""

    def original(worker: Any, scheduled: Any) -> Any:
        return expansion.around_model_forward(engine.forward, engine, batch)

    return draws.around_forward(original, None, scheduled).logits_output


def answers(num_drafts: int) -> list[tuple[ToyRequest, int]]:
    parts = []
    for number, params in enumerate(PARAMS):
        ids = [*PROMPT, number, 9]
        order = DrawOrder(sampling=params, base_len=len(ids), prompt_len=len(PROMPT))
        drafts = [5, 7, 1, 2][: num_drafts - number % 2]
        # The second computes two committed positions again, for their features.
        parts.append((ordered(f"r{number}", ids + drafts, order), len(ids) - 1 - 2 * (number == 1)))
    return parts


def test_rows_see_what_they_would_see_and_draw_the_same() -> None:
    draws, engine = TargetDraws(PluginReport), Engine()
    parts = answers(4)
    scheduled, batch = verify_pass(parts, engine)
    output = run(draws, BatchExpansion(draws), engine, scheduled, batch)
    assert engine.modes == [Mode.DECODE]
    assert batch.forward_mode is Mode.EXTEND, "what the engine goes on with is as it was"
    last = []
    for row, (request, cached) in enumerate(parts):
        ids = list(request.origin_input_ids)
        assert all(ids[: p + 1] in engine.rows for p in range(cached, len(ids)))
        base_len = len(PROMPT) + 2
        drafts = ids[base_len:]
        entry = output.customized_info[ORDER_NAME][row]
        entry._turn.last_drawn = True  # the sampler comes afterwards
        logits = np.stack([toy_model.logits(ids[: base_len + i]) for i in range(len(drafts) + 1)])
        sampler = TokenSampler(PARAMS[row], vocab_size=toy_model.VOCAB_SIZE, prompt_len=len(PROMPT))
        expected = sampler.choose(logits, ids[:base_len], tuple(drafts))
        assert list(entry.copy()["ids"]) == expected[:-1]
        assert entry.copy()["first"] == base_len
        assert entry.copy()["is_expanded"]
        last.append(logits[-1])
    assert torch.equal(output.next_token_logits, torch.from_numpy(np.stack(last)))


def test_the_logprobs_of_input_ids_are_those_of_the_extend_pass() -> None:
    draws, engine = TargetDraws(PluginReport), Engine()
    parts = answers(3)
    starts = [0, 2, 1]
    scheduled, batch = verify_pass(parts, engine, extend_logprob_start_lens_cpu=starts)
    expected, ids = [], []
    for (request, cached), start in zip(parts, starts, strict=True):
        own = [*request.origin_input_ids, 0]
        for position in range(cached + start, len(own) - 1):
            ids.append(own[position + 1])
            expected.append(toy_model.logprobs(own[: position + 1])[own[position + 1]])
    batch.extend_input_logprob_token_ids_gpu = torch.tensor(ids)
    output = run(draws, BatchExpansion(draws), engine, scheduled, batch)
    assert engine.modes == [Mode.DECODE]
    assert output.input_token_logprobs.tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"forward_mode": Mode.MIXED},
        {"top_logprobs_nums": [0, 5, 0]},
        {"token_ids_logprobs": [None, [3], None]},
        {"mm_inputs": [None, None, object()]},
        {"spec_info": object()},
        {"input_embeds": torch.zeros(3)},
        {"global_num_tokens_cpu": [3]},
        {"mamba_track_indices": torch.zeros(1)},
        {"extend_prefix_lens_cpu": None},
        {"extend_prefix_lens_cpu": [9, 0, 9]},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_rows_cannot_carry_stays_an_extend(changes: dict[str, Any]) -> None:
    draws, engine = TargetDraws(PluginReport), Engine()
    scheduled, batch = verify_pass(answers(3), engine, **changes)
    run(draws, BatchExpansion(draws), engine, scheduled, batch)
    assert engine.modes == [batch.forward_mode]


@pytest.mark.parametrize(
    ("max_bs", "max_running_requests", "expected"),
    [(16, 32, Mode.DECODE), (15, 32, Mode.EXTEND), (None, 16, Mode.DECODE), (None, 15, Mode.EXTEND)],
)
def test_more_rows_than_the_engine_has_stay_an_extend(
    max_bs: int | None, max_running_requests: int, expected: Mode
) -> None:
    """In graphs, and without one in the buffers that SGLang sizes by --max-running-requests."""
    draws, engine = TargetDraws(PluginReport), Engine(max_bs=max_bs, max_running_requests=max_running_requests)
    scheduled, batch = verify_pass(answers(4), engine)
    assert len(batch.input_ids) == 16
    run(draws, BatchExpansion(draws), engine, scheduled, batch)
    assert engine.modes == [expected]


@pytest.mark.parametrize(
    "fields",
    [
        {"req_to_token_pool": HybridReqToTokenPool()},
        {"lora_manager": object()},
        {"hisparse_coordinator": object()},
        {"dcp_size": 2},
        {"server_args": SimpleNamespace(enable_two_batch_overlap=True)},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_engines_whose_rows_depend_on_more_than_the_cache_stay_with_extends(fields: dict[str, Any]) -> None:
    draws, engine = TargetDraws(PluginReport), Engine()
    vars(engine).update(fields)
    run(draws, BatchExpansion(draws), engine, *verify_pass(answers(3), engine))
    assert engine.modes == [Mode.EXTEND]


def test_a_stranger_in_the_pass_keeps_it_an_extend() -> None:
    draws, engine = TargetDraws(PluginReport), Engine()
    parts = [*answers(3), (ToyRequest("stranger", [1, 2, 3]), 2)]
    run(draws, BatchExpansion(draws), engine, *verify_pass(parts, engine))
    assert engine.modes == [Mode.EXTEND]


def test_passes_outside_of_the_worker_are_left_alone() -> None:
    """Warm-up and capture call the model too, after a pass whose requests are still known."""
    draws, engine = TargetDraws(PluginReport), Engine()
    expansion = BatchExpansion(draws)
    run(draws, expansion, engine, *verify_pass(answers(3), engine))
    _, dummy = verify_pass([(ToyRequest(f"dummy{i}", [1, 2, 3]), 2) for i in range(3)], engine)
    expansion.around_model_forward(engine.forward, engine, dummy)
    assert engine.modes == [Mode.DECODE, Mode.EXTEND]


def test_places_to_write_are_bound_to_the_rows_where_the_engine_binds_them() -> None:
    draws, engine = TargetDraws(PluginReport), Engine()
    bound: list[Any] = []
    engine.kv_index_translator = SimpleNamespace(bind_own_plan=bound.append)  # type: ignore[attr-defined]
    virtual = torch.arange(200, 212)
    scheduled, batch = verify_pass(answers(4)[:2], engine)
    batch.out_cache_loc_virtual = virtual[: len(batch.input_ids)]
    run(draws, BatchExpansion(draws), engine, scheduled, batch)
    (expanded,) = bound
    assert expanded.forward_mode is Mode.DECODE
    assert expanded.out_cache_loc.tolist() == batch.out_cache_loc_virtual.tolist()


@pytest.mark.parametrize("place", ["before", "during", "after"])
def test_a_fault_costs_the_expansion_not_the_pass(place: str, caplog: pytest.LogCaptureFixture) -> None:
    draws, engine = TargetDraws(PluginReport), Engine(fails_on_decode=place == "during")
    expansion = BatchExpansion(draws)
    scheduled, batch = verify_pass(answers(3), engine)
    if place == "before":
        batch.positions = None
        with caplog.at_level(logging.ERROR), pytest.raises(AttributeError):
            run(draws, expansion, engine, scheduled, batch)  # the toy engine reads positions too
        assert engine.modes == [Mode.EXTEND]
    else:
        batch.extend_input_logprob_token_ids_gpu = (
            None if place == "after" else batch.extend_input_logprob_token_ids_gpu
        )
        with caplog.at_level(logging.ERROR):
            output = run(draws, expansion, engine, scheduled, batch)
        assert engine.modes == [Mode.DECODE, Mode.EXTEND]
        assert len(output.next_token_logits) == 3
    assert "batch expansion is off" in caplog.text
    fine = Engine()
    run(draws, expansion, fine, *verify_pass(answers(3), fine))
    assert fine.modes == [Mode.EXTEND]
