"""Command line of the controller's simulator."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from benchmarks.controller.policies import Ours
from benchmarks.controller.report import Row, markdown, plot, row_json, run_workload, seed_check, write_json
from benchmarks.controller.simulator import simulate
from benchmarks.controller.workloads import Workload, all_workloads, seed_workloads, smoke_workloads, variant_workloads
from benchmarks.provenance import provenance
from gateway.speculation.controller import ControllerLimits

_RESULTS = Path(__file__).parent.parent / "results" / "controller"


def main() -> None:
    """Run the workloads, print the table and one JSON line, write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.controller", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    parser.add_argument("--first-seed", type=int, default=1000, help="tuning used seeds below 1000 only")
    parser.add_argument("--no-rivals", action="store_true", help="only the oracle, plain, always and ours; no plots")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--smoke", action="store_true", help="short workloads, one seed, no plots: below 10 s")
    parser.add_argument(
        "--out", type=Path, default=None, help="folder for the results; without it a smoke run writes none"
    )
    options = parser.parse_args()
    limits = ControllerLimits()
    seeds = range(options.first_seed, options.first_seed + (1 if options.smoke else options.seeds))
    workloads = smoke_workloads(limits.candidates) if options.smoke else all_workloads(limits.candidates)
    rows = _run(workloads, limits, seeds, options.processes, has_rivals=not options.no_rivals)
    print(markdown(rows))
    variant_rows = (
        []
        if options.smoke
        else _run(variant_workloads(), limits, seeds, options.processes, has_rivals=not options.no_rivals)
    )
    seed_rows = (
        []
        if options.smoke
        else _run(seed_workloads(), limits, seeds, options.processes, has_rivals=not options.no_rivals)
    )
    if seed_rows:
        print("\n" + markdown(variant_rows) + "\n\n" + markdown(seed_rows) + "\n\n" + _seed_table(seed_rows))
    facts = {
        "provenance": provenance(["python", "-m", "benchmarks.controller", *sys.argv[1:]], seed=seeds[0]),
        "seeds": list(seeds),
        "limits": dataclasses.asdict(limits),
        "us_per_call": _call_cost_us(limits),
        "workloads": [row_json(row) for row in (*rows, *variant_rows, *seed_rows)],
    }
    folder = options.out or (None if options.smoke else _RESULTS)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "simulator.json", facts)
        (folder / "simulator.md").write_text(
            markdown([*rows, *variant_rows, *seed_rows]) + "\n\n" + _seed_table(seed_rows) + "\n"
        )
    if folder is not None and not options.smoke and not options.no_rivals:
        for workload in (*workloads, *variant_workloads(), seed_workloads()[-1]):
            name = re.sub(r"[^a-z0-9]+", "-", workload.name.lower()).strip("-")
            plot(workload, limits, folder / f"{name}.png", seed=seeds[0])
    print(
        json.dumps({"workloads": len(rows) + len(variant_rows) + len(seed_rows), "us_per_call": facts["us_per_call"]})
    )


def _run(
    workloads: list[Workload], limits: ControllerLimits, seeds: Sequence[int], processes: int, *, has_rivals: bool
) -> list[Row]:
    """A row each; the time is simulated, so processes do not disturb one another."""
    run = partial(run_workload, limits=limits, seeds=seeds, has_rivals=has_rivals)
    if processes == 1 or len(workloads) < 5:
        return [_shown(run(workload)) for workload in workloads]
    with ProcessPoolExecutor(processes) as pool:
        return [_shown(row) for row in pool.map(run, workloads)]


def _shown(row: Row) -> Row:
    bound = row.informed_regret()
    known = "" if bound is None else f", bound {bound:.1%}"
    print(f"{row.workload}: regret {row.regret('ours'):.1%}{known}", file=sys.stderr)
    return row


def _seed_table(rows: list[Row]) -> str:
    lines = ["| case | plain tok/s | static K=3 | ours | ours / better mode |", "|--|--|--|--|--|"]
    for row in rows:
        check = seed_check(row)
        lines.append(
            f"| {row.workload} | {check['plain_tok_per_s']:.1f} | {check['static_tok_per_s']:.1f} "
            f"| {check['ours_tok_per_s']:.1f} | {check['over_better_mode']:.3f} |"
        )
    return "\n".join(lines)


def _call_cost_us(limits: ControllerLimits) -> dict[str, float]:
    """Mean microseconds of CPU time of a call, over a run in which every candidate gets measured."""
    spent = {"plan_round": 0.0, "observe": 0.0, "observe_shadow": 0.0}
    calls = dict.fromkeys(spent, 0)
    policy = Ours(limits)
    for name in spent:
        inner = getattr(policy.controller, name)

        def timed(*args: object, _inner: object = inner, _name: str = name, **kwargs: object) -> object:
            begin = time.thread_time()  # not wall time: the machine may be busy
            result = _inner(*args, **kwargs)  # type: ignore[operator]
            spent[_name] += time.thread_time() - begin
            calls[_name] += 1
            return result

        setattr(policy.controller, name, timed)
    for workload in smoke_workloads(limits.candidates):
        simulate(workload, policy, seed=1)
    return {name: round(1e6 * spent[name] / max(calls[name], 1), 2) for name in spent}


if __name__ == "__main__":
    main()
