"""Who delivers most: one run, one target, the same prompts, all systems interleaved.

    python -m benchmarks.rivals [--server NAME=URL ...] [--tightwad-python PY] [--batches 1,4,16] [--tokens 48]
    python -m benchmarks.rivals --sglang-python PY --sglang-args "..." --device cuda --name h200

Always measured: breakeven plain (speculation off), breakeven with K = 3 always, breakeven as it is (auto), and
transformers' generate() plain, with prompt lookup and with early exit (batch 1). ``--server`` adds any server with
OpenAI's API and the same model that runs already (SGLang, with or without its own EAGLE-3). ``--tightwad-python`` adds
tightwad's proxy, from an environment that has it, in front of two plain breakeven engines: its draft model is the
target itself, so that every draft is right. That is the best it can do; drafting then costs as much as decoding.

``--sglang-python`` starts SGLang three times: as it is, with its own EAGLE-3 and the head of ``--head``, and with
breakeven's plugin, as the target of breakeven instead of the embedded engine. ``vs plain`` is then against the first.

All servers stay up and idle while another is measured. Each first answers one unmeasured batch of every size, with 128
tokens a stream. The table shows medians over repeats; ``vs plain`` is the median
of the ratios to the plain system within the same repeat. A system that fails is left out from there on, and named.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import aiohttp
from tokenizers import Tokenizer
from tqdm import tqdm

from benchmarks.embedded import PROMPTS
from benchmarks.provenance import provenance
from benchmarks.rivals.contenders import MODEL, PLAIN, start_contenders
from benchmarks.rivals.measure import Ask, Cell, measure_cell
from benchmarks.rivals.processes import device_mib, resident_mib
from benchmarks.rivals.report import Memory, draw, summarise, table
from benchmarks.rivals.sglang_engines import PLAIN_ENGINE
from benchmarks.rivals.system import System
from verifier.embedded.config import VerifierConfig
from verifier.embedded.weights import resolve_model_dir

__all__ = ["main"]

_WARM_UP_TOKENS: Final = 128
_CELL_LIMIT_S: Final = 300.0
_CHAT: Final = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)


def main(argv: Sequence[str] | None = None) -> None:
    """Start what is asked for, measure, print, write."""
    options = _parser().parse_args(argv)
    options.work = options.work or Path(tempfile.mkdtemp(prefix="breakeven-rivals-"))
    model_dir = resolve_model_dir(
        options.model, cache_dir=VerifierConfig().resolved_cache_dir, progress=lambda phase, share: None
    )
    comparison = Comparison(options)
    try:
        asyncio.run(comparison.run(model_dir))
    finally:
        comparison.write()
    rows = comparison.rows()
    print(table(rows))
    for name, reason in comparison.failed.items():
        print(f"{name} failed: {reason}")
    if rows:
        draw(rows, options.out / f"{options.name}.png")


class Comparison:
    """One run: what was measured so far, and what failed. Its result is written after every step of the plan."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.failed: dict[str, str] = {}
        self._options = options
        self._plain = PLAIN_ENGINE if options.sglang_python else PLAIN
        self._batches = [int(batch) for batch in options.batches.split(",")]
        self._cells: dict[tuple[str, int, float], list[Cell]] = {}
        self._memory: dict[str, Memory] = {}
        self._begin_s = time.monotonic()
        settings = {k: v for k, v in vars(options).items() if not isinstance(v, Path) and not k.endswith("_python")}
        self._head = {"provenance": provenance(sys.argv, seed=0), "settings": settings}

    async def run(self, model_dir: Path) -> None:
        """Start all, measure, stop all."""
        tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))

        def count_tokens(text: str) -> int:
            return len(tokenizer.encode(text, add_special_tokens=False).ids)

        async with AsyncExitStack() as stack:
            systems, failed = await start_contenders(stack, self._options, model_dir)
            self.failed |= failed
            print(f"all started after {time.monotonic() - self._begin_s:.0f} s; failed: {[*failed]}", flush=True)
            if not systems:
                raise RuntimeError("no system came up")
            await self._measure(systems, count_tokens)

    def rows(self) -> list[dict[str, Any]]:
        """What was measured so far."""
        return summarise(self._cells, self._memory, plain=self._plain)

    def write(self) -> None:
        """The result, so far."""
        self._options.out.mkdir(parents=True, exist_ok=True)
        result = {**self._head, "failed": self.failed, "rows": self.rows()}
        (self._options.out / f"{self._options.name}.json").write_text(json.dumps(result, indent=1) + "\n")

    async def _measure(self, systems: list[System], count_tokens: Callable[[str], int]) -> None:
        options = self._options
        for system in systems:
            await self._guarded(system, self._warm_up(system, count_tokens))
        temperatures = [float(temperature) for temperature in options.temperatures.split(",")]
        plan = [(b, t, repeat) for repeat in range(options.repeats) for b in self._batches for t in temperatures]
        for index, (batch, temperature, repeat) in enumerate(tqdm(plan, disable=None)):
            if time.monotonic() - self._begin_s > options.limit_s:
                break
            # Batch 1 runs all prompts one after another; a larger one takes them in turn, each with a seed of its own.
            asks = [
                _ask(i, 100 * repeat + i, temperature, options.tokens) for i in range(max(batch, len(PROMPTS) // 2))
            ]
            turn = index % len(systems)
            for system in systems[turn:] + systems[:turn]:
                if batch <= system.max_batch and system.name not in self.failed:
                    await self._guarded(system, self._step(system, batch, temperature, asks, count_tokens))
            self._memory = {s.name: Memory(mib=resident_mib(s.pids), device_mib=device_mib(s.pids)) for s in systems}
            self.write()

    async def _guarded(self, system: System, step: Coroutine[Any, Any, None]) -> None:
        try:
            async with asyncio.timeout(_CELL_LIMIT_S):
                await step
        except (RuntimeError, OSError, TimeoutError, aiohttp.ClientError) as error:
            self.failed[system.name] = f"{type(error).__name__}: {error}"

    async def _step(
        self,
        system: System,
        batch: int,
        temperature: float,
        asks: list[Ask],
        count_tokens: Callable[[str], int],
    ) -> None:
        cells = self._cells.setdefault((system.name, batch, temperature), [])
        for start in range(0, len(asks), batch):
            own = asks[start : start + batch]
            cell = await measure_cell(system.speak, own, count_tokens)
            if system.acceptance is not None:
                told = await asyncio.gather(*(system.acceptance(ask) for ask in own))
                lengths = [length for length in told if length is not None]
                cell = replace(cell, acceptance_length=sum(lengths) / len(lengths) if lengths else None)
            cells.append(cell)

    async def _warm_up(self, system: System, count_tokens: Callable[[str], int]) -> None:
        # Every batch size, long enough for what adapts: a controller that never saw a batch of four must try drafts.
        for batch in self._batches:
            for number in range(system.num_warm_ups if batch <= system.max_batch else 0):
                asks = [_ask(number + i, i, 0.0, _WARM_UP_TOKENS) for i in range(batch)]
                await measure_cell(system.speak, asks, count_tokens)


def _ask(index: int, seed: int, temperature: float, max_tokens: int) -> Ask:
    prompt = _CHAT.format(PROMPTS[index % len(PROMPTS)])
    return Ask(prompt=prompt, temperature=temperature, seed=seed, max_tokens=max_tokens)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", action="append", default=[], metavar="NAME=URL")
    parser.add_argument("--sglang-python", help="interpreter that has SGLang: breakeven's target is then SGLang")
    parser.add_argument("--sglang-args", default="", help="arguments of all three SGLang servers, separated by blanks")
    parser.add_argument("--sglang-target-args", default="", help="further ones of breakeven's target")
    parser.add_argument("--sglang-port", type=int, default=31000, help="the first of three")
    parser.add_argument("--start-timeout", type=float, default=600.0, metavar="S")
    parser.add_argument("--head", type=Path, default=Path("drafter/heads") / MODEL, help="for SGLang's own EAGLE-3")
    parser.add_argument("--tightwad-python")
    parser.add_argument("--tightwad-port", type=int, default=28088)
    parser.add_argument("--without-transformers", action="store_true")
    parser.add_argument("--device", default="cpu", help="of transformers")
    parser.add_argument("--model", default=MODEL, help="a directory, or the name of a bundled model")
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--temperatures", default="0,0.8")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="begin no further step after so long")
    parser.add_argument("--profile", default="cpu-tiny", help="of breakeven, without SGLang")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FLAG", help="passed on, e.g. drafter.num_threads=4"
    )
    parser.add_argument("--work", type=Path, help="directory of logs and sockets; default a temporary one")
    parser.add_argument("--name", default="rivals", help="of the result's files")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/rivals"))
    return parser


if __name__ == "__main__":
    main()
