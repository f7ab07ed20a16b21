"""The founding case replayed through the whole gateway: plain 12.2 ms a token, verify 30 ms, 1 ms a draft token.

    python -m benchmarks.controller.seed_replay [--verify 30] [--lengths 2.0 2.3 2.46 2.7 3.0] [--answers 5]
    python -m benchmarks.controller.seed_replay --shift 0 1 2

For each verify time and acceptance length three gateways run side by side, each with an engine and a drafter of its
own: plain (speculation off), static (K = 3, pinned) and auto (the controller). One client streams the same texts from
each in turn; answers never overlap. Auto starts knowing nothing and what it spends on learning is in its rate.

--shift streams one long answer a seed whose acceptance length goes from 2.0 to 3.0 inside it, auto with a gateway fresh
for each. Every text is compared with the known one. Rates count from the first token to the last.

The result file is a collection: a run replaces the cases it measured and leaves the others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from benchmarks.controller.replay_report import CaseRun, length_case, merge_results, shift_case
from benchmarks.controller.replay_stack import MODEL_NAME, PROFILE, ReplayCosts, Stack, replay_stack
from benchmarks.controller.scripted_text import AnswerScript, ScriptedText
from benchmarks.controller.timed_stream import TimedAnswer, stream_answer
from benchmarks.controller.timeline import Mark, plot_timeline, read_timeline
from benchmarks.controller.workloads import SEED_K
from benchmarks.provenance import provenance

__all__ = ["main"]

MODES = {"plain": "off", "static": "on", "auto": "auto"}
LENGTHS = (2.0, 2.3, 2.46, 2.7, 3.0)
SHIFT = (2.0, 3.0)
_FOLDER = Path(__file__).parent.parent / "results" / "controller"
_WARM_SEED = 999


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the cases asked for, print the table and one JSON line, add them to the result file."""
    options = _options(argv)
    facts = provenance(["python", "-m", "benchmarks.controller.seed_replay", *(argv or sys.argv[1:])], seed=0)
    cases = asyncio.run(_measure(options))
    settings = {
        "profile": PROFILE,
        "plain_ms": options.plain_ms,
        "draft_ms": options.draft_ms,
        "static_num_draft_tokens": SEED_K,
        "concurrency": 1,
        "temperature": 0.0,
    }
    Console().print(_table(cases))
    if options.out is not None:
        merge_results(options.out / "seed_replay.json", cases, provenance=facts, settings=settings)
    print(json.dumps({"cases": cases}))


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verify", type=float, nargs="+", default=[30.0], help="ms of a verify pass")
    parser.add_argument("--lengths", type=float, nargs="*", default=list(LENGTHS))
    parser.add_argument("--answers", type=int, default=5, help="texts of each case")
    parser.add_argument("--tokens", type=int, default=800, help="of each text")
    parser.add_argument("--shift", type=int, nargs="*", default=None, metavar="SEED", help="measure the shift instead")
    parser.add_argument("--shift-tokens", type=int, nargs=2, default=(1500, 1000), help="before and after it")
    parser.add_argument("--plain-ms", type=float, default=12.2)
    parser.add_argument("--draft-ms", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=_FOLDER, help="folder of seed_replay.json and the plots")
    parser.add_argument("--smoke", action="store_true", help="one tiny case, quick passes, nothing written")
    options = parser.parse_args(argv)
    if options.smoke:
        options.verify, options.lengths, options.answers, options.tokens = [3.0], [2.7], 1, 40
        options.plain_ms, options.draft_ms, options.out = 1.2, 0.1, None
        options.shift_tokens = (30, 30)
    return options


async def _measure(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    cases: dict[str, dict[str, Any]] = {}
    for verify_ms in options.verify:
        costs = ReplayCosts(plain_ms=options.plain_ms, verify_ms=verify_ms, draft_ms=options.draft_ms)
        if options.shift is not None:
            for seed in options.shift:
                name = f"verify {verify_ms:g} ms, shift {SHIFT[0]} to {SHIFT[1]}, seed {seed}"
                cases[name] = await _shift(name, costs, seed, options)
            continue
        for length in options.lengths:
            name = f"verify {verify_ms:g} ms, length {length}"
            cases[name] = await _steady(name, costs, length, options)
    return cases


async def _steady(name: str, costs: ReplayCosts, length: float, options: argparse.Namespace) -> dict[str, Any]:
    scripts = [AnswerScript(seed=seed, phases=((options.tokens, length),)) for seed in range(options.answers)]
    run = await _run_modes(costs, scripts, options.tokens)
    if options.out is not None:
        plot_timeline(
            run.timeline,
            options.out / f"seed-replay-verify-{costs.verify_ms:g}-length-{length}.png".replace(".", "-", 1),
            title=f"founding case through the gateway: {name}, auto",
            rates={mode: run.tok_per_s(mode) for mode in ("plain", "static")},
            length=length,
        )
    return length_case(run, length=length)


async def _shift(name: str, costs: ReplayCosts, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    before, after = options.shift_tokens
    script = AnswerScript(seed=seed, phases=((before, SHIFT[0]), (after, SHIFT[1])))
    run = await _run_modes(costs, [script], before + after)
    if options.out is not None:
        at_s = next(r.now_s for r in run.timeline.rounds if r.request == run.request and r.position >= before)
        plot_timeline(
            run.timeline,
            options.out / f"seed-replay-shift-seed-{seed}.png",
            title=f"founding case through the gateway: {name}, auto",
            rates={mode: run.tok_per_s(mode) for mode in ("plain", "static")},
            marks=[Mark(now_s=at_s, label=f"{SHIFT[0]} to {SHIFT[1]}")],
        )
    return shift_case(run, shift_at=before)


async def _run_modes(costs: ReplayCosts, scripts: Sequence[AnswerScript], num_tokens: int) -> CaseRun:
    """Every text from every mode, in turn."""
    answers: dict[str, list[TimedAnswer]] = {mode: [] for mode in MODES}
    passes: dict[str, Any] = {}
    num_wrong = 0
    with tempfile.TemporaryDirectory(prefix="breakeven-replay-") as name:
        directory = Path(name)
        trace_path = directory / "trace.jsonl"
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(aiohttp.ClientSession())
            stacks: dict[str, Stack] = {}
            for mode, setting in MODES.items():
                trace = trace_path if mode == "auto" else None
                stacks[mode] = await stack.enter_async_context(
                    replay_stack(directory / mode, costs, mode=setting, trace_path=trace)
                )
                warm = AnswerScript(seed=_WARM_SEED, phases=scripts[0].phases)
                await _stream(session, stacks[mode], warm, 4)
                async with session.post(f"{stacks[mode].engine_url}/script/times"):
                    pass
            for turn, script in enumerate(scripts):
                order = list(MODES)[turn % 3 :] + list(MODES)[: turn % 3]
                for mode in order:
                    answer = await _stream(session, stacks[mode], script, num_tokens)
                    num_wrong += answer.token_ids != ScriptedText(script).answer(num_tokens)
                    answers[mode].append(answer)
            for mode in MODES:
                async with session.get(f"{stacks[mode].engine_url}/script/times") as response:
                    passes[mode] = await response.json()
            async with session.get(f"{stacks['auto'].url}/stats") as response:
                stats = await response.json()
        timeline = read_timeline(trace_path)  # complete once the gateway has ended
    return CaseRun(
        costs=costs, answers=answers, passes=passes, stats=stats, timeline=timeline, num_wrong_texts=num_wrong
    )


async def _stream(session: aiohttp.ClientSession, stack: Stack, script: AnswerScript, num_tokens: int) -> TimedAnswer:
    body = {
        "model": MODEL_NAME,
        "prompt": script.prompt_ids(),
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    return await stream_answer(session, stack.url, "/v1/completions", body)


def _table(cases: dict[str, dict[str, Any]]) -> Table:
    table = Table(title="tok/s through the gateway, one stream")
    names = (
        "plain",
        "static K=3",
        "auto",
        "auto / better",
        "length",
        "overhead plain",
        "overhead static",
        "re-enabled",
    )
    table.add_column("case")
    for name in names:
        table.add_column(name, justify="right")
    for name, case in cases.items():
        modes = case["modes"]
        again = case.get("reenabled_after_tokens")
        table.add_row(
            name,
            *(f"{modes[mode]['tok_per_s']:.1f}" for mode in MODES),
            f"{case['over_better_mode']:.3f}",
            f"{modes['static']['acceptance_length']:.2f}",
            *(f"{modes[mode]['overhead_ms_per_round']:.2f} ms" for mode in ("plain", "static")),
            "" if again is None else f"{again} tokens",
        )
    return table


if __name__ == "__main__":
    main()
