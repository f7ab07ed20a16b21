from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.speculation.costs import BUCKETS, CostCell, CostTable, batch_bucket, context_class


def table(costs: dict[int, float], *, slope_share: float = 0.0, samples: int = 10) -> CostTable:
    made = CostTable(slope_share=slope_share)
    for k, seconds in costs.items():
        for _ in range(samples + 1):
            made.cell(k).observe(seconds)
        made.samples_changed(k)
    return made


@given(st.integers(1, 10_000))
def test_a_bucket_holds_its_batch(size: int):
    assert batch_bucket(size) in BUCKETS
    assert batch_bucket(size) >= min(size, 256)


def test_context_classes():
    assert [context_class(n) for n in (1, 512, 513, 1024, 1025, 4096)] == [0, 0, 1, 1, 2, 3]


def test_the_first_sample_of_a_shape_is_dropped():
    cell = CostCell()
    assert not cell.is_warm
    cell.observe(99.0)
    assert (cell.seconds, cell.count, cell.is_warm) == (None, 0, True)


def test_three_samples_seed_by_their_median():
    cell = CostCell()
    for seconds in (99.0, 5.0, 1.0, 2.0):
        cell.observe(seconds)
    assert (cell.seconds, cell.is_seeded) == (2.0, True)
    assert cell.weight == 3


def test_the_mean_is_not_biased_by_scatter():
    draw = random.Random(2)
    cell = CostCell()
    values = []
    for _ in range(3000):
        cell.observe(draw.lognormvariate(0, 0.25))
        values.append(cell.seconds or 0.0)
    assert sum(values[100:]) / len(values[100:]) == pytest.approx(1.03, rel=0.03)


def test_a_stall_is_counted_apart_and_a_slow_round_is_clamped():
    cell = table({0: 1.0}).cell(0)
    assert cell.clamp(11.0) is None
    assert cell.clamp(9.0) == 2.0
    assert cell.clamp(0.5) == 0.5
    assert CostCell().clamp(7.0) == 7.0
    cell.observe(11.0)
    assert (cell.num_stalls, cell.seconds) == (1, 1.0)
    for _ in range(60):
        cell.observe(1.0)
    cell.observe(9.0)
    assert cell.seconds == pytest.approx(1.02, abs=0.005)


def test_a_lasting_change_alarms_and_an_aged_cell_follows_fast():
    cell = table({0: 1.0}, samples=100).cell(0)
    alarms = [cell.observe(1.5) for _ in range(10)]
    assert any(alarms)
    cell.age()
    for _ in range(12):
        cell.observe(1.5)
    assert cell.seconds == pytest.approx(1.5, rel=0.06)


def test_nothing_known():
    empty = CostTable()
    assert empty.seconds(3) is None
    assert empty.low_seconds(3) is None
    assert empty.slope_s() is None
    assert not empty.is_measured(3)
    assert empty.known() == {}


def test_plain_alone_says_nothing_of_drafting():
    assert table({0: 1.0}).low_seconds(3) is None


def test_an_unmeasured_k_between_two_lies_on_their_line():
    made = table({0: 1.0, 4: 3.0})
    assert made.low_seconds(1) == made.low_seconds(1) == pytest.approx(1.5)


def test_the_least_that_a_measured_k_may_cost_is_a_standard_error_below_its_mean():
    made = table({3: 2.0})
    believed = made.believed(3)
    assert believed is not None
    assert believed[0] == 2.0
    assert made.low_seconds(3) == believed[0] - believed[1] < 2.0


def test_a_measured_k_leans_on_the_line_through_all_of_them_until_its_own_samples_outweigh_it():
    def believed(samples: int) -> float:
        made = table({2: 2.0, 4: 3.0}, samples=100)
        for _ in range(samples + 1):
            made.cell(6).observe(7.0)
            made.samples_changed(6)
        known = made.believed(6)
        assert known is not None
        return known[0]

    assert 4.0 < believed(3) < 6.5 < believed(60) < 7.0
    assert table({0: 1.0}).believed(2) is None


def test_a_k_with_unlucky_first_samples_looks_better_the_longer_others_run():
    made = table({3: 2.0, 8: 4.0}, samples=3)
    first = made.optimistic_seconds(8)
    for _ in range(500):
        made.cell(3).observe(2.0)
        made.samples_changed(3)
    later, low = made.optimistic_seconds(8), made.low_seconds(8)
    assert first is not None
    assert later is not None
    assert low is not None
    assert later < low
    assert later < first
    assert CostTable().optimistic_seconds(8) is None


def test_below_all_measured_drafts_the_cost_lies_on_their_line():
    made = table({0: 1.0, 3: 4.0, 8: 4.0})
    assert made.low_seconds(1) == pytest.approx(4.0)


def test_an_unmeasured_k_above_all_may_be_flat_or_half_as_steep():
    assert table({0: 1.0, 4: 3.0}).low_seconds(6) == pytest.approx(3.0)
    assert table({0: 1.0, 4: 3.0}, slope_share=0.5).low_seconds(6) == pytest.approx(3.5)


def test_below_everything_measured_nothing_is_inferred():
    assert table({3: 2.0}).low_seconds(1) is None


def test_a_cell_with_too_few_samples_does_not_write_its_k_off():
    made = table({0: 1.0, 4: 3.0})
    made.cell(6).observe(50.0)
    made.cell(6).observe(50.0)
    made.samples_changed(6)
    assert made.low_seconds(6) == pytest.approx(3.0)


def test_inferences_are_redone_now_and_then():
    made = table({0: 1.0, 4: 3.0}, samples=100)
    assert made.low_seconds(2) == pytest.approx(2.0)
    for _ in range(16):
        made.cell(4).observe(4.0)
        made.samples_changed(4)
    assert made.low_seconds(2) > 2.1


def test_the_slope_is_over_speculating_rounds_only_and_never_negative():
    assert table({0: 1.0, 2: 3.0, 4: 4.0, 6: 5.0}).slope_s() == pytest.approx(0.5)
    assert table({2: 3.0, 4: 2.0}).slope_s() == 0.0
    assert table({0: 1.0, 2: 3.0}).slope_s() is None
    assert table({2: 3.0, 4: 4.0}, samples=4).slope_s() is None


def test_a_neighbour_gives_first_guesses_that_a_few_samples_overrule():
    made = CostTable()
    made.cell(3).observe(7.0)
    unknown = table({0: 1.0, 3: 2.0})
    unknown.cell(8).observe(9.0)
    made.inherit(unknown)
    assert (made.seconds(0), made.seconds(3), made.seconds(8)) == (1.0, None, None)
    assert made.is_measured(0)
    for _ in range(10):
        made.cell(0).observe(1.5)
    assert made.seconds(0) == pytest.approx(1.4, abs=0.06)


def test_ageing_a_table_ages_every_cell():
    made = table({0: 1.0, 3: 2.0}, samples=100)
    made.age()
    made.cell(3).observe(4.0)
    assert made.seconds(3) == pytest.approx(2.5)


def test_a_round_of_tokens_read_ahead_as_the_first_sample_makes_no_stalls_of_the_others():
    cell = CostCell()
    for seconds in (0.0122, 0.0003, 0.0122, 0.0122):
        cell.observe(seconds)
    assert cell.seconds == 0.0122
    assert cell.num_stalls == 0


def test_many_stalls_in_a_row_are_the_new_cost():
    cell = CostCell()
    for _ in range(20):
        cell.observe(0.0003)
    said = [cell.observe(0.0122) for _ in range(4)]
    assert said == [False, False, False, True]
    assert not cell.is_seeded
    for _ in range(3):
        cell.observe(0.0124)
    assert cell.is_seeded
    assert cell.seconds == pytest.approx(0.0123, rel=0.02)


def test_stalls_apart_from_each_other_stay_stalls():
    cell = CostCell()
    for _ in range(10):
        for seconds in (1.0, 1.0, 1.0, 30.0, 30.0, 30.0):
            cell.observe(seconds)
    assert cell.seconds == 1.0
    assert cell.num_stalls == 29  # the first fell into the seed
