"""The embedded engine live: real SmolLM2, real head, ``breakeven serve``, a mix of texts through auto, off and on.

    python -m benchmarks.controller.live [--repeats 2] [--tokens 96] [--profile cpu-tiny] [--set KEY=VALUE] [--smoke]

Three gateways run side by side, one with speculation off, one with K = 3 pinned on, one with the controller, each with
a verifier and a drafter of its own; only one answers at a time. Every text goes through all three in turn, greedy and
at temperature 0.8, with the same seed, so the texts must be equal. The auto gateway starts knowing nothing. Its
decisions are recorded, and the plot is drawn from that trace. Rates count from the first token to the last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from benchmarks.controller.timed_stream import TimedAnswer, stream_answer
from benchmarks.controller.timeline import Timeline, plot_timeline, read_timeline
from benchmarks.provenance import provenance
from benchmarks.served import served

__all__ = ["TEXTS", "LiveAnswer", "main", "summarise"]

MODES = ("off", "on", "auto")
TEMPERATURES = (0.0, 0.8)
# Written for this benchmark; none of it is in the head's training prompts.
TEXTS = {
    "code": (
        "Write a Python class for a stack with push, pop and peek, and show how it is used.",
        "Write an SQL query that lists the ten customers with the largest orders, and explain every line.",
    ),
    "list": (
        "List the planets of the solar system, one per line, each with one fact.",
        "Give me a packing list for a week of hiking in the mountains.",
    ),
    "prose": (
        "Describe a rainy evening in a small harbour town.",
        "Tell the story of an old clockmaker who receives a strange order.",
    ),
}
_OUT = Path(__file__).parent.parent / "results" / "controller"
_WARM_UP = "Say hello."


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveAnswer:
    """One answer: which text, how it was asked for, and what came."""

    kind: str
    text: str
    temperature: float
    repeat: int
    mode: str
    answer: TimedAnswer

    @property
    def turn(self) -> tuple[str, float, int]:
        """What the answers of the three modes have in common."""
        return self.text, self.temperature, self.repeat


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table and one JSON line, write result file and plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--profile", default="cpu-tiny")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="name to ask for")
    parser.add_argument("--set", action="append", default=[], metavar="FLAG", help="passed on, e.g. verifier.model=DIR")
    parser.add_argument("--out", type=Path, default=_OUT, help="folder of live.json and live.png")
    parser.add_argument("--smoke", action="store_true", help="one text, a few tokens, nothing written")
    options = parser.parse_args(argv)
    texts: Mapping[str, tuple[str, ...]] = TEXTS
    if options.smoke:
        options.repeats, options.tokens, options.out = 1, 12, None
        texts = {"code": TEXTS["code"][:1]}
    origin = provenance(["python", "-m", "benchmarks.controller.live", *(argv or sys.argv[1:])], seed=0)
    answers, timeline = asyncio.run(_measure(options, texts))
    rows = summarise(answers)
    Console().print(_table(rows))
    facts = {
        "provenance": origin,
        "settings": {
            "profile": options.profile,
            "tokens": options.tokens,
            "repeats": options.repeats,
            "texts": sum(len(group) for group in texts.values()),
            "concurrency": 1,
            "num_draft_tokens_on": 3,
        },
        "rows": rows,
        "differing_texts": count_differing(answers),
        "auto_changes": timeline.num_changes(),
        "auto_rounds": len(timeline.rounds),
        "auto_shadows": len(timeline.shadows),
    }
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "live.json").write_text(json.dumps(facts, indent=1) + "\n")
        rates = {mode: row["tok_per_s"] for row in rows if row["kind"] == "all" for mode in [row["mode"]]}
        plot_timeline(
            timeline,
            options.out / "live.png",
            title="embedded engine live, auto: code, lists and prose at temperature 0 and 0.8",
            rates={f"speculation {mode}": rates[mode] for mode in ("off", "on")},
        )
    print(json.dumps({"rows": rows, "differing_texts": facts["differing_texts"]}))


async def _measure(
    options: argparse.Namespace, texts: Mapping[str, tuple[str, ...]]
) -> tuple[list[LiveAnswer], Timeline]:
    flags = dict(entry.split("=", 1) for entry in options.set)
    answers: list[LiveAnswer] = []
    with tempfile.TemporaryDirectory(prefix="breakeven-live-") as name:
        trace_path = Path(name) / "trace.jsonl"
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(aiohttp.ClientSession())
            urls: dict[str, str] = {}
            for mode in MODES:
                own = {
                    "speculation.mode": mode,
                    **({"speculation.trace_path": str(trace_path)} if mode == "auto" else {}),
                }
                wait_for = ("verifier",) if mode == "off" else ("verifier", "drafter")
                urls[mode] = await stack.enter_async_context(
                    served(options.profile, {**flags, **own}, wait_for=wait_for)
                )
                await _ask(session, urls[mode], options.model, _WARM_UP, temperature=0.0, seed=0, num_tokens=4)
            turn = 0
            for repeat in range(options.repeats):
                for temperature in TEMPERATURES:
                    for kind, group in texts.items():
                        for text in group:
                            turn += 1
                            for mode in MODES[turn % 3 :] + MODES[: turn % 3]:
                                answer = await _ask(
                                    session,
                                    urls[mode],
                                    options.model,
                                    text,
                                    temperature=temperature,
                                    seed=repeat,
                                    num_tokens=options.tokens,
                                )
                                answers.append(
                                    LiveAnswer(
                                        kind=kind,
                                        text=text,
                                        temperature=temperature,
                                        repeat=repeat,
                                        mode=mode,
                                        answer=answer,
                                    )
                                )
        timeline = read_timeline(trace_path)  # complete once the gateway has ended
    return answers, timeline


async def _ask(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    text: str,
    *,
    temperature: float,
    seed: int,
    num_tokens: int,
) -> TimedAnswer:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "temperature": temperature,
        "seed": seed,
        "max_tokens": num_tokens,
        "ignore_eos": True,
    }
    return await stream_answer(session, url, "/v1/chat/completions", body)


def count_differing(answers: Sequence[LiveAnswer]) -> int:
    """Answers whose ids are not those of plain decoding; the right number is 0."""
    plain = {a.turn: a.answer.token_ids for a in answers if a.mode == "off"}
    return sum(a.answer.token_ids != plain[a.turn] for a in answers)


def summarise(answers: Sequence[LiveAnswer]) -> list[dict[str, Any]]:
    """By kind of text, temperature and mode, and over all. ratio: median over texts of the rate over plain decode's."""
    groups = dict.fromkeys((a.kind, a.temperature) for a in answers)
    rows = [
        _row(kind, temperature, mode, [a for a in answers if (a.kind, a.temperature) == (kind, temperature)])
        for kind, temperature in groups
        for mode in MODES
    ]
    return rows + [_row("all", None, mode, answers) for mode in MODES]


def _row(kind: str, temperature: float | None, mode: str, answers: Sequence[LiveAnswer]) -> dict[str, Any]:
    own = [a for a in answers if a.mode == mode]
    plain = {a.turn: a.answer.tok_per_s for a in answers if a.mode == "off"}
    ratios = sorted(a.answer.tok_per_s / plain[a.turn] for a in own)
    accepted = sum(a.answer.speculation["num_accepted_draft_tokens"] for a in own)
    rounds = sum(a.answer.speculation["num_spec_steps"] for a in own)
    return {
        "kind": kind,
        "temperature": temperature,
        "mode": mode,
        "tok_per_s": round(sum(a.answer.num_tokens for a in own) / sum(a.answer.decode_s for a in own), 2),
        "tok_per_s_median": round(statistics.median(a.answer.tok_per_s for a in own), 2),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_min": round(ratios[0], 3),
        "ratio_max": round(ratios[-1], 3),
        "acceptance_length": round(1 + accepted / rounds, 3) if rounds else None,
        "plain_share_of_rounds": round(1 - rounds / sum(_num_rounds(a) for a in own), 3),
        "ttft_ms": round(statistics.median(a.answer.ttft_ms for a in own), 1),
        "answers": len(own),
    }


def _num_rounds(answer: LiveAnswer) -> int:
    return int(answer.answer.speculation["num_spec_steps"] + answer.answer.speculation["num_plain_steps"])


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="embedded engine, one stream")
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    return table


if __name__ == "__main__":
    main()
