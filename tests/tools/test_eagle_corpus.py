"""Shards keep conversations whole, loops are cut at the third repeat, batches are masked to what the target wrote."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tools.eagle.corpus import Conversation, bucketed_batches, cut_loop, load_corpus, save_corpus
from tools.eagle.token_table import load_table
from tools.eagle.train import choose_draft_ids


def conversation(ids: list[int], spans: list[tuple[int, int]], **extra: object) -> Conversation:
    return Conversation(prompt_id="p", source="s", split="train", ids=ids, spans=spans, **extra)


def test_a_loop_is_cut_at_the_end_of_the_third_repeat_of_a_12_gram() -> None:
    head, period = list(range(100, 110)), list(range(12))
    assert cut_loop(head + period * 2 + [50]) == 10 + 24 + 1
    assert cut_loop(head + period * 5) == 10 + 36
    assert cut_loop([7] * 50) == 14  # windows may overlap: ids 0-11, 1-12 and 2-13 are three occurrences


def test_cutting_drops_later_answers_and_keeps_earlier_ones() -> None:
    looping = conversation([1, 2, 3, 4] + [9] * 40 + [5, 6, 7], [(2, 4), (4, 44), (45, 47)])
    cut = looping.without_loops()
    assert cut.spans == [(2, 4), (4, 18)]
    assert cut.ids == looping.ids[:18]
    fine = conversation([1, 2, 3], [(1, 3)])
    assert fine.without_loops() is fine


def test_shards_round_trip(tmp_path: Path) -> None:
    rows = [
        conversation([1, 2, 49_151], [(1, 3)], temperature=0.8, seed=2**31 - 1),
        conversation([5, 6, 7, 8, 9], [(1, 2), (3, 5)]),
    ]
    save_corpus(rows, tmp_path / "tokens-000.npz")
    assert load_corpus([tmp_path / "tokens-000.npz"]) == rows
    assert load_corpus([tmp_path / "tokens-000.npz"], max_tokens=1) == rows[:1]


def test_every_row_is_in_exactly_one_batch_and_no_batch_is_too_large() -> None:
    lengths = np.random.default_rng(0).integers(5, 90, 300).tolist()
    batches = list(bucketed_batches(lengths, 512, seed=1))
    assert sorted(np.concatenate(batches).tolist()) == list(range(300))
    assert all(max(lengths[i] for i in batch) * len(batch) <= 512 for batch in batches)
    assert [b.tolist() for b in bucketed_batches(lengths, 512, seed=1)] == [b.tolist() for b in batches]


def test_batches_learn_answer_tokens_only_and_know_their_offsets(tmp_path: Path) -> None:
    save_corpus(
        [conversation([10, 11, 12, 13, 14], [(2, 5)]), conversation([20, 21, 22], [(2, 3)])],
        tmp_path / "tokens-000.npz",
    )
    table = load_table([tmp_path / "tokens-000.npz"])
    batch = table.batch(np.array([0, 1]), torch.device("cpu"))
    assert batch.ids.tolist() == [[10, 11, 12, 13, 14], [20, 21, 22, 0, 0]]
    # Offset 0 is the prefill's own token: no draft step predicts it, so row 1 teaches nothing.
    assert batch.rows.tolist() == [0, 0]
    assert batch.ends.tolist() == [3, 4]
    assert batch.offsets.tolist() == [1, 2]
    assert table.answer_counts(30)[[12, 13, 14, 22]].tolist() == [1, 1, 1, 1]
    assert table.answer_counts(30).sum() == 4


@pytest.mark.parametrize(("limit", "rows"), [(1, 1), (3, 1), (4, 2), (99, 2)])
def test_data_can_be_limited_to_whole_conversations(tmp_path: Path, limit: int, rows: int) -> None:
    save_corpus([conversation([1, 2, 3, 4], [(1, 4)]), conversation([5, 6], [(1, 2)])], tmp_path / "tokens-000.npz")
    table = load_table([tmp_path / "tokens-000.npz"], max_answer_tokens=limit)
    assert len(table.lengths) == rows


def test_the_draft_vocabulary_is_the_most_written_tokens_in_ascending_order() -> None:
    assert choose_draft_ids(np.array([5, 0, 9, 5, 1]), 3).tolist() == [0, 2, 3]
