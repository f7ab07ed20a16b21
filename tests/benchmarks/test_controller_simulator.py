"""Regret on short traces: a change of the controller that costs speed fails here."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.controller.informed import Informed, Regimes, regimes_of
from benchmarks.controller.policies import Always, Oracle, Ours, policies
from benchmarks.controller.report import markdown, row_json, run_workload
from benchmarks.controller.simulator import simulate
from benchmarks.controller.workloads import (
    BASE,
    Phase,
    Workload,
    acceptance_for_length,
    all_workloads,
    expected_tokens,
    seed_workloads,
    smoke_workloads,
    tie_acceptance,
    variant_workloads,
)
from gateway.speculation.controller import ControllerLimits

LIMITS = ControllerLimits()


def phase(tokens: int, acceptance: float) -> Phase:
    return Phase(tokens=tokens, acceptance=(acceptance,), costs=BASE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phases", "most"),
    [
        ((phase(5000, 0.75),), 0.06),
        ((phase(5000, 0.35),), 0.02),
        ((phase(5000, 0.57),), 0.04),
        ((phase(2000, 0.25), phase(4000, 0.8)), 0.06),
    ],
)
def test_regret_on_short_traces(phases: tuple[Phase, ...], most: float):
    workload = Workload(name="short", phases=phases)
    seeds = range(2)
    ours = sum(simulate(workload, Ours(LIMITS), seed=seed).ms_per_token for seed in seeds)
    oracle = sum(simulate(workload, Oracle(LIMITS.candidates), seed=seed).ms_per_token for seed in seeds)
    assert ours / oracle - 1 < most


@pytest.mark.slow
def test_at_the_tie_it_seldom_changes_its_mind():
    workload = Workload(name="tie", phases=(phase(6000, tie_acceptance(BASE, LIMITS.candidates)),))
    result = simulate(workload, Ours(LIMITS), seed=1)
    assert 200 * result.num_switches / result.num_rounds < 1.0


@pytest.mark.slow
def test_the_founding_case_is_as_good_as_plain_and_comes_back_on_its_own():
    seed = next(w for w in seed_workloads() if w.name == "seed, verify 30 ms, length 2.0")
    assert 1e3 / simulate(seed, Ours(LIMITS), seed=0).ms_per_token > 80.0
    shift = seed_workloads()[-1]
    assert simulate(shift, Ours(LIMITS), seed=0).shift_tokens[1] < 300


def test_plain_takes_the_plain_time_and_the_oracle_takes_no_more():
    workload = Workload(name="short", phases=(phase(300, 0.8),))
    plain = simulate(workload, Always(0), seed=0).ms_per_token
    assert plain == pytest.approx(BASE.plain_ms)
    assert simulate(workload, Oracle(LIMITS.candidates), seed=0).ms_per_token < plain


def test_the_same_seed_gives_the_same_run():
    workload = Workload(name="short", phases=(phase(300, 0.8),), answer_len=100)
    assert simulate(workload, Ours(LIMITS), seed=3) == simulate(workload, Ours(LIMITS), seed=3)


def test_every_policy_runs_and_the_table_names_it():
    workload = Workload(
        name="two streams", phases=(Phase(tokens=200, acceptance=(0.9, 0.2), costs=BASE, batch_size=2),)
    )
    row = run_workload(workload, LIMITS, seeds=[0])
    assert set(row.ms_per_token) == set(policies(LIMITS, 4))
    assert all(name in markdown([row]) for name in row.ms_per_token)
    json.dumps(row_json(row))


def test_the_workloads_hit_their_acceptance():
    assert expected_tokens(acceptance_for_length(2.46, 3), 3) == pytest.approx(2.46)
    tie = tie_acceptance(BASE, LIMITS.candidates)
    best = max(expected_tokens(tie, k) / BASE.step_ms(k, 1) for k in LIMITS.candidates)
    assert best == pytest.approx(1 / BASE.plain_ms)
    listed = (*all_workloads(LIMITS.candidates), *seed_workloads(), *smoke_workloads(LIMITS.candidates))
    assert len({w.name for w in listed}) == 14 + 16
    assert len({w.name for w in (*listed, *variant_workloads())}) == 14 + 16 + 7


def test_the_bound_applies_where_one_stream_changes_between_two_levels():
    two = Workload(name="two", phases=(phase(500, 0.8), phase(100, 0.2), phase(700, 0.8)))
    assert regimes_of(two) == Regimes(good=0.8, bad=0.2, good_tokens=600.0, bad_tokens=100.0)
    turns = Workload(name="turns", phases=(Phase(tokens=900, acceptance=(0.8, 0.3), costs=BASE),), answer_len=400)
    assert regimes_of(turns) == Regimes(good=0.8, bad=0.3, good_tokens=400.0, bad_tokens=400.0)
    assert regimes_of(Workload(name="steady", phases=(phase(500, 0.8),))) is None
    assert regimes_of(Workload(name="three", phases=(phase(9, 0.8), phase(9, 0.5), phase(9, 0.2)))) is None
    batch = Phase(tokens=9, acceptance=(0.8, 0.2), costs=BASE, batch_size=2)
    assert regimes_of(Workload(name="batch", phases=(batch,))) is None


@pytest.mark.slow
def test_who_knows_only_the_levels_is_behind_the_oracle_and_ahead_of_every_fixed_k():
    workload = Workload(name="short", phases=(phase(400, 0.8), phase(400, 0.25)) * 3)
    regimes = regimes_of(workload)
    assert regimes is not None
    bound = Informed(regimes, BASE, LIMITS.candidates, is_per_answer=False, sweeps=400)
    informed = simulate(workload, bound, seed=2).ms_per_token
    assert informed == simulate(workload, bound.fresh(), seed=2).ms_per_token
    assert simulate(workload, Oracle(LIMITS.candidates), seed=2).ms_per_token < informed
    assert informed < min(simulate(workload, Always(k), seed=2).ms_per_token for k in (0, *LIMITS.candidates))
    assert (bound.state, bound.num_switches > 4) == ("OFF", True)


@pytest.mark.slow
def test_the_smoke_run_prints_a_table_and_one_json_line():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.controller", "--smoke"], capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert lines[0].startswith("| workload |")
    assert json.loads(lines[-1])["workloads"] == 4
