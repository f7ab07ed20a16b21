"""The plugin's hooks around passes of the toy model: what they draw is the definition's, and the target's."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from tests.verifier.sglang import toy_model
from tests.verifier.sglang.toy_passes import ToyPasses, ToyRequest, ordered
from verifier.embedded.sampling import TokenSampler
from verifier.sglang.plugin.batched_draws import BatchedDraws
from verifier.sglang.plugin.draws import TargetDraws
from verifier.sglang.plugin.orders import DrawOrder, PluginReport, custom_params
from verifier.sglang.plugin.row_draws import DrawnByDefinition, RowDraws
from wire.sampling import SamplingParams

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, seed=3),
    SamplingParams(temperature=1.2, top_p=0.9, top_k=20, min_p=0.01, seed=4),
    SamplingParams(temperature=0.9, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, seed=5),
    SamplingParams(temperature=1.0, logit_bias=((7, 2.5),), min_new_tokens=4, eos_ids=(0, 1, 2), seed=6),
]
SAMPLERS = [DrawnByDefinition, BatchedDraws]


def passes(draws: RowDraws | None = None, **knobs: Any) -> ToyPasses:
    return ToyPasses(TargetDraws(PluginReport, draws=draws), **knobs)


def expected_ids(ids: list[int], drafts: list[int], params: SamplingParams) -> list[int]:
    rows = np.stack([toy_model.logits(ids + drafts[:i]) for i in range(len(drafts) + 1)])
    sampler = TokenSampler(params, vocab_size=toy_model.VOCAB_SIZE, prompt_len=len(PROMPT))
    return sampler.choose(rows, ids, tuple(drafts))


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("chunk", [1 << 20, 2])
@pytest.mark.parametrize("delays", [False, True])
def test_verify_of_several_requests_beside_a_stranger(sampler: Any, chunk: int, delays: bool) -> None:
    drafts = [5, 5, 7]
    parts, rids = [], []
    for number, params in enumerate(PARAMS):
        ids = [*PROMPT, number, 9]
        order = DrawOrder(sampling=params, base_len=len(ids), prompt_len=len(PROMPT), wants_logprobs=True)
        size = len(ids) + len(drafts)
        # Some compute positions before the newest committed one again, for their features.
        start = len(ids) - 1 - 2 * (number % 2)
        parts.append((ordered(f"r{number}", ids + drafts, order), start, size, start))
        rids.append(f"r{number}")
    stranger = ToyRequest("stranger", [1, 2, 3])
    parts.insert(2, (stranger, 0, 3, 0))
    made = passes(sampler(), logprob_chunk=chunk, delays=delays).extend(*parts)
    assert made.entries["stranger"] is None
    assert made.ids[2] == toy_model.greedy([1, 2, 3], 1)[0]
    rows = {rid: row for row, (request, *_) in enumerate(parts) for rid in [request.rid]}
    for number, params in enumerate(PARAMS):
        ids = [*PROMPT, number, 9]
        entry = made.entries[f"r{number}"]
        found = [*entry["ids"], made.ids[rows[f"r{number}"]]]
        assert found == expected_ids(ids, drafts, params)
        assert entry["first"] == len(ids)
        own = [*entry["logprobs"], made.logprobs[rows[f"r{number}"]]]
        raw = [toy_model.logprobs(ids + drafts[:i])[token_id] for i, token_id in enumerate(found)]
        assert own == pytest.approx(raw, abs=1e-5)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("newest_is_known", [True, False])
def test_plain_decode_draws_the_same_text(sampler: Any, newest_is_known: bool) -> None:
    for params in PARAMS:
        order = DrawOrder(sampling=params, base_len=len(PROMPT), prompt_len=len(PROMPT))
        request = ordered("a", PROMPT, order)
        run = passes(sampler())
        made = run.extend((request, 0, len(PROMPT), len(PROMPT) - 1))
        text = list(PROMPT)
        for _ in range(12):
            assert made.ids == expected_ids(text, [], params)
            assert made.entries["a"] == 1
            text += made.ids
            request.output_ids.append(made.ids[0])
            made = run.decode(request, newest_is_known=newest_is_known)


def test_middle_chunks_of_a_prompt_draw_nothing() -> None:
    order = DrawOrder(sampling=PARAMS[3], base_len=len(PROMPT), prompt_len=len(PROMPT))
    request = ordered("a", PROMPT, order)
    run = passes()
    assert run.extend((request, 0, 4, 3)).entries["a"] is None
    made = run.extend((request, 4, len(PROMPT), len(PROMPT) - 1))
    assert made.ids == expected_ids(PROMPT, [], PARAMS[3])


@pytest.mark.parametrize(
    "params",
    [None, {}, {"other": 1}, {"breakeven": "no JSON"}, {"breakeven": 3}],
    ids=["none", "empty", "other", "garbage", "number"],
)
def test_requests_without_a_readable_order_are_left_alone(params: Any) -> None:
    made = passes().extend((ToyRequest("x", PROMPT, params), 0, len(PROMPT), len(PROMPT) - 1))
    assert made.ids == toy_model.greedy(PROMPT, 1)
    assert made.entries["x"] is None


def test_an_order_of_another_version_is_not_followed() -> None:
    order = DrawOrder(sampling=PARAMS[1], base_len=8, prompt_len=8, version=2)
    made = passes().extend((ordered("x", PROMPT, order), 0, len(PROMPT), 7))
    assert made.entries["x"] is None


def test_a_failing_draw_fails_no_pass_and_is_never_taken_for_a_draw(caplog: pytest.LogCaptureFixture) -> None:
    class Failing:
        def draw(self, rows: Any, groups: Any) -> Any:
            raise RuntimeError("no")

    run = passes(Failing())
    request = ordered("a", PROMPT, DrawOrder(sampling=PARAMS[1], base_len=len(PROMPT), prompt_len=len(PROMPT)))
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            made = run.extend((request, 0, len(PROMPT), len(PROMPT) - 1))
            assert made.ids == toy_model.greedy(PROMPT, 1)
            assert made.entries["a"] is None
    assert len(caplog.records) == 1


def test_the_report_comes_with_a_draw() -> None:
    report = PluginReport(on=("tap", "target_ids"), off={"all_reduce": "gone"})
    order = DrawOrder(sampling=SamplingParams(), base_len=1, prompt_len=1, wants_report=True)
    run = ToyPasses(TargetDraws(lambda: report))
    made = run.extend((ToyRequest("a", [0], custom_params(order)), 0, 1, 0))
    assert made.entries["a"]["report"] == {"on": ("tap", "target_ids"), "off": {"all_reduce": "gone"}}


@pytest.mark.slow
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_drawn_ids_are_distributed_as_the_target(sampler: Any) -> None:
    """Chi-square over seeds, at a draft position and at the output token."""
    params = SamplingParams(temperature=0.8, top_p=0.95)
    drafts, num_draws, batch = [5], 4000, 200
    counts = np.zeros((2, toy_model.VOCAB_SIZE))
    run = passes(sampler())
    for begin in range(0, num_draws, batch):
        parts = []
        for seed in range(begin, begin + batch):
            order = DrawOrder(sampling=SamplingParams(temperature=0.8, top_p=0.95, seed=seed), base_len=8, prompt_len=8)
            parts.append((ordered(f"r{seed}", PROMPT + drafts, order), 7, 9, 7))
        made = run.extend(*parts)
        for row, seed in enumerate(range(begin, begin + batch)):
            counts[0, made.entries[f"r{seed}"]["ids"][0]] += 1
            counts[1, made.ids[row]] += 1
    for observed, ids in zip(counts, (PROMPT, PROMPT + drafts), strict=True):
        probs = np.exp(toy_model.logprobs(ids) / params.temperature)
        probs /= probs.sum()
        order = np.argsort(-probs, kind="stable")
        nucleus = order[np.cumsum(probs[order]) - probs[order] < params.top_p]
        expected = np.zeros_like(probs)
        expected[nucleus] = probs[nucleus] / probs[nucleus].sum() * num_draws
        assert observed[expected == 0].sum() == 0
        frequent = expected >= 5
        rare_observed, rare_expected = observed[~frequent].sum(), expected[~frequent].sum()
        chi2 = ((observed[frequent] - expected[frequent]) ** 2 / expected[frequent]).sum()
        if rare_expected > 0:
            chi2 += (rare_observed - rare_expected) ** 2 / rare_expected
        freedom = int(frequent.sum()) - (0 if rare_expected > 0 else 1)
        # Wilson-Hilferty at four sigma: exceeded once in about 30,000.
        assert chi2 < freedom * (1 - 2 / (9 * freedom) + 4 * np.sqrt(2 / (9 * freedom))) ** 3
