"""The embedded engine: what a verify pass costs by width, and what speculation gives through the whole gateway.

    python -m benchmarks.embedded [--repeats 5] [--tokens 64] [--prompts 8] [--profile cpu-tiny] [--smoke]

Part 1 runs the engine in this process: one request, w rows a pass, against one row. Part 2 starts ``breakeven serve``
and streams the same prompts over HTTP with speculation off, with each K, and with the controller; all variants are
interleaved within one session and repeated, and the table shows medians. Tokens a second count from the first token to
the last.

The ceiling first: a decode step of one row must read every weight once, so bytes of weights over memory bandwidth is
the floor of a step; the bandwidth is measured by summing an array larger than the cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.provenance import provenance
from benchmarks.served import served
from cpukernels.ports import ragged_rows
from verifier.embedded.compose import load_engine
from verifier.embedded.config import VerifierConfig

__all__ = ["main"]

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 9, 12, 16)
DRAFTS = (1, 2, 3, 4, 5, 6, 8)
# Held-out wording, written for this benchmark; none of it is in the head's training prompts.
PROMPTS = (
    "Explain in a few sentences why the sky looks blue at noon and red at sunset.",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "Give me a recipe for vegetable soup with step by step instructions.",
    "What should I consider when I buy a used bicycle?",
    "Write a Python function that returns the n-th Fibonacci number and explain it.",
    "Summarise the advantages and disadvantages of working from home.",
    "How do vaccines train the immune system?",
    "A train leaves at 9:15 and arrives at 13:40. How long is the journey? Explain your steps.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One streamed answer. tok_per_s counts from the first token to the last."""

    variant: str
    temperature: float
    tok_per_s: float
    ttft_ms: float
    acceptance_length: float | None
    num_tokens: int


def main(argv: Sequence[str] | None = None) -> None:
    """Run both parts, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help="how many of the fixed prompts")
    parser.add_argument("--profile", default="cpu-tiny")
    parser.add_argument("--set", action="append", default=[], metavar="FLAG", help="passed on, e.g. verifier.model=DIR")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/embedded.json"))
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to check that it runs")
    options = parser.parse_args(argv)
    repeats, tokens = (1, 8) if options.smoke else (options.repeats, options.tokens)
    prompts = PROMPTS[: 1 if options.smoke else options.prompts]
    flags = dict(entry.split("=", 1) for entry in options.set)
    console = Console()
    widths = measure_widths(VerifierConfig(model=flags.get("verifier.model", VerifierConfig().model)), repeats * 5)
    console.print(_width_table(widths))
    answers = asyncio.run(
        measure_serving(
            options.profile, flags, prompts=prompts, repeats=repeats, num_tokens=tokens, smoke=options.smoke
        )
    )
    summary = summarise(answers)
    console.print(_serving_table(summary))
    result = {
        "provenance": provenance(sys.argv, seed=0),
        "settings": {"repeats": repeats, "tokens": tokens, "prompts": len(prompts), "concurrency": 1},
        "widths": widths,
        "serving": summary,
        "answers": [asdict(answer) for answer in answers],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({"out": str(options.out), "serving": summary}))


# ---------------------------------------------------------------- part 1


def measure_widths(config: VerifierConfig, repeats: int) -> list[dict[str, float]]:
    """Median time of a pass of w rows at 128 positions of context, interleaved over w."""
    with tempfile.TemporaryDirectory() as directory:
        loaded = load_engine(config, Path(directory) / "ring", lambda phase, share: None)
    model = loaded.engine.model
    cache = model.new_cache()
    rng = np.random.default_rng(0)
    ids = rng.integers(3, model.architecture.vocab_size, 128)
    model.forward(ids, ragged_rows([cache], [len(ids)]))
    cache.length = len(ids)
    times: dict[int, list[float]] = {width: [] for width in WIDTHS}
    for repeat in range(repeats + 1):
        for width in WIDTHS:
            begin = time.perf_counter()
            hidden, _ = model.forward(ids[:width], ragged_rows([cache], [width]))
            model.logits(hidden)
            if repeat > 0:  # the first round warms up
                times[width].append(time.perf_counter() - begin)
    one = statistics.median(times[1])
    floor_ms = model.num_weight_bytes / _read_bandwidth() * 1e3
    return [
        {
            "rows": width,
            "ms": round(statistics.median(samples) * 1e3, 2),
            "p90_ms": round(sorted(samples)[int(0.9 * len(samples))] * 1e3, 2),
            "ratio": round(statistics.median(samples) / one, 3),
            "floor_ms": round(floor_ms, 2),
        }
        for width, samples in times.items()
    ]


def _read_bandwidth() -> float:
    """Bytes a second one core reads from memory, best of five."""
    data = np.ones(1 << 26, dtype=np.float32)  # 256 MiB
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - begin)
    return data.nbytes / best


# ---------------------------------------------------------------- part 2


async def measure_serving(
    profile: str,
    flags: dict[str, str],
    *,
    prompts: Sequence[str],
    repeats: int,
    num_tokens: int,
    smoke: bool,
) -> list[Answer]:
    """Stream every prompt with every variant, interleaved, ``repeats`` times at both temperatures."""
    variants = ["off", *(f"K={k}" for k in (DRAFTS[:2] if smoke else DRAFTS)), "auto"]
    answers: list[Answer] = []
    async with served(profile, flags) as url, aiohttp.ClientSession() as session:
        for variant in variants:  # warm-up: first use of every shape, and the controller's first measurements
            await _stream(session, url, prompts[0], variant, 0.0, seed=0, num_tokens=min(32, num_tokens))
        for repeat in range(repeats):
            for index, prompt in enumerate(prompts):
                for temperature in (0.0, 0.8):
                    # A different order each time, so that drift of the machine hits all variants alike.
                    turn = (repeat + index) % len(variants)
                    answers += [
                        await _stream(session, url, prompt, variant, temperature, seed=repeat, num_tokens=num_tokens)
                        for variant in variants[turn:] + variants[:turn]
                    ]
    return answers


async def _stream(
    session: aiohttp.ClientSession,
    url: str,
    prompt: str,
    variant: str,
    temperature: float,
    *,
    seed: int,
    num_tokens: int,
) -> Answer:
    speculation: dict[str, Any] = {"mode": variant}
    if variant.startswith("K="):
        speculation = {"mode": "on", "num_draft_tokens": int(variant[2:])}
    body = {
        "model": "smollm2-135m-instruct",
        "messages": [{"role": "user", "content": prompt}],
        "temperature": temperature,
        "seed": seed,
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_spec_stats": True,
        "speculation": speculation,
    }
    begin = time.perf_counter()
    first = last = begin
    final: dict[str, Any] = {}
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if event["choices"] and event["choices"][0]["delta"].get("content"):
                last = time.perf_counter()
                first = last if first == begin else first
            if event.get("usage"):
                final = event
    count = final["usage"]["completion_tokens"]
    spec = final["metrics"]["speculative_decoding"]
    return Answer(
        variant=variant,
        temperature=temperature,
        tok_per_s=(count - 1) / (last - first) if last > first else 0.0,
        ttft_ms=(first - begin) * 1e3,
        acceptance_length=spec["mean_acceptance_length"],
        num_tokens=count,
    )


def summarise(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Medians by variant and temperature; ratios are medians of ratios within the same prompt and repeat."""
    rows = []
    for temperature in sorted({a.temperature for a in answers}):
        plain = [a for a in answers if a.variant == "off" and a.temperature == temperature]
        for variant in dict.fromkeys(a.variant for a in sorted(answers, key=lambda a: _order(a.variant))):
            own = [a for a in answers if a.variant == variant and a.temperature == temperature]
            ratios = [a.tok_per_s / p.tok_per_s for a, p in zip(own, plain, strict=True) if p.tok_per_s]
            lengths = [a.acceptance_length for a in own if a.acceptance_length is not None]
            rows.append(
                {
                    "temperature": temperature,
                    "variant": variant,
                    "tok_per_s": round(statistics.median(a.tok_per_s for a in own), 2),
                    "ratio": round(statistics.median(ratios), 3),
                    "ratio_p10": round(sorted(ratios)[len(ratios) // 10], 3),
                    "ratio_p90": round(sorted(ratios)[9 * len(ratios) // 10], 3),
                    "acceptance_length": round(statistics.mean(lengths), 3) if lengths else None,
                    "ttft_ms": round(statistics.median(a.ttft_ms for a in own), 1),
                    "answers": len(own),
                }
            )
    return rows


def _order(variant: str) -> tuple[int, int]:
    return {"off": 0, "auto": 2}.get(variant, 1), int(variant[2:]) if variant.startswith("K=") else 0


def _width_table(widths: list[dict[str, float]]) -> Table:
    table = Table(title=f"one pass of w rows, 128 positions of context (floor {widths[0]['floor_ms']} ms)")
    for name in ("rows", "ms", "p90_ms", "ratio"):
        table.add_column(name, justify="right")
    for row in widths:
        table.add_row(*(str(row[name]) for name in ("rows", "ms", "p90_ms", "ratio")))
    return table


def _serving_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="through the gateway, one stream, medians")
    names = ("temperature", "variant", "tok_per_s", "ratio", "ratio_p10", "ratio_p90", "acceptance_length", "ttft_ms")
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*("" if row[name] is None else str(row[name]) for name in names))
    return table


if __name__ == "__main__":
    main()
