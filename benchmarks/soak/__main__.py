"""Endurance of the whole product: mixed load, faults injected, every answer compared with plain decode.

    python -m benchmarks.soak [--minutes 60] [--concurrency 12] [--fault-every-s 30] [--out DIR]

Clients stream, ask for whole answers, leave in the middle, read slowly and send malformed bodies; the number of them
goes up and down. Meanwhile drafter and verifier are killed and stopped. Right is: every finished text equals the one
that plain decode gave before the first fault; a text cut by an error is a prefix of it, and the error is a nested one;
memory is flat.
Exits with 1 if anything was lost, doubled or untyped.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from benchmarks.provenance import provenance
from benchmarks.served import served
from benchmarks.soak.clients import Behaviour, Record, ask
from benchmarks.soak.faults import Fault, MemorySample, inject, pids, sample_memory
from benchmarks.soak.report import draw, is_passed, report, table
from benchmarks.soak.tasks import Expected, Task, expected_answers, make_tasks

__all__ = ["main"]

_BEHAVIOURS = {
    Behaviour.STREAM: 60,
    Behaviour.WHOLE: 15,
    Behaviour.LEAVE: 10,
    Behaviour.SLOW: 5,
    Behaviour.MALFORMED: 10,
}
_MODES = {"auto": 6, "on": 3, "off": 1}
_RAMP_S = 240.0  # one wave of the load, from one client to all and back


@dataclass(slots=True)
class Soak:
    """Everything one soak collects."""

    begin_s: float
    end_s: float
    records: list[Record] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    memory: list[MemorySample] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> None:
    """Run, print, write; exit with 1 on any wrong answer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--concurrency", type=int, default=12)
    parser.add_argument("--fault-every-s", type=float, default=30.0)
    parser.add_argument("--tasks", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profile", default="cpu-tiny")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/soak"))
    options = parser.parse_args(argv)
    soak = asyncio.run(
        _soak(
            options.profile,
            make_tasks(options.tasks),
            minutes=options.minutes,
            concurrency=options.concurrency,
            fault_every_s=options.fault_every_s,
            seed=options.seed,
        )
    )
    summary = report(soak.begin_s, soak.records, soak.faults, soak.memory)
    print(table(summary))
    options.out.mkdir(parents=True, exist_ok=True)
    settings = {key: value for key, value in vars(options).items() if key != "out"}
    result = {"provenance": provenance(sys.argv, seed=options.seed), "settings": settings, **summary}
    (options.out / "soak.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(soak.begin_s, soak.records, soak.faults, soak.memory, options.out / "soak.png")
    sys.exit(0 if is_passed(summary) else 1)


async def _soak(
    profile: str, tasks: list[Task], *, minutes: float, concurrency: int, fault_every_s: float, seed: int
) -> Soak:
    timeout = aiohttp.ClientTimeout(total=180.0)
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        served(profile, {}) as url,
        aiohttp.ClientSession(timeout=timeout, connector=connector) as session,
    ):
        expected = await expected_answers(session, url, tasks)
        now = time.monotonic()
        soak = Soak(begin_s=now, end_s=now + 60.0 * minutes)
        async with asyncio.TaskGroup() as group:
            for index in range(concurrency):
                group.create_task(_client(session, url, tasks, expected, soak, index, concurrency, seed))
            if fault_every_s > 0:
                group.create_task(_break_things(session, url, soak, fault_every_s, seed))
            group.create_task(_watch_memory(session, url, soak))
        return soak


async def _client(
    session: aiohttp.ClientSession,
    url: str,
    tasks: list[Task],
    expected: list[Expected],
    soak: Soak,
    index: int,
    concurrency: int,
    seed: int,
) -> None:
    rng = random.Random(f"{seed} {index}")  # noqa: S311 - load, not secrets
    while (now := time.monotonic()) < soak.end_s:
        # A triangle wave: client i takes part while the wave is above i.
        phase = (now - soak.begin_s) % _RAMP_S / _RAMP_S
        if index > concurrency * (1.0 - abs(2.0 * phase - 1.0)):
            await asyncio.sleep(0.5)
            continue
        number = rng.randrange(len(tasks))
        behaviour = rng.choices(list(_BEHAVIOURS), weights=list(_BEHAVIOURS.values()))[0]
        mode = rng.choices(list(_MODES), weights=list(_MODES.values()))[0]
        soak.records.append(await ask(session, url, tasks[number], expected[number], behaviour, mode, rng))
        await asyncio.sleep(rng.expovariate(2.0))


async def _break_things(session: aiohttp.ClientSession, url: str, soak: Soak, every_s: float, seed: int) -> None:
    rng = random.Random(f"{seed} faults")  # noqa: S311
    while True:
        pause_s = every_s * rng.uniform(0.5, 1.5)
        if time.monotonic() + pause_s > soak.end_s - every_s:
            return  # the end shows that everything recovers
        await asyncio.sleep(pause_s)
        fault = await inject(session, url, rng)
        if fault is not None:
            soak.faults.append(fault)


async def _watch_memory(session: aiohttp.ClientSession, url: str, soak: Soak) -> None:
    while time.monotonic() < soak.end_s:
        soak.memory += sample_memory(await pids(session, url))
        await asyncio.sleep(5.0)


if __name__ == "__main__":
    main()
