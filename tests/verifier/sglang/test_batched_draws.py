"""The batched draws against the definition: same ids, whatever the parameters and whoever shares the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.verifier.embedded.sampling_strategies import any_params
from verifier.sglang.plugin.batched_draws import BatchedDraws, gumbel_rows
from verifier.sglang.plugin.row_draws import DrawnByDefinition, RowDraws, RowGroup, RowState
from wire.noise import gumbel_noise, noise_keys
from wire.sampling import SamplingParams

VOCAB = 12
ids = st.lists(st.integers(0, VOCAB - 1), max_size=8)


def test_noise_is_the_same() -> None:
    pairs = [(0, 0), (42, 17), (2**63 - 1, 8191), (7, 131071)]
    seeds, positions = np.array(pairs, dtype=np.uint64).T.copy()
    keys = torch.from_numpy(noise_keys(seeds, positions).view(np.int64))
    found = gumbel_rows(keys, 5000).numpy()
    for row, (seed, position) in zip(found, pairs, strict=True):
        # The last bit of a logarithm may differ.
        np.testing.assert_allclose(row, gumbel_noise(seed, position, np.arange(5000)), rtol=1e-12, atol=1e-14)


asked = st.tuples(any_params(VOCAB), ids.filter(bool), ids, ids)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(requests=st.lists(asked, min_size=1, max_size=4), seed=st.integers(0, 10**6))
def test_rows_of_drafts_then_output_tokens(
    requests: list[tuple[SamplingParams, list[int], list[int], list[int]]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    numbers = [(rng.integers(-40, 40, (len(drafts), VOCAB)) / 8).astype(np.float32) for *_, drafts in requests]
    last = [(rng.integers(-40, 40, (2, VOCAB)) / 8).astype(np.float32) for _ in requests]

    def draw(draws: RowDraws, *, newest_on_device: bool) -> list[list[int]]:
        states = [RowState(params=params, prompt_len=len(prompt)) for params, prompt, _, _ in requests]
        groups = []
        for state, (_, prompt, output, drafts) in zip(states, requests, strict=True):
            known = prompt + output
            if drafts:
                groups.append(
                    RowGroup(
                        state=state,
                        position=len(known),
                        count=len(drafts),
                        known_ids=known,
                        drafts=tuple(drafts[:-1]),
                    )
                )
        found = [draws.draw(torch.from_numpy(np.concatenate(numbers)), groups).tolist()] if groups else []
        for step in range(2):  # the last input's row, then a decode step
            groups = []
            for state, (_, prompt, output, drafts) in zip(states, requests, strict=True):
                known = prompt + output + drafts + [3] * step
                newest = torch.tensor(known[-1]) if step else None
                told = known[:-1] if step and newest_on_device else known
                groups.append(RowGroup(state=state, position=len(known), known_ids=told, newest=newest))
            found.append(draws.draw(torch.from_numpy(np.stack([rows[step] for rows in last])), groups).tolist())
        return found

    expected = draw(DrawnByDefinition(), newest_on_device=False)
    assert draw(BatchedDraws(), newest_on_device=False) == expected
    assert draw(BatchedDraws(), newest_on_device=True) == expected
    assert draw(DrawnByDefinition(), newest_on_device=True) == expected


def test_a_large_vocabulary_with_rows_of_all_kinds() -> None:
    rows = np.random.default_rng(3).normal(0.0, 3.0, (64, 3000)).astype(np.float32)
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.8, seed=5),
        SamplingParams(temperature=1.3, top_p=0.9, seed=6),
        SamplingParams(temperature=0.7, top_k=40, top_p=0.8, min_p=0.02, seed=7),
    ]
    groups = [RowGroup(state=RowState(params=kinds[i % 4], prompt_len=1), position=100 + i) for i in range(64)]
    by_definition = DrawnByDefinition().draw(torch.from_numpy(rows), groups)
    assert BatchedDraws().draw(torch.from_numpy(rows), groups).tolist() == by_definition.tolist()


def test_of_equal_logits_the_lowest_id_wins() -> None:
    rows = torch.zeros(2, VOCAB)
    rows[:, 4] = rows[:, 9] = 1.0
    groups = [
        RowGroup(state=RowState(params=SamplingParams(temperature=0.0), prompt_len=1), position=p) for p in (5, 6)
    ]
    assert BatchedDraws().draw(rows, groups).tolist() == DrawnByDefinition().draw(rows, groups).tolist() == [4, 4]


def test_a_request_taken_back_is_counted_anew() -> None:
    params = SamplingParams(temperature=0.0, frequency_penalty=2.0)
    state, rows = RowState(params=params, prompt_len=1), torch.tensor([[0.0, 3.0, 2.0]])
    first = RowGroup(state=state, position=3, known_ids=[0, 1, 1])
    again = RowGroup(state=state, position=2, known_ids=[0, 2])
    draws = BatchedDraws()
    assert draws.draw(rows, [first]).tolist() == [2]
    assert draws.draw(rows, [again]).tolist() == [1]
