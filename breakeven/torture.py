"""``breakeven torture``: run the stream contract against any OpenAI-compatible server, and print what it breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import aiohttp
import orjson
from rich.console import Console
from rich.table import Table

from breakeven.torture_cases import CASES, Case, Skipped
from breakeven.torture_probe import Probe

__all__ = ["Outcome", "print_outcomes", "run_cases", "torture"]

_MARKS = {"pass": "[green]pass", "fail": "[red]FAIL", "warn": "[yellow]warn", "skip": "[dim]skip"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one case found. ``detail``: one sentence unless it passed."""

    name: str
    rule: str
    result: Literal["pass", "fail", "warn", "skip"]
    detail: str
    breaks: str


def torture(url: str, *, model: str, api_key: str | None = None, only: str = "", timeout_s: float = 120.0) -> int:
    """Run all cases, print a table and one JSON line.

    Args:
        url: base of the server, with or without ``/v1``.
        only: run the cases whose name or rule contains this.

    Returns:
        The exit status: 0 if nothing required failed, 1 otherwise, 2 if the server can't be reached.
    """
    cases = [case for case in CASES if only.lower() in f"{case.rule} {case.name}".lower()]
    console = Console()
    try:
        outcomes = asyncio.run(
            run_cases(
                url,
                cases,
                model=model,
                api_key=api_key,
                timeout_s=timeout_s,
                on_case=lambda name: console.print(name, style="dim"),
            )
        )
    except aiohttp.ClientConnectorError as error:
        console.print(f"{url} can't be reached: {error}", style="red")
        return 2
    print_outcomes(outcomes, console=console, url=url)
    return 1 if any(outcome.result == "fail" for outcome in outcomes) else 0


async def run_cases(
    url: str,
    cases: Sequence[Case],
    *,
    model: str,
    api_key: str | None = None,
    timeout_s: float = 120.0,
    on_case: Callable[[str], None] | None = None,
) -> list[Outcome]:
    """Run cases one after the other, so that none disturbs the timing of another.

    Raises:
        aiohttp.ClientConnectorError: nobody listens.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    outcomes = []
    async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=None)) as session:
        probe = Probe(session, url, model=model, timeout_s=timeout_s)
        for case in cases:
            if on_case is not None:
                on_case(case.name)
            outcomes.append(await _run(case, probe))
    return outcomes


def print_outcomes(outcomes: Sequence[Outcome], *, console: Console, url: str) -> None:
    """The table for people, then the same as one JSON line for machines."""
    table = Table(title=f"stream torture: {url}", title_justify="left")
    for heading in ("", "rule", "check", "found", "breaks"):
        table.add_column(heading)
    for outcome in outcomes:
        found = "" if outcome.result == "pass" else outcome.detail
        breaks = outcome.breaks if outcome.result in ("fail", "warn") else ""
        table.add_row(_MARKS[outcome.result], outcome.rule, outcome.name, found, breaks)
    console.print(table)
    counts = {mark: sum(outcome.result == mark for outcome in outcomes) for mark in _MARKS}
    record = {"url": url, "counts": counts, "outcomes": [asdict(outcome) for outcome in outcomes]}
    console.out(orjson.dumps(record).decode(), highlight=False)


async def _run(case: Case, probe: Probe) -> Outcome:
    result: Literal["pass", "fail", "warn", "skip"]
    try:
        detail = await case.check(probe)
        result = "pass" if detail is None else "fail" if case.level == "required" else "warn"
    except Skipped as reason:
        result, detail = "skip", str(reason)
    except aiohttp.ClientConnectorError:
        raise
    except TimeoutError:
        result, detail = "fail", f"no end within {probe.timeout_s:g} s"
    except aiohttp.ClientError as error:
        result, detail = "fail", f"the connection broke: {error}"
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        # The answer was not even of the shape the check reads; that is the server's defect.
        result, detail = "fail", f"an answer of an unexpected shape: {type(error).__name__} {error}"
    return Outcome(name=case.name, rule=case.rule, result=result, detail=detail or "", breaks=case.breaks)
