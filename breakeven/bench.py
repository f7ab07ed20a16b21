"""``breakeven bench``: measure any OpenAI-compatible server under a steady number of streams."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from rich.console import Console
from rich.table import Table

from breakeven import __version__
from breakeven.bench_load import LoadClient, Workload
from breakeven.bench_statistics import Acceptance, RequestTimes, Spread, Summary, summarize

__all__ = ["BenchPlan", "BenchRow", "bench", "read_prompts", "run_plan"]

_PROMPTS = (
    "Explain how a bicycle stays upright.",
    "Write a short story about a lighthouse keeper.",
    "List ten uses for a piece of string.",
    "What are the main causes of inflation?",
    "Write a Python function that merges two sorted lists.",
    "Summarise the water cycle for a child.",
    "Compare trains and aeroplanes for a journey of 500 km.",
    "Translate into French: The weather is fine and the birds are singing.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """What is run: every mode at every concurrency, ``repeats`` times in turn.

    Fields:
        modes: values of speculation.mode, an extension of breakeven's; "" sends none.
        num_requests: of one setting in one repeat. num_warm_up: sent before, not measured.
    """

    model: str
    prompts: tuple[str, ...]
    concurrencies: tuple[int, ...]
    modes: tuple[str, ...]
    num_requests: int
    num_warm_up: int
    repeats: int
    max_tokens: int
    temperature: float
    ignores_eos: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """One setting's result over all repeats. acceptance: None if the server is not ours or drafted nothing."""

    concurrency: int
    mode: str
    summary: Summary
    acceptance: Acceptance | None


def bench(url: str, plan: BenchPlan, *, api_key: str | None, timeout_s: float, json_only: bool) -> int:
    """Run the plan, print a table and one JSON line.

    Args:
        url: base of the server, with or without ``/v1``. plan: its model may be "", for the first one listed.

    Returns:
        The exit status: 0, 1 if a request failed, 2 if the server can't be reached or has no such model.
    """
    console = Console(stderr=json_only)
    try:
        rows, plan = asyncio.run(_connect_and_run(url, plan, api_key=api_key, timeout_s=timeout_s, console=console))
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        console.print(f"{url}: {error or type(error).__name__}", style="red", markup=False)
        return 2
    if not json_only:
        console.print(_table(plan, rows))
    result = {"benchmark": "bench", "version": __version__, "url": url, "date": _now(), "plan": _plain(plan)}
    Console(soft_wrap=True, highlight=False, markup=False).print(
        orjson.dumps({**result, "rows": [_json_row(row) for row in rows]}).decode()
    )
    for message in sorted({message for row in rows for message in row.summary.errors}):
        console.print(f"failed: {message}", style="red", markup=False)
    return 1 if any(row.summary.num_failed for row in rows) else 0


async def run_plan(client: LoadClient, plan: BenchPlan, *, console: Console) -> list[BenchRow]:
    """Run every setting in turn, repeat after repeat, so that a drift of the machine hits all alike."""
    settings = [(concurrency, mode) for concurrency in plan.concurrencies for mode in plan.modes]
    times: dict[tuple[int, str], list[RequestTimes]] = {setting: [] for setting in settings}
    walls_s = dict.fromkeys(settings, 0.0)
    accepted: dict[tuple[int, str], Acceptance | None] = dict.fromkeys(settings)
    for repeat in range(plan.repeats):
        for concurrency, mode in settings:
            console.print(f"repeat {repeat + 1}: {concurrency} at a time {mode}".rstrip(), style="dim")
            workload = _workload(plan, mode)
            await client.run(workload, num_requests=plan.num_warm_up, concurrency=concurrency)
            before = await client.acceptance()
            done, wall_s = await client.run(workload, num_requests=plan.num_requests, concurrency=concurrency)
            times[concurrency, mode] += done
            walls_s[concurrency, mode] += wall_s
            accepted[concurrency, mode] = _added(accepted[concurrency, mode], before, await client.acceptance())
    return [
        BenchRow(
            concurrency=setting[0],
            mode=setting[1],
            summary=summarize(times[setting], wall_s=walls_s[setting]),
            acceptance=accepted[setting],
        )
        for setting in settings
    ]


def read_prompts(path: Path | None) -> tuple[str, ...]:
    """The prompts of a file, one a line; the built-in ones without a file.

    Raises:
        ValueError: the file can't be read, or holds none.
    """
    if path is None:
        return _PROMPTS
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} can't be read: {error}") from None
    prompts = tuple(line.strip() for line in lines if line.strip())
    if not prompts:
        raise ValueError(f"{path} holds no prompt")
    return prompts


async def _connect_and_run(
    url: str, plan: BenchPlan, *, api_key: str | None, timeout_s: float, console: Console
) -> tuple[list[BenchRow], BenchPlan]:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    connector = aiohttp.TCPConnector(limit=0)  # the plan limits, not the client
    async with aiohttp.ClientSession(headers=headers, connector=connector) as session:
        client = LoadClient(session, url, timeout_s=timeout_s)
        if not plan.model:
            plan = dataclasses.replace(plan, model=await client.first_model())
        return await run_plan(client, plan, console=console), plan


def _workload(plan: BenchPlan, mode: str) -> Workload:
    fields: dict[str, Any] = {"temperature": plan.temperature}
    if mode:
        fields["speculation"] = {"mode": mode}
    if plan.ignores_eos:
        fields["ignore_eos"] = True
    return Workload(model=plan.model, prompts=plan.prompts, max_tokens=plan.max_tokens, fields=fields)


def _added(total: Acceptance | None, before: Acceptance | None, after: Acceptance | None) -> Acceptance | None:
    if before is None or after is None:
        return total
    fields = [field.name for field in dataclasses.fields(Acceptance)]
    base = total or Acceptance(**dict.fromkeys(fields, 0))
    return Acceptance(**{name: getattr(base, name) + getattr(after, name) - getattr(before, name) for name in fields})


def _table(plan: BenchPlan, rows: Sequence[BenchRow]) -> Table:
    title = f"{plan.model}, {plan.max_tokens} tokens, temperature {plan.temperature:g}; milliseconds are p50/p99"
    table = Table(title=title, title_justify="left", caption_justify="left", padding=(0, 0, 0, 1))
    for head in ("streams", "mode", "ok", "failed", "tok/s", "TTFT", "TPOT", "gap", "answer", "accepted"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        summary = row.summary
        length = row.acceptance.acceptance_length if row.acceptance is not None else None
        table.add_row(
            str(row.concurrency),
            row.mode or "-",
            str(summary.num_ok),
            str(summary.num_failed),
            f"{summary.delivered_tok_per_s:.1f}",
            *(_cell(spread) for spread in (summary.ttft_ms, summary.tpot_ms, summary.itl_ms, summary.e2e_latency_ms)),
            f"{length:.2f}" if length is not None else "-",
        )
    table.caption = "gap: between two events; accepted: tokens a drafted round delivers, the target's own included"
    return table


def _cell(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    digits = 0 if spread.p50 >= 100 else 1
    return f"{spread.p50:.{digits}f}/{spread.p99:.{digits}f}"


def _json_row(row: BenchRow) -> dict[str, Any]:
    acceptance = None
    if row.acceptance is not None:
        acceptance = {
            **dataclasses.asdict(row.acceptance),
            "acceptance_rate": row.acceptance.acceptance_rate,
            "acceptance_length": row.acceptance.acceptance_length,
        }
    return {
        "concurrency": row.concurrency,
        "speculation": row.mode or None,
        **dataclasses.asdict(row.summary),
        "acceptance": acceptance,
    }


def _plain(plan: BenchPlan) -> dict[str, Any]:
    return {**dataclasses.asdict(plan), "prompts": len(plan.prompts)}


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
