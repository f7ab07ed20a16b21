"""The engine's answers do not depend on batching, drafts, chunks or reuse; bad items hurt nobody else."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from cpukernels.native import NativeKernels
from cpukernels.ports import ragged_rows
from tests.verifier.embedded import slow_sampler
from tests.verifier.embedded.tiny_models import CONFIGS, VOCAB, load, new_engine, write_model
from verifier.acceptance import committed_ids
from verifier.embedded.engine import EmbeddedEngine
from verifier.embedded.model import TargetModel
from wire.messages import VerifyFailed, VerifyItem, VerifyResult
from wire.sampling import SamplingParams
from wire.tensor_ring import TensorRingReader, TensorRingWriter

GREEDY = SamplingParams(temperature=0.0)
SAMPLINGS = {
    "greedy": GREEDY,
    "sampled": SamplingParams(temperature=0.8, seed=5),
    "filtered": SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.02, seed=6),
    "penalised": SamplingParams(
        temperature=0.8, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3, seed=7
    ),
    "greedy penalised": SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.5),
    "biased": SamplingParams(
        temperature=1.1, logit_bias=((3, 4.0), (9, -100.0)), min_new_tokens=4, eos_ids=(3,), seed=8
    ),
}


def prompt_of(seed: int, length: int) -> tuple[int, ...]:
    return tuple(int(i) for i in np.random.default_rng(seed).integers(0, VOCAB, length))


class Client:
    """The gateway's side of one request: commits what the rounds bring."""

    def __init__(self, request_id: str, prompt: Sequence[int], sampling: SamplingParams, **first: Any) -> None:
        self.request_id, self.sampling, self.first = request_id, sampling, first
        self.prompt_len = len(prompt)
        self.ids = list(prompt)
        self.round_id = 0
        self.told = 0
        self.drafts: tuple[int, ...] = ()

    @property
    def output(self) -> list[int]:
        return self.ids[self.prompt_len :]

    def item(self, drafts: Sequence[int] = (), **changes: Any) -> VerifyItem:
        self.round_id += 1
        self.drafts = tuple(drafts)
        fields: dict[str, Any] = {
            "request_id": self.request_id,
            "round_id": self.round_id,
            "base_len": len(self.ids),
            "start": self.told,
            "token_ids": tuple(self.ids[self.told :]),
            "draft_ids": self.drafts,
        }
        if self.told == 0:
            fields |= {"sampling": self.sampling, "prompt_len": self.prompt_len, **self.first}
        self.told = len(self.ids)
        return VerifyItem(**{**fields, **changes})

    def commit(self, result: VerifyResult | VerifyFailed, limit: int = 1000) -> None:
        assert isinstance(result, VerifyResult), result
        assert (result.request_id, result.round_id, result.base_len) == (self.request_id, self.round_id, len(self.ids))
        self.ids += committed_ids(self.drafts, result.target_ids)[:limit]


def answers(engine: EmbeddedEngine, *items: VerifyItem) -> dict[str, VerifyResult | VerifyFailed]:
    """Steps until nothing waits."""
    engine.add(items)
    results: list[VerifyResult | VerifyFailed] = []
    for _ in range(1000):
        if not engine.has_work:
            return {result.request_id: result for result in results}
        reply = engine.step()
        assert reply is not None
        results += reply.results
    raise AssertionError("the engine does not end")


_plain: dict[Any, list[int]] = {}


def plain(
    model: TargetModel, ring: TensorRingWriter, prompt: tuple[int, ...], sampling: SamplingParams, n: int
) -> list[int]:
    """The answer of a fresh engine, one request, no drafts, one prompt chunk a row."""
    key = (id(model), prompt, repr(sampling))
    if len(_plain.get(key, ())) < n:
        engine = new_engine(model, ring, prefix_cache_tokens=0, prefill_chunk_tokens=256)
        client = Client("plain", prompt, sampling)
        for _ in range(n):
            client.commit(answers(engine, client.item())["plain"])
        _plain[key] = client.output
    return _plain[key][:n]


# ---------------------------------------------------------------- the same answer in every way


@pytest.mark.parametrize("name", SAMPLINGS)
def test_plain_equals_the_slow_sampler_over_the_models_logits(
    llama: TargetModel, ring: TensorRingWriter, name: str
) -> None:
    prompt, sampling = prompt_of(1, 9), SAMPLINGS[name]
    got = plain(llama, ring, prompt, sampling, 12)
    ids = list(prompt)
    for _ in range(12):
        cache = llama.new_cache()
        hidden, _ = llama.forward(np.array(ids, dtype=np.int64), ragged_rows([cache], [len(ids)]))
        logits = llama.logits(hidden[-1:].contiguous())[0]
        ids.append(slow_sampler.choose(logits, sampling, ids=ids, prompt_len=len(prompt)))
    assert got == ids[len(prompt) :]


def draft_for(data: st.DataObject, right: Sequence[int], limit: int = 8) -> list[int]:
    """Any K, any accept pattern: some right ids, then random ones."""
    num_right = data.draw(st.integers(0, min(limit, len(right))))
    rest = data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=limit - num_right))
    return [*right[:num_right], *rest]


@settings(max_examples=30, phases=[Phase.generate])
@given(data=st.data(), name=st.sampled_from(sorted(SAMPLINGS)), length=st.integers(1, 60))
def test_any_drafts_give_the_plain_answer(
    llama: TargetModel, ring: TensorRingWriter, data: st.DataObject, name: str, length: int
) -> None:
    prompt, sampling = prompt_of(length, length), SAMPLINGS[name]
    right = plain(llama, ring, prompt, sampling, 24)
    client = Client("a", prompt, sampling)
    engine = new_engine(llama, ring)
    while len(client.output) < 14:
        drafts = draft_for(data, right[len(client.output) :])
        client.commit(answers(engine, client.item(drafts))["a"])
    assert client.output[:24] == right[: len(client.output)][:24]


@settings(max_examples=12, phases=[Phase.generate])  # shrinking takes minutes
@given(seed=st.integers(0, 2**32), chunk=st.integers(1, 70), prefix_tokens=st.sampled_from([0, 60, 4096]))
def test_interleaved_requests_with_drafts_chunks_and_reuse_give_the_plain_answers(
    llama: TargetModel, ring: TensorRingWriter, seed: int, chunk: int, prefix_tokens: int
) -> None:
    # Prompts share long prefixes, so later requests start from what earlier or running ones computed.
    rng, common = random.Random(seed), prompt_of(77, 45)
    specs = {
        "a": (common[:45], "greedy"),
        "b": (common[:30] + prompt_of(1, 20), "sampled"),
        "c": (common[:45], "penalised"),
        "d": (common[:44], "filtered"),
        "e": (prompt_of(2, 3), "biased"),
        "f": (common + prompt_of(3, 5), "greedy penalised"),
    }
    engine = new_engine(llama, ring, prefill_chunk_tokens=chunk, prefix_cache_tokens=prefix_tokens)
    idle = {name: Client(name, prompt, SAMPLINGS[kind]) for name, (prompt, kind) in specs.items()}
    done: dict[str, Client] = {}
    busy: dict[str, Client] = {}
    for _ in range(400):
        if not idle and not busy:
            break
        for name in list(idle):
            if rng.random() < 0.5:
                client = idle.pop(name)
                right = plain(llama, ring, *_spec(specs[name]), 20)
                drafts = [*right[len(client.output) :][: rng.randint(0, 3)], *prompt_of(seed, rng.randint(0, 2))]
                engine.add([client.item(drafts)])
                busy[name] = client
        reply = engine.step()
        for result in reply.results if reply else ():
            client = busy.pop(result.request_id)
            client.commit(result)
            if len(client.output) >= 6:
                engine.close(client.request_id)
                done[client.request_id] = client
            else:
                idle[client.request_id] = client
    assert set(done) == set(specs)
    for name, client in done.items():
        right = plain(llama, ring, *_spec(specs[name]), 20)
        assert client.output[:20] == right[: len(client.output)], name


def _spec(spec: tuple[tuple[int, ...], str]) -> tuple[tuple[int, ...], SamplingParams]:
    return spec[0], SAMPLINGS[spec[1]]


def test_a_cut_block_is_rolled_back(llama: TargetModel, ring: TensorRingWriter) -> None:
    # The gateway kept less than was accepted and goes on with other ids than the verifier computed.
    prompt = prompt_of(4, 20)
    right = plain(llama, ring, prompt, GREEDY, 6)
    engine, client = new_engine(llama, ring), Client("a", prompt, GREEDY)
    client.commit(answers(engine, client.item())["a"])
    client.commit(answers(engine, client.item(right[1:5]))["a"], limit=2)
    assert client.output == right[:3]
    client.ids[-1] = (client.ids[-1] + 1) % VOCAB
    other = tuple(client.ids)
    result = answers(engine, client.item([5, 6]))["a"]
    fresh = Client("b", other, GREEDY)
    expected = answers(new_engine(llama, ring), fresh.item([5, 6]))["b"]
    assert result.target_ids == expected.target_ids


def test_ids_before_the_last_told_can_be_replaced(llama: TargetModel, ring: TensorRingWriter) -> None:
    prompt = prompt_of(5, 30)
    engine, client = new_engine(llama, ring), Client("a", prompt, GREEDY)
    client.commit(answers(engine, client.item())["a"])
    client.commit(answers(engine, client.item())["a"])
    client.told = 10
    client.ids[10:] = prompt_of(6, 12)
    result = answers(engine, client.item())["a"]
    fresh = Client("b", client.ids, GREEDY)
    assert result.target_ids == answers(new_engine(llama, ring), fresh.item())["b"].target_ids


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama3 rope"])
def test_other_architectures_are_lossless_too(
    native: NativeKernels, ring: TensorRingWriter, tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    model = load(write_model(tmp_path_factory.mktemp("model"), CONFIGS[name]()), native)
    prompt = prompt_of(8, 33)
    right = plain(model, ring, prompt, SAMPLINGS["filtered"], 16)
    for k in (1, 2, 3, 5, 8):
        engine, client = new_engine(model, ring), Client("a", prompt, SAMPLINGS["filtered"])
        while len(client.output) < 12:
            at = len(client.output)
            drafts = [*right[at : at + k // 2], *prompt_of(at, k - k // 2)]
            client.commit(answers(engine, client.item(drafts))["a"])
        assert client.output[:12] == right[:12], k


# ---------------------------------------------------------------- the distribution


def test_speculative_sampling_follows_the_plain_distribution(
    native: NativeKernels, ring: TensorRingWriter, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # A toy vocabulary of 16: the pair of tokens committed by rounds of adversarial drafts, over many seeds,
    # against the exact distribution of plain decoding.
    config = CONFIGS["llama"]()
    config.vocab_size, vocab = 16, 16
    model = load(write_model(tmp_path_factory.mktemp("toy"), config, spread=2.0), native)
    prompt, n = (1, 2, 3), 1500
    params = SamplingParams(temperature=0.9, top_k=6, presence_penalty=0.3)

    def logits(ids: Sequence[int]) -> np.ndarray:
        hidden, _ = model.forward(np.array(ids, dtype=np.int64), ragged_rows([model.new_cache()], [len(ids)]))
        return model.logits(hidden[-1:].contiguous())[0]

    first = slow_sampler.probabilities(logits(prompt), params, ids=prompt, prompt_len=3)
    exact = np.zeros((vocab, vocab))
    for token_id in np.flatnonzero(first):
        ids = (*prompt, int(token_id))
        exact[token_id] = first[token_id] * slow_sampler.probabilities(logits(ids), params, ids=ids, prompt_len=3)

    likely = int(first.argmax())
    counts = np.zeros((vocab, vocab))
    engine = new_engine(model, ring, max_requests=10_000)
    for begin in range(0, n, 30):
        clients = []
        for seed in range(begin, begin + 30):
            fields = {name: getattr(params, name) for name in params.__struct_fields__}
            clients.append(Client(f"s{seed}", prompt, SamplingParams(**{**fields, "seed": seed})))
        # Always drafting the likeliest id is what biases a careless acceptance rule most.
        results = answers(engine, *[client.item([likely, likely]) for client in clients])
        again = []
        for client in clients:
            client.commit(results[client.request_id])
            if len(client.output) < 2:
                again.append(client)
        results = answers(engine, *[client.item([likely]) for client in again]) if again else {}
        for client in again:
            client.commit(results[client.request_id])
        for client in clients:
            counts[client.output[0], client.output[1]] += 1
            engine.close(client.request_id)
    expected = exact * n
    assert counts[exact == 0].sum() == 0
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    keep = wanted > 0
    statistic = ((observed - wanted)[keep] ** 2 / wanted[keep]).sum()
    degrees = keep.sum() - 1
    assert degrees >= 5
    assert statistic < degrees * (1 - 2 / (9 * degrees) + 4 * math.sqrt(2 / (9 * degrees))) ** 3


# ---------------------------------------------------------------- batching


def test_a_batch_of_eight_is_one_forward(llama: TargetModel, ring: TensorRingWriter) -> None:
    engine = new_engine(llama, ring)
    clients = [Client(f"r{i}", prompt_of(i, 5 + i), GREEDY) for i in range(8)]
    results = answers(engine, *[client.item() for client in clients])
    for client in clients:
        client.commit(results[client.request_id])
    before = dict(engine.counters)
    engine.add([client.item([1, 2, 3][: i % 4]) for i, client in enumerate(clients)])
    reply = engine.step()
    assert reply is not None
    assert len(reply.results) == 8
    assert engine.counters["num_forwards"] == before["num_forwards"] + 1 == reply.num_forwards
    assert engine.counters["num_items"] == before["num_items"] + 8
    rows = 8 + sum(i % 4 for i in range(8))
    assert (reply.num_rows, reply.num_prefill_rows) == (rows, 0)
    assert engine.counters["num_rows"] == before["num_rows"] + rows
    assert not engine.has_work
    assert engine.step() is None


def test_a_long_prompt_takes_chunks_and_never_holds_up_a_stream(llama: TargetModel, ring: TensorRingWriter) -> None:
    engine = new_engine(llama, ring, prefill_chunk_tokens=32)
    stream = Client("stream", prompt_of(1, 5), GREEDY)
    stream.commit(answers(engine, stream.item())["stream"])
    long = Client("long", prompt_of(2, 150), GREEDY)
    engine.add([long.item()])
    passes = 0
    while engine.has_work:
        engine.add([stream.item()])
        reply = engine.step()
        passes += 1
        done = {result.request_id: result for result in reply.results}
        stream.commit(done["stream"])
        assert reply.num_rows <= 32 + 24 + 1
        if "long" in done:
            long.commit(done["long"])
            break
        assert reply.num_prefill_rows == 32
    assert passes == 5
    assert long.output == plain(llama, ring, tuple(long.ids[:150]), GREEDY, 1)
    assert stream.output == plain(llama, ring, tuple(stream.ids[:5]), GREEDY, len(stream.output))


def test_times_come_from_the_clock(llama: TargetModel, ring: TensorRingWriter) -> None:
    engine = new_engine(llama, ring)
    engine.add([Client("a", (1, 2), GREEDY).item()])
    assert engine.step().forward_s == 1.0  # the counting clock's next reading


# ---------------------------------------------------------------- bad items


LIMIT = 256
BAD_FIRST_ITEMS: dict[str, tuple[str, dict[str, Any]]] = {
    "id too large": ("invalid_token", {"token_ids": (1, VOCAB), "base_len": 2}),
    "id negative": ("invalid_token", {"token_ids": (1, -1), "base_len": 2}),
    "draft id too large": ("invalid_token", {"draft_ids": (VOCAB,)}),
    "bias outside": ("invalid_token", {"sampling": SamplingParams(logit_bias=((VOCAB, 1.0),))}),
    "eos outside": ("invalid_token", {"sampling": SamplingParams(eos_ids=(-1,), min_new_tokens=1)}),
    "one over the context": ("context_limit", {"token_ids": (1,) * (LIMIT + 1), "base_len": LIMIT + 1}),
    "drafts over the context": ("context_limit", {"token_ids": (1,) * LIMIT, "base_len": LIMIT, "draft_ids": (1,)}),
    "no sampling": ("unknown_request", {"sampling": None}),
    "no prompt length": ("unknown_request", {"prompt_len": None}),
    "starts in the middle": ("unknown_request", {"start": 2, "base_len": 4}),
    "lengths contradict": ("internal", {"base_len": 7}),
    "empty": ("internal", {"token_ids": (), "base_len": 0}),
}


@pytest.mark.parametrize(("code", "changes"), BAD_FIRST_ITEMS.values(), ids=BAD_FIRST_ITEMS.keys())
def test_a_bad_item_is_refused_and_its_neighbours_are_answered(
    llama: TargetModel, ring: TensorRingWriter, code: str, changes: dict[str, Any]
) -> None:
    engine = new_engine(llama, ring)
    left, right = Client("left", prompt_of(1, 9), GREEDY), Client("right", prompt_of(2, 9), GREEDY)
    bad = Client("bad", (1, 2), GREEDY)
    results = answers(engine, left.item(), bad.item(**changes), right.item())
    failed = results.pop("bad")
    assert isinstance(failed, VerifyFailed)
    assert failed.code == code
    assert failed.message
    assert (failed.round_id, failed.base_len) == (1, changes.get("base_len", 2))
    for client in (left, right):
        client.commit(results[client.request_id])
        assert client.output == plain(llama, ring, tuple(client.ids[:9]), GREEDY, 1)
    assert engine.counters["num_failed"] == 1
    # The refused id can be used by a good request afterwards, as if nothing had been.
    engine.close("bad")
    good = Client("bad", prompt_of(3, 9), GREEDY)
    good.commit(answers(engine, good.item())["bad"])
    assert good.output == plain(llama, ring, tuple(good.ids[:9]), GREEDY, 1)


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_the_context_is_used_to_the_last_position(llama: TargetModel, ring: TensorRingWriter, num_drafts: int) -> None:
    client = Client("a", prompt_of(1, LIMIT - num_drafts), GREEDY)
    result = answers(new_engine(llama, ring), client.item((1,) * num_drafts))["a"]
    assert isinstance(result, VerifyResult)
    assert len(result.target_ids) == num_drafts + 1


def test_too_many_requests_are_refused_until_one_is_closed(llama: TargetModel, ring: TensorRingWriter) -> None:
    engine = new_engine(llama, ring, max_requests=2)
    clients = [Client(name, (1, 2, 3), GREEDY) for name in "abc"]
    results = answers(engine, *[client.item() for client in clients])
    assert results["c"].code == "too_many_requests"
    assert isinstance(results["a"], VerifyResult)
    engine.close("a")
    late = Client("c", (1, 2, 3), GREEDY)
    assert isinstance(answers(engine, late.item())["c"], VerifyResult)


def test_a_gap_in_the_ids_is_refused_and_the_request_lives(llama: TargetModel, ring: TensorRingWriter) -> None:
    engine, client = new_engine(llama, ring), Client("a", prompt_of(1, 9), GREEDY)
    client.commit(answers(engine, client.item())["a"])
    gap = client.item(start=11, base_len=12, token_ids=(1,))
    assert answers(engine, gap)["a"].code == "unknown_request"
    client.told = 9
    client.commit(answers(engine, client.item())["a"])
    assert client.output == plain(llama, ring, tuple(client.ids[:9]), GREEDY, 2)


def test_a_second_item_while_one_waits_is_refused(llama: TargetModel, ring: TensorRingWriter) -> None:
    engine, client = new_engine(llama, ring), Client("a", prompt_of(1, 9), GREEDY)
    first = client.item()
    engine.add([first, client.item(round_id=7, token_ids=(5,), start=9, base_len=10)])
    reply = engine.step()
    codes = {result.round_id: getattr(result, "code", "ok") for result in reply.results}
    assert codes == {1: "ok", 7: "internal"}


def test_refusals_alone_are_answered_without_a_forward(llama: TargetModel, ring: TensorRingWriter) -> None:
    engine = new_engine(llama, ring)
    engine.add([Client("a", (VOCAB,), GREEDY).item()])
    assert engine.has_work
    reply = engine.step()
    assert [result.code for result in reply.results] == ["invalid_token"]
    assert (reply.num_forwards, reply.num_rows) == (0, 0)
    assert not engine.has_work


# ---------------------------------------------------------------- closing and failing


def test_closing_a_waiting_request_drops_its_item(llama: TargetModel, ring: TensorRingWriter) -> None:
    engine = new_engine(llama, ring, prefill_chunk_tokens=16)
    gone, stays = Client("gone", prompt_of(1, 100), GREEDY), Client("stays", prompt_of(2, 60), GREEDY)
    engine.add([gone.item(), stays.item()])
    engine.step()
    engine.close("gone")
    assert answers(engine).keys() == {"stays"}
    assert not engine.has_work


def test_a_short_prompt_overtakes_an_older_long_one_which_still_ends(
    llama: TargetModel, ring: TensorRingWriter
) -> None:
    engine = new_engine(llama, ring, prefill_chunk_tokens=16)
    old, middle, short = (
        Client(n, prompt_of(i, k), GREEDY) for i, (n, k) in enumerate((("o", 200), ("m", 90), ("s", 30)))
    )
    engine.add([old.item(), middle.item(), short.item()])
    ended: list[str] = []
    passes = 0
    while engine.has_work:
        reply = engine.step()
        passes += 1
        ended += [result.request_id for result in reply.results]
    assert ended == ["s", "m", "o"]
    assert passes <= 2 + -(-(200 + 90 + 30) // 16)  # nothing of the budget was wasted on the way


def test_closing_what_is_not_known_is_nothing(llama: TargetModel, ring: TensorRingWriter) -> None:
    engine = new_engine(llama, ring)
    engine.close("nobody")
    assert engine.step() is None


def test_a_closed_request_must_start_again(llama: TargetModel, ring: TensorRingWriter) -> None:
    engine, client = new_engine(llama, ring), Client("a", prompt_of(1, 9), GREEDY)
    client.commit(answers(engine, client.item())["a"])
    engine.close("a")
    assert answers(engine, client.item())["a"].code == "unknown_request"


def test_a_failed_pass_answers_everything_that_waits(llama: TargetModel, ring: TensorRingWriter) -> None:
    engine = new_engine(llama, ring)
    engine.add([Client(name, (1, 2, 3), GREEDY).item() for name in "ab"])
    reply = engine.fail_waiting("broken")
    assert {(r.request_id, r.code, r.message) for r in reply.results} == {(n, "internal", "broken") for n in "ab"}
    assert not engine.has_work
    again = Client("a", (1, 2, 3), GREEDY)
    again.commit(answers(engine, again.item())["a"])
    assert again.output == plain(llama, ring, (1, 2, 3), GREEDY, 1)


# ---------------------------------------------------------------- reuse


def test_the_next_turn_computes_only_what_is_new(llama: TargetModel, ring: TensorRingWriter) -> None:
    engine, first = new_engine(llama, ring), Client("a", prompt_of(1, 40), GREEDY)
    for _ in range(5):
        first.commit(answers(engine, first.item())["a"])
    engine.close("a")
    turn = (*first.ids[:44], *prompt_of(2, 6))
    before = engine.counters["num_rows"]
    second = Client("b", turn, GREEDY)
    result = answers(engine, second.item())["b"]
    assert result.cached_len == 44
    assert engine.counters["num_rows"] - before == 6
    assert engine.counters["num_cached_tokens"] == 44
    second.commit(result)
    assert second.output == plain(llama, ring, turn, GREEDY, 1)


def test_a_running_request_lends_a_copy_of_its_prefix(llama: TargetModel, ring: TensorRingWriter) -> None:
    engine, prompt = new_engine(llama, ring), prompt_of(1, 40)
    one, two = Client("a", prompt, GREEDY), Client("b", prompt, SAMPLINGS["sampled"])
    one.commit(answers(engine, one.item())["a"])
    result = answers(engine, two.item())["b"]
    assert result.cached_len == 39
    two.commit(result)
    for _ in range(6):
        results = answers(engine, one.item(prompt_of(9, 3)), two.item(prompt_of(8, 2)))
        one.commit(results["a"])
        two.commit(results["b"])
    assert one.output == plain(llama, ring, prompt, GREEDY, len(one.output))
    assert two.output == plain(llama, ring, prompt, SAMPLINGS["sampled"], len(two.output))


def test_features_of_reused_positions_are_there(
    llama: TargetModel, ring: TensorRingWriter, ring_reader: TensorRingReader
) -> None:
    engine, prompt = new_engine(llama, ring), prompt_of(1, 40)
    client = Client("a", prompt, GREEDY)
    client.commit(answers(engine, client.item())["a"])
    engine.close("a")
    result = answers(engine, Client("b", prompt, GREEDY, features_from=0).item())["b"]
    assert result.cached_len == 39
    assert (_features(ring_reader, result) == _forward(llama, prompt)[1]).all()


# ---------------------------------------------------------------- features and log-probabilities


def _forward(model: TargetModel, ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    hidden, features = model.forward(np.array(ids, dtype=np.int64), ragged_rows([model.new_cache()], [len(ids)]))
    return model.logits(hidden), features


def _features(reader: TensorRingReader, result: VerifyResult) -> np.ndarray:
    return np.concatenate([reader.read(span.ref) for span in result.spans])


@pytest.mark.parametrize("features_from", [0, 5, 29, 30, 33])
def test_features_equal_those_of_a_plain_forward(
    llama: TargetModel, ring: TensorRingWriter, ring_reader: TensorRingReader, features_from: int
) -> None:
    prompt, drafts = prompt_of(1, 30), (7, 8, 9)
    engine, client = new_engine(llama, ring, prefill_chunk_tokens=7), Client("a", prompt, GREEDY)
    result = answers(engine, client.item(drafts, features_from=features_from))["a"]
    expected = _forward(llama, (*prompt, *drafts))[1][features_from:]
    starts = [span.start for span in result.spans]
    assert starts == list(range(features_from, 33, 8))
    if features_from < 33:
        assert (_features(ring_reader, result) == expected).all()


def test_features_of_a_later_round_after_a_rejection(
    llama: TargetModel, ring: TensorRingWriter, ring_reader: TensorRingReader
) -> None:
    prompt = prompt_of(1, 20)
    engine, client = new_engine(llama, ring), Client("a", prompt, GREEDY)
    client.commit(answers(engine, client.item())["a"])
    client.commit(answers(engine, client.item((1, 2, 3)))["a"])
    result = answers(engine, client.item((4, 5), features_from=3))["a"]
    assert (_features(ring_reader, result) == _forward(llama, (*client.ids, 4, 5))[1][3:]).all()


def test_no_features_unless_asked_for(llama: TargetModel, ring: TensorRingWriter) -> None:
    assert answers(new_engine(llama, ring), Client("a", (1, 2), GREEDY).item())["a"].spans == ()


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(1, keepdims=True))


@pytest.mark.parametrize("num_logprobs", [0, 3])
def test_logprobs_of_every_target_id(llama: TargetModel, ring: TensorRingWriter, num_logprobs: int) -> None:
    prompt, drafts = prompt_of(1, 10), (7, 8, 9)
    client = Client("a", prompt, SAMPLINGS["sampled"])
    result = answers(new_engine(llama, ring), client.item(drafts, num_logprobs=num_logprobs))["a"]
    expected = _log_softmax(_forward(llama, (*prompt, *drafts))[0][9:])
    assert [entry.token_id for entry in result.logprobs] == list(result.target_ids)
    for entry, row in zip(result.logprobs, expected, strict=True):
        assert entry.logprob == pytest.approx(row[entry.token_id], abs=1e-9)
        ranked = np.argsort(-row, kind="stable")[:num_logprobs]
        assert [top.token_id for top in entry.top] == ranked.tolist()
        assert [top.logprob for top in entry.top] == pytest.approx(row[ranked], abs=1e-9)


@pytest.mark.parametrize("chunk", [1, 5, 24, 32, 100])
@pytest.mark.parametrize("length", [1, 2, 25, 60])
def test_prompt_scoring_equals_log_softmax_whatever_the_chunks(
    llama: TargetModel, ring: TensorRingWriter, chunk: int, length: int
) -> None:
    prompt = prompt_of(1, length)
    engine = new_engine(llama, ring, prefill_chunk_tokens=chunk)
    # A finished request with the same prompt must not shorten the scores.
    other = Client("other", prompt_of(1, 60), GREEDY)
    other.commit(answers(engine, other.item())["other"])
    client = Client("a", prompt, GREEDY, score_prompt=True, num_logprobs=2)
    result = answers(engine, client.item())["a"]
    expected = _log_softmax(_forward(llama, prompt)[0])
    assert result.cached_len == 0
    assert [entry.token_id for entry in result.prompt_logprobs] == list(prompt[1:])
    for position, entry in enumerate(result.prompt_logprobs):
        assert entry.logprob == pytest.approx(expected[position, prompt[position + 1]], abs=1e-9)
        assert len(entry.top) == 2
    assert len(result.logprobs) == 1
    client.commit(result)
    assert client.output == plain(llama, ring, prompt, GREEDY, 1)
