"""Is the text SGLang's own? Greedy and seeded answers through the gateway, against a real SGLang that runs already.

    python -m benchmarks.sglang_identity --url URL [--tap-ring PATH --tap-socket PATH] [--lane ENDPOINT]
        [--first 0] [--prompts 16] [--tokens 128] [--concurrency 16]
        [--modes on,auto,off] [--seeded-prompts 4] [--seeded-tokens 64] [--embedded]

Greedy: SGLang's own plain answers, then the gateway's with speculation off, on and automatic, all prompts at a set
concurrency, token by token. Seeded, at temperature 0.8: speculation on against off. Each first divergence is listed
with the gap between the two ids there, in the quantity that decided: log-probability, or log-probability over
temperature plus noise. ``--embedded`` also runs the prompts on the embedded engine, to compare acceptance. Runs of one
output file add up, so that a shared machine can be taken for one slice of prompts at a time.

Not a measurement of speed, and not a test: extend and decode kernels may order two ids differently that are closer than
rounding, alone or in a batch.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from tqdm import tqdm

from benchmarks.identity import prompts
from benchmarks.provenance import provenance
from benchmarks.served import served
from wire.noise import gumbel_noise

__all__ = ["main", "summary"]

MODEL = "smollm2-135m-instruct"
NUM_DRAFTS = 3
TEMPERATURE, TOP_P = 0.8, 0.95
_NUM_LISTED = 1024
_COUNTS = ("num_rounds", "num_plain_rounds", "num_draft_tokens", "num_accepted_tokens")

Ids = list[int]
Ask = Callable[[int, Ids, int], Awaitable[Ids]]


def main(argv: Sequence[str] | None = None) -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--tap-ring", default="")
    parser.add_argument("--tap-socket", default="")
    parser.add_argument("--lane", default="", help="Endpoint of the plugin's fast lane.")
    parser.add_argument("--first", type=int, default=0, help="Number of the first prompt.")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--modes", default="on,auto,off", help="Speculation modes of the greedy answers, or none.")
    parser.add_argument("--seeded-prompts", type=int, default=4)
    parser.add_argument("--seeded-tokens", type=int, default=64)
    parser.add_argument("--embedded", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/sglang/identity.json"))
    options = parser.parse_args(argv)
    result = asyncio.run(_Comparison(options).run())
    runs = json.loads(options.out.read_text())["runs"] if options.out.exists() else []
    runs.append({"provenance": provenance(sys.argv), **result})
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"summary": summary(runs), "runs": runs}, indent=1) + "\n")


def summary(runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Rows of the same name added up."""
    sums: dict[str, dict[str, Any]] = {}
    for row in (row for run in runs for row in run["rows"]):
        total = sums.setdefault(row["name"], {"texts": 0, "divergences": []} | dict.fromkeys(_COUNTS, 0))
        for key in ("texts", *_COUNTS):
            total[key] += row[key]
        total["divergences"] += row.get("divergences", [])
    for total in sums.values():
        if total["num_rounds"]:
            total["mean_acceptance_length"] = 1 + total["num_accepted_tokens"] / total["num_rounds"]
    return sums


class _Comparison:
    """One run against one engine."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._rows: list[dict[str, Any]] = []
        self._session: aiohttp.ClientSession
        self._gateway = ""

    async def run(self) -> dict[str, Any]:
        options = self._options
        # A busy machine must change no text, and no count: nothing here is late.
        patient = {"engine.verify-timeout-s": "900", "speculation.draft-timeout-s": "900"}
        flags = {**patient, "sglang.url": options.url, "speculation.mode": "auto"}
        if options.tap_ring:
            flags |= {"sglang.tap-ring-path": options.tap_ring, "sglang.tap-socket-path": options.tap_socket}
        flags |= {"sglang.lane-endpoint": options.lane} if options.lane else {}
        async with AsyncExitStack() as stack:
            timeout = aiohttp.ClientTimeout(total=1800)
            self._session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
            self._gateway = await stack.enter_async_context(served("cpu-smollm2", flags))
            engine = await self._get(options.url + "/server_info")
            texts = prompts(options.first + options.prompts)[options.first :]
            questions = [await self._tokenize(text) for text in texts]
            if options.modes != "none":
                await self._greedy(questions)
            if options.seeded_prompts:
                await self._seeded(questions[: options.seeded_prompts])
            stats = await self._get(self._gateway + "/stats")
            counters = {"verifier": stats["verifier"]["counters"], "fallbacks": stats["speculation"]["fallbacks"]}
        if options.embedded:
            async with (
                aiohttp.ClientSession(timeout=timeout) as self._session,
                served("cpu-tiny", patient) as self._gateway,
            ):
                await self._texts("embedded, on", questions, options.tokens, self._ask({"mode": "on"}, {}))
        settings = {
            key: value for key, value in vars(options).items() if not isinstance(value, Path) and "tap" not in key
        }
        settings |= {"features": "tap" if options.tap_ring else "json", "lane": bool(options.lane)}
        versions = {key: engine.get(key) for key in ("version", "attention_backend", "dtype", "sampling_backend")}
        return {"settings": settings, "engine": versions, "rows": self._rows, "counters": counters}

    async def _greedy(self, questions: list[Ids]) -> None:
        num_tokens = self._options.tokens
        own = await self._texts("SGLang's own", questions, num_tokens, self._ask_engine)
        for mode in self._options.modes.split(","):
            name = f"greedy, {mode}"
            texts = await self._texts(name, questions, num_tokens, self._ask({"mode": mode}, {}))
            await self._compare(questions, own, texts, self._greedy_gap)

    async def _seeded(self, questions: list[Ids]) -> None:
        sampling = {"temperature": TEMPERATURE, "top_p": TOP_P}
        plain: list[Ids] = []
        for mode in ("off", "on"):
            name = f"seeded, {mode}"
            ask = self._ask({"mode": mode}, sampling)
            texts = await self._texts(name, questions, self._options.seeded_tokens, ask)
            if plain:
                await self._compare(questions, plain, texts, self._seeded_gap)
            plain = texts

    # ------------------------------------------------------------ asking

    async def _texts(self, name: str, questions: list[Ids], num_tokens: int, ask: Ask) -> list[Ids]:
        room = asyncio.Semaphore(self._options.concurrency)
        bar = tqdm(total=len(questions), desc=name, leave=False)
        before = await self._counts()
        begin = time.perf_counter()

        async def one(index: int, question: Ids) -> Ids:
            async with room:
                answer = await ask(index, question, num_tokens)
            bar.update()
            assert len(answer) == num_tokens, (name, index, len(answer))
            return answer

        answers = list(await asyncio.gather(*(one(i, question) for i, question in enumerate(questions))))
        bar.close()
        after = await self._counts()
        row: dict[str, Any] = {
            "name": name,
            "texts": len(answers),
            "tokens": num_tokens,
            "wall_s": time.perf_counter() - begin,
        }
        row |= {key: after[key] - before[key] for key in before}
        if row["num_rounds"]:
            row["mean_acceptance_length"] = 1 + row["num_accepted_tokens"] / row["num_rounds"]
        self._rows.append(row)
        print({key: value for key, value in row.items() if value}, flush=True)
        return answers

    async def _ask_engine(self, index: int, question: Ids, num_tokens: int) -> Ids:
        params = {"max_new_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True}
        answer = await self._post(self._options.url + "/generate", {"input_ids": question, "sampling_params": params})
        return list(answer["output_ids"])

    def _ask(
        self, speculation: dict[str, Any], sampling: dict[str, float]
    ) -> Callable[[int, Ids, int], Awaitable[Ids]]:
        if speculation["mode"] == "on":
            speculation = {**speculation, "num_draft_tokens": NUM_DRAFTS}

        async def ask(index: int, question: Ids, num_tokens: int) -> Ids:
            body = {
                "model": MODEL,
                "prompt": question,
                "max_tokens": num_tokens,
                "temperature": 0.0,
                "seed": self._options.first + index,
                "ignore_eos": True,
                "return_token_ids": True,
                "speculation": speculation,
                **sampling,
            }
            answer = await self._post(self._gateway + "/v1/completions", body)
            return list(answer["choices"][0]["token_ids"])

        return ask

    # ------------------------------------------------------------ comparing

    async def _compare(
        self, questions: list[Ids], own: list[Ids], ours: list[Ids], gap: Callable[..., Awaitable[float | None]]
    ) -> None:
        divergences = []
        for index, (question, a, b) in enumerate(zip(questions, own, ours, strict=True)):
            if a != b:
                at = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
                found = await gap(index, question + a[:at], a[at], b[at])
                divergences.append(
                    {"prompt": self._options.first + index, "at": at, "ids": [a[at], b[at]], "gap": found}
                )
        self._rows[-1] |= {"identical": len(own) - len(divergences), "divergences": divergences}
        print(f"  {len(own) - len(divergences)} of {len(own)} identical {divergences}", flush=True)

    async def _listed(self, ids: Ids) -> dict[int, float]:
        params = {"max_new_tokens": 1, "temperature": 0.0}
        body = {"input_ids": ids, "sampling_params": params, "return_logprob": True, "top_logprobs_num": _NUM_LISTED}
        meta = (await self._post(self._options.url + "/generate", body))["meta_info"]
        return {token_id: logprob for logprob, token_id, _ in meta["output_top_logprobs"][0]}

    async def _greedy_gap(self, index: int, ids: Ids, first: int, second: int) -> float | None:
        listed = await self._listed(ids)
        return listed[first] - listed[second] if first in listed and second in listed else None

    async def _seeded_gap(self, index: int, ids: Ids, first: int, second: int) -> float | None:
        listed = await self._listed(ids)
        if first not in listed or second not in listed:
            return None
        noise = gumbel_noise(self._options.first + index, len(ids), np.array([first, second]))
        return float((listed[first] - listed[second]) / TEMPERATURE + noise[0] - noise[1])

    # ------------------------------------------------------------ HTTP

    async def _counts(self) -> dict[str, int]:
        found = (await self._get(self._gateway + "/stats"))["speculation"]
        return {
            key: found[key] for key in ("num_rounds", "num_plain_rounds", "num_draft_tokens", "num_accepted_tokens")
        }

    async def _tokenize(self, text: str) -> Ids:
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}]}
        return list((await self._post(self._gateway + "/tokenize", body))["tokens"])

    async def _get(self, url: str) -> Any:
        async with self._session.get(url) as response:
            return await response.json()

    async def _post(self, url: str, body: Any) -> Any:
        async with self._session.post(url, json=body) as response:
            answer = await response.json()
            assert response.status == 200, (url, answer)
            return answer


if __name__ == "__main__":
    main()
