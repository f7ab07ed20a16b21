"""What a verify round through SGLang costs beside plain decode, part by part, and what the plugin saves.

Starts the variants of ``benchmarks/sglang/engines.py`` beside each other (all must fit the device), then measures them
one after the other; within a variant, plain decode and verify at every K are interleaved. Needs an interpreter that has
SGLang; weights are dummies of a given shape, so only time is measured, never acceptance.

    python -m benchmarks.sglang_overhead --device cuda --shape llama-8b --out result.json
    python -m benchmarks.sglang_overhead --device cpu --shape tiny --python /path/to/sglang/python --smoke
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.provenance import provenance
from benchmarks.sglang.engines import (
    SHAPES,
    Engine,
    lane_endpoint,
    plan_variants,
    ring_path,
    sglang_version,
    start_engine,
    write_shape,
)
from benchmarks.sglang.parts import PARTS, Event, read_events, round_parts
from benchmarks.sglang.rounds import (
    Round,
    Sequences,
    check_features,
    measure_empty,
    measure_plain,
    verify_round,
)
from benchmarks.sglang.table import print_tables
from verifier.sglang.fast_lane import FastLane
from verifier.sglang.http import EngineHttp
from verifier.sglang.tap import TapSource
from wire.sampling import SamplingParams

DRAFTS: Final = (0, 1, 3, 5, 7)
BATCHES: Final = (1, 4, 16)
CONTEXTS: Final = (512, 4096)
# How the plugin draws in rounds of these kinds.
_DRAWN: Final = {
    "drawn": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=0.8, top_p=0.95, seed=7),
}
# A variant that is not wide is measured at these cells alone.
NARROW: Final = ((1, 512), (4, 512), (1, 4096))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured at each cell. In one repeat: a stream of plain decode, then ``rounds`` rounds at every K."""

    cells: tuple[tuple[int, int], ...]
    drafts: tuple[int, ...]
    repeats: int
    rounds: int
    plain_tokens: int
    limit_s: float
    growth_rounds: int = 200


def main(argv: Sequence[str] | None = None) -> None:
    """Run, print the tables, write the JSON after every variant."""
    options = _parser().parse_args(argv)
    plan = _plan(options)
    directory = options.work or Path(tempfile.mkdtemp(prefix="breakeven-overhead-"))
    directory.mkdir(parents=True, exist_ok=True)
    version = sglang_version(options.python)
    target, head = write_shape(directory / "shape", options.shape)
    variants = plan_variants(
        head,
        device=options.device,
        captures_by_flag=version >= (0, 5, 23),
        num_steps=options.own_steps,
        tokenizer=options.tokenizer,
    )
    if options.variants:
        by_name = {variant.name: variant for variant in variants}
        variants = [by_name[name] for name in options.variants]
    result: dict[str, Any] = {
        "provenance": provenance(sys.argv, seed=0) | {"gpu": _gpu(), "sglang": ".".join(map(str, version))},
        "settings": {
            "shape": options.shape,
            "common_args": options.common,
            "repeats": plan.repeats,
            "rounds": plan.rounds,
            "plain_tokens": plan.plain_tokens,
        },
        "variants": {},
    }
    engines: list[Engine] = []
    try:
        for index, variant in enumerate(variants):
            engine = start_engine(
                variant,
                python=options.python,
                target=target,
                port=options.port + index,
                directory=directory / variant.name,
                common=_common(options),
                env=dict(entry.split("=", 1) for entry in options.env),
            )
            engines.append(engine)
            if options.one_at_a_time:
                _measure_into(result, engine, plan, options)
                engine.stop()
        if not options.one_at_a_time:
            for engine in engines:
                _measure_into(result, engine, plan, options)
    finally:
        for engine in engines:
            engine.stop()
            ring_path(engine.directory).unlink(missing_ok=True)
    print_tables(result)
    print(json.dumps({"out": str(options.out), "variants": list(result["variants"])}))


def _measure_into(result: dict[str, Any], engine: Engine, plan: Plan, options: argparse.Namespace) -> None:
    """Measure one variant; whatever fails is part of the result, and the others go on."""
    name = engine.variant.name
    entry: dict[str, Any] = {"args": list(engine.variant.args), "env": engine.variant.env, "cells": []}
    result["variants"][name] = entry
    begin = time.monotonic()
    try:
        asyncio.run(_measure(entry, engine, plan, options))
    except Exception:  # noqa: BLE001 - a benchmark's boundary: other variants still count
        entry["error"] = traceback.format_exc(limit=-4)
        entry["engine_log"] = engine.log_tail()
    entry["ready_s"] = engine.ready_s
    entry["measured_s"] = round(time.monotonic() - begin, 1)
    print(f"{name}: {entry['measured_s']} s, ready after {engine.ready_s} s, {entry.get('error', 'ok')}", flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")


async def _measure(entry: dict[str, Any], engine: Engine, plan: Plan, options: argparse.Namespace) -> None:
    if not await engine.wait_ready(timeout_s=options.start_timeout):
        raise RuntimeError("the engine did not come up")
    variant = engine.variant
    http = EngineHttp(engine.url)
    await http.open()
    tap = TapSource(engine.directory / "tap.sock", timeout_s=0.25) if variant.has_tap else None
    lane = FastLane(lane_endpoint(engine.directory)) if variant.has_tap else None
    reading = asyncio.create_task(lane.read()) if lane is not None else None
    if tap is not None:
        tap.open()
    vocab_size = SHAPES[options.shape]["vocab_size"]
    try:
        async with asyncio.timeout(plan.limit_s):
            if tap is not None:
                entry["features"] = await check_features(
                    http, tap, ring_path(engine.directory), lengths=(40, 70, 130), vocab_size=vocab_size
                )
            empty = [await measure_empty(http) for _ in range(20)]
            entry["empty_call_ms"] = round(statistics.median(empty[5:]), 3)
            cells = [cell for cell in plan.cells if cell[0] * cell[1] * 1.1 < variant.max_total_tokens]
            if not variant.is_wide and not options.smoke:
                cells = [cell for cell in cells if cell in NARROW]
            for batch, context in cells:
                entry["cells"].append(await _cell(http, tap, lane, engine, plan, batch, context, vocab_size))
            if variant.has_draws:
                entry["growth"] = [await _growth(http, lane, plan, batch, vocab_size) for batch in (1, 4)]
    finally:
        if tap is not None:
            tap.close()
        if lane is not None and reading is not None:
            reading.cancel()
            lane.close()
        await http.close()


async def _cell(
    http: EngineHttp,
    tap: TapSource | None,
    lane: FastLane | None,
    engine: Engine,
    plan: Plan,
    batch: int,
    context: int,
    vocab_size: int,
) -> dict[str, Any]:
    kinds: list[tuple[str, int]] = []
    if engine.variant.has_draws:
        kinds = [("lane_drawn", k) for k in plan.drafts] + [("drawn", k) for k in plan.drafts[:3:2]]
        kinds += [("lane_sampled", k) for k in plan.drafts[:3:2]]
    elif not engine.variant.speculates:
        kinds = [("verify", k) for k in plan.drafts] + [("no_logprobs", k) for k in plan.drafts[:3:2]]
        if tap is not None:
            kinds += [("no_tap", k) for k in plan.drafts[:3:2]]
            kinds += [("lane", k) for k in plan.drafts]
    rounds: dict[tuple[str, int], list[Round]] = {kind: [] for kind in kinds}
    steps: list[float] = []
    tokens: list[float] = []
    for repeat in range(plan.repeats + 1):
        is_warm = repeat > 0
        # Fresh contexts each time: a sequence's rounds get slower by their number, see docs/sglang.md.
        sequences = Sequences.fresh(batch, context, vocab_size=vocab_size, seed=context * 100 + repeat)
        await verify_round(http, sequences, 0, tap=tap)  # the prompts, into the prefix cache
        plain = await measure_plain(http, sequences, plan.plain_tokens)
        if is_warm:
            steps += plain.step_ms
            tokens += plain.token_ms
        turn = repeat % max(1, len(kinds))
        for kind in kinds[turn:] + kinds[:turn]:  # another order each time
            for _ in range(plan.rounds if is_warm else 2):
                done = await verify_round(
                    http,
                    sequences,
                    kind[1],
                    has_logprobs=kind[0] != "no_logprobs",
                    tap=tap if kind[0] not in ("no_tap", "no_logprobs") else None,
                    lane=lane if kind[0].startswith("lane") else None,
                    drawn=_DRAWN.get(kind[0].removeprefix("lane_")),
                )
                if is_warm:
                    rounds[kind].append(done)
    events = read_events(path.read_text() for path in engine.directory.glob("*.log") if path.stem.isdecimal())
    return {
        "batch": batch,
        "context": context,
        "plain_token_ms": _spread(tokens),
        "plain_step_ms": _spread(steps),
        "rounds": [
            {"kind": kind, "num_drafts": num_drafts, **_summary(done, events)}
            for (kind, num_drafts), done in rounds.items()
        ],
    }


async def _growth(http: EngineHttp, lane: FastLane | None, plan: Plan, batch: int, vocab_size: int) -> dict[str, Any]:
    """Many rounds of the same answers: what the first and the last tenth of them take."""
    sequences = Sequences.fresh(batch, 512, vocab_size=vocab_size, seed=batch)
    await verify_round(http, sequences, 0, drawn=_DRAWN["drawn"])
    times = [
        (await verify_round(http, sequences, 3, lane=lane, drawn=_DRAWN["drawn"])).ms for _ in range(plan.growth_rounds)
    ]
    tenth = len(times) // 10
    return {
        "batch": batch,
        "rounds": len(times),
        "first_ms": round(statistics.median(times[:tenth]), 3),
        "last_ms": round(statistics.median(times[-tenth:]), 3),
    }


def _summary(done: list[Round], events: list[Event]) -> dict[str, Any]:
    parts = [round_parts(events, one.begin_s, one.end_s) for one in done]
    names = [*(name for name, _, _ in PARTS), "gpu", "passes"]
    return {
        "ms": _spread([one.ms for one in done]),
        "engine_ms": round(statistics.median(one.engine_s for one in done) * 1e3, 3),
        "parts_ms": {
            name: round(statistics.median(found), 3)
            for name in names
            if (found := [p[name] for p in parts if name in p])
        },
        "cached_differ": sum(one.cached_differ for one in done),
        "features_missing": sum(one.features_missing for one in done),
        "count": len(done),
    }


def _spread(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    ordered = sorted(values)
    return {
        "median": round(statistics.median(ordered), 3),
        "p10": round(ordered[len(ordered) // 10], 3),
        "p90": round(ordered[9 * len(ordered) // 10], 3),
    }


def _plan(options: argparse.Namespace) -> Plan:
    if options.smoke:
        return Plan(
            cells=((1, 64), (2, 64)),
            drafts=(0, 1, 3),
            repeats=1,
            rounds=4,
            plain_tokens=8,
            limit_s=300.0,
            growth_rounds=20,
        )
    cells = tuple((batch, context) for context in options.contexts for batch in options.batches)
    return Plan(
        cells=cells,
        drafts=DRAFTS,
        repeats=options.repeats,
        rounds=options.rounds,
        plain_tokens=options.plain_tokens,
        limit_s=options.variant_limit,
    )


def _common(options: argparse.Namespace) -> list[str]:
    return [argument for entry in options.common for argument in entry.split(" ")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-8b")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has SGLang")
    parser.add_argument("--port", type=int, default=31000, help="first of as many ports as variants")
    parser.add_argument("--common", action="append", default=[], help="further engine arguments, separated by blanks")
    parser.add_argument("--env", action="append", default=[], help="NAME=VALUE for the engine")
    parser.add_argument("--variants", nargs="*", help="only these")
    parser.add_argument("--one-at-a-time", action="store_true", help="start each variant when its turn comes")
    parser.add_argument("--batches", type=int, nargs="*", default=list(BATCHES))
    parser.add_argument("--contexts", type=int, nargs="*", default=list(CONTEXTS))
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--plain-tokens", type=int, default=32)
    parser.add_argument("--own-steps", type=int, default=3, help="drafts a step of the engine's own EAGLE-3")
    parser.add_argument("--start-timeout", type=float, default=240.0)
    parser.add_argument("--variant-limit", type=float, default=90.0, help="seconds after which a variant is cut off")
    parser.add_argument("--tokenizer", type=Path, help="any tokenizer's directory, to measure what text costs")
    parser.add_argument("--work", type=Path, help="directory of logs and events; default a temporary one")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/sglang/overhead.json"))
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to check that it runs")
    return parser


def _gpu() -> str | None:
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


if __name__ == "__main__":
    main()
